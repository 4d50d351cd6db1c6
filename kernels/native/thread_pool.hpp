// A small pool of threads for short, frequent parallel loops. A loop's pieces are taken from a counter, by the caller too, so a
// loop ends even if no other thread gets to run; which thread computes a piece never changes its result.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
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
    void take_pieces(uint32_t loop, int thread);

    std::vector<std::thread> threads_;
    std::mutex callers_;
    std::mutex sleep_mutex_;
    std::condition_variable wake_;
    // Number of the loop in the upper half, next piece in the lower: a thread that is late can't take a piece of a later loop.
    // What threads wait for has cache lines of its own.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> num_sleeping_{0};
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<int64_t> num_left_{0};
    alignas(64) std::atomic<uint32_t> num_pieces_{0};
    std::atomic<const std::function<void(int64_t, int)>*> body_{nullptr};
};

}  // namespace sluicegate
