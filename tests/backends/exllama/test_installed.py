"""The installed ExLlama engines: their sources say what the stand-ins say, and on a GPU they run."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

from compare_q.backends.base import Decode
from compare_q.backends.common.packages import installed_versions
from compare_q.backends.exllama.v3 import ExLlamaV3Engine
from compare_q.backends.hf.engine import TransformersEngine
from tests.backends.exllama.test_checks import ENGINE_CLASSES
from tests.support import exllamav2_stub as v2
from tests.support import exllamav3_stub as v3
from tests.support.planned import planned
from tests.support.toy import TOY_VOCAB, save_llama, toy_windows

SIGNATURES = [
    ("exllamav2", "model.py", v2.ExLlamaV2, set()),
    ("exllamav2", "config.py", v2.ExLlamaV2Config, set()),
    ("exllamav2", "cache.py", v2.ExLlamaV2Cache, set()),
    ("exllamav2", "linear.py", v2.ExLlamaV2Linear, set()),
    ("exllamav3", "model/model.py", v3.Model, set()),
    ("exllamav3", "model/config.py", v3.Config, set()),
    ("exllamav3", "cache/cache.py", v3.Cache, {"max_num_tokens", "layers"}),
    ("exllamav3", "cache/fp16.py", v3.CacheLayer_fp16, set()),
    ("exllamav3", "cache/quant.py", v3.CacheLayer_quant, {"k_bits", "v_bits"}),
    ("exllamav3", "loader/safetensors.py", v3.SafetensorsCollection, set()),
    ("exllamav3", "modules/linear.py", v3.Linear,
     {"inner", "key", "in_features_unpadded", "softcap", "pre_scale", "post_scale"}),
]  # fmt: skip
OTHERWISE = {("exllamav2", "linear.py", "device"), ("exllamav2", "linear.py", "__init__")}
"""Methods that the real class inherits, or whose arguments the stand-in changes."""


def source(engine: str, file: str) -> str:
    """A source file of an installed engine, which is not imported; skips the test where it is not installed."""
    found = importlib.util.find_spec(engine)
    if found is None or found.origin is None:
        pytest.skip(f"{engine} is not installed")
    return (Path(found.origin).parent / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(("engine", "file", "stand_in", "attributes"), SIGNATURES)
def test_the_stand_in_has_the_signatures_of_the_source(
    engine: str, file: str, stand_in: type, attributes: set[str]
) -> None:
    """Every method that the stand-in has takes what the installed one takes, and its attributes are set there."""
    classes = [node for node in ast.parse(source(engine, file)).body if isinstance(node, ast.ClassDef)]
    (real,) = (node for node in classes if node.name == stand_in.__name__)
    methods = {node.name: node.args for node in real.body if isinstance(node, ast.FunctionDef)}
    for name, method in inspect.getmembers(stand_in, inspect.isfunction):
        if (engine, file, name) in OTHERWISE or (engine, name) == ("exllamav3", "__init__"):
            continue
        taken = {node.arg for node in ast.walk(methods[name]) if isinstance(node, ast.arg)}
        assert set(inspect.signature(method).parameters) <= taken, name
    assert attributes <= {node.attr for node in ast.walk(real) if isinstance(node, ast.Attribute)}


def on_a_gpu(engine: str) -> pytest.MarkDecorator:
    """Skips where there is no GPU or the engine is not installed."""
    runs = torch.cuda.is_available() and installed_versions((engine,))
    return pytest.mark.skipif(not runs, reason=f"no CUDA GPU or {engine} not installed")


@pytest.fixture(scope="module")
def fitting_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose projections are multiples of 128, as exllamav3 wants them; its head of 320 is padded to 384."""
    keys = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "max_position_embeddings": 512}
    return save_llama(tmp_path_factory.mktemp("toy") / "llama-256", **keys, initializer_range=0.1)


ATOL_LOGIT = 0.1
"""Against Transformers in float32, with logits up to 7.6: its own float16 is off by up to 0.025, on a CPU."""


@pytest.mark.engine
@pytest.mark.parametrize("engine", [pytest.param(name, marks=on_a_gpu(name)) for name in ("exllamav2", "exllamav3")])
def test_logits_of_the_real_engine(engine: str, fitting_toy: Path) -> None:
    peer = TransformersEngine(planned("toy", "transformers", str(fitting_toy), 300, {"dtype": "float32"}))
    backend = ENGINE_CLASSES[engine](planned("toy", engine, str(fitting_toy), 300))
    peer.load()
    backend.load()
    for length in (20, 300):  # fewer rows than 32 take other kernels
        (window,) = toy_windows(1, length)
        logits, expected = backend.logits(window), peer.logits(window)
        assert tuple(logits.shape) == (length, TOY_VOCAB)
        torch.testing.assert_close(logits.float(), expected.to(logits.device), atol=ATOL_LOGIT, rtol=0.0)
    assert sum(each.count for each in backend.layers()) == 2 * 7 + 1
    assert backend.provenance()["attention"]
    peer.close()
    backend.close()


@pytest.mark.engine
@on_a_gpu("exllamav3")
def test_decode_gives_the_logits_of_prefill(fitting_toy: Path) -> None:
    """To the rounding of float16; the third window begins with a cache that the first ones left behind."""
    prefill = planned("toy", "exllamav3", str(fitting_toy), 200)
    whole = ExLlamaV3Engine(prefill)
    whole.load()
    for decode in (Decode(), Decode(4), Decode(1, 2)):
        backend = ExLlamaV3Engine(prefill.updated(decode=decode))
        backend.load()
        windows = toy_windows(3, 61)
        backend.prepare(windows)
        for window in windows:
            logits, expected = backend.logits(window), whole.logits(window)
            torch.testing.assert_close(logits.float(), expected.float(), atol=ATOL_LOGIT, rtol=0.0)
        backend.close()
    whole.close()
