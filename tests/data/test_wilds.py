"""Camelyon17 and FMoW in miniature, read by the real WILDS loaders; our numbers against WILDS' own `eval()`."""

import contextlib
import shutil
import sys
import threading
import types
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import patch

import miniature
import numpy as np
import pandas
import pytest
import torch
from PIL import Image

from xdm_ft.data._wilds_release import release_class
from xdm_ft.data.camelyon17 import Camelyon17
from xdm_ft.data.fmow import Fmow
from xdm_ft.evaluation.metrics import metric, score
from xdm_ft.protocol.splits import Protocol, splits
from xdm_ft.runtime.errors import UserError

OFFICIAL = {"name": "official", "selection": "val_domain"}


@pytest.fixture(scope="module")
def camelyon17(tmp_path_factory):
    root = tmp_path_factory.mktemp("camelyon17")
    miniature.camelyon17(root)
    return root


@pytest.fixture(scope="module")
def fmow(tmp_path_factory):
    root = tmp_path_factory.mktemp("fmow")
    miniature.fmow(root)
    return root


def wilds_dataset(name, root):
    cls = release_class(name, {"camelyon17": "Camelyon17Dataset", "fmow": "FMoWDataset"}[name])
    of_any_form = patch("pandas.to_datetime", partial(pandas.to_datetime, format="ISO8601"))
    with warnings.catch_warnings(), of_any_form if name == "fmow" else contextlib.nullcontext():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return cls(root_dir=str(root))


@pytest.fixture
def stand_in_for_torch_scatter(monkeypatch):
    """Replaces the only function of torch_scatter that WILDS' `eval` calls: group means, 0 for an empty group."""

    def scatter(src, index, dim_size, reduce):
        assert reduce == "mean"
        sums = torch.zeros(dim_size, dtype=src.dtype).index_add_(0, index, src)
        return sums / torch.bincount(index, minlength=dim_size).clamp(min=1)

    module = types.ModuleType("torch_scatter")
    module.scatter = scatter
    monkeypatch.setitem(sys.modules, "torch_scatter", module)


def random_logits(seed, rows, classes):
    return torch.randn(len(rows), classes, generator=torch.Generator().manual_seed(seed))


def test_camelyon17_is_what_wilds_reads(camelyon17):
    ours, theirs = Camelyon17(root=camelyon17), wilds_dataset("camelyon17", camelyon17)
    assert len(ours) == len(theirs) == 100 and ours.class_names == ("normal tissue", "tumor tissue")
    names = {0: "train", 1: "train_val", 2: "test", 3: "val_domain"}
    for row in range(len(ours)):
        image, label, metadata = theirs[row]
        assert np.array_equal(np.asarray(ours.image(row)), np.asarray(image))
        assert (ours.labels[row], ours.domains[row]) == (label, metadata[0])
        assert ours.splits[row] == names[int(theirs.split_array[row])]
    patients = [Path(path).parent.name.split("_")[1] for path in ours.shown]
    pairs = set(zip(patients, ours.groups.tolist(), strict=True))
    assert len(pairs) == len(set(patients)) == len(set(ours.groups.tolist())) == 15
    assert len(set(theirs.metadata_array[:, 1].tolist())) == 25, "a patient has several slides"


def test_splits_of_camelyon17(camelyon17):
    data = Camelyon17(root=camelyon17)
    for hospital, split in enumerate(splits(data, Protocol(), seed=0)):
        assert split.test_domains == (f"hospital {hospital}",) and len(split.train_domains) == 4
        assert torch.equal(split.evaluation["test"], torch.arange(20 * hospital, 20 * hospital + 20))
        train, val = torch.cat(split.train), split.evaluation["train_val"]
        assert len(train) + len(val) == 80 and len(val) == 16
        assert not set(data.groups[train]) & set(data.groups[val]), "a patient is divided"
        assert "groups kept together" in split.notes and "tested on domains never trained on" in split.notes
    (split,) = splits(data, Protocol(**OFFICIAL), seed=0)
    assert split.train_domains == ("hospital 0", "hospital 3", "hospital 4") and split.test_domains == ("hospital 2",)
    sizes = {name: len(rows) for name, rows in split.evaluation.items()}
    assert sizes == {"train_val": 30, "val_domain": 20, "test": 20, "test_val": 4}
    assert [len(part) for part in split.train] == [10, 10, 10]
    assert "tested on domains never trained on" in split.notes
    assert "9 of 9 groups of train_val also train (30 of 30 images)" in split.notes


