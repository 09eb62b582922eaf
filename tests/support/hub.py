"""A stand-in for the Hugging Face hub, for the real ``huggingface_hub`` and ``datasets``.

It is on the loopback, and speaks the part of the hub's HTTP API that the locked clients use
(huggingface_hub 2.4.0, datasets 5.2.0): ``/api/{models,datasets}/...`` (info, revision, tree in
pages) and ``resolve``.  Large files (``LFS``) are redirected to a second server, as the hub
redirects to its storage; this server supports ``Range``.  No file has an ``xetHash``, so that Xet
is never used.

Faults: ``gated``, ``renamed``, ``failing`` (the status of the next answers, 429 with
``Retry-After``), ``cut_once`` (the connection breaks in a file).  Clients find it by
``HF_ENDPOINT``, which they read when they are imported.

Unlike the hub, it also tells anonymous clients that a repository does not exist (``X-Error-Code``):
the client understands a bare 401 in this way only over https.
"""

from __future__ import annotations

import hashlib
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.support import ROOT

LFS = (".safetensors", ".parquet", ".gguf", ".gz", ".bin", ".pth", ".tar")
PAGE = 4
"""Entries per page of a listing; the hub has 1,000."""


@dataclass(frozen=True)
class Request:
    """A client's request."""

    method: str
    path: str
    range: str = ""


@dataclass
class Repo:
    """One repository: the files of each revision, by commit."""

    kind: str
    id: str
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def files(self, revision: str) -> dict[str, bytes] | None:
        """The files of a branch, tag or commit; None if there is no such revision."""
        return self.commits.get(self.refs.get(revision, revision))


class Hub:
    """The server; a context manager."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.renamed: dict[tuple[str, str], str] = {}
        self.gated: dict[str, int] = {}
        self.failing: list[int] = []
        self.cut: dict[str, int] = {}
        self.requests: list[Request] = []
        self.blobs: dict[str, bytes] = {}
        self.lock = threading.Lock()
        hub_server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self, "hub"))
        storage_server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self, "storage"))
        self.servers = [hub_server, storage_server]
        self.url = f"http://127.0.0.1:{hub_server.server_address[1]}"
        self.storage = f"http://127.0.0.1:{storage_server.server_address[1]}"

    def __enter__(self) -> Hub:
        for server in self.servers:
            server.daemon_threads = True
            threading.Thread(
                target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
            ).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return environment variables for a client with its own cache that uses this hub only."""
        inherited = {}
        for key, value in os.environ.items():
            if not key.startswith(("HF_", "HUGGING")):
                inherited[key] = value
        return {**inherited, "HF_ENDPOINT": self.url, "HF_HOME": str(home), "NO_PROXY": "*", **more}

    def add(self, kind: str, name: str, files: Mapping[str, bytes | str], ref: str = "main") -> str:
        """Add a revision of a repository; return its commit."""
        contents: dict[str, bytes] = {}
        for path, data in files.items():
            if isinstance(data, str):
                data = data.encode()
            contents[path] = data
            if path.endswith(LFS):
                self.blobs[sha256(data)] = data
        identity = repr((kind, name, ref, sorted(contents.items())))
        commit = hashlib.sha1(identity.encode()).hexdigest()
        repo = self.repos.setdefault((kind, name), Repo(kind, name))
        repo.commits[commit] = contents
        repo.refs[ref] = commit
        return commit

    def asked(self, part: str, method: str = "GET") -> list[Request]:
        """Return the requests with this method whose path contains ``part``."""
        return [
            request
            for request in self.requests
            if part in request.path and request.method == method
        ]

    def fetched(self) -> list[str]:
        """Return the sorted names of the files whose contents were requested."""
        names = []
        for request in self.asked("/resolve/"):
            revision_and_name = unquote(request.path).partition("/resolve/")[2]
            names.append(revision_and_name.partition("/")[2])
        return sorted(names)

    def cut_once(self, data: bytes, after: int) -> None:
        """Break the connection once, after ``after`` bytes of this large file have been sent."""
        self.cut[sha256(data)] = after


def sha256(data: bytes) -> str:
    """The name of a large file in the storage."""
    return hashlib.sha256(data).hexdigest()


