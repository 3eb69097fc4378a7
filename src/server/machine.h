// SPDX-License-Identifier: Apache-2.0
// What the machine has, and what this process uses of it.
#pragma once

#include <cstdint>

namespace gradwire::server {

uint64_t machine_memory();   // bytes: the physical memory, or what a container may use of it
uint64_t resident_memory();  // bytes of it that this process has
uint64_t open_files();       // descriptors of this process
uint64_t file_limit();       // how many it may have
double process_start();      // in seconds since 1970

// Elements of a model that fit into a quarter of the memory: the server keeps the weights and a sum, in f32.
uint64_t default_max_elements();

}  // namespace gradwire::server
