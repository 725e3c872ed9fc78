"""Features that were computed elsewhere: npz and Parquet give the same data, and every fault is one line."""

import io
import tracemalloc
import warnings
import zipfile
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest

from xdm_ft.data.features import FeatureTable
from xdm_ft.features.hashes import hash_files
from xdm_ft.runtime.errors import UserError

Z = np.arange(12, dtype=np.float32).reshape(4, 3) / 7
TEXTS = {"label": ["cat", "dog", "cat", "dog"], "domain": ["b", "a", "a", "b"]}
MORE = {"group": ["p1", "p1", "p2", "p2"], "split": ["train", "val", "test", "train"], "id": ["w", "x", "y", "z"]}


def npz(path, z=Z, **columns):
    arrays = {name: np.array(values) for name, values in (TEXTS | columns).items() if values is not None}
    np.savez(path, **({} if z is None else {"features": z}), **arrays)
    return path


def parquet(path, z=Z, kind=None, **columns):
    cells = {name: values for name, values in (TEXTS | columns).items() if values is not None}
    if z is not None:
        cells["features"] = pyarrow.array([*map(list, z)], kind or pyarrow.list_(pyarrow.float32()))
    pyarrow.parquet.write_table(pyarrow.table(cells), path, row_group_size=3)
    return path


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: npz(folder / "f.npz", **MORE, other=[1, 2, 3, 4]),
        lambda folder: npz(folder / "f.npz", Z.astype(np.float64), **MORE),
        lambda folder: parquet(folder / "f.parquet", **MORE, other=[1, 2, 3, 4]),
        lambda folder: parquet(folder / "f.parquet", kind=pyarrow.list_(pyarrow.float32(), 3), **MORE),
        lambda folder: parquet(folder / "f.parquet", kind=pyarrow.large_list(pyarrow.float64()), **MORE),
    ],
)
def test_rows_are_those_of_the_file(write, tmp_path):
    data = FeatureTable(file=write(tmp_path))
    assert data.features.dtype == np.float32 and np.array_equal(data.features, Z)
    assert data.class_names == ("cat", "dog") and data.labels.tolist() == [0, 1, 0, 1]
    assert data.domain_names == ("a", "b") and data.domains.tolist() == [1, 0, 0, 1]
    assert data.groups.tolist() == [0, 0, 1, 1] and data.splits.tolist() == ["train", "val", "test", "train"]
    assert [data.name_in_data(row) for row in range(4)] == ["w", "x", "y", "z"]
    assert data.content(1) == Z[1].tobytes() and not data.has_images


def test_without_optional_columns_and_with_integers(tmp_path):
    data = FeatureTable(file=npz(tmp_path / "f.npz", label=[10, 9, 10, 9], domain=[0, 1, 0, 1]))
    assert data.class_names == ("9", "10") and data.labels.tolist() == [1, 0, 1, 0]
    assert data.groups is None and data.splits is None and data.name_in_data(2) == "row 2"
    with pytest.raises(UserError, match=r"f.npz, row 2: has no image"):
        data.image(2)


def test_a_folder_of_files_is_one_table(tmp_path):
    parquet(tmp_path / "0.parquet", id=["a", "b", "c", "d"])
    parquet(tmp_path / "1.parquet", Z + 1, id=["e", "f", "g", "h"], domain=["c"] * 4)
    data = FeatureTable(file=tmp_path)
    assert np.array_equal(data.features, np.concatenate([Z, Z + 1])) and data.domain_names == ("a", "b", "c")
    parquet(tmp_path / "2.parquet", Z)
    with pytest.raises(UserError, match=r"2.parquet: column id is in some files alone"):
        FeatureTable(file=tmp_path)
    parquet(tmp_path / "2.parquet", Z[:, :2], id=["i", "j", "k", "l"])
    with pytest.raises(UserError, match=r"2.parquet: has 2 features per row, and \S+0.parquet has 3; write one width"):
        FeatureTable(file=tmp_path)


def test_equal_rows_are_copies(tmp_path):
    hashes = hash_files(FeatureTable(file=npz(tmp_path / "f.npz", Z[[0, 1, 0, 2]])), None, show=False)
    assert hashes.duplicates() == [[0, 2]] and len(hashes.images.contents) == 3


def nan_at(row):
    z = Z.copy()
    z[row:, 1] = np.nan
    return z


