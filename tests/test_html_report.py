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
from eval import differences, digits, html_report, report, tables
from eval import estimates as estimating
from eval.inspector import Damaged, Inspection, Passage
from eval.results import ModelResult, RunResult

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
    return ModelResult(label, "fake", size, found, rows=4, score_seconds=2.0, provenance=provenance, **facts)


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
        assert self.page.locator("#tip").is_visible()
        return self.texts("#tip strong")[0]

    def tip(self) -> dict[str, str]:
        names, values = self.texts("#tip dt"), self.texts("#tip dd:not(.wide)")
        return dict(zip(names, values, strict=True))

    def pick(self, section: str, text: str) -> None:
        self.page.locator(f"#{section} .choice").get_by_text(text, exact=True).click()

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

    def show(*models: ModelResult, inspect: bool = True, width: int = 1400, **context: Any) -> Opened:
        run, file = run_of(*models), tmp_path / f"report{len(opened)}.html"
        html_report.write(run, inspection_of(run) if inspect else None, file, ["compare_q.py", "-d", "<d>"])
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
    again, inspection = report.load(file)
    before, after = (json.loads(json.dumps(report.run_json(each, [])["models"])) for each in (run, again))
    assert before == after
    html_report.write(again, inspection, tmp_path / "again.html", ["other"])
    assert report.load(tmp_path / "again.html") == (again, inspection)
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
    opened.pick("scatter", "PPL")
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


LABELS_AND_POINTS = "#scatter :is(.label, .level-name)", "#scatter .point .mark"


@browsing
@pytest.mark.parametrize("width", [400, 1400])
def test_no_label_covers_anything(show: Callable[..., Opened], width: int) -> None:
    """Labels touch no point and no other label, in any view; the page is no wider than the window."""
    crowd = [measured(f"G{i % 7} number {i}", 0.01 * 1.5 ** (i % 13), 3 + (i * 7 % 11) / 4, seed=i) for i in range(30)]
    opened = show(*MODELS, *crowd, width=width)
    boxes = """kind => [...document.querySelectorAll(kind)].map(node => {
        const box = node.getBoundingClientRect(); return [box.left, box.top, box.right, box.bottom]; })"""
    for view in ("KLD", "PPL", "PPL ratio"):
        opened.pick("scatter", view)
        labels, points = (opened.page.evaluate(boxes, kind) for kind in LABELS_AND_POINTS)
        assert len(labels) > 8
        # Letters reach less far than the box of a line of text: 1 pixel of it may.
        touching = [
            (a, b) for a, b in itertools.chain(itertools.combinations(labels, 2), itertools.product(labels, points))
            if min(a[2], b[2]) - max(a[0], b[0]) > 1 and min(a[3], b[3]) - max(a[1], b[1]) > 2
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
            one, other = (MODELS[int(i)].estimates.stretches for i in (a, b))  # type: ignore[union-attr]
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
        expected = differences.between(a.estimates.stretches, b.estimates.stretches, name)
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
    assert opened.page.locator("#tokens select").input_value() == "6"
    assert opened.page.locator("#scatter .ring").count() == 2
    opened.page.locator("#spread .small", has_text="GGUF Q2_K").click()
    assert curves.count() == 3
    opened.page.locator("#position svg[tabindex]").focus()
    for position in (2, 3):
        opened.page.keyboard.press("ArrowRight")
        assert opened.heading() == f"position {position}"
        assert opened.texts("#tip dt") == ["EXL3 4.0", "GGUF Q4_K", "GGUF Q2_K"]


@browsing
def test_tokens(show: Callable[..., Opened]) -> None:
    """Texts as they are, coloured by the selected model's KLD; a hover tells the numbers; the damaged ones below."""
    opened = show(*MODELS)
    opened.page.locator("#tokens select").select_option("2")
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
    assert opened.texts("#worst tbody td") == ["4.25", "50.0 %", "1.0 %", "before\n <i> after"]
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
