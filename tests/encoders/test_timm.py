"""The timm encoder: features, all sources of weights, preprocessing, and one line for every fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from xdm_ft.encoders.timm import Timm
from xdm_ft.images.transforms import PreprocessingOverrides, evaluation_transform
from xdm_ft.recipe import components
from xdm_ft.runtime.errors import UserError

MOBILENET = {"bn_eps": 1e-3, "pad_type": "same"}
HALF = PreprocessingOverrides(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop=1.0)


def images(size: int, n: int = 2) -> Tensor:
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(0))


def reference(classes: int = 7, name: str = "test_resnet") -> torch.nn.Module:
    """A model with a head and with batch-norm statistics that differ from the initial ones."""
    torch.manual_seed(1)
    model = timm.create_model(name, num_classes=classes)
    model.train()
    model(images(64, 8))
    return model.eval()


def pooled(model: torch.nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.forward_features(x).mean(dim=(2, 3))


def features(encoder: Timm, x: Tensor) -> Tensor:
    with torch.no_grad():
        return encoder(x)


# mobilenetv3 and vgg have a layer between pooling and head: their features are wider than `num_features`
@pytest.mark.parametrize(
    ("name", "size", "width"),
    [
        ("test_resnet", 64, 96),
        ("test_efficientnet", 64, 256),
        ("mobilenetv3_small_050", 64, 1024),
        ("convnext_atto", 64, 320),
        ("test_vit", 160, 64),
        ("densenet121", 64, 1024),
        ("levit_128s", 224, 384),
    ],
)
def test_features_are_the_input_of_the_head(name: str, size: int, width: int) -> None:
    encoder = Timm(model=name, preprocessing=PreprocessingOverrides(size=size))
    assert encoder.width == width
    assert not encoder.training
    z = features(encoder, images(size))
    assert z.shape == (2, width)
    assert z.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(z, encoder.model(images(size)))  # without a head a timm model returns its features
    assert encoder.stage_names
    for stage in encoder.stage_names:
        assert isinstance(encoder.get_submodule(stage), torch.nn.Module)


def test_cnn_features_are_the_spatial_mean() -> None:
    encoder = Timm(model="test_resnet")
    z = features(encoder, images(160))
    torch.testing.assert_close(z, pooled(encoder.model, images(160)), rtol=1e-5, atol=1e-6)


def test_stages_run_in_the_order_of_their_names() -> None:
    for name, size in (("test_resnet", 64), ("test_vit", 160), ("densenet121", 64)):
        encoder = Timm(model=name, preprocessing=PreprocessingOverrides(size=size))
        order: list[str] = []
        stem, stages, transitions = encoder.stem_names, encoder.stage_names, encoder.transition_names
        assert len(transitions) in (0, len(stages) - 1)
        between = [name for pair in zip(stages, (*transitions, ""), strict=False) for name in pair if name]
        expected = [*stem, *(between if transitions else stages)]
        for stage in expected:
            encoder.get_submodule(stage).register_forward_hook(lambda *_, stage=stage, order=order: order.append(stage))
        features(encoder, images(size))
        assert order == expected


def test_random_weights_follow_torch_seed() -> None:
    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return features(Timm(model="test_resnet"), images(160))

    assert torch.equal(drawn(3), drawn(3))
    assert not torch.equal(drawn(3), drawn(4))


def test_normalize_changes_the_length_only() -> None:
    torch.manual_seed(0)
    plain = Timm(model="test_vit")
    torch.manual_seed(0)
    z = features(Timm(model="test_vit", normalize=True), images(160))
    torch.testing.assert_close(z.norm(dim=1), torch.ones(2))
    cosine = torch.nn.functional.cosine_similarity(z, features(plain, images(160)))
    torch.testing.assert_close(cosine, torch.ones(2))


def test_bfloat16_takes_and_gives_float32() -> None:
    encoder = Timm(model="test_vit")
    z = features(encoder, images(160))
    low = features(encoder.to(torch.bfloat16), images(160))
    assert low.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(z, low).min() > 0.99


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("classes", [0, 7, 1000])
def test_local_file_in_half_precision(tmp_path: Path, suffix: str, classes: int) -> None:
    model = reference(classes)
    state = {name: value.half() if value.is_floating_point() else value for name, value in model.state_dict().items()}
    path = tmp_path / f"own.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    encoder = Timm(model="test_resnet", weights=str(path))
    assert next(encoder.parameters()).dtype == torch.float32
    model.load_state_dict({name: value.float() for name, value in state.items()})
    torch.testing.assert_close(features(encoder, images(64)), pooled(model, images(64)), rtol=1e-5, atol=1e-6)
    assert "own." in encoder.pretraining


def test_training_checkpoints_are_unwrapped(tmp_path: Path) -> None:
    model = reference()
    wrapped = {"epoch": 3, "state_dict": {f"module.{name}": value for name, value in model.state_dict().items()}}
    torch.save(wrapped, tmp_path / "last.pth.tar")
    encoder = Timm(model="test_resnet", weights=str(tmp_path / "last.pth.tar"))
    torch.testing.assert_close(features(encoder, images(64)), pooled(model, images(64)), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning")
def test_faulty_file(faulty, fault: tuple[str, str], tmp_path: Path) -> None:
    name, wording = fault
    path = faulty(name, reference().state_dict())
    with pytest.raises(UserError, match=wording) as raised:
        Timm(model="test_resnet", weights=str(path))
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("change", "wording"),
    [
        (
            lambda s: {k: v for k, v in s.items() if not k.startswith("layer4")},
            r"lacks \d+ of the model's tensors \(layer4\.",
        ),
        (lambda s: {**s, "extra.weight": torch.zeros(2)}, r"holds 1 that the model has not \(extra\.weight\)"),
        (lambda s: {**s, "layer1.0.conv1.weight": torch.zeros(2, 2)}, r"1 of another shape \(layer1\.0\.conv1\.weight"),
        (lambda s: {f"backbone.{k}": v for k, v in s.items()}, r"lacks \d+ of the model's tensors"),
    ],
)
def test_file_that_does_not_fit(tmp_path: Path, change, wording: str) -> None:
    path = tmp_path / "other.safetensors"
    save_file(change(reference().state_dict()), path)
    with pytest.raises(UserError, match=wording) as raised:
        Timm(model="test_resnet", weights=str(path))
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("keys", "wording"),
    [
        ({"model": "resnet81"}, 'no model "resnet81"; did you mean resnet18'),
        ({"model": "resnet18.tv_in1k"}, "write weights: pretrained, or model: resnet18"),
        ({"model": "resnet18", "weights": "tv_in1"}, 'did you mean "tv_in1k"'),
        ({"model": "resnet18.tv_in1k", "weights": "a1_in1k"}, "keep one of them"),
        ({"model": "test_resnet.no_such"}, 'no weights "no_such"'),
        ({"model": "vit_base_patch16_xp_224", "weights": "pretrained"}, "has no pretrained weights"),
        ({"model": "resnet18", "weights": "tv_in1k"}, 'hf download timm/resnet18.tv_in1k".*HF_HUB_OFFLINE=1'),
        ({"model": "resnet18", "weights": "pretrained"}, "resnet18.a1_in1k is not on this machine"),
        ({"model": "hf-hub:acme/none", "weights": "pretrained"}, "hf download acme/none"),
        ({"model": "hf-hub:acme/none"}, "write weights: pretrained"),
        ({"model": "test_resnet", "weights": "hf-hub:acme/none"}, "hf download acme/none"),
        ({"model": "test_resnet", "kwargs": {"num_classes": 3}}, "encoder.kwargs: num_classes can not be set"),
        ({"model": "test_resnet", "kwargs": {"bn_epz": 1}}, "encoder.kwargs: .*unexpected keyword argument 'bn_epz'"),
        ({"model": "test_resnet", "kwargs": {"global_pool": ""}}, r"instead of \[batch, K\]"),
        (
            {"model": "vit_tiny_patch16_224", "preprocessing": PreprocessingOverrides(size=64)},
            "does not take images of 64 px",
        ),
    ],
)
def test_faults_of_the_recipe(keys: dict[str, object], wording: str) -> None:
    with pytest.raises(UserError, match=wording) as raised:
        Timm(**keys)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_wrong_kwargs_are_not_reported_as_a_fault_of_the_file(tmp_path: Path) -> None:
    save_file(reference().state_dict(), tmp_path / "good.safetensors")
    with pytest.raises(UserError, match=r"encoder.kwargs"):
        Timm(model="test_resnet", weights=str(tmp_path / "good.safetensors"), kwargs={"bn_epz": 1})


def test_tag_from_the_hub_cache(hub) -> None:
    model = reference(1000)
    hub("timm/test_resnet.r160_in1k", {"model.safetensors": model.state_dict()})
    for keys in (
        {"model": "test_resnet", "weights": "pretrained"},
        {"model": "test_resnet", "weights": "r160_in1k"},
        {"model": "test_resnet.r160_in1k", "weights": "pretrained"},
    ):
        encoder = Timm(**keys)
        torch.testing.assert_close(features(encoder, images(64)), pooled(model, images(64)), rtol=1e-5, atol=1e-6)
        assert encoder.pretraining == "weights test_resnet.r160_in1k, pre-trained on ImageNet-1k"


def test_any_hub_repository(hub) -> None:
    model = reference(7)
    config = {
        "architecture": "test_resnet",
        "num_classes": 7,
        "pretrained_cfg": {
            "input_size": [3, 48, 48], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.9,
            "interpolation": "bilinear", "num_classes": 7, "classifier": "fc", "first_conv": "conv1.0",
        },
    }  # fmt: skip
    hub("acme/own", {"config.json": config, "model.safetensors": model.state_dict()})
    for keys in (
        {"model": "hf-hub:acme/own", "weights": "pretrained"},
        {"model": "test_resnet", "weights": "hf-hub:acme/own"},
    ):
        encoder = Timm(**keys)
        torch.testing.assert_close(features(encoder, images(64)), pooled(model, images(64)), rtol=1e-5, atol=1e-6)
        assert (encoder.preprocessing.size, encoder.preprocessing.mean) == (48, (0.1, 0.2, 0.3))
    with pytest.raises(UserError, match=r"is a test_resnet, not a resnet18; set encoder\.model to test_resnet"):
        Timm(model="resnet18", weights="hf-hub:acme/own")


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "resnet10t"])
def test_preprocessing_is_timms_own(name: str) -> None:
    config = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    theirs = timm.data.create_transform(**config)
    image = Image.effect_noise((300, 200), 80).convert("RGB")
    ours = evaluation_transform(Timm(model=name).preprocessing)
    assert torch.equal(ours(image), theirs(image))


def test_preprocessing_follows_overrides_and_image_size() -> None:
    encoder = Timm(model="test_vit", kwargs={"img_size": 64}, preprocessing=HALF)
    assert encoder.preprocessing.size == 64
    assert encoder.preprocessing.mean == (0.5, 0.5, 0.5)
    assert encoder.preprocessing.crop == 1.0


def test_identity_differs_where_features_do() -> None:
    variants = [
        Timm(model="test_resnet"),
        Timm(model="test_resnet", normalize=True),
        Timm(model="test_resnet", preprocessing=PreprocessingOverrides(size=64)),
        Timm(model="test_resnet", kwargs={"output_stride": 16}),
        Timm(model="test_efficientnet"),
    ]
    described = {json.dumps(encoder.identity(), sort_keys=True) for encoder in variants}
    assert len(described) == len(variants)
    assert timm.__version__ in described.pop()


def test_recipe_keys() -> None:
    settings = components.settings_model(components.find("encoders", "timm"))
    block = settings(model="resnet18", kwargs={"bn_eps": 0.001}, preprocessing={"size": 32})
    assert set(settings.model_fields) == {"model", "weights", "kwargs", "preprocessing", "normalize", "pooling"}
    assert block.weights is None  # type: ignore[attr-defined]
    assert block.preprocessing.size == 32  # type: ignore[attr-defined]
    assert all(field.description for field in settings.model_fields.values())


def test_real_weights_recognise_dogs(shared: Path) -> None:
    path = shared / "weights/mobilenetv2_100.keras_in1k_int8deq.fp16.safetensors"
    encoder = Timm(model="mobilenetv2_100", weights=str(path), kwargs=MOBILENET, preprocessing=HALF)
    assert encoder.width == 1280
    head = load_file(path)
    transform = evaluation_transform(encoder.preprocessing)
    photos = sorted((shared / "pacs/photo/dog").iterdir())[:12]
    z = features(encoder, torch.stack([transform(Image.open(photo).convert("RGB")) for photo in photos]))
    classes = (z @ head["classifier.weight"].float().T + head["classifier.bias"].float()).argmax(1)
    assert ((classes >= 151) & (classes <= 268)).sum() >= 9  # ImageNet's breeds of dogs


def test_real_weights_without_a_head(shared: Path) -> None:
    path = shared / "weights/mobilenetv2_035.tm_in1k_features.fp16.safetensors"
    encoder = Timm(model="mobilenetv2_035", weights=str(path), kwargs=MOBILENET)
    loaded = encoder.model.state_dict()
    assert all(torch.equal(loaded[name], value.to(loaded[name].dtype)) for name, value in load_file(path).items())


def test_incomplete_real_weights_are_refused(shared: Path) -> None:
    path = shared / "weights/resnet18.tv_in1k_upto_layer3.fp16.safetensors"
    with pytest.raises(UserError, match=r'does not fit "resnet18": lacks \d+ of the model.s tensors \(layer4'):
        Timm(model="resnet18", weights=str(path))
