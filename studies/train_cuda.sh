#!/usr/bin/env bash
# Distils and trains the drafters of the default model on one GPU, step by step: bash studies/train_cuda.sh OUT STEP...
#
# Needs data/train.jsonl.xz (prompts to distil). OUT gets `data` and `drafters`; an interrupted step resumes when it is run
# again with the same OUT. Half of what is learned from is greedy, with all its loops: that is what drafters are timed on.
# STEPS and RATE replace the number of steps and the learning rate of a step.
set -u
out=$1
shift
mkdir -p "$out/data" "$out/drafters"
sequences="--data $out/data/greedy --data $out/data/sampled"
common="--batch 128 --max-length 640 --store int8 --average 0.99 --checkpoint-every 100000"
distil() { python -m foreword distill --prompts data/train.jsonl.xz --max-new-tokens 160 --max-context 1024 --slots 1536 "${@:2}" --json --out "$out/data/$1" >"$out/$1.json" 2>"$out/$1.txt"; }

train() { # NAME METHOD STEPS RATE OPTIONS...
    folder=$out/drafters/$1
    resume=$([ -e "$folder/run/checkpoint.pt" ] && echo --resume)
    python -m foreword train "$2" $sequences --steps "${STEPS:-$3}" --learning-rate "${RATE:-$4}" "${@:5}" $resume --json --out "$folder" \
        >"$folder.json" 2>"$folder.txt" || tail -5 "$folder.txt"
}

for step in "$@"; do
    started=$(date +%s)
    case $step in
    distil) # two processes: one prompt's tokenizing and packing hides behind the other's rounds
        distil greedy --tokens "${GREEDY:-5500000}" &
        distil sampled --tokens "${SAMPLED:-4500000}" --drop-loops 0.5 --temperature 0.7 --answers 2 &
        wait
        ;;
    clover2) train clover2 clover2 2000 2e-3 $common --evaluate-every 500 --option taps=8,16,24 --option heads=6 ;;
    masked) train masked masked 1200 2e-3 $common --evaluate-every 400 ;;
    masked_steps) train masked_steps masked 800 2e-3 $common --evaluate-every 400 --option order=disco --option steps=2 ;;
    chimera) train chimera chimera 800 2e-3 $common --evaluate-every 400 --option taps=8,16,24 ;;
    kangaroo) train kangaroo kangaroo 700 1.5e-3 $common --evaluate-every 350 --option exit=2 --option adapter=layer ;;
    ablation) # of clover: the whole drafter, without the attention of its cell, without its cell; two seeds each, 20 M tokens
        for seed in 0 1; do
            for variant in whole attention regressive; do
                without=$([ $variant = whole ] || echo "--option $variant=false")
                train clover_${variant}_$seed clover 690 2e-3 $common --evaluate-every 690 --seed $seed $without
            done
        done
        ;;
    hydra) train hydra hydra 800 2e-3 $common --evaluate-every 400 ;;
    looped) train looped looped 1200 1e-3 --batch 128 --max-length 640 --average 0.99 --evaluate-every 400 --checkpoint-every 100000 ;;
    *)
        echo "no step is called $step" >&2
        exit 2
        ;;
    esac
    echo "== $step took $(($(date +%s) - started)) s"
done
