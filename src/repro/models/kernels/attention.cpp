// Causal attention over a cache, of rows that decode and of prompts. Sums are in fp32 whatever the dtype.
//
// A row's sums run in an order that depends on its position only, and on whether it is of a prompt or decodes: its result is the same, bit
// for bit, whatever stands beside it, and into however many chunks a prompt of finite numbers is cut.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "cache.h"
#include "matrices.h"
#include "numbers.h"
#include "threads.h"
#include "tiles.h"

using at::Tensor;
using repro::Cache;
using repro::check_tensors;
using repro::each;
using repro::Factor;
using repro::kAtOnce;
using repro::kDeep;
using repro::kLanes;
using repro::kMatrices;
using repro::kPanel;
using repro::larger;
using repro::load;
using repro::narrow;
using repro::power_of_two;
using repro::store;
using repro::Vector;
using repro::Whole;
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

// One block of keys and values of one head as a tile reads them: positions are its rows where keys meet queries, and its inputs where
// values meet weights. They stay where they are in the cache, unless they lie in pieces, are multiplied as other numbers, or values that an
// instruction takes at once are to be neighbours: two, or for matrix units all of the block.
template <typename T>
struct Block {
  using F = Factor<T>;
  static constexpr int deep = kDeep<F>;
  int64_t dim, inputs;  // of a head: entries, and rounded up to `deep`
  Space<F> keys_space, values_space, turned;
  const F *keys, *values;  // [positions, inputs]; [positions / deep, dim, deep], or turned [dim, kKeys]

  Block(int64_t dim, bool turns)
      : dim(dim),
        inputs((dim + deep - 1) / deep * deep),
        keys_space(zeros<F>(kKeys * inputs)),
        values_space(zeros<F>(kKeys * dim)),
        turned(turns ? zeros<F>(kKeys * dim) : nullptr) {}

  void read(const T* k0, const T* v0, const Cache& cache, int64_t slot, int64_t head, int64_t start, int64_t count) {
    const bool whole = std::is_same_v<F, T> && start % cache.block + count <= cache.block;
    const int64_t first = cache.at(slot, head, start);
    keys = keys_space.get();
    values = values_space.get();
    if constexpr (std::is_same_v<F, T>) {
      if (whole && inputs == dim) keys = k0 + first;
      if (whole && deep == 1) values = v0 + first;
    }
    if (keys == keys_space.get())
      for (int64_t t = 0; t < count; t++) {
        const T* from = k0 + cache.at(slot, head, start + t);
        for (int64_t d = 0; d < dim; d++) keys_space[t * inputs + d] = repro::factor<F>(from[d]);
      }
    if (values == values_space.get())
      for (int64_t t = 0; t < count; t += deep) {
        static constexpr T nothing[kMostDim] = {};
        const T* from = v0 + cache.at(slot, head, start + t);
        const T* last = t + deep <= count ? v0 + cache.at(slot, head, start + t + deep - 1) : nothing;
        F* to = &values_space[t * dim];
        for (int64_t d = 0; d < dim; d++) {
          to[d * deep] = repro::factor<F>(from[d]);
          to[d * deep + deep - 1] = repro::factor<F>(last[d]);
        }
      }
    // Pairs of values, [kKeys / 2, dim] numbers of 32 bits. What stands behind the last position is old, and meets weights of 0.
    if (turned != nullptr) {
      repro::turn(values_space.get(), dim, kKeys / 2, dim, turned.get(), kKeys / 2);
      values = turned.get();
    }
  }
};

// A panel of queries, in order of their positions: the highest score of each so far, in powers of two, and the sum of its weights relative
// to it.
struct Panel {
  float highest[kPanel], total[kPanel] = {};
  int position[kPanel];

  Panel() { std::fill_n(highest, kPanel, kLowest); }
};

// The scores of `count` positions from `start` on to weights, 0 where a query does not see a position, and up to a multiple of `step`.
// `fades`: by how much what was summed before fades. A query is a lane, so that none waits for a sum of lanes; written as vectors, or
// compilers treat lanes differently.
template <typename F>
const F* weigh(float (*scores)[kPanel], int count, int step, float scale, int start, Panel& queries, float* fades, F* weights) {
  constexpr int deep = kDeep<F>;
  const int all = std::clamp(queries.position[0] + 1 - start, 0, count);  // see it
  for (; count % step != 0; count++) std::fill_n(scores[count], kPanel, kLowest);
  for (int lane = 0; lane < kPanel; lane += kLanes) {
    const Whole seen = load<Whole>(queries.position + lane) + 1 - start;
    const Vector lowest = Vector{} + kLowest, before = load(queries.highest + lane);
    Vector most = lowest, sum = {};
    for (int t = all; t < count; t++) store(t < seen ? load(scores[t] + lane) : lowest, scores[t] + lane);
    for (int t = 0; t < count; t++) most = larger(most, load(scores[t] + lane));
    most = larger(most * scale, before);
    for (int t = 0; t < count; t++) {
      const Vector weight = power_of_two(load(scores[t] + lane) * scale - most);
      store(weight, scores[t] + lane);
      sum += weight;
    }
    const Vector fade = power_of_two(before - most);
    store(most, queries.highest + lane);
    store(fade, fades + lane);
    store(load(queries.total + lane) * fade + sum, queries.total + lane);
  }
  if constexpr (deep == 1) return scores[0];
  for (int t = 0; t < count; t += deep) repro::interleave(scores[t], scores[t + 1], weights + t * kPanel);
  return weights;
}

