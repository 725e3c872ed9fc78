"""A run directory with predictions of random models, for the tests of what a model promises."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from xdm_ft.core import ModelKey
from xdm_ft.evaluation.intervals import new_site
from xdm_ft.evaluation.metrics import score
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction, arrays_of
from xdm_ft.export import AtHeldOut, ExpectedPerformance
from xdm_ft.export.expected import expected_performance
from xdm_ft.results import Runs
from xdm_ft.results.measured import measure, predictions_of
from xdm_ft.results.model import Pick, Record
from xdm_ft.results.run import Run
from xdm_ft.results.trials import pick_trials
from xdm_ft.storage.names import images_file, predictions_in
from xdm_ft.storage.run_directory import RunDirectory

VIT = {"encoder": "vit", "trainable": False}  # of a record

CLASSES, DOMAINS, SEEDS, IMAGES = ("cat", "dog", "ox"), ("a", "b", "c", "d"), (0, 1, 2), 24
METHOD, RULE = "erm", "train_val"


def made_run(path, held_out, *, groups=True, metric="accuracy", protocol="leave_one_domain_out", temperature=2.0):
    """A run directory with predictions of random models: (results, records, {(held-out set, seed): logits}, images)."""
    drawn, directory = np.random.default_rng(1), RunDirectory(path)
    records, logits_of, images_of = [], {}, {}
    for held in held_out:
        domains = np.repeat([DOMAINS.index(name) for name in held], IMAGES)
        labels = drawn.integers(0, 3, len(domains))
        images = {"rows": np.arange(len(domains)), "labels": labels.astype(np.int32)}
        images |= {"worst_of": domains.astype(np.int32), "names": np.zeros(1, np.uint8)}
        if groups:
            images["groups"] = (np.arange(len(domains)) // 3).astype(np.int32)
        shared = {images_file(held): directory.write_arrays(images_file(held), images, {})}
        images_of[held] = labels, domains
        for seed in SEEDS:
            logits = torch.from_numpy(drawn.normal(size=(len(labels), 3)) + 1.5 * np.eye(3)[labels]).float()
            logits_of[held, seed] = logits
            found = score(logits, torch.from_numpy(labels), torch.from_numpy(domains), CLASSES, DOMAINS)
            pick = Pick(1, "x", {"test": found}, value=0.5, temperature=temperature)
            record = Record(ModelKey(METHOD, held, seed, 0), {}, "ok", selected={RULE: pick}, **VIT)
            probabilities = logits.double().softmax(-1).float().numpy()
            tested = HeldOutImages(images["rows"], labels, domains)
            one = Prediction(METHOD, held, seed, RULE, tested, probabilities.argmax(1), None, probabilities)
            both = one, replace(one, rule="cross_domain")
            own = {predictions_in(record.folder): directory.write_predictions(record.folder, arrays_of(both))}
            records.append(replace(record, files=shared | own))
    recipe = {"protocol": {"name": protocol, "metric": metric}, "data": {"name": "folder"}}
    results = {"recipe": recipe, "runs": [{"test_domains": list(held)} for held in held_out], "data": {"images": {}}}
    return results, records, logits_of, images_of


def promise(path, results, records, rule, method):
    """What to expect of one method."""
    metric, held_out = results["recipe"]["protocol"]["metric"], tuple(dict.fromkeys(r.test_domains for r in records))
    picked = tuple(record for record in pick_trials(records, rule, metric) if record.method == method)
    protocol, data = (SimpleNamespace(**results["recipe"][key]) for key in ("protocol", "data"))
    planned = [ModelKey(method, tuple(entry["test_domains"]), 0, 0) for entry in results["runs"]]
    every = [Record(key, {}, "skipped", **VIT) for key in planned]
    runs = Runs(method, rule, metric, held_out, picked)

    class Made(SimpleNamespace):
        @property
        def measured(self):
            return measure(metric, [runs], predictions_of(RunDirectory(path), [runs]))[0]

        measured_if_known = property(Run.measured_if_known.func)

    recipe = SimpleNamespace(protocol=protocol, data=data)
    made = {"path": path, "results": results, "every": every, "held_out_sets": held_out}
    run = Made(**made, recipe=recipe, recipe_rule=rule)
    return expected_performance(run, runs, {})


def expected_of(values, metric="accuracy", **changes):
    """What a card promises from these values of the held-out domains, of one seed each."""
    site = new_site([np.array([value]) for value in values])
    held_out = tuple(
        AtHeldOut(domains=(f"d{i}",), value=v, interval=None, seeds=1, images=10, groups=None, accuracies={})
        for i, v in enumerate(values)
    )
    return ExpectedPerformance(**{
        "source": "leave one domain out", "data": "folder", "method": METHOD, "selection": RULE, "metric": metric,
        "mean": float(np.mean(values)), "std": None, "stderr": None, "seeds": 1, "held_out": held_out,
        "worst": ("d0", 0.5), "others": {}, "numbers": {}, "new_site": None, "center": site and site.center,
        "spread": site and site.spread, "freedom": site and site.freedom, "notes": (), **changes,
    })  # fmt: skip
