"""The sections of the report: HTML with the tables and drawings, and what the script shows beside them.

A model is known by its number in the run everywhere: in table rows, marks of drawings, differences and tokens.
"""

from __future__ import annotations

import base64
import itertools
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from typing import Any

from matplotlib.figure import Figure

from compare_q.eval.html.drawings import embedded, swatch
from compare_q.eval.plots import looks, measures, percentiles, position
from compare_q.eval.plots.measures import ACCURACIES, KLD, KLD_VALUES, PPL, SIZES
from compare_q.eval.plots.points import pareto_front, points_of
from compare_q.eval.plots.scatter import scatter_figure
from compare_q.eval.results import flat
from compare_q.eval.results.differences import SCORES, Difference, difference_or_reason, near_lossless
from compare_q.eval.results.digits import number_text, number_with_error
from compare_q.eval.results.run_result import ModelResult, Results, TextResult
from compare_q.eval.table import columns, markdown
from compare_q.eval.table.columns import Cell, Filled
from compare_q.eval.table.footnotes import COMMON_ERROR, MEANS
from compare_q.eval.table.pairs import interval_text, percent_above
from compare_q.eval.table.registry import COLUMNS, LABEL
from compare_q.eval.table.tables import table_of_text
from compare_q.eval.table.verdict import verdict

MEASURES = {**KLD_VALUES, "ppl": PPL, **ACCURACIES}
OVERVIEW = {"kld": KLD, "ppl": PPL, **ACCURACIES}
OVER_BPW = ("median", "p99")
"""Measures that are not drawn over other sizes: the places of the labels of 41 rows take a second or two a drawing."""
MOST_PAIRED = 60
"""Rows of which all pairs are in the report; of more rows each with the next one, and with the reference."""
FEW, CHOSEN = 8, 5
"""So many rows need no selection; so many are selected of more."""
SELECTED = (
    "{chosen} of {rows} rows are selected, the others are pale. A click on a row, a mark or a name selects one, or "
    "takes it back."
)
FOREIGN = re.compile(r" \((?:--[^)]*|\*)\)")
"""In a footnote an option of the command line, and a mark that the page has not."""
QUIET = (LABEL, "kld_median", "kld_p99", "kld_max", "top1", "entropy", "load", "seconds")
"""Columns that a tooltip leaves to the table."""
BEST = "the best quantized model of its column, or not told apart from it"
TITLES = {"nll": "PPL", "kld": "KLD", "same_top": "same top"}
MEANING = (
    "± is one standard error, from disjoint blocks of the text. The error of PPL says how far PPL would move on "
    "another text of this kind. All models would move together: differences between models are far more certain, and "
    "have their own, paired errors below."
)


def tag(name: str, *content: str, **attributes: Any) -> str:
    """An HTML element; ``content`` is HTML.  Attributes that are None or False are left out, "_" in a name is "-"."""
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(str(value))}"')
        for key, value in attributes.items() if value is not None and value is not False
    )  # fmt: skip
    return f"<{name}{shown}>" if name == "input" else f"<{name}{shown}>{''.join(content)}</{name}>"


def hint(text: str) -> str:
    """A paragraph in small print; empty for no text."""
    return tag("p", escape(text), class_="hint") if text else ""


def body(results: Results, inspections: Sequence[Any], names: Sequence[str] | None) -> str:
    """Everything between the page's heading and its data: what is of all texts, and an article for each."""
    several = len(results.texts) > 1
    articles = [article(results, i, bool(inspection), names) for i, inspection in enumerate(inspections)]
    tabs = "".join(
        tag("button", escape(text.name) + (" (failed)" if text.error else ""), type="button", role="tab", data_tab=i,
            title=text.name, aria_controls=f"text-{i}", aria_selected="false", class_="failed" if text.error else None)
        for i, text in enumerate(results.texts)
    ) if several else ""  # fmt: skip
    bar = tag("div", tabs, id="tabs", role="tablist", aria_label="Text") + '<ul id="links"></ul><div id="chips"></div>'
    return (
        (overview(results) if several else "")
        + tag("nav", bar, id="bar", aria_label="Sections and selected models")
        + tag("main", *articles)
    )


