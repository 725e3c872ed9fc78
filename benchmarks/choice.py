"""How well rules choose the method that ships: each domain once outside everything, as the site where it will be used.

    python benchmarks/choice.py IMAGES RUNS RECIPE [KEY=VALUE ...]

IMAGES: a folder <domain>/<class>/<image>, or one with a table images.csv. RECIPE: with several methods on a frozen
encoder; KEY=VALUE changes it, as for `xdm-ft run`. The runs are kept in RUNS, and go on when the command is repeated.

A run on all D domains says what each method reaches at each site: its models trained on the other domains. For each
site, a run on the other D − 1 domains holds each of them out in turn; there a rule chooses, and quotes a value. The
regret is what the best method reaches at the site less what the chosen one does; the bias is the value that the rule
quotes less what its choice reaches, and the same of both less ERM's, since sites differ. Means over sites, in points.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml

import xdm_ft
from xdm_ft.evaluation.metrics import per_image_nll
from xdm_ft.results import trials, values_by_set
from xdm_ft.results.model import Record
from xdm_ft.results.run import Run, read_run

Chosen = tuple[str, float]  # method, and the value that is quoted for it


def means_of(run: Run, method: str) -> dict[str, float]:
    """{held-out domain: mean over seeds}."""
    return {", ".join(held): float(values.mean()) for held, values in values_by_set(run.runs_of(method)).items()}


def named(method: str) -> Callable[[Run], Chosen]:
    return lambda run: (method, fmean(means_of(run, method).values()))


def by_validation(run: Run) -> Chosen:
    """The rule before: within one standard error of the best selection value the lowest validation NLL."""
    return _chosen(run, trials.choose_by_validation)


def best_mean(run: Run) -> Chosen:
    means = {method: fmean(means_of(run, method).values()) for method in _methods(run)}
    best = max(means, key=lambda method: means[method])
    return best, means[best]


def best_mean_nested(run: Run) -> Chosen:
    by_domain = {method: means_of(run, method) for method in _methods(run)}
    quoted = []
    for domain in next(iter(by_domain.values())):
        others = {m: fmean(v for d, v in of.items() if d != domain) for m, of in by_domain.items()}
        quoted.append(by_domain[max(others, key=lambda method: others[method])][domain])
    return best_mean(run)[0], fmean(quoted)


def shipped(run: Run) -> Chosen:
    assert run.choice is not None
    return run.choice.method, fmean(float(values.mean()) for values in values_by_set(run.quoted).values())


def tempered(run: Run) -> Run:
    """Returns the run with the test NLL of logits that each model's fitted temperature divides."""

    def scored(record: Record) -> Record:
        pick, read = record.selected[run.rule], run.prediction(record)
        if pick.temperature is None or read.probabilities is None:
            return record
        p = torch.from_numpy(read.probabilities).double().clamp_min(torch.finfo(torch.float32).tiny)
        nll = per_image_nll(p.log() / pick.temperature, torch.from_numpy(read.images.labels)).mean()
        score = replace(pick.metrics["test"], nll=float(nll))
        return replace(record, selected={run.rule: replace(pick, metrics=pick.metrics | {"test": score})})

    new = {record.key: scored(record) for record in run.picked}
    return replace(run, every=[new.get(record.key, record) for record in run.every])


def within_one_error(run: Run) -> Chosen:
    return _chosen(run, trials.choose_method)


def lowest_nll(run: Run) -> Chosen:
    at: dict[str, list[float]] = {}
    for record in run.picked:
        at.setdefault(record.method, []).append(record.selected[run.rule].metrics["test"].nll)
    best = min(_methods(run), key=lambda method: fmean(at[method]))
    return best, fmean(means_of(run, best).values())


RULES: Mapping[str, Callable[[Run], Chosen]] = {
    "validation, one SE, then NLL (before)": by_validation,
    "erm always": named("erm"),
    "xdomainmix always": named("xdomainmix"),
    "best held-out mean": best_mean,
    "best held-out mean, nested": best_mean_nested,
    "held-out, one SE, then NLL": within_one_error,
    "held-out, one SE, then NLL, nested (shipped)": shipped,
    "held-out, one SE, then tempered NLL": lambda run: within_one_error(tempered(run)),
    "held-out, lowest NLL": lowest_nll,
    "held-out, lowest tempered NLL": lambda run: lowest_nll(tempered(run)),
}


def _chosen(run: Run, choose: Callable[..., trials.MethodChoice | None]) -> Chosen:
    choice = choose(run.records, [row for row in run.rows if row.selection == run.rule], run.rule, run.metric)
    assert choice is not None
    return choice.method, fmean(means_of(run, choice.method).values())


def _methods(run: Run) -> list[str]:
    """The methods that may ship without being named."""
    assert run.choice is not None
    return [method for method in run.choice.values if method not in run.choice.by_name_only]


def data_without(images: Path, domain: str | None, folder: Path) -> dict[str, Any]:
    """Returns the overrides of a recipe for the images of the other domains; None: of all."""
    folder.mkdir(parents=True, exist_ok=True)
    table = images / "images.csv"
    if not table.exists():
        for path in sorted(path for path in images.iterdir() if path.is_dir() and path.name != domain):
            if not (link := folder / path.name).exists():
                link.symlink_to(path.resolve(), target_is_directory=True)
        return {"data.name": "folder", "data.root": str(folder)}
    with table.open(newline="") as lines, (folder / "images.csv").open("w", newline="") as written:
        rows = csv.DictReader(lines)
        assert rows.fieldnames is not None
        writer = csv.DictWriter(written, rows.fieldnames)
        writer.writeheader()
        writer.writerows(row for row in rows if row["domain"] != domain)
    return {"data.name": "table", "data.file": str(folder / "images.csv"), "data.root": str(images)}


def run_without(images: Path, domain: str | None, runs: Path, recipe: str, changes: Mapping[str, Any]) -> Run:
    name = f"without {domain}" if domain else "all"
    data = data_without(images, domain, runs / "data" / name)
    xdm_ft.run(recipe, **{**data, **changes, "name": name, "output.dir": str(runs)})
    return read_run(runs / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("recipe")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    changes = {key: yaml.safe_load(value) for key, value in (change.split("=", 1) for change in given.changes)}
    everything = run_without(given.images, None, given.runs, given.recipe, changes)
    reached = {method: means_of(everything, method) for method in _methods(everything)}
    sites = list(next(iter(reached.values())))
    inner = {site: run_without(given.images, site, given.runs, given.recipe, changes) for site in sites}
    table = {}
    for name, rule in RULES.items():
        regrets, biases, relative, chosen = [], [], [], {}
        for site, run in inner.items():
            method, quoted = rule(run)
            own, erm = reached[method][site], reached["erm"][site]
            regrets.append(max(of[site] for of in reached.values()) - own)
            biases.append(quoted - own)
            relative.append(quoted - named("erm")(run)[1] - (own - erm))
            chosen[site] = method
        points = [100 * fmean(values) for values in (regrets, biases, relative)]
        table[name] = dict(zip(("regret", "bias", "bias less ERM's"), points, strict=True)) | {"chosen": chosen}
        print(f"{name:46} regret {points[0]:5.2f}  bias {points[1]:+5.2f}, less ERM's {points[2]:+5.2f}  {chosen}")
    sys.stdout.write(json.dumps(table) + "\n")


if __name__ == "__main__":
    main()
