"""What `xdm-ft audit` found, as audit.json has it: sections of the page, audit.md, and the lines for a terminal.

Names of image files stand in audit.md, and on the page only if the recipe's `report.images` is true.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from xdm_ft.report import Cell, Section, Table, cells, make_section, metric_cell
from xdm_ft.report.charts import Figure, heat_maps
from xdm_ft.report.markup import escape_markdown, markdown_lines
from xdm_ft.report.words import EMPTY, between, count_text, metric_words, p_value, scale, with_unit
from xdm_ft.results.run import Run
from xdm_ft.results.table import BETTER, NO_VERDICT, WORSE
from xdm_ft.runtime.errors import join_names, plural
from xdm_ft.storage import Json

NAMES = {
    "copies": "copies", "domain_pairs": "twin domains", "labels": "label errors", "site_class": "site × class",
    "encoder": "what the encoder knows",
}  # fmt: skip
"""{key of audit.json: name of this kind of finding}"""
PROMISE, SUSPECT, UNSEEN, NOTHING, DESCRIPTION = 4, 3, 2, 1, 0
"""How bad a finding is. PROMISE: results on held-out domains may promise too much. UNSEEN: not looked for."""
SIDES = ("first", "second")  # of a pair of images
MAX_LISTED = 10  # pairs, images and confused labels of a table
MAX_PAIRS, MAX_FACTS, MAX_SENTENCES = 15, 15, 8
MAX_DOMAINS, MAX_CLASSES = 12, 10  # rows and columns of a matrix
MAX_DRAWN = 20  # domains of a heat map
COSTS = (
    "A cost is how much better or worse answers on held-out domains are if these images train no model, or with other "
    "labels, compared with leaving out as many random images ({})."
)
NO_FILES = "names of files are in {}, and here only with report.images=true"


class AuditFinding(NamedTuple):
    """What was found of one kind."""

    kind: str  # a key of NAMES
    rank: int
    what: str
    remedy: str
    costs: Sequence[Json] = ()

    @property
    def name(self) -> str:
        return NAMES[self.kind].capitalize()


# ------------------------------------------------------------------------------------------------------------ sentences


def findings(audit: Json) -> list[AuditFinding]:
    """Returns a finding of each kind: what is found by its cost, the dearest first, then the rest."""
    made = []
    for kind, finding in FINDINGS.items():
        if audit[kind] is None:
            made.append(AuditFinding(kind, UNSEEN, "could not be looked for; the notes say why", ""))
        else:
            made.append(finding(audit))
    costly = {finding.kind: _points(audit, finding) for finding in made}
    return sorted(made, key=lambda of: (of.rank <= UNSEEN, -costly[of.kind], -of.rank))


def _points(audit: Json, finding: AuditFinding) -> float:
    """Returns the largest cost of a finding that is shown, as a fraction; 0 if there is none."""
    twins = finding.kind == "domain_pairs" and finding.rank > UNSEEN
    rows = [*finding.costs, *(audit["domain_pairs"]["left_out"] if twins else [])]
    return max((abs(row["excess"] or 0) for row in rows if row["verdict"].startswith((BETTER, WORSE))), default=0)


def _copies(audit: Json) -> AuditFinding:
    part = audit["copies"]
    count, across = part["listed"] - part["sure"], part["candidates_across_domains"]
    more = f"{count_text(count)} more {'candidate' if count == 1 else 'candidates'}, {across} across domains"
    if not part["sure"]:
        return AuditFinding("copies", NOTHING, f"none; {more}: copies.csv" if count else "none", "")
    places = f"{part['across_domains']} of them lie in two domains, {part['straddling']} in training and test"
    line = f"{plural(part['sure'], 'pair')} of images are copies of each other; {places}; {more}: copies.csv"
    remedy = "look through copies.csv (--images shows the pairs), and delete one image of each copy"
    return AuditFinding("copies", PROMISE if part["straddling"] else SUSPECT, line, remedy, part["costs"])


def _twins(audit: Json) -> AuditFinding:
    twins, left_out = audit["twins"], audit["domain_pairs"]["left_out"]
    if not twins:
        if undecided := audit["domain_pairs"]["undecided"]:
            pairs = join_names([" and ".join(pair) for pair in undecided], 3)
            text = f"{pairs} are near each other, but no held-out accuracy shows whether they are twins"
            tested = [row for row in left_out if [row["domain"], row["without"]] in undecided]
            remedy = f"hold each of them out: {_setting('test_domains', [*dict.fromkeys(chain(*undecided))])}"
            if any(row["verdict"] == NO_VERDICT for row in tested):  # there is a difference, but no verdict on it
                text, remedy = f"{text}: {tested[0]['note']}", "give them a verdict: protocol.seeds=5"
            elif tested:
                remedy = "look whether they show the same objects, patients or scanner"
            return AuditFinding("domain_pairs", UNSEEN, text, remedy)
        if not left_out:
            return AuditFinding("domain_pairs", UNSEEN, audit["domain_pairs"]["note"] or "could not be looked for", "")
        return AuditFinding("domain_pairs", NOTHING, "none", "")
    of_twins = [row for row in left_out if any({row["domain"], row["without"]} == {*pair} for pair in twins)]
    worst = max(of_twins, key=lambda row: -1 if row["excess"] is None else row["excess"], default=None)
    line = join_names([" and ".join(pair) for pair in twins], 3)
    if worst is not None and worst["excess"] is not None:
        before, after, matched = (_percent(worst[key]) for key in ("accuracy", "accuracy_without", "accuracy_matched"))
        line += (
            f". With {worst['without']} left out of training too, {worst['domain']} falls from {before} to {after}; "
            f"with as many other images left out, it has {matched}"
        )
    remedy = "give them one domain" if audit.get("folds") else f"hold them out together: {_together(twins)}"
    return AuditFinding("domain_pairs", PROMISE, line, f"if they show the same objects, patients or scanner, {remedy}")


def _percent(value: float | None) -> str:
    return EMPTY if value is None else with_unit("accuracy", value)


def _together(twins: Iterable[Sequence[str]]) -> str:
    """Returns the change of a recipe, for a shell. Twins that share a domain are held out as one."""
    groups: list[list[str]] = []
    for pair in twins:
        touching = [group for group in groups if {*group} & {*pair}]
        groups = [group for group in groups if group not in touching]
        groups.append(list(dict.fromkeys(name for group in (*touching, pair) for name in group)))
    return _setting("together", groups)


def _setting(key: str, value: object) -> str:
    """Returns a change of the recipe's protocol, for a shell."""
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 16, allow_unicode=True).strip()
    return shlex.quote(f"protocol.{key}={text}")


