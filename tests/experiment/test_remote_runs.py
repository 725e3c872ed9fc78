"""Whole runs on images that lie on a server give what runs on the same files of this machine give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from encoded_images import write_parquet
from object_store import object_store
from range_server import served
from small_runs import results

from xdm_ft.cli.parser import main


def scores(found: dict[str, Any]) -> list[Any]:
    assert found["runs"]
    return [
        (one["method"], one["test_domains"], one["seed"], one["selected"]["train_val"]["metrics"])
        for one in found["runs"]
    ]


@pytest.fixture(autouse=True)
def in_a_folder_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDM_FT_CACHE", str(tmp_path / "indexes"))
    for number in range(3):
        write_parquet(tmp_path / "data" / f"{number}.parquet", range(24 * number, 24 * number + 24), 10)


@pytest.mark.slow
@pytest.mark.parametrize("trainable", ["false", "true"])
def test_a_run_on_remote_data(trainable: str, tmp_path: Path) -> None:
    changes = [f"encoder.trainable={trainable}", "methods=[erm]", "protocol.test_domains=photo"]
    local = results("data={name: parquet, file: data}", "output.dir=local", *changes)
    with served(tmp_path / "data") as server:
        data = f"data={{name: parquet, file: '{server.address}', cache_mb: 1}}"
        found = results(data, "output.dir=remote", "features.dir=cache2", *changes)
        assert scores(found) == scores(local)
        server.requests.clear()
        results(data, "output.dir=again", "features.dir=cache2", *changes)
        if trainable == "false":
            assert {method for method, *_ in server.requests} == {"HEAD"}, "a warm start opens no file"
        server.status = 500
        assert main(["validate", "small.yaml", data]) == 2


@pytest.mark.slow
@pytest.mark.needs("moto", "s3fs")
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_on_an_object_store(workers: str, tmp_path: Path) -> None:
    """The libraries behind `s3://` run threads and a loop of events: worker processes are forked all the same."""
    changes = ["methods=[erm]", "protocol.test_domains=photo"]
    local = results("data={name: parquet, file: data}", "output.dir=local", *changes)
    with object_store() as bucket:
        bucket.upload(tmp_path / "data")
        data = f"data={{name: parquet, file: '{bucket.address}'}}"
        own = [f"features.workers={workers}", "output.dir=remote", "features.dir=cache2"]
        assert scores(results(data, *own, *changes)) == scores(local)
