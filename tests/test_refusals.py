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
"""Mistakes of the user's: each is refused with one plain line and a status that is not 0, before any weight is loaded.

These fail if a mistake passes in silence, if the message does not name the flag or file, or if weights come first.
"""

import collections
import importlib.util
import json
import shutil
import time

import pytest
from diffusers.models.modeling_utils import ModelMixin
from PIL import Image
from transformers import PreTrainedModel

import blockskip_utils as blockskip
from conftest import CATS, flux_script, launch, reset_accelerate


def refusal(arguments, monkeypatch, capsys, script=flux_script) -> str:
    """The one line that a run is refused with; fails if weights are loaded, or if it takes long."""

    def forbidden(*args, **kwargs):
        pytest.fail("weights were loaded before the mistake was found")

    for model in (ModelMixin, PreTrainedModel):
        monkeypatch.setattr(model, "from_pretrained", forbidden)
    reset_accelerate()
    begin = time.process_time()
    with pytest.raises(SystemExit) as exit:
        script.main(script.parse_args([str(word) for word in arguments]))
    seconds = time.process_time() - begin
    message = exit.value.code if isinstance(exit.value.code, str) else capsys.readouterr().err.strip()
    assert exit.value.code != 0 and message.count("\n") == 0 and "error: " in message and len(message) < 600
    assert seconds < 2
    return message


