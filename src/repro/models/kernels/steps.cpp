// What torch leaves slow in a pass of a decoder on a CPU: attention over rows of different lengths, and the small steps between matrix
// products.
//
// Every row is computed alone and by one thread, in an order of sums that depends on that row only: its result is the same, bit for bit,
// whatever stands beside it. Sums are in fp32 whatever the dtype. Loops are plain: -O3 -ffast-math -march=native makes vector
// instructions of them.
//
// A cache is [blocks, kv_heads, block, dim]. Position t of slot s lies in block table[s][t / block] at t % block; without a table a slot
// is a block. A row is one token: its slot, and its position there.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include "numbers.h"

using at::Tensor;
using repro::check_tensors;
using repro::kWorthAThread;
using repro::narrow;
using repro::widen;

namespace {

struct Cache {
  const int64_t* table;  // nullptr: none
  int64_t width, blocks, kv_heads, block, dim, slots;

  Cache(const Tensor& keys, const Tensor& values, const std::optional<Tensor>& table)
      : table(table ? table->const_data_ptr<int64_t>() : nullptr), width(table ? table->size(1) : 1), blocks(keys.size(0)),
        kv_heads(keys.size(1)), block(keys.size(2)), dim(keys.size(3)), slots(table ? table->size(0) : blocks) {
    TORCH_CHECK(keys.dim() == 4 && keys.numel() > 0 && values.sizes() == keys.sizes(), "keys ", keys.sizes(), " and values ",
                values.sizes(), " must be [blocks, kv_heads, block, dim], not empty");
    TORCH_CHECK(!table || (table->dim() == 2 && table->numel() > 0), "the table must be [slots, blocks], not empty");
  }

  // The places of all rows, and the blocks that the table names for them: those up to its position where a row reads, else its own.
  void check(const Tensor& slot, const Tensor& position, int64_t rows, bool reads) const {
    TORCH_CHECK(slot.numel() == rows && position.numel() == rows, rows, " rows, but ", slot.numel(), " slots and ",
                position.numel(), " positions");
    const int64_t *s = slot.const_data_ptr<int64_t>(), *p = position.const_data_ptr<int64_t>(), capacity = width * block;
    for (int64_t row = 0; row < rows; row++) {
      TORCH_CHECK(s[row] >= 0 && s[row] < slots, "slot ", s[row], ", allowed: 0 to ", slots - 1);
      TORCH_CHECK(p[row] >= 0 && p[row] < capacity, "position ", p[row], ", allowed: 0 to ", capacity - 1);
      if (table == nullptr) continue;
      const int64_t last = p[row] / block, *named = table + s[row] * width;
      for (int64_t i = reads ? 0 : last; i <= last; i++)
        TORCH_CHECK(named[i] >= 0 && named[i] < blocks, "block ", named[i], " of slot ", s[row], ", allowed: 0 to ", blocks - 1);
    }
  }

  // Where position `position` of a slot's head begins, in elements.
  int64_t at(int64_t slot, int64_t head, int64_t position) const {
    const int64_t index = table == nullptr ? slot : table[slot * width + position / block];
    return ((index * kv_heads + head) * block + position % block) * dim;
  }
};

// Calls body(item) for all items, which together take `work` multiplications. Thread i takes items i, i + threads, ...: rows differ in
// length, the heads of a row do not.
template <typename F>
void each(int64_t items, int64_t work, F body) {
  const int64_t threads = std::min<int64_t>({items, at::get_num_threads(), 1 + work / kWorthAThread});
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; thread++)
      for (int64_t item = thread; item < items; item += threads) body(item);
  });
}

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

// Calls body(start, stop, offset) for the stretches of a slot's first `length` positions that lie in one piece.
template <typename F>
void stretches(const Cache& cache, int64_t slot, int64_t head, int64_t length, F body) {
  for (int64_t start = 0; start < length; start += cache.block)
    body(start, std::min(start + cache.block, length), cache.at(slot, head, start));
}

constexpr int kMostDim = 256;

