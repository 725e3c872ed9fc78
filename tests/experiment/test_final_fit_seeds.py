"""The final fit under every seed: one model each, for an ensemble; and its temperature."""

import json
import shutil
from functools import partial
from pathlib import Path

import miniature
import pytest
import small_runs
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from xdm_ft.experiment import pieces, run
from xdm_ft.experiment.final_fit import median

pytestmark = pytest.mark.usefixtures("small_pacs")
RUN = Path("output/small")
SEEDS = "protocol.seeds=[4, 0, 1]", "methods=[erm]", "protocol.test_domains=[photo]", "training.steps=6"
ALL, ONE = "protocol.final_fit=all_seeds", "protocol.final_fit=true"
recipe, results = partial(small_runs.recipe, *SEEDS), partial(small_runs.results, *SEEDS)
FILES = {
    "4": "models/final_fit/erm/model.safetensors",
    "0": "models/final_fit/erm/seed0.safetensors",
    "1": "models/final_fit/erm/seed1.safetensors",
}


def metadata(file):
    with safe_open(RUN / file, framework="pt") as opened:
        return {key: json.loads(value) for key, value in opened.metadata().items() if key not in ("file", "xxh3")}


def fits_saved(monkeypatch, stop_after=None):
    """The seeds of final fits that are saved from now on; the run is ended after `stop_after` of them."""
    saved, save = [], pieces.save

    def watched(outcomes, directory, writes):
        outcomes = list(outcomes)
        fits = [outcome.line["seed"] for outcome in outcomes if outcome.kind == "final_fit"]
        records = save(outcomes[: stop_after if fits else None], directory, writes)
        saved.extend(fits[:stop_after])
        if fits and stop_after is not None:
            raise InterruptedError
        return records

    monkeypatch.setattr(pieces, "save", watched)
    return saved


