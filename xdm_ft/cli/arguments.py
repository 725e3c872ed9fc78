"""The verbs with their arguments, and what the Tab key offers for them. It imports nothing heavy: a user waits."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from xdm_ft.runtime.errors import UserError

Parser = argparse.ArgumentParser
KEYS = "keys.json"  # the keys of recipes, in the cache folder
FORMATS = {".txt": "text", ".md": "markdown", ".tex": "latex", ".csv": "csv"}  # of `report`, by the suffix of its file
LEAST_SHARE = 1e-4  # 23,000 labels could show it
STORED = "stored"  # of --abstain-below: the threshold in the model directory


def complete_with(argument: argparse.Action, values: Callable[..., Iterable[str]]) -> None:
    """Sets the function that returns what the Tab key offers for an argument."""
    argument.completer = values  # type: ignore[attr-defined]  # where argcomplete looks for it


def recipe_names(prefix: str, **_: Any) -> Iterable[str]:
    """Returns the packaged recipes, and the folders and YAML files that begin with the prefix."""
    from argcomplete.completers import FilesCompleter

    from xdm_ft.recipe.text import recipe_folder

    return [*(path.stem for path in recipe_folder().glob("*.yaml")), *FilesCompleter(["yaml", "yml"])(prefix)]


def explained_words(prefix: str, **_: Any) -> Iterable[str]:
    """Returns the words and groups of the glossary."""
    from xdm_ft.runtime.terminal import glossary

    return [*(groups := glossary()), *(word for entries in groups.values() for word in entries)]


def override_keys(parsed_args: argparse.Namespace, **_: Any) -> Iterable[str]:
    """Returns `key.sub=` for all keys of the recipe before, once a first verb has left them in the cache folder."""
    from xdm_ft.recipe.text import find_recipe, parse, recipe_keys

    folder = os.environ.get("XDM_FT_CACHE") or "~/.cache/xdm_ft/features"  # `cache_root`, whose import takes seconds
    try:
        keys = json.loads((Path(folder).expanduser() / KEYS).read_text(encoding="utf-8"))
        recipe = parse(find_recipe(parsed_args.recipe).read_text(encoding="utf-8"), parsed_args.recipe)
        return [f"{key}=" for key in recipe_keys(recipe.values, keys)]
    except (OSError, ValueError, RuntimeError, UserError):  # the verb itself says what is wrong with the recipe
        return []


def share(text: str) -> float:
    """Returns a number from 0.0001 to below 1, which may be written as 10%."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0
    if not LEAST_SHARE <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from {LEAST_SHARE} to 1; give 0.1 or 10%, for example")
    return value


def probability_or_stored(text: str) -> float | str:
    try:
        return text if text == STORED else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is neither a probability nor {STORED}") from None


def add_recipe(verb: Parser, nargs: str | None = None, metavar: str = "RECIPE") -> None:
    text = "a file, the name of a packaged recipe, a folder of <domain>/<class>/<image>, or a run directory"
    complete_with(verb.add_argument("recipe", metavar=metavar, nargs=nargs, help=text), recipe_names)
    text = "changes to the recipe, with values as YAML; METHOD.KEY=value sets a key of a method"
    changes = verb.add_argument("overrides", metavar="key.sub=value", nargs="*", default=[], help=text)
    complete_with(changes, override_keys)


def add_audit(verb: Parser) -> None:
    add_recipe(verb, metavar="RECIPE|RUN")
    verb.add_argument("--images", action="store_true", help="also write copies.html: pairs of copies as small images")


def add_choice(verb: Parser) -> None:
    option = verb.add_argument
    option("--method", help="name of the method in results.json (default: the one that held-out domains prefer)")
    held_out = "a model that was trained without this domain, instead of the final fit; several joined by commas"
    option("--held-out", metavar="DOMAIN", help=held_out)
    option("--seed", type=int, help="with --held-out: the seed (default: the first)")
    option("--trial", type=int, help="with --held-out: the trial of a search (default: the one picked)")


def add_model_options(verb: Parser) -> None:
    """Adds the options of a verb that computes a model's predictions."""
    option = verb.add_argument
    option("--encoder-weights", metavar="FILE", help="the encoder's weights, if the model lacks them")
    option("--device", help="as in torch; default: a GPU if there is one")
    option("--precision", choices=["fp32", "bf16", "fp16"], help="default: that of the run")
    size = "images per forward pass (default: 16 on a CPU, 64 on a GPU)"
    option("--batch-size", type=int, metavar="N", help=size)
    add_choice(verb)


