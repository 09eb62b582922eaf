"""Windows of each method, compared with lists written by hand and the original tools' windows."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, get_args

import numpy as np
import pytest
import torch

from compare_q.backends.base import ScoreRequest
from compare_q.backends.hf.transformers_engine import TransformersEngine
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs.spec_files import parse_data_spec
from compare_q.eval.specs.spec_types import DataSpec, Long, Method
from compare_q.eval.text import cutting, text_windows, windows_in_words
from compare_q.eval.text.cutting import Cut
from compare_q.eval.text.text_tokens import Tokens
from compare_q.eval.text.text_windows import TextWindows
from tests.support.toy import ATOL_LOGPROB, Run, Specs, brute_force, planned, save_toy_tokenizer

BOS = 90


def text(count: int) -> cutting.Ids:
    """Tokens 10, 11, ...: token i of the text is 10 + i."""
    return np.arange(10, 10 + count, dtype=np.int32)


def plain(cuts: list[Cut]) -> list[tuple[int, list[int], int]]:
    assert {cut.token_ids.dtype for cut in cuts} <= {np.dtype(np.int32)}
    assert all(len(cut.spans) == 1 and cut.spans[0][1] == len(cut.token_ids) for cut in cuts)
    return [(cut.start, cut.token_ids.tolist(), cut.spans[0][0]) for cut in cuts]


def scored(cuts: list[Cut]) -> list[int]:
    """Text indices of the scored entries, in order."""
    return [cut.start + position for cut in cuts for span in cut.spans for position in range(*span)]


@pytest.mark.parametrize(
    ("n_tokens", "eval_len", "stride", "gold"),
    [
        (10, 4, 2, [0, 2, 4]),
        (11, 4, 2, [0, 2, 4, 6]),
        # A window needs a token after it, which the one at 4 does not have.
        (8, 4, 4, [0]),
        (9, 4, 4, [0, 4]),
        (4, 4, 1, []),
        (289_076, 2048, 512, list(range(0, 561 * 512, 512))),
    ],
)
def test_exllamav3_starts(n_tokens: int, eval_len: int, stride: int, gold: list[int]) -> None:
    assert [cut.start for cut in cutting.exllamav3(text(n_tokens), eval_len, stride)] == gold


@pytest.mark.parametrize(
    ("n_tokens", "eval_len", "bos", "gold"),
    [
        (11, 4, None, [(0, [10, 11, 12, 13], 3), (4, [14, 15, 16, 17], 3)]),
        (
            12,
            4,
            None,
            [(0, [10, 11, 12, 13], 3), (4, [14, 15, 16, 17], 3), (8, [18, 19, 20, 21], 3)],
        ),
        (11, 4, BOS, [(0, [90, 11, 12, 13], 3), (4, [90, 15, 16, 17], 3)]),
        # The first one is 5 / 2 = 2: positions 3 and 4 are scored.
        (11, 5, BOS, [(0, [90, 11, 12, 13, 14], 3), (5, [90, 16, 17, 18, 19], 3)]),
        (3, 3, None, [(0, [10, 11, 12], 2)]),
        (3, 4, None, []),
    ],
)
def test_windows_that_follow_one_another(
    n_tokens: int, eval_len: int, bos: int | None, gold: Any
) -> None:
    """llamacpp's windows, and gptq's.

    These are ``testenc[:, i * seqlen : (i + 1) * seqlen]`` for i below ``numel() // seqlen``.  gptq
    scores ``[:, 1:]`` of the same windows, with the text's own first token.
    """
    ids = text(n_tokens)
    assert plain(cutting.llamacpp(ids, eval_len, bos)) == gold
    windows_of_gptq = []
    for start, _, _ in gold:
        windows_of_gptq.append((start, ids[start : start + eval_len].tolist(), 1))
    assert plain(cutting.gptq(ids, eval_len)) == windows_of_gptq
    # BOS goes into copies.
    assert ids.tolist() == text(n_tokens).tolist()


# lm_eval.utils of lm-eval 0.4.13: make_disjoint_window of each of get_rolling_token_windows(tokens,
# 90, L, 1), as (context, continuation); the model's input is both together, without the last token.
LM_EVAL = {
    (0, 4): [],
    (1, 4): [([90], [10])],
    (3, 4): [([90], [10, 11, 12])],
    (4, 4): [([90], [10, 11, 12, 13])],
    (5, 4): [([90], [10, 11, 12, 13]), ([10, 11, 12, 13], [14])],
    (8, 4): [([90], [10, 11, 12, 13]), ([13], [14, 15, 16, 17])],
    (10, 4): [([90], [10, 11, 12, 13]), ([13], [14, 15, 16, 17]), ([15, 16, 17], [18, 19])],
    (7, 3): [([90], [10, 11, 12]), ([12], [13, 14, 15]), ([13, 14, 15], [16])],
    (5, 2): [([90], [10, 11]), ([11], [12, 13]), ([12, 13], [14])],
}


@pytest.mark.parametrize(("n_tokens", "eval_len"), LM_EVAL)
def test_lm_eval(n_tokens: int, eval_len: int) -> None:
    cuts = cutting.lm_eval(text(n_tokens), np.array([n_tokens]), eval_len, 90)
    pairs = []
    for window in cuts:
        first = window.spans[0][0]
        ids = window.token_ids.tolist()
        pairs.append((ids[:first], ids[first:]))
    assert pairs == LM_EVAL[n_tokens, eval_len]
    assert scored(cuts) == list(range(n_tokens))


@pytest.mark.parametrize(
    ("n_tokens", "eval_len", "stride", "gold"),
    [
        (8, 4, 2, [(0, [10, 11, 12, 13], 1), (2, [12, 13, 14, 15], 2), (4, [14, 15, 16, 17], 2)]),
        # The last window is moved back to the end of the text; what it repeats is context.
        (7, 4, 2, [(0, [10, 11, 12, 13], 1), (2, [12, 13, 14, 15], 2), (3, [13, 14, 15, 16], 3)]),
        (8, 4, 3, [(0, [10, 11, 12, 13], 1), (3, [13, 14, 15, 16], 1), (4, [14, 15, 16, 17], 3)]),
        (5, 4, 1, [(0, [10, 11, 12, 13], 1), (1, [11, 12, 13, 14], 3)]),
        (4, 4, 2, [(0, [10, 11, 12, 13], 1)]),
        # Shorter than a window: all available context.
        (3, 4, 2, [(0, [10, 11, 12], 1)]),
        (1, 4, 2, []),
        (0, 4, 2, []),
    ],
)
def test_once(n_tokens: int, eval_len: int, stride: int, gold: Any) -> None:
    cuts = cutting.score_each_token_once(text(n_tokens), eval_len, stride)
    assert plain(cuts) == gold
    assert scored(cuts) == list(range(1, n_tokens))


FIRST = (0, [10, 11, 12], ((1, 3),))
FOURTH = (9, [19, 20], ((1, 2),))
SECOND = [(5, [15, 16, 17], ((1, 2),)), (7, [17, 18], ((1, 2),))]


@pytest.mark.parametrize(
    ("long", "gold", "counts"),
    [
        ("truncate", [FIRST, FOURTH], (1, 2)),
        ("skip", [FIRST, FOURTH], (1, 1)),
        ("split", [FIRST, *SECOND, FOURTH], (1, 1)),
    ],
)
def test_conversations(long: Long, gold: Any, counts: tuple[int, int]) -> None:
    """Conversations of 3, 6, 0 and 2 tokens in windows of 3.

    The second one scores its 4th and its last token.
    """
    scored = np.array([1, 1, 1, 0, 0, 0, 1, 0, 1, 0, 1], bool)
    cuts, n_long, n_unscored = cutting.chat(text(11), scored, np.array([3, 9, 9, 11]), 3, long)
    assert [(cut.start, cut.token_ids.tolist(), cut.spans) for cut in cuts] == gold
    assert (n_long, n_unscored) == counts


TEN = Tokens(np.arange(10, dtype=np.int32), np.zeros(0, np.int32), 9, "words")
SIZES = np.array([1, 1, 2, 3, 0, 1, 1, 1, 1, 1], np.int32)
LED = replace(TEN, leading_token=90, ends=np.array([6, 10]), sizes=SIZES, n_bytes=12, n_words=4)


def spec(**keys: object) -> DataSpec:
    base = {"tokenizer_dir": "t", "dataset": "wiki2", "eval_len": 4, "eval_stride": 2}
    return parse_data_spec({**base, **keys}, Path("d.json"))


def cut(tokens: Tokens, data_spec: DataSpec, max_rows: int | None) -> TextWindows:
    return text_windows.cut(tokens, data_spec, max_rows, Path("tokenizer"))


def test_spread_windows_lie_over_the_whole_text() -> None:
    """The first n windows are a systematic sample; a longer run adds windows to a shorter one's."""
    # Windows of 2 tokens at 0, 2, ..., 18.
    tokens = replace(TEN, ids=np.arange(21, dtype=np.int32) % 10)
    spread = spec(eval_len=2, eval_stride=2, sample="spread")
    runs = [cut(tokens, spread, count) for count in (2, 4, None)]
    assert [run.starts for run in runs] == [
        (0, 10),
        (0, 10, 4, 14),
        (0, 10, 4, 14, 2, 12, 6, 16, 8, 18),
    ]
    assert len({run.text_digest for run in runs}) == 1
    assert (
        windows_in_words.subtitle(runs[0]) == "wikitext2, 2 × 2 tokens, spread over the text's 10"
    )
    assert windows_in_words.subtitle(runs[2]) == "wikitext2, 10 × 2 tokens"
    assert windows_in_words.data_json(runs[0])["windows_of_the_text"] == 10


