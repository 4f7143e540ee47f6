#!/usr/bin/env bash
# Train the embedded model `emoji` on one machine with two GPUs, in calls that end by the clock.
#
#   emoji_on_two_gpus.sh first         # the VAE on GPU 0 and the judge on GPU 1, about 9.5 minutes
#   emoji_on_two_gpus.sh more_vae      # the VAE goes on on both, about 9.3 minutes
#   emoji_on_two_gpus.sh transformer   # transformer and text encoder on both, about 9.5 minutes
#   emoji_on_two_gpus.sh finish        # on from the averaged weights, then export and evaluation, about 9.2 minutes
#
# `vae`, `judge`, `continue` and `evaluate` are the parts. Or, over several calls while the machine is held:
#
#   setsid nohup emoji_on_two_gpus.sh all > /tmp/all.txt 2>&1 &    # continue; then decoder on GPU 1, four steps on GPU 0
#   ... rest                             # the same without `continue`, which ran before
#   emoji_on_two_gpus.sh watch 560       # wait so long, or until all is done; then print how far it is
#   emoji_on_two_gpus.sh pack transformer|rest    # into $OUT, in files of 15 MiB: cat NAME.tar.* | tar x
#
# `all` ends SECONDS_ALL (960) seconds after it began: what MINUTES_CONTINUED leaves is for the other parts.
# STATE keeps what the next call needs, OUT gets what is worth keeping. Environment: OUT, STATE=/tmp/emoji, MINUTES and
# SECONDS of each part, PYTHON=python3, TOY=1 for a dry run on a CPU.
set -uo pipefail
stage=${1:?usage: emoji_on_two_gpus.sh first|more_vae|transformer|finish|vae|judge|continue|evaluate|all|rest|watch|pack}
STATE=${STATE:-/tmp/emoji} OUT=${OUT:-$STATE/out} PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor}"
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
here=scripts.train_embedded
toy=() ; if [ -n "${TOY:-}" ]; then toy=(--toy); fi
mkdir -p "$STATE" "$OUT"
# What this machine trained, else what the repository keeps.
VAE="$STATE/vae.pt" JUDGE="$STATE/detector.safetensors"
[ -f "$VAE" ] || VAE=diffusion_runtime/assets/emoji
[ -f "$JUDGE" ] || JUDGE=diffusion_runtime/assets/emoji_judge/detector.safetensors
began=$(date +%s)
say() { echo "== $(( $(date +%s) - began )) s: $*" | tee -a "$STATE/progress.txt"; }
# A part that hangs must not take the time of those behind it.
limited() { local seconds=$1; shift; timeout -k 10 "$seconds" "$@"; }
number() { "$PYTHON" -c "print($1)"; }

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
    # Minutes begin after the imports, which take a minute on a cold machine.
    limited "$(number "int($minutes * 60 + 120)")" "$PYTHON" -m torch.distributed.run --standalone \
        --nproc-per-node "${PROCESSES:-2}" -m $here.train_transformer --world emoji --vae "$VAE" --minutes "$minutes" --out "$folder" "${toy[@]}" "$@" > "$folder.txt" 2>&1
    say "transformer ended with $?"
    tail -n 3 "$folder.txt"
    # What comes back is at most 16 MiB a file: cat transformer.pt.* joins the parts again.
    split -b 15M "$folder/transformer.pt" "$OUT/$(basename "$folder").pt."
    cp "$folder/transformer_log.jsonl" "$OUT/$(basename "$folder")_log.jsonl"
}

continued() {   # [options]: on from INIT or from what this machine trained
    train "$STATE/continued" "${MINUTES_CONTINUED:-5.8}" --init "${INIT:-$STATE/transformer/transformer.pt}" \
        --seed "${SEED_CONTINUED:-7}" --peak "${PEAK_CONTINUED:-1e-3}" --end 1e-5 --late \
        --refresh-every "${REFRESH_EVERY:-16}" "$@"
}

export_model() {   # FOLDER
    "$PYTHON" -m $here.export "$1" --world emoji --vae "$VAE" --transformer "$2" --scheduler unipc --shift 14
}

clips=512 few=128 shape=29x256 small=29x128 image=1x256
if [ -n "${TOY:-}" ]; then clips=4 few=2 shape=9x64 small=5x64 image=1x64; fi