MISTAKES = {
    # flags: what the line must contain
    "--skip_first 4 --skip_last 4": ["--skip_first", "8"],
    "--skip_first 8": ["--skip_first", "8"],
    "--skip_first -1": ["--skip_first", "-1"],
    "--skip_last -2": ["--skip_last", "-2"],
    "--resolution 34": ["--resolution 34", "32", "48"],
    "--resolution 520": ["--resolution 520", "512", "528"],
    "--resolution 8": ["--resolution 8", "16"],
    "--patch_resolution 40": ["--patch_resolution 40", "32", "48"],
    "--patch_resolution 128": ["--patch_resolution 128", "--resolution 64"],
    "--patch_schedule sometimes": ["--patch_schedule", "linear"],
    "--image_interpolation_mode cubic": ["--image_interpolation_mode", "bicubic"],
    "--residual_dtype int8": ["--residual_dtype", "bf16"],
    "--optimizer lion": ["--optimizer lion", "prodigy"],
    "--lora_layers attn.to_typo": ["--lora_layers", "attn.to_typo"],
    "--lora_layers x_embedder": ["--lora_layers", "x_embedder"],
    "--train_text_encoder": ["--train_text_encoder", "residuals"],
    "--text_encoder_lr 1e-4": ["--text_encoder_lr"],
    "--adam_weight_decay_text_encoder 0.1": ["--adam_weight_decay_text_encoder"],
    "--max_sequence_length 513": ["--max_sequence_length", "512"],
    "--with_prior_preservation": ["--with_prior_preservation", "--class_data_dir"],
    "--with_prior_preservation --class_data_dir c": ["--class_prompt"],
    "--class_prompt cat": ["--class_prompt", "--with_prior_preservation"],
    "--class_data_dir c": ["--class_data_dir", "--with_prior_preservation"],
    "--prior_loss_weight 0.5": ["--prior_loss_weight", "--with_prior_preservation"],
    "--num_validation_images 2": ["--num_validation_images", "--validation_prompt"],
    "--validation_epochs 2": ["--validation_epochs", "--validation_prompt"],
    "--logit_mean 1": ["--logit_mean", "--weighting_scheme logit_normal"],
    "--mode_scale 1": ["--mode_scale", "--weighting_scheme mode"],
    "--lr_num_cycles 2": ["--lr_num_cycles", "cosine_with_restarts"],
    "--lr_power 2": ["--lr_power", "polynomial"],
    "--lr_warmup_steps 10": ["--lr_warmup_steps", "constant_with_warmup"],
    "--prodigy_beta3 0.9": ["--prodigy_beta3", "--optimizer prodigy"],
    "--prodigy_decouple perhaps": ["--prodigy_decouple", "perhaps"],
    "--optimizer prodigy --use_8bit_adam": ["--use_8bit_adam", "adamw"],
    "--residual_dtype fp32": ["--residual_dtype", "--skip_first"],
    "--hub_token secret": ["--hub_token", "--push_to_hub"],
    "--push_to_hub --hub_token secret --report_to wandb": ["--hub_token", "wandb"],
    "--image_column picture": ["--image_column", "--dataset_name"],
    "--dataset_name somewhere": ["--instance_data_dir", "--dataset_name"],
    "--num_draws 0": ["--num_draws", "at least 1"],
    "--rank 0": ["--rank", "at least 1"],
    "--rank four": ["--rank", "four"],
    "--learning_rate nan": ["--learning_rate", "nan"],
    "--learning_rate -1": ["--learning_rate", "-1"],
    "--lora_dropout 1.5": ["--lora_dropout", "1.5"],
    "--adam_beta1 1.5": ["--adam_beta1"],
    "--train_batch_size 0": ["--train_batch_size", "at least 1"],
    "--report_to nowhere": ["--report_to nowhere"],
    "--report_to 0.5": ["--report_to 0.5"],
    "--resume_from_checkpoint checkpoint-7": ["--resume_from_checkpoint checkpoint-7", "none"],
    "--skip 3": ["unrecognized arguments: --skip"],
    "--mixed_precision fp16": ["fp16"],
    "--patch_schedule random --patch_resolution 64": ["--patch_schedule random", "--resolution"],
    "--revision main": ["--revision"],
    "--seed 4294967296": ["--seed"],
    "--push_to_hub --hub_token secret --report_to all": ["--hub_token", "all"],
    "--logging_dir elsewhere": ["--logging_dir", "--report_to"],
    "--variant fp8": ["--variant fp8"],
    "--allow_tf32": ["--allow_tf32", "NVIDIA"],
    "--upcast_before_saving": ["--upcast_before_saving", "fp32"],
    "--rank 9223372036854775807": ["--rank", "at most"],
    "--rank 4096": ["--rank 4096", "widest"],
    "--num_train_epochs 1" + 400 * "0": ["--num_train_epochs", "at most"],
    "--timestep_shift 1e308": ["--timestep_shift"],
    "--timestep_shift 1e-308": ["--timestep_shift"],
    "--weighting_scheme mode --mode_scale 1e308": ["--mode_scale"],
    "--instance_prompt \udcff": ["--instance_prompt", "UTF-8"],
    "--pretrained_model_name_or_path ./no/such/folder": ["--pretrained_model_name_or_path ./no/such/folder", "folder"],
    "--pretrained_model_name_or_path some/model": ["--pretrained_model_name_or_path some/model", "folder"],
    "--prior_generation_precision fp16 --with_prior_preservation --class_data_dir c --class_prompt c": [
        "--prior_generation_precision"
    ],
    "--caption_column text": ["--caption_column text", "metadata.jsonl"],
    "--max_train_steps 99999999999 --skip_first 1": ["free", "--num_draws"],
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_in_the_flags_is_one_plain_line(flux, tmp_path, monkeypatch, capsys, flags):
    given = flags.split(" ")
    message = refusal(flux.command(CATS, tmp_path / "out", *given), monkeypatch, capsys)
    for part in MISTAKES[flags]:
        assert part in message
    assert not (tmp_path / "out").exists()


HARMLESS = [
    "--lr_warmup_steps 0",
    "--cache_latents",
    "--local_rank 0",
    "--num_class_images 100",
    "--lora_layers attn.to_q, ,",
]


@pytest.mark.parametrize("flags", HARMLESS)
def test_flags_of_usual_commands_that_change_nothing_are_accepted(flux, tmp_path, flags):
    name, _, value = flags.partition(" ")
    flux.run(flux.command(CATS, tmp_path / "out", *([name, value] if value else [name]), steps=1))


def test_patch_resolution_follows_a_small_resolution_unless_given(flux, tmp_path):
    arguments = flux.command(CATS, tmp_path / "out", "--resolution", 32, "--keep_residuals", steps=1)
    at = arguments.index("--patch_resolution")
    flux.run(arguments[:at] + arguments[at + 2 :])
    assert (tmp_path / "out" / "pytorch_lora_weights.safetensors").exists()


@pytest.mark.parametrize(
    ("flag", "packages"),
    [
        (("--use_8bit_adam",), ["bitsandbytes"]),
        (("--optimizer", "prodigy"), ["prodigyopt"]),
        (("--report_to", "wandb"), ["wandb"]),
        (("--report_to", "tensorboard"), ["tensorboard", "tensorboardX"]),
    ],
)
def test_a_missing_package_is_named_with_the_flag(flux, tmp_path, monkeypatch, capsys, flag, packages):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in packages else find(name, *rest)
    )
    message = refusal(flux.command(CATS, tmp_path / "out", *flag), monkeypatch, capsys)
    assert f"pip install {packages[0]}" in message and " ".join(flag) in message


