#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A package that is missing is named as Debian names it, in the line that installs it. CMake is told to look for one of
# them nowhere, as on a machine without it; it stops before anything is compiled.
set -euo pipefail
source=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# refused PACKAGE ARGUMENT...: configuring with these arguments ends with the line that installs the package.
refused() {
  local package=$1
  shift
  rm -rf "$work/build"
  if cmake -S "$source" -B "$work/build" -G Ninja -DGRADWIRE_CUDA=OFF -DGRADWIRE_MPI=OFF -DGRADWIRE_APPS=OFF \
    -DGRADWIRE_TESTS=OFF -DGRADWIRE_BENCH=OFF "$@" >"$work/log" 2>&1; then
    echo "without $package: configuring succeeded"
    exit 1
  fi
  tr -s '[:space:]' ' ' <"$work/log" | grep -qF "sudo apt install $package" || {
    cat "$work/log"
    echo "without $package: the line that installs it is not there"
    exit 1
  }
}
refused libhwy-dev -DCMAKE_DISABLE_FIND_PACKAGE_hwy=ON
refused libfmt-dev -DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON
refused libxxhash-dev -DCMAKE_DISABLE_FIND_PACKAGE_xxHash=ON
refused python3-dev -DGRADWIRE_PYTHON=ON -DPython_INCLUDE_DIR="$work/nowhere"
echo "every missing package is named"
