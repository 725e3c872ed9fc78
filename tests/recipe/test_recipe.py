"""Strict recipes: every fault at once, each with its place."""

import re
from typing import Any

import pytest
import yaml

from xdm_ft.algorithms import Algorithm
from xdm_ft.cli.validate import resolved_with_meanings
from xdm_ft.experiment.prepare import build_encoders
from xdm_ft.recipe import components
from xdm_ft.recipe.check import check, load
from xdm_ft.recipe.method import split_name
from xdm_ft.recipe.text import apply_override, parse
from xdm_ft.runtime.errors import UserError

GOOD = """\
name: good
data: {name: digits}
encoder: {name: timm, model: resnet10t}
methods: [erm, sam, {name: xdomainmix, p_discard: 0.3, label: less}]
training: {steps: 10}
"""


def faults(text: str, *overrides: str) -> list[str]:
    recipe = parse(text, "r.yaml")
    for override in overrides:
        apply_override(recipe, override)
    with pytest.raises(UserError) as fault:
        check(recipe)
    return str(fault.value).split("\n")


def test_a_good_recipe_and_its_defaults():
    recipe = check(parse(GOOD, "r.yaml"))
    assert [item.label for item in recipe.methods] == ["erm", "sam", "less"]
    assert recipe.methods[1].sharpness.name == "sam" and recipe.methods[1].algorithm.name == "erm"
    assert recipe.methods[2].algorithm.kwargs()["p_discard"] == 0.3
    assert recipe.report.compare == recipe.declared == () and recipe.report.margin is None
    assert not recipe.trains_encoders and recipe.needs_features()


def test_the_resolved_recipe_is_a_recipe_and_resolves_to_itself():
    once = check(parse(GOOD, "r.yaml")).as_yaml()
    again = check(parse(once, "resolved.yaml")).as_yaml()
    assert once == again
    assert yaml.safe_load(once)["training"]["momentum"] == 0.9


@pytest.mark.parametrize(
    ("override", "seeds"),
    [
        ("training.steps=10", 10),
        ("encoder.trainable=true", 5),
        ("methods=[erm, {name: erm, label: last, trainable: {blocks: 1}}]", 5),
        ("protocol.seeds=3", 3),
    ],
)
def test_heads_on_frozen_features_have_ten_seeds_others_five(override: str, seeds: int) -> None:
    text = parse(GOOD, "r.yaml")
    apply_override(text, override)
    recipe = check(text)
    assert recipe.protocol.seeds == tuple(range(seeds))
    assert not recipe.auto_seeds and recipe.next_seeds() is None


def test_auto_has_the_seeds_of_one_look_after_the_other() -> None:
    recipe = check(parse(GOOD + "protocol: {seeds: auto}\nreport: {margin: 1.0}\n", "r.yaml"))
    stages = []
    while recipe is not None:
        stages.append(recipe.protocol.seeds)
        assert recipe.resolved()["protocol"]["seeds"] == [*recipe.protocol.seeds]
        for text in (recipe.as_yaml(), resolved_with_meanings(recipe)):
            assert yaml.safe_load(text)["protocol"]["seeds"] == "auto" and check(parse(text, "r.yaml")).auto_seeds
        recipe = recipe.next_seeds()
    assert stages == [tuple(range(count)) for count in (5, 10, 20)]
    [fault] = faults(GOOD + "protocol: {seeds: auto}\n")
    assert fault.startswith("r.yaml:6: protocol.seeds: auto needs report.margin, to know when a row is settled; set it")


ENCODERS = "encoders: [{name: timm, model: resnet10t}, {name: timm, model: resnet18, label: big}]"


