// Causal attention over a cache, of rows that decode and of prompts. Sums are in fp32 whatever the dtype.
//
// A row's sums run in an order that depends on its position only, and on whether it is of a prompt or decodes: its result is the same, bit
// for bit, whatever stands beside it, and into however many chunks a prompt is cut.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "cache.h"
#include "numbers.h"
#include "threads.h"
#include "tiles.h"

using at::Tensor;
using repro::Cache;
using repro::check_tensors;
using repro::each;
using repro::Factor;
using repro::kDeep;
using repro::kMostRows;
using repro::kPanel;
using repro::narrow;
using repro::power_of_two;
using repro::widen;

namespace {

constexpr int kMostDim = 256;

// Calls body(start, stop, offset) for the stretches of a slot's first `length` positions that lie in one piece.
template <typename F>
void stretches(const Cache& cache, int64_t slot, int64_t head, int64_t length, F body) {
  for (int64_t start = 0; start < length; start += cache.block)
    body(start, std::min(start + cache.block, length), cache.at(slot, head, start));
}

// Rows that decode, each head alone. DIM: entries of a head where the compiler may know them, and keep them in registers; else 0. While keys of a head are read, its values
// are fetched: between two passes the weights have driven both out of the caches, and one head is too short for the processor to guess.
template <typename T, int DIM>
void attend_rows(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& slots, const Tensor& positions,
                 const std::vector<int64_t>& rows, const Cache& cache, Tensor& out) {
  const int64_t heads = q.size(1), kv_heads = cache.kv_heads, group = heads / kv_heads;
  const int dim = DIM ? DIM : cache.dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const T *q0 = q.const_data_ptr<T>(), *k0 = keys.const_data_ptr<T>(), *v0 = values.const_data_ptr<T>();
  const int64_t *slot = slots.const_data_ptr<int64_t>(), *position = positions.const_data_ptr<int64_t>();
  T* o0 = out.mutable_data_ptr<T>();
  int64_t seen = 0;
  for (const int64_t row : rows) seen += position[row] + 1;
  each(rows.size() * kv_heads, 2 * seen * heads * dim, [&](int64_t item) {
    const int64_t row = rows[item / kv_heads], head = item % kv_heads, length = position[row] + 1;
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

// Successive tokens of one prompt: `rows` of them from row `first` on.
struct Chunk {
  int64_t first, rows, slot, position;
};

constexpr int kKeys = 64;            // positions in a block; blocks begin at multiples of it, wherever a chunk begins
constexpr float kLowest = -1e30f;  // -ffast-math knows no infinity

template <typename T>
using Space = std::unique_ptr<T[]>;

template <typename T>
Space<T> zeros(int64_t count) {
  return std::make_unique<T[]>(count);
}

// One block of keys and values of one head as panels: keys for products with queries (outputs are positions), values for products with
// weights (outputs are the entries of a head).
template <typename T>
struct Block {
  using F = Factor<T>;
  static constexpr int deep = kDeep<F>;
  int64_t dim, inputs, panels;  // of a head: entries, rounded up to `deep`, and in panels
  Space<F> keys, values;

  explicit Block(int64_t dim)
      : dim(dim), inputs((dim + deep - 1) / deep * deep), panels((dim + kPanel - 1) / kPanel), keys(zeros<F>(kKeys * inputs)),
        values(zeros<F>(panels * kPanel * kKeys)) {}

  const F* keys_from(int64_t position) const { return &keys[position * inputs]; }      // a panel, at multiples of kPanel
  const F* values_from(int64_t entry) const { return &values[entry * kKeys]; }         // likewise

  // `count` positions from `start` on; the rest of the block becomes zero.
  void fill(const T* k0, const T* v0, const Cache& cache, int64_t slot, int64_t head, int64_t start, int64_t count) {
    static constexpr T nothing[kMostDim] = {};
    const T* from[kKeys][2];
    for (int64_t t = 0; t < kKeys; t++) {
      const int64_t at = t < count ? cache.at(slot, head, start + t) : 0;
      from[t][0] = t < count ? k0 + at : nothing;
      from[t][1] = t < count ? v0 + at : nothing;
    }
    for (int64_t t = 0; t < kKeys; t++) {
      F* to = &keys[t / kPanel * kPanel * inputs + t % kPanel * deep];
      const T* k = from[t][0];
      for (int64_t d = 0; d < dim / deep; d++, to += kPanel * deep)
        for (int i = 0; i < deep; i++) to[i] = factor(k[d * deep + i]);
      if (dim % deep) to[0] = factor(k[dim - 1]);
    }
    for (int64_t t = 0; t < kKeys; t += deep)
      for (int64_t p = 0; p < panels; p++) {
        F* to = &values[(p * kKeys + t) * kPanel];
        const int64_t wide = std::min<int64_t>(kPanel, dim - p * kPanel);
        const T *first = from[t][1] + p * kPanel, *last = from[t + deep - 1][1] + p * kPanel;
        for (int64_t d = 0; d < wide; d++) {
          to[d * deep] = factor(first[d]);
          to[d * deep + deep - 1] = factor(last[d]);
        }
      }
  }

  static F factor(T value) {
    if constexpr (std::is_same_v<F, T>)
      return value;
    else
      return widen(value);
  }
};

// The scores of a tile of queries and one block to weights. `highest`: each query's highest score so far, in powers of two; `total`: the
// sum of its weights relative to it. The first counts[r] positions count, none where a query stands before the block. `fades`: by how much
// what was summed before fades. Step by step for all queries: what one waits for, another does.
template <typename F>
void weigh(int64_t rows, float (*scores)[kKeys], float scale, const int* counts, float* highest, float* total, float* fades,
           F (*weights)[kKeys]) {
  float most[kMostRows], sums[kMostRows];
  for (int64_t r = 0; r < rows; r++) {
    float *s = scores[r], found = kLowest;
    for (int t = counts[r]; t < kKeys; t++) s[t] = kLowest;
    for (int t = 0; t < kKeys; t++) found = std::max(found, s[t]);
    most[r] = found;
  }
  for (int64_t r = 0; r < rows; r++) {
    most[r] = std::max(most[r] * scale, highest[r]);
    fades[r] = power_of_two(highest[r] - most[r]);
    highest[r] = most[r];
  }
  for (int64_t r = 0; r < rows; r++) {
    float *s = scores[r], sum = 0;
    const float top = highest[r];
    for (int t = 0; t < kKeys; t++) s[t] = power_of_two(s[t] * scale - top);
    for (int t = counts[r]; t < kKeys; t++) s[t] = 0;
    for (int t = 0; t < kKeys; t++) sum += s[t];
    repro::narrow_all(s, kKeys, weights[r]);
    sums[r] = sum;
  }
  for (int64_t r = 0; r < rows; r++) total[r] = total[r] * fades[r] + sums[r];
}

// Queries `begin` to `end` of one KV head of one chunk, counted row by row, in each row those of the group: they meet a block of keys and
// values before the next is read.
template <typename T>
void attend_part(const T* q0, const T* k0, const T* v0, T* o0, const Chunk& chunk, const Cache& cache, int64_t heads, int64_t head,
                 int64_t begin, int64_t end) {
  using F = Factor<T>;
  const int64_t dim = cache.dim, group = heads / cache.kv_heads, count = end - begin;
  const float scale = 1.44269504f / std::sqrt(static_cast<float>(dim));  // of powers of two
  Block<T> block(dim);
  const int64_t wide = block.panels * kPanel;
  const Space<F> q = zeros<F>(count * block.inputs);
  const Space<float> o = zeros<float>(count * wide);
  std::vector<float> highest(count, kLowest), total(count);
  const auto entry = [&](int64_t i) { return ((chunk.first + i / group) * heads + head * group + i % group) * dim; };
  const auto position = [&](int64_t i) { return chunk.position + i / group; };
  for (int64_t i = 0; i < count; i++)
    for (int64_t d = 0; d < dim; d++) q[i * block.inputs + d] = Block<T>::factor(q0[entry(begin + i) + d]);
  const int64_t length = position(end - 1) + 1, tiles = (count + kMostRows - 1) / kMostRows;
  for (int64_t start = 0; start < length; start += kKeys) {
    block.fill(k0, v0, cache, chunk.slot, head, start, std::min<int64_t>(kKeys, length - start));
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t first = count * t / tiles, rows = count * (t + 1) / tiles - first;
      const int64_t seen = std::min<int64_t>(kKeys, position(begin + first + rows - 1) + 1 - start);  // by any of them
      if (seen <= 0) continue;
      float scores[kMostRows][kKeys], fades[kMostRows], sums[kMostRows][kPanel];
      F weights[kMostRows][kKeys];
      int counts[kMostRows];
      const F* x = &q[first * block.inputs];
      for (int64_t p = 0; p < seen; p += kPanel)
        repro::tile_of<F>(rows, x, block.inputs, block.keys_from(p), block.inputs, scores[0] + p, kKeys);
      for (int64_t r = 0; r < rows; r++)
        counts[r] = std::clamp<int64_t>(position(begin + first + r) + 1 - start, 0, kKeys);
      weigh(rows, scores, scale, counts, &highest[first], &total[first], fades, weights);
      const int64_t inputs = (seen + block.deep - 1) / block.deep * block.deep;
      for (int64_t d = 0; d < wide; d += kPanel) {
        repro::tile_of<F>(rows, weights[0], kKeys, block.values_from(d), inputs, sums[0], kPanel);
        for (int64_t r = 0; r < rows; r++) {
          float* to = &o[(first + r) * wide + d];
          for (int i = 0; i < kPanel; i++) to[i] = to[i] * fades[r] + sums[r][i];
        }
      }
    }
  }
  for (int64_t i = 0; i < count; i++)
    for (int64_t d = 0; d < dim; d++) o0[entry(begin + i) + d] = narrow<T>(o[i * wide + d] / total[i]);
}

constexpr int64_t kFewest = 4 * kMostRows, kMost = 16 * kMostRows;  // queries in a part: more share a block, fewer share the work better

template <typename T>
void attend_chunks(const Tensor& q, const Tensor& keys, const Tensor& values, const std::vector<Chunk>& chunks, const Cache& cache,
                   Tensor& out) {
  const int64_t heads = q.size(1), group = heads / cache.kv_heads;
  struct Part {
    Chunk chunk;
    int64_t head, begin, end;
  };
  std::vector<Part> parts;
  int64_t queries = 0, pairs = 0;
  for (const Chunk& chunk : chunks) {
    queries += chunk.rows * heads;
    pairs += chunk.rows * heads * (chunk.position + chunk.rows);
  }
  const int64_t most = std::clamp(queries / (8 * at::get_num_threads()), kFewest, kMost);
  for (const Chunk& chunk : chunks)
    for (int64_t count = chunk.rows * group, some = (count + most - 1) / most, part = 0; part < some; part++)
      for (int64_t head = 0; head < cache.kv_heads; head++)
        parts.push_back({chunk, head, count * part / some, count * (part + 1) / some});
  const T *q0 = q.const_data_ptr<T>(), *k0 = keys.const_data_ptr<T>(), *v0 = values.const_data_ptr<T>();
  T* o0 = out.mutable_data_ptr<T>();
  each(parts.size(), 2 * pairs * cache.dim, [&](int64_t item) {
    const Part& part = parts[item];
    attend_part<T>(q0, k0, v0, o0, part.chunk, cache, heads, part.head, part.begin, part.end);
  });
}

Tensor attend(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& slots, const Tensor& positions,
              const std::optional<Tensor>& table, const std::optional<Tensor>& prompt) {
  check_tensors({q, keys, values, slots, positions, table.value_or(slots), prompt.value_or(slots)});
  const Cache cache(keys, values, table);
  TORCH_CHECK(q.dim() == 3 && q.size(2) == cache.dim && q.size(1) % cache.kv_heads == 0, "q ", q.sizes(), " must be [n, a multiple of ",
              cache.kv_heads, ", ", cache.dim, "]");
  cache.check(slots, positions, q.size(0), true);
  TORCH_CHECK(cache.dim <= kMostDim, "head_dim is ", cache.dim, ", at most ", kMostDim, " allowed");
  TORCH_CHECK(!prompt || prompt->numel() == q.size(0), q.size(0), " rows, but for ", prompt ? prompt->numel() : 0, " it is known whether "
              "they are of a prompt");
  const int64_t *slot = slots.const_data_ptr<int64_t>(), *position = positions.const_data_ptr<int64_t>();
  const bool* prompts = prompt ? prompt->const_data_ptr<bool>() : nullptr;
  std::vector<int64_t> decoding;
  std::vector<Chunk> chunks;
  for (int64_t row = 0; row < q.size(0); row++) {
    if (prompts == nullptr || !prompts[row]) {
      decoding.push_back(row);
      continue;
    }
    if (!chunks.empty()) {
      Chunk& last = chunks.back();
      if (last.first + last.rows == row && last.slot == slot[row] && last.position + last.rows == position[row]) {
        last.rows++;
        continue;
      }
    }
    chunks.push_back({row, 1, slot[row], position[row]});
  }
  auto out = at::empty({q.size(0), q.size(1) * q.size(2)}, q.options());
  FOR_DTYPE(q, "attend", {
    const auto rows = cache.dim == 64    ? attend_rows<scalar_t, 64>
                      : cache.dim == 128 ? attend_rows<scalar_t, 128>
                                         : attend_rows<scalar_t, 0>;
    rows(q, keys, values, slots, positions, decoding, cache, out);
    attend_chunks<scalar_t>(q, keys, values, chunks, cache, out);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(repro_models, library) {
  // q [n, heads, dim]: row i attends to positions 0 ... positions[i] of its slot. prompt: bool [n], which rows are of prompts (None: they
  // all decode); neighbours of one prompt attend together. Returns [n, heads dim].
  library.def("attend(Tensor q, Tensor keys, Tensor values, Tensor slots, Tensor positions, Tensor? table, Tensor? prompt=None) -> Tensor",
              &attend);
}
