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
"""Estimates of all phases, and --dry_run.

These fail if a phase is metered on other code than the run's, if a dry run needs a weight or writes a file, if a flag
that changes a phase does not change its estimate, or if the flags that are proposed do not make the run fit.
"""

import contextlib
import itertools
import json
import shutil

import pytest
import torch

import blockskip_utils as blockskip
from conftest import CATS, ROOT

GIB = 2**30
NF4 = ROOT / "examples" / "nf4.json"
PHASES = ["encode prompts", "precompute", "train", "validate"]


@pytest.fixture
def configs(case, tmp_path):
    """A pipeline's folder in which nothing but config files is left."""
    folder = tmp_path / "configs"
    shutil.copytree(case.pipeline, folder, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer*"))
    return folder


@pytest.fixture
def dry_run(case, configs, tmp_path):
    """Run the script with --dry_run on config files; returns what it writes as JSON."""

    def run(*flags):
        arguments = case.command(CATS, tmp_path / "out", "--dry_run", "--dry_run_json", tmp_path / "dry.json", *flags)
        arguments[arguments.index("--pretrained_model_name_or_path") + 1] = str(configs)
        case.run(arguments)
        return json.loads((tmp_path / "dry.json").read_text())

    return run


@pytest.fixture
def no_flops(monkeypatch):
    """Leave the counting of FLOPs out, which is half of the work."""
    monkeypatch.setattr(blockskip, "count_flops", lambda action: 0)


def by_name(content):
    return {phase["name"]: phase for phase in content["phases"]}


def test_dry_run_says_what_each_phase_needs_and_touches_nothing(case, dry_run, tmp_path, monkeypatch, capsys):
    def no_weights(*args, **kwargs):
        raise AssertionError("a dry run loads no weights")

    for cls in (case.family.transformer_class, case.family.pipeline_class):
        monkeypatch.setattr(cls, "from_pretrained", no_weights)
    content = dry_run(*case.skip, "--validation_prompt", "x", "--num_validation_images", 1)
    assert not (tmp_path / "out").exists()
    assert [phase["name"] for phase in content["phases"]] == PHASES
    for phase in content["phases"]:
        assert set(phase) == {"name", "weights_bytes", "peak_device_bytes", "flops"}
        assert 0 < phase["weights_bytes"] < phase["peak_device_bytes"] and phase["flops"] > 0
    plan = content["plan"]
    assert content["residual_bytes"] == plan["num_draws"] * plan["bytes_per_draw"]
    assert (plan["skip_first"], plan["skip_last"]) == (case.skip[1], case.skip[3])
    printed = capsys.readouterr().out
    assert all(name in printed for name in PHASES) and f"{content['lora_parameters']:,}" in printed


def test_lora_parameters_and_disk_are_those_of_the_run(case, dry_run, tmp_path):
    flags = (*case.skip, "--rank", 3, "--num_draws", 2, "--keep_residuals")
    content = dry_run(*flags)
    case.run(case.command(CATS, tmp_path / "out", *flags), estimates=True)
    lora = blockskip.load_file(tmp_path / "out" / blockskip.LORA_FILE)
    assert content["lora_parameters"] == sum(tensor.numel() for tensor in lora.values())
    sizes = [path.stat().st_size for path in (tmp_path / "out" / "residuals").glob("rank*")]
    assert len(sizes) == 2 and abs(sum(sizes) - content["residual_bytes"]) < 2 * 2048
    report = json.loads((tmp_path / "out" / "run_report.json").read_text())
    estimated = {phase["name"]: phase["estimated_device_bytes"] for phase in report["phases"]}
    for phase in content["phases"]:
        assert estimated[phase["name"]] == phase["peak_device_bytes"]
    assert estimated["save"] is None


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--offload", "--train_batch_size", 2, "--gradient_accumulation_steps", 2, "--mixed_precision", "bf16"),
        ("--bnb_quantization_config_path", NF4, "--gradient_checkpointing", "--precompute_batch_size", 2),
        ("--use_8bit_adam", "--residual_refresh_steps", 1),
    ],
    ids=lambda flags: " ".join(str(flag) for flag in flags if str(flag).startswith("--")) or "plain",
)
def test_every_phase_reads_the_same_with_real_tensors_to_the_byte(dry_run, case, flags, monkeypatch):
    validation = ("--validation_prompt", "x", "--num_validation_images", 1)
    fake = dry_run(*case.skip, *flags, *validation)
    monkeypatch.setattr(blockskip, "fake_tensors", contextlib.nullcontext)
    real = dry_run(*case.skip, *flags, *validation)
    assert real["phases"] == fake["phases"]


