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
"""Frozen weights in 4 or 8 bits.

These fail if a quantised layer is not bitsandbytes' own, if another layer than a frozen one of the trained blocks is
quantised, if residuals come from other weights than training sees, if draws or checkpoints of another base are used,
or if a configuration that cannot work is found out only once weights are loaded.
"""

import copy
import dataclasses
import importlib.util
import json
import logging
import pathlib
import weakref

import bitsandbytes as bnb
import pytest
import torch
from diffusers import BitsAndBytesConfig, DiffusionPipeline
from safetensors.torch import load_file
from test_refusals import refusal
from test_runs import Killed, assert_same_lora, flux_prediction, kill_at, lora_of, sana_prediction, spy_on
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import blockskip_utils as blockskip
from conftest import CATS, Case, reset_accelerate

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
LAYER_SETTINGS = {
    "nf4": NF4,
    "nf4 double": {**NF4, "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True},
    "nf4 stored as int8": {**NF4, "bnb_4bit_quant_storage": "int8"},
    "nf4 stored as bf16": {**NF4, "bnb_4bit_quant_storage": "bfloat16"},
    "int8": {"load_in_8bit": True},
    "int8 without outliers": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}


def layer_of_bitsandbytes(original, config, dtype):
    """bitsandbytes' own layer with the weights of a linear layer."""
    shape = (original.in_features, original.out_features, original.bias is not None)
    if config.load_in_8bit:
        layer = bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=config.llm_int8_threshold)
    else:
        layer = bnb.nn.Linear4bit(
            *shape,
            compute_dtype=dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
            quant_storage=config.bnb_4bit_quant_storage,
        )
    layer.load_state_dict(original.state_dict())
    if original.bias is not None:
        layer.bias.data = original.bias.data.clone()
    return layer.requires_grad_(False).to("cpu")  # which quantises


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", LAYER_SETTINGS.values(), ids=LAYER_SETTINGS)
def test_quantised_layer_is_that_of_bitsandbytes_to_the_bit(settings, dtype, bias):
    torch.manual_seed(0)
    original = nn.Linear(48, 80, bias=bias).to(dtype).requires_grad_(False)
    config = BitsAndBytesConfig(**settings)
    theirs = layer_of_bitsandbytes(original, config, dtype)
    ours = blockskip.QuantizedLinear.quantize(original, config, torch.device("cpu"))
    x, gradient = torch.randn(2, 3, 48, dtype=dtype), torch.randn(2, 3, 80, dtype=dtype)
    x[..., 5] *= 20  # an outlier feature
    results = []
    for layer in (theirs, ours, original):
        leaf = x.clone().requires_grad_()
        output = layer(leaf)
        output.backward(gradient)
        results.append((output.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert all(found.dtype == dtype for found in results[1])
    error = (results[1][0] - results[2][0]).abs().max()
    assert 0 < error < 0.5 * results[2][0].abs().max()
    packed = ours.weight
    assert packed.numel() * packed.itemsize == 48 * 80 // (1 if config.load_in_8bit else 2)
    assert {name for name, _ in ours.named_parameters()} == ({"weight", "bias"} if bias else {"weight"})
    assert not any(parameter.requires_grad for parameter in ours.parameters())


@pytest.mark.parametrize("kind", ["nf4", "nf4 double", "int8"])
def test_scales_are_all_that_a_quantised_layer_holds_beside_weight_and_bias(kind):
    settings = LAYER_SETTINGS[kind]
    layer = blockskip.QuantizedLinear.quantize(nn.Linear(64, 64), BitsAndBytesConfig(**settings), torch.device("cpu"))
    sizes = sorted(tensor.numel() for tensor in layer.scale_tensors() if tensor.numel() not in (16, 256))  # tables
    # one a row or a block of 64 weights; double: these in 8 bits, with a scale and an offset
    assert sizes == ([1, 1, 64] if kind == "nf4 double" else [64])


def test_an_estimate_leaves_no_fake_table_behind_in_bitsandbytes():
    bnb.functional.name2qmap.clear()  # as in a new process
    blockskip._make_code_tables.cache_clear()
    config = BitsAndBytesConfig(**LAYER_SETTINGS["nf4 double"])
    torch.manual_seed(0)
    original, x = nn.Linear(64, 64), torch.randn(2, 64)
    with blockskip.fake_tensors():
        blockskip.QuantizedLinear.quantize(nn.Linear(64, 64), config, torch.device("cpu"))
    found = blockskip.QuantizedLinear.quantize(original, config, torch.device("cpu"))(x)
    assert not isinstance(found, FakeTensor)
    assert torch.equal(found, layer_of_bitsandbytes(original, config, torch.float32).train()(x))


def test_names_to_skip_hold_for_whole_subtrees_as_in_diffusers():
    transformer = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict() for _ in range(2)])})
    for block in transformer["blocks"]:
        block["attn"] = nn.ModuleDict({"to_q": nn.Linear(64, 64), "to_out": nn.ModuleList([nn.Linear(64, 64)])})
        block["ff"], block["ff_context"] = nn.Linear(64, 64), nn.Linear(64, 64)
    transformer.requires_grad_(False)

    def quantised(skip):
        config = BitsAndBytesConfig(**NF4, llm_int8_skip_modules=skip)
        model = copy.deepcopy(transformer)
        blockskip.quantize_blocks(model, ["blocks.0", "blocks.1"], config, torch.device("cpu"))
        return {name for name, layer in model.named_modules() if isinstance(layer, blockskip.QuantizedLinear)}

    layers = ("attn.to_q", "attn.to_out.0", "ff", "ff_context")
    everything = {f"blocks.{index}.{layer}" for index in range(2) for layer in layers}
    assert quantised(None) == everything
    assert quantised(["ff"]) == everything - {"blocks.0.ff", "blocks.1.ff"}
    assert quantised(["attn"]) == {name for name in everything if ".attn" not in name}
    assert quantised(["blocks.1"]) == {name for name in everything if "blocks.0" in name}
    some = {"blocks.0.attn.to_out.0", "blocks.1.attn.to_out.0", "blocks.0.ff"}
    assert quantised(["to_out.0", "blocks.0.ff"]) == everything - some