def git_oid(data: bytes) -> str:
    """The name of a small file in git, which is its ETag."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry(path: str, data: bytes) -> dict[str, Any]:
    """One file of a listing."""
    facts: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_oid(data)}
    if path.endswith(LFS):
        facts["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
    return facts


def listing(files: Mapping[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """Files and folders below ``folder``, which is "" or ends with a slash."""
    entries = []
    folders = set[str]()
    for path, data in files.items():
        if not path.startswith(folder):
            continue
        entries.append(entry(path, data))
        parts = path[len(folder) :].split("/")
        for depth in range(1, len(parts)):
            folders.add(folder + "/".join(parts[:depth]))
    for path in folders:
        oid = git_oid(f"{path}/".encode())
        entries.append({"type": "directory", "path": path, "oid": oid, "size": 0})
    if not recursive:
        entries = [facts for facts in entries if "/" not in facts["path"][len(folder) :]]
    return sorted(entries, key=lambda facts: str(facts["path"]))


def handler(hub: Hub, where: str) -> type[BaseHTTPRequestHandler]:
    """Return the request handler of one of the two servers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with hub.lock:
                status = 0
                if hub.failing:
                    status = hub.failing.pop(0)
                requested_range = self.headers.get("Range") or ""
                hub.requests.append(Request(self.command, self.path, requested_range))
            if status == 429:
                self.reply({"error": "no"}, status, {"Retry-After": "300"})
            elif status:
                self.reply({"error": "no"}, status)
            elif where == "storage":
                self.send_file(hub.blobs[self.path.removeprefix("/lfs/")], {}, self.path)
            else:
                self.answer()

        do_HEAD = do_POST = do_GET  # noqa: N815

        def answer(self) -> None:
            """Answer an API call, send a file, or report that it does not exist."""
            parts = [part for part in urlsplit(self.path).path.split("/") if part]
            if not parts:
                self.reply({})
            elif parts[0] == "api" and parts[1:2] in (["models"], ["datasets"]):
                self.answer_for_repo(parts[1], parts[2:], is_api=True)
            elif "resolve" not in parts:
                self.fail(404, "", "Not found")
            elif parts[0] == "datasets":
                self.answer_for_repo("datasets", parts[1:], is_api=False)
            else:
                self.answer_for_repo("models", parts, is_api=False)

        def answer_for_repo(self, kind: str, parts: list[str], *, is_api: bool) -> None:
            """Answer a request for a repository; ``parts``: of the path from its name on."""
            words = ("revision", "tree", "resolve", "auth-check")
            length = next((i for i, part in enumerate(parts) if part in words), len(parts))
            name = "/".join(parts[:length])
            tail = [unquote(part) for part in parts[length:]]
            revision = "main"
            if len(tail) > 1:
                revision = tail[1]
            new_name = hub.renamed.get((kind, name))
            if new_name:
                location = self.path.replace(f"/{name}", f"/{new_name}", 1)
                self.reply({"error": f"Moved to {new_name}"}, 307, {"Location": location})
                return
            repo = hub.repos.get((kind, name))
            if repo is None:
                # The hub does not reveal whether a repository is private or missing.
                self.fail(401, "RepoNotFound", "Invalid username or password.")
                return
            files = repo.files(revision)
            if files is None:
                self.fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            elif name in hub.gated and (not is_api or tail[:1] == ["auth-check"]):
                # The status is 401 for anonymous clients, 403 for those without access.
                text = (
                    f"Access to model {name} is restricted and you are not in the authorized list."
                )
                self.fail(hub.gated[name], "GatedRepo", text)
            elif is_api:
                self.describe(repo, tail, revision, files)
            else:
                self.resolve(repo, revision, "/".join(tail[2:]), files)

        def describe(
            self, repo: Repo, tail: list[str], revision: str, files: dict[str, bytes]
        ) -> None:
            """Answer an API call about a repository."""
            query = parse_qs(urlsplit(self.path).query)
            if tail[:1] == ["tree"]:
                folder = "".join(f"{part}/" for part in tail[2:])
                self.tree(files, folder, query)
                return
            gated: str | bool = False
            if repo.id in hub.gated:
                gated = "manual"
            sha = repo.refs.get(revision, revision)
            facts: dict[str, Any] = {"_id": "0", "id": repo.id, "sha": sha, "gated": gated}
            if "expand" not in query:
                facts |= {
                    "private": False,
                    "siblings": siblings(files, with_sizes="blobs" in query),
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                }
            self.reply(facts)

        def tree(self, files: dict[str, bytes], folder: str, query: dict[str, list[str]]) -> None:
            """Send one page of a listing."""
            recursive = query.get("recursive", ["false"])[0].lower() == "true"
            entries = listing(files, folder, recursive)
            first = int(query.get("cursor", ["0"])[0])
            end = first + PAGE
            headers = {}
            if len(entries) > end:
                words = []
                for key, values in query.items():
                    if key != "cursor":
                        words.append(f"{key}={quote(values[0])}")
                next_query = "&".join([*words, f"cursor={end}"])
                address = f"{hub.url}{urlsplit(self.path).path}?{next_query}"
                headers["Link"] = f'<{address}>; rel="next"'
            self.reply(entries[first:end], 200, headers)

        def resolve(self, repo: Repo, revision: str, path: str, files: dict[str, bytes]) -> None:
            """Send a file, or a redirection to it."""
            headers = {"X-Repo-Commit": repo.refs.get(revision, revision), "Accept-Ranges": "bytes"}
            if path not in files:
                self.fail(404, "EntryNotFound", "Entry not found", headers)
                return
            data = files[path]
            if path.endswith(LFS):
                digest = sha256(data)
                headers["X-Linked-ETag"] = f'"{digest}"'
                headers["X-Linked-Size"] = str(len(data))
                headers["Location"] = f"{hub.storage}/lfs/{digest}"
                self.reply({}, 302, headers)
            else:
                headers["ETag"] = f'"{git_oid(data)}"'
                self.send_file(data, headers, path)

        def send_file(self, data: bytes, headers: dict[str, str], path: str) -> None:
            """Send a file's bytes, or the requested range; truncated if the test requires it."""
            begin, _, last = (self.headers.get("Range") or "").removeprefix("bytes=").partition("-")
            first_byte = int(begin or 0)
            last_byte = min(int(last or len(data)), len(data) - 1)
            part = data[first_byte : last_byte + 1]
            status = 200
            headers = {**headers, "Content-Length": str(len(part))}
            if begin:
                status = 206
                headers["Content-Range"] = f"bytes {first_byte}-{last_byte}/{len(data)}"
            n_sent = None
            if self.command == "GET":
                n_sent = hub.cut.pop(path.rpartition("/")[2], None)
            self.begin(status, headers)
            if self.command != "HEAD":
                self.wfile.write(part[:n_sent])
            # Content-Length announced more bytes, so the client sees a broken connection.
            self.close_connection = n_sent is not None

        def fail(
            self, status: int, code: str, text: str, headers: dict[str, str] | None = None
        ) -> None:
            """Send an error in the hub's words."""
            error_headers: dict[str, str] = {}
            if code:
                error_headers["X-Error-Code"] = code
            error_headers["X-Error-Message"] = text
            error_headers |= headers or {}
            self.reply({"error": text}, status, error_headers)

        def reply(
            self, content: Any, status: int = 200, headers: dict[str, str] | None = None
        ) -> None:
            """Send a JSON answer."""
            data = json.dumps(content).encode()
            json_headers = {"Content-Type": "application/json", "Content-Length": str(len(data))}
            self.begin(status, json_headers | (headers or {}))
            if self.command != "HEAD":
                self.wfile.write(data)

        def begin(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()

    return Handler


def siblings(files: Mapping[str, bytes], *, with_sizes: bool) -> list[dict[str, Any]]:
    """Return all files of a repository in the words of the hub's model info."""
    entries = []
    for path, data in files.items():
        facts: dict[str, Any] = {"rfilename": path}
        if with_sizes:
            facts |= {"size": len(data), "blobId": git_oid(data)}
        entries.append(facts)
    return entries


LOOP = """
import json, os, sys
names, answers = {}, os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what is printed is no answer
for line in sys.stdin:
    try:
        exec(json.loads(line), names)
        answer = {"value": names.pop("value", None)}
    except Exception as error:
        answer = {"kind": type(error).__name__, "error": str(error)}
    print(json.dumps(answer), file=answers, flush=True)
"""
PREPARED = """
import pathlib
from compare_q.backends import hub
from compare_q.eval.text import corpus, hub_datasets
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs.spec_files import parse_data_spec

def spec(**keys):
    base = {"tokenizer_dir": "t", "eval_stride": 2, "eval_len": 4}
    return parse_data_spec({**base, **keys}, pathlib.Path("d.json"))

class Watch:
    def __init__(self): self.total, self.done, self.said = 0, 0, []
    def expect(self, total): self.total = total
    def advance(self, amount=1): self.done += amount
    def say(self, text): self.said.append(text)
"""


def copy(screen: int, file: int) -> None:
    """Copy the output on a terminal into a file, until the terminal's program ends."""
    with suppress(OSError):
        data = os.read(screen, 65536)
        while data:
            os.write(file, data)
            data = os.read(screen, 65536)


class Client:
    """A process that uses the hub as a user's process does, with its own cache in ``home``.

    It is a context manager.  One process runs many snippets, because importing the clients takes
    seconds.  ``said`` has its standard error; ``terminal``: standard error is a terminal, so that
    progress bars are drawn.
    """

    def __init__(self, hub: Hub, home: Path, *, terminal: bool = False, **variables: str) -> None:
        self.hub = hub
        self.said = home / "stderr.txt"
        home.mkdir(parents=True, exist_ok=True)
        stderr = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if terminal:
            screen, program_end = pty.openpty()
            threading.Thread(target=copy, args=(screen, stderr), daemon=True).start()
            stderr = program_end
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
            env=hub.environment(home, PYTHONPATH=str(ROOT), **variables),
        )
        # ``copy`` ends when the last descriptor of the terminal's other end is closed.
        os.close(stderr)
        self.run(PREPARED)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        # Killed, because a normal exit, with all modules of datasets, took 6 s.
        self.process.kill()
        self.process.wait()

    def answer(self, code: str) -> dict[str, Any]:
        """Run some lines of Python; return the ``value`` that they set, or their error."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.hub.requests.clear()
        print(json.dumps(code), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, self.said.read_text()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, code: str) -> Any:
        """Run some lines of Python; return the ``value`` that they set."""
        answer = self.answer(code)
        assert "error" not in answer, answer
        return answer["value"]

    def refusal(self, code: str) -> str:
        """Run some lines of Python; return the one line of the InputError that they raise."""
        answer = self.answer(code)
        assert answer.get("kind") in ("InputError", "HubUnreachableError"), answer
        assert len(answer["error"].splitlines()) == 1
        return str(answer["error"])

    @property
    def asked(self) -> list[Request]:
        """Return the requests of the last run of ``answer``."""
        return self.hub.requests
