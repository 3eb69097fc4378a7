// SPDX-License-Identifier: Apache-2.0
// The status of a server (watch.h) in the text format of Prometheus, version 0.0.4. What the status does not know
// (null, or not there) has no sample. Totals of a restarted server begin anew, as counters may. Workers that are gone
// have no series: only those present are listed, by id and name.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace gradwire::server {

std::string metrics_text(const nlohmann::json& status);

}  // namespace gradwire::server