def article(results: Results, i: int, inspected: bool, names: Sequence[str] | None) -> str:
    """All that is of one text."""
    text = results.texts[i]
    several = len(results.texts) > 1
    name = tag("h2", escape(text.name)) if several else ""
    found = tag("p", escape(text.subtitle), class_="lead") + verdict_of(replace(results, texts=(text,)))
    same: dict[str, Any] = {"id": f"text-{i}", "data_text": i, "role": "tabpanel" if several else None}
    if text.error:
        failure = tag("p", escape(f"This text failed: {text.error}"), class_="failure")
        return tag("article", name, failure, **same)
    pale = SELECTED.format(chosen=len(preselected(text)), rows=len(text.models)) if preselected(text) else ""
    drawn_over_size = hint(pale) + (chosen_drawings(scatter_drawings(text, i), "y", "x", whole=True) or "")
    parts = (  # kind, title, its short form, and what it holds: None leaves it out, the script fills what is empty
        ("scatter", "Quality over size", "Scatter", drawn_over_size),
        ("table", "Table", "", table_of_models(results, text, names, about(results, text, inspected))),
        ("spread", "Spread of KLD over tokens", "Spread", chosen_drawings(spread_drawings(text, i), "as")),
        ("position", "Position in the window", "Position", chosen_drawings(position_drawings(text, i), "score")),
        ("differences", "Differences", "", "" if len(paired_models(text, "nll")) > 1 else None),
        ("confidence", "KLD by the reference's confidence", "Confidence", confidence_table(text)),
        ("tokens", "Tokens", "", "" if inspected else None),
        ("ran", "What ran", "", ""),
    )
    sections = (
        # Of several texts only the first has the plain names as ids.
        tag("section", tag("h2", escape(title)), content, id=f"{kind}-{i}" if i else kind, class_=kind,
            data_short=short or title)
        for kind, title, short, content in parts if content is not None
    )  # fmt: skip
    return tag("article", name, found, *sections, **same)


def verdict_of(results: Results) -> str:
    """What was found, in words."""
    return tag("p", escape(verdict(results)), class_="verdict")


def preselected(text: TextResult) -> list[int]:
    """The numbers of the rows that are selected at first, at most ``CHOSEN`` of more than ``FEW``, whose picture would
    be a thicket.

    The reference, the noise floor, from the smallest to the best those that none of their size or smaller beats, and
    then the best of the others.
    """
    if len(text.models) <= FEW:
        return []
    measure, floor = measures.chosen(Results((text,)), None, None), text.noise_floor
    points = sorted(points_of([text], measures.BPW, measure)[0], key=lambda point: point.cost)
    front = pareto_front(points)
    chosen = [number for number, model in enumerate(text.models) if model.is_reference or model is floor]
    room = min(CHOSEN - len(chosen), len(front))
    chosen += [front[round(i * (len(front) - 1) / max(room - 1, 1))].number for i in range(room)]
    chosen += [point.number for point in points if not point.unquantized]
    return list(dict.fromkeys(chosen))[:CHOSEN]


def about(results: Results, text: TextResult, inspected: bool) -> str:
    """What the text is, and what the errors mean."""
    spec = text.data.get("spec") or {}
    windows = text.data.get("windows"), text.data.get("window_length")
    origin = results.origin or {}
    rows = {
        "Data": spec.get("path") or spec.get("dataset"),
        "Method": text.data.get("method"),
        "Windows": f"{windows[0]:,} × {windows[1]:,} tokens" if None not in windows else None,
        "Scored tokens": number_text(text.data["scored_tokens"], 0) if text.data.get("scored_tokens") else None,
        "Reference": text.reference and text.reference["label"],
        "Noise floor": text.noise_floor and text.noise_floor.label,
        "Date": str(origin.get("created") or "")[:10],
        "Contains": "excerpts of the text" if inspected else None,
    }
    terms = "".join(tag("div", tag("dt", name), tag("dd", escape(str(value)))) for name, value in rows.items() if value)
    errors = any(model.ppl and model.ppl.stderr is not None for model in text.models)
    return tag("dl", terms, class_="about") + (hint(MEANING) if errors else "")


