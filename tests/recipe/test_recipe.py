"""Strict recipes: a table of changes and the message that each one gets, and what valid recipes resolve to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from xdm_ft.algorithms import Algorithm
from xdm_ft.cli.validate import annotate
from xdm_ft.experiment.prepare import build_encoders
from xdm_ft.recipe import components
from xdm_ft.recipe.check import check, known_keys, load
from xdm_ft.recipe.settings import Recipe
from xdm_ft.recipe.text import (
    apply_override,
    find_recipe,
    parse,
    read_recipe,
    recipe_keys,
    recipe_of,
    say_if_finished,
)
from xdm_ft.runtime.errors import UserError

GOOD = """\
name: good
data: {name: digits}
encoder: {name: timm, model: resnet10t}
methods: [erm, sam, {name: xdomainmix, p_discard: 0.3, label: less}]
training: {steps: 10}
"""
Change = str | tuple[str, str]  # an override, or a text of the file and what it becomes
END_TO_END = ("resnet10t", "resnet10t, trainable: true")
CLIP = ("{name: timm, model: resnet10t}", "{name: open_clip, model: demo, weights: demo}")
NORMALIZED = ("{name: timm, model: resnet10t}", "{name: open_clip, model: demo, weights: demo, normalize: true}")
ENCODERS = (
    "encoder: {name: timm, model: resnet10t}",
    "encoders: [{name: timm, model: resnet10t}, {name: timm, model: resnet18, label: big}]",
)
LINES = (
    "encoder: {name: timm, model: resnet10t}",
    "encoders:\n- {name: timm, model: resnet10t, trainable: {blocks: 1}}\n- {name: timm, model: resnet18}",
)
ITEMS = (
    "[erm, sam, {name: xdomainmix, p_discard: 0.3, label: less}]",
    "[erm, xdomainmix, xdomainmix+sam, {name: xdomainmix+sam, label: wide 0.5}, {name: mixup+sagm, label: mixed}]",
)
LONG = ("steps: 10", "steps: 1000")


def compare(pairs: str) -> Change:
    return "training: {steps: 10}", f"training: {{steps: 10}}\nreport: {{compare: {pairs}}}"


def recipe(*changes: Change) -> Recipe:
    text = GOOD
    for change in changes:
        if isinstance(change, tuple):
            assert change[0] in text, change
            text = text.replace(*change, 1)
    values = parse(text, "r.yaml")
    for change in changes:
        if isinstance(change, str):
            apply_override(values, change)
    return check(values)


def faults(*changes: Change) -> list[str]:
    with pytest.raises(UserError) as fault:
        recipe(*changes)
    return str(fault.value).split("\n")


# the changes, and the beginning of their only message; "…" begins one that may stand among others
# fmt: off
TEXT = "r.yaml:6: protocol.test_domains.0: must be text, given "
FAULTS: list[tuple[list[Change], str]] = [
    ([("name: good", "name: a/b")], "r.yaml:1: name: must be a text without slashes"),
    ([("name: good\n", "")], "r.yaml: name: is missing; it names the run"),
    ([("name: good", f"name: {'n' * 300}")], "r.yaml:1: name: is 300 bytes long as a folder's name; use"),
    ([("name: good", 'name: "a\\0b"')], "r.yaml:1: name: must be a text without slashes"),
    ([("name: good", 'name: "\\ud800"')], "r.yaml:1: name: must be a text without slashes"),
    ([("{name: digits}", "digits")], "r.yaml:2: data: needs a name; known: "),
    ([("name: digits", "name: digit")], 'r.yaml:2: data.name: no "digit" in data; did you mean "digits"?'),
    ([("resnet10t}", "resnet10t}\nextra: 1")], "r.yaml:4: extra: unknown key; "),
    # blocks
    ([("steps: 10", "steps: 10, stepps: 1")], 'r.yaml:5: training.stepps: unknown key; did you mean "steps"?'),
    ([("steps: 10", "steps: 10, lr: fast")], "r.yaml:5: training.lr: input should be a valid number, unable to"),
    ([("model: resnet10t", "modell: a")], '…r.yaml:3: encoder.modell: unknown key; did you mean "model"?'),
    ([("model: resnet10t", "modell: a")], "…r.yaml:3: encoder.model: is needed"),
    (["training.steps=true"], "command line: training.steps: must be a number, not true"),
    (["protocol.seeds=[0, 4294967296]"], "command line: protocol.seeds: must be at most 4294967295"),
    ([("{steps: 10}", "[1]")], "r.yaml:5: training: must be a block of keys, not list"),
    (["label_curve=true", "methods=[knn]"], "command line: label_curve: adapts linear heads on a frozen encoder, but"),
    (["label_curve=true", "protocol={name: official}"], "command line: label_curve: needs one held-out domain"),
    ([("{steps: 10}", "{}")], "r.yaml:5: training.steps: give steps or epochs"),
    ([("10}", "10, epochs: 2, sampler: pooled}")], "r.yaml:5: training.epochs: both steps and epochs are given; keep"),
    (["training.schedule.warmup_steps=10"], "command line: training.schedule.warmup_steps: 10 must be less than"),
    ([("10}", "10, amsgrad: true, optimizer: sgd}")], "r.yaml:5: training.amsgrad: is only for adam and adamw"),
    ([("steps: 10", "steps: 10, mixed_precision: bf16")], "r.yaml:5: training.mixed_precision: has no effect with a f"),
    (["training.layer_decay=0.5"], "command line: training.layer_decay: has no effect with a frozen encoder"),
    (["protocol={name: official, split_rule: domainbed}"], "command line: protocol.split_rule: the official split"),
    (["protocol.together=[a, b]"], "command line: protocol.together: must be a list of sets of domains, such as [[d"),
    (["protocol.together=[[a, b], [c, a]]"], "command line: protocol.together: a is named twice; keep it in one set"),
    *[
        ([("steps: 10}", f"steps: 10}}\nprotocol: {{test_domains: {value}}}")], f"{TEXT}{read}")
        for value, read in (("no", "False"), ("010", "8"), ("12:30", "750"), ("1.0", "1.0"), ("2024-01-02", "datetime"))
    ],
    (["protocol.seeds=0"], "command line: protocol.seeds: 0 seeds; at least 1 is needed, given 0"),
    *([([f"protocol.seeds={s}"], "command line: protocol.seeds: must be a number of seeds,") for s in ("no", "auto")]),
    (["protocol.test_domains=[]"], "command line: protocol.test_domains: value should have at least 1 item"),
    *([([f"report.margin={m}"], "command line: report.margin: input should be") for m in ("0", "-1.0", "wide")]),
    # pairs of rows
    ([compare("[[sam, ern]]")], 'r.yaml:6: report.compare.0: no row "ern"; did you mean "erm"?'),
    ([compare("[[sam, sam]]")], "r.yaml:6: report.compare.0: compares sam with itself; name two rows"),
    ([compare("[[sam, erm], [erm, sam]]")], "r.yaml:6: report.compare: erm and sam are compared twice; keep one"),
    ([ENCODERS, compare("[[sam @ big, erm]]")], "r.yaml:6: report.compare.0: sam @ big and erm: one of the two names"),
    ([compare("[[sam, erm]]"), "methods=[erm, irm]", "report.compare=[[less, erm]]"], 'command line: report.compare.0'),
    # encoders
    ([("resnet10t", "resnet10t, unfreeze_at: 5")], "r.yaml:3: encoder.unfreeze_at: has no effect with a frozen encode"),
    ([END_TO_END, "encoder.unfreeze_at=10"], "command line: encoder.unfreeze_at: 10 of 10 training steps leave the en"),
    ([("name: digits", "name: digits}\nencoders: []\nx: {")], "…r.yaml:5: encoder: is for one encoder, but encoders l"),
    ([ENCODERS, "encoders.1.label=resnet10t"], 'r.yaml:3: encoders.1: two encoders have the name "resnet10t" in'),
    (["encoder.name=timm", "encoder.prompts=[a]"], "command line: encoder.prompts: unknown key"),
    (["data.name=folder"], "command line: data.root: is needed"),
    (["features.cut=cache"], "command line: features.cut: is for a partly trained encoder; leave it out"),
    *(
        ([f"{key}={trainable}"], f"command line: {key}{expected}")
        for key in ("encoder.trainable", "erm.trainable")
        for trainable, expected in (
            ("2", ": must be true, false, {blocks: k} or {lora: {rank: r}}, given 2"),
            ("{blocks: 0}", ".blocks: input should be greater than or equal to 1, given 0"),
            ("{}", ".blocks: is needed"),
            ("{lora: 8}", ".lora: must be a block of keys, given 8"),
            ("{lora: {r: 3}}", ".lora.r: unknown key"),
            ("{blocks: 1, lora: {}}", ": has both blocks and lora; keep one, or write {lora: {blocks: k}}, given"),
        )
    ),
    # augmentation
    ([("digits", "digits, train_augmentation: domainbed")], "r.yaml:2: data.train_augmentation: has no effect with a "),
    (["features.views=3"], "command line: data.train_augmentation: none, the default of this data set, gives no views"),
    ([END_TO_END, "features.views=3"], "command line: features.views: has no effect with encoder.trainable: true"),
    (["methods=linear_probe", "features.views=3"], "command line: features.views: has no effect on methods without"),
    # methods
    ([(ITEMS[0], "3")], "r.yaml:4: methods: must be a list of at least one method"),
    (['erm.label="a\\nb"'], "command line: erm.label: must be one line without control characters"),
    ([("[erm, sam", "[3, sam")], "r.yaml:4: methods.0: must be the name of a method, or a block with a name"),
    ([("[erm, sam", '["erm,sam", sam')], 'r.yaml:4: methods.0.name: no "erm,sam" in algorithms; several are a list: ['),
    (["methods=erm,xdomainmx"], 'command line: methods.1.name: no "xdomainmx" in algorithms; did you mean "xdomainmix'),
    ([("[erm, sam", "[erm+swad+swad, sam")], "r.yaml:4: methods.0.name: +swad and +swad cannot be combined; keep one"),
    ([("[erm, sam", "[erm, erm")], 'r.yaml:4: methods.1: two methods have the name "erm" in results; give one of them'),
    ([("p_discard: 0.3", "warmup_steps: 10")], "r.yaml:4: methods.2: xdomainmix: warmup_steps 10 leaves no step"),
    (["methods=[{name: xdomainmix+sam, rho: 1}]"], "command line: methods.0.rho: unknown key; write sam.rho"),
    (["methods=[{name: linear_probe, head: mlp}]"], "command line: methods.0.head: linear_probe computes a linear hea"),
    (["methods=[{name: erm, head: neighbours}]"], "command line: methods.0.head: neighbours is computed b"),
    (["methods=[{name: erm, encoder_lr: 1e-3}]"], "command line: methods.0.encoder_lr: erm trains no encoder; leave i"),
    # a start, and what pulls back to it
    ([CLIP, "methods=[{name: erm, start: zero}]"], "command line: methods.0.start: input should be 'zero_shot', given"),
    ([CLIP, "methods=[{name: knn, start: zero_shot}]"], "command line: methods.0.start: knn computes its head, and t"),
    ([CLIP, "methods=[{name: erm, start: zero_shot, head: mlp}]"], "command line: methods.0.head: mlp cannot be combi"),
    ([CLIP, "methods=[{name: erm, start: zero_shot, head_init: random}]"], "command line: methods.0.head_init: erm st"),
    ([CLIP, "methods=[{name: linear_probe, start: zero_shot, center: zero}]"], "command line: methods.0.center: linea"),
    (["methods=[{name: erm, start: zero_shot}]"], "command line: methods.0.start: erm with start: zero_shot needs an "),
    (["methods=[{name: linear_probe, anchor: 1}]"], "command line: methods.0.anchor: linear_probe computes its head, "),
    (["methods=[{name: erm, head: mlp, anchor: 1}]"], "command line: methods.0.anchor: the head mlp has no weights of"),
    (["methods=[{name: erm, anchor: -1}]"], "command line: methods.0.anchor"),
    ([CLIP, "methods=[{name: erm, anchor: clap}]"], "command line: methods.0.anchor: clap pulls to the class embeddin"),
    ([CLIP, "encoder.trainable=true", "methods=[{name: clipood, anchor: 1}]"], "command line: methods.0: clipood: its"),
    (["methods=[knn]", "search={trials: 2, space: {anchor: {choice: [1, 2]}}}"], "command line: search.space.anchor: "),
    (["methods=[erm]", "search={trials: 3, space: {anchor: {choice: [clap]}}}"], "command line: search.space: trial 1"),
    (["methods=[{name: knn, pick: cross_domain}]", "protocol.selection=cross_domain"], "command line: methods.0.pick"),
    (["methods=[{name: erm, pick: cross_domain}]"], "command line: methods.0.pick: unknown key"),
    (["methods=[xdomainmix+sam, linear_probe]", "training.compile=true"], "command line: training.compile: has no eff"),
    (["methods=[erm+swad]", "training.patience=3"], "command line: methods.0: +swad decides itself which steps it ave"),
    ([END_TO_END, "training.mixed_precision=fp16"], "command line: training.mixed_precision: fp16 scales the loss, wh"),
    (["methods=[coral]"], "command line: methods.0: coral: its penalty changes only the encoder"),
    ([END_TO_END, "training.sampler=pooled", "methods=fish"], "command line: methods.0: fish: "),
    # the text side
    (["methods=[zero_shot]"], "command line: methods.0: zero_shot needs an encoder with a text side; use encoder.name"),
    (["methods=[{name: erm, head_init: zero_shot}]"], "command line: methods.0.head_init: erm with head_init: zero_sh"),
    ([CLIP, "less.head_init=zero_shot"], "r.yaml:4: methods.2: zero_shot starts from class embeddings, which need"),
    ([NORMALIZED, "methods=[{name: wise_ft, head_init: random}]"], "command line: methods.0.head_init: wise_ft starts"),
    ([NORMALIZED, "methods=[{name: wise_ft, head: mlp}]"], "command line: methods.0.head: mlp cannot be combined wit"),
    ([CLIP, "methods=[{name: erm, prompts: ['a {}']}]"], "command line: methods.0.prompts: erm uses no class embeddin"),
    # the search
    (["search={trials: 2, space: {lrr: {choice: [1]}}}"], "command line: search.space.lrr: is not a searchable hyper"),
    (["search={trials: 2, space: {momentum: {choice: [0.5]}}}"], "command line: search.space.momentum: has no effect "),
    (["search={trials: 2, space: {lr: {choice: [-1.0]}}}"], "command line: search.space: trial 1 draws lr = -1.0: "),
    (["search.trials=2"], "command line: search.trials: 2 would train each model 2 times with the same settings; set "),
    (["search.space={lr: {choice: [0.1]}}"], "command line: search.trials: 1 never uses search.space"),
    ([("[erm, sam", "[linear_probe+sam, sam")], "r.yaml:4: methods.0.name: linear_probe takes no gradient steps, so"),
    (["label_curve=true", "protocol={selection: oracle}"], "command line: label_curve: needs models that were picked"),
    (["protocol={name: official, test_domains: ink}"], "command line: protocol.test_domains: is only for leave_one"),
    ([("steps: 10", "epochs: 2")], "r.yaml:5: training.epochs: an epoch needs sampler: pooled; per_domain draws"),
    ([CLIP, "methods=[{name: erm, prompts: [a]}]"], "command line: methods.0.prompts"),
    ([compare("[sam, erm]")], "r.yaml:6: report.compare: must be a list of pairs of rows, such as [[xdomainmix, erm]]"),
    ([("[erm, sam", "[erm+samm, sam")], 'r.yaml:4: methods.0.name: no "samm" in sharpness or averaging; did you mean '),
    ([ENCODERS, "encoders=[]"], "command line: encoders: must be a list of blocks like encoder, each with a name"),
    (["protocol.together=[[a]]"], "command line: protocol.together: a set needs at least two domains"),
    (["methods=[erm, erm+swad]", "search={trials: 3, space: {patience.choice: [1, 2]}}"], "command line: search"),
    # overrides METHOD.KEY=VALUE
    ([ITEMS, LONG, "irm.x=3"], "command line: irm.x: no item of methods uses irm; add it to one, or leave this out"),
    ([ITEMS, LONG, "xdomainmx.warmup_steps=3"], 'command line: xdomainmx: unknown key; did you mean "xdomainmix"?'),
    ([ITEMS, LONG, "dir=x"], 'command line: dir: unknown key; did you mean "features.dir" or "output.dir"?'),
    ([ITEMS, LONG, "qqqq.x=1"], "command line: qqqq: unknown key; known: name, data, encoder, encoders, protocol, "),
    ([ITEMS, LONG, "xdomainmix+sam=3"], "command line: xdomainmix+sam: is a method, not a value; write xdomainmix+sam"),
    ([ITEMS, LONG, "mixed.alpha=0.3"], "command line: mixed.alpha: is a key of mixup and sagm; write mixed.mixup.alph"),
    (["methods=[sam, {name: erm+sagm, label: sam}]", "sam.rho=1"], "…command line: sam.rho: sam is the label of metho"),
    (["methods=[erm, {name: sam, label: erm.sam}]", "erm.sam.rho=1"], "command line: erm.sam.rho: may mean erm or erm"),
    ([LONG, "protocol.metric=balanced_acuracy"], "command line: protocol.metric: input should be 'accuracy', 'balance"),
    ([LONG, "methods=[{name:"], 'command line: "methods=[{name:": not valid YAML: it ends within brackets; put the wh'),
    ([LONG, "encoder.preprocessing={mean: 0.5}"], "command line: encoder.preprocessing.mean: must be a list, given 0."),
    # only the command line has keys of methods beside the blocks
    ([("{steps: 10}", "{steps: 10}\nsam: {rho: 0.1}")], "r.yaml:6: sam: unknown key"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "expected"), FAULTS, ids=[f"{i}" for i in range(len(FAULTS))])
def test_a_change_and_its_message(changes: list[Change], expected: str) -> None:
    found = faults(*changes)
    if expected.startswith("…"):
        assert any(fault.startswith(expected[1:]) for fault in found), found
    else:
        assert len(found) == 1 and found[0].startswith(expected), found


def test_all_faults_at_once_each_with_its_place() -> None:
    found = faults(("steps: 10", "stepps: 10, lr: fast"), ("model: resnet10t", "modell: a"), "xdomainmix.p_discard=2")
    assert [fault.partition(": ")[0] for fault in found] == ["r.yaml:3"] * 2 + ["r.yaml:5"] * 2 + ["command line"]


OVERRIDES = [
    ("encoders.2.model=x", "encoders.2 is not a block of keys"),
    ("encoders.0=x", "encoders is a list; write encoders.0.KEY=VALUE for its first item"),
    ("methods.0.head=mlp", "methods is not a block of keys; write METHOD.KEY=VALUE"),
    *((wrong, "is not an override; write key.sub=value") for wrong in ("steps", "=3", "training..lr=3")),
    ("training.lr=[1", "not valid YAML"),
    ("x=[&a 1, *a]", "aliases (*name) are not supported in recipes"),
]


@pytest.mark.parametrize(("override", "expected"), OVERRIDES)
def test_an_override_that_can_not_be_applied(override: str, expected: str) -> None:
    with pytest.raises(UserError) as fault:
        apply_override(parse(GOOD.replace(*LINES), "r.yaml"), override)
    assert str(fault.value).startswith("command line: ") and expected in str(fault.value)


YAML = [
    ("a: 1\na: 2", 'r.yaml:2: not valid YAML: the key "a" is written twice'),
    ("a: &x 1\nb: *x", "aliases"),
    ("a: &a {b: *a}\n", "not valid YAML"),
    ("a: !!python/object/apply:os.system ['touch exploded']\n", "os.system is not supported in recipes"),
    ("a:\n  b:\n    !!binary stHM\n", "r.yaml:3: not valid YAML: the tag tag:yaml.org,2002:binary is not supported"),
    ("- a", "a recipe is a mapping"),
    ("1: a", "the key 1 is not a text; write it in quotes"),
    ("a: \0", "special characters are not allowed"),
    ("[" * 5000, "not valid YAML"),
    (f"a: {'{b: ' * 3000}1{'}' * 3000}\n", "not valid YAML"),
    (f"training: {{steps: {'9' * 5000}}}\n", "not valid YAML"),
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("text", "words"), YAML, ids=range(len(YAML)))
def test_yaml_that_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UserError) as fault:
        parse(text, "r.yaml")
    assert words in str(fault.value) and "\n" not in str(fault.value) and not Path("exploded").exists()


@pytest.mark.timeout(60)
def test_thousands_of_unknown_keys_are_refused_soon() -> None:
    keys = "\n".join(f"  stepps{number}: 1" for number in range(20_000))
    text = f"name: good\ndata: {{name: digits}}\nmethods: [erm]\ntraining:\n{keys}\n"
    with pytest.raises(UserError) as fault:
        check(parse(text, "r.yaml"))
    lines = str(fault.value).split("\n")
    assert len(lines) < 100 and sum("unknown key; did you mean" in line for line in lines) == 50
    assert any("19950" in line for line in lines)


def test_the_place_of_a_key() -> None:
    training, methods = "training:\n  steps: 10\n  lr: 1e-3\n", "methods:\n  - erm\n  - {name: x,\n  p: 1}"
    text = parse(f"# a comment\nname: one\n{training}{methods}", "r")
    assert text.values["training"] == {"steps": 10, "lr": 1e-3}
    keys: list[Any] = [("training", "lr"), ("methods", 1, "p"), ("training", "unknown"), ("encoder",)]
    assert [text.where(key) for key in keys] == ["r:5", "r:9", "r:3", "r"]
    apply_override(text, "encoder.kwargs={bn_eps: 0.001}")
    assert text.values["encoder"] == {"kwargs": {"bn_eps": 0.001}}
    assert text.where(("encoder", "kwargs")) == "command line"
    apply_override(text, "training.epochs=2")
    assert text.values["training"] == {"lr": 0.001, "epochs": 2}, "steps and epochs clear each other"
    apply_override(text, "training.steps=5")
    assert text.values["training"]["epochs"] == 2, "both from the command line stay, for the check to refuse"
    assert parse("# nothing\n", "r").values == {}


def test_a_good_recipe_resolves_to_itself() -> None:
    made = recipe(("[erm, sam,", "[erm, sam+swad,"))
    names = [(item.label, *(part.name for part in item.parts)) for item in made.methods]
    assert names == [
        ("erm", "erm", "linear"),
        ("sam+swad", "erm", "linear", "sam", "swad"),
        ("less", "xdomainmix", "linear"),
    ]
    assert made.methods[2].algorithm.kwargs()["p_discard"] == 0.3
    assert made.report.compare == made.declared == () and made.report.margin is None
    assert not made.trains_encoders and made.needs_features()
    assert yaml.safe_load(made.as_yaml())["training"]["momentum"] == 0.9
    for changes in ([], [LINES], [ITEMS, LONG], [("steps: 10", "steps: 10, optimizer: adamw")]):
        made = recipe(*changes)
        for text in (made.as_yaml(), annotate(made)):
            assert check(parse(text, "again.yaml")).as_yaml() == made.as_yaml()


def test_heads_on_frozen_features_have_ten_seeds_others_five() -> None:
    changes = ("training.steps=10", "encoder.trainable=true", "less.trainable={blocks: 1}", "protocol.seeds=3")
    for change, seeds in zip(changes, (10, 5, 5, 3), strict=True):
        fixed = recipe(change)
        assert fixed.protocol.seeds == tuple(range(seeds))


@pytest.mark.parametrize(
    ("changes", "declared"),
    [
        ([compare("[[sam, erm], [less, sam]]")], [("sam", "erm"), ("less", "sam")]),
        ([ENCODERS, compare("[[sam, erm]]")], [("sam @ resnet10t", "erm @ resnet10t"), ("sam @ big", "erm @ big")]),
        ([ENCODERS, compare("[[erm @ big, erm @ resnet10t]]")], [("erm @ big", "erm @ resnet10t")]),
        # a pair that is left would keep new rows from a verdict; more rows leave the declaration as it is
        ([compare("[[sam, erm], [less, erm]]"), "methods=[erm, sam, rsc]"], []),
        ([compare("[[sam, erm]]"), "methods=[erm, sam, rsc]"], [("sam", "erm")]),
    ],
)
def test_declared_pairs_are_labels_of_rows(changes: list[Change], declared: list[tuple[str, str]]) -> None:
    made = recipe(*changes)
    assert [*made.declared] == declared == [*check(parse(made.as_yaml(), "again.yaml")).declared]


def test_two_rows_of_results_never_have_one_name() -> None:
    encoders = "encoders: [{name: timm, model: resnet10t, label: c}, {name: timm, model: resnet18, label: b @ c}]"
    methods = ("[erm,", "[{name: erm, label: a @ b}, {name: erm, label: a}, {name: erm, label: z},")
    assert faults((ENCODERS[0], encoders), methods) == [
        'r.yaml:3: encoders: two rows of results have the name "a @ b @ c"; change a label'
    ]


def test_methods_on_pooled_batches_and_with_epochs() -> None:
    """Their settings are checked where the number of steps is not known yet; inner steps by domain are refused."""
    every = {name: components.find("algorithms", name) for name in components.names("algorithms")}
    algorithms = [name for name, cls in every.items() if issubclass(cls, Algorithm) and not cls.needs_text]
    assert len(algorithms) > 10
    epochs = ("steps: 10", "epochs: 2, sampler: pooled")
    refused = faults(END_TO_END, epochs, f"methods=[{', '.join(algorithms)}, fish+sam]")
    assert [line.split(": ")[2] for line in refused] == ["fish", "fish+sam"]
    assert all("set training.sampler: per_domain" in line for line in refused)


@pytest.mark.parametrize(
    "changes",
    [
        [END_TO_END, "methods=[coral, coral+sam, mixstyle, dsu+sam, {name: lisa, mix: cutmix}]"],
        [END_TO_END, "methods=[erm]", "training.mixed_precision=fp16"],
        [NORMALIZED, "methods=[wise_ft, {name: erm, head_init: zero_shot, prompts: ['a {}', openai_imagenet]}]"],
        [CLIP, "methods=[{name: wise_ft, normalize: true}, {name: erm, head: cosine, head_init: zero_shot}]"],
        [("steps: 10", "steps: 10, lr: 1e-3, amsgrad: true")],
        ["training.steps=1e9", "search={trials: 2, space: {lr.choice: 0.1}}", "search.space={lr: {choice: 0.1}}"],
    ],
)  # fmt: skip
def test_what_is_right_loads(changes: list[Change]) -> None:
    assert recipe(*changes).methods


def test_another_component_from_the_command_line_drops_the_keys_of_the_former() -> None:
    clip = (CLIP[0], CLIP[1].replace("weights: demo", "weights: demo, prompts: ['a {}']"))
    made = recipe(clip, "encoder.name=timm", "encoder.model=resnet10t")
    assert "prompts" not in made.resolved()["encoder"] and made.methods[0].skipped is None
    [first, *_] = recipe(("[erm, sam", "[wise_ft, sam")).methods
    assert first.skipped == "needs an encoder with a text side", "a row, if there are others"


def test_adamw_decays_weights_by_default() -> None:
    adamw = ", optimizer: adamw"
    for keys, decay in (("", 0.0), (adamw, 0.01), (f"{adamw}, weight_decay: 0", 0.0), (", weight_decay: 0.1", 0.1)):
        made = recipe(("steps: 10", f"steps: 10{keys}"))
        assert made.training.weight_decay == made.resolved()["training"]["weight_decay"] == decay
        line = rf"^  weight_decay: {decay} +# sgd, adam: L2 penalty"
        assert re.search(line, annotate(made), re.MULTILINE)


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 2), (2, 1)])
def test_methods_that_can_not_see_the_whole_batch_are_refused(
    processes: int, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line each, with micro-batches and under a launcher; in one process without accumulation all train."""
    overrides = ["protocol.seeds=1", f"training.accumulation={accumulation}"]
    load("all_methods_end_to_end", ["protocol.seeds=1"])
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(UserError) as caught:
        load("all_methods_end_to_end", overrides)
    assert len(str(caught.value).splitlines()) == 2
    assert "mixstyle: it mixes styles" in str(caught.value) and "dsu: it measures" in str(caught.value)
    local = [*overrides, "training.sampler=pooled", "methods=[{name: xdomainmix, partners: local}]"]
    with pytest.raises(UserError, match="use partners: global"):
        load("all_methods_end_to_end", local)
    load("all_methods_end_to_end", [*local, "training.loss_average=sample"])
    searched = "search={trials: 9, space: {xdomainmix.partners: {choice: [global, local]}}}"
    with pytest.raises(UserError, match="of xdomainmix: partners: local averages the loss over parts"):
        load("all_methods_end_to_end", [*overrides, "training.sampler=pooled", "methods=[xdomainmix]", searched])


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["xdomainmix.warmup_steps=300"], "warmup_steps", [None, 300, 300, 300, None]),
        (["xdomainmix+sam.rho=0.1"], "sam.rho", [None, None, 0.1, 0.1, None]),
        (["erm.head=mlp", "erm.mlp.hidden_width=8"], "mlp.hidden_width", [8, None, None, None, None]),
        (["mixed.sagm.alpha=0.002", "mixed.mixup.alpha=0.3"], "alpha", [None, None, None, None, 0.3]),
        # the label wins over the written name, and this one over the component, in any order
        (["sam.rho=0.1", "xdomainmix+sam.rho=0.2", "wide 0.5.rho=0.3"], "sam.rho", [None, None, 0.2, 0.3, None]),
        (["methods=xdomainmix", "xdomainmix.warmup_steps=7"], "warmup_steps", [7]),
        (["methods=erm, xdomainmix,", "xdomainmix.p_discard=0.5"], "p_discard", [None, 0.5]),
    ],
)
def test_overrides_of_methods(overrides: list[str], key: str, expected: list[Any]) -> None:
    assert [getattr(item.block, key, None) for item in recipe(ITEMS, LONG, *overrides).methods] == expected


