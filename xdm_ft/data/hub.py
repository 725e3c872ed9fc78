"""Any image data set on the Hugging Face hub that has a column for the domain."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from xdm_ft.data.domainnet import DomainNet
from xdm_ft.data.officehome import OfficeHome
from xdm_ft.data.pacs import Pacs
from xdm_ft.image_files.domainbed import BenchmarkFolders, Counts, check_counts
from xdm_ft.image_files.remote import hub
from xdm_ft.image_files.tables import OWN_COLUMNS, Columns, ImageTable, load
from xdm_ft.runtime.errors import UserError

KNOWN: dict[str, tuple[str, type[BenchmarkFolders]]] = {
    "pacs": ("flwrlabs/pacs", Pacs),
    "officehome": ("flwrlabs/office-home", OfficeHome),
    "domainnet": ("wltjr1007/DomainNet", DomainNet),
}
"""DomainBed's data sets that are known to be on the hub; their columns have the default names of `Columns`.

From their pages and from code that uses them, not from a download: flwrlabs/pacs and flwrlabs/office-home have one
split `train` each, of all 9,991 and 15,588 images, with domains as text; wltjr1007/DomainNet has `train` and `test` of
409,832 and 176,743 images, 586,575 in all.
"""
UNKNOWN = ("vlcs", "terraincognita")
"""Repositories with similar names are undocumented, archives, or other data (BGLab/TerraIncognita: insects)."""


class Hub(ImageTable):
    """All splits of a repository, one after the other. pacs, officehome and domainnet stand for known repositories.

    The data are downloaded once into the cache of `datasets` (HF_HOME). Images are not unpacked to files.
    """

    def __init__(
        self,
        *,
        repository: Annotated[
            str, Field(min_length=1, description="ORGANISATION/NAME on the hub; or pacs, officehome, domainnet")
        ],
        revision: Annotated[str | None, Field(description="commit or tag to read; null: the newest commit")] = None,
        configuration: Annotated[
            str | None, Field(description="configuration of the repository to read; null: its default")
        ] = None,
        columns: Annotated[Columns, Field(description="names of the columns")] = OWN_COLUMNS,
        use_splits: Annotated[
            bool,
            Field(description="true: use the repository's splits train, validation and test as the data's own split"),
        ] = False,
        counts: Counts = "published",
    ) -> None:
        from datasets import load_dataset

        if repository in UNKNOWN:
            raise UserError(
                f"data.repository: {repository} has no repository on the hub that is known here; give "
                f"ORGANISATION/NAME, or set data.name: {repository} to read DomainBed's folders"
            )
        name = KNOWN[repository][0] if repository in KNOWN else repository
        source = f"{name} on the hub"
        remedy = (
            f"check data.repository and the network, or run `hf download --repo-type dataset {name}` on a machine "
            "with a network, copy its cache folder (HF_HOME) here and set HF_HUB_OFFLINE=1; or read files (data.name: "
            "parquet)"
        )
        with hub():
            parts = load(
                lambda: load_dataset(name, configuration, revision=revision, keep_in_memory=False), source, remedy
            )
        self._fill(parts, columns, source, use_splits)
        if repository in KNOWN:
            benchmark = KNOWN[repository][1]  # whose names and order of domains it gets
            names = [benchmark.canonical(name) or name for name in self.domain_names]
            ranks = [*benchmark.domain_folders, *names]  # domains that DomainBed does not have come last
            order = sorted(range(len(names)), key=lambda number: ranks.index(names[number]))
            self.domain_names = tuple(names[number] for number in order)
            self.domains = np.argsort(order)[self.domains]  # argsort inverts the permutation: old number → new number
            self.as_published = check_counts(benchmark, self, self.where, counts)
