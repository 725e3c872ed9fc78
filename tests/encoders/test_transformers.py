"""The transformers encoder: features, pooling, preprocessing, texts, weights, and one line for every fault."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_transformers
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from xdm_ft.cut.cut import Cut
from xdm_ft.encoders import TextEncoder
from xdm_ft.encoders.transformers import TOLERANCE, Transformers, from_processor
from xdm_ft.features.key import weights_digest
from xdm_ft.images.transforms import Preprocessing, PreprocessingOverrides, evaluation_transform
from xdm_ft.recipe import components
from xdm_ft.runtime.errors import UserError

CLASSES = ("dog", "polar_bear", "guitar")
BOTH = ("a photo of a {}", "a sketch of a {}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Any]]:
    """{kind: (its `encoder.model`, the model that was saved)}."""
    found = {}
    for kind in tiny_transformers.MAKE:
        folder = tmp_path_factory.mktemp(kind)
        found[kind] = (f"local-dir:{folder}", tiny_transformers.save(kind, folder))
    return found


@pytest.fixture
def images() -> Tensor:
    return torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def copy_of(saved: dict[str, tuple[str, Any]], kind: str, target: Path) -> Path:
    return Path(shutil.copytree(saved[kind][0].removeprefix("local-dir:"), target))


def photograph(width: int, height: int) -> Image.Image:
    """Smooth areas, edges and fine texture."""
    draw = np.random.default_rng(1)
    coarse = Image.fromarray(draw.integers(0, 256, (7, 9, 3), dtype=np.uint8)).resize((width, height), 3)
    pixels = np.asarray(coarse) + draw.normal(0, 8, (height, width, 3))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (250, 20, 60)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@torch.no_grad()
@pytest.mark.parametrize("kind", tiny_transformers.MAKE)
def test_features_are_the_librarys(saved, kind: str, images: Tensor) -> None:
    name, model = saved[kind]
    encoder = Transformers(model=name)
    has_text = kind in ("clip", "siglip")
    expected = (model.get_image_features if has_text else model)(pixel_values=images).pooler_output
    assert torch.equal(encoder(images), expected)
    assert encoder.width == expected.shape[1] == (24 if kind == "clip" else 32)
    assert not encoder.training and isinstance(encoder, TextEncoder) and bool(encoder.text_reason) != has_text
    unit = Transformers(model=name, normalize=True)(images)
    torch.testing.assert_close(unit, expected / expected.norm(dim=1, keepdim=True))
    low = encoder.to(torch.bfloat16)(images)
    assert low.dtype == torch.float32 and torch.nn.functional.cosine_similarity(low, expected).min() > 0.99


@torch.no_grad()
@pytest.mark.parametrize("kind", tiny_transformers.MAKE)
@pytest.mark.parametrize("pooling", ["cls", "mean", "cls_mean", "projected"])
def test_pooling(saved, kind: str, pooling: str, images: Tensor) -> None:
    """Token by token: which tokens are patches, and that CLIP's are normalised before they are averaged."""
    name, model = saved[kind]
    if (kind, pooling) in {("siglip", "cls"), ("siglip", "cls_mean"), ("vit", "projected"), ("dinov2", "projected")}:
        with pytest.raises(UserError, match=rf"^encoder\.pooling: {pooling}: .* has no .*; leave it out, or use"):
            Transformers(model=name, pooling=pooling)
        return
    encoder = Transformers(model=name, pooling=pooling)
    z = encoder(images)
    if pooling == "projected":
        assert torch.equal(z, model.get_image_features(pixel_values=images).pooler_output)
        assert not encoder.text_reason
        return
    vision = model.vision_model if kind in ("clip", "siglip") else model
    tokens = vision(pixel_values=images).last_hidden_state
    prefix = {"vit": 1, "dinov2": 4, "clip": 1, "siglip": 0}[kind]
    assert tokens.shape[1] == prefix + 16
    for row, each in zip(z, tokens, strict=True):
        normed = [vision.post_layernorm(token) if kind == "clip" else token for token in each]
        mean = sum(normed[prefix:]) / 16
        expected = {"cls": normed[0], "mean": mean, "cls_mean": torch.cat([normed[0], mean])}[pooling]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-5)
    assert encoder.width == z.shape[1] and encoder.text_reason


