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
"""Builds a tiny FLUX or SANA pipeline on disk: every part of the real one, random weights, no network.

The folder can stand wherever a training script asks for `--pretrained_model_name_or_path`, so that a whole run can be
tried on a laptop. The images such a pipeline draws are noise; what is real is the shape of everything: the pipeline
classes, the tokenizers, the VAE factors (8 for FLUX, 32 for SANA), the schedulers and the order of the blocks.

    python examples/build_tiny_pipeline.py flux tiny-flux
    python examples/build_tiny_pipeline.py flux tiny-flux-57 --num_layers 19 --num_single_layers 38
    python examples/build_tiny_pipeline.py sana tiny-sana --num_layers 20

In order: the two builders, the folder, the tokenizers, the weights, the VAEs, the command line.
"""

import argparse
import json
import sys
from collections.abc import Callable
from math import log, prod
from pathlib import Path

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
)
from diffusers.models.embeddings import TimestepEmbedding
from safetensors import safe_open
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)
from transformers.utils import logging as transformers_logging

MARKER = "tiny_pipeline.json"  # says that a folder is ours to write into, and how it was built
RECIPE = 1  # raise it when the same settings give other weights, so that old folders are built again

WIDTH = 32  # channels of the transformers and of all text encoders
FLUX_LATENT_CHANNELS = 4  # 16 in FLUX.1
SANA_LATENT_CHANNELS = 8  # 32 in SANA


# ---------------------------------------------------------------------------------------------------------------------
# The two builders
# ---------------------------------------------------------------------------------------------------------------------


def build_tiny_flux(folder: str | Path, *, num_layers: int = 3, num_single_layers: int = 5, seed: int = 0) -> Path:
    """Writes a complete, tiny `FluxPipeline` with random weights.

    Args:
        folder: where to; missing, empty, or holding a tiny FLUX pipeline of other settings, which is replaced.
        num_layers: double blocks, 19 in FLUX.1.
        num_single_layers: single blocks, 38 in FLUX.1.
        seed: the same settings and seed give the same weights.

    Returns:
        The folder, for `FluxPipeline.from_pretrained`. One that already holds these settings is left as it is.

    Raises:
        FileExistsError: if the folder holds anything else.
    """
    settings = {"model": "flux", "num_layers": num_layers, "num_single_layers": num_single_layers, "seed": seed}
    return _build_once(Path(folder), settings, lambda rng: _flux_pipeline(num_layers, num_single_layers, rng))


def build_tiny_sana(folder: str | Path, *, num_layers: int = 6, seed: int = 0) -> Path:
    """Writes a complete, tiny `SanaPipeline` with random weights.

    Args:
        folder: where to; missing, empty, or holding a tiny SANA pipeline of other settings, which is replaced.
        num_layers: blocks, 20 in SANA 1.6B.
        seed: the same settings and seed give the same weights.

    Returns:
        The folder, for `SanaPipeline.from_pretrained`. One that already holds these settings is left as it is.

    Raises:
        FileExistsError: if the folder holds anything else.
    """
    settings = {"model": "sana", "num_layers": num_layers, "seed": seed}
    return _build_once(Path(folder), settings, lambda rng: _sana_pipeline(num_layers, rng))


def _flux_pipeline(num_layers: int, num_single_layers: int, rng: torch.Generator) -> FluxPipeline:
    tokenizer, tokenizer_2 = clip_tokenizer(), _t5_tokenizer()
    transformer = FluxTransformer2DModel(
        in_channels=4 * FLUX_LATENT_CHANNELS,  # the pipeline packs 2 x 2 latents into one token
        num_layers=num_layers,
        num_single_layers=num_single_layers,
        attention_head_dim=16,
        num_attention_heads=WIDTH // 16,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),  # sums to the head's 16
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),  # as FLUX.1-dev
        vae=_flux_vae(rng),
        text_encoder=_draw_weights(CLIPTextModel(_clip_config(tokenizer)), rng),
        tokenizer=tokenizer,
        text_encoder_2=_draw_weights(T5EncoderModel(_t5_config(tokenizer_2)), rng),
        tokenizer_2=tokenizer_2,
        transformer=_draw_weights(transformer, rng),
    )


