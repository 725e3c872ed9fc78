"""`protocol.together`: cartoon and sketch count as one held-out domain, from the splits to an exported model's card."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t
from small_runs import document, recipe, results

from xdm_ft.cli.library import run
from xdm_ft.cli.parser import main
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.export.directory import read_config
from xdm_ft.new_site import reference
from xdm_ft.new_site.stored import read_stored
from xdm_ft.report.headline import details
from xdm_ft.results.run import read_run
from xdm_ft.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("small_pacs")
RUN = Path("output/small")
TOGETHER, SETS = "protocol.together=[[sketch, cartoon]]", [("art_painting",), ("cartoon", "sketch"), ("photo",)]
LONGER = "methods=[erm, mixup]", "protocol.final_fit=true", "training.lr=0.5", "training.steps=20"
TWINS = "cartoon + sketch"


def accuracies(content, method):
    """{(held-out set, seed): accuracy on all test images of the set}, counted from the domains' own."""
    counted = {}
    for model in (model for model in content["runs"] if model["method"] == method):
        per_domain = model["selected"]["train_val"]["metrics"]["test"]["per_domain"]
        assert sorted(per_domain) == sorted(model["test_domains"])
        right = sum(round(of["accuracy"] * of["n"]) for of in per_domain.values())
        counted[tuple(model["test_domains"]), model["seed"]] = right / sum(of["n"] for of in per_domain.values())
    return counted


@pytest.mark.slow
def test_a_set_is_one_of_three_in_verdicts_promise_and_card(monkeypatch, capsys):
    left_out, without = list[tuple[str, ...]](), reference._Study._without

    def noted(study, names, *label):
        left_out.extend([] if label else [tuple(names)])
        return without(study, names, *label)

    content = results(TOGETHER, "protocol.seeds=3", *LONGER)
    assert [tuple(held) for held in dict.fromkeys(tuple(model["test_domains"]) for model in content["runs"])] == SETS
    values = {method: accuracies(content, method) for method in ("erm", "mixup")}
    rows = {row["method"]: row for row in content["summary"] if row["selection"] == "train_val"}
    for method, row in rows.items():
        by_set = [np.mean([values[method][held, seed] for seed in range(3)]) for held in SETS]
        columns = [row["per_test_domain"][name]["mean"] for name in ("art_painting", TWINS, "photo")]
        assert columns == pytest.approx(by_set) and len(row["per_test_domain"]) == 3
        assert row["mean"] == pytest.approx(np.mean(by_set)), "each set weighs the same"
        assert "; cartoon and sketch held out together; " in row["protocol"]
    (compared,) = (row for row in content["comparisons"] if row["selection"] == "train_val")
    differences = [np.mean([values["mixup"][held, s] - values["erm"][held, s] for s in range(3)]) for held in SETS]
    assert (compared["sets"], compared["domains"]) == (3, 4)
    assert compared["error_elsewhere"] == pytest.approx(np.std(differences, ddof=1) / 3**0.5, abs=1e-12)
    ratio = abs(np.mean(differences)) / compared["error_elsewhere"]
    assert compared["p_elsewhere"]["plain"] == pytest.approx(2 * t.sf(ratio, df=2)), "D − 1, of sets"
    assert "lies below the worst of the 3 held-out ones" in details(read_run(RUN))
    text = (RUN / "results.md").read_text()
    assert f"| {TWINS} |" in text and "| held out together |" in text

    monkeypatch.setattr(reference._Study, "_without", noted)
    monkeypatch.setattr(reference, "SNAPSHOTS", (5, 20))
    monkeypatch.setattr(reference, "BANK", reference.BANK.model_copy(update={"steps": 20}))
    assert main(["export", str(RUN), "whole", "--method", "erm"]) == 0
    expected = read_config(Path("whole"))[0].expected
    assert [site.domains for site in expected.held_out] == SETS and expected.freedom == 2
    twins = expected.held_out[1]
    assert twins.images == 2 * expected.held_out[0].images and set(twins.accuracies) == {"cartoon", "sketch"}
    text = Path("whole/README.md").read_text()
    assert "one more draw of the 3 held-out sets of domains" in text and "4 domains tested in 3 sets" in text
    assert "| cartoon, sketch |" in text and "| – sketch (accuracy) |" in text
    # heads for new sites never see one of the two while they are measured at the other
    assert all(("cartoon" in names) == ("sketch" in names) for names in left_out) and ("cartoon", "sketch") in left_out
    stored = read_stored(Path("whole"), read_config(Path("whole"))[0])
    assert set(stored.about.domains) == {"art_painting", TWINS, "photo"}
    assert stored.about.domains[TWINS].images == 2 * stored.about.domains["photo"].images

    capsys.readouterr()
    assert main(["export", str(RUN), "fold", "--method", "erm", "--held-out", "cartoon,sketch", "--no-site"]) == 0
    assert json.loads(Path("fold/config.json").read_text())["method"]["test_domains"] == ["cartoon", "sketch"]
    assert "**It lacks cartoon, sketch**" in Path("fold/README.md").read_text()
    assert main(["export", str(RUN), "half", "--method", "erm", "--held-out", "sketch"]) == 2
    assert '--held-out: no model sketch; did you mean "cartoon,sketch"?' in capsys.readouterr().err

    with pytest.raises(UserError, match=r"holds the run of another recipe(.|\n)*protocol\.together"):
        run(recipe("protocol.seeds=3", *LONGER))


