"""The command line: flags, exit statuses, and one line for each kind of bad input."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from rich.console import Console

import backends
from backends.fake import FakeBackend
from backends.hf.backend import TransformersBackend
from backends.vllm import install
from eval.cli import arguments, main
from eval.common.cache import Cache
from eval.plots import figures
from eval.results import results_json
from eval.results.run_result import RunResult
from tests.support.made import BASE, FAILED, QUANT, REF, run_of
from tests.support.toy import TOY_VOCAB, Ran

Run = Callable[..., Ran]
Specs = Callable[..., tuple[Path, Path]]
FAKE = {"load_fn": "fake", "label": "fake", "model_dir": "none"}


def assert_refused(ran: Ran, *parts: str) -> None:
    """Exit status 2, one line of error that holds every part, nothing else but progress."""
    assert ran.status == 2
    (line,) = [line for line in ran.err.splitlines() if not line.startswith("tokenizing ")]
    assert line.startswith("error: ")
    assert "Traceback" not in line
    for part in parts:
        assert part in line
    assert ran.out == ""


def shown_ppl(ran: Ran, label: str) -> float:
    """PPL in the printed table's row of a model whose stored size is n/a."""
    found = re.search(rf"^ ?{label} +closed form +n/a +n/a +n/a +★?([\d,.]+)±", ran.out, re.MULTILINE)
    assert found, ran.out
    return float(found[1].replace(",", ""))


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """results.json of a finished run with a failed model."""
    results_json.write_json(run_of(REF, QUANT, FAILED), tmp_path / "finished.json", ["compare_q.py", "-d", "x"])
    return tmp_path / "finished.json"


def toy(model: Path, **keys: Any) -> dict[str, Any]:
    return {"load_fn": "transformers", "label": "toy", "model_dir": str(model), **keys}


