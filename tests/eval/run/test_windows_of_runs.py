"""Runs score the windows that were never scored, whichever text, sample or run has them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from compare_q.backends.base import ModelFacts, ModelFiles, Window
from compare_q.backends.reference.store import Reader
from compare_q.backends.scoring import segments
from compare_q.backends.worker import worker
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.run.claims import claimed
from compare_q.eval.specs import spec_files
from compare_q.eval.text import text_windows
from tests.support.comparisons import (
    KLD,
    UNIFORM,
    Measured,
    fake,
    result_of,
    store_of,
    three,
    write_texts,
)
from tests.support.fake_engine import FakeEngine, digests_asked
from tests.support.processes import wait_until, workers_of
from tests.support.stores import replace_window, window_of
from tests.support.threaded import Told
from tests.support.toy import Ran, assert_refused, swap_letters
from tests.support.two_runs import TOGETHER_S, Run, together

Digests = list[str]
Asked = list[tuple[str, str]]
Make = Callable[..., Run]
MODELS = ("ref", "a", "b")


class Texts:
    """Runs of the command line on the texts of ``write_texts``.

    ``asked``: (label, digest) of each scored window.
    """

    def __init__(
        self,
        compare_q: Callable[..., Ran],
        folder: Path,
        tokenizer: Path,
        cache: Path,
        asked: Asked,
    ) -> None:
        self.compare_q = compare_q
        self.folder = folder
        self.files = write_texts(folder, tokenizer)
        self.cache = Cache(cache)
        self.asked = asked

    def changed(self, name: str, label: str, **keys: Any) -> None:
        """Add a text with this label, whose spec is the one of a text ``name`` with other keys."""
        spec = json.loads(self.files[name].read_text())
        self.files[label] = self.folder / f"{label}.json"
        self.files[label].write_text(json.dumps({**spec, "label": label, **keys}))

    def windows(self, name: str, count: int | None = None) -> list[Window]:
        """Return the first windows of a text, or all of them."""
        (spec,) = spec_files.load_data_specs([self.files[name]])
        return list(text_windows.build(spec, count, self.cache, Progress(quiet=True)).windows)

    def digests(self, name: str, count: int | None = None) -> Digests:
        return [window.digest for window in self.windows(name, count)]

    def run(
        self, models: Sequence[dict[str, Any]], names: Sequence[str], *flags: object
    ) -> Measured:
        """Run the models on the texts; ``asked`` then has what this run has scored."""
        self.asked.clear()
        models_file = self.folder / "models.json"
        models_file.write_text(json.dumps(list(models)))
        output = self.folder / "results.json"
        tokens = self.folder / "tokens"
        output.unlink(missing_ok=True)
        shutil.rmtree(tokens, ignore_errors=True)
        data = [self.files[name] for name in names]
        ran = self.compare_q(
            "-d", *data, "-m", models_file, "-o", output, "--tokens-out", tokens, *flags
        )
        return result_of(ran, output, tokens)

    def scored(
        self, models: Sequence[dict[str, Any]], names: Sequence[str], *flags: object
    ) -> Asked:
        """Return what a run scored, which must succeed."""
        ran = self.run(models, names, *flags)
        assert ran.status == 0, ran.err
        return list(self.asked)


@pytest.fixture
def texts(
    compare_q: Callable[..., Ran],
    tmp_path: Path,
    toy_model: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Texts:
    return Texts(compare_q, tmp_path, toy_model, own_cache, digests_asked(monkeypatch))


def pairs_of(digests: Digests, labels: Sequence[str] = MODELS) -> Asked:
    """Return (label, digest) of all these windows for each label."""
    return [(label, digest) for label in labels for digest in digests]


def column(ran: Measured, label: str, name: str, text: str | None = None) -> list[Any]:
    """Return a column of a model's token scores; ``text``: of this text alone."""
    tokens = ran.tokens(label)
    if text is None:
        return tokens[name]
    return [value for value, of in zip(tokens[name], tokens["text"], strict=True) if of == text]


