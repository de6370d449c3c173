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
"""Runs in two real processes on the CPU.

These fail if processes share draws or noise, drift apart in their weights, synchronise more than once a step, if a
checkpoint lacks one process's state, or if a message comes twice.
"""

import json
import pathlib

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file
from test_faults import colour_latents
from test_runs import assert_same_lora, lora_of

from conftest import CATS, launch

OBSERVED = pathlib.Path(__file__).with_name("observed_run.py")
COLOURS = ("red", "lime", "blue", "white", "black")
FLAGS = (
    *("--skip_first", 2, "--skip_last", 3, "--learning_rate", 0.01, "--lora_dropout", 0.3, "--checkpointing_steps", 2),
    *("--gradient_accumulation_steps", 2, "--residual_refresh_steps", 3, "--keep_residuals"),
)


def observe(case, folder, arguments, *options):
    """Run a script in two observed processes; returns how it ended and the events of each rank."""
    folder.mkdir(exist_ok=True)
    words = [folder, case.script.__name__, *options, *arguments]
    done = launch(OBSERVED, words, processes=2, TORCH_DISTRIBUTED_DEBUG="INFO")
    files = [folder / f"rank{rank}.jsonl" for rank in range(2)]
    return done, [[json.loads(line) for line in file.read_text().splitlines()] for file in files if file.exists()]


def events(rank, kind):
    return [event for event in rank if event["event"] == kind]


@pytest.fixture(scope="module")
def straight(flux, tmp_path_factory):
    """A run of 5 steps in 2 processes, with a refresh after the third."""
    folder = tmp_path_factory.mktemp("straight")
    done, ranks = observe(flux, folder, flux.command(CATS, folder / "out", *FLAGS, steps=5))
    assert done.returncode == 0, done.stderr
    return folder, ranks, done


def test_processes_draw_different_noise_and_use_every_draw_once(straight):
    _, ranks, _ = straight
    batches = [[event for event in events(rank, "batch")] for rank in ranks]
    assert [len(of_rank) for of_rank in batches] == [10, 10]
    noise = [row for of_rank in batches for batch in of_rank for row in batch["noise"]]
    sigmas = [sigma for of_rank in batches for batch in of_rank for sigma in batch["sigmas"]]
    assert len(set(noise)) == 20 and len(set(sigmas)) >= 18  # of a table of 1,000


def test_stored_draws_are_shared_out_over_the_processes(straight):
    folder, _, _ = straight
    names = sorted(path.name for path in (folder / "out" / "residuals").glob("rank*"))
    assert len(names) == 8  # of the second period, which has two steps
    assert sum(name.startswith("rank0") for name in names) == 4
    for name in names:
        modulations = [key for key in load_file(folder / "out" / "residuals" / name) if key.startswith("modulation.")]
        assert len(modulations) == 2 + 2 * 1  # of one double and two single blocks


def test_processes_agree_in_weights_after_each_step_and_synchronise_once(straight):
    _, ranks, _ = straight
    steps = [[event["weights"] for event in events(rank, "step")] for rank in ranks]
    assert steps[0] == steps[1] and len(set(steps[0])) == 5
    assert [[batch["synchronises"] for batch in events(rank, "batch")] for rank in ranks] == [[False, True] * 5] * 2
    losses = [[event["loss"] for event in events(rank, "step")] for rank in ranks]
    assert losses[0] == losses[1]


def test_checkpoint_holds_the_state_of_every_process_and_messages_come_once(straight):
    folder, _, done = straight
    names = {path.name for path in (folder / "out" / "checkpoint-4").iterdir()}
    assert {"random_states_0.pkl", "random_states_1.pkl", "pytorch_lora_weights.safetensors", "optimizer.bin"} <= names
    for lora in (folder / "out", folder / "out" / "checkpoint-4"):
        assert not any("module." in name for name in lora_of(lora))
    assert done.stderr.count("skips the first 2") == 1 and done.stdout.count("LoRA: ") == 1


