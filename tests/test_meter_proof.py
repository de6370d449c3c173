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
"""What the meter says of the real FLUX.1-dev, and how it compares with the memory of a process.

These fail if a phase of FLUX.1-dev in nf4 leaves its limit, or if the meter is off by more than 15 % from what the
operating system gives a process.
"""

import json
import os
import subprocess
import sys

import pytest

from conftest import CATS, ROOT, launch

GIB = 2**30


def test_flux_dev_in_nf4_runs_in_3_gib_with_offload(tmp_path):
    arguments = ["--pretrained_model_name_or_path", ROOT / "examples" / "configs" / "FLUX.1-dev"]
    arguments += ["--instance_data_dir", CATS, "--instance_prompt", "a photo of sks cat", "--mixed_precision", "bf16"]
    arguments += ["--skip_first", 19, "--skip_last", 10, "--rank", 16, "--train_batch_size", 1, "--resolution", 1024]
    arguments += ["--gradient_checkpointing", "--offload"]
    arguments += ["--bnb_quantization_config_path", ROOT / "examples" / "nf4.json"]
    arguments += ["--validation_prompt", "a photo of sks cat on the moon", "--dry_run"]
    arguments += ["--dry_run_json", tmp_path / "dry.json", "--output_dir", tmp_path / "out"]
    done = launch(ROOT / "train_dreambooth_blockskip_flux.py", arguments)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "dry.json").read_text())
    phases = {phase["name"]: phase for phase in content["phases"]}
    assert phases["train"]["peak_device_bytes"] <= 2.8 * GIB
    assert max(phase["peak_device_bytes"] for phase in phases.values()) <= 3 * GIB
    # weights that no phase does without: the trained blocks' attention and feed-forward in half a byte
    assert phases["train"]["peak_device_bytes"] > 28 * (4 * 3072 * 3072 + 2 * 3072 * 12288) / 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_resident_memory_of_a_step_grows_by_what_the_meter_says(checkpointing):
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "resident_step.py", "2", "4", str(checkpointing)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    growth = json.loads(done.stdout.splitlines()[-1])
    assert growth["meter"] > 100 * 2**20 and growth["weights"] > 300 * 2**20
    assert growth["resident"] == pytest.approx(growth["meter"], rel=0.15)
