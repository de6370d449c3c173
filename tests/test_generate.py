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
"""Drawing pictures with a trained LoRA, as the README says.

These fail if the LoRA that a run leaves cannot be used by the example, or makes no difference.
"""

import pytest
from PIL import Image

import generate
from conftest import CATS


def test_pictures_are_drawn_with_and_without_the_lora_and_differ(case, tmp_path, capsys):
    case.run(case.command(CATS, tmp_path / "lora", *case.skip, "--learning_rate", 0.05, steps=4))
    size = ["--height", "64", "--width", "64", "--num_inference_steps", "2"]
    words = ["--pretrained_model_name_or_path", case.pipeline, "--lora", tmp_path / "lora", "--compare", *size]
    words += ["--prompt", "a photo of sks", "--num_images", "2", "--output", tmp_path / "pictures"]
    generate.main(generate.parse_args([str(word) for word in words]))
    pictures = {path.name: Image.open(path).tobytes() for path in (tmp_path / "pictures").iterdir()}
    assert len(pictures) == len(set(pictures.values())) == 4
    assert capsys.readouterr().out.count("differs by") == 2


def test_a_seed_draws_one_picture_alone_or_with_others_and_dropout_rests(case, tmp_path):
    case.run(case.command(CATS, tmp_path, *case.skip, "--learning_rate", 0.05, "--lora_dropout", 0.5, steps=4))
    words = ["--pretrained_model_name_or_path", case.pipeline, "--prompt", "a", "--height", 64, "--width", 64]
    args = generate.parse_args([str(word) for word in (*words, "--num_inference_steps", 2)])
    pipeline = generate.load_pipeline(args)
    generate.load_lora(pipeline, str(tmp_path), "subject")
    drawn = {"a photo of sks": 3, "a drawing": 5}
    together = generate.draw(pipeline, args, list(drawn), list(drawn.values()))
    alone = [generate.draw(pipeline, args, [prompt], [seed])[0] for prompt, seed in drawn.items()]
    for one, other in zip(together, alone, strict=True):
        assert generate.difference(one, other) < 0.05  # of 255: a batch may round otherwise
    assert generate.difference(*alone) > 1


def test_a_folder_without_a_lora_is_one_plain_line(flux, tmp_path):
    words = ["--pretrained_model_name_or_path", flux.pipeline, "--lora", tmp_path, "--prompt", "x"]
    with pytest.raises(SystemExit, match="error: "):
        generate.main(generate.parse_args([str(word) for word in words]))


def test_guidance_and_length_of_the_prompt_reach_the_pipeline(flux):
    words = ["--pretrained_model_name_or_path", flux.pipeline, "--prompt", "a", "--height", 64, "--width", 64]
    words += ["--num_inference_steps", 2]
    pipeline = generate.load_pipeline(generate.parse_args([str(word) for word in words]))

    def drawn(*extra):
        args = generate.parse_args([str(word) for word in (*words, *extra)])
        return generate.draw(pipeline, args, ["a photo of sks cat in the deep snow of a winter"], [0])[0]

    plain = drawn()
    assert generate.difference(plain, drawn("--true_cfg_scale", 4)) > 0.1
    assert generate.difference(plain, drawn("--max_sequence_length", 4)) > 0.1


def test_guidance_of_flux_is_refused_for_sana(sana):
    words = ["--pretrained_model_name_or_path", sana.pipeline, "--prompt", "a", "--true_cfg_scale", 3]
    with pytest.raises(SystemExit, match="--true_cfg_scale is for FLUX"):
        generate.main(generate.parse_args([str(word) for word in words]))
