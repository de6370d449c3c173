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
"""Run a training script and write down, for each process, what its training sees: one JSON line per event.

torchrun --nproc_per_node 2 tests/observed_run.py FOLDER SCRIPT [--kill_after STEP] FLAGS ...
"""

import hashlib
import importlib
import json
import os
import pathlib
import sys

import torch
from torch._guards import detect_fake_mode

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import blockskip_utils as blockskip

folder, script = pathlib.Path(sys.argv[1]), importlib.import_module(sys.argv[2])
arguments, kill_after = sys.argv[3:], None
if arguments[0] == "--kill_after":
    kill_after, arguments = int(arguments[1]), arguments[2:]
rank = os.environ.get("RANK", "0")
loss_of, finish_step = blockskip.flow_matching_loss, blockskip.finish_step


def note(**event) -> None:
    with (folder / f"rank{rank}.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def observed_loss(run, trainer, batch, prompts):
    if detect_fake_mode():  # an estimate
        return loss_of(run, trainer, batch, prompts)
    noise = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in batch.noise]
    synchronises = getattr(trainer.model, "require_backward_grad_sync", None)  # DDP's own switch, off under no_sync()
    seen = {"prompts": batch.prompts, "sigmas": batch.sigmas.tolist(), "noise": noise}
    seen["latents"] = batch.latents.mean(dim=(2, 3)).tolist()
    note(event="batch", **seen, synchronises=synchronises)
    return loss_of(run, trainer, batch, prompts)


def observed_step(run, trainer, prompts, bar):
    finish_step(run, trainer, prompts, bar)
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.parameters])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    note(event="step", step=trainer.step, lr=trainer.lr_scheduler.get_last_lr()[0], loss=trainer.loss, weights=digest)
    if trainer.step == kill_after:
        os._exit(9)


blockskip.flow_matching_loss, blockskip.finish_step = observed_loss, observed_step
script.main(script.parse_args(arguments))
