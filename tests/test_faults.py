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
"""Faults that users of such scripts have reported, where no other test has the right value; FAULTS.md lists them all.

These fail if rows of a batch are mixed up, if what a folder holds beside images counts, if flips are frozen, or if
the list names a test that does not exist.
"""

import ast
import itertools
import pathlib
import re

import pytest
import torch
from accelerate.utils import DistributedType
from PIL import Image
from test_refusals import refusal
from test_runs import lora_of, spy_on

import blockskip_utils as blockskip
from conftest import CATS, is_estimate

HERE = pathlib.Path(__file__).resolve().parent


def names_in(file):
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_list_of_faults_names_exists():
    there = {f"{file.stem}.{name}" for file in HERE.glob("test_*.py") for name in names_in(file)}
    text = (HERE / "FAULTS.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| *(\d|S\d)", line)]
    named = [re.findall(r"`(test_\w+\.test_\w+)`", row) for row in rows]
    assert len(rows) >= 35 and all(named)
    assert sorted({name for names in named for name in names} - there) == []
    assert not re.findall(r"`test_\w+`", text)  # without its file, it would not have been looked for


def observed_forwards(case, monkeypatch):
    """Record, for each training step, the batch, the encoded prompts and what the transformer was called with."""
    seen, calls = [], []
    original = case.family.transformer_class.forward

    def forward(self, *args, **kwargs):
        if not is_estimate():
            calls.append(kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(case.family.transformer_class, "forward", forward)
    spy_on(
        monkeypatch,
        "flow_matching_loss",
        before=lambda *args: calls.clear(),
        after=lambda loss, run, trainer, batch, prompts: seen.append((batch, prompts, calls[-1])),
    )
    return seen


@pytest.mark.parametrize("captions", [False, True], ids=["one prompt", "captions"])
@pytest.mark.parametrize("prior", [False, True], ids=["alone", "prior"])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_each_row_of_embeddings_belongs_to_its_row_of_latents(
    case, colours, tmp_path, monkeypatch, captions, prior, batch_size
):
    """Photos and class images can be told apart by their colour, prompts by their embeddings."""
    flags = ["--train_batch_size", batch_size, *case.skip]
    flags += ["--caption_column", "text"] if captions else []
    if prior:
        (tmp_path / "class").mkdir()
        Image.new("RGB", (70, 70), "yellow").save(tmp_path / "class" / "a.png")
        flags += ["--with_prior_preservation", "--class_data_dir", tmp_path / "class", "--class_prompt", "a thing"]
        flags += ["--num_class_images", 1]
    seen = observed_forwards(case, monkeypatch)
    case.run(case.command(colours, tmp_path / "out", *flags, prompt="sks", steps=3))
    vae = blockskip.diffusers.DiffusionPipeline.from_pretrained(case.pipeline).vae
    wanted = {"yellow": colour_latents(case, vae, "yellow")}
    wanted |= {name: colour_latents(case, vae, name) for name in ("red", "lime", "blue", "white", "black")}
    rows = batch_size * (2 if prior else 1)
    for batch, prompts, inputs in seen:
        embeddings = inputs["encoder_hidden_states"]
        assert len(inputs["hidden_states"]) == len(embeddings) == len(batch.prompts) == rows
        assert embeddings.shape[1] == 32
        if case.family.name == "FLUX":  # positions have no batch dimension, and pooled embeddings a row each
            assert inputs["txt_ids"].shape == (32, 3) and inputs["img_ids"].ndim == 2
            assert inputs["pooled_projections"].shape == (rows, 32)
        for latents, embedding, prompt in zip(batch.latents, embeddings, batch.prompts, strict=True):
            mean = latents.mean(dim=(1, 2))
            colour = min(wanted, key=lambda name: (wanted[name] - mean).norm())
            right = "a thing" if colour == "yellow" else f"a photo of {colour}" if captions else "sks"
            assert prompt == right and torch.equal(embedding, prompts[right]["prompt_embeds"][0])
    assert len(seen) == 3


def colour_latents(case, vae, name):
    pixels = torch.tensor(Image.new("RGB", (1, 1), name).getpixel((0, 0))) / 127.5 - 1
    pixels = pixels.view(1, 3, 1, 1).expand(1, 3, case.resolution // 2, case.resolution // 2)
    with torch.no_grad():
        return case.family.encode_pixels(vae, pixels, [torch.Generator()]).mean(dim=(2, 3))[0]


def test_what_lies_beside_class_images_does_not_count_as_one(case, tmp_path):
    classes = tmp_path / "class"
    (classes / "sub").mkdir(parents=True)
    Image.new("RGB", (40, 40), "red").save(classes / "mine.png")
    for name in (".DS_Store", "Thumbs.db", "0.txt", "metadata.jsonl", "empty.png"):
        (classes / name).write_text("" if name == "empty.png" else "x")
    Image.new("RGB", (40, 40), "red").save(classes / "sub" / "deeper.png")
    before = {path.name for path in classes.iterdir()}
    prior = ("--with_prior_preservation", "--class_data_dir", classes, "--class_prompt", "c", "--num_class_images", 3)
    case.run(case.command(CATS, tmp_path / "out", *prior, steps=1))
    made = {path.name for path in classes.iterdir()} - before
    assert made == {"blockskip-class-00000.png", "blockskip-class-00001.png"}


def test_class_images_are_turned_upright_and_a_damaged_one_is_named(flux, tmp_path, monkeypatch, capsys):
    classes = tmp_path / "class"
    classes.mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20)).save(classes / "a.jpg", exif=exif)
    prior = ("--with_prior_preservation", "--class_data_dir", classes, "--class_prompt", "c")
    arguments = flux.command(CATS, tmp_path / "out", *prior)
    (photo,) = blockskip.load_class_photos(flux.script.parse_args(arguments))
    assert (photo.width, photo.height) == (20, 30) and photo.load().size == (20, 30)
    (classes / "half.jpg").write_bytes((CATS / "cat_1.jpg").read_bytes()[:20000])
    message = refusal(arguments, monkeypatch, capsys)
    assert "--class_data_dir" in message and "half.jpg" in message


