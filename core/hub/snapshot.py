"""Fetches a model from the hub; without the hub, finds it in the cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from engine.core.errors import DownloadError
from engine.core.extras import DISTRIBUTION
from engine.core.hub.cache import Cache, is_commit, is_sha256
from engine.core.hub.download import Download, RemoteFile
from engine.core.hub.files import EVERYTHING, Wanted, check_readable, small_files, weight_files
from engine.core.hub.problems import explain, hub_errors, is_answer, is_offline
from engine.core.startup import Listener
from engine.core.weights.checkpoint import INDEX, listed, read_json

MAIN = "main"

log = logging.getLogger(__name__)


@frozen(kw_only=True)
class Snapshot:
    """A model of the hub, on disk."""

    model: str
    """ORG/NAME."""
    commit: str
    directory: Path


def fetch(
    model: str,
    *,
    revision: str = "",
    download_dir: str = "",
    wanted: Wanted = EVERYTHING,
    listener: Listener | None = None,
) -> Snapshot:
    """Download the files of a model that the cache lacks. When the hub does not answer, the cache must have them all.

    revision: a branch, tag or commit; empty: main. download_dir: the cache; empty: huggingface_hub's.
    listener: called with the progress. Raises DownloadError.
    """
    cache, revision = Cache.of(model, download_dir), revision or MAIN
    try:
        commit, files = _list_files(model, revision)
    except hub_errors() as error:
        return _find(cache, revision, wanted, error)
    snapshot = Snapshot(model=model, commit=commit, directory=cache.snapshot(commit))
    try:
        if cache.commit(revision) is None:  # else only once all is there: an interrupted update leaves the old version
            cache.remember(revision, commit)
        _download(cache, commit, files, wanted, listener)
        if wanted.weights:
            cache.remember(revision, commit)
    except hub_errors() as error:
        if is_answer(error):
            raise DownloadError(explain(error, model, revision)) from error
        raise DownloadError(
            f"the download of {model} ended early: {explain(error, model, revision)}; what has arrived stays in the"
            " cache, and the next download continues there"
        ) from error
    log.info("%s, revision %s, is commit %s in %s", model, revision, commit, snapshot.directory)
    return snapshot


def _list_files(model: str, revision: str) -> tuple[str, Mapping[str, RemoteFile]]:
    """Ask the hub for the commit and the files of a revision."""
    from huggingface_hub import HfApi, constants

    api = HfApi(library_name=DISTRIBUTION)
    try:
        about = api.model_info(model, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except hub_errors():
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise DownloadError(
            f"{constants.ENDPOINT} does not answer as a hub of models does; check HF_ENDPOINT"
        ) from error
    commit = about.sha or ""
    if not is_commit(commit):
        raise DownloadError(f"{constants.ENDPOINT} names no commit of {model}; check HF_ENDPOINT")
    files = {}
    for one in about.siblings or ():
        sha256 = one.lfs.sha256 if one.lfs is not None and is_sha256(one.lfs.sha256) else None
        files[one.rfilename] = RemoteFile(name=one.rfilename, size=one.size or 0, sha256=sha256)
    return commit, files


def _download(
    cache: Cache, commit: str, files: Mapping[str, RemoteFile], wanted: Wanted, listener: Listener | None
) -> None:
    """Fetch the wanted files that the cache lacks; the index of the weights first, which names the others."""

    def lacking(names: list[str]) -> list[RemoteFile]:
        return [files[name] for name in names if not (cache.snapshot(commit) / name).exists()]

    weights: list[str] = []
    if wanted.weights:
        if INDEX in files and (index := lacking([INDEX])):
            Download(cache, commit, index).run()
        weights = weight_files(files, lambda: read_json(cache.snapshot(commit) / INDEX))
    check_readable(cache.model, files, wanted, weights)
    missing = lacking([*small_files(files, wanted), *weights])
    if missing:
        download = Download(cache, commit, missing, listener)
        download.check_space()
        download.run()


def _find(cache: Cache, revision: str, wanted: Wanted, error: Exception) -> Snapshot:
    """The model in the cache, although the hub did not say which commit the revision is now: `error` says why.

    Raises DownloadError, with the reason, if the cache lacks it.
    """
    problem = explain(error, cache.model, revision)
    commit = cache.commit(revision)
    if commit is None or not cache.snapshot(commit).is_dir():
        missing = f"revision {revision} of {cache.model} is not on disk: the cache {cache.root} has"
        raise DownloadError(
            problem if is_answer(error) else f"{problem}; {missing} {listed(cache.models())}"
        ) from error
    lacks = cache.lacks(commit, wanted)
    if lacks:
        missing = f"the cache {cache.root} lacks {listed(lacks)} of {cache.model}, whose download has not ended"
        raise DownloadError(problem if is_answer(error) else f"{problem}; {missing}") from error
    level = logging.INFO if is_offline(error) else logging.WARNING
    log.log(level, "%s; using commit %s of %s, which is in the cache", problem, commit, cache.model)
    return Snapshot(model=cache.model, commit=commit, directory=cache.snapshot(commit))
