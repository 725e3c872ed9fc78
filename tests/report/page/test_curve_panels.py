"""Learning curves, search and WiSE-FT's curve: their numbers are those of results.json and of the event files."""

from __future__ import annotations

import dataclasses
import re

import pytest
from runs_in_memory import HOSTILE, curves, run, selection_value, summarised, test_value

from xdm_ft.report.finished import Run
from xdm_ft.report.page import curves as curves_page
from xdm_ft.report.page import search, wise_ft
from xdm_ft.report.page.curve_figures import Band, Curve, Lines, thinned
from xdm_ft.report.page.panel import Panel
from xdm_ft.report.page.styles import styles
from xdm_ft.storage.tensorboard import Scalars

ALPHAS = (0.0, 0.1, 0.5, 1.0)


def with_curves(made: Run, scalars: dict[str, Scalars]) -> Run:
    made.__dict__["scalars"] = scalars
    return made


def shown(panel: Panel | None) -> Panel:
    assert panel is not None
    names = [figure.name for figure in panel.figures]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-z][a-z0-9_-]*", name) for name in names)
    assert all(figure.alt and figure.svg.startswith("<svg") for figure in panel.figures)
    for table in panel.tables:
        assert table.rows and {len(row) for row in table.rows} == {len(table.header)}
    return panel


def column(panel: Panel, title: str, table: int = 0) -> list[float | None]:
    place = list(panel.tables[table].header).index(title)
    return [row[place].value for row in panel.tables[table].rows]


def test_a_run_without_curves_search_or_line_shows_nothing() -> None:
    old = with_curves(run(), {"": {"erm/art/seed0/loss": [(10, 1.0)], "erm/art/seed0/train_val/accuracy": [(10, 0.5)]}})
    for made in (run(), old, run(methods=[]), run(seeds=[])):
        assert [module.panel(made) for module in (curves_page, search, wise_ft)] == [None, None, None]


def test_curves_of_models() -> None:
    made = run()
    panel = shown(curves_page.panel(with_curves(made, curves(made))))
    names = [figure.name for figure in panel.figures]
    both = ["loss", "selection"]
    assert names == [*(f"curve-{i}-{kind}" for i in range(2) for kind in both), "curve-part-0"]  # no lr, and no zeros
    # models 0 and 1 are erm's on art, 4 and 5 xdomainmix's
    assert "held out: art. Mean at the last step: erm 0.015, xdomainmix 0.055." in panel.figures[0].alt
    assert "Mean at the last step: erm 80.1, xdomainmix 80.5." in panel.figures[1].alt
    assert panel.figures[4].caption.startswith("Auxiliary loss, all held-out sets.")
    assert column(panel, "picked step") == [100.0] * 8
    assert column(panel, "selection value") == [record.selected["train_val"].value for record in made.picked]


def test_a_search_shows_curves_of_picked_trials_only() -> None:
    made = run(methods=["erm"], trials=4)
    picked = curves(made)
    others = {name.replace("-trial", "-trial9"): {"train/loss": [(10, 99.0)]} for name in picked}
    panel = shown(curves_page.panel(with_curves(made, picked | others)))
    assert all("99" not in figure.alt for figure in panel.figures)


def test_summarised_heads_are_one_line_and_one_range() -> None:
    made = run(methods=["erm"], trials=3)
    panel = shown(curves_page.panel(with_curves(made, summarised(made))))
    assert "Mean at the last step: erm 1.25." in panel.figures[0].alt  # (3 · 1 + 1 · 2) / 4
    assert "summarised" in panel.about and "ring" not in panel.about
    lines = Lines("erm", styles(["erm"])["erm"], [], [
        Band(3.0, {10: 1.0, 20: 1.0}, {10: 0.5, 20: 0.4}, {10: 2.0, 20: 2.0}),
        Band(1.0, {10: 2.0}, {10: 0.7}, {10: 5.0}),
    ])  # fmt: skip
    assert lines.mean == [(10, 1.25)] and lines.range == [(10, 0.5, 5.0)]


