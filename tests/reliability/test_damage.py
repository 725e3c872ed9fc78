"""Every file of a run directory, damaged, missing, edited or another thing: one line, or the same numbers once more."""

import functools
import json
import logging
import os
import random
import shutil
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image, ImageOps
from real_runs import on_images, one_line, outcome, run_here
from safetensors.torch import save_file

from xdm_ft.cli.parser import main
from xdm_ft.experiment import pieces, plan, results
from xdm_ft.experiment.results import RECORDS, read_records
from xdm_ft.export.choose import Choice, read_parts
from xdm_ft.results.run import Run, read_run
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage import checkpoint
from xdm_ft.storage.checkpoint import Checkpoint, Pace
from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.results_file import write_results
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.storage.tensors import read_checked, read_tensors

SOON = 60.0  # seconds, on a busy machine; what would hang does so for ever or for hours
WORDS = ("damaged", "missing", "another recipe", "cannot be", "another run", "another version")
NESTED = '{"value": ' + "[" * 900 + "]" * 900 + ', "xxh3": "0", "runs": [], "environment": {}, "recipe": {}}\n'

# ---- What may happen to a file


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


REPLACEMENTS = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "text": lambda path: path.write_text("text"),
    "empty": Path.touch,
    "garbage": lambda path: path.write_bytes(bytes(range(255, 0, -1)) * 9),
    "other type": lambda path: path.write_text("[1, 2]"),  # reads well as YAML and JSON
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "brackets": lambda path: path.write_text("[" * 100_000 + "\n"),
    "nested": lambda path: path.write_text(NESTED),  # less deep than what Python's reader refuses
    "header of brackets": lambda path: path.write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000),
    "empty tensors": lambda path: empty_tensors(path),
}


def empty_tensors(path, size=8_000_000, metadata=None):
    """A header of `size` bytes, of tensors without numbers."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({"__metadata__": metadata or {}} | {f"{number:08}": entry for number in range(size // 64)})
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode())


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def drop_a_line(path):
    """Cut between two lines: every line that is left is complete."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def flip_a_digit(path):
    """Still complete, and wrong: the last byte of numbers, or the first digit after a point."""
    data = bytearray(path.read_bytes())
    position = data.find(b"0.") + 2 if path.suffix in (".json", ".jsonl") and b"0." in data else len(data) - 1
    data[position] = ord("3") if data[position] != ord("3") else ord("4")
    path.write_bytes(data)


def change_the_step(path):
    """Of the metadata."""
    data = path.read_bytes()
    position = data.index(b'"step":"') + 8
    path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])


def as_before_checksums(path):
    tensors, metadata = read_tensors(path)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, {"step": metadata["step"]})


def of_another_model(path):
    shutil.copyfile(next(other for other in path.parents[3].rglob(path.name) if other != path), path)


IN_PLACE = {
    "remove": remove, "truncate": truncate, "drop a line": drop_a_line, "flip a digit": flip_a_digit,
    "change the step": change_the_step, "as before checksums": as_before_checksums,
    "of another model": of_another_model,
}  # fmt: skip


def damage(path, kind):
    if kind in IN_PLACE:
        IN_PLACE[kind](path)
    else:
        remove(path)
        REPLACEMENTS[kind](path)


# ---- The runs


class Stopped(Exception):
    """The process ends here."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A recipe, its data and cache, and its run directory out/small."""
    recipe = on_images(tmp_path_factory.mktemp("finished"))
    text = recipe.read_text().replace("[sketch], seeds: 1", "[sketch, photo], seeds: 1, final_fit: true")
    recipe.write_text(text)
    assert run_here(recipe) == 0
    return recipe.parent


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """All models trained; what ends is the summary."""
    recipe = on_images(tmp_path_factory.mktemp("interrupted"))
    text = recipe.read_text().replace("[sketch], seeds: 1", "[sketch, photo], seeds: 1, selection: cross_domain")
    recipe.write_text(text)

    def stop(*_):
        raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "summary_of", stop)
        assert run_here(recipe) == 1
    assert {"records", "cross_domain"} <= {path.name for path in (recipe.parent / "out/small/state").iterdir()}
    return recipe.parent


