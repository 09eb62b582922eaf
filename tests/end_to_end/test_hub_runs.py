"""The command line with hub ids: the real clients and an engine with a stand-in hub
(tests/support/hub.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import hub_layouts
from tests.support.hub import Client, Hub
from tests.support.toy import Run, save_toy_tokenizer, swap_letters

RUN = """
import contextlib, io
from compare_q.eval.cli import main as cli
with contextlib.redirect_stdout(io.StringIO()) as printed:
    status = cli.main({words!r})
"""
COMMAND = RUN + "value = status\n"
PRINTED = RUN + "value = printed.getvalue()\n"
CLIENTS_BARS = ("it/s", "B/s]", "Downloading", "Reconstruct", "Fetching", "examples", "Generating")
TEXT = {"dataset": "wiki2", "eval_len": 20, "eval_stride": 20}
WHY = "not on the hub, or private; check the name, or sign in (`hf auth login` or HF_TOKEN)"


@pytest.fixture(scope="module")
def server(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """The data sets, and the toy model in two shards as org/toy, under an old name, and gated."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("sharded")
    AutoModelForCausalLM.from_pretrained(toy_model, dtype="bfloat16").save_pretrained(
        folder, max_shard_size="150kB"
    )
    files = {}
    for file in (*toy_model.iterdir(), *folder.iterdir()):
        if file.name != "model.safetensors":
            files[file.name] = file.read_bytes()
    with Hub() as running:
        hub_layouts.add_wikitext(running)
        running.add("models", "org/toy", {**files, "pytorch_model.bin": b"pickled"}, "v1")
        running.add("models", "org/gated", files)
        running.gated["org/gated"] = 401
        running.add("models", "org/new", files)
        running.renamed["models", "org/old"] = "org/new"
        yield running


def specs(folder: Path, models: list[tuple[str, str]], **data: Any) -> list[str]:
    """Return the arguments of a command line with models of the hub."""
    text = {"tokenizer_dir": "org/toy", "tokenizer_revision": "v1", **TEXT}
    (folder / "data.json").write_text(json.dumps({**text, **data}))
    specs_of_models = []
    for label, name in models:
        spec = {"load_fn": "transformers_auto_bf16", "label": label, "model_dir": name}
        if name == "org/toy":
            spec["revision"] = "v1"
        specs_of_models.append(spec)
    (folder / "models.json").write_text(json.dumps(specs_of_models))
    words = [
        "-d",
        folder / "data.json",
        "-m",
        folder / "models.json",
        "-o",
        folder / "results.json",
    ]
    return [str(word) for word in words]


@pytest.mark.engine
def test_a_run_with_hub_ids(server: Hub, tmp_path: Path) -> None:
    """One table with a sharded, a renamed, a gated and a missing model; then again from the caches,
    without the hub.
    """
    models = [
        ("toy", "org/toy"),
        ("renamed", "org/old"),
        ("gated", "org/gated"),
        ("missing", "org/none"),
    ]
    words = specs(tmp_path, models)
    home = tmp_path / "home"
    cache = str(tmp_path / "cache")
    with Client(server, home, terminal=True, COMPARE_Q_CACHE=cache) as client:
        status = client.run(COMMAND.format(words=words))
        drawn = client.said.read_text()
        names = server.repos["models", "org/toy"].files("v1") or ()
        head_requests = [request.path for request in server.asked("/org/toy/", "HEAD")]
        requested_paths = " ".join(request.path for request in server.requests)
    assert status == 1
    n_shards = sum(name.endswith(".safetensors") for name in names)
    assert n_shards > 1
    assert sum(path.endswith(".safetensors") for path in head_requests) == n_shards
    assert "pytorch_model.bin" not in requested_paths
    results = json.loads((tmp_path / "results.json").read_text())
    rows = {row["label"]: row for row in results["models"]}
    assert rows["renamed"]["ppl"] == rows["toy"]["ppl"] > 1
    assert rows["gated"]["error"].startswith("org/gated: gated on the hub: accept its licence at ")
    assert rows["missing"]["error"] == f"org/none: {WHY}"
    assert "org/old: is org/new on the hub now" in drawn
    assert "kB to download" in drawn
    assert "fetching org/toy: " in drawn
    assert not [word for word in CLIENTS_BARS if word in drawn]
    other = tmp_path / "other"
    other.mkdir()
    save_toy_tokenizer(other)
    swap_letters(other)
    (tmp_path / "other.json").write_text(json.dumps({"tokenizer_dir": str(other), **TEXT}))
    words = specs(tmp_path, models[:1])
    words.insert(2, str(tmp_path / "other.json"))
    before = (tmp_path / "results.json").read_text()
    with Client(server, home, COMPARE_Q_CACHE=cache) as client:
        assert client.run(COMMAND.format(words=words)) == 2
        lines = client.said.read_text().splitlines()
        (refused,) = [line for line in lines if "tokenizer_dir: " in line]
        del words[1]  # only the text with the other tokenizer
        assert client.run(COMMAND.format(words=words)) == 2
        last = client.said.read_text().splitlines()[-1]
    assert "its tokenizer is not the one of" in refused
    assert "tokenizer_dir: is not this model's tokenizer" in last
    assert (tmp_path / "results.json").read_text() == before
    words = specs(tmp_path, models[:1])
    with Client(server, home, COMPARE_Q_CACHE=cache, HF_ENDPOINT="http://127.0.0.1:1") as away:
        assert away.run(COMMAND.format(words=words)) == 0
        assert "fetching" not in away.said.read_text()  # nothing was left to fetch
        words = specs(tmp_path, models[:1], tokenizer_dir="org/never")
        assert away.run(COMMAND.format(words=words)) == 2
        text = away.said.read_text().splitlines()[-1]
    assert (
        "json: org/never: not in the local cache, and http://127.0.0.1:1 cannot be reached ("
        in text
    )


