"""AdaIN's encoder and decoder, with random weights: the real ones are not in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from xdm_ft.analysis.reconstruction import Autoencoder, decoder, mix_maps, read_autoencoder, vgg_encoder
from xdm_ft.heads.linear import Linear
from xdm_ft.runtime.errors import UserError

# number in the published files: (outputs, inputs)
OF_ENCODER = {0: (3, 3), 2: (64, 3), 5: (64, 64), 9: (128, 64), 12: (128, 128), 16: (256, 128), 19: (256, 256),
              22: (256, 256), 25: (256, 256), 29: (512, 256)}  # fmt: skip
OF_DECODER = {1: (256, 512), 5: (256, 256), 8: (256, 256), 11: (256, 256), 14: (128, 256), 18: (128, 128),
              21: (64, 128), 25: (64, 64), 28: (3, 64)}  # fmt: skip


def passing(model: nn.Sequential) -> nn.Sequential:
    """The model whose convolutions copy the first three channels, and make all others 0."""
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
            middle = layer.kernel_size[0] // 2
            for channel in range(3):
                layer.weight.data[channel, channel, middle, middle] = 1
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("adain")
    later = {"32.weight": torch.zeros(2), "51.bias": torch.zeros(2)}  # layers of the published file that are not used
    torch.save(passing(vgg_encoder()).state_dict() | later, found / "vgg_normalised.pth")
    save_file(passing(decoder()).state_dict(), found / "decoder.safetensors")
    return found


@pytest.mark.parametrize(("model", "wanted", "first"), [(vgg_encoder(), OF_ENCODER, 1), (decoder(), OF_DECODER, 3)])
def test_parameters_are_those_of_the_published_files(model: nn.Sequential, wanted, first: int) -> None:
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    expected = {}
    for place, (number, (outputs, inputs)) in enumerate(wanted.items()):
        side = first if place == 0 else 3
        expected |= {f"{number}.weight": (outputs, inputs, side, side), f"{number}.bias": (outputs,)}
    assert shapes == expected
    padded = [layer for layer in model if isinstance(layer, nn.ReflectionPad2d)]
    assert len(padded) == sum(layer.kernel_size == (3, 3) for layer in model if isinstance(layer, nn.Conv2d))
    kinds = [type(layer).__name__ for layer in model]
    assert len(model) == (31 if wanted is OF_ENCODER else 29)
    assert kinds[-1] == ("ReLU" if wanted is OF_ENCODER else "Conv2d")  # pixels are not cut by the network


def test_channels_keep_their_places(folder: Path) -> None:
    both = read_autoencoder(folder)
    colours = torch.tensor([[0.1, 0.5, 0.9], [0.3, 0.0, 1.0]])[:, :, None, None]
    images = colours.expand(2, 3, 16, 24).clone()
    images[0, :, 3, 12] = 1.0  # the brightest pixel of its 8 × 8 pixels
    maps = both.encode(images)
    assert maps.shape == (2, 512, 2, 3) and (maps[:, 3:] == 0).all()
    assert torch.equal(maps[:, :3], nn.functional.max_pool2d(images, 8))
    assert torch.equal(both.decode(maps), nn.functional.interpolate(maps[:, :3], scale_factor=8))
    assert not any(parameter.requires_grad for parameter in both.encoder.parameters())
    torch.manual_seed(0)
    random = Autoencoder(vgg_encoder().eval(), decoder().eval())
    maps = random.encode(torch.rand(2, 3, 32, 48))
    assert maps.shape == (2, 512, 4, 6) and (maps >= 0).all() and maps.std() > 0
    images = random.decode(maps)
    assert images.shape == (2, 3, 32, 48) and images.min() >= 0 and images.max() <= 1


def mixed(maps: torch.Tensor, quantile: float):
    y, domain = torch.tensor([0, 0, 1, 1, 0, 1]), torch.tensor([0, 1, 0, 1, 2, 2])
    heads = [Linear(maps.shape[1], outputs, seed, 0) for seed, outputs in enumerate((2, 3))]
    return mix_maps(maps, y, domain, *heads, quantile)


def test_mixing_takes_whole_channels() -> None:
    maps = torch.rand(6, 40, 4, 5, generator=torch.Generator().manual_seed(3))
    found = mixed(maps, 0.9)
    of_class, of_domain = found.masks["class_mask"], found.masks["domain_mask"]
    assert of_domain.sum(1).tolist() == [4] * 6 and of_class.sum(1).tolist() == [20] * 6
    for i in range(6):
        # a channel is λ its own map + μ that of one partner; generic channels of x_i and x_j add nothing
        same, other = found.partners.same[i], found.partners.other[i]
        lam_1, lam_2 = found.lam[i]
        for k in range(40):
            c, d = bool(of_class[i, k]), bool(of_domain[i, k])
            expected = maps[i, k] * ((1.0 if found.keep[i] else 0.0) * lam_1 if c and d else lam_2 if d else 1.0)
            if found.keep[i] and of_class[same, k] and of_domain[same, k]:
                expected = expected + (1 - lam_1) * maps[same, k]
            if not of_class[other, k] and of_domain[other, k]:
                expected = expected + (1 - lam_2) * maps[other, k]
            torch.testing.assert_close(found.z[i, k], expected)
    half = mixed(maps, 0.5)
    assert torch.equal(half.lam, found.lam) and torch.equal(half.partners.same, found.partners.same)


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_autoencoder(folder)
    (line,) = str(caught.value).splitlines()
    return line


def test_files_that_are_missing(folder: Path, tmp_path: Path) -> None:
    line = refused(tmp_path / "nowhere")
    assert line.startswith(f"--reconstruct: {tmp_path / 'nowhere'} lacks vgg_normalised.pth and decoder.pth")
    assert "github.com/naoto0804/pytorch-AdaIN" in line and line.endswith("xdm-ft analyse RUN_DIR --reconstruct FOLDER")
    (tmp_path / "vgg_normalised.pth").symlink_to(folder / "vgg_normalised.pth")
    assert " lacks decoder.pth, " in refused(tmp_path)


class Code:
    pass


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda path: path.write_bytes(b"nothing"), "is damaged or has another format"),
        (lambda path: torch.save([torch.zeros(2)], path), "holds a list, not a state dict"),
        (lambda path: torch.save({"1.weight": Code()}, path), "holds pickled code"),
        (lambda path: torch.save(vgg_encoder().state_dict(), path), "is not AdaIN's decoder (1.weight is missing"),
        (
            lambda path: torch.save(decoder().state_dict() | {"28.weight": torch.zeros(4, 64, 3, 3)}, path),
            "(28.weight has shape [4, 64, 3, 3], not [3, 64, 3, 3]); copy",
        ),
    ],
)
def test_files_that_are_wrong(write, problem: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "vgg_normalised.pth").symlink_to(folder / "vgg_normalised.pth")
    write(tmp_path / "decoder.pth")
    line = refused(tmp_path)
    assert line.startswith(f"--reconstruct: {tmp_path / 'decoder.pth'} ") and problem in line
