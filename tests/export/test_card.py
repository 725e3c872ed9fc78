"""The model card: its front matter as the hub reads it, its text, and names that hold Markdown, HTML and paths."""

import json
import shutil

import pytest
import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard import metadata_load
from markdown_it import MarkdownIt
from promised import DOMAINS, METHOD, RULE, made_run, promise

from tests.report.audit_examples import rich
from xdm_ft.cli.export import with_audit
from xdm_ft.export.card import card, escape_markdown, metadata
from xdm_ft.export.choose import Choice, read_parts
from xdm_ft.export.directory import read_config
from xdm_ft.results.run import read_run
from xdm_ft.storage.lines import with_checksum

ODD = ("<script>alert(1)</script>", "a|b", "new\nline", "`tick`", "![x](http://y)", "_under_score_", "---", "&amp; <b>")


def rendered(text):
    """HTML of the card, as the hub renders it: tables and raw HTML are allowed."""
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(text.split("\n---\n", 1)[1])


@pytest.fixture
def config(small_model, tmp_path):
    results, records, *_ = made_run(tmp_path, [(name,) for name in DOMAINS])
    found, _ = read_config(small_model.model)
    return found.model_copy(update={"expected": promise(tmp_path, results, records, RULE, METHOD)})


def test_the_front_matter_is_what_the_hub_reads(config, tmp_path):
    file = tmp_path / "README.md"
    file.write_text(card(config, {"model": "m", "weights": "hf-hub:timm/vit@main"}), encoding="utf-8")
    front = metadata_load(file)
    assert front == metadata(config, {"model": "m", "weights": "hf-hub:timm/vit@main"})
    read = ModelCardData(**front)  # raises if results are not as the hub has them
    assert (read.library_name, read.pipeline_tag, read.base_model) == ("xdm_ft", "image-classification", "timm/vit")
    assert read.metrics == ["accuracy"] and read.license is None and "domain-generalization" in read.tags
    values = [config.expected.mean, *(one.value for one in config.expected.held_out)]
    assert [one.metric_value for one in read.eval_results] == pytest.approx(values, abs=1e-6)
    names = [one.dataset_name for one in read.eval_results]
    assert names[:2] == ["folder, mean over held-out domains", "folder, a held out"]
    assert yaml.safe_load(read.to_yaml()) == front


def test_the_text_has_the_numbers(config):
    text, expected = card(config, {}), config.expected
    low, high = expected.new_site
    shorter = " to ".join(f"{end:.1%}" for end in expected.at_new_site.between("accuracy", 0.8))
    worst, spread = expected.worst[1], f"± {expected.stderr:.1%} (standard error over seeds), 3 seeds"
    for words in (
        f"A new site like these lies below the worst of the 4 held-out ones ({worst:.1%}) with probability 1 in 5, "
        "between worst and best with 3 in 5. This is exact if sites are exchangeable.",
        f"Estimated by leaving one domain out: accuracy **{expected.mean:.1%}** {spread}.",
        f"is expected in **{shorter}** (80%) and in **{low:.1%} to {high:.1%}** (95%):",
        "3 degrees of freedom, on the logit scale. They assume that the new site is like one more draw of the 4",
        f"Worst: {expected.worst[0]}, accuracy {worst:.1%}.",
        f"nll) {expected.others['nll']:.3f}",
        f"ECE) {expected.others['ece']:.1%}",
        *(
            f"| {one.domains[0]} | {one.value:.1%} | {one.interval[0]:.1%} to {one.interval[1]:.1%} | 24 | 8 |"
            for one in expected.held_out
        ),
    ):
        assert words in text.replace("\n", " "), words
    assert "One more training domain" not in text
    html = rendered(text)
    assert html.count("<tr>") == 5 and html.count("<code") == 3 and "possibly seen" in html