def group_of(model: ModelResult) -> str:
    """The group of a model, whose rows can be hidden together."""
    return looks.split_label(model.marked_label, model.group)[0]


def group_looks(models: Sequence[ModelResult]) -> looks.Styles:
    """Colour ("": the ink's) and marker of each group; all alike if there are more than can be told apart."""
    groups = [group_of(model) for model in models]
    try:
        return looks.group_styles(groups, "")
    except ValueError:
        return dict.fromkeys(groups, ("", "o"))


def table_of_models(results: Results, text: TextResult, names: Sequence[str] | None, about_text: str) -> str:
    """The table with its buttons, and folded what the text is and the footnotes."""
    described = table_of_text(results, text, names, letters=False)
    of_groups = group_looks(text.models)
    buttons = "".join(
        tag("button", swatch(*of_groups[group]), escape(group), type="button", class_="group", aria_pressed="true",
            data_group=group)
        for group in dict.fromkeys(map(group_of, text.models))
    )  # fmt: skip
    return (
        hint("A column's name sorts by it; a row selects its model for the drawings and the sections below.")
        + tag("div", buttons, class_="groups", role="group", aria_label="Groups shown")
        + table(described.columns, text.models, "Table of models", fixed=names is not None)
        + below_table(
            [FOREIGN.sub("", note) for note in (*described.notes, *described.legend_of(described.columns))], about_text
        )
    )


def below_table(notes: Sequence[str], before: str = "") -> str:
    """The buttons that copy a table, and its footnotes, folded; ``before`` them: HTML."""
    buttons = (tag("button", f"Copy as {name}", type="button", class_="act", data_copy=name.lower())
               for name in ("Markdown", "CSV"))  # fmt: skip
    listed = tag("ul", *(tag("li", escape(note)) for note in notes), class_="notes")
    folded = tag("details", tag("summary", tag("b", f"Notes ({len(notes)})")), before, listed)
    return tag("div", *buttons, class_="acts") + folded


def table(shown: Sequence[Filled], models: Sequence[ModelResult], name: str, *, fixed: bool = False) -> str:
    """A table of models whose columns sort; ``fixed``: the order of its columns was chosen."""
    of_groups = group_looks(models)
    shown = sorted(shown, key=lambda each: each.column.name != LABEL)
    heads = [
        tag("th", tag("button", escape(each.column.title), type="button"), scope="col", title=each.column.means,
            aria_sort="none", data_column=each.column.name, class_=None if each.column.digits is None else "number")
        for each in shown
    ]  # fmt: skip
    rows = []
    for number, model in enumerate(models):
        label = columns.label_of(model)
        box = tag("input", type="checkbox", aria_label=f"select {label}", disabled=bool(model.error))
        first = label_with_swatch(model, of_groups, box)
        cells = [tag("th", first, scope="row", title=model.error or None, data_value=label)]
        cells += [table_cell(each, each.cells[number], model) for each in shown if each.column.name != LABEL]
        kinds = ["reference"] * model.is_reference + ["failed"] * bool(model.error)
        rows.append(tag("tr", *cells, data_model=number, data_group=group_of(model), class_=" ".join(kinds) or None))
    whole = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), data_fixed=fixed)
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=name)


def label_with_swatch(model: ModelResult, of_groups: looks.Styles, before: str = "") -> str:
    """A model's label behind the marker of its group."""
    marker = swatch(*of_groups[group_of(model)])
    return tag("span", before, marker, tag("span", escape(columns.label_of(model))), class_="label")


def table_cell(filled: Filled, cell: Cell, model: ModelResult) -> str:
    """A cell with the value that its column sorts by."""
    column = filled.column
    if column.digits is None:
        words = (model.where or "n/a") if column.name == "where" and cell.value else cell.value
        return tag("td", escape(words), class_="name", title=words, data_column=column.name, data_value=words)
    marks = cell.marks.replace(columns.EARLIER, "")
    best = tag("span", columns.BEST, class_="best", title=BEST)
    with_errors = any(other.error for other in filled.cells)
    error = tag("span", f"± {cell.error}" if cell.error else "", class_="error") if with_errors else ""
    shown = (best if cell.is_best else "") + escape(cell.value + marks)
    return tag("td", tag("span", shown, class_="value"), error, class_="number", data_column=column.name,
               data_value=sort_value(column.times * (column.exact or 0) + column.plus, cell))  # fmt: skip


