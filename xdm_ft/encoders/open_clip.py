"""Any open_clip model (CLIP, SigLIP, CoCa, …): projected image features, and text embeddings for zero-shot."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from torch import Tensor

from xdm_ft.blocks import PoolingChoice, clip_blocks, clip_pooled, clip_reason, clip_stage_names, outside_text_space
from xdm_ft.encoders import (
    OWN_PREPROCESSING,
    LibraryEncoder,
    NormalizeOfText,
    Portable,
    PreprocessingChoice,
    TextEncoder,
    square_preprocessing,
)
from xdm_ft.image_files.remote import hub
from xdm_ft.model_sources.prompts import (
    DEFAULT_PROMPTS,
    EncoderPrompts,
    expand_templates,
    fill,
    in_words,
    validate_prompts,
    warn_of_cut,
)
from xdm_ft.model_sources.source import (
    TEXT_CONFIG,
    architecture,
    asks_for_code,
    check_hub_weights,
    check_sizes,
    download_failed,
    file_of_weights,
    mismatch,
    network_error,
    pretraining_of,
    pretraining_of_file,
    quiet,
    read_config,
    read_weights,
    reason_of,
    tokenizer_errors,
    unknown_model,
    weights_inside,
    without_code,
    wrong_kwargs,
)
from xdm_ft.runtime.errors import UserError, did_you_mean

logger = logging.getLogger("xdm_ft")

DEMO = Path(__file__).resolve().parents[1] / "model_sources" / "demo"  # the tiny CLIP that comes with the package
QUICKGELU = "-quickgelu"
"""End of the names of models with this activation. Weights trained with it load into a model with GELU without any
error, and features are then wrong."""


class OpenClip(LibraryEncoder, TextEncoder):
    """Any model of open_clip with its weights. z is the projected image feature [B,K], L2-normalised if `normalize`.

    Weights are always loaded, since CLIP without pre-training is of no use, by safetensors or with `weights_only=True`.
    The parameters of the text side never train.
    """

    libraries = ("open_clip_torch", "timm")
    reserved = (
        "pretrained", "load_weights", "precision", "device", "jit", "pretrained_image", "pretrained_text",
        "pretrained_hf", "pretrained_image_path", "pretrained_text_path", "force_preprocess_cfg", "cache_dir",
        "output_dict", "require_pretrained", "weights_only",
    )  # fmt: skip

    def __init__(
        self,
        *,
        model: Annotated[
            str,
            Field(
                min_length=1,
                description="open_clip model, hf-hub:ORGANISATION/NAME, local-dir:FOLDER, a config file (.json), or "
                "demo (the tiny CLIP that comes with the package)",
            ),
        ],
        weights: Annotated[
            str,
            Field(
                min_length=1,
                description="tag; .safetensors or .pt file; hf-hub:ORGANISATION/NAME; pretrained if the model is a hub "
                "repository or a folder; demo",
            ),
        ],
        kwargs: Annotated[
            dict[str, Any], Field(description="the model's own arguments, as for open_clip.create_model")
        ] = {},  # noqa: B006 (read only)
        preprocessing: PreprocessingChoice = OWN_PREPROCESSING,
        normalize: NormalizeOfText = False,
        prompts: EncoderPrompts = DEFAULT_PROMPTS,
        pooling: PoolingChoice = None,
    ) -> None:
        import open_clip

        super().__init__(kwargs, normalize, pooling)
        self.prompts = validate_prompts(prompts)
        self.source = resolve(model, weights, kwargs)
        self.model = _create(self.source, kwargs)
        # now, as a process that unpickles the encoder does not know a model of the recipe's own
        config = open_clip.get_model_config(self.source.name)
        self.built_from = {"component": "open_clip", "model": self.source.name, "config": config, "kwargs": kwargs}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name.startswith("visual."))
        self.text_reason = outside_text_space(pooling)
        if not self.text_reason and config["text_cfg"].get("hf_tokenizer_name") == "":  # `portable` has left it out
            self.text_reason = (
                f'encoder.model: "{model}" belongs to a model directory, which has no tokenizer; give the '
                "model's own name"
            )
        self.pretraining = self.source.pretraining
        self.stem_names, self.stage_names, self.transition_names = clip_stage_names(self.model.visual, "model.visual")
        self.logit_scale = self.model.logit_scale.exp().item()
        of_model = self.model.visual.preprocess_cfg
        published = square_preprocessing(
            "encoder.model",
            2 * [of_model["size"]] if isinstance(of_model["size"], int) else of_model["size"],
            of_model["mean"],
            of_model["std"],
            of_model["resize_mode"],
            interpolation=of_model["interpolation"],
        )
        self.prepare(model, published, preprocessing, clip_reason(self.model.visual, pooling))

    def pooled(self, images: Tensor) -> Tensor:
        if self.pooling in (None, "projected"):
            z: Tensor = self.model.encode_image(images, normalize=False)
            return z
        return clip_pooled(self.model.visual, images, self.pooling)

    def without_spelling(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder`. The text side is left out: no feature depends on it."""
        rest, config, kwargs = super().without_spelling(identity), identity.get("config"), identity.get("kwargs")
        if not isinstance(config, dict) or not isinstance(kwargs, dict):
            return rest
        image_side = {key: value for key, value in config.items() if key != "text_cfg"}
        written = {"model": _file_stem(str(identity["model"])), "kwargs": _with_activation(kwargs, config)}
        return {**rest, **written, "config": image_side}

    def portable(self) -> Portable:
        name, config = self.source.name, self.built_from["config"]
        kwargs = _with_activation(self.built_from["kwargs"], config)
        state = self.model.state_dict()
        if _built_in(name):
            return Portable({"model": name, "kwargs": kwargs}, state)
        model, text, files = f"{_file_stem(name)}.json", dict(config["text_cfg"]), {}
        if text.get("hf_model_name"):
            text["hf_model_name"], files[TEXT_CONFIG] = TEXT_CONFIG, architecture(self.model.text.config)
        if text.get("hf_tokenizer_name"):
            text["hf_tokenizer_name"] = ""  # of another repository, and only texts need it
        files[model] = {**config, "text_cfg": text}
        return Portable({"model": model, "kwargs": kwargs}, state, files)

    def block_candidates(self) -> Sequence[Sequence[str]]:
        return clip_blocks(self.model.visual, "model.visual")

    def text_embeddings(self, class_names: tuple[str, ...], prompts: tuple[str, ...] | None = None) -> Tensor:
        """See `TextEncoder`. On the CPU. Prompts longer than the model's context are cut, with a warning."""
        import open_clip

        tokenizer = self._tokenizer()
        if isinstance(tokenizer, open_clip.SimpleTokenizer):  # tokenizers of transformers cut in other ways
            longest = tokenizer.context_length - 2  # without start and end token
            exact = self.exact_prompts(class_names, prompts)
            warn_of_cut([prompt for prompt in exact if len(tokenizer.encode(prompt)) > longest], longest)
        weight = open_clip.build_zero_shot_classifier(
            self.model,
            tokenizer,
            [in_words(name) for name in class_names],
            [partial(fill, template) for template in expand_templates(prompts or self.prompts)],
            device=next(self.model.parameters()).device,
        )  # [K,C]
        return weight.T.float().cpu()

    def as_read(self, texts: list[str]) -> list[tuple[str, tuple[int, ...]]]:
        """See `TextEncoder`."""
        import open_clip

        tokenizer = self._tokenizer()
        tokens = tokenizer(texts)  # [n,L]
        longest = tokens.shape[1]
        whole = tokenizer(texts, context_length=8 * longest)  # their end is padding
        is_cut = (whole[:, longest:] != whole[:, -1:]).any(1).tolist()
        is_own = isinstance(tokenizer, open_clip.SimpleTokenizer)

        def left(text: str, row: Tensor) -> str:
            if is_own:
                return str(tokenizer.decode(tokenizer.encode(text)[: longest - 2])).strip()
            return str(tokenizer.tokenizer.decode(row.tolist(), skip_special_tokens=True))

        return [
            (left(text, row) if cut else text, tuple(row.tolist()))
            for text, row, cut in zip(texts, tokens, is_cut, strict=True)
        ]

    def _tokenizer(self) -> Any:
        """Not kept: copies of the encoder would take its dictionary along, which takes longer than the weights."""
        import open_clip

        # of the config's arguments for transformers' tokenizer, this one is replaced
        of_transformers = self.built_from["config"]["text_cfg"].get("hf_tokenizer_name")
        arguments = {"trust_remote_code": False} if of_transformers else {}
        repository = of_transformers or None  # open_clip's own tokenizer comes with it
        with tokenizer_errors(self.source.name, self.source.repository), hub(repository), quiet(progress_bars=True):
            return open_clip.get_tokenizer(self.source.name, **arguments)


