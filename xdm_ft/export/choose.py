"""Which model of a run, and how its files become `ModelParts`."""

from __future__ import annotations

import copy
import json
import logging
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from xdm_ft.algorithms.wise_ft import interpolate
from xdm_ft.core import ORACLE, DomainSet
from xdm_ft.cut import Trainable
from xdm_ft.encoders import Encoder, TextEncoder
from xdm_ft.evaluation.neighbours import Reference
from xdm_ft.experiment.final_fit import median
from xdm_ft.experiment.plan import read_data
from xdm_ft.experiment.resume import written_recipe
from xdm_ft.export import (
    SINGLE,
    EncoderConfig,
    HeadConfig,
    ModelConfig,
    ModelParts,
    PartConfig,
    build_encoder,
    build_head,
    check_encoder,
    check_identity,
    load_trained,
    with_prefix,
)
from xdm_ft.export.directory import CHECKSUMS, digest_of, reference_from
from xdm_ft.export.expected import expected_performance
from xdm_ft.features.cache import cache_of_run
from xdm_ft.features.given import GIVEN
from xdm_ft.features.hashes import hash_files
from xdm_ft.features.key import weights_digest
from xdm_ft.heads import Head
from xdm_ft.images.transforms import Preprocessing
from xdm_ft.model_sources.source import refuse_not_finite
from xdm_ft.protocol.splits import SELECTION_SPLIT, all_domains, splits
from xdm_ft.recipe.check import check
from xdm_ft.recipe.method import ListedEncoder
from xdm_ft.results.model import Record
from xdm_ft.results.run import Run
from xdm_ft.results.trials import pick_trials
from xdm_ft.runtime.errors import UserError, did_you_mean, one_form, printable
from xdm_ft.storage import digest
from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.names import reference_beside, reference_file
from xdm_ft.storage.run_directory import Digests, RunDirectory
from xdm_ft.storage.tensors import tensors_of
from xdm_ft.version import __version__

logger = logging.getLogger("xdm_ft")
COPIED = (
    "class_names", "preprocessing", "normalize", "head", "few_images", "class_means", "from_text", "interpolated",
    "method", "prompts", "protocol", "step",
)  # fmt: skip
"""Keys of a weights file's metadata that are those of `ModelConfig` too."""


@dataclass(frozen=True)
class Choice:
    """Which model of a run: by default the final fit of the method that does best on held-out domains."""

    method: str | None = None
    held_out: tuple[str, ...] | None = None  # a model that was trained without these domains, instead of a final fit
    seed: int | None = None  # of the model with `held_out`; None: the first
    trial: int | None = None  # of the model with `held_out`; None: the one that validation picked


def chosen_method(run: Run, choice: Choice) -> tuple[str, str]:
    """Returns the method and why it is this one. Raises `UserError` if the run has no such method, or no choice."""
    methods = list(dict.fromkeys(record.method for record in run.records))
    if not methods:
        failed = [record.reason for record in run.every if record.status == "failed"]
        remedy = f"all {len(failed)} failed, the first: {failed[0]}" if failed else "run its recipe first"
        raise UserError(f"{run.path}: the run has no trained model; {remedy}")
    if choice.method is not None:
        if choice.method not in methods:
            hint = did_you_mean(choice.method, methods)
            raise UserError(f"{run.path}: --method: no model {choice.method}{hint}")
        return choice.method, f"{choice.method} was named"
    if run.choice is not None:
        return run.choice.method, str(run.choice)
    if len(methods) == 1:
        return methods[0], f"{methods[0]} is the only method"
    if run.rule == ORACLE:
        why = "its selection rule is oracle, which reads labels of the held-out domains"
        raise UserError(f"{run.path}: {why}, so no method can be chosen; name a model: --method and --held-out")
    raise UserError(f"{run.path}: no method has a value of {run.rule} in all of its runs; name one: --method")


