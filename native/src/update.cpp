// forebay_update: check the task, compute the scalars of each segment, share the elements among the threads.
#include <math.h>
#include <string.h>
#include <time.h>

#include "kernels.h"
#include "pool.h"

namespace forebay {
namespace {

// Threads get whole runs of this many elements, so that no two write one cache line and vector loops stay full.
constexpr int64_t kGrain = 1024;
// Fewer elements than this per thread cost more in waking the thread than they save.
constexpr int64_t kMinPerThread = 16384;

// What the threads need to know about a segment; kept in its scratch, so that nothing is allocated.
struct Plan {
  Scalars scalars;
  float next_step;
  Kernel kernel;
  uint64_t key;
};
static_assert(sizeof(Plan) <= sizeof(forebay_segment::scratch), "scratch is too small");

bool has_momentum(const forebay_task &task, const forebay_segment &s) {
  return task.algorithm != FOREBAY_SGD || s.hyper->momentum != 0.0;
}

bool is_dtype(int32_t dtype) { return dtype >= FOREBAY_FLOAT32 && dtype <= FOREBAY_FLOAT16; }

int32_t check(const forebay_task &task, const forebay_segment &s) {
  if (s.num_elements < 0 || s.first_element < 0) return FOREBAY_BAD_SIZE;
  if (!is_dtype(s.grad_dtype) || !is_dtype(s.param_dtype)) return FOREBAY_BAD_DTYPE;
  if (s.state_dtype != FOREBAY_FLOAT32 && s.state_dtype != FOREBAY_BFLOAT16) return FOREBAY_BAD_DTYPE;
  if (s.master_kind < FOREBAY_MASTER_NONE || s.master_kind > FOREBAY_MASTER_FLOAT32) return FOREBAY_BAD_MASTER;
  if (s.master_kind == FOREBAY_MASTER_REMAINDER16 && s.param_dtype != FOREBAY_BFLOAT16) {
    return FOREBAY_BAD_MASTER;
  }
  const bool is_adam = task.algorithm == FOREBAY_ADAMW || task.algorithm == FOREBAY_ADAM;
  if (!s.hyper || (is_adam && !s.step)) return FOREBAY_NULL_POINTER;
  if (s.num_elements == 0) return FOREBAY_OK;
  if (!s.grad || !s.param || (s.master_kind != FOREBAY_MASTER_NONE && !s.master)) return FOREBAY_NULL_POINTER;
  if ((has_momentum(task, s) && !s.state1) || (is_adam && !s.state2)) return FOREBAY_NULL_POINTER;
  return FOREBAY_OK;
}

int32_t check(const forebay_task &task, int32_t *failed_segment) {
  *failed_segment = -1;
  if (task.num_segments < 0 || (task.num_segments > 0 && !task.segments)) return FOREBAY_BAD_TASK;
  if (task.algorithm < FOREBAY_ADAMW || task.algorithm > FOREBAY_LION) return FOREBAY_BAD_ALGORITHM;
  if (!kernels()) return FOREBAY_BAD_INSTRUCTION_SET;
  for (int32_t i = 0; i < task.num_segments; ++i) {
    const int32_t status = check(task, task.segments[i]);
    if (status != FOREBAY_OK) {
      *failed_segment = i;
      return status;
    }
  }
  return FOREBAY_OK;
}

// SplitMix64's finalizer (Steele et al., 2014), to spread seeds and steps that differ in a few bits.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// By squaring, so that the update on the device can take the same steps and get the same bits, which two libraries'
// pow do not promise.
double power(double base, double exponent) {
  double result = 1.0;
  for (uint64_t n = static_cast<uint64_t>(exponent); n; n >>= 1, base *= base) {
    if (n & 1) result *= base;
  }
  return result;
}

Plan make_plan(const forebay_task &task, const KernelTable &table, const forebay_segment &s, float grad_scale) {
  const forebay_hyper &h = *s.hyper;
  const float step = s.step ? *s.step : 0.0f;
  const double t = static_cast<double>(step) + 1.0;
  const bool is_adam = task.algorithm == FOREBAY_ADAMW || task.algorithm == FOREBAY_ADAM;
  const bool is_decoupled = task.algorithm == FOREBAY_ADAMW || task.algorithm == FOREBAY_LION;

  Plan plan{};
  Scalars &c = plan.scalars;
  c.grad_scale = h.maximize ? -grad_scale : grad_scale;
  c.decay = is_decoupled ? static_cast<float>(1.0 - h.lr * h.weight_decay) : 1.0f;
  c.l2 = is_decoupled ? 0.0f : static_cast<float>(h.weight_decay);
  c.has_l2 = !is_decoupled && h.weight_decay != 0.0;
  c.beta1 = static_cast<float>(h.beta1);
  c.one_minus_beta1 = static_cast<float>(1.0 - h.beta1);
  c.beta2 = static_cast<float>(h.beta2);
  c.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
  // torch.lerp starts from the nearer end.
  c.lerp_from_grad = c.one_minus_beta1 >= 0.5f;
  c.lerp_weight = c.lerp_from_grad ? -c.beta1 : c.one_minus_beta1;
  c.eps = static_cast<float>(h.eps);
  c.momentum = static_cast<float>(h.momentum);
  c.one_minus_dampening = static_cast<float>(1.0 - h.dampening);
  c.has_momentum = has_momentum(task, s);
  c.is_first = s.step && step == 0.0f;
  c.is_nesterov = h.nesterov != 0;
  c.minus_step_size = static_cast<float>(-h.lr);
  if (is_adam) {
    c.minus_step_size = static_cast<float>(-(h.lr / (1.0 - power(h.beta1, t))));
    c.bias2_inverse_sqrt = static_cast<float>(1.0 / sqrt(1.0 - power(h.beta2, t)));
  }

  const int rule = is_adam ? kAdam : task.algorithm == FOREBAY_SGD ? kSgd : kLion;
  const int weight = s.master_kind == FOREBAY_MASTER_NONE          ? s.param_dtype
                     : s.master_kind == FOREBAY_MASTER_REMAINDER16 ? static_cast<int>(kRemainder16)
                                                                   : kMasterFloat32 + s.param_dtype;
  plan.kernel = table.kernels[rule][s.grad_dtype][weight][s.state_dtype];
  plan.next_step = static_cast<float>(t);
  uint32_t step_bits;
  memcpy(&step_bits, &step, sizeof step_bits);
  plan.key = mix(mix(s.seed) ^ step_bits);
  return plan;
}

Plan plan_of(const forebay_segment &s) {
  Plan plan;
  memcpy(&plan, s.scratch, sizeof plan);
  return plan;
}

// Elements [begin, end) of a segment, in pieces whose upper 32 index bits are the same.
void run_range(const forebay_segment &s, int64_t begin, int64_t end) {
  const Plan plan = plan_of(s);
  while (begin < end) {
    const uint64_t index = static_cast<uint64_t>(s.first_element + begin);
    const int64_t left = static_cast<int64_t>((UINT64_C(1) << 32) - (index & 0xffffffffu));
    const int64_t stop = end - begin > left ? begin + left : end;
    const uint64_t key = mix(plan.key ^ (index >> 32));
    plan.kernel({&s, &plan.scalars, begin, stop, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)});
    begin = stop;
  }
}

int64_t total_elements(const forebay_task &task) {
  int64_t total = 0;
  for (int32_t i = 0; i < task.num_segments; ++i) total += task.segments[i].num_elements;
  return total;
}

// Where element `boundary` of the whole task lies in a segment that starts at `start`, on a grain.
int64_t local_boundary(int64_t boundary, int64_t start, int64_t num_elements) {
  const int64_t local = boundary - start;
  if (local <= 0) return 0;
  return local >= num_elements ? num_elements : local - local % kGrain;
}

// A thread takes one contiguous share of all elements, the same one in every run: the pages that it touched
// first, on its NUMA node, stay its own.
template <class F> void for_own_ranges(const forebay_task &task, int part, int num_parts, F &&handle) {
  const int64_t total = total_elements(task);
  const int64_t share = total / num_parts, rest = total % num_parts;
  const auto boundary = [=](int64_t k) { return k * share + (k < rest ? k : rest); };
  int64_t start = 0;
  for (int32_t i = 0; i < task.num_segments; ++i) {
    const forebay_segment &s = task.segments[i];
    handle(s, local_boundary(boundary(part), start, s.num_elements),
           local_boundary(boundary(part + 1), start, s.num_elements));
    start += s.num_elements;
  }
}

void update_part(void *context, int part, int num_parts) {
  for_own_ranges(*static_cast<const forebay_task *>(context), part, num_parts, run_range);
}

void copy_field(const void *from, void *to, int64_t begin, int64_t end, int64_t element_bytes) {
  if (!from || !to || begin == end) return;
  memcpy(static_cast<char *>(to) + begin * element_bytes, static_cast<const char *>(from) + begin * element_bytes,
         static_cast<size_t>((end - begin) * element_bytes));
}

// The outputs become what the inputs are: an update that did not happen.
void copy_part(void *context, int part, int num_parts) {
  for_own_ranges(*static_cast<const forebay_task *>(context), part, num_parts,
                 [](const forebay_segment &s, int64_t begin, int64_t end) {
                   const int64_t state_bytes = s.state_dtype == FOREBAY_FLOAT32 ? 4 : 2;
                   copy_field(s.param, s.param_out, begin, end, s.param_dtype == FOREBAY_FLOAT32 ? 4 : 2);
                   if (s.master_kind != FOREBAY_MASTER_NONE) {
                     copy_field(s.master, s.master_out, begin, end,
                                s.master_kind == FOREBAY_MASTER_REMAINDER16 ? 2 : 4);
                   }
                   copy_field(s.state1, s.state1_out, begin, end, state_bytes);
                   copy_field(s.state2, s.state2_out, begin, end, state_bytes);
                 });
}

void run_on_threads(forebay_task &task, void (*work)(void *, int, int)) {
  const int64_t useful = total_elements(task) / kMinPerThread;
  const int threads = num_threads();
  run_parts(work, &task, useful < 1 ? 1 : useful < threads ? static_cast<int>(useful) : threads);
}

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

bool is_valid(forebay_task &task) {
  int32_t failed_segment;
  const int32_t status = check(task, &failed_segment);
  if (status != FOREBAY_OK && task.status == FOREBAY_OK) {
    task.failed_segment = failed_segment;
    __atomic_store_n(&task.status, status, __ATOMIC_RELEASE);  // Python may be looking
  }
  return status == FOREBAY_OK;
}

bool is_skipped(const forebay_task &task) { return task.found_inf && *task.found_inf != 0.0f; }

float scale_of(const forebay_task &task) { return task.grad_scale ? *task.grad_scale : 1.0f; }

void count(uint64_t *counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELEASE); }

