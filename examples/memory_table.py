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

Beside ours stand the GPU readings that the paper (arXiv 2603.20755) publishes for the same settings, where it does.
"""

import json
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from blockskip_utils import estimate_memory

# model, rank, network input in pixels, blocks skipped at both ends, gradient checkpointing, GiB in the paper
FLUX_SETTINGS = [
    ("FLUX.1-dev", 128, 512, (0, 0), False, 35.99),
    ("FLUX.1-dev", 128, 256, (0, 0), False, 30.48),
    ("FLUX.1-dev", 128, 256, (7, 10), False, 20.78),
    ("FLUX.1-dev", 128, 512, (19, 10), False, 12.85),
    ("FLUX.1-dev", 128, 256, (19, 10), False, 10.42),
    ("FLUX.1-dev", 128, 256, (19, 10), True, None),
    ("FLUX.1-dev", 4, 256, (19, 10), True, None),
]
SANA_SETTINGS = [
    ("Sana_1600M_1024px", 4, 1024, (0, 0), False, 8.35),
    ("Sana_1600M_1024px", 4, 512, (0, 0), False, None),
    ("Sana_1600M_1024px", 4, 512, (3, 3), False, None),
    ("Sana_1600M_1024px", 4, 512, (5, 5), False, None),
    ("Sana_1600M_1024px", 4, 512, (5, 5), True, None),
]


def main() -> None:
    """Print one row for each setting, as Markdown."""
    columns = ["model", "rank", "input, px", "skipped", "checkpointing", "LoRA in fp32, GiB", "in bf16, GiB", "TFLOP"]
    print("|", " | ".join([*columns, "paper, GiB"]), "|")
    print("|---|---|---|---|---|---|---|---|---|")
    for model, rank, resolution, (first, last), checkpointing, paper in FLUX_SETTINGS + SANA_SETTINGS:
        config = json.loads((FOLDER / "configs" / model / "transformer" / "config.json").read_text())
        fp32, bf16 = (
            estimate_memory(
                config,
                resolution=resolution,
                skip_first=first,
                skip_last=last,
                rank=rank,
                gradient_checkpointing=checkpointing,
                lora_dtype=lora_dtype,
            )
            for lora_dtype in ("fp32", "bf16")
        )
        cells = [model, rank, resolution, f"({first}, {last})", "yes" if checkpointing else "no"]
        cells += [f"{fp32['peak_bytes'] / 2**30:.2f}", f"{bf16['peak_bytes'] / 2**30:.2f}"]
        cells += [f"{fp32['flops_per_step'] / 1e12:.1f}", paper or "-"]
        print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
