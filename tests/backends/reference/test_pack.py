"""A pack finds its windows by their digests, and is refused if it is damaged or hostile."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from compare_q.backends.base import ScoreRequest, TokenScores
from compare_q.backends.common import storage
from compare_q.backends.common.errors import ModelError
from compare_q.backends.pack_engine import PackEngine
from compare_q.backends.reference import pack_files, store
from compare_q.backends.reference.pack_files import (
    ENGINE_SCORES,
    PACK_MANIFEST,
    SCORES_FILE,
    STATES,
)
from tests.support.fake_engine import FakeEngine
from tests.support.stores import recorded, state_store
from tests.support.toy import TOY_VOCAB, planned, refusal, toy_windows

PATIENCE_S = 60
WINDOWS = toy_windows(4, 20)
DIGESTS = [window.digest for window in WINDOWS]


def facts(**changes: Any) -> dict[str, Any]:
    """The facts of a manifest."""
    return {
        "model": "m",
        "text": {},
        "text_digest": "0",
        "vocabulary": "0",
        "windows": DIGESTS,
        # 4 windows of 20 tokens; the first token of each is not scored: 4 * 19 = 76.
        "scored_tokens": 76,
        "engine": "fake",
        "provenance": {},
        "storage": {},
        "ppl": 2.0,
        "created": "2026-01-01",
        "command": [],
        **changes,
    }


def fake() -> FakeEngine:
    return FakeEngine(
        planned("m", "fake", "none", 100, {"vocab_size": TOY_VOCAB, "boost": 2.0, "noise": "bf16"})
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pack without tokens and tokenizer, whose windows are in another order than in the text."""
    folder = tmp_path / "pack"
    folder.mkdir()
    engine = fake()
    recorded(engine, WINDOWS, tmp_path)
    shutil.move(tmp_path / "store", folder / STATES)
    order = [WINDOWS[index] for index in (2, 0, 3, 1)]
    scores = list(engine.score(order, ScoreRequest()))
    columns = {}
    for name in ENGINE_SCORES:
        columns[name] = np.concatenate([getattr(window, name) for window in scores])
    ends = np.cumsum([window.n_scored for window in order])
    pack_files.write_scores(folder, [window.digest for window in order], ends.tolist(), columns)
    pack_files.write_manifest(folder, **facts())
    return folder


def loaded(folder: Path) -> PackEngine:
    engine = PackEngine(planned("p", "pack", str(folder), 100, {}))
    engine.load()
    return engine


def test_the_scores_of_a_window_are_found_by_its_digest(folder: Path) -> None:
    stored = pack_files.scores_of(folder)
    assert stored.keys() == set(DIGESTS)
    for window, scores in zip(WINDOWS, fake().score(WINDOWS, ScoreRequest()), strict=True):
        for name in ENGINE_SCORES:
            np.testing.assert_array_equal(stored[window.digest][name], getattr(scores, name))


def test_a_pack_scores_windows_under_any_index(folder: Path) -> None:
    """A run may use some of them, in another order.

    The scores of each window are compared with its recorded ones.
    """
    pack_files.verified(folder)
    windows = [replace(WINDOWS[3], index=7), WINDOWS[0], replace(WINDOWS[3], index=9)]
    engine = loaded(folder)
    request = ScoreRequest(reference=folder / STATES)
    rescored: list[TokenScores] = list(engine.score(windows, request))
    assert [scores.window for scores in rescored] == [7, 0, 9]
    for scores in rescored:
        assert scores.kld is not None
        assert not scores.kld.any()
    np.testing.assert_array_equal(rescored[0].logprob, rescored[2].logprob)
    (unknown,) = toy_windows(1, 21)
    with pytest.raises(ModelError, match="lacks 1 of 2 windows, window 5 among them"):
        list(engine.score([WINDOWS[0], replace(unknown, index=5)], ScoreRequest()))


