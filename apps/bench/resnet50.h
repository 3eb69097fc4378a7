// SPDX-License-Identifier: Apache-2.0
// The gradient list that the demo and the list benchmarks use: the 161 parameter tensors of ResNet-50 (25,557,032
// elements), with the names and shapes they have in the usual PyTorch model. Generated from the architecture.
#pragma once

#include <vector>

#include "gradwire/collective.h"

namespace gradwire::app {

std::vector<NamedTensor> resnet50_tensors();
uint64_t total_elements(const std::vector<NamedTensor>& tensors);

}  // namespace gradwire::app
