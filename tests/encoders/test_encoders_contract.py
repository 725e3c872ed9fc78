"""The contract of encoders: every family computes its library's features, from any source of weights, and refuses the
same faults in one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import open_clip
import pytest
import timm
import tiny_transformers
import torch
import transformers
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models import NAMES, TINY, Family, images, tiny_clip, tiny_resnet
from torch import Tensor

from xdm_ft.encoders import LibraryEncoder, TextEncoder
from xdm_ft.encoders.open_clip import OpenClip
from xdm_ft.encoders.timm import Timm, _current_name, _resolve
from xdm_ft.encoders.transformers import Transformers
from xdm_ft.features.extract import frozen_copy
from xdm_ft.features.key import weights_digest
from xdm_ft.image_files import remote
from xdm_ft.images.transforms import PreprocessingOverrides, evaluation_transform
from xdm_ft.recipe import components
from xdm_ft.runtime.errors import UserError

CLASSES = {"timm": Timm, "open_clip": OpenClip, "transformers": Transformers}
SIZED = PreprocessingOverrides(size=64)


def features(encoder: LibraryEncoder, size: int = 32) -> Tensor:
    with torch.no_grad():
        return encoder(images(size))


@torch.no_grad()
def test_features_are_the_librarys(family: Family) -> None:
    encoder, expected = family.encoder(), family.features(images())
    z = encoder(images())
    torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-6)
    assert z.dtype == torch.float32 and z.shape[1] == encoder.width
    assert not any(module.training for module in encoder.modules())
    unit = family.encoder(normalize=True)(images())
    torch.testing.assert_close(unit, expected / expected.norm(dim=1, keepdim=True))
    low = encoder.to(torch.bfloat16)(images())
    assert low.dtype == torch.float32 and torch.nn.functional.cosine_similarity(low, expected).min() > 0.99


def test_only_the_image_side_trains(family: Family) -> None:
    encoder = family.encoder()
    encoder(images()).square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.requires_grad == (not family.has_text or name.startswith("model.vis")), name
        if family.has_text:
            assert (parameter.grad is not None) == parameter.requires_grad, name
    assert isinstance(encoder, TextEncoder) == (family.component != "timm")
    assert not isinstance(encoder, TextEncoder) or bool(encoder.text_reason) != family.has_text


def test_identity_differs_where_features_do(family: Family) -> None:
    kwargs: dict[str, Any] = {
        "timm": {"output_stride": 16}, "open_clip": {"quick_gelu": True}, "transformers": {"hidden_act": "relu"},
    }[family.component]  # fmt: skip
    if family.component == "transformers" and family.has_text:
        kwargs = {"vision_config": kwargs}
    changes: list[dict[str, Any]] = [
        {}, {"normalize": True}, {"kwargs": kwargs}, {"preprocessing": PreprocessingOverrides(size=32, crop=0.5)},
    ]  # fmt: skip
    if family.component != "timm":  # it has no tokens
        changes.append({"pooling": "mean"})
    identities = [family.encoder(**change).identity() for change in changes]
    assert len({json.dumps(identity, sort_keys=True) for identity in identities}) == len(changes)
    assert "pooling" not in identities[0], "the keys of features that are cached already stay valid"
    library = {"timm": timm, "open_clip": open_clip, "transformers": transformers}[family.component]
    assert library.__version__ in json.dumps(identities[0]) and identities[0]["component"] == family.component
    if family.component != "timm":  # they change text embeddings, not features
        assert family.encoder(prompts=("{}",)).identity() == identities[0]
    for encoder, own in ((family.encoder(**change), change) for change in changes):
        texts = {json.dumps(identity) for identity in identities if not encoder.differences(identity)}
        assert texts == {json.dumps(encoder.identity())}, own  # no other text means this encoder


def test_portable_builds_the_same_encoder_elsewhere(family: Family, tmp_path: Path) -> None:
    encoder = family.encoder()
    settings, state, files = encoder.portable()
    assert not any(name in json.dumps([settings, files]) for name in family.source if "/" in name)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "encoder.safetensors")
    model = str(tmp_path / settings["model"]) if settings["model"] in files else settings["model"]
    again = CLASSES[family.component](
        model=model,
        kwargs=settings["kwargs"],
        weights=str(tmp_path / "encoder.safetensors"),
        preprocessing=PreprocessingOverrides(**encoder.preprocessing.model_dump()),
    )
    assert weights_digest(again) == weights_digest(encoder) and torch.equal(features(again), features(encoder))
    text = json.loads(json.dumps(encoder.identity()))
    assert again.differences(text) == encoder.differences(text) == [], "the run's words for the same encoder"
    assert again.differences({**text, "normalize": 0, "pooling": "cls"}) == ["normalize", "pooling"]
    for value in (None, [], "relu", {"hidden_act": "relu"}):
        assert again.differences({**text, "kwargs": value, "config": value})
    if family.component == "transformers":  # the library itself reads both
        library = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**files[settings["model"]]))
        library.load_state_dict(state)
        assert again.identity()["config"] == encoder.identity()["config"] and again.text_reason


def test_recipe_keys() -> None:
    keys = {"model", "weights", "kwargs", "preprocessing", "normalize", "pooling"}
    for name in CLASSES:
        fields = components.settings_model(components.find("encoders", name)).model_fields
        assert set(fields) == keys | (set() if name == "timm" else {"prompts"})
        assert all(field.description for field in fields.values())


# mobilenetv3 has a layer between pooling and head: its features are wider than `num_features`
@pytest.mark.parametrize(
    ("name", "size", "width"),
    [
        ("test_resnet", 64, 96), ("test_efficientnet", 64, 256), ("mobilenetv3_small_050", 64, 1024),
        ("convnext_atto", 64, 320), ("test_vit", 160, 64), ("densenet121", 64, 1024), ("levit_128s", 224, 384),
    ],
)  # fmt: skip
def test_features_of_timm_are_the_input_of_the_head(name: str, size: int, width: int) -> None:
    encoder = Timm(model=name, preprocessing=PreprocessingOverrides(size=size))
    with torch.no_grad():  # without a head a timm model returns its features
        assert torch.equal(encoder(images(size)), encoder.model(images(size)))
    assert encoder.width == width


RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None, "head_width": 16}
TRUNK = {"timm_model_name": "test_resnet", "timm_pool": "avg", "timm_proj": "linear", "image_size": 32}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("test_resnet", 6),
        ("test_vit", 7),
        ("densenet121", 9),
        ("resnet clip", 6),
        ("trunk clip", 6),
        *zip(NAMES[1:], (2, 3, 3, 3, 3), strict=True),
    ],
)
def test_stages_run_in_the_order_of_their_names(
    name: str, count: int, families: dict[str, Family], tmp_path: Path
) -> None:
    encoder: LibraryEncoder
    if name in families:
        encoder = families[name].encoder()
    elif name.endswith("clip"):
        vision = RESNET if name.startswith("resnet") else TRUNK
        clip = tiny_clip(tmp_path, name.replace(" ", "_"), vision_cfg=vision)
        encoder = clip.encoder()
        assert torch.equal(features(encoder), clip.features(images()))
    else:
        encoder = Timm(model=name, preprocessing=PreprocessingOverrides(size=160 if name == "test_vit" else 64))
    stages, transitions = encoder.stage_names, encoder.transition_names
    between = [name for pair in zip(stages, (*transitions, ""), strict=False) for name in pair if name]
    expected, order = [*encoder.stem_names, *(between if transitions else stages)], list[str]()
    for stage in expected:
        encoder.get_submodule(stage).register_forward_hook(lambda *_, stage=stage: order.append(stage))
    features(encoder, encoder.preprocessing.size)
    assert order == expected and len(order) == count


def test_random_weights_follow_torch_seed() -> None:
    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return features(Timm(model="test_resnet"), 160)

    assert torch.equal(drawn(3), drawn(3)) and not torch.equal(drawn(3), drawn(4))


@pytest.mark.parametrize("classes", [0, 7])
@pytest.mark.parametrize("written", ["half.safetensors", "half.pth", "last.pth.tar"])
def test_files_of_timm(tmp_path: Path, written: str, classes: int) -> None:
    """In half precision, with and without a head; a training's checkpoint is unwrapped."""
    own, path = tiny_resnet(tmp_path, classes), tmp_path / written
    state = {name: value.half() if value.is_floating_point() else value for name, value in own.state.items()}
    wrapped = {"epoch": 3, "state_dict": {f"module.{name}": value for name, value in state.items()}}
    save_file(state, path) if written.endswith("safetensors") else torch.save(
        wrapped if "last" in written else state, path
    )
    encoder = own.encoder(weights=str(path))
    own.model.load_state_dict({name: value.float() for name, value in state.items()})
    torch.testing.assert_close(features(encoder), own.features(images()), rtol=1e-5, atol=1e-6)
    assert next(encoder.parameters()).dtype == torch.float32
    assert encoder.pretraining == f"weights from the file {written}"


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_files_of_open_clip(families: dict[str, Family], tmp_path: Path, suffix: str) -> None:
    own, path = families["open_clip"], tmp_path / f"half.{suffix}"
    state = {name: value.half() for name, value in own.state.items()}
    save_file(state, path) if suffix == "safetensors" else torch.save({"epoch": 1, "state_dict": state}, path)
    encoder, exact = own.encoder(weights=str(path)), own.encoder()
    exact.model.load_state_dict({name: value.float() for name, value in state.items()})
    assert next(encoder.parameters()).dtype == torch.float32 and torch.equal(features(encoder), features(exact))
    assert encoder.pretraining.startswith(f"weights from the file half.{suffix}: unseen in fine-tuning")


