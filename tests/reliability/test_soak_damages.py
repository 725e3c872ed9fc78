"""Thousands of damaged files: each one is named, and mended or refused, or it changes no number.

`SOAK_DAMAGES=200 SOAK_SEED=1 pytest -m soak tests/reliability/test_soak_damages.py`
"""

from __future__ import annotations

import functools
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import scenarios
import tally
from damages import damage
from quick_saves import killed_at_sync, without_syncs
from real_runs import Run, differing, outcome
from warm_processes import xdm_ft

DAMAGES, SEED = int(os.environ.get("SOAK_DAMAGES", "2000")), os.environ.get("SOAK_SEED", "0")
WHOLE = 1.0
PLACES = {0.15: 1, 0.4: 1, 0.65: 2, 0.9: 2, WHOLE: 6}
"""{share of a run's writes after which a copy of it is taken: how often such copies are damaged}"""
CHECKED = 0.3  # share of the damages before which `verify` and `retrain` run too
RESTORED = 0.1  # share of the refused damages that are put back


@dataclass(frozen=True)
class Scenario:
    """Copies of a run, some of them killed, in the folder where it goes on."""

    recipe: Path
    folder: Path
    outcome: tuple[dict[str, Any], dict[str, str]]
    retrained: str  # what `retrain` prints

    @property
    def tree(self) -> Path:
        """What is damaged: the run directory, the cache, and the weights of the encoder."""
        return self.folder / "tree"

    def copy(self, place: float) -> Path:
        return self.folder / f"copy{place}"

    def restore(self, place: float) -> None:
        shutil.rmtree(self.tree, ignore_errors=True)
        shutil.copytree(self.copy(place), self.tree)


def run(recipe: Path, tree: Path, first: Callable[[int], None] = without_syncs) -> Run:
    return Run(recipe, tree, f"features.dir={tree / 'cache'}", first=first)


def numbers(tree: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The outcome of a run, but for the note that a training has begun again."""
    results, files = outcome(tree)
    for of_model in (*results["runs"], results.get("final_fit", {})):
        of_model.pop("restarted", None)
    return results, files


def retrain(tree: Path) -> tuple[int, str, str]:
    first = functools.partial(without_syncs, 1)
    done = xdm_ft("retrain", tree / "small", "erm", "sketch", 0, cwd=tree.parent, first=first)
    return done.returncode, done.stdout, done.stderr


@functools.cache
def scenario(name: str, base: Path) -> Scenario:
    folder = base / name.replace(" ", "-")
    weights, counts, tree = folder / "tree/weights.safetensors", folder / "counts", folder / "tree"
    weights.parent.mkdir(parents=True)
    recipe = scenarios.write(name, folder, weights)
    assert run(recipe, tree, functools.partial(killed_at_sync, 0, counts)).end() == 0
    status, out, error = retrain(tree)
    assert status == 0, error
    made = Scenario(recipe, folder, numbers(tree), out)
    shutil.copytree(tree, made.copy(WHOLE))
    for place in PLACES.keys() - {WHOLE}:
        shutil.rmtree(tree / "small")
        shutil.rmtree(tree / "cache", ignore_errors=True)
        number = max(1, round(place * int(counts.read_text())))
        assert run(recipe, tree, functools.partial(killed_at_sync, number, folder / "now")).end() == -9
        shutil.copytree(tree, made.copy(place))
    return made


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


def refused(status: int, error: str, tree: Path) -> str | None:
    """What is wrong with an exit status that is not 0 and its message; None: one line names what is at fault."""
    lines = [line for line in error.splitlines() if line.startswith("xdm-ft: ")]
    if "Traceback" in error or status not in (0, 2):
        return f"TRACEBACK, status {status}"
    if status == 2 and (len(lines) != 1 or str(tree) not in lines[0]):
        return "UNCLEAR"
    return None


def checked(made: Scenario, which: str, whole: bool) -> tuple[str | None, str]:
    """What is wrong with `cache verify` or `retrain` after a damage, and what they print."""
    if which.startswith("cache"):
        done = xdm_ft("cache", "verify", "--dir", made.tree / "cache", cwd=made.folder)
        return refused(done.returncode, done.stderr, made.tree), f"cache verify:\n{done.stderr}"
    if not whole or which.startswith("weights"):
        return None, ""
    status, out, error = retrain(made.tree)
    silent = status == 0 and out != made.retrained
    return "SILENT" if silent else refused(status, error, made.tree), f"retrain:\n{out}{error}"


def gone_on(made: Scenario) -> tuple[str, str]:
    """What running again does with the damage, and what it prints."""
    again = run(made.recipe, made.tree)
    status, error = again.end(), again.own_text()
    if wrong := refused(status, error, made.tree):
        return wrong, error
    if status == 2:
        return "refused", error
    if differs := differing(numbers(made.tree), made.outcome):
        return "SILENT", f"{differs[:5]}\n{error}"
    return ("recomputed" if str(made.tree) in error.replace(f"results in {made.tree}", "") else "harmless"), error


def damaged(number: int, names: list[str], base: Path) -> None:
    """Damages the file that `number` and the seed draw, and checks what runs make of it."""
    draw = random.Random(f"{SEED} {number}")
    name, place = draw.choice(names), draw.choices(list(PLACES), list(PLACES.values()))[0]
    made = scenario(name, base)
    made.restore(place)
    which, how, path = damage(made.tree, [made.copy(other) for other in PLACES], draw)
    begun = (made.tree / "small" / "results.json").exists()
    wrong, text = checked(made, which, place == WHOLE) if draw.random() < CHECKED else (None, "")
    found, text = (wrong, text) if wrong else gone_on(made)
    if found == "refused" and draw.random() < RESTORED:
        made.restore(place)
        found, text = gone_on(made)
        found = f"refused, {found} when put back"
    if found == "SILENT" and which == "weights.safetensors" and not begun:
        found = "a new run"  # of other weights: nothing was trained with those before
    tally.count("damages by file", which, found.partition(",")[0])
    tally.count("damages by kind", how, found.partition(",")[0])
    where = "finished" if place == WHOLE else f"after {place:.0%} of its writes"
    assert found.islower(), f"{found}: {name}, {where}: {path.relative_to(made.tree)} {how}\n{text}"


@pytest.mark.soak
@pytest.mark.parametrize("number", range(DAMAGES))
def test_a_damage(number: int, base: Path) -> None:
    damaged(number, list(scenarios.SCENARIOS), base)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_some_damages(number: int, base: Path) -> None:
    damaged(number, ["final_fit"], base)