@pytest.mark.parametrize("package", blockskip.MINIMUM_VERSIONS)
@pytest.mark.parametrize("installed", ["0.1", None], ids=["old", "missing"])
def test_a_package_that_is_too_old_or_missing_is_named_before_any_is_imported(case, tmp_path, package, installed):
    """The interpreter is told another version, and has none of the packages to import."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata, sys\n"
        f"version, installed = importlib.metadata.version, {installed!r}\n"
        "def fake(name):\n"
        f"    if name == {package!r} and installed is None:\n"
        "        raise importlib.metadata.PackageNotFoundError(name)\n"
        f"    return installed if name == {package!r} else version(name)\n"
        "importlib.metadata.version = fake\n"
        f"sys.modules.update(dict.fromkeys({list(blockskip.MINIMUM_VERSIONS)!r}))\n"
    )
    done = launch(case.file, ["--help"], PYTHONPATH=str(tmp_path))
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith(f"error: {package} ")
    assert f">={blockskip.MINIMUM_VERSIONS[package]}'" in line and (installed or "not installed") in line


def test_datasets_that_would_run_code_are_refused(flux, colours, tmp_path, monkeypatch, capsys):
    version = blockskip.importlib.metadata.version
    monkeypatch.setattr(
        blockskip.importlib.metadata, "version", lambda name: "3.6.0" if name == "datasets" else version(name)
    )
    arguments = flux.command("", tmp_path / "out", "--dataset_name", colours)
    assert "datasets 3.6.0" in refusal(arguments, monkeypatch, capsys)


def photo_folder(tmp_path, files):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, content in files.items():
        if content == "photo":
            Image.new("RGB", (40, 40), "red").save(folder / name)
        else:
            (folder / name).write_bytes(content)
    return folder


HALF_A_JPEG = (CATS / "cat_1.jpg").read_bytes()[:30000]


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        ({}, ["no image"]),
        ({"notes.txt": b"hello", ".DS_Store": b"x", ".hidden.png": b"x"}, ["no image"]),
        ({"a.png": "photo", "half.jpg": HALF_A_JPEG}, ["half.jpg", "cannot be read"]),
        ({"a.png": "photo", "text.png": b"this is no picture"}, ["text.png", "cannot be read"]),
    ],
    ids=["empty", "imageless", "truncated", "no picture"],
)
def test_photos_that_cannot_be_used(flux, tmp_path, monkeypatch, capsys, files, parts):
    folder = photo_folder(tmp_path, files)
    message = refusal(flux.command(folder, tmp_path / "out"), monkeypatch, capsys)
    assert all(part in message for part in parts) and str(folder) in message


@pytest.mark.parametrize("flag", [f"--{name}" for name in blockskip._PATHS])
def test_a_name_that_no_file_can_have_is_refused(flux, tmp_path, monkeypatch, capsys, flag):
    more = ("--dry_run",) if flag == "--dry_run_json" else ("--skip_ratio", 0.5) if flag == "--block_curves" else ()
    more += ("--report_to", "tensorboard") if flag == "--logging_dir" else ()
    if flag == "--class_data_dir":
        more += ("--with_prior_preservation", "--class_prompt", "c")
    arguments = flux.command(CATS, tmp_path / "out", *more, flag, f"{tmp_path}/{256 * 'x'}")
    assert f"{flag} " in refusal(arguments, monkeypatch, capsys)


def test_folders_that_are_not_there(flux, tmp_path, monkeypatch, capsys):
    message = refusal(flux.command(tmp_path / "nowhere", tmp_path / "out"), monkeypatch, capsys)
    assert "--instance_data_dir" in message and "nowhere" in message
    arguments = flux.command(CATS, tmp_path / "out", "--pretrained_model_name_or_path", tmp_path / "model")
    message = refusal(arguments, monkeypatch, capsys)
    assert "--pretrained_model_name_or_path" in message
    (tmp_path / "file").write_text("")
    message = refusal(flux.command(CATS, tmp_path / "file" / "out"), monkeypatch, capsys)
    assert "--output_dir" in message and "is a file" in message


@pytest.mark.parametrize("missing", ["instance_prompt", "instance_data_dir", "pretrained_model_name_or_path"])
def test_flags_that_must_be_given(flux, tmp_path, monkeypatch, capsys, missing):
    arguments = flux.command(CATS, tmp_path / "out")
    at = arguments.index(f"--{missing}")
    assert f"--{missing}" in refusal(arguments[:at] + arguments[at + 2 :], monkeypatch, capsys)


def test_stray_files_beside_the_photos_are_named_once_and_passed_over(flux, tmp_path, caplog):
    folder = photo_folder(
        tmp_path, {"b.png": "photo", "A.JPG": "photo", ".DS_Store": b"x", "0.txt": b"", "e.png": b""}
    )
    (folder / "sub").mkdir()
    (folder / "Thumbs.db").write_bytes(b"x")
    with caplog.at_level("INFO"):
        paths = blockskip.find_photos(str(folder), "--instance_data_dir")
    assert [path.name for path in paths] == ["A.JPG", "b.png"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert all(name in line for name in (".DS_Store", "0.txt", "e.png", "sub", "Thumbs.db"))


@pytest.mark.parametrize("caption", ["5", "[1]", '{"a": 1}', "true"])
def test_a_caption_that_is_no_text_is_named_with_its_photo(flux, colours, tmp_path, monkeypatch, capsys, caption):
    lines = (colours / "metadata.jsonl").read_text().splitlines()
    lines[2] = f'{{"file_name": "blue.png", "text": {caption}}}'
    (colours / "metadata.jsonl").write_text("\n".join(lines))
    arguments = flux.command(colours, tmp_path / "out", "--caption_column", "text")
    assert "blue.png" in refusal(arguments, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("not json", "line 6"),
        ('{"text": "x"}', "line 6"),
        ('{"file_name": "red.png"}', "'text'"),
        ('{"file_name": "gone.png", "text": "x"}', "gone.png"),
        ('{"file_name": "../colours/red.png", "text": "x"}', "../colours/red.png"),
        ('{"file_name": ["red.png"], "text": "x"}', "line 6"),
        ('{"file_name": 5, "text": "x"}', "line 6"),
        ('{"file_name": "red.png", "text": "other"}', "line 6 names red.png again"),
        ("[" * 100000, "line 6"),
    ],
)
def test_metadata_that_does_not_fit_is_named(flux, colours, tmp_path, monkeypatch, capsys, line, part):
    with (colours / "metadata.jsonl").open("a") as file:
        file.write(line)
    arguments = flux.command(colours, tmp_path / "out", "--caption_column", "text")
    assert part in refusal(arguments, monkeypatch, capsys)


def test_a_photo_without_caption_and_no_instance_prompt(flux, colours, tmp_path, monkeypatch, capsys):
    (colours / "metadata.jsonl").write_text('{"file_name": "red.png", "text": "red"}\n')
    arguments = flux.command(colours, tmp_path / "out", "--caption_column", "text", prompt=None)
    assert "black.png" in refusal(arguments, monkeypatch, capsys)


def test_a_dataset_without_the_column(flux, colours, tmp_path, monkeypatch, capsys):
    arguments = flux.command("", tmp_path / "out", "--dataset_name", colours, "--caption_column", "words")
    message = refusal([*arguments, "--cache_dir", tmp_path / "cache"], monkeypatch, capsys)
    assert "--caption_column words" in message and "text" in message


def test_residuals_of_another_run_are_refused_with_what_differs(flux, tmp_path, monkeypatch, capsys):
    where = ("--residual_dir", tmp_path / "residuals")
    base = ("--skip_first", 2, "--skip_last", 3, *where)
    flux.run(flux.command(CATS, tmp_path / "out", *base, "--keep_residuals", steps=1))
    before = {path: path.read_bytes() for path in (tmp_path / "residuals").iterdir()}
    changes = {
        ("--seed", 1): "seed",
        ("--skip_first", 1): "skip counts",
        ("--resolution", 96): "sizes",
        ("--instance_prompt", "other"): "photos and captions",
        ("--guidance_scale", 1): "text",
        ("--residual_dtype", "fp32"): "precision",
        ("--mixed_precision", "bf16"): "precision",
        ("--weighting_scheme", "mode"): "timesteps",
        ("--random_flip",): "cropping",
    }
    for flags, name in changes.items():
        kept = [
            word
            for flag in ("--skip_first", "--skip_last")
            if flag not in flags
            for word in (flag, 2 + (flag[7] == "l"))
        ]
        arguments = flux.command(CATS, tmp_path / "out2", *where, *kept, *flags)
        message = refusal(arguments, monkeypatch, capsys)
        assert f"differs in {name}" in message and "--residual_dir" in message
    assert {path: path.read_bytes() for path in (tmp_path / "residuals").iterdir()} == before


def test_a_full_disk_is_foreseen(flux, tmp_path, monkeypatch, capsys):
    usage = collections.namedtuple("usage", "total used free")(100, 99, 1)
    monkeypatch.setattr(blockskip.shutil, "disk_usage", lambda path: usage)
    message = refusal(flux.command(CATS, tmp_path / "out"), monkeypatch, capsys)
    assert "free" in message and "--residual_dir" in message and "--residual_refresh_steps" in message


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--rank", 8), "--rank 4"),
        (("--lora_alpha", 8), "--lora_alpha 4"),
        (("--skip_first", 1), "--skip_first 2"),
        (("--seed", 5), "--seed 0"),
        (("--train_batch_size", 2), "--train_batch_size 1"),
        (("--resolution", 96), "--resolution 64"),
        (("--lora_layers", "attn.to_q"), "--lora_layers"),
        (("--learning_rate", 5e-7), "--learning_rate 0.0001"),
        (("--optimizer", "prodigy"), "--optimizer adamw"),
        (("--use_8bit_adam",), "--use_8bit_adam False"),
        (("--instance_prompt", "other"), "photos and captions"),
        (("--mixed_precision", "bf16"), "--mixed_precision no"),
        (("--max_train_steps", 1), "more than the 1 asked for"),
    ],
)
def test_resuming_as_another_run_is_refused(flux, tmp_path, monkeypatch, capsys, flags, part):
    out, kept = tmp_path / "out", ("--skip_first", 2) if "--skip_first" not in flags else ()
    flux.run(flux.command(CATS, out, "--skip_first", 2, "--checkpointing_steps", 2, steps=2))
    (out / "run_report.json").unlink()  # as if the run had been killed
    arguments = flux.command(CATS, out, *kept, *flags, "--resume_from_checkpoint", "latest", steps=3)
    assert part in refusal(arguments, monkeypatch, capsys)


@pytest.mark.parametrize("part", ["random_states_0.pkl", "optimizer.bin", "pytorch_lora_weights.safetensors"])
def test_a_checkpoint_with_a_part_missing_is_refused(flux, tmp_path, monkeypatch, capsys, part):
    out = tmp_path / "out"
    flux.run(flux.command(CATS, out, "--checkpointing_steps", 1, steps=1))
    (out / "checkpoint-1" / part).unlink()
    resume = ("--resume_from_checkpoint", "latest")
    message = refusal(flux.command(CATS, out, *resume, steps=2), monkeypatch, capsys)
    assert part in message and "checkpoint-1" in message and (out / "pytorch_lora_weights.safetensors").exists()


def test_a_tracker_that_cannot_be_started_is_one_plain_line(flux, tmp_path, monkeypatch, capsys):
    def no_key(*args, **kwargs):
        raise RuntimeError("No API key configured.\nMore lines")

    monkeypatch.setattr(blockskip.Accelerator, "init_trackers", no_key)
    message = refusal(flux.command(CATS, tmp_path / "out", "--report_to", "wandb"), monkeypatch, capsys)
    assert "--report_to wandb" in message and "No API key" in message


def test_the_command_line_itself_ends_with_one_line_and_a_status(flux, tmp_path):
    done = launch(flux.file, flux.command(CATS, tmp_path / "out", "--skip_first", 9))
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode == 1 and len(errors) == 1 and "Traceback" not in done.stderr
    done = launch(flux.file, flux.command(CATS, tmp_path / "out", "--resolution", "x"))
    assert done.returncode == 2 and "usage" not in done.stderr


def test_metadata_of_other_editors_is_read(colours):
    args = flux_script.parse_args(
        ["--pretrained_model_name_or_path", "", "--instance_data_dir", str(colours), "--caption_column", "text"]
    )
    captions = {"red": "one\u2028line", "lime": "two", "blue": "three", "white": "four", "black": "five"}
    rows = [{"file_name": f"{name}.png", "text": text} for name, text in captions.items()]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (colours / "metadata.jsonl").write_text(text, encoding="utf-8-sig", newline="")
    assert {photo.caption for photo in blockskip.load_photos(args)} == set(captions.values())
    (colours / "metadata.jsonl").write_bytes('{"file_name": "red.png", "text": "\xe9"}'.encode("latin-1"))
    with pytest.raises(SystemExit, match="UTF-8"):
        blockskip.load_photos(args)


@pytest.mark.parametrize("part", ["vae/config.json", "transformer/config.json", "scheduler/scheduler_config.json"])
def test_a_pipeline_with_a_part_missing_is_refused(flux, tmp_path, monkeypatch, capsys, part):
    shutil.copytree(flux.pipeline, tmp_path / "model")
    (tmp_path / "model" / part).unlink()
    arguments = flux.command(CATS, tmp_path / "out", "--pretrained_model_name_or_path", tmp_path / "model")
    assert part in refusal(arguments, monkeypatch, capsys)


CONFIGS = ["model_index.json", "transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[" * 100000, "\xff"], ids=["empty", "cut", "list", "deep", "bytes"]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_damaged_configuration_is_refused(case, tmp_path, monkeypatch, capsys, name, content):
    shutil.copytree(case.pipeline, tmp_path / "model")
    (tmp_path / "model" / name).write_text(content, encoding="latin-1")
    arguments = case.command(CATS, tmp_path / "out", "--pretrained_model_name_or_path", tmp_path / "model")
    message = refusal(arguments, monkeypatch, capsys, case.script)
    assert "--pretrained_model_name_or_path" in message and name.rpartition("/")[2] in message


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 23802932552\n"


@pytest.mark.parametrize(
    "change", [lambda b: POINTER, lambda b: b"", lambda b: b[:5], lambda b: b[:-9], lambda b: b + b"x"]
)
@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder"])
def test_weights_that_were_not_wholly_downloaded_are_named(case, tmp_path, monkeypatch, capsys, component, change):
    shutil.copytree(case.pipeline, tmp_path / "model")
    (path,) = (tmp_path / "model" / component).glob("*.safetensors")
    path.write_bytes(change(path.read_bytes()))
    arguments = case.command(CATS, tmp_path / "out", "--pretrained_model_name_or_path", tmp_path / "model")
    message = refusal(arguments, monkeypatch, capsys, case.script)
    assert f"{component}/{path.name}" in message and "download it again" in message
    assert ("Git LFS" in message) == (path.read_bytes() == POINTER)


def test_a_hub_that_cannot_be_reached_is_asked_once(flux, tmp_path):
    """Nothing listens at that port; the hub's own library would try six times, for half a minute."""
    arguments = flux.command(CATS, tmp_path / "out", "--pretrained_model_name_or_path", "some/model")
    done = launch(flux.file, arguments, HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(errors) == 1 and "some/model" in errors[0] and "hub" in errors[0]
    assert "Retrying" not in done.stderr and "Traceback" not in done.stderr


def test_guidance_that_a_model_does_not_take_is_refused(flux, tmp_path, monkeypatch, capsys):
    shutil.copytree(flux.pipeline, tmp_path / "model")
    path = tmp_path / "model" / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "guidance_embeds": False}))
    model = ("--pretrained_model_name_or_path", tmp_path / "model")
    arguments = flux.command(CATS, tmp_path / "out", *model, "--guidance_scale", 1)
    assert "--guidance_scale has no effect" in refusal(arguments, monkeypatch, capsys)