def array(values, rows=None):
    """An array as its bytes in an npz, whose header says that it has so many rows."""
    stream, values = io.BytesIO(), np.array(values)
    header = np.lib.format.header_data_from_array_1_0(values) | {"shape": (rows or len(values),)}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue() + values.tobytes()


def member(path, content):
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as file:
        warnings.simplefilter("ignore")  # of a name that is there already
        file.writestr("label.npy", content)
    return path


def bare(path):
    with path.open("wb") as file:
        np.save(file, Z)
    return path


def twice(path):
    table = pyarrow.parquet.read_table(parquet(path))
    pyarrow.parquet.write_table(table.append_column("label", table["domain"]), path)
    return path


RAGGED = [[1.0, 2.0], [3.0, 4.0], [5.0], [6.0, 7.0]]
FAULTS = {
    "absent": (lambda f: f / "f.npz", r"f.npz does not exist"),
    "NaN": (lambda f: npz(f / "f.npz", nan_at(2)), r"column features: 2 of 4 rows are not finite .* the first: row 2"),
    "infinity": (lambda f: npz(f / "f.npz", Z / 0.0 + 1, id=["w", "x", "y", "z"]), r"rows are not finite .*: w"),
    "ragged": (lambda f: parquet(f / "f.parquet", RAGGED), r"row 2 has 1 values, and row 0 has 2; write lists of one"),
    "no domain": (lambda f: npz(f / "f.npz", domain=None, domains=["a"] * 4), r'"domain"; did you mean "domains"'),
    "integers": (lambda f: npz(f / "f.npz", Z.astype(int)), r"features is int64 \[4, 3\]; it must be floating"),
    "texts": (lambda f: parquet(f / "f.parquet", ["ab"] * 4, pyarrow.list_(pyarrow.string())), r"a list of floats"),
    "short": (lambda f: npz(f / "f.npz", label=["cat"]), r"label has shape \[1\]; it must be \[4\]"),
    "objects": (lambda f: npz(f / "f.npz", label=np.array(["cat"] * 4, object)), r"array label holds Python objects"),
    "empty table": (lambda f: parquet(f / "f.parquet", Z[:0], label=[], domain=[]), r"has no rows"),
    "repeated id": (lambda f: npz(f / "f.npz", id=["w", "x", "w", "x"]), r'"w" is the id of rows 0, 2, and 2 ids'),
    "no name": (lambda f: parquet(f / "f.parquet", label=["a", None, "a", "a"]), r"row 1, column label: the cell is"),
    "bytes": (
        lambda f: npz(f / "f.npz", label=np.array(TEXTS["label"], "S")),
        r"must be text or a number, not a binary",
    ),
    "long": (lambda f: npz(f / "f.npz", label=np.full(4, 2**64 - 1, np.uint64)), r"column label: .*; write it as text"),
    "bare array": (lambda f: bare(f / "f.npz"), r"is one array, not an npz; write it"),
    "no array": (
        lambda f: member(npz(f / "f.npz", label=None), b"text"),
        r"label is no array; write it with numpy.savez",
    ),
    "twice": (lambda f: member(npz(f / "f.npz"), array([1, 2, 3, 4])), r"two arrays have the name label; keep one"),
    "false size": (
        lambda f: member(npz(f / "f.npz", label=None), array([1] * 4, 10**12)),
        r"header says 8,000,0.*write",
    ),
    "column twice": (lambda f: twice(f / "f.parquet"), r"two columns have the name label; keep one"),
    "split": (lambda f: npz(f / "f.npz", split=["train", "tset", "val", "val"]), r'the split "tset" is unknown'),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.filterwarnings("ignore:invalid value")
def test_faults_are_one_line(fault, tmp_path):
    write, words = FAULTS[fault]
    with pytest.raises(UserError, match=words) as caught:
        FeatureTable(file=write(tmp_path))
    assert len(str(caught.value).splitlines()) == 1 and ";" in str(caught.value)


@pytest.mark.parametrize("write", [npz, parquet])
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_file_that_was_cut_is_refused(write, share, tmp_path):
    path = write(tmp_path / f"f.{write.__name__}")
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(UserError, match=r"cannot be read \(.*\); write the file again"):
        FeatureTable(file=path)


@pytest.mark.parametrize("order", [">", "<"])
def test_any_order_of_bytes_and_of_axes(order, tmp_path):
    label, domain = np.array([10, 9, 10, 9], f"{order}i4"), np.array(TEXTS["domain"], f"{order}U3")
    data = FeatureTable(
        file=npz(tmp_path / "f.npz", np.asfortranarray(Z.astype(f"{order}f8")), label=label, domain=domain)
    )
    assert np.array_equal(data.features, Z) and data.features.flags.c_contiguous
    assert data.class_names == ("9", "10") and data.labels.tolist() == [1, 0, 1, 0] and data.domain_names == ("a", "b")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 1_000_000])
