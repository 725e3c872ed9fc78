"""The text side of encoders: embeddings by hand, prompts, and what a model without texts says."""

from __future__ import annotations

import copy
import logging
import sys
from pathlib import Path

import miniature
import open_clip
import pytest
import tiny_transformers
import torch
from pydantic import ValidationError
from tiny_models import TEXT, Family, tiny_clip
from torch import Tensor

from xdm_ft.cli.parser import main
from xdm_ft.model_sources.prompts import warn_of_class_names
from xdm_ft.recipe import components
from xdm_ft.recipe.check import load
from xdm_ft.runtime.errors import UserError

CLASSES = ("dog", "polar_bear", "guitar")
WORDS = ("dog", "polar bear", "guitar")
PROMPTS = ("a photo of a {}", "a sketch of a {}")
RECIPE = """\
name: pooled
data: {name: pacs, root: data}
protocol: {name: leave_one_domain_out, selection: train_val, seeds: 1}
encoder: {name: open_clip, model: demo, weights: demo, normalize: true, pooling: POOLING}
methods: [METHODS]
training: {steps: 2}
"""


def embed(name: str, family: Family, text: str) -> Tensor:
    """CLIP of transformers reads up to </s>; SigLIP reads the padding of the whole context too."""
    if name == "open_clip":
        return family.model.encode_text(open_clip.get_tokenizer("tiny_clip")([text]))[0]
    ids = {word: i for i, word in enumerate(tiny_transformers.WORDS)}
    tokens = [*(ids[word] for word in text.split()), 1]
    if name == "siglip":
        tokens += [0] * (8 - len(tokens))
    features = family.model.get_text_features(input_ids=torch.tensor([tokens]))
    return getattr(features, "pooler_output", features)[0]  # before transformers 5 a tensor