@pytest.mark.parametrize("kind", ["region", "year"])
def test_all_labelled_images_of_fmow_take_part_when_domains_are_held_out(fmow, kind):
    data = Fmow(root=fmow, domains=kind)
    assert (data.splits == "").any(), "some are in no part of the official split"
    for split in splits(data, Protocol(), seed=0):
        train, val = torch.cat(split.train), split.evaluation.get("train_val")
        used = torch.cat([train, val, split.evaluation["test"]])
        assert len(used.unique()) == len(used)
        left_out = [int(note.split()[0]) for note in split.notes if "training images left out" in note]
        assert len(used) + sum(left_out) == len(data)
        assert (kind == "year" and split.test_domains != ("2017",)) == bool(left_out)
        parts = [set(data.groups[rows]) for rows in (train, val, split.evaluation["test"])]
        assert not parts[0] & parts[1] and not (parts[0] | parts[1]) & parts[2], "a place is divided"


@pytest.mark.parametrize("kind", ["region", "year", "region_year"])
def test_fmow_is_what_wilds_reads(fmow, kind):
    ours, theirs = Fmow(root=fmow, domains=kind), wilds_dataset("fmow", fmow)
    assert len(ours) == len(theirs) == 7 * 18  # sequestered rows left out
    names = {0: "train", 1: "train_val", 2: "", 3: "val_domain", 4: "test", -1: ""}
    regions, years = theirs.metadata_map["region"], theirs.metadata_map["year"]
    assert regions[:3] == ["Europe", "Asia", "Other"]  # as they appear
    for row in range(len(ours)):
        _, label, metadata = theirs[row]
        region, year = regions[metadata[0]], str(years[metadata[1]])
        domain = {"region": region, "year": year, "region_year": f"{region} {year}"}[kind]
        assert ours.domain_names[ours.domains[row]] == domain
        assert ours.worst_of[row] == (-1 if region == "Other" else metadata[0])
        assert ours.labels[row] == label and ours.splits[row] == names[int(theirs.split_array[row])]
    for row in (0, 70, len(ours) - 1):  # behind the sequestered rows the file's number is not the row
        assert np.array_equal(np.asarray(ours.image(row)), np.asarray(theirs.get_input(row)))
    assert "multi-unit residential" in ours.class_names and len(ours.class_names) == 62


def test_groups_of_fmow_are_places(fmow):
    data = Fmow(root=fmow)
    assert np.bincount(np.unique(data.groups, return_inverse=True)[1]).tolist().count(6) == 9  # six years, one place
    assert len(set(data.groups.tolist())) == 9 + 9 + 7 * 9
    (split,) = splits(data, Protocol(**OFFICIAL), seed=0)
    counted = [("train_val", 18), ("val_domain", 18), ("test", 36)]
    note = ", ".join(f"9 of {n} groups of {part} also train (9 of {n} images)" for part, n in counted)
    assert note in split.notes


def tables_of(root, tmp_path):
    """A copy of the tables, beside the same images."""
    (base,) = root.iterdir()
    copy = shutil.copytree(base, tmp_path / base.name, ignore=shutil.ignore_patterns("images"))
    (copy / "images").symlink_to(base / "images")
    return copy


def test_times_and_regions_of_fmow_as_they_are_distributed(fmow, tmp_path):
    base = tables_of(fmow, tmp_path)
    plain, table = Fmow(root=tmp_path, domains="region_year"), (base / "rgb_metadata.csv").read_text()
    assert table.count(".643Z") == 24 and "643" not in table[: table.index("NGA")]
    with pytest.raises(ValueError, match=r"643Z.* doesn't match format"):
        release_class("fmow", "FMoWDataset")(root_dir=str(tmp_path))  # what WILDS' code makes of it

    def written(old, new):
        (base / "rgb_metadata.csv").write_text(table.replace(old, new))
        return Fmow(root=tmp_path, domains="region_year")

    for old, new in {".643Z": "Z", "10:30:00Z": "10:30:00+00:00", "T10:30:00Z": " 10:30:00", "00Z": "00.5Z"}.items():
        data = written(old, new)
        assert data.domain_names == plain.domain_names and np.array_equal(data.domains, plain.domains)
        assert np.array_equal(data.splits, plain.splits)
    assert np.array_equal(written(",XXX,", ",ATA,").domains, plain.domains), "a country without a region: Other"
    sequestered = next(line for line in table.split() if line.startswith("seq"))
    assert len(written(sequestered, sequestered.replace("2016-01-10T10:30:00Z", ""))) == len(plain), "left out anyway"
    for time in ("", "yesterday", "2021-01-10T10:30:00Z"):
        wrong = f'rgb_metadata.csv: row 2, column timestamp: "{time or "nan"}" is not a time from 2002 to 2017'
        with pytest.raises(UserError, match=rf"{wrong} \(1 such rows\); write it as 2010-03-01T10:00:00Z$"):
            written("2002-01-10T10:30:00Z", time)


