// Compute threads that run one function together, and the barrier between its phases.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

struct baton_team {
  // Throws where so many threads cannot be started; none is left behind.
  explicit baton_team(int threads);
  ~baton_team();

  // Calls work(argument, thread) on every thread, this one being thread 0, and returns when all are through.
  void run(void (*work)(void*, int), void* argument);
  // Within `run`: returns once every thread has called it.
  void meet();

  const int threads;

 private:
  void serve(int thread);
  void dismiss();  // ends the helpers

  std::vector<std::thread> helpers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  void (*work_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  uint64_t round_ = 0;
  bool stop_ = false;
  std::atomic<int> arrived_{0};
  std::atomic<uint32_t> phase_{0};
};
