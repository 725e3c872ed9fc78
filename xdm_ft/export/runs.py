"""A model of a run directory, as `Parts`: which one, and how its tensors are combined."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from xdm_ft.algorithms.wise_ft import interpolate
from xdm_ft.cut.trainable import Trainable
from xdm_ft.encoders import Encoder, TextEncoder
from xdm_ft.evaluation.distance import Reference
from xdm_ft.evaluation.records import Record
from xdm_ft.evaluation.trials import picked_trials
from xdm_ft.experiment.final_fit import median
from xdm_ft.export.config import EncoderConfig, HeadConfig, ModelConfig, PartConfig
from xdm_ft.export.directory import check_encoder
from xdm_ft.export.parts import SINGLE, Parts, build_encoder, build_head, load_trained, part_of
from xdm_ft.export.promise import promise
from xdm_ft.export.reference import digest_of, of_run
from xdm_ft.features.key import weights_digest
from xdm_ft.heads import Head
from xdm_ft.images.transforms import Preprocessing
from xdm_ft.recipe.method import ListedEncoder
from xdm_ft.report.finished import ORACLE, Run
from xdm_ft.runtime.errors import UserError, did_you_mean
from xdm_ft.storage.checksummed import Damaged
from xdm_ft.storage.digests import tensors_digest
from xdm_ft.storage.names import reference_beside, reference_file
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.version import __version__


@dataclass(frozen=True)
class Choice:
    """Which model of a run: by default the final fit of the method that validation prefers."""

    method: str | None = None
    held_out: tuple[str, ...] | None = None  # a model that was trained without these domains, instead of a final fit
    seed: int | None = None  # of the model with `held_out`; None: the first
    trial: int | None = None  # of the model with `held_out`; None: the one that validation picked


@dataclass(frozen=True)
class Chosen:
    """The weights of a model (one per seed of an ensemble), and how it was chosen."""

    method: str
    files: Mapping[int, str]  # {seed: address of the weights}
    how: str
    final_fit: Mapping[str, Any] | None  # its entry in results.json; None: a model that was trained for the estimate


def chosen_method(run: Run, choice: Choice) -> tuple[str, str]:
    """Returns the method and why it is this one. Raises `UserError` if the run has no such method, or no choice."""
    methods = list(dict.fromkeys(record.method for record in run.records))
    if not methods:
        raise UserError(f"{run.path}: the run has no trained model; run its recipe first")
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


def choose(run: Run, choice: Choice, ensemble: bool = False) -> Chosen:
    """Returns the model that `choice` means.

    With `held_out` it is a model of the estimate; else the final fit of the method, and on an official split without
    one the method's first seed. No test result is read. Raises `UserError` if the run has no such model.
    """
    if choice.held_out is None and (choice.seed is not None or choice.trial is not None):
        option = "--seed" if choice.seed is not None else "--trial"
        raise UserError(f"{run.path}: {option} names a model that was trained without a domain; add {_held_out(run)}")
    if ensemble and choice.seed is not None:
        raise UserError(f"{run.path}: --ensemble takes the heads of all seeds; leave --seed out")
    method, why = chosen_method(run, choice)
    final = run.final_fits.get(method)
    if choice.held_out is None and final is not None and final["status"] == "ok":
        seeds = final.get("seeds") or {str(final["seed"]): final["weights"]}
        files = {int(seed): file for seed, file in seeds.items()} if ensemble else {final["seed"]: final["weights"]}
        return Chosen(method, files, f"final fit: {final['how']}", final)
    if choice.held_out is None and run.results["recipe"]["protocol"]["name"] != "official":
        command = f"xdm-ft export {shlex.quote(str(run.path))} DIR --method {shlex.quote(method)}"
        remedy = f"`{command}` trains it; or name another model of the run: "
        if run.own_rule == ORACLE:
            remedy = "selection: oracle gives no unbiased estimate of one; name a model of the run: "
        others = [f"--method {shlex.quote(other)}" for other, fit in run.final_fits.items() if fit["status"] == "ok"]
        raise UserError(
            f"{run.path}: has no final fit of {method}, on all labelled images; {remedy}"
            f"{' or '.join([*others, _held_out(run)])}"
        )
    models = [one for one in _models(run, method, choice) if run.rule in one.selected]
    if not models:
        raise UserError(_no_such_model(run, method, choice))
    first, files = models[0], {one.seed: one.selected[run.rule].weights for one in models}
    lacks = ", ".join(first.test_domains)
    how = f"trained without {lacks} (held out), seed {first.seed}, trial {first.trial}; {why}"
    if ensemble:
        return Chosen(method, files, f"the heads of {len(files)} seeds; {how}", None)
    return Chosen(method, {first.seed: files[first.seed]}, how, None)


def _models(run: Run, method: str, choice: Choice) -> list[Record]:
    """Returns the models of a method without these domains, one per seed, in the order of the recipe's seeds."""
    wanted = None if choice.held_out is None else ",".join(choice.held_out)  # a domain's name may hold a comma
    fitting = [
        record
        for record in run.records
        if record.method == method
        and wanted in (None, ",".join(record.test_domains))
        and choice.seed in (None, record.seed)
        and choice.trial in (None, record.trial)
    ]
    order = {seed: place for place, seed in enumerate(run.results["recipe"]["protocol"]["seeds"])}
    return sorted(picked_trials(fitting, run.rule, run.metric), key=lambda one: order.get(one.seed, len(order)))