def test_what_was_not_tested_is_said(config):
    assert "which was not tested itself" not in card(config, {})
    changed = config.model_copy(update={"members": (0, 1), "temperature": 1.5})
    said = "this model is an ensemble of 2 heads and calibrated by a temperature, which was not tested itself."
    assert said in card(changed, {})
    assert "(WiSE-FT), which was" in card(config.model_copy(update={"wise_ft": 0.5}), {})
    assert "Unknown: the run has no test result" in card(config.model_copy(update={"expected": None}), {})
    oracle = config.model_copy(update={"expected": config.expected.model_copy(update={"selection": "oracle"})})
    assert "CHEATING" in card(oracle, {}) and "model-index" not in metadata(oracle, {})
    assert "exchangeable" in card(config, {}) and "exchangeable" not in card(oracle, {})
    crossed = config.model_copy(update={"expected": config.expected.model_copy(update={"one_more_domain": 0.051})})
    seen = "One more training domain brought +5.1 points, as models that left out two domains show"
    assert f"{seen}.\n" in card(crossed, {})
    fit = crossed.model_copy(update={"results": {"images": {"a": 10}}})
    assert f"{seen}; this model has seen one more than those that were measured.\n" in card(fit, {})


def test_values_of_chosen_methods_are_not_said_to_be_of_this_one(config):
    own = "means over the run's models of this method"
    mixed = [site.model_copy(update={"method": f"m{i}"}) for i, site in enumerate(config.expected.held_out)]
    chosen = config.model_copy(update={"expected": config.expected.model_copy(update={"held_out": tuple(mixed)})})
    assert own in card(config, {})
    assert own not in card(chosen, {}) and "of the methods that were chosen; this model is one of" in card(chosen, {})


def test_what_an_audit_of_the_run_found_is_a_line(config, small_model, tmp_path):
    choice = Choice(held_out=("sketch",))
    assert read_parts(read_run(small_model.run), choice).config.audit is None and "Audit" not in card(config, {})
    run = shutil.copytree(small_model.run, tmp_path / "run")
    (run / "audit").mkdir()
    content = read_run(run).results["environment"]["data"]["content"]
    (run / "audit" / "audit.json").write_text(json.dumps(with_checksum(rich() | {"content": content})))
    audited = with_audit(read_run(run), read_parts(read_run(run), choice)).config
    line = "* Audit of the data. Found: twin domains, copies, label errors, site × class.\n"
    assert line in card(audited, {}) and "/mug/" not in card(audited, {}), "no file is named"


def test_the_values_of_all_methods_stand_in_a_list(config):
    by = {"selection": "train_val", "metric": "accuracy", "values": {"erm": 0.75, "a|b": 0.801}}
    text = card(config.model_copy(update={"results": {"chosen_by": by}}), {})
    assert "\n* Values of all methods by train\\_val: erm 75.0%, a\\|b 80.1%.\n" in text
    for results in ({}, {"chosen_by": by | {"values": {"erm": 0.75}}}):
        assert "Values of all methods" not in card(config.model_copy(update={"results": results}), {}), "nothing else"


def test_names_stay_text(config):
    site = config.expected.held_out[0].model_copy(update={"domains": ODD[:1]})
    sites = [site, *(site.model_copy(update={"domains": (name,)}) for name in ODD[1:])]
    expected = config.expected.model_copy(update={"held_out": tuple(sites), "worst": (ODD[1], 0.5)})
    update = {"class_names": ODD, "expected": expected, "chosen": ODD[0], "method": {**config.method, "label": ODD[0]}}
    text = card(config.model_copy(update=update), {})
    assert "<script" not in text and "\nline" not in text
    html = rendered(text)
    assert html.count("<tr>") == 1 + len(ODD) and html.count("<td") == 5 * len(ODD)
    assert not any(tag in html for tag in ("<script", "<img", "<em>", "<hr", "<a ")) and html.count("<code") == 3
    for name in (
        "&lt;script&gt;alert(1)&lt;/script&gt;",
        "a|b",
        "new\\nline",
        "`tick`",
        "_under_score_",
        "&amp;amp; &lt;b",
    ):
        assert name in html, name
    assert ModelCardData(**yaml.safe_load(text.split("---\n")[1])).eval_results
    assert escape_markdown("a\x1b[31m") == r"a\\x1b\[31m"