def test_flags_change_the_phases_that_they_act_on_and_no_others(case, dry_run, no_flops):
    validation = ("--validation_prompt", "x", "--num_validation_images", 1)

    def peaks(*flags):
        phases = by_name(dry_run(*case.skip, *validation, *flags))
        return {name: phase["peak_device_bytes"] for name, phase in phases.items()}

    plain = peaks()
    offload = peaks("--offload")
    assert offload["train"] == plain["train"]
    assert all(offload[name] < plain[name] for name in ("encode prompts", "precompute", "validate"))
    for flags, names in {
        ("--gradient_checkpointing",): {"train"},
        ("--optimizer", "prodigy", "--learning_rate", 1): {"train", "validate"},
        ("--use_8bit_adam",): {"train", "validate"},  # whose state lies there during validation in training
        ("--train_batch_size", 3): {"train"},
        ("--precompute_batch_size", 3): {"precompute"},
        ("--rank", 16): {"precompute", "train", "validate"},
    }.items():
        changed = peaks(*flags)
        assert {name for name in plain if changed[name] != plain[name]} <= names, flags
        assert (
            changed["train" if "train" in names else "precompute"]
            != plain["train" if "train" in names else "precompute"]
        )


def test_gradients_of_an_earlier_batch_count_when_steps_accumulate(case, dry_run):
    one, two, four = (
        by_name(dry_run(*case.skip, "--gradient_accumulation_steps", count))["train"] for count in (1, 2, 4)
    )
    parameters = dry_run(*case.skip)["lora_parameters"]
    assert one["peak_device_bytes"] < two["peak_device_bytes"] <= one["peak_device_bytes"] + 4 * parameters
    assert two["peak_device_bytes"] == four["peak_device_bytes"]
    assert (two["flops"], four["flops"]) == (2 * one["flops"], 4 * one["flops"])


def test_phases_that_do_not_fit_are_marked_and_no_more_flags_are_proposed_than_needed(case, dry_run, capsys, no_flops):
    flags = (*case.skip, "--validation_prompt", "x", "--num_validation_images", 1)
    plain, offloaded = (
        max(phase["peak_device_bytes"] for phase in dry_run(*flags, *more)["phases"]) / GIB
        for more in ((), ("--offload",))
    )
    content = dry_run(*flags, "--device_memory_gb", plain)
    assert content["too_large"] == [] and content["remedy"] is None
    assert "TOO LARGE" not in capsys.readouterr().out
    content = dry_run(*flags, "--device_memory_gb", (plain + offloaded) / 2)
    assert content["too_large"] == [
        phase["name"] for phase in content["phases"] if phase["peak_device_bytes"] > (plain + offloaded) / 2 * GIB
    ]
    assert content["too_large"] and content["remedy"] == "--offload"
    printed = capsys.readouterr().out
    assert "These flags would make it fit: --offload" in printed and printed.count("TOO LARGE") == len(
        content["too_large"]
    )


def test_proposed_flags_make_it_fit_together_and_none_of_them_is_needless(flux, tmp_path, no_flops):
    def run(*flags):
        arguments = flux.command(CATS, tmp_path / "out", "--dry_run", "--dry_run_json", tmp_path / "dry.json", *flags)
        flux.run(arguments)
        return json.loads((tmp_path / "dry.json").read_text())

    tight = 0.7 * by_name(run())["train"]["peak_device_bytes"] / GIB
    content = run("--device_memory_gb", tight)
    assert "train" in content["too_large"]
    words = content["remedy"].replace("examples/", f"{NF4.parent}/").split(" --")
    groups = [f"--{word.removeprefix('--')}".split(" ") for word in words]
    assert len(groups) > 1
    assert run(*itertools.chain(*groups), "--device_memory_gb", tight)["too_large"] == []
    for group in groups:
        fewer = [word for other in groups if other is not group for word in other]
        peaks = [phase["peak_device_bytes"] for phase in run(*fewer)["phases"]]
        assert max(peaks) > tight * GIB, group


