"""A local server that speaks the protocol of the hub, and one that stands for its storage of large files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from attrs import define, field, frozen

PIECE = 16_384
HOLD_SECONDS = 60.0
"""Seconds after which an answer goes on although nothing has released it."""
LARGE = (".safetensors", ".bin", ".gguf", ".model")
"""Endings of the files that are in storage for large files."""


@frozen
class Request:
    """A request that came."""

    server: str
    """hub or storage."""
    method: str
    path: str
    headers: Mapping[str, str]

    @property
    def begin(self) -> int | None:
        """The byte from which on a file was asked for; None: no range was."""
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        return int(match[1]) if match else None


@define
class Repository:
    """A repository: the files of each commit."""

    commits: dict[str, dict[str, bytes]] = field(factory=dict)
    revisions: dict[str, str] = field(factory=dict)
    gated: bool = False
    token: str = ""
    """The only token that may read a private or gated repository."""
    private: bool = False


@define
class Hub:
    """What the servers have, how they behave, and what they were asked."""

    url: str = ""
    storage_url: str = ""
    repositories: dict[str, Repository] = field(factory=dict)
    requests: list[Request] = field(factory=list)
    cuts: dict[str, int] = field(factory=dict)
    """File -> bytes of the next answer after which the connection is cut, once."""
    holds: dict[str, int] = field(factory=dict)
    """File -> bytes of the next answer after which nothing comes until `released` is set, once."""
    released: threading.Event = field(factory=threading.Event)
    rate: float = 0.0
    """Bytes per second of a large file; 0: as fast as can be."""
    redirects: bool = False
    """Whether large files are at the other server."""
    ranges: bool = True
    """Whether parts of files are sent on request."""
    status: int = 0
    """Status of all answers of the API, in place of the right one."""

    def reset(self) -> None:
        """Forget all repositories, requests and faults."""
        self.__init__(self.url, self.storage_url)  # type: ignore[misc]

    def add(self, name: str, files: Mapping[str, bytes | str], revision: str = "main", **settings: Any) -> str:
        """Add a commit to a repository, which `revision` names from now on."""
        repository = self.repositories.setdefault(name, Repository(**settings))
        content = {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}
        commit = hashlib.sha1(repr((revision, sorted(content.items()))).encode()).hexdigest()
        repository.commits[commit] = content
        repository.revisions[revision] = commit
        return commit

    def asked(self, method: str = "GET", server: str = "") -> Counter[str]:
        """How often each file was asked for."""
        found = (one for one in self.requests if one.method == method and one.server.startswith(server))
        return Counter(one.path.rpartition("/")[2] for one in found if "/api/" not in one.path)


def git_hash(data: bytes) -> str:
    """The hash of a file in git."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers for the hub, or for its storage."""

    protocol_version = "HTTP/1.1"
    hub: Hub
    server_name: str

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.seen = Request(self.server_name, self.command, path, headers)
        self.hub.requests.append(self.seen)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if self.server_name == "storage":
                _, commit, name = path.split("/", 2)
                found = next(one for one in self.hub.repositories.values() if commit in one.commits)
                self.send_file(name, found.commits[commit][name])
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
                self.answer_api(*match.groups())
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self.answer_file(*match.groups())
            else:
                self.refuse(404, "")

    def find(self, name: str, revision: str) -> tuple[Repository, str] | None:
        """The repository and the commit; None, with an answer, if the client may not know them."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        repository = self.hub.repositories.get(name)
        if self.hub.status:
            self.refuse(self.hub.status, "")
        elif repository is None or (repository.private and token != repository.token):
            self.refuse(401, "RepoNotFound")
        elif revision not in {*repository.revisions, *repository.commits}:
            self.refuse(404, "RevisionNotFound")
        else:
            return repository, repository.revisions.get(revision, revision)
        return None

    def answer_api(self, name: str, revision: str) -> None:
        if (found := self.find(name, revision)) is None:
            return
        repository, commit = found
        siblings: list[dict[str, Any]] = []
        for path, data in repository.commits[commit].items():
            about: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": git_hash(data)}
            if path.endswith(LARGE):
                about["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(about)
        self.reply(200, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())

    def answer_file(self, name: str, revision: str, path: str) -> None:
        if (found := self.find(name, revision)) is None:
            return
        repository, commit = found
        if repository.gated and self.headers.get("Authorization") != f"Bearer {repository.token}":
            self.refuse(403 if "Authorization" in self.headers else 401, "GatedRepo")
            return
        data = repository.commits[commit].get(path)
        if data is None:
            self.refuse(404, "EntryNotFound", commit)
            return
        large = path.endswith(LARGE)
        etag = hashlib.sha256(data).hexdigest() if large else git_hash(data)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}
        if large and self.hub.redirects:
            linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
            self.reply(302, b"", {**headers, **linked, "Location": f"{self.hub.storage_url}/{commit}/{path}"})
        else:
            self.send_file(path, data, headers)

    def send_file(self, path: str, data: bytes, headers: Mapping[str, str] = {}) -> None:
        """Send a file, or the part that is asked for: slowly or not to its end if that is wanted."""
        begin = self.seen.begin if self.hub.ranges else None
        if begin is not None:
            headers = {**headers, "Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}
        self.send_response(200 if begin is None else 206)
        data = data[begin or 0 :]
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        end, hold = self.hub.cuts.pop(path, len(data)), self.hub.holds.pop(path, 0)
        if hold:
            self.wfile.write(data[:hold])
            self.hub.released.wait(HOLD_SECONDS)
        rate = self.hub.rate if path.endswith(LARGE) else 0.0
        for at in range(hold, end, PIECE):
            self.wfile.write(data[at : min(at + PIECE, end)])
            if rate:
                time.sleep(PIECE / rate)
        self.close_connection = end < len(data)

    def reply(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str, commit: str = "") -> None:
        self.reply(status, b"", {"X-Error-Code": code, "X-Repo-Commit": commit})


class _Server(ThreadingHTTPServer):
    daemon_threads = True


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub and its storage, whose address has another name, so that it is another host for a client's token."""
    hub = Hub()
    with contextlib.ExitStack() as stack:
        urls = []
        for name, host in (("hub", "127.0.0.1"), ("storage", "localhost")):
            handler = type("Handler", (Handler,), {"hub": hub, "server_name": name})
            server = stack.enter_context(_Server(("127.0.0.1", 0), handler))
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            urls.append(f"http://{host}:{server.server_address[1]}")
        hub.url, hub.storage_url = urls
        yield hub
