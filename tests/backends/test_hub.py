"""Models and tokenizers by hub id: the real ``huggingface_hub``, and a stand-in for the hub."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends import hub
from tests.support.hub import Client, Hub

pytestmark = pytest.mark.engine

SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
WEIGHTS = [bytes([i]) * 3_000_000 for i in (1, 2)]
SMALL = ["config.json", "model.safetensors.index.json", "tokenizer.json"]
MODEL: dict[str, bytes | str] = {
    "config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}),
    "tokenizer.json": "{}",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}),
    SHARDS[0]: WEIGHTS[0],
    SHARDS[1]: WEIGHTS[1],
    "pytorch_model.bin": b"pickled",
    "consolidated.00.pth": b"pickled",
    "README.md": "# A model",
}
FETCH = """
watch = Watch()
folder = hub.resolve({name!r}, {revision!r}, tokenizer_only={tokenizer_only}, watch=watch)
value = [str(folder), watch.total, watch.done, watch.said]
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with Hub() as running:
        yield running


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def client(server: Hub, home: Path) -> Iterator[Client]:
    with Client(server, home) as process:
        yield process


def fetch(
    client: Client, name: str, revision: str | None = None, *, tokenizer_only: bool = False
) -> list[Any]:
    """Return [folder, expected bytes, received bytes, progress messages]."""
    code = FETCH.format(name=name, revision=revision, tokenizer_only=tokenizer_only)
    outcome = client.run(code)
    assert isinstance(outcome, list)
    return outcome


def refused(client: Client, name: str, revision: str | None = None) -> str:
    return client.refusal(FETCH.format(name=name, revision=revision, tokenizer_only=False))


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("org/model", "Org-1/Llama-3.1_8B"):
        assert hub.is_hub_id(name)
    for name in ("here/model", "./org/model", "~/model", "a/b/c", "model", "o/m y"):
        assert not hub.is_hub_id(name)


def test_a_sharded_model(server: Hub, client: Client) -> None:
    """Safetensors and metadata are downloaded once, no pickled weights; the tokenizer first."""
    server.add("models", "org/sharded", MODEL)
    assert client.run("value = hub.would_fetch('org/sharded')") == "6.0 MB to download"
    assert server.fetched() == []
    folder, total, done, _ = fetch(client, "org/sharded", tokenizer_only=True)
    assert server.fetched() == SMALL
    assert total == done == sum(len(MODEL[name]) for name in SMALL)
    assert fetch(client, "org/sharded") == [
        folder,
        6_000_000,
        6_000_000,
        ["org/sharded: 6.0 MB to download"],
    ]
    heads = server.asked("/resolve/", "HEAD")
    assert sorted(request.path.rpartition("/")[2] for request in heads) == SHARDS
    assert len(server.asked("/lfs/")) == 2
    assert [(Path(folder) / name).read_bytes() for name in SHARDS] == WEIGHTS
    assert sorted(file.name for file in Path(folder).iterdir()) == sorted([*SMALL, *SHARDS])
    assert fetch(client, "org/sharded") == [folder, 0, 0, []]
    assert not server.asked("/lfs/")
    assert client.run("value = hub.would_fetch('org/sharded')") == "in the local cache"
    assert client.said.read_text() == ""


ONE = {"config.json": "{}", "tokenizer.json": "{}"}
TWO_COPIES = {
    **MODEL,
    "consolidated.safetensors": WEIGHTS[0] * 2,
    "onnx/model.safetensors": WEIGHTS[1],
    "onnx/a.json": "{}",
}


@pytest.mark.parametrize(
    ("files", "gold"),
    [
        (TWO_COPIES, SHARDS),
        (
            {**ONE, "model.safetensors": b"a", "consolidated.safetensors": b"b"},
            ["model.safetensors"],
        ),
        (
            {**ONE, "consolidated-00001-of-00001.safetensors": b"a", "x/b.safetensors": b"b"},
            ["consolidated-00001-of-00001.safetensors"],
        ),
        (
            {**ONE, "weights.safetensors": b"a", "fp16/weights.safetensors": b"b"},
            ["weights.safetensors"],
        ),
        (
            {
                **MODEL,
                "model.safetensors.index.json": json.dumps(
                    {"weight_map": {"a": SHARDS[0], "b": "mtp.safetensors"}}
                ),
                "mtp.safetensors": b"a",
            },
            [SHARDS[0], "mtp.safetensors"],
        ),
    ],
)
def test_one_copy_of_the_weights(
    files: dict[str, bytes | str], gold: list[str], server: Hub, client: Client, home: Path
) -> None:
    """Of Mistral's repositories, half of the bytes are fetched; the model is then complete."""
    name = f"org/copies-{len(server.repos)}"
    server.add("models", name, files)
    folder, total, _, _ = fetch(client, name)
    assert sorted(file.name for file in Path(folder).rglob("*.safetensors")) == sorted(gold)
    n_bytes = sum(len(files[file]) for file in gold)
    for file, content in files.items():
        # The index was fetched before the weights that it names.
        if file.endswith(".json") and not file.endswith("index.json"):
            n_bytes += len(content)
    assert total == n_bytes
    assert client.run(f"value = hub.would_fetch({name!r})") == "in the local cache"
    assert client.run(f"value = str(hub.resolve({name!r}, None, download=False))") == folder
    next(Path(folder).rglob(gold[0])).unlink()
    said = client.refusal(f"hub.resolve({name!r}, None, download=False)")
    assert said == f"{name}: only partly in the local cache"


