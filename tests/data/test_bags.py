"""Bags of features: one row per slide or patient, the same from each format, and every fault is one line."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from bag_files import clam, clam_pt, slides, torchmil, trident

from xdm_ft.data.bags import Bags
from xdm_ft.features.hashes import hash_files
from xdm_ft.image_files import bags as module
from xdm_ft.image_files.tables import SlideColumns
from xdm_ft.runtime.errors import UserError

NEEDS_H5PY = pytest.mark.needs("h5py")
A, B = np.arange(12, dtype=np.float32).reshape(4, 3) / 7, -np.arange(6, dtype=np.float32).reshape(2, 3) / 3
TABLE = "slide,label,domain,group\na,x,s,p\nb,x,s,p\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDM_FT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "slides").mkdir()
    return tmp_path / "slides"


@pytest.fixture
def read_files(monkeypatch):
    """The names of the files that are read, and not found in the index."""
    names, read = [], module.read_bag
    monkeypatch.setattr(module, "read_bag", lambda file: names.append(Path(file).name) or read(file))
    return names


def bags(folder, table=TABLE, **settings):
    file = folder / "slides.csv"
    file.write_text(table)
    return Bags(folder=folder, table=file, **settings)


def two(folder):
    torchmil(folder / "a.npy", A)
    torchmil(folder / "b.npy", B)


WRITERS = [
    pytest.param(trident, ".h5", lambda z: z, marks=NEEDS_H5PY),
    pytest.param(trident, ".h5", lambda z: z[None], marks=NEEDS_H5PY),
    pytest.param(trident, ".h5", lambda z: z.astype(np.float64), marks=NEEDS_H5PY),
    pytest.param(clam, ".h5", lambda z: z, marks=NEEDS_H5PY),
    (clam_pt, ".pt", lambda z: z),
    (clam_pt, ".pt", lambda z: z[None]),
    (torchmil, ".npy", lambda z: z),
    (torchmil, ".npy", lambda z: np.asfortranarray(z).astype(">f4")),
]


@pytest.mark.parametrize(("write", "suffix", "form"), WRITERS)
def test_each_format_gives_the_same_rows(write, suffix, form, folder):
    write(folder / f"a{suffix}", form(A))
    write(folder / f"b{suffix}", form(B))
    data = bags(folder)
    expected = np.stack([z.astype(np.float64).mean(0).astype(np.float32) for z in (A, B)])
    assert data.features.dtype == np.float32 and np.array_equal(data.features, expected)
    assert data.class_names == ("x",) and data.domain_names == ("s",) and data.groups.tolist() == [0, 0]
    assert [data.name_in_data(row) for row in range(2)] == ["a", "b"] and data.group_names == ("p",)
    assert data.source == "mean of the features of each slide of slides.csv" and not data.has_images


@pytest.mark.parametrize("pool", ["mean", "max", "mean_max"])
def test_a_group_is_one_bag_of_all_its_rows(pool, folder):
    two(folder)
    torchmil(folder / "c.npy", np.concatenate([A, B]))
    table = "slide,label,domain,group,split\na,x,s,p,train\nc,y,s,q,test\nb,x,s,p,train\n"
    data = bags(folder, table, pool=pool, unit="group")
    reversed_rows = "\n".join([table.split()[0], *table.split()[:0:-1]])
    assert np.array_equal(bags(folder, reversed_rows, pool=pool, unit="group").features[::-1], data.features)
    assert data.features.shape == (2, 6 if pool == "mean_max" else 3)
    np.testing.assert_allclose(data.features[0], data.features[1], rtol=1e-6)
    both = np.concatenate([A, B])
    expected = {"mean": both.mean(0), "max": both.max(0), "mean_max": np.concatenate([both.mean(0), both.max(0)])}
    np.testing.assert_allclose(data.features[0], expected[pool], rtol=1e-6)
    assert data.name_in_data(0) == "p" and data.splits.tolist() == ["train", "test"] and data.labels.tolist() == [0, 1]


def test_a_vector_is_a_bag_of_one(folder):
    torchmil(folder / "a.npy", A[0])
    clam_pt(folder / "b.pt", B[0])
    assert np.array_equal(bags(folder).features, np.stack([A[0], B[0]]))


@NEEDS_H5PY
def test_a_vector_of_a_slide_encoder(folder):
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        file["features"] = A[0]
        file["coords"] = np.zeros((9, 2))
    torchmil(folder / "b.npy", B)
    assert np.array_equal(bags(folder).features[0], A[0])


def test_half_precision(folder):
    torchmil(folder / "a.npy", np.full((5000, 2), 1000.1, np.float16))
    torch.save(torch.full((5000, 2), 1000.1, dtype=torch.bfloat16), folder / "b.pt")
    assert np.array_equal(bags(folder).features, [[1000, 1000], [1000, 1000]]), "the sum is beyond float16"


def test_columns_and_names(folder):
    (folder / "deep").mkdir()
    torchmil(folder / "deep/TCGA-1.01.svs.npy", A)
    torchmil(folder / "7.npy", B)
    cells = {"id": ["deep/TCGA-1.01.svs", "7"], "y": [10, 9], "site": ["s", "t"], "other": [1, 2]}
    pyarrow.parquet.write_table(pyarrow.table(cells), folder / "t.parquet")
    columns = {"slide": "id", "label": "y", "domain": "site"}
    data = Bags(folder=folder, table=folder / "t.parquet", columns=SlideColumns(**columns))
    assert data.class_names == ("10", "9") and data.columns == (["id", "y", "site"], ["other"]) and data.groups is None
    table = "file,label,domain\ndeep/TCGA-1.01.svs.npy,1,s\n7.npy,2,t\n"
    assert np.array_equal(bags(folder, table).features, data.features)


def damaged(folder):
    """Writes one file of each damage; returns {name: what its line says}."""
    np.save(folder / "object.npy", np.array([{"a": 1}], object), allow_pickle=True)
    torchmil(folder / "empty.npy", A[:0])
    torchmil(folder / "no_width.npy", A[:, :0])
    torchmil(folder / "nan.npy", np.where(np.arange(12).reshape(4, 3) == 7, np.nan, A))
    torchmil(folder / "half.npy", np.array([[1, np.inf, 1]], np.float16))
    torchmil(folder / "large.npy", np.full((2, 3), 1e300))
    torchmil(folder / "integer.npy", np.ones((4, 3), np.int64))
    torchmil(folder / "two.npy", np.stack([A, A]))
    torchmil(folder / "wide.npy", np.ones((4, 4), np.float32))
    torchmil(folder / "cut.npy", A)
    (folder / "cut.npy").write_bytes((folder / "cut.npy").read_bytes()[:-5])
    torch.save({"features": torch.ones(2, 3)}, folder / "dict.pt")
    torch.save(Path("x"), folder / "pickle.pt")
    (folder / "text.pt").write_text("no tensor")
    (folder / "folder.npy").mkdir()
    return {
        "object.npy": "cannot be read (Array can't be memory-mapped: Python objects in dtype.); write it again",
        "empty.npy": "is empty: features is [0, 3]",
        "no_width.npy": "is empty: features is [4, 0]",
        "nan.npy": "row 2 is not finite (NaN, ±∞ or beyond float32)",
        "half.npy": "row 0 is not finite",
        "large.npy": "row 0 is not finite",
        "integer.npy": "features is int64 [4, 3]; it must be floating, [n,K], [1,n,K] or [K]",
        "two.npy": "features is float32 [2, 4, 3]; it must be floating",
        "wide.npy": "has 4 features per row, and most files have 3; write one width",
        "cut.npy": "cannot be read (",
        "dict.pt": "holds dict, not a tensor; save the tensor of features alone",
        "pickle.pt": "holds Python objects, which can run code, or is damaged",
        "text.pt": "holds Python objects, which can run code, or is damaged",
        "folder.npy": "not a regular file",
    }


def damaged_hdf5(folder):
    import h5py

    def write(name, **arrays):
        with h5py.File(folder / name, "w") as file:
            for key, values in arrays.items():
                file[key] = values

    write("misspelt.h5", feature=A)
    write("group.h5", **{"features/a": A})
    write("integer.h5", features=np.ones((2, 3), int))
    with h5py.File(folder / "unwritten.h5", "w") as file:
        file.create_dataset("features", (100, 3), np.float32, chunks=(1, 3), maxshape=(None, 3))[:40] = 1
    with h5py.File(folder / "elsewhere.h5", "w") as file:
        file["features"] = h5py.ExternalLink("good.h5", "features")
    trident(folder / "good.h5", A)
    (folder / "cut.h5").write_bytes((folder / "good.h5").read_bytes()[:-100])
    (folder / "text.h5").write_text("slide")
    return {
        "misspelt.h5": 'has no array "features"; did you mean "feature"?',
        "group.h5": 'has no array "features"',
        "integer.h5": "features is int64 [2, 3]; it must be floating",
        "unwritten.h5": "features was not written to its end; write it again",
        "elsewhere.h5": "features lies in another file; copy it into this one",
        "cut.h5": "cannot be read (Unable to synchronously open file (truncated file",
        "text.h5": "cannot be read (Unable to synchronously open file (file signature not found)); write it again",
    }


@pytest.mark.parametrize("make", [damaged, pytest.param(damaged_hdf5, marks=NEEDS_H5PY)])
def test_every_damaged_file_is_one_line_all_at_once(make, folder):
    two(folder)
    expected = make(folder)
    table = "file,label,domain\na.npy,x,s\nb.npy,x,s\n" + "".join(f"{name},x,s\n" for name in expected)
    with pytest.raises(UserError) as caught:
        bags(folder, table)
    assert len(caught.value.args) == len(expected)
    for number, (line, (name, words)) in enumerate(zip(caught.value.args, expected.items(), strict=True), start=4):
        assert f"slides.csv: row {number}, {name}: {words}" in line and "\n" not in line and len(line) < 400


def test_every_faulty_row_is_one_line_all_at_once(folder):
    two(folder)
    clam_pt(folder / "b.pt", B)
    torchmil(folder / "c.npy", A[:, :2])
    rows = ["a,x,s,p", "a,x,s,p", "b,x,s,p", "gone,x,s,p", "c,,s,p", "x\\y,x,nan,p"]
    with pytest.raises(UserError) as caught:
        bags(folder, "slide,label,domain,group\n" + "\n".join(rows))
    lines = [line.partition("slides.csv: ")[2] for line in caught.value.args]
    assert lines == [
        "row 3, column slide: a is already in row 2; remove one",
        "row 4, column slide: b.pt, b.npy are several files; keep one",
        f"row 5, column slide: gone with .h5, .pt, .npy does not exist in {folder}",
        "row 6, c.npy: has 2 features per row, and most files have 3; write one width",
        "row 6, column label: the cell is empty; fill it in",
        'row 7, column domain: "nan" means a missing value; fill it in, or write another word if it is a name',
        f"row 7, column slide: x\\y with .h5, .pt, .npy does not exist in {folder}; write / instead of \\",
    ]
    with pytest.raises(UserError) as caught:
        bags(folder, "slide,label,domain\n" + "".join(f"gone{i},x,s\n" for i in range(300)))
    assert len(caught.value.args) == 101 and caught.value.args[-1].endswith("slides.csv: 200 more faults")


@pytest.mark.parametrize(
    ("table", "settings", "words"),
    [
        (TABLE.replace("b,x", "b,y"), {"unit": "group"}, "row 3, column label: y differs from x of another slide of"),
        (TABLE.replace("x,s,p\nb", "x,t,p\nb"), {"unit": "group"}, "column domain: s differs from t of another slide"),
        ("slide,label,domain\na,x,s\n", {"unit": "group"}, "there is no column group; found: slide, label, domain"),
        ("name,label,domain\na,x,s\n", {}, "there is no column slide or file; add one, or set data.columns"),
        (
            TABLE,
            {"pool": "max", "class_embeddings": "t.npz"},
            "data.pool: max is no mean of image embeddings; use mean",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(table, settings, words, folder):
    two(folder)
    with pytest.raises(UserError) as caught:
        bags(folder, table, **settings)
    [line] = caught.value.args
    assert words in line
    with pytest.raises(UserError, match=r"data\.folder: \S+nowhere does not exist"):
        Bags(folder=folder / "nowhere", table=folder / "slides.csv")
    with pytest.raises(UserError, match=r"data\.table: \S+nowhere.csv does not exist"):
        Bags(folder=folder, table=folder / "nowhere.csv")


def test_without_h5py_one_line_says_what_to_install(folder, monkeypatch):
    (folder / "a.h5").write_bytes(b"")
    (folder / "b.h5").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match=r"a\.h5: HDF5 needs h5py, not installed here; pip install 'xdm_ft\[bags\]'"):
        bags(folder)


def test_unchanged_files_are_not_read_again(folder, read_files):
    two(folder)
    first = bags(folder).features
    assert read_files == ["a.npy", "b.npy"]
    assert np.array_equal(bags(folder).features, first) and len(read_files) == 2
    assert bags(folder, pool="max", unit="group").features.shape == (1, 3) and len(read_files) == 2
    os.utime(folder / "a.npy")  # hashed again, with the same content
    assert np.array_equal(bags(folder).features, first) and len(read_files) == 2
    torchmil(folder / "b.npy", A)
    assert np.array_equal(bags(folder).features, first[[0, 0]]) and len(read_files) == 2, "it is a copy now"
    torchmil(folder / "b.npy", A + 1)
    assert not np.array_equal(bags(folder).features, first) and read_files[2:] == ["b.npy"]


def test_a_damaged_index_and_a_cache_that_cannot_be_written(folder, monkeypatch):
    two(folder)
    first = bags(folder).features
    (folder.parent / "cache/bags.sqlite").write_bytes(b"damaged" * 1000)
    assert np.array_equal(bags(folder).features, first)
    monkeypatch.setenv("XDM_FT_CACHE", str(folder / "a.npy/nowhere"))
    assert np.array_equal(bags(folder).features, first)


def test_equal_bags_are_copies(folder):
    torchmil(folder / "a.npy", A)
    clam_pt(folder / "b.pt", A)
    assert hash_files(bags(folder), None, show=False).duplicates() == [[0, 1]]


def test_one_bag_is_in_memory_at_a_time(folder, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 1 << 16)
    for name in "abcd":
        torchmil(folder / f"{name}.npy", np.ones((1 << 18, 16), np.float32))  # 16 MB
    table = "slide,label,domain\n" + "".join(f"{name},x,s\n" for name in "abcd")
    tracemalloc.start()
    bags(folder, table)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12e6  # the hash holds two pieces of 4 MB


READER = """
import sys
from pathlib import Path
from xdm_ft.data.bags import Bags
print(Bags(folder=Path(sys.argv[1]), table=Path(sys.argv[1]) / "slides.csv").features.sum())
"""


def started(folder, code=READER):
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)


def test_a_killed_reader_keeps_what_it_has_read(folder, read_files):
    slides(folder, per_class=10)
    slow = "import time, xdm_ft.image_files.bags as m; r = m.read_bag; m.SECONDS = 0\n"
    slow += "m.read_bag = lambda file: time.sleep(0.05) or r(file)\n"
    process = started(folder, slow + READER)
    index = folder.parent / "cache/bags.sqlite"
    while not (index.exists() and index.stat().st_size > 3000):
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    again = Bags(folder=folder, table=folder / "slides.csv")
    assert len(again) == 60 and 0 < len(read_files) < 58, "the others were read before the kill"


def test_two_processes_read_each_file_once(folder):
    slides(folder, per_class=10)
    counted = "import xdm_ft.image_files.bags as m; r = m.read_bag; n = []\n"
    counted += "m.read_bag = lambda file: n.append(file) or r(file)\n"
    processes = [started(folder, counted + READER + "print(len(n))") for _ in range(2)]
    texts = [process.communicate()[0].split() for process in processes]
    assert texts[0][0] == texts[1][0] and sum(int(text[1]) for text in texts) == 60


@pytest.mark.slow
def test_ten_thousand_bags(folder, read_files):
    z, rows = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32), ["slide,label,domain"]
    for number in range(10_000):
        torchmil(folder / f"{number}.npy", z + number)
        rows.append(f"{number},{number % 2},{number % 5}")
    start = time.monotonic()
    data = bags(folder, "\n".join(rows))
    assert len(data) == len(read_files) == 10_000
    np.testing.assert_allclose(data.features[:, 0], z[:, 0].mean() + np.arange(10_000), rtol=1e-5)
    took, start = time.monotonic() - start, time.monotonic()
    assert np.array_equal(bags(folder, "\n".join(rows)).features, data.features) and len(read_files) == 10_000
    again = time.monotonic() - start
    assert again < took, (took, again)
    assert multiprocessing.active_children() == []
