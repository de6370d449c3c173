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
"""Find out which blocks of FLUX or SANA to skip: hide the text from the image in some of them and see what changes.

    python examples/select_blocks.py --pretrained_model_name_or_path black-forest-labs/FLUX.1-dev \
        --lora cat-lora --prompt "a photo of sks cat" --output curves.json

    accelerate launch train_dreambooth_blockskip_flux.py ... --skip_ratio 0.5 --block_curves curves.json

The paper (arXiv 2603.20755) generates images with a trained LoRA and compares their embeddings by DINO or CLIP: that
is `--metric image`. `--metric prediction` compares the velocities that the model predicts for noisy versions of the
photos in `--instance_data_dir`; it needs no other model, and one forward pass where an image takes dozens. The curves
go to a JSON file, from which any number of blocks can be chosen, and a picture of them beside it. An interrupted
measurement goes on with the same command.

In order: the command line, the model, what is measured, the measurement, the picture.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw, ImageFont
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import blockskip_utils as blockskip
from blockskip_utils import refuse
from embeddings import Embedder
from generate import files_digest, load_lora, lora_files
from train_dreambooth_blockskip_flux import FLUX
from train_dreambooth_blockskip_sana import SANA

FAMILIES = {family.pipeline_class.__name__: family for family in (FLUX, SANA)}
RATIOS = (0.3, 0.4, 0.5)  # of the blocks, as in the paper
PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}  # as accelerate calls them


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


def parse_args(input_args: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `input_args`; a mistake ends the program with one line."""
    parser = blockskip.OneLineParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pretrained_model_name_or_path", required=True, help="Folder or hub id of the pipeline.")
    parser.add_argument("--metric", choices=["image", "prediction"], default="image", help="What is compared.")
    parser.add_argument("--lora", action="append", help="LoRA of a subject; several, each with its own prompt.")
    parser.add_argument("--prompt", action="append", help="Names the subject; may be given several times.")
    parser.add_argument(
        "--instance_data_dir", action="append", help="Photos of a prompt's subject, for --metric prediction."
    )
    parser.add_argument(
        "--embedding_model",
        default="facebook/dino-vits16",
        help="Vision model of transformers that --metric image compares by; openai/clip-vit-base-patch32 is CLIP.",
    )
    parser.add_argument("--num_images", type=blockskip.POSITIVE, default=1, help="For each prompt, to --metric image.")
    parser.add_argument("--num_inference_steps", type=blockskip.POSITIVE, help="Of an image; default: the pipeline's.")
    parser.add_argument("--resolution", type=blockskip.POSITIVE, help="Pixels; default: 512 for FLUX, 1024 for SANA.")
    parser.add_argument("--max_sequence_length", type=blockskip.POSITIVE, help="Text tokens; default: the model's.")
    parser.add_argument("--seed", type=blockskip.SEED, default=0, help="Of the noise.")
    parser.add_argument("--device", choices=["cpu"], help="Default: the first accelerator there is.")
    parser.add_argument("--dtype", choices=PRECISIONS, help="Default: bf16, and fp32 on a CPU.")
    parser.add_argument(
        "--offload", action="store_true", help="Let the weights pass through the device block by block."
    )
    parser.add_argument("--output", type=Path, default=Path("block_curves.json"), help="JSON file of the curves.")
    parser.add_argument("--picture", type=Path, help="PNG file; default: beside the curves.")
    parser.add_argument("--curves", type=Path, help="Measure nothing: draw and choose from this file.")
    args = parser.parse_args(input_args)
    if problem := next(problems(args), None):
        parser.error(problem)
    return args


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield one plain sentence for each contradiction among the flags."""
    prompts, loras, folders = (args.prompt or [], args.lora or [], args.instance_data_dir or [])
    if args.curves:
        if prompts or loras or folders:
            yield "--curves measures nothing: leave out --prompt, --lora and --instance_data_dir"
        return
    if not prompts:
        yield "--prompt is missing: name the subject, for example --prompt 'a photo of sks cat'"
    if len(loras) > 1 and len(loras) != len(prompts):
        yield f"{len(loras)} times --lora need as many --prompt, one for each, and there are {len(prompts)}"
    if args.metric == "prediction" and len(folders) not in (1, len(prompts)):
        yield f"--metric prediction needs --instance_data_dir once, or once for each of {len(prompts)} --prompt"
    if args.metric == "prediction" and (args.num_images != 1 or args.num_inference_steps):
        yield "--num_images and --num_inference_steps have no effect on --metric prediction: leave them out"
    if args.metric == "image" and folders:
        yield "--instance_data_dir has no effect on --metric image: leave it out"


# ---------------------------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is drawn or looked at together: a prompt, the LoRA that learnt it, and photos."""

    prompt: str
    adapter: str | None
    photos: tuple[blockskip.Photo, ...]


