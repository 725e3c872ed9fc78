"""The counts of a soak, below the results of the tests."""

import pytest
import tally


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in tally.tables():
        terminalreporter.write_line(line)
