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
"""examples/evaluate.py: the scores, the layouts of photos and prompts, drawing, and going on.

These fail if a score is not the cosine that its name says, if a picture is compared with another subject's photos or
another prompt, if a prompt is scored with the token or drawn without it, if a subject is drawn with another's LoRA, if
anything is drawn or embedded twice or kept though what it rests on has changed, or if a mistake is found only after a
model has been loaded.
"""

import csv
import json
import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPModel,
    SiglipConfig,
    SiglipModel,
    ViTImageProcessor,
    ViTModel,
)

import evaluate
import generate
import subject_folders
from build_tiny_pipeline import build_tiny_flux
from conftest import CATS, ROOT, SMALL, launch, parser_refusal

SIZE = ("--height", 64, "--width", 64, "--num_inference_steps", 2)
PLACES = ("a {} in snow", "a drawing of a {}", "the {} by the sea")


def noise(path, seed, size=(40, 36)):
    """A picture of its own for each seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def data(tmp_path):
    """Two subjects of 3 and 2 photos with 3 prompts; of each, pictures of the first two prompts by two seeds."""
    for name, count, first in (("hat", 3, 0), ("red_dog2", 2, 10)):
        for number in range(count):
            noise(tmp_path / "data" / name / f"{number}.png", first + number)
        for number in range(4):
            picture = f"prompt{number // 2}-seed{number % 2}.png"
            noise(tmp_path / "out" / "pictures" / name / picture, 100 + first + number)
    (tmp_path / "data" / "prompts.txt").write_text("\n".join(PLACES))
    return tmp_path


@pytest.fixture
def score(data, vision):
    """Score what lies in `data`; returns the rows of the CSV file by subject, prompt and seed."""

    def run(*extra):
        words = ["--data_dir", data / "data", "--output", data / "out"]
        words += [] if "--dino_model" in extra or "--metrics" in extra else ["--dino_model", vision / "dino"]
        words += [] if "--clip_model" in extra or "--metrics" in extra else ["--clip_model", vision / "clip"]
        evaluate.main(evaluate.parse_args([str(word) for word in (*words, *extra)]))
        return rows_of(data / "out")

    return run


def rows_of(output):
    with (output / "scores.csv").open(newline="") as file:
        return {(row["subject"], int(row["prompt"]), int(row["seed"])): row for row in csv.DictReader(file)}


@pytest.fixture
def embedded(monkeypatch):
    """The number of pictures in each call of a vision model."""
    counts, original = [], evaluate.Embedder.__call__

    def counted(self, images):
        counts.append(len(images))
        return original(self, images)

    monkeypatch.setattr(evaluate.Embedder, "__call__", counted)
    return counts


# ---------------------------------------------------------------------------------------------------------------------
# Scores
# ---------------------------------------------------------------------------------------------------------------------


def cosine(one, other):
    return float(np.dot(one, other) / math.sqrt(np.dot(one, one) * np.dot(other, other)))


@torch.no_grad()
def embed_alone(folder, path=None, text=None):
    """The embedding of one picture or text by the model itself, as float64."""
    if text is not None:
        model, tokenizer = CLIPModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        states = model.text_model(**tokenizer([text], return_tensors="pt")).pooler_output
        return model.text_projection(states)[0].double().numpy()
    image = Image.open(path).convert("RGB")
    if folder.name == "clip":
        model = CLIPModel.from_pretrained(folder).eval()
        pixels = CLIPImageProcessor.from_pretrained(folder)(images=image, return_tensors="pt")["pixel_values"]
        return model.visual_projection(model.vision_model(pixels).pooler_output)[0].double().numpy()
    pixels = ViTImageProcessor.from_pretrained(folder)(images=image, return_tensors="pt")["pixel_values"]
    return ViTModel.from_pretrained(folder).eval()(pixels).last_hidden_state[0, 0].double().numpy()


def test_scores_are_the_cosines_of_what_the_models_say(score, data, vision, capsys):
    rows = score("--batch_size", 3)
    assert list(rows) == [(name, p, s) for name in ("hat", "red_dog2") for p in (0, 1) for s in (0, 1)]
    texts = {
        "hat": ("a hat in snow", "a drawing of a hat"),
        "red_dog2": ("a red dog in snow", "a drawing of a red dog"),
    }
    expected = {}
    for (name, prompt, seed), row in rows.items():
        picture = data / "out" / "pictures" / name / f"prompt{prompt}-seed{seed}.png"
        photos = sorted((data / "data" / name).iterdir())
        pairs = {
            metric: [cosine(embed_alone(vision / of, picture), embed_alone(vision / of, photo)) for photo in photos]
            for metric, of in (("dino", "dino"), ("clip_i", "clip"))
        }
        values = {metric: sum(cosines) / len(photos) for metric, cosines in pairs.items()}
        text = embed_alone(vision / "clip", text=texts[name][prompt])
        values["clip_t"] = cosine(embed_alone(vision / "clip", picture), text)
        assert {metric: float(row[metric]) for metric in values} == pytest.approx(values, abs=1e-6)
        assert row["text"] == texts[name][prompt]
        expected[name, prompt, seed] = values
    assert len({values["clip_t"] for values in expected.values()}) == 8  # no two rows are alike by chance
    summary, printed = json.loads((data / "out" / "summary.json").read_text()), capsys.readouterr().out
    assert "hat: no picture of 1 of 3 prompts" in printed
    for metric in ("dino", "clip_i", "clip_t"):
        means = {
            name: np.mean([values[metric] for key, values in expected.items() if key[0] == name])
            for name in ("hat", "red_dog2")
        }
        assert {name: of[metric] for name, of in summary["subjects"].items()} == pytest.approx(means, abs=1e-6)
        assert summary["mean"][metric] == pytest.approx(np.mean(list(means.values())), abs=1e-6)
        assert summary["standard_deviation"][metric] == pytest.approx(np.std(list(means.values()), ddof=1), abs=1e-6)
        assert f"{summary['subjects']['hat'][metric]:.4f}" in printed and f"{summary['mean'][metric]:.4f}" in printed


class ByColour:
    """Embeds a picture by its mean colour, and a text by the colours that it names."""

    def __init__(self, *args, **options):
        pass

    def __call__(self, images):
        return torch.tensor(np.stack([np.asarray(image, dtype=np.float32).mean(axis=(0, 1)) for image in images]))

    def texts(self, texts):
        return torch.tensor([[float(name in text) for name in ("red", "green", "blue")] for text in texts])


def test_scores_of_plain_colours_are_those_of_school(score, data, monkeypatch):
    """Photos of red and green; a yellow picture has the cosine 1 / sqrt(2) to each, a red one 1 and 0."""
    for folder in (data / "data" / "hat", data / "out" / "pictures" / "hat"):
        shutil.rmtree(folder)
        folder.mkdir()
    for name, colour in {"0.png": "red", "1.png": "lime"}.items():
        Image.new("RGB", (20, 30), colour).save(data / "data" / "hat" / name)
    (data / "data" / "prompts.txt").write_text("a {}\na red {}\na green and blue {}")
    for name, colour in {"prompt1-seed5": "red", "prompt2-seed0": "yellow"}.items():
        Image.new("RGB", (20, 20), colour).save(data / "out" / "pictures" / "hat" / f"{name}.png")
    monkeypatch.setattr(evaluate, "Embedder", ByColour)
    rows = score("--subjects", "hat")
    found = {key[1:]: [float(row[metric]) for metric in evaluate.METRICS] for key, row in rows.items()}
    assert found == {
        (1, 5): pytest.approx([0.5, 0.5, 1.0], abs=1e-7),
        (2, 0): pytest.approx([1 / math.sqrt(2), 1 / math.sqrt(2), 0.5], abs=1e-7),
    }
    summary = json.loads((data / "out" / "summary.json").read_text())
    assert summary["mean"]["clip_t"] == pytest.approx(0.75) and summary["standard_deviation"]["clip_t"] is None


def test_a_picture_that_is_the_photo_scores_one(score, data):
    for number in (1, 2):
        (data / "data" / "hat" / f"{number}.png").unlink()
    shutil.copy(data / "data" / "hat" / "0.png", data / "out" / "pictures" / "hat" / "prompt1-seed1.png")
    row = score()["hat", 1, 1]
    assert float(row["dino"]) == pytest.approx(1, abs=1e-6) and float(row["clip_i"]) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("metric", evaluate.METRICS)
def test_metrics_may_be_left_out_and_their_model_is_not_needed(score, vision, data, metric):
    of = "dino" if metric == "dino" else "clip"
    rows = score("--metrics", metric, f"--{of}_model", vision / of)
    assert all(bool(row[name]) == (name == metric) for row in rows.values() for name in evaluate.METRICS)
    assert list(json.loads((data / "out" / "summary.json").read_text())["mean"]) == [metric]


def test_a_convolutional_model_may_take_dinos_place(score, vision):
    assert all(-1 <= float(row["dino"]) <= 1 for row in score("--dino_model", vision / "convolutional").values())


def test_siglip_may_take_clips_place_and_reads_texts_of_full_length(score, vision, tmp_path):
    part = {**SMALL, "image_size": 32, "patch_size": 8, "vocab_size": 520, "max_position_embeddings": 40}
    torch.manual_seed(0)
    model = SiglipModel(SiglipConfig(text_config=part, vision_config=part)).eval()
    shutil.copytree(vision / "clip", tmp_path / "siglip")  # for its tokenizer and image processor
    model.save_pretrained(tmp_path / "siglip")
    tokenizer = AutoTokenizer.from_pretrained(vision / "clip")
    embed = evaluate.Embedder(str(tmp_path / "siglip"), torch.device("cpu"), with_texts=True)
    tokens = tokenizer("a hat", return_tensors="pt", padding="max_length", max_length=40)
    assert tokens["input_ids"].shape == (1, 40)
    with torch.no_grad():
        assert torch.equal(embed.texts(["a hat"]), model.text_model(**tokens).pooler_output)
    assert all(-1 <= float(row["clip_t"]) <= 1 for row in score("--clip_model", tmp_path / "siglip").values())


# ---------------------------------------------------------------------------------------------------------------------
# Going on
# ---------------------------------------------------------------------------------------------------------------------


def test_what_is_scored_is_not_scored_again(score, data, embedded):
    first = score()
    assert sum(embedded) == 2 * (8 + 5)  # pictures and photos, by two models
    files = {name: (data / "out" / name).read_bytes() for name in ("scores.csv", "summary.json")}
    embedded.clear()
    assert score() == first and not embedded
    assert files == {name: (data / "out" / name).read_bytes() for name in files}


def test_what_has_changed_is_scored_again_and_nothing_else(score, data, vision, embedded):
    first = score()

    def changed_by(*extra):
        embedded.clear()
        again = score(*extra)
        return {key for key in again if again[key] != first.get(key)}, sum(embedded)

    noise(data / "out" / "pictures" / "hat" / "prompt1-seed0.png", 77)
    assert changed_by() == ({("hat", 1, 0)}, 2 * (1 + 3))
    noise(data / "out" / "pictures" / "hat" / "prompt2-seed3.png", 78)  # one more
    assert changed_by() == ({("hat", 1, 0), ("hat", 2, 3)}, 2 * (1 + 3))
    first = score()
    noise(data / "data" / "red_dog2" / "1.png", 79)
    assert changed_by() == ({key for key in first if key[0] == "red_dog2"}, 2 * (4 + 2))
    first = score()
    (data / "data" / "prompts.txt").write_text("\n".join((PLACES[0], "a {} on a bicycle", PLACES[2])))
    assert changed_by()[0] == {key for key in first if key[1] == 1}
    first = score()
    model = ViTModel.from_pretrained(vision / "dino")
    shutil.copytree(vision / "dino", data / "other")
    model.embeddings.cls_token.data += 1
    model.save_pretrained(data / "other")
    keys, count = changed_by("--dino_model", data / "other")
    assert keys == set(first) and count == len(first) + 5  # of DINO alone
    assert all(row["clip_i"] == first[key]["clip_i"] for key, row in rows_of(data / "out").items())


def test_a_metric_asked_for_later_joins_those_that_are_there(score, vision, embedded):
    whole = score()
    embedded.clear()
    assert score("--metrics", "dino", "--dino_model", vision / "dino") == whole and not embedded


def test_scores_of_other_subjects_stay(score, data):
    whole = score()
    noise(data / "out" / "pictures" / "hat" / "prompt0-seed0.png", 5)
    (data / "out" / "pictures" / "hat" / "prompt0-seed1.png").unlink()
    part = score("--subjects", "hat")
    assert {key: row for key, row in part.items() if key[0] == "red_dog2"} == {
        key: row for key, row in whole.items() if key[0] == "red_dog2"
    }
    assert sorted(key for key in part if key[0] == "hat") == [("hat", 0, 0), ("hat", 1, 0), ("hat", 1, 1)]
    assert list(json.loads((data / "out" / "summary.json").read_text())["subjects"]) == ["hat"]


def test_what_was_scored_before_an_interruption_is_kept(score, data, monkeypatch, embedded):
    straight = score()
    (data / "out" / "scores.csv").unlink()
    original = evaluate.measure

    def interrupted(embed, model, subject, *rest):
        if subject.name == "red_dog2":
            raise KeyboardInterrupt
        original(embed, model, subject, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            score()
    assert {key[0] for key in rows_of(data / "out")} == {"hat"}
    embedded.clear()
    assert score() == straight and sum(embedded) == 2 * (4 + 2)


# ---------------------------------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------------------------------

DREAMBOOTH = """Classes

