#include "thread_pool.hpp"

#include <sched.h>

#include <algorithm>

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
    loop_ = 0;
    shares_ = std::make_unique<Share[]>(static_cast<size_t>(std::max(num_threads, 1)));
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
    body_.store(&body);
    num_left_.store(num_pieces);
    open_shares(num_pieces);
    if (num_sleeping_.load() > 0) {
        { std::lock_guard sleepers(sleep_mutex_); }
        wake_.notify_all();
    }
    take_pieces(loop_, 0);
    for (int spins = 0; num_left_.load(std::memory_order_acquire) != 0; ++spins) {
        if (spins < kSpins) relax();
        else sched_yield();
    }
}

void ThreadPool::open_shares(int64_t num_pieces) {
    const uint64_t before = loop_;
    ++loop_;
    for (int64_t thread = 0; thread < size(); ++thread) {
        Share& share = shares_[thread];
        // Close the loop before: a thread that is late in it may have read its last ticket, and would find that this loop's end allows one
        // more. Its exchange fails now, since the ticket has changed.
        share.ticket.store((before << 32) | kNoPiece);
        share.end.store(static_cast<uint32_t>(num_pieces * (thread + 1) / size()));
        share.ticket.store((static_cast<uint64_t>(loop_) << 32) | static_cast<uint32_t>(num_pieces * thread / size()));
    }
}

void ThreadPool::take_pieces(uint32_t loop, int thread) {
    for (int other = 0; other < size(); ++other) take_share(loop, (thread + other) % size(), thread);
}

void ThreadPool::take_share(uint32_t loop, int owner, int thread) {
    Share& share = shares_[owner];
    uint64_t ticket = share.ticket.load();
    for (;;) {
        const auto piece = static_cast<uint32_t>(ticket);
        if (static_cast<uint32_t>(ticket >> 32) != loop || piece >= share.end.load()) return;
        // If the exchange succeeds, the loop is still the one seen and cannot end before this piece has: its body lives.
        const auto* body = body_.load();
        if (!share.ticket.compare_exchange_weak(ticket, ticket + 1)) continue;
        (*body)(piece, thread);
        num_left_.fetch_sub(1, std::memory_order_acq_rel);
        ticket = share.ticket.load();
    }
}

void ThreadPool::work(int thread) {
    uint32_t seen = 0;
    const auto has_news = [&] { return newest(thread) != seen || stopping_.load(); };
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
        seen = newest(thread);
        take_pieces(seen, thread);
    }
}

}  // namespace sluicegate
