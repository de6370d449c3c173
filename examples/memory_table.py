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
"""Print what a training step takes on the real FLUX.1-dev and SANA 1.6B shapes, metered with fake tensors.

    python examples/memory_table.py          a few minutes on two cores; needs no weights, no GPU and no network

Beside the GPU readings of the paper (arXiv 2603.20755), where it has one, stands the method as published, with the
LoRA in the precision of the weights, and the method as these scripts run it: the LoRA in fp32, and the trained blocks'
modulation layers off the device.
"""

import json
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from blockskip_utils import NF4, estimate_memory

# model, rank, network input in pixels, blocks skipped, gradient checkpointing, weights, GiB in the paper
SETTINGS = [
    ("FLUX.1-dev", 128, 512, (0, 0), False, "bf16", 35.99),
    ("FLUX.1-dev", 128, 256, (0, 0), False, "bf16", 30.48),
    ("FLUX.1-dev", 128, 256, (7, 10), False, "bf16", 20.78),
    ("FLUX.1-dev", 128, 512, (19, 10), False, "bf16", 12.85),
    ("FLUX.1-dev", 128, 256, (19, 10), False, "bf16", 10.42),
    ("FLUX.1-dev", 128, 256, (19, 10), True, "bf16", None),
    ("FLUX.1-dev", 16, 256, (19, 10), False, "nf4", None),
    ("FLUX.1-dev", 16, 256, (19, 10), True, "nf4", None),
    ("Sana_1600M_1024px", 4, 1024, (0, 0), False, "bf16", 8.35),
    ("Sana_1600M_1024px", 4, 512, (0, 0), False, "bf16", None),
    ("Sana_1600M_1024px", 4, 512, (3, 3), False, "bf16", None),
    ("Sana_1600M_1024px", 4, 512, (5, 5), False, "bf16", None),
    ("Sana_1600M_1024px", 4, 512, (5, 5), True, "bf16", None),
]


def main() -> None:
    """Print one row for each setting, as Markdown."""
    columns = ["model", "rank", "input, px", "skipped", "checkpointing", "weights", "paper, GiB"]
    columns += ["the paper's method, metered, GiB", "meter / paper", "these scripts, metered, GiB", "TFLOP"]
    print("|", " | ".join(columns), "|")
    print("|" + "---|" * len(columns))
    for model, rank, resolution, (first, last), checkpointing, weights, paper in SETTINGS:
        config = json.loads((FOLDER / "configs" / model / "transformer" / "config.json").read_text())
        setting = {"resolution": resolution, "skip_first": first, "skip_last": last, "rank": rank}
        setting |= {"gradient_checkpointing": checkpointing, "quantization": NF4 if weights == "nf4" else None}
        published = estimate_memory(config, **setting)
        scripts = estimate_memory(config, **setting, lora_dtype="fp32", stored_modulations=True)
        metered, ours = (result["peak_bytes"] / 2**30 for result in (published, scripts))
        cells = [
            model,
            rank,
            resolution,
            f"({first}, {last})",
            "yes" if checkpointing else "no",
            weights,
            paper or "-",
        ]
        cells += [f"{metered:.2f}", f"{metered / paper:.2f}" if paper else "-", f"{ours:.2f}"]
        print("|", " | ".join(map(str, [*cells, f"{scripts['flops_per_step'] / 1e12:.1f}"])), "|", flush=True)


if __name__ == "__main__":
    main()
