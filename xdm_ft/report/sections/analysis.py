"""The panels of analysis.json, of the models that the recipe's rule picked: what `xdm-ft analyse` measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xdm_ft.evaluation.records import set_name
from xdm_ft.report.charts import (
    INK,
    MARKERS,
    MUTED,
    SERIES,
    Figure,
    Line,
    Look,
    Mark,
    Row,
    curves,
    looks,
    points,
    scatter,
)
from xdm_ft.report.finished import Run
from xdm_ft.report.published import paper_table
from xdm_ft.report.section import Cell, Section, cells, long_table, mean_cell, mean_of
from xdm_ft.report.words import EMPTY, range_text, short, significant
from xdm_ft.runtime.errors import plural

MAX_BARS, MAX_RELIABILITY, MAX_IMPORTANCE, MAX_EMBEDDINGS = 24, 12, 16, 4  # bars and figures of a panel
Model = dict[str, Any]  # an entry of `models` in analysis.json


def by_set(models: Iterable[Model]) -> dict[tuple[str, str], list[Model]]:
    """Returns {(method, held-out set): its models, one per seed}."""
    groups: dict[tuple[str, str], list[Model]] = {}
    for model in models:
        groups.setdefault((model["method"], set_name(model["test_domains"])), []).append(model)
    return groups


# --------------------------------------------------------------------------------------------------------- calibration

FEWEST_IMAGES = 10  # per seed, of a bin that is drawn
ROLES = {"test": ("held-out", -0.15, "o"), "validation": ("validation", 0.15, "s")}
Domain = tuple[str, str, str, str]  # method, held-out set, domain, role
Seeds = list[dict[str, Any]]  # what was measured on a domain, per seed


def calibration(run: Run) -> Section | None:
    """ECE per method, reliability per held-out domain, and a table of all domains."""
    measured: dict[Domain, Seeds] = {}
    for (method, where), models in by_set(run.analysed("calibration")).items():
        for model in models:
            temperature, domains = model["calibration"]["temperature"], model["calibration"].get("domains") or {}
            for domain, values in domains.items():
                percent = {f"{key}_percent": _percent(values[key]) for key in ("ece", "ece_scaled")}
                of_seeds = measured.setdefault((method, where, domain, values["role"]), [])
                of_seeds.append(values | percent | {"temperature": temperature})
    if not measured:
        return None

    forms = {"temperature": ".2f", "ece_percent": ".1f", "ece_scaled_percent": ".1f", "nll": ".3f", "nll_scaled": ".3f"}
    rows = [
        [
            *cells(*domain, seeds[0]["n"]),
            *(mean_cell((seed[key] for seed in seeds), form) for key, form in forms.items()),
        ]
        for domain, seeds in measured.items()
    ]
    header = ["method", "held out", "domain", "images of", "images", "temperature"]
    header += ["ECE before (%)", "ECE after (%)", "NLL before", "NLL after"]
    caption = "Before and after temperature scaling, per method and domain, mean ± standard deviation over seeds."
    eces = _mean_eces(measured)
    tested = [ends for (_, role), ends in eces.items() if role == "test"]
    lower = sum(after < before for before, after in tested)
    helped = f"here it lowers the ECE on held-out domains for {lower} of {plural(len(tested), 'method')}"
    return Section(
        "calibration",
        "Calibration and temperature",
        "A calibrated model is right in 80% of the cases in which it says 80%. One temperature per model, fitted on "
        "validation images of its training domains, is applied everywhere. The expected calibration error (ECE) is the "
        "mean distance of accuracy from confidence.",
        [*_ece_figures(run, eces), *_reliability_figures(run, measured)],
        [long_table(caption, header, rows)],
        [
            *([helped] if tested else []),
            "on a held-out domain the temperature can help or harm: only labels of that domain can tell",
            f"the temperature changes no decision; bins with fewer than {FEWEST_IMAGES} images per seed are not drawn",
            *run.not_measured,
        ],
    )


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _mean_eces(measured: Mapping[Domain, Seeds]) -> dict[tuple[str, str], tuple[float, float]]:
    """Returns {(method, role): ECE in % before and after scaling}, the mean over domains, where both are defined."""
    means: dict[tuple[str, str], tuple[list[float | None], list[float | None]]] = {}
    for (method, _, _, role), seeds in measured.items():
        for key, side in zip(("ece", "ece_scaled"), means.setdefault((method, role), ([], [])), strict=True):
            side.append(_percent(mean_of(seed[key] for seed in seeds)))
    ends = {key: (mean_of(before), mean_of(after)) for key, (before, after) in means.items()}
    return {key: (before, after) for key, (before, after) in ends.items() if before is not None and after is not None}


def _ece_figures(run: Run, eces: Mapping[tuple[str, str], tuple[float, float]]) -> list[Figure]:
    """ECE before and after: the mean over held-out domains and over validation parts, per method."""
    rows: dict[str, list[Mark]] = {}
    for (method, role), (before, after) in eces.items():
        words, shift, _ = ROLES[role]
        ends = Mark(f"{words}, before", before, (before, after), shift), Mark(f"{words}, after", after, None, shift)
        rows.setdefault(method, []).extend(ends)
    series = {
        f"{words}, {when}": Look("", marker, hollow=when == "before", width=1)
        for words, _, marker in ROLES.values()
        for when in ("before", "after")
    }
    title = "ECE before (hollow) and after (filled) temperature scaling, mean over domains and seeds"
    drawn = [Row(method, marks, colour=run.looks[method].colour) for method, marks in rows.items()]
    legend, limits = {name: name for name in series}, (0, None)
    figure = points("calibration-ece", title, f"{title}.", drawn, "ECE in %", series, legend, limits)
    return [figure] if rows else []


def pooled_bins(seeds: Seeds, key: str) -> list[tuple[float, float]]:
    """Returns (confidence, accuracy) in % of the bins of all seeds together that have enough images."""
    drawn = []
    for same in zip(*(seed.get(key) or () for seed in seeds), strict=False):
        defined = [b for b in same if b["n"] and b["confidence"] is not None and b["accuracy"] is not None]
        n = sum(b["n"] for b in defined)
        if n >= FEWEST_IMAGES * len(seeds):
            x, y = (100 * sum(b["n"] * b[name] for b in defined) / n for name in ("confidence", "accuracy"))
            drawn.append((x, y))
    return drawn


def _reliability_figures(run: Run, measured: Mapping[Domain, Seeds]) -> Iterator[Figure]:
    """Accuracy against confidence of all methods, before and after, a figure per held-out domain."""
    domains = dict.fromkeys(domain[1:3] for domain in measured if domain[3] == "test")
    for i, (where, domain) in enumerate(list(domains)[:MAX_RELIABILITY]):
        methods = {key[0]: seeds for key, seeds in measured.items() if key[1:] == (where, domain, "test")}
        sides = {
            title: [Line(method, run.looks[method]._replace(width=1), pooled_bins(seeds, key))
                    for method, seeds in methods.items()]
            for title, key in (("before scaling", "reliability"), ("after scaling", "reliability_scaled"))
        }  # fmt: skip
        title = f"Reliability on {domain}, before and after temperature scaling"
        caption = f"{domain}, never seen in training. On the dotted line confidence is right; below it, it is too high."
        axes = "confidence in %", "accuracy in %"
        yield curves(f"calibration-{i}", title, caption, sides, axes, diagonal=True, height=2.1)


# --------------------------------------------------------------------------------------- bars of invariance, divergence


class Bar(NamedTuple):
    """The values of the held-out sets where a row has one, and the standard errors of some."""

    colour: str
    values: dict[str, float]
    errors: dict[str, float]
    chance: float | None = None  # about what the value is if there is nothing to measure


def bars(name: str, title: str, caption: str, rows: Mapping[str, Bar], axis: str, limit: float | None = None) -> Figure:
    """Returns bars of the means of the first rows, and a marker for each held-out set. `rows`: {label: its bar}."""
    rows = dict(list(rows.items())[:MAX_BARS])
    sets = list(dict.fromkeys(held for row in rows.values() for held in row.values))
    few = len(sets) <= len(MARKERS)  # of more sets all get a dot, without errors and legend
    markers = MARKERS if few else ["o"] * len(sets)
    series = {held: Look(INK, marker, size=3.5, width=1) for held, marker in zip(sets, markers, strict=False)}
    series["by chance"] = Look(INK, "|", size=16)
    legend = {held: short(held, 18) for held in sets} if few and len(sets) > 1 else {}
    legend |= {"by chance": "by chance"} if any(row.chance is not None for row in rows.values()) else {}

    drawn = []
    for label, row in rows.items():
        marks = [] if row.chance is None else [Mark("by chance", row.chance)]
        for held, value in row.values.items() if len(sets) > 1 or row.errors else ():
            error = row.errors.get(held) if few else None
            ends = None if error is None else (value - error, value + error)
            marks.append(Mark(held, value, ends, 0.3 * (sets.index(held) / max(len(sets) - 1, 1) - 0.5)))
        drawn.append(Row(label, marks, mean_of(row.values.values()), row.colour))
    alt = f"Bars of the {title}, mean over held-out domains"
    return points(name, alt, caption, drawn, axis, series, legend, limit=limit, zero=True)


class Measure(NamedTuple):
    """One of the paper's measurements of invariance over the training domains."""

    name: str  # of the figure
    title: str
    axis: str
    part: str  # of analysis.json
    key: str

    def value(self, model: Model) -> float | None:
        return (model.get(self.part) or {}).get(self.key)

    def chance(self, model: Model) -> float | None:
        """How much of the value is chance, as covariances of few images differ."""
        return (model.get(self.part) or {}).get(f"{self.key}_noise")


