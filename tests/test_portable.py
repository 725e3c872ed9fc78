"""What a site runs needs nothing that only Linux has, and its requirements are those of the package."""

import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import miniature
import pytest
import small_runs
from packaging.requirements import Requirement

from xdm_ft import UserError, load
from xdm_ft.cli import parser
from xdm_ft.cli.export import export_model
from xdm_ft.export import sources
from xdm_ft.export.choose import Choice

ROOT = Path(__file__).resolve().parents[1]


def made_model():
    miniature.domainbed(Path("data"), "pacs", per_class=8)
    small_runs.results("protocol.test_domains=[photo]", "training.steps=60", "methods=[erm]")
    export_model("output/small", "model", Choice("erm", ("photo",)))


def run_verbs(folder, *arguments):
    environment = os.environ | {"XDM_FT_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-X", "warn_default_encoding", str(ROOT / "tests/without_posix.py"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_the_verbs_of_a_site_give_the_same_where_posix_is_taken_away(made_once, tmp_path):
    made, printed = made_once("portable", made_model), {}
    for name, arguments in (("here", ()), ("desk", ("taken",))):
        shutil.copytree(made / "model", tmp_path / name / "model")
        shutil.copytree(made / "data/PACS/photo", tmp_path / name / "site")
        printed[name] = run_verbs(tmp_path / name, *arguments)
    assert printed["desk"][0] == printed["here"][0] and printed["here"][0].count("$ ") == 9
    assert not re.search(r"xdm_ft\S+ EncodingWarning", printed["here"][1])
    files = {
        name: {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file() and "cache" not in path.parts
        }
        for name in printed
    }
    assert files["desk"] == files["here"]
    assert {"probabilities.npy", "predictions.csv", "sheet.html", "adapted.npy"} <= {
        str(path) for path in files["desk"]
    }


@pytest.mark.slow
def test_the_gpu_of_a_mac_is_taken_where_there_is_no_other(made_once, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    with pytest.raises(UserError, match=r"device: mps cannot be used .*; use cpu, cuda or mps"):
        load(made_once("portable", made_model) / "model")


def test_a_package_that_is_missing_is_a_line(monkeypatch, capsys):
    def needs_more(arguments):
        raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")

    monkeypatch.setattr("xdm_ft.cli.ls.main", needs_more)
    assert parser.main(["ls"]) == 2
    line = "xdm-ft: pyarrow is not installed; install all that the package needs: pip install xdm_ft\n"
    assert capsys.readouterr().err == line


def test_a_glob_and_a_group_may_be_of_windows_paths(tmp_path, monkeypatch):
    (tmp_path / "site/dog").mkdir(parents=True)
    (tmp_path / "site/dog/1.png").touch()
    monkeypatch.setattr(sources.os, "sep", "\\")
    given = sources.Sources([f"{tmp_path}\\site\\*\\*.png"], "site/([^/]+)/")
    [item] = given
    assert item.group == "dog" and item.path == str(tmp_path / "site/dog/1.png")
    assert given.with_group(sources.Item("site\\cat\\2.png", b"")).group == "cat"


def test_text_files_are_utf_8_on_every_system():
    """Windows opens them in a code page of its country, unless the encoding is given."""
    without, calls = [], 0
    for path in sorted((ROOT / "xdm_ft").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name != "open" and not name.endswith((".open", ".read_text", ".write_text", ".fdopen")):
                continue
            with contextlib.suppress(StopIteration):  # a binary mode
                modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                next(mode for mode in modes if re.fullmatch("[rwxa+]*b[rwxa+]*|r:", mode))
                continue
            if name in OTHER or name.endswith(METHODS):
                continue
            calls += 1
            if "encoding" not in {key.arg for key in node.keywords}:
                without.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert calls > 20 and not without, without


# open no text: images, tar files, stores of features, members of archives
OTHER = {"Image.open", "os.open", "tarfile.open", "content.open", "self.open", "store.open", "webbrowser.open"}
METHODS = ("directory.write_text",)


def test_a_site_needs_the_versions_of_the_package():
    with (ROOT / "pyproject.toml").open("rb") as file:
        document = tomllib.load(file)
    package = {Requirement(line).name: Requirement(line) for line in document["project"]["dependencies"]}
    lines = (ROOT / "requirements-site.txt").read_text(encoding="utf-8").splitlines()
    site = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert len(site) > 8 and all(package[needed.name] == needed for needed in site)
    assert "requirements-site.txt" in document["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