@pytest.fixture(scope="module")
def expected(finished, interrupted, tmp_path_factory):
    """What each of the two ends with, undamaged."""
    copy = copied(interrupted, tmp_path_factory.mktemp("undamaged"))
    assert again(interrupted, copy) == 0
    return {"finished": numbers(finished / "out/small"), "interrupted": numbers(copy)}


@pytest.fixture
def run(finished, tmp_path):
    return copied(finished, tmp_path)


def copied(folder, target):
    """Returns a copy of the run directory."""
    return Path(shutil.copytree(folder / "out/small", target / "out/small", copy_function=shutil.copy2))


def again(folder, run, *overrides):
    return run_here(folder / "small.yaml", f"output.dir={run.parent}", *overrides)


def numbers(run):
    return {key: value for key, value in outcome(run.parent).items() if key in ("results", "files")}


def tensor_files(run):
    """Returns {file: time of its last change}."""
    files = sorted((run / "models").rglob("*.safetensors"))
    assert {path.stem for path in files} == {"train_val", "oracle", "predictions", "model"}
    return {path: path.stat().st_mtime_ns for path in files}


# ---- The matrix

# every damage of one file, as one function reads all of them; of each other reader the kinds that reach its own code
TENSORS = f"{', '.join(REPLACEMENTS)}, truncate, flip a digit, remove"
FILES = {
    "finished": {
        "results.json": "truncate, flip a digit, remove, folder, brackets, nested",
        "recipe.yaml": "truncate, brackets",
        "results.md": "folder",
        "run.lock": "garbage, pipe",
        "models": "text",
        "models/erm/*/*/predictions.safetensors": "flip a digit",
        "models/erm/*/*/train_val.safetensors": TENSORS,
        "models/final_fit/erm/model.safetensors": "remove",
        "test_images/*.safetensors": "flip a digit",
        "training_features/*.safetensors": "truncate",
        "events": "text",
        "events/*": "folder",
    },
    "interrupted": {
        "results.json": "garbage",
        "recipe.yaml": "remove",
        "models/erm/**/cross_domain.safetensors": "remove",
        "state": "text",
        "state/records": "text",
        "state/records/0.jsonl": "truncate, garbage, drop a line, flip a digit, other type, folder, nested",
        "state/cross_domain/0.jsonl": "drop a line",
    },
}
ROWS = [(kind, file) for kind, files in FILES.items() for file in files]


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        pytest.param(*row, marks=pytest.mark.slow if number % 5 else (), id="-".join(row))
        for number, row in enumerate(ROWS)
    ],
)
def test_each_file(kind, file, request, expected, tmp_path, capfd):
    folder = request.getfixturevalue(kind)
    for number, name in enumerate(FILES[kind][file].split(", ")):
        run = copied(folder, tmp_path / str(number))
        damage(sorted(run.glob(file))[0], name)
        assert_mended_or_refused(folder, run, expected[kind], name, capfd)


def assert_mended_or_refused(folder, run, expected, what, capfd):
    capfd.readouterr()
    started = time.monotonic()
    status = again(folder, run)
    assert time.monotonic() - started < SOON, what
    errors = capfd.readouterr().err
    assert "Traceback" not in errors and "Error:" not in errors, errors
    if status == 2:
        line = one_line(errors)
        assert str(run) in line and any(word in line for word in WORDS), (what, line)
    else:
        assert status == 0 and "xdm-ft: " not in errors, (what, errors)
        assert numbers(run) == expected, what
    assert [path.name for path in run.parents[1].iterdir()] == ["out"], what


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(8))
def test_damage_anywhere(seed, request, expected, tmp_path, capfd):
    """250 times: a byte that flips, a cut, a block of zeros, or the bytes of another file, at a place that is drawn."""
    draw = random.Random(seed)
    for number in range(250):
        kind, pattern = draw.choice(ROWS)
        folder = request.getfixturevalue(kind)
        run = copied(folder, tmp_path / str(number))
        file = draw.choice(
            sorted(path for path in (*run.glob(pattern), *run.glob(f"{pattern}/**/*")) if path.is_file())
        )
        data, other = bytearray(file.read_bytes()), draw.choice(sorted(p for p in run.rglob("*") if p.is_file()))
        place = draw.randrange(max(1, len(data)))
        how = draw.choice(["flip", "cut", "zeros", "other"])
        if how == "flip" and data:
            data[place] ^= 1 << draw.randrange(8)
        elif how == "cut":
            del data[place:]
        elif how == "zeros":
            data[place : place + 512] = bytes(len(data[place : place + 512]))
        elif how == "other":
            data = other.read_bytes()
        file.write_bytes(data)
        assert_mended_or_refused(folder, run, expected[kind], (number, how, place, file.relative_to(run)), capfd)
        shutil.rmtree(tmp_path / str(number))


