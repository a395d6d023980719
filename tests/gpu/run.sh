#!/usr/bin/env bash
# What `make test-gpu` checks on the present card. With SANITIZE=1 the suite runs under compute-sanitizer instead, the scan at
# small size, each kernel once or twice. Ends with "N passed, N failed" alone.
set -u
build=${BUILD:-build}
passed=0 failed=0

check() {
  echo "--- $*"
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
if [ "${SANITIZE:-0}" = 1 ]; then
  export PRISM_SMALL=1
  for tool in memcheck racecheck; do
    check compute-sanitizer --tool "$tool" --error-exitcode 1 "$build/run-gpu-tests"
  done
else
  check "$build/run-gpu-tests"
  check "$build/prism" gradcheck --device cuda --dtype f32
  check "$build/prism" gradcheck --device cuda --dtype bf16
  check bash tests/gpu/resume.sh "$build/prism" cuda
fi
echo "$passed passed, $failed failed"
[[ $failed -eq 0 ]]
