// SPDX-License-Identifier: Apache-2.0
// The runners of each device, behind make_runner(), and the checks of a caller's arguments that they share.
#pragma once

#include <memory>

#include "gradwire/runner.h"
#include "message/layout.h"

namespace gradwire {

std::unique_ptr<Runner> make_cuda_runner(const Plan& plan, const Device& device);  // runner_cuda.cc or runner_none.cc

// Each throws Error naming the argument.
void check_arguments(const Layout& layout, size_t tensors, std::span<const std::byte> message, size_t alignment);
void check_residuals(const Layout& layout, const Residuals& residuals);
void check_write(const Layout& layout, Write write);

}  // namespace gradwire
