"""Data at `s3://` addresses: the same images as on the disk, changes are noticed, faults in a line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from encoded_images import same, write_parquet, write_tar
from object_store import object_store

from xdm_ft.data.parquet import Parquet
from xdm_ft.data.webdataset import WebDataset
from xdm_ft.features.hashes import hash_files
from xdm_ft.image_files.tables import Columns, Keys
from xdm_ft.runtime.errors import UserError


@pytest.mark.slow
@pytest.mark.needs("moto", "s3fs")
@pytest.mark.usefixtures("own_cache")
def test_parquet_files_and_tars_in_a_bucket(tmp_path: Path) -> None:
    data, columns, keys = tmp_path / "data", Columns(group="group"), Keys(domain="domain", group="group")
    for number in range(2):
        write_parquet(data / "sites" / f"{number}.parquet", range(20 * number, 20 * number + 20), 10)
        write_tar(data / "tars" / f"{number:03d}.tar", range(10 * number, 10 * number + 10), about=True)
    with object_store() as bucket:
        bucket.upload(data)
        for address in ("sites", "sites/*.parquet"):
            same(
                Parquet(file=f"{bucket.address}/{address}", columns=columns),
                Parquet(file=data / "sites", columns=columns),
            )
        for address in ("tars", "tars/{000..001}.tar"):
            same(WebDataset(file=f"{bucket.address}/{address}", keys=keys), WebDataset(file=data / "tars", keys=keys))
        one = f"{bucket.address}/sites/1.parquet"
        found = Parquet(file=one, columns=columns)
        assert found.name(3) == f"{one}, row 3" and len(found) == 20
        first = hash_files(found, tmp_path / "cache", show=False).digests
        assert np.array_equal(hash_files(Parquet(file=one), tmp_path / "cache", show=False).digests, first)
        write_parquet(data / "sites/1.parquet", range(50, 70), 10)
        bucket.upload(data)
        replaced = hash_files(Parquet(file=one), tmp_path / "cache", show=False).digests
        assert (replaced != first).any(1).all(), "an object that is replaced is hashed again"
        for address in ("s3://nowhere/a.parquet", "s3://images/gone.parquet", "s3://nowhere", "s3://images/gone"):
            with pytest.raises(UserError, match=f"^{address}: does not exist; check the address$"):
                Parquet(file=address)
