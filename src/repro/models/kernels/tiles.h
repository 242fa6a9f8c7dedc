// The innermost loop of every product: a tile of some rows times a panel of 2 vectors of outputs, whose sums stay in registers.
//
// A panel is laid out in the order in which it is read: [in / deep, kPanel, deep], where `deep` is how many inputs one instruction takes
// (1 in fp32, 2 in bf16 where there are instructions for it). Each sum runs over the inputs in order, however many rows there are, so a
// row's result is the same, bit for bit, whatever stands beside it.

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
#elif defined(__aarch64__)
constexpr int kLanes = 4, kMostRows = 12;  // of 32
#else
constexpr int kLanes = 4, kMostRows = 6;
#endif
constexpr int kPanel = 2 * kLanes;

// In what numbers of dtype T are multiplied: in bf16 where there is an instruction for it, else in fp32.
#ifdef __AVX512BF16__
template <typename T>
using Factor = T;
#else
template <typename T>
using Factor = float;
#endif

template <typename T>
constexpr int kDeep = 4 / sizeof(Factor<T>);

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

typedef int Whole __attribute__((vector_size(4 * kLanes)));

template <typename V = Vector>
inline V load(const void* from) {
  V found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

inline void store(Vector values, float* to) { std::memcpy(to, &values, sizeof values); }

inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

// As those of a number, up to rounding.
inline Vector power_of_two(Vector x) {
  x = larger(x, Vector{} - 127.0f);
  const Whole whole = __builtin_convertvector(x - 0.5f, Whole);
  return (Vector)((Whole)part_of_power(x - __builtin_convertvector(whole, Vector)) + (whole << 23));
}

inline Vector silu(Vector x) {
  const Vector e = power_of_two(-1.44269504f * larger(x, -x));
  return x * (x < 0 ? e : Vector{} + 1) / (1 + e);
}

// As `narrow`; where there is an instruction for it, subnormal numbers become 0.
template <typename T>
inline void narrow_all(const float* from, int64_t count, T* to) {
  int64_t i = 0;
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<T, at::BFloat16>)
    for (; i + kLanes <= count; i += kLanes) {
      const __m256bh some = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + i));
      std::memcpy(to + i, &some, sizeof some);
    }
#endif
  for (; i < count; i++) to[i] = narrow<T>(from[i]);
}

template <typename F, typename T>
inline F factor(T value) {
  if constexpr (std::is_same_v<F, T>)
    return value;
  else
    return widen(value);
}

// Weights as they are multiplied: what is stored in bf16 may be multiplied in fp32.
template <typename F, typename W>
inline Vector factors(const W* from) {
  if constexpr (std::is_same_v<F, W>) {
    return load(from);
  } else {
    typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
    typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
    return (Vector)(__builtin_convertvector(load<Halves>(from), Words) << 16);
  }
}

// Two inputs of kPanel outputs as factors, side by side.
template <typename F>
inline void interleave(const float* first, const float* second, F* to) {
#ifdef __AVX512BF16__
  const auto order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                      23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int i = 0; i < kPanel; i += kLanes) {
    const auto both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(second + i), _mm512_loadu_ps(first + i));
    const auto mixed = _mm512_permutexvar_epi16(order, both);
    std::memcpy(to + 2 * i, &mixed, sizeof mixed);
  }
#else
  for (int i = 0; i < kPanel; i++) {
    to[2 * i] = factor<F>(first[i]);
    to[2 * i + 1] = factor<F>(second[i]);
  }
#endif
}

#ifdef __AVX512F__
// As `turn`, 16 x 16.
inline void turn_square(const char* from, int64_t apart, char* to, int64_t to_apart) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + 4 * i * apart);
  for (int i = 0; i < 16; i += 2) {  // pairs of rows: neighbours in groups of 2
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)  // and of 4
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)  // then quarters of vectors
    for (int j = 0; j < 4; j++) {
      b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
      b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    a[j] = _mm512_shuffle_i32x4(b[j], b[j + 8], 0x88);
    a[j + 8] = _mm512_shuffle_i32x4(b[j], b[j + 8], 0xdd);
  }
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + 4 * i * to_apart, a[i]);
}
#endif

