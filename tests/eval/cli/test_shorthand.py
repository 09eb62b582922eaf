"""Models and texts by name: the chosen engine, refusals, and the specs that repeat the run."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from compare_q import backends
from compare_q.backends.checkpoint.checkpoint_config import CheckpointConfig
from compare_q.backends.common import machine
from compare_q.backends.common.errors import InputError
from compare_q.backends.vllm import installed_vllm
from compare_q.eval.cli import shorthand
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs import spec_files
from compare_q.eval.text import corpus
from tests.support.checkpoints import finish_gguf
from tests.support.toy import Run, assert_refused, in_transformers, needs_accelerate
from tests.support.transformers_models import changed

WEIGHTS = "model.safetensors"


@pytest.fixture
def rounded(toy_model: Path, tmp_path: Path) -> Path:
    """The toy with weights that are rounded to FP8 (e4m3)."""
    folder = tmp_path / "rounded"
    shutil.copytree(toy_model, folder)
    tensors = {
        name: tensor.to(torch.float8_e4m3fn).bfloat16()
        for name, tensor in load_file(folder / WEIGHTS).items()
    }
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


@pytest.mark.parametrize("vllm", [True, False])
def test_weights_that_several_engines_read_go_to_the_one_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm: bool
) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    read = CheckpointConfig.read(tmp_path)
    installed = None
    expected = "transformers_auto"
    if vllm:
        installed = ("x", "1")
        expected = "vllm_score"
    monkeypatch.setattr(backends.base.Capabilities, "installed", lambda self: installed)
    assert backends.engine_for(str(tmp_path), read, set())[0] == expected
    # It may have another Python.
    assert backends.engine_for(str(tmp_path), read, {"vllm_score"})[0] == "vllm_score"


def test_formats_for_which_vllm_has_no_kernel_go_to_transformers(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, weight-only NVFP4; without AVX-512 also weight-only int4."""
    folder = tmp_path / "nvfp4a16"
    shutil.copytree(toy_model, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}

    def chosen() -> tuple[str, str]:
        group = {"targets": ["Linear"], "weights": weights}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": group},
        }
        (folder / "config.json").write_text(json.dumps(config))
        named = shorthand.model(str(folder), set(), Progress(), reference=False)
        return named.spec.load_fn, named.reason

    monkeypatch.setattr(backends.base.Capabilities, "installed", lambda self: ("x", "1"))
    monkeypatch.setattr(installed_vllm, "computes_on_cpu", lambda: True)
    why = "compressed-tensors weights; vllm_score has no kernel for"
    assert chosen() == ("transformers_auto_bf16", f"{why} NVFP4 W4A16 on CPUs")
    weights |= {"type": "int", "strategy": "group", "group_size": 32}
    for avx512, load_fn in ((True, "vllm_score"), (False, "transformers_auto_bf16")):
        monkeypatch.setattr(machine, "has_avx512", lambda avx512=avx512: avx512)
        assert chosen()[0] == load_fn
    assert chosen()[1] == f"{why} W4A16 on CPUs without AVX-512"
    monkeypatch.setattr(installed_vllm, "computes_on_cpu", lambda: False)
    assert chosen()[0] == "vllm_score"


def test_exl2_is_no_longer_measured(toy_model: Path, tmp_path: Path) -> None:
    """EXL2 is refused as an engine, by its alias, and as a folder's quantization, also for the
    engine ExLlamaV3.
    """
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "exl2"}}')
    for word in (f"{toy_model}@exllamav2", f"{toy_model}@exl2", str(tmp_path)):
        with pytest.raises(
            InputError,
            match=r"0\.3 does not measure EXL2; quantize to EXL3, or use compare_q 0\.2$",
        ):
            shorthand.model(word, set(), Progress(), reference=False)