def test_other_overrides() -> None:
    of_second = "encoders.1.trainable={lora: {rank: 2}}", "encoders.1.label=x"
    first, second = (encoder.block for encoder in recipe(LINES, "encoders.0.trainable.blocks=3", *of_second).encoders)
    assert str(first.trainable) == "blocks=3" and second.trainable.lora.rank == 2 and second.label == "x"
    label = recipe("methods=[{name: erm, label: training}]", "training.lr=0.5")
    assert label.training.lr == 0.5, "blocks win over labels"
    assert recipe("protocol.test_domains=ink").protocol.test_domains == ("ink",)
    assert recipe("protocol.test_domains=null").protocol.test_domains is None
    ranges = "search.space.sam.rho={uniform: [0.1, 0.2]}", "search.space.lr.choice=0.1"
    space = recipe(LONG, "search.trials=2", *ranges).search.space
    assert space["sam.rho"].uniform == (0.1, 0.2) and space["lr"].choice == (0.1,)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["erm.trainable.blocks=2"], {"blocks": 2}),
        (
            ["erm.trainable={lora: {rank: 2, blocks: 1}}", "erm.trainable.lora.rank=4"],
            {"lora": {"rank": 4, "blocks": 1}},
        ),
        (["part.trainable.lora.rank=3"], {"lora": {"rank": 3, "blocks": 2}}),  # merged into the item's block
        (["part.trainable={lora: {rank: 3}}"], {"lora": {"rank": 3}}),  # replaces it
        (["part.trainable=true"], True),
    ],
)
def test_trainable_of_a_method_is_a_value_or_a_block_of_keys(overrides: list[str], expected: Any) -> None:
    items = "[erm, {name: lisa, label: part, trainable: {lora: {rank: 8, blocks: 2}}}]"
    methods = recipe((ITEMS[0], items), *overrides).methods
    trainable = methods[overrides[0].startswith("part")].block.trainable
    assert (trainable if trainable is True else trainable.model_dump(exclude_defaults=True)) == expected