def sort_value(exact: float, cell: Cell) -> float | None:
    """The number of a cell, None for none; ``exact``: the reference's by definition."""
    try:
        return exact if cell.value == "ref" else float(cell.value.replace(",", ""))
    except ValueError:
        return None


Drawings = dict[tuple[str, ...], tuple[tuple[str, ...], str]]
"""Choices of a drawing -> (what each choice is called, the figure element's HTML)."""


def chosen_drawings(drawings: Drawings, *names: str, whole: bool = False) -> str | None:
    """Drawings of which the reader chooses one, the first at the beginning; None if there are none.

    ``names``: of the choices; ``whole``: the first one is not deflated, and there without the script, too.
    """
    if not drawings:
        return None
    controls = []
    for place, name in enumerate(names):
        options = {keys[place]: words[place] for keys, (words, _) in drawings.items()}
        if len(options) > 1:
            radios = tag("div", *(
                tag("label", tag("input", type="radio", value=key), tag("span", escape(words)))
                for key, words in options.items()
            ))  # fmt: skip
            controls.append(tag("fieldset", tag("legend", name), radios, class_="choice", data_place=place))
    (first, (_, shown)), *others = drawings.items()
    packed = {} if whole else {"data_deflated": deflated(shown)}
    figures = [tag("figure", shown if whole else "", data_choice=" ".join(first), **packed)]
    figures += [tag("figure", data_choice=" ".join(keys), hidden=True, data_deflated=deflated(content))
                for keys, (_, content) in others]  # fmt: skip
    button = {"type": "button", "class": "act"}
    acts = (tag("button", f"Save {kind}", **button, data_save=kind.lower()) for kind in ("SVG", "PNG"))
    return tag("div", *controls, class_="controls") + "".join(figures) + tag("div", *acts, class_="acts")


def deflated(content: str) -> str:
    """HTML that the page inflates when it is asked for: the drawings of 41 rows would else be a third of the file."""
    return base64.b64encode(zlib.compress(content.encode("utf-8", errors="backslashreplace"), 9)).decode()


def drawn(draw: Callable[[], Figure], name: str, title: str, words: Mapping[int, str], marks: int = 1) -> str:
    """A drawing that scrolls where it does not fit, or why there is none."""
    try:
        svg = embedded(draw(), name, title, words, marks)
    except ValueError as error:
        return hint(f"No drawing: {error}.")
    return tag("div", svg, class_="chart")


def scatter_drawings(text: TextResult, i: int) -> Drawings:
    """Each measure, that of ``-p`` first, over each size that a model has; ``OVER_BPW`` over bits per weight alone.

    KV caches are such a size where models differ in theirs.
    """
    first = measures.chosen(Results((text,)), None, None)
    known = {
        key: measure for key, measure in sorted(MEASURES.items(), key=lambda item: item[1] != first)
        if any(measure.of(model) is not None and not model.is_reference for model in text.models) or measure == first
    }  # fmt: skip
    sizes = {
        key: size for key, size in SIZES.items()
        if len({size.of(model) for model in text.models} - {None}) > (key == "kv") or key == "bpw"
    }  # fmt: skip
    drawings: Drawings = {}
    for (of, measure), (over, size) in itertools.product(known.items(), sizes.items()):
        if of in OVER_BPW and over != "bpw":
            continue
        shown, left_out = points_of([text], size, measure)
        words = {p.number: f"{p.label}: {size.name} {p.x:.2f}, {measure.name} {p.shown}" for p in shown}
        draw = partial(scatter_figure, text, size=size, measure=measure, title="")
        drawing = drawn(draw, f"s{i}-{of}-{over}-", f"{measure.title} over {size.name}", words)
        drawings[of, over] = (measure.name, size.name), drawing + hint("; ".join(left_out))
    return drawings


