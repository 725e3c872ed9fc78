"""Writes miniatures of the seven data sets in their real layouts on disk: dozens of generated images each."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image

from xdm_ft.recipe import components

CLASSES = {
    "pacs": ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
    "vlcs": ("bird", "car", "chair", "dog", "person"),
    "officehome": ("Alarm_Clock", "Backpack", "Batteries"),
    "terraincognita": ("bird", "bobcat", "empty"),
    "domainnet": ("aircraft_carrier", "airplane", "train", "zigzag"),
}


def save(path: Path, label: int, domain: int, number: int, side: int = 40) -> None:
    """Writes an image that no other arguments give: its brightness depends on the class, its colour on the domain."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng([label, domain, number]).integers(0, 60, (side, side, 3))
    noise += np.array([30 * label % 150, 40 * domain % 180, 90])
    Image.fromarray(noise.astype(np.uint8)).save(path)


BESIDE = {  # what lies beside the domains in the archives, and what file systems and the lists of splits add
    "pacs": (".DS_Store", "__MACOSX/PACS/photo/dog/._0.png", "photo/dog/Thumbs.db"),
    "vlcs": ("Caltech101/desktop.ini",),
    "officehome": ("ImageInfo.csv", "imagelist.txt", "README.txt"),
    "terraincognita": ("._caltech_images_20210113.json",),
    "domainnet": ("clipart_train.txt", "clipart_test.txt", "splits/real_train.txt", "clipart.zip"),
}


def domainbed(root: Path, name: str, per_class: int = 4, suffix: str = ".png", beside: bool = False) -> Path:
    """Writes the tree of DomainBed's download script into a folder of `root`, with `BESIDE`. Returns that folder."""
    cls = components.find("data", name)
    base = root / cls.folder_names[0]
    for d, domain in enumerate(cls.domain_folders):
        for c, class_name in enumerate(CLASSES[name]):
            for i in range(per_class):
                save(base / domain / class_name / f"{i:03}{suffix}", c, d, i)
    for file in BESIDE[name] if beside else ():
        (base / file).parent.mkdir(parents=True, exist_ok=True)
        (base / file).write_bytes(b"\0\5\26\7")
    return base


def vlcs_of_jigendg(root: Path, per_class: int = 4) -> Path:
    """VLCS as JigenDG and Dassl pass it on: numbers for classes, parts of a split, and `full` is train and crossval."""
    base = root / "VLCS"
    for d, domain in enumerate(("CALTECH", "LABELME", "PASCAL", "SUN")):
        for label in range(5):
            for i in range(per_class):
                part = "test" if i == 0 else "crossval" if i == 1 else "train"
                for folder in {part, part if part == "test" else "full"}:
                    save(base / domain / folder / str(label) / f"{part}_imgs_{i}.png", label, d, i)
    return base


def features(file: Path, per_class: int = 8) -> Path:
    """Writes features that were computed elsewhere: two classes in three domains. Returns the file."""
    label, domain = np.divmod(np.repeat(np.arange(6), per_class), 3)
    z = np.random.default_rng(0).normal(size=(len(label), 5)) + label[:, None]
    np.savez(file, features=z, label=label, domain=domain)
    return file


def camelyon17(root: Path, per_slide: int = 4) -> Path:
    """Five slides of three patients per hospital; each slide has images that train and images that validate."""
    base = root / "camelyon17_v1.0"
    rows = []
    for slide in range(25):
        center, node = slide // 5, slide % 3
        patient = f"{3 * center + slide % 5 // 2:03}"
        for i in range(per_slide):
            tumor, x, y = i % 2, 100 * slide + i, 7 * i
            rows.append([len(rows), patient, node, x, y, tumor, slide, center, int(i >= per_slide - 2)])
            folder = base / "patches" / f"patient_{patient}_node_{node}"
            save(folder / f"patch_patient_{patient}_node_{node}_x_{x}_y_{y}.png", tumor, center, 100 * slide + i, 96)
    header = ["", "patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split"]
    _csv(base / "metadata.csv", header, rows)
    (base / "RELEASE_v1.0.txt").write_text("made\n")
    return base


COUNTRIES = {"USA": "Americas", "FRA": "Europe", "CHN": "Asia", "NGA": "Africa", "AUS": "Oceania"}  # others: Other


def fmow(root: Path, categories: tuple[str, ...] = ("airport", "multi-unit_residential", "zoo")) -> Path:
    """Every category in every region, in years of training, validation and test, with sequestered rows between them.

    In every other region the images of a category before 2017 show one place; all other places have one image.
    """
    base = root / "fmow_v1.1"
    places = [("train", 2002), ("train", 2012), ("val", 2010), ("test", 2011), ("seq", 2016)]
    places += [("val", 2014), ("test", 2016), ("test", 2017)]
    rows = []
    for split, year in places:
        for region, country in enumerate(["FRA", "CHN", "XXX", "USA", "NGA", "AUS"]):
            for c, category in enumerate(categories):
                # of the release's 523,846 times about 2,700 have milliseconds, and none of the first 92
                timestamp = f"{year}-0{1 + c}-1{region}T10:30:00{'.643' if region == 4 else ''}Z"
                save(base / "images" / f"rgb_img_{len(rows)}.png", c, region, len(rows), 224)
                again = region % 2 == 0 and year < 2017
                lat, lon = 10.25 + region, c - 3.5 if again else c + year / 10_000
                rows.append([split, category, country, timestamp, lat, lon])
    _csv(base / "rgb_metadata.csv", ["split", "category", "country_code", "timestamp", "lat", "lon"], rows)
    pairs = [*COUNTRIES.items(), ("ATA", "")]  # Antarctica has none
    _csv(base / "country_code_mapping.csv", ["alpha-3", "region"], [list(pair) for pair in pairs])
    (base / "RELEASE_v1.1.txt").write_text("made\n")
    return base


def _csv(path: Path, header: list[str], rows: list[list[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