@torch.no_grad()
def test_a_checkpoint_without_pooler_gives_its_class_token(tmp_path: Path, images: Tensor) -> None:
    """ViTs for classification have no pooler; one drawn at random would make features worthless."""
    torch.manual_seed(0)
    classifier = transformers.ViTForImageClassification(tiny_transformers.vit().config).eval()
    classifier.save_pretrained(tmp_path)
    tiny_transformers.processor("vit").save_pretrained(tmp_path)
    z = Transformers(model=f"local-dir:{tmp_path}")(images)
    assert torch.equal(z, classifier.vit(pixel_values=images).last_hidden_state[:, 0])


def test_a_model_that_draws_random_numbers_is_refused(tmp_path: Path) -> None:
    """ViTMAE hides patches at random."""
    transformers.ViTMAEModel(transformers.ViTMAEConfig(**tiny_transformers.IMAGE)).save_pretrained(tmp_path)
    tiny_transformers.processor("vit").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="draws random numbers for each image"):
        Transformers(model=f"local-dir:{tmp_path}")


@torch.no_grad()
def test_images_of_another_size(saved, images: Tensor) -> None:
    name, model = saved["clip"]
    encoder = Transformers(model=name, preprocessing=PreprocessingOverrides(size=48))
    large = torch.rand(2, 3, 48, 48)
    expected = model.get_image_features(pixel_values=large, interpolate_pos_encoding=True).pooler_output
    assert torch.equal(encoder(large), expected)


@pytest.mark.parametrize("kind", tiny_transformers.MAKE)
@pytest.mark.parametrize("size", [(120, 80), (50, 90), (20, 25)])
def test_preprocessing_is_the_processors(saved, kind: str, size: tuple[int, int]) -> None:
    """To 1 level of 255 on average and 4 at most: both resize with rounding of their own."""
    own = Transformers(model=saved[kind][0]).preprocessing
    image = photograph(*size)
    theirs = tiny_transformers.processor(kind)(images=image, return_tensors="pt")["pixel_values"][0]
    difference = (evaluation_transform(own)(image) - theirs).abs() * torch.tensor(own.std).view(3, 1, 1) * 255
    assert difference.mean() < 1 and difference.max() < 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: transformers.DeiTImageProcessor(), {"size": 224, "crop": 0.875, "resize": "squash"}),
        (lambda: transformers.ConvNextImageProcessor(size={"shortest_edge": 224}), {"size": 224, "resize": "native"}),
        (lambda: transformers.ConvNextImageProcessor(size={"shortest_edge": 384}), {"size": 384, "resize": "squash"}),
        (lambda: transformers.DINOv3ViTImageProcessor(), {"size": 224, "interpolation": "bilinear", "crop": 1.0}),
        (lambda: transformers.ViTImageProcessor(do_normalize=False), {"mean": (0, 0, 0), "std": (1, 1, 1)}),
        (lambda: transformers.ViTImageProcessor(resample=1), {"interpolation": "lanczos"}),
        (
            lambda: transformers.ViTImageProcessor(do_rescale=False, image_mean=[127.5] * 3, image_std=[51.0] * 3),
            {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)},
        ),
        (lambda: transformers.BitImageProcessor(do_center_crop=False), None),
        (lambda: transformers.ViTImageProcessor(size={"height": 64, "width": 32}), None),
        (lambda: transformers.ViTImageProcessor(do_resize=False), None),
        (lambda: transformers.CLIPImageProcessor(size={"shortest_edge": 200}), None),
        (lambda: transformers.LevitImageProcessor(), None),
    ],
)
def test_processors_are_expressed_or_refused(make, expected: dict[str, object] | None) -> None:
    if expected is None:
        with pytest.raises(UserError, match=r"have no equal here; set mean, std, size, crop, interpolation and resize"):
            from_processor(make(), "acme/own")
    else:
        assert {key: getattr(from_processor(make(), "acme/own"), key) for key in expected} == expected


