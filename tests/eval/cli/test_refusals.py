"""Each kind of bad input gives one line and exit status 2 before a model loads."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from compare_q import backends
from compare_q.backends.vllm import compat
from compare_q.eval.cli import flags
from tests.support.toy import FAKE, TOY_VOCAB, Run, Specs, assert_refused, in_transformers, needs_accelerate

needs_vllm = pytest.mark.skipif(compat.installed() is None, reason="vLLM is not installed")


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        ("-d {data} -m {models} -kld", ["--kld", '"reference": true', "--logits_file"]),
        ("-d {data}", ["-d and -m", "compare-q run --help"]),
        ("check", ["-d and -m", "compare-q check --help"]),
        ("-d x -m y --rows=-1", ["-r/--rows", "'-1'"]),
        ("-d x -m y --cache-dir=", ["--cache-dir", "empty"]),
        ("-d x -m y -o x --output y", ["--output", "twice"]),
        ("x --ray auto --gpus 0", ["--gpus", "--ray"]),
        ("engines --cache-limit 1GB", ["--cache-limit", "compare-q run"]),
        ("-d x -m y --python vllm", ["--python", "'vllm'", "ENGINE=PYTHON"]),
        ("-d x -m y --deadline nan", ["--deadline", "'nan'"]),
        ("show r.json -v --x-axis size", ["--x-axis", "give one of them"]),
        ("show r.json -ppl --kld-value median", ["--kld-value", "-ppl"]),
        ("show r.json -acc -ppl", ["-ppl", "give one of them"]),
        ("shwo x.json", ["shwo", "'show'"]),
        ("show r.json --colums kld", ["--colums", "'--columns'"]),
        ("show r.json --columns kdl", ["'kdl'", "'kld'", "label,"]),
        ("show r.json --columns memory", ["--columns", "'memory'", "memory:32k"]),
        ("show r.json --columns memory:abc", ["--columns", "'memory:abc'", "memory:32k"]),
        ("show r.json --sort memory:0", ["--sort", "'memory:0'", "memory:32k"]),
        ("show r.json --x-axis memory:k", ["--x-axis", "'memory:k'", "memory:32k"]),
        ("show r.json --x-axis bwp", ["--x-axis", "'bwp'", "'bpw'", "memory:32k"]),
        ("show r.json --fail-if memory>24", ["--fail-if", "'memory'", "memory:32k"]),
        ("show r.json --fit 24GB", ["--fit", "'24GB'", "24GB@32k"]),
        ("show r.json --fit 24GB@0k", ["--fit", "'memory:0k'", "memory:32k"]),
        ("a b --until kdl:2%", ["'kdl:2%'", "'kld:2%'"]),
        ("a b --until kld:0.5", ["'kld:0.5'", "'kld:0.5%'"]),
        ("m -c 512", ["-c", "eval_len in a data spec"]),
        ("--model hf --model_args pretrained=m", ["--model", "compare-q MODEL"]),
        ("show r.json -d x", ["-d", "compare-q run"]),
        ("cache --limit 1GB", ["--limit", "'--cache-limit'"]),
        ("cache --cache-dir {data}", ["--cache-dir", "data.json"]),
        ("a b -p plot.png", ["plot.png", "-pf"]),
        ("m --tensor-parallel-size 2", ["--tensor-parallel-size", '"engine"']),
        ("show r.json --columns label kld", ["kld: ", "--columns"]),
        ("-d wiki2 a b", ["-d", "wiki2 a b"]),
        ("a -m m.json", ["a: ", "-m"]),
    ],
)  # fmt: skip
def test_flags(compare_q: Run, write_specs: Specs, flags: str, facts: list[str]) -> None:
    data, models = write_specs()
    assert_refused(compare_q(*flags.format(data=data, models=models).split()), *facts)


@needs_accelerate
@pytest.mark.parametrize(
    ("keys", "gold"),
    [
        ({"model_dir": ["{model}", "o.safetensors"]}, "'transformers' takes no override tensors"),
        ({"engine": {"dtpe": "auto"}}, "toy: engine.dtpe: unknown key (did you mean 'dtype'?)"),
        ({"revision": "main"}, "toy: revision: only for a model on the hub"),
        ({**FAKE, "load_fn": "vllm"}, "fake: load_fn: unknown engine 'vllm': it is 'vllm_score' here"),
        ({**FAKE, "load_fn": "qtip"}, "fake: load_fn: unknown engine 'qtip'; there are: transformers, "),
        ({**FAKE, "fwd_fn": "exllamav3"}, "fake: fwd_fn: 'exllamav3' does not go with load_fn 'fake'"),
        ({**FAKE, "engine": {"noise": "bf16"}}, 'fake: engine.noise: only for a model that is marked with "noise_'),
        ({**FAKE, "noise_floor": True, "reference": True}, "noise_floor: the reference cannot be its own noise floor"),
    ],
)
def test_a_wrong_model(compare_q: Run, write_specs: Specs, toy_model: Path, keys: dict[str, object], gold: str) -> None:
    keys = json.loads(json.dumps(keys).replace("{model}", str(toy_model)))
    data, spec = write_specs([in_transformers(toy_model, **keys)])
    assert_refused(compare_q("-d", data, "-m", spec), gold)


def test_a_wrong_text_and_missing_files(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    (tmp_path / "t.CSV").write_text("x" * 500)
    for keys, gold in (
        ({"path": str(tmp_path / "t.CSV")}, "is not read as text"),
        ({"max_text_rows": 5}, "a plain text file has no rows"),
        ({"tokenizer_dir": "/nowhere/tokenizer"}, "/nowhere/tokenizer: no such folder"),
    ):  # fmt: skip
        data, spec = write_specs(**keys)
        assert_refused(compare_q("-d", data, "-m", spec), gold)
    data, spec = write_specs()
    assert_refused(compare_q("-d", data, "-m", "no*.json"), "no*.json: no file matches")
    data.write_text(data.read_text().replace('"eval_len"', '"eval_len": 100, "eval_len"'))
    assert_refused(compare_q("-d", data, "-m", spec), "data.json: eval_len: stands twice in one object")


@needs_vllm
def test_context_that_overrides_change(compare_q: Run, write_specs: Specs, toy_model: Path) -> None:
    """With hf_overrides, the config does not determine the longest context: vLLM accepts or refuses the windows."""
    overrides = {"hf_overrides": {"max_position_embeddings": 512}}
    data, spec = write_specs([in_transformers(toy_model, load_fn="vllm_score", engine=overrides)], eval_len=300)
    assert compare_q("check", "-d", data, "-m", spec).status == 0


@pytest.mark.parametrize("engine", [name for name, backend in backends.engines() if backend.capabilities.packages])
def test_a_missing_engine_names_its_cure(
    compare_q: Run, write_specs: Specs, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    backend = backends.engine_class(engine)
    missing = replace(backend.capabilities, packages=("no-such-package",))
    monkeypatch.setattr(backend, "capabilities", missing)
    load_fn = missing.load_fns[0]
    data, spec = write_specs([{"load_fn": load_fn, "label": "m", "model_dir": "/nowhere"}])
    assert_refused(compare_q("-d", data, "-m", spec), f"m: load_fn: {load_fn!r} is not installed: {missing.install}")
    assert "pip install" in missing.install


@needs_accelerate
def test_tokenizer_larger_than_the_model(compare_q: Run, write_specs: Specs, toy_model: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    shutil.copytree(toy_model, small)
    config = json.loads((small / "config.json").read_text())
    assert config["vocab_size"] == TOY_VOCAB
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": 200}))
    data, spec = write_specs([in_transformers(small)])
    assert_refused(compare_q("-d", data, "-m", spec), "its vocabulary reaches id 255, the model has 200 tokens")


def test_all_problems_at_once(compare_q: Run, write_specs: Specs) -> None:
    data, spec = write_specs([{**FAKE, "label": "a", "load_fn": "x"}, {**FAKE, "label": "b", "engine": {"y": 1}}])
    ran = compare_q("-d", data, "-m", spec)
    assert ran.status == 2
    assert [line.split(":")[1] for line in ran.err.splitlines()[1:]] == [" a", " b"]


def test_every_flag_of_upstream_is_there() -> None:
    upstream = """-d --dataspec -m --modelspec -cc --clear_cache -p --plot -v --vram -mx --max_x -my --max_y -t --title
        -kld --kld -mask --mask -lf --logits_file -dark --dark -pf --plot_file -r --rows"""
    assert set(upstream.split()) <= {*flags.parser("run")._option_string_actions}


@needs_accelerate
def test_lm_eval_at_the_models_context_is_refused_before_anything_runs(
    compare_q: Run, write_specs: Specs, toy_model: Path
) -> None:
    """compare_q's windows have one token more than the input of lm-eval."""
    context = json.loads((toy_model / "config.json").read_text())["max_position_embeddings"]
    model = {"load_fn": "transformers_auto", "label": "toy", "model_dir": str(toy_model)}
    data, spec = write_specs([model], method="lm_eval", eval_stride=..., eval_len=context)
    ran = compare_q("check", "-d", data, "-m", spec)
    assert ran.status == 2
    assert f"error: toy: eval_len: windows of {context + 1} tokens" in ran.err
    data, spec = write_specs([model], method="lm_eval", eval_stride=..., eval_len=context - 1)
    assert compare_q("check", "-d", data, "-m", spec).status == 0
