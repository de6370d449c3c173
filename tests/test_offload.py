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
"""Weights that pass through the device with --offload, and weights that are given up.

These fail if an offloaded run stores other residuals or draws other images, if two layers' weights are on the device
at once, if a weight is read that is not there, if something is left offloaded or in tiles that was not before, or if
host memory keeps what no later phase needs.
"""

import argparse
import types
import weakref

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.hooks import HookRegistry, group_offloading
from diffusers.hooks.group_offloading import ModuleGroup
from safetensors.torch import load_file
from test_quantization import NF4, write_json
from test_runs import spy_on
from torch import nn

import blockskip_utils as blockskip
from conftest import CATS, is_estimate, make_flux, make_sana


def groups_of(module):
    """The groups of weights that pass through the device for a module, by the layer that fetches them."""
    hooks = {}
    for layer in module.modules():
        registry = getattr(layer, "_diffusers_hook", None)
        hook = registry.get_hook("group_offloading") if registry else None
        if hook:
            hooks[layer] = hook.group
    return hooks


def own_tensors(group):
    tensors = [*group.parameters, *group.buffers]
    return tensors + [t for module in group.modules for t in (*module.parameters(), *module.buffers())]


class Passage:
    """Watches the groups on the device; `most` counts the layers there at once, without a block's own parameters."""

    def __init__(self, monkeypatch):
        self.there, self.fetched, self.most = {}, set(), 0
        onload, offload = ModuleGroup.onload_, ModuleGroup.offload_

        def enter(group):
            parents = [other for other in self.there if other is not group]
            inside = [set(other.offload_leader.modules()) for other in parents]
            assert all(group.offload_leader in modules for modules in inside), "a group stayed on the device"
            self.there[group] = None
            self.fetched.add(group)
            self.most = max(self.most, sum(bool(one.modules) for one in self.there))
            onload(group)

        def leave(group):
            self.there.pop(group, None)
            offload(group)

        monkeypatch.setattr(ModuleGroup, "onload_", enter)
        monkeypatch.setattr(ModuleGroup, "offload_", leave)


@pytest.fixture
def hurried(case, monkeypatch):
    """Draw images in two steps, since only their being the same matters here, and leave out the estimates."""
    monkeypatch.setattr(blockskip, "estimate_run", lambda run: None)
    draw = case.family.pipeline_class.__call__
    hurry = lambda self, **options: draw(self, num_inference_steps=2, **options)  # noqa: E731
    monkeypatch.setattr(case.family.pipeline_class, "__call__", hurry)


@pytest.mark.usefixtures("hurried")
def test_offloaded_run_stores_the_same_residuals_and_draws_the_same_images(case, tmp_path, monkeypatch):
    flags = (*case.skip, "--validation_prompt", "x", "--num_validation_images", 1)
    flags = (*flags, "--validation_epochs", 1, "--with_prior_preservation", "--class_prompt", "c")
    flags = (*flags, "--num_class_images", 1, "--num_draws", 2, "--residual_refresh_steps", 5)

    def run(name, *more):
        class_images = ("--class_data_dir", tmp_path / name / "class")
        case.run(case.command(CATS, tmp_path / name / "out", *flags, *class_images, *more, steps=7))

    stored = []
    spy_on(monkeypatch, "precompute", after=lambda _, run, *rest: stored.append(contents(run.store().folder)))
    run("without")
    placed, empty = [], []
    passage = Passage(monkeypatch)

    def look(result, run, module, **options):
        groups = groups_of(module)
        carried = {id(tensor) for group in groups.values() for tensor in own_tensors(group)}
        assert {id(tensor) for tensor in (*module.parameters(), *module.buffers())} == carried
        placed.append((type(module).__name__, set(groups.values())))

    spy_on(monkeypatch, "place", after=look)

    def is_over(run, trainer, *rest):
        empty.append(not passage.there and not groups_of(trainer.transformer))

    spy_on(monkeypatch, "finish_step", before=is_over)
    run("with", "--offload")
    assert empty == [True] * 7 and not passage.there and passage.most == 1
    names = [name for name, _ in placed]
    encoders = [name for name in case.family.text_components if name.startswith("text")]
    blocks = case.skip[1] + case.skip[3]
    assert names.count(case.family.transformer_class.__name__) == 2  # class images, images at the end
    assert sum(name.startswith("Autoencoder") for name in names) == 2 + 3  # these; two periods, images in training
    assert sum(name.endswith("Block") for name in names) == 3 * blocks
    assert names.count("Linear") == 3 * {"FLUX": 4, "SANA": 0}[case.family.name]  # modulations of the trained blocks
    assert len(names) == len(encoders) + 2 + 5 + 3 * blocks + names.count("Linear")
    for name, groups in placed:
        assert groups & passage.fetched, name  # each of them had its turn
    one, other = (contents(tmp_path / name) for name in ("without", "with"))
    assert len([path for path in one if path.suffix == ".png"]) == 3
    assert [len(period) for period in stored] == [2 * 2, 2 * 2 + 1] * 2  # draws of two kinds; the LoRA made with
    assert stored[:2] == stored[2:]
    assert one.keys() == other.keys()
    for path in one:
        assert one[path] == other[path], path


