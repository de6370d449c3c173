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
"""Vision models of transformers that turn pictures into vectors, and texts too where the model reads them.

embed = Embedder("openai/clip-vit-base-patch32", torch.device("cuda"))
similarity = torch.cosine_similarity(embed(pictures), embed.texts(["a photo of a cat"]))
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from blockskip_utils import refuse


class Embedder:
    """A vision model of transformers that turns an image into a vector.

    That is what the model compares with text, where it does so (CLIP, SigLIP), and else its class token (DINO). The
    weights are in fp32. `flag` names the model in a refusal; `with_texts` is needed for `texts`.
    """

    def __init__(
        self, name: str, device: torch.device, *, flag: str = "--embedding_model", with_texts: bool = False
    ) -> None:
        from transformers import AutoModel  # a second to import, and select_blocks.py does not always need it

        self.processor, self.tokenizer = load_processor(name, flag), load_tokenizer(name, flag) if with_texts else None
        with refused(flag, name):
            self.model = AutoModel.from_pretrained(name).float().to(device).eval()

    @torch.no_grad()
    def __call__(self, images: Image.Image | Sequence[Image.Image]) -> torch.Tensor:
        """The vectors of one or several RGB images, (images, width)."""
        pixels = self.processor(images=images, return_tensors="pt")["pixel_values"].to(self.model.device)
        if hasattr(self.model, "get_image_features"):
            return _features(self.model.get_image_features(pixel_values=pixels))
        states = self.model(pixel_values=pixels).last_hidden_state
        return states[:, 0] if states.ndim == 3 else states.mean(dim=(2, 3))  # maps of a convolutional network

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> torch.Tensor:
        """The vectors of texts, (texts, width), to be compared with those of images; what is too long is cut."""
        tokens = self.tokenizer(
            list(texts),
            padding="max_length",  # SigLIP has learnt from such texts only; to CLIP it makes no difference
            max_length=text_length(self.tokenizer, self.model.config),
            truncation=True,
            return_tensors="pt",
        )
        return _features(self.model.get_text_features(**tokens.to(self.model.device)))


def _features(output: Any) -> torch.Tensor:
    return getattr(output, "pooler_output", output)  # a bare tensor until transformers 5


def check_embedder(name: str, flag: str, texts: Sequence[str] = ()) -> str | None:
    """Refuse, without its weights, a model that cannot embed images, or `texts` where there are any.

    Returns the commit of a model from the hub, and None for a folder.
    """
    from transformers import AutoConfig, AutoModel

    with refused(flag, name):
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            model = AutoModel.from_config(config)
    if not (hasattr(model, "get_image_features") or model.main_input_name == "pixel_values"):
        refuse(f"{flag} {name} is a {type(model).__name__}, which gives no embeddings of images: name a vision model")
    if texts and not hasattr(model, "get_text_features"):
        refuse(f"{flag} {name} is a {type(model).__name__}, which reads no text: name a CLIP model")
    load_processor(name, flag)
    if texts:
        tokenizer = load_tokenizer(name, flag)
        length = text_length(tokenizer, config)
        for text in texts:
            if (tokens := len(tokenizer(text)["input_ids"])) > length:
                refuse(f"{flag} {name} reads {length} tokens, and a prompt has {tokens}: shorten '{text}'")
    if Path(name).is_dir() and not [*Path(name).glob("*.safetensors"), *Path(name).glob("*.bin")]:
        refuse(f"{flag} {name} holds no weights")
    return getattr(config, "_commit_hash", None)


def text_length(tokenizer: Any, config: Any) -> int:
    """The number of tokens that a model for images and texts reads."""
    return min(tokenizer.model_max_length, config.text_config.max_position_embeddings)


def load_processor(name: str, flag: str) -> Any:
    """What brings images to the size and the range of values that a model takes."""
    from transformers import AutoImageProcessor

    with refused(flag, name):
        return AutoImageProcessor.from_pretrained(name)


def load_tokenizer(name: str, flag: str) -> Any:
    """The tokenizer of a model that reads text, too."""
    from transformers import AutoTokenizer

    with refused(flag, name):
        return AutoTokenizer.from_pretrained(name)


@contextlib.contextmanager
def refused(flag: str, name: str) -> Iterator[None]:
    """Turn what transformers says of a folder or hub id that it cannot load into a refusal."""
    try:
        yield
    except (OSError, ValueError) as problem:
        refuse(f"{flag} {name} cannot be loaded: {str(problem).splitlines()[0]}")