@pytest.mark.parametrize(
    ("compare", "declared"),
    [
        ("[[sam, erm], [less, sam]]", [("sam", "erm"), ("less", "sam")]),
        ("[[sam, erm]]", [("sam @ resnet10t", "erm @ resnet10t"), ("sam @ big", "erm @ big")]),
        ("[[erm @ big, erm @ resnet10t]]", [("erm @ big", "erm @ resnet10t")]),
    ],
)
def test_declared_pairs_are_labels_of_rows(compare: str, declared: list[tuple[str, str]]) -> None:
    text = GOOD.replace(GOOD.splitlines()[2], ENCODERS) if " @ " in str(declared) else GOOD
    recipe = check(parse(f"{text}report: {{compare: {compare}}}\n", "r.yaml"))
    assert [*recipe.declared] == declared
    assert check(parse(recipe.as_yaml(), "again.yaml")).declared == recipe.declared


@pytest.mark.parametrize(
    ("text", "compare", "expected"),
    [
        (
            GOOD,
            "[[sam, ern], [mor, erm]]",
            ['.0: no row "ern"; did you mean "erm"?', '.1: no row "mor"; known: erm, sam'],
        ),
        (GOOD, "[[sam, sam]]", [".0: compares sam with itself; name two rows"]),
        (GOOD, "[[sam, erm], [erm, sam]]", [": erm and sam are compared twice; keep one of the pairs"]),
        (GOOD, "[sam, erm]", [": must be a list of pairs of rows, such as [[xdomainmix, erm]], given ['sam', 'erm']"]),
        (GOOD, "[[sam, erm, less]]", [": must be a list of pairs of rows"]),
        (GOOD, "[[sam, 3]]", [".0.1: input should be a valid string, given 3"]),
        (ENCODERS, "[[sam, erm], [erm @ big, sam @ big]]", [": erm @ big and sam @ big are compared twice"]),
        (ENCODERS, "[[sam @ big, erm]]", [".0: sam @ big and erm: one of the two names an encoder; write METHOD @"]),
        (ENCODERS, "[[sam @ bigg, erm @ big]]", ['.0: no row "sam @ bigg"; did you mean "sam @ big"?']),
    ],
)
def test_pairs_that_can_not_be_compared(text: str, compare: str, expected: list[str]) -> None:
    text = GOOD.replace(GOOD.splitlines()[2], ENCODERS) if text == ENCODERS else text
    found = faults(f"{text}report: {{compare: {compare}}}\n")
    assert len(found) == len(expected)
    for fault, start in zip(found, expected, strict=True):
        assert fault.startswith(f"r.yaml:6: report.compare{start}")


@pytest.mark.parametrize(
    ("methods", "declared"),
    [("[erm, sam, rsc]", ()), ("[erm, sam, rsc, {name: erm, label: less}]", (("sam", "erm"), ("less", "erm")))],
)
def test_other_methods_on_the_command_line_end_a_declaration(methods: str, declared: tuple[Any, ...]) -> None:
    """A pair that is left would keep the new rows from a verdict; more rows leave the declaration as it is."""
    text = f"{GOOD}report: {{compare: [[sam, erm], [less, erm]]}}\n"
    recipe = parse(text, "r.yaml")
    apply_override(recipe, f"methods={methods}")
    assert check(recipe).declared == declared


def test_a_declaration_on_the_command_line_must_name_rows() -> None:
    text = f"{GOOD}report: {{compare: [[sam, erm], [less, erm]]}}\n"
    [fault] = faults(text, "methods=[erm, sam]", "report.compare=[[less, erm]]")
    assert fault.startswith('command line: report.compare.0: no row "less"')


@pytest.mark.parametrize("margin", ["0", "-1.0", "wide"])
def test_a_margin_is_a_positive_number(margin: str) -> None:
    [fault] = faults(f"{GOOD}report: {{margin: {margin}}}\n")
    assert fault.startswith("r.yaml:6: report.margin: input should be")


