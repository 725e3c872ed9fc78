"""`xdm-ft explain`."""

from __future__ import annotations

import argparse
import textwrap

from xdm_ft.cli import Answer
from xdm_ft.report.sections.about import MANUAL

WIDTH = 80  # characters


def main(arguments: argparse.Namespace) -> Answer:
    topics = MANUAL if arguments.topic is None else {arguments.topic: MANUAL[arguments.topic]}
    lines: list[str] = []
    for topic, words in topics.items():
        lines += ["", topic.upper()]
        for word, meaning in words.items():
            lines += textwrap.wrap(f"{word}: {meaning}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    return Answer(topics, lines[1:])