def choose(run: Run, choice: Choice, ensemble: bool = False) -> tuple[Mapping[int, str], str, Mapping[str, Any] | None]:
    """Returns the model that `choice` means: {seed: address of its weights}, how it was chosen, and its entry in
    results.json if it is a final fit. An ensemble has several seeds.

    With `held_out` it is a model of the estimate; else the final fit of the method, and on an official split without
    one the method's first seed. Raises `UserError` if the run has no such model.
    """
    sets = dict.fromkeys(",".join(held) for held in run.held_out_sets)
    held_out_options = " or ".join(f"--held-out {shlex.quote(name)}" for name in sets)
    if choice.held_out is None and (choice.seed is not None or choice.trial is not None):
        option = "--seed" if choice.seed is not None else "--trial"
        raise UserError(f"{run.path}: {option} names a model that was trained without a domain; add {held_out_options}")
    if ensemble and choice.seed is not None:
        raise UserError(f"{run.path}: --ensemble takes the heads of all seeds; leave --seed out")
    method, why = chosen_method(run, choice)
    final = run.final_fits.get(method)
    if choice.held_out is None and final is not None and final["status"] == "ok":
        files = {int(final["seed"]): final["weights"]}
        if ensemble and final.get("seeds"):
            files = {int(seed): file for seed, file in final["seeds"].items()}
        return files, f"final fit: {final['how']}", final
    if choice.held_out is None and run.recipe.protocol.name != "official":
        command = f"xdm-ft export {shlex.quote(str(run.path))} DIR --method {shlex.quote(method)}"
        remedy = f"`{command}` trains it; or name another model of the run: "
        if run.recipe_rule == ORACLE:
            remedy = "selection: oracle gives no unbiased estimate of one; name a model of the run: "
        others = [f"--method {shlex.quote(other)}" for other, fit in run.final_fits.items() if fit["status"] == "ok"]
        options = " or ".join([*others, held_out_options])
        raise UserError(f"{run.path}: has no final fit of {method}, on all labelled images; {remedy}{options}")

    # a domain's name may hold a comma
    held_out = None if choice.held_out is None else one_form(",".join(choice.held_out))

    def options_of(record: Record) -> dict[str, Any]:
        names = one_form(",".join(record.test_domains))
        if record.fold is not None and held_out in {one_form(name) for name in record.test_domains}:
            names = str(held_out)  # a domain of a fold names its models
        return {"--held-out": names, "--seed": record.seed, "--trial": record.trial}

    named = {"--held-out": held_out, "--seed": choice.seed, "--trial": choice.trial}
    wanted = {option: value for option, value in named.items() if value is not None}
    records = [record for record in run.records if record.method == method]
    fitting = [record for record in records if wanted.items() <= options_of(record).items()]
    models = [record for record in pick_trials(fitting, run.rule, run.metric) if run.rule in record.selected]
    if not models:
        for option, value in wanted.items():
            names = list(dict.fromkeys(str(options_of(record)[option]) for record in records))
            if str(value) not in names:
                raise UserError(f"{run.path}: {option}: no model {value}{did_you_mean(str(value), names)}")
        problem = f"no trained model of {method} fits all of the options"
        raise UserError(f"{run.path}: {problem}; results.json lists the models")
    order = {seed: position for position, seed in enumerate(run.recipe.protocol.seeds)}
    models.sort(key=lambda record: order.get(record.seed, len(order)))
    first, files = models[0], {record.seed: record.selected[run.rule].weights for record in models}
    provenance = (
        f"trained without {', '.join(first.test_domains)} (held out), seed {first.seed}, trial {first.trial}; {why}"
    )
    if ensemble:
        return files, f"the heads of {len(files)} seeds; {provenance}", None
    return {first.seed: files[first.seed]}, provenance, None


