"""A model directory: what reads works; what is damaged, edited or of another model is one line."""

from __future__ import annotations

import copy
import shutil
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from promised import expected_of
from safetensors.torch import load_file
from small_models import config_of, parts, photographs, write_config

import xdm_ft
from xdm_ft.cli.parser import main
from xdm_ft.export.card import card
from xdm_ft.export.directory import (
    TRAINING_IMAGES,
    checksum_of,
    digest_of,
    new_directory,
    read_config,
    read_directory,
    write_changed,
    write_directory,
)
from xdm_ft.export.hub import check_files
from xdm_ft.export.predictor import cached_features
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.atomic import umask
from xdm_ft.storage.tensors import write_checked, write_tensors

SURROGATE = "a\ud800b"
HUGE = 10**400


EXPECTED = expected_of(
    (0.8, 0.8, 0.8), mean=0.8, others={"nll": 0.5, "ece": 0.1},
    numbers={"nll_with_temperature": 0.4, "ece_with_temperature": 0.05},
    new_site=(0.2, 0.99), scale="logit", center=1.5, spread=0.7, freedom=2, one_more_domain=0.051,
    notes=("few images",),
)  # fmt: skip


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory, with everything that config.json may hold."""
    folder = tmp_path_factory.mktemp("intact") / "model"
    encoder, own = small_models.timm("test_vit")
    made = parts(encoder, own)
    config = made.config
    identity = {"component": "timm", "model": "test_vit", "kwargs": {}, "versions": {"torch": "2", "timm": "1"}}
    changes = {
        "expected": EXPECTED,
        "encoder": config.encoder.model_copy(update={"identity": identity}),
        "method": {**config.method, "trial": 0, "steps": 10, "hparams": {"lr": 0.1}},
        "results": {"images": {"a": 10, "b": 12}, "how": "of three runs"},
        "prompts": ["a photo of a {}"],
        "fitted_temperature": 1.5,
        "renamed": {"0": "cat"},
    }
    write_directory(type(made)(config.model_copy(update=changes), encoder, made.heads), folder, with_encoder=True)
    return folder


@pytest.fixture
def model(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "model"))


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values inside a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, below in inner for place in [(*at, key), *places(below, (*at, key))]]


def changed(document: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with another value at a place."""
    found = copy.deepcopy(document)
    *blocks, key = place
    reduce(getitem, blocks, found)[key] = value
    return found


def use(model: Path) -> None:
    """Reads the config, writes its card, loads the model and looks for cached features."""
    config, _ = read_config(model)
    card(config, config.encoder.settings).encode()
    loaded = xdm_ft.load(model, device="cpu")
    repr(loaded)
    cached_features(loaded, model / "no cache")


def test_an_intact_document_is_read(model: Path) -> None:
    document = config_of(model)
    write_config(model, document)
    use(model)
    config, _ = read_config(model)
    assert config.expected == EXPECTED and config.encoder.identity["kwargs"] == {}
    assert config.method["hparams"] == {"lr": 0.1} and config.results["how"] == "of three runs"