@pytest.mark.parametrize("change", [{"interpolation": "bicubic"}, {"mean": (0.48, 0.5, 0.5)}, {"resize": "native"}])
def test_the_comparison_with_the_processor_can_fail(change: dict[str, object], monkeypatch) -> None:
    """What differs a little from a processor is found: otherwise the tolerance would hide wrong settings."""
    from xdm_ft.encoders import transformers as processor

    right = from_processor(own := transformers.ViTImageProcessor(), "acme/own")
    wrong = Preprocessing(**right.model_dump() | change)
    assert TOLERANCE <= 1
    assert all(processor._agrees(own, right, *size) for size in processor.SIZES)
    assert not all(processor._agrees(own, wrong, *size) for size in processor.SIZES)


def test_overrides_replace_parts_or_all(saved, tmp_path: Path) -> None:
    own = Transformers(model=saved["vit"][0], preprocessing=PreprocessingOverrides(crop=0.5)).preprocessing
    assert (own.crop, own.size, own.interpolation) == (0.5, 32, "bilinear")
    folder = copy_of(saved, "vit", tmp_path / "bare")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match=r"has no image processor here .*; set mean, std, size, crop"):
        Transformers(model=f"local-dir:{folder}")
    given = PreprocessingOverrides(**own.model_dump())
    assert Transformers(model=f"local-dir:{folder}", preprocessing=given).preprocessing == own


@torch.no_grad()
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_text_embeddings_by_hand(saved, kind: str) -> None:
    """Prompt by prompt: CLIP reads up to </s>; SigLIP reads the padding of the whole context too."""
    name, model = saved[kind]
    encoder = Transformers(model=name, prompts=BOTH)
    ids = {word: i for i, word in enumerate(tiny_transformers.WORDS)}
    expected = []
    for words in ("dog", "polar bear", "guitar"):
        total = torch.zeros(encoder.width)
        for prompt in BOTH:
            tokens = [*(ids[word] for word in prompt.format(words).split()), 1]
            if kind == "siglip":
                tokens += [0] * (8 - len(tokens))
            feature = model.get_text_features(input_ids=torch.tensor([tokens])).pooler_output[0]
            total += feature / feature.norm()
        expected.append(total / total.norm())
    torch.testing.assert_close(encoder.text_embeddings(CLASSES), torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert encoder.exact_prompts(CLASSES)[:3] == ["a photo of a dog", "a sketch of a dog", "a photo of a polar bear"]
    assert encoder.logit_scale == pytest.approx(model.logit_scale.exp().item())
    one = encoder.text_embeddings(CLASSES, BOTH[:1])
    assert one.shape == (3, encoder.width) and not torch.allclose(one, torch.stack(expected), atol=1e-3)


def test_a_prompt_longer_than_the_context_is_cut_with_a_warning(saved, caplog) -> None:
    encoder = Transformers(model=saved["clip"][0], prompts=("a photo of a photo of a photo of a {}",))
    with caplog.at_level(logging.WARNING, logger="xdm_ft"):
        assert encoder.text_embeddings(CLASSES).isfinite().all()
    assert "3 prompts are longer than 8 tokens" in caplog.text


def test_without_text_side_or_outside_its_space(saved) -> None:
    for keys, reason in (
        ({"model": saved["dinov2"][0]}, "has no text side; use a CLIP or SigLIP model"),
        ({"model": saved["clip"][0], "pooling": "mean"}, "outside the space of the texts"),
    ):
        encoder = Transformers(**keys)
        assert reason in encoder.text_reason
        with pytest.raises(UserError, match=reason):
            encoder.text_embeddings(CLASSES)


def test_only_the_image_side_trains(saved, images: Tensor) -> None:
    encoder = Transformers(model=saved["clip"][0])
    encoder(images).square().sum().backward()
    trained = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    assert trained and all(name.startswith(("model.vision_model", "model.visual_projection")) for name in trained)
    assert all((parameter.grad is not None) == (name in trained) for name, parameter in encoder.named_parameters())


@torch.no_grad()
def test_from_the_hub_cache_and_from_a_file(saved, hub, images: Tensor, tmp_path: Path) -> None:
    name, model = saved["dinov2"]
    folder = Path(name.removeprefix("local-dir:"))
    read = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    hub("acme/own", {**read, "model.safetensors": load_file(folder / "model.safetensors")})
    expected = model(pixel_values=images).pooler_output
    for written in ("acme/own", "hf-hub:acme/own"):
        encoder = Transformers(model=written)
        assert torch.equal(encoder(images), expected)
        assert encoder.identity()["model"] == "acme/own" and encoder.pretraining.startswith("weights acme/own, ")
    torch.save(model.state_dict(), tmp_path / "own.pth")
    encoder = Transformers(model="acme/own", weights=str(tmp_path / "own.pth"))
    assert torch.equal(encoder(images), expected) and "the file own.pth" in encoder.pretraining


@torch.no_grad()
@pytest.mark.parametrize("kind", tiny_transformers.MAKE)
def test_portable_builds_the_same_encoder_elsewhere(saved, kind: str, images: Tensor, tmp_path: Path) -> None:
    encoder = Transformers(model=saved[kind][0], kwargs={"initializer_range": 0.5} if kind == "vit" else {})
    settings, state, files = encoder.portable()
    architecture = files[settings["model"]]
    place = saved[kind][0].removeprefix("local-dir:")
    assert place not in json.dumps([settings, architecture]) and "initializer_range" not in settings["kwargs"]
    (tmp_path / settings["model"]).write_text(json.dumps(architecture))
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "encoder.safetensors")
    again = Transformers(
        **{**settings, "model": str(tmp_path / settings["model"])},
        weights=str(tmp_path / "encoder.safetensors"),
        preprocessing=PreprocessingOverrides(**encoder.preprocessing.model_dump()),
    )
    assert weights_digest(again) == weights_digest(encoder) and torch.equal(again(images), encoder(images))
    library = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**architecture))
    library.load_state_dict(state)  # strictly: the file has the library's own names
    assert again.identity()["config"] == encoder.identity()["config"]
    assert again.text_reason


