// SPDX-License-Identifier: Apache-2.0
// What a worker of a server holds back of its updates, by parameter, until it goes out with a later one:
//
//   with error feedback      the residual: all that compression has left out, and updates that came too late
//   without                  updates that came too late; what compression leaves out is dropped when an update is sent
//
// Without feedback, what the newest update left out is kept aside until the next one is encoded. If the update comes
// too late, it comes back whole. Were only its decoded message to come back, it would be compressed once more with the
// next update, and after some late updates in a row there would be more error than signal.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "feedback/residual_store.h"
#include "server/signature.h"

namespace gradwire::server {

class WorkerResiduals {
 public:
  explicit WorkerResiduals(const Signature& signature);

  // For one encode of a shard; commit() ends it.
  std::unique_ptr<ErrorFeedback::Pointers> begin(uint64_t step, std::span<const TensorSpec> tensors) {
    return store_.begin(Direction::up, step, tensors, 1.0f);
  }
  // What an update has left out for good, as the ledger counts it.
  struct Dropped {
    double sum = 0, squares = 0;
  };
  Dropped commit(uint64_t step, const ShardLayout& shard);
  // The newest update of this shard does not count: what commit() dropped is held back after all. Returns its signed
  // sum. The caller adds the message itself.
  double take_back(const ShardLayout& shard);

  std::span<float> of(size_t parameter) const { return store_.floats(keys_[parameter]); }
  std::vector<float*> pointers() const;
  double sum(const ShardLayout& shard) const;  // with the signs of the ledger
  uint64_t bytes() const;                      // of memory

 private:
  std::span<float> part(const ParameterRange& range) const {
    return of(range.parameter).subspan(range.first, range.count);
  }

  std::vector<ResidualKey> keys_;
  std::vector<uint64_t> name_hashes_;
  ResidualStore store_{DType::f32, Device{}};
  std::vector<std::vector<float>> dropped_;  // of the newest update; empty for a parameter with feedback
};

}  // namespace gradwire::server
