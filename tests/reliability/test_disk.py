"""A disk that is full or taken away, files that may not be read or written, and users without a home: one line."""

import contextlib
import ctypes
import errno
import os
import pwd
import resource
import shutil
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from real_runs import ROOT, TEST_VIT, on_images, one_line, outcome, run_here
from safetensors.torch import save_file

from xdm_ft.cli.parser import main
from xdm_ft.experiment import pieces, plan
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage import checkpoint
from xdm_ft.storage.atomic import replace_text
from xdm_ft.storage.lines import append_lines
from xdm_ft.storage.tensorboard import EventFile
from xdm_ft.storage.tensors import write_tensors

SIZE = 4 * 2**20
METHODS = "methods=[erm, vrex, linear_probe]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A recipe small.yaml, its data, weights and cache, and a finished run of it, out/small. Its paths are relative."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = on_images(folder, steps=4, encoder=f"{TEST_VIT}, weights: {folder}/w.safetensors")
    save_file(timm.create_model("test_vit", img_size=32).state_dict(), folder / "w.safetensors")
    recipe.write_text(recipe.read_text().replace(f"{folder}/", ""))
    with contextlib.chdir(folder):
        assert run_here(recipe) == 0
    return folder


@pytest.fixture(scope="module")
def never_full(folder):
    """The summary of a run that nothing disturbed."""
    with contextlib.chdir(folder):
        assert run_here(Path("small.yaml"), "output.dir=never_full", METHODS) == 0
    summary = outcome(folder / "never_full")["results"]["summary"]
    return summary


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


# ---- Full disks, and directories that disappear


