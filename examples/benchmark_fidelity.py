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
"""Is a subject learnt with half of the blocks skipped? Plain LoRA, BlockSkip, its ablations and its rivals, compared.

    python examples/benchmark_fidelity.py run WORK                     # trains whatever WORK does not hold yet
    python examples/benchmark_fidelity.py report WORK --picture fidelity.png --grid grid.png

The model is the mini FLUX of examples/mini_flux, which was pretrained to draw scenes; the subjects are figures that
its pretraining never showed. Every way of training takes the same number of steps of the same batch size and goes
through train_dreambooth_blockskip_flux.py as a user would call it; all but LISA, which trains no LoRA. Then the full
model draws the subject, alone and in new contexts, and its flow-matching loss on pictures held out from training is
taken, at full resolution. "Kept" is the share of plain LoRA's fall of that loss. Several processes may share WORK if
each has other --subjects or --seeds.

In order: the ways of training, training, measuring, the report, its pictures, the command line.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import logging
import math
import os
import pathlib
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import diffusers
import torch
import transformers
from diffusers import FluxPipeline
from PIL import Image, ImageDraw, ImageFont
from torch import nn

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER / "mini_flux"), str(FOLDER.parent)]

import blockskip_utils as blockskip
import pretrain
import scenes
import train_dreambooth_blockskip_flux as flux_script
from generate import files_digest, load_lora

PROMPT = "a photo of a sks thing"
WEIGHTS = FOLDER / "mini_flux" / "mini_flux.safetensors"
SUBJECTS = tuple(scenes.FIGURES)


# ---------------------------------------------------------------------------------------------------------------------
# The ways of training
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_residuals() -> Iterator[None]:
    """Let skipped blocks add nothing: they are dropped, not replaced."""
    stored = blockskip.SkipHandle.residual

    def residual(handle: blockskip.SkipHandle, key: str) -> torch.Tensor:
        tensor = stored(handle, key)
        return tensor if key.startswith("modulation.") else torch.zeros_like(tensor)

    with mock.patch.object(blockskip.SkipHandle, "residual", residual):
        yield


def train_lisa(run: blockskip.Run, prompts: dict, options: argparse.Namespace) -> nn.Module:
    """LISA (arXiv 2403.17919): the weights themselves are trained, of two random blocks at a time and of both ends."""
    transformer = blockskip.load_transformer(run, torch.float32)
    handle, vae = blockskip.skip_blocks(transformer, 0, 0), blockskip.load_vae(run)
    trainer = blockskip.Trainer(transformer, handle, vae, None, None, step=0, model=transformer)
    (period,) = run.plan.periods()
    blockskip.precompute(run, trainer, period, blockskip.make_draws(run, period), prompts)
    rng, blocks = random.Random(run.plan.seed), list(blockskip.named_blocks(transformer))
    for step, batch in enumerate(blockskip.stored_draw_loader(run, period, 0)):
        if step % options.lisa_period == 0:
            chosen = ("x_embedder", "proj_out", *rng.sample(blocks, 2))
            trained = [p for name in chosen for p in transformer.get_submodule(name).parameters()]
            transformer.requires_grad_(False)
            for parameter in trained:
                parameter.requires_grad_(True)
            optimizer = torch.optim.AdamW(trained, weight_decay=1e-4)
        for group in optimizer.param_groups:
            group["lr"] = options.lisa_learning_rate * (1 + math.cos(math.pi * step / options.steps)) / 2
        blockskip.flow_matching_loss(run, trainer, batch, prompts).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return transformer.requires_grad_(False).eval()


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of training.

    Attributes:
        flags: Of the training script, besides those that all ways have.
        change: What is changed about the script meanwhile.
        train: What is done in place of the script's phases from loading to saving; returns the transformer.
        group: Under which heading the report puts it.
    """

    flags: str = ""
    change: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    train: Callable[[blockskip.Run, dict, argparse.Namespace], nn.Module] | None = None
    group: str = "the method"


