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
"""Runs that the system kills at moments of chance, or whose disk is full, and that are started again.

This fails if a file that was left half-written is taken for a whole one, if anything of the state is lost, or if the
run that went on ends with other weights than the straight one. The short form kills each script a few times; the long
one kills it as often as it is told to in every phase, with one process and with two, and fills real disks:

    pytest tests/test_kill.py --kills 50 -s
"""

import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file
from test_runs import assert_same_lora

import blockskip_utils as blockskip
from conftest import CATS

FLAGS = ("--learning_rate", 0.01, "--lora_dropout", 0.3, "--checkpointing_steps", 1, "--residual_refresh_steps", 7)
FLAGS += ("--checkpoints_total_limit", 2, "--caption_column", "text", "--validation_prompt", "a photo of sks")
FLAGS += ("--num_validation_images", 1)
PHASES = ("check", "encode prompts", "load", "draw", "precompute", "train", "save", "validate")
STEPS = 16
CAN_MOUNT = "unshare -rm sh -c 'mount -t tmpfs tmpfs /mnt'"


def pytest_generate_tests(metafunc):
    """The long form has two processes, too."""
    if "processes" in metafunc.fixturenames:
        metafunc.parametrize("processes", [1, 2] if metafunc.config.getoption("kills") else [1])


@pytest.fixture
def captioned(tmp_path):
    """The cats, each with a caption of its own."""
    photos = tmp_path / "photos"
    photos.mkdir()
    lines = []
    for path in sorted(CATS.glob("*.jpg")):
        (photos / path.name).symlink_to(path)
        lines.append(f'{{"file_name": "{path.name}", "text": "{path.stem}"}}\n')
    (photos / "metadata.jsonl").write_text("".join(lines))
    return photos


def words(case, processes, arguments):
    """The command by which a script is started in so many processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if processes == 2 else []
    return [sys.executable, *launcher, str(case.file), *arguments]


class Killer:
    """Starts a command and kills all of its processes at once.

    Attributes:
        kills: How many it has killed in each phase.
    """

    def __init__(self, command, log):
        self.command, self.log, self.kills = command, log, collections.Counter()

    def run(self, phase=None, seconds=0.0):
        """Run to the end, or until so many seconds after a phase has begun; whether it ended by itself."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as file:
            run = subprocess.Popen(self.command, env=environment, stdout=file, stderr=file, start_new_session=True)
        while phase and f"phase: {phase}" not in self.log.read_text() and run.poll() is None:
            time.sleep(0.02)
        try:
            status = run.wait(timeout=seconds if phase else None)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            self.kills[self.log.read_text().rpartition("phase: ")[2].splitlines()[0]] += 1
            return False
        assert status == 0, self.log.read_text()
        return True


def assert_all_that_has_a_name_is_whole(output):
    """Tensors and reports under their final names can be read; returns the steps of the checkpoints."""
    for path in output.rglob("*.safetensors"):
        if not any(part.endswith(".partial") or part == ".lora.partial" for part in path.parts):
            load_file(path)
    for path in output.glob("*.json"):
        json.loads(path.read_text())
    checkpoints = [path for path in output.glob("checkpoint-*") if path.suffix != ".partial"]
    for checkpoint in checkpoints:
        json.loads((checkpoint / blockskip.CHECKPOINT_STATE).read_text())
    return [int(path.name.partition("-")[2]) for path in checkpoints]


def test_a_run_killed_again_and_again_ends_like_the_straight_one(case, processes, captioned, tmp_path, request):
    wanted, chance = request.config.getoption("kills") or 4, random.Random(f"{case.family.name}/{processes}")
    flags = (*case.skip, *FLAGS)
    straight = tmp_path / "straight"
    Killer(words(case, processes, case.command(captioned, straight, *flags, steps=STEPS)), tmp_path / "log").run()
    phases = {
        phase["name"]: phase["seconds"] for phase in json.loads((straight / "run_report.json").read_text())["phases"]
    }
    output, rounds = tmp_path / "killed", 1
    arguments = case.command(captioned, output, *flags, "--resume_from_checkpoint", "latest", steps=STEPS)
    killer = Killer(words(case, processes, arguments), tmp_path / "log")
    steps, at_least = [], 0
    while killer.kills.total() < wanted:
        phase = chance.choice(PHASES)
        finished = killer.run(phase, chance.uniform(0.0, 1.2 * phases[phase]))
        steps = assert_all_that_has_a_name_is_whole(output) if output.exists() else []
        assert max(steps, default=0) >= at_least
        at_least = max(steps, default=0)
        if finished:
            assert_same_lora(straight, output)
            shutil.rmtree(output)
            rounds, at_least = rounds + 1, 0
    killer.run()
    assert_same_lora(straight, output)
    print(f"\n{case.family.name}, {processes} process(es): {rounds} runs survived {dict(killer.kills)}")


@pytest.mark.parametrize("phase", ["precompute", "train"])
def test_a_run_whose_disk_was_full_ends_like_the_straight_one(case, phase, captioned, tmp_path, request):
    if not request.config.getoption("kills"):
        pytest.skip("part of the long form: --kills 50")
    if subprocess.run(CAN_MOUNT, shell=True, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a disk")
    straight, disk, kept, log = (tmp_path / name for name in ("straight", "disk", "kept", "log"))
    disk.mkdir()
    case.run(case.command(captioned, straight, *case.skip, *FLAGS, steps=STEPS))
    command = words(case, 1, case.command(captioned, disk / "out", *case.skip, *FLAGS, steps=STEPS))
    script = f"""
        mount -t tmpfs -o size=200m tmpfs {disk}
        "$@" >{log} 2>&1 &
        until grep -q 'phase: {phase}' {log}; do sleep 0.02; done
        cat /dev/zero >{disk}/filler 2>/dev/null
        wait $!
        status=$?
        cp -a {disk}/out {kept}
        exit $status"""
    status = subprocess.run(["unshare", "-rm", "sh", "-c", script, "sh", *command], timeout=300).returncode
    line = log.read_text().splitlines()[-1]
    assert status == 1 and line.startswith("error: ") and "free" in line, log.read_text()
    assert "Traceback" not in log.read_text()
    assert_all_that_has_a_name_is_whole(kept)
    shutil.move(kept, disk / "out")
    case.run([*command[2:], "--resume_from_checkpoint", "latest"])
    assert_same_lora(straight, disk / "out")