subject_name,class
backpack_dog,backpack
cat2,cat
bear_plushie,stuffed animal

Prompts, which don't name it's subject

Object Prompts
prompt_list = [
'a {0} {1} in the jungle'.format(unique_token, class_token),
"a {0} {1} in a chef's kitchen".format(unique_token, class_token),
'a cube shaped {0} {1}'.format(unique_token, class_token)
]

Live Subject Prompts
prompt_list = [
'a {0} {1} wearing a red hat'.format(unique_token, class_token),
]
"""


@pytest.mark.parametrize("data_dir", [".", "dataset"])
def test_dreambooths_layout(tmp_path, data_dir, capsys):
    for number, name in enumerate(("backpack_dog", "cat2", "bear_plushie", "unlisted")):
        noise(tmp_path / "dataset" / name / "00.jpg", number)
    (tmp_path / "dataset" / "prompts_and_classes.txt").write_text(DREAMBOOTH)
    subjects = {subject.name: subject for subject in subject_folders.find_subjects(tmp_path / data_dir)}
    drawn = {name: [prompt.drawn for prompt in subject.prompts] for name, subject in subjects.items()}
    assert drawn == {
        "backpack_dog": [
            "a sks backpack in the jungle",
            "a sks backpack in a chef's kitchen",
            "a cube shaped sks backpack",
        ],
        "bear_plushie": [
            "a sks stuffed animal in the jungle",
            "a sks stuffed animal in a chef's kitchen",
            "a cube shaped sks stuffed animal",
        ],
        "cat2": ["a sks cat wearing a red hat"],
    }
    assert subjects["cat2"].prompts[0].plain == "a cat wearing a red hat"
    assert [photo.name for photo in subjects["cat2"].photos] == ["00.jpg"]
    assert "passed over unlisted" in capsys.readouterr().out


def custom_concept(root, **changes):
    """A sample in CustomConcept101's layout; a change of None takes an entry out."""
    entry = {
        "instance_prompt": "photo of a <new1> cat",
        "class_prompt": "a photo of a cat",
        "prompt_filename": "prompts/pet.txt",
        "instance_data_dir": "./benchmark_dataset/pet_cat1",
    }
    entry = {name: value for name, value in {**entry, **changes}.items() if value is not None}
    other = {"class_prompt": "barn", "prompt_filename": "scene.txt", "instance_data_dir": "elsewhere/scene_barn"}
    root.mkdir(exist_ok=True)
    (root / "dataset.json").write_text(json.dumps([entry, other]))
    (root / "prompts").mkdir(exist_ok=True)
    (root / "prompts" / "pet.txt").write_text("A {} on a sofa\n\n{} at night\n")
    (root / "prompts" / "scene.txt").write_text("the {} in winter\n")
    noise(root / "benchmark_dataset" / "pet_cat1" / "1.jpeg", 1)
    noise(root / "benchmark_dataset" / "scene_barn" / "1.jpeg", 2)


