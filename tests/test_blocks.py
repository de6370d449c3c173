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
"""Recording residuals and skipping blocks.

These fail if a residual is taken from the wrong block or stream, is added twice or not at all, if a LoRA lands on a
skipped block or where no gradient reaches it, if skipped weights stay alive, or if restoring leaves anything changed.
"""

import copy
import gc
import weakref

import pytest
import torch
from peft import LoraConfig

import blockskip_utils as blockskip
from conftest import flux_inputs, legal_counts, make_flux, make_sana, sana_inputs

MODELS = {"flux": (make_flux, flux_inputs), "sana": (make_sana, sana_inputs)}
LORA_LAYERS = {
    "flux": blockskip.LAYOUTS["FluxTransformer2DModel"].lora_layers,
    "sana": ("to_k", "to_q", "to_v", "to_out.0", "conv_inverted", "conv_point"),
}
DEPTH = {"flux": 8, "sana": 5}
EVERY = [(kind, *counts) for kind in MODELS for counts in legal_counts(DEPTH[kind])]
every_model_and_count = pytest.mark.parametrize(
    ("kind", "counts"), [(kind, (n, m)) for kind, n, m in EVERY], ids=[f"{kind}-{n}-{m}" for kind, n, m in EVERY]
)


def with_lora(transformer, skip_first, skip_last, layers, random_b=True):
    """Add a LoRA on the middle blocks, with random B so that every factor gets a gradient."""
    targets = blockskip.lora_target_names(transformer, skip_first, skip_last, layers)
    transformer.requires_grad_(False)
    torch.manual_seed(3)
    transformer.add_adapter(LoraConfig(r=2, lora_alpha=2, init_lora_weights="gaussian", target_modules=targets))
    if random_b:
        for name, parameter in transformer.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return transformer


def recorded(transformer, skip_first, skip_last, inputs):
    with blockskip.record_residuals(transformer, skip_first, skip_last) as recording, torch.no_grad():
        output = transformer(**inputs)[0]
    return recording.residuals, output


def by_hand(transformer, skip_first, skip_last, residuals, inputs):
    """The method without hooks: embed, + residual, kept blocks, + residual, head."""
    method = flux_by_hand if "img_ids" in inputs else sana_by_hand
    return method(transformer, skip_first, skip_last, residuals, inputs)


def sana_by_hand(transformer, skip_first, skip_last, residuals, inputs):
    noisy, mask = inputs["hidden_states"], inputs["encoder_attention_mask"]
    batch, _, height, width = noisy.shape
    hidden = transformer.patch_embed(noisy)
    time, embedded_time = transformer.time_embed(inputs["timestep"], batch_size=batch, hidden_dtype=hidden.dtype)
    text = transformer.caption_norm(transformer.caption_projection(inputs["encoder_hidden_states"]))
    bias = ((1 - mask.to(hidden.dtype)) * -10000.0)[:, None]
    blocks = list(transformer.transformer_blocks)
    if skip_first:
        hidden = hidden + residuals["first.hidden_states"]
    for block in blocks[skip_first : len(blocks) - skip_last]:
        hidden = block(hidden, None, text, bias, time, height, width)
    if skip_last:
        hidden = hidden + residuals["last.hidden_states"]
    hidden = transformer.proj_out(transformer.norm_out(hidden, embedded_time, transformer.scale_shift_table))
    return hidden.transpose(1, 2).reshape(batch, -1, height, width)  # patches of one latent cell


def flux_by_hand(transformer, skip_first, skip_last, residuals, inputs):
    inputs = {name: value for name, value in inputs.items() if name != "return_dict"}
    hidden = transformer.x_embedder(inputs["hidden_states"])
    text = transformer.context_embedder(inputs["encoder_hidden_states"])
    temb = transformer.time_text_embed(
        inputs["timestep"] * 1000, inputs["guidance"] * 1000, inputs["pooled_projections"]
    )
    rope = transformer.pos_embed(torch.cat((inputs["txt_ids"], inputs["img_ids"])))
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    if skip_first:
        hidden = hidden + residuals["first.hidden_states"]
        text = text + residuals["first.encoder_hidden_states"]
    for block in blocks[skip_first : len(blocks) - skip_last]:
        text, hidden = block(hidden, text, temb, rope, None)
    if skip_last:
        hidden = hidden + residuals["last.hidden_states"]
    return transformer.proj_out(transformer.norm_out(hidden, temb))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@every_model_and_count
