/* libforebay_native: optimizer updates on the host, behind a plain C ABI.
 *
 * One task updates one chunk: an array of segments (a tensor or a piece of one each). forebay_update has the
 * signature of a cudaHostFn_t, so a CUDA stream can run a task between two copies with cudaLaunchHostFunc;
 * it allocates nothing, throws nothing and calls no Python.
 *
 * All instruction sets, any number of threads and any split of a tensor into segments give bitwise the same
 * result: every operation is a single IEEE operation in fp32 (fused multiply-add where the formulas below
 * say fma), in the order given, with nothing contracted or approximated. Only the payload of a NaN may differ.
 *
 * g is the gradient in fp32, times grad_scale, negated if `maximize`. p is the master weight in fp32. Scalars are
 * computed in double and rounded to fp32 once per segment and run. t is the step being made, 1 for the first.
 *   ADAMW  p *= 1 - lr*weight_decay                               (torch.optim.AdamW)
 *   ADAM   g = fma(weight_decay, p, g), if weight_decay != 0      (torch.optim.Adam)
 *   both   m = m + (g-m)*(1-beta1), or g + (g-m)*-beta1 if 1-beta1 >= 0.5
 *          v = v*beta2 + (g*(1-beta2))*g
 *          p = p + (-lr/(1-beta1^t) * m) / (sqrt(v)/sqrt(1-beta2^t) + eps)
 *   SGD    g = fma(weight_decay, p, g), if weight_decay != 0      (torch.optim.SGD)
 *          with momentum: m = first step ? g : fma(1-dampening, g, momentum*m);
 *                         g = nesterov ? fma(momentum, m, g) : m
 *          p = fma(-lr, g, p)
 *   LION   u = sign(fma(beta1, m, (1-beta1)*g));  m = fma(beta2, m, (1-beta2)*g)
 *          p = fma(-lr, u, p * (1 - lr*weight_decay))             (Chen et al., arXiv 2302.06675)
 */
#ifndef FOREBAY_NATIVE_H
#define FOREBAY_NATIVE_H

#include <stdint.h>

#if defined(__GNUC__)
#define FOREBAY_API __attribute__((visibility("default")))
#else
#define FOREBAY_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised by one whenever a struct, a code or the meaning of a field changes. */
#define FOREBAY_ABI_VERSION 3

typedef enum { FOREBAY_FLOAT32 = 0, FOREBAY_BFLOAT16 = 1, FOREBAY_FLOAT16 = 2 } forebay_dtype;

typedef enum { FOREBAY_ADAMW = 0, FOREBAY_ADAM = 1, FOREBAY_SGD = 2, FOREBAY_LION = 3 } forebay_algorithm;

typedef enum {
  /* The param is its own master. In bf16 or fp16 it is read, updated in fp32 and rounded to nearest even. */
  FOREBAY_MASTER_NONE = 0,
  /* The param is bf16 and `master` an int16 remainder: the bits of the fp32 master are
   * (param bits << 16) + remainder. Lossless; the param is the master rounded half away from zero. */
  FOREBAY_MASTER_REMAINDER16 = 1,
  /* `master` is fp32. The param is only written: the master rounded to nearest even. */
  FOREBAY_MASTER_FLOAT32 = 2
} forebay_master;

typedef enum {
  FOREBAY_OK = 0,
  FOREBAY_BAD_TASK = 1,       /* null task or segments, or a negative number of segments */
  FOREBAY_BAD_ALGORITHM = 2,
  FOREBAY_BAD_SIZE = 3,       /* negative num_elements or first_element */
  FOREBAY_NULL_POINTER = 4,   /* a pointer that this algorithm, master or hyperparameter needs */
  FOREBAY_BAD_DTYPE = 5,      /* unknown dtype, or a state that is neither fp32 nor bf16 */
  FOREBAY_BAD_MASTER = 6,     /* unknown master kind, or REMAINDER16 with a param that is not bf16 */
  FOREBAY_BAD_INSTRUCTION_SET = 7 /* FOREBAY_NATIVE_ISA names one that this CPU or build does not have */
} forebay_status;

typedef struct {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double momentum;  /* SGD */
  double dampening; /* SGD */
  int32_t nesterov; /* SGD */
  int32_t maximize;
} forebay_hyper;

/* An `..._out` pointer of NULL means in place. Otherwise the input is left as it is and the output memory must
 * not overlap any input. Pointers need the alignment of their dtype only. */
