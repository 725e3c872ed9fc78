"""Features that are extracted on a Ray cluster: those of one process, whatever happens to its nodes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clusters
import miniature
import pytest
import small_runs
from clusters import kill_one, on
from encoded_images import write_parquet
from range_server import served
from safetensors.torch import load_file
from warm_processes import begin, interrupted

from xdm_ft.cli.features import fill_cache
from xdm_ft.cli.parser import main
from xdm_ft.experiment import cluster, run
from xdm_ft.features import extract as extraction

pytestmark = [pytest.mark.slow, pytest.mark.needs("ray")]
PER_CLASS, IMAGES, SHARD = 12, 336, 32  # of a shard, instead of hundreds
SIZE = 448  # an image takes 25 ms, and a shard nearly a second
LARGE = f"encoder={{name: timm, model: test_vit, preprocessing: {{size: {SIZE}}}, kwargs: {{img_size: {SIZE}}}}}"
SLOW = (LARGE, "features.batch_size=16", "methods=[linear_probe]")
PARTS = (
    "methods=[erm, {name: erm, label: last, trainable: {blocks: 1}}]",
    "protocol.test_domains=[sketch]",
    "features.views=1",
    "data.train_augmentation=domainbed",
    "features.batch_size=16",
)


def small_shards() -> None:
    extraction.IMAGES_PER_SHARD = SHARD


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_core: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extraction, "IMAGES_PER_SHARD", SHARD)
    miniature.domainbed(Path("data"), "pacs", per_class=PER_CLASS)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The features that one process computes on one core."""
    with pytest.MonkeyPatch.context() as patch, clusters.one_core():
        patch.chdir(tmp_path_factory.mktemp("one_process"))
        miniature.domainbed(Path("data"), "pacs", per_class=PER_CLASS)
        assert computed() == IMAGES
        return stored("cache")


def computed(*overrides: str) -> int:
    """How many images are extracted for a recipe."""
    return int(fill_cache(small_runs.recipe(*SLOW, *overrides)).document["computed"])


def stored(cache: str) -> dict[str, bytes]:
    """{store and content of an image: its features}. Each image must have been written once."""
    found = dict[str, bytes]()
    for path in Path(cache).glob("*/shard-*.safetensors"):
        tensors = load_file(path)
        for content, features in zip(tensors["contents"], tensors["features"], strict=True):
            name = f"{path.parent.name} {content.numpy().tobytes().hex()}"
            assert name not in found, "computed twice"
            found[name] = features.numpy().tobytes()
    assert found
    assert not [*Path(cache).glob("*/claim-*"), *Path(cache).glob("*/.*.unfinished")], "nothing else is left"
    return found


def shards(cache: str = "cache") -> set[Path]:
    return set(Path(cache).glob("*/shard-*.safetensors"))


@pytest.fixture
def idle_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process computes no features."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the driver extracts")

    monkeypatch.setattr(extraction.Extraction, "run", refuse)


def call_once(monkeypatch: pytest.MonkeyPatch, function: Callable[[], object]) -> None:
    """Calls the function when some shards are there."""
    called, poll = list[bool](), cluster.Tasks.poll

    def polled(tasks: Any) -> None:
        poll(tasks)
        if not called and len(shards()) >= 2:
            called.append(True)
            function()

    monkeypatch.setattr(cluster.Tasks, "poll", polled)


