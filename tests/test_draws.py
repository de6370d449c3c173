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
"""Patch sizes and training draws.

These fail if a draw depends on anything but (seed, rank, index), if ranks share noise, if photos are left out or
doubled in an epoch, if crops leave the photo, or if timesteps do not follow the scheduler's table.
"""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

import blockskip_utils as blockskip
from conftest import flux_script

SIGMAS = [index / 1000 for index in range(1001)]


def make_source(rank=0, *flags, photos=3, class_photos=0, scheduler=None, **plan):
    """The draws of one process for photos that are only names."""
    args = flux_script.parse_args(["--pretrained_model_name_or_path", "", "--patch_resolution", "256", *flags])
    values = {"seed": 0, "num_processes": 1, "batch_size": 1, "accumulation": 1, "num_draws": 12, **plan}
    values = {"samples_per_epoch": photos, "max_steps": 12, "period_steps": 12, "patch_schedule": "linear", **values}
    values |= {"resolution": 512, "patch_resolution": 256, "pixel_multiple": 16}
    names = (
        "model",
        "depth",
        "skip_first",
        "skip_last",
        "skip_source",
        "bytes_per_draw",
        "lora_targets",
        "modulations",
    )
    plan = blockskip.Plan(**dict.fromkeys(names), **values)

    def named(kind, count):
        return [blockskip.Photo(f"{kind}{i}", f"{kind} {i}", 600, 800, str(i), None) for i in range(count)]

    scheduler = scheduler or FlowMatchEulerDiscreteScheduler()
    return blockskip.DrawSource(args, plan, named("photo", photos), named("class", class_photos), scheduler, rank)


@pytest.mark.parametrize(("low", "high", "multiple"), [(256, 512, 16), (512, 1024, 32), (32, 64, 16), (256, 256, 16)])
def test_linear_patch_size_is_the_papers_formula_to_the_nearest_multiple(low, high, multiple):
    for sigma in SIGMAS:
        size = blockskip.patch_size(sigma, low, high, multiple)
        assert size % multiple == 0 and low <= size <= high
        assert abs(size - (low + sigma * (high - low))) <= multiple / 2
    assert blockskip.patch_size(0, low, high, multiple) == low
    assert blockskip.patch_size(1, low, high, multiple) == high
    assert blockskip.patch_size(0, low, high, multiple, "reverse") == high
    assert {blockskip.patch_size(sigma, low, high, multiple, "none") for sigma in SIGMAS} == {high}


def test_patch_size_grows_with_noise_and_reverse_shrinks():
    sizes = [blockskip.patch_size(sigma, 256, 512, 16) for sigma in SIGMAS]
    assert sizes == sorted(sizes) and set(sizes) == set(range(256, 513, 16))
    sizes = [blockskip.patch_size(sigma, 256, 512, 16, "reverse") for sigma in SIGMAS]
    assert sizes == sorted(sizes, reverse=True)


def test_random_patch_size_does_not_look_at_sigma_and_covers_all_sizes():
    def draw(sigma):
        return blockskip.patch_size(sigma, 256, 512, 16, "random", torch.Generator().manual_seed(5))

    assert len({draw(sigma) for sigma in SIGMAS}) == 1
    generator = torch.Generator().manual_seed(0)
    sizes = [blockskip.patch_size(0.0, 256, 512, 16, "random", generator) for _ in range(2000)]
    assert set(sizes) == set(range(256, 513, 16))
    assert abs(sum(sizes) / 2000 - 384) < 4 * (256 / math.sqrt(12)) / math.sqrt(2000)


@pytest.mark.parametrize(
    "arguments",
    [(-0.1, 256, 512, 16), (1.1, 256, 512, 16), (0.5, 512, 256, 16), (0.5, 250, 512, 16), (0.5, 256, 512, 16, "up")],
    ids=str,
)
def test_patch_size_refuses_what_makes_no_sense(arguments):
    with pytest.raises(ValueError, match=r"must"):
        blockskip.patch_size(*arguments)


def test_a_draw_is_a_pure_function_of_seed_rank_and_index():
    first = [make_source().sample(index) for index in range(20)]
    torch.manual_seed(99)
    torch.rand(5)
    source = make_source()
    assert [source.sample(index) for index in reversed(range(20))] == first[::-1]
    assert all(make_source(seed=1).sample(index)[0].sigma != first[index][0].sigma for index in range(20))


def test_ranks_and_indices_share_no_noise():
    draws = [make_source(rank, num_processes=4).sample(index)[0] for rank in range(4) for index in range(25)]
    noises = {tuple(draw.noise((4, 2, 2)).flatten().tolist()) for draw in draws}
    assert len({draw.key for draw in draws}) == len(noises) == 100
    assert len({draw.sigma for draw in draws}) > 90  # of a table of 1,000
    assert torch.equal(draws[3].noise((4, 2, 2)), draws[3].noise((4, 2, 2)))