def _labels(audit: Json) -> AuditFinding:
    part = audit["labels"]
    if not part["suspects"]:
        return AuditFinding("labels", NOTHING, "no label looks wrong", "")
    share = f" ({_percent(part['suspects'] / audit['images'])})" if audit["images"] else ""
    # hard images look as wrong labels do: only that heads are better without them shows that there are errors
    shown = any(cost["verdict"].startswith(BETTER) for cost in part["costs"])
    line = f"the heads contradict {plural(part['suspects'], 'label')}{share}"
    if part["confused"]:
        most = part["confused"][0]
        line += f", most often {most['label']} instead of {most['suggested']} ({plural(most['images'], 'image')})"
    remedy = "look through the rows of labels.csv where suspect is true, worst first, and correct what is wrong"
    return AuditFinding("labels", SUSPECT if shown else NOTHING, line, remedy, part["costs"])


def _site_class(audit: Json) -> AuditFinding:
    part = audit["site_class"]
    harmful = {cost["what"] for cost in part["costs"] if cost["verdict"].startswith(BETTER)}
    marks = [mark for mark in part["marks"] if mark["found"]]
    facts = [fact for fact in _worst_facts(part) if fact["found"] and fact["predicts"] == "class"]
    costly = [fact for fact in facts if f"{fact['domain']} left out of training" in harmful]
    parts, remedy = [], "a model may learn the site, not the class: balance the classes of each site"
    if marks:
        mark, more = marks[0], f" (and {len(marks) - 1} more)" if len(marks) > 1 else ""
        position = f"{mark['class']} in {mark['domain']}"
        parts.append(f"a {mark['kind']} gives away {_percent(mark['share'])} of {position}, and not elsewhere{more}")
        remedy = f"look at images of {position}; remove the {mark['kind']}, or mark all classes alike"
    for fact in (costly or facts)[:1]:
        right, chance = (_percent(fact[key]) for key in ("accuracy", "chance"))
        position, harm = f" in {fact['domain']}" if fact["domain"] else "", "" if costly else ", at no cost that shows"
        parts.append(f"the class is predicted with {right}{position} by {fact['facts']} alone (chance: {chance}){harm}")
    if costly and not marks:
        remedy = f"a model may learn {costly[0]['facts']}, not the class: make all files alike"
    if part["confounded"]:
        parts.append(f"class and site cannot be told apart: {join_names(part['confounded'], 3)}")
    if part["lacking"]:
        first, count = part["lacking"][0], plural(len(part["lacking"]), "pair")
        parts.append(f"{count} of domain and class without an image, such as {first['domain']} and {first['class']}")
    rank = PROMISE if marks or costly or part["confounded"] else SUSPECT if part["lacking"] else NOTHING
    line = "; ".join(parts) or "every domain has every class, and neither files nor marks tell the class"
    return AuditFinding(
        "site_class", rank, f"{line}. Cramér's V {_strength(part)}", remedy if rank > NOTHING else "", part["costs"]
    )


