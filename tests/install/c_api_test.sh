#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The C interface as a C, C++ or Fortran programmer meets it: installs the component c into a folder, moves it, builds
# the examples with nothing but pkg-config and runs them. Their bytes are those of the program `gradwire`, and the shared
# libraries show the functions of gradwire.h and nothing else.
#
#   GRADWIRE_BUILD=build GRADWIRE=build/bin/gradwire tests/install/c_api_test.sh
set -euo pipefail
build=$(realpath "${GRADWIRE_BUILD:?the build tree to install}")
gradwire=$(realpath "${GRADWIRE:?the program}")
source=$(cd "$(dirname "$0")/../.." && pwd)
command -v pkg-config >/dev/null || { echo "pkg-config is missing (a Debian package)"; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "$*"
  exit 1
}

cmake --install "$build" --component c --prefix "$work/first" >"$work/log" || { cat "$work/log"; exit 1; }
mv "$work/first" "$work/prefix"
pc=$(find "$work/prefix" -name gradwire.pc)
export PKG_CONFIG_PATH=${pc%/*}
lib=$(pkg-config --variable=libdir gradwire)
export LD_LIBRARY_PATH=$lib
cd "$work"
if grep -rIlF -e "$source" -e "$build" -e "$work/first" prefix; then fail "the files above name the build or source tree"; fi

# Exactly the functions that the header declares.
cc -E -P prefix/include/gradwire.h | grep -oE '\bgw_[a-z_]+\(' | tr -d '(' | sort -u >declared
[[ -e $lib/libgradwire_mpi.so ]] || sed -i '/^gw_reducer_open_mpi$/d' declared
nm -D --defined-only "$lib"/libgradwire*.so | awk 'NF == 3 { print $3 }' | sort >shown
diff declared shown || fail "left: what gradwire.h declares; right: what the shared libraries show"
readelf -d "$lib/libgradwire.so" >dynamic
version=$(pkg-config --modversion gradwire)
grep -qF "[libgradwire.so.${version%.*}]" dynamic || fail "the name of the library: $(grep SONAME dynamic)"
if grep -i 'NEEDED.*mpi' dynamic; then fail "libgradwire.so loads MPI"; fi

# Raw floats, with every magnitude from 1e-6 on.
perl -e 'srand(1); print pack("f<", (rand() - 0.5) * 10 ** (-6 * rand())) for 1 .. 20000' >values.f32
flags_of() { read -ra flags <<<"$(pkg-config --cflags --libs "$@")"; }
strict=(-Wall -Wextra -Werror -O1)
flags_of gradwire
cc -std=c99 "${strict[@]}" "$source/examples/c/encode.c" "${flags[@]}" -lm -o encode
flags_of gradwire_static
cc -std=c99 "${strict[@]}" "$source/examples/c/encode.c" "${flags[@]}" -lm -o encode_static
if readelf -d encode_static | grep gradwire; then fail "the program with the archive loads the shared library"; fi
encoders=(./encode ./encode_static)
sed -n '/^```c$/,/^```$/p;' "$source/docs/c-api.md" | sed '1d;/^```$/,$d' >message.c  # the first program of the page
flags_of gradwire
cc -std=c99 "${strict[@]}" message.c "${flags[@]}" -o message
./message
fortran=$(command -v gfortran || command -v gfortran-12 || true)
if [[ $fortran ]]; then
  "$fortran" -Wall -O1 "$source"/examples/fortran/{gradwire,encode}.f90 "${flags[@]}" -o encode_fortran
  encoders+=(./encode_fortran)
else
  echo "gfortran is missing (a Debian package): the examples in Fortran are left out"
fi
for codec in fp32 qsgd:bits=4 optquant:bits=3 terngrad onebit topk; do
  "$gradwire" encode --codec "$codec" --dtype f32 --seed 1 --step 7 --force -q values.f32 program.gw
  for encoder in "${encoders[@]}"; do
    rm -f own.gw
    "$encoder" "$codec" values.f32 own.gw
    cmp own.gw program.gw || fail "$codec: the bytes of $encoder and of the program differ"
  done
done
for encoder in "${encoders[@]}"; do
  if "$encoder" nonsense values.f32 own.gw >words 2>&1; then fail "$encoder took a codec that does not exist"; fi
  grep -q nonsense words || fail "the refusal of $encoder does not say why: $(cat words)"
done

# A project without C++ finds the library through CMake too.
mkdir project
cat >project/CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES C)
find_package(gradwire 0.1 REQUIRED COMPONENTS c)
add_executable(encode encode.c)
target_link_libraries(encode PRIVATE gradwire::c m)
END
cp "$source/examples/c/encode.c" project/
cmake -S project -B project/build -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" >log || { cat log; exit 1; }
cmake --build project/build >log || { cat log; exit 1; }
env -u LD_LIBRARY_PATH project/build/encode fp32 values.f32 own.gw >/dev/null

if [[ ! -e $lib/libgradwire_mpi.so ]] || ! command -v mpicc mpicxx mpirun >/dev/null; then
  echo "installed, moved, linked and run; there is no MPI here"
  exit 0
fi
mpi() { mpirun --allow-run-as-root --oversubscribe -n 2 "$@"; }
flags_of gradwire
mpicxx -std=c++17 -DOMPI_SKIP_MPICXX=1 "${strict[@]}" "$source/examples/c/gather_mpi.cpp" "${flags[@]}" -o gather_mpi
mpi ./gather_mpi qsgd:bits=4 values.f32 own.gw
"$gradwire" encode --codec qsgd:bits=4 --dtype f32 --seed 0 --step 7 --force -q values.f32 program.gw
cmp own.gw program.gw || fail "the bytes of gather_mpi and of the program differ"
flags_of gradwire_mpi
mpicc -std=c99 "${strict[@]}" "$source/examples/c/allreduce_mpi.c" "${flags[@]}" -lm -o allreduce_mpi
mpi ./allreduce_mpi onebit
if [[ $fortran ]]; then
  OMPI_FC=$fortran mpif90 -Wall -O1 "$source"/examples/fortran/{gradwire,allreduce}.f90 "${flags[@]}" -o allreduce
  mpi ./allreduce
fi
echo "installed, moved, linked and run"
