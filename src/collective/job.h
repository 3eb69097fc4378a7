// SPDX-License-Identifier: Apache-2.0
// A Job is a list of tensors with everything the options say of them resolved: each tensor's codec up and down, and
// whether it has a residual there. All collectives start from one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collective/signature.h"
#include "device/memory.h"
#include "gradwire/collective.h"

namespace gradwire {

struct Job {
  // `collective` is its name, for people and for the signature. Throws Error{usage}.
  Job(std::string collective, std::span<const NamedTensor> tensors, const ReduceOptions& options);

  std::string collective;
  std::vector<NamedTensor> tensors;
  ReduceOptions options;
  std::vector<Codec> up, down;                   // per tensor
  std::vector<bool> up_feedback, down_feedback;  // per tensor
  std::shared_ptr<Memory> memory;                // of the options' device

  Terms terms() const;
  // The tensors as one message carries them, whole.
  std::vector<Shard> whole(int owner = 0) const;
  // Those shards of `all` that belong to `owner`.
  static std::vector<Shard> of_owner(std::span<const Shard> all, int owner);
  // How a message with these shards is laid out, as this rank holds the elements: in the tensors' types, or all in f32.
  std::vector<TensorSpec> specs(std::span<const Shard> shards, Side side, bool as_f32) const;
  // Makes room for the residuals that these shards need. They must live where the tensors do.
  void add_residuals(ErrorFeedback& feedback, std::span<const Shard> shards, Side side) const;
  const Device& device() const { return options.device; }
  void check_pointers(std::span<const void* const> pointers, const char* what) const;

 private:
  std::string up_text_, down_text_;
};

}  // namespace gradwire
