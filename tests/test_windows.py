"""Windows against a gold list written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from backends.base import InputError
from eval import windows
from eval.progress import Progress
from eval.specs import DataSpec, parse_data_spec
from eval.store import Store
from eval.windows import EvalData, Tokens
from tests.conftest import Ran

TEN = Tokens(np.arange(10, dtype=np.int32), np.zeros(0, np.int32), 9, "words")


def spec(**keys: object) -> DataSpec:
    base = {"tokenizer_dir": "t", "dataset": "wiki2", "eval_len": 4, "eval_stride": 2}
    return parse_data_spec({**base, **keys}, Path("d.json"))


def cut(tokens: Tokens, data_spec: DataSpec, max_rows: int | None) -> EvalData:
    return windows.cut(tokens, data_spec, max_rows, Path("tokenizer"))


@pytest.mark.parametrize(
    ("n_tokens", "eval_len", "stride", "max_rows", "gold"),
    [
        (10, 4, 2, None, [0, 2, 4]),  # 6 would end exactly at the last token: upstream leaves it out
        (11, 4, 2, None, [0, 2, 4, 6]),
        (10, 4, 3, None, [0, 3]),
        (8, 4, 4, None, [0]),
        (9, 4, 4, None, [0, 4]),
        (4, 4, 1, None, []),
        (5, 4, 1, None, [0]),
        (10, 4, 2, 0, [0, 2, 4]),
        (10, 4, 2, 2, [0, 2]),
        (10, 4, 2, 99, [0, 2, 4]),
        # WikiText-2 at 2048/512 for a tokenizer that makes 289,076 tokens of it: ceil((289,076 - 2,048) / 512) = 561
        (289_076, 2048, 512, None, list(range(0, 561 * 512, 512))),
    ],
)
def test_starts(n_tokens: int, eval_len: int, stride: int, max_rows: int | None, gold: list[int]) -> None:
    assert list(windows.starts(n_tokens, eval_len, stride, max_rows)) == gold


def test_every_position_but_the_first_is_scored() -> None:
    data = cut(TEN, spec(), None)
    assert [window.token_ids.tolist() for window in data.windows] == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]
    assert [window.row for window in data.windows] == [0, 1, 2]
    assert {window.score_from for window in data.windows} == {1}
    assert sum(window.n_scored for window in data.windows) == 9


def test_warm_up_is_not_scored() -> None:
    """Upstream keeps the last eval_len - warmup logits and drops the first of them: targets warmup + 1 ... L - 1."""
    (window, *_) = cut(TEN, spec(eval_len=5, warmup_tokens=2), None).windows
    assert (window.score_from, window.n_scored) == (3, 2)


def test_chat_prefix_comes_before_each_window_and_is_not_scored() -> None:
    chat = Tokens(TEN.ids, np.array([70, 71, 72], np.int32), 9, "words")
    data = cut(chat, spec(warmup_tokens=1), 1)
    (window,) = data.windows
    assert window.token_ids.tolist() == [70, 71, 72, 0, 1, 2, 3]
    assert (window.score_from, window.n_scored) == (5, 2)  # tokens 2 and 3
    assert (data.length, data.top_id) == (7, 72)


def test_too_little_text_says_how_much_there_was() -> None:
    with pytest.raises(InputError, match="the text has 10 tokens, one window takes 11"):
        cut(TEN, spec(eval_len=10), None)


def test_digest_follows_content() -> None:
    digest = cut(TEN, spec(), None).digest
    assert cut(TEN, spec(dataset_display_name="other"), None).digest == digest
    assert cut(TEN, spec(), 2).digest != digest
    assert cut(TEN, spec(warmup_tokens=1), None).digest != digest
    assert cut(Tokens(TEN.ids[::-1].copy(), TEN.prefix, 9, "words"), spec(), None).digest != digest


def test_build_tokenizes_once_and_follows_the_text(tmp_path: Path, toy_model: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("abcdefgh")
    store, progress = Store(tmp_path / "cache"), Progress(quiet=True)
    local = spec(tokenizer_dir=str(toy_model), dataset="text", path=str(text))
    first = windows.build(local, None, store, progress)
    assert first.n_tokens == 8
    assert len(list((tmp_path / "cache" / "tokens").glob("*.npz"))) == 1
    assert windows.build(local, None, store, progress).digest == first.digest
    text.write_text("abcdefgX")
    assert windows.build(local, None, store, progress).n_tokens == 8
    assert len(list((tmp_path / "cache" / "tokens").glob("*.npz"))) == 2


def test_chat_template_of_a_real_tokenizer(tmp_path: Path, toy_model: Path) -> None:
    """system:, user:Say something., a: in the toy template; one token a byte, so 8 + 20 + 2 tokens of prefix."""
    text = tmp_path / "t.txt"
    text.write_text("abcdefgh")
    local = spec(tokenizer_dir=str(toy_model), dataset="text", path=str(text), chat_template=True)
    (window, *_) = windows.build(local, None, Store(tmp_path / "cache"), Progress(quiet=True)).windows
    prefix = "system:\nuser:Say something.\na:"
    assert len(window.token_ids) == len(prefix) + 4
    assert window.score_from == len(prefix) + 1


def test_special_tokens_do_not_count_as_vocabulary(tmp_path: Path, toy_model: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("abcdefgh")
    local = spec(tokenizer_dir=str(toy_model), dataset="text", path=str(text))
    assert windows.build(local, None, Store(tmp_path / "cache"), Progress(quiet=True)).top_id == 255


def test_subtitle() -> None:
    data = cut(TEN, spec(), None)
    assert windows.subtitle(spec(), data) == "wikitext2, 3 × 4 tokens"
    shown = spec(display_rows=7, display_eval_len="4k", chat_template=True, warmup_tokens=1)
    assert windows.subtitle(shown, data) == "wikitext2, 7 × 4k tokens, 1 tokens warm-up, formatted"


def test_cached_tokens_hold_no_pickle(tmp_path: Path) -> None:
    store = Store(tmp_path)
    windows.save_tokens(store, "k", TEN)
    loaded = windows.load_tokens(store, "k")
    assert loaded is not None
    assert loaded.ids.tolist() == TEN.ids.tolist()
    assert loaded.top_id == 9


def test_rows_flag_replaces_max_rows(compare_q: object, write_specs: object, tmp_path: Path) -> None:
    data, models = write_specs(max_rows=2)  # type: ignore[operator]
    for flag, rows in ((None, 2), ("3", 3), ("all", 9), ("0", 9)):  # 1,000 tokens: starts 0, 100, ..., 800
        words = ["-d", data, "-m", models, "-o", tmp_path / "r.json", *(["-r", flag] if flag else [])]
        ran: Ran = compare_q(*words)  # type: ignore[operator]
        assert ran.status == 0, ran.err
        assert json.loads((tmp_path / "r.json").read_text())["models"][0]["rows"] == rows
