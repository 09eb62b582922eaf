"""A stand-in for the Hugging Face hub on the loopback, for the real ``huggingface_hub`` and
``datasets``.

It speaks the part of the hub's HTTP API that the locked clients use (huggingface_hub 2.4.0,
datasets 5.2.0): ``/api/{models,datasets}/...`` (info, revision, tree in pages) and ``resolve``.
Large files (``LFS``) are redirected to a second server, as the hub redirects to its storage; this
server supports ``Range``.  No file has an ``xetHash``, so that Xet is never used.

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
        self.servers = [
            ThreadingHTTPServer(("127.0.0.1", 0), handler(self, where))
            for where in ("hub", "storage")
        ]
        self.url, self.storage = (
            f"http://127.0.0.1:{server.server_address[1]}" for server in self.servers
        )

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
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("HF_", "HUGGING"))
        }
        return {**inherited, "HF_ENDPOINT": self.url, "HF_HOME": str(home), "NO_PROXY": "*", **more}

    def add(self, kind: str, name: str, files: Mapping[str, bytes | str], ref: str = "main") -> str:
        """Add a revision of a repository; return its commit."""
        contents = {
            path: data.encode() if isinstance(data, str) else data for path, data in files.items()
        }
        commit = hashlib.sha1(
            repr((kind, name, ref, sorted(contents.items()))).encode()
        ).hexdigest()
        repo = self.repos.setdefault((kind, name), Repo(kind, name))
        repo.commits[commit], repo.refs[ref] = contents, commit
        self.blobs |= {sha256(data): data for path, data in contents.items() if path.endswith(LFS)}
        return commit

    def asked(self, part: str, method: str = "GET") -> list[Request]:
        """Return the requests with this method whose path contains ``part``."""
        return [each for each in self.requests if part in each.path and each.method == method]

    def fetched(self) -> list[str]:
        """Return the sorted names of the files whose contents were requested, without the
        repository's name.
        """
        pages = [unquote(each.path) for each in self.asked("/resolve/")]
        return sorted(path.partition("/resolve/")[2].partition("/")[2] for path in pages)

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
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_oid(data)}
    if path.endswith(LFS):
        found["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
    return found


def listing(files: Mapping[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """Files and folders below ``folder``, which is "" or ends with a slash."""
    inside = [path for path in files if path.startswith(folder)]
    folders = {
        path[: i + 1] for path in inside for i in range(len(folder), len(path)) if path[i] == "/"
    }
    found = [
        {"type": "directory", "path": each[:-1], "oid": git_oid(each.encode()), "size": 0}
        for each in folders
    ]
    found += [entry(path, files[path]) for path in inside]
    if not recursive:
        found = [each for each in found if "/" not in each["path"][len(folder) :]]
    return sorted(found, key=lambda each: str(each["path"]))


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
                status = hub.failing.pop(0) if hub.failing else 0
                hub.requests.append(
                    Request(self.command, self.path, self.headers.get("Range") or "")
                )
            if status:
                self.reply({"error": "no"}, status, {"Retry-After": "300"} if status == 429 else {})
            elif where == "storage":
                self.send_file(hub.blobs[self.path.removeprefix("/lfs/")], {}, self.path)
            else:
                self.answer()

        do_HEAD = do_POST = do_GET  # noqa: N815

        def answer(self) -> None:
            """Answer an API call, send a file, or report that it does not exist."""
            parts = [each for each in urlsplit(self.path).path.split("/") if each]
            if parts[:1] == ["api"] and parts[1:2] in (["models"], ["datasets"]):
                kind, rest, api = parts[1], parts[2:], True
            elif "resolve" in parts:
                kind, api = ("datasets", False) if parts[0] == "datasets" else ("models", False)
                rest = parts[1:] if kind == "datasets" else parts
            else:
                self.reply({}) if not parts else self.fail(404, "", "Not found")
                return
            words = ("revision", "tree", "resolve", "auth-check")
            length = next((i for i, part in enumerate(rest) if part in words), len(rest))
            name, tail = "/".join(rest[:length]), [unquote(part) for part in rest[length:]]
            if new := hub.renamed.get((kind, name)):
                place = self.path.replace(f"/{name}", f"/{new}", 1)
                self.reply({"error": f"Moved to {new}"}, 307, {"Location": place})
            elif (repo := hub.repos.get((kind, name))) is None:
                self.fail(401, "RepoNotFound", "Invalid username or password.")
            elif (files := repo.files(tail[1] if len(tail) > 1 else "main")) is None:
                self.fail(404, "RevisionNotFound", f"Invalid rev id: {tail[1]}")
            elif name in hub.gated and (not api or tail[:1] == ["auth-check"]):
                text = (
                    f"Access to model {name} is restricted and you are not in the authorized list."
                )
                self.fail(
                    hub.gated[name], "GatedRepo", text
                )  # 401 for anonymous clients, 403 for those without access
            elif api:
                self.describe(repo, tail, files)
            else:
                self.resolve(repo, tail[1], "/".join(tail[2:]), files)

        def describe(self, repo: Repo, tail: list[str], files: dict[str, bytes]) -> None:
            """Answer an API call about a repository."""
            what = tail[0] if tail else "revision"
            revision = tail[1] if len(tail) > 1 else "main"
            query = parse_qs(urlsplit(self.path).query)
            if what == "tree":
                self.tree(files, "".join(f"{part}/" for part in tail[2:]), query)
            else:
                siblings = [
                    {
                        "rfilename": path,
                        **(
                            {"size": len(data), "blobId": git_oid(data)} if "blobs" in query else {}
                        ),
                    }
                    for path, data in files.items()
                ]
                sha = repo.refs.get(revision, revision)
                about = {
                    "_id": "0",
                    "id": repo.id,
                    "sha": sha,
                    "gated": "manual" if repo.id in hub.gated else False,
                }
                more = {
                    "private": False,
                    "siblings": siblings,
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                }
                self.reply(about if "expand" in query else {**about, **more})

        def tree(self, files: dict[str, bytes], folder: str, query: dict[str, list[str]]) -> None:
            """Send one page of a listing."""
            found = listing(files, folder, query.get("recursive", ["false"])[0].lower() == "true")
            first = int(query.get("cursor", ["0"])[0])
            page, more = found[first : first + PAGE], {}
            if len(found) > first + PAGE:
                rest = "&".join(
                    f"{key}={quote(value[0])}" for key, value in query.items() if key != "cursor"
                )
                address = f"{hub.url}{urlsplit(self.path).path}?{rest}&cursor={first + PAGE}"
                more = {"Link": f'<{address}>; rel="next"'}
            self.reply(page, 200, more)

        def resolve(self, repo: Repo, revision: str, path: str, files: dict[str, bytes]) -> None:
            """Send a file, or a redirection to it."""
            about = {"X-Repo-Commit": repo.refs.get(revision, revision), "Accept-Ranges": "bytes"}
            if path not in files:
                self.fail(404, "EntryNotFound", "Entry not found", about)
            elif path.endswith(LFS):
                digest = sha256(files[path])
                about |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(files[path]))}
                self.reply({}, 302, {**about, "Location": f"{hub.storage}/lfs/{digest}"})
            else:
                self.send_file(files[path], {**about, "ETag": f'"{git_oid(files[path])}"'}, path)

        def send_file(self, data: bytes, headers: dict[str, str], path: str) -> None:
            """Send a file's bytes, or the requested range; truncated if the test requires it."""
            low, _, high = (self.headers.get("Range") or "").removeprefix("bytes=").partition("-")
            first, last = int(low or 0), min(int(high or len(data)), len(data) - 1)
            part = data[first : last + 1]
            ranged = {"Content-Range": f"bytes {first}-{last}/{len(data)}"} if low else {}
            keep = hub.cut.pop(path.rpartition("/")[2], None) if self.command == "GET" else None
            self.begin(206 if low else 200, {**headers, **ranged, "Content-Length": str(len(part))})
            if self.command != "HEAD":
                self.wfile.write(part[:keep])
            self.close_connection = keep is not None

        def fail(
            self, status: int, code: str, text: str, headers: dict[str, str] | None = None
        ) -> None:
            """Send an error in the hub's words."""
            named = {"X-Error-Code": code} if code else {}
            self.reply(
                {"error": text}, status, {**named, "X-Error-Message": text, **(headers or {})}
            )

        def reply(
            self, content: Any, status: int = 200, headers: dict[str, str] | None = None
        ) -> None:
            """Send a JSON answer."""
            data = json.dumps(content).encode()
            about = {"Content-Type": "application/json", "Content-Length": str(len(data))}
            self.begin(status, about | (headers or {}))
            if self.command != "HEAD":
                self.wfile.write(data)

        def begin(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()

    return Handler


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
    return parse_data_spec({"tokenizer_dir": "t", "eval_stride": 2, "eval_len": 4, **keys}, pathlib.Path("d.json"))

class Watch:
    def __init__(self): self.total, self.done, self.said = 0, 0, []
    def expect(self, total): self.total = total
    def advance(self, amount=1): self.done += amount
    def say(self, text): self.said.append(text)
"""


def copy(screen: int, file: int) -> None:
    """Copy the output on a terminal into a file, until the terminal's program ends."""
    with suppress(OSError):
        while data := os.read(screen, 65536):
            os.write(file, data)


class Client:
    """A process with its own cache in ``home`` that uses the hub as a user's process does; a
    context manager.

    One process runs many snippets, because importing the clients takes seconds.  ``said`` has its
    standard error; ``terminal``: standard error is a terminal, so that progress bars are drawn.
    """

    def __init__(self, hub: Hub, home: Path, *, terminal: bool = False, **variables: str) -> None:
        self.hub = hub
        self.said = home / "stderr.txt"
        home.mkdir(parents=True, exist_ok=True)
        stderr = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if terminal:
            screen, there = pty.openpty()
            threading.Thread(target=copy, args=(screen, stderr), daemon=True).start()
            stderr = there
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
            env=hub.environment(home, PYTHONPATH=str(ROOT), **variables),
        )
        os.close(stderr)
        self.run(PREPARED)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # a normal exit, with all modules of datasets, took 6 s
        self.process.wait()

    def answer(self, code: str) -> dict[str, Any]:
        """Run some lines of Python; return the ``value`` that they set, or their error."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.hub.requests.clear()
        print(json.dumps(code), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, self.said.read_text()
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, code: str) -> Any:
        """Run some lines of Python; return the ``value`` that they set."""
        answer = self.answer(code)
        assert "error" not in answer, answer
        return answer["value"]

    def refusal(self, code: str) -> str:
        """Run some lines of Python; return the one line of the InputError that they raise."""
        answer = self.answer(code)
        assert answer.get("kind") in ("InputError", "HubAwayError"), answer
        assert len(answer["error"].splitlines()) == 1
        return str(answer["error"])

    @property
    def asked(self) -> list[Request]:
        """Return the requests of the last run of ``answer``."""
        return self.hub.requests
