"""`xdm-ft explain`: what the words of a run's tables mean."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from xdm_ft.cli.answer import Answer
from xdm_ft.report.manual import MANUAL

WIDTH = 80  # characters


@dataclass(frozen=True)
class Explained(Answer):
    topics: dict[str, dict[str, str]]

    def text(self) -> str:
        lines = []
        for topic, words in self.topics.items():
            lines += [topic.upper()]
            for word, meaning in words.items():
                lines += textwrap.wrap(f"{word}: {meaning}", WIDTH, initial_indent="  ", subsequent_indent="    ")
            lines.append("")
        return "\n".join(lines).rstrip()

    def to_json(self) -> dict[str, dict[str, str]]:
        return self.topics


def explain(topic: str | None) -> Explained:
    return Explained(MANUAL if topic is None else {topic: MANUAL[topic]})
