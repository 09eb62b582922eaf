"""Reference packs from the command line: they are made once, used without the model, and refused if
damaged.
"""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from compare_q.backends.base import Window
from compare_q.backends.common import storage
from compare_q.backends.reference import pack_files, store
from compare_q.backends.reference.stored_logprobs import StoredLogprobs
from compare_q.eval.cli import main
from compare_q.eval.text import stored_tokens
from tests.support.fake_engine import digests_asked
from tests.support.stores import replace_window
from tests.support.toy import (
    FAKE,
    Run,
    Specs,
    assert_refused,
    in_transformers,
    save_toy_tokenizer,
    swap_letters,
)
from tests.support.vllm_server import VOCAB, Stub, gold

WINDOWS = 4
KLDS = ("kld", "kld_stderr", "same_top", "ln_ppl_ratio", "ppl")


@pytest.fixture(scope="module")
def made(toy_model: Path, toy_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of the toy in Transformers; the cache and the copy of the model that made it are
    deleted afterwards.
    """
    folder = tmp_path_factory.mktemp("big machine")
    model = Path(shutil.copytree(toy_model, folder / "model"))
    spec = {
        "dataset": "text",
        "path": str(toy_text),
        "tokenizer_dir": str(model),
        "eval_len": 100,
        "eval_stride": 100,
    }
    (folder / "data.json").write_text(json.dumps(spec))
    (folder / "model.json").write_text(json.dumps(in_transformers(model)))
    words = [
        "pack",
        "-d",
        folder / "data.json",
        "-m",
        folder / "model.json",
        "-r",
        WINDOWS,
        "-o",
        folder / "toy.pack",
    ]
    assert main.main([str(word) for word in (*words, "--cache-dir", folder / "cache")]) == 0
    shutil.rmtree(model)
    shutil.rmtree(folder / "cache")
    return folder / "toy.pack"


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "toy.pack"))


def with_pack(
    folder: Path, write_specs: Specs, *models: dict[str, Any], **data: Any
) -> tuple[object, ...]:
    """Return the arguments of a run that compares models with a pack on the pack's text."""
    reference = {"load_fn": "pack", "label": "ref", "model_dir": str(folder), "reference": True}
    data_file, models_file = write_specs([reference, *models])
    data_file.write_text(json.dumps({"pack": str(folder), **data}))
    return "-d", data_file, "-m", models_file


def rows_of(file: Path) -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in json.loads(file.read_text())["models"]}


def digest_of(folder: Path) -> dict[str, pack_files.File]:
    return dict(pack_files.entries_of(folder))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_tokens_are_read_by_a_numpy_that_converts_no_array_to_a_number(
    copy: Path, shape: tuple[int, ...]
) -> None:
    """A pack may contain a number as an array of one element; numpy refuses to convert such an
    array from 2.5 on.
    """
    file = copy / pack_files.TOKENS_FILE
    with safe_open(file, "np") as opened:
        metadata = opened.metadata()
    arrays = load_file(file)
    assert arrays["top_id"].shape == ()
    save_file({**arrays, "top_id": arrays["top_id"].reshape(shape)}, file, metadata)
    with warnings.catch_warnings():
        # Before 2.5, numpy warns.
        warnings.simplefilter("error")
        assert stored_tokens.tokens_of_pack(copy).top_id == arrays["top_id"]


