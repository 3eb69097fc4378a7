#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The Python package as users have it: a wheel from this tree, installed in a new virtual environment, tested from
# there. numpy, pytest, torch and the tools that build the wheel are those of build/venv; the package itself is the
# wheel's.
set -euo pipefail
source=$(cd "$(dirname "$0")/../.." && pwd)
work=${GRADWIRE_BUILD:?}/python-test
tools=${GRADWIRE_PYTHON_TOOLS:-$source/build/venv}
mkdir -p "$work"
rm -rf "$work/venv" "$work/wheel"
"$tools/bin/python3" -m venv --system-site-packages "$work/venv"
site=$("$work/venv/bin/python3" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$tools/bin/python3" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site/tools.pth"
# The compilers that CMake takes by itself, so that ccache knows the objects of the main tree. No CUDA: nobody here
# could run it.
export CC=cc CXX=c++
"$work/venv/bin/python3" -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/wheel" \
  --config-settings build-dir="$work/build" --config-settings cmake.define.GRADWIRE_CUDA=OFF "$source"
"$work/venv/bin/python3" -m pip --disable-pip-version-check install --quiet --no-deps "$work"/wheel/gradwire-*.whl
cd "$work"
"$work/venv/bin/python3" -m gradwire doctor
exec "$work/venv/bin/python3" -m pytest -q -p no:cacheprovider --basetemp "$work/tmp" "$source/python/tests" "$@"
