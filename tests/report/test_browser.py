"""The page in a real browser: nothing fails, nothing is too wide, everything can be reached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import MISSING, Browser
from made_up_runs import Named, write_run

from xdm_ft.report.html import write_page

pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
SIZES = [(1280, False), (1280, True), (390, False), (390, True)]
LONG = "a_domain_with_a_name_that_is_much_longer_than_any_phone_is_wide_" * 2


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    names = ("art", LONG, "<script>window.attacked = 1</script>")
    made = write_run(folder, Named(names, ("cat", "dog" * 30, "hen"), each=10), ("erm", "xdomainmix", "sam" * 20), 3)
    write_page(made)
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium") / "profile") as one:
        yield one


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_nothing_fails_and_nothing_is_too_wide(page: Path, browser: Browser, width: int, dark: bool) -> None:
    browser.open(page, width, dark=dark)
    browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.console() == []
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert browser.run("return window.attacked === undefined")
    wide = browser.run("""return [...document.querySelectorAll('body *')].filter(one =>
        !one.closest('.scroll, .command, .skip, caption') && one.getBoundingClientRect().right > innerWidth + 1
    ).map(one => one.outerHTML.slice(0, 80))""")
    assert wide == []
    colour = "return getComputedStyle(document.body).backgroundColor"
    assert (browser.run(colour) == "rgb(255, 255, 255)") is not dark


def test_tables_are_sorted_by_key_and_by_click(page: Path, browser: Browser) -> None:
    browser.open(page, 1280)
    column = """const table = document.querySelector('#results table');
        const values = () => [...table.tBodies[0].rows].map(row => Number(row.cells[1].dataset.value));
        const head = table.tHead.rows[0].cells[1];"""
    browser.run(column + "head.querySelector('button').focus()")
    browser.press("Enter")
    first, order = browser.run(column + "return [values(), head.getAttribute('aria-sort')]")
    assert first == sorted(first, reverse=True) and len(first) == 3 and order == "descending"
    browser.run(column + "head.querySelector('button').click()")
    second, order = browser.run(column + "return [values(), head.getAttribute('aria-sort')]")
    assert second == sorted(second) and order == "ascending"
    words = """const table = document.querySelector('#results table');
        table.tHead.rows[0].cells[0].querySelector('button').click();
        const heads = [...table.tHead.rows[0].cells].map(one => one.getAttribute('aria-sort'));
        return [[...table.tBodies[0].rows].map(row => row.cells[0].textContent), heads.filter(one => one)];"""
    assert browser.run(words) == [["erm", "sam" * 20, "xdomainmix"], ["ascending"]]


def test_the_keyboard_reaches_the_report_first(page: Path, browser: Browser) -> None:
    browser.open(page, 390)
    browser.press("Tab")
    assert browser.run("return document.activeElement.className") == "skip"
    assert browser.run("return document.activeElement.getBoundingClientRect().left") >= 0
    browser.press("Enter")
    assert browser.run("return location.hash + document.activeElement.id") == "#reportreport"


def test_a_link_opens_a_folded_section_and_print_all_of_them(page: Path, browser: Browser, tmp_path: Path) -> None:
    browser.open(page, 1280)
    folded = "return [...document.querySelectorAll('details.folded')].map(one => one.open)"
    assert True not in browser.run(folded)
    browser.run("location.hash = '#recipe'; dispatchEvent(new HashChangeEvent('hashchange'))")
    assert browser.run("return document.querySelector('#recipe details').open")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert False not in browser.run(folded)
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(folded).count(True) == 1
    browser.cdp("Emulation.setEmulatedMedia", media="print")
    browser.resize(680)  # A4 less its margins
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("return document.documentElement.scrollWidth") == 680
    browser.cdp("Emulation.setEmulatedMedia", media="")
    browser.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
