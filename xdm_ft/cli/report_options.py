"""The options of `xdm-ft report`. Nothing heavy is imported before the verb is called."""

from __future__ import annotations

import argparse

from xdm_ft.cli.answer import Answer


def add(sub: argparse.ArgumentParser) -> None:
    several = "several are shown in one table, if data, split, seeds, selection, metric and held-out domains are equal"
    sub.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help=f"a run directory; {several}")
    formats = ["text", "markdown", "latex", "csv"]
    about = "of the tables (default: that of the name of FILE, or text)"
    sub.add_argument("--format", choices=formats, help=about)
    sub.add_argument("--out", metavar="FILE", help="write the tables to FILE.txt, .md, .tex or .csv, not to the screen")
    mistakes = "show the most confident mistakes as small images in report.html"
    oracle = "in LaTeX and CSV too, show what the rule oracle selects, which reads test labels"
    sub.add_argument("--oracle", action="store_true", help=oracle)
    sub.add_argument("--images", action="store_true", help=mistakes)


def called(arguments: argparse.Namespace) -> Answer:
    """Performs the verb. Raises `UserError`."""
    from xdm_ft.cli.report import report

    return report(arguments.run_dirs, arguments.format, arguments.out, arguments.images, arguments.oracle)
