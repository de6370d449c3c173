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
"""Whole runs of both scripts on tiny pipelines.

These fail if the saved LoRA is not what was trained, if a resumed run differs from a straight one in a single bit, if
captions and photos are mixed up, if validation touches training, or if memory that should be free is not.
"""

import collections
import errno
import inspect
import json
import shutil
import sys
import weakref

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import CLIPTextModel, Gemma2Model, T5EncoderModel

import blockskip_utils as blockskip
from conftest import CATS, is_estimate


class Killed(BaseException):
    """Stands for a kill at a chosen moment."""


def lora_of(folder):
    return load_file(folder / "pytorch_lora_weights.safetensors")


def assert_same_lora(one, other):
    one, other = lora_of(one), lora_of(other)
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def spy_on(monkeypatch, name, before=None, after=None):
    """Call `before(*args)` ahead of a shared function, or `after(result, *args)` behind it; not in estimates."""
    original = getattr(blockskip, name)

    def wrapper(*args, **kwargs):
        if is_estimate():
            return original(*args, **kwargs)
        if before:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if after:
            after(result, *args, **kwargs)
        return result

    monkeypatch.setattr(blockskip, name, wrapper)


def kill_at(monkeypatch, name, count):
    """Die in the count-th call of a shared function."""
    calls = []

    def before(*args, **kwargs):
        calls.append(None)
        if len(calls) == count:
            raise Killed

    spy_on(monkeypatch, name, before)


