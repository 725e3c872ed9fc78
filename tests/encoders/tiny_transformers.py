"""Tiny models of transformers with random weights, saved as `save_pretrained` saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

transformers.utils.logging.disable_progress_bar()
SIDE = 32
IMAGE = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48,
    "image_size": SIDE, "patch_size": 8,
}  # fmt: skip
WORDS = (
    "<pad>", "</s>", "<unk>", "a", "photo", "sketch", "of", "dog", "polar", "bear", "elephant", "giraffe", "guitar",
    "horse", "house", "person",
)  # fmt: skip
TEXT = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "vocab_size": len(WORDS), "max_position_embeddings": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
SQUARE = {"height": SIDE, "width": SIDE}


def vit(**changes: Any) -> Any:
    return transformers.ViTModel(transformers.ViTConfig(**IMAGE | changes))


def dinov2() -> Any:
    return transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**IMAGE, num_register_tokens=3))


def clip() -> Any:
    return transformers.CLIPModel(transformers.CLIPConfig(vision_config=IMAGE, text_config=TEXT, projection_dim=24))


def siglip() -> Any:
    text = {**TEXT, "projection_size": 32}
    return transformers.SiglipModel(transformers.SiglipConfig(vision_config=IMAGE, text_config=text))


def processor(kind: str) -> Any:
    if kind == "clip":
        return transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SQUARE)
    if kind == "dinov2":
        return transformers.BitImageProcessor(size={"shortest_edge": 40}, crop_size=SQUARE)
    if kind == "siglip":
        return transformers.SiglipImageProcessor(size=SQUARE)
    return transformers.ViTImageProcessor(size=SQUARE)


def tokenizer() -> Any:
    """Splits at spaces; adds </s>."""
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )


MAKE = {"vit": vit, "dinov2": dinov2, "clip": clip, "siglip": siglip}


def save(kind: str, folder: Path) -> Any:
    """Writes model, image processor and tokenizer into the folder, and returns the model."""
    torch.manual_seed(0)
    model = MAKE[kind]().eval()
    for name, parameter in model.named_parameters():  # what libraries initialise to 0 or 1 hides mistakes
        if parameter.ndim < 2:
            torch.nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.2)
    model.save_pretrained(folder)
    processor(kind).save_pretrained(folder)
    if kind in ("clip", "siglip"):
        tokenizer().save_pretrained(folder)
    return model