// DIM: entries of a head where the compiler may know them, and keep them in registers; else 0. While keys of a head are read, its values
// are fetched: between two passes the weights have driven both out of the caches, and one head is too short for the processor to guess.
template <typename T, int DIM>
void attend_rows(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& slots, const Tensor& positions,
                 const Cache& cache, Tensor& out) {
  const int64_t rows = q.size(0), heads = q.size(1), kv_heads = cache.kv_heads, group = heads / kv_heads;
  const int dim = DIM ? DIM : cache.dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const T *q0 = q.const_data_ptr<T>(), *k0 = keys.const_data_ptr<T>(), *v0 = values.const_data_ptr<T>();
  const int64_t *slot = slots.const_data_ptr<int64_t>(), *position = positions.const_data_ptr<int64_t>();
  T* o0 = out.mutable_data_ptr<T>();
  const int64_t seen = std::accumulate(position, position + rows, rows);
  each(rows * kv_heads, 2 * seen * heads * dim, [&](int64_t item) {
    const int64_t row = item / kv_heads, head = item % kv_heads, length = position[row] + 1;
    const int64_t at = (row * heads + head * group) * dim;
    thread_local std::vector<float> scores;
    scores.resize(group * length);
    for (int64_t g = 0; g < group; g++) {
      float* s = scores.data() + g * length;
      float a[DIM ? DIM : kMostDim];
      for (int d = 0; d < dim; d++) a[d] = scale * widen(q0[at + g * dim + d]);
      stretches(cache, slot[row], head, length, [&](int64_t start, int64_t stop, int64_t offset) {
        const T* k = k0 + offset;
        for (int64_t t = start; t < stop; t++, k += dim) {
          float dot = 0;
          for (int d = 0; d < dim; d++) dot += a[d] * widen(k[d]);
          s[t] = dot;
          if (g == 0)
            for (int d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(v0 + offset + (t - start) * dim + d);
        }
      });
      float most = s[0], total = 0;
      for (int64_t t = 1; t < length; t++) most = std::max(most, s[t]);
      for (int64_t t = 0; t < length; t++) s[t] = std::exp(s[t] - most);
      for (int64_t t = 0; t < length; t++) total += s[t];
      for (int64_t t = 0; t < length; t++) s[t] /= total;
    }
    for (int64_t g = 0; g < group; g++) {
      const float* s = scores.data() + g * length;
      float o[DIM ? DIM : kMostDim] = {};
      stretches(cache, slot[row], head, length, [&](int64_t start, int64_t stop, int64_t offset) {
        const T* v = v0 + offset;
        for (int64_t t = start; t < stop; t++, v += dim)
          for (int d = 0; d < dim; d++) o[d] += s[t] * widen(v[d]);
      });
      for (int d = 0; d < dim; d++) o0[at + g * dim + d] = narrow<T>(o[d]);
    }
  });
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
    for (int64_t i = 0; i < width; i++) {
      const float g = widen(gate[i]);
      o[i] = narrow<T>(g / (1.0f + std::exp(-g)) * widen(up[i]));
    }
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

Tensor attend(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& slots, const Tensor& positions,
              const std::optional<Tensor>& table) {
  check_tensors({q, keys, values, slots, positions, table.value_or(slots)});
  const Cache cache(keys, values, table);
  TORCH_CHECK(q.dim() == 3 && q.size(2) == cache.dim && q.size(1) % cache.kv_heads == 0, "q ", q.sizes(), " must be [n, a multiple of ",
              cache.kv_heads, ", ", cache.dim, "]");
  cache.check(slots, positions, q.size(0), true);
  TORCH_CHECK(cache.dim <= kMostDim, "head_dim is ", cache.dim, ", at most ", kMostDim, " allowed");
  auto out = at::empty({q.size(0), q.size(1) * q.size(2)}, q.options());
  FOR_DTYPE(q, "attend", {
    const auto rows = cache.dim == 64    ? attend_rows<scalar_t, 64>
                      : cache.dim == 128 ? attend_rows<scalar_t, 128>
                                         : attend_rows<scalar_t, 0>;
    rows(q, keys, values, slots, positions, cache, out);
  });
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
  // q [n, heads, dim]: row i attends to positions 0 ... positions[i] of its slot. Returns [n, heads dim].
  library.def("attend(Tensor q, Tensor keys, Tensor values, Tensor slots, Tensor positions, Tensor? table) -> Tensor", &attend);
  // x [n, width] += y in place (unless y is None); returns the RMS norm of x, times weight [width].
  library.def("add_norm(Tensor(a!) x, Tensor? y, Tensor weight, float eps) -> Tensor", &add_norm);
  // [n, 2 ffn], gate before up: silu(gate) * up, [n, ffn].
  library.def("silu_multiply(Tensor gate_up) -> Tensor", &silu_multiply);
  // x [n, width]: where each row is largest, the first such place, int64 [n]; -1 where it holds NaN or the largest is infinite.
  library.def("argmax(Tensor x) -> Tensor", &argmax);
}