def test_saved_lora_is_the_trained_one_touches_middle_blocks_only_and_changes_the_image(case, tmp_path, monkeypatch):
    kept = {}

    def keep(run, trainer):
        trainer.handle.restore()
        kept["transformer"] = trainer.transformer.eval()

    spy_on(monkeypatch, "release", before=keep)
    out = tmp_path / "out"
    flags = (*case.skip, "--learning_rate", 0.01, "--rank", 4, "--lora_alpha", 16, "--validation_prompt", "sks")
    case.run(case.command(CATS, out, *flags, "--num_validation_images", 1, steps=6))  # images on the way, too
    names = {name.split(".lora")[0] for name in lora_of(out)}
    assert all(any(name.startswith(f"transformer.{block}") for name in names) for block in case.trained)
    assert all(name.removeprefix("transformer.").startswith(case.trained) for name in names)
    assert not any("module." in n or "base_model" in n or "default" in n for n in lora_of(out))
    with safe_open(out / "pytorch_lora_weights.safetensors", "pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
    assert metadata["transformer.lora_alpha"] == 16 and metadata["transformer.r"] == 4
    assert {f"transformer.{name}" for name in metadata["transformer.target_modules"]} == names

    def draw(pipeline):
        options = {"height": case.resolution, "width": case.resolution, "num_inference_steps": 2, "output_type": "pt"}
        if "use_resolution_binning" in inspect.signature(pipeline.__call__).parameters:
            options["use_resolution_binning"] = False
        return pipeline("sks", generator=torch.Generator().manual_seed(0), max_sequence_length=32, **options).images

    pipeline = DiffusionPipeline.from_pretrained(case.pipeline)
    base = draw(pipeline)
    pipeline.load_lora_weights(out)
    loaded = {n for n, module in pipeline.transformer.named_modules() if "default_0" in getattr(module, "lora_A", {})}
    assert {f"transformer.{name}" for name in loaded} == names
    with_lora = draw(pipeline)
    assert (with_lora - base).abs().max() > 0.02
    pipeline = DiffusionPipeline.from_pretrained(case.pipeline, transformer=kept["transformer"])
    torch.testing.assert_close(draw(pipeline), with_lora, rtol=1e-5, atol=1e-5)


def test_modulation_layers_with_a_lora_are_trained_and_what_the_others_return_is_stored(flux, tmp_path):
    layers = ("--lora_layers", "attn.to_q,norm.linear", "--gradient_checkpointing", "--keep_residuals")
    flux.run(flux.command(CATS, tmp_path / "out", *flux.skip, *layers, "--learning_rate", 0.01, steps=3))
    learnt = {name.split(".lora")[0]: t for name, t in lora_of(tmp_path / "out").items() if "lora_B" in name}
    assert sum(name.endswith(".norm.linear") for name in learnt) == 2  # those of the single blocks
    assert all(tensor.abs().max() > 0 for tensor in learnt.values())
    stored = {"transformer_blocks.2.norm1.linear", "transformer_blocks.2.norm1_context.linear"}
    for path in (tmp_path / "out" / "residuals").glob("rank0-*"):
        assert {key for key in load_file(path) if "modulation" in key} == {f"modulation.{name}" for name in stored}
    pipeline = DiffusionPipeline.from_pretrained(flux.pipeline)
    pipeline.load_lora_weights(tmp_path / "out")
    loaded = {f"transformer.{n}" for n, module in pipeline.transformer.named_modules() if hasattr(module, "lora_A")}
    assert loaded == set(learnt)


def test_files_and_report_of_a_run(case, tmp_path):
    out = tmp_path / "out"
    case.run(case.command(CATS, out, *case.skip, "--checkpointing_steps", 2, "--checkpoints_total_limit", 1, steps=5))
    names = {path.name for path in out.iterdir()}
    assert names == {"pytorch_lora_weights.safetensors", "README.md", "run_report.json", "checkpoint-4"}
    report = json.loads((out / "run_report.json").read_text())
    assert report["finished"] and report["steps"] == 5 and report["final_loss"] > 0
    assert report["plan"]["depth"] == case.depth and report["plan"]["skip_first"] == 2
    assert report["plan"]["num_draws"] == 5
    phases = {phase["name"]: phase for phase in report["phases"]}
    assert {"check", "encode prompts", "draw", "precompute", "train", "save", "validate"} <= phases.keys()
    assert phases["precompute"]["written_bytes"] > 5 * 2 * 4 * 32 * 2  # draws, spans, image tokens, width, bf16
    assert all(phase["seconds"] >= 0 and phase["peak_host_bytes"] > 1e6 for phase in phases.values())
    assert "pytorch_lora_weights.safetensors" in (out / "README.md").read_text()


def test_estimate_of_residual_bytes_is_what_lies_on_disk(case, tmp_path):
    out = tmp_path / "out"
    case.run(case.command(CATS, out, *case.skip, "--keep_residuals", "--num_draws", 3, steps=5))
    sizes = [path.stat().st_size for path in (out / "residuals").glob("rank*")]
    report = json.loads((out / "run_report.json").read_text())
    assert len(sizes) == 3
    assert abs(sum(sizes) - report["plan"]["residual_bytes"]) < 3 * 2048


def test_text_encoders_run_once_per_distinct_prompt_and_are_gone_afterwards(case, colours, tmp_path, monkeypatch):
    calls, encoders, freed = [], [], []
    for encoder in TEXT_ENCODERS[case.family.name]:
        original = encoder.forward

        def forward(self, *args, original=original, **kwargs):
            if not is_estimate():
                calls.append(type(self))
                encoders.append(weakref.ref(self))
            return original(self, *args, **kwargs)

        monkeypatch.setattr(encoder, "forward", forward)
    spy_on(monkeypatch, "flow_matching_loss", before=lambda *args: freed.append(all(r() is None for r in encoders)))
    flags = ("--caption_column", "text", "--repeats", 2, "--validation_prompt", "a photo of red in snow")
    case.run(case.command(colours, tmp_path / "out", *flags, "--num_validation_images", 1, steps=6))
    prompts = 5 + 1 + len(case.family.extra_prompts)  # captions, validation prompt, the pipeline's negative prompt
    assert collections.Counter(calls) == dict.fromkeys(TEXT_ENCODERS[case.family.name], prompts)
    assert freed == [True] * 6


TEXT_ENCODERS = {"FLUX": [CLIPTextModel, T5EncoderModel], "SANA": [Gemma2Model]}


def test_vae_and_skipped_blocks_are_freed_before_training(case, tmp_path, monkeypatch):
    watched = []
    spy_on(monkeypatch, "load_vae", after=lambda vae, run: watched.append(weakref.ref(vae.decoder.conv_in.weight)))

    def watch_blocks(transformer, run, dtype):
        blocks = list(blockskip.named_blocks(transformer).values())
        skipped = blocks[: case.skip[1]] + blocks[-case.skip[3] :]
        watched.extend(weakref.ref(p) for block in skipped for p in block.parameters())

    spy_on(monkeypatch, "load_transformer", after=watch_blocks)
    seen = []
    spy_on(monkeypatch, "flow_matching_loss", before=lambda *a: seen.append([r() is None for r in watched]))
    case.run(case.command(CATS, tmp_path / "out", *case.skip, steps=2))
    assert len(seen) == 2 and all(len(freed) > 20 and all(freed) for freed in seen)


RESUMED = {
    "plain": ("--lora_dropout", 0.3, "--gradient_accumulation_steps", 2),
    "refreshed": ("--residual_refresh_steps", 3, "--lora_dropout", 0.3, "--random_flip"),
    "replayed": ("--num_draws", 4, "--lr_scheduler", "cosine", "--lr_warmup_steps", 2, "--dataloader_num_workers", 1),
    "whole": ("--skip_first", 0, "--skip_last", 0, "--patch_schedule", "none", "--use_8bit_adam"),
    "prodigy": (
        "--optimizer",
        "prodigy",
        "--learning_rate",
        1,
        "--precompute_batch_size",
        3,
        "--gradient_checkpointing",
    ),
}


@pytest.mark.parametrize("flags", RESUMED.values(), ids=RESUMED)
@pytest.mark.parametrize("moment", ["_precompute_group-3", "finish_step-4", "finish_step-7", "save_checkpoint-2"])
def test_killed_and_resumed_run_ends_like_the_straight_one(case, tmp_path, monkeypatch, flags, moment):
    flags = (*case.skip, "--learning_rate", 0.01, "--checkpointing_steps", 2, *flags)
    case.run(case.command(CATS, tmp_path / "straight", *flags, steps=8))
    name, count = moment.split("-")
    with monkeypatch.context() as patch:
        kill_at(patch, name, int(count))
        with pytest.raises(Killed):
            case.run(case.command(CATS, tmp_path / "killed", *flags, steps=8))
    assert not (tmp_path / "killed" / "pytorch_lora_weights.safetensors").exists()
    resume = ("--resume_from_checkpoint", "latest")
    case.run(case.command(CATS, tmp_path / "killed", *flags, *resume, steps=8))
    assert_same_lora(tmp_path / "straight", tmp_path / "killed")


def test_run_resumed_from_within_a_past_period_makes_its_residuals_again(case, tmp_path):
    flags = (*case.skip, "--residual_refresh_steps", 3, "--checkpointing_steps", 1, "--learning_rate", 0.01)
    case.run(case.command(CATS, tmp_path / "straight", *flags, steps=8))
    for step in range(1, 9):
        out = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "straight", out)
        (out / "pytorch_lora_weights.safetensors").unlink()
        resume = ("--resume_from_checkpoint", f"checkpoint-{step}")
        case.run(case.command(CATS, out, *flags, *resume, steps=8))
        assert_same_lora(tmp_path / "straight", out)