class _Source(NamedTuple):
    """The arguments of open_clip.create_model, and what messages say of them."""

    name: str  # a registered name, hf-hub:… or local-dir:…
    pretraining: str
    pretrained: str | None = None  # a tag or a file; None if the name includes the weights
    file: Path | None = None
    preprocess: dict[str, Any] = {}  # differences from open_clip's default preprocessing
    repository: str = ""  # where the weights can be downloaded, for a message
    folder: Path | None = None  # of a config file


def resolve(model: str, weights: str, kwargs: dict[str, Any]) -> _Source:
    """Returns the source of `encoder.model` and `encoder.weights`.

    Raises `UserError` if a name, tag or file is not known, or if the activation is not that of the weights. Nothing is
    built or downloaded yet, except the config of a hub repository.
    """
    import open_clip

    if "demo" in (model, weights):
        return _demo(model, weights, kwargs)
    if model.startswith(("hf-hub:", "local-dir:")):
        check_hub_weights(model, weights)
        check_sizes(_config_of(model), f'encoder.model: the config of "{model}"')
        return _Source(model, pretraining_of(model), repository=model)
    path, folder = file_of_weights(model, weights), None
    if model.endswith(".json"):
        config_file = _register(model)
        name, folder = config_file.stem, config_file.parent
    else:
        name = model.replace("/", "-")  # OpenAI writes ViT-B/16, open_clip ViT-B-16
        if name not in (known := open_clip.list_models()):
            raise unknown_model(open_clip, name, known)
    config = open_clip.get_model_config(name)
    if weights.startswith("hf-hub:"):
        on_hub = _config_of(weights)
        differing = [key for key in ("embed_dim", "vision_cfg", "text_cfg") if on_hub.get(key) != config[key]]
        if differing:
            raise UserError(
                f'encoder.weights: {weights} is not a "{name}" ({", ".join(differing)} differ); '
                f"write model: {weights}, weights: pretrained"
            )
        return _Source(weights, pretraining_of(weights), repository=weights)
    in_config = kwargs.get("force_quick_gelu", False) or config.get("quick_gelu", False)
    quick_gelu = bool(kwargs.get("quick_gelu", in_config))
    if path is None:
        return _from_tag(name, weights, quick_gelu)
    if "quick_gelu" not in kwargs:
        _check_activation_of_file(name, path, quick_gelu)
    # a file holds no preprocessing: that of the model's tags, if they all agree (SigLIP, …), else open_clip's default
    configs = [open_clip.get_pretrained_cfg(name, tag) for tag in open_clip.list_pretrained_tags_by_model(name)]
    keys = ("mean", "std", "interpolation", "resize_mode")
    of_tags = [{key: config[key] for key in keys if key in config} for config in configs]
    preprocess = of_tags[0] if of_tags and all(each == of_tags[0] for each in of_tags) else {}
    return _Source(name, pretraining_of_file(path), str(path), path, preprocess, folder=folder)


