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
"""examples/select_blocks.py: both metrics, LoRAs, resuming, and the picture.

These fail if a metric does not find the blocks that carry the prompt, if a subject is probed with another's LoRA or
prompt, if an interrupted measurement starts over or ends differently, or if the picture marks another pair than is
printed.
"""

import json

import pytest
import torch
from PIL import Image, ImageColor
from test_curves import report_of
from transformers import CLIPImageProcessor, CLIPModel, ViTImageProcessor, ViTModel

import blockskip_utils as blockskip
import select_blocks
from conftest import CATS, parser_refusal, reset_accelerate


@pytest.fixture
def select(case, planted, vision, tmp_path):
    """Run the tool on the pipeline with known blocks; flags of the same name take the place of the usual ones."""

    def run(metric, output, *extra, prompts=("a photo of sks",)):
        words = ["--pretrained_model_name_or_path", planted[0], "--metric", metric, "--output", tmp_path / output]
        words += ["--resolution", case.resolution, "--max_sequence_length", 32]
        words += [word for prompt in prompts for word in ("--prompt", prompt)]
        if metric == "image":
            words += ["--num_inference_steps", 2]
            words += [] if "--embedding_model" in extra else ["--embedding_model", vision / "dino"]
        else:
            words += ["--instance_data_dir", CATS]
        reset_accelerate()
        select_blocks.main(select_blocks.parse_args([str(word) for word in (*words, *extra)]))
        return blockskip.BlockCurves.load(tmp_path / output)

    return run


@pytest.mark.parametrize("metric", ["image", "prediction"])
def test_curves_window_and_choice_find_the_blocks_that_carry_the_prompt(select, case, planted, tmp_path, metric):
    curves, (first, last) = select(metric, "c.json"), planted[2]
    carriers = set(range(first, case.depth - last))
    assert [d > 0 for d in curves.first] == [n > first for n in range(case.depth)]
    assert [d > 0 for d in curves.last] == [m > last for m in range(case.depth)]
    size = curves.window_size
    windows = [bool(carriers & set(range(start, start + size))) for start in range(case.depth - size + 1)]
    assert [d > 0 for d in curves.window] == windows
    assert curves.metric == metric and curves.samples == (1 if metric == "image" else blockskip.PROBE_DRAWS)
    case.run(
        case.command(
            *(CATS, tmp_path / "out", "--pretrained_model_name_or_path", planted[0]),
            *("--skip_ratio", planted[1], "--block_curves", tmp_path / "c.json"),
        )
    )
    plan = report_of(tmp_path / "out")["plan"]
    assert (plan["skip_first"], plan["skip_last"]) == (first, last)


def test_what_a_run_measures_is_what_the_tool_measures(select, case, planted, tmp_path):
    """At one size for the whole photo and for the network."""
    size = case.family.patch_resolution
    flags = ("--resolution", size, "--patch_resolution", size, "--skip_ratio", 0.5)
    case.run(case.command(CATS, tmp_path / "out", "--pretrained_model_name_or_path", planted[0], *flags))
    of_run = blockskip.BlockCurves.load(tmp_path / "out" / "block_curves.json")
    of_tool = select("prediction", "c.json", "--resolution", size)
    assert (of_tool.first, of_tool.last, of_tool.window) == (of_run.first, of_run.last, of_run.window)


@pytest.mark.parametrize("metric", ["image", "prediction"])
def test_offloading_measures_the_same(select, metric):
    assert select(metric, "plain.json").first == select(metric, "offloaded.json", "--offload").first


@pytest.mark.parametrize("metric", ["image", "prediction"])
def test_each_subject_is_probed_with_its_own_lora_and_prompt(select, case, planted, tmp_path, metric):
    prompts, loras = ("a photo of sks", "a drawing of a hat"), []
    for number, prompt in enumerate(prompts):
        model = ("--pretrained_model_name_or_path", planted[0], "--seed", number, "--learning_rate", 0.1)
        case.run(case.command(CATS, tmp_path / f"lora{number}", *model, prompt=prompt))
        loras += ["--lora", tmp_path / f"lora{number}"]
    together = select(metric, "both.json", *loras, prompts=prompts)
    alone = [select(metric, f"{i}.json", *loras[2 * i : 2 * i + 2], prompts=prompts[i : i + 1]) for i in (0, 1)]
    mean = [sum(pair) / 2 for pair in zip(alone[0].last, alone[1].last, strict=True)]
    assert together.last == pytest.approx(mean, rel=1e-6)
    bare = select(metric, "bare.json", prompts=prompts[:1])
    assert len({alone[0].last, alone[1].last, bare.last}) == 3
    assert together.samples == 2 * bare.samples


@pytest.mark.parametrize("metric", ["image", "prediction"])
def test_an_interrupted_measurement_goes_on_and_ends_like_a_straight_one(select, tmp_path, monkeypatch, metric):
    straight = select(metric, "straight.json")
    original, calls = blockskip.cosine_distance, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(blockskip, "cosine_distance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            select(metric, "killed.json")
    assert not (tmp_path / "killed.json").exists()
    unfinished = json.loads((tmp_path / "killed.unfinished.json").read_text())
    assert sum(map(len, unfinished["distances"].values())) == 7
    counted = []
    monkeypatch.setattr(blockskip, "cosine_distance", lambda *args: counted.append(1) or original(*args))
    killed = select(metric, "killed.json")
    assert (killed.first, killed.last, killed.window) == (straight.first, straight.last, straight.window)
    assert len(counted) == straight.samples * len(blockskip.block_masks(straight.depth)) - 7
    assert not (tmp_path / "killed.unfinished.json").exists()
    assert select(metric, "killed.json") == killed and len(counted) + 7 == straight.samples * len(
        blockskip.block_masks(straight.depth)
    )  # what is finished is not measured again


@pytest.mark.parametrize("left", ["killed.unfinished.json", "killed.json"])
def test_files_of_another_measurement_are_refused_and_stay(flux, select, tmp_path, left):
    content = {"depth": 8, "first": [0.0] * 8, "last": [0.0] * 8, "measured_on": {"seed": 3}, "distances": {}}
    (tmp_path / left).write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=left):
        select("prediction", "killed.json")
    assert json.loads((tmp_path / left).read_text()) == content


