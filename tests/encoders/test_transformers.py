"""What is transformers' alone: image processors, models that have no feature of their own, code of repositories."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers
import torch
import transformers
from tiny_models import Family, images

from xdm_ft.encoders.transformers import TOLERANCE, Transformers, _block_names, from_processor
from xdm_ft.images.transforms import Preprocessing, PreprocessingOverrides
from xdm_ft.runtime.errors import UserError


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    tiny_transformers.processor("vit").save_pretrained(folder)
    return f"local-dir:{folder}"


def copy_of(family: Family, target: Path) -> Path:
    return Path(shutil.copytree(family.source[0].removeprefix("local-dir:"), target))


@torch.no_grad()
def test_a_checkpoint_without_pooler_gives_its_class_token(tmp_path: Path) -> None:
    """ViTs for classification have no pooler; one drawn at random would make features worthless."""
    torch.manual_seed(0)
    classifier = transformers.ViTForImageClassification(tiny_transformers.vit().config).eval()
    z = Transformers(model=saved(classifier, tmp_path))(images())
    assert torch.equal(z, classifier.vit(pixel_values=images()).last_hidden_state[:, 0])


TEXT_MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}


@pytest.mark.parametrize(
    ("make", "wording"),
    [
        (
            lambda: transformers.ViTMAEModel(transformers.ViTMAEConfig(**tiny_transformers.IMAGE)),  # hides patches
            "draws random numbers for each image",
        ),
        (
            lambda: transformers.BertModel(transformers.BertConfig(**TEXT_MODEL)),
            r"\(bert\) takes no images; choose a vision model",
        ),
    ],
)
def test_models_that_are_refused(make, wording: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=wording):
        Transformers(model=saved(make(), tmp_path))


@torch.no_grad()
def test_blocks_of_a_model_of_stages() -> None:
    config = transformers.ConvNextConfig(num_stages=2, depths=[1, 2], hidden_sizes=[8, 16])
    inside, stages = _block_names(transformers.ConvNextModel(config))
    assert stages == ["encoder.stages.0", "encoder.stages.1"]
    assert inside == ["encoder.stages.0.layers.0", "encoder.stages.1.layers.0", "encoder.stages.1.layers.1"]


def test_images_of_another_size(families: dict[str, Family]) -> None:
    encoder = families["clip"].encoder(preprocessing=PreprocessingOverrides(size=48))
    library = families["clip"].model.get_image_features(pixel_values=images(48), interpolate_pos_encoding=True)
    assert torch.equal(encoder(images(48)), getattr(library, "pooler_output", library))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: transformers.DeiTImageProcessor(), {"size": 224, "crop": 0.875, "resize": "squash"}),
        (lambda: transformers.ConvNextImageProcessor(size={"shortest_edge": 224}), {"size": 224, "resize": "native"}),
        (lambda: transformers.ConvNextImageProcessor(size={"shortest_edge": 384}), {"size": 384, "resize": "squash"}),
        (lambda: transformers.ViTImageProcessor(do_normalize=False), {"mean": (0, 0, 0), "std": (1, 1, 1)}),
        (lambda: transformers.ViTImageProcessor(resample=1), {"interpolation": "lanczos"}),
        (
            lambda: transformers.ViTImageProcessor(do_rescale=False, image_mean=[127.5] * 3, image_std=[51.0] * 3),
            {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)},
        ),
        (lambda: transformers.BitImageProcessor(do_center_crop=False), None),
        (lambda: transformers.ViTImageProcessor(do_resize=False), None),
        (lambda: transformers.CLIPImageProcessor(size={"shortest_edge": 200}), None),
    ],
)
def test_processors_are_expressed_or_refused(make, expected: dict[str, object] | None) -> None:
    if expected is None:
        with pytest.raises(
            UserError, match=r"have no equivalent here; set mean, std, size, crop, interpolation and resize"
        ):
            from_processor(make(), "acme/own")
    else:
        assert {key: getattr(from_processor(make(), "acme/own"), key) for key in expected} == expected


@pytest.mark.parametrize("change", [{"interpolation": "bicubic"}, {"mean": (0.48, 0.5, 0.5)}, {"resize": "native"}])
def test_the_comparison_with_the_processor_can_fail(change: dict[str, object]) -> None:
    """What differs a little from a processor is found: otherwise the tolerance would hide wrong settings."""
    from xdm_ft.encoders import transformers as module

    right = from_processor(own := transformers.ViTImageProcessor(), "acme/own")
    wrong = Preprocessing(**right.model_dump() | change)
    assert TOLERANCE <= 1
    assert all(module._agrees(own, right, *size) for size in module.SIZES)
    assert not all(module._agrees(own, wrong, *size) for size in module.SIZES)


def test_overrides_replace_parts_or_all(families: dict[str, Family], tmp_path: Path) -> None:
    own = families["vit"].encoder(preprocessing=PreprocessingOverrides(crop=0.5)).preprocessing
    assert (own.crop, own.size, own.interpolation) == (0.5, 32, "bilinear")
    folder = copy_of(families["vit"], tmp_path / "bare")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match=r"has no image processor here .*; set mean, std, size, crop"):
        Transformers(model=f"local-dir:{folder}")
    given = PreprocessingOverrides(**own.model_dump())
    assert Transformers(model=f"local-dir:{folder}", preprocessing=given).preprocessing == own


CODE = "import os; os.mkdir({!r})\nfrom transformers import ViTConfig as Own, ViTModel as OwnModel\n"


@pytest.mark.parametrize("known", [False, True])
def test_code_of_a_repository_is_never_run(families: dict[str, Family], tmp_path: Path, known: bool) -> None:
    """A model that needs it is refused; one that the library knows is built by the library."""
    folder, exploded = copy_of(families["vit"], tmp_path / "remote"), tmp_path / "exploded"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Own", "AutoModel": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config | ({} if known else {"model_type": "own"})))
    (folder / "own.py").write_text(CODE.format(str(exploded)))
    if known:
        assert Transformers(model=f"local-dir:{folder}")(images()).shape == (3, 32)
    else:
        with pytest.raises(UserError, match="needs code from its repository, and that code is never run") as raised:
            Transformers(model=f"local-dir:{folder}")
        assert "\n" not in str(raised.value)
    assert not exploded.exists()


def test_without_the_library(families: dict[str, Family], monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"not installed here; pip install 'xdm_ft\[transformers\]'") as raised:
        families["vit"].encoder()
    assert "\n" not in str(raised.value)


def test_kwargs_are_part_of_the_architecture_elsewhere(families: dict[str, Family]) -> None:
    settings, _, files = families["vit"].encoder(kwargs={"initializer_range": 0.5}).portable()
    assert settings["kwargs"] == {} and files[settings["model"]]["initializer_range"] == 0.5
