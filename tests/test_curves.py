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
"""Choosing which blocks to skip: curves, the choice from them, and `--skip_ratio` in whole runs.

In the models here it is known which blocks carry the prompt into the image, since the others' attention has zeros
where its result would enter the image. These tests fail if a curve is of other blocks than it says, if the choice is
not the best pair, if a resumed run or another process chooses differently, or if a file of curves is taken on trust.
"""

import gc
import json
import random
import shutil
import weakref

import pytest
import torch
from diffusers import FluxTransformer2DModel, SanaTransformer2DModel
from test_blocks import DEPTH, MODELS
from test_refusals import refusal
from test_runs import Killed, assert_same_lora, kill_at, spy_on

import blockskip_utils as blockskip
from conftest import CATS, flux_script, launch, plant, sana_script


def measured(transformer, inputs):
    """The curves of a transformer for one set of inputs."""

    @torch.no_grad()
    def take():
        return transformer(**inputs)[0]

    distances = blockskip.measure_distances(transformer, {"sample": take}, show_progress=False)
    return blockskip.make_curves(len(blockskip.named_blocks(transformer)), "prediction", distances.values(), {})


def curves_of(first, last, **rest):
    return blockskip.BlockCurves(depth=len(first), first=tuple(first), last=tuple(last), **rest)


