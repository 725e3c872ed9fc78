"""What goes to the hub and what comes from it: only a model's files."""

from __future__ import annotations

import os
import subprocess
import sys
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import small_models
from huggingface_hub import errors
from local_hub import local_hub
from safetensors.torch import save_file
from small_models import add_to_hub, parts, photographs

import xdm_ft
from xdm_ft.export.card import card
from xdm_ft.export.directory import write_directory
from xdm_ft.export.hub import push
from xdm_ft.runtime.errors import UserError


class FakeApi:
    """Records the calls, and answers as the hub does."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, object]]] = []
        self.uploaded: list[str] = []
        self.is_private: bool | None = None  # of the repository; None: there is none
        self.fault: Exception | None = None

    def create_repo(self, repository: str, *, private: bool, exist_ok: bool) -> None:
        self.calls.append(("create_repo", {"repository": repository, "private": private, "exist_ok": exist_ok}))
        if self.fault:
            raise self.fault
        self.is_private = private if self.is_private is None else self.is_private

    def model_info(self, repository: str) -> SimpleNamespace:
        return SimpleNamespace(private=self.is_private)

    def upload_folder(self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], **others: object):
        self.calls.append(("upload_folder", {"repo_id": repo_id, "allow_patterns": allow_patterns, **others}))
        there = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
        self.uploaded = sorted(name for name in there if any(fnmatch(name, pattern) for pattern in allow_patterns))
        return SimpleNamespace(commit_url=f"https://hub.example/{repo_id}/commit/1")


@pytest.fixture
def api(monkeypatch):
    fake = FakeApi()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: fake)
    return fake


WHOLE = ("config.json", "demo_clip.json", "encoder.safetensors", "example.py", "model.safetensors")


def test_the_files_of_a_model_are_uploaded(model, api):
    (model / "README.md").write_text("# A model\n\nSee https://huggingface.co/org/name and and/or <a></a>, 3 / 4.\n")
    (model / "threshold.json").write_text("{}")  # of one site: it stays at home
    (model / "site.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    pushed = push(model, "org/name", private=True)
    assert pushed.files == tuple(api.uploaded) == tuple(sorted([*WHOLE, "README.md", "site.safetensors"]))
    assert pushed.private and pushed.repository == "org/name" and pushed.url.endswith("/commit/1")
    (created, how), (uploaded, what) = api.calls
    assert (created, how) == ("create_repo", {"repository": "org/name", "private": True, "exist_ok": True})
    assert uploaded == "upload_folder" and what["repo_id"] == "org/name"
    assert "model.onnx" in what["delete_patterns"], "that of an earlier model"


def test_any_other_file_and_any_link_is_refused_by_name(model, api, tmp_path):
    (tmp_path / "secret").write_text("x")
    makers = {"scan_017.png": Path.touch, ".DS_Store": Path.touch, "events": Path.mkdir}
    for name, make in (makers | {"README.md": lambda path: path.symlink_to(tmp_path / "secret")}).items():
        path = model / name
        path.unlink(missing_ok=True)
        make(path)
        with pytest.raises(UserError, match=rf"model: {name}: not a file of a model, so it is not uploaded"):
            push(model, "org/name", private=True)
        path.rmdir() if name == "events" else path.unlink()
    assert not api.calls


def test_a_private_model_does_not_go_to_a_public_repository(model, api):
    api.is_private = False
    with pytest.raises(UserError, match="org/name: exists on the hub and is public"):
        push(model, "org/name", private=True)
    assert not api.uploaded


def answered(status: int, kind: type[Exception] = errors.HfHubHTTPError) -> Exception:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind("no", response=response)  # type: ignore[call-arg]


def test_errors_of_the_hub_are_one_line_with_a_remedy(model, api):
    for api.fault, message in (
        (answered(401), r"needs a token with the right to write; run `hf auth login`, or set HF_TOKEN"),
        (errors.OfflineModeIsEnabled("offline"), r"HF_HUB_OFFLINE is set, so nothing is uploaded; unset it"),
        (ConnectionRefusedError("no route"), r"the upload failed \(ConnectionRefusedError\); check the network"),
    ):
        with pytest.raises(UserError, match=rf"^org/name: .*{message}") as found:
            push(model, "org/name", private=True)
        assert len(str(found.value).splitlines()) == 1


def test_a_wrong_name_and_a_folder_without_a_model_are_refused(model, api, tmp_path):
    for name in ("name", "a/b/c", "org/na me", "org/name@main", ""):
        with pytest.raises(UserError, match="is not a name of a repository; write ORGANISATION/NAME"):
            push(model, name, private=True)
    with pytest.raises(UserError, match=r"config\.json: cannot be read"):
        push(tmp_path, "org/name", private=True)
    assert not api.calls


@pytest.mark.parametrize(
    ("secret", "words"),
    [("the file st_mary  1.safetensors", "a file (xxh3 {})"), ("local-dir:/srv/st_mary", "a local folder")],
)
def test_no_text_names_the_file_or_the_folder_of_the_encoder(tmp_path, secret, words):
    """The weights are known by their hash; the protocol's line has named the file too."""
    encoder, settings = small_models.timm("test_vit")
    weights = tmp_path / "st_mary  1.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in encoder.model.state_dict().items()}, weights)
    if "file" in secret:
        encoder, settings = small_models.timm("test_vit", weights=str(weights))
        assert encoder.pretraining.startswith(f"weights from {secret}")
    else:
        encoder.pretraining, settings = f"weights from {secret}", settings | {"model": secret, "weights": "pretrained"}
    line = f"PACS, encoder {' '.join(encoder.pretraining.split())}, frozen"
    made = parts(encoder, settings, description=line)
    for with_encoder in (True, False) if "file" in secret else (True,):
        folder = tmp_path / f"model_{with_encoder}"
        folder.mkdir()
        config = write_directory(made, folder, with_encoder)
        assert config.encoder.pretraining.startswith(f"weights from {words.format(config.encoder.xxh3)}")
        assert config.protocol["description"] == f"PACS, encoder {config.encoder.pretraining}, frozen"
        assert not [path for path in folder.iterdir() if b"st_mary" in path.read_bytes()]
        assert (folder / "README.md").read_text() == card(config, settings)
        assert xdm_ft.load(folder, encoder_weights=None if with_encoder else weights).config == config
    if "file" in secret:
        trained = parts(encoder, settings, description=line, trained=True)
        assert write_directory(trained, tmp_path / "trained", True).encoder.pretraining == "weights from a file"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`hub(folder)` puts a model directory into a temporary cache of the hub as org/name."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return partial(add_to_hub, tmp_path / "hub", "org/name")