def test_warm_up_is_not_scored() -> None:
    """Upstream keeps the last eval_len - warmup logits and drops the first of them.

    The targets are warmup + 1 ... L - 1.
    """
    (window, *_) = cut(TEN, spec(eval_len=5, warmup_tokens=2), None).windows
    assert (window.spans, window.n_scored) == (((3, 5),), 2)


def test_the_last_tokens_of_each_stretch_are_scored() -> None:
    """In windows of 9 tokens with stretches of 4, the last position of each is 3 and 7.

    The last two are also 2 and 6.  The ninth token of a window is in no whole stretch.  Cache keys
    differ if other positions are scored.
    """
    text = replace(TEN, ids=np.arange(10, dtype=np.int32))
    runs = []
    for last in (1, 2, 3):
        keys = spec(eval_len=9, eval_stride=1, score_every=4, score_last=last)
        runs.append(cut(text, keys, None))
    spans = [run.windows[0].spans for run in runs]
    assert spans == [((3, 4), (7, 8)), ((2, 4), (6, 8)), ((1, 4), (5, 8))]
    assert runs[0].windows[0].targets.tolist() == [3, 7]
    assert runs[1].windows[0].targets.tolist() == [2, 3, 6, 7]
    runs.append(cut(text, spec(eval_len=9, eval_stride=1), None))
    assert len({run.digest for run in runs}) == 4
    assert len({run.text_digest for run in runs}) == 4
    adjacent = cut(text, spec(eval_len=4, eval_stride=4, score_every=4, score_last=3), None)
    assert [window.spans for window in adjacent.windows] == [((1, 4),)] * 2