def test_timm_from_the_hub_cache(hub, tmp_path: Path) -> None:
    own = tiny_resnet(tmp_path, 1000)
    hub("timm/test_resnet.r160_in1k", {"model.safetensors": own.state})
    for model, weights in (
        ("test_resnet", "pretrained"), ("test_resnet", "r160_in1k"), ("test_resnet.r160_in1k", "pretrained"),
    ):  # fmt: skip
        encoder = own.encoder(model=model, weights=weights)
        torch.testing.assert_close(features(encoder), own.features(images()), rtol=1e-5, atol=1e-6)
        assert encoder.pretraining == "weights test_resnet.r160_in1k, pre-trained on ImageNet-1k"
    config = {
        "input_size": [3, 48, 48], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.9,
        "interpolation": "bilinear", "num_classes": 1000, "classifier": "fc", "first_conv": "conv1.0",
    }  # fmt: skip
    files = {"architecture": "test_resnet", "num_classes": 1000, "pretrained_cfg": config}
    hub("acme/own", {"config.json": files, "model.safetensors": own.state})
    for model, weights in (("hf-hub:acme/own", "pretrained"), ("test_resnet", "hf-hub:acme/own")):
        other = Timm(model=model, weights=weights)
        torch.testing.assert_close(features(other), own.features(images()), rtol=1e-5, atol=1e-6)
        assert (other.preprocessing.size, other.preprocessing.mean) == (48, (0.1, 0.2, 0.3))
        preprocessing = PreprocessingOverrides(**other.preprocessing.model_dump())
        save_file(other.portable().state, tmp_path / "own.safetensors")
        settings = {**other.portable().settings, "weights": str(tmp_path / "own.safetensors")}
        again = Timm(**settings, preprocessing=preprocessing)
        text = other.identity()
        assert text["model"] == "hf-hub:acme/own" and again.differences(text) == []
        # a repository that is not in the cache may be any model
        for name in ("hf-hub:acme/other", "hf-hub:a b/c", "hf-hub:acme/own@1"):
            assert again.differences({**text, "model": name}) == ["model"]
    with pytest.raises(UserError, match=r"is a test_resnet, not a resnet18; set encoder\.model to test_resnet"):
        Timm(model="resnet18", weights="hf-hub:acme/own")


