// The update rules, written once over the operations of a simd_*.h and compiled once per instruction set.
#pragma once

#include "kernels.h"
#include "simd_scalar.h"

namespace {

using namespace forebay;

// Outputs of shorter ranges than this (0.5 MiB of bf16) may still be in the cache when they are read.
constexpr int64_t kBypassElements = 1 << 18;

template <class V> typename V::I round_to_bf16(typename V::F a) {
  const auto u = V::bits(a);
  const auto odd = V::iand(V::template shr<16>(u), V::iset(1));
  const auto rounded = V::template shr<16>(V::iadd(V::iadd(u, V::iset(0x7fff)), odd));
  // Rounding could carry a NaN into infinity or zero, so it is cut off instead, with the quiet bit set.
  return V::iselect(V::is_nan(a), V::ior(V::template shr<16>(u), V::iset(0x40)), rounded);
}

template <class V> typename V::F load_bf16(const uint16_t *p) {
  return V::from_bits(V::template shl<16>(V::load_u16(p)));
}

template <class V, int dtype> typename V::F load(const void *base, int64_t i) {
  if constexpr (dtype == FOREBAY_FLOAT32) return V::load(static_cast<const float *>(base) + i);
  if constexpr (dtype == FOREBAY_BFLOAT16) return load_bf16<V>(static_cast<const uint16_t *>(base) + i);
  if constexpr (dtype == FOREBAY_FLOAT16) return V::load_f16(static_cast<const uint16_t *>(base) + i);
}

template <class V, int dtype, bool nt> void store(void *base, int64_t i, typename V::F a) {
  if constexpr (dtype == FOREBAY_FLOAT32) V::template store<nt>(static_cast<float *>(base) + i, a);
  if constexpr (dtype == FOREBAY_BFLOAT16) {
    V::template store_u16<nt>(static_cast<uint16_t *>(base) + i, round_to_bf16<V>(a));
  }
  if constexpr (dtype == FOREBAY_FLOAT16) V::template store_f16<nt>(static_cast<uint16_t *>(base) + i, a);
}

// Where a range reads and writes, with in-place outputs resolved.
struct Pointers {
  const void *grad, *param, *master, *state1, *state2;
  void *param_out, *master_out, *state1_out, *state2_out;