def test_fmow_without_coordinates(fmow, tmp_path):
    base = tables_of(fmow, tmp_path)
    table = [line.split(",") for line in (base / "rgb_metadata.csv").read_text().split("\n") if line]
    some = [row[:4] + (["", ""] if i in (1, 7) else row[4:]) for i, row in enumerate(table)]
    (base / "rgb_metadata.csv").write_text("\n".join(",".join(row) for row in some))
    assert np.bincount(Fmow(root=tmp_path).groups).tolist().count(1) >= 2  # each is a place of its own
    (base / "rgb_metadata.csv").write_text("\n".join(",".join(row[:4]) for row in table))
    data = Fmow(root=tmp_path)
    assert data.groups is None
    (split,) = splits(data, Protocol(**OFFICIAL), seed=0)
    assert "images assumed independent" in split.notes


def test_fmow_official_split(fmow):
    (split,) = splits(Fmow(root=fmow), Protocol(**OFFICIAL, metric="worst_domain_accuracy"), seed=0)
    sizes = {name: len(rows) for name, rows in split.evaluation.items() if name != "test_val"}
    assert sizes == {"train_val": 18, "val_domain": 18, "test": 36}
    assert "Other" in split.train_domains and sum(len(part) for part in split.train) == 36
    (by_year,) = splits(Fmow(root=fmow, domains="year"), Protocol(**OFFICIAL), seed=0)
    assert by_year.train_domains == ("2002", "2012") and by_year.test_domains == ("2016", "2017")
    assert torch.equal(by_year.evaluation["val_domain"], split.evaluation["val_domain"])
    (by_both,) = splits(Fmow(root=fmow, domains="region_year"), Protocol(**OFFICIAL), seed=0)
    assert split.tested_on == "domains that are also trained on, none of them unseen"
    assert by_year.tested_on == by_both.tested_on == "domains never trained on"
    assert all(f"tested on {part.tested_on}" in part.notes for part in (split, by_year, by_both))


@pytest.mark.parametrize("seed", [0, 2])
def test_our_numbers_are_those_of_wilds_eval(camelyon17, fmow, stand_in_for_torch_scatter, seed):
    ours, theirs = Camelyon17(root=camelyon17), wilds_dataset("camelyon17", camelyon17)
    (split,) = splits(ours, Protocol(**OFFICIAL), seed=0)
    for rows in split.evaluation.values():  # the slides of the other splits are empty groups
        logits, labels = random_logits(seed, rows, 2), torch.from_numpy(ours.labels)[rows]
        expected, _ = theirs.eval(logits.argmax(1), theirs.y_array[rows], theirs.metadata_array[rows])
        slides = theirs.metadata_array[rows, 1]
        assert expected["acc_slide:0"] == 0 or 0 in slides
        assert metric("accuracy", logits, labels, slides) == pytest.approx(expected["acc_avg"])
        assert metric("worst_domain_accuracy", logits, labels, slides) == pytest.approx(expected["acc_wg"])

    theirs = wilds_dataset("fmow", fmow)
    oceania = theirs.metadata_map["region"].index("Oceania")
    for kind in ("region", "year"):
        ours = Fmow(root=fmow, domains=kind)
        (split,) = splits(ours, Protocol(**OFFICIAL), seed=0)
        test = split.evaluation["test"]
        without_oceania = test[torch.from_numpy(ours.worst_of)[test] != oceania]
        for rows in (test, split.evaluation["val_domain"], without_oceania):
            logits, labels = random_logits(seed, rows, 62), torch.from_numpy(ours.labels)[rows]
            logits[torch.arange(0, len(rows), 2), labels[::2]] += 9  # else all are wrong and every accuracy is 0
            regions = torch.from_numpy(ours.worst_of)[rows]
            counted = regions >= 0
            if seed == 2:  # 'Other' is the worst, and must not count
                logits[~counted, labels[~counted]] -= 99
            expected, _ = theirs.eval(logits.argmax(1), theirs.y_array[rows], theirs.metadata_array[rows])
            assert 0 < expected["acc_worst_region"] < 1
            whole = score(logits, labels, torch.from_numpy(ours.domains)[rows], ours.class_names, ours.domain_names)
            assert whole.accuracy == pytest.approx(expected["acc_avg"])
            for name, values in whole.per_domain.items():
                assert values["accuracy"] == pytest.approx(expected[f"acc_{kind}:{name}"])
                assert values["n"] == expected[f"count_{kind}:{name}"]
            worst = metric("worst_domain_accuracy", logits[counted], labels[counted], regions[counted])
            assert worst == pytest.approx(expected["acc_worst_region"])


