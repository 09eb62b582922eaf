"""A store of another text, tokenizer or model, or a damaged one, is refused in one line before a model loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compare_q.backends.reference.store import Reader
from compare_q.eval.text import vocabulary
from tests.support.comparisons import N_WINDOWS, Compare, Models, fake, store_of, stub
from tests.support.stub_engine import rounding_of_rows
from tests.support.toy import TOY_VOCAB, assert_refused


@pytest.mark.parametrize("where", ["cache", "path"])
@pytest.mark.parametrize("damage", ["flipped", "deleted"])
@pytest.mark.parametrize("what", ["row.000001", "head.000000"])
def test_a_damaged_store_is_found_before_a_model_loads(
    measured: Compare, own_cache: Path, pair: Models, tmp_path: Path, where: str, damage: str, what: str
) -> None:
    """In the cache, or at a path that another run made, where the reference itself would have to be measured, too."""
    flags = [] if where == "cache" else ["-lf", tmp_path / "kept"]
    assert measured(pair[:1], *flags).status == 0
    (file,) = (store_of(own_cache) if where == "cache" else tmp_path / "kept").glob(f"{what}.*")
    if damage == "flipped":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 16
        file.write_bytes(data)
    else:
        file.unlink()
    said = f"{file}: damaged" if damage == "flipped" else f"{file}: missing from the reference"
    assert_refused(measured(pair, *flags), said)
    if where == "path":
        assert_refused(measured(pair, *flags, "--cache-dir", tmp_path / "other"), said)
        assert_refused(measured(pair[1:], *flags), said)


def test_a_store_of_other_windows(measured: Compare, tmp_path: Path) -> None:
    """Another text, length, stride or warm-up, with the reference's model in the specs or not."""
    models, path = [fake("ref", boost=3.0, reference=True), fake("uniform")], tmp_path / "kept"
    assert measured(models, "-lf", path).status == 0
    other = tmp_path / "other.txt"
    other.write_text("hgfedcba\n" * 100)
    changes = ({"path": str(other)}, {"eval_len": 50}, {"eval_stride": 60}, {"warmup_tokens": 1})
    for change in changes:
        for specs in (models, models[1:]):
            for flags in ([], ["-cc"]):  # what the user named is never deleted unless it is what this run makes
                ran = measured(specs, "-lf", path, *flags, **change)
                assert_refused(ran, f"{path}: the reference was made of other windows", "delete it or give another")
    assert Reader(path).n_windows == N_WINDOWS


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
def test_a_store_of_another_tokenizer(measured: Compare, stub_model: Path, tmp_path: Path, letters: str) -> None:
    """Also where the text has none of the tokens that were swapped, so that the windows are the same."""
    text, path = tmp_path / "text.txt", tmp_path / "kept"
    text.write_text(letters * 100)
    models = [fake("ref", boost=3.0, reference=True), fake("uniform")]
    assert measured(models, "-lf", path, path=str(text)).status == 0
    other = swapped(stub_model, tmp_path / "swapped")
    for specs in (models, models[1:]):
        ran = measured(specs, "-lf", path, path=str(text), tokenizer_dir=str(other))
        assert_refused(ran, f"{path}: the reference was made with another tokenizer")


def test_a_store_of_another_model(measured: Compare, pair: Models, noisy_stub: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    assert measured(pair, "-lf", path).status == 0
    other = stub(noisy_stub, "ref", reference=True)
    assert_refused(measured([other, pair[1]], "-lf", path), f"{path}: the reference was made by another model")
    other = {**pair[0], "engine": {**pair[0]["engine"], "dtype": "bfloat16"}}
    assert_refused(measured([other, pair[1]], "-lf", path), f"{path}: the reference was made with other engine options")
    other = fake("ref", vocab_size=TOY_VOCAB, reference=True)
    assert_refused(measured([other, pair[1]], "-lf", path), f"{path}: the reference was made by another")


def test_a_model_with_another_tokenizer(measured: Compare, stub_model: Path, tmp_path: Path) -> None:
    """Compared by content: another formatting of the same tokenizer is no other one."""
    other = swapped(stub_model, tmp_path / "swapped")
    ran = measured([stub(stub_model, "ref", reference=True), stub(other, "bad")])
    assert_refused(ran, "bad: tokenizer_dir: is not this model's tokenizer: token 64 is 'b' in ", str(other))
    same = tmp_path / "same"
    shutil.copytree(stub_model, same)
    content = json.loads((same / "tokenizer.json").read_text())
    (same / "tokenizer.json").write_text(json.dumps(content, indent=7))
    assert (same / "tokenizer.json").read_bytes() != (stub_model / "tokenizer.json").read_bytes()
    vocabulary.of_folders.cache_clear()
    ran = measured([stub(stub_model, "ref", reference=True), stub(same, "same")])
    assert ran.status == 0, ran.err
    assert abs(ran.models["same"]["kld"]) <= rounding_of_rows()


@pytest.mark.parametrize("kind", ["a file", "a folder", "upstream's logits"])
def test_a_path_that_holds_something_else(measured: Compare, tmp_path: Path, kind: str) -> None:
    """It is neither read nor replaced."""
    path = tmp_path / "something"
    if kind == "a folder":
        path.mkdir()
        (path / "mine").write_text("")
    elif kind == "a file":
        path.write_bytes(b"no store")
    else:
        save_file({"tensor.0": torch.zeros(1, 5, 8)}, path)
    before = path.is_file() and path.read_bytes()
    models = [fake("ref", boost=3.0, reference=True), fake("uniform")]
    what = "logits that ExLlamaV3's compare_q kept" if kind.startswith("up") else "no store of this compare_q"
    assert_refused(measured(models, "-lf", path), "--logits_file", f"{path}: holds {what}")
    assert_refused(measured(models[1:], "-lf", path), str(path))
    assert path.is_dir() if kind == "a folder" else path.read_bytes() == before


def test_a_path_without_a_store(measured: Compare, tmp_path: Path) -> None:
    ran = measured([fake("uniform")], "-lf", tmp_path / "nowhere")
    assert_refused(ran, f"{tmp_path / 'nowhere'}: holds no reference")