def _strength(part: Json) -> str:
    if part["cramers_v"] is None:
        return "is not defined"
    ends = "" if part["interval"] is None else " (95%: {:.2f} to {:.2f})".format(*part["interval"])
    return f"{part['cramers_v']:.2f}{ends}"


def _worst_facts(part: Json) -> list[Json]:
    """Returns the facts, those beyond chance first, then by how far they are above it."""
    return sorted(part["facts"], key=lambda fact: (not fact["found"], -(fact["accuracy"] or 0) + (fact["chance"] or 0)))


def _encoder(audit: Json) -> AuditFinding:
    values = [f"{name} {value}" for name, value, _ in _encoder_rows(audit["encoder"]) if value != EMPTY]
    return AuditFinding("encoder", DESCRIPTION, "; ".join([*values, "a description, no verdict"]), "")


def _encoder_rows(part: Json) -> Iterator[tuple[str, str, str]]:
    """Yields (what, its value, how to read it)."""
    index = part["robustness_index"]
    meaning = (
        "among the 10 nearest images: same class and other domain, against other class and same domain; 1: neighbours "
        "share the class, 0: they share the domain"
    )
    yield "robustness index", EMPTY if index is None else f"{index:z.2f}", meaning
    yield "neighbours of the same domain", _percent(part["same_domain_share"]), "share of the 10 nearest images"
    chance = "" if part["domain_chance"] is None else f" (chance: {_percent(part['domain_chance'])})"
    right = _percent(part["domain_accuracy"]) + chance
    yield "domain predicted with", right, "100%: the features tell all domains apart"
    halves = part["aligned"]
    if halves is not None:
        remark = "of {} images; {}"
        for half, words in (("aligned", "known beforehand"), ("unaligned", "not known beforehand")):
            meaning = remark.format(count_text(halves[f"images_{half}"]), halves["how"])
            yield f"accuracy on images {words}", _percent(halves[f"accuracy_{half}"]), meaning


FINDINGS = {
    "copies": _copies, "domain_pairs": _twins, "labels": _labels, "site_class": _site_class, "encoder": _encoder,
}  # fmt: skip


def headline(made: Iterable[AuditFinding]) -> str:
    """Returns in a sentence what was found."""
    made = [finding for finding in made if finding.kind != "encoder"]
    faults, unseen = (
        [NAMES[finding.kind] for finding in made if is_so(finding.rank)]
        for is_so in (lambda rank: rank > UNSEEN, lambda rank: rank == UNSEEN)
    )
    text = f"Found: {', '.join(faults)}." if faults else "Nothing was found."
    return text + (f" Not decided: {', '.join(unseen)}." if unseen else "")


def cost_words(cost: Json) -> str:
    """Returns what a finding costs as a line."""
    start = f"{plural(cost['images'], 'image')} {cost['what']}"
    if cost["before"] is None or cost["after"] is None:
        return f"{start}: {cost['note'] or cost['verdict']}"
    before, after = (_percent(cost[key]) for key in ("before", "after"))
    ends = "" if cost["interval"] is None else f" (95%: {between('accuracy', cost['interval'], True)} points)"
    why = f" ({cost['note']})" if cost["p"] is None and cost["note"] else ""
    random = "" if cost["matched"] is None else f"; without as many random ones {_percent(cost['matched'])}"
    return f"{start}: {metric_words(cost['metric'])} {before} → {after}{random}{ends}, {cost['verdict']}{why}"


