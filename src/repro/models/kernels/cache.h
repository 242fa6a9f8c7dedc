// Where keys and values lie: a cache is [blocks, kv_heads, block, dim]. Position t of slot s lies in block table[s][t / block] at t % block;
// without a table a slot is a block. A row is one token: its slot, and its position there.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace repro {

using at::Tensor;

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

}  // namespace repro