def read_parts(
    run: Run, choice: Choice, *, wise_ft: float | None = None, ensemble: bool = False, temperature: bool = False
) -> ModelParts:
    """Returns a model of the run.

    `wise_ft`: α, the share of the trained weights in their mean with the zero-shot ones. `ensemble`: the heads of all
    seeds. `temperature`: divide the logits by the temperature that was fitted in the run. Raises `UserError` if files
    are missing or damaged, or if the model cannot be combined so.
    """
    if wise_ft is not None and (ensemble or temperature):
        lacking = "ensemble" if ensemble else "fitted temperature"
        raise UserError(f"{run.path}: --wise-ft makes a new model, which has no {lacking}; leave one out")
    addresses, provenance, final_fit = choose(run, choice, ensemble)
    if ensemble and len(addresses) == 1:
        raise UserError(
            f"{run.path}: --ensemble needs models of several seeds, but there is one ({provenance.split(';')[0]}; a "
            "solver has the same head under every seed); run the recipe with more protocol.seeds, or leave it "
            "out"
        )
    digests = _digests(run, addresses.values(), final_fit)
    files = {seed: _read_weights(run, file, digests) for seed, file in sorted(addresses.items())}
    (state, description), *_ = files.values()  # what metadata say of encoder and data is the same under every seed
    trains_encoder = bool(description["encoder"]["in_this_file"])
    if ensemble and trains_encoder:
        raise UserError(f"{run.path}: an ensemble needs one encoder, but each of these models has trained its own")

    def head_of(state: Mapping[str, Tensor]) -> Head:
        return build_head(
            HeadConfig(**description["head"]), description["encoder"]["width"], len(description["class_names"]), state
        )

    trained = with_prefix(state, "encoder")
    # WiSE-FT begins with the weights from before training, and mixes the trained ones in
    encoder = _read_encoder(run, description, trained if wise_ft is None else {})
    try:
        members = {f"members.{seed}": head_of(with_prefix(state, "head")) for seed, (state, _) in files.items()}
    except ValueError as error:
        raise UserError(f"{run.path}: the weights do not fit their description ({error}); train again") from error
    heads = members
    if len(members) == 1:
        heads = {SINGLE: next(iter(members.values()))}
    elif description["head"]["name"] == "linear":  # the mean of the logits is the logits of the mean
        states = [head.state_dict() for head in members.values()]
        mean = {name: torch.stack([of_seed[name] for of_seed in states]).mean(0) for name in states[0]}
        heads = members | {SINGLE: head_of(mean)}
    if wise_ft is not None:
        _interpolate(run, description, encoder, trained, heads[SINGLE], wise_ft)
        provenance = f"{provenance}; WiSE-FT: {wise_ft:g} of the trained and {1 - wise_ft:g} of the zero-shot weights"

    temperatures = [value for _, metadata in files.values() if (value := metadata.get("temperature")) is not None]
    fitted = median(temperatures) if temperatures and wise_ft is None else None
    if temperature and fitted is None:
        raise UserError(
            f"{run.path}: no temperature was fitted for this model: its run has no validation images "
            "of training domains, or separates them perfectly; leave --temperature out"
        )
    # an encoder that is a mean of two has other features than those that the reference describes
    reference = None
    if wise_ft is None or not trains_encoder:
        reference = _read_reference(run, description, addresses.values(), digests)
    label, at = description["method"]["label"], dict[DomainSet, str]()
    if choice.method is None and run.choice is not None:
        at = run.choice.at
    quoted = run.runs_of(label, at)
    names, results = run.recipe.data_common.class_names, description["results"]
    if final_fit is not None:
        results = {key: final_fit[key] for key in ("images", "chosen_by", "estimate")}
    config = ModelConfig(
        xdm_ft=__version__,
        encoder=_encoder_config(description["encoder"], encoder, tuple(trained)),
        members=tuple(files) if len(files) > 1 else (),
        chosen=provenance,
        wise_ft=wise_ft,
        temperature=fitted if temperature and fitted is not None else 1.0,
        fitted_temperature=fitted,
        reference_xxh3=None if reference is None else digest_of(tensors_of(reference.arrays())),
        results=results,
        intensity=description.get("intensity"),  # absent where it is `type`
        renamed={name: words for name, words in names.items() if name != words},
        expected=expected_performance(run, quoted, at),
        **{key: description[key] for key in COPIED if key in description},
    )
    return ModelParts(config, encoder, heads, reference, trained_names=tuple(trained))


