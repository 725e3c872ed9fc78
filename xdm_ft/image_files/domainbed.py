"""DomainBed's data sets in the layout of its download script, `<data set>/<domain>/<class>/<image>`, and in others."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from xdm_ft.image_files.files import (
    ImageFiles,
    PathsBelow,
    describe_left_out,
    images_below,
    index_names,
    is_split,
    refuse_missing_folder,
    refuse_splits,
)
from xdm_ft.images import ImageDataset
from xdm_ft.images.decode import NAMED_AT_MOST
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.storage.names import expand_user

logger = logging.getLogger("xdm_ft")

Root = Annotated[Path, Field(description="the data set's own folder, or the folder that contains it")]
Counts = Annotated[
    Literal["published", "any"],
    Field(
        description="if a domain of a DomainBed data set does not have its published number of images: published: "
        "stop; any: warn only"
    ),
]


WRAPPERS = ("images", "raw_images")  # folders between that of a data set and its domains
REMEDY = (
    "download the data with DomainBed (`python -m domainbed.scripts.download --data_dir DIR`) and set data.root "
    "to DIR, or read them from the Hugging Face hub with data.name: hub"
)


class BenchmarkFolders(ImageFiles):
    """One of DomainBed's five data sets. Domains are in DomainBed's order, on which the seeds of its splits depend.

    Where a domain is divided, `<domain>/<train|val|test>/<class>`, all its parts are read; beside a part `full`, which
    repeats the others, only it and test. Raises `UserError` that names the differences from the published data, unless
    `counts` is any.
    """

    folder_order = True
    train_augmentation = "domainbed"

    folder_names: ClassVar[tuple[str, ...]]
    """Accepted names of the folder, DomainBed's first. Case and punctuation are ignored, here and below."""
    domain_folders: ClassVar[Mapping[str, tuple[str, ...]]]
    """Domain, in DomainBed's order → other accepted names of its folder."""
    published: ClassVar[Mapping[str, tuple[int, ...]]]
    """Edition → images per domain, in the order of the domains. DomainBed downloads the first edition."""

    numbered_classes: ClassVar[tuple[str, ...]] = ()
    """The classes in the order of their numbers, where a distribution's class folders are called 0, 1, …"""

    base: Path

    def __init__(self, *, root: Root, counts: Counts = "published") -> None:
        self.base = base = self._find(expand_user(root, "data.root"))
        folder_of = self._domains(base)
        tree = images_below(base)
        self.left_out = describe_left_out(base, tree, only=[*folder_of.values()])
        by_folder: dict[str, list[str]] = {folder: [] for folder in folder_of.values()}
        for path in tree.images:
            by_folder.get(path.partition("/")[0], []).append(path)
        present = [domain for domain in self.domain_folders if domain in folder_of and by_folder[folder_of[domain]]]
        divided = [self._is_divided(by_folder[folder_of[domain]]) for domain in present]
        parts = [
            self._undivided(by_folder[folder_of[domain]]) if is_divided else by_folder[folder_of[domain]]
            for domain, is_divided in zip(present, divided, strict=True)
        ]
        paths = [path for part in parts for path in part]
        self.paths, self.shown = PathsBelow(os.path.abspath(base), paths), PathsBelow(base, paths)
        self.domain_names = tuple(present)
        self.domains = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        classes = [path.split("/")[1 + divided[d]] for path, d in zip(paths, self.domains.tolist(), strict=True)]
        if set(classes) <= set(map(str, range(len(self.numbered_classes)))):
            classes = [self.numbered_classes[int(name)] for name in classes]
        self.class_names, self.labels = index_names(classes)
        whole = [path for is_divided, part in zip(divided, parts, strict=True) if not is_divided for path in part]
        refuse_splits(base, whole, (), self.class_names)
        self.as_published = check_counts(type(self), self, printable(base), counts)

    @staticmethod
    def _is_divided(paths: list[str]) -> bool:
        """Returns whether the folders of a domain are the parts of a split, with folders of classes in them."""
        return all(is_split(path.split("/")[1]) and path.count("/") > 2 for path in paths)

    def _undivided(self, paths: list[str]) -> list[str]:
        """Returns the images of a divided domain, each once."""
        folders = sorted({path.split("/")[1] for path in paths})
        repeats = "full" in map(str.casefold, folders)
        read = [name for name in folders if not repeats or name.casefold() in ("full", "test")]
        ignored = f"; ignored {', '.join(sorted({*folders} - {*read}))}, which full repeats" if read != folders else ""
        domain = paths[0].split("/")[0]
        logger.info("%s: the images of domain %s are those of %s%s", self.base, domain, ", ".join(read), ignored)
        return [path for path in paths if path.split("/")[1] in read]

    @classmethod
    def _find(cls, root: Path) -> Path:
        """Returns the folder that contains the domains: `root`, a folder in it, or one level deeper."""
        refuse_missing_folder(root, REMEDY)
        if len(cls._domains(root)) >= 2:  # a single folder may have the name of a domain by chance
            return root
        names = {_plain(name) for name in (*cls.folder_names, *WRAPPERS)}
        inside = [folder for folder in _subfolders(root) if _plain(folder.name) in names]
        inside += [deeper for folder in inside for deeper in _subfolders(folder) if _plain(deeper.name) in names]
        bases = [folder for folder in inside if cls._domains(folder)]
        if not bases:
            domains = ", ".join(cls.domain_folders)
            raise UserError(
                f"data.root: {root} contains neither the folder {cls.folder_names[0]}/ nor the folders of "
                f"its domains ({domains}); {REMEDY}"
            )
        if len(bases) > 1:
            both = " and ".join(printable(folder) for folder in bases[:2])
            raise UserError(f"data.root: {root}: both {both} contain the data; set data.root to one of them")
        return bases[0]

    @classmethod
    def canonical(cls, name: str) -> str | None:
        """Returns DomainBed's name of the domain, None if `name` is not an accepted name."""
        for domain, others in cls.domain_folders.items():
            if _plain(name) in map(_plain, (domain, *others)):
                return domain
        return None

    @classmethod
    def _domains(cls, base: Path) -> dict[str, str]:
        """Returns {domain: name of its folder in `base`} for the domains that have a folder there."""
        folder_of: dict[str, str] = {}
        for folder in _subfolders(base):
            domain = cls.canonical(folder.name)
            if domain is None:
                continue
            if folder_of.setdefault(domain, folder.name) != folder.name:
                both = f"both {folder_of[domain]}/ and {folder.name}/"
                raise UserError(f"data.root: {base}: {both} contain the domain {domain}; remove one")
        return folder_of


