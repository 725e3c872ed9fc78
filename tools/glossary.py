"""Prints docs/glossary.md, which is made of xdm_ft/report/glossary.toml.

python tools/glossary.py > docs/glossary.md
"""

from collections.abc import Iterator

from xdm_ft.runtime.terminal import glossary

ABOUT = """The words of screens, tables and documents. The first group is enough to ship a model."""


def lines() -> Iterator[str]:
    yield from ("# Glossary", "", "```", "xdm-ft explain WORD        # prints one entry", "```", "", ABOUT)
    for group, entries in glossary().items():
        yield from ("", f"## {group[0].upper()}{group[1:]}")
        for word, meaning in entries.items():
            yield from ("", f"**{word}**: {meaning}")


if __name__ == "__main__":
    print("\n".join(lines()))