def test_rows_equal_those_of_the_run_with_the_model(
    made: Path,
    toy_model: Path,
    quantized: Callable[..., Path],
    compare_q: Run,
    write_specs: Specs,
    tmp_path: Path,
    own_cache: Path,
) -> None:
    """Rows are bit-identical, in an engine with the model's dtype and with another dtype, for all
    or fewer windows.
    """
    w4 = in_transformers(quantized("W4A16"), label="w4")
    others = [
        w4,
        in_transformers(toy_model, label="same"),
        {**FAKE, "engine": {"vocab_size": 300, "boost": 1.0}},
    ]
    full = tmp_path / "full.json"
    few = tmp_path / "few.json"
    models = tmp_path / "with the model.json"
    before = digest_of(made)
    ran = compare_q(*with_pack(made, write_specs, *others), "-o", full, "--notes")
    assert ran.status == 0, ran.err
    assert "recorded with model, transformers" in ran.out
    assert compare_q(*with_pack(made, write_specs, *others), "-r", 2, "-o", few, "-cc").status == 0
    assert digest_of(made) == before, "-cc deletes nothing of a pack"
    data, specs = write_specs([in_transformers(toy_model, label="ref", reference=True), *others])
    for count, file in ((WINDOWS, full), (2, few)):
        assert compare_q("-d", data, "-m", specs, "-r", count, "-o", models).status == 0
        rows = rows_of(file)
        expected = rows_of(models)
        for label in ("w4", "same", "fake"):
            for key in KLDS:
                assert rows[label][key] == expected[label][key]
        assert rows["ref"]["ppl"] == pytest.approx(expected["ref"]["ppl"], rel=1e-6)
    assert rows_of(few)["same"]["kld"] == 0 < rows_of(few)["w4"]["kld"]
    manifest = pack_files.verified(made)
    assert (len(manifest.windows), manifest.scored_tokens) == (WINDOWS, WINDOWS * 99)
    assert manifest.ppl == pytest.approx(rows_of(full)["ref"]["ppl"], rel=1e-6)
    assert 0 < (manifest.floor_kld or 0) < 1e-3


def test_a_pack_is_named_on_the_command_line(
    made: Path, toy_model: Path, compare_q: Run, tmp_path: Path
) -> None:
    """The pack is the first model, without -d; a text that -d names must be the pack's text."""
    model = f"{toy_model}@transformers"
    ran = compare_q(made, model, "-o", tmp_path / "r.json")
    assert ran.status == 0, ran.err
    assert rows_of(tmp_path / "r.json").keys() == {"model (pack)", "toy-llama"}
    (tmp_path / "other.txt").write_text("another text " * 100)
    ran = compare_q(made, toy_model, "-d", tmp_path / "other.txt")
    assert ran.status == 2
    assert "holds none of the run's" in ran.err
    assert "leave -d out" in ran.err
    refused = compare_q(f"{made}@pack:dtype=float32", toy_model)
    assert (refused.status, "engine.dtype: " in refused.err) == (2, True)
    alone = compare_q(made)
    assert (alone.status, f"{WINDOWS} windows" in alone.out) == (0, True)
    ran = compare_q("check", made, toy_model)
    assert (ran.status, f"{WINDOWS} windows" in ran.out) == (0, True)
    ran = compare_q("doctor", made)
    assert (ran.status, "perplexity" in ran.out, "nothing wrong found" in ran.out) == (
        0,
        True,
        True,
    )


