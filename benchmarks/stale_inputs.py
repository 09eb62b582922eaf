"""Inputs that ``benchmarks/stale_hits.py`` changes: all inputs of a run, and one change each."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

LENGTH = 64
LETTERS = 400
TEMPLATE = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
PLUGIN = """\
def start():
    import torch
    silu = torch.nn.functional.silu
    torch.nn.functional.silu = lambda x, inplace=False: silu(x) * 1.01
"""
CODE = """\
from transformers import LlamaForCausalLM
from .scaling import SCALE
class Toy(LlamaForCausalLM):
    def forward(self, *given, **keys):
        found = super().forward(*given, **keys)
        found.logits = found.logits * SCALE
        return found
"""


@dataclass
class Place:
    """Inputs of a run: the files below ``folder``, its specs and environment.

    ``prefix``: words before the command; ``in_new_process``: True if the run needs its own process.
    """

    folder: Path
    data: dict[str, Any]
    models: list[dict[str, Any]]
    environment: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    in_new_process: bool = False


Change = Callable[[Place], None]
Base = Callable[[Path], Place]


@dataclass(frozen=True)
class Case:
    """One input and how it is changed."""

    kind: str
    name: str
    change: Change
    base: Base
    in_new_process: bool = False


@cache
def toy_models() -> Path:
    """Make a folder with two toys of one shape and other weights, and a third in two shards."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.shapes import write_tokenizer

    folder = Path(mkdtemp())
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        dtype="bfloat16",
        bos_token_id=256,
        eos_token_id=256,
        initializer_range=0.1,
    )
    for seed, name in enumerate(("model", "other")):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).bfloat16()
        model.save_pretrained(folder / name)
        write_tokenizer(folder / name)
    model.save_pretrained(folder / "shards", max_shard_size="400KB")
    return folder


def plain(folder: Path, load_fn: str = "transformers", **engine: Any) -> Place:
    """Return a text, a reference and a model in separate folders.

    File dates are the same as in any other ``Place``.
    """
    for name in ("model", "reference"):
        shutil.copytree(toy_models() / "model", folder / name)
    letters = random.Random(0).choices("abcdefgh \n", k=LETTERS)
    write(folder / "text.txt", "".join(letters))
    data = {
        "tokenizer_dir": str(folder / "model"),
        "dataset": "text",
        "path": str(folder / "text.txt"),
    }
    models: list[dict[str, Any]] = []
    for name in ("reference", "model"):
        spec = {
            "load_fn": load_fn,
            "model_dir": str(folder / name),
            "label": name,
            "engine": {"dtype": "float32", **engine},
        }
        models.append(spec)
    models[0]["reference"] = True
    return Place(folder, {**data, "eval_len": LENGTH, "eval_stride": LENGTH}, models)


def sharded(folder: Path, **keys: Any) -> Place:
    """Return the plain place with a model in shards."""
    place = plain(folder, **keys)
    (folder / "model" / "model.safetensors").unlink()
    for file in (toy_models() / "shards").glob("model*"):
        shutil.copy2(file, folder / "model")
    return place


def with_code(folder: Path) -> Place:
    """Return the plain place with a model that brings its own code, which imports another file."""
    place = plain(folder, trust_remote_code=True)
    write(folder / "model" / "toy.py", CODE)
    write(folder / "model" / "scaling.py", "SCALE = 1.0\n")
    set_keys("model/config.json", auto_map={"AutoModelForCausalLM": "toy.Toy"})(place)
    age(folder / "model" / "config.json")
    return place


def talk(answer: str) -> str:
    """Return a line of a file of conversations."""
    messages = [
        {"role": "user", "content": "what?"},
        {"role": "assistant", "content": answer},
    ]
    return json.dumps({"messages": messages}) + "\n"


def prefixed(folder: Path) -> Place:
    """Return the plain place with a chat before each window, by the template of ``chat``."""
    place = chat(folder)
    place.data = {
        **plain(folder / "plain").data,
        "tokenizer_dir": place.data["tokenizer_dir"],
        "chat_template": True,
    }
    return place


def rows(folder: Path) -> Place:
    """Return the plain place with a local data set of three files; the second is the test split."""
    place = plain(folder)
    for name, letter in (("a", "a"), ("test", "bc"), ("train", "cdd")):
        lines = [json.dumps({"text": 100 * letter, "other": 100 * (letter + "e")})] * 2
        write(folder / "rows" / f"{name}.jsonl", "\n".join(lines) + "\n")
    del place.data["path"], place.data["dataset"]
    place.data |= {"dataset": str(folder / "rows"), "split": "test"}
    return place