FULL = f"--patch_schedule none --patch_resolution {scenes.RESOLUTION} "
NO_PATCHES = "--patch_schedule none "
HALF = "--skip_ratio 0.5 "
BASE = "base model"  # which is drawn with as it is
WAYS = {
    BASE: Way(group="references"),
    "LoRA": Way(FULL, group="references"),
    "30 %": Way("--skip_ratio 0.3"),
    "40 %": Way("--skip_ratio 0.4"),
    "50 %": Way(HALF),
    "50 %, refreshed": Way(HALF + "--residual_refresh_steps 50"),
    "no block skipped, patches": Way(group="patches"),
    "50 %, patches off: resized": Way(HALF + NO_PATCHES, group="patches"),
    "50 %, patches reversed": Way(HALF + "--patch_schedule reverse", group="patches"),
    "50 %, patches random": Way(HALF + "--patch_schedule random", group="patches"),
    "50 %, full size": Way(HALF + FULL, group="blocks, at full size"),
    "50 %, full size, refreshed": Way(HALF + FULL + "--residual_refresh_steps 50", group="blocks, at full size"),
    "50 %, full size, no residuals": Way(HALF + FULL, without_residuals, group="blocks, at full size"),
    "50 %, full size, first only": Way(FULL + "--skip_first 6", group="blocks, at full size"),
    "50 %, full size, last only": Way(FULL + "--skip_last 6", group="blocks, at full size"),
    # HollowedNet trains both ends and feeds cached features of the middle to the end. A DiT has no connection around
    # its middle, so no gradient reaches the front: what is trained is the end, behind features of the frozen model.
    "HollowedNet's way, full size": Way(FULL + "--skip_first 9", group="rivals"),
    "LISA, full size": Way(FULL, train=train_lisa, group="rivals"),
    "50 %, refreshed every 100 steps": Way(HALF + "--residual_refresh_steps 100", group="refresh and draws"),
    "50 %, refreshed every 25 steps": Way(HALF + "--residual_refresh_steps 25", group="refresh and draws"),
    "50 %, refreshed, 100 draws each": Way(
        HALF + "--residual_refresh_steps 50 --num_draws 100", group="refresh and draws"
    ),
    "50 %, 400 draws": Way(HALF + "--num_draws 400", group="refresh and draws"),
    "50 %, 100 draws": Way(HALF + "--num_draws 100", group="refresh and draws"),
}


