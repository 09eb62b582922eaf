"""Each kind of bad input gives one line and exit status 2 before a model loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compare_q import backends
from compare_q.backends.vllm import installed_vllm
from compare_q.eval.cli.flag_table import flags_of
from tests.support.toy import (
    FAKE,
    TOY_VOCAB,
    Run,
    Specs,
    assert_refused,
    in_transformers,
    needs_accelerate,
    with_config,
)

needs_vllm = pytest.mark.skipif(installed_vllm.installed() is None, reason="vLLM is not installed")


RUN = "-d {data} -m {models}"


def refused(
    name: str,
    words: str = RUN,
    *,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
) -> Any:
    """Return one input: the command line, a model spec, the changed keys of the data spec, what the
    error must name.
    """
    marks = []
    if model and model["load_fn"] == "transformers":
        marks.append(needs_accelerate)
    return pytest.param(name, words, model, data or {}, marks=marks, id=f"{name} {words}")


TOY = in_transformers(Path("{model}"))
INPUTS = [
    refused("--kld", f"{RUN} -kld"),
    refused("--fail-if: no row can have kld: ", f"{RUN} --fail-if kld>0.1"),
    refused("--fail-if: no row can have same_top: ", f"{RUN} --fail-if same_top<99"),
    refused("-d and -m", "-d {data}"),
    refused("-d and -m", "check"),
    refused("-r/--rows", "-d x -m y --rows=-1"),
    refused("--cache-dir", "-d x -m y --cache-dir="),
    refused("--output", "-d x -m y -o x --output y"),
    refused("--gpus", "x --ray auto --gpus 0"),
    refused("--cache-limit", "engines --cache-limit 1GB"),
    refused("--python: 'vllm'", "-d x -m y --python vllm"),
    # No limit excludes NaN, since every comparison with it is false.
    refused("--deadline: 'nan'", "-d x -m y --deadline nan"),
    refused("--x-axis", "show r.json -v --x-axis size"),
    refused("--kld-value", "show r.json -ppl --kld-value median"),
    refused("-ppl", "show r.json -kld -ppl"),
    # The error suggests the word that was meant.
    refused("'show'", "shwo x.json"),
    refused("'--columns'", "show r.json --colums kld"),
    refused("'kld'", "show r.json --columns kdl"),
    refused("did you mean 'bpw_layer'?", "show r.json --columns bpw"),
    refused("did you mean 'size'?", "show r.json --columns file_GB"),
    refused("--columns: 'memory'", "show r.json --columns memory"),
    refused("--columns: 'memory:abc'", "show r.json --columns memory:abc"),
    refused("--sort: 'memory:0'", "show r.json --sort memory:0"),
    refused("--x-axis: 'memory:k'", "show r.json --x-axis memory:k"),
    refused("'bpw'", "show r.json --x-axis bwp"),
    refused("--fail-if: 'memory'", "show r.json --fail-if memory>24"),
    refused("--fit: '24GB'", "show r.json --fit 24GB"),
    refused("--fit: 'memory:0k'", "show r.json --fit 24GB@0k"),
    # A flag of compare_q 0.3.
    refused("--until: compare-q has -r N", "a b --until kld:2%"),
    # The context of llama-perplexity, and the model of lm-eval.
    refused("-c: ", "m -c 512"),
    refused("--model: ", "--model hf --model_args pretrained=m"),
    refused("-d: ", "show r.json -d x"),
    refused("'--cache-limit'", "cache --limit 1GB"),
    refused("data.json", "cache --cache-dir {data}"),
    refused("plot.png", "a b -p plot.png"),
    # An option of vLLM.
    refused("--tensor-parallel-size", "m --tensor-parallel-size 2"),
    refused("kld: ", "show r.json --columns label kld"),
    # -d takes every word that follows, the models as well.
    refused("-d has taken all of wiki2 a b", "-d wiki2 a b"),
    refused("-d has taken all of wiki2 a", "-d wiki2 a"),
    refused("a: ", "a -m m.json"),
    refused("no*.json", "-d {data} -m no*.json"),
    refused("toy: model_dir", model={**TOY, "model_dir": ["{model}", "o.safetensors"]}),
    refused("toy: engine.dtpe", model={**TOY, "engine": {"dtpe": "auto"}}),
    refused("toy: revision", model={**TOY, "revision": "main"}),
    refused(
        "fake: load_fn: unknown engine 'vllm': it is 'vllm_score' here",
        model={**FAKE, "load_fn": "vllm"},
    ),
    refused("fake: load_fn: unknown engine 'qtip'", model={**FAKE, "load_fn": "qtip"}),
    refused("fake: fwd_fn", model={**FAKE, "fwd_fn": "exllamav3"}),
    refused("fake: engine.noise", model={**FAKE, "engine": {"noise": "bf16"}}),
    refused("fake: noise_floor", model={**FAKE, "noise_floor": True, "reference": True}),
    refused("t.CSV", data={"path": "{folder}/t.CSV"}),
    refused("max_text_rows", data={"max_text_rows": 5}),
    refused("/nowhere/tokenizer", data={"tokenizer_dir": "/nowhere/tokenizer"}),
]


@pytest.mark.parametrize(("name", "words", "model", "data"), INPUTS)
def test_inputs(
    compare_q: Run,
    write_specs: Specs,
    toy_model: Path,
    tmp_path: Path,
    name: str,
    words: str,
    model: dict[str, Any] | None,
    data: dict[str, Any],
) -> None:
    """The line names the flag, the key or the file; it may suggest the word that was meant."""

    def filled(keys: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of a spec with the paths of the toy model and of this test's folder."""
        text = (
            json.dumps(keys).replace("{model}", str(toy_model)).replace("{folder}", str(tmp_path))
        )
        result: dict[str, Any] = json.loads(text)
        return result

    (tmp_path / "t.CSV").write_text("x" * 500)
    models = None
    if model:
        models = [filled(model)]
    data_file, models_file = write_specs(models, **filled(data))
    assert_refused(compare_q(*words.format(data=data_file, models=models_file).split()), name)


