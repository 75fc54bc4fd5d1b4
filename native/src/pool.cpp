#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>

#include "forebay_native.h"

namespace forebay {
namespace {

// How often to look for work, or for the end of it, before sleeping: some 30 microseconds, the order of a
// wake-up. Longer would take cores from other threads of the trainer.
constexpr int kSpins = 1000;

void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // `yield` returns at once on most ARM cores
#endif
}

struct Job {
  Part part;
  void *context;
  int num_parts;
};

// All of it can be reset by assignment, which a forked child needs: its memory says that there are workers,
// but only the thread that called fork exists.
struct Pool {
  pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER;  // held for the whole of a job
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;   // guards sleeping and waking
  pthread_cond_t work = PTHREAD_COND_INITIALIZER;
  pthread_cond_t done = PTHREAD_COND_INITIALIZER;
  std::atomic<uint32_t> generation{0};  // one more for each job
  std::atomic<int> running{0};          // workers that have not finished the job
  Job job{};                            // written before generation, read after it
  int num_workers = 0;                  // guarded by caller
  uint32_t started_at = 0;              // the generation when the newest workers were started
};

Pool pool;
std::atomic<int> wanted_threads{0};  // 0: not decided yet

long environment_number(const char *name) {
  const char *text = getenv(name);
  return text ? strtol(text, nullptr, 10) : 0;
}

int cores_allowed() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

int clamp_threads(long n) { return static_cast<int>(n < 1 ? 1 : n > kMaxThreads ? kMaxThreads : n); }

int default_threads() {
  const long asked = environment_number("FOREBAY_NUM_THREADS");
  if (asked > 0) return clamp_threads(asked);
  const long ranks = environment_number("LOCAL_WORLD_SIZE");
  return clamp_threads(cores_allowed() / (ranks > 1 ? ranks : 1));
}

// With FOREBAY_PIN_THREADS=1, keep worker `index` on one core of the affinity mask. Ranks that share a mask take
// consecutive runs of it. Off by default: a pinned thread waits for whoever else is on its core, and a static
// split waits for the slowest thread.
void pin(int index) {
#if defined(__linux__)
  if (environment_number("FOREBAY_PIN_THREADS") != 1) return;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  long n = (environment_number("LOCAL_RANK") * num_threads() + index) % CPU_COUNT(&allowed);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || n-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
    return;
  }
#else
  (void)index;
#endif
}

uint32_t wait_for_work(uint32_t seen) {
  for (int i = 0; i < kSpins; ++i) {
    const uint32_t now = pool.generation.load(std::memory_order_acquire);
    if (now != seen) return now;
    pause_cpu();
  }
  pthread_mutex_lock(&pool.mutex);
  uint32_t now;
  while ((now = pool.generation.load(std::memory_order_acquire)) == seen) {
    pthread_cond_wait(&pool.work, &pool.mutex);
  }
  pthread_mutex_unlock(&pool.mutex);
  return now;
}

void *worker(void *argument) {
  const int index = static_cast<int>(reinterpret_cast<intptr_t>(argument));
  pin(index);
  // Nobody adds workers again before this one has reported its first job, so this is still its own start.
  uint32_t seen = pool.started_at;
  for (;;) {
    seen = wait_for_work(seen);
    // Every worker reports the end of every job, also one it has no part in, so that the next job is not
    // written while a late worker still reads this one.
    if (index < pool.job.num_parts) pool.job.part(pool.job.context, index, pool.job.num_parts);
    if (pool.running.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      pthread_mutex_lock(&pool.mutex);
      pthread_cond_signal(&pool.done);
      pthread_mutex_unlock(&pool.mutex);
    }
  }
}

void after_fork_in_child() {
  pool.caller = PTHREAD_MUTEX_INITIALIZER;
  pool.mutex = PTHREAD_MUTEX_INITIALIZER;
  pool.work = PTHREAD_COND_INITIALIZER;
  pool.done = PTHREAD_COND_INITIALIZER;
  pool.generation.store(0);
  pool.running.store(0);
  pool.num_workers = 0;
  pool.started_at = 0;
}

void start_workers(int count) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, [] { pthread_atfork(nullptr, nullptr, after_fork_in_child); });
  pool.started_at = pool.generation.load(std::memory_order_relaxed);
  sigset_t all, before;  // signals are for the threads of the application
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (pool.num_workers < count) {
    pthread_t thread;
    void *argument = reinterpret_cast<void *>(static_cast<intptr_t>(pool.num_workers + 1));
    if (pthread_create(&thread, nullptr, worker, argument) != 0) break;
    pthread_detach(thread);
    ++pool.num_workers;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

int num_threads() {
  int n = wanted_threads.load();
  if (n == 0) wanted_threads.store(n = default_threads());
  return n;
}

int set_num_threads(int n) {
  wanted_threads.store(n < 1 ? default_threads() : clamp_threads(n));
  return num_threads();
}

void run_parts(Part part, void *context, int num_parts) {
  if (num_parts <= 1) {
    pthread_mutex_lock(&pool.caller);
    part(context, 0, 1);
    pthread_mutex_unlock(&pool.caller);
    return;
  }
  pthread_mutex_lock(&pool.caller);
  if (pool.num_workers < num_parts - 1) start_workers(num_parts - 1);
  pool.job = {part, context, num_parts};
  pool.running.store(pool.num_workers, std::memory_order_relaxed);
  pthread_mutex_lock(&pool.mutex);
  pool.generation.fetch_add(1, std::memory_order_release);
  pthread_cond_broadcast(&pool.work);
  pthread_mutex_unlock(&pool.mutex);
  part(context, 0, num_parts);
  for (int i = pool.num_workers + 1; i < num_parts; ++i) part(context, i, num_parts);
  for (int i = 0; i < kSpins && pool.running.load(std::memory_order_acquire) != 0; ++i) pause_cpu();
  if (pool.running.load(std::memory_order_acquire) != 0) {
    pthread_mutex_lock(&pool.mutex);
    while (pool.running.load(std::memory_order_acquire) != 0) pthread_cond_wait(&pool.done, &pool.mutex);
    pthread_mutex_unlock(&pool.mutex);
  }
  pthread_mutex_unlock(&pool.caller);
}

}  // namespace forebay

extern "C" {

int32_t forebay_num_threads(void) { return forebay::num_threads(); }

int32_t forebay_set_threads(int32_t n) { return forebay::set_num_threads(n); }

}  // extern "C"
