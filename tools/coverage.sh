#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# How much of the decoders does the fuzzer reach? Fuzzes the decoders for FUZZ_SECONDS under ASan + UBSan (build/fuzz),
# collecting inputs in build/fuzz/corpus, and then all other targets for FUZZ_SECONDS together. Then replays the inputs
# of the decoders, the golden frames too, through a build of the same target with source coverage (build/coverage) and
# prints the decoders' branch coverage per source file. Ends with an error when the fuzzer finds something, or when less
# than COVERAGE_MIN percent of the branches were taken.
#
#   FUZZ_SECONDS=600 JOBS=2 COVERAGE_MIN=90 tools/coverage.sh
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${FUZZ_SECONDS:-600}
jobs=${JOBS:-$(nproc)}
minimum=${COVERAGE_MIN:-90}

build() { # preset
  cmake --preset "$1" >/dev/null
  cmake --build --preset "$1" -j "$jobs"
}

build fuzz
build coverage
corpus=(build/fuzz/corpus/fuzz_decode build/fuzz/golden tests/corpus/fuzz_decode)

fuzz() { # target seconds folders...
  local target=$1 time=$2
  shift 2
  echo "== $target for $time s in $jobs processes; inputs and findings in build/fuzz"
  "build/fuzz/bin/$target" -fork="$jobs" -max_total_time="$time" -max_len=16384 -timeout=60 -rss_limit_mb=2048 \
    -artifact_prefix="build/fuzz/$target-" "$@" 2>build/fuzz/log || {
    tail -n 60 build/fuzz/log
    echo "the fuzzer found something: the input is in build/fuzz ($target-leak-, -crash-, -timeout- or -oom-...)"
    exit 1
  }
  tail -n 1 build/fuzz/log
}

fuzz fuzz_decode "$seconds" "${corpus[@]}"
mapfile -t others < <(grep -vx fuzz_decode build/fuzz/fuzz_targets.txt)
for target in "${others[@]}"; do
  fuzz "$target" $((seconds / ${#others[@]} + 1)) "build/fuzz/corpus/$target" "tests/corpus/$target"
done

echo "== coverage of the decoders by $(find "${corpus[@]}" -type f | wc -l) inputs"
LLVM_PROFILE_FILE=build/coverage/fuzz.profraw build/coverage/bin/fuzz_decode -runs=0 "${corpus[@]}" 2>build/coverage/log ||
  { tail -n 60 build/coverage/log; exit 1; }
llvm-profdata merge -sparse build/coverage/fuzz.profraw -o build/coverage/fuzz.profdata
llvm-cov show build/coverage/bin/fuzz_decode -instr-profile=build/coverage/fuzz.profdata -format=html \
  -show-branches=count -output-dir=build/coverage/html src >/dev/null
echo "line by line: build/coverage/html/index.html"
python3 tools/branch_coverage.py build/coverage/bin/fuzz_decode build/coverage/fuzz.profdata --minimum "$minimum"