def chat(folder: Path) -> Place:
    """Return the plain place with conversations, and a template that prints a date."""
    place = plain(folder)
    write(folder / "talks.jsonl", 4 * talk("that and this"))
    template = "{{ strftime_now('%M%S') }}" + TEMPLATE
    set_keys("model/tokenizer_config.json", chat_template=template)(place)
    age(folder / "model" / "tokenizer_config.json")
    place.data = {
        "tokenizer_dir": str(folder / "model"),
        "dataset": "chat",
        "path": str(folder / "talks.jsonl"),
        "eval_len": LENGTH,
    }
    return place


def in_vllm(folder: Path) -> Place:
    """Return the plain place in vLLM."""
    return plain(folder, "vllm_score")


def shards_in_vllm(folder: Path) -> Place:
    """Return the sharded model in vLLM."""
    return sharded(folder, load_fn="vllm_score")


def in_llama_cpp(folder: Path) -> Place:
    """Return the plain place with GGUF models in llama.cpp."""
    place = plain(folder, "llamacpp")
    for model in place.models:
        file = folder / f"{model['label']}.gguf"
        write_gguf(folder / model["label"], file)
        age(file)
        model |= {"model_dir": str(file), "engine": {}}
    return place


def write_gguf(model: Path, file: Path, **keys: Any) -> Path:
    """Write a toy as a float32 GGUF without a tokenizer; ``keys`` replace those of its config."""
    import gguf

    from demo.gguf_writer import add_shape, gguf_tensors

    config = json.loads((model / "config.json").read_text(encoding="utf-8")) | keys
    writer = gguf.GGUFWriter(file, "llama")
    add_shape(writer, config)
    writer.add_tokenizer_model("none")
    for name, weight in gguf_tensors(model, config):
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write(file: Path, text: str) -> None:
    """Write a file that is as old as others of its kind."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8", newline="")
    age(file)


def age(file: Path) -> None:
    """Set a file's date to 2001, so that two places have equal dates."""
    os.utime(file, (1e9, 1e9))


def all_of(*changes: Change) -> Change:
    """Return several changes as one."""

    def change(place: Place) -> None:
        for part in changes:
            part(place)

    return change


def set_keys(name: str, **keys: Any) -> Change:
    """Set keys of a JSON file."""

    def change(place: Place) -> None:
        file = place.folder / name
        content: dict[str, Any] = {}
        if file.exists():
            content = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(content | keys), encoding="utf-8")

    return change


def put(name: str, text: str) -> Change:
    """Write a file with this text."""

    def change(place: Place) -> None:
        (place.folder / name).parent.mkdir(exist_ok=True)
        (place.folder / name).write_text(text, encoding="utf-8", newline="")

    return change


def copied(source: str, name: str, *, keeps_time: bool = False) -> Change:
    """Copy a file of another model; ``keeps_time``: with the date of the file that it replaces."""

    def change(place: Place) -> None:
        file = place.folder / name
        if not keeps_time:
            shutil.copy(toy_models() / source, file)
            return
        times = file.stat()
        shutil.copy(toy_models() / source, file)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    return change


def flipped(name: str) -> Change:
    """Flip one bit of the last weight in a file, which keeps its size."""

    def change(place: Place) -> None:
        content = bytearray((place.folder / name).read_bytes())
        content[-1] ^= 2
        (place.folder / name).write_bytes(content)

    return change


def renamed(*pairs: tuple[str, str]) -> Change:
    """Rename files, in this order."""

    def change(place: Place) -> None:
        for old, new in pairs:
            (place.folder / old).rename(place.folder / new)

    return change


def model(label: str = "model", **keys: Any) -> Change:
    """Set keys of a model's spec."""

    def change(place: Place) -> None:
        spec_of(place, label).update(keys)

    return change


def option(label: str = "model", **keys: Any) -> Change:
    """Set options of a model's engine."""

    def change(place: Place) -> None:
        spec_of(place, label)["engine"].update(keys)

    return change


def spec_of(place: Place, label: str) -> dict[str, Any]:
    """Return the spec of the model with this label."""
    return next(spec for spec in place.models if spec["label"] == label)


def data(**keys: Any) -> Change:
    """Set keys of the data spec; ``...`` removes one, and a path is below the place's folder."""

    def change(place: Place) -> None:
        for name, value in keys.items():
            if value is ...:
                place.data.pop(name, None)
            elif name in ("path", "tokenizer_dir"):
                place.data[name] = str(place.folder / value)
            else:
                place.data[name] = value

    return change


def variable(name: str, value: str) -> Change:
    """Set a variable of the environment."""

    def change(place: Place) -> None:
        place.environment[name] = value

    return change


