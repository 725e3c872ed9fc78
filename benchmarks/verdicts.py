"""How often a table says "better" or "worse" if no method differs, and how often if one does.

    python benchmarks/verdicts.py pool RUN_DIR [RUN_DIR …]   tables drawn from many seeds of trained models; 2 minutes
    python benchmarks/verdicts.py simulate                   normal models; 5 minutes on one core
    python benchmarks/verdicts.py looks                      a run that grows and is judged each time; 2 minutes
    python benchmarks/verdicts.py margins                    "equal within" the margin; 4 minutes
    python benchmarks/verdicts.py folds                      many sites in few folds; 1 minute

A table has a reference and 13 methods, as `recipes/all_methods.yaml` has; its first 6 methods and its first one are
smaller tables. Verdicts come from `xdm_ft.evaluation.verdicts`, whose functions the summary of results.json calls.
Numbers are shares of tables in %, with Wilson's 95% interval. If no method differs, at most 5% of tables should have a
verdict; shares whose interval lies above that are bold. *Here* and *elsewhere* are the two verdicts: on these domains,
with other seeds and test images, and on new domains. Rows of tables are Markdown.

pool      Tables are drawn from the whole pool, so an interval is for more tables of this pool, not for other pools.
          Seeds, and the test images (or groups of them) of each table, are drawn with replacement: independent draws,
          whose variance is not that of a part of a finite pool. *equal*: each method is the first one of the run, ERM,
          with other seeds. *centred*: methods are all methods of the run in random order, and on each domain the mean
          of each over the whole pool is shifted to ERM's; the first one of each has ERM's seeds. *+d found*: one of the
          equal methods is d points better, and the table says so here. *at 80%*: the smallest d that 80% of tables
          find. The second table has a method as it is, with ERM's seeds, among equal ones: how often its sign is found.
          The last held-out set of a run is also judged alone. A pool is 800 heads on frozen features of PACS
          (5 minutes in a bank; PACS and WEIGHTS are your paths):

              xdm-ft run all_methods name=pool data.root=PACS protocol.seeds=40 \\
                'methods=[erm, xdomainmix, groupdro, irm, {name: erm, label: erm normalised, normalize: true}]' \\
                encoder.model=mobilenetv2_100 \\
                encoder.weights=WEIGHTS/mobilenetv2_100.keras_in1k_int8deq.fp16.safetensors \\
                'encoder.kwargs={bn_eps: 1e-3, pad_type: same}' \\
                'encoder.preprocessing={mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5], size: 224, crop: 1.0}'
              python benchmarks/verdicts.py pool output/pool

simulate  The accuracy of a model is normal. Domains: an SD of 1 point over seeds, correlated between domains by 0, 0.5
          or 1 (the number in the name), and of 0.25 points of each method on each domain over images, which is known.
          *new domains*: methods differ on each domain by 3 points (SD), with mean 0 over all domains. Slides:
          Camelyon17's held-out hospital, 85,054 images on 10 slides of very unequal sizes, effectively 4.9. Seeds vary
          by 6.4 points on all slides together and 3 on each (end to end; ERM's published SD on Camelyon17 is 6.4), or
          by 1 and 0.5 (a frozen encoder); methods differ on each slide by 0 or 3 points (SD; the number in the name).
          *paired*: methods with the same seed correlate by 0.7. *one × 3*: the first method varies 3 times as much over
          seeds. *fixed*: the reference is deterministic.
looks     The run has 5, 10 and 20 seeds of the same models. *naive*: α = 0.05 each time; *spent*: 0.05, then 0.05/2^k.
          False if any look says anything; 5 and 7.5% are allowed.
margins   Domains as above. *false*: all methods are worse by exactly the margin, and the table says of any that it is
          equal within it. *true*: all are equal, and the table says so of the first one.
folds     Differences at the sites are normal with an SD of 1, correlated by 0, 0.1 or 0.3 within folds, whose sites
          share models. Verdicts elsewhere of one comparison: *false* with a mean difference of 0, *found* with 0.6.
          *alone*: t over the sites, whose degrees of freedom the folds do not have. *one by one*: each site alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from xdm_ft.core import ALPHA
from xdm_ft.evaluation.estimates import FEWEST_SETS, Estimate, Term, over_images, over_sets, over_sites
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction, effective_number, jackknife_variance
from xdm_ft.results import verdicts
from xdm_ft.results.model import Record
from xdm_ft.results.table import BETTER, WORSE, Comparison, PValue
from xdm_ft.storage.results_file import read_results
from xdm_ft.storage.run_directory import RunDirectory

DIFFERENCES = (0.01, 0.02, 0.03, 0.05)
LARGEST = 0.2  # difference that is searched for
MARGINS = (0.01, 0.02)
LOOKS = (5, 10, 20)  # seeds of a run that grows
WHERE = ("here", "elsewhere")
SLIDES = np.array([30_000, 16_000, 12_000, 9_000, 7_000, 5_000, 3_000, 1_500, 1_000, 554])
CHANGING_SIDES = 0.2  # share of the images on which exactly one of two models is correct
IMAGES = 2000  # of a simulated domain
SETTINGS: dict[str, dict[str, Any]] = {
    "alike": {}, "paired": {"pairing": 0.7}, "one × 3": {"first": 3.0}, "fixed": {"fixed": True},
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- verdicts


def compared(first: np.ndarray, second: np.ndarray, images: Term, fixed: bool = False) -> Comparison:
    """Returns the comparison of values [D,S] with those of the reference; `fixed`: the reference is deterministic."""
    sets, seeds = first.shape
    paired = not fixed and seeds >= verdicts.PAIRED_SEEDS
    if paired:
        of_seeds = verdicts.over_paired_seeds(first - second)
    else:
        of_seeds = verdicts.over_seeds(first, second[:, :0] if fixed else second)
    by_set = first.mean(1) - second.mean(1)  # [D]
    on_these = verdicts.estimate_here(float(by_set.mean()), of_seeds, images, sets=sets, paired=paired)
    on_others = over_sets(by_set)
    p, elsewhere = p_values(sets, on_these, on_others)
    return Comparison(
        selection="", first="", second="", sets=sets, domains=sets, seeds=seeds, paired=paired,
        difference=on_these.value, error=on_these.error, freedom=on_these.freedom, share_seeds=None, share_images=None,
        freedom_seeds=None, freedom_images=None, other_error=None, other_freedom=None,
        error_elsewhere=on_others and on_others.error, p_here=p, p_elsewhere=elsewhere, note="",
    )  # fmt: skip


def p_values(sets: int, on_these: Estimate, on_others: Estimate | None) -> tuple[PValue | None, PValue | None]:
    plain = on_these.p(), on_others.p() if on_others is not None and sets >= FEWEST_SETS else None
    p, elsewhere = (None if one is None else PValue(one, None) for one in plain)
    return p, elsewhere


def moved(row: Comparison, difference: float) -> Comparison:
    """Returns the comparison of a method that is better by so much."""
    on_these, on_others, value = row.on_these, row.on_others, row.difference + difference
    assert on_these is not None
    others = on_others and on_others._replace(value=value)
    p, elsewhere = p_values(row.sets, on_these._replace(value=value), others)
    return replace(row, difference=value, p_here=p, p_elsewhere=elsewhere)


def judged(rows: Sequence[Comparison], alpha: float = ALPHA, margin: float | None = None) -> list[Comparison]:
    return verdicts.judge("accuracy", rows, [True] * len(rows), alpha=alpha, margin=margin)


def any_verdict(rows: Sequence[Comparison], alpha: float = ALPHA) -> np.ndarray:
    """Returns whether any row is better or worse [here, elsewhere]."""
    if all(row.p_here is None or row.p_here.plain >= alpha for row in rows):
        return np.zeros(2, bool)  # corrected values are not smaller
    found = judged(rows, alpha)
    return np.array([any(row.is_found for row in found), any(row.elsewhere != verdicts.UNKNOWN for row in found)])


def found_better(rows: Sequence[Comparison], difference: float, elsewhere: bool = False) -> bool:
    """Whether the table says so of the first row, if it is better by so much."""
    first = moved(rows[0], difference)
    p = first.p_elsewhere if elsewhere else first.p_here
    if p is None or p.plain >= ALPHA:
        return False
    first = judged([first, *rows[1:]])[0]
    return (first.elsewhere if elsewhere else first.here) == BETTER


def smallest_found(rows: Sequence[Comparison], elsewhere: bool) -> float:
    """Returns the difference that the first row must be better by to be found better, by bisection."""
    low, high = 0.0, LARGEST
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (low, middle) if found_better(rows, middle, elsewhere) else (middle, high)
    return high


def share(count: int, tables: int, limit: float | None = None) -> str:
    """Returns a share with its interval, bold if it lies above `limit`."""
    low, high = stats.binomtest(int(count), tables).proportion_ci(method="wilson")
    text = f"{100 * count / tables:.1f} ({100 * low:.1f}–{100 * high:.1f})"
    return f"**{text}**" if limit is not None and low > limit else text


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: str) -> str:
    return line(*cells) + "\n" + "|---" * len(cells) + "|"


# ---------------------------------------------------------------------------------------------------------------- pools


class Pool(NamedTuple):
    """The models of all methods with one held-out set; all have the same R seeds."""

    held_out: str
    sizes: np.ndarray  # images of each group, [groups]
    right: dict[str, np.ndarray]  # {method: correct images of each group}, float32 [R,groups]
    means: dict[str, float]  # {method: accuracy on all images, mean over all seeds}

    @classmethod
    def of(cls, held_out: str, sizes: np.ndarray, right: dict[str, np.ndarray]) -> Pool:
        return cls(held_out, sizes, right, {m: float(of.sum(1).mean() / sizes.sum()) for m, of in right.items()})


Side = tuple[str, np.ndarray]  # a method, and which of its models


def read_pools(folders: Sequence[Path]) -> list[Pool]:
    """Returns the models of all runs together, under the rule of each recipe. Raises `SystemExit` if they have none."""
    found: dict[tuple[str, ...], dict[str, dict[int, np.ndarray]]] = {}
    images: dict[tuple[str, ...], HeldOutImages] = {}
    for folder in folders:
        directory, results = RunDirectory(folder), read_results(folder / "results.json", Record.from_json)
        rule = results["recipe"]["protocol"]["selection"]
        for record in results["runs"]:
            if record.status != "ok":
                continue
            held = record.test_domains
            if held not in images:
                images[held] = HeldOutImages.from_arrays(directory.test_images(held))
            of = images[held]
            one = Prediction.from_arrays(directory.predictions(record.folder), of, record.key, rule)
            members = np.arange(len(of.labels)) if of.members is None else of.members
            right = np.bincount(members, one.predicted == of.labels, len(of.sizes)).astype(np.float32)
            found.setdefault(held, {}).setdefault(record.method, {})[record.seed] = right
    seeds = set.intersection(*(set(own) for of in found.values() for own in of.values())) if found else set()
    if len(seeds) < 2:
        raise SystemExit(f"{', '.join(map(str, folders))}: fewer than two seeds are complete for all methods")
    pools = list[Pool]()
    for held, of_methods in found.items():
        stacked = {method: np.stack([own[seed] for seed in sorted(seeds)]) for method, own in of_methods.items()}
        pools.append(Pool.of(" + ".join(held), images[held].sizes, stacked))
    return pools


def table(
    generator: np.random.Generator, pools: Sequence[Pool], sides: Sequence[Side], centred: bool = False
) -> list[Comparison]:
    """Returns the comparisons of all sides with the first one, on test images of their own."""
    values, variances, numbers = list[np.ndarray](), list[list[float]](), list[float]()
    for pool in pools:
        places = generator.integers(0, len(pool.sizes), len(pool.sizes))
        times, sizes = np.bincount(places, minlength=len(pool.sizes)).astype(np.float32), pool.sizes[places]
        own = np.stack([pool.right[method][seeds] for method, seeds in sides])  # [rows,S,groups]
        shift = np.array([pool.means[method] for method, _ in sides]) if centred else np.zeros(len(sides))
        values.append(own @ times / sizes.sum() - (shift - shift[0])[:, None])
        right = own.mean(1)[:, places]  # [rows,groups]
        without = (right.sum(1, keepdims=True, dtype=np.float64) - right) / (sizes.sum() - sizes)
        variances.append([jackknife_variance(one - without[0]) or 0.0 for one in without[1:]])
        numbers.append(effective_number(sizes))
    rows = np.stack(values, 1)  # [rows,D,S]
    images = [over_images(of, numbers) for of in zip(*variances, strict=True)]
    return [compared(one, rows[0], of) for one, of in zip(rows[1:], images, strict=True)]


def equal_table(generator: np.random.Generator, pools: Sequence[Pool], seeds: int, methods: int) -> list[Comparison]:
    """Returns the comparisons of equal methods, then of each other method as it is, with the seeds of the reference."""
    first, *others = pools[0].right
    own = generator.integers(0, len(pools[0].right[first]), (1 + methods, seeds))
    return table(generator, pools, [(first, of) for of in own] + [(name, own[0]) for name in others])


def centred_table(generator: np.random.Generator, pools: Sequence[Pool], seeds: int, methods: int) -> list[Comparison]:
    first, *others = pools[0].right
    names = [first, *generator.permutation(others).tolist()]
    own = generator.integers(0, len(pools[0].right[first]), (1 + methods // len(names), seeds))
    sides = [(names[row % len(names)], own[row // len(names)]) for row in range(1 + methods)]
    return table(generator, pools, sides, centred=True)


def pool(arguments: argparse.Namespace) -> None:
    pools, families, tables = read_pools(arguments.runs), arguments.methods, arguments.tables
    first, *others = pools[0].right
    print(f"{len(pools[0].right[first])} seeds of {', '.join(pools[0].right)}; {tables} tables\n")
    false = [f"{kind}, {where}" for where in WHERE for kind in ("equal", "centred")]
    found = [f"+{100 * d:.0f} found" for d in DIFFERENCES]
    print(head("held out", "comparisons", "seeds", *false, *found, *(f"at 80%, {where}" for where in WHERE)))
    of_real = list[str]()
    for own in (pools, pools[-1:])[: len(pools)]:
        name = own[0].held_out if len(own) == 1 else f"each of {len(own)}"
        differences = {method: [100 * (p.means[method] - p.means[first]) for p in own] for method in others}
        for seeds in arguments.seeds:
            generator = np.random.default_rng([len(own), seeds])
            kinds = [
                [draw(generator, own, seeds, max(families)) for _ in range(tables)]
                for draw in (equal_table, centred_table)
            ]
            for family in families:
                counts = np.array([sum(any_verdict(rows[:family]) for rows in of) for of in kinds])  # [kinds,where]
                least = [[smallest_found(rows[:family], there) for rows in kinds[0]] for there in (False, True)]
                cells = [share(count, tables, ALPHA) for count in counts.T.ravel()]
                cells += [share(sum(one <= d for one in least[0]), tables) for d in DIFFERENCES]
                at_80 = [float(np.quantile(of, 0.8)) for of in least]
                print(
                    line(name, family, seeds, *cells, *(f"{100 * d:.1f}" if d < LARGEST else "–" for d in at_80)),
                    flush=True,
                )
            for number, (method, of) in enumerate(differences.items(), max(families)):
                word, found_real = BETTER if sum(of) > 0 else WORSE, np.zeros((2, len(families)), int)
                for rows in kinds[0]:
                    own_row = [judged([rows[number], *rows[: family - 1]])[0] for family in families]
                    found_real += [[row.here == word for row in own_row], [row.elsewhere == word for row in own_row]]
                of_domains = f"{np.mean(of):+.1f} ({', '.join(f'{d:+.1f}' for d in of)})"
                of_real.append(line(name, method, of_domains, seeds, *(share(c, tables) for c in found_real.ravel())))
    print("\n" + head("held out", "method", "difference", "seeds", *(f"{w}, {f}" for w in WHERE for f in families)))
    print("\n".join(of_real))


# ----------------------------------------------------------------------------------------------------------- simulation


@dataclass(frozen=True)
class Layout:
    """Held-out sets that are domains, or one set of slides. Standard deviations are fractions."""

    sets: int
    seeds: float  # over seeds, on one domain or slide
    common: float  # correlation of seeds between domains or slides
    images: float = 0.0025  # of a method on one domain or slide, over its images
    by_domain: float = 0.0  # of a method, over domains
    slides: bool = False


LAYOUTS = {
    "1 domain": Layout(1, 0.01, 0.0),
    **{f"4 domains, {c:g}": Layout(4, 0.01, c) for c in (0.0, 0.5, 1.0)},
    "4 new domains": Layout(4, 0.01, 0.0, by_domain=0.03 / 2**0.5),  # √2: of the difference of two
    **{
        f"slides, {kind}, {100 * by_slide:.0f}": Layout(
            len(SLIDES), (e_all**2 + e**2) ** 0.5, e_all**2 / (e_all**2 + e**2), by_slide / 2**0.5, slides=True
        )
        for kind, e_all, e in (("end to end", 0.064, 0.03), ("frozen", 0.01, 0.005))
        for by_slide in (0.0, 0.03)
    },
}


def drawn(
    layout: Layout, shape: Sequence[int], key: Sequence[int], pairing: float = 0.0, first: float = 1.0,
    fixed: bool = False,
) -> np.ndarray:  # fmt: skip
    """Returns the accuracy on each domain or slide, [tables, 1 + methods, sets, seeds], the reference first.

    Differences have mean 0. `shape`: tables, 1 + methods, seeds. `key`: of the random numbers. The settings are
    explained above.
    """
    (tables, methods, seeds), generator = shape, np.random.default_rng(key)

    def of_training(methods: int) -> np.ndarray:
        of_all = generator.normal(size=(tables, methods, 1, seeds))
        own = generator.normal(size=(tables, methods, layout.sets, seeds))
        return layout.common**0.5 * of_all + (1 - layout.common) ** 0.5 * own

    noise = layout.seeds * (pairing**0.5 * of_training(1) + (1 - pairing) ** 0.5 * of_training(methods))
    noise[:, 1] *= first
    if fixed:
        noise[:, 0] = 0
    if layout.slides:
        luck = generator.normal(size=noise.shape)
        if fixed:
            luck[:, 0] = luck[:, 0, :, :1]
        noise += (CHANGING_SIDES / 2 / SLIDES[:, None]) ** 0.5 * luck
    of_method = (layout.images**2 + layout.by_domain**2) ** 0.5
    return noise + of_method * generator.normal(size=(*noise.shape[:3], 1))


def simulated(layout: Layout, accuracy: np.ndarray, fixed: bool) -> Iterator[list[Comparison]]:
    """Yields the comparisons of each table from the accuracy on each domain or slide."""
    known = over_images([2 * layout.images**2] * layout.sets, [IMAGES] * layout.sets)
    groups = effective_number(SLIDES)
    for values in accuracy:  # [1 + methods, sets, seeds]
        images = [known] * (len(values) - 1)
        if layout.slides:
            right = values * SLIDES[:, None]
            total = right.sum(1, keepdims=True)
            without = ((total - right) / (SLIDES.sum() - SLIDES)[:, None]).mean(2)  # [1 + methods, slides]
            images = [over_images([jackknife_variance(one - without[0]) or 0.0], [groups]) for one in without[1:]]
            values = total / SLIDES.sum()
        yield [compared(one, values[0], of, fixed) for one, of in zip(values[1:], images, strict=True)]


def settings(
    arguments: argparse.Namespace, seeds: Sequence[int]
) -> Iterator[tuple[str, str, Layout, np.ndarray, bool]]:
    """Yields each layout with each setting, the accuracy of its tables, and whether the reference is deterministic."""
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        for k, (kind, setting) in enumerate(SETTINGS.items()):
            for count in seeds:
                shape = (arguments.tables, 1 + max(arguments.methods), count)
                yield name, kind, layout, drawn(layout, shape, (number, k, count), **setting), "fixed" in setting


def simulate(arguments: argparse.Namespace) -> None:
    methods, tables = arguments.methods, arguments.tables
    columns = [f"{where}, {family}" for where in WHERE for family in methods]
    print(f"{tables} tables\n\n{head('sets', 'setting', 'seeds', *columns, f'+3 found, {max(methods)}')}")
    for name, kind, layout, accuracy, fixed in settings(arguments, arguments.seeds):
        counts, found = np.zeros((2, len(methods)), int), 0
        for rows in simulated(layout, accuracy, fixed):
            counts += np.stack([any_verdict(rows[:family]) for family in methods], 1)
            found += found_better(rows, 0.03)
        # methods that differ by domain do differ on these domains
        tested = (not layout.by_domain, rows[0].sets >= FEWEST_SETS)
        cells = [share(c, tables, ALPHA) if shown else "" for of, shown in zip(counts, tested, strict=True) for c in of]
        power = share(found, tables) if tested[0] else ""
        print(line(name, kind, accuracy.shape[3], *cells, power), flush=True)


def looks(arguments: argparse.Namespace) -> None:
    spending = {
        "naive": [ALPHA] * len(LOOKS),
        "spent": [ALPHA / 2**k if k > 1 else ALPHA for k in range(1, len(LOOKS) + 1)],
    }
    allowed = [ALPHA, sum(spending["spent"])]
    columns = [f"{name}, {family}" for name in spending for family in arguments.methods]
    print(f"{arguments.tables} tables; looks at {', '.join(map(str, LOOKS))} seeds\n")
    print(head("sets", "setting", *columns))
    for name, kind, layout, accuracy, fixed in settings(arguments, [max(LOOKS)]):
        if layout.by_domain:
            continue
        false = np.zeros((len(spending), len(arguments.methods), arguments.tables), bool)
        for look, seeds in enumerate(LOOKS):
            for t, rows in enumerate(simulated(layout, accuracy[..., :seeds], fixed)):
                for f, family in enumerate(arguments.methods):
                    false[:, f, t] |= [any_verdict(rows[:family], alphas[look])[0] for alphas in spending.values()]
        counts = false.sum(2)  # [spending, families]
        cells = [share(c, arguments.tables, limit) for limit, of in zip(allowed, counts, strict=True) for c in of]
        print(line(name, kind, *cells), flush=True)


def margins(arguments: argparse.Namespace) -> None:
    columns = [f"{what}, {family}" for what in ("false", "true") for family in arguments.methods]
    print(f"{arguments.tables} tables\n\n{head('sets', 'setting', 'seeds', 'margin', *columns)}")
    for name, kind, layout, accuracy, fixed in settings(arguments, arguments.seeds):
        if layout.by_domain or layout.slides:
            continue
        for margin in MARGINS:
            counts = np.zeros((2, len(arguments.methods)), int)
            for rows in simulated(layout, accuracy, fixed):
                at_margin = [moved(row, -margin) for row in rows]
                for f, family in enumerate(arguments.methods):
                    false, true = (judged(of[:family], margin=margin) for of in (at_margin, rows))
                    counts[0, f] += any(row.equal_within is not None for row in false)
                    counts[1, f] += true[0].equal_within is not None
            cells = [
                share(c, arguments.tables, limit) for of, limit in zip(counts, (ALPHA, None), strict=True) for c in of
            ]
            print(line(name, kind, accuracy.shape[3], f"{100 * margin:g}", *cells), flush=True)


def folds(arguments: argparse.Namespace) -> None:
    generator = np.random.default_rng(0)
    print(head("sites", "folds", "correlation", "false", "false, alone", "found", "found, one by one"))
    for sites, of_sites in ((6, (3,)), (12, (3, 5)), (30, (3, 5, 10))):
        for count in of_sites:
            fold_of = np.arange(sites) % count
            parts = [np.flatnonzero(fold_of == fold).tolist() for fold in range(count)]
            for correlation in (0.0, 0.1, 0.3):
                shared = generator.normal(size=(arguments.tables, count))[:, fold_of] * correlation**0.5
                own = generator.normal(size=(arguments.tables, sites))
                equal = shared + own * (1 - correlation) ** 0.5
                cases = (equal, parts), (equal, None), (equal + 0.6, parts), (own + 0.6, None)
                found = [sum((over_sites(of, by).p() or 0) < ALPHA for of in values) for values, by in cases]  # type: ignore[union-attr]
                cells = [
                    share(n, arguments.tables, limit)
                    for n, limit in zip(found, (ALPHA, ALPHA, None, None), strict=True)
                ]
                print(line(sites, count, f"{correlation:g}", *cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    seeds = {pool: [3, 5, 10], simulate: [3, 5, 8, 9, 10, 11, 20], margins: [3, 5, 10, 20]}
    for do in (pool, simulate, looks, margins, folds):
        part = parts.add_parser(do.__name__)
        part.set_defaults(do=do)
        if do is pool:
            part.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
        if do in seeds:
            text = "seeds per method (default: %(default)s)"
            part.add_argument("--seeds", nargs="+", type=int, default=seeds[do], help=text)
        text = "comparisons per table (default: %(default)s)"
        part.add_argument("--methods", nargs="+", type=int, default=[1, 6, 13], help=text)
        part.add_argument("--tables", type=int, default=1000, help="number of tables (default: %(default)s)")
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