def test_all_faults_at_once_each_with_its_line():
    text = GOOD.replace("steps: 10", "stepps: 10, lr: fast").replace("model: resnet10t", "modell: a") + "extra: 1\n"
    found = faults(text)
    assert 'r.yaml:5: training.stepps: unknown key; did you mean "steps"?' in found
    assert any(f.startswith("r.yaml:5: training.lr: input should be a valid number") and "'fast'" in f for f in found)
    assert 'r.yaml:3: encoder.modell: unknown key; did you mean "model"?' in found
    assert "r.yaml:3: encoder.model: is needed" in found
    assert any(f.startswith("r.yaml:6: extra: unknown key") for f in found)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("name: good", "name: a/b", "r.yaml:1: name: must be a text without slashes"),
        ("name: good\n", "", "r.yaml: name: is missing; it names the run"),
        ("name: digits", "name: digit", 'r.yaml:2: data.name: no "digit" in data; did you mean "digits"?'),
        ("{name: digits}", "digits", "r.yaml:2: data: needs a name"),
        ("[erm, sam", "[ern, sam", 'r.yaml:4: methods.0.name: no "ern" in algorithms; did you mean "erm"?'),
        (
            "[erm, sam",
            '["erm,sam", sam',
            'r.yaml:4: methods.0.name: no "erm,sam" in algorithms; several are a list: [erm,sam]',
        ),
        (
            "[erm, sam",
            "[erm+samm, sam",
            'r.yaml:4: methods.0.name: no "samm" in sharpness or averaging; did you mean "sam"?',
        ),
        ("[erm, sam", "[erm+swad+swad, sam", "methods.0.name: +swad and +swad can not be combined; keep one"),
        ("resnet10t", "resnet10t, unfreeze_at: 5", "encoder.unfreeze_at: has no effect with a frozen encoder"),
        (
            "resnet10t",
            "resnet10t, trainable: true, unfreeze_at: 10",
            "r.yaml:3: encoder.unfreeze_at: 10 of 10 training steps leave the encoder untrained",
        ),
        ("[erm, sam", "[erm, erm", 'r.yaml:4: methods.1: two methods have the name "erm"'),
        ("[erm, sam", "[linear_probe+sam, sam", "linear_probe takes no gradient steps"),
        ("[erm, sam", "[3, sam", "r.yaml:4: methods.0: must be the name of a method"),
        ("p_discard: 0.3", "p_discard: 2", "methods.2.p_discard: input should be less than or equal to 1, given 2"),
        ("p_discard: 0.3", "p_discardd: 0", 'methods.2.p_discardd: unknown key; did you mean "p_discard"?'),
        (
            "[erm, sam, {name: xdomainmix, p_discard: 0.3, label: less}]",
            "3",
            "r.yaml:4: methods: must be a list",
        ),
        ("{steps: 10}", "{}", "r.yaml:5: training.steps: give steps or epochs"),
        ("{steps: 10}", "{steps: 10, epochs: 2, sampler: pooled}", "both steps and epochs are given"),
        ("{steps: 10}", "{epochs: 2}", "r.yaml:5: training.epochs: an epoch needs sampler: pooled; per_domain draws"),
        ("{steps: 10}", "{epochs: 2, sampler: class_balanced}", "an epoch needs sampler: pooled; class_balanced draws"),
        (
            "name: digits",
            "name: digits, train_augmentation: domainbed",
            "r.yaml:2: data.train_augmentation: has no effect with a frozen encoder",
        ),
        ("name: digits", "name: digits, train_augmentation: wilds", "data.train_augmentation: input should be 'none'"),
        ("{steps: 10}", "[1]", "r.yaml:5: training: must be a block of keys"),
        ("{steps: 10}", "{steps: 10}\nanalyse: maybe", "r.yaml:6: analyse: must be true or false, given 'maybe'"),
        ("{steps: 10}", "{steps: 10, mixed_precision: bf16}", "has no effect with a frozen encoder"),
        (
            "[erm, sam, {name: xdomainmix, p_discard: 0.3, label: less}]\ntraining: {steps: 10}",
            "[xdomainmix+sam, linear_probe]\ntraining: {steps: 10, compile: true}",
            "r.yaml:5: training.compile: has no effect on these methods",
        ),
        (
            "training: {steps",
            "protocol: {name: official, split_rule: domainbed}\ntraining: {steps",
            "protocol.split_rule: the",
        ),
        ("p_discard: 0.3", "warmup_steps: 10", "r.yaml:4: methods.2: xdomainmix: warmup_steps 10 leaves no step"),
        (
            "[erm, sam, {name: xdomainmix, p_discard: 0.3, label: less}]",
            "[zero_shot]",
            "r.yaml:4: methods.0: zero_shot needs an encoder with a text side; use encoder.name: open_clip",
        ),
        (
            "[erm, sam, {name: xdomainmix, p_discard: 0.3, label: less}]",
            "[{name: erm, head_init: zero_shot}]",
            "r.yaml:4: methods.0.head_init: erm with head_init: zero_shot needs an encoder with a text side; use",
        ),
    ],
)
def test_each_fault(old, new, expected):
    assert old in GOOD
    assert any(expected in fault for fault in faults(GOOD.replace(old, new, 1))), faults(GOOD.replace(old, new, 1))


