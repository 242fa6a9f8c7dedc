// What the kernels have in common: numbers of either dtype, and what is checked of tensors.

#pragma once

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace repro {

// torch's own conversions of bfloat16 keep the compiler from making vector instructions.
template <typename T>
inline auto widen(T value) {
  if constexpr (std::is_same_v<T, at::BFloat16>)
    return std::bit_cast<float>(static_cast<uint32_t>(value.x) << 16);
  else
    return value;
}

template <typename T>
inline T narrow(float value) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {  // to the nearest, ties to even; a model's numbers are finite
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    return at::BFloat16(static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16), at::BFloat16::from_bits());
  } else {
    return value;
  }
}

// 2 to the power z, at most half a power either way, to fp32: the polynomial of Cephes' exp2f. Of a number or of a vector.
template <typename V>
inline V part_of_power(V z) {
  const V y = 2.402264791e-1f + z * (5.550332471e-2f + z * (9.618437358e-3f + z * (1.339887440e-3f + z * 1.535336188e-4f)));
  return 1 + z * (6.931472029e-1f + z * y);
}

// 2 to the power x, x <= 0 but for rounding; exactly 0 from -127 down.
inline float power_of_two(float x) {
  x = std::max(x, -127.0f);
  const int whole = static_cast<int>(x - 0.5f);
  return std::bit_cast<float>(std::bit_cast<int>(part_of_power(x - whole)) + (whole << 23));
}

inline float silu(float x) {
  const float e = power_of_two(-1.44269504f * std::abs(x));  // at most 1
  return x * (x < 0 ? e : 1.0f) / (1.0f + e);
}

// Kernels read through pointers. What they take for granted is checked at every entry, once for all rows; that a tensor has the dtype of a
// pointer into it, torch checks when it gives the pointer.
inline void check_tensors(std::initializer_list<at::Tensor> tensors) {
  for (const auto& tensor : tensors) {
    TORCH_CHECK(tensor.device().is_cpu() && tensor.layout() == at::kStrided, "tensors must be dense, and on the CPU, found ",
                tensor.layout(), " on ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "tensors must be contiguous");
  }
}

}  // namespace repro

#define FOR_DTYPE(TENSOR, NAME, ...) \
  AT_DISPATCH_SWITCH((TENSOR).scalar_type(), NAME, AT_DISPATCH_CASE(at::ScalarType::Float, [&] { __VA_ARGS__; }) \
                     AT_DISPATCH_CASE(at::ScalarType::BFloat16, [&] { __VA_ARGS__; }))