def test_the_keys_that_the_tab_key_offers() -> None:
    values = {"data": {"name": "folder"}, "encoder": {"name": "timm"}, "methods": ["erm+sam"]}
    keys = {*recipe_keys(values, known_keys())}
    assert {"name", "data.root", "encoder.kwargs", "training.schedule.warmup_steps", "sam.rho", "erm.head_init"} <= keys
    assert not {key for key in keys if key.startswith(("methods.", "erm.name", "swad."))}
    assert "encoder.trainable" in keys, "a block beside other values is written whole"


def test_faults_outside_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.root: .*camelyon17_v1.0 does not exist; set data.root to a folder"):
        load("clip_camelyon", [f"data.root={tmp_path}"]).data.build()
    with pytest.raises(UserError, match=r"^encoders\.1\.model: timm .* has no model"):
        build_encoders(recipe(LINES, "encoders.1.model=nosuch"))
    with pytest.raises(
        UserError, match=r'timm .* has no model "ViT-B-32"; open_clip has it; write encoder.name=open_clip'
    ):
        build_encoders(recipe(LINES, "encoders.1.model=ViT-B-32"))


def test_recipes_are_found_by_file_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_recipe("demo").samefile(find_recipe("recipes/demo.yaml"))
    with pytest.raises(UserError, match='no such recipe; did you mean "demo"'):
        find_recipe("demmo.yaml")
    monkeypatch.chdir(tmp_path)
    Path("demo.yaml").write_text("name: own")
    assert find_recipe("demo.yaml").read_text() == "name: own"
    Path("pacs").mkdir()
    assert find_recipe("pacs") == find_recipe("recipes/pacs") != Path("pacs")
    with pytest.raises(UserError, match=r"\./pacs: is a folder"):
        find_recipe("./pacs")
    Path("sites.csv").write_text("path,domain,label\n")
    with pytest.raises(
        UserError, match=r"is a table, not a recipe; write clip_folder 'data={name: table, file: sites\.csv}'"
    ):
        read_recipe("sites.csv", [])


