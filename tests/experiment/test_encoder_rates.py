"""`encoder_lr` of a method: who may have it, which model trains with it, and what a search draws beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import recipe, results

from xdm_ft.experiment.final_fit import combined
from xdm_ft.experiment.plan import hparams, make_plan, read_data, searched
from xdm_ft.recipe.check import load
from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError
from xdm_ft.training.end_to_end import train

pytestmark = pytest.mark.usefixtures("small_pacs")
LORA = "{lora: {rank: 2, blocks: 1}}"
ITEMS = (
    "erm, {name: erm, label: block, trainable: {blocks: 1}}, "
    f"{{name: erm, label: low rank, trainable: {LORA}, encoder_lr: 3.0e-4}}, {{name: sam, label: all, trainable: true}}"
)
ROWS = f"methods=[{ITEMS}]"
SEARCH = "search={trials: 40, preset: domainbed, sampler: sobol}"


def rates(made: Recipe) -> dict[str, list[float]]:
    """{row: encoder_lr of its trials} of the plan; the values in results.json are the same."""
    plan = make_plan(made, read_data(made))
    found: dict[str, list[float]] = {}
    for model in plan.models:
        values = hparams(model.item, model.training)
        if model.item.trainable is not False:
            assert values["encoder_lr"] == model.training.encoder_lr
            found.setdefault(model.item.label, []).append(model.training.encoder_lr)
        else:
            assert "encoder_lr" not in values
    return found


def fault(*overrides: str) -> str:
    with pytest.raises(UserError) as raised:
        recipe(*overrides)
    return str(raised.value)


ONE = "protocol.test_domains=[photo]"


def test_a_row_has_its_own_rate_and_the_others_the_recipes() -> None:
    assert rates(recipe(ROWS, ONE)) == {"block": [5e-5], "low rank": [3e-4], "all": [5e-5]}
    over = recipe(ROWS, ONE, "training.encoder_lr=1e-6", "all.encoder_lr=2e-5", "low rank.encoder_lr=1e-3")
    assert rates(over) == {"block": [1e-6], "low rank": [1e-3], "all": [2e-5]}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["methods=[{name: erm, encoder_lr: 1.0e-4}]"],
            "methods.0.encoder_lr: erm trains no encoder; leave it out, or",
        ),
        (
            ["methods=[erm, knn]", "knn.encoder_lr=1e-4"],
            "knn.encoder_lr: knn trains no encoder; leave it out, or set it",
        ),
        (
            [ROWS, "erm.encoder_lr=1e-4"],
            "erm.encoder_lr: erm trains no encoder; leave it out, or set it for a row with",
        ),
        ([ROWS, "block.encoder_lr=0"], "block.encoder_lr: input should be greater than 0, given 0"),
        (["methods=[sam]", "sam.encoder_lr=1e-4"], "unknown key"),
    ],
)
def test_a_row_that_trains_no_encoder_has_none(overrides: list[str], expected: str) -> None:
    found = fault(*overrides)
    assert expected in found and "\n" not in found


def test_several_encoders_of_which_one_trains() -> None:
    """The key is refused only where no row of the item trains an encoder."""
    one = "{name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}"
    written = Path("small.yaml")
    recipe()
    text = "\n".join(line for line in written.read_text().splitlines() if not line.startswith("encoder:"))
    written.write_text(f"{text}\nencoders: [{one}, label: frozen}}, {one}, label: trained, trainable: true}}]\n")
    made = load("small.yaml", ["methods=[{name: erm, encoder_lr: 2.0e-4}]", ONE])
    assert rates(made) == {"erm @ trained": [2e-4]}


def test_a_search_draws_rates_of_low_rank_updates_from_their_own_range() -> None:
    made = recipe(f"methods=[{ITEMS}, {{name: erm, label: free, trainable: {LORA}}}]", ONE, SEARCH)
    found = rates(made)
    assert {*found["low rank"]} == {3e-4}, "a rate that an item has is not drawn"
    free, block = sorted(found["free"][1:]), sorted(found["block"][1:])
    assert found["free"][0] == found["block"][0] == 5e-5, "the first trial has the recipe's own values"
    assert 1e-4 <= free[0] < 1.3e-4 and 2.5e-3 < free[-1] <= 10**-2.5
    assert 1e-5 <= block[0] < 1.3e-5 and 2.5e-4 < block[-1] <= 10**-3.5
    drawn = {item.label: dict(searched(made, item)) for item in made.methods}
    assert "encoder_lr" not in drawn["low rank"]
    assert drawn["free"]["encoder_lr"].log_uniform == (1e-4, 10**-2.5)
    assert drawn["block"]["encoder_lr"].log_uniform == (1e-5, 10**-3.5)
    by_label = {item.label: item for item in made.methods}
    assert "encoder_lr" not in combined(made, by_label["low rank"], [{"encoder_lr": 3e-4}])
    own = recipe(ROWS.replace(", encoder_lr: 3.0e-4", ""), ONE, SEARCH, "search.space={encoder_lr: {choice: [0.5]}}")
    assert {*rates(own)["low rank"][1:]} == {0.5}, "a range of the recipe's own is kept"


@pytest.mark.slow
def test_a_run_and_its_final_fit_have_the_rate_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, set[float]]] = []
    make = train.optimizer_of

    def spying(inner: Any, training: Any) -> Any:
        found = make(inner, training)
        seen.append((inner.algorithm.__class__.__name__, {group["initial_lr"] for group in found.param_groups}))
        return found

    monkeypatch.setattr(train, "optimizer_of", spying)
    item = f"methods=[{{name: erm, trainable: {LORA}, encoder_lr: 3.0e-4}}]"
    few = (item, "training.steps=2", "protocol.test_domains=[photo]")
    found = results(*few, "protocol.final_fit=true")
    assert seen == [("ERM", {3e-4, 0.05})] * 2
    assert {run["hparams"]["encoder_lr"] for run in found["runs"]} == {3e-4}
    assert found["final_fit"]["hparams"]["encoder_lr"] == 3e-4
    assert json.loads(Path("output/small/results.json").read_text())["recipe"]["methods"][0]["encoder_lr"] == 3e-4
