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
"""DINO, CLIP-I and CLIP-T of generated pictures, for a benchmark's subjects or one's own.

    python examples/evaluate.py --data_dir dreambooth/dataset --output evaluation \
        --pretrained_model_name_or_path black-forest-labs/FLUX.1-dev --lora_root loras --num_images 4

draws 4 pictures for each prompt of each subject, with the LoRA in `loras/SUBJECT`, and scores them. Pictures that are
there already, in `--pictures`, are scored without the last line. Their names say what they are, as generate.py names
them: `SUBJECT/prompt3-seed0.png` is of the fourth prompt. subject_folders.py says where photos and prompts may lie.

DINO and CLIP-I are the mean cosine similarity of the embeddings of a generated picture and of each photo of its
subject, CLIP-T that of a picture and its prompt. The prompt is read without the unique token, which the text encoder
has never met. In `--output`, `scores.csv` has a line for each picture; `summary.json` has the means of each subject,
and their mean and standard deviation over subjects. An interrupted evaluation goes on with the same command.

In order: the command line, what is compared, drawing, scoring, the summary.
"""

import argparse
import csv
import dataclasses
import functools
import hashlib
import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from diffusers.training_utils import free_memory
from torch import nn
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import blockskip_utils as blockskip
from blockskip_utils import refuse
from embeddings import Embedder, check_embedder
from generate import (
    add_drawing_arguments,
    default_device,
    draw,
    dtype_name,
    files_digest,
    load_lora,
    load_pipeline,
    lora_files,
    picture_name,
)
from select_blocks import family_of, structure_of
from subject_folders import Subject, find_subjects, note_passed_over

METRICS = {"dino": "DINO", "clip_i": "CLIP-I", "clip_t": "CLIP-T"}
MODEL_OF = {"dino": "dino_model", "clip_i": "clip_model", "clip_t": "clip_model"}
DEFAULT_MODELS = {"dino_model": "facebook/dino-vits16", "clip_model": "openai/clip-vit-base-patch32"}
COLUMNS = ("subject", "prompt", "seed", *METRICS, "text", *DEFAULT_MODELS, "sources")
KINDS = {"prompt": int, "seed": int, **dict.fromkeys(METRICS, float)}
SETTINGS_FILE, SCORES_FILE, SUMMARY_FILE = "settings.json", "scores.csv", "summary.json"

Row = dict[str, Any]  # of the CSV file; a metric that has not been measured is missing


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


