"""The page in a real browser: nothing fails, nothing is too wide, everything can be reached.

A headless Chromium, driven by chromedriver over plain HTTP (W3C WebDriver and Chromium's CDP).
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from canned_runs import Named, run_in_memory, write_run

from xdm_ft.report.sections import sections
from xdm_ft.report.written import html, write_page

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]  # fmt: skip
MISSING = None if shutil.which("chromedriver") and shutil.which("chromium") else "no chromium and chromedriver on PATH"


class Browser:
    """Raises `RuntimeError` with chromedriver's message if a command fails."""

    def __init__(self, port: int) -> None:
        self._start, self._session = f"http://127.0.0.1:{port}", ""

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._start + self._session + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from error

    def begin(self, profile: Path) -> None:
        for _ in range(100):
            try:
                if self.call("GET", "/status")["ready"]:
                    break
            except OSError:
                time.sleep(0.1)
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{session['sessionId']}"

    def cdp(self, command: str, **parameters: Any) -> Any:
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def run(self, script: str) -> Any:
        """Returns what the function body returns in the page."""
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def open(self, path: Path, width: int, dark: bool = False) -> None:
        """Shows a file in a window of that many CSS pixels."""
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])
        self.call("POST", "/url", {"url": path.as_uri()})

    def resize(self, width: int) -> None:
        mobile = width < 600
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=mobile)

    def press(self, key: str) -> None:
        """Presses Tab or Enter."""
        code, text = {"Tab": (9, {}), "Enter": (13, {"text": "\r"})}[key]
        for kind, typed in (("keyDown", text), ("keyUp", {})):
            self.cdp("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **typed)

    def console(self) -> list[str]:
        """What the console has received since the last call."""
        return [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"})]


@contextmanager
def browser_with(profile: Path) -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["chromedriver", f"--port={port}"]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        browser = Browser(port)
        browser.begin(profile)
        yield browser
        browser.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(20)


LONG = "a_domain_with_a_name_that_is_much_longer_than_any_phone_is_wide_" * 2
COLUMN = """const table = document.querySelector('#results table');
    const values = () => [...table.tBodies[0].rows].map(row => Number(row.cells[1].dataset.value));
    const head = table.tHead.rows[0].cells[1];"""
FOLDED = "return [...document.querySelectorAll('details.folded')].map(one => one.open)"


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    names = ("art", LONG, "<script>window.attacked = 1</script>")
    data = Named(names, ("cat", "dog" * 30, "hen"), each=10)
    write_page(write_run(tmp_path / "run", data, ("erm", "xdomainmix", "sam" * 20)))
    page = tmp_path / "run" / "report.html"
    with browser_with(tmp_path / "profile") as browser:
        for width, dark in [(1280, False), (1280, True), (390, False), (390, True)]:
            browser.open(page, width, dark)
            browser.run(EVERYTHING)
            assert browser.console() == []
            assert browser.run("return document.documentElement.scrollWidth") == width
            assert browser.run("return window.attacked === undefined")
            wide = browser.run("""return [...document.querySelectorAll('body *')].filter(one =>
                !one.closest('.scroll, .command, .skip, caption') && one.getBoundingClientRect().right > innerWidth + 1
            ).map(one => one.outerHTML.slice(0, 80))""")
            assert wide == []
            colour = browser.run("return getComputedStyle(document.body).backgroundColor")
            assert (colour == "rgb(255, 255, 255)") is not dark
            scrolled = """return [...document.querySelectorAll('figure .scroll')].filter(one =>
                one.scrollWidth > one.clientWidth).map(one => one.ariaLabel)"""
            assert browser.run(scrolled) == [], "a figure scrolls sideways"
            seen = "return [...document.querySelectorAll('figure')].filter(one => !one.getClientRects().length).length"
            assert browser.run(seen) == 0, "each figure is seen, on a phone too"

        browser.open(page, 1280)  # tables are sorted by key and by click
        browser.run(COLUMN + "head.querySelector('button').focus()")
        browser.press("Enter")
        values, order = browser.run(COLUMN + "return [values(), head.getAttribute('aria-sort')]")
        assert values == sorted(values, reverse=True) and len(values) == 3 and order == "descending"
        browser.run(COLUMN + "head.querySelector('button').click()")
        values, order = browser.run(COLUMN + "return [values(), head.getAttribute('aria-sort')]")
        assert values == sorted(values) and order == "ascending"
        words = """table.tHead.rows[0].cells[0].querySelector('button').click();
            const heads = [...table.tHead.rows[0].cells].map(one => one.getAttribute('aria-sort'));
            return [[...table.tBodies[0].rows].map(row => row.cells[0].textContent), heads.filter(one => one)];"""
        assert browser.run(COLUMN + words) == [["erm", "sam" * 20, "xdomainmix"], ["ascending"]]

        browser.open(page, 1280)  # a link opens a folded section, and print all of them
        assert True not in browser.run(FOLDED)
        browser.run("location.hash = '#recipe'; dispatchEvent(new HashChangeEvent('hashchange'))")
        opened = "return ['#diagnostics', '#recipe'].map(one => document.querySelector(`${one} > details`).open)"
        assert browser.run(opened) == [True, True], "the section, and what is around it"
        browser.run("dispatchEvent(new Event('beforeprint'))")
        assert False not in browser.run(FOLDED)
        browser.run("dispatchEvent(new Event('afterprint'))")
        assert browser.run(FOLDED).count(True) == 2
        browser.cdp("Emulation.setEmulatedMedia", media="print")
        browser.resize(680)  # A4 less its margins
        browser.run("dispatchEvent(new Event('beforeprint'))")
        assert browser.run("return document.documentElement.scrollWidth") == 680
        browser.cdp("Emulation.setEmulatedMedia", media="")
        pdf = browser.cdp("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=False)["data"]
        assert base64.b64decode(pdf).startswith(b"%PDF")

        browser.open(page, 390)  # the keyboard reaches the report first
        browser.press("Tab")
        assert browser.run("return document.activeElement.className") == "skip"
        assert browser.run("return document.activeElement.getBoundingClientRect().left") >= 0
        browser.press("Enter")
        assert browser.run("return location.hash + document.activeElement.id") == "#reportreport"


OPEN_HEIGHT, WHOLE_HEIGHT = 6000, 12000  # CSS pixels in a window of 1,280; of a page with everything open
EVERYTHING = "for (const one of document.querySelectorAll('details')) one.open = true"
VALUE = "const value = document.getElementById('value'); return value.hidden ? null : value.textContent"
NEAREST = """const svg = document.querySelector('#risk-coverage svg'), [x, y] = JSON.parse(svg.dataset.points)[0][2][5];
    svg.scrollIntoView({block: 'center', behavior: 'instant'});
    const at = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
    // scrolling, of which the page hears a frame later, hides the value
    return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done([at.x, at.y]))));"""
BUTTON = "const button = document.querySelector('#risk-coverage .series button');"


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_figures_answer_the_pointer_and_the_open_page_is_short(tmp_path: Path) -> None:
    methods = tuple(f"method{i}" for i in range(13))
    data = Named(("art", "photo", "cartoon", "sketch"), tuple(f"class{i}" for i in range(10)), each=6)
    write_page(write_run(tmp_path / "run", data, ("erm", *methods), range(2)))
    page = tmp_path / "run" / "report.html"
    with browser_with(tmp_path / "profile") as browser:
        browser.open(page, 1280)
        assert browser.run("return document.documentElement.scrollHeight") <= OPEN_HEIGHT
        browser.run(EVERYTHING)
        assert browser.run("return document.documentElement.scrollHeight") <= WHOLE_HEIGHT
        browser.open(page, 1280)

        assert browser.run(VALUE) is None
        x, y = browser.run(NEAREST)
        browser.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=x + 2, y=y + 2)
        name, text = browser.run(VALUE).split("\n")
        assert name in ("erm", *methods) and text.startswith("images that are answered in % ")
        browser.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
        assert browser.run(VALUE) is None

        every = "[...document.querySelectorAll('#risk-coverage [data-series]')]"
        drawn = f"return {every}.filter(one => getComputedStyle(one).display !== 'none')"
        before = browser.run(drawn + ".length")
        browser.run(BUTTON + "button.focus()")
        browser.press("Enter")  # by the keyboard
        assert browser.run(BUTTON + "return button.getAttribute('aria-pressed')") == "false"
        assert 0 < browser.run(drawn + ".length") < before
        browser.run(BUTTON + "button.click()")
        assert browser.run(drawn + ".length") == before
        assert browser.console() == []


POINT = """const section = document.getElementById('SECTION');
    for (let one = section; one; one = one.parentElement) if (one.tagName === 'DETAILS') one.open = true;
    for (const one of section.querySelectorAll('details')) one.open = true;
    const svg = [...section.querySelectorAll('svg[data-points]')].find(one => one.closest('figure').offsetWidth);
    const [name, , points] = JSON.parse(svg.dataset.points).find(([, , points]) => points.length);
    svg.scrollIntoView({block: 'center', behavior: 'instant'});
    const at = new DOMPoint(points[0][0], points[0][1]).matrixTransform(svg.getScreenCTM());
    return [at.x, at.y, points[0][2]];"""
DRAWN = """const section = document.getElementById('SECTION');
    const own = [...section.querySelectorAll('svg [data-series]')].filter(one => {
        const series = JSON.parse(one.closest('svg').dataset.points)[one.dataset.series];
        return series[1] === 'METHOD';
    });
    return [own.length, own.filter(one => one.getClientRects().length).length];"""
PRESS = """const row = document.querySelector('#SECTION .series');
    [...row.children].find(one => one.textContent === 'METHOD').click();"""
UNDER_THE_POINTER = {
    "search": r"trial \d+, seed \d, held out (art|sketch); selection .*, test .*; lr .*",
    "curves": r"step \d+: [\d.]+",
    "embeddings": r"image \d+, class (cat|dog|hen)",
}


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_figures_of_diagnostics_answer_the_pointer_and_their_buttons_hide_a_method(tmp_path: Path) -> None:
    run = run_in_memory(("erm", "xdomainmix"), trials=3)
    shown = list(sections(run))
    page = tmp_path / "report.html"
    page.write_text(html(run, shown, {figure.name: figure.svg() for one in shown for figure in one.figures}))
    with browser_with(tmp_path / "profile") as browser:
        for width in (1280, 390):
            browser.open(page, width)
            for section, words in UNDER_THE_POINTER.items():
                x, y, text = browser.run(POINT.replace("SECTION", section))
                browser.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
                value = browser.run(VALUE)
                assert value is not None and value.split("\n")[-1] == text, (section, width)
                assert re.fullmatch(words, text), (section, text)
                inside = """const box = document.getElementById('value').getBoundingClientRect();
                    return box.left >= 0 && box.right <= innerWidth && box.top >= 0 && box.bottom <= innerHeight"""
                assert browser.run(inside), (section, width)
                browser.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
                assert browser.run(VALUE) is None

        for section in UNDER_THE_POINTER:

            def drawn(method: str, section: str = section) -> tuple[int, int]:
                """How many parts of figures belong to a method, and how many of them are seen."""
                every, seen = browser.run(DRAWN.replace("SECTION", section).replace("METHOD", method))
                return every, seen

            press = PRESS.replace("SECTION", section).replace("METHOD", "erm")
            both = drawn("erm"), drawn("xdomainmix")
            assert all(every == seen > 0 for every, seen in both), section
            browser.run(press)
            assert (drawn("erm")[1], drawn("xdomainmix")) == (0, both[1]), section
            browser.run(press)
            assert (drawn("erm"), drawn("xdomainmix")) == both, section

        browser.cdp("Emulation.setEmulatedMedia", media="print")
        browser.resize(680)  # A4 less its margins
        browser.run("dispatchEvent(new Event('beforeprint'))")
        broken = """const pen = document.createElement('canvas').getContext('2d');
            return [...document.querySelectorAll('thead th')].filter(head => {
                const style = getComputedStyle(head);
                pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
                const words = head.innerText.split(/[ \\n-]/).map(word => pen.measureText(word).width);
                return head.clientWidth && Math.max(...words) > head.clientWidth;
            }).map(head => head.innerText)"""
        assert browser.run(broken) == [], "a word of a header is broken on paper"
        assert browser.console() == []