def test_chat_prefix_comes_before_each_window_and_is_not_scored() -> None:
    chat = Tokens(TEN.ids, np.array([70, 71, 72], np.int32), 9, "words")
    data = cut(chat, spec(warmup_tokens=1), 1)
    (window,) = data.windows
    assert window.token_ids.tolist() == [70, 71, 72, 0, 1, 2, 3]
    # Tokens 2 and 3.
    assert (window.spans, window.n_scored) == (((5, 7),), 2)
    assert (data.length, data.top_id) == (7, 72)
    # Tokens 2 and 3 are at positions 5 and 6.
    assert data.starts == (-3,)


METHODS = get_args(Method)


def of(method: str, text: Tokens = LED, max_rows: int | None = None, **keys: object) -> TextWindows:
    stride = None
    if method == "exllamav3":
        stride = 2
    return cut(text, spec(**{"method": method, "eval_stride": stride, **keys}), max_rows)


@pytest.mark.parametrize(
    ("method", "gold", "n_bytes"),
    [
        (
            "exllamav3",
            [(0, [0, 1, 2, 3], 1), (2, [2, 3, 4, 5], 1), (4, [4, 5, 6, 7], 1)],
            (1 + 2 + 3) + (3 + 0 + 1) + (1 + 1 + 1),
        ),
        # Only the last position of the second half: 3 and 7.
        ("llamacpp", [(0, [90, 1, 2, 3], 3), (4, [90, 5, 6, 7], 3)], 3 + 1),
        (
            "lm_eval",
            [(-1, [90, 0, 1, 2, 3], 1), (1, [1, 2, 3, 4, 5], 3), (5, [90, 6, 7, 8, 9], 1)],
            12,
        ),
        ("gptq", [(0, [0, 1, 2, 3], 1), (4, [4, 5, 6, 7], 1)], (1 + 2 + 3) + (1 + 1 + 1)),
        (
            "once",
            [
                (0, [0, 1, 2, 3], 1),
                (2, [2, 3, 4, 5], 2),
                (4, [4, 5, 6, 7], 2),
                (6, [6, 7, 8, 9], 2),
            ],
            # All but the first token, before which there is nothing.
            12 - 1,
        ),
    ],
)
def test_methods(method: str, gold: list[tuple[int, list[int], int]], n_bytes: int) -> None:
    """Ten tokens of 1, 1, 2, 3, 0, 1, 1, 1, 1, 1 bytes, in two documents of 6 and 4 tokens.

    They have 12 bytes and 4 words; the leading token is 90.
    """
    data = of(method)
    windows = []
    for start, window in zip(data.starts, data.windows, strict=True):
        windows.append((start, window.token_ids.tolist(), window.spans[0][0]))
    assert windows == gold
    assert (data.spec.method, data.n_tokens, data.length) == (method, 10, len(gold[0][1]))
    for start, window in zip(data.starts, data.windows, strict=True):
        for position in window.positions:
            assert LED.ids[start + position] == window.token_ids[position]
    assert [window.token_ids.tolist() for window in of(method, max_rows=1).windows] == [gold[0][1]]
    assert data.text_size == (n_bytes, 4 * n_bytes / 12)
    facts = windows_in_words.data_json(data)
    assert (facts["method"], facts["bytes"], facts["words"]) == (method, n_bytes, 4 * n_bytes / 12)