def add_analyse(verb: Parser) -> None:
    verb.add_argument("run_dir", metavar="RUN_DIR", help="the directory of a finished run")
    images = "also write images of augmented features; FOLDER holds AdaIN's vgg_normalised.pth and decoder.pth"
    verb.add_argument("--reconstruct", metavar="FOLDER", help=images)


def add_report(verb: Parser) -> None:
    option = verb.add_argument
    flag = partial(verb.add_argument, action="store_true")
    several = "several give one table, if data, split, seeds, selection, metric and held-out domains are equal"
    option("run_dirs", metavar="RUN_DIR", nargs="+", help=f"a run directory; {several}")
    default = "format of the tables (default: by the suffix of FILE, else text)"
    option("--format", choices=list(FORMATS.values()), help=default)
    option("--out", metavar="FILE", help="write the tables to FILE.txt, .md, .tex or .csv, not to the screen")
    flag("--oracle", help="show results of the rule oracle, which reads test labels, in LaTeX and CSV too")
    flag("--images", help="show the most confident mistakes as small images in report.html")


def add_export(verb: Parser) -> None:
    option = verb.add_argument
    flag = partial(verb.add_argument, action="store_true")
    option("run_dir", metavar="RUN_DIR", help="a run directory")
    option("dir", metavar="DIR", help="a new directory")
    flag(
        "--best",
        help="the final fit on all images; trains it now if the run did not (the default, except for official splits)",
    )
    add_choice(verb)
    encoder = verb.add_mutually_exclusive_group()
    include = "include all weights of the encoder (default: only weights that came from a file)"
    encoder.add_argument("--with-encoder", action="store_true", default=None, help=include)
    leave_out = (
        "leave out weights of the encoder that were not trained; loading needs the file that they came from, if any"
    )
    encoder.add_argument("--without-encoder", action="store_false", dest="with_encoder", default=None, help=leave_out)
    wise = "average the trained (α) and zero-shot (1 − α) weights of a method that started from class embeddings"
    option("--wise-ft", type=float, metavar="α", help=wise)
    flag("--ensemble", help="the heads of all seeds, averaged")
    fitted = "divide the logits by the temperature that was fitted on validation parts of the training domains"
    flag("--temperature", help=fitted)
    flag("--no-site", help="do not train the heads that `assess` and `adapt` need")
    flag("--onnx", help="also write model.onnx, checked against torch")
    inside = "like --onnx, but the file takes resized uint8 images and normalises them itself"
    flag("--onnx-preprocessing", help=inside)
    option("--push-to-hub", metavar="ORG/NAME", help="upload the directory to the Hugging Face hub")
    flag(
        "--allow-training-features",
        help="with --push-to-hub: upload a head even if it holds features of training images",
    )
    hashes = "with --push-to-hub: also upload the checksums of the training images (default: they stay here)"
    flag("--with-training-hashes", help=hashes)
    flag("--private", help="with --push-to-hub: make a new repository private")


def add_predict(verb: Parser) -> None:
    option = verb.add_argument
    flag = partial(verb.add_argument, action="store_true")
    option("model", metavar="DIR", help="a model directory, or a run directory")
    paths = "image, folder, quoted glob, table (CSV or Parquet) with a column path, or - (paths on standard input); "
    paths += "of a model that reads features: their files (.npz, .parquet; bags: .h5, .pt, .npy)"
    option("paths", metavar="PATH", nargs="+", help=paths)
    option("--out", metavar="FILE", help="write the table to FILE once it is complete (default: standard output)")
    option("--format", choices=["csv", "jsonl", "parquet"], help="default: by the suffix of --out, else csv")
    flag("--probabilities", help="a column p:CLASS for each class")
    option("--top-k", type=int, metavar="K", help="columns label_1, probability_1, … for the K best classes")
    flag("--entropy", help="entropy of the probabilities, in nats")
    flag("--spread", help="standard deviation of the label's probability over the heads of an ensemble")
    distance = "columns distance and distance_percentile: how unusual an image is for the model (docs/ship.md)"
    flag("--distance", help=distance)
    flag("--unknown", help="column unknown: whether an image belongs to no class of the model")
    below = (
        f"leave a label empty if its probability is below P; {STORED}: below the threshold of `xdm-ft evaluate --save`"
    )
    option("--abstain-below", type=probability_or_stored, metavar=f"P|{STORED}", help=below)
    group = (
        "a row per group, with the mean of its images' probabilities. Group: a column of the tables, or an expression"
    )
    option("--group-by", metavar="REGEX|COLUMN", help=f"{group} that matches it in the paths")
    flag("--resume", help="continue the unfinished predictions of --out, if any")
    flag("--strict", help="exit with status 2 if an image cannot be read or a folder holds other files")
    add_model_options(verb)


