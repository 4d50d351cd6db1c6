#include "thread_pool.hpp"

#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sluicegate {

namespace {

// Some 200 us: longer than what a step does in one thread. A core that has gone to sleep takes as long to be woken as several ops take.
constexpr int kSpins = 16000;

constexpr uint32_t kNoPiece = 0xffffffff;

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

int available_cores() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return 1;
}

}  // namespace

ThreadPool& ThreadPool::instance() {
    static ThreadPool pool;
    return pool;
}

ThreadPool::ThreadPool() { resize(available_cores()); }

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    {
        std::lock_guard lock(sleep_mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
    stopping_ = false;
}

void ThreadPool::resize(int num_threads) {
    std::lock_guard lock(callers_);
    stop();
    for (int thread = 1; thread < num_threads; ++thread) {
        threads_.emplace_back([this, thread] { work(thread); });
    }
}

void ThreadPool::run(int64_t num_pieces, const std::function<void(int64_t, int)>& body) {
    if (num_pieces <= 0) return;
    std::lock_guard lock(callers_);
    if (threads_.empty() || num_pieces == 1) {
        for (int64_t piece = 0; piece < num_pieces; ++piece) body(piece, 0);
        return;
    }
    const uint64_t before = ticket_.load() >> 32;
    const auto loop = static_cast<uint32_t>(before + 1);
    // Close the loop before: a thread that is late in it may have read its last ticket, and would find that this loop's number of
    // pieces allows one more. Its exchange fails now, since the ticket has changed.
    ticket_.store((before << 32) | kNoPiece);
    body_.store(&body);
    num_pieces_.store(static_cast<uint32_t>(num_pieces));
    num_left_.store(num_pieces);
    ticket_.store(static_cast<uint64_t>(loop) << 32);
    if (num_sleeping_.load() > 0) {
        { std::lock_guard sleepers(sleep_mutex_); }
        wake_.notify_all();
    }
    take_pieces(loop, 0);
    for (int spins = 0; num_left_.load(std::memory_order_acquire) != 0; ++spins) {
        if (spins < kSpins) relax();
        else sched_yield();
    }
}

void ThreadPool::take_pieces(uint32_t loop, int thread) {
    uint64_t ticket = ticket_.load();
    for (;;) {
        const auto piece = static_cast<uint32_t>(ticket);
        if (static_cast<uint32_t>(ticket >> 32) != loop || piece >= num_pieces_.load()) return;
        // If the exchange succeeds, the loop is still the one seen and cannot end before this piece has: its body lives.
        const auto* body = body_.load();
        if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;
        (*body)(piece, thread);
        num_left_.fetch_sub(1, std::memory_order_acq_rel);
        ticket = ticket_.load();
    }
}

void ThreadPool::work(int thread) {
    auto seen = static_cast<uint32_t>(ticket_.load() >> 32);
    const auto has_news = [&] { return static_cast<uint32_t>(ticket_.load() >> 32) != seen || stopping_.load(); };
    for (;;) {
        for (int spins = 0; !has_news(); ++spins) {
            if (spins < kSpins) {
                relax();
                continue;
            }
            std::unique_lock lock(sleep_mutex_);
            num_sleeping_.fetch_add(1);
            wake_.wait(lock, has_news);
            num_sleeping_.fetch_sub(1);
        }
        if (stopping_.load()) return;
        seen = static_cast<uint32_t>(ticket_.load() >> 32);
        take_pieces(seen, thread);
    }
}

}  // namespace sluicegate
