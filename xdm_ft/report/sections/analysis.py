"""The panels of analysis.json, of the models that the recipe's rule picked: what `xdm-ft analyse` measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from xdm_ft.core import set_name
from xdm_ft.evaluation.estimates import mean_of
from xdm_ft.report import Cell, Section, cells, long_table, make_section, mean_cell
from xdm_ft.report.charts import (
    INK,
    MUTED,
    SERIES,
    Figure,
    Line,
    Mark,
    Row,
    SeriesStyle,
    curves,
    looks,
    points,
    scatter,
)
from xdm_ft.report.published import paper_table
from xdm_ft.report.words import EMPTY, range_text, short, significant
from xdm_ft.results.model import group_by
from xdm_ft.results.run import Run
from xdm_ft.runtime.errors import plural

MAX_BARS, MAX_RELIABILITY, MAX_IMPORTANCE, MAX_EMBEDDINGS = 24, 12, 16, 4  # bars and figures of a panel
MAX_MARKED_SETS = 8  # held-out sets with markers of their own
Entry = dict[str, Any]  # what was measured: a model of analysis.json, or a part of it


def by_set(models: Iterable[Entry]) -> dict[tuple[str, str], list[Entry]]:
    """Returns {(method, held-out set): its models, one per seed}."""
    return group_by(models, lambda model: (model["method"], set_name(model["test_domains"])))


def part_of(entry: Entry, *keys: str) -> Any:
    """Returns what lies at the nested keys; None if it was not measured: each level may be null."""
    value: Any = entry
    for key in keys:
        value = (value or {}).get(key)
    return value


# --------------------------------------------------------------------------------------------------------- calibration

FEWEST_IMAGES = 10  # per seed, of a bin that is drawn
ROLES = {"test": ("held-out", -0.15, "o"), "validation": ("validation", 0.15, "s")}
Domain = tuple[str, str, str, str]  # method, held-out set, domain, role


def calibration(run: Run) -> Section | None:
    """ECE per method, reliability per held-out domain, and a table of all domains."""
    measured: dict[Domain, list[Entry]] = {}
    for (method, held), models in by_set(run.analysed("calibration")).items():
        for model in models:
            for domain, values in (model["calibration"].get("domains") or {}).items():
                percent = {key: None if values[key] is None else 100 * values[key] for key in ("ece", "ece_scaled")}
                entry = values | percent | {"temperature": model["calibration"]["temperature"]}
                measured.setdefault((method, held, domain, values["role"]), []).append(entry)
    if not measured:
        return None

    forms = {"temperature": ".2f", "ece": ".1f", "ece_scaled": ".1f", "nll": ".3f", "nll_scaled": ".3f"}
    rows = []
    for key, seeds in measured.items():
        means = [mean_cell((seed[name] for seed in seeds), form) for name, form in forms.items()]
        rows.append(cells(*key, seeds[0]["n"], *means))
    header = ["method", "held out", "domain", "images of", "images", "temperature"]
    header += ["ECE before (%)", "ECE after (%)", "NLL before", "NLL after"]
    caption = "Before and after temperature scaling, per method and domain, mean ± standard deviation over seeds."

    # {(method, role): ECE before and after}, the mean over domains, where both are defined
    eces: dict[tuple[str, str], tuple[float, float]] = {}
    for pair, domains in group_by(measured, lambda key: (key[0], key[3])).items():
        before, after = (
            mean_of(mean_of(seed[name] for seed in measured[domain]) for domain in domains)
            for name in ("ece", "ece_scaled")
        )
        if before is not None and after is not None:
            eces[pair] = before, after
    tested = [ends for (_, role), ends in eces.items() if role == "test"]
    lower = sum(after < before for before, after in tested)
    helped = f"here it lowers the ECE on held-out domains for {lower} of {plural(len(tested), 'method')}"
    return make_section(
        "calibration",
        [*_ece_figures(run, eces), *_reliability_figures(run, measured)],
        [long_table(caption, header, rows)],
        run.not_measured,
        helped=helped if tested else "",
        fewest=FEWEST_IMAGES,
    )


def _ece_figures(run: Run, eces: Mapping[tuple[str, str], tuple[float, float]]) -> list[Figure]:
    """ECE before and after: the mean over held-out domains and over validation parts, per method."""
    rows: dict[str, list[Mark]] = {}
    for (method, role), (before, after) in eces.items():
        words, shift, _ = ROLES[role]
        ends = Mark(f"{words}, before", before, (before, after), shift), Mark(f"{words}, after", after, None, shift)
        rows.setdefault(method, []).extend(ends)
    series = {
        f"{words}, {when}": SeriesStyle("", marker, hollow=when == "before", width=1)
        for words, _, marker in ROLES.values()
        for when in ("before", "after")
    }
    title = "ECE before (hollow) and after (filled) temperature scaling, mean over domains and seeds"
    drawn = [Row(method, marks, colour=looks(run.drawn_methods)[method].colour) for method, marks in rows.items()]
    legend, limits = {name: name for name in series}, (0, None)
    figure = points("calibration-ece", title, f"{title}.", drawn, "ECE in %", series, legend, limits)
    return [figure] if rows else []


def _reliability_figures(run: Run, measured: Mapping[Domain, list[Entry]]) -> list[Figure]:
    """Accuracy against confidence of all methods, before and after, a figure per held-out domain."""
    figures = []
    tested = group_by((key for key in measured if key[3] == "test"), lambda key: key[1:3])
    for i, ((_, domain), keys) in enumerate(list(tested.items())[:MAX_RELIABILITY]):
        sides = {
            title: [
                Line(
                    key[0],
                    looks(run.drawn_methods)[key[0]]._replace(width=1),
                    pooled_bins(measured[key], name),
                    button=key[0],
                )
                for key in keys
            ]
            for title, name in (("before scaling", "reliability"), ("after scaling", "reliability_scaled"))
        }
        title = f"Reliability on {domain}, before and after temperature scaling"
        caption = f"{domain}, never seen in training. On the dotted line confidence is right; below it, it is too high."
        axes = "confidence in %", "accuracy in %"
        figures.append(curves(f"calibration-{i}", title, caption, sides, axes, diagonal=True, width=5.4, height=2.8))
    return figures


def pooled_bins(seeds: Sequence[Entry], key: str) -> list[tuple[float, float]]:
    """Returns (confidence, accuracy) in % of the bins of all seeds together that have enough images.

    A seed without a temperature has no scaled bins, and is left out.
    """
    drawn, bins = [], [of_seed for seed in seeds if (of_seed := seed.get(key))]
    for same in zip(*bins, strict=True):
        defined = [b for b in same if b["n"] and b["confidence"] is not None and b["accuracy"] is not None]
        n = sum(b["n"] for b in defined)
        if n >= FEWEST_IMAGES * len(bins):
            x, y = (100 * sum(b["n"] * b[name] for b in defined) / n for name in ("confidence", "accuracy"))
            drawn.append((x, y))
    return drawn


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
    few = len(sets) <= MAX_MARKED_SETS  # of more sets all get a dot, without errors and legend
    series = {
        held: SeriesStyle(INK, look.marker if few else "o", size=3.5, width=1) for held, look in looks(sets).items()
    } | {"by chance": SeriesStyle(INK, "|", size=16)}
    legend = {held: short(held, 18) for held in sets} if few and len(sets) > 1 else {}
    legend |= {"by chance": "by chance"} if any(row.chance is not None for row in rows.values()) else {}

    drawn = []
    for label, row in rows.items():
        marks = [] if row.chance is None else [Mark("by chance", row.chance)]
        for held, value in row.values.items() if len(sets) > 1 or row.errors else ():
            error = row.errors.get(held) if few else None
            ends = None if error is None else (value - error, value + error)
            shift = 0.3 * (sets.index(held) / (len(sets) - 1) - 0.5) if len(sets) > 1 else 0.0
            marks.append(Mark(held, value, ends, shift))
        drawn.append(Row(label, marks, mean_of(row.values.values()), row.colour))
    alt = f"Bars of the {title}, mean over held-out domains"
    return points(name, alt, caption, drawn, axis, series, legend, limit=limit, zero=True)


ALL = "all methods"
INVARIANCES = {  # title: name of the figure, its axis, and where analysis.json has the number
    "representation (paper's formula)": (
        "invariance-representation", "distance of covariances", ("representation_invariance", "paper"),
    ),
    "representation (published code)": (
        "invariance-representation-code", "distance of means and covariances",
        ("representation_invariance", "published_code"),
    ),
    "prediction (variance of the risk)": (
        "invariance-prediction", "variance of the risk", ("prediction_invariance", "risk_variance"),
    ),
}  # fmt: skip


def invariance(run: Run) -> Section | None:
    """Bars of the measurements per method, and a table of all values."""
    columns = {title: keys for title, (_, _, keys) in INVARIANCES.items()}
    measured = [
        model for model in run.analysed() if any(part_of(model, *keys) is not None for keys in columns.values())
    ]
    if not measured:
        return None
    # how much of a value is chance, as covariances of few images differ
    chances = {
        f"by chance {title[title.index('(') :]}": (part, f"{key}_noise") for title, (part, key) in columns.items()
    }
    has_chances = any(part_of(model, *keys) is not None for keys in chances.values() for model in measured)
    by_chance = "covariances of few images differ by chance: a dotted tick shows about how much of a bar that is"
    columns |= dict(list(chances.items())[:2]) if has_chances else {}

    rows = []
    for key, models in by_set(measured).items():
        risks = [part_of(model, "prediction_invariance", "risk") or {} for model in models]
        domains = dict.fromkeys(domain for of_model in risks for domain in of_model)
        means = {domain: mean_of(of_model.get(domain) for of_model in risks) for domain in domains}
        listing = "; ".join(f"{domain} {risk:.3f}" for domain, risk in means.items() if risk is not None)
        values = [mean_cell(part_of(model, *keys) for model in models) for keys in columns.values()]
        rows.append(cells(*key, *values, listing or EMPTY))
    caption = "Invariance over the training domains, mean ± standard deviation over seeds."
    table = long_table(caption, ["method", "held out", *columns, "risk per training domain"], rows)
    return make_section(
        "invariance",
        [figure for title in INVARIANCES for figure in _invariance_figure(run, measured, title)],
        [table, *paper_table(run, "representation invariance", "prediction invariance")],
        [*([by_chance] if has_chances else []), *((run.analysis or {}).get("notes") or ()), *run.not_measured],
    )


def _invariance_figure(run: Run, measured: Sequence[Entry], title: str) -> list[Figure]:
    name, axis, (part, key) = INVARIANCES[title]
    values: dict[str, dict[str, float]] = {}
    for (method, held), models in by_set(measured).items():
        if (value := mean_of(part_of(model, part, key) for model in models)) is not None:
            values.setdefault(method, {})[held] = value
    if len(values) > 1 and len({tuple(of_method.items()) for of_method in values.values()}) == 1:
        values = {ALL: next(iter(values.values()))}  # of one frozen encoder
    normalized = {model["method"] for model in measured if model["normalized"]} & {*values}
    if part != "representation_invariance" or normalized == {*values}:
        normalized = set()  # distances of features of length 1 compare with each other alone
    rows = {}
    for method, of_method in values.items():
        if method in normalized:
            continue
        own = [model for model in measured if method in (model["method"], ALL)]
        chance = mean_of(part_of(model, part, f"{key}_noise") for model in own)
        rows[method] = Bar(MUTED if method == ALL else looks(run.drawn_methods)[method].colour, of_method, {}, chance)
    one_set = len({held for of_method in values.values() for held in of_method}) == 1
    markers = "" if one_set else ": the bar is the mean over held-out domains, a marker is one of them"
    scale = f" No bar: {', '.join(sorted(normalized))}, which reads features of length 1." if normalized else ""
    title = title.capitalize()
    return [bars(name, title, f"{title}{markers}.{scale}", rows, axis)] if rows else []


KERNELS = 7  # of the published MMD: twice this divided by the batch size is the limit for far features
Levels = dict[tuple[str, str, float | None], list[Entry]]
"""{(method, held-out set, quantile of τ_d; None: the augmentation has no levels): entries, one per seed}"""


def divergence(run: Run) -> Section | None:
    """Bars of both estimates per method and level of τ_d, and a table."""
    levels = Levels()
    for (method, held), models in by_set(run.analysed("divergence")).items():
        for entry in (entry for model in models for entry in model["divergence"]):
            levels.setdefault((method, held, entry["quantile"]), []).append(entry)
    if not levels:
        return None

    rows = []
    for (method, held, quantile), entries in levels.items():
        level = Cell("none" if quantile is None else f"{100 * quantile:g}%", quantile)
        published, unbiased = (mean_cell(entry[key] for entry in entries) for key in ("published_mmd", "unbiased_mmd2"))
        error, size = mean_of(entry["stderr"] for entry in entries), entries[0]["batch_size"]
        error_cell = Cell("" if error is None else significant(error, 2), error)
        rows.append(cells(method, held, level, published, size, unbiased, error_cell, entries[0]["n"]))
    header = ["method", "held out", "quantile of τ_d", "published MMD", "batch size", "unbiased MMD²", "± error"]
    caption = "Divergence of augmented features, mean ± standard deviation over seeds; the error is that of one seed."
    table = long_table(caption, [*header, "samples"], rows)
    sizes = sorted({entry["batch_size"] for entries in levels.values() for entry in entries})
    limit = 2 * KERNELS / sizes[0] if len(sizes) == 1 else None
    return make_section(
        "divergence",
        [_divergence_figure(run, levels, "published_mmd", limit), _divergence_figure(run, levels, "unbiased_mmd2")],
        [table, *paper_table(run, "divergence of augmented features")],
        run.not_measured,
        sizes=" or ".join(map(str, sizes)),
        limits=" or ".join(f"{2 * KERNELS / size:.3g}" for size in sizes),
    )


def _divergence_figure(run: Run, levels: Levels, key: str, limit: float | None = None) -> Figure:
    unbiased, rows = key == "unbiased_mmd2", dict[str, Bar]()
    for (method, where, quantile), entries in levels.items():
        label = method if quantile is None else f"{method} {100 * quantile:g}%"
        row = rows.setdefault(label, Bar(looks(run.drawn_methods)[method].colour, {}, {}))
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
    "score": ("importance score", SeriesStyle(SERIES[0], "o", "-")),
    "gradient_norm": ("gradient norm", SeriesStyle(SERIES[1], "s", "--")),
    "random": ("random", SeriesStyle(SERIES[2], "^", ":")),
}
KINDS = "class", "domain"


def importance(run: Run) -> Section | None:
    """Curves per method of class and domain accuracy while features are removed, and the areas below them."""
    measured = run.analysed("importance")
    if not measured:
        return None
    columns = {
        f"{kind}: {words}": ("importance", "area", kind, order)
        for kind in KINDS
        for order, (words, _) in ORDERS.items()
    }
    rows = []
    for key, models in by_set(measured).items():
        areas = [mean_cell((part_of(model, *keys) for model in models), ".3f") for keys in columns.values()]
        rows.append(cells(*key, *areas))
    last = max(model["importance"]["shares"][-1] for model in measured)
    caption = f"Area under each curve of accuracy, at most {last:g}. Lower: what was removed mattered more."
    table = long_table(caption, ["method", "held out", *columns], rows)

    # methods with equal curves share a figure: with a frozen encoder all fitted domain heads are the same
    groups: dict[str, tuple[list[str], list[Entry], str]] = {}
    for method, models in group_by(measured, lambda model: str(model["method"])).items():
        for kind in KINDS:
            by_model = [(model["test_domains"], model["importance"].get(kind)) for model in models]
            if any(curves_of for _, curves_of in by_model):
                groups.setdefault(json.dumps([kind, by_model]), ([], models, kind))[0].append(method)
    figures = [_importance_figure(i, *group) for i, group in enumerate(list(groups.values())[:MAX_IMPORTANCE])]

    images = [model["importance"]["images"] for model in measured]
    fitted = "methods without a domain head get a linear one, fitted on their training features"
    notes = [fitted] if any(model.get("domain_head") == "fitted" for model in measured) else []
    of_models = range_text(min(images), max(images))
    return make_section("importance", figures, [table], [*notes, *run.not_measured], images=of_models)


def _importance_figure(i: int, methods: Sequence[str], models: Sequence[Entry], kind: str) -> Figure:
    shares = [100 * share for share in models[0]["importance"]["shares"]]  # the same for all models of a run
    lines = []
    for order, (words, look) in ORDERS.items():
        of_models = [values for model in models if (values := part_of(model, "importance", kind, order))]
        if of_models:
            means = [mean_of(column) for column in zip(*of_models, strict=True)]
            mean, *thin = (
                [(share, 100 * value) for share, value in zip(shares, values, strict=True) if value is not None]
                for values in (means, *of_models)
            )
            lines.append(Line(words, look, mean, thin if len(thin) > 1 else []))
    sets, who = [held for _, held in by_set(models)], f"{', '.join(methods)}: {kind} accuracy"
    several = f"Thin lines: {len(sets)} held-out sets; with markers: their mean."
    caption = f"{who}. {several if len(sets) > 1 else f'Held out: {sets[0]}.'}"
    title, axes = f"{who} against the share of removed features", ("features removed in %", f"{kind} accuracy in %")
    return curves(f"importance-{i}-{kind}", title, caption, {"": lines}, axes, limits={"ymin": 0})


# ---------------------------------------------------------------------------------------------------------- embeddings

PAIRS = {"class_specific_vs_generic": "class", "domain_specific_vs_generic": "domain", "original_vs_augmented": ""}
"""{pair of parts of the features: what the points are labelled by}"""
MAPS = {"learned map": "map", "PCA": "pca"}
MAX_POINTS = 400  # of a plot
MAX_NAMES = 10  # labels in a legend: of more, colours say nothing


def embeddings(run: Run) -> Section | None:
    """Scatter plots of the first models, and the silhouettes of all."""
    measured = run.analysed("embedding")
    if not measured:
        return None
    first = {model["method"]: model for model in reversed(measured)}  # of each method, before the others
    shown = sorted(measured, key=lambda model: model is not first[model["method"]])[:MAX_EMBEDDINGS]
    groups: dict[str, tuple[list[str], str, Entry]] = {}  # models with equal points share a figure
    for model in shown:
        for pair in PAIRS:
            if plots := _plots(model, pair):
                key = json.dumps([model["test_domains"], pair, plots])
                groups.setdefault(key, ([], pair, model))[0].append(model["method"])

    columns = {  # of the last pair, both parts have one column
        f"{kind}-{words}, {title}" if kind else f"original against augmented, {title}": (pair, title, part)
        for pair, kind in PAIRS.items()
        for title in MAPS
        for part, words in enumerate(("specific", "generic"))
    }
    columns = {title: space for title, space in columns.items()
               if any(_silhouette(model, *space) is not None for model in measured)}  # fmt: skip
    rows = []
    for of, models in by_set(measured).items():
        values = [[_silhouette(model, *space) for model in models] for space in columns.values()]
        rows.append(cells(*of, *(mean_cell(of_models, "z.2f") for of_models in values)))
    caption = "Silhouettes: of classes and of domains among the points of each part; of original against augmented."
    if len(measured) > len(shown):
        caption += f" Plots are of {len(shown)} of {len(measured)} models."
    figures = [_embedding_figure(run, f"embedding-{i}", *group) for i, group in enumerate(groups.values())]
    table = long_table(caption, ["method", "held out", *columns], rows)
    return make_section("embeddings", figures, [table], run.not_measured)


def _plots(model: Entry, pair: str) -> dict[str, Entry]:
    """Returns {title of a map: "points" [[x,y],…], "kind" [0 or 1,…], "label" [number,…], silhouettes}."""
    plots = {title: part_of(model, "embedding", "pairs", pair, key) for title, key in MAPS.items()}
    return {title: plot for title, plot in plots.items() if plot}


def _silhouette(model: Entry, pair: str, title: str, part: int) -> float | None:
    """Returns the silhouette of the labels in the specific (0) or generic (1) part, or that of original, augmented."""
    plot = _plots(model, pair).get(title, {})
    values = (plot.get("silhouette_of_labels") or (None, None)) if PAIRS[pair] else [plot.get("silhouette")] * 2
    value: float | None = values[part]
    return value


def _embedding_figure(run: Run, name: str, methods: Sequence[str], pair: str, model: Entry) -> Figure:
    kind, plots = PAIRS[pair], _plots(model, pair)
    names = run.class_names if kind == "class" else [*(part_of(model, "prediction_invariance", "risk") or ())]
    panels, silhouettes = list[tuple[str, list[Line]]](), list[str]()
    button = methods[0] if len(methods) == 1 else ""  # what several methods share stays
    for title, plot in plots.items():
        labels = plot.get("label") or [0] * len(plot["points"])
        # the points of both kinds are of the same images, in the same order
        numbers = [*range(1, len(labels) // 2 + 1)] * 2
        rows = list(zip(map(tuple, plot["points"]), plot["kind"], labels, numbers, strict=True))
        rows = rows[:: max(1, -(-len(rows) // MAX_POINTS))]
        clouds = [[row for row in rows if row[1] == part] for part in (0, 1)]
        values = [_silhouette(model, pair, title, part) for part in (0, 1)]
        first, second = (EMPTY if value is None else f"{value:z.2f}" for value in values)
        if kind:
            silhouettes.append(f"{title} {first} specific, {second} generic")
            styles = list(looks(map(str, range(max(labels) + 1))).values())
            for cloud, part in zip(clouds, ("specific", "generic"), strict=True):
                by_label = group_by(sorted(cloud, key=lambda row: row[2]), lambda row: row[2])
                lines = []
                for label, of in by_label.items():
                    words = names[label] if label < len(names) else str(label)
                    texts = [f"image {number}, {kind} {words}" for *_, number in of]
                    shown = words if len(by_label) <= MAX_NAMES else ""
                    look = styles[label]._replace(size=3)
                    lines.append(Line(shown, look, [row[0] for row in of], button=button, texts=texts))
                panels.append((f"{kind}-{part}\n{title}", lines))
        else:
            silhouettes.append(f"{title} {first}")
            both = {
                "original": SeriesStyle(SERIES[0], "o", size=3),
                "augmented": SeriesStyle(SERIES[1], "^", size=3, hollow=True),
            }
            lines = []
            for (words, look), cloud in zip(both.items(), clouds, strict=True):
                texts = [f"image {row[3]}, {words}" for row in cloud]
                lines.append(Line(words, look, [row[0] for row in cloud], button=button, texts=texts))
            panels.append((title, lines))

    who = f"{', '.join(methods)}, held out {set_name(model['test_domains'])}"
    if not kind:
        caption = f"{who}: original and augmented features. Silhouettes of the two: {', '.join(silhouettes)}."
        return scatter(name, f"Scatter plots of {caption}", caption, [panels], framed=True, height=2.1)
    caption = f"{who}: marked by {kind}. Silhouettes: {'; '.join(silhouettes)}."
    alt = f"{kind.capitalize()}-specific and {kind}-generic features of {caption}"
    grid = [panels[i : i + 2] for i in range(0, len(panels), 2)]
    return scatter(name, alt, caption, grid, framed=True, height=1.9 * len(plots))
