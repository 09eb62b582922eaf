"""Sampled text from the command line: sampled once, kept, put into packs, or refused in a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.base import SampledToken
from compare_q.backends.hf import sampling
from compare_q.backends.hf.transformers_engine import TransformersEngine
from compare_q.backends.reference import pack_files
from compare_q.eval.specs import spec_files
from compare_q.eval.text import stored_tokens, text_windows
from tests.support.toy import (
    FAKE,
    Run,
    Specs,
    assert_refused,
    in_transformers,
    save_toy_tokenizer,
    swap_letters,
)

SAMPLED = {"dataset": "sampled", "eval_stride": ..., "eval_len": 100, "max_rows": 4}


@pytest.fixture
def samplings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of prompts of each call of the engine's ``sample``."""
    counts: list[int] = []
    original = TransformersEngine.sample

    def sample(
        self: TransformersEngine, prompts: Sequence[Sequence[int]], n_tokens: int, seed: int
    ) -> Iterator[SampledToken]:
        counts.append(len(prompts))
        return original(self, prompts, n_tokens, seed)

    monkeypatch.setattr(TransformersEngine, "sample", sample)
    return counts


def models_of(toy_model: Path, **keys: Any) -> list[dict[str, Any]]:
    reference = in_transformers(toy_model, reference=True, engine={"dtype": "float32"}, **keys)
    return [reference, in_transformers(toy_model, label="bf16", engine={"dtype": "bfloat16"})]


