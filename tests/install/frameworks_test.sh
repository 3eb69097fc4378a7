#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gradwire inside of Lightning, transformers and accelerate, with these versions of them, which are installed in a
# virtual environment of their own (250 MB, build/frameworks). numpy, pytest, torch and the tools that build the wheel
# are those of build/venv. `make test-frameworks` runs this; `make test` does not, because it would have to download
# them.
set -euo pipefail
frameworks=(lightning==2.6.6 transformers==5.22.2 accelerate==1.15.0)
source=$(cd "$(dirname "$0")/../.." && pwd)
build=${GRADWIRE_BUILD:-$source/build}
tools=${GRADWIRE_PYTHON_TOOLS:-$source/build/venv}
work=$build/frameworks
mkdir -p "$work"
work=$(cd "$work" && pwd)
python=$work/venv/bin/python3
pip=("$python" -m pip --disable-pip-version-check)
if [[ $(cat "$work/installed" 2>/dev/null) != "${frameworks[*]}" ]]; then
  rm -rf "$work/venv" "$work/installed"
  "$tools/bin/python3" -m venv --system-site-packages "$work/venv"
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  "$tools/bin/python3" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site/tools.pth"
  "$python" -c 'import torch; print("torch==" + torch.__version__)' >"$work/constraints"  # the one that is there
  "${pip[@]}" install --no-cache-dir -c "$work/constraints" "${frameworks[@]}"
  echo "${frameworks[*]}" >"$work/installed"
fi
# As in python_test.sh, with the same objects.
export CC=cc CXX=c++
rm -rf "$work/wheel"
"${pip[@]}" wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/wheel" \
  --config-settings build-dir="$(dirname "$work")/python-test/build" \
  --config-settings cmake.define.GRADWIRE_CUDA=OFF "$source"
"${pip[@]}" install --quiet --no-deps --force-reinstall "$work"/wheel/gradwire-*.whl
"$python" -c 'import accelerate, lightning, torch, transformers
for one in torch, lightning, transformers, accelerate: print(one.__name__, one.__version__)'
cd "$work"
exec "$python" -m pytest -q -rs -p no:cacheprovider --basetemp "$work/tmp" "$source/python/tests/test_frameworks.py" "$@"