def _sana_pipeline(num_layers: int, rng: torch.Generator) -> SanaPipeline:
    tokenizer = _gemma_tokenizer()
    transformer = SanaTransformer2DModel(
        in_channels=SANA_LATENT_CHANNELS,
        out_channels=SANA_LATENT_CHANNELS,
        num_layers=num_layers,
        attention_head_dim=8,
        num_attention_heads=WIDTH // 8,
        cross_attention_head_dim=16,
        num_cross_attention_heads=WIDTH // 16,
        cross_attention_dim=WIDTH,
        caption_channels=WIDTH,
        sample_size=16,  # 512 pixels unless asked otherwise; the pipeline has size tables for 16, 32, 64 and 128 only
    )
    scheduler = DPMSolverMultistepScheduler(  # as SANA 1.6B at 1024 pixels
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=_draw_weights(Gemma2Model(_gemma_config(tokenizer)), rng),
        vae=_sana_vae(rng),
        transformer=_draw_weights(transformer, rng),
        scheduler=scheduler,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The folder
# ---------------------------------------------------------------------------------------------------------------------


def is_built(folder: Path, settings: dict[str, str | int]) -> bool:
    """Whether `folder` holds a finished pipeline of exactly these settings."""
    return _read_marker(folder) == {**settings, "recipe": RECIPE, "complete": True}


def _build_once(folder: Path, settings: dict, make_pipeline: Callable[[torch.Generator], DiffusionPipeline]) -> Path:
    if is_built(folder, settings):
        return folder
    _check_writable(folder, settings["model"])
    with torch.random.fork_rng(devices=[]):  # the models' constructors draw from the global generator
        pipeline = make_pipeline(torch.Generator().manual_seed(settings["seed"]))

    folder.mkdir(parents=True, exist_ok=True)
    _write_marker(folder, settings, complete=False)  # first, so that an interrupted build can be repeated
    pipeline.save_pretrained(folder)
    _write_marker(folder, settings, complete=True)
    return folder


def _check_writable(folder: Path, model: str) -> None:
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file, not a folder.")
    if not folder.exists() or not any(folder.iterdir()):
        return
    found = _read_marker(folder).get("model")
    if found is None:
        raise FileExistsError(f"{folder} is not empty and holds no tiny pipeline: name another folder.")
    if found != model:
        raise FileExistsError(f"{folder} holds a tiny {found} pipeline, not {model}: name another folder.")


def _read_marker(folder: Path) -> dict:
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return {}
    return marker if isinstance(marker, dict) else {}


def _write_marker(folder: Path, settings: dict, complete: bool) -> None:
    marker = {**settings, "recipe": RECIPE, "complete": complete}
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizers: about one token per letter, so that different prompts have different tokens
# ---------------------------------------------------------------------------------------------------------------------


def clip_tokenizer() -> CLIPTokenizer:
    """Bytes, each once inside and once at the end of a word; no merges."""
    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=77)


def _t5_tokenizer() -> T5TokenizerFast:
    """Latin, Greek and Cyrillic characters; T5 has no byte fallback, so any other character is <unk>."""
    letters = ["▁", *(chr(code) for code in range(0x21, 0x530) if chr(code).isprintable())]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((letter, -2.0) for letter in letters)]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)


def _gemma_tokenizer() -> GemmaTokenizer:
    """ASCII characters, and the bytes of any other character."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *(chr(code) for code in range(0x21, 0x7F))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return GemmaTokenizer(vocab=vocab, merges=[], add_bos_token=True, model_max_length=8192)


def _clip_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,  # the pooled embedding is taken where this id first stands
        pad_token_id=tokenizer.pad_token_id,
    )


def _t5_config(tokenizer: T5TokenizerFast) -> T5Config:
    return T5Config(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        d_kv=WIDTH // 2,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )


def _gemma_config(tokenizer: GemmaTokenizer) -> Gemma2Config:
    return Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=WIDTH // 2,
        query_pre_attn_scalar=WIDTH // 2,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The weights
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _draw_weights(model: nn.Module, rng: torch.Generator) -> nn.Module:
    """Redraws every weight, so that layers about keep the variance of their input and each block shows in the output.

    With the libraries' own initial values the gates are small and a skipped block is missed several times less.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # matrices, convolutions, embeddings: one row per output channel
            parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=rng)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.1, generator=rng)
        elif ".attn.norm_" in name:  # of queries and keys: at one, 512 text tokens average out to nearly nothing
            parameter.fill_(2.0)
    for module in model.modules():
        if isinstance(module, TimestepEmbedding):
            _smooth_in_time(module.linear_1)
    return model.eval()  # what remains are the scales of norms, left as constants


def _smooth_in_time(linear: nn.Linear) -> None:
    """Damps the fast waves of a sinusoidal embedding, as training does; its inputs go up to some thousands.

    FLUX's guidance of 3.5 enters as 3500, in bf16 as 3504: undamped, the output would be another one altogether.
    """
    half = linear.in_features // 2
    frequency = 10_000.0 ** (-torch.arange(half) / half)  # (half,), in radians per unit, first of the cosines
    linear.weight.mul_(1 / (1 + 200 * frequency).repeat(2))


# ---------------------------------------------------------------------------------------------------------------------
# The VAEs: random too, but their latents and images have the mean and spread of real ones
# ---------------------------------------------------------------------------------------------------------------------


def _flux_vae(rng: torch.Generator) -> AutoencoderKL:
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 16, 16),  # three halvings: a factor of 8
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=FLUX_LATENT_CHANNELS,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.3611,  # this and the shift as FLUX.1-dev
        shift_factor=0.1159,
    )
    _draw_weights(vae, rng)
    mean, spread = vae.config.shift_factor, 1 / vae.config.scaling_factor
    _set_statistics(vae.encoder, vae.encoder.conv_out, _smooth_images(rng), mean, spread)
    _quieten_posterior(vae.encoder.conv_out, log(spread) + log(0.02))
    latents = torch.randn(4, FLUX_LATENT_CHANNELS, 32, 32, generator=rng) * spread + mean
    _set_statistics(vae.decoder, vae.decoder.conv_out, latents, 0.0, 0.5)
    return vae


