"""Data at `s3://` addresses: the same images as on the disk, changes are noticed, faults in a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from encoded_images import same, write_parquet, write_tar
from object_store import Bucket, object_store

from xdm_ft.data.parquet import Parquet
from xdm_ft.data.webdataset import WebDataset
from xdm_ft.features.hashes import hash_files
from xdm_ft.image_files import remote
from xdm_ft.image_files.tables import Columns, Keys
from xdm_ft.runtime.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.needs("moto", "s3fs"), pytest.mark.usefixtures("own_cache")]


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with object_store() as found:
        yield found


def test_parquet_files_and_tars(bucket: Bucket, tmp_path: Path) -> None:
    for number in range(2):
        write_parquet(tmp_path / "data/sites" / f"{number}.parquet", range(50 * number, 50 * number + 50), 20)
        write_tar(tmp_path / "data/tars" / f"{number:03d}.tar", range(30 * number, 30 * number + 30), about=True)
    bucket.upload(tmp_path / "data")
    columns, keys = Columns(group="group"), Keys(domain="domain", group="group")
    for address in ("sites", "sites/*.parquet"):
        local = Parquet(file=tmp_path / "data/sites", columns=columns)
        same(Parquet(file=f"{bucket.address}/{address}", columns=columns), local)
    for address in ("tars", "tars/*.tar", "tars/{000..001}.tar"):
        local = WebDataset(file=tmp_path / "data/tars", keys=keys)
        same(WebDataset(file=f"{bucket.address}/{address}", keys=keys), local)
    found = Parquet(file=f"{bucket.address}/sites/1.parquet", columns=columns)
    assert found.name(3) == f"{bucket.address}/sites/1.parquet, row 3" and len(found) == 50


def test_an_object_that_is_replaced_is_hashed_again(bucket: Bucket, tmp_path: Path) -> None:
    path, address = tmp_path / "data/a.parquet", f"{bucket.address}/a.parquet"

    def hashed(numbers: range) -> np.ndarray:
        write_parquet(path, numbers, 20)
        bucket.upload(tmp_path / "data")
        return hash_files(Parquet(file=address), tmp_path / "cache", show=False).digests

    first = hashed(range(50))
    assert np.array_equal(hashed(range(50)), first) and (hashed(range(50, 100)) != first).any(1).all()
    assert np.array_equal(hash_files(Parquet(file=path), None, show=False).digests, hashed(range(50, 100)))


def test_faults(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "data/a.parquet", range(50), 20)
    bucket.upload(tmp_path / "data")
    for address in ("s3://nowhere/a.parquet", "s3://images/gone.parquet", "s3://nowhere", "s3://images/gone"):
        with pytest.raises(UserError, match=f"^{address}: does not exist; check the address$"):
            Parquet(file=address)
    data = Parquet(file=f"{bucket.address}/a.parquet")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    type(remote._system(data.name(0))[0]).clear_instance_cache()
    with pytest.raises(UserError, match=r"^s3://images/a.parquet: cannot be read in 3 attempts \("):
        Parquet(file=f"{bucket.address}/a.parquet")