@pytest.mark.engine
def test_a_check_names_what_a_run_would_download(server: Hub, tmp_path: Path) -> None:
    """The tokenizer, the text and the model of the hub, with their sizes; nothing is downloaded."""
    words = ["check", *specs(tmp_path, [("toy", "org/toy")])[:-2]]
    with Client(server, tmp_path / "home", COMPARE_Q_CACHE=str(tmp_path / "cache")) as client:
        lines = client.run(PRINTED.format(words=words)).splitlines()
    for part in ("the tokenizer of org/toy, ", "data: Salesforce/wikitext, ", "toy: transformers "):
        (line,) = [line for line in lines if part in line]
        assert re.search(r" \S*\d \w+ to download$", line)
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("tokenizer.json"))


@pytest.mark.engine
def test_a_reference_pack_of_the_hub(
    server: Hub, toy_model: Path, compare_q: Run, tmp_path: Path
) -> None:
    """A pack's id: downloaded once, then from the cache without the hub; with a revision; and a
    missing repository.
    """
    pack = tmp_path / "toy.pack"
    home = tmp_path / "home"
    (tmp_path / "text.txt").write_text("abc de\n" * 60)
    data = {
        "dataset": "text",
        "path": "text.txt",
        "tokenizer_dir": str(toy_model),
        "eval_len": 20,
        "eval_stride": 20,
    }
    (tmp_path / "d.json").write_text(json.dumps(data))
    model = {"load_fn": "transformers_auto_bf16", "model_dir": str(toy_model)}
    (tmp_path / "m.json").write_text(json.dumps(model))
    words = [
        "pack",
        "-d",
        tmp_path / "d.json",
        "-m",
        tmp_path / "m.json",
        "-r",
        "3",
        "-o",
        pack,
        "--no-floor",
    ]
    results = tmp_path / "results.json"
    recorded_pack = compare_q(*words)
    assert recorded_pack.status == 0, recorded_pack.err
    files = {}
    for file in pack.rglob("*"):
        if file.is_file():
            files[file.relative_to(pack).as_posix()] = file.read_bytes()
    server.add("datasets", "org/toy-pack", files, "v1")
    server.add("datasets", "org/toy-pack", {"README.md": "emptied"})
    other = str(tmp_path / "other cache")
    named = [
        {
            "load_fn": "pack",
            "model_dir": "org/toy-pack",
            "revision": "v1",
            "label": "ref",
            "reference": True,
        },
        {**model, "label": "toy"},
    ]
    (tmp_path / "m.json").write_text(json.dumps(named))
    (tmp_path / "d.json").write_text(json.dumps({"pack": "org/toy-pack", "revision": "v1"}))
    run = ["-d", str(tmp_path / "d.json"), "-m", str(tmp_path / "m.json"), "-o", str(results)]
    with Client(server, home, COMPARE_Q_CACHE=other) as client:
        assert client.run(COMMAND.format(words=run)) == 0, client.said.read_text()
        head_requests = [request.path for request in server.asked("/org/toy-pack/", "HEAD")]
        rows = {row["label"]: row for row in json.loads(results.read_text())["models"]}
        server.add("datasets", "org/toy-pack", files)
        words = ["org/toy-pack", f"{toy_model}@transformers", "-o", str(results)]
        assert client.run(COMMAND.format(words=words)) == 0
        assert client.run(COMMAND.format(words=["org/none", str(toy_model)])) == 2
        assert f"error: org/none: {WHY}" in client.said.read_text()
    recorded = [name for name in files if name.startswith("states/row.")]
    assert len(recorded) == 3  # windows
    for name in recorded:
        assert any(path.endswith(name) for path in head_requests)
    assert rows["toy"]["kld"] == 0
    assert rows["toy"]["ppl"] == pytest.approx(rows["ref"]["ppl"], rel=1e-6)
    with Client(server, home, COMPARE_Q_CACHE=other, HF_ENDPOINT="http://127.0.0.1:1") as away:
        assert away.run(COMMAND.format(words=run)) == 0, away.said.read_text()