def test_a_cut_download_goes_on_where_it_was(server: Hub, client: Client) -> None:
    weights = bytes([7]) * 25_000_000
    server.add("models", "org/cut", {**MODEL, SHARDS[0]: weights})
    server.cut_once(weights, 15_000_000)
    folder, total, done, said = fetch(client, "org/cut")
    assert (Path(folder) / SHARDS[0]).read_bytes() == weights
    resumed = [request.range for request in server.asked("/lfs/") if request.range]
    # The client keeps whole chunks of 10 MiB.
    assert resumed == ["bytes=10485760-"]
    assert total == done
    assert said == ["org/cut: 28.0 MB to download"]
    assert "Trying to resume download" in client.said.read_text()


def test_gated(server: Hub, client: Client) -> None:
    server.add("models", "org/gated", MODEL)
    for status in (401, 403):
        server.gated["org/gated"] = status
        assert refused(client, "org/gated") == (
            f"org/gated: gated on the hub: accept its licence at {server.url}/org/gated, "
            "then sign in (`hf auth login` or HF_TOKEN)"
        )
    assert server.fetched() == []


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (429, "not in the local cache, and {}/org/busy answers 429: 429 Too Many Requests"),
        (503, "not in the local cache, and {}/org/busy answers 503: Server error '503"),
        (404, "{}/org/busy answers 404: Client error '404"),
    ],
)
def test_a_hub_that_fails(status: int, reason: str, server: Hub, client: Client) -> None:
    """After status 429 the client alone would wait five times for 300 s without a message."""
    server.add("models", "org/busy", MODEL)
    server.failing = [status]
    assert refused(client, "org/busy").startswith(f"org/busy: {reason.format(server.url)}")


def test_a_model_without_safetensors(server: Hub, client: Client) -> None:
    server.add("models", "org/pickled", {"config.json": "{}", "pytorch_model.bin": b"p"})
    assert (
        refused(client, "org/pickled")
        == "org/pickled: no .safetensors files; compare_q loads no pickled weights"
    )
    server.add("models", "org/other", {"a-Q4_K_M.gguf": b"GGUF"})
    reason = 'with "load_fn": "llamacpp" org/other/a-Q4_K_M.gguf can be measured'
    assert refused(client, "org/other").endswith(reason)
    assert server.fetched() == []


@pytest.mark.parametrize(
    "variables", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}]
)
def test_without_a_hub(variables: dict[str, str], server: Hub, client: Client, home: Path) -> None:
    server.add("models", "org/kept", MODEL)
    server.add("models", "org/words", MODEL)
    folder = fetch(client, "org/kept")[0]
    fetch(client, "org/words", tokenizer_only=True)
    with Client(server, home, **variables) as away:
        why = "HF_HUB_OFFLINE is set"
        if "HF_ENDPOINT" in variables:
            why = "http://127.0.0.1:1 cannot be reached ([Errno 111] Connection refused)"
        assert fetch(away, "org/kept")[0] == folder
        assert away.run("value = hub.would_fetch('org/kept')") == "in the local cache"
        assert fetch(away, "org/words", tokenizer_only=True)[3] == []
        assert refused(away, "org/words") == f"org/words: only partly in the local cache, and {why}"
        assert refused(away, "org/never") == f"org/never: not in the local cache, and {why}"
        assert (
            away.refusal("hub.resolve('org/never', None, download=False)")
            == "org/never: not in the local cache"
        )
        assert away.said.read_text() == ""


def test_a_hub_that_never_answers_is_asked_once(server: Hub, tmp_path: Path) -> None:
    """A socket accepts connections and never answers.

    The client alone had not given up after 130 s.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(0.01)
        place = f"http://127.0.0.1:{silent.getsockname()[1]}"

        def connections() -> int:
            """Return the number of connections since the last call."""
            with suppress(TimeoutError):
                silent.accept()[0].close()
                return 1 + connections()
            return 0

        with Client(server, tmp_path / "home", HF_ENDPOINT=place, HF_HUB_ETAG_TIMEOUT="1") as away:
            why = (
                f"{place} cannot be reached (no answer within 1 s; HF_HUB_ETAG_TIMEOUT sets "
                "another number)"
            )
            assert refused(away, "org/model") == f"org/model: not in the local cache, and {why}"
            assert connections() > 0
            assert why in refused(away, "org/other")
            text = away.refusal("corpus.load_rows(spec(dataset='wiki2'), Progress(quiet=True))")
            assert text.endswith(why)
            assert connections() == 0


def test_a_name_that_is_never_looked_up(server: Hub, tmp_path: Path) -> None:
    """The time limits of the HTTP client do not apply to a name resolver that does not answer."""
    variables = {"HF_ENDPOINT": "http://hub.invalid", "HF_HUB_ETAG_TIMEOUT": "1"}
    with Client(server, tmp_path / "home", **variables) as away:
        away.run("import socket, time; socket.getaddrinfo = lambda *_, **__: time.sleep(600)")
        assert "http://hub.invalid cannot be reached (no answer within 1 s" in refused(
            away, "org/model"
        )