def test_a_distilled_sana_is_refused(sana, tmp_path, monkeypatch, capsys):
    shutil.copytree(sana.pipeline, tmp_path / "model")
    path = tmp_path / "model" / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "guidance_embeds": True}))
    arguments = sana.command(CATS, tmp_path / "out", "--pretrained_model_name_or_path", tmp_path / "model")
    assert "distilled" in refusal(arguments, monkeypatch, capsys, sana.script)


def test_a_model_for_inpainting_is_refused(flux, tmp_path, monkeypatch, capsys):
    shutil.copytree(flux.pipeline, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "transformer" / "config.json").read_text())
    config["in_channels"] *= 2
    (tmp_path / "model" / "transformer" / "config.json").write_text(json.dumps(config))
    arguments = flux.command(CATS, tmp_path / "out", "--pretrained_model_name_or_path", tmp_path / "model")
    assert "text-to-image" in refusal(arguments, monkeypatch, capsys)


@pytest.mark.parametrize("content", ['{"name": "app"}', "[1]", "nonsense"])
def test_a_foreign_manifest_is_refused_and_left_alone(flux, tmp_path, monkeypatch, capsys, content):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "manifest.json").write_text(content)
    arguments = flux.command(CATS, tmp_path / "out", "--residual_dir", folder)
    assert "manifest.json" in refusal(arguments, monkeypatch, capsys)
    assert (folder / "manifest.json").read_text() == content


