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
"""DreamBooth LoRA for FLUX with DiT-BlockSkip: dynamic patches, and only the middle blocks in training.

    photos, prompts ──> draws ──> one pass of the full model, no gradient ──> latents and residuals on disk
                                                                                        │
    noisy latents ─> [first n blocks] ─> middle blocks + LoRA ─> [last m blocks] ─> velocity, loss
                      + residual                                  + residual

The skipped blocks are not on the device in training. The LoRA that comes out is an ordinary one for the full model.

    accelerate launch train_dreambooth_blockskip_flux.py --pretrained_model_name_or_path black-forest-labs/FLUX.1-dev \
        --instance_data_dir dog --instance_prompt "a photo of sks dog" --skip_first 19 --skip_last 10 \
        --mixed_precision bf16 --train_batch_size 1 --gradient_accumulation_steps 4

The method is arXiv 2603.20755; blockskip_utils.py holds it, and all that this script shares with the one for SANA.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import blockskip_utils as blockskip  # isort: skip (first, since it refuses packages that are too old)

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from PIL import Image
from torch import nn

PATCH_RESOLUTION = 256  # pixels: the smallest crop, and the side of every network input


def parse_args(input_args: list[str] | None = None) -> argparse.Namespace:
    """Parse a command line: the flags of the official FLUX script, and those of BlockSkip.

    A mistake ends the program with one line and status 2.
    """
    parser = blockskip.OneLineParser(description=__doc__.split("\n")[0])
    blockskip.add_model_arguments(parser, max_sequence_length=512)
    blockskip.add_data_arguments(parser)
    blockskip.add_blockskip_arguments(parser, resolution=512, patch_resolution=PATCH_RESOLUTION)
    blockskip.add_training_arguments(parser, output_dir="flux-dreambooth-lora")
    blockskip.add_optimizer_arguments(parser)
    blockskip.add_output_arguments(parser)
    blockskip.add_dry_run_arguments(parser)
    group = parser.add_argument_group("FLUX")
    group.add_argument("--guidance_scale", type=float, default=3.5, help="Guidance told to the model in training.")
    group.add_argument("--train_text_encoder", action="store_true", help="Refused: residuals rest on embeddings.")
    group.add_argument("--text_encoder_lr", type=float, default=5e-6, help="Only for --train_text_encoder.")
    return parser.parse_args(input_args)


def flag_problems(args: argparse.Namespace, defaults: argparse.Namespace) -> Iterator[str]:
    """Yield one plain sentence for every contradiction among the flags that only this script has."""
    if args.train_text_encoder:
        yield (
            "--train_text_encoder cannot be combined with BlockSkip: the stored residuals depend on the embeddings, "
            "which must not change: leave it out"
        )
    if args.text_encoder_lr != defaults.text_encoder_lr:
        yield "--text_encoder_lr has no effect here: no text encoder is trained, so leave it out"
    if args.max_sequence_length > 512:
        yield f"--max_sequence_length {args.max_sequence_length} is above 512, the most that FLUX takes"


def load_scheduler(model_folder: str, args: argparse.Namespace) -> FlowMatchEulerDiscreteScheduler:
    """The scheduler of the pipeline. Its dynamic shift acts at inference only, so its table is unshifted."""
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(model_folder, subfolder="scheduler")
    if args.timestep_shift is None:
        return scheduler
    return FlowMatchEulerDiscreteScheduler.from_config(
        scheduler.config, shift=args.timestep_shift, use_dynamic_shifting=False
    )


def encoder_inputs(run: blockskip.Run) -> dict[str, dict[str, torch.Tensor]]:
    """What each text encoder reads for one prompt: CLIP always 77 tokens, T5 as many as the flag says."""
    tokens = {"text_encoder": 77, "text_encoder_2": run.args.max_sequence_length}
    return {name: {"input_ids": torch.zeros(1, count, dtype=torch.long)} for name, count in tokens.items()}


def blank_prompt(run: blockskip.Run) -> dict[str, torch.Tensor]:
    """Zeros in the shapes of `encode_prompt`."""
    config, tokens = run.transformer_config, run.args.max_sequence_length
    return {
        "prompt_embeds": torch.zeros(1, tokens, config["joint_attention_dim"], dtype=run.weight_dtype),
        "pooled_prompt_embeds": torch.zeros(1, config["pooled_projection_dim"], dtype=run.weight_dtype),
    }


def encode_prompt(run: blockskip.Run, pipeline: FluxPipeline, prompt: str) -> dict[str, torch.Tensor]:
    """Encode a prompt as the pipeline does at inference: T5 embeddings (1, L, 4096) and pooled CLIP (1, 768)."""
    prompt_embeds, pooled_prompt_embeds, _ = pipeline.encode_prompt(
        prompt,
        prompt_2=None,
        device=run.accelerator.device,
        max_sequence_length=run.args.max_sequence_length,
    )
    return {"prompt_embeds": prompt_embeds, "pooled_prompt_embeds": pooled_prompt_embeds}


def encode_pixels(vae: nn.Module, pixels: torch.Tensor, generators: list[torch.Generator]) -> torch.Tensor:
    """Sample normalised latents (B, 16, H / 8, W / 8) of pixels (B, 3, H, W) in [-1, 1]."""
    latents = vae.encode(pixels.to(vae.dtype)).latent_dist.sample(generators)
    return (latents - vae.config.shift_factor) * vae.config.scaling_factor


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
    batch, channels, height, width = noisy_latents.shape
    device, dtype = noisy_latents.device, run.weight_dtype
    prompt_embeds = embeddings["prompt_embeds"].to(dtype)  # (B, L, 4096)
    packed = FluxPipeline._pack_latents(noisy_latents, batch, channels, height, width)  # (B, h / 2 * w / 2, 4 C)
    guidance = None
    if run.transformer_config["guidance_embeds"]:
        guidance = torch.full((batch,), run.args.guidance_scale, device=device, dtype=torch.float32)
    prediction = transformer(
        hidden_states=packed.to(dtype),
        timestep=timesteps / 1000,
        guidance=guidance,
        pooled_projections=embeddings["pooled_prompt_embeds"].to(dtype),
        encoder_hidden_states=prompt_embeds,
        txt_ids=torch.zeros(prompt_embeds.shape[1], 3, device=device, dtype=dtype),
        img_ids=FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, device, dtype),
        return_dict=False,
    )[0]
    # with 1 pixel to a latent cell, the sizes that unpacking asks for are those of the latents
    return FluxPipeline._unpack_latents(prediction, height, width, vae_scale_factor=1)


def generate_images(
    run: blockskip.Run,
    pipeline: FluxPipeline,
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
        name: tensor.to(device, pipeline.transformer.dtype).repeat_interleave(len(generators), dim=0)
        for name, tensor in prompts[prompt].items()
    }
    packed = pipeline(
        **embeddings, height=size, width=size, generator=generators, output_type="latent", **options
    ).images
    latents = FluxPipeline._unpack_latents(packed, size, size, pipeline.vae_scale_factor).to(vae.dtype)
    latents = latents / vae.config.scaling_factor + vae.config.shift_factor  # (B, C, h, w)
    images = vae.decode(latents, return_dict=False)[0]
    return pipeline.image_processor.postprocess(images)


FLUX = blockskip.ModelFamily(
    name="FLUX",
    parse_args=parse_args,
    flag_problems=flag_problems,
    pipeline_class=FluxPipeline,
    transformer_class=FluxTransformer2DModel,
    patch_resolution=PATCH_RESOLUTION,
    latent_cells_per_token=4,
    text_components=("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"),
    extra_prompts=(),
    text_flags=("max_sequence_length", "guidance_scale"),
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
    accelerator = blockskip.start(args, FLUX)
    report = blockskip.RunReport(accelerator)
    with report.phase("check"):
        run = blockskip.check(args, FLUX, accelerator, report)
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
