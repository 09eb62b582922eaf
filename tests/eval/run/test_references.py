"""KL divergence from the command line: against float64, on the positions of PPL, against the right store or none."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
import transformers
from safetensors.torch import save_file

from backends.fake import FakeBackend
from backends.hf.backend import TransformersBackend
from backends.reference import comparison
from backends.reference.store import MANIFEST, Reader, window_file
from eval.text import vocabulary
from tests.support.toy import TOY_VOCAB, Ran, save_toy_tokenizer

Models = Sequence[dict[str, Any]]
FAKE = {"load_fn": "fake", "model_dir": "none"}
ROWS, LENGTH = 3, 100  # windows of these tests, and their tokens
PREFIX = "system:\nuser:Say something.\na:"  # of the toy tokenizer's chat template, a token a letter
KLD = 0.078622  # of uniform logits against a boost of 3 for the real token, over 500 tokens: see test_cli.py


@dataclass(frozen=True)
class Measured(Ran):
    """What a command line did, its results.json, and the folder of its tokens."""

    results: dict[str, Any]
    folder: Path

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """Label -> model, in the order of the file."""
        return {model["label"]: model for model in self.results["models"]}

    @property
    def loaded(self) -> list[str]:
        """Labels of the models that were loaded, in order."""
        return re.findall(r"^loading (.*): [\d.]+ s$", self.err, re.MULTILINE)

    def tokens(self, label: str) -> dict[str, list[Any]]:
        """A model's per-token scores."""
        columns: dict[str, list[Any]] = parquet.read_table(self.folder / f"{label}.parquet").to_pydict()
        return columns


Compare = Callable[..., Measured]


