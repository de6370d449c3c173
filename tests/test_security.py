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
"""What a user downloads cannot run code, what is secret stays so, and text cannot break out of its place.

These fail if anything but safetensors is loaded as weights, if a checkpoint's pickles or a pipeline's own code are
run, if a token reaches a file, a tracker or a message, or if a prompt or a name leaves its place in the model card.
"""

import ast
import json
import logging
import pickle
import re
import shutil

import pytest
import torch
import yaml
from diffusers.models.modeling_utils import ModelMixin
from huggingface_hub import ModelCard
from PIL import Image
from test_refusals import refusal
from transformers import PreTrainedModel

import blockskip_utils as blockskip
from conftest import CATS, ROOT, launch

TOKEN = "hf_" + "q" * 34


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


# ---------------------------------------------------------------------------------------------------------------------
# Nothing is run
# ---------------------------------------------------------------------------------------------------------------------


def copy_of(case, tmp_path):
    shutil.copytree(case.pipeline, tmp_path / "model")
    return tmp_path / "model", ("--pretrained_model_name_or_path", tmp_path / "model")


def test_every_weight_is_asked_for_in_safetensors_and_no_code_is_trusted(case, tmp_path, monkeypatch):
    """Every call that loads a model, in a run with class images and validation, says so."""
    asked = []
    for model in (ModelMixin, PreTrainedModel):
        original = model.from_pretrained.__func__

        def load(cls, *args, original=original, **options):
            asked.append((cls.__name__, options.get("use_safetensors"), options.get("trust_remote_code", False)))
            return original(cls, *args, **options)

        monkeypatch.setattr(model, "from_pretrained", classmethod(load))
    flags = ("--with_prior_preservation", "--class_data_dir", tmp_path / "class", "--class_prompt", "c")
    flags += ("--num_class_images", 1, "--validation_prompt", "x", "--num_validation_images", 1)
    case.run(case.command(CATS, tmp_path / "out", *case.skip, *flags, steps=1))
    assert {name for name, *_ in asked} >= {case.family.transformer_class.__name__}
    assert len({name for name, *_ in asked}) >= 3  # transformer, VAE, text encoders
    assert {tuple(rest) for _, *rest in asked} == {(True, False)}


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder"])
def test_pickled_weights_are_not_loaded(case, tmp_path, monkeypatch, capsys, component):
    model, flags = copy_of(case, tmp_path)
    for file in (model / component).glob("*.safetensors"):
        file.unlink()
    for name in ("diffusion_pytorch_model.bin", "pytorch_model.bin"):
        (model / component / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    arguments = case.command(CATS, tmp_path / "out", *flags)
    message = refusal(arguments, monkeypatch, capsys, case.script)
    assert "safetensors" in message and component in message and not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("variant", ["", ".fp16"])
@pytest.mark.parametrize("shard", ["diffusion_pytorch_model.bin", "../../evil.safetensors", "gone.safetensors"])
def test_an_index_cannot_name_shards_of_another_kind_or_place(case, tmp_path, monkeypatch, capsys, shard, variant):
    model, flags = copy_of(case, tmp_path)
    (model / "transformer" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    index = {"metadata": {"total_size": 1}, "weight_map": {"x_embedder.weight": shard}}
    (model / "transformer" / f"diffusion_pytorch_model.safetensors.index{variant}.json").write_text(json.dumps(index))
    message = refusal(case.command(CATS, tmp_path / "out", *flags), monkeypatch, capsys, case.script)
    assert shard in message and f"index{variant}.json" in message and not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("entry", ["text_encoder", "vae", "scheduler", "_class_name"])
def test_code_that_lies_in_a_pipelines_folder_is_not_run(case, tmp_path, monkeypatch, capsys, entry):
    model, flags = copy_of(case, tmp_path)
    index = json.loads((model / "model_index.json").read_text())
    index[entry] = ["evil", "Evil"]
    (model / "model_index.json").write_text(json.dumps(index))
    for folder in (model, model / "text_encoder", model / "vae", model / "scheduler"):
        (folder / "evil.py").write_text(f"open({str(tmp_path / 'exploded')!r}, 'w')\nclass Evil: pass\n")
    message = refusal(case.command(CATS, tmp_path / "out", *flags), monkeypatch, capsys, case.script)
    assert "model_index.json" in message and "evil" in message and not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_that_a_config_maps_classes_to_is_not_run(flux, tmp_path, name):
    """`auto_map` is how transformers finds a repository's own code, if it is told to trust it."""
    model, flags = copy_of(flux, tmp_path)
    folder = model / ("text_encoder" if name == "config.json" else "tokenizer")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'exploded')!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / name).read_text())
    classes = ["AutoModel", "AutoConfig", "AutoTokenizer", "CLIPTextModel", "CLIPTokenizer"]
    config["auto_map"] = dict.fromkeys(classes, "evil.Evil")
    (folder / name).write_text(json.dumps(config))
    flux.run(flux.command(CATS, tmp_path / "out", *flags, steps=1))
    assert not (tmp_path / "exploded").exists() and "evil" not in blockskip.sys.modules


