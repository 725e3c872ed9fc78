"""DomainBed's five data sets in miniature, in their layout on disk, with variants of their names; the real PACS."""

import json
import logging
import shutil
from pathlib import Path

import miniature
import numpy as np
import pytest
import torch

from xdm_ft.protocol.splits import Protocol, splits
from xdm_ft.recipe import components
from xdm_ft.runtime.errors import UserError

PACS = Path(__file__).resolve().parents[2] / ".." / "shared" / "assets" / "pacs"
TOTAL = {  # Gulrajani & Lopez-Paz 2021, §4
    "pacs": 9991,
    "vlcs": 10729,
    "officehome": 15588,
    "terraincognita": 24788,
    "domainnet": 586575,
}


def build(name, root, **settings):
    return components.find("data", name)(root=root, **settings)


@pytest.mark.parametrize("name", TOTAL)
def test_the_layout_of_domainbed(name, tmp_path, monkeypatch):
    base = miniature.domainbed(tmp_path, name, beside=True)
    cls, classes = components.find("data", name), miniature.CLASSES[name]
    assert TOTAL[name] in [sum(counts) for counts in cls.published.values()]
    assert all(len(counts) == len(cls.domain_folders) for counts in cls.published.values())
    monkeypatch.setattr(cls, "published", {"the miniature": (4 * len(classes),) * len(cls.domain_folders)})
    for root in (tmp_path, base):
        data = build(name, root)
        assert data.domain_names == tuple(cls.domain_folders) and data.class_names == classes
        assert np.bincount(data.domains).tolist() == [4 * len(classes)] * len(cls.domain_folders)
        for row in range(len(data)):
            names = Path(data.content(row)).parts[-3:-1]
            assert names == (data.domain_names[data.domains[row]], classes[data.labels[row]])
        assert data.image(0).mode == "RGB"
    every = splits(data, Protocol(val_fraction=0.25), seed=0)
    assert [split.test_domains for split in every] == [(domain,) for domain in cls.domain_folders]
    for split in every:
        assert sum(len(part) for part in split.train) == 3 * len(split.evaluation["train_val"])


@pytest.mark.parametrize(
    ("name", "folder", "domains"),
    [
        ("officehome", "OfficeHome", {"Real World": "Real"}),
        ("officehome", "OfficeHomeDataset_10072016", {"Real World": "RealWorld", "Art": "art"}),
        ("terraincognita", "TerraIncognita", {"location_38": "L38", "location_100": "100"}),
        ("vlcs", "VLCS", {"Caltech101": "CALTECH", "VOC2007": "PASCAL", "SUN09": "SUN", "LabelMe": "LABELME"}),
    ],
)
def test_variants_of_the_names(name, folder, domains, tmp_path):
    base = miniature.domainbed(tmp_path / "made", name, per_class=1)
    for domain, variant in domains.items():
        (base / domain).rename(base / "moved")  # on file systems that ignore case too
        (base / "moved").rename(base / variant)
    base.rename(tmp_path / folder)
    data = build(name, tmp_path, counts="any")
    cls, images = components.find("data", name), len(miniature.CLASSES[name])
    assert data.domain_names == tuple(cls.domain_folders), "in this order for every name of the folders"
    assert np.bincount(data.domains).tolist() == [images] * len(cls.domain_folders)
    for domain, variant in domains.items():
        assert Path(data.content(data.domain_names.index(domain) * images)).parts[-3] == variant


@pytest.mark.parametrize("parts", ["crossval full test train", "crossval test train", "Full"])
def test_vlcs_as_jigendg_and_dassl_pass_it_on(parts, tmp_path, monkeypatch, caplog):
    base = miniature.vlcs_of_jigendg(tmp_path)
    for folder in base.glob("*/*"):
        if folder.name == "full" and parts == "Full":
            folder.rename(folder.with_name(parts))
        elif folder.name not in parts.split():
            shutil.rmtree(folder)
    monkeypatch.setattr(
        components.find("data", "vlcs"), "published", {"the miniature": (5 * (3 + (parts != "Full")),) * 4}
    )
    with caplog.at_level(logging.INFO, "xdm_ft"):
        data = build("vlcs", tmp_path)
    assert data.class_names == miniature.CLASSES["vlcs"] and data.domain_names[0] == "Caltech101"
    for row in range(len(data)):
        assert int(Path(data.content(row)).parts[-2]) == data.labels[row]
    pixels = {data.image(row).tobytes() for row in range(len(data))}
    assert len(pixels) == len(data), "each image once"
    ignored = "CALTECH are those of full, test; ignored crossval, train, which full repeats" in caplog.text
    assert ignored == (parts == "crossval full test train")
    with pytest.raises(UserError, match=r"expected <domain>/<class>/<image>.*data\.name: vlcs"):
        components.find("data", "folder")(root=base)


