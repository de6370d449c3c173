#!/usr/bin/env bash
# Two whole runs on a CPU in a few minutes. The first teaches the mini FLUX of examples/mini_flux, which draws simple
# scenes, a robot that it has never seen: by plain LoRA and with half of its blocks skipped, side by side in one picture.
# The second trains on real photos, examples/cat, with a tiny FLUX of random weights: it shows each phase of a run.
#   bash examples/quickstart.sh [robot|cat]     # both, or one of them
# Writes to .venv (or $VENV) and quickstart/ of the project only; run it as often as you like.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

wanted="${1:-robot cat}"
case "$wanted" in
"robot cat" | robot | cat) ;;
*)
    echo "error: $wanted is neither robot nor cat" >&2
    exit 2
    ;;
esac

step() { printf '\n== %s\n' "$*"; }
show() {
    printf '+' >&2
    printf ' %q' "$@" >&2
    printf '\n' >&2
    "$@"
}
train() {
    show accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
        train_dreambooth_blockskip_flux.py --seed 0 "$@"
}

step "the environment"
export VENV="${VENV:-.venv}"
bash examples/make_venv.sh
PATH="$(cd "$VENV/bin" && pwd):$PATH"

mkdir -p quickstart
export HF_HOME="$PWD/quickstart/huggingface" # also keeps your own accelerate configuration out of this
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error DIFFUSERS_VERBOSITY=error
export OMP_NUM_THREADS=1 # the models are small: more threads only wait for each other

echo "A line that gemm_4bit_forward failed to load comes from bitsandbytes on a CPU and does no harm."

robot() {
    local model=quickstart/mini-flux photos=quickstart/subjects/robot
    local prompts=(--prompt "a photo of a sks thing" --prompt "a sks thing on snow at the left"
        --prompt "a sks thing on night at the right" --prompt "a sks thing on water at the top")
    local training=(--pretrained_model_name_or_path "$model" --instance_data_dir "$photos"
        --instance_prompt "a photo of a sks thing" --resolution 128 --max_sequence_length 16
        --train_batch_size 8 --precompute_batch_size 8 --max_train_steps 200 --rank 8 --lora_alpha 8
        --learning_rate 1e-3 --lr_scheduler cosine --lr_warmup_steps 0)
    local drawing=(--pretrained_model_name_or_path "$model" "${prompts[@]}" --height 128 --width 128
        --num_inference_steps 20 --true_cfg_scale 3 --max_sequence_length 16)

    step "the robot, 1 of 4: a FLUX that draws scenes, and five pictures of a robot that it has never seen"
    rm -rf "$model" quickstart/drawn
    show python examples/mini_flux/pretrain.py build examples/mini_flux/mini_flux.safetensors "$model"
    show python examples/mini_flux/scenes.py quickstart/subjects

    step "the robot, 2 of 4: plain LoRA, at full size and with all blocks"
    train "${training[@]}" --patch_schedule none --patch_resolution 128 \
        --output_dir quickstart/robot-lora >quickstart/robot-lora.txt

    step "the robot, 3 of 4: BlockSkip, with patches of half the size and 6 of 12 blocks skipped"
    train "${training[@]}" --patch_resolution 64 --skip_ratio 0.5 --residual_refresh_steps 50 \
        --output_dir quickstart/robot-blockskip >quickstart/robot-blockskip.txt

    step "the robot, 4 of 4: the full model draws without a LoRA, with the one, with the other"
    show python examples/generate.py "${drawing[@]}" --output quickstart/drawn/base
    for way in lora blockskip; do
        show python examples/generate.py "${drawing[@]}" --lora "quickstart/robot-$way" --output "quickstart/drawn/$way"
    done
    show python examples/picture_grid.py quickstart/robot.png --row "photos" "$photos" \
        --row "the model as it was" quickstart/drawn/base --row "plain LoRA" quickstart/drawn/lora \
        --row "BlockSkip" quickstart/drawn/blockskip --titles "alone" "on snow, left" "on night, right" "on water, top"
}

cat_photos() {
    step "the cat, 1 of 3: a tiny FLUX pipeline of 3 double and 5 single blocks, with random weights"
    show python examples/build_tiny_pipeline.py flux quickstart/tiny-flux

    step "the cat, 2 of 3: train on examples/cat; the first 2 and the last 3 of 8 blocks are skipped"
    train --pretrained_model_name_or_path quickstart/tiny-flux \
        --instance_data_dir examples/cat \
        --instance_prompt "a photo of sks cat" \
        --skip_first 2 --skip_last 3 \
        --resolution 128 --patch_resolution 64 \
        --train_batch_size 1 --gradient_accumulation_steps 4 --max_train_steps 50 \
        --learning_rate 1e-3 \
        --output_dir quickstart/cat-lora >quickstart/cat-lora.txt

    step "the cat, 3 of 3: generate with the LoRA, on the full model"
    show python examples/generate.py \
        --pretrained_model_name_or_path quickstart/tiny-flux \
        --lora quickstart/cat-lora --compare \
        --prompt "a photo of sks cat" \
        --height 256 --width 256 --num_inference_steps 8 \
        --output quickstart/cat-pictures
}

if [[ $wanted == *robot* ]]; then robot; fi
if [[ $wanted == *cat* ]]; then cat_photos; fi

step "done"
if [[ $wanted == *robot* ]]; then
    echo "plain LoRA:"
    cat quickstart/robot-lora.txt
    echo "BlockSkip:"
    cat quickstart/robot-blockskip.txt
    echo "the picture to look at: quickstart/robot.png"
fi
if [[ $wanted == *cat* ]]; then
    cat quickstart/cat-lora.txt
    cat <<'END'
report:   quickstart/cat-lora/run_report.json
curves:   quickstart/cat-lora/logs         (tensorboard --logdir quickstart/cat-lora/logs)
card:     quickstart/cat-lora/README.md
pictures: quickstart/cat-pictures
The tiny model's weights are random: its pictures are noise, and with another LoRA they are other noise. For a real
subject name a real model, as README.md says.
END
fi