def add_site(verb: Parser, model: str, about: str) -> None:
    """Adds the arguments of a verb that reads the images of a site without labels."""
    option = verb.add_argument
    option("model", metavar=model, help=about)
    option(
        "images",
        metavar="IMAGES",
        nargs="+",
        help="images of the site, without labels: the same forms as PATH of `xdm-ft predict`",
    )
    group = "which images belong to one patient, slide or sequence: a column of the table, or an"
    option("--group", metavar="REGEX|COLUMN", help=f"{group} expression for paths (default: the column group)")
    add_model_options(verb)


def add_assess(verb: Parser) -> None:
    add_site(verb, "MODEL_DIR", "a model directory, as `xdm-ft export` writes it")
    shares = "class shares at the site, as a=.3,b=.7 (default: those of the training images)"
    verb.add_argument("--prevalence", metavar="SHARES", help=shares)


def add_label(verb: Parser) -> None:
    add_site(verb, "MODEL", "a model directory or a run directory")
    option = verb.add_argument
    most = "most images to label: a quarter drawn at random to evaluate the model, the others chosen to adapt it"
    option("--budget", type=int, metavar="N", required=True, help=most)
    option("--out", metavar="FILE.csv", required=True, help="a new table, with an empty column label to fill in")
    option("--sheet", metavar="FILE.html", help="also write a page with the images, made small")
    option("--allow-few-groups", action="store_true", help="also for a site of fewer than 8 groups")


def add_adapt(verb: Parser) -> None:
    option = verb.add_argument
    either = (
        "a model directory; or, with --method, a run on image files: trains the method again with the site as "
        "one more domain"
    )
    option("model", metavar="MODEL_DIR|RUN_DIR", help=either)
    site = "labelled images of the site: the table of `xdm-ft label`, filled in, or what `xdm-ft evaluate` takes"
    option("site", metavar="LABELLED", help=site)
    option("--out", metavar="DIR", required=True, help="a new directory; it is not written if the model stays")
    option("--group", metavar="REGEX", help="expression for paths; the text that it matches is the image's group")
    shift = (
        "shift features by the difference between the mean of --images and the mean of training images with the "
        "same class shares"
    )
    option("--recentre", action="store_true", help=shift)
    option("--images", metavar="IMAGES", nargs="+", help="with --recentre: all images of the site, without labels")
    shares = "with --recentre: class shares at the site, as a=.3,b=.7 (default: those of the labels, from 20 on)"
    option("--prevalence", metavar="SHARES", help=shares)
    add_model_options(verb)


def add_evaluate(verb: Parser) -> None:
    option = verb.add_argument
    option("model", metavar="MODEL", help="a model directory or a run directory")
    site = "folder <class>/<image> or <domain>/<class>/<image>, or a CSV or Parquet table with columns path, label; "
    option("site", metavar="SITE", help=f"{site}optional: domain, group")
    option("--group", metavar="REGEX", help="expression for paths; the text that it matches is the image's group")
    option("--domain", metavar="NAME", nargs="+", help="evaluate these domains only")
    every = "all images of the site, without labels (as PATH of `xdm-ft predict`); from 50 labels on they narrow the"
    option("--images", metavar="IMAGES", nargs="+", help=f"{every} accuracy's interval")
    wrong = "find the probability above which at most this share of answers is wrong, such as 0.1 or 10%%"
    option("--risk", type=share, metavar="SHARE", help=wrong)
    stored = f"store the threshold in the model directory, for `xdm-ft predict --abstain-below {STORED}`"
    option("--save", action="store_true", help=stored)
    add_model_options(verb)


def add_explain(verb: Parser) -> None:
    meaning = "a word of a screen or table, or a group of words (default: the first concepts)"
    complete_with(verb.add_argument("word", metavar="WORD", nargs="*", help=meaning), explained_words)


def add_ls(verb: Parser) -> None:
    lists = ["recipes", "benchmarks", "methods", "heads", "data", "encoders", "augmentations"]
    verb.add_argument("what", nargs="?", choices=lists, default="recipes", help="what to list")
    verb.add_argument("name", nargs="?", metavar="NAME", help="one entry, with its settings and what each means")


def add_cp(verb: Parser) -> None:
    complete_with(verb.add_argument("recipe", metavar="RECIPE", help="the name of a packaged recipe"), recipe_names)
    verb.add_argument("file", metavar="FILE", help="a new file")


