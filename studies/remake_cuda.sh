#!/usr/bin/env bash
# Makes the GPU figures of results/ again, step by step: bash studies/remake_cuda.sh OUT STEP...
#
# Needs data/spec_bench.jsonl (Spec-Bench's questions), data/spec_bench_48b.jsonl (the 48 that nothing is tuned on; a file
# with all questions works too) and data/train.jsonl.xz (prompts to distill). An interrupted step resumes when it is run
# again with the same OUT. On one H200 all steps together take about 30 minutes.
set -u
out=$1
shift
mkdir -p "$out"
methods=prompt_lookup,token_recycling,medusa,clover,clover2,echo,hidden_transfer,firp,draft_model,gsd
questions="--prompts spec_bench_48=data/spec_bench.jsonl"
bench() { echo "== $1"; python -m foreword bench "${@:2}" --out "$out/$1" >"$out/$1.txt" 2>&1 || tail -5 "$out/$1.txt"; }

warm() { # compiles kernels, each method in its own process; the widened model is too large for several processes
    short="--per-group 2 --max-new-tokens 8 --repeats 1 --temperature 0,0.8"
    for method in ${methods//,/ }; do
        python -m foreword bench $questions $short --batch 1,8 --methods "$method" >/dev/null 2>&1 &
    done
    python -m foreword bench $questions $short --batch 8 --methods $methods --widen 7b >/dev/null 2>&1 &
    wait
}

for step in "$@"; do
    started=$(date +%s)
    case $step in
    warm) warm ;;
    default) bench bench_cuda_48 $questions --methods $methods --repeats 2 ;;
    held_out) bench bench_cuda_48b --prompts spec_bench_48b=data/spec_bench_48b.jsonl --methods $methods --repeats 1 ;;
    widened) bench bench_cuda_7b $questions --methods $methods --widen 7b --temperature 0,0.8 --repeats 1 ;;
    batches) bench bench_cuda_batches $questions --methods $methods --batch 8,32 --temperature 0,0.8 --repeats 2 ;;
    sampled) bench bench_cuda_drawn $questions --methods $methods --temperature 0.8 --repeats 1 ;;
    widened_batches) bench bench_cuda_7b_batches $questions --methods $methods --widen 7b --batch 8,32 --temperature 0,0.8 --repeats 1 ;;
    all) bench bench_cuda_240 --prompts spec_bench_240=data/spec_bench.jsonl --methods $methods --repeats 1 ;;
    table1) bench bench_cuda_table1 $questions --methods medusa,clover --rows 5 --batch 1,4,8,16,32 --repeats 3 ;;
    amusd) bench bench_cuda_amusd $questions --per-group 2 --methods amusd --repeats 1 ;; # alone: it changes the speed of the others
    hf) bench bench_cuda_hf $questions --per-group 1 --max-new-tokens 64 --methods plain,echo --baselines hf,hf_static,hf_lookup,hf_assistant --repeats 1 ;;
    prove)
        for dtype in float32 bfloat16; do
            python -m foreword prove --prompts data/spec_bench.jsonl --per-group 8 --dtype $dtype --slots 4 --out "$out/prove_cuda_$dtype" >"$out/prove_$dtype.txt" 2>&1
        done
        ;;
    profile)
        python -m foreword profile --rows 1,4,16,32,64 --contexts 512 --methods plain,$methods --out "$out/135m.json" >"$out/135m.txt" 2>&1
        python -m foreword profile --widen 7b --rows 1,4,16,32,64 --contexts 512 --methods plain,clover2,hidden_transfer --tokens 32 --out "$out/7b_grown.json" >"$out/7b_grown.txt" 2>&1
        ;;
    profile_8) python -m foreword profile --widen 7b --batch 8 --rows 16,128,256 --contexts 512 --methods plain,clover2,echo,medusa --out "$out/7b_grown_8.json" >"$out/7b_grown_8.txt" 2>&1 ;;
    inside) python studies/linear_tiles_in_passes.py --out "$out/inside.json" >"$out/inside.txt" 2>&1 ;;
    attention) python studies/attention_tiles.py --shapes 135M --rows 1,16 --contexts 512 --texts 1,8,16,32 --out "$out/kernels.json" >"$out/kernels.txt" 2>&1 ;;
    attention_widened)
        python studies/attention_tiles.py --shapes widened --rows 1,8,16,24 --contexts 512,1024 --texts 8 --out "$out/kernels_grown.json" >"$out/kernels_grown.txt" 2>&1
        python studies/attention_tiles.py --shapes widened --rows 1,8,16,24 --contexts 1024 --texts 8 --unlike --out "$out/kernels_unlike.json" >"$out/kernels_unlike.txt" 2>&1
        ;;
    pseudo_rows) python studies/pseudo_rows.py --out "$out/grafts_cuda.json" >"$out/grafts.txt" 2>&1 ;;
    overlap)
        python studies/overlap.py --prompts data/spec_bench.jsonl --limit 8 --out "$out/overlap_streams.json" >"$out/overlap.txt" 2>&1
        python studies/overlap.py --prompts data/spec_bench.jsonl --limit 8 --draft-device cpu --out "$out/overlap_cpu_draft.json" >>"$out/overlap.txt" 2>&1
        ;;
    distill)
        python -m foreword distill --prompts data/train.jsonl.xz --max-new-tokens 160 --max-context 1024 --slots 1536 --drop-loops 0.5 \
            --temperature 0.7 --answers 2 --tokens 8000000 --json --out "$out/distilled" >"$out/distill.json" 2>"$out/distill.txt"
        ;;
    *)
        echo "no step is called $step" >&2
        exit 2
        ;;
    esac
    echo "== $step took $(($(date +%s) - started)) s"
done
