"""What a notebook shows of results and of facts."""

import pytest
from example_runs import results_of, two_sets
from markupsafe import escape

import xdm_ft
from xdm_ft.recipe import check
from xdm_ft.report import Table, cells
from xdm_ft.report.headline import sentence
from xdm_ft.report.markup import notebook_html
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.run_directory import RunDirectory


def test_results_show_the_finding_and_the_table_with_names_escaped(tmp_path):
    runs = [run | {"method": run["method"].replace("xdomainmix", "<script>x</script>")} for run in two_sets()]
    RunDirectory(tmp_path / "run").write_results(results_of(runs))
    results = xdm_ft.open(tmp_path / "run")
    html = results._repr_html_()
    assert "<script>" not in html and "<td>&lt;script&gt;x&lt;/script&gt;</td>" in html
    assert f"<strong>{escape(sentence(results.run))}</strong>" in html
    assert "<td>erm</td>" in html and "mean ± stderr" in html and html.count("<tr>") == 3


def test_facts_are_escaped():
    html = notebook_html("<b>", [Table("", [], [cells("method", "<script>")])])
    assert "<script>" not in html and "&lt;b&gt;" in html and "<td>method</td><td>&lt;script&gt;</td>" in html


def test_a_run_is_read_without_building_its_methods_and_says_what_is_gone(tmp_path, monkeypatch):
    results = results_of(two_sets(), search={"trials": 1000, "preset": "frozen"})
    RunDirectory(tmp_path / "run").write_results(results)
    monkeypatch.setattr(check, "check_algorithm", None)  # a search of 1,000 trials has thousands
    assert len(xdm_ft.open(tmp_path / "run").run.recipe.methods) == 2
    results["recipe"]["methods"][1]["name"] = "mine"
    RunDirectory(tmp_path / "run").write_results(results)
    with pytest.raises(UserError) as error:
        xdm_ft.open(tmp_path / "run")
    gone, remedy = str(error.value).splitlines()
    assert 'no "mine" in algorithms' in gone and remedy.endswith("put it back, or run the recipe again")
