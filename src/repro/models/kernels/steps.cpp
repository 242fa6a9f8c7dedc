// The small steps of a decoder between its matrix products, which torch leaves slow on a CPU.
//
// Every row is computed alone and by one thread, in an order of sums that depends on that row only: its result is the same, bit for bit,
// whatever stands beside it. Sums are in fp32 whatever the dtype. Loops are plain: -O3 -ffast-math -march=native makes vector
// instructions of them.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "cache.h"
#include "numbers.h"
#include "threads.h"

using at::Tensor;
using repro::Cache;
using repro::check_tensors;
using repro::each;
using repro::narrow;
using repro::widen;

namespace {

template <typename T>
void rotate_store_rows(const Tensor& qkv, const Tensor& cosine, const Tensor& sine, const Tensor& slots, const Tensor& positions,
                       Tensor& keys, Tensor& values, const Cache& cache, Tensor& q) {
  const int64_t rows = qkv.size(0), dim = cache.dim, kv_heads = cache.kv_heads, heads = q.size(1), half = cosine.size(1);
  const T* in = qkv.const_data_ptr<T>();
  const float *cosines = cosine.const_data_ptr<float>(), *sines = sine.const_data_ptr<float>();
  const int64_t *slot = slots.const_data_ptr<int64_t>(), *position = positions.const_data_ptr<int64_t>();
  T *k = keys.mutable_data_ptr<T>(), *v = values.mutable_data_ptr<T>(), *out = q.mutable_data_ptr<T>();
  each(rows, qkv.numel(), [&](int64_t row) {
    const T* from = in + row * (heads + 2 * kv_heads) * dim;
    const float *c = cosines + row * half, *s = sines + row * half;
    for (int64_t head = 0; head < heads + kv_heads; head++, from += dim) {
      T* to = head < heads ? out + (row * heads + head) * dim : k + cache.at(slot[row], head - heads, position[row]);
      for (int64_t i = 0; i < half; i++) {  // neighbours turn together, as GGUF has it
        const float even = widen(from[2 * i]), odd = widen(from[2 * i + 1]);
        to[2 * i] = narrow<T>(even * c[i] - odd * s[i]);
        to[2 * i + 1] = narrow<T>(odd * c[i] + even * s[i]);
      }
      std::copy(from + 2 * half, from + dim, to + 2 * half);  // models that turn a part of a head only
    }
    for (int64_t head = 0; head < kv_heads; head++, from += dim)
      std::copy(from, from + dim, v + cache.at(slot[row], head, position[row]));
  });
}

template <typename T>
void take_rows(const Tensor& table, const Tensor& index, Tensor& out) {
  const int64_t width = table.size(1), *i = index.const_data_ptr<int64_t>();
  const T* from = table.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  each(index.numel(), out.numel(), [&](int64_t row) { std::copy_n(from + i[row] * width, width, to + row * width); });
}

template <typename T>
void add_norm_rows(Tensor& x, const std::optional<Tensor>& y, const Tensor& weight, float eps, Tensor& out) {
  const int64_t rows = x.size(0), width = x.size(1);
  T *x0 = x.mutable_data_ptr<T>(), *o0 = out.mutable_data_ptr<T>();
  const T *y0 = y ? y->const_data_ptr<T>() : nullptr, *w = weight.const_data_ptr<T>();
  each(rows, x.numel(), [&](int64_t row) {
    T *a = x0 + row * width, *o = o0 + row * width;
    if (y0 != nullptr) {
      const T* b = y0 + row * width;
      for (int64_t i = 0; i < width; i++) a[i] = narrow<T>(widen(a[i]) + widen(b[i]));
    }
    float squares = 0;
    for (int64_t i = 0; i < width; i++) squares += widen(a[i]) * widen(a[i]);
    const float factor = 1.0f / std::sqrt(squares / width + eps);
    for (int64_t i = 0; i < width; i++) o[i] = narrow<T>(widen(a[i]) * factor * widen(w[i]));
  });
}

template <typename T>
void silu_multiply_rows(const Tensor& gate_up, Tensor& out) {
  const int64_t rows = gate_up.size(0), width = gate_up.size(1) / 2;
  const T* in = gate_up.const_data_ptr<T>();
  T* o0 = out.mutable_data_ptr<T>();
  each(rows, 4 * out.numel(), [&](int64_t row) {  // an exponential is some of them
    const T *gate = in + row * 2 * width, *up = gate + width;
    T* o = o0 + row * width;
    for (int64_t i = 0; i < width; i++) o[i] = narrow<T>(repro::silu(widen(gate[i])) * widen(up[i]));
  });
}

// -ffast-math takes all numbers for finite, so this looks at their bits, which without the sign are in order: numbers, infinity, NaN. In
// bfloat16 at 16 of them, or a vector instruction would take half as many.
template <typename T>
void argmax_rows(const Tensor& x, Tensor& out) {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  constexpr Bits infinity = 0x7f800000u >> (32 - 8 * sizeof(T)), unsigned_bits = static_cast<Bits>(-1) >> 1;
  const int64_t width = x.size(1);
  const T* in = x.const_data_ptr<T>();
  int64_t* o = out.mutable_data_ptr<int64_t>();
  each(x.size(0), x.numel(), [&](int64_t row) {
    const T* a = in + row * width;
    float most = widen(a[0]);
    Bits largest = 0;
    for (int64_t i = 0; i < width; i++) {
      most = std::max(most, widen(a[i]));
      largest = std::max<Bits>(largest, std::bit_cast<Bits>(a[i]) & unsigned_bits);
    }
    int64_t i = 0;
    while (i < width - 1 && widen(a[i]) != most) i++;
    const bool number = largest <= infinity && (std::bit_cast<Bits>(narrow<T>(most)) & unsigned_bits) < infinity;
    o[row] = number ? i : -1;
  });
}

Tensor rotate_store(const Tensor& qkv, const Tensor& cosine, const Tensor& sine, const Tensor& slots, const Tensor& positions,
                    Tensor keys, Tensor values, const std::optional<Tensor>& table) {
  check_tensors({qkv, cosine, sine, slots, positions, keys, values, table.value_or(slots)});
  const Cache cache(keys, values, table);
  TORCH_CHECK(qkv.dim() == 2 && qkv.size(1) % cache.dim == 0 && qkv.size(1) / cache.dim > 2 * cache.kv_heads, "qkv ", qkv.sizes(),
              " must be [n, (heads + 2 * ", cache.kv_heads, ") * ", cache.dim, "]");
  TORCH_CHECK(cosine.dim() == 2 && cosine.size(0) == qkv.size(0) && cosine.size(1) <= cache.dim / 2 && sine.sizes() == cosine.sizes(),
              "cosine ", cosine.sizes(), " and sine ", sine.sizes(), " must be [", qkv.size(0), ", at most ", cache.dim / 2, "]");
  cache.check(slots, positions, qkv.size(0), false);
  auto q = at::empty({qkv.size(0), qkv.size(1) / cache.dim - 2 * cache.kv_heads, cache.dim}, qkv.options());
  FOR_DTYPE(qkv, "rotate_store", rotate_store_rows<scalar_t>(qkv, cosine, sine, slots, positions, keys, values, cache, q));
  return q;
}

Tensor take(const Tensor& table, const Tensor& index) {
  check_tensors({table, index});
  TORCH_CHECK(table.dim() == 2 && index.dim() == 1, "found a table ", table.sizes(), " and an index ", index.sizes());
  const int64_t* i = index.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < index.numel(); row++)
    TORCH_CHECK_INDEX(i[row] >= 0 && i[row] < table.size(0), "row ", i[row], " of a table, allowed: 0 to ", table.size(0) - 1);
  auto out = at::empty({index.numel(), table.size(1)}, table.options());
  FOR_DTYPE(table, "take", take_rows<scalar_t>(table, index, out));
  return out;
}