void run_update(forebay_task &task) {
  const float grad_scale = scale_of(task);
  for (int32_t i = 0; i < task.num_segments; ++i) {
    forebay_segment &s = task.segments[i];
    const Plan plan = make_plan(task, *kernels(), s, grad_scale);
    memcpy(s.scratch, &plan, sizeof plan);
  }
  run_on_threads(task, update_part);
  for (int32_t i = 0; i < task.num_segments; ++i) {
    const forebay_segment &s = task.segments[i];
    if (s.step) *(s.step_out ? s.step_out : s.step) = plan_of(s).next_step;
  }
}

void update(forebay_task &task) {
  const uint64_t start_ns = now_ns();
  if (!is_valid(task)) return;
  if (is_skipped(task)) return count(&task.num_skipped);
  run_update(task);
  task.busy_ns += now_ns() - start_ns;
  count(&task.num_runs);
}

void resolve(forebay_task &task) {
  const uint64_t start_ns = now_ns();
  if (!is_valid(task)) return;
  const bool skipped = is_skipped(task);
  if (!skipped && scale_of(task) == 1.0f) return count(&task.num_kept);
  if (skipped) {
    run_on_threads(task, copy_part);
    for (int32_t i = 0; i < task.num_segments; ++i) {
      const forebay_segment &s = task.segments[i];
      if (s.step && s.step_out) *s.step_out = *s.step;
    }
  } else {
    run_update(task);
  }
  task.busy_ns += now_ns() - start_ns;
  count(skipped ? &task.num_skipped : &task.num_runs);
}