  explicit Pointers(const forebay_segment &s)
      : grad(s.grad), param(s.param), master(s.master), state1(s.state1), state2(s.state2),
        param_out(s.param_out ? s.param_out : s.param), master_out(s.master_out ? s.master_out : s.master),
        state1_out(s.state1_out ? s.state1_out : s.state1),
        state2_out(s.state2_out ? s.state2_out : s.state2) {}
};

// What is written past the cache. A store to memory that was not read first makes the CPU fetch each line before it is
// overwritten; a non-temporal store saves that third of the traffic.
enum Bypass { kNothing, kParam, kEverything };

template <class V, int weight> typename V::F load_weight(const Pointers &at, int64_t i) {
  if constexpr (weight <= kFloat16) return load<V, weight>(at.param, i);
  if constexpr (weight == kRemainder16) {
    const auto upper = V::load_u16(static_cast<const uint16_t *>(at.param) + i);
    const auto remainder = V::load_s16(static_cast<const int16_t *>(at.master) + i);
    return V::from_bits(V::iadd(V::template shl<16>(upper), remainder));
  }
  if constexpr (weight >= kMasterFloat32) return load<V, FOREBAY_FLOAT32>(at.master, i);
}

template <class V, int weight, int bypass> void store_weight(const Pointers &at, int64_t i, typename V::F a) {
  constexpr bool nt_param = bypass != kNothing, nt_master = bypass == kEverything;
  if constexpr (weight <= kFloat16) store<V, weight, nt_param>(at.param_out, i, a);
  if constexpr (weight == kRemainder16) {
    const auto u = V::bits(a);
    const auto nan = V::is_nan(a);
    auto upper = V::template shr<16>(V::iadd(u, V::iset(0x8000)));
    auto remainder = V::isub(u, V::template shl<16>(upper));
    upper = V::iselect(nan, V::ior(V::template shr<16>(u), V::iset(0x40)), upper);
    remainder = V::iselect(nan, V::iset(0), remainder);
    V::template store_u16<nt_param>(static_cast<uint16_t *>(at.param_out) + i, upper);
    V::template store_s16<nt_master>(static_cast<int16_t *>(at.master_out) + i, remainder);
  }
  if constexpr (weight >= kMasterFloat32) {
    store<V, FOREBAY_FLOAT32, nt_master>(at.master_out, i, a);
    store<V, weight - kMasterFloat32, nt_param>(at.param_out, i, a);
  }
}

// 32 random bits per element: a hash of its index and two keys. The constants are those of MurmurHash3's finalizer
// (Appleby, public domain); the second key goes in halfway, so that no two steps share a permuted sequence.
template <class V> typename V::I random_bits(typename V::I index, uint32_t key0, uint32_t key1) {
  auto x = V::ixor(index, V::iset(key0));
  x = V::ixor(x, V::template shr<16>(x));
  x = V::imul(x, V::iset(0x85ebca6bu));
  x = V::ixor(x, V::iset(key1));
  x = V::ixor(x, V::template shr<13>(x));
  x = V::imul(x, V::iset(0xc2b2ae35u));
  return V::ixor(x, V::template shr<16>(x));
}

// Add 16 random bits below the last bit that bf16 keeps and cut off: up with a probability equal to the part cut off.
template <class V, bool nt> void store_stochastic(void *base, int64_t i, typename V::F a, typename V::I random16) {
  const auto u = V::bits(a);
  const auto rounded = V::template shr<16>(V::iadd(u, random16));
  const auto quiet = V::ior(V::template shr<16>(u), V::iset(0x40));
  V::template store_u16<nt>(static_cast<uint16_t *>(base) + i, V::iselect(V::is_nan(a), quiet, rounded));
}

template <class V, int state, bool nt> struct StateStore {
  typename V::I random;
  StateStore(const Range &range, int64_t i) {
    if constexpr (state != FOREBAY_FLOAT32) {
      const auto index = static_cast<uint32_t>(range.segment->first_element + i);
      random = random_bits<V>(V::iota(index), range.key0, range.key1);
    }
  }
  // The two states of an element use the two halves of its random bits.
  template <int which> void put(void *base, int64_t i, typename V::F a) const {
    if constexpr (state == FOREBAY_FLOAT32) {
      store<V, FOREBAY_FLOAT32, nt>(base, i, a);
    } else if constexpr (which == 0) {
      store_stochastic<V, nt>(base, i, a, V::template shr<16>(random));
    } else {
      store_stochastic<V, nt>(base, i, a, V::iand(random, V::iset(0xffff)));
    }
  }
};

template <class V, int grad, int weight, int state, int bypass>
inline void adam(const Range &range, const Pointers &at, const Scalars &s, int64_t i) {
  auto g = V::mul(load<V, grad>(at.grad, i), V::set(s.grad_scale));
  auto p = load_weight<V, weight>(at, i);
  auto m = load<V, state>(at.state1, i);
  auto v = load<V, state>(at.state2, i);
  if (s.has_l2) g = V::fma(V::set(s.l2), p, g);
  p = V::mul(p, V::set(s.decay));
  // No fused multiply-add from here on: the update on the device (forebay/optim/device_update.py) does the same
  // operations in the same order, and gives the same bits.
  m = V::add(s.lerp_from_grad ? g : m, V::mul(V::sub(g, m), V::set(s.lerp_weight)));
  v = V::add(V::mul(v, V::set(s.beta2)), V::mul(V::mul(g, V::set(s.one_minus_beta2)), g));
  // Times the inverse: one division less than torch, because the kernel would wait for its divider, not for memory.
  const auto denominator = V::add(V::mul(V::sqrt(v), V::set(s.bias2_inverse_sqrt)), V::set(s.eps));
  p = V::add(p, V::div(V::mul(V::set(s.minus_step_size), m), denominator));
  const StateStore<V, state, bypass == kEverything> states(range, i);
  states.template put<0>(at.state1_out, i, m);
  states.template put<1>(at.state2_out, i, v);
  store_weight<V, weight, bypass>(at, i, p);
}

template <class V, int grad, int weight, int state, int bypass>
inline void sgd(const Range &range, const Pointers &at, const Scalars &s, int64_t i) {
  auto g = V::mul(load<V, grad>(at.grad, i), V::set(s.grad_scale));
  auto p = load_weight<V, weight>(at, i);
  // No fused multiply-add, as in adam().
  if (s.has_l2) g = V::add(g, V::mul(V::set(s.l2), p));
  if (s.has_momentum) {
    auto m = g;
    if (!s.is_first) {
      m = V::mul(V::set(s.momentum), load<V, state>(at.state1, i));
      m = V::add(m, V::mul(V::set(s.one_minus_dampening), g));
    }
    const StateStore<V, state, bypass == kEverything> states(range, i);
    states.template put<0>(at.state1_out, i, m);
    g = s.is_nesterov ? V::add(g, V::mul(V::set(s.momentum), m)) : m;
  }
  store_weight<V, weight, bypass>(at, i, V::add(p, V::mul(V::set(s.minus_step_size), g)));
}

template <class V, int grad, int weight, int state, int bypass>
inline void lion(const Range &range, const Pointers &at, const Scalars &s, int64_t i) {
  const auto g = V::mul(load<V, grad>(at.grad, i), V::set(s.grad_scale));
  auto p = load_weight<V, weight>(at, i);
  auto m = load<V, state>(at.state1, i);
  const auto zero = V::set(0.0f);
  auto u = V::add(V::mul(V::set(s.beta1), m), V::mul(V::set(s.one_minus_beta1), g));
  u = V::select(V::greater(zero, u), V::set(-1.0f), V::select(V::greater(u, zero), V::set(1.0f), u));
  m = V::add(V::mul(V::set(s.beta2), m), V::mul(V::set(s.one_minus_beta2), g));
  p = V::add(V::mul(p, V::set(s.decay)), V::mul(V::set(s.minus_step_size), u));
  const StateStore<V, state, bypass == kEverything> states(range, i);
  states.template put<0>(at.state1_out, i, m);
  store_weight<V, weight, bypass>(at, i, p);
}

template <class V, int rule, int grad, int weight, int state, int bypass>
inline void update(const Range &range, const Pointers &at, const Scalars &s, int64_t i) {
  if constexpr (rule == kAdam) adam<V, grad, weight, state, bypass>(range, at, s, i);
  if constexpr (rule == kSgd) sgd<V, grad, weight, state, bypass>(range, at, s, i);
  if constexpr (rule == kLion) lion<V, grad, weight, state, bypass>(range, at, s, i);
}

// How far to fetch ahead of the loop. Measured on Zen 4, two threads: 2% to 4% more than the hardware's own prefetcher
// with fp32 states and 27% with bf16 states; 2% less where every output bypasses the cache, so not there.
constexpr int64_t kPrefetchElements = 256;

constexpr int bytes_of(int dtype) { return dtype == FOREBAY_FLOAT32 ? 4 : 2; }
constexpr int param_bytes_of(int weight) { return weight == kFloat32 || weight == kMasterFloat32 ? 4 : 2; }
constexpr int master_bytes_of(int weight) { return weight == kRemainder16 ? 2 : 4; }

template <int bytes> void prefetch(const void *base, int64_t i) {
  __builtin_prefetch(static_cast<const char *>(base) + i * bytes);
}

template <int rule, int grad, int weight, int state> void prefetch(const Pointers &at, int64_t i) {
  prefetch<bytes_of(grad)>(at.grad, i);
  if constexpr (weight < kMasterFloat32) prefetch<param_bytes_of(weight)>(at.param, i);
  if constexpr (weight >= kRemainder16) prefetch<master_bytes_of(weight)>(at.master, i);
  prefetch<bytes_of(state)>(at.state1, i);
  if constexpr (rule == kAdam) prefetch<bytes_of(state)>(at.state2, i);
}

template <int rule, int grad, int weight, int state, int bypass>
void run(const Range range, const Pointers at, const Scalars s) {  // copies, which no store in the loop can change
  int64_t i = range.begin;
  for (; i + Simd::kWidth <= range.end; i += Simd::kWidth) {
    if constexpr (bypass != kEverything) prefetch<rule, grad, weight, state>(at, i + kPrefetchElements);
    update<Simd, rule, grad, weight, state, bypass>(range, at, s, i);
  }
  for (; i < range.end; ++i) update<Scalar, rule, grad, weight, state, kNothing>(range, at, s, i);
}

template <int bytes> bool is_aligned(const void *base, int64_t begin) {
  return (reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(begin * bytes)) % (Simd::kWidth * bytes) == 0;
}

template <int rule, int weight, int state> Bypass choose_bypass(const Range &r, const Pointers &at) {
  if (r.end - r.begin < kBypassElements) return kNothing;
  constexpr int param_bytes = param_bytes_of(weight), master_bytes = master_bytes_of(weight);
  constexpr int state_bytes = bytes_of(state);
  // The param is only written where there is a master in fp32.
  const bool is_separate = weight >= kMasterFloat32 || at.param_out != at.param;
  if (!is_separate || !is_aligned<param_bytes>(at.param_out, r.begin)) return kNothing;
  const auto stays = [](const void *in, const void *out, bool aligned) { return in == out || !aligned; };
  if (weight >= kRemainder16 &&
      stays(at.master, at.master_out, is_aligned<master_bytes>(at.master_out, r.begin))) {
    return kParam;
  }
  const bool has_state1 = rule != kSgd || r.scalars->has_momentum;
  if (has_state1 && stays(at.state1, at.state1_out, is_aligned<state_bytes>(at.state1_out, r.begin))) {
    return kParam;
  }
  if (rule == kAdam && stays(at.state2, at.state2_out, is_aligned<state_bytes>(at.state2_out, r.begin))) {
    return kParam;
  }
  return kEverything;
}

template <int rule, int grad, int weight, int state> void kernel(const Range &range) {
  const Pointers at(*range.segment);
  const Bypass bypass = Simd::kCanBypass ? choose_bypass<rule, weight, state>(range, at) : kNothing;
  if constexpr (Simd::kCanBypass) {
    if (bypass == kEverything) run<rule, grad, weight, state, kEverything>(range, at, *range.scalars);
    if (bypass == kParam) run<rule, grad, weight, state, kParam>(range, at, *range.scalars);
  }
  if (bypass == kNothing) run<rule, grad, weight, state, kNothing>(range, at, *range.scalars);
  Simd::fence();  // non-temporal stores are not ordered with the flag that says that this thread is done
}

#define FOREBAY_STATES(rule, grad, weight) {kernel<rule, grad, weight, 0>, kernel<rule, grad, weight, 1>}
#define FOREBAY_WEIGHTS(rule, grad)                                                                \
  {FOREBAY_STATES(rule, grad, 0), FOREBAY_STATES(rule, grad, 1), FOREBAY_STATES(rule, grad, 2),    \
   FOREBAY_STATES(rule, grad, 3), FOREBAY_STATES(rule, grad, 4), FOREBAY_STATES(rule, grad, 5),    \
   FOREBAY_STATES(rule, grad, 6)}
#define FOREBAY_GRADS(rule) {FOREBAY_WEIGHTS(rule, 0), FOREBAY_WEIGHTS(rule, 1), FOREBAY_WEIGHTS(rule, 2)}
#define FOREBAY_KERNEL_TABLE(name) {name, {FOREBAY_GRADS(0), FOREBAY_GRADS(1), FOREBAY_GRADS(2)}}

}  // namespace