@pytest.mark.parametrize("name", ["officehome", "domainnet", "pacs"])
def test_other_layouts_in_which_the_sets_are_distributed(name, tmp_path):
    plain = build(name, miniature.domainbed(tmp_path / "plain", name), counts="any")
    base = miniature.domainbed(tmp_path / "other", name, beside=True)
    if name == "pacs":  # Dassl: pacs/images/ and pacs/splits/
        base = shutil.move(base, tmp_path / "other" / "moved")
        (tmp_path / "other" / "pacs" / "splits").mkdir(parents=True)
        shutil.move(base, tmp_path / "other" / "pacs" / "images")
        base = tmp_path / "other" / "pacs"
    else:  # Office-Home-DG: <domain>/<train|val>/<class>, in which DomainNet's class "train" stays
        for folder in sorted(base.glob("*/*/")):
            whole = folder.rename(folder.with_name("whole"))
            for path in whole.iterdir():
                part = folder.parent / ("val" if path.stem == "000" else "to_train") / folder.name
                part.mkdir(parents=True, exist_ok=True)
                path.rename(part / path.name)
            whole.rmdir()
        for folder in sorted(base.glob("*/to_train")):
            folder.rename(folder.with_name("train"))
    for root in (tmp_path / "other", base):
        data = build(name, root, counts="any")
        assert (data.class_names, data.domain_names) == (plain.class_names, plain.domain_names)
        of = [sorted((each.labels[row], each.domains[row], each.image(row).tobytes()) for row in range(len(each)))
              for each in (data, plain)]  # fmt: skip
        assert of[0] == of[1]


def test_parts_without_class_folders_are_refused(tmp_path):
    base = miniature.domainbed(tmp_path, "pacs")
    for domain in base.iterdir():
        for number, folder in enumerate(sorted(domain.glob("*/")) if domain.name in ("photo", "sketch") else ()):
            folder.rename(domain / "train") if number == 0 else shutil.rmtree(folder)
    shutil.rmtree(base / "cartoon")
    shutil.rmtree(base / "art_painting")
    with pytest.raises(UserError, match=r"train are parts of a split, not classes; found <domain>/<train>/<image>"):
        build("pacs", tmp_path, counts="any")


def test_missing_images_are_named(tmp_path, monkeypatch, caplog):
    base = miniature.domainbed(tmp_path, "pacs")
    shutil.rmtree(base / "photo")
    shutil.rmtree(base / "sketch" / "house")
    with pytest.raises(UserError) as fault:
        build("pacs", tmp_path)
    for words in ("cartoon: 28 of 2344", "photo: missing", "sketch: 24 of 3929", "no house in sketch", "counts: any"):
        assert words in str(fault.value)
    with caplog.at_level(logging.INFO, "xdm_ft"):
        assert build("pacs", tmp_path, counts="any").domain_names == ("art_painting", "cartoon", "sketch")
        assert "photo: missing" in caplog.text
        cls = components.find("data", "pacs")  # one of several editions, as Terra Incognita has two
        monkeypatch.setattr(cls, "published", {"the new": (1, 2, 3, 4), "the old": (28, 28, 0, 24)})
        assert build("pacs", tmp_path).as_published and "complete (the old)" in caplog.text