// Panels `begin` to `end` of one KV head of one chunk, whose queries are counted row by row, in each row those of the group: they meet a
// block of keys and values before the next is read.
template <typename T>
void attend_part(const T* q0, const T* k0, const T* v0, T* o0, const Chunk& chunk, const Cache& cache, int64_t heads, int64_t head,
                 int64_t begin, int64_t end) {
  using F = Factor<T>;
  constexpr int deep = kDeep<F>;
  const int64_t dim = cache.dim, group = heads / cache.kv_heads, count = std::min(end * kPanel, chunk.rows * group);
  const float scale = 1.44269504f / std::sqrt(static_cast<float>(dim));  // of powers of two
  const bool matrices = kMatrices<F> && repro::matrices_allowed();
  const repro::MatrixUnits units;
  Block<T> block(dim, matrices);
  const int64_t inputs = block.inputs;
  const Space<F> q = zeros<F>((end - begin) * kPanel * inputs);      // of a panel [inputs / deep, kPanel, deep]
  const Space<float> o = zeros<float>((end - begin) * kPanel * dim);  // [dim, kPanel]
  std::vector<Panel> panels(end - begin);
  const auto entry = [&](int64_t i) { return ((chunk.first + i / group) * heads + head * group + i % group) * dim; };
  const auto position = [&](int64_t i) { return chunk.position + std::min(i, count - 1) / group; };
  for (int64_t i = begin * kPanel; i < end * kPanel; i++) panels[i / kPanel - begin].position[i % kPanel] = static_cast<int>(position(i));
  const Space<F> some = zeros<F>(kPanel * inputs);
  for (int64_t p = 0; p < end - begin; p++) {
    for (int64_t lane = 0, i = (begin + p) * kPanel; lane < kPanel && i < count; lane++, i++) {
      const T* from = q0 + entry(i);
      for (int64_t d = 0; d < dim; d++) some[lane * inputs + d] = repro::factor<F>(from[d]);
    }
    repro::turn(some.get(), inputs / deep, kPanel, inputs / deep, &q[p * kPanel * inputs], kPanel);
  }
  const int64_t length = position(count) + 1;
  for (int64_t start = 0; start < length; start += kKeys) {
    block.read(k0, v0, cache, chunk.slot, head, start, std::min<int64_t>(kKeys, length - start));
    for (int64_t p = 0; p < end - begin; p++) {
      const int64_t seen = std::min<int64_t>(kKeys, panels[p].position[kPanel - 1] + 1 - start);  // by any of them
      if (seen <= 0) continue;
      float scores[kKeys][kPanel], fades[kPanel];
      F weights[kKeys * kPanel];
      const F* query = &q[p * kPanel * inputs];
      float* sums = &o[p * dim * kPanel];
      const auto weighed = [&](int step) {
        return weigh(scores, static_cast<int>(seen), step, scale, static_cast<int>(start), panels[p], fades, weights);
      };
      if constexpr (kMatrices<F>)
        if (matrices) {
          for (int64_t t = 0; t < seen; t += kAtOnce)
            repro::matrix_tile_of(std::min<int64_t>(kAtOnce, seen - t), block.keys + t * inputs, inputs, query, inputs, scores[t]);
          const F* w = weighed(kAtOnce);
          for (int64_t d = 0; d < dim; d += kAtOnce)
            repro::matrix_tile_of(std::min<int64_t>(kAtOnce, dim - d), block.values + d * kKeys, kKeys, w,
                                  (seen + kAtOnce - 1) / kAtOnce * kAtOnce, sums + d * kPanel, fades);
          continue;
        }
      repro::tiles(seen, [&](int64_t first, int64_t rows) {
        repro::tile_of<F>(rows, block.keys + first * inputs, {inputs, deep}, query, inputs, scores[first], nullptr, {query, 0});
      });
      const F* w = weighed(deep);
      repro::tiles(dim, [&](int64_t first, int64_t rows) {
        repro::tile_of<F>(rows, block.values + first * deep, {deep, deep * dim}, w, seen, sums + first * kPanel, fades, {w, 0});
      });
    }
  }
  const Space<float> all = zeros<float>(kPanel * dim);
  for (int64_t p = 0; p < end - begin; p++) {
    repro::turn(&o[p * kPanel * dim], kPanel, dim, kPanel, all.get(), dim);
    for (int64_t lane = 0, i = (begin + p) * kPanel; lane < kPanel && i < count; lane++, i++) {
      float* row = &all[lane * dim];
      const float part = 1 / panels[p].total[lane];
      for (int64_t d = 0; d < dim; d++) row[d] *= part;
      repro::narrow_all(row, dim, o0 + entry(i));
    }
  }
}

constexpr int64_t kFewest = 48 / kPanel + 1, kMost = 192 / kPanel;  // panels in a part: more share a block, fewer share the work better

template <typename T>
void attend_chunks(const Tensor& q, const Tensor& keys, const Tensor& values, const std::vector<Chunk>& chunks, const Cache& cache,
                   Tensor& out) {
  const int64_t heads = q.size(1), group = heads / cache.kv_heads;
  struct Part {
    Chunk chunk;
    int64_t head, begin, end;  // panels
  };
  std::vector<Part> parts;
  int64_t queries = 0, pairs = 0;
  for (const Chunk& chunk : chunks) {
    queries += chunk.rows * heads;
    pairs += chunk.rows * heads * (chunk.position + chunk.rows);
  }
  const int64_t most = std::clamp<int64_t>(queries / kPanel / (8 * at::get_num_threads()), kFewest, kMost);
  for (const Chunk& chunk : chunks)
    for (int64_t count = (chunk.rows * group + kPanel - 1) / kPanel, some = (count + most - 1) / most, part = 0; part < some; part++)
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
  TORCH_CHECK(cache.width * cache.block <= INT_MAX, "a slot of ", cache.width * cache.block, " positions, at most ", INT_MAX, " allowed");
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
