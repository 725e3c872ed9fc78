"""The open_clip encoder: image features, text embeddings, sources of weights and configs, and the activation."""

from __future__ import annotations

import copy
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from xdm_ft.encoders import TextEncoder
from xdm_ft.encoders.open_clip import OpenClip
from xdm_ft.images.transforms import PreprocessingOverrides, evaluation_transform
from xdm_ft.recipe import components
from xdm_ft.runtime.errors import UserError
from xdm_ft.weights.prompts import warn_of_class_names

TINY: dict[str, Any] = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
CLASSES = ("dog", "polar_bear", "guitar")
ENSEMBLE = ("a photo of a {}", "a sketch of a {}", "{}, drawn by a child")


class Tiny:
    """A tiny CLIP on disk: config, weights, and the model that was saved."""

    def __init__(self, folder: Path, name: str = "tiny_clip", **changes: Any) -> None:
        self.config, self.weights = folder / f"{name}.json", folder / f"{name}.safetensors"
        self.config.write_text(json.dumps({**TINY, **changes}))
        open_clip.add_model_config(self.config)
        torch.manual_seed(0)
        self.model = open_clip.create_model(name).eval()
        save_file(self.state(), self.weights)

    def state(self) -> dict[str, Tensor]:
        return {name: value.contiguous() for name, value in self.model.state_dict().items()}

    def encoder(self, **keys: Any) -> OpenClip:
        return OpenClip(**{"model": str(self.config), "weights": str(self.weights), **keys})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("clip"))


@pytest.fixture
def images() -> Tensor:
    return torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@torch.no_grad()
def test_features_are_the_projected_ones(tiny: Tiny, images: Tensor) -> None:
    encoder = tiny.encoder()
    assert not encoder.training and not encoder.model.training
    assert encoder.width == 24
    assert torch.equal(encoder(images), tiny.model.encode_image(images))
    unit = tiny.encoder(normalize=True)(images)
    torch.testing.assert_close(unit, tiny.model.encode_image(images, normalize=True))
    assert encoder.logit_scale == pytest.approx(tiny.model.logit_scale.exp().item())


def test_only_the_image_side_trains(tiny: Tiny, images: Tensor) -> None:
    encoder = tiny.encoder()
    encoder(images).square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.requires_grad == name.startswith("model.visual."), name
        assert (parameter.grad is not None) == parameter.requires_grad, name


@torch.no_grad()
def test_bfloat16_takes_and_gives_float32(tiny: Tiny, images: Tensor) -> None:
    encoder = tiny.encoder()
    z = encoder(images)
    low = encoder.to(torch.bfloat16)(images)
    assert low.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(z, low).min() > 0.99


@torch.no_grad()
@pytest.mark.parametrize("prompts", [ENSEMBLE[:1], ENSEMBLE])
def test_text_embeddings_are_averages_of_normalised_prompts(tiny: Tiny, prompts: tuple[str, ...]) -> None:
    encoder = tiny.encoder(prompts=prompts)
    found = encoder.text_embeddings(CLASSES)
    assert isinstance(encoder, TextEncoder)
    tokenizer = open_clip.get_tokenizer("tiny_clip")
    words = [name.replace("_", " ") for name in CLASSES]
    by_hand = []
    for word in words:
        each = tiny.model.encode_text(tokenizer([prompt.format(word) for prompt in prompts]))
        mean = (each / each.norm(dim=1, keepdim=True)).mean(0)
        by_hand.append(mean / mean.norm())
    torch.testing.assert_close(found, torch.stack(by_hand), rtol=1e-5, atol=1e-6)
    frozen = copy.deepcopy(tiny.model).requires_grad_(False)  # torch chooses its attention kernel by this
    library = open_clip.build_zero_shot_classifier(frozen, tokenizer, words, prompts).T
    torch.testing.assert_close(found, library, rtol=0, atol=1e-6)
    assert encoder.exact_prompts(CLASSES) == [prompt.format(word) for word in words for prompt in prompts]


