// y = x Wᵀ + b for the rows that a decoder has at once. With one row a product takes as long as it takes to read W; libraries made for
// large matrices were measured to read it at 60 % of the memory's speed.
//
// W is laid out in panels (tiles.h). A panel meets some rows at once (6, 12 or 32), and what one thread needs of it after that comes from its
// cache.
// What follows a product element by element is done before its sums are stored.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>
#include <unistd.h>

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
using repro::kLanes;
using repro::kMatrices;
using repro::kPanel;
using repro::load;
using repro::store;
using repro::Vector;

namespace {

template <typename T>
constexpr int kMostRows = kMatrices<T> ? repro::kAtOnce : repro::kMostRows;  // of a tile

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

// About half of a core's second cache, in bytes: what is to stay there, whatever passes.
int64_t near_bytes() {
  static const int64_t bytes = [] {
    int64_t cache = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
    cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return (cache > 0 ? cache : 512 << 10) / 2;
  }();
  return bytes;
}

constexpr int64_t kItems = 4;  // a thread's: one that was interrupted leaves the rest to the others

// Some panels times some tiles of rows, of nearly equal size, make an item.
template <typename T>
class Product {
  using F = Factor<T>;

 public:
  Product(const Tensor& x, const Tensor& panels, const std::optional<Tensor>& bias, After after, Tensor& y)
      : after(after),
        gated(after == After::kSilu),
        rows(x.size(0)),
        in(x.size(1)),
        out(y.size(1)),
        count(panels.size(0) / (gated ? 2 : 1)),
        weights(panels.numel()),
        tiles((rows + kMostRows<T> - 1) / kMostRows<T>),
        wide(factors_of<T>(x)),
        x0(wide.const_data_ptr<F>()),
        w0(panels.const_data_ptr<T>()),
        b0(bias ? bias->const_data_ptr<T>() : nullptr),
        y0(y.mutable_data_ptr<T>()) {}

  // An item goes panel by panel, and its rows stay in the cache; with matrix units tile by tile, and its panels stay.
  void run() const {
    const int64_t enough = kItems * at::get_num_threads();
    const int64_t parts = std::min(count, std::max(enough, kMatrices<T> ? times_near(weights) : 0));
    const int64_t needed = std::max(kMatrices<T> ? 1 : times_near(rows * in), enough / std::max<int64_t>(1, parts));
    const int64_t blocks = std::max<int64_t>(1, std::min(needed, tiles / kFewest));
    repro::each(blocks * parts, rows * weights, [&](int64_t item) {
      const int64_t block = item / parts, part = item % parts;
      const int64_t begin = tiles * block / blocks, end = tiles * (block + 1) / blocks;
      const int64_t first = count * part / parts, last = count * (part + 1) / parts;
      const repro::MatrixUnits units;
      if (kMatrices<T>)
        for (int64_t t = begin; t < end; t++)
          for (int64_t panel = first; panel < last; panel++) panel_times_tiles(panel, t, t + 1, false);
      else
        for (int64_t panel = first; panel < last; panel++) panel_times_tiles(panel, begin, end, panel + 1 < last);
    });
  }

 private:
  static constexpr int64_t kFewest = std::is_same_v<F, T> ? 1 : 4;  // tiles in a block: a panel that is widened is so for several

  static int64_t times_near(int64_t factors) { return (factors * static_cast<int64_t>(sizeof(F)) + near_bytes() / 2) / near_bytes(); }

  void panel_times_tiles(int64_t number, int64_t begin, int64_t end, bool fetches) const {
    const int64_t first = number * kPanel, size = in * kPanel;
    const T *panel = w0 + first * in, *gate = gated ? w0 + (out + first) * in : nullptr;
    const T *next = fetches ? panel + size : nullptr, *next_gate = fetches && gated ? gate + size : nullptr;
    if constexpr (!std::is_same_v<F, T>) {
      thread_local std::vector<float> space, gate_space;
      if (end - begin > 1) {
        const float* wide_gate = gated ? widened(gate, size, gate_space) : nullptr;
        return multiply(first, begin, end, widened(panel, size, space), wide_gate, next, next_gate);
      }
    }
    multiply(first, begin, end, panel, gate, next, next_gate);
  }

  template <typename W>
  void multiply(int64_t first, int64_t begin, int64_t end, const W* panel, const W* gate, const T* next, const T* next_gate) const {
    float sums[kMostRows<T>][kPanel], factors[kMostRows<T>][kPanel];
    for (int64_t t = begin; t < end; t++) {
      // Matrix units take shapes as they come, and time for others.
      const int64_t row = kMatrices<T> ? t * kMostRows<T> : rows * t / tiles;
      const int64_t high = kMatrices<T> ? std::min<int64_t>(kMostRows<T>, rows - row) : rows * (t + 1) / tiles - row;
      rows_times_panel(high, row, panel, next, t - begin, end - begin, sums[0]);
      if (gated) rows_times_panel(high, row, gate, next_gate, t - begin, end - begin, factors[0]);
      finish(high, row, first, sums, factors);
    }
  }

  // Each of `parts` tiles fetches a part of the panel that is next, if there is one.
  template <typename W>
  void rows_times_panel(int64_t high, int64_t row, const W* panel, const T* next, int64_t part, int64_t parts, float* sums) const {
    if constexpr (kMatrices<T>) {
      repro::matrix_tile_of<true>(high, x0 + row * in, in, panel, in, sums);
    } else {
      constexpr int64_t bytes = kPanel * kDeep<T> * sizeof(T);
      repro::Ahead ahead{panel, 0};
      if (next != nullptr) ahead = {next + kPanel * in * part / parts, (bytes + parts - 1) / parts};
      repro::tile_of<F>(high, x0 + row * in, {in, kDeep<T>}, panel, in, sums, nullptr, ahead);
    }
  }

  // What follows a product.
  void finish(int64_t high, int64_t row, int64_t first, float (*sums)[kPanel], const float (*factors)[kPanel]) const {
    const int64_t width = std::min<int64_t>(kPanel, out - first);
    float bias[kPanel] = {};
    if (b0 != nullptr) std::transform(b0 + first, b0 + first + width, bias, repro::widen<T>);
    T* y = y0 + row * out + first;
    for (int64_t r = 0; r < high; r++, y += out) {
      for (int lane = 0; lane < kPanel; lane += kLanes) {
        Vector some = load(sums[r] + lane) + load(bias + lane);
        if (gated) some = repro::silu(some) * load(factors[r] + lane);
        store(some, sums[r] + lane);
      }
      activate(after, sums[r]);
      if (width == kPanel)  // how many there are is known: no loop
        repro::narrow_all(sums[r], kPanel, y);
      else
        repro::narrow_all(sums[r], width, y);
    }
  }

  const After after;
  const bool gated;  // the second half of the panels is multiplied by the SiLU of the first
  const int64_t rows, in, out, count, weights, tiles;
  const Tensor wide;
  const F* const x0;
  const T *const w0, *const b0;
  T* const y0;
};

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
    Product<scalar_t>(x, panels, bias, step, y).run();
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
