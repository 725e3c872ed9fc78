"""Faults of the data that training passes over: `run`, `validate`, `doctor` and results.json have the same ones."""

import csv
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from small_runs import document

from xdm_ft.cli.parser import main
from xdm_ft.data.table import TableDataset
from xdm_ft.experiment.data_checks import check_data, roles
from xdm_ft.experiment.plan import describe, make_plan, read_data
from xdm_ft.experiment.results import data_facts
from xdm_ft.features import hashes as hashing
from xdm_ft.protocol.site_class import imbalance
from xdm_ft.recipe.check import load
from xdm_ft.report.sections.about import data as section_about
from xdm_ft.results.run import read_run
from xdm_ft.runtime.errors import UserError

RUN = Path("output/small")
RECIPE = """\
name: small
data: {name: folder, root: images}
protocol: {seeds: 1}
encoder: {name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}
methods: [erm]
training: {steps: 2, batch_size: 4}
report: {page: false}
features: {dir: cache, workers: 0}
"""
OFFICIAL = ("data={name: table, file: table.csv}", "protocol={name: official, seeds: 1}")
NO_TEXT = "needs an encoder with a text side"
RENAME = "differ only in case, spaces or the form of a number →"


def make_images(root, domains="abc", classes=("cat", "dog")):
    """Four images of noise of every domain and class, no two of them equal."""
    noise = np.random.default_rng([ord(letter) for letter in domains + classes[0]])
    for domain in domains:
        for name in classes:
            (root / domain / name).mkdir(parents=True)
            for i in range(4):
                pixels = noise.integers(0, 256, (32, 32, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(root / domain / name / f"{i}.png")


@pytest.fixture(autouse=True)
def images(in_folder, no_charts):
    Path("small.yaml").write_text(RECIPE)
    make_images(in_folder / "images")


def copy(source, target):
    shutil.copy(f"images/{source}", f"images/{target}")


def table(split_of):
    """table.csv of all images: `split_of(domain, number of the image)`."""
    rows = [["path", "label", "domain", "split"]]
    for path in sorted(Path("images").absolute().rglob("*.png")):
        *_, domain, label, name = path.parts
        rows.append([str(path), label, domain, split_of(domain, int(name.removesuffix(".png")))])
    with open("table.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)


def by_number(domain, number):
    return ["train", "train", "val", "test"][number]


def planned(*overrides):
    recipe = load("small.yaml", list(overrides))
    return make_plan(recipe, read_data(recipe))


def lines(*overrides):
    return [fault.line for fault in check_data(planned(*overrides), show=False)]


@pytest.fixture
def reported(capsys, caplog):
    """What the three verbs report of the data, which must be the same; → it, and the results of the run."""

    def by_all(*overrides):
        assert main(["validate", "small.yaml", *overrides]) == 0
        _, _, printed = capsys.readouterr().out.partition("# findings\n")
        validated = [line.removeprefix("#   ") for line in printed.splitlines()]

        status = main(["doctor", "small.yaml", *overrides])
        printed = capsys.readouterr().out.splitlines()
        remedies = [(line, printed[i + 1]) for i, line in enumerate(printed) if line.startswith("FAULT  ")]
        checked = [f"{line.removeprefix('FAULT  ')} {remedy.strip()}" for line, remedy in remedies]
        assert status == (2 if checked else 0)
        assert any("no group is in both training and test" in line for line in printed) == (not checked)

        caplog.clear()
        with caplog.at_level(logging.INFO, "xdm_ft"):
            assert main(["run", "small.yaml", *overrides]) == 0
        messages = caplog.messages
        logged = [message.removeprefix("finding: ") for message in messages if message.startswith("finding: ")]
        logged = [line.removesuffix(" (all: output/small/copies.csv)") for line in logged]
        trains = next(i for i, message in enumerate(messages) if message.startswith("encoder: "))
        assert not any(message.startswith("finding: ") for message in messages[trains:])
        results = document(RUN)
        assert validated == checked == logged == results["findings"]
        return logged, results

    return by_all


@pytest.mark.slow
def test_every_fault_is_reported_by_all(reported):
    copy("a/dog/2.png", "b/dog/twin.png")
    copy("a/cat/0.png", "a/cat/again.png")
    Path("images/b/cat").rename("images/b/Cat ")
    shutil.rmtree("images/c")
    findings, results = reported("methods=[erm, xdomainmix, groupdro, sam]")
    assert [line.split(": ")[0] for line in findings] == ["classes"] * 2 + ["site × class", "images"] + ["methods"] * 2
    skipped = [run for run in results["runs"] if run["status"] == "skipped"]
    assert {run["method"] for run in skipped} == {"xdomainmix", "groupdro"}


def test_faults_of_class_names():
    Path("images/c/dog").rename("images/c/Dog ")
    spelt, lacking, confounded = lines()
    assert spelt.startswith(f'classes: "Dog " (in c) and "dog" (in a, b) {RENAME}')
    assert lacking.startswith('classes: no image of "Dog " in a, b; no image of "dog" in c →')
    assert confounded.startswith('site × class: cannot be told apart: all images of "Dog " are in c → add images')
    Path("images/c/Dog ").rename("images/c/dog")
    table(by_number)
    Path("table.csv").write_text(Path("table.csv").read_text().replace(",cat,", ",0.0,").replace(",dog,", ",1.0,"))
    (decimals,) = lines(*OFFICIAL)
    assert decimals.startswith("classes: 0.0, 1.0 are whole numbers as pandas writes them beside empty cells → write")
    make_images(Path("images"), "ab", classes=("eel",))
    (lacking,) = lines()
    assert lacking.startswith('classes: no image of "eel" in c →')


@pytest.mark.parametrize(
    ("copies", "overrides", "expected"),
    [
        (
            [("a/dog/2.png", "b/dog/twin.png"), ("a/dog/3.png", "b/cat/twin.png")],
            ["protocol.val_fraction=0.5"],
            "2 images have copies (4 files), 2 of them in more than one domain, 1 in two classes, 2 in "
            "training and validation, 2 in training and test, 2 in validation and test; the first: "
            "images/a/dog/2.png and images/b/dog/twin.png → remove one of each pair, or both where their labels differ",
        ),
        (
            [("a/dog/0.png", f"a/dog/{i}.png") for i in (1, 2, 3)],
            OFFICIAL,
            "1 image has copies (4 files), 1 of them in training and validation, 1 in training and test, "
            "1 in validation and test; the first: HERE/images/a/dog/0.png and HERE/images/a/dog/1.png →",
        ),
    ],
)
def test_copies_of_images(copies, overrides, expected, in_folder):
    table(by_number)
    for source, target in copies:
        copy(source, target)
    (line,) = lines(*overrides)
    assert line.startswith(f"images: {expected}".replace("HERE", str(in_folder)))


def test_copies_are_counted_over_the_splits_of_all_seeds():
    """A pair within one domain is in training and validation under some seeds only."""
    copy("a/dog/0.png", "a/dog/1.png")

    def divides(*seeds):
        (line,) = lines(f"protocol={{name: leave_one_domain_out, seeds: {[*seeds]}, val_fraction: 0.5}}")
        return "1 of them in training and validation" in line

    divided = [divides(seed) for seed in range(8)]
    assert divides(divided.index(False), divided.index(True))


@pytest.mark.slow
def test_all_copies_are_in_a_file_of_the_run_and_reported_once(caplog):
    overrides = "protocol.test_domains=[a, b]", "protocol.val_fraction=0.5"
    caplog.set_level(logging.INFO, "xdm_ft")
    file = RUN / "copies.csv"

    def logged():
        caplog.clear()
        assert main(["run", "small.yaml", *overrides]) == 0
        return [line for line in caplog.messages if "copies" in line]

    assert logged() == [] and not file.exists()
    shutil.rmtree("output")
    for i in range(4):
        copy(f"a/dog/{i}.png", f"b/cat/=twin{i}.png")
    [line] = logged()
    assert line.startswith("finding: images: 4 images have copies (8 files), 4 of them in more than one domain, 4 in ")
    assert line.endswith(" (all: output/small/copies.csv)") and line.count("twin") == 1
    header, *rows = csv.reader(file.read_text().splitlines())
    assert header == ["copies", "path", "domain", "class", "a held out", "b held out"]
    assert [row[0] for row in rows] == [str(i // 2) for i in range(8)]
    assert rows[0][1:4] == ["images/a/dog/0.png", "a", "dog"]
    assert rows[1][1:4] == ["images/b/cat/=twin0.png", "b", "cat"]
    plan = planned(*overrides)
    names = [plan.dataset.name(row) for row in range(len(plan.dataset))]
    for split, column in zip(plan.splits, (4, 5), strict=True):
        role_of = {names[row]: role for role, rows in roles(split).items() for row in rows.tolist()}
        assert [row[column] for row in rows] == [role_of[row[1]] for row in rows]
        assert {*role_of.values()} == {"training", "validation", "test"}
    written = file.stat().st_mtime_ns
    assert logged() == [] and file.stat().st_mtime_ns == written, "of the same run once"
    file.write_text("")
    assert len(logged()) == 1 and len(file.read_text().splitlines()) == 9, "it is restored"


def test_methods_that_need_text_are_skipped_without_it():
    rows = "methods=[zero_shot, linear_probe, {name: erm, head_init: zero_shot}, {name: rsc, head_init: zero_shot}]"
    assert describe(planned(rows)).splitlines()[2:5] == [
        "models: 12 = methods × held-out domains × seeds, 9 of them skipped",
        f"skipped: zero_shot: {NO_TEXT}",
        f"skipped: erm, rsc: with head_init: zero_shot {NO_TEXT}",
    ]
    assert lines(rows) == [
        f"methods: zero_shot is skipped ({NO_TEXT}) → remove these methods from the recipe, or use an encoder with a "
        "text side",
        f"methods: erm, rsc are skipped (with head_init: zero_shot {NO_TEXT}) → remove these methods from the recipe, "
        "or leave head_init out",
    ]


@pytest.mark.slow
def test_a_run_without_text_completes_with_the_other_methods(reported):
    text, others = "zero_shot, {name: erm, head_init: zero_shot}", "{name: erm, label: plain}, linear_probe"
    findings, results = reported(f"methods=[{text}, {others}]", "protocol.final_fit=true", "protocol.seeds=3")
    assert [line.split(" (")[0] for line in findings] == ["methods: zero_shot is skipped", "methods: erm is skipped"]
    rows = {row["method"]: row for row in results["summary"]}
    for name in ("zero_shot", "erm"):
        assert rows[name]["mean"] is None and NO_TEXT in rows[name]["reason"]
    assert {(row["first"], row["second"]) for row in results["comparisons"]} == {("linear_probe", "plain")}
    assert results["final_fit"]["status"] == "ok"
    listed = csv.DictReader((RUN / "results.csv").read_text().splitlines())
    probe = next(row for row in listed if row["method"] == "linear_probe")
    assert probe["compared_with"] == "plain", "erm, which has no models, is no reference"


def test_a_model_that_names_one_class_for_every_image_is_flagged():
    assert main(["run", "small.yaml", "training.lr=1.0e-9", "methods=[erm, zero_shot]"]) == 0
    results, flag = document(RUN), "collapsed (one class for all test images)"
    trained = [run for run in results["runs"] if run["method"] == "erm"]
    assert [run["status"] for run in trained] == ["ok"] * 3
    assert all(flag in run["selected"]["train_val"]["flags"] for run in trained)
    [row] = [row for row in results["summary"] if (row["method"], row["selection"]) == ("erm", "train_val")]
    assert row["flags"] == [f"{flag} in 3 of 3 picks"]
    assert f"- erm: {flag} in 3 of 3 picks" in (RUN / "results.md").read_text()


def test_methods_that_need_two_training_domains_are_skipped():
    shutil.rmtree("images/c")
    assert lines("methods=[erm, xdomainmix, groupdro, sam]") == [
        f"methods: xdomainmix, groupdro are skipped (needs 2 training domains; with {held_out} held out there is 1)"
        " → remove these methods from the recipe, or add a domain"
        for held_out in "ab"
    ]
    other = "methods=[erm, {name: mixup, partner_domain: other}, {name: mixstyle, partners: other_domain}]"
    skipped = lines(other, "encoder.trainable=true")
    assert skipped and all("mixup, mixstyle are skipped (needs 2 training domains" in line for line in skipped)
    free = other.replace("_domain: other}", "_domain: any}").replace("other_domain", "random")
    assert not lines(free, "encoder.trainable=true")


@pytest.mark.slow
@pytest.mark.parametrize("domains", [pytest.param("abc", marks=pytest.mark.soak), "a"])
def test_a_random_split_tests_on_seen_domains(domains, reported):
    for other in set("abc") - set(domains):
        shutil.rmtree(f"images/{other}")
    table(by_number)
    findings, results = reported(*OFFICIAL)
    assert findings == [] and results["tested_on"] == "domains that are also trained on, none of them unseen"
    assert all(f"tested on {results['tested_on']}" in row["protocol"] for row in results["summary"])
    text = (RUN / "results.md").read_text().split("## How to read")[0]
    assert f"On test images of {results['tested_on']}, erm reaches" in text
    assert "never trained on" not in text


def grouped_table(group_of, split_of=by_number):
    """`table`, with a column group: `group_of(domain, number of the image)`."""
    table(split_of)
    header, *rows = csv.reader(Path("table.csv").read_text().splitlines())
    rows = [[*row, group_of(row[2], int(Path(row[0]).stem))] for row in rows]
    with open("table.csv", "w", newline="") as file:
        csv.writer(file).writerows([[*header, "group"], *rows])


def test_groups_that_a_given_split_divides_are_a_fault(reported, monkeypatch, capsys, tmp_path):
    """Images 1 and 2 of a domain are one patient's: they train, and they select."""
    grouped_table(lambda domain, i: f"{domain}{'0123'.replace('2', '1')[i]}")
    findings, results = reported(*OFFICIAL)
    [line] = findings
    here = Path("images").absolute()
    assert line.startswith(f"groups: 3 are in training and train_val: {here}/a/cat/1.png and {here}/a/cat/2.png; ")
    assert line.endswith("→ change the split so that a group is on one side, or correct the groups")
    assert results["data"]["groups"] == 9 and results["data"]["divided"] == ["3 in training and train_val"]
    assert "3 of 3 groups of train_val also train" in results["summary"][0]["protocol"]
    about = section_about(read_run(RUN)).about
    assert "9 groups (patients, slides or sequences), of which the split divides 3 in training and train_val" in about
    assert "1 fault" in about
    assert "groups: 3 are in training and train_val" in section_about(read_run(RUN)).notes
    capsys.readouterr()
    assert main(["export", str(RUN), str(tmp_path / "model"), "--method", "erm", "--no-site"]) == 0
    card = (tmp_path / "model/README.md").read_text()
    assert "* The split divides groups (patients, slides or sequences): 3 in training and train\\_val." in card

    monkeypatch.setattr(TableDataset, "as_published", True)
    [note] = check_data(planned(*OFFICIAL), show=False)
    assert note.remedy is None and note.line.startswith("groups: 3 are in training and train_val, as the data set is p")
    facts = data_facts(planned(*OFFICIAL), [note])
    assert facts["findings"] == [] and facts["data"]["divided"] == ["3 in training and train_val"]
    capsys.readouterr()
    assert main(["doctor", "small.yaml", *OFFICIAL]) == 0
    shown = capsys.readouterr().out
    assert f"ok     {note.line}" in shown and "no image occurs twice\n" in shown


def test_a_rare_class_is_one_line_where_accuracy_hides_it(capsys):
    """6 cats beside 12 dogs are not rare, 3 are."""
    few = 'balanced_accuracy rests on few images of "cat" in a (4), "dog" in a (4), "cat" in b (4) and 3 more: '
    assert lines("protocol.metric=balanced_accuracy") == [f"classes: {few}each class weighs the same"]
    for domain in "bc":
        for i in range(3):
            Path(f"images/{domain}/cat/{i}.png").unlink()
    sentence = (
        'classes: "cat" has 25% of the images that other classes have on average, and accuracy hides it: '
        "set protocol.metric: balanced_accuracy and training.class_weights: balanced"
    )
    assert lines() == []
    for i in range(3):
        Path(f"images/a/cat/{i}.png").unlink()
    assert lines() == [sentence]
    assert lines("protocol.metric=worst_domain_accuracy") == [
        sentence.replace("and accuracy", "and worst_domain_accuracy")
    ]
    with pytest.raises(UserError, match="balanced_accuracy is not defined with a held out"):
        lines("protocol.metric=balanced_accuracy")  # one image of a class cannot validate, too
    assert lines("training.class_weights=balanced") == [sentence.partition(" and training")[0]]
    capsys.readouterr()
    assert main(["validate", "small.yaml", "--json"]) == 0
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert (f"classes: {finding['found']}", finding["remedy"]) == (sentence, None)
    assert main(["doctor", "small.yaml"]) == 0, "it is no fault"
    assert main(["run", "small.yaml"]) == 0 and document(RUN)["findings"] == []
    assert section_about(read_run(RUN)).notes == [sentence.removeprefix("classes: ")]
    [long_tail] = imbalance(np.array([[0, 1, 1, *[200] * 300]]), "a", [*map(str, range(303))], "accuracy", False)
    assert long_tail.startswith('"1" has 0.5% of the images that other classes have on average')


def test_a_group_that_selects_and_tests_is_divided_too():
    grouped_table(lambda domain, i: f"{domain}{'0122'[i]}")
    [line] = lines(*OFFICIAL)
    assert line.startswith("groups: 3 are in train_val and test: ")
    grouped_table(lambda domain, i: f"{domain}{i}")
    assert lines(*OFFICIAL) == [] and data_facts(planned(*OFFICIAL), [])["data"]["divided"] == []
    # leave-one-domain-out takes the validation images that come with the data
    grouped_table(lambda domain, i: f"{domain}{'0112'[i]}", lambda domain, i: ["train", "train", "val", "train"][i])
    [line] = lines(OFFICIAL[0])
    assert line.startswith("groups: 3 are in training and train_val: ") and line.count("a/cat/1.png and") == 1


def test_a_split_with_some_unseen_domains_names_the_others():
    table(lambda domain, i: "test" if domain == "c" else by_number(domain, i))
    plan = planned(*OFFICIAL)
    tested_on = data_facts(plan, [])["tested_on"]
    assert tested_on == "domains of which a, b are also trained on" and f"tested on {tested_on}" in plan.notes


def test_images_in_a_parquet_file_are_compared_too():
    paths = sorted(Path("images").rglob("*.png"))
    columns = {
        "image": [path.read_bytes() for path in (*paths[:-1], paths[0])],
        "label": [path.parts[-2] for path in paths],
        "domain": [path.parts[-3] for path in paths],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), "images.parquet")
    (line,) = lines("data={name: parquet, file: images.parquet}")
    counts = "1 image has copies (2 files), 1 of them in more than one domain, 1 in two cl"
    assert line.startswith(f"images: {counts}") and "images.parquet, row 0 and images.parquet, row 23" in line


def test_only_files_of_equal_size_are_opened(monkeypatch):
    for number, path in enumerate(sorted(Path("images").rglob("*.png"))):
        path.write_bytes(path.read_bytes() + bytes(100 * number))  # decoders pass over what follows the image
    copy("a/dog/2.png", "b/dog/twin.png")
    opened, hash_file = [], hashing.hash_file
    monkeypatch.setattr(hashing, "hash_file", lambda path: opened.append(Path(path).name) or hash_file(path))
    assert len(lines()) == 1 and sorted(opened) == ["2.png", "twin.png"]
    opened.clear()
    assert len(lines()) == 1 and opened == [], "the index of hashes was not read"


def test_what_yields_no_image_is_reported_by_all(reported):
    for image in sorted(Path("images/c/dog").iterdir())[1:]:
        image.rename(image.with_suffix(".heic"))
    Path("images/b/eel").mkdir()
    findings, results = reported("report={page: true}")
    first, second, *_ = findings
    eel = 'left out: 1 class without any image: "eel" (its folder is empty)'
    heic = "left out: 3 .heic files not read"
    assert first.startswith(f"{eel} → add images") and second.startswith(
        f"{heic}, the first: c/dog/1.heic → pip install"
    )
    page = (RUN / "report.html").read_text()
    assert eel.replace('"', "&#34;") in page and heic in page and "1.heic" not in page
    with_names = document(RUN)["findings"] == results["findings"]
    assert main(["run", "small.yaml", "report={page: true, images: true}"]) == 0 and with_names
    assert "the first: c/dog/1.heic" in (RUN / "report.html").read_text()


def test_end_to_end_no_cache_is_needed_and_empty_files_are_no_images():
    for domain in "ab":
        Path(f"images/{domain}/dog/empty.png").write_bytes(b"")
    assert lines() == []
    copy("a/dog/2.png", "b/dog/twin.png")
    Path("blocked").write_text("a file is no folder")
    assert len(lines("encoder.trainable=true", "features.dir=blocked/cache")) == 1
    with pytest.raises(UserError, match=r"features\.dir"):
        lines("features.dir=blocked/cache")


def test_without_the_weights_validate_checks_the_data_and_prints_the_plan(capsys, monkeypatch, in_folder):
    """Data with a fault, an encoder whose weights are not here, and no network."""
    monkeypatch.setenv("HF_HOME", str(in_folder / "hub"))
    missing = in_folder / "missing.safetensors"
    copy("a/dog/2.png", "b/dog/twin.png")
    assert main(["validate", "small.yaml", f"encoder.weights={missing}"]) == 2
    printed = capsys.readouterr()
    assert "#   models: 3 = methods × held-out domains × seeds\n" in printed.out
    assert "#   time: not measured, as an encoder cannot be built\n" in printed.out
    assert "# classes\n#   cat, dog\n" in printed.out
    assert "# findings\n#   images: 1 image has copies (2 files), 1 of them in more" in printed.out
    [line] = printed.err.splitlines()
    assert line.startswith("xdm-ft: encoder.weights: ") and str(missing) in line
    assert main(["validate", "small.yaml", "--json", f"encoder.weights={missing}"]) == 2
    content = json.loads(capsys.readouterr().out)
    assert content["error"] == line.removeprefix("xdm-ft: ") and content["plan"]["models"] == 3
    assert content["classes"] == ["cat", "dog"]
    assert content["estimate"] is None and len(content["findings"]) == 1
    assert main(["validate", "small.yaml", "--json"]) == 0 and json.loads(capsys.readouterr().out)["error"] is None


def test_validate_names_the_columns_of_a_table_that_are_read_and_those_that_are_not(capsys):
    table(by_number)
    text = Path("table.csv").read_text().splitlines()
    Path("table.csv").write_text("\n".join([f"{text[0]},age,site", *(f"{line},7,x" for line in text[1:])]))
    assert main(["validate", "small.yaml", "data={name: table, file: table.csv}"]) == 0
    line = "#   columns of the table: path, label, domain, split are read; ignored: age, site\n"
    assert f"# plan\n{line}" in capsys.readouterr().out
    assert main(["validate", "small.yaml"]) == 0 and "columns of the table" not in capsys.readouterr().out
