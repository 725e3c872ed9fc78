"""How often a table says "better" or "worse" if no method differs, and how often if one does.

    python benchmarks/verdicts.py pool RUN_DIR [RUN_DIR …]     tables drawn from many seeds of plain ERM
    python benchmarks/verdicts.py simulate                     a simulated hospital with 10 slides; about a minute

A table has a reference and 13 methods, as `recipes/all_methods.yaml` has. Its verdicts come from the functions that the
summary of results.json calls: `without_each_group`, `paired`, `compare` and `verdicts` of `xdm_ft/evaluation/`. The
column "before" has the rule of earlier versions: 95% intervals from a bootstrap of the test images with fixed models
and, with several held-out domains, from a t over domains; a verdict if no interval contains 0; no correction for many
methods. Numbers are shares of tables with any verdict, with Wilson's 95% interval. If no method differs, at most 5% of
tables should have one.

pool      Each method of a table is ERM with other seeds. Seeds in a table are disjoint. Each table is drawn from the
          whole pool, so the interval is for more tables of this pool, not for other pools. Tables are drawn for each
          held-out set alone, and for all of them in one table. This makes a pool of 200 × 4 heads on frozen features of
          PACS (minutes, if the features are cached; PACS and WEIGHTS are your paths):

              xdm-ft run all_methods name=pool data.root=PACS 'methods=[erm]' protocol.seeds=200 \\
                encoder.model=mobilenetv2_100 \\
                encoder.weights=WEIGHTS/mobilenetv2_100.keras_in1k_int8deq.fp16.safetensors \\
                'encoder.kwargs={bn_eps: 1e-3, pad_type: same}' \\
                'encoder.preprocessing={mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5], size: 224, crop: 1.0}'
              python benchmarks/verdicts.py pool output/pool

          and this a pool of digits end to end (tables of 3 seeds need at least 42 seeds):

              xdm-ft run all_methods_end_to_end name=digits_pool 'methods=[erm]' protocol.seeds=45 \\
                training.evaluate_every=60
              python benchmarks/verdicts.py pool output/digits_pool --seeds 3

          If seeds were trained in several runs (`protocol.seeds=[50, 51, …]`, another `name`), give all directories.

simulate  Camelyon17's case: one held-out hospital, 85,054 images on 10 slides of very unequal sizes, effectively 4.9.
          The accuracy of method m trained with seed s on slide g is δ_m + M_mg + E_ms + e_msg + sampling noise of its
          images, all normal. M, method × slide: a method is better on some slides and worse on others, by 0 or 3 points
          (SD of a difference), with mean 0 over slides. E and e, training: 6.4 and 3 points (end to end; ERM's
          published SD on Camelyon17 is 6.4), or 1 and 0.5 (a head on frozen features). Power: the share of tables with
          the verdict better for the first method if δ_1 is as printed, in points, and all other δ are 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from xdm_ft.data import ImageDataset
from xdm_ft.evaluation.comparison import EQUAL, NO_VERDICT, Comparison, HeldOut, compare, paired, verdicts
from xdm_ft.evaluation.jackknife import effective_number, without_each_group
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction
from xdm_ft.evaluation.records import Record
from xdm_ft.experiment.plan import read_data
from xdm_ft.recipe.read import load
from xdm_ft.storage.results_file import read_results
from xdm_ft.storage.run_directory import RunDirectory

DRAWS = 2000  # of the bootstrap of the earlier rule
BLOCK, DRAWS_AT_ONCE = 1 << 16, 100  # groups and draws of the bootstrap that are multiplied at once
SLIDES = np.array([30_000, 16_000, 12_000, 9_000, 7_000, 5_000, 3_000, 1_500, 1_000, 554])
DIFFERENCES = (0.05, 0.1, 0.2, 0.4)
SPREADS = {"end to end": (0.064, 0.03), "frozen": (0.01, 0.005)}  # SD over seeds: E of all slides, e of each slide
METHOD_BY_SLIDE = (0.0, 0.03)
SHARES = f"{'tables with a verdict: before':30} {'now':22}"
CHANGING_SIDES = 0.2  # share of the images on which exactly one of two models is correct


class Pool(NamedTuple):
    """R models of one method with one held-out set."""

    held_out: str
    values: np.ndarray  # the metric, float64 [R]
    without: np.ndarray  # the metric without each group of test images, float64 [R,groups]
    groups: float  # effective number of groups
    draws: np.ndarray  # the metric on resampled groups, float64 [DRAWS,R]


# --------------------------------------------------------------------------------------------------- tables from pools


def comparisons(pools: Sequence[Pool], seeds: np.ndarray) -> dict[str, Comparison]:
    """Returns {method: comparison}. `seeds` int [1 + methods, S] index the models of the pools, reference first."""
    found = {}
    for m, own in enumerate(seeds[1:]):
        sets = [paired(p.values[own], p.values[seeds[0]], _means(p, own, seeds[0]), p.groups) for p in pools]
        found[str(m)] = compare(sets)
    return found


def _means(pool: Pool, own: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return pool.without[own].mean(0), pool.without[reference].mean(0)


def any_verdict(rows: dict[str, Comparison]) -> bool:
    """Whether a row is better or worse, for a metric where higher is better."""
    return any(found.verdict not in (EQUAL, NO_VERDICT) for found in verdicts("accuracy", rows).values())


def any_verdict_before(pools: Sequence[Pool], seeds: np.ndarray) -> bool:
    """The same by the earlier rule."""
    by_domain = np.array([p.values[seeds].mean(1)[1:] - p.values[seeds[0]].mean() for p in pools])  # [D,methods]
    draws = np.mean([p.draws[:, seeds].mean(2)[:, 1:] - p.draws[:, seeds[0]].mean(1)[:, None] for p in pools], axis=0)
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)  # [methods]
    if len(pools) > 1:
        half = stats.t.ppf(0.975, len(pools) - 1) * by_domain.std(0, ddof=1) / len(pools) ** 0.5
        low, high = np.minimum(low, by_domain.mean(0) - half), np.maximum(high, by_domain.mean(0) + half)
    return bool(((low > 0) | (high < 0)).any())


def drawn(pools: Sequence[Pool], methods: int, seeds: int, tables: int) -> tuple[int, int, float]:
    """Returns the numbers of tables with a verdict, before and now, and the share of rows with uncorrected p < 0.05."""
    generator = np.random.default_rng(seeds)
    before = now = small = 0
    for _ in range(tables):
        places = generator.permutation(len(pools[0].values))[: (1 + methods) * seeds].reshape(1 + methods, seeds)
        rows = comparisons(pools, places)
        before += any_verdict_before(pools, places)
        now += any_verdict(rows)
        small += sum(row.p is not None and row.p < 0.05 for row in rows.values())
    return before, now, small / (tables * methods)


# ------------------------------------------------------------------------------------------------------- reading pools


def read_pools(folders: Sequence[Path], method: str, rule: str | None) -> list[Pool]:
    """Returns one pool per held-out set, from all runs together, with seeds in the same order.

    `rule` None is the recipe's own selection rule. Raises `SystemExit` if the runs can not be combined.
    """
    found: dict[tuple[str, ...], dict[int, Prediction]] = {}
    metrics = set()
    for folder in folders:
        recipe = load(str(folder / "recipe.yaml"), [])
        metrics.add(recipe.protocol.metric)
        dataset = read_data(recipe)
        for record in read_results(folder / "results.json", Record.from_json)["runs"]:
            if record.method != method or record.status != "ok":
                continue
            prediction = prediction_of(folder, record, rule or recipe.protocol.selection, dataset)
            seeds = found.setdefault(record.test_domains, {})
            if prediction.seed in seeds:
                raise SystemExit(f"{folder}: seed {prediction.seed} is in two of the runs; give each seed once")
            seeds[prediction.seed] = prediction
    if len(metrics) != 1 or not found:
        several = f"the runs have different protocol.metric: {', '.join(metrics)}; give runs with the same one"
        raise SystemExit(several if found else f"--method {method}: the runs have no trained model of it")
    complete = set.intersection(*(set(seeds) for seeds in found.values()))
    (metric,) = metrics
    if metric != "accuracy":
        raise SystemExit(f"protocol.metric: {metric}; use runs with accuracy, as the earlier rule is for accuracy only")
    return [pool_of(held_out, [seeds[s] for s in sorted(complete)]) for held_out, seeds in found.items()]


def prediction_of(folder: Path, record: Record, rule: str, dataset: ImageDataset) -> Prediction:
    directory = RunDirectory(folder)
    images = HeldOutImages.of(dataset, directory.test_images(record.test_domains)["rows"])
    return Prediction.from_arrays(directory.predictions(record.folder), images, record.key, rule)


def pool_of(held_out: tuple[str, ...], runs: Sequence[Prediction]) -> Pool:
    images = runs[0].images
    right = np.stack([run.predicted == images.labels for run in runs])  # bool [R,n]
    members = np.arange(right.shape[1]) if images.members is None else images.members
    sums = np.stack([np.bincount(members, row, len(images.sizes)) for row in right])  # [R,groups]
    without = np.stack([without_each_group("accuracy", run) for run in runs])
    draws = bootstrap(sums, images.sizes, DRAWS)
    return Pool(" + ".join(held_out), right.mean(1), without, effective_number(images.sizes), draws)


def bootstrap(sums: np.ndarray, sizes: np.ndarray, draws: int) -> np.ndarray:
    """Returns the accuracy of R models on `draws` resamples of the groups, float64 [draws,R].

    `sums` [R,groups] are the correct images of each group, `sizes` [groups] all of them. A resample is a weight per
    group: how often it is drawn. Weights and sums are multiplied in blocks, so that neither is ever whole or copied.
    """
    generator, both = np.random.default_rng(0), np.zeros((draws, len(sums) + 1))  # all images in the last column
    starts = range(0, len(sizes), BLOCK)
    lengths = np.array([min(BLOCK, len(sizes) - start) for start in starts])
    of_block = generator.multinomial(len(sizes), lengths / len(sizes), draws)  # [draws,blocks]
    # whole numbers are exact in float32 up to 2^24, and its products take a third of the time
    dtype = np.float32 if int(of_block.max()) * int(sizes.max()) < 1 << 24 else np.float64
    for number, (start, length) in enumerate(zip(starts, lengths.tolist(), strict=True)):
        block = slice(start, start + length)
        of_groups = np.concatenate([sums[:, block], sizes[None, block]]).astype(dtype)  # [R+1,length]
        for first in range(0, draws, DRAWS_AT_ONCE):
            some = slice(first, first + DRAWS_AT_ONCE)
            both[some] += _times(generator, of_block[some, number], length, dtype) @ of_groups.T
    return both[:, :-1] / both[:, -1:]


def _times(generator: np.random.Generator, drawn: np.ndarray, groups: int, dtype: type) -> np.ndarray:
    """Returns how often each of `groups` groups is drawn in `drawn` [k] uniform draws, [k,groups]."""
    if groups < BLOCK:
        return generator.multinomial(drawn, np.full(groups, 1 / groups)).astype(dtype)
    # the same distribution; a multinomial takes 8 times as long, but its draws made the published numbers
    times = np.empty((len(drawn), groups), dtype)
    for row, count in zip(times, drawn, strict=True):
        row[:] = np.bincount(generator.integers(0, groups, count), minlength=groups)
    return times


def share(count: int, tables: int) -> str:
    low, high = stats.binomtest(count, tables).proportion_ci(method="wilson")
    return f"{100 * count / tables:5.1f}% ({100 * low:.1f} to {100 * high:.1f})"


def pool(arguments: argparse.Namespace) -> None:
    pools = read_pools(arguments.runs, arguments.method, arguments.rule)
    models = len(pools[0].values)
    print(f"{models} seeds of {arguments.method}; {arguments.tables} tables of {arguments.methods} methods")
    print(f"{'held out':32} {'SD of seeds':>11} {'seeds':>5}  {SHARES} rows, p < 0.05")
    selections = [[one] for one in pools] + ([pools] if len(pools) > 1 else [])
    for chosen in selections:
        name = chosen[0].held_out if len(chosen) == 1 else f"all {len(chosen)} in one table"
        deviation = np.mean([p.values for p in chosen], axis=0).std(ddof=1)
        for seeds in arguments.seeds:
            if (1 + arguments.methods) * seeds > models:
                print(f"{name:32} {100 * deviation:11.2f} {seeds:5}  needs {(1 + arguments.methods) * seeds} models")
                continue
            before, now, rows = drawn(chosen, arguments.methods, seeds, arguments.tables)
            texts = f"{share(before, arguments.tables):30} {share(now, arguments.tables):22} {100 * rows:.1f}%"
            print(f"{name:32} {100 * deviation:11.2f} {seeds:5}  {texts}", flush=True)


# ----------------------------------------------------------------------------------------------------------- simulation


def hospital(
    tables: int, methods: int, seeds: int, spread: tuple[float, float], by_slide: float, key: int
) -> tuple[np.ndarray, np.ndarray]:
    """Simulates methods that do not differ on average over slides, the reference first.

    Returns accuracies [tables, 1 + methods, seeds], and accuracies without each slide [tables, 1 + methods, seeds,
    slides].
    """
    generator = np.random.default_rng(key)
    shape = (tables, 1 + methods, seeds, len(SLIDES))
    # √2: `by_slide` is the SD of the difference of two methods
    accuracy = 0.75 + by_slide * generator.normal(size=(*shape[:2], 1, shape[3])) / 2**0.5
    accuracy = accuracy + spread[0] * generator.normal(size=(*shape[:3], 1)) + spread[1] * generator.normal(size=shape)
    accuracy += generator.normal(size=shape) * (CHANGING_SIDES / 2 / SLIDES) ** 0.5
    right = accuracy * SLIDES
    total = right.sum(3, keepdims=True)
    return total[..., 0] / SLIDES.sum(), (total - right) / (SLIDES.sum() - SLIDES)


def slides_compared(values: np.ndarray, without: np.ndarray, difference: float = 0.0) -> HeldOut:
    """Pairs values [2, seeds], and without each slide [2, seeds, slides], reference first; adds `difference`."""
    both = without[1] + difference, without[0]
    return paired(values[1] + difference, values[0], both, effective_number(SLIDES))


def verdicts_before(values: np.ndarray, without: np.ndarray) -> int:
    """Returns the number of tables with a verdict by the bootstrap of slides, with fixed models."""
    total = values.mean(2) * SLIDES.sum()
    right = total[..., None] - without.mean(2) * (SLIDES.sum() - SLIDES)  # [tables, 1 + methods, slides]
    times = np.random.default_rng(0).multinomial(len(SLIDES), np.full(len(SLIDES), 1 / len(SLIDES)), DRAWS)
    slide_weights = (times / (times @ SLIDES)[:, None]).T  # [slides, DRAWS]
    found = 0
    for of_table in right[:, 1:] - right[:, :1]:
        low, high = np.quantile(of_table @ slide_weights, [0.025, 0.975], axis=1)
        found += bool(((low > 0) | (high < 0)).any())
    return found


def simulated(arguments: argparse.Namespace) -> Iterator[str]:
    """Yields a line per kind of training, method × slide SD and number of seeds."""
    for kind, spread in SPREADS.items():
        for by_slide in METHOD_BY_SLIDE:
            for seeds in arguments.seeds:
                values, without = hospital(arguments.tables, arguments.methods, seeds, spread, by_slide, key=seeds)
                now, right = 0, dict.fromkeys(DIFFERENCES, 0)
                for v, w in zip(values, without, strict=True):
                    rows = {
                        str(m): compare([slides_compared(v[[0, m]], w[[0, m]])])
                        for m in range(1, 1 + arguments.methods)
                    }
                    now += any_verdict(rows)
                    for difference in DIFFERENCES:
                        first = compare([slides_compared(v[:2], w[:2], difference)])
                        right[difference] += verdicts("accuracy", rows | {"1": first})["1"].verdict == "better"
                shares = " ".join(f"{100 * right[difference] / arguments.tables:6.1f}" for difference in DIFFERENCES)
                before = verdicts_before(values, without)
                texts = f"{share(before, arguments.tables):30} {share(now, arguments.tables):22} {shares}"
                yield f"{kind:10} {100 * by_slide:14.0f} {seeds:5}  {texts}"


def simulate(arguments: argparse.Namespace) -> None:
    slides = f"{len(SLIDES)} slides, effectively {effective_number(SLIDES):.1f}"
    print(f"{slides}; {arguments.tables} tables of {arguments.methods} methods")
    differences = " ".join(f"{f'+{100 * difference:.0f}':>6}" for difference in DIFFERENCES)
    header = f"{'training':10} {'method × slide':>14} {'seeds':>5}  {SHARES} power in % at"
    print(f"{header}\n{'':{len(header) - 13}}{differences}")
    for line in simulated(arguments):
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    of_pool = parts.add_parser("pool", help="draw tables from the seeds of runs")
    of_pool.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    of_pool.add_argument("--method", default="erm", help="method whose models are drawn (default: erm)")
    of_pool.add_argument("--rule", help="selection rule (default: the recipe's own)")
    of_pool.set_defaults(do=pool)
    of_simulation = parts.add_parser("simulate", help="simulate a hospital with ten slides")
    of_simulation.set_defaults(do=simulate)
    for part in (of_pool, of_simulation):
        part.add_argument("--seeds", nargs="+", type=int, default=[3, 5, 10], help="seeds per method (default: 3 5 10)")
        part.add_argument("--methods", type=int, default=13, help="methods per table (default: 13)")
        part.add_argument("--tables", type=int, default=1000, help="number of tables (default: 1000)")
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
