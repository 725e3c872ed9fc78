"""Features and models that are computed on a Ray cluster: those of one process, whatever happens to its nodes."""

import re
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import miniature
import pytest
import small_runs
from clusters import cluster, keep_to_one_core, on, replace_the_one_with, weights_and_predictions
from safetensors.torch import load_file
from warm_processes import PATIENCE, begin, interrupted

from xdm_ft.cli.features import fill_cache
from xdm_ft.cli.library import run
from xdm_ft.cli.parser import main
from xdm_ft.experiment import cluster as cluster_module
from xdm_ft.experiment.cluster import versions_of
from xdm_ft.experiment.resume import refused_changes
from xdm_ft.features import extract as extraction
from xdm_ft.recipe.check import load
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import request_stop, stop_requested

HEADS = """\
name: small
data: {name: digits}
protocol: {name: leave_one_domain_out, test_domains: [ink, chalk], seeds: 1}
encoder: {name: open_clip, model: demo, weights: demo}
features: {dir: cache, workers: 0}
methods: [erm, vrex]
training: {steps: 60, batch_size: 4, evaluate_every: 30}
search: {trials: 50, space: {lr: {log_uniform: [1.0e-3, 1.0e-1]}}}
report: {page: false}
"""
MODEL = "encoder.trainable=true", "methods=[erm]", "protocol.test_domains=[sketch]", "training.steps=60"
LAST = "methods=[erm, {name: erm, label: last, trainable: {blocks: 1}}]"
PROBE = "methods=[linear_probe]"
TWO_MODELS = LAST, "protocol.test_domains=[sketch, photo]", "training.evaluate_every=20"
SHARD, IMAGES = 32, 336  # images of a shard, instead of hundreds, and of miniature PACS
# an image takes 25 ms, and a shard nearly a second
LARGE = "encoder={name: timm, model: test_vit, preprocessing: {size: 448}, kwargs: {img_size: 448}}"
SLOW = (LARGE, "features.batch_size=16", PROBE)


class TestRefusals:
    @pytest.fixture(autouse=True)
    def here(self, in_folder):
        Path("small.yaml").write_text(small_runs.RECIPE)

    @pytest.mark.parametrize(
        ("overrides", "line"),
        [
            (["gpus_per_model=2"], "cluster.gpus_per_model: input should be less than or equal to 1"),
            *(
                pytest.param(
                    [f"address={address}"], f"xdm-ft: cluster.address: .*{line}", marks=pytest.mark.needs("ray")
                )
                for address, line in (
                    ("127.0.0.1:1", "127.0.0.1:1 cannot be reached"),
                    ("ray://127.0.0.1:10001", "must be HOST:PORT or auto"),
                    ("nowhere", "must be HOST:PORT or auto"),
                )
            ),
        ],
    )
    def test_what_is_no_cluster_is_one_line(self, overrides, line, capsys):
        miniature.domainbed(Path("data"), "pacs")
        assert main(["run", "small.yaml", "cluster.name=ray", *(f"cluster.{key}" for key in overrides)]) == 2
        [printed] = capsys.readouterr().err.splitlines()
        assert re.search(line, printed)

    def test_without_ray_and_beside_several_processes(self, monkeypatch):
        made = small_runs.recipe("cluster.name=ray")
        with monkeypatch.context() as patch, pytest.raises(UserError, match=r"cluster.name: ray starts processes by"):
            patch.setenv("WORLD_SIZE", "2")
            cluster_module.check_cluster(made)
        monkeypatch.setattr(cluster_module.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UserError) as refused:
            cluster_module.check_cluster(made)
        assert str(refused.value) == "cluster.name: ray needs the package ray; run: pip install 'xdm_ft[ray]'"

    def test_a_task_stops_when_its_file_goes_and_the_next_one_does_not(self, monkeypatch):
        monkeypatch.setattr(cluster_module, "WATCH_SECONDS", 0.001)
        file, until = Path(cluster_module.GO_ON), time.monotonic() + PATIENCE
        request_stop(False)
        try:
            file.touch()
            with cluster_module._stopping_without(file):
                time.sleep(0.02)
                assert not stop_requested()
                file.unlink()
                while not stop_requested() and time.monotonic() < until:
                    time.sleep(0.001)
                assert stop_requested()
            request_stop(False)  # as the next task of the process begins
            file.touch()
            with cluster_module._stopping_without(file):
                pass
            file.unlink()
            time.sleep(0.02)
            assert not stop_requested(), "no task is there to stop"
        finally:
            request_stop(False)

    @pytest.mark.slow
    def test_a_local_run_imports_no_ray(self, monkeypatch):
        miniature.domainbed(Path("data"), "pacs")
        monkeypatch.setitem(sys.modules, "ray", None)  # its import raises
        assert not run(small_runs.recipe(PROBE)).failed

    def test_where_models_train_is_no_other_recipe(self):
        before, now = (small_runs.recipe(*more).resolved() for more in ((), ("cluster.name=ray",)))
        assert before["cluster"]["name"] is None and now["cluster"]["name"] == "ray"
        assert not refused_changes(before, now) and not refused_changes(now, before)