ALL = "all methods"
INVARIANCES = (
    Measure(
        "invariance-representation", "representation (paper's formula)", "distance of covariances",
        "representation_invariance", "paper",
    ),
    Measure(
        "invariance-representation-code", "representation (published code)", "distance of means and covariances",
        "representation_invariance", "published_code",
    ),
    Measure(
        "invariance-prediction", "prediction (variance of the risk)", "variance of the risk",
        "prediction_invariance", "risk_variance",
    ),
)  # fmt: skip


def invariance(run: Run) -> Section | None:
    """Bars of the measurements per method, and a table of all values."""
    measured = [model for model in run.analysed() if any(m.value(model) is not None for m in INVARIANCES)]
    if not measured:
        return None
    notes = [
        "distances grow with the scale of the features: they compare no two encoders, and features that shrink look "
        "better"
    ]
    columns = {measure.title: measure.value for measure in INVARIANCES}
    if any(measure.chance(model) is not None for measure in INVARIANCES for model in measured):
        notes.append("covariances of few images differ by chance: a dotted tick shows about how much of a bar that is")
        columns |= {f"by chance: {measure.title}": measure.chance for measure in INVARIANCES[:2]}

    rows = []
    for (method, where), models in by_set(measured).items():
        risks = [(model.get("prediction_invariance") or {}).get("risk") or {} for model in models]
        domains = dict.fromkeys(domain for of_model in risks for domain in of_model)
        means = {domain: mean_of(of_model.get(domain) for of_model in risks) for domain in domains}
        listing = "; ".join(f"{domain} {risk:.3f}" for domain, risk in means.items() if risk is not None)
        values = [mean_cell(map(value, models)) for value in columns.values()]
        rows.append([*cells(method, where), *values, Cell(listing or EMPTY)])
    caption = "Invariance over the training domains, mean ± standard deviation over seeds."
    table = long_table(caption, ["method", "held out", *columns, "risk per training domain"], rows)
    return Section(
        "invariance",
        "Invariance",
        "How different the training domains are to the models: the distance of same-class features between domains "
        "(representation), and the variance of the mean cross entropy over domains (prediction). Lower is more "
        "invariant, but not more accurate: features that are all equal have distance 0.",
        [figure for measure in INVARIANCES for figure in _invariance_figure(run, measured, measure)],
        [table, *paper_table(run, "representation invariance", "prediction invariance")],
        [*notes, *((run.analysis or {}).get("notes") or ()), *run.not_measured],
    )


