#!/usr/bin/env bash
# Train the embedded model `emoji` on one machine with two GPUs, in calls that end by the clock.
#
#   emoji_on_two_gpus.sh first         # the VAE on GPU 0 and the judge on GPU 1, about 9.5 minutes
#   emoji_on_two_gpus.sh more_vae      # the VAE goes on on both, about 9.3 minutes
#   emoji_on_two_gpus.sh transformer   # transformer and text encoder on both, about 9.5 minutes
#   emoji_on_two_gpus.sh finish        # on from the averaged weights, then export and evaluation, about 9.2 minutes
#
# `vae`, `judge`, `continue` and `evaluate` are the parts. STATE keeps what the next call needs, OUT gets what is worth
# keeping. Environment: OUT, STATE=/tmp/emoji, MINUTES of each part, PYTHON=python3, TOY=1 for a dry run on a CPU.
set -uo pipefail
stage=${1:?usage: emoji_on_two_gpus.sh first|more_vae|transformer|finish|vae|judge|continue|evaluate}
STATE=${STATE:-/tmp/emoji} OUT=${OUT:-$STATE/out} PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor}"
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
here=scripts.train_embedded
toy=() ; if [ -n "${TOY:-}" ]; then toy=(--toy); fi
mkdir -p "$STATE" "$OUT"
# What this machine trained, else what the repository keeps.
VAE="$STATE/vae.pt" JUDGE="$STATE/detector.safetensors"
[ -f "$VAE" ] || VAE=scripts/train_embedded/emoji_state/vae.safetensors
[ -f "$JUDGE" ] || JUDGE=scripts/train_embedded/emoji_state/detector.safetensors
began=$(date +%s)
say() { echo "== $(( $(date +%s) - began )) s: $*"; }

vae() {
    say "VAE begins"
    CUDA_VISIBLE_DEVICES=0 "$PYTHON" -m $here.train_vae --world emoji --minutes "${MINUTES_VAE:-8.7}" \
        --out "$STATE" "${toy[@]}" > "$STATE/vae.txt" 2>&1
    say "VAE ended with $?"
    tail -n 4 "$STATE/vae.txt"
    # A call that was cut off leaves the draft of the last two minutes.
    [ -f "$STATE/vae.pt" ] || cp "$STATE/vae_draft.pt" "$STATE/vae.pt"
    cp "$STATE"/vae.pt "$STATE"/vae_log.jsonl "$OUT"/
    cp "$STATE"/vae_29x256.png "$OUT"/ 2> /dev/null || cp "$STATE"/vae_*.png "$OUT"/
}

more_vae() {
    say "VAE begins on both"
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 -m $here.train_vae --world emoji \
        --minutes "${MINUTES_VAE:-8.6}" --init "$VAE" --out "$STATE" "${toy[@]}" > "$STATE/more_vae.txt" 2>&1
    say "VAE ended with $?"
    tail -n 4 "$STATE/more_vae.txt"
    cp "$STATE"/vae.pt "$STATE"/vae_log.jsonl "$STATE"/vae_*.png "$OUT"/
}

judge() {
    say "judge begins"
    CUDA_VISIBLE_DEVICES=1 "$PYTHON" -m $here.train_judge --minutes "${MINUTES_JUDGE:-3.6}" \
        --out "$STATE" "${toy[@]}" ${TOY:+--clips 8} > "$STATE/judge.txt" 2>&1
    say "judge ended with $?"
    tail -n 4 "$STATE/judge.txt"
    cp "$STATE"/detector.safetensors "$STATE"/judge_log.jsonl "$OUT"/
}

train() {   # FOLDER MINUTES [options]: both processes
    local folder=$1 minutes=$2; shift 2
    mkdir -p "$folder"
    say "transformer begins in $folder"
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 -m $here.train_transformer --world emoji \
        --vae "$VAE" --minutes "$minutes" --out "$folder" "${toy[@]}" "$@" > "$folder.txt" 2>&1
    say "transformer ended with $?"
    tail -n 3 "$folder.txt"
    # What comes back is at most 16 MiB a file: cat transformer.pt.* joins the parts again.
    split -b 15M "$folder/transformer.pt" "$OUT/$(basename "$folder").pt."
    cp "$folder/transformer_log.jsonl" "$OUT/$(basename "$folder")_log.jsonl"
}

evaluate() {   # FOLDER
    local prompts=512 few=128 shape=29x256 small=29x128 image=1x256
    if [ -n "${TOY:-}" ]; then prompts=4 few=2 shape=9x64 small=5x64 image=1x64; fi
    "$PYTHON" -m $here.export "$STATE/model" --world emoji --vae "$VAE" --transformer "$1/transformer.pt" \
        --scheduler unipc --shift 14
    say "evaluation begins"
    local judged=(--judge "$JUDGE" --bf16)
    CUDA_VISIBLE_DEVICES=0 timeout "${SECONDS_EVALUATE:-150}" "$PYTHON" -m $here.evaluate "$STATE/model" "${judged[@]}" \
        --prompts "$few" --kinds one_object two_objects --shapes "$shape" --out "$STATE/sweep.json" \
        --sweep unipc:12:2:8 unipc:12:3:14 unipc:8:2:14 unipc:12:1.5:14 unipc:24:2:14 unipc:8:3:8 unipc:12:4:8 \
        > "$STATE/sweep.txt" 2>&1 &
    CUDA_VISIBLE_DEVICES=1 timeout "${SECONDS_EVALUATE:-150}" "$PYTHON" -m $here.evaluate "$STATE/model" "${judged[@]}" \
        --prompts "$prompts" --sweep unipc:12:2:14 --shapes "$shape" "$small" "$image" --out "$STATE/accuracy.json" \
        --sheets "$STATE/sheets" > "$STATE/accuracy.txt" 2>&1 &
    wait
    cat "$STATE/sweep.txt" "$STATE/accuracy.txt"
    cat "$STATE/accuracy.json" "$STATE/sweep.json" > "$OUT/figures.json"
    cp "$STATE"/sheets/two_objects_"$shape"_*.png "$OUT/two_things.png"
    cp "$STATE"/sheets/one_object_"$shape"_*.png "$OUT/one_thing.png"
    cat "$STATE"/sheets/*_"$shape"_*.txt > "$OUT/wrong.txt"
    say "evaluation ended"
}

case $stage in
    first) vae & judge & wait ;;
    vae) vae ;;
    judge) judge ;;
    more_vae) more_vae ;;
    transformer) train "$STATE/transformer" "${MINUTES_TRANSFORMER:-9.2}" --end 4e-4 --keep-auxiliary ;;
    continue) train "$STATE/continued" "${MINUTES_CONTINUED:-5.8}" --init "${INIT:-$STATE/transformer/transformer.pt}" \
        --seed 7 --peak 1e-3 --end 1e-5 --late ;;
    evaluate) evaluate "${FOLDER:-$STATE/continued}" ;;
    finish) "$0" continue && "$0" evaluate ;;
    *) echo "no stage $stage" >&2; exit 2 ;;
esac
say "done"; ls -l "$OUT"
