"""DomainBed's five data sets in miniature, in their layout on disk, with variants of their names."""

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

FIVE = ("pacs", "vlcs", "officehome", "terraincognita", "domainnet")
PACS = Path(__file__).resolve().parents[2] / ".." / "shared" / "assets" / "pacs"
TOTAL = {  # Gulrajani & Lopez-Paz 2021, §4
    "pacs": 9991,
    "vlcs": 10729,
    "officehome": 15588,
    "terraincognita": 24788,
    "domainnet": 586575,
}


@pytest.fixture
def published(monkeypatch):
    """Returns a function that makes a miniature count as complete."""

    def set_counts(name, counts):
        monkeypatch.setattr(components.find("data", name), "published", {"the miniature": counts})

    return set_counts


def build(name, root, **settings):
    return components.find("data", name)(root=root, **settings)


@pytest.mark.parametrize("name", FIVE)
def test_published_counts_sum_to_the_published_totals(name):
    cls = components.find("data", name)
    assert TOTAL[name] in [sum(counts) for counts in cls.published.values()]
    assert all(len(counts) == len(cls.domain_folders) for counts in cls.published.values())


@pytest.mark.parametrize("name", FIVE)
def test_the_layout_of_domainbed(name, tmp_path, published):
    base = miniature.domainbed(tmp_path, name)
    cls, classes = components.find("data", name), miniature.CLASSES[name]
    published(name, (4 * len(classes),) * len(cls.domain_folders))
    for root in (tmp_path, base):
        data = build(name, root)
        assert data.domain_names == tuple(cls.domain_folders)
        assert data.class_names == classes
        assert np.bincount(data.domains).tolist() == [4 * len(classes)] * len(cls.domain_folders)
        for row in range(len(data)):
            path = Path(data.content(row))
            assert (path.parent.name, path.parent.parent.name) == (
                classes[data.labels[row]],
                data.domain_names[data.domains[row]],
            )
        assert data.image(0).mode == "RGB"
    found = splits(data, Protocol(val_fraction=0.25), seed=0)
    assert [split.test_domains for split in found] == [(domain,) for domain in cls.domain_folders]
    for split in found:
        assert sum(len(part) for part in split.train) == 3 * len(split.evaluation["train_val"])


@pytest.mark.parametrize(
    ("name", "folder", "domains"),
    [
        ("pacs", "pacs", {"art_painting": "Art Painting", "photo": "Photo"}),
        ("officehome", "OfficeHome", {"Real World": "Real"}),
        ("officehome", "OfficeHomeDataset_10072016", {"Real World": "RealWorld", "Art": "art"}),
        ("terraincognita", "TerraIncognita", {"location_38": "L38", "location_100": "100"}),
        ("domainnet", "DomainNet", {}),
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
    cls = components.find("data", name)
    assert data.domain_names == tuple(cls.domain_folders)  # in this order for every name of the folders
    images = len(miniature.CLASSES[name])
    assert np.bincount(data.domains).tolist() == [images] * len(cls.domain_folders)
    for domain, variant in domains.items():
        row = data.domain_names.index(domain) * images
        assert Path(data.content(row)).parent.parent.name == variant


def test_missing_images_are_named(tmp_path, caplog):
    base = miniature.domainbed(tmp_path, "pacs")
    shutil.rmtree(base / "photo")
    shutil.rmtree(base / "sketch" / "house")
    with pytest.raises(UserError) as fault:
        build("pacs", tmp_path)
    text = str(fault.value)
    for words in ("cartoon: 28 of 2344", "photo: missing", "sketch: 24 of 3929", "no house in sketch", "counts: any"):
        assert words in text
    with caplog.at_level(logging.WARNING):
        assert build("pacs", tmp_path, counts="any").domain_names == ("art_painting", "cartoon", "sketch")
    assert "photo: missing" in caplog.text


def test_both_editions_of_terra_incognita_are_known(tmp_path, monkeypatch, caplog):
    miniature.domainbed(tmp_path, "terraincognita")
    cls = components.find("data", "terraincognita")
    monkeypatch.setattr(cls, "published", {"the new": (1, 2, 3, 4), "the old": (12, 12, 12, 12)})
    with caplog.at_level(logging.INFO, "xdm_ft"):
        build("terraincognita", tmp_path)
    assert "complete (the old)" in caplog.text


def test_a_folder_without_the_data(tmp_path):
    with pytest.raises(UserError, match=r"nowhere does not exist; .*domainbed.scripts.download.* data.name: hub"):
        build("vlcs", tmp_path / "nowhere")
    (tmp_path / "PACS").mkdir()
    with pytest.raises(
        UserError, match=r"contains neither the folder VLCS/ nor .* \(Caltech101, LabelMe, SUN09, VOC2007\)"
    ):
        build("vlcs", tmp_path)


def test_two_folders_for_one_domain_or_data_set(tmp_path):
    base = miniature.domainbed(tmp_path, "officehome", per_class=1)
    shutil.copytree(base / "Real World", base / "Real")
    with pytest.raises(UserError, match=r"both Real( World)?/ and Real( World)?/ contain the domain Real World"):
        build("officehome", tmp_path, counts="any")
    shutil.rmtree(base / "Real")
    shutil.copytree(base, tmp_path / "OfficeHome")
    with pytest.raises(
        UserError,
        match=r"data.root: .*: both .*OfficeHome and .*office_home contain the data; set data.root to one of them",
    ):
        build("officehome", tmp_path, counts="any")


@pytest.mark.skipif(not PACS.is_dir(), reason="no PACS images in ../shared/assets/pacs")
def test_the_real_pacs_is_complete():
    data = build("pacs", PACS.parent)
    assert len(data) == 9991 and len(data.class_names) == 7


def annotate(base, file, more=0):
    """Writes COCO annotations of camera traps, two frames per sequence, without the last `more` images."""
    names = sorted({path.name for path in base.rglob("*.png")})
    images = [{"id": name, "file_name": name, "location": "38", "seq_id": f"s{i // 2}"} for i, name in enumerate(names)]
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"images": images[: len(images) - more], "annotations": [], "categories": []}))


