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
"""Builds and pretrains the mini FLUX: a FluxPipeline of 5.5 million parameters that draws the scenes of scenes.py.

    python examples/mini_flux/pretrain.py train WORK --steps 20000   # from nothing, on a CPU; resumes where it stopped
    python examples/mini_flux/pretrain.py evaluate WORK              # how many prompts are drawn right
    python examples/mini_flux/pretrain.py snapshot WORK FILE         # averaged weights in half precision, one file
    python examples/mini_flux/pretrain.py build FILE FOLDER          # from such a file, or from WORK, the pipeline

First the autoencoder learns, then a pool of scenes is encoded once, then the transformer and both text encoders learn
by flow matching, at full and at half resolution in one model, as FLUX did. Every batch is a function of the seed and
the step alone, so that a run continues from its checkpoint bit for bit.

In order: the pipeline, batches of pixels, the autoencoder, the pool of latents, flow matching, checkpoints, the
evaluation, the commands.
"""

import argparse
import collections
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

import scenes

WIDTH = 128  # of the transformer
TEXT_WIDTH = 96
TEXT_TOKENS = 16  # --max_sequence_length of this pipeline: a caption has at most 13, or 17 where it has three colours
LATENT_CHANNELS = 8
GUIDANCE = 3.0  # true_cfg_scale of the pipeline; without guidance a third of the shapes come out wrong
RESOLUTIONS = (scenes.RESOLUTION, scenes.RESOLUTION // 2)  # pixels: 64 and 16 image tokens
TRAINED = ("transformer", "text_encoder", "text_encoder_2")


# ---------------------------------------------------------------------------------------------------------------------
# The pipeline
# ---------------------------------------------------------------------------------------------------------------------


def make_pipeline(num_layers: int = 4, num_single_layers: int = 8, seed: int = 0) -> FluxPipeline:
    """A FluxPipeline with all its parts, untrained; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer, tokenizer_2 = clip_tokenizer(), t5_tokenizer()
        transformer = FluxTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS,  # the pipeline packs 2 x 2 latents into one token
            num_layers=num_layers,
            num_single_layers=num_single_layers,
            attention_head_dim=32,
            num_attention_heads=WIDTH // 32,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            guidance_embeds=False,  # as FLUX.1-schnell: there is no larger model whose guidance it could learn
            axes_dims_rope=(4, 14, 14),  # sums to the head's 32
        )
        _start_as_identity(transformer)
        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),  # as FLUX.1-dev
            vae=_autoencoder(),
            text_encoder=CLIPTextModel(_clip_config(tokenizer)),
            tokenizer=tokenizer,
            text_encoder_2=T5EncoderModel(_t5_config(tokenizer_2)),
            tokenizer_2=tokenizer_2,
            transformer=transformer,
        )


@torch.no_grad()
def _start_as_identity(transformer: nn.Module) -> None:
    """Zero the modulations and the head, as DiT does (arXiv 2212.09748, section 3.2): it learns faster."""
    for name, module in transformer.named_modules():
        if name.endswith(("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear", "proj_out")):
            if name.endswith("proj_out") and name != "proj_out":
                continue  # of a single block, behind its gate
            module.weight.zero_()
            module.bias.zero_()


def _autoencoder() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 16, 32, 64),  # three halvings: a factor of 8, which the FLUX script expects
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=LATENT_CHANNELS,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        scaling_factor=1.0,  # set with the shift when it has learnt
        shift_factor=0.0,
    )


def clip_tokenizer() -> CLIPTokenizer:
    """Every word of the vocabulary is one token; other words are spelt in bytes or parts of words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = word_merges(scenes.vocabulary())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, merges)]
    pieces = list(dict.fromkeys([*pieces, "<|startoftext|>", "<|endoftext|>"]))
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, model_max_length=77)


def word_merges(words: list[str]) -> list[tuple[str, str]]:
    """Byte-pair merges that make each word one piece; the same in every run, which the library's trainer's are not."""
    spelt = [[*word[:-1], f"{word[-1]}</w>"] for word in words]
    merges = []
    while any(len(pieces) > 1 for pieces in spelt):
        pairs = collections.Counter(pair for pieces in spelt for pair in itertools.pairwise(pieces))
        merges.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
        spelt = [_merged(pieces, merges[-1]) for pieces in spelt]
    return merges