@pytest.mark.parametrize("kill_after", [1, 4])
def test_killed_and_resumed_run_ends_like_the_straight_one(flux, straight, tmp_path, kill_after):
    folder, ranks, _ = straight
    arguments = flux.command(CATS, tmp_path / "out", *FLAGS, steps=5)
    done, _ = observe(flux, tmp_path / "killed", arguments, "--kill_after", str(kill_after))
    assert done.returncode != 0
    done, resumed = observe(flux, tmp_path / "resumed", [*arguments, "--resume_from_checkpoint", "latest"])
    assert done.returncode == 0, done.stderr
    begin = 2 * (kill_after // 2)
    for rank, again in zip(ranks, resumed, strict=True):
        assert events(again, "step") == events(rank, "step")[begin:]
        assert events(again, "batch") == events(rank, "batch")[2 * begin :]
    assert_same_lora(folder / "out", tmp_path / "out")


def test_schedule_captions_and_class_images_with_two_processes(case, colours, tmp_path):
    prior = ("--with_prior_preservation", "--class_data_dir", tmp_path / "class", "--class_prompt", "c")
    flags = ("--num_class_images", 3, "--num_train_epochs", 2, "--lr_scheduler", "linear", "--lr_warmup_steps", 0)
    flags += ("--validation_prompt", "x", "--num_validation_images", 3, "--validation_epochs", 1)
    flags += ("--dataloader_num_workers", 1)
    data = ("--instance_data_dir", "", "--dataset_name", colours, "--caption_column", "text", "--cache_dir", tmp_path)
    arguments = case.command(colours, tmp_path / "out", *prior, *flags, *data, prompt=None, steps=None)
    done, ranks = observe(case, tmp_path / "seen", arguments)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "class").glob("*.png"))) == 3
    steps = [events(rank, "step") for rank in ranks]
    assert len(steps[0]) == 2 * 3  # 5 photos in 2 processes: 3 steps an epoch
    assert [step["lr"] for step in steps[0]] == pytest.approx([1e-4 * (1 - (i + 1) / 6) for i in range(6)])
    prompts = [
        batch["prompts"][0] for pair in zip(*(events(rank, "batch") for rank in ranks), strict=True) for batch in pair
    ]
    assert len(set(prompts[:5])) == len(set(prompts[5:10])) == 5  # each epoch sees every photo, over both processes
    images = sorted(path.parent.name for path in (tmp_path / "out" / "validation").rglob("*.png"))
    assert images == ["final"] * 3 + ["step-000003"] * 3
    assert "WARNING" not in done.stderr.replace("WARNING:torch", "")
    vae = DiffusionPipeline.from_pretrained(case.pipeline).vae
    wanted = {f"a photo of {name}": colour_latents(case, vae, name) for name in COLOURS}
    rows = [
        row for rank in ranks for b in events(rank, "batch") for row in zip(b["prompts"], b["latents"], strict=True)
    ]
    for prompt, mean in rows:
        if prompt != "c":
            assert min(wanted, key=lambda name: (wanted[name] - torch.tensor(mean)).norm()) == prompt


def test_draws_that_the_processes_cannot_share_evenly_are_all_used(flux, tmp_path):
    flags = (*flux.skip, "--num_draws", 3, "--keep_residuals", "--learning_rate", 0.01)
    flags += ("--lr_scheduler", "linear", "--lr_warmup_steps", 4)
    done, ranks = observe(flux, tmp_path / "seen", flux.command(CATS, tmp_path / "out", *flags, steps=4))
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "out" / "residuals").glob("rank*"))
    assert names == [f"rank{name}-instance.safetensors" for name in ("0-000000", "0-000001", "1-000000")]
    noise = [[batch["noise"][0] for batch in events(rank, "batch")] for rank in ranks]
    assert len(set(noise[0][:2])) == len(set(noise[0][2:])) == len(set(noise[0])) == 2 and len(set(noise[1])) == 1
    assert not set(noise[0]) & set(noise[1])
    weights = [[step["weights"] for step in events(rank, "step")] for rank in ranks]
    assert weights[0] == weights[1] and len(set(weights[0])) == 4
    assert done.stderr.count("3 draws leave photos out") == done.stderr.count("never reaches its peak") == 1


def test_a_mistake_is_said_once(flux, tmp_path):
    done = launch(flux.file, flux.command(CATS, tmp_path / "out", "--skip_first", 9), processes=2)
    assert done.returncode != 0 and done.stderr.count("error: --skip_first") == 1


def test_resuming_with_another_number_of_processes_is_refused(flux, straight):
    folder, _, _ = straight
    arguments = flux.command(CATS, folder / "out", *FLAGS, "--resume_from_checkpoint", "checkpoint-4", steps=6)
    done = launch(flux.file, arguments)
    assert done.returncode == 1 and "number of processes 2, now it is 1" in done.stderr