def slug(name: str) -> str:
    """A way's name as the name of a folder."""
    return "_".join("".join(c if c.isalnum() else " " for c in name).split())


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def flags_of(way: Way, subject: str, seed: int, options: argparse.Namespace, output: pathlib.Path) -> list[str]:
    """The command line of the training script."""
    work = options.work
    words = ["--pretrained_model_name_or_path", work / "model", "--instance_data_dir", work / "photos" / subject]
    words += ["--instance_prompt", PROMPT, "--output_dir", output, "--seed", seed, "--report_to", "none"]
    words += ["--resolution", scenes.RESOLUTION, "--max_sequence_length", pretrain.TEXT_TOKENS]
    words += ["--rank", options.rank, "--lora_alpha", options.rank, "--learning_rate", options.learning_rate]
    words += ["--train_batch_size", options.batch_size, "--precompute_batch_size", 8, "--mixed_precision", "no"]
    words += ["--max_train_steps", options.steps, "--checkpointing_steps", options.steps + 1]
    words += [
        "--lr_scheduler",
        "cosine",
        "--lr_warmup_steps",
        0,
    ]  # at a constant rate the noise of the last steps shows
    words += way.flags.split()
    if "--patch_resolution" not in words:
        words += ["--patch_resolution", scenes.RESOLUTION // 2]
    if "--skip_ratio" in words:
        words += ["--block_curves", work / "curves.json"]
    return [str(word) for word in words]


def prepare(options: argparse.Namespace) -> None:
    """Put into WORK what all ways need: the model, photos of the subjects, and the curves that choose the blocks."""
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    with announced(work / "model") as folder:
        if folder:
            pretrain.load_pipeline(options.weights).save_pretrained(folder)
    for subject in {*SUBJECTS, *options.subjects}:
        with announced(work / "photos" / subject) as folder:
            if folder:
                folder.mkdir(parents=True)
                for number, photo in enumerate(scenes.subject_photos(subject)):
                    photo.save(folder / f"{number}.png")
    if not (work / "curves.json").exists():
        import select_blocks  # brings both scripts with it

        words = ["--pretrained_model_name_or_path", work / "model", "--metric", "prediction", "--device", "cpu"]
        for subject in SUBJECTS:  # whichever are trained: all processes that share WORK skip the same blocks
            words += ["--prompt", PROMPT, "--instance_data_dir", work / "photos" / subject]
        words += ["--resolution", scenes.RESOLUTION, "--max_sequence_length", pretrain.TEXT_TOKENS]
        words += ["--output", work / "curves.json"]
        select_blocks.main(select_blocks.parse_args([str(word) for word in words]))


@contextlib.contextmanager
def announced(folder: pathlib.Path) -> Iterator[pathlib.Path | None]:
    """A folder to fill, which gets its name when it is full; None if it stands already."""
    if folder.exists():
        yield None
        return
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    yield partial
    partial.rename(folder)


def train(way: Way, subject: str, seed: int, options: argparse.Namespace, output: pathlib.Path) -> dict[str, Any]:
    """Train one subject one way.

    Returns:
        The transformer, if it was trained without a LoRA, as "transformer"; seconds by phase; skip counts.
    """
    args = flux_script.parse_args(flags_of(way, subject, seed, options, output))
    # what a run needs is metered once for each way, not with each run
    with way.change(), mock.patch.object(blockskip, "estimate_run"), contextlib.redirect_stdout(io.StringIO()):
        if way.train is None:
            flux_script.main(args)
            report = json.loads((output / "run_report.json").read_text())
            seconds = {phase["name"]: phase["seconds"] for phase in report["phases"]}
            return {"seconds": seconds, "skipped": [report["plan"]["skip_first"], report["plan"]["skip_last"]]}
        accelerator = blockskip.start(args, flux_script.FLUX)
        run = blockskip.check(args, flux_script.FLUX, accelerator, blockskip.RunReport(accelerator))
        prompts = blockskip.encode_prompts(run)
        begin = time.perf_counter()
        transformer = way.train(run, prompts, options)
        return {"seconds": {"train": time.perf_counter() - begin}, "skipped": [0, 0], "transformer": transformer}


def costs(way: Way, options: argparse.Namespace) -> dict[str, float]:
    """What a training step of the script takes, by `--dry_run`: {"bytes": device peak, "flops": ...}."""
    with contextlib.redirect_stdout(io.StringIO()):
        file = options.work / "dry_run.json"
        words = flags_of(way, options.subjects[0], 0, options, options.work / "dry_run")
        flux_script.main(flux_script.parse_args([*words, "--dry_run", "--dry_run_json", str(file)]))
    phases = {phase["name"]: phase for phase in json.loads(file.read_text())["phases"]}
    file.unlink()
    return {
        "bytes": phases["train"]["peak_device_bytes"],
        "flops": phases["train"]["flops"],
        "flops_of_a_draw": phases["precompute"]["flops"],
    }


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def prompts_to_draw(options: argparse.Namespace) -> list[tuple[str, str]]:
    """File names and prompts: the subject alone, and on each background, each as often as `--images` says."""
    alone = [(f"alone-{number}", PROMPT) for number in range(options.images)]
    placed = [
        (f"{background}-{place}-{number}", f"a sks thing on {background} at the {place}")
        for background, place in zip(scenes.BACKGROUNDS, scenes.PLACES, strict=True)
        for number in range(options.images)
    ]
    return alone + placed


@torch.no_grad()
def held_out_loss(pipeline: FluxPipeline, subject: str) -> float:
    """Flow-matching loss of the full model on five pictures that training never saw, each at eight noise levels."""
    pictures = scenes.subject_pictures(subject)
    latents = pretrain.encode_pictures(pipeline.vae, pictures)
    ids = pretrain.tokenize(pipeline, [PROMPT] * len(pictures))
    models = {name: getattr(pipeline, name) for name in pretrain.TRAINED}
    generator, losses = torch.Generator().manual_seed(0), []
    for level in range(8):
        noise = torch.randn(latents.shape, generator=generator)
        sigmas = torch.full((len(pictures),), (level + 0.5) / 8)
        losses.append(pretrain.flow_matching_loss(models, latents, noise, sigmas, ids).item())
    return statistics.mean(losses)


def measure_cell(name: str, subject: str, seed: int, options: argparse.Namespace) -> None:
    """Train, draw and measure one way, subject and seed, and store all of it in a folder of WORK."""
    way = WAYS[name]
    with announced(options.work / "cells" / slug(name) / f"{subject}-{seed}") as folder:
        if folder is None:
            return
        folder.mkdir(parents=True)
        pipeline = FluxPipeline.from_pretrained(options.work / "model")
        pipeline.set_progress_bar_config(disable=True)
        result = {"way": name, "subject": subject, "seed": seed}
        if name != BASE:
            trained = train(way, subject, seed, options, folder / "lora")
            if (transformer := trained.pop("transformer", None)) is not None:
                pipeline.transformer = transformer
            else:
                load_lora(pipeline, str(folder / "lora"), "subject")
            result |= trained
        result["loss"] = held_out_loss(pipeline, subject)
        names, prompts = zip(*prompts_to_draw(options), strict=True)
        pictures = pretrain.draw(
            pipeline, list(prompts), scenes.RESOLUTION, seed=seed * 1000, steps=options.draw_steps
        )
        for file, picture in zip(names, pictures, strict=True):
            picture.save(folder / f"{file}.png")
        (folder / "result.json").write_text(json.dumps(result, indent=2))
        print(f"{name}, {subject}, seed {seed}: held-out loss {result['loss']:.4f}", flush=True)


def run(options: argparse.Namespace) -> None:
    """Measure everything that WORK does not hold yet."""
    torch.set_num_threads(options.threads)
    be_quiet()
    weights = {"weights": files_digest([options.weights])}
    check_settings(options.work, {name: getattr(options, name) for name in SETTINGS} | weights)
    prepare(options)
    for seed, subject, name in itertools.product(options.seeds, options.subjects, options.ways):
        measure_cell(name, subject, seed, options)
    for name in options.ways:
        file = options.work / "cells" / slug(name) / "costs.json"
        if not (file.exists() or name == BASE or WAYS[name].train):
            file.write_text(json.dumps(costs(WAYS[name], options)))


def be_quiet() -> None:
    """Of all that a run says, leave its warnings and errors: there are hundreds of runs."""
    logging.disable(logging.INFO)
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
        library.utils.logging.set_verbosity_error()
    os.environ["TQDM_DISABLE"] = "1"


SETTINGS = (
    "steps",
    "batch_size",
    "rank",
    "learning_rate",
    "lisa_period",
    "lisa_learning_rate",
    "images",
    "draw_steps",
)


def check_settings(work: pathlib.Path, settings: dict[str, Any]) -> None:
    """Note the settings in WORK; refuse to mix results of others with them."""
    file = work / "settings.json"
    if file.exists() and json.loads(file.read_text()) != settings:
        blockskip.refuse(f"{file} tells of other settings than these: name another folder, or give the same flags")
    work.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=2))


