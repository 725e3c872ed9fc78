"""`xdm-ft doctor`: checks everything that a run needs, and prints a remedy for each fault."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import torch
from packaging.requirements import Requirement

from xdm_ft.augmentations import Augmentations
from xdm_ft.cli import CommandResult
from xdm_ft.cli.run import load_recipe
from xdm_ft.encoders import Encoder
from xdm_ft.experiment.cluster import address_of, device_of, import_ray, reachable
from xdm_ft.experiment.data_checks import SITE_CLASS, Finding, data_faults, fault, intensity_faults, plan_faults
from xdm_ft.experiment.estimate import estimate
from xdm_ft.experiment.plan import Plan, make_plan, read_data
from xdm_ft.experiment.prepare import (
    build_encoder,
    build_encoders,
    by_label,
    check_batch_norm,
    check_prompts,
    cuts_of,
    with_text,
)
from xdm_ft.experiment.results import trained_words
from xdm_ft.experiment.resume import inherit_choices
from xdm_ft.experiment.work import as_launched, launched
from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache import cache_folder
from xdm_ft.features.extract import cached_views
from xdm_ft.features.hashes import FileHashes, hash_files
from xdm_ft.features.key import weights_digest
from xdm_ft.images import ImageDataset
from xdm_ft.images.decode import scan
from xdm_ft.images.transforms import NotAStrip, Preprocessing
from xdm_ft.protocol.site_class import site_class_of
from xdm_ft.recipe.settings import Cluster, Recipe
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.machine import cores, cpu_has_bf16
from xdm_ft.runtime.terminal import show

MODULES = ("torchvision", "timm", "open_clip", "accelerate", "datasets", "wilds", "sklearn", "safetensors", "PIL")
GIGABYTE = 1e9


def main(arguments: argparse.Namespace) -> CommandResult:
    """Prints every finding when it is made: some checks take minutes."""
    checks = []
    for finding in _findings(arguments):
        if not arguments.json and os.environ.get("RANK", "0") == "0":  # of several launched processes one prints
            show(finding)
        ok = finding.remedy is None
        checks.append({"check": finding.what, "ok": ok, "found": finding.found, "remedy": finding.remedy})
    faults = sum(not check["ok"] for check in checks)
    line = f"{plural(faults, 'fault')}, each followed by its remedy (→)" if faults else "no faults"
    return CommandResult({"ok": not faults, "faults": faults, "checks": checks}, [line], status=2 if faults else 0)


def _findings(arguments: argparse.Namespace) -> Iterator[Finding]:
    yield from installation()
    yield from devices()
    if arguments.recipe is None:
        yield from _guard("cache", cache_disk(FeatureSettings()))
        yield from _guard("cluster", ray_cluster(Cluster()))
        return
    try:
        recipe = inherit_choices(load_recipe(arguments))
    except UserError as error:
        yield from fault("recipe", error)
        return
    yield Finding("recipe", f"{recipe.name}, {plural(len(recipe.methods), 'method')}")
    yield from _guard("precision", precision(recipe))
    yield from _guard("cache", cache_disk(recipe.features))
    yield from _guard("cluster", ray_cluster(recipe.cluster))
    yield from _guard("recipe's own", weights_and_data(recipe))


def _guard(subject: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yields the findings of a check. A `UserError` that stops it becomes a fault, and the next checks still run."""
    try:
        yield from findings
    except UserError as error:
        yield from fault(subject, error)


def installation() -> Iterator[Finding]:
    """Checks the version of every required library, and that the heavy ones can be imported."""
    yield Finding("python", sys.version.split()[0])
    installed, all_fit = [], True
    for line in importlib.metadata.requires("xdm_ft") or []:
        needed = Requirement(line)
        # of an extra, or for another system: it is no fault that it is missing
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        if version == "missing" or not needed.specifier.contains(version, prereleases=True):
            all_fit = False
            yield Finding("library", f"{needed.name} is {version}", f"pip install '{needed.name}{needed.specifier}'")
        installed.append(f"{needed.name} {version}")
    if all_fit:
        yield Finding("libraries", ", ".join(installed))
    for module in MODULES:
        try:
            importlib.import_module(module)
        except Exception as error:  # the import of a broken binary can raise any exception
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            yield Finding("library", f"{module} cannot be imported ({problem})", "install it again")


