// y = x Wᵀ + b for the few rows that a decoder has at once. With one row a product takes as long as it takes to read W; libraries made for
// large matrices were measured to read it at 60 % of the memory's speed.
//
// W is laid out in panels of 32 outputs, in the order in which they are read: [in / deep, 32, deep], where `deep` is how many inputs one
// instruction takes (1 in fp32, 2 in bf16). A panel meets up to 12 rows at once: 2 x 12 sums of 16 outputs stay in registers, and what
// one thread needs of W after that comes from its cache. Each sum runs over the inputs in order, however many rows there are, so a row's
// result is the same, bit for bit, whatever stands beside it.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>

#include "numbers.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

using at::Tensor;
using repro::kWorthAThread;

namespace {

constexpr int kLanes = 16, kPanel = 2 * kLanes, kMostRows = 12;

template <typename T>
constexpr int kDeep = 4 / sizeof(T);

// bf16 on processors with matrix units (AMX) is left to oneDNN, which uses them.
template <typename T>
constexpr bool possible() {
#if !defined(__AVX512F__)
  return false;
#elif !defined(__AVX512BF16__) || defined(__AMX_BF16__)
  return std::is_same_v<T, float>;
#else
  return true;
#endif
}

enum class After { kNothing, kGelu, kGeluTanh };

// GELU of all outputs of a panel, those that are not there among them: so each is computed by the same instructions wherever it stands.
void activate(After after, float* y) {
  if (after == After::kGelu)
    for (int i = 0; i < kPanel; i++) y[i] *= 0.5f * (1.0f + std::erf(y[i] * 0.70710678f));
  if (after == After::kGeluTanh)
    for (int i = 0; i < kPanel; i++) y[i] *= 0.5f * (1.0f + std::tanh(0.79788456f * (y[i] + 0.044715f * y[i] * y[i] * y[i])));
}

#ifdef __AVX512F__

// sum + x w, of 4 bytes of x and w in each lane.
template <typename T>
inline __m512 multiply_add(__m512 x, __m512 w, __m512 sum) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<T, at::BFloat16>) return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
#endif
  return _mm512_fmadd_ps(x, w, sum);
}

inline int four_bytes(const void* from) {
  int found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

// Rows of x, `stride` apart, times one panel.
template <typename T, int ROWS>
void tile(const T* x, int64_t stride, const T* w, int64_t in, float (*out)[kPanel]) {
  __m512 sum[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (int64_t i = 0; i < in; i += kDeep<T>, x += kDeep<T>, w += kPanel * kDeep<T>) {
    const __m512 low = _mm512_loadu_ps(w), high = _mm512_loadu_ps(w + kLanes * kDeep<T>);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const __m512 one = _mm512_castsi512_ps(_mm512_set1_epi32(four_bytes(x + r * stride)));
      sum[r][0] = multiply_add<T>(one, low, sum[r][0]);
      sum[r][1] = multiply_add<T>(one, high, sum[r][1]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    _mm512_storeu_ps(out[r], sum[r][0]);
    _mm512_storeu_ps(out[r] + kLanes, sum[r][1]);
  }
}

#else

template <typename T, int ROWS>
void tile(const T*, int64_t, const T*, int64_t, float (*)[kPanel]) {}

#endif

// Sums stay in registers only where the compiler knows how many rows there are.
template <typename T, int ROWS = kMostRows>
void tile_of(int64_t rows, const T* x, int64_t stride, const T* w, int64_t in, float (*out)[kPanel]) {
  if (rows == ROWS) return tile<T, ROWS>(x, stride, w, in, out);
  if constexpr (ROWS > 1) tile_of<T, ROWS - 1>(rows, x, stride, w, in, out);
}

// Rows in tiles of nearly equal size; a panel meets them all before the next one is read.
template <typename T>
void product_rows(const Tensor& x, const Tensor& panels, const std::optional<Tensor>& bias, After after, Tensor& y) {
  const int64_t rows = x.size(0), in = x.size(1), out = y.size(1), tiles = (rows + kMostRows - 1) / kMostRows;
  const T *x0 = x.const_data_ptr<T>(), *w0 = panels.const_data_ptr<T>(), *b0 = bias ? bias->const_data_ptr<T>() : nullptr;
  T* y0 = y.mutable_data_ptr<T>();
  const int64_t worth = 1 + kWorthAThread / std::max<int64_t>(1, rows * in * kPanel);
  at::parallel_for(0, panels.size(0), worth, [&](int64_t begin, int64_t end) {
    float sums[kMostRows][kPanel];
    for (int64_t panel = begin; panel < end; panel++) {
      const int64_t first = panel * kPanel, width = std::min<int64_t>(kPanel, out - first);
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t row = rows * t / tiles, count = rows * (t + 1) / tiles - row;
        tile_of<T>(count, x0 + row * in, in, w0 + first * in, in, sums);
        for (int64_t r = 0; r < count; r++) {
          if (b0 != nullptr)
            for (int64_t i = 0; i < width; i++) sums[r][i] += repro::widen(b0[first + i]);
          activate(after, sums[r]);
          for (int64_t i = 0; i < width; i++) y0[(row + r) * out + first + i] = repro::narrow<T>(sums[r][i]);
        }
      }
    }
  });
}

Tensor product(const Tensor& x, const Tensor& panels, int64_t out, const std::optional<Tensor>& bias, const std::string& gelu) {
  repro::check_tensors({x, panels, bias.value_or(x)});
  TORCH_CHECK(x.dim() == 2 && panels.dim() == 4 && x.size(1) == panels.size(1) * panels.size(3) && panels.size(2) == kPanel &&
                  out <= panels.size(0) * kPanel && out > (panels.size(0) - 1) * kPanel,
              "x ", x.sizes(), " does not fit panels ", panels.sizes(), " of ", out, " outputs");
  TORCH_CHECK(x.scalar_type() == panels.scalar_type() && (!bias || (bias->scalar_type() == x.scalar_type() && bias->numel() == out)),
              "x, panels and bias must have one dtype, and the bias ", out, " entries");
  TORCH_CHECK(gelu.empty() || gelu == "none" || gelu == "tanh", "gelu is ", gelu, ", allowed: nothing, none, tanh");
  const After after = gelu == "none" ? After::kGelu : gelu == "tanh" ? After::kGeluTanh : After::kNothing;
  auto y = at::empty({x.size(0), out}, x.options());
  FOR_DTYPE(x, "product", {
    TORCH_CHECK(possible<scalar_t>() && panels.size(3) == kDeep<scalar_t>, "panels of this dtype are not for this processor");
    product_rows<scalar_t>(x, panels, bias, after, y);
  });
  return y;
}

bool multiplies(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, "a weight must be [out, in], found ", weight.sizes());
  bool can = false;
  FOR_DTYPE(weight, "multiplies", can = possible<scalar_t>() && weight.size(1) % kDeep<scalar_t> == 0);
  return can;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(repro_models, library) {
  // x [n, in], panels [out / 32 or one more, in / deep, 32, deep], bias [out]: [n, out]; gelu: "" (none), "none" (exact) or "tanh".
  library.def("product(Tensor x, Tensor panels, int out, Tensor? bias, str gelu) -> Tensor", &product);
  // Whether this processor has the instructions for the dtype of weight [out, in], and its inputs come out even.
  library.def("multiplies(Tensor weight) -> bool", &multiplies);
}
