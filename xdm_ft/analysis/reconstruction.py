"""Images of features: AdaIN's VGG encoder and decoder, and XDomainMix between them (appendix D of the paper).

The weights are those of pytorch-AdaIN, as in the paper. They are read from local files; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.xdomainmix import CLASS_QUANTILE, Augmented, XDomainMix
from xdm_ft.heads.linear import Linear
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.tensors import Batch, Task
from xdm_ft.weights.source import read_weights
from xdm_ft.xdomainmix import linear_scores, specific_mask

OPTION = "--reconstruct"
ENCODER, DECODER = "vgg_normalised", "decoder"  # names of the weights files, without their endings
ENDINGS = (".safetensors", ".pth")
CHANNELS = 512
REDUCTION = 8  # pixels of an image along one side of a position of the map
MIXED_LEVELS = (0.9, 0.5)  # quantiles of τ_d: first and last of its cycle


@dataclass(frozen=True)
class Autoencoder:
    """AdaIN's encoder and decoder (Huang & Belongie 2017), in eval mode."""

    encoder: nn.Sequential
    decoder: nn.Sequential

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Returns maps float32 [B,512,H/8,W/8] of images [B,3,H,W]: RGB in 0…1, H and W multiples of 8."""
        maps: Tensor = self.encoder(images)
        return maps

    @torch.no_grad()
    def decode(self, maps: Tensor) -> Tensor:
        """Returns images float32 [B,3,8h,8w], cut to 0…1, of maps [B,512,h,w]."""
        images: Tensor = self.decoder(maps)
        return images.clamp(0, 1)


def vgg_encoder() -> nn.Sequential:
    """VGG-19 up to relu4_1 with reflection padding; its first layer, 1 × 1, normalises RGB pixels in 0…1.

    The names of its parameters are those in pytorch-AdaIN's vgg_normalised.pth, which has later layers too.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, 3, 1)]
    width = 3
    for widths in ((64, 64), (128, 128), (256, 256, 256, 256)):
        for wider in widths:
            layers += _convolution(width, wider)
            width = wider
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    return nn.Sequential(*layers, *_convolution(width, CHANNELS))


def decoder() -> nn.Sequential:
    """The encoder's mirror image, which doubles the sides by repetition; parameters named as in decoder.pth."""
    layers: list[nn.Module] = []
    width = CHANNELS
    for widths in ((256,), (256, 256, 256, 128), (128, 64)):
        for narrower in widths:
            layers += _convolution(width, narrower)
            width = narrower
        layers.append(nn.Upsample(scale_factor=2, mode="nearest"))
    layers += _convolution(width, 64) + _convolution(64, 3)
    return nn.Sequential(*layers[:-1])  # pixels have no ReLU


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.ReflectionPad2d(1), nn.Conv2d(inputs, outputs, 3), nn.ReLU()]


def read_autoencoder(folder: Path) -> Autoencoder:
    """Returns the encoder and decoder with the weights of two files in a folder, on the CPU.

    The files are vgg_normalised and decoder, each as .safetensors or .pth. Raises `UserError` if one is missing or
    damaged, holds code, or is of another model.
    """
    files = {name: _file(folder, name) for name in (ENCODER, DECODER)}
    if missing := [f"{name}.pth" for name, file in files.items() if file is None]:
        raise UserError(
            f"{OPTION}: {folder} lacks {' and '.join(missing)}, AdaIN's weights; download vgg_normalised.pth and "
            "decoder.pth of github.com/naoto0804/pytorch-AdaIN into one folder, and type "
            f"xdm-ft analyse RUN_DIR {OPTION} FOLDER"
        )
    found = Autoencoder(vgg_encoder(), decoder())
    for model, file in zip((found.encoder, found.decoder), files.values(), strict=True):
        assert file is not None
        _load(model, file)
        model.eval().requires_grad_(False)
    return found


def _file(folder: Path, name: str) -> Path | None:
    return next((file for ending in ENDINGS if (file := folder / f"{name}{ending}").exists()), None)


def _load(model: nn.Sequential, file: Path) -> None:
    state, wanted = read_weights(file, _tensors, OPTION), model.state_dict()
    faults = [f"{name} is missing" for name in wanted if name not in state]
    faults += [
        f"{name} has shape {list(state[name].shape)}, not {list(value.shape)}"
        for name, value in wanted.items()
        if name in state and state[name].shape != value.shape
    ]
    if faults:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise UserError(
            f"{OPTION}: {file} is not AdaIN's {file.stem} ({faults[0]}{more}); copy the file of pytorch-AdaIN again"
        )
    model.load_state_dict({name: state[name].float() for name in wanted})


def _tensors(path: str) -> Mapping[str, object]:
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path)
    found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, Mapping):
        raise TypeError(f"it holds a {type(found).__name__}, not a state dict")
    return found


def mixed_maps(
    maps: Tensor, y: Tensor, domain: Tensor, class_head: Linear, domain_head: Linear, quantile: float
) -> Augmented:
    """Returns z̃ of maps by equations (1) to (7): whole channels are mixed, with masks of the pooled features.

    p_discard and partners are the paper's; the draws are the same for every `quantile`, so that levels compare.

    Args:
        maps: features before pooling, float32 [B,K,h,w].
        y: classes, int64 [B].
        domain: domains, int64 [B], 0…D−1.
        class_head: a head that reads pooled features [B,K].
        domain_head: likewise, of the domain.
        quantile: of τ_d, in [0, 1].

    Returns:
        z̃ [B,K,h,w] and its draws. Pooled, it is z̃ of the pooled features.
    """
    pooled = maps.mean((2, 3))  # [B,K]
    masks = {
        "class_mask": specific_mask(linear_scores(pooled, class_head.weight, y), CLASS_QUANTILE),
        "domain_mask": specific_mask(linear_scores(pooled, domain_head.weight, domain), quantile),
    }
    names = tuple(str(number) for number in range(len(domain_head.weight)))
    method = XDomainMix(Setup(Task(names, names), maps.shape[1], steps=1, seed=0), warmup_steps=0)
    place = torch.arange(len(y))
    with torch.no_grad():
        return method.augment(maps, Batch(maps, y, domain, place, place), step=0, first_pass_draws=masks)
