// A small pool of threads for short, frequent parallel loops. Each thread has a share of a loop's pieces, the same one in each loop of as
// many pieces: what a thread wrote in one loop it mostly finds in its own caches in the next. Who is through with his share takes from the
// others', the caller too, so a loop ends even if no other thread gets to run; which thread computes a piece never changes its result.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace sluicegate {

class ThreadPool {
public:
    static ThreadPool& instance();

    // Threads that work on a loop, the caller included. Takes effect for the next loop; call it while no loop runs.
    void resize(int num_threads);
    int size() const { return static_cast<int>(threads_.size()) + 1; }

    // Calls body(piece, thread) for each piece in [0, num_pieces). One loop at a time; callers from other threads wait.
    void run(int64_t num_pieces, const std::function<void(int64_t, int)>& body);

    ~ThreadPool();

private:
    ThreadPool();
    void stop();
    void work(int thread);
    void open_shares(int64_t num_pieces);
    void take_pieces(uint32_t loop, int thread);
    void take_share(uint32_t loop, int owner, int thread);
    uint32_t newest(int thread) const { return static_cast<uint32_t>(shares_[thread].ticket.load() >> 32); }

    // A thread's pieces of the loop, in cache lines of its own.
    struct alignas(64) Share {
        // Number of the loop in the upper half, next piece in the lower: a thread that is late can't take a piece of a later loop.
        std::atomic<uint64_t> ticket{0};
        std::atomic<uint32_t> end{0};
    };

    std::vector<std::thread> threads_;
    std::mutex callers_;
    std::mutex sleep_mutex_;
    std::condition_variable wake_;
    std::unique_ptr<Share[]> shares_;
    uint32_t loop_ = 0;
    // What threads wait for has cache lines of its own.
    alignas(64) std::atomic<int> num_sleeping_{0};
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<int64_t> num_left_{0};
    alignas(64) std::atomic<const std::function<void(int64_t, int)>*> body_{nullptr};
};

}  // namespace sluicegate