REASONS = [
    ("models/erm/*/*/train_val.safetensors", "change the step", "its checksum differs"),
    ("models/erm/*/*/train_val.safetensors", "as before checksums", "it has no checksum"),
    ("models/erm/*/*/train_val.safetensors", "of another model", "it was written as models/erm/"),
    ("models/final_fit/erm/model.safetensors", "flip a digit", "its checksum differs"),
    ("test_images/photo.safetensors", "flip a digit", "its checksum differs"),
    ("training_features/+final_fit.safetensors", "flip a digit", "its checksum differs"),
]


@pytest.mark.slow
def test_damage_is_named_and_mended_alone(finished, run, caplog):
    caplog.set_level(logging.INFO, "xdm_ft")
    expected, times = numbers(run), tensor_files(run)
    assert again(finished, run) == 0
    assert tensor_files(run) == times and "damaged" not in caplog.text, "what is whole is not trained again"
    for file, kind, reason in REASONS:
        caplog.clear()
        path, times = sorted(run.glob(file))[0], tensor_files(run)
        content = path.read_bytes()
        damage(path, kind)
        assert path.read_bytes() != content
        assert again(finished, run) == 0
        [line] = [line for line in caplog.messages if "is damaged" in line]
        model = file.startswith("models")
        assert line.startswith(f"{path}: is damaged ({reason}")
        assert line.endswith("; its model will be trained again" if model else "; it will be written again")
        assert ("(erm: 1 model)" in caplog.text) == file.startswith("models/erm")
        assert path.read_bytes() == content and numbers(run) == expected
        others = {other for other, changed in tensor_files(run).items() if changed != times[other]}
        assert {other.parent for other in others} <= {path.parent}, "nothing else is trained again"

    reports = [run / "results.md", run / "results.csv", *run.glob("events/**/*.hparams")]
    texts, sizes = [path.read_bytes() for path in reports[:2]], [path.stat().st_size for path in reports]
    for path, kind in zip(reports, ("flip a digit", "truncate", "truncate", "empty"), strict=True):
        damage(path, kind)
    assert again(finished, run) == 0
    assert [path.read_bytes() for path in reports[:2]] == texts
    assert [path.stat().st_size for path in reports] == sizes


def test_every_damage_of_every_file_of_tensors_is_found_or_harmless(run):
    directory, draw = RunDirectory(run, main=False), random.Random(0)
    for path in {path.stem: path for path in tensor_files(run)}.values():
        relative, content = str(path.relative_to(run)), path.read_bytes()
        assert read_tensors(path)[0].keys() == read_checked(path)[0].keys()
        tensors, metadata = directory.tensors(relative)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        flipped = [*range(8), *(draw.randrange(len(content)) for _ in range(60)), len(content) - 1]
        contents = [content[:p] + bytes([content[p] ^ 1 << draw.randrange(8)]) + content[p + 1 :] for p in flipped]
        zeros = [draw.randrange(len(content)) for _ in range(10)]
        contents += [content[:p] + bytes(64) + content[p + 64 :] for p in zeros]
        contents += [content[: draw.randrange(len(content))], content + b"x", b"", bytes(len(content))]
        refused = 0
        for damaged in contents:
            path.write_bytes(damaged)
            try:
                read, read_metadata = directory.tensors(relative)
            except Damaged:
                refused += 1
                continue
            assert read_metadata == metadata and read.keys() == tensors.keys()
            assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
        assert refused > len(contents) - 10, relative
        path.write_bytes(content)