def _invariance_figure(run: Run, measured: Sequence[Model], measure: Measure) -> list[Figure]:
    values: dict[str, dict[str, float]] = {}
    for (method, where), models in by_set(measured).items():
        if (value := mean_of(map(measure.value, models))) is not None:
            values.setdefault(method, {})[where] = value
    if len(values) > 1 and len({tuple(of_method.items()) for of_method in values.values()}) == 1:
        values = {ALL: next(iter(values.values()))}  # of one frozen encoder
    rows = {}
    for method, of_method in values.items():
        chance = mean_of(measure.chance(model) for model in measured if method in (model["method"], ALL))
        rows[method] = Bar(MUTED if method == ALL else run.looks[method].colour, of_method, {}, chance)
    one_set = len({where for of_method in values.values() for where in of_method}) == 1
    markers = "" if one_set else ": the bar is the mean over held-out domains, a marker is one of them"
    title = measure.title.capitalize()
    return [bars(measure.name, title, f"{title}{markers}.", rows, measure.axis)] if rows else []


KERNELS = 7  # of the published MMD: twice this divided by the batch size is the limit for far features
Levels = dict[tuple[str, str, float | None], list[dict[str, Any]]]
"""{(method, held-out set, quantile of τ_d; None: the augmentation has no levels): entries, one per seed}"""


