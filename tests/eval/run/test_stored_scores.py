"""Token scores of a model, joined from segments.

Parquet; damaged segments are reported and scored again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from compare_q.backends.base import KldKind, TokenScores, Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.scoring import segments
from compare_q.backends.worker import worker
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.output_files import file_names
from compare_q.eval.run import stored_scores
from compare_q.eval.run.rows import file_bytes
from compare_q.eval.run.slice_masks import slices_of
from compare_q.eval.specs.spec_files import parse_data_spec
from compare_q.eval.text.eval_data import EvalData
from compare_q.eval.text.text_windows import TextWindows
from tests.support.checkpoints import write_checkpoint
from tests.support.comparisons import N_WINDOWS, Compare, fake
from tests.support.fake_engine import digests_asked
from tests.support.run_models import run_model
from tests.support.toy import planned, refusal

KEY = "0" * 40
TAG = "0123456789abcdef"
WINDOWS = (
    Window.scored_from(0, np.array([7, 8, 9], np.int32)),
    Window.scored_from(1, np.array([4, 5, 6], np.int32), first=2),
)
FULL: dict[str, list[Any]] = {
    "logprob": [-1.0, -2.0, -3.0],
    "kld": [0.0, np.inf, np.nan],
    "same_top": [False, True, True],
}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def scores(window: int, names: Any) -> tuple[Window, TokenScores]:
    """Return the first two entries of each column for window 0, or the third for window 1.

    They have the contract's types.
    """
    which = slice(0, 2) if window == 0 else slice(2, 3)
    columns = {name: np.array(FULL[name][which], segments.SCORE_COLUMNS[name]) for name in names}
    return WINDOWS[window], TokenScores(window, **columns)


def keep(cache: Cache, names: Any = FULL, *, session: str = "s", windows: Any = (0, 1)) -> None:
    """Write scores of some windows in one segment, which took 2.5 s, and a run's record."""
    keep_scores(cache, [scores(window, names) for window in windows], session)


def keep_scores(cache: Cache, scored: list[tuple[Window, TokenScores]], session: str = "s") -> None:
    """Write these scores, as ``keep``."""
    folder = cache.path("scores", KEY, "")
    segments.commit(folder, TAG, scored, session, 2.5)
    record = {"known": {"engine": "fake"}, "provenance": {"notes": ["of both", f"of {session}"]}}
    segments.write_record(folder, session, {**record, "load_seconds": 1.5, "reference": {}})


@pytest.fixture
def data(tmp_path: Path) -> EvalData:
    spec = {"tokenizer_dir": "t", "dataset": "text", "path": "a", "eval_len": 3, "eval_stride": 3}
    parsed = parse_data_spec(spec, tmp_path)
    text = TextWindows(
        "text", parsed, WINDOWS, 6, 9, "", "", "", tmp_path, (0, 3), len(WINDOWS), None
    )
    return EvalData.joined([text])


def load(cache: Cache, data: EvalData) -> stored_scores.StoredScores:
    stored = stored_scores.look_up(cache, KEY, TAG, data, {}).scores
    assert stored is not None
    return stored


def test_windows_of_several_sessions(cache: Cache, data: EvalData) -> None:
    keep(cache, windows=[0], session="one")
    lookup = stored_scores.look_up(cache, KEY, TAG, data, {})
    assert (lookup.scores, lookup.missing) == (None, {WINDOWS[1].digest})
    keep(cache, windows=[1], session="two")
    stored = load(cache, data)
    assert sorted(stored.run_record["provenance"]["notes"]) == ["of both", "of one", "of two"]
    assert (stored.run_record["provenance"]["engine"], stored.run_record["load_seconds"]) == (
        "fake",
        1.5,
    )
    assert (stored.sessions, stored.run_record["score_seconds"]) == (2, 5.0)
    assert stored.columns["kld"].tolist()[:2] == FULL["kld"][:2]
    cache.clear("scores", KEY)
    keep(cache, windows=[0], session="one")
    keep(cache, [name for name in FULL if name != "kld"], windows=[1], session="two")
    with pytest.raises(
        ModelError, match=r"^window 1: some windows have kld and others do not; run with -cc$"
    ):
        load(cache, data)


def test_stored_scores_have_the_kind_of_their_kld(cache: Cache, data: EvalData) -> None:
    kept: list[tuple[Window, TokenScores]] = []
    for number in (0, 1):
        window, window_scores = scores(number, FULL)
        kept.append((window, replace(window_scores, kld_kind="bound")))
    keep_scores(cache, kept)
    assert load(cache, data).kld_kind == "bound"


@pytest.mark.parametrize("kind", ["exact", "bound", "estimate"])
def test_token_scores_have_the_kind_of_a_kld_that_is_not_exact(
    cache: Cache, data: EvalData, tmp_path: Path, kind: KldKind
) -> None:
    stored = replace(load_kept(cache, data), kld_kind=kind)
    stored_scores.write_parquet(stored, data, tmp_path / "t.parquet")
    table = parquet.read_table(tmp_path / "t.parquet")
    assert ("kld_kind" in table.column_names) == (kind != "exact")
    if kind != "exact":
        assert table["kld_kind"].to_pylist() == [kind] * 3


