"""Camelyon17 of WILDS: tumours in lymph node tissue, from five hospitals."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from xdm_ft.data._wilds_release import Download, WildsRoot, open_release
from xdm_ft.image_files.files import ImageFiles, index_names
from xdm_ft.runtime.errors import UserError, printable


class Camelyon17(ImageFiles):
    """455,954 patches of 96 × 96 px (Bandi et al. 2018; Koh et al. 2021), domains: hospitals as WILDS numbers them.

    Groups are patients; some have several slides. WILDS' official split: hospitals 0, 3 and 4 train, hospital 1
    validates (`val_domain`), hospital 2 tests. The validation part of the training hospitals (`train_val`, WILDS'
    id_val) shows patients that are also trained on.
    """

    def __init__(self, *, root: WildsRoot = Path("data"), download: Download = False) -> None:
        release = open_release("camelyon17", "Camelyon17Dataset", root, download)
        columns = {name: i for i, name in enumerate(release.metadata_fields)}
        metadata = release.metadata_array.numpy()
        self.class_names = ("normal tissue", "tumor tissue")
        self.domain_names = tuple(f"hospital {number}" for number in range(5))
        self.labels = release.y_array.numpy()
        self.domains = metadata[:, columns["hospital"]]
        patients = release._metadata_df["patient"]
        if empty := [row for row, is_empty in enumerate(patients.isna(), start=2) if is_empty]:
            file = printable(os.path.join(release.data_dir, "metadata.csv"))
            raise UserError(f"{file}: row {empty[0]}, column patient: the cell is empty; fill it in")
        # from its table, as WILDS' metadata array has slides alone, of which a patient may have several
        self.groups = index_names(patients.tolist())[1]
        part = {"train": "train", "id_val": "train_val", "val": "val_domain", "test": "test"}
        names = {number: part[name] for name, number in release.split_dict.items()}
        self.splits = np.array([names[number] for number in release.split_array])
        self.as_published = True
        self.base = release.data_dir
        self.shown = [os.path.join(self.base, path) for path in release._input_array]
        self.paths = [os.path.abspath(path) for path in self.shown]
