#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# How much of the decoders does the fuzzer reach? Fuzzes for FUZZ_SECONDS under ASan + UBSan (build/fuzz), collecting
# inputs in build/fuzz/corpus; then replays all of them, the golden frames too, through a build of the same target with
# source coverage (build/coverage) and prints the decoders' branch coverage per source file. Ends with an error when the
# fuzzer finds something, or when less than COVERAGE_MIN percent of the branches were taken.
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
corpus=(build/fuzz/corpus build/fuzz/golden tests/wire/corpus)

echo "== fuzzing for $seconds s in $jobs processes; inputs and findings in build/fuzz"
build/fuzz/bin/fuzz_decode -fork="$jobs" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 \
  -artifact_prefix=build/fuzz/ "${corpus[@]}" 2>build/fuzz/log || {
  tail -n 60 build/fuzz/log
  echo "the fuzzer found something: the input is in build/fuzz (leak-, crash-, timeout- or oom-...)"
  exit 1
}
tail -n 1 build/fuzz/log

echo "== coverage of the decoders by $(find "${corpus[@]}" -type f | wc -l) inputs"
LLVM_PROFILE_FILE=build/coverage/fuzz.profraw build/coverage/bin/fuzz_decode -runs=0 "${corpus[@]}" 2>build/coverage/log ||
  { tail -n 60 build/coverage/log; exit 1; }
llvm-profdata merge -sparse build/coverage/fuzz.profraw -o build/coverage/fuzz.profdata
llvm-cov show build/coverage/bin/fuzz_decode -instr-profile=build/coverage/fuzz.profdata -format=html \
  -show-branches=count -output-dir=build/coverage/html src >/dev/null
echo "line by line: build/coverage/html/index.html"
python3 tools/branch_coverage.py build/coverage/bin/fuzz_decode build/coverage/fuzz.profdata --minimum "$minimum"