def with_names_of_their_own(base):
    """Renames images as in the source, where no two locations share a name."""
    for number, path in enumerate(sorted(base.rglob("*.png"))):
        path.rename(path.with_name(f"{number:04}.png"))


@pytest.mark.parametrize("place", ["caltech_images_20210113.json", "eccv_18_annotation_files/train_annotations.json"])
def test_sequences_of_terra_incognita_are_groups_if_there_are_annotations(place, tmp_path):
    base = miniature.domainbed(tmp_path, "terraincognita", per_class=12)
    with_names_of_their_own(base)
    assert build("terraincognita", tmp_path, counts="any").groups is None
    annotate(base, base / place)
    data = build("terraincognita", tmp_path, counts="any")
    numbers = [int(Path(path).stem) for path in data.paths]
    assert len(set(data.groups.tolist())) == 72
    assert len(set(zip([n // 2 for n in numbers], data.groups.tolist(), strict=True))) == 72
    for split in splits(data, Protocol(), 0):
        train, val = torch.cat(split.train), split.evaluation["train_val"]
        assert not set(data.groups[train]) & set(data.groups[val]) and "groups kept together" in split.notes
    with pytest.raises(UserError, match="domainbed would divide groups"):
        splits(data, Protocol(split_rule="domainbed"), 0)
    alone = build("terraincognita", tmp_path, counts="any", sequences="ignore")
    assert alone.groups is None
    assert "images assumed independent" in splits(alone, Protocol(split_rule="domainbed"), 0)[0].notes


def test_an_image_without_a_sequence_has_a_group_of_its_own(tmp_path, caplog):
    base = miniature.domainbed(tmp_path, "terraincognita")
    with_names_of_their_own(base)
    annotate(base, base / "caltech_images_20210113.json", more=3)
    data = build("terraincognita", tmp_path, counts="any")
    assert sorted(np.bincount(data.groups).tolist())[:4] == [1, 1, 1, 1]
    assert "3 of 48 images have no seq_id" in caplog.text


@pytest.mark.parametrize("text", ["", "[1]", '{"images": [{"seq_id": 1}]}', '{"images": 7}'])
def test_damaged_annotations_of_terra_incognita(text, tmp_path):
    base = miniature.domainbed(tmp_path, "terraincognita")
    (base / "caltech_images_20210113.json").write_text(text)
    with pytest.raises(
        UserError, match=r"caltech_images_20210113\.json contains no annotations of camera traps"
    ) as fault:
        build("terraincognita", tmp_path, counts="any")
    assert "\n" not in str(fault.value) and "data.sequences: ignore" in str(fault.value)