def test_digest_follows_windows_and_what_is_scored() -> None:
    """The digest depends on the place of the windows and their scored positions, not on names."""
    hashed = hashlib.sha256(b"exllamav3")
    for start in (0, 2, 4):
        ids = np.arange(start, start + 4, dtype=np.int32)
        hashed.update(f" {start} 4 1 ".encode() + ids.tobytes())
    assert of("exllamav3").digest == hashed.hexdigest()
    assert of("exllamav3", dataset_display_name="other").digest == hashed.hexdigest()
    assert of("llamacpp").digest == of("llamacpp", eval_stride=4).digest
    backwards = replace(LED, ids=LED.ids[::-1].copy())
    digests = [of(method).digest for method in METHODS]
    digests += [
        of("exllamav3", max_rows=2).digest,
        of("exllamav3", warmup_tokens=1).digest,
        of("exllamav3", backwards).digest,
        of("llamacpp", eval_len=5).digest,
        of("llamacpp", replace(LED, leading_token=None)).digest,
        of("once", eval_stride=3).digest,
        of("lm_eval", replace(LED, ends=np.array([10]))).digest,
    ]
    window = of("once").windows[1]
    for method in ("once", "llamacpp"):
        for start in (2, 3):
            digests.append(text_windows.digest_of([window], [start], method))
    for spans in (((1, 4),), ((1, 3),), ((1, 2), (3, 4))):
        digests.append(text_windows.digest_of([replace(window, spans=spans)], [2], "once"))
    assert len(set(digests)) == len(digests)


