// SPDX-License-Identifier: Apache-2.0
// One server for a checkpoint. The lock is taken before the file is read and held for the life of the server; the
// kernel releases it when the process ends, in whatever way. It is a file beside the checkpoint, FILE.lock, because the
// checkpoint itself is replaced by another file each time.
#pragma once

#include <string>

namespace gradwire::server {

class CheckpointLock {
 public:
  explicit CheckpointLock(const std::string& checkpoint);  // Error{io, "checkpoint"}, with the pid of who holds it
  ~CheckpointLock();
  CheckpointLock(const CheckpointLock&) = delete;
  CheckpointLock& operator=(const CheckpointLock&) = delete;

 private:
  std::string path_;
  int file_ = -1;
};

}  // namespace gradwire::server