@torch.no_grad()
def test_the_80_templates_of_clips_authors(tiny: Tiny) -> None:
    """Selected by name, for the encoder or for one method; equal to the library's own classifier."""
    words = ("dog", "guitar")
    frozen = copy.deepcopy(tiny.model).requires_grad_(False)
    tokenizer = open_clip.get_tokenizer("tiny_clip")
    library = open_clip.build_zero_shot_classifier(frozen, tokenizer, words, open_clip.OPENAI_IMAGENET_TEMPLATES).T
    own, of_method = tiny.encoder(prompts=("openai_imagenet",)), tiny.encoder()
    torch.testing.assert_close(own.text_embeddings(words), library, rtol=0, atol=1e-6)
    torch.testing.assert_close(of_method.text_embeddings(words, ("openai_imagenet",)), library, rtol=0, atol=1e-6)
    assert not torch.allclose(of_method.text_embeddings(words), library, atol=1e-3)
    prompts = of_method.exact_prompts(words, ("openai_imagenet", "my {}"))
    assert len(prompts) == 162 and prompts[:2] == ["a bad photo of a dog.", "a photo of many dog."]
    assert prompts[80] == "my dog" and prompts[161] == "my guitar"


def test_embeddings_do_not_depend_on_the_number_of_classes(tiny: Tiny) -> None:
    encoder = tiny.encoder()
    names = tuple(f"object number {word}" for word in "abcdefghijklmnopqrstuvwxyz")
    all_at_once = encoder.text_embeddings(names)
    one_by_one = torch.cat([encoder.text_embeddings((name,)) for name in names])
    torch.testing.assert_close(all_at_once, one_by_one, rtol=1e-5, atol=1e-6)


def test_braces_in_class_names_are_text(tiny: Tiny) -> None:
    assert tiny.encoder().exact_prompts(("{0} set",)) == ["a photo of a {0} set"]


def test_cut_prompts_are_reported(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        tiny.encoder().text_embeddings(("dog", " ".join(["very"] * 20) + " large dog"))
    assert "1 prompts are longer than 14 tokens" in caplog.text


@pytest.mark.parametrize("template", ["a photo", "a {} of a {}", "a photo of a {class_name}", "a {} of {x}"])
def test_templates_must_name_the_class_once(tiny: Tiny, template: str) -> None:
    with pytest.raises(UserError, match=r"encoder\.prompts: .* must hold \{\} once"):
        tiny.encoder(prompts=(template,))
    settings = components.settings_model(components.find("encoders", "open_clip"))
    with pytest.raises(ValidationError, match=r"must hold \{\} once"):
        settings(model="demo", weights="demo", prompts=[template])


def test_warnings_of_class_names() -> None:
    assert warn_of_class_names(("dog", "polar_bear", "ink")) == []
    numeric, short = warn_of_class_names(("0", "17", "3.5", "dog", "ab"))
    assert "0, 17, 3.5" in numeric and "numbers" in numeric
    assert "ab" in short and "dog" not in short
    assert "data.class_names" in numeric and "data.class_names" in short


@torch.no_grad()
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_local_files_in_half_precision(tiny: Tiny, images: Tensor, tmp_path: Path, suffix: str) -> None:
    state = {name: value.half() for name, value in tiny.state().items()}
    path = tmp_path / f"half.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save({"epoch": 1, "state_dict": state}, path)
    encoder = tiny.encoder(weights=str(path))
    assert next(encoder.parameters()).dtype == torch.float32
    model = copy.deepcopy(tiny.model)
    model.load_state_dict({name: value.float() for name, value in state.items()})
    assert torch.equal(encoder(images), model.encode_image(images))


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning")
def test_faulty_file(tiny: Tiny, faulty, fault: tuple[str, str], tmp_path: Path) -> None:
    name, wording = fault
    path = faulty(name, tiny.state())
    with pytest.raises(UserError, match=wording) as raised:
        tiny.encoder(weights=str(path))
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("change", "wording"),
    [
        (
            lambda s: {k: v for k, v in s.items() if "resblocks.1" not in k},
            r"lacks \d+ of the model's tensors \(visual",
        ),
        (lambda s: {**s, "extra.weight": torch.zeros(2)}, r"holds 1 that the model has not \(extra\.weight\)"),
        (lambda s: {**s, "text_projection": torch.zeros(16, 8)}, r"1 of another shape \(text_projection"),
    ],
)
def test_file_that_does_not_fit(tiny: Tiny, tmp_path: Path, change, wording: str) -> None:
    path = tmp_path / "other.safetensors"
    save_file(change(tiny.state()), path)
    with pytest.raises(UserError, match=wording) as raised:
        tiny.encoder(weights=str(path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "wording"),
    [
        (None, "the config file .* does not exist"),
        ("{", "is not valid JSON"),
        ('{"embed_dim": 8}', "lacks text_cfg, vision_cfg"),
        ("[1]", "lacks embed_dim"),
        ('{"model_cfg": {}}', "write model: local-dir:"),
    ],
)
def test_faulty_config(tiny: Tiny, tmp_path: Path, content: str | None, wording: str) -> None:
    path = tmp_path / "own.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=wording):
        tiny.encoder(model=str(path))