def test_what_does_not_fit_is_refused_before_it_is_read(rows, tmp_path, monkeypatch):
    """Zeros, of which a file of 0.2 MB holds 200 MB."""
    z, about = np.zeros((100_000, 512), np.float32), ["x"] * rows
    if rows > 3:
        z, about = z[:50_000], ["x"] * 50_000
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9e7))
    arrays = {"features": z, "label": np.array(about), "domain": np.array(about)}
    np.savez_compressed(tmp_path / "f.npz", allow_pickle=False, **arrays)
    del z, arrays
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"needs 0.1 GB of memory, and 0.1 GB are free|must be \[100000\]"):
            FeatureTable(file=tmp_path / "f.npz")
        assert tracemalloc.get_traced_memory()[1] < 2e7
    finally:
        tracemalloc.stop()


def test_large_files_are_not_copied_many_times(tmp_path):
    rows, width = 10_000, 512
    z = np.zeros((rows, width), np.float32)
    npz(tmp_path / "f.npz", z, label=["cat", "dog"] * (rows // 2), domain=["a", "b"] * (rows // 2))
    tracemalloc.start()
    try:
        FeatureTable(file=tmp_path / "f.npz")
        assert z.nbytes < tracemalloc.get_traced_memory()[1] < 2 * z.nbytes
    finally:
        tracemalloc.stop()


def text(folder, z=None, label=("dog", "cat"), name="text.npz"):
    """Class embeddings, in another order than the classes of the data."""
    z = np.array([[0.0, 3.0, 4.0], [2.0, 0.0, 0.0]]) if z is None else np.array(z)
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"label": [*label], "features": [*map(list, z)]}), folder / name)
    else:
        np.savez(folder / name, label=np.array(label), features=z)
    return folder / name


@pytest.mark.parametrize("name", ["text.npz", "text.parquet"])
def test_class_embeddings_follow_the_classes_and_have_length_one(name, tmp_path):
    data = FeatureTable(file=npz(tmp_path / "f.npz"), class_embeddings=text(tmp_path, name=name), logit_scale=7)
    assert data.class_names == ("cat", "dog") and data.logit_scale == 7 and data.left_out == ()
    np.testing.assert_allclose(data.class_embeddings, [[1, 0, 0], [0, 0.6, 0.8]], rtol=1e-6)
    assert data.class_embeddings.dtype == np.float32
    more = text(tmp_path, np.eye(3), ("cow", "dog", "cat"))
    data = FeatureTable(file=npz(tmp_path / "f.npz"), class_embeddings=more)
    np.testing.assert_array_equal(data.class_embeddings, np.eye(3)[[2, 1]])
    # no fault of the data
    assert data.text_source == "class embeddings of text.npz, without 1 class that the data lack" and not data.left_out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"z": np.ones((2, 4))}, r"text.npz: has 4 features, and .*f.npz has 3; give those of the same CLIP"),
        ({"label": ("cat", "cat")}, r'class "cat" is in 2 rows; write one per class'),
        ({"label": ("cat", "dogs")}, r'has no class "dog" of the data; did you mean "dogs"'),
        ({"z": [[1.0, np.nan, 0.0], [1.0, 0.0, 0.0]]}, r'the features of class "dog" are zero or not finite; repair'),
        ({"z": [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]}, r'the features of class "dog" are zero or not finite; repair'),
        ({"z": np.ones((2, 3), int)}, r"features is int64 .*; it must be floating"),
    ],
)
def test_faults_of_class_embeddings_are_one_line(given, words, tmp_path):
    with pytest.raises(UserError, match=words) as caught:
        FeatureTable(file=npz(tmp_path / "f.npz"), class_embeddings=text(tmp_path, **given))
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(UserError, match=r"nowhere.npz"):
        FeatureTable(file=npz(tmp_path / "f.npz"), class_embeddings=tmp_path / "nowhere.npz")
