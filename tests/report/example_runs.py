"""Runs made of the content of results.json alone, for the tests of what is made from it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from xdm_ft.core import ModelKey, Score
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.recipe.check import check
from xdm_ft.recipe.components import names
from xdm_ft.recipe.method import MethodItem, split_label, split_name, with_encoder
from xdm_ft.recipe.settings import Recipe
from xdm_ft.recipe.text import RecipeText
from xdm_ft.results.measured import RunMeasures
from xdm_ft.results.model import Pick, Record
from xdm_ft.results.run import Run
from xdm_ft.results.summary import Summary, summarise
from xdm_ft.results.table import EQUAL, NO_VERDICT, UNKNOWN, Comparison, PValue, SummaryRow
from xdm_ft.results.trials import pick_trials

GOLDEN = Path(__file__).parent / "golden"


def assert_golden(name: str, text: str) -> None:
    """Numbers to 9 digits: the last ones depend on the processor. XDM_FT_GOLDEN=write writes the files, rounded so."""
    text = re.sub(r"\d+\.\d{10,}(e[+-]\d+)?", lambda number: f"{float(number[0]):.9g}", text)
    if os.environ.get("XDM_FT_GOLDEN") == "write":
        (GOLDEN / name).write_text(text, encoding="utf-8", newline="")
    assert text == (GOLDEN / name).read_bytes().decode()


RECIPE: dict[str, Any] = {
    "name": "made",
    "data": {"name": "digits"},
    "encoder": {"name": "timm", "model": "tiny", "trainable": False},
    "protocol": {"name": "leave_one_domain_out", "selection": "train_val", "metric": "accuracy", "seeds": [0, 1]},
    "training": {"steps": 10},
    "report": {"page": False},
}
ENVIRONMENT = {"device": "cpu", "processes": 1, "threads": 1, "code": {}}
DATA = {"images": 40, "annotations": "a", "content": "of all images"}
OF_MODELS = {"encoder": "tiny", "trainable": False}
ROW = {**OF_MODELS, "augmentation": "none", "budget": {"draws": 1, "gradient_evaluations": None}}


def recipe_of(values: dict[str, Any]) -> Recipe:
    """The recipe with these keys; one that does not exist is another method with this label.

    Its name and labels may be what no recipe may hold: reports must not rely on that.
    """
    blocks = {key: block | values.get(key, {}) if isinstance(block, dict) else block for key, block in RECIPE.items()}
    items = [{"name": item} if isinstance(item, str) else item for item in values["methods"]] or [{"name": "erm"}]
    made = RECIPE | values | blocks | {"name": "made"}
    without_text = {"zero_shot"} if made["encoder"]["name"] == "timm" else set()
    known = {*names("algorithms")} - {"clipood", "coral", "dsu", "lisa", "mixstyle", "wise_ft"} - without_text
    real = [item["name"] if split_name(item["name"])[0] in known else "prototypes" for item in items]
    made["methods"] = [
        {**item, "name": name, "label": str(i)} for i, (item, name) in enumerate(zip(items, real, strict=True))
    ]
    if "encoders" in values:
        del made["encoder"]
        made["encoders"] = [RECIPE["encoder"] | block for block in values["encoders"]]
    if made["data"]["name"] in ("folder", "pacs"):
        made["data"] = {"root": "nowhere", **made["data"]}
    compare = made["report"].pop("compare", ())
    recipe = check(RecipeText("example", made))

    def labelled(item: MethodItem) -> MethodItem:
        own = items[item.index].get("label") or items[item.index]["name"]
        label = own if item.encoder_label is None else with_encoder(own, item.encoder_label)
        return replace(item, label=label, block=item.block.model_copy(update={"label": own}))

    report = recipe.report.model_copy(update={"compare": tuple(map(tuple, compare))})
    methods = tuple(map(labelled, recipe.methods)) if values["methods"] else ()
    return replace(recipe, name=values.get("name", RECIPE["name"]), report=report, methods=methods)


def whole(results: dict[str, Any]) -> dict[str, Any]:
    """The results with what every run writes and an example may leave out."""
    environment = results["environment"]
    counts = {"classes": ["cat", "dog", "elk"], "images": {"a": [10, 10, 0], "b": [10, 10, 0]}}
    return {"data": counts, "tested_on": "domains never trained on", "findings": [], "comparisons": [], "looks": []} | {
        **results,
        "recipe": recipe_of(results["recipe"]).resolved(),
        "environment": ENVIRONMENT | environment | {"data": DATA | environment.get("data", {})},
        "runs": [OF_MODELS | {"trial": 0, "hparams": {}, "selected": {}} | run for run in results["runs"]],
        "summary": [ROW | row for row in results["summary"]],
    }


def run_of(results: dict[str, Any], path: Path = Path("example")) -> Run:
    """A run with these results; what the example leaves out, and every run has, is filled in."""
    made = whole(results)
    records = [Record.from_json(run) for run in made["runs"]]
    rows = [SummaryRow.from_json(row) for row in made["summary"]]
    return Run(path, recipe_of(made["recipe"]), made, records, rows)


def set_recipe(run: Run, **changes: Any) -> None:
    """Changes keys of blocks of a run's recipe, or its name, in place."""
    recipe = run.recipe
    for key, value in changes.items():
        if key == "data":
            value = replace(recipe.data, block=recipe.data.block.model_copy(update=value))
        elif isinstance(value, dict):
            value = getattr(recipe, key).model_copy(update=value)
        recipe = replace(recipe, **{key: value})
    run.__dict__["recipe"] = recipe