def package(name: str, group: str = "") -> Change:
    """Install a distribution with an entry point of this group; its code changes torch's SiLU."""

    def change(place: Place) -> None:
        site = place.folder / "site"
        info = site / f"{name}-99.dist-info"
        entry_points = ""
        if group:
            entry_points = f"[{group}]\ntoy = toy_plugin:start\n"
        write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 99\n")
        write(info / "entry_points.txt", entry_points)
        write(site / "toy_plugin.py", PLUGIN)
        paths = [str(site)]
        if os.environ.get("PYTHONPATH"):
            paths.append(os.environ["PYTHONPATH"])
        place.environment["PYTHONPATH"] = os.pathsep.join(paths)

    return change


def on_one_core(place: Place) -> None:
    """Bind the run to one core."""
    place.prefix = ("taskset", "-c", str(min(os.sched_getaffinity(0))))


VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
    "MKL_CBWR": "COMPATIBLE",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-AVX512F,-FMA",
    "NVIDIA_TF32_OVERRIDE": "0",
    "NOTHING": "1",
}


def weights(base: Base, folder: str, file: str) -> Iterator[Case]:
    """Yield cases of other weights in a file, which keeps its size and header."""
    file_of_reference = file.replace("model", "reference", 1)
    yield Case("file", f"{folder}: one bit", flipped(file), base)
    yield Case("file", f"{folder}: one bit of the reference", flipped(file_of_reference), base)


def cases_of(kind: str, changes: dict[str, Change], base: Base) -> Iterator[Case]:
    """Yield a case for each change, by its name."""
    for name, change in changes.items():
        yield Case(kind, name, change, base)


def of_folders(base: Base, in_shards: Base) -> Iterator[Case]:
    """Yield the cases of a folder of safetensors."""
    single = "model/model.safetensors"
    index = "model/model.safetensors.index.json"
    yield from weights(base, "one file", single)
    files: dict[str, Change] = {
        "other weights": copied("other/model.safetensors", single),
        "other weights, of the same time": copied(
            "other/model.safetensors", single, keeps_time=True
        ),
        "config.json": set_keys("model/config.json", rms_norm_eps=1e-3),
        "config.json, of the reference": set_keys("reference/config.json", rms_norm_eps=1e-3),
        "generation_config.json": set_keys("model/generation_config.json", suppress_tokens=[5]),
        "an index of other files": set_keys(
            index, metadata={}, weight_map={"lm_head.weight": "x.safetensors"}
        ),
        "an adapter": set_keys("model/adapter_config.json", peft_type="LORA"),
        "transformers_weights": set_keys("model/config.json", transformers_weights="x.safetensors"),
        "a second set of weights": copied("other/model.safetensors", "model/second.safetensors"),
    }
    yield from cases_of("file", files, base)
    first = next(file.name for file in sorted((toy_models() / "shards").glob("*.safetensors")))
    yield Case("file", "a shard: one bit", flipped(f"model/{first}"), in_shards)
    yield Case("file", "the index", set_keys(index, metadata={"dtype": "float16"}), in_shards)
    yield Case(
        "file", "one file beside shards", copied("other/model.safetensors", single), in_shards
    )


