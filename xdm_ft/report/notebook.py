"""HTML of results and models in a notebook, which shows what `_repr_html_` returns."""

from __future__ import annotations

from collections.abc import Sequence

from xdm_ft.report import Table, cells
from xdm_ft.report.finished import Run
from xdm_ft.report.headline import sentence
from xdm_ft.report.sections.results import results
from xdm_ft.report.words import plain

TEMPLATE = """<p><strong>{{ title|plain }}</strong></p>
{%- for table in tables %}
<table>
{%- if table.caption %}<caption>{{ table.caption|plain }}</caption>{% endif %}
{%- if table.header %}
<thead><tr>{% for name in table.header %}<th>{{ name|plain }}</th>{% endfor %}</tr></thead>{% endif %}
<tbody>
{%- for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell.text|plain }}</td>{% endfor %}</tr>
{%- endfor %}
</tbody></table>
{%- endfor %}
"""


def html_of_run(run: Run) -> str:
    """Returns the finding of a run, and its results under the recipe's own rule."""
    return _html(sentence(run), results(run, run.own_rule).tables)


def html_of_facts(title: str, facts: Sequence[tuple[str, str]]) -> str:
    """Returns a title and a table of two columns."""
    return _html(title, [Table("", [], [cells(*fact) for fact in facts])])


def _html(title: str, tables: Sequence[Table]) -> str:
    from jinja2 import Environment

    environment = Environment(autoescape=True)
    environment.filters["plain"] = plain
    return environment.from_string(TEMPLATE).render(title=title, tables=tables)
