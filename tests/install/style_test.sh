#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The sources are formatted by clang-format as .clang-format says, and no line of the sources, scripts and pages is longer
# than 120 columns. Tables and lines that hold one unbreakable word, such as a link, are exempt in pages.
set -euo pipefail
cd "$(dirname "$0")/../.."
export LC_ALL=C.UTF-8
failed=0
mapfile -t sources < <(git ls-files -co --exclude-standard '*.h' '*.cc' '*.cu' '*.cuh' '*.cpp')
mapfile -t others < <(git ls-files -co --exclude-standard '*.py' '*.pyi' '*.sh' '*.cmake' '*CMakeLists.txt' Makefile)
mapfile -t pages < <(git ls-files -co --exclude-standard '*.md')
((${#sources[@]} > 100)) || { echo "no sources found: is this a checkout?"; exit 1; }
clang-format --dry-run -Werror "${sources[@]}" || failed=1
awk 'length > 120 {print FILENAME ":" FNR ": " length " columns"; bad = 1} END {exit bad}' "${sources[@]}" "${others[@]}" || failed=1
awk 'length > 120 && !/^ *\|/ && !/^[^ ]* ?[^ ]*$/ {print FILENAME ":" FNR ": " length " columns"; bad = 1} END {exit bad}' "${pages[@]}" || failed=1
exit $failed