def test_a_model_of_the_hub_loads_and_is_never_read_as_a_run(model, hub, tmp_path):
    images = photographs(tmp_path)
    expected = xdm_ft.load(model, device="cpu").predict_proba(images)
    (model / "results.json").write_text('{"runs": [], "checksum": "x"}')
    hub(model)
    for name in ("hf-hub:org/name", "hf-hub:org/name@main", f"hf-hub:org/name@{'0' * 40}"):
        assert np.array_equal(xdm_ft.load(name, device="cpu").predict_proba(images), expected)
    with pytest.raises(UserError, match="is not a run directory, so method, held-out domain, seed and trial cannot be"):
        xdm_ft.load("hf-hub:org/name", seed=1)
    for name, message in (
        ("hf-hub:org/other", r"is not on this machine and did not download .*run `hf download org/other` on a machine"),
        ("hf-hub:org/name@v2", r"is not on this machine .*run `hf download org/name` on"),
        ("hf-hub:name", r"is not a name of a model on the hub; write hf-hub:ORGANISATION/NAME"),
        ("hf-hub:org/../etc", "is not a name of a model on the hub"),
    ):
        with pytest.raises(UserError, match=f"^{name}: .*{message}") as found:
            xdm_ft.load(name)
        assert len(str(found.value).splitlines()) == 1


def test_a_repository_without_a_model_is_refused(tmp_path, hub):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").write_text("x")
    hub(tmp_path / "other")
    with pytest.raises(UserError, match=r"hf-hub:org/name: holds no model of xdm_ft \(config\.json is missing\)"):
        xdm_ft.load("hf-hub:org/name")


SCENARIO = """\
import sys
from pathlib import Path
import numpy as np
import xdm_ft
from xdm_ft.export.hub import push

folder, image = sys.argv[1:]
card = Path(folder) / "README.md"
card.write_text("---\\nlicense: none\\n---\\n")
try:
    push(Path(folder), "org/name", private=True)
except xdm_ft.UserError as error:
    print(error)
card.write_text("# A model")
push(Path(folder), "org/name", private=True)
card.unlink()
print(*push(Path(folder), "org/name", private=True).files)
model = xdm_ft.load("hf-hub:org/name", device="cpu")
assert np.array_equal(model.predict_proba([image]), xdm_ft.load(folder, device="cpu").predict_proba([image]))
try:
    xdm_ft.load("hf-hub:org/other")
except xdm_ft.UserError as error:
    print(error)
"""


@pytest.mark.slow
def test_huggingface_hub_itself_uploads_and_downloads(model, tmp_path):
    """In a process of its own, as huggingface_hub reads the address of the hub when it is imported."""
    [image] = photographs(tmp_path, 1)
    with local_hub() as server:
        changes = {"HF_ENDPOINT": server.url, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        environment = {**os.environ, **changes, "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", SCENARIO, str(model), image]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    card, files, refused = ended.stdout.splitlines()
    assert card.startswith("org/name: the hub refuses the metadata of README.md (") and "license" in card
    assert files.split() == sorted(server.files) == list(WHOLE), "the README of the first push is removed"
    assert all(content == (model / name).read_bytes() for name, content in server.files.items())
    assert server.private and server.commits == 2
    read = {path.rpartition("/")[2] for path in server.requests if "/resolve/" in path}
    assert read == {"config.json", "demo_clip.json", "encoder.safetensors", "model.safetensors"}, "what loading needs"
    assert refused.startswith("hf-hub:org/other: is not on the hub, or is private; check the name, or run `hf auth")


def test_checksums_of_training_images_go_to_the_hub_on_request_only(small_model, api):
    for asked in (False, True):
        files = push(small_model.model, "org/name", private=True, with_training_hashes=asked).files
        assert ("training_images.safetensors" in files) == asked and "config.json" in files
        assert "training_images.safetensors" in api.calls[-1][1]["delete_patterns"], "that of an earlier model"