def test_images_are_compared_by_what_the_vision_model_says(vision):
    image = Image.effect_noise((48, 48), 80).convert("RGB")
    vectors = {name: select_blocks.Embedder(str(vision / name), torch.device("cpu"))(image) for name in WIDTHS}
    assert {name: tuple(vector.shape) for name, vector in vectors.items()} == {n: (1, w) for n, w in WIDTHS.items()}
    pixels = ViTImageProcessor.from_pretrained(vision / "dino")(images=image, return_tensors="pt")["pixel_values"]
    dino = ViTModel.from_pretrained(vision / "dino").eval()
    with torch.no_grad():
        assert torch.equal(vectors["dino"], dino(pixel_values=pixels).last_hidden_state[:, 0])
        clip = CLIPModel.from_pretrained(vision / "clip").eval()
        pixels = CLIPImageProcessor.from_pretrained(vision / "clip")(images=image, return_tensors="pt")["pixel_values"]
        seen = clip.visual_projection(clip.vision_model(pixel_values=pixels).pooler_output)
    assert torch.equal(vectors["clip"], seen)


WIDTHS = {"dino": 32, "clip": 16, "convolutional": 8}


def test_clip_measures_too(flux, vision, select, planted):
    curves = select("image", "clip.json", "--embedding_model", vision / "clip", "--num_images", 2)
    assert curves.first[planted[2][0]] == 0 < curves.first[planted[2][0] + 1] and curves.samples == 2


def test_picture_marks_the_pairs_that_are_printed(case, planted, tmp_path, capsys):
    case.run(case.command(CATS, tmp_path, "--pretrained_model_name_or_path", planted[0], "--skip_ratio", 0.5))
    plan = report_of(tmp_path)["plan"]
    words = ["--pretrained_model_name_or_path", planted[0], "--curves", tmp_path / "block_curves.json"]
    capsys.readouterr()
    select_blocks.main(select_blocks.parse_args([str(word) for word in words]))
    printed = capsys.readouterr().out
    assert f"50% of {case.depth} blocks: --skip_first {plan['skip_first']} --skip_last {plan['skip_last']}" in printed
    picture = Image.open(tmp_path / "block_curves.png")
    curves = blockskip.BlockCurves.load(tmp_path / "block_curves.json")
    panel = select_blocks.Panel(None, (1070, 60, 1450, 440), case.depth, case.depth)
    place = panel.at(plan["skip_first"] + 0.5, plan["skip_last"] + 0.5)
    assert picture.getpixel(tuple(map(round, place))) == ImageColor.getrgb(select_blocks.PAIR_COLOURS[2])
    highest = max(curves.first[n] + curves.last[m] for n in range(case.depth) for m in range(case.depth - n))
    n, m = case.depth - 1, 0
    pixel = picture.getpixel(tuple(map(round, panel.at(n + 0.3, m + 0.7))))
    assert pixel == select_blocks.shade((curves.first[n] + curves.last[m]) / highest)


def test_picture_of_curves_that_are_all_zero_or_have_no_window():
    curves = blockskip.BlockCurves(depth=3, first=(0.0,) * 3, last=(0.0,) * 3)
    pairs = dict.fromkeys(select_blocks.RATIOS, (1, 1))
    assert select_blocks.draw_picture(curves, pairs).size == (1560, 520)


MISTAKES = {
    "": "--prompt",
    "--prompt a --lora x --lora y": "--lora",
    "--prompt a --prompt b --prompt c --lora x --lora y": "--lora",
    "--prompt a --metric prediction": "--instance_data_dir",
    "--prompt a --instance_data_dir photos": "--instance_data_dir",
    "--prompt a --metric prediction --instance_data_dir photos --num_images 2": "--num_images",
    "--prompt a --curves c.json": "--curves",
    "--prompt a --metric other": "--metric",
    "--prompt a --num_images 0": "--num_images",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_contradictory_flags_are_one_plain_line(flags, capsys):
    words = ["--pretrained_model_name_or_path", "m", *flags.split()]
    assert MISTAKES[flags] in parser_refusal(select_blocks.parse_args, words, capsys)


def test_what_cannot_be_loaded_is_named(flux, vision, tmp_path):
    usual = {
        "--pretrained_model_name_or_path": flux.pipeline,
        "--prompt": "a",
        "--output": tmp_path / "c.json",
        "--resolution": 64,
        "--embedding_model": vision / "dino",
    }
    wrong = {
        "--pretrained_model_name_or_path": tmp_path,
        "--resolution": 65,
        "--embedding_model": tmp_path,
        "--lora": tmp_path,
        "--curves": tmp_path / "none.json",
    }
    for flag, value in wrong.items():
        given = {**usual, flag: value}
        if flag == "--curves":
            del given["--prompt"]
        words = [str(word) for pair in given.items() for word in pair]
        reset_accelerate()
        with pytest.raises(SystemExit, match=rf"error: {flag} {value}"):
            select_blocks.main(select_blocks.parse_args(words))