def model(
    method: str,
    held: tuple[str, ...],
    seed: int,
    accuracies: dict[str, float] | None = None,
    trial: int = 0,
    hparams: dict[str, Any] | None = None,
    value: float = 0.5,
    picked: dict[str, float] | None = None,
    **metrics: Any,
) -> dict[str, Any]:
    """An entry of `runs`: a model that train_val picked at step 10. `accuracies`: of the domains; else `accuracy`."""
    accuracy = metrics.get("accuracy", 0.5)
    of_domains = accuracies or dict.fromkeys(held, accuracy)
    score = {
        "accuracy": accuracy, "balanced_accuracy": 0.4, "macro_f1": 0.3, "auroc": 0.8, "nll": 1.5, "ece": 0.1, "n": 20,
        "worst_domain_accuracy": min(of_domains.values()),
        "per_class_recall": {"cat": 0.2, "dog": 0.6, "elk": None},
        "per_domain": {domain: {"accuracy": share, "n": 10} for domain, share in of_domains.items()},
    }  # fmt: skip
    pick = {"step": 10, "weights": "w", "metrics": {"test": score | metrics}, "value": value} | (picked or {})
    identity = {"method": method, "test_domains": list(held), "seed": seed, "trial": trial, "hparams": hparams or {}}
    made = {"status": "ok", "selected": {"train_val": pick}, "files": {"w": "0"}, "train_seconds": 1.0}
    return OF_MODELS | identity | made


def encoder_about(label: str, **changes: Any) -> dict[str, Any]:
    """What results.json says of an encoder."""
    about = {"component": "timm", "model": f"vit_{label}", "pretraining": f"{label} corpus", "width": 64,
             "parameters": 5_717_416, "ms_per_image": 12.34, "feature_bytes": 2_557_696,
             "robustness_index": 0.625}  # fmt: skip
    return about | changes


def comparison(
    first: str,
    second: str = "erm",
    difference: float = 0.1,
    here: str = EQUAL,
    elsewhere: str = UNKNOWN,
    **changes: Any,
) -> Comparison:
    """A comparison over two held-out domains with these verdicts; without one it has no p."""
    tested = here != NO_VERDICT
    values: dict[str, Any] = {
        "selection": "train_val", "sets": 2, "domains": 2, "seeds": 3, "paired": False, "error": 0.02, "freedom": 5.0,
        "share_seeds": 0.75, "share_images": 0.25, "freedom_seeds": 4.0, "freedom_images": 50.0, "other_error": None,
        "other_freedom": None, "error_elsewhere": 0.05, "p_here": PValue(0.01, 0.02) if tested else None,
        "p_elsewhere": PValue(0.15, 0.3) if tested else None, "note": "images assumed independent",
    }  # fmt: skip
    sides = {"first": first, "second": second, "difference": difference}
    return Comparison(**values | sides | {"here": here, "elsewhere": elsewhere} | changes)