@pytest.mark.engine
@pytest.mark.parametrize(
    "engine", [{}, {"streaming": True}, {"streaming": True, "streaming_windows": 3}]
)
def test_windows_of_many_lengths_are_scored_like_alone(
    toy_model: Path, engine: dict[str, object]
) -> None:
    """Documents of 1 to 40 tokens, each compared with float64 brute force on it alone."""
    from transformers import AutoModelForCausalLM

    ends = np.cumsum([1, 40, 3, 17, 2])
    ids = np.random.default_rng(3).integers(0, 256, int(ends[-1]), dtype=np.int32)
    text = replace(LED, ids=ids, ends=ends, sizes=None, leading_token=256)
    data = of("lm_eval", text, eval_len=16)
    assert len({len(window.token_ids) for window in data.windows}) > 2
    backend = TransformersEngine(
        planned("toy", "transformers", str(toy_model), data.length, {"dtype": "float32", **engine})
    )
    backend.load()
    logprobs = {}
    for scores in backend.score(data.windows, ScoreRequest()):
        logprobs[scores.window] = scores.logprob
    backend.close()
    model = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32)
    for window in data.windows:
        with torch.inference_mode():
            logits = model(torch.from_numpy(window.token_ids).long()[None]).logits[0]
        np.testing.assert_allclose(
            logprobs[window.index], brute_force(logits, window), atol=ATOL_LOGPROB
        )


def test_rows_flag_replaces_max_rows(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    data, models = write_specs(max_rows=2)
    # 1,000 tokens: starts 0, 100, ..., 800.
    for flag, count in ((None, 2), ("3", 3), ("all", 9), ("0", 9)):
        words = ["-d", data, "-m", models, "-o", tmp_path / "r.json"]
        if flag:
            words += ["-r", flag]
        ran = compare_q(*words)
        assert ran.status == 0, ran.err
        assert json.loads((tmp_path / "r.json").read_text())["models"][0]["windows"] == count


def test_a_text_at_a_url_that_changes_is_read_again(tmp_path: Path) -> None:
    """The server sends the time of the last change; without it, there is a note."""
    folder = tmp_path / "served"
    folder.mkdir()
    lines: list[str] = []
    save_toy_tokenizer(tmp_path)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    progress = Progress(quiet=True)
    progress.say = lines.append  # type: ignore[method-assign]
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        spec = parse_data_spec(
            {
                "tokenizer_dir": str(tmp_path),
                "dataset": "json",
                "dataset_split": "train",
                "eval_len": 20,
                "dataset_data_files": f"http://127.0.0.1:{server.server_port}/t.jsonl",
                "eval_stride": 20,
            },
            tmp_path / "data.json",
        )
        texts = []
        for number, text in enumerate(("abcdefgh " * 9, "hgfedcba " * 9)):
            (folder / "t.jsonl").write_text(json.dumps({"text": text}) + "\n")
            # HTTP gives times in whole seconds, in which both files may be written.
            os.utime(folder / "t.jsonl", (number, number))
            texts.append(text_windows.build(spec, None, Cache(tmp_path / "cache"), progress))
        server.shutdown()
    assert texts[0].digest != texts[1].digest
    assert sum("changed" in line for line in lines) == 1
    offline = text_windows.build(spec, None, Cache(tmp_path / "cache"), progress)
    assert any("read on" in note for note in offline.notes)