def _read_weights(run: Run, file: str, digests: Digests) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors and the metadata of a model. Raises `UserError` if the file is damaged or missing."""
    state, metadata = RunDirectory(run.path).require_tensors(file, digests)
    refuse_not_finite(state, str(run.path / file))
    return state, {key: json.loads(value) for key, value in metadata.items() if key != "file"}


def _read_encoder(run: Run, description: Mapping[str, Any], trained: Mapping[str, Tensor]) -> Encoder:
    """Returns the encoder that the metadata of a model describe, with the weights that its training has changed."""
    described, preprocessing = description["encoder"], Preprocessing(**description["preprocessing"])
    settings = described["settings"]
    if settings["name"] == GIVEN:
        given = {**_settings_of_given(described), "width": described["width"]}
        return build_encoder(GIVEN, given, preprocessing, None)
    encoder = build_encoder(settings["name"], _settings_of_family(settings), preprocessing, described["seed"])
    if described["xxh3"] is not None:
        check_encoder(encoder, described["xxh3"], settings.get("weights"), run.path)
        check_identity(encoder, described["identity"], str(run.path))
    try:
        if trained:
            load_trained(encoder, trained, complete=described["xxh3"] is None)
    except ValueError as error:
        raise UserError(f"{run.path}: the encoder's trained weights do not fit it ({error}); train again") from error
    return encoder


def _settings_of_family(settings: Mapping[str, Any]) -> Any:
    """Returns the settings without those that encoders of all families have."""
    return {key: value for key, value in settings.items() if key not in {*ListedEncoder.model_fields, "preprocessing"}}


def _settings_of_given(described: Mapping[str, Any]) -> dict[str, Any]:
    return {key: described["identity"][key] for key in ("model", "pool", "unit") if key in described["identity"]}


def _encoder_config(described: Mapping[str, Any], encoder: Encoder, trained_names: Sequence[str]) -> EncoderConfig:
    trained: bool | Trainable = False
    if described["in_this_file"]:
        trained = TypeAdapter(Trainable).validate_python(described["trainable"])
    part, is_given = None, described["settings"]["name"] == GIVEN
    settings: Any = _settings_of_given(described) if is_given else _settings_of_family(described["settings"])
    if not isinstance(trained, bool):
        state = encoder.state_dict()
        part = PartConfig(xxh3=digest_of({name: state[name] for name in trained_names}), named_xxh3=described["xxh3"])
    return EncoderConfig(
        name=described["settings"]["name"],
        settings=settings,
        file=None,
        part=part,
        xxh3=weights_digest(encoder),
        trained=trained,
        precision="fp32" if described["precision"] in ("no", None) else described["precision"],
        # features of a trained encoder are never cached, so that it needs no key
        identity=described["identity"] if trained is False and not is_given else None,
        **{key: described[key] for key in ("seed", "width", "pretraining")},
    )


def _interpolate(
    run: Run, description: Mapping[str, Any], encoder: Encoder, trained: Mapping[str, Tensor], head: Head, alpha: float
) -> None:
    """Replaces the weights of the head, and those of the encoder that were `trained`, by their mean with the zero-shot
    ones.

    Wortsman et al. 2022, eq. (1). `encoder` has the weights from before training.
    """
    if not 0 <= alpha <= 1:
        raise UserError(f"--wise-ft: {alpha} is not in 0…1; 0 is zero-shot, 1 is the trained model")
    label = description["method"]["label"]
    if not description.get("from_text"):
        raise UserError(
            f"{run.path}: {label} did not start from class embeddings, so it has no zero-shot weights to "
            "interpolate with; train with start: zero_shot"
        )
    if not isinstance(encoder, TextEncoder):
        raise UserError(
            f"{run.path}: --wise-ft: the run does not hold the class embeddings of its features; leave it out"
        )
    if description["interpolated"]:
        raise UserError(f"{run.path}: {label} is interpolated itself; choose another model")
    if not trained and description["step"] == 0:
        raise UserError(f"{run.path}: {label} is zero-shot itself; choose a model that was trained")
    zero_shot = copy.deepcopy(head)
    zero_shot.start_from_text(
        encoder.logit_scale * encoder.text_embeddings(tuple(description["class_names"]), tuple(description["prompts"]))
    )
    head.load_state_dict(interpolate(zero_shot.state_dict(), head.state_dict(), alpha))
    if trained:
        load_trained(encoder, interpolate(encoder.state_dict(), trained, alpha))


def _digests(run: Run, addresses: Collection[str], final_fit: Mapping[str, Any] | None) -> Digests:
    """Returns the checksums of all files of the models with weights at these addresses."""
    if final_fit is not None:
        files: Digests = final_fit["files"]
        return files
    every = (record.files for record in run.records if not record.files.keys().isdisjoint(addresses))
    return {address: digest for of_model in every for address, digest in of_model.items()}


def _read_reference(
    run: Run, description: Mapping[str, Any], addresses: Iterable[str], digests: Digests
) -> Reference | None:
    """Returns the reference in the run directory; None without one, and, with a warning, if it is damaged."""
    if description["encoder"]["in_this_file"]:
        file = reference_beside(*addresses)
    else:
        file = reference_file(tuple(description["method"]["test_domains"]), description["encoder"]["label"])
    if file not in digests:
        return None
    try:
        return reference_from(RunDirectory(run.path).tensors(file, digests)[0], description["encoder"]["width"])
    except (Damaged, FileNotFoundError) as error:
        fault = error.fault if isinstance(error, Damaged) else "does not exist"
        logger.warning("%s: %s, so distances are not known", run.path / file, fault)
        return None


def training_images(run: Run, config: ModelConfig) -> np.ndarray | None:
    """Returns the checksums of the images that trained or selected a model of the run: uint8 [n,16], each once, sorted.

    A checksum is the xxh3 (128 bits) of the bytes of an image file, not of its pixels, so that a copy in another format
    has another one. None, with a warning of one line, if the run's data cannot be read, or are not those of the run.
    """
    try:
        recipe = check(written_recipe(run.path, run.results["recipe"]))
        dataset = read_data(recipe)
        held_out, seed = tuple(config.method["test_domains"]), config.method["seed"]
        candidates = splits(dataset, recipe.protocol, seed) if held_out else [all_domains(dataset)]  # (): a final fit
        split = next((split for split in candidates if split.test_domains == held_out), None)
        if split is None:
            raise UserError(f"the data have no domain {', '.join(held_out)} any more")
        selecting = {"train_val", "val_domain", SELECTION_SPLIT.get(recipe.protocol.selection)}
        rows = torch.cat([*split.train, *(part for name, part in split.evaluation.items() if name in selecting)])
        digests = hash_files(dataset, cache_of_run(recipe.features), show=True).digests
        if run.results["environment"]["data"]["content"] != digest(digests, bits=128):
            raise UserError("the images have changed since the run")
    except (UserError, OSError) as error:
        reason = printable(error)[:200]
        logger.warning("%s: no checksums of the training images, as they cannot be read: %s", run.path, reason)
        return None
    used = digests[rows.numpy()]
    return np.unique(used[used.any(1)], axis=0)  # zeros: its bytes cannot be read


def with_training_images(run: Run, parts: ModelParts) -> ModelParts:
    """Returns a model of the run with the checksums of its training images, if they are known."""
    images = training_images(run, parts.config)
    if images is None:
        return parts
    checksum = digest_of(tensors_of({CHECKSUMS: images}))
    config = parts.config.model_copy(update={"training_images_xxh3": checksum})
    return replace(parts, config=config, training_images=images)