def contents():
    return {seed: (RUN / file).read_bytes() for seed, file in FILES.items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run with a final fit of every seed, and one with the fit of the first seed alone."""
    folder = tmp_path_factory.mktemp("finished")
    miniature.domainbed(folder / "data", "pacs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        results(ONE, "output.dir=alone")
        results(ALL)
    return folder


@pytest.fixture
def final(finished):
    """Copies the folder here. Returns the final fit of all seeds."""
    shutil.copytree(finished, ".", dirs_exist_ok=True)
    return json.loads((RUN / "results.json").read_text())["final_fit"]


@pytest.mark.slow
def test_one_model_for_each_seed_of_the_recipe(final):
    alone = json.loads(Path("alone/small/results.json").read_text())["final_fit"]
    assert final.pop("seeds") == FILES and final == alone and "seeds" not in alone
    weights = {seed: load_file(RUN / file) for seed, file in FILES.items()}
    torch.testing.assert_close(load_file(Path("alone/small") / alone["weights"]), weights["4"], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(weights["0"]["head.weight"], weights["1"]["head.weight"])
    for seed, file in FILES.items():
        about = metadata(file)
        assert about["method"]["seed"] == int(seed) and about["method"]["hparams"].items() >= final["hparams"].items()
        assert (about["step"], about["temperature"]) == (final["step"], final["temperature"])


@pytest.mark.slow
def test_a_kill_between_two_seeds_repeats_none(final, monkeypatch):
    whole = contents()
    (RUN / "results.json").unlink()
    for file in (RUN / "models").rglob("*.safetensors"):
        file.unlink()
    with monkeypatch.context() as patch:
        first = fits_saved(patch, stop_after=1)
        with pytest.raises(InterruptedError):
            run(recipe(ALL))
    then = fits_saved(monkeypatch)
    assert results(ALL)["final_fit"] == final
    assert len(first) == 1 and sorted([*first, *then]) == [0, 1, 4] and contents() == whole


@pytest.mark.slow
def test_a_damaged_file_trains_its_seed_again_and_nothing_else(final, monkeypatch):
    whole, saved = contents(), fits_saved(monkeypatch)
    assert results(ALL)["final_fit"] == final and saved == []
    damaged = RUN / FILES["1"]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert results(ALL)["final_fit"] == final and saved == [1] and contents() == whole
    (RUN / FILES["0"]).unlink()
    assert results(ALL)["final_fit"] == final and saved == [1, 0] and contents() == whole


@pytest.mark.slow
def test_more_seeds_are_added_to_a_fit_of_one(final, monkeypatch):
    shutil.rmtree(RUN)
    shutil.copytree("alone/small", RUN)
    before, first = json.loads((RUN / "results.json").read_text())["final_fit"], (RUN / FILES["4"]).read_bytes()
    saved = fits_saved(monkeypatch)
    assert results(ALL)["final_fit"] == before | {"seeds": FILES} and sorted(saved) == [0, 1]
    assert (RUN / FILES["4"]).read_bytes() == first


@pytest.mark.slow
def test_a_solver_has_one_model_under_every_seed():
    final = results(ALL, "methods=[linear_probe]")["final_fit"]
    file = "models/final_fit/linear_probe/model.safetensors"
    assert final["seeds"] == {"4": file} and [*(RUN / "models/final_fit").rglob("*.safetensors")] == [RUN / file]
    assert final["temperature"] > 0


@pytest.mark.slow
def test_a_seed_that_fails_fails_the_fit_and_keeps_the_others(monkeypatch):
    import xdm_ft.experiment.final_fit as module

    outcome = module.Fit.outcome

    def failing(fit, context, piece, trained, predictor):
        found = outcome(fit, context, piece, trained, predictor)
        if trained.job.seed != 0:
            return found
        line = {key: found.line[key] for key in ("of", "seed")} | {"status": "failed", "reason": "the loss is nan"}
        return module.Outcome(found.kind, line)

    with monkeypatch.context() as patch:
        patch.setattr(module.Fit, "outcome", failing)
        made = run(recipe(ALL))
    final = made.final_fit
    assert made.failed and final["status"] == "failed" and final["reason"] == "seed 0: the loss is nan"
    assert final["weights"] == FILES["4"] and final["seeds"] == {"4": FILES["4"], "1": FILES["1"]}
    saved = fits_saved(monkeypatch)
    assert results(ALL)["final_fit"]["seeds"] == FILES and saved == [0], "only that one is trained again"


@pytest.mark.slow
def test_end_to_end_every_seed_too():
    final = results(ALL, "encoder.trainable=true", "training.steps=2", "protocol.seeds=2")["final_fit"]
    assert final["status"] == "ok" and len(final["seeds"]) == 2
    weights = [load_file(RUN / file) for file in final["seeds"].values()]
    assert all(any(name.startswith("encoder.") for name in one) for one in weights)


@pytest.mark.slow
def test_temperatures_of_models_and_their_median():
    found = results(ONE, "training.steps=10")
    picks = [run["selected"] for run in found["runs"]]
    for by_rule in picks:
        own = by_rule["train_val"]
        assert metadata(own["weights"])["temperature"] == own["temperature"] > 0
        for pick in by_rule.values():
            assert ("temperature" in pick) == (pick["weights"] == own["weights"])
    assert any("temperature" not in by_rule["oracle"] for by_rule in picks), "the miniature must pick other steps"
    other = [by_rule["oracle"] for by_rule in picks if "temperature" not in by_rule["oracle"]]
    assert metadata(other[0]["weights"])["temperature"] is None
    final = found["final_fit"]
    of_method = [run["selected"] for run in found["runs"] if run["method"] == final["method"]]
    assert final["temperature"] == median(by_rule["train_val"]["temperature"] for by_rule in of_method)
    assert metadata(final["weights"])["temperature"] == final["temperature"] and "temperature" in final["how"]


@pytest.mark.slow
def test_without_validation_images_of_training_domains_there_is_no_temperature(tmp_path):
    lines = ["path,label,domain,split"]
    parts = {"photo": "train", "sketch": "val", "cartoon": "test"}
    for image in sorted(Path("data").rglob("*.png")):
        if image.parts[-3] in parts:
            lines.append(f"{image},{image.parts[-2]},{image.parts[-3]},{parts[image.parts[-3]]}")
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    official = "protocol={name: official, selection: val_domain, final_fit: true}"
    found = small_runs.results("methods=[erm]", "data={name: table, file: table.csv}", official)
    (one, *_) = found["runs"]
    assert "temperature" not in one["selected"]["val_domain"] and "temperature" not in found["final_fit"]
    assert metadata(one["selected"]["val_domain"]["weights"])["temperature"] is None
    assert metadata(found["final_fit"]["weights"])["temperature"] is None
