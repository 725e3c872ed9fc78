"""README.md of a model directory: a model card as the Hugging Face Hub reads it.

The front matter has the hub's documented fields (https://huggingface.co/docs/hub/model-cards). It names no license: the
owner of the weights and the data decides on one. No path, file name or image of the run is in the card.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import yaml

from xdm_ft.core import sets_noun
from xdm_ft.evaluation.intervals import LEVELS, gain_words, rank_words
from xdm_ft.experiment.results import trained_words
from xdm_ft.export import AdaptedConfig, ExpectedPerformance, ModelConfig
from xdm_ft.results.measured import NUMBERS
from xdm_ft.runtime.errors import plural, printable

HUB = "hf-hub:"  # begins the name of a model on the hub
HUB_METRICS = {"accuracy": "accuracy", "macro_f1": "f1", "auroc": "roc_auc"}  # ours → id on the hub
WORDS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "auroc": "AUROC",
    "worst_domain_accuracy": "worst-domain accuracy",
    "nll": "negative log-likelihood (nll)",
    "ece": "expected calibration error (ECE)",
}
CALIBRATION = ("nll", "ece")
MAX_NAMED = 5  # classes at most, whose means are of few images
# beside Markdown's own signs: renderers make links of https://… and www.…, and mentions of @…, by themselves
_ACTIVE = re.compile(r"([\\`*_{}\[\]#|~$!@^]|:(?=//)|(?<=www)\.)", re.IGNORECASE)


def escape_markdown(name: object) -> str:
    """Returns a name or text on one line, with nothing in it that Markdown or HTML would interpret."""
    return _ACTIVE.sub(r"\\\1", html.escape(printable(name), quote=False))


def shown(metric: str, value: float) -> str:
    """A value of a metric for a reader: rates in percent."""
    return f"{value:.3f}" if metric == "nll" else f"{100 * value:.1f}%"


def interval(metric: str, ends: tuple[float, float] | None) -> str:
    return "unknown" if ends is None else f"{shown(metric, ends[0])} to {shown(metric, ends[1])}"


def ranks(expected: ExpectedPerformance) -> str:
    """Returns in words where a new site ranks among the held-out ones."""
    domains, values = [site.domains for site in expected.held_out], [site.value for site in expected.held_out]
    return rank_words(expected.metric, domains, values, partial(shown, expected.metric))


def held_words(config: ModelConfig, training_features: int) -> str:
    """Returns what of the training images is in a model, as a clause; "": weights, and means of many images.

    `training_features`: the number of images whose features the heads hold.
    """
    if training_features:
        return f"the head contains the features of all {training_features:,} training images"
    few = config.few_images
    holding = {"the head": config.class_means, "reference.safetensors": config.reference_xxh3 is not None}
    holders = [name for name, holds in holding.items() if holds]
    if not few or not holders:
        return ""
    named = ", ".join(f"{name} ({count})" for name, count in list(few.items())[:MAX_NAMED])
    more = f" and {len(few) - MAX_NAMED} more classes" if len(few) > MAX_NAMED else ""
    verb = "contains" if len(holders) == 1 else "contain"
    return f"{' and '.join(holders)} {verb} mean features of fewer than ten training images: {named}{more}"


def card(config: ModelConfig, encoder: Mapping[str, Any], training_features: int = 0) -> str:
    """Returns the model card.

    `encoder`: its settings in the run, which say if it comes from a hub repository. `training_features`: the number of
    training images whose features the heads hold.
    """
    front = yaml.safe_dump(metadata(config, encoder), sort_keys=False, allow_unicode=True, width=float("inf"))
    classes, label = plural(len(config.class_names), "class"), escape_markdown(config.method["label"])
    meant = "images from sites (hospitals, regions, cameras, styles) that were not in its training data"
    if config.adapted is not None:
        meant = "images of the one site whose labelled images have adapted it"
    reads, file = _reads(config), "FEATURES" if config.encoder.reads_features else "IMAGE"
    use = f"""Assigns one of these {classes} to an image{reads and f", of which {reads}"}:
{", ".join(escape_markdown(name) for name in config.class_names)}.

It is meant for {meant}.
Evaluate it on labelled images of your site before you rely on it (see the end of this page)."""
    needs_file = config.encoder.needs_weights
    weights_argument = ', encoder_weights="FILE"' if needs_file else ""
    which_file = f"""FILE has the encoder's weights, which are not in the directory (xxh3 {config.encoder.named_xxh3}).

