"""The outcome of a gate: gate.json, lines for a terminal, Markdown for a pull request, JUnit XML for a CI server."""

from __future__ import annotations

import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from compare_q.backends.common import json_files
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import printable
from compare_q.backends.common.options import describe
from compare_q.eval.gate.floor import Floor
from compare_q.eval.gate.variants import SEPARATOR
from compare_q.eval.gate.verdicts import Verdict
from compare_q.eval.results import JsonObject, ModelResult, Stored, Text
from compare_q.eval.table.render import escaped

NO_XML = re.compile("[\ufffe\uffff]")
"""Characters that XML cannot have, and that ``printable`` does not escape."""
MODES: dict[bool | None, str] = {True: "eager", False: "compiled"}


class GateResult(Stored):
    """A gate, as gate.json holds it.  KLDs are in nats per token."""

    gate: Literal[2] = Field(default=2, description="version of this layout; compare_q 0.3 wrote 1")
    created: str = ""
    command: tuple[Text, ...] = ()
    versions: dict[str, str] = Field(default={})
    hardware: JsonObject = Field(default={})
    text: Text = Field(description="the text and its windows")
    run: str = Field(description="name of the run of the first variant, whose scores --baseline finds in the cache")
    floor: tuple[Text, ...] = Field(description="the noise floor in words; empty if the first variant failed")
    variants: tuple[Verdict, ...] = Field(description="the first one is what the others are compared with")
    conditions: tuple[Text, ...] = Field(default=(), description="rows that fail by a --fail-if, and why")
    nearer: tuple[Text, ...] = Field(default=(), description="what --arbiter found")

    @property
    def status(self) -> int:
        """The exit status: 0 all as before, 1 a variant is not, or a condition holds, 3 a variant failed."""
        outcomes = {verdict.outcome for verdict in self.variants}
        return 3 if "failed" in outcomes else int(outcomes != {"as before"} or bool(self.conditions))

    @property
    def is_baseline(self) -> bool:
        """True if other variants can be compared with the first one in a later gate."""
        return self.variants[0].outcome not in ("failed", "not deterministic")

    def json_text(self) -> str:
        """The content of gate.json."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def read(cls, file: Path) -> GateResult:
        """Return the gate of a gate.json; InputError in one line if it is none, damaged or no baseline."""
        content = json_files.read_bytes(file)
        raw = json_files.parsed(content, printable(file))
        if isinstance(raw, dict) and raw.get("gate") == 1:
            raise InputError(f"{printable(file)}: was written by an older compare_q; make it again: gate ... -o FILE")
        try:
            found = cls.model_validate_json(content)
        except ValidationError as error:
            raise InputError(f"{printable(file)}: is not a gate.json: {describe(error, cls.model_fields)}") from None
        if not found.variants or not found.variants[0].rows:
            raise InputError(f"{printable(file)}: is not a gate.json: variants: the first one has no rows")
        if not found.is_baseline:
            raise InputError(
                f"{printable(file)}: its first variant is {found.variants[0].outcome!r}, so that no other variant "
                "can be compared with it; give the file of another gate"
            )
        return found


def floor_lines(floors: Mapping[str, Floor], first: Verdict) -> Iterator[str]:
    """Yield lines about the noise floors: their limits, their parts, and what the gate would have found."""
    for text, floor in floors.items():
        yield (f"noise floor at {text}: {floor.limit:.4g} nats; {len(floor.klds)} copies of {first.label} with other "
               f"roundings have KLD {min(floor.klds):.4g} to {max(floor.klds):.4g}; faults that add "
               f"{floor.limit - min(floor.klds):.2g} or more are found")  # fmt: skip
    if own := klds_of(first):
        yield f"KLD of {first.label} from itself: {', '.join(f'{kld:.4g} ({shape})' for kld, shape in own)}"


def klds_of(verdict: Verdict) -> list[tuple[float, str]]:
    """Return the KLDs of a variant, each with what distinguishes its row; without the reference and failed rows."""
    return [(row.kld, shape_of(row)) for row in verdict.rows if row.kld is not None and not row.reference]


def shape_of(row: ModelResult) -> str:
    """Return what distinguishes a row from the variant's other rows."""
    return row.label.rpartition(SEPARATOR)[2]


