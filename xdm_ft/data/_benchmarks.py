"""DomainBed's data sets as its download script lays them out: `<data set>/<domain>/<class>/<image>`."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from xdm_ft.data import ImageDataset
from xdm_ft.data._files import ImageFiles, numbered
from xdm_ft.data._images import NAMED_AT_MOST, printable
from xdm_ft.data._trees import images_below
from xdm_ft.errors import UserError

logger = logging.getLogger("xdm_ft")

Root = Annotated[Path, Field(description="folder that holds the data set's own folder, or that folder itself")]
Counts = Annotated[
    Literal["published", "any"],
    Field(
        description="number of images per domain of DomainBed's data sets: as published, or it is an error; any: only "
        "a warning"
    ),
]


class BenchmarkFolders(ImageFiles):
    """One of the five. Domains, their order and so the seeds of DomainBed's splits are DomainBed's.

    Raises `UserError` that names what differs from the published data, unless `counts` is any.
    """

    folder_order = True
    train_augmentation = "domainbed"

    folder_names: ClassVar[tuple[str, ...]]
    """What the folder is called, DomainBed's name first. Case and punctuation do not matter, here and below."""
    domain_folders: ClassVar[Mapping[str, tuple[str, ...]]]
    """Domain, in DomainBed's order → other names of its folder."""
    published: ClassVar[Mapping[str, tuple[int, ...]]]
    """Edition → images per domain, in the order of the domains. The first is the one that DomainBed downloads."""

    base: Path
    """The folder that holds the domains."""

    def __init__(self, *, root: Root, counts: Counts = "published") -> None:
        self.base = base = self._find(root.expanduser())
        folder_of = self._domains(base)
        images, _ = images_below(base)
        by_folder: dict[str, list[str]] = {folder: [] for folder in folder_of.values()}
        for path in images:
            by_folder.get(path.partition("/")[0], []).append(path)
        present = [domain for domain in self.domain_folders if domain in folder_of and by_folder[folder_of[domain]]]
        parts = [by_folder[folder_of[domain]] for domain in present]
        paths = [path for part in parts for path in part]
        self.paths = [os.path.join(os.path.abspath(base), path) for path in paths]
        self.shown = [os.path.join(base, path) for path in paths]
        self.domain_names = tuple(present)
        self.domains = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        self.class_names, self.labels = numbered([path.split("/")[1] for path in paths])
        self.as_published = check_counts(type(self), self, printable(base), counts)

    @classmethod
    def _find(cls, root: Path) -> Path:
        """The folder that holds the domains: `root` or a folder in it."""
        if not root.is_dir():
            problem = "is no folder" if root.exists() else "does not exist"
            raise UserError(f"data.root: {printable(root)} {problem}; {cls._remedy()}")
        if len(cls._domains(root)) >= 2:  # one folder may be called so by chance
            return root
        names = {_plain(name) for name in cls.folder_names}
        inside = [folder for folder in _subfolders(root) if _plain(folder.name) in names]
        inside += [deeper for folder in inside for deeper in _subfolders(folder) if _plain(deeper.name) in names]
        holding = [folder for folder in inside if cls._domains(folder)]
        if not holding:
            domains = ", ".join(cls.domain_folders)
            raise UserError(
                f"data.root: {printable(root)} holds neither {cls.folder_names[0]}/ with the domains {domains} nor "
                f"these themselves; {cls._remedy()}"
            )
        if len(holding) > 1:
            both = " and ".join(printable(folder) for folder in holding[:2])
            raise UserError(f"data.root: both {both} hold the data; name the one that is meant")
        return holding[0]

    @classmethod
    def _remedy(cls) -> str:
        return (
            "download the data by DomainBed's `python -m domainbed.scripts.download --data_dir DIR` and set data.root "
            "to DIR, or read them from the Hugging Face hub with data.name: hub"
        )

    @classmethod
    def canonical(cls, name: str) -> str | None:
        """What DomainBed calls the domain of this name."""
        for domain, others in cls.domain_folders.items():
            if _plain(name) in map(_plain, (domain, *others)):
                return domain
        return None

    @classmethod
    def _domains(cls, base: Path) -> dict[str, str]:
        """Domain → its folder in `base`, for the domains that have one."""
        found: dict[str, str] = {}
        for folder in _subfolders(base):
            domain = cls.canonical(folder.name)
            if domain is not None and domain in found:
                raise UserError(
                    f"data.root: {printable(base)}: both {printable(found[domain])}/ and {printable(folder.name)}/ "
                    f"are {domain}; remove one"
                )
            if domain is not None:
                found[domain] = folder.name
        return found


def check_counts(
    benchmark: type[BenchmarkFolders], dataset: ImageDataset, where: str, counts: Literal["published", "any"]
) -> bool:
    """Whether the data set holds what was published. Raises `UserError` that names what differs, or warns of it."""
    images = np.zeros((len(dataset.domain_names), len(dataset.class_names)), np.int64)
    np.add.at(images, (dataset.domains, dataset.labels), 1)
    per_domain = dict(zip(dataset.domain_names, images.sum(1).tolist(), strict=True))
    found = tuple(per_domain.get(domain, 0) for domain in benchmark.domain_folders)
    strangers = [domain for domain in per_domain if domain not in benchmark.domain_folders]
    edition = next((name for name, published in benchmark.published.items() if published == found), None)
    if edition is not None and not strangers:
        logger.info("%s: complete (%s)", where, edition)
        return True
    (name, published), *others = benchmark.published.items()
    differing = [
        f"{domain}: {n} of {expected} images" if n else f"{domain}: missing"
        for domain, n, expected in zip(benchmark.domain_folders, found, published, strict=True)
        if n != expected
    ]
    differing += [f"{domain}: no domain of it" for domain in strangers]
    lacking = [
        f"no {dataset.class_names[c]} in {dataset.domain_names[d]}" for d, c in np.argwhere(images == 0).tolist()
    ]
    if len(lacking) > NAMED_AT_MOST:
        lacking[NAMED_AT_MOST:] = [f"and {len(lacking) - NAMED_AT_MOST} more classes missing from a domain"]
    fault = f"data: {where} is not {name}: {', '.join([*differing, *lacking])}"
    if others:
        fault += f" (nor {', '.join(other for other, _ in others)})"
    if counts == "published" or len(per_domain) < 2:
        raise UserError(f"{fault}; complete the data, or set data.counts: any")
    logger.warning("%s", fault)
    return False


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"data.root: {printable(folder)} can not be read: {error.strerror}") from error