def parse_args(input_args: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `input_args`; a mistake ends the program with one line."""
    parser = blockskip.OneLineParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data_dir", type=Path, required=True, help="A benchmark, or photos; see subject_folders.py.")
    parser.add_argument("--prompts", type=Path, help="One in each line, with {}; default: those of --data_dir.")
    parser.add_argument("--class_word", help="What a plain layout's subjects are, such as cat; default: its name.")
    parser.add_argument("--subjects", nargs="+", help="Only these.")
    parser.add_argument("--metrics", nargs="+", choices=METRICS, default=list(METRICS), help="Default: all.")
    of_model = "Of transformers, a folder or hub id; default: {}."
    parser.add_argument("--dino_model", help=of_model.format(DEFAULT_MODELS["dino_model"]))
    parser.add_argument("--clip_model", help=of_model.format(DEFAULT_MODELS["clip_model"]))
    parser.add_argument("--batch_size", type=blockskip.POSITIVE, default=16, help="Pictures embedded at once.")
    parser.add_argument("--pictures", type=Path, help="Folder of generated pictures; default: OUTPUT/pictures.")
    parser.add_argument("--output", type=Path, default=Path("evaluation"), help="Folder of the scores.")
    parser.add_argument("--device", help="Default: the first GPU, else the CPU.")
    group = parser.add_argument_group("drawing the pictures that are missing")
    group.add_argument("--pretrained_model_name_or_path", help="Folder or hub id of the pipeline; draws.")
    of_drawing = [
        group.add_argument("--lora_root", type=Path, help="Has a folder or .safetensors file for each subject."),
        group.add_argument(
            "--unique_token", help="Before the class in prompts to draw; default: sks, or the benchmark's."
        ),
        group.add_argument("--draw_batch_size", type=blockskip.POSITIVE, default=1, help="Pictures drawn at once."),
        *add_drawing_arguments(group),
    ]
    args = parser.parse_args(input_args)
    if problem := next(problems(args, of_drawing), None):
        parser.error(problem)
    for name, default in DEFAULT_MODELS.items():
        setattr(args, name, getattr(args, name) or default)
    args.pictures = args.pictures or args.output / "pictures"
    return args


def problems(args: argparse.Namespace, of_drawing: Sequence[argparse.Action]) -> Iterator[str]:
    """Yield one plain sentence for each contradiction among the flags."""
    if args.pretrained_model_name_or_path and not args.lora_root:
        yield "--lora_root is missing: name the folder of the subjects' LoRAs (--lora_scale 0 draws without them)"
    if not args.pretrained_model_name_or_path:
        for action in of_drawing:
            if getattr(args, action.dest) != action.default:
                yield f"{action.option_strings[0]} draws nothing without --pretrained_model_name_or_path"
    if args.num_images < 1 or args.seed < 0:
        yield f"--num_images {args.num_images} and --seed {args.seed} must be at least 1 and 0"
    for name in DEFAULT_MODELS:
        if getattr(args, name) and name not in {MODEL_OF[metric] for metric in args.metrics}:
            yield f"--{name} has no effect on --metrics {' '.join(args.metrics)}: leave it out"


# ---------------------------------------------------------------------------------------------------------------------
# What is compared
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Picture:
    """A generated picture, of a prompt by its number from 0."""

    number: int
    seed: int
    image: blockskip.Photo


def find_pictures(args: argparse.Namespace, subject: Subject) -> list[Picture]:
    """The pictures of a subject by prompt and seed; refuses what is unreadable or of a prompt that is not there."""
    folder = args.pictures / subject.name
    images = blockskip.read_photos(str(folder), "--pictures", "") if folder.exists() else []
    matches = {image.name: re.fullmatch(r"prompt(\d+)-seed(\d+)\.\w+", image.name) for image in images}
    pictures = [Picture(int(m[1]), int(m[2]), image) for image in images if (m := matches[image.name])]
    others = [name for name, match in matches.items() if not match]
    note_passed_over(folder, others, f"pictures are named like {picture_name(0, 0)}")
    for picture in pictures:
        if picture.number >= len(subject.prompts):
            refuse(
                f"{folder / picture.image.name}: the last of {len(subject.prompts)} prompts has the number "
                f"{len(subject.prompts) - 1}: name the prompts that the pictures are of, or move it away"
            )
    if len({(picture.number, picture.seed) for picture in pictures}) < len(pictures):
        refuse(f"--pictures {folder} holds two pictures of one prompt and seed: move one away")
    return sorted(pictures, key=lambda picture: (picture.number, picture.seed))


def find_all_pictures(args: argparse.Namespace, subjects: list[Subject]) -> dict[str, list[Picture]]:
    """The pictures of each subject; where none will be drawn, a subject without any is refused, and gaps are named."""
    pictures = {}
    for subject in subjects:
        pictures[subject.name] = find_pictures(args, subject)
        if not (pictures[subject.name] or args.pretrained_model_name_or_path):
            refuse(
                f"--pictures {args.pictures / subject.name} holds no picture named like {picture_name(0, 0)}: put "
                "some there, or have them drawn with --pretrained_model_name_or_path and --lora_root"
            )
        missing = set(range(len(subject.prompts))) - {picture.number for picture in pictures[subject.name]}
        if missing and not args.pretrained_model_name_or_path:
            print(f"{subject.name}: no picture of {len(missing)} of {len(subject.prompts)} prompts")
    return pictures


def check_models(args: argparse.Namespace, subjects: list[Subject]) -> dict[str, str]:
    """What the vision models are, by flag: name and digest or commit; refuses one that cannot serve."""
    prompts = [prompt.plain for subject in subjects for prompt in subject.prompts]
    models = {}
    for name in dict.fromkeys(MODEL_OF[metric] for metric in args.metrics):
        model = getattr(args, name)
        texts = prompts if name == "clip_model" and "clip_t" in args.metrics else []
        version = check_embedder(model, f"--{name}", texts)
        if Path(model).is_dir():
            files = [path for pattern in ("*.json", "*.safetensors", "*.bin") for path in Path(model).glob(pattern)]
            version = short(files_digest(sorted(files)))
        models[name] = f"{model} {version}"
    return models


def short(digest: str) -> str:
    """Enough of a digest to tell files apart."""
    return digest[:16]


# ---------------------------------------------------------------------------------------------------------------------
# Drawing
# ---------------------------------------------------------------------------------------------------------------------


def check_drawing(args: argparse.Namespace, subjects: list[Subject]) -> dict[str, Path]:
    """The LoRA of each subject; refuses one of another model, and a size that the pipeline would change."""
    name = args.pretrained_model_name_or_path
    multiple = family_of(name).layout.pixels_per_token
    for side in ("height", "width"):
        if getattr(args, side) < 1 or getattr(args, side) % multiple:
            refuse(f"--{side} {getattr(args, side)} is not a multiple of {multiple} pixels")
    if not args.lora_root.exists():
        refuse(f"--lora_root {args.lora_root} does not exist")
    loras = {subject.name: find_lora(args.lora_root, subject.name, len(subjects) == 1) for subject in subjects}
    structure = structure_of(name)
    for lora in loras.values():
        check_lora(lora, structure)
    return loras


def find_lora(root: Path, subject: str, is_only: bool) -> Path:
    """`ROOT/SUBJECT/`, `ROOT/SUBJECT.safetensors`, or ROOT itself for a single subject; refuses if none has a LoRA."""
    places = [root / subject, root / f"{subject}.safetensors", *([root] if is_only else [])]
    found = [place for place in places if lora_files(place)]
    if not found:
        refuse(
            f"--lora_root {root} has no LoRA of {subject}: put {blockskip.LORA_FILE} into {root / subject}, or leave "
            "the subject out with --subjects"
        )
    return found[0]


def check_lora(lora: Path, structure: nn.Module) -> None:
    """Refuse a LoRA of layers that the transformer has not: diffusers would load the others and go on.

    Files in other layouts than diffusers' own, which it converts as it loads them, are not looked at.
    """
    modules = dict(structure.named_modules())
    for file in lora_files(lora):
        try:
            with safetensors.safe_open(file, framework="pt") as tensors:
                shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError) as problem:
            refuse(f"--lora_root: {file} cannot be read: {problem}")
        for name, shape in shapes.items():
            if match := re.fullmatch(r"transformer\.(.+)\.lora_(A|B)\.weight", name):
                weight = getattr(modules.get(match[1]), "weight", None)
                axis = 1 if match[2] == "A" else 0  # A reads what the layer reads, B returns what it returns
                if weight is None or weight.shape[axis] != shape[axis]:
                    refuse(f"--lora_root: {file} is of another model: its {match[1]} does not fit")


def settings_of(args: argparse.Namespace, subject: Subject, model: str | None, lora: Path | None) -> dict[str, Any]:
    """All that a subject's pictures depend on besides the seed; where none are drawn, what their scores depend on."""
    scored = {"prompts without the token": [prompt.plain for prompt in subject.prompts]}
    if lora is None:
        return scored
    flags = ("lora_scale", "height", "width", "num_inference_steps", "guidance_scale")
    flags += ("true_cfg_scale", "max_sequence_length")
    return {
        "model": model,
        "LoRA": short(files_digest(lora_files(lora))),
        "prompts": [prompt.drawn for prompt in subject.prompts],
        **scored,
        **{name: getattr(args, name) for name in flags},
        "dtype": dtype_name(args),
    }


def check_settings(args: argparse.Namespace, folder: Path, settings: Mapping[str, Any], has_pictures: bool) -> None:
    """Refuse pictures that were drawn with other settings, and to draw beside those of unknown ones."""
    file = folder / SETTINGS_FILE
    if not has_pictures:
        return
    if not file.exists():
        if args.pretrained_model_name_or_path:
            refuse(
                f"--pictures {folder} holds pictures and no {SETTINGS_FILE} that says how they were drawn: name "
                "another folder, or score them without --pretrained_model_name_or_path"
            )
        return
    try:
        before = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as problem:
        refuse(f"{file} cannot be read ({problem}): restore it or name another folder with --pictures")
    for name, value in settings.items():
        if before.get(name) != value:
            change = "" if isinstance(value, list) else f": {before.get(name)} there, {value} now"
            refuse(
                f"--pictures {folder} holds pictures drawn with another setting of '{name}'{change}: repeat it, or "
                "name another folder"
            )


def draw_missing(
    args: argparse.Namespace,
    subjects: list[Subject],
    pictures: Mapping[str, list[Picture]],
    settings: Mapping[str, Mapping[str, Any]],
    loras: Mapping[str, Path],
) -> int:
    """Draw what is missing of `--num_images` for each prompt; returns how many pictures that were."""
    missing = {}
    for subject in subjects:
        there = {(picture.number, picture.seed) for picture in pictures[subject.name]}
        seeds = range(args.seed, args.seed + args.num_images)
        wanted = [(number, seed) for number in range(len(subject.prompts)) for seed in seeds]
        missing[subject.name] = [pair for pair in wanted if pair not in there]
    count = sum(map(len, missing.values()))
    if not count:
        return 0
    try:
        pipeline = load_pipeline(args)
    except (OSError, ValueError) as problem:
        name = args.pretrained_model_name_or_path
        refuse(f"--pretrained_model_name_or_path {name} cannot be loaded: {str(problem).splitlines()[0]}")
    pipeline.set_progress_bar_config(disable=True)
    with tqdm(total=count, desc="draw", unit="picture") as bar:
        for subject in subjects:
            if missing[subject.name]:
                use_lora(pipeline, loras[subject.name], args.lora_scale)
                write_settings(args.pictures / subject.name, settings[subject.name])
                for batch in batches(missing[subject.name], args.draw_batch_size):
                    draw_batch(args, pipeline, subject, batch)
                    bar.update(len(batch))
    return count


def use_lora(pipeline: Any, lora: Path, scale: float) -> None:
    """Let this LoRA act, and no earlier one."""
    pipeline.unload_lora_weights()
    try:
        load_lora(pipeline, str(lora), "subject")
        pipeline.set_adapters("subject", scale)
    except (OSError, ValueError, RuntimeError) as problem:
        refuse(f"--lora_root: {lora} cannot be loaded into this model: {str(problem).splitlines()[0]}")


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Keep beside a subject's pictures what they are drawn with."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    blockskip.write_atomically(folder / SETTINGS_FILE, lambda partial: partial.write_text(text, encoding="utf-8"))


def draw_batch(args: argparse.Namespace, pipeline: Any, subject: Subject, batch: Sequence[tuple[int, int]]) -> None:
    """Draw pictures of one subject together, each a (number of the prompt, seed), and write them to files."""
    prompts = [subject.prompts[number].drawn for number, _ in batch]
    images = draw(pipeline, args, prompts, [seed for _, seed in batch])
    for (number, seed), image in zip(batch, images, strict=True):
        path = args.pictures / subject.name / picture_name(number, seed)
        blockskip.write_atomically(path, functools.partial(image.save, format="PNG"))


def batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Split into parts of `size`; the last one may be smaller."""
    return (items[start : start + size] for start in range(0, len(items), size))


# ---------------------------------------------------------------------------------------------------------------------
# Scoring
# ---------------------------------------------------------------------------------------------------------------------


def score(
    args: argparse.Namespace, subjects: list[Subject], pictures: Mapping[str, list[Picture]], models: Mapping[str, str]
) -> list[Row]:
    """Measure what the CSV file lacks, and write it there after each subject; returns these subjects' rows."""
    known = {(row["subject"], row["prompt"], row["seed"]): row for row in read_rows(args.output / SCORES_FILE)}
    device = torch.device(args.device or default_device())

    @functools.cache  # a model is loaded when the first picture needs it
    def embedder(name: str) -> Embedder:
        with_texts = name == "clip_model" and "clip_t" in args.metrics
        return Embedder(getattr(args, name), device, flag=f"--{name}", with_texts=with_texts)

    scored = []
    for subject in tqdm(subjects, desc="score", unit="subject"):
        rows = []
        for picture in pictures[subject.name]:
            before = known.get((subject.name, picture.number, picture.seed))
            rows.append(row_of(subject, picture, models, before))
        for name in models:
            metrics = [metric for metric in args.metrics if MODEL_OF[metric] == name]
            pairs = zip(pictures[subject.name], rows, strict=True)
            pending = [pair for pair in pairs if any(metric not in pair[1] for metric in metrics)]
            if pending:
                measure(embedder(name), f"--{name} {getattr(args, name)}", subject, pending, metrics, args.batch_size)
        write_rows(args.output / SCORES_FILE, subject.name, rows)
        scored += rows
    return scored


def row_of(subject: Subject, picture: Picture, models: Mapping[str, str], before: Row | None) -> Row:
    """A picture's row with what of an earlier one still holds: of the same files and prompt, by the same models."""
    text = subject.prompts[picture.number].plain
    files = [picture.image.digest, sorted(photo.digest for photo in subject.photos)]
    sources = short(hashlib.sha256(json.dumps([files, text]).encode()).hexdigest())
    row = {"subject": subject.name, "prompt": picture.number, "seed": picture.seed, "text": text, "sources": sources}
    if before and before["sources"] == sources:
        for metric, name in MODEL_OF.items():
            if metric in before and models.get(name, before[name]) == before[name]:
                row |= {metric: before[metric], name: before[name]}
    return row | models


def measure(
    embed: Embedder,
    model: str,
    subject: Subject,
    pending: Sequence[tuple[Picture, Row]],
    metrics: Sequence[str],
    batch_size: int,
) -> None:
    """Fill in the metrics that rows lack, with one pass of the model for each picture."""

    def unit_vectors(vectors: torch.Tensor) -> torch.Tensor:
        if not vectors.isfinite().all():
            refuse(f"{model} returns numbers that are not finite: name another model")
        return nn.functional.normalize(vectors.double().cpu(), dim=-1)

    def of_images(images: Sequence[blockskip.Photo]) -> torch.Tensor:
        return torch.cat(
            [unit_vectors(embed([image.load() for image in batch])) for batch in batches(images, batch_size)]
        )

    photos = of_images(subject.photos) if set(metrics) - {"clip_t"} else None  # (photos, width)
    prompts = unit_vectors(embed.texts([prompt.plain for prompt in subject.prompts])) if "clip_t" in metrics else None
    vectors = of_images([picture.image for picture, _ in pending])
    for (picture, row), vector in zip(pending, vectors, strict=True):
        for metric in metrics:
            others = prompts[picture.number, None] if metric == "clip_t" else photos
            row.setdefault(metric, (others @ vector).mean().item())


def read_rows(file: Path) -> list[Row]:
    """The rows of the CSV file, none if it is not there; refuses a file that is none of this program's."""
    if not file.exists():
        return []
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise ValueError("its columns are not those of this program")
            return [
                {name: KINDS.get(name, str)(text) for name, text in row.items() if text or name not in METRICS}
                for row in reader
            ]
    except (OSError, ValueError, TypeError) as problem:
        refuse(f"{file} cannot be read ({problem}): restore it, move it away or name another --output")


def write_rows(file: Path, subject: str, rows: list[Row]) -> None:
    """Put a subject's rows in the place of its earlier ones; those of other subjects stay."""
    others = [row for row in read_rows(file) if row["subject"] != subject]
    ordered = sorted(others + rows, key=lambda row: (row["subject"], row["prompt"], row["seed"]))

    def write(partial: Path) -> None:
        with partial.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, COLUMNS)
            writer.writeheader()
            writer.writerows(ordered)

    blockskip.write_atomically(file, write)


