// SPDX-License-Identifier: Apache-2.0
// What the ranks of a node send each other on two levels, uncompressed. Every tensor is cut into pieces, one for each
// place in the node (feedback/owners.h):
//
//   scatter   every rank sends piece p of its tensors to place p, which adds what it gets in the order of the places,
//             in f32, whatever the tensors' type is
//   ...       the pieces are reduced between nodes
//   gather    every rank sends the results of its pieces, in the tensors' type, to all of its node
//
// A row holds the pieces of one place, one tensor after the other. Rows are in memory of the host, where the engine
// reaches them; for tensors on a GPU the sums are made there, too.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collective/job.h"
#include "collective/node_layout.h"
#include "collective/timer.h"
#include "device/buffer.h"
#include "device/finite_check.h"

namespace gradwire {

class NodeExchange {
 public:
  // `node`: the ranks of this node, by place. `whole`: the job of the whole tensors. Both must outlive it.
  NodeExchange(Engine& node, const Job& whole, ReduceTimer& timer);

  // This rank's pieces, one per tensor, as f32 where the tensors are; first the mean of the node, or the sum, and then
  // the result.
  const std::vector<void*>& pieces() const { return pieces_; }

  void scatter(std::span<const void* const> in);
  // `check`: whether results must be finite. False is returned on all ranks of a node if those of any of them are not.
  bool gather(std::span<void* const> out, bool check);

  uint64_t bytes_sent() const;  // in a step
  uint64_t memory() const;
  uint64_t sum_memory() const { return floats_.held(); }

 private:
  struct PieceInRow {
    uint64_t first, count;  // elements of the tensor
    uint64_t at;            // byte of the row
  };
  struct NodeRow {
    std::vector<PieceInRow> pieces;  // per tensor
    uint64_t start = 0;              // byte in rows_
    uint64_t bytes = 0;              // of the pieces; a flag follows where rows are gathered
  };

  size_t place() const { return static_cast<size_t>(node_.rank()); }
  const NodeRow& mine() const { return layout_[place()]; }
  Bytes row(size_t place, uint64_t more = 0) const;
  void add_row(const std::byte* from, bool first);
  void divide_sums();
  void narrow_results();
  bool finite_row();

  Engine& node_;
  const Job& job_;
  ReduceTimer& timer_;
  std::vector<NodeRow> layout_;  // per place
  std::vector<void*> pieces_;
  std::vector<uint64_t> offsets_;  // of this rank's pieces, in floats
  Buffer rows_;                    // of all places: what is sent by scatter, and what is received by gather
  Buffer received_;                // this place's rows, from all ranks
  Buffer floats_;                  // this rank's pieces
  Buffer host_floats_;             // the same on the host, for tensors on a GPU
  FiniteCheck finite_;
};

}  // namespace gradwire