WRONG = [
    ("temperature", 0.0), ("protocol", {}), ("head.name", "mlp"), ("head.settings", {"hidden": 5}),
    ("results.images", {"a": "many"}), ("renamed", {SURROGATE: "cat"}), ("class_names", ["cat"] * 4),
    ("class_names", [SURROGATE, "b", "c", "d"]), ("encoder.width", 9), ("encoder.width", 10**30),
    ("encoder.seed", 2**70), ("encoder.settings", {}), (f"encoder.settings.kwargs.{SURROGATE}", 1),
    ("encoder.identity", {"component": "timm", "model": "test_vit"}), ("encoder.identity.versions", {"torch": 2}),
    ("preprocessing.size", 10**6), ("preprocessing.std", [0, 0, 0]), ("preprocessing.crop", 1e-9),
    ("preprocessing.mean", [float("nan")] * 3), ("method.train_domains", 3), ("method.label", ["erm"]),
    ("expected.freedom", HUGE), ("expected.freedom", None), ("expected.mean", 1.2), ("expected.spread", float("nan")),
    ("expected.spread", 1e300), ("expected.scale", "plain"),  # no accuracy has a center of 1.5
    ("expected.center", None), ("expected.metric", "luck"), ("expected.others", {"luck": 1}), ("expected.held_out", []),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_wrong_value_is_one_line(model: Path, key: str, value: object) -> None:
    write_config(model, changed(config_of(model), tuple(key.split(".")), value))
    with pytest.raises(UserError) as caught:
        use(model)
    assert len(str(caught.value).splitlines()) == 1 and "/model" in str(caught.value)


def test_a_wrong_config_is_status_2(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(model, config_of(model) | {"temperature": 0.0})
    [image] = photographs(tmp_path, 1)
    assert main(["predict", str(model), image, "--out", str(tmp_path / "out.csv")]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("xdm-ft: ")]
    assert "/model/config.json: cannot be read as a model's config (temperature" in line
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("text", ["[" * 100_000, "3", '"\ud800"', "{"])
def test_what_is_no_document_is_one_line(model: Path, text: str) -> None:
    (model / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UserError, match=r"config\.json: cannot be read as a model's config") as found:
        use(model)
    assert len(str(found.value).splitlines()) == 1


PRESENT = ("config.json", "model.safetensors", "encoder.safetensors", "reference.safetensors", TRAINING_IMAGES)
DAMAGE = [
    *(("model.safetensors", damage) for damage in ("missing", "empty", "cut", "noise", "folder")),
    *((name, "of another model") for name in PRESENT),
    ("config.json", "folder"), ("encoder.safetensors", "missing"), (TRAINING_IMAGES, "missing"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_damage_is_one_line(small_model: Any, name: str, damage: str, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small_model.model, tmp_path / "model"))
    file, content = model / name, (model / name).read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage == "of another model":
        if name == "config.json":
            file.write_bytes(content.replace(b'"temperature": 1.0', b'"temperature": 2.0'))
        else:
            tensors = load_file(small_model.model / name)
            key = next(key for key, value in tensors.items() if value.numel())
            tensors[key].view(-1)[0] += 1
            how = write_tensors if name == "encoder.safetensors" else write_checked
            how(file, tensors, {"format": "pt"})
    elif damage != "missing":
        file.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "noise": b"\xff" * 999}[damage])
    if (name, damage) == (TRAINING_IMAGES, "missing"):  # as after an upload
        assert xdm_ft.load(model).training_images is None
        return
    with pytest.raises(UserError) as caught:
        xdm_ft.load(model)
    assert "\n" not in str(caught.value) and "model" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("model", lambda t: t.clear(), "does not hold the heads of config.json"),
        ("model", lambda t: t.update({f"other.{k[5:]}": v * 1 for k, v in [*t.items()]}), "does not hold the heads of"),
        ("model", lambda t: t.update({k: v * torch.nan for k, v in t.items()}), "holds values that are not finite"),
        ("reference", lambda t: t.update(means=torch.tensor(1.0)), r"means has the shape \[\], not \[1 to "),
        ("reference", lambda t: t.update(more=torch.zeros(1)), "more is no tensor of such a file"),
        ("reference", lambda t: t.update(quantiles=t["quantiles"] * torch.inf), "quantiles holds values that are not"),
        ("reference", lambda t: t.update({k: v.bfloat16() for k, v in t.items()}), None),
    ],
)
def test_foreign_tensors_are_one_line(
    small_model: Any, name: str, change: Any, words: str | None, tmp_path: Path
) -> None:
    """With checksums as they should be."""
    model = Path(shutil.copytree(small_model.model, tmp_path / "model"))
    file, key = model / f"{name}.safetensors", "weights_xxh3" if name == "model" else f"{name}_xxh3"
    tensors = load_file(file)
    change(tensors)
    write_checked(file, tensors, {})
    write_config(model, config_of(model) | {key: digest_of(tensors)})
    if words is None:
        assert xdm_ft.load(model).distance(photographs(tmp_path)).shape == (4,)
        return
    with pytest.raises(UserError, match=words) as caught:
        xdm_ft.load(model)
    assert "\n" not in str(caught.value) and "export the model again" in str(caught.value)