@pytest.mark.parametrize("token", [None, "sks"])
def test_custom_concept_101s_layout(tmp_path, token):
    custom_concept(tmp_path / "c")
    cat, barn = subject_folders.find_subjects(tmp_path / "c", unique_token=token)
    assert (cat.name, barn.name) == ("pet_cat1", "scene_barn")
    shown = token or "<new1>"
    assert [prompt.drawn for prompt in cat.prompts] == [f"A {shown} cat on a sofa", f"{shown} cat at night"]
    assert [prompt.plain for prompt in cat.prompts] == ["A cat on a sofa", "cat at night"]
    assert [prompt.drawn for prompt in barn.prompts] == ["the sks barn in winter"]
    assert [photo.source.parent.name for photo in barn.photos] == ["scene_barn"]


def test_a_plain_folder_of_photos_is_one_subject(tmp_path):
    (tmp_path / "p.txt").write_text("\ufeffa {} on the moon\r\n", encoding="utf-8")
    (subject,) = subject_folders.find_subjects(CATS, prompts=tmp_path / "p.txt", class_word="big cat")
    assert subject.name == "cat" and len(subject.photos) == 5
    assert [(p.drawn, p.plain) for p in subject.prompts] == [("a sks big cat on the moon", "a big cat on the moon")]
    (bare,) = subject_folders.find_subjects(CATS, prompts=tmp_path / "p.txt", unique_token="")
    assert [(p.drawn, p.plain) for p in bare.prompts] == [("a cat on the moon", "a cat on the moon")]