SETTINGS = {
    "nf4": {**NF4, "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": ["to_v"]},
    "int8": {"load_in_8bit": True, "llm_int8_skip_modules": ["to_v"]},
}


def write_json(path, settings):
    path.write_text(json.dumps(settings))
    return path


@dataclasses.dataclass
class QuantisedRun:
    """A run of 4 steps with a quantised base.

    Attributes:
        quantised: Names of the quantised layers in each step.
        dtypes: Those of trained parameters.
        alive: Of the trained blocks' weights in full precision that were quantised, which live on behind `load`.
        modulations: Names of layers stored with each draw.
    """

    case: Case
    settings: dict
    folder: pathlib.Path
    flags: tuple
    draws: list
    quantised: list
    dtypes: set
    alive: list
    modulations: tuple = ()


def quantised_names(transformer):
    names = (name for name, layer in transformer.named_modules() if isinstance(layer, blockskip.QuantizedLinear))
    return {name.removesuffix(".base_layer") for name in names}


@pytest.fixture(scope="module", params=SETTINGS)
def finished(case, request, tmp_path_factory):
    folder, settings = tmp_path_factory.mktemp("quantised"), SETTINGS[request.param]
    config = write_json(folder / "config.json", settings)
    flags = (*case.skip, "--learning_rate", 0.01, "--checkpointing_steps", 2, "--lora_dropout", 0.3)
    flags = (*flags, "--keep_residuals", "--residual_dtype", "fp32", "--bnb_quantization_config_path", config)
    run = QuantisedRun(case, settings, folder, flags, [], [], set(), [])
    watched = {}

    def watch(transformer, run, dtype):
        layers = dict(transformer.named_modules())
        watched.update({name: weakref.ref(layers[name].weight) for name in expected_names(case, transformer)})

    def look(result, the_run):
        run.alive.extend(name for name, reference in watched.items() if reference() is not None)
        run.modulations = the_run.plan.modulations

    def step(the_run, trainer, *rest):
        run.quantised.append(quantised_names(trainer.transformer))
        run.dtypes.update(parameter.dtype for parameter in trainer.parameters)

    with pytest.MonkeyPatch.context() as patch:
        spy_on(patch, "load_transformer", after=watch)
        spy_on(patch, "load_trainer", after=look)
        spy_on(patch, "make_draws", after=lambda draws, *rest: run.draws.extend(draws))
        spy_on(patch, "finish_step", before=step)
        case.run(case.command(CATS, folder / "straight", *flags, steps=4))
    return run


def expected_names(case, transformer):
    """The linear layers of the trained blocks but for modulations and those named to be skipped."""
    modulations = ("norm.linear", "norm1.linear", "norm1_context.linear") if case.family.name == "FLUX" else ()
    return {
        name
        for name, layer in transformer.named_modules()
        if isinstance(layer, nn.Linear)
        and name.startswith(case.trained)
        and not name.endswith((*modulations, ".to_v"))
    }


def test_only_frozen_layers_of_the_trained_blocks_are_quantised(finished):
    pipeline = DiffusionPipeline.from_pretrained(finished.case.pipeline)
    wanted = expected_names(finished.case, pipeline.transformer)
    assert len(wanted) > 8 and finished.quantised == [wanted] * 4
    assert not finished.alive  # one copy of the weights, and not a second in full precision