def words_of(text: TextResult) -> dict[int, str]:
    """What the marks of drawings of a text's models are called."""
    return {number: columns.label_of(model) for number, model in enumerate(text.models)}


def spread_drawings(text: TextResult, i: int) -> Drawings:
    """How the KLD of single tokens is spread."""
    if not any(m.estimates and m.estimates.against and m.estimates.against.kld_percentiles for m in text.models):
        return {}
    draw = partial(percentiles.percentile_plot, text)
    return {("spread",): (("quartiles",), drawn(draw, f"spread{i}-", percentiles.TITLE, words_of(text)))}


def position_drawings(text: TextResult, i: int) -> Drawings:
    """Loss and KLD over the position in the window."""
    shown = [model.estimates.curve for model in text.models if model.estimates and len(model.estimates.curve.edges) > 1]
    drawings: Drawings = {}
    for kind, known in {"loss": any(curve.nll for curve in shown), "KLD": any(curve.kld for curve in shown)}.items():
        if known:
            draw = partial(position.by_position, text, kld=kind == "KLD")
            drawing = drawn(draw, f"p{i}{kind}-", f"{kind} by position in the window", words_of(text))
            drawings[kind,] = (kind,), drawing
    return drawings


def confidence_table(text: TextResult) -> str | None:
    """KLD by how sure the reference is of what comes next; None where no model has it."""
    rows = [(i, model, found.against.confidence) for i, model in enumerate(text.models)
            if (found := model.estimates) and found.against and found.against.confidence]  # fmt: skip
    if not rows:
        return None
    of_groups = group_looks(text.models)
    heads = (
        tag("th", f"{100 * bucket.low:g} to {100 * bucket.high:g} %",
            tag("small", f"{100 * bucket.share:.1f} % of tokens"), scope="col", class_="number")
        for bucket in rows[0][2]
    )  # fmt: skip
    lines = []
    for i, model, buckets in rows:
        klds = [b.kld for b in buckets]
        words = ["n/a" if kld.value is None else number_with_error(kld.value, kld.stderr) for kld in klds]
        label = tag("th", label_with_swatch(model, of_groups), scope="row")
        cells = (tag("td", escape(text), class_="number") for text in words)
        lines.append(tag("tr", label, *cells, data_model=i, data_group=group_of(model)))
    head = tag("thead", tag("tr", tag("th", "mean KLD / nats", scope="col"), *heads))
    about = "Tokens by how sure the reference is of what comes next: the largest probability that it gives to any token"
    return hint(f"{about}; ± is one standard error.") + tag(
        "div", tag("table", head, tag("tbody", *lines)), class_="scroll"
    )


def overview(results: Results) -> str:
    """The table and the drawing of all texts."""
    label, *others = (
        each for each in columns.columns_of_texts(results)
        if each.block != columns.MEANS or any(cell.value != "n/a" for cell in each.cells)
    )  # fmt: skip
    # On a phone only the first columns are seen: the label, then means, texts, and what models are.
    shown = [label, *sorted(others, key=lambda each: (each.block == 0, each.block))]
    models = columns.models_of(results).models
    drawings: Drawings = {}
    for key, measure in OVERVIEW.items():
        drawn_points, _ = points_of(results.texts, measures.BPW, measure)
        words = {p.number: f"{p.label}: {measure.name} {p.shown}" for p in drawn_points}
        draw = partial(scatter_figure, *results.texts, measure=measure, title="")
        drawings[key,] = (measure.name,), drawn(draw, f"all-{key}-", f"{measure.title}, mean of the texts", words)
    known = any(results.mean_ppl(label).value is not None for label in results.labels)
    notes = [
        *(f"{text.name} failed: {text.error}" for text in results.texts if text.error),
        *(f"{m.label} on {text.name} failed: {m.error}" for text in results.scored for m in text.failed),
        MEANS if known else "no mean of the texts: every model lacks one of them",
        f"±: one standard error; {FOREIGN.sub('', COMMON_ERROR)}",
    ]
    return tag(
        "section",
        tag("h2", "All texts"),
        verdict_of(results),
        chosen_drawings(drawings, "values", whole=True) or "",
        table(shown, models, "Table of all texts"),
        below_table(notes),
        id="texts",
    )


