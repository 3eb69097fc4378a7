// SPDX-License-Identifier: Apache-2.0
// Certificates and a token for a server and its workers, for people who have no authority of their own.
#pragma once

#include <string>
#include <vector>

namespace gradwire::app {

struct MadeCertificates {
  std::string ca, server, server_key, worker, worker_key, token;  // paths
};

// Makes DIR and in it an authority (ca.pem, ca.key), a certificate each for the server, which is for `names` (host
// names and addresses), and for its workers, and a token. Keys and token are readable by their owner alone. Nothing
// that exists is replaced. Error{usage, "names"}, Error{io, "make-certificates"}.
MadeCertificates make_certificates(const std::string& folder, const std::vector<std::string>& names);
// localhost, its addresses, and the name of this machine.
std::vector<std::string> default_names();

}  // namespace gradwire::app
