#!/usr/bin/env bash
# Distils and trains the drafters of the default model on one GPU, step by step: bash studies/train_cuda.sh OUT STEP...
#
# Needs data/train.jsonl.xz (prompts to distil). OUT gets `data` and `drafters`; an interrupted step resumes when it is run
# again with the same OUT. More than half of what is learned from is greedy, with all its loops: that is what drafters are
# timed on. Prompts of 1,400 letters or more are answered three times: few are long, and a drafter has to learn from contexts
# as long as those that it will meet. STEPS and RATE replace the number of steps and the learning rate of a step.
set -u
out=$1
shift
mkdir -p "$out/data" "$out/drafters"
sequences="--data $out/data/greedy --data $out/data/sampled --data $out/data/long"
common="--batch 128 --max-length 1280 --average 0.99 --checkpoint-every 100000"
distil() { # NAME PROMPTS OPTIONS...
    python -m foreword distill --prompts "$2" --max-new-tokens 160 "${@:3}" --json --out "$out/data/$1" >"$out/$1.json" 2>"$out/$1.txt"
}

long_prompts() { # the prompts of 1,400 letters or more
    python - <<END
import json, lzma
with lzma.open("data/train.jsonl.xz", "rt", encoding="utf-8") as file, open("$out/long.jsonl", "w", encoding="utf-8") as out:
    out.writelines(line for line in file if sum(map(len, json.loads(line)["turns"])) >= 1400)
END
}

train() { # NAME METHOD STEPS RATE OPTIONS...
    folder=$out/drafters/$1
    resume=$([ -e "$folder/run/checkpoint.pt" ] && echo --resume)
    python -m foreword train "$2" $sequences --steps "${STEPS:-$3}" --evaluate-every "${STEPS:-$3}" --learning-rate "${RATE:-$4}" "${@:5}" $resume --json --out "$folder" \
        >"$folder.json" 2>"$folder.txt" || tail -5 "$folder.txt"
}

for step in "$@"; do
    started=$(date +%s)
    case $step in
    distil) # two processes: one prompt's tokenizing and packing hides behind the other's rounds
        long_prompts
        distil greedy data/train.jsonl.xz --max-context 1024 --slots 1536 --tokens "${GREEDY:-8000000}" &
        distil sampled data/train.jsonl.xz --max-context 1024 --slots 1536 --tokens "${SAMPLED:-3500000}" --drop-loops 0.5 --temperature 0.7 --answers 2 &
        distil long "$out/long.jsonl" --max-context 1280 --slots 512 --drop-loops 0.5 --temperature 0.7 --answers 2 &
        wait
        ;;
    clover2) train clover2 clover2 2400 2e-3 $common --option taps=8,16,24 --option heads=6 ;;
    masked) train masked masked 900 2e-3 $common ;;
    masked_steps) train masked_steps masked 800 2e-3 $common --option order=disco --option steps=2 ;;
    chimera) train chimera chimera 800 2e-3 $common --option taps=8,16,24 ;;
    kangaroo) train kangaroo kangaroo 600 1.5e-3 $common --option exit=2 --option adapter=layer ;;
    ablation) # of clover: the whole drafter, without the attention of its cell, without its cell; two seeds each, 20 M tokens
        for seed in 0 1; do
            for variant in whole attention regressive; do
                without=$([ $variant = whole ] || echo "--option $variant=false")
                train clover_${variant}_$seed clover 690 2e-3 $common --seed $seed $without
            done
        done
        ;;
    hydra) train hydra hydra 700 2e-3 $common ;;
    looped) train looped looped 800 1e-3 --batch 128 --max-length 640 --average 0.99 --checkpoint-every 100000 ${LOOPED:-} ;;
    *)
        echo "no step is called $step" >&2
        exit 2
        ;;
    esac
    echo "== $step took $(($(date +%s) - started)) s"
done