def audit_lines(audit: Json) -> list[str]:
    """Returns the lines for a terminal: what was found, worst first, what it costs, and what to do next."""
    made = findings(audit)
    sizes = f"{count_text(audit['images'])} images, {plural(len(audit['domains']), 'domain')}"
    lines = [f"{audit['name']}: {sizes}, {plural(len(audit['classes']), 'class')}. {headline(made)}", ""]
    for finding in made:
        lines.append(f"{finding.name}: {finding.what}")
        lines += [f"  cost: {cost_words(cost)}" for cost in finding.costs]
        lines += [f"  → {finding.remedy}"] if finding.remedy else []
    if any(finding.costs for finding in made):
        lines += ["", COSTS.format(audit["heads"])]
    return [*lines, *(f"Note: {note}" for note in audit["notes"])]


# ------------------------------------------------------------------------------------------------------------- sections


def audit(run: Run) -> list[Section]:
    """The sections of a run; none if it was not audited."""
    return [] if run.audit is None else list(audit_sections(run.audit, run.recipe.report.images))


def audit_markdown(audit: Json) -> str:
    """Returns the text of audit.md."""
    title = escape_markdown(f"Audit of {audit['name']}")
    return "\n".join([f"# {title}", "", *markdown_lines(audit_sections(audit, files=True))])


def audit_sections(audit: Json, files: bool) -> Iterator[Section]:
    """Yields the findings with what they cost, then a section for each kind. `files`: show the names of images."""
    made = findings(audit)
    rows = [cells(finding.name, finding.what, finding.remedy) for finding in made]
    header = ["what", "what was found", "what to do"]
    tables = [Table("What was found, the worst first.", header, rows, labels=3, sortable=False, folded=True)]
    costs = [(finding, cost) for finding in made for cost in finding.costs]
    if costs:
        tables.append(_costs_table(costs))
    encoder = audit["encoder"]
    sizes = f"{count_text(audit['images'])} images of {plural(len(audit['domains']), 'domain')}"
    yield make_section(
        "audit",
        tables=tables,
        notes=audit["notes"],
        headline=headline(made),
        images=sizes + (f"; {audit['unreadable']} cannot be read" if audit["unreadable"] else ""),
        features="" if encoder is None else f", by features of {encoder['label']}",
        costs=f" {COSTS.format(audit['heads'])} Holm's p is corrected for the costs of a kind." if costs else "",
    )
    for kind, details in DETAILS.items():
        if audit[kind] is not None:
            yield details(audit[kind], files)


def _costs_table(costs: Sequence[tuple[AuditFinding, Json]]) -> Table:
    rows = []
    for finding, cost in costs:
        accuracies = [metric_cell(cost[key], "accuracy") for key in ("before", "after", "matched")]
        numbers = cost["images"], *accuracies, _change(cost["excess"], cost["interval"], signed=True)
        rows.append(cells(finding.name, cost["what"], *numbers, p_value(cost["p_holm"]), _verdict(cost)))
    header = ["what", "its images", "images", "before", "after", "without as many others", "more than these (95%)"]
    metrics = dict.fromkeys(metric_words(cost["metric"]) for _, cost in costs if cost["before"] is not None)
    metric = " or ".join(metrics) or "accuracy"
    caption = f"What the findings cost: {metric} on held-out domains in %, and its difference to others in points."
    return Table(caption, [*header, "p (Holm)", "verdict"], rows, labels=2, folded=True)


def _change(value: float | None, interval: Sequence[float] | None, signed: bool = False) -> Cell:
    """Returns a cell of points or percent, with the interval below."""
    if value is None:
        return Cell(EMPTY)
    ends = "" if interval is None else f"({between('accuracy', interval, signed)})"
    return Cell(scale(value, "accuracy", signed), value, ends)


def _verdict(row: Json) -> str:
    verdict, note = row["verdict"], row["note"] or ""
    return note if note.startswith(verdict) else f"{verdict}: {note}" if note else verdict


def _some(shown: int, of: int, things: str, file: str) -> str:
    """Returns the end of a caption: how many are shown, and where all are."""
    return f" The first {shown} of {of} {things}; all: {file}." if shown < of else ""