def test_lora_on_a_quantised_base_is_in_fp32_learns_and_loads_into_the_full_pipeline(finished):
    assert finished.dtypes == {torch.float32}
    saved = lora_of(finished.folder / "straight")
    matrices = [tensor for name, tensor in saved.items() if "lora_B" in name]
    assert matrices and all(tensor.abs().max() > 0 for tensor in matrices)
    pipeline = DiffusionPipeline.from_pretrained(finished.case.pipeline)
    pipeline.load_lora_weights(finished.folder / "straight")
    loaded = {f"transformer.{n}" for n, module in pipeline.transformer.named_modules() if hasattr(module, "lora_A")}
    assert loaded == {name.split(".lora")[0] for name in saved}
    assert not quantised_names(pipeline.transformer)


def residuals_of(finished, pipeline, stored, draw):
    """Residuals by the pipeline's own prompt encoding, without any of the trainer's code but the recording."""
    predict = {"FLUX": flux_prediction, "SANA": sana_prediction}[finished.case.family.name](pipeline)
    latents, skip = stored["latents"][None], finished.case.skip
    noisy = (1 - draw.sigma) * latents + draw.sigma * draw.noise(latents.shape[1:])
    with (
        torch.no_grad(),
        blockskip.record_residuals(pipeline.transformer, skip[1], skip[3], finished.modulations) as recording,
    ):
        predict(noisy, torch.tensor([draw.sigma]))
    return {key: tensor[0] for key, tensor in recording.residuals.items()}


def test_residuals_come_from_quantised_middle_blocks_and_whole_ends(finished):
    pipeline = DiffusionPipeline.from_pretrained(finished.case.pipeline)
    draws = finished.draws[:2]
    stored = [load_file(finished.folder / "straight" / "residuals" / f"{draw.name}.safetensors") for draw in draws]
    plain = [residuals_of(finished, pipeline, *pair) for pair in zip(stored, draws, strict=True)]
    config = BitsAndBytesConfig(**finished.settings)
    for name in expected_names(finished.case, pipeline.transformer):
        parent, _, last = name.rpartition(".")
        layer = layer_of_bitsandbytes(pipeline.transformer.get_submodule(name), config, torch.float32)
        setattr(pipeline.transformer.get_submodule(parent), last, layer.train())  # on some CPUs eval repacks weights
    for found, before, draw in zip(stored, plain, draws, strict=True):
        wanted = residuals_of(finished, pipeline, found, draw)
        assert wanted.keys() | {"latents"} == found.keys()
        for key in wanted:
            size = wanted[key].abs().max().item()
            torch.testing.assert_close(found[key], wanted[key], rtol=0, atol=1e-4 * size, msg=key)
            quantisation = (found[key] - before[key]).abs().max().item()
            assert quantisation > 1e-3 * size if key.startswith("last") else quantisation < 1e-4 * size, key


def test_quantised_run_resumes_to_the_bit_with_the_same_settings_under_another_name(finished, tmp_path, monkeypatch):
    case, straight = finished.case, finished.folder / "straight"
    with monkeypatch.context() as patch:
        kill_at(patch, "finish_step", 3)
        with pytest.raises(Killed):
            case.run(case.command(CATS, tmp_path / "out", *finished.flags, steps=4))
    again = write_json(tmp_path / "renamed.json", dict(reversed(finished.settings.items())))
    resume = ("--bnb_quantization_config_path", again, "--resume_from_checkpoint", "latest")
    case.run(case.command(CATS, tmp_path / "out", *finished.flags[:-2], *resume, steps=4))
    assert_same_lora(straight, tmp_path / "out")


def test_draws_and_checkpoints_of_another_base_are_refused(finished, tmp_path, monkeypatch, capsys):
    case, out = finished.case, finished.folder / "straight"
    other = write_json(tmp_path / "other.json", {**finished.settings, "llm_int8_skip_modules": ["to_k"]})
    for base in (("--bnb_quantization_config_path", other), ()):
        flags = (*finished.flags[:-2], *base)
        arguments = case.command(CATS, out, *flags, "--resume_from_checkpoint", "latest", steps=6)
        message = refusal(arguments, monkeypatch, capsys, case.script)
        assert "--bnb_quantization_config_path" in message and "to_v" in message
        arguments = case.command(CATS, tmp_path / "new", *flags, "--residual_dir", out / "residuals", steps=4)
        message = refusal(arguments, monkeypatch, capsys, case.script)
        assert "differs in quantisation:" in message


def test_draws_of_an_unquantised_run_are_refused_for_a_quantised_one(flux, tmp_path, monkeypatch, capsys):
    where = (*flux.skip, "--residual_dir", tmp_path / "residuals")
    flux.run(flux.command(CATS, tmp_path / "plain", *where, "--keep_residuals", steps=1))
    config = write_json(tmp_path / "nf4.json", NF4)
    arguments = flux.command(CATS, tmp_path / "out", *where, "--bnb_quantization_config_path", config, steps=1)
    assert "differs in quantisation:" in refusal(arguments, monkeypatch, capsys)


