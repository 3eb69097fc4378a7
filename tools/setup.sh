#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# tools/setup.sh [demo]: brings a Debian 12 machine to where `make test` works, or only to where `make demo` does: the
# packages below, from apt, and a virtual environment in build/venv. It looks at the real state first and installs only
# what is missing, so a second run does nothing. The environment sits on Debian's own python3 and sees Debian's numpy
# and pytest: one registry, fixed versions, and whatever `python3` means elsewhere on the machine does not matter.
#
# CUDA is not installed here: the build uses nvcc where it finds it and is complete without.
set -euo pipefail
cd "$(dirname "$0")/.."

demo_packages=(
  g++ cmake ninja-build make git ccache                               # to build
  libhwy-dev libxxhash-dev libfmt-dev libcli11-dev nlohmann-json3-dev # to link or include
  libzstd-dev zlib1g-dev                                              # packed files, data sets
  dataset-fashion-mnist                                               # what make demo trains on
  libjs-chart.js                                                      # charts in reports
  python3 python3-venv python3-numpy                                  # the environment for torch
)
all_packages=(
  "${demo_packages[@]}"
  libopenmpi-dev openmpi-bin                                # the mpi engine
  gfortran pkg-config                                       # the test of the C interface
  libgrpc++-dev                                             # the parameter server
  openssl                                                   # the test of its certificates
  libgtest-dev libkissfft-dev clang libclang-rt-14-dev llvm # tests; libFuzzer and its coverage need clang
  clang-format                                              # the test of the formatting
  python3-pytest                                            # the tests that are written in Python
  gnuplot-nox                                               # plots for papers
  chromium chromium-driver python3-selenium                 # the test that looks at a report
)
case ${1:-all} in
  demo) packages=("${demo_packages[@]}") modules=numpy ;;
  all) packages=("${all_packages[@]}") modules="numpy, pytest, selenium" ;;
  *)
    echo "tools/setup.sh: $1: allowed is demo, or nothing" >&2
    exit 2
    ;;
esac
venv=build/venv
log=build/setup.log

say() { printf 'setup: %s\n' "$*"; }
fail() {
  say "$*" >&2
  exit 1
}
# step WORDS COMMAND...: one line on the terminal, the command's own output in the log.
step() {
  say "$1"
  shift
  "$@" >>"$log" 2>&1 </dev/null || {
    tail -n 20 "$log" >&2
    fail "failed: $* (all of it: $log)"
  }
}

missing_packages() {
  local installed
  installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "${packages[@]}" 2>/dev/null || true)
  for package in "${packages[@]}"; do
    grep -qxF "installed $package" <<<"$installed" || echo "$package"
  done
}

command -v dpkg-query apt-get >/dev/null ||
  fail "no apt here: install the likes of these by other means, then use cmake --preset release: ${packages[*]}"
mkdir -p build
mapfile -t missing < <(missing_packages)
if ((${#missing[@]})); then
  as_root=(env DEBIAN_FRONTEND=noninteractive)
  if ((EUID != 0)); then
    command -v sudo >/dev/null || fail "neither root nor sudo; please have these installed: ${missing[*]}"
    as_root=(sudo env DEBIAN_FRONTEND=noninteractive)
    sudo true || fail "sudo refused; please have these installed: ${missing[*]}"
  fi
  : >"$log"
  # A foreign source that does not answer is no reason to stop: whether Debian's did shows in the next step.
  say "reading the package lists"
  "${as_root[@]}" apt-get update >>"$log" 2>&1 </dev/null || say "apt-get update complained (see $log), going on"
  step "installing ${missing[*]}" "${as_root[@]}" apt-get install -y --no-install-recommends \
    -o DPkg::Lock::Timeout=300 "${missing[@]}"
fi

if ! "$venv/bin/python3" -c "import $modules" 2>/dev/null; then
  rm -rf "$venv"
  step "making $venv" /usr/bin/python3 -m venv --system-site-packages "$venv"
  step "checking $venv" "$venv/bin/python3" -c "import $modules"
fi
# torch: `gradwire train` and `compare` link its C++ library. A Python that has it already can be named with
# TORCH_PYTHON; TORCH=OFF does without.
torch=${TORCH_PACKAGE:-torch==2.13.0}
if [[ ${TORCH:-ON} != OFF && -z ${TORCH_PYTHON:-} ]] && ! "$venv/bin/python3" -c 'import torch' 2>/dev/null; then
  step "installing $torch into $venv (for gradwire train; TORCH=OFF does without)" "$venv/bin/python3" -m pip install "$torch"
fi
# What `pip install .` would fetch for itself, to build and to test the Python package.
if [[ ${1:-all} == all ]] && ! "$venv/bin/python3" -c 'import scikit_build_core, pybind11' 2>/dev/null; then
  step "installing scikit-build-core and pybind11 into $venv (for the Python package)" "$venv/bin/python3" -m pip install 'scikit-build-core>=0.10' 'pybind11>=2.13'
fi
say "ready"
