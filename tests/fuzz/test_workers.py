"""Damaged messages of workers, segments of scores, records and manifests: what was written, or told to be damaged."""

from __future__ import annotations

import json
from random import Random

import numpy as np
import pytest
from hypothesis import given

from compare_q.backends.base import TokenScores, Window
from compare_q.backends.common.head import Head
from compare_q.backends.reference.store import MANIFEST, Manifest, read_manifest, write_manifest
from compare_q.backends.scoring import segments
from compare_q.backends.worker.messages import Ended, Failed, Ready, Returned, Told, encoded, parse_message
from tests.support.hostile import answer_of, damaged, damaged_bytes, fuzzed, randoms

MESSAGES = [
    json.loads(encoded(each))
    for each in (Ready(1, ("a", "b")), Told("say", "1"), Returned("2"), Failed("y"), Ended(-9))
]
WINDOW = Window.scored_from(0, np.arange(9, dtype=np.int32))
SCORES = TokenScores(0, np.linspace(-9, 0, 8, dtype=np.float32), top1=np.zeros(8, np.bool_))
STORE = Manifest(
    identity={"model": "m"}, contents="states", reason="", head=Head(9, "bfloat16"), made=True,
    files={f"row.000000.{'0' * 40}.safetensors": 9},
)  # fmt: skip


@fuzzed
@given(random=randoms)
def test_messages(random: Random) -> None:
    line = damaged(random.choice(MESSAGES), random)
    answer_of(lambda: parse_message(line if random.random() < 0.5 else damaged_bytes(line, random)))


@fuzzed
@given(random=randoms)
def test_scores_are_those_that_were_kept_or_none(tmp_path_factory: pytest.TempPathFactory, random: Random) -> None:
    folder = tmp_path_factory.mktemp("scores")
    segments.commit(folder, segments.ALONE, [(WINDOW, SCORES)], "s", 1.0)
    segments.write_record(folder, "s", {"known": {}})
    for file in sorted(folder.iterdir()):
        file.write_bytes(damaged_bytes(file.read_bytes(), random))
    found = answer_of(lambda: (segments.load(folder, segments.ALONE, [WINDOW]), segments.records(folder)))
    loaded, records = found
    assert all(np.array_equal(scores.logprob, SCORES.logprob) for scores in loaded.scores.values())
    assert all(record == {"known": {}} for record in records.values())


@fuzzed
@given(random=randoms)
def test_manifests(tmp_path_factory: pytest.TempPathFactory, random: Random) -> None:
    folder = tmp_path_factory.getbasetemp() / "store"
    folder.mkdir(exist_ok=True)
    write_manifest(folder, STORE)
    content = (folder / MANIFEST).read_bytes()
    broken = random.random() < 0.5
    (folder / MANIFEST).write_bytes(damaged_bytes(content, random) if broken else damaged(json.loads(content), random))
    found = answer_of(lambda: read_manifest(folder))
    assert found is None or found == STORE