def impatient():
    keep_to_one_core()
    cluster_module.HEAD_SECONDS = 3.0


def extracted(*overrides):
    """The number of images that are extracted for a recipe."""
    return int(fill_cache(small_runs.recipe(*SLOW, *overrides)).document["computed"])


def stored(cache):
    """{store and content of an image: its features}. Each image must have been written once."""
    features = dict[str, bytes]()
    for path in Path(cache).glob("*/shard-*.safetensors"):
        tensors = load_file(path)
        for content, row in zip(tensors["contents"], tensors["features"], strict=True):
            name = f"{path.parent.name} {content.numpy().tobytes().hex()}"
            assert name not in features, "computed twice"
            features[name] = row.numpy().tobytes()
    assert features
    assert not [*Path(cache).glob("*/claim-*"), *Path(cache).glob("*/.*.unfinished")], "nothing else is left"
    return features


def same_models(one, other):
    runs = [small_runs.document(f"{folder}/small")["runs"] for folder in (one, other)]
    selected = [[record["selected"] for record in records] for records in runs]
    return selected[0] == selected[1] and weights_and_predictions(one) == weights_and_predictions(other)


@pytest.fixture(scope="module")
def nodes():
    with cluster() as running:
        yield running


def call_once(monkeypatch, ready, function):
    """Calls the function with what `ready` returns, as soon as that is something."""
    called, poll = [], cluster_module.Tasks.poll

    def polled(tasks):
        poll(tasks)
        if not called and (argument := ready()):
            called.append(argument)
            function(argument)

    monkeypatch.setattr(cluster_module.Tasks, "poll", polled)


@pytest.mark.needs("ray")
class TestModels:
    @pytest.fixture(autouse=True)
    def here(self, small_pacs, one_core):
        pass

    @pytest.mark.soak
    @pytest.mark.parametrize("what", ["heads", "end to end"])
    def test_a_node_dies_and_one_comes(self, what, nodes, monkeypatch, caplog):
        Path("small.yaml").write_text(HEADS if what == "heads" else small_runs.RECIPE)
        more, models = ((), 200) if what == "heads" else ((*MODEL, *TWO_MODELS), 4)
        small_runs.results_of(load("small.yaml", ["output.dir=here", *more]))

        def taken():
            with suppress(FileNotFoundError):  # between the listing and the reading
                return next((file.read_text() for file in Path("there/small/state/taken").glob("*")), None)

        call_once(monkeypatch, taken, lambda task: replace_the_one_with(nodes, task))
        content = small_runs.results_of(load("small.yaml", ["output.dir=there", *more, *on(nodes)]))
        assert len([line for line in caplog.messages if re.match(r"node \S+ \(\S+\) was lost", line)]) == 1
        assert len(content["runs"]) == models
        assert same_models("here", "there") and not Path("there/small/state").exists()

    @pytest.mark.soak
    @pytest.mark.parametrize("where", ["same cluster", "no cluster"])
    def test_ctrl_c_saves_and_the_same_command_resumes_anywhere(self, where, nodes, in_folder):
        small_runs.results(*MODEL, "output.dir=here")
        arguments = ["run", "small.yaml", "output.dir=there", *MODEL]
        files = in_folder, in_folder / "out", in_folder / "err"
        process = begin([*arguments, *on(nodes)], *files)
        text = interrupted(process, Path("err"), lambda: any(Path("there").glob("small/events/erm/*/*/events*")))
        assert "interrupted; saved: 1 unfinished training; run the same command to resume" in text
        assert len(list(Path("there/small/state/checkpoints").iterdir())) == 1
        process = begin([*arguments, *(() if where == "no cluster" else on(nodes))], *files, first=keep_to_one_core)
        process.join(PATIENCE)
        assert process.exitcode == 0 and "resumes after" in Path("err").read_text(), Path("err").read_text()
        assert same_models("here", "there")

    @pytest.mark.slow
    def test_the_head_dies_and_the_same_command_resumes(self, in_folder):
        small_runs.results(*MODEL, "output.dir=here")
        arguments, files = ["run", "small.yaml", "output.dir=there", *MODEL], (in_folder / "out", in_folder / "err")
        with cluster() as alone:
            process = begin([*arguments, *on(alone)], in_folder, *files, first=impatient)
            until = time.monotonic() + PATIENCE
            while not any(Path("there").glob("small/events/erm/*/*/events*")) and time.monotonic() < until:
                time.sleep(0.1)
            alone.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
            process.join(PATIENCE)
        *_, line = (in_folder / "err").read_text().splitlines()
        assert process.exitcode == 2 and line.startswith("xdm-ft: cluster.address: "), line
        assert "head has died" in line and "run the same command to resume, on a new cluster or with" in line
        assert "raylet" not in (in_folder / "out").read_text() + (in_folder / "err").read_text()
        assert main(arguments) == 0 and same_models("here", "there")

    @pytest.mark.soak
    def test_what_a_node_lacks_is_one_line(self, nodes, monkeypatch):
        with pytest.raises(UserError, match=r"cluster.gpus_per_model: 1, but no node .* has more than 0 \(.* 0 GPUs\)"):
            run(small_runs.recipe(*on(nodes), "cluster.gpus_per_model=1"))
        for program, others in (("xdm_ft", {"xdm_ft": "0", "torch": "0"}), ("pillow", {"pillow": "0"})):
            monkeypatch.setattr(cluster_module, "versions_of", lambda work, others=others: versions_of(work) | others)
            with pytest.raises(UserError, match=rf"^node \S+ \(\S+\): {program} is \S+ here and 0 in the run; install"):
                run(small_runs.recipe(*on(nodes), PROBE))


