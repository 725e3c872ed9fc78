"""Images that AdaIN's decoder makes of features, augmented by XDomainMix between encoder and decoder (appendix D).

The weights are those of pytorch-AdaIN, as in the paper. They are read from local files; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.xdomainmix import CLASS_QUANTILE, Augmented, XDomainMix
from xdm_ft.analysis import Encoded
from xdm_ft.analysis.importance import fit_domain_head
from xdm_ft.core import Batch, Task
from xdm_ft.heads.linear import Linear
from xdm_ft.model_sources.source import read_weights
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import Progress, pulse
from xdm_ft.xdomainmix import linear_scores, specific_mask

OPTION = "--reconstruct"
ENCODER, DECODER = "vgg_normalised", "decoder"  # names of the weights files, without their endings
ENDINGS = (".safetensors", ".pth")
CHANNELS = 512
REDUCTION = 8  # pixels of an image along one side of a position of the map
MIXED_LEVELS = (0.9, 0.5)  # quantiles of τ_d: first and last of its cycle
COLUMNS = ("original", "reconstructed", *(f"augmented, τ_d {quantile:g}" for quantile in MIXED_LEVELS))
SIDE = 224  # pixels, of square images; a multiple of 8
MIXED = 32  # images that are mixed with each other
SHOWN = 8  # of the mixed ones
AT_ONCE = 8  # images that the networks see


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
    models = {ENCODER: vgg_encoder(), DECODER: decoder()}
    paths = {name: [folder / f"{name}{ending}" for ending in ENDINGS] for name in models}
    files = {name: next(filter(Path.exists, several), None) for name, several in paths.items()}
    if missing := [f"{name}.pth" for name, file in files.items() if file is None]:
        raise UserError(
            f"{OPTION}: {folder} lacks {' and '.join(missing)}, AdaIN's weights; download vgg_normalised.pth and "
            "decoder.pth of github.com/naoto0804/pytorch-AdaIN into one folder, and type "
            f"xdm-ft analyse RUN_DIR {OPTION} FOLDER"
        )
    for name, model in models.items():
        file, expected = files[name], model.state_dict()
        assert file is not None
        state = read_weights(file, _tensors, OPTION)
        faults = [f"{key} is missing" for key in expected if key not in state]
        faults += [
            f"{key} has shape {list(state[key].shape)}, not {list(value.shape)}"
            for key, value in expected.items()
            if key in state and state[key].shape != value.shape
        ]
        if faults:
            more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
            raise UserError(
                f"{OPTION}: {file} is not AdaIN's {name} ({faults[0]}{more}); copy the file of pytorch-AdaIN again"
            )
        model.load_state_dict({key: state[key].float() for key in expected})
        model.eval().requires_grad_(False)
    return Autoencoder(models[ENCODER], models[DECODER])


def _tensors(path: str) -> Mapping[str, object]:
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path)
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping):
        raise TypeError(f"it holds a {type(state).__name__}, not a state dict")
    return state


def mix_maps(
    maps: Tensor, y: Tensor, domain: Tensor, class_head: Linear, domain_head: Linear, quantile: float
) -> Augmented:
    """Returns z̃ of maps [B,K,h,w] by equations (1) to (7): whole channels are mixed, with masks of the pooled features.

    p_discard and partners are the paper's; the draws are the same for every `quantile` of τ_d, so that levels compare.
    Both heads read pooled features [B,K]. Pooled, the result is z̃ of the pooled features.
    """
    pooled = maps.mean((2, 3))  # [B,K]
    masks = {
        "class_mask": specific_mask(linear_scores(pooled, class_head.weight, y), CLASS_QUANTILE),
        "domain_mask": specific_mask(linear_scores(pooled, domain_head.weight, domain), quantile),
    }
    names = tuple(str(number) for number in range(len(domain_head.weight)))
    method = XDomainMix(Setup(Task(names, names), maps.shape[1], steps=1, seed=0), warmup_steps=0)
    position = torch.arange(len(y))
    with torch.no_grad():
        return method.augment(maps, Batch(maps, y, domain, position, position), step=0, first_pass_draws=masks)


def reconstructions(
    autoencoder: Autoencoder,
    images: Callable[[int], Tensor],
    training: Encoded,
    classes: Sequence[str],
    domains: Sequence[str],
    device: torch.device,
    bar: Progress,
) -> Tensor:
    """Returns images float32 [n,4,3,SIDE,SIDE], as in `COLUMNS`, of at most `SHOWN` samples with both partners.

    `images`: row → image float32 [3,SIDE,SIDE] in 0…1. `training`: the images on whose features heads are fitted, in an
    order that mixes the domains (`z` is not read). Returns none with fewer than two domains or classes.
    """
    pooled, maps, original = list[Tensor](), Tensor(), Tensor()
    for batch in training.rows.split(AT_ONCE):
        x = torch.stack([images(row) for row in batch.tolist()])
        encoded = autoencoder.encode(x.to(device)).cpu()
        pooled.append(encoded.mean((2, 3)))
        if len(maps) < MIXED:  # maps and pixels are large: those of the mixed images only
            maps, original = torch.cat([maps, encoded])[:MIXED], torch.cat([original, x])[:MIXED]
        bar.advance(len(x))
        pulse.beat()
    features = torch.cat(pooled)  # [n,512]
    last = len(features) * 2 // 3  # the others pick the penalty
    class_head, domain_head = (
        fit_domain_head(names, (features[:last], labels[:last]), (features[last:], labels[last:]))
        for names, labels in ((classes, training.y), (domains, training.domain))
    )
    if class_head is None or domain_head is None:
        return original[:0, None]
    labels = training.y[: len(maps)], training.domain[: len(maps)]
    mixed = [mix_maps(maps, *labels, class_head, domain_head, quantile) for quantile in MIXED_LEVELS]
    partners = mixed[0].partners  # the same at all levels
    shown = torch.where(partners.has_same & partners.has_other)[0][:SHOWN]
    if not len(shown):
        return original[:0, None]
    columns = [original[shown]]
    for level in (maps, *(augmented.z for augmented in mixed)):
        decoded = [autoencoder.decode(some.to(device)).cpu() for some in level[shown].split(AT_ONCE)]
        columns.append(torch.cat(decoded))
    return torch.stack(columns, 1)


def write_png(rows: Tensor, file: Path) -> None:
    """Writes images float [n,columns,3,side,side] in 0…1 as one, with a row for each."""
    from PIL import Image

    n, columns, _, side, _ = rows.shape
    pixels = rows.permute(0, 3, 1, 4, 2).reshape(n * side, columns * side, 3)  # [n·H, 4·W, 3]
    Image.fromarray((255 * pixels).round().byte().numpy()).save(file, "PNG", optimize=True)
