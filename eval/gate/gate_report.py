"""The outcome of a gate, for files and terminals.

That is gate.json, lines for a terminal, Markdown for a pull request, JUnit XML for a CI server.
"""

from __future__ import annotations

import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from ...backends.common import json_files
from ...backends.common.engine_options import describe
from ...backends.common.errors import InputError
from ...backends.common.message_text import printable
from ..common.stored import JsonObject, Stored, Text
from ..results import ModelResult
from ..table.markdown import escaped
from ..table.numbers import significant_text
from .floor import Floor
from .variants import SEPARATOR
from .verdicts import Verdict

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
    run: str = Field(
        description="name of the run of the first variant, whose scores --baseline finds in the "
        "cache"
    )
    floor: tuple[Text, ...] = Field(
        description="the noise floor in words; empty if the first variant failed"
    )
    variants: tuple[Verdict, ...] = Field(
        description="the first one is what the others are compared with"
    )
    conditions: tuple[Text, ...] = Field(
        default=(), description="rows that fail by a --fail-if, and why"
    )
    nearer: tuple[Text, ...] = Field(default=(), description="what --arbiter found")

    @property
    def status(self) -> int:
        """The exit status: 0 if all variants are as before, 1 if not, or if a condition holds.

        3 if a variant failed.
        """
        outcomes = {verdict.outcome for verdict in self.variants}
        if "failed" in outcomes:
            return 3
        if outcomes != {"as before"} or self.conditions:
            return 1
        return 0

    @property
    def is_baseline(self) -> bool:
        """True if other variants can be compared with the first one in a later gate."""
        return self.variants[0].outcome not in ("failed", "not deterministic")

    def json_text(self) -> str:
        """Return the content of gate.json."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def read(cls, file: Path) -> GateResult:
        """Return the gate of a gate.json.

        InputError in one line if it is none, damaged or no baseline.
        """
        name = printable(file)
        content = json_files.read_bytes(file)
        raw = json_files.parsed(content, name)
        if isinstance(raw, dict) and raw.get("gate") == 1:
            raise InputError(
                f"{name}: was written by an older compare_q; make it again: gate ... -o FILE"
            )
        try:
            result = cls.model_validate_json(content)
        except ValidationError as error:
            fault = describe(error, cls.model_fields)
            raise InputError(f"{name}: is not a gate.json: {fault}") from None
        if not result.variants or not result.variants[0].rows:
            raise InputError(f"{name}: is not a gate.json: variants: the first one has no rows")
        if not result.is_baseline:
            raise InputError(
                f"{name}: its first variant is {result.variants[0].outcome!r}, so that no other "
                "variant can be compared with it; give the file of another gate"
            )
        return result


def floor_lines(floors: Mapping[str, Floor], first: Verdict) -> Iterator[str]:
    """Yield lines about the noise floors: limits, parts, and the faults that are found."""
    for text, floor in floors.items():
        lowest = min(floor.klds)
        yield (
            f"noise floor at {text}: {floor.limit:.4g} nats; {len(floor.klds)} copies of "
            f"{first.label} with other roundings have KLD {lowest:.4g} to {max(floor.klds):.4g}; "
            f"faults that add {floor.limit - lowest:.2g} or more are found"
        )
    self_klds = klds_of(first)
    if self_klds:
        klds = ", ".join(f"{kld.text} ({kld.shape})" for kld in self_klds)
        yield f"KLD of {first.label} from itself: {klds}"


class RowKld(NamedTuple):
    """The KLD of a row, as a number and as text, and what distinguishes the row from others."""

    kld: float
    text: str
    shape: str


def klds_of(verdict: Verdict) -> list[RowKld]:
    """Return the KLDs of a variant, without the reference and failed rows."""
    klds = []
    for row in verdict.rows:
        if row.kld is not None and not row.reference:
            text = significant_text(row.kld, 4, row.kld_kind)
            klds.append(RowKld(row.kld, text, shape_of(row)))
    return klds


def shape_of(row: ModelResult) -> str:
    """Return what distinguishes a row from the variant's other rows."""
    return row.label.rpartition(SEPARATOR)[2]


