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
"""Whatever a folder of photos or a command line holds: it is taken, or refused in one line before weights are loaded.

These fail if an odd file, name, caption or flag ends in a traceback, in a message of several lines, or in a crop that
is no picture. The examples are the same in every run.
"""

import io
import json
import os
import pathlib
import shutil
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import blockskip_utils as blockskip
from conftest import flux_script, reset_accelerate, sana_script

FIXED = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False
)

# ---------------------------------------------------------------------------------------------------------------------
# Folders of photos
# ---------------------------------------------------------------------------------------------------------------------

SIZES = [(1, 1), (1, 2), (2, 1), (7, 3), (49, 49), (1, 400), (400, 1), (3, 9000), (9000, 3), (65500, 1), (3000, 2000)]
MODES = [
    "1",
    "L",
    "LA",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBX",
    "RGBa",
    "La",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "I;16",
    "F",
]
FORMATS = ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "AVIF", "PPM", "ICO", "JPEG2000"]
STEMS = [
    "a",
    "-rf",
    "--resolution",
    "a b",
    "ü\u0301",
    "\u202e",
    "'",
    '"',
    "a\nb",
    "a\tb",
    "$(x)",
    "%s",
    "{0}",
    "*",
    "\udcff",
    ".",
]
SUFFIXES = [
    ".png",
    ".jpg",
    ".JPEG",
    ".webp",
    ".bmp",
    ".tiff",
    ".gif",
    ".avif",
    ".jfif",
    ".txt",
    ".heic",
    "",
    ".png.txt",
]


def picture(mode: str, size: tuple[int, int], kind: str, orientation: int | None, frames: int) -> bytes:
    """An image file; of a mode that the format has no place for, an RGB one, and a PNG of what no format takes."""
    image = Image.new(mode, size)
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    if kind == "AVIF":  # Pillow's encoder crashes at some EXIF data
        exif = Image.Exif()
    options = {"exif": exif} | ({"save_all": True, "append_images": [image] * (frames - 1)} if frames > 1 else {})
    for candidate, target, more in ((image, kind, options), (Image.new("RGB", size), kind, {"exif": exif})):
        file = io.BytesIO()
        try:
            candidate.save(file, target, **more)
        except Exception:  # no such combination, or no such encoder in this build of the library
            continue
        return file.getvalue()
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "PNG")
    return file.getvalue()


pictures = st.builds(
    picture,
    st.sampled_from(MODES),
    st.sampled_from(SIZES) | st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.sampled_from(FORMATS),
    st.none() | st.integers(0, 9),
    st.sampled_from([1, 1, 1, 2]),
)


@st.composite
def damaged(draw):
    content = draw(pictures)
    at = draw(st.integers(0, len(content)))
    return draw(st.sampled_from([content[:at], content[:at] + b"\0" + content[at + 1 :], content + b"trailing"]))