def test_interrupted_precompute_goes_on_where_it_stopped(case, tmp_path, monkeypatch):
    command_line = case.command(CATS, tmp_path / "out", *case.skip, steps=6)
    command_line = [word for word in command_line if word not in ("--seed", "0")]  # the seed is found again, too
    with monkeypatch.context() as patch:
        kill_at(patch, "_precompute_group", 5)
        with pytest.raises(Killed):
            case.run(command_line)
    made = []
    spy_on(monkeypatch, "_precompute_group", before=lambda *args: made.append(args[4]))
    case.run(command_line)
    assert len(made) == 2


def test_resumed_finished_run_does_nothing(case, tmp_path, monkeypatch):
    flags = (*case.skip, "--checkpointing_steps", 2)
    case.run(case.command(CATS, tmp_path / "out", *flags, steps=3))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    spy_on(monkeypatch, "encode_prompts", before=lambda run: pytest.fail("a finished run went on"))
    case.run(case.command(CATS, tmp_path / "out", *flags, "--resume_from_checkpoint", "latest", steps=3))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


def test_finished_run_without_seed_or_checkpoint_is_not_trained_again(flux, tmp_path, monkeypatch):
    arguments = flux.command(CATS, tmp_path / "out", *flux.skip)
    at = arguments.index("--seed")
    arguments = arguments[:at] + arguments[at + 2 :]
    flux.run(arguments)
    spy_on(monkeypatch, "encode_prompts", before=lambda run: pytest.fail("a finished run went on"))
    flux.run([*arguments, "--resume_from_checkpoint", "latest"])


def test_images_of_a_run_killed_before_its_first_checkpoint_are_kept(flux, tmp_path):
    image = tmp_path / "out" / "validation" / "final" / "image_0.png"
    image.parent.mkdir(parents=True)
    image.write_text("of an earlier run")
    validation = ("--validation_prompt", "x", "--num_validation_images", 1)
    flux.run(flux.command(CATS, tmp_path / "out", *validation, steps=1))
    kept = tmp_path / "out" / "earlier-1" / "validation" / "final" / "image_0.png"
    assert kept.read_text() == "of an earlier run" and image.stat().st_size > 100


def test_longer_run_goes_on_from_a_finished_one(case, tmp_path):
    flags = (*case.skip, "--checkpointing_steps", 2, "--learning_rate", 0.01)
    case.run(case.command(CATS, tmp_path / "straight", *flags, steps=5))
    case.run(case.command(CATS, tmp_path / "longer", *flags, steps=2))
    case.run(case.command(CATS, tmp_path / "longer", *flags, "--resume_from_checkpoint", "latest", steps=5))
    assert_same_lora(tmp_path / "straight", tmp_path / "longer")


def test_same_seed_same_run_and_another_seed_another(case, tmp_path):
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        case.run(case.command(CATS, tmp_path / name, *case.skip, "--seed", seed, steps=3))
    assert_same_lora(tmp_path / "one", tmp_path / "two")
    with pytest.raises(AssertionError):
        assert_same_lora(tmp_path / "one", tmp_path / "three")


def test_nothing_of_the_users_is_overwritten(flux, tmp_path):
    out, shared = tmp_path / "out", tmp_path / "shared logs"
    shared.mkdir()
    out.mkdir()
    (shared / "other run").write_text("keep")
    (out / "README.md").write_text("mine")
    flags = (*flux.skip, "--report_to", "tensorboard", "--logging_dir", shared)
    flux.run(flux.command(CATS, out, *flags, steps=1))
    assert (out / "earlier-1" / "README.md").read_text() == "mine"
    first = lora_of(out)
    flux.run(flux.command(CATS, out, *flags, "--resume_from_checkpoint", "latest", steps=2))  # there is no checkpoint
    earlier = lora_of(out / "earlier-2")
    assert all(torch.equal(first[name], earlier[name]) for name in first)
    assert (shared / "other run").read_text() == "keep" and len(list(shared.glob("dreambooth*/events*"))) == 2


