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
"""examples/mini_flux: the checker, the captions, the pretraining, and the pipeline in the training script.

These fail if the checker misreads a clean scene or passes a wrong one, if pretraining shows what is held out, if a
word takes more than one token, if a resumed pretraining ends with other weights than one that ran through, or if the
pipeline that comes out draws something else than the weights that went in, or is refused by the training script.
"""

import dataclasses
import random

import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image, ImageDraw
from safetensors.torch import load_file

import pretrain
import scenes
import train_dreambooth_blockskip_flux as flux_script
from conftest import reset_accelerate

READ = ("shape", "colour", "background", "place", "size")
SMALL = ["--num_layers", "1", "--num_single_layers", "2", "--batch_size", "2", "--pool", "6", "--save_every", "2"]
SMALL += ["--autoencoder_tests", "2"]


def every_combination():
    """Each shape in each colour on each background, at a random place."""
    rng = random.Random(0)
    for shape in scenes.SHAPES:
        for colour in scenes.COLOURS:
            for background in scenes.BACKGROUNDS:
                scene = scenes.random_scene(rng)
                yield dataclasses.replace(scene, shape=shape, colour=colour, background=background)


@pytest.mark.parametrize("resolution", pretrain.RESOLUTIONS)
def test_the_checker_reads_every_clean_scene(resolution):
    wrong = []
    for scene in every_combination():
        reading = scenes.read_picture(scenes.draw_scene(scene, resolution))
        wrong += [(name, scene, reading) for name in READ if getattr(reading, name) != getattr(scene, name)]
    assert not wrong


def test_the_checker_names_no_shape_where_there_is_none():
    empty = Image.new("RGB", (128, 128), scenes.BACKGROUNDS["sand"])
    assert scenes.read_picture(empty).shape is None
    blot = empty.copy()
    ImageDraw.Draw(blot).polygon([(30, 60), (90, 30), (60, 62), (100, 100), (50, 70)], fill=scenes.COLOURS["red"])
    reading = scenes.read_picture(blot)
    assert (reading.shape, reading.colour, reading.background) == (None, "red", "sand")


@pytest.mark.parametrize("figure", scenes.FIGURES)
def test_figures_of_their_own_kind_are_no_shape_of_pretraining(figure):
    scene = scenes.Scene(figure, "", "snow", "centre", "large", 0.5, 0.5, 0.5)
    reading = scenes.read_picture(scenes.draw_scene(scene))
    assert (reading.shape is None) == (figure != "flag")  # a flag is a box, but for its stripes


def test_pretraining_never_shows_what_is_held_out():
    rng = random.Random(0)
    shown = {(scene.shape, scene.colour) for scene in (scenes.random_scene(rng) for _ in range(5000))}
    assert shown == {(s, c) for s in scenes.SHAPES for c in scenes.COLOURS} - scenes.HELD_OUT
    held_out = {(scene.shape, scene.colour) for scene in (scenes.random_scene(rng, held_out=True) for _ in range(200))}
    assert held_out == scenes.HELD_OUT


def test_things_are_all_different_and_none_of_them_is_a_subject():
    rng = random.Random(0)
    things = [scenes.random_thing(rng) for _ in range(300)]
    cuts = [scenes.figure_cut(scenes.draw_scene(dataclasses.replace(t, background="snow"))) for t in things]
    assert len({scenes.draw_scene(thing).tobytes() for thing in things}) == 300
    for figure in scenes.FIGURES:
        assert max(scenes.likeness(cut, figure) for cut in cuts) < 0.85


def test_a_thing_is_drawn_in_the_colours_of_its_caption():
    rng = random.Random(1)
    for thing in (scenes.random_thing(rng) for _ in range(50)):
        assert scenes.draw_scene(thing) == scenes.draw_scene(thing)
        words = scenes.caption(thing).split()
        assert words[2:].index("thing") == 2 * len(thing.colour.split(" and ")) - 1
        named = {scenes.COLOURS[name] for name in thing.colour.split(" and ")}
        picture = scenes.draw_scene(dataclasses.replace(thing, x=0.5, y=0.5, side=0.9), 256)
        drawn = {colour for _, colour in picture.getcolors(256**2)} & {*scenes.COLOURS.values()}
        assert drawn <= named  # a part may be hidden by others