def test_plain_folders_are_named_in_a_file_or_by_themselves(data):
    (data / "data" / "classes.txt").write_text("folder,class\nred_dog2, poodle\n")
    subjects = {subject.name: subject for subject in subject_folders.find_subjects(data / "data")}
    assert [subjects[name].prompts[0].plain for name in ("hat", "red_dog2")] == ["a hat in snow", "a poodle in snow"]


def test_the_examples_prompts_have_a_place_for_the_subject():
    assert len(subject_folders.read_prompts(ROOT / "examples" / "prompts.txt", "--prompts")) == 10


# ---------------------------------------------------------------------------------------------------------------------
# Drawing
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def loras(case, tmp_path_factory):
    """LoRAs of the two subjects of `data`, trained with dropout."""
    root = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("hat", "red_dog2")):
        flags = ("--seed", seed, "--learning_rate", 0.1, "--lora_dropout", 0.5)
        case.run(case.command(CATS, root / name, *case.skip, *flags))
    return root


@pytest.fixture
def draw(case, score, data, loras, vision):
    """Draw what is missing of `data`, and score it; returns the files of the pictures by name."""

    def run(*extra):
        words = ["--pretrained_model_name_or_path", case.pipeline, *SIZE]
        words += ["--metrics", "dino", "--dino_model", vision / "dino"]
        words += [] if "--lora_root" in extra else ["--lora_root", loras]
        words += [] if "--pictures" in extra else ["--pictures", data / "drawn"]
        score(*words, *extra)
        return files_of(data / "drawn")

    return run