def copies_details(part: Json, files: bool) -> Section:
    """The pairs of copies."""
    pairs, rows = part["pairs"][:MAX_LISTED], []
    for pair in pairs:
        names = [pair["first"], pair["second"]] if files else []
        both = [" / ".join(dict.fromkeys(pair[f"{side}_{of}"] for side in SIDES)) for of in ("domain", "class")]
        numbers = [Cell(f"{pair[key]:.3f}", pair[key]) for key in ("score", "cosine")]
        yes = ["yes" if pair[key] else "no" for key in ("sure", "straddles")]
        rows.append(cells(*names, *both, *yes, *numbers))
    header = [*(["first", "second"] if files else []), "domain", "class", "copy", "in training and test"]
    caption = "The most similar pairs of images, those in training and test first."
    caption += _some(len(pairs), part["listed"], "pairs", "copies.csv")
    tables = [Table(caption, [*header, "score", "cosine"], rows, labels=len(header))] if rows else []
    return make_section("audit-copies", tables=tables, notes=_where(files, "copies.csv" if rows else ""))


def _where(files: bool, file: str) -> list[str]:
    """Returns the note on where the names of images are, unless they are shown or there is no file."""
    return [] if files or not file else [NO_FILES.format(file)]


def twins_details(part: Json, files: bool) -> Section:
    """In which other domain the nearest images lie, and what a domain loses without another one."""
    names, shares, tables = part["names"], np.nan_to_num(_nearest(part)), []
    if 1 < len(names) <= MAX_DOMAINS:
        rows = []
        for i, of_row in enumerate(shares):
            numbers = [metric_cell(None if i == j else float(share), "accuracy") for j, share in enumerate(of_row)]
            rows.append(cells(names[i], *numbers))
        caption = "Of the images of a row, the share in % whose nearest image of another domain lies in the column."
        tables.append(Table(caption, ["images of", *names], rows))
    elif len(names) > 1:
        most, nearest = shares.max(axis=1), shares.argmax(axis=1)
        worst = np.argsort(-most, kind="stable")[:MAX_DOMAINS]
        rows = [cells(names[i], names[nearest[i]], metric_cell(float(most[i]), "accuracy")) for i in worst]
        caption = "Where the nearest image of another domain lies most often, and for how many images in %."
        caption += _some(len(rows), len(names), "domains", "audit.json")
        tables.append(Table(caption, ["images of", "nearest in", "share in %"], rows, labels=2))
    order = sorted(part["left_out"], key=lambda row: (row["verdict"] != "worse", -(row["excess"] or 0)))
    rows = []
    for row in order[:MAX_PAIRS]:
        accuracies = [metric_cell(row[key], "accuracy") for key in ("accuracy", "accuracy_without", "accuracy_matched")]
        changes = _change(row["loss"], row["loss_interval"]), _change(row["excess"], row["interval"])
        p = p_value(row["p_holm"])
        rows.append(cells(row["domain"], row["without"], *accuracies, *changes, p, _verdict(row)))
    if rows:
        header = ["held out", "left out too", "accuracy", "without it", "without as many others", "loss (95%)"]
        caption = "Accuracy in % on a held-out domain if another domain does not train either; losses in points."
        caption += _some(len(rows), len(order), "pairs", "audit.json")
        tables.append(Table(caption, [*header, "more than expected (95%)", "p (Holm)", "verdict"], rows, labels=2))
    return make_section("audit-twins", _heat_map(part), tables, [part["note"]] if part["note"] else [])


def _nearest(part: Json) -> np.ndarray:
    """Returns the shares of the nearest foreign images, NaN on the diagonal: [D,D]."""
    return np.array(part["nearest"], float).reshape(len(part["names"]), len(part["names"]))


def _heat_map(part: Json) -> list[Figure]:
    if not 2 <= len(part["names"]) <= MAX_DRAWN:
        return []
    names, shares = part["names"], np.nan_to_num(_nearest(part))
    nearest = zip(names, shares.max(axis=1), shares.argmax(axis=1), strict=True)
    most = [f"of {name} {_percent(share)} in {names[there]}" for name, share, there in nearest]
    title, axes = "nearest foreign image", ("lies in", "images of")
    alt = f"Where the nearest image of another domain lies most often: {join_names(most)}."
    caption = "Share of the images of a row in %. Twin domains hold most of each other's."
    return [heat_maps("audit-nearest", alt, {title: shares}, names, axes_labels=axes, caption=caption)]