def divergence(run: Run) -> Section | None:
    """Bars of both estimates per method and level of τ_d, and a table."""
    levels = Levels()
    for (method, where), models in by_set(run.analysed("divergence")).items():
        for entry in (entry for model in models for entry in model["divergence"]):
            levels.setdefault((method, where, entry["quantile"]), []).append(entry)
    if not levels:
        return None

    rows = []
    for (method, where, quantile), entries in levels.items():
        level = Cell("none" if quantile is None else f"{100 * quantile:g}%", quantile)
        published, unbiased = (mean_cell(entry[key] for entry in entries) for key in ("published_mmd", "unbiased_mmd2"))
        error = mean_of(entry["stderr"] for entry in entries)
        size, n = cells(entries[0]["batch_size"], entries[0]["n"])
        error_cell = Cell("" if error is None else significant(error, 2), error)
        rows.append([*cells(method, where), level, published, size, unbiased, error_cell, n])
    header = ["method", "held out", "quantile of τ_d", "published MMD", "batch size", "unbiased MMD²", "± error"]
    caption = "Divergence of augmented features, mean ± standard deviation over seeds; the error is that of one seed."
    table = long_table(caption, [*header, "samples"], rows)
    sizes = sorted({entry["batch_size"] for entries in levels.values() for entry in entries})
    limits = " or ".join(f"{2 * KERNELS / size:.3g}" for size in sizes)
    return Section(
        "divergence",
        "Divergence of augmented features",
        "Maximum mean discrepancy (MMD) between original and augmented features of training images, per quantile that "
        "sets τ_d, the threshold of domain-specific features. The unbiased MMD² is 0 within its error if their "
        "distribution did not change. More divergence is not better by itself: noise diverges too.",
        [
            _divergence_figure(run, levels, "published_mmd", 2 * KERNELS / sizes[0] if len(sizes) == 1 else None),
            _divergence_figure(run, levels, "unbiased_mmd2"),
        ],
        [table, *paper_table(run, "divergence of augmented features")],
        [
            f"the published MMD (seven kernels; each batch of {' or '.join(map(str, sizes))} against its own augmented "
            "features) counts the kernel of each sample with itself, which dominates it: it is near its limit, twice "
            f"the number of kernels divided by the batch size ({limits}), as soon as every feature has moved a little",
            "published values of different batch sizes do not compare, and those of the paper's data sets differ in it",
            *run.not_measured,
        ],
    )


def _divergence_figure(run: Run, levels: Levels, key: str, limit: float | None = None) -> Figure:
    unbiased, rows = key == "unbiased_mmd2", dict[str, Bar]()
    for (method, where, quantile), entries in levels.items():
        label = method if quantile is None else f"{method} {100 * quantile:g}%"
        row = rows.setdefault(label, Bar(run.looks[method].colour, {}, {}))
        value, error = (mean_of(entry[name] for entry in entries) for name in (key, "stderr"))
        if value is not None:
            row.values[where] = value
            row.errors.update({where: error} if unbiased and error is not None else {})
    title = "Unbiased MMD²" if unbiased else "Published MMD"
    caption = f"{title} per method and quantile of τ_d. Bar: mean; marker: a held-out domain"
    caption += ", with its standard error." if unbiased else "; dashed: the limit."
    return bars(f"divergence-{key.replace('_', '-')}", title, caption, rows, title, limit)


# ---------------------------------------------------------------------------------------------------------- importance

ORDERS = {
    "score": ("importance score", Look(SERIES[0], "o", "-")),
    "gradient_norm": ("gradient norm", Look(SERIES[1], "s", "--")),
    "random": ("random", Look(SERIES[2], "^", ":")),
}
KINDS = "class", "domain"