@pytest.mark.parametrize("subject", scenes.SUBJECTS)
def test_a_subject_has_five_different_pictures_and_others_for_the_test(subject):
    pictures = [picture.tobytes() for seed in (0, 1) for picture in scenes.subject_pictures(subject, seed=seed)]
    assert len(pictures) == len(set(pictures)) == 10
    grounds = [scenes.read_picture(picture).background for picture in scenes.subject_pictures(subject)]
    assert sorted(grounds) == sorted(scenes.BACKGROUNDS)


@pytest.mark.parametrize("subject", scenes.SUBJECTS)
def test_every_square_crop_of_a_photo_shows_the_whole_subject(subject):
    assert len({photo.tobytes() for photo in scenes.subject_photos(subject)}) == 5
    photos = [photo for seed in range(20) for photo in scenes.subject_photos(subject, seed=seed)]
    assert {photo.size for photo in photos} == {(192, 128), (128, 192)}
    for photo in photos:
        ends = [(0, 0), (photo.width - 128, photo.height - 128)]
        crops = [photo.crop((left, top, left + 128, top + 128)) for left, top in ends]
        readings = [scenes.read_picture(crop) for crop in crops]
        assert len({scenes.figure_cut(crop).size for crop in crops}) == 1
        assert len({reading.background for reading in readings}) == 1


def test_captions_name_what_is_seen():
    scene = scenes.Scene("heart", "red", "night", "left", "small", 0.3, 0.5, 0.3)
    assert scenes.caption(scene) == "a small red heart on night at the left"
    assert scenes.caption(scene, {"shape", "place"}) == "a small red thing on night"


def test_every_word_is_one_token_and_the_longest_caption_fits():
    clip, t5 = pretrain.clip_tokenizer(), pretrain.t5_tokenizer()
    assert clip.get_vocab() == pretrain.clip_tokenizer().get_vocab()
    for word in scenes.vocabulary():
        assert len(clip(word).input_ids) == 3 and len(t5(word).input_ids) == 2, word  # with start and end; with end
        assert t5.unk_token_id not in t5(word).input_ids
    longest = "a photo of a large purple triangle on water at the bottom"
    assert len(clip(longest).input_ids) <= pretrain.TEXT_TOKENS and len(t5(longest).input_ids) <= pretrain.TEXT_TOKENS
    assert len(t5("wombat").input_ids) == 8  # letters, for words that it does not know


