"""Whether `xdm-ft audit` names a tint that goes with the class, planted into photographs and drawings of PACS.

    python benchmarks/audit_facts.py --root DIR      DIR has PACS as domain/class/image; two minutes

100 images per domain and class. Each site has a tint of its own: one channel is multiplied by 1 + strength, another by
1 − strength. 80% of the images of the first three classes have it, and 20% of the others. A row shows, for each
domain, how well facts alone predict the class (chance: 14%), and `*` where that is a finding. Strength 0 is PACS.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from new_site import subset
from PIL import Image

from xdm_ft.audit.facts import facts_findings
from xdm_ft.data.folder import Folder
from xdm_ft.images import ImageDataset
from xdm_ft.images.facts import image_facts
from xdm_ft.runtime.machine import own_cores

STRENGTHS = (0.0, 0.05, 0.1, 0.2)
TINTS = np.array([[1, 0, -1], [-1, 1, 0], [0, -1, 1], [1, -1, 0]])  # of each domain, by channel
SHOWN = ("lightest colour", "colour", "all")


class Tinted(ImageDataset):
    """Some images of a data set, in memory; `tinted` says which have their site's tint."""

    def __init__(self, pixels: np.ndarray, data: ImageDataset, rows: np.ndarray, tinted: np.ndarray, strength: float):
        self.class_names, self.domain_names = data.class_names, data.domain_names
        self.labels, self.domains = data.labels[rows], data.domains[rows]
        factors = np.where(tinted[:, None], 1 + strength * TINTS[self.domains], 1.0)
        self.pixels = (pixels * factors[:, None, None, :]).round().clip(0, 255).astype(np.uint8)

    def image(self, row: int) -> Image.Image:
        return Image.fromarray(self.pixels[row])

    def name(self, row: int) -> str:
        return f"row {row}"

    def content(self, row: int) -> bytes:
        return self.pixels[row].tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--per-cell", type=int, default=100)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(own_cores()) as pool:
        subset(arguments.root, Path(folder, "images"), arguments.per_cell)
        data = Folder(root=Path(folder, "images"))
        rows = np.arange(len(data))
        images = pool.map(lambda row: np.asarray(data.image(row).resize((64, 64))), rows.tolist())
        pixels = np.stack(list(images))
    tinted = np.random.default_rng(0).random(len(rows)) < np.where(data.labels[rows] < 3, 0.8, 0.2)
    print("| strength | facts |", " | ".join(data.domain_names), "|")
    print("|---|---|" + "---|" * len(data.domain_names))
    for strength in STRENGTHS:
        made = Tinted(pixels, data, rows, tinted, strength)
        facts = image_facts(made, np.arange(len(rows)), show=False)
        findings = facts_findings(facts, made.labels, made.domains, made.domain_names)
        for name in SHOWN:
            of_class = {row.domain: row for row in findings if row.facts == name and row.predicts == "class"}
            shown = {domain: f"{100 * row.accuracy:.0f}%{'*' * row.found}" for domain, row in of_class.items()}
            cells = [shown.get(domain, "all equal") for domain in made.domain_names]
            print(f"| {strength} | {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
