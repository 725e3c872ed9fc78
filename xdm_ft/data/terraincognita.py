"""Terra Incognita: wild animals in the pictures of four camera traps."""

from __future__ import annotations

import json
import logging
import os
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from xdm_ft.image_files.domainbed import BenchmarkFolders, Counts, Root
from xdm_ft.image_files.files import index_names
from xdm_ft.runtime.errors import UserError

logger = logging.getLogger("xdm_ft")


class TerraIncognita(BenchmarkFolders):
    """10 classes from 4 camera traps (Beery et al. 2018), under `terra_incognita/<location>/<class>/`.

    Groups are sequences, the frames of one passing animal, if the annotations of the source are in the same folder as
    the locations: `caltech_images_….json` or `eccv_18_annotation_files/` (COCO, with `seq_id`). DomainBed's script
    deletes them at its end.

    Counts: DomainBed's script makes 24,330 images; before its source changed it made 24,788, the number in papers, per
    location as in https://github.com/khanrc/miro/issues/9.
    """

    folder_names = ("terra_incognita",)
    # sorted as text, which is DomainBed's order
    domain_folders = {
        "location_100": ("L100", "100"),
        "location_38": ("L38", "38"),
        "location_43": ("L43", "43"),
        "location_46": ("L46", "46"),
    }
    published = {
        "Terra Incognita as DomainBed downloads it, 24,330 images": (4741, 9736, 3970, 5883),
        "Terra Incognita as DomainBed's paper has it, 24,788 images": (4879, 9767, 4020, 6122),
    }

    def __init__(
        self,
        *,
        root: Root,
        counts: Counts = "published",
        sequences: Annotated[
            Literal["group", "ignore"],
            Field(
                description="group: with annotations, no split divides a sequence; ignore: images count as "
                "independent, as in DomainBed's split"
            ),
        ] = "group",
    ) -> None:
        super().__init__(root=root, counts=counts)
        if sequences == "group":
            self.groups = self._sequences()

    def _sequences(self) -> np.ndarray | None:
        """Returns the number of each image's sequence, int64 [N]; None without annotations."""
        sequence_of: dict[str, str] = {}
        for file in sorted([*self.base.glob("[!.]*.json"), *self.base.glob("eccv_18_annotation_files/[!.]*.json")]):
            try:
                for image in json.loads(file.read_bytes())["images"]:  # of COCO
                    if "seq_id" in image:
                        sequence_of[os.path.basename(image["file_name"])] = str(image["seq_id"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"data.root: {file} contains no annotations of camera traps ({type(error).__name__}: "
                    f"{error}); repair or remove it, or set data.sequences: ignore"
                ) from error
        names = [os.path.basename(path) for path in self.paths]
        unknown = sum(name not in sequence_of for name in names)
        if unknown == len(names):
            return None
        if unknown:
            logger.warning("%s: %d of %d images have no seq_id", self.base, unknown, len(names))
        # an image without seq_id is a sequence of its own
        return index_names([sequence_of.get(name, f"of its own: {name}") for name in names])[1]