def test_cross_domain_leaves_a_set_out_of_training_as_one():
    cross = TOGETHER, "protocol.selection=cross_domain", "methods=[erm]"
    made = recipe(*cross)
    extra = make_plan(made, read_data(made)).extra
    assert [model.split.test_domains for model in extra] == [
        ("art_painting", "cartoon", "sketch"), ("art_painting", "photo"), ("cartoon", "sketch", "photo")
    ]  # fmt: skip
    assert [[key.test_domains for key in model.needed_by] for model in extra] == [
        SETS[:2], [SETS[0], SETS[2]], SETS[1:]
    ], "each pair of sets is trained once, for both"  # fmt: skip
    assert [model.split.train_domains for model in extra] == [("photo",), ("cartoon", "sketch"), ("art_painting",)]
    content = results(*cross)
    assert {model["status"] for model in content["runs"]} == {"ok"} and len(content["runs"]) == 3
    skipped = make_plan(recipe(*cross[:2]), read_data(made)).skipped  # xdomainmix needs two domains
    assert [*skipped] == [
        "needs 2 training domains; with art_painting and one more set for cross_domain held out there is 1",
        "needs 2 training domains; with cartoon, sketch and one more for cross_domain held out there is 1",
        "needs 2 training domains; with photo and one more set for cross_domain held out there is 1",
    ]


def test_naming_one_of_a_set_runs_the_set_and_a_wrong_name_is_one_line(capsys):
    content = results(TOGETHER, "protocol.test_domains=[sketch]", "methods=[erm]")
    assert [model["test_domains"] for model in content["runs"]] == [["cartoon", "sketch"]]
    row = content["summary"][0]
    assert set(row["per_test_domain"]) == {"cartoon", "sketch"}, "one set: as of an official split, each has a column"
    assert row["mean"] == pytest.approx(accuracies(content, "erm")[SETS[1], 0])
    assert document(RUN)["recipe"]["protocol"]["together"] == [["sketch", "cartoon"]]
    capsys.readouterr()
    assert main(["validate", "small.yaml", "protocol.together=[[sketch, cartoons]]"]) == 2
    line = 'protocol.together: "cartoons" is not a domain of the data; did you mean "cartoon"?'
    assert capsys.readouterr().err.strip().endswith(line)
    assert main(["validate", "small.yaml"]) == 0
    assert "  together: []" in capsys.readouterr().out