def test_open_clip_from_a_hub_repository_and_a_folder(families: dict[str, Family], hub) -> None:
    preprocess = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bilinear"}
    config = {"model_cfg": TINY, "preprocess_cfg": preprocess}
    own = families["open_clip"]
    folder = hub("acme/clip", {"open_clip_config.json": config, "open_clip_model.safetensors": own.state})
    for model in ("hf-hub:acme/clip", f"local-dir:{folder}"):
        encoder = OpenClip(model=model, weights="pretrained")
        assert torch.equal(features(encoder), own.features(images()))
        assert (encoder.preprocessing.mean, encoder.preprocessing.size) == ((0.1, 0.2, 0.3), 32)
        assert encoder.text_embeddings(("dog",)).shape == (1, 24)
    with pytest.raises(UserError, match=r'is not a "ViT-B-16".*write model: hf-hub:acme/clip'):
        OpenClip(model="ViT-B-16", weights="hf-hub:acme/clip")


def test_transformers_from_the_hub_cache_and_from_a_file(families: dict[str, Family], hub, tmp_path: Path) -> None:
    own = families["dinov2"]
    folder = Path(own.source[0].removeprefix("local-dir:"))
    read = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    hub("acme/own", {**read, "model.safetensors": load_file(folder / "model.safetensors")})
    for written in ("acme/own", "hf-hub:acme/own"):
        encoder = Transformers(model=written)
        assert torch.equal(features(encoder), own.features(images()))
        assert encoder.identity()["model"] == "acme/own" and encoder.pretraining.startswith("weights acme/own, ")
    torch.save(own.model.state_dict(), tmp_path / "own.pth")
    encoder = Transformers(model="acme/own", weights=str(tmp_path / "own.pth"))
    assert torch.equal(features(encoder), own.features(images())) and "the file own.pth" in encoder.pretraining


