"""Golden documents of the three runs, and names that must stay text in each kind of document."""

from __future__ import annotations

import copy
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from canned_runs import ALPHAS, HELD, curves_of, run_in_memory
from example_runs import assert_golden, comparison, encoder_about, model, results_of, run_of, two_sets
from hypothesis import example as example_of
from hypothesis import given, settings
from hypothesis import strategies as st

from xdm_ft.report import TEXTS, Section, Table, cells
from xdm_ft.report.headline import show_headline
from xdm_ft.report.markup import as_text, escape_latex, latex, markdown, markdown_lines
from xdm_ft.report.sections import AFTER_THE_TABLES, brief_sections, sections, selection, table_sections
from xdm_ft.report.sections.about import GLOSSARY, NEEDS, how_to_read
from xdm_ft.report.sections.results import intervals
from xdm_ft.results.run import Run
from xdm_ft.results.table import InterimLook
from xdm_ft.runtime.terminal import write


def figures(run: Run) -> str:
    """What figures say to those who do not see them."""
    shown = [figure for section in sections(run) for figure in section.figures]
    return "".join(f"{figure.name}\n  {figure.alt}\n  {figure.caption}\n" for figure in shown)


DOCUMENTS: dict[str, Callable[[Run], str]] = {
    "md": lambda run: markdown(run, (brief_sections if run.path.name == "example" else sections)(run)),
    "figures.txt": figures,
    "tex": lambda run: latex(table_sections(run, run.rules)),
    "txt": lambda run: as_text(table_sections(run, run.rules), io.StringIO()),
}


def with_heads() -> Run:
    """Curves of heads that trained together, and of one model that stopped early."""
    made = run_in_memory(["erm", "sam"], HELD[:1])
    summaries = curves_of(made, heads=True)
    sam = [name for name in made.scalars if name.startswith("sam")]
    early = {"train/loss": [(50, 4.0)], "val/accuracy": [(100, 0.5), (200, 0.5)]}
    later = {"val/accuracy": [(100, 0.6), (200, 0.7), (300, 0.9)]}
    of_erm = {name: scalars for name, scalars in summaries.items() if name.startswith("erm")}
    made.__dict__["scalars"] = of_erm | dict(zip(sam, (early, later), strict=True))
    return made


def on_a_frozen_encoder() -> Run:
    """All methods have the same features, and fitted domain heads are equal: they share bars and figures."""
    made = run_in_memory(("erm", "sam", "xdomainmix"), seeds=(0,), **FROZEN)
    models = made.analysed()
    for one in models:
        one["representation_invariance"] = {"paper": 2.5, "published_code": 0.1}
    for first, second in zip(models[:2], models[2:4], strict=True):
        second["importance"]["class"] = first["importance"]["class"]
        first["importance"]["domain"] = second["importance"]["domain"] = first["importance"]["class"]
    return made


def searched_widely() -> Run:
    space = {"lr": {"log_uniform": [1e-3, 2e-3]}, "weight_decay": {"uniform": [0, 1]}}
    made = run_in_memory(["xdomainmix+sam"], HELD[:1], [0], trials=20, search={"trials": 3, "space": space})
    for record in made.records:
        record.hparams["lr"] = 1e-3 * (1 + record.trial / 10)
        record.hparams["kind"] = f"kind{record.trial:02d}"
    return made


def with_costs(rule: str) -> Run:
    """Model number i has i seconds and i MB; of xdomainmix the memory is unknown."""
    runs = [entry | {"train_seconds": float(i), "trained_parameters": 1000} for i, entry in enumerate(two_sets())]
    for i, entry in enumerate(runs[:4]):
        entry["peak_memory"] = i * 10**6
    results = results_of(runs, protocol={"selection": rule, "metric": "accuracy"})
    costs = {"tiny": encoder_about("tiny"), "x": encoder_about("x", ms_per_image=None, robustness_index=None)}
    results["environment"]["encoders"] = costs
    for entry in results["runs"]:
        entry["selected"] = {rule: entry["selected"]["train_val"] | {"value": 0.9}}
    results["summary"] = [row | {"selection": rule} for row in results["summary"]]
    return run_of(results)