def _merged(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def t5_tokenizer() -> T5TokenizerFast:
    """Every word of the vocabulary is one token; other words are spelt in letters."""
    words = [(f"▁{word}", -2.0) for word in scenes.vocabulary()]
    letters = [(chr(code), -10.0) for code in range(0x21, 0x7F)]
    pieces = dict([("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -10.0), *letters, *words])
    return T5TokenizerFast(vocab=list(pieces.items()), extra_ids=0, model_max_length=512)


def _clip_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,  # the pooled embedding is taken where this id first stands
        pad_token_id=tokenizer.pad_token_id,
    )


def _t5_config(tokenizer: T5TokenizerFast) -> T5Config:
    return T5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=TEXT_WIDTH // 2,
        d_ff=2 * TEXT_WIDTH,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Batches of pixels
# ---------------------------------------------------------------------------------------------------------------------


def to_tensor(pictures: list[Image.Image]) -> torch.Tensor:
    """Pictures of one size as a tensor (B, 3, H, W) in [-1, 1]."""
    pixels = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures]))  # (B, H, W, 3)
    return pixels.permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()


def to_pictures(pixels: torch.Tensor) -> list[Image.Image]:
    """The reverse of `to_tensor`."""
    array = pixels.clamp(-1, 1).add(1).mul(127.5).round().byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(picture) for picture in array]


def _autoencoder_picture(rng: random.Random, side: int = 64) -> Image.Image:
    """A square cut out of a scene or of a doodle."""
    if rng.random() < 0.5:
        picture = scenes.doodle(rng, rng.choice((64, 96, 128)))
    else:
        picture = scenes.draw_scene(scenes.random_scene(rng), rng.choice(RESOLUTIONS))
    left, top = (rng.randint(0, picture.width - side) for _ in range(2))
    return picture.crop((left, top, left + side, top + side))


# ---------------------------------------------------------------------------------------------------------------------
# The autoencoder
# ---------------------------------------------------------------------------------------------------------------------


def train_autoencoder(work: Path, args: argparse.Namespace) -> AutoencoderKL:
    """Train until `--autoencoder_steps`, or load what has been trained; returns it with its latents' statistics.

    With `--start` it is the snapshot's, and is trained no further.
    """
    if args.start is not None:
        vae = load_pipeline(args.start).vae
        save_checkpoint(work / "autoencoder.pt", {"vae": vae}, args.autoencoder_steps)
        return vae
    vae = make_pipeline(1, 1, args.seed).vae
    optimizers = make_optimizers(vae, lambda name: True)
    state = {"vae": vae, **optimizers}
    start = load_checkpoint(work / "autoencoder.pt", state)
    losses, began = [], time.monotonic()
    for step in counted(start, args.autoencoder_steps, "autoencoder"):
        rng = random.Random(f"{args.seed}/autoencoder/{step}")
        pixels = to_tensor([_autoencoder_picture(rng) for _ in range(8)])
        loss = autoencoder_loss(vae, pixels, torch.Generator().manual_seed(step))
        optimize(optimizers, loss, autoencoder_rate(step, args))
        losses.append(loss.item())
        if (step + 1) % args.save_every == 0 or step + 1 == args.autoencoder_steps:
            save_checkpoint(work / "autoencoder.pt", state, step + 1)
            seconds = (time.monotonic() - began) / len(losses)
            log(work, phase="autoencoder", step=step + 1, seconds_per_step=seconds, loss=sum(losses) / len(losses))
            losses, began = [], time.monotonic()
    finish_autoencoder(vae.eval(), args.seed)
    save_checkpoint(work / "autoencoder.pt", state, args.autoencoder_steps)  # a snapshot is taken from here
    return vae


def autoencoder_rate(step: int, args: argparse.Namespace) -> float:
    """Learning rate: it rises for 50 steps and falls linearly over the last half."""
    left = (args.autoencoder_steps - step) / (args.autoencoder_steps / 2)
    return args.autoencoder_lr * min(1, (step + 1) / 50, left)


