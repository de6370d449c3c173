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
"""The flags that users know from the official diffusers scripts, with the defaults that they know.

These fail if a flag is missing, has another default, or if the README speaks of a flag that there is not.
"""

import re

import pytest

from conftest import ROOT, flux_script, sana_script

NONE = [
    "revision",
    "variant",
    "dataset_name",
    "dataset_config_name",
    "instance_data_dir",
    "cache_dir",
    "caption_column",
    "class_data_dir",
    "instance_prompt",
    "class_prompt",
    "validation_prompt",
    "seed",
    "max_train_steps",
    "checkpoints_total_limit",
    "resume_from_checkpoint",
    "prodigy_beta3",
    "lora_layers",
    "hub_token",
    "hub_model_id",
    "mixed_precision",
    "prior_generation_precision",
]
OFF = [
    "with_prior_preservation",
    "center_crop",
    "random_flip",
    "gradient_checkpointing",
    "scale_lr",
    "use_8bit_adam",
    "push_to_hub",
    "allow_tf32",
    "cache_latents",
    "upcast_before_saving",
    "enable_npu_flash_attention",
]
ON = ["prodigy_decouple", "prodigy_use_bias_correction", "prodigy_safeguard_warmup"]
VALUES = {
    "image_column": "image",
    "repeats": 1,
    "num_validation_images": 4,
    "validation_epochs": 50,
    "rank": 4,
    "lora_alpha": 4,
    "lora_dropout": 0.0,
    "prior_loss_weight": 1.0,
    "num_class_images": 100,
    "train_batch_size": 4,
    "sample_batch_size": 4,
    "checkpointing_steps": 500,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-4,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 500,
    "lr_num_cycles": 1,
    "lr_power": 1.0,
    "dataloader_num_workers": 0,
    "weighting_scheme": "none",
    "logit_mean": 0.0,
    "logit_std": 1.0,
    "mode_scale": 1.29,
    "optimizer": "adamw",  # in any case
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_weight_decay": 1e-4,
    "adam_weight_decay_text_encoder": 1e-3,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "logging_dir": "logs",
    "report_to": "tensorboard",
    "local_rank": -1,
}
OF_FLUX = {
    "max_sequence_length": 512,
    "output_dir": "flux-dreambooth-lora",
    "resolution": 512,
    "guidance_scale": 3.5,
    "text_encoder_lr": 5e-6,
    "train_text_encoder": False,
}
OF_SANA = {
    "max_sequence_length": 300,
    "output_dir": "sana-dreambooth-lora",
    "resolution": 1024,  # the official script says 512, and the model is for 1024
    "complex_human_instruction": None,
    "offload": False,
    "enable_vae_tiling": False,
}


@pytest.mark.parametrize(("script", "own"), [(flux_script, OF_FLUX), (sana_script, OF_SANA)], ids=["flux", "sana"])
def test_flags_and_defaults_are_those_of_the_official_script(script, own):
    args = vars(script.parse_args(["--pretrained_model_name_or_path", "model"]))
    known = {**dict.fromkeys(NONE), **dict.fromkeys(OFF, False), **dict.fromkeys(ON, True), **VALUES, **own}
    assert {name: args[name] for name in known} == known
    assert args["num_train_epochs"] is None  # 500 steps unless steps or epochs are given


@pytest.mark.parametrize("name", ["AdamW", "ADAMW", "Prodigy"])
def test_optimizers_may_be_written_in_any_case(name):
    args = flux_script.parse_args(["--pretrained_model_name_or_path", "model", "--optimizer", name])
    assert args.optimizer == name.lower()


def test_every_flag_that_the_readme_names_exists(capsys):
    shown = ""
    for script in (flux_script, sana_script):
        with pytest.raises(SystemExit):
            script.parse_args(["--help"])
        shown += capsys.readouterr().out
    for name in ("generate.py", "build_tiny_pipeline.py", "select_blocks.py", "evaluate.py", "benchmark_speed.py"):
        shown += (ROOT / "examples" / name).read_text()
    of_others = {"multi_gpu", "num_processes", "num_machines", "logdir", "cpu"}  # of accelerate, tensorboard
    named = set(re.findall(r"--([a-z_0-9]+)", (ROOT / "README.md").read_text())) - of_others
    assert len(named) > 30
    assert not [name for name in named if f"--{name}" not in shown]
