// SPDX-License-Identifier: Apache-2.0
// Objects of OpenSSL as unique pointers: std::unique_ptr<X509, OpenSslFree<X509_free>>.
#pragma once

namespace gradwire::server {

template <auto Free>
struct OpenSslFree {
  template <class T>
  void operator()(T* one) const {
    Free(one);
  }
};

}  // namespace gradwire::server