def test_each_run_scores_what_no_run_has_scored(texts: Texts) -> None:
    """One text, then a second one, then more windows of both.

    Then windows that are spread over one of them.
    """
    prose = texts.digests("prose")
    code = texts.digests("code")
    assert texts.scored(three(), ["prose"], "-r", 4) == pairs_of(prose[:4])
    assert texts.scored(three(), ["prose", "code"], "-r", 4) == pairs_of(code[:4])
    assert texts.scored(three(), ["code", "prose"], "-r", 6) == pairs_of([*code[4:6], *prose[4:6]])
    texts.changed("prose", "spread", sample="spread")
    spread = texts.digests("spread", 6)
    new = [digest for digest in spread if digest not in prose[:6]]
    # Some of the spread windows are among the scored ones, and some are not.
    assert 0 < len(new) < 6
    assert texts.scored(three(), ["spread"], "-r", 6) == pairs_of(new)
    for names, count in (
        (["spread"], 6),
        (["prose", "code"], 6),
        (["code"], 2),
        (["spread", "code"], 5),
    ):
        requested = [digest for name in names for digest in texts.digests(name, count)]
        scored_before = {*prose[:6], *code[:6], *spread}
        assert texts.scored(three(), names, "-r", count) == pairs_of(
            [digest for digest in requested if digest not in scored_before]
        )


def test_a_new_model_needs_no_second_recording_of_windows_of_other_texts(texts: Texts) -> None:
    prose = texts.digests("prose", 3)
    code = texts.digests("code", 3)
    texts.scored(three()[:2], ["prose"], "-r", 3)
    texts.scored(three()[:2], ["code"], "-r", 3)
    assert texts.scored(three(), ["code", "prose"], "-r", 3) == pairs_of([*code, *prose], ["b"])


