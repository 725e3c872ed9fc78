"""How to read the tables of a run: all of it for `xdm-ft explain`, what its tables need for results.md and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from xdm_ft.evaluation.trials import ORACLE
from xdm_ft.evaluation.verdicts import ALPHA, BETTER, EQUAL, NO_VERDICT, SEEDS, UNKNOWN, WORSE
from xdm_ft.report.finished import several_encoders
from xdm_ft.report.words import in_unit

Results = Mapping[str, Any]
MANUAL: dict[str, dict[str, str]] = {
    "table": {
        "protocol": "The line above a table: data, split, whether the test domains are unseen, groups, encoder, "
        "selection and metric. Numbers of two tables with different lines can not be compared.",
        "a domain's column": "The metric on the test images of this domain, mean over seeds; the protocol line says "
        "whether training saw other images of it. On a narrow terminal names are cut, or only the worst domain is "
        "shown; results.md has all.",
        "mean ±": "Held-out domains are averaged within a seed, then over seeds. ± is the standard error over seeds: "
        "standard deviation (ddof 1) / √n. DomainBed prints it with ddof 0, which is √(1 − 1/n) times as large; WILDS "
        "prints the standard deviation, √n times as large. ± says how much training varies, not how much domains do.",
        "the best row": "The row with the best test value is about 1.0 points of accuracy too good. The method that "
        "validation chose is not, from three seeds on: +0.1 points among five methods, +0.2 among 14 equal ones.",
        "seeds": "The number of seeds that have a model for every held-out domain; only they count.",
        "draws × gradients": "The budget of a method: draws of hyper-parameters × gradients that one model takes. A "
        "sharpness-aware step takes two gradients, a step of Fish one per training domain. Methods of unequal budgets "
        "are not compared on equal terms.",
        "mixed steps": "The number of steps that trained on augmented features: XDomainMix begins after its warm-up.",
    },
    "comparison": {
        "versus": "The difference to the row that the head of the column names; where rows are compared with different "
        "ones, the column “versus” names each, and “difference” has the number. It is the row that report.compare "
        "declares, or else the ERM with the same class head (of ERM with another head: with a linear one) under the "
        "same encoder that trains as much of it; a method without such an ERM is compared with the recipe's first ERM "
        "of its head, and ERM itself with the one that trains a head alone, or else with the first.",
        "95% here": "Where the difference may lie with other seeds and other images of the same domains. Images vary "
        "in groups (patients, slides, sequences) where these are known. From ten common seeds on the two rows are "
        "paired by seed. Intervals are not adjusted for the number of comparisons.",
        "95% elsewhere": "Where it may lie on new domains like these: a t interval of the differences on the held-out "
        "domains.",
        "p here (Holm)": "The p value of “here”, corrected for all comparisons of the run, or for those alone that "
        "report.compare declares: the more methods are tried, the likelier is a lucky one.",
        "p elsewhere (Holm)": "The same of “elsewhere”, and never smaller than that of “here”. Over few domains it is "
        "rarely small: of 13 comparisons over four domains, one needs a t of 8.2; a single declared one needs 3.2.",
    },
    "verdict": {
        "here": f"The verdict on these domains, with other seeds and test images: {BETTER} or {WORSE} if p here (Holm) "
        f"is below {ALPHA} (below the α of its look, where a run grew).",
        "elsewhere": f"The verdict on new domains: {BETTER} or {WORSE} if p elsewhere (Holm) is below that α too, else "
        f"{UNKNOWN}. It needs three held-out domains.",
        EQUAL: "The difference may as well be chance. It does not say that methods are equal: the intervals say how "
        "large a difference remains possible.",
        "equal within": "The interval at level 1 − 2α/M of M comparisons lies within ± report.margin: two one-sided "
        "tests say that the difference is smaller.",
        NO_VERDICT: f"Fewer than {SEEDS} seeds are complete, predictions are missing, fewer than two groups of test "
        "images, or report.compare does not declare the comparison; a note says which.",
        "with 80% probability": "The smallest difference that this table finds in four of five runs, and what limits "
        "it. No verdict on a smaller difference says little.",
        "look": "Each summary of a growing run with new seeds or methods is a look. The first has α = 0.05, the k-th "
        "0.05/2^k, and what one look found stays; protocol.seeds: auto plans three looks with 0.05 in all.",
    },
    "selection": {
        "selection rule": "Picks the step of each training and the trial of a search; for the sentence, the export and "
        "the final fit also the method. The recipe's rule has the first table.",
        "train_val": "By validation images of the training domains, the mean over these.",
        "val_domain": "By an official validation domain.",
        "cross_domain": "By extra models, each trained with one more domain held out and measured on it.",
        "oracle": "By labelled images of the held-out domain: a part of the test images themselves "
        "(the validation part that comes with the data, or else protocol.val_fraction). That is CHEATING, and no "
        "result. Nor is it an upper bound: what is best on this part need not be best on all test images, so another "
        "rule may test higher. Of steps and trials that are equal on this part it takes the one that the first other "
        "rule picks.",
    },
    "metrics": {
        "AUROC": "Area under the ROC curve; of more than two classes, the mean of each class against the rest. 50% is "
        "chance.",
        "balanced accuracy, macro F1": "Mean recall, and mean F1, of the classes: each class counts the same.",
        "worst domain": "In each seed, the lowest accuracy of a held-out domain (or of a group of images, where the "
        "benchmark reports the worst group).",
        "worst class": "The lowest recall of a class on a held-out set.",
        "ECE": "Expected calibration error: the mean gap between confidence and accuracy in 15 bins, before "
        "temperature scaling. Lower is better.",
        "NLL": "Mean negative log-likelihood of the true class in nats, before temperature scaling. Lower is better.",
        "selected hyper-parameters": "Of each held-out set, the value that the selection rule picked in each seed.",
        "published numbers": "They have tables of their own, because their encoders and settings may differ. There our "
        "± is the one that the benchmark of the data set prints.",
    },
    "sentence": {
        "expect": "The mean over held-out domains of the method that selection prefers, not the best test value of "
        "the table: the best of many is partly luck.",
        "a new site like these": "Of D held-out domains and a new one, each is the worst with probability 1 in D + 1. "
        "This is exact if they are exchangeable, whatever their values.",
        "one new site alone": "The intervals in which one model's value at one further site will lie in 80 and in 95 "
        "of 100 cases, if it is like one more draw of the held-out ones. They are much wider than ±, since domains "
        "differ more than seeds. Accuracies are on the logit scale. Fewer than three held-out domains give none.",
        "one more training domain": "The mean minus that of the extra models of cross_domain, which leave out two "
        "domains. A final fit has seen one more than the models of the table. Without such models nothing is said.",
    },
    "cost": {
        "trained parameters": "The numbers that training changed: the class head and, above a cut, blocks of the "
        "encoder; of LoRA, its updates alone. Smaller is cheaper to train, not to run: all of the encoder runs.",
        "seconds": "The time to train one model on the machine of the run, without reading images and computing "
        "features below the cut, which is done once for all models. Models that train together share their time "
        "equally.",
        "peak memory": "The most memory that training took: on a GPU what torch allocated, on a CPU what the process "
        "grew by. Models that train together have none of their own.",
    },
    "encoders": {
        "METHOD @ ENCODER": "A row of a run of several encoders. “versus” compares it with the ERM under its own "
        "encoder.",
        "first − second": "The difference between two encoders under the same method, over the same images. Its "
        "intervals, p and verdicts are made as those of “versus”, and p (Holm) is corrected for both kinds of "
        "comparison together: each encoder more makes all verdicts harder to reach.",
        "ms per image": "Milliseconds to encode one image on the machine of the run.",
        "features on disk": "The size of the cached features of all images.",
    },
    "notes": {
        "failed, skipped": "Models with a loss that is not finite, or methods that the data do not allow. They have no "
        "mean; the same command trains failed models again.",
        "last step picked": "The best step was the last: more steps may do better.",
        "at the edge of its range": "A search picked a value beside the limit of its range: a wider one may do better.",
        "images assumed independent": "Patients, slides or sequences are unknown (data.group): if they exist, "
        "intervals are too narrow.",
        "domains never trained on": "The test domains are unseen. Otherwise the line says which were also trained on.",
    },
    "analysis": {
        "covariances": "Representation invariance: the distance of the covariances of same-class features between "
        "training domains. Lower is more invariant, but it grows with the scale of the features, and chance alone "
        "gives a part of it. Methods on one frozen encoder have the same features, and so one value.",
        "risk variance": "Prediction invariance: the variance over training domains of the mean cross-entropy. Lower "
        "is more invariant; a model that is equally bad everywhere has 0.",
        "ECE, scaled": "Expected calibration error on held-out domains, as trained and after temperature scaling; the "
        "temperature is fitted on validation images of training domains. Lower is better.",
        "MMD²": "How far augmented features are from original ones (unbiased; mean over the levels of τ_d). 0 within "
        "its error: no difference. More is not better: noise diverges too.",
        "removal": "Area under class accuracy while 0 to 90% of the features are removed at random, at most 0.9. "
        "Higher: the model depends less on single features.",
    },
}
"""{topic: {word of a table: what it means}}"""


def _in_a_row(*keys: str) -> Callable[[Results], bool]:
    """Returns a function that says whether a row of the summary has a value at the nested keys."""

    def holds(row: Any) -> bool:
        for key in keys:
            row = row.get(key) if row else None
        return row is not None

    return lambda results: any(holds(row) for row in results["summary"])


def _selected_by(rule: str) -> Callable[[Results], bool]:
    return lambda results: any(row["selection"] == rule for row in results["summary"])


def _searched(results: Results) -> bool:
    return any(run["trial"] > 0 for run in results["runs"])


def _measured(name: str) -> Callable[[Results], bool]:
    return lambda results: any(run.get(name) is not None for run in results["runs"])


_NEEDS: dict[str, Callable[[Results], bool]] = {
    "draws × gradients": _in_a_row("budget", "gradient_evaluations"),
    "mixed steps": lambda results: any(run.get("mixed_steps") is not None for run in results["runs"]),
    "comparison": lambda results: bool(results.get("comparisons")) or _in_a_row("versus_erm")(results),
    "verdict": lambda results: bool(results.get("comparisons")) or _in_a_row("versus_erm")(results),
    "equal within": lambda results: bool(results["recipe"].get("report", {}).get("margin")),
    "look": lambda results: len(results.get("looks", ())) > 1,
    **{rule: _selected_by(rule) for rule in ("train_val", "val_domain", "cross_domain", ORACLE)},
    "selected hyper-parameters": _searched,
    "trained parameters": _measured("trained_parameters"),
    "peak memory": _measured("peak_memory"),
    "encoders": lambda results: bool(several_encoders(results)),
    "analysis": lambda results: False,  # its tables are in the sections that explain them
    "published numbers": _in_a_row("spread_as_published"),
    "failed, skipped": lambda results: any(run["status"] != "ok" for run in results["runs"]),
    "at the edge of its range": _searched,
}
"""{topic or word of the manual: whether tables of these results need it}; those that are not here are always needed"""


def how_to_read(results: Results) -> dict[str, str]:
    """Returns {word: what it means} that the tables of a run need, the first on its numbers; {} without a table."""
    metrics = dict.fromkeys(row["metric"] for row in results["summary"])
    if not metrics:
        return {}
    tested_on = f" of {results['tested_on']}" if "tested_on" in results else ""
    numbers = {"numbers": f"{', '.join(map(in_unit, metrics))} on test images{tested_on}."}
    topics = [words for topic, words in MANUAL.items() if _needed(topic, results)]
    return numbers | {word: text for words in topics for word, text in words.items() if _needed(word, results)}


def _needed(name: str, results: Results) -> bool:
    return name not in _NEEDS or _NEEDS[name](results)
