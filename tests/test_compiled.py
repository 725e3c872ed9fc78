"""Compiling on demand: found again, safe against others, and no fault where it can not be."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch

from xdm_ft import compiled

COMPILER = pytest.mark.skipif(
    not any(shutil.which(name) for name in compiled.COMPILERS), reason="there is no C compiler"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "xdm_ft" / "compiled"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "sum.c"
    path.write_text(
        "#include <stdint.h>\n"
        "int add(int64_t first, int64_t last, const float *a, float b, float *out)"
        "{ for (int64_t k = first; k < last; k++) out[k] = a[k] + b; return first == 0 ? 0 : 3; }\n"
    )
    return path


@COMPILER
def test_compiled_once_and_anew_for_another_text(source: Path, own_cache: Path) -> None:
    first = compiled.compiled(source)
    assert first.parent == own_cache
    assert own_cache.stat().st_mode & 0o777 == 0o700
    time = first.stat().st_mtime_ns
    assert compiled.compiled(source) == first
    assert first.stat().st_mtime_ns == time
    source.write_text(source.read_text() + "/* changed */\n")
    assert compiled.compiled(source) != first
    assert len(list(own_cache.iterdir())) == 2  # and no temporary files


@COMPILER
def test_items_are_shared_between_threads(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compiled.library(source)
    assert library is not None
    library.add.argtypes = [ctypes.c_int64] * 2 + [ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p]
    before, a, out = torch.get_num_threads(), torch.randn(1000), torch.empty(1000)
    try:
        torch.set_num_threads(3)
        assert compiled.share(library.add, 1000, 1, a, 2.0, out) == {0}, "too little for threads"
        monkeypatch.setattr(compiled, "ELEMENTS_PER_THREAD", 10)
        assert compiled.share(library.add, 1000, 1, a, 2.0, out.zero_()) == {0, 3}
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, a + 2)


@COMPILER
def test_processes_that_compile_at_once(source: Path, own_cache: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        paths = pool.map(compiled.compiled, [source] * 3)
    assert len(set(paths)) == 1
    assert [path.name for path in own_cache.iterdir()] == [paths[0].name]


@pytest.mark.parametrize("broken", ["none", "fails", "source", "folder"])
def test_without_it_the_reason_is_logged_once(
    broken: str, source: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if broken == "none":
        monkeypatch.setenv("CC", "no-such-compiler")
    elif broken == "fails":
        monkeypatch.setenv("CC", "false")
    elif not any(shutil.which(name) for name in compiled.COMPILERS):
        pytest.skip("there is no C compiler")
    elif broken == "source":
        source.write_text("int add(")
    else:
        own_cache.mkdir(parents=True)
        own_cache.chmod(0o777)
    with caplog.at_level(logging.INFO, logger="xdm_ft"):
        assert compiled.library(source) is None
        assert compiled.library(source) is None
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    expected = {"none": "no-such-compiler", "fails": "exits with 1", "source": "error", "folder": "remove it"}[broken]
    assert expected in record.getMessage()