def add_cache(verb: Parser) -> None:
    option = verb.add_argument
    todo = "ls: list the features; verify: read them and report damaged files; prune: remove those that options name"
    option("action", nargs="?", choices=["ls", "verify", "prune"], default="ls", help=todo)
    option("--dir", help="folder of the cache, if it is not the default one")
    option("--unused-days", type=float, metavar="N", help="prune: remove features not used for N days")
    unreferenced = "prune: remove features that no run in or below these folders was trained on"
    option("--unreferenced", nargs="+", metavar="DIR", help=unreferenced)
    size = "prune: remove the features that were unused longest until this size is left"
    option("--max-size", type=float, metavar="GB", help=size)


VERBS: dict[str, tuple[Callable[[Parser], None], str]] = {
    "run": (add_recipe, "train and compare all methods of a recipe; resume or grow the run of an earlier start"),
    "validate": (
        add_recipe,
        "check a recipe against its data; print the plan and the prompts, and into a pipe the whole recipe",
    ),
    "audit": (
        add_audit,
        "find copies, twin domains, label errors, and domains that give the class away; say what each costs",
    ),
    "features": (add_recipe, "compute the features of a recipe and cache them, without training"),
    "analyse": (
        add_analyse,
        "measure the models of a finished run: invariance, divergence, importance, calibration",
    ),
    "report": (add_report, "print the tables of a run and write its reports again; show several runs in one table"),
    "export": (add_export, "write a model of a run as a directory that loads anywhere"),
    "predict": (add_predict, "predict the classes of images; write a table with a row per image"),
    "assess": (
        add_assess,
        "estimate a model's accuracy on unlabelled images of a new site, or say why it cannot be estimated",
    ),
    "label": (add_label, "choose images of a new site that are worth labelling; write a table to fill in"),
    "evaluate": (
        add_evaluate,
        "measure a model on labelled images of a new site, and compare with what its card promises",
    ),
    "adapt": (add_adapt, "adapt a model to one site with a few labelled images; keep it only if it is better"),
    "doctor": (
        partial(add_recipe, nargs="?"),
        "check installation, devices, weights and data; print a remedy for each fault",
    ),
    "explain": (add_explain, "explain a word of a screen or table; without a word, the concepts that you need first"),
    "ls": (add_ls, "list recipes for your images, benchmarks, methods, heads, data sets or encoders"),
    "cp": (add_cp, "copy a packaged recipe to a file that you can edit"),
    "cache": (add_cache, "list, verify or remove cached features"),
}
"""{verb: what adds its arguments, its help}. The module of its name in this folder has `main(arguments) -> Answer`."""

EXAMPLES = """
xdm-ft run demo
xdm-ft run demo name=long 'methods=[erm,xdomainmix]' training.steps=300 xdomainmix.warmup_steps=100
xdm-ft validate clip_folder data.root=DIR protocol.test_domains=sketch
xdm-ft audit demo
xdm-ft audit clip_folder data.root=DIR --images
xdm-ft features clip_folder data.root=DIR features.precision=bf16
xdm-ft analyse output/demo
xdm-ft analyse output/demo --json
xdm-ft report output/demo --images
xdm-ft report output/demo output/short --format latex --out table.tex
xdm-ft export output/demo my_model
xdm-ft export output/demo my_model --method xdomainmix --held-out blurred --with-encoder
xdm-ft predict my_model scans/ --out predictions.csv --resume
xdm-ft predict my_model 'scans/**/*.png' --group-by '(patient_\\d+)' --top-k 3
xdm-ft predict my_model scans/ --out predictions.csv --abstain-below stored
xdm-ft assess my_model scans/
xdm-ft assess my_model scans/ --prevalence healthy=.7,ill=.3
xdm-ft label my_model scans/ --budget 40 --out to_label.csv
xdm-ft label my_model scans/ --budget 80 --out to_label.csv --sheet sheet.html --group '(patient_\\d+)'
xdm-ft evaluate my_model SITE
xdm-ft evaluate my_model site.csv --json
xdm-ft evaluate my_model to_label.csv --images scans/ --risk 10% --save
xdm-ft adapt my_model labelled.csv --out site_model
xdm-ft adapt output/clip_folder labelled.csv --method xdomainmix --out site_model
xdm-ft doctor
xdm-ft doctor clip_folder data.root=DIR
xdm-ft explain
xdm-ft explain held-out domain
xdm-ft ls
xdm-ft ls benchmarks
xdm-ft ls methods
xdm-ft ls methods xdomainmix
xdm-ft ls methods --json
xdm-ft cp clip_folder mine.yaml
xdm-ft cache verify
xdm-ft cache prune --unused-days 30
""".strip().split("\n")