def importance(run: Run) -> Section | None:
    """Curves per method of class and domain accuracy while features are removed, and the areas below them."""
    measured = run.analysed("importance")
    if not measured:
        return None
    rows = []
    for (method, where), models in by_set(measured).items():
        areas = [[(model["importance"].get("area") or {}).get(kind) or {} for model in models] for kind in KINDS]
        means = [mean_cell((area.get(order) for area in of_kind), ".3f") for of_kind in areas for order in ORDERS]
        rows.append([*cells(method, where), *means])
    header = ["method", "held out", *(f"{kind}: {words}" for kind in KINDS for words, _ in ORDERS.values())]
    last = max(model["importance"]["shares"][-1] for model in measured)
    caption = f"Area under each curve of accuracy, at most {last:g}. Lower: what was removed mattered more."

    # methods with equal curves share a figure: with a frozen encoder all fitted domain heads are the same
    groups: dict[str, tuple[list[str], list[Model], str]] = {}
    for method in dict.fromkeys(model["method"] for model in measured):
        models = [model for model in measured if model["method"] == method]
        for kind in KINDS:
            by_model = [(model["test_domains"], model["importance"].get(kind)) for model in models]
            if any(values for _, values in by_model):
                groups.setdefault(json.dumps([kind, by_model]), ([], models, kind))[0].append(method)
    figures = [_importance_figure(i, *group) for i, group in enumerate(list(groups.values())[:MAX_IMPORTANCE])]

    images = [model["importance"]["images"] for model in measured]
    notes = [
        f"{range_text(min(images), max(images))} images per model",
        "the score knows the true label: with a linear head it removes exactly what speaks for that class, so accuracy "
        "falls fast with any head, even one of random weights. Compare models by the curve at random",
    ]
    if any(model.get("domain_head") == "fitted" for model in measured):
        notes.append("methods without a domain head get a linear one, fitted on their training features")
    return Section(
        "importance",
        "Importance of features",
        "Accuracy on validation images of the training domains after the top x% of the features of each image are set "
        "to 0: by the importance score, by the size of the gradient, or at random. The lower a curve and its area, the "
        "more the removed features mattered.",
        figures,
        [long_table(caption, header, rows)],
        [*notes, *run.not_measured],
    )


def _importance_figure(i: int, methods: Sequence[str], models: Sequence[Model], kind: str) -> Figure:
    shares = [100 * share for share in models[0]["importance"]["shares"]]  # the same for all models of a run
    lines = []
    for order, (words, look) in ORDERS.items():
        of_models = [values for model in models if (values := (model["importance"].get(kind) or {}).get(order))]
        if of_models:
            means = [mean_of(column) for column in zip(*of_models, strict=True)]
            mean, *thin = (
                [(share, 100 * value) for share, value in zip(shares, values, strict=True) if value is not None]
                for values in (means, *of_models)
            )
            lines.append(Line(words, look, mean, thin if len(thin) > 1 else []))
    sets, who = [where for _, where in by_set(models)], f"{', '.join(methods)}: {kind} accuracy"
    several = f"Thin lines: {len(sets)} held-out sets; with markers: their mean."
    caption = f"{who}. {several if len(sets) > 1 else f'Held out: {sets[0]}.'}"
    title, axes = f"{who} against the share of removed features", ("features removed in %", f"{kind} accuracy in %")
    return curves(f"importance-{i}-{kind}", title, caption, {"": lines}, axes, limits={"ymin": 0})


# ---------------------------------------------------------------------------------------------------------- embeddings

PAIRS = {"class_specific_vs_generic": "class", "domain_specific_vs_generic": "domain", "original_vs_augmented": ""}
"""{pair of parts of the features: what the points are labelled by}"""
MAPS = {"map": "learned map", "pca": "PCA"}
MAX_POINTS = 400  # of a plot
MAX_NAMES = 10  # labels in a legend: of more, colours say nothing
Plot = Mapping[str, Any]  # "points" [[x,y],…], "kind" [0 or 1,…], "label" [number,…], silhouettes


def embeddings(run: Run) -> Section | None:
    """Scatter plots of the first models, and the silhouettes of all."""
    measured = run.analysed("embedding")
    if not measured:
        return None
    first = {model["method"]: model for model in reversed(measured)}  # of each method, before the others
    shown = sorted(measured, key=lambda model: model is not first[model["method"]])[:MAX_EMBEDDINGS]
    groups: dict[str, tuple[list[str], str, Model]] = {}  # models with equal points share a figure
    for model in shown:
        for pair in PAIRS:
            if plots := _plots(model, pair):
                key = json.dumps([model["test_domains"], pair, plots])
                groups.setdefault(key, ([], pair, model))[0].append(model["method"])

    columns = {  # of the last pair, both parts have one column
        f"{kind}-{words}, {title}" if kind else f"original against augmented, {title}": (pair, title, part)
        for pair, kind in PAIRS.items()
        for title in MAPS.values()
        for part, words in enumerate(("specific", "generic"))
    }
    rows = []
    for (method, where), models in by_set(measured).items():
        values = [[_silhouette(_plots(m, pair).get(title), pair, part) for m in models]
                  for pair, title, part in columns.values()]  # fmt: skip
        rows.append([*cells(method, where), *(mean_cell(of_models, "z.2f") for of_models in values)])
    caption = "Silhouettes: of classes and of domains among the points of each part; of original against augmented."
    if len(measured) > len(shown):
        caption += f" Plots are of {len(shown)} of {len(measured)} models."
    return Section(
        "embeddings",
        "Parts of the features in two dimensions",
        "Each point is a part of one image's feature in two dimensions: by a map of two linear layers that was trained "
        "to tell classes (or domains) on other images, and by PCA, which knows no labels. If the specific part "
        "separates the labels better than the generic one, its silhouette is higher.",
        [_embedding_figure(run, f"embedding-{i}", *group) for i, group in enumerate(groups.values())],
        [long_table(caption, ["method", "held out", *columns], rows)],
        [
            "silhouette: 1 for groups far apart, 0 for mixed ones, below 0 where points are nearer to another group",
            "which features are specific is chosen for each image with its true label, so both parts carry the label, "
            "even with a head of random weights",
            "distances have no unit, and two dimensions hold few groups: a mixed plot does not say that features are "
            "mixed",
            *run.not_measured,
        ],
        folded=True,
    )