def of_texts() -> Iterator[Case]:
    """Yield the cases of the text, how it is cut, its splits and templates."""
    texts: dict[str, Change] = {
        "other letters": put("text.txt", "abcdefgh" * (LETTERS // 8)),
        "one letter": put("text.txt", "h" + (LETTERS - 1) * "a"),
        "another name": all_of(renamed(("text.txt", "b.txt")), data(path="b.txt")),
        "eval_len": data(eval_len=32),
        "eval_stride": data(eval_stride=32),
        "max_rows": data(max_rows=2),
        "warmup_tokens": data(warmup_tokens=8),
        "method llamacpp": data(method="llamacpp", eval_stride=...),
        "method once": data(method="once", eval_stride=32),
        "method gptq": data(method="gptq", eval_stride=...),
        "tokenizer.json": swap_letters,
    }
    yield from cases_of("text", texts, plain)
    splits: dict[str, Change] = {
        "files change names": renamed(
            ("rows/test.jsonl", "rows/b.jsonl"), ("rows/train.jsonl", "rows/test.jsonl")
        ),
        "two files change places": renamed(
            ("rows/test.jsonl", "rows/x"),
            ("rows/train.jsonl", "rows/test.jsonl"),
            ("rows/x", "rows/train.jsonl"),
        ),
        "another split": data(split="train"),
        "a slice": data(split="test[:1]"),
        "a column": data(text_column="other"),
        "max_text_rows": data(max_text_rows=1),
        "a file": put("rows/test.jsonl", json.dumps({"text": 300 * "f"})),
    }
    yield from cases_of("split", splits, rows)
    config = "model/tokenizer_config.json"
    templates: dict[str, Change] = {
        "the time of day": all_of(),
        "the template": set_keys(config, chat_template=TEMPLATE.replace("<", "[")),
        "chat_template.jinja": put("model/chat_template.jinja", TEMPLATE.replace(">", "]")),
        "a variable": all_of(
            set_keys(config, chat_template="{{ x }}" + TEMPLATE),
            data(chat_template_kwargs={"x": "y"}),
        ),
        "score_roles": data(score_roles=["user"]),
        "a conversation": put("talks.jsonl", talk("other words")),
    }
    yield from cases_of("template", templates, chat)
    for name in ("the time of day", "the template"):
        yield Case("template", f"{name}, in a chat prefix", templates[name], prefixed)


def swap_letters(place: Place) -> None:
    """Exchange the tokens of two characters, in both models."""
    for file in place.folder.glob("*/tokenizer.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        ids = content["model"]["vocab"]
        id_of_a = ids["a"]
        ids["a"] = ids["b"]
        ids["b"] = id_of_a
        file.write_text(json.dumps(content), encoding="utf-8")


def transformers() -> Iterator[Case]:
    """Yield all cases in Transformers."""
    yield from of_folders(plain, sharded)
    yield Case(
        "file",
        "code",
        put("model/toy.py", CODE.replace("* SCALE", "* 0.5")),
        with_code,
        in_new_process=True,
    )
    yield Case(
        "file",
        "code that code imports",
        put("model/scaling.py", "SCALE = 0.5\n"),
        with_code,
        in_new_process=True,
    )
    options: dict[str, Change] = {
        "dtype": option(dtype="bfloat16"),
        "dtype of the reference": option("reference", dtype="bfloat16"),
        "attn_implementation": option(attn_implementation="eager"),
        "streaming": option(streaming=True),
        "load_fn": model(load_fn="transformers_auto"),
        "noise": all_of(model(noise_floor=True), option(noise="bf16")),
        "a repository of the hub": option(attn_implementation="owner/name"),
    }
    yield from cases_of("option", options, plain)
    yield from of_texts()
    for name in ("peft", "kernels", "colours"):
        yield Case("package", name, package(name), plain, in_new_process=True)
    yield Case(
        "package",
        "a plugin of torch",
        package("toy_plugin", "torch.backends"),
        plain,
        in_new_process=True,
    )
    for name, value in VARIABLES.items():
        yield Case("variable", name, variable(name, value), plain, in_new_process=True)
    yield Case("variable", "one core", on_one_core, plain, in_new_process=True)


def vllm() -> Iterator[Case]:
    """Yield the cases of vLLM: its files, options, packages and variables."""
    for case in of_folders(in_vllm, shards_in_vllm):
        yield replace(case, in_new_process=True)
    options: dict[str, Change] = {
        "dtype": option(dtype="bfloat16"),
        "max_model_len": option(max_model_len=128),
        "hf_overrides": option(hf_overrides={"rms_norm_eps": 1e-3}),
        "hf_overrides to longrope": option(
            hf_overrides={"rope_parameters": {"rope_type": "longrope"}}
        ),
    }
    for case in cases_of("option", options, in_vllm):
        yield replace(case, in_new_process=True)
    yield Case(
        "package",
        "a plugin",
        package("toy_plugin", "vllm.general_plugins"),
        in_vllm,
        in_new_process=True,
    )
    for name in ("OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "NOTHING"):
        yield Case("variable", name, variable(name, VARIABLES[name]), in_vllm, in_new_process=True)
    yield Case(
        "variable",
        "VLLM_CPU_SGL_KERNEL",
        variable("VLLM_CPU_SGL_KERNEL", "1"),
        in_vllm,
        in_new_process=True,
    )


def llama_cpp() -> Iterator[Case]:
    """Yield the cases of llama.cpp: its file, options, packages and variables."""
    yield from weights(in_llama_cpp, "GGUF", "model.gguf")

    def another_field(place: Place) -> None:
        write_gguf(place.folder / "model", place.folder / "model.gguf", rms_norm_eps=1e-3)

    yield Case("file", "a field", another_field, in_llama_cpp)
    options: dict[str, Change] = {
        "type_k": option(type_k="f32"),
        "flash_attn": option(flash_attn=False),
        "n_threads": option(n_threads=1),
        "n_ubatch": option(n_ubatch=32),
        "use_extra_bufts": option(use_extra_bufts=False),
    }
    yield from cases_of("option", options, in_llama_cpp)
    for name in ("GGML_TOY", "OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "NOTHING"):
        yield Case(
            "variable",
            name,
            variable(name, VARIABLES.get(name, "1")),
            in_llama_cpp,
            in_new_process=True,
        )


ENGINES = {"Transformers": transformers, "vLLM": vllm, "llama.cpp": llama_cpp}
