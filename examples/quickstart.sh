#!/usr/bin/env bash
# A whole run on a CPU in a few minutes: installs the tested versions, builds a tiny FLUX pipeline with random weights,
# trains a LoRA on the five photos in examples/cat with blocks skipped and patches drawn, and generates with it.
# Writes to .venv (or $VENV) and quickstart/ of the project only; run it as often as you like.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() { printf '\n== %s\n' "$*"; }
show() {
    printf '+' >&2
    printf ' %q' "$@" >&2
    printf '\n' >&2
    "$@"
}

step "1 of 4: the environment"
export VENV="${VENV:-.venv}"
bash examples/make_venv.sh
PATH="$(cd "$VENV/bin" && pwd):$PATH"

mkdir -p quickstart
export HF_HOME="$PWD/quickstart/huggingface" # also keeps your own accelerate configuration out of this
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error DIFFUSERS_VERBOSITY=error
export OMP_NUM_THREADS=1 # the model is tiny: more threads only wait for each other

echo "A line that gemm_4bit_forward failed to load comes from bitsandbytes on a CPU and does no harm."

step "2 of 4: a tiny FLUX pipeline of 3 double and 5 single blocks"
show python examples/build_tiny_pipeline.py flux quickstart/tiny-flux

step "3 of 4: train on examples/cat; the first 2 and the last 3 of 8 blocks are skipped"
show accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
    train_dreambooth_blockskip_flux.py \
    --pretrained_model_name_or_path quickstart/tiny-flux \
    --instance_data_dir examples/cat \
    --instance_prompt "a photo of sks cat" \
    --skip_first 2 --skip_last 3 \
    --resolution 128 --patch_resolution 64 \
    --train_batch_size 1 --gradient_accumulation_steps 4 --max_train_steps 50 \
    --learning_rate 1e-3 --seed 0 \
    --output_dir quickstart/lora >quickstart/phases.txt

step "4 of 4: generate with the LoRA, on the full model"
show python examples/generate.py \
    --pretrained_model_name_or_path quickstart/tiny-flux \
    --lora quickstart/lora --compare \
    --prompt "a photo of sks cat" \
    --height 256 --width 256 --num_inference_steps 8 \
    --output quickstart/pictures

step "done"
cat quickstart/phases.txt
cat <<'END'
report:   quickstart/lora/run_report.json
curves:   quickstart/lora/logs         (tensorboard --logdir quickstart/lora/logs)
card:     quickstart/lora/README.md
pictures: quickstart/pictures
The tiny model's weights are random: its pictures are noise, and with another LoRA they are other noise. The run shows
that every part works; for a real subject name a real model, as README.md says.
END