def labels_details(part: Json, files: bool) -> Section:
    """The images whose labels look wrong, and which classes are confused in labels."""
    images, tables = part["images"][:MAX_LISTED], []
    if images:
        keys = [*(["path"] if files else []), "domain", "label", "suggested"]
        rows = [cells(*(image[key] for key in keys), Cell(f"{image['score']:.3f}", image["score"])) for image in images]
        caption = "Labels that the heads contradict, the worst first."
        caption += _some(len(rows), part["suspects"], "images", "labels.csv")
        tables.append(Table(caption, [*keys, "score"], rows, labels=len(keys)))
    if part["confused"]:
        rows = [cells(pair["label"], pair["suggested"], pair["images"]) for pair in part["confused"][:MAX_LISTED]]
        tables.append(Table("Classes that are confused in labels.", ["label", "suggested", "images"], rows, labels=2))
    return make_section("audit-labels", tables=tables, notes=_where(files, "labels.csv" if images else ""))


def site_class_details(part: Json, files: bool) -> Section:
    """Shares of the classes in each domain, and what facts about the files tell."""
    counts = np.array(part["counts"], float).reshape(len(part["domains"]), len(part["classes"]))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    # the domains that differ most from all images together, and the classes whose shares differ most
    apart = np.abs(shares - counts.sum(0) / max(counts.sum(), 1)).sum(1)
    spread = np.ptp(shares, axis=0) if len(counts) else np.empty(0)
    domains = sorted(np.argsort(-apart, kind="stable")[:MAX_DOMAINS])
    classes = sorted(np.argsort(-spread, kind="stable")[:MAX_CLASSES])
    rows = []
    for d in domains:
        of_classes = [metric_cell(float(shares[d, c]), "accuracy") for c in classes]
        rows.append(cells(part["domains"][d], int(counts[d].sum()), *of_classes))
    caption = "Share of the classes in each domain, in %."
    if len(domains) < len(counts) or len(classes) < len(part["classes"]):
        most = f"{len(domains)} of {len(counts)} domains and {len(classes)} of {len(part['classes'])} classes"
        caption += f" {most}, those that differ most; all: audit.json."
    header = ["domain", "images", *(part["classes"][c] for c in classes)]
    tables = [Table(caption, header, rows)] if rows else []
    facts = _worst_facts(part)
    if facts:
        rows = []
        for fact in facts[:MAX_FACTS]:
            right = _change(fact["accuracy"], fact["interval"])
            numbers = right, metric_cell(fact["chance"], "accuracy"), p_value(fact["p_holm"])
            position = fact["domain"] or "all domains"
            rows.append(cells(fact["facts"], fact["predicts"], position, *numbers, "yes" if fact["found"] else "no"))
        header = ["facts", "predict", "in", "accuracy in % (95%)", "chance in %", "p (Holm)", "beyond chance"]
        caption = "What facts about the files alone tell, by a classifier that sees no pixels."
        tables.append(Table(caption + _some(len(rows), len(facts), "facts", "audit.json"), header, rows, labels=3))
    if part["marks"]:
        rows = []
        for mark in part["marks"][:MAX_FACTS]:
            shares = [metric_cell(mark[key], "accuracy") for key in ("share", "low", "elsewhere")]
            rows.append(cells(mark["kind"], mark["domain"], mark["class"], *shares, "yes" if mark["found"] else "no"))
        header = ["what", "in", "class", "picked out in %", "at least (95%)", "elsewhere", "only here"]
        caption = "Images of a class that low-level features pick out, with 1% of the others as false alarms."
        tables.append(Table(caption, header, rows, labels=3))
    sentences = join_names(part["sentences"], MAX_SENTENCES, " ")
    notes = [sentences] if sentences else []
    return make_section("audit-site-class", tables=tables, notes=notes, strength=_strength(part))


def encoder_details(part: Json, files: bool) -> Section:
    """What the features know of domains, and whether the encoder knows the images beforehand."""
    rows = [cells(*row) for row in _encoder_rows(part)]
    table = Table(f"Features of {part['label']}.", ["what", "value", "meaning"], rows, labels=3, sortable=False)
    return make_section("audit-encoder", tables=[table], notes=[part["note"]])


DETAILS = {
    "copies": copies_details, "domain_pairs": twins_details, "labels": labels_details,
    "site_class": site_class_details, "encoder": encoder_details,
}  # fmt: skip
