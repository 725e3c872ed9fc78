"""What a model consists of, and the module that its parts make: pixels → logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

from xdm_ft.encoders import Encoder
from xdm_ft.evaluation.distance import Reference
from xdm_ft.export.config import HeadConfig, ModelConfig, ModelPrecision
from xdm_ft.features.extract import frozen_copy
from xdm_ft.features.key import weights_digest
from xdm_ft.heads import Head
from xdm_ft.images.loader import DTYPES
from xdm_ft.images.transforms import Preprocessing, PreprocessingOverrides
from xdm_ft.recipe.components import find, settings_model
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.lines import one_line

SINGLE = "head"  # name of the head in a weights file; those of an ensemble are `members.<seed>`


@dataclass(frozen=True)
class Parts:
    """What a model consists of."""

    config: ModelConfig
    encoder: Encoder  # float32, on the CPU
    heads: Mapping[str, Head]
    """`head`: the class head, of an ensemble of linear heads their mean; `members.<seed>`: the heads of an ensemble."""
    reference: Reference | None = None  # of the encoder's features of training images; None: distances are not known
    training_images: np.ndarray | None = None  # their checksums, uint8 [n,16]; None: unknown
    trained_names: tuple[str, ...] = ()  # names of the encoder's tensors that were trained

    @property
    def training_features(self) -> int:
        """The number of training images whose features the heads hold."""
        heads = [head for head in self.heads.values() if head.training_features]
        return max((len(head.get_buffer(str(head.training_features))) for head in heads), default=0)


class Classifier(nn.Module):
    """Preprocessed pixels [B,3,H,W] → logits float32 [B,C], as one plain module in eval mode.

    The logits of an ensemble are the mean of its heads' logits. All logits are divided by the temperature.
    """

    def __init__(
        self, parts: Parts, precision: ModelPrecision | None = None, device: torch.device | str = "cpu"
    ) -> None:
        """`precision` None: that of the run. A frozen encoder is cast to it; one that was trained runs in autocast."""
        super().__init__()
        config, device = parts.config, torch.device(device)
        self.precision: ModelPrecision = config.encoder.precision if precision is None else precision
        self.autocast = DTYPES[self.precision] if config.encoder.trained and self.precision != "fp32" else None
        self.encoder = frozen_copy(parts.encoder, "fp32" if config.encoder.trained else self.precision, device)
        heads = {name: head.to(device).eval().requires_grad_(False) for name, head in parts.heads.items()}
        self.head = heads.pop(SINGLE, None)
        self.members = nn.ModuleList(heads.values())
        self.normalize, self.temperature = config.normalize, config.temperature
        self.eval()

    def forward(self, pixels: Tensor) -> Tensor:
        return self.logits(self.as_read(self.encoded(pixels)))

    def encoded(self, pixels: Tensor) -> Tensor:
        """float32 features z [B,K] of the encoder."""
        with torch.autocast(pixels.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            z: Tensor = self.encoder(pixels)
        return z.float()

    def as_read(self, z: Tensor) -> Tensor:
        """Features of the encoder, as the head reads them: L2-normalised or as they are."""
        return F.normalize(z, dim=-1) if self.normalize else z

    def logits(self, z: Tensor) -> Tensor:
        """Features z [B,K] as the head reads them → logits [B,C]."""
        logits: Tensor = self.member_logits(z).mean(0) if self.head is None else self.head(z)
        return logits / self.temperature

    def member_logits(self, z: Tensor) -> Tensor:
        """Logits [S,B,C] of the heads of an ensemble, before the temperature."""
        return torch.stack([member(z) for member in self.members])


def probabilities(logits: Tensor) -> Tensor:
    """float32 [...,C], as runs compute them: in float64, since float32 rounds small ones."""
    return logits.double().softmax(-1).float()


def build_encoder(name: str, settings: Mapping[str, Any], preprocessing: Preprocessing, seed: int | None) -> Encoder:
    """Builds an encoder from its settings in a file. Raises `UserError` if they are wrong or its weights are missing.

    The global generator of torch is left as it was: random weights are drawn from `seed`.
    """
    cls = find("encoders", name)
    try:
        overrides = PreprocessingOverrides(**preprocessing.model_dump())
        block = settings_model(cls).model_validate({**settings, "preprocessing": overrides})
    except ValidationError as error:
        raise UserError(f"encoder.settings: {first_fault(error)}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0 if seed is None else seed)
        encoder: Encoder = cls(**{key: getattr(block, key) for key in type(block).model_fields})
    return encoder


def load_trained(encoder: Encoder, trained: Mapping[str, Tensor], complete: bool = False) -> None:
    """Replaces the tensors of an encoder that were trained: some of them, or the `complete` state.

    Raises `ValueError` if the encoder does not have these tensors, or has others beside a complete state.
    """
    try:
        encoder.load_state_dict(dict(trained) if complete else encoder.state_dict() | dict(trained))
    except RuntimeError as error:
        raise ValueError(one_line(error)) from error


def check_encoder(encoder: Encoder, xxh3: str, weights: object, of: Path) -> None:
    """Raises `UserError` if the encoder's weights are not those that the head was trained on."""
    actual = weights_digest(encoder)
    if actual != xxh3:
        raise UserError(
            f"{of}: the encoder's weights ({weights}) are not those that the model was trained with (xxh3 {actual}, "
            f"needed {xxh3}); its predictions would be wrong; give the same weights, or export with --with-encoder"
        )


def build_head(config: HeadConfig, width: int, classes: int, state: Mapping[str, Tensor]) -> Head:
    """Builds a class head with these weights. Raises `ValueError` if they do not fit."""
    cls = find("heads", config.name)
    with torch.random.fork_rng(devices=[]):  # torch's layers draw initial weights, which are replaced at once
        try:
            settings_model(cls).model_validate(config.settings)
            with torch.device("meta"):  # sizes alone: those of a wrong config may be larger than the memory
                sizes = cls(width, classes, 0, 0, **config.settings).state_dict()
            if any(name not in state or sizes[name].numel() > state[name].numel() for name in sizes):
                raise ValueError("a head of other sizes")
            head: Head = cls(width, classes, 0, 0, **config.settings)
            head.load_state_dict(dict(state))
        except ValidationError as error:
            raise ValueError(f"head.settings: {first_fault(error)}") from error
        except (RuntimeError, TypeError) as error:
            raise ValueError(one_line(error)) from error
    return head


def first_fault(error: ValidationError) -> str:
    """Returns where a value is wrong, and why, on one line."""
    fault = error.errors()[0]
    return " ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}".split())


def with_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with `prefix.`, without it."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
