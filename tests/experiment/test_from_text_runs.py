"""Runs whose solvers begin at the class embeddings: the tiny CLIP of the package on a few digits."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import small_runs
import torch
from safetensors.torch import load_file

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.gda import GDA
from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.cli.export import export_model
from xdm_ft.cli.library import run
from xdm_ft.cli.validate import validate
from xdm_ft.core import Annotations, Batch, Criteria, ModelKey, Task
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.prepare import build_encoders
from xdm_ft.export.choose import Choice
from xdm_ft.features.cache import Features
from xdm_ft.protocol.splits import Split
from xdm_ft.recipe.check import load
from xdm_ft.runtime.errors import UserError
from xdm_ft.training import Job, Training
from xdm_ft.training.bank.train import solve

pytestmark = pytest.mark.usefixtures("in_folder", "few_digits")
RECIPE = """\
name: small
data: {name: digits}
protocol: {name: leave_one_domain_out, test_domains: [ink], seeds: 2, final_fit: true}
encoder: {name: open_clip, model: demo, weights: demo}
features: {dir: features, workers: 0}
methods:
  - zero_shot
  - linear_probe
  - {name: linear_probe, center: zero, label: from zero}
  - gda
training: {batch_size: 16, steps: 10}
report: {page: false}
"""
TIMM = "{name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}"


def recipe(*overrides):
    Path("text.yaml").write_text(RECIPE)
    return load("text.yaml", list(overrides))


def centers(made):
    return [item.center for item in build_encoders(made)[0].methods]


def test_the_encoder_decides_where_the_recipe_does_not():
    assert centers(recipe()) == [None, "zero_shot", "zero", None]
    probes = "methods=[erm, linear_probe, gda, {name: linear_probe, center: zero_shot, label: text}]"
    # nothing to be learned from the text: pooling outside its space, and an encoder without a text side
    for override in ("encoder.pooling=mean", f"encoder={TIMM}"):
        made, _ = build_encoders(recipe(probes, override))
        assert [item.center for item in made.methods] == [None, "zero", None, "zero_shot"]
        assert [bool(item.skipped) for item in made.methods] == [False, False, False, True]
        assert [item.reads_normalized for item in made.methods[:3]] == [False, False, True]
        assert not any(item.reads_text for item in made.runnable_methods)
    for override in ("encoder.pooling=mean", f"encoder={TIMM}"):
        with pytest.raises(
            UserError, match=r"methods(\.0\.center)?: text:? (with center: zero_shot needs|class embeddings are)"
        ):
            build_encoders(recipe("methods=[{name: linear_probe, center: zero_shot, label: text}]", override))
    # prompts that nothing reads: around zero, and where no encoder has a text side
    probe = "methods=[{name: linear_probe, prompts: 'a {}'}]"
    assert build_encoders(recipe(probe))[0].methods[0].reads_text
    for overrides in ([probe, "linear_probe.center=zero"], [probe, f"encoder={TIMM}"]):
        with pytest.raises(UserError, match=r"methods\.0\.prompts: linear_probe uses no class embeddings; leave"):
            recipe(*overrides)
    with pytest.raises(UserError, match=r"methods\.0\.center"):
        recipe("methods=[{name: erm, center: zero}]")


def test_under_several_encoders_each_decides():
    two = RECIPE.replace("encoder: {", "encoders:\n  - {label: clip, ")
    Path("two.yaml").write_text(two.replace("features: {", f"  - {TIMM}\nfeatures: {{"))
    made, _ = build_encoders(load("two.yaml", ["methods=[linear_probe, zero_shot]"]))
    assert {item.label: item.center for item in made.methods} == {
        "linear_probe @ clip": "zero_shot", "zero_shot @ clip": None, "linear_probe @ test_vit": "zero",
        "zero_shot @ test_vit": None,
    }  # fmt: skip
    assert [item["center"] for item in made.resolved()["methods"] if "center" in item] == [None]


@pytest.mark.slow
def test_a_run_says_where_it_began_and_keeps_its_road():
    content = small_runs.results_of(recipe())
    written = {item["label"] or item["name"]: item for item in content["recipe"]["methods"]}
    assert (written["linear_probe"]["center"], written["from zero"]["center"]) == ("zero_shot", "zero")
    of = {record["method"]: record for record in content["runs"]}
    assert of["linear_probe"]["hparams"]["center"] == "zero_shot"
    picks = {method: record["selected"]["train_val"] for method, record in of.items()}
    splits = {split: score["accuracy"] for split, score in picks["zero_shot"]["metrics"].items()}
    splits["train_val"] = picks["zero_shot"]["value"]
    road, gda = picks["linear_probe"]["curve"], picks["gda"]["curve"]
    assert road[0] == {"strength": None, "l2": None, **splits} and gda[0] == {"gda_alpha": 0, **splits}
    assert [point["strength"] for point in road[1:]] == [10.0**-k for k in range(-1, 7)] and len(gda) == 8
    for method in ("linear_probe", "gda"):
        pick = picks[method]
        [point] = [p for i, p in enumerate(pick["curve"]) if i == pick["step"]]
        assert point["test"] == pick["metrics"]["test"]["accuracy"] and point["train_val"] == pick["value"]
        best = max(p["train_val"] for p in pick["curve"])
        assert pick["step"] == min(i for i, p in enumerate(pick["curve"]) if p["train_val"] == best)
    assert load_file(Path("output/small") / picks["gda"]["weights"])["head.weight"].shape == (10, 64)
    # the same run again trains nothing, and reads back what it wrote
    assert small_runs.results_of(recipe()) == content and content["final_fit"]["status"] == "ok"


GIVEN = """\
name: given
data: {name: features, file: f.npz, class_embeddings: text.npz, logit_scale: 50}
protocol: {name: leave_one_domain_out, seeds: 2}
methods:
  - zero_shot
  - linear_probe
  - wise_ft
  - gda
  - {name: erm, start: zero_shot, anchor: clap, label: from text}
