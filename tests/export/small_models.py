"""Models that no run has trained, with random heads, for tests of what is done with a model."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from xdm_ft.encoders import Encoder, Portable
from xdm_ft.export import SINGLE, EncoderConfig, HeadConfig, ModelConfig, ModelParts
from xdm_ft.features.key import weights_digest
from xdm_ft.images.transforms import Preprocessing, PreprocessingOverrides
from xdm_ft.recipe.components import find
from xdm_ft.storage import json_digest

CLASSES = ("cat", "dog", "éléphant", "giraffe")
SMALL = PreprocessingOverrides(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25), size=32, crop=0.875)


class Tiny(Encoder):
    """One convolution: exports in a second."""

    stage_names = ("convolution",)
    pretraining = "random weights, no pre-training"
    normalize = False

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, stride=2)
        self.preprocessing = SMALL.applied_to(Preprocessing(mean=(0, 0, 0), std=(1, 1, 1), size=1))
        self.width = 8

    def forward(self, images: Tensor) -> Tensor:
        return self.convolution(images).relu().mean((2, 3))

    def identity(self) -> dict[str, object]:
        return {"component": "tiny"}

    def portable(self) -> Portable:
        return Portable({"model": "tiny", "kwargs": {}}, dict(self.state_dict()))


def timm(model: str, **settings: object) -> tuple[Encoder, dict[str, object]]:
    """A small encoder of timm, and the settings that build it."""
    torch.manual_seed(0)
    size = {"img_size": 32} if "vit" in model else {}
    own = {"model": model, "kwargs": size, **settings}
    return find("encoders", "timm")(**own, preprocessing=SMALL).eval(), own


def demo_clip() -> tuple[Encoder, dict[str, object]]:
    own = {"model": "demo", "weights": "demo"}
    return find("encoders", "open_clip")(**own), {**own, "kwargs": {}}


def parts(
    encoder: Encoder,
    settings: dict[str, object],
    head: str = "linear",
    *,
    name: str = "timm",
    normalize: bool = False,
    members: int = 1,
    temperature: float = 1.0,
    description: str = "PACS, leave one domain out",
    trained: bool = False,
) -> ModelParts:
    """A model; with several `members`, an ensemble (of linear heads too without their mean, which `heads` may lack)."""
    of_head = find("heads", head)
    heads = {seed: of_head(encoder.width, len(CLASSES), seed, 0).eval() for seed in range(members)}
    config = ModelConfig(
        xdm_ft="1.0.0",
        class_names=CLASSES,
        encoder=EncoderConfig(
            name=name,
            settings=settings,
            seed=0,
            file=None,
            xxh3=weights_digest(encoder),
            width=encoder.width,
            trained=trained,
            precision="fp32",
            pretraining=encoder.pretraining,
            identity=None,
        ),
        preprocessing=encoder.preprocessing,
        normalize=normalize,
        head=HeadConfig(name=head, settings={}),
        members=tuple(heads) if members > 1 else (),
        temperature=temperature,
        method={"label": "erm", "train_domains": ["a", "b"], "test_domains": ["c"], "seed": 0},
        protocol={"description": description},
        step=1,
        results={},
        chosen="the only one",
    )
    named = {f"members.{seed}": one for seed, one in heads.items()} if members > 1 else {SINGLE: heads[0]}
    return ModelParts(config, encoder, named)


def config_of(model: Path) -> dict[str, Any]:
    """The content of config.json, without its checksum."""
    return {key: value for key, value in json.loads((model / "config.json").read_text()).items() if key != "checksum"}


def write_config(model: Path, document: dict[str, Any]) -> None:
    """Writes config.json with a valid checksum."""
    (model / "config.json").write_text(json.dumps({**document, "checksum": json_digest(document)}))


def add_to_hub(cache: Path, repository: str, folder: Path) -> None:
    """Puts a folder into a cache of the hub, as a download would."""
    target = cache / f"models--{repository.replace('/', '--')}"
    (target / "refs").mkdir(parents=True)
    (target / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, target / "snapshots" / ("0" * 40))


def photographs(folder: Path, count: int = 4) -> list[str]:
    """Writes images of different sizes, and returns their paths."""
    torch.manual_seed(1)
    paths = []
    for number in range(count):
        pixels = torch.randint(0, 256, (40 + 9 * number, 60, 3), dtype=torch.uint8).numpy()
        path = folder / f"{number}.png"
        Image.fromarray(pixels).resize((90, 70 + number)).save(path)
        paths.append(str(path))
    return paths