def test_measuring_which_blocks_to_skip_is_a_phase_of_its_own(case, dry_run, capsys):
    content = dry_run("--skip_ratio", 0.5)
    assert [phase["name"] for phase in content["phases"]] == ["encode prompts", "choose blocks", "precompute", "train"]
    probe, precompute = by_name(content)["choose blocks"], by_name(content)["precompute"]
    assert 0 < probe["flops"] < precompute["flops"]  # which encodes a photo, too, and has a LoRA
    assert "to be measured in this run" in capsys.readouterr().out


def test_where_nothing_suffices_it_says_so(case, dry_run, capsys, no_flops):
    content = dry_run(*case.skip, "--device_memory_gb", 1e-6)
    assert content["remedy"] is None and content["too_large"]
    assert "None of the flags that save memory suffices" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [("--dry_run_json", "x.json"), ("--device_memory_gb", 12)], ids=str)
def test_flags_of_a_dry_run_are_refused_without_one(case, tmp_path, flags):
    with pytest.raises(SystemExit, match=rf"{flags[0]} has no effect here: add --dry_run"):
        case.run(case.command(CATS, tmp_path / "out", *flags))


def test_a_dry_run_for_fp16_needs_no_gpu_however_it_is_asked_for(case, dry_run, monkeypatch, no_flops):
    bf16 = dry_run(*case.skip, "--mixed_precision", "bf16")["phases"]
    assert dry_run(*case.skip, "--mixed_precision", "fp16")["phases"] == bf16
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")  # as accelerate launch says it
    assert dry_run(*case.skip)["phases"] == bf16


def test_an_estimate_that_fails_does_not_end_the_run(case, tmp_path, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("no kernel for tensors without data\nand more")

    monkeypatch.setattr(blockskip, "estimate_phases", fail)
    case.run(case.command(CATS, tmp_path / "out", *case.skip, steps=1), estimates=True)
    assert (tmp_path / "out" / blockskip.LORA_FILE).is_file()
    report = json.loads((tmp_path / "out" / "run_report.json").read_text())
    assert all(phase["estimated_device_bytes"] is None for phase in report["phases"])


def test_counts_of_blocks_give_way_to_a_proposed_ratio(case, configs, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(blockskip, "dry_run", lambda run: seen.update(run=run))
    for flags, words in (((), "--skip_ratio 0.5"), (("--skip_first", 1), "--skip_ratio 0.5 in place of --skip_first")):
        arguments = case.command(CATS, tmp_path / "out", "--dry_run", *flags)
        arguments[arguments.index("--pretrained_model_name_or_path") + 1] = str(configs)
        case.run(arguments)
        proposed = [saver for saver, _ in blockskip.memory_savers(seen["run"])]
        assert any(saver.startswith(words) for saver in proposed), proposed
        assert ("in place of" in " ".join(proposed)) == bool(flags)
    monkeypatch.setattr(blockskip.importlib.util, "find_spec", lambda name: None)
    assert not any("bit" in saver or "bnb" in saver for saver, _ in blockskip.memory_savers(seen["run"]))


def test_a_json_file_that_cannot_be_written_is_refused_first(case, configs, tmp_path):
    arguments = case.command(CATS, tmp_path / "out", "--dry_run", "--dry_run_json", tmp_path)
    with pytest.raises(SystemExit, match=r"--dry_run_json .* is a folder: name a file"):
        case.run(arguments)
    arguments = case.command(CATS, tmp_path / "out", "--dry_run", "--dry_run_json", tmp_path / "no" / "dry.json")
    with pytest.raises(SystemExit, match=r"--dry_run_json .* is no folder that can be written"):
        case.run(arguments)


def test_numbers_read_off_fake_tensors_are_one_and_those_of_real_ones_are_their_own():
    with blockskip.fake_tensors():
        assert torch.zeros(1).item() == 1.0 and torch.zeros(1, dtype=torch.long).item() == 1
    assert torch.zeros(1).item() == 0.0