class Server:
    """A hub that accepts connections and, unless it `answers`, never says anything."""

    def __init__(self, answers: str = "") -> None:
        self.socket, self.answers = socket.create_server(("127.0.0.1", 0)), answers
        self.requests, self.asked = list[bytes](), threading.Event()
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        kept = []  # a connection that is closed would be an answer
        while True:
            connection, _ = self.socket.accept()
            kept.append(connection)
            self.requests.append(connection.recv(1 << 16))
            self.asked.set()
            if self.answers:
                connection.sendall(f"HTTP/1.1 {self.answers}\r\nContent-Length: 0\r\n\r\n".encode())


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A machine on which HF_HUB_OFFLINE is not set, and no server answers."""
    server = Server()
    monkeypatch.setattr(remote, "_NO_ANSWER", {})
    monkeypatch.setattr(remote, "SECONDS_TO_ANSWER", 0.1)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return server


WITHOUT = {
    "a tag": (OpenClip, {"model": "ViT-B-16-SigLIP", "weights": "webli"}, "timm/ViT-B-16-SigLIP"),
    "a repository": (OpenClip, {"model": "hf-hub:acme/own", "weights": "pretrained"}, "acme/own"),
    "timm": (Timm, {"model": "test_resnet", "weights": "pretrained"}, "timm/test_resnet.r160_in1k"),
    "timm's repository": (Timm, {"model": "hf-hub:acme/own", "weights": "pretrained"}, "acme/own"),
    "transformers": (Transformers, {"model": "acme/own"}, "acme/own"),
}


@pytest.mark.parametrize("case", WITHOUT)
def test_without_a_network_the_hub_is_asked_once(case: str, no_network: Server, capfd, caplog) -> None:
    component, settings, repository = WITHOUT[case]
    for _ in range(2):
        with pytest.raises(UserError, match=rf'127\.0\.0\.1:\d+: no answer.*"hf download {repository}"') as error:
            component(**settings)
        assert all(way in str(error.value) for way in ("HF_HOME", "HF_HUB_OFFLINE=1", "to a file"))
    assert no_network.asked.wait(60) and len(no_network.requests) == 1
    assert not caplog.records and capfd.readouterr() == ("", "")
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_without_a_network_the_cache_and_files_are_read(no_network: Server, hub, tmp_path: Path) -> None:
    own = tiny_resnet(tmp_path, 1000)
    own.encoder()  # from a file: nobody is asked
    assert not no_network.requests
    hub("timm/test_resnet.r160_in1k", {"model.safetensors": own.state})
    torch.testing.assert_close(features(own.encoder(weights="pretrained")), features(own.encoder()))
    assert no_network.asked.wait(60) and len(no_network.requests) == 1


@pytest.mark.parametrize(("answers", "is_there"), [("200 OK", True), ("404 Not Found", True), ("503 Busy", False)])
def test_a_hub_that_answers_may_take_its_time_for_files(answers: str, is_there: bool, no_network, monkeypatch) -> None:
    server = Server(answers)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    monkeypatch.setattr(remote, "SECONDS_TO_ANSWER", 5.0)
    limits = huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
    with remote.hub():
        assert is_there != huggingface_hub.constants.HF_HUB_OFFLINE
        assert limits == huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
    assert remote.known_answer("") == ("" if is_there else f"{server.address[7:]}: status 503")


def test_weights_at_an_address(no_network: Server, tmp_path: Path, monkeypatch) -> None:
    """Some of timm's are at addresses of other servers, whose files are in the cache of torch."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    address = f"{no_network.address}/gcvit_xxtiny.pth"
    config = dataclasses.replace(timm.get_pretrained_cfg("gcvit_xxtiny"), url=address, hf_hub_id=None)
    monkeypatch.setitem(timm.models._registry._model_pretrained_cfgs, "gcvit_xxtiny.in1k", config)
    with pytest.raises(UserError, match=rf"no answer within 0\.1 s\); download {address} on a machine with a network"):
        Timm(model="gcvit_xxtiny", weights="pretrained")
    assert no_network.asked.wait(60) and len(no_network.requests) == 1
    assert no_network.requests[0].startswith(b"HEAD /gcvit_xxtiny.pth")