def contents(folder):
    """The tensors and images below a folder, as bytes; in what order safetensors writes its metadata is chance."""
    found = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.png")}
    for path in folder.rglob("*.safetensors"):
        tensors = load_file(path).items()
        found[path.relative_to(folder)] = [
            (name, t.dtype, t.flatten().view(torch.uint8).tolist()) for name, t in tensors
        ]
    return found


@pytest.fixture
def elsewhere(monkeypatch):
    """Make "meta" a device that weights really pass through: they are put back as they were when they leave it."""
    kept = {}

    def places(group):
        wanted = {id(tensor) for tensor in own_tensors(group)}
        for held in (group.offload_leader._parameters, group.offload_leader._buffers):
            yield from ((held, name) for name, tensor in held.items() if id(tensor) in wanted)

    def onload(group):
        kept[group] = [(held, name, held[name]) for held, name in places(group)]
        for held, name, tensor in kept[group]:
            moved = tensor.detach().to("meta")
            held[name] = nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved

    def offload(group):
        for held, name, tensor in kept.pop(group, ()):
            held[name] = tensor

    monkeypatch.setattr(ModuleGroup, "onload_", onload)
    monkeypatch.setattr(ModuleGroup, "offload_", offload)
    monkeypatch.setattr(group_offloading, "TorchDeviceBackend", lambda device: None, raising=False)  # it knows no meta
    args = argparse.Namespace(offload=True)
    return types.SimpleNamespace(args=args, accelerator=types.SimpleNamespace(device=torch.device("meta"))), kept


def passes(case):
    """A forward pass on the meta device of every module that is ever placed, by its name."""
    parts = DiffusionPipeline.from_pretrained(case.pipeline).components
    ids = torch.ones(1, 8, dtype=torch.long, device="meta")
    for name in ("text_encoder", "text_encoder_2"):
        if name in parts:
            yield name, parts[name], lambda encoder: encoder(ids)[0]
    vae, side = parts["vae"], 64 // case.family.pixels_per_cell
    yield "vae encode", vae, lambda vae: vae.encode(torch.zeros(1, 3, 64, 64, device="meta"), return_dict=False)[0]
    latents = torch.zeros(1, vae.config.latent_channels, side, side, device="meta")
    yield "vae decode", vae, lambda vae: vae.decode(latents, return_dict=False)[0]
    inputs, _ = blockskip.fake_batch(parts["transformer"], 64, 1, 8, torch.float32)
    inputs = {name: tensor.to("meta") for name, tensor in inputs.items()}
    yield "transformer", parts["transformer"], lambda model: model(**inputs, return_dict=False)[0]


@torch.no_grad()
def test_nothing_is_read_that_is_not_on_the_device_at_that_moment(case, elsewhere, monkeypatch):
    run, there = elsewhere
    passage = Passage(monkeypatch)
    for name, module, forward in passes(case):
        before = dict(module.named_parameters())
        blockskip.place(run, module)
        assert {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} == {"cpu"}
        passage.fetched.clear()
        result = forward(module)  # a weight that had stayed in host memory would not go together with meta tensors
        result = getattr(result, "parameters", result)  # of a posterior
        assert result.device.type == "meta", name
        assert len(passage.fetched) > 4 and passage.most == 1 and not there and not passage.there
        blockskip.take_back(module)
        assert not groups_of(module)
        after = dict(module.named_parameters())
        assert after.keys() == before.keys() and all(after[key] is before[key] for key in after)


@torch.no_grad()
def test_a_single_layer_passes_through_and_is_taken_back(elsewhere):
    run, there = elsewhere
    layer, x = nn.Linear(4, 8), torch.randn(3, 4)
    wanted = layer(x)
    blockskip.place(run, layer)
    assert layer(x).device.type == "meta" and layer.weight.device.type == "cpu" and not there
    blockskip.take_back(layer)
    assert torch.equal(layer(x), wanted)