# ---------------------------------------------------------------------------------------------------------------------
# The summary
# ---------------------------------------------------------------------------------------------------------------------


def summarise(rows: list[Row], metrics: Sequence[str], models: Mapping[str, str]) -> dict[str, Any]:
    """Means of each subject's pictures, and over subjects their mean and standard deviation (None for one subject)."""
    subjects = {}
    for name in dict.fromkeys(row["subject"] for row in rows):
        own = [row for row in rows if row["subject"] == name]
        means = {metric: statistics.fmean(row[metric] for row in own) for metric in metrics}
        subjects[name] = {"pictures": len(own), "prompts": len({row["prompt"] for row in own}), **means}
    columns = {metric: [subject[metric] for subject in subjects.values()] for metric in metrics}
    return {
        "models": dict(models),
        "subjects": subjects,
        "mean": {metric: statistics.fmean(values) for metric, values in columns.items()},
        "standard_deviation": {
            metric: statistics.stdev(values) if len(values) > 1 else None for metric, values in columns.items()
        },
    }


def table(summary: Mapping[str, Any]) -> str:
    """The summary for people."""
    subjects = summary["subjects"]
    lines = [("subject", "pictures", *(METRICS[metric] for metric in summary["mean"]))]
    for name, values in subjects.items():
        lines.append((name, str(values["pictures"]), *(f"{values[metric]:.4f}" for metric in summary["mean"])))
    lines.append((f"mean of {len(subjects)}", "", *(f"{value:.4f}" for value in summary["mean"].values())))
    if len(subjects) > 1:
        values = summary["standard_deviation"].values()
        lines.append(("standard deviation", "", *(f"{value:.4f}" for value in values)))
    width = max(len(line[0]) for line in lines)
    return "\n".join(f"{line[0]:{width}}" + "".join(f"{cell:>10}" for cell in line[1:]) for line in lines)