def test_features_activations_and_models_are_those_of_one_process(
    nodes: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    assert not run(small_runs.recipe(*PARTS, "output.dir=here", "features.dir=cache_here")).failed
    request.getfixturevalue("idle_driver")
    assert not run(small_runs.recipe(*PARTS, "output.dir=there", *on(nodes))).failed
    of_one = stored("cache_here")
    assert stored("cache") == of_one and len(of_one) == 4 * IMAGES, "features and activations in two views"
    assert clusters.metrics("there") == clusters.metrics("here")
    assert clusters.hashes("there") == clusters.hashes("here")


def test_nodes_die_and_others_come(
    nodes: Any,
    expected: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    idle_driver: None,
) -> None:
    def replace_all() -> None:
        """All that have tasks: of one node alone the task may just have ended."""
        for _ in range(len(nodes.worker_nodes)):
            kill_one(nodes)
        for _ in range(2):
            nodes.add_node(num_cpus=1)

    call_once(monkeypatch, replace_all)
    assert computed(*on(nodes)) == IMAGES
    assert [line for line in caplog.messages if "its task was lost" in line]
    assert stored("cache") == expected


@pytest.mark.parametrize("where", ["on the cluster", "without it"])
def test_ctrl_c_and_the_same_command(where: str, nodes: Any, expected: dict[str, bytes], tmp_path: Path) -> None:
    small_runs.recipe()  # writes small.yaml
    arguments = ["run", "small.yaml", *SLOW]
    process = begin([*arguments, *on(nodes)], tmp_path, tmp_path / "out", tmp_path / "err", first=small_shards)
    text = interrupted(process, Path("err"), lambda: len(shards()) >= 2)
    assert text.endswith("xdm-ft: interrupted; finished work is kept; run the same command to resume\n")
    kept = shards()
    before = stored("cache")
    assert SHARD <= len(before) < IMAGES
    assert main([*arguments, *(on(nodes) if where == "on the cluster" else ())]) == 0
    assert kept < shards() and stored("cache") == expected


def test_faults_of_a_user_are_one_line(
    nodes: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_runs.recipe()
    arguments = ["features", "small.yaml", *SLOW, "--quiet"]

    def refused() -> str:
        assert main([*arguments, *on(nodes)]) == 2
        lines = own_lines()
        assert len(lines) == 1, lines
        return lines[0]

    def own_lines() -> list[str]:
        """Without the warning that there are few images, and what Ray says of nodes that an earlier test has killed."""
        lines = capsys.readouterr().err.splitlines()
        return [line for line in lines if not re.search(r"is not the published PACS|\(raylet\)|^\s", line)]

    def fault() -> str:
        """The line, which begins with the name of a node."""
        first, node, rest = refused().split(": ", 2)
        assert first == "xdm-ft" and node.startswith("node ")
        return rest

    broken = Path("data/PACS/sketch/dog/000.png")
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    own = fault()
    assert main(arguments) == 2
    assert own_lines() == [f"xdm-ft: {own}"]
    assert str(broken) in own

    broken.write_bytes(whole)
    submit = cluster.Tasks.submit

    def hidden(tasks: Any, part: Any) -> None:
        broken.unlink(missing_ok=True)
        submit(tasks, part)

    with monkeypatch.context() as patch:
        patch.setattr(cluster.Tasks, "submit", hidden)
        line = fault()
    assert str(broken) in line and "this file is not here, or has changed since it was hashed" in line

    def elsewhere(tasks: Any, part: Any) -> None:
        shutil.rmtree(tasks.folder, ignore_errors=True)
        submit(tasks, part)

    broken.write_bytes(whole)
    with monkeypatch.context() as patch:
        patch.setattr(cluster.Tasks, "submit", elsewhere)
        assert fault().startswith(f"features.dir: {Path('cache').absolute()} is another folder here than in the run")
    assert not [*Path("cache").glob("tasks-*")]


def test_images_in_parquet_files_on_a_server(nodes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDM_FT_CACHE", str(tmp_path / "indexes"))
    for number in range(3):
        write_parquet(tmp_path / "tables" / f"{number}.parquet", range(24 * number, 24 * number + 24), 10)
    with served(tmp_path / "tables") as server:
        data = f"data={{name: parquet, file: '{server.address}', cache_mb: 1}}"
        own = (data, "methods=[linear_probe]", "protocol.test_domains=photo", "features.batch_size=16")
        assert fill_cache(small_runs.recipe(*own, "features.dir=cache_here")).document["computed"] > SHARD
        fill_cache(small_runs.recipe(*own, *on(nodes)))
    assert stored("cache") == stored("cache_here")