def open_model(args: argparse.Namespace) -> blockskip.Run:
    """The model that is probed, as the training scripts see one: no weights are loaded yet."""
    name = args.pretrained_model_name_or_path
    family = family_of(name)
    flags = {"--pretrained_model_name_or_path": name, "--resolution": args.resolution, "--seed": args.seed}
    flags |= {"--max_sequence_length": args.max_sequence_length, "--output_dir": args.output.parent}
    words = [str(word) for flag, value in flags.items() if value is not None for word in (flag, value)]
    training = family.parse_args(words + (["--offload"] if args.offload else []))
    for problem in (*family.flag_problems(training, training), *size_problems(training, family)):
        refuse(problem)
    training.patch_resolution = min(family.patch_resolution, training.resolution)
    structure = blockskip.transformer_structure(training, family)
    folder = blockskip.fetch_model(training, family)
    blockskip.check_shapes(family, folder, structure.config)
    accelerator = Accelerator(mixed_precision=precision(args), cpu=args.device == "cpu")
    dtype = blockskip.DTYPES[accelerator.mixed_precision]
    return blockskip.Run(
        args=training,
        family=family,
        accelerator=accelerator,
        report=blockskip.RunReport(accelerator),
        model_folder=folder,
        model_digest=blockskip.weights_digest(folder),
        transformer_config=structure.config,
        plan=blockskip.make_plan(training, family, structure, 1, args.seed, 1, dtype),
        photos=[],
        class_photos=[],
        scheduler=family.load_scheduler(folder, training),
        checkpoint=None,
        quantization=None,
    )


