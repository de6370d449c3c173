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
"""Photos of every kind become upright RGB pixels.

These fail if a mode, an orientation or a transparent area is read as something else than what a person sees.
"""

import io

import numpy as np
import pytest
import torch
from PIL import Image

import blockskip_utils as blockskip
from conftest import CATS, flux_script


def loaded(tmp_path, image, name="photo.png", **options):
    image.save(tmp_path / name, **options)
    return blockskip._examine(name, "caption", tmp_path / name, "--instance_data_dir").load()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "CMYK", "YCbCr", "LA", "RGBA", "LAB"])
def test_every_mode_becomes_the_colours_one_sees(tmp_path, mode):
    original = Image.new("RGB", (20, 30), (255, 255, 255))
    original.paste((0, 0, 0), (0, 0, 20, 15))
    name = "photo.png" if mode in ("RGB", "L", "P", "1", "LA", "RGBA") else "photo.tif"
    image = loaded(tmp_path, original.convert("L").convert("P") if mode == "P" else original.convert(mode), name)
    assert image.mode == "RGB" and image.size == (20, 30)
    np.testing.assert_allclose(np.asarray(image), np.asarray(original), atol=3)


@pytest.mark.parametrize(("dtype", "top"), [(np.uint16, 65535), (np.int32, 65535), (np.int32, 255)])
def test_deep_grey_is_scaled_and_not_clipped(tmp_path, dtype, top):
    ramp = np.linspace(0, top, 256).astype(dtype)[None].repeat(4, 0)
    image = loaded(tmp_path, Image.fromarray(ramp), "photo.tif")
    np.testing.assert_allclose(np.asarray(image)[0, :, 0], np.arange(256), atol=1)


def test_transparent_areas_are_white(tmp_path):
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 255))
    image.paste((0, 0, 255, 0), (0, 0, 4, 8))
    pixels = np.asarray(loaded(tmp_path, image))
    assert (pixels[:, :4] == 255).all() and (pixels[:, 4:] == [255, 0, 0]).all()
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([0, 255, 0, 255, 0, 0])
    palette.paste(1, (4, 0, 8, 8))
    pixels = np.asarray(loaded(tmp_path, palette, transparency=0))
    assert (pixels[:, :4] == 255).all() and (pixels[:, 4:] == [255, 0, 0]).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright(tmp_path, orientation):
    """Each file's pixels are turned so that, seen as its EXIF tag says, red is at the top and the format is tall."""
    upright = Image.new("RGB", (16, 32), "blue")
    upright.paste("red", (0, 0, 16, 16))
    undo = {
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE],
        6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.TRANSVERSE],
        8: [Image.Transpose.ROTATE_270],
    }
    stored = upright
    for turn in undo.get(orientation, []):
        stored = stored.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = loaded(tmp_path, stored, "photo.jpg", exif=exif, quality=95)
    assert image.size == (16, 32)
    assert image.getpixel((8, 4))[0] > 200 and image.getpixel((8, 28))[2] > 200


def test_size_and_digest_are_those_of_the_upright_file(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20)).save(tmp_path / "a.jpg", exif=exif)
    photo = blockskip._examine("a.jpg", "", tmp_path / "a.jpg", "")
    assert (photo.width, photo.height) == (20, 30)
    Image.new("RGB", (30, 20), "red").save(tmp_path / "a.jpg", exif=exif)
    assert blockskip._examine("a.jpg", "", tmp_path / "a.jpg", "").digest != photo.digest


@pytest.mark.parametrize("cut", [1, 50, 600, 20000, -1000])
def test_a_cut_photo_is_refused_by_name(tmp_path, cut):
    (tmp_path / "half.jpg").write_bytes((CATS / "cat_2.jpg").read_bytes()[:cut])
    with pytest.raises(SystemExit, match=r"half\.jpg"):
        blockskip._examine("half.jpg", "", tmp_path / "half.jpg", "")


def test_a_picture_of_absurd_size_is_refused_by_name(tmp_path):
    content = io.BytesIO()
    Image.new("1", (20000, 20000)).save(content, "PNG")  # 400 megapixels in a few kilobytes
    (tmp_path / "bomb.png").write_bytes(content.getvalue())
    with pytest.raises(SystemExit, match=r"bomb\.png"):
        blockskip._examine("bomb.png", "", tmp_path / "bomb.png", "")


@pytest.mark.parametrize("mode", ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])
def test_every_interpolation_mode_resizes(tmp_path, mode):
    photo = blockskip._examine("cat", "", CATS / "cat_3.jpg", "")
    args = flux_script.parse_args(["--pretrained_model_name_or_path", "", "--image_interpolation_mode", mode])
    draw = blockskip.Draw("0/0/0/instance", "", "instance", 0, "", 500.0, 0.5, 384, 0.5, 0.5, False, 1.0)
    pixels = blockskip.crop_photo(photo, draw, args, 64)
    assert pixels.shape == (3, 64, 64) and pixels.abs().max() <= 1 and pixels.std() > 0.1
    assert torch.equal(pixels, blockskip.crop_photo(photo, draw, args, 64))