"""
    layout = "a table with their paths" if reads else "folders `<class>/<image>`"
    loading = f"""```python
import xdm_ft

model = xdm_ft.load("DIRECTORY"{weights_argument})  # that of this page
print(model.predict(["{file}"]), model.predict_proba(["{file}"]))
```

{which_file if needs_file else ""}\
Labelled images of a new site, in {layout}, show whether it keeps what this page promises:

```
xdm-ft evaluate DIRECTORY SITE{" --encoder-weights FILE" if needs_file else ""}
```"""
    if config.site_xxh3 is not None:
        does = "says what accuracy to expect there, or why it cannot be said"
        loading += f"\n\nWithout labels, `xdm-ft assess DIRECTORY {file if reads else 'IMAGES'}` {does}."
    expected = "Unknown: the run has no test result of this method."
    if config.expected is not None:
        expected = "\n".join(_expected(config, config.expected))
    if config.adapted is not None:
        expected = f"""Unknown: this model is for one site alone, whose labelled images have adapted it
({_gain(config.adapted)}). Other labelled images of that site, chosen at random, say how good it is there."""
    sections = {
        "Use": use,
        "Training": "\n".join(_training(config, training_features)),
        "What to expect at a new site": expected,
        "Calibration": "\n".join(_calibration(config)),
        "Limits": "\n".join(_limits(config, training_features)),
        "How to load it": loading,
    }
    body = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in sections.items())
    return f"---\n{front}---\n\n# {label}: {classes} of images\n\n{body}\n"


def _reads(config: ModelConfig) -> str:
    """Returns what the model reads of an image, if that is not the image, as a clause."""
    encoder = config.encoder
    if not encoder.reads_features:
        return ""
    rows = f"it reads {encoder.width} features, by the same encoder as in training"
    if not encoder.reads_bags:
        return rows
    kinds = {"mean": "mean", "max": "maximum", "mean_max": "mean and maximum"}
    return f"{rows}: the {kinds[encoder.settings['pool']]} over the patches of a {encoder.settings['unit']}"


def metadata(config: ModelConfig, encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the front matter."""
    front: dict[str, Any] = {
        "library_name": "xdm_ft",
        "pipeline_tag": "image-classification",
        "tags": ["xdm_ft", "domain-generalization", "image-classification", config.encoder.name],
    }
    sources = [str(encoder.get(key)) for key in ("weights", "model") if str(encoder.get(key)).startswith(HUB)]
    if sources:
        front["base_model"] = sources[0].removeprefix(HUB).split("@")[0]  # the hub links repositories, not revisions
    expected = config.expected
    if expected is None or expected.selection == "oracle":  # such numbers are no results
        return front
    metric = {"type": HUB_METRICS.get(expected.metric, expected.metric), "name": WORDS[expected.metric]}
    if expected.metric in HUB_METRICS:
        front["metrics"] = [metric["type"]]
    values = [(f"{', '.join(site.domains)} held out", site.value) for site in expected.held_out]
    if len(values) > 1:
        values.insert(0, ("mean over held-out domains", expected.mean))
    results = [
        {
            "task": {"type": "image-classification", "name": "Image classification"},
            # escaped, as a reader of the raw text may be a browser; the hub merges results of equal type and config
            "dataset": {
                "name": html.escape(f"{expected.data}, {where}"),
                "type": html.escape(expected.data),
                "config": html.escape(where),
            },
            "metrics": [metric | {"value": round(value, 6)}],
        }
        for where, value in values
    ]
    return front | {"model-index": [{"name": html.escape(config.method["label"]), "results": results}]}