# ---------------------------------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------------------------------

MEASURES = {  # of a cell's pictures, and what the report calls them
    "kept": "share of LoRA's gain kept",
    "recognised": "pictures in which the checker finds the subject",
    "text": "pictures with background and place as told",
    "likeness": "likeness to the subject by the checker",
    "embedding": "cosine to the photos",
}


def measures(
    folder: pathlib.Path, subject: str, embed: Callable[[Image.Image], torch.Tensor], photos: torch.Tensor
) -> dict[str, float]:
    """What the pictures of a cell show; `photos` are the vectors (photos, width) of the subject's."""
    figure = scenes.SUBJECTS[subject]
    pictures = {file.stem: Image.open(file) for file in sorted(folder.glob("*.png"))}
    cuts = [scenes.figure_cut(picture) for picture in pictures.values()]
    drawn = torch.cat([embed(picture) for picture in pictures.values()])
    cosines = nn.functional.cosine_similarity(drawn[:, None], photos[None], dim=-1)
    return {
        "recognised": statistics.mean(scenes.recognise(cut) == figure for cut in cuts),
        "likeness": statistics.mean(scenes.likeness(cut, *figure) for cut in cuts),
        "text": statistics.mean(is_as_told(name, p) for name, p in pictures.items() if not name.startswith("alone")),
        "embedding": cosines.mean().item(),
    }


def is_as_told(name: str, picture: Image.Image) -> bool:
    """Whether background and place are those of the prompt, which the file's name repeats."""
    reading = scenes.read_picture(picture)
    return (reading.background, reading.place) == tuple(name.split("-")[:2])


def make_embedder(options: argparse.Namespace) -> Callable[[Image.Image], torch.Tensor]:
    """Turns a picture into a vector (1, width): a transformers model, or the mini FLUX's own autoencoder.

    The autoencoder sees the figure alone, cut out and set on white.
    """
    if options.embedding_model:
        from embeddings import Embedder  # it takes long to import

        return Embedder(options.embedding_model, torch.device("cpu"))
    vae = pretrain.load_pipeline(options.weights).vae

    @torch.no_grad()
    def embed(picture: Image.Image) -> torch.Tensor:
        alone = Image.new("RGB", (64, 64), "white")
        if (cut := scenes.figure_cut(picture)) is not None:
            cut = cut.resize((48, 48))
            alone.paste(cut, (8, 8), cut)
        return vae.encode(pretrain.to_tensor([alone])).latent_dist.mean.flatten(1)

    return embed


