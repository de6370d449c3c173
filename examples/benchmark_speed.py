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
"""Time a training step of plain LoRA at full resolution against one of BlockSkip at half of it, in one process.

    OMP_NUM_THREADS=2 python examples/benchmark_speed.py --output speed.json       five minutes or more on two cores

A FLUX with random weights is built in a temporary folder: by default FLUX.1-dev at a quarter of its width, of its
token counts at 512 px and of a LoRA's rank of 128, with 12 blocks for 57. So attention has the share of the arithmetic
that it has in FLUX.1-dev, and the FLOP ratio is about the same. VAE and text encoders are tiny. On a GPU that holds
both models, some 60 GiB, the whole shape (24 GB in TMPDIR), or the real weights:

    shape="--skip_first 19 --skip_last 10 --resolution 512 --text_tokens 512 --rank 128 --mixed_precision bf16"
    python examples/benchmark_speed.py $shape --double_blocks 19 --single_blocks 38 --heads 24
    python examples/benchmark_speed.py $shape --model FOLDER_OF_FLUX

Both ways of training go through the phases of train_dreambooth_blockskip_flux.py, and read what they train on from
disk. They take turns of two steps, so that a drift of the machine hits both alike. The second step of a turn is timed:
it follows a step of its own kind, as in training, and the batch after it is read from its beginning on, not earlier.
Precompute cannot take turns with steps; it is set against steps of plain LoRA right before and after it.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
from diffusers import FluxTransformer2DModel
from tqdm.auto import tqdm

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import blockskip_utils as blockskip
import train_dreambooth_blockskip_flux as flux_script
from build_tiny_pipeline import build_tiny_flux

FLUX_DEV = FOLDER / "configs" / "FLUX.1-dev" / "transformer" / "config.json"


def parse_args(input_args: list[str] | None = None) -> argparse.Namespace:
    """Parse a command line; sizes are in pixels."""
    parser = blockskip.OneLineParser(description=__doc__.split("\n")[0])
    count, positive = blockskip.COUNT, blockskip.POSITIVE
    parser.add_argument("--model", help="Folder of a FLUX pipeline to time, in place of one with random weights.")
    parser.add_argument("--double_blocks", type=positive, default=4, help="Of the random model; FLUX.1-dev has 19.")
    parser.add_argument("--single_blocks", type=positive, default=8, help="Of the random model; FLUX.1-dev has 38.")
    parser.add_argument("--heads", type=positive, default=6, help="Of 128 channels each; FLUX.1-dev has 24.")
    parser.add_argument("--skip_first", type=count, default=4, help="Blocks that BlockSkip skips at the front.")
    parser.add_argument("--skip_last", type=count, default=2, help="Blocks that BlockSkip skips at the back.")
    parser.add_argument("--resolution", type=positive, default=256, help="Of plain LoRA; BlockSkip sees half of it.")
    parser.add_argument("--text_tokens", type=positive, default=128, help="Tokens a prompt is padded to.")
    parser.add_argument("--rank", type=positive, default=32, help="Rank of the LoRA.")
    parser.add_argument("--batch_size", type=positive, default=1, help="Samples in a step.")
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="no", help="bf16 is for GPUs.")
    parser.add_argument("--pairs", type=positive, default=30, help="Turns that each way of training takes.")
    parser.add_argument("--warmup", type=positive, default=3, help="Turns before them that do not count.")
    parser.add_argument("--steps", type=positive, default=500, help="Length of the run that is reckoned up.")
    parser.add_argument("--num_draws", type=positive, help="Draws of that run; default: one for every sample.")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file for all that was measured.")
    return parser.parse_args(input_args)


def build_pipeline(options: argparse.Namespace, folder: pathlib.Path) -> pathlib.Path:
    """Write a FLUX pipeline with random weights, whose transformer has the shape asked for; the rest of it is tiny."""
    build_tiny_flux(folder, num_layers=1, num_single_layers=1)
    tiny = FluxTransformer2DModel.load_config(folder, subfolder="transformer")
    shutil.rmtree(folder / "transformer")
    config = json.loads(FLUX_DEV.read_text()) | {
        "num_layers": options.double_blocks,
        "num_single_layers": options.single_blocks,
        "num_attention_heads": options.heads,
        **{name: tiny[name] for name in ("in_channels", "joint_attention_dim", "pooled_projection_dim")},
    }
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", blockskip.DTYPES[options.mixed_precision]
    with torch.device("meta"):
        transformer = FluxTransformer2DModel.from_config(config)
    # not by the model's own initialisation, which takes minutes and twice the memory for 12 billion parameters
    transformer._apply(lambda tensor: torch.randn(tensor.shape, dtype=dtype, device=device) * 0.02)
    transformer.save_pretrained(folder / "transformer")
    return folder


@dataclasses.dataclass
class Trial:
    """One way of training, in front of its next batch.

    Attributes:
        run, trainer, prompts, batches, batch: As in the training loop.
        precompute_seconds: For a draw, in the median.
        precompute_steps: The same in plain LoRA's steps of those minutes.
        flops: Floating-point operations of a step, 1 multiply-add = 2.
        step_seconds: Of the steps timed, from having a batch to having the next one.
        wait_seconds: The part of each at its end in which nothing was left to do but wait for that batch.
    """

    run: blockskip.Run
    trainer: blockskip.Trainer
    prompts: dict[str, dict[str, torch.Tensor]]
    batches: Iterator[blockskip.Batch]
    batch: blockskip.Batch
    precompute_seconds: float
    precompute_steps: float = 0.0
    flops: int = 0
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    wait_seconds: list[float] = dataclasses.field(default_factory=list)

    def step(self) -> tuple[float, float]:
        """Take an optimizer step as the training loop does and get the next batch; seconds in all, and of waiting."""
        begin = time.perf_counter()
        blockskip.train_on_batch(self.run, self.trainer, self.batch, self.prompts, losses=[])
        blockskip.finish_step(self.run, self.trainer, self.prompts, tqdm(disable=True))
        if self.run.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        waiting = time.perf_counter()
        self.batch = next(self.batches)
        end = time.perf_counter()
        return end - begin, end - waiting

    def turn(self) -> tuple[float, float]:
        """Take two steps; the times of the second one."""
        self.step()
        return self.step()

    def timed_turn(self) -> None:
        """Take a turn and note its times."""
        for seconds, value in zip((self.step_seconds, self.wait_seconds), self.turn(), strict=True):
            seconds.append(value)


def begin_trial(options: argparse.Namespace, model: pathlib.Path, output: pathlib.Path, *flags: object) -> Trial:
    """Go through the phases of a run up to its first step."""
    turns = 3 * options.warmup + options.pairs  # plain LoRA's also stand around the precompute of BlockSkip
    steps = 1 + 2 * turns + 1  # the first counts FLOPs, the last is read and not taken
    words = ["--pretrained_model_name_or_path", model, "--instance_data_dir", FOLDER / "cat"]
    words += ["--instance_prompt", "a photo of sks cat", "--output_dir", output, "--report_to", "none", "--seed", 0]
    words += ["--max_sequence_length", options.text_tokens, "--resolution", options.resolution]
    words += ["--rank", options.rank, "--lora_alpha", options.rank, "--train_batch_size", options.batch_size]
    words += ["--mixed_precision", options.mixed_precision, "--max_train_steps", steps]
    words += ["--checkpointing_steps", steps + 1]
    args = flux_script.parse_args([str(word) for word in (*words, *flags)])
    accelerator = blockskip.start(args, flux_script.FLUX)
    run = blockskip.check(args, flux_script.FLUX, accelerator, blockskip.RunReport(accelerator))
    prompts = blockskip.encode_prompts(run)
    trainer = blockskip.load_trainer(run)
    (period,) = run.plan.periods()
    draws = blockskip.make_draws(run, period)
    blockskip.precompute(run, trainer, period, draws, prompts)
    blockskip.start_training(run, trainer)
    batches = blockskip.read_ahead(blockskip.stored_draw_loader(run, period, 0))
    trial = Trial(run, trainer, prompts, batches, next(batches), seconds_between_files(run.store(), draws))
    trial.flops = blockskip.count_flops(trial.step)
    return trial


def seconds_between_files(store: blockskip.ResidualStore, draws: list[blockskip.Draw]) -> float:
    """Median seconds from one stored draw to the next: what a draw takes, without what precompute does only once."""
    written = [store.path(draw).stat().st_mtime_ns / 1e9 for draw in draws]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(written))


def begin_both(options: argparse.Namespace, folder: pathlib.Path) -> tuple[Trial, Trial]:
    """Plain LoRA and BlockSkip, each in front of its first turn, with their files in a folder."""
    if options.resolution % 32:
        blockskip.refuse(f"--resolution {options.resolution} is not a multiple of 32, so half of it is not one of 16")
    model = options.model or build_pipeline(options, folder / "flux")
    full, half = options.resolution, options.resolution // 2
    plain = begin_trial(options, model, folder / "plain", "--patch_schedule", "none", "--patch_resolution", full)
    steps = [plain.turn()[0] for _ in range(options.warmup)]
    skip = ("--skip_first", options.skip_first, "--skip_last", options.skip_last)
    ours = begin_trial(options, model, folder / "blockskip", "--patch_resolution", half, *skip)
    steps += [plain.turn()[0] for _ in range(options.warmup)]
    for trial in (plain, ours):
        trial.precompute_steps = trial.precompute_seconds / statistics.median(steps)
    return plain, ours


def reading_seconds(trial: Trial) -> float:
    """Median seconds that a batch takes to read where nothing is computed meanwhile."""
    (period,) = trial.run.plan.periods()
    seconds, begin = [], time.perf_counter()
    for _ in blockskip.stored_draw_loader(trial.run, period, 0):
        end = time.perf_counter()
        seconds.append(end - begin)
        begin = end
    return statistics.median(seconds)


def spread(values: list[float]) -> dict[str, object]:
    """Median, quartiles and extremes."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {
        "median": statistics.median(values),
        "quartiles": [quartiles[0], quartiles[2]],
        "extremes": [min(values), max(values)],
    }