def beside_zero_shot(run: Run, method: str, differences: Mapping[str, float]) -> Run:
    """The run with a row of zero-shot, and comparisons with it on single domains: clear from 5 points on."""
    first = replace(run.every[0], deterministic=True)
    made = replace(run, every=[first, *run.every[1:]])
    rows = {
        ("train_val", method, (name,)): comparison(
            method,
            "zero_shot",
            difference,
            sets=1,
            domains=1,
            p_here=PValue(0.001 if abs(difference) > 0.05 else 0.4, None),
        )
        for name, difference in differences.items()
    }
    made.__dict__["measured_if_known"] = RunMeasures("", {}, {}, rows)
    return made


def with_comparisons(results: dict[str, Any], *rows: Comparison) -> dict[str, Any]:
    """The results with these comparisons instead of their own."""
    return results | {"comparisons": [row.to_json() for row in rows]}


def results_of(
    runs: list[dict[str, Any]], name: str = "made", encoders: Sequence[str] = (), **recipe: Any
) -> dict[str, Any]:
    """results.json with these `runs` and their summary, as a run would write it.

    With several `encoders`, methods are called METHOD @ ENCODER.
    """
    methods = list(dict.fromkeys(run["method"] for run in runs))
    own = {
        "name": name,
        "protocol": {"split_rule": "stratified", "val_fraction": 0.2},
        "methods": methods,
    }
    if encoders:
        own |= {"methods": list(dict.fromkeys(split_label(method, encoders)[0] for method in methods))}
        own |= {"encoders": [{"label": one, "model": f"vit_{one}"} for one in encoders]}
    erm = {method: f"erm @ {one}" if (one := split_label(method, encoders)[1]) else "erm" for method in methods}
    records = [Record.from_json(run) for run in runs]
    picked = pick_trials(records, "train_val", "accuracy")
    found = Summary([], [])
    if picked:
        found = summarise(
            picked,
            lambda _: [],
            methods=methods,
            rules={"train_val": "pets, 40 images; picked by train_val"},
            metric="accuracy",
            references={method: one for method, one in erm.items() if method != one and one in methods},
            encoders=encoders,
        )
    costs = {"encoders": {one: encoder_about(one) for one in encoders}} if encoders else {}
    return whole({
        "schema": 1,
        "recipe": own | recipe,
        "environment": {"python": "3.11"} | costs,
        "runs": runs,
        "summary": [row.to_json() for row in found.rows],
        "comparisons": [row.to_json() for row in found.comparisons],
    })  # fmt: skip


def under_both(**recipe: Any) -> dict[str, Any]:
    """The results of `two_sets` under the encoders small and large."""
    runs = [run | {"method": f"{run['method']} @ {one}"} for one in ("small", "large") for run in two_sets()]
    return results_of(runs, encoders=("small", "large"), **recipe)


def two_sets() -> list[dict[str, Any]]:
    """Two methods, two held-out sets and two seeds; accuracy of ERM: a 0.6 and 0.8, b 0.5 and 0.3."""
    found = []
    for method, gain in (("erm", 0.0), ("xdomainmix", 0.1)):
        for held, accuracies in (("a", (0.6, 0.8)), ("b", (0.5, 0.3))):
            for seed, accuracy in enumerate(accuracies):
                recalls = {"cat": accuracy - 0.1, "dog": 0.95, "elk": None}
                found.append(
                    model(method, (held,), seed, accuracy=accuracy + gain, nll=1 + seed, per_class_recall=recalls)
                )
    return found


def _record(method: str, held: tuple[str, ...], seed: int, value: float, chosen_by: float | None, rule: str) -> Record:
    names = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "worst_domain_accuracy", "nll", "ece")
    score = Score(
        **dict.fromkeys(names, value),
        n=10,
        per_class_recall={},
        per_domain={name: {"accuracy": value, "n": 10} for name in held},
    )
    return Record(
        ModelKey(method, held, seed, 0), {}, "ok", selected={rule: Pick(3, "w", {"test": score}, value=chosen_by)},
        **OF_MODELS,
    )  # fmt: skip