def test_a_key_that_is_in_a_file_twice(compare_q: Run, write_specs: Specs) -> None:
    data, spec = write_specs()
    data.write_text(data.read_text().replace('"eval_len"', '"eval_len": 100, "eval_len"'))
    assert_refused(compare_q("-d", data, "-m", spec), "data.json: eval_len")


@needs_vllm
def test_context_that_overrides_change(compare_q: Run, write_specs: Specs, toy_model: Path) -> None:
    """With hf_overrides, the config does not determine the longest context: vLLM accepts or refuses
    the windows.
    """
    overrides = {"hf_overrides": {"max_position_embeddings": 512}}
    data, spec = write_specs(
        [in_transformers(toy_model, load_fn="vllm_score", engine=overrides)], eval_len=300
    )
    assert compare_q("check", "-d", data, "-m", spec).status == 0


@pytest.mark.parametrize(
    "engine", [name for name, backend in backends.engines() if backend.capabilities.packages]
)
def test_a_missing_engine_names_its_cure(
    compare_q: Run, write_specs: Specs, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    backend = backends.engine_class(engine)
    missing = replace(backend.capabilities, packages=("no-such-package",))
    monkeypatch.setattr(backend, "capabilities", missing)
    load_fn = missing.load_fns[0]
    data, spec = write_specs([{"load_fn": load_fn, "label": "m", "model_dir": "/nowhere"}])
    assert_refused(compare_q("-d", data, "-m", spec), f"m: load_fn: {load_fn!r}", missing.install)
    assert "pip install" in missing.install


@needs_accelerate
def test_tokenizer_larger_than_the_model(
    compare_q: Run, write_specs: Specs, toy_model: Path, tmp_path: Path
) -> None:
    assert json.loads((toy_model / "config.json").read_text())["vocab_size"] == TOY_VOCAB
    small = with_config(toy_model, tmp_path / "small", vocab_size=200)
    data, spec = write_specs([in_transformers(small)])
    assert_refused(compare_q("-d", data, "-m", spec), "toy: tokenizer_dir: ", "255", "200")


def test_all_problems_at_once(compare_q: Run, write_specs: Specs) -> None:
    data, spec = write_specs(
        [{**FAKE, "label": "a", "load_fn": "x"}, {**FAKE, "label": "b", "engine": {"y": 1}}]
    )
    ran = compare_q("-d", data, "-m", spec)
    assert ran.status == 2
    assert [line.split(":")[1] for line in ran.err.splitlines()[1:]] == [" a", " b"]


def test_every_flag_of_upstream_is_there() -> None:
    upstream = """-d --dataspec -m --modelspec -cc --clear_cache -p --plot -v --vram -mx --max_x
        -my --max_y -t --title -kld --kld -mask --mask -lf --logits_file -dark --dark
        -pf --plot_file -r --rows"""
    assert set(upstream.split()) <= flags_of("run").keys()


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
    assert "error: toy: eval_len: " in ran.err
    data, spec = write_specs([model], method="lm_eval", eval_stride=..., eval_len=context - 1)
    assert compare_q("check", "-d", data, "-m", spec).status == 0
