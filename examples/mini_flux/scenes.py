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
"""The world of the mini FLUX: drawn scenes with captions, a checker that reads pictures, and subjects never shown.

A scene is one figure on a background. Its caption names what is to be seen, each attribute with words of its own, so
that no word can mean two: "a large red ball on sand at the left". Half of what pretraining sees are such shapes of one
colour; the other half are things, figures put together at random from parts of several colours, no two alike: "a
small red and blue thing on snow at the top". From them the model knows how many ways there are for a thing to look.

    python examples/mini_flux/scenes.py subjects          # writes subjects/robot/robot_1.png and so on

In order: the scenes, drawing, captions, the checker, the subjects, the command line.
"""

import argparse
import dataclasses
import functools
import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageOps

RESOLUTION = 128  # pixels: 64 image tokens of a FLUX transformer; half of it, 16 tokens, is the patch resolution
_OVERSAMPLING = 4  # figures are drawn so many times larger, and scaled down, for smooth edges

COLOURS = {
    "red": (215, 40, 40),
    "orange": (245, 135, 20),
    "yellow": (250, 220, 40),
    "blue": (40, 75, 215),
    "purple": (130, 50, 170),
    "pink": (245, 110, 180),
}
DARK = (20, 20, 30)  # eyes, say
BACKGROUNDS = {  # paler or darker than any figure
    "snow": (238, 240, 245),
    "sand": (222, 200, 155),
    "grass": (165, 205, 145),
    "water": (150, 200, 235),
    "night": (35, 38, 62),
}
PLACES = {  # centre of the figure, from the upper left corner, in shares of the picture
    "centre": (0.5, 0.5),
    "left": (0.3125, 0.5),
    "right": (0.6875, 0.5),
    "top": (0.5, 0.3125),
    "bottom": (0.5, 0.6875),
}
SIZES = {"small": (0.28125, 0.34375), "large": (0.4375, 0.5)}  # side of the figure in shares of the picture
HELD_OUT = {("ring", "pink"), ("cross", "purple"), ("heart", "orange"), ("box", "yellow")}  # never in pretraining
FILLER_WORDS = ("a", "photo", "of", "on", "at", "the", "thing", "sks", "picture", "in", "with", "and")


@dataclasses.dataclass(frozen=True)
class Scene:
    """One figure on a background.

    Attributes:
        shape: A key of `SHAPES` or `FIGURES`, or "thing".
        colour: A key of `COLOURS`; a figure has colours of its own, and those of a thing are joined by "and".
        background: A key of `BACKGROUNDS`.
        place: The key of `PLACES` near which it stands.
        size: A key of `SIZES`.
        x, y: Its centre, in shares of the picture.
        side: Its side, in shares of the picture.
        look: The seed from which a thing is put together.
    """

    shape: str
    colour: str
    background: str
    place: str
    size: str
    x: float
    y: float
    side: float
    look: int = 0


def random_scene(rng: random.Random, *, held_out: bool = False) -> Scene:
    """A scene of pretraining; with `held_out` one of the combinations that pretraining never shows.

    Centres lie on a grid of 1/16 of the picture, a latent cell, so that figures look alike wherever they stand.
    """
    pairs = sorted(HELD_OUT) if held_out else _shown_pairs()
    shape, colour = rng.choice(pairs)
    place, size = rng.choice(list(PLACES)), rng.choice(list(SIZES))
    x, y = (centre + rng.choice((-1, 0, 1)) / 16 for centre in PLACES[place])
    return Scene(shape, colour, rng.choice(list(BACKGROUNDS)), place, size, x, y, rng.choice(SIZES[size]))


def random_thing(rng: random.Random) -> Scene:
    """A scene of pretraining with a thing that no other scene shows."""
    look = rng.getrandbits(32)
    return dataclasses.replace(random_scene(rng), shape="thing", colour=" and ".join(_thing_colours(look)), look=look)


def _thing_colours(look: int) -> list[str]:
    """Two or three colours, the first of which its largest part has."""
    rng = random.Random(f"{look}/colours")
    return rng.sample(list(COLOURS), rng.choice((2, 2, 3)))


@functools.cache
def _shown_pairs() -> list[tuple[str, str]]:
    return [(shape, colour) for shape in SHAPES for colour in COLOURS if (shape, colour) not in HELD_OUT]


