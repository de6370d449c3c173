# Copyright 2026 The DiT-BlockSkip authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""DreamBooth LoRA for SANA with DiT-BlockSkip: dynamic patches, and only the middle blocks in training.

    photos, prompts ──> draws ──> one pass of the full model, no gradient ──> latents and residuals on disk
                                                                                        │
    noisy latents ─> [first n blocks] ─> middle blocks + LoRA ─> [last m blocks] ─> velocity, loss
                      + residual                                  + residual

The skipped blocks are not on the device in training. The LoRA that comes out is an ordinary one for the full model.

    accelerate launch train_dreambooth_blockskip_sana.py \
        --pretrained_model_name_or_path Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers \
        --instance_data_dir dog --instance_prompt "a photo of sks dog" --skip_first 3 --skip_last 3 \
        --mixed_precision bf16 --train_batch_size 1 --gradient_accumulation_steps 4

The method is arXiv 2603.20755; blockskip_utils.py holds it, and all that this script shares with the one for FLUX.
"""

import argparse
import inspect
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import blockskip_utils as blockskip  # isort: skip (first, since it refuses packages that are too old)

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel
from PIL import Image
from torch import nn

PATCH_RESOLUTION = 512  # pixels: the smallest crop, and the side of every network input
NEGATIVE_PROMPT = ""  # what guidance moves away from at inference, by the pipeline's default
INSTRUCTION = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default


def parse_args(input_args: list[str] | None = None) -> argparse.Namespace:
    """Parse a command line: the flags of the official SANA script, and those of BlockSkip.

    A mistake ends the program with one line and status 2.
    """
    parser = blockskip.OneLineParser(description=__doc__.split("\n")[0])
    blockskip.add_model_arguments(parser, max_sequence_length=300)
    blockskip.add_data_arguments(parser)
    blockskip.add_blockskip_arguments(parser, resolution=1024, patch_resolution=PATCH_RESOLUTION)
    blockskip.add_training_arguments(parser, output_dir="sana-dreambooth-lora")
    blockskip.add_optimizer_arguments(parser)
    blockskip.add_output_arguments(parser)
    blockskip.add_dry_run_arguments(parser)
    group = parser.add_argument_group("SANA")
    group.add_argument(
        "--complex_human_instruction",
        help="Text put before every prompt, lines parted by newlines; default: the pipeline's own, '' for none.",
    )
    return parser.parse_args(input_args)


def flag_problems(args: argparse.Namespace, defaults: argparse.Namespace) -> Iterator[str]:
    """Yield one plain sentence for every contradiction among the flags that only this script has."""
    if args.max_sequence_length > 300:
        yield f"--max_sequence_length {args.max_sequence_length} is above 300, the most that SANA was trained with"


def load_scheduler(model_folder: str, args: argparse.Namespace) -> FlowMatchEulerDiscreteScheduler:
    """A flow-matching scheduler with the shift of the pipeline's own, which is a solver that calls it `flow_shift`."""
    config = json.loads(pathlib.Path(model_folder, "scheduler", "scheduler_config.json").read_text())
    shift = args.timestep_shift or config.get("flow_shift") or config.get("shift") or 1.0
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=config["num_train_timesteps"], shift=shift)


def encoder_inputs(run: blockskip.Run) -> dict[str, dict[str, torch.Tensor]]:
    """What Gemma reads for one prompt: the instruction, at no more than a token for each character, and the prompt."""
    instruction = run.args.complex_human_instruction
    characters = sum(map(len, INSTRUCTION)) if instruction is None else len(instruction)
    tokens = torch.zeros(1, characters + run.args.max_sequence_length, dtype=torch.long)
    return {"text_encoder": {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}}


def blank_prompt(run: blockskip.Run) -> dict[str, torch.Tensor]:
    """Zeros in the shapes of `encode_prompt`."""
    width, tokens = run.transformer_config["caption_channels"], run.args.max_sequence_length
    return {
        "prompt_embeds": torch.zeros(1, tokens, width, dtype=run.weight_dtype),
        "prompt_attention_mask": torch.ones(1, tokens, dtype=torch.long),
    }


def encode_prompt(run: blockskip.Run, pipeline: SanaPipeline, prompt: str) -> dict[str, torch.Tensor]:
    """Encode a prompt as the pipeline does at inference: Gemma embeddings (1, L, 2304) and their mask (1, L)."""
    instruction = run.args.complex_human_instruction
    lines = INSTRUCTION if instruction is None else instruction.splitlines()
    prompt_embeds, prompt_attention_mask, _, _ = pipeline.encode_prompt(
        prompt,
        do_classifier_free_guidance=False,
        device=run.accelerator.device,
        max_sequence_length=run.args.max_sequence_length,
        complex_human_instruction=None if prompt == NEGATIVE_PROMPT else lines,
    )
    return {"prompt_embeds": prompt_embeds, "prompt_attention_mask": prompt_attention_mask}


