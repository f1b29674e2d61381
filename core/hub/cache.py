"""The cache of huggingface_hub, on disk: the folder of each model, with its files by content and by commit.

    models--ORG--NAME/blobs/ETAG                  a file; ETAG.incomplete while it is being downloaded
    models--ORG--NAME/snapshots/COMMIT/NAME       a link to it
    models--ORG--NAME/refs/REVISION               holds the commit of a branch or tag
    .locks/models--ORG--NAME/ETAG.lock            held by the process that writes the file

The layout is huggingface_hub's public one, so that the files of all programs are in one place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from engine.core.atomic_write import write_text
from engine.core.hub.files import Wanted, weight_files
from engine.core.weights.checkpoint import CONFIG, INDEX, SINGLE, read_json


def is_commit(text: str) -> bool:
    """Whether `text` is the full hash of a commit."""
    return re.fullmatch(r"[0-9a-f]{40}", text) is not None


def is_sha256(text: str) -> bool:
    """Whether `text` is a SHA-256, and so a safe name of a file."""
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None


@frozen
class Cache:
    """The cache's folder of one model."""

    root: Path
    """Folder of all models."""
    model: str
    """ORG/NAME."""

    @classmethod
    def of(cls, model: str, download_dir: str = "") -> Cache:
        """The folder of a model. download_dir: model.download_dir."""
        from huggingface_hub import constants

        return cls(Path(download_dir or constants.HF_HUB_CACHE).expanduser().absolute(), model)

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return self.root / f"models--{self.model.replace('/', '--')}"

    def blob(self, etag: str) -> Path:
        """The file with this ETag."""
        return self.folder / "blobs" / etag

    def part(self, etag: str) -> Path:
        """The beginning of a file whose download has not ended."""
        return self.folder / "blobs" / f"{etag}.incomplete"

    def lock(self, etag: str) -> Path:
        """The lock of a file, the same for all programs that use huggingface_hub."""
        return self.root / ".locks" / self.folder.name / f"{etag}.lock"

    def snapshot(self, commit: str) -> Path:
        """The directory of a commit."""
        return self.folder / "snapshots" / commit

    def commit(self, revision: str) -> str | None:
        """The commit that a revision was when it was last looked up; None if it never was."""
        if is_commit(revision):
            return revision
        file = self.folder / "refs" / revision
        return file.read_text(encoding="utf-8").strip() if file.is_file() else None

    def remember(self, revision: str, commit: str) -> None:
        """Note the commit of a branch or tag, in one step for processes that read it."""
        if revision == commit or self.commit(revision) == commit:
            return
        file = self.folder / "refs" / revision
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, commit)

    def lacks(self, commit: str, wanted: Wanted) -> list[str]:
        """The needed files that a commit's directory lacks; for weights in parts, the files that the index names."""
        directory = self.snapshot(commit)
        names = {file.name for file in directory.iterdir() if file.exists()} if directory.is_dir() else set()
        needed = [CONFIG] if wanted.config else []
        if wanted.weights:
            needed += weight_files(names, lambda: read_json(directory / INDEX)) or [SINGLE]
        return [name for name in needed if name not in names]

    def models(self) -> Iterator[str]:
        """Names of all models of which the cache has at least the configuration."""
        for folder in sorted(self.root.glob("models--*--*")):
            if any(folder.glob(f"snapshots/*/{CONFIG}")):
                yield folder.name.removeprefix("models--").replace("--", "/", 1)
