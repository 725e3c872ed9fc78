"""The name of the machine is in no file that a run or an export leaves: run directories and models are passed on."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

import pytest
import small_runs

from xdm_ft.cli.parser import main

NAME = "name-of-this-machine"


@pytest.mark.slow
def test_no_file_names_the_machine(small_pacs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uname = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((uname[0], NAME, *uname[2:])))
    monkeypatch.setattr(socket, "gethostname", lambda: NAME)
    monkeypatch.setattr(platform, "node", lambda: NAME)
    monkeypatch.setenv("HOSTNAME", NAME)
    small_runs.results("training.profile=true", "report.page=true", "protocol.test_domains=[sketch]")
    run = Path("output") / "small"
    assert main(["export", str(run), "model", "--method", "erm"]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "data" not in path.parts]
    names = {path.relative_to(tmp_path).parts[0] for path in files}
    assert {"output", "cache", "model"} <= names and [*(run / "profiles").iterdir()] and [*(run / "events").iterdir()]
    assert not [path for path in files if NAME in str(path.relative_to(tmp_path)) or NAME.encode() in path.read_bytes()]
