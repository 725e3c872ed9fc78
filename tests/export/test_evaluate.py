"""`xdm-ft evaluate`: metrics against naive ones, the verdict under the null, and sites of every layout."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.numpy import load_file
from scipy.stats import t

from xdm_ft.cli.parser import main
from xdm_ft.evaluation.intervals import new_site
from xdm_ft.evaluation.metrics import metric
from xdm_ft.evaluation.verdicts import Estimate
from xdm_ft.export.config import AtHeldOut, Expected
from xdm_ft.export.directory import TRAINING_IMAGES
from xdm_ft.export.evaluate import Labelled, are_among, at_site, checksums, first_of_each, judged
from xdm_ft.export.sources import Item, Site, read_site
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.storage.tensors import tensors_of, write_checked

CLASSES = ("cat", "dog", "ox", "owl")


def labelled(logits, labels, domains, groups):
    """Images of a site with one or two domains."""
    items = [Item(str(number), b"") for number in range(len(labels))]
    return Labelled(Site(items, labels, ("x", "y")[: domains.max() + 1], domains, groups), logits)


METRICS = ("accuracy", "balanced_accuracy", "macro_f1", "nll", "ece")
WITHIN = "within what the card promises"


def images(n=60, groups=True, domains=1):
    """Random answers to images of three of four classes."""
    drawn = np.random.default_rng(3)
    labels = drawn.integers(0, 3, n)
    logits = torch.from_numpy(drawn.normal(size=(n, 4)) + 2 * np.eye(4)[labels]).float()
    return labelled(logits, labels, np.arange(n) % domains, np.arange(n) // 4 if groups else None)


def expected_of(values, metric="accuracy"):
    site = new_site([np.array([value]) for value in values])
    held_out = tuple(
        AtHeldOut(domains=(f"d{i}",), value=v, interval=None, seeds=1, images=10, groups=None, accuracies={})
        for i, v in enumerate(values)
    )
    return Expected(
        source="leave one domain out", data="folder", method="erm", selection="train_val", metric=metric,
        mean=float(np.mean(values)), std=None, stderr=None, seeds=1, held_out=held_out, worst=("d0", 0.5), others={},
        calibrated=None, new_site=None, spread=site and site.spread, freedom=site and site.freedom, notes=(),
    )  # fmt: skip


def test_metrics_and_their_intervals_are_the_naive_ones():
    site = images()
    found = at_site(site, CLASSES)
    labels, none = torch.from_numpy(site.site.labels), torch.zeros(60, dtype=torch.int64)
    for name in METRICS:
        whole = metric(name, site.logits, labels, none)
        without = []
        for group in range(15):
            kept = torch.from_numpy(np.flatnonzero(site.site.groups != group))
            without.append(metric(name, site.logits[kept], labels[kept], none[kept]))
        error = (14 / 15 * np.square(np.array(without) - np.mean(without)).sum()) ** 0.5
        half = t.ppf(0.975, 14) * error
        high = whole + half if name == "nll" else min(1, whole + half)
        assert found.metrics[name].value == pytest.approx(whole)
        assert found.metrics[name].interval == pytest.approx((max(0, whole - half), high)), name
    assert found.metrics.keys() == {*METRICS, "auroc"} and found.groups == 15 and found.versus is None
    predicted = site.logits.argmax(1).numpy()
    for number, name in enumerate(CLASSES[:3]):
        own = site.site.labels == number
        assert found.classes[name].images == own.sum()
        assert found.classes[name].recall == pytest.approx((predicted[own] == number).mean())
    assert (found.classes["owl"].images, found.classes["owl"].recall) == (0, None)


def test_images_that_do_not_vary_have_an_exact_interval_or_none():
    labels = np.arange(12) // 4
    always_first = labelled(torch.eye(4)[np.zeros(12, np.int64)], labels, np.zeros(12, np.int64), None)
    all_right = labelled(torch.eye(4)[labels], labels, np.zeros(12, np.int64), None)
    found = at_site(always_first, CLASSES).metrics
    assert found["accuracy"].interval is not None and found["balanced_accuracy"].interval is None
    found = at_site(all_right, CLASSES, expected_of([0.9, 0.8, 0.95]))
    assert found.metrics["accuracy"].value == 1 and found.metrics["balanced_accuracy"].interval is None
    assert found.metrics["accuracy"].interval == pytest.approx((0.025 ** (1 / 12), 1))  # Clopper and Pearson's
    assert found.versus.interval is not None and found.versus.verdict == WITHIN


def test_the_reliability_table_gives_the_ece():
    found = at_site(images(), CLASSES)
    filled = [one for one in found.reliability if one.images]
    assert len(found.reliability) == 15 and sum(one.images for one in filled) == 60
    ece = sum(one.images / 60 * abs(one.accuracy - one.confidence) for one in filled)
    assert ece == pytest.approx(found.metrics["ece"].value)
    assert all(one.low < one.confidence <= one.high for one in filled)


def test_images_without_groups_are_independent_and_several_domains_have_a_worst():
    site = images(groups=False, domains=2)
    found = at_site(site, CLASSES)
    right = site.logits.argmax(1).numpy() == site.site.labels
    half = t.ppf(0.975, 59) * right.std(ddof=1) / 60**0.5
    assert found.metrics["accuracy"].interval == pytest.approx((right.mean() - half, min(1, right.mean() + half)))
    worst = min(right[::2].mean(), right[1::2].mean())
    assert found.groups is None and found.metrics["worst_domain_accuracy"].value == pytest.approx(worst)
    of_one = at_site(site.of_domain(1), CLASSES)
    assert of_one.images == 30 and of_one.metrics["accuracy"].value == pytest.approx(right[1::2].mean())


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.6, 0.7, 0.8, 0.9), WITHIN),
        ((0.97, 0.98, 0.99, 0.985), "below"),
        ((0.10, 0.11, 0.12, 0.10), "above"),
        ((0.7, 0.8), "can not be said (2 held-out sets)"),
        ((0.7,), "can not be said (one held-out set)"),
    ],
)
def test_the_verdict(values, verdict):
    site = images(240)
    found = at_site(site, CLASSES, expected_of(values))
    assert found.versus.verdict == verdict and found.versus.promised == pytest.approx(np.mean(values))
    if len(values) == 4:
        right = site.logits.argmax(1).numpy() == site.site.labels
        without = [right[site.site.groups != group].mean() for group in range(60)]
        error = 59 / 60 * np.square(np.array(without) - np.mean(without)).sum()
        half = t.ppf(0.975, 3) * np.sqrt(np.var(values, ddof=1) * 1.25 + error)
        low, high = max(0, np.mean(values) - half), min(1, np.mean(values) + half)
        assert found.versus.interval == pytest.approx((low, high))


def test_what_can_not_be_compared_is_not():
    values = (0.6, 0.7, 0.8, 0.9)
    one_group = labelled(images().logits, images().site.labels, np.zeros(60, np.int64), np.zeros(60, np.int64))
    assert "too few images or groups" in at_site(one_group, CLASSES, expected_of(values)).versus.verdict
    oracle = expected_of(values).model_copy(update={"selection": "oracle"})
    assert "labels of the held-out" in at_site(images(), CLASSES, oracle).versus.verdict
    nll = expected_of(values, "nll")
    assert "temperature" in at_site(images(), CLASSES, nll, temperature=2.0).versus.verdict
    assert at_site(images(), CLASSES, nll).versus.verdict in (WITHIN, "below", "above")


@pytest.mark.parametrize(
    ("between", "within", "groups", "most"),
    [(0.05, 0.001, 200, 0.96), (0.1, 0.4, 100, 0.98), (0.05, 0.5, 60, 0.995), (0.01, 0.5, 12, 1.0)],
)
def test_a_site_like_the_others_is_within_the_promise_in_95_of_100(between, within, groups, most):
    """Sites from one distribution; each is measured on groups of images, and so were the held-out ones.

    The more images vary (standard errors of 0%, 4%, 6% and 14%), the more often: their variance counts twice.
    """
    drawn, inside, tries = np.random.default_rng(0), 0, 4000
    for _ in range(tries):
        sites = 0.7 + between * drawn.normal(size=6)
        measured = sites[:5] + within / groups**0.5 * drawn.normal(size=5)
        promised = new_site([np.array([value]) for value in measured])
        sample = sites[5] + within * drawn.normal(size=groups)
        estimate = Estimate(sample.mean(), sample.std(ddof=1) / groups**0.5, groups - 1)
        _, verdict = judged("nll", sample.mean(), estimate, groups, promised)
        inside += verdict == WITHIN
    assert 0.94 <= inside / tries <= most


@pytest.mark.parametrize("site", ["of 240 images", "all right"])
def test_the_verdict_on_the_logit_scale_by_hand(site):
    """The error of the site's accuracy is divided by p(1 − p); (x + ½)/(n + 1) keeps a site without mistakes finite."""
    labels = np.arange(12) // 4
    all_right = labelled(torch.eye(4)[labels], labels, np.zeros(12, np.int64), None)
    measured = images(240) if site == "of 240 images" else all_right
    n = len(measured.site.labels)
    right = measured.logits.argmax(1).numpy() == measured.site.labels
    groups = measured.site.groups if measured.site.groups is not None else np.arange(n)
    count = len(set(groups))
    without = [right[groups != group].mean() for group in range(count)]
    p = (right.sum() + 0.5) / (n + 1)
    error = ((count - 1) / count * np.square(np.array(without) - np.mean(without)).sum()) ** 0.5 / (p * (1 - p))
    z = np.array([0.4, 1.0, 1.3, 2.9])
    promised = new_site([np.array([one]) for one in z], "logit")
    expected = expected_of((0.6, 0.7, 0.8, 0.95)).model_copy(update=promised._asdict())
    found = at_site(measured, CLASSES, expected).versus
    half = t.ppf(0.975, 3) * math.hypot(z.std(ddof=1) * 1.25**0.5, error)
    ends = 1 / (1 + np.exp(-z.mean() + half)), 1 / (1 + np.exp(-z.mean() - half))
    seen = [min(1, max(0, (end * (n + 1) - 0.5) / n)) for end in ends]  # x/n of x = (n + 1)p − ½
    assert found.interval == pytest.approx(seen) and found.verdict == WITHIN
    below = promised._replace(center=math.log(p / (1 - p)) + half + 0.01)
    _, verdict = judged("accuracy", right.mean(), Estimate(right.mean(), error * p * (1 - p), count - 1), n, below)
    assert verdict == "below"