contents = pictures | damaged() | st.binary(max_size=50) | st.sampled_from(["folder", "dangling", "loop", "pipe", b""])
names = st.builds(str.__add__, st.sampled_from(STEMS) | st.text(max_size=8), st.sampled_from(SUFFIXES)).filter(
    lambda name: name not in ("", ".", "..") and not set(name) & {"/", "\0"} and len(os.fsencode(name)) < 200
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["\ud800", "\0", " ", "a\u2028b"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


def put(folder: pathlib.Path, name: str, content: bytes | str) -> None:
    path = folder / name
    if content == "folder":
        path.mkdir()
    elif content == "dangling":
        path.symlink_to(folder / "nowhere")
    elif content == "loop":
        path.symlink_to(path)
    elif content == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(content)


@st.composite
def metadata(draw, names: list[str]) -> bytes | None:
    """The metadata.jsonl beside photos of these names: none, lines about them, or anything."""
    kind = draw(st.sampled_from(["none", "lines", "lines", "lines", "bytes"]))
    if kind == "none":
        return None
    if kind == "bytes":
        return draw(st.binary(max_size=60))
    rows = [{"file_name": name, "text": draw(values)} for name in names if draw(st.booleans())]
    lines = [json.dumps(row) for row in rows] + draw(st.lists(values.map(json.dumps), max_size=1))
    return "\n".join(lines).encode()


def refusal_of(error: SystemExit, capsys=None) -> str:
    """The line that a run was refused with; fails if it is more than one."""
    message = error.code if isinstance(error.code, str) else capsys.readouterr().err.rstrip("\n")
    assert error.code != 0 and "error: " in message, repr(message)
    assert message.isprintable() and len(message) < 2000, repr(message)
    return message


@st.composite
def folders(draw):
    entries = draw(st.dictionaries(names, contents, min_size=0, max_size=4))
    return entries, draw(metadata(list(entries)))


def fill(folder: pathlib.Path, entries: dict, lines: bytes | None) -> None:
    folder.mkdir()
    for name, content in entries.items():
        put(folder, name, content)
    if lines is not None:
        (folder / "metadata.jsonl").write_bytes(lines)


@settings(FIXED, max_examples=400)
@given(folders(), st.booleans(), st.sampled_from([(16, 16), (64, 32), (96, 96), (512, 256)]), st.data())
def check_folder(outcomes, content, captions, sizes, data):
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary, "photos")
        fill(folder, *content)
        words = ["--pretrained_model_name_or_path", "", "--instance_data_dir", str(folder), "--instance_prompt", "sks"]
        words += ["--resolution", str(sizes[0]), "--patch_resolution", str(sizes[1])]
        args = flux_script.parse_args(words + (["--caption_column", "text"] if captions else []))
        try:
            photos = blockskip.load_photos(args)
        except SystemExit as error:
            refusal_of(error)
            outcomes["refused"] += 1
            return
        outcomes["accepted"] += 1
        for photo in photos:
            photo.caption.encode("utf-8")
            side = data.draw(st.sampled_from(range(sizes[1], sizes[0] + 1, 16)))
            left, top = data.draw(st.tuples(st.floats(0, 1), st.floats(0, 1)))
            draw = blockskip.Draw("k", "n", "instance", 0, "", 500.0, 0.5, side, left, top, False, 1.0)
            pixels = blockskip.crop_photo(photo, draw, args, sizes[1])
            assert pixels.shape == (3, sizes[1], sizes[1])
            assert torch.isfinite(pixels).all() and pixels.abs().max() <= 1


def test_a_folder_of_anything_is_trained_on_or_refused_in_one_line():
    outcomes = {"accepted": 0, "refused": 0}
    check_folder(outcomes)
    assert min(outcomes.values()) > 50, outcomes


@settings(FIXED, max_examples=8)
@given(content=folders())
def test_a_folder_of_anything_goes_through_a_whole_run_or_is_refused_before_weights(flux, content):
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        folder = pathlib.Path(temporary, "photos")
        fill(folder, *content)
        Image.new("L", (3, 70)).save(folder / "one more.png")  # so that most can be trained on
        loaded = []
        encode = blockskip.encode_prompts
        patch.setattr(blockskip, "encode_prompts", lambda run: (loaded.append(run), encode(run))[1])
        try:
            flux.run(flux.command(folder, pathlib.Path(temporary, "out"), steps=2))
        except SystemExit as error:
            refusal_of(error)
            assert not loaded and not pathlib.Path(temporary, "out").exists()
        else:
            assert pathlib.Path(temporary, "out", "pytorch_lora_weights.safetensors").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Command lines
# ---------------------------------------------------------------------------------------------------------------------

NUMBERS = [
    "0",
    "1",
    "2",
    "16",
    "64",
    "100",
    "-1",
    "0.5",
    "1e-9",
    "1e308",
    "-0.0",
    "nan",
    "inf",
    "1" * 400,
    "\u0663",
    "1_0",
]
WORDS = [
    "",
    " ",
    "x",
    "none",
    "latest",
    "true",
    "-",
    "--",
    "a\nb",
    "\udcff",
    "\u202e",
    "'",
    "../..",
    "{}",
    "attn.to_q",
    "%s",
]
OWN = {"pretrained_model_name_or_path", "output_dir", "help", "dataset_name", "instance_data_dir", "cache_dir"}


def flags_of(script) -> dict:
    """The parser's actions by flag; caught where the script makes it."""
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockskip.OneLineParser, "parse_args", lambda self, words: seen.update(parser=self))
        script.parse_args([])
    return {action.option_strings[0]: action for action in seen["parser"]._actions if action.dest not in OWN}


def words_of(flag: str, action) -> st.SearchStrategy:
    if action.nargs == 0:
        return st.just([flag])
    usual = [] if action.default in (None, True, False) else [str(action.default)]
    candidates = st.sampled_from([*map(str, action.choices or []), *usual, *NUMBERS]) | st.sampled_from(WORDS)
    if not any(part in flag for part in ("dir", "path", "json", "curves", "checkpoint")):
        candidates |= st.text(st.characters(exclude_characters="\0"), max_size=10)
    return candidates.map(lambda value: [flag, value])


class Accepted(Exception):
    """Nothing was refused: weights would be loaded next."""


@pytest.mark.parametrize("script", [flux_script, sana_script], ids=["flux", "sana"])
def test_a_command_line_of_anything_is_accepted_or_refused_in_one_line(request, script, tmp_path, capsys, monkeypatch):
    case = request.getfixturevalue("flux" if script is flux_script else "sana")
    flags = flags_of(script)
    assert len(flags) > 80
    Image.new("RGB", (40, 50)).save(tmp_path / "a.png")
    photos = tmp_path / "photos"
    photos.mkdir()
    (tmp_path / "a.png").rename(photos / "a.png")

    def accepted(*args, **kwargs):
        raise Accepted

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(blockskip, "encode_prompts", accepted)
    monkeypatch.setattr(blockskip, "dry_run", accepted)
    monkeypatch.setattr(blockskip, "estimate_run", lambda run: None)
    monkeypatch.setattr(blockskip.Accelerator, "init_trackers", lambda *args, **kwargs: None)
    one = st.sampled_from(sorted(flags)).flatmap(lambda flag: words_of(flag, flags[flag]))
    outcomes = {"accepted": 0, "refused": 0}

    @settings(FIXED, max_examples=600)
    @given(st.lists(one, min_size=1, max_size=3))
    def check(chosen):
        reset_accelerate()
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        extra = [word for words in chosen for word in words]
        try:
            script.main(script.parse_args(case.command(photos, tmp_path / "out", *extra)))
        except Accepted:
            outcomes["accepted"] += 1
        except SystemExit as error:
            refusal_of(error, capsys)
            outcomes["refused"] += 1
            assert not (tmp_path / "out").exists()
        else:
            pytest.fail(f"neither accepted nor refused: {extra}")
        capsys.readouterr()

    check()
    assert min(outcomes.values()) > 50, outcomes
    assert {path.name for path in tmp_path.iterdir()} <= {"photos", "out"}