def test_labels_and_engines_in_a_word(toy_model: Path, tmp_path: Path) -> None:
    (tmp_path / "a=b@hf").symlink_to(toy_model)
    for word, label, load_fn in (
        (f"{toy_model}@hf", toy_model.name, "transformers"),
        (f"mine={toy_model}@transformers_auto", "mine", "transformers_auto"),
        # A folder of that name.
        (f"{tmp_path}/a=b@hf@hf", "a=b@hf", "transformers"),
        # In an address, = ends no label and @ begins no engine.
        ("http://me@host:8000/v1?a=b", "me@host:8000", "vllm_server"),
        ("x=http://host", "x", "vllm_server"),
    ):
        named = shorthand.model(word, set(), Progress(), reference=False)
        assert (named.spec.name, named.spec.load_fn) == (label, load_fn), word


def test_options_of_one_model_in_a_word(
    toy_model: Path, compare_q: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Option values are JSON or plain words; the port of an address is not an option.  Windows are
    set by flags.
    """
    word = f"{toy_model}@vllm:kv_cache_dtype=fp8,max_model_len=128,enforce_eager=true"
    spec = shorthand.model(word, set(), Progress(), reference=False).spec
    assert spec.engine == {"kv_cache_dtype": "fp8", "max_model_len": 128, "enforce_eager": True}
    assert spec.name == f"{toy_model.name} kv_cache_dtype=fp8 max_model_len=128 enforce_eager=True"
    monkeypatch.chdir(toy_model.parent)
    for before, label in (("", f"{toy_model.name} noise_seed=2"), ("mine=", "mine")):
        named_spec = shorthand.model(
            f"{before}{toy_model.name}@hf:noise_seed=2", set(), Progress(), reference=False
        ).spec
        assert (named_spec.name, named_spec.model_dir) == (label, toy_model.name)
        assert named_spec.engine == {"dtype": "auto", "noise_seed": 2}
    plain = shorthand.model(f"a={toy_model}@vllm", set(), Progress(), reference=False).spec
    assert "engine" not in plain.model_fields_set
    (tmp_path / "t.txt").write_text("abc de " * 60)
    words = (
        "check",
        f"{toy_model}@hf",
        "-d",
        tmp_path / "t.txt",
        "--eval-len",
        64,
        "--eval-stride",
        32,
    )
    assert "windows of 64 every 32 tokens" in compare_q(*words).out
    for flag, value in (("--eval-len", 64), ("--sample", "spread")):
        assert_refused(
            compare_q("-d", "d.json", "-m", "m.json", flag, value), f"{flag}: is for models"
        )
    (tmp_path / "d.json").write_text("{}")
    assert_refused(
        compare_q(*words[:2], "-d", tmp_path / "d.json", "--eval-len", 64),
        "eval_len: is for a text without",
    )
    assert_refused(
        compare_q(*words[:2], "-d", "chat", "--sample", "spread"), "-d chat: sample: cannot go with"
    )
    assert_refused(
        compare_q(*words, "--sample", "last"), "--sample: 'last' is none of first, spread"
    )


def gguf_of(folder: Path, context: int) -> Path:
    """Write the header of a GGUF file without tensors."""
    writer = gguf.GGUFWriter(folder / "q8_0.gguf", "llama")
    writer.add_context_length(context)
    finish_gguf(writer, tensors=False)
    return folder / "q8_0.gguf"


def test_every_kind_of_model_takes_options(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, a GGUF file, a GGUF file of the hub and a server; test_pack.py has a pack.  The
    toy's context is 256.

    The value of an option may contain @ and commas.
    """
    monkeypatch.chdir(tmp_path)
    gguf_of(tmp_path, 512)
    for name, engine, options, context in (
        (str(toy_model), "hf", {"attn_implementation": "eager", "dtype": "float32"}, 256),
        ("q8_0.gguf", "llamacpp", {"n_threads": 1}, 512),
        ("q8_0.gguf", "gguf", {"type_k": "q8_0", "type_v": "q8_0"}, 512),
        ("owner/repo/q8_0.gguf", "llamacpp", {"n_threads": 1}, None),
        ("http://host:8000", "vllm_server", {"model": "a@b,c"}, None),
    ):
        words = ",".join(f"{key}={value}" for key, value in options.items())
        for before in ("", "mine="):
            named = shorthand.model(
                f"{before}{name}@{engine}:{words}", set(), Progress(), reference=False
            )
            assert named.spec.engine == options, name
            assert (named.spec.model_dir, named.context) == (name, context)
            assert named.spec.load_fn == backends.ENGINE_ALIASES.get(engine, engine)
    with pytest.raises(InputError, match=r"engine\.n_threads: is given twice"):
        shorthand.model(
            "q8_0.gguf@llamacpp:n_threads=1,n_threads=2", set(), Progress(), reference=False
        )


def test_one_line_runs_the_dtype_of_the_checkpoint(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spec with these load_fns runs in float16, as upstream does."""
    monkeypatch.setattr(backends, "GENERAL", ("transformers_auto",))
    for engine, options in (
        ("", {"dtype": "auto"}),
        ("@hf", {"dtype": "auto"}),
        ("@transformers_auto", {"dtype": "auto"}),
        ("@hf:dtype=float16", {"dtype": "float16"}),
        ("@transformers_auto_bf16", {}),
    ):
        spec = shorthand.model(f"{toy_model}{engine}", set(), Progress(), reference=False).spec
        assert spec.options == options, engine
    written = spec_files.parse_model_spec(in_transformers(toy_model), tmp_path / "models.json")
    assert written.options == {}


@needs_accelerate
def test_an_overflow_in_float16_is_named(
    compare_q: Run, toy_model: Path, long_text: Path, tmp_path: Path
) -> None:
    """Embeddings above 65,504: bfloat16 represents them, float16 does not."""
    embeddings = load_file(toy_model / "model.safetensors")["model.embed_tokens.weight"]
    big = changed(
        toy_model, tmp_path / "big", {}, **{"model.embed_tokens.weight": embeddings * 1e6}
    )
    ran = compare_q(
        f"{big}@hf", f"half={big}@hf:dtype=float16", "-d", long_text, "-r", 2, "--eval-len", 64
    )
    lines = ran.out.splitlines()
    (failure,) = [line for line in lines if line.startswith("half: failed")]
    assert "it ran in float16" in failure
    assert "bfloat16" in failure
    assert not any(line.startswith("big: failed") for line in lines)


def test_two_models_of_one_name_get_labels_of_their_own(
    toy_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = shorthand.models(
        [f"{toy_model}@hf", f"{toy_model}@transformers_auto"], set(), Progress(), reference=True
    )
    assert first.spec.name == toy_model.name
    assert first.spec.is_reference
    assert second.spec.name == f"{toy_model.name} (2)"
    assert not second.spec.is_reference
    assert "this one (transformers_auto " in capfd.readouterr().err


@needs_accelerate
def test_one_line_gives_a_table_and_specs_that_repeat_it(
    compare_q: Run,
    toy_model: Path,
    rounded: Path,
    long_text: Path,
    toy_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The printed command contains the environment variables that are part of the scores' key, and
    no others.

    The first text has 19 windows, the second one has 3.
    """
    # The space at the end needs quotes in the printed command.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8 ")
    line = [f"{toy_model}@transformers_auto", f"{rounded}@transformers_auto", "-d", long_text]
    ran = compare_q(*line, "-r", 16)
    assert ran.status == 0, ran.err
    assert f"{toy_model.name}: transformers_auto (as asked)" in ran.err
    # Windows of 256, the context of the toy.
    assert "spread over the text's 19" in ran.out
    assert "what all 19 windows of the text would give: PPL within " in ran.out
    specs = tmp_path / "specs"
    ran = compare_q(*line, toy_text, "--save-specs", specs, "-o", tmp_path / "first.json")
    repeat = f"compare-q -d {specs / 'data.json'} -m {specs / 'models.json'}"
    (command,) = [printed for printed in ran.err.splitlines() if printed.endswith(repeat)]
    variables = {}
    for assignment in shlex.split(command.removesuffix(repeat)):
        name, _, value = assignment.partition("=")
        variables[name] = value
    assert variables["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8 "
    assert not variables.keys() & {"PATH", "HOME", "COMPARE_Q_CACHE"}
    again = compare_q(*repeat.split()[1:], "-o", tmp_path / "again.json")
    assert again.status == 0, again.err
    # These specs may have been edited.
    refused = compare_q(*line, "--save-specs", specs)
    assert (refused.status, f"error: --save-specs: {specs / 'data.json'}: " in refused.err) == (
        2,
        True,
    )
    assert "loading" not in again.err
    numbers = []
    for name in ("first.json", "again.json"):
        results = json.loads((tmp_path / name).read_text())
        rows = [(row["ppl"], row["kld"], row["blocks"], row["slices"]) for row in results["models"]]
        numbers.append((results["data"]["windows_sha256"], rows))
    assert numbers[0] == numbers[1]


def test_saved_specs_repeat_every_choice_of_the_line(
    compare_q: Run, toy_model: Path, toy_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options of each model, paths from here, and windows that overlap: the keys and digests of the
    repeat are equal.

    The text has 1,000 tokens, so 30 windows of 64 every 32: the first five begin at 0, 32, 64, 96
    and 128.
    """
    monkeypatch.chdir(toy_model.parent)
    words = [
        f"ref={toy_model.name}@fake:vocab_size=500,boost=3.0",
        f"{toy_model.name}@fake:vocab_size=500,kernel=a b",
    ]
    data_of_sample = {}
    for which in ("first", "spread"):
        folder = tmp_path / which
        first_file = tmp_path / f"{which}1.json"
        second_file = tmp_path / f"{which}2.json"
        line = [
            "--eval-len",
            64,
            "--eval-stride",
            32,
            "--sample",
            which,
            "-r",
            5,
            "--save-specs",
            folder,
        ]
        line += ["-lf", "a store"]
        ran = compare_q(*words, "-d", toy_text, *line, "-o", first_file)
        (command,) = [printed for printed in ran.err.splitlines() if "compare-q -d" in printed]
        assert shlex.split(command)[-2:] == ["-lf", str(toy_model.parent / "a store")]
        again = compare_q(*shlex.split(command.partition("compare-q ")[2]), "-o", second_file)
        assert (ran.status, again.status) == (0, 0), again.err
        first = json.loads(first_file.read_text())
        second = json.loads(second_file.read_text())
        for results, from_cache in ((first, False), (second, True)):
            for model in results["models"]:
                assert model.pop("from_cache") == from_cache
            # The paths of the second are absolute.
            for text_or_model in (*results["data"]["texts"], *results["models"]):
                del text_or_model["spec"], text_or_model["spec_sha256"]
        for name in ("data", "reference", "models"):
            assert first[name] == second[name]
        assert [model["label"] for model in first["models"]] == [
            "ref",
            f"{toy_model.name} vocab_size=500 kernel=a b",
        ]
        data_of_sample[which] = first["data"]
    assert data_of_sample["first"]["windows_sha256"] != data_of_sample["spread"]["windows_sha256"]


def test_paths_of_a_given_data_spec_are_absolute_in_the_saved_one(tmp_path: Path) -> None:
    """They start next to the file that was given; names of the hub stay."""
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    common = {"tokenizer_dir": "owner/name", "eval_len": 64}
    for keys, saved in (
        ({"dataset": "text", "path": "a.jsonl", "eval_stride": 64}, {"path": "a.jsonl"}),
        ({"dataset": "org/data", "eval_stride": 64}, {}),
        (
            {"dataset": "json", "dataset_data_files": ["*.jsonl"], "eval_stride": 64},
            {"dataset_data_files": "*.jsonl"},
        ),
    ):
        spec = spec_files.parse_data_spec({**common, **keys}, tmp_path / "given.json")
        paths = {key: str(tmp_path / name) for key, name in saved.items()}
        paths |= {key: [paths[key]] for key in paths.keys() & {"dataset_data_files"}}
        assert shorthand.keys_of(spec, *shorthand.PATH_KEYS) == {**common, **keys, **paths}


def test_several_texts_are_called_as_the_user_calls_them(toy_model: Path, toy_text: Path) -> None:
    named = [shorthand.model(str(toy_model), set(), Progress(), reference=False)]
    data, _ = shorthand.texts(["wiki2", "chat", str(toy_text)], named)
    assert corpus.names_of(data) == ["wiki2", "chat", toy_text.stem]
    (alone,), _ = shorthand.texts(["wiki2"], named)
    assert alone.label is None


def test_what_is_named_wrongly_is_one_line(
    compare_q: Run, toy_model: Path, toy_text: Path, tmp_path: Path
) -> None:
    toy = f"{toy_model}@transformers_auto"
    text = {"tokenizer_dir": str(toy_model), "dataset": "text", "path": str(toy_text)}
    (tmp_path / "data.json").write_text(json.dumps({**text, "eval_len": 64, "eval_stride": 64}))
    (tmp_path / "wiki.test.raw").touch()
    (tmp_path / "models.json").write_text(json.dumps(in_transformers(toy_model)))
    for line, *parts in (
        (
            [tmp_path / "modles.json"],
            "modles.json: no such folder or file (did you mean '",
            "/models.json'?)",
        ),
        (
            [toy, "-d", tmp_path / "wiki.tset.raw"],
            "no such file (did you mean '",
            "/wiki.test.raw'?); a text is a file",
        ),
        (["localhost:8000"], "localhost:8000: ", "http://"),
        (["http://[::1"], "http://[::1: not an address"),
        ([toy, "https://[x/v1"], "https://[x/v1: not an address"),
        (["https://huggingface.co/a/b/tree/main"], "tree/main: ", "name the model as a/b"),
        ([toy, "-d", "https://a.org/b.txt"], "-d: https:/a.org/b.txt: ", "download"),
        ([toy, "-d", tmp_path / "data.json", "--eval-len", "32"], "eval_len: ", "data.json"),
        (["absent"], "absent: no such folder or file; a model on the hub is named owner/name"),
        ([f"{toy_model}@vlm"], "unknown engine 'vlm' (did you mean 'vllm'?)"),
        (
            [toy_text],
            "text.txt: is a file, and no model that an engine reads: name a folder, a .gguf file, "
            "a hub id",
        ),
        (
            ["-d", "wiki2", "-m", "x.json"],
            "wiki2: no such file; with -m, -d takes data specs (JSON)",
        ),
        (
            ["-d", tmp_path / "data.json", "-m", toy_model],
            "toy-llama: cannot be read: ",
            "-m takes model specs (JSON)",
        ),
        (
            ["-d", tmp_path / "models.json", "-m", "data.json"],
            "models.json: ",
            "model specs, which -m takes",
        ),
        (["-d", toy_text, "-m", "x.json", "--save-specs", tmp_path], "--save-specs: "),
        ([toy, "-d", "lm_eval:arc_easy"], "-d: lm_eval:arc_easy: ", "compare-q flips"),
    ):
        assert_refused(compare_q(*line), *parts)


@pytest.mark.parametrize(
    ("first_line", "named"),
    [
        ('{"compare_q": "skores", "version": 1}', "'skores'"),
        ('{"compare_q": "windows", "version": 1}', "docs/other_engines.md"),
        ('{"text": "a"}', '{"compare_q": "rollouts", ...}'),
    ],
)
def test_a_file_of_another_kind_is_refused(first_line: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f"{first_line}\n", encoding="utf-8")
    with pytest.raises(InputError) as refused:
        shorthand.model(str(file), set(), Progress(), reference=False)
    assert named in str(refused.value)
    assert ("holds what an engine is to score" in str(refused.value)) == ("windows" in first_line)


def test_a_mistyped_folder_is_not_taken_for_an_unreachable_hub(
    compare_q: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "models" / "qwen-w4a16").mkdir(parents=True)
    line = compare_q("models/qwen-w4a61").err.splitlines()[-1]
    assert line.startswith(
        "error: models/qwen-w4a61: no such folder or file (did you mean 'models/qwen-w4a16'?)"
    )
    (tmp_path / "qwen3.png").touch()
    # A picture is no model.
    assert "did you mean" not in compare_q("qwen3").err
