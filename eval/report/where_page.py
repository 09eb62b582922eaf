"""The page of ``compare-q where --html``: pictures, tables and recipes, without a script."""

from __future__ import annotations

from functools import partial

from ..plots import where_bars, where_front
from ..plots.pictures import Picture
from ..where import recipe_text, where_table
from ..where.results import WhereResult
from . import html_page


def page_of(result: WhereResult) -> str:
    """Return the page."""
    title = result.title or where_bars.title_of(result)
    pictures: dict[str, Picture] = {title: partial(where_bars.where_bars, result)}
    if result.recipes:
        front_title = where_front.title_of(result)
        pictures[front_title] = partial(where_front.where_front, result)
    return (
        html_page.environment()
        .get_template("where.html")
        .render(
            title=title,
            style=html_page.style(),
            figures=html_page.figures_of(pictures),
            table=where_table.table_of_parts(result),
            front=where_table.table_of_front(result),
            recipe_sentences=[recipe_text.sentence_of(each, result) for each in result.recipes],
            command=html_page.shell_command(result.command),
            result=result,
        )
    )
