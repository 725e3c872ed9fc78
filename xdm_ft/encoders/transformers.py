"""Any vision model of Hugging Face's transformers: its pooled or projected features, and text embeddings if it has any.

In this module `transformers` is the library: imports are absolute, and `xdm_ft/run.py` keeps the package's folder off
the import path.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xdm_ft.encoders import Encoder, Portable, TextEncoder, measure_width
from xdm_ft.images.transforms import Preprocessing, PreprocessingOverrides
from xdm_ft.runtime.errors import UserError
from xdm_ft.weights import image_side
from xdm_ft.weights import transformers as hub
from xdm_ft.weights.pooling import PoolingChoice, outside_text_space, pooling_part, refused
from xdm_ft.weights.prompts import DEFAULT_PROMPTS, EncoderPrompts, checked
from xdm_ft.weights.source import versions
from xdm_ft.weights.transformers import from_processor

logger = logging.getLogger("xdm_ft")

OWN_PREPROCESSING = PreprocessingOverrides()
TOGETHER = 64  # prompts in one forward pass


class Transformers(Encoder, TextEncoder):
    """Any vision model that transformers' `AutoModel` builds, with its weights; code of repositories is never run.

    z [B,K] is the projected image feature of a model with a text side (CLIP, SigLIP), and of others the model's own
    pooled feature or, without one, the class token; `pooling` selects another. The text side never trains.
    """

    def __init__(
        self,
        *,
        model: Annotated[
            str,
            Field(
                min_length=1,
                description="ORGANISATION/NAME on the hub, local-dir:FOLDER, or a config file (.json) of transformers",
            ),
        ],
        weights: Annotated[
            str,
            Field(min_length=1, description="pretrained: those of the model; or a .safetensors or .pth file"),
        ] = "pretrained",
        kwargs: Annotated[
            dict[str, Any], Field(description="replaces values of the model's config, as in its config.json")
        ] = {},  # noqa: B006 (read only)
        preprocessing: Annotated[
            PreprocessingOverrides, Field(description="replaces parts of the model's own preprocessing")
        ] = OWN_PREPROCESSING,
        normalize: Annotated[bool, Field(description="L2-normalise the features (zero_shot always does)")] = False,
        prompts: EncoderPrompts = DEFAULT_PROMPTS,
        pooling: PoolingChoice = None,
    ) -> None:
        super().__init__()
        self.prompts = checked(prompts)
        self.source = hub.resolve(model, weights, kwargs)
        self.model: Any = hub.create(self.source, kwargs)
        self.eval()
        self.normalize, self.pooling = normalize, pooling
        self.pretraining = self.source.pretraining
        self.preprocessing = preprocessing.applied_to(self._own_preprocessing(preprocessing))
        self.has_text = image_side.has_text(self.model)
        if self.has_text:
            self.logit_scale = self.model.logit_scale.exp().item()
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name.startswith(image_side.TRAINABLE))
        self.text_reason = self._no_text(model)
        self._root = "model.vision_model" if self.has_text else "model"
        self.layout = image_side.measured(self._vision, self.source.config, self.preprocessing.size, model)
        if reason := image_side.reason(self.layout, pooling, self.has_text):
            raise refused(model, pooling, reason)
        self.stage_names = tuple(f"{self._root}.{name}" for name in image_side.stages(self._vision))
        self.width = measure_width(self, model)

    def forward(self, images: Tensor) -> Tensor:
        # the weights may have been cast to bfloat16 (`features.precision`)
        images = images.to(next(self.model.parameters()).dtype)
        z = self._pooled(images).float()  # [B,K]
        return F.normalize(z, dim=-1) if self.normalize else z

    def _pooled(self, images: Tensor) -> Tensor:
        if self.has_text and self.pooling in (None, "projected"):
            found = self.model.get_image_features(pixel_values=images, **self.layout.arguments)
            projected: Tensor = found.pooler_output
            return projected
        return image_side.pooled(self._vision, images, self.layout, self.pooling)

    @property
    def _vision(self) -> nn.Module:
        return self.get_submodule(self._root)

    def _own_preprocessing(self, overrides: PreprocessingOverrides) -> Preprocessing:
        """That of the model's image processor, which is not read if the recipe replaces all of it."""
        given = overrides.model_dump(exclude_none=True)
        if given.keys() | {"draft"} == Preprocessing.model_fields.keys():
            return Preprocessing(**given)
        return from_processor(hub.image_processor(self.source), self.source.name)

    def _no_text(self, model: str) -> str:
        if not self.has_text:
            return f'encoder.model: "{model}" has no text side; use a CLIP or SigLIP model'
        if self.source.place is None:
            return f'encoder.model: "{model}" is a config file without tokenizer; give the model\'s name or folder'
        return outside_text_space(self.pooling)

    def identity(self) -> dict[str, object]:
        return {
            "component": "transformers",
            "model": self.source.name,
            "config": hub.architecture(self.source.config),
            "normalize": self.normalize,
            **pooling_part(self.pooling),
            "preprocessing": self.preprocessing.model_dump(mode="json"),
            "versions": versions("transformers"),
        }

    def portable(self) -> Portable:
        name = f"{re.sub(r'[^A-Za-z0-9_-]', '_', str(self.source.config.model_type))}.json"
        files = {name: hub.architecture(self.source.config)}
        return Portable({"model": name, "kwargs": {}}, dict(self.model.state_dict()), files)

    def block_candidates(self) -> Sequence[Sequence[str]]:
        return [[f"{self._root}.{name}" for name in names] for names in image_side.block_candidates(self._vision)]

    @torch.no_grad()
    def text_embeddings(self, class_names: tuple[str, ...], prompts: tuple[str, ...] | None = None) -> Tensor:
        """See `TextEncoder`. On the CPU. Prompts longer than the model's context are cut, with a warning."""
        if self.text_reason:
            raise UserError(self.text_reason)
        exact = self.exact_prompts(class_names, prompts)
        tokenizer = hub.tokenizer(self.source)  # not kept: copies of the encoder would take its dictionary along
        parts = [self._of_texts(tokenizer, exact[start : start + TOGETHER]) for start in range(0, len(exact), TOGETHER)]
        each = F.normalize(torch.cat(parts).float(), dim=-1)  # [C·P,K], class by class
        return F.normalize(each.view(len(class_names), -1, each.shape[-1]).mean(1), dim=-1).cpu()

    def _of_texts(self, tokenizer: Any, texts: list[str]) -> Tensor:
        """Texts → [n,K]. SigLIP was trained on texts padded to the whole context, and attends to the padding."""
        longest = self.source.config.text_config.max_position_embeddings
        cut = [text for text, ids in zip(texts, tokenizer(texts)["input_ids"], strict=True) if len(ids) > longest]
        if cut:
            logger.warning('%d prompts are longer than %d tokens and are cut, e.g. "%s"', len(cut), longest, cut[0])
        padded = self.source.config.model_type.startswith("siglip")
        tokens = tokenizer(
            texts, padding="max_length" if padded else True, truncation=True, max_length=longest, return_tensors="pt"
        )
        mask = {} if padded else {"attention_mask": tokens["attention_mask"]}
        inputs = {
            name: value.to(self.model.device) for name, value in {"input_ids": tokens["input_ids"], **mask}.items()
        }
        found: Tensor = self.model.get_text_features(**inputs).pooler_output
        return found