def main(args: argparse.Namespace) -> None:
    """Check everything, draw what is missing, score it, and print the summary."""
    draws = args.pretrained_model_name_or_path
    subjects = find_subjects(
        args.data_dir,
        prompts=args.prompts,
        class_word=args.class_word,
        unique_token=args.unique_token,
        only=args.subjects,
    )
    for folder in (args.output, args.pictures):
        if not blockskip.nearest_existing(folder.absolute()).is_dir():
            refuse(f"{folder} cannot be a folder: part of it is a file")
    models = check_models(args, subjects)
    loras = check_drawing(args, subjects) if draws else {}
    pictures = find_all_pictures(args, subjects)
    model = f"weights {short(blockskip.weights_digest(draws))}" if draws and Path(draws).is_dir() else draws
    settings = {subject.name: settings_of(args, subject, model, loras.get(subject.name)) for subject in subjects}
    for subject in subjects:
        check_settings(args, args.pictures / subject.name, settings[subject.name], bool(pictures[subject.name]))
        first = subject.prompts[0].drawn if draws else subject.prompts[0].plain
        print(f"{subject.name}: {len(subject.photos)} photos, {len(subject.prompts)} prompts, the first '{first}'")
    read_rows(args.output / SCORES_FILE)
    args.output.mkdir(parents=True, exist_ok=True)
    if draws and draw_missing(args, subjects, pictures, settings, loras):
        free_memory()
        pictures = find_all_pictures(args, subjects)
    rows = score(args, subjects, pictures, models)
    summary = summarise(rows, args.metrics, models)
    text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
    blockskip.write_atomically(args.output / SUMMARY_FILE, lambda file: file.write_text(text, encoding="utf-8"))
    print(f"{table(summary)}\nscores:  {args.output / SCORES_FILE}\nsummary: {args.output / SUMMARY_FILE}")


if __name__ == "__main__":
    main(parse_args())