@dataclasses.dataclass
class Row:
    """A way of training in the report: for each measure one value a subject and seed, and what a step costs."""

    name: str
    values: dict[str, list[float]]
    skipped: list[int] | None
    step_seconds: list[float]
    costs: dict[str, float]

    def mean(self, measure: str) -> float:
        """Over subjects and seeds; nan where nothing was measured."""
        return statistics.mean(self.values[measure]) if self.values[measure] else math.nan

    def deviation(self, measure: str) -> float:
        """Standard deviation over subjects and seeds."""
        return statistics.stdev(self.values[measure]) if len(self.values[measure]) > 1 else 0.0


def collect(options: argparse.Namespace) -> list[Row]:
    """All that WORK holds, in the order of `WAYS`."""
    embed = make_embedder(options)

    @functools.cache
    def photos(subject: str) -> torch.Tensor:
        return torch.cat([embed(photo) for photo in scenes.subject_pictures(subject)])

    results = {}
    for name in WAYS:
        for file in sorted((options.work / "cells" / slug(name)).glob("*/result.json")):
            result = json.loads(file.read_text())
            subject = result["subject"]
            seen = measures(file.parent, subject, embed, photos(subject))
            results[name, subject, result["seed"]] = result | seen
    steps = json.loads((options.work / "settings.json").read_text())["steps"]
    return [make_row(name, results, steps, options) for name in WAYS if any(key[0] == name for key in results)]


def make_row(name: str, results: dict[tuple[str, str, int], dict], steps: int, options: argparse.Namespace) -> Row:
    """A way's measures; what it kept of LoRA's gain is known where base model and LoRA were measured, too."""
    own = {key[1:]: result for key, result in results.items() if key[0] == name}
    values = {measure: [result[measure] for result in own.values()] for measure in MEASURES if measure != "kept"}
    values["kept"] = [
        (base["loss"] - result["loss"]) / (base["loss"] - lora["loss"])
        for key, result in own.items()
        if (base := results.get((BASE, *key))) and (lora := results.get(("LoRA", *key)))
    ]
    file = options.work / "cells" / slug(name) / "costs.json"
    return Row(
        name=name,
        values=values,
        skipped=next((result.get("skipped") for result in own.values()), None),
        step_seconds=[result["seconds"]["train"] / steps for result in own.values() if "seconds" in result],
        costs=json.loads(file.read_text()) if file.exists() else {},
    )


def table(rows: list[Row]) -> str:
    """The report for the terminal and the README."""
    titles = "| | skipped | kept | recognised | text | likeness | cosine | step, s | step, GFLOP | step, MiB |"
    lines = [titles, "|---|" + "---|" * 9]
    for group, members in itertools.groupby(rows, key=lambda row: WAYS[row.name].group):
        lines.append(f"| *{group}* |" + " |" * 9)
        for row in members:
            shares = [f"{row.mean(m):.0%} ± {row.deviation(m):.0%}" for m in ("kept", "recognised", "text")]
            likeness = [f"{row.mean(m):.3f} ± {row.deviation(m):.3f}" for m in ("likeness", "embedding")]
            seconds = f"{statistics.median(row.step_seconds):.3f}" if row.step_seconds else ""
            flops = f"{row.costs['flops'] / 1e9:.1f}" if row.costs else ""
            size = f"{row.costs['bytes'] / 2**20:.0f}" if row.costs else ""
            skipped = "{} + {}".format(*row.skipped) if row.skipped else ""
            lines.append("| " + " | ".join([row.name, skipped, *shares, *likeness, seconds, flops, size]) + " |")
    return "\n".join(lines)


