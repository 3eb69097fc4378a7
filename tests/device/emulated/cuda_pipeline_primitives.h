// SPDX-License-Identifier: Apache-2.0
// Copies to shared memory that a thread need not wait for (emulated_gpu.h).
#pragma once

#include "emulated_gpu.h"

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  gradwire::emulated::copy_later(to, from, bytes);
}
inline void __pipeline_commit() { gradwire::emulated::commit_copies(); }
inline void __pipeline_wait_prior(size_t left) { gradwire::emulated::wait_for_copies(left); }