def family_of(name: str) -> blockskip.ModelFamily:
    """Which of the models a pipeline holds, from its configuration; refuses any other."""
    try:
        kind = DiffusionPipeline.load_config(name)["_class_name"]
    except (OSError, ValueError) as problem:
        refuse(f"--pretrained_model_name_or_path {name} is no pipeline: {str(problem).splitlines()[0]}")
    if kind not in FAMILIES:
        refuse(f"--pretrained_model_name_or_path {name} is a {kind}, and must be one of {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def structure_of(name: str) -> nn.Module:
    """The transformer of a pipeline on the meta device."""
    where = argparse.Namespace(pretrained_model_name_or_path=name, revision=None, cache_dir=None)
    return blockskip.transformer_structure(where, family_of(name))


def size_problems(training: argparse.Namespace, family: blockskip.ModelFamily) -> Iterator[str]:
    """Yield a sentence if the resolution is none that the model takes."""
    multiple = family.layout.pixels_per_token
    if training.resolution % multiple:
        yield f"--resolution {training.resolution} is not a multiple of {multiple} pixels"


def precision(args: argparse.Namespace) -> str:
    """Accelerate's name for the precision of the frozen weights."""
    on_cpu = args.device == "cpu" or not (torch.cuda.is_available() or torch.backends.mps.is_available())
    return PRECISIONS[args.dtype or ("fp32" if on_cpu else "bf16")]


def find_subjects(args: argparse.Namespace) -> list[Subject]:
    """One subject for each prompt, with its LoRA and photos."""
    loras, folders = args.lora or [None], args.instance_data_dir or [None]
    for lora in args.lora or []:
        if not Path(lora).exists() and lora.count("/") != 1:  # with one it may be on the hub
            refuse(f"--lora {lora} does not exist: give a folder, a .safetensors file or a hub id")
    subjects = []
    for number, prompt in enumerate(args.prompt):
        lora, folder = loras[min(number, len(loras) - 1)], folders[min(number, len(folders) - 1)]
        photos = ()
        if folder:
            given = argparse.Namespace(
                dataset_name=None, instance_data_dir=folder, instance_prompt=prompt, caption_column=None
            )
            photos = tuple(blockskip.load_photos(given))
        subjects.append(Subject(prompt, adapter_name(loras.index(lora)) if lora else None, photos))
    return subjects


def adapter_name(number: int) -> str:
    """What a LoRA is called within the model."""
    return f"subject{number}"


def load_loras(args: argparse.Namespace, pipeline: DiffusionPipeline) -> None:
    """Load each LoRA once, under its own name."""
    for number, lora in enumerate(args.lora or []):
        try:
            load_lora(pipeline, lora, adapter_name(number))
        except (OSError, ValueError) as problem:
            refuse(f"--lora {lora} cannot be loaded: {str(problem).splitlines()[0]}")


# ---------------------------------------------------------------------------------------------------------------------
# What is measured: functions that run the model once and return what is compared
# ---------------------------------------------------------------------------------------------------------------------


def prediction_samples(
    run: blockskip.Run, transformer: nn.Module, subjects: list[Subject], prompts: Mapping
) -> dict[str, Callable[[], torch.Tensor]]:
    """Velocities of the model for noisy latents of each subject's photos."""
    samples = {}
    for number, subject in enumerate(subjects):
        for draw, noisy in blockskip.probe_latents(dataclasses.replace(run, photos=list(subject.photos))):

            def take(subject=subject, draw=draw, noisy=noisy) -> torch.Tensor:
                use_lora(transformer, subject)
                return blockskip.probe_pass(run, transformer, noisy, draw.timestep, prompts[draw.prompt])

            samples[f"{number}/{draw.name}"] = take
    return samples


def image_samples(
    args: argparse.Namespace,
    run: blockskip.Run,
    pipeline: DiffusionPipeline,
    subjects: list[Subject],
    prompts: Mapping,
) -> dict[str, Callable[[], torch.Tensor]]:
    """Embeddings of images that the model draws of each subject, always from the same noise."""
    embed = Embedder(args.embedding_model, run.accelerator.device)
    options = {"num_inference_steps": args.num_inference_steps} if args.num_inference_steps else {}
    pipeline.set_progress_bar_config(disable=True)

    def take(subject: Subject, number: int) -> torch.Tensor:
        use_lora(pipeline.transformer, subject)
        generator = blockskip.keyed_generator(args.seed, "probe", number)
        with torch.no_grad():
            (image,) = run.family.generate_images(run, pipeline, prompts, subject.prompt, [generator], **options)
        return embed(image)

    return {
        f"{index}/image-{number:03d}": functools.partial(take, subject, number)
        for index, subject in enumerate(subjects)
        for number in range(args.num_images)
    }


def use_lora(transformer: nn.Module, subject: Subject) -> None:
    """Let the subject's LoRA act, and no other."""
    if subject.adapter:
        transformer.set_adapters([subject.adapter])


# ---------------------------------------------------------------------------------------------------------------------
# The measurement
# ---------------------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> blockskip.BlockCurves:
    """Measure the curves, or what is missing of them, and write them to `--output`."""
    run, subjects = open_model(args), find_subjects(args)
    wanted, unfinished = description(args, run, subjects), args.output.with_suffix(".unfinished.json")
    if args.output.exists():
        return finished_curves(args.output, wanted)
    known = read_unfinished(unfinished, wanted)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    prompts = blockskip.encode_each(run, [*args.prompt, *run.family.extra_prompts])
    transformer = blockskip.load_transformer(run, run.weight_dtype)
    vae = blockskip.load_vae(run) if args.metric == "image" else None
    pipeline = blockskip.image_pipeline(run, transformer, vae)
    load_loras(args, pipeline)
    if args.metric == "image":
        samples = image_samples(args, run, pipeline, subjects, prompts)
        blockskip.place(run, vae)
    else:
        samples = prediction_samples(run, transformer, subjects, prompts)
    blockskip.place(run, transformer)
    with kept_on_disk(unfinished, wanted, known) as keep:
        try:
            distances = blockskip.measure_distances(transformer, samples, known=known, on_distance=keep)
        except FloatingPointError as problem:
            refuse(f"{problem}: try --dtype fp32")
    curves = blockskip.make_curves(run.plan.depth, args.metric, distances.values(), wanted)
    curves.save(args.output)
    unfinished.unlink()
    return curves


def description(args: argparse.Namespace, run: blockskip.Run, subjects: list[Subject]) -> dict[str, Any]:
    """All that the measurement depends on: for readers, and to tell whether an unfinished one is the same."""
    of_image = {
        "embedding model": args.embedding_model,
        "images of a prompt": args.num_images,
        "inference steps": args.num_inference_steps,
    }
    return {
        "model": args.pretrained_model_name_or_path,
        "weights": run.model_digest,
        "LoRAs": [[lora, lora_digest(lora)] for lora in args.lora or []],
        "prompts": args.prompt,
        "photos": [blockskip.photos_digest(list(subject.photos)) for subject in subjects if subject.photos],
        "metric": args.metric,
        "resolution": [run.args.resolution, run.args.patch_resolution],
        "text tokens": run.args.max_sequence_length,
        "seed": args.seed,
        "precision": run.accelerator.mixed_precision,
        **(of_image if args.metric == "image" else {}),
    }


def lora_digest(lora: str) -> str | None:
    """Tells whether the files of a LoRA are the same; None for one on the hub."""
    files = lora_files(lora)
    return files_digest(files) if files else None


def finished_curves(output: Path, wanted: Mapping[str, Any]) -> blockskip.BlockCurves:
    """The curves that are there already; refuses those of another measurement."""
    curves = read_curves(output, "--output")
    if curves.measured_on != wanted:
        refuse(f"--output {output} holds the curves of another measurement: delete it or name another file")
    print(f"{output} holds this measurement already")
    return curves


def read_curves(file: Path, flag: str) -> blockskip.BlockCurves:
    """Curves from a file; refuses one that holds none."""
    try:
        return blockskip.BlockCurves.load(file)
    except ValueError as problem:
        refuse(f"{flag} {file} {problem}")


def read_unfinished(file: Path, wanted: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The distances that an interrupted measurement of the same has left."""
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text())
        if content["measured_on"] == wanted:
            return dict(content["distances"])
    except (ValueError, KeyError, TypeError):
        pass
    refuse(f"{file} holds an unfinished measurement of something else: delete it or name another --output")


@contextlib.contextmanager
def kept_on_disk(
    file: Path, wanted: Mapping[str, Any], known: Mapping[str, Mapping[str, float]]
) -> Iterator[Callable[[str, str, float], None]]:
    """Give a function that keeps distances in a file: every few seconds, and whatever happens at the end."""
    distances = {name: dict(of_sample) for name, of_sample in known.items()}
    written = time.monotonic()

    def write() -> None:
        text = json.dumps({"measured_on": wanted, "distances": distances})
        blockskip.write_atomically(file, lambda partial: partial.write_text(text))

    def keep(sample: str, mask: str, distance: float) -> None:
        nonlocal written
        distances.setdefault(sample, {})[mask] = distance
        if time.monotonic() - written > 5:
            write()
            written = time.monotonic()

    try:
        yield keep
    finally:
        write()


# ---------------------------------------------------------------------------------------------------------------------
# The picture
# ---------------------------------------------------------------------------------------------------------------------

INK, BLUE, RED, GREEN = "#222222", "#1f5fa8", "#c0392b", "#2e8b57"
PAIR_COLOURS = ("#2e8b57", "#d68910", "#8e44ad")


class Panel:
    """A rectangle of the picture with axes; data from (0, 0) to (width, height) fill it."""

    def __init__(self, draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int], width: float, height: float) -> None:
        self.draw, self.box, self.width, self.height = draw, box, width or 1, height or 1
        self.font = ImageFont.load_default()

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The pixel of a point of the data."""
        left, top, right, bottom = self.box
        return left + x / self.width * (right - left), bottom - y / self.height * (bottom - top)

    def text(self, x: float, y: float, words: str, colour: str = INK, anchor: str = "lt") -> None:
        """Write words, at a pixel."""
        self.draw.text((x, y), words, fill=colour, font=self.font, anchor=anchor)

    def axes(self, title: str, x_label: str, digits: int = 3) -> None:
        """Draw frame, ticks, and what they mean."""
        left, top, right, bottom = self.box
        self.draw.rectangle(self.box, outline=INK)
        self.text(left, top - 22, title)
        self.text((left + right) / 2, bottom + 22, x_label, anchor="mt")
        for x in range(0, int(self.width) + 1, -(-int(self.width) // 4)):
            self.draw.line([self.at(x, 0), (self.at(x, 0)[0], bottom + 4)], fill=INK)
            self.text(self.at(x, 0)[0], bottom + 6, f"{x}", anchor="mt")
        for part in range(5):
            y = self.height * part / 4
            self.draw.line([(left - 4, self.at(0, y)[1]), self.at(0, y)], fill=INK)
            self.text(left - 7, self.at(0, y)[1], f"{y:.{digits}f}", anchor="rm")

    def line(self, values: tuple[float, ...], colour: str) -> None:
        """Join the points (i, values[i])."""
        points = [self.at(x, y) for x, y in enumerate(values)]
        self.draw.line(points, fill=colour, width=2) if len(points) > 1 else None
        for point in points if len(points) < 30 else []:
            self.dot(point, colour, 2)

    def dot(self, pixel: tuple[float, float], colour: str, radius: float = 5) -> None:
        """Draw a dot at a pixel."""
        x, y = pixel
        self.draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour, outline="white")


def draw_picture(curves: blockskip.BlockCurves, pairs: Mapping[float, tuple[int, int]]) -> Image.Image:
    """The two curves with the chosen pairs, the sliding window, and the sum of the curves over (n, m)."""
    image = Image.new("RGB", (1560, 520), "white")
    draw = ImageDraw.Draw(image)
    draw_curves(Panel(draw, (70, 60, 520, 440), curves.depth - 1, max(curves.first + curves.last)), curves, pairs)
    if curves.window:
        panel = Panel(draw, (600, 60, 990, 440), len(curves.window) - 1, max(curves.window))
        panel.axes(f"{curves.window_size} blocks masked: a sliding window", "first block of the window")
        panel.line(curves.window, GREEN)
    draw_heat_map(Panel(draw, (1070, 60, 1450, 440), curves.depth, curves.depth), curves, pairs)
    return image


def draw_curves(panel: Panel, curves: blockskip.BlockCurves, pairs: Mapping[float, tuple[int, int]]) -> None:
    """The distance over the number of masked blocks at either end."""
    panel.axes(f"1 - cosine ({curves.metric}), mean of {curves.samples}", "blocks masked")
    panel.line(curves.first, BLUE)
    panel.line(curves.last, RED)
    left, _, _, bottom = panel.box
    panel.text(left, bottom + 44, "the first n", BLUE)
    panel.text(left + 80, bottom + 44, "the last m", RED)
    for column, ((ratio, (first, last)), colour) in enumerate(zip(pairs.items(), PAIR_COLOURS, strict=True)):
        panel.text(left + 160 * column, bottom + 62, f"{ratio:.0%}: n = {first}, m = {last}", colour)
        panel.dot(panel.at(first, curves.first[first]), colour)
        panel.dot(panel.at(last, curves.last[last]), colour)


def draw_heat_map(panel: Panel, curves: blockskip.BlockCurves, pairs: Mapping[float, tuple[int, int]]) -> None:
    """The sum of both curves for every pair that leaves a block to train; the darker, the more it changes."""
    sums = {(n, m): curves.first[n] + curves.last[m] for n in range(curves.depth) for m in range(curves.depth - n)}
    highest = max(sums.values()) or 1
    for (n, m), value in sums.items():
        (left, bottom), (right, top) = panel.at(n, m), panel.at(n + 1, m + 1)
        panel.draw.rectangle((left, top, right, bottom), fill=shade(value / highest))
    for (first, last), colour in zip(pairs.values(), PAIR_COLOURS, strict=True):
        count = first + last
        panel.draw.line([panel.at(0.5, count + 0.5), panel.at(count + 0.5, 0.5)], fill=colour)
        panel.dot(panel.at(first + 0.5, last + 0.5), colour)
    panel.axes("sum of both, over n (right) and m (up)", "first n", digits=0)
    _, top, right, bottom = panel.box
    for y in range(top, bottom + 1):  # the scale
        panel.draw.line([(right + 20, y), (right + 34, y)], fill=shade((bottom - y) / (bottom - top)))
    panel.text(right + 38, top, f"{highest:.2f}")
    panel.text(right + 38, bottom, "0", anchor="lb")


def shade(share: float) -> tuple[int, int, int]:
    """A colour from near white to dark blue for a share from 0 to 1."""
    return tuple(
        round(light + share * (dark - light)) for light, dark in zip((244, 248, 252), (8, 48, 107), strict=True)
    )


def choose_pairs(args: argparse.Namespace, curves: blockskip.BlockCurves) -> dict[float, tuple[int, int]]:
    """The pair of skip counts for each of the paper's ratios, as `--skip_ratio` takes it."""
    parameters = blockskip.block_parameters(structure_of(args.pretrained_model_name_or_path))
    if len(parameters) != curves.depth:
        refuse(f"--curves {args.curves} are of {curves.depth} blocks, and this model has {len(parameters)}")
    counts = {ratio: min(blockskip.skip_count(ratio, curves.depth), curves.depth - 1) for ratio in RATIOS}
    return {ratio: blockskip.choose_skip_counts(curves, count, parameters) for ratio, count in counts.items()}


def main(args: argparse.Namespace) -> None:
    """Measure or read the curves, draw them, and print what they choose."""
    # diffusers 0.35, still supported, knows `torch_dtype` only; newer ones warn of it
    warnings.filterwarnings("ignore", message=".*`torch_dtype` is deprecated", category=FutureWarning)
    curves = read_curves(args.curves, "--curves") if args.curves else measure(args)
    pairs = choose_pairs(args, curves)
    picture = args.picture or (args.curves or args.output).with_suffix(".png")
    draw_picture(curves, pairs).save(picture)
    for ratio, (first, last) in pairs.items():
        moved = curves.first[first] + curves.last[last]
        print(f"{ratio:.0%} of {curves.depth} blocks: --skip_first {first} --skip_last {last}  (moves {moved:.4f})")
    print(f"curves:  {args.curves or args.output}\npicture: {picture}")


if __name__ == "__main__":
    main(parse_args())
