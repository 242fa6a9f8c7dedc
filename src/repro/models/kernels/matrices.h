// The same tiles by matrix units (AMX), which multiply 16 rows of 32 bf16 inputs and 16 outputs at once: on processors that have them a
// vector instruction for bf16 is several times slower than on others.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tiles.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace repro {

constexpr int kAtOnce = 32;  // inputs of an instruction; and rows of two of its tiles, which is what a tile has here

#ifdef __AMX_BF16__

// Whether numbers of dtype F are multiplied by matrix units, where the system lets this process use them.
template <typename F>
constexpr bool kMatrices = std::is_same_v<F, at::BFloat16>;

// Linux keeps the registers of matrix units for processes that ask for it (once for all threads).
inline bool matrices_allowed() {
  static const bool allowed = [] {
    constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
  }();
  return allowed;
}

// What LDTILECFG reads: rows of each register, of 64 bytes (of none where there are no rows). 0 to 3: sums of the first 16 rows and of the
// others, times 16 and 16 outputs; 4 and 5: these rows; 6 and 7: the outputs.
struct alignas(64) Shapes {
  uint8_t palette = 1, start = 0, nothing[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

inline thread_local int64_t shaped_for = 0;  // rows, while a `MatrixUnits` lives

// Lives while a thread multiplies: before and after, other code may give the registers other shapes.
struct MatrixUnits {
  MatrixUnits() { shaped_for = 0; }
  ~MatrixUnits() {
    if (shaped_for != 0) _tile_release();
  }
};

inline void shape_for(int64_t rows) {
  if (shaped_for == rows) return;
  const uint8_t low = std::min<int64_t>(rows, 16), high = rows - low;
  const uint16_t more = high ? 64 : 0;
  const Shapes shapes{.bytes = {64, 64, more, more, 64, more, 64, 64}, .rows = {low, low, high, high, low, high, 16, 16}};
  asm volatile("" : : "r"(&shapes) : "memory");  // the instruction does not tell the compiler all that it reads
  _tile_loadconfig(&shapes);
  shaped_for = rows;
}

// One instruction's inputs, of rows that are `apart` and outputs that lie as in a panel. MORE: there are more than 16 rows. ONCE: the panel
// is not met again soon, and must not drive the rows out of the first cache.
template <bool MORE, bool ONCE>
inline void multiply_at_once(const at::BFloat16* x, int64_t apart, const at::BFloat16* w) {
  constexpr int64_t bytes = sizeof(at::BFloat16);
  if constexpr (ONCE) {
    _tile_stream_loadd(6, w, 2 * kPanel * bytes);
    _tile_stream_loadd(7, w + kPanel, 2 * kPanel * bytes);
  } else {
    _tile_loadd(6, w, 2 * kPanel * bytes);
    _tile_loadd(7, w + kPanel, 2 * kPanel * bytes);
  }
  _tile_loadd(4, x, apart * bytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (MORE) {
    _tile_loadd(5, x + 16 * apart, apart * bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <bool MORE, bool ONCE>
void matrix_tile(int64_t rows, const at::BFloat16* x, int64_t apart, const at::BFloat16* w, int64_t in, float* out, const float* fades) {
  constexpr int64_t stride = kPanel * sizeof(float);
  shape_for(rows);
  if (fades == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (MORE) _tile_zero(2);
    if constexpr (MORE) _tile_zero(3);
  } else {
    const Vector low = load(fades), high = load(fades + kLanes);
    for (int64_t r = 0; r < rows; r++) {
      store(load(out + r * kPanel) * low, out + r * kPanel);
      store(load(out + r * kPanel + kLanes) * high, out + r * kPanel + kLanes);
    }
    asm volatile("" ::: "memory");
    _tile_loadd(0, out, stride);
    _tile_loadd(1, out + kLanes, stride);
    if constexpr (MORE) _tile_loadd(2, out + 16 * kPanel, stride);
    if constexpr (MORE) _tile_loadd(3, out + 16 * kPanel + kLanes, stride);
  }
  asm volatile("" ::: "memory");  // loads of registers do not tell the compiler what they read
  int64_t i = 0;
  for (; i + kAtOnce <= in; i += kAtOnce) multiply_at_once<MORE, ONCE>(x + i, apart, w + i * kPanel);
  if (i < in) {  // the rest beside zeros
    at::BFloat16 some[kAtOnce * kAtOnce] = {}, outputs[kAtOnce * kPanel] = {};
    for (int64_t r = 0; r < rows; r++) std::memcpy(some + r * kAtOnce, x + r * apart + i, (in - i) * sizeof *x);
    std::memcpy(outputs, w + i * kPanel, (in - i) * kPanel * sizeof *w);
    asm volatile("" : : "r"(some), "r"(outputs) : "memory");
    multiply_at_once<MORE, ONCE>(some, kAtOnce, outputs);
  }
  _tile_stored(0, out, stride);
  _tile_stored(1, out + kLanes, stride);
  if constexpr (MORE) _tile_stored(2, out + 16 * kPanel, stride);
  if constexpr (MORE) _tile_stored(3, out + 16 * kPanel + kLanes, stride);
  asm volatile("" ::: "memory");
}

// As `tile_of`, of up to kAtOnce rows whose inputs lie side by side.
template <bool ONCE = false>
inline void matrix_tile_of(int64_t rows, const at::BFloat16* x, int64_t apart, const at::BFloat16* w, int64_t in, float* out,
                           const float* fades = nullptr) {
  (rows > 16 ? matrix_tile<true, ONCE> : matrix_tile<false, ONCE>)(rows, x, apart, w, in, out, fades);
}

#else

template <typename F>
constexpr bool kMatrices = false;

constexpr bool matrices_allowed() { return false; }

struct MatrixUnits {
  ~MatrixUnits() {}  // or compilers call it unused
};

// Nobody calls it.
template <bool ONCE = false>
void matrix_tile_of(int64_t rows, const void* x, int64_t apart, const void* w, int64_t in, float* out, const float* fades = nullptr);

#endif

}  // namespace repro