def test_own_config_must_not_replace_a_model_of_the_library(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "ViT-B-32.json").write_text(json.dumps(TINY))
    with pytest.raises(UserError, match='would replace open_clip\'s own "ViT-B-32"; rename'):
        tiny.encoder(model=str(tmp_path / "ViT-B-32.json"))
    assert open_clip.get_model_config("ViT-B-32")["embed_dim"] == 512


@pytest.mark.parametrize(
    ("keys", "wording"),
    [
        ({"model": "ViT-B-61", "weights": "openai"}, "did you mean ViT-B-16"),
        ({"model": "ViT-B-16", "weights": "opena"}, 'did you mean "openai"'),
        ({"model": "ViT-S-16", "weights": "openai"}, 'has no weights for "ViT-S-16"'),
        ({"model": "ViT-B/16-quickgelu", "weights": "openai"}, "hf download timm/vit_base_patch16_clip_224.openai"),
        ({"model": "ViT-B-16-quickgelu", "weights": "laion2b_s34b_b88k"}, 'they are those of "ViT-B-16"'),
        ({"model": "hf-hub:acme/none", "weights": "pretrained"}, "hf download acme/none"),
        ({"model": "hf-hub:acme/none", "weights": "openai"}, "write weights: pretrained"),
        ({"model": "ViT-B-16", "weights": "hf-hub:acme/none"}, "hf download acme/none"),
        ({"model": "demo", "weights": "openai"}, "write model: demo, weights: demo"),
        ({"kwargs": {"precision": "fp16"}}, "precision can not be set"),
        ({"kwargs": {"quick_gelo": True}}, "unexpected keyword argument 'quick_gelo'"),
        ({"kwargs": {"embed_dim": 32}}, "of another shape"),
        ({"weights": "openai"}, '"openai" is no file'),
        ({"preprocessing": PreprocessingOverrides(size=64)}, "does not take images of 64 px"),
    ],
)
def test_faults_of_the_recipe(tiny: Tiny, keys: dict[str, Any], wording: str, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(UserError, match=wording) as raised:
        tiny.encoder(**keys)
    assert "\n" not in str(raised.value)
    assert capfd.readouterr().err == ""  # open_clip also logs to the root logger
    assert logging.getLogger().filters == []


@pytest.mark.parametrize("tag", ["openai", "metaclip_400m", "dfn2b"])
def test_quickgelu_tags_need_a_quickgelu_model(tag: str) -> None:
    with pytest.raises(UserError, match=r"write encoder.model: ViT-B-16-quickgelu"):
        OpenClip(model="ViT-B-16", weights=tag)
    with pytest.raises(UserError, match="did not download"):
        OpenClip(model="ViT-B-16-quickgelu", weights=tag)
    with pytest.raises(UserError, match="did not download"):
        OpenClip(model="ViT-B-16", weights=tag, kwargs={"quick_gelu": True})


def test_every_known_pair_of_model_and_weights_passes_or_gets_the_name_of_the_right_model() -> None:
    pairs = open_clip.list_pretrained()
    assert len(pairs) > 100
    for model, tag in pairs:
        with pytest.raises(UserError) as raised:  # tests are offline
            OpenClip(model=model, weights=tag)
        wrong_activation = open_clip.get_pretrained_cfg(model, tag).get("quick_gelu") and "quickgelu" not in model
        expected = f"write encoder.model: {model}-quickgelu" if wrong_activation else "did not download"
        assert expected in str(raised.value), (model, tag)


@torch.no_grad()
def test_quickgelu_files_are_recognised_by_name(tiny: Tiny, images: Tensor, tmp_path: Path) -> None:
    cache = tmp_path / "models--timm--vit_base_patch16_clip_224.openai/snapshots/0"
    (tmp_path / "OpenAI").mkdir()
    cache.mkdir(parents=True)
    paths = (tmp_path / "my-openai-b16.safetensors", tmp_path / "OpenAI/b16.safetensors", cache / "model.safetensors")
    for path in paths:
        save_file(tiny.state(), path)
        with pytest.raises(UserError, match=r"trained with QuickGELU.*quick_gelu: true"):
            tiny.encoder(weights=str(path))
        with pytest.raises(UserError, match=r"write encoder.model: ViT-B-16-quickgelu"):
            OpenClip(model="ViT-B-16", weights=str(path))
    plain = tiny.encoder(weights=str(path), kwargs={"quick_gelu": False})
    assert torch.equal(plain(images), tiny.encoder()(images))
    quick = tiny.encoder(weights=str(path), kwargs={"quick_gelu": True})
    assert not torch.allclose(quick(images), plain(images), atol=1e-4)


def test_gelu_files_are_refused_by_a_quickgelu_model(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "ViT-B-16.laion2b_s34b_b88k.safetensors"
    save_file(tiny.state(), path)
    with pytest.raises(UserError, match=r"write encoder.model: ViT-B-16, or"):
        OpenClip(model="ViT-B-16-quickgelu", weights=str(path))


def test_files_whose_activation_is_not_known(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "best.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    with caplog.at_level(logging.WARNING, "xdm_ft"), pytest.raises(UserError, match="does not fit"):
        OpenClip(model="RN50", weights=str(path))
    assert "the activation that" in caplog.text and "is not known" in caplog.text and "RN50-quickgelu" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        tiny.encoder()  # this model does not exist with both activations
    assert caplog.text == ""


@torch.no_grad()
def test_hub_repository_and_folder(tiny: Tiny, hub, images: Tensor) -> None:
    config = {
        "model_cfg": TINY,
        "preprocess_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bilinear"},
    }
    files = {"open_clip_config.json": config, "open_clip_model.safetensors": tiny.state()}
    folder = hub("acme/clip", files)
    for model in ("hf-hub:acme/clip", f"local-dir:{folder}"):
        encoder = OpenClip(model=model, weights="pretrained")
        assert torch.equal(encoder(images), tiny.model.encode_image(images))
        assert (encoder.preprocessing.mean, encoder.preprocessing.size) == ((0.1, 0.2, 0.3), 32)
        assert encoder.text_embeddings(CLASSES).shape == (3, 24)
    with pytest.raises(UserError, match=r'is not a "ViT-B-16".*write model: hf-hub:acme/clip'):
        OpenClip(model="ViT-B-16", weights="hf-hub:acme/clip")


@torch.no_grad()
def test_timm_image_tower(tmp_path: Path, images: Tensor) -> None:
    vision = {"timm_model_name": "test_resnet", "timm_pool": "avg", "timm_proj": "linear", "image_size": 32}
    clip = Tiny(tmp_path, "tiny_timm_clip", vision_cfg=vision)
    encoder = clip.encoder()
    assert torch.equal(encoder(images), clip.model.encode_image(images))
    assert encoder.stage_names[0] == "model.visual.trunk.layer1"
    assert encoder.stem_names[-1] == "model.visual.trunk.maxpool"


@torch.no_grad()
def test_stages_run_in_the_order_of_their_names(tiny: Tiny, tmp_path: Path, images: Tensor) -> None:
    resnet = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None, "head_width": 16}
    for clip, stages in ((tiny, 2), (Tiny(tmp_path, "tiny_resnet_clip", vision_cfg=resnet), 6)):
        encoder = clip.encoder()
        order: list[str] = []
        expected = [*encoder.stem_names, *encoder.stage_names]
        for stage in expected:
            encoder.get_submodule(stage).register_forward_hook(lambda *_, stage=stage, order=order: order.append(stage))
        encoder(images)
        assert order == expected
        assert len(order) == stages


@pytest.mark.parametrize("shape", [(300, 200), (20, 45)])
@pytest.mark.parametrize("mode", ["shortest", "squash"])
def test_preprocessing_is_open_clips_own(tiny: Tiny, shape: tuple[int, int], mode: str, hub) -> None:
    cfg = PreprocessCfg(size=32, resize_mode=mode, interpolation="bicubic" if mode == "shortest" else "bilinear")
    config = {"model_cfg": TINY, "preprocess_cfg": {"resize_mode": mode, "interpolation": cfg.interpolation}}
    hub("acme/clip", {"open_clip_config.json": config, "open_clip_model.safetensors": tiny.state()})
    ours = evaluation_transform(OpenClip(model="hf-hub:acme/clip", weights="pretrained").preprocessing)
    theirs = image_transform_v2(cfg, is_train=False)
    assert torch.equal(ours(noise(*shape)), theirs(noise(*shape)))


def test_files_get_the_preprocessing_that_all_tags_share() -> None:
    from xdm_ft.encoders.open_clip import resolve

    siglip = resolve("ViT-B-16-SigLIP", "own.safetensors", {}).preprocess
    assert siglip["mean"] == (0.5, 0.5, 0.5) and siglip["resize_mode"] == "squash"
    assert resolve("ViT-B-16", "own-laion2b_s34b_b88k.safetensors", {}).preprocess["resize_mode"] == "shortest"


def test_identity_differs_where_features_do(tiny: Tiny) -> None:
    variants = [
        tiny.encoder(),
        tiny.encoder(normalize=True),
        tiny.encoder(kwargs={"quick_gelu": True}),
        tiny.encoder(preprocessing=PreprocessingOverrides(crop=0.9)),
    ]
    described = [json.dumps(encoder.identity(), sort_keys=True) for encoder in variants]
    assert len(set(described)) == len(variants)
    assert all(open_clip.__version__ in text and '"embed_dim": 24' in text for text in described)
    # prompts change text embeddings, not features
    assert tiny.encoder(prompts=ENSEMBLE).identity() == variants[0].identity()


def test_two_configs_of_the_same_name_are_two_models(tiny: Tiny, tmp_path: Path) -> None:
    other = Tiny(tmp_path, "tiny_clip", embed_dim=8)  # same stem as `tiny`, registered later
    assert tiny.encoder().width == 24
    assert other.encoder().width == 8
    assert tiny.encoder().identity() != other.encoder().identity()


def test_pretraining_names_the_corpus(tiny: Tiny) -> None:
    from xdm_ft.encoders.open_clip import resolve

    line = resolve("ViT-B-32", "laion2b_s34b_b79k", {}).pretraining
    assert line == (
        "weights ViT-B-32 laion2b_s34b_b79k, pre-trained on LAION-2B: unseen in fine-tuning, "
        "possibly seen in pre-training"
    )
    assert tiny.encoder().pretraining.startswith("weights from the file tiny_clip.safetensors")


def test_tokenizer_that_needs_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    clip = Tiny(tmp_path, "tiny_hf_text", text_cfg={**TINY["text_cfg"], "hf_tokenizer_name": "acme/words"})
    encoder = clip.encoder()  # features need no tokenizer
    with pytest.raises(UserError, match="pip install transformers"):
        encoder.text_embeddings(CLASSES)


def test_recipe_keys() -> None:
    settings = components.settings_model(components.find("encoders", "open_clip"))
    keys = {"model", "weights", "kwargs", "preprocessing", "normalize", "prompts", "pooling"}
    assert set(settings.model_fields) == keys
    block = settings(model="ViT-B-16", weights="openai")
    assert block.prompts == ("a photo of a {}",)  # type: ignore[attr-defined]
    assert all(field.description for field in settings.model_fields.values())