def test_taking_back_what_was_placed_without_offload_changes_nothing():
    run = types.SimpleNamespace(
        args=argparse.Namespace(offload=False), accelerator=types.SimpleNamespace(device=torch.device("cpu"))
    )
    model = make_flux()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    blockskip.place(run, model)
    blockskip.take_back(model)
    assert not groups_of(model) and not HookRegistry.check_if_exists_or_initialize(model).hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def watch_vae(monkeypatch, tile):
    """Record, for every pass of a VAE's two halves, the side of its input in pixels and whether it may use tiles."""
    seen = {"encoder": [], "decoder": []}

    def watch(vae, run):
        monkeypatch.setattr(blockskip, "TILE", tile)
        if hasattr(vae, "tile_sample_stride_width"):  # its own tiles have the size of TILE
            half = tile // 2
            vae.enable_tiling(tile, tile, half, half)
            vae.use_tiling = run.args.enable_vae_tiling
        scale = {"encoder": 1, "decoder": run.family.pixels_per_cell}
        for name in seen:

            def look(half, inputs, name=name):
                if not is_estimate():
                    seen[name].append((inputs[0].shape[-1] * scale[name], vae.use_tiling))

            getattr(vae, name).register_forward_pre_hook(look)

    spy_on(monkeypatch, "load_vae", after=watch)
    return seen


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("enabled", [False, True], ids=["tiles with --offload", "tiles throughout"])
def test_large_images_are_decoded_in_tiles_and_photos_encoded_as_before(case, tmp_path, monkeypatch, enabled):
    tile = case.resolution // 2
    seen = watch_vae(monkeypatch, tile)
    flags = (*case.skip, "--offload", "--validation_prompt", "x", "--num_validation_images", 1)
    flags = (*flags, "--validation_epochs", 1, "--with_prior_preservation", "--class_prompt", "c")
    flags = (*flags, "--num_class_images", 1, "--num_draws", 1, "--residual_refresh_steps", 5)
    flags = (*flags, "--enable_vae_tiling") if enabled else flags
    case.run(case.command(CATS, tmp_path / "out", *flags, "--class_data_dir", tmp_path / "class", steps=6))
    assert seen["encoder"] == [(tile, enabled)] * 4  # two draws before and two after the images in training
    assert len(seen["decoder"]) >= 3 * 4  # class image, in training, at the end: of four tiles and more
    assert all(side <= tile and in_tiles for side, in_tiles in seen["decoder"])


@pytest.mark.usefixtures("hurried")
def test_images_no_larger_than_a_tile_are_decoded_whole(case, tmp_path, monkeypatch):
    seen = watch_vae(monkeypatch, case.resolution)
    flags = (*case.skip, "--offload", "--validation_prompt", "x", "--num_validation_images", 1)
    case.run(case.command(CATS, tmp_path / "out", *flags, steps=1))
    assert [side for side, _ in seen["decoder"]] == [case.resolution]


HELD = {
    "plain": ((), True),
    "offloaded": (("--offload",), True),
    "quantised": (("--bnb_quantization_config_path", "nf4.json"), True),
    "images at the end only": (("--validation_prompt", "x", "--num_validation_images", 1), True),
    "images in training": (("--validation_prompt", "x", "--num_validation_images", 1, "--repeats", 1), False),
    "refreshed": (("--residual_refresh_steps", 2), False),
}


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("kind", HELD)
def test_skipped_blocks_modulations_and_vae_are_given_up_unless_wanted_again(case, tmp_path, monkeypatch, kind):
    flags, are_freed = HELD[kind]
    flags = [write_json(tmp_path / flag, NF4) if flag == "nf4.json" else flag for flag in flags]
    watched, alive = {}, []

    def watch(transformer, run, dtype):
        if watched:  # the model of the last images
            return
        for name, parameter in transformer.named_parameters():
            is_modulation = name.startswith(case.trained) and name.split(".")[-2] == "linear"
            is_skipped = "transformer_blocks." in name and not name.startswith(case.trained)
            if is_skipped or is_modulation:
                watched[name] = weakref.ref(parameter)

    spy_on(monkeypatch, "load_transformer", after=watch)
    spy_on(monkeypatch, "load_vae", after=lambda vae, run: watched.setdefault("vae", weakref.ref(vae.decoder)))
    spy_on(
        monkeypatch, "finish_step", before=lambda *a: alive.append({n for n, r in watched.items() if r() is not None})
    )
    steps = 6 if kind == "images in training" else 3
    case.run(case.command(CATS, tmp_path / "out", *case.skip, *flags, steps=steps))
    assert any(name.endswith("linear.weight") and name.startswith(case.trained) for name in watched) == (
        case.family.name == "FLUX"
    )
    assert len(watched) > 50 and alive == [set() if are_freed else set(watched)] * steps


def test_layers_are_fetched_ahead_only_where_diffusers_waits_for_them(monkeypatch):
    asked = []
    monkeypatch.setattr(
        blockskip, "apply_group_offloading", lambda module, use_stream=False, **options: asked.append(use_stream)
    )
    run = types.SimpleNamespace(
        args=argparse.Namespace(offload=True), accelerator=types.SimpleNamespace(device=torch.device("cuda"))
    )
    flux, sana = make_flux(), make_sana()
    for module, whole in (
        (flux, True),
        (flux, False),  # blocks of it, and a VAE, whose layers run in more than one order
        (sana, True),  # has a parameter of its own, which diffusers would not wait for
        (flux.single_transformer_blocks[0].norm.linear, True),
    ):
        blockskip.place(run, module, whole=whole)
    assert asked == [True, False, False, False]
