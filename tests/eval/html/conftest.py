"""One browser for all tests of the page, and one page for each report that they open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from compare_q.eval.html import report, sections
from compare_q.eval.results.run_result import ModelResult, Results
from tests.support.report_page import BROWSER, FLAGS, Opened, ShowPage, inspection_of, results_of

PAGES: dict[str, str] = {}
"""The reports that tests have written: several open the same."""


class Browser:
    """Headless Chromium, started by the first test that opens a report, and the pages that it holds."""

    def __init__(self) -> None:
        self.playwright: Any = None
        self.chromium: Any = None
        self.pages: dict[tuple[Any, ...], Opened] = {}

    def start(self) -> None:
        """Start Chromium, unless it runs; skip the test where Playwright is not installed."""
        sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
        if self.chromium is None:
            self.playwright = sync_api.sync_playwright().start()
            self.chromium = self.playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)

    def stop(self) -> None:
        """Close Chromium and Playwright, whose event loop would be in the way of other folders' asyncio."""
        if self.chromium is not None:
            self.chromium.close()
            self.playwright.stop()
        self.__init__()  # type: ignore[misc]


BROWSER_OF_THIS_FOLDER = Browser()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the browser after the last test of this folder."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        BROWSER_OF_THIS_FOLDER.stop()


@pytest.fixture
def show_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Opened]]:
    """Open a report; whatever the page complains of fails the test.  One that is open already is loaded anew."""
    browser, opened = BROWSER_OF_THIS_FOLDER, set[Opened]()
    browser.start()

    def show_file(html: str, width: int = 1400, **context: Any) -> Opened:
        key = (html, width, *sorted(context.items()))
        if key not in browser.pages:
            file = tmp_path_factory.mktemp("report") / "report.html"
            file.write_text(html, encoding="utf-8", errors="backslashreplace")
            size = {"width": width, "height": 900}
            browser.pages[key] = Opened(browser.chromium.new_page(viewport=size, **context), file)
        browser.pages[key].load()
        opened.add(browser.pages[key])
        return browser.pages[key]

    yield show_file
    for found in opened:
        assert found.complaints == []
        assert found.requests == [found.file.as_uri()]


@pytest.fixture(autouse=True)
def few_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four scatter plots in a report and not fifteen, which take a second or more each."""
    kept = ("mean", "ppl", "acc")
    monkeypatch.setattr(sections, "MEASURES", {key: sections.MEASURES[key] for key in kept})
    monkeypatch.setattr(sections, "FEW", 99)  # no row is selected at first
    monkeypatch.setattr(sections, "SIZES", {key: sections.SIZES[key] for key in ("bpw", "size")})


@pytest.fixture
def show(show_file: Callable[..., Opened]) -> ShowPage:
    """Write a report and open it."""

    def show(*models: ModelResult, inspect: Any = True, results: Results | None = None, **context: Any) -> Opened:
        """``inspect``: whether there are excerpts, or which."""
        results = results or results_of(*models)
        key = repr((results, inspect))
        if key not in PAGES:
            excerpts = [
                None if text.error or not inspect else inspection_of(text) if inspect is True else inspect
                for text in results.texts
            ]
            PAGES[key] = report.page_of(results, excerpts, ["compare_q.py", "-d", "<d>"])
        return show_file(PAGES[key], **context)

    return show
