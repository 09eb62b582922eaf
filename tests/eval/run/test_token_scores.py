"""Per-token scores as parquet: what was given comes back, what was not is absent, what is broken is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from backends.base import TokenScores, Window
from backends.common.errors import ModelError
from eval.common.cache import Cache
from eval.run import token_scores
from tests.support.toy import refusal

KEY = "0" * 40
RUN_RECORD = {"provenance": {"engine": "fake"}, "load_seconds": 1.5, "score_seconds": 2.5}
WINDOWS = [Window(0, np.array([7, 8, 9], np.int32)), Window(3, np.array([4, 5, 6], np.int32), score_from=2)]
FULL: dict[str, list[Any]] = {
    "logprob": [-1.0, -2.0, -3.0],
    "entropy": [0.5, 1.5, 2.5],
    "top1_logprob": [-0.25, -0.5, -0.75],
    "top1": [True, False, True],
    "ref_logprob": [-1.25, -2.25, -3.25],
    "ref_top1_logprob": [-0.125, -0.25, -0.5],
    "kld": [0.0, np.inf, np.nan],
    "same_top": [False, True, True],
}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def given(columns: dict[str, list[Any]]) -> dict[int, TokenScores]:
    """The first two entries of each column for row 0, the third for row 3, in the contract's types."""

    def cut(start: int, stop: int) -> dict[str, Any]:
        types = {"top1": np.bool_, "same_top": np.bool_}
        return {name: np.array(values[start:stop], types.get(name, np.float32)) for name, values in columns.items()}

    return {3: TokenScores(3, **cut(2, 3)), 0: TokenScores(0, **cut(0, 2))}


def test_every_score_of_the_contract_has_a_column() -> None:
    assert ["window", *token_scores.SCORES] == [field.name for field in dataclasses.fields(TokenScores)]


@pytest.mark.parametrize("names", [["logprob"], ["logprob", "entropy", "top1_logprob", "top1"], list(FULL)])
def test_what_was_given_comes_back(cache: Cache, names: list[str]) -> None:
    assert token_scores.load(cache, KEY) is None
    columns = {name: FULL[name] for name in names}
    token_scores.save(cache, KEY, WINDOWS, given(columns), RUN_RECORD)
    stored = token_scores.load(cache, KEY)
    assert stored is not None
    assert list(stored.columns) == names
    for name, values in columns.items():
        np.testing.assert_array_equal(stored.columns[name], np.array(values))
        assert stored.columns[name].dtype == (np.bool_ if name in ("top1", "same_top") else np.float32)
    assert stored.logprob is stored.columns["logprob"]
    assert (stored.windows, stored.run_record) == (2, {**RUN_RECORD, "reference": None})
    for place, expected in ((stored.window, [0, 0, 3]), (stored.position, [1, 2, 2])):
        assert (place.tolist(), place.dtype) == (expected, np.int32)


def test_the_file_says_which_token_each_line_is_of(cache: Cache) -> None:
    token_scores.save(cache, KEY, WINDOWS, given({name: FULL[name] for name in ("logprob", "kld")}), RUN_RECORD)
    table = parquet.read_table(cache.path("scores", KEY, ".parquet"))
    types = [pa.int32(), pa.int32(), pa.int32(), pa.float32(), pa.float32()]
    names = ["window", "position", "token_id", "logprob", "kld"]
    assert list(zip(table.schema.names, table.schema.types, strict=True)) == list(zip(names, types, strict=True))
    assert [table[name].to_pylist() for name in names[:3]] == [[0, 0, 3], [1, 2, 2], [8, 9, 6]]
    assert table["kld"].null_count == 0  # nan is nan


def test_the_run_record_keeps_the_reference(cache: Cache) -> None:
    reference = {"label": "bf16", "contents": "states", "key": "f" * 40}
    token_scores.save(cache, KEY, WINDOWS, given(FULL), {**RUN_RECORD, "reference": reference})
    stored = token_scores.load(cache, KEY)
    assert stored is not None
    assert stored.run_record["reference"] == reference


@pytest.mark.parametrize("name", list(FULL))
def test_a_column_of_another_length_is_refused(cache: Cache, name: str) -> None:
    scored = given(FULL)
    short = {**{key: getattr(scored[0], key) for key in FULL}, name: getattr(scored[0], name)[:1]}
    what = "" if name == "logprob" else f"{name}: "
    with pytest.raises(ModelError, match=f"^window 0: {what}1 of 2 positions were scored$"):
        token_scores.save(cache, KEY, WINDOWS, {**scored, 0: TokenScores(0, **short)}, RUN_RECORD)
    assert token_scores.load(cache, KEY) is None