def test_each_text_of_a_run_has_the_scores_of_its_own_run(
    texts: Texts, pair: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from compare_q import backends
    from tests.support import stub_engine

    monkeypatch.setitem(backends.ENGINES, "stub", stub_engine.LOCATION)
    # As many entries as the stub's vocabulary has.
    models = [*pair, fake("fake", boost=1.0, shift=0.5, vocab_size=320)]
    names = ["prose", "code", "logs"]
    joined = texts.run(models, names, "-r", 4)
    assert joined.status == 0, joined.err
    shared = {label: joined.tokens(label) for label in joined.models}
    rows = dict(joined.models)
    for name in names:
        alone = texts.run(models, [name], "-r", 4, "--cache-dir", tmp_path / f"cache-{name}")
        assert alone.status == 0, alone.err
        for label, tokens in shared.items():
            tokens_alone = alone.tokens(label)
            inside = np.asarray(tokens["text"]) == name
            # The numbers of windows count over all texts of a run.
            for key in tokens_alone.keys() - {"window"}:
                assert np.array_equal(
                    np.asarray(tokens[key])[inside], np.asarray(tokens_alone[key]), equal_nan=True
                ), key
    # The two models have different KLDs: columns of the wrong one would be noticed.
    assert len({tuple(tokens["kld"]) for label, tokens in shared.items() if label != "ref"}) == 2
    assert rows["noisy"]["kld"] == pytest.approx(
        np.mean(np.asarray(shared["noisy"]["kld"], np.float64))
    )


def test_equal_windows_are_scored_once_and_count_each_time(texts: Texts) -> None:
    texts.changed("prose", "again")
    digests = texts.digests("prose", 3)
    alone = texts.run(three(), ["prose"], "-r", 3)
    assert texts.asked == pairs_of(digests)
    ran = texts.run(three(), ["prose", "again"], "-r", 3, "-cc")
    assert ran.status == 0, ran.err
    assert texts.asked == pairs_of(digests)
    assert ran.results["data"]["windows"] == 6
    assert [text["windows"] for text in ran.results["data"]["texts"]] == [3, 3]
    assert ran.results["data"]["scored_tokens"] == 2 * alone.results["data"]["scored_tokens"]
    for label in MODELS:
        assert column(ran, label, "logprob", "again") == column(ran, label, "logprob", "prose")
        assert ran.models[label]["tokens"] == 2 * alone.models[label]["tokens"]
        assert ran.models[label]["ppl"] == pytest.approx(alone.models[label]["ppl"], rel=1e-12)


def test_a_repeated_passage_is_scored_once_and_counts_each_time(
    texts: Texts, tmp_path: Path
) -> None:
    # Windows have 100 tokens: three are equal, the fourth has only z, and 50 letters are left over.
    passage = "".join(np.random.default_rng(1).choice(list("abcdefgh"), 100))
    (tmp_path / "repeated.txt").write_text(passage * 3 + "z" * 150)
    texts.changed("prose", "repeated", path="repeated.txt")
    digests = texts.digests("repeated")
    assert len(digests) == 4
    distinct = list(dict.fromkeys(digests))
    assert len(distinct) == 2
    models = three(shift=0.5)
    ran = texts.run(models, ["repeated"])
    assert ran.status == 0, ran.err
    assert texts.asked == pairs_of(distinct)
    tokens = ran.tokens("b")
    by_window = [
        [
            value
            for value, window in zip(tokens["kld"], tokens["window"], strict=True)
            if window == number
        ]
        for number in range(4)
    ]
    assert by_window[0] == by_window[1] == by_window[2] != by_window[3]
    assert ran.models["b"]["tokens"] == sum(map(len, by_window))
    assert texts.scored(models, ["repeated"], "-r", 3) == []


def test_the_number_of_windows_counts_for_each_text(texts: Texts) -> None:
    texts.changed("logs", "short", max_rows=2)
    data = texts.run(three(), ["prose", "code"], "-r", 2).results["data"]
    assert [text["windows"] for text in data["texts"]] == [2, 2]
    data = texts.run(three(), ["short", "code"]).results["data"]
    assert [text["windows"] for text in data["texts"]] == [2, 16]
    assert data["windows"] == 18


def test_clearing_forgets_the_windows_of_the_run_alone(texts: Texts, own_cache: Path) -> None:
    prose = texts.digests("prose", 3)
    code = texts.digests("code", 3)
    first = texts.run(three(shift=0.5), ["prose", "code"], "-r", 3)
    assert texts.scored(three(shift=0.5), ["prose"], "-r", 3, "-cc") == pairs_of(prose)
    assert Reader(store_of(own_cache)).windows.keys() == {*prose, *code}
    again = texts.run(three(shift=0.5), ["prose", "code"], "-r", 3)
    assert texts.asked == []
    assert {label: row["kld"] for label, row in again.models.items()} == {
        label: row["kld"] for label, row in first.models.items()
    }
    assert texts.scored([*three(shift=0.5), fake("new", boost=2.0)], ["code"], "-r", 3) == pairs_of(
        code, ["new"]
    )


def test_without_the_store_nothing_is_scored_but_new_windows(texts: Texts, own_cache: Path) -> None:
    prose = texts.digests("prose", 5)
    before = texts.run(three(), ["prose"], "-r", 3)
    shutil.rmtree(store_of(own_cache))
    again = texts.run(three(), ["prose"], "-r", 3)
    assert (again.loaded, texts.asked) == ([], [])
    assert again.models["a"]["kld"] == before.models["a"]["kld"]
    assert texts.scored(three(), ["prose"], "-r", 5) == pairs_of(prose[3:])
    assert Reader(store_of(own_cache)).windows.keys() == set(prose[3:])
    assert texts.scored([*three(), fake("new", boost=2.0)], ["prose"], "-r", 5) == [
        *pairs_of(prose[:3], ["ref"]),
        *pairs_of(prose, ["new"]),
    ]


def replace_numbers(folder: Path, window: str) -> None:
    """Halve the logits of a window in a store."""
    with safe_open(window_of(folder, window), "pt") as file:
        logits = file.get_tensor("logits")
        metadata = file.metadata()
    replace_window(folder, window, {"logits": logits * 0.5}, metadata)


def assert_one_recording(ran: Measured, *labels: str) -> None:
    """Assert that these models were compared with the same numbers of the reference."""
    assert ran.status == 0, ran.err
    first = column(ran, labels[0], "ref_logprob")
    for label in labels[1:]:
        assert column(ran, label, "ref_logprob") == first


def test_other_numbers_of_a_window_are_other_scores_of_this_window(
    texts: Texts, own_cache: Path
) -> None:
    digests = texts.digests("prose", 3)
    first = texts.run(three(), ["prose"], "-r", 3)
    before = column(first, "a", "kld")
    replace_numbers(store_of(own_cache), digests[1])
    second = texts.run(three(), ["prose"], "-r", 3)
    assert texts.asked == pairs_of(digests[1:2], ["a", "b"])
    assert_one_recording(second, "a", "b")
    after = column(second, "a", "kld")
    changed = {
        window
        for window, old, new in zip(column(second, "a", "window"), before, after, strict=True)
        if old != new
    }
    assert changed == {1}
    assert texts.scored(three(), ["prose"], "-r", 3) == []


def test_models_that_were_compared_with_different_recordings(texts: Texts, own_cache: Path) -> None:
    """The reference's numbers differ each time.

    A run compares all its models with the same numbers.
    """
    ref, a, b = three()
    ref["engine"]["random"] = 0.5
    digests = texts.digests("prose", 3)
    assert texts.scored([ref, a], ["prose"], "-r", 3) == pairs_of(digests, ["ref", "a"])
    shutil.rmtree(store_of(own_cache))
    assert texts.scored([ref, b], ["prose"], "-r", 3) == pairs_of(digests, ["ref", "b"])
    # The store has the numbers that b was compared with.
    both = texts.run([ref, a, b], ["prose"], "-r", 3)
    assert texts.asked == pairs_of(digests, ["a"])
    assert_one_recording(both, "a", "b")
    shutil.rmtree(store_of(own_cache))
    assert texts.scored([ref, a, b], ["prose"], "-r", 3) == []
    new = fake("new", boost=2.0)
    # a and b are scored again, against the new numbers.
    more = texts.run([ref, a, b, new], ["prose"], "-r", 3)
    assert texts.asked == pairs_of(digests, ["ref", "a", "b", "new"])
    assert_one_recording(more, "a", "b", "new")


def test_without_a_store_two_recordings_are_not_mixed(texts: Texts, own_cache: Path) -> None:
    ref, a, b = three()
    ref["engine"]["random"] = 0.5
    digests = texts.digests("prose", 3)
    for model in (a, b):
        assert texts.scored([ref, model], ["prose"], "-r", 3) == pairs_of(
            digests, ["ref", model["label"]]
        )
        shutil.rmtree(store_of(own_cache))
    both = texts.run([ref, a, b], ["prose"], "-r", 3)
    assert_one_recording(both, "a", "b")
    assert {label for label, _ in texts.asked} == {"ref", "a", "b"}


def test_a_lost_machine_loses_no_window_of_another_recording(
    texts: Texts, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss, the missing windows are looked up again.

    Scores that were compared with other numbers are missing too.
    """
    from tests.support.threaded import threaded

    digests = texts.digests("prose", 3)
    texts.scored(three(), ["prose"], "-r", 3)
    replace_numbers(store_of(own_cache), digests[1])
    told = threaded(monkeypatch)
    told.fails = {("a", "score"): "lost"}
    ran = texts.run(three(), ["prose"], "-r", 3)
    assert_one_recording(ran, "a", "b")
    assert texts.asked == pairs_of(digests[1:2], ["a", "b"])


def test_texts_with_different_tokenizers_are_refused(
    texts: Texts, toy_model: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(toy_model, tmp_path / "other"))
    swap_letters(other)
    texts.changed("code", "swapped", tokenizer_dir=str(other))
    assert_refused(texts.run(three(), ["prose", "swapped"]), "swapped: tokenizer_dir: ")
    assert texts.asked == []


def test_a_text_that_cannot_be_read_ends_the_run(texts: Texts, tmp_path: Path) -> None:
    (tmp_path / "code.txt").write_text("short")
    ran = texts.run(three(), ["prose", "code"])
    assert_refused(ran, "code", "eval_len: the text has 5 tokens, one window takes 61")
    (tmp_path / "prose.txt").write_text("short")
    ran = texts.run(three(), ["prose", "code"])
    assert (ran.status, ran.out, texts.asked) == (2, "", [])
    assert len([line for line in ran.err.splitlines() if line.startswith("error: ")]) == 2


def test_a_store_that_lacks_windows_is_refused(texts: Texts, tmp_path: Path) -> None:
    """Without the reference's model, the missing windows cannot be recorded; with it, they are."""
    path = tmp_path / "kept"
    prose = texts.digests("prose", 5)
    code = texts.digests("code", 5)
    texts.scored(three(), ["prose"], "-r", 3, "-lf", path)
    assert_refused(
        texts.run(three()[1:], ["prose"], "-r", 5, "-lf", path),
        f"{path}: holds 3 of the run's 5 windows",
    )
    assert_refused(
        texts.run(three()[1:], ["prose", "code"], "-r", 3, "-lf", path),
        f"{path}: holds 3 of the run's 6 windows",
    )
    assert_refused(
        texts.run(three()[1:], ["code"], "-r", 3, "-lf", path), f"{path}: holds none of the "
    )
    assert texts.asked == []
    assert texts.scored(three(), ["prose", "code"], "-r", 5, "-lf", path) == pairs_of(
        [*prose[3:], *code]
    )
    assert Reader(path).windows.keys() == {*prose, *code}
    assert texts.scored([fake("new", boost=2.0)], ["code"], "-r", 5, "-lf", path) == pairs_of(
        code, ["new"]
    )


def test_other_rotary_factors_are_other_scores(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 61 tokens; a line is printed when they are scored again."""
    edge = 100
    digests = texts.digests("code", 2)
    said = "the longest window of this run changes the model's rotary factors"

    def facts(files: ModelFiles) -> ModelFacts:
        return ModelFacts(rope_changes_above=edge if files.planned.label == "a" else None)

    monkeypatch.setattr(ModelFiles, "facts", facts)
    assert texts.scored(three(), ["code"], "-r", 2) == pairs_of(digests)
    edge = 50
    ran = texts.run(three(), ["code"], "-r", 2)
    assert texts.asked == pairs_of(digests, ["a"])
    assert [line.partition(":")[0] for line in ran.err.splitlines() if said in line] == ["a"]
    # Both kinds of scores are stored by now.
    for each_edge in (50, 100):
        edge = each_edge
        ran = texts.run(three(), ["code"], "-r", 2)
        assert (texts.asked, said in ran.err) == ([], False)
    # Longer than the windows of code, with 60 tokens, and shorter than those of prose, with 100.
    edge = 80
    assert_refused(
        texts.run(three(), ["code", "prose"]), "a: eval_len: the model has other rotary factors"
    )


def test_scores_without_their_record_are_made_usable_by_one_window(
    texts: Texts, own_cache: Path
) -> None:
    """The record says what ran.

    Without any, one window is scored again, and all scores can be used.
    """
    digests = texts.digests("prose", 3)
    texts.scored([fake("one", boost=3.0)], ["prose"], "-r", 3)
    (record,) = (own_cache / "scores").glob("*/record.*")
    record.unlink()
    ran = texts.run([fake("one", boost=3.0)], ["prose"], "-r", 3)
    assert ran.status == 0, ran.out + ran.err
    assert len(texts.asked) <= len(digests)
    assert texts.scored([fake("one", boost=3.0)], ["prose"], "-r", 3) == []


def test_two_runs_on_two_texts_do_not_wait_for_each_other(
    make: Make, told: Told, own_cache: Path
) -> None:
    """Both models of both runs are being scored at the same time.

    Both references grow the same store.
    """
    runs = (make(UNIFORM, "prose"), make(UNIFORM, "code"))
    both_score = threading.Barrier(2)
    # wait() returns the number of a thread, 0 or 1, when both of them are there.
    told.may_score = lambda: both_score.wait(TOGETHER_S) >= 0
    together(*runs)
    for run in runs:
        assert run.of("uniform").kld == pytest.approx(KLD, rel=1e-5)
        assert not any("another run" in line for line in run.said)
    opened = Reader(store_of(own_cache))
    assert opened.windows.keys() == runs[0].data.digests | runs[1].data.digests
    opened.verify()
    told.steps.clear()
    joined = make(UNIFORM, "code", "prose")
    together(joined)
    assert joined.of("uniform").kld == pytest.approx(KLD, rel=1e-5)
    assert told.steps == []


def test_two_runs_on_the_same_windows_share_the_work(
    make: Make, told: Told, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run waits for the first one.

    It scores only the windows that the first one did not need.
    """
    scored = digests_asked(monkeypatch)
    few = make(UNIFORM, "prose", n_windows=3)
    many = make(UNIFORM, "prose", "code", n_windows=5)
    told.may_score = lambda: many.said != []
    few.start()
    wait_until(lambda: ("ref", "score") in told.steps, TOGETHER_S)
    many.start()
    for run in (few, many):
        run.join(TOGETHER_S)
        assert run.of("uniform").kld == pytest.approx(KLD, rel=1e-5)
    assert sorted(scored) == sorted(pairs_of(list(many.data.digests), ["ref", "uniform"]))
    opened = Reader(store_of(own_cache))
    assert opened.windows.keys() == many.data.digests
    opened.verify()


def test_two_caches_extend_one_store_at_the_same_time(
    make: Make, told: Told, tmp_path: Path
) -> None:
    models = [fake("ref", boost=3.0, out_logits=str(tmp_path / "refs")), fake("uniform")]
    runs = (
        make(models, "prose", cache=tmp_path / "one"),
        make(models, "code", cache=tmp_path / "two"),
    )
    told.may_score = lambda: told.of("ref").count("score") == 2
    together(*runs)
    for run in runs:
        assert run.of("uniform").kld == pytest.approx(KLD, rel=1e-5)
    (folder,) = (path for path in (tmp_path / "refs").iterdir() if path.is_dir())
    assert Reader(folder).windows.keys() == runs[0].data.digests | runs[1].data.digests


def test_a_run_that_fails_leaves_the_store_to_the_run_that_records(
    make: Make, told: Told, own_cache: Path
) -> None:
    """The store has no window yet when the reference of the other run cannot be loaded."""
    good = make([fake("good", boost=3.0, reference=True), fake("uniform")], "prose")
    bad = make([fake("bad", boost=3.0, reference=True)], "code", record_all=True)
    told.fails = {("bad", "load"): "dies"}
    told.may_score = lambda: bad.outcome is not None
    good.start()
    wait_until(lambda: ("good", "score") in told.steps, TOGETHER_S)
    bad.run()
    good.join(TOGETHER_S)
    assert good.of("uniform").kld == pytest.approx(KLD, rel=1e-5)
    assert Reader(store_of(own_cache)).windows.keys() == good.data.digests


def test_another_reference_at_the_same_path_waits_for_nobody_and_destroys_nothing(
    make: Make, told: Told, tmp_path: Path
) -> None:
    path = tmp_path / "kept"
    one = make([fake("one", boost=3.0, reference=True), fake("uniform")], "prose", logits_file=path)
    other = make(
        [fake("other", boost=2.0, reference=True), fake("uniform")], "code", logits_file=path
    )
    # The model ``uniform`` of the other run.
    told.first[("one", "score done")] = ("uniform", "load")
    one.start()
    wait_until(lambda: ("one", "score") in told.steps, TOGETHER_S)
    wait_until(lambda: len(list(path.glob("row.*"))) == len(one.data.digests), TOGETHER_S)
    other.run()
    one.join(TOGETHER_S)
    assert one.of("uniform").kld == pytest.approx(KLD, rel=1e-5)
    assert Reader(path).windows.keys() == one.data.digests
    assert other.outcome is not None
    (failed, _) = other.outcome.results.models
    assert str(failed.error).startswith(f"{path}: another run is recording another reference there")


def test_a_damaged_segment_is_found_while_another_run_has_claimed_windows(
    make: Make, told: Told, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run waits for windows that it needs, and not for others."""
    monkeypatch.setattr(worker, "COMMIT_S", 0.0)
    scored = digests_asked(monkeypatch)
    before = make()
    together(before)
    digests = [window.digest for window in before.data.windows]
    folder = before.scores_of("uniform")

    def damage(window: str) -> None:
        for segment in segments.segments_in(folder):
            if window in segment.windows_for(segment.tag, {}):
                content = bytearray(segment.file.read_bytes())
                content[-1] ^= 1
                segment.file.write_bytes(content)

    # The first claim has windows that this run does not miss, one of them of no text.
    for needed, claims, waits in ((1, {digests[3], "f" * 32}, False), (2, {digests[2]}, True)):
        scored.clear()
        damage(digests[needed])
        run = make()
        with claimed(Cache(own_cache), folder, claims, lambda: None):
            run.start()
            wait_until(
                lambda run=run: not run.is_alive() or "another run" in str(run.said), TOGETHER_S
            )
            assert run.is_alive() == waits
        run.join(TOGETHER_S)
        assert scored == pairs_of([digests[needed]], ["uniform"])
        assert any("damaged" in line for line in run.said)
        assert run.of("uniform").kld == before.of("uniform").kld


def test_a_killed_worker_loses_what_is_not_committed(
    texts: Texts, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run after it scores the windows that are not in a segment, and no others."""
    # Killing a worker in this process would end the tests.
    monkeypatch.delenv("COMPARE_Q_IN_PROCESS")
    # Scores are committed every 2 s, so that a kill after the first segment loses some of 9
    # windows.
    models = [fake("slow", boost=3.0, seconds=0.7)]

    def committed() -> set[str]:
        folders = [folder for folder in (own_cache / "scores").glob("*") if folder.is_dir()]
        return {
            window for folder in folders for window in segments.committed(folder, segments.ALONE)
        }

    def kill() -> None:
        wait_until(committed, TOGETHER_S)
        os.kill(workers_of(own_cache)[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    ran = texts.run(models, ["prose"])
    killer.join(TOGETHER_S)
    assert ran.status == 2, ran.out
    committed_windows = committed()
    assert 0 < len(committed_windows) < 9
    monkeypatch.setenv("COMPARE_Q_IN_PROCESS", "1")
    monkeypatch.setattr("tests.support.fake_engine.time.sleep", lambda _: None)
    lost_windows = [digest for digest in texts.digests("prose") if digest not in committed_windows]
    assert texts.scored(models, ["prose"]) == pairs_of(lost_windows, ["slow"])


def test_two_models_with_one_key(texts: Texts) -> None:
    """The same model under two labels: its windows are scored once."""
    models = [*UNIFORM, fake("twin")]
    digests = texts.digests("prose", 3)
    ran = texts.run(models, ["prose"], "-r", 3, "-cc")
    assert ran.status == 0, ran.err
    assert texts.asked == pairs_of(digests, ["ref", "uniform"])
    assert ran.models["twin"]["kld"] == ran.models["uniform"]["kld"]


def test_a_model_that_fails_keeps_its_committed_windows(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "COMMIT_S", 0.0)
    prose = texts.digests("prose", 3)
    code = texts.digests("code", 3)
    score = FakeEngine.pieces
    fails = True

    def failing(engine: FakeEngine, window: Window) -> Any:
        if fails and engine.planned.label == "a" and window.digest == code[1]:
            raise MemoryError
        return score(engine, window)

    monkeypatch.setattr(FakeEngine, "pieces", failing)
    ran = texts.run(three(), ["prose", "code"], "-r", 3)
    assert ran.status == 1
    assert ran.models["a"]["error"]
    assert ran.models["b"]["kld"]
    fails = False
    # Nothing says yet what ran.
    assert texts.scored(three(), ["prose"], "-r", 3) == pairs_of(prose[2:], ["a"])
    assert texts.scored(three(), ["prose", "code"], "-r", 3) == pairs_of(code[1:], ["a"])