@pytest.mark.parametrize("carriers", [{0}, {2, 3}, {1, 3}, {4}, {0, 4}, set()], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_curves_are_zero_just_where_no_carrying_block_is_masked(kind, carriers):
    make, make_inputs = MODELS[kind]
    depth, curves = DEPTH[kind], measured(plant(make(), carriers), make_inputs())
    size = curves.window_size
    assert size == blockskip.window_size(depth)
    assert [d > 0 for d in curves.first] == [bool(carriers & set(range(n))) for n in range(depth)]
    assert [d > 0 for d in curves.last] == [bool(carriers & set(range(depth - m, depth))) for m in range(depth)]
    windows = [bool(carriers & set(range(start, start + size))) for start in range(depth - size + 1)]
    assert [d > 0 for d in curves.window] == windows


@pytest.mark.parametrize("kind", MODELS)
def test_each_entry_is_the_distance_of_its_own_mask(kind):
    make, make_inputs = MODELS[kind]
    transformer, inputs, depth = make(), make_inputs(), DEPTH[kind]
    curves = measured(transformer, inputs)

    @torch.no_grad()
    def distance(blocks):
        plain = transformer(**inputs)[0].double().flatten()
        with blockskip.mask_text(transformer, blocks):
            masked = transformer(**inputs)[0].double().flatten()
        return 1 - (plain @ masked / (plain.norm() * masked.norm())).item()

    assert curves.first == pytest.approx([distance(range(n)) for n in range(depth)], abs=1e-12)
    assert curves.last == pytest.approx([distance(range(depth - m, depth)) for m in range(depth)], abs=1e-12)
    starts = range(depth - curves.window_size + 1)
    assert curves.window == pytest.approx([distance(range(s, s + curves.window_size)) for s in starts], abs=1e-12)
    assert curves.first[0] == curves.last[0] == 0 and curves.samples == 1


def test_curves_are_the_mean_over_samples():
    masks = [f"{start}-{end}" for start, end in blockskip.block_masks(5)]
    samples = [{mask: value + number for number, mask in enumerate(masks)} for value in (0.0, 1.0, 5.0)]
    curves = blockskip.make_curves(5, "image", samples, {})
    assert curves.first == (0, *(2.0 + masks.index(f"0-{n}") for n in range(1, 5)))
    assert curves.samples == 3


@pytest.mark.parametrize(("depth", "size"), [(57, 14), (20, 5), (8, 2), (5, 1), (2, 1), (1, 1)])
def test_the_window_has_the_papers_share_of_the_depth(depth, size):
    assert blockskip.window_size(depth) == size


@pytest.mark.parametrize("depth", [1, 2, 5, 20, 57])
def test_each_mask_is_measured_once_and_none_is_missing(depth):
    masks = blockskip.block_masks(depth)
    size = blockskip.window_size(depth)
    assert len(masks) == len(set(masks)) and all(0 <= start < end <= depth for start, end in masks)
    wanted = {(0, n) for n in range(1, depth)} | {(depth - m, depth) for m in range(1, depth)}
    assert set(masks) == wanted | {(start, start + size) for start in range(depth - size + 1)}


def test_distances_known_already_are_not_measured_again():
    transformer, inputs = MODELS["sana"][0](), MODELS["sana"][1]()
    taken, told = [], []

    @torch.no_grad()
    def take():
        taken.append(1)
        return transformer(**inputs)[0]

    samples = {"a": take, "b": take}
    whole = blockskip.measure_distances(transformer, samples, show_progress=False)
    masks = list(whole["a"])
    taken.clear()
    known = {"a": whole["a"], "b": {mask: whole["b"][mask] for mask in masks[:-2]}}
    again = blockskip.measure_distances(
        transformer, samples, known=known, on_distance=lambda *new: told.append(new), show_progress=False
    )
    assert again == whole and len(taken) == 3  # nothing masked, and the two that were missing
    assert told == [("b", mask, whole["b"][mask]) for mask in masks[-2:]]


def test_the_cosine_distance_is_exact_near_zero_and_refuses_what_is_no_number():
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert blockskip.cosine_distance(vector, vector.clone()) == 0
    assert blockskip.cosine_distance(vector, 3 * vector) == pytest.approx(0, abs=1e-12)
    assert blockskip.cosine_distance(vector, -vector) == pytest.approx(2)
    assert blockskip.cosine_distance(torch.tensor([1.0, 0]), torch.tensor([0, 2.0])) == pytest.approx(1)
    with pytest.raises(FloatingPointError):
        blockskip.cosine_distance(vector, vector * torch.nan)


@pytest.mark.parametrize("depth", [2, 5, 8, 20])
def test_the_choice_is_the_best_of_all_pairs(depth):
    rng = random.Random(depth)
    for _ in range(20):
        curves = curves_of(*([rng.random() for _ in range(depth)] for _ in range(2)))
        for count in range(depth):
            best = min((curves.first[n] + curves.last[count - n], n) for n in range(count + 1))[1]
            chosen = blockskip.choose_skip_counts(curves, count, [1] * depth)
            assert chosen == (best, count - best)


def test_ties_go_to_the_heavier_blocks_and_then_to_the_front():
    flat = curves_of([0.0] * 6, [0.0] * 6)
    assert blockskip.choose_skip_counts(flat, 3, [1, 1, 1, 5, 5, 5]) == (0, 3)
    assert blockskip.choose_skip_counts(flat, 3, [5, 5, 5, 1, 1, 1]) == (3, 0)
    assert blockskip.choose_skip_counts(flat, 3, [1, 5, 1, 1, 1, 5]) == (2, 1)
    assert blockskip.choose_skip_counts(flat, 3, [2] * 6) == (3, 0)
    noisy = curves_of([0.3, 0.1, 0.1 + 0.2 - 0.2, 0.3, 1, 1], [0.3, 0.3 - 1e-17, 0.3, 0.3, 1, 1])
    assert blockskip.choose_skip_counts(noisy, 2, [1, 9, 1, 1, 1, 1]) == (2, 0)
    with pytest.raises(ValueError, match="6"):
        blockskip.choose_skip_counts(flat, 6, [1] * 6)
    with pytest.raises(ValueError, match="5"):
        blockskip.choose_skip_counts(flat, 3, [1] * 5)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("carriers", "pair"), [({2}, (2, None)), ({1, 2}, (1, None)), ({3}, (3, None))], ids=str)
def test_the_choice_spares_the_blocks_that_carry_the_prompt(kind, carriers, pair):
    make, make_inputs = MODELS[kind]
    transformer = plant(make(), carriers)
    curves, spare = measured(transformer, make_inputs()), DEPTH[kind] - len(carriers)
    first, last = blockskip.choose_skip_counts(curves, spare, blockskip.block_parameters(transformer))
    assert (first, last) == (pair[0], spare - pair[0])
    for count in range(spare):  # with room to choose, still no carrying block, and as heavy as can be
        first, last = blockskip.choose_skip_counts(curves, count, blockskip.block_parameters(transformer))
        assert first <= min(carriers) and last <= DEPTH[kind] - 1 - max(carriers)


