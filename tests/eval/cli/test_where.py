"""``compare-q where`` from words to files, with an engine whose shares are known in advance."""

from __future__ import annotations

import csv
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import compare_q as compare_q_package
from compare_q.backends.common.errors import InputError
from compare_q.eval.where.results import WhereResult
from tests.support.restoring_engine import LOSSES, Where, scored, word
from tests.support.toy import Run, assert_refused, save_llama, with_config

pytestmark = pytest.mark.usefixtures("trials_log")


def result_of(where: Where, file: Path, *flags: object, **options: Any) -> WhereResult:
    """Run, assert success, and return what -o wrote."""
    ran = where("-o", file, *flags, **options)
    assert ran.status == 0, ran.err
    return WhereResult.read(file)


def values(result: WhereResult) -> dict[str, float]:
    """Return part -> share."""
    shares = {}
    for row in result.rows:
        assert row.share is not None
        shares[row.name] = row.share.value
    return shares


def test_shares_by_layer(where: Where, tmp_path: Path) -> None:
    result = result_of(where, tmp_path / "o.json")
    assert values(result) == pytest.approx(
        {"layer 0": 0.06, "layer 1": 0.21, "layer 2": 0.06, "lm_head": 0.0}, abs=1e-12
    )
    assert result.whole is not None
    assert result.whole.value == pytest.approx(0.33)
    row = result.rows[1]
    assert row.percent is not None
    assert row.percent.value == pytest.approx(100 * 0.21 / 0.33)
    assert row.kld is not None
    assert row.kld.value == pytest.approx(0.12)
    assert row.is_told_from_zero
    assert (row.n_weights, row.bits, row.reference_bits) == (400, 1800.0, 6400.0)
    assert row.modules == ("layers.1.self_attn.q_proj", "layers.1.mlp.down_proj")
    assert result.sum_of_shares == pytest.approx(0.33)
    assert result.rows[3].is_told_from_zero is False


def test_shares_by_kind_and_by_pattern(where: Where, tmp_path: Path) -> None:
    by_kind = result_of(where, tmp_path / "kind.json", "--by", "kind")
    assert values(by_kind) == pytest.approx({"q": 0.03, "down": 0.3, "lm_head": 0}, abs=1e-12)
    assert by_kind.unmatched_weights == 0
    by_pattern = result_of(where, tmp_path / "pattern.json", "--by", r"layers\.([01]).*down")
    assert values(by_pattern) == pytest.approx({"0": 0.05, "1": 0.2})
    # q of 3 layers, down of the last one, and the head.
    assert by_pattern.unmatched_weights == 3 * 100 + 300 + 50


def test_three_windows_have_no_intervals(where: Where, tmp_path: Path) -> None:
    """The errors of a few windows may be small by chance."""
    result = result_of(where, tmp_path / "o.json", rows=3, wobble=0.1)
    assert result.rows[1].share is not None
    assert result.rows[1].share.stderr is not None
    assert {row.is_told_from_zero for row in result.rows} == {None}
    assert result.front == ()
    result = result_of(where, tmp_path / "o.json", rows=4, wobble=0.01)
    assert result.rows[1].is_told_from_zero


def test_shares_do_not_add_up_if_parts_act_together(where: Where, tmp_path: Path) -> None:
    """Each part alone ends the KLD that appears only if all modules are quantized."""
    restored = result_of(where, tmp_path / "o.json", joint=0.1)
    assert values(restored)["layer 0"] == pytest.approx(0.16)
    assert restored.sum_of_shares == pytest.approx(0.33 + 3 * 0.1)
    assert restored.whole is not None
    assert restored.whole.value == pytest.approx(0.43)
    only = result_of(where, tmp_path / "only.json", "--only", joint=0.1)
    assert values(only)["layer 0"] == pytest.approx(0.06)
    assert only.rows[0].kld == only.rows[0].share