@pytest.mark.parametrize(("processes", "photos", "repeats"), [(1, 5, 1), (2, 5, 1), (3, 4, 2), (4, 2, 1)])
def test_every_photo_comes_once_in_an_epoch_over_all_processes_in_a_new_order(processes, photos, repeats):
    flags = ("--repeats", str(repeats))
    sources = [make_source(rank, *flags, photos=photos, num_processes=processes) for rank in range(processes)]
    dealt = [sources[place % processes].sample(place // processes)[0].photo for place in range(6 * photos * repeats)]
    epochs = [dealt[i : i + photos * repeats] for i in range(0, len(dealt), photos * repeats)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(list(range(photos)) * repeats)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_caption_and_photo_belong_together():
    source = make_source(photos=7, class_photos=3)
    for index in range(50):
        photo_draw, class_draw = source.sample(index)
        assert photo_draw.prompt == f"photo {photo_draw.photo}"
        assert class_draw.prompt == f"class {class_draw.photo}"
        assert photo_draw.sigma != class_draw.sigma and photo_draw.name != class_draw.name


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_sigmas_follow_the_schedulers_shift(shift):
    source = make_source(scheduler=FlowMatchEulerDiscreteScheduler(shift=shift))
    sigmas = torch.tensor([source.sample(index)[0].sigma for index in range(4000)], dtype=torch.float64)
    unshifted = (sigmas / (shift - (shift - 1) * sigmas)).sort().values  # uniform, if sigma = s u / (1 + (s - 1) u)
    gap = (unshifted - torch.linspace(0, 1, 4000, dtype=torch.float64)).abs().max().item()
    assert gap < 1.95 / math.sqrt(4000)  # Kolmogorov-Smirnov, one in a thousand


def test_timestep_and_sigma_are_of_one_table_entry_and_size_follows_sigma():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    source = make_source(scheduler=scheduler)
    table = dict(zip(scheduler.timesteps.tolist(), scheduler.sigmas.tolist(), strict=True))
    for index in range(200):
        (draw,) = source.sample(index)
        assert table[draw.timestep] == draw.sigma
        assert draw.patch_size == blockskip.patch_size(draw.sigma, 256, 512, 16)


def test_flip_and_crop_are_chosen_anew_and_can_be_fixed():
    draws = [make_source(0, "--random_flip").sample(index)[0] for index in range(400)]
    flips = sum(draw.flip for draw in draws)
    assert 150 < flips < 250 and len({draw.left for draw in draws}) == 400
    draws = [make_source(0, "--center_crop").sample(index)[0] for index in range(20)]
    assert {(draw.left, draw.top, draw.flip) for draw in draws} == {(0.5, 0.5, False)}


def test_fewer_draws_are_all_used_and_come_again_in_a_new_order():
    for rank in range(2):
        source = make_source(rank, num_draws=9, num_processes=2, max_steps=100, period_steps=50)
        for number in range(2):
            period = blockskip.Period(number, 50 * number, 50 * (number + 1))
            count = 5 - rank
            turns = [[source.index_at(period, t * count + i) for i in range(count)] for t in range(8)]
            assert all(sorted(turn) == list(source.indices(period)) for turn in turns)
            assert turns[0] == sorted(turns[0]) and len({tuple(turn) for turn in turns}) > 1
    first, second = (set(source.indices(blockskip.Period(n, 0, 1))) for n in range(2))
    assert not first & second


@pytest.mark.parametrize("size", [(600, 800), (40, 30), (1, 500), (700, 700), (3, 2)])
@pytest.mark.parametrize("corner", [(0.0, 0.0), (1.0, 1.0), (0.3, 0.9)])
def test_crop_lies_within_the_photo_for_every_size_of_photo(tmp_path, size, corner):
    Image.new("RGB", size, "red").save(tmp_path / "red.png")
    photo = blockskip.Photo("red.png", "", *size, "", tmp_path / "red.png")
    args = flux_script.parse_args(["--pretrained_model_name_or_path", "", "--resolution", "512"])
    (draw,) = make_source().sample(0)
    draw = blockskip.dataclasses.replace(draw, left=corner[0], top=corner[1], patch_size=512)
    pixels = blockskip.crop_photo(photo, draw, args, 32)
    assert pixels.shape == (3, 32, 32) and pixels.dtype == torch.float32
    assert torch.equal(pixels, torch.tensor([1.0, -1.0, -1.0]).view(3, 1, 1).expand(3, 32, 32))


def test_crop_takes_the_place_it_says(tmp_path):
    # a photo of 8 x 16 cells of 10 px, each with a grey of its own; its short edge of 80 px stands for 512 px
    grey = torch.arange(128, dtype=torch.uint8).view(16, 8)
    Image.fromarray(grey.repeat_interleave(10, 0).repeat_interleave(10, 1).numpy()).save(tmp_path / "grey.png")
    photo = blockskip.Photo("grey.png", "", 80, 160, "", tmp_path / "grey.png")
    args = flux_script.parse_args(
        ["--pretrained_model_name_or_path", "", "--resolution", "512", "--image_interpolation_mode", "box"]
    )
    (draw,) = make_source().sample(0)
    draw = blockskip.dataclasses.replace(draw, patch_size=256, left=0.5, top=0.75, flip=False)  # 4 x 4 cells
    cells = ((blockskip.crop_photo(photo, draw, args, 4)[0] + 1) * 127.5).round().byte()
    assert torch.equal(cells, grey[9:13, 2:6])
    mirrored = blockskip.crop_photo(photo, blockskip.dataclasses.replace(draw, flip=True), args, 4)[0]
    assert torch.equal(((mirrored + 1) * 127.5).round().byte(), grey[9:13, 2:6].flip(1))