def test_curves_come_back_from_their_file(tmp_path):
    curves = measured(MODELS["flux"][0](), MODELS["flux"][1]())
    curves.save(tmp_path / "curves.json")
    assert blockskip.BlockCurves.load(tmp_path / "curves.json") == curves


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs
# ---------------------------------------------------------------------------------------------------------------------


def planted_command(case, planted, output, *extra, **options):
    folder, ratio, _ = planted
    model = ("--pretrained_model_name_or_path", folder)
    return case.command(CATS, output, *model, "--skip_ratio", ratio, *extra, **options)


def report_of(output):
    return json.loads((output / "run_report.json").read_text())


def test_a_run_measures_and_skips_all_but_the_blocks_that_carry_the_prompt(case, planted, tmp_path, monkeypatch):
    loaded, alive = [], []
    spy_on(monkeypatch, "load_transformer", after=lambda transformer, *_: loaded.append(weakref.ref(transformer)))

    def look(run):
        gc.collect()
        alive.extend(reference() for reference in loaded)

    spy_on(monkeypatch, "load_trainer", before=look)
    out = tmp_path / "out"
    case.run(planted_command(case, planted, out, "--learning_rate", 0.01))
    report, (first, last) = report_of(out), planted[2]
    assert (report["plan"]["skip_first"], report["plan"]["skip_last"]) == (first, last)
    assert report["plan"]["skip_source"] == "measured in this run"
    assert alive == [None]  # what was measured with is gone before the model to be trained is loaded
    names = [phase["name"] for phase in report["phases"]]
    assert names.index("encode prompts") < names.index("choose blocks") < names.index("load")
    curves = blockskip.BlockCurves.load(out / "block_curves.json")
    assert curves.first[first] == curves.last[last] == 0 < min(curves.first[first + 1], curves.last[last + 1])
    assert curves.metric == "prediction" and curves.samples == blockskip.PROBE_DRAWS
    given = tmp_path / "given"
    counts = ("--skip_first", first, "--skip_last", last)
    folder = ("--pretrained_model_name_or_path", planted[0])
    case.run(case.command(CATS, given, *folder, *counts, "--learning_rate", 0.01))
    assert_same_lora(out, given)  # measuring leaves no trace in the training


def test_measured_curves_serve_any_other_ratio(case, planted, tmp_path):
    case.run(planted_command(case, planted, tmp_path / "out"))
    file = tmp_path / "curves.json"
    shutil.move(tmp_path / "out" / "block_curves.json", file)
    flags = ("--skip_ratio", 0.5, "--block_curves", file)
    case.run(case.command(CATS, tmp_path / "other", "--pretrained_model_name_or_path", planted[0], *flags))
    plan = report_of(tmp_path / "other")["plan"]
    first, last = planted[2]
    assert plan["skip_first"] + plan["skip_last"] == case.depth // 2
    assert plan["skip_first"] <= first and plan["skip_last"] <= last
    assert plan["skip_source"] == f"curves {file}"
    assert not (tmp_path / "other" / "block_curves.json").exists()


def test_offloading_and_bf16_measure_as_well(case, planted, tmp_path):
    case.run(planted_command(case, planted, tmp_path / "plain"))
    case.run(planted_command(case, planted, tmp_path / "offloaded", "--offload"))
    case.run(planted_command(case, planted, tmp_path / "bf16", "--mixed_precision", "bf16"))
    plain, offloaded, bf16 = (
        blockskip.BlockCurves.load(tmp_path / name / "block_curves.json") for name in ("plain", "offloaded", "bf16")
    )
    assert plain.first == offloaded.first and plain.last == offloaded.last and plain.window == offloaded.window
    assert bf16.first != plain.first
    plan = report_of(tmp_path / "bf16")["plan"]
    assert (plan["skip_first"], plan["skip_last"]) == planted[2]