@pytest.mark.parametrize("images", [40, 400])
def test_sites_with_few_mistakes_are_within_the_promise_in_95_of_100(images):
    """Sites are normal on the logit scale, about 95% accurate; some have no mistake."""
    drawn, inside, tries = np.random.default_rng(0), 0, 4000
    for _ in range(tries):
        right = drawn.binomial(images, 1 / (1 + np.exp(-3 - drawn.normal(size=5))))
        promised = new_site([np.array([np.log((x + 0.5) / (images - x + 0.5))]) for x in right[:4]], "logit")
        share = right[4] / images
        estimate = Estimate(share, (share * (1 - share) / (images - 1)) ** 0.5, images - 1)
        inside += judged("accuracy", share, estimate, images, promised)[1] == WITHIN
    assert inside / tries >= 0.94


@pytest.mark.parametrize(
    ("paths", "domains"),
    [
        (["cat/1.png", "dog/2.png"], ("site",)),
        (["cat/deep/1.png", "dog/2.png"], ("site",)),
        (["north/cat/1.png", "south/dog/2.png"], ("north", "south")),
        (["north/cat/1.png", "south/dgo/2.png"], "dgo"),
        (["dgo/1.png", "cat/2.png"], "dgo"),
        (["cat/cat/1.png", "dog/dog/2.png"], ("site",)),
        (["north/dgo/1.png"], "north"),
    ],
)
def test_the_level_of_the_classes_is_found(tmp_path, paths, domains):
    folder = write(tmp_path / "site", paths)
    if isinstance(domains, tuple):
        assert read_site(folder, CLASSES, {}).domain_names == domains
    else:
        with pytest.raises(UserError, match=f'the model has no class "{domains}"'):
            read_site(folder, CLASSES, {})


