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
"""DiT-BlockSkip: DreamBooth LoRA for diffusion transformers with dynamic patches and skipped blocks.

Everything that train_dreambooth_blockskip_flux.py and train_dreambooth_blockskip_sana.py share, in the order in which
a run uses it. The method is arXiv 2603.20755, "Memory-Efficient Fine-Tuning Diffusion Transformers via Dynamic Patch
Sampling and Block Skipping"; docstrings name the part of it that they follow.

    1. Refusals and arguments   the flags, and what is refused before any weight is loaded
    2. Photos and captions      what the run learns from
    3. Blocks                   numbering, recording residuals, skipping
    4. Plan                     every number of a run, fixed once
    5. Draws                    image, crop, flip, timestep and noise as a pure function of (seed, rank, index)
    6. Residual store           draws on disk: atomic, fingerprinted, checked
    7. Start and check          the first phase
    8. Prompts and class images text encoders run once per distinct prompt
    9. Choose blocks            which ones to skip: published, measured earlier, or measured in the run
   10. Quantised weights, LoRA  frozen weights in 4 or 8 bits, adapters on the middle blocks, optimizer
       and trainer
   11. Precompute               latents and residuals of every draw
   12. Train                    the middle blocks, from the stored draws
   13. Checkpoints              save and resume, bit for bit
   14. Save                     the LoRA, images, model card, hub
   15. Report                   seconds and bytes of every phase
   16. Memory meter             what a training step needs, without weights or GPU
   17. Estimates and dry run    what every phase of a run needs
"""

import argparse
import codecs
import contextlib
import dataclasses
import errno
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import math
import os
import pathlib
import re
import shutil
import sys
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NoReturn

from packaging.version import Version

MINIMUM_VERSIONS = {
    "torch": "2.4",
    "diffusers": "0.35.0",
    "peft": "0.17.0",
    "accelerate": "1.0.0",
    "transformers": "4.48.0",
}
OPTIONAL_VERSIONS = {"datasets": "4.0.0"}  # older ones run code that a dataset brings along
HIDDEN = "[hidden]"
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")  # variables of the environment that hold one
_secrets: set[str] = set()