def test_probe_takes_every_photo_at_noise_levels_spread_over_the_table(case, tmp_path, monkeypatch):
    probes = []
    spy_on(monkeypatch, "probe_draws", after=lambda draws, *_: probes.append(draws))
    for name in ("one", "two"):
        case.run(case.command(CATS, tmp_path / name, "--skip_ratio", 0.5))
    assert probes[0] == probes[1]
    assert {draw.photo for draw in probes[0]} == set(range(5))
    sigmas = [draw.sigma for draw in probes[0]]
    assert sigmas == sorted(sigmas, reverse=True) and sigmas[0] > 0.9 and sigmas[-1] < 0.25
    assert len({draw.noise((3,)).sum().item() for draw in probes[0]}) == blockskip.PROBE_DRAWS


@pytest.mark.parametrize("moment", ["_precompute_group-2", "finish_step-3"])
def test_a_resumed_run_measures_nothing_again_and_ends_like_the_straight_one(
    case, planted, tmp_path, monkeypatch, moment
):
    flags = ("--checkpointing_steps", 2, "--learning_rate", 0.01)
    case.run(planted_command(case, planted, tmp_path / "straight", *flags, steps=4))
    name, count = moment.split("-")
    with monkeypatch.context() as patch:
        kill_at(patch, name, int(count))
        with pytest.raises(Killed):
            case.run(planted_command(case, planted, tmp_path / "killed", *flags, steps=4))
    spy_on(monkeypatch, "measure_curves", before=lambda *_: pytest.fail("measured again"))
    resume = ("--resume_from_checkpoint", "latest")
    case.run(planted_command(case, planted, tmp_path / "killed", *flags, *resume, steps=4))
    assert_same_lora(tmp_path / "straight", tmp_path / "killed")
    plans = [report_of(tmp_path / run)["plan"] for run in ("straight", "killed")]
    assert plans[0] == plans[1]
    case.run(planted_command(case, planted, tmp_path / "killed", *flags, *resume, steps=4))  # finished: nothing to do


def test_a_resumed_run_keeps_its_pair_even_without_the_curves(flux, tmp_path, monkeypatch):
    flags = ("--skip_ratio", 0.5, "--checkpointing_steps", 2)
    flux.run(flux.command(CATS, tmp_path, *flags, steps=2))
    pair = [report_of(tmp_path)["plan"][name] for name in ("skip_first", "skip_last")]
    (tmp_path / "block_curves.json").unlink()
    spy_on(monkeypatch, "measure_curves", before=lambda *_: pytest.fail("measured again"))
    flux.run(flux.command(CATS, tmp_path, *flags, "--resume_from_checkpoint", "latest", steps=4))
    plan = report_of(tmp_path)["plan"]
    assert [plan["skip_first"], plan["skip_last"]] == pair and plan["skip_source"] == "measured in this run"


def test_a_finished_run_without_a_checkpoint_is_known_for_what_it_is(flux, tmp_path, monkeypatch):
    flux.run(flux.command(CATS, tmp_path, "--skip_ratio", 0.5))
    (tmp_path / "block_curves.json").unlink()
    spy_on(monkeypatch, "encode_prompts", before=lambda *_: pytest.fail("a finished run went on"))
    flux.run(flux.command(CATS, tmp_path, "--skip_ratio", 0.5, "--resume_from_checkpoint", "latest"))


def test_other_photos_are_measured_anew_and_the_old_curves_kept(flux, colours, tmp_path):
    out = tmp_path / "out"
    flux.run(flux.command(CATS, out, "--skip_ratio", 0.5))
    before = (out / "block_curves.json").read_text()
    flux.run(flux.command(colours, out, "--skip_ratio", 0.5))
    assert (out / "earlier-1" / "block_curves.json").read_text() == before != (out / "block_curves.json").read_text()


def test_curves_in_the_output_folder_can_be_given_and_stay_there(flux, tmp_path):
    flux.run(flux.command(CATS, tmp_path, "--skip_ratio", 0.5))
    file = tmp_path / "block_curves.json"
    for flags in (("--skip_ratio", 0.6), ("--skip_ratio", 0.6, "--resume_from_checkpoint", "latest")):
        flux.run(flux.command(CATS, tmp_path, *flags, "--block_curves", file))
    assert report_of(tmp_path)["plan"]["skip_source"] == f"curves {file}" and file.exists()
    flux.run(flux.command(CATS, tmp_path, "--skip_first", 1))
    assert not file.exists() and (tmp_path / "earlier-2" / "block_curves.json").exists()