def _held_out(run: Run) -> str:
    sets = dict.fromkeys(",".join(record.test_domains) for record in run.records)
    return " or ".join(f"--held-out {shlex.quote(name)}" for name in sets)


def _no_such_model(run: Run, method: str, choice: Choice) -> str:
    of_method = [record for record in run.records if record.method == method]
    known = {
        "--held-out": (
            None if choice.held_out is None else ",".join(choice.held_out),
            [",".join(record.test_domains) for record in of_method],
        ),
        "--seed": (choice.seed, [str(record.seed) for record in of_method]),
        "--trial": (choice.trial, [str(record.trial) for record in of_method]),
    }
    for option, (wanted, names) in known.items():
        if wanted is not None and str(wanted) not in names:
            return f"{run.path}: {option}: no model {wanted}{did_you_mean(str(wanted), list(dict.fromkeys(names)))}"
    return f"{run.path}: no trained model of {method} fits all of the options; results.json lists the models"


def read_parts(
    run: Run, choice: Choice, *, wise_ft: float | None = None, ensemble: bool = False, temperature: bool = False
) -> Parts:
    """Returns a model of the run.

    `wise_ft`: α, the share of the trained weights in their mean with the zero-shot ones. `ensemble`: the heads of all
    seeds. `temperature`: divide the logits by the temperature that was fitted in the run. Raises `UserError` if files
    are missing or damaged, or if the model can not be combined so.
    """
    if wise_ft is not None and (ensemble or temperature):
        lacking = "ensemble" if ensemble else "fitted temperature"
        raise UserError(f"{run.path}: --wise-ft makes a new model, for which there is no {lacking}; leave one out")
    chosen = choose(run, choice, ensemble)
    if ensemble and len(chosen.files) == 1:
        raise UserError(
            f"{run.path}: --ensemble needs models of several seeds, but there is one ({chosen.how.split(';')[0]}); "
            "run the recipe with more protocol.seeds, or leave it out; a solver has the same head under every seed"
        )
    read = {seed: _read_file(run, file) for seed, file in sorted(chosen.files.items())}
    (state, about), *_ = read.values()
    is_trained = bool(about["encoder"]["in_this_file"])
    if ensemble and is_trained:
        raise UserError(f"{run.path}: an ensemble needs one encoder, but each of these models has trained its own")
    trained = part_of(state, "encoder")
    encoder = _encoder(run.path, about, trained if wise_ft is None else None)
    heads = {seed: _head(run, about, of_seed) for seed, (of_seed, _) in read.items()}
    parts: dict[str, Head] = {SINGLE: next(iter(heads.values()))}
    if wise_ft is not None:
        parts[SINGLE] = _towards_zero_shot(run.path, about, encoder, state, parts[SINGLE], wise_ft)
    if len(heads) > 1:
        parts = {f"members.{seed}": head for seed, head in heads.items()}
        if about["head"]["name"] == "linear":  # the mean of the logits is the logits of the mean
            states = [head.state_dict() for head in heads.values()]
            mean = {name: torch.stack([one[name] for one in states]).mean(0) for name in states[0]}
            parts[SINGLE] = build_head(HeadConfig(**about["head"]), encoder.width, len(about["class_names"]), mean)
    fitted = [known for _, one in read.values() if (known := one.get("temperature")) is not None]
    config = _config(run, chosen, about, encoder, trained, tuple(heads) if len(heads) > 1 else ())
    known = median(fitted) if fitted and wise_ft is None else None
    if temperature and known is None:
        raise UserError(
            f"{run.path}: no temperature was fitted for this model: its run is of an earlier version, or has no "
            "validation parts of training domains, or they are separated perfectly; leave --temperature out"
        )
    reference = _reference(run, about, chosen) if wise_ft is None or not is_trained else None
    update: dict[str, Any] = {"fitted_temperature": known, "temperature": known if temperature else 1.0}
    update["reference_xxh3"] = digest_of(reference)
    if wise_ft is not None:
        mixed = f"WiSE-FT: {wise_ft:g} of the trained and {1 - wise_ft:g} of the zero-shot weights"
        update |= {"wise_ft": wise_ft, "chosen": f"{config.chosen}; {mixed}"}
    return Parts(config.model_copy(update=update), encoder, parts, reference, trained_names=tuple(trained))