def _sana_vae(rng: torch.Generator) -> AutoencoderDC:
    vae = AutoencoderDC(
        latent_channels=SANA_LATENT_CHANNELS,
        attention_head_dim=8,
        encoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
        decoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
        encoder_block_out_channels=(8, 8, 8, 16, 16, 16),  # five halvings: a factor of 32
        decoder_block_out_channels=(8, 8, 8, 16, 16, 16),
        encoder_layers_per_block=(1,) * 6,
        decoder_layers_per_block=(1,) * 6,
        upsample_block_type="interpolate",
        downsample_block_type="Conv",
        encoder_out_shortcut=False,  # it would pass by the last convolution, which sets the statistics
        scaling_factor=0.41407,  # as SANA 1.6B
    )
    _draw_weights(vae, rng)
    spread = 1 / vae.config.scaling_factor
    _set_statistics(vae.encoder, vae.encoder.conv_out, _smooth_images(rng), 0.0, spread)
    latents = torch.randn(4, SANA_LATENT_CHANNELS, 8, 8, generator=rng) * spread
    _set_statistics(vae.decoder, vae.decoder.conv_out, latents, 0.0, 0.5)
    return vae


def _smooth_images(rng: torch.Generator, count: int = 8, size: int = 256) -> torch.Tensor:
    """Clouds of colour in [-1, 1] whose detail fades as in photos: (count, 3, size, size)."""
    images = torch.zeros(count, 3, size, size)
    for cells in (1, 2, 4, 8, 16, 32, 64, 128):
        noise = torch.randn(count, 3, cells, cells, generator=rng)
        images += nn.functional.interpolate(noise, size=size, mode="bilinear") / cells**0.5
    return torch.tanh(0.5 * images)


@torch.no_grad()
def _set_statistics(model: nn.Module, last: nn.Conv2d, inputs: torch.Tensor, mean: float, spread: float) -> None:
    """Rescales the `last` convolution so that each channel of `model(inputs)` has this mean and standard deviation."""
    outputs = model(inputs)  # (N, C, H, W)
    gain = spread / outputs.std(dim=(0, 2, 3))  # (C,)
    last.weight.mul_(gain[:, None, None, None])
    last.bias.sub_(outputs.mean(dim=(0, 2, 3))).mul_(gain).add_(mean)


@torch.no_grad()
def _quieten_posterior(conv_out: nn.Conv2d, log_deviation: float) -> None:
    """Gives the second half of the channels, the log variances, one small constant."""
    half = conv_out.out_channels // 2
    conv_out.weight[half:] = 0.0
    conv_out.bias[half:] = 2 * log_deviation


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


def parse_args(input_args: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line, or `input_args`."""
    parser = argparse.ArgumentParser(
        description="Build a tiny FLUX or SANA pipeline with random weights, to try the training scripts with."
    )
    models = parser.add_subparsers(dest="model", required=True)
    defaults = {"flux": {"num_layers": 3, "num_single_layers": 5}, "sana": {"num_layers": 6}}
    for model, depths in defaults.items():
        options = models.add_parser(
            model, help=f"a tiny {model.upper()}", formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        options.add_argument("folder", type=Path, help="folder to write the pipeline into")
        for name, depth in depths.items():
            options.add_argument(f"--{name}", type=_positive, default=depth, help="number of transformer blocks")
        options.add_argument("--seed", type=int, default=0, help="seed of the weights")
    return parser.parse_args(input_args)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _measure(folder: Path) -> tuple[int, int]:
    """Counts the parameters and the bytes of the weight files of a pipeline."""
    files = sorted(folder.glob("*/*.safetensors"))
    parameters = 0
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            parameters += sum(prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118 (no mapping)
    return parameters, sum(file.stat().st_size for file in files)


def main(args: argparse.Namespace) -> int:
    """Builds what the command line asks for; returns the exit status."""
    transformers_logging.disable_progress_bar()  # one per text encoder, of a single step
    settings = {name: value for name, value in vars(args).items() if name != "folder"}
    choices = {name: value for name, value in settings.items() if name != "model"}
    found = is_built(args.folder, settings)
    try:
        {"flux": build_tiny_flux, "sana": build_tiny_sana}[args.model](args.folder, **choices)
    except OSError as error:
        print(f"build_tiny_pipeline.py: {error}", file=sys.stderr)
        return 1

    parameters, size_bytes = _measure(args.folder)
    blocks = ", ".join(f"{name} {value}" for name, value in choices.items())
    print(
        f"{args.folder} {'already holds' if found else 'now holds'} a tiny {args.model.upper()} pipeline ({blocks})."
    )
    print(f"{parameters:,} parameters, {size_bytes / 1e6:.1f} MB. Its weights are random, so it draws noise.")
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_args()))
