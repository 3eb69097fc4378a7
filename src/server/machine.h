// SPDX-License-Identifier: Apache-2.0
// What this process uses of the machine, and what it may use.
#pragma once

#include <cstdint>

namespace gradwire::server {

uint64_t resident_memory();  // bytes
uint64_t open_files();       // descriptors of this process
uint64_t file_limit();       // how many it may have
double process_start();      // in seconds since 1970

// Elements of a model that fit into a quarter of the memory: the server keeps the weights and a sum, in f32.
uint64_t default_max_elements();

}  // namespace gradwire::server
