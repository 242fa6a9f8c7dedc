// The innermost loop of every product: a tile of some rows times a panel of 2 vectors of outputs, whose sums stay in registers.
//
// A panel is laid out in the order in which it is read: [in / deep, kPanel, deep], where `deep` is how many inputs one instruction takes
// (1 in fp32, 2 in bf16). Each sum runs over the inputs in order, however many rows there are, so a row's result is the same, bit for bit,
// whatever stands beside it.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "numbers.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace repro {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kMostRows = 12;  // of 32 registers
#elif defined(__AVX__)
constexpr int kLanes = 8, kMostRows = 6;  // of 16
#else
constexpr int kLanes = 4, kMostRows = 6;
#endif
constexpr int kPanel = 2 * kLanes;

template <typename T>
constexpr int kDeep = 4 / sizeof(T);

// In what numbers of dtype T are multiplied: in bf16 where there is an instruction for it, else in fp32.
#ifdef __AVX512BF16__
template <typename T>
using Factor = T;
#else
template <typename T>
using Factor = float;
#endif

#ifdef __AVX512F__

using Vector = __m512;

// sum + x w, of 4 bytes of x and w in each lane.
template <typename T>
inline Vector multiply_add(Vector x, Vector w, Vector sum) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<T, at::BFloat16>) return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
#endif
  return _mm512_fmadd_ps(x, w, sum);
}

inline Vector everywhere(const void* four_bytes) {
  int found;
  std::memcpy(&found, four_bytes, sizeof found);
  return _mm512_castsi512_ps(_mm512_set1_epi32(found));
}

#else

typedef float Vector __attribute__((vector_size(4 * kLanes)));

template <typename T>
inline Vector multiply_add(Vector x, Vector w, Vector sum) {
  return sum + x * w;
}

inline Vector everywhere(const float* one) { return *one - Vector{}; }

#endif

inline Vector load(const void* from) {
  Vector found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

// A multiple of kLanes numbers as factors.
template <typename F>
inline void narrow_all(const float* from, int64_t count, F* to) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<F, at::BFloat16>) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const __m256bh some = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + i));
      std::memcpy(to + i, &some, sizeof some);
    }
    return;
  }
#endif
  for (int64_t i = 0; i < count; i++) to[i] = narrow<F>(from[i]);
}

// out[r * apart + i] = sum of x[r * stride + k] w[k / deep, i, k % deep] over k < in, for r < ROWS and i < kPanel.
template <typename T, int ROWS>
void tile(const T* x, int64_t stride, const T* w, int64_t in, float* out, int64_t apart) {
  Vector sum[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = Vector{};
  for (int64_t i = 0; i < in; i += kDeep<T>, x += kDeep<T>, w += kPanel * kDeep<T>) {
    const Vector low = load(w), high = load(w + kLanes * kDeep<T>);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Vector one = everywhere(x + r * stride);
      sum[r][0] = multiply_add<T>(one, low, sum[r][0]);
      sum[r][1] = multiply_add<T>(one, high, sum[r][1]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    std::memcpy(out + r * apart, &sum[r][0], sizeof(Vector));
    std::memcpy(out + r * apart + kLanes, &sum[r][1], sizeof(Vector));
  }
}

// Sums stay in registers only where the compiler knows how many rows there are: 1 to kMostRows.
template <typename T, int ROWS = kMostRows>
void tile_of(int64_t rows, const T* x, int64_t stride, const T* w, int64_t in, float* out, int64_t apart) {
  if (rows == ROWS) return tile<T, ROWS>(x, stride, w, in, out, apart);
  if constexpr (ROWS > 1) tile_of<T, ROWS - 1>(rows, x, stride, w, in, out, apart);
}

}  // namespace repro
