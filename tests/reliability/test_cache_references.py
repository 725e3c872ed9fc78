"""`cache prune --unreferenced`: what no run was trained on goes, what one was stays."""

from __future__ import annotations

import json
from pathlib import Path

import miniature
import pytest
from rights import of_a_user

from xdm_ft.cli.parser import main
from xdm_ft.storage.results_file import write_results

RECIPE = """\
name: {name}
data: {{name: pacs, root: data, counts: any}}
protocol: {{test_domains: [sketch], seeds: 1}}
encoder: {{name: timm, model: test_vit, preprocessing: {{size: {size}}}, kwargs: {{img_size: {size}}}}}
features: {{dir: cache, workers: 0}}
methods: [erm]
training: {{steps: 2, batch_size: 2}}
report: {{page: false}}
output: {{dir: out}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    miniature.domainbed(tmp_path / "data", "pacs", per_class=2)
    for name, size in (("one", 16), ("two", 32)):
        Path(f"{name}.yaml").write_text(RECIPE.format(name=name, size=size))
        assert main(["run", f"{name}.yaml"]) == 0
    return tmp_path


def cached() -> set[str]:
    return {path.name for path in Path("cache").iterdir() if path.is_dir() and len(path.name) == 32}


def key_of(name: str) -> str:
    return json.loads(Path(f"out/{name}/results.json").read_text())["environment"]["features"]["key"]


def prune(*arguments: str) -> int:
    return main(["cache", "prune", "--dir", "cache", *arguments])


def test_what_no_run_refers_to_goes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = key_of("one"), key_of("two")
    assert cached() == {one, two} and one != two
    assert prune("--unreferenced", "out") == 0 and cached() == {one, two}
    assert prune("--unreferenced", "out/one", "out/two") == 0 and cached() == {one, two}
    assert prune("--unreferenced", "out/two", "--max-size", "1") == 0 and cached() == {two}
    assert "1 file removed" in capsys.readouterr().out
    assert prune("--unreferenced", "out", "--max-size", "0") == 0 and cached() == set()


def test_nothing_goes_by_mistake(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = cached()
    assert prune("--unreferenced", "cache") == 2
    assert "cache holds no run" in capsys.readouterr().err
    assert prune("--unreferenced", "nowhere") == 2
    capsys.readouterr()
    path = Path("out/one/results.json")
    path.write_text(path.read_text().replace(key_of("one"), "0" * 32))
    assert prune("--unreferenced", "out") == 2
    assert f"{path}: is damaged (its checksum differs" in capsys.readouterr().err
    results = json.loads(path.read_text())
    del results["environment"]["features"]  # of a run that trained end to end
    write_results(path, results)
    assert cached() == before
    assert prune("--unreferenced", "out") == 0 and cached() == {key_of("two")}


def test_a_folder_that_can_not_be_read_may_hold_a_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = cached()
    Path("out/one").chmod(0)
    with of_a_user():
        assert prune("--unreferenced", "out") == 2
    Path("out/one").chmod(0o700)
    assert "cache prune: out/one: can not be read (Permission denied)" in capsys.readouterr().err
    assert cached() == before
