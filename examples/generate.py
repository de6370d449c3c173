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
"""Draw pictures with a FLUX or SANA pipeline and a LoRA that the training scripts wrote.

    python examples/generate.py --pretrained_model_name_or_path black-forest-labs/FLUX.1-dev \
        --lora flux-dreambooth-lora --prompt "a photo of sks cat on the moon" --output pictures

With --compare each picture is drawn without the LoRA as well, from the same noise.
"""

import argparse
import hashlib
import inspect
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_args(input_args: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line, or `input_args`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pretrained_model_name_or_path", required=True, help="Folder or hub id of the pipeline.")
    parser.add_argument("--lora", help="Folder, .safetensors file or hub id of a LoRA; without it: the bare model.")
    parser.add_argument("--compare", action="store_true", help="Draw each picture without the LoRA, too.")
    parser.add_argument("--prompt", required=True, action="append", help="May be given several times.")
    parser.add_argument("--output", type=Path, default=Path("pictures"), help="Folder for the PNG files.")
    parser.add_argument("--device", help="Default: the first GPU, else the CPU.")
    add_drawing_arguments(parser)
    args = parser.parse_args(input_args)
    if args.compare and not args.lora:
        parser.error("--compare compares with and without a LoRA: name one with --lora")
    return args


def add_drawing_arguments(parser: Any) -> list[argparse.Action]:
    """Adds the flags that say how pictures are drawn to a parser or a group of one."""
    return [
        parser.add_argument("--lora_scale", type=float, default=1.0, help="How strongly the LoRA acts."),
        parser.add_argument("--num_images", type=int, default=1, help="Pictures for each prompt."),
        parser.add_argument("--height", type=int, default=1024, help="Pixels."),
        parser.add_argument("--width", type=int, default=1024, help="Pixels."),
        parser.add_argument("--num_inference_steps", type=int, help="Default: the pipeline's own."),
        parser.add_argument("--guidance_scale", type=float, help="Default: the pipeline's own."),
        parser.add_argument(
            "--true_cfg_scale", type=float, help="FLUX: guidance away from the empty prompt, which takes two passes."
        ),
        parser.add_argument("--max_sequence_length", type=int, help="Of a prompt. Default: the pipeline's own."),
        parser.add_argument(
            "--seed", type=int, default=0, help="Of the first picture of a prompt; the next has seed + 1."
        ),
        parser.add_argument("--dtype", choices=DTYPES, help="Default: bf16, and fp32 on a CPU."),
        parser.add_argument(
            "--offload", action="store_true", help="Keep on the GPU only the part of the pipeline that is at work."
        ),
    ]


def load_pipeline(args: argparse.Namespace) -> DiffusionPipeline:
    """The pipeline without a LoRA, on the device it will run on."""
    device = args.device or default_device()
    # diffusers 0.35, still supported, knows `torch_dtype` only; newer ones warn of it
    warnings.filterwarnings("ignore", message=".*`torch_dtype` is deprecated", category=FutureWarning)
    pipeline = DiffusionPipeline.from_pretrained(
        args.pretrained_model_name_or_path, torch_dtype=DTYPES[dtype_name(args)]
    )
    if args.offload:
        pipeline.enable_model_cpu_offload(device=device)
        return pipeline
    return pipeline.to(device)


def load_lora(pipeline: DiffusionPipeline, lora: str, adapter_name: str) -> None:
    """Loads a LoRA under a name of its own: a folder, a .safetensors file or a hub id."""
    path = Path(lora)
    folder, file = (path.parent, path.name) if path.is_file() else (lora, None)
    pipeline.load_lora_weights(str(folder), weight_name=file, adapter_name=adapter_name)
    pipeline.transformer.eval()  # the LoRA's layers come in training mode, with their dropout


def lora_files(lora: str | Path) -> list[Path]:
    """The files of a LoRA on this machine; none for one on the hub."""
    path = Path(lora)
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def files_digest(files: Iterable[Path]) -> str:
    """SHA-256 of what stands in the files, one after another."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def dtype_name(args: argparse.Namespace) -> str:
    """The precision of the weights, by its name in DTYPES."""
    return args.dtype or ("fp32" if (args.device or default_device()) == "cpu" else "bf16")


def default_device() -> str:
    """The first GPU there is, else the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def draw(
    pipeline: DiffusionPipeline, args: argparse.Namespace, prompts: list[str], seeds: list[int]
) -> list[Image.Image]:
    """A picture for each prompt with its seed, together; a seed starts from the same noise on every device."""
    names = ("num_inference_steps", "guidance_scale", "true_cfg_scale", "max_sequence_length")
    choices: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    known = inspect.signature(pipeline.__call__).parameters
    if "true_cfg_scale" in choices:
        if "true_cfg_scale" not in known:
            sys.exit("error: --true_cfg_scale is for FLUX; this pipeline is guided by --guidance_scale")
        choices["negative_prompt"] = [""] * len(prompts)
    if "use_resolution_binning" in known:
        choices["use_resolution_binning"] = False  # SANA would go to the next size of its table
    return pipeline(
        prompt=prompts,
        height=args.height,
        width=args.width,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        **choices,
    ).images


def picture_name(number: int, seed: int) -> str:
    """The file of a picture: prompts are numbered from 0."""
    return f"prompt{number}-seed{seed}.png"


def difference(first: Image.Image, second: Image.Image) -> float:
    """The mean absolute difference of two pictures, in steps of 0 to 255."""
    return float(np.abs(np.asarray(first, dtype=np.float32) - np.asarray(second, dtype=np.float32)).mean())


def main(args: argparse.Namespace) -> None:
    """Draws what the command line asks for."""
    try:
        pipeline = load_pipeline(args)
        if args.lora:
            load_lora(pipeline, args.lora, "subject")
            pipeline.set_adapters("subject", args.lora_scale)
    except (OSError, ValueError) as problem:  # no such folder or repository, no LoRA in it, one of another model
        sys.exit(f"error: {str(problem).splitlines()[0]}")
    args.output.mkdir(parents=True, exist_ok=True)
    for number, prompt in enumerate(args.prompt):
        for seed in range(args.seed, args.seed + args.num_images):
            (picture,) = draw(pipeline, args, [prompt], [seed])
            path = args.output / picture_name(number, seed)
            picture.save(path)
            print(path)
            if args.compare:
                pipeline.disable_lora()
                (bare,) = draw(pipeline, args, [prompt], [seed])
                pipeline.enable_lora()
                path = path.with_stem(f"{path.stem}-without-lora")
                bare.save(path)
                print(f"{path}, which differs by {difference(picture, bare):.1f} of 255 a pixel on average")


if __name__ == "__main__":
    main(parse_args())
