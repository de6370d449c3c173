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
"""Stored draws on disk.

These fail if a damaged, half-written or foreign file is taken for a good one, or if a file of the user's is deleted.
"""

import dataclasses

import pytest
import torch
from test_draws import make_source

import blockskip_utils as blockskip

FINGERPRINT = {"seed": 0, "period": [0, None, None]}


@pytest.fixture
def store(tmp_path):
    store = blockskip.ResidualStore(tmp_path / "residuals", torch.bfloat16)
    store.begin(FINGERPRINT)
    return store


@pytest.fixture
def draw():
    return make_source().sample(3)[0]


def fill(store, draw, scale=1.0):
    latents, residual = torch.randn(4, 2, 2), torch.randn(5, 6) * scale
    store.write(draw, latents, {"last.hidden_states": residual})
    return latents, residual


def test_what_was_written_is_read(store, draw):
    latents, residual = fill(store, draw)
    tensors = store.read(draw)
    assert torch.equal(tensors["latents"], latents) and tensors["latents"].dtype == torch.float32
    assert torch.equal(tensors["last.hidden_states"], residual.bfloat16())
    assert store.holds(draw) and not list(store.folder.glob("*.partial"))


@pytest.mark.parametrize("cut", [0, 1, 7, 100, -1])
def test_a_file_cut_short_is_not_used(store, draw, cut):
    fill(store, draw)
    data = store.path(draw).read_bytes()
    store.path(draw).write_bytes(data[:cut])
    assert not store.holds(draw)
    with pytest.raises(blockskip.DamagedResidual, match=draw.name):
        store.read(draw)


def test_a_flipped_bit_anywhere_in_the_tensors_is_found(store, draw):
    fill(store, draw)
    data = bytearray(store.path(draw).read_bytes())
    for place in (-1, -30, -60, -100):
        data[place] ^= 16
        store.path(draw).write_bytes(data)
        assert not store.holds(draw)
        data[place] ^= 16
    store.path(draw).write_bytes(data)
    assert store.holds(draw)


@pytest.mark.parametrize(
    "change", [{"prompt": "x"}, {"sigma": 0.5}, {"photo": 2}, {"flip": True}, {"left": 0.0}], ids=str
)
def test_a_file_of_another_draw_is_not_used(store, draw, change):
    fill(store, draw)
    assert not store.holds(dataclasses.replace(draw, **change))


def test_an_interrupted_write_leaves_nothing_that_looks_whole(store, draw, monkeypatch):
    def die_half_way(tensors, path, metadata=None):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(blockskip, "save_file", die_half_way)
    with pytest.raises(KeyboardInterrupt):
        fill(store, draw)
    assert not store.holds(draw) and [path.name for path in store.folder.iterdir()] == ["manifest.json"]


def test_overflow_in_fp16_is_an_error_and_not_an_infinity(tmp_path, draw):
    store = blockskip.ResidualStore(tmp_path / "half", torch.float16)
    store.begin(FINGERPRINT)
    with pytest.raises(blockskip.ResidualOverflow, match="residual_dtype"):
        fill(store, draw, scale=1e6)


def test_another_fingerprint_clears_only_the_stores_own_files(store, draw):
    fill(store, draw)
    (store.folder / "rank0-000001-instance.safetensors.partial").write_bytes(b"half")
    (store.folder / "mine.txt").write_text("keep")
    store.begin(FINGERPRINT)
    assert store.holds(draw) and not list(store.folder.glob("*.partial"))
    store.begin({**FINGERPRINT, "seed": 1})
    assert not store.holds(draw) and (store.folder / "mine.txt").exists()
    assert store.manifest()["fingerprint"]["seed"] == 1
    store.remove()
    assert [path.name for path in store.folder.iterdir()] == ["mine.txt"]
    (store.folder / "mine.txt").unlink()
    store.remove()
    assert not store.folder.exists()


def test_weights_digest_sees_a_change_in_any_tensor_and_any_config(tmp_path):
    folder = tmp_path / "model" / "transformer"
    folder.mkdir(parents=True)

    def digest(second, config="{}"):
        blockskip.save_file({"a": torch.zeros(9000), "b": second}, folder / "weights.safetensors")
        (folder / "config.json").write_text(config)
        return blockskip.weights_digest(str(folder.parent))

    one = digest(torch.zeros(7))
    (folder.parent / "for-another-program.safetensors").write_bytes(b"anything")
    assert digest(torch.zeros(7)) == one
    assert digest(torch.ones(7)) != one
    assert digest(torch.zeros(8)) != one
    assert digest(torch.zeros(7), '{"x": 1}') != one
