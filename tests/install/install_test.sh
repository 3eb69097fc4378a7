#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The package works where it was not built: installs the build tree into one folder, moves it to another, builds
# tests/install against it with nothing but CMAKE_PREFIX_PATH, runs that program and the installed `gradwire`.
#
#   GRADWIRE_BUILD=build tests/install_test.sh
set -euo pipefail
build=$(realpath "${GRADWIRE_BUILD:?the build tree to install}")
source=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/first" >"$work/log" || { cat "$work/log"; exit 1; }
mv "$work/first" "$work/prefix"

# A package that names the tree it came from works only beside it.
if grep -rIlF -e "$source" -e "$build" -e "$work/first" "$work/prefix/include" "$work/prefix"/lib*/; then
  echo "the files above name the build or source tree"
  exit 1
fi

cp -r "$source/tests/install/consumer" "$work/consumer"
cmake -S "$work/consumer" -B "$work/consumer/build" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix"
cmake --build "$work/consumer/build"
"$work/consumer/build/consumer"

if [ -x "$build/bin/gradwire" ]; then
  "$work/prefix/bin/gradwire" --version
  "$work/prefix/bin/gradwire" codecs >/dev/null
fi
echo "installed, moved, linked and run"