training: {batch_size: 8, steps: 6}
report: {page: false}
"""


def write_given(shift=0.4):
    rng = np.random.default_rng(0)
    text = rng.normal(size=(3, 16))
    y, domain = np.arange(120) % 3, np.arange(120) // 40
    z = 3 * (text[y] + shift * np.eye(3)[domain] @ rng.normal(size=(3, 16)) + rng.normal(size=(120, 16)))
    names = np.array(["cat", "dog", "hen"])
    np.savez("f.npz", features=z.astype(np.float32), label=names[y], domain=np.array(["a", "b", "c"])[domain])
    np.savez("text.npz", features=text, label=names)
    Path("given.yaml").write_text(GIVEN)
    return z, text, y, domain


def test_given_class_embeddings_serve_as_those_of_an_encoder():
    z, text, y, domain = write_given()
    right = (z @ (text / np.linalg.norm(text, axis=1, keepdims=True)).T).argmax(1) == y
    of_domain = {name: pytest.approx(right[domain == i].mean()) for i, name in enumerate("abc")}
    shown = validate(load("given.yaml", [])).document
    assert shown["zero_shot"] == of_domain and shown["error"] is None and not shown["prompts"]
    content = small_runs.results_of(load("given.yaml", []))
    assert {record["status"] for record in content["runs"]} == {"ok"}
    for record in content["runs"]:
        pick = record["selected"]["train_val"]
        accuracy, [held] = pick["metrics"]["test"]["accuracy"], record["test_domains"]
        if record["method"] == "zero_shot":
            assert accuracy == of_domain[held]
            head = load_file(Path("output/given") / pick["weights"])["head.weight"]
            np.testing.assert_allclose(head.norm(dim=1).numpy(), 50, rtol=1e-5)
        elif record["method"] in ("linear_probe", "gda"):
            assert pick["curve"][0]["test"] == of_domain[held]
    with pytest.raises(UserError, match=r"methods\.0\.prompts: .*no text encoder; leave it out"):
        load("given.yaml", ["methods=[{name: zero_shot, prompts: 'a {}'}]"])
    # other embeddings are another run
    np.savez("text.npz", features=text + 1, label=np.array(["cat", "dog", "hen"]))
    with pytest.raises(UserError, match="weights"):
        run(load("given.yaml", ["protocol.seeds=3"]))


STARTS = (
    "methods=[zero_shot, wise_ft, {name: erm, start: zero_shot, label: text}, {name: erm, start: zero_shot, anchor: "
    "clap, label: clap}, {name: erm, start: zero_shot, head: cosine, label: cosine}, {name: linear_probe, start: "
    "zero_shot}, {name: clipood, trainable: {blocks: 1}}, {name: erm, start: zero_shot, trainable: true, anchor: clap, "
    "label: all}, erm]"
)
STEP = "training={batch_size: 16, steps: 1, lr: 1e-12, encoder_lr: 1e-12}"


def test_a_row_says_how_its_head_starts():
    made = recipe(STARTS)
    wise_ft, text, _, cosine, probe = made.methods[1:6]
    assert [item.block.start for item in made.methods[:3]] == [None, "zero_shot", "zero_shot"]
    assert [item.reads_normalized for item in (wise_ft, text, cosine, probe)] == [True, True, False, True]
    assert [item.head_init for item in (wise_ft, text, cosine)] == ["zero_shot"] * 3 and probe.center == "zero_shot"
    assert load_again(made).resolved() == made.resolved()
    assert recipe("methods=[{name: wise_ft, start: null}]").methods[0].head_init == "zero_shot"
    lines = validate(made).document["starts"]
    assert lines == [
        "zero_shot: the class embeddings, reads normalised features",
        "wise_ft: starts at the class embeddings, reads normalised features",
        "text: starts at the class embeddings, reads normalised features",
        "clap: starts at the class embeddings, anchor clap, reads normalised features",
        "cosine: starts at the class embeddings, normalises features itself",
        "linear_probe: computed around the class embeddings, reads normalised features",
        "clipood: starts at the class embeddings, reads normalised features",
        "all: starts at the class embeddings, anchor clap, reads normalised features",
        "erm: starts at random, reads features as they are",
    ]
    others = validate(recipe("methods=[gda, {name: linear_probe, center: zero}, knn]", "encoder.normalize=true"))
    assert others.document["starts"] == [
        "gda: computed beside the class embeddings, reads normalised features",
        "linear_probe: computed around zero, reads normalised features",
        "knn: computed, normalises features itself",
    ]


def load_again(made):
    Path("again.yaml").write_text(made.as_yaml())
    return load("again.yaml", [])


@pytest.mark.slow
def test_every_start_at_the_text_begins_as_zero_shot_and_is_shipped_so():
    """Steps of 1e-12 leave every head where it starts, whatever trains."""
    content = small_runs.results_of(recipe(STARTS, STEP, "protocol.seeds=1", "protocol.final_fit=false"))
    scores = {r["method"]: r["selected"]["train_val"]["metrics"]["test"]["accuracy"] for r in content["runs"]}
    from_text = {name: scores[name] for name in ("zero_shot", "wise_ft", "text", "clap", "cosine", "clipood", "all")}
    assert {*from_text.values()} == {scores["zero_shot"]} and scores["erm"] != scores["zero_shot"]
    hparams = {r["method"]: r["hparams"] for r in content["runs"]}
    assert [hparams[name]["anchor"] for name in ("text", "clap", "erm")] == [0, "clap", 0]
    assert hparams["text"]["normalize"] and not hparams["cosine"]["normalize"] and "normalize" not in hparams["erm"]
    for method in ("all", "clipood"):  # what is shipped reads normalised features too
        export_model("output/small", method, Choice(method=method, held_out=("ink",), seed=0))
        assert json.loads(Path(method, "config.json").read_text())["normalize"]


@pytest.mark.slow
def test_a_search_draws_the_anchor_of_the_heads_that_have_one():
    space = "search={trials: 3, space: {anchor: {choice: [0.5, clap]}}}"
    made = recipe("methods=[linear_probe, {name: erm, start: zero_shot}, {name: erm, head: mlp, label: mlp}]", space)
    content = small_runs.results_of(made)
    of = {m: [r["hparams"].get("anchor") for r in content["runs"] if r["method"] == m] for m in ("erm", "mlp")}
    assert "clap" in of["erm"] and {*of["erm"]} <= {0, 0.5, "clap"} and len(of["erm"]) == 6
    assert of["mlp"] == [None] * 2, "one trial where none draws"
    assert content["final_fit"]["status"] == "ok"


@pytest.mark.slow
def test_a_path_may_be_picked_on_domains_that_it_has_not_seen():
    write_given(shift=2.0)
    crossed = ("linear_probe, label: crossed", "gda, label: g", "knn")
    methods = f"methods=[linear_probe, gda, {', '.join(f'{{name: {name}, pick: cross_domain}}' for name in crossed)}]"
    content = small_runs.results_of(load("given.yaml", [methods]))
    picked = {(r["method"], *r["test_domains"], r["seed"]): r["selected"]["train_val"] for r in content["runs"]}
    for (method, held, seed), pick in picked.items():
        if method == "crossed":  # the same road, whatever picks on it
            assert pick["curve"] == picked["linear_probe", held, seed]["curve"]
            [point] = [p for i, p in enumerate(pick["curve"]) if i == pick["step"]]
            assert point["train_val"] == pick["value"]
    assert any(
        picked[m, h, s]["step"] != pick["step"]
        for (m, h, s), pick in {
            ("linear_probe", *key[1:]): pick for key, pick in picked.items() if key[0] == "crossed"
        }.items()
    )
    notes = {row["method"]: row.get("flags") for row in content["summary"] if row["selection"] == "train_val"}
    oracle = [row.get("flags") or () for row in content["summary"] if row["selection"] == "oracle"]
    assert oracle and not any("left out once" in flag for flags in oracle for flag in flags)
    assert any("each left out once" in flag for flag in notes["crossed"] or ()) and not notes["linear_probe"]
    one = load("given.yaml", [methods, "protocol.together=[[b, c]]", "protocol.test_domains=[b, c]"])
    [reason] = {model.skipped for model in make_plan(one, read_data(one)).models if model.item.label == "g"}
    assert reason.startswith("needs 2")


def test_the_point_is_that_of_a_loop_over_the_domains():
    """Every domain left out once, each candidate's accuracy on it, the mean, the first best."""
    generator = torch.Generator().manual_seed(1)
    features = torch.nn.functional.normalize(torch.randn(90, 6, generator=generator), dim=1)
    labels, domains = torch.arange(90) % 3, torch.arange(90) // 30
    text = 10 * torch.nn.functional.normalize(torch.randn(3, 6, generator=generator), dim=1)
    setup = Setup(Task(tuple("abc"), tuple("xyz")), 6, 0, 0, text_weight=text)
    pools = tuple((domains == d).nonzero()[:, 0][:25] for d in range(3))
    validation = torch.cat([(domains == d).nonzero()[:, 0][25:] for d in range(3)])
    split = Split(("none",), tuple("xyz"), pools, {"train_val": validation}, domain_of=torch.arange(3))
    job = Job(
        ModelKey("gda", ("none",), 0, 0), split, setup, partial(GDA, pick="cross_domain"), None, Training(steps=1)
    )
    picked = solve(
        job, Features([features]), Annotations(labels, domains, domains), Criteria(("train_val",), "accuracy")
    )
    totals = {}
    for d in range(3):
        rows = torch.cat([pools[e] for e in range(3) if e != d])
        batch = Batch(features[rows], labels[rows], domains[rows], rows, rows)
        for candidate in GDA(setup).solve(batch.x, batch):
            logits = features[pools[d]] @ candidate.head["weight"].T + candidate.head["bias"]
            right = (logits.argmax(1) == labels[pools[d]]).double().mean()
            totals[candidate.step] = totals.get(candidate.step, 0) + float(right)
    best = max(totals.values())
    assert picked.selected["train_val"].step == next(s for s, total in totals.items() if total == pytest.approx(best))


