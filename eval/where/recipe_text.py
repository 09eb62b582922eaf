"""The recipes of ``compare-q where`` as sentences and lists to paste."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ...backends.common.message_text import amount
from ..common.terminal import say
from ..table import markdown
from ..table.numbers import KLD_DIGITS, error_text, number_text
from .recipe import FULL_BITS
from .results import Measured, Recipe, WhereResult

MOST_NAMES = 8
"""Parts that a sentence names."""
FENCE = "```"


def sentence_of(recipe: Recipe, result: WhereResult) -> str:
    """Return the sentence on a recipe: what to keep, and the KLD and the size then."""
    outcome = f"{kld_text(recipe)}, {size_text(recipe, result)}"
    if not recipe.is_reached:
        return (
            f"{recipe.target}: cannot be reached with parts whose share is above 0 for certain; "
            f"the smallest KLD: {kept_text(recipe)}: {outcome}"
        )
    if not recipe.parts:
        return f"{recipe.target}: {reason_without_parts(recipe)}: {outcome}"
    return f"{recipe.target}: {kept_text(recipe)}: {outcome}"


def kept_text(recipe: Recipe) -> str:
    """Return which parts are kept: "keep down, o and 3 more in 16 bits"."""
    if not recipe.parts:
        return "no part is kept"
    names = ", ".join(recipe.parts[:MOST_NAMES])
    n_more = len(recipe.parts) - MOST_NAMES
    if n_more > 0:
        names += f" and {n_more} more"
    return f"keep {names} in {recipe.keep_bits} bits"


def reason_without_parts(recipe: Recipe) -> str:
    """Return why a recipe that reaches its target keeps nothing."""
    if recipe.target.startswith("bpw"):
        return "no part fits into this size"
    return "is reached without keeping anything"


def kld_text(recipe: Recipe) -> str:
    """Return the KLD, measured or as a forecast."""
    if recipe.keep_bits == FULL_BITS:
        return f"KLD {measured_text(recipe.kld)}"
    return f"forecast of the KLD {measured_text(recipe.forecast)}"


def measured_text(measured: Measured | None) -> str:
    """Return a KLD with the digits that a target can be compared with, and its error."""
    if measured is None:
        return "n/a"
    text = number_text(measured.value, KLD_DIGITS)
    if measured.stderr is not None:
        text += f" ± {error_text(measured.stderr)}"
    return f"{text} nats"


def size_text(recipe: Recipe, result: WhereResult) -> str:
    """Return the bits per weight of all modules that can be exchanged."""
    if not result.n_weights:
        return "size n/a"
    return f"{recipe.bits / result.n_weights:.3f} bits per weight"


def print_recipes(result: WhereResult, console: Console) -> None:
    """Print the recipes with their lists."""
    for recipe in result.recipes:
        say("", sentence_of(recipe, result), *recipe.notes, console=console)
        for each in recipe.lists:
            title = f"{each.tool} ({amount(len(recipe.modules), 'module')}):"
            say("", title, *each.text.splitlines(), console=console)


def markdown_of(result: WhereResult) -> str:
    """Return the recipes with their lists as Markdown; "" if there are none."""
    lines: list[str] = []
    for recipe in result.recipes:
        lines += ["", markdown.escaped(sentence_of(recipe, result)), ""]
        lines += list_lines(recipe.notes)
        for each in recipe.lists:
            lines += [markdown.escaped(f"{each.tool}:"), "", FENCE, each.text.rstrip(), FENCE, ""]
    return "".join(f"{line}\n" for line in lines)


def list_lines(notes: Sequence[str]) -> list[str]:
    """Return notes as lines of a Markdown list, with an empty line at the end."""
    if not notes:
        return []
    return [*[f"- {markdown.escaped(note)}" for note in notes], ""]