@pytest.mark.slow
def test_identity_differs_where_features_do(saved) -> None:
    name = saved["clip"][0]
    plain = Transformers(model=name)
    variants = [
        plain,
        Transformers(model=name, normalize=True),
        Transformers(model=name, pooling="cls"),
        Transformers(model=name, preprocessing=PreprocessingOverrides(crop=0.5)),
        Transformers(model=name, kwargs={"vision_config": {"hidden_act": "gelu"}}),
    ]
    assert len({json.dumps(encoder.identity(), sort_keys=True) for encoder in variants}) == len(variants)
    assert "pooling" not in plain.identity() and transformers.__version__ in json.dumps(plain.identity())


def test_blocks_and_cut(saved) -> None:
    encoder = Transformers(model=saved["dinov2"][0])
    assert encoder.block_names == encoder.stage_names == tuple(f"model.encoder.layer.{i}" for i in range(3))
    assert Cut(encoder, 2).name == "model.encoder.layer.1"
    clip = Transformers(model=saved["clip"][0], pooling="mean")
    assert Cut(clip, 1).name == "model.vision_model.encoder.layers.2"


CODE = "import os; os.mkdir({!r})\nfrom transformers import ViTConfig as Own, ViTModel as OwnModel\n"


@pytest.mark.parametrize("known", [False, True])
def test_code_of_a_repository_is_never_run(saved, tmp_path: Path, known: bool, images: Tensor) -> None:
    """A model that needs it is refused; one that the library knows is built by the library."""
    folder, exploded = copy_of(saved, "vit", tmp_path / "remote"), tmp_path / "exploded"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Own", "AutoModel": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config | ({} if known else {"model_type": "own"})))
    (folder / "own.py").write_text(CODE.format(str(exploded)))
    if known:
        assert Transformers(model=f"local-dir:{folder}")(images).shape == (3, 32)
    else:
        with pytest.raises(UserError, match="needs code from its repository, which is never run") as raised:
            Transformers(model=f"local-dir:{folder}")
        assert "\n" not in str(raised.value)
    assert not exploded.exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning")