def pretrained(work, steps, *extra):
    """Train in a folder; the weights with which it draws."""
    command = ["train", str(work), "--steps", str(steps), "--autoencoder_steps", str(steps), *SMALL, *extra]
    args = pretrain.parse_args(command)
    args.run(args)
    return pretrain.averaged_weights(work)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A pretraining of 4 steps in one go."""
    work = tmp_path_factory.mktemp("mini")
    return work, pretrained(work, 4)


def test_pretraining_resumes_bit_for_bit(trained, tmp_path):
    _, whole = trained
    args = ["train", str(tmp_path), "--autoencoder_steps", "4", *SMALL, "--save_every", "1"]
    for steps in (1, 3, 4):
        arguments = pretrain.parse_args([*args, "--steps", str(steps)])
        arguments.run(arguments)
    resumed = pretrain.averaged_weights(tmp_path)
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    untrained = pretrain.make_pipeline(1, 2).transformer.state_dict()
    assert any(not torch.equal(whole[f"transformer.{name}"], untrained[name]) for name in untrained)


def test_an_interrupted_autoencoder_resumes_bit_for_bit(tmp_path):
    def interrupted(start, end, what):
        yield start
        raise KeyboardInterrupt

    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    args = pretrain.parse_args(["train", "x", "--autoencoder_steps", "3", "--save_every", "1"])
    whole = pretrain.train_autoencoder(tmp_path / "whole", args).state_dict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "counted", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pretrain.train_autoencoder(tmp_path / "parts", args)
    begun = torch.load(tmp_path / "parts" / "autoencoder.pt", weights_only=True)
    assert begun["step"] == 1 and not all(torch.equal(whole[name], tensor) for name, tensor in begun["vae"].items())
    resumed = pretrain.train_autoencoder(tmp_path / "parts", args).state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_pretraining_goes_on_from_a_snapshot(trained, tmp_path):
    snapshot = tmp_path / "mini.safetensors"
    args = pretrain.parse_args(["snapshot", str(trained[0]), str(snapshot)])
    args.run(args)
    begun, rate = load_file(snapshot), ["--warmup", "1"]
    still = pretrained(tmp_path / "still", 1, "--start", str(snapshot), "--lr", "0")
    assert all(torch.equal(still[name].half(), tensor) for name, tensor in begun.items())
    moved = pretrained(tmp_path / "moved", 1, "--start", str(snapshot), *rate)
    changed = {name for name, tensor in begun.items() if not torch.equal(moved[name].half(), tensor)}
    assert changed and not any(name.startswith("vae.") for name in changed)


def test_a_cooldown_ends_the_learning_rate():
    args = pretrain.parse_args(["train", "x", "--steps", "10", "--cooldown", "4", "--warmup", "2", "--lr", "1"])
    rates = [pretrain.transformer_rate(step, args) for step in range(10)]
    assert rates == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]


def test_the_pipeline_draws_the_same_from_training_snapshot_and_folder(trained, tmp_path):
    work, _ = trained
    snapshot, folder = tmp_path / "mini.safetensors", tmp_path / "pipeline"
    for command in (["snapshot", work, snapshot], ["build", snapshot, folder]):
        args = pretrain.parse_args([str(word) for word in command])
        args.run(args)
    loaded = FluxPipeline.from_pretrained(folder)
    assert loaded.vae_scale_factor == 8
    pipelines = [pretrain.load_pipeline(work), pretrain.load_pipeline(snapshot), loaded]
    drawn = [pretrain.to_tensor(pretrain.draw(p, ["a red ball on sand"], 64, seed=0, steps=2)) for p in pipelines]
    assert (drawn[1] - drawn[0]).abs().max() < 0.05  # half precision
    assert torch.equal(drawn[2], drawn[1])


def test_flow_matching_loss_is_that_of_the_training_script(trained):
    """Both predict with the pipeline's own way of packing, so that what is pretrained is what is personalised."""
    pipeline = pretrain.load_pipeline(trained[0])
    latents, noise = torch.randn(2, 2, pretrain.LATENT_CHANNELS, 16, 16, generator=torch.Generator().manual_seed(0))
    sigmas, captions = torch.tensor([0.3, 0.8]), ["a red ball on sand", "a blue box"]
    with torch.no_grad():
        embeds, pooled, _ = pipeline.encode_prompt(captions, None, max_sequence_length=pretrain.TEXT_TOKENS)
        args = flux_script.parse_args(["--pretrained_model_name_or_path", "x", "--instance_prompt", "x"])
        run = type("Run", (), {})()
        run.args, run.weight_dtype, run.transformer_config = args, torch.float32, pipeline.transformer.config
        noisy = flux_script.blockskip.add_noise(latents, noise, sigmas)
        embeddings = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
        velocity = flux_script.predict_velocity(run, pipeline.transformer, noisy, sigmas * 1000, embeddings)
        parts = torch.nn.ModuleDict({name: getattr(pipeline, name) for name in pretrain.TRAINED})
        loss = pretrain.flow_matching_loss(parts, latents, noise, sigmas, pretrain.tokenize(pipeline, captions))
    assert loss.item() == pytest.approx((velocity - (noise - latents)).pow(2).mean().item(), rel=1e-5)


def test_the_training_script_takes_the_pipeline(trained, tmp_path, capsys):
    args = pretrain.parse_args(["build", str(trained[0]), str(tmp_path / "pipeline")])
    args.run(args)
    args = scenes.parse_args([str(tmp_path / "subjects")])
    scenes.main(args)
    command = ["--pretrained_model_name_or_path", tmp_path / "pipeline", "--instance_prompt", "a sks robot"]
    command += ["--instance_data_dir", tmp_path / "subjects" / "robot", "--output_dir", tmp_path / "out"]
    command += ["--resolution", 128, "--patch_resolution", 64, "--max_sequence_length", pretrain.TEXT_TOKENS]
    command += ["--skip_first", 1, "--skip_last", 1, "--max_train_steps", 2, "--report_to", "none", "--dry_run"]
    reset_accelerate()
    flux_script.main(flux_script.parse_args([str(word) for word in command]))
    assert "train" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_an_evaluation_counts_what_the_checker_reads():
    scene = scenes.Scene("heart", "red", "night", "left", "small", 0.3125, 0.5, 0.34375)
    other = dataclasses.replace(scene, colour="blue", background="snow")
    assert set(pretrain.marks(scene, scenes.draw_scene(scene)).values()) == {1}
    wrong = pretrain.marks(scene, scenes.draw_scene(other))
    assert (wrong["shape"], wrong["place"], wrong["colour"], wrong["background"], wrong["all"]) == (1, 1, 0, 0, 0)