PICKLES = ["optimizer.bin", "random_states_0.pkl", "lr_scheduler.bin"]


@pytest.fixture(scope="module")
def checkpointed(flux, tmp_path_factory):
    """A run with a checkpoint, to be resumed."""
    out = tmp_path_factory.mktemp("checkpointed") / "out"
    flux.run(flux.command(CATS, out, "--checkpointing_steps", 1, steps=1))
    (out / "run_report.json").unlink()
    return out


def resume(flux, out):
    return flux.command(CATS, out, "--resume_from_checkpoint", "latest", steps=2)


@pytest.mark.parametrize("name", PICKLES)
def test_code_in_a_checkpoint_is_refused_and_not_run(flux, checkpointed, tmp_path, monkeypatch, capsys, name):
    out = tmp_path / "out"
    shutil.copytree(checkpointed, out)
    path = out / "checkpoint-1" / name
    state = torch.load(path, weights_only=False)
    torch.save({"state": state, "evil": Bomb(tmp_path / "exploded")}, path)
    message = refusal(resume(flux, out), monkeypatch, capsys)
    assert name in message and not (tmp_path / "exploded").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "exploded").exists()  # the file would have done it


@pytest.mark.parametrize("name", [*PICKLES, "pytorch_lora_weights.safetensors"])
@pytest.mark.parametrize("cut", [0, 30, -20])
def test_a_damaged_file_in_a_checkpoint_is_named(flux, checkpointed, tmp_path, monkeypatch, capsys, name, cut):
    out = tmp_path / "out"
    shutil.copytree(checkpointed, out)
    path = out / "checkpoint-1" / name
    path.write_bytes(path.read_bytes()[:cut])
    message = refusal(resume(flux, out), monkeypatch, capsys)
    assert name in message and "checkpoint-1" in message


def test_a_checkpoint_is_read_without_unpickling_by_accelerate_either(flux, checkpointed, tmp_path, monkeypatch):
    out, modes = tmp_path / "out", []
    shutil.copytree(checkpointed, out)
    load = torch.load

    def observed(*args, **options):
        modes.append(options.get("weights_only"))
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", observed)
    flux.run(resume(flux, out))
    assert len(modes) >= 2 * len(PICKLES) and all(modes)


def test_the_sources_unpickle_nothing():
    for name in ("blockskip_utils.py", "train_dreambooth_blockskip_flux.py", "train_dreambooth_blockskip_sana.py"):
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "dill", "joblib", "marshal", "shelve", "subprocess"} & set(names)
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert called not in ("eval", "exec", "os.system", "__import__"), node.lineno
                assert options.get("trust_remote_code", "False") == "False"
                assert called != "torch.load" or options["weights_only"] == "True"
                assert called not in ("np.load", "numpy.load", "pd.read_pickle")


@pytest.mark.parametrize("name", ["photos.py", "colours.py"])
def test_a_datasets_own_code_is_not_run(flux, colours, tmp_path, monkeypatch, capsys, name):
    folder = colours.parent / name.removesuffix(".py")
    if folder != colours:
        shutil.copytree(colours, folder)
    (folder / name).write_text(f"open({str(tmp_path / 'exploded')!r}, 'w')\n")
    data = ("--instance_data_dir", "", "--dataset_name", folder, "--cache_dir", tmp_path / "cache")
    message = refusal(flux.command("", tmp_path / "out", *data), monkeypatch, capsys)
    assert "--dataset_name" in message and not (tmp_path / "exploded").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Tokens stay secret
# ---------------------------------------------------------------------------------------------------------------------


def files_with(folder, secret):
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