def check_counts(
    benchmark: type[BenchmarkFolders], dataset: ImageDataset, source: str, counts: Literal["published", "any"]
) -> bool:
    """Returns whether the data set has the published images. Else warns of the differences or raises `UserError`."""
    images = np.zeros((len(dataset.domain_names), len(dataset.class_names)), np.int64)
    np.add.at(images, (dataset.domains, dataset.labels), 1)
    per_domain = dict(zip(dataset.domain_names, images.sum(1).tolist(), strict=True))
    counted = tuple(per_domain.get(domain, 0) for domain in benchmark.domain_folders)
    unknown = [domain for domain in per_domain if domain not in benchmark.domain_folders]
    for edition, published in benchmark.published.items():
        if published == counted and not unknown:
            logger.info("%s: complete (%s)", source, edition)
            return True
    (name, published), *others = benchmark.published.items()
    faults = [
        f"{domain}: {n} of {expected} images" if n else f"{domain}: missing"
        for domain, n, expected in zip(benchmark.domain_folders, counted, published, strict=True)
        if n != expected
    ]
    faults += [f"{domain}: not one of its domains" for domain in unknown]
    absent = np.argwhere(images == 0).tolist()  # classes that a domain lacks
    faults += [f"no {dataset.class_names[c]} in {dataset.domain_names[d]}" for d, c in absent[:NAMED_AT_MOST]]
    if len(absent) > NAMED_AT_MOST:
        faults.append(f"and {len(absent) - NAMED_AT_MOST} more classes missing from a domain")
    fault = f"data: {source} is not {name}: {', '.join(faults)}"
    if others:
        fault += f" (nor {', '.join(other for other, _ in others)})"
    if counts == "published" or len(per_domain) < 2:  # one domain cannot be both held out and trained on
        raise UserError(f"{fault}; complete the data, or accept the difference with data.counts: any")
    logger.warning("%s", fault)
    return False


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"data.root: {folder} cannot be read: {error.strerror}") from error