@pytest.mark.slow
def test_other_things_in_the_place_of_a_file(finished, tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(Exception, match="it is a folder"):
        Checkpoint(tmp_path / "a", {}, Pace()).load({})
    os.mkfifo(tmp_path / "b")
    pipe = Checkpoint(tmp_path / "b", {}, Pace())
    assert pipe.load({}) is None
    pipe.save(lambda: {"n": 1})
    assert Checkpoint(tmp_path / "b", {}, Pace()).load({}) == {"n": 1}
    shutil.copy(finished / "out/small/models/final_fit/erm/model.safetensors", tmp_path / "c")
    with pytest.raises(Damaged, match="it is not a checkpoint"):
        checkpoint.read(tmp_path / "c")
    empty_tensors(tmp_path / "w", 4_000_000, {"xxh3": "0"})
    with pytest.raises(Damaged, match="its checksum differs"):
        read_checked(tmp_path / "w")
    empty_tensors(tmp_path / "w", 8_000_000)
    started = time.process_time()
    with pytest.raises(Damaged, match="it has no checksum"):
        read_checked(tmp_path / "w")
    assert time.process_time() - started < 4  # where it is read tensor by tensor: more than ten


# ---- Files of another run

OTHER = ("training.lr=0.02", "protocol.val_fraction=0.3")  # the same names of files, and other content
ELSEWHERE = (
    "models/erm/photo/*/train_val.safetensors", "models/erm/sketch/*/predictions.safetensors",
    "models/final_fit/erm/model.safetensors", "test_images/photo.safetensors", "training_features/photo.safetensors",
    "training_features/+final_fit.safetensors",
)  # fmt: skip
REPORTS = ("results.md", "results.csv", "reports.json")


@pytest.fixture(scope="module")
def other(finished, tmp_path_factory):
    """A finished run of the same name, on other images of the same names."""
    folder = tmp_path_factory.mktemp("other")
    recipe = on_images(folder)
    recipe.write_text((finished / "small.yaml").read_text().replace(str(finished), str(folder)))
    for path in (folder / "data").rglob("*.png"):
        with Image.open(path) as image:
            ImageOps.invert(image.convert("RGB")).save(path)
    for path in folder.glob("data/PACS/*/dog/000.png"):
        path.unlink()  # fewer test images
    assert run_here(recipe, *OTHER) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xdm_ft.analysis.embedding.STEPS", 5)
        patch.setattr("xdm_ft.experiment.analyse.own_cores", lambda: 1)
        assert main(["analyse", str(folder / "out/small")]) == 0
    return folder / "out/small"


@pytest.mark.slow
def test_files_of_another_run_are_found_wherever_they_are_read(finished, other, run, caplog, capsys, no_charts):
    expected, names = numbers(run), [str(sorted(run.glob(pattern))[0].relative_to(run)) for pattern in ELSEWHERE]
    document = json.loads((run / "results.json").read_text())
    listed = [address for part in (*document["runs"], document["final_fit"]) for address in part["files"]]
    assert {*listed} == {str(path.relative_to(run)) for path in run.rglob("*/*.safetensors")}
    for name in (*names, *REPORTS):
        shutil.copy2(other / name, run / name)
        assert name in REPORTS or (run / name).read_bytes() != (finished / "out/small" / name).read_bytes(), name
    shutil.copy2(other / "analysis.json", run)
    assert Run.analysed(read_run(run)) == [] and "analysis.json: 2 models in it are of another run" in caplog.text
    (run / "analysis.json").unlink()

    weights, predictions, fit, images, *_ = names
    again_to = "is of another run; run the run's recipe again to"
    for command, name in (
        (["export", str(run), str(run.parent / "a")], fit),
        (["export", str(run), str(run.parent / "a"), "--held-out", "photo"], weights),
        (["analyse", str(run)], weights),
    ):
        capsys.readouterr()
        assert main(command) == 2
        assert f"xdm-ft: {run / name}: {again_to} train this model again" in one_line(capsys.readouterr().err)
    with pytest.raises(UserError, match=f"{images}: {again_to} write it again"):
        print(read_run(run).class_names, read_run(run).images(read_run(run).records[-1]))
    caplog.clear()
    assert again(finished, run) == 0
    lines = [line for line in caplog.messages if "of another run" in line]
    trained, written = "its model will be trained again", "it will be written again"
    assert sorted(lines) == sorted(
        f"{run / name}: is of another run; {trained if name.startswith('models') else written}" for name in names
    )
    assert numbers(run) == expected
    assert "84 images" in (run / "results.md").read_text() and "80 images" in (other / "results.md").read_text()
    shutil.copy2(other / predictions, run / predictions)
    (run / "measured.safetensors").unlink()  # made again from predictions
    assert main(["report", str(run)]) == 2 and str(run / predictions) in one_line(capsys.readouterr().err)


@pytest.mark.slow
def test_lines_and_checkpoints_of_another_run_are_left_alone(interrupted, expected, tmp_path, caplog, monkeypatch):
    """Of a run that was stopped, too: its lines and the files that they name fit each other."""
    foreign, run = tmp_path / "foreign/out/small", copied(interrupted, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(results, "summary_of", lambda *_: (_ for _ in ()).throw(Stopped))
        assert again(interrupted, foreign, "training.lr=0.02") == 1
    for folder in ("models", "state/records", "state/cross_domain"):
        shutil.rmtree(run / folder)
        shutil.copytree(foreign / folder, run / folder)
    assert again(interrupted, run) == 0
    assert "state/records: 2 lines of another run" in caplog.text and "state/cross_domain: " in caplog.text
    now, whole = numbers(run), expected["interrupted"]
    assert now["results"] == whole["results"] and whole["files"].items() <= now["files"].items()


# ---- Inputs, versions and edits


def without(*keys):
    def change(values):
        functools.reduce(lambda inner, key: inner[key], keys[:-1], values).pop(keys[-1])

    return change


def with_value(*keys, value):
    def change(values):
        functools.reduce(lambda inner, key: inner[key], keys[:-1], values)[keys[-1]] = value

    return change


RECIPE_EDITS = {
    "training.steps": with_value("training", "steps", value=13),
    "training.lr": without("training", "lr"),
    "data": without("data"),
}
RESULT_EDITS = [
    (without("runs"), False, "it lacks 'runs'"),
    # with a checksum that fits, as another version would write it
    *(
        (without("runs", 0, *key), True, "results.json: was edited, or made by another version of xdm_ft (runs.0")
        for key in (("selected",), ("selected", "train_val", "metrics"))
    ),
    (with_value("summary", 0, "mean", value=0.99), False, "its checksum differs"),
    (with_value("schema", value=2), False, "made by another version of xdm_ft (it has the schema 2, not 1)"),
    (with_value("runs", 0, "new", value=0), True, "made by another version of xdm_ft (runs.0 has the key"),
]


@pytest.mark.slow
def test_edited_files_are_refused(finished, run, capsys):
    recipe, document = run / "recipe.yaml", run / "results.json"
    texts = {path: path.read_bytes() for path in (recipe, document)}
    commands = (
        ["analyse", str(run)],
        ["run", str(finished / "small.yaml"), f"output.dir={run.parent}"],
        ["run", str(recipe), f"output.dir={run.parent}"],  # the edited file
    )
    for name, change in RECIPE_EDITS.items():
        values = yaml.safe_load(texts[recipe])
        change(values)
        recipe.write_text(yaml.safe_dump(values))
        for command in commands:
            capsys.readouterr()
            assert main(command) == 2
            errors = capsys.readouterr().err
            assert "Traceback" not in errors
            if command != commands[2] or name == "training.steps":  # else it is no recipe, or one with defaults
                line = one_line(errors)
                assert f"{recipe}: was edited or damaged" in line and name in line
        assert document.read_bytes() == texts[document]
    recipe.write_bytes(texts[recipe])
    for change, has_checksum, problem in RESULT_EDITS:
        values = json.loads(texts[document])
        change(values)
        if has_checksum:
            write_results(document, values)
        else:
            document.write_text(json.dumps(values))
        for command in commands[:2]:
            capsys.readouterr()
            assert main(command) == 2
            assert problem in one_line(capsys.readouterr().err)
    document.write_bytes(texts[document])

    assert main(commands[0]) == 0
    assert "all measures" in capsys.readouterr().out
    [path] = run.glob("models/erm/sketch/*/train_val.safetensors")
    damage(path, "flip a digit")
    export = ["export", str(run), str(run.parent / "model"), "--method", "erm", "--held-out", "sketch"]
    assert main(export) == 2
    assert f"{path}: is damaged (its checksum differs)" in one_line(capsys.readouterr().err)


def test_events_that_are_damaged_or_of_another_run_are_named(run, capfd, no_charts):
    """Each model's last step is that of the others, its values are not."""
    damaged, other = run / "events/erm/sketch/seed0", run / "events/erm/photo/seed0"
    shutil.rmtree(other)
    shutil.copytree(damaged, other)
    [path] = damaged.glob("events*.0")
    path.write_bytes(b"")
    assert main(["report", str(run)]) == 0
    errors, page = capfd.readouterr().err, (run / "report.html").read_text()
    assert f"{path}: is damaged, so learning curves lack points; replace it" in errors
    assert f"{path.relative_to(run)} is damaged: curves lack points." in page
    assert f"{other}: is of another run, so its curves are left out; take that" in errors
    assert f"{other.relative_to(run)} is of another run: its curves are left out." in page


# ---- Heads that share a file

SEEDS = "protocol.seeds=3"  # of 2 held-out domains: 6 heads


@pytest.fixture(scope="module")
def shared(finished, tmp_path_factory):
    """The folder of two runs: shared/small, whose heads share files, and own/small."""
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MAX_MODELS", 200)
        for name in ("own", "shared"):
            assert again(finished, folder / name / "small", SEEDS, "protocol.final_fit=false") == 0
            patch.setattr(plan, "MAX_MODELS", 0)
    return folder


@pytest.fixture
def large(shared, tmp_path, monkeypatch):
    """A copy of shared/small, in a process that shares files."""
    monkeypatch.setattr(plan, "MAX_MODELS", 0)
    return Path(shutil.copytree(shared / "shared/small", tmp_path / "small"))


def run_large(finished, run, *overrides):
    return again(finished, run, SEEDS, "protocol.final_fit=false", *overrides)


def contents(run):
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted((run / "models").rglob("*.*"))}


def assert_same_heads(run, other):
    first, second = read_run(run), read_run(other)
    assert [row.to_json() for row in first.rows] == [row.to_json() for row in second.rows]
    for record, expected in zip(first.records, second.records, strict=True):
        tensors, metadata = RunDirectory(run).tensors(record.selected["train_val"].weights)
        same, its_metadata = RunDirectory(other).tensors(expected.selected["train_val"].weights)
        assert tensors.keys() == same.keys() and all(tensors[name].equal(same[name]) for name in same)
        assert {**metadata, "file": ""} == {**its_metadata, "file": ""}
        assert (first.prediction(record).predicted == second.prediction(expected).predicted).all()


def test_a_method_has_a_file_per_chunk_and_the_same_numbers(shared, finished, tmp_path, monkeypatch):
    run = shared / "shared/small"
    assert [path.rpartition("/heads-")[0] for path in contents(run)] == ["models/erm"]
    assert not list((run / "models").glob("*/sketch*")), "no empty folders"
    assert all("#" in record.selected["train_val"].weights for record in read_run(run).records)
    assert_same_heads(run, shared / "own/small")
    monkeypatch.setattr(plan, "MAX_MODELS", 0)
    monkeypatch.setattr(pieces, "HEADS_PER_FILE", 4)
    monkeypatch.setattr(results, "KEEP_SHARED_SECONDS", 0.0)  # each file is written anew for every head
    assert run_large(finished, tmp_path / "small") == 0
    assert [path.rpartition("/")[0] for path in contents(tmp_path / "small")] == ["models/erm"] * 2
    assert_same_heads(tmp_path / "small", shared / "own/small")


@pytest.mark.parametrize("kind", ["truncate", "remove", "flip a digit", "folder"])
def test_a_damaged_shared_file(kind, finished, large, caplog, capsys):
    caplog.set_level(logging.INFO, "xdm_ft")
    [path], content, expected = (large / "models/erm").iterdir(), contents(large), numbers(large.parent / "small")
    damage(path, kind)
    if kind == "folder":
        assert run_large(finished, large) == 2
        assert f"{path}: cannot be written because it is a folder" in capsys.readouterr().err
        return
    assert run_large(finished, large) == 0
    assert contents(large) == content and numbers(large) == expected
    lines = [message for message in caplog.messages if "is damaged" in message]
    if kind == "flip a digit":
        assert any(line.startswith(f"{path}: is damaged (metadata of ") for line in lines)
        assert "erm: 1 model" in caplog.text, "the damaged head alone"
    else:
        assert len(lines) == (0 if kind == "remove" else 1), "not once per model"
        assert all(line.startswith(str(path)) and "its models will be trained again" in line for line in lines)


@pytest.mark.slow
def test_a_shared_file_of_another_run(finished, large, tmp_path, caplog, capsys):
    """And two runs of one recipe have the same checksums wherever they write."""
    assert run_large(finished, tmp_path / "same/small") == run_large(finished, tmp_path / "x/small", OTHER[0]) == 0
    digests = [[record.files for record in read_run(path).records] for path in (large, tmp_path / "same/small")]
    assert digests[0] == digests[1] and any("#" in address for address in digests[0][0])
    [path] = (large / "models/erm").iterdir()
    shutil.copy2(tmp_path / "x/small" / path.relative_to(large), path)
    assert main(["export", str(large), str(tmp_path / "model"), "--held-out", "sketch"]) == 2
    assert f"{path}#" in (line := one_line(capsys.readouterr().err)) and "is of another run" in line
    assert run_large(finished, large) == 0 and f"{path}: is of another run" in caplog.text
    assert [record.files for record in read_run(large).records] == digests[0]
    assert_same_heads(large, tmp_path / "same/small")


@pytest.mark.slow
def test_a_run_that_was_moved_is_whole(finished, interrupted, tmp_path, capsys, monkeypatch, no_charts):
    """Renamed and moved, it reports, exports, is analysed and audited, and one that was killed goes on."""
    run = (tmp_path / "elsewhere/renamed").resolve()
    run.parent.mkdir()
    copied(finished, tmp_path).rename(run)
    monkeypatch.setattr("xdm_ft.analysis.embedding.STEPS", 5)
    monkeypatch.setattr("xdm_ft.experiment.analyse.own_cores", lambda: 1)
    monkeypatch.setattr("xdm_ft.audit.facts.TREES", 5)
    for verb in ("report", "analyse", "audit"):
        assert main([verb, str(run)]) == 0, capsys.readouterr().err
    for options in ([], ["--held-out", "photo"]):
        assert main(["export", str(run), str(tmp_path / f"model{len(options)}"), "--no-site", *options]) == 0
    text = (interrupted / "small.yaml").read_text().replace("name: small", "name: going on")
    (tmp_path / "again.yaml").write_text(text)
    stopped = copied(interrupted, tmp_path / "b").rename(tmp_path / "elsewhere/going on")
    capsys.readouterr()
    assert run_here(tmp_path / "again.yaml", f"output.dir={stopped.parent}") == 0
    assert "nothing of the estimate is left to train" in capsys.readouterr().err
    files = [path for path in (*run.rglob("*"), *stopped.rglob("*")) if path.is_file()]
    typed = {"recipe.yaml", "results.json"}  # which hold output.dir and data.root, as they were typed
    assert len(files) > 40
    for path in files:
        content = path.read_bytes()
        assert all(str(old).encode() not in content for old in (run, stopped)), path
        assert path.name in typed or b"/out/small" not in content, path


@pytest.mark.parametrize("later", ["0", "0.1"])
def test_of_two_records_the_one_counts_whose_files_are_whole(later, large):
    """A head that is trained again on another kind of device may get into another file than before."""
    record = read_run(large).records[0]
    lost = {
        rule: replace(pick, weights=pick.weights.replace("heads-", "heads-0")) for rule, pick in record.selected.items()
    }
    for process, selected in (("0.1" if later == "0" else "0", lost), (later, record.selected)):
        RunDirectory(large, process).append(RECORDS, replace(record, selected=selected).to_json())
    read = read_records(RunDirectory(large))[record.key]
    assert read.selected["train_val"].weights == record.selected["train_val"].weights


@pytest.mark.slow
def test_a_large_run_grows_and_is_exported(shared, finished, large, tmp_path, capsys):
    choice = Choice("erm", ("sketch",), seed=1)
    head, expected = (
        read_parts(read_run(run), choice).heads["head"].state_dict() for run in (large, shared / "own/small")
    )
    assert head.keys() == expected.keys() and all(head[name].equal(expected[name]) for name in expected)

    run = Path(shutil.copytree(shared / "own/small", tmp_path / "grown/small"))
    before = contents(run)
    assert again(finished, run, "protocol.seeds=4", "protocol.final_fit=false") == 0
    after = contents(run)
    assert before.items() < after.items(), "the first heads keep their files"
    assert all("/heads-" in path for path in after.keys() - before.keys())
    is_shared = {(record.key.seed, "#" in record.selected["train_val"].weights) for record in read_run(run).records}
    assert is_shared == {(0, False), (1, False), (2, False), (3, True)}