class Bomb:
    """Creates a folder if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def faulty(fault: str, state: dict[str, Tensor], folder: Path) -> Path:
    """Writes a weights file with this fault, made of a correct state dict."""
    path = folder / f"{fault}.{'safetensors' if 'safetensors' in fault else 'pth'}"
    if fault == "folder":
        path.mkdir()
    elif fault == "truncated_safetensors":
        save_file(state, path)
        path.write_bytes(path.read_bytes()[:-100])
    elif fault == "truncated":
        torch.save(state, path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif fault.startswith("garbage"):
        path.write_bytes(b"<html>404 not found</html>" * 20)
    elif fault == "code":
        torch.save({**state, "bomb": Bomb(folder / "exploded")}, path)
    elif fault == "torchscript":
        torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)).save(path)
    elif fault in ("nan", "inf"):
        first = next(name for name, value in state.items() if value.is_floating_point() and value.ndim)
        torch.save(
            {**state, first: state[first] * float("nan") if fault == "nan" else (state[first] + 1e6).half()}, path
        )
    elif fault == "twice":
        torch.save({"student": state, "teacher": {f"backbone.{name}": value for name, value in state.items()}}, path)
    elif fault == "no_tensors":
        torch.save({"epoch": 3}, path)
    return path


FAULTS = {
    "missing": "does not exist; give the path of a .safetensors or .pth file",
    "folder": "is a folder",
    "truncated_safetensors": "is damaged or has another format",
    "truncated": "is damaged or has another format",
    "garbage": "is damaged or has another format",
    "garbage_safetensors": "is damaged or has another format",
    "code": "holds pickled code .*never run",
    "torchscript": "TorchScript archive, which is code",
    "no_tensors": "holds no tensors",
    "nan": r"holds NaN or infinity in 1 tensor \(",
    "inf": r"holds NaN or infinity in 1 tensor \(.*too large for float16",
    "twice": r"holds the model 2 times \(student, teacher\.backbone\); save the tensors of one of them",
}


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "fault"),
    [*(("timm", fault) for fault in FAULTS), ("open_clip", "code"), ("vit", "truncated"), ("vit", "nan")],
)
def test_faulty_file(families: dict[str, Family], name: str, fault: str, tmp_path: Path) -> None:
    path = faulty(fault, families[name].state, tmp_path)
    with pytest.raises(UserError, match=FAULTS[fault]) as raised:
        families[name].encoder(weights=str(path))
    assert str(raised.value).startswith(f"encoder.weights: {path} ") and "\n" not in str(raised.value)
    assert not (tmp_path / "exploded").exists()


def without(*parts: str) -> Any:
    return lambda state: {name: value for name, value in state.items() if not any(part in name for part in parts)}


@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        *(("timm", wrapped) for wrapped in ("model.", "module.encoder_q.", "state_dict", "model/encoder.")),
        ("open_clip", "model."), ("vit", "model/encoder."),
    ],
)  # fmt: skip
def test_file_of_a_training(families: dict[str, Family], name: str, wrapped: str, tmp_path: Path) -> None:
    """The model has a prefix, or is a part of the file, beside what is no weight: no code for that is run."""
    own, path = families[name], tmp_path / "checkpoint.pth"
    block, _, prefix = wrapped.rpartition("/") if "/" in wrapped or "." in wrapped else (wrapped, "", "")
    state: dict[str, Any] = {f"{prefix}{key}": value for key, value in own.state.items()}
    state |= {"queue": torch.zeros(3), f"{prefix}projection.0.weight": torch.zeros(2, 2)}
    if "encoder_q" in prefix:
        state |= {key.replace("encoder_q", "encoder_k"): value + 1 for key, value in state.items()}
    besides = {
        "best": np.float64(0.5), "accuracies": np.arange(3), "args": argparse.Namespace(lr=0.1), "epoch": 3,
        "loss": torch.tensor(float("inf")), "optimizer": {"state": {0: {"mean": torch.zeros(2)}}},
    }  # fmt: skip
    torch.save({block: state, **besides} if block else state | besides, path)
    encoder = own.encoder(weights=str(path))
    exact = {key: value for key, value in encoder.model.state_dict().items() if value.ndim}
    assert exact and all(torch.equal(value, own.state[key].to(value.dtype)) for key, value in exact.items())


def test_every_name_that_timm_has_changed(caplog) -> None:
    table = timm.models.get_deprecated_models()
    assert len(table) > 200
    for old, new in table.items():
        caplog.clear()
        if new is None:
            with pytest.raises(UserError, match=f'timm .* has removed "{old}"; choose another model'):
                _current_name(old, "pretrained")
            continue
        current, _, tag = new.partition(".")
        assert _resolve(_current_name(old, None), None) == (current, None)
        named, _ = _resolve(_current_name(old, "pretrained"), "pretrained")
        from_file, _ = _resolve(_current_name(old, "own.pth"), "own.pth")
        assert timm.get_pretrained_cfg(named).has_weights and named.startswith(f"{current}.{tag}")
        assert from_file.startswith(new) and timm.get_pretrained_cfg(from_file) is not None
        assert len(caplog.messages) == 3 and f'timm now calls "{old}" "{current}' in caplog.messages[0]
    assert _current_name("resnet50", "pretrained") == "resnet50"


def test_a_changed_name_builds(tmp_path: Path) -> None:
    old = Timm(model="mnasnet_a1", preprocessing=SIZED)
    assert old.identity()["model"] == "semnasnet_100"
    torch.save(old.model.state_dict(), tmp_path / "own.pth")
    again = Timm(model="mnasnet_a1", weights=str(tmp_path / "own.pth"), preprocessing=SIZED)
    assert torch.equal(features(again, 64), features(old, 64))


def test_weights_of_any_source_are_finite(hub, tmp_path: Path) -> None:
    own = tiny_resnet(tmp_path, 1000)
    state = {**own.state, "bn1.running_var": torch.full_like(own.state["bn1.running_var"], 1e5).half()}
    hub("timm/test_resnet.r160_in1k", {"model.safetensors": state})
    with pytest.raises(
        UserError, match=r'encoder\.weights: "test_resnet" holds NaN or infinity in 1 tensor \(model\.bn1'
    ):
        own.encoder(weights="pretrained")


def test_a_precision_that_weights_exceed(tmp_path: Path) -> None:
    encoder = tiny_resnet(tmp_path).encoder()
    encoder.model.bn1.running_var.fill_(1e5)
    assert features(frozen_copy(encoder, "bf16", torch.device("cpu"))).isfinite().all()
    with pytest.raises(UserError, match=r"precision: fp16: weights are too large for it \(model\.bn1\.running_var\)"):
        frozen_copy(encoder, "fp16", torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "change", "wording"),
    [
        ("timm", without("layer4"), r"lacks \d+ of the model's tensors \(layer4\."),
        ("timm", lambda s: {**s, "extra": torch.zeros(2)}, r"holds 1 that the model has not \(extra\)"),
        ("timm", lambda s: {**s, "conv1.0.weight": torch.zeros(2)}, r"1 of another shape \(conv1\.0\.weight: \[2\] in"),
        ("timm", lambda s: {f"a.{k}": v for k, v in s.items()} | {"a.layer4.9.x": torch.zeros(2)}, r"lacks \d+ of the"),
        ("open_clip", without("resblocks.1"), r"lacks \d+ of the model's tensors \(visual"),
        ("vit", without("layers.2", "layer.2"), r"lacks \d+ of the model's tensors \((layers|encoder\.layer)\.2"),
        ("vit", lambda s: {**s, "layernorm.weight": torch.zeros(5)}, "cannot be loaded"),
    ],
)
def test_file_that_does_not_fit(families: dict[str, Family], name: str, change, wording: str, tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file(change(families[name].state), path)
    with pytest.raises(UserError, match=wording) as raised:
        families[name].encoder(weights=str(path))
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


TIMM, CLIP, HUGGING = "timm", "open_clip", "vit"


@pytest.mark.parametrize(
    ("name", "keys", "wording"),
    [
        (TIMM, {"model": "resnet81"}, 'no model "resnet81"; did you mean resnet18'),
        (TIMM, {"model": "resnet18", "weights": "tv_in1"}, 'did you mean "tv_in1k"'),
        (TIMM, {"model": "resnet18.tv_in1k", "weights": "a1_in1k"}, "keep one of them"),
        (TIMM, {"model": "vit_base_patch16_xp_224", "weights": "pretrained"}, "has no pretrained weights"),
        (TIMM, {"model": "resnet18", "weights": "tv_in1k"}, 'download timm/resnet18.tv_in1k".*HF_HUB_OFFLINE=1'),
        (TIMM, {"model": "hf-hub:acme/none", "weights": "pretrained"}, "hf download acme/none"),
        (TIMM, {"model": "hf-hub:acme/none", "weights": None}, "null: .* write weights: pretrained"),
        (TIMM, {"kwargs": {"num_classes": 3}}, "encoder.kwargs: num_classes cannot be set"),
        (TIMM, {"kwargs": {"bn_epz": 1}}, "encoder.kwargs: .*unexpected keyword argument 'bn_epz'"),
        (TIMM, {"weights": None, "kwargs": {"global_pool": ""}}, r"instead of \[batch, K\]"),
        (TIMM, {"model": "vit_tiny_patch16_224", "weights": None, "preprocessing": SIZED}, "not take images of 64 px"),
        (CLIP, {"model": "ViT-B-16", "weights": "opena"}, 'did you mean "openai"'),
        (CLIP, {"model": "ViT-B/16-quickgelu", "weights": "openai"}, "download timm/vit_base_patch16_clip_224.openai"),
        (CLIP, {"model": "ViT-B-16-quickgelu", "weights": "laion2b_s34b_b88k"}, 'they are those of "ViT-B-16"'),
        (CLIP, {"model": "hf-hub:acme/none", "weights": "pretrained"}, "hf download acme/none"),
        (CLIP, {"model": "hf-hub:acme/none", "weights": "openai"}, "write weights: pretrained"),
        (CLIP, {"model": "demo", "weights": "openai"}, "write model: demo, weights: demo"),
        (CLIP, {"kwargs": {"precision": "fp16"}}, "precision cannot be set"),
        (CLIP, {"kwargs": {"embed_dim": 32}}, "of another shape"),
        (CLIP, {"weights": "openai"}, '"openai" is not a file'),
        (HUGGING, {"model": "acme/none"}, 'acme/none is not on this machine .*hf download acme/none".*HF_HUB_OFFLINE'),
        (HUGGING, {"model": "resnet18"}, 'encoder.model: "resnet18" is not a name of the hub; write ORGANISATION/NAME'),
        (HUGGING, {"model": "local-dir:nowhere"}, "the folder nowhere has no config.json"),
        (HUGGING, {"model": "sub/folder"}, "is a folder here; write local-dir:sub/folder"),
        (HUGGING, {"model": "own.json"}, "is not a file; own.json needs a .safetensors or .pt file"),
        (HUGGING, {"model": "own.json", "weights": "own.safetensors"}, "the config file own.json does not exist"),
        (HUGGING, {"kwargs": {"hidden_sice": 3}}, '"hidden_sice" is not a key of the config .*mean "hidden_size"'),
        (HUGGING, {"kwargs": {"hidden_size": 33}}, r"encoder\.kwargs: \{'hidden_size': 33\} do not fit"),
        (HUGGING, {"kwargs": {"model_type": "clip"}}, "encoder.kwargs: model_type cannot be set here"),
        (HUGGING, {"prompts": ("a photo",)}, "encoder.prompts: "),
    ],
)
def test_faults_of_the_recipe(
    families: dict[str, Family],
    name: str,
    keys: dict[str, Any],
    wording: str,
    in_folder: Path,
    monkeypatch,
    capfd,
    caplog,
) -> None:
    Path("sub/folder").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(in_folder))
    with pytest.raises(UserError, match=wording) as raised:
        families[name].encoder(**keys)
    assert "\n" not in str(raised.value)
    assert capfd.readouterr().err == "" and "root" not in {record.name for record in caplog.records}, "libraries do too"
    assert logging.getLogger().filters == []


def photograph(width: int, height: int) -> Image.Image:
    """Smooth areas, edges and fine texture."""
    draw = np.random.default_rng(1)
    coarse = Image.fromarray(draw.integers(0, 256, (7, 9, 3), dtype=np.uint8)).resize((width, height), 3)
    pixels = np.asarray(coarse) + draw.normal(0, 8, (height, width, 3))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (250, 20, 60)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "resnet10t"])
def test_preprocessing_is_timms(name: str) -> None:
    config = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    ours = evaluation_transform(Timm(model=name).preprocessing)
    assert torch.equal(ours(photograph(300, 200)), timm.data.create_transform(**config)(photograph(300, 200)))


@pytest.mark.parametrize("mode", ["shortest", "squash"])
def test_preprocessing_is_open_clips(families: dict[str, Family], mode: str, hub) -> None:
    cfg = PreprocessCfg(size=32, resize_mode=mode, interpolation="bicubic" if mode == "shortest" else "bilinear")
    config = {"model_cfg": TINY, "preprocess_cfg": {"resize_mode": mode, "interpolation": cfg.interpolation}}
    files = {"open_clip_config.json": config, "open_clip_model.safetensors": families["open_clip"].state}
    hub("acme/clip", files)
    ours = evaluation_transform(OpenClip(model="hf-hub:acme/clip", weights="pretrained").preprocessing)
    for size in ((300, 200), (20, 45)):
        assert torch.equal(ours(photograph(*size)), image_transform_v2(cfg, is_train=False)(photograph(*size)))


@pytest.mark.parametrize("kind", tiny_transformers.MAKE)
def test_preprocessing_is_that_of_transformers(families: dict[str, Family], kind: str) -> None:
    """To 1 level of 255 on average and 4 at most: both resize with rounding of their own."""
    own = families[kind].encoder().preprocessing
    for size in ((120, 80), (50, 90), (20, 25)):
        theirs = tiny_transformers.processor(kind)(images=photograph(*size), return_tensors="pt")["pixel_values"][0]
        difference = (evaluation_transform(own)(photograph(*size)) - theirs).abs()
        levels = difference * torch.tensor(own.std).view(3, 1, 1) * 255
        assert levels.mean() < 1 and levels.max() < 4


def test_preprocessing_follows_overrides_and_image_size() -> None:
    half = PreprocessingOverrides(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop=1.0)
    own = Timm(model="test_vit", kwargs={"img_size": 64}, preprocessing=half).preprocessing
    assert (own.size, own.mean, own.std, own.crop) == (64, (0.5,) * 3, (0.5,) * 3, 1.0)


REAL = {"bn_eps": 1e-3, "pad_type": "same"}


def test_real_weights_recognise_dogs(shared: Path) -> None:
    path = shared / "weights/mobilenetv2_100.keras_in1k_int8deq.fp16.safetensors"
    half = PreprocessingOverrides(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop=1.0)
    encoder, head = Timm(model="mobilenetv2_100", weights=str(path), kwargs=REAL, preprocessing=half), load_file(path)
    assert encoder.width == 1280
    transform = evaluation_transform(encoder.preprocessing)
    photos = sorted((shared / "pacs/photo/dog").iterdir())[:12]
    with torch.no_grad():
        z = encoder(torch.stack([transform(Image.open(photo).convert("RGB")) for photo in photos]))
    classes = (z @ head["classifier.weight"].float().T + head["classifier.bias"].float()).argmax(1)
    assert ((classes >= 151) & (classes <= 268)).sum() >= 9  # ImageNet's breeds of dogs


def test_real_weights_without_a_head_and_incomplete_ones(shared: Path) -> None:
    path = shared / "weights/mobilenetv2_035.tm_in1k_features.fp16.safetensors"
    loaded = Timm(model="mobilenetv2_035", weights=str(path), kwargs=REAL).model.state_dict()
    assert all(torch.equal(loaded[name], value.to(loaded[name].dtype)) for name, value in load_file(path).items())
    path = shared / "weights/resnet18.tv_in1k_upto_layer3.fp16.safetensors"
    with pytest.raises(UserError, match=r'does not fit "resnet18": lacks \d+ of the model.s tensors \(layer4'):
        Timm(model="resnet18", weights=str(path))
