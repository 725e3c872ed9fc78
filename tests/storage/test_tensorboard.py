"""TensorBoard's files: what a resumed training replaces, what a kill and damage leave, and names of sub-runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.tensorboard import EventFile, Scalars, Session, read_scalars, sub_run, write_session


def shown(folder: Path) -> Scalars:
    """What TensorBoard itself shows of a sub-run."""
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    found = {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}
    for tag in accumulator.Tags()["tensors"]:
        if not tag.startswith("_hparams_"):
            found[tag] = [(e.step, float(make_ndarray(e.tensor_proto))) for e in accumulator.Tensors(tag)]
    return found


def train(folder: Path, steps: range, offset: float = 0.0) -> EventFile:
    file = EventFile(folder, "0")
    for step in steps:
        file.write(step, {"train/loss": step + offset, "val/accuracy": 0.5})
    return file


def test_a_resumed_training_leaves_no_double_points(tmp_path: Path) -> None:
    train(tmp_path / "erm/a/seed0", range(2, 10, 2))
    train(tmp_path / "erm/a/seed0", range(6, 8, 2), offset=0.25)  # killed again, before step 8
    loss = [(2, 2.0), (4, 4.0), (6, 6.25)]
    assert read_scalars(tmp_path) == {"erm/a/seed0": {"train/loss": loss, "val/accuracy": [(s, 0.5) for s, _ in loss]}}
    assert shown(tmp_path / "erm/a/seed0")["train/loss"] == loss
    assert read_scalars(tmp_path / "nothing") == {}
    train(tmp_path / "a", range(2, 10, 2)).write(4, {"train/loss": 7.0})  # begun again by the same process
    assert read_scalars(tmp_path)["a"]["train/loss"] == [(2, 2.0), (4, 7.0)] == shown(tmp_path / "a")["train/loss"]


@pytest.mark.parametrize("left", [0, 30, -1])
def test_a_file_that_was_cut_off_or_damaged_keeps_what_came_before(
    left: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`left`: bytes that are left of the file."""
    file = train(tmp_path / "a", range(2, 10, 2))
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:left])
    damaged = list[Path]()
    before = read_scalars(tmp_path, damaged)["a"].get("train/loss", [])
    assert damaged == [file.path] and f"{file.path}: is damaged, so learning curves lack points" in caplog.text
    assert before == [(2, 2.0), (4, 4.0), (6, 6.0)][: None if left < 0 else 0]
    middle = len(whole) * 2 // 3
    file.path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :])
    assert read_scalars(tmp_path)["a"]["train/loss"] == [(2, 2.0), (4, 4.0)]
    train(tmp_path / "a", range(4, 10, 2))
    caplog.clear()
    assert [step for step, _ in read_scalars(tmp_path)["a"]["train/loss"]] == [2, 4, 6, 8]
    assert not caplog.messages  # killed, and resumed


def test_other_things_in_the_folder_are_no_curves(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1").mkdir()
    (tmp_path / "events.out.tfevents.2").symlink_to(tmp_path / "gone")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "events.out.tfevents.3").write_text("no record at all")
    assert read_scalars(tmp_path) == {"a": {}}


def test_names_of_sub_runs_are_distinct_and_stay_in_their_folder() -> None:
    odd = ["final_fit", "+final_fit", "..", "a/b", "a,b", "", "<script>1</script>", "\u202eabc", "語" * 60]
    names = [sub_run("m", (name,), 0, 0) for name in odd] + [sub_run(name, ("d",), 0, 0) for name in odd[:-1]]
    names += [sub_run("m", ("a", "b"), 0, 0), sub_run("m", (), 0, 0), sub_run("m", ("d",), 0, 3)]
    names += [sub_run("m", ("d",), 0, 3, heads=True)]
    assert len(set(names)) == len(names)
    assert all(name.isascii() and name.count("/") == 2 and ".." not in name.split("/") for name in names)
    assert sub_run("erm+sam", ("art painting",), 1, 0) == "erm+sam/art painting/seed1"


def test_a_session_is_written_once_and_replaced_when_it_changes(tmp_path: Path) -> None:
    session = Session("erm/a/trial0", {"lr": 0.1, "p": True, "head": "mlp"}, 40, {"test/accuracy": 0.75})
    write_session(tmp_path / "s", session)
    [file] = (tmp_path / "s").iterdir()
    before = file.stat().st_ino, file.stat().st_mtime_ns
    write_session(tmp_path / "s", session)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == before
    train(tmp_path / "s", range(2, 10, 2))  # trained again: the test values stay
    assert read_scalars(tmp_path)["s"]["test/accuracy"] == [(40, 0.75)] == shown(tmp_path / "s")["test/accuracy"]
    write_session(tmp_path / "s", Session("erm/a/trial0", {}, 40, {"test/accuracy": 0.5}))
    assert not file.exists() and read_scalars(tmp_path)["s"]["test/accuracy"] == [(40, 0.5)]


@pytest.mark.parametrize("place", [0, 13, -50])
def test_a_damaged_session_is_written_again(place: int, tmp_path: Path) -> None:
    session = Session("erm/a/trial0", {"lr": 0.1, "p": True, "head": "mlp"}, 40, {"test/accuracy": 0.75})
    write_session(tmp_path, session)
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place:][1:]):
        file.write_bytes(damaged)
        write_session(tmp_path, session)
        assert file.stat().st_size == len(whole), "equal but for the time"
        assert read_scalars(tmp_path)[""]["test/accuracy"] == [(40, 0.75)]


def test_a_version_without_an_undocumented_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    needed = r"^tensorboard [\d.]+ lacks a part that is needed \(.*\); run: pip install 'tensorboard==2\.21\.\*'$"
    with pytest.raises(UserError, match=needed):
        EventFile(tmp_path, "0").write(1, {"loss": 1.0})