def _demo(model: str, weights: str, kwargs: dict[str, Any]) -> _Source:
    from safetensors import safe_open

    if model != weights:
        raise UserError(
            f"encoder: model: {model}, weights: {weights}: the demo's CLIP needs both; write model: demo, weights: demo"
        )
    path = DEMO / "demo_clip.safetensors"
    with safe_open(path, framework="pt") as file:
        seen = json.loads(file.metadata()["seen"])
    source = resolve(str(DEMO / "demo_clip.json"), str(path), kwargs)
    return source._replace(pretraining=f"weights demo, pre-trained on {seen['images']} alone, never on handwriting")


def _from_tag(name: str, tag: str, quick_gelu: bool) -> _Source:
    """Raises `UserError` for a tag that the model has not, or whose weights were trained with QuickGELU if it has GELU.

    The reverse is allowed: a model's config may be right where its tag is not (roberta-ViT-B-32).
    """
    import open_clip

    tags = open_clip.list_pretrained_tags_by_model(name)
    if not tags:
        raise UserError(f'encoder.weights: {tag}: open_clip has no weights for "{name}"; give a file')
    config = open_clip.get_pretrained_cfg(name, tag)
    if not config:
        twin = name.removesuffix(QUICKGELU)
        hint = f'; they are those of "{twin}"' if open_clip.get_pretrained_cfg(twin, tag) else did_you_mean(tag, tags)
        raise UserError(
            f'encoder.weights: open_clip has no weights "{tag}" for "{name}"{hint}; give a file with its suffix'
        )
    if config.get("quick_gelu", False) and not quick_gelu:
        raise UserError(f'encoder.model: the weights "{tag}" were trained with {_remedy(name, True)}')
    repository = "/".join(config["hf_hub"].split("/")[:2]) if config.get("hf_hub") else config["url"]
    return _Source(name, pretraining_of(f"{name} {tag}"), tag, repository=repository)