def test_the_largest_parts_are_restored_together(where: Where, tmp_path: Path) -> None:
    result = result_of(where, tmp_path / "o.json", "--by", "matrix")
    klds = []
    for row in result.front:
        assert row.kld is not None
        klds.append(row.kld.value)
    # Of 0.33: without 0.2, 0.05, 0.05, and two of 0.01; lm_head has no share.
    assert klds == pytest.approx([0.13, 0.08, 0.03, 0.01])
    assert [len(row.parts) for row in result.front] == [1, 2, 3, 5]
    assert result.front[0].parts == ("layers.1.mlp.down_proj",)
    # 1,250 weights of 4.5 bits, 300 of them of 16.
    assert result.front[0].bits == 1250 * 4.5 + 300 * 11.5


def test_the_result_says_how_activations_ran(where: Where, tmp_path: Path) -> None:
    first = result_of(where, tmp_path / "1.json")
    assert first.activations == ("bfloat16 with int4 g32 weights",)
    # Also if no model is loaded any more.
    assert result_of(where, tmp_path / "2.json").activations == first.activations


def test_a_small_part_stops_after_eight_windows(
    where: Where, tmp_path: Path, trials_log: Path
) -> None:
    result = result_of(where, tmp_path / "o.json", rows=16, wobble=0.1)
    windows = {row.name: (row.windows, row.stopped) for row in result.rows}
    assert windows == {
        "layer 0": (16, False),
        "layer 1": (16, False),
        "layer 2": (16, False),
        "lm_head": (8, True),
    }
    head = result.rows[3]
    assert result.whole is not None
    assert head.kld is not None
    # The whole KLD of all windows.
    assert head.kld.value == pytest.approx(result.whole.value)
    # 5 trials in 8 windows, 4 in the other 8; 1 and 2 and 3 parts together, one of them known.
    assert len(scored(trials_log)) == 5 * 8 + 4 * 8 + 2 * 16


def test_errors_are_of_the_differences_of_windows(where: Where, tmp_path: Path) -> None:
    """With a wobble of modules, shares differ by window; without, they have no error."""
    still = result_of(where, tmp_path / "still.json")
    assert still.rows[0].share is not None
    assert still.rows[0].share.stderr == pytest.approx(0, abs=1e-12)
    result = result_of(where, tmp_path / "wobble.json", wobble=0.3)
    assert result.rows[1].share is not None
    assert 0.01 < (result.rows[1].share.stderr or 0) < 0.1
    assert values(result)["layer 1"] == pytest.approx(0.21, abs=0.06)


def test_a_second_search_scores_only_what_is_missing(
    where: Where, tmp_path: Path, trials_log: Path
) -> None:
    first = result_of(where, tmp_path / "1.json")
    assert scored(trials_log)
    second = result_of(where, tmp_path / "2.json")
    assert scored(trials_log) == []
    assert second.rows == first.rows
    # By kind: q and down; the head and the whole are known, and all modules of 3 layers together.
    result_of(where, tmp_path / "3.json", "--by", "kind")
    assert len(scored(trials_log)) == 2 * 8
    result_of(where, tmp_path / "4.json", "--clear_cache")
    # 4 parts, the whole, and 2 and 3 parts together.
    assert len(scored(trials_log)) == 7 * 8


def test_a_failed_search_keeps_what_it_scored(
    where: Where, tmp_path: Path, trials_log: Path
) -> None:
    """``fail`` is in the key of the cache: the rest is scored by the same models."""
    ran = where(fail=12)
    assert ran.status == 1
    assert "q4" in ran.err
    assert "told to fail" in ran.err
    assert "Traceback" not in ran.err
    assert len(scored(trials_log)) == 12
    ran = where(fail=12)
    assert ran.status == 1
    # Not one of the first 12 again.
    assert len(scored(trials_log)) == 12
    for _ in range(5):
        where("-o", tmp_path / "o.json", fail=12)
    assert values(WhereResult.read(tmp_path / "o.json"))["layer 1"] == pytest.approx(0.21)


