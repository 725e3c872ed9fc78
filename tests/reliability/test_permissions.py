"""What a user may not read or write, and users without a home folder, is one line in every verb."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import miniature
import pytest
from rights import of_a_user

from xdm_ft.cli.parser import main

RECIPE = """\
name: small
data: {name: pacs, root: data, counts: any}
protocol: {name: leave_one_domain_out, test_domains: [sketch], seeds: 1}
encoder: {name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}, weights: w.safetensors}
methods: [erm]
features: {dir: cache}
training: {steps: 2, batch_size: 4}
report: {page: false}
"""
WITH_RECIPE = {verb: [verb, "small.yaml"] for verb in ("run", "validate", "features", "doctor")}
RETRAIN = {"retrain": ["retrain", "output/small", "erm", "sketch", "0"]}
PRUNE = {"prune": ["cache", "prune", "--dir", "cache", "--unreferenced", "output/small"]}
FAULTS = {
    "small.yaml": WITH_RECIPE,
    "data/PACS/photo": WITH_RECIPE | RETRAIN,
    "data/PACS/photo/dog": WITH_RECIPE | RETRAIN,
    "w.safetensors": WITH_RECIPE | RETRAIN,
    "output/small": {"run": WITH_RECIPE["run"]} | RETRAIN | PRUNE,
    "output/small/results.json": {"run": WITH_RECIPE["run"]} | RETRAIN | PRUNE,
    "output/small/recipe.yaml": {"run": WITH_RECIPE["run"]} | RETRAIN,
    "output/small/models": {"run": WITH_RECIPE["run"]} | RETRAIN,
    ".": WITH_RECIPE | RETRAIN | {"cp": ["cp", "demo", "copy.yaml"]},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, its data and its cache."""
    import timm
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("finished")
    miniature.domainbed(folder / "data", "pacs")
    save_file(timm.create_model("test_vit", img_size=32).state_dict(), folder / "w.safetensors")
    (folder / "small.yaml").write_text(RECIPE)
    with contextlib.chdir(folder):
        assert main(["run", "small.yaml"]) == 0
    return folder


@pytest.fixture
def mode(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Changes the mode of a path until the end of the test."""
    monkeypatch.chdir(finished)
    before: list[tuple[Path, int]] = []

    def change(path: str, bits: int) -> None:
        whole = finished / path
        before.append((whole, stat.S_IMODE(whole.stat().st_mode)))
        whole.chmod(bits)

    yield change
    for path, bits in before:
        path.chmod(bits)


def one_line(capfd: pytest.CaptureFixture[str], command: list[str]) -> str:
    with of_a_user():
        status = main(command)
    output, errors = capfd.readouterr()
    assert status == 2 and "Traceback" not in output + errors, errors
    if command[0] == "doctor":
        return output + errors
    [line] = [line for line in errors.splitlines() if line.startswith("xdm-ft:")]
    return line


@pytest.mark.parametrize("path", FAULTS)
def test_what_can_not_be_read(path: str, mode: Callable[[str, int], None], capfd: pytest.CaptureFixture[str]) -> None:
    mode(path, 0)
    for command in FAULTS[path].values():
        line = one_line(capfd, command)
        assert any(word in line for word in ("ermission", "damaged", "no run", "no such recipe")), line


@pytest.mark.parametrize("path", ["output/small", "."])
def test_what_can_not_be_written(
    path: str, mode: Callable[[str, int], None], capfd: pytest.CaptureFixture[str]
) -> None:
    mode(path, 0o500)
    command = ["cp", "demo", "copy.yaml"] if path == "." else [*WITH_RECIPE["run"], "protocol.seeds=2"]
    assert "can not be written: Permission denied" in one_line(capfd, command)


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without HOME and without an entry in the password file, in a folder that it can not write."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "USER", "LOGNAME", "XDM_FT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    (tmp_path / "here").mkdir(mode=0o500)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.mark.parametrize("command", [["cache"], ["features", "demo"], ["run", "demo", "output.dir=../out"], ["doctor"]])
def test_without_a_home_folder(command: list[str], no_home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = one_line(capfd, command)
    assert (
        "features.dir: ~/.cache/xdm_ft/features: the home folder is unknown" in line and "write the whole path" in line
    )


def test_without_a_folder_for_downloads(
    finished: Path, no_home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # what these constants are in a process that starts without a home folder
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "~/.cache/huggingface/hub")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path("~/.cache/huggingface/datasets"))
    data = f"data={{name: folder, root: {finished / 'data' / 'PACS'}}}"
    for change in ("encoder.weights=pretrained", "encoder={name: open_clip, model: RN50-quickgelu, weights: openai}"):
        line = one_line(capfd, ["validate", str(finished / "small.yaml"), data, change])
        assert "HF_HOME: ~/.cache/huggingface/hub: the home folder is unknown" in line
    line = one_line(capfd, ["validate", str(finished / "small.yaml"), data.replace("folder", "imagefolder")])
    assert "HF_HOME: ~/.cache/huggingface/datasets: the home folder is unknown" in line
    assert not [*(no_home / "here").iterdir()]


@pytest.mark.parametrize("key", ["data.root", "encoder.weights"])
def test_a_home_folder_that_nobody_has(key: str, finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(finished):
        line = one_line(capfd, ["validate", "small.yaml", f"{key}=~nobody-has-this-name/w.safetensors"])
    assert f"{key}: ~nobody-has-this-name/w.safetensors: the home folder is unknown" in line


@pytest.mark.slow
def test_with_folders_that_are_set(finished: Path, no_home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe, inputs = str(finished / "small.yaml"), {"data.root": "data", "encoder.weights": "w.safetensors"}
    folders = [f"{key}={finished / path}" for key, path in inputs.items()]
    folders += [f"output.dir={no_home / 'out'}", f"features.dir={no_home / 'cache'}"]
    with of_a_user():
        for verb in ("validate", "features", "run", "doctor"):
            assert main([verb, recipe, *folders]) == 0
        assert main(["retrain", str(no_home / "out" / "small"), "erm", "sketch", "0"]) == 0
        assert main(["cache", "verify", "--dir", str(no_home / "cache")]) == 0
    assert "Traceback" not in capfd.readouterr().err
    assert not [*(no_home / "here").iterdir()]


def test_a_current_folder_that_is_gone(tmp_path: Path) -> None:
    code = "import os, sys; os.rmdir(os.getcwd()); from xdm_ft.__main__ import main; sys.exit(main(['ls']))"
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    line = "xdm-ft: the current folder can not be used (No such file or directory); change to another one\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