ONE_MODEL = pytest.mark.parametrize(
    "case", ["flux"], indirect=True, scope="session"
)  # where models have no way of their own


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("*/*.png")}


@pytest.fixture
def drawn(monkeypatch):
    """The (prompts, seeds) of each call of the pipeline."""
    calls, original = [], evaluate.draw

    def counted(pipeline, args, prompts, seeds):
        calls.append((prompts, seeds))
        return original(pipeline, args, prompts, seeds)

    monkeypatch.setattr(evaluate, "draw", counted)
    return calls


def test_each_subject_is_drawn_with_its_own_lora_as_generate_draws_it(case, draw, data, loras, drawn, capsys):
    files = draw("--num_images", 2, "--seed", 3, "--draw_batch_size", 4)
    names = [f"prompt{number}-seed{seed}.png" for number in range(3) for seed in (3, 4)]
    assert sorted(files) == [f"{subject}/{name}" for subject in ("hat", "red_dog2") for name in names]
    assert [len(prompts) for prompts, _ in drawn] == [4, 2, 4, 2]
    for name, words in (("hat", "sks hat"), ("red_dog2", "sks red dog")):
        alone = ["--pretrained_model_name_or_path", case.pipeline, "--lora", loras / name, "--num_images", 2, *SIZE]
        prompts = [word for place in PLACES for word in ("--prompt", place.replace("{}", words))]
        alone += [*prompts, "--seed", 3, "--output", data / "alone" / name]
        generate.main(generate.parse_args([str(word) for word in alone]))
    alone = files_of(data / "alone")
    assert set(alone) == set(files)
    for name in files:
        ours, theirs = (Image.open(data / folder / name) for folder in ("drawn", "alone"))
        assert generate.difference(ours, theirs) < 0.05, name  # batches may round otherwise
    assert generate.difference(*[Image.open(data / "drawn" / name / names[0]) for name in ("hat", "red_dog2")]) > 1
    rows = rows_of(data / "out")
    assert len(rows) == 12 and rows["hat", 2, 4]["text"] == "the hat by the sea"