def one_line(text: str) -> str:
    """Text for one line of a terminal or log: what cannot be printed, such as a newline, is written as an escape.

    Access tokens in it are hidden: the one given by flag, those in the environment, and what looks like one of the
    hub's.
    """
    for secret in _secrets | {os.environ.get(name, "") for name in _TOKENS}:
        if len(secret) > 3:  # else it is none, and would hide parts of words
            text = text.replace(secret, HIDDEN)
    text = re.sub(r"\bhf_[A-Za-z0-9]{20,}", HIDDEN, text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def refuse(message: str, *, every_process: bool = False) -> NoReturn:
    """End the run with one plain line on stderr and exit status 1.

    What all processes find out alike is said once on each machine; `every_process` is for what only one of them meets.
    """
    speaks = every_process or int(os.environ.get("LOCAL_RANK", "0")) == 0
    raise SystemExit(f"error: {one_line(message)}" if speaks else 1)


def warn(message: str) -> None:
    """Log a warning that all processes would give alike, once on each machine."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        logger.warning(one_line(message))


def check_version(package: str, floor: str) -> None:
    """Refuse a package that is missing, or older than its floor."""
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        refuse(f"{package} is not installed: run pip install '{package}>={floor}'")
    if Version(installed) < Version(floor):
        refuse(f"{package} {installed} is too old: run pip install -U '{package}>={floor}'")


for _package, _floor in MINIMUM_VERSIONS.items():  # before anything is imported that an older one may lack
    check_version(_package, _floor)

import diffusers
import numpy as np
import psutil
import safetensors
import torch
import transformers
from accelerate import Accelerator, AutocastKwargs, InitProcessGroupKwargs
from accelerate.utils import (
    DistributedType,
    LoggerType,
    ProjectConfiguration,
    broadcast_object_list,
    gather_object,
    set_seed,
)
from diffusers import BitsAndBytesConfig, FlowMatchEulerDiscreteScheduler
from diffusers.hooks import HookRegistry, apply_group_offloading
from diffusers.optimization import SchedulerType, get_scheduler
from diffusers.training_utils import (
    cast_training_params,
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
    free_memory,
)
from diffusers.utils.hub_utils import MODEL_CARD_TEMPLATE_PATH, populate_model_card
from huggingface_hub import (
    ModelCard,
    ModelCardData,
    get_hf_file_metadata,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.utils import HFValidationError, validate_repo_id
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from tqdm.auto import tqdm

logger = logging.getLogger(__name__)

LORA_FILE = "pytorch_lora_weights.safetensors"
PATCH_SCHEDULES = ("linear", "reverse", "random", "none")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}


# ===================================================================================================================
# 1. Refusals and arguments
# ===================================================================================================================


def readable(size: float) -> str:
    """A number of bytes for people, in GiB, MiB or KiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= 0.1 * unit:
            return f"{size / unit:.2f} {name}"
    return f"{size / 2**10:.1f} KiB"


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that takes no abbreviations, and whose errors are one line without the usage in front."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, args: list[str] | None = None, namespace: argparse.Namespace | None = None) -> Any:
        """As of argparse, but what follows an unknown flag is not repeated: it may be a token with a flag mistyped."""
        namespace, rest = self.parse_known_args(args, namespace)
        if rest:
            flags = [word.split("=")[0] for word in rest if word.startswith("-")]
            self.error(f"unrecognized arguments: {' '.join(flags or rest)}")
        return namespace

    def error(self, message: str) -> NoReturn:
        speaks = int(os.environ.get("LOCAL_RANK", "0")) == 0
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n" if speaks else None)


def _number(kind: type, minimum: float, *, exclusive: bool = False, maximum: float = math.inf) -> Callable[[str], Any]:
    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if kind is int and value > MOST:
            raise argparse.ArgumentTypeError(f"must be at most {min(MOST, maximum)}, got {text}")
        if not math.isfinite(value) or value < minimum or (exclusive and value == minimum):
            raise argparse.ArgumentTypeError(f"must be {'above' if exclusive else 'at least'} {minimum}, got {text}")
        if value > maximum:
            raise argparse.ArgumentTypeError(f"must be at most {maximum}, got {text}")
        return value

    return parse


MOST = 2**53  # beyond it, whole numbers are not exact as floats
COUNT = _number(int, 0)
SEED = _number(int, 0, maximum=2**32 - 2**16)  # numpy takes 32 bits, and each process adds its rank
POSITIVE = _number(int, 1)
NOT_NEGATIVE = _number(float, 0)
ABOVE_ZERO = _number(float, 0, exclusive=True)
REAL = _number(float, -math.inf)


def _ratio(text: str) -> float:
    value = ABOVE_ZERO(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, got {text}")
    return value


def _switch(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")


def add_model_arguments(parser: argparse.ArgumentParser, *, max_sequence_length: int) -> None:
    """Flags that name the model and its prompts' length; `max_sequence_length` is the model's default, in tokens."""
    group = parser.add_argument_group("model")
    group.add_argument("--pretrained_model_name_or_path", required=True, help="Folder or hub id of the pipeline.")
    group.add_argument("--revision", help="Branch, tag or commit of the hub repository.")
    group.add_argument("--variant", help="Which set of weight files to load, such as fp16.")
    group.add_argument("--enable_vae_tiling", action="store_true", help="Let the VAE work on large images in tiles.")
    group.add_argument(
        "--bnb_quantization_config_path",
        metavar="FILE",
        help="A BitsAndBytesConfig in JSON: the frozen weights of the trained blocks are kept in 4 or 8 bits.",
    )
    group.add_argument("--cache_dir", help="Where downloads are kept instead of the usual cache.")
    group.add_argument(
        "--max_sequence_length", type=POSITIVE, default=max_sequence_length, help="Text tokens a prompt is padded to."
    )


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that name the photos, their captions, the class images and how photos are cropped."""
    group = parser.add_argument_group("photos and prompts")
    group.add_argument("--instance_data_dir", help="Folder with photos of the subject.")
    group.add_argument("--dataset_name", help="Instead of a folder: a dataset, on the hub or on disk.")
    group.add_argument("--dataset_config_name", help="Configuration of that dataset.")
    group.add_argument("--image_column", default="image", help="Dataset column that holds the photos.")
    group.add_argument(
        "--caption_column", help="Column of captions, in the dataset or in the folder's metadata.jsonl."
    )
    group.add_argument("--repeats", type=POSITIVE, default=1, help="How often a photo counts in an epoch.")
    group.add_argument("--instance_prompt", help="Prompt that names the subject, and stands in for missing captions.")
    group.add_argument(
        "--with_prior_preservation", action="store_true", help="Train on class images beside the photos."
    )
    group.add_argument("--class_data_dir", help="Folder of class images; missing ones are generated into it.")
    group.add_argument("--class_prompt", help="Prompt of the class images.")
    group.add_argument("--num_class_images", type=POSITIVE, default=100, help="Class images wanted in the folder.")
    group.add_argument("--prior_loss_weight", type=NOT_NEGATIVE, default=1.0, help="Weight of the class images' loss.")
    group.add_argument("--sample_batch_size", type=POSITIVE, default=4, help="Class images generated at once.")
    group.add_argument(
        "--prior_generation_precision", choices=["no", "fp32", "fp16", "bf16"], help="Precision for generating them."
    )
    group.add_argument("--center_crop", action="store_true", help="Crop around the centre, not at a random place.")
    group.add_argument("--random_flip", action="store_true", help="Mirror each draw with probability one half.")
    group.add_argument(
        "--image_interpolation_mode",
        type=str.lower,
        choices=[mode.name.lower() for mode in Image.Resampling],
        default="lanczos",
        help="Filter that resizes crops.",
    )


def add_blockskip_arguments(parser: argparse.ArgumentParser, *, resolution: int, patch_resolution: int) -> None:
    """Flags of the method itself: patches, skipped blocks, residuals. Sizes are in pixels."""
    group = parser.add_argument_group("BlockSkip")
    group.add_argument("--skip_first", type=COUNT, default=0, metavar="N", help="Blocks skipped at the front.")
    group.add_argument("--skip_last", type=COUNT, default=0, metavar="M", help="Blocks skipped at the back.")
    group.add_argument(
        "--skip_ratio",
        type=_ratio,
        metavar="R",
        help="Instead of the two: choose them so that this share of all blocks is skipped where it matters least.",
    )
    group.add_argument(
        "--block_curves",
        metavar="FILE",
        help="Curves that --skip_ratio chooses by, of examples/select_blocks.py; default: the published pairs for "
        "FLUX.1 at 0.3, 0.4, 0.5, otherwise curves measured in this run.",
    )
    group.add_argument(
        "--resolution", type=POSITIVE, default=resolution, help="Short edge of a photo and side of the largest crop."
    )
    group.add_argument(
        "--patch_resolution",
        type=POSITIVE,
        help=f"Smallest crop and side of every network input; default {patch_resolution}, or --resolution if smaller.",
    )
    group.add_argument(
        "--patch_schedule",
        choices=PATCH_SCHEDULES,
        default="linear",
        help="Crop side over noise: growing, shrinking, random, or always the whole square.",
    )
    group.add_argument(
        "--num_draws",
        type=POSITIVE,
        metavar="K",
        help="Distinct draws precomputed per period, over all processes; default: one for every sample trained on.",
    )
    group.add_argument(
        "--residual_refresh_steps",
        type=COUNT,
        default=0,
        metavar="P",
        help="Make new draws and residuals every P optimizer steps, with the LoRA learnt so far; 0 means never.",
    )
    group.add_argument("--residual_dir", help="Where residuals lie during the run; default OUTPUT_DIR/residuals.")
    group.add_argument("--keep_residuals", action="store_true", help="Leave the residuals on disk after the run.")
    group.add_argument("--residual_dtype", choices=["fp32", "bf16", "fp16"], default="bf16", help="Their precision.")
    group.add_argument("--precompute_batch_size", type=POSITIVE, default=1, help="Draws in one pass without gradient.")


def add_training_arguments(parser: argparse.ArgumentParser, *, output_dir: str) -> None:
    """Flags of the LoRA, the steps, precision and files of a run."""
    group = parser.add_argument_group("LoRA")
    group.add_argument("--rank", type=POSITIVE, default=4, help="Rank of the LoRA matrices.")
    group.add_argument("--lora_alpha", type=ABOVE_ZERO, default=4, help="LoRA scale: alpha / rank.")
    group.add_argument("--lora_dropout", type=NOT_NEGATIVE, default=0.0, help="Dropout on the LoRA's input.")
    group.add_argument(
        "--lora_layers", help="Comma-separated layer names within a block, in place of the default list."
    )

    group = parser.add_argument_group("training")
    group.add_argument("--output_dir", default=output_dir, help="Folder for everything the run writes.")
    group.add_argument("--seed", type=SEED, help="Makes the run repeatable; without it one is chosen and reported.")
    group.add_argument("--train_batch_size", type=POSITIVE, default=4, help="Samples per step and process.")
    group.add_argument("--num_train_epochs", type=POSITIVE, help="Passes over the photos, if no step count is given.")
    group.add_argument("--max_train_steps", type=POSITIVE, help="Optimizer steps; 500 if no epochs are given either.")
    group.add_argument("--gradient_accumulation_steps", type=POSITIVE, default=1, help="Batches per optimizer step.")
    group.add_argument("--gradient_checkpointing", action="store_true", help="Recompute activations: slower, smaller.")
    group.add_argument("--dataloader_num_workers", type=COUNT, default=0, help="Processes that read stored draws.")
    group.add_argument(
        "--mixed_precision", choices=["no", "fp16", "bf16"], help="Default: as accelerate is configured."
    )
    group.add_argument("--allow_tf32", action="store_true", help="TF32 matrix products on NVIDIA cards.")
    group.add_argument("--enable_npu_flash_attention", action="store_true", help="Flash attention of Ascend NPUs.")
    group.add_argument(
        "--timestep_shift",
        type=ABOVE_ZERO,
        help="Shift of the sigmas trained on: sigma = s u / (1 + (s - 1) u). Default: as the scheduler's config says.",
    )
    group.add_argument(
        "--weighting_scheme",
        choices=["sigma_sqrt", "logit_normal", "mode", "cosmap", "none"],
        default="none",
        help="Density of timesteps (logit_normal, mode) or weight of their loss (sigma_sqrt, cosmap).",
    )
    group.add_argument("--logit_mean", type=REAL, default=0.0, help="Mean of the logit-normal density.")
    group.add_argument("--logit_std", type=ABOVE_ZERO, default=1.0, help="Its standard deviation.")
    group.add_argument("--mode_scale", type=REAL, default=1.29, help="Scale of the mode density.")
    group.add_argument(
        "--offload",
        action="store_true",
        help="Outside of training steps, let frozen weights pass through the device piece by piece: slower, smaller.",
    )
    group.add_argument("--cache_latents", action="store_true", help="Accepted; latents are always cached here.")
    group.add_argument("--local_rank", type=int, default=-1, help="Set by older launchers; the environment decides.")


def add_optimizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the optimizer and the learning rate."""
    group = parser.add_argument_group("optimizer")
    group.add_argument("--optimizer", type=str.lower, default="adamw", metavar="{adamw,prodigy}", help="Which one.")
    group.add_argument("--use_8bit_adam", action="store_true", help="AdamW with 8-bit state, from bitsandbytes.")
    group.add_argument("--learning_rate", type=NOT_NEGATIVE, default=1e-4, help="Peak learning rate.")
    group.add_argument("--scale_lr", action="store_true", help="Multiply it by processes, batch and accumulation.")
    group.add_argument(
        "--lr_scheduler",
        default="constant",
        choices=[kind.value for kind in SchedulerType if kind is not SchedulerType.PIECEWISE_CONSTANT],
        help="Shape of the learning rate over the run.",
    )
    group.add_argument("--lr_warmup_steps", type=COUNT, default=500, help="Optimizer steps of linear warm-up.")
    group.add_argument("--lr_num_cycles", type=POSITIVE, default=1, help="Restarts of cosine_with_restarts.")
    group.add_argument("--lr_power", type=ABOVE_ZERO, default=1.0, help="Power of polynomial.")
    group.add_argument("--adam_beta1", type=NOT_NEGATIVE, default=0.9, help="First beta, of AdamW and Prodigy.")
    group.add_argument("--adam_beta2", type=NOT_NEGATIVE, default=0.999, help="Second beta, of AdamW and Prodigy.")
    group.add_argument("--adam_weight_decay", type=NOT_NEGATIVE, default=1e-4, help="Decay of the LoRA weights.")
    group.add_argument(
        "--adam_weight_decay_text_encoder",
        type=NOT_NEGATIVE,
        default=1e-3,
        help="Only for text encoders, which are not trained here.",
    )
    group.add_argument("--adam_epsilon", type=ABOVE_ZERO, default=1e-8, help="Epsilon, of AdamW and Prodigy.")
    group.add_argument("--prodigy_beta3", type=NOT_NEGATIVE, help="Prodigy's third beta.")
    group.add_argument("--prodigy_decouple", type=_switch, default=True, help="Decoupled weight decay in Prodigy.")
    group.add_argument("--prodigy_use_bias_correction", type=_switch, default=True, help="Bias correction in Prodigy.")
    group.add_argument(
        "--prodigy_safeguard_warmup", type=_switch, default=True, help="Keep D from growing in warm-up."
    )
    group.add_argument("--max_grad_norm", type=ABOVE_ZERO, default=1.0, help="Gradients are clipped to this norm.")


def add_dry_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that ask what a run would need."""
    group = parser.add_argument_group("dry run")
    group.add_argument(
        "--dry_run",
        action="store_true",
        help="Print the plan and what each phase needs, by the config.json files alone, then end: no weights, no GPU.",
    )
    group.add_argument("--dry_run_json", metavar="FILE", help="Write the same to a JSON file.")
    group.add_argument(
        "--device_memory_gb",
        type=ABOVE_ZERO,
        metavar="G",
        help="Memory of the device in GiB: mark the phases that do not fit, and say which flags would make them.",
    )


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of validation images, checkpoints, trackers and the hub."""
    group = parser.add_argument_group("validation")
    group.add_argument("--validation_prompt", help="Prompt of the images drawn during and after training.")
    group.add_argument("--num_validation_images", type=COUNT, default=4, help="Images each time.")
    group.add_argument("--validation_epochs", type=POSITIVE, default=50, help="Draw them every so many epochs.")

    group = parser.add_argument_group("checkpoints, trackers, hub")
    group.add_argument(
        "--checkpointing_steps", type=POSITIVE, default=500, help="Save a checkpoint every so many steps."
    )
    group.add_argument("--checkpoints_total_limit", type=POSITIVE, help="Keep only so many of the newest checkpoints.")
    group.add_argument("--resume_from_checkpoint", help="A checkpoint's path or name, or 'latest'.")
    group.add_argument(
        "--upcast_before_saving", action="store_true", help="Save the LoRA in fp32 in a mixed run, too."
    )
    group.add_argument("--logging_dir", default="logs", help="Folder for trackers, within --output_dir.")
    group.add_argument("--report_to", default="tensorboard", help="Tracker: tensorboard, wandb, ..., all, or none.")
    group.add_argument("--push_to_hub", action="store_true", help="Upload the LoRA and its card when done.")
    group.add_argument("--hub_token", help="Token for that; better: log in once with `hf auth login`.")
    group.add_argument("--hub_model_id", help="Repository to upload to; default: the output folder's name.")


# A flag that differs from its default although nothing reads it is refused: (flags, is it read?, the remedy).
_CONDITIONAL_FLAGS: list[tuple[tuple[str, ...], Callable[[argparse.Namespace], bool], str]] = [
    (
        (
            "class_data_dir",
            "class_prompt",
            "num_class_images",
            "prior_loss_weight",
            "sample_batch_size",
            "prior_generation_precision",
        ),
        lambda args: args.with_prior_preservation,
        "add --with_prior_preservation",
    ),
    (
        ("num_validation_images", "validation_epochs"),
        lambda args: bool(args.validation_prompt),
        "add --validation_prompt",
    ),
    (("dataset_config_name", "image_column"), lambda args: bool(args.dataset_name), "add --dataset_name"),
    (
        ("logit_mean", "logit_std"),
        lambda args: args.weighting_scheme == "logit_normal",
        "add --weighting_scheme logit_normal",
    ),
    (("mode_scale",), lambda args: args.weighting_scheme == "mode", "add --weighting_scheme mode"),
    (
        ("prodigy_beta3", "prodigy_decouple", "prodigy_use_bias_correction", "prodigy_safeguard_warmup"),
        lambda args: args.optimizer == "prodigy",
        "add --optimizer prodigy",
    ),
    (("use_8bit_adam",), lambda args: args.optimizer == "adamw", "use --optimizer adamw"),
    (
        ("lr_num_cycles",),
        lambda args: args.lr_scheduler == "cosine_with_restarts",
        "add --lr_scheduler cosine_with_restarts",
    ),
    (("lr_power",), lambda args: args.lr_scheduler == "polynomial", "add --lr_scheduler polynomial"),
    (
        ("lr_warmup_steps",),
        lambda args: args.lr_scheduler != "constant" or args.lr_warmup_steps == 0,
        "use --lr_scheduler constant_with_warmup",
    ),
    (
        ("residual_dtype",),
        lambda args: args.skip_first + args.skip_last > 0 or args.skip_ratio is not None,
        "skip blocks with --skip_first, --skip_last",
    ),
    (("block_curves",), lambda args: args.skip_ratio is not None, "add --skip_ratio"),
    (("logging_dir",), lambda args: args.report_to != "none", "choose a tracker with --report_to"),
    (("hub_token", "hub_model_id"), lambda args: args.push_to_hub, "add --push_to_hub"),
    (("dry_run_json", "device_memory_gb"), lambda args: args.dry_run, "add --dry_run"),
]


def default_arguments(family: "ModelFamily") -> argparse.Namespace:
    """What a script's arguments are unless the user says otherwise."""
    return family.parse_args(["--pretrained_model_name_or_path", ""])


def flag_problems(args: argparse.Namespace, family: "ModelFamily") -> Iterator[str]:
    """Yield one plain sentence for every contradiction among the flags that shows without looking at any file."""
    defaults = default_arguments(family)
    for flags, is_read, remedy in _CONDITIONAL_FLAGS:
        for flag in flags:
            if getattr(args, flag) != getattr(defaults, flag) and not is_read(args):
                yield f"--{flag} has no effect here: {remedy}, or leave it out"
    yield from family.flag_problems(args, defaults)
    yield from _size_problems(args, family.layout.pixels_per_token)
    if args.skip_ratio is not None and args.skip_first + args.skip_last > 0:
        yield "--skip_ratio chooses --skip_first and --skip_last itself: leave out the ratio, or these two"
    if args.patch_schedule in ("reverse", "random") and args.patch_resolution == args.resolution:
        yield f"--patch_schedule {args.patch_schedule} has no effect here: --patch_resolution equals --resolution"
    if args.revision and os.path.isdir(args.pretrained_model_name_or_path):
        yield "--revision has no effect here: --pretrained_model_name_or_path is a folder, so leave it out"
    if bool(args.instance_data_dir) == bool(args.dataset_name):
        yield "give the photos by exactly one of --instance_data_dir and --dataset_name"
    if not args.instance_prompt and not args.caption_column:
        yield "--instance_prompt is missing: name the subject, for example --instance_prompt 'a photo of sks dog'"
    if args.with_prior_preservation and not args.class_data_dir:
        yield "--with_prior_preservation needs --class_data_dir, the folder of class images"
    if args.with_prior_preservation and not args.class_prompt:
        yield "--with_prior_preservation needs --class_prompt, for example --class_prompt 'a photo of a dog'"
    if args.optimizer not in ("adamw", "prodigy"):
        yield f"--optimizer {args.optimizer} is unknown: use adamw or prodigy"
    if args.adam_beta1 >= 1 or args.adam_beta2 >= 1 or (args.prodigy_beta3 or 0) >= 1:
        yield "--adam_beta1, --adam_beta2 and --prodigy_beta3 must lie below 1"
    if args.adam_weight_decay_text_encoder != defaults.adam_weight_decay_text_encoder:
        yield "--adam_weight_decay_text_encoder has no effect here: no text encoder is trained, so leave it out"
    if args.lora_dropout >= 1:
        yield f"--lora_dropout must lie below 1, got {args.lora_dropout}"
    if args.report_to not in ("none", "tensorboard") and args.hub_token:
        yield f"--hub_token would be stored by --report_to {args.report_to}: log in with `hf auth login` instead"
    if args.report_to not in ("none", "all", *(kind.value for kind in LoggerType)):
        yield f"--report_to {args.report_to} is unknown: use none or one of {', '.join(k.value for k in LoggerType)}"
    yield from _text_problems(args)
    folders = [args.class_data_dir, args.instance_data_dir]
    if all(folders) and len(set(map(os.path.realpath, folders))) == 1:
        yield "--class_data_dir must be another folder than --instance_data_dir: class images are written into it"


_PATHS = (
    *("instance_data_dir", "class_data_dir", "output_dir", "residual_dir", "logging_dir", "cache_dir"),
    *("resume_from_checkpoint", "bnb_quantization_config_path", "block_curves", "dry_run_json"),
)


def _text_problems(args: argparse.Namespace) -> Iterator[str]:
    for name, value in vars(args).items():
        if isinstance(value, str) and not _is_text(value):
            yield f"--{name} {value} is not in UTF-8, or holds a character that no file can: type it anew"
        if name in _PATHS and value and max(len(part.encode("utf-8", "replace")) for part in value.split("/")) > 255:
            yield f"--{name} {value[:20]}... has a part longer than any file's name can be: shorten it"
    if args.hub_token and not re.fullmatch(r"[!-~]+", args.hub_token):
        yield "--hub_token holds a blank or another character that no token has: copy it anew"
    if args.push_to_hub:
        name = repository_name(args)
        try:
            validate_repo_id(name)
        except HFValidationError:
            yield f"--push_to_hub: {name} cannot be the name of a repository: name one with --hub_model_id"


def repository_name(args: argparse.Namespace) -> str:
    """The hub repository to upload to: the one given, or named after the output folder."""
    return args.hub_model_id or pathlib.Path(args.output_dir).resolve().name


def _is_text(text: str) -> bool:
    """Whether text can be written to a file: surrogates stand for bytes that are not in UTF-8."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _size_problems(args: argparse.Namespace, multiple: int) -> Iterator[str]:
    for flag in ("resolution", "patch_resolution"):
        size = getattr(args, flag)
        if size is not None and size % multiple:
            below, above = size // multiple * multiple, (size // multiple + 1) * multiple
            nearest = f"{below} or {above}" if below else f"{above}"
            yield f"--{flag} {size} is not a multiple of {multiple} pixels: the nearest is {nearest}"
    if args.patch_resolution and args.patch_resolution > args.resolution:
        yield (
            f"--patch_resolution {args.patch_resolution} is above --resolution {args.resolution}: "
            "lower the first or raise the second"
        )


_TRACKER_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "comet_ml": ("comet_ml",), "wandb": ("wandb",)}


def package_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield one plain sentence for every package that the flags need and that is missing."""
    wanted = {
        "--use_8bit_adam": (args.use_8bit_adam, ("bitsandbytes",)),
        "--bnb_quantization_config_path": (bool(args.bnb_quantization_config_path), ("bitsandbytes",)),
        "--optimizer prodigy": (args.optimizer == "prodigy", ("prodigyopt",)),
        "--enable_npu_flash_attention": (args.enable_npu_flash_attention, ("torch_npu",)),
        "--dataset_name": (bool(args.dataset_name), ("datasets",)),
        f"--report_to {args.report_to}": (
            args.report_to not in ("none", "all"),
            _TRACKER_PACKAGES.get(args.report_to, (args.report_to,)),
        ),
    }
    for flag, (is_wanted, packages) in wanted.items():
        if is_wanted and not any(importlib.util.find_spec(package) for package in packages):
            yield f"{flag} needs the package {packages[0]}, which is not installed: run pip install {packages[0]}"


# ===================================================================================================================
# 2. Photos and captions
# ===================================================================================================================

PHOTO_SUFFIXES = frozenset({".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif"})


@dataclasses.dataclass(frozen=True)
class Photo:
    """One photo that has been decoded once and found whole.

    Attributes:
        name: File name, or "row N" of a dataset.
        caption: The prompt it is trained with.
        width, height: Pixels, upright (after EXIF rotation).
        digest: SHA-256 of the file, or of a dataset row's pixels.
        source: What `PIL.Image.open` takes, or a function that returns a PIL image.
    """

    name: str
    caption: str
    width: int
    height: int
    digest: str
    source: pathlib.Path | Callable[[], Image.Image]

    def load(self) -> Image.Image:
        """The upright photo in RGB."""
        return _load_upright(self.source)


def _load_upright(source: pathlib.Path | Callable[[], Image.Image]) -> Image.Image:
    """Open a photo, turn it as its EXIF data says and bring it to 8-bit RGB; transparent areas become white."""
    image = ImageOps.exif_transpose(source() if callable(source) else Image.open(source))
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, dtype=np.float64)
        image = Image.fromarray((values / (257 if values.max(initial=0) > 255 else 1)).clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _examine(name: str, caption: str, source: pathlib.Path | Callable, where: str) -> Photo:
    """Decode a photo once, so that a damaged one is refused now and not in the middle of the run."""
    try:
        image = _load_upright(source)
    except Exception as problem:  # decoders raise OSError, ValueError, SyntaxError, struct.error, ...
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        refuse(f"{where}: {name} cannot be read as an image ({reason}): repair or remove it")
    data = image.tobytes() if callable(source) else source.read_bytes()
    return Photo(name, caption, *image.size, hashlib.sha256(data).hexdigest(), source)


def find_photos(folder: str, flag: str) -> list[pathlib.Path]:
    """The image files of a folder, sorted by name; everything else in it is named once in the log.

    A file counts as an image by its suffix and if it is not empty; hidden files do not count.
    """
    path = pathlib.Path(folder)
    if not path.is_dir():
        refuse(f"{flag} {folder} is not a folder")
    entries = sorted(path.iterdir())
    is_photo = [
        entry.is_file()
        and entry.suffix.lower() in PHOTO_SUFFIXES
        and not entry.name.startswith(".")
        and entry.stat().st_size > 0
        for entry in entries
    ]
    passed_over = [
        e.name for e, photo in zip(entries, is_photo, strict=True) if not photo and e.name != "metadata.jsonl"
    ]
    if passed_over:
        logger.info(one_line(f"{flag} {folder}: passed over what is no image: {', '.join(passed_over)}"))
    return [entry for entry, photo in zip(entries, is_photo, strict=True) if photo]


def _folder_captions(args: argparse.Namespace) -> Mapping[str, Any]:
    """Captions by file name, from metadata.jsonl in the folder of photos."""
    metadata = pathlib.Path(args.instance_data_dir) / "metadata.jsonl"
    if not args.caption_column:
        if metadata.exists():
            logger.info(f"{metadata} is not read: its captions are used with --caption_column")
        return {}
    if not metadata.is_file():
        refuse(
            f"--caption_column {args.caption_column} needs {metadata}, a line of JSON per photo, which is not there"
        )
    captions = {}
    try:
        lines = metadata.read_text(encoding="utf-8-sig").split("\n")  # captions may hold other separators of lines
    except UnicodeDecodeError:
        refuse(f"{metadata} is not in UTF-8: save it again in that encoding")
    except OSError as problem:
        refuse(f"{metadata} cannot be read ({problem.strerror})")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name = row["file_name"]
        except (ValueError, KeyError, TypeError, RecursionError):
            name = None
        if not isinstance(name, str):
            refuse(f"{metadata}: line {number} is not a JSON object with a file_name")
        if args.caption_column not in row:
            refuse(
                f"{metadata}: line {number} has no {args.caption_column!r}, the --caption_column; it has {list(row)}"
            )
        if name in captions:
            refuse(f"{metadata}: line {number} names {name} again: keep one line for each photo")
        captions[name] = row[args.caption_column]
    return captions


def _caption(value: Any, args: argparse.Namespace, where: str) -> str:
    """A caption as text; an empty one gives way to the instance prompt."""
    if value is None or (isinstance(value, str) and not value.strip()):
        if not args.instance_prompt:
            refuse(f"{where} has no caption: write one, or give --instance_prompt to stand in for it")
        return args.instance_prompt
    if not isinstance(value, str):
        refuse(f"{where} has a caption that is no text but {type(value).__name__}: {value!r:.100}")
    if not _is_text(value):
        refuse(f"{where} has a caption with a character that no file can hold: write it anew: {value!r:.100}")
    return value


def _folder_photos(args: argparse.Namespace) -> list[Photo]:
    flag = "--instance_data_dir"
    paths = find_photos(args.instance_data_dir, flag)
    captions = _folder_captions(args)
    absent = sorted(set(captions) - {path.name for path in paths})
    if absent:
        refuse(f"{args.instance_data_dir}/metadata.jsonl names {absent[0]}, which is no photo in that folder")
    where = f"{flag} {args.instance_data_dir}"
    return [
        _examine(path.name, _caption(captions.get(path.name), args, f"{where}: {path.name}"), path, where)
        for path in paths
    ]


def _row_image(rows: Any, index: int, column: str) -> Image.Image:
    return rows[index][column]


def _dataset_photos(args: argparse.Namespace) -> list[Photo]:
    from datasets import load_dataset  # takes a second to import, and most runs read a folder

    where = f"--dataset_name {args.dataset_name}"
    try:
        dataset = load_dataset(args.dataset_name, args.dataset_config_name, cache_dir=args.cache_dir)
    except Exception as problem:
        refuse(f"{where} cannot be loaded: {str(problem).splitlines()[0] if str(problem) else type(problem).__name__}")
    if "train" not in dataset:
        refuse(f"{where} has no split 'train', only {', '.join(dataset)}")
    rows = dataset["train"]
    for flag, column in (("--image_column", args.image_column), ("--caption_column", args.caption_column)):
        if column and column not in rows.column_names:
            refuse(f"{flag} {column} is not in {args.dataset_name}, which has {', '.join(rows.column_names)}")
    captions = rows[args.caption_column] if args.caption_column else [None] * len(rows)
    return [
        _examine(
            f"row {index}",
            _caption(caption, args, f"{where}: row {index}"),
            functools.partial(_row_image, rows, index, args.image_column),
            where,
        )
        for index, caption in enumerate(captions)
    ]


def load_photos(args: argparse.Namespace) -> list[Photo]:
    """The photos of the subject with their captions, each decoded once; refuses what cannot be trained on."""
    photos = _dataset_photos(args) if args.dataset_name else _folder_photos(args)
    if not photos:
        refuse(
            f"{args.dataset_name or args.instance_data_dir} holds no image: put some there "
            f"({', '.join(sorted(PHOTO_SUFFIXES))})"
        )
    return photos


def load_class_photos(args: argparse.Namespace) -> list[Photo]:
    """The class images of prior preservation that are there so far, all with the class prompt."""
    if not args.with_prior_preservation or not os.path.isdir(args.class_data_dir):
        return []
    return read_photos(args.class_data_dir, "--class_data_dir", args.class_prompt)


def read_photos(folder: str, flag: str, caption: str) -> list[Photo]:
    """The images of a folder, all with one caption, each decoded once; `flag` names the folder in a refusal."""
    where = f"{flag} {folder}"
    return [_examine(path.name, caption, path, where) for path in find_photos(folder, flag)]


def crop_photo(photo: Photo, draw: "Draw", args: argparse.Namespace, size: int) -> torch.Tensor:
    """Cut a draw's square from its photo and resize it in one step (the paper's dynamic patch sampling).

    Args:
        photo: The photo; its short edge stands for `args.resolution` pixels.
        draw: Says the side and place of the crop in that scale, and whether it is mirrored.
        args: `resolution` and `image_interpolation_mode` are read.
        size: Side of the result in pixels.

    Returns:
        Tensor (3, size, size), float32 in [-1, 1].
    """
    scale = min(photo.width, photo.height) / args.resolution
    side = draw.patch_size * scale
    left, top = draw.left * (photo.width - side), draw.top * (photo.height - side)
    image = photo.load().resize(
        (size, size),
        resample=Image.Resampling[args.image_interpolation_mode.upper()],
        box=(left, top, min(left + side, photo.width), min(top + side, photo.height)),
    )
    if draw.flip:
        image = ImageOps.mirror(image)
    pixels = torch.from_numpy(np.array(image, dtype=np.float32)) / 127.5 - 1  # (size, size, 3)
    return pixels.permute(2, 0, 1).contiguous()  # (3, size, size)


# ===================================================================================================================
# 3. Blocks: numbering, recording residuals, skipping
# ===================================================================================================================


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """How a transformer class holds its blocks, and what is usual for it.

    Attributes:
        stacks: Names of its ModuleLists of blocks, in the order in which data passes them.
        returns: The streams that a block returns, in that order.
        text_only: Layers of a block that act on nothing but its text output. The output layer reads only image tokens,
            so in the last trained block a LoRA on them would get no gradient.
        lora_layers: Layers that get a LoRA unless the user says otherwise, as in the official scripts.
        modulations: Linear layers of a block that read the noise level and the prompt as a whole, but no token: what
            they return is a constant of a draw.
        pixels_per_token: Side of an image token in pixels.
        text_tokens: Length of an encoded prompt.
        text_attention: The layer of a block through which the image attends to the text.
        published_pairs: For models by the length of their stacks: the paper's (skip_first, skip_last), by their sum.
    """

    stacks: tuple[str, ...]
    returns: tuple[str, ...]
    text_only: tuple[str, ...]
    lora_layers: tuple[str, ...]
    modulations: tuple[str, ...]
    pixels_per_token: int
    text_tokens: int
    text_attention: str
    published_pairs: Mapping[tuple[int, ...], Mapping[int, tuple[int, int]]]


LAYOUTS = {
    "FluxTransformer2DModel": BlockLayout(
        stacks=("transformer_blocks", "single_transformer_blocks"),
        returns=("encoder_hidden_states", "hidden_states"),
        text_only=("attn.add_q_proj", "attn.to_add_out", "ff_context"),
        lora_layers=(
            "attn.to_k",
            "attn.to_q",
            "attn.to_v",
            "attn.to_out.0",
            "attn.add_k_proj",
            "attn.add_q_proj",
            "attn.add_v_proj",
            "attn.to_add_out",
            "ff.net.0.proj",
            "ff.net.2",
            "ff_context.net.0.proj",
            "ff_context.net.2",
        ),
        modulations=("norm1.linear", "norm1_context.linear", "norm.linear"),
        pixels_per_token=16,  # 8 pixels to a latent cell, 2 x 2 cells to a token
        text_tokens=512,
        text_attention="attn",
        published_pairs={(19, 38): {17: (7, 10), 23: (13, 10), 29: (19, 10)}},  # 30, 40 and 50 % of FLUX.1-dev
    ),
    "SanaTransformer2DModel": BlockLayout(
        stacks=("transformer_blocks",),
        returns=("hidden_states",),
        text_only=(),
        lora_layers=("to_k", "to_q", "to_v"),
        modulations=(),  # one layer in front of all blocks makes them
        pixels_per_token=32,  # 32 pixels to a latent cell, which is a token
        text_tokens=300,
        text_attention="attn2",
        published_pairs={},
    ),
}


def block_layout(transformer: nn.Module) -> BlockLayout:
    """The layout of a transformer's class; TypeError for a class that is not known."""
    for cls in type(transformer).__mro__:
        if cls.__name__ in LAYOUTS:
            return LAYOUTS[cls.__name__]
    raise TypeError(f"{type(transformer).__name__} is not one of {', '.join(LAYOUTS)}")


def named_blocks(transformer: nn.Module) -> dict[str, nn.Module]:
    """All blocks by their name in the transformer, such as "transformer_blocks.0", in data order."""
    return {
        f"{stack}.{index}": block
        for stack in block_layout(transformer).stacks
        for index, block in enumerate(getattr(transformer, stack))
    }


def trained_blocks(transformer: nn.Module, skip_first: int, skip_last: int) -> list[str]:
    """Names of the blocks that are trained; ValueError if the counts leave none."""
    names = list(named_blocks(transformer))
    check_skip_counts(len(names), skip_first, skip_last)
    return names[skip_first : len(names) - skip_last]


def modulation_names(
    transformer: nn.Module, skip_first: int, skip_last: int, lora_targets: Iterable[str] = ()
) -> list[str]:
    """Full names of the trained blocks' modulation layers that have no LoRA and get none; none if no block is skipped.

    Their weights are a sixth of FLUX.1-dev's, and training needs no more of them than what they return for its draws.
    """
    if not skip_first + skip_last:
        return []
    modules, targets = dict(transformer.named_modules()), set(lora_targets)
    layers = block_layout(transformer).modulations
    names = [f"{block}.{layer}" for block in trained_blocks(transformer, skip_first, skip_last) for layer in layers]
    return [name for name in names if isinstance(modules.get(name), nn.Linear) and name not in targets]


def check_skip_counts(depth: int, skip_first: int, skip_last: int) -> None:
    """ValueError unless both counts are non-negative and leave at least one of `depth` blocks to train."""
    if skip_first < 0 or skip_last < 0 or skip_first + skip_last >= depth:
        raise ValueError(
            f"skip_first {skip_first} and skip_last {skip_last} must not be negative, and their sum must be below the "
            f"depth of {depth} blocks"
        )


@dataclasses.dataclass(frozen=True)
class _Span:
    """Consecutive skipped blocks, replaced by one residual per stream that is still needed behind them."""

    name: str  # "first" or "last"
    blocks: tuple[str, ...]
    streams: tuple[str, ...]

    def key(self, stream: str) -> str:
        return f"{self.name}.{stream}"


def _skipped_spans(transformer: nn.Module, skip_first: int, skip_last: int) -> list[_Span]:
    layout, names = block_layout(transformer), list(named_blocks(transformer))
    check_skip_counts(len(names), skip_first, skip_last)
    spans = [
        _Span("first", tuple(names[:skip_first]), layout.returns),
        _Span("last", tuple(names[len(names) - skip_last :]), ("hidden_states",)),  # the output layer reads no text
    ]
    return [span for span in spans if span.blocks]


def _inputs(block: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """A block's inputs by name; models call blocks by keyword, or by position under gradient checkpointing."""
    # of the class: hooks in diffusers 0.35 hide the signature of the block's own
    return inspect.signature(type(block).forward).bind(block, *args, **kwargs).arguments


class ResidualRecording:
    """What `record_residuals` yields; `residuals` holds those of the latest forward pass."""

    def __init__(self) -> None:
        self.residuals: dict[str, torch.Tensor] = {}
        self._entering: dict[str, torch.Tensor] = {}

    def _enter(self, span: _Span, block: nn.Module, args: tuple, kwargs: dict) -> None:
        inputs = _inputs(block, args, kwargs)
        for stream in span.streams:
            self._entering[span.key(stream)] = inputs[stream].detach()

    def _leave(self, span: _Span, layout: BlockLayout, outputs: torch.Tensor | tuple) -> None:
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for stream, output in zip(layout.returns, outputs, strict=True):
            if stream in span.streams:
                entering = self._entering.pop(span.key(stream))
                wide = torch.promote_types(output.dtype, torch.float32)
                self.residuals[span.key(stream)] = output.detach().to(wide) - entering.to(wide)


@contextlib.contextmanager
def record_residuals(
    transformer: nn.Module, skip_first: int, skip_last: int, modulations: Iterable[str] = ()
) -> Iterator[ResidualRecording]:
    """Record what the first `skip_first` and last `skip_last` blocks add to the streams that pass them.

    Within the context every forward pass of the full transformer fills `.residuals`: output of a span of blocks minus
    its input, as "first.hidden_states" and, where blocks carry a text stream, "first.encoder_hidden_states" (B,
    tokens, width); "last.hidden_states" for the span at the end. They are in fp32, or the model's precision if higher.
    A span of no blocks has no entry. Nothing else about the model changes.

    Args:
        modulations: Names of layers whose outputs are recorded, too, as "modulation.NAME", in their own precision.

    Raises:
        ValueError: The counts leave no block to train; the message names the depth.
        RuntimeError: Blocks of the transformer are skipped at the moment.
    """
    if any(isinstance(block, _SkippedBlock) for block in named_blocks(transformer).values()):
        raise RuntimeError("residuals come from the full model: call restore() on the handle of skip_blocks first")
    recording, layout, blocks = ResidualRecording(), block_layout(transformer), named_blocks(transformer)
    hooks = []
    try:
        for span in _skipped_spans(transformer, skip_first, skip_last):

            def enter(block, args, kwargs, span=span):
                recording._enter(span, block, args, kwargs)

            def leave(block, args, outputs, span=span):
                recording._leave(span, layout, outputs)

            hooks.append(blocks[span.blocks[0]].register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(blocks[span.blocks[-1]].register_forward_hook(leave))
        for name in modulations:

            def keep(layer, args, output, name=name):
                recording.residuals[_modulation_key(name)] = output.detach()

            hooks.append(transformer.get_submodule(name).register_forward_hook(keep))
        yield recording
    finally:
        for hook in hooks:
            hook.remove()


def _modulation_key(name: str) -> str:
    return f"modulation.{name}"


class _StoredModulation(nn.Module):
    """Stands where a modulation layer stood, and returns what is stored of it."""

    def __init__(self, name: str, handle: "SkipHandle") -> None:
        super().__init__()
        self._key, self._handle = _modulation_key(name), handle

    def forward(self, conditioning: torch.Tensor) -> torch.Tensor:
        return self._handle.residual(self._key).to(conditioning.device, conditioning.dtype)


class _SkippedBlock(nn.Module):
    """Stands where a skipped block stood: the first of a span adds the residuals, the others pass data through."""

    def __init__(self, original: nn.Module, layout: BlockLayout, handle: "SkipHandle", span: _Span | None) -> None:
        super().__init__()
        self._signature = inspect.signature(type(original).forward)
        self._layout, self._handle, self._span = layout, handle, span

    def forward(self, *args, **kwargs):
        inputs = self._signature.bind(self, *args, **kwargs).arguments
        outputs = tuple(self._pass(stream, inputs[stream]) for stream in self._layout.returns)
        return outputs if len(outputs) > 1 else outputs[0]

    def _pass(self, stream: str, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._span is None or stream not in self._span.streams:
            return hidden_states
        residual = self._handle.residual(self._span.key(stream))
        if residual.shape != hidden_states.shape:
            raise ValueError(
                f"residual {self._span.key(stream)} has shape {tuple(residual.shape)}, "
                f"the model's stream {tuple(hidden_states.shape)}"
            )
        return (hidden_states + residual.to(hidden_states.device)).to(hidden_states.dtype)


def _to_host(block: nn.Module) -> nn.Module:
    """Move a block to host memory; one without data, on the meta device, stays there."""
    return block if all(p.device.type in ("cpu", "meta") for p in block.parameters()) else block.to("cpu")


class SkipHandle:
    """Holds the blocks and layers that `skip_blocks` took out, and the residuals that stand in for them."""

    def __init__(
        self, transformer: nn.Module, skip_first: int, skip_last: int, modulations: Iterable[str] = ()
    ) -> None:
        self._transformer = transformer
        self._spans = _skipped_spans(transformer, skip_first, skip_last)
        self.modulations = tuple(modulations)
        self._names = (*(name for span in self._spans for name in span.blocks), *self.modulations)
        self._originals: dict[str, nn.Module] | None = {}
        self._residuals: dict[str, torch.Tensor] = {}
        self.keys = (
            *(span.key(stream) for span in self._spans for stream in span.streams),
            *(_modulation_key(name) for name in self.modulations),
        )
        self.skip()

    @property
    def skipped(self) -> list[nn.Module]:
        """The skipped blocks and layers themselves, whether they stand in the model or wait here."""
        if self._originals is None:
            raise RuntimeError("the skipped blocks were discarded: load the model again")
        return [self._originals.get(name) or self._transformer.get_submodule(name) for name in self._names]

    def __enter__(self) -> "SkipHandle":
        return self

    def __exit__(self, *exception) -> None:
        self.restore()

    def skip(self) -> None:
        """Take the blocks out, after a `restore()`; their weights wait in host memory."""
        if self._originals or not self._names:
            return
        if self._originals is None:
            raise RuntimeError("the skipped blocks were discarded")
        layout, blocks = block_layout(self._transformer), named_blocks(self._transformer)
        if any(isinstance(blocks[name], _SkippedBlock) for span in self._spans for name in span.blocks):
            raise RuntimeError("these blocks are skipped already: call restore() on the first handle")
        for span in self._spans:
            for name in span.blocks:
                self._originals[name] = _to_host(blocks[name])
                self._put(name, _SkippedBlock(blocks[name], layout, self, span if name == span.blocks[0] else None))
        for name in self.modulations:
            self._originals[name] = _to_host(self._transformer.get_submodule(name))
            self._put(name, _StoredModulation(name, self))

    def set_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Give the residuals of the next forward pass, as `record_residuals` named them, with the batch's rows.

        They are kept until the next call, since gradient checkpointing reads them again in the backward pass.
        ValueError if names are missing or unknown.
        """
        if set(residuals) != set(self.keys):
            raise ValueError(f"residuals wanted: {sorted(self.keys)}, given: {sorted(residuals)}")
        self._residuals = dict(residuals)

    def residual(self, key: str) -> torch.Tensor:
        """One of the residuals set; RuntimeError if none were."""
        if key not in self._residuals:
            raise RuntimeError("call set_residuals(...) before the forward pass of a model with skipped blocks")
        return self._residuals[key]

    def restore(self, device: torch.device | str | None = None) -> None:
        """Put the original blocks back, if they are not there; on `device`, by default where the model is now."""
        if self._originals is None:
            raise RuntimeError("the skipped blocks were discarded: load the model again")
        device = device or next(self._transformer.parameters()).device
        for name, block in self._originals.items():
            self._put(name, block.to(device))
        self._originals, self._residuals = {}, {}

    def discard(self) -> None:
        """Give up the skipped blocks for good, so that their memory is free; `restore()` is refused from then on."""
        self._originals = None

    def _put(self, name: str, block: nn.Module) -> None:
        parent, _, last = name.rpartition(".")
        setattr(self._transformer.get_submodule(parent), last, block)


def skip_blocks(
    transformer: nn.Module, skip_first: int, skip_last: int, modulations: Iterable[str] = ()
) -> SkipHandle:
    """Take the first and last blocks out of a transformer and let stored residuals stand in for them.

    The skipped blocks' weights leave the module (they wait in host memory, in the handle); the indices of the other
    blocks, and with them the names of parameters and LoRA layers, stay. Call `set_residuals` on the handle before
    each forward pass, and `restore()` to have the full model back; the handle is a context manager that does so. Add
    LoRA adapters while all blocks stand: peft shortens names to what tells them apart among the modules present.

    Args:
        modulations: Names of layers, as `modulation_names` gives them, that leave the module, too; their recorded
            outputs are then among the residuals.

    Raises:
        ValueError: The counts leave no block to train; the message names the depth.
        RuntimeError: Blocks are skipped already.
    """
    return SkipHandle(transformer, skip_first, skip_last, modulations)


def lora_target_names(transformer: nn.Module, skip_first: int, skip_last: int, layers: Iterable[str]) -> list[str]:
    """Full names of the layers that get a LoRA: those named in `layers`, in trained blocks, where a gradient reaches
    them.

    Args:
        transformer: With all its blocks; may be on the meta device.
        layers: Names such as "attn.to_q", matched at the end of a layer's name from a dot on, or full names.

    Raises:
        ValueError: A name matches no layer, or none that can be trained; the message says which.
    """
    layout, middle = block_layout(transformer), trained_blocks(transformer, skip_first, skip_last)
    matched = {layer: [] for layer in layers}
    anywhere = set()
    for name, module in transformer.named_modules():
        hits = [layer for layer in matched if name == layer or name.endswith(f".{layer}")]
        if not hits or not isinstance(module, nn.Linear | nn.Conv2d) or getattr(module, "groups", 1) > 1:
            continue
        anywhere.update(hits)
        block = next((block for block in middle if name.startswith(f"{block}.")), None)
        inner = name[len(block) + 1 :] if block else ""
        if block and not (block == middle[-1] and any(f"{inner}.".startswith(f"{t}.") for t in layout.text_only)):
            for layer in hits:
                matched[layer].append(name)
    if unknown := [layer for layer in matched if layer not in anywhere]:
        raise ValueError(f"no layer that can carry a LoRA is called {', '.join(unknown)}")
    targets = sorted({name for found in matched.values() for name in found})
    if not targets:
        raise ValueError(f"none of {', '.join(matched)} is in the trained blocks {middle[0]} to {middle[-1]}")
    return targets


# ===================================================================================================================
# 4. Plan: every number of a run, fixed once
# ===================================================================================================================


@dataclasses.dataclass(frozen=True)
class Period:
    """A stretch of optimizer steps that trains on one set of draws; a run without refresh is one period.

    Attributes:
        number: Counted from 0.
        start_step, end_step: Optimizer steps done before and after it.
    """

    number: int
    start_step: int
    end_step: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run will do, in numbers. Made once in the check phase, saved in the report and in every checkpoint.

    Attributes:
        depth: Blocks of the transformer, over all stacks.
        skip_source: Where the skip counts came from. While they are to be measured, only their sum is settled.
        resolution, patch_resolution, pixel_multiple: Pixels.
        samples_per_epoch: Photos times repeats.
        num_processes, batch_size, accumulation: One optimizer step trains on their product of samples.
        period_steps: Optimizer steps before draws and residuals are made anew; `max_steps` without refresh.
        num_draws: Distinct draws per period, over all processes.
        bytes_per_draw: Size on disk of a sample's stored draw (of both, with prior preservation).
        lora_targets: Full names of the layers that get a LoRA.
        modulations: Full names of trained blocks' layers whose outputs are stored with each draw, in their place.
    """

    model: str
    depth: int
    skip_first: int
    skip_last: int
    skip_source: str
    resolution: int
    patch_resolution: int
    pixel_multiple: int
    patch_schedule: str
    seed: int
    num_processes: int
    batch_size: int
    accumulation: int
    samples_per_epoch: int
    max_steps: int
    period_steps: int
    num_draws: int
    bytes_per_draw: int
    lora_targets: tuple[str, ...]
    modulations: tuple[str, ...]

    @property
    def skips_blocks(self) -> bool:
        return self.skip_first + self.skip_last > 0

    @property
    def pair_is_open(self) -> bool:
        """Whether phase 3 still has to measure which blocks are skipped."""
        return self.skip_source == TO_BE_MEASURED

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in which every photo has been seen `repeats` times, as the official scripts count them."""
        return _steps_per_epoch(self.samples_per_epoch, self.num_processes, self.batch_size, self.accumulation)

    @property
    def residual_bytes(self) -> int:
        """What the draws of one period take on disk, over all processes."""
        return self.num_draws * self.bytes_per_draw

    def draws_of_rank(self, rank: int) -> int:
        """Distinct draws per period that a process makes and trains on."""
        return len(range(rank, self.num_draws, self.num_processes))

    def periods(self, start_step: int = 0) -> Iterator[Period]:
        """The periods that still have steps to do after `start_step`."""
        if start_step >= self.max_steps:
            return
        for number in range(start_step // self.period_steps, -(-self.max_steps // self.period_steps)):
            yield Period(number, number * self.period_steps, min((number + 1) * self.period_steps, self.max_steps))

    def describe(self) -> list[str]:
        """The plan in lines for the log."""
        trained = self.depth - self.skip_first - self.skip_last
        blocks = (
            f"trains {trained} of {self.depth} blocks, skips the first {self.skip_first} and last {self.skip_last} "
            f"({self.skip_source})"
            if self.skips_blocks
            else f"skips no block and trains all {self.depth} (--skip_first, --skip_last choose otherwise)"
        )
        if self.pair_is_open:
            blocks = f"trains {trained} of {self.depth} blocks; which ones to skip is {self.skip_source}"
        crops = (
            "whole squares"
            if self.patch_schedule == "none"
            else f"{self.patch_schedule} crops of {self.patch_resolution} to {self.resolution} px"
        )
        samples = self.num_processes * self.batch_size * self.accumulation
        return [
            f"{self.model} {blocks}",
            f"{crops}, trained on at {self.patch_resolution} px; {self.max_steps} steps of {samples} samples",
            f"{self.num_draws} draws per {self.period_steps} steps take {readable(self.residual_bytes)} on disk; "
            f"seed {self.seed}",
        ]


def _steps_per_epoch(samples: int, num_processes: int, batch_size: int, accumulation: int) -> int:
    return math.ceil(math.ceil(samples / (num_processes * batch_size)) / accumulation)


# ===================================================================================================================
# 5. Draws: image, crop, flip, timestep and noise as a pure function of (seed, rank, index)
# ===================================================================================================================


def patch_size(
    sigma: float,
    min_size: int,
    max_size: int,
    multiple: int,
    schedule: str = "linear",
    generator: torch.Generator | None = None,
) -> int:
    """Side of the crop for a noise level: large at high noise, small at low noise (patch sampling).

    Args:
        sigma: Noise level in [0, 1]; 1 is pure noise.
        min_size, max_size: Pixels, both multiples of `multiple`.
        multiple: The side is rounded to the nearest multiple of so many pixels.
        schedule: "linear" grows from min_size to max_size with sigma, "reverse" shrinks, "random" does not look at
            sigma, "none" is always the whole square, max_size.
        generator: Source of "random"; by default torch's own.

    Returns:
        Pixels, in the scale in which the photo's short edge is `max_size`.

    Raises:
        ValueError: sigma, the sizes or the schedule are outside of these.
    """
    if not 0 <= sigma <= 1:
        raise ValueError(f"sigma must lie in [0, 1], got {sigma}")
    if not 0 < min_size <= max_size or min_size % multiple or max_size % multiple:
        raise ValueError(f"sizes must be multiples of {multiple} with 0 < min <= max, got {min_size} and {max_size}")
    if schedule not in PATCH_SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(PATCH_SCHEDULES)}, got {schedule!r}")
    if schedule == "none":
        return max_size
    if schedule == "random":
        sigma = torch.rand((), generator=generator).item()
    share = 1 - sigma if schedule == "reverse" else sigma
    size = min_size + share * (max_size - min_size)
    return math.floor(size / multiple + 0.5) * multiple


@dataclasses.dataclass(frozen=True)
class Draw:
    """One noisy training example: which photo, which part of it, at which noise level.

    Attributes:
        key: "seed/rank/index/kind", from which all its randomness comes.
        name: File name of its stored tensors, without suffix.
        kind: "instance" or "class".
        photo: Index among the photos of its kind.
        prompt: What the photo is trained with.
        timestep: In (0, 1000], as the transformer's scheduler counts.
        sigma: Noise level in (0, 1], of the same entry of the scheduler's table.
        patch_size: Side of the crop in pixels, in the scale in which the photo's short edge is `--resolution`.
        left, top: Place of the crop, as a share in [0, 1] of the room there is.
        flip: Whether the crop is mirrored.
        weight: Weight of its loss.
    """

    key: str
    name: str
    kind: str
    photo: int
    prompt: str
    timestep: float
    sigma: float
    patch_size: int
    left: float
    top: float
    flip: bool
    weight: float

    def generator(self, purpose: str) -> torch.Generator:
        """A CPU generator for one of the draw's random tensors; the same tensors come from it in every run."""
        return keyed_generator(self.key, purpose)

    def noise(self, shape: Iterable[int]) -> torch.Tensor:
        """The draw's noise, float32 on the CPU."""
        return torch.randn(tuple(shape), generator=self.generator("noise"))


def keyed_generator(*key: Any) -> torch.Generator:
    """A CPU generator seeded by a hash of its key, so that neighbouring keys have nothing in common."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def shuffled(count: int, *key: Any) -> list[int]:
    """The numbers below `count` in an order that depends on nothing but the key."""
    return torch.randperm(count, generator=keyed_generator(*key)).tolist()


class DrawSource:
    """Makes the draws of one process, each a pure function of (seed, rank, index)."""

    def __init__(
        self,
        args: argparse.Namespace,
        plan: Plan,
        photos: list[Photo],
        class_photos: list[Photo],
        scheduler: FlowMatchEulerDiscreteScheduler,
        rank: int,
    ) -> None:
        self.args, self.plan, self.rank = args, plan, rank
        self.photos = {"instance": photos, "class": class_photos}
        self.kinds = ("instance", "class") if class_photos else ("instance",)
        self.timesteps, self.sigmas = scheduler.timesteps.tolist(), scheduler.sigmas.tolist()

    def sample(self, index: int) -> tuple[Draw, ...]:
        """The draws trained on as one sample: the photo's, and with prior preservation a class image's."""
        return tuple(self._draw(kind, index) for kind in self.kinds)

    def photo(self, draw: Draw) -> Photo:
        return self.photos[draw.kind][draw.photo]

    def _draw(self, kind: str, index: int) -> Draw:
        args, plan = self.args, self.plan
        key = f"{plan.seed}/{self.rank}/{index}/{kind}"
        generator = keyed_generator(key, "draw")
        entry = self._table_entry(generator)  # the timestep is drawn before the crop, whose size depends on it
        sigma = self.sigmas[entry]
        size = patch_size(
            sigma, plan.patch_resolution, plan.resolution, plan.pixel_multiple, plan.patch_schedule, generator
        )
        left, top, coin = torch.rand(3, generator=generator).tolist()
        photo = self._photo_index(kind, index)
        return Draw(
            key=key,
            name=f"rank{self.rank}-{index:06d}-{kind}",
            kind=kind,
            photo=photo,
            prompt=self.photos[kind][photo].caption,
            timestep=self.timesteps[entry],
            sigma=sigma,
            patch_size=size,
            left=0.5 if args.center_crop else left,
            top=0.5 if args.center_crop else top,
            flip=args.random_flip and coin < 0.5,
            weight=1.0 if kind == "instance" else args.prior_loss_weight,
        )

    def _table_entry(self, generator: torch.Generator) -> int:
        args = self.args
        u = compute_density_for_timestep_sampling(
            args.weighting_scheme, 1, args.logit_mean, args.logit_std, args.mode_scale, generator=generator
        ).item()
        return min(max(int(u * len(self.timesteps)), 0), len(self.timesteps) - 1)

    def _photo_index(self, kind: str, index: int) -> int:
        """Deal the photos out over all processes: each one comes once in an epoch, in a new order every epoch."""
        count = len(self.photos[kind]) * (self.args.repeats if kind == "instance" else 1)
        epoch, place = divmod(index * self.plan.num_processes + self.rank, count)
        return shuffled(count, self.plan.seed, "photos", kind, epoch)[place] % len(self.photos[kind])

    def indices(self, period: Period) -> range:
        """The indices of this process's distinct draws in a period; a shorter last period may need fewer."""
        count = self.plan.draws_of_rank(self.rank)
        needed = (period.end_step - period.start_step) * self.plan.batch_size * self.plan.accumulation
        return range(period.number * count, period.number * count + min(count, needed))

    def index_at(self, period: Period, position: int) -> int:
        """The draw that the position-th sample of a period trains on: all once, then all again in a new order."""
        indices = self.indices(period)
        turn, place = divmod(position, len(indices))
        if turn:
            place = shuffled(len(indices), self.plan.seed, "replay", self.rank, period.number, turn)[place]
        return indices[place]


# ===================================================================================================================
# 6. Residual store: draws on disk, atomic, fingerprinted, checked
# ===================================================================================================================

MANIFEST = "manifest.json"
PERIOD_LORA = "lora.safetensors"
_OWN_FILES = re.compile(r"(rank\d+-\d+-(instance|class)\.safetensors|manifest\.json|lora\.safetensors)(\.partial)?")


class DamagedResidual(Exception):
    """A stored draw that is cut short, altered, or of another draw."""


@contextlib.contextmanager
def _full_disk_refused(phase: str) -> Iterator[None]:
    """End the run with one line where a write fails for want of space, whichever library was writing."""
    try:
        yield
    except Exception as problem:
        if not _is_full_disk(problem):
            raise
        refuse(
            f"the disk is full in the phase {phase} ({problem}): free the disk and run the same command with"
            " --resume_from_checkpoint latest; what was stored whole is kept",
            every_process=True,
        )


def _is_full_disk(problem: BaseException | None) -> bool:
    """Whether an error, or the one that it followed from, says so: safetensors and torch.save have their own types."""
    if problem is None:
        return False
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    told = any(words in str(problem) for words in ("No space left", "Disk quota", "PytorchStreamWriter failed"))
    return told or _is_full_disk(problem.__cause__ or problem.__context__)


def write_atomically(path: pathlib.Path, write: Callable[[pathlib.Path], Any]) -> None:
    """Let `write` fill a file beside `path`, then give it that name: a file of that name is always whole."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        write(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(
            tensors[name].contiguous().flatten().view(torch.uint8).numpy(), zlib.crc32(name.encode(), crc)
        )
    return f"{crc:08x}"


class ResidualOverflow(Exception):
    """A residual that the precision chosen for storing it cannot hold."""


class ResidualStore:
    """The stored draws of a run: one safetensors file each, with a checksum and the draw that it belongs to."""

    def __init__(self, folder: pathlib.Path, dtype: torch.dtype) -> None:
        self.folder, self.dtype = folder, dtype

    def path(self, draw: Draw) -> pathlib.Path:
        return self.folder / f"{draw.name}.safetensors"

    def write(self, draw: Draw, latents: torch.Tensor, residuals: Mapping[str, torch.Tensor]) -> None:
        """Store a draw's latents (C, h, w), in fp32, residuals (tokens, width), in the store's dtype, and modulations.

        Modulations keep their precision: they act on the trained blocks. ResidualOverflow if a residual does not fit
        the dtype's range.
        """
        tensors = {"latents": latents.float().cpu().contiguous()}
        for key, residual in residuals.items():
            dtype = residual.dtype if key.startswith("modulation.") else self.dtype
            tensors[key] = residual.to(dtype).cpu().contiguous()
            if not torch.isfinite(tensors[key]).all():
                reason = "is not finite" if not torch.isfinite(residual).all() else f"overflows {self.dtype}"
                raise ResidualOverflow(
                    f"the residual {key} {reason}: use --residual_dtype bf16, or a higher precision"
                )
        metadata = {"checksum": _checksum(tensors), "draw": repr(draw)}
        write_atomically(self.path(draw), lambda path: save_file(tensors, path, metadata=metadata))

    def read(self, draw: Draw) -> dict[str, torch.Tensor]:
        """The tensors of a draw; DamagedResidual if the file is missing, altered, or belongs to another draw."""
        path = self.path(draw)
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, safetensors.SafetensorError) as problem:
            raise DamagedResidual(f"{path} cannot be read: {problem}") from None
        if metadata.get("draw") != repr(draw):
            raise DamagedResidual(f"{path} belongs to another draw")
        if metadata.get("checksum") != _checksum(tensors):
            raise DamagedResidual(f"{path} was altered since it was written")
        return tensors

    def holds(self, draw: Draw) -> bool:
        """Whether a draw is there and whole; a damaged one is named in the log and will be made again."""
        if not self.path(draw).exists():
            return False
        try:
            self.read(draw)
        except DamagedResidual as problem:
            logger.warning(f"{problem}; it is made again")
            return False
        return True

    def manifest(self) -> dict[str, Any] | None:
        """The manifest of the draws in the folder; None if there is none. DamagedResidual if it cannot be read."""
        path = self.folder / MANIFEST
        if not path.exists():
            return None
        try:
            manifest = json.loads(path.read_text())
        except ValueError:
            manifest = None
        if not isinstance(manifest, dict) or not isinstance(manifest.get("fingerprint"), dict):
            raise DamagedResidual(f"{path} is not the manifest of stored draws")
        return manifest

    def begin(self, fingerprint: Mapping[str, Any]) -> None:
        """Make the folder ready for draws of this fingerprint; those of another one, and half-written files, go."""
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest = self.manifest()
        keep = manifest is not None and manifest["fingerprint"] == fingerprint
        if manifest and not keep:
            logger.info(f"the draws in {self.folder} are of another period, and are made anew")
        for path in self.own_files():
            if not keep or path.suffix == ".partial":
                path.unlink()
        if not keep:
            text = json.dumps({"fingerprint": fingerprint}, indent=2)
            write_atomically(self.folder / MANIFEST, lambda path: path.write_text(text))

    def remove(self) -> None:
        """Delete what the run stored, and the folder if nothing else is in it."""
        for path in self.own_files():
            path.unlink()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def own_files(self) -> list[pathlib.Path]:
        """The files in the folder that carry names of the store's; the manifest last, which says whose they are."""
        if not self.folder.is_dir():
            return []
        own = (path for path in self.folder.iterdir() if _OWN_FILES.fullmatch(path.name))
        return sorted(own, key=lambda path: (path.name == MANIFEST, path.name))


def weights_digest(folder: str) -> str:
    """A digest of a pipeline's weights and configuration that takes a moment even for 30 GB.

    Of its components' safetensors files the header and the first 4 KiB of each tensor count, of their other files the
    size and the first MiB; what else lies in the folder, such as the weights for other programs, does not.
    """
    digest = hashlib.sha256()
    root = pathlib.Path(folder)
    for path in sorted(p for p in root.rglob("*") if p.is_file() and len(p.relative_to(root).parts) <= 2):
        if path.suffix not in (".json", ".safetensors", ".bin", ".model", ".txt"):
            continue
        if path.parent == root and path.name != "model_index.json":
            continue
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            if path.suffix == ".safetensors":
                _check_safetensors(path)
                for chunk in _tensor_heads(file):
                    digest.update(chunk)
            else:
                digest.update(file.read(1 << 20))
    return digest.hexdigest()


def _check_safetensors(path: pathlib.Path) -> None:
    """Refuse a file of weights whose header does not describe it to the last byte; only the header is read."""
    try:
        with safetensors.safe_open(path, framework="pt"):
            pass
    except (OSError, safetensors.SafetensorError) as problem:
        begin = path.read_bytes()[:40] if path.stat().st_size < 1000 else b""
        reason = "it is a pointer of Git LFS" if begin.startswith(b"version https://git-lfs") else str(problem)
        refuse(f"{path} is no whole file of weights ({reason}): download it again")


def _tensor_heads(file: Any) -> Iterator[bytes]:
    size = int.from_bytes(file.read(8), "little")
    header = file.read(size)
    yield header
    for name, tensor in json.loads(header).items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            file.seek(8 + size + start)
            yield file.read(min(end - start, 4096))


# ===================================================================================================================
# 7. Start and check: everything that can be refused before a weight is loaded
# ===================================================================================================================


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """What the shared phases need to know about one model; each training script defines its own.

    Attributes:
        name: For messages and the model card.
        parse_args: Of the script.
        flag_problems: (args, defaults) -> sentences about flags that only this script has.
        pipeline_class, transformer_class: Of diffusers.
        patch_resolution: Side in pixels of the smallest crop by default.
        latent_cells_per_token: Latent cells whose channels make up a token's.
        text_components: Components of the pipeline that only encoding prompts needs.
        extra_prompts: Prompts that generating images needs besides the user's, such as an empty negative prompt.
        text_flags: Flags that change what the transformer is told besides the prompt.
        load_scheduler: (model_folder, args) -> the flow-matching scheduler whose table timesteps are drawn from.
        encoder_inputs: run -> arguments of each text encoder's forward pass for one prompt, by its component's name.
        blank_prompt: run -> zeros in the shapes that `encode_prompt` returns.
        encode_prompt: (run, pipeline, prompt) -> tensors of one prompt, each (1, ...).
        encode_pixels: (vae, pixels (B, 3, H, W), generators) -> latents (B, C, h, w).
        predict_velocity: (run, transformer, noisy latents, timesteps (B,), prompt tensors) -> velocity (B, C, h, w).
        generate_images: (run, pipeline, tensors by prompt, prompt, generators, **options) -> PIL images, one per
            generator; options go to the pipeline.
    """

    name: str
    parse_args: Callable[[list[str] | None], argparse.Namespace]
    flag_problems: Callable[[argparse.Namespace, argparse.Namespace], Iterable[str]]
    pipeline_class: type
    transformer_class: type
    patch_resolution: int
    latent_cells_per_token: int
    text_components: tuple[str, ...]
    extra_prompts: tuple[str, ...]
    text_flags: tuple[str, ...]
    load_scheduler: Callable
    encoder_inputs: Callable
    blank_prompt: Callable
    encode_prompt: Callable
    encode_pixels: Callable
    predict_velocity: Callable
    generate_images: Callable

    @property
    def layout(self) -> BlockLayout:
        return LAYOUTS[self.transformer_class.__name__]

    @property
    def pixels_per_cell(self) -> int:
        """Side of a latent cell in pixels."""
        return self.layout.pixels_per_token // math.isqrt(self.latent_cells_per_token)


@dataclasses.dataclass
class Run:
    """What the check phase found out, handed from phase to phase."""

    args: argparse.Namespace
    family: ModelFamily
    accelerator: Accelerator
    report: "RunReport"
    model_folder: str
    model_digest: str
    transformer_config: Mapping[str, Any]
    plan: Plan
    photos: list[Photo]
    class_photos: list[Photo]
    scheduler: FlowMatchEulerDiscreteScheduler
    checkpoint: pathlib.Path | None
    quantization: BitsAndBytesConfig | None
    is_finished: bool = False

    @property
    def output(self) -> pathlib.Path:
        return pathlib.Path(self.args.output_dir)

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the frozen weights: as the accelerator decided, whether by flag, launcher or configuration."""
        return DTYPES[self.accelerator.mixed_precision]

    @property
    def start_step(self) -> int:
        """Optimizer steps that the checkpoint to resume from has done."""
        return read_checkpoint_state(self.checkpoint)["step"] if self.checkpoint else 0

    @property
    def class_photos_missing(self) -> int:
        args = self.args
        return max(0, args.num_class_images - len(self.class_photos)) if args.with_prior_preservation else 0

    @property
    def needs_full_model_later(self) -> bool:
        """Whether skipped blocks and VAE are wanted again after the first precompute."""
        return self.plan.period_steps < self.plan.max_steps or self.validates_before_the_end

    @property
    def validates_in_training(self) -> bool:
        return bool(self.args.validation_prompt) and self.args.num_validation_images > 0

    @property
    def validates_before_the_end(self) -> bool:
        """Whether images are drawn at least once while training goes on."""
        return self.validates_in_training and self.plan.steps_per_epoch < self.plan.max_steps

    def draw_source(self) -> DrawSource:
        return DrawSource(
            self.args, self.plan, self.photos, self.class_photos, self.scheduler, self.accelerator.process_index
        )

    def store(self) -> ResidualStore:
        return ResidualStore(residual_folder(self.args), DTYPES[self.args.residual_dtype])


def residual_folder(args: argparse.Namespace) -> pathlib.Path:
    """Where stored draws lie."""
    return pathlib.Path(args.residual_dir or os.path.join(args.output_dir, "residuals"))


def start(args: argparse.Namespace, family: ModelFamily) -> Accelerator:
    """Refuse contradictory flags and missing packages, then start accelerate and the log."""
    _secrets.add(args.hub_token or "")
    for problem in flag_problems(args, family):
        refuse(problem)
    for problem in package_problems(args):  # it looks for packages by the names that flags give
        refuse(problem)
    if args.dataset_name:
        check_version("datasets", OPTIONAL_VERSIONS["datasets"])
    precision = args.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
    if args.dry_run and precision == "fp16":
        args.mixed_precision = "bf16"  # takes as many bytes, and no GPU
    try:
        accelerator = Accelerator(
            cpu=args.dry_run,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            mixed_precision=args.mixed_precision,
            log_with=None if args.report_to == "none" else args.report_to,
            project_config=ProjectConfiguration(
                project_dir=args.output_dir, logging_dir=os.path.join(args.output_dir, args.logging_dir)
            ),
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=timedelta(hours=2)),
                AutocastKwargs(enabled=False),  # see `compute_lora_in_frozen_precision`
            ],
        )
    except ValueError as problem:
        refuse(str(problem).splitlines()[0])
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM):
        refuse(f"{accelerator.distributed_type.value} is not supported: launch with --multi_gpu, which is DDP")
    args.gradient_accumulation_steps = accelerator.gradient_accumulation_steps  # the launcher's may take precedence
    if accelerator.mixed_precision not in DTYPES:
        refuse(f"mixed precision {accelerator.mixed_precision} is not supported: use --mixed_precision bf16")
    flags = {
        "--mixed_precision": accelerator.mixed_precision,
        "--prior_generation_precision": args.prior_generation_precision,
    }
    for flag, precision in flags.items():
        if accelerator.device.type == "cpu" and precision == "fp16" and not args.dry_run:
            refuse(f"{flag} fp16 needs an accelerator, and this run is on a CPU: use bf16 or no")
    if args.upcast_before_saving and accelerator.mixed_precision == "no":
        refuse("--upcast_before_saving has no effect here: the whole run is in fp32, so leave it out")
    if args.allow_tf32 and not (torch.cuda.is_available() or args.dry_run):
        refuse("--allow_tf32 has no effect here: there is no NVIDIA card, so leave it out")
    set_up_log(args, accelerator)
    return accelerator


def set_up_log(args: argparse.Namespace, accelerator: Accelerator) -> None:
    """Let the main process tell what goes on, and the others what is worth a warning."""
    level = logging.INFO if accelerator.is_main_process else logging.WARNING
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=level, force=True)
    for library in ("httpx", "datasets", "accelerate.checkpointing", "accelerate.accelerator", "fsspec"):
        logging.getLogger(library).setLevel(logging.WARNING)
    # on a GPU it would say at every 8-bit layer of every step that bf16 becomes fp16 on the way to 8 bits
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    # diffusers 0.35, still supported, knows `torch_dtype` only; newer ones warn of it
    warnings.filterwarnings("ignore", message=".*`torch_dtype` is deprecated", category=FutureWarning)
    if args.allow_tf32 and torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = True


def check(args: argparse.Namespace, family: ModelFamily, accelerator: Accelerator, report: "RunReport") -> Run:
    """Phase 1: look at everything that the run will use, refuse what cannot work, and fix the plan."""
    if args.patch_resolution is None:
        args.patch_resolution = min(family.patch_resolution, args.resolution)
    transformer = transformer_structure(args, family)
    check_guidance(args, family, transformer.config)
    check_folders(args)
    # a dataset's cache is made by one process: made by several at once, it fails in some
    with accelerator.main_process_first() if args.dataset_name else contextlib.nullcontext():
        photos, class_photos = load_photos(args), load_class_photos(args)
    checkpoint = find_checkpoint(args)
    with accelerator.main_process_first():
        model_folder = fetch_model(args, family)
    check_shapes(family, model_folder, transformer.config)
    scheduler = family.load_scheduler(model_folder, args)
    check_timesteps(args, scheduler)
    seed = choose_seed(args, accelerator, checkpoint)
    dtype, count = DTYPES[accelerator.mixed_precision], accelerator.num_processes
    plan = make_plan(args, family, transformer, len(photos), seed, count, dtype, checkpoint)
    run = Run(
        args=args,
        family=family,
        accelerator=accelerator,
        report=report,
        model_folder=model_folder,
        model_digest="" if args.dry_run else weights_digest(model_folder),
        transformer_config=transformer.config,
        plan=plan,
        photos=photos,
        class_photos=class_photos[: args.num_class_images],
        scheduler=scheduler,
        checkpoint=checkpoint,
        quantization=read_quantization_config(args, dtype),
    )
    if args.dry_run:
        return run
    for line in plan.describe():
        logger.info(line)
    run.is_finished = is_finished(run)
    if checkpoint and not run.is_finished:
        check_checkpoint(run)
    if not run.is_finished:
        check_residual_folder(run)
        check_disk(plan, run.store())
        prepare_hub(args, accelerator)
        set_earlier_run_aside(run)
        start_trackers(run)
        estimate_run(run)
    return run


def check_guidance(args: argparse.Namespace, family: ModelFamily, config: Mapping[str, Any]) -> None:
    """Refuse a model that wants a guidance scale where the script has none, and a scale for one that takes none."""
    where = f"--pretrained_model_name_or_path {args.pretrained_model_name_or_path}"
    has_flag, takes_guidance = hasattr(args, "guidance_scale"), config.get("guidance_embeds")
    if takes_guidance and not has_flag:
        refuse(f"{where} takes guidance as an input, as distilled models do, which this script does not train")
    if has_flag and not takes_guidance and args.guidance_scale != default_arguments(family).guidance_scale:
        refuse(f"--guidance_scale has no effect here: {where} takes no guidance, so leave it out")


def transformer_structure(args: argparse.Namespace, family: ModelFamily) -> nn.Module:
    """The transformer on the meta device, from its config.json alone: structure without weights."""
    where = f"--pretrained_model_name_or_path {args.pretrained_model_name_or_path}"
    check_hub_name(args)
    try:
        config = family.transformer_class.load_config(
            args.pretrained_model_name_or_path,
            subfolder="transformer",
            revision=args.revision,
            cache_dir=args.cache_dir,
        )
        kind = config.get("_class_name")
    except (OSError, ValueError, AttributeError, RecursionError) as problem:
        refuse(f"{where} has no transformer/config.json that can be read: {str(problem).splitlines()[0]}")
    if kind != family.transformer_class.__name__:
        refuse(f"{where} holds a {kind}; this script trains a {family.transformer_class.__name__}")
    try:
        with torch.device("meta"):
            return family.transformer_class.from_config(config)
    except Exception as problem:  # whatever a number or name that makes no sense leads to
        refuse(f"{where}: its transformer/config.json describes no transformer ({type(problem).__name__}: {problem})")


def check_hub_name(args: argparse.Namespace) -> None:
    """Refuse a model that is no folder, and neither in the cache nor on the hub; it is asked for once, not retried."""
    name = args.pretrained_model_name_or_path
    if os.path.isdir(name):
        return
    where = f"--pretrained_model_name_or_path {name}"
    try:
        validate_repo_id(name)
    except HFValidationError:
        refuse(f"{where} is neither a folder nor the name of a repository on the hub: correct it")
    if isinstance(try_to_load_from_cache(name, "model_index.json", args.cache_dir, args.revision), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "model_index.json", revision=args.revision))
    except Exception as problem:  # of huggingface_hub, or of the library that it uses for the network
        reason = next(iter(str(problem).splitlines()), type(problem).__name__)
        refuse(f"{where} is no folder, and cannot be read from the hub ({reason})")


def nearest_existing(path: pathlib.Path) -> pathlib.Path:
    """The path itself, or the nearest of the folders above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def check_folders(args: argparse.Namespace) -> None:
    """Refuse a folder that cannot be written."""
    if args.dry_run and args.dry_run_json:
        if os.path.isdir(args.dry_run_json):
            refuse(f"--dry_run_json {args.dry_run_json} is a folder: name a file")
        folder = pathlib.Path(args.dry_run_json).absolute().parent
        if not os.access(folder, os.W_OK):
            refuse(f"--dry_run_json {args.dry_run_json}: {folder} is no folder that can be written")
    if args.dry_run:
        return
    folders = {"--output_dir": pathlib.Path(args.output_dir), "--residual_dir": residual_folder(args)}
    if args.with_prior_preservation:
        folders["--class_data_dir"] = pathlib.Path(args.class_data_dir)
    for flag, folder in folders.items():
        existing = nearest_existing(folder)
        if not existing.is_dir():
            refuse(f"{flag} {folder}: {existing} is a file, not a folder")
        if not os.access(existing, os.W_OK):
            refuse(f"{flag} {folder} cannot be written: choose a folder that you may write to")


CONFIG_FILES = ("model_index.json", "*/config.json", "scheduler/scheduler_config.json")


def fetch_model(args: argparse.Namespace, family: ModelFamily) -> str:
    """The pipeline's folder on this machine; a hub repository is downloaded, once."""
    name = args.pretrained_model_name_or_path
    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, "model_index.json")):
            refuse(f"--pretrained_model_name_or_path {name} has no model_index.json, so it is not a pipeline's folder")
        check_components(args, family, pathlib.Path(name))
        return name
    try:
        if args.dry_run:
            return snapshot_download(
                name, revision=args.revision, cache_dir=args.cache_dir, allow_patterns=CONFIG_FILES
            )
        folder = family.pipeline_class.download(
            name, revision=args.revision, variant=args.variant, cache_dir=args.cache_dir, use_safetensors=True
        )
    except (OSError, ValueError) as problem:
        refuse(f"--pretrained_model_name_or_path {name} cannot be downloaded: {str(problem).splitlines()[0]}")
    check_components(args, family, pathlib.Path(folder))
    return folder


def check_components(args: argparse.Namespace, family: ModelFamily, folder: pathlib.Path) -> None:
    """Refuse a local pipeline that lacks a component's configuration, or its weights in safetensors."""
    where = f"--pretrained_model_name_or_path {folder}"
    check_index(folder, where)
    read_config(folder, "scheduler/scheduler_config.json", where)
    for name in ("transformer", "vae", *(part for part in family.text_components if part.startswith("text"))):
        read_config(folder, f"{name}/config.json", where)
        if args.dry_run:
            continue
        files = [path.name for path in (folder / name).glob("*.safetensors")]
        if not files:
            refuse(f"{where} has no weights in safetensors in {name}, and other formats are not loaded")
        indices = list((folder / name).glob("*.safetensors.index*.json"))
        for index in indices:  # of several, some may be of variants that were not downloaded
            check_shards(folder, index, where, must_be_there=len(indices) == 1)
        if args.variant and name == "transformer" and not any(f".{args.variant}." in file for file in files):
            refuse(f"--variant {args.variant} is not among the weights of {where}: {', '.join(sorted(files))}")


def read_config(folder: pathlib.Path, name: str, where: str) -> dict[str, Any]:
    """A JSON file of a pipeline; refuses one that is missing or damaged."""
    try:
        config = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        refuse(f"{where} has no {name}")
    except (OSError, ValueError, RecursionError) as problem:
        refuse(f"{where}: {name} cannot be read ({problem}): download it again")
    if not isinstance(config, dict):
        refuse(f"{where}: {name} is not a JSON object: download it again")
    return config


def check_index(folder: pathlib.Path, where: str) -> None:
    """Refuse a pipeline whose index names classes of other libraries: diffusers would run code out of the folder."""
    index = read_config(folder, "model_index.json", where)
    for name, value in index.items():
        if isinstance(value, list) and value[:1] not in (["diffusers"], ["transformers"], [None]):
            refuse(
                f"{where}: model_index.json takes {name} from {value[0] if value else 'nowhere'}: only classes of "
                "diffusers and transformers are loaded, and no code that a model brings along"
            )
    vae = index.get("vae")
    if not isinstance(vae, list) or len(vae) != 2 or not hasattr(diffusers, str(vae[1])):
        refuse(f"{where}: model_index.json names a VAE that diffusers {diffusers.__version__} does not have: {vae}")


def check_shards(folder: pathlib.Path, index: pathlib.Path, where: str, *, must_be_there: bool) -> None:
    """Refuse weights of which an index of shards names a file that is not in safetensors, or missing."""
    name = index.relative_to(folder).as_posix()
    shards = read_config(folder, name, where).get("weight_map")
    for shard in sorted({str(shard) for shard in shards.values()}) if isinstance(shards, dict) else [str(shards)]:
        if pathlib.PurePath(shard).name != shard or not shard.endswith(".safetensors"):
            refuse(f"{where}: {name} names {shard}, which is no file of weights in safetensors beside it")
        if must_be_there and not (index.parent / shard).is_file():
            refuse(f"{where}: {name} names {shard}, which is missing: download it again")


def check_shapes(family: ModelFamily, folder: str, config: Mapping[str, Any]) -> None:
    """Refuse a transformer that wants other inputs than noisy latents, as models for inpainting or control do."""
    vae = read_config(pathlib.Path(folder), "vae/config.json", f"--pretrained_model_name_or_path {folder}")
    if not isinstance(vae.get("latent_channels"), int):
        refuse(f"--pretrained_model_name_or_path {folder}: vae/config.json names no latent_channels")
    wanted = vae["latent_channels"] * family.latent_cells_per_token
    if config["in_channels"] != wanted:
        refuse(
            f"the transformer in {folder} takes {config['in_channels']} channels, the VAE's latents fill {wanted}: "
            "use a plain text-to-image model"
        )


def check_timesteps(args: argparse.Namespace, scheduler: FlowMatchEulerDiscreteScheduler) -> None:
    """Refuse a shift or density of timesteps that is beyond what floating point numbers can express."""
    sigmas = scheduler.sigmas[: len(scheduler.timesteps)]
    if not (torch.isfinite(sigmas).all() and sigmas.min() > 0 and sigmas.max() <= 1):
        refuse(f"--timestep_shift {args.timestep_shift} leaves no noise levels above 0 and up to 1: take one nearer 1")
    density = compute_density_for_timestep_sampling(
        args.weighting_scheme, 1000, args.logit_mean, args.logit_std, args.mode_scale, generator=keyed_generator(0)
    )
    if not torch.isfinite(density).all():
        refuse("--logit_mean, --logit_std, --mode_scale: no timestep follows from numbers as large as these")


def choose_seed(args: argparse.Namespace, accelerator: Accelerator, checkpoint: pathlib.Path | None) -> int:
    """The seed given; else that of the run being continued, by what it left; else a fresh one."""
    if args.seed is not None:
        return args.seed
    if checkpoint:
        return read_checkpoint_state(checkpoint)["settings"]["--seed"]
    if args.resume_from_checkpoint:  # of a run that ended before its first checkpoint
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads(pathlib.Path(args.output_dir, "run_report.json").read_text())["settings"]["--seed"])
    with contextlib.suppress(DamagedResidual, KeyError):
        if manifest := ResidualStore(residual_folder(args), torch.float32).manifest():
            return manifest["fingerprint"]["seed"]
    seed = [int.from_bytes(os.urandom(4), "big") >> 1]
    broadcast_object_list(seed)
    return seed[0]


def make_plan(
    args: argparse.Namespace,
    family: ModelFamily,
    transformer: nn.Module,
    num_photos: int,
    seed: int,
    num_processes: int,
    weight_dtype: torch.dtype,
    checkpoint: pathlib.Path | None = None,
) -> Plan:
    """Fix every number of the run; refuses skip counts and LoRA layers that the transformer does not allow."""
    depth = len(named_blocks(transformer))
    first, last, source = skip_counts(args, transformer, checkpoint)
    try:
        check_skip_counts(depth, first, last)
    except ValueError as problem:
        refuse(f"--skip_first, --skip_last: {problem}")
    samples = num_photos * args.repeats
    per_step = num_processes * args.train_batch_size * args.gradient_accumulation_steps
    max_steps = args.max_train_steps or 500
    if args.num_train_epochs and args.max_train_steps:
        logger.info(f"--max_train_steps {max_steps} decides; --num_train_epochs {args.num_train_epochs} is not used")
    elif args.num_train_epochs:
        max_steps = args.num_train_epochs * _steps_per_epoch(
            samples, num_processes, args.train_batch_size, args.gradient_accumulation_steps
        )
    period_steps = min(args.residual_refresh_steps or max_steps, max_steps)
    num_draws = min(args.num_draws or period_steps * per_step, period_steps * per_step)
    if args.num_draws and args.num_draws > num_draws:
        logger.info(f"--num_draws {args.num_draws} is more than the {num_draws} samples of {period_steps} steps")
    if num_draws < num_photos and not args.residual_refresh_steps:
        warn(f"{num_draws} draws leave photos out: there are {num_photos}")
    if num_draws < num_processes:
        refuse(f"--num_draws {num_draws} leaves a process without any: give at least {num_processes}, one per process")
    return Plan(
        model=family.name,
        depth=depth,
        skip_first=first,
        skip_last=last,
        skip_source=source,
        resolution=args.resolution,
        patch_resolution=args.patch_resolution,
        pixel_multiple=family.layout.pixels_per_token,
        patch_schedule=args.patch_schedule,
        seed=seed,
        num_processes=num_processes,
        batch_size=args.train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        samples_per_epoch=samples,
        max_steps=max_steps,
        period_steps=period_steps,
        num_draws=num_draws,
        **of_skip_counts(args, family, transformer, first, last, weight_dtype),
    )


def of_skip_counts(
    args: argparse.Namespace,
    family: ModelFamily,
    transformer: nn.Module,
    first: int,
    last: int,
    weight_dtype: torch.dtype,
) -> dict[str, Any]:
    """The entries of the plan that depend on the skip counts; refuses LoRA layers that they leave none of."""
    names = [name.strip() for name in (args.lora_layers or "").split(",") if name.strip()]
    try:
        targets = lora_target_names(transformer, first, last, names or family.layout.lora_layers)
    except ValueError as problem:
        refuse(f"--lora_layers: {problem}")
    layers = [transformer.get_submodule(name) for name in targets]
    widest = max(max(layer.weight.shape[:2]) for layer in layers)
    if args.rank > widest:
        refuse(f"--rank {args.rank} is above {widest}, the width of the widest layer that gets a LoRA: lower it")
    modulations = modulation_names(transformer, first, last, targets)
    modulation_width = sum(transformer.get_submodule(name).out_features for name in modulations)
    header = 2048 + 128 * len(modulations)  # about
    bytes_per_draw = draw_bytes(args, family, transformer, first, last)
    bytes_per_draw += modulation_width * weight_dtype.itemsize + header
    return {
        "bytes_per_draw": bytes_per_draw * (2 if args.with_prior_preservation else 1),
        "lora_targets": tuple(targets),
        "modulations": tuple(modulations),
    }


def draw_bytes(args: argparse.Namespace, family: ModelFamily, transformer: nn.Module, first: int, last: int) -> int:
    """Bytes of a draw's latents in fp32, and of its residuals, of both streams in front and of the image's behind."""
    config = transformer.config
    image_tokens = (args.patch_resolution // family.layout.pixels_per_token) ** 2
    width = config.num_attention_heads * config.attention_head_dim
    has_text_stream = "encoder_hidden_states" in block_layout(transformer).returns
    tokens = 0
    if first:
        tokens += image_tokens + (args.max_sequence_length if has_text_stream else 0)
    if last:
        tokens += image_tokens
    return tokens * width * DTYPES[args.residual_dtype].itemsize + image_tokens * config.in_channels * 4


def photos_digest(photos: list[Photo]) -> str:
    """A digest of photos and their captions."""
    return hashlib.sha256(repr([(photo.digest, photo.caption) for photo in photos]).encode()).hexdigest()


OF_THE_PAIR = ("skip counts", "layers stored beside the residuals")  # entries that follow from the skip counts


def fingerprint(run: Run, period: Period, period_lora: str | None) -> dict[str, Any]:
    """Everything that stored draws depend on, by name; draws are used again only where all of it is the same.

    The number of draws is not part of it: a draw depends on its index alone.
    """
    args, plan = run.args, run.plan
    return {
        "base weights": [run.model_digest, args.variant],
        "photos and captions": photos_digest(run.photos),
        "class images": photos_digest(run.class_photos) if args.with_prior_preservation else None,
        "prior loss weight": args.prior_loss_weight,
        "repeats": args.repeats,
        "sizes": [plan.resolution, plan.patch_resolution, plan.patch_schedule],
        "cropping": [args.center_crop, args.random_flip, args.image_interpolation_mode],
        "skip counts": [plan.skip_first, plan.skip_last],
        "layers stored beside the residuals": list(plan.modulations),
        "timesteps": [args.weighting_scheme, args.logit_mean, args.logit_std, args.mode_scale, args.timestep_shift],
        "text": {name: getattr(args, name) for name in run.family.text_flags},
        "precision": [str(run.weight_dtype), args.residual_dtype, args.precompute_batch_size, args.enable_vae_tiling],
        "quantisation": quantization_settings(run),
        "device": [run.accelerator.device.type, args.allow_tf32, args.enable_npu_flash_attention],
        "seed": plan.seed,
        "processes": plan.num_processes,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "diffusers", "transformers")},
        "period": [period.number, plan.num_draws if period.number else None, period_lora],
    }


def quantization_settings(run: Run) -> dict[str, Any] | None:
    """What decides the bits of quantised weights; None where none are."""
    if not run.quantization:
        return None
    return {**run.quantization.to_dict(), "bitsandbytes": importlib.metadata.version("bitsandbytes")}


def check_residual_folder(run: Run) -> None:
    """Refuse a residual folder that holds the draws of another run; of the same run's periods, another is fine."""
    store = run.store()
    try:
        manifest = store.manifest()
    except DamagedResidual as problem:
        refuse(f"{problem}: delete {store.folder} or give another --residual_dir")
    if manifest is None:
        if foreign := next((p for p in store.own_files() if p.suffix != ".partial"), None):
            refuse(f"{store.folder} holds {foreign.name} but no {MANIFEST}: delete it or give another --residual_dir")
        return
    found, wanted = manifest["fingerprint"], fingerprint(run, Period(0, 0, 0), None)
    ignored = {"period"} | ({"class images"} if run.class_photos_missing else set())
    ignored |= set(OF_THE_PAIR) if run.plan.pair_is_open else set()
    differing = [name for name in wanted if name not in ignored and found.get(name) != wanted[name]]
    if differing:
        refuse(
            f"{store.folder} holds the residuals of another run, which differs in {', '.join(differing)}: "
            "delete that folder or give another --residual_dir"
        )


def check_disk(plan: Plan, store: ResidualStore) -> None:
    """Refuse a run whose draws do not fit the disk; draws that are there already count as fitting."""
    folder = store.folder
    present = sum(path.stat().st_size for path in store.own_files())
    free = shutil.disk_usage(nearest_existing(folder)).free
    if plan.residual_bytes - present > free:
        refuse(
            f"{folder} needs {readable(plan.residual_bytes)} for {plan.num_draws} draws and {readable(free)} "
            "are free: give --residual_dir on a larger disk, fewer --num_draws, or --residual_refresh_steps"
        )


PAIR = "the skip counts"
CLASS_IMAGES = "the class images of digest"
MAY_CHANGE_ON_RESUME = frozenset(
    [
        "pretrained_model_name_or_path",
        "revision",
        "cache_dir",
        "instance_data_dir",
        "dataset_name",
        "dataset_config_name",
        "image_column",
        "caption_column",
        "instance_prompt",
        "class_data_dir",
        "num_class_images",
        "sample_batch_size",
        "prior_generation_precision",
        "seed",
        "output_dir",
        "logging_dir",
        "residual_dir",
        "keep_residuals",
        "report_to",
        "push_to_hub",
        "hub_token",
        "hub_model_id",
        "resume_from_checkpoint",
        "checkpointing_steps",
        "checkpoints_total_limit",
        "validation_prompt",
        "num_validation_images",
        "validation_epochs",
        "max_train_steps",
        "num_train_epochs",
        "dataloader_num_workers",
        "gradient_checkpointing",
        "upcast_before_saving",
        "cache_latents",
        "local_rank",
        "offload",
        "mixed_precision",
        "bnb_quantization_config_path",
        "dry_run",
        "dry_run_json",
        "device_memory_gb",
        "block_curves",
    ]
)


def run_settings(run: Run) -> dict[str, Any]:
    """What must be the same for a run to go on as it began, by the name that a user knows it by."""
    flags = {f"--{name}": value for name, value in vars(run.args).items() if name not in MAY_CHANGE_ON_RESUME}
    settings = {
        **flags,
        "--seed": run.plan.seed,
        PAIR: None if run.plan.pair_is_open else [run.plan.skip_first, run.plan.skip_last],
        "--mixed_precision": run.accelerator.mixed_precision,
        "--bnb_quantization_config_path": quantization_settings(run),
        "the number of processes": run.plan.num_processes,
        "the photos and captions of digest": photos_digest(run.photos),
        CLASS_IMAGES: photos_digest(run.class_photos) if run.args.with_prior_preservation else None,
        "the base model of digest": run.model_digest,
    }
    return json.loads(json.dumps(settings))


def is_finished(run: Run) -> bool:
    """Whether the run to be resumed had ended: its LoRA and the report of just this run, with as many steps, stand."""
    if run.args.resume_from_checkpoint != "latest" or not (run.output / LORA_FILE).is_file():
        return False
    try:
        report = json.loads((run.output / "run_report.json").read_text())
        then, now = report["settings"], run_settings(run)
        if run.plan.pair_is_open:  # the finished run had measured it
            now[PAIR] = then[PAIR]
        if run.class_photos_missing:  # the finished run had made them
            now[CLASS_IMAGES] = then[CLASS_IMAGES]
        return report["steps"] >= run.plan.max_steps and then == now
    except (OSError, ValueError, KeyError, TypeError):
        return False


def set_earlier_run_aside(run: Run) -> None:
    """Move what this run would overwrite or leave behind its back into a subfolder of the output folder.

    That is all that an earlier run left there; of a run being resumed, its result and the checkpoints beyond the one
    that it is resumed from.
    """
    if not run.output.is_dir() or not run.accelerator.is_main_process:
        return
    names = [LORA_FILE, "run_report.json", "README.md"]
    products = [run.output / name for name in names if (run.output / name).exists()]
    products += [path for path, step in all_checkpoints(run.output) if step > run.start_step or not run.checkpoint]
    if not run.checkpoint:
        logs = (run.output / run.args.logging_dir).resolve()
        own = [run.output / "validation"] + ([logs] if logs.parent == run.output.resolve() else [])
        own += [] if reads_own_curves(run) else [run.output / CURVES_FILE]
        products += [path for path in own if path.exists()]
    if not products:
        return
    number = 1
    while (run.output / f"earlier-{number}").exists():
        number += 1
    folder = run.output / f"earlier-{number}"
    folder.mkdir()
    for path in products:
        path.rename(folder / path.name)
    logger.info(f"what an earlier run left in {run.output} is now in {folder}")


def start_trackers(run: Run) -> None:
    """Start the trackers with the flags of the run, all but the token."""
    config = {name: value for name, value in vars(run.args).items() if name != "hub_token"}
    try:
        run.accelerator.init_trackers(
            f"dreambooth-{run.family.name.lower()}-blockskip-lora",
            config={n: v if isinstance(v, int | float | str | bool) else str(v) for n, v in config.items()},
            # steps that a killed run had logged beyond its checkpoint are logged again, and count once
            init_kwargs={"tensorboard": {"purge_step": run.start_step + 1}} if run.checkpoint else {},
        )
    except Exception as problem:  # each tracker has its own: no login, no network, no folder
        reason = next(iter(str(problem).splitlines()), type(problem).__name__)
        refuse(f"--report_to {run.args.report_to} cannot be started ({reason}): log in to it, or use --report_to none")


# ===================================================================================================================
# 8. Prompts and class images
# ===================================================================================================================


def encode_prompts(run: Run) -> dict[str, dict[str, torch.Tensor]]:
    """Phase 2: encode every prompt that the run will use."""
    args = run.args
    prompts = [photo.caption for photo in run.photos]
    prompts += [args.class_prompt] if args.with_prior_preservation else []
    prompts += [args.validation_prompt] if run.validates_in_training else []
    prompts += run.family.extra_prompts if run.validates_in_training or run.class_photos_missing else []
    return encode_each(run, prompts)


@torch.no_grad()
def encode_each(run: Run, prompts: Iterable[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Run the text encoders once per distinct prompt, then let go of them.

    Returns:
        For each prompt its tensors, (1, ...), in host memory.
    """
    pipeline = run.family.pipeline_class.from_pretrained(
        run.model_folder,
        transformer=None,
        vae=None,
        torch_dtype=run.weight_dtype,
        variant=run.args.variant,
        use_safetensors=True,
    )
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            place(run, component, whole=True)
    encoded = {}
    for prompt in tqdm(dict.fromkeys(prompts), "encode prompts", disable=not run.accelerator.is_local_main_process):
        tensors = run.family.encode_prompt(run, pipeline, prompt)
        encoded[prompt] = {name: tensor.cpu() for name, tensor in tensors.items()}
    del pipeline, component
    free_memory()
    return encoded


def stack_prompts(encoded: Mapping[str, dict[str, torch.Tensor]], prompts: list[str]) -> dict[str, torch.Tensor]:
    """The tensors of a batch: row i belongs to prompt i."""
    return {name: torch.cat([encoded[prompt][name] for prompt in prompts]) for name in encoded[prompts[0]]}


def place(run: Run, module: nn.Module, *, whole: bool = False) -> None:
    """Have a frozen module compute on the device: moved there, or with --offload passing through it layer by layer.

    Args:
        whole: The module is a whole model that is called by its forward, with the same layers in the same order every
            time: then on CUDA each layer is fetched on a stream while the one before it computes. diffusers does not
            wait for parameters of the outermost module there, so a model that has some does without.
    """
    device = run.accelerator.device
    if not run.args.offload:
        module.to(device)
        return
    if device.type == "cpu" and Version(diffusers.__version__) < Version("0.36"):
        return  # it cannot offload without an accelerator, and there is nowhere to offload from
    has_own = next(module.parameters(recurse=False), None) is not None
    use_stream = whole and device.type == "cuda" and not has_own
    # pinned on the way: else all of the module would lie in pinned memory, which is not given back
    options = {"use_stream": True, "low_cpu_mem_usage": True} if use_stream else {}
    apply_group_offloading(module, onload_device=device, offload_type="leaf_level", **options)


def take_back(module: nn.Module) -> None:
    """Bring a module that was placed back to host memory, as it was."""
    registry = HookRegistry.check_if_exists_or_initialize(module)
    for name in ("lazy_prefetch_group_offloading", "layer_execution_tracker", "group_offloading"):
        registry.remove_hook(name, recurse=True)
    module.to("cpu")


def load_vae(run: Run) -> nn.Module:
    """The VAE in fp32, in which neither FLUX's nor SANA's overflows, in host memory."""
    index = read_config(pathlib.Path(run.model_folder), "model_index.json", "--pretrained_model_name_or_path")
    vae_class = getattr(diffusers, index["vae"][1])
    vae = vae_class.from_pretrained(
        run.model_folder, subfolder="vae", torch_dtype=torch.float32, variant=run.args.variant, use_safetensors=True
    )
    if run.args.enable_vae_tiling:
        work_in_tiles(vae)
    return vae.requires_grad_(False).eval()


TILE = 512  # pixels


def work_in_tiles(vae: nn.Module) -> None:
    """Let a VAE encode and decode images larger than `TILE` in overlapping tiles of that side, blended."""
    vae.enable_tiling()
    if hasattr(vae, "tile_latent_min_size"):  # an AutoencoderKL's tiles are as large as the images it was trained on
        pixels_per_cell = 2 ** (len(vae.config.block_out_channels) - 1)
        vae.tile_sample_min_size, vae.tile_latent_min_size = TILE, TILE // pixels_per_cell


@contextlib.contextmanager
def decoding_in_little_memory(run: Run, vae: nn.Module) -> Iterator[None]:
    """With --offload, decode large images in tiles: at 1024 px the VAE of FLUX would take 3 GiB for activations."""
    in_tiles_already = vae.use_tiling
    if run.args.offload:
        work_in_tiles(vae)
    try:
        yield
    finally:
        vae.use_tiling = in_tiles_already


def load_transformer(run: Run, dtype: torch.dtype) -> nn.Module:
    """The frozen transformer, in host memory."""
    transformer = run.family.transformer_class.from_pretrained(
        run.model_folder,
        subfolder="transformer",
        torch_dtype=dtype,
        variant=run.args.variant,
        use_safetensors=True,
    )
    if run.args.enable_npu_flash_attention:
        transformer.set_attention_backend("_native_npu")
    return transformer.requires_grad_(False).eval()


def image_pipeline(run: Run, transformer: nn.Module, vae: nn.Module) -> Any:
    """A pipeline that draws images from encoded prompts: no text encoder is loaded."""
    return run.family.pipeline_class.from_pretrained(
        run.model_folder, transformer=transformer, vae=vae, **dict.fromkeys(run.family.text_components)
    )


def make_class_images(run: Run, prompts: Mapping[str, dict[str, torch.Tensor]]) -> None:
    """Generate the class images that prior preservation lacks; each depends on its number only, not on the process."""
    args, accelerator = run.args, run.accelerator
    folder = pathlib.Path(args.class_data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    own = re.compile(r"blockskip-class-\d{5}\.png")
    of_the_user = sum(not own.fullmatch(photo.name) for photo in run.class_photos)
    paths = [folder / f"blockskip-class-{number:05d}.png" for number in range(args.num_class_images - of_the_user)]
    missing = [(number, path) for number, path in enumerate(paths) if not path.exists()]
    accelerator.wait_for_everyone()  # before any process writes: all must share out the same list
    dtype = DTYPES[args.prior_generation_precision or accelerator.mixed_precision]
    transformer, vae = load_transformer(run, dtype), load_vae(run)
    place(run, transformer, whole=True)
    place(run, vae)
    pipeline = image_pipeline(run, transformer, vae)
    pipeline.set_progress_bar_config(disable=True)
    mine = missing[accelerator.process_index :: accelerator.num_processes]
    bar = tqdm(total=len(mine), desc="class images", disable=not accelerator.is_local_main_process)
    for begin in range(0, len(mine), args.sample_batch_size):
        batch = mine[begin : begin + args.sample_batch_size]
        generators = [keyed_generator(run.plan.seed, "class image", number) for number, _ in batch]
        with decoding_in_little_memory(run, vae):
            images = run.family.generate_images(run, pipeline, prompts, args.class_prompt, generators)
        for (_, path), image in zip(batch, images, strict=True):
            write_atomically(path, lambda partial, image=image: image.save(partial, format="PNG"))
        bar.update(len(batch))
    del transformer, vae, pipeline
    free_memory()
    accelerator.wait_for_everyone()
    run.class_photos = load_class_photos(args)[: args.num_class_images]
    if run.class_photos_missing:
        refuse(f"--class_data_dir {folder} still lacks {run.class_photos_missing} images: is it on a shared disk?")


# ===================================================================================================================
# 9. Choose blocks: which ones to skip, by hiding the text from the image
# ===================================================================================================================

TO_BE_MEASURED = "to be measured in this run"
CURVES_FILE = "block_curves.json"
PROBE_DRAWS = 8  # noisy latents that a run measures with: each a photo at another noise level
WINDOW_SHARE = 14 / 57  # of the depth: the paper's sliding window on FLUX.1-dev


@contextlib.contextmanager
def mask_text(transformer: nn.Module, blocks: Iterable[int]) -> Iterator[None]:
    """Hide the text from the image in some blocks, as the paper's block selection does; nothing else changes.

    Within the context the scores of image queries for text keys are masked out in these blocks. In a joint attention
    (FLUX) the image then attends to the image alone, and the text still to both. A cross-attention (SANA) has no other
    keys: its sum over none of them is zero, and of the layer only the bias of its output is left. A prompt's pooled
    embedding, which FLUX adds to the timestep's, is no key and stays.

    LoRA, quantised weights, offloading and gradient checkpointing may be in place. Of diffusers' attention backends,
    those that take no mask cannot be used meanwhile.

    Args:
        transformer: With all its blocks.
        blocks: Indices in data order, counted over all stacks; none of them is allowed.

    Raises:
        ValueError: There is no block of such an index; the message names the depth.
        RuntimeError: Blocks of the transformer are skipped at the moment.
    """
    layout, named = block_layout(transformer), list(named_blocks(transformer).values())
    indices = sorted(set(blocks))
    if indices and not 0 <= indices[0] <= indices[-1] < len(named):
        raise ValueError(f"blocks to mask must lie from 0 to {len(named) - 1}, got {indices} of {len(named)}")
    if any(isinstance(block, _SkippedBlock) for block in named):
        raise RuntimeError("text is masked in the full model: call restore() on the handle of skip_blocks first")
    hooks = []
    try:
        for index in indices:
            if "encoder_hidden_states" in layout.returns:  # text and image attend to each other
                hooks.append(named[index].register_forward_pre_hook(_mask_joint_attention, with_kwargs=True))
            else:
                attention = named[index].get_submodule(layout.text_attention)
                hooks.append(attention.to_out[0].register_forward_pre_hook(_attend_to_nothing))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _mask_joint_attention(block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Give a block's attention a mask that hides the text, which comes first, from the image."""
    bound = inspect.signature(type(block).forward).bind(block, *args, **kwargs)
    inputs = bound.arguments
    text, image = (inputs[stream].shape[1] for stream in ("encoder_hidden_states", "hidden_states"))
    # not of two dimensions, which some attention backends take for (B, keys)
    visible = torch.ones(1, 1, text + image, text + image, dtype=torch.bool, device=inputs["hidden_states"].device)
    visible[..., text:, :text] = False  # rows are queries
    inputs["joint_attention_kwargs"] = {**(inputs.get("joint_attention_kwargs") or {}), "attention_mask": visible}
    return bound.args[1:], bound.kwargs


def _attend_to_nothing(output_layer: nn.Module, args: tuple) -> tuple:
    """Feed an attention's output layer what attending to no key gives: zeros."""
    return (torch.zeros_like(args[0]), *args[1:])


@dataclasses.dataclass(frozen=True)
class BlockCurves:
    """How far the output moves when the text is hidden from the image in some blocks; 0 is not at all.

    Each entry is a mean over samples of 1 - cosine between the output and the one with nothing masked, in [0, 2].

    Attributes:
        depth: Blocks of the model.
        first, last: Entry i is with the first, or last, i blocks masked, for i from 0 to depth - 1.
        window: Entry i is with `window_size` blocks from block i on masked.
        window_size: Blocks of the sliding window.
        metric: "prediction" compares velocities, "image" embeddings of generated images.
        samples: How many the mean is over.
        measured_on: Names what was measured: model, LoRAs, prompts and so on. Only for readers.
    """

    depth: int
    first: tuple[float, ...]
    last: tuple[float, ...]
    window: tuple[float, ...] = ()
    window_size: int = 0
    metric: str = "unknown"
    samples: int = 0
    measured_on: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def save(self, path: pathlib.Path) -> None:
        """Write the curves as JSON, atomically."""
        text = json.dumps(dataclasses.asdict(self), indent=2)
        write_atomically(path, lambda partial: partial.write_text(text))

    @classmethod
    def load(cls, path: pathlib.Path) -> "BlockCurves":
        """Read curves; ValueError, in words that go behind the file's name, if it does not hold any."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as problem:
            raise ValueError(f"cannot be read: {problem.strerror}") from None
        except ValueError:
            raise ValueError("is not JSON") from None
        if not isinstance(content, dict) or not {"depth", "first", "last"} <= content.keys():
            raise ValueError("holds no curves of blocks: it must be an object with depth, first and last")
        given = {field.name: content[field.name] for field in dataclasses.fields(cls) if field.name in content}
        curves = cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
        curves._check()
        return curves

    def _check(self) -> None:
        if type(self.depth) is not int or self.depth < 1:
            raise ValueError(f"has {self.depth!r} as depth")
        if type(self.window_size) is not int or not 0 <= self.window_size <= self.depth:
            raise ValueError(f"has {self.window_size!r} as window_size")
        lengths = {"first": self.depth, "last": self.depth}
        lengths |= {"window": self.depth - self.window_size + 1} if self.window else {}
        for name, length in lengths.items():
            values = getattr(self, name)
            if not isinstance(values, tuple) or len(values) != length:
                raise ValueError(f"has no list of {length} numbers as {name}, though its depth is {self.depth}")
            if not all(type(value) in (int, float) and 0 <= value <= 2 for value in values):
                raise ValueError(f"has something else than distances from 0 to 2 in {name}")


def window_size(depth: int) -> int:
    """Blocks of the sliding window in a model of `depth` blocks: 14 of 57, as in the paper, or the same share."""
    return max(1, math.floor(WINDOW_SHARE * depth + 0.5))


def block_masks(depth: int) -> list[tuple[int, int]]:
    """The sets of blocks that the curves need masked, each once: (start, end), end not included."""
    size = window_size(depth)
    first = [(0, n) for n in range(1, depth)]
    last = [(depth - m, depth) for m in range(1, depth)]
    window = [(start, start + size) for start in range(depth - size + 1)]
    return list(dict.fromkeys(first + last + window))


def cosine_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """1 - cosine of the angle between two tensors taken as vectors; exactly 0 for equal ones.

    FloatingPointError if one of them is not finite.
    """
    one, other = (nn.functional.normalize(tensor.detach().flatten().double().cpu(), dim=0) for tensor in (one, other))
    distance = 0.5 * (one - other).square().sum().item()  # the same number, without the cancellation near 0
    if not math.isfinite(distance):
        raise FloatingPointError("what the model returns is not a finite number")
    return distance


def measure_distances(
    transformer: nn.Module,
    samples: Mapping[str, Callable[[], torch.Tensor]],
    *,
    known: Mapping[str, Mapping[str, float]] | None = None,
    on_distance: Callable[[str, str, float], None] = lambda *_: None,
    show_progress: bool = True,
) -> dict[str, dict[str, float]]:
    """Compare each sample's output with its outputs under every mask of `block_masks` (the paper's block selection).

    Args:
        transformer: Is masked while samples are taken.
        samples: By name, functions that run the model and return what is compared: a velocity, an embedding.
        known: Distances measured earlier, as returned; they are not measured again.
        on_distance: Is told (sample, mask, distance) of each new one.
        show_progress: Whether to draw a progress bar.

    Returns:
        For each sample the distance by mask, "start-end".
    """
    masks = {f"{start}-{end}": range(start, end) for start, end in block_masks(len(named_blocks(transformer)))}
    distances = {name: dict((known or {}).get(name, {})) for name in samples}
    bar = tqdm(total=len(samples) * len(masks), desc="choose blocks", disable=not show_progress)
    for name, take in samples.items():
        missing = [mask for mask in masks if mask not in distances[name]]
        bar.update(len(masks) - len(missing))
        reference = take() if missing else None
        for mask in missing:
            with mask_text(transformer, masks[mask]):
                distances[name][mask] = cosine_distance(reference, take())
            on_distance(name, mask, distances[name][mask])
            bar.update()
    bar.close()
    return distances


def make_curves(
    depth: int, metric: str, distances: Iterable[Mapping[str, float]], measured_on: Mapping[str, Any]
) -> BlockCurves:
    """The curves from the distances of each sample, by mask, as `measure_distances` finds them."""
    distances, size = list(distances), window_size(depth)

    def mean(start: int, end: int) -> float:
        if start == end:
            return 0.0
        return math.fsum(of_sample[f"{start}-{end}"] for of_sample in distances) / len(distances)

    return BlockCurves(
        depth=depth,
        first=tuple(mean(0, n) for n in range(depth)),
        last=tuple(mean(depth - m, depth) for m in range(depth)),
        window=tuple(mean(start, start + size) for start in range(depth - size + 1)),
        window_size=size,
        metric=metric,
        samples=len(distances),
        measured_on=dict(measured_on),
    )


def skip_count(ratio: float, depth: int) -> int:
    """How many of `depth` blocks a ratio skips: the nearest whole number, halves up."""
    return math.floor(ratio * depth + 0.5)


def choose_skip_counts(curves: BlockCurves, count: int, parameters: Iterable[int]) -> tuple[int, int]:
    """The pair (first, last) of `count` blocks in sum whose masking moves the output least (the paper's selection).

    That is the least first[n] + last[m] over n + m = count. Of pairs that are equal to nine decimals, which is finer
    than any model computes, the one is taken whose skipped blocks hold most parameters, and then the one with more
    blocks at the front, where residuals are exact.

    Args:
        curves: Of the model, any number of blocks.
        count: From 0 to depth - 1.
        parameters: Of each block, in data order.

    Raises:
        ValueError: The count leaves no block to train, or `parameters` are of another model.
    """
    sizes = list(parameters)
    check_skip_counts(curves.depth, count, 0)
    if len(sizes) != curves.depth:
        raise ValueError(f"the curves are of {curves.depth} blocks, the parameters of {len(sizes)}")

    def rank(first: int) -> tuple[float, int, int]:
        last = count - first
        skipped = sum(sizes[:first]) + sum(sizes[len(sizes) - last :])
        return round(curves.first[first] + curves.last[last], 9), -skipped, -first

    first = min(range(count + 1), key=rank)
    return first, count - first


def block_parameters(transformer: nn.Module) -> list[int]:
    """Parameters of each block, in data order."""
    return [sum(p.numel() for p in block.parameters()) for block in named_blocks(transformer).values()]


def skip_counts(
    args: argparse.Namespace, transformer: nn.Module, checkpoint: pathlib.Path | None
) -> tuple[int, int, str]:
    """The pair of skip counts that flags, files and publications settle, and where it came from.

    With `--skip_ratio`, in this order: measured curves, the paper's pairs, what the run to be resumed had chosen.
    Where none is there, the pair is open until phase 3 and both ends get half: as many residuals as any pair has.
    """
    depth = len(named_blocks(transformer))
    if args.skip_ratio is None:
        return args.skip_first, args.skip_last, "as given"
    count = skip_count(args.skip_ratio, depth)
    if not 0 < count < depth:
        effect = "skips none" if count == 0 else "leaves none to train"
        nearest = math.ceil(500 / depth) / 1000 if count == 0 else (depth - 1) / depth
        refuse(f"--skip_ratio {args.skip_ratio} of {depth} blocks {effect}: try {nearest:.3g}")
    if args.block_curves:
        curves = _read_curves(args.block_curves, depth)
        return *choose_skip_counts(curves, count, block_parameters(transformer)), f"curves {args.block_curves}"
    layout = block_layout(transformer)
    stacks = tuple(len(getattr(transformer, stack)) for stack in layout.stacks)
    if pair := layout.published_pairs.get(stacks, {}).get(count):
        return *pair, f"published for {count} of {depth} blocks in arXiv 2603.20755"
    if checkpoint:
        plan = read_checkpoint_state(checkpoint)["plan"]
        if plan["skip_first"] + plan["skip_last"] == count and plan["depth"] == depth:
            return plan["skip_first"], plan["skip_last"], plan["skip_source"]
    return count - count // 2, count // 2, TO_BE_MEASURED


def _read_curves(file: str, depth: int) -> BlockCurves:
    try:
        curves = BlockCurves.load(pathlib.Path(file))
    except ValueError as problem:
        refuse(f"--block_curves {file} {problem}: measure it with examples/select_blocks.py")
    if curves.depth != depth:
        refuse(f"--block_curves {file} is of a model of {curves.depth} blocks, and this one has {depth}: measure anew")
    return curves


def choose_blocks(run: Run, prompts: Mapping[str, dict[str, torch.Tensor]]) -> None:
    """Phase 3, with --skip_ratio: settle which blocks are skipped, measuring it where nothing else says it.

    The curves are kept in OUTPUT/block_curves.json; a run that is begun again finds them there.
    """
    if run.plan.pair_is_open:
        stored = [stored_curves(run) if run.accelerator.is_main_process else None]
        broadcast_object_list(stored)  # whether to measure is for one process to say
        complete_plan(run, stored[0] or measure_curves(run, prompts))
        check_residual_folder(run)  # in the check phase the counts were not known
        check_disk(run.plan, run.store())
        estimate_run(run)
    logger.info(run.plan.describe()[0])


def complete_plan(run: Run, curves: BlockCurves) -> None:
    """Put the pair that the curves choose into the run's plan, and all that depends on it."""
    plan = run.plan
    with torch.device("meta"):
        transformer = run.family.transformer_class.from_config(run.transformer_config)
    count = plan.skip_first + plan.skip_last
    first, last = choose_skip_counts(curves, count, block_parameters(transformer))
    run.plan = dataclasses.replace(
        plan,
        skip_first=first,
        skip_last=last,
        skip_source="measured in this run",
        **of_skip_counts(run.args, run.family, transformer, first, last, run.weight_dtype),
    )


def curves_fingerprint(run: Run) -> dict[str, Any]:
    """Everything that curves measured in a run depend on, by name."""
    of_training = ("period", "class images", "prior loss weight", "repeats", "processes", "cropping", "quantisation")
    wanted = fingerprint(run, Period(0, 0, 0), None)
    wanted = {name: value for name, value in wanted.items() if name not in (*of_training, *OF_THE_PAIR)}
    return json.loads(json.dumps(wanted))


def stored_curves(run: Run) -> BlockCurves | None:
    """The curves in the output folder, if this run would measure the same ones."""
    with contextlib.suppress(ValueError):
        curves = BlockCurves.load(run.output / CURVES_FILE)
        if curves.depth == run.plan.depth and curves.measured_on == curves_fingerprint(run):
            return curves
    return None


def reads_own_curves(run: Run) -> bool:
    """Whether the curves in the output folder are those that this run goes by, or would measure again."""
    if run.args.block_curves:
        return os.path.realpath(run.args.block_curves) == os.path.realpath(run.output / CURVES_FILE)
    return run.plan.pair_is_open and stored_curves(run) is not None


def measure_curves(run: Run, prompts: Mapping[str, dict[str, torch.Tensor]]) -> BlockCurves:
    """Measure the curves of the frozen model on noisy latents of the subject's photos, shared among the processes."""
    accelerator = run.accelerator
    mine = probe_latents(run)[accelerator.process_index :: accelerator.num_processes]
    transformer = load_transformer(run, run.weight_dtype)
    place(run, transformer, whole=True)
    samples = {
        draw.name: functools.partial(
            probe_pass, run, transformer, noisy.to(accelerator.device), draw.timestep, prompts[draw.prompt]
        )
        for draw, noisy in mine
    }
    try:
        measured = measure_distances(transformer, samples, show_progress=accelerator.is_local_main_process)
    except FloatingPointError as problem:
        refuse(f"--skip_ratio cannot measure: {problem}; use --mixed_precision bf16 or no", every_process=True)
    del transformer, samples
    free_memory()
    everything = dict(gather_object(list(measured.items())))  # from all processes, to all
    distances = [everything[name] for name in sorted(everything)]
    curves = make_curves(run.plan.depth, "prediction", distances, curves_fingerprint(run))
    if accelerator.is_main_process:
        run.output.mkdir(parents=True, exist_ok=True)
        curves.save(run.output / CURVES_FILE)
    accelerator.wait_for_everyone()
    return curves


def probe_draws(run: Run) -> list[Draw]:
    """The fixed draws that blocks are judged by: the photos in turn, at noise levels spread evenly over the table.

    Each is cropped from the middle, to the side that training would take at its noise level.
    """
    plan, timesteps, sigmas = run.plan, run.scheduler.timesteps.tolist(), run.scheduler.sigmas.tolist()
    draws = []
    for number in range(PROBE_DRAWS):
        entry = int((number + 0.5) / PROBE_DRAWS * len(timesteps))
        key = f"{plan.seed}/probe/{number}"
        sizes = (plan.patch_resolution, plan.resolution, plan.pixel_multiple, plan.patch_schedule)
        photo = number % len(run.photos)
        draws.append(
            Draw(
                key=key,
                name=f"probe-{number:03d}",
                kind="instance",
                photo=photo,
                prompt=run.photos[photo].caption,
                timestep=timesteps[entry],
                sigma=sigmas[entry],
                patch_size=patch_size(sigmas[entry], *sizes, keyed_generator(key, "size")),
                left=0.5,
                top=0.5,
                flip=False,
                weight=1.0,
            )
        )
    return draws


@torch.no_grad()
def probe_latents(run: Run) -> list[tuple[Draw, torch.Tensor]]:
    """The draws of `probe_draws` with their noisy latents (1, C, h, w), fp32 in host memory; the VAE is let go."""
    vae, device = load_vae(run), run.accelerator.device
    place(run, vae)
    noisy = []
    for draw in probe_draws(run):
        pixels = crop_photo(run.photos[draw.photo], draw, run.args, run.plan.patch_resolution)[None]
        latents = run.family.encode_pixels(vae, pixels.to(device), [draw.generator("vae")]).float().cpu()
        noise = draw.noise(latents.shape[1:])[None]
        noisy.append((draw, add_noise(latents, noise, torch.tensor([draw.sigma]))))
    del vae
    free_memory()
    return noisy


@torch.no_grad()
def probe_pass(
    run: Run, transformer: nn.Module, noisy: torch.Tensor, timestep: float, embeddings: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """One forward pass of the full model: the velocity for noisy latents (1, C, h, w) on the device, in that shape."""
    timesteps = torch.tensor([timestep], device=noisy.device)
    return run.family.predict_velocity(run, transformer, noisy, timesteps, to_device(embeddings, noisy.device))


# ===================================================================================================================
# 10. Quantised weights, LoRA and trainer
# ===================================================================================================================


class QuantizedLinear(nn.Linear):
    """A frozen linear layer whose weight bitsandbytes keeps in 4 or 8 bits and multiplies with.

    bitsandbytes' own layers hold their weight in a subclass of Parameter that takes no fake tensor, and this one
    serves training and memory meter alike. Made from a linear layer by `quantize`, on whose device it stays.

    Attributes:
        weight: Packed, uint8 (in * out / 2, 1) for 4 bits; int8 (out, in) for 8.
        scales: bitsandbytes' QuantState or MatmulLtState, with what it takes to read the weight.
    """

    def __init__(self, original: nn.Linear, weight: torch.Tensor, scales: Any) -> None:
        nn.Module.__init__(self)  # that of Linear would make a weight first
        self.in_features, self.out_features = original.in_features, original.out_features
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = original.bias
        self.scales = scales

    @classmethod
    def quantize(cls, original: nn.Linear, config: BitsAndBytesConfig, device: torch.device) -> "QuantizedLinear":
        """Quantise a layer's weight on a device as the configuration says."""
        import bitsandbytes as bnb  # slow to import, and needed with a quantised base only

        weight = original.weight.detach().to(device)
        if original.bias is not None:
            original.bias.data = original.bias.data.to(device)
        if config.load_in_8bit:
            quantized, row_scales, _ = bnb.functional.int8_vectorwise_quant(weight.to(torch.float16))
            scales = bnb.MatmulLtState(CB=quantized, SCB=row_scales)
            scales.has_fp16_weights, scales.threshold = False, config.llm_int8_threshold
            return cls(original, quantized, scales)
        _make_code_tables()
        packed, scales = bnb.functional.quantize_4bit(
            weight,
            quant_type=config.bnb_4bit_quant_type,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_storage=config.bnb_4bit_quant_storage,
        )
        return cls(original, packed, scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import bitsandbytes as bnb

        if isinstance(self.scales, bnb.MatmulLtState):
            return bnb.matmul(x, self.weight, bias=self.bias, state=self.scales)
        return bnb.matmul_4bit(x, self.weight, bias=self.bias, quant_state=self.scales)

    def scale_tensors(self) -> list[torch.Tensor]:
        """The tensors beside the weight that bitsandbytes reads it with; code tables are shared among layers."""
        states = [self.scales, getattr(self.scales, "state2", None)]
        found = [value for state in states if state for value in vars(state).values()]
        weight = self.weight.untyped_storage()._cdata
        return [t for t in found if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata != weight]


@functools.cache
def _make_code_tables() -> None:
    """Have bitsandbytes make the tables that it keeps for good: made by an estimate, they would be fake in the run."""
    import bitsandbytes as bnb

    with unset_fake_temporarily():
        for quant_type in ("nf4", "fp4"):
            weight = torch.zeros(64, 64, device="cpu")
            packed, scales = bnb.functional.quantize_4bit(weight, quant_type=quant_type, compress_statistics=True)
            bnb.functional.dequantize_4bit(packed, scales)


def quantize_trained_blocks(run: Run, transformer: nn.Module, device: torch.device) -> None:
    """Quantise what training keeps on the device: the trained blocks without their modulations."""
    blocks = trained_blocks(transformer, run.plan.skip_first, run.plan.skip_last)
    quantize_blocks(transformer, blocks, run.quantization, device, run.plan.modulations)


def quantize_blocks(
    transformer: nn.Module,
    blocks: Iterable[str],
    config: BitsAndBytesConfig,
    device: torch.device,
    spared: Iterable[str] = (),
) -> None:
    """Quantise the frozen linear layers of some blocks, one after the other, on a device, where these blocks stay.

    Args:
        transformer: In host memory, so that no more than one layer at a time is on the device in full precision.
        blocks: Names such as "single_transformer_blocks.3".
        config: What `llm_int8_skip_modules` names, by any consecutive parts of a name, stays as it is.
        spared: More names of such layers.
    """
    spared = {*spared, *(config.llm_int8_skip_modules or ())}
    for block_name in blocks:
        for name, layer in list(transformer.get_submodule(block_name).named_modules()):
            full = f"{block_name}.{name}"
            is_spared = any(f".{other}." in f".{full}." for other in spared)
            if isinstance(layer, nn.Linear) and not layer.weight.requires_grad and not is_spared:
                parent, _, last = full.rpartition(".")
                setattr(transformer.get_submodule(parent), last, QuantizedLinear.quantize(layer, config, device))


def read_quantization_config(args: argparse.Namespace, compute_dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """The BitsAndBytesConfig of `--bnb_quantization_config_path`, computing in the run's precision; refuses others."""
    if not args.bnb_quantization_config_path:
        return None
    flag = f"--bnb_quantization_config_path {args.bnb_quantization_config_path}"
    try:
        settings = json.loads(pathlib.Path(args.bnb_quantization_config_path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        refuse(f"{flag} cannot be read as JSON ({str(problem).splitlines()[0]})")
    known = set(inspect.signature(BitsAndBytesConfig.__init__).parameters) - {"self", "kwargs"}
    if not isinstance(settings, dict):
        refuse(f'{flag} holds no JSON object, such as {{"load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}}')
    if unknown := sorted(set(settings) - known - {"_load_in_4bit", "_load_in_8bit", "quant_method"}):
        refuse(f"{flag}: BitsAndBytesConfig knows no {unknown[0]!r}")
    settings = {name: value for name, value in settings.items() if name in known}
    if bool(settings.get("load_in_4bit")) == bool(settings.get("load_in_8bit")):
        refuse(f"{flag} must set exactly one of load_in_4bit and load_in_8bit to true")
    if settings.get("llm_int8_has_fp16_weight"):
        refuse(f"{flag}: llm_int8_has_fp16_weight is for training the weights themselves: leave it out")
    try:
        config = BitsAndBytesConfig(**{**settings, "bnb_4bit_compute_dtype": compute_dtype})
    except (TypeError, ValueError, AttributeError) as problem:
        refuse(f"{flag}: {str(problem).splitlines()[0]}")
    if config.load_in_4bit and config.bnb_4bit_quant_type not in ("nf4", "fp4"):
        refuse(f"{flag}: bnb_4bit_quant_type must be nf4 or fp4, not {config.bnb_4bit_quant_type!r}")
    return config


@dataclasses.dataclass
class Trainer:
    """The model in training and all that changes with it.

    Attributes:
        transformer: Bare, with its LoRA.
        handle: Holds its skipped blocks; they stand only within `full_model`.
        vae: None once no phase needs it any more.
        model: The transformer as accelerate wraps it; None before training has begun.
        step: Optimizer steps done.
        loss: Of the latest step, averaged over its samples and processes.
    """

    transformer: nn.Module
    handle: SkipHandle
    vae: nn.Module | None
    optimizer: Any
    lr_scheduler: Any
    step: int
    model: nn.Module | None = None
    loss: float | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters: those of the LoRA, in fp32."""
        return [parameter for parameter in self.transformer.parameters() if parameter.requires_grad]


def add_lora(
    transformer: nn.Module,
    targets: Iterable[str],
    *,
    rank: int,
    lora_alpha: float,
    lora_dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Give layers of the transformer a LoRA, by their full names; all blocks must stand."""
    transformer.add_adapter(
        LoraConfig(
            r=rank,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            init_lora_weights="gaussian",
            target_modules=list(targets),
        )
    )
    cast_training_params(transformer, dtype=dtype)
    compute_lora_in_frozen_precision(transformer)


class _LinearInPrecisionOfInput(torch.autograd.Function):
    """x W^T in the precision of x; of W, only the original is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        x, weight = ctx.saved_tensors
        for_x = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        for_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        return for_x, for_weight.to(weight.dtype)


class _LoraLinear(nn.Linear):
    """One of a LoRA's two matrices: its weight is in fp32, its products are in the precision of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _LinearInPrecisionOfInput.apply(x, self.weight)


class _LoraConv2d(nn.Conv2d):
    """The same for a layer that is a convolution."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, self.weight.to(x.dtype), None)


def compute_lora_in_frozen_precision(transformer: nn.Module) -> None:
    """Let the LoRA, whose weights may be in fp32, compute in the precision of the frozen model.

    The products are those of autocast, to the bit. But autocast would also lift the model's norms to fp32 on a GPU and
    keep a second copy of the LoRA for the backward pass, and peft without it would cast each layer's input to fp32.
    """
    for module in transformer.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False
            for matrix in (*module.lora_A.values(), *module.lora_B.values()):
                matrix.__class__ = _LoraLinear if isinstance(matrix, nn.Linear) else _LoraConv2d


def lora_weights(transformer: nn.Module) -> dict[str, torch.Tensor]:
    """The LoRA's weights in host memory, under their names in the full transformer."""
    return {name: tensor.detach().cpu() for name, tensor in get_peft_model_state_dict(transformer).items()}


def set_lora_weights(transformer: nn.Module, path: pathlib.Path) -> None:
    """Load a LoRA file; RuntimeError unless it holds exactly the LoRA's tensors."""
    prefix = "transformer."
    weights = {name.removeprefix(prefix): tensor for name, tensor in load_file(path).items()}
    expected = {name: tensor.shape for name, tensor in lora_weights(transformer).items()}
    if {name: tensor.shape for name, tensor in weights.items()} != expected:
        raise RuntimeError(f"{path} does not hold the LoRA that this run trains")
    set_peft_model_state_dict(transformer, weights)


def save_lora_weights(run: Run, transformer: nn.Module, folder: pathlib.Path, dtype: torch.dtype) -> None:
    """Write the LoRA and its metadata to `folder` in the diffusers layout, atomically."""
    weights = {name: tensor.to(dtype) for name, tensor in lora_weights(transformer).items()}
    metadata = transformer.peft_config["default"].to_dict()
    metadata["target_modules"] = list(run.plan.lora_targets)  # peft's own list is shortened, and in no fixed order
    partial = folder / ".lora.partial"
    run.family.pipeline_class.save_lora_weights(
        partial, transformer_lora_layers=weights, transformer_lora_adapter_metadata=metadata
    )
    os.replace(partial / LORA_FILE, folder / LORA_FILE)
    partial.rmdir()


def make_optimizer(parameters: list[nn.Parameter], args: argparse.Namespace, plan: Plan) -> torch.optim.Optimizer:
    """The optimizer that the flags ask for."""
    learning_rate = args.learning_rate
    if args.scale_lr:
        learning_rate *= plan.num_processes * plan.batch_size * plan.accumulation
    common = {
        "lr": learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "weight_decay": args.adam_weight_decay,
        "eps": args.adam_epsilon,
    }
    if args.optimizer == "prodigy":
        from prodigyopt import Prodigy  # optional package; its presence was checked

        return Prodigy(
            parameters,
            **common,
            beta3=args.prodigy_beta3,
            decouple=args.prodigy_decouple,
            use_bias_correction=args.prodigy_use_bias_correction,
            safeguard_warmup=args.prodigy_safeguard_warmup,
        )
    if args.use_8bit_adam:
        from bitsandbytes.optim import AdamW8bit  # slow to import, rarely wanted

        return AdamW8bit(parameters, **common)
    return torch.optim.AdamW(parameters, **common)


def load_trainer(run: Run) -> Trainer:
    """Load transformer and VAE into host memory, add the LoRA, make optimizer and learning rate schedule."""
    args, plan = run.args, run.plan
    transformer = load_transformer(run, run.weight_dtype)
    if run.quantization:
        quantize_trained_blocks(run, transformer, run.accelerator.device)
    set_seed(plan.seed)
    lora = {"rank": args.rank, "lora_alpha": args.lora_alpha, "lora_dropout": args.lora_dropout}
    add_lora(transformer, plan.lora_targets, **lora)
    if args.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    if lora := lora_at_start(run):
        set_lora_weights(transformer, lora)
    handle = skip_blocks(transformer, plan.skip_first, plan.skip_last, plan.modulations)
    trainer = Trainer(transformer, handle, load_vae(run), None, None, step=run.start_step)
    trainer.optimizer = make_optimizer(trainer.parameters, args, plan)
    trainer.lr_scheduler = get_scheduler(
        args.lr_scheduler,
        optimizer=trainer.optimizer,
        num_warmup_steps=args.lr_warmup_steps,
        num_training_steps=plan.max_steps,
        num_cycles=args.lr_num_cycles,
        power=args.lr_power,
    )
    if args.optimizer == "prodigy" and args.learning_rate <= 0.1:
        warn(f"Prodigy finds the step size by itself: --learning_rate 1 suits it, not {args.learning_rate}")
    if args.lr_scheduler != "constant" and args.lr_warmup_steps >= plan.max_steps:
        warn(
            f"--lr_warmup_steps {args.lr_warmup_steps} is no less than the run's {plan.max_steps} steps: "
            "the learning rate never reaches its peak"
        )
    return trainer


# ===================================================================================================================
# 11. Precompute: latents and residuals of every draw
# ===================================================================================================================


def make_draws(run: Run, period: Period) -> list[Draw]:
    """Phase 4: the distinct draws of a period that this process makes and trains on."""
    source = run.draw_source()
    return [draw for index in source.indices(period) for draw in source.sample(index)]


def add_noise(latents: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """x_t = (1 - sigma) x_0 + sigma noise, for latents (B, C, h, w) and sigmas (B,)."""
    sigmas = sigmas.view(-1, 1, 1, 1)  # (B, 1, 1, 1)
    return (1 - sigmas) * latents + sigmas * noise


@contextlib.contextmanager
def full_model(run: Run, trainer: Trainer) -> Iterator[None]:
    """Have the whole transformer, in eval mode, and the VAE compute on the device; then skip blocks again.

    The trained blocks stay on the device as in training: moving trainable parameters would cut them off from the
    gradient synchronisation of several processes. With --offload the skipped blocks and the VAE pass through it.
    """
    device, skipped = run.accelerator.device, trainer.handle.skipped
    trainer.transformer.to(device).eval()
    trainer.handle.restore("cpu")
    try:
        for module in (*skipped, trainer.vae):
            place(run, module)
        yield
    finally:
        for module in (*skipped, trainer.vae):
            take_back(module)
        trainer.handle.skip()
        trainer.transformer.train()
        free_memory()


@torch.no_grad()
def precompute(
    run: Run, trainer: Trainer, period: Period, draws: list[Draw], prompts: Mapping[str, dict[str, torch.Tensor]]
) -> None:
    """Phase 5: store latents and residuals of the draws, by one pass each of the full model with the LoRA learnt so
    far.

    Draws that are stored already, whole and of the same fingerprint, are not made again. They are made in fixed
    groups of `--precompute_batch_size`, so that an interrupted pass ends with the same bits as one that was not.
    """
    args, accelerator, store = run.args, run.accelerator, run.store()
    lora = lora_weights(trainer.transformer) if period.number else None
    if accelerator.is_main_process:
        store.begin(fingerprint(run, period, _checksum(lora) if lora else None))
        if lora:
            write_atomically(store.folder / PERIOD_LORA, lambda path: save_file(lora, path))
    accelerator.wait_for_everyone()
    groups = [draws[i : i + args.precompute_batch_size] for i in range(0, len(draws), args.precompute_batch_size)]
    missing = [group for group in groups if not all([store.holds(draw) for draw in group])]
    if len(missing) < len(groups):
        logger.info(f"{len(groups) - len(missing)} of {len(groups)} groups of draws are stored already")
    source = run.draw_source()
    with full_model(run, trainer) if missing else contextlib.nullcontext():
        for group in tqdm(missing, "precompute", disable=not accelerator.is_local_main_process):
            _precompute_group(run, trainer, source, store, group, prompts)
    accelerator.wait_for_everyone()


def _precompute_group(
    run: Run, trainer: Trainer, source: DrawSource, store: ResidualStore, group: list[Draw], prompts: Mapping
) -> None:
    pixels = [crop_photo(source.photo(draw), draw, run.args, run.plan.patch_resolution) for draw in group]
    pixels = torch.stack(pixels).to(run.accelerator.device)
    latents, residuals = latents_and_residuals(run, trainer, pixels, group, prompts)
    for row, draw in enumerate(group):
        try:
            store.write(draw, latents[row], {key: residual[row] for key, residual in residuals.items()})
        except ResidualOverflow as problem:
            refuse(str(problem), every_process=True)


def latents_and_residuals(
    run: Run, trainer: Trainer, pixels: torch.Tensor, draws: list[Draw], prompts: Mapping
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One pass of the full model.

    Args:
        pixels: (B, 3, side, side) in [-1, 1], the crops of B draws, on the device.

    Returns:
        Latents (B, C, h, w) in fp32, and by key residuals (B, tokens, width) and modulations (B, width), none if no
        block is skipped.
    """
    plan, device = run.plan, pixels.device
    generators = [draw.generator("vae") for draw in draws]
    latents = run.family.encode_pixels(trainer.vae, pixels, generators).float()  # (B, C, h, w)
    if not plan.skips_blocks:
        return latents, {}
    noise = torch.stack([draw.noise(latents.shape[1:]) for draw in draws]).to(device)
    sigmas, timesteps = torch.tensor([[draw.sigma, draw.timestep] for draw in draws], device=device).unbind(1)
    embeddings = to_device(stack_prompts(prompts, [draw.prompt for draw in draws]), device)
    with record_residuals(trainer.transformer, plan.skip_first, plan.skip_last, plan.modulations) as recording:
        run.family.predict_velocity(run, trainer.transformer, add_noise(latents, noise, sigmas), timesteps, embeddings)
    return latents, recording.residuals


def to_device(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a mapping on a device."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


# ===================================================================================================================
# 12. Train: the middle blocks, from the stored draws
# ===================================================================================================================


@dataclasses.dataclass
class Batch:
    """Stored draws of one forward pass, of B rows: with prior preservation, two for each sample.

    Attributes:
        latents, noise: (B, C, h, w), float32.
        sigmas, timesteps, weights: (B,), float32.
        prompts: B prompts.
        residuals: By key, (B, tokens, width), in the store's dtype.
        samples: How many samples the rows belong to.
    """

    latents: torch.Tensor
    noise: torch.Tensor
    sigmas: torch.Tensor
    timesteps: torch.Tensor
    weights: torch.Tensor
    prompts: list[str]
    residuals: dict[str, torch.Tensor]
    samples: int

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device."""
        return self._with_each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """The batch in page-locked memory; DataLoader calls this, so that copies to a GPU need not be waited for."""
        return self._with_each(torch.Tensor.pin_memory)

    def _with_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        tensors = {name: change(value) for name, value in fields.items() if isinstance(value, torch.Tensor)}
        residuals = {key: change(tensor) for key, tensor in self.residuals.items()}
        return dataclasses.replace(self, **tensors, residuals=residuals)


class StoredDraws(Dataset):
    """The samples of a period from a position on, read from the store by the index of their draw."""

    def __init__(self, source: DrawSource, store: ResidualStore, period: Period, start: int, end: int) -> None:
        self.source, self.store, self.period, self.positions = source, store, period, range(start, end)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, item: int) -> list[tuple[Draw, dict[str, torch.Tensor]]]:
        index = self.source.index_at(self.period, self.positions[item])
        return [(draw, self.store.read(draw)) for draw in self.source.sample(index)]


def collate_draws(samples: list[list[tuple[Draw, dict[str, torch.Tensor]]]]) -> Batch:
    """One batch of samples; every row carries all that belongs to it, so rows need no particular order."""
    draws, tensors = zip(*(row for sample in samples for row in sample), strict=True)
    latents = torch.stack([tensor.pop("latents") for tensor in tensors])
    sigmas, timesteps, weights = torch.tensor([[d.sigma, d.timestep, d.weight] for d in draws]).unbind(1)
    return Batch(
        latents=latents,
        noise=torch.stack([draw.noise(latents.shape[1:]) for draw in draws]),
        sigmas=sigmas,
        timesteps=timesteps,
        weights=weights,
        prompts=[draw.prompt for draw in draws],
        residuals={key: torch.stack([tensor[key] for tensor in tensors]) for key in tensors[0]},
        samples=len(samples),
    )


def stored_draw_loader(run: Run, period: Period, step: int) -> DataLoader:
    """Batches for the optimizer steps of a period that are left after `step`."""
    per_step = run.plan.batch_size * run.plan.accumulation
    start, end = (step - period.start_step) * per_step, (period.end_step - period.start_step) * per_step
    return DataLoader(
        StoredDraws(run.draw_source(), run.store(), period, start, end),
        batch_size=run.plan.batch_size,
        collate_fn=collate_draws,
        num_workers=run.args.dataloader_num_workers,
        pin_memory=run.accelerator.device.type == "cuda",
        generator=torch.Generator(),  # a loader without one draws from torch's own, and a resumed run would differ
    )


def start_training(run: Run, trainer: Trainer) -> None:
    """Give up what no later phase needs; the first time, also prepare for training and resume."""
    accelerator, plan = run.accelerator, run.plan
    if not run.needs_full_model_later:
        trainer.handle.discard()
        trainer.vae = None
    trainer.transformer.to(accelerator.device).train()
    free_memory()
    if trainer.model is not None:
        return
    own_forward = vars(trainer.transformer).get("forward")
    trainer.model, trainer.optimizer = accelerator.prepare(trainer.transformer, trainer.optimizer)
    # accelerate has wrapped it so that it returns fp32, which FLUX's pipeline would hand back to a model in bf16
    vars(trainer.transformer).pop("forward", None)
    if own_forward is not None:
        trainer.transformer.forward = own_forward
    register_checkpointing(run, trainer)
    set_seed(plan.seed, device_specific=True)  # LoRA dropout differs between processes
    if run.checkpoint:
        accelerator.load_state(str(run.checkpoint))


def flow_matching_loss(
    run: Run, trainer: Trainer, batch: Batch, prompts: Mapping[str, dict[str, torch.Tensor]]
) -> torch.Tensor:
    """Weighted squared error of the predicted velocity, noise - x_0, averaged over samples.

    A class image's row is weighted by `--prior_loss_weight` and belongs to the same sample as its photo's.
    """
    if trainer.handle.keys:
        trainer.handle.set_residuals(batch.residuals)
    prediction = run.family.predict_velocity(
        run,
        trainer.model,
        add_noise(batch.latents, batch.noise, batch.sigmas),
        batch.timesteps,
        to_device(stack_prompts(prompts, batch.prompts), batch.latents.device),
    )  # (B, C, h, w)
    error = (prediction.float() - (batch.noise - batch.latents)) ** 2
    weighting = compute_loss_weighting_for_sd3(run.args.weighting_scheme, batch.sigmas)  # (B,)
    return (batch.weights * weighting * error.mean(dim=(1, 2, 3))).sum() / batch.samples


def train(run: Run, trainer: Trainer, period: Period, prompts: Mapping[str, dict[str, torch.Tensor]]) -> None:
    """Phase 6: optimizer steps on a period's stored draws, with the first and last blocks skipped."""
    start_training(run, trainer)
    accelerator = run.accelerator
    bar = tqdm(
        total=run.plan.max_steps, initial=trainer.step, desc="train", disable=not accelerator.is_local_main_process
    )
    losses = []
    for batch in read_ahead(stored_draw_loader(run, period, trainer.step)):
        train_on_batch(run, trainer, batch, prompts, losses)
        if accelerator.sync_gradients:
            losses.clear()
            finish_step(run, trainer, prompts, bar)
    bar.close()


def train_on_batch(
    run: Run,
    trainer: Trainer,
    batch: Batch,
    prompts: Mapping[str, dict[str, torch.Tensor]],
    losses: list[torch.Tensor],
) -> None:
    """Forward and backward pass of a batch, and the optimizer's step where its gradients are complete.

    The batch's loss is added to `losses`, those of the optimizer step so far.
    """
    accelerator = run.accelerator
    with accelerator.accumulate(trainer.model):
        loss = flow_matching_loss(run, trainer, batch.to(accelerator.device), prompts)
        losses.append(loss.detach())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            trainer.loss = mean_loss(accelerator, losses, trainer.step)
            accelerator.clip_grad_norm_(trainer.parameters, run.args.max_grad_norm)
        trainer.optimizer.step()
        if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
            trainer.lr_scheduler.step()
        trainer.optimizer.zero_grad(set_to_none=True)


def read_ahead(loader: DataLoader) -> Iterator[Batch]:
    """The loader's batches; while one is trained on, the next is read from disk."""
    batches = iter(loader)
    with ThreadPoolExecutor(max_workers=1) as reader:
        upcoming = reader.submit(next, batches, None)
        try:
            while (batch := upcoming.result()) is not None:
                upcoming = reader.submit(next, batches, None)
                yield batch
        except DamagedResidual as problem:
            remedy = "run again with --resume_from_checkpoint latest, which makes it anew"
            reason = str(problem).strip().splitlines()[-1]  # a worker process puts its traceback in front
            refuse(f"{reason}: {remedy}", every_process=True)


def mean_loss(accelerator: Accelerator, losses: list[torch.Tensor], step: int) -> float:
    """The mean over an optimizer step's batches and processes; ends the run where it is not a finite number."""
    loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
    if not math.isfinite(loss):
        refuse(
            f"the loss is {loss} in step {step + 1}: lower --learning_rate, or use --mixed_precision bf16 or no; "
            "earlier checkpoints are untouched"
        )
    return loss


def finish_step(run: Run, trainer: Trainer, prompts: Mapping[str, dict[str, torch.Tensor]], bar: tqdm) -> None:
    """Count an optimizer step, log it, and save or draw validation images where they are due."""
    args, plan = run.args, run.plan
    trainer.step += 1
    values = {"loss": trainer.loss, "lr": trainer.lr_scheduler.get_last_lr()[0]}
    run.accelerator.log(values, step=trainer.step)
    bar.set_postfix(loss=f"{values['loss']:.4f}", lr=f"{values['lr']:.2e}")
    bar.update()
    if trainer.step % args.checkpointing_steps == 0:
        save_checkpoint(run, trainer)
    epoch, rest = divmod(trainer.step, plan.steps_per_epoch)
    is_due = rest == 0 and (epoch - 1) % args.validation_epochs == 0
    if run.validates_in_training and is_due and trainer.step < plan.max_steps:
        validate_in_training(run, trainer, prompts)


# ===================================================================================================================
# 13. Checkpoints: save and resume, bit for bit
# ===================================================================================================================

CHECKPOINT_STATE = "blockskip_state.json"
LR_SCHEDULER_FILE = "lr_scheduler.bin"


def all_checkpoints(output: pathlib.Path) -> list[tuple[pathlib.Path, int]]:
    """The whole checkpoints of an output folder with their steps, oldest first."""
    if not output.is_dir():
        return []
    found = [(path, re.fullmatch(r"checkpoint-(\d+)", path.name)) for path in output.iterdir()]
    return sorted(((path, int(match[1])) for path, match in found if match), key=lambda pair: pair[1])


def read_checkpoint_state(checkpoint: pathlib.Path) -> dict[str, Any]:
    """The step, plan and settings that a checkpoint was saved with; refuses a folder that is no whole checkpoint."""
    try:
        state = json.loads((checkpoint / CHECKPOINT_STATE).read_text())
        return {"step": int(state["step"]), "plan": state["plan"], "settings": dict(state["settings"])}
    except (OSError, ValueError, KeyError, TypeError):
        refuse(f"--resume_from_checkpoint: {checkpoint} has no readable {CHECKPOINT_STATE}, so it is not whole")


def find_checkpoint(args: argparse.Namespace) -> pathlib.Path | None:
    """The checkpoint that --resume_from_checkpoint names: a path, a name within the output folder, or 'latest'."""
    wanted = args.resume_from_checkpoint
    if not wanted:
        return None
    output = pathlib.Path(args.output_dir)
    there = [path for path, _ in all_checkpoints(output)]
    if wanted == "latest":
        if not there:
            logger.info(f"no checkpoint in {output} yet: the run starts at its beginning")
        return there[-1] if there else None
    places = [output / pathlib.Path(wanted).name, pathlib.Path(wanted)]
    for path in reversed(places) if os.sep in wanted else places:
        if path.is_dir():
            return path
    names = ", ".join(path.name for path in there) or "none"
    refuse(f"--resume_from_checkpoint {wanted} does not exist; in {output} there is: {names}")


def check_checkpoint(run: Run) -> None:
    """Refuse to resume where the run would not go on as it began, or where the checkpoint is not whole."""
    state = read_checkpoint_state(run.checkpoint)
    for name, now in run_settings(run).items():
        then = state["settings"].get(name)
        if name == CLASS_IMAGES and run.class_photos_missing:
            warn(f"{run.class_photos_missing} class images are missing and made again, the same but for rounding")
            continue
        if then != now:
            then, now = _only_differing(then, now)
            refuse(f"{run.checkpoint} was trained with {name} {then}, now it is {now}: use the same, or begin anew")
    if state["step"] > run.plan.max_steps:
        refuse(f"{run.checkpoint} has done {state['step']} steps, more than the {run.plan.max_steps} asked for")
    wanted = [LORA_FILE, LR_SCHEDULER_FILE, "optimizer.bin"]
    wanted += [f"random_states_{rank}.pkl" for rank in range(run.plan.num_processes)]
    wanted += [PERIOD_LORA] if lora_at_start(run) == run.checkpoint / PERIOD_LORA else []
    wanted += ["scaler.pt"] if run.accelerator.mixed_precision == "fp16" else []
    for name in wanted:
        if not (run.checkpoint / name).is_file():
            refuse(f"{run.checkpoint} has no {name}, so it is no whole checkpoint: resume from another one")
        check_plain(run.checkpoint / name)
    logger.info(f"resuming from {run.checkpoint} at step {state['step']}")


def check_plain(path: pathlib.Path) -> None:
    """Refuse a checkpoint's file that is damaged, or holds more than tensors, numbers and their containers.

    Such a file may run code when it is unpickled, and accelerate, which reads it later, does not always look.
    """
    if path.suffix == ".safetensors":
        _check_safetensors(path)
        return
    numpy_core = getattr(np, "_core", None) or np.core
    arrays = [numpy_core.multiarray._reconstruct, np.ndarray, np.dtype, np.dtypes.UInt32DType, codecs.encode]
    torch.serialization.add_safe_globals(arrays)  # of which numpy's random state is made
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except Exception as problem:  # of pickle, zipfile, struct, ...
        reason = type(problem).__name__
        refuse(f"{path} is damaged, or holds code, which is not run ({reason}): resume from another checkpoint")


def _only_differing(one: Any, other: Any) -> tuple[Any, Any]:
    """Of two mappings the entries that differ, of one beside None those that say something; others as they are."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in (one | other) if one.get(key) != other.get(key)]
        return {key: one.get(key) for key in keys}, {key: other.get(key) for key in keys}
    said = ({k: v for k, v in value.items() if v} if isinstance(value, dict) else value for value in (one, other))
    return tuple("none" if value is None else value for value in said)


def lora_at_start(run: Run) -> pathlib.Path | None:
    """The LoRA that a resumed run needs before its first precompute; None where that is the LoRA at initialisation.

    Residuals are made with the LoRA of their period's start, so a checkpoint from within a period carries that one,
    too.
    """
    if not run.checkpoint:
        return None
    begun, into = divmod(run.start_step, run.plan.period_steps)
    if run.start_step >= run.plan.max_steps or (begun and not into):
        return run.checkpoint / LORA_FILE
    return run.checkpoint / PERIOD_LORA if begun else None


def register_checkpointing(run: Run, trainer: Trainer) -> None:
    """Let accelerate's checkpoints hold the LoRA in fp32 in place of the whole model, and the schedule."""

    def save_lora_only(models: list[nn.Module], weights: list[dict], folder: str) -> None:
        weights.clear()
        if run.accelerator.is_main_process:
            save_lora_weights(run, trainer.transformer, pathlib.Path(folder), torch.float32)
            torch.save(trainer.lr_scheduler.state_dict(), pathlib.Path(folder, LR_SCHEDULER_FILE))

    def load_lora_only(models: list[nn.Module], folder: str) -> None:
        models.clear()
        set_lora_weights(trainer.transformer, pathlib.Path(folder, LORA_FILE))
        state = torch.load(pathlib.Path(folder, LR_SCHEDULER_FILE), weights_only=True)
        trainer.lr_scheduler.load_state_dict(state)

    run.accelerator.register_save_state_pre_hook(save_lora_only)
    run.accelerator.register_load_state_pre_hook(load_lora_only)


def save_checkpoint(run: Run, trainer: Trainer) -> None:
    """Save the state of every process to OUTPUT/checkpoint-STEP; under that name it is always whole."""
    accelerator, store = run.accelerator, run.store()
    final = run.output / f"checkpoint-{trainer.step}"
    partial = run.output / f"{final.name}.partial"
    if accelerator.is_main_process:
        for leftover in run.output.glob("checkpoint-*.partial"):
            shutil.rmtree(leftover)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    if accelerator.is_main_process:
        period_lora = store.folder / PERIOD_LORA
        if period_lora.is_file() and trainer.step % run.plan.period_steps:
            shutil.copyfile(period_lora, partial / PERIOD_LORA)
        state = {"step": trainer.step, "plan": dataclasses.asdict(run.plan), "settings": run_settings(run)}
        (partial / CHECKPOINT_STATE).write_text(json.dumps(state, indent=2))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if final.exists():
            _remove_folder(final)
        partial.rename(final)
        limit = run.args.checkpoints_total_limit  # checkpoints beyond this step were set aside when the run began
        for path, _ in all_checkpoints(run.output)[: -limit if limit else 0]:
            _remove_folder(path)
    logger.info(f"saved {final}")


def _remove_folder(folder: pathlib.Path) -> None:
    """Delete a checkpoint so that a half-deleted one never goes by a whole one's name."""
    partial = folder.with_name(f"{folder.name}.old.partial")
    folder.rename(partial)
    shutil.rmtree(partial)


# ===================================================================================================================
# 14. Save: the LoRA, images, model card, hub
# ===================================================================================================================


def save_result(run: Run, trainer: Trainer) -> None:
    """Phase 7: write the LoRA, in fp32 or the run's precision, and let go of the model."""
    if run.accelerator.is_main_process:
        run.output.mkdir(parents=True, exist_ok=True)
        dtype = torch.float32 if run.args.upcast_before_saving else run.weight_dtype
        save_lora_weights(run, trainer.transformer, run.output, dtype)
    run.report.steps, run.report.final_loss = trainer.step, trainer.loss
    run.accelerator.wait_for_everyone()


def release(run: Run, trainer: Trainer) -> None:
    """Let go of the model, the optimizer and all else that training held, on the device and in host memory."""
    for name in ("transformer", "model", "vae", "optimizer", "lr_scheduler", "handle"):
        setattr(trainer, name, None)
    run.accelerator.free_memory()
    free_memory()  # once more: accelerate collects garbage before it lets go of its own references


def draw_images(
    run: Run,
    transformer: nn.Module,
    vae: nn.Module,
    prompts: Mapping[str, dict[str, torch.Tensor]],
    name: str,
    step: int,
) -> list[pathlib.Path]:
    """Draw the validation images, shared among the processes, to OUTPUT/validation/NAME, and show them to the
    trackers.

    The random state of training is left as it was.
    """
    args, accelerator = run.args, run.accelerator
    folder = run.output / "validation" / name
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"image_{number}.png" for number in range(args.num_validation_images)]
    pipeline = image_pipeline(run, transformer, vae)
    pipeline.set_progress_bar_config(disable=True)
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), decoding_in_little_memory(run, vae):
        for number in range(accelerator.process_index, len(paths), accelerator.num_processes):
            generator = keyed_generator(run.plan.seed, "validation", number)
            (image,) = run.family.generate_images(run, pipeline, prompts, args.validation_prompt, [generator])
            write_atomically(paths[number], lambda partial, image=image: image.save(partial, format="PNG"))
    accelerator.wait_for_everyone()
    images = [Image.open(path).convert("RGB") for path in paths]
    for tracker in accelerator.trackers:
        log_images(tracker, images, run.args.validation_prompt, step)
    return paths


def log_images(tracker: Any, images: list[Image.Image], caption: str, step: int) -> None:
    """Show images in TensorBoard or Weights & Biases; other trackers have no way of showing them in common."""
    if tracker.name == "tensorboard":
        pixels = np.stack([np.asarray(image) for image in images])
        tracker.writer.add_images("validation", pixels, step, dataformats="NHWC")
    elif tracker.name == "wandb":
        import wandb  # installed, since it is the tracker

        tracker.log({"validation": [wandb.Image(image, caption=caption) for image in images]}, step=step)


def validate_in_training(run: Run, trainer: Trainer, prompts: Mapping[str, dict[str, torch.Tensor]]) -> None:
    """Draw images with the full model, then go on training just as before."""
    with run.report.phase("validate"), full_model(run, trainer):
        draw_images(run, trainer.transformer, trainer.vae, prompts, f"step-{trainer.step:06d}", trainer.step)


def validate(run: Run, prompts: Mapping[str, dict[str, torch.Tensor]]) -> list[pathlib.Path]:
    """Draw the final images with a freshly loaded full model and the LoRA that was saved."""
    if not run.validates_in_training:
        return []
    transformer, vae = load_transformer(run, run.weight_dtype), load_vae(run)
    transformer.load_lora_adapter(str(run.output), weight_name=LORA_FILE, prefix="transformer")
    compute_lora_in_frozen_precision(transformer)
    transformer.eval()  # the layers of the LoRA came in training mode, with their dropout
    place(run, transformer, whole=True)
    place(run, vae)
    return draw_images(run, transformer, vae, prompts, "final", run.plan.max_steps)


def prepare_hub(args: argparse.Namespace, accelerator: Accelerator) -> None:
    """Create the hub repository before anything else is done, so that a missing login is found at once."""
    if not args.push_to_hub or not accelerator.is_main_process:
        return
    from huggingface_hub import create_repo
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    name = repository_name(args)
    try:
        args.hub_model_id = create_repo(repo_id=name, exist_ok=True, token=args.hub_token).repo_id
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError, ValueError) as problem:
        refuse(f"--push_to_hub cannot create {name} ({str(problem).splitlines()[0]}): log in with `hf auth login`")


def model_card(run: Run, images: list[pathlib.Path]) -> str:
    """The text of OUTPUT/README.md; names and prompts stand in it so that none can break out of its place.

    In the example they are literals of Python, which are one line each; in the front matter YAML takes care of them.
    """
    args, plan = run.args, run.plan
    prompt = args.validation_prompt or args.instance_prompt or run.photos[0].caption
    repository = args.hub_model_id or "FOLDER_OR_REPOSITORY_OF_THIS_LORA"
    base = args.pretrained_model_name_or_path
    base = pathlib.Path(base).name if os.path.isdir(base) else base
    description = f"""
# {run.family.name} DreamBooth LoRA, trained with DiT-BlockSkip

A LoRA of rank {args.rank} for {_code(base)}, trained on {len(run.photos)} photos in {plan.max_steps} steps.
It acts on {plan.depth - plan.skip_first - plan.skip_last} of {plan.depth} blocks: the first {plan.skip_first} and last
{plan.skip_last} were skipped in training, with stored residuals in their place (arXiv 2603.20755). At inference it is
an ordinary LoRA for the full model.

## Use

```python
import torch
from diffusers import {run.family.pipeline_class.__name__}

pipeline = {run.family.pipeline_class.__name__}.from_pretrained({_literal(base)}, torch_dtype=torch.bfloat16)
pipeline.to("cuda")
pipeline.load_lora_weights({_literal(repository)}, weight_name="{LORA_FILE}")
image = pipeline({_literal(prompt)}).images[0]
```
"""
    widget = [
        {"text": args.validation_prompt, "output": {"url": str(path.relative_to(run.output))}} for path in images
    ]
    card = ModelCard.from_template(
        card_data=ModelCardData(
            library_name="diffusers",
            base_model=None if os.path.isdir(args.pretrained_model_name_or_path) else base,
            instance_prompt=args.instance_prompt,
            widget=widget or None,
        ),
        template_path=MODEL_CARD_TEMPLATE_PATH,
        model_description=description,
    )
    tags = ["text-to-image", "diffusers-training", "diffusers", "lora", "template:sd-lora", run.family.name.lower()]
    return str(populate_model_card(card, tags=tags))


def _code(text: str) -> str:
    """Text as code in a line of Markdown."""
    return f"`{one_line(text).replace('`', chr(39))}`"


def _literal(text: str) -> str:
    """Text as a literal of Python on one line, in double quotes if it holds none."""
    return repr(text) if '"' in text or "\\" in repr(text) else f'"{text}"'


def publish(run: Run, images: list[pathlib.Path]) -> None:
    """Write the model card, remove stored draws, upload what was asked for, write the report, and end the trackers.

    The report comes last: it is what says that the run is finished.
    """
    args, accelerator = run.args, run.accelerator
    if accelerator.is_main_process:
        card = model_card(run, images)
        write_atomically(run.output / "README.md", lambda path: path.write_text(card, encoding="utf-8"))
        if args.push_to_hub:
            from huggingface_hub import upload_folder

            upload_folder(
                repo_id=args.hub_model_id,
                folder_path=args.output_dir,
                commit_message="DreamBooth LoRA trained with DiT-BlockSkip",
                allow_patterns=[LORA_FILE, "README.md", "validation/final/*"],
                token=args.hub_token,
            )
        if not args.keep_residuals:
            run.store().remove()
        run.report.write(run)
        print(run.report.table())
        print(f"LoRA: {run.output / LORA_FILE}")
    accelerator.end_training()


# ===================================================================================================================
# 15. Report: seconds and bytes of every phase
# ===================================================================================================================


@dataclasses.dataclass
class PhaseCost:
    """What a phase took on this process; a phase that is entered again adds its seconds and bytes written.

    Attributes:
        peak_device_bytes: Highest allocation on the accelerator; None on a CPU.
        peak_host_bytes: Highest resident memory of the process.
        written_bytes: Handed to the system for writing; None where the system does not count it.
    """

    seconds: float = 0.0
    peak_device_bytes: int | None = None
    peak_host_bytes: int = 0
    written_bytes: int | None = None


class RunReport:
    """Measures the phases of a run and writes OUTPUT/run_report.json."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.phases: dict[str, PhaseCost] = {}
        self.steps = 0
        self.final_loss: float | None = None
        self.estimates: dict[str, PhaseEstimate] = {}
        self._on_cuda = accelerator.device.type == "cuda"
        self._within: list[str] = []
        self._since = 0.0
        self._written = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what is done within under a phase's name; what a phase within it costs is not counted twice."""
        logger.info(f"phase: {name}")
        self._book()
        self._within.append(name)
        self.phases.setdefault(name, PhaseCost())
        try:
            with _full_disk_refused(name):
                yield
        finally:
            self._book()
            self._within.pop()

    def _book(self) -> None:
        """Give the innermost phase what it cost since the last time, and begin to measure anew."""
        written = _written_bytes()
        if self._within:
            cost = self.phases[self._within[-1]]
            cost.seconds += time.perf_counter() - self._since
            cost.peak_host_bytes = max(cost.peak_host_bytes, _host_peak())
            if self._on_cuda:
                cost.peak_device_bytes = max(cost.peak_device_bytes or 0, torch.cuda.max_memory_allocated())
            if written is not None:
                cost.written_bytes = (cost.written_bytes or 0) + written - self._written
        self._since, self._written = time.perf_counter(), written or 0
        _reset_host_peak()
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats()

    def write(self, run: Run) -> None:
        """Write the report of a finished run to OUTPUT/run_report.json."""
        packages = ("torch", "diffusers", "peft", "accelerate", "transformers")
        content = {
            "finished": True,
            "steps": self.steps,
            "final_loss": self.final_loss,
            "plan": {**dataclasses.asdict(run.plan), "residual_bytes": run.plan.residual_bytes},
            "settings": run_settings(run),
            "phases": [
                {"name": name, **dataclasses.asdict(cost), "estimated_device_bytes": self.estimated_bytes(name)}
                for name, cost in self.phases.items()
            ],
            "versions": {
                "python": sys.version.split()[0],
                **{package: importlib.metadata.version(package) for package in packages},
            },
        }
        text = json.dumps(content, indent=2)
        write_atomically(run.output / "run_report.json", lambda partial: partial.write_text(text))

    def estimated_bytes(self, name: str) -> int | None:
        """The estimate of a phase's device peak; None for a phase that uses no device to speak of."""
        return self.estimates[name].peak_device_bytes if name in self.estimates else None

    def table(self) -> str:
        """The phases as a table for the terminal."""
        titles = ("device peak", "estimate", "host peak", "written")
        lines = [f"{'phase':<16}{'seconds':>9}{''.join(f'{title:>13}' for title in titles)}"]
        for name, cost in self.phases.items():
            sizes = (cost.peak_device_bytes, self.estimated_bytes(name), cost.peak_host_bytes, cost.written_bytes)
            cells = "".join(f"{'-' if size is None else readable(size):>13}" for size in sizes)
            lines.append(f"{name:<16}{cost.seconds:>9.1f}{cells}")
        return "\n".join(lines)


def _written_bytes() -> int | None:
    counters = getattr(psutil.Process(), "io_counters", None)
    return getattr(counters(), "write_chars", None) if counters else None


def _reset_host_peak() -> None:
    with contextlib.suppress(OSError):  # Linux only
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def _host_peak() -> int:
    """Highest resident memory since `_reset_host_peak`, in bytes; where the system does not tell, the present one."""
    with contextlib.suppress(OSError, StopIteration):
        status = pathlib.Path("/proc/self/status").read_text().splitlines()
        line = next(line for line in status if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss


# ===================================================================================================================
# 16. Memory meter: what a training step needs, without weights or GPU
# ===================================================================================================================


class MemoryMeter(TorchDispatchMode):
    """Adds up the bytes of all live storages, each once however many tensors view it, and keeps the highest sum.

    It sees every tensor that an operator returns while it is active, and those given to `watch`. A storage leaves the
    sum when its last owner drops it, be that a name, a module or a node of the autograd graph. So it reads the same on
    fake tensors, which own no memory, as on real ones. Enter it inside a `FakeTensorMode`, not around it. Memory that
    a kernel takes and gives back within one operator is not seen, nor is fragmentation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._storages: dict[int, weakref.ref] = {}

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made before the meter was entered: weights, batch, residuals."""
        for tensor in tensors:
            self._remember(tensor, counts=True)

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave tensors and views of them out, unless they are counted already: they lie elsewhere."""
        for tensor in tensors:
            self._remember(tensor, counts=False)

    def hold(self, size: int) -> None:
        """Add bytes that no tensor stands for; a negative number takes them away again."""
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _remember(self, tensor: torch.Tensor, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # address of the C++ object: fake tensors have no data_ptr
        if key not in self._storages:
            size = storage.nbytes() if counts else 0
            self._storages[key] = weakref.ref(storage, lambda _, key=key, size=size: self._forget(key, size))
            self.hold(size)

    def _forget(self, key: int, size: int) -> None:
        del self._storages[key]
        self.live_bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


class _NumbersReadAsOne(TorchDispatchMode):
    """Optimizers and masks read numbers off tensors and decide by them; a fake tensor has none, so it reads as 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Within it, tensors have shapes but no data; models are built on the meta device before, and filled within."""
    with FakeTensorMode(allow_non_fake_inputs=True), _NumbersReadAsOne():  # bitsandbytes has real code tables
        yield


def fill(module: nn.Module) -> None:
    """Give a module from the meta device weights in host memory; within `fake_tensors` they take none."""
    made: dict[int, torch.Tensor] = {}  # tied weights stay tied
    for layer in module.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                zeros = made.get(id(parameter))
                if zeros is None:
                    zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu")
                    zeros = made[id(parameter)] = nn.Parameter(zeros, requires_grad=parameter.requires_grad)
                layer._parameters[name] = zeros
        for name, buffer in layer._buffers.items():
            if buffer is not None:
                layer._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")


def held_tensors(module: nn.Module) -> list[torch.Tensor]:
    """All that a module holds: parameters, buffers, and the scales of quantised layers."""
    scales = [t for layer in module.modules() if isinstance(layer, QuantizedLinear) for t in layer.scale_tensors()]
    return [*module.parameters(), *module.buffers(), *scales]


def training_structure(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    targets: Callable[[nn.Module], Iterable[str]],
    *,
    lora: Mapping[str, Any],
    gradient_checkpointing: bool,
) -> nn.Module:
    """The transformer with its LoRA on the meta device, where adapters and casts do not stumble over fake tensors."""
    with torch.device("meta"):
        transformer = getattr(diffusers, config["_class_name"]).from_config(config)
        nn.Module.to(transformer, dtype)  # that of diffusers warns of casts, which do no harm to zeros
        transformer.requires_grad_(False).train()
        add_lora(transformer, targets(transformer), **lora)
    if gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    return transformer


def estimate_memory(
    config: Mapping[str, Any],
    *,
    resolution: int,
    skip_first: int = 0,
    skip_last: int = 0,
    rank: int = 4,
    lora_layers: Iterable[str] | None = None,
    lora_dtype: str | None = None,
    batch_size: int = 1,
    accumulates: bool = False,
    text_tokens: int | None = None,
    gradient_checkpointing: bool = False,
    dtype: str = "bf16",
    residual_dtype: str = "bf16",
    quantization: Mapping[str, Any] | None = None,
    stored_modulations: bool = False,
) -> dict[str, int]:
    """Estimate what a LoRA training step with skipped blocks takes, without weights and without a GPU.

    The real model class, PEFT adapter, autograd and AdamW, with its state in place, run for a step on fake tensors.
    1 GiB is 2^30 bytes. Precisions are given as fp32, bf16 or fp16.

    Args:
        config: The transformer's config.json, with its `_class_name`.
        resolution: Side of the network input in pixels.
        lora_dtype: Of the LoRA and AdamW's state, by default that of the frozen weights; the scripts keep it in fp32.
        accumulates: Whether gradients of an earlier batch lie there during a forward pass.
        text_tokens: Length of an encoded prompt; by default 512 for FLUX and 300 for SANA.
        dtype: Of frozen weights, batch and products.
        quantization: Arguments of a BitsAndBytesConfig, for the frozen weights of the trained blocks.
        stored_modulations: Whether modulation layers are off the device, too: so in the scripts, not in the paper.

    Returns:
        `weights_bytes` (frozen weights left on the device, and LoRA), `peak_bytes` (all storages at the worst moment
        of a step), `flops_per_step` (forward and backward of a batch, recomputation included, 1 multiply-add = 2),
        `lora_parameters` (a count) and `residual_bytes` (stored for one sample).
    """
    dtype, residual_dtype = DTYPES[dtype], DTYPES[residual_dtype]
    lora = {"rank": rank, "lora_alpha": rank, "dtype": DTYPES[lora_dtype] if lora_dtype else dtype}
    layout = LAYOUTS[config["_class_name"]]
    targets = functools.partial(
        lora_target_names, skip_first=skip_first, skip_last=skip_last, layers=lora_layers or layout.lora_layers
    )
    transformer = training_structure(config, dtype, targets, lora=lora, gradient_checkpointing=gradient_checkpointing)
    blocks = trained_blocks(transformer, skip_first, skip_last)
    stored = modulation_names(transformer, skip_first, skip_last) if stored_modulations else []
    widths = {_modulation_key(name): transformer.get_submodule(name).out_features for name in stored}
    handle = skip_blocks(transformer, skip_first, skip_last, stored)
    with fake_tensors():
        fill(transformer)
        if quantization:
            quantize_blocks(transformer, blocks, BitsAndBytesConfig(**quantization), torch.device("cpu"))
        inputs, target = fake_batch(transformer, resolution, batch_size, text_tokens or layout.text_tokens, dtype)
        keys = [key for key in handle.keys if key not in widths]
        residuals = fake_residuals(transformer, inputs, keys, residual_dtype)
        residuals |= {key: torch.randn(batch_size, width, dtype=dtype) for key, width in widths.items()}
        handle.set_residuals(residuals)
        optimizer, step = metered_step(transformer, inputs, target, accumulates)
        weights = held_tensors(transformer)
        held = [*weights, *inputs.values(), target, *residuals.values()]
        peak_bytes = measure_peak(held, lambda: give_state(optimizer), step)
        flops = count_flops(step) // (2 if accumulates else 1)
    return {
        "weights_bytes": storage_bytes(weights),
        "peak_bytes": peak_bytes,
        "flops_per_step": flops,
        "lora_parameters": sum(p.numel() for p in transformer.parameters() if p.requires_grad),
        "residual_bytes": storage_bytes(residuals.values()) // batch_size,
    }


def fake_batch(
    transformer: nn.Module, resolution: int, batch_size: int, text_tokens: int, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs of the transformer's forward pass for a square image, and the target of its loss in fp32."""
    config, side = transformer.config, resolution // block_layout(transformer).pixels_per_token
    if config._class_name == "SanaTransformer2DModel":
        inputs = {
            "hidden_states": torch.randn(batch_size, config.in_channels, side, side, dtype=dtype),  # (B, C, h, w)
            "encoder_hidden_states": torch.randn(batch_size, text_tokens, config.caption_channels, dtype=dtype),
            "encoder_attention_mask": torch.ones(batch_size, text_tokens, dtype=torch.long),
            "timestep": torch.rand(batch_size) * 1000,
        }
    else:
        inputs = {
            "hidden_states": torch.randn(batch_size, side * side, config.in_channels, dtype=dtype),  # (B, T, C)
            "encoder_hidden_states": torch.randn(batch_size, text_tokens, config.joint_attention_dim, dtype=dtype),
            "pooled_projections": torch.randn(batch_size, config.pooled_projection_dim, dtype=dtype),
            "timestep": torch.rand(batch_size),
            "img_ids": torch.zeros(side * side, 3, dtype=dtype),
            "txt_ids": torch.zeros(text_tokens, 3, dtype=dtype),
        }
        inputs |= {"guidance": torch.ones(batch_size)} if config.guidance_embeds else {}
    return inputs, torch.randn(inputs["hidden_states"].shape, dtype=torch.float32)


def fake_residuals(
    transformer: nn.Module, inputs: Mapping[str, torch.Tensor], keys: Iterable[str], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Residuals for a batch, by the keys of `skip_blocks`' handle, each (B, tokens, width)."""
    config, latents = transformer.config, inputs["hidden_states"]
    image_tokens = (
        latents.shape[1] if latents.ndim == 3 else latents.shape[2] * latents.shape[3] // config.patch_size**2
    )
    tokens = {"hidden_states": image_tokens, "encoder_hidden_states": inputs["encoder_hidden_states"].shape[1]}
    width = config.num_attention_heads * config.attention_head_dim
    return {key: torch.randn(len(latents), tokens[key.split(".")[1]], width, dtype=dtype) for key in keys}


def metered_step(
    transformer: nn.Module, inputs: Mapping[str, torch.Tensor], target: torch.Tensor, accumulates: bool
) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """An optimizer, and one step of it as the training loop takes it, to be called again and again."""
    lora = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(lora, lr=1e-4, foreach=True)  # foreach is what AdamW takes on a GPU by itself

    def step() -> None:
        for _ in range(2 if accumulates else 1):
            prediction = transformer(**inputs, return_dict=False)[0]
            ((prediction.float() - target) ** 2).mean().backward()
            del prediction
        torch.nn.utils.clip_grad_norm_(lora, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, step


def give_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its state, which all steps but the first find in place."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def measure_peak(held: Iterable[torch.Tensor], *actions: Callable[[], None]) -> int:
    """Highest sum of live bytes during some actions; `held` are the tensors that exist before them."""
    meter = MemoryMeter()
    meter.watch(held)
    with meter:
        for action in actions:
            action()
    return meter.peak_bytes


def count_flops(step: Callable[[], None]) -> int:
    """Floating-point operations of the matrix products and convolutions of a step, 1 multiply-add = 2.

    Not to be run under a `MemoryMeter`: the counter keeps tensors alive when blocks are checkpointed.
    """
    formulas = {  # torch knows those of a GPU's attention only
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
        ),
    }
    if "bitsandbytes" in sys.modules:
        formulas |= {
            torch.ops.bitsandbytes.gemm_4bit: lambda x, weight, shape, *_, **__: 2 * math.prod(x) * shape[0],
            torch.ops.bitsandbytes.int8_linear_matmul: lambda x, weight, **__: 2 * math.prod(x) * weight[0],
        }
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        step()
    return counter.get_total_flops()


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that tensors hold, shared storages counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


# ===================================================================================================================
# 17. Estimates and dry run: what every phase of a run needs
# ===================================================================================================================


@dataclasses.dataclass(frozen=True)
class PhaseEstimate:
    """What a phase needs on the device, metered on fake tensors.

    Attributes:
        weights_bytes: Weights that lie there at once.
        peak_device_bytes: All storages at the worst moment.
        flops: Of one optimizer step, or of one pass: a prompt, a draw, a step of the sampler; 1 multiply-add = 2.
    """

    name: str
    weights_bytes: int
    peak_device_bytes: int
    flops: int


@contextlib.contextmanager
def passing_through(meter: MemoryMeter, module: nn.Module) -> Iterator[int]:
    """Meter a module whose layers are on the device one at a time, as `place` has them with --offload.

    Yields:
        Bytes of the largest layer.
    """
    meter.exclude(held_tensors(module))
    sizes = {}
    for layer in module.modules():
        own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if own:
            sizes[layer] = storage_bytes(own)
    hooks = []
    for layer, size in sizes.items():
        hooks.append(layer.register_forward_pre_hook(lambda *_, size=size: meter.hold(size)))
        hooks.append(layer.register_forward_hook(lambda *_, size=size: meter.hold(-size)))
    try:
        yield max(sizes.values(), default=0)
    finally:
        for hook in hooks:
            hook.remove()


def meter_phase(
    name: str,
    action: Callable[[], Any],
    *,
    resident: Iterable[nn.Module],
    passing: Iterable[nn.Module] = (),
    held: Iterable[torch.Tensor] = (),
    elsewhere: Iterable[torch.Tensor] = (),
    counts_flops: bool = True,
) -> PhaseEstimate:
    """Meter one pass of a phase.

    Args:
        action: The pass.
        resident: Modules that are on the device for the whole phase; layers that are in `passing`, too, are not.
        passing: Modules that pass through it layer by layer, each fetched while the one before computes.
        held: Other tensors on the device.
        elsewhere: Tensors in host memory.
    """
    meter = MemoryMeter()
    with contextlib.ExitStack() as stack:
        largest = max((stack.enter_context(passing_through(meter, module)) for module in passing), default=0)
        meter.exclude(elsewhere)
        meter.watch(tensor for module in resident for tensor in held_tensors(module))
        meter.hold(largest)  # the next layer
        weights_bytes = meter.live_bytes + largest
        meter.watch(held)
        with meter:
            action()
        return PhaseEstimate(name, weights_bytes, meter.peak_bytes, count_flops(action) if counts_flops else 0)


def training_structure_of(run: Run) -> nn.Module:
    """The run's transformer with its LoRA, on the meta device, all blocks in place."""
    args, family = run.args, run.family
    return training_structure(
        {**run.transformer_config, "_class_name": family.transformer_class.__name__},
        run.weight_dtype,
        lambda transformer: run.plan.lora_targets,
        lora={"rank": args.rank, "lora_alpha": args.lora_alpha, "lora_dropout": args.lora_dropout},
        gradient_checkpointing=args.gradient_checkpointing,
    )


class PhaseMeter:
    """Meters the phases of a run, with the functions that the run itself calls, on fake tensors."""

    def __init__(self, run: Run, *, counts_flops: bool = True) -> None:
        self.run, self.counts_flops = run, counts_flops
        transformer = training_structure_of(run)
        with torch.device("meta"):
            vae = self._component("vae", diffusers).requires_grad_(False).eval()
            names = [name for name in run.family.text_components if name.startswith("text_encoder")]
            self.encoders = {name: self._component(name, transformers).to(run.weight_dtype).eval() for name in names}
            # models that a phase loads for itself, without LoRA; within the fake mode none could be cast
            self.painter = self._frozen(self._class_image_dtype) if run.class_photos_missing else None
            self.probe = self._frozen(run.weight_dtype) if run.plan.pair_is_open else None
        self.trainer = Trainer(transformer, None, vae, None, None, step=0, model=transformer)

    def _frozen(self, dtype: torch.dtype) -> nn.Module:
        transformer = self.run.family.transformer_class.from_config(self.run.transformer_config).eval()
        return nn.Module.to(transformer, dtype)

    @property
    def _class_image_dtype(self) -> torch.dtype:
        return DTYPES[self.run.args.prior_generation_precision or self.run.accelerator.mixed_precision]

    def _component(self, name: str, library: Any) -> nn.Module:
        index = json.loads(pathlib.Path(self.run.model_folder, "model_index.json").read_text())
        cls, folder = getattr(library, index[name][1]), pathlib.Path(self.run.model_folder, name)
        if library is transformers:
            return cls(transformers.AutoConfig.from_pretrained(folder)).requires_grad_(False)
        return cls.from_config(cls.load_config(folder))

    def estimates(self, only: Iterable[str] | None = None) -> list[PhaseEstimate]:
        """The phases that the run will have, in order; of those in `only`, if it is given."""
        wanted = {
            "encode prompts": self._encode_prompts,
            "class images": self._class_images,
            "choose blocks": self._choose_blocks,
            "validate": self._validate,  # before blocks are quantised and skipped
            "precompute": self._precompute,
            "train": self._train,
        }
        with fake_tensors():
            for module in (self.trainer.transformer, self.trainer.vae, *self.encoders.values()):
                fill(module)
            found = []
            for name, meter in wanted.items():
                if name in ("precompute", "train") or only is None or name in only:
                    found += meter()
        order = ("encode prompts", "class images", "choose blocks", "precompute", "train", "validate")
        found = [phase for phase in found if only is None or phase.name in only]
        return sorted(found, key=lambda phase: order.index(phase.name))

    def _meter(self, name: str, action: Callable, modules: Iterable[nn.Module], **options: Any) -> PhaseEstimate:
        """Meter a phase all of whose modules are placed."""
        placed = {"passing" if self.run.args.offload else "resident": list(modules)}
        return meter_phase(name, action, **{"resident": (), **placed, **options}, counts_flops=self.counts_flops)

    @torch.no_grad()
    def _encode_prompts(self) -> list[PhaseEstimate]:
        inputs = self.run.family.encoder_inputs(self.run)

        def encode() -> None:
            for name, encoder in self.encoders.items():
                encoder(**inputs[name])

        return [self._meter("encode prompts", encode, self.encoders.values())]

    def _drawing(self, transformer: nn.Module, images: int, dtype: torch.dtype) -> Callable[[], None]:
        """A step of the sampler and the decoding of its images."""
        run, vae = self.run, self.trainer.vae
        rows = images * (1 + len(run.family.extra_prompts))
        inputs, _ = fake_batch(transformer, run.args.resolution, rows, run.args.max_sequence_length, dtype)

        def draw() -> None:
            transformer(**inputs, return_dict=False)
            side = run.args.resolution // run.family.pixels_per_cell
            with decoding_in_little_memory(run, vae):
                vae.decode(torch.zeros(images, vae.config.latent_channels, side, side), return_dict=False)

        return draw

    @torch.no_grad()
    def _class_images(self) -> list[PhaseEstimate]:
        run, args = self.run, self.run.args
        if not run.class_photos_missing:
            return []
        fill(self.painter)
        images = min(args.sample_batch_size, run.class_photos_missing)
        action = self._drawing(self.painter, images, self._class_image_dtype)
        return [self._meter("class images", action, [self.painter, self.trainer.vae])]

    @torch.no_grad()
    def _choose_blocks(self) -> list[PhaseEstimate]:
        """A pass of the frozen model with the text hidden in a block; its latents were made before it was loaded."""
        run = self.run
        if not run.plan.pair_is_open:
            return []
        fill(self.probe)
        side = run.plan.patch_resolution // run.family.pixels_per_cell
        noisy = torch.zeros(1, self.trainer.vae.config.latent_channels, side, side)
        prompt = run.family.blank_prompt(run)

        def probe() -> None:
            with mask_text(self.probe, [0]):
                probe_pass(run, self.probe, noisy, 500.0, prompt)

        return [self._meter("choose blocks", probe, [self.probe], held=[noisy], elsewhere=prompt.values())]

    @torch.no_grad()
    def _validate(self) -> list[PhaseEstimate]:
        """The last images: the whole model with the LoRA, nothing quantised, nothing else on the device."""
        if not self.run.validates_in_training:
            return []
        transformer = self.trainer.transformer.eval()
        action = self._drawing(transformer, 1, self.run.weight_dtype)
        return [self._meter("validate", action, [transformer, self.trainer.vae])]

    @torch.no_grad()
    def _precompute(self) -> list[PhaseEstimate]:
        """A pass of the full model beside what training leaves on the device; makes the batch to train on, too."""
        run, trainer = self.run, self.trainer
        if run.quantization:
            quantize_trained_blocks(run, trainer.transformer, torch.device("cpu"))
        trainer.optimizer = make_optimizer(trainer.parameters, run.args, run.plan)
        with torch.enable_grad():
            give_state(trainer.optimizer)
        draws = [run.draw_source().sample(0)[0]] * run.args.precompute_batch_size
        pixels = torch.zeros(len(draws), 3, run.plan.patch_resolution, run.plan.patch_resolution)
        self.prompts = dict.fromkeys([photo.caption for photo in run.photos], run.family.blank_prompt(run))
        trainer.transformer.eval()

        def precompute() -> None:
            latents, residuals = latents_and_residuals(run, trainer, pixels, draws, self.prompts)
            self.stored = {"latents": latents[0], **{key: residual[0] for key, residual in residuals.items()}}

        placed = [*self._skipped(), trainer.vae]
        beside = {
            "resident": [trainer.transformer] if run.args.offload else [trainer.transformer, trainer.vae],
            "passing": placed if run.args.offload else (),
            "held": [pixels],
            "elsewhere": self.prompts[draws[0].prompt].values(),
            "counts_flops": self.counts_flops,
        }
        state = optimizer_state(trainer.optimizer)
        if run.plan.period_steps < run.plan.max_steps:  # all passes but the first find it there
            beside["held"] += state
        found = [meter_phase("precompute", precompute, **beside)]
        if run.validates_before_the_end:
            action = self._drawing(trainer.transformer, 1, run.weight_dtype)
            found.append(meter_phase("validate", action, **{**beside, "held": state}))
        return found

    def _skipped(self) -> list[nn.Module]:
        """The blocks and layers that training takes off the device."""
        transformer, plan = self.trainer.transformer, self.run.plan
        trained = trained_blocks(transformer, plan.skip_first, plan.skip_last)
        blocks = [block for name, block in named_blocks(transformer).items() if name not in trained]
        return [*blocks, *map(transformer.get_submodule, plan.modulations)]

    def _train(self) -> list[PhaseEstimate]:
        """An optimizer step as `train` takes it."""
        run, trainer, plan = self.run, self.trainer, self.run.plan
        trainer.handle = skip_blocks(trainer.transformer, plan.skip_first, plan.skip_last, plan.modulations)
        trainer.transformer.train()
        draw = run.draw_source().sample(0)[0]
        dtype = DTYPES[run.args.residual_dtype]
        exact = ("latents", "modulation.")
        residuals = {k: value if k.startswith(exact) else value.to(dtype) for k, value in self.stored.items()}
        rows = 2 if run.args.with_prior_preservation else 1
        batch = collate_draws([[(draw, dict(residuals))] for _ in range(rows * run.plan.batch_size)])

        def backward() -> None:
            flow_matching_loss(run, trainer, batch, self.prompts).backward()

        def step() -> None:
            for _ in range(min(run.plan.accumulation, 2)):  # gradients lie there from the second batch on
                backward()
            torch.nn.utils.clip_grad_norm_(trainer.parameters, run.args.max_grad_norm)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=True)

        held = [*optimizer_state(trainer.optimizer), batch.latents, batch.noise, *batch.residuals.values()]
        if run.plan.num_processes > 1:
            held += [torch.zeros_like(parameter) for parameter in trainer.parameters]  # buckets of DDP
        found = meter_phase(
            "train",
            step,
            resident=[trainer.transformer],
            held=held,
            elsewhere=self.prompts[draw.prompt].values(),
            counts_flops=False,
        )
        flops = count_flops(backward) * run.plan.accumulation if self.counts_flops else 0
        return [dataclasses.replace(found, flops=flops)]


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that an optimizer keeps for its parameters."""
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def estimate_phases(run: Run, only: Iterable[str] | None = None, *, counts_flops: bool = True) -> list[PhaseEstimate]:
    """What the phases of a run need on the device; takes seconds, no weights and no GPU.

    Of images drawn in training and after it, the larger estimate counts.
    """
    highest: dict[str, PhaseEstimate] = {}
    for phase in PhaseMeter(run, counts_flops=counts_flops).estimates(only):
        if phase.name not in highest or phase.peak_device_bytes > highest[phase.name].peak_device_bytes:
            highest[phase.name] = phase
    return list(highest.values())


def estimate_run(run: Run) -> None:
    """Put the estimates beside what the report will measure, and warn where the device at hand is too small."""
    if not run.accelerator.is_main_process:
        return
    try:
        phases = estimate_phases(run, counts_flops=False)
    except Exception as problem:  # of a library that cannot compute without data; the run itself does not need it
        logger.warning(f"what the phases need cannot be estimated: {str(problem).splitlines()[0]}")
        return
    run.report.estimates |= {phase.name: phase for phase in phases}
    if run.accelerator.device.type != "cuda":
        return
    memory = torch.cuda.get_device_properties(run.accelerator.device).total_memory
    for phase in run.report.estimates.values():
        if phase.peak_device_bytes > memory:
            logger.warning(
                f"the phase '{phase.name}' needs about {readable(phase.peak_device_bytes)}, this device has "
                f"{readable(memory)}: the same command with --dry_run --device_memory_gb {memory / 2**30:.0f} tells "
                "which flags help"
            )


def dry_run(run: Run) -> None:
    """Print the plan and what every phase needs, as a table; write it as JSON if asked to."""
    if not run.accelerator.is_main_process:
        return
    limit = (run.args.device_memory_gb or math.inf) * 2**30
    phases = estimate_phases(run)
    transformer = training_structure_of(run)
    lora_parameters = sum(p.numel() for p in transformer.parameters() if p.requires_grad)
    too_large = [phase.name for phase in phases if phase.peak_device_bytes > limit]
    remedy = find_remedy(run, limit, too_large) if too_large else None
    content = {
        "plan": dataclasses.asdict(run.plan),
        "lora_parameters": lora_parameters,
        "residual_bytes": run.plan.residual_bytes,
        "phases": [dataclasses.asdict(phase) for phase in phases],
    }
    if run.args.device_memory_gb:
        content |= {"device_memory_bytes": int(limit), "too_large": too_large, "remedy": remedy}
    if run.args.dry_run_json:
        text = json.dumps(content, indent=2)
        write_atomically(pathlib.Path(run.args.dry_run_json), lambda partial: partial.write_text(text))
    for line in run.plan.describe():
        print(line)
    print(f"{lora_parameters:,} LoRA parameters\n")
    print(estimate_table(phases, limit))
    if too_large:
        print(f"\nDoes not fit {run.args.device_memory_gb:g} GiB: {', '.join(too_large)}.")
        print(f"These flags would make it fit: {remedy}" if remedy else "None of the flags that save memory suffices.")


def estimate_table(phases: list[PhaseEstimate], limit: float) -> str:
    """Estimates as a table for the terminal; `limit` in bytes, infinite if none was given."""
    lines = [f"{'phase':<16}{'weights':>12}{'device peak':>13}{'TFLOP':>11}"]
    for phase in phases:
        fits = "" if math.isinf(limit) else "   fits" if phase.peak_device_bytes <= limit else "   TOO LARGE"
        sizes = f"{readable(phase.weights_bytes):>12}{readable(phase.peak_device_bytes):>13}"
        lines.append(f"{phase.name:<16}{sizes}{phase.flops / 1e12:>11.3g}{fits}")
    return "\n".join(lines)


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def memory_savers(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of flags that save memory, those that cost the user least first: (words, changed arguments)."""
    args, plan = run.args, run.plan
    if not args.offload:
        yield "--offload", {"offload": True}
    if args.precompute_batch_size > 1:
        yield "--precompute_batch_size 1", {"precompute_batch_size": 1}
    if args.train_batch_size > 1:
        changes = {
            "train_batch_size": 1,
            "gradient_accumulation_steps": args.gradient_accumulation_steps * args.train_batch_size,
        }
        yield " ".join(f"--{name} {value}" for name, value in changes.items()), changes
    if not args.gradient_checkpointing:
        yield "--gradient_checkpointing", {"gradient_checkpointing": True}
    for ratio in (0.3, 0.4, 0.5):
        if skip_count(ratio, plan.depth) > plan.skip_first + plan.skip_last:
            counts = " in place of --skip_first, --skip_last" if args.skip_first + args.skip_last else ""
            changes = {"skip_ratio": ratio, "skip_first": 0, "skip_last": 0}
            yield f"--skip_ratio {ratio}{counts}", changes
    if args.patch_resolution > run.family.patch_resolution:
        size = run.family.patch_resolution
        yield f"--patch_resolution {size}", {"patch_resolution": size}
    if not importlib.util.find_spec("bitsandbytes"):
        return
    if args.optimizer == "adamw" and not args.use_8bit_adam:
        yield "--use_8bit_adam", {"use_8bit_adam": True}
    if not run.quantization:
        yield "--bnb_quantization_config_path examples/nf4.json", {"quantization": NF4}


def with_changes(run: Run, changes: Mapping[str, Any]) -> Run:
    """The run with other flags."""
    changes = dict(changes)
    quantization = changes.pop("quantization", None)
    args = argparse.Namespace(**{**vars(run.args), **changes})
    transformer = transformer_structure(args, run.family)
    count, processes = len(run.photos), run.plan.num_processes
    plan = make_plan(args, run.family, transformer, count, run.plan.seed, processes, run.weight_dtype)
    return dataclasses.replace(
        run,
        args=args,
        plan=plan,
        quantization=BitsAndBytesConfig(**quantization) if quantization else run.quantization,
    )


def find_remedy(run: Run, limit: float, too_large: list[str]) -> str | None:
    """The smallest change of flags found under which the phases fit; None if none of `memory_savers` suffices.

    They are added one by one, the cheapest first, until the phases fit; then those that turn out needless are dropped.
    """

    def fits(savers: Mapping[str, dict]) -> bool:
        changes = {name: value for change in savers.values() for name, value in change.items()}
        phases = estimate_phases(with_changes(run, changes), too_large, counts_flops=False)
        return all(phase.peak_device_bytes <= limit for phase in phases)

    level = logger.level
    logger.setLevel(logging.ERROR)  # each trial makes a plan, which has its say
    try:
        savers = dict(memory_savers(run))
        chosen: dict[str, dict] = {}
        for words, change in savers.items():
            chosen = {other: taken for other, taken in chosen.items() if set(taken) != set(change)} | {words: change}
            if fits(chosen):
                break
        else:
            return None
        for words in list(chosen)[-2::-1]:
            fewer = {other: change for other, change in chosen.items() if other != words}
            chosen = fewer if fits(fewer) else chosen
        return " ".join(chosen)
    finally:
        logger.setLevel(level)
