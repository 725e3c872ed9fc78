"""`xdm-ft explain`."""

from __future__ import annotations

import argparse
import textwrap

from xdm_ft.cli.answer import Answer

HELP = "explain the words of a run's tables: ±, intervals, verdicts, selection, notes"
EXAMPLES = ("xdm-ft explain", "xdm-ft explain verdict")
WIDTH = 80  # characters
TOPICS = (
    "table", "comparison", "verdict", "selection", "metrics", "sentence", "cost", "encoders", "notes", "analysis"
)  # fmt: skip


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("topic", nargs="?", choices=TOPICS)


def main(arguments: argparse.Namespace) -> Answer:
    from xdm_ft.report.manual import MANUAL

    topics = MANUAL if arguments.topic is None else {arguments.topic: MANUAL[arguments.topic]}
    lines: list[str] = []
    for topic, words in topics.items():
        lines += ["", topic.upper()]
        for word, meaning in words.items():
            lines += textwrap.wrap(f"{word}: {meaning}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    return Answer(topics, lines[1:])