def lines(verdict: Verdict, *, rows: bool = False) -> Iterator[str]:
    """Yield what a variant really used, its ``rows``, and the tokens on which it differs most."""
    used = [used_in_words(row) for row in verdict.rows]
    yield used[0]
    for row, words in zip(verdict.rows, used, strict=True):
        kld = "n/a" if row.kld is None else f"{row.kld:.4g}"
        if rows or words != used[0]:
            yield f"{shape_of(row)}: KLD {kld}{'' if words == used[0] else f'; {words}'}"
    for token in verdict.worst_tokens:
        text = f"{token.before[-40:]}[{token.token}]".replace("\n", " ")
        yield f"KLD {token.kld} at position {token.position} of window {token.window}: {text}"


def used_in_words(row: ModelResult) -> str:
    """Return what a row really used."""
    mode = MODES.get(row.provenance.get("enforce_eager"))
    attention, cache = row.attention and f"attention {row.attention}", row.kv_cache and f"KV cache {row.kv_cache}"
    return ", ".join(filter(None, (row.engine_version, row.where, row.kernel, attention, cache, mode))) or "nothing ran"


def terminal(result: GateResult) -> list[str]:
    """Return the gate as the lines of a terminal."""
    found = [result.text, *result.floor, ""]
    for verdict in result.variants:
        found += [f"{verdict.label}: {verdict.words}", *(f"    {line}" for line in lines(verdict))]
        found += [f"    largest KLD {kld:.4g} ({shape})" for kld, shape in sorted(klds_of(verdict))[-1:]]
    return [*found, *result.nearer, *(f"failed: {line}" for line in result.conditions)]


def markdown(result: GateResult) -> str:
    """Return the gate as Markdown for a pull request."""
    found = ["## compare-q gate", ""]
    for verdict in result.variants:
        mark = "\N{WHITE HEAVY CHECK MARK}" if verdict.outcome == "as before" else "\N{CROSS MARK}"
        found += [f"- {mark} **{escaped(verdict.label)}**: {escaped(verdict.words)}"]
        found += [f"  - {escaped(line)}" for line in lines(verdict, rows=True)]
    found += [f"- {escaped(line)}" for line in (*result.nearer, *result.conditions)]
    versions = [f"{name} {version}" for name, version in result.versions.items()]
    has = result.hardware
    machine = [*(has.get("gpus") or ()), *(f"{name} {has[name]}" for name in ("driver", "cpu") if has.get(name))]
    facts = (", ".join(versions), ", ".join(machine))
    found += ["", *(f"{escaped(line)}  " for line in (result.text, *result.floor, *facts, result.created))]
    return "\n".join([*found, "", "```sh", shlex.join(result.command), "```", ""])


def junit(result: GateResult) -> str:
    """Return the gate as JUnit XML: a test case per variant, and one per row that fails by a condition."""
    suite = ET.Element("testsuite", name="compare-q gate", timestamp=result.created.partition("+")[0])
    for verdict in result.variants:
        case = ET.SubElement(suite, "testcase", classname="compare-q.gate", name=xml_text(verdict.label))
        if verdict.outcome != "as before":
            kind = "error" if verdict.outcome == "failed" else "failure"
            ET.SubElement(case, kind, type=verdict.outcome, message=xml_text(verdict.words))
        shown = map(xml_text, lines(verdict, rows=True))
        ET.SubElement(case, "system-out").text = "\n".join(shown)
    for line in map(xml_text, result.conditions):
        case = ET.SubElement(suite, "testcase", classname="compare-q.gate.fail-if", name=line)
        ET.SubElement(case, "failure", type="fail-if", message=line)
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error")):
        suite.set(name, str(len(suite.findall(f".//{tag}"))))
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def xml_text(text: str) -> str:
    """Return a text on one line with only characters that XML can have; control characters are escaped."""
    return NO_XML.sub("\N{REPLACEMENT CHARACTER}", printable(text))