def test_of_two_at_once_one_gets_the_name(tmp_path: Path) -> None:
    def both() -> None:
        with new_directory(tmp_path / "model") as first:
            (first / "file").write_text("first")
            with new_directory(tmp_path / "model") as second:
                (second / "file").write_text("second")

    with pytest.raises(UserError, match="model: exists already; name a new directory, or delete this one"):
        both()
    assert (tmp_path / "model/file").read_text() == "second" and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_changed_copy_has_the_named_files_of_the_encoder_alone(tmp_path: Path) -> None:
    """What else lies in a directory from elsewhere, or what its links lead to, goes nowhere."""
    made = parts(*small_models.demo_clip(), name="open_clip")
    source, key = tmp_path / "source", tmp_path / "key"
    source.mkdir()
    write_directory(made, source, with_encoder=True)
    key.write_text('{"private": "key"}')
    for name in ("text_config.json", "encoder_part.safetensors", "other.json"):
        (source / name).symlink_to(key)

    def copied(folder: Path, to: str) -> set[str]:
        (tmp_path / to).mkdir()
        write_changed(folder, read_directory(folder), tmp_path / to)
        return {path.name for path in (tmp_path / to).iterdir()}

    named = {"encoder.safetensors", "model.safetensors", "config.json", "README.md", "example.py", "demo_clip.json"}
    assert copied(source, "copy") == named
    for name in ("encoder.safetensors", "demo_clip.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (source / name).read_bytes()
    assert xdm_ft.load(tmp_path / "copy").checksum == checksum_of(source)
    with pytest.raises(UserError, match="not a file of a model, so it is not uploaded"):
        check_files(source, made.config)
    # the hub's cache consists of links to its blobs
    snapshot, blobs = tmp_path / "hub/models--a--b/snapshots/0", tmp_path / "hub/models--a--b/blobs"
    shutil.copytree(tmp_path / "copy", blobs)
    snapshot.mkdir(parents=True)
    for name in named:
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert copied(snapshot, "of the hub") == named
    beside = snapshot.parents[1] / "architecture.json"  # unpacked in a home directory, that would be all of it
    for folder, link in ((source, tmp_path / "architecture.json"), (snapshot, beside)):
        shutil.copy(tmp_path / "copy/demo_clip.json", link)
        (folder / "demo_clip.json").unlink()
        (folder / "demo_clip.json").symlink_to(link)
        with pytest.raises(UserError, match=r"demo_clip\.json: is a link, which could lead to any file, and is not co"):
            copied(folder, f"refused {folder.name}")


@pytest.mark.parametrize(
    ("key", "value"), [("model", "../elsewhere.json"), ("model", "local-dir:/etc"), ("weights", "/etc/passwd.pth")]
)
def test_a_config_that_names_files_elsewhere_is_refused(model: Path, key: str, value: str) -> None:
    document = config_of(model)
    document["encoder"]["settings"][key] = value
    document["encoder"]["file"] = None
    write_config(model, document)
    with pytest.raises(UserError, match="of this directory"):
        xdm_ft.load(model)


def test_foreign_directories_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text('{"architectures": ["ViT"], "model_type": "vit"}')
    (tmp_path / "a file").write_text("")
    for name, what in (("empty", "neither"), ("hf", "not of xdm_ft"), ("a file", "is a file"), ("no", "not exist")):
        with pytest.raises(UserError, match=what):
            xdm_ft.load(tmp_path / name)


def test_a_taken_directory_is_refused_and_an_interrupted_one_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine").touch()
    with pytest.raises(UserError, match="exists already"), new_directory(tmp_path / "taken"):
        pass
    with pytest.raises(KeyError), new_directory(tmp_path / "new") as folder:
        (folder / "x").touch()
        raise KeyError
    assert [path.name for path in tmp_path.rglob("*")] == ["taken", "mine"]
    with new_directory(tmp_path / "new") as folder:
        (folder / "x").touch()
    assert (tmp_path / "new/x").exists() and (tmp_path / "new").stat().st_mode & 0o777 == 0o777 & ~umask()


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


VALUES = st.one_of(
    st.sampled_from(
        [
            None, True, False, 0, -1, 3, 2**63, HUGE, -HUGE, 0.0, -0.5, 1e300, float("nan"), float("inf"), "",
            SURROGATE, "a\nb", "\x1b[31m", "../x", "/etc", "hf-hub:a/b", "local-dir:/etc", "x.json", "x.safetensors",
            "nan", "1e999", [], {}, [None], [SURROGATE], {"": 1}, {SURROGATE: 1}, {"a": {"b": []}}, nested(300),
            nested(900),
        ]
    ),
    st.text(max_size=5),
    st.integers(),
    st.floats(),
)  # fmt: skip


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
@pytest.mark.slow
def test_a_mutated_document_works_or_is_one_line(model: Path, data: st.DataObject) -> None:
    document = config_of(model)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(places(document)))
        *blocks, key = place
        how = data.draw(st.sampled_from(["delete", "replace", "replace", "replace", "add"]))
        if how == "replace":
            document = changed(document, place, data.draw(VALUES))
        elif how == "delete":
            document = copy.deepcopy(document)
            del reduce(getitem, blocks, document)[key]
        elif isinstance(reduce(getitem, blocks, document), dict):
            document = changed(document, (*blocks, data.draw(st.text(max_size=3))), data.draw(VALUES))
    before = (model / "config.json").read_text()
    try:
        write_config(model, document)
        use(model)
    except UserError as error:
        assert len(error.args) == 1 and len(str(error).splitlines()) == 1, error
        str(error).encode()
    finally:
        (model / "config.json").write_text(before)