def test_fp16_with_sam_is_refused_and_without_it_is_not():
    end_to_end = GOOD.replace("model: resnet10t", "model: resnet10t, trainable: true")
    found = faults(end_to_end, "training.mixed_precision=fp16")
    assert found == [
        "command line: training.mixed_precision: fp16 scales the loss, which makes the second pass of sam wrong; "
        "use bf16 or no with sam"
    ]
    recipe = parse(end_to_end, "r.yaml")
    apply_override(recipe, "training.mixed_precision=fp16")
    apply_override(recipe, "methods=[erm]")
    assert check(recipe).training.mixed_precision == "fp16"


def test_a_method_without_effect_on_cached_features_is_refused_there_and_not_end_to_end():
    text = GOOD.replace("methods: [erm, sam,", "methods: [coral, coral+sam, linear_probe,")
    found = faults(text)
    assert len(found) == 2
    assert (
        found[0].startswith("r.yaml:4: methods.0: coral: its penalty changes the encoder only")
        and "use erm" in found[0]
    )
    assert "coral+sam" in found[1]
    assert check(parse(text.replace("model: resnet10t", "model: resnet10t, trainable: true"), "r.yaml")).trains_encoders


def test_what_works_inside_the_encoder_or_on_images_is_refused_on_cached_features():
    text = GOOD.replace(
        "[erm, sam,", "[mixstyle, dsu+sam, {name: lisa, mix: cutmix}, {name: lisa, label: on_features},"
    )
    found = faults(text)
    assert [line.split(": ")[1:3] for line in found] == [
        ["methods.0", "mixstyle"], ["methods.1", "dsu+sam"], ["methods.2", "lisa"]
    ]  # fmt: skip
    assert all("encoder.trainable: true" in line for line in found)
    assert check(parse(text.replace("model: resnet10t", "model: resnet10t, trainable: true"), "r.yaml")).trains_encoders


def test_methods_on_pooled_batches_and_with_epochs():
    """Their settings are checked where the number of steps is not known yet; inner steps by domain are refused."""
    found = {name: components.find("algorithms", name) for name in components.names("algorithms")}
    algorithms = [name for name, cls in found.items() if issubclass(cls, Algorithm) and not cls.needs_text]
    assert len(algorithms) > 10
    text = GOOD.replace("steps: 10", "epochs: 2, sampler: pooled").replace("resnet10t", "resnet10t, trainable: true")
    refused = faults(text.replace("[erm, sam,", f"[{', '.join(algorithms)}, fish+sam,"))
    assert [line.split(": ")[2] for line in refused] == ["fish", "fish+sam"]
    assert all("set training.sampler: per_domain" in line for line in refused)


