// See team.h.
#include "team.h"
#include "api.h"

extern "C" {
__attribute__((visibility("default"))) baton_team* baton_team_create(int32_t threads) {
  try {
    return new baton_team(threads);
  } catch (...) {  // C, which called, knows no exceptions
    return nullptr;
  }
}
__attribute__((visibility("default"))) void baton_team_destroy(baton_team* team) { delete team; }
}

baton_team::baton_team(int threads) : threads(threads) {
  try {
    for (int i = 1; i < threads; i++) helpers_.emplace_back(&baton_team::serve, this, i);
  } catch (...) {
    dismiss();
    throw;
  }
}

baton_team::~baton_team() { dismiss(); }

void baton_team::dismiss() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& helper : helpers_) helper.join();
}

void baton_team::run(void (*work)(void*, int), void* argument) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work_ = work;
    argument_ = argument;
    round_++;
  }
  wake_.notify_all();
  work(argument, 0);
  meet();
}

void baton_team::meet() {
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    phase_.notify_all();
    return;
  }
  // Phases last microseconds: spin for about as long, then sleep, as the others may have no core to run on.
  for (int spin = 0; spin < 4096; spin++) {
    if (phase_.load(std::memory_order_acquire) != phase) return;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  while (phase_.load(std::memory_order_acquire) == phase) phase_.wait(phase, std::memory_order_acquire);
}

void baton_team::serve(int thread) {
  uint64_t seen = 0;
  for (;;) {
    void (*work)(void*, int);
    void* argument;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
      work = work_;
      argument = argument_;
    }
    work(argument, thread);
    meet();
  }
}
