#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Where there is nvcc but no GPU, the build leaves CUDA out. This test compiles every file that a build with CUDA would
# add, with the optimisers of both compilers off (a tenth of the time), so that a change cannot break them unseen.
#
#   GRADWIRE_BUILD=build tests/install/cuda_compile_test.sh
set -euo pipefail
source=$(cd "$(dirname "$0")/../.." && pwd)
build=${GRADWIRE_BUILD:?}/cuda-compile
flags=("-DCMAKE_CUDA_FLAGS_RELEASE=-O0 -DNDEBUG" "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG")
# The help is read to its end: behind a pipe, nvcc would fail as soon as grep has seen enough and goes.
help=$(nvcc --help)
if [[ $help == *--Ofast-compile* ]]; then
  flags+=("-DCMAKE_CUDA_FLAGS=--Ofast-compile=max")
fi
launcher=()
if command -v ccache >/dev/null; then
  launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
fi
cmake -S "$source" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGRADWIRE_CUDA=ON -DGRADWIRE_TORCH=OFF \
  -DGRADWIRE_MPI=OFF -DGRADWIRE_BATCHES=OFF "${launcher[@]}" "${flags[@]}" >"$build.log" || { cat "$build.log"; exit 1; }
mapfile -t objects < <(ninja -C "$build" -t targets all | sed -n 's/^\(.*\(\.cu\|cuda[a-z_]*\.cc\)\.o\): .*/\1/p')
((${#objects[@]} >= 6)) || { echo "only ${#objects[@]} CUDA files were found"; exit 1; }
ninja -C "$build" "${objects[@]}"
echo "compiled ${#objects[@]} files of CUDA, not run: there is no GPU"
