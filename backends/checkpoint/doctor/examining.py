"""One model, examined: what it is, what is wrong with it, what could not be checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backends.checkpoint.doctor import dtypes, ends, leftovers, parameters, scales, summary, tokenizers
from backends.checkpoint.doctor.finding import Finding, by_severity
from backends.checkpoint.doctor.subject import Checkpoint
from backends.checkpoint.gguf import GgufModel, read_model
from backends.common.errors import InputError
from backends.common.json_files import is_folder

CHECKS = (scales.check, ends.check, leftovers.check, dtypes.check)
"""What is looked for in a Hugging Face folder alone."""


@dataclass(frozen=True)
class Examination:
    """What the doctor says of one model.

    ``facts``: pairs of a title and what is known under it; ``findings``: the worst first; ``unchecked``: what could not
    be checked, and why.
    """

    name: str
    facts: tuple[tuple[str, str], ...] = ()
    findings: tuple[Finding, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def is_wrong(self) -> bool:
        """Whether a number or an answer would be wrong."""
        return any(found.severity == "wrong" for found in self.findings)

    def with_findings(self, *more: Finding) -> Examination:
        """The same with more findings."""
        return replace(self, findings=by_severity((*self.findings, *more)))


@dataclass(frozen=True)
class Patient:
    """A model on this machine: a folder of safetensors, or a GGUF model.

    ``load_fn``: the engine that its spec names, empty without a spec; ``has_options``: whether the spec gives it any.
    """

    name: str
    path: Path
    load_fn: str = ""
    has_options: bool = False

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, or a folder that holds nothing else."""
        if is_folder(self.path):
            return not any(self.path.glob("*.safetensors")) and any(self.path.glob("*.gguf"))
        return self.path.suffix.lower() == ".gguf"

    @property
    def gguf(self) -> GgufModel | None:
        """Its headers, if it is a GGUF model."""
        return read_model(self.path) if self.is_gguf else None

    @property
    def tokens(self) -> tokenizers.Tokens | str:
        """What it says of its tokens, or why that cannot be read."""
        return tokenizers.tokens_of(self.path, self.gguf)


def examine(patient: Patient, against: Patient | None = None, wanted: Mapping[str, Any] | None = None) -> Examination:
    """Everything that headers, configs and small tensors say of a model; InputError if it cannot be read.

    ``against``: the model whose tokens it should have; ``wanted``: what ``parameters.compared`` said of it.
    """
    model = patient.gguf
    unchecked = []
    if model is not None:
        facts, findings = tuple(summary.of_gguf(model)), list(gguf_ends(model))
    else:
        checkpoint = Checkpoint(patient.path)
        facts = tuple(summary.of_folder(checkpoint))
        findings = [found for check in CHECKS for found in check(checkpoint)]
        if wanted is not None and "unchecked" in wanted:
            unchecked.append(f"tensors against the config: {wanted['unchecked']}")
        elif wanted is not None:
            findings += parameters.check(checkpoint, wanted)
    if against is not None:
        mine, theirs = patient.tokens, against.tokens
        if isinstance(mine, str) or isinstance(theirs, str):
            unchecked.append(f"tokens: {mine if isinstance(mine, str) else theirs}")
        else:
            findings += tokenizers.check(mine, theirs)
    return Examination(patient.name, facts, by_severity(findings), tuple(unchecked))


def gguf_ends(model: GgufModel) -> Iterator[Finding]:
    """A head below 6 bits a weight: llama.cpp's own mixtures keep it at 6 bits or more."""
    bpw = model.storage().bpw_head
    if bpw is not None and bpw < 6:
        tensor = next(tensor for tensor in model.tensors if model.role(tensor) == model.head)
        what = f"the head is quantized to {bpw:.2f} bits a weight ({tensor.type_name}): it makes every logit"
        yield Finding(
            "warning", f"{model.files[0].name}: {tensor.name}", what, "quantize it with a head in q6_K or q8_0"
        )


def located(name: str) -> Path:
    """A local path; InputError if there is nothing."""
    path = Path(name).expanduser()
    if not path.exists():
        raise InputError(f"--doctor: {name}: no such folder or file")
    return path