def _training(config: ModelConfig, training_features: int) -> Iterator[str]:
    method, encoder, images = config.method, config.encoder, config.results.get("images")
    is_text = config.from_text and config.step == 0 and not config.interpolated
    head = "class head from class embeddings, not trained" if is_text else "trained class head"
    if training_features or config.class_means:
        head = f"class head of {'training features' if training_features else 'class means'}"
    if isinstance(encoder.trained, bool):
        trained = "encoder and head trained end to end" if encoder.trained else f"frozen encoder, {head}"
    else:
        trained = f"encoder: {trained_words(encoder.trained)}; class head trained"
    yield f"* Method: {escape_markdown(method['label'])}; {trained}."
    model, pretraining = (escape_markdown(text) for text in (encoder.settings["model"], encoder.pretraining))
    yield (
        f"* Features: {pretraining}."
        if encoder.reads_features
        else f"* Encoder: {encoder.name} {model}, {pretraining}."
    )
    if images is not None:
        counts = ", ".join(f"{escape_markdown(name)} ({number})" for name, number in images.items())
        total = sum(images.values())
        yield f"* Data: {plural(total, 'image')} of {plural(len(images), 'domain')}: {counts}. None is held out."
    else:
        yield f"* Data: the domains {', '.join(map(escape_markdown, method['train_domains']))}."
    if config.audit is not None:
        yield f"* Audit of the data. {escape_markdown(config.audit)}"
    if images is None and method["test_domains"]:
        lacks = ", ".join(map(escape_markdown, method["test_domains"]))
        if config.adapted is None:
            yield f"* **It lacks {lacks}**: no image of it trained this model, as it was held out for testing."
        else:  # the site may be what was held out
            yield f"* Before it was adapted, it was trained without {lacks}, held out for testing."
    yield f"* Protocol: {escape_markdown(config.protocol['description'])}."
    yield f"* How this model was chosen: {escape_markdown(config.chosen)}."
    by = config.results.get("chosen_by")
    if by is not None and len(by["values"]) > 1:
        rule = "results on held-out domains" if by.get("at") else escape_markdown(by["selection"])
        values = ", ".join(
            f"{escape_markdown(name)} {shown(by['metric'], value)}" for name, value in by["values"].items()
        )
        yield f"* Values of all methods by {rule}: {values}."
    if config.adapted is not None:
        labels = plural(config.adapted.labels, "labelled image")
        yield f"* Adapted to one site by {labels}: {_gain(config.adapted)}."
        yield f"  Before: {escape_markdown(config.adapted.model)}."
    if config.training_images_xxh3 is not None:
        yield "* The file training_images.safetensors, where it is present, has a checksum (xxh3) of each training"
        yield "  image, and no image. Anyone who has an image can find out whether it trained this model, as xdm-ft"
        yield "  evaluate does."


def _gain(adapted: AdaptedConfig) -> str:
    if adapted.at_random is not None:
        return adapted.at_random.to_text()
    values = f"{adapted.after} of {adapted.labels} correct, {adapted.before} before"
    if adapted.metric_before is not None and adapted.metric_after is not None and adapted.metric != "accuracy":
        before, after = (shown(adapted.metric, value) for value in (adapted.metric_before, adapted.metric_after))
        values = f"{WORDS[adapted.metric]} {after}, {before} before"
    doubt = "" if adapted.p is None else f" (p {adapted.p:.2g} against no gain)"
    return f"in cross-validation {values}{doubt}, which is no measure of the gain at the site"


