"""The benchmark of a whole table: its division of the seconds, by hand, the command that it runs, and the replacement
of llama-perplexity in the comparison with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks import shapes
from benchmarks.table import growth, peers, run, timings
from compare_q.eval.text import cutting


def timing(first: float | None, last: float | None) -> timings.Timing:
    """Return the times of a row that was scored between two times."""
    return {"first_window": first, "last_window": last}


def test_gaps_go_from_a_last_window_to_the_next_first_one() -> None:
    rows = [timing(10.0, 40.0), timing(75.0, 90.0), timing(48.0, 70.0)]  # the third row was scored second
    assert timings.gaps(rows) == [8.0, 5.0]
    assert timings.gaps([timing(10.0, 40.0), timing(39.0, 90.0)]) == [-1.0]
    assert timings.gaps([timing(10.0, 40.0), timing(None, None)]) == [None]


def test_the_parts_of_a_row() -> None:
    seconds = {"load": 5.0, "first_step": 0.5, "scoring": 28.0, "close": 1.0}
    moments = {"started": 109.0, "first_window": 134.5, "last_window": 162.5, "closed": 163.5}
    found = timings.timing_of({"load_seconds": 5.0, "score_seconds": 28.5, "seconds": seconds, "timing": moments})
    assert found == {**seconds, "first_window": 134.5, "last_window": 162.5}


def plan(folder: Path, windows: tuple[int, int, int] = (3, 20, 8)) -> run.Plan:
    """Two rows, one of them the noise floor."""
    rows = [run.Row("a", "bf16", {}), run.Row("b", "bf16", {"noise": "bf16"}), run.Row("c", "bf16", {"dtype": "half"})]
    return run.Plan(folder, folder, rows, windows, {"enforce_eager": True}, {"replicas": 2}, run.PROGRAM, ())


def test_specs(tmp_path: Path) -> None:
    common = {"load_fn": "vllm_score", "model_dir": str(tmp_path / "bf16"), "replicas": 2}
    assert plan(tmp_path).specs() == [
        {**common, "label": "a", "engine": {"enforce_eager": True}, "reference": True},
        {**common, "label": "b", "engine": {"enforce_eager": True, "noise": "bf16"}, "noise_floor": True},
        {**common, "label": "c", "engine": {"enforce_eager": True, "dtype": "half"}},
    ]


def test_prefill_runs_once_for_each_distinct_model_over_the_same_windows(tmp_path: Path) -> None:
    (tmp_path / "bf16").mkdir()
    shapes.write_tokenizer(tmp_path / "bf16")
    found = run.prefill_jobs(plan(tmp_path), gpu=True)
    assert list(found) == ["bf16", 'bf16 {"dtype": "half"}']
    assert found["bf16"]["arguments"] == {"max_model_len": 21, "enforce_eager": True}
    windows = peers.windows_of(found["bf16"])
    tokenizer = Tokenizer.from_file(str(tmp_path / "bf16" / "tokenizer.json"))
    tokens = tokenizer.encode((tmp_path / "text.txt").read_text()).ids
    np.testing.assert_array_equal(windows, [tokens[0:20], tokens[8:28], tokens[16:36]])
    cuts = cutting.exllamav3(np.array(tokens, np.int32), 20, 8)
    np.testing.assert_array_equal(windows, [cut.token_ids for cut in cuts])
    assert peers.windows_of({**found["bf16"], "count": 2}).shape == (2, 20)


def test_a_peer_that_is_not_installed_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"kind": "vllm", "model": "m", "windows": "w", "asked": {}, "arguments": {"load_format": "x", "seed": 1}}
    monkeypatch.setattr(peers, "find_spec", lambda name: name == "vllm")
    found = dict(peers.jobs_of(job, 4))
    assert found["vLLM, prompt_logprobs=20"] == {**job, "count": 4, "asked": {"prompt_logprobs": 20}}
    assert found["lm-eval, vLLM"] == "n/a: lm_eval is not installed"


def test_a_series_changes_one_thing() -> None:
    found = {series: dict(growth.points(series, small=False)) for series in growth.SIZES}
    assert [point.models for point in found["models"].values()] == [1, 5, 10, 20]
    assert [point.windows[0] for point in found["windows"].values()] == [64, 256, 586]