def _check_activation_of_file(model: str, path: Path, quick_gelu: bool) -> None:
    """Raises `UserError` if the name of the file, its folder or its hub cache folder contains a tag whose weights were
    trained with the other activation than the model's.

    The tensors do not show the activation. If the names do not either, and the model exists with both, a warning is
    logged.
    """
    import open_clip

    family = model.removesuffix(QUICKGELU)
    tags = {"openai": True}  # tag of the model or its twin → whether its weights were trained with QuickGELU
    for tag in open_clip.list_pretrained_tags_by_model(family):
        tags[tag] = bool(open_clip.get_pretrained_cfg(family, tag).get("quick_gelu", False))
    for part in (path.name, path.parent.name, *(p.name for p in path.parents if p.name.startswith("models--"))):
        tag = max((tag for tag in tags if tag in part.lower().replace("-", "_")), key=len, default=None)
        if tag is not None:  # the longest one, as one tag may be part of another
            if tags[tag] != quick_gelu:
                raise UserError(
                    f'encoder.model: "{part}" looks like the weights "{tag}", which were trained with '
                    f"{_remedy(model, tags[tag])}, or encoder.kwargs={{quick_gelu: {str(quick_gelu).lower()}}} "
                    "if the name misleads"
                )
            return
    if {family, family + QUICKGELU} <= set(open_clip.list_models()):
        logger.warning(
            "encoder: the activation function behind %s is unknown; %s uses %s",
            path,
            model,
            "QuickGELU" if quick_gelu else f"GELU ({model}{QUICKGELU}: QuickGELU, as OpenAI's weights need)",
        )


def _remedy(model: str, wanted: bool) -> str:
    """The end of a message: the activation that the weights need, and how to get it."""
    import open_clip

    twin = model.removesuffix(QUICKGELU) + (QUICKGELU if wanted else "")
    write = f"encoder.kwargs={{quick_gelu: {str(wanted).lower()}}}"
    remedy = f"write encoder.model: {twin}" if twin != model and twin in open_clip.list_models() else f"set {write}"
    return f"{'QuickGELU' if wanted else 'GELU'}, but {model} has the other one; {remedy}"


