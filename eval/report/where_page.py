"""The page of ``compare-q where --html``: the picture and the tables, without a script."""

from __future__ import annotations

from functools import partial

from ..plots import where_bars
from ..plots.pictures import Picture
from ..where import where_table
from ..where.results import WhereResult
from . import html_page


def page_of(result: WhereResult) -> str:
    """Return the page."""
    title = result.title or where_bars.title_of(result)
    pictures: dict[str, Picture] = {title: partial(where_bars.where_bars, result)}
    return (
        html_page.environment()
        .get_template("where.html")
        .render(
            title=title,
            style=html_page.style(),
            figures=html_page.figures_of(pictures),
            table=where_table.table_of_parts(result),
            front=where_table.table_of_front(result),
            command=html_page.shell_command(result.command),
            result=result,
        )
    )
