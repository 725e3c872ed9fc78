"""The verbs of `xdm-ft`. Each verb imports the heavy modules that it needs, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import traceback
from collections.abc import Callable
from typing import NoReturn

from xdm_ft import interrupt
from xdm_ft.errors import UserError, printable
from xdm_ft.terminal import complain, opened, show
from xdm_ft.version import __version__

Verb = Callable[[argparse.Namespace], int]
RESUMABLE = ("run", "features")  # verbs whose finished work stays when a signal stops them
CHANGES = "changes to the recipe, values as YAML; METHOD.KEY=value sets a key of a method"
EXAMPLES = {
    "run": (
        "xdm-ft run demo",
        "xdm-ft run demo name=short 'methods=[erm,xdomainmix]' training.steps=300 xdomainmix.warmup_steps=100",
    ),
    "validate": ("xdm-ft validate clip_folder data.root=DIR protocol.test_domains=sketch",),
    "features": ("xdm-ft features clip_folder data.root=DIR features.precision=bf16",),
    "retrain": ("xdm-ft retrain output/demo xdomainmix blurred 0",),
    "doctor": ("xdm-ft doctor", "xdm-ft doctor clip_folder data.root=DIR"),
    "ls": ("xdm-ft ls methods",),
    "cp": ("xdm-ft cp clip_folder mine.yaml",),
    "cache": ("xdm-ft cache verify", "xdm-ft cache prune --unused-days 30"),
}


def _run(arguments: argparse.Namespace) -> int:
    from xdm_ft.commands.run import run_recipe
    from xdm_ft.recipe.read import load

    return run_recipe(load(arguments.recipe, arguments.overrides), show=_is_main_process())


def _validate(arguments: argparse.Namespace) -> int:
    from xdm_ft.commands.validate import validate
    from xdm_ft.recipe.read import load

    validate(load(arguments.recipe, arguments.overrides))
    return 0


def _features(arguments: argparse.Namespace) -> int:
    from xdm_ft.commands.features import fill_cache
    from xdm_ft.recipe.read import load

    fill_cache(load(arguments.recipe, arguments.overrides))
    return 0


def _ls(arguments: argparse.Namespace) -> int:
    from xdm_ft.commands.ls import listing

    show(listing(arguments.what))
    return 0


def _cp(arguments: argparse.Namespace) -> int:
    from xdm_ft.recipe.text import copy_recipe

    show(printable(f"wrote {copy_recipe(arguments.recipe, arguments.file)}"))
    return 0


def _cache(arguments: argparse.Namespace) -> int:
    from xdm_ft.commands.cache import cache

    show(cache(arguments.action, arguments.dir, arguments.unused_days, arguments.max_size, arguments.unreferenced))
    return 0


def _retrain(arguments: argparse.Namespace) -> int:
    from xdm_ft.commands.retrain import retrain

    model = arguments.method, arguments.test_domain, arguments.seed, arguments.trial
    show(retrain(arguments.run_dir, *model, arguments.alone))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from xdm_ft.commands.doctor import doctor

    return doctor(arguments.recipe, arguments.overrides)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))  # it contains the arguments as they were given


def parser() -> argparse.ArgumentParser:
    main_parser = _Parser(prog="xdm-ft", description="Fine-tune foundation models for domain generalization.")
    main_parser.add_argument("--version", action="version", version=__version__)
    verbs = main_parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, function: Verb, text: str) -> argparse.ArgumentParser:
        examples = "\n  ".join(["examples:", *EXAMPLES[name]])
        form = argparse.RawDescriptionHelpFormatter  # it keeps the line breaks of the examples
        sub = verbs.add_parser(name, help=text, description=text, epilog=examples, formatter_class=form)
        sub.set_defaults(function=function)
        return sub

    recipe_verbs: list[tuple[str, Verb, str]] = [
        ("run", _run, "train and compare all methods of a recipe; resume the run if it was interrupted"),
        ("validate", _validate, "check a recipe against its data; print the resolved recipe, the prompts and the plan"),
        ("features", _features, "compute the features of a recipe and cache them, without training"),
    ]
    for name, function, text in recipe_verbs:
        sub = verb(name, function, text)
        sub.add_argument("recipe", metavar="RECIPE", help="a file, or the name of a packaged recipe")
        sub.add_argument("overrides", metavar="key.sub=value", nargs="*", help=CHANGES)
    again = verb("retrain", _retrain, "train one model of a run again and compare it with the recorded one")
    again.add_argument("run_dir", metavar="RUN_DIR")
    again.add_argument("method", metavar="METHOD", help="name of the method in results.json")
    again.add_argument("test_domain", metavar="TEST_DOMAIN", help="held-out domain; several joined by commas")
    again.add_argument("seed", metavar="SEED", type=int)
    again.add_argument("trial", metavar="TRIAL", type=int, nargs="?", default=0, help="trial of a search (default 0)")
    again.add_argument("--alone", action="store_true", help="train the head without the other heads of its chunk")
    doctor = verb("doctor", _doctor, "check installation, devices, weights and data; print a remedy for each fault")
    doctor.add_argument("recipe", metavar="RECIPE", nargs="?", help="a file, or the name of a packaged recipe")
    doctor.add_argument("overrides", metavar="key.sub=value", nargs="*", help=CHANGES)
    ls = verb("ls", _ls, "list recipes, methods, heads, data sets or encoders, one per line")
    ls.add_argument("what", nargs="?", choices=["recipes", "methods", "heads", "data", "encoders"], default="recipes")
    cp = verb("cp", _cp, "copy a packaged recipe to a file that you can edit")
    cp.add_argument("recipe", metavar="RECIPE")
    cp.add_argument("file", metavar="FILE")
    cache = verb("cache", _cache, "list, verify or remove cached features")
    cache.add_argument("action", nargs="?", choices=["ls", "verify", "prune"], default="ls")
    cache.add_argument("--dir", help="folder of the cache, if it is not the default one")
    cache.add_argument("--unused-days", type=float, metavar="N", help="prune: remove features not used for N days")
    cache.add_argument(
        "--unreferenced",
        nargs="+",
        metavar="DIR",
        help="prune: remove features that no run in these folders, at any depth, was trained on",
    )
    cache.add_argument(
        "--max-size", type=float, metavar="GB", help="prune: remove the longest unused features until this size is left"
    )
    return main_parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status.

    0: done. 1: a model failed, or an unexpected error. 2: a fault that the user can repair. 130: SIGINT. 141: the
    reader of standard output has ended (`| head`). 143: SIGTERM.
    """
    try:
        with opened(logging.INFO if _is_main_process() else logging.WARNING):
            arguments = parser().parse_args(argv)
            with interrupt.handled(resumable=arguments.verb in RESUMABLE):
                _refuse_missing_folder()
                return int(arguments.function(arguments))
    except UserError as error:
        if _is_main_process():
            complain(f"xdm-ft: {error}")
        return 2
    except interrupt.Interrupted as stop:
        if _is_main_process():
            complain(printable(f"xdm-ft: {stop}"))
        return stop.status
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except Exception as error:
        if isinstance(error, PermissionError) and error.filename is not None:
            complain(f"xdm-ft: {error.filename}: {error.strerror}; change its permissions or use another")
            return 2
        if (lost := _lost_process(error)) is None:
            complain(traceback.format_exc())
        elif not interrupt.stop_requested():  # the process that died has obeyed the same signal, and said so
            complain(f"xdm-ft: {lost}")
        return 1


def _refuse_missing_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:  # libraries would end the process when they are imported
        raise UserError(f"the current folder can not be used ({error.strerror}); change to another one") from error


def _lost_process(error: Exception) -> str | None:
    """Returns the message if the error means that another process of the run has died, else None.

    The launcher reports which process died, and by which signal.
    """
    text = str(error).strip().splitlines()
    if os.environ.get("WORLD_SIZE", "1") == "1" or not isinstance(error, RuntimeError):
        return None
    # gloo raises a plain RuntimeError when a connection breaks
    if not any("closed by peer" in line or "reset by peer" in line for line in text):
        return None
    rank = os.environ.get("RANK", "0")
    return f"rank {rank} stops because another process has died ({text[0]}); run the same command to resume"


def _is_main_process() -> bool:
    # from the launcher's environment, because importing Accelerate takes seconds
    return os.environ.get("RANK", "0") == "0"