def _expected(config: ModelConfig, expected: ExpectedPerformance) -> Iterator[str]:
    metric, held_out, at_new_site = expected.metric, expected.held_out, expected.at_new_site
    noun = sets_noun([site.domains for site in held_out])
    is_final_fit = "images" in config.results
    if expected.selection == "oracle":
        yield "**CHEATING: steps and trials were picked by labels of the held-out domains (oracle). These numbers are"
        yield "no results, and a new site will be worse.**\n"
    else:
        yield f"{ranks(expected).capitalize()}. This is exact if sites are exchangeable.\n"
    spread = "" if expected.stderr is None else f" ± {shown(metric, expected.stderr)} (standard error over seeds)"
    seeds = f"{plural(expected.seeds, 'seed')}" if expected.seeds else "incomplete seeds"
    kind = "the official test set" if expected.source == "official test" else "leaving one domain out"
    yield f"Estimated by {kind}: {WORDS[metric]} **{shown(metric, expected.mean)}**{spread}, {seeds}.\n"
    if counts := Counter(site.method for site in held_out if site.method is not None):
        by = ", ".join(f"{escape_markdown(name)} by {count} of {len(held_out)}" for name, count in counts.most_common())
        yield f"For each of these {noun} the value is that of the method which the others choose ({by}), so that no"
        yield "choice has seen its domain; the method of this model is chosen by all of them.\n"
    if at_new_site is not None:
        likely, nearly_all = (interval(metric, at_new_site.between(metric, level)) for level in LEVELS)
        scale = "" if at_new_site.scale == "plain" else f", on the {at_new_site.scale} scale"
        yield f"At one new site, {WORDS[metric]} is expected in **{likely}** (80%) and in **{nearly_all}** (95%):"
        freedom = f"{at_new_site.freedom} degrees of freedom"
        yield f"prediction intervals, t distribution with {freedom}{scale}. They assume that"
        yield f"the new site is like one more draw of the {len(held_out)} {noun}."
    else:
        yield "There is no interval for a new site: too few domains were held out to know how much sites differ."
    if expected.one_more_domain is not None:
        seen = "; this model has seen one more than those that were measured" * is_final_fit
        gain = gain_words(metric, expected.one_more_domain).capitalize()
        yield f"\n{gain}, as models that left out two domains show{seen}."

    yield f"\n| held out | {WORDS[metric]} | 95% interval | images | groups |"
    yield "|---|---:|---:|---:|---:|"
    for site in held_out:
        groups = "unknown" if site.groups is None else str(site.groups)
        name = escape_markdown(", ".join(site.domains))
        yield f"| {name} | {shown(metric, site.value)} | {interval(metric, site.interval)} | {site.images} | {groups} |"
        for domain, accuracy in site.accuracies.items() if len(site.domains) > 1 else ():
            yield f"| – {escape_markdown(domain)} (accuracy) | {shown('accuracy', accuracy)} | | | |"

    name, value = expected.worst
    # of several domains in one set only accuracies are known
    of = "accuracy" if len(held_out) == 1 and len(held_out[0].domains) > 1 else metric
    yield f"\nWorst: {escape_markdown(name)}, {WORDS[of]} {shown(of, value)}. Intervals are 95%,"
    yield f"over {'' if expected.seeds == 1 else 'seeds and '}groups of images."
    others = [f"{WORDS[key]} {shown(key, value)}" for key, value in expected.others.items() if key not in CALIBRATION]
    if others:
        yield f"Other metrics (means): {', '.join(others)}."
    yield ""
    if is_final_fit:
        yield "These numbers are of models that were trained without the domain they were tested on. This model was"
        yield "trained on all domains, so no images are left to test it on."
    elif counts:
        yield "These numbers are of the methods that were chosen; this model is one of the run's, of its own method."
    else:
        yield "These numbers are means over the run's models of this method; this model is one of them."
    made = [f"an ensemble of {len(config.members)} heads"] * bool(config.members)
    made += ["interpolated with the zero-shot weights (WiSE-FT)"] * (config.wise_ft is not None)
    made += ["calibrated by a temperature"] * (config.temperature != 1)
    if made:
        yield f"They are of single trained models, but this model is {' and '.join(made)}, which was not tested itself."


def _calibration(config: ModelConfig) -> Iterator[str]:
    expected = config.expected
    values = {} if expected is None else {expected.metric: expected.mean} | expected.others
    lines = [f"{WORDS[key]} {shown(key, values[key])}" for key in CALIBRATION if key in values]
    if lines:
        yield f"On the held-out domains, without a temperature: {', '.join(lines)}."
    numbers = {} if expected is None else expected.numbers
    lines = [f"{number.words} {shown(number.unit, numbers[key])}" for key, number in NUMBERS.items() if key in numbers]
    if lines:
        yield f"There, too: {', '.join(lines)}. Temperatures are fitted on validation images of the training domains."
    if config.temperature != 1:
        yield f"The logits of this model are divided by its temperature, {config.temperature:.4g}."
    elif config.fitted_temperature is not None:
        yield f"A temperature of {config.fitted_temperature:.4g} was fitted; this model's probabilities do not use it."
    else:
        yield "No temperature is known for this model."
    yield "Probabilities are less reliable at a new site than on images like those of the training data."


def _limits(config: ModelConfig, training_features: int) -> Iterator[str]:
    expected = config.expected
    if expected is not None:
        sets, domains = len(expected.held_out), sum(len(site.domains) for site in expected.held_out)
        tested = f"{plural(domains, 'domain')} tested{f' in {sets} sets' if 1 < sets < domains else ''}"
        yield f"* Few domains: {tested}. Another kind of site can be worse than any of them."
        yield from (f"* {escape_markdown(note[0].upper() + note[1:])}." for note in expected.notes)
    yield "* The classes are closed: an image of anything else gets one of them too, often with a high probability."
    if config.unknown is not None:
        does = "marks them" if config.unknown.works else "cannot"
        at = ", ".join(
            f"{escape_markdown(name)} {of.auroc:.2f} ({shown('accuracy', of.false_alarms)})"
            for name, of in config.unknown.domains.items()
        )
        yield f"  `xdm-ft predict --unknown` {does}: at held-out domains its AUROC (false alarms) is {at},"
        yield "  for classes that were left out of training."
    if held := held_words(config, training_features):
        yield f"* Privacy: {escape_markdown(held)}. Share this model only as you may share these images."
    yield "* Domains are unseen in fine-tuning, but possibly seen in the encoder's pre-training."
    yield "* Not for decisions on health, safety or rights of people without an evaluation for that purpose."