def _register(model: str) -> Path:
    """Registers a config file with open_clip, under its stem, and returns its path. Raises `UserError`."""
    import open_clip

    path, content = read_config(model)
    if "model_cfg" in content:
        raise UserError(
            f"encoder.model: {path} is the config of a hub repository; "
            f"write model: local-dir:{path.parent}, weights: pretrained"
        )
    missing = {"embed_dim", "vision_cfg", "text_cfg"} - set(content)
    if missing:
        raise UserError(f"encoder.model: {path} is not an open_clip config: it lacks {', '.join(sorted(missing))}")
    check_sizes(content, f"encoder.model: {path}")
    # add_model_config would replace a model of the library without a message
    if (built_in := _built_in(path.stem)) and json.loads(built_in.read_text(encoding="utf-8")) != content:
        raise UserError(f'encoder.model: {path} would replace open_clip\'s own "{path.stem}"; rename the file')
    open_clip.add_model_config(path)
    return path


def _file_stem(name: str) -> str:
    """Returns the name of a model as a model directory writes it."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def _with_activation(kwargs: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with that of the activation, which the name of a weights file may contradict."""
    named = "quick_gelu" in kwargs or "force_quick_gelu" in kwargs
    return {**({} if named else {"quick_gelu": bool(config.get("quick_gelu", False))}), **kwargs}


def _built_in(name: str) -> Path | None:
    """Returns open_clip's own config file of this name, if it has one."""
    import open_clip

    file = Path(open_clip.__file__).parent / "model_configs" / f"{name}.json"
    return file if ":" not in name and file.is_file() else None


def _config_of(model: str) -> dict[str, Any]:
    """Returns the config of a hub repository or folder. Raises `UserError` if it cannot be read."""
    import open_clip

    try:
        with hub(model):
            config = open_clip.get_model_config(model)
    except (OSError, RuntimeError) as error:
        raise download_failed(model, model, network_error(error) or error) from error
    except (ValueError, RecursionError, AttributeError) as error:  # JSON or UTF-8; AttributeError: no object
        raise UserError(f"encoder.model: the config of {model} cannot be read ({type(error).__name__})") from error
    missing = {"vision_cfg", "text_cfg"} - {key for key, value in config.items() if isinstance(value, dict)}
    if missing:
        raise UserError(f"encoder.model: {model} is not a model of open_clip: it lacks {', '.join(sorted(missing))}")
    return dict(config)


def _create(source: _Source, kwargs: dict[str, Any]) -> Any:
    import open_clip
    from open_clip.factory import load_state_dict

    if source.file is not None:  # create_model reads the file again; this finds its faults first
        read_weights(source.file, partial(load_state_dict, weights_only=True))
    arguments, text = dict(kwargs), open_clip.get_model_config(source.name)["text_cfg"]
    if source.folder is not None and text.get("hf_model_name") == TEXT_CONFIG:
        text |= {"hf_model_name": str(source.folder / TEXT_CONFIG), "hf_model_pretrained": False}
        arguments = {"text_cfg": text, **kwargs}
    try:
        # a text side of transformers is described by a repository, or by a file
        of_text = text.get("hf_model_name") or None
        with hub(of_text if of_text or source.file else source.name), quiet(progress_bars=True), without_code():
            arguments |= {"force_preprocess_cfg": source.preprocess, "weights_only": True}
            create = partial(open_clip.create_model, source.name, **arguments)
            try:
                return create(pretrained=source.pretrained, require_pretrained=True)
            except Exception:
                if source.file is None:
                    raise
                model = create(pretrained=None)
                if (inside := weights_inside(source.file, model.state_dict())) is None:
                    raise
                model.load_state_dict(inside)
                return model
    except UserError:
        raise
    except Exception as error:
        fault = network_error(error)
        if asks_for_code(error):
            failure = UserError(
                f'encoder.model: "{source.name}" needs code of a repository, which is never run; choose another model'
            )
        elif kwargs and isinstance(error, TypeError | ValueError):
            failure = wrong_kwargs(source.name, kwargs, error)
        elif source.file is not None:
            failure = mismatch(source.file, source.name, error)
        elif fault is not None:
            failure = download_failed(f"{source.name} {source.pretrained or ''}".strip(), source.repository, fault)
        else:
            failure = UserError(f'encoder.model: open_clip cannot build "{source.name}" ({reason_of(error)})')
        raise failure from error