def test_class_images_must_have_a_folder_of_their_own(flux, tmp_path, monkeypatch, capsys):
    prior = ("--with_prior_preservation", "--class_prompt", "c", "--class_data_dir")
    assert "--class_data_dir" in refusal(flux.command(CATS, tmp_path / "out", *prior, CATS), monkeypatch, capsys)
    (tmp_path / "file").write_text("")
    arguments = flux.command(CATS, tmp_path / "out", *prior, tmp_path / "file")
    assert "--class_data_dir" in refusal(arguments, monkeypatch, capsys)


def test_residuals_of_another_variant_are_not_used(flux, tmp_path, monkeypatch, capsys):
    shutil.copytree(flux.pipeline, tmp_path / "model")
    for weights in (tmp_path / "model").glob("*/*.safetensors"):
        shutil.copy(weights, weights.with_name(f"{weights.stem}.ema.safetensors"))
    model = ("--pretrained_model_name_or_path", tmp_path / "model", "--residual_dir", tmp_path / "residuals")
    flux.run(flux.command(CATS, tmp_path / "out", *model, "--keep_residuals", steps=1))
    arguments = flux.command(CATS, tmp_path / "two", *model, "--variant", "ema", steps=1)
    assert "base weights" in refusal(arguments, monkeypatch, capsys)
