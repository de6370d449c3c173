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
"""Tiny models and ways to run a script that the tests share."""

import os
import pathlib
import subprocess
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ["ACCELERATE_USE_CPU"] = "true"

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from diffusers import FluxTransformer2DModel
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import train_dreambooth_blockskip_flux as flux_script
from build_tiny_pipeline import build_tiny_flux

CATS = ROOT / "examples" / "cat"
FLUX_SCRIPT = ROOT / "train_dreambooth_blockskip_flux.py"
torch.set_num_threads(1)  # tiny models: threads only wait for each other


@pytest.fixture(scope="session")
def tiny_flux(tmp_path_factory) -> pathlib.Path:
    """A FLUX pipeline with random weights, of 3 double and 5 single blocks."""
    return build_tiny_flux(tmp_path_factory.mktemp("models") / "flux")


@pytest.fixture
def colours(tmp_path) -> pathlib.Path:
    """Five photos of one colour each, of different sizes, with captions that name the colour."""
    folder = tmp_path / "colours"
    folder.mkdir()
    sizes = {"red": (40, 60), "lime": (64, 48), "blue": (50, 50), "white": (33, 90), "black": (120, 45)}
    lines = []
    for name, size in sizes.items():
        Image.new("RGB", size, name).save(folder / f"{name}.png")
        lines.append(f'{{"file_name": "{name}.png", "text": "a photo of {name}"}}\n')
    (folder / "metadata.jsonl").write_text("".join(lines))
    return folder


def make_flux(double: int = 3, single: int = 5, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A small FLUX transformer in memory, with weights large enough that every block matters."""
    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(
        in_channels=8,
        num_layers=double,
        num_single_layers=single,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        axes_dims_rope=(2, 2, 4),
        guidance_embeds=True,
    )
    for parameter in transformer.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[1] ** 0.5)
    return transformer.to(dtype).eval()


def flux_inputs(batch: int = 2, side: int = 2, text: int = 5, dtype: torch.dtype = torch.float32) -> dict:
    """Keyword arguments of a forward pass of `make_flux`."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.zeros(side, side, 3)
    ids[..., 1], ids[..., 2] = torch.arange(side)[:, None], torch.arange(side)
    return {
        "hidden_states": torch.randn(batch, side * side, 8, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(batch, text, 12, generator=generator).to(dtype),
        "pooled_projections": torch.randn(batch, 10, generator=generator).to(dtype),
        "timestep": torch.linspace(0.3, 0.9, batch).to(dtype),
        "guidance": torch.full((batch,), 3.5).to(dtype),
        "img_ids": ids.reshape(-1, 3).to(dtype),
        "txt_ids": torch.zeros(text, 3).to(dtype),
        "return_dict": False,
    }


def legal_counts(depth: int) -> list[tuple[int, int]]:
    """Every (skip_first, skip_last) that leaves a block to train."""
    return [(n, m) for n in range(depth) for m in range(depth - n)]


def command(pipeline, photos, output, *extra, prompt="a photo of sks", steps=2) -> list[str]:
    """The flags of a quick run on the tiny FLUX."""
    base = {
        "--pretrained_model_name_or_path": pipeline,
        "--instance_data_dir": photos,
        "--output_dir": output,
        "--resolution": 64,
        "--patch_resolution": 32,
        "--max_sequence_length": 32,
        "--train_batch_size": 1,
        "--max_train_steps": steps,
        "--seed": 0,
        "--report_to": "none",
    }
    if prompt:
        base["--instance_prompt"] = prompt
    extra = [str(word) for word in extra]
    given = [word for pair in base.items() if pair[0] not in extra and pair[1] is not None for word in pair]
    return [str(word) for word in given] + extra


def reset_accelerate() -> None:
    """Forget the accelerator of an earlier run in this process."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


def run_flux(arguments: list[str]) -> None:
    """Run the FLUX script in this process."""
    reset_accelerate()
    flux_script.main(flux_script.parse_args([str(word) for word in arguments]))


def launch(
    script: pathlib.Path, arguments: list[str], processes: int = 1, **environment
) -> subprocess.CompletedProcess:
    """Run a script as users do, in one or more real processes on the CPU."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return subprocess.run(
        [*launcher, str(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