def test_faulty_file(saved, faulty, fault: tuple[str, str], tmp_path: Path) -> None:
    name, model = saved["vit"]
    with pytest.raises(UserError, match=fault[1]) as raised:
        Transformers(model=name, weights=str(faulty(fault[0], dict(model.state_dict()))))
    assert "\n" not in str(raised.value) and not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("change", "wording"),
    [
        (
            lambda s: {k: v for k, v in s.items() if "layers.2" not in k},
            r"lacks \d+ of the model's tensors \(layers\.2",
        ),
        (lambda s: {**s, "layernorm.weight": torch.zeros(5)}, "can not be loaded"),
        (lambda s: {f"x.{k}": v for k, v in s.items()}, r"lacks \d+ of the model's tensors"),
    ],
)
def test_file_that_does_not_fit(saved, tmp_path: Path, change, wording: str) -> None:
    path = tmp_path / "other.safetensors"
    save_file(change(dict(saved["vit"][1].state_dict())), path)
    with pytest.raises(UserError, match=wording) as raised:
        Transformers(model=saved["vit"][0], weights=str(path))
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("keys", "wording"),
    [
        ({"model": "acme/none"}, 'acme/none is not on this machine .*hf download acme/none".*HF_HUB_OFFLINE=1'),
        ({"model": "hf-hub:acme/none"}, "hf download acme/none"),
        ({"model": "resnet18"}, 'encoder.model: "resnet18" is no name of the hub; write ORGANISATION/NAME'),
        ({"model": "local-dir:nowhere"}, "the folder nowhere has no config.json"),
        ({"model": "sub/folder"}, "is a folder here; write local-dir:sub/folder"),
        ({"model": "own.json"}, "is no file; own.json needs a .safetensors file"),
        ({"model": "own.json", "weights": "own.safetensors"}, "own.json can not be read as a config"),
        ({"model": "acme/none", "weights": "openai"}, "write weights: pretrained"),
        ({"weights": "nowhere.safetensors"}, "nowhere.safetensors does not exist"),
        ({"kwargs": {"hidden_sice": 3}}, '"hidden_sice" is no key of the config .*did you mean "hidden_size"'),
        ({"kwargs": {"hidden_size": 33}}, r"encoder\.kwargs: \{'hidden_size': 33\} do not fit"),
        ({"kwargs": {"model_type": "clip"}}, "encoder.kwargs: model_type can not be set here"),
        ({"prompts": ("a photo",)}, "encoder.prompts: "),
    ],
)
def test_faults_of_the_recipe(saved, keys: dict[str, Any], wording: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sub/folder").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=wording) as raised:
        Transformers(**{"model": saved["vit"][0], **keys})
    assert "\n" not in str(raised.value)


def test_a_text_model_is_refused(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    transformers.BertModel(transformers.BertConfig(**small)).save_pretrained(tmp_path)
    tiny_transformers.processor("vit").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"\(bert\) takes no images; choose a vision model"):
        Transformers(model=f"local-dir:{tmp_path}")


def test_without_the_library(saved, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"not installed here; pip install 'xdm_ft\[transformers\]'") as raised:
        Transformers(model=saved["vit"][0])
    assert "\n" not in str(raised.value)


def test_recipe_keys() -> None:
    settings = components.settings_model(components.find("encoders", "transformers"))
    keys = {"model", "weights", "kwargs", "preprocessing", "normalize", "prompts", "pooling"}
    assert set(settings.model_fields) == keys
    assert settings(model="acme/own").weights == "pretrained"  # type: ignore[attr-defined]
