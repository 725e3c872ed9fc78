"""The verbs of `xdm-ft`. Each verb imports the heavy modules that it needs, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any, NoReturn

from xdm_ft.cli import completion, evaluate_options, export_options, predict_options, report_options
from xdm_ft.cli.answer import Answer, as_json
from xdm_ft.runtime import interrupt
from xdm_ft.runtime.errors import UserError, did_you_mean, printable
from xdm_ft.runtime.terminal import complain, opened, set_aside, write
from xdm_ft.version import __version__

Verb = Callable[[argparse.Namespace], Answer]
RESUMABLE = ("run", "features", "analyse")  # verbs whose finished work stays when a signal stops them
TOPICS = (
    "table", "comparison", "verdict", "selection", "metrics", "sentence", "cost", "encoders", "notes", "analysis"
)  # fmt: skip
"""Of `explain`."""
CHANGES = "changes to the recipe, values as YAML; METHOD.KEY=value sets a key of a method"
EXAMPLES = {
    "run": (
        "xdm-ft run demo",
        "xdm-ft run demo name=long 'methods=[erm,xdomainmix]' training.steps=300 xdomainmix.warmup_steps=100",
    ),
    "validate": ("xdm-ft validate clip_folder data.root=DIR protocol.test_domains=sketch",),
    "features": ("xdm-ft features clip_folder data.root=DIR features.precision=bf16",),
    "retrain": (
        "xdm-ft retrain output/demo xdomainmix blurred 0",
        "xdm-ft retrain output/demo xdomainmix blurred 0 --keep DIR",
    ),
    "analyse": ("xdm-ft analyse output/demo", "xdm-ft analyse output/demo --json"),
    "report": (
        "xdm-ft report output/demo --images",
        "xdm-ft report output/demo output/short --format latex --out table.tex",
    ),
    "export": (
        "xdm-ft export output/demo my_model",
        "xdm-ft export output/demo my_model --method xdomainmix --held-out blurred --with-encoder",
    ),
    "predict": (
        "xdm-ft predict my_model scans/ --out predictions.csv --resume",
        "xdm-ft predict my_model 'scans/**/*.png' --group-by '(patient_\\d+)' --top-k 3",
    ),
    "evaluate": ("xdm-ft evaluate my_model SITE", "xdm-ft evaluate my_model site.csv --json"),
    "doctor": ("xdm-ft doctor", "xdm-ft doctor clip_folder data.root=DIR"),
    "explain": ("xdm-ft explain", "xdm-ft explain verdict"),
    "ls": ("xdm-ft ls methods", "xdm-ft ls methods --json"),
    "cp": ("xdm-ft cp clip_folder mine.yaml",),
    "cache": ("xdm-ft cache verify", "xdm-ft cache prune --unused-days 30"),
}


def _run(arguments: argparse.Namespace) -> Answer:
    from xdm_ft.recipe.text import read_recipe, say_if_finished

    say_if_finished(read_recipe(arguments.recipe, arguments.overrides))
    from xdm_ft.cli.run import run_recipe  # this imports torch
    from xdm_ft.recipe.check import load

    return run_recipe(load(arguments.recipe, arguments.overrides))


def _validate(arguments: argparse.Namespace) -> Answer:
    from xdm_ft.cli.validate import validate
    from xdm_ft.recipe.check import load

    return validate(load(arguments.recipe, arguments.overrides))


def _features(arguments: argparse.Namespace) -> Answer:
    from xdm_ft.cli.features import fill_cache
    from xdm_ft.recipe.check import load

    return fill_cache(load(arguments.recipe, arguments.overrides))


def _ls(arguments: argparse.Namespace) -> Answer:
    from xdm_ft.cli.ls import listing

    return listing(arguments.what)


def _explain(arguments: argparse.Namespace) -> Answer:
    from xdm_ft.cli.explain import explain

    return explain(arguments.topic)


def _cp(arguments: argparse.Namespace) -> Answer:
    from xdm_ft.cli.cp import copy

    return copy(arguments.recipe, arguments.file)


def _cache(arguments: argparse.Namespace) -> Answer:
    from xdm_ft.cli.cache import cache

    return cache(arguments.action, arguments.dir, arguments.unused_days, arguments.max_size, arguments.unreferenced)


def _retrain(arguments: argparse.Namespace) -> Answer:
    from xdm_ft.cli.retrain import retrain
    from xdm_ft.evaluation.records import ModelKey

    key = ModelKey(arguments.method, tuple(arguments.test_domain.split(",")), arguments.seed, arguments.trial)
    return retrain(arguments.run_dir, key, arguments.alone, arguments.keep)


def _analyse(arguments: argparse.Namespace) -> Answer:
    from xdm_ft.cli.analyse import analyse_run

    return analyse_run(arguments.run_dir, arguments.reconstruct)


def _doctor(arguments: argparse.Namespace) -> Answer:
    from xdm_ft.cli.doctor import doctor

    return doctor(arguments.recipe, arguments.overrides)


class _Misused(SystemExit):
    """argparse has refused the arguments, and has printed why."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


