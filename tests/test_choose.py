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
"""Hiding the text from the image in chosen blocks.

These fail if a mask hides too little or too much, acts in another block than asked for, hides the image from the text,
does not reach a LoRA, an offloaded, quantised or checkpointed model, or stays behind.
"""

import inspect

import pytest
import torch
from diffusers.hooks import apply_group_offloading
from test_blocks import DEPTH, LORA_LAYERS, MODELS, with_lora

import blockskip_utils as blockskip

every_model = pytest.mark.parametrize("kind", MODELS)
every_block = pytest.mark.parametrize(("kind", "index"), [(kind, i) for kind in MODELS for i in range(DEPTH[kind])])


def other_prompt(inputs):
    """The same noisy image, timestep and pooled embedding with other text tokens."""
    generator = torch.Generator().manual_seed(7)
    text = inputs["encoder_hidden_states"]
    return {**inputs, "encoder_hidden_states": torch.randn(text.shape, generator=generator).to(text.dtype)}


def output(transformer, inputs, masked=()):
    with blockskip.mask_text(transformer, masked), torch.no_grad():
        return transformer(**inputs)[0]


def block_calls(transformer, inputs, masked=()):
    """What each block was given and what it returned, as tensors by stream."""
    calls, hooks = [], []
    returns = blockskip.block_layout(transformer).returns

    def keep(block, args, kwargs, outputs):
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        calls.append((block, args, kwargs, dict(zip(returns, outputs, strict=True))))

    for block in blockskip.named_blocks(transformer).values():
        hooks.append(block.register_forward_hook(keep, with_kwargs=True))
    output(transformer, inputs, masked)
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize("text", [1, 5, 9])
@every_model
def test_with_all_blocks_masked_the_image_does_not_depend_on_the_prompt(kind, text):
    make, make_inputs = MODELS[kind]
    transformer, inputs = make(), make_inputs(text=text)
    everything = range(DEPTH[kind])
    one, other = (output(transformer, prompt, everything) for prompt in (inputs, other_prompt(inputs)))
    assert torch.equal(one, other)
    assert not torch.allclose(output(transformer, inputs), output(transformer, other_prompt(inputs)), atol=1e-3)


@every_block
def test_with_one_block_left_unmasked_the_image_depends_on_the_prompt(kind, index):
    make, make_inputs = MODELS[kind]
    transformer, inputs = make(), make_inputs()
    masked = set(range(DEPTH[kind])) - {index}
    one, other = (output(transformer, prompt, masked) for prompt in (inputs, other_prompt(inputs)))
    assert (one - other).abs().max() > 1e-3


@every_model
def test_masking_no_block_changes_nothing(kind):
    make, make_inputs = MODELS[kind]
    transformer, inputs = make(), make_inputs()
    with torch.no_grad():
        assert torch.equal(output(transformer, inputs, []), transformer(**inputs)[0])


@every_block
def test_only_the_named_block_changes_and_in_it_only_the_image(kind, index):
    make, make_inputs = MODELS[kind]
    transformer, inputs = make(), make_inputs()
    for number, (block, args, kwargs, masked) in enumerate(block_calls(transformer, inputs, [index])):
        with torch.no_grad():
            given = inspect.signature(block.forward).bind(*args, **kwargs).arguments
            plain = block(**{name: value for name, value in given.items() if name != "joint_attention_kwargs"})
        plain = dict(zip(masked, plain if isinstance(plain, tuple) else (plain,), strict=True))
        for stream in masked:
            changes = number == index and stream == "hidden_states"
            assert torch.equal(plain[stream], masked[stream]) != changes, (number, stream)


@pytest.mark.parametrize("index", [1, 4])
def test_masked_attention_of_flux_is_the_one_over_image_keys_alone(index):
    make, make_inputs = MODELS["flux"]
    transformer = make(dtype=torch.float64)
    scores = []

    def attend(query, key, value, attn_mask=None, **kwargs):  # queries etc. (B, tokens, heads, channels)
        weights = torch.einsum("bqhc,bkhc->bhqk", query, key) * query.shape[-1] ** -0.5
        if attn_mask is not None:
            weights = torch.cat([weights[:, :, :5], weights[:, :, 5:].clone()], dim=2)
            weights[:, :, 5:, :5] = -torch.inf  # 5 text tokens, before the image's
        scores.append(attn_mask is not None)
        return torch.einsum("bhqk,bkhc->bqhc", weights.softmax(-1), value)

    inputs = make_inputs(dtype=torch.float64)
    wanted = output(transformer, inputs, [index])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffusers.models.transformers.transformer_flux.dispatch_attention_fn", attend)
        by_hand = output(transformer, inputs, [index])
    assert scores == [number == index for number in range(8)]
    torch.testing.assert_close(wanted, by_hand, rtol=1e-10, atol=1e-12)