Tensor add_norm(Tensor x, const std::optional<Tensor>& y, const Tensor& weight, double eps) {
  check_tensors({x, y.value_or(x), weight});
  TORCH_CHECK(x.dim() == 2 && (!y || y->sizes() == x.sizes()) && weight.numel() == x.size(1), "x must be [n, width], found ", x.sizes(),
              ", y of the same shape, the weight [width], found ", weight.sizes());
  auto out = at::empty_like(x);
  FOR_DTYPE(x, "add_norm", add_norm_rows<scalar_t>(x, y, weight, static_cast<float>(eps), out));
  return out;
}

Tensor silu_multiply(const Tensor& gate_up) {
  check_tensors({gate_up});
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "gate_up must be [n, 2 * ffn], found ", gate_up.sizes());
  auto out = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
  FOR_DTYPE(gate_up, "silu_multiply", silu_multiply_rows<scalar_t>(gate_up, out));
  return out;
}

Tensor argmax(const Tensor& x) {
  check_tensors({x});
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "x must be [n, at least 1], found ", x.sizes());
  auto out = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  FOR_DTYPE(x, "argmax", argmax_rows<scalar_t>(x, out));
  return out;
}

}  // namespace

// n rows; all tensors contiguous; cosine and sine fp32 [n, pairs that turn]; slots and positions int64 [n].
TORCH_LIBRARY(repro_models, library) {
  // qkv [n, (heads + 2 kv_heads) dim]: turns queries and keys, stores keys and values, returns the queries [n, heads, dim].
  library.def("rotate_store(Tensor qkv, Tensor cosine, Tensor sine, Tensor slots, Tensor positions, Tensor(a!) keys, "
              "Tensor(b!) values, Tensor? table) -> Tensor", &rotate_store);
  // table [m, width], index int64 [n]: table[index], [n, width].
  library.def("take(Tensor table, Tensor index) -> Tensor", &take);
  // x [n, width] += y in place (unless y is None); returns the RMS norm of x, times weight [width].
  library.def("add_norm(Tensor(a!) x, Tensor? y, Tensor weight, float eps) -> Tensor", &add_norm);
  // [n, 2 ffn], gate before up: silu(gate) * up, [n, ffn].
  library.def("silu_multiply(Tensor gate_up) -> Tensor", &silu_multiply);
  // x [n, width]: where each row is largest, the first such place, int64 [n]; -1 where it holds NaN or the largest is infinite.
  library.def("argmax(Tensor x) -> Tensor", &argmax);
}