def test_head_init_zero_shot_needs_normalised_features():
    text = GOOD.replace("{name: timm, model: resnet10t}", "{name: open_clip, model: demo, weights: demo}")
    text = text.replace("p_discard: 0.3", "head_init: zero_shot")
    assert any("set encoder.normalize: true" in fault for fault in faults(text))
    recipe = parse(text, "r.yaml")
    apply_override(recipe, "encoder.normalize=true")
    assert check(recipe).methods[2].head_init == "zero_shot"


def test_wise_ft_starts_from_the_text_or_is_skipped():
    wise = GOOD.replace("[erm, sam,", "[wise_ft, sam,")
    assert [item.skipped for item in check(parse(wise, "r.yaml")).methods] == [
        "needs an encoder with a text side", None, None,
    ]  # fmt: skip
    clip = wise.replace("{name: timm, model: resnet10t}", "{name: open_clip, model: demo, weights: demo}")
    assert faults(clip) == [
        "r.yaml:4: methods.0: wise_ft starts from class embeddings, which need L2-normalised features; "
        "set encoder.normalize: true, or normalize: true for this method"
    ]
    normalised = clip.replace("weights: demo", "weights: demo, normalize: true")
    assert check(parse(normalised, "r.yaml")).methods[0].head_init == "zero_shot"
    random = normalised.replace("wise_ft", "{name: wise_ft, head_init: random}")
    assert "leave head_init out" in faults(random)[0]
    assert "methods.0.alpha" in faults(normalised.replace("wise_ft", "{name: wise_ft, alpha: 1.5}"))[0]


def test_a_method_reads_normalised_features_where_they_are_cached():
    clip = GOOD.replace("{name: timm, model: resnet10t}", "{name: open_clip, model: demo, weights: demo}")
    text = clip.replace("[erm, sam,", "[{name: wise_ft, normalize: true}, {name: linear_probe, normalize: true},")
    assert [item.reads_normalized for item in check(parse(text, "r.yaml")).methods] == [True, True, False]
    [fault] = faults(text, "encoder.trainable=true")
    assert fault.startswith("command line: methods.0.normalize: is for cached features")


def test_prompts_of_a_method_are_for_class_embeddings():
    clip = GOOD.replace("{name: timm, model: resnet10t}", "{name: open_clip, model: demo, weights: demo}")
    text = clip.replace("[erm, sam,", "[{name: zero_shot, prompts: openai_imagenet}, {name: erm, prompts: [a]},")
    assert [fault.split(": ")[1] for fault in faults(text)] == ["methods.1.prompts"]
    good = text.replace("prompts: [a]", "prompts: ['a {}', openai_imagenet]")
    assert faults(good) == [
        "r.yaml:4: methods.1.prompts: erm uses no class embeddings; leave it out, or set head_init: zero_shot"
    ]
    good = good.replace("name: erm,", "name: erm, head_init: zero_shot, normalize: true,")
    found = [item.block.prompts for item in check(parse(good, "r.yaml")).methods]
    assert found == [("openai_imagenet",), ("a {}", "openai_imagenet"), None]


def test_amsgrad_is_adams():
    assert check(parse(GOOD.replace("steps: 10", "steps: 10, amsgrad: true"), "r.yaml")).training.amsgrad
    [fault] = faults(GOOD.replace("steps: 10", "steps: 10, amsgrad: true, optimizer: sgd"))
    assert "training.amsgrad: is only for adam and adamw" in fault


