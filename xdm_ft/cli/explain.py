"""`xdm-ft explain`: the concepts that a reader needs first, and each further word on request."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from xdm_ft.cli import CommandResult
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.terminal import glossary

WIDTH = 80  # characters


def main(arguments: argparse.Namespace) -> CommandResult:
    groups = glossary()
    if not arguments.word:
        first, *further = groups
        words = [_wrap(group, " · ".join(groups[group])) for group in further]
        more = ["", "More words: xdm-ft explain WORD, or the name of a group", ""]
        return CommandResult(groups, [*_lines(groups[first]), *more, *(line for lines in words for line in lines)])
    chosen = _entries(" ".join(arguments.word), groups)
    return CommandResult(chosen, [line for entries in chosen.values() for line in _lines(entries)])


def names(group: str, word: str) -> set[str]:
    """Returns what asks for an entry: its word without signs, a part of it between commas, and what brackets leave."""
    return {_plain(part) for part in (word, *word.split(", "), word.partition(" (")[0])}


def _entries(asked: str, groups: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Returns {group: {word: meaning}} of the entries with this name, else of the group, else of those that hold it.

    A part of a word is looked for last. Raises `UserError` if there is none.
    """
    name = _plain(asked)
    known = [(group, word) for group, entries in groups.items() for word in entries]
    found = [(group, word) for group, word in known if name in names(group, word)]
    found = found or [(group, word) for group, word in known if name == group]
    found = found or [(group, word) for group, word in known if name and f" {name} " in f" {_plain(word)} "]
    found = found or [(of, word) for of, word in known if name and f" {name} " in f" {_plain(groups[of][word])} "]
    found = found or [(group, word) for group, word in known if asked and asked.lower() in word.lower()]
    if not found:
        words = {word.lower(): word for word in (*groups, *(word for _, word in known))}
        near = [words[word] for word in difflib.get_close_matches(asked.lower(), words)]
        remedy = f"the nearest: {', '.join(near)}" if near else "xdm-ft explain lists all words"
        raise UserError(f'explain: no word "{asked}"; {remedy}')
    return {group: {word: groups[group][word] for of, word in found if of == group} for group, _ in found}


def _plain(word: str) -> str:
    return " ".join(re.findall(r"\w+", word.lower()))


def _lines(entries: Mapping[str, str]) -> Iterator[str]:
    for word, meaning in entries.items():
        yield from _wrap(word, meaning)


def _wrap(word: str, text: str) -> Iterable[str]:
    return textwrap.wrap(f"{word}: {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