class Repository:
    def __init__(self, repo_id):
        self.repo_id = repo_id


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_a_token_reaches_no_file_log_or_tracker(case, tmp_path, monkeypatch, capfd, caplog, way):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("huggingface_hub.create_repo", lambda repo_id, **rest: Repository(f"me/{repo_id}"))
    used = []
    monkeypatch.setattr("huggingface_hub.upload_folder", lambda **rest: used.append(rest["token"]))
    configs = []
    start = blockskip.Accelerator.init_trackers
    monkeypatch.setattr(
        blockskip.Accelerator,
        "init_trackers",
        lambda self, name, config, **rest: (configs.append(config), start(self, name, config, **rest)),
    )
    monkeypatch.setenv("WANDB_API_KEY", "w" * 40)
    flags = ("--push_to_hub", "--report_to", "tensorboard", "--checkpointing_steps", 1, "--keep_residuals")
    if way == "flag":
        flags += ("--hub_token", TOKEN)
    else:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    case.run(case.command(CATS, tmp_path / "out", *case.skip, *flags, steps=1))
    assert used == [TOKEN if way == "flag" else None]
    output = capfd.readouterr()
    for secret in (TOKEN, "w" * 40):
        assert files_with(tmp_path, secret) == []
        assert secret not in output.out + output.err + caplog.text + repr(configs)
    assert (tmp_path / "out" / "run_report.json").exists() and (tmp_path / "out" / "README.md").exists()


MISTYPED = {
    "mistyped flag": ["--hub_tokn", TOKEN],
    "mistyped with equals sign": [f"--hubtoken={TOKEN}"],
    "short secret after a mistyped flag": ["--hub_tokn", "s3cret"],
    "as the value of another flag": ["--rank", TOKEN],
    "as a choice": ["--lr_scheduler", TOKEN],
    "as a name": ["--resume_from_checkpoint", TOKEN],
    "as a repository": ["--push_to_hub", "--hub_model_id", f"{TOKEN}/.."],
    "as a folder": ["--instance_data_dir", TOKEN],
    "with a line end": ["--push_to_hub", "--hub_token", f"{TOKEN}\n"],
    "without the flag it needs": ["--hub_token", TOKEN],
}


@pytest.mark.parametrize("words", MISTYPED.values(), ids=MISTYPED)
def test_an_error_line_does_not_repeat_a_token(flux, tmp_path, monkeypatch, capsys, words):
    message = refusal(flux.command(CATS, tmp_path / "out", *words), monkeypatch, capsys)
    assert TOKEN not in message and "s3cret" not in message


def test_what_the_hub_answers_is_shown_without_the_token(flux, tmp_path, monkeypatch, capsys):
    def illegal(**rest):
        raise OSError(f"Illegal header value b'Bearer {rest['token']}'")

    monkeypatch.setattr("huggingface_hub.create_repo", illegal)
    arguments = flux.command(CATS, tmp_path / "out", "--push_to_hub", "--hub_token", "short-but-secret")
    message = refusal(arguments, monkeypatch, capsys)
    assert "Illegal header" in message and "short-but-secret" not in message and blockskip.HIDDEN in message


def test_a_tracker_that_keeps_the_command_line_takes_no_token(flux, tmp_path, monkeypatch, capsys):
    for tracker in ("wandb", "comet_ml", "mlflow", "all"):
        words = ("--push_to_hub", "--hub_token", TOKEN, "--report_to", tracker)
        message = refusal(flux.command(CATS, tmp_path / "out", *words), monkeypatch, capsys)
        assert "--hub_token would be stored" in message and TOKEN not in message


# ---------------------------------------------------------------------------------------------------------------------
# Text stays in its place
# ---------------------------------------------------------------------------------------------------------------------

HOSTILE = {
    "front matter": "x\n---\nlicense: mit\n---\n# owned",
    "yaml": "a: b # {c: [d, !!python/object/apply:os.system ['x']]} 'q' \"r\" |\n  - e",
    "fence": "x\n```\n\n# owned\n<script>alert(1)</script>\n```python\n",
    "python": 'x") or __import__("os").system("true") or ("',
    "backslash": "x\\",
    "template": "{{ 7 * 7 }} {% raw %} {model_description}",
    "unicode": "\u202e\u2028\u0085\ufeff \U0001f600 \u00e9 \x1b[31m",
    "markdown": "](javascript:alert(1)) ![x](y) | `code` **bold**",
}