accuracy() {   # NAME GPU SECONDS FOLDER [options]: $STATE/NAME.json, as far as the seconds go
    local name=$1 gpu=$2 seconds=$3 folder=$4; shift 4
    CUDA_VISIBLE_DEVICES=$gpu limited "$seconds" "$PYTHON" -m $here.evaluate "$folder" --judge "$JUDGE" --bf16 \
        --out "$STATE/$name.json" "$@" > "$STATE/$name.txt" 2>&1
    say "$name ended with $?"
    grep -a "^unipc" "$STATE/$name.txt" | tee -a "$STATE/progress.txt"
}

evaluate() {   # FOLDER
    export_model "$STATE/model" "$1/transformer.pt"
    say "evaluation begins"
    accuracy sweep 0 "${SECONDS_EVALUATE:-150}" "$STATE/model" --prompts "$few" --kinds one_object two_objects \
        --shapes "$shape" --sweep unipc:12:2:8 unipc:12:3:14 unipc:8:2:14 unipc:12:1.5:14 unipc:24:2:14 \
        unipc:8:3:8 unipc:12:4:8 &
    accuracy accuracy 1 "${SECONDS_EVALUATE:-150}" "$STATE/model" --prompts "$clips" --sweep unipc:12:2:14 \
        --shapes "$shape" "$small" "$image" --sheets "$STATE/sheets" &
    wait
    cat "$STATE/accuracy.json" "$STATE/sweep.json" > "$OUT/figures.json"
    cp "$STATE"/sheets/two_objects_"$shape"_*.png "$OUT/two_things.png"
    cp "$STATE"/sheets/one_object_"$shape"_*.png "$OUT/one_thing.png"
    cat "$STATE"/sheets/*_"$shape"_*.txt > "$OUT/wrong.txt"
    say "evaluation ended"
}

# Seconds until the end of `all`.
left() { echo $(( ${SECONDS_ALL:-960} - $(date +%s) + began )); }

decoder() {   # GPU 1: without CUDA graphs where they fail
    local seconds=${SECONDS_DECODER:-$(( $(left) - ${SECONDS_SHARPER:-75} - 35 ))} since left pid graph
    since=$(date +%s)
    for graph in "" --no-graph; do
        left=$(( seconds - $(date +%s) + since ))
        [ "$left" -lt 20 ] && break
        say "decoder begins, $left s ${graph:-with graphs}"
        # Not by `limited`: $! must be what passes the signal on.
        CUDA_VISIBLE_DEVICES=1 timeout -k 10 $(( left + 60 )) "$PYTHON" -m $here.train_decoder --world emoji --vae "$VAE" \
            --seconds "$left" --peak "${PEAK_DECODER:-1e-3}" --out "$STATE/decoder" "${toy[@]}" $graph \
            > "$STATE/decoder$graph.txt" 2>&1 &
        pid=$!
        while sleep 2 && kill -0 $pid 2> /dev/null; do
            if [ -z "$graph" ] && [ $(( $(date +%s) - since )) -gt "${SECONDS_READY:-150}" ] &&
                ! grep -q '"event": "ready"' "$STATE/decoder$graph.txt"; then
                say "decoder: no graph yet, stopped"
                kill $pid
                sleep 12
            fi
        done
        wait $pid
        say "decoder ended with $?"
        [ -f "$STATE/decoder/vae.pt" ] && break
    done
    tail -n 4 "$STATE/decoder$graph.txt" | tee -a "$STATE/progress.txt"
}

best_guidance() {   # JSON: of settings with all kinds, the one that is right most often
    "$PYTHON" - "$1" << 'END'
import json, sys
rates = {}
try:
    rows = json.load(open(sys.argv[1]))
except (OSError, ValueError):
    rows = []
for row in rows:
    rates.setdefault(row["setting"].split(":")[2], []).append(row["accuracy"]["joint"]["rate"])
sums = {guidance: sum(each) for guidance, each in rates.items() if len(each) == 2}
print(max(sums, key=sums.get, default="2"))
END
}

four_steps() {   # GPU 0: the teacher's accuracy, then its LoRA of four steps and what that is worth
    accuracy teacher 0 "${SECONDS_TEACHER:-105}" "$STATE/model" --prompts "$clips" --kinds one_object two_objects \
        --shapes "$shape" --sweep unipc:12:2:14 unipc:12:3:14 --sheets "$STATE/sheets"
    local guidance minutes=${MINUTES_DISTILL:-$(number "($(left) - 20) / 60")}
    guidance=$(best_guidance "$STATE/teacher.json")
    say "distillation begins, guidance $guidance"
    CUDA_VISIBLE_DEVICES=0 limited "$(number "int($minutes * 60 + 40)")" "$PYTHON" -m $here.distill "$STATE/model" \
        --world emoji --judge "$JUDGE" --guidance "$guidance" --sigmas 1 0.977 0.933 0.824 --minutes "$minutes" \
        --matching-from 0.4 --judge-prompts "$clips" --out "$STATE/fast" "${toy[@]}" > "$STATE/fast.txt" 2>&1
    say "distillation ended with $?"
    grep -a -e '"end"' -e '"judged"' "$STATE/fast.txt" | tee -a "$STATE/progress.txt"
}

sharper() {   # GPU 1: the decoder, then the teacher's clips through it
    decoder
    [ -f "$STATE/decoder/vae.pt" ] && VAE="$STATE/decoder/vae.pt"
    export_model "$STATE/sharper" "$STATE/continued/transformer.pt"
    accuracy sharper 1 "${SECONDS_SHARPER:-75}" "$STATE/sharper" --prompts "$clips" \
        --sweep "unipc:12:$(best_guidance "$STATE/teacher.json"):14" --shapes "$shape" "$image" "$small" \
        --sheets "$STATE/sharper_sheets"
}

everything() {
    rm -f "$STATE/finished"
    OUT="$STATE/out" ; mkdir -p "$OUT"
    continued
    local kept="$STATE/continued/transformer.pt"
    if [ ! -f "$kept" ] && [ $(( $(date +%s) - began )) -lt "${SECONDS_RETRY:-150}" ]; then
        say "again, on one GPU"
        PROCESSES=1 continued
    fi
    if [ ! -f "$kept" ]; then
        say "nothing was trained: the rest goes on from INIT"
        "$PYTHON" -c "import sys, torch, pathlib; from $here.train_transformer import initial_states
torch.save(initial_states(pathlib.Path(sys.argv[1])), sys.argv[2])" "${INIT:-$STATE/transformer/transformer.pt}" "$kept"
    fi
    rest
}

rest() {
    rm -f "$STATE/finished" "$STATE/decoder/vae.pt"
    export_model "$STATE/model" "$STATE/continued/transformer.pt"
    sharper & four_steps & wait
    say "all done"
    touch "$STATE/finished"
}

watch() {   # SECONDS
    local until=$(( $(date +%s) + $1 )) log
    while [ "$(date +%s)" -lt "$until" ] && [ ! -f "$STATE/finished" ]; do sleep 1; done
    cat "$STATE/progress.txt"
    for log in continued decoder decoder--no-graph fast; do
        # A part that has not begun is no failure: `watch` stands before `&&`.
        if [ -f "$STATE/$log.txt" ]; then echo "-- $log"; tail -n 3 "$STATE/$log.txt" | cut -c 1-900; fi
    done
}

pack() {   # transformer|rest
    cd "$STATE" || return
    if [ "$1" = transformer ]; then
        tar c progress.txt continued/transformer.pt continued/transformer_log.jsonl continued.txt
    else
        # All contact sheets would be too much.
        tar c ./*.txt ./*.json decoder fast/*.safetensors fast/*.json* fast/*two_objects.png sheets/*.txt \
            sharper_sheets/*.txt sharper_sheets/*object*_"$shape"_*.png
    fi 2> /dev/null | split -b 15M - "$OUT/$1.tar."
}

case $stage in
    first) vae & judge & wait ;;
    vae) vae ;;
    judge) judge ;;
    more_vae) more_vae ;;
    transformer) train "$STATE/transformer" "${MINUTES_TRANSFORMER:-9.2}" --end 4e-4 --keep-auxiliary ;;
    continue) continued ;;
    all) everything ;;
    rest) rest ;;
    watch) watch "${2:-560}"; exit ;;
    pack) pack "${2:?transformer or rest}" ;;
    evaluate) evaluate "${FOLDER:-$STATE/continued}" ;;
    finish) "$0" continue && "$0" evaluate ;;
    *) echo "no stage $stage" >&2; exit 2 ;;
esac
say "done"; ls -l "$OUT"