def summary(trial: Trial) -> dict[str, object]:
    """What was measured of one way of training."""
    plan = trial.run.plan
    return {
        "resolution": plan.patch_resolution,
        "trained_blocks": plan.depth - plan.skip_first - plan.skip_last,
        "flops_per_step": trial.flops,
        "step_seconds": trial.step_seconds,
        "wait_seconds": trial.wait_seconds,
        "waiting_share": sum(trial.wait_seconds) / sum(trial.step_seconds),
        "reading_seconds": reading_seconds(trial),
        "precompute_seconds": trial.precompute_seconds,
        "precompute_steps": trial.precompute_steps,
    }


def compare(options: argparse.Namespace, plain: Trial, ours: Trial) -> dict[str, object]:
    """All that was measured, ready for JSON; ratios are BlockSkip's share of plain LoRA's."""
    pairs = zip(ours.step_seconds, plain.step_seconds, strict=True)
    step_ratio = spread([our_seconds / plain_seconds for our_seconds, plain_seconds in pairs])
    draws = options.num_draws or options.steps * options.batch_size
    run_steps = {  # both in steps of plain LoRA
        "plain": options.steps + draws * plain.precompute_steps,
        "blockskip": options.steps * step_ratio["median"] + draws * ours.precompute_steps,
    }
    on_cuda = plain.run.accelerator.device.type == "cuda"
    return {
        "options": {name: str(value) if name == "output" else value for name, value in vars(options).items()},
        "num_draws": draws,
        "depth": plain.run.plan.depth,
        "parameters": sum(p.numel() for p in plain.trainer.transformer.parameters() if not p.requires_grad),
        "device": torch.cuda.get_device_name() if on_cuda else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "plain": summary(plain),
        "blockskip": summary(ours),
        "step_ratio": step_ratio,
        "flop_ratio": ours.flops / plain.flops,
        "run_steps": run_steps,
        "run_ratio": run_steps["blockskip"] / run_steps["plain"],
    }