def test_uniform_logits_have_the_vocabulary_as_perplexity(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    """PPL = V for uniform logits; with boost b, PPL = (e^b + V - 1) / e^b: (e^3 + 499) / e^3 = 25.844."""
    models = [
        {**FAKE, "label": "uniform", "engine": {"vocab_size": 500}},
        {**FAKE, "label": "boosted", "engine": {"vocab_size": 500, "boost": 3.0}},
    ]
    data, spec = write_specs(models)
    ran = compare_q("-d", data, "-m", spec, "-o", tmp_path / "r.json", "--csv", tmp_path / "r.csv")
    assert ran.status == 0, ran.err
    uniform, boosted = json.loads((tmp_path / "r.json").read_text())["models"]
    assert uniform["ppl"] == pytest.approx(500.0, rel=1e-6)
    assert boosted["ppl"] == pytest.approx(25.8437, abs=1e-3)
    assert uniform["tokens"] == 9 * 99
    with (tmp_path / "r.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["label"] for row in rows] == ["uniform", "boosted"]
    assert float(rows[0]["ppl"]) == uniform["ppl"]
    assert shown_ppl(ran, "uniform") == pytest.approx(500, rel=1e-5)


def test_results_json_says_what_ran(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    data, spec = write_specs([FAKE], dataset_display_name="letters")
    assert compare_q("-d", data, "-m", spec, "-o", tmp_path / "r.json").status == 0
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["format"] == 5
    assert "python" in written["versions"]
    assert "cpu" in written["hardware"] or "gpus" in written["hardware"]
    assert written["data"]["windows"] == 9
    assert written["data"]["scored_tokens"] == 891
    assert written["data"]["spec"]["dataset_display_name"] == "letters"
    assert len(written["models"][0]["spec_sha256"]) == 64
    assert written["models"][0]["layer_bpw"] is None
    assert written["models"][0]["storage_note"] == "a fake model stores nothing"


def test_second_run_comes_from_the_cache(
    compare_q: Run, write_specs: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, spec = write_specs([FAKE])
    assert compare_q("-d", data, "-m", spec).status == 0
    monkeypatch.setattr(FakeBackend, "load", lambda self: pytest.fail("loaded again"))
    again = compare_q("-d", data, "-m", spec, "-o", tmp_path / "r.json")
    assert again.status == 0, again.err
    assert json.loads((tmp_path / "r.json").read_text())["models"][0]["from_cache"] is True
    assert "1 of 1 rows come from the cache" in again.out
    monkeypatch.undo()


def test_cache_is_cleared_and_follows_the_options(
    compare_q: Run, write_specs: Specs, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPARE_Q_CACHE", str(own_cache))
    data, spec = write_specs([FAKE])
    assert compare_q("-d", data, "-m", spec).status == 0
    assert "*" not in compare_q("-d", data, "-m", spec, "-cc").out
    data, spec = write_specs([{**FAKE, "engine": {"vocab_size": 600}}])
    ran = compare_q("-d", data, "-m", spec)
    assert shown_ppl(ran, "fake") == pytest.approx(600, rel=1e-5)
    assert "*" not in ran.out


def test_non_finite_positions_are_shown(compare_q: Run, write_specs: Specs) -> None:
    data, spec = write_specs([{**FAKE, "label": "holes", "engine": {"nan_windows": [0, 3]}}])
    ran = compare_q("-d", data, "-m", spec)
    assert ran.status == 0
    assert "holes: 2 positions had no finite log-probability" in ran.out
    assert shown_ppl(ran, "holes") == pytest.approx(1000, rel=1e-5)
    assert re.search(r" 1,000\.0001±\S+ +2 ", ran.out)


def test_one_failure_does_not_lose_the_others(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    models = [{**FAKE, "label": "bad", "engine": {"fail": 2}}, {**FAKE, "label": "good"}]
    data, spec = write_specs(models)
    ran = compare_q("-d", data, "-m", spec, "-o", tmp_path / "r.json", "-pf", tmp_path / "p.png")
    assert ran.status == 1
    assert "bad: failed: told to fail after 2 windows" in ran.out
    assert shown_ppl(ran, "good") == pytest.approx(1000, rel=1e-5)
    bad, good = json.loads((tmp_path / "r.json").read_text())["models"]
    assert (bad["ppl"], bad["error"]) == (None, "told to fail after 2 windows")
    assert good["error"] is None
    assert "bad: not in the plot" in ran.out


def test_a_bug_in_one_engine_does_not_lose_the_others(
    compare_q: Run, write_specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a CompareQError: logits that have no row for a token id."""
    data, spec = write_specs([{**FAKE, "label": "small", "engine": {"vocab_size": 5}}, {**FAKE, "label": "good"}])
    ran = compare_q("-d", data, "-m", spec)
    assert ran.status == 1
    assert "small: failed: IndexError: " in ran.out
    assert shown_ppl(ran, "good") == pytest.approx(1000, rel=1e-5)
    assert "Traceback" not in ran.out + ran.err


def test_no_finite_score_is_a_failure(compare_q: Run, write_specs: Specs) -> None:
    data, spec = write_specs(
        [{**FAKE, "label": "nan", "engine": {"nan_windows": [0]}}], eval_len=2, eval_stride=2, max_rows=1
    )
    ran = compare_q("-d", data, "-m", spec)
    assert ran.status == 2
    assert ran.err.splitlines()[-1] == "error: nan: no perplexity: none of 1 positions is finite"


def test_damaged_cache(compare_q: Run, write_specs: Specs, own_cache: Path) -> None:
    """Damaged tokens are made again; damaged scores are an error that names the file, and -cc mends it."""
    data, spec = write_specs([FAKE])
    assert compare_q("-d", data, "-m", spec).status == 0
    (tokens,) = (own_cache / "tokens").glob("*.npz")
    tokens.write_bytes(tokens.read_bytes()[:50])
    assert "tokenizing" in compare_q("-d", data, "-m", spec).err
    (facts,) = (own_cache / "scores").glob("*.json")
    facts.write_text("{")
    ran = compare_q("-d", data, "-m", spec)
    assert ran.status == 2
    assert "damaged" in ran.err
    assert str(own_cache / "scores") in ran.err
    assert compare_q("-d", data, "-m", spec, "-cc").status == 0


def test_override_tensors_are_refused(compare_q: Run, write_specs: Specs, toy_model: Path) -> None:
    data, spec = write_specs([toy(toy_model, model_dir=[str(toy_model), "o.safetensors"])])
    assert_refused(compare_q("-d", data, "-m", spec), "'transformers' takes no override tensors")


@pytest.mark.parametrize("mark", ["reference", "out_logits"])
def test_kld_against_a_reference(compare_q: Run, write_specs: Specs, tmp_path: Path, mark: str) -> None:
    """The real token has p = e^3 / (e^3 + 499), the others q = 1 / (e^3 + 499): p ln 500p + 499 q ln 500q = 0.07862."""
    marked = {mark: True if mark == "reference" else str(tmp_path / "kept")}
    boosted = {"label": "boosted", "engine": {"vocab_size": 500, "boost": 3.0}, "override_bpw_layer": 16.0}
    uniform = {"label": "uniform", "engine": {"vocab_size": 500}, "override_bpw_layer": 4.0}
    data, spec = write_specs([{**FAKE, **uniform}, {**FAKE, **boosted, **marked}])
    ran = compare_q("-d", data, "-m", spec, "-kld", "-pf", tmp_path / "p.svg", "-o", tmp_path / "r.json")
    assert ran.status == 0, ran.err
    first, second = (line.split() for line in ran.out.splitlines() if line.split()[:1] in (["uniform"], ["boosted"]))
    assert (first[6].partition("±")[0], first[8].partition("±")[0]) == ("500.0000", "0.07862")
    assert (second[6].partition("±")[0], second[7:9]) == ("25.8437", ["ref", "ref"])
    assert "against boosted" in ran.out
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["reference"]["label"] == "boosted"
    assert [model["reference"] for model in written["models"]] == [False, True]
    assert written["models"][0]["kld"] == pytest.approx(0.078622, abs=1e-6)
    assert (tmp_path / "p.svg").is_file()


def test_a_key_that_stands_twice(compare_q: Run, write_specs: Specs) -> None:
    data, spec = write_specs()
    data.write_text(data.read_text().replace('"eval_len": 100', '"eval_len": 100, "eval_len": 50'))
    assert_refused(compare_q("-d", data, "-m", spec), "data.json: eval_len: stands twice in one object")


def test_text_that_is_no_text(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    for name in ("t.json", "t.CSV"):
        (tmp_path / name).write_text("x" * 500)
        data, spec = write_specs(path=str(tmp_path / name))
        assert_refused(compare_q("-d", data, "-m", spec), "is not read as text")
    data, spec = write_specs(max_text_rows=5)
    assert_refused(compare_q("-d", data, "-m", spec), "a plain text file has no rows")


def test_context_that_overrides_change(compare_q: Run, write_specs: Specs, toy_model: Path) -> None:
    """The config alone does not say what a model with hf_overrides can read: that is for vLLM to accept or refuse."""
    overrides = {"hf_overrides": {"max_position_embeddings": 512}}
    data, spec = write_specs([toy(toy_model, load_fn="vllm_score", engine=overrides)], eval_len=300)
    assert compare_q("-d", data, "-m", spec, "--check").status == 0


def test_nothing_measured_is_status_2(compare_q: Run, write_specs: Specs) -> None:
    data, spec = write_specs([{**FAKE, "label": "bad", "engine": {"fail": 0}}])
    ran = compare_q("-d", data, "-m", spec)
    assert ran.status == 2
    assert ran.err.splitlines()[-1] == "error: bad: told to fail after 0 windows"


def test_plot_is_written(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    models = [{**FAKE, "label": f"EXL3 {bits}", "override_bpw_layer": bits, "override_vram_bits": 8e9 * bits,
               "engine": {"boost": bits}} for bits in (2.0, 3.0, 4.0)]  # fmt: skip
    data, spec = write_specs(models)
    for name, flags in (("p.png", []), ("p.svg", ["-v", "-dark", "-t", "My title"])):
        ran = compare_q("-d", data, "-m", spec, "-p", "-pf", tmp_path / name, *flags)
        assert ran.status == 0, ran.err
        assert f"plot: {tmp_path / name}" in ran.out
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_plot_limits_can_leave_nothing(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    data, spec = write_specs([{**FAKE, "override_bpw_layer": 4.0}])
    ran = compare_q("-d", data, "-m", spec, "-pf", tmp_path / "p.png", "-mx", "3")
    assert ran.status == 0
    assert "no plot: no model has both values within the limits" in ran.out
    assert not (tmp_path / "p.png").exists()


def test_plot_without_a_file_name(
    compare_q: Run, write_specs: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, spec = write_specs([{**FAKE, "override_bpw_layer": 4.0}])
    monkeypatch.chdir(tmp_path)
    assert compare_q("-d", data, "-m", spec, "-p").status == 0
    assert (tmp_path / "compare_q.png").is_file()


def test_mask_and_wildcards(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    data, spec = write_specs([{**FAKE, "label": "EXL3 4.0"}, {**FAKE, "label": "GGUF Q4"}, {**FAKE, "label": "FP8"}])
    ran = compare_q("-d", data, "-m", tmp_path / "mod*.json", "-mask", "exl3;fp8")
    assert ran.status == 0, ran.err
    assert "EXL3 4.0" in ran.out
    assert "FP8" in ran.out
    assert "GGUF" not in ran.out
    assert_refused(compare_q("-d", data, "-m", spec, "-mask", "awq"), "--mask", "'awq' matches no label", "EXL3 4.0")


def test_list_engines(compare_q: Run) -> None:
    ran = compare_q("--list-engines")
    assert ran.status == 0
    for word in ("transformers_auto_bf16", "vllm_score", "fake", "built in"):
        assert word in ran.out


def test_check_starts_nothing(
    compare_q: Run, write_specs: Specs, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransformersBackend, "load", lambda self: pytest.fail("loaded"))
    data, spec = write_specs([toy(toy_model)])
    ran = compare_q("-d", data, "-m", spec, "--check")
    assert ran.status == 0, ran.err
    assert "toy: transformers (transformers " in ran.out
    data, spec = write_specs([toy(Path("/nowhere/model"))], path="/nowhere/text.txt")
    ran = compare_q("-d", data, "-m", spec, "--check")
    assert ran.status == 2
    assert "error: data: path: /nowhere/text.txt: no such file" in ran.err
    assert "error: toy: /nowhere/model: no such folder" in ran.err


@pytest.mark.parametrize("flags", [[], ["--check"], ["-p"]])
def test_kld_without_a_reference_is_refused_and_not_ignored(
    compare_q: Run, write_specs: Specs, flags: list[str]
) -> None:
    data, spec = write_specs()
    ran = compare_q("-d", data, "-m", spec, "-kld", *flags)
    assert_refused(ran, '--kld: no model is the reference: mark one with "reference": true', "or give --logits_file")


def test_flags_of_the_plot(compare_q: Run, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(figures, "draw", lambda run, file, **keys: told.append((file, keys)))
    plot = tmp_path / "p.svg"
    assert compare_q("--from", finished, "-pf", plot).status == 0
    assert compare_q("--from", finished, "-pf", plot, "-kld", "-v", "-mx", 3, "-my", 4, "-t", "T", "-dark",
                     "--no-log_y").status == 0  # fmt: skip
    plain = {"vram": False, "kld": False, "max_x": math.inf, "max_y": math.inf, "title": None, "dark": False}
    asked = {"vram": True, "kld": True, "max_x": 3.0, "max_y": 4.0, "title": "T", "dark": True}
    plain, asked = {**plain, "log_y": None}, {**asked, "log_y": False}
    assert told == [(plot, plain), (plot, asked)]


def test_tokens_of_measured_models_are_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two labels with one file name are two files; a failed model leaves its name free in every run."""
    cache = Cache(tmp_path / "cache")
    for key in ("a", "b", "c"):
        cache.path("scores", key, ".parquet").write_text(key)
    models = (
        replace(BASE, label="W4 g32", scores_key="a"),
        replace(FAILED, label="w4/g32", scores_key="b"),
        replace(BASE, label="W4_g32", scores_key="c"),
        replace(BASE, label="no key"),
    )
    main.copy_scores(cache, RunResult({}, "letters", models), tmp_path)
    found = {file.name: file.read_text() for file in tmp_path.glob("*.parquet")}
    assert found == {"W4_g32.parquet": "a", "W4_g32-3.parquet": "c"}
    assert capsys.readouterr().out.splitlines() == [
        f"tokens of W4 g32: {tmp_path / 'W4_g32.parquet'}",
        f"tokens of W4_g32: {tmp_path / 'W4_g32-3.parquet'}",
    ]


def test_tokens_out(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    data, spec = write_specs([{**FAKE, "label": "one [x]"}, {**FAKE, "label": "bad", "engine": {"fail": 0}}])
    ran = compare_q("-d", data, "-m", spec, "--tokens-out", tmp_path / "deep" / "tokens")
    assert ran.status == 1, ran.err
    (file,) = (tmp_path / "deep" / "tokens").iterdir()
    assert file.name == "one__x_.parquet"
    table = parquet.read_table(file)
    assert table.num_rows == 9 * 99
    assert {"window", "position", "token_id", "logprob"} <= set(table.column_names)


def test_unwritable_tokens_folder(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    data, spec = write_specs()
    (tmp_path / "file").write_text("")
    for flag in ("--tokens-out", "--plots"):
        for folder in (tmp_path / "file", tmp_path / "file" / "below"):
            assert_refused(compare_q("-d", data, "-m", spec, flag, folder), f"{flag}: {folder}: cannot")


def test_missing_flags(compare_q: Run) -> None:
    assert_refused(compare_q("-d", "x.json"), "-d and -m: both are needed (or --from")


@pytest.mark.parametrize("value", ["ten", "-1", "1.5"])
def test_bad_rows(compare_q: Run, value: str) -> None:
    ran = compare_q("-d", "x", "-m", "y", f"--rows={value}")
    assert ran.status == 2
    assert "is neither a number of rows nor 'all'" in ran.err


def test_wrong_json(compare_q: Run, write_specs: Specs) -> None:
    data, spec = write_specs()
    data.write_text('{"eval_len": }')
    assert_refused(compare_q("-d", data, "-m", spec), "data.json: line 1, column 14: not valid JSON")


def test_unknown_key(compare_q: Run, write_specs: Specs) -> None:
    data, spec = write_specs(evallen=5)
    assert_refused(compare_q("-d", data, "-m", spec), "data.json: evallen: unknown key (did you mean 'eval_len'?)")


def test_missing_files(compare_q: Run, write_specs: Specs) -> None:
    data, spec = write_specs(path="/nowhere/text.txt")
    assert_refused(compare_q("-d", "no.json", "-m", spec), "no.json: no such file")
    assert_refused(compare_q("-d", data, "-m", "no.json"), "no.json: no such file")
    assert_refused(compare_q("-d", data, "-m", "no*.json"), "no*.json: no file matches")
    assert_refused(compare_q("-d", data, "-m", spec), "path: /nowhere/text.txt: no such file")
    data, spec = write_specs([toy(Path("/nowhere/model"))])
    assert_refused(compare_q("-d", data, "-m", spec), "toy: /nowhere/model: no such folder")
    data, spec = write_specs(tokenizer_dir="/nowhere/tokenizer")
    assert_refused(compare_q("-d", data, "-m", spec), "/nowhere/tokenizer: no such folder")


def test_a_folder_without_a_model(compare_q: Run, write_specs: Specs, toy_model: Path, tmp_path: Path) -> None:
    data, spec = write_specs([toy(tmp_path)])
    assert_refused(compare_q("-d", data, "-m", spec), "config.json: missing")
    shutil.copy(toy_model / "config.json", tmp_path)
    assert_refused(compare_q("-d", data, "-m", spec), "no .safetensors files")


def test_unknown_engine(compare_q: Run, write_specs: Specs) -> None:
    data, spec = write_specs([{**FAKE, "load_fn": "vllm_scor"}])
    assert_refused(compare_q("-d", data, "-m", spec), "unknown engine 'vllm_scor' (did you mean 'vllm_score'?)")
    data, spec = write_specs([{**FAKE, "fwd_fn": "exllamav3"}])
    assert_refused(compare_q("-d", data, "-m", spec), "fwd_fn: 'exllamav3' does not go with load_fn 'fake'")


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


def test_unknown_engine_option(compare_q: Run, write_specs: Specs, toy_model: Path) -> None:
    data, spec = write_specs([toy(toy_model, engine={"dtpe": "auto"})])
    assert_refused(compare_q("-d", data, "-m", spec), "toy: engine.dtpe: unknown key (did you mean 'dtype'?)")
    assert install.installed() is not None
    data, spec = write_specs([toy(toy_model, load_fn="vllm_score", engine={"kv_cache_dtpe": "fp8"})])
    assert_refused(compare_q("-d", data, "-m", spec), "engine.kv_cache_dtpe", "(did you mean 'kv_cache_dtype'?)")


def test_tokenizer_larger_than_the_model(compare_q: Run, write_specs: Specs, toy_model: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    shutil.copytree(toy_model, small)
    config = json.loads((small / "config.json").read_text())
    assert config["vocab_size"] == TOY_VOCAB
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": 200}))
    data, spec = write_specs([toy(small)])
    assert_refused(compare_q("-d", data, "-m", spec), "its vocabulary reaches id 255, the model has 200 tokens")


@pytest.mark.parametrize("key", ["eval_len", "eval_stride"])
@pytest.mark.parametrize("value", [0, -5])
def test_non_positive_lengths(compare_q: Run, write_specs: Specs, key: str, value: int) -> None:
    data, spec = write_specs(**{key: value})
    assert_refused(compare_q("-d", data, "-m", spec), f"data.json: {key}: input should be greater than 0 (got {value})")


def test_negative_rows(compare_q: Run, write_specs: Specs) -> None:
    data, spec = write_specs(max_rows=-1)
    assert_refused(compare_q("-d", data, "-m", spec), "max_rows: input should be greater than or equal to 0 (got -1)")


def test_eval_len_above_the_context(compare_q: Run, write_specs: Specs, toy_model: Path) -> None:
    data, spec = write_specs([toy(toy_model)], eval_len=257)
    assert_refused(compare_q("-d", data, "-m", spec), "windows of 257 tokens exceed the model's context of 256")
    data, spec = write_specs([toy(toy_model)], eval_len=250, chat_template=True)
    assert_refused(compare_q("-d", data, "-m", spec), "windows of 280 tokens exceed the model's context of 256")


def test_too_little_text(compare_q: Run, write_specs: Specs) -> None:
    data, spec = write_specs(eval_len=1000)
    assert_refused(compare_q("-d", data, "-m", spec), "the text has 1000 tokens, one window takes 1001")


@pytest.mark.parametrize("flag", ["-o", "--csv", "-pf", "--markdown", "--html"])
def test_unwritable_output(compare_q: Run, write_specs: Specs, tmp_path: Path, flag: str) -> None:
    data, spec = write_specs()
    ran = compare_q("-d", data, "-m", spec, flag, tmp_path / "no" / "such.png")
    assert_refused(ran, "such.png: cannot be written")
    assert_refused(compare_q("-d", data, "-m", spec, flag, tmp_path), "cannot be written")


def test_unknown_plot_format(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    data, spec = write_specs()
    assert_refused(compare_q("-d", data, "-m", spec, "-pf", tmp_path / "p.bmp"), "must end in .png, .svg, .pdf")


def test_unwritable_cache(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    data, spec = write_specs()
    (tmp_path / "file").write_text("")
    ran = compare_q("-d", data, "-m", spec, "--cache-dir", tmp_path / "file" / "cache")
    assert_refused(ran, "--cache-dir", "cannot be written")


def test_all_problems_at_once(compare_q: Run, write_specs: Specs) -> None:
    data, spec = write_specs([{**FAKE, "label": "a", "load_fn": "x"}, {**FAKE, "label": "b", "engine": {"y": 1}}])
    ran = compare_q("-d", data, "-m", spec)
    assert ran.status == 2
    assert [line.split(":")[1] for line in ran.err.splitlines()[1:]] == [" a", " b"]


def test_interrupt(compare_q: Run, write_specs: Specs, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeBackend, "load", interrupt)
    data, spec = write_specs()
    ran = compare_q("-d", data, "-m", spec)
    assert ran.status == 130
    assert "interrupted" in ran.err


def test_every_flag_of_upstream_is_there() -> None:
    flags = {flag for action in arguments.parser()._actions for flag in action.option_strings}
    upstream = {
        "-d", "--dataspec", "-m", "--modelspec", "-cc", "--clear_cache", "-p", "--plot", "-v", "--vram", "-mx",
        "--max_x", "-my", "--max_y", "-t", "--title", "-kld", "--kld", "-mask", "--mask", "-lf", "--logits_file",
        "-dark", "--dark", "-pf", "--plot_file",
    }  # fmt: skip
    ours = {
        "-r", "--rows", "-o", "--output", "--csv", "--tokens-out", "--cache-dir", "--list-engines", "--check",
        "--verbose", "--from", "--sort", "--statistics", "--pairs", "--pair", "--markdown", "--html", "--plots",
    }  # fmt: skip
    assert upstream | ours <= flags


def test_an_engine_that_cannot_describe_itself_loses_no_score(
    compare_q: Run, write_specs: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the reference's store; and a close that fails is said."""

    def broken(self: FakeBackend) -> None:
        raise RuntimeError("cannot copy out of meta")

    monkeypatch.setattr(FakeBackend, "layers", broken)
    monkeypatch.setattr(FakeBackend, "close", broken)
    models = [{**FAKE, "label": "ref", "reference": True}, {**FAKE, "label": "other", "engine": {"boost": 1.0}}]
    data, spec = write_specs(models)
    ran = compare_q("-d", data, "-m", spec, "-o", tmp_path / "r.json")
    assert ran.status == 0, ran.err
    ref, other = json.loads((tmp_path / "r.json").read_text())["models"]
    assert (ref["error"], ref["kernel"]) == (None, None)
    assert other["kld_tokens"] == other["tokens"] == 891
    assert "ref: what ran is not known: RuntimeError: cannot copy out of meta" in ran.out
    assert "ref: closing its engine failed: cannot copy out of meta" in ran.err


def test_a_revision_needs_the_hub(compare_q: Run, write_specs: Specs, toy_model: Path) -> None:
    data, spec = write_specs([toy(toy_model, revision="main")])
    assert_refused(compare_q("-d", data, "-m", spec), "toy: revision: only for a model on the hub")


def test_a_finished_run_is_shown_again(compare_q: Run, finished: Path, tmp_path: Path) -> None:
    """Nothing is missing, though one of its models failed then: status 0."""
    files = {flag: tmp_path / name for flag, name in
             {"-o": "o.json", "--csv": "o.csv", "--markdown": "o.md", "--html": "o.html"}.items()}  # fmt: skip
    ran = compare_q(
        "--from", finished, *(word for pair in files.items() for word in pair), "--plots", tmp_path / "plots"
    )
    assert ran.status == 0, ran.err
    assert "broken: failed: told to fail" in ran.out
    assert files["-o"].read_text() == finished.read_text()
    assert files["--csv"].read_text().startswith("label,")
    assert files["--markdown"].read_text().startswith("**letters**")
    assert list((tmp_path / "plots").glob("*.png"))
    again = compare_q("--from", files["--html"])
    assert again.out == compare_q("--from", finished).out
    for name in ("results", "CSV", "Markdown", "report", "plot"):
        assert f"\n{name}: {tmp_path}" in ran.out


def test_a_run_and_its_report_say_the_same(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    """From the report the table is drawn again, with its inspection of tokens, without an engine."""
    models = [{**FAKE, "label": "ref", "reference": True}, {**FAKE, "label": "other", "engine": {"boost": 1.0}}]
    data, spec = write_specs(models)
    ran = compare_q("-d", data, "-m", spec, "--html", tmp_path / "r.html", "-t", "Mine <b>")
    assert ran.status == 0, ran.err
    again = compare_q("--from", tmp_path / "r.html", "--html", tmp_path / "s.html", "-t", "Mine <b>")
    assert again.status == 0, again.err
    assert again.out.partition("report: ")[0] == ran.out.partition("report: ")[0]
    assert "<title>Mine &lt;b&gt;" in (tmp_path / "r.html").read_text()
    run, inspection = results_json.load(tmp_path / "r.html")
    assert results_json.load(tmp_path / "s.html") == (run, inspection)
    assert len(run.models) == 2
    assert inspection["passages"]


@pytest.mark.parametrize(
    "flags", [["-d", "x"], ["-m", "x"], ["-r", "5"], ["-r", "0"], ["-mask", "x"], ["-cc"], ["-lf", "x"], ["--check"],
              ["--tokens-out", "x"]],
)  # fmt: skip
def test_flags_that_run_something_do_not_go_with_a_finished_run(
    compare_q: Run, finished: Path, flags: list[str]
) -> None:
    assert_refused(compare_q("--from", finished, *flags), "--from: shows a finished run;", flags[0])


def test_finished_runs_that_cannot_be_shown(compare_q: Run, finished: Path, tmp_path: Path) -> None:
    assert_refused(compare_q("--from", tmp_path / "no.json"), "no.json: no such file")
    finished.write_text(finished.read_text().replace('"format": 5', '"format": 3'))
    assert_refused(compare_q("--from", finished), "finished.json: results of format 3")
    results_json.write_json(run_of(BASE, reference=None), finished, [])
    assert_refused(compare_q("--from", finished, "-kld"), "has no reference, and so no KL divergence")


def test_rows_are_sorted_in_the_table_and_not_in_the_results(compare_q: Run, finished: Path, tmp_path: Path) -> None:
    results_json.write_json(run_of(QUANT, FAILED, REF), finished, [])
    files = ("-o", tmp_path / "o.json", "--csv", tmp_path / "o.csv", "--markdown", tmp_path / "o.md")
    ran = compare_q("--from", finished, "--sort", "kld", *files)
    labels = ("bf16", "W4A16", "broken")
    assert [
        line.split()[0] for line in ran.out.splitlines() if line.startswith(tuple(f" {x} " for x in labels))
    ] == list(labels)
    assert [line.partition(",")[0] for line in (tmp_path / "o.csv").read_text().splitlines()[1:]] == list(labels)
    assert [line.split()[1] for line in (tmp_path / "o.md").read_text().splitlines()[4:7]] == list(labels)
    assert (tmp_path / "o.json").read_text() == finished.read_text()
    assert "invalid choice: 'size'" in compare_q("--from", finished, "--sort", "size").err


def test_statistics_and_pairs_are_printed(compare_q: Run, finished: Path) -> None:
    ran = compare_q("--from", finished, "--statistics", "--pairs", "--pair", "W4A16", "bf16")
    assert ran.status == 0, ran.err
    assert "Mean PPL(Q)/PPL(base)         :   1.034500 ±   0.001030 (± 0.002070)" in ran.out
    assert ran.out.index("bf16 against W4A16\n") < ran.out.index("W4A16 against bf16\n", ran.out.index("Differences"))
    plain = compare_q("--from", finished).out
    assert "Mean PPL" not in plain
    assert "Differences:" not in plain


def test_pairs_of_unknown_labels_stop_the_run_before_it_begins(
    compare_q: Run, write_specs: Specs, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBackend, "load", lambda self: pytest.fail("loaded"))
    data, spec = write_specs([FAKE])
    ran = compare_q("-d", data, "-m", spec, "--pair", "fake", "fame")
    assert_refused(ran, "--pair: no model is called 'fame'; there are: fake")
    assert_refused(compare_q("--from", finished, "--pair", "x", "bf16"), "--pair: no model is called 'x'")


def test_two_outputs_with_one_name(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    data, spec = write_specs()
    ran = compare_q("-d", data, "-m", spec, "-o", tmp_path / "r.x", "--html", tmp_path / "." / "r.x")
    assert_refused(ran, "--html: ", "r.x: is that of --output as well; name another")


def test_a_finished_run_is_not_written_over_itself(compare_q: Run, finished: Path) -> None:
    before = finished.read_bytes()
    assert_refused(compare_q("--from", finished, "--csv", finished), "--csv: ", "is that of --from as well")
    assert finished.read_bytes() == before


def test_lm_eval_at_the_models_context_is_refused_before_anything_runs(
    compare_q: Run, write_specs: Specs, toy_model: Path
) -> None:
    """Its windows hold one token more than lm-eval feeds."""
    context = json.loads((toy_model / "config.json").read_text())["max_position_embeddings"]
    model = {"load_fn": "transformers_auto", "label": "toy", "model_dir": str(toy_model)}
    data, spec = write_specs([model], method="lm_eval", eval_stride=..., eval_len=context)
    ran = compare_q("-d", data, "-m", spec, "--check")
    assert ran.status == 2
    assert f"error: toy: eval_len: windows of {context + 1} tokens" in ran.err
    data, spec = write_specs([model], method="lm_eval", eval_stride=..., eval_len=context - 1)
    assert compare_q("-d", data, "-m", spec, "--check").status == 0


def test_noise_is_for_a_noise_floor_that_is_not_the_reference(compare_q: Run, write_specs: Specs) -> None:
    data, spec = write_specs([{**FAKE, "engine": {"noise": "bf16"}}])
    assert_refused(
        compare_q("-d", data, "-m", spec), 'fake: engine.noise: only for a model that is marked with "noise_'
    )
    data, spec = write_specs([{**FAKE, "noise_floor": True, "reference": True}])
    assert_refused(compare_q("-d", data, "-m", spec), "fake: noise_floor: the reference cannot be its own noise floor")


def test_names_that_look_like_markup_are_shown_as_they_are(
    write_specs: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal, where there are progress bars: [/x] closed a style that was not open."""
    monkeypatch.setattr(Console, "is_terminal", property(lambda self: True))
    data, spec = write_specs([{**FAKE, "label": "Q4 [/imatrix]"}], dataset_display_name="text [/b]")
    assert main.main(["-d", str(data), "-m", str(spec), "--cache-dir", str(tmp_path / "cache")]) == 0
    assert "Q4 [/imatrix]" in capsys.readouterr().out