def result_of(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


@pytest.mark.engine
def test_a_text_is_sampled_once(
    compare_q: Run, write_specs: Specs, toy_model: Path, tmp_path: Path, samplings: list[int]
) -> None:
    """A second run reads it; another seed, number of windows or model has another text."""
    data, models = write_specs(models_of(toy_model), **SAMPLED)
    words = ("-d", data, "-m", models, "-o", tmp_path / "r.json")
    ran = compare_q(*words)
    assert ran.status == 0, ran.err
    first = result_of(tmp_path / "r.json")
    (text,) = first["data"]["texts"]
    assert (text["method"], text["windows"], text["scored_tokens"]) == ("sampled", 4, 4 * 36)
    assert "text sampled by" in ran.out
    assert "do not follow" not in ran.out
    assert first["models"][1]["kld"] > 0
    assert compare_q(*words).status == 0
    assert samplings == [4]
    again = result_of(tmp_path / "r.json")
    assert again["data"]["windows_sha256"] == first["data"]["windows_sha256"]
    assert compare_q(*words, "-r", 3).status == 0
    write_specs(models_of(toy_model), **SAMPLED, seed=1)
    assert compare_q(*words).status == 0
    assert samplings == [4, 3, 4]
    other = result_of(tmp_path / "r.json")
    assert other["data"]["windows_sha256"] != first["data"]["windows_sha256"]
    in_other_dtype = [{**models_of(toy_model)[0], "engine": {"dtype": "bfloat16"}}]
    write_specs(in_other_dtype, **SAMPLED)
    assert compare_q(*words).status == 0
    assert samplings == [4, 3, 4, 4]


@pytest.mark.engine
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws_from_another_distribution_are_noted(
    compare_q: Run,
    write_specs: Specs,
    toy_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
) -> None:
    """At another temperature, with the log-probabilities that the tokens have at 1.

    Another text comes first, whose tokens are not checked.
    """
    original = sampling.drawn

    def drawn(logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids, _ = original(logits / temperature, uniforms)
        return token_ids, logits.log_softmax(-1).gather(1, token_ids[:, None])[:, 0]

    monkeypatch.setattr(sampling, "drawn", drawn)
    plain, models = write_specs(models_of(toy_model), max_rows=2, label="plain")
    first_text = tmp_path / "plain.json"
    plain.rename(first_text)
    data, _ = write_specs(models_of(toy_model), **SAMPLED, label="sampled")
    out = tmp_path / "r.json"
    ran = compare_q("-d", first_text, data, "-m", models, "-o", out, "-r", 12)
    assert ran.status == 0, ran.err
    reference, other = result_of(out)["models"]
    is_noted = any("distribution" in note for note in reference["notes"])
    assert is_noted == (temperature != 1.0)
    assert not any("distribution" in note for note in other["notes"])


@pytest.mark.engine
def test_check_samples_nothing(
    compare_q: Run, write_specs: Specs, toy_model: Path, samplings: list[int]
) -> None:
    """It shows the windows once a run has sampled them."""
    data, models = write_specs(models_of(toy_model), **SAMPLED)
    before = compare_q("check", "-d", data, "-m", models)
    assert (before.status, samplings) == (0, [])
    assert "samples them when the run begins" in before.out
    assert compare_q("-d", data, "-m", models).status == 0
    after = compare_q("check", "-d", data, "-m", models)
    assert "4 windows, 144 scored tokens" in after.out


@pytest.mark.engine
def test_a_pack_of_sampled_text(
    compare_q: Run, write_specs: Specs, toy_model: Path, tmp_path: Path, samplings: list[int]
) -> None:
    """It keeps the sampler's log-probabilities, and is used without sampling again."""
    data, models = write_specs(models_of(toy_model)[:1])
    pack = tmp_path / "toy.pack"
    words = ("pack", "-d", data, "-m", models, "-o", pack, "-r", 3, "--no-floor")
    ran = compare_q(*words, "--sampled")
    assert ran.status == 0, ran.err
    tokens = stored_tokens.tokens_of_pack(pack)
    assert tokens.sampler_logprobs is not None
    is_sampled = ~np.isnan(tokens.sampler_logprobs)
    assert is_sampled.sum() == 3 * 36
    spec = tmp_path / "models.json"
    rows = [
        {"load_fn": "pack", "label": "pack", "model_dir": str(pack), "reference": True},
        in_transformers(toy_model, label="same", engine={"dtype": "float32"}),
    ]
    spec.write_text(json.dumps(rows))
    (tmp_path / "pack.json").write_text(json.dumps({"pack": str(pack)}))
    out = tmp_path / "r.json"
    ran = compare_q("-d", tmp_path / "pack.json", "-m", spec, "-o", out)
    assert ran.status == 0, ran.err
    assert result_of(out)["models"][1]["kld"] == pytest.approx(0, abs=1e-6)
    assert samplings == [3]
    # The weights p_store / p_sampler of an estimate are 1 up to rounding.
    scores = pack_files.scores_of(pack)
    (text,) = spec_files.load_data_specs([tmp_path / "pack.json"])
    windows = text_windows.cut(tokens, text, None, pack / pack_files.TOKENIZER).windows
    assert len(windows) == 3
    for window in windows:
        assert window.sampler_logprobs is not None
        stored = scores[window.digest]["logprob"]
        np.testing.assert_allclose(window.sampler_logprobs, stored, atol=1e-4)


def test_refusals(compare_q: Run, write_specs: Specs, toy_model: Path, tmp_path: Path) -> None:
    """No reference, an engine that cannot sample, no number of windows, short texts, the gate."""

    def refused(models: list[dict[str, Any]], *words: str, **keys: Any) -> None:
        data, specs = write_specs(models, **{**SAMPLED, **keys})
        assert_refused(compare_q("-d", data, "-m", specs), str(data), *words)

    reference = {**FAKE, "reference": True}
    refused([FAKE], "dataset", "no model is the reference")
    refused([reference, {**FAKE, "label": "b"}], "fake cannot sample", "vllm_score", "transformers")
    refused(models_of(toy_model), "max_rows", max_rows=0)
    refused(models_of(toy_model), "max_rows", "has 15", max_rows=16)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    refused(models_of(toy_model), "9 tokens", path=str(short))
    data, specs = write_specs(models_of(toy_model), **SAMPLED)
    variant = ("--variant", "a:label=a", "--variant", "b:label=b")
    assert_refused(compare_q("gate", "-d", data, "-m", specs, *variant), "sampled")
    windows = ("windows", "-d", data, "-o", tmp_path / "w.jsonl")
    assert_refused(compare_q(*windows), "no model is the reference")


@pytest.mark.engine
def test_a_wrong_tokenizer_is_noticed_before_sampling(
    compare_q: Run, write_specs: Specs, toy_model: Path, tmp_path: Path, samplings: list[int]
) -> None:
    other = tmp_path / "other"
    save_toy_tokenizer_in(other)
    data, models = write_specs(models_of(toy_model), **SAMPLED, tokenizer_dir=str(other))
    assert_refused(compare_q("-d", data, "-m", models), "tokenizer_dir")
    assert samplings == []


def save_toy_tokenizer_in(folder: Path) -> None:
    """Save the toy's tokenizer, in which two letters have changed their ids."""
    folder.mkdir()
    save_toy_tokenizer(folder)
    swap_letters(folder)


@pytest.mark.engine
def test_streaming_cannot_sample(compare_q: Run, write_specs: Specs, toy_model: Path) -> None:
    pytest.importorskip("greenlet")
    streamed = in_transformers(toy_model, reference=True, engine={"streaming": True})
    data, models = write_specs([streamed], **SAMPLED)
    assert_refused(compare_q("-d", data, "-m", models), "engine.streaming")
