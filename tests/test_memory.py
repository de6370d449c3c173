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
"""The memory meter.

These fail if the meter counts a view twice or drops a storage that a view or the autograd graph still holds, if fake
tensors take another amount than real ones, if attention is left out, or if the real shapes leave their limits.
"""

import contextlib
import gc
import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import blockskip_utils as blockskip
from conftest import ROOT, make_flux, make_sana

MIB, GIB = 2**20, 2**30
CONFIGS = {"flux": dict(make_flux().config), "sana": dict(make_sana().config)}
CONFIGS["flux"]["_class_name"], CONFIGS["sana"]["_class_name"] = "FluxTransformer2DModel", "SanaTransformer2DModel"


@pytest.fixture
def on_real_tensors(monkeypatch):
    """Make estimate_memory run the same step on real weights and real tensors."""

    def patch():
        monkeypatch.setattr(blockskip, "fake_tensors", contextlib.nullcontext)

    return patch


@pytest.mark.parametrize(
    ("dtype", "lora_dtype"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")], ids=lambda x: str(x)
)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("skips", [(0, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_fake_and_real_tensors_give_the_same_estimate(on_real_tensors, kind, skips, checkpointing, dtype, lora_dtype):
    options = {"skip_first": skips[0], "skip_last": skips[1], "rank": 2, "batch_size": 2, "text_tokens": 7}
    options |= {"resolution": 64, "gradient_checkpointing": checkpointing, "dtype": dtype, "lora_dtype": lora_dtype}
    fake = blockskip.estimate_memory(CONFIGS[kind], **options)
    on_real_tensors()
    assert blockskip.estimate_memory(CONFIGS[kind], **options) == fake


@pytest.mark.parametrize("kind", CONFIGS)
def test_estimate_of_residuals_and_parameters_is_what_the_model_has(kind):
    make = {"flux": make_flux, "sana": make_sana}[kind]
    result = blockskip.estimate_memory(
        CONFIGS[kind], resolution=64, skip_first=2, skip_last=1, rank=3, text_tokens=7, residual_dtype="fp32"
    )
    tokens = {"flux": 4 * 4 * 2 + 7, "sana": 2 * 2 * 2}[kind]  # the image's for both spans, the text's for the first
    assert result["residual_bytes"] == tokens * 16 * 4
    transformer = make()
    layers = blockskip.block_layout(transformer).lora_layers
    targets = blockskip.lora_target_names(transformer, 2, 1, layers)
    shapes = [transformer.get_submodule(name).weight.shape for name in targets]
    assert result["lora_parameters"] == sum(3 * (rows + columns) for rows, columns in shapes)


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_meter_counts_each_storage_once_for_as_long_as_it_lives(fake):
    with FakeTensorMode() if fake else contextlib.nullcontext():
        weight = torch.zeros(MIB // 4)  # 1 MiB
        with blockskip.MemoryMeter() as meter:
            meter.watch([weight, weight.view(2, -1), weight[3:]])
            assert meter.live_bytes == MIB
            view = torch.ones(2, MIB // 4)[0].view(4, -1)  # holds all 2 MiB
            view.mul_(2)
            torch.add(view, 1, out=view)
            assert meter.live_bytes == 3 * MIB
            del view
            assert meter.live_bytes == MIB
            double = weight.double()
            del double
            assert (meter.live_bytes, meter.peak_bytes) == (MIB, 3 * MIB)


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_meter_counts_what_autograd_keeps_and_the_gradients(fake):
    with FakeTensorMode() if fake else contextlib.nullcontext():
        x = torch.ones(MIB // 4, requires_grad=True)  # 1 MiB
        with blockskip.MemoryMeter() as meter:
            meter.watch([x])
            loss = x.exp().exp().sum()  # keeps both results, whose names are gone
            assert meter.live_bytes == 3 * MIB + 4
            loss.backward()
            del loss
            gc.collect()
            assert meter.live_bytes == 2 * MIB  # x and its gradient


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_flops_of_one_attention_and_one_linear(checkpointing):
    q = torch.randn(2, 3, 8, 16, requires_grad=True)  # (B, heads, tokens, width)
    weight = torch.randn(5, 16)

    def run(q):
        return torch.nn.functional.linear(torch.nn.functional.scaled_dot_product_attention(q, q, q), weight)

    def step():
        result = torch.utils.checkpoint.checkpoint(run, q, use_reentrant=False) if checkpointing else run(q)
        result.sum().backward()

    product = 2 * (2 * 3 * 8 * 8 * 16)  # one of q k^T and p v
    linear = 2 * (2 * 3 * 8) * 16 * 5
    forward = 2 * product + linear
    backward = 5 * product + linear  # flash attention computes q k^T once more
    # the recomputation stops once it has what the backward needs, which the result of the last product is not
    again = 2 * product if checkpointing else 0
    assert blockskip.count_flops(step) == forward + backward + again


def real_shape(model):
    return json.loads((ROOT / "examples" / "configs" / model / "transformer" / "config.json").read_text())


def test_flux_dev_with_half_of_its_blocks_skipped_stays_within_its_limit():
    options = {"resolution": 256, "skip_first": 19, "skip_last": 10, "rank": 128}
    result = blockskip.estimate_memory(real_shape("FLUX.1-dev"), **options)
    assert result["peak_bytes"] <= 9.7 * GIB
    assert result["residual_bytes"] == (256 + 512 + 256) * 3072 * 2
    in_fp32 = blockskip.estimate_memory(real_shape("FLUX.1-dev"), **options, lora_dtype="fp32")
    assert in_fp32["peak_bytes"] <= 10.42 * GIB  # what the paper reads on a GPU


def test_flux_dev_without_skipping_reads_what_is_known():
    result = blockskip.estimate_memory(real_shape("FLUX.1-dev"), resolution=512, rank=128)
    assert result["peak_bytes"] == pytest.approx(32.42 * GIB, rel=0.01)


@pytest.mark.parametrize(
    ("skips", "resolution", "checkpointing", "lora_dtype", "limit"),
    [
        ((5, 5), 512, False, "bf16", 2.1),
        ((5, 5), 512, False, "fp32", 2.1),
        ((5, 5), 512, True, "fp32", 1.7),
        ((0, 0), 512, False, "bf16", 3.9),
        ((0, 0), 1024, False, "bf16", 6.4),
    ],
    ids=str,
)
def test_sana_stays_within_its_limits(skips, resolution, checkpointing, lora_dtype, limit):
    options = {"skip_first": skips[0], "skip_last": skips[1], "gradient_checkpointing": checkpointing}
    config = real_shape("Sana_1600M_1024px")
    result = blockskip.estimate_memory(config, resolution=resolution, **options, lora_dtype=lora_dtype)
    assert 0.9 * limit * GIB <= result["peak_bytes"] <= limit * GIB


def test_nothing_left_to_train_is_refused():
    with pytest.raises(ValueError, match="depth of 8"):
        blockskip.estimate_memory(CONFIGS["flux"], resolution=64, skip_first=3, skip_last=5)