def lines(verdict: Verdict, *, rows: bool = False) -> Iterator[str]:
    """Yield where a variant begins to differ, and what it really used.

    Then come its ``rows``, and the tokens on which it differs most.
    """
    if verdict.where:
        yield f"where: {verdict.where}"
    used = [used_in_words(row) for row in verdict.rows]
    yield used[0]
    for row, words in zip(verdict.rows, used, strict=True):
        is_other = words != used[0]
        if not rows and not is_other:
            continue
        kld = "n/a"
        if row.kld is not None:
            kld = significant_text(row.kld, 4, row.kld_kind)
        line = f"{shape_of(row)}: KLD {kld}"
        if is_other:
            line += f"; {words}"
        yield line
    # The tokens are of this row.
    kind = max(verdict.rows, key=lambda row: row.kld or 0.0).kld_kind
    for token in verdict.worst_tokens:
        kld = "n/a"
        if token.kld is not None:
            kld = significant_text(token.kld, 4, kind)
        text = f"{token.before[-40:]}[{token.token}]".replace("\n", " ")
        yield f"KLD {kld} at position {token.position} of window {token.window}: {text}"


def used_in_words(row: ModelResult) -> str:
    """Return what a row really used."""
    parts = [row.engine_version, row.where, row.kernel]
    if row.attention:
        parts.append(f"attention {row.attention}")
    if row.kv_cache:
        parts.append(f"KV cache {row.kv_cache}")
    parts.append(MODES.get(row.provenance.get("enforce_eager")))
    return ", ".join(part for part in parts if part) or "nothing ran"


def terminal(result: GateResult) -> list[str]:
    """Return the gate as the lines of a terminal."""
    report = [result.text, *result.floor, ""]
    for verdict in result.variants:
        report.append(f"{verdict.label}: {verdict.words}")
        for line in lines(verdict):
            report.append(f"    {line}")
        klds = klds_of(verdict)
        if klds:
            largest = max(klds)
            report.append(f"    largest KLD {largest.text} ({largest.shape})")
    report += result.nearer
    for line in result.conditions:
        report.append(f"failed: {line}")
    return report


def markdown(result: GateResult) -> str:
    """Return the gate as Markdown for a pull request."""
    report = ["## compare-q gate", ""]
    for verdict in result.variants:
        mark = "\N{CROSS MARK}"
        if verdict.outcome == "as before":
            mark = "\N{WHITE HEAVY CHECK MARK}"
        report.append(f"- {mark} **{escaped(verdict.label)}**: {escaped(verdict.words)}")
        for line in lines(verdict, rows=True):
            report.append(f"  - {escaped(line)}")
    for line in (*result.nearer, *result.conditions):
        report.append(f"- {escaped(line)}")
    report.append("")
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    machine = machine_in_words(result.hardware)
    for line in (result.text, *result.floor, versions, machine, result.created):
        report.append(f"{escaped(line)}  ")  # two spaces: a line break in Markdown
    report += ["", "```sh", shlex.join(result.command), "```", ""]
    return "\n".join(report)


def machine_in_words(hardware: Mapping[str, Any]) -> str:
    """Return the GPUs, the driver and the processor of the gate's machine."""
    parts = [*(hardware.get("gpus") or ())]
    for name in ("driver", "cpu"):
        if hardware.get(name):
            parts.append(f"{name} {hardware[name]}")
    return ", ".join(parts)


def junit(result: GateResult) -> str:
    """Return the gate as JUnit XML.

    It has one test case per variant, and one per row that fails by a condition.
    """
    suite = ET.Element(
        "testsuite", name="compare-q gate", timestamp=result.created.partition("+")[0]
    )
    for verdict in result.variants:
        case = ET.SubElement(
            suite, "testcase", classname="compare-q.gate", name=xml_text(verdict.label)
        )
        if verdict.outcome != "as before":
            kind = "failure"
            if verdict.outcome == "failed":
                kind = "error"
            ET.SubElement(case, kind, type=verdict.outcome, message=xml_text(verdict.words))
        output = "\n".join(xml_text(line) for line in lines(verdict, rows=True))
        ET.SubElement(case, "system-out").text = output
    for condition in result.conditions:
        line = xml_text(condition)
        case = ET.SubElement(suite, "testcase", classname="compare-q.gate.fail-if", name=line)
        ET.SubElement(case, "failure", type="fail-if", message=line)
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error")):
        suite.set(name, str(len(suite.findall(f".//{tag}"))))
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def xml_text(text: str) -> str:
    """Return a text on one line with only characters that XML can have.

    Control characters are escaped.
    """
    return NO_XML.sub("\N{REPLACEMENT CHARACTER}", printable(text))
