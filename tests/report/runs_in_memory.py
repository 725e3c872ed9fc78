"""Runs without a directory: records with a search, WiSE-FT's curve, learning curves; values that differ everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from example_runs import run_of

from xdm_ft.report.finished import Run
from xdm_ft.storage.tensorboard import Scalars, sub_run

RULE = "train_val"
HELD = (("art",), ("sketch",))
DOMAINS = ("art", "sketch", "photo", "cartoon")
CLASSES = ["dog", "cat", "house"]
HOSTILE = (
    "<script>alert(1)</script>",
    "a|b\nc",
    "\u202egnp.exe",
    "\x1b[31mred\x07",
    "שלום 漢字 😀",
    "$x_1$ & \"q\" 'p'",
    "n" * 300,
    "-->]]>",
)


def run(
    methods: Sequence[Any] = ("erm", "xdomainmix"),
    held: Sequence[tuple[str, ...]] = HELD,
    seeds: Iterable[int] = (0, 1),
    trials: int = 1,
    *,
    alphas: Sequence[float] = (),
    selection: str = RULE,
    metric: str = "accuracy",
    scalars: dict[str, Scalars] | None = None,
    analysis: dict[str, Any] | None = None,
    recipe: dict[str, Any] | None = None,
) -> Run:
    """`methods` are items of the recipe. A method named wise_ft has a curve over `alphas`."""
    labels = [item if isinstance(item, str) else item.get("label") or item["name"] for item in methods]
    runs = [
        _entry(label, where, seed, trial, alphas, selection)
        for label in labels
        for where in held
        for seed in seeds
        for trial in range(trials)
    ]
    protocol = {"name": "leave_one_domain_out", "selection": selection, "metric": metric}
    made = {
        "name": "made up",
        "methods": list(methods),
        "protocol": protocol,
        "search": {"trials": trials, "space": {}},
    }
    found = run_of({"recipe": made | (recipe or {}), "environment": {}, "runs": runs, "summary": []}, Path("nowhere"))
    found.__dict__.update({"scalars": scalars or {}, "analysis": analysis, "class_names": CLASSES})
    return found


def selection_value(label: str, where: tuple[str, ...], seed: int, trial: int) -> float:
    return round(0.5 + 0.01 * len(label) + 0.02 * len(where[0]) + 0.003 * seed + 0.0004 * (trial * 7 % 11), 6)


def test_value(label: str, where: tuple[str, ...], seed: int, trial: int) -> float:
    return round(0.9 - selection_value(label, where, seed, trial) / 2, 6)


test_value.__test__ = False  # type: ignore[attr-defined]


def _entry(
    label: str, where: tuple[str, ...], seed: int, trial: int, alphas: Sequence[float], selection: str
) -> dict[str, Any]:
    value, test = selection_value(label, where, seed, trial), test_value(label, where, seed, trial)
    pick = {"step": 100, "weights": "x", "metrics": {RULE: _score(value), "test": _score(test)}, "value": value}
    if label.startswith("wise_ft") and alphas:
        curve = [{"alpha": a, RULE: value - (a - 0.3) ** 2, "test": test - (a - 0.6) ** 2} for a in alphas]
        pick |= {"alpha": 0.3, "curve": curve}
    hparams = {
        "lr": 10 ** (-4 + 3 * (trial * 7 % 11) / 11),
        "weight_decay": 0.0 if trial == 0 else 10.0 ** -(1 + trial % 7),
        "kind": ["a", "b", None][trial % 3],
        "same": 3,
    }
    identity = {"method": label, "test_domains": list(where), "seed": seed, "trial": trial, "hparams": hparams}
    return {**identity, "status": "ok", "selected": {selection: pick}}


def _score(value: float) -> dict[str, Any]:
    rest = {
        "worst_domain_accuracy": None,
        "nll": 1 - value,
        "ece": 0.1,
        "n": 50,
        "per_class_recall": {},
        "per_domain": {},
    }
    return {"accuracy": value, "balanced_accuracy": value, "macro_f1": value, "auroc": None, **rest}


def curves(run: Run, steps: Sequence[int] = range(10, 210, 10)) -> dict[str, Scalars]:
    """Curves of every picked model, as in `events/`: a loss, a part of it, one that is 0, and the selection metric."""
    found = {}
    for place, record in enumerate(run.picked):
        found[sub_run(*record.key)] = {
            "train/loss": [(step, 2.0 / step + 0.01 * place) for step in steps],
            "train/auxiliary_loss": [(step, 1.0 / step) for step in steps],
            "train/nothing": [(step, 0.0) for step in steps],
            "train/lr": [(step, 0.001) for step in steps],
            "val/accuracy": [(step, min(0.9, step / 250 + 0.001 * place)) for step in steps],
        }
    return found


def summarised(run: Run, steps: Sequence[int] = range(10, 210, 10)) -> dict[str, Scalars]:
    """The same of heads that trained together: two chunks of 3 and 1 heads per method and held-out set."""
    found = {}
    for record in run.picked:
        for trial, (heads, loss) in enumerate(((3.0, 1.0), (1.0, 2.0))):
            scalars = {"train/heads": [(step, heads) for step in steps]}
            for tag, value in (("train/loss", loss), ("val/accuracy", loss / 4)):
                scalars[tag] = [(step, value) for step in steps]
                scalars[f"lowest/{tag}"] = [(step, value / 2) for step in steps]
                scalars[f"highest/{tag}"] = [(step, value * 1.5) for step in steps]
            found[sub_run(record.method, record.test_domains, 0, trial, heads=True)] = scalars
    return found