def test_importing_wilds_changes_no_limit_and_asks_nobody_for_newer_versions(fmow, monkeypatch):
    limit, started = Image.MAX_IMAGE_PIXELS, []
    # other tests in this process may have imported all of wilds
    for name in [name for name in sys.modules if name.split(".")[0] in ("wilds", "ogb", "outdated")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread))
    Fmow(root=fmow)
    assert limit == Image.MAX_IMAGE_PIXELS and limit is not None
    assert "wilds.version" in sys.modules and "outdated" not in sys.modules and not started


@pytest.mark.parametrize(
    ("cls", "folder", "size"), [(Camelyon17, "camelyon17_v1.0", "10 GB"), (Fmow, "fmow_v1.1", "50 GB")]
)
def test_no_data_and_no_permission_to_download(cls, folder, size, tmp_path):
    with pytest.raises(UserError) as fault:
        cls(root=tmp_path / "data")
    text, missing = str(fault.value), f"{tmp_path / 'data' / folder} does not exist"
    copy = f"set data.root to a folder with a copy of {folder}/. WILDS' server has served no data since April 2026"
    for words in (missing, copy, "data.download: true", size):
        assert words in text
    assert not (tmp_path / "data").exists() and "\n" not in text


def test_damaged_trees(fmow, tmp_path):
    marker = miniature.camelyon17(tmp_path) / "RELEASE_v1.0.txt"
    assert len(Camelyon17(root=marker.parent)) == 100, "the folder itself"
    marker.unlink()
    problem = (
        r"camelyon17_v1.0 contains no RELEASE_v1.0.txt, which ends a download: create it if all files are there, else"
    )
    with pytest.raises(UserError, match=problem):
        Camelyon17(root=tmp_path)
    marker.touch()
    assert len(Camelyon17(root=tmp_path)) == 100
    lines = (marker.parent / "metadata.csv").read_text().split("\n")
    number, _, *others = lines[7].split(",")
    lines[7] = ",".join([number, "", *others])
    (marker.parent / "metadata.csv").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"metadata.csv: row 8, column patient: the cell is empty; fill it in$"):
        Camelyon17(root=tmp_path)
    (tables_of(fmow, tmp_path) / "country_code_mapping.csv").unlink()
    kept = r"country_code_mapping.csv.*; replace the .csv files by those of another copy, and keep the images"
    with pytest.raises(UserError, match=rf"fmow_v1.1: WILDS cannot read its tables .*{kept}"):
        Fmow(root=tmp_path)


@pytest.fixture
def archive_at(tmp_path, monkeypatch):
    """Returns a function that replaces WILDS' download address by a local file."""

    def serve(path):
        theirs = release_class("camelyon17", "Camelyon17Dataset")
        monkeypatch.setitem(theirs._versions_dict["1.0"], "download_url", path.as_uri())

    return serve


def test_download_goes_through_wilds_downloader(tmp_path, archive_at, capsys):
    base = miniature.camelyon17(tmp_path / "made")
    archive_at(tmp_path / "archive.tar.gz")
    shutil.make_archive(str(tmp_path / "archive"), "gztar", base)
    data = Camelyon17(root=tmp_path / "data", download=True)
    assert len(data) == 100 and data.image(0).size == (96, 96)
    captured = capsys.readouterr()
    assert captured.out == "" and "Downloading" in captured.err
    shutil.rmtree(tmp_path / "made")
    (tmp_path / "archive.tar.gz").unlink()
    assert len(Camelyon17(root=tmp_path / "data", download=True)) == 100  # existing data are not downloaded again


def test_downloads_that_fail(tmp_path, archive_at):
    archive_at(tmp_path / "nothing.tar.gz")
    with pytest.raises(UserError, match=r"data.download: the download to .*camelyon17_v1.0 failed") as fault:
        Camelyon17(root=tmp_path, download=True)
    for words in ("issues/174). With a copy of camelyon17_v1.0/, set data.root to its folder", "10 GB"):
        assert words in str(fault.value)
    archive = tmp_path / "again" / "camelyon17_v1.0" / "archive.tar.gz"
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"half of it")
    with pytest.raises(UserError, match=r"archive.tar.gz is left from an earlier download"):
        Camelyon17(root=tmp_path / "again", download=True)
    assert archive.read_bytes() == b"half of it", "it is not unpacked"
