// SPDX-License-Identifier: Apache-2.0
// What both ends share of gRPC: frames as its byte buffers, and how it is kept quiet. A payload is not copied on the
// way out: the slice holds on to the blob.
#pragma once

#include <grpc/support/log.h>
#include <grpcpp/support/byte_buffer.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "gradwire/error.h"
#include "server/frame.h"

namespace gradwire::server {

// gRPC prints what it also says in a status. Users who want to see it set GRPC_VERBOSITY, as its manual says.
inline void keep_grpc_quiet() {
  if (std::getenv("GRPC_VERBOSITY") == nullptr) gpr_set_log_function([](gpr_log_func_args*) {});
}

inline grpc::ByteBuffer to_buffer(const Frame& frame, const Blob& payload) {
  const auto head = write_head(frame, payload ? payload->size() : 0);
  grpc::Slice slices[2] = {grpc::Slice(head.data(), head.size()), grpc::Slice()};
  if (payload && !payload->empty())
    slices[1] = grpc::Slice(
        const_cast<std::byte*>(payload->data()), payload->size(), [](void* held) { delete static_cast<Blob*>(held); },
        new Blob(payload));
  return grpc::ByteBuffer(slices, payload && !payload->empty() ? 2 : 1);
}

// Throws Error{frame}.
inline Frame from_buffer(const grpc::ByteBuffer& buffer, Blob& payload) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) throw Error(ErrorKind::frame, "bad frame: it cannot be read", "length");
  size_t size = 0;
  for (const grpc::Slice& slice : slices) size += slice.size();
  if (size > kFrameHead + kMaxFrame)
    throw Error(ErrorKind::frame, "bad frame: it has more bytes than any shard", "oversize");
  std::byte head[kFrameHead];
  std::vector<std::byte> rest(size > kFrameHead ? size - kFrameHead : 0);
  size_t at = 0;
  for (const grpc::Slice& slice : slices) {
    const auto* from = reinterpret_cast<const std::byte*>(slice.begin());
    size_t left = slice.size();
    if (at < kFrameHead) {
      const size_t n = std::min(left, kFrameHead - at);
      std::memcpy(head + at, from, n);
      from += n;
      left -= n;
      at += n;
    }
    if (left > 0) {
      std::memcpy(rest.data() + (at - kFrameHead), from, left);
      at += left;
    }
  }
  if (size < kFrameHead) throw Error(ErrorKind::frame, "bad frame: it is shorter than a head", "length");
  const Frame frame = read_frame_head(head, rest.size());
  payload = make_blob(std::move(rest));
  return frame;
}

}  // namespace gradwire::server
