"""The report in a real headless Chromium: what it shows is what Python says, and it asks for nothing."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.base import Storage
from eval.html import report as html_report
from eval.html.inspector import Damaged, Inspection, Passage
from eval.plots import figures
from eval.results import differences, digits, results_json
from eval.results.run_result import ModelResult, RunResult
from eval.stats import estimates as estimating
from eval.stats.distributions import Curve, Histogram
from eval.table import columns as tables

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
needs_browser = [
    pytest.mark.engine,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine"),
]
N = 4000
LAYER = {"layers": "h.*", "count": 2, "weights": "int4", "activations": "float16", "kernel": "Marlin", "asked": ""}
DEVIATING = {**LAYER, "asked": "fp8"}
SOURCE = {"method": "exllamav3", "rows": 4, "window_length": 1000, "scored_tokens": N, "spec": {"dataset": "wiki2"}}


def measured(label: str, kld: float | None, bpw: float | None = 4.0, *, seed: int = 0, **facts: Any) -> ModelResult:
    """A model with random scores of that mean KLD; None: it has no reference."""
    text, own = np.random.default_rng(0), np.random.default_rng(seed)
    ref = -text.exponential(3, N)
    columns = {"logprob": ref - own.normal(0.0 if kld is None else kld, 0.1, N)}
    if kld is not None:
        columns |= {
            "kld": kld * own.lognormal(-0.5, 1, N), "same_top": own.uniform(size=N) > min(kld, 0.9),
            "ref_logprob": ref, "ref_top1_logprob": np.log(text.uniform(0.01, 1, N)),
        }  # fmt: skip
    columns = {name: each if name == "same_top" else each.astype(np.float32) for name, each in columns.items()}
    index = np.arange(N)
    found = estimating.summarize(columns, index, index % 1000 + 1, (4.0 * N, 0.8 * N))
    size = Storage(bpw, bpw, None if bpw is None else (bpw + 4) * 2**31, "" if bpw else "a server tells nothing")
    provenance = {"layers": [LAYER], "vllm": "0.26.0"} | facts.pop("provenance", {})
    return ModelResult(label, "fake", size, found, windows=4, score_seconds=2.0, provenance=provenance, **facts)


REFERENCE = measured("bf16 base", None, 16.0, is_reference=True)
MODELS = (
    REFERENCE,
    measured("bf16 other", 0.001, 16.0, seed=1, spec={"noise_floor": True}),
    measured("W4A16 g128", 0.3, 4.125, seed=2, notes=("a note",)),
    measured("W4A16 g32", 0.2, 4.5, seed=3, provenance={"layers": [DEVIATING]}),
    measured("EXL3 3.0", 0.18, 3.0, seed=4),
    measured("EXL3 4.0", 0.05, 4.0, seed=5),
    measured("GGUF Q4_K", 0.05, 4.5, seed=6),
    measured("GGUF Q2_K", 8.0, 2.5, seed=7),
)
FAILED = ModelResult("broken", "fake", error="told to fail")
SIZELESS = measured("server", 0.1, None, seed=8)


def run_of(*models: ModelResult) -> RunResult:
    base = next((model.label for model in models if model.is_reference), None)
    return RunResult(SOURCE, "wikitext2, 4 × 1000 tokens", models, None if base is None else {"label": base})


def inspection_of(run: RunResult) -> Inspection:
    """Twenty tokens, whose KLD is their number in hundredths and twice that for the next model."""
    tokens = ("", "Ü", "\n\n", " <b>", "</script>", *(f" t{i}" for i in range(15)))

    def numbers(scale: float) -> tuple[float, ...]:
        return tuple(scale * i for i in range(20))

    klds = tuple(None if m.error or m.is_reference else numbers(0.01 * at) for at, m in enumerate(run.models))
    logprobs = tuple(None if m.error else numbers(-0.1 * (at + 1)) for at, m in enumerate(run.models))
    worst = (Damaged(1, 7, "before\n", " <i>", " after", math.log(0.5), math.log(0.01), 4.25),)
    passage = Passage(2, 17, tokens, numbers(-0.1), logprobs, klds)
    return Inspection((passage,), tuple(None if m.error else worst for m in run.models))


@dataclass
class Opened:
    """A page of a report: its locators, and what the browser complained of or asked for."""

    page: Any
    complaints: list[str]
    requests: list[str]
    file: Path

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_text_contents()]

    def cells(self, column: str) -> list[str]:
        return self.texts(f"#table tbody [data-cell='{column}']")

    def labels(self) -> list[str]:
        return self.texts("#table tbody .label span")

    def heading(self) -> str:
        """Of the tooltip, which is to be seen."""
        self.page.locator("#tip").wait_for(state="visible", timeout=10_000)
        return self.texts("#tip strong")[0]

    def tip(self) -> dict[str, str]:
        names, values = self.texts("#tip dt"), self.texts("#tip dd:not(.wide)")
        return dict(zip(names, values, strict=True))

    def pick(self, section: str, text: str) -> None:
        self.page.locator(f"#{section} .choice").get_by_text(text, exact=True).click()

    def scale(self, chart: str, along: str, *, log: bool) -> Callable[[float], float]:
        """Value -> pixel of a chart's axis, read off its first and last tick but for one at 0."""
        anchor, off = ("middle", 0) if along == "x" else ("end", 4)
        found = self.page.locator(f"{chart} .tick[text-anchor='{anchor}']").evaluate_all(
            f"all => all.map(each => [each.textContent, each.getAttribute('{along}') - {off}])"
        )
        ticks = [(float(plain(text)), pixel) for text, pixel in found if not (log and text == "0")]
        (a, first), (b, last) = ticks[0], ticks[-1]
        turn = math.log if log else float
        return lambda value: first + (turn(value) - turn(a)) / (turn(b) - turn(a)) * (last - first)

    def bars(self, chart: str) -> list[tuple[int, float, float]]:
        """Model, lower and upper end of each error bar, pixels."""
        found = self.page.locator(f"{chart} .bar").evaluate_all(
            "all => all.map(each => [each.dataset.bar, each.getAttribute('d')])"
        )
        ends = [(int(model), re.findall(r"[,V]([\d.]+)", path)) for model, path in found]
        return [(model, *sorted(map(float, ys[:2]), reverse=True)) for model, ys in ends]  # type: ignore[misc]

    def centre(self, label: str) -> tuple[float, float]:
        """Pixels of a model's point."""
        found = self.page.locator(f"#scatter .point[aria-label^='{label}'] .target")
        return float(found.get_attribute("cx")), float(found.get_attribute("cy"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Of this module only: Playwright's loop would be in the way of other tests' asyncio."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Write a report of models and open it; whatever the page complains of fails the test."""
    opened: list[Opened] = []

    def show(
        *models: ModelResult, inspect: Any = True, width: int = 1400, run: RunResult | None = None, **context: Any
    ) -> Opened:
        """``inspect``: whether there are excerpts, or which."""
        run, file = run or run_of(*models), tmp_path / f"report{len(opened)}.html"
        excerpts = inspection_of(run) if inspect is True else inspect or None
        html_report.write(run, excerpts, file, ["compare_q.py", "-d", "<d>"])
        page = browser.new_page(viewport={"width": width, "height": 900}, **context)
        found = Opened(page, [], [], file)
        page.on("console", lambda message: found.complaints.append(message.text))
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (found.complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_timeout(50)
        opened.append(found)
        return found

    yield show
    for found in opened:
        assert found.complaints == []
        assert found.requests == [found.file.as_uri()]
        found.page.close()


def browsing(test: Any) -> Any:
    for mark in needs_browser:
        test = mark(test)
    return test


def plain(text: str) -> str:
    """A cell's text as the terminal's table writes it."""
    return text.replace("\N{MINUS SIGN}", "-")


def test_the_file_is_whole_and_closed(tmp_path: Path) -> None:
    """One script, one style, named by their hashes; nothing that could load; the payload reads back."""
    run, file = run_of(*MODELS, FAILED), tmp_path / "report.html"
    html_report.write(run, inspection_of(run), file, ["compare_q.py"])
    text = file.read_text()
    assert re.findall(r"\b(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text) == []
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    again, inspection = results_json.load(file)
    before, after = (json.loads(json.dumps(results_json.run_json(each, [])["models"])) for each in (run, again))
    assert before == after
    html_report.write(again, inspection, tmp_path / "again.html", ["other"])
    assert results_json.load(tmp_path / "again.html") == (again, inspection)
    assert (tmp_path / "again.html").read_text() == text


@browsing
def test_the_table_is_the_terminals(show: Callable[..., Opened]) -> None:
    """Every number, error and star; a row a model, failed ones too."""
    run = run_of(*MODELS, SIZELESS, FAILED)
    opened = show(*run.models)
    columns = {column.header: column.cells for column in tables.columns(run, tables.EXTRAS)}
    pairs_of = {"bpw": "layer\nbpw", "head": "head\nbpw", "vram": "VRAM\nGiB", "ppl": "PPL", "ratio": "PPL vs\nref %",
                "kld": "KLD", "p99": "KLD\np99", "same": "same\ntop %", "seconds": "seconds"}  # fmt: skip
    for key, header in pairs_of.items():
        assert [plain(text) for text in opened.cells(key)] == [cell.shown for cell in columns[header]], key
    for key in ("ppl", "ratio", "kld", "same"):
        errors = [plain(text).removeprefix("± ") for text in opened.texts(f"[data-cell='{key}'] + .error")]
        assert errors == [cell.error for cell in columns[pairs_of[key]][:-1]], key
    assert opened.labels() == [tables.label_of(model) for model in run.models]
    starred = opened.texts("tr:has([data-cell='kld'] .best) .label span")
    assert set(starred) == differences.best(run.models, "kld")
    assert starred


@browsing
def test_sorting(show: Callable[..., Opened]) -> None:
    """A click sorts, a second one reverses; what is not known stays last; the keyboard does the same."""
    opened = show(*MODELS, SIZELESS, FAILED)
    header = opened.page.locator("th[data-column='bpw']")
    known = sorted([m for m in MODELS if m.storage.bpw_layer], key=lambda m: m.storage.bpw_layer or 0)
    expected = [f"{m.storage.bpw_layer:.2f}" for m in known]
    header.locator("button").click()
    assert opened.cells("bpw") == [*expected, "n/a", ""]
    assert header.get_attribute("aria-sort") == "ascending"
    header.locator("button").click()
    assert opened.cells("bpw") == [*expected[::-1], "n/a", ""]
    assert header.get_attribute("aria-sort") == "descending"
    opened.page.locator("th[data-column='label'] button").focus()
    opened.page.keyboard.press("Enter")
    names = opened.labels()
    assert names[:2] == ["bf16 base", "bf16 other ≈"]
    assert names.index("EXL3 3.0") < names.index("EXL3 4.0") < names.index("GGUF Q2_K")
    assert header.get_attribute("aria-sort") == "none"
    assert opened.page.evaluate("document.activeElement.dataset.key") == "sort-label"
    opened.page.locator("th[data-column='ppl'] button").click()
    ppl = sorted(m.ppl.value for m in (*MODELS, SIZELESS) if m.ppl and m.ppl.value)
    assert [plain(text).strip("★") for text in opened.cells("ppl")] == [*(f"{v:,.4f}" for v in ppl), "failed"]


@browsing
def test_hiding_a_group(show: Callable[..., Opened]) -> None:
    """Its points and rows vanish everywhere, both axes rescale; it comes back."""
    opened = show(*MODELS)
    points, ticks = opened.page.locator("#scatter .point"), "#scatter svg .tick"
    before = opened.texts(ticks)
    assert points.count() == len(MODELS)
    opened.page.locator("#scatter .group[data-group='GGUF']").click()
    assert points.count() == len(MODELS) - 2
    assert not [label for label in opened.labels() if label.startswith("GGUF")]
    assert not [label for label in opened.texts(".matrix tbody th span") if label.startswith("GGUF")]
    assert not [label for label in opened.texts(".multiples span") if label.startswith("GGUF")]
    assert opened.page.locator("#table .group[data-group='GGUF']").get_attribute("aria-pressed") == "false"
    after = opened.texts(ticks)
    assert before != after
    assert max(map(float, before)) > max(map(float, after[-5:]))
    opened.page.locator("#table .group[data-group='GGUF']").click()
    assert points.count() == len(MODELS)
    assert opened.texts(ticks) == before


@browsing
def test_hover_and_focus_tell_everything(show: Callable[..., Opened]) -> None:
    opened = show(*MODELS)
    model = MODELS[3]
    assert model.estimates
    assert model.estimates.against
    point = opened.page.locator("#scatter .point[aria-label^='W4A16 g32']")
    for reach in (point.hover, point.focus):
        opened.page.mouse.move(0, 0)
        assert opened.page.locator("#tip").is_hidden()
        reach()
        assert opened.heading() == "W4A16 g32 †"
        found, spread = opened.tip(), model.estimates.against.kld_percentiles
        assert found["engine"] == "fake"
        assert found["kernel"] == "Marlin"
        ppl, kld = model.estimates.ppl, model.estimates.against.kld
        assert [found[name] for name in ("layer bpw", "VRAM GiB")] == ["4.50", "2.12"]
        assert found["PPL"] == f"{ppl.value:.4f} ± {digits.error(ppl.stderr)}"
        assert found["KLD"].startswith(f"{kld.value:.5f} ± {digits.error(kld.stderr)} (median ")
        shown = re.findall(r"(?:median|p99|max) ([\d.]+)", found["KLD"])
        assert [float(each) for each in shown] == pytest.approx([spread["50"], spread["99"], spread["max"]], rel=0.06)
        assert "fp8" in found["†"]
        opened.page.keyboard.press("Escape")
    opened.page.locator("#scatter .point[aria-label^='W4A16 g128']").hover()
    assert "a note" in opened.texts("#tip .wide")


@browsing
def test_scales(show: Callable[..., Opened]) -> None:
    """Distances between points are those of the logarithms, or of the values; errors are as long as they should be."""
    opened = show(*MODELS, width=1000)
    kld = {m.label: m.kld.value for m in MODELS if m.kld and m.kld.value}
    names = ("W4A16 g128", "EXL3 4.0", "bf16 other")

    def ratio(of: Callable[[float], float]) -> float:
        a, b, c = (of(kld[name]) for name in names)
        return (a - b) / (b - c)

    def drawn() -> float:
        a, b, c = (opened.centre(name)[1] for name in names)
        return (a - b) / (b - c)

    assert drawn() == pytest.approx(ratio(math.log), rel=1e-6)
    floors = opened.page.locator("#scatter .level.floor")
    assert floors.count() == 1
    opened.pick("scatter", "PPL")
    assert floors.count() == 0  # it is the floor of KLD
    opened.pick("scatter", "KLD")
    opened.page.locator("#scatter .choice:has(legend:text-is('y scale'))").get_by_text("linear").click()
    assert drawn() == pytest.approx(ratio(float), rel=1e-6)
    outlier = opened.page.locator("#scatter .point[aria-label^='GGUF Q2_K']")
    assert outlier.get_attribute("data-off") == "1"
    assert opened.centre("GGUF Q2_K")[1] < min(opened.centre(name)[1] for name in names)


@browsing
def test_size_axis(show: Callable[..., Opened]) -> None:
    """A model without a size is named, not drawn; x is bits or GiB, (bits + 4) / 4 here, linear or log."""
    opened = show(*MODELS, SIZELESS, FAILED)
    assert opened.page.locator("#scatter .point").count() == len(MODELS)
    assert "not known: server." in "".join(opened.texts("#scatter .chart .hint"))
    before = [opened.centre(m.label)[0] for m in MODELS]
    opened.pick("scatter", "VRAM")
    assert [opened.centre(m.label)[0] for m in MODELS] == pytest.approx(before, abs=0.01)
    opened.page.locator("#scatter .choice:has(legend:text-is('x scale'))").get_by_text("log").click()
    low, middle, high = (opened.centre(name)[0] for name in ("GGUF Q2_K", "EXL3 4.0", "bf16 other"))
    expected = math.log(8 / 6.5) / math.log(20 / 8)
    assert (middle - low) / (high - middle) == pytest.approx(expected, rel=1e-6)


KINDS = "#scatter :is(.label, .level-name)", "#scatter .point .mark", "#scatter svg .tick", "#scatter svg .name"


@browsing
@pytest.mark.parametrize("width", [400, 1400])
def test_no_label_covers_anything(show: Callable[..., Opened], width: int) -> None:
    """Labels touch no point and no other label, ticks no axis's name, in any view; the page fits the window."""
    crowd = [measured(f"G{i % 7} number {i}", 0.01 * 1.5 ** (i % 13), 3 + (i * 7 % 11) / 4, seed=i) for i in range(30)]
    opened = show(*MODELS, *crowd, width=width)
    boxes = """kind => [...document.querySelectorAll(kind)].map(node => {
        const box = node.getBoundingClientRect(); return [box.left, box.top, box.right, box.bottom]; })"""
    for view in ("KLD", "PPL", "PPL ratio"):
        opened.pick("scatter", view)
        labels, points, ticks, names = (opened.page.evaluate(boxes, kind) for kind in KINDS)
        assert len(labels) > 8
        # Letters reach less far than the box of a line of text: 1 pixel of it may.
        touching = [
            (a, b)
            for kinds in ((labels, labels), (labels, points), (ticks, names)) for a, b in itertools.product(*kinds)
            if a is not b and min(a[2], b[2]) - max(a[0], b[0]) > 1 and min(a[3], b[3]) - max(a[1], b[1]) > 2
        ]  # fmt: skip
        assert touching == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width


@browsing
def test_differences_are_pythons(show: Callable[..., Opened]) -> None:
    """Value and error of every pair, and the intervals of one, to 1e-9."""
    opened = show(*MODELS)
    compared = [model for model in MODELS if not model.is_reference]
    for name, button, count in (("nll", "PPL", 8), ("kld", "KLD", 7), ("same_top", "same top", 7)):
        opened.pick("differences", button)
        found = opened.page.evaluate(
            "[...document.querySelectorAll('.cell')].map(c => [c.dataset.a, c.dataset.b, c.dataset.value,"
            " c.dataset.stderr, c.classList.contains('told')])"
        )
        assert len(found) == count**2
        for a, b, value, stderr, told in found:
            if a == b:
                continue
            one, other = (MODELS[int(i)].estimates.blocks for i in (a, b))  # type: ignore[union-attr]
            expected = differences.between(one, other, name)
            assert expected is not None
            assert float(value) == pytest.approx(expected.value, rel=1e-9, abs=1e-12)
            assert float(stderr) == pytest.approx(expected.stderr, rel=1e-9, abs=1e-12)
            assert told == expected.is_seen
    a, b = compared[1], compared[3]
    for name, model in (("A", a), ("B", b)):
        opened.page.locator(f"[data-key='pick-{name}']").select_option(label=model.label)
    rows = opened.page.locator("#pair tbody tr")
    for name in ("nll", "kld", "same_top"):
        assert a.estimates
        assert b.estimates
        expected = differences.between(a.estimates.blocks, b.estimates.blocks, name)
        row = rows.locator(f"xpath=self::*[@data-difference='{name}']")
        got = [float(row.get_attribute(f"data-{key}")) for key in ("value", "stderr", "low", "high")]
        assert expected is not None
        assert expected.limits is not None
        assert got == pytest.approx([expected.value, expected.stderr, *expected.limits], rel=1e-9)
        assert "EXL3 3.0 is better" in row.text_content()


@browsing
def test_selection_reaches_all_sections(show: Callable[..., Opened]) -> None:
    opened = show(*MODELS)
    for drop in opened.page.locator("#chips .drop").all()[::-1]:
        drop.click()
    curves = opened.page.locator("#position .curve")
    assert curves.count() == 0
    opened.page.locator("#table tr[data-model='5'] td").first.click()
    opened.page.locator("#table tr[data-model='6'] input").focus()
    opened.page.keyboard.press("Space")
    assert opened.texts("#chips .chip") == ["EXL3 4.0×", "GGUF Q4_K×"]
    assert curves.evaluate_all("nodes => nodes.map(node => node.dataset.model)") == ["5", "6"]
    assert opened.page.locator("#spread .chart .fill").count() == 2
    assert opened.texts("#confidence .legend li") == ["EXL3 4.0", "GGUF Q4_K"]
    opened.page.locator("#table tr[data-model='4'] td").first.click()
    dashes = [
        opened.page.locator(f"#confidence {each}").evaluate_all(
            "all => all.map(each => getComputedStyle(each).strokeDasharray)"
        )
        for each in (".curve", ".legend line")
    ]
    assert dashes == [["none", "none", "7px, 3px"]] * 2  # a group's second model
    opened.page.locator("#table tr[data-model='4'] td").first.click()
    assert opened.page.locator("#tokens select").input_value() == "6"
    assert opened.page.locator("#scatter .ring").count() == 2
    opened.page.locator("#spread .small", has_text="GGUF Q2_K").click()
    assert curves.count() == 3
    opened.page.locator("#position svg[tabindex]").focus()
    # Focus scrolls the page, and the scroll, which comes with a later frame, hides the tooltip.
    opened.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    for position in (2, 3):
        opened.page.keyboard.press("ArrowRight")
        assert opened.heading() == f"position {position}"
        assert opened.texts("#tip dt") == ["EXL3 4.0", "GGUF Q4_K", "GGUF Q2_K"]


@browsing
def test_tokens(show: Callable[..., Opened]) -> None:
    """Texts as they are, coloured by the selected model's KLD; a hover tells the numbers; the damaged ones below."""
    opened = show(*MODELS)
    opened.page.locator("#tokens select").select_option("2")
    assert "excerpts of the text" in opened.texts("#about dd")
    tokens = opened.page.locator("#tokens .token")
    assert tokens.all_text_contents()[:5] == ["▯", "Ü", "↵\n↵\n", " <b>", "</script>"]
    strengths = [
        float(s) for s in tokens.evaluate_all("nodes => nodes.map(n => n.style.getPropertyValue('--strength'))")
    ]
    assert strengths == sorted(strengths)
    assert strengths[10] == pytest.approx((math.log10(0.2) + 3) / 4, abs=1e-3)
    tokens.nth(10).hover()
    assert opened.heading() == '" t5"'
    assert opened.tip() == {
        "logprob": "−3.00 (5.0 %)", "reference's": "−1.00 (36.8 %)", "KLD": "0.200", "position": "27 of window 3",
    }  # fmt: skip
    tokens.nth(0).focus()
    opened.page.keyboard.press("ArrowRight")
    assert opened.heading() == '"Ü"'
    assert opened.texts("#worst tbody td") == ["4.25", "50.0 %", "1.0 %", "before↵ <i> after"]
    opened.pick("tokens", "loss − reference")
    strengths = [
        float(s) for s in tokens.evaluate_all("nodes => nodes.map(n => n.style.getPropertyValue('--strength'))")
    ]
    assert strengths[10] == pytest.approx(math.sqrt(2 / 6), abs=1e-3)


@browsing
def test_hostile_texts_stay_texts(show: Callable[..., Opened]) -> None:
    """In labels, notes, specs and errors; the policy would stop what got through, which the page then complains of."""
    evil = "</script><img/src=x:1/onerror=alert(1)><!--<script> [h8]"
    model = replace(MODELS[4], label=evil, notes=(evil,), spec={evil: evil}, provenance={evil: evil, "layers": []})
    opened = show(REFERENCE, model, MODELS[5], replace(FAILED, label=f"{evil} 2", error=evil))
    assert opened.labels()[1] == evil
    for summary in opened.page.locator("#ran summary").all():
        summary.click()
    opened.page.locator("#ran details pre").nth(3).wait_for()
    opened.page.locator("#scatter .point").nth(1).hover()
    assert opened.heading() == evil
    assert evil in "".join(opened.texts("#ran pre"))
    assert opened.page.locator("img").count() == 0
    assert opened.page.locator("script").count() == 2


@browsing
def test_dark_and_light(show: Callable[..., Opened]) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(255, 255, 255)", "rgb(20, 23, 28)"
    for scheme, first, second in (("light", light, dark), ("dark", dark, light)):
        opened = show(*MODELS, color_scheme=scheme)
        assert opened.page.evaluate(background) == first
        opened.page.locator("#theme").click()
        assert opened.page.evaluate(background) == second
        opened.page.locator("#theme").click()
        assert opened.page.evaluate(background) == first


@browsing
def test_what_ran(show: Callable[..., Opened]) -> None:
    opened = show(*MODELS, FAILED)
    details = opened.page.locator("#ran details[data-model='3']")
    details.locator("summary").click()
    details.locator("pre").wait_for()  # a details element tells of its opening a moment later
    text = details.text_content()
    for expected in ("Marlin", "0.26.0", "fp8", "float16"):
        assert expected in text
    assert "compare_q.py -d <d>" in opened.texts("#ran .command")
    failed = opened.page.locator(f"#ran details[data-model='{len(MODELS)}']")
    failed.locator("summary").click()
    failed.locator("pre").wait_for()
    assert "told to fail" in failed.text_content()
    opened.page.locator("#table .group[data-group='EXL3']").click()
    assert opened.page.locator("#ran details[open]").count() == 2


SECTIONS = {"table", "scatter", "spread", "position", "differences", "confidence", "tokens", "ran"}
ALONE = measured("one", None)


@browsing
@pytest.mark.parametrize(
    ("models", "absent"),
    [
        pytest.param((ALONE, measured("two", None, seed=1)), {"spread", "confidence"}, id="no reference"),
        pytest.param((ALONE,), {"spread", "confidence", "differences"}, id="one model"),
        pytest.param((REFERENCE,), {"spread", "confidence", "differences"}, id="the reference alone"),
        pytest.param((REFERENCE, FAILED), {"spread", "confidence", "differences"}, id="the others failed"),
        pytest.param(
            (replace(FAILED, is_reference=True), ALONE),
            {"spread", "confidence", "differences"},
            id="the reference failed",
        ),
        pytest.param(
            (measured("one", None, None), measured("two", None, None)), {"spread", "confidence"}, id="no sizes"
        ),
        pytest.param(MODELS[1:], set(), id="the reference has no row"),
        pytest.param(MODELS, set(), id="all"),
    ],
)
def test_sections_that_have_nothing_to_show_are_absent(
    show: Callable[..., Opened], models: tuple[ModelResult, ...], absent: set[str]
) -> None:
    opened = show(*models)
    shown = opened.page.locator("main > section").evaluate_all("all => all.filter(s => s.offsetHeight).map(s => s.id)")
    assert set(shown) == SECTIONS - absent
    assert opened.page.locator("#links a").count() == len(shown)
    for button in opened.page.locator(".choice label").all():
        button.click()
    for group in opened.page.locator("#table .group").all():
        group.click()
    assert opened.labels() == []
    assert show(*models, inspect=False).page.locator("#tokens").is_hidden()


def bare(model: ModelResult) -> ModelResult:
    """A model of an old results.json: without errors and distributions."""
    found = model.estimates
    assert found
    against = found.against and replace(
        found.against, kld=replace(found.against.kld, stderr=None), kld_percentiles={},
        kld_histogram=Histogram(-8, 8, (), 0, 0), confidence=(),
        ln_ppl_ratio=replace(found.against.ln_ppl_ratio, stderr=None),
        ppl_ratio=replace(found.against.ppl_ratio, stderr=None),
    )  # fmt: skip
    none = replace(found.blocks, tokens=(), nll=(), kld=None, same_top=None, whole=())
    ppl = replace(found.ppl, stderr=None)
    return replace(model, estimates=replace(found, ppl=ppl, against=against, blocks=none, curve=Curve((), (), None)))


@browsing
def test_results_without_distributions(show: Callable[..., Opened]) -> None:
    """No empty section, no word of bars that are not there; KLD can be drawn all the same."""
    opened = show(*map(bare, MODELS), inspect=False)
    shown = opened.page.locator("main > section").evaluate_all("all => all.filter(s => s.offsetHeight).map(s => s.id)")
    assert shown == ["table", "scatter", "ran"]
    assert opened.texts("#links a") == ["Table", "Quality over size", "What ran"]
    assert opened.page.locator("th[data-column='p99']").count() == 0
    assert opened.page.locator("th[data-column='kld']").count() == 1
    for view in ("PPL", "PPL ratio", "KLD"):
        opened.pick("scatter", view)
        assert opened.page.locator("#scatter .point").count() == len(MODELS)
        assert "rror bar" not in "".join(opened.texts("#scatter .hint"))
    assert "blocks" not in opened.texts("#meaning")[0]


@browsing
@pytest.mark.parametrize("view", ["PPL", "PPL ratio", "KLD"])
def test_error_bars_are_the_pngs(show: Callable[..., Opened], view: str) -> None:
    """As long as Python's errors to 1e-6, on both scales; unpaired ones are named."""
    server = measured("server", 0.3, 5.0, seed=8)
    assert server.estimates
    text = replace(server.estimates, against=None)  # but on the same blocks
    server = replace(server, estimates=text)
    other = replace(server, label="other text", estimates=replace(text, blocks=replace(text.blocks, whole=())))
    run = run_of(*MODELS[:-1], server, other)
    opened = show(*run.models)
    opened.pick("scatter", view)
    expected = {}
    for i, model in enumerate(run.models):
        error, ppl = figures.ppl_error(run, model)[0], model.ppl.value if model.ppl else None
        assert ppl
        if view == "KLD":
            value, error = (model.kld.value, model.kld.stderr) if model.kld else (0.0, None)
        elif view == "PPL":
            value = ppl
        elif model is other:
            continue
        else:
            against = model.estimates.against if model.estimates else None
            base = against.ref_ppl.value if against else REFERENCE.ppl.value  # type: ignore[union-attr]
            value, error = ppl / base, error and error / base  # type: ignore[operator]
        if error:
            expected[i] = value, error
    assert len(expected) == {"PPL": 8, "PPL ratio": 7, "KLD": 6}[view]
    for scale in ("linear", "log"):
        opened.page.locator("#scatter .choice:has(legend:text-is('y scale'))").get_by_text(scale).click()
        to_y = opened.scale("#scatter", "y", log=scale == "log")
        found = {model: (low, high) for model, low, high in opened.bars("#scatter")}
        assert {
            model: pytest.approx((to_y(v - e), to_y(v + e)), abs=0.01) for model, (v, e) in expected.items()
        } == found
    caption = "".join(opened.texts("#scatter .chart .hint"))
    assert {"PPL": "the ratio to the reference's (other text: of the perplexity).", "KLD": "of the mean.",
            "PPL ratio": "the ratio to the reference's."}[view] in caption  # fmt: skip


def with_kld_error(model: ModelResult, factor: float) -> ModelResult:
    """A model whose KLD and buckets have that many times themselves as errors."""
    assert model.estimates
    assert model.estimates.against
    against = model.estimates.against
    buckets = tuple(replace(b, kld=replace(b.kld, stderr=factor * (b.kld.value or 0))) for b in against.confidence)
    wide = replace(against.kld, stderr=factor * (against.kld.value or 0))
    return replace(model, estimates=replace(model.estimates, against=replace(against, kld=wide, confidence=buckets)))


@browsing
def test_the_foot_of_a_logarithm(show: Callable[..., Opened]) -> None:
    """A bar that would reach 0 ends at half the lowest value; 0 has a tick below all; alone, it has a linear axis."""
    models = (REFERENCE, with_kld_error(MODELS[2], 2.0), MODELS[5])
    opened = show(*models)
    to_y = opened.scale("#scatter", "y", log=True)
    low = MODELS[5].kld.value / 2 if MODELS[5].kld and MODELS[5].kld.value else 0.0
    value = MODELS[2].kld.value if MODELS[2].kld and MODELS[2].kld.value else 0.0
    found = {model: ends for model, *ends in opened.bars("#scatter")}
    assert found[1] == pytest.approx([to_y(low), to_y(3 * value)], abs=0.01)
    ticks = opened.page.locator("#scatter .tick[text-anchor='end']")
    at = dict(ticks.evaluate_all("all => all.map(each => [each.textContent, each.getAttribute('y') - 4])"))
    assert opened.centre("bf16 base")[1] == pytest.approx(at["0"])
    assert all(y < to_y(low) < at["0"] for text, y in at.items() if text != "0")
    assert "Hollow, at 0" in "".join(opened.texts("#scatter .hint"))
    for group in ("W4A16", "EXL3"):
        opened.page.locator(f"#scatter .group[data-group='{group}']").click()
    assert opened.page.locator("#scatter .point").get_attribute("data-off") is None
    assert "Hollow" not in "".join(opened.texts("#scatter .hint"))


@browsing
def test_curves_are_pythons(show: Callable[..., Opened]) -> None:
    """Each bin at the middle of its first and last position, and its numbers in the tooltip."""
    opened = show(*MODELS)
    model = MODELS[5]
    assert model.estimates
    edges, kld = model.estimates.curve.edges, model.estimates.curve.kld
    assert kld
    opened.page.locator("#chips .drop").nth(0).wait_for()
    if "EXL3 4.0×" not in opened.texts("#chips .chip"):
        opened.page.locator("#table tr[data-model='5'] td").first.click()
    opened.pick("position", "KLD")
    to_x, to_y = opened.scale("#position", "x", log=True), opened.scale("#position", "y", log=False)
    path = opened.page.locator("#position .curve[data-model='5']").get_attribute("d")
    found = [tuple(map(float, pair.split(","))) for pair in path[1:].split("L")]
    expected = [
        (to_x(math.sqrt(a * (b - 1))), to_y(value or 0))
        for (a, b), value in zip(itertools.pairwise(edges), kld, strict=True)
    ]  # fmt: skip
    assert np.array(found) == pytest.approx(np.array(expected), abs=0.01)
    box = opened.page.locator("#position svg[tabindex]").bounding_box()
    opened.page.mouse.move(box["x"] + found[20][0], box["y"] + 50)
    assert opened.heading() == f"position {edges[20]} to {edges[21] - 1}"
    assert float(opened.tip()["EXL3 4.0"]) == pytest.approx(kld[20], rel=6e-4)


@browsing
def test_histograms_are_pythons(show: Callable[..., Opened]) -> None:
    """Steps at the shares of the tokens, the marks at median and p99."""
    opened = show(*MODELS)
    (model,) = (m for m in MODELS if m.label == "EXL3 4.0")
    assert model.estimates
    assert model.estimates.against
    found, percentiles = model.estimates.against.kld_histogram, model.estimates.against.kld_percentiles
    for drop in opened.page.locator("#chips .drop").all()[::-1]:
        drop.click()
    opened.page.locator("#table tr[data-model='5'] td").first.click()
    to_x, to_y = opened.scale("#spread", "x", log=True), opened.scale("#spread", "y", log=False)
    path = opened.page.locator("#spread .chart .fill").get_attribute("d")
    drawn = [tuple(map(float, pair.split(","))) for pair in path[1:].split("V")[0].split("L")[1:]]
    steps = [
        (to_x(10 ** (found.first + end / found.per_decade)), to_y(100 * count / N))
        for i, count in enumerate(found.counts) for end in (i, i + 1)
    ]  # fmt: skip
    (first,) = {i for i in range(0, len(steps), 2) if abs(steps[i][0] - drawn[0][0]) < 0.01}
    assert np.array(drawn) == pytest.approx(np.array(steps[first : first + len(drawn)]), abs=0.01)
    assert sum(found.counts[first // 2 : (first + len(drawn)) // 2]) > 0.99 * N
    for name, percent in (("median", "50"), ("p99", "99")):
        box = opened.page.locator(f"#spread [aria-label='EXL3 4.0 {name}']").evaluate(
            "each => { const box = each.getBBox(); return box.x + box.width / 2; }"
        )
        assert box == pytest.approx(to_x(percentiles[percent]), abs=0.05)


@browsing
def test_confidence_is_pythons(show: Callable[..., Opened]) -> None:
    """The table's cells, and bars that stay inside the drawing however long they are."""
    models = (REFERENCE, *MODELS[2:5], with_kld_error(MODELS[5], 3.0))
    opened = show(*models)
    rows = opened.page.locator("#confidence tbody tr")
    assert rows.count() == 4
    for i, model in enumerate(models[1:]):
        assert model.estimates
        assert model.estimates.against
        buckets = model.estimates.against.confidence
        assert opened.texts(f"#confidence tbody tr:nth-child({i + 1}) td") == [f"{b.kld.value:.5f}" for b in buckets]
    bars, to_y = opened.bars("#confidence"), opened.scale("#confidence", "y", log=True)
    drawn = sorted({model for model, *_ in bars})
    assert 4 in drawn
    least = min(b.kld.value for i in drawn for b in models[i].estimates.against.confidence) / 2  # type: ignore[union-attr]
    for i in drawn:
        buckets = models[i].estimates.against.confidence  # type: ignore[union-attr]
        ends = [(b.kld.value - b.kld.stderr, b.kld.value + b.kld.stderr) for b in buckets]
        expected = [(to_y(max(low, least)), to_y(high)) for low, high in ends]
        assert [ends for model, *ends in bars if model == i] == [pytest.approx(each, abs=0.01) for each in expected]
    height = float(opened.page.locator("#confidence .axis").get_attribute("y1"))
    assert all(12 <= high <= low <= height for _, low, high in bars)


@browsing
@pytest.mark.parametrize(
    ("case", "count"), [("as it is", 1), ("too short", 0), ("the best left some out", 0), ("two machines", 0)]
)
def test_stars_are_pythons(show: Callable[..., Opened], case: str, count: int) -> None:
    """None where it cannot be told what is best."""

    def changed(model: ModelResult) -> ModelResult:
        assert model.estimates
        found = model.estimates.blocks
        if case == "too short":
            sums = {name: each and (sum(each),) for name, each in vars(found).items() if name in differences.SCORES}
            found = replace(found, tokens=(N,), **sums)
        elif case != "as it is" and model.label == "EXL3 4.0":
            found = replace(found, whole=())
        key = model.label[:4] if case == "two machines" else ""
        return replace(model, estimates=replace(model.estimates, blocks=found), reference_key=key)

    models = [changed(model) for model in (REFERENCE, *MODELS[2:6])]
    opened = show(*models)
    starred = set(opened.texts("tr:has([data-cell='kld'] .best) .label span"))
    assert starred == differences.best(models, "kld")
    assert len(starred) == count


@browsing
def test_a_merged_run(show: Callable[..., Opened]) -> None:
    """Where each row ran, which runs it was made of, which pairs have no KLD, and excerpts of those that have some."""
    machines = {"a": {"cpu": "AMD EPYC"}, "b": {"gpus": ["NVIDIA H200"], "driver": "580.1"}}
    models = [
        replace(model, reference_key=key, provenance={**model.provenance, **machines[key]})
        for model, key in zip((REFERENCE, *MODELS[2:5]), "abab", strict=True)
    ]
    plain_run, labels = run_of(*models), [model.label for model in models]
    origin = {"created": "2026", "command": ["one"], "commit": None, "versions": {"torch": "2"}, "hardware": {}}
    parts = tuple(
        results_json.Part(f"{key}.json", tuple(labels[i::2]), {**origin, "hardware": machines[key]}, {"key": key}, 7.5)
        for i, key in enumerate("ab")
    )
    run = results_json.StoredRun(**vars(plain_run), origin=origin, parts=parts)
    excerpts = inspection_of(run)
    worst = (None, excerpts.worst[1], None, excerpts.worst[3])
    opened = show(run=run, inspect=replace(excerpts, worst=worst))
    assert opened.cells("where") == ["AMD EPYC", "NVIDIA H200, driver 580.1"] * 2
    assert opened.texts("#parts h3") == ["Merged: a.json", "Merged: b.json"]
    assert "AMD EPYC" in opened.texts("#parts dd")
    notes = opened.texts("#table .notes li")
    assert not any(note.startswith("where ") for note in notes)
    assert any(note.startswith("KLD and same top of each row are against the reference as") for note in notes)
    opened.pick("differences", "KLD")
    cells = opened.page.evaluate(
        "[...document.querySelectorAll('.cell[data-value]')].map(c => [c.dataset.a, c.dataset.b])"
    )
    assert {(a, b) for a, b in cells if a != b} == {("1", "3"), ("3", "1")}
    without = ", ".join(models[i].marked_label for i in (0, 2))
    assert opened.texts("#tokens > .hint") == [
        f"Not here, as no report with excerpts was given for their run: {without}."
    ]


@browsing
def test_the_keyboard_keeps_its_place(show: Callable[..., Opened]) -> None:
    """After a radio button, an unselected model, and a pair."""
    opened = show(*MODELS)
    focused = "document.activeElement.getAttribute('aria-label') || document.activeElement.value"
    opened.page.locator("#scatter input[value='kld']").focus()
    for expected in ("ppl", "ratio"):
        opened.page.keyboard.press("ArrowRight")
        assert opened.page.evaluate(focused) == expected
    chips = [text.removesuffix("×") for text in opened.texts("#chips .chip")]
    assert len(chips) > 2
    opened.page.locator("#chips .drop").first.focus()
    for label in chips[1:]:
        opened.page.keyboard.press("Enter")
        assert opened.page.evaluate(focused) == f"unselect {label}"
    cell = opened.page.locator(".cell[data-a='4'][data-b='2']")
    assert cell.get_attribute("role") == "button"
    assert cell.get_attribute("aria-label") == "EXL3 3.0 against W4A16 g128: EXL3 3.0 is better"
    cell.focus()
    opened.page.keyboard.press("Space")
    picked = [opened.page.locator(f"[data-key='pick-{name}']").input_value() for name in "AB"]
    assert picked == ["4", "2"]
    assert opened.page.evaluate("document.activeElement.dataset.key") == "pair-4-2"


@browsing
def test_too_many_for_a_matrix(show: Callable[..., Opened]) -> None:
    crowd = [measured(f"G{i % 2} {i}", None, 4.0, seed=i) for i in range(61)]
    opened = show(*crowd, inspect=False)
    assert opened.page.locator(".matrix").count() == 0
    assert "of the 61, hide groups" in "".join(opened.texts("#differences .hint"))
    assert opened.page.locator("#pair tbody tr").count() == 2
    opened.page.locator("#table .group").first.click()
    assert opened.page.locator(".matrix tbody tr").count() == 30


@browsing
@pytest.mark.parametrize("width", [400, 1400])
def test_long_labels_scroll_no_page(show: Callable[..., Opened], width: int) -> None:
    models = [replace(model, label=f"{model.label}{'x' * 300}") for model in MODELS]
    opened = show(*models, width=width)
    for head in ("#table", ".matrix"):  # which are as wide as they like, but not for one label
        assert opened.page.locator(f"{head} tbody th").first.bounding_box()["width"] < 0.6 * width
    for view in ("KLD", "PPL"):
        opened.pick("scatter", view)
        assert opened.page.evaluate("document.documentElement.scrollWidth") == width


@browsing
def test_print(show: Callable[..., Opened]) -> None:
    """Light whatever the theme, and nothing wider than a page of A4 (718 pixels within its margins)."""
    layers = {"layers": [{**LAYER, "kernel": "LinearEXL3.reconstruct_hgemm"}]}
    crowd = [measured(f"NVFP4 W4A4 emulated {i}", 0.1, 4.5, seed=i, provenance=layers) for i in range(20)]
    opened = show(*MODELS, *crowd, width=1400, color_scheme="dark")
    for _ in range(3):
        opened.page.emulate_media(media="print")
        names = ("paper", "ink", "muted", "grid", "chosen", "raised", "better")
        found = opened.page.evaluate(
            "names => names.map(name => getComputedStyle(document.body).getPropertyValue('--' + name).trim())",
            list(names),
        )
        assert found == ["#ffffff", "#1b1f24", "#57606a", "#e9ebee", "#e8f1f8", "#f6f7f9", "0 114 178"]
        opened.page.emulate_media(media="screen")
        opened.page.locator("#theme").click()
    opened.page.emulate_media(media="print")
    opened.page.set_viewport_size({"width": 718, "height": 1000})
    widths = opened.page.locator("table, svg").evaluate_all(
        "all => all.map(each => each.getBoundingClientRect().right)"
    )
    assert max(widths) <= 718


def test_footnotes_speak_of_the_page() -> None:
    """Not of options, nor of marks that only the terminal has."""
    cached = replace(MODELS[2], cached=True)
    found = html_report.payload(run_of(REFERENCE, cached), None, [])["footnotes"]
    assert any("differences between rows are far more certain" in note for note in found)
    assert any(note.startswith("1 of 2 rows come from the cache; their seconds are") for note in found)
    assert not any("--" in note or "(*)" in note for note in found)