def test_a_part_without_a_finite_kld_is_na_with_the_reason(where: Where, tmp_path: Path) -> None:
    result = result_of(where, tmp_path / "o.json", "--by", "matrix", nan="layers.0.mlp.down_proj")
    row = next(row for row in result.rows if row.name == "layers.0.mlp.down_proj")
    assert (row.share, row.kld, row.percent) == (None, None, None)
    assert "8 of 8 windows" in row.reason
    assert result.sum_of_shares is None
    assert result.ranked[-1] == row
    assert values(result.updated(rows=result.rows[:1])) == pytest.approx(
        {"layers.0.self_attn.q_proj": 0.01}
    )
    assert all("layers.0.mlp.down_proj" not in front.parts for front in result.front)


def test_whole_layers_are_refused_by_kind(where: Where, tmp_path: Path) -> None:
    losses = {"layers.0": 0.1, "layers.1": 0.2}
    ran = where("--by", "kind", whole_layers=True, losses=losses)
    assert ran.status == 2
    assert "--by layer" in ran.err.splitlines()[-1]
    result = result_of(where, tmp_path / "o.json", whole_layers=True, losses=losses)
    assert values(result)["layer 1"] == pytest.approx(0.2)


def test_every_output_has_the_numbers(where: Where, tmp_path: Path) -> None:
    files = {
        "-o": tmp_path / "o.json",
        "--csv": tmp_path / "o.csv",
        "--markdown": tmp_path / "o.md",
        "-pf": tmp_path / "o.png",
        "--html": tmp_path / "o.html",
    }
    words: list[object] = []
    for flag, file in files.items():
        words += [flag, file]
    ran = where(*words)
    assert ran.status == 0, ran.err
    assert "0.21000" in ran.out
    with files["--csv"].open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["part"] for row in rows] == ["layer 0", "layer 1", "layer 2", "lm_head"]
    assert float(rows[1]["share"]) == pytest.approx(0.21)
    assert float(rows[1]["kld"]) == pytest.approx(0.12)
    assert float(rows[1]["bits_per_weight"]) == 4.5
    assert rows[1]["modules"] == "layers.1.self_attn.q_proj layers.1.mlp.down_proj"
    assert "0.21000" in files["--markdown"].read_text()
    page = files["--html"].read_text()
    assert "<svg" in page
    assert "0.21000" in page
    assert files["-pf"].read_bytes().startswith(b"\x89PNG")
    raw = json.loads(files["-o"].read_text())
    assert raw["where"] == 1
    assert raw["quantized"]["label"] == "q4"
    assert raw["created"]


def test_the_json_file_is_read_back_unchanged(where: Where, tmp_path: Path) -> None:
    result = result_of(where, tmp_path / "o.json", "--by", "kind", wobble=0.2)
    result.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "o.json").read_bytes()
    assert WhereResult.read(tmp_path / "again.json") == result