def test_skipped_model_equals_full_model_at_initialisation(kind, counts, checkpointing):
    make, make_inputs = MODELS[kind]
    transformer, inputs = with_lora(make(), *counts, LORA_LAYERS[kind], random_b=False), make_inputs()
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    residuals, full = recorded(transformer, *counts, inputs)
    handle = blockskip.skip_blocks(transformer, *counts)
    handle.set_residuals(residuals)
    skipped = transformer(**inputs)[0]
    skipped.square().mean().backward()  # under checkpointing the backward runs the blocks again
    torch.testing.assert_close(skipped, full, rtol=1e-5, atol=1e-5 * full.abs().max().item())
    handle.restore()
    with torch.no_grad():
        assert torch.equal(transformer(**inputs)[0], full)


@pytest.mark.parametrize("counts", [(0, 0), (2, 2), (1, 3), (3, 1), (4, 0), (0, 4)], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_bf16_model_equals_full_model_within_rounding(kind, counts):
    make, make_inputs = MODELS[kind]
    transformer, inputs = make(dtype=torch.bfloat16), make_inputs(dtype=torch.bfloat16)
    residuals, full = recorded(transformer, *counts, inputs)
    exact = make()(**make_inputs())[0]
    with blockskip.skip_blocks(transformer, *counts) as handle, torch.no_grad():
        handle.set_residuals(residuals)
        skipped = transformer(**inputs)[0]
    rounding = (full.float() - exact).abs().max()
    assert (skipped.float() - full.float()).abs().max() <= rounding


@every_model_and_count
def test_skipped_model_equals_the_method_written_out(kind, counts):
    make, make_inputs = MODELS[kind]
    transformer, inputs = make(dtype=torch.float64), make_inputs(dtype=torch.float64)
    residuals, _ = recorded(transformer, *counts, inputs)
    residuals = {name: 0.5 * value for name, value in residuals.items()}  # not what the blocks would have done
    wanted = by_hand(transformer, *counts, residuals, inputs)
    with blockskip.skip_blocks(transformer, *counts) as handle:
        handle.set_residuals(residuals)
        torch.testing.assert_close(transformer(**inputs)[0], wanted, rtol=1e-12, atol=1e-12)


def lora_gradients(transformer, inputs, handle=None, residuals=None):
    transformer.zero_grad(set_to_none=True)
    if handle:
        handle.set_residuals(residuals)
    output = transformer(**inputs)[0]
    (output * torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype)).square().sum().backward()
    return {name: p.grad.clone() for name, p in transformer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "skip_first"), [(kind, n) for kind in MODELS for n in range(DEPTH[kind])])
def test_without_skipping_at_the_back_every_gradient_equals_the_full_models(kind, skip_first):
    make, make_inputs = MODELS[kind]
    transformer = with_lora(make(dtype=torch.float64), skip_first, 0, LORA_LAYERS[kind])
    inputs = make_inputs(dtype=torch.float64)
    full = lora_gradients(transformer, inputs)
    residuals, _ = recorded(transformer, skip_first, 0, inputs)
    handle = blockskip.skip_blocks(transformer, skip_first, 0)
    skipped = lora_gradients(transformer, inputs, handle, residuals)
    assert full.keys() == skipped.keys() and full
    for name in full:
        torch.testing.assert_close(skipped[name], full[name], rtol=1e-9, atol=1e-12, msg=name)


@every_model_and_count
def test_every_lora_parameter_gets_a_gradient_with_and_without_checkpointing(kind, counts):
    make, make_inputs = MODELS[kind]
    transformer = with_lora(make(dtype=torch.float64), *counts, LORA_LAYERS[kind])
    inputs = make_inputs(dtype=torch.float64)
    residuals, _ = recorded(transformer, *counts, inputs)
    handle = blockskip.skip_blocks(transformer, *counts)
    plain = lora_gradients(transformer, inputs, handle, residuals)
    transformer.enable_gradient_checkpointing()
    checkpointed = lora_gradients(transformer, inputs, handle, residuals)
    trained = {name for name, parameter in transformer.named_parameters() if parameter.requires_grad}
    assert trained == plain.keys() == checkpointed.keys()
    for name in trained:
        assert plain[name].abs().max() > 0, name
        torch.testing.assert_close(checkpointed[name], plain[name], rtol=1e-9, atol=1e-12, msg=name)


