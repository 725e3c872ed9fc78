"""The exception for faults that a user can repair, and how messages print names and numbers."""

import difflib
import importlib.metadata
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MAX_WORD = 200  # characters of a word whose nearest is looked for: that takes the square of its length


class UserError(Exception):
    """A fault in the recipe, the data, the weights or the disk. Each argument is one line, one per fault.

    A line names the file and the key or value, says what is wrong and what to do. The command line prints the lines
    without a traceback and exits with status 2.

    >>> try:
    ...     xdm_ft.open("nowhere")
    ... except xdm_ft.UserError as error:
    ...     print(error)
    nowhere: does not exist; name a run directory
    """

    def __str__(self) -> str:
        # a name with a newline or an escape code can neither begin a line nor change the terminal
        return "\n".join(printable(line) for line in self.args)


TESTED = {"accelerate": "1.15", "ray": "2.60", "tensorboard": "2.21", "timm": "1.0.31"}
"""The newest version with which the tests have passed, of libraries of which undocumented parts are used."""


@contextmanager
def undocumented(library: str) -> Iterator[None]:
    """Context that imports such a part. Raises `UserError` where this version has none."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{library} {importlib.metadata.version(library)} lacks a part that is needed ({error}); "
            f"run: pip install '{library}=={TESTED[library]}.*'"
        ) from error


def printable(name: object) -> str:
    """Returns the name on one line: newlines, control characters and undecodable bytes of a path become escapes."""
    text = str(name)
    if text.isprintable():
        return text
    # a path that is not UTF-8 holds lone surrogates (PEP 383), which a strict codec would refuse
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def not_there(path: Path) -> str:
    """Returns what is wrong with a path of a recipe where nothing is; relative ones start where the command starts."""
    return "does not exist" if path.is_absolute() else f"does not exist in {Path.cwd()}"


def one_form(name: str) -> str:
    """Returns a name as all names are compared: é is one character (NFC), also in names of folders of a Mac."""
    return unicodedata.normalize("NFC", name)


def plural(count: int, noun: str) -> str:
    """Returns a number with its noun: 1 image, 2 images, 2 classes."""
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def signed(value: float, digits: int = 1) -> str:
    """Returns a difference with its sign, and without one if it rounds to zero."""
    text = f"{value:+z.{digits}f}"  # z: no "-0.0"
    return text.lstrip("+") if float(text) == 0 else text


def did_you_mean(word: str, known: list[str], command: str = "") -> str:
    """Returns the end of a message about an unknown name: the nearest known name, or all known names.

    `command`: what lists the names, if they are too many for a message.
    """
    if len(word) <= MAX_WORD and (close := difflib.get_close_matches(word, known, n=1)):
        return f'; did you mean "{close[0]}"?'
    sign = "; " if any("," in name for name in known) else ", "
    return f"; {command} lists them" if command else f"; known: {sign.join(known)}"


def join_names(names: Sequence[str], count: int = 8, sign: str = ", ") -> str:
    """Returns the names in a sentence: all of them, or the first ones and how many more there are."""
    more = len(names) - count
    return sign.join(names) if more <= 1 else f"{sign.join(names[:count])} and {more} more"
