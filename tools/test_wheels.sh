#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The wheels of dist/ as users have them. Each is installed into a new virtual environment of its Python, where `gradwire
# doctor` must work and a file must come back from encode and decode. With one Python, two ranks of DDP train for a few
# steps with each kind of wheel. The same is done in a clean Debian, which debootstrap makes, where it is there and may
# be used: a root without a compiler and without a package that the library links. A wheel for 64-bit Arm is run by qemu
# with the Python of an arm64 Debian, where both are there: doctor, and all golden messages. Times are printed.
#
#   PYTHONS="python3.11 ..."     which Pythons to try; those on the PATH unless given
#   TORCH_PACKAGE=torch==2.13.0  the torch of the DDP steps, from PyPI; OFF leaves them out
#   ROOT=OFF                     leaves the clean Debian out
#   GRADWIRE_MIRROR=address      the mirror of Debian that debootstrap takes; its own choice unless given
set -euo pipefail
cd "$(dirname "$0")/.."
here=$PWD
work=$here/build/wheels/test
torch=${TORCH_PACKAGE:-torch==2.13.0}
shopt -s nullglob
failed=0

say() { printf 'test-wheels: %s\n' "$*"; }
fail() {
  say "$*" >&2
  exit 1
}
# timed WORDS COMMAND...: the command, its output only if it fails, and its seconds.
timed() {
  local words=$1 start log=$work/log
  shift
  start=$(date +%s%N)
  "$@" >"$log" 2>&1 </dev/null || {
    tail -n 40 "$log" >&2
    say "failed: $words"
    failed=1
    return 1
  }
  say "$(printf '%6.1f s  %s' "$((($(date +%s%N) - start) / 1000000))e-3" "$words")"
}

# What is tried wherever a wheel is installed, as a command line for sh. doctor must say why there is no GPU.
cat >"${TMPDIR:-/tmp}/gradwire-wheel-check.$$" <<'END'
set -eu
cd "$(mktemp -d)"
gradwire doctor | tee doctor.txt
grep -q '^CUDA' doctor.txt
python -m gradwire doctor --json >/dev/null
gradwire codecs >/dev/null
python -c "import numpy; numpy.save('g.npy', numpy.random.default_rng(1).normal(size=(100, 1000)).astype('f4'))"
for codec in fp32 optquant:bits=3 casq fft topk:ratio=0.01; do
  gradwire encode -f --codec "$codec" g.npy g.gw
  gradwire inspect g.gw >/dev/null
  gradwire decode -f g.gw back.npy
  python -c "
import numpy
a, b = numpy.load('g.npy'), numpy.load('back.npy')
assert a.shape == b.shape and ((a - b) ** 2).sum() < (a ** 2).sum(), '$codec'"
done
gradwire bench --codec qsgd:bits=4 --elements 100000 --rounds 2 --device cpu
if gradwire train; then exit 1; else test $? = 5; fi
END
check=${TMPDIR:-/tmp}/gradwire-wheel-check.$$
trap 'rm -f "$check"' EXIT

