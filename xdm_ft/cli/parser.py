"""The command line: what it prints, and its exit status. The module of a verb is imported when the verb is given."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from difflib import get_close_matches
from itertools import zip_longest
from typing import Any, NoReturn

from xdm_ft.cli import CommandResult, as_json
from xdm_ft.cli.arguments import EXAMPLES, VERBS
from xdm_ft.runtime import interrupt
from xdm_ft.runtime.errors import UserError, did_you_mean, printable
from xdm_ft.runtime.terminal import open_streams, print_error, set_aside, write
from xdm_ft.version import __version__

OTHER_NAMES = {
    **dict.fromkeys(("train", "fit", "finetune", "fine-tune", "start", "resume"), "run"),
    **dict.fromkeys(("test", "eval", "score"), "evaluate"),
    **dict.fromkeys(("infer", "inference", "classify"), "predict"),
    **{"check": "validate", "list": "ls", "copy": "cp", "init": "cp", "new": "cp", "help": "--help"},
}
"""{what other tools call a verb: its name here}"""
REMOVED = {"retrain": "to train again, run the recipe with another output.dir: equal inputs give the same bits"}
FORM = argparse.RawDescriptionHelpFormatter  # it keeps the line breaks of examples
FIRST_STEPS = """\
first steps:
  xdm-ft run demo                            a run that needs no data
  xdm-ft validate clip_folder data.root=DIR  your images, in DIR/<domain>/<class>/: check them
  xdm-ft run clip_folder data.root=DIR       train and compare methods on them
  xdm-ft VERB --help                         arguments and examples of a verb"""
RESUMABLE = ("run", "features", "analyse")  # verbs whose finished work stays when a signal stops them


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
        message = self._explained(message)
        try:
            super().error(printable(message))  # it contains the arguments as they were given
        except SystemExit:
            raise _Misused(message) from None

    def _explained(self, message: str) -> str:
        """Returns the message with what to do about an option that is a key of the recipe, or resembles an option."""
        from xdm_ft.recipe.text import KEYS

        for option, following in zip_longest(self._given, self._given[1:], fillvalue="VALUE"):
            name, equals, value = option.removeprefix("--").partition("=")
            if option.startswith("--") and ("." in name or name in KEYS):
                key = f"a key of a recipe has no dashes; write {name}={value if equals else following}"
                return f"no option --{name}: {key}, behind the recipe"
        verbs: Mapping[str, Any] = self._subparsers._group_actions[0].choices if self._subparsers else {}  # type: ignore[assignment]
        verb = next((word for word in self._given if word in verbs), None)
        start, _, unknown = message.partition("unrecognized arguments: -")
        if verb is None or start or not unknown:
            return message
        near = get_close_matches(
            f"-{unknown.split()[0].partition('=')[0]}", verbs[verb]._option_string_actions, 1, 0.75
        )
        hint = f'did you mean "{near[0]}"?' if near else f"`xdm-ft {verb} --help` lists the options"
        return f"{message}; {hint}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        hint = did_you_mean(str(value), [*action.choices])
        if action.dest == "verb":
            meant = OTHER_NAMES.get(value) or (f"run {value}" if value.endswith((".yaml", ".yml")) else None)
            hint = f'; did you mean "{meant}"?' if meant else hint
            hint = f"; {REMOVED[value]}" if value in REMOVED else hint
        raise argparse.ArgumentError(action, f'no "{value}"{hint}')

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # argparse begins with the parser of all verbs, which cannot do it, and calls this method of the verb's parser
        self._given = list(args)
        if self._options_are_first or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._options_are_first = True  # parse_known_intermixed_args calls this method twice
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._options_are_first = False


def parser() -> argparse.ArgumentParser:
    about = "Fine-tune foundation models for domain generalization."
    main_parser = _Parser(prog="xdm-ft", description=about, epilog=FIRST_STEPS, formatter_class=FORM)
    main_parser.add_argument("--version", action="version", version=__version__)
    verbs = main_parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (add_arguments, summary) in VERBS.items():
        examples = "\n  ".join(["examples:", *(line for line in EXAMPLES if line.split()[1] == name)])
        verb = verbs.add_parser(name, help=summary, description=summary, epilog=examples, formatter_class=FORM)
        verb.add_argument("--json", action="store_true", help="print the result as one JSON document")
        quiet = "print no notes and no progress: the result, warnings and errors"
        verb.add_argument("--quiet", action="store_true", help=quiet)
        add_arguments(verb)
    return main_parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status.

    0: done. 1: a model failed, or an unexpected error. 2: a fault that the user can repair. 130: SIGINT. 141: the
    reader of standard output has ended (`| head`). 143: SIGTERM. 129: SIGHUP.
    """
    argv = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow; this ends the process
        import argcomplete

        argcomplete.autocomplete(parser(), always_complete_options="long")
    json_is_wanted = "--json" in argv
    level = logging.INFO if _is_main_process() and "--quiet" not in argv else logging.WARNING
    if "--quiet" in argv:  # bars of libraries, which read this when they are imported
        os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    try:
        with open_streams(level):
            arguments = parser().parse_args(argv)
            with interrupt.handle_signals(resumable=arguments.verb in RESUMABLE):
                try:
                    os.getcwd()
                except OSError as error:  # libraries would end the process when they are imported
                    problem = f"the current folder cannot be used ({error.strerror})"
                    raise UserError(f"{problem}; change to another one") from error
                return _perform(arguments)
    except _Misused as misused:
        if json_is_wanted:
            _show_fault(2, misused.message)
        raise
    except BrokenPipeError:
        return 141  # 128 + SIGPIPE, which Windows lacks
    except (Exception, interrupt.Interrupted) as error:
        status, message = _fault(error)
        if message is not None:
            print_error(message)
            if json_is_wanted and _is_main_process():
                _show_fault(status, message.removeprefix("xdm-ft: ").strip())
        return status


def _perform(arguments: argparse.Namespace) -> int:
    """Performs the verb and shows its answer, as data or as text. Returns the exit status."""
    with set_aside() if arguments.json else nullcontext():
        answer: CommandResult = importlib.import_module(f"xdm_ft.cli.{arguments.verb}").main(arguments)
    if _is_main_process():
        if arguments.json:
            write(as_json(answer.document))
        elif answer.error is None or answer.text_despite_error:
            answer.show()
        if answer.error is not None:
            print_error(f"xdm-ft: {answer.error}")
    return answer.exit_status


def _show_fault(status: int, message: str) -> None:
    """Prints what `--json` promises where there is no result. The status tells if that cannot be written either."""
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
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("xdm_ft"):
        return 2, f"xdm-ft: {error.name} is not installed; install all that the package needs: pip install xdm_ft"
    lines = str(error).strip().splitlines()
    # gloo raises a plain RuntimeError when a connection breaks
    if (
        os.environ.get("WORLD_SIZE", "1") == "1"
        or not isinstance(error, RuntimeError)
        or not any("closed by peer" in line or "reset by peer" in line for line in lines)
    ):
        return 1, "".join(traceback.format_exception(error))
    if interrupt.stop_requested():  # the process that died has obeyed the same signal, and said so
        return 1, None
    # the launcher reports which process died, and by which signal
    lost = f"rank {os.environ.get('RANK', '0')} stops because another process has died ({lines[0]})"
    return 1, f"xdm-ft: {lost}; run the same command to resume"


def _is_main_process() -> bool:
    # from the launcher's environment, because importing Accelerate takes seconds
    return os.environ.get("RANK", "0") == "0"