BAD_FILES = {
    "no JSON": ("load_in_4bit: true", "cannot be read as JSON"),
    "empty": ("", "cannot be read as JSON"),
    "no text": (b"\xff\xfe\x00", "cannot be read as JSON"),
    "list": ('["load_in_4bit"]', "no JSON object"),
    "number": ("4", "no JSON object"),
    "unknown": ({"load_in_4bit": True, "bnb_4bit_quant_typo": "nf4"}, "'bnb_4bit_quant_typo'"),
    "both": ({"load_in_4bit": True, "load_in_8bit": True}, "exactly one of load_in_4bit and load_in_8bit"),
    "none": ({"bnb_4bit_quant_type": "nf4"}, "exactly one of load_in_4bit and load_in_8bit"),
    "none, in so many words": ({"load_in_4bit": False}, "exactly one of load_in_4bit and load_in_8bit"),
    "16 bits": ({"load_in_8bit": True, "llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight"),
    "nf5": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}, "'nf5'"),
    "type": ({"load_in_4bit": True, "bnb_4bit_quant_type": 4}, "bnb_4bit_quant_type"),
    "storage": ({"load_in_4bit": True, "bnb_4bit_quant_storage": "int3"}, "bnb_4bit_quant_storage"),
    "double": ({"load_in_4bit": True, "bnb_4bit_use_double_quant": "yes"}, "bnb_4bit_use_double_quant"),
    "threshold": ({"load_in_8bit": True, "llm_int8_threshold": "six"}, "llm_int8_threshold"),
    "skip": ({"load_in_4bit": True, "llm_int8_skip_modules": "to_q"}, "llm_int8_skip_modules"),
    "no switch": ({"load_in_4bit": "yes"}, "load_in_4bit"),
}


@pytest.mark.parametrize(("content", "part"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_configuration_that_cannot_work_is_one_plain_line(flux, tmp_path, monkeypatch, capsys, content, part):
    path = tmp_path / "bnb.json"
    content = json.dumps(content) if isinstance(content, dict) else content
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    arguments = flux.command(CATS, tmp_path / "out", "--bnb_quantization_config_path", path)
    message = refusal(arguments, monkeypatch, capsys)
    assert f"--bnb_quantization_config_path {path}" in message and part in message
    assert not (tmp_path / "out").exists()


def test_a_configuration_that_is_not_there_is_one_plain_line(flux, tmp_path, monkeypatch, capsys):
    for path in (tmp_path / "nowhere.json", tmp_path):
        arguments = flux.command(CATS, tmp_path / "out", "--bnb_quantization_config_path", path)
        message = refusal(arguments, monkeypatch, capsys)
        assert f"--bnb_quantization_config_path {path} cannot be read" in message


def test_bitsandbytes_missing_is_named_with_the_flag(flux, tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else find(name, *rest)
    )
    config = write_json(tmp_path / "nf4.json", NF4)
    arguments = flux.command(CATS, tmp_path / "out", "--bnb_quantization_config_path", config)
    message = refusal(arguments, monkeypatch, capsys)
    assert "pip install bitsandbytes" in message and "--bnb_quantization_config_path" in message


def test_bitsandbytes_does_not_warn_at_every_layer_of_every_step(flux, tmp_path, caplog):
    layer = blockskip.QuantizedLinear.quantize(
        nn.Linear(64, 64), BitsAndBytesConfig(load_in_8bit=True), torch.device("cpu")
    )
    layer.scales.is_training = False  # on a CPU only then by the function that a GPU takes
    log = logging.getLogger("bitsandbytes.autograd._functions")
    log.setLevel(logging.NOTSET)
    with caplog.at_level("WARNING"):
        layer(torch.randn(1, 64))
        assert [record.name for record in caplog.records] == [log.name] and "float16" in caplog.text
    reset_accelerate()
    blockskip.start(flux.script.parse_args(flux.command(CATS, tmp_path)), flux.family)
    assert not log.isEnabledFor(logging.WARNING)


def test_settings_that_other_programs_write_beside_are_accepted(tmp_path, flux):
    config = BitsAndBytesConfig(**NF4)
    path = write_json(tmp_path / "written.json", {**config.to_dict(), "quant_method": "bitsandbytes"})
    command = flux.command(CATS, tmp_path, "--bnb_quantization_config_path", path)
    read = blockskip.read_quantization_config(flux.script.parse_args(command), torch.bfloat16)
    assert read.load_in_4bit and read.bnb_4bit_quant_type == "nf4" and read.bnb_4bit_compute_dtype == torch.bfloat16
