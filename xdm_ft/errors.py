"""The exception for faults that a user can repair, and two helpers for its message."""

import difflib


class UserError(Exception):
    """A fault in the recipe, the data, the weights or the disk. Its text is one line, or one line per fault.

    The text names the file and the key or value, says what is wrong and what to do. The command line prints it without
    a traceback and exits with status 2.
    """


def printable(name: object) -> str:
    """Returns the name on one line: newlines, control characters and undecodable bytes of a path become escapes."""
    # a path that is not UTF-8 holds lone surrogates (PEP 383), which a strict codec would refuse
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in str(name))


def did_you_mean(word: str, known: list[str]) -> str:
    """Returns the end of a message about an unknown name: the nearest known name, or all known names."""
    close = difflib.get_close_matches(word, known, n=1)
    return f'; did you mean "{close[0]}"?' if close else f"; known: {', '.join(known)}"
