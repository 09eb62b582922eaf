"""What the doctor foretells of vLLM's kernels, before a weight is read, beside what ran in a table.

    python -m benchmarks.foretold MODELS.json RESULTS.json [--output foretold.json]

MODELS.json is the table's model specs, whose folders must be there; RESULTS.json is what it has yielded on this
machine.  A row with options of its own ("emulate") may run otherwise than foretold: its line says which options.  Exit
status 1 if another row does.  Engines that have no choice, or choose when they see the weights, foretell nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compare_q.backends.common import machine
from compare_q.backends.vllm.engine import VllmEngine
from compare_q.eval.cli.doctor import kernels
from compare_q.eval.common.processes import apart
from compare_q.eval.results import results_json
from compare_q.eval.specs import reading

EAGER = "enforce_eager"
"""The option of all rows, which chooses no kernel."""


@dataclass(frozen=True)
class Compared:
    """One row: what was foretold of its checkpoint, and what ran, a line a kernel."""

    label: str
    options: dict[str, Any]
    foretold: list[str]
    ran: list[str]

    @property
    def is_same(self) -> bool:
        """Whether the same kernels ran for as many layers of the same weights and activations."""
        return sorted(self.foretold) == sorted(self.ran)


def compared(models: Path, results: Path) -> list[Compared]:
    """Every row of vLLM that the results have."""
    (text,) = results_json.load(results)[0].texts
    ran = {model.label: model for model in text.models if not model.error}
    specs = [spec for spec in reading.load_model_specs([models]) if spec.load_fn == "vllm_score" and spec.name in ran]
    folders = sorted({spec.located for spec in specs})
    predictor = VllmEngine.predictor()
    if isinstance(predictor, str):
        raise SystemExit(predictor)
    told = dict(zip(folders, apart(predictor, "asking vLLM", folders=folders), strict=True))
    return [
        Compared(
            spec.name,
            {key: value for key, value in spec.options.items() if key != EAGER},
            kernels(told[spec.located]),
            kernels(ran[spec.name].provenance["layers"]),
        )
        for spec in specs
    ]


def main(words: Sequence[str]) -> int:
    """``python -m benchmarks.foretold``; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    rows = compared(arguments.models, arguments.results)
    for row in rows:
        verdict = "as foretold" if row.is_same else f"otherwise: foretold {'; '.join(row.foretold)}"
        options = f", with {json.dumps(row.options)}" if row.options else ""
        print(f"{row.label}{options}: {'; '.join(row.ran)}: {verdict}")
    if arguments.output:
        found = {
            "commit": machine.commit(), "versions": VllmEngine.versions(),
            "gpus": [str(gpu) for gpu in machine.gpus()], "rows": [asdict(row) | {"same": row.is_same} for row in rows],
        }  # fmt: skip
        arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(not rows or any(not row.is_same and not row.options for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
