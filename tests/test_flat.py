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
"""Memory, objects and open files of a long run stay what they are, with validation, checkpoints and new residuals.

These fail if anything is kept from step to step. BLOCKSKIP_LONG_RUNS=1 takes 2,000 steps in place of 300.
"""

import gc
import os

import psutil
import torch
from test_runs import spy_on

from conftest import CATS

STEPS = 2000 if os.environ.get("BLOCKSKIP_LONG_RUNS") == "1" else 300
EVERY, WARM = 50, 125  # steps between two looks, at equal distance from everything that recurs; the first that counts


def look(process: psutil.Process) -> dict[str, int]:
    """What the process holds now."""
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in objects)
    files = process.num_fds()
    memory = process.memory_info().rss
    return {
        "tensors": tensors,
        "objects": len(objects),
        "files": files,
        "threads": process.num_threads(),
        "rss": memory,
    }


def test_a_long_run_holds_no_more_at_its_end_than_at_its_beginning(case, tmp_path, monkeypatch):
    process, seen = psutil.Process(), {}

    def after(nothing, run, trainer, *rest):
        if trainer.step % EVERY == EVERY // 2 and trainer.step >= WARM:
            seen[trainer.step] = look(process)

    spy_on(monkeypatch, "finish_step", after=after)
    flags = (*case.skip, "--checkpointing_steps", EVERY, "--checkpoints_total_limit", 2, "--num_draws", 20)
    flags += ("--residual_refresh_steps", EVERY, "--gradient_checkpointing", "--lora_dropout", 0.1)
    flags += ("--validation_prompt", "x", "--num_validation_images", 1, "--validation_epochs", EVERY // 5)
    flags += ("--report_to", "tensorboard")
    case.run(case.command(CATS, tmp_path / "out", *flags, steps=STEPS))
    for step, held in seen.items():
        print(step, held)
    first, *others = seen.values()
    assert len(seen) == (STEPS - WARM) // EVERY + 1 and min(seen) == WARM
    assert {held["tensors"] for held in others} == {first["tensors"]}
    assert {held["files"] for held in others} == {first["files"]}
    assert {held["threads"] for held in others} == {first["threads"]}
    # a list that got one entry a step would grow by far more
    assert max(held["objects"] for held in others) - first["objects"] < (STEPS - WARM) // 2
    assert max(held["rss"] for held in others) - first["rss"] < 8 * 2**20
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 2