def test_flips_are_chosen_anew_in_every_epoch_of_photos_and_class_images(case, tmp_path, monkeypatch):
    """One photo, black on the left and white on the right, seen whole: only flips can change it."""
    for folder in ("photos", "class"):
        (tmp_path / folder).mkdir()
        image = Image.new("RGB", (80, 80))
        image.paste("white", (40, 0, 80, 80))
        image.save(tmp_path / folder / "a.png")
    pixels = []
    spy_on(monkeypatch, "crop_photo", after=lambda crop, photo, draw, *rest: pixels.append((draw.kind, crop)))
    prior = ("--with_prior_preservation", "--class_data_dir", tmp_path / "class", "--class_prompt", "c")
    flags = (*prior, "--num_class_images", 1, "--random_flip", "--cache_latents", "--patch_schedule", "none")
    case.run(case.command(tmp_path / "photos", tmp_path / "out", *flags, steps=20))
    for kind in ("instance", "class"):
        black_left = [bool(crop[:, :, 0].mean() < 0 < crop[:, :, -1].mean()) for name, crop in pixels if name == kind]
        black_right = [bool(crop[:, :, -1].mean() < 0 < crop[:, :, 0].mean()) for name, crop in pixels if name == kind]
        assert len(black_left) == 20 and 3 < sum(black_left) < 17 and sum(black_left) + sum(black_right) == 20


def test_captions_of_a_dataset_that_are_no_text_are_named_with_their_row(flux, colours, tmp_path, monkeypatch, capsys):
    """A dataset's column of numbers, as of labels; of nothing at all, with and without an instance prompt."""
    names = ("red", "lime", "blue")
    lines = [f'{{"file_name": "{name}.png", "label": {i}, "text": null}}' for i, name in enumerate(names)]
    for name in ("white", "black"):
        (colours / f"{name}.png").unlink()
    (colours / "metadata.jsonl").write_text("\n".join(lines))
    data = ("--dataset_name", colours, "--cache_dir", tmp_path / "cache")
    arguments = flux.command("", tmp_path / "out", *data, "--caption_column", "label")
    message = refusal(arguments, monkeypatch, capsys)
    assert "row 0" in message and "int" in message
    arguments = flux.command("", tmp_path / "out", *data, "--caption_column", "text", prompt=None)
    assert "row 0" in refusal(arguments, monkeypatch, capsys)
    args = flux.script.parse_args(flux.command("", tmp_path / "out", *data, "--caption_column", "text", prompt="sks"))
    assert [photo.caption for photo in blockskip.load_photos(args)] == ["sks"] * 3


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM])
def test_launchers_that_shard_the_model_are_refused(case, tmp_path, monkeypatch, capsys, kind):
    monkeypatch.setattr(blockskip.Accelerator, "distributed_type", property(lambda self: kind))
    message = refusal(case.command(CATS, tmp_path / "out"), monkeypatch, capsys, case.script)
    assert kind.value in message and "--multi_gpu" in message


