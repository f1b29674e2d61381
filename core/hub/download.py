"""Downloads files of one commit into the cache: several at a time, each from where an earlier download ended.

huggingface_hub downloads the small files and what is in Xet storage. It begins a file again when an earlier process was
interrupted in the middle; the large files of other storage are therefore fetched here, into ETAG.incomplete, to which a
later process appends. A file made of several parts is checked against the SHA-256 that the hub names.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import frozen

from engine.core.errors import DownloadError
from engine.core.extras import DISTRIBUTION
from engine.core.hub.cache import Cache
from engine.core.hub.problems import is_transient
from engine.core.startup import Listener, Progress, format_size

WORKERS = 8
"""Files that are fetched at a time, as in huggingface_hub."""
TICK = 0.2
"""Seconds between two reports of progress."""
RATE_SECONDS = 5.0
"""Seconds of which the speed is the average."""
MIN_RATE_SECONDS = 1.0
"""Seconds before which no speed is named."""
TRIES = 5
"""Times that a file is requested without a further byte before the download fails."""
PAUSE = 1.0
"""Seconds before the second request; the n-th waits n times as long."""


@frozen(kw_only=True)
class RemoteFile:
    """A file of a repository."""

    name: str
    size: int
    sha256: str | None
    """Its hash and ETag if it is in storage for large files."""


class _CancelledError(Exception):
    """Ends the threads of a download that has failed or was interrupted."""


class Download:
    """Files of one commit, and how much of them is in the cache."""

    def __init__(
        self, cache: Cache, commit: str, files: Sequence[RemoteFile], listener: Listener | None = None
    ) -> None:
        """files: those that the cache lacks. listener: called with the progress."""
        self._cache = cache
        self._commit = commit
        self._files = files
        self._listener = listener
        self._cancelled = threading.Event()
        self._done = {file.name: self._part_size(file) for file in files}
        self._locked: set[str] = set()
        """Names of the files whose lock another process holds, which is most likely downloading them."""
        self._begun = time.monotonic()
        self._samples = deque([(self._begun, self.done)])

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._files)

    @property
    def done(self) -> int:
        """Bytes in the cache."""
        return sum(self._part_size(one) if one.name in self._locked else self._done[one.name] for one in self._files)

    def check_space(self) -> None:
        """Raise DownloadError if the rest does not fit on the disk."""
        folder = next(one for one in (self._cache.root, *self._cache.root.parents) if one.is_dir())
        needed, free = self.total - self.done, shutil.disk_usage(folder).free
        if needed > free:
            raise DownloadError(
                f"{self._cache.model} needs {format_size(needed)} more in {self._cache.root}, where {format_size(free)}"
                f" are free; make room for {format_size(needed - free)}, or name another folder with --download-dir"
            )

    def run(self) -> None:
        """Fetch all files. Raises what the first one that fails raises; what has arrived remains for the next try."""
        waiting, ended = queue.SimpleQueue[RemoteFile](), queue.SimpleQueue[BaseException | None]()
        for file in self._files:
            waiting.put(file)
        self._report()  # before any thread runs: what was in the cache already
        for _ in range(min(WORKERS, len(self._files))):
            # Daemons: an interrupted command must not wait for requests of other threads.
            threading.Thread(target=self._work, args=(waiting, ended), daemon=True, name="download").start()
        try:
            left = len(self._files)
            while left:
                with contextlib.suppress(queue.Empty):
                    error = ended.get(timeout=TICK)
                    if error is not None:
                        raise error
                    left -= 1
                self._report()
        finally:
            self._cancelled.set()

    def _work(self, waiting: queue.SimpleQueue[RemoteFile], ended: queue.SimpleQueue[BaseException | None]) -> None:
        """Fetch files until none is waiting; runs in a thread."""
        with contextlib.suppress(queue.Empty):
            while not self._cancelled.is_set():
                file = waiting.get_nowait()
                try:
                    self._fetch(file)
                except BaseException as error:
                    ended.put(error)
                else:
                    ended.put(None)

    def _fetch(self, file: RemoteFile) -> None:
        from huggingface_hub import hf_hub_download

        if file.sha256 is not None:
            self._fetch_large(file, file.sha256)
        hf_hub_download(
            self._cache.model,
            file.name,
            revision=self._commit,
            cache_dir=self._cache.root,
            library_name=DISTRIBUTION,
            tqdm_class=_bar_class(partial(self._count, file.name)),
        )
        self._done[file.name] = file.size

    def _fetch_large(self, file: RemoteFile, etag: str) -> None:
        """Fetch a large file, unless it is in Xet storage; ask again when the connection breaks."""
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(self._cache.model, file.name, revision=self._commit)
        headers = build_hf_headers(library_name=DISTRIBUTION)
        has_xet = find_spec("hf_xet") is not None and not constants.HF_HUB_DISABLE_XET
        tries = 0
        while True:
            before = self._done[file.name]
            try:
                if not (has_xet and get_hf_file_metadata(url, headers=headers).xet_file_data is not None):
                    self._complete(file, etag, url, headers)
                return
            except Exception as error:
                tries = tries + 1 if self._done[file.name] == before else 1
                if tries >= TRIES or not is_transient(error):
                    raise
                self._cancelled.wait(tries * PAUSE)

    def _complete(self, file: RemoteFile, etag: str, url: str, headers: Mapping[str, str]) -> None:
        """Fetch what is missing of a file, holding its lock, and give it its name."""
        from huggingface_hub.utils import WeakFileLock

        blob, part, lock = self._cache.blob(etag), self._cache.part(etag), self._cache.lock(etag)
        for folder in (blob.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        self._locked.add(file.name)
        with WeakFileLock(lock):
            self._locked.remove(file.name)
            if blob.exists():  # another process has fetched it
                return
            begin = self._part_size(file)
            if not begin:
                part.unlink(missing_ok=True)
            if begin < file.size:
                self._receive(file, url, headers, part, begin)
            if begin and _sha256(part) != etag:  # the beginning was of something else
                self._receive(file, url, headers, part, 0)
            part.replace(blob)

    def _receive(self, file: RemoteFile, url: str, headers: Mapping[str, str], part: Path, begin: int) -> None:
        """Write a file from byte `begin` on."""
        from huggingface_hub import constants, get_session
        from huggingface_hub.utils import hf_raise_for_status

        wanted = {**headers, "Accept-Encoding": "identity"} | ({"Range": f"bytes={begin}-"} if begin else {})
        # The client follows redirects, and sends the token only to the host that it is for.
        with get_session().stream("GET", url, headers=wanted, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
            hf_raise_for_status(response)
            if response.status_code != 206:
                begin = 0  # the server sends the whole file
            # Without truncation: where locks have no effect, another process writes the same bytes to the file.
            with part.open("r+b" if part.exists() else "wb") as target:
                end = target.seek(begin)
                for data in response.iter_raw():
                    end += target.write(data)
                    self._count(file.name, end)
        if end != file.size:
            raise ConnectionError(f"{file.name} ended after {end} of {file.size} bytes")

    def _count(self, name: str, size: int) -> None:
        """Note that `size` bytes of a file have come. Raises _CancelledError to end the thread."""
        self._done[name] = size
        if self._cancelled.is_set():
            raise _CancelledError

    def _part_size(self, file: RemoteFile) -> int:
        """Bytes of a file that an earlier download has left; 0 for more than the file has, which is of another."""
        part = self._cache.part(file.sha256) if file.sha256 is not None else None
        size = part.stat().st_size if part is not None and part.exists() else 0
        return size if size <= file.size else 0

    def _report(self) -> None:
        """Report the progress, with the speed of the last seconds."""
        now, done = time.monotonic(), self.done
        self._samples.append((now, done))
        while len(self._samples) > 2 and now - self._samples[0][0] > RATE_SECONDS:
            self._samples.popleft()
        if self._listener is not None:
            since, before = self._samples[0]
            rate = max(done - before, 0) / (now - since) if now - self._begun >= MIN_RATE_SECONDS else 0.0
            seconds = now - self._begun
            self._listener(
                Progress(
                    phase=f"download of {self._cache.model}", done=done, total=self.total, seconds=seconds, rate=rate
                )
            )


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _bar_class(count: Callable[[int], None]) -> type[Any]:
    """A class that huggingface_hub makes its progress bars of; `count` is called with the bytes so far."""

    class Bar:
        """The calls of tqdm's progress bar that huggingface_hub makes."""

        def __init__(self, *_: object, initial: int = 0, total: int | None = None, **__: object) -> None:
            self.n = initial
            self.total = total
            count(self.n)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, n: int | float | None = 1) -> None:
            self.n += int(n or 0)
            count(self.n)

        def _ignore(self, *_: object, **__: object) -> None:
            pass

        update_transfer = close = refresh = set_description = set_description_str = _ignore
        set_postfix_str = set_transfer_postfix_str = _ignore

    return Bar