@pytest.fixture
def small_disk(tmp_path):
    """A disk of `SIZE` bytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs more rights")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def leave(disk, free):
    """Fills the disk up to so many bytes, and returns the file that does."""
    filling = disk / "filling"
    filling.write_bytes(bytes(4096 * (os.statvfs(disk).f_bavail - free // 4096)))
    return filling


def write_events(folder):
    file = EventFile(folder, "0")
    for step in range(500):
        file.write(step, {"train/loss": 0.1})


WRITERS = {
    "weights": lambda folder: write_tensors(folder / "w", {"w": torch.ones(5000)}, {}),
    "text": lambda folder: replace_text(folder / "t", "x" * 20_000),
    "line": lambda folder: append_lines(folder / "l", ["x" * 20_000]),
    "checkpoint": lambda folder: checkpoint.write(folder / "c", {"a": torch.ones(5000)}, {}),
    "events": lambda folder: write_events(folder / "e"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_file(kind, small_disk, tmp_path):
    filling = leave(small_disk, 8192)
    with pytest.raises(UserError, match="the disk is full") as caught:
        WRITERS[kind](small_disk)
    assert str(caught.value).startswith(str(small_disk)) and "\n" not in str(caught.value)
    if kind in ("weights", "checkpoint"):
        assert "(0.0 MB are needed for it)" in str(caught.value)
    filling.unlink()
    assert [*small_disk.rglob(".*")] == [], "nothing unfinished stays"

    # a limit on the size of files stands for all other errors: safetensors reports it as one of its own
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError, match=f"cannot be written: {os.strerror(errno.EFBIG)}"):
            WRITERS[kind](tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("free", "shares", "processes"),
    [
        (40_960, True, 2),
        pytest.param(12_288, False, 1, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((28_672, False, 2), (98_304, True, 1))),
    ],
)
def test_a_run_on_a_full_disk_resumes_when_there_is_space(
    free, shares, processes, here, never_full, small_disk, monkeypatch, capfd
):
    """`processes`: with two, both of them meet the full disk. `shares`: heads that train together share a file."""
    monkeypatch.setattr(plan, "MAX_MODELS", 0 if shares else 200)
    monkeypatch.setattr(pieces, "own_cores", lambda: processes)
    command = ["run", "small.yaml", f"output.dir={small_disk}", METHODS]
    filling = leave(small_disk, free)
    assert main(command) == 2
    line = one_line(capfd.readouterr().err)
    assert "the disk is full" in line and "run the same command to resume" in line and str(small_disk) in line
    filling.unlink()
    assert main(command) == 0
    assert outcome(small_disk)["results"]["summary"] == never_full


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_directory_that_is_deleted_during_the_run(replaced, here, tmp_path, monkeypatch, capsys):
    """`replaced`: another run has begun in its place."""
    monkeypatch.setattr(pieces, "own_cores", lambda: 1)
    save, run = pieces.save, tmp_path / "small"
    other, saves = '{"run": "of another"}', list[object]()

    def deleting(outcomes, directory, **how):
        saves.append(outcomes)
        if len(saves) == (1 if replaced else 2):
            shutil.rmtree(run)
            if replaced:
                run.mkdir()
                (run / "run.lock").touch()
                (run / "results.json").write_text(other)
        return save(outcomes, directory, **how)

    command = ["run", "small.yaml", f"output.dir={tmp_path}", METHODS]
    with monkeypatch.context() as patch:
        patch.setattr(pieces, "save", deleting)
        assert main(command) == 2
    assert "was deleted or replaced during the run" in one_line(capsys.readouterr().err)
    if replaced:
        assert {path.name for path in run.iterdir()} <= {"run.lock", "results.json"}
        assert (run / "results.json").read_text() == other
    else:
        assert not run.exists(), "it is not created again"
        assert main(command) == 0


DEEP = "/".join(["d" * 250] * 15)


@pytest.mark.parametrize("name", ["events", "models/erm", "state", "results.md", "run.lock", "deep"])
def test_what_can_not_be_written_is_found_before_training(name, here, tmp_path, monkeypatch, capsys):
    path, out = tmp_path / "small" / name, tmp_path
    path.parent.mkdir(parents=True)
    if name == "deep":  # the run directory fits into a path, its models do not
        out = tmp_path / DEEP / ("d" * (4040 - len(str(tmp_path / DEEP))))
    elif name in ("results.md", "run.lock"):
        path.mkdir()
    elif name == "events":
        path.symlink_to(tmp_path / "gone" / "events")  # of a disk that is not mounted
        (tmp_path / "gone").write_text("")
    else:
        path.write_text("")
    if name == "state":
        shutil.copy("out/small/recipe.yaml", tmp_path / "small")

    def trained(*_):
        raise AssertionError("training has begun")

    monkeypatch.setattr("xdm_ft.experiment.pieces.do_piece", trained)
    assert main(["run", "small.yaml", f"output.dir={out}"]) == 2
    line = one_line(capsys.readouterr().err)
    assert "File name too long" in line if name == "deep" else str(tmp_path / "small") in line


# ---- Permissions

_VERSION_3 = 0x20080522  # linux/capability.h
_OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_Header, _Data = ctypes.c_uint32 * 2, ctypes.c_uint32 * 6  # data: effective, permitted, inheritable; twice


@contextmanager
def of_a_user():
    """Context in which this thread, and those that it starts, are subject to the permissions of files; root is not."""
    if os.geteuid() != 0:
        yield
        return
    if sys.platform != "linux":
        pytest.skip("root can give up its rights for a time on Linux only")
    libc, header, data = ctypes.CDLL(None, use_errno=True), _Header(_VERSION_3, 0), _Data()
    assert libc.capget(header, data) == 0
    before = data[0]
    data[0] = before & ~_OVERRIDES
    assert libc.capset(header, data) == 0
    try:
        yield
    finally:
        data[0] = before
        assert libc.capset(header, data) == 0


@contextmanager
def mode(path, bits):
    before = stat.S_IMODE(path.stat().st_mode)
    path.chmod(bits)
    try:
        yield
    finally:
        path.chmod(before)


def refused(capfd, *command):
    """Returns the one line of a command, and of `doctor` everything."""
    capfd.readouterr()
    with of_a_user():
        status = main([*command])
    output, errors = capfd.readouterr()
    assert status == 2 and "Traceback" not in output + errors, errors
    return output + errors if command[0] == "doctor" else one_line(errors)


WITH_RECIPE = [[verb, "small.yaml"] for verb in ("run", "validate", "features", "doctor")]
ANALYSE = ["analyse", "out/small"]
PRUNE = ["cache", "prune", "--dir", "cache", "--unreferenced", "out"]
UNREADABLE = {
    "small.yaml": WITH_RECIPE,
    "data/PACS/photo": [*WITH_RECIPE, ANALYSE],
    "data/PACS/photo/dog": [*WITH_RECIPE[:2], ANALYSE],
    "w.safetensors": [*WITH_RECIPE, ANALYSE],
    "out/small": [WITH_RECIPE[0], ANALYSE, PRUNE],
    "out/small/results.json": [WITH_RECIPE[0], ANALYSE, PRUNE],
    "out/small/recipe.yaml": [WITH_RECIPE[0], ANALYSE],
    "out/small/models": [WITH_RECIPE[0], ANALYSE],
    ".": [*WITH_RECIPE, ANALYSE, ["cp", "demo", "copy.yaml"]],
}


@pytest.mark.slow
def test_files_without_permission(here, capfd):
    for path, commands in UNREADABLE.items():
        with mode(here / path, 0):
            for command in commands:
                line = refused(capfd, *command)
                assert any(word in line for word in ("ermission", "damaged", "no run", "no such recipe")), line
    for path, command in ((".", ["cp", "demo", "copy.yaml"]), ("out/small", ["run", "small.yaml", "protocol.seeds=2"])):
        with mode(here / path, 0o500):
            assert "cannot be written: Permission denied" in refused(capfd, *command)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("bits", [0o700, 0o755, 0o777])
def test_features_of_another_user(bits, here, tmp_path, capsys):
    def of_user(*arguments):
        with of_a_user():
            return main([*arguments]), "".join(capsys.readouterr())

    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(bits)  # what is cached takes it over
    features = ["features", "small.yaml", f"features.dir={cache}"]
    assert main(features) == 0
    shutil.copytree(here / "data", tmp_path / "data")
    count = len([*tmp_path.glob("data/**/*.png")])
    for path in (cache, *cache.rglob("*")):
        os.chown(path, 65533, 65533)
    status, text = of_user(*features)
    if bits == 0o700:
        assert status == 2 and "cache cannot be read; set features.dir" in one_line(text)
        return
    assert status == 0 and f"{count} images of width 64, 0 of them extracted now" in text
    Image.new("RGB", (20, 20), "teal").save(tmp_path / "data/PACS/photo/dog/added.png")
    features.append(f"data.root={tmp_path}/data")
    status, text = of_user(*features)
    if bits == 0o777:
        assert status == 0 and "1 of them extracted now" in text
    else:
        assert status == 2 and "cannot be written, and lacks features of 1 image; set features.dir" in text
    shards = {*cache.rglob("shard-*")}
    for verb in (["ls"], ["verify"], ["prune", "--max-size", "0"]):
        status, text = of_user("cache", *verb, "--dir", str(cache))
        assert status == (2 if bits == 0o755 and verb[0] == "prune" else 0), text
    removed = shards - {*cache.rglob("shard-*")}
    assert len(removed) == (1 if bits == 0o777 else 0), "one's own, and never another user's"


# ---- Without a home folder


@pytest.fixture
def no_home(tmp_path, monkeypatch):
    """A user without HOME and without an entry in the password file, in a folder that it cannot write."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "USER", "LOGNAME", "XDM_FT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    (tmp_path / "here").mkdir(mode=0o500)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_without_a_home_folder(folder, no_home, capfd, monkeypatch):
    for command in (["cache"], ["features", "demo"], ["run", "demo", "output.dir=../out"], ["doctor"]):
        line = refused(capfd, *command)
        assert "features.dir: ~/.cache/xdm_ft/features: the home folder is unknown" in line
        assert "write the whole path" in line
    # what these constants are in a process that starts without a home folder
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "~/.cache/huggingface/hub")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path("~/.cache/huggingface/datasets"))
    recipe, data = str(folder / "small.yaml"), f"data={{name: folder, root: {folder / 'data' / 'PACS'}}}"
    for change in ("encoder.weights=pretrained", "encoder={name: open_clip, model: RN50-quickgelu, weights: openai}"):
        line = refused(capfd, "validate", recipe, data, change)
        assert "HF_HOME: ~/.cache/huggingface/hub: the home folder is unknown" in line
    line = refused(capfd, "validate", recipe, data.replace("folder", "imagefolder"))
    assert "HF_HOME: ~/.cache/huggingface/datasets: the home folder is unknown" in line
    for key in ("data.root", "encoder.weights"):
        with contextlib.chdir(folder):
            line = refused(capfd, "validate", recipe, f"{key}=~nobody-has-this-name/w.safetensors")
        assert f"{key}: ~nobody-has-this-name/w.safetensors: the home folder is unknown" in line
    assert not [*(no_home / "here").iterdir()]


@pytest.mark.slow
def test_without_a_home_folder_and_with_folders_that_are_set(folder, no_home, capfd):
    folders = {"data.root": folder / "data", "encoder.weights": folder / "w.safetensors"}
    folders |= {"output.dir": no_home / "out", "features.dir": no_home / "cache"}
    overrides = [f"{key}={path}" for key, path in folders.items()]
    with of_a_user():
        for verb in ("validate", "features", "run", "doctor"):
            assert main([verb, str(folder / "small.yaml"), *overrides]) == 0
    assert "Traceback" not in capfd.readouterr().err
    assert not [*(no_home / "here").iterdir()]


def test_a_current_folder_that_is_gone(tmp_path):
    code = "import os, sys; os.rmdir(os.getcwd()); from xdm_ft.__main__ import main; sys.exit(main(['ls']))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    line = "xdm-ft: the current folder cannot be used (No such file or directory); change to another one\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