def overview_data(results: Results) -> dict[str, Any]:
    """What the buttons of the table of all texts copy."""
    if len(results.texts) == 1:
        return {}
    return {"markdown": markdown.markdown_text(results).split("\n"), "csv": flat.csv_text(results)}


def text_data(results: Results, text: TextResult, names: Sequence[str] | None) -> dict[str, Any]:
    """What the script shows of a text, JSON types: words and numbers by the numbers of the models."""
    alone = replace(results, texts=(text,))
    return {
        "labels": [columns.label_of(model) for model in text.models],
        "floor": text.noise_floor and text.noise_floor.label,
        "tips": tips(text),
        "markdown": markdown.markdown_text(alone, names).split("\n"),
        "csv": flat.csv_text(alone, columns.fields_of(names)).split("\r\n"),
        "pairs": {score: pairs_of(text, score) for score in SCORES if len(paired_models(text, score)) > 1},
    }


def tips(text: TextResult) -> list[list[list[str]]]:
    """What a tooltip says of each model: [name, words] each."""
    filled = columns.filled(text, [column.name for column in COLUMNS if column.name not in QUIET])
    rows = []
    for number, model in enumerate(text.models):
        said = [
            [each.column.title, words_in(each.cells[number])] for each in filled
            if each.cells[number].value not in ("", "n/a") and each.column.name != "where"
        ]  # fmt: skip
        said += [["", "a noise floor"]] * model.is_noise_floor
        said += [["\N{DAGGER}", clause] for clause in model.deviations]
        rows.append([*said, *(["", note] for note in model.notes)])
    return rows


def words_in(cell: Cell) -> str:
    """A cell in one line."""
    return cell.value + cell.marks.replace(columns.EARLIER, "") + (f" ± {cell.error}" if cell.error else "")


def paired_models(text: TextResult, score: str) -> list[int]:
    """The numbers of the models that can be compared by a score, the best first."""
    models = []
    for number, model in enumerate(text.models):
        blocks = model.estimates.blocks if model.estimates else None
        if blocks is not None and score in blocks.whole and any(blocks.tokens):
            sums: tuple[float, ...] = getattr(blocks, score)
            models.append((sum(sums) / sum(blocks.tokens) * (-1 if score == "same_top" else 1), number))
    return [number for _, number in sorted(models)]


def pairs_of(text: TextResult, score: str) -> dict[str, Any]:
    """The differences by a score: ``order``, the best model first, and ``of`` two models' numbers "3-5", lesser first.

    A difference is [the first minus the second, its 95 % interval, verdict, PPL in percent]; the verdict is 1 if the
    first is better, -1 if the second is, 0 if they are not told apart, and 2 if KLD does not rank them.  Instead of it
    there may be the reason why it is not known.
    """
    order, near = paired_models(text, score), near_lossless(text.models)
    count = len(text.models)
    numbers = list(itertools.combinations(range(count), 2))
    if count > MOST_PAIRED:
        numbers = [(i, j) for i, j in numbers if j == i + 1 or any(text.models[k].is_reference for k in (i, j))]
    pairs: dict[str, Any] = {}
    for i, j in numbers:
        one, other = text.models[i], text.models[j]
        if one.error or other.error:
            continue
        found = difference_or_reason(one, other, score)
        ranked = score != "kld" or not {one.label, other.label} <= near
        pairs[f"{i}-{j}"] = found if isinstance(found, str) else difference_words(found, score, ranked=ranked)
    return {"title": TITLES[score], "order": order if count <= MOST_PAIRED else [], "of": pairs}


def difference_words(found: Difference, score: str, *, ranked: bool) -> list[Any]:
    """A difference as ``pairs_of`` has it."""
    times = 100 if score == "same_top" else 1
    stderr = None if found.stderr is None else times * found.stderr
    value = number_with_error(times * found.value, stderr, sign=True)
    interval = interval_text(found, times) or "n/a"
    better = 1 if (found.value > 0) == (score == "same_top") else -1
    verdict = 0 if not found.is_seen else better if ranked else 2
    return [value, interval, verdict, *([percent_above(found)] if score == "nll" else [])]
