"""The report in a real browser, and the content of its file."""

from __future__ import annotations

import html
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.backends.base import Storage
from compare_q.eval.common.output_files import write_text
from compare_q.eval.report import html_page
from compare_q.eval.results import ModelResult, RunResult, WorstToken
from compare_q.eval.stats.row_statistics import statistics_of
from compare_q.eval.stats.uncertainty import assign_blocks
from compare_q.eval.table import tables
from tests.support.made import FAILED, WORST, row, run_of
from tests.support.several_texts import three

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = [
    # Chromium's sandbox does not run as root.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
N = 4000
LAYER = {
    "layers": "h.*",
    "count": 2,
    "weights": "int4",
    "activations": "float16",
    "kernel": "Marlin",
    "asked": "",
}
SOURCE = {
    "name": "wiki2",
    "method": "exllamav3",
    "windows": 4,
    "window_length": 1000,
    "scored_tokens": N,
    "spec": {"dataset": "wiki2"},
}


def measured(
    label: str, kld: float | None, bpw: float | None = 4.0, *, seed: int = 0, **fields: Any
) -> ModelResult:
    """Return a model with random scores and this mean KLD; None: without a reference."""
    of_text = np.random.default_rng(0)
    of_model = np.random.default_rng(seed)
    reference = -of_text.exponential(3, N)
    loss = of_model.normal(kld or 0.0, 0.1, N)
    scores = {"logprob": reference - loss}
    if kld is not None:
        scores["kld"] = kld * of_model.lognormal(-0.5, 1, N)
        same_top = of_model.uniform(size=N) > min(kld, 0.9)
        scores["ref_logprob"] = reference
        scores["ref_top1_logprob"] = np.log(of_text.uniform(0.01, 1, N))
    columns = {name: column.astype(np.float32) for name, column in scores.items()}
    if kld is not None:
        columns["same_top"] = same_top
    index = np.arange(N)
    statistics = statistics_of(columns, assign_blocks(index), index % 1000 + 1, (4.0 * N, 0.8 * N))
    size = Storage(note="a server tells nothing")
    if bpw is not None:
        size = Storage(bpw, bpw, (bpw + 4) * 2**31)
    provenance = {"layers": [LAYER], "vllm": "0.26.0"} | fields.pop("provenance", {})
    return row(
        label, statistics, size, windows=4, score_seconds=2.0, provenance=provenance, **fields
    )


REFERENCE = measured("bf16 base", None, 16.0, reference=True)
MODELS = (
    REFERENCE,
    measured("bf16 other", 0.001, 16.0, seed=1, spec={"noise_floor": True}),
    measured("W4A16 g128", 0.3, 4.125, seed=2, notes=("a note",), worst_tokens=WORST),
    measured("W4A16 g32", 0.2, 4.5, seed=3, provenance={"layers": [{**LAYER, "asked": "fp8"}]}),
    measured("EXL3 3.0", 0.18, 3.0, seed=4),
    measured("EXL3 4.0", 0.05, 4.0, seed=5),
    measured("GGUF Q4_K", 0.05, 4.5, seed=6),
    measured("GGUF Q2_K", 8.0, 2.5, seed=7),
)


def results_of(*models: ModelResult) -> RunResult:
    reference = None
    for model in models:
        if model.reference:
            reference = {"label": model.label}
    subtitle = "wikitext2, 4 × 1000 tokens"
    return run_of(*models, reference=reference, texts=[SOURCE], subtitle=subtitle)


# It ends the element that holds results.json, would run a script, and reverses what follows.
EVIL = "</script><img src=x onerror=alert(1)> & <b>\u202e"
TOKEN = WorstToken(window=0, position=1, kld=2.0, before=EVIL, token=EVIL, after=EVIL)
HOSTILE = results_of(REFERENCE, measured(f"GGUF {EVIL}", 0.3, notes=(EVIL,), worst_tokens=(TOKEN,)))


def html_of(results: RunResult) -> str:
    return html_page.page_of(results.with_origin(["compare-q", "-t", EVIL]))


@pytest.fixture(scope="module")
def open_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Open a report in Chromium.

    The test fails if the page logs an error or requests another file.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    complaints: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)

        def opened(results: RunResult, width: int = 1400, **context: Any) -> Any:
            file = tmp_path_factory.mktemp("report") / "report.html"
            write_text(file, html_of(results))
            page = browser.new_page(viewport={"width": width, "height": 900}, **context)
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))

            def complain_of_other_files(request: Any) -> None:
                if request.url != file.as_uri():
                    complaints.append(request.url)

            page.on("request", complain_of_other_files)
            page.goto(file.as_uri())
            return page

        yield opened
        browser.close()
    assert complaints == []