# ---------------------------------------------------------------------------------------------------------------------
# Drawing
# ---------------------------------------------------------------------------------------------------------------------


def draw_scene(scene: Scene, resolution: int = RESOLUTION) -> Image.Image:
    """Draw a scene as a square picture of so many pixels."""
    picture = _empty(scene.background, resolution)
    side = round(scene.side * resolution)
    figure = _figure_of(scene, side)
    picture.paste(figure, (round(scene.x * resolution - side / 2), round(scene.y * resolution - side / 2)), figure)
    return picture


@functools.lru_cache(maxsize=64)
def _background(name: str, resolution: int) -> Image.Image:
    """A flat colour, a little lighter at the top than at the bottom."""
    light = np.linspace(6, -6, resolution)[:, None, None]
    pixels = np.broadcast_to(np.array(BACKGROUNDS[name]) + light, (resolution, resolution, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _empty(name: str, resolution: int) -> Image.Image:
    return _background(name, resolution).copy()


def _figure_of(scene: Scene, side: int) -> Image.Image:
    """What a scene shows, alone, RGBA, of so many pixels a side."""
    return _thing(scene.look, side) if scene.shape == "thing" else _figure(scene.shape, scene.colour, side)


@functools.lru_cache(maxsize=4096)
def _figure(shape: str, colour: str, side: int) -> Image.Image:
    """The figure alone, RGBA, of so many pixels a side."""
    large = side * _OVERSAMPLING
    if shape in FIGURES:
        return FIGURES[shape](large).resize((side, side), Image.Resampling.BOX)
    mask = silhouette(shape, large).resize((side, side), Image.Resampling.BOX)
    figure = Image.new("RGBA", (side, side), COLOURS[colour])
    figure.putalpha(mask)
    return figure


def _thing(look: int, side: int) -> Image.Image:
    """A thing alone, RGBA, of so many pixels a side: a large part with smaller ones on and around it."""
    rng, large = random.Random(look), side * _OVERSAMPLING
    figure = Image.new("RGBA", (large, large))
    draw = ImageDraw.Draw(figure)
    colours = [COLOURS[name] for name in _thing_colours(look)]
    for number in range(rng.randint(3, 7)):
        share = rng.uniform(0.5, 0.8) if number == 0 else rng.uniform(0.12, 0.5)
        near = 0.3 if number == 0 else 0.5
        width, height = (share * large * rng.uniform(0.5, 1) for _ in range(2))
        x, y = (large * (0.5 + rng.uniform(-near, near) * (1 - share)) for _ in range(2))
        colour = colours[number] if number < len(colours) else rng.choice([*colours, DARK])
        _part(draw, rng, (x - width / 2, y - height / 2, x + width / 2, y + height / 2), colour)
    if rng.random() < 0.6:
        figure.paste(ImageOps.mirror(figure.crop((0, 0, large // 2, large))), (large - large // 2, 0))
    figure = figure.crop(figure.getbbox())
    scale = side / max(figure.size)
    figure = figure.resize([max(1, round(length * scale)) for length in figure.size], Image.Resampling.BOX)
    whole = Image.new("RGBA", (side, side))
    whole.paste(figure, ((side - figure.width) // 2, (side - figure.height) // 2))
    return whole


def _part(
    draw: ImageDraw.ImageDraw, rng: random.Random, box: tuple[float, float, float, float], colour: tuple[int, int, int]
) -> None:
    """A disc, a bar, a polygon or a few bands that fill a box."""
    left, top, right, bottom = box
    kind = rng.choice(("disc", "bar", "polygon", "bands"))
    if kind == "disc":
        draw.ellipse(box, fill=colour)
    elif kind == "bar":
        draw.rectangle(box, fill=colour)
    elif kind == "polygon":
        angles = sorted(rng.uniform(0, 2 * math.pi) for _ in range(rng.randint(3, 6)))
        corners = [((1 + math.cos(angle)) / 2, (1 + math.sin(angle)) / 2) for angle in angles]  # on a circle
        draw.polygon([(left + x * (right - left), top + y * (bottom - top)) for x, y in corners], fill=colour)
    else:
        height = (bottom - top) / 5
        for band in (0, 2, 4):
            draw.rectangle((left, top + band * height, right, top + (band + 1) * height), fill=colour)


def silhouette(shape: str, side: int) -> Image.Image:
    """The white shape on black, filling a square of so many pixels."""
    mask = Image.new("L", (side, side))
    SHAPES[shape](ImageDraw.Draw(mask), side)
    return mask


def _ball(draw: ImageDraw.ImageDraw, side: int) -> None:
    draw.ellipse((0, 0, side - 1, side - 1), fill=255)


def _box(draw: ImageDraw.ImageDraw, side: int) -> None:
    draw.rectangle((0, 0, side, side), fill=255)


def _triangle(draw: ImageDraw.ImageDraw, side: int) -> None:
    draw.polygon([(side / 2, 0), (side, side), (0, side)], fill=255)


def _cross(draw: ImageDraw.ImageDraw, side: int) -> None:
    near, far = side * 0.34, side * 0.66
    draw.rectangle((near, 0, far, side), fill=255)
    draw.rectangle((0, near, side, far), fill=255)


def _ring(draw: ImageDraw.ImageDraw, side: int) -> None:
    _ball(draw, side)
    near, far = side * 0.27, side * 0.73
    draw.ellipse((near, near, far, far), fill=0)


def _heart(draw: ImageDraw.ImageDraw, side: int) -> None:
    angles = [2 * math.pi * step / 90 for step in range(90)]
    curve = [
        (16 * math.sin(a) ** 3, 13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a))
        for a in angles
    ]
    low, high = min(y for _, y in curve), max(y for _, y in curve)
    draw.polygon([((x + 16) / 32 * side, (high - y) / (high - low) * side) for x, y in curve], fill=255)


SHAPES: dict[str, Callable[[ImageDraw.ImageDraw, int], None]] = {
    "ball": _ball,
    "box": _box,
    "triangle": _triangle,
    "cross": _cross,
    "ring": _ring,
    "heart": _heart,
}


def doodle(rng: random.Random, resolution: int = RESOLUTION) -> Image.Image:
    """Overlapping polygons, discs and bars of any colour: what the autoencoder learns besides scenes.

    Without them it would know six silhouettes and no other, and could not show a new subject.
    """
    large = resolution * 2
    picture = _empty(rng.choice(list(BACKGROUNDS)), large)
    draw = ImageDraw.Draw(picture)
    for _ in range(rng.randint(2, 7)):
        colour = rng.choice(list(COLOURS.values())) if rng.random() < 0.5 else tuple(rng.choices(range(256), k=3))
        x, y, side = rng.uniform(0, large), rng.uniform(0, large), rng.uniform(0.04, 0.3) * large
        kind = rng.choice(("disc", "bar", "polygon", "dots"))
        if kind == "disc":
            draw.ellipse((x - side / 2, y - side / 2, x + side / 2, y + side * rng.uniform(0, 1)), fill=colour)
        elif kind == "bar":
            draw.rectangle((x, y, x + side, y + side * rng.uniform(0.1, 1)), fill=colour)
        elif kind == "polygon":
            corners = [(x + rng.uniform(-side, side), y + rng.uniform(-side, side)) for _ in range(rng.randint(3, 6))]
            draw.polygon(corners, fill=colour)
        else:
            for dx, dy in ((0, 0), (side, 0), (0, side), (side, side)):
                draw.ellipse((x + dx, y + dy, x + dx + side / 3, y + dy + side / 3), fill=colour)
    return picture.resize((resolution, resolution), Image.Resampling.BOX)


# ---------------------------------------------------------------------------------------------------------------------
# Captions
# ---------------------------------------------------------------------------------------------------------------------


def caption(scene: Scene, drop: frozenset[str] | set[str] = frozenset(), start: str = "a") -> str:
    """What is to be seen, without the attributes in `drop`; a shape that is dropped becomes "thing"."""
    words = [start]
    words += [getattr(scene, name) for name in ("size", "colour") if name not in drop]
    words += ["thing" if "shape" in drop else scene.shape]
    words += ["on", scene.background] if "background" not in drop else []
    words += ["at", "the", scene.place] if "place" not in drop else []
    return " ".join(words)


def random_caption(scene: Scene, rng: random.Random, drop: frozenset[str] | set[str] = frozenset()) -> str:
    """A caption as pretraining reads it: mostly complete, at times without some attributes, seldom empty."""
    if rng.random() < 0.05:
        return ""
    forgotten = set(drop)
    if rng.random() < 0.3:
        forgotten |= {name for name in ("size", "colour", "shape", "background", "place") if rng.random() < 0.35}
    return caption(scene, forgotten, start=rng.choice(("a", "a", "a", "a photo of a")))


def vocabulary() -> list[str]:
    """All words of the captions, and some that prompts of subjects need."""
    return sorted({*SHAPES, *COLOURS, *BACKGROUNDS, *PLACES, *SIZES, *FILLER_WORDS, *FIGURES})


# ---------------------------------------------------------------------------------------------------------------------
# The checker
# ---------------------------------------------------------------------------------------------------------------------

_TEMPLATE = 32  # pixels: side to which a figure is scaled before it is compared
_CONTRAST = 60  # a figure's pixels are so far from the background, of at most 442
_LEAST_MATCH = 0.8  # intersection over union below which a figure is none of the shapes


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the checker sees; None is something that it cannot name.

    Attributes:
        shape, colour, background, place, size: As in `Scene`.
        match: Intersection over union of the figure and the silhouette of the shape that is nearest to it.
    """

    shape: str | None
    colour: str | None
    background: str
    place: str | None
    size: str | None
    match: float


def read_picture(picture: Image.Image) -> Reading:
    """Read shape, colour, background, place and size off a picture of a scene."""
    pixels, ground, mask = _take_apart(picture)
    background = _nearest(ground, BACKGROUNDS)
    if (box := _box_around(mask)) is None:
        return Reading(None, None, background, None, None, 0.0)
    left, top, right, bottom = box
    shape, match = _nearest_shape(mask[top:bottom, left:right])
    sides = {name: (sum(side) / len(side),) for name, side in SIZES.items()}
    return Reading(
        shape=shape if match >= _LEAST_MATCH else None,
        colour=_nearest(np.median(pixels[_eroded(mask)], axis=0), COLOURS),
        background=background,
        place=_nearest(np.array([left + right, top + bottom]) / 2 / RESOLUTION, PLACES),
        size=_nearest(np.array([max(right - left, bottom - top) / RESOLUTION]), sides),
        match=match,
    )


def _take_apart(picture: Image.Image) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels (H, W, 3), the colour of the background (3,), and the mask (H, W) of the figure."""
    pixels = np.asarray(picture.convert("RGB").resize((RESOLUTION, RESOLUTION), Image.Resampling.BICUBIC), np.float32)
    border = np.concatenate([pixels[:4].reshape(-1, 3), pixels[-4:].reshape(-1, 3), pixels[:, :4].reshape(-1, 3)])
    ground = np.median(border, axis=0)
    return pixels, ground, _figure_mask(pixels, ground)


def _box_around(mask: np.ndarray) -> tuple[int, int, int, int] | None:
    """Left, top, right and bottom of the figure; None where there is nothing that could be one."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if mask.sum() < 100 or min(len(rows), len(columns)) < 8:
        return None
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _nearest(value: np.ndarray, choices: dict) -> str:
    return min(choices, key=lambda name: float(np.linalg.norm(value - np.array(choices[name]))))


def _figure_mask(pixels: np.ndarray, ground: np.ndarray) -> np.ndarray:
    """Pixels that are no background, without specks: (H, W), bool."""
    distance = np.linalg.norm(pixels - ground, axis=2)
    mask = Image.fromarray(((distance > _CONTRAST) * 255).astype(np.uint8))
    return np.asarray(mask.filter(ImageFilter.MedianFilter(5))) > 0


def _eroded(mask: np.ndarray) -> np.ndarray:
    inner = np.asarray(Image.fromarray(mask.astype(np.uint8) * 255).filter(ImageFilter.MinFilter(5))) > 0
    return inner if inner.any() else mask


@functools.cache
def _templates(side: int) -> dict[str, np.ndarray]:
    """Every shape as it comes out of the filter at a size in pixels: the tip of a triangle does not."""
    templates = {}
    for shape in SHAPES:
        drawn = Image.new("L", (side + 8, side + 8))
        drawn.paste(silhouette(shape, side), (4, 4))
        filtered = drawn.filter(ImageFilter.MedianFilter(5))
        templates[shape] = _scaled(np.asarray(filtered.crop(filtered.getbbox())) > 127)
    return templates


def _scaled(cut: np.ndarray) -> np.ndarray:
    figure = Image.fromarray(cut.astype(np.uint8) * 255)
    return np.asarray(figure.resize((_TEMPLATE, _TEMPLATE), Image.Resampling.BILINEAR)) > 127


def _nearest_shape(cut: np.ndarray) -> tuple[str, float]:
    """The shape whose silhouette overlaps most with a figure's own, both scaled to one square."""
    figure = _scaled(cut)
    overlap = {name: (figure & t).sum() / (figure | t).sum() for name, t in _templates(max(cut.shape)).items()}
    best = max(overlap, key=overlap.get)
    return best, float(overlap[best])


def figure_cut(picture: Image.Image) -> Image.Image | None:
    """The figure alone, cut out along its outline and scaled to a small square, RGBA; None where there is none."""
    pixels, _, mask = _take_apart(picture)
    if (box := _box_around(mask)) is None:
        return None
    figure = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    figure.putalpha(Image.fromarray(mask.astype(np.uint8) * 255))
    return figure.crop(box).resize((_TEMPLATE, _TEMPLATE), Image.Resampling.BILINEAR)


def likeness(cut: Image.Image | None, shape: str, colour: str = "") -> float:
    """How far a figure that was cut out is a certain one: 1 is the very same, 0 has nothing in common.

    Of all places that either covers, the mean agreement in colour, which is 0 where only one of them is.
    """
    if cut is None:
        return 0.0
    (seen, seen_mask), (known, known_mask) = (_colours_and_mask(figure) for figure in (cut, _known(shape, colour)))
    agreement = (1 - np.abs(seen - known).mean(axis=2) / 255) * (seen_mask & known_mask)
    return float(agreement.sum() / (seen_mask | known_mask).sum())


def recognise(cut: Image.Image | None) -> tuple[str, str] | None:
    """The figure, as shape and colour, that a cut is most like, of all that can be drawn; None where there is none."""
    if cut is None:
        return None
    return max(known_figures(), key=lambda figure: likeness(cut, *figure))


@functools.cache
def known_figures() -> list[tuple[str, str]]:
    """Each shape in each colour, and the figures that have colours of their own, which is written as ""."""
    return [(shape, colour) for shape in SHAPES for colour in COLOURS] + [(figure, "") for figure in FIGURES]


@functools.cache
def _known(shape: str, colour: str) -> Image.Image:
    """A figure as `figure_cut` sees it in a clean picture, on the background that it stands out from most."""
    scene = Scene(shape, colour, "snow", "centre", "large", 0.5, 0.5, SIZES["large"][1])
    return figure_cut(draw_scene(scene))


def _colours_and_mask(figure: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    array = np.asarray(figure, np.float32)
    return array[..., :3], array[..., 3] > 127


# ---------------------------------------------------------------------------------------------------------------------
# The subjects: what pretraining never shows
# ---------------------------------------------------------------------------------------------------------------------


def _robot(side: int) -> Image.Image:
    figure = Image.new("RGBA", (side, side))
    draw = ImageDraw.Draw(figure)
    draw.rectangle((0.46 * side, 0, 0.54 * side, 0.15 * side), fill=COLOURS["red"])
    draw.rectangle((0.2 * side, 0.12 * side, 0.8 * side, 0.5 * side), fill=COLOURS["orange"])
    draw.ellipse((0.28 * side, 0.2 * side, 0.46 * side, 0.38 * side), fill=DARK)
    draw.ellipse((0.54 * side, 0.2 * side, 0.72 * side, 0.38 * side), fill=DARK)
    draw.rectangle((0.08 * side, 0.52 * side, 0.92 * side, 0.8 * side), fill=COLOURS["blue"])
    draw.rectangle((0.2 * side, 0.8 * side, 0.4 * side, side), fill=COLOURS["orange"])
    draw.rectangle((0.6 * side, 0.8 * side, 0.8 * side, side), fill=COLOURS["orange"])
    return figure


def _fish(side: int) -> Image.Image:
    figure = Image.new("RGBA", (side, side))
    draw = ImageDraw.Draw(figure)
    draw.polygon([(0.62 * side, 0.5 * side), (side, 0.15 * side), (side, 0.85 * side)], fill=COLOURS["purple"])
    draw.ellipse((0, 0.27 * side, 0.78 * side, 0.73 * side), fill=COLOURS["pink"])
    draw.ellipse((0.12 * side, 0.36 * side, 0.26 * side, 0.5 * side), fill=DARK)
    draw.rectangle((0.42 * side, 0.28 * side, 0.52 * side, 0.72 * side), fill=COLOURS["purple"])
    return figure


def _star(side: int) -> Image.Image:
    figure = Image.new("RGBA", (side, side))
    points = []
    for corner in range(10):
        radius, angle = (0.52 if corner % 2 == 0 else 0.22) * side, math.pi * corner / 5
        points.append((side / 2 + radius * math.sin(angle), 0.53 * side - radius * math.cos(angle)))
    ImageDraw.Draw(figure).polygon(points, fill=COLOURS["blue"])
    ImageDraw.Draw(figure).ellipse((0.4 * side, 0.42 * side, 0.6 * side, 0.62 * side), fill=COLOURS["yellow"])
    return figure


def _striped_box(side: int) -> Image.Image:
    figure = Image.new("RGBA", (side, side), COLOURS["blue"])
    draw = ImageDraw.Draw(figure)
    for band in (0, 2, 4):
        draw.rectangle((0, band * side / 5, side, (band + 1) * side / 5), fill=COLOURS["yellow"])
    return figure


FIGURES: dict[str, Callable[[int], Image.Image]] = {
    "robot": _robot,
    "fish": _fish,
    "star": _star,
    "flag": _striped_box,
}
SUBJECTS: dict[str, tuple[str, str]] = {  # shape or figure, colour where the figure has none of its own
    **{name: (name, "") for name in FIGURES},
    "pink_ring": ("ring", "pink"),
    "purple_cross": ("cross", "purple"),
}


def subject_pictures(subject: str, count: int = 5, seed: int = 0) -> list[Image.Image]:
    """Square pictures of a subject, each one on another background, no two alike.

    Args:
        subject: A key of `SUBJECTS`.
        count: How many.
        seed: The same seed gives the same pictures.
    """
    return [draw_scene(scene) for scene in _subject_scenes(subject, count, seed)]


def subject_photos(subject: str, count: int = 5, seed: int = 1) -> list[Image.Image]:
    """Pictures of a subject to train on, as a user would have them: half as long again as they are wide, or upright.

    The figure stands near the middle of the longer side, so that a square crop of the shorter one shows it whole at
    another place each time. From square pictures a LoRA learns five places by heart instead of a figure.
    """
    return [_photo(scene, number % 2 == 1) for number, scene in enumerate(_subject_scenes(subject, count, seed))]


def _photo(scene: Scene, upright: bool) -> Image.Image:
    short, long = RESOLUTION, RESOLUTION * 3 // 2
    square = _background(scene.background, long)
    picture = square.resize((short, long) if upright else (long, short))
    figure = _figure_of(scene, round(scene.side * short))
    along, across = (scene.y, scene.x) if upright else (scene.x, scene.y)
    along, across = long / 2 + (along - 0.5) * 0.35 * short, across * short
    x, y = (across, along) if upright else (along, across)
    picture.paste(figure, (round(x - figure.width / 2), round(y - figure.height / 2)), figure)
    return picture


def _subject_scenes(subject: str, count: int, seed: int) -> list[Scene]:
    """Random scenes with a subject in place of the figure."""
    rng = random.Random(f"{subject}/{seed}")
    grounds = rng.sample(list(BACKGROUNDS), len(BACKGROUNDS))
    shape, colour = SUBJECTS[subject]
    return [
        dataclasses.replace(random_scene(rng), shape=shape, colour=colour, background=grounds[i % len(grounds)])
        for i in range(count)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> None:
    """Write the pictures of every subject into a folder of its own."""
    for subject in SUBJECTS:
        folder = args.folder / subject
        folder.mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(subject_photos(subject, args.count), 1):
            picture.save(folder / f"{subject}_{number}.png")
        print(f"{folder}: {args.count} pictures")


def parse_args(input_args: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `input_args`."""
    parser = argparse.ArgumentParser(description="Draw the subjects that the mini FLUX has never seen.")
    parser.add_argument("folder", type=Path, help="folder to write into, one folder for each subject")
    parser.add_argument("--count", type=int, default=5, help="pictures of each subject")
    return parser.parse_args(input_args)


if __name__ == "__main__":
    main(parse_args())