struct Stream {
  int32_t kind;
  uint64_t *destination;
  const uint64_t *source;
  int64_t num_words;
};

void stream_part(void *context, int part, int num_parts) {
  const Stream &s = *static_cast<const Stream *>(context);
  const int64_t begin = s.num_words * part / num_parts, end = s.num_words * (part + 1) / num_parts;
  if (s.kind == FOREBAY_STREAM_COPY) {
    memcpy(s.destination + begin, s.source + begin, static_cast<size_t>(end - begin) * sizeof(uint64_t));
  } else {
    for (int64_t i = begin; i < end; ++i) s.destination[i] += 1;
  }
}

double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace
}  // namespace forebay

extern "C" {

int32_t forebay_abi_version(void) { return FOREBAY_ABI_VERSION; }

int64_t forebay_struct_size(int32_t which) {
  const int64_t sizes[] = {sizeof(forebay_hyper), sizeof(forebay_segment), sizeof(forebay_task)};
  return which >= 0 && which < 3 ? sizes[which] : -1;
}

void forebay_update(void *task) {
  if (task) forebay::update(*static_cast<forebay_task *>(task));
}

void forebay_resolve(void *task) {
  if (task) forebay::resolve(*static_cast<forebay_task *>(task));
}

void forebay_delay(void *nanoseconds) {
  const int64_t n = nanoseconds ? *static_cast<const int64_t *>(nanoseconds) : 0;
  if (n <= 0) return;
  timespec left = {static_cast<time_t>(n / 1000000000), static_cast<long>(n % 1000000000)};
  while (nanosleep(&left, &left) != 0) {
  }
}

double forebay_stream_bandwidth(int32_t kind, void *destination, const void *source, int64_t num_bytes,
                                int32_t repeats) {
  const bool is_copy = kind == FOREBAY_STREAM_COPY;
  if ((!is_copy && kind != FOREBAY_STREAM_UPDATE) || !destination || (is_copy && !source)) return -1.0;
  if (num_bytes < 8 || repeats < 1) return -1.0;
  forebay::Stream stream = {kind, static_cast<uint64_t *>(destination), static_cast<const uint64_t *>(source),
                            num_bytes / 8};
  double best = 0.0;
  for (int32_t i = 0; i < repeats; ++i) {
    const double start = forebay::seconds();
    forebay::run_parts(forebay::stream_part, &stream, forebay::num_threads());
    const double rate = 2.0 * 8.0 * static_cast<double>(stream.num_words) / (forebay::seconds() - start);
    if (rate > best) best = rate;
  }
  return best;
}

}  // extern "C"