@every_model_and_count
def test_lora_is_left_out_only_where_no_gradient_would_reach_it(kind, counts):
    make, make_inputs = MODELS[kind]
    transformer, inputs = make(dtype=torch.float64), make_inputs(dtype=torch.float64)
    blocks = list(blockskip.named_blocks(transformer))
    middle = tuple(f"{block}." for block in blocks[counts[0] : len(blocks) - counts[1]])
    layers = tuple(f".{layer}" for layer in LORA_LAYERS[kind])
    transformer.requires_grad_(False)
    for name, module in transformer.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d) and name.startswith(middle) and name.endswith(layers):
            module.weight.requires_grad_(True)
    residuals, _ = recorded(transformer, *counts, inputs)
    handle = blockskip.skip_blocks(transformer, *counts)
    gradients = lora_gradients(transformer, inputs, handle, residuals)
    reached = {name.removesuffix(".weight") for name, gradient in gradients.items() if gradient.abs().max() > 0}
    handle.restore()
    assert set(blockskip.lora_target_names(transformer, *counts, LORA_LAYERS[kind])) == reached


@pytest.mark.parametrize("kind", MODELS)
def test_layers_with_a_lora_in_fp32_give_what_autocast_would_to_the_bit(kind, monkeypatch):
    pairs = []
    for by_autocast in (True, False):
        transformer = MODELS[kind][0](dtype=torch.bfloat16).requires_grad_(False)
        targets = blockskip.lora_target_names(transformer, 1, 1, LORA_LAYERS[kind])
        torch.manual_seed(0)
        with monkeypatch.context() as patch:
            if by_autocast:
                patch.setattr(blockskip, "compute_lora_in_frozen_precision", lambda transformer: None)
            blockskip.add_lora(transformer, targets, rank=2, lora_alpha=4)
        pairs.append([transformer.get_submodule(name) for name in targets])
    for old, new in zip(*pairs, strict=True):
        weight = old.base_layer.weight
        for layer in (old, new):
            torch.nn.init.normal_(layer.lora_B["default"].weight, generator=torch.Generator().manual_seed(1))
        shape = (2, 3, weight.shape[1]) if weight.ndim == 2 else (2, weight.shape[1], 3, 3)
        x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wanted = old(x)
        found = new(x)
        assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)
        gradient = torch.randn_like(found)
        leaves = [(x, *(p for p in layer.parameters() if p.requires_grad)) for layer in (old, new)]
        results = [torch.autograd.grad(y, group, gradient) for y, group in zip((wanted, found), leaves, strict=True)]
        for before, after in zip(*results, strict=True):
            assert before.dtype == after.dtype and torch.equal(before, after)


def test_recording_leaves_the_model_untouched():
    transformer, inputs = make_flux(), flux_inputs()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in transformer.modules()]
    with torch.no_grad():
        before = transformer(**inputs)[0]
    _, during = recorded(transformer, 2, 3, inputs)
    assert torch.equal(before, during)
    with pytest.raises(KeyError), blockskip.record_residuals(transformer, 2, 3):
        raise KeyError("in the middle of it")
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in transformer.modules()] == hooks


@pytest.mark.parametrize("counts", [(2, 3), (4, 2), (2, 5), (5, 0), (0, 6)], ids=str)
def test_residuals_are_named_by_span_and_stream_and_follow_the_last_forward(counts):
    transformer = make_flux()
    with blockskip.record_residuals(transformer, *counts) as recording, torch.no_grad():
        transformer(**flux_inputs(batch=1))
        transformer(**flux_inputs(batch=3))
    wanted = {"first.hidden_states": (3, 4, 16), "first.encoder_hidden_states": (3, 5, 16)} if counts[0] else {}
    wanted |= {"last.hidden_states": (3, 4, 16)} if counts[1] else {}
    assert {name: tuple(tensor.shape) for name, tensor in recording.residuals.items()} == wanted


def test_skipped_weights_leave_the_module_and_names_stay():
    transformer = make_flux()
    names = [name for name, _ in transformer.named_parameters()]
    kept = [n for n in names if not n.startswith(("transformer_blocks.0.", "transformer_blocks.1.", *LAST_THREE))]
    handle = blockskip.skip_blocks(transformer, 2, 3)
    assert [name for name, _ in transformer.named_parameters()] == kept
    handle.restore()
    assert [name for name, _ in transformer.named_parameters()] == names


LAST_THREE = tuple(f"single_transformer_blocks.{index}." for index in (2, 3, 4))