def write(folder, paths):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"")
    return str(folder)


def test_folders_of_one_site_and_of_several(tmp_path):
    one = read_site(
        write(tmp_path / "one", ["dog/p1_a.png", "0/p2_a.png", "0/p2_b.png"]), CLASSES, {"0": "cat"}, r"p\d"
    )
    assert one.labels.tolist() == [0, 0, 1] and one.domain_names == ("one",) and one.groups.tolist() == [1, 1, 0]
    two = read_site(write(tmp_path / "two", ["n/dog/a.png", "s/cat/b.png", "cat.png"]), CLASSES, {})
    assert two.labels.tolist() == [1, 0] and two.domain_names == ("n", "s") and two.groups is None
    assert [item.path for item in two.only(["s"]).items] == [str(tmp_path / "two/s/cat/b.png")]


def test_tables_may_leave_domain_and_group_out(tmp_path):
    folder = write(tmp_path, ["1.png", "2.png"])
    (tmp_path / "north.csv").write_text("path,label\n1.png,dog\n2.png,cat\n")
    found = read_site(f"{folder}/north.csv", CLASSES, {})
    assert found.labels.tolist() == [1, 0] and found.domain_names == ("north",) and found.groups is None
    (tmp_path / "both.csv").write_text("path,label,domain,group\n1.png,dog,s,p\n2.png,cat,n,p\n")
    found = read_site(f"{folder}/both.csv", CLASSES, {})
    assert found.domains.tolist() == [1, 0] and found.groups.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("paths", "settings", "line"),
    [
        (["dgo/1.png"], {}, 'the model has no class "dgo"; did you mean "dog"? (folders must be'),
        (["dgo/1.png", "kat/1.png"], {}, '"dgo", nor 1 other label of the site; did you mean "dog"?'),
        (["1.png"], {}, "contains no images in class folders; folders must be"),
        (["dog/1.png"], {"group": "("}, "--group: ( is not a regular expression"),
        (["dog/1.png"], {"group": "x"}, '--group: "x" matches nothing in 1 of 1 paths'),
        (None, {}, "does not exist; folders must be"),
    ],
)
def test_a_wrong_site_is_one_line(tmp_path, paths, settings, line):
    path = str(tmp_path / "no") if paths is None else write(tmp_path / "site", paths)
    with pytest.raises(UserError) as raised:
        read_site(path, CLASSES, {}, **settings)
    (said,) = raised.value.args
    assert line in said and "data." not in said