@pytest.mark.parametrize(
    ("change", "word_of_error"),
    [
        ({"where": 2}, "where"),
        ({"rows": [{"name": "x"}]}, "rows"),
        ({"modules": []}, "modules"),
        ({"whole": {"value": "1"}}, "whole"),
    ],
)
def test_damaged_files_are_refused(
    where: Where, tmp_path: Path, change: dict[str, Any], word_of_error: str
) -> None:
    file = tmp_path / "o.json"
    result_of(where, file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(InputError, match=word_of_error):
        WhereResult.read(file)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(InputError, match=r"x\.json"):
        WhereResult.read(tmp_path / "x.json")


def test_models_that_cannot_be_exchanged_are_refused(
    compare_q: Run, toy_model: Path, long_text: Path, tmp_path: Path
) -> None:
    reference = word("ref", toy_model)
    quantized = word("q4", toy_model, losses=LOSSES)
    text = ("-d", long_text, "--eval-len", 50)
    assert_refused(compare_q("where", reference, *text), "two models")
    assert_refused(compare_q("where", reference, quantized, quantized, *text), "two models")
    assert_refused(compare_q("where", reference, word("again", toy_model), *text), "same model")
    other_engine = f"x={toy_model}@fake"
    assert_refused(compare_q("where", reference, other_engine, *text), "x", "fake", "restoring")
    server = "s=http://localhost:1/v1"
    assert_refused(compare_q("where", reference, server, *text), "s", "vllm_server")
    assert_refused(compare_q("where", reference, quantized, *text, "--by", "a("), "--by", "'a('")


def test_models_with_other_vocabularies_are_refused(
    compare_q: Run, toy_model: Path, long_text: Path, tmp_path: Path
) -> None:
    """In the engine that words without one get."""
    other = save_llama(tmp_path / "other", vocab_size=400)
    ran = compare_q("where", toy_model, other, "-d", long_text, "--eval-len", 50)
    assert ran.status == 2
    assert "vocabular" in ran.err.splitlines()[-1]
    assert "400" in ran.err.splitlines()[-1]


def test_a_config_that_differs_is_noted(
    where: Where, compare_q: Run, toy_model: Path, long_text: Path, tmp_path: Path
) -> None:
    """Exchanging modules does not undo the difference."""
    other = with_config(toy_model, tmp_path / "other", rms_norm_eps=0.5)
    words = (word("ref", toy_model), word("q4", other, losses=LOSSES))
    ran = compare_q("where", *words, "-d", long_text, "--eval-len", 50, "-o", tmp_path / "o.json")
    assert ran.status == 0, ran.err
    (note,) = WhereResult.read(tmp_path / "o.json").notes
    assert "rms_norm_eps 0.5 for " in note
    assert note in " ".join(ran.out.split())
    assert result_of(where, tmp_path / "same.json").notes == ()


def test_python_returns_the_same_shares(
    toy_model: Path, long_text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (word("ref", toy_model), word("q4", toy_model, losses=LOSSES))
    found = compare_q_package.where(
        *words, by="kind", data=str(long_text), rows=8, eval_len=50, quiet=True
    )
    frame = found.dataframe().set_index("part")
    assert frame.loc["down", "share"] == pytest.approx(0.3)
    assert frame.loc["down", "kld"] == pytest.approx(0.03)
    found.save(tmp_path / "o.json")
    assert WhereResult.read(tmp_path / "o.json").rows == found.result.rows
    found.plot(tmp_path / "o.svg")
    assert "<svg" in (tmp_path / "o.svg").read_text()
    assert capfd.readouterr().out == ""
    with pytest.raises(InputError, match="by"):
        compare_q_package.where(*words, by="a(")


@pytest.mark.engine
def test_a_search_continues_after_its_worker_was_killed(
    where: Where, trials_log: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker is a process, which the system kills; scores are committed every 2 s."""
    monkeypatch.setenv("COMPARE_Q_IN_PROCESS", "0")
    options = {"fail": 20, "killed": True, "seconds": 0.15}
    ran = where("--by", "q|down", **options)
    assert ran.status == 1
    assert "Traceback" not in ran.err
    assert len(scored(trials_log)) == 20
    result = result_of(where, tmp_path / "o.json", "--by", "q|down", **options)
    assert values(result) == pytest.approx({"q": 0.03, "down": 0.3})
    # Of the whole, 2 parts, and both together, in 8 windows; 12 were not reached.
    assert 12 <= len(scored(trials_log)) < 20


def test_a_search_waits_for_another_one_on_the_same_models(
    where: Where, own_cache: Path, tmp_path: Path
) -> None:
    result_of(where, tmp_path / "1.json")
    (file,) = (own_cache / "trials").glob("*.jsonl")
    lock = FileLock(str(file.with_suffix(".lock")), thread_local=False)
    lock.acquire()
    timer = threading.Timer(1.0, lambda: lock.release(force=True))
    timer.start()
    try:
        ran = where("--by", "kind")
    finally:
        timer.join()
    assert ran.status == 0
    assert "waiting for another run" in ran.err


def test_models_with_equal_weights_have_no_shares(where: Where) -> None:
    ran = where(losses={}, boost=1.0)
    assert ran.status == 1
    assert "no weights differ" in ran.err.splitlines()[-1]


def test_the_cache_lists_and_deletes_the_scores(where: Where, compare_q: Run) -> None:
    assert where().status == 0
    ran = compare_q("cache")
    assert "q4, ref" in ran.out
    ran = compare_q("cache", "--cache-limit", "0B")
    assert "q4, ref" not in ran.out