def _reference(run: Run, about: Mapping[str, Any], chosen: Chosen) -> Reference | None:
    if about["encoder"]["in_this_file"]:
        file = reference_beside(*chosen.files.values())
    else:
        file = reference_file(tuple(about["method"]["test_domains"]), about["encoder"].get("label"))
    return of_run(run.path, file, about["encoder"]["width"])


def _read_file(run: Run, file: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        state, metadata = RunDirectory(run.path).tensors(file)
        if "class_names" not in metadata:
            raise Damaged("an earlier version wrote it, without the description of its model")
        return state, {key: json.loads(value) for key, value in metadata.items() if key != "file"}
    except (Damaged, FileNotFoundError) as error:
        reason = error if isinstance(error, Damaged) else "it does not exist"
        raise UserError(
            f"{run.path / file}: is damaged ({reason}); run the run's recipe again to train this model again"
        ) from error


def _settings(about: Mapping[str, Any]) -> Any:
    left_out = {*ListedEncoder.model_fields, "preprocessing"}
    return {key: value for key, value in about["encoder"]["settings"].items() if key not in left_out}


def _encoder(path: Path, about: Mapping[str, Any], trained: Mapping[str, Tensor] | None) -> Encoder:
    """Builds the encoder of a run, with the weights that were `trained`; None: as it was before training.

    Raises `UserError` if the other weights are not those of the run, or if a trained one does not fit.
    """
    described = about["encoder"]
    preprocessing = Preprocessing(**about["preprocessing"])
    encoder = build_encoder(described["settings"]["name"], _settings(about), preprocessing, described["seed"])
    if described["xxh3"] is not None:
        check_encoder(encoder, described["xxh3"], described["settings"].get("weights"), path)
    if trained:
        try:
            load_trained(encoder, trained, whole=described["xxh3"] is None)
        except ValueError as error:
            raise UserError(f"{path}: the encoder's trained weights do not fit it ({error}); train again") from error
    return encoder


def _trained(described: Mapping[str, Any]) -> Trainable:
    """How much of the encoder was trained. Earlier versions trained all of it or nothing."""
    if not described["in_this_file"]:
        return False
    found: Trainable = TypeAdapter(Trainable).validate_python(described.get("trainable", True))
    return found


def _head(run: Run, about: Mapping[str, Any], state: Mapping[str, Tensor]) -> Head:
    own = HeadConfig(**about["head"])
    try:
        return build_head(own, about["encoder"]["width"], len(about["class_names"]), part_of(state, "head"))
    except ValueError as error:
        raise UserError(f"{run.path}: the weights do not fit their description ({error}); train again") from error


def _towards_zero_shot(
    path: Path, about: Mapping[str, Any], encoder: Encoder, state: Mapping[str, Tensor], head: Head, alpha: float
) -> Head:
    """Replaces the weights of the head, and of an encoder that was trained, by their mean with the zero-shot ones.

    Wortsman et al. 2022, eq. (1). `encoder` has the weights from before training.
    """
    if not 0 <= alpha <= 1:
        raise UserError(f"--wise-ft: {alpha} is not in 0…1; 0 is zero-shot, 1 is the trained model")
    method = about["method"]
    if about["prompts"] is None or not isinstance(encoder, TextEncoder):
        raise UserError(
            f"{path}: {method['label']} did not start from class embeddings, so that there are no zero-shot weights "
            "to interpolate with; train with head_init: zero_shot (and encoder.normalize: true)"
        )
    if "alpha" in method["hparams"]:
        raise UserError(f"{path}: {method['label']} is interpolated itself; choose another model")
    text = encoder.logit_scale * encoder.text_embeddings(tuple(about["class_names"]), tuple(about["prompts"]))
    zero_shot = build_head(HeadConfig(**about["head"]), encoder.width, len(about["class_names"]), head.state_dict())
    zero_shot.start_from_text(text)
    is_trained = bool(about["encoder"]["in_this_file"])
    if not is_trained and all(
        torch.equal(value, head.state_dict()[name]) for name, value in zero_shot.state_dict().items()
    ):
        raise UserError(f"{path}: {method['label']} is zero-shot itself; choose a model that was trained")
    mixed = interpolate(zero_shot.state_dict(), head.state_dict(), alpha)
    if is_trained:
        load_trained(encoder, interpolate(encoder.state_dict(), part_of(state, "encoder"), alpha))
    return build_head(HeadConfig(**about["head"]), encoder.width, len(about["class_names"]), mixed)


def _config(
    run: Run,
    chosen: Chosen,
    about: Mapping[str, Any],
    encoder: Encoder,
    trained_names: Iterable[str],
    members: Sequence[int],
) -> ModelConfig:
    described, state = about["encoder"], encoder.state_dict()
    trained, part = _trained(described), None
    if not isinstance(trained, bool):
        digest = tensors_digest({name: state[name] for name in sorted(trained_names)})
        part = PartConfig(xxh3=digest, named_xxh3=described["xxh3"])
    precision = {"no": "fp32", None: "fp32"}.get(described["precision"], described["precision"])
    of_encoder = EncoderConfig(
        name=described["settings"]["name"],
        settings=_settings(about),
        seed=described["seed"],
        file=None,
        part=part,
        xxh3=weights_digest(encoder),
        width=described["width"],
        trained=trained,
        precision=precision,
        pretraining=described["pretraining"],
        identity=described["identity"] if trained is False else None,
    )
    names = run.results["recipe"]["data"]["class_names"]
    kept = ("class_names", "preprocessing", "normalize", "head", "method", "prompts", "protocol", "step")
    final = chosen.final_fit
    results: Any = (
        about["results"] if final is None else {key: final[key] for key in ("images", "chosen_by", "estimate")}
    )
    return ModelConfig(
        xdm_ft=__version__,
        encoder=of_encoder,
        members=tuple(members),
        chosen=chosen.how,
        results=results,
        few_images=about.get("few_images", {}),  # earlier versions did not write it
        class_means=about.get("class_means", False),
        renamed={name: words for name, words in names.items() if name != words},
        expected=promise(run.path, run.results, run.records, run.rule, about["method"]["label"]),
        **{key: about[key] for key in kept},
    )