rm -rf "$work"
mkdir -p "$work"
wheels=(dist/gradwire-*.whl)
((${#wheels[@]})) || fail "dist/ has no wheel: run make wheels"

# try_venv PYTHON WHEEL [torch]
try_venv() {
  local venv=$work/venv pip
  pip=("$venv/bin/python" -m pip --disable-pip-version-check)
  rm -rf "$venv"
  "$1" -m venv "$venv"
  timed "pip install ${2##*/}, numpy with it" "${pip[@]}" install "$2" || return 0
  timed "doctor, encode, decode and bench with $("$1" --version)" env PATH="$venv/bin:$PATH" sh "$check" || return 0
  grep -E '^(CUDA|SIMD)' "$work/log"
  if [[ $2 == *+cu* && ! -e /dev/nvidia0 ]] && ! grep -q 'there is no NVIDIA driver' "$work/log"; then
    say "failed: doctor does not say that there is no driver"
    failed=1
  fi
  if [[ ${3:-} == torch ]]; then
    timed "pip install $torch" "${pip[@]}" install "$torch" || return 0
    timed "two ranks of DDP" "$venv/bin/python" "$here/tests/install/ddp_step.py" || return 0
    tail -n 2 "$work/log"
  fi
}

# The torch of the wheel index is tried with one Python of the list: the middle one, for which it surely exists.
pythons=()
for name in ${PYTHONS:-python3.9 python3.10 python3.11 python3.12 python3.13 python3.14}; do
  if tag=$("$name" -c 'import sys; print("cp%d%d" % sys.version_info[:2])' 2>/dev/null); then pythons+=("$tag:$name"); fi
done
tried=0
for entry in "${pythons[@]}"; do
  for wheel in dist/gradwire-*-"${entry%%:*}"-*x86_64.whl; do
    with=
    if [[ $torch != OFF && ($entry == cp311:* || ${#pythons[@]} == 1) ]]; then with=torch; fi
    try_venv "${entry#*:}" "$wheel" "$with"
    tried=$((tried + 1))
  done
done
arms=(dist/gradwire-*-cp311-*aarch64.whl)
((tried || ${#arms[@]})) || fail "dist/ has no wheel for: ${pythons[*]}"

# A clean Debian 12, whose Python is 3.11. It gets the wheel and what pip would fetch with it from a folder, so that it
# needs no network.
inside() {
  unshare --mount sh -c 'mount -t proc proc "$0/proc" && mkdir -p "$0/dev/shm" && mount -t tmpfs tmpfs "$0/dev/shm" &&
    exec chroot "$0" env PATH=/venv/bin:/usr/bin:/bin HOME=/root "$@"' "$work/root" "$@"
}
try_root() {
  local root=$work/root wheel=$1 name=${1##*/} more=()
  [[ $torch == OFF ]] || more=("$torch")
  rm -rf "$root/wheels" "$root/venv"
  mkdir -p "$root/wheels"
  cp "$wheel" "$check" tests/install/ddp_step.py "$root/wheels/"
  timed "fetching what the wheel needs" python3.11 -m pip --disable-pip-version-check download \
    --dest "$root/wheels" "$wheel" "${more[@]}" || return 0
  timed "clean Debian: a virtual environment" inside python3 -m venv /venv || return 0
  timed "clean Debian: pip install $name, numpy with it" inside /venv/bin/pip install --no-index \
    --find-links /wheels "/wheels/$name" || return 0
  timed "clean Debian: doctor, encode, decode and bench" inside \
    sh "/wheels/${check##*/}" || return 0
  [[ $torch != OFF ]] || return 0
  timed "clean Debian: pip install $torch" inside /venv/bin/pip install --no-index --find-links /wheels \
    "$torch" || return 0
  timed "clean Debian: two ranks of DDP" inside \
    /venv/bin/python /wheels/ddp_step.py || return 0
  tail -n 2 "$work/log"
}
debootstrap=${DEBOOTSTRAP:-$(command -v debootstrap || true)}
rooted=(dist/gradwire-*-cp311-*x86_64.whl)
if [[ ${ROOT:-ON} == OFF ]]; then
  say "no clean Debian: ROOT=OFF"
elif [[ -z $debootstrap || $EUID != 0 ]] || ! command -v python3.11 >/dev/null || ! ((${#rooted[@]})); then
  say "no clean Debian: that takes debootstrap, root, python3.11 and a wheel for it"
elif timed "debootstrap" "$debootstrap" --variant=minbase --include=python3,python3-venv bookworm "$work/root" \
  ${GRADWIRE_MIRROR:+"$GRADWIRE_MIRROR"}; then
  for wheel in "${rooted[@]}"; do try_root "$wheel"; done
fi

# The Python 3.11 of Debian 12 for Arm, by qemu. The packages are unpacked and not installed, for which qemu would have
# to be known to the kernel; so the libraries that alternatives would link are named.
try_arm() {
  local root=$work/arm wheel=$1 arm
  rm -rf "$root/wheel"
  timed "unpacking ${wheel##*/}" "$work/../tools/bin/python" -m wheel unpack --dest "$root/wheel" "$wheel" || return 0
  arm=(env "PYTHONPATH=$(echo "$root"/wheel/gradwire-*)" PYTHONDONTWRITEBYTECODE=1
    "LD_LIBRARY_PATH=$root/usr/lib/aarch64-linux-gnu/blas:$root/usr/lib/aarch64-linux-gnu/lapack"
    "$qemu" -L "$root" "$root/usr/bin/python3.11")
  timed "Arm by qemu: doctor" "${arm[@]}" -m gradwire doctor || return 0
  grep '^SIMD' "$work/log"
  timed "Arm by qemu: all golden messages" "${arm[@]}" tests/install/golden_messages.py tests/wire/golden || return 0
  tail -n 1 "$work/log"
}
unpack_arm() {
  local deb
  "$debootstrap" --download-only --arch=arm64 --variant=minbase --include=python3-numpy bookworm "$work/arm" \
    ${GRADWIRE_MIRROR:+"$GRADWIRE_MIRROR"} || return 1
  for deb in "$work"/arm/var/cache/apt/archives/*.deb; do dpkg -x "$deb" "$work/arm" || return 1; done
}
qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64 || true)
if ((${#arms[@]})); then
  if [[ -z $qemu || -z $debootstrap || $EUID != 0 || ${ROOT:-ON} == OFF ]]; then
    say "${arms[*]} not run: that takes qemu-user-static, debootstrap and root, and not ROOT=OFF"
  elif timed "fetching a Debian for Arm" unpack_arm; then
    for wheel in "${arms[@]}"; do try_arm "$wheel"; done
  fi
fi
((failed == 0)) || fail "something failed, see above"
say "all that was tried works"
