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
"""What only SANA has: its instruction to the text encoder, its scheduler's shift, its sizes.

These fail if training encodes a prompt otherwise than the pipeline at inference, ignores the shift of its sampler, or
draws images at another size than the run's.
"""

import json

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from PIL import Image
from test_refusals import refusal

import blockskip_utils as blockskip
from conftest import CATS, sana_script


@pytest.fixture
def prompts_of(sana, tmp_path, monkeypatch):
    """The encoded prompts of a run with the given flags."""

    def encode(*flags):
        seen = {}
        original = blockskip.encode_prompts

        def keep(run):
            seen.update(original(run))
            return dict(seen)

        monkeypatch.setattr(blockskip, "encode_prompts", keep)
        validation = ("--validation_prompt", "a dog", "--num_validation_images", 1)
        sana.run(sana.command(CATS, tmp_path / "out", *sana.skip, *validation, *flags, steps=1))
        return seen

    return encode


def fed_at_inference(sana, monkeypatch, prompt, **options):
    """The embeddings and masks, negative first, that the pipeline gives its transformer for a prompt."""
    fed = []
    original = SanaTransformer2DModel.forward

    def forward(self, *args, **kwargs):
        fed.append((kwargs["encoder_hidden_states"], kwargs["encoder_attention_mask"]))
        return original(self, *args, **kwargs)

    pipeline = SanaPipeline.from_pretrained(sana.pipeline)
    with monkeypatch.context() as patch:
        patch.setattr(SanaTransformer2DModel, "forward", forward)
        size = {"height": 64, "width": 64, "use_resolution_binning": False, "max_sequence_length": 32}
        pipeline(prompt, num_inference_steps=1, output_type="latent", **size, **options)
    return fed[0]


@pytest.mark.parametrize("instruction", [None, "", "Describe well:\n- a\nPrompt: "], ids=["default", "none", "own"])
def test_prompts_are_encoded_as_the_pipeline_does_at_inference(sana, prompts_of, monkeypatch, instruction):
    flags = () if instruction is None else ("--complex_human_instruction", instruction)
    options = (
        {} if instruction is None else {"complex_human_instruction": instruction.split("\n") if instruction else None}
    )
    encoded = prompts_of(*flags)
    embeds, mask = fed_at_inference(sana, monkeypatch, "a dog", **options)
    for row, prompt in enumerate(("", "a dog")):
        assert torch.equal(encoded[prompt]["prompt_embeds"][0], embeds[row])
        assert torch.equal(encoded[prompt]["prompt_attention_mask"][0], mask[row])


def test_the_instruction_makes_a_difference(prompts_of):
    one = prompts_of()["a dog"]["prompt_embeds"].clone()
    assert not torch.equal(one, prompts_of("--complex_human_instruction", "")["a dog"]["prompt_embeds"])


@pytest.mark.parametrize(("flags", "shift"), [([], 3.0), (["--timestep_shift", "1.5"], 1.5)])
def test_sigmas_follow_the_samplers_shift(sana, flags, shift):
    args = sana_script.parse_args(["--pretrained_model_name_or_path", "", *flags])
    scheduler = sana_script.load_scheduler(str(sana.pipeline), args)
    unshifted = torch.arange(1000, 0, -1) / 1000
    torch.testing.assert_close(scheduler.sigmas, shift * unshifted / (1 + (shift - 1) * unshifted))


def test_trained_noise_levels_are_those_of_the_sampler(sana):
    """The solver's own table, at as many steps as it has, is the one that training draws from."""
    config = json.loads((sana.pipeline / "scheduler" / "scheduler_config.json").read_text())
    solver = DPMSolverMultistepScheduler.from_config(config)
    solver.set_timesteps(1000)
    args = sana_script.parse_args(["--pretrained_model_name_or_path", ""])
    ours = sana_script.load_scheduler(str(sana.pipeline), args)
    torch.testing.assert_close(ours.sigmas[1:], solver.sigmas[1:-1], rtol=0, atol=2e-3)


def test_images_have_the_size_of_the_run(sana, tmp_path):
    prior = ("--with_prior_preservation", "--class_data_dir", tmp_path / "class", "--class_prompt", "c")
    validation = ("--validation_prompt", "x", "--num_validation_images", 1)
    sana.run(sana.command(CATS, tmp_path / "out", *prior, "--num_class_images", 1, *validation, steps=1))
    sizes = {Image.open(path).size for path in tmp_path.rglob("*.png")}
    assert sizes == {(128, 128)}


def test_tiling_leaves_small_images_as_they_are(sana, tmp_path):
    for name, flags in (("whole", ()), ("tiled", ("--enable_vae_tiling",))):
        sana.run(sana.command(CATS, tmp_path / name, *sana.skip, *flags, steps=2))
    one, other = (blockskip.load_file(tmp_path / name / blockskip.LORA_FILE) for name in ("whole", "tiled"))
    assert all(torch.equal(one[name], other[name]) for name in one)


MISTAKES = {
    "--resolution 1000": ["--resolution 1000", "992", "1024"],
    "--patch_resolution 16": ["--patch_resolution 16", "32"],
    "--max_sequence_length 301": ["--max_sequence_length", "300"],
    "--skip_first 3 --skip_last 3": ["--skip_first", "6"],
    "--guidance_scale 3": ["--guidance_scale"],
    "--train_text_encoder": ["--train_text_encoder"],
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_are_one_plain_line(sana, tmp_path, monkeypatch, capsys, flags):
    arguments = sana.command(CATS, tmp_path / "out", *flags.split(" "))
    message = refusal(arguments, monkeypatch, capsys, sana_script)
    assert all(part in message for part in MISTAKES[flags])


def test_the_other_model_is_refused_by_name(flux, sana, tmp_path, monkeypatch, capsys):
    arguments = sana.command(CATS, tmp_path / "out", "--pretrained_model_name_or_path", flux.pipeline)
    message = refusal(arguments, monkeypatch, capsys, sana_script)
    assert "FluxTransformer2DModel" in message and "SanaTransformer2DModel" in message