def autoencoder_loss(vae: AutoencoderKL, pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Absolute and squared error of the reconstruction, and a little of the divergence from a standard normal."""
    posterior = vae.encode(pixels).latent_dist
    error = vae.decode(posterior.sample(generator)).sample - pixels  # (B, 3, H, W)
    divergence = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
    return error.abs().mean() + error.pow(2).mean() + 1e-3 * divergence


@torch.no_grad()
def finish_autoencoder(vae: AutoencoderKL, seed: int) -> None:
    """Make its latents certain, and set scale and shift so that normalised ones have mean 0 and deviation 1.

    The transformer learns from the means. Training scripts draw latents from the posterior, which is narrow in FLUX
    but had a deviation of 0.19 here: a LoRA would learn that noise, and draw it.
    """
    convolution = vae.encoder.conv_out  # first the means come out of it, then the logarithms of the variances
    convolution.weight[LATENT_CHANNELS:] = 0
    convolution.bias[LATENT_CHANNELS:] = -30
    rng = random.Random(f"{seed}/statistics")
    pixels = to_tensor([scenes.draw_scene(scenes.random_scene(rng)) for _ in range(64)])
    latents = vae.encode(pixels).latent_dist.mean
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())


@torch.no_grad()
def evaluate_autoencoder(vae: AutoencoderKL, count: int) -> dict[str, float]:
    """Shares of reconstructed scenes that the checker reads right, and the squared error."""
    rng = random.Random("autoencoder test")
    shown = [scenes.random_scene(rng, held_out=number % 4 == 0) for number in range(count)]
    right, error = collections.Counter(), 0.0
    for scene in shown:
        pixels = to_tensor([scenes.draw_scene(scene)])
        decoded = vae.decode(vae.encode(pixels).latent_dist.mean).sample
        error += (decoded - pixels).pow(2).mean().item() / count
        right.update(marks(scene, to_pictures(decoded)[0]))
    return {**{name: right[name] / count for name in MARKS}, "squared_error": error}


# ---------------------------------------------------------------------------------------------------------------------
# The pool of latents
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def make_pool(work: Path, vae: AutoencoderKL, args: argparse.Namespace) -> dict[str, Any]:
    """Encode `--pool` scenes at full and at half resolution, and as many crops at half; stored, so made once.

    Returns:
        "scenes": the list of scenes; "full": (N, C, 16, 16), "half" and "crop": (N, C, 8, 8), normalised latents.
    """
    file = work / "pool.pt"
    rng = random.Random(f"{args.seed}/pool")
    drawn = [
        scenes.random_thing(rng) if rng.random() < args.things else scenes.random_scene(rng) for _ in range(args.pool)
    ]
    if not file.exists():
        pool = {
            "full": _encode(vae, [lambda s=s: scenes.draw_scene(s) for s in drawn]),
            "half": _encode(vae, [lambda s=s: scenes.draw_scene(s, RESOLUTIONS[1]) for s in drawn]),
            "crop": _encode(vae, [lambda s=s: random_crop(scenes.draw_scene(s), rng) for s in drawn]),
        }
        torch.save(pool, file.with_suffix(".partial"))
        os.replace(file.with_suffix(".partial"), file)
    return {"scenes": drawn, **torch.load(file)}


def random_crop(picture: Image.Image, rng: random.Random) -> Image.Image:
    """A square part of a picture, half its side to the whole of it, at half resolution."""
    side = rng.randint(RESOLUTIONS[1], RESOLUTIONS[0])
    left, top = rng.randint(0, RESOLUTIONS[0] - side), rng.randint(0, RESOLUTIONS[0] - side)
    size = (RESOLUTIONS[1], RESOLUTIONS[1])
    return picture.resize(size, Image.Resampling.LANCZOS, box=(left, top, left + side, top + side))


def _encode(vae: AutoencoderKL, makers: list[Callable[[], Image.Image]], batch: int = 32) -> torch.Tensor:
    parts = [
        encode_pictures(vae, [make() for make in makers[start : start + batch]])
        for start in range(0, len(makers), batch)
    ]
    return torch.cat(parts).contiguous()  # in one order, for sums depend on it in their last bit


@torch.no_grad()
def encode_pictures(vae: AutoencoderKL, pictures: list[Image.Image]) -> torch.Tensor:
    """Normalised latents (B, C, H / 8, W / 8) of pictures of one size, without the autoencoder's noise."""
    return (vae.encode(to_tensor(pictures)).latent_dist.mean - vae.config.shift_factor) * vae.config.scaling_factor


# ---------------------------------------------------------------------------------------------------------------------
# Flow matching
# ---------------------------------------------------------------------------------------------------------------------


def train_transformer(work: Path, pipeline: FluxPipeline, pool: dict[str, Any], args: argparse.Namespace) -> None:
    """Train the transformer and the text encoders up to `--steps`, resuming from the checkpoint in `work`."""
    models = nn.ModuleDict({name: getattr(pipeline, name) for name in TRAINED}).train()
    average = {name: tensor.detach().clone() for name, tensor in models.state_dict().items()}
    optimizers = make_optimizers(models, is_hidden_matrix, weight_decay=0.01)
    state = {"models": models, "average": average, **optimizers}
    start = load_checkpoint(work / "transformer.pt", state)
    losses, began = collections.defaultdict(list), time.monotonic()
    for step in counted(start, args.steps, "transformer"):
        kind, batch = make_batch(pipeline, pool, step, args)
        loss = flow_matching_loss(models, *batch)
        optimize(optimizers, loss, transformer_rate(step, args))
        update_average(average, models, step)
        losses[kind].append(loss.item())
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save_checkpoint(work / "transformer.pt", state, step + 1)
            seconds = (time.monotonic() - began) / sum(map(len, losses.values()))
            means = {kind: sum(values) / len(values) for kind, values in sorted(losses.items())}
            log(work, phase="transformer", step=step + 1, seconds_per_step=seconds, **means)
            losses, began = collections.defaultdict(list), time.monotonic()


def transformer_rate(step: int, args: argparse.Namespace) -> float:
    """Learning rate: it rises for `--warmup` steps and falls linearly over the last `--cooldown`."""
    left = (args.steps - step) / args.cooldown if args.cooldown else 1.0
    return args.lr * min(1, (step + 1) / args.warmup, left)


def is_hidden_matrix(name: str) -> bool:
    """Whether a parameter is one of those that Muon is for: matrices inside of the blocks, but not the modulations."""
    return "blocks." in name and ".norm" not in name


def make_batch(pipeline: FluxPipeline, pool: dict[str, Any], step: int, args: argparse.Namespace) -> tuple:
    """The batch of a step: its kind; latents (B, C, h, w), noise, sigmas (B,) and the token ids of the captions."""
    rng = random.Random(f"{args.seed}/batch/{step}")
    kind = rng.choices(("full", "half", "crop"), weights=args.mixture)[0]
    size = args.batch_size if kind == "full" else 2 * args.batch_size
    chosen = [rng.randrange(len(pool["scenes"])) for _ in range(size)]
    drop = {"place", "size"} if kind == "crop" else set()
    captions = [scenes.random_caption(pool["scenes"][number], rng, drop) for number in chosen]
    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    latents = pool[kind][chosen]
    noise = torch.randn(latents.shape, generator=generator)
    sigmas = torch.sigmoid(torch.randn(size, generator=generator) + args.sigma_shift)
    return kind, (latents, noise, sigmas, tokenize(pipeline, captions))


def tokenize(pipeline: FluxPipeline, captions: list[str]) -> dict[str, torch.Tensor]:
    """Token ids for both text encoders, (B, 16) each: CLIP is causal, so further pads would change nothing."""
    options = {"padding": "max_length", "max_length": TEXT_TOKENS, "truncation": True, "return_tensors": "pt"}
    return {
        "text_encoder": pipeline.tokenizer(captions, **options).input_ids,
        "text_encoder_2": pipeline.tokenizer_2(captions, **options).input_ids,
    }


def flow_matching_loss(
    models: nn.ModuleDict, latents: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor, ids: dict
) -> torch.Tensor:
    """Mean squared error of the velocity, noise - latents, at x_t = (1 - sigma) latents + sigma noise."""
    batch, channels, height, width = latents.shape
    share = sigmas.view(-1, 1, 1, 1)
    noisy = (1 - share) * latents + share * noise
    prompt_embeds = models["text_encoder_2"](ids["text_encoder_2"])[0]  # (B, L, D)
    prediction = models["transformer"](
        hidden_states=FluxPipeline._pack_latents(noisy, batch, channels, height, width),  # (B, h / 2 * w / 2, 4 C)
        timestep=sigmas,
        guidance=None,
        pooled_projections=models["text_encoder"](ids["text_encoder"]).pooler_output,
        encoder_hidden_states=prompt_embeds,
        txt_ids=torch.zeros(prompt_embeds.shape[1], 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, "cpu", torch.float32),
        return_dict=False,
    )[0]
    target = FluxPipeline._pack_latents(noise - latents, batch, channels, height, width)
    return (prediction - target).pow(2).mean()


@torch.no_grad()
def update_average(average: dict[str, torch.Tensor], models: nn.ModuleDict, step: int) -> None:
    """Move the running average of the weights, which is what draws, towards those of this step."""
    decay = min(0.999, (1 + step) / (10 + step))
    for name, tensor in models.state_dict().items():
        if tensor.is_floating_point():
            average[name].lerp_(tensor, 1 - decay)


# ---------------------------------------------------------------------------------------------------------------------
# The optimizers
# ---------------------------------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal, so that all directions of a layer learn at one pace.

    torch has it since 2.9, for matrices alone; the kernels of convolutions are flattened to matrices here. The steps
    have the size of AdamW's, as in arXiv 2502.16982, so that both share a learning rate.
    """

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)

    def _move(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        mean = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
        ahead = parameter.grad.lerp(mean, group["momentum"])  # Nesterov's
        scale = 0.2 * max(parameter.shape[0], parameter[0].numel()) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(orthogonal(ahead.flatten(1)).view_as(parameter), alpha=-group["lr"] * scale)


def orthogonal(matrix: torch.Tensor, rounds: int = 5) -> torch.Tensor:
    """Draw all singular values of a matrix near to 1, by the Newton-Schulz iteration of Muon."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(rounds):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


def make_optimizers(
    model: nn.Module, is_matrix: Callable[[str], bool], weight_decay: float = 0.0
) -> dict[str, torch.optim.Optimizer]:
    """Muon for the matrices and kernels that `is_matrix` chooses by name, AdamW for all else."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim > 1 and is_matrix(name)]
    others = [p for name, p in named if p.ndim <= 1 or not is_matrix(name)]
    return {
        "muon": Muon(matrices, weight_decay=weight_decay),
        "adamw": torch.optim.AdamW(others, 0.0, betas=(0.9, 0.98), weight_decay=0.0),
    }


def optimize(optimizers: dict[str, torch.optim.Optimizer], loss: torch.Tensor, rate: float) -> None:
    """One step down the gradient of a loss at this learning rate."""
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers.values():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------


def counted(start: int, stop: int, what: str) -> Iterator[int]:
    """The steps that are left, with a word on where they begin."""
    if start:
        print(f"{what}: {start} of {stop} steps are done", flush=True)
    yield from range(start, stop)


def save_checkpoint(file: Path, state: dict[str, Any], step: int) -> None:
    """Write weights and optimizer so that an interrupted writing leaves the last checkpoint whole."""
    stored = {name: part if isinstance(part, dict) else part.state_dict() for name, part in state.items()}
    torch.save({**stored, "step": step}, file.with_suffix(".partial"))
    os.replace(file.with_suffix(".partial"), file)


def load_checkpoint(file: Path, state: dict[str, Any]) -> int:
    """Read a checkpoint into `state` and return its step; 0 if there is none."""
    if not file.exists():
        return 0
    stored = torch.load(file, weights_only=True)
    for name, part in state.items():
        part.update(stored[name]) if isinstance(part, dict) else part.load_state_dict(stored[name])
    return stored["step"]


def log(work: Path, **entry: Any) -> None:
    """Add a line to WORK/log.jsonl, and print it."""
    line = json.dumps({name: round(v, 5) if isinstance(v, float) else v for name, v in entry.items()})
    with (work / "log.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def averaged_weights(work: Path) -> dict[str, torch.Tensor]:
    """All weights of the pipeline in WORK as they draw, and the autoencoder's statistics."""
    stored = torch.load(work / "transformer.pt", weights_only=True)
    vae = torch.load(work / "autoencoder.pt", weights_only=True)["vae"]
    return {**stored["average"], **{f"vae.{name}": tensor for name, tensor in vae.items()}}


def load_pipeline(source: Path, seed: int = 0) -> FluxPipeline:
    """The trained pipeline, from the folder of a training or from a file of `snapshot`."""
    weights = averaged_weights(source) if source.is_dir() else load_file(source)
    stacks = ("transformer_blocks", "single_transformer_blocks")
    pipeline = make_pipeline(*(1 + max(_numbers(weights, f"transformer.{stack}.")) for stack in stacks))
    for name in (*TRAINED, "vae"):
        own = {key.removeprefix(f"{name}."): t.float() for key, t in weights.items() if key.startswith(f"{name}.")}
        getattr(pipeline, name).load_state_dict(own, strict=False)  # without buffers of positions
        getattr(pipeline, name).eval()
    finish_autoencoder(pipeline.vae, seed)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _numbers(weights: dict[str, torch.Tensor], prefix: str) -> Iterator[int]:
    return (int(key.removeprefix(prefix).split(".")[0]) for key in weights if key.startswith(prefix))


# ---------------------------------------------------------------------------------------------------------------------
# The evaluation
# ---------------------------------------------------------------------------------------------------------------------

MARKS = ("shape", "colour", "background", "place", "size", "all", "everything")


def marks(scene: scenes.Scene, picture: Image.Image) -> dict[str, int]:
    """What is drawn right, 1 or 0; "all" is shape, colour and background, "everything" also place and size."""
    reading = scenes.read_picture(picture)
    right = {name: int(getattr(reading, name) == getattr(scene, name)) for name in MARKS[:5]}
    return {**right, "all": min(list(right.values())[:3]), "everything": min(right.values())}


def draw(pipeline: FluxPipeline, prompts: list[str], resolution: int, seed: int, steps: int = 20) -> list[Image.Image]:
    """Draw one picture for each prompt, as a user of the pipeline would, with guidance away from the empty prompt."""
    generators = [torch.Generator().manual_seed(seed + number) for number in range(len(prompts))]
    return pipeline(
        prompts,
        negative_prompt=[""] * len(prompts),
        true_cfg_scale=GUIDANCE,
        height=resolution,
        width=resolution,
        num_inference_steps=steps,
        max_sequence_length=TEXT_TOKENS,
        generator=generators,
    ).images


def evaluate(pipeline: FluxPipeline, count: int, resolution: int, seed: int = 0, *, held_out: bool = False) -> tuple:
    """Draw `count` random scenes from their captions; returns the shares drawn right, and the pictures."""
    rng = random.Random(f"{seed}/evaluation")
    wanted = [scenes.random_scene(rng, held_out=held_out) for _ in range(count)]
    pictures, right = [], collections.Counter()
    for start in range(0, count, 25):
        prompts = [scenes.caption(scene) for scene in wanted[start : start + 25]]
        pictures += draw(pipeline, prompts, resolution, seed=1000 * seed + start)
    for scene, picture in zip(wanted, pictures, strict=True):
        right.update(marks(scene, picture))
    return {name: right[name] / count for name in MARKS}, pictures


def sheet(pictures: list[Image.Image], columns: int = 10) -> Image.Image:
    """The pictures side by side."""
    side, rows = pictures[0].width + 2, -(-len(pictures) // columns)
    whole = Image.new("RGB", (columns * side, rows * side), "white")
    for number, picture in enumerate(pictures):
        whole.paste(picture, (number % columns * side, number // columns * side))
    return whole


# ---------------------------------------------------------------------------------------------------------------------
# The commands
# ---------------------------------------------------------------------------------------------------------------------


def run_train(args: argparse.Namespace) -> None:
    """Train what is not yet trained."""
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    vae = train_autoencoder(args.work, args)
    if not (args.work / "pool.pt").exists():
        log(args.work, phase="autoencoder", **evaluate_autoencoder(vae, args.autoencoder_tests))
    pool = make_pool(args.work, vae, args)
    if args.start is None:
        pipeline = make_pipeline(args.num_layers, args.num_single_layers, args.seed)
    else:
        pipeline = load_pipeline(args.start)
    train_transformer(args.work, pipeline, pool, args)


def run_evaluate(args: argparse.Namespace) -> None:
    """Print the shares of prompts that are drawn right, and write a sheet of pictures."""
    torch.set_num_threads(args.threads)
    pipeline = load_pipeline(args.source)
    for resolution, held_out in ((RESOLUTIONS[0], False), (RESOLUTIONS[1], False), (RESOLUTIONS[0], True)):
        shares, pictures = evaluate(pipeline, args.count, resolution, args.seed, held_out=held_out)
        words = " ".join(f"{name} {share:.2f}" for name, share in shares.items())
        print(f"{resolution} px{', combinations held out' if held_out else ''}: {words}", flush=True)
        if args.sheet is not None:
            name = f"{args.sheet.stem}-{resolution}{'-held-out' if held_out else ''}{args.sheet.suffix or '.png'}"
            sheet(pictures[:50]).save(args.sheet.with_name(name))


def run_snapshot(args: argparse.Namespace) -> None:
    """Write the averaged weights in half precision."""
    weights = {name: t.half().contiguous() for name, t in averaged_weights(args.work).items() if t.is_floating_point()}
    save_file({name: tensor.clone() for name, tensor in weights.items()}, args.file)
    print(f"{args.file}: {args.file.stat().st_size / 1e6:.1f} MB")


def run_build(args: argparse.Namespace) -> None:
    """Write the pipeline as a folder for `FluxPipeline.from_pretrained` and the training script."""
    load_pipeline(args.source).save_pretrained(args.folder)
    print(f"{args.folder} now holds the mini FLUX; tell it --max_sequence_length {TEXT_TOKENS}")


def parse_args(input_args: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `input_args`."""
    parser = argparse.ArgumentParser(description="Pretrain, evaluate and build the mini FLUX.")
    commands = parser.add_subparsers(required=True)
    help_format = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    _add_train_arguments(commands.add_parser("train", help="train, or go on training", **help_format))

    command = commands.add_parser("evaluate", help="share of prompts drawn right", **help_format)
    command.add_argument("source", type=Path, help="folder of a training, or file of a snapshot")
    command.add_argument("--count", type=int, default=100, help="prompts for each resolution")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--sheet", type=Path, help="picture files to write")
    command.add_argument("--threads", type=int, default=1)
    command.set_defaults(run=run_evaluate)

    command = commands.add_parser("snapshot", help="write the averaged weights", **help_format)
    command.add_argument("work", type=Path, help="folder of a training")
    command.add_argument("file", type=Path, help="file to write")
    command.set_defaults(run=run_snapshot)

    command = commands.add_parser("build", help="write the pipeline", **help_format)
    command.add_argument("source", type=Path, help="folder of a training, or file of a snapshot")
    command.add_argument("folder", type=Path, help="folder to write")
    command.set_defaults(run=run_build)
    return parser.parse_args(input_args)


def _add_train_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("work", type=Path, help="folder of checkpoints")
    command.add_argument("--steps", type=int, default=20_000, help="steps of the transformer, those done included")
    command.add_argument("--autoencoder_steps", type=int, default=2000)
    command.add_argument("--autoencoder_tests", type=int, default=200, help="scenes reconstructed and read at its end")
    command.add_argument("--autoencoder_lr", type=float, default=3e-3)
    command.add_argument("--lr", type=float, default=2e-3)
    command.add_argument("--warmup", type=int, default=100, help="steps in which the learning rate rises")
    command.add_argument("--cooldown", type=int, default=0, help="last steps, in which the learning rate falls to 0")
    command.add_argument("--start", type=Path, help="weights of a snapshot to go on from; WORK has its own optimizer")
    command.add_argument("--batch_size", type=int, default=32, help="at full resolution; twice as many at half")
    command.add_argument("--mixture", type=float, nargs=3, default=(0.5, 0.35, 0.15), help="full, half, crops at half")
    command.add_argument("--sigma_shift", type=float, default=0.3, help="mean of the logit of sigma")
    command.add_argument("--pool", type=int, default=12_000, help="scenes that are encoded")
    command.add_argument("--things", type=float, default=0.5, help="share of them that show things, not shapes")
    command.add_argument("--num_layers", type=int, default=4, help="double blocks")
    command.add_argument("--num_single_layers", type=int, default=8, help="single blocks")
    command.add_argument("--save_every", type=int, default=100, help="steps between checkpoints")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--threads", type=int, default=1)
    command.set_defaults(run=run_train)


if __name__ == "__main__":
    arguments = parse_args()
    sys.exit(arguments.run(arguments))