typedef struct {
  int64_t num_elements;
  int64_t first_element; /* index of the first element in the whole tensor, for stochastic rounding */
  const void *grad;
  void *param;
  void *param_out;
  void *master; /* int16_t or float, see forebay_master; ignored with FOREBAY_MASTER_NONE */
  void *master_out;
  void *state1; /* ADAM(W), LION: exp_avg. SGD: momentum buffer, not needed when momentum is 0 */
  void *state1_out;
  void *state2; /* ADAM(W): exp_avg_sq */
  void *state2_out;
  /* Updates made so far, a float like torch's; one more is written. All steps of a task are read before any is
   * written, so segments of one tensor may share it. May be NULL for SGD (then no step counts as the
   * first: the momentum buffer is always read) and for LION. */
  float *step;
  float *step_out;
  const forebay_hyper *hyper;
  uint64_t seed;       /* of stochastic rounding; give each tensor its own */
  int32_t grad_dtype;  /* forebay_dtype */
  int32_t param_dtype; /* forebay_dtype */
  int32_t master_kind; /* forebay_master */
  int32_t state_dtype; /* forebay_dtype: FLOAT32, or BFLOAT16 with stochastic rounding */
  uint64_t scratch[12]; /* the library's own, need not be initialized */
} forebay_segment;

typedef struct {
  int32_t algorithm; /* forebay_algorithm */
  int32_t num_segments;
  forebay_segment *segments;
  const float *grad_scale; /* read when the task runs. NULL: 1 */
  const float *found_inf;  /* read when the task runs; nonzero or NaN: nothing at all is changed. NULL: 0 */
  int32_t status;          /* forebay_status of the first run that failed; cleared by the caller only */
  int32_t failed_segment;  /* the segment it is about, or -1 */
  uint64_t num_runs;       /* runs that updated */
  uint64_t num_skipped;    /* runs that found_inf skipped */
  uint64_t num_kept;       /* runs of forebay_resolve that left the outputs as they were */
  uint64_t busy_ns;        /* time that the runs took, added up */
} forebay_task;

/* Run a forebay_task. Any thread may call; calls are carried out one after the other. */
FOREBAY_API void forebay_update(void *task);

/* Settle an update whose outputs forebay_update wrote, separate from its inputs, before grad_scale and found_inf were
 * known (that task has neither): nothing is to be done if they let the gradients be as they are; with another scale
 * the update is made again; found_inf makes the outputs copies of the inputs. */
FOREBAY_API void forebay_resolve(void *task);

/* Sleep for the nanoseconds in the int64_t that the argument points at: a slow host task, for tests. */
FOREBAY_API void forebay_delay(void *nanoseconds);

FOREBAY_API int32_t forebay_abi_version(void);

/* Size in bytes of the structs, so that a binding can check its own layout: 0 hyper, 1 segment, 2 task. */
FOREBAY_API int64_t forebay_struct_size(int32_t which);

/* "avx512", "avx2", "neon" or "scalar": the best that the CPU has, or what FOREBAY_NATIVE_ISA asks for. NULL when
 * that is not available. */
FOREBAY_API const char *forebay_instruction_set(void);

/* Use another instruction set from now on. Returns 0, or -1 when it is not available (nothing changes). */
FOREBAY_API int32_t forebay_set_instruction_set(const char *name);

/* Threads that share an update, the calling one included. Default: FOREBAY_NUM_THREADS, else the cores of the
 * process's affinity mask divided by LOCAL_WORLD_SIZE. `set` returns the number in effect; n < 1 restores the
 * default. */
FOREBAY_API int32_t forebay_num_threads(void);
FOREBAY_API int32_t forebay_set_threads(int32_t n);

typedef enum {
  FOREBAY_STREAM_COPY = 0,  /* memcpy from source to destination */
  FOREBAY_STREAM_UPDATE = 1 /* read and write destination in place; source is not used */
} forebay_stream_kind;

/* Bytes per second, read and written ones both counted, of the best of `repeats` passes with the same
 * threads and split as updates use. -1 on a bad argument. */
FOREBAY_API double forebay_stream_bandwidth(int32_t kind, void *destination, const void *source,
                                            int64_t num_bytes, int32_t repeats);

#ifdef __cplusplus
}
#endif

#endif /* FOREBAY_NATIVE_H */