def describe(results: dict) -> str:
    """The comparison for the terminal."""
    options, ratio, ways = results["options"], results["step_ratio"], (results["plain"], results["blockskip"])
    run = f"{options['steps']} steps, {results['num_draws']} draws, in plain steps"
    rows = {
        "input, px": [way["resolution"] for way in ways],
        "blocks trained": [f"{way['trained_blocks']} of {results['depth']}" for way in ways],
        "TFLOP in a step": [f"{way['flops_per_step'] / 1e12:.4g}" for way in ways],
        "step, s (median)": [f"{statistics.median(way['step_seconds']):.4f}" for way in ways],
        "share of it waiting for draws": [f"{way['waiting_share']:.2%}" for way in ways],
        "reading a batch, ms": [f"{way['reading_seconds'] * 1e3:.2f}" for way in ways],
        "precompute of a draw, in plain steps": [f"{way['precompute_steps']:.4f}" for way in ways],
        run: [f"{steps:.1f}" for steps in results["run_steps"].values()],
    }
    quartiles, extremes = ("{:.3f} to {:.3f}".format(*ratio[name]) for name in ("quartiles", "extremes"))
    return "\n".join(
        [
            f"{results['parameters'] / 1e6:.0f} M parameters, {results['device']}, {results['threads']} threads, "
            f"rank {options['rank']}, batch {options['batch_size']}, {options['text_tokens']} text tokens",
            f"{'':<46}{'plain LoRA':>12}{'BlockSkip':>12}",
            *(f"{name:<46}{plain:>12}{ours:>12}" for name, (plain, ours) in rows.items()),
            f"step-time ratio   {ratio['median']:.3f}   median of {options['pairs']} pairs; half of them {quartiles}, "
            f"all {extremes}",
            f"FLOP ratio        {results['flop_ratio']:.3f}   the limit of the step-time ratio",
            f"whole-run ratio   {results['run_ratio']:.3f}   of steps and precompute, without loading",
        ]
    )


def main(options: argparse.Namespace) -> None:
    """Let both ways of training take turns, then print and write what that took."""
    with tempfile.TemporaryDirectory() as folder:
        trials = begin_both(options, pathlib.Path(folder))
        for trial in trials * options.warmup:
            trial.turn()
        for number in tqdm(range(options.pairs), "pairs"):
            for trial in trials if number % 2 else reversed(trials):
                trial.timed_turn()
        results = compare(options, *trials)
    print(describe(results))
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main(parse_args())
