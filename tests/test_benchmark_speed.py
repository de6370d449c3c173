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
"""The benchmark of speed, on a model of two million parameters: what it compares, not how fast this machine is.

These fail if the two ways of training do not take turns, if BlockSkip trains at another size or on other blocks than
asked for, if reading the next batch is hidden behind a step of the other way, or if a ratio is not of what was
measured.
"""

import json
import statistics
import time

import pytest

import benchmark_speed
import blockskip_utils as blockskip
from conftest import ROOT, reset_accelerate

FLAGS = {
    "--double_blocks": 2,
    "--single_blocks": 4,
    "--heads": 1,
    "--skip_first": 2,
    "--skip_last": 1,
    "--rank": 4,
    "--resolution": 64,
    "--text_tokens": 16,
    "--warmup": 1,
    "--steps": 10,
    "--num_draws": 4,
}


def benchmark(output, **flags):
    reset_accelerate()
    given = FLAGS | {f"--{name}": value for name, value in flags.items()} | {"--output": output}
    benchmark_speed.main(benchmark_speed.parse_args([str(word) for pair in given.items() for word in pair]))
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The results of a benchmark of four pairs, and for each optimizer step how many tokens and LoRAs it had."""
    steps, train_on_batch = [], blockskip.train_on_batch

    def noted(run, trainer, batch, prompts, losses):
        before = trainer.parameters[1].clone()  # a B matrix, all zeros at first
        train_on_batch(run, trainer, batch, prompts, losses)
        moved = not before.equal(trainer.parameters[1])
        steps.append((batch.latents.shape[-1], sorted(batch.residuals), len(trainer.parameters), moved))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockskip, "train_on_batch", noted)
        return benchmark(tmp_path_factory.mktemp("speed") / "speed.json", pairs=4), steps


def test_each_pair_holds_two_real_steps_of_both_ways(measured):
    _, steps = measured
    timed = steps[-16:]
    assert [size for size, *_ in timed] == [4, 4, 8, 8, 8, 8, 4, 4] * 2  # latent cells: 32 px, 64 px
    skipped = ["first.encoder_hidden_states", "first.hidden_states", "last.hidden_states"]
    lora_of_blocks = {8: 2 * 12 + 4 * 3, 4: 3 * 3}  # layers with a LoRA: 12 in a double block, 3 in a single one
    for size, residuals, parameters, moved in timed:
        assert [key for key in residuals if "modulation" not in key] == (skipped if size == 4 else [])
        assert sum("modulation" in key for key in residuals) == (3 if size == 4 else 0)  # of single blocks, one each
        assert parameters == 2 * lora_of_blocks[size] and moved


def test_flops_are_those_of_the_meter(measured):
    results, _ = measured
    config = json.loads((ROOT / "examples/configs/FLUX.1-dev/transformer/config.json").read_text())
    config |= {"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 1}
    config |= {"in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 32}  # of the tiny other parts
    shape = {"rank": 4, "text_tokens": 16, "dtype": "fp32"}
    plain = blockskip.estimate_memory(config, resolution=64, **shape)["flops_per_step"]
    ours = blockskip.estimate_memory(
        config, resolution=32, skip_first=2, skip_last=1, stored_modulations=True, **shape
    )["flops_per_step"]
    assert (results["plain"]["flops_per_step"], results["blockskip"]["flops_per_step"]) == (plain, ours)
    assert results["flop_ratio"] == ours / plain


def test_ratios_are_of_what_was_measured(measured):
    results, _ = measured
    plain, ours = results["plain"], results["blockskip"]
    for way in (plain, ours):
        assert len(way["step_seconds"]) == len(way["wait_seconds"]) == 4
        assert all(0 < wait < step for wait, step in zip(way["wait_seconds"], way["step_seconds"], strict=True))
        assert way["waiting_share"] == pytest.approx(sum(way["wait_seconds"]) / sum(way["step_seconds"]))
        assert way["precompute_seconds"] > 0 and way["reading_seconds"] > 0
    ratios = [a / b for a, b in zip(ours["step_seconds"], plain["step_seconds"], strict=True)]
    step_ratio = statistics.median(ratios)
    assert results["step_ratio"]["median"] == pytest.approx(step_ratio)
    assert results["step_ratio"]["extremes"] == pytest.approx([min(ratios), max(ratios)])
    run = (10 * step_ratio + 4 * ours["precompute_steps"]) / (10 + 4 * plain["precompute_steps"])
    assert results["run_ratio"] == pytest.approx(run)


def test_slow_reading_shows_as_waiting(tmp_path, monkeypatch, capsys):
    read = blockskip.ResidualStore.read

    def slow(store, draw):
        time.sleep(0.2)
        return read(store, draw)

    monkeypatch.setattr(blockskip.ResidualStore, "read", slow)
    results = benchmark(tmp_path / "speed.json", pairs=1)
    for way in (results["plain"], results["blockskip"]):
        # reading begins with the step or a moment before it, so both together cannot be done any sooner
        assert way["step_seconds"][0] > 0.19
        assert way["reading_seconds"] >= 0.2
    assert f"{results['blockskip']['waiting_share']:.2%}" in capsys.readouterr().out


def test_a_size_whose_half_no_model_takes_is_one_plain_line(tmp_path):
    with pytest.raises(SystemExit, match="error: --resolution 48 "):
        benchmark(tmp_path / "speed.json", resolution=48)