def test_a_model_that_stopped_early_does_not_bend_the_mean() -> None:
    style = styles(["erm"])["erm"]
    lines = Lines("erm", style, [Curve([(1, 0.0), (2, 0.0)], None), Curve([(1, 1.0), (2, 1.0), (3, 9.0)], None)], [])
    assert lines.mean == [(1, 0.5), (2, 0.5)]
    assert Lines("erm", style, [], []).last is None


@pytest.mark.parametrize("count", [1, 59, 60, 61, 10_000])
def test_long_lines_are_thinned_and_keep_their_ends(count: int) -> None:
    points = list(range(count))
    found = thinned(points, 60)
    assert len(found) == min(count, 60) and found[0] == 0 and found[-1] == count - 1


@pytest.mark.slow
def test_curves_stay_small_whatever_the_run() -> None:
    made = run(methods=[f"m{i}" for i in range(4)], held=[(f"d{i}",) for i in range(20)], seeds=range(4))
    panel = shown(curves_page.panel(with_curves(made, curves(made, range(10, 10_010, 10)))))
    assert len(panel.figures) <= 22
    assert sum(len(figure.svg) for figure in panel.figures) < 1_500_000
    assert "8 of 20 held-out sets" in panel.about
    assert len(panel.tables[0].rows) == 240 and "The first 240 of 320 rows" in panel.tables[0].caption


def test_a_search_shows_its_picks() -> None:
    made = run(trials=8)
    panel = shown(search.panel(made))
    assert len(panel.tables) == 2 and len(panel.figures) == 2 + 2 * 3  # lr, weight_decay, kind; `same` is not searched
    for table, method in enumerate(("erm", "xdomainmix")):
        picked = [record for record in made.picked if record.method == method]
        best = [max(range(8), key=lambda trial: trial * 7 % 11)] * 4
        assert [record.trial for record in picked] == column(panel, "trial", table) == best
        assert column(panel, "selection value", table) == [selection_value(*record.key) for record in picked]
        assert column(panel, "test value", table) == [test_value(*record.key) for record in picked]
        assert column(panel, "lr", table) == [record.hparams["lr"] for record in picked]
    assert all("Rank correlation of selection and test value: -1.00" in figure.alt for figure in panel.figures[:2])
    logarithmic = {figure.caption.partition(": ")[2] for figure in panel.figures[2:]}
    assert logarithmic == {"lr (logarithmic axis).", "weight_decay (logarithmic axis).", "kind."}
    assert all("$" not in figure.svg and "mathdefault" not in figure.svg for figure in panel.figures)


def test_the_recipe_says_which_axis_is_logarithmic() -> None:
    narrow = {"lr": {"log_uniform": [1e-3, 2e-3]}, "xdomainmix.weight_decay": {"uniform": [0, 1]}}
    made = run(methods=["xdomainmix+sam"], trials=3, recipe={"search": {"trials": 3, "space": narrow}})
    for record in made.records:
        record.hparams["lr"] = 1e-3 * (1 + record.trial / 10)
    captions = [figure.caption for figure in shown(search.panel(made)).figures]
    assert "xdomainmix+sam: lr (logarithmic axis)." in captions


def test_many_values_that_are_no_numbers_share_a_place() -> None:
    made = run(methods=["erm"], held=[("art",)], seeds=[0], trials=20)
    for record in made.records:
        record.hparams["kind"] = f"kind{record.trial:02d}"
    figure = shown(search.panel(made)).figures[-1]
    assert figure.caption == "erm: kind."
    assert "kind06" in figure.svg and "kind07" not in figure.svg and "others" in figure.svg