@pytest.mark.soak
def test_where_there_is_nothing_to_learn_no_point_is_better_than_zero_shot():
    """Labels are shuffled: tables with a verdict for a picked point over zero-shot, of 100."""
    rng, better = np.random.default_rng(0), 0
    compare = "report.compare=[[linear_probe, zero_shot], [gda, zero_shot], [wise_ft, zero_shot]]"
    for draw in range(100):
        z, _, y, domain = write_given()
        names = np.array(["cat", "dog", "hen"])[rng.permutation(y)]
        np.savez("f.npz", features=z.astype(np.float32), label=names, domain=np.array(["a", "b", "c"])[domain])
        methods = "methods=[zero_shot, linear_probe, gda, wise_ft]"
        content = small_runs.results_of(
            load("given.yaml", [methods, compare, "protocol.seeds=10", f"name=given{draw}"])
        )
        better += any(row["here"] == "better" for row in content["comparisons"])
    assert better <= 5


def test_where_all_points_are_as_good_the_first_is_picked():
    """It is zero-shot: one validation image, which every head gets right."""
    text = torch.nn.functional.normalize(torch.tensor([[1.0, 0.2, 0.0], [0.0, 1.0, 0.3]]), dim=1)
    features = text.repeat(6, 1)
    labels, domains = torch.arange(12) % 2, torch.arange(12) // 6
    setup = Setup(Task(tuple("ab"), tuple("xy")), 3, 0, 0, text_weight=10 * text)
    pools = tuple((domains == d).nonzero()[:, 0][:5] for d in range(2))
    split = Split(("none",), tuple("xy"), pools, {"train_val": torch.tensor([11])}, domain_of=torch.arange(2))
    about, criteria = Annotations(labels, domains, domains), Criteria(("train_val",), "accuracy")
    for make in (partial(GDA), partial(LinearProbe, center="zero_shot"), partial(GDA, pick="cross_domain")):
        job = Job(ModelKey("m", ("none",), 0, 0), split, setup, make, None, Training(steps=1))
        assert solve(job, Features([features]), about, criteria).selected["train_val"].step == 0
