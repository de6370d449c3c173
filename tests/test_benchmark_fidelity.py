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
"""examples/benchmark_fidelity.py and picture_grid.py: a short comparison, and what its numbers mean.

These fail if a way of training is measured twice or under other settings, if the ablation without residuals trains
like the method, if the report's shares are not those of the losses, or if the checker takes one subject for another.
"""

import json
from unittest import mock

import pytest
import torch
from PIL import Image

import benchmark_fidelity
import picture_grid
import scenes
from conftest import reset_accelerate

TRAINED = ("LoRA", "50 %, full size", "50 %, full size, no residuals", "LISA, full size")
SHORT = ["--subjects", "robot", "--seeds", "0", "--images", "1"]
SETTINGS = ["--steps", "2", "--draw_steps", "2", "--batch_size", "2"]


def call(*words):
    """The command line, without the silence that it keeps afterwards."""
    reset_accelerate()
    with mock.patch.object(benchmark_fidelity, "be_quiet"):
        benchmark_fidelity.main(benchmark_fidelity.parse_args([str(word) for word in words]))


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def work(tmp_path_factory, monkeypatch_module):
    folder = tmp_path_factory.mktemp("fidelity") / "work"
    monkeypatch_module.setattr(benchmark_fidelity, "SUBJECTS", ("robot",))  # whose blocks are probed
    call("run", folder, *SHORT, *SETTINGS, "--ways", "base model", *TRAINED)
    return folder


def losses(work):
    files = sorted((work / "cells").glob("*/robot-0/result.json"))
    return {result["way"]: result["loss"] for result in map(json.loads, (file.read_text() for file in files))}


def test_all_ways_are_measured_and_differ(work):
    found = losses(work)
    assert set(found) == {"base model", *TRAINED}
    assert len(set(found.values())) == len(found)


def test_nothing_is_measured_twice(work, monkeypatch):
    monkeypatch.setattr(benchmark_fidelity, "train", lambda *_: pytest.fail("trained again"))
    call("run", work, *SHORT, *SETTINGS, "--ways", *TRAINED)


def test_other_settings_are_refused(work):
    with pytest.raises(SystemExit, match="other settings"):
        call("run", work, *SHORT, "--steps", "3")


def test_other_weights_are_refused(work, tmp_path):
    (tmp_path / "other.safetensors").write_bytes(b"other")
    with pytest.raises(SystemExit, match="other settings"):
        call("run", work, *SHORT, *SETTINGS, "--weights", tmp_path / "other.safetensors")


def test_the_shares_are_those_of_the_losses(work, tmp_path, capsys):
    call("report", work, *SHORT, "--picture", tmp_path / "plot.png", "--grid", tmp_path / "grid.png")
    rows = {row["name"]: row for row in json.loads((work / "report.json").read_text())}
    found = losses(work)
    gain = found["base model"] - found["LoRA"]
    assert rows["base model"]["values"]["kept"] == [0.0]
    assert rows["LoRA"]["values"]["kept"] == [1.0]
    kept = (found["base model"] - found["50 %, full size"]) / gain
    assert rows["50 %, full size"]["values"]["kept"] == [pytest.approx(kept)]
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in rows)
    assert Image.open(tmp_path / "plot.png").width > 1000
    assert Image.open(tmp_path / "grid.png").height > 300


def test_a_step_of_half_the_blocks_costs_less(work):
    costs = {
        name: json.loads((work / "cells" / benchmark_fidelity.slug(name) / "costs.json").read_text())
        for name in ("LoRA", "50 %, full size")
    }
    assert costs["50 %, full size"]["flops"] < 0.6 * costs["LoRA"]["flops"]
    assert costs["50 %, full size"]["bytes"] < costs["LoRA"]["bytes"]


def test_names_of_folders_tell_the_ways_apart():
    assert len({benchmark_fidelity.slug(name) for name in benchmark_fidelity.WAYS}) == len(benchmark_fidelity.WAYS)


def test_without_residuals_a_skipped_block_adds_nothing():
    handle = object.__new__(benchmark_fidelity.blockskip.SkipHandle)
    stored = {"first.hidden_states": torch.ones(1, 2, 3), "modulation.x": torch.ones(1, 4)}
    handle._residuals = stored
    with benchmark_fidelity.without_residuals():
        assert handle.residual("first.hidden_states").eq(0).all()
        assert handle.residual("modulation.x").eq(1).all()
    assert handle.residual("first.hidden_states").eq(1).all()


@pytest.mark.parametrize("subject", scenes.SUBJECTS)
def test_the_checker_tells_subjects_apart(subject):
    figure = scenes.SUBJECTS[subject]
    for picture in scenes.subject_pictures(subject, 5, seed=2):
        cut = scenes.figure_cut(picture)
        assert scenes.recognise(cut) == figure
        assert scenes.likeness(cut, *figure) > 0.8


def test_an_empty_picture_shows_no_subject():
    cut = scenes.figure_cut(Image.new("RGB", (128, 128), scenes.BACKGROUNDS["sand"]))
    assert cut is None
    assert scenes.recognise(cut) is None
    assert scenes.likeness(cut, "robot") == 0.0


def test_background_and_place_are_read_against_the_prompt():
    scene = scenes.Scene("robot", "", "sand", "left", "large", *scenes.PLACES["left"], 0.45)
    picture = scenes.draw_scene(scene)
    assert benchmark_fidelity.is_as_told("sand-left-0", picture)
    assert not benchmark_fidelity.is_as_told("sand-right-0", picture)
    assert not benchmark_fidelity.is_as_told("snow-left-0", picture)


def test_a_grid_holds_every_picture_in_its_place(tmp_path):
    colours = ["#ff0000", "#00ff00", "#0000ff"]
    for number, colour in enumerate(colours):
        Image.new("RGB", (40, 60), colour).save(tmp_path / f"{number}.png")
    rows = ["--row", "all", tmp_path, "--row", "last", tmp_path / "2.png"]
    words = [tmp_path / "grid" / "grid.png", *rows, "--side", "32"]
    (tmp_path / "grid").mkdir()
    picture_grid.main(picture_grid.parse_args([str(word) for word in words]))
    grid = Image.open(tmp_path / "grid" / "grid.png").convert("RGB")
    counts = {f"#{r:02x}{g:02x}{b:02x}": n for n, (r, g, b) in grid.getcolors(2**24)}
    assert [counts[colour] for colour in colours] == [32 * 32, 32 * 32, 2 * 32 * 32]


def test_a_grid_of_missing_pictures_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="nowhere"):
        picture_grid.main(picture_grid.parse_args([str(tmp_path / "g.png"), "--row", "x", str(tmp_path / "nowhere")]))