def test_states_that_do_not_give_the_recorded_scores_are_refused(folder: Path) -> None:
    arrays, _ = pack_files.arrays_of(folder / SCORES_FILE)
    ends = arrays["ends"].tolist()
    digests = [row.tobytes().hex() for row in arrays["digests"]]
    # The pack's order is 2, 0, 3, 1: windows 2 and 0 swap scores, and window 1 keeps its own.
    exchanged = [digests[1], digests[0], *digests[2:]]
    pack_files.write_scores(folder, exchanged, ends, arrays)
    engine = loaded(folder)
    list(engine.score([WINDOWS[1]], ScoreRequest()))
    with pytest.raises(
        ModelError, match="the stored states do not give what fake computed: window 0"
    ):
        list(engine.score([WINDOWS[0]], ScoreRequest()))


@pytest.mark.parametrize(
    ("recorded", "rescored", "is_same"),
    [
        (-math.inf, -math.inf, True),
        (math.nan, math.nan, True),
        (-math.inf, math.nan, False),
        (math.nan, -math.inf, False),
        (-1.0, -math.inf, False),
        (math.nan, -1.0, False),
    ],
)
def test_only_equal_scores_that_are_not_finite_pass(
    folder: Path, recorded: float, rescored: float, is_same: bool
) -> None:
    engine = loaded(folder)
    (scores,) = engine.score([WINDOWS[0]], ScoreRequest())
    stored = {name: getattr(scores, name).copy() for name in ENGINE_SCORES}
    stored["logprob"][2] = recorded
    scores.logprob[2] = rescored
    if is_same:
        engine.compare(scores, stored)
    else:
        with pytest.raises(ModelError, match="scored token 2: logprob"):
            engine.compare(scores, stored)


@pytest.mark.parametrize("digests", [DIGESTS[:3], [*DIGESTS, "0" * 32], [*DIGESTS[:3], "0" * 32]])
def test_a_store_with_other_windows_than_the_manifest_is_refused(
    folder: Path, digests: list[str]
) -> None:
    (folder / PACK_MANIFEST).unlink()
    pack_files.write_manifest(folder, **facts(windows=digests))
    assert refusal(pack_files.verified, folder).startswith(f"{folder}: {STATES}: ")


def test_a_lacking_window_is_named(folder: Path) -> None:
    store.forget(folder / STATES, DIGESTS[1:2])
    (folder / PACK_MANIFEST).unlink()
    pack_files.write_manifest(folder, **facts())
    assert DIGESTS[1] in refusal(pack_files.verified, folder)


@pytest.mark.parametrize("damage", ["fewer digests", "no digests", "beyond the end"])
def test_damaged_scores_are_refused(folder: Path, damage: str) -> None:
    arrays, _ = pack_files.arrays_of(folder / SCORES_FILE)
    if damage == "fewer digests":
        arrays["digests"] = arrays["digests"][:-1]
    elif damage == "no digests":
        del arrays["digests"]
    else:
        arrays["ends"][-1] += 1
    save_file(arrays, folder / SCORES_FILE)
    assert refusal(pack_files.scores_of, folder).startswith(f"{folder / SCORES_FILE}: damaged: ")


@pytest.mark.parametrize(("version", "advice"), [(1, "record it again"), (3, "update compare_q")])
def test_a_pack_of_another_version_is_refused_in_one_line(
    folder: Path, version: int, advice: str
) -> None:
    content = storage.load((folder / PACK_MANIFEST).read_bytes())
    (folder / PACK_MANIFEST).write_bytes(
        storage.dump({**content, "format": version, "windows": 4, "heads": []})
    )
    message = refusal(pack_files.read, folder)
    assert message.startswith(
        f"{folder / PACK_MANIFEST}: format {version}, this compare_q reads 2; {advice}"
    )
    assert "\n" not in message


def as_written(content: str) -> bytes:
    """Return JSON of an object with the checksum that a manifest ends with."""
    body = content.rstrip()[:-1].encode()
    return body + f', "sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def manifest_with(changed: Callable[[str], str]) -> Callable[[Path], None]:
    """Change the text of the manifest, which gets a right checksum."""

    def change(folder: Path) -> None:
        content = json.dumps(storage.load((folder / PACK_MANIFEST).read_bytes()))
        (folder / PACK_MANIFEST).write_bytes(as_written(changed(content)))

    return change


def key(name: str, value: str) -> Callable[[Path], None]:
    """Give a key of the manifest another value, as JSON text."""

    def changed(content: str) -> str:
        manifest = json.loads(content)
        del manifest[name]
        others = json.dumps(manifest)[:-1]
        return f'{others}, "{name}": {value}}}'

    return manifest_with(changed)


