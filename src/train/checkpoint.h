// SPDX-License-Identifier: Apache-2.0
// Checkpoints: one directory per saved step, DIR/step-000000468, with
//
//   state.json                  the settings, the step, and what was measured so far
//   weights.pt                  parameters and the optimizer's state: alike on all ranks, written by rank 0
//   rank-2.pt                   what is rank 2's own: its buffers (BatchNorm's statistics differ between workers) and
//                               its moments (qadam)
//   rank-2-bucket-0.residuals   rank 2's residuals, and what its codecs have learned
//   manifest.json               size and hash of each of these files, written last
//
// A checkpoint is written under another name and renamed when it is complete and on disk. A run that is killed at any
// moment, or a full disk, leaves the older checkpoints as they were. The two newest are kept. Workers in several
// processes must see one file system.
#pragma once

#include <torch/types.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "train/control.h"
#include "train/descent.h"

namespace gradwire::train {

class Checkpoints {
 public:
  Checkpoints(std::string directory, Control& control);

  std::optional<uint64_t> newest() const;  // the last saved step
  // Collective. What is wrong with the checkpoint of a step: a file that is missing or not as it was written, by name.
  // Empty if the checkpoint is whole.
  std::string damage(uint64_t step);
  // Collective. The newest whole checkpoint before a step.
  std::optional<uint64_t> whole_before(uint64_t step);
  // Collective. Renames the checkpoint so that it is neither resumed nor counted nor removed; returns its new path.
  std::string set_aside(uint64_t step);
  // Collective.
  void save(uint64_t step, const nlohmann::json& state, const TensorMap& weights, const TensorMap& own,
            Descent& descent);

  nlohmann::json state(uint64_t step) const;
  // Collective. Fills tensors that have the names and shapes that were saved, and the residuals; Error{frame} names the
  // file that is damaged or of another model.
  void load(uint64_t step, const TensorMap& weights, const TensorMap& own, Descent& descent);

 private:
  std::string path_of(uint64_t step) const;
  std::vector<uint64_t> steps() const;  // ascending
  void prune() const;

  std::string directory_;
  Control& control_;
};

// A file for Python's torch.load: a dictionary of tensors by name.
void save_tensors(const std::string& path, const TensorMap& tensors);
// Throws Error{io} where save_tensors could not write.
void expect_writable(const std::string& path);

}  // namespace gradwire::train