def test_a_missing_window_is_refused(cache: Cache) -> None:
    with pytest.raises(ModelError, match=r"^window 3: none of 1 positions were scored$"):
        token_scores.save(cache, KEY, WINDOWS, {0: given(FULL)[0]}, RUN_RECORD)
    assert token_scores.load(cache, KEY) is None


def test_windows_with_different_columns_are_refused(cache: Cache) -> None:
    """Either way round: columns that the first window has, or the second."""
    full, plain = given(FULL), given({name: FULL[name] for name in FULL if name not in ("kld", "top1")})
    for mixed in ({0: full[0], 3: plain[3]}, {0: plain[0], 3: full[3]}):
        with pytest.raises(ModelError, match=r"^window 3: some windows have kld, top1 and others do not$"):
            token_scores.save(cache, KEY, WINDOWS, mixed, RUN_RECORD)
        assert token_scores.load(cache, KEY) is None


def rewritten(cache: Cache, table: pa.Table) -> None:
    parquet.write_table(table, cache.path("scores", KEY, ".parquet"))


def test_damaged_scores_name_their_file(cache: Cache) -> None:
    token_scores.save(cache, KEY, WINDOWS, given(FULL), RUN_RECORD)
    file, record = cache.path("scores", KEY, ".parquet"), cache.path("scores", KEY, ".json")
    good, table = file.read_bytes(), parquet.read_table(file)

    def assert_damaged() -> None:
        text = refusal(token_scores.load, cache, KEY)
        assert text.startswith(f"{file}: damaged: ")
        assert text.endswith("; delete it or run with -cc")

    for bad in (b"", good[:-20], b"\0" * len(good)):
        file.write_bytes(bad)
        assert_damaged()
    for bad_table in (
        table.drop_columns("logprob"),
        table.drop_columns("window"),
        table.drop_columns("position"),
        table.set_column(3, "logprob", pa.array([-1.0, None, -3.0], pa.float32())),
        table.set_column(10, "same_top", pa.array([1.0, 0.0, 1.0])),
    ):
        rewritten(cache, bad_table)
        assert_damaged()
    file.unlink()
    assert_damaged()
    file.write_bytes(good)
    for text in ("{", "[]", "null", "{}"):
        record.write_text(text)
        assert_damaged()


def test_other_columns_are_left_alone(cache: Cache) -> None:
    token_scores.save(cache, KEY, WINDOWS, given({"logprob": FULL["logprob"]}), RUN_RECORD)
    table = parquet.read_table(cache.path("scores", KEY, ".parquet"))
    rewritten(cache, table.append_column("mine", pa.array(["a", None, "b"])))
    stored = token_scores.load(cache, KEY)
    assert stored is not None
    assert list(stored.columns) == ["logprob"]


def test_copy(cache: Cache, tmp_path: Path) -> None:
    token_scores.save(cache, KEY, WINDOWS, given(FULL), RUN_RECORD)
    target = tmp_path / "out.parquet"
    target.write_bytes(b"old")
    token_scores.copy(cache, KEY, target)
    assert target.read_bytes() == cache.path("scores", KEY, ".parquet").read_bytes()
    before = target.read_bytes()
    assert refusal(token_scores.copy, cache, "1" * 40, target).startswith(f"{target}: the scores could not be copied: ")
    assert target.read_bytes() == before
    assert "could not be copied" in refusal(token_scores.copy, cache, KEY, tmp_path / "no" / "out.parquet")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "cache", target]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["vLLM W4A16 g32", "EXL3 4.0 [h6]"], ["vLLM_W4A16_g32", "EXL3_4.0__h6_"]),
        (["a b", "a_b", "A/B"], ["a_b", "a_b-2", "A_B-3"]),
        (["a b", "a_b-2", "a/b"], ["a_b", "a_b-2", "a_b-3"]),
        (["../../etc/passwd", ".."], ["_._.._etc_passwd", "_."]),
        (["x" * 300, "x" * 299], ["x" * 50, "x" * 50 + "-2"]),
    ],
)
def test_file_names_are_safe_and_differ(labels: list[str], expected: list[str]) -> None:
    assert token_scores.file_names(labels) == expected
