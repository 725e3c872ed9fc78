"""Runs whose solvers begin at the class embeddings: the tiny CLIP of the package on a few digits."""

from pathlib import Path

import numpy as np
import pytest
import small_runs
from safetensors.torch import load_file

from xdm_ft.cli.library import run
from xdm_ft.cli.validate import validate
from xdm_ft.experiment.prepare import build_encoders
from xdm_ft.recipe.check import load
from xdm_ft.runtime.errors import UserError

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
  - {name: wise_ft, normalize: true}
  - gda
  - {name: erm, head_init: zero_shot, normalize: true, label: from text}
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
