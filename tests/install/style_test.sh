#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The C++ and CUDA sources are formatted as .clang-format says, and no line of the sources, the Python package, the
# tests and the pages is longer than 120 columns. In pages, tables and lines of one word, such as a link, are exempt. A
# type name is defined once: types of a namespace, which begin at the first column, and not those inside a class. The
# folders that work for every codec name none, except the casts, which tensors and messages are defined by.
set -euo pipefail
cd "$(dirname "$0")/../.."
export LC_ALL=C.UTF-8
failed=0
mapfile -t sources < <(git ls-files -co --exclude-standard '*.h' '*.cc' '*.cu' '*.cuh' '*.cpp')
mapfile -t scripts < <(git ls-files -co --exclude-standard 'python/*.py' 'python/*.pyi' 'tests/*.py' 'tools/*.py' 'examples/*.py')
mapfile -t pages < <(git ls-files -co --exclude-standard '*.md')
((${#sources[@]} > 100)) || { echo "no sources found: is this a checkout?"; exit 1; }
clang-format --dry-run -Werror "${sources[@]}" || failed=1
if grep -nHE '^.{121,}$' "${sources[@]}" "${scripts[@]}"; then failed=1; fi
if grep -nHE '^.{121,}$' "${pages[@]}" | grep -vE '^[^:]*:[0-9]+:( *\||[^ ]* ?[^ ]*$)'; then failed=1; fi
twice=$(sed -nE 's/^(struct|class|union|enum|enum class) (alignas\([^)]*\) )?([A-Za-z_]+)( final)?( :[^;]*)? ?\{.*/\3/p' \
  "${sources[@]}" | sort | uniq -d)
for name in $twice; do
  echo "$name is defined more than once:"
  grep -nE "^(struct|class|union|enum|enum class) (alignas\([^)]*\) )?$name( final)?( :[^;]*)? ?\{" "${sources[@]}"
  failed=1
done
codecs=$(sed -n 's/^GW_CODEC(\(.*\))$/\1/p' src/codec/codecs.def | grep -vxE 'fp32|fp16|bf16' | paste -sd '|')
[[ $codecs == *casq* ]] || { echo "src/codec/codecs.def: no codecs found"; exit 1; }
if git grep -nwiE "$codecs" -- src/device src/message src/learn src/collective; then
  echo "these folders work for every codec and name none"
  failed=1
fi
exit $failed