@torch.no_grad()
@pytest.mark.parametrize("name", ["open_clip", "clip", "siglip"])
def test_embeddings_are_averages_of_normalised_prompts(families: dict[str, Family], name: str) -> None:
    family, prompts = families[name], PROMPTS
    encoder, expected = family.encoder(prompts=prompts), []
    for word in WORDS:
        each = torch.stack([embed(name, family, prompt.format(word)) for prompt in prompts])
        mean = (each / each.norm(dim=1, keepdim=True)).mean(0)
        expected.append(mean / mean.norm())
    embeddings = encoder.text_embeddings(CLASSES)
    torch.testing.assert_close(embeddings, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert encoder.exact_prompts(CLASSES) == [prompt.format(word) for word in WORDS for prompt in prompts]
    assert encoder.logit_scale == pytest.approx(family.model.logit_scale.exp().item())
    one_by_one = torch.cat([encoder.text_embeddings((word,)) for word in CLASSES])
    torch.testing.assert_close(one_by_one, embeddings, rtol=1e-4, atol=1e-5)
    other = encoder.text_embeddings(CLASSES, ("photo {}",))
    assert other.shape == (3, encoder.width) and not torch.allclose(other, embeddings, atol=1e-3)


@torch.no_grad()
def test_the_80_templates_of_clips_authors(families: dict[str, Family]) -> None:
    """Selected by name, for the encoder or for one method; equal to the library's own classifier."""
    own, words = families["open_clip"], ("dog", "guitar")
    frozen = copy.deepcopy(own.model).requires_grad_(False)  # torch chooses its attention kernel by this
    tokenizer = open_clip.get_tokenizer("tiny_clip")
    library = open_clip.build_zero_shot_classifier(frozen, tokenizer, words, open_clip.OPENAI_IMAGENET_TEMPLATES).T
    of_encoder, of_method = own.encoder(prompts=("openai_imagenet",)), own.encoder()
    torch.testing.assert_close(of_encoder.text_embeddings(words), library, rtol=0, atol=1e-6)
    torch.testing.assert_close(of_method.text_embeddings(words, ("openai_imagenet",)), library, rtol=0, atol=1e-6)
    prompts = of_method.exact_prompts(words, ("openai_imagenet", "my {}"))
    assert len(prompts) == 162 and prompts[:2] == ["a bad photo of a dog.", "a photo of many dog."]
    assert prompts[80] == "my dog" and prompts[161] == "my guitar"
    assert of_method.exact_prompts(("{0} set",)) == ["a photo of a {0} set"], "braces in class names are text"


@pytest.mark.parametrize(
    ("name", "prompt", "warning"),
    [
        ("open_clip", "a very " + 14 * "very " + "large {}", "3 prompts are longer than 14 tokens"),
        ("clip", "a photo of a photo of a photo of a {}", "3 prompts are longer than 8 tokens"),
    ],
)
def test_cut_prompts_are_reported(families: dict[str, Family], name: str, prompt: str, warning: str, caplog) -> None:
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        assert families[name].encoder(prompts=(prompt,)).text_embeddings(CLASSES).isfinite().all()
        assert warning in caplog.text
        caplog.clear()
        families[name].encoder().text_embeddings(CLASSES)
        assert caplog.text == ""


@pytest.mark.parametrize("name", ["open_clip", "clip", "siglip"])
def test_two_classes_that_are_one_text_are_refused(families: dict[str, Family], name: str) -> None:
    encoder = families[name].encoder()
    assert encoder.read_prompts(CLASSES) == encoder.exact_prompts(CLASSES), "what is not cut is printed as it is"
    for names in (("dog", "guitar", "polar_bear", "polar bear"), ("guitar_", "dog", "guitar"), ("dog", "a", "  dog")):
        with pytest.raises(
            UserError, match=r'^data\.class_names: ".*" and ".*" are one text to the encoder \("a photo of'
        ):
            encoder.read_prompts(names)
    # one of several templates that cuts the difference off does not make them one
    long = "a photo of a photo of a photo of a photo of a photo of a {}"
    with pytest.raises(UserError, match=r'"dog" and "polar_bear" are one text to the encoder \("a photo of a photo of'):
        encoder.read_prompts(CLASSES, (long,))
    first, second, *_ = encoder.read_prompts(CLASSES, (long, "a {}"))
    assert first.startswith("a photo of a photo") and first.endswith(" … (cut: longer than the context)")
    assert "dog" not in first and second == "a dog"


def test_commands_refuse_two_classes_that_are_one_text(in_folder: Path, capsys) -> None:
    miniature.domainbed(in_folder / "data", "pacs")
    text = RECIPE.replace("POOLING", "null").replace(
        "data}", "data, counts: any, class_names: {dog: hot_dog, horse: hot dog}}"
    )
    Path("hot.yaml").write_text(text.replace("METHODS", "zero_shot"))
    assert main(["run", "hot.yaml", f"features.dir={in_folder}/cache"]) != 0
    screen = capsys.readouterr()
    assert '"hot_dog" and "hot dog" are one text to the encoder ("a photo of a hot dog")' in screen.out + screen.err
    Path("cold.yaml").write_text(text.replace("METHODS", "erm"))  # which reads no text
    assert main(["validate", "cold.yaml", f"features.dir={in_folder}/cache"]) == 0


@pytest.mark.parametrize("template", ["a photo", "a {} of a {}", "a photo of a {class_name}", "a {} of {x}"])
def test_templates_must_name_the_class_once(template: str) -> None:
    settings = components.settings_model(components.find("encoders", "open_clip"))
    with pytest.raises(ValidationError, match=r"must hold \{\} once"):
        settings(model="demo", weights="demo", prompts=[template])


def test_warnings_of_class_names() -> None:
    assert warn_of_class_names(("dog", "polar_bear", "ink")) == []
    numeric, short = warn_of_class_names(("0", "17", "3.5", "dog", "ab"))
    assert "0, 17, 3.5" in numeric and "numbers" in numeric
    assert "ab" in short and "dog" not in short
    assert "data.class_names" in numeric and "data.class_names" in short


def test_without_text_side_or_outside_its_space(families: dict[str, Family]) -> None:
    for name, keys, reason in (
        ("dinov2", {}, "has no text side; use a CLIP or SigLIP model"),
        ("clip", {"pooling": "mean"}, "do not match the text embeddings"),
    ):
        encoder = families[name].encoder(**keys)
        assert reason in encoder.text_reason
        with pytest.raises(UserError, match=reason):
            encoder.text_embeddings(CLASSES)


def test_tokenizer_that_needs_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    clip = tiny_clip(tmp_path, "tiny_hf_text", text_cfg={**TEXT, "hf_tokenizer_name": "acme/words"})
    encoder = clip.encoder()  # features need no tokenizer
    with pytest.raises(UserError, match="pip install transformers"):
        encoder.text_embeddings(CLASSES)


@pytest.mark.parametrize("methods", ["zero_shot", "{name: erm, head_init: zero_shot}"])
def test_class_embeddings_need_the_projected_feature(methods: str, tmp_path: Path) -> None:
    """Before any data is read."""
    path = tmp_path / "pooled.yaml"
    path.write_text(RECIPE.replace("METHODS", methods).replace("POOLING", "cls"))
    with pytest.raises(
        UserError, match=r"needs class embeddings, but encoder\.pooling: cls gives features that do not match"
    ):
        load(str(path), [])
    for pooling in ("projected", "null"):
        path.write_text(RECIPE.replace("METHODS", methods).replace("POOLING", pooling))
        load(str(path), [])