@pytest.fixture
def measured(
    compare_q: Callable[..., Ran], write_specs: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> Callable[..., Measured]:
    """Run models with flags, over 3 windows of the toy text unless ``data`` says otherwise."""

    def run(models: Models, *flags: object, **data: Any) -> Measured:
        files = write_specs(list(models), **{"max_rows": ROWS, **data})
        file, folder = tmp_path / "results.json", tmp_path / "tokens"
        file.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        ran = compare_q("-d", files[0], "-m", files[1], "-o", file, "--tokens-out", folder, *flags)
        results = json.loads(file.read_text()) if file.exists() else {}
        return Measured(ran.status, ran.out, ran.err, results, folder)

    return run


def assert_refused(ran: Ran, *parts: str) -> None:
    """Exit status 2 and one line of error that holds every part; nothing was loaded."""
    assert ran.status == 2, ran.out + ran.err
    (line,) = [
        line for line in ran.err.splitlines() if not line.startswith(("tokenizing ", "checking reference ", "reading "))
    ]
    assert line.startswith("error: ")
    for part in parts:
        assert part in line
    assert ran.out == ""


def toy(folder: Path, label: str, *, dtype: str = "float32", **keys: Any) -> dict[str, Any]:
    """A model in Transformers, on the CPU also where there is a GPU: the gold values are computed there."""
    engine = {"dtype": dtype, "device_map": "cpu"}
    return {"load_fn": "transformers", "model_dir": str(folder), "label": label, "engine": engine, **keys}


def fake(label: str, *, vocab_size: int = 500, **keys: Any) -> dict[str, Any]:
    """A fake model; all keys but the mark of a reference are its engine's."""
    marks = {name: keys.pop(name) for name in ("reference", "out_logits") if name in keys}
    return {**FAKE, "label": label, "engine": {"vocab_size": vocab_size, **keys}, **marks}


def noisy(folder: Path, target: Path, scale: float = 0.03) -> Path:
    """A copy of a model with noise on all of its matrices, of ``scale`` times their standard deviation."""
    shutil.copytree(folder, target)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in {id(weight): weight for weight in model.parameters() if weight.ndim == 2}.values():
            weight += scale * weight.std() * torch.randn(weight.shape, generator=generator)
    model.bfloat16().save_pretrained(target)
    return target


@pytest.fixture(scope="session")
def noisy_model(tmp_path_factory: pytest.TempPathFactory, toy_model: Path) -> Path:
    return noisy(toy_model, tmp_path_factory.mktemp("noisy") / "toy")


@pytest.fixture
def pair(toy_model: Path, noisy_model: Path) -> list[dict[str, Any]]:
    """A reference and a model that differs from it, in float32."""
    return [toy(toy_model, "ref", reference=True), toy(noisy_model, "noisy")]


def store_of(root: Path) -> Path:
    """The one store in the cache."""
    (manifest,) = root.glob(f"references/*/{MANIFEST}")
    return manifest.parent


def left_behind(root: Path) -> list[str]:
    """What lies beside the locks in the cache's folder of references."""
    return [entry.name for entry in (root / "references").iterdir() if entry.suffix != ".lock"]


# What must come out, computed here from whole logits: transformers, then plain Python in float64.


def text_windows(text: Path, rows: int = ROWS, length: int = LENGTH, stride: int = 100, prefix: str = "") -> list[Any]:
    """Token ids of the windows, by hand: one token a letter, its id its place in the sorted alphabet of bytes."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())

    def ids(letters: str) -> list[int]:
        return [alphabet.index({" ": "Ġ", "\n": "Ċ"}.get(letter, letter)) for letter in letters]

    letters = text.read_text()
    return [ids(prefix + letters[begin : begin + length]) for begin in range(0, rows * stride, stride)]


def whole_logits(folder: Path, windows: list[list[int]], dtype: str = "float32") -> list[torch.Tensor]:
    """Logits [L, V] of every window."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with torch.inference_mode():
        return [model(torch.tensor([window]), use_cache=False).logits[0] for window in windows]


def log_softmax(logits: Sequence[float]) -> list[float]:
    peak = max(logits)
    log_total = math.log(math.fsum(math.exp(z - peak) for z in logits))
    return [z - peak - log_total for z in logits]


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """KL(p || q) of two log-softmaxes."""
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def brute_force(
    reference: Sequence[torch.Tensor], model: Sequence[torch.Tensor], windows: list[list[int]], score_from: int = 1
) -> dict[str, list[Any]]:
    """The columns of the tokens that a comparison must have."""
    columns = ("window", "position", "token_id", "logprob", "ref_logprob", "ref_top1_logprob", "kld", "same_top")
    gold: dict[str, list[Any]] = {name: [] for name in columns}
    for row, window in enumerate(windows):
        for position in range(score_from, len(window)):
            p = log_softmax(reference[row][position - 1].double().tolist())
            q = log_softmax(model[row][position - 1].double().tolist())
            token = window[position]
            same = p.index(max(p)) == q.index(max(q))
            for name, value in zip(
                columns, (row, position, token, q[token], p[token], max(p), divergence(p, q), same), strict=True
            ):
                gold[name].append(value)
    return gold


def assert_tokens(found: dict[str, list[Any]], gold: dict[str, list[Any]]) -> None:
    """Every column within 1e-5 (the largest difference seen is 3e-6), at exactly the gold's positions."""
    for name in ("window", "position", "token_id", "same_top"):
        assert found[name] == gold[name], name
    for name in ("logprob", "ref_logprob", "ref_top1_logprob", "kld"):
        np.testing.assert_allclose(found[name], gold[name], rtol=0, atol=1e-5, err_msg=name)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# What is measured


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_against_itself_is_exactly_zero(measured: Compare, toy_model: Path, dtype: str) -> None:
    """Also though the reference's product is of fewer rows than the model's own: the warm-up is not kept."""
    same = toy(toy_model, "same", dtype=dtype)
    ran = measured([toy(toy_model, "ref", dtype=dtype, reference=True), same], warmup_tokens=5)
    assert ran.status == 0, ran.err
    assert ran.loaded == ["ref", "same"]
    found = ran.tokens("same")
    assert set(found["kld"]) == {0.0}
    assert set(found["same_top"]) == {True}
    assert found["ref_logprob"] == found["logprob"]
    model = ran.models["same"]
    assert (model["kld"], model["kld_sum"], model["same_top"]) == (0.0, 0.0, 1.0)
    assert model["ppl"] == ran.models["ref"]["ppl"]
    assert ran.results["reference"]["contents"] == "states"
    assert ran.results["reference"]["head_dtype"] == dtype


@pytest.mark.parametrize(
    ("data", "prefix", "score_from"),
    [
        ({}, "", 1),
        ({"warmup_tokens": 30}, "", 31),
        ({"chat_template": True}, PREFIX, len(PREFIX) + 1),
        ({"chat_template": True, "warmup_tokens": 30, "eval_stride": 50}, PREFIX, len(PREFIX) + 31),
    ],
)
def test_divergence_of_every_token_against_float64(
    measured: Compare, toy_model: Path, noisy_model: Path, pair: Models, toy_text: Path,
    data: dict[str, Any], prefix: str, score_from: int,
) -> None:  # fmt: skip
    """On exactly the positions of PPL: neither the warm-up nor the chat prefix counts."""
    ran = measured(pair, **data)
    assert ran.status == 0, ran.err
    windows = text_windows(toy_text, stride=data.get("eval_stride", 100), prefix=prefix)
    logits = [whole_logits(folder, windows) for folder in (toy_model, noisy_model)]
    gold = brute_force(*logits, windows, score_from)
    assert_tokens(ran.tokens("noisy"), gold)
    model = ran.models["noisy"]
    assert model["kld"] == pytest.approx(mean(gold["kld"]), abs=1e-5)
    assert model["kld"] > 0.01  # the noise is no rounding
    assert model["same_top"] == pytest.approx(mean(gold["same_top"]), abs=1e-12)
    assert model["same_top"] < 1.0
    assert model["kld_tokens"] == model["tokens"] == ROWS * (len(prefix) + LENGTH - score_from) == len(gold["kld"])
    reference = ran.tokens("ref")
    assert "kld" not in reference
    assert [reference[name] for name in ("window", "position")] == [gold["window"], gold["position"]]


def test_divergence_of_bf16_models_against_float64(
    measured: Compare, toy_model: Path, noisy_model: Path, toy_text: Path
) -> None:
    """The stored states give the bf16 logits that the model had, each rounded as the model rounded it."""
    models = [toy(toy_model, "ref", dtype="bfloat16", reference=True), toy(noisy_model, "noisy", dtype="bfloat16")]
    ran = measured(models)
    assert ran.status == 0, ran.err
    windows = text_windows(toy_text)
    gold = brute_force(*(whole_logits(folder, windows, "bfloat16") for folder in (toy_model, noisy_model)), windows)
    assert_tokens(ran.tokens("noisy"), gold)


def test_a_long_vocabulary_is_compared_in_pieces(
    measured: Compare, pair: Models, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measured(pair).tokens("noisy")
    monkeypatch.setattr(comparison, "CHUNK_ELEMENTS", 7 * TOY_VOCAB)
    pieces = measured(pair, "-cc").tokens("noisy")
    np.testing.assert_allclose(pieces["kld"], whole["kld"], rtol=1e-4, atol=1e-5)
    assert pieces["window"] == whole["window"]


def cut_divergence(boost: float, entries: int) -> float:
    """KLD of uniform logits against a boost for the real token, over a number of entries."""
    total = math.exp(boost) + entries - 1
    p, rest = math.exp(boost) / total, 1 / total
    return p * math.log(p * entries) + (entries - 1) * rest * math.log(rest * entries)


def test_the_closed_form() -> None:
    assert cut_divergence(3.0, 500) == pytest.approx(KLD, abs=1e-6)


@pytest.mark.parametrize("vocab_size", [400, 500, 600])
def test_vocabularies_are_cut_to_what_both_have(measured: Compare, vocab_size: int) -> None:
    """Uniform logits over 400, 500 or 600 tokens against 500; what only one model has is in no softmax."""
    ran = measured([fake("ref", boost=3.0, reference=True), fake("uniform", vocab_size=vocab_size)])
    assert ran.status == 0, ran.out
    entries = min(vocab_size, 500)
    model = ran.models["uniform"]
    assert model["kld"] == pytest.approx(cut_divergence(3.0, entries), abs=1e-5)
    assert model["ppl"] == pytest.approx(entries, rel=1e-5)
    assert model["kld_tokens"] == model["tokens"] == ROWS * (LENGTH - 1)


@pytest.mark.parametrize("entries", [300, 384])
def test_a_padded_head_is_cut_and_the_table_says_so(
    measured: Compare, toy_model: Path, toy_text: Path, tmp_path: Path, entries: int
) -> None:
    """A model whose head is shorter or longer than the reference's, whose other logits it shares."""
    resized = tmp_path / "resized"
    shutil.copytree(toy_model, resized)
    model = transformers.AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.bfloat16)
    torch.manual_seed(3)
    model.resize_token_embeddings(entries, mean_resizing=False)
    model.save_pretrained(resized)
    ran = measured([toy(toy_model, "ref", reference=True), toy(resized, "resized")])
    assert ran.status == 0, ran.out
    shared, windows = min(entries, TOY_VOCAB), text_windows(toy_text)
    logits = [[z[:, :shared] for z in whole_logits(folder, windows)] for folder in (toy_model, resized)]
    assert_tokens(ran.tokens("resized"), brute_force(*logits, windows))
    assert f"resized: of {entries} and {TOY_VOCAB} logits, only those that both have count" in ran.out


def test_a_fake_model_against_a_real_one(measured: Compare, toy_model: Path, toy_text: Path) -> None:
    ran = measured([toy(toy_model, "ref", reference=True), fake("uniform", vocab_size=TOY_VOCAB)])
    assert ran.status == 0, ran.out
    windows = text_windows(toy_text)
    uniform = [torch.zeros(LENGTH, TOY_VOCAB)] * ROWS
    gold = brute_force(whole_logits(toy_model, windows), uniform, windows)
    found = ran.tokens("uniform")
    np.testing.assert_allclose(found["kld"], gold["kld"], rtol=1e-5, atol=1e-5)
    assert found["same_top"] == gold["same_top"]


def test_an_engine_without_a_head_leaves_its_logits(measured: Compare, own_cache: Path) -> None:
    ran = measured([fake("ref", boost=3.0, reference=True), fake("uniform")])
    assert ran.status == 0, ran.err
    assert "ref: float32 logits are kept, not states: this engine does not show its head" in ran.err
    assert ran.results["reference"]["contents"] == "logits"
    assert Reader(store_of(own_cache)).window(0).dtype == torch.float32
    assert ran.models["uniform"]["kld"] == pytest.approx(KLD, abs=1e-6)


def test_positions_without_a_number_are_counted_and_not_lost(measured: Compare) -> None:
    """A NaN in the reference and one in the model: two positions have no divergence, the others theirs."""
    ran = measured(
        [fake("ref", boost=3.0, nan_windows=[0], reference=True), fake("holes", nan_windows=[2]), fake("whole")]
    )
    assert ran.status == 0, ran.out
    positions = ROWS * (LENGTH - 1)
    for label, holes in (("holes", 2), ("whole", 1)):
        model = ran.models[label]
        assert (model["kld_non_finite"], model["kld_tokens"]) == (holes, positions - holes)
        assert model["kld"] == pytest.approx(KLD, abs=1e-6)
    assert ran.models["ref"]["non_finite"] == 1


# Heads


def small_model(folder: Path, name: str, **keys: Any) -> Path:
    """A random model of one of Transformers' classes, hidden size 64, and the toy tokenizer."""
    base = {
        "vocab_size": TOY_VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
        "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**base, **keys})
    getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().save_pretrained(folder)
    save_toy_tokenizer(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "keys", "soft_cap", "scale"),
    [
        ("Llama", {"tie_word_embeddings": True}, None, 1.0),
        ("Gemma2", {"head_dim": 32, "final_logit_softcapping": 3.0}, 3.0, 1.0),
        ("Cohere", {"logit_scale": 0.3}, None, 0.3),
        ("Granite", {"logits_scaling": 3.0}, None, 1 / 3),
        ("Phi", {}, None, 1.0),  # its head has a bias
    ],
)
def test_heads_that_are_recomputed(
    measured: Compare, own_cache: Path, toy_text: Path, tmp_path: Path,
    name: str, keys: dict[str, Any], soft_cap: float | None, scale: float, dtype: str,
) -> None:  # fmt: skip
    folder = small_model(tmp_path / name, name, **keys)
    if name == "Phi":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        torch.nn.init.normal_(model.lm_head.bias)
        model.save_pretrained(folder)
    other = noisy(folder, tmp_path / "noisy")
    ran = measured([toy(folder, "ref", dtype=dtype, reference=True), toy(other, "noisy", dtype=dtype)])
    assert ran.status == 0, ran.out
    store = Reader(store_of(own_cache))
    assert (store.contents, store.head.soft_cap, store.head.scale) == ("states", soft_cap, pytest.approx(scale))
    weight, bias = store.weight(0, TOY_VOCAB, "cpu")
    assert (weight.shape, bias is not None) == ((TOY_VOCAB, 64), name == "Phi")
    windows = text_windows(toy_text)
    gold = brute_force(*(whole_logits(model, windows, dtype) for model in (folder, other)), windows)
    assert_tokens(ran.tokens("noisy"), gold)
    assert ran.models["noisy"]["kld"] > 1e-3


def strange_head(self: TransformersBackend) -> str:
    return "its head is a Strange"


HEAD = TransformersBackend.head


def wrong_scale(self: TransformersBackend) -> Any:
    weight, bias, facts = HEAD(self)
    return weight, bias, replace(facts, scale=1.1)


def short_head(self: TransformersBackend) -> Any:
    weight, bias, facts = HEAD(self)
    return weight[:-1], bias, replace(facts, vocab_size=TOY_VOCAB - 1)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (strange_head, "its head is a Strange"),
        (wrong_scale, "its head's product differs from its logits by "),
        (short_head, "its head has 319 entries for 320 logits"),
    ],
)
def test_a_head_that_cannot_be_recomputed(
    measured: Compare, own_cache: Path, toy_model: Path, noisy_model: Path, pair: Models, toy_text: Path,
    monkeypatch: pytest.MonkeyPatch, head: Callable[..., Any], reason: str,
) -> None:  # fmt: skip
    """Its logits instead, bit for bit, and said."""
    monkeypatch.setattr(TransformersBackend, "head", head)
    ran = measured(pair)
    assert ran.status == 0, ran.out
    assert f"ref: float32 logits are kept, not states: {reason}" in ran.err
    assert "of logits, in " in ran.err
    reference = ran.results["reference"]
    assert reference["contents"] == "logits"
    assert reference["contents_reason"].startswith(reason)
    windows = text_windows(toy_text)
    exact, model = (whole_logits(folder, windows) for folder in (toy_model, noisy_model))
    found = ran.tokens("noisy")
    assert_tokens(found, brute_force(exact, model, windows))
    assert not list(store_of(own_cache).glob("head.*"))