def put_weights(cache: Path, repository: str) -> None:
    """As `hf download` leaves them."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "snapshots/abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("abc")
    (folder / "snapshots/abc/model.safetensors").touch()


def test_a_folder_of_images_names_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    images = tmp_path / "my images"
    images.mkdir()

    def chosen() -> str:
        caplog.clear()
        with caplog.at_level("INFO", logger="xdm_ft"):
            text = read_recipe(str(images), ["training.steps=7"])
        assert text.values["data"]["root"] == str(images) and text.values["training"]["steps"] == 7
        return caplog.messages[0].removeprefix(f"{images}: a folder of images; the recipe is ")

    with pytest.raises(UserError, match=r"my images contains no images in <domain>/<class>/ folders; it is empty"):
        chosen()
    (images / "site/dog").mkdir(parents=True)
    (images / "site/dog/a.png").touch()
    with pytest.raises(
        UserError, match=r"my images: is a folder; the weights of .* add encoder.model=NAME encoder.wei"
    ):
        chosen()
    given = "my images: a folder of images; the recipe is {}, with the encoder given"
    for encoder, recipe in {
        "name=timm": "timm", "name=transformers": "clip", "model=vit_tiny_patch16_224.augreg_in21k": "timm",
        "model=hf-hub:a/b": "clip", "weights=clip.pt": "clip",
    }.items():  # fmt: skip
        with caplog.at_level("INFO", logger="xdm_ft"):
            text = read_recipe(str(images), [f"encoder.{encoder}"])
        assert (
            caplog.messages[-1].endswith(given.format(f"{recipe}_folder")) and text.values["name"] == f"{recipe}_folder"
        )
    assert recipe_of(images, {"encoder": {"name": "timm"}}).values["name"] == "timm_folder"
    put_weights(tmp_path / "hub", "timm/mobilenetv3_large_100.ra_in1k")
    assert chosen() == "timm_folder, whose weights are on this machine"
    with monkeypatch.context() as answering:
        answering.setattr(huggingface_hub.HfApi, "model_info", lambda api, name, timeout: None)
        assert chosen() == "clip_folder, whose weights are downloaded once"
    put_weights(tmp_path / "hub", "timm/vit_base_patch16_clip_224.openai")
    assert chosen() == "clip_folder, whose weights are on this machine"


def test_a_run_directory_stands_for_its_recipe(tmp_path: Path) -> None:
    """It may have been moved, and a folder that holds a recipe alone is none: nothing is written beside it."""
    run = tmp_path / "moved"
    run.mkdir()
    (run / "recipe.yaml").write_text("name: mine\noutput: {dir: elsewhere}\n")
    with pytest.raises(UserError, match=r"is a folder with a recipe, and no run; write .*moved/recipe\.yaml"):
        read_recipe(str(run), [])
    (run / "results.json").touch()
    assert read_recipe(str(run), []).values == {"name": "moved", "output": {"dir": str(tmp_path)}}
    (run / "recipe.yaml").write_text("output: 3\n")
    with pytest.raises(UserError, match="output is not a block of keys"):
        read_recipe(str(run), [])


def test_a_finished_run_is_said_at_once(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "xdm_ft")

    def said(text: str) -> list[str]:
        caplog.clear()
        say_if_finished(parse(text, "r.yaml"))
        return caplog.messages

    other = "{name: one, output: {dir: other}}"
    assert said("name: one") == said(other) == []
    (in_folder / "other/one").mkdir(parents=True)
    for file in ("results.json", "results.md"):
        (in_folder / "other/one" / file).touch()
    assert said(other) == ["other/one: a finished run is here"] and said("name: one") == []
    odd = ("{}", "{name: [one]}", "{name: one, output: 3}", "{name: one, output: {dir: [a]}}", f"name: {'x' * 300}")
    assert all(said(text) == [] for text in odd)
    monkeypatch.setenv("RANK", "1")
    assert said(other) == []
    monkeypatch.delenv("RANK")
    (in_folder / "other/one/state").mkdir()  # of a run that was interrupted
    assert said(other) == []