def with_hyper_parameters() -> Run:
    """The second trial is picked for seed 0 of b, else the first; a solver and many trials."""
    runs = []
    for method in ("erm", "xdomainmix"):
        for held, seed, trial in ((held, seed, trial) for held in "ab" for seed in (0, 1) for trial in (0, 1)):
            hparams = {"lr": (0.001, 0.0123456)[trial], "p_discard": 0.1 if method == "erm" else [0.1, trial]}
            value = 0.9 if trial == ((held, seed) == ("b", 0)) else 0.5
            runs.append(model(method, (held,), seed, trial=trial, hparams=hparams, value=value))
    for held, seed in ((held, seed) for held in "ab" for seed in (0, 1)):  # steps of epochs are no search
        steps, strength = {"steps": {"a": 1, "b": 2}[held]}, {"strength": 0.1 * (seed + 1)}
        runs.append(model("linear_probe", (held,), seed, hparams=steps, picked=strength))
    many = [(held, seed, trial) for held in "ab" for seed in range(5) for trial in (0, 1)]
    runs += [model("sam", (held,), s, trial=t, hparams={"lr": (s + 1) / 1000 + t}) for held, s, t in many]
    return run_of(results_of(runs))


FROZEN: dict[str, Any] = {"data": {"name": "pacs", "root": "data"}, "encoder": {"model": "vit", "trainable": False}}
ALIKE: dict[str, Any] = FROZEN | {"encoder": {"model": "resnet50.tv_in1k", "trainable": True}}
VARIANTS: dict[str, Callable[[], Run]] = {
    "heads": with_heads,
    "frozen": on_a_frozen_encoder,
    "published": lambda: run_in_memory(seeds=(0,), **ALIKE),
    "wide": searched_widely,
    "loss": lambda: run_in_memory(["erm", "wise_ft"], seeds=(0,), alphas=ALPHAS, metric="nll"),
    "cheating": lambda: run_in_memory(["erm", "wise_ft"], trials=3, alphas=ALPHAS, selection="oracle"),
    "selected": with_hyper_parameters,
    "costs": lambda: with_costs("train_val"),
    "costs-of-oracle": lambda: with_costs("oracle"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_golden_variants(name: str) -> None:
    """Tables and what figures say of runs that differ in what they measured."""
    run = VARIANTS[name]()
    panels = [] if run.path.name == "example" else AFTER_THE_TABLES  # a run without predictions
    shown = [*table_sections(run, run.rules), *(section for panel in panels if (section := panel(run)))]
    figures = [f"{figure.name}: {figure.alt} {figure.caption}" for section in shown for figure in section.figures]
    assert_golden(f"{name}.txt", "\n".join([*markdown_lines(shown), *figures]))


def test_drawn_values_of_a_search() -> None:
    """Names beyond the eighth are others; names with $ are no formulas."""
    section = selection.search(searched_widely())
    assert section is not None
    svg = section.figures[-1].svg().partition(">")[2]  # without what the pointer shows
    assert "kind06" in svg and "kind07" not in svg and "others" in svg
    assert "$" not in section.figures[1].svg() and "mathdefault" not in section.figures[1].svg()


NAMES = ("example.md", "example.tex", "example.txt", "run.md", "run.figures.txt", "searched.md", "searched.figures.txt")


@pytest.mark.parametrize("name", NAMES)
def test_golden_documents(name: str, request: pytest.FixtureRequest) -> None:
    """Every number, note, caption and order."""
    run, _, kind = name.partition(".")
    assert_golden(name, DOCUMENTS[kind](request.getfixturevalue(run)))


def test_every_section_keeps_to_its_form(run: Run, searched: Run) -> None:
    shown = [list(sections(run)), list(sections(searched))]
    for every in shown:
        assert len(every) >= 10 and len({section.id for section in every}) == len(every)
        drawn = [figure for section in every for figure in section.figures]
        assert all(re.fullmatch(r"[a-z][a-z0-9_-]*", figure.name) and figure.alt for figure in drawn)
        for section in every:
            assert section.about
            assert all({len(row) for row in table.rows} == {len(table.header)} for table in section.tables)
    elsewhere = {"runs", "between", "metrics-of-runs", "further", "encoders-compared", "published", "mistakes"}
    elsewhere |= {"training"}  # of the page alone
    elsewhere |= {text for text in TEXTS if text.startswith("audit")}  # tested with other runs
    ids = {section.id.removesuffix("-oracle") for every in shown for section in every}
    assert set(TEXTS) - elsewhere <= ids | {"selected"}, "a text that no section has"


def document(results: dict[str, Any]) -> str:
    run = run_of(results)
    return markdown(run, brief_sections(run))


def table(results: dict[str, Any], id_: str, number: int = 0) -> list[list[str]]:
    """The header and the rows of a table."""
    run = run_of(results)
    [shown] = [section.tables[number] for section in table_sections(run, run.rules) if section.id == id_]
    return [list(shown.header), *([cell.text for cell in row] for row in shown.rows)]


def printed(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """What a terminal shows, without colours."""
    run = run_of(results)
    write(as_text(table_sections(run, run.rules), sys.stdout))
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


def test_the_oracle_is_marked_wherever_it_shows(
    results: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = "selection: oracle — CHEATING: the step was picked on test-domain images; not a result"
    before, after = document(results).split(f"## Results, {mark}")
    assert before.count("oracle") == 0 and "| method (oracle) | art | sketch | mean ± stderr (oracle) |" in after
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("NO_COLOR", "1"), ("COLUMNS", "90")):
        monkeypatch.setenv(name, value)
    before, after = printed(results, capsys).split("selection: oracle — CHEATING", 1)
    headers = [line for line in after.splitlines() if "method" in line and line.startswith("┃")]
    assert len(headers) > 1  # every block of columns says it
    assert all("method (oracle)" in line for line in headers) and "oracle" not in before
    results["summary"].reverse()
    for own, other in (("train_val", "oracle"), ("oracle", "train_val")):
        results["recipe"]["protocol"] |= {"selection": own}
        headings = re.findall(r"^## Results, selection: (\w+)", document(results), re.MULTILINE)
        assert headings == [own, other], "the recipe's own rule comes first"
    assert "the recipe's rule" not in document(results) and table(results, "metrics")[0][0] == "method (oracle)"


@pytest.mark.parametrize("key", ["protocol", "metric", "split", "spread_as_published"])
def test_no_column_mixes_what_differs(results: dict[str, Any], key: str) -> None:
    results["summary"] = results["summary"][:5]
    other = {"metric": "nll", "spread_as_published": {"kind": "of WILDS", "value": 0.01}}.get(key, "another")
    results["summary"][1][key] = other
    assert [row[0] for row in table(results, "results", 1)[1:]] == ["erm"]
    assert len(table(results, "results")[1:]) == 4


def test_losses_are_no_percentages_one_seed_has_no_error_and_nothing_may_be_trained(results: dict[str, Any]) -> None:
    for row in results["summary"]:
        row["metric"] = "nll"
    assert [row[3] for row in table(results, "results") if row[0] == "erm"] == ["0.510 ± 0.010"]
    assert "| numbers | NLL on test images" in document(results)
    for row in results["summary"]:
        row["stderr"] = None  # one seed
    assert table(results, "results")[0][3] == "mean"
    results["summary"] = results["runs"] = []
    assert "No model has been trained yet." in document(results)


def test_names_are_text(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for row in results["summary"]:
        row["per_test_domain"] = {"\x1b[31m<b>|*x*": row["per_test_domain"].get("art", {"mean": None, "std": None})}
        row["protocol"] = "data\n\n# not a title [link](x) [red]no markup[/red]"
    text = document(results)
    assert "\x1b" not in text and "\n# not a title" not in text and text.startswith("# pets\\_\\*demo\\*\n")
    assert "| method | \\\\x1b\\[31m\\<b\\>\\|\\*x\\* ± stderr |" in text
    for lines in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.replace("\\|", "").count("|") for line in lines.splitlines()}) == 1
    shown = printed(results, capsys)
    assert "\x1b" not in shown and "[red]no markup[/red]" in shown


def test_tables_fit_what_they_are_printed_to(
    results: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"a domain with the long name {i}" for i in range(8)]
    wide = copy.deepcopy(results)
    for row in wide["summary"]:
        row["per_test_domain"] = {name: {"mean": 0.1371, "std": None} for name in names}
    piped = printed(wide, capsys)
    headers = [line for line in piped.splitlines() if line.startswith("┃ method")]
    assert max(map(len, headers)) <= 120 and all(any(name in line for line in headers) for name in names)
    assert piped.count("13.7 │") == 2 * 5 * 8 and "…" not in piped
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    for width in (50, 80, 300):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = printed(results, capsys).splitlines()
        assert max(len(line) for line in lines) <= width
        titles = "".join(line for line in lines if line.startswith("┃"))
        assert titles.count("draws × gradients") == titles.count("p elsewhere (Holm)") == 2
        assert len([line for line in lines if line.startswith("┃ method")]) > (20 if width == 50 else 4)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.delenv("FORCE_COLOR")
    run = run_of(results)
    write(as_text(table_sections(run, run.rules), sys.stdout))
    show_headline(run)
    sys.stdout.flush()
    assert written.getvalue().count(rb"58.0 \xb1 1.0") == 6


def test_only_what_the_tables_need_is_explained(results: dict[str, Any]) -> None:
    every = {word for words in GLOSSARY.values() for word in words}
    assert set(NEEDS) <= {*GLOSSARY, *every} and len(NEEDS) > 8
    whole = how_to_read(run_of(results))
    assert next(iter(whole)) == "numbers" and whole["oracle"] == GLOSSARY["selection"]["oracle"]
    assert every - set(whole) == {
        "val_domain", "cross_domain", "selected hyper-parameters", "published numbers", "at the edge of its range",
            "held out together",
        "trained parameters", "peak memory", "METHOD @ ENCODER", "first − second",
        "robustness index", "equal within", "look",
        *(word for group in ("training", "data", "shipping", "labels", "analysis") for word in GLOSSARY[group]),
    }  # fmt: skip
    results["summary"] = [row for row in results["summary"] if row["method"] == "erm" and row["selection"] != "oracle"]
    results["runs"] = [run | {"trial": 1} for run in results["runs"] if run["method"] == "erm"]
    results["recipe"]["report"] |= {"margin": 1.0}
    look = InterimLook([], [], {}, 0.05).to_json()
    results |= {"comparisons": [], "looks": [look, look]}
    less = set(how_to_read(run_of(results)))
    assert less & {"selected hyper-parameters", "at the edge of its range"} and "mean ±" in less
    gone = {*GLOSSARY["comparison"], *GLOSSARY["verdicts"], "oracle", "mixed steps", "failed, skipped"}
    assert len(gone) > 10 and not less & gone
    results["comparisons"] = [comparison("sam").to_json()]
    assert {"equal within", "look", "95% here", "no verdict"} <= set(how_to_read(run_of(results)))
    results["summary"] = []
    assert how_to_read(run_of(results)) == {}


# --------------------------------------------------------------------------------------------------------------- LaTeX

HOSTILE = [
    "\\end{tabular}", "\\input{/etc/passwd}", "$x$", "a & b", "#1", "100%", "a_b", "^^5c", "~",
    "<script>alert(1)</script>", "|", '"q"', "`` ''", "[x]", "*", "a--b", "-1.3 to -0.2", "\\\\", "}", "{",
    "line\nbreak", "\x1b[31m", "%\n", "± × √ α − – — … →",
]  # fmt: skip
SPECIAL = re.compile(r"\\(?:textbackslash|textasciicircum|textasciitilde|textless|textgreater|textbar|textquotesingle|"
                     r"textasciigrave|textendash|textemdash|ldots|char34)\{\}|\\[{}$&#%_]|\{[\[\]*]\}|-\{\}|"
                     r"\$(?:\\pm|\\times|\\surd|\\alpha|\\rightarrow|-)\$")  # fmt: skip


@settings(max_examples=60)
@given(st.text() | st.lists(st.sampled_from([*HOSTILE, *"\\{}$&#%_^~"])).map("".join))
@example_of("".join(HOSTILE))
def test_nothing_in_a_name_is_a_command(name: str) -> None:
    assert not set(SPECIAL.sub("", escape_latex(name))) & set('\\{}$&#%_^~<>|"`[]*\n')


def test_text_and_numbers() -> None:
    pairs = {
        "sam_wide 5%": r"sam\_wide 5\%", "-1.3 to -0.2": "$-$1.3 to $-$0.2", "ViT-16": "ViT-16",
        "58.0 ± 1.0": r"58.0 $\pm$ 1.0", "–": r"\textendash{}", "a--b": "a-{}-b",
        "\u202eabc": r"\textbackslash{}u202eabc",
    }  # fmt: skip
    assert {text: escape_latex(text) for text in pairs} == pairs


def test_a_table_for_a_paper(run: Run) -> None:
    """One sentence, a label of its own, the interval of each mean; what else there is to say stands in comments."""
    text = latex(table_sections(run, run.rules, with_intervals=True))
    captions, labels = re.findall(r"\\caption\{(.*)\}\n", text), re.findall(r"\\label\{(.*)\}\n", text)
    assert len(captions) == len(labels) == len({*labels}) == text.count(r"\begin{table}") >= 4
    assert labels[0] == "tab:xdm-ft-results" and {"tab:xdm-ft-differences", "tab:xdm-ft-cost"} < {*labels}
    domains = "art, photo, sketch"
    assert captions[0] == (
        rf"Test accuracy in \% of 4 methods on domains never trained on ({domains}): mean $\pm$ standard error over 3 "
        r"seeds, selection: train\_val."
    )
    assert all(". " not in caption and len(caption) < 250 for caption in captions)
    first = text.partition(r"\end{table}")[0]
    assert "\n% Protocol: made up; step picked by train_val\n" in first
    section = intervals(run)
    assert section is not None
    rows = dict(re.findall(r"^    (\w+) & .* & ([\d.]+ to [\d.]+) \\\\$", first.replace(r"\_", "_"), re.MULTILINE))
    assert rows == {row[0].text: row[1].text for row in section.tables[0].rows} and len(rows) == 4
    assert "95" not in latex(table_sections(run, run.rules)).partition(r"\end{table}")[0]
    assert "use LuaLaTeX" not in text, "it is about what is printed, and not about comments"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no LaTeX")
def test_it_compiles(tmp_path: Path) -> None:
    every = " ".join(HOSTILE)
    rows = [cells(name, name) for name in HOSTILE]
    section = Section("id", every, every, tables=[Table(every, ("method", HOSTILE[0]), rows)], notes=HOSTILE)
    lines = [r"\documentclass{article}", *(rf"\def\{rule}rule{{\hline}}" for rule in ("top", "mid", "bottom"))]
    text = "\n".join([*lines, r"\begin{document}", latex([section]), r"\end{document}", ""])
    (tmp_path / "table.tex").write_text(text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "table.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:]