def encode_pixels(vae: nn.Module, pixels: torch.Tensor, generators: list[torch.Generator]) -> torch.Tensor:
    """Normalised latents (B, 32, H / 32, W / 32) of pixels (B, 3, H, W) in [-1, 1]; this VAE does not sample."""
    return vae.encode(pixels.to(vae.dtype)).latent * vae.config.scaling_factor


def predict_velocity(
    run: blockskip.Run,
    transformer: nn.Module,
    noisy_latents: torch.Tensor,
    timesteps: torch.Tensor,
    embeddings: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """The transformer's velocity for noisy latents (B, C, h, w) at timesteps (B,) in (0, 1000], in the same shape.

    `transformer` may be wrapped, so that its attributes cannot be read.
    """
    return transformer(
        hidden_states=noisy_latents.to(run.weight_dtype),
        encoder_hidden_states=embeddings["prompt_embeds"].to(run.weight_dtype),  # (B, L, 2304)
        encoder_attention_mask=embeddings["prompt_attention_mask"],  # (B, L)
        timestep=timesteps * run.transformer_config.get("timestep_scale", 1.0),
        return_dict=False,
    )[0]


def generate_images(
    run: blockskip.Run,
    pipeline: SanaPipeline,
    prompts: Mapping[str, Mapping[str, torch.Tensor]],
    prompt: str,
    generators: list[torch.Generator],
    **options: Any,
) -> list[Image.Image]:
    """Draw one image per generator at `--resolution`, decoding in the VAE's own precision.

    `options` go to the pipeline.
    """
    size, vae, device = run.args.resolution, pipeline.vae, run.accelerator.device
    embeddings = {
        f"{prefix}{name}": tensor.to(device).repeat_interleave(len(generators), dim=0)
        for prefix, text in (("", prompt), ("negative_", NEGATIVE_PROMPT))
        for name, tensor in prompts[text].items()
    }
    latents = pipeline(
        **embeddings,
        negative_prompt=None,
        height=size,
        width=size,
        generator=generators,
        output_type="latent",
        **options,
        use_resolution_binning=False,  # else the size would be snapped to a table of the model's
    ).images  # (B, C, h, w)
    images = vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]
    return pipeline.image_processor.postprocess(images)


SANA = blockskip.ModelFamily(
    name="SANA",
    parse_args=parse_args,
    flag_problems=flag_problems,
    pipeline_class=SanaPipeline,
    transformer_class=SanaTransformer2DModel,
    patch_resolution=PATCH_RESOLUTION,
    latent_cells_per_token=1,
    text_components=("text_encoder", "tokenizer"),
    extra_prompts=(NEGATIVE_PROMPT,),
    text_flags=("max_sequence_length", "complex_human_instruction"),
    load_scheduler=load_scheduler,
    encoder_inputs=encoder_inputs,
    blank_prompt=blank_prompt,
    encode_prompt=encode_prompt,
    encode_pixels=encode_pixels,
    predict_velocity=predict_velocity,
    generate_images=generate_images,
)


def main(args: argparse.Namespace) -> None:
    """One run: the phases of the method, in order."""
    accelerator = blockskip.start(args, SANA)
    report = blockskip.RunReport(accelerator)
    with report.phase("check"):
        run = blockskip.check(args, SANA, accelerator, report)
    if args.dry_run:
        blockskip.dry_run(run)
        return
    if run.is_finished:
        accelerator.print(f"{run.output} holds the finished run: nothing is trained, drawn or uploaded again")
        return
    with report.phase("encode prompts"):
        prompts = blockskip.encode_prompts(run)
    if run.class_photos_missing:
        with report.phase("class images"):
            blockskip.make_class_images(run, prompts)
    if args.skip_ratio is not None:
        with report.phase("choose blocks"):
            blockskip.choose_blocks(run, prompts)
    with report.phase("load"):
        trainer = blockskip.load_trainer(run)
    for period in run.plan.periods(trainer.step):
        with report.phase("draw"):
            draws = blockskip.make_draws(run, period)
        with report.phase("precompute"):
            blockskip.precompute(run, trainer, period, draws, prompts)
        with report.phase("train"):
            blockskip.train(run, trainer, period, prompts)
    with report.phase("save"):
        blockskip.save_result(run, trainer)
        blockskip.release(run, trainer)
    with report.phase("validate"):
        images = blockskip.validate(run, prompts)
    blockskip.publish(run, images)


if __name__ == "__main__":
    main(parse_args())