def devices() -> Iterator[Finding]:
    """Reports processor cores, memory, GPUs, and the precisions that each supports."""
    import psutil  # here, as `installation` reports first that it is missing

    memory = psutil.virtual_memory()
    free, total = memory.available / GIGABYTE, memory.total / GIGABYTE
    bf16 = "bf16 (in hardware)" if cpu_has_bf16() else "bf16 (slowly)"
    has = f"{plural(cores(), 'core')}, {free:.1f} of {total:.1f} GB free"
    yield Finding("processor", f"{has}; float32, {bf16}, no fp16")
    for number in range(torch.cuda.device_count()):
        free, total = (size / GIGABYTE for size in torch.cuda.mem_get_info(number))
        with torch.cuda.device(number):
            precisions = "float32, fp16 and bf16" if torch.cuda.is_bf16_supported() else "float32 and fp16, no bf16"
        name = torch.cuda.get_device_name(number)
        yield Finding(f"GPU {number}", f"{name}, {free:.1f} of {total:.1f} GB free; {precisions}")
    if Path("/proc/driver/nvidia/version").exists() and not torch.cuda.is_available():
        problem = f"an NVIDIA driver is installed, but torch {torch.__version__} sees no GPU"
        remedy = "install torch built for CUDA (https://pytorch.org), or make the GPU visible (CUDA_VISIBLE_DEVICES)"
        yield Finding("GPU", problem, remedy)


def precision(recipe: Recipe) -> Iterator[Finding]:
    """Checks that this machine supports the recipe's precision. Raises `UserError` if the launcher sets another one."""
    asked, cuda = as_launched(recipe).training.mixed_precision, torch.cuda.is_available()
    if asked == "fp16" and not cuda:
        yield Finding("precision", "fp16 needs a GPU, torch finds none", "set training.mixed_precision: bf16 or no")
    elif asked == "bf16" and cuda and not torch.cuda.is_bf16_supported():
        yield Finding("precision", "this GPU does not support bf16", "set training.mixed_precision: fp16 or no")
    else:
        yield Finding("precision", f"training in {'float32' if asked == 'no' else asked}")


def cache_disk(settings: FeatureSettings) -> Iterator[Finding]:
    folder = cache_folder(settings)
    yield Finding("cache", f"{folder}, {shutil.disk_usage(folder).free / GIGABYTE:.1f} GB free on its disk")


def ray_cluster(settings: Cluster) -> Iterator[Finding]:
    """Reports version and address of Ray. Raises `UserError` if the recipe names a cluster that is not there."""
    if settings.name is not None:
        yield Finding("cluster", f"Ray {import_ray().__version__} at {reachable(settings.address)}")
    elif importlib.util.find_spec("ray") is None:
        yield Finding("cluster", "Ray is not installed; models train on this machine")
    else:
        try:
            state = f"runs at {address_of(settings.address)}; cluster.name=ray trains there"
        except UserError:
            state = "does not run on this machine"
        yield Finding("cluster", f"Ray {importlib.metadata.version('ray')} {state}")


def weights_and_data(recipe: Recipe) -> Iterator[Finding]:
    """Checks the encoders' weights, the data, the disk space that the features need, and the time of the run."""
    encoders: dict[str | None, Encoder] = {}
    for label, component in by_label(recipe).items() if recipe.has_images else ():
        name = "weights" if label is None else f"weights of {label}"
        try:
            encoder = build_encoder(component, recipe.protocol.seeds[0])
        except UserError as error:
            yield from fault(name, error)
            continue
        tensors = encoder.state_dict().values()
        number, size = sum(tensor.numel() for tensor in tensors), sum(tensor.nbytes for tensor in tensors)
        values = f"{number:,} values, {size / 1e6:,.1f} MB, xxh3_128 {weights_digest(encoder)}"
        yield Finding(name, f"{encoder.pretraining}; {values}; {encoder.width} features")
        encoders[label] = encoder
    all_built = not recipe.has_images or encoders.keys() == by_label(recipe).keys()
    if encoders and all_built:
        recipe = with_text(recipe, encoders)
    cached = {item.encoder_label for item in recipe.runnable_methods if not recipe.trains_on_images(item)}
    preprocessing = next((encoder.preprocessing for label, encoder in encoders.items() if label in cached), None)
    data = yield from check_data(recipe, preprocessing)
    if data is None:
        return
    dataset, hashes, plan = data
    if all_built and recipe.has_images:
        try:
            check_prompts(recipe, encoders, dataset.class_names)
            if plan is not None:
                check_batch_norm(plan, encoders)
        except UserError as error:
            yield from fault("recipe", error)
    if not recipe.has_images:
        recipe, encoders = build_encoders(recipe, dataset)
        yield Finding("features", f"{encoders[None].pretraining}; {encoders[None].width} features")
    for label, encoder in encoders.items() if recipe.has_images else ():
        yield from _guard("cache", cache_space(recipe, label, encoder, dataset, hashes))
    if plan is None or not all_built:
        return
    try:
        with launched(plan.recipe) as accelerator:
            time = estimate(plan, encoders, accelerator)
        yield Finding("time", f"{time.text()} on {time.device}, if nothing is trained yet")
    except UserError as error:
        yield from fault("time", error)