// `rows` x `columns` units of 4 bytes to columns x rows: rows are `apart` units, then columns `to_apart`.
inline void turn(const void* from, int64_t apart, int64_t rows, int64_t columns, void* to, int64_t to_apart) {
  const char* f = static_cast<const char*>(from);
  char* t = static_cast<char*>(to);
  int64_t low = 0, left = 0;  // what squares hold
#ifdef __AVX512F__
  low = rows / 16 * 16, left = columns / 16 * 16;
  for (int64_t r = 0; r < low; r += 16)
    for (int64_t c = 0; c < left; c += 16) turn_square(f + 4 * (r * apart + c), apart, t + 4 * (c * to_apart + r), to_apart);
#endif
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = r < low ? left : 0; c < columns; c++) std::memcpy(t + 4 * (c * to_apart + r), f + 4 * (r * apart + c), 4);
}

// Where a row's inputs lie: the deep ones that an instruction takes side by side, the next ones `step` further; rows are `apart`.
struct Inputs {
  int64_t apart, step;
};

// What a tile fetches into the second cache for later ones: with each instruction's inputs the next `step` bytes. Cores guess what they will
// need of a panel that they read, but not of the next one.
struct Ahead {
  const void* at;
  int64_t step;  // two lines of the cache at most
};
constexpr int64_t kLine = 64;

// out[r, i] = sum of x[r, k] w[k / deep, i, k % deep] over k < in, for r < ROWS and i < kPanel; with `fades`, plus out[r, i] fades[i].
template <typename T, int ROWS, typename W>
void tile(const T* x, Inputs at, const W* w, int64_t in, float* out, const float* fades, Ahead ahead) {
  constexpr bool kFetches = 2 * ROWS >= kMostRows;  // fewer rows take no longer than reading their panel
  const char* next = static_cast<const char*>(ahead.at);
  Vector sum[ROWS][2];
  if (fades == nullptr) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = Vector{};
  } else {
    const Vector low = load(fades), high = load(fades + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      sum[r][0] = load(out + r * kPanel) * low;
      sum[r][1] = load(out + r * kPanel + kLanes) * high;
    }
  }
  for (int64_t i = 0; i < in; i += kDeep<T>, x += at.step, w += kPanel * kDeep<T>) {
    if constexpr (kFetches) {
      __builtin_prefetch(next, 0, 2);
      if (ahead.step > kLine) __builtin_prefetch(next + kLine, 0, 2);
      next += ahead.step;
    }
    const Vector low = factors<T>(w), high = factors<T>(w + kLanes * kDeep<T>);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Vector one = everywhere(x + r * at.apart);
      sum[r][0] = multiply_add<T>(one, low, sum[r][0]);
      sum[r][1] = multiply_add<T>(one, high, sum[r][1]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    std::memcpy(out + r * kPanel, &sum[r][0], sizeof(Vector));
    std::memcpy(out + r * kPanel + kLanes, &sum[r][1], sizeof(Vector));
  }
}

// Sums stay in registers only where the compiler knows how many rows there are: 1 to kMostRows.
template <typename T, int ROWS = kMostRows, typename W>
void tile_of(int64_t rows, const T* x, Inputs at, const W* w, int64_t in, float* out, const float* fades, Ahead ahead) {
  if (rows == ROWS) return tile<T, ROWS>(x, at, w, in, out, fades, ahead);
  if constexpr (ROWS > 1) tile_of<T, ROWS - 1>(rows, x, at, w, in, out, fades, ahead);
}

// Calls body(first, rows) for tiles of nearly equal size.
template <typename F>
void tiles(int64_t rows, F body) {
  const int64_t count = (rows + kMostRows - 1) / kMostRows;
  for (int64_t t = 0; t < count; t++) body(rows * t / count, rows * (t + 1) / count - rows * t / count);
}

}  // namespace repro