def special(name: str, target: str = "") -> Callable[[Path], None]:
    """Replace a file by a pipe, or by a link; the manifest says that it has 0 bytes."""

    def change(folder: Path) -> None:
        content = storage.load((folder / PACK_MANIFEST).read_bytes())
        if name in content["files"]:
            content["files"][name]["bytes"] = 0
        (folder / PACK_MANIFEST).write_bytes(storage.dump(content))
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        if target:
            (folder / name).symlink_to(target)
        else:
            os.mkfifo(folder / name)

    return change


def sparse(name: str) -> Callable[[Path], None]:
    """Make a file of 200 GB that takes no space on the disk."""
    return lambda folder: os.truncate(folder / name, 200_000_000_000)


DEEP = "[" * 20_000 + "]" * 20_000


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (key("ppl", "NaN"), "ppl: nan"),
        (key("ppl", "1e999"), "ppl: inf"),
        (key("floor_kld", "Infinity"), "floor_kld: inf"),
        (key("provenance", '{"x": NaN}'), "x: nan"),
        (key("provenance", f'{{"x": {DEEP}}}'), "nested"),
        (key("provenance", f'{{"x": {DEEP[19_900:-19_900]}}}'), "nested"),
        (key("storage", '{"bits": 3}'), "storage.bits: unknown key"),
        (key("storage", '{"bpw_layer": "x"}'), "storage.bpw_layer"),
        (key("storage", "[]"), "storage"),
        (key("scored_tokens", "9" * 5_000), PACK_MANIFEST),
        (manifest_with(lambda content: f'{content[:-1]}, "ppl": 3.0}}'), "ppl: stands twice"),
        (manifest_with(lambda content: "[" + content[1:-1] + "]"), PACK_MANIFEST),
        (sparse(PACK_MANIFEST), "too large: 200.0 GB"),
        (sparse(f"{STATES}/reference.json"), "damaged: it has 200,000,000,000 bytes"),
        (special(SCORES_FILE), "is a pipe or a device"),
        (special(SCORES_FILE, "/dev/zero"), "is a pipe or a device"),
        (special(f"{STATES}/reference.json"), "is a pipe or a device"),
        (special("tokenizer/added_tokens.json"), "is a pipe or a device"),
        (special("tokenizer/chat_template.jinja", "/dev/zero"), "is a pipe or a device"),
    ],
)
def test_a_hostile_pack_is_refused_in_one_line(
    folder: Path, change: Callable[[Path], None], part: str
) -> None:
    change(folder)
    # Opening a pipe without a writer, or reading /dev/zero, would never end.
    with signals_after(PATIENCE_S):
        assert part in refusal(pack_files.verified, folder)


@contextmanager
def signals_after(seconds: int) -> Iterator[None]:
    """Run a block that may wait for ever; the alarm ends the test."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("logprob", lambda values: values.reshape(1, -1)),
        ("entropy", lambda values: values.astype(np.int64)),
        ("digests", lambda values: values.reshape(-1)),
        ("ends", lambda values: np.full(len(values), np.inf)),
        ("ends", lambda values: -values),
        ("ends", lambda values: values.reshape(1, -1)),
    ],
)
def test_scores_of_another_shape_are_refused(
    folder: Path, name: str, changed: Callable[[Any], Any]
) -> None:
    arrays, _ = pack_files.arrays_of(folder / SCORES_FILE)
    arrays[name] = changed(arrays[name])
    save_file(arrays, folder / SCORES_FILE)
    assert refusal(pack_files.scores_of, folder).startswith(f"{folder / SCORES_FILE}: damaged: ")


@pytest.mark.parametrize("shape", [[], {}, None])
@pytest.mark.parametrize(("pattern", "tensor"), [("head.*", "weight"), ("row.*", "states")])
def test_a_tensor_without_a_shape_is_of_no_form(
    tmp_path: Path, pattern: str, tensor: str, shape: Any
) -> None:
    """The header of a file in an untrusted store may say anything."""
    folder = state_store(tmp_path / "store").path
    file = sorted(folder.glob(pattern))[0]
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[tensor]["shape"] = shape
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    assert store.written_in(folder, [file.name]) is None