def test_resuming_an_older_checkpoint_sets_the_newer_ones_aside_and_keeps_what_it_saves(flux, tmp_path):
    out = tmp_path / "out"
    flags = (*flux.skip, "--checkpointing_steps", 2)
    flux.run(flux.command(CATS, out, *flags, steps=8))
    limited = (*flags, "--resume_from_checkpoint", "checkpoint-2", "--checkpoints_total_limit", 1)
    flux.run(flux.command(CATS, out, *limited, steps=6))
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-6"]
    aside = {path.name for path in (out / "earlier-1").iterdir()}
    assert {"checkpoint-4", "checkpoint-6", "checkpoint-8", "pytorch_lora_weights.safetensors"} <= aside


def test_release_frees_lora_and_optimizer(case, tmp_path, monkeypatch):
    watched = []

    def watch(run, trainer):
        states = [state["exp_avg"] for state in trainer.optimizer.state.values()]
        watched.extend(map(weakref.ref, [*trainer.parameters, *states]))

    spy_on(monkeypatch, "release", before=watch)
    alive = []
    spy_on(monkeypatch, "validate", before=lambda run, prompts: alive.extend(r() is not None for r in watched))
    case.run(case.command(CATS, tmp_path / "out", *case.skip, "--checkpointing_steps", 1))
    assert len(alive) > 20 and not any(alive)


def test_last_period_makes_no_more_draws_than_it_trains_on(flux, tmp_path, monkeypatch):
    made = []
    spy_on(monkeypatch, "_precompute_group", before=lambda *args: made.extend(args[4]))
    flux.run(flux.command(CATS, tmp_path / "out", *flux.skip, "--residual_refresh_steps", 4, steps=5))
    assert len(made) == 5
    made.clear()
    flux.run(flux.command(CATS, tmp_path / "more", *flux.skip, "--num_draws", 40, steps=2))
    assert len(made) == 2


