"""FMoW of WILDS: the use of buildings and land in satellite images, over years and regions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from xdm_ft.data._wilds_release import Download, WildsRoot, open_release
from xdm_ft.image_files.files import ImageFiles
from xdm_ft.runtime.errors import UserError, printable

if TYPE_CHECKING:
    from pandas import DataFrame

SPLIT_OF = {"train": "train", "id_val": "train_val", "val": "val_domain", "test": "test"}  # id_test is not used


class Fmow(ImageFiles):
    """Satellite images of 224 × 224 px, 62 classes (Christie et al. 2018; Koh et al. 2021), domains: region or year.

    WILDS' official split is by time: images before 2013 train (and `train_val`), 2013 to 2015 validate (`val_domain`),
    2016 and 2017 test. The same place may thus train and test. `worst_of` are the five regions for any kind of domain.
    'Other', which has few images, is not one of the five, but it trains and counts in averages. Groups are places,
    which are images of the same coordinates, if the metadata has the columns lat and lon.
    """

    def __init__(
        self,
        *,
        root: WildsRoot = Path("data"),
        download: Download = False,
        domains: Annotated[
            Literal["region", "year", "region_year"],
            Field(description="meaning of a domain; worst_domain_accuracy is over the five regions in each case"),
        ] = "region",
    ) -> None:
        release = open_release("fmow", "FMoWDataset", root, download, _mend)
        columns = {name: i for i, name in enumerate(release.metadata_fields)}
        metadata = release.metadata_array.numpy()
        region, year = metadata[:, columns["region"]], metadata[:, columns["year"]]
        regions, years = release.metadata_map["region"], release.metadata_map["year"]
        self.class_names = tuple(name.replace("_", " ") for name in release.category_to_idx)
        self.labels = release.y_array.numpy()
        names = {
            "region": lambda: np.array(regions)[region],
            "year": lambda: np.array([str(number) for number in years])[year],
            "region_year": lambda: np.array([f"{a} {b}" for a in regions for b in years])[region * len(years) + year],
        }[domains]()
        present, self.domains = np.unique(names, return_inverse=True)
        self.domain_names = tuple(present.tolist())
        self.worst_of = np.where(np.array(regions)[region] == "Other", -1, region)
        parts = {number: SPLIT_OF.get(name, "") for name, number in release.split_dict.items()} | {-1: ""}
        self.splits = np.array([parts[int(number)] for number in release.split_array])
        if {"lat", "lon"} <= set(release.metadata.columns):
            coordinates = release.metadata.loc[release.full_idxs, ["lat", "lon"]]
            located = coordinates.notna().all(axis=1).to_numpy()
            self.groups = np.arange(len(located)) + len(located)  # an image without coordinates is a place of its own
            places = np.unique(coordinates.to_numpy(np.float64)[located], axis=0, return_inverse=True)[1]
            self.groups[located] = places.reshape(-1)
        self.as_published = True
        self.base = release.data_dir
        self.shown = [os.path.join(self.base, "images", f"rgb_img_{i}.png") for i in release.full_idxs]
        self.paths = [os.path.abspath(path) for path in self.shown]


def _mend(file: Path, table: DataFrame) -> DataFrame:
    """Returns a table of the release as WILDS' code needs it: times as times, and no region that is empty.

    About 2,700 of the 523,846 times have milliseconds; WILDS' code takes the form of the first for that of all.
    """
    import pandas

    if "region" in table.columns:  # a country without one counts as Other, as does a country that is not listed
        return table.dropna(subset=["region"])
    if "timestamp" in table.columns:
        times = pandas.to_datetime(table["timestamp"], format="ISO8601", utc=True, errors="coerce")
        wrong = table.index[~times.dt.year.between(2002, 2017) & (table["split"] != "seq")]  # those are left out
        if len(wrong):
            raise UserError(
                f'{printable(file)}: row {wrong[0] + 2}, column timestamp: "{table["timestamp"][wrong[0]]}" is not a '
                f"time from 2002 to 2017 ({len(wrong)} such rows); write it as 2010-03-01T10:00:00Z"
            )
        return table.assign(timestamp=times)
    return table