@pytest.mark.parametrize(
    ("written", "decay"),
    [
        ("", 0.0),
        (", optimizer: sgd", 0.0),
        (", optimizer: adamw", 0.01),
        (", optimizer: adamw, weight_decay: null", 0.01),
        (", optimizer: adamw, weight_decay: 0", 0.0),
        (", optimizer: adam, weight_decay: 0.1", 0.1),
    ],
)
def test_adamw_decays_weights_by_default(written: str, decay: float):
    recipe = check(parse(GOOD.replace("steps: 10", f"steps: 10{written}"), "r.yaml"))
    assert recipe.training.weight_decay == recipe.resolved()["training"]["weight_decay"] == decay
    printed = resolved_with_meanings(recipe)
    assert re.search(rf"^  weight_decay: {decay} +# sgd, adam: L2 penalty", printed, re.MULTILINE)
    assert check(parse(recipe.as_yaml(), "again.yaml")).training == recipe.training


def test_another_component_from_the_command_line_drops_the_keys_of_the_former():
    text = GOOD.replace(
        "{name: timm, model: resnet10t}", "{name: open_clip, model: demo, weights: demo, prompts: ['a {}']}"
    )
    recipe = parse(text, "r.yaml")
    apply_override(recipe, "encoder.name=timm")
    apply_override(recipe, "encoder.model=resnet10t")
    assert "prompts" not in check(recipe).resolved()["encoder"]
    assert any("encoder.prompts: unknown key" in f for f in faults(text, "encoder.name=timm", "encoder.prompts=[a]"))


def test_numbers_written_as_yaml_text_are_numbers():
    assert check(parse(GOOD.replace("steps: 10", "steps: 10, lr: 1e-3"), "r.yaml")).training.lr == 1e-3


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("erm", ("erm", [])),
        ("sam", ("erm", ["sam"])),
        ("a+sam", ("a", ["sam"])),
        ("sam+swad", ("erm", ["sam", "swad"])),
        ("a+swad+sam", ("a", ["swad", "sam"])),
    ],
)
def test_method_names(name, parts):
    assert split_name(name) == parts


def test_sharpness_and_averaging_have_their_settings_in_the_item():
    text = GOOD.replace("[erm, sam,", "[{name: erm+sam+swad, sam.rho: 0.1, swad.n_converge: 2}, swad,")
    first, second, _ = check(parse(text, "r.yaml")).methods
    assert first.sharpness.build().rho == 0.1 and first.averaging.build().n_converge == 2
    assert second.sharpness is None and second.averaging.kwargs() == {
        "n_converge": 3, "n_tolerance": 6, "tolerance_ratio": 0.3,
    }  # fmt: skip


def test_a_recipe_whose_data_are_not_there_says_so(tmp_path):
    recipe = load("clip_camelyon", [f"data.root={tmp_path}"])
    with pytest.raises(UserError, match=r"data.root: .*camelyon17_v1.0 does not exist; set data.download: true"):
        recipe.data.build()


