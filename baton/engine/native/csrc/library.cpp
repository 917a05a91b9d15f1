// Which kernels this CPU can run, and the compute threads.
#include "api.h"
#include "team.h"
#include <cstring>

extern "C" {
extern const baton_kernels baton_table_portable;
#if defined(__x86_64__)
extern const baton_kernels baton_table_avx512bf16, baton_table_avx512, baton_table_avx2;
#endif

__attribute__((visibility("default"))) const baton_kernels* baton_kernels_named(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!strcmp(name, "avx512bf16"))
    return avx512 && __builtin_cpu_supports("avx512bf16") ? &baton_table_avx512bf16 : nullptr;
  if (!strcmp(name, "avx512")) return avx512 ? &baton_table_avx512 : nullptr;
  if (!strcmp(name, "avx2")) return avx2 ? &baton_table_avx2 : nullptr;
#endif
  return strcmp(name, "portable") ? nullptr : &baton_table_portable;
}

__attribute__((visibility("default"))) baton_team* baton_team_create(int32_t threads) {
  return new baton_team(threads);
}
__attribute__((visibility("default"))) void baton_team_destroy(baton_team* team) { delete team; }
}

baton_team::baton_team(int threads) : threads(threads) {
  for (int i = 1; i < threads; i++) helpers_.emplace_back(&baton_team::serve, this, i);
}

baton_team::~baton_team() {
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
