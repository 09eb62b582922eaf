"""Runs of several texts: their specs, and what came out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.command_line import Run
from tests.support.toy import Ran

LENGTHS = {"prose": 100, "code": 60, "logs": 100}
"""Three texts of 1,000 letters each, and the tokens of their windows, of which there are 9, 15 and 9."""
RUN = ("score_seconds", "load_seconds", "tokens_per_second", "seconds", "timing", "from_cache")
"""What of a model in results.json is another run's in another run."""


@dataclass(frozen=True)
class Texts(Ran):
    """What a command line did, and its results.json."""

    results: dict[str, Any]

    @property
    def texts(self) -> dict[str, dict[str, Any]]:
        """Name -> text; of one text under an empty name too."""
        texts = {text["name"]: text for text in self.results.get("texts", [])}
        return {**texts, "": next(iter(texts.values()))} if len(texts) == 1 else texts

    def model(self, label: str, text: str = "") -> dict[str, Any]:
        """A model's result for a text."""
        return next(model for model in self.texts[text]["models"] if model["label"] == label)

    @property
    def loaded(self) -> list[str]:
        """Labels of the models that were loaded, in order."""
        return re.findall(r"^loading (.*?)(?: \(model \d+ of \d+\))?: [\d.]+ s$", self.err, re.MULTILINE)


RunTexts = Callable[..., Texts]


def write_texts(folder: Path, tokenizer: Path, letters: int = 1000) -> dict[str, Path]:
    """Name -> data spec of a text of random letters."""
    generator, files = np.random.default_rng(5), {}
    for name, length in LENGTHS.items():
        (folder / f"{name}.txt").write_text("".join(generator.choice(list("abcdefgh \n"), letters)))
        spec = {"tokenizer_dir": str(tokenizer), "dataset": "text", "path": f"{name}.txt", "eval_len": length,
                "eval_stride": length}  # fmt: skip
        files[name] = folder / f"{name}.json"
        files[name].write_text(json.dumps(spec))
    return files


def runs_of(compare_q: Run, folder: Path, files: dict[str, Path], models: Sequence[dict[str, Any]]) -> RunTexts:
    """A function that runs the models on the texts of these names (none: all), with flags."""
    (folder / "models.json").write_text(json.dumps(list(models)))

    def run(*names: str, flags: Sequence[object] = ()) -> Texts:
        output = folder / "results.json"
        output.unlink(missing_ok=True)
        data = [files[name] for name in names or files]
        ran = compare_q("-d", *data, "-m", folder / "models.json", "-o", output, *flags)
        return Texts(ran.status, ran.out, ran.err, json.loads(output.read_text()) if output.exists() else {})

    return run


def measured(model: dict[str, Any]) -> dict[str, Any]:
    """What was measured of a model: all that does not say when and where the run was made."""
    return {key: value for key, value in model.items() if key not in (*RUN, "provenance", "notes")}
