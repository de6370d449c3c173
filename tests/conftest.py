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

import dataclasses
import gc
import os
import pathlib
import shutil
import subprocess
import sys
import types

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ["ACCELERATE_USE_CPU"] = "true"

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from diffusers import DiffusionPipeline, FluxTransformer2DModel, SanaTransformer2DModel
from PIL import Image
from torch._guards import detect_fake_mode
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    ConvNextConfig,
    ConvNextImageProcessor,
    ConvNextModel,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "examples" / "mini_flux")]

import blockskip_utils as blockskip
import train_dreambooth_blockskip_flux as flux_script
import train_dreambooth_blockskip_sana as sana_script
from build_tiny_pipeline import build_tiny_flux, build_tiny_sana, clip_tokenizer

CATS = ROOT / "examples" / "cat"
SIDE = {"height": 32, "width": 32}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
torch.set_num_threads(1)  # tiny models: threads only wait for each other


def pytest_addoption(parser):
    parser.addoption(
        "--kills", type=int, default=0, help="The long form of test_kill.py: so many kills of each script."
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """A script, and the tiny pipeline that it is tried on.

    Attributes:
        skip: Flags that skip blocks at both ends.
        trained: Names of the blocks that they leave.
    """

    script: types.ModuleType
    pipeline: pathlib.Path
    resolution: int
    skip: tuple
    trained: tuple[str, ...]

    @property
    def family(self):
        return getattr(self.script, "FLUX", None) or self.script.SANA

    @property
    def depth(self) -> int:
        return len(self.trained) + self.skip[1] + self.skip[3]

    @property
    def file(self) -> pathlib.Path:
        return pathlib.Path(self.script.__file__)

    def command(self, photos, output, *extra, prompt="a photo of sks", steps=2) -> list[str]:
        """The flags of a quick run; `extra` ones take the place of those of the same name."""
        base = {
            "--pretrained_model_name_or_path": self.pipeline,
            "--instance_data_dir": photos,
            "--instance_prompt": prompt,
            "--output_dir": output,
            "--resolution": self.resolution,
            "--patch_resolution": self.resolution // 2,
            "--max_sequence_length": 32,
            "--train_batch_size": 1,
            "--max_train_steps": steps,
            "--seed": 0,
            "--report_to": "none",
        }
        extra = [str(word) for word in extra]
        given = [word for pair in base.items() if pair[0] not in extra and pair[1] is not None for word in pair]
        return [str(word) for word in given] + extra

    def run(self, arguments: list, *, estimates: bool = False) -> None:
        """Run the script in this process; estimates for its report take longer than a tiny run, and are left out."""
        reset_accelerate()
        with pytest.MonkeyPatch.context() as patch:
            if not estimates:
                patch.setattr(blockskip, "estimate_run", lambda run: None)
            self.script.main(self.script.parse_args([str(word) for word in arguments]))


def ready(folder: pathlib.Path) -> pathlib.Path:
    """Import all that a pipeline needs, and keep it out of the garbage collections by which runs free their memory."""
    DiffusionPipeline.from_pretrained(folder)
    gc.collect()
    gc.freeze()
    return folder


@pytest.fixture(scope="session")
def flux(tmp_path_factory) -> Case:
    """The FLUX script and a pipeline of 3 double and 5 single blocks."""
    folder = ready(build_tiny_flux(tmp_path_factory.mktemp("models") / "flux"))
    trained = ("transformer_blocks.2.", "single_transformer_blocks.0.", "single_transformer_blocks.1.")
    return Case(flux_script, folder, 64, ("--skip_first", 2, "--skip_last", 3), trained)


@pytest.fixture(scope="session")
def sana(tmp_path_factory) -> Case:
    """The SANA script and a pipeline of 6 blocks."""
    folder = ready(build_tiny_sana(tmp_path_factory.mktemp("models") / "sana"))
    trained = ("transformer_blocks.2.", "transformer_blocks.3.")
    return Case(sana_script, folder, 128, ("--skip_first", 2, "--skip_last", 2), trained)


@pytest.fixture(params=["flux", "sana"], scope="session")
def case(request) -> Case:
    """Each script in turn."""
    return request.getfixturevalue(request.param)


# which blocks carry the prompt, the ratio that just spares them, and the pair that it must choose
PLANTED = {"FLUX": ({2, 3}, 0.75, (2, 4)), "SANA": ({1}, 0.83, (1, 4))}


def plant(transformer, carriers):
    """Let nothing that the other blocks attend to enter the image."""
    for index, block in enumerate(blockskip.named_blocks(transformer).values()):
        if index in carriers:
            continue
        with torch.no_grad():
            if hasattr(block, "attn2"):  # SANA
                block.attn2.to_out[0].weight.zero_()
            elif hasattr(block, "ff"):  # double block of FLUX
                block.attn.to_out[0].weight.zero_()
            else:  # single block: attention and feed-forward share an output layer
                block.proj_out.weight[:, : block.attn.inner_dim].zero_()
    return transformer


@pytest.fixture(scope="session")
def planted(case, tmp_path_factory):
    """The tiny pipeline with known blocks that carry the prompt; the ratio that just spares them, and the pair."""
    carriers, ratio, pair = PLANTED[case.family.name]
    folder = tmp_path_factory.mktemp("planted") / "pipeline"
    shutil.copytree(case.pipeline, folder)
    transformer = case.family.transformer_class.from_pretrained(folder / "transformer")
    plant(transformer, carriers).save_pretrained(folder / "transformer")
    return folder, ratio, pair


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


def parser_refusal(parse_args, words: list[str], capsys) -> str:
    """The line with which a command line is refused; more than one line fails."""
    with pytest.raises(SystemExit):
        parse_args(words)
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


@pytest.fixture(scope="session")
def vision(tmp_path_factory):
    """Tiny vision models with random weights: one with a class token, one that knows text, a convolutional one."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vision")
    tokenizer = clip_tokenizer()
    part = {**SMALL, "image_size": 32, "patch_size": 8, "projection_dim": 16, "vocab_size": len(tokenizer)}
    part |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    models = {
        "dino": (ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8)), ViTImageProcessor(size=SIDE)),
        "clip": (
            CLIPModel(CLIPConfig(text_config=part, vision_config=part, projection_dim=16)),
            CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SIDE),
        ),
        "convolutional": (
            ConvNextModel(ConvNextConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], image_size=32)),
            ConvNextImageProcessor(size={"shortest_edge": 32}),
        ),
    }
    for name, (model, processor) in models.items():
        model.save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / "clip")
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


def make_sana(dtype: torch.dtype = torch.float32, seed: int = 0):
    """A small SANA transformer in memory, of 5 blocks, with weights large enough that every block matters."""
    torch.manual_seed(seed)
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=5,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=12,
        sample_size=4,
        mlp_ratio=2.0,
    )
    for name, parameter in transformer.named_parameters():
        if parameter.ndim > 1 and "scale_shift_table" not in name:
            torch.nn.init.normal_(parameter, std=1.0 / parameter[0].numel() ** 0.5)
    return transformer.to(dtype).eval()


def sana_inputs(batch: int = 2, side: int = 3, text: int = 5, dtype: torch.dtype = torch.float32) -> dict:
    """Keyword arguments of a forward pass of `make_sana`."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(batch, text, dtype=torch.long)
    mask[:, -1] = 0
    return {
        "hidden_states": torch.randn(batch, 4, side, side, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(batch, text, 12, generator=generator).to(dtype),
        "encoder_attention_mask": mask,
        "timestep": torch.linspace(300, 900, batch).to(dtype),
        "return_dict": False,
    }


def legal_counts(depth: int) -> list[tuple[int, int]]:
    """Every (skip_first, skip_last) that leaves a block to train."""
    return [(n, m) for n in range(depth) for m in range(depth - n)]


def is_estimate() -> bool:
    """Whether the call at hand is an estimate's: these run the phases' own functions, on fake tensors."""
    return detect_fake_mode() is not None


def reset_accelerate() -> None:
    """Forget the accelerator of an earlier run in this process."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


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