def test_a_wrong_table_is_one_line(tmp_path):
    write(tmp_path, ["1.png"])
    (tmp_path / "t.csv").write_text("path,label\n1.png,dgo\n")
    with pytest.raises(UserError, match=r't.csv: column label: the model has no class "dgo"; did you mean "dog"\?$'):
        read_site(str(tmp_path / "t.csv"), CLASSES, {})
    (tmp_path / "t.csv").write_text("path\n1.png\n")
    with pytest.raises(UserError, match="there is no column label"):
        read_site(str(tmp_path / "t.csv"), CLASSES, {})


def test_a_models_own_test_images_give_its_recorded_metrics(small_model, tmp_path, capsys):
    """And an unreadable image is counted and left out."""
    site = shutil.copytree(small_model.data / "PACS" / "sketch", tmp_path / "site")
    shutil.rmtree(site / "dog")
    write(site, ["horse/broken.png"])
    assert main(["evaluate", str(small_model.model), str(site), "--json", "--group", r"\w+/00[0-3]|broken"]) == 0
    found = json.loads(capsys.readouterr().out)
    directory = RunDirectory(small_model.run)
    images, stored = directory.test_images(("sketch",)), directory.predictions("models/erm/sketch/seed0-trial0")
    names = bytes(images["names"].tolist()).decode().split("\n")
    kept = [place for place, name in enumerate(names) if "/dog/" not in name]
    right = stored["train_val.predicted"][kept] == images["labels"][kept]
    assert (
        found["whole"]["images"] == len(kept) == 24 and found["whole"]["metrics"]["accuracy"]["value"] == right.mean()
    )
    assert list(found["unreadable"]) == [str(site / "horse/broken.png")] and found["absent_classes"] == ["dog"]
    assert found["whole"]["versus"]["verdict"] == "can not be said (one held-out set)" and found["domains"] == {}
    documented = (Path(__file__).parents[2] / "docs/command_line.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in documented for key in (*found, *found["whole"], *found["whole"]["versus"]))
    accuracy = found["whole"]["versus"]["promised"]
    ranks = f"a new site like the held-out one lies below it ({accuracy:.1%}) with probability 1 in 2"
    assert found["ranks"] == ranks and f"{ranks.capitalize()}. " in (small_model.model / "README.md").read_text()
    assert main(["evaluate", str(small_model.model), str(site)]) == 0
    assert f"\nThe card: {ranks}\n" in capsys.readouterr().out


def test_several_domains_as_text(small_model, capsys, monkeypatch):
    monkeypatch.chdir(small_model.folder)  # the run's data.root is relative
    site = small_model.data / "PACS"
    chosen = ["--domain", "sketch", "photo"]
    assert main(["evaluate", str(small_model.run), str(site), "--quiet", "--held-out", "sketch", *chosen]) == 0
    told = capsys.readouterr().out
    assert "56 images, images assumed independent" in told and "worst-domain accuracy" in told
    for name in ("photo", "sketch"):
        assert f"\n{name}: accuracy " in told
    *_, seen, last = told.splitlines()
    assert seen.endswith("trained the model, so they are no new sites: photo")
    assert last == (
        "no copies; 28 of 56 images trained the model: what is measured on them does not hold for new ones"
    ), "those of photo, also without a model directory"
    assert "\nphoto: " in told and "can not be said (28 of these images trained the model)" in told
    assert main(["evaluate", str(small_model.model), str(site), "--batch-size", "0"]) == 2
    assert main(["evaluate", str(small_model.model), str(site), "--domain", "skech"]) == 2
    assert capsys.readouterr().err.endswith('xdm-ft: --domain: no domain skech; did you mean "sketch"?\n')


def test_the_stored_images_know_their_groups(small_model):
    (file,) = (small_model.run / "test_images").glob("*.safetensors")
    stored = load_file(file)
    assert stored["worst_of"].dtype == np.int32 and len(set(stored["worst_of"])) == 1


def test_copies_count_once_and_training_images_are_known_again(small_model, tmp_path, capsys):
    """Under other names, in other folders, with another label; in a folder and in a table."""
    sketch, photo = small_model.data / "PACS" / "sketch", small_model.data / "PACS" / "photo"
    site = shutil.copytree(sketch, tmp_path / "site")
    assert main(["evaluate", str(small_model.model), str(site), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["copies"], plain["copies_with_another_label"], plain["training_images"]) == (0, 0, 0)
    first = sorted((site / "dog").iterdir())[0]
    for number in range(30):
        shutil.copy(first, site / "dog" / f"zz copy {number}.png")
    shutil.copy(first, site / "horse" / "zz.png")
    assert main(["evaluate", str(small_model.model), str(site), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["copies"], found["copies_with_another_label"], found["training_images"]) == (31, 1, 0)
    assert found["whole"] == plain["whole"], "the copies count once"
    for number, path in enumerate(sorted(photo.glob("dog/*"))[:2]):
        shutil.copy(path, site / "dog" / f"seen {number}.png")
    assert main(["evaluate", str(small_model.model), str(site)]) == 0
    told = capsys.readouterr().out
    images = plain["whole"]["images"] + 2
    assert told.splitlines()[-1] == (
        "31 copies left out, as an image counts once, 1 of them with another label; "
        f"2 of {images} images trained the model: what is measured on them does not hold for new ones"
    )
    assert "can not be said (2 of these images trained the model)" in told
    table = tmp_path / "site.csv"
    rows = [f"{path},{path.parent.name}" for path in sorted(site.rglob("*.png"))]
    table.write_text("\n".join(["path,label", *rows]))
    assert main(["evaluate", str(small_model.model), str(table)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == told.splitlines()[-1]


def test_a_model_without_checksums_says_so(small_model, tmp_path, capsys):
    model = shutil.copytree(small_model.model, tmp_path / "model")
    (model / TRAINING_IMAGES).unlink()  # as after --push-to-hub
    assert main(["evaluate", str(model), str(small_model.data / "PACS" / "sketch")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no copies; whether any image trained the model is unknown, as there are no checksums")


def test_unreadable_images_are_no_copies_of_each_other(tmp_path):
    content = checksums([Item(name, str(tmp_path / name)) for name in ("a", "b", ".")] + [Item("c", b"x")] * 2)
    rows, first = first_of_each(content)
    assert rows.tolist() == [0, 1, 2, 3] and first.tolist() == [0, 1, 2, 3, 3]
    assert are_among(content[3:], content[4:]).tolist() == [True, True]


def test_the_checksums_are_those_of_the_training_images(small_model):
    images = load_file(small_model.model / TRAINING_IMAGES)["xxh3_128"]
    pacs = small_model.data / "PACS"
    own = {xxhash.xxh3_128_digest(p.read_bytes()) for p in pacs.rglob("*.png") if "sketch" not in p.parts}
    assert {bytes(row) for row in images} == own and len(images) == len(own) > 50
    assert (np.lexsort(images.T[::-1]) == np.arange(len(images))).all(), "sorted: no order of the data set"


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_damaged_checksums_are_one_line(small_model, tmp_path, capsys, damage):
    model = shutil.copytree(small_model.model, tmp_path / "model")
    if damage == "cut":
        (model / TRAINING_IMAGES).write_bytes((model / TRAINING_IMAGES).read_bytes()[:-5])
    else:
        write_checked(model / TRAINING_IMAGES, tensors_of({"xxh3_128": np.zeros((1, 16), np.uint8)}), {})
    assert main(["evaluate", str(model), str(small_model.data / "PACS" / "sketch")]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("xdm-ft: ")]
    assert "training_images.safetensors: is damaged" in line and line.endswith("export the model again")