def report(options: argparse.Namespace) -> None:
    """Print the table and write what was asked for."""
    rows = collect(options)
    if not rows:
        blockskip.refuse(f"{options.work} holds no result: run this script with `run {options.work}` first")
    print(table(rows))
    (options.work / "report.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    if options.picture:
        draw_plot(rows).save(options.picture)
    if options.grid:
        draw_grid(options).save(options.grid)


# ---------------------------------------------------------------------------------------------------------------------
# Its pictures
# ---------------------------------------------------------------------------------------------------------------------

INK, PALE, BLUE = "#222222", "#9aa5b1", "#1f5fa8"


def draw_plot(rows: list[Row]) -> Image.Image:
    """Three columns of dots: faint ones for subjects and seeds, a strong one for the mean, with its deviation."""
    font = ImageFont.load_default(13)
    image = Image.new("RGB", (1180, 70 + 24 * len(rows)), "white")
    draw = ImageDraw.Draw(image)
    for column, measure in enumerate(("kept", "recognised", "text")):
        left, width = 270 + 305 * column, 260
        lowest = -0.25 if measure == "kept" else 0.0
        place = functools.partial(_place, left=left, width=width, lowest=lowest, highest=1.1)
        draw.text((left, 12), MEASURES[measure], INK, font)
        for share in (0, 0.25, 0.5, 0.75, 1.0):
            draw.line([(place(share), 48), (place(share), image.height - 12)], fill="#dddddd")
            draw.text((place(share), 46), f"{share:.0%}", PALE, font, anchor="mb")
        for number, row in enumerate(rows):
            y = 64 + 24 * number
            if column == 0:
                draw.text((250, y), row.name, INK, font, anchor="rm")
            if not row.values[measure]:
                continue
            for value in row.values[measure]:
                _dot(draw, place(value), y, 2, PALE)
            mean, deviation = row.mean(measure), row.deviation(measure)
            draw.line([(place(mean - deviation), y), (place(mean + deviation), y)], fill=BLUE, width=2)
            _dot(draw, place(mean), y, 5, BLUE)
    return image


def _place(value: float, *, left: float, width: float, lowest: float, highest: float) -> float:
    """The pixel of a value on an axis; values beyond an end stand there."""
    return left + width * (min(max(value, lowest), highest) - lowest) / (highest - lowest)


def _dot(draw: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: str) -> None:
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)


def draw_grid(options: argparse.Namespace) -> Image.Image:
    """For each subject its photos, and what some ways of training drew, from the same noise, with the first seed."""
    from picture_grid import make_grid

    names = (BASE, "LoRA", "50 %", "50 %, refreshed", "50 %, full size, no residuals")
    files = [name for name, _ in prompts_to_draw(options) if name.endswith("-0")]
    rows = []
    for subject in options.subjects:
        rows.append((f"{subject}: photos", scenes.subject_photos(subject)))
        for name in names:
            folder = options.work / "cells" / slug(name) / f"{subject}-{options.seeds[0]}"
            if folder.exists():
                rows.append((name, [Image.open(folder / f"{file}.png") for file in files]))
    return make_grid(rows, side=96)


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


def parse_args(input_args: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `input_args`."""
    parser = blockskip.OneLineParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("work", type=pathlib.Path, help="Folder of models, pictures and results.")
    shared.add_argument(
        "--weights", type=pathlib.Path, default=WEIGHTS, help="Of the mini FLUX; default: those shipped."
    )
    shared.add_argument(
        "--subjects", nargs="+", choices=scenes.SUBJECTS, default=SUBJECTS, help="Default: all figures."
    )
    shared.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    shared.add_argument("--images", type=blockskip.POSITIVE, default=2, help="Pictures of each prompt.")
    command = commands.add_parser("run", parents=[shared], help="Train, draw and measure.")
    command.add_argument("--ways", nargs="+", choices=WAYS, default=tuple(WAYS), metavar="WAY", help="Default: all.")
    command.add_argument("--steps", type=blockskip.POSITIVE, default=200, help="Of training.")
    command.add_argument("--batch_size", type=blockskip.POSITIVE, default=8)
    command.add_argument("--rank", type=blockskip.POSITIVE, default=8)
    command.add_argument("--learning_rate", type=float, default=1e-3)
    command.add_argument("--lisa_period", type=blockskip.POSITIVE, default=10, help="Steps between draws of layers.")
    command.add_argument("--lisa_learning_rate", type=float, default=3e-4, help="Of whole weights.")
    command.add_argument("--draw_steps", type=blockskip.POSITIVE, default=20, help="Of the sampler.")
    command.add_argument("--threads", type=blockskip.POSITIVE, default=1)
    command.set_defaults(action=run)
    command = commands.add_parser("report", parents=[shared], help="Print the table, draw the plot.")
    command.add_argument(
        "--embedding_model", help="DINO, CLIP or another vision model of transformers, for the cosine."
    )
    command.add_argument("--picture", type=pathlib.Path, help="PNG file of the plot.")
    command.add_argument("--grid", type=pathlib.Path, help="PNG file of what was drawn.")
    command.set_defaults(action=report)
    return parser.parse_args(input_args)


def main(options: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    options.action(options)


if __name__ == "__main__":
    main(parse_args())