def _plots(model: Model, pair: str) -> dict[str, Plot]:
    """Returns {title of a map: its points}."""
    pairs = model["embedding"].get("pairs") or {}
    return {title: plot for key, title in MAPS.items() if (plot := (pairs.get(pair) or {}).get(key))}


def _silhouette(plot: Plot | None, pair: str, part: int) -> float | None:
    """Returns the silhouette of the labels in the specific (0) or generic (1) part, or that of original, augmented."""
    if plot is None or not PAIRS[pair]:
        return (plot or {}).get("silhouette")
    value: float | None = (plot.get("silhouette_of_labels") or (None, None))[part]
    return value


def _embedding_figure(run: Run, name: str, methods: Sequence[str], pair: str, model: Model) -> Figure:
    kind, plots = PAIRS[pair], _plots(model, pair)
    names = run.class_names if kind == "class" else [*((model.get("prediction_invariance") or {}).get("risk") or ())]
    panels, silhouettes = [], []
    for title, plot in plots.items():
        labels = plot.get("label") or [0] * len(plot["points"])
        rows = list(zip(map(tuple, plot["points"]), plot["kind"], labels, strict=True))
        rows = rows[:: max(1, -(-len(rows) // MAX_POINTS))]
        clouds = [[(point, label) for point, of_part, label in rows if of_part == part] for part in (0, 1)]
        values = [_silhouette(plot, pair, part) for part in (0, 1)]
        first, second = (EMPTY if value is None else f"{value:.2f}" for value in values)
        if kind:
            silhouettes.append(f"{title} {first} specific, {second} generic")
            styles = list(looks(map(str, range(max(labels) + 1))).values())
            for cloud, part in zip(clouds, ("specific", "generic"), strict=True):
                panels.append((f"{kind}-{part}\n{title}", _by_label(cloud, styles, names)))
        else:
            silhouettes.append(f"{title} {first}")
            original = Line("original", Look(SERIES[0], "o", size=3), [point for point, _ in clouds[0]])
            look = Look(SERIES[1], "^", size=3, hollow=True)
            panels.append((title, [original, Line("augmented", look, [point for point, _ in clouds[1]])]))

    told = "; ".join(silhouettes) if kind else ", ".join(silhouettes)
    who = f"{', '.join(methods)}, held out {set_name(model['test_domains'])}"
    if not kind:
        caption = f"{who}: original and augmented features. Silhouettes of the two: {told}."
        return scatter(name, f"Scatter plots of {caption}", caption, [panels], framed=True, height=2.1)
    caption = f"{who}: marked by {kind}. Silhouettes: {told}."
    alt = f"{kind.capitalize()}-specific and {kind}-generic features of {caption}"
    grid = [panels[i : i + 2] for i in range(0, len(panels), 2)]
    return scatter(name, alt, caption, grid, framed=True, height=1.9 * len(plots))


def _by_label(
    cloud: Sequence[tuple[tuple[float, float], int]], styles: Sequence[Look], names: Sequence[str]
) -> list[Line]:
    labels = sorted({label for _, label in cloud})
    lines = []
    for label in labels:
        name = names[label] if label < len(names) else str(label)
        points_of = [point for point, of_point in cloud if of_point == label]
        lines.append(Line(name if len(labels) <= MAX_NAMES else "", styles[label]._replace(size=3), points_of))
    return lines
