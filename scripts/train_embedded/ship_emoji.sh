#!/usr/bin/env bash
# Put trained weights of `emoji` into the package: its folder in 8 bits, its LoRA of four steps, their records.
#
#   FROM=FOLDER scripts/train_embedded/ship_emoji.sh [model] [fast] [records] [pictures]     # all of them by default
#
# FROM holds transformer.pt or .safetensors, vae.pt or .safetensors, transformer_log.jsonl (and, where there are any,
# continued_log.jsonl, more_log.jsonl, vae_log.jsonl, sweep.json), accuracy.json, notes.json; of the LoRA
# fast.safetensors, *fast_log.jsonl, fast_accuracy.json, fast_notes.json. What is missing is said, and nothing after it is written.
#
# Environment: STEPS=10 GUIDANCE=2.0 SHIFT=14 as it ships; CLIPS=24, of which weights are rounded: 0 for to the
# nearest, on a slow machine; SHARE=1, of the LoRA's numbers that are kept; PYTHON=python3.
set -euo pipefail
: "${FROM:?the folder of what was trained}"
PYTHON=${PYTHON:-python3} STEPS=${STEPS:-10} GUIDANCE=${GUIDANCE:-2.0} SHIFT=${SHIFT:-14} CLIPS=${CLIPS:-24}
ASSETS=diffusion_runtime/assets WIDE=${WIDE:-$FROM/emoji16}
here=scripts.train_embedded
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
first() { for each in "$@"; do if [ -e "$FROM/$each" ]; then echo "$FROM/$each"; return; fi; done; echo "$FROM: expected $*" >&2; exit 2; }

model() {   # the folder in 16 bits, then in 8
    local transformer vae
    transformer=$(first transformer.pt transformer.safetensors) vae=$(first vae.pt vae.safetensors)
    rm -rf "$WIDE"
    "$PYTHON" -m $here.export "$WIDE" --world emoji --vae "$vae" --transformer "$transformer" --scheduler unipc \
        --shift "$SHIFT" --defaults "{\"num_inference_steps\": $STEPS, \"guidance_scale\": $GUIDANCE}"
    # What is fitted to the weights and not exported stays, and is made anew below.
    "$PYTHON" -m $here.round_folder "$WIDE" $ASSETS/emoji --world emoji --clips "$CLIPS"
}

fast() {   # the LoRA and its record, then in 8 bits
    local lora accuracy notes
    lora=$(first fast.safetensors) accuracy=$(first fast_accuracy.json) notes=$(first fast_notes.json)
    "$PYTHON" -m $here.distill_record "$FROM/fast16" --lora "$lora" --logs "$FROM"/*fast_log.jsonl \
        --accuracy "$accuracy" --notes "$notes"
    "$PYTHON" -m $here.round_folder "$FROM/fast16" $ASSETS/emoji_fast --lora --share "${SHARE:-1}"
}

records() {   # TRAINING.json and the map of previews
    local accuracy notes logs=() more=() each
    accuracy=$(first accuracy.json) notes=$(first notes.json)
    if [ -e "$FROM/vae_log.jsonl" ]; then more+=(--vae-log "$FROM/vae_log.jsonl"); fi
    if [ -e "$FROM/sweep.json" ]; then more+=(--sweep "$FROM/sweep.json"); fi
    first transformer_log.jsonl > /dev/null
    for each in transformer continued more; do
        if [ -e "$FROM/${each}_log.jsonl" ]; then logs+=("$FROM/${each}_log.jsonl"); fi
    done
    "$PYTHON" -m $here.training_record $ASSETS/emoji --world emoji --logs "${logs[@]}" \
        --accuracy "$accuracy" --notes "$notes" "${more[@]}"
    "$PYTHON" scripts/fit_preview.py emoji --world emoji --clips "${PREVIEW_CLIPS:-48}"
}

pictures() {   # README's picture: eight clips, about two minutes on two idle cores
    "$PYTHON" scripts/readme_picture.py --world emoji --rows 2
}

if [ $# = 0 ]; then set -- model fast records pictures; fi
for stage in "$@"; do
    case $stage in
        model | fast | records | pictures) echo "== $stage"; $stage ;;
        *) echo "no stage $stage: model, fast, records or pictures" >&2; exit 2 ;;
    esac
done
# Bytes by folder, of all weights and of everything: the weights must stay below 40e6 (tests/test_embedded_model.py).
find $ASSETS -type f -printf '%s %P\n' | awk '{ split($2, part, "/"); size[part[1]] += $1; all += $1 }
    /safetensors$/ { weights += $1 }
    END { for (name in size) print size[name], name; print weights, "weights"; print all, "all" }' | sort -n