def test_of_sanas_masked_cross_attention_the_output_bias_is_left():
    make, make_inputs = MODELS["sana"]
    transformer, seen = make(), []
    for block in transformer.transformer_blocks:
        torch.nn.init.normal_(block.attn2.to_out[0].bias)
        block.attn2.register_forward_hook(lambda layer, args, out: seen.append((layer.to_out[0].bias, out)))
    output(transformer, make_inputs(), [3])
    is_bias = [torch.equal(bias.expand_as(result), result) for bias, result in seen]
    assert is_bias == [False, False, False, True, False]


@every_model
def test_the_mask_reaches_a_lora_and_gradient_checkpointing(kind):
    make, make_inputs = MODELS[kind]
    transformer = with_lora(make(), 0, 0, LORA_LAYERS[kind])
    inputs = make_inputs()
    plain = output(transformer, inputs, [1, 2])
    assert not torch.allclose(plain, output(make(), inputs, [1, 2]), atol=1e-4)  # the LoRA counts
    everything = range(DEPTH[kind])
    assert torch.equal(output(transformer, inputs, everything), output(transformer, other_prompt(inputs), everything))
    transformer.enable_gradient_checkpointing()
    with blockskip.mask_text(transformer, [1, 2]):  # with gradient, so that blocks are called by position
        torch.testing.assert_close(transformer(**inputs)[0], plain, rtol=1e-5, atol=1e-6)


@every_model
def test_the_mask_holds_in_bf16_under_autocast(kind):
    make, make_inputs = MODELS[kind]
    transformer = with_lora(make(dtype=torch.bfloat16), 0, 0, LORA_LAYERS[kind])
    inputs = make_inputs(dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one, other = (output(transformer, prompt, range(DEPTH[kind])) for prompt in (inputs, other_prompt(inputs)))
    assert one.dtype == torch.bfloat16 and torch.isfinite(one).all() and torch.equal(one, other)


@every_model
def test_the_mask_holds_in_an_offloaded_model(kind):
    make, make_inputs = MODELS[kind]
    transformer, inputs = make(), make_inputs()
    wanted = [output(transformer, inputs, masked) for masked in ([], [0], [1, 2], range(DEPTH[kind]))]
    cpu = torch.device("cpu")
    apply_group_offloading(transformer, onload_device=cpu, offload_type="block_level", num_blocks_per_group=1)
    for masked, result in zip(([], [0], [1, 2], range(DEPTH[kind])), wanted, strict=True):
        assert torch.equal(output(transformer, inputs, masked), result)


@every_model
def test_the_mask_holds_with_4_bit_weights(kind):
    import bitsandbytes

    make, make_inputs = MODELS[kind]
    transformer, inputs = make(), make_inputs()
    for block in list(blockskip.named_blocks(transformer).values()):
        for name, layer in list(block.named_modules()):
            if isinstance(layer, torch.nn.Linear) and layer.in_features * layer.out_features % 64 == 0:
                quantised = bitsandbytes.nn.Linear4bit(
                    layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=torch.float32
                )
                quantised.load_state_dict(layer.state_dict())
                parent, _, child = name.rpartition(".")
                setattr(block.get_submodule(parent), child, quantised.to("cpu"))
    everything = range(DEPTH[kind])
    one, other = (output(transformer, prompt, everything) for prompt in (inputs, other_prompt(inputs)))
    assert torch.equal(one, other)
    assert not torch.allclose(one, output(transformer, inputs), atol=1e-3)


@every_model
def test_nothing_stays_behind(kind):
    make, make_inputs = MODELS[kind]
    transformer, inputs = make(), make_inputs()
    before = output(transformer, inputs)
    with pytest.raises(KeyError), blockskip.mask_text(transformer, range(3)):
        raise KeyError("in the middle of it")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in transformer.modules())
    assert torch.equal(output(transformer, inputs), before)


@pytest.mark.parametrize("blocks", [[-1], [8], [0, 100]], ids=str)
def test_blocks_that_are_not_there_are_refused_with_the_depth(blocks):
    transformer = MODELS["flux"][0]()
    with pytest.raises(ValueError, match="8"), blockskip.mask_text(transformer, blocks):
        pass
    assert not any(m._forward_pre_hooks for m in transformer.modules())


def test_a_model_with_skipped_blocks_is_refused():
    transformer = MODELS["flux"][0]()
    blockskip.skip_blocks(transformer, 1, 1)
    with pytest.raises(RuntimeError, match="restore"), blockskip.mask_text(transformer, [3]):
        pass
