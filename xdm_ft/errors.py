"""The one exception that a user can mend, and the hint at the nearest known name."""

import difflib


class UserError(Exception):
    """A fault in the recipe, the data, the weights or the disk. Its text is one line (or one line per fault).

    It names the file and the key or value, says what is wrong and what to do. The command line prints it without a
    traceback and ends with exit status 2.
    """


def printable(name: object) -> str:
    """The name on one line: newlines, control characters and undecodable bytes of a path are written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in str(name))


def did_you_mean(word: str, known: list[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them."""
    close = difflib.get_close_matches(word, known, n=1)
    return f'; did you mean "{close[0]}"?' if close else f"; known: {', '.join(known)}"