def test_the_page_reads_back_and_names_its_only_script(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write_text(file, html_of(HOSTILE))
    stored = RunResult.read(file)
    assert (stored.data, stored.models) == (HOSTILE.data, HOSTILE.models)
    text = file.read_text()
    # results.json and the script of the page.
    assert (text.count("<script"), text.count("</script>"), text.count("<img")) == (2, 2, 0)
    assert re.search(r"script-src 'sha256-[^']+'; base-uri 'none'", html.unescape(text))
    # url(#...) is a part of the page itself.
    assert not re.search(
        r"\bon\w+=[\"']|\bsrc=[\"']|@import|url\((?!#)", text.split('id="results"')[0]
    )


def test_commands_are_for_a_shell() -> None:
    words = ["compare-q", "-t", "Newton's $HOME", "--python", "vllm=/a b/python"]
    assert shlex.split(html_page.shell_command(words)) == words
    assert (
        html_page.shell_command(("compare_q.py", "-d", "a.json"))
        == "python eval/compare_q.py -d a.json"
    )


@pytest.mark.engine
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
class TestBrowser:
    def test_labels_and_tokens_of_strangers_are_text(self, open_page: Callable[..., Any]) -> None:
        """The direction-changing character is shown as an escape."""
        opened = open_page(HOSTILE)
        evil = EVIL.replace("\u202e", "\\u202e")
        assert opened.locator("tbody th").nth(1).inner_text().startswith(f"GGUF {evil}")
        assert opened.locator(".tokens mark").inner_text() == evil
        assert opened.locator("svg text", has_text="</script>").count()
        assert opened.locator("img, b").count() == 0

    def test_the_table_is_the_terminals_and_can_be_sorted(
        self, open_page: Callable[..., Any]
    ) -> None:
        """Rows are sorted by numbers or words, ascending or descending; missing values are always
        last.
        """
        results = results_of(*MODELS, FAILED)
        opened = open_page(results)
        columns = tables.table_of(results).columns
        heads = opened.locator(".models thead th").all_inner_texts()
        assert heads == [filled.column.title for filled in columns]
        for number, filled in enumerate(columns, 1):
            texts = opened.locator(f".models tbody tr > :nth-child({number})").all_inner_texts()
            cells = []
            for cell in filled.cells:
                cells.append(cell.shown.replace("★", "★ ") + cell.marks + cell.error)
            assert [text.replace("± ", "") for text in texts] == cells
        for name, first, last in (
            ("KLD", "bf16 base", "GGUF Q2_K"),
            ("label", "bf16 base", "W4A16 g32 †"),
        ):
            for ends in ((first, last), (last, first)):
                opened.locator(".models thead button").filter(
                    has_text=re.compile(f"^{name}$")
                ).click()
                labels = opened.locator(".models tbody th").all_inner_texts()
                if name != "label":
                    # The failed model has no KLD.
                    assert labels.pop() == "broken"
                assert (labels[0], labels[-1]) == ends
        assert opened.locator("[aria-sort]").get_attribute("aria-sort") == "descending"

    def test_one_plot_is_shown_and_others_can_be_chosen(
        self, open_page: Callable[..., Any]
    ) -> None:
        opened = open_page(results_of(*MODELS))
        names = opened.locator(".tabs button").all_inner_texts()
        assert names[0] == "KLD over bits per weight"
        for name in (names[0], "KLD by position", "PPL over bits per weight"):
            opened.get_by_role("button", name=name).click()
            assert opened.locator("figure:visible svg").get_attribute("aria-label") == name
        opened.emulate_media(media="print")
        assert opened.locator("figure:visible").count() == len(names)

    def test_without_its_script_everything_is_shown(self, open_page: Callable[..., Any]) -> None:
        opened = open_page(results_of(*MODELS), java_script_enabled=False)
        n_visible = opened.locator("figure:visible").count()
        assert n_visible == opened.locator("figure svg").count()
        assert n_visible > 4
        assert opened.locator("button").count() == 0
        assert opened.locator(".finding").inner_text()
        tokens = opened.locator("details[open] .tokens tbody tr").all_inner_texts()
        # exp(-0.693) is 50 %, and exp(-9) 0.012 %.
        assert [re.split(r"\s+", row)[:3] for row in tokens] == [
            ["4.25", "50", "%"],
            ["3", "0.012", "%"],
        ]
        assert "before↵ <i> after" in tokens[0]

    def test_slices_have_a_table_and_a_picture(self, open_page: Callable[..., Any]) -> None:
        """The table has a column for each text; the reference has no KLD, and KLDs have their
        errors.
        """
        opened = open_page(three())
        tables_shown = opened.locator(".models")
        assert tables_shown.count() == 2
        heads = tables_shown.nth(1).locator("thead th").all_inner_texts()
        assert [head.replace("\n", " ") for head in heads] == [
            "label",
            "wiki2 KLD",
            "c4 KLD",
            "chat KLD",
        ]
        rows = tables_shown.nth(1).locator("tbody tr").all_inner_texts()
        assert [re.split(r"\t", row) for row in rows[::2]] == [
            ["bf16", "ref", "ref", "ref"],
            ["EXL3 4.0", "0.05000± 0.0050", "0.02000± 0.0020", "0.08000± 0.0080"],
        ]
        opened.get_by_role("button", name="KLD by slice").click()
        assert opened.locator("figure:visible svg text", has_text=re.compile("^chat$")).count() == 1


def test_slices_are_shown_by_kld_or_without_a_reference_by_ppl() -> None:
    """A run without slices, or with a reference but without any KLD, has no table of them."""

    def columns_of(run: RunResult) -> list[list[str]]:
        columns = []
        for filled in html_page.columns_of_slices(run):
            columns.append([filled.column.title, *(cell.shown for cell in filled.cells)])
        return columns

    alone = three(reference=False)
    assert columns_of(three())[1] == ["wiki2 KLD", "ref", "0.00100", "0.05000", "0.04000"]
    assert columns_of(alone)[3] == ["chat PPL", "20.000", "20.060", "21.600", "20.200"]
    assert columns_of(results_of(*MODELS)) == []
    assert columns_of(three().updated(models=three().models[:1])) == []


def test_names_of_strangers_are_text() -> None:
    """Names of texts are escaped in the table and in the pictures."""
    models = [model.updated(slices={EVIL: model.slices["chat"]}) for model in three().models]
    text = html_of(three().updated(models=tuple(models)))
    assert (text.count("<script"), text.count("<img")) == (2, 0)
    assert "&lt;/script&gt;&lt;img" in text.partition("<table")[0]
    assert "&lt;img src=x" in text.partition("<table")[2].partition('id="results"')[0]


def test_bounds_are_bounds_in_table_and_worst_tokens_and_sorted_as_numbers() -> None:
    """The worst token has a KLD of 4.25, and the model one of 0.3."""
    models = []
    for model in MODELS[:3]:
        if model.worst_tokens:
            model = model.updated(kld_kind="bound")
        models.append(model)
    page = html_of(results_of(*models))
    assert ">&gt;=4.25<" in page
    (key,) = re.findall(r'data-key="([^"]*)"[^>]*>&gt;=0[.]', page)
    assert float(key) == pytest.approx(models[2].kld, abs=1e-5)
    assert "&gt;=4.25" not in html_of(results_of(*MODELS[:3]))
