"""WikiText-2's raw test file -> the rows and the pages that the hub has, as JSON lines, for machines without a hub.

    python benchmarks/wikitext_rows.py wiki.test.raw OUT

writes ``OUT/rows.jsonl`` (key ``text``: the 4,358 rows of ``Salesforce/wikitext``, ``wikitext-2-raw-v1``, split test)
and ``OUT/pages.jsonl`` (key ``page``: the 62 of ``EleutherAI/wikitext_document_level``).  A row is a line with its
newline, and a blank line (a space and a newline in the file) is an empty row; a page begins at a title, a line like
`` = Title = ``.  So do the scripts that made the data sets.  Two lines of formulas look like titles, so that 60
articles are 62 pages on the hub and here: bytes over words, 1,290,527 over 241,335, agree to the last digit with the
published word and byte perplexities of lm-eval's task (pytorch/ao pull request 3394).

Some copies of the file have lost their blank lines and have Windows line ends.  They are put back by the file's own
rule, and the result is the original if its SHA-256 says so; any other file is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

SHA256 = "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"
HEADING = re.compile(r" (=( =)*) [^=].* \1 ")
FORMULAS = (" = 1 rad / s and a nominal impedance k = ", " = 1 henry and capacitance C = ")
"""Lines of running text that look like titles; no blank lines are around them."""
CLOSE = " = The Hustler ( film ) = "
"""The one title with only one blank line before it."""


def original(file: Path) -> str:
    """The text of wiki.test.raw as published; SystemExit if the file is not a copy of it."""
    text = file.read_text(encoding="utf-8")  # every line end as a newline
    for candidate in (text, with_blank_lines(text.removesuffix("\n").split("\n"))):
        if hashlib.sha256(candidate.encode()).hexdigest() == SHA256:
            return candidate
    sys.exit(f"{file}: not WikiText-2's wiki.test.raw, nor a copy of it without blank lines")


def with_blank_lines(lines: Sequence[str]) -> str:
    """One before and after each heading, and one more at the end of each article but the last but one."""
    found: list[str] = []
    for line in lines:
        heading = HEADING.fullmatch(line) is not None and line not in FORMULAS
        ends_article = heading and not line.startswith(" = =") and found and line != CLOSE
        found += [*[" "] * (heading + bool(ends_article)), line, *[" "] * heading]
    return "".join(f"{line}\n" for line in [*found, " "])


def rows(text: str) -> list[str]:
    """Lines with their newlines; blank ones are empty."""
    return [line if line.strip() else "" for line in re.findall("[^\n]*\n", text)]


def pages(text: str) -> list[str]:
    """The text between a title and the next; what stands before the first is dropped if it is blank."""
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        bare = line.replace("= = =", "===").replace("= =", "==").strip()
        if bare.startswith("= ") and bare.endswith(" ="):
            found.append([])
        found[-1].append(line)
    joined = ["\n".join(page) for page in found]
    return [page for page in joined[:-1] if page.strip()] + joined[-1:]


def write(file: Path, key: str, values: Iterable[str]) -> None:
    """JSON lines with one key."""
    file.write_text("".join(json.dumps({key: value}) + "\n" for value in values), encoding="utf-8")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    text, folder = original(Path(sys.argv[1])), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for name, key, values in (("rows", "text", rows(text)), ("pages", "page", pages(text))):
        write(folder / f"{name}.jsonl", key, values)
        print(f"{folder / name}.jsonl: {len(values):,} {name}, {sum(len(each.encode()) for each in values):,} bytes")


if __name__ == "__main__":
    main()