def test_processes_share_the_measurement_and_choose_alike(flux, tmp_path):
    flags = ("--skip_ratio", 0.5, "--keep_residuals")
    done = launch(flux.file, flux.command(CATS, tmp_path / "two", *flags), processes=2)
    assert done.returncode == 0, done.stderr
    flux.run(flux.command(CATS, tmp_path / "one", *flags))
    one, two = (blockskip.BlockCurves.load(tmp_path / name / "block_curves.json") for name in ("one", "two"))
    assert two.first == pytest.approx(one.first, rel=1e-5, abs=1e-9)
    assert two.last == pytest.approx(one.last, rel=1e-5, abs=1e-9) and two.samples == one.samples
    assert two.measured_on == one.measured_on
    shapes = []
    for path in (tmp_path / "two" / "residuals").glob("rank*.safetensors"):
        shapes.append({name: tuple(tensor.shape) for name, tensor in blockskip.load_file(path).items()})
    assert len(shapes) == 4 and all(shape == shapes[0] for shape in shapes)


# ---------------------------------------------------------------------------------------------------------------------
# Where the pair comes from, and what is refused
# ---------------------------------------------------------------------------------------------------------------------


def settled(cls, script, *flags, checkpoint=None):
    with torch.device("meta"):
        transformer = cls(guidance_embeds=True) if cls is FluxTransformer2DModel else cls()
    args = script.parse_args(["--pretrained_model_name_or_path", "m", *map(str, flags)])
    return blockskip.skip_counts(args, transformer, checkpoint)


@pytest.mark.parametrize(("ratio", "pair"), [(0.3, (7, 10)), (0.4, (13, 10)), (0.5, (19, 10))])
def test_flux_takes_the_published_pairs(ratio, pair):
    first, last, source = settled(FluxTransformer2DModel, flux_script, "--skip_ratio", ratio)
    assert (first, last) == pair and "published" in source and "2603.20755" in source


@pytest.mark.parametrize(
    ("cls", "script", "ratio", "count"),
    [
        (FluxTransformer2DModel, flux_script, 0.45, 26),
        (SanaTransformer2DModel, sana_script, 0.3, 6),
        (SanaTransformer2DModel, sana_script, 0.5, 10),
        (SanaTransformer2DModel, sana_script, 0.025, 1),  # halves are rounded up
        (SanaTransformer2DModel, sana_script, 0.125, 3),
    ],
)
def test_what_is_not_published_is_open_until_measured(cls, script, ratio, count):
    first, last, source = settled(cls, script, "--skip_ratio", ratio)
    assert first + last == count and source == blockskip.TO_BE_MEASURED
    assert first >= 1 and (last >= 1 or count == 1)  # as many residuals as any pair has


def test_curves_take_precedence_over_publications(tmp_path):
    curves = curves_of([0.0] * 57, [0.1 * (m > 0) for m in range(57)])
    curves.save(tmp_path / "c.json")
    flags = ("--skip_ratio", 0.5, "--block_curves", tmp_path / "c.json")
    assert settled(FluxTransformer2DModel, flux_script, *flags) == (29, 0, f"curves {tmp_path / 'c.json'}")


