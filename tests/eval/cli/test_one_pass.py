"""A run that names models and texts loads each model once, and scores 32 windows that are spread
over the text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from compare_q.eval.cli.shorthand import with_default_windows
from compare_q.eval.specs.spec_files import parse_data_spec
from compare_q.eval.specs.spec_types import DataSpec
from compare_q.eval.stats.windows_needed import WINDOWS
from tests.support.fake_engine import FakeEngine, windows_asked
from tests.support.toy import Run, Specs


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each model that loads from now on adds its label."""
    labels = list[str]()
    monkeypatch.setattr(FakeEngine, "load", lambda self: labels.append(self.planned.label))
    return labels


def test_one_pass_and_more_windows_as_the_last_line_says(
    compare_q: Run,
    toy_model: Path,
    long_text: Path,
    tmp_path: Path,
    loads: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model with a position that is NaN has a row without a precision, a model that fails has a
    row with the reason.

    Neither makes the others score more windows, or loses them.  With noise of standard deviation 2
    on each logit, the KLD of 32 windows of 8 tokens is known to about 6 %.
    """
    scored_windows = windows_asked(monkeypatch)
    model = f"{toy_model}@fake:vocab_size=500,boost=8.0"
    models = [
        f"ref={model}",
        f"good={model},random=2.0",
        f"broken={model},random=2.0,nan_windows=[3]",
        f"fails={model},fail=20",
    ]
    file = tmp_path / "r.json"
    line = [*models, "-d", long_text, "--eval-len", 8, "-o", file]
    first = compare_q(*line)
    assert first.status == 1, first.err
    assert sorted(loads) == ["broken", "fails", "good", "ref"]
    # The 21st window of the model that fails has no scores.
    assert len(scored_windows) == 3 * WINDOWS + 21
    results = json.loads(file.read_text())
    rows = {row["label"]: row for row in results["models"]}
    for label in ("ref", "good", "broken"):
        assert rows[label]["windows"] == WINDOWS
    assert rows["broken"]["kld_non_finite"] == 1
    assert rows["fails"]["error"]
    (text,) = results["data"]["texts"]
    assert text["windows_of_the_text"] == 624
    (precision,) = [text_line for text_line in first.out.splitlines() if "% (good)" in text_line]
    assert "broken (1 token " in precision
    match = re.search(r"-r (\d+),", first.out)
    assert match is not None, first.out
    more = int(match[1])
    assert WINDOWS < more < 624

    loads.clear()
    scored_windows.clear()
    second = compare_q(*line[:2], "-d", long_text, "--eval-len", 8, "-r", more)
    assert second.status == 0, second.err
    assert sorted(loads) == ["good", "ref"]
    assert sorted(scored_windows) == sorted([*range(WINDOWS, more)] * 2)


def test_a_store_with_fewer_windows_limits_the_run(
    compare_q: Run, toy_model: Path, long_text: Path, tmp_path: Path
) -> None:
    """A store of 20 windows, which no model of the run can extend: 20 windows are scored, and no
    more are proposed.
    """
    model = f"{toy_model}@fake:vocab_size=500,boost=8.0"
    store = tmp_path / "store"
    line = ["-d", long_text, "--eval-len", 8, "-lf", store, "-o", tmp_path / "r.json"]
    repeated = compare_q(f"ref={model}", f"other={model},random=0.1", *line, "-r", 20)
    assert repeated.status == 0, repeated.err
    ran = compare_q(f"good={model},random=2.0", *line)
    assert ran.status == 0, ran.err
    results = json.loads((tmp_path / "r.json").read_text())
    assert (results["data"]["windows"], results["reference"]["windows"]) == (20, 20)
    assert "% (good)" in ran.out
    assert not re.search(r"-r \d", ran.out)
    refused = compare_q(f"good={model},random=2.0", *line, "-r", 32)
    assert refused.status == 2
    assert re.search(r"\b20 of .*\b32 .* -r 20$", refused.err.splitlines()[-1])


def test_texts_with_a_default_number_of_windows() -> None:
    """Spread texts without a number have it; conversations, first windows and numbers of a spec
    stay as they are.
    """

    def text(**keys: object) -> DataSpec:
        spec_keys = {
            "tokenizer_dir": "t",
            "dataset": "text",
            "path": "p",
            "eval_len": 4,
            "eval_stride": 4,
            "sample": "spread",
            **keys,
        }
        present_keys = {key: value for key, value in spec_keys.items() if value is not None}
        return parse_data_spec(present_keys, Path("d.json"))

    texts = {
        "spread": text(),
        "five": text(max_rows=5),
        "first": text(sample="first"),
        "chat": text(dataset="chat", eval_stride=None, sample=None, max_rows=7),
    }
    sized = with_default_windows(texts, None)
    numbers = {name: spec.max_rows for name, spec in sized.items()}
    assert numbers == {"spread": WINDOWS, "five": 5, "first": None, "chat": 7}


def test_model_specs_score_every_window_of_a_spread_text(
    compare_q: Run, write_specs: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a call that names its models has a default number of windows."""
    scored_windows = windows_asked(monkeypatch)
    data, models = write_specs(None, eval_len=20, eval_stride=20, sample="spread")
    ran = compare_q("-d", data, "-m", models)
    assert ran.status == 0, ran.err
    # Of 1,000 / 20 windows, the last one would need a token after the text.
    assert len(scored_windows) == 49
