#!/usr/bin/env bash
# Everything `make test` checks, each a test: the layers, the format, the suite. Ends with "N passed, N failed" alone.
set -u
build=${BUILD:-build}
passed=0 failed=0

check() {
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}
check make --no-print-directory check-layers
check make --no-print-directory check-format

log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$build/run-tests" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
summary=$(grep -E '^\[doctest\] test cases:' "$log" | tail -n 1)
if [[ $summary =~ \|\ +([0-9]+)\ passed\ \|\ +([0-9]+)\ failed ]]; then
  passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2]))
fi
# A suite that died, or ran nothing, has failed whatever it counted.
if [[ $status -ne 0 && $failed -eq 0 || -z $summary ]]; then failed=$((failed + 1)); fi
echo "$passed passed, $failed failed"
[[ $failed -eq 0 ]]
