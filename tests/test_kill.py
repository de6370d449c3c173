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
"""Runs killed by the system at moments of chance, in processes of their own, and started again with the same command.

This fails if a file that a kill left half-written is taken for a whole one, or if anything of the state is lost.
"""

import os
import random
import subprocess
import sys
import time

from test_runs import assert_same_lora

from conftest import CATS

KILLS = 4


def killed_after(seconds, case, arguments, log):
    """Start a run, and kill it some seconds after it has begun to work; whether there was still something to kill."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(case.file), *arguments]
    with log.open("w") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as run:
        while "phase: encode prompts" not in log.read_text() and run.poll() is None:
            time.sleep(0.05)
        try:
            status = run.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            run.kill()
            return True
    assert status == 0, log.read_text()
    return False


def test_a_run_killed_again_and_again_ends_like_the_straight_one(case, tmp_path):
    flags = (*case.skip, "--learning_rate", 0.01, "--lora_dropout", 0.3, "--checkpointing_steps", 1)
    flags += ("--residual_refresh_steps", 7, "--checkpoints_total_limit", 2, "--caption_column", "text")
    photos = tmp_path / "photos"
    photos.mkdir()
    for path in CATS.glob("*.jpg"):
        (photos / path.name).symlink_to(path)
    lines = [f'{{"file_name": "{path.name}", "text": "{path.stem}"}}\n' for path in CATS.glob("*.jpg")]
    (photos / "metadata.jsonl").write_text("".join(lines))
    case.run(case.command(photos, tmp_path / "straight", *flags, steps=40))
    killed, chance = tmp_path / "killed", random.Random(case.family.name)
    arguments = case.command(photos, killed, *flags, "--resume_from_checkpoint", "latest", steps=40)
    kills = [killed_after(chance.uniform(0.0, 2.0), case, arguments, tmp_path / f"log-{n}") for n in range(KILLS)]
    assert any(kills)
    case.run(arguments)
    assert_same_lora(tmp_path / "straight", killed)
