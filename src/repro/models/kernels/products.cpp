// y = x Wᵀ + b for the rows that a decoder has at once. With one row a product takes as long as it takes to read W; libraries made for
// large matrices were measured to read it at 60 % of the memory's speed.
//
// W is laid out in panels (tiles.h). A panel meets up to 12 rows at once, and what one thread needs of it after that comes from its cache.
// What follows a product element by element is done before its sums are stored.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "matrices.h"
#include "numbers.h"
#include "threads.h"
#include "tiles.h"

using at::Tensor;
using repro::Factor;
using repro::kDeep;
using repro::kMatrices;
using repro::kPanel;

namespace {

template <typename T>
constexpr int kMostRows = kMatrices<T> ? repro::kAtOnce : repro::kMostRows;  // of a tile

template <typename T, typename W>
void rows_times_panel(int64_t rows, const Factor<T>* x, const W* panel, int64_t in, float* sums) {
  if constexpr (kMatrices<T>)
    repro::matrix_tile_of<true>(rows, x, in, panel, in, sums);
  else
    repro::tile_of<Factor<T>>(rows, x, {in, kDeep<T>}, panel, in, sums);
}

enum class After { kNothing, kGelu, kGeluTanh, kSilu };

// GELU of all outputs of a panel, those that are not there among them: so each is computed by the same instructions wherever it stands.
void activate(After after, float* y) {
  if (after == After::kGelu)
    for (int i = 0; i < kPanel; i++) y[i] *= 0.5f * (1.0f + std::erf(y[i] * 0.70710678f));
  if (after == After::kGeluTanh)
    for (int i = 0; i < kPanel; i++) y[i] *= 0.5f * (1.0f + std::tanh(0.79788456f * (y[i] + 0.044715f * y[i] * y[i] * y[i])));
}

// x in the numbers that are multiplied: once, as every panel meets all of it.
template <typename T>
Tensor factors_of(const Tensor& x) {
  if constexpr (std::is_same_v<Factor<T>, T>) {
    return x;
  } else {
    auto wide = at::empty(x.sizes(), x.options().dtype(at::kFloat));
    std::transform(x.const_data_ptr<T>(), x.const_data_ptr<T>() + x.numel(), wide.mutable_data_ptr<float>(), repro::widen<T>);
    return wide;
  }
}

// A panel so, for a thread that multiplies several tiles by it.
template <typename T>
const float* widened(const T* panel, int64_t count, std::vector<float>& space) {
  space.resize(count);
  std::transform(panel, panel + count, space.begin(), repro::widen<T>);
  return space.data();
}

constexpr int64_t kNear = 384 << 10;  // bytes of x that stay in a core's second cache beside a panel
constexpr int64_t kItems = 16;        // a thread's: one that was interrupted leaves the rest to the others

// Rows in blocks that stay in the cache; in a block, each panel meets all rows, in tiles of nearly equal size, before the next is read.
template <typename T>
void product_rows(const Tensor& x, const Tensor& panels, const std::optional<Tensor>& bias, After after, Tensor& y) {
  const bool gated = after == After::kSilu;  // the second half of the panels is multiplied by the SiLU of the first
  const int64_t rows = x.size(0), in = x.size(1), out = y.size(1), tiles = (rows + kMostRows<T> - 1) / kMostRows<T>;
  constexpr int64_t kFewest = std::is_same_v<Factor<T>, T> ? 1 : 4;  // a panel that is widened is so for several
  const int64_t near = std::max<int64_t>(kFewest, kNear / (kMostRows<T> * in * static_cast<int64_t>(sizeof(Factor<T>))));  // tiles in a block
  const int64_t blocks = (tiles + near - 1) / near, count = panels.size(0) / (gated ? 2 : 1);
  const Tensor wide = factors_of<T>(x);
  const Factor<T>* x0 = wide.const_data_ptr<Factor<T>>();
  const T *w0 = panels.const_data_ptr<T>(), *b0 = bias ? bias->const_data_ptr<T>() : nullptr;
  T* y0 = y.mutable_data_ptr<T>();
  const auto multiply = [&](int64_t first, int64_t begin, int64_t end, const auto* panel, const auto* gate) {
    float sums[kMostRows<T>][kPanel], factors[kMostRows<T>][kPanel];
    const int64_t width = std::min<int64_t>(kPanel, out - first);
    for (int64_t t = begin; t < end; t++) {
      // Matrix units take shapes as they come, and time for others.
      const int64_t row = kMatrices<T> ? t * kMostRows<T> : rows * t / tiles;
      const int64_t high = kMatrices<T> ? std::min<int64_t>(kMostRows<T>, rows - row) : rows * (t + 1) / tiles - row;
      rows_times_panel<T>(high, x0 + row * in, panel, in, sums[0]);
      if (gated) rows_times_panel<T>(high, x0 + row * in, gate, in, factors[0]);
      for (int64_t r = 0; r < high; r++) {
        if (b0 != nullptr)
          for (int64_t i = 0; i < width; i++) sums[r][i] += repro::widen(b0[first + i]);
        activate(after, sums[r]);
        if (gated)
          for (int i = 0; i < kPanel; i++) sums[r][i] = repro::silu(sums[r][i]) * factors[r][i];
        repro::narrow_all(sums[r], width, y0 + (row + r) * out + first);
      }
    }
  };
  const auto panel_times_tiles = [&](int64_t number, int64_t begin, int64_t end) {
    const int64_t first = number * kPanel;
    const T *panel = w0 + first * in, *gate = gated ? w0 + (out + first) * in : nullptr;
    if constexpr (!std::is_same_v<Factor<T>, T>) {
      thread_local std::vector<float> space, gate_space;
      if (end - begin > 1)
        return multiply(first, begin, end, widened(panel, in * kPanel, space), gated ? widened(gate, in * kPanel, gate_space) : space.data());
    }
    multiply(first, begin, end, panel, gate);
  };
  const int64_t items = std::min(count, (kMatrices<T> ? kItems / 4 : kItems) * at::get_num_threads());
  repro::each(blocks * items, rows * panels.numel(), [&](int64_t item) {
    const int64_t block = item / items, part = item % items;
    const repro::MatrixUnits units;
    if (kMatrices<T>) {
      for (int64_t t = tiles * block / blocks; t < tiles * (block + 1) / blocks; t++)
        for (int64_t panel = count * part / items; panel < count * (part + 1) / items; panel++) panel_times_tiles(panel, t, t + 1);
      return;
    }
    for (int64_t panel = count * part / items; panel < count * (part + 1) / items; panel++)
      panel_times_tiles(panel, tiles * block / blocks, tiles * (block + 1) / blocks);
  });
}

// Matrix units are there for processes that the system lets use them; what needs them is oneDNN's elsewhere.
template <typename T>
bool usable() {
  return !kMatrices<T> || repro::matrices_allowed();
}

Tensor product(const Tensor& x, const Tensor& panels, int64_t out, const std::optional<Tensor>& bias, const std::string& after) {
  repro::check_tensors({x, panels, bias.value_or(x)});
  const int64_t most = panels.dim() == 4 ? panels.size(0) * kPanel : 0, parts = after == "silu" ? 2 : 1;
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0 && panels.dim() == 4 && x.size(1) == panels.size(1) * panels.size(3) &&
                  panels.size(2) == kPanel && out <= most / parts && out > (most - kPanel) / parts,
              "x ", x.sizes(), " does not fit panels ", panels.sizes(), " of ", parts, " times ", out, " outputs");
  TORCH_CHECK(x.scalar_type() == panels.scalar_type() && (!bias || (bias->scalar_type() == x.scalar_type() && bias->numel() == out)),
              "x, panels and bias must have one dtype, and the bias ", out, " entries");
  TORCH_CHECK(after.empty() || after == "none" || after == "tanh" || after == "silu", "after is ", after,
              ", allowed: nothing, none, tanh, silu");
  TORCH_CHECK(after != "silu" || (out % kPanel == 0 && !bias), out, " gated outputs must be a multiple of ", kPanel, ", without a bias");
  const After step = after == "none" ? After::kGelu : after == "tanh" ? After::kGeluTanh : after == "silu" ? After::kSilu : After::kNothing;
  auto y = at::empty({x.size(0), out}, x.options());
  FOR_DTYPE(x, "product", {
    TORCH_CHECK(usable<scalar_t>() && panels.size(3) == kDeep<scalar_t>, "panels of this dtype are not for this processor");
    product_rows<scalar_t>(x, panels, bias, step, y);
  });
  return y;
}

std::vector<int64_t> panel_shape(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, "a weight must be [out, in], found ", weight.sizes());
  std::vector<int64_t> shape;
  FOR_DTYPE(weight, "panel_shape", {
    if (usable<scalar_t>() && weight.size(1) % kDeep<scalar_t> == 0) shape = {kPanel, kDeep<scalar_t>};
  });
  return shape;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(repro_models, library) {
  // x [n, in], panels [out / width or one more, in / deep, width, deep], bias [out]: [n, out]. after: "" (nothing), GELU, "none" (exact) or
  // "tanh", or "silu": of panels of 2 out outputs, silu(the first half) times the second.
  library.def("product(Tensor x, Tensor panels, int out, Tensor? bias, str after) -> Tensor", &product);
  // The width and depth of the panels of a weight [out, in] on this processor; empty where this process may not use its matrix units, or
  // the inputs do not come out even.
  library.def("panel_shape(Tensor weight) -> int[]", &panel_shape);
}