def cache_space(
    recipe: Recipe, label: str | None, encoder: Encoder, dataset: ImageDataset, hashes: FileHashes
) -> Iterator[Finding]:
    """Checks that the features and activations of one encoder that are not cached yet fit on the disk.

    Raises `UserError` if they do not, or if the encoder cannot be cut where the recipe says.
    """
    from accelerate import PartialState  # here, as `installation` reports that it cannot be imported

    items = [item for item in recipe.runnable_methods if item.encoder_label == label]
    device = device_of(recipe.cluster, PartialState().device)  # on which the run computes features
    cached: list[tuple[str, Encoder, tuple[Augmentations, ...]]] = []
    if any(map(recipe.reads_features, items)):
        kinds = recipe.cached_augmentations(item for item in items if item.trainable is False)
        cached.append(("features", encoder, kinds))
    for cut in cuts_of(recipe, encoder, items, dataset, device, hashes):
        title = f"activations, {', '.join(map(trained_words, cut.serves))}"
        if cut.is_cached:
            cached.append((title, cut.below, cut.augmentations))
        else:
            yield Finding(title, f"computed at every step ({cut.why_computed})")
    needed_before = 0
    for title, part, kinds in cached:
        views = cached_views(part, dataset, hashes.images, recipe.features, kinds, device)
        missing, plain = sum(len(store.missing()) for _, store in views), views[0][1]
        needed = sum(store.bytes_needed for _, store in views)
        # without the plain view's own bytes, which `require_space` adds
        plain.require_space(needed_before + needed - plain.bytes_needed)
        needed_before += needed
        passes = f" in {len(views)} passes" if len(views) > 1 else ""
        count = len(views) * len(hashes.images.contents)
        yield Finding(title, f"{count - missing} of {count} cached{passes}, {needed / 1e6:,.1f} MB more are needed")


def check_data(
    recipe: Recipe, preprocessing: Preprocessing | None
) -> Generator[Finding, None, tuple[ImageDataset, FileHashes, Plan | None] | None]:
    """Returns the data, a hash of every image, and the plan, if data and recipe fit; None if they cannot be read.

    `preprocessing` is the encoder's; None if the encoder cannot be built.
    """
    try:
        dataset = read_data(recipe)
    except UserError as error:
        yield from fault("data", error)
        settings = recipe.data.kwargs()
        if settings.get("counts") != "published":
            return None
        try:  # a benchmark whose image counts are wrong is read, so that its other faults are found too
            dataset = recipe.data.cls(**(settings | {"counts": "any"}))
        except UserError:  # the stricter check has reported this fault already
            return None

    count = f"{plural(len(dataset), 'image')}, {plural(len(dataset.domain_names), 'domain')}"
    yield Finding("data", f"{count}, images per class and domain:")
    site_class = site_class_of(dataset)
    domains = zip(dataset.domain_names, site_class.counts.sum(1), strict=True)
    yield Finding("domains", ", ".join(f"{domain} {number}" for domain, number in domains))
    for name, row_of_domains in zip(dataset.class_names, site_class.counts.T, strict=True):
        yield Finding(f"class {name}", " ".join(map(str, row_of_domains)))
    if site_class.line:
        yield Finding(SITE_CLASS, site_class.line)

    unreadable = dict[int, str]()
    if recipe.has_images:
        unreadable = scan(dataset, cores(), None if preprocessing is None else NotAStrip(preprocessing))
    if recipe.has_images and not unreadable:
        yield Finding("images", "all decode")
    for row, reason in unreadable.items():
        remedy = "repair or remove it, or set data.on_bad_image: skip"
        yield Finding("image", f"{dataset.name(row)} does not decode: {reason}", remedy)

    plan = None
    try:
        plan = make_plan(recipe, dataset)
        if unreadable:
            # a run with data.on_bad_image: skip leaves these images out, and what remains may be too little for a split
            make_plan(recipe, dataset, unreadable)
    except UserError as error:
        yield from fault("plan", error)
    index = cache_folder(recipe.features)
    hashes = hash_files(dataset, index, show=True)
    found = list(data_faults(dataset, hashes, plan.splits_of_all_seeds if plan else ()))
    found += intensity_faults(recipe, dataset, hashes, index, show=True)
    found += plan_faults(plan) if plan is not None else ()
    yield from found
    if all(finding.remedy is None for finding in found):
        undivided = "" if plan is None or found else ", no group is in both training and test"
        yield Finding("images and groups", f"no image occurs twice{undivided}")
    return dataset, hashes, plan
