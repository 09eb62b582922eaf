"""Reference logits that upstream's compare_q kept."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.chats import MARKED, SUMS, save_chat_tokenizer, write_lines
from tests.support.comparisons import Compare, assert_tokens, compared, fake, stub, text_windows, whole_logits
from tests.support.toy import TOY_VOCAB, assert_refused


def upstream_store(folder: Path, logits: Sequence[torch.Tensor]) -> Path:
    """Logits as upstream keeps them: float32 [1, L, V] a row, of all positions after the warm-up."""
    rows = folder / "kept.safetensors.rows"
    rows.mkdir()
    for number, whole in enumerate(logits):
        save_file({"tensor": whole[None].float().contiguous()}, rows / f"row_{number:06d}.safetensors")
    return folder / "kept.safetensors"


@pytest.mark.parametrize("warmup", [0, 30])
@pytest.mark.parametrize("layout", ["rows", "single file"])
def test_upstreams_store(
    measured: Compare, stub_model: Path, noisy_stub: Path, toy_text: Path, tmp_path: Path, warmup: int, layout: str
) -> None:
    windows = text_windows(toy_text)
    reference, model = (whole_logits(folder, windows) for folder in (stub_model, noisy_stub))
    path = upstream_store(tmp_path, [whole[warmup:] for whole in reference])
    if layout == "single file":
        shutil.rmtree(f"{path}.rows")
        save_file(
            {f"tensor.{number}": whole[None, warmup:].contiguous() for number, whole in enumerate(reference)}, path
        )
    ran = measured([stub(noisy_stub, "noisy")], "-lf", path, "-kld", warmup_tokens=warmup)
    assert ran.status == 0, ran.err
    assert_tokens(ran.tokens("noisy"), compared(reference, model, windows, warmup + 1))
    assert ran.results["reference"]["label"] == "upstream's logits"
    assert "the most probable tokens of upstream's logits (" in ran.out


def test_upstreams_store_of_fewer_rows(
    measured: Compare, stub_model: Path, noisy_stub: Path, toy_text: Path, tmp_path: Path
) -> None:
    """Upstream keeps ten rows; what has to be done is said, and then the divergences are right."""
    windows = text_windows(toy_text, count=2)
    reference, model = (whole_logits(folder, windows) for folder in (stub_model, noisy_stub))
    path = upstream_store(tmp_path, reference)
    models = [stub(noisy_stub, "noisy")]
    assert_refused(measured(models, "-lf", path), f"{path}: has 2 windows, window 2 of 3 is missing; use -r 2")
    ran = measured(models, "-lf", path, "-r", 2)
    assert ran.status == 0, ran.err
    assert_tokens(ran.tokens("noisy"), compared(reference, model, windows))
    assert measured(models, "-lf", path, "-r", 1).status == 0


def test_upstreams_store_that_does_not_fit(
    measured: Compare, stub_model: Path, noisy_stub: Path, toy_text: Path, tmp_path: Path
) -> None:
    logits = whole_logits(stub_model, text_windows(toy_text))
    path = upstream_store(tmp_path, [whole[:, :200] for whole in logits])
    models = [stub(noisy_stub, "noisy")]
    assert_refused(measured(models, "-lf", path), f"{path}: has 200 logits, the tokenizer reaches id 255")
    shutil.rmtree(f"{path}.rows")
    upstream_store(tmp_path, logits)
    assert_refused(
        measured(models, "-lf", path, warmup_tokens=10), f"{path}: scores 99 positions a window, these windows 89"
    )
    lm_eval = {"method": "lm_eval", "eval_stride": ...}
    assert_refused(measured(models, "-lf", path, **lm_eval), f"{path}: upstream's stores hold exllamav3's windows")
    talks = write_lines(tmp_path / "talks.jsonl", SUMS)
    chat = {"dataset": "chat", "path": str(talks), "tokenizer_dir": str(save_chat_tokenizer(tmp_path / "t", MARKED))}
    refused = measured(models, "-lf", path, **chat, eval_stride=..., max_rows=...)
    assert_refused(refused, f"{path}: upstream's stores hold exllamav3's windows and no others")
    row = tmp_path / "kept.safetensors.rows" / "row_000001.safetensors"
    row.write_bytes(row.read_bytes()[:-100])
    assert_refused(measured(models, "-lf", path), f"{row}: window 1 of the reference cannot be read")
    row.unlink()
    assert_refused(measured(models, "-lf", path, "-r", 2), f"{row}: window 1 of the reference cannot be read")


def test_upstreams_store_is_known_by_its_content(
    measured: Compare, stub_model: Path, toy_text: Path, tmp_path: Path
) -> None:
    """Replaced under the same name it is another reference."""
    logits = whole_logits(stub_model, text_windows(toy_text))
    models = [fake("uniform", vocab_size=TOY_VOCAB)]
    path = upstream_store(tmp_path, logits)
    first = measured(models, "-lf", path)
    assert measured(models, "-lf", path).loaded == []
    shutil.rmtree(f"{path}.rows")
    upstream_store(tmp_path, [2 * whole for whole in logits])
    second = measured(models, "-lf", path)
    assert second.loaded == ["uniform"]
    assert second.models["uniform"]["kld"] > first.models["uniform"]["kld"]
