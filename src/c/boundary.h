// SPDX-License-Identifier: Apache-2.0
// The boundary between C++ and C: no exception passes it. What was thrown becomes a code of gradwire.h, and its words
// go to gw_error(). Both shared libraries use this header, and they share nothing else but gradwire.h.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include "core/float_mode.h"
#include "core/refuse.h"
#include "gradwire.h"

namespace gradwire::c_api {

inline int code_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::usage:
      return GW_USAGE;
    case ErrorKind::frame:
      return GW_MESSAGE;
    case ErrorKind::mismatch:
      return GW_MISMATCH;
    case ErrorKind::engine:
      return GW_ENGINE;
    case ErrorKind::io:
      return GW_IO;
    case ErrorKind::unsupported:
      return GW_UNSUPPORTED;
    case ErrorKind::device:
      return GW_DEVICE;
  }
  return GW_INTERNAL;
}

// Inside a catch block: records what was caught.
inline int caught() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return gw_fail(code_of(error.kind()), error.what());
  } catch (const std::bad_alloc&) {
    return gw_fail(GW_RESOURCE, "there is not enough memory");
  } catch (const std::length_error&) {
    return gw_fail(GW_RESOURCE, "there is not enough memory: a size is larger than any memory");
  } catch (const std::system_error& error) {
    return gw_fail(GW_RESOURCE, error.what());
  } catch (const std::exception& error) {
    return gw_fail(GW_INTERNAL, error.what());
  } catch (...) {
    return gw_fail(GW_INTERNAL, "an exception that is no std::exception");
  }
}

// Callers may trap floating-point exceptions, as Fortran programs do; inside they are masked.
template <class Body>
int guarded(const Body& body) noexcept {
  const FloatMode ieee;
  try {
    body();
    return GW_OK;
  } catch (...) {
    return caught();
  }
}

// The argument `name` must be there.
template <class Pointer>
Pointer given(Pointer pointer, const char* name) {
  if (!pointer) refuse_usage(std::string(name) + " is a null pointer", name);
  return pointer;
}

}  // namespace gradwire::c_api