@ONE_MODEL
def test_an_interrupted_run_draws_only_what_is_missing(draw, data, drawn, monkeypatch):
    original, written = evaluate.blockskip.write_atomically, []

    def interrupted(path, write):
        if path.suffix == ".png":
            written.append(path)
            if len(written) == 3:
                path.with_name(f"{path.name}.partial").write_bytes(b"half a picture")
                raise KeyboardInterrupt
        original(path, write)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate.blockskip, "write_atomically", interrupted)
        with pytest.raises(KeyboardInterrupt):
            draw("--draw_batch_size", 2)
    before = files_of(data / "drawn")
    assert len(before) == 2
    drawn.clear()
    files = draw()
    assert [seeds for _, seeds in drawn] == [[0]] * 4
    assert before.items() <= files.items() and len(files) == 6
    drawn.clear()
    assert draw() == files and not drawn
    more = draw("--num_images", 2)
    assert [seeds for _, seeds in drawn] == [[1]] * 6 and files.items() <= more.items()
    assert draw("--offload") == more


@ONE_MODEL
def test_pictures_of_other_settings_are_refused_and_stay(draw, data, drawn, loras, score, vision):
    files = draw()
    drawn.clear()
    shutil.copytree(loras, data / "trained_further")
    file = data / "trained_further" / "hat" / "pytorch_lora_weights.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    for name, flags in {
        "lora_scale": ("--lora_scale", 0.5),
        "width": ("--width", 96),
        "dtype": ("--dtype", "bf16"),
        "prompts": ("--unique_token", "zwx"),
        "LoRA": ("--lora_root", data / "trained_further"),
    }.items():
        with pytest.raises(SystemExit, match=f"error: --pictures .*hat .*another setting of '{name}'"):
            draw(*flags)
    (data / "data" / "prompts.txt").write_text("a {} in rain\n" * 3)
    with pytest.raises(SystemExit, match="another setting of 'prompts without the token'"):
        score("--pictures", data / "drawn")
    with pytest.raises(SystemExit, match=r"error: --pictures .*hat holds pictures and no settings\.json"):
        draw("--pictures", data / "out" / "pictures")
    assert files_of(data / "drawn") == files and not drawn


@ONE_MODEL
def test_one_subjects_lora_may_be_the_folder_itself(draw, loras):
    assert set(draw("--subjects", "hat", "--lora_root", loras / "hat")) == {
        f"hat/prompt{n}-seed0.png" for n in range(3)
    }


@ONE_MODEL
def test_a_scale_of_zero_draws_without_the_lora(case, draw, data):
    draw("--lora_scale", 0, "--subjects", "hat")
    words = ["--pretrained_model_name_or_path", case.pipeline, *SIZE, "--prompt", "a sks hat in snow"]
    generate.main(generate.parse_args([str(word) for word in (*words, "--output", data / "bare")]))
    bare, zero = Image.open(data / "bare" / "prompt0-seed0.png"), data / "drawn" / "hat" / "prompt0-seed0.png"
    assert generate.difference(bare, Image.open(zero)) < 0.05


# ---------------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------------

