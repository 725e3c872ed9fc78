"""Wheel and sdist: what they hold, and that the demo runs from them without the repository."""

import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import xdm_ft

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}


def call(*words: object, folder: Path) -> str:
    environment = ENVIRONMENT | {"HOME": str(folder), "XDM_FT_CACHE": str(folder / "cache")}
    done = subprocess.run([*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_of_the_sdist_runs_the_demo(tmp_path: Path) -> None:
    """In a clean environment: of this one it sees the libraries, and not the editable install."""
    call(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, folder=ROOT)
    [sdist] = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    [source] = (tmp_path / "source").iterdir()
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "recipes", "tests", "docs"} <= {
        path.name for path in source.iterdir()
    }
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, folder=source)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"xdm_ft-{xdm_ft.__version__}-py3")
    held = set(zipfile.ZipFile(wheel).namelist())
    packaged = {path.relative_to(ROOT).as_posix() for path in (ROOT / "xdm_ft").rglob("*") if path.is_file()}
    missing = {name for name in packaged if "__pycache__" not in name} - held
    assert not missing, missing
    assert {f"xdm_ft/recipes/{path.name}" for path in (ROOT / "recipes").iterdir()} | {"xdm_ft/py.typed"} <= held

    clean = tmp_path / "clean"
    venv.create(clean, with_pip=True)
    python = clean / "bin" / "python"
    call(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, folder=tmp_path)
    [packages] = clean.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()))
    where = call(python, "-c", "import xdm_ft; print(xdm_ft.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(packages)
    printed = call(clean / "bin" / "xdm-ft", "run", "demo", "training.steps=20", "protocol.seeds=2", folder=tmp_path)
    assert "zero_shot" in printed and (tmp_path / "output/demo/report.html").exists()