@pytest.mark.slow
def test_a_server_is_compared_with_a_pack_in_another_home(
    made: Path,
    compare_q: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the model: the pack has the text and the reference, the server has the scores."""
    monkeypatch.setenv("HOME", str(tmp_path))
    out = tmp_path / "r.json"
    with Stub() as stub:
        threading.Thread(target=stub.serve_forever, args=(0.01,), daemon=True).start()
        ran = compare_q(made, f"served={stub.url}", "-o", out)
        stub.shutdown()
    assert ran.status == 0, ran.err
    row = rows_of(out)["served"]
    reference = StoredLogprobs(store.Reader(made / pack_files.STATES))
    klds = []
    for index, token_ids in enumerate(stub.windows):
        window = Window.scored_from(index, np.array(token_ids, np.int32))
        logprobs = np.concatenate([piece.numpy() for piece in reference.pieces(window)])
        own = [[gold(token, before) for token in range(VOCAB)] for before in token_ids[:-1]]
        klds.append((np.exp(logprobs) * (logprobs - np.array(own))).sum(1).mean())
    assert len(klds) == WINDOWS
    assert row["kld_kind"] == "bound"
    assert 0 < row["kld"] < np.mean(klds)
    assert row["same_top"] is not None


FILES = (
    "pack.json",
    "states/reference.json",
    "states/row.*",
    "states/head.*",
    "tokens.safetensors",
    "scores.safetensors",
    "tokenizer/tokenizer.json",
    "README.md",
)


@pytest.mark.parametrize("pattern", FILES)
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_file_is_named_before_a_model_loads(
    copy: Path, compare_q: Run, write_specs: Specs, pattern: str, damage: str
) -> None:
    file = sorted(copy.glob(pattern))[0]
    # A model that would abort this process: the refusal must come before it scores.
    words = with_pack(copy, write_specs, {**FAKE, "engine": {"failure": "abort", "fail": 0}})
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    if damage == "flipped":
        file.write_bytes(content)
    elif damage != "gone":
        file.write_bytes(content[: len(content) // 2])
    before = digest_of(copy)
    assert_refused(compare_q(*words), file.name)
    assert digest_of(copy) == before


def rewritten(folder: Path, **changes: Any) -> None:
    """Write a manifest with other values and a valid checksum into a pack."""
    content = storage.load((folder / pack_files.PACK_MANIFEST).read_bytes()) | changes
    (folder / pack_files.PACK_MANIFEST).write_bytes(storage.dump(content))


def resealed(folder: Path) -> None:
    """Write a manifest with the current checksums of its files into a pack."""
    rewritten(
        folder,
        files={
            name: file.model_dump()
            for name, file in pack_files.entries_of(folder)
            if name != pack_files.PACK_MANIFEST
        },
    )


def escape(folder: Path) -> None:
    files = storage.load((folder / pack_files.PACK_MANIFEST).read_bytes())["files"]
    rewritten(folder, files=files | {"../secret": {"bytes": 1, "sha256": "0" * 64}})


def without_head(folder: Path) -> None:
    (file,) = (folder / pack_files.STATES).glob("head.*")
    file.unlink()
    resealed(folder)


def huge(folder: Path) -> None:
    # A reader that believes this header asks for 2^62 bytes of memory.
    header = json.dumps(
        {"ids": {"dtype": "I32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}}
    ).encode()
    (folder / pack_files.TOKENS_FILE).write_bytes(
        len(header).to_bytes(8, "little") + header + b"1234"
    )
    resealed(folder)


def huge_head(folder: Path) -> None:
    manifest = storage.load((folder / "states/reference.json").read_bytes())
    manifest["head"]["vocab_size"] = 1 << 60
    (folder / "states/reference.json").write_bytes(storage.dump(manifest))
    resealed(folder)


def other_states(folder: Path) -> None:
    """The states of a window are those of another one, under a right name."""
    manifest = store.read_manifest(folder / pack_files.STATES)
    first, second, *_ = sorted(manifest.windows)
    with safe_open(folder / pack_files.STATES / manifest.windows[second], "pt") as file:
        states = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    replace_window(folder / pack_files.STATES, first, states, metadata)
    resealed(folder)


def other_vocabulary(folder: Path) -> None:
    manifest = storage.load((folder / "states/reference.json").read_bytes())
    manifest["identity"]["vocabulary"] = "0" * 64
    (folder / "states/reference.json").write_bytes(storage.dump(manifest))
    resealed(folder)


def more_windows(folder: Path) -> None:
    """The manifest lists a window that the store does not have."""
    rewritten(folder, windows=[*pack_files.read(folder).windows, "0" * 32])


def fewer_windows(folder: Path) -> None:
    rewritten(folder, windows=pack_files.read(folder).windows[1:])


def other_scores(folder: Path) -> None:
    scores = load_file(folder / pack_files.SCORES_FILE)
    scores["logprob"][7] -= 3
    save_file(scores, folder / pack_files.SCORES_FILE)
    resealed(folder)


def short_scores(folder: Path) -> None:
    save_file(
        load_file(folder / pack_files.SCORES_FILE) | {"entropy": np.zeros(3, np.float32)},
        folder / pack_files.SCORES_FILE,
    )
    resealed(folder)


@pytest.mark.parametrize(
    ("change", "gold"),
    [
        (
            lambda folder: rewritten(folder, format=3),
            "format 3, this compare_q reads 2; update compare_q",
        ),
        (
            lambda folder: rewritten(folder, format=1),
            "format 1, this compare_q reads 2; record it again",
        ),
        (escape, "pack.json"),
        (without_head, "states: lacks states/head.000000"),
        (huge, "tokens.safetensors: damaged"),
        (huge_head, "states: its files are not of one form, or have other shapes"),
        (other_states, "the stored states do not give what transformers "),
        (other_vocabulary, "toy.pack: the reference was made with another tokenizer"),
        (more_windows, "states: lacks 1 of the 5 windows in pack.json"),
        (fewer_windows, "states: has 4 windows, pack.json lists 3"),
        (lambda folder: rewritten(folder, windows=4), "pack.json"),
        (short_scores, "scores.safetensors: damaged"),
        (other_scores, "scored token 7: logprob"),
    ],
)
def test_a_pack_that_lies_is_refused(
    copy: Path, compare_q: Run, write_specs: Specs, change: Callable[[Path], None], gold: str
) -> None:
    # A model that would abort this process: the refusal must come before it scores.
    words = with_pack(copy, write_specs, {**FAKE, "engine": {"failure": "abort", "fail": 0}})
    change(copy)
    before = digest_of(copy)
    ran = compare_q(*words)
    assert ran.status == 2, ran.out
    assert gold in ran.err.splitlines()[-1]
    assert ran.err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in ran.err + ran.out
    assert digest_of(copy) == before


def test_a_model_with_another_tokenizer_or_a_text_of_other_windows_is_refused(
    made: Path, toy_model: Path, compare_q: Run, write_specs: Specs, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(toy_model, tmp_path / "other"))
    save_toy_tokenizer(other)
    swap_letters(other)
    words = with_pack(made, write_specs, in_transformers(other, label="other"))
    assert_refused(compare_q(*words), "other", "tokenizer_dir: is not this model's tokenizer")
    small = {**FAKE, "engine": {"vocab_size": 300}}
    words = with_pack(made, write_specs, small, eval_len=50)
    assert_refused(compare_q(*words), "holds none of the run's")
    words = with_pack(made, write_specs, small)
    # The text has nine windows, and the pack four of them.
    ran = compare_q(*words, "-r", 9)
    assert_refused(
        ran, f"{made}: holds 4 of the run's 9 windows; leave -r out, or use at most -r 4"
    )
    data, models = write_specs([{"load_fn": "pack", "model_dir": str(made), "out_logits": "store"}])
    assert_refused(
        compare_q("-d", data, "-m", models), "out_logits: a reference pack is a store already"
    )
    words = with_pack(made, write_specs, small)
    assert_refused(
        compare_q(*words, "-lf", tmp_path / "store"),
        "--logits_file: a reference pack is a store already",
    )


def test_what_is_made(
    toy_model: Path, toy_text: Path, compare_q: Run, write_specs: Specs, tmp_path: Path
) -> None:
    """Logits are recorded only on request; a pack is replaced by more windows, but not by another
    text or model.
    """
    data, models = write_specs([{**FAKE, "engine": {"vocab_size": 400}}])
    target = tmp_path / "fake.pack"
    words = ["pack", "-d", data, "-m", models, "-o", target, "--no-floor"]
    ran = compare_q(*words, "-r", 2)
    assert (ran.status, "--logits makes it" in ran.err, target.exists()) == (2, True, False)
    assert compare_q(*words, "-r", 2, "--logits").status == 0
    assert len(pack_files.verified(target).windows) == 2
    assert pack_files.read(target).floor_kld is None
    assert compare_q(*words, "-r", 3, "--logits").status == 0
    assert len(pack_files.verified(target).windows) == 3
    before = digest_of(target)
    fewer = tmp_path / "fewer.pack"
    assert compare_q(*words[:6], fewer, "--no-floor", "--logits", "-r", 2).status == 0
    assert len(pack_files.verified(fewer).windows) == 2
    ran = compare_q(*words, "-r", 2, "--logits")
    assert (ran.status, "is a pack with 3 windows already" in ran.err) == (2, True)
    data, _ = write_specs([{**FAKE, "engine": {"vocab_size": 400}}], eval_len=50, eval_stride=50)
    ran = compare_q(*words, "-r", 4, "--logits")
    assert (ran.status, "is a pack of another text" in ran.err) == (2, True)
    assert digest_of(target) == before
    (tmp_path / "mine").mkdir()
    assert_refused(compare_q(*words[:6], tmp_path / "mine"), "exists and is not a reference pack")
    assert_refused(compare_q(*words[:5]), "-o: is missing")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    answer = compare_q(
        *with_pack(target, write_specs, {**FAKE, "engine": {"vocab_size": 400, "boost": 2.0}})
    )
    assert answer.status == 0, answer.err


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("license: apache-2.0", "apache-2.0"),
        ("license: other\nlicense_name: llama3.1", "llama3.1"),
        ("language: en", None),
        # The YAML is broken, which costs no more than the license.
        ("license: [", None),
    ],
)
def test_a_pack_names_the_license_of_the_models_card(
    compare_q: Run, write_specs: Specs, tmp_path: Path, card: str, license: str | None
) -> None:
    model, target = tmp_path / "model", tmp_path / "fake.pack"
    model.mkdir()
    (model / "README.md").write_text(f"---\n{card}\n---\n# A model\n")
    data, models = write_specs([{**FAKE, "model_dir": str(model), "engine": {"vocab_size": 400}}])
    ran = compare_q(
        "pack", "-d", data, "-m", models, "-o", target, "--no-floor", "--logits", "-r", 1
    )
    assert ran.status == 0, ran.err
    assert pack_files.read(target).model_license == license


def fake_pack(compare_q: Run, write_specs: Specs, target: Path, count: int) -> Path:
    """Return a pack of a model whose logits differ between recordings; nothing else of two packs
    differs.
    """
    data, models = write_specs([{**FAKE, "engine": {"vocab_size": 400, "random": 0.5}}])
    cache = target.with_name(f"cache of {target.name}")
    words = ["pack", "-d", data, "-m", models, "-o", target, "--no-floor", "--logits", "-r", count]
    ran = compare_q(*words, "--cache-dir", cache)
    assert ran.status == 0, ran.err
    shutil.rmtree(cache)
    return target


def test_a_pack_of_other_numbers_is_another_recording(
    compare_q: Run, write_specs: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were compared with the first pack are scored again, for all windows: numbers are
    never mixed.
    """
    one = fake_pack(compare_q, write_specs, tmp_path / "one.pack", 2)
    two = fake_pack(compare_q, write_specs, tmp_path / "two.pack", 3)
    windows = pack_files.read(two).windows
    assert pack_files.read(one).windows == windows[:2]
    engine = {"vocab_size": 400, "boost": 1.0}
    first = {**FAKE, "label": "first", "engine": {**engine, "shift": 0.0}}
    second = {**FAKE, "label": "second", "engine": {**engine, "shift": 0.5}}
    scored_digests = digests_asked(monkeypatch)

    def run(folder: Path, *models: dict[str, Any]) -> dict[str, list[float]]:
        """Return each row's log-probabilities of the reference [N]; ``scored_digests`` then has
        what was scored.
        """
        scored_digests.clear()
        scores = tmp_path / "scores"
        shutil.rmtree(scores, ignore_errors=True)
        ran = compare_q(*with_pack(folder, write_specs, *models), "--tokens-out", scores)
        assert ran.status == 0, ran.err
        logprobs = {}
        for model in models:
            table = parquet.read_table(scores / f"{model['label']}.parquet")
            logprobs[model["label"]] = table["ref_logprob"].to_pylist()
        return logprobs

    (before,) = run(one, first).values()
    assert scored_digests == [("first", window) for window in windows[:2]]
    both = run(two, first, second)
    of_first = [("first", window) for window in windows]
    of_second = [("second", window) for window in windows]
    assert scored_digests == of_first + of_second
    assert both["first"] == both["second"]
    # Elsewhere, one of 200 random numbers is equal to one of 300 others in 2 % of runs.
    of_first_pack = np.array(before)
    assert (np.array(both["first"][: len(before)]) != of_first_pack).all()
    assert run(two, first, second) == both
    assert scored_digests == []
    assert run(one, first) == {"first": before}
    assert scored_digests == [("first", window) for window in windows[:2]]


def test_a_pack_that_lacks_windows_of_the_run_is_refused(
    made: Path, compare_q: Run, write_specs: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is not the pack's, next to the pack's or alone; nothing is scored."""
    scored_digests = digests_asked(monkeypatch)
    small = {**FAKE, "engine": {"vocab_size": 300}}
    _, _, _, models = with_pack(made, write_specs, small)
    text = tmp_path / "other.txt"
    text.write_text("hgfedcba\n" * 50)
    (tmp_path / "pack.json").write_text(json.dumps({"pack": str(made)}))
    other = {
        "tokenizer_dir": str(made / pack_files.TOKENIZER),
        "dataset": "text",
        "path": str(text),
    }
    (tmp_path / "other.json").write_text(
        json.dumps({**other, "eval_len": 100, "eval_stride": 100, "max_rows": 2})
    )
    joined = compare_q("-d", tmp_path / "pack.json", tmp_path / "other.json", "-m", models)
    assert_refused(joined, str(made), "holds 4 of the run's 6 windows; name a text")
    alone = compare_q("-d", tmp_path / "other.json", "-m", models)
    assert_refused(alone, str(made), "holds none of the run's 2 windows")
    assert scored_digests == []