# The run


def test_the_reference_runs_first_and_the_table_keeps_the_order(measured: Compare) -> None:
    models = [fake("one", vocab_size=501), fake("two", boost=1.0), fake("ref", boost=3.0, reference=True), fake("four")]
    ran = measured(models)
    assert ran.status == 0, ran.err
    assert ran.loaded == ["ref", "one", "two", "four"]
    assert list(ran.models) == ["one", "two", "ref", "four"]
    assert re.findall(r"^ ?(one|two|ref|four) ", ran.out, re.MULTILINE) == ["one", "two", "ref", "four"]
    assert [model["reference"] for model in ran.results["models"]] == [False, False, True, False]
    assert ran.results["reference"]["label"] == "ref"


def test_a_second_run_does_not_open_the_store(
    measured: Compare, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All from the cache, the store there or not; a model more, and the reference is measured again for its store."""
    models = [fake("ref", boost=3.0, reference=True), fake("uniform")]
    first = measured(models)
    store = store_of(own_cache)
    before = (store / MANIFEST).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "verify", lambda *_: pytest.fail("verified"))
        patch.setattr(Reader, "window", lambda *_: pytest.fail("read"))
        patch.setattr(FakeBackend, "load", lambda self: pytest.fail("loaded"))
        again = measured(models)
        assert again.status == 0, again.err
        assert all(model["from_cache"] for model in again.results["models"])
        shutil.rmtree(store)
        without = measured(models)
    assert without.status == 0, without.err
    assert without.models["uniform"]["kld"] == first.models["uniform"]["kld"]
    assert without.results["reference"]["label"] == "ref"
    assert "contents" not in without.results["reference"]
    assert not store.exists()
    more = measured([*models, fake("boosted", boost=1.0)])
    assert more.status == 0, more.err
    assert more.loaded == ["ref", "boosted"]
    assert store_of(own_cache) == store
    assert (store / MANIFEST).read_bytes() == before
    assert [model["from_cache"] for model in more.results["models"]] == [False, True, False]
    assert more.models["boosted"]["kld"] > 0


def test_divergences_of_another_reference_are_other_scores(measured: Compare) -> None:
    first = measured([fake("ref", boost=3.0, reference=True), fake("uniform")])
    second = measured([fake("ref", boost=2.0, reference=True), fake("uniform")])
    alone = measured([fake("uniform")])
    assert second.loaded == ["ref", "uniform"]
    assert second.models["uniform"]["kld"] == pytest.approx(cut_divergence(2.0, 500), abs=1e-5)
    assert second.models["uniform"]["kld"] != first.models["uniform"]["kld"]
    assert alone.models["uniform"]["kld"] is None
    assert alone.results["reference"] is None
    renamed = measured([fake("other name", boost=3.0, reference=True), fake("uniform")])
    assert renamed.loaded == []
    assert renamed.models["uniform"]["kld"] == first.models["uniform"]["kld"]


def test_out_logits_names_the_folder_of_the_store(measured: Compare, own_cache: Path, tmp_path: Path) -> None:
    """Stores of two texts lie beside each other there, under their keys."""
    models = [fake("ref", boost=3.0, out_logits=str(tmp_path / "deep" / "kept")), fake("uniform")]
    ran = measured(models)
    assert ran.status == 0, ran.err
    assert left_behind(own_cache) == []
    (store,) = (tmp_path / "deep" / "kept").iterdir()
    assert Reader(store).n_windows == ROWS
    assert store.name == ran.results["reference"]["key"]
    assert str(store) in ran.err
    assert measured(models, eval_len=50).loaded == ["ref", "uniform"]
    assert len(list((tmp_path / "deep" / "kept").iterdir())) == 2


def test_a_store_at_a_path_is_made_once_and_then_enough(measured: Compare, pair: Models, tmp_path: Path) -> None:
    """A second run, with another cache, needs neither the reference nor its model."""
    path = tmp_path / "deep" / "bf16.reference"
    first = measured(pair, "-lf", path)
    assert first.status == 0, first.err
    assert Reader(path).identity["label"] == "ref"
    assert [entry.name for entry in path.parent.iterdir()] == ["bf16.reference"]
    alone = measured(pair[1:], "-lf", path)
    assert alone.status == 0, alone.err
    assert alone.loaded == []  # a store made here and the same store given are one reference
    fresh = measured(pair[1:], "-lf", path, "--cache-dir", tmp_path / "other", "-kld")
    assert fresh.status == 0, fresh.err
    assert fresh.loaded == ["noisy"]
    assert fresh.tokens("noisy") == first.tokens("noisy")
    assert fresh.results["reference"]["label"] == "ref"
    assert "KLD (nats, mean over tokens) and same top: against ref" in fresh.out
    marked = measured(pair, "-lf", path, "--cache-dir", tmp_path / "third")
    assert marked.status == 0, marked.err
    assert "kept as the reference" not in marked.err
    assert marked.tokens("noisy") == first.tokens("noisy")


def test_a_store_at_a_path_is_not_cleared_without_its_model(measured: Compare, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    measured([fake("ref", boost=3.0, reference=True), fake("uniform")], "-lf", path)
    ran = measured([fake("uniform")], "-lf", path, "-cc")
    assert ran.status == 0, ran.err
    assert ran.loaded == ["uniform"]
    assert Reader(path).n_windows == ROWS


def test_the_mask_keeps_the_reference(measured: Compare) -> None:
    models = [fake("EXL3 4.0"), fake("bf16", boost=3.0, reference=True), fake("AWQ", boost=1.0)]
    ran = measured(models, "-mask", "exl3")
    assert ran.status == 0, ran.err
    assert list(ran.models) == ["EXL3 4.0", "bf16"]
    assert ran.models["EXL3 4.0"]["kld"] == pytest.approx(KLD, abs=1e-6)


def test_the_first_of_two_marked_models_is_the_reference(measured: Compare, tmp_path: Path) -> None:
    ran = measured([fake("a", reference=True), fake("b"), fake("c", out_logits=str(tmp_path))])
    assert (ran.status, ran.results["reference"]["label"]) == (0, "a")
    assert "a is the reference, as the first of 2 that are marked; not: c" in ran.err
    assert [model["reference"] for model in ran.results["models"]] == [True, False, False]
    assert all(model["kld"] is not None for model in ran.results["models"])


# Failures


def assert_no_divergence(ran: Measured, label: str, reason: str) -> None:
    """A failed reference: status 1, the reason at its row, PPL and a note for the other."""
    assert ran.status == 1, ran.out + ran.err
    failed = next(model for model in ran.results["models"] if model["reference"])
    assert reason in failed["error"]
    model = ran.models[label]
    assert (model["kld"], model["same_top"], model["error"]) == (None, None, None)
    assert model["ppl"] == pytest.approx(500.0, rel=1e-5)
    assert f"{label}: no KLD: the reference failed" in ran.out
    assert ran.results["reference"] is None


def test_a_failing_reference_leaves_perplexities(measured: Compare, own_cache: Path) -> None:
    ran = measured([fake("uniform"), fake("ref", boost=3.0, fail=2, reference=True)])
    assert_no_divergence(ran, "uniform", "told to fail after 2 windows")
    assert left_behind(own_cache) == []


def damaged(folder: Path, target: Path) -> Path:
    """A copy of a model whose weights are no safetensors file."""
    shutil.copytree(folder, target)
    (target / "model.safetensors").write_bytes(b"no safetensors file at all")
    return target


def test_a_reference_with_damaged_weights_leaves_perplexities(
    measured: Compare, toy_model: Path, tmp_path: Path
) -> None:
    broken = damaged(toy_model, tmp_path / "broken")
    ran = measured([toy(broken, "ref", reference=True), fake("uniform")])
    assert_no_divergence(ran, "uniform", "model.safetensors: not a readable safetensors file")


def test_a_model_with_damaged_weights_leaves_the_others(measured: Compare, toy_model: Path, tmp_path: Path) -> None:
    broken = damaged(toy_model, tmp_path / "broken")
    ran = measured([fake("ref", boost=3.0, reference=True), toy(broken, "bad"), fake("uniform")])
    assert ran.status == 1, ran.err
    assert "model.safetensors: not a readable safetensors file" in ran.models["bad"]["error"]
    assert ran.models["uniform"]["kld"] == pytest.approx(KLD, abs=1e-6)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError()])
def test_a_reference_that_fails_the_second_time(
    measured: Compare, own_cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Its scores are in the cache and its store is gone; what needs the store has no divergence, and PPL."""
    models = [fake("ref", boost=3.0, reference=True), fake("old", boost=1.0)]
    measured(models)
    shutil.rmtree(store_of(own_cache))

    def fail(self: FakeBackend) -> None:
        if self.options.boost == 3.0:
            raise error

    monkeypatch.setattr(FakeBackend, "load", fail)
    ran = measured([*models, fake("uniform")])
    assert_no_divergence(ran, "uniform", type(error).__name__)
    assert left_behind(own_cache) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_recording_leaves_nothing(
    measured: Compare, own_cache: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Neither half a store nor the folder in which it was made; the next run makes it."""
    models = [fake("ref", boost=3.0, reference=True), fake("uniform")]
    made: list[list[str]] = []
    logits = FakeBackend.logits

    def interrupted(self: FakeBackend, window: Any) -> torch.Tensor:
        if window.index == 2:
            (building,) = left_behind(own_cache)
            made.append(sorted(file.name for file in (own_cache / "references" / building).iterdir()))
            raise error
        return logits(self, window)

    with monkeypatch.context() as patch:
        patch.setattr(FakeBackend, "logits", interrupted)
        ran = measured(models)
    assert made[0] == [window_file(0), window_file(1)]
    assert ran.status == (130 if error is KeyboardInterrupt else 2)
    assert left_behind(own_cache) == []
    assert list((own_cache / "scores").glob("*.json")) == []
    again = measured(models)
    assert again.status == 0, again.err
    assert again.models["uniform"]["kld"] == pytest.approx(KLD, abs=1e-6)
    assert [name for name in left_behind(own_cache) if name.startswith(".")] == []


def test_clearing_forgets_the_store(measured: Compare, own_cache: Path) -> None:
    """A damaged store is made again, even where nobody looked at it."""
    models = [fake("ref", boost=3.0, reference=True), fake("uniform")]
    measured(models)
    store = store_of(own_cache)
    good = (store / window_file(1)).read_bytes()
    (store / window_file(1)).write_bytes(b"damaged")
    ran = measured(models, "-cc")
    assert ran.status == 0, ran.err
    assert ran.loaded == ["ref", "uniform"]
    assert (store / window_file(1)).read_bytes() == good
    assert not any(model["from_cache"] for model in ran.results["models"])
    (store / MANIFEST).write_text("{")
    assert_refused(measured(models), f"{store / MANIFEST}: not a reference store")
    ran = measured(models, "-cc")
    assert ran.status == 0, ran.err
    assert Reader(store).n_windows == ROWS


# The wrong store


@pytest.mark.parametrize("where", ["cache", "path"])
@pytest.mark.parametrize("damage", ["flipped", "deleted"])
@pytest.mark.parametrize("name", [window_file(1), "head.000000.safetensors"])
def test_a_damaged_store_is_found_before_a_model_loads(
    measured: Compare, own_cache: Path, pair: Models, tmp_path: Path, where: str, damage: str, name: str
) -> None:
    """In the cache, or at a path that another run made, where the reference itself would have to be measured, too."""
    flags = [] if where == "cache" else ["-lf", tmp_path / "kept"]
    assert measured(pair[:1], *flags).status == 0
    file = (store_of(own_cache) if where == "cache" else tmp_path / "kept") / name
    if damage == "flipped":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 16
        file.write_bytes(data)
    else:
        file.unlink()
    what = f"{file}: damaged" if damage == "flipped" else f"{file}: missing from the reference"
    assert_refused(measured(pair, *flags), what)
    if where == "path":
        assert_refused(measured(pair, *flags, "--cache-dir", tmp_path / "other"), what)
        assert_refused(measured(pair[1:], *flags), what)


def test_a_store_of_other_windows(measured: Compare, tmp_path: Path) -> None:
    """Another text, length, stride, warm-up, or number of rows, with the reference's model in the specs or not."""
    models, path = [fake("ref", boost=3.0, reference=True), fake("uniform")], tmp_path / "kept"
    assert measured(models, "-lf", path).status == 0
    other = tmp_path / "other.txt"
    other.write_text("hgfedcba\n" * 100)
    changes = ({"path": str(other)}, {"eval_len": 50}, {"eval_stride": 60}, {"warmup_tokens": 1}, {"max_rows": 2})
    for change in changes:
        for specs in (models, models[1:]):
            for flags in ([], ["-cc"]):  # what the user named is never deleted unless it is what this run makes
                ran = measured(specs, "-lf", path, *flags, **change)
                assert_refused(ran, f"{path}: the reference was made of other windows", "delete it or give another")
    assert Reader(path).n_windows == ROWS


def swapped(folder: Path, target: Path) -> Path:
    """A copy of a model whose tokenizer has "a" and "b" the other way round."""
    shutil.copytree(folder, target)
    file = target / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    return target


@pytest.mark.parametrize("letters", ["abcd", "wxyz"])
def test_a_store_of_another_tokenizer(measured: Compare, toy_model: Path, tmp_path: Path, letters: str) -> None:
    """Also where the text has none of the tokens that were swapped, so that the windows are the same."""
    text, path = tmp_path / "text.txt", tmp_path / "kept"
    text.write_text(letters * 100)
    models = [fake("ref", boost=3.0, reference=True), fake("uniform")]
    assert measured(models, "-lf", path, path=str(text)).status == 0
    other = swapped(toy_model, tmp_path / "swapped")
    for specs in (models, models[1:]):
        ran = measured(specs, "-lf", path, path=str(text), tokenizer_dir=str(other))
        assert_refused(ran, f"{path}: the reference was made with another tokenizer")


def test_a_store_of_another_model(measured: Compare, pair: Models, noisy_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    assert measured(pair, "-lf", path).status == 0
    other = toy(noisy_model, "ref", reference=True)
    assert_refused(measured([other, pair[1]], "-lf", path), f"{path}: the reference was made by another model")
    other = {**pair[0], "engine": {**pair[0]["engine"], "dtype": "bfloat16"}}
    assert_refused(measured([other, pair[1]], "-lf", path), f"{path}: the reference was made with other engine options")
    other = fake("ref", vocab_size=TOY_VOCAB, reference=True)
    assert_refused(measured([other, pair[1]], "-lf", path), f"{path}: the reference was made by another")


def test_a_model_with_another_tokenizer(measured: Compare, toy_model: Path, tmp_path: Path) -> None:
    """Compared by content: another formatting of the same tokenizer is no other one."""
    other = swapped(toy_model, tmp_path / "swapped")
    ran = measured([toy(toy_model, "ref", reference=True), toy(other, "bad")])
    assert_refused(ran, "bad: tokenizer_dir: is not this model's tokenizer: token 64 is 'b' in ", str(other))
    same = tmp_path / "same"
    shutil.copytree(toy_model, same)
    content = json.loads((same / "tokenizer.json").read_text())
    (same / "tokenizer.json").write_text(json.dumps(content, indent=7))
    assert (same / "tokenizer.json").read_bytes() != (toy_model / "tokenizer.json").read_bytes()
    vocabulary.of_folder.cache_clear()
    ran = measured([toy(toy_model, "ref", reference=True), toy(same, "same")])
    assert ran.status == 0, ran.err
    assert ran.models["same"]["kld"] == 0.0


@pytest.mark.parametrize("content", [b"no store", None])
def test_a_path_that_holds_something_else(measured: Compare, tmp_path: Path, content: bytes | None) -> None:
    """It is neither read nor replaced."""
    path = tmp_path / "something"
    if content is None:
        path.mkdir()
        (path / "mine").write_text("")
    else:
        path.write_bytes(content)
    models = [fake("ref", boost=3.0, reference=True), fake("uniform")]
    assert_refused(
        measured(models, "-lf", path), "--logits_file", f"{path}: is there and is no store of this compare_q"
    )
    assert_refused(measured(models[1:], "-lf", path), str(path))
    assert path.is_dir() if content is None else path.read_bytes() == content


def test_a_path_without_a_store(measured: Compare, tmp_path: Path) -> None:
    ran = measured([fake("uniform")], "-lf", tmp_path / "nowhere")
    assert_refused(ran, f"{tmp_path / 'nowhere'}: holds no reference")


# Upstream's stores


def upstream_store(folder: Path, logits: Sequence[torch.Tensor]) -> Path:
    """Logits as upstream keeps them: float32 [1, L, V] a row, of all positions after the warm-up."""
    rows = folder / "kept.safetensors.rows"
    rows.mkdir()
    for row, whole in enumerate(logits):
        save_file({"tensor": whole[None].float().contiguous()}, rows / f"row_{row:06d}.safetensors")
    return folder / "kept.safetensors"


@pytest.mark.parametrize("warmup", [0, 30])
@pytest.mark.parametrize("layout", ["rows", "single file"])
def test_upstreams_store(
    measured: Compare, toy_model: Path, noisy_model: Path, toy_text: Path, tmp_path: Path, warmup: int, layout: str
) -> None:
    windows = text_windows(toy_text)
    reference, model = (whole_logits(folder, windows) for folder in (toy_model, noisy_model))
    path = upstream_store(tmp_path, [whole[warmup:] for whole in reference])
    if layout == "single file":
        shutil.rmtree(f"{path}.rows")
        save_file({f"tensor.{row}": whole[None, warmup:].contiguous() for row, whole in enumerate(reference)}, path)
    ran = measured([toy(noisy_model, "noisy")], "-lf", path, "-kld", warmup_tokens=warmup)
    assert ran.status == 0, ran.err
    assert_tokens(ran.tokens("noisy"), brute_force(reference, model, windows, warmup + 1))
    assert ran.results["reference"]["label"] == "upstream's logits"
    assert "against upstream's logits" in ran.out


def test_upstreams_store_of_fewer_rows(
    measured: Compare, toy_model: Path, noisy_model: Path, toy_text: Path, tmp_path: Path
) -> None:
    """Upstream keeps ten rows; what has to be done is said, and then the divergences are right."""
    windows = text_windows(toy_text, rows=2)
    reference, model = (whole_logits(folder, windows) for folder in (toy_model, noisy_model))
    path = upstream_store(tmp_path, reference)
    models = [toy(noisy_model, "noisy")]
    assert_refused(measured(models, "-lf", path), f"{path}: has 2 windows, window 2 of 3 is missing; use -r 2")
    ran = measured(models, "-lf", path, "-r", 2)
    assert ran.status == 0, ran.err
    assert_tokens(ran.tokens("noisy"), brute_force(reference, model, windows))
    assert measured(models, "-lf", path, "-r", 1).status == 0


def test_upstreams_store_that_does_not_fit(
    measured: Compare, toy_model: Path, noisy_model: Path, toy_text: Path, tmp_path: Path
) -> None:
    logits = whole_logits(toy_model, text_windows(toy_text))
    path = upstream_store(tmp_path, [whole[:, :200] for whole in logits])
    models = [toy(noisy_model, "noisy")]
    assert_refused(measured(models, "-lf", path), f"{path}: has 200 logits, the tokenizer reaches id 255")
    shutil.rmtree(f"{path}.rows")
    upstream_store(tmp_path, logits)
    assert_refused(
        measured(models, "-lf", path, warmup_tokens=10), f"{path}: scores 99 positions a window, these windows 89"
    )
    lm_eval = {"method": "lm_eval", "eval_stride": ...}
    assert_refused(measured(models, "-lf", path, **lm_eval), f"{path}: upstream's stores hold exllamav3's windows")
    row = tmp_path / "kept.safetensors.rows" / "row_000001.safetensors"
    row.write_bytes(row.read_bytes()[:-100])
    assert_refused(measured(models, "-lf", path), f"{row}: window 1 of the reference cannot be read")
    row.unlink()
    assert_refused(measured(models, "-lf", path, "-r", 2), f"{row}: window 1 of the reference cannot be read")


def test_upstreams_store_is_known_by_its_content(
    measured: Compare, toy_model: Path, toy_text: Path, tmp_path: Path
) -> None:
    """Replaced under the same name it is another reference."""
    logits = whole_logits(toy_model, text_windows(toy_text))
    models = [fake("uniform", vocab_size=TOY_VOCAB)]
    path = upstream_store(tmp_path, logits)
    first = measured(models, "-lf", path)
    assert measured(models, "-lf", path).loaded == []
    shutil.rmtree(f"{path}.rows")
    upstream_store(tmp_path, [2 * whole for whole in logits])
    second = measured(models, "-lf", path)
    assert second.loaded == ["uniform"]
    assert second.models["uniform"]["kld"] > first.models["uniform"]["kld"]
