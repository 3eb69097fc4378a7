// SPDX-License-Identifier: Apache-2.0
// What the machine has. Limits on foreign input follow from it, because a fixed limit is too small for one machine and
// ends another.
#pragma once

#include <cstdint>

namespace gradwire {

uint64_t machine_memory();  // bytes: the physical memory, or what a container may use of it

}  // namespace gradwire
