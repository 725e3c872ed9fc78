"""Any image data set of the Hugging Face hub that has a column for the domain."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from xdm_ft.data._benchmarks import BenchmarkFolders, Counts, check_counts
from xdm_ft.data._image_tables import OWN_COLUMNS, Columns, ImageTable, load
from xdm_ft.data.domainnet import DomainNet
from xdm_ft.data.officehome import OfficeHome
from xdm_ft.data.pacs import Pacs
from xdm_ft.errors import UserError

KNOWN: dict[str, tuple[str, type[BenchmarkFolders]]] = {
    "pacs": ("flwrlabs/pacs", Pacs),
    "officehome": ("flwrlabs/office-home", OfficeHome),
    "domainnet": ("wltjr1007/DomainNet", DomainNet),
}
"""DomainBed's data sets that the hub is known to have; the columns of each are called as `Columns` has them.

Read off their pages and code that uses them, not downloaded: flwrlabs/pacs and flwrlabs/office-home are one split
`train` each, of all 9,991 and 15,588 images, with domains as text; wltjr1007/DomainNet is `train` and `test` of 409,832
and 176,743, 586,575 in all.
"""
UNKNOWN = ("vlcs", "terraincognita")
"""What the hub has under like names is undocumented, in archives, or other data (BGLab/TerraIncognita: insects)."""


class Hub(ImageTable):
    """All splits of a repository, one after the other. DomainBed's data sets go by their names: pacs, officehome, …

    Downloaded once into the cache of `datasets` (HF_HOME); images are never unpacked to files.
    """

    def __init__(
        self,
        *,
        repository: Annotated[
            str, Field(min_length=1, description="ORGANISATION/NAME on the hub; or pacs, officehome, domainnet")
        ],
        revision: Annotated[str | None, Field(description="commit or tag that is read; null: the newest")] = None,
        configuration: Annotated[
            str | None, Field(description="of those that the repository has; null: its own")
        ] = None,
        columns: Annotated[Columns, Field(description="which column holds what")] = OWN_COLUMNS,
        use_splits: Annotated[
            bool, Field(description="true: the repository's train, validation and test are those of the protocol")
        ] = False,
        counts: Counts = "published",
    ) -> None:
        from datasets import load_dataset

        if repository in UNKNOWN:
            raise UserError(
                f"data.repository: no repository of the hub is known for {repository}; give one as ORGANISATION/NAME, "
                f"or use data.name: {repository} on DomainBed's folders"
            )
        name = KNOWN[repository][0] if repository in KNOWN else repository
        where = f"{name} on the hub"
        remedy = (
            f"check data.repository and the network, or run `hf download --repo-type dataset {name}` where there is one"
        )
        found = load(lambda: load_dataset(name, configuration, revision=revision), where, remedy)
        self._take(found, columns, where, use_splits)
        if repository in KNOWN:
            self._as_in_domainbed(repository, counts)

    def _as_in_domainbed(self, repository: str, counts: Literal["published", "any"]) -> None:
        """Domains called and ordered as DomainBed's, and their images counted."""
        benchmark = KNOWN[repository][1]
        called = [benchmark.canonical(name) or name for name in self.domain_names]
        ranks = [*benchmark.domain_folders, *called]  # domains that DomainBed does not have come last
        order = sorted(range(len(called)), key=lambda number: ranks.index(called[number]))
        self.domain_names = tuple(called[number] for number in order)
        self.domains = np.argsort(order)[self.domains]
        self.as_published = check_counts(benchmark, self, self.where, counts)