def made_run(
    values: Mapping[str, Mapping[str, float]],
    *,
    verdicts: Mapping[str, str] | None = None,
    chosen_by: Mapping[str, float] | None = None,
    seeds: int = 3,
    rule: str = "train_val",
    metric: str = "accuracy",
    note: str = "images assumed independent",
    failed: Sequence[str] = (),
    path: Path = Path("output/made"),
    sets: Sequence[tuple[str, ...]] | None = None,
    tested_on: str = "domains never trained on",
    encoders: Sequence[str] = (),
    further: Sequence[Comparison] = (),
) -> Run:
    """A run with given {method: {held-out domain: value of the metric}}, and verdicts.

    The first method is ERM. `chosen_by`: {method: selection value}, by default its mean test value; the best is chosen.

    With several `encoders`, methods are called METHOD @ ENCODER, and the first one of each encoder is ERM. `verdicts`:
    here and elsewhere, as in "better, unknown"; by default there is no clear difference. `further`: comparisons that
    stand beside no row.
    """
    rows, records, runs, compared = [], list[Record](), list[dict[str, Any]](), list[Comparison]()
    first = {split_label(method, encoders)[1]: method for method in reversed(list(values))}
    for method, by_domain in values.items():
        reference = first[split_label(method, encoders)[1]]
        mean = float(np.mean([*by_domain.values()]))
        picked = (chosen_by or {}).get(method, mean)
        own = [
            _record(method, held, seed, float(np.mean([by_domain[name] for name in held])), picked, rule)
            for held in (sets or [(name,) for name in by_domain])
            for seed in range(seeds)
        ]
        reason = f"1 of {len(own)} runs failed: the loss was not finite" if method in failed else None
        difference = mean - float(np.mean([*values[reference].values()]))
        here, _, elsewhere = (verdicts or {}).get(method, EQUAL).partition(", ")
        number = len(sets or by_domain)
        shape = {"sets": number, "domains": len(by_domain), "seeds": seeds, "selection": rule, "note": note}
        shape |= {} if number > 1 else {"error_elsewhere": None, "p_elsewhere": None}
        versus = comparison(method, reference, difference, here, elsewhere or UNKNOWN, **shape)
        compared += [versus] if method != reference else []
        rows.append(
            SummaryRow(
                method, rule, metric, "test",
                mean=None if reason else mean, std=0.01, stderr=None if seeds == 1 else 0.004, n=seeds, interval=None,
                spread_as_published=None,
                per_test_domain={name: {"mean": value, "std": None} for name, value in by_domain.items()},
                protocol="p", budget={"draws": 1, "gradient_evaluations": None},
                failed=1 if reason else None, reason=reason, augmentation="none", **OF_MODELS,
            )
        )  # fmt: skip
        records += own[1:] if reason else own
        runs += [{**one.to_json(), **({"status": "failed"} if reason and one is own[0] else {})} for one in own]
    recipe = {
        "name": "made",
        "protocol": {"selection": rule, "metric": metric},
        "methods": list(dict.fromkeys(split_label(method, encoders)[0] for method in values)),
    }
    if encoders:
        recipe["encoders"] = [{"label": one} for one in encoders]
    results = {"recipe": recipe, "environment": {}, "runs": runs, "summary": [row.to_json() for row in rows]}
    results = whole(results | {"tested_on": tested_on})
    made = with_comparisons(results, *compared, *further)
    run = Run(path, recipe_of(made["recipe"]), made, records, rows)
    if chosen_by and run.choice is not None:
        chosen = (max if HIGHER_IS_BETTER[metric] else min)(chosen_by, key=lambda method: chosen_by[method])
        at = dict.fromkeys(run.choice.at, chosen)
        run.__dict__["choice"] = replace(run.choice, method=chosen, at=at)  # cached, whatever the tests say
    return run
