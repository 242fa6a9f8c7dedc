// Threads of the kernels' own. Those of OpenMP, which torch has, wait for each other busily: where another program runs on a core, the
// thread that is done spends its own share of the machine on waiting for the one that is not (libgomp: for milliseconds, at every product).
// And they take equal parts of the work, however much of its core each gets.
//
// Here the work lies in items that whoever is free takes next, and nobody waits for a thread that has not taken any. Who waits does so
// busily for some microseconds, within which a decoder's next step follows, and then sleeps.

#pragma once

#include <ATen/Parallel.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>

namespace repro {

constexpr int64_t kWorthAThread = 16384;  // multiplications: some microseconds, what waking another thread takes
constexpr std::chrono::microseconds kBusily{50};

class Threads {
 public:
  // The process's. A forked child has none of its parent's threads, so it begins anew; what was there is left as it is.
  static Threads& all() {
    static const bool follows_forks = pthread_atfork(nullptr, nullptr, [] { held().store(new Threads); }) == 0;
    (void)follows_forks;
    return *held().load();
  }

  // body(item) for items 0 ... items - 1, fewer than 2^32, by the caller and up to `threads` - 1 others. Throws the first that a body
  // throws, when all are done. By the caller alone while another call is on.
  template <typename F>
  void each(int64_t items, int64_t threads, F&& body) {
    std::unique_lock<std::mutex> lock(one_call_, std::defer_lock);
    if (items < 2 || threads < 2 || !lock.try_lock()) {
      for (int64_t item = 0; item < items; item++) body(item);
      return;
    }
    for (; started_ < threads - 1; started_++) std::thread(&Threads::serve, this, started_).detach();
    // All of a call is there before its ticket is, and stays until its items are done.
    call_.store([](void* of, int64_t item) { (*static_cast<std::remove_reference_t<F>*>(of))(item); }, std::memory_order_relaxed);
    body_.store(const_cast<void*>(static_cast<const void*>(&body)), std::memory_order_relaxed);
    others_.store(threads - 1, std::memory_order_relaxed);
    undone_.store(static_cast<uint32_t>(items), std::memory_order_relaxed);
    const uint32_t number = number_.load(std::memory_order_relaxed) + 1;
    ticket_.store(static_cast<uint64_t>(number) << 32 | static_cast<uint32_t>(items));
    number_.store(number);
    number_.notify_all();
    take(number);
    for (uint32_t undone; (undone = undone_.load(std::memory_order_acquire)) != 0;) wait_while(undone_, undone);
    if (auto error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }

 private:
  static std::atomic<Threads*>& held() {
    static std::atomic<Threads*> one{new Threads};
    return one;
  }

  static void wait_while(std::atomic<uint32_t>& value, uint32_t old) {
    const auto until = std::chrono::steady_clock::now() + kBusily;
    while (value.load(std::memory_order_acquire) == old) {
      for (int i = 0; i < 8; i++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
      if (std::chrono::steady_clock::now() > until) value.wait(old);
    }
  }

  [[noreturn]] void serve(int64_t which) {
    for (uint32_t seen = 0;;) {
      wait_while(number_, seen);
      seen = number_.load();
      if (which < others_.load(std::memory_order_relaxed)) take(seen);
    }
  }

  // Items of call `number`, the last first, until none is left or the call is over. An exchange that succeeds tells that this item was
  // still to be taken, so that what was read before it is this call's.
  void take(uint32_t number) {
    uint32_t done = 0;
    for (uint64_t ticket = ticket_.load(); ticket >> 32 == number && (ticket & 0xffffffff) != 0;) {
      const auto call = call_.load(std::memory_order_relaxed);
      void* const body = body_.load(std::memory_order_relaxed);
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1)) continue;
      try {
        call(body, (ticket & 0xffffffff) - 1);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(first_error_);
        if (!error_) error_ = std::current_exception();
      }
      done++;
      ticket = ticket_.load();
    }
    if (done > 0 && undone_.fetch_sub(done) == done) undone_.notify_one();
  }

  std::mutex one_call_, first_error_;
  std::exception_ptr error_;
  int64_t started_ = 0;
  std::atomic<void (*)(void*, int64_t)> call_{nullptr};
  std::atomic<void*> body_{nullptr};
  std::atomic<int64_t> others_{0};
  alignas(64) std::atomic<uint64_t> ticket_{0};    // the call's number, and how many of its items nobody has taken
  alignas(64) std::atomic<uint32_t> number_{0};  // of the call
  alignas(64) std::atomic<uint32_t> undone_{0};  // items
};

// Calls body(item) for all items, which together take `work` multiplications, on as many of torch's number of threads as that is worth.
// Neighbours are taken together where one is too little: whoever takes items pays for it as often as another core has taken some since.
template <typename F>
void each(int64_t items, int64_t work, F&& body) {
  const int64_t groups = std::min(items, 1 + work / kWorthAThread);
  Threads::all().each(groups, std::min<int64_t>(groups, at::get_num_threads()), [&](int64_t group) {
    for (int64_t item = items * group / groups; item < items * (group + 1) / groups; item++) body(item);
  });
}

}  // namespace repro