def card_of(folder):
    """A model card's front matter and body; the body's example as Python's syntax tree."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\n") and text.count("\n---\n") == 1
    front, body = text[4:].split("\n---\n")
    code, todo = re.findall(r"^```python\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
    outside = body.replace(code, "")
    assert todo.startswith("# TODO") and todo.count("\n") == 1  # of the template
    assert len(re.findall(r"^```", body, re.MULTILINE)) == 4
    return yaml.safe_load(front), outside, ast.parse(code)


def calls_of(tree):
    return [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("prompt", HOSTILE.values(), ids=HOSTILE)
def test_a_prompt_cannot_break_out_of_the_model_card(case, tmp_path, prompt):
    flags = ("--validation_prompt", prompt, "--num_validation_images", 1)
    case.run(case.command(CATS, tmp_path / "out", *case.skip, *flags, prompt=prompt, steps=1))
    front, outside, code = card_of(tmp_path / "out")
    assert front["instance_prompt"] == prompt and front["widget"][0]["text"] == prompt
    assert front.keys() <= {"library_name", "base_model", "instance_prompt", "widget", "tags"}
    assert "owned" not in outside and "<script" not in outside and "49" not in outside and "javascript" not in outside
    assert prompt in [node.value for node in ast.walk(code) if isinstance(node, ast.Constant)]
    name = case.family.pipeline_class.__name__
    assert set(calls_of(code)) == {f"{name}.from_pretrained", "pipeline.to", "pipeline.load_lora_weights", "pipeline"}
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.instance_prompt == prompt and card.data.library_name == "diffusers"


@pytest.mark.parametrize("prompt", HOSTILE.values(), ids=HOSTILE)
def test_a_caption_cannot_break_out_of_the_model_card(flux, tmp_path, prompt):
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (40, 40)).save(tmp_path / "photos" / "a.png")
    (tmp_path / "photos" / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": prompt}))
    flux.run(flux.command(tmp_path / "photos", tmp_path / "out", "--caption_column", "text", prompt=None, steps=1))
    _, outside, code = card_of(tmp_path / "out")
    assert "owned" not in outside and "<script" not in outside
    assert prompt in [node.value for node in ast.walk(code) if isinstance(node, ast.Constant)]


@pytest.mark.parametrize("name", ["m`\n# owned\n<b>", '"x"\n```\n# owned', "a b' --- #"], ids=repr)
def test_names_of_folders_cannot_break_out_of_the_model_card(flux, tmp_path, name):
    model, out = tmp_path / name, tmp_path / f"out {name}"
    shutil.copytree(flux.pipeline, model)
    flux.run(flux.command(CATS, out, "--pretrained_model_name_or_path", model, steps=1))
    front, outside, code = card_of(out)
    assert "\n# owned" not in outside and "base_model" not in front
    assert outside.count("`") % 2 == 0 and re.search(r"for `[^`\n]*`, trained", outside)
    assert name in [node.value for node in ast.walk(code) if isinstance(node, ast.Constant)]


REPOSITORIES = [
    "../../x",
    "/etc/x",
    "a/b/c",
    "x y",
    "me/x\n",
    "me/..",
    "me/x.git",
    "https://elsewhere.net/x",
    ".",
    "~/x",
]


@pytest.mark.parametrize("name", REPOSITORIES)
def test_a_repository_has_the_name_of_one(flux, tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr("huggingface_hub.create_repo", lambda **rest: pytest.fail("the hub was asked"))
    words = ("--push_to_hub", "--hub_model_id", name)
    assert "--hub_model_id" in refusal(flux.command(CATS, tmp_path / "out", *words), monkeypatch, capsys)


def test_an_output_folder_that_no_repository_can_be_named_after_is_refused(flux, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.create_repo", lambda **rest: pytest.fail("the hub was asked"))
    arguments = flux.command(CATS, tmp_path / "my run!", "--push_to_hub")
    assert "--hub_model_id" in refusal(arguments, monkeypatch, capsys)


def test_names_of_photos_decide_no_path_that_is_written(flux, tmp_path):
    photos, home = tmp_path / "photos", tmp_path / "home"
    photos.mkdir()
    home.mkdir()
    for name in (
        "-rf.png",
        "..png",
        "a\nb.png",
        "$(touch x).png",
        "'; x.png",
        "%s{0}.png",
        "blockskip-class-00000.png",
    ):
        Image.new("RGB", (40, 40)).save(photos / name, format="PNG")
    before = sorted(photos.iterdir())
    done = launch(flux.file, flux.command(photos, home / "out", "--keep_residuals", steps=6), HOME=str(home))
    assert done.returncode == 0, done.stderr
    written = {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()}
    stored = r"residuals/(manifest\.json|rank0-\d+-instance\.safetensors)"
    own = rf"out/(README\.md|run_report\.json|pytorch_lora_weights\.safetensors|{stored})"
    assert all(re.fullmatch(own, name) for name in written if name.startswith("out/")) and len(written) >= 10
    assert sorted(photos.iterdir()) == before and sorted(tmp_path.iterdir()) == [home, photos]


def test_names_with_line_ends_do_not_forge_lines_of_the_log(flux, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (40, 40)).save(photos / "a.png")
    (photos / "x\nerror: forged.txt").write_text("")
    done = launch(flux.file, flux.command(photos, tmp_path / "out", "--skip_first", 9))
    lines = done.stderr.splitlines()
    assert not any(line.startswith("error: forged") for line in lines)
    assert any(r"x\nerror: forged.txt" in line for line in lines)