def test_faults_of_folders(tmp_path):
    with pytest.raises(UserError, match=r"nowhere does not exist; .*domainbed.scripts.download.* data.name: hub"):
        build("vlcs", tmp_path / "nowhere")
    (tmp_path / "PACS").mkdir()
    neither = r"contains neither the folder VLCS/ nor .* \(Caltech101, LabelMe, SUN09, VOC2007\)"
    with pytest.raises(UserError, match=neither):
        build("vlcs", tmp_path)
    base = miniature.domainbed(tmp_path, "officehome", per_class=1)
    shutil.copytree(base / "Real World", base / "Real")
    with pytest.raises(UserError, match=r"both Real( World)?/ and Real( World)?/ contain the domain Real World"):
        build("officehome", tmp_path, counts="any")
    shutil.rmtree(base / "Real")
    shutil.copytree(base, tmp_path / "OfficeHome")
    both = r"data.root: .*: both .*OfficeHome and .*office_home contain the data; set data.root to one of them"
    with pytest.raises(UserError, match=both):
        build("officehome", tmp_path, counts="any")


@pytest.mark.skipif(not PACS.is_dir(), reason="no PACS images in ../shared/assets/pacs")
def test_the_real_pacs_is_complete():
    data = build("pacs", PACS.parent)
    assert len(data.class_names) == 7 and np.bincount(data.domains).tolist() == [2048, 2344, 1670, 3929]
    for row in range(0, len(data), 333):
        image = data.image(row)
        assert (image.mode, image.size) == ("RGB", (227, 227)) and np.asarray(image).std() > 1
    for split, test in zip(splits(data, Protocol(), seed=0), (2048, 2344, 1670, 3929), strict=True):
        train, val = sum(len(part) for part in split.train), len(split.evaluation["train_val"])
        assert len(split.evaluation["test"]) == test == 9991 - train - val
        assert abs(val / (train + val) - 0.2) < 0.001


# ---- Sequences of Terra Incognita


@pytest.fixture
def traps(tmp_path):
    """The folder of the locations. Images have names as in the source, where no two locations share one."""
    base = miniature.domainbed(tmp_path, "terraincognita", per_class=12, beside=True)
    for number, path in enumerate(sorted(base.rglob("*.png"))):
        path.rename(path.with_name(f"{number:04}.png"))
    return base


@pytest.mark.parametrize("place", ["caltech_images_20210113.json", "eccv_18_annotation_files/train_annotations.json"])
def test_sequences_are_groups_if_there_are_annotations(place, traps, caplog):
    def annotate(missing):
        """Writes COCO annotations of camera traps, two frames per sequence, without the last images."""
        names = sorted({path.name for path in traps.rglob("*.png")})[: 144 - missing]
        images = [{"id": name, "file_name": name, "seq_id": f"s{i // 2}"} for i, name in enumerate(names)]
        (traps / place).parent.mkdir(exist_ok=True)
        (traps / place).write_text(json.dumps({"images": images, "annotations": [], "categories": []}))

    assert build("terraincognita", traps, counts="any").groups is None
    annotate(0)
    data = build("terraincognita", traps, counts="any")
    numbers = [int(Path(path).stem) for path in data.paths]
    assert len(set(data.groups.tolist())) == 72
    assert len(set(zip([n // 2 for n in numbers], data.groups.tolist(), strict=True))) == 72
    for split in splits(data, Protocol(), 0):
        train, val = torch.cat(split.train), split.evaluation["train_val"]
        assert not set(data.groups[train]) & set(data.groups[val]) and "groups kept together" in split.notes
    with pytest.raises(UserError, match="domainbed would divide groups"):
        splits(data, Protocol(split_rule="domainbed"), 0)
    alone = build("terraincognita", traps, counts="any", sequences="ignore")
    assert alone.groups is None
    assert "images assumed independent" in splits(alone, Protocol(split_rule="domainbed"), 0)[0].notes
    annotate(3)
    lone = build("terraincognita", traps, counts="any")
    assert sorted(np.bincount(lone.groups).tolist())[:5] == [1, 1, 1, 1, 2], "a group of its own"
    assert "3 of 144 images have no seq_id" in caplog.text


def test_damaged_annotations(traps):
    for text in ("", "[1]", '{"images": [{"seq_id": 1}]}', '{"images": 7}'):
        (traps / "caltech_images_20210113.json").write_text(text)
        problem = r"caltech_images_20210113\.json contains no annotations of camera traps.*data.sequences: ignore$"
        with pytest.raises(UserError, match=problem) as fault:
            build("terraincognita", traps, counts="any")
        assert "\n" not in str(fault.value)
