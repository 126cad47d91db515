#!/usr/bin/env bash
# Time two checkouts in turns on one machine and compare them:
#   bash studies/compare_commits.sh BEFORE AFTER OUT TURNS BENCH-OPTIONS...
#
# BEFORE and AFTER are folders with the package in src/. Each turn runs `foreword bench` of both, one after the other, with the
# same options. Then `foreword bench compare` pools the turns. Status 1 if the whole 95% interval of a method lies below 0.98.
set -eu
before=$(realpath "$1") after=$(realpath "$2") out=$3 turns=$4
shift 4
python=${PYTHON:-python3}
mkdir -p "$out"
bench() { PYTHONPATH=$1/src "$python" -m foreword bench "${@:3}" --out "$2" >"$2.txt" 2>&1 || { tail -5 "$2.txt"; exit 2; }; }
olds="" news=""
for turn in $(seq "$turns"); do
    bench "$before" "$out/before_$turn" "$@"
    bench "$after" "$out/after_$turn" "$@"
    olds+=${olds:+,}$out/before_$turn news+=${news:+,}$out/after_$turn
done
PYTHONPATH=$after/src "$python" -m foreword bench compare "$olds" "$news" --at-least 0.98