@pytest.mark.parametrize("environment, accumulation", [({}, 2), ({"WORLD_SIZE": "2"}, 1)])
def test_methods_that_can_not_see_the_whole_batch_are_refused(
    environment: dict[str, str], accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line each, with micro-batches and under a launcher; in one process without accumulation all train."""
    overrides = ["protocol.seeds=1", f"training.accumulation={accumulation}"]
    load("all_methods_end_to_end", ["protocol.seeds=1"])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        load("all_methods_end_to_end", overrides)
    assert len(str(caught.value).splitlines()) == 2
    assert "mixstyle: it mixes the styles" in str(caught.value) and "dsu: it measures" in str(caught.value)
    local = [*overrides, "training.sampler=pooled", "methods=[{name: xdomainmix, partners: local}]"]
    with pytest.raises(UserError, match="use partners: global"):
        load("all_methods_end_to_end", local)
    load("all_methods_end_to_end", [*local, "training.loss_average=sample"])
    searched = "search={trials: 9, space: {xdomainmix.partners: {choice: [global, local]}}}"
    with pytest.raises(UserError, match="of xdomainmix: partners: local averages the loss over each part"):
        load("all_methods_end_to_end", [*overrides, "training.sampler=pooled", "methods=[xdomainmix]", searched])


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        ("2", "trainable: must be true, false, {blocks: k} or {lora: {rank: r}}, given 2"),
        ("{blocks: 0}", "trainable.blocks: input should be greater than or equal to 1, given 0"),
        ("{}", "trainable.blocks: is needed"),
        ("{lora: 8}", "trainable.lora: must be a block of keys, given 8"),
        ("{lora: {r: 3}}", "trainable.lora.r: unknown key"),
        ("{blocks: 1, lora: {}}", "trainable: has both blocks and lora; keep one, or write {lora: {blocks: k}}, given"),
    ],
)
def test_a_fault_in_trainable_is_one_line_about_what_was_meant(trainable: str, expected: str) -> None:
    for key in ("encoder", "methods.0"):
        text = GOOD.replace("resnet10t", f"resnet10t, trainable: {trainable}")
        if key != "encoder":
            text = GOOD.replace("[erm,", f"[{{name: erm, trainable: {trainable}}},")
        [fault] = faults(text)
        assert f"{key}.{expected}" in fault


def test_two_rows_of_results_never_have_one_name() -> None:
    encoders = "encoders:\n- {name: timm, model: resnet10t, label: c}\n- {name: timm, model: resnet18, label: b @ c}"
    text = GOOD.replace("encoder: {name: timm, model: resnet10t}", encoders)
    assert check(parse(text, "r.yaml")).several_encoders
    text = text.replace("[erm,", "[{name: erm, label: a @ b}, {name: erm, label: a}, {name: erm, label: z},")
    assert faults(text) == ['r.yaml:3: encoders: two rows of results have the name "a @ b @ c"; change a label']


SEVERAL = GOOD.replace(
    "encoder: {name: timm, model: resnet10t}",
    "encoders:\n- {name: timm, model: resnet10t, trainable: {blocks: 1}}\n- {name: timm, model: resnet18}",
)


def test_validate_prints_a_recipe_of_several_encoders_that_resolves_to_itself() -> None:
    once = check(parse(SEVERAL, "r.yaml"))
    assert check(parse(resolved_with_meanings(once), "shown.yaml")).as_yaml() == once.as_yaml()


def test_an_override_names_an_item_of_encoders_by_its_place() -> None:
    text = parse(SEVERAL, "r.yaml")
    for override in ("encoders.1.trainable={lora: {rank: 2}}", "encoders.0.trainable.blocks=3", "encoders.1.label=x"):
        apply_override(text, override)
    recipe = check(text)
    assert str(recipe.encoder.block.trainable) == "blocks=3"
    assert recipe.encoders[1].block.trainable.lora.rank == 2 and recipe.encoders[1].block.label == "x"
    assert faults(SEVERAL, "encoders.0.trainable.blocks=0") == [
        "command line: encoders.0.trainable.blocks: input should be greater than or equal to 1, given 0"
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("encoders.2.model=x", "encoders.2 is not a block of keys"),
        ("encoders.small.model=x", "encoders.small is not a block of keys"),
        ("encoders.0=x", "encoders is a list; write encoders.0.KEY=VALUE for its first item"),
        ("methods.0.head=mlp", "methods is not a block of keys; write METHOD.KEY=VALUE"),
    ],
)
def test_an_override_that_names_no_item_says_what_to_write(override: str, expected: str) -> None:
    with pytest.raises(UserError) as fault:
        apply_override(parse(SEVERAL, "r.yaml"), override)
    assert str(fault.value).endswith(expected)


def test_a_fault_of_one_of_several_encoders_names_it() -> None:
    encoders = build_encoders(check(parse(SEVERAL.replace("resnet18", "test_resnet"), "r.yaml")))
    assert list(encoders) == ["resnet10t", "test_resnet"]
    with pytest.raises(UserError, match=r"^encoders\.1\.model: timm .* has no model"):
        build_encoders(check(parse(SEVERAL.replace("resnet18", "nosuch"), "r.yaml")))