def test_discarded_blocks_are_freed():
    transformer = make_flux()
    weights = [weakref.ref(p) for block in list(transformer.transformer_blocks)[:2] for p in block.parameters()]
    handle = blockskip.skip_blocks(transformer, 2, 3)
    assert all(reference() is not None for reference in weights)
    handle.discard()
    gc.collect()
    assert all(reference() is None for reference in weights)
    with pytest.raises(RuntimeError, match="discarded"):
        handle.restore()


def test_restore_puts_blocks_on_the_models_device():
    transformer = make_flux()
    handle = blockskip.skip_blocks(transformer, 2, 3)
    transformer.to("meta")  # stands for another device
    handle.restore()
    assert {parameter.device.type for parameter in transformer.parameters()} == {"meta"}


def test_handle_can_skip_again_after_restoring():
    transformer, inputs = make_flux(), flux_inputs()
    residuals, full = recorded(transformer, 1, 2, inputs)
    handle = blockskip.skip_blocks(transformer, 1, 2)
    handle.restore()
    handle.skip()
    handle.skip()
    handle.set_residuals(residuals)
    with torch.no_grad():
        torch.testing.assert_close(transformer(**inputs)[0], full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", [(-1, 0), (0, -1), (8, 0), (0, 8), (4, 4), (100, 100)], ids=str)
@pytest.mark.parametrize("function", [blockskip.skip_blocks, blockskip.record_residuals])
def test_illegal_counts_are_refused_with_the_depth(function, counts):
    transformer = make_flux()
    before = copy.deepcopy(transformer.state_dict())
    with pytest.raises(ValueError, match="8"):
        context = function(transformer, *counts)
        context.__enter__()
    assert before.keys() == transformer.state_dict().keys()


def test_wrong_use_is_refused():
    transformer, inputs = make_flux(), flux_inputs()
    residuals, _ = recorded(transformer, 2, 3, inputs)
    handle = blockskip.skip_blocks(transformer, 2, 3)
    with pytest.raises(RuntimeError, match="set_residuals"):
        transformer(**inputs)
    with pytest.raises(RuntimeError, match="restore"), blockskip.record_residuals(transformer, 2, 3):
        pass
    with pytest.raises(RuntimeError, match="restore"):
        blockskip.skip_blocks(transformer, 2, 3)
    with pytest.raises(ValueError, match=r"last\.hidden_states"):
        handle.set_residuals({"first.hidden_states": residuals["first.hidden_states"]})
    handle.set_residuals({name: tensor[:1] for name, tensor in residuals.items()})
    with pytest.raises(ValueError, match="shape"):  # and not spread over the batch
        transformer(**inputs)
    with pytest.raises(TypeError, match="FluxTransformer2DModel"):
        blockskip.skip_blocks(torch.nn.Linear(2, 2), 0, 0)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["attn.to_typo"], "to_typo"),
        (["transformer_blocks.0.attn.to_q"], "trained blocks"),
        (["x_embedder"], "trained"),
    ],
)
def test_lora_layers_that_cannot_be_trained_are_named(layers, message):
    with pytest.raises(ValueError, match=message):
        blockskip.lora_target_names(make_flux(), 2, 3, layers)


def modulated(counts, dtype=torch.float32, layers=LORA_LAYERS["flux"], random_b=True):
    """A FLUX model with a LoRA, its modulation layers without one, and its inputs."""
    transformer = with_lora(make_flux(dtype=dtype), *counts, layers, random_b)
    targets = blockskip.lora_target_names(make_flux(), *counts, layers)
    names = blockskip.modulation_names(make_flux(), *counts, targets)
    return transformer, names, flux_inputs(dtype=dtype)


def recorded_with(transformer, counts, names, inputs):
    with blockskip.record_residuals(transformer, *counts, names) as recording, torch.no_grad():
        output = transformer(**inputs)[0]
    return recording.residuals, output


SKIPPING = [pytest.param(counts, id=f"{counts[0]}-{counts[1]}") for counts in legal_counts(8) if sum(counts)]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("counts", SKIPPING)
def test_model_with_stored_modulations_equals_full_model_at_initialisation(counts, checkpointing):
    transformer, names, inputs = modulated(counts, random_b=False)
    blocks = list(blockskip.named_blocks(transformer))[counts[0] : 8 - counts[1]]
    doubles = [block for block in blocks if not block.startswith("single")]
    wanted = {f"{block}.{layer}.linear" for block in doubles for layer in ("norm1", "norm1_context")}
    assert set(names) == wanted | {f"{block}.norm.linear" for block in blocks if block not in doubles}
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    residuals, full = recorded_with(transformer, counts, names, inputs)
    assert {f"modulation.{name}" for name in names} == {key for key in residuals if key.startswith("modulation")}
    with blockskip.skip_blocks(transformer, *counts, names) as handle:
        handle.set_residuals(residuals)
        skipped = transformer(**inputs)[0]
        skipped.square().mean().backward()
        torch.testing.assert_close(skipped, full, rtol=1e-5, atol=1e-5 * full.abs().max().item())
        other = {key: 0 * tensor if key.startswith("modulation") else tensor for key, tensor in residuals.items()}
        handle.set_residuals(other)
        assert (transformer(**inputs)[0] - full).abs().max() > 0.01  # what is stored is what is read


