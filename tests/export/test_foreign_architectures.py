"""Architectures that others wrote: no question, no code, no other source and no endless building comes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import open_clip
import pytest
import small_models
import torch
import transformers
from safetensors.torch import save_file
from small_models import add_to_hub, config_of, parts, photographs, write_config

import xdm_ft
from xdm_ft.cli.parser import main
from xdm_ft.encoders.open_clip import OpenClip
from xdm_ft.encoders.timm import Timm
from xdm_ft.encoders.transformers import Transformers
from xdm_ft.export.directory import read_config, write_directory
from xdm_ft.export.hub import check_files
from xdm_ft.model_sources.source import architecture, check_sizes, quiet
from xdm_ft.runtime.errors import UserError

MARKER = "code_of_others_has_run"
CODE = f"""
import os, pathlib
pathlib.Path(os.environ["MARKED"]).write_text("x")
from transformers import BertConfig, BertModel, BertTokenizer
class EvilConfig(BertConfig):
    model_type = "evil"
class EvilModel(BertModel):
    config_class = EvilConfig
class {MARKER}(BertTokenizer):
    pass
"""
TEXT = {
    "model_type": "evil", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "auto_map": {"AutoConfig": "evil.EvilConfig", "AutoModel": "evil.EvilModel"},
}  # fmt: skip
CLIP = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """HF_HOME with the repository attacker/text, whose code writes a file, and attacker/clip, which needs it."""
    cache = tmp_path / "home" / "hub"
    (text := tmp_path / "text").mkdir()
    (text / "config.json").write_text(json.dumps(TEXT))
    (text / "evil.py").write_text(CODE)
    tokenizer = {"tokenizer_class": MARKER, "auto_map": {"AutoTokenizer": [f"evil.{MARKER}", None]}}
    (text / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    add_to_hub(cache, "attacker/text", text)
    (clip := tmp_path / "clip").mkdir()
    config = {**CLIP, "text_cfg": {"hf_model_name": "attacker/text"}}
    (clip / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    save_file({"logit_scale": torch.zeros(1)}, clip / "open_clip_model.safetensors")
    add_to_hub(cache, "attacker/clip", clip)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    # transformers before 5 has a copy of it
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(cache), raising=False)
    monkeypatch.setenv("MARKED", str(cache.parent / MARKER))
    return cache.parent


def edit(model: Path, **encoder: Any) -> None:
    """Changes the encoder in config.json."""
    document = config_of(model)
    write_config(model, document | {"encoder": document["encoder"] | encoder})


def edit_architecture(model: Path, **text: Any) -> None:
    """Changes the text side in the architecture; slashes are written as escapes."""
    path = model / "demo_clip.json"
    document = json.loads(path.read_text())
    document["text_cfg"] |= text
    path.write_text(json.dumps(document).replace("/", "\\u002f").replace("trust", "\\u0074rust"))


OF_THE_HUB = ("hub", "encoder of the hub")
CASES = ["directory", "encoder of a recipe", *(pytest.param(name, marks=pytest.mark.soak) for name in OF_THE_HUB)]


@pytest.mark.parametrize("case", CASES)
def test_no_question_is_asked_and_no_code_runs(model, home, tmp_path, case, capsys, monkeypatch):
    """Whoever is asked says yes."""
    [image] = photographs(tmp_path, 1)
    arguments = ["predict", str(model), image, "--out", str(tmp_path / "out.csv")]
    if case == "encoder of the hub":
        edit(model, settings={"model": "hf-hub:attacker/clip", "weights": "pretrained", "kwargs": {}}, file=None)
        (model / "encoder.safetensors").unlink()
    else:
        edit_architecture(model, hf_model_name="attacker/text")
    if case == "hub":
        add_to_hub(home / "hub", "org/name", model)
        arguments[1] = "hf-hub:org/name"
    if case == "encoder of a recipe":
        arguments = ["features", "demo", "encoder.model=hf-hub:attacker/clip", "encoder.weights=pretrained"]
        arguments += [f"output.dir={tmp_path}", f"features.dir={tmp_path}"]
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "y")
    asked = []
    assert main(arguments) == 2 and not asked
    assert not (home / MARKER).exists(), "the code has run"
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("xdm-ft: ")]
    assert "names another source" in line or "needs code of a repository, which is never run" in line
    assert not (tmp_path / "out.csv").exists()


def test_the_tokenizer_of_a_repository_runs_no_code(home, tmp_path):
    """Its arguments are those of a config, and may ask for it."""
    (clip := tmp_path / "whole").mkdir()
    text = {**CLIP["text_cfg"], "hf_tokenizer_name": "attacker/text", "tokenizer_kwargs": {"trust_remote_code": True}}
    config = clip / "open_clip_config.json"
    config.write_text(json.dumps({"model_cfg": {**CLIP, "text_cfg": text}, "preprocess_cfg": {}}))
    (tmp_path / "whole_clip.json").write_text(json.dumps(CLIP))
    open_clip.add_model_config(tmp_path / "whole_clip.json")
    state = open_clip.create_model("whole_clip").state_dict()
    save_file({name: value.contiguous() for name, value in state.items()}, clip / "open_clip_model.safetensors")
    add_to_hub(home / "hub", "attacker/whole", clip)
    encoder = OpenClip(model="hf-hub:attacker/whole", weights="pretrained")
    with pytest.raises(UserError) as found:
        encoder.text_embeddings(("dog", "cat"))
    assert len(str(found.value).splitlines()) == 1 and not (home / MARKER).exists()


SOURCES = ("attacker/text", "hf-hub:attacker", "local-dir:x", "..", "~x", r"a\b", "https:x", "gpt2")
PLAIN = [("hf_model_name", "gpt2"), ("hf_tokenizer_name", "gpt2"), ("timm_model_name", "attacker/text")]


def refused(model, message):
    """Loading ends in one line."""
    with pytest.raises(UserError, match=message) as found:
        xdm_ft.load(model)
    assert len(str(found.value).splitlines()) == 1


def test_an_architecture_names_no_other_source(model):
    for key, name in [*(("hf_model_name", name) for name in SOURCES), *PLAIN]:
        edit_architecture(model, **dict.fromkeys(dict(PLAIN), None) | {key: name})
        refused(model, rf"demo_clip\.json: text_cfg\.{key}: .* names another source")


def test_arguments_name_no_other_source_and_no_endless_model(model):
    settings = config_of(model)["encoder"]["settings"]
    for kwargs, message in (
        *(({"text_cfg": {key: name}}, rf'text_cfg\.{key}: "{name}" names another source') for key, name in PLAIN),
        ({"vision_cfg": [{"x": [{"timm_model_name": "hf-hub:a/b"}]}]}, r"timm_model_name: .* names another source"),
        ({"text_cfg": {"tokenizer_kwargs": {"trust_remote_code": True}}}, "asks for code of a repository"),
        ({"auto_map": {"AutoModel": "evil.Evil"}}, "asks for code of a repository"),
    ):
        edit(model, settings=settings | {"kwargs": kwargs})
        refused(model, rf"config\.json: encoder\.settings\.kwargs: .*{message}")
    edit(model, settings=settings)
    edit_architecture(model, layers=10**7)
    refused(model, r"demo_clip\.json: text_cfg\.layers is 10000000, more than any model has")


def test_a_config_of_transformers_with_wrong_values_is_one_line(tmp_path):
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.ViTConfig(**size, image_size=32, patch_size=8)
    transformers.ViTModel(config).save_pretrained(tmp_path / "saved")
    settings = {"model": f"local-dir:{tmp_path}/saved", "weights": "pretrained", "kwargs": {}}
    squashed = small_models.SMALL.model_copy(update={"interpolation": "bicubic", "resize": "squash"})
    encoder = Transformers(**settings, preprocessing=squashed)
    model, path = tmp_path / "model", tmp_path / "model" / "vit.json"
    write_directory(parts(encoder, settings, name="transformers"), model, with_encoder=True)
    whole = json.loads(path.read_text())
    for changes, message in (
        ({"backbone": "attacker/repo"}, "backbone: .* names another source"),
        ({"auto_map": {"AutoModel": "evil.Evil"}}, "auto_map.AutoModel asks for code"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000, more than any model has; it may be 1,000 at"),
        ({"hidden_size": [32]}, "cannot read the config of|cannot be loaded"),
        ({"patch_size": 0}, "."),
        ({"model_type": "timm_wrapper"}, "."),
    ):
        path.write_text(json.dumps(whole | changes))
        refused(model, message)


@pytest.mark.parametrize(
    ("encoder", "arguments", "message"),
    [
        (Timm, {"model": "vit_tiny_patch16_224", "kwargs": {"depth": 10**7}}, "encoder.kwargs: depth is 10000000"),
        (Timm, {"model": "test_vit", "kwargs": {"reg_tokens": 10**9}}, "reg_tokens is 1000000000"),
        (OpenClip, {"kwargs": {"vision_cfg": {"layers": 10**7}}}, r"encoder\.kwargs: vision_cfg\.layers is"),
    ],
)
def test_an_endless_model_is_refused_before_it_is_built(encoder, arguments, message):
    own = {"model": "demo", "weights": "demo"} if encoder is OpenClip else {}
    with pytest.raises(UserError, match=message):
        encoder(**own | arguments)


def test_an_endless_architecture_of_the_hub_is_refused_before_it_is_built(home, tmp_path):
    (large := tmp_path / "large").mkdir()
    (large / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": {**CLIP, "vision_cfg": CLIP["vision_cfg"] | {"layers": 10**7}}})
    )
    configs = (
        (OpenClip, "vision_cfg.layers", {}),
        (Timm, "depth", {"architecture": "vit_tiny_patch16_224", "model_args": {"depth": 10**7}, "pretrained_cfg": {}}),
        (Transformers, "num_hidden_layers", {"model_type": "vit", "num_hidden_layers": 10**7}),
    )
    for number, (encoder, key, config) in enumerate(configs):
        (large / "config.json").write_text(json.dumps(config))
        add_to_hub(home / "hub", f"org/large{number}", large)
        with pytest.raises(UserError, match=rf"hf-hub:org/large{number}.*: {key} is 10000000, more than any model"):
            encoder(model=f"hf-hub:org/large{number}", weights="pretrained")


PUBLIC = {
    "EVA-E": {"vision_cfg": {"layers": 64, "width": 1792, "mlp_ratio": 8.571428571428571, "image_size": 224}},
    "EVA-CLIP-18B": {"num_hidden_layers": 48, "hidden_size": 5120, "intermediate_size": 25600, "vocab_size": 49408},
    "ConvNeXt-XXL": {"depths": [3, 4, 30, 3], "dims": [384, 768, 1536, 3072]},
    "ResNet-1202": {"layers": [200, 200, 200]},
}


def test_public_models_are_within_the_limits():
    models = open_clip.list_models()
    assert len(models) > 100
    configs = PUBLIC | {name: open_clip.get_model_config(name) for name in models}
    for kind in ("dinov2", "dinov3_vit", "siglip2", "swinv2", "sam", "vit_mae"):
        configs[kind] = architecture(transformers.AutoConfig.for_model(kind))
    for name, config in configs.items():
        check_sizes(config, name)


def test_a_text_side_of_transformers_goes_with_the_model(tmp_path):
    """Its config is in the directory, where its name was that of a repository; the tokenizer is not."""
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertConfig(**size, vocab_size=50, max_position_embeddings=16).save_pretrained(tmp_path / "text")
    named = {"hf_model_name": str(tmp_path / "text"), "hf_tokenizer_name": "org/words", "hf_model_pretrained": False}
    path = tmp_path / "bert_clip.json"
    path.write_text(json.dumps({**CLIP, "text_cfg": named | {"hf_proj_type": "linear"}}))
    open_clip.add_model_config(path)
    clip = open_clip.create_model("bert_clip", pretrained_text=False)
    weights = tmp_path / "weights.safetensors"
    save_file({name: value.contiguous() for name, value in clip.state_dict().items()}, weights)
    settings = {"model": str(path), "weights": str(weights), "kwargs": {}}
    encoder = OpenClip(**settings)
    assert not encoder.text_reason
    made = parts(encoder, settings, name="open_clip", trained=True)
    write_directory(made, tmp_path / "model", with_encoder=True)
    shutil.rmtree(tmp_path / "text")
    loaded = xdm_ft.load(tmp_path / "model", device="cpu")
    again = loaded.module.encoder
    state = again.state_dict()
    assert all(torch.equal(state[name], value) for name, value in encoder.state_dict().items())
    assert "has no tokenizer" in again.text_reason
    assert not [file for file in (tmp_path / "model").iterdir() if str(tmp_path).encode() in file.read_bytes()]
    write_directory(parts(again, loaded.config.encoder.settings, name="open_clip", trained=True), tmp_path / "b", True)
    for folder in ("model", "b"):
        files = check_files(tmp_path / folder, read_config(tmp_path / folder)[0])
        assert "text_config.json" in files and "bert_clip.json" in files


def test_the_prompt_is_as_before_afterwards():
    from transformers import dynamic_module_utils

    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    with quiet(), pytest.raises(ValueError, match="trust_remote_code"):
        dynamic_module_utils.resolve_trust_remote_code(None, "attacker/text", False, True)
    assert dynamic_module_utils.TIME_OUT_REMOTE_CODE == before > 0
