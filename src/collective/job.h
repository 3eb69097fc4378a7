// SPDX-License-Identifier: Apache-2.0
// A Job is a list of tensors with everything that the options say about them resolved: the codec of each tensor up and
// down, and whether it has a residual there. All collectives start from one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collective/handshake.h"
#include "device/memory.h"
#include "feedback/owners.h"
#include "gradwire/collective.h"

namespace gradwire {

// Which pieces of the tensors a job is about: those of one place in a node of several ranks (feedback/owners.h).
struct JobPlace {
  int place = 0;
  int places = 1;
};

struct Job {
  // `collective` is its name, for messages and for the handshake. Throws Error{usage}. With several places the tensors
  // of the job are pieces of the given ones, as f32. Codecs and indices of elements are those of the whole tensors. The
  // last `bare` tensors have no residuals, whatever the options say: what is left out of them is kept elsewhere.
  Job(std::string collective, std::span<const NamedTensor> tensors, const ReduceOptions& options, JobPlace place = {},
      size_t bare = 0);

  std::string collective;
  std::vector<NamedTensor> tensors;
  std::vector<uint64_t> firsts;  // per tensor: the index of its first element, which is not 0 for a piece
  ReduceOptions options;
  std::vector<Codec> up, down;                   // per tensor
  std::vector<bool> up_feedback, down_feedback;  // per tensor
  std::shared_ptr<Memory> memory;                // of the options' device

  Handshake handshake() const;
  // All tensors, uncut, as one message carries them.
  std::vector<Shard> whole(int owner = 0) const;
  // All tensors, cut for `world` owners.
  std::vector<Shard> owned(int world) const;
  // Those shards of `all` that belong to `owner`.
  static std::vector<Shard> of_owner(std::span<const Shard> all, int owner);
  // How a message with these shards is laid out, as this rank holds the elements: in the tensors' types, or all in f32.
  std::vector<TensorSpec> specs(std::span<const Shard> shards, Direction direction, bool as_f32) const;
  // Adds the residuals that these shards need. They must be where the tensors are.
  void add_residuals(ErrorFeedback& feedback, std::span<const Shard> shards, Direction direction) const;
  // How many elements a rank sends with this codec: of the whole model, where reducers share one.
  uint64_t elements_with(const std::string& spec, Direction direction) const;
  const Device& device() const { return options.device; }
  void check_pointers(std::span<const void* const> pointers, const char* what) const;

 private:
  std::vector<NamedTensor> given_;  // the whole tensors
  JobPlace place_;
  std::string up_text_, down_text_;
};

}  // namespace gradwire