@pytest.mark.parametrize("skip_first", range(1, 8))
def test_with_stored_modulations_every_gradient_equals_the_full_models(skip_first):
    transformer, names, inputs = modulated((skip_first, 0), torch.float64)
    full = lora_gradients(transformer, inputs)
    residuals, _ = recorded_with(transformer, (skip_first, 0), names, inputs)
    handle = blockskip.skip_blocks(transformer, skip_first, 0, names)
    skipped = lora_gradients(transformer, inputs, handle, residuals)
    assert full.keys() == skipped.keys() and full
    for name in full:
        torch.testing.assert_close(skipped[name], full[name], rtol=1e-9, atol=1e-12, msg=name)


def test_modulation_layers_keep_their_precision_and_are_recorded_to_the_bit():
    transformer, names, inputs = modulated((1, 2), torch.bfloat16)
    wanted, hooks = {}, []
    for name in names:

        def keep(layer, args, output, name=name):
            wanted[f"modulation.{name}"] = output

        hooks.append(transformer.get_submodule(name).register_forward_hook(keep))
    residuals, _ = recorded_with(transformer, (1, 2), names, inputs)
    assert wanted and all(torch.equal(residuals[key], wanted[key]) for key in wanted)
    assert {wanted[key].dtype for key in wanted} == {torch.bfloat16}


def test_modulation_layers_leave_the_model_come_back_as_they_were_and_are_freed():
    transformer, names, _ = modulated((2, 3))
    layers = {name: transformer.get_submodule(name) for name in names}
    state = {name: tensor.clone() for name, tensor in transformer.state_dict().items()}
    handle = blockskip.skip_blocks(transformer, 2, 3, names)
    assert not any(name.startswith(tuple(names)) for name, _ in transformer.named_parameters())
    assert [layer for layer in handle.skipped if layer in layers.values()] == list(layers.values())
    handle.restore()
    assert all(transformer.get_submodule(name) is layer for name, layer in layers.items())
    assert list(transformer.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in transformer.state_dict().items())
    handle.skip()
    weights = [weakref.ref(parameter) for layer in layers.values() for parameter in layer.parameters()]
    assert len(weights) == 2 * len(names) and all(reference() is not None for reference in weights)
    handle.discard()
    del layers
    gc.collect()
    assert all(reference() is None for reference in weights)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_modulation_layers_with_a_lora_stay_and_learn(checkpointing):
    layers = ("attn.to_q", "norm.linear", "norm1.linear")
    transformer, names, inputs = modulated((2, 3), torch.float64, layers)
    assert names == ["transformer_blocks.2.norm1_context.linear"]
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    residuals, full = recorded_with(transformer, (2, 3), names, inputs)
    handle = blockskip.skip_blocks(transformer, 2, 3, names)
    gradients = lora_gradients(transformer, inputs, handle, residuals)
    assert {name for name, parameter in transformer.named_parameters() if parameter.requires_grad} == set(gradients)
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    assert sum("norm" in name for name in gradients) == 2 * 3  # A and B of the three kept layers
    torch.testing.assert_close(transformer(**inputs)[0], full, rtol=1e-9, atol=1e-9)


def test_nothing_is_stored_of_modulations_where_no_block_is_skipped_or_none_has_any():
    assert blockskip.modulation_names(make_flux(), 0, 0, ()) == []
    assert blockskip.modulation_names(make_sana(), 2, 1, ()) == []


def test_missing_modulations_are_refused():
    transformer, names, inputs = modulated((2, 3))
    residuals, _ = recorded_with(transformer, (2, 3), (), inputs)
    handle = blockskip.skip_blocks(transformer, 2, 3, names)
    with pytest.raises(ValueError, match=r"modulation\.transformer_blocks\.2\.norm1\.linear"):
        handle.set_residuals(residuals)