MISTAKES = {
    "--lora_root x": "--lora_root draws nothing without",
    "--height 512": "--height draws nothing without",
    "--offload": "--offload draws nothing without",
    "--unique_token x": "--unique_token draws nothing without",
    "--pretrained_model_name_or_path m": "--lora_root is missing",
    "--pretrained_model_name_or_path m --lora_root x --num_images 0": "--num_images 0",
    "--metrics dino --clip_model x": "--clip_model has no effect",
    "--metrics clip_t clip_i --dino_model x": "--dino_model has no effect",
    "--metrics fid": "--metrics",
    "--batch_size 0": "--batch_size",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_contradictory_flags_are_one_plain_line(flags, capsys):
    words = ["--data_dir", "photos", *flags.split()]
    assert MISTAKES[flags] in parser_refusal(evaluate.parse_args, words, capsys)


@pytest.fixture
def refused(score, monkeypatch):
    """Score, and give the line of the refusal, which must come before any model is loaded."""

    def loaded(*args, **options):
        raise AssertionError("a model is loaded")

    def run(*extra):
        with pytest.raises(SystemExit) as refusal:
            score(*extra)
        message = str(refusal.value)
        assert message.startswith("error: ") and "\n" not in message
        return message

    monkeypatch.setattr(evaluate.Embedder, "__init__", loaded)
    monkeypatch.setattr(evaluate, "load_pipeline", loaded)
    return run


def test_photos_and_prompts_that_cannot_serve_are_named(refused, data, tmp_path):
    prompts, hat = data / "data" / "prompts.txt", data / "data" / "hat"
    assert f"--data_dir {data / 'none'} is not a folder" in refused("--data_dir", data / "none")
    assert "--prompts " in refused("--prompts", data / "none.txt") and "No such file" in refused(
        "--prompts", data / "n"
    )
    assert "--subjects rabbit is not in" in refused("--subjects", "hat", "rabbit")
    (hat / "0.png").write_bytes((hat / "1.png").read_bytes()[:900])
    assert "0.png cannot be read as an image" in refused()
    prompts.write_text("a cat in snow\n")
    assert "'a cat in snow' must have {} once" in refused()
    prompts.write_text("\n \n")
    assert "holds no prompt" in refused()
    prompts.unlink()
    assert "--prompts is missing" in refused()
    prompts.write_text("a {}")
    for photo in hat.iterdir():
        photo.unlink()
    assert f"{hat} holds no photo of hat" in refused()
    (data / "data" / "classes.txt").write_text("cat,cat")
    assert "names cat, and there is no folder of it" in refused()
    assert "both say" in refused("--class_word", "cat")
    (tmp_path / "empty").mkdir()
    assert "holds no photo and no folder of photos" in refused("--data_dir", tmp_path / "empty", "--prompts", prompts)


def test_benchmarks_that_are_not_whole_are_named(refused, data, tmp_path):
    (tmp_path / "d").mkdir()
    file = tmp_path / "d" / "prompts_and_classes.txt"
    file.write_text(DREAMBOOTH)
    assert "names backpack_dog, and there is no folder" in refused("--data_dir", tmp_path / "d")
    assert "--class_word has no effect" in refused("--data_dir", tmp_path / "d", "--class_word", "cat")
    file.write_text("nothing here")
    assert "names no subject" in refused("--data_dir", tmp_path / "d")
    noise(tmp_path / "d" / "vase" / "0.png", 0)
    file.write_text("vase,vase")
    assert "holds no prompts of object subjects" in refused("--data_dir", tmp_path / "d")
    wrong = {
        "an entry without class_prompt": {"class_prompt": None},
        "an entry without prompt_filename": {"prompt_filename": None},
        "names the folder ./none/dog, which is not there": {"instance_data_dir": "./none/dog"},
        "names the prompts no.txt, which are not there": {"prompt_filename": "no.txt"},
        "names scene_barn twice": {"instance_data_dir": "benchmark_dataset/scene_barn"},
    }
    for message, changes in wrong.items():
        custom_concept(tmp_path / "c", **changes)
        assert message in refused("--data_dir", tmp_path / "c")
    (tmp_path / "c" / "dataset.json").write_text("[[{}, {}]]")
    assert "entries of several subjects" in refused("--data_dir", tmp_path / "c")
    (tmp_path / "c" / "dataset.json").write_text("[")
    assert "is no JSON" in refused("--data_dir", tmp_path / "c")


def test_models_that_cannot_serve_are_named(refused, data, vision, flux, tmp_path):
    (tmp_path / "empty").mkdir()
    for flag in ("--dino_model", "--clip_model"):
        assert f"{flag} {tmp_path / 'empty'} cannot be loaded" in refused(flag, tmp_path / "empty")
    assert "is a ViTModel, which reads no text" in refused("--clip_model", vision / "dino")
    text_model = flux.pipeline / "text_encoder_2"
    assert "which gives no embeddings of images" in refused("--dino_model", text_model)
    shutil.copytree(vision / "dino", tmp_path / "weightless")
    (tmp_path / "weightless" / "model.safetensors").unlink()
    assert "holds no weights" in refused("--dino_model", tmp_path / "weightless")
    (data / "data" / "prompts.txt").write_text("a {}" + " a" * 80)
    assert "reads 77 tokens" in refused()


def test_pictures_that_cannot_be_scored_are_named(refused, data):
    folder = data / "out" / "pictures" / "hat"
    (folder / "prompt1-seed7.png").write_bytes(b"no picture")
    assert "prompt1-seed7.png cannot be read as an image" in refused()
    (folder / "prompt1-seed7.png").unlink()
    noise(folder / "prompt3-seed0.png", 1)
    assert "the last of 3 prompts has the number 2" in refused()
    (folder / "prompt3-seed0.png").rename(folder / "prompt0-seed0.bmp")
    assert "two pictures of one prompt and seed" in refused()
    shutil.rmtree(folder)
    noise(folder / "1.png", 1)
    assert f"--pictures {folder} holds no picture named like prompt0-seed0.png" in refused()
    assert refused("--pictures", data / "none")
    (data / "file").write_text("")
    assert "part of it is a file" in refused("--output", data / "file" / "x")


def test_scores_of_another_program_are_refused_and_stay(refused, data):
    (data / "out" / "scores.csv").write_text("a,b\n1,2\n")
    assert "scores.csv cannot be read" in refused()
    assert (data / "out" / "scores.csv").read_text() == "a,b\n1,2\n"


def test_what_cannot_draw_is_named(refused, data, flux, tmp_path):
    (tmp_path / "loras" / "hat").mkdir(parents=True)
    (tmp_path / "loras" / "hat" / "pytorch_lora_weights.safetensors").write_bytes(b"x")
    usual = ("--pretrained_model_name_or_path", flux.pipeline, "--pictures", tmp_path / "new", *SIZE)
    roots = ("--lora_root", tmp_path / "loras")
    assert f"--lora_root {tmp_path / 'loras'} has no LoRA of red_dog2" in refused(*usual, *roots)
    assert f"--lora_root {tmp_path / 'none'} does not exist" in refused(*usual, "--lora_root", tmp_path / "none")
    assert "--height 72 is not a multiple of 16" in refused(*usual, *roots, "--height", 72)
    assert "is no pipeline" in refused(*usual, *roots, "--pretrained_model_name_or_path", tmp_path)
    assert not (tmp_path / "new").exists()


def test_numbers_that_are_not_finite_are_refused(score, data, monkeypatch):
    monkeypatch.setattr(ByColour, "__call__", lambda self, images: torch.full((len(images), 3), math.nan))
    monkeypatch.setattr(evaluate, "Embedder", ByColour)
    with pytest.raises(SystemExit, match=r"error: --dino_model .* not finite"):
        score()


@ONE_MODEL
def test_loras_of_another_model_and_damaged_ones_are_refused(refused, loras, data, case, tmp_path):
    build_tiny_flux(tmp_path / "flat", num_layers=1)
    shutil.copytree(loras, tmp_path / "loras")
    words = ("--lora_root", tmp_path / "loras", "--pictures", data / "drawn", *SIZE)
    flat = refused("--pretrained_model_name_or_path", tmp_path / "flat", *words)
    file = tmp_path / "loras" / "hat" / "pytorch_lora_weights.safetensors"
    assert f"--lora_root: {file} is of another model: its transformer_blocks.2." in flat
    wide = {name: tensor.repeat(1, 2) for name, tensor in load_file(file).items()}
    save_file(wide, file)
    assert "is of another model" in refused("--pretrained_model_name_or_path", case.pipeline, *words)
    file.write_bytes(file.read_bytes()[:500])
    assert f"{file} cannot be read" in refused("--pretrained_model_name_or_path", case.pipeline, *words)
    assert not (data / "drawn").exists()


def test_the_command_line_refuses_in_one_line_and_fails(tmp_path):
    done = launch(ROOT / "examples" / "evaluate.py", ["--data_dir", tmp_path / "none"])
    assert done.returncode == 1 and "Traceback" not in done.stderr and not done.stdout
    assert done.stderr.endswith(f"error: --data_dir {tmp_path / 'none'} is not a folder\n")