class _Parser(argparse.ArgumentParser):
    """Options may stand anywhere among the other arguments: `run demo --quiet training.steps=10`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)  # `main` looks for "--json" before the arguments are parsed
        self._options_are_first = False

    def error(self, message: str) -> NoReturn:
        try:
            super().error(printable(message))  # it contains the arguments as they were given
        except SystemExit:
            raise _Misused(message) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f'no "{value}"{did_you_mean(str(value), [*action.choices])}')

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # argparse begins with the parser of all verbs, which can not do it, and calls this method of the verb's parser
        if self._options_are_first or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._options_are_first = True  # parse_known_intermixed_args calls this method twice
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._options_are_first = False


def completed(argument: argparse.Action, values: Callable[..., Iterable[str]]) -> None:
    """Notes the function that returns what the Tab key offers for an argument."""
    argument.completer = values  # type: ignore[attr-defined]  # where argcomplete looks for it


def parser() -> argparse.ArgumentParser:
    main_parser = _Parser(prog="xdm-ft", description="Fine-tune foundation models for domain generalization.")
    main_parser.add_argument("--version", action="version", version=__version__)
    verbs = main_parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, function: Verb, text: str) -> argparse.ArgumentParser:
        examples = "\n  ".join(["examples:", *EXAMPLES[name]])
        form = argparse.RawDescriptionHelpFormatter  # it keeps the line breaks of the examples
        sub = verbs.add_parser(name, help=text, description=text, epilog=examples, formatter_class=form)
        sub.set_defaults(function=function)
        sub.add_argument("--json", action="store_true", help="print the result as one JSON document")
        sub.add_argument(
            "--quiet", action="store_true", help="print no progress and no notes: only warnings and faults"
        )
        return sub

    def recipe_and_overrides(sub: argparse.ArgumentParser, nargs: str | None = None) -> None:
        about = "a file, or the name of a packaged recipe"
        completed(sub.add_argument("recipe", metavar="RECIPE", nargs=nargs, help=about), completion.recipes)
        changes = sub.add_argument("overrides", metavar="key.sub=value", nargs="*", default=[], help=CHANGES)
        completed(changes, completion.overrides)

    recipe_verbs: list[tuple[str, Verb, str]] = [
        ("run", _run, "train and compare all methods of a recipe; resume or grow the run of an earlier start"),
        ("validate", _validate, "check a recipe against its data; print the resolved recipe, the prompts and the plan"),
        ("features", _features, "compute the features of a recipe and cache them, without training"),
    ]
    for name, function, text in recipe_verbs:
        sub = verb(name, function, text)
        recipe_and_overrides(sub)
    again = verb("retrain", _retrain, "train one model of a run again and compare it with the recorded one")
    again.add_argument("run_dir", metavar="RUN_DIR")
    for one in (
        again.add_argument("method", metavar="METHOD", help="name of the method in results.json"),
        again.add_argument("test_domain", metavar="TEST_DOMAIN", help="held-out domain; several joined by commas"),
        again.add_argument("seed", metavar="SEED", type=int),
        again.add_argument("trial", metavar="TRIAL", type=int, nargs="?", default=0, help="of a search (default 0)"),
    ):
        completed(one, completion.models)
    again.add_argument("--keep", metavar="DIR", help="keep what it trains: DIR becomes a run directory with this model")
    again.add_argument("--alone", action="store_true", help="train the head without the other heads of its chunk")
    text = "measure the models of a finished run as the paper does: invariance, divergence, importance, calibration"
    measured = verb("analyse", _analyse, text)
    measured.add_argument("run_dir", metavar="RUN_DIR")
    measured.add_argument(
        "--reconstruct",
        metavar="FOLDER",
        help="write images of augmented features too; FOLDER has AdaIN's vgg_normalised.pth and decoder.pth",
    )
    text = "print the tables of a run and write its reports again; show several runs in one table"
    report_options.add(verb("report", report_options.called, text))
    text = "write a model of a run as a directory that loads anywhere"
    export_options.add(verb("export", export_options.called, text))
    text = "predict the classes of images: a table with a row per image"
    predict_options.add(verb("predict", predict_options.called, text))
    text = "measure a model on labelled images of a new site, beside what it promises"
    evaluate_options.add(verb("evaluate", evaluate_options.called, text))
    doctor = verb("doctor", _doctor, "check installation, devices, weights and data; print a remedy for each fault")
    recipe_and_overrides(doctor, nargs="?")
    manual = verb("explain", _explain, "explain the words of a run's tables: ±, intervals, verdicts, selection, notes")
    manual.add_argument("topic", nargs="?", choices=TOPICS)
    ls = verb("ls", _ls, "list recipes, methods, heads, data sets or encoders, one per line")
    ls.add_argument("what", nargs="?", choices=["recipes", "methods", "heads", "data", "encoders"], default="recipes")
    cp = verb("cp", _cp, "copy a packaged recipe to a file that you can edit")
    completed(cp.add_argument("recipe", metavar="RECIPE"), completion.recipes)
    cp.add_argument("file", metavar="FILE")
    _cache_options(verb("cache", _cache, "list, verify or remove cached features"))
    return main_parser


def _cache_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("action", nargs="?", choices=["ls", "verify", "prune"], default="ls")
    sub.add_argument("--dir", help="folder of the cache, if it is not the default one")
    sub.add_argument("--unused-days", type=float, metavar="N", help="prune: remove features not used for N days")
    sub.add_argument(
        "--unreferenced",
        nargs="+",
        metavar="DIR",
        help="prune: remove features that no run in these folders, at any depth, was trained on",
    )
    sub.add_argument(
        "--max-size", type=float, metavar="GB", help="prune: remove the longest unused features until this size is left"
    )


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status.

    0: done. 1: a model failed, or an unexpected error. 2: a fault that the user can repair. 130: SIGINT. 141: the
    reader of standard output has ended (`| head`). 143: SIGTERM.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow
        completion.complete(parser())
    json_is_wanted = "--json" in argv
    level = logging.INFO if _is_main_process() and "--quiet" not in argv else logging.WARNING
    if "--quiet" in argv:  # bars of libraries, which read this when they are imported
        os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    try:
        with opened(level):
            arguments = parser().parse_args(argv)
            with interrupt.handled(resumable=arguments.verb in RESUMABLE):
                _refuse_missing_folder()
                return _answered(arguments)
    except _Misused as misused:
        if json_is_wanted:
            _show_fault(2, misused.message)
        raise
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except (Exception, interrupt.Interrupted) as error:
        status, message = _fault(error)
        if message is not None:
            complain(message)
            if json_is_wanted and _is_main_process():
                _show_fault(status, message.removeprefix("xdm-ft: ").strip())
        return status


def _answered(arguments: argparse.Namespace) -> int:
    """Performs the verb and shows its answer, as data or as text. Returns the exit status."""
    with set_aside() if arguments.json else nullcontext():
        answer: Answer = arguments.function(arguments)
        fault, document = answer.error, answer.to_json() if arguments.json else None
    if _is_main_process():
        if arguments.json:
            write(as_json(document))
        elif fault is None or answer.shown_with_error:
            answer.show()
        if fault is not None:
            complain(f"xdm-ft: {fault}")
    return answer.status


def _show_fault(status: int, message: str) -> None:
    """Prints what `--json` promises where there is no result. The status tells if that can not be written either."""
    with suppress(UserError, BrokenPipeError):
        write(as_json({"error": message, "status": status}))


def _fault(error: BaseException) -> tuple[int, str | None]:
    """Returns the exit status after an error, and the message; None if another process prints it."""
    if isinstance(error, UserError):
        return 2, f"xdm-ft: {error}" if _is_main_process() else None
    if isinstance(error, interrupt.Interrupted):
        return error.status, printable(f"xdm-ft: {error}") if _is_main_process() else None
    if isinstance(error, PermissionError) and error.filename is not None:
        return 2, f"xdm-ft: {error.filename}: {error.strerror}; change its permissions or use another"
    if (lost := _lost_process(error)) is None:
        return 1, "".join(traceback.format_exception(error))
    # the process that died has obeyed the same signal, and said so
    return 1, None if interrupt.stop_requested() else f"xdm-ft: {lost}"


def _refuse_missing_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:  # libraries would end the process when they are imported
        raise UserError(f"the current folder can not be used ({error.strerror}); change to another one") from error


def _lost_process(error: BaseException) -> str | None:
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