def test_correlations() -> None:
    assert search._ranks_agree([(1, 3), (2, 5), (3, 4)]) == pytest.approx(0.5)
    assert search._ranks_agree([(1, 1), (1, 2), (2, 2), (3, 9)]) == pytest.approx(0.8333333)  # ties share a rank
    assert search._ranks_agree([(1, 1), (2, 2)]) is None and search._ranks_agree([(1, 1), (1, 2), (1, 3)]) is None


@pytest.mark.slow
def test_a_huge_search_stays_small() -> None:
    made = run(methods=[f"m{i}" for i in range(6)], held=[(f"d{i}",) for i in range(4)], seeds=[0], trials=500)
    panel = shown(search.panel(made))
    assert len(panel.figures) == search.MOST_FIGURES and f"of {6 * 3} pairs" not in panel.about
    assert sum(len(figure.svg) for figure in panel.figures) < 1_500_000
    many = run(methods=[f"m{i}" for i in range(12)], held=[("d",)], seeds=[0], trials=4)
    panel = shown(search.panel(many))
    assert len(panel.figures) == search.MOST_FIGURES and "12 of 36 pairs" in panel.about


def test_searches_with_nulls() -> None:
    made = run(trials=3)
    records = [
        dataclasses.replace(r, selected={k: dataclasses.replace(p, value=None) for k, p in r.selected.items()})
        for r in made.records
    ]
    assert search.panel(dataclasses.replace(made, every=records)) is None
    one = run(methods=["erm"], trials=2, seeds=[0])
    assert "not defined" in shown(search.panel(one)).figures[0].alt


def test_oracle_is_named() -> None:
    made = run(methods=["erm"], held=[("art",)], seeds=[0], trials=3, selection="oracle")
    assert "picks on test images" in shown(search.panel(made)).about


def test_wise_ft() -> None:
    made = run(methods=["erm", "wise_ft"], alphas=ALPHAS)
    panel = shown(wise_ft.panel(made))
    assert len(panel.figures) == 2 and len(panel.tables[0].rows) == 4
    test = [test_value("wise_ft", (where,), seed, 0) for where in ("art", "sketch") for seed in (0, 1)]
    for title, off in (("test at α = 0", 0.36), ("test at α = 0.5", 0.01), ("test at α = 1", 0.16)):
        assert column(panel, title) == pytest.approx([value - off for value in test])
    assert column(panel, "best on test") == pytest.approx([value - 0.01 for value in test])
    assert column(panel, "picked α") == [0.3] * 4 and column(panel, "test at the picked α") == [None] * 4
    mean = 100 * sum(test[:2]) / 2
    assert f"{mean - 36:.4g} at α = 0, {mean - 1:.4g} at α = 0.5" in panel.figures[0].alt
    assert "picked α: 0.3" in panel.figures[0].alt


def test_wise_ft_with_a_metric_that_should_be_low_and_values_that_are_missing() -> None:
    made = run(methods=["wise_ft"], alphas=ALPHAS, metric="nll", seeds=[0])
    panel = shown(wise_ft.panel(made))
    test = [test_value("wise_ft", (where,), 0, 0) for where in ("art", "sketch")]
    assert column(panel, "best on test") == pytest.approx([value - 0.36 for value in test])
    for record in made.records:
        for point in record.selected["train_val"].curve or ():
            point |= {"test": None, "train_val": None}
    panel = shown(wise_ft.panel(made))
    assert column(panel, "best on test") == [None, None]


def test_hostile_names() -> None:
    script, pipe, override, escape, letters, formula, long, comment = HOSTILE
    methods = [script, {"name": "wise_ft", "label": f"wise_ft{formula}{escape}"}]
    made = run(methods=methods, held=[(pipe + letters, override + script)], seeds=[0], trials=2, alphas=ALPHAS)
    for record in made.records:
        record.hparams["kind"] = (long, comment)[record.trial]
    with_curves(made, curves(made))
    for module in (curves_page, search, wise_ft):
        for figure in shown(module.panel(made)).figures:
            assert "<script" not in figure.svg and "-->" not in figure.svg
            assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", figure.svg)
