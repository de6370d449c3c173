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
"""Put pictures into one, in rows with names.

python examples/picture_grid.py grid.png --row photos examples/cat --row "with the LoRA" pictures/*.png
"""

import argparse
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}


def make_grid(
    rows: list[tuple[str, list[Image.Image]]], side: int = 128, titles: list[str] | None = None
) -> Image.Image:
    """One picture of all rows.

    Args:
        rows: A name and pictures each; pictures are cut to squares.
        side: Of a square, in pixels.
        titles: Above the columns.
    """
    font, gap = ImageFont.load_default(), 4
    margin = max(int(font.getlength(name)) for name, _ in rows) + 3 * gap
    top = 5 * gap if titles else gap
    columns = max(len(pictures) for _, pictures in rows)
    size = (margin + columns * (side + gap), top + len(rows) * (side + gap))
    grid = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(grid)
    for column, title in enumerate(titles or []):
        draw.text((margin + column * (side + gap) + side / 2, top / 2), title, "#222222", font, anchor="mm")
    for row, (name, pictures) in enumerate(rows):
        y = top + row * (side + gap)
        draw.text((margin - 2 * gap, y + side / 2), name, "#222222", font, anchor="rm")
        for column, picture in enumerate(pictures):
            square = ImageOps.fit(picture.convert("RGB"), (side, side), Image.Resampling.LANCZOS)
            grid.paste(square, (margin + column * (side + gap), y))
    return grid


def open_pictures(names: list[str]) -> list[Image.Image]:
    """The pictures of files and folders, in the order of their names within a folder."""
    files = []
    for path in map(Path, names):
        files += sorted(f for f in path.iterdir() if f.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    return [ImageOps.exif_transpose(Image.open(file)) for file in files]


def parse_args(input_args: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `input_args`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path, help="PNG file to write.")
    parser.add_argument(
        "--row", nargs="+", action="append", required=True, metavar=("NAME", "PICTURE"), help="Files or folders."
    )
    parser.add_argument("--side", type=int, default=128, help="Of each picture, in pixels.")
    parser.add_argument("--titles", nargs="+", help="Above the columns.")
    return parser.parse_args(input_args)


def main(args: argparse.Namespace) -> None:
    """Write the grid that the command line asks for."""
    try:
        rows = [(name, open_pictures(pictures)) for name, *pictures in args.row]
    except OSError as problem:
        sys.exit(f"error: {problem}")
    make_grid(rows, args.side, args.titles).save(args.output)
    print(args.output)


if __name__ == "__main__":
    main(parse_args())