@pytest.mark.parametrize(
    ("samples", "processes", "batch", "accumulation"), list(itertools.product([1, 5, 8], [1, 2, 3], [1, 2], [1, 2, 4]))
)
def test_an_epoch_has_the_steps_in_which_the_processes_see_every_photo(samples, processes, batch, accumulation):
    steps = blockskip._steps_per_epoch(samples, processes, batch, accumulation)
    seen = processes * batch * accumulation
    assert steps * seen >= samples > (steps - 1) * seen


@pytest.mark.parametrize("upcast", [False, True], ids=["bf16", "upcast"])
def test_a_lora_saved_in_bf16_is_the_one_in_memory(case, tmp_path, monkeypatch, upcast):
    kept = {}
    spy_on(monkeypatch, "release", before=lambda run, t: kept.update(blockskip.lora_weights(t.transformer)))
    flags = (*case.skip, "--mixed_precision", "bf16", "--learning_rate", 0.01)
    flags += ("--upcast_before_saving",) if upcast else ()
    case.run(case.command(CATS, tmp_path / "out", *flags, steps=4))
    saved = lora_of(tmp_path / "out")
    assert saved.keys() == {f"transformer.{name}" for name in kept}
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    for name, tensor in kept.items():
        assert torch.equal(saved[f"transformer.{name}"], tensor if upcast else tensor.bfloat16())
    pipeline = blockskip.diffusers.DiffusionPipeline.from_pretrained(case.pipeline, torch_dtype=torch.bfloat16)
    pipeline.load_lora_weights(tmp_path / "out")
    loaded = {n: t.float() for n, t in pipeline.transformer.state_dict().items() if ".lora_" in n}
    assert len(loaded) == len(kept)
    for name, tensor in loaded.items():
        stored = kept[name.replace(".default_0", "")]
        assert torch.equal(tensor, stored.bfloat16().float()) or (upcast and torch.equal(tensor, stored))


def test_other_class_images_are_noticed_on_resume_without_the_residuals(flux, tmp_path, monkeypatch, capsys):
    classes, out = tmp_path / "class", tmp_path / "out"
    prior = ("--with_prior_preservation", "--class_data_dir", classes, "--class_prompt", "c", "--num_class_images", 2)
    flags = (*flux.skip, *prior, "--checkpointing_steps", 1)
    flux.run(flux.command(CATS, out, *flags, steps=2))
    first = lora_of(out)
    resume = (*flags, "--resume_from_checkpoint", "latest")
    path = classes / "blockskip-class-00000.png"
    path.unlink()
    with monkeypatch.context() as patch:  # finished, and stays so: nothing is made again
        patch.setattr(blockskip, "make_class_images", lambda *args: pytest.fail("class images were made"))
        flux.run(flux.command(CATS, out, *resume, steps=2))
    flux.run(flux.command(CATS, out, *resume, steps=3))
    assert path.exists() and lora_of(out).keys() == first.keys()
    assert "1 class images are missing" in capsys.readouterr().err
    Image.new("RGB", (64, 64), "red").save(path)
    arguments = flux.command(CATS, out, *resume, steps=4)
    assert "class images" in refusal(arguments, monkeypatch, capsys)


def test_processes_wait_for_each_other_longer_than_images_take(flux, tmp_path, monkeypatch):
    """By torch's default, a process that waits for another's images gives up after 10 minutes."""
    seconds = []
    spy_on(monkeypatch, "start", after=lambda accelerator, *rest: seconds.append(accelerator.init_handler.timeout))
    flux.run(flux.command(CATS, tmp_path / "out", steps=1))
    assert [wait.total_seconds() for wait in seconds] == [7200]