MISTAKES = {
    "--skip_ratio 0": ["--skip_ratio", "above 0"],
    "--skip_ratio 1": ["--skip_ratio", "between 0 and 1"],
    "--skip_ratio -0.5": ["--skip_ratio", "-0.5"],
    "--skip_ratio nan": ["--skip_ratio", "nan"],
    "--skip_ratio half": ["--skip_ratio", "half"],
    "--skip_ratio 0.5 --skip_first 2": ["--skip_ratio", "--skip_first", "--skip_last"],
    "--skip_ratio 0.5 --skip_last 2": ["--skip_ratio", "--skip_first", "--skip_last"],
    "--block_curves c.json": ["--block_curves", "--skip_ratio"],
    "--block_curves c.json --skip_first 2": ["--block_curves", "--skip_ratio"],
    "--skip_ratio 0.95": ["--skip_ratio 0.95", "8", "none to train", "0.875"],
    "--skip_ratio 0.06": ["--skip_ratio 0.06", "8", "skips none", "0.063"],
    "--skip_ratio 0.5 --block_curves c.json": ["--block_curves c.json", "No such file", "select_blocks.py"],
    "--skip_ratio 0.5 --block_curves .": ["--block_curves .", "directory"],
    "--skip_ratio 0.5 --lora_layers attn.to_typo": ["--lora_layers", "attn.to_typo"],
    "--skip_ratio 0.5 --max_train_steps 99999999999": ["free", "--num_draws"],
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_are_one_plain_line(flux, tmp_path, monkeypatch, capsys, flags):
    message = refusal(flux.command(CATS, tmp_path / "out", *flags.split(" ")), monkeypatch, capsys)
    assert all(part in message for part in MISTAKES[flags]), message


GOOD = {"depth": 8, "first": [0.0] * 8, "last": [0.0] * 8}
DAMAGED = {
    "not json": ("[", "not JSON"),
    "a list": ([1], "depth, first and last"),
    "nothing of it": ({"a": 1}, "depth, first and last"),
    "no last": ({"depth": 8, "first": [0.0] * 8}, "depth, first and last"),
    "depth of words": ({**GOOD, "depth": "eight"}, "'eight'"),
    "depth yes": ({**GOOD, "depth": True}, "True"),
    "too short": ({**GOOD, "first": [0.0] * 7}, "8 numbers as first"),
    "no list": ({**GOOD, "last": 0.0}, "8 numbers as last"),
    "text in it": ({**GOOD, "last": ["0.0"] * 8}, "last"),
    "not a number": ({**GOOD, "last": [float("nan")] * 8}, "last"),
    "negative": ({**GOOD, "first": [-0.1] * 8}, "first"),
    "window too short": ({**GOOD, "window": [0.0], "window_size": 2}, "window"),
    "window beyond": ({**GOOD, "window": [0.0], "window_size": 9}, "window_size"),
    "another depth": ({"depth": 5, "first": [0.0] * 5, "last": [0.0] * 5}, "5 blocks"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_curves_that_do_not_fit_are_one_plain_line(flux, tmp_path, monkeypatch, capsys, name):
    content, part = DAMAGED[name]
    file = tmp_path / "c.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    flags = ("--skip_ratio", 0.5, "--block_curves", file)
    message = refusal(flux.command(CATS, tmp_path / "out", *flags), monkeypatch, capsys)
    assert f"--block_curves {file}" in message and part in message


def test_curves_by_hand_need_no_more_than_the_two_curves(flux, tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({**GOOD, "last": [0.0, *[0.5] * 7]}))
    flux.run(flux.command(CATS, tmp_path / "out", "--skip_ratio", 0.5, "--block_curves", file))
    plan = report_of(tmp_path / "out")["plan"]
    assert (plan["skip_first"], plan["skip_last"]) == (4, 0)


def test_resuming_with_other_curves_is_refused(flux, tmp_path, monkeypatch, capsys):
    for name, last in (("one", 0.5), ("two", 0.0)):
        content = {**GOOD, "last": [0.0, *[last] * 7], "first": [0.0, *[0.5 - last] * 7]}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    flags = ("--skip_ratio", 0.5, "--checkpointing_steps", 1, "--block_curves")
    flux.run(flux.command(CATS, tmp_path / "out", *flags, tmp_path / "one.json"))
    flags = (*flags, tmp_path / "two.json", "--resume_from_checkpoint", "latest")
    message = refusal(flux.command(CATS, tmp_path / "out", *flags, steps=4), monkeypatch, capsys)
    assert "skip counts [4, 0]" in message and "[0, 4]" in message


def test_residuals_of_another_pair_are_refused_once_it_is_measured(flux, tmp_path):
    out = tmp_path / "out"
    flux.run(flux.command(CATS, out, "--skip_first", 3, "--skip_last", 2, "--keep_residuals"))
    before = {path.name for path in (out / "residuals").iterdir()}
    with pytest.raises(SystemExit, match="skip counts"):
        flux.run(flux.command(CATS, out, "--skip_ratio", 0.5))
    assert {path.name for path in (out / "residuals").iterdir()} == before
