"""The sentence and the last screen: no claim beyond the verdicts, everything fits the terminal, names are text."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from example_runs import assert_golden, beside_zero_shot, comparison, made_run
from scipy.stats import t

from xdm_ft.report.headline import details, sentence, show_headline
from xdm_ft.results.run import Run
from xdm_ft.results.table import NO_VERDICT, UNDECLARED

FOUR = {
    "erm": {"art": 0.6, "photo": 0.7, "real": 0.66, "sketch": 0.6},
    "mix": {"art": 0.62, "photo": 0.72, "real": 0.66, "sketch": 0.6},
    "sam": {"art": 0.7, "photo": 0.8, "real": 0.7, "sketch": 0.7},
}
PACS = {"art_painting": 0.67, "cartoon": 0.53, "photo": 0.93, "sketch": 0.41}
METHODS = ("erm", "xdomainmix", "xdomainmix+sam", "groupdro", "coral", "mixup")
SIX = {name: {domain: value + i / 100 for domain, value in PACS.items()} for i, name in enumerate(METHODS)}
FEW = "no verdict: it needs 3 seeds, and 2 are complete"
BOTH = ("small", "large")
UNDER_BOTH = {f"{name} @ {encoder}": FOUR[name] for encoder in BOTH for name in FOUR}
MIX = comparison("mix @ small", "mix @ large", -0.031, "worse", "worse")
FIVE = [f"e{i}" for i in range(5)]
UNDER_FIVE = {f"erm @ {encoder}": FOUR["erm"] for encoder in FIVE}
PAIRS = [
    comparison("erm @ e0", f"erm @ {other}", 0.1, word)
    for other, word in zip(
        FIVE[1:], ("better", "no clear difference", "no clear difference", "no verdict"), strict=True
    )
]
LOSSES = {"erm": {"a": 0.7, "b": 0.75}, "mix": {"a": 0.62, "b": 0.67}}


def under_both(chosen: str, **changes: object) -> Run:
    """`changes` of the comparison of two encoders under mix."""
    pair = dataclasses.replace(MIX, **changes)  # type: ignore[arg-type]
    return made_run(UNDER_BOTH, chosen_by={chosen: 0.99}, encoders=BOTH, further=[pair])


def only(*domains: str) -> dict[str, dict[str, float]]:
    return {method: {domain: values[domain] for domain in domains} for method, values in FOUR.items()}


def against_another_erm() -> Run:
    made = made_run(FOUR, chosen_by={"erm": 0.99})  # a method at a cut is not counted against another erm
    made.results["comparisons"][1]["second"] = "erm 2"
    return made


def declaring(*pairs: tuple[str, str]) -> Run:
    """A run that declares these comparisons alone; mix is the choice."""
    made = made_run(FOUR, chosen_by={"mix": 0.9}, verdicts=dict.fromkeys(FOUR, NO_VERDICT), note=UNDECLARED)
    declared = [comparison(*pair, 0.05, "better").to_json() for pair in pairs]
    made.results["comparisons"] = [*declared, *made.results["comparisons"]]
    return made


def some_declared() -> Run:
    """Of three other methods two were compared with mix, the choice."""
    made = made_run(FOUR | {"lisa": FOUR["sam"]}, chosen_by={"mix": 0.9}, verdicts=dict.fromkeys(FOUR, NO_VERDICT))
    made.results["comparisons"] = [
        comparison(name, "mix", 0.01, "no clear difference").to_json() for name in ("sam", "erm")
    ]
    return made


def with_images(rule: str, **images: list[int]) -> Run:
    made = made_run(FOUR, rule=rule, chosen_by={"erm": 0.5, "mix": 0.599, "sam": 0.4})
    made.results["data"] = {"images": {name: [10] for name in FOUR["mix"]} | images}
    return made


def of_classes(of_erm: dict[str, float], images: list[int], images_of_d: list[int] | None = None) -> Run:
    made = made_run({"erm": of_erm}, metric="balanced_accuracy")
    made.results["data"]["images"] = {name: images for name in of_erm} | {"d": images_of_d or images}
    return made


SENTENCES = {
    "the choice of validation, not the best test value": made_run(FOUR, chosen_by={"erm": 0.8, "mix": 0.9, "sam": 0.7}),
    "better here": made_run(FOUR, verdicts={"sam": "better"}),
    "better here and elsewhere": made_run(FOUR, verdicts={"sam": "better, better"}),
    "worse here and elsewhere": made_run(FOUR, verdicts={"sam": "worse, worse"}),
    "too few seeds": made_run(FOUR, seeds=2, verdicts=dict.fromkeys(FOUR, "no verdict"), note=FEW),
    "erm is the choice": made_run(FOUR, chosen_by={"erm": 0.9}, verdicts={"sam": "better"}),
    "erm is the choice, nothing is clear": made_run(FOUR, chosen_by={"erm": 0.9}),
    "erm is the choice, one other": made_run({name: FOUR[name] for name in ("erm", "mix")}, chosen_by={"erm": 0.9}),
    "another erm": against_another_erm(),
    "a pair is declared": declaring(("sam", "mix")),
    "a pair without the choice is declared": declaring(("sam", "erm")),
    "pairs without the choice are declared": declaring(("sam", "erm"), ("erm", "sam")),
    "two of three others are declared": some_declared(),
    "a pair between encoders is declared": declaring(),
    "one held-out domain": made_run(only("sketch"), verdicts={"sam": "better"}),
    "one method": made_run({"erm": {"sketch": 0.6}}),
    "not unseen": made_run(FOUR, tested_on="domains that are also trained on, none of them unseen"),
    "one set of two domains": made_run(FOUR, sets=[("art", "photo")]),
    "two held-out domains": made_run(only("art", "photo")),
    "wide intervals": made_run({"erm": {"a": 0.1, "b": 0.9, "c": 0.5}}),
    "one more domain": with_images("cross_domain"),
    "one more domain, one never held out": with_images("cross_domain", rest=[10]),
    "one more domain, another rule": with_images("train_val"),
    "nll, lower": made_run(LOSSES, metric="nll", verdicts={"mix": "better"}, chosen_by={"erm": 0.7, "mix": 0.6}),
    "nll, higher": made_run({"erm": LOSSES["mix"], "mix": LOSSES["erm"]}, metric="nll", chosen_by={"mix": 0.1}),
    "worst domain accuracy": made_run(LOSSES, metric="worst_domain_accuracy", verdicts={"mix": "worse"},
                                      chosen_by={"mix": 0.8}),
    "as good as a guess": of_classes({"a": 0.49, "b": 0.52, "c": 0.5, "d": 0.51}, [5, 20]),
    "a guess where a class is lacking": of_classes({"a": 0.33, "b": 0.35, "c": 0.34, "d": 0.4}, [5, 9, 9], [5, 9, 0]),
    "better than a guess": of_classes({"a": 0.78, "b": 0.8, "c": 0.79, "d": 0.81}, [5, 20]),
    "one failed": made_run(FOUR, failed=["sam"]),
    "all failed": made_run(FOUR, failed=list(FOUR)),
    "oracle": made_run(FOUR, rule="oracle"),
    "hostile name": made_run({"erm": FOUR["erm"], "a\x1b[31m\nb\u202e": FOUR["sam"]}),
    "helps here, harms there": beside_zero_shot(made_run(FOUR), "sam", {"art": 0.1, "photo": -0.2, "real": 0.0}),
    "nothing is clear beside zero-shot": beside_zero_shot(made_run(FOUR), "sam", {"art": 0.01, "photo": -0.01}),
    "another method has verdicts beside zero-shot": beside_zero_shot(made_run(FOUR), "mix", {"art": 0.1}),
    "encoders, the second side": under_both("mix @ large"),
    "encoders, the first side": under_both("mix @ small"),
    "encoders, equal": under_both("mix @ large", here="no clear difference", elsewhere="unknown"),
    "encoders, no verdict": under_both("mix @ large", here="no verdict", elsewhere="unknown", note=FEW),
    "encoders, another method": under_both("mix @ large", first="sam @ small", second="sam @ large"),
    "encoders, two methods": under_both("mix @ large", first="mix @ large", second="sam @ small"),
    "encoders, erm": under_both("erm @ large"),
    "encoders, few are named": made_run(UNDER_FIVE, chosen_by={"erm @ e0": 0.9}, encoders=FIVE, further=PAIRS[:2]),
    "encoders, many are counted": made_run(UNDER_FIVE, chosen_by={"erm @ e0": 0.9}, encoders=FIVE, further=PAIRS),
}  # fmt: skip


def test_sentences() -> None:
    sentences = {name: (sentence(run), details(run)) for name, run in SENTENCES.items()}
    assert all(text.isprintable() for texts in sentences.values() for text in texts)
    lines = [f"{name}:\n  {first}\n  {second}".rstrip() for name, (first, second) in sentences.items()]
    assert_golden("sentences.txt", "\n".join(lines) + "\n")
    failed = dataclasses.replace(made_run(FOUR, failed=list(FOUR)), every=[])
    failed.results["runs"] = [{"status": "failed"}] * 3 + [{"status": "skipped"}]
    assert sentence(failed) == "No model has been trained: 3 failed, 1 skipped."
    failed.results["runs"] = []
    assert sentence(failed) == "No model has been trained yet."


def test_the_intervals_of_one_new_site() -> None:
    right = 10 * np.array([*FOUR["mix"].values()])  # of 10 images
    z = np.log((right + 0.5) / (10.5 - right))
    chosen = SENTENCES["the choice of validation, not the best test value"]
    text = details(chosen)
    for level in (80, 95):
        half = t.ppf(0.5 + level / 200, 3) * z.std(ddof=1) * math.sqrt(1 + 1 / 4)  # equal seeds: no variance of theirs
        ends = " to ".join(f"{100 / (1 + math.exp(-z.mean() + side * half)):.0f}" for side in (1, -1))
        assert f"{ends}% at {level}%" in text
    assert f"about 65% ({ends}%)" in sentence(chosen)


# ------------------------------------------------------------------------------------------------------ the last screen

Screen = Callable[..., list[str]]


@pytest.fixture
def screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Screen:
    """What a terminal of a size shows, without colours."""

    def show(run: Run, width: int = 80, height: int = 24) -> list[str]:
        for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", str(width)), ("LINES", str(height))):
            monkeypatch.setenv(name, value)
        show_headline(run)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
        assert all(len(line) <= width and line.isprintable() for line in lines), lines
        assert len(lines) < height or height < 20
        return lines

    return show


def words(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def test_screens(screen: Screen) -> None:
    six = made_run(SIX, verdicts={"mixup": "better, better", "coral": "worse"})
    many = {f"site {i}": 0.5 + i / 100 for i in range(12)}
    of_many = {"erm": many, "mix": {name: value + 0.1 for name, value in many.items()}}
    alike = {f"location_{number}": 0.5 for number in (38, 43, 46, 100)}
    thirty = {name: PACS for name in ["erm", *(f"method {i:02}" for i in range(30))]}
    hidden = made_run(thirty, chosen_by={"method 25": 0.9}, verdicts={"method 28": "worse"})
    failed = made_run(SIX, failed=["xdomainmix", "coral"])
    failed.results["final_fits"] = {"erm": {"status": "failed", "reason": "the loss is nan\nat step 7"}}
    rows = [dataclasses.replace(row, reason=f"{row.method} {'reason ' * 60}") for row in failed.recipe_rows]
    screens = {
        "six methods on four domains": screen(six),
        "domains with cut names": screen(six, 90),
        "whole names": screen(six, 120),
        "many domains": screen(made_run(of_many)),
        "many losses": screen(made_run(of_many, metric="nll")),
        "names that would be equal when cut": screen(made_run({"erm": alike, "mix": alike}), 90),
        "hidden methods": screen(hidden),
        "a low terminal": screen(hidden, height=5),
        "failures": screen(failed),
        "more notes": screen(dataclasses.replace(failed, rows=rows)),
        "nothing": screen(dataclasses.replace(failed, rows=[], every=[], results=failed.results | {"runs": []})),
        "oracle": screen(made_run(SIX, rule="oracle")),
    }
    assert_golden("screens.txt", "".join(f"{name}:\n{chr(10).join(lines)}\n\n" for name, lines in screens.items()))


def test_a_pipe_gets_every_method_and_domain(capsys: pytest.CaptureFixture[str]) -> None:
    names = {f"a domain with the long name {i}": 0.1371 for i in range(8)}
    show_headline(made_run({f"method {i:02}": names for i in range(40)}))
    text = capsys.readouterr().out
    assert all(name in text.splitlines()[1] for name in names) and "\x1b" not in text
    assert text.count("13.7") == 40 * 9 and "…" not in text and "more in" not in text


def test_names_and_paths_are_text(screen: Screen) -> None:
    evil = {"erm": {"\x1b[31m|a": 0.5}, "[red]x[/red]\n\x9b2J大": {"\x1b[31m|a": 0.6}}
    text = words(screen(made_run(evil, path=Path("out put/\x1b[2J"))))
    assert "[red]x[/red]" in text and "大" in text
    assert shlex.quote("out put/\x1b[2J").replace("\x1b", "\\x1b") in text


@pytest.mark.parametrize("encoders", [("mobilenetv2_100.ra_in1k", "mobilenetv2_035.ra_in1k"), ("e" * 30, "e" * 31)])
def test_cut_names_of_encoders_and_methods_stay_apart(encoders: tuple[str, str], screen: Screen) -> None:
    """Both encoders begin with the 12 characters that they would be cut to, and so do two of the methods."""
    renamed = dict(zip(METHODS[:4], ("erm", "xdomainmix of one", "xdomainmix of two", "groupdro"), strict=True))
    values = {f"{renamed[name]} @ {encoder}": SIX[name] for encoder in encoders for name in renamed}
    pair = comparison(f"erm @ {encoders[0]}", f"erm @ {encoders[1]}", 0.1, "better")
    made = made_run(values, chosen_by={f"erm @ {encoders[1]}": 0.99}, encoders=encoders, further=[pair])
    header, *lines = screen(made, 100, 40)[1:10]
    start = header.index("encoder")
    columns = [(line[:start].strip(), line[start : start + 32].split()[0]) for line in lines]
    assert header.split()[:2] == ["method", "encoder"] and len({*columns}) == 8, columns
    assert len({encoder for _, encoder in columns}) == 2 and len({method for method, _ in columns}) == 4
    wide = screen(made, 180, 40)
    assert f"Under erm, {encoders[1]} is -10.0 against" in sentence(made)
    assert wide[1].split()[:6] == ["method", "encoder", *PACS]


def test_the_range_of_values_of_several_methods_is_none_of_the_chosen_one() -> None:
    made = made_run({"erm": {"a": 0.1, "b": 0.9, "c": 0.5}, "mix": {"a": 0.3, "b": 0.8, "c": 0.5}})
    assert made.choice is not None and set(made.choice.at.values()) == {"erm", "mix"}
    assert "On 3 held-out domains the method that the others choose reaches 30 to 80%" in sentence(made)
