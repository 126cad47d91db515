#!/usr/bin/env bash
# The quick GPU tests, one process per file at the same time: bash studies/gpu_tests.sh OUT [PYTHON]
#
# Most of their time is compiling kernels, which needs a CPU core each, so this is several times as fast as `make test-gpu`
# on a machine with many cores. OUT gets one log per file; the last line of each is printed. Status 1 if a file failed.
set -u
out=$1
python=${2:-python3}
mkdir -p "$out"
export PYTHONPATH=src
declare -A running
for file in tests/gpu/test_*.py; do
    name=$(basename "$file" .py)
    "$python" -m pytest "$file" -m "gpu and not slow" -p no:cacheprovider --durations=5 >"$out/$name.txt" 2>&1 &
    running[$name]=$!
done
failed=0
for name in "${!running[@]}"; do
    wait "${running[$name]}"
    status=$?
    [ $status -eq 0 ] || [ $status -eq 5 ] || failed=1 # 5: all tests of the file are slow ones
    echo "$name: $(tail -1 "$out/$name.txt")"
done
exit $failed
