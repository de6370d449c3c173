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
"""A training step on real tensors in a process of its own, whose resident memory is read beside the meter.

    MALLOC_MMAP_THRESHOLD_=65536 python tests/resident_step.py SKIP_FIRST SKIP_LAST CHECKPOINTING

Prints as JSON what the step adds to the weights that are there before it: by the meter on fake tensors, and by the
operating system. With that threshold each large tensor is a mapping of its own, and leaves the process when freed.
"""

import functools
import gc
import json
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import blockskip_utils as blockskip

SHAPE = {  # 170 million parameters
    "_class_name": "FluxTransformer2DModel",
    "num_layers": 4,
    "num_single_layers": 8,
    "num_attention_heads": 6,
    "attention_head_dim": 128,
    "joint_attention_dim": 1024,
    "guidance_embeds": True,
}


def resident_bytes(field: str) -> int:
    """A line of /proc/self/status, such as VmRSS or VmHWM, in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    first, last, checkpointing = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
    config = {**blockskip.diffusers.FluxTransformer2DModel.from_config(SHAPE | {"num_layers": 1}).config, **SHAPE}
    options = {"resolution": 512, "skip_first": first, "skip_last": last, "rank": 16, "dtype": "fp32"}
    options |= {"gradient_checkpointing": checkpointing, "residual_dtype": "fp32"}
    estimate = blockskip.estimate_memory(config, **options)

    layers = blockskip.LAYOUTS[SHAPE["_class_name"]].lora_layers
    targets = functools.partial(blockskip.lora_target_names, skip_first=first, skip_last=last, layers=layers)
    lora = {"rank": 16, "lora_alpha": 16}
    transformer = blockskip.training_structure(
        config, torch.float32, targets, lora=lora, gradient_checkpointing=checkpointing
    )
    handle = blockskip.skip_blocks(transformer, first, last)
    blockskip.fill(transformer)
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)  # memory of zeros would not be resident before it is written to
    inputs, target = blockskip.fake_batch(transformer, 512, 1, 512, torch.float32)
    residuals = blockskip.fake_residuals(transformer, inputs, handle.keys, torch.float32)
    handle.set_residuals(residuals)
    optimizer, step = blockskip.metered_step(transformer, inputs, target, accumulates=False)
    step()  # libraries allocate their own buffers the first time
    gc.collect()
    there = [*transformer.parameters(), *transformer.buffers(), *inputs.values(), target, *residuals.values()]
    there += blockskip.optimizer_state(optimizer)
    held, before = blockskip.storage_bytes(there), resident_bytes("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    step()
    growth = {"meter": estimate["peak_bytes"] - held, "resident": resident_bytes("VmHWM") - before}
    print(json.dumps({**growth, "weights": estimate["weights_bytes"]}))


if __name__ == "__main__":
    main()