def test_a_failed_upload_is_tried_again_by_the_resumed_run(flux, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.create_repo", lambda repo_id, **rest: Repository(f"me/{repo_id}"))
    uploads = []

    def upload(**rest):
        uploads.append(rest)
        if len(uploads) == 1:
            raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.upload_folder", upload)
    flags = (*flux.skip, "--push_to_hub", "--checkpointing_steps", 1)
    with pytest.raises(OSError, match="no network"):
        flux.run(flux.command(CATS, tmp_path / "out", *flags))
    flux.run(flux.command(CATS, tmp_path / "out", *flags, "--resume_from_checkpoint", "latest"))
    assert len(uploads) == 2


def test_validation_images_stand_at_their_steps_in_the_log(flux, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ("--validation_prompt", "x", "--validation_epochs", 1, "--num_validation_images", 1)
    flux.run(flux.command(CATS, tmp_path / "out", *flux.skip, *flags, "--report_to", "tensorboard", steps=7))
    (log,) = (tmp_path / "out" / "logs").glob("*/events*")
    events = EventAccumulator(str(log)).Reload()
    assert [event.step for event in events.Images("validation")] == [5, 7]


def test_bf16_run_gains_precision_from_fp32_residuals(flux, tmp_path):
    residuals = {}
    for dtype in ("fp32", "bf16"):
        flags = (*flux.skip, "--mixed_precision", "bf16", "--residual_dtype", dtype, "--keep_residuals")
        flux.run(flux.command(CATS, tmp_path / dtype, *flags, steps=1))
        (path,) = (tmp_path / dtype / "residuals").glob("rank0-*")
        residuals[dtype] = load_file(path)["first.hidden_states"]
    assert torch.equal(residuals["fp32"].bfloat16(), residuals["bf16"])
    assert not torch.equal(residuals["fp32"], residuals["bf16"].float())


def test_a_draw_damaged_in_the_middle_is_named_and_made_anew_by_the_resumed_run(flux, tmp_path, monkeypatch):
    flags = (*flux.skip, "--checkpointing_steps", 1)
    flux.run(flux.command(CATS, tmp_path / "straight", *flags, steps=5))

    def damage(run, trainer, period, prompts):
        path = sorted(run.store().folder.glob("rank0-*"))[3]
        path.write_bytes(path.read_bytes()[:-1])

    with monkeypatch.context() as patch:
        spy_on(patch, "train", before=damage)
        with pytest.raises(SystemExit, match=r"rank0-000003-instance.*--resume_from_checkpoint latest"):
            flux.run(flux.command(CATS, tmp_path / "out", *flags, steps=5))
    flux.run(flux.command(CATS, tmp_path / "out", *flags, "--resume_from_checkpoint", "latest", steps=5))
    assert_same_lora(tmp_path / "straight", tmp_path / "out")


def test_a_photo_lost_in_the_middle_is_named_for_what_it_is(flux, tmp_path, monkeypatch):
    photos = tmp_path / "photos"
    shutil.copytree(CATS, photos)
    lose = lambda *args: [path.unlink() for path in photos.glob("*.jpg")]  # noqa: E731
    spy_on(monkeypatch, "make_draws", before=lose)
    with pytest.raises(FileNotFoundError, match="cat_"):
        flux.run(flux.command(photos, tmp_path / "out", *flux.skip))


def test_a_full_disk_in_precompute_ends_the_run_plainly_and_keeps_what_is_stored(flux, tmp_path, monkeypatch):
    save, calls = blockskip.save_file, []

    def full(*args, **kwargs):
        calls.append(None)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        save(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(blockskip, "save_file", full)
        with pytest.raises(SystemExit, match=r"No space left.*free the disk"):
            flux.run(flux.command(CATS, tmp_path / "out", *flux.skip, steps=5))
    assert len(list((tmp_path / "out" / "residuals").glob("rank0-*"))) == 2
    flux.run(flux.command(CATS, tmp_path / "out", *flux.skip, steps=5))


@pytest.mark.parametrize("writer", ["torch.save", "safetensors.torch.save_file"])
def test_a_full_disk_at_a_checkpoint_ends_the_run_plainly_and_keeps_the_last_one(flux, writer, tmp_path, monkeypatch):
    flags = (*flux.skip, "--checkpointing_steps", 1, "--lora_dropout", 0.3)
    arguments = flux.command(CATS, tmp_path / "out", *flags, "--resume_from_checkpoint", "latest", steps=3)
    full = {
        "torch.save": RuntimeError("[enforce fail] . PytorchStreamWriter failed writing file data/1"),
        "safetensors.torch.save_file": OSError(errno.ENOSPC, "No space left on device"),
    }[writer]

    def fail_later(*args, **kwargs):
        if (tmp_path / "out" / "checkpoint-1").exists():
            raise full
        return original(*args, **kwargs)

    module, _, name = writer.rpartition(".")
    original = getattr(sys.modules[module], name)
    with monkeypatch.context() as patch:
        patch.setattr(writer, fail_later)
        with pytest.raises(SystemExit, match=r"^error: the disk is full in the phase train.*free the disk"):
            flux.run(arguments)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*") if path.suffix != ".partial"] == [
        "checkpoint-1"
    ]
    flux.run(arguments)
    flux.run(flux.command(CATS, tmp_path / "straight", *flags, steps=3))
    assert_same_lora(tmp_path / "straight", tmp_path / "out")


def test_an_earlier_run_in_the_folder_is_set_aside_and_not_lost(case, tmp_path):
    out = tmp_path / "out"
    case.run(case.command(CATS, out, *case.skip, "--checkpointing_steps", 1, steps=2))
    first = lora_of(out)
    case.run(case.command(CATS, out, *case.skip, "--checkpointing_steps", 1, "--learning_rate", 0.1, steps=2))
    earlier = lora_of(out / "earlier-1")
    assert all(torch.equal(first[name], earlier[name]) for name in first)
    assert (out / "earlier-1" / "checkpoint-2").is_dir() and (out / "checkpoint-2").is_dir()


def losses_of_a_fixed_set(case, lora=None, draws=24):
    """The full model's flow-matching loss on draws of its own, one pass each, without any of the trainer's code."""
    pipeline = DiffusionPipeline.from_pretrained(case.pipeline)
    if lora:
        pipeline.load_lora_weights(lora)
    predict = {"FLUX": flux_prediction, "SANA": sana_prediction}[case.family.name](pipeline)
    generator, losses = torch.Generator().manual_seed(7), []
    paths, size = sorted(CATS.glob("*.jpg")), case.resolution // 2
    for index in range(draws):
        image = Image.open(paths[index % len(paths)]).convert("RGB").resize((size, size))
        pixels = pipeline.image_processor.preprocess(image)
        with torch.no_grad():
            encoded = pipeline.vae.encode(pixels)
            latents = encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()
            latents = (latents - pipeline.vae.config.get("shift_factor", 0)) * pipeline.vae.config.scaling_factor
            noise, sigma = torch.randn(latents.shape, generator=generator), torch.rand(1, generator=generator)
            velocity = predict((1 - sigma) * latents + sigma * noise, sigma)
        losses.append((velocity - (noise - latents)).square().mean().item())
    return sum(losses) / draws


def flux_prediction(pipeline):
    embeds, pooled, text_ids = pipeline.encode_prompt("a photo of sks", None, max_sequence_length=32)

    def predict(noisy, sigma):
        side = noisy.shape[-1]
        ids = pipeline._prepare_latent_image_ids(1, side // 2, side // 2, "cpu", torch.float32)
        packed = pipeline._pack_latents(noisy, *noisy.shape)
        guidance = torch.tensor([3.5])
        inputs = (packed, embeds, pooled, sigma, ids, text_ids, guidance)
        velocity = pipeline.transformer(*inputs, return_dict=False)[0]
        return pipeline._unpack_latents(velocity, 8 * side, 8 * side, 8)

    return predict


def sana_prediction(pipeline):
    instruction = inspect.signature(pipeline.__call__).parameters["complex_human_instruction"].default
    options = {"max_sequence_length": 32, "complex_human_instruction": instruction}
    embeds, mask, _, _ = pipeline.encode_prompt("a photo of sks", False, device="cpu", **options)

    def predict(noisy, sigma):
        return pipeline.transformer(
            noisy, embeds, timestep=1000 * sigma, encoder_attention_mask=mask, return_dict=False
        )[0]

    return predict


@pytest.mark.parametrize("method", ["plain LoRA", "BlockSkip"])
def test_full_models_loss_on_a_fixed_set_falls(case, tmp_path, method):
    flags = case.skip if method == "BlockSkip" else ("--patch_schedule", "none")
    before = losses_of_a_fixed_set(case)
    learning = ("--learning_rate", 0.003, "--rank", 8, "--lora_alpha", 8, "--train_batch_size", 4)
    case.run(case.command(CATS, tmp_path / "out", *flags, *learning, steps=60))
    assert losses_of_a_fixed_set(case, tmp_path / "out") < 0.9 * before


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_validation_leaves_training_untouched(case, tmp_path, monkeypatch, precision):
    flags = (*case.skip, "--lora_dropout", 0.3, "--learning_rate", 0.01, "--mixed_precision", precision)
    case.run(case.command(CATS, tmp_path / "without", *flags, steps=11))
    states = []

    def state(run, trainer, prompts):
        parameters = [(n, p.dtype, p.requires_grad, p.device) for n, p in trainer.transformer.named_parameters()]
        return parameters, trainer.transformer.training, torch.get_rng_state()

    original = blockskip.validate_in_training

    def compare(*args):
        before = state(*args)
        original(*args)
        after = state(*args)
        states.append(before[:2] == after[:2] and torch.equal(before[2], after[2]))

    monkeypatch.setattr(blockskip, "validate_in_training", compare)
    skipped = []

    def count_skipped(run, transformer, *rest):
        skipped.append(sum(isinstance(block, blockskip._SkippedBlock) for block in transformer.modules()))

    spy_on(monkeypatch, "draw_images", before=count_skipped)
    validation = ("--validation_prompt", "sks", "--validation_epochs", 1, "--num_validation_images", 2)
    case.run(case.command(CATS, tmp_path / "with", *flags, *validation, steps=11))
    assert states == [True, True]  # after steps 5 and 10
    assert skipped == [0, 0, 0]  # images are those of the full model
    assert_same_lora(tmp_path / "without", tmp_path / "with")
    images = sorted(path.relative_to(tmp_path / "with" / "validation") for path in (tmp_path / "with").rglob("*.png"))
    assert [str(path) for path in images] == [
        f"{folder}/image_{number}.png" for folder in ("final", "step-000005", "step-000010") for number in (0, 1)
    ]
    for path in images:
        image = Image.open(tmp_path / "with" / "validation" / path)
        assert image.size == (case.resolution, case.resolution) and len(image.getcolors(1 << 16)) > 100


def test_without_a_validation_prompt_no_pipeline_is_built_after_training(case, tmp_path, monkeypatch):
    spy_on(monkeypatch, "image_pipeline", before=lambda *args: pytest.fail("a pipeline was built"))
    case.run(case.command(CATS, tmp_path / "out", *case.skip))


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_trained_parameters_are_fp32_in_every_precision(case, tmp_path, monkeypatch, precision):
    seen = []

    def look(run, trainer, *rest):
        trained = {p.dtype for p in trainer.parameters}
        frozen = {p.dtype for p in trainer.transformer.parameters() if not p.requires_grad}
        seen.append((trained, frozen))

    spy_on(monkeypatch, "flow_matching_loss", before=look)
    vaes = []
    spy_on(monkeypatch, "load_vae", after=lambda vae, run: vaes.append(vae.dtype))
    flags = (*case.skip, "--checkpointing_steps", 1, "--validation_prompt", "x", "--num_validation_images", 1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)  # as `accelerate launch --mixed_precision` does
    case.run(case.command(CATS, tmp_path / "out", *flags, "--validation_epochs", 1, steps=2))
    case.run(case.command(CATS, tmp_path / "out", *flags, "--resume_from_checkpoint", "latest", steps=3))
    frozen = torch.bfloat16 if precision == "bf16" else torch.float32
    assert seen == [({torch.float32}, {frozen})] * 3
    assert set(vaes) == {torch.float32}
    assert {tensor.dtype for tensor in lora_of(tmp_path / "out").values()} == {frozen}
    assert {tensor.dtype for tensor in lora_of(tmp_path / "out" / "checkpoint-3").values()} == {torch.float32}
    image = Image.open(tmp_path / "out" / "validation" / "final" / "image_0.png")
    assert len(image.getcolors(1 << 16)) > 100


def test_upcast_before_saving_saves_fp32(case, tmp_path):
    flags = (*case.skip, "--mixed_precision", "bf16", "--upcast_before_saving")
    case.run(case.command(CATS, tmp_path / "out", *flags, steps=1))
    assert {tensor.dtype for tensor in lora_of(tmp_path / "out").values()} == {torch.float32}


def batches_of(monkeypatch):
    """Record what every forward pass of training sees."""
    batches = []
    spy_on(monkeypatch, "flow_matching_loss", before=lambda run, trainer, batch, prompts: batches.append(batch))
    return batches


@pytest.mark.parametrize("source", ["folder", "dataset"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_captions_stay_with_their_photos(case, colours, tmp_path, monkeypatch, source, batch_size):
    batches = batches_of(monkeypatch)
    flags = ["--caption_column", "text", "--train_batch_size", batch_size, "--num_draws", 7, "--random_flip"]
    if source == "dataset":
        flags += ["--instance_data_dir", "", "--dataset_name", colours, "--cache_dir", tmp_path / "cache"]
    case.run(case.command(colours, tmp_path / "out", *flags, prompt=None, steps=9))
    vae = DiffusionPipeline.from_pretrained(case.pipeline).vae
    wanted, size = {}, case.resolution // 2
    for name in ("red", "lime", "blue", "white", "black"):
        pixels = torch.tensor(Image.new("RGB", (1, 1), name).getpixel((0, 0))) / 127.5 - 1
        pixels = pixels.view(1, 3, 1, 1).expand(1, 3, size, size)
        with torch.no_grad():
            latents = case.family.encode_pixels(vae, pixels, [torch.Generator()])
        wanted[f"a photo of {name}"] = latents.mean(dim=(2, 3))[0]
    rows = [row for batch in batches for row in zip(batch.prompts, batch.latents, strict=True)]
    assert len(rows) == 9 * batch_size and len({prompt for prompt, _ in rows}) >= 4
    for prompt, latents in rows:
        nearest = min(wanted, key=lambda p: (wanted[p] - latents.mean(dim=(1, 2))).norm())
        assert nearest == prompt


def test_missing_captions_fall_back_to_the_instance_prompt(case, colours, tmp_path, monkeypatch):
    lines = (colours / "metadata.jsonl").read_text().splitlines()
    lines[0] = lines[0].replace('"a photo of red"', "null")
    lines[1] = lines[1].replace('"a photo of lime"', '"  "')
    (colours / "metadata.jsonl").write_text("\n".join(lines[:3]))  # the last two photos have no line at all
    batches = batches_of(monkeypatch)
    case.run(case.command(colours, tmp_path / "out", "--caption_column", "text", prompt="stand-in", steps=5))
    prompts = sorted(prompt for batch in batches for prompt in batch.prompts)
    assert prompts == ["a photo of blue"] + ["stand-in"] * 4


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_prior_preservation_generates_class_images_and_weighs_their_rows(case, tmp_path, monkeypatch, batch_size):
    classes = tmp_path / "class"
    classes.mkdir()
    Image.new("RGB", (40, 40), "red").save(classes / "mine.png")
    batches = batches_of(monkeypatch)
    prior = (
        "--with_prior_preservation",
        "--class_data_dir",
        classes,
        "--class_prompt",
        "a cat",
        "--num_class_images",
        3,
    )
    weighted = ("--prior_loss_weight", 0.5, "--weighting_scheme", "sigma_sqrt", "--sample_batch_size", 2)
    flags = (*prior, *weighted, *case.skip, "--train_batch_size", batch_size)
    case.run(case.command(CATS, tmp_path / "out", *flags, prompt="sks", steps=2))
    names = sorted(path.name for path in classes.iterdir())
    assert names == ["blockskip-class-00000.png", "blockskip-class-00001.png", "mine.png"]
    assert Image.open(classes / names[0]).size == (case.resolution, case.resolution)
    for batch in batches:
        assert len(batch.latents) == len(batch.prompts) == 2 * batch_size and batch.samples == batch_size
        assert sorted(batch.prompts) == ["a cat"] * batch_size + ["sks"] * batch_size
        for prompt, weight in zip(batch.prompts, batch.weights.tolist(), strict=True):
            assert weight == (0.5 if prompt == "a cat" else 1.0)
        assert len(set(batch.sigmas.tolist())) == 2 * batch_size


def test_loss_with_prior_and_weighting_is_the_one_worked_out_by_hand(case, tmp_path, monkeypatch):
    """With a transformer that predicts nothing, each row's loss is the mean square of its target."""
    seen = []

    def by_hand(loss, run, trainer, batch, prompts):
        total = 0.0
        for row, prompt in enumerate(batch.prompts):
            error = (0 - (batch.noise[row] - batch.latents[row])).square().mean().item()
            total += error * batch.sigmas[row].item() ** -2 * (0.25 if prompt == "a cat" else 1.0)
        seen.append((loss.item(), total / 2))

    nothing = lambda self, hidden_states, **rest: (0 * hidden_states,)  # noqa: E731
    monkeypatch.setattr(case.family.transformer_class, "forward", nothing)
    monkeypatch.setattr(blockskip.Accelerator, "backward", lambda self, loss: None)
    monkeypatch.setattr(blockskip, "estimate_run", lambda run: None)  # has a backward pass of its own
    spy_on(monkeypatch, "flow_matching_loss", after=by_hand)
    shutil.copytree(CATS, tmp_path / "class")
    prior = ("--with_prior_preservation", "--class_data_dir", tmp_path / "class", "--class_prompt", "a cat")
    prior += ("--num_class_images", 5)
    flags = (*prior, "--prior_loss_weight", 0.25, "--weighting_scheme", "sigma_sqrt", "--train_batch_size", 2)
    case.run(case.command(CATS, tmp_path / "out", *flags, prompt="sks", steps=3))
    assert len(seen) == 3
    for loss, hand in seen:
        assert loss == pytest.approx(hand, rel=1e-5)


def test_accumulating_four_times_one_equals_a_batch_of_four(case, tmp_path):
    shapes = {"accumulated": (1, 4), "batched": (4, 1)}
    linear = (
        "--adam_epsilon",
        1,
        "--learning_rate",
        1,
    )  # a large epsilon makes Adam's step proportional to the gradient
    for name, (batch, accumulation) in shapes.items():
        flags = ("--train_batch_size", batch, "--gradient_accumulation_steps", accumulation, *linear)
        case.run(case.command(CATS, tmp_path / name, *case.skip, *flags, steps=3))
    one, other = lora_of(tmp_path / "accumulated"), lora_of(tmp_path / "batched")
    for name in one:
        assert "lora_B" not in name or one[name].abs().max() > 0
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_schedule_ends_at_zero_after_the_epochs_asked_for(case, tmp_path, monkeypatch, accumulation):
    rates = []
    monkeypatch.setattr(blockskip.Accelerator, "log", lambda self, values, step: rates.append(values["lr"]))
    flags = ["--num_train_epochs", 4, "--lr_scheduler", "linear", "--lr_warmup_steps", 0, "--train_batch_size", 1]
    flags += ["--gradient_accumulation_steps", accumulation]
    case.run(case.command(CATS, tmp_path / "out", *case.skip, *flags, steps=None))
    steps = 4 * -(-5 // accumulation)
    assert rates == pytest.approx([1e-4 * (1 - (step + 1) / steps) for step in range(steps)])


def test_trackers_get_one_row_a_step_and_no_token(case, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("huggingface_hub.create_repo", lambda repo_id, **rest: Repository(f"me/{repo_id}"))
    uploaded = []
    monkeypatch.setattr("huggingface_hub.upload_folder", lambda **rest: uploaded.append(rest))
    flags = (*case.skip, "--push_to_hub", "--hub_token", "hf_secret", "--report_to", "tensorboard")
    case.run(case.command(CATS, tmp_path / "out", *flags, steps=4))
    (upload,) = uploaded
    assert upload["repo_id"] == "me/out" and "checkpoint" not in str(upload["allow_patterns"])
    (log,) = (tmp_path / "out" / "logs").glob("*/events*")
    events = EventAccumulator(str(log)).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_file() or b"hf_secret" not in path.read_bytes(), path


class Repository:
    def __init__(self, repo_id):
        self.repo_id = repo_id


def test_log_of_a_killed_and_resumed_run_has_one_row_a_step(flux, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = (*flux.skip, "--checkpointing_steps", 2, "--report_to", "tensorboard")
    trackers = []
    spy_on(monkeypatch, "start_trackers", after=lambda _, run: trackers.extend(run.accelerator.trackers))
    with monkeypatch.context() as patch:
        kill_at(patch, "finish_step", 6)
        with pytest.raises(Killed):
            flux.run(flux.command(CATS, tmp_path / "out", *flags, steps=8))
    trackers[0].finish()  # as the end of the process would
    flux.run(flux.command(CATS, tmp_path / "out", *flags, "--resume_from_checkpoint", "latest", steps=8))
    (folder,) = {path.parent for path in (tmp_path / "out" / "logs").glob("*/events*")}
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 9))


def test_wandb_runs_offline(flux, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = (*flux.skip, "--validation_prompt", "sks", "--num_validation_images", 1, "--report_to", "wandb")
    flux.run(flux.command(CATS, tmp_path / "out", *flags, steps=1))
    assert list((tmp_path / "out" / "logs").rglob("*.wandb")) or list(tmp_path.rglob("*.wandb"))


def test_kept_residuals_serve_the_same_run_again(case, tmp_path, monkeypatch):
    flags = (*case.skip, "--keep_residuals", "--residual_dir", tmp_path / "residuals")
    case.run(case.command(CATS, tmp_path / "one", *flags, steps=3))
    damaged = sorted((tmp_path / "residuals").glob("rank0-*"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-10])
    made = []
    spy_on(monkeypatch, "_precompute_group", before=lambda *args: made.extend(draw.name for draw in args[4]))
    case.run(case.command(CATS, tmp_path / "two", *flags, steps=3))
    assert made == [damaged.stem]
    assert_same_lora(tmp_path / "one", tmp_path / "two")


def test_a_loss_that_is_no_number_ends_the_run_plainly(case, tmp_path):
    flags = (*case.skip, "--learning_rate", 1e30, "--checkpointing_steps", 1)
    with pytest.raises(SystemExit, match=r"error: the loss is .* in step \d"):
        case.run(case.command(CATS, tmp_path / "out", *flags, steps=8))


def test_final_images_are_drawn_without_dropout(case, tmp_path, monkeypatch):
    modes = []
    spy_on(
        monkeypatch,
        "draw_images",
        before=lambda run, transformer, *_: modes.extend(
            module.training for module in transformer.modules() if isinstance(module, torch.nn.Dropout)
        ),
    )
    flags = (*case.skip, "--lora_dropout", 0.5, "--validation_prompt", "sks", "--num_validation_images", 1)
    case.run(case.command(CATS, tmp_path / "out", *flags, steps=1))
    assert modes and not any(modes)