@pytest.mark.parametrize("kind", ["exact", "bound", "estimate"])
def test_a_choice_by_the_token_itself_has_no_estimated_kld(
    cache: Cache, data: EvalData, kind: KldKind
) -> None:
    """The second of three tokens is special; its mask depends on the token that was drawn."""
    text = replace(data.texts[0], special=np.array([9], np.int32))
    stored = replace(load_kept(cache, data), kld_kind=kind)
    by_name = slices_of(stored, EvalData.joined([text]), is_reference=False)
    assert by_name["special"].tokens == 1
    assert (by_name["special"].kld is None) == (kind == "estimate")
    assert by_name["begin"].kld is not None


def load_kept(cache: Cache, data: EvalData) -> stored_scores.StoredScores:
    """Return the scores of both windows with finite KLDs."""
    keep(cache)
    stored = load(cache, data)
    return replace(stored, columns={**stored.columns, "kld": np.ones(3, np.float32)})


def test_the_file_says_which_token_each_line_is_of(
    cache: Cache, data: EvalData, tmp_path: Path
) -> None:
    keep(cache, ["logprob", "kld"])
    file = tmp_path / "out.parquet"
    nowhere = tmp_path / "no" / "out.parquet"
    file.write_bytes(b"old")
    stored_scores.write_parquet(load(cache, data), data, file)
    table = parquet.read_table(file)
    names = ["window", "position", "token_id", "logprob", "kld"]
    assert table.schema.names == names
    assert table.schema.types == [pa.int32()] * 3 + [pa.float32()] * 2
    assert [table[name].to_pylist() for name in names[:4]] == [
        [0, 0, 1],
        [1, 2, 2],
        [8, 9, 6],
        FULL["logprob"],
    ]
    # NaN is a score, and not a missing value.
    assert table["kld"].null_count == 0
    message = refusal(stored_scores.write_parquet, load(cache, data), data, nowhere)
    assert message.startswith(f"{nowhere}: the scores could not be written: ")
    assert not nowhere.parent.exists()


@pytest.mark.parametrize("what", ["a segment", "the record", "no record"])
def test_what_is_damaged_is_said_and_scored_again(
    measured: Compare, own_cache: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each window is in its own segment, so that only one is scored again.

    A missing record is written again.
    """
    monkeypatch.setattr(worker, "COMMIT_S", 0.0)
    scored = digests_asked(monkeypatch)
    first = measured([fake("one", boost=3.0)])
    digests = [digest for _, digest in scored]
    scored.clear()
    (folder,) = (own_cache / "scores").iterdir()
    (record,) = folder.glob("record.*")
    file_of = {segment.windows[0].window: segment.file for segment in segments.segments_in(folder)}
    assert len(file_of) == len(digests) == N_WINDOWS
    damaged = file_of[digests[1]] if what == "a segment" else record
    damaged.unlink() if what == "no record" else damaged.write_bytes(damaged.read_bytes() + b" ")
    again = measured([fake("one", boost=3.0)])
    assert again.status == 0, again.err
    # What ran is known from the record: to write it again, one window is scored, the last one.
    assert scored == [("one", digests[1 if what == "a segment" else -1])]
    message = f"{damaged}: damaged; what it held is made again"
    assert (message in again.err) == (what != "no record")
    assert again.tokens("one") == first.tokens("one")
    assert again.models["one"]["ppl"] == first.models["one"]["ppl"]
    assert segments.load(folder, segments.ALONE, []).damaged == ()
    assert measured([fake("one", boost=3.0)]).loaded == []


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["vLLM W4A16 g32", "EXL3 4.0 [h6]"], ["vLLM_W4A16_g32", "EXL3_4.0__h6_"]),
        # On some file systems a_b and A_B are the same file.
        (["a b", "a_b", "A/B"], ["a_b", "a_b-2", "A_B-3"]),
        (["../../etc/passwd", ".."], ["_._.._etc_passwd", "_."]),
        # The longest file name on Linux has 255 bytes.
        (["x" * 300, "x" * 299], ["x" * 50, "x" * 50 + "-2"]),
    ],
)
def test_file_names_are_safe_and_differ(labels: list[str], expected: list[str]) -> None:
    assert file_names(labels) == expected


def test_the_size_of_a_folder_is_that_of_its_weight_files_alone(tmp_path: Path) -> None:
    """The size includes files that replace tensors.

    It excludes files that the engine does not load.
    """
    folder = write_checkpoint(tmp_path / "model", {"lm_head.weight": ("BF16", 8, 4)})
    (folder / "tokenizer.json").write_bytes(b"x" * 1000)
    stored = (folder / "model.safetensors").stat().st_size
    # 8 * 4 numbers of 2 bytes and a header, without the 1,000 bytes of the tokenizer.
    assert 64 < stored < 1000
    model = run_model(planned("m", "transformers", str(folder), 100))
    assert file_bytes(model) == stored
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"x" * 500)
    assert file_bytes(model.with_planned(override_tensors=(other,))) == stored + 500