@pytest.mark.needs("ray")
class TestFeatures:
    @pytest.fixture(autouse=True)
    def here(self, in_folder, monkeypatch, one_core):
        monkeypatch.setattr(extraction, "IMAGES_PER_SHARD", SHARD)
        miniature.domainbed(Path("data"), "pacs", per_class=12)

    @pytest.fixture
    def idle_driver(self, monkeypatch):
        """This process computes no features."""

        def refuse(*_, **__):
            raise AssertionError("the driver extracts")

        monkeypatch.setattr(extraction.Extraction, "run", refuse)

    @pytest.mark.slow
    def test_features_activations_and_models_are_those_of_one_process(self, nodes, request):
        views = "features.views=1", "data.train_augmentation=domainbed", "features.batch_size=16"
        rows = LAST.replace("label: last", "label: last, train_augmentation: [flip, stain]")
        own = rows, "protocol.test_domains=[sketch]", *views
        small_runs.results(*own, "output.dir=here", "features.dir=cache_here")
        request.getfixturevalue("idle_driver")
        small_runs.results(*own, "output.dir=there", *on(nodes))
        local = stored("cache_here")
        assert stored("cache") == local and len(local) == 4 * IMAGES, "features and activations in two views"
        assert same_models("here", "there")

    @pytest.mark.soak
    def test_faults_of_a_user_are_one_line(self, nodes, monkeypatch, capsys):
        small_runs.recipe()
        arguments = ["features", "small.yaml", PROBE, "--quiet"]
        broken, submit = Path("data/PACS/sketch/dog/000.png"), cluster_module.Tasks.submit
        complete = broken.read_bytes()
        half = complete[: len(complete) // 2]

        def fault(*where):
            """The line, without the warning that there are few images, and Ray's on nodes that earlier tests killed."""
            assert main([*arguments, *where]) == 2
            lines = capsys.readouterr().err.splitlines()
            [line] = [line for line in lines if not re.search(r"is not the published PACS|\(raylet\)|^\s", line)]
            return line

        def fault_of_node(content, before_task):
            def submitted(tasks, part):
                before_task(tasks)
                submit(tasks, part)

            broken.write_bytes(content)
            with monkeypatch.context() as patch:
                patch.setattr(cluster_module.Tasks, "submit", submitted)
                first, node, rest = fault(*on(nodes)).split(": ", 2)
            assert first == "xdm-ft" and node.startswith("node ")
            return rest

        line = fault_of_node(half, lambda tasks: None)
        assert fault() == f"xdm-ft: {line}" and str(broken) in line
        line = fault_of_node(complete, lambda tasks: broken.unlink(missing_ok=True))
        assert str(broken) in line and "this file is missing here, or changed after it was hashed" in line
        line = fault_of_node(complete, lambda tasks: shutil.rmtree(tasks.folder, ignore_errors=True))
        assert line.startswith(f"features.dir: {Path('cache').absolute()} is another folder here than in the run")
        assert not [*Path("cache").glob("tasks-*")]
