"""Fetching a model: huggingface_hub and the engine's own part of it against a local hub."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from engine.cli.main import app
from engine.core.config import ModelConfig
from engine.core.errors import ConfigError, DownloadError
from engine.core.hub import CONFIG_ONLY, Wanted, fetch, locate
from engine.core.hub.cache import Cache
from engine.core.startup import Progress
from engine.core.types import SamplingParams

from .hub_server import Hub

if TYPE_CHECKING:
    from engine.core.engine import Engine

NAME = "Some-Org/tiny_model.1"
WEIGHTS = os.urandom(300_000)
FILES: dict[str, Any] = {
    "config.json": "{}",
    "tokenizer.json": '{"a": 1}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"x" * 1000,
    "README.md": "read me",
}


def directory_of(name: str = NAME) -> Path:
    """The only directory of a model in the cache."""
    [directory] = Cache.of(name).folder.glob("snapshots/*")
    return directory


def test_a_remembered_commit_can_be_read_by_all_who_may_read_a_new_file(tmp_path: Path) -> None:
    cache, plain = Cache(tmp_path, NAME), tmp_path / "plain"
    cache.remember("main", "0" * 40)
    plain.touch()
    [ref] = (cache.folder / "refs").iterdir()
    assert oct(ref.stat().st_mode) == oct(plain.stat().st_mode)
    assert cache.commit("main") == "0" * 40


def test_the_first_report_comes_before_any_thread_downloads(hub: Hub) -> None:
    hub.add(NAME, FILES)
    running: list[set[str]] = []
    fetch(NAME, listener=lambda _: running.append({thread.name for thread in threading.enumerate()}))
    assert "download" not in running[0]


def test_fetch_downloads_what_is_needed_and_only_asks_for_the_commit_later(hub: Hub) -> None:
    commit = hub.add(NAME, FILES)
    seen: list[Progress] = []
    found = fetch(NAME, listener=seen.append)
    assert (found.commit, found.directory, found.model) == (commit, directory_of(), NAME)
    assert {file.name for file in found.directory.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (found.directory / "model.safetensors").read_bytes() == WEIGHTS
    total = len(WEIGHTS) + 2 + 8
    assert (seen[0].done, seen[-1].done, {one.total for one in seen}) == (0, total, {total})
    hub.requests.clear()
    assert fetch(NAME) == found
    assert [one.path for one in hub.requests] == [f"/api/models/{NAME}/revision/main"]


def test_fetch_reads_the_index_for_the_names_of_the_weights(hub: Hub) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {**FILES, "model.safetensors.index.json": json.dumps(index)}
    files |= {f"model-{number}.safetensors": os.urandom(1000) for number in (1, 2, 3)}
    hub.add(NAME, files)
    names = {file.name for file in fetch(NAME).directory.glob("*.safetensors*")}
    assert names == {"model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"}


def test_fetch_takes_a_branch_a_tag_or_a_commit(hub: Hub) -> None:
    commits = {
        revision: hub.add(NAME, {**FILES, "config.json": f'"{revision}"'}, revision) for revision in ("main", "v1")
    }
    for revision, commit in [*commits.items(), (commits["v1"], commits["v1"])]:
        found = fetch(NAME, revision=revision)
        assert found.commit == commit
    assert hub.asked()["model.safetensors"] == 1, "equal content is one file of the cache"


def test_fetch_leaves_the_weights_out_unless_they_are_wanted(hub: Hub) -> None:
    hub.add(NAME, {**FILES, "modeling.py": "pass"})
    fetch(NAME, wanted=CONFIG_ONLY)
    assert {file.name for file in directory_of().iterdir()} == {"config.json"}
    fetch(NAME, wanted=Wanted(weights=False, code=True))
    assert {file.name for file in directory_of().iterdir()} == {"config.json", "tokenizer.json", "modeling.py"}


@pytest.mark.parametrize("ranges", [True, False])
def test_fetch_continues_where_the_connection_was_cut(hub: Hub, ranges: bool) -> None:
    hub.add(NAME, FILES)
    hub.cuts["model.safetensors"], hub.ranges = 100_000, ranges
    assert (fetch(NAME).directory / "model.safetensors").read_bytes() == WEIGHTS
    begins = [one.begin for one in hub.requests if one.method == "GET" and one.path.endswith("model.safetensors")]
    assert begins == [None, 100_000]


@pytest.mark.parametrize("kept", [100_000, len(WEIGHTS)])
def test_fetch_continues_what_an_earlier_process_has_left(hub: Hub, kept: int) -> None:
    hub.add(NAME, FILES)
    part = leave_part(WEIGHTS[:kept])
    seen: list[Progress] = []
    assert (fetch(NAME, listener=seen.append).directory / "model.safetensors").read_bytes() == WEIGHTS
    assert seen[0].done == kept
    begins = [one.begin for one in hub.requests if one.method == "GET" and one.path.endswith("model.safetensors")]
    assert begins == ([kept] if kept < len(WEIGHTS) else [])
    assert not part.exists()


def leave_part(data: bytes) -> Path:
    """What an interrupted download of the weights leaves."""
    part = Cache.of(NAME).part(hashlib.sha256(WEIGHTS).hexdigest())
    part.parent.mkdir(parents=True)
    part.write_bytes(data)
    return part


@pytest.mark.parametrize("wrong", [b"other" * 20_000, b"x" * (len(WEIGHTS) + 1)], ids=["other content", "too long"])
def test_fetch_begins_again_when_a_part_is_of_something_else(hub: Hub, wrong: bytes) -> None:
    hub.add(NAME, FILES)
    leave_part(wrong)
    assert (fetch(NAME).directory / "model.safetensors").read_bytes() == WEIGHTS


def test_fetch_says_so_and_keeps_what_has_come_when_the_connection_breaks_for_good(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, FILES)
    hub.cuts["model.safetensors"] = 100_000
    monkeypatch.setattr("engine.core.hub.download.TRIES", 1)
    with pytest.raises(DownloadError, match=r"ended early: .* cannot be reached .*; what has arrived stays"):
        fetch(NAME)
    hub.requests.clear()
    fetch(NAME)
    assert [one.begin for one in hub.requests if one.method == "GET" and "model.safetensors" in one.path] == [100_000]


def test_fetch_sends_the_token_to_the_hub_and_not_to_its_storage(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, FILES, private=True, token="secret")
    hub.redirects = True
    hub.cuts["model.safetensors"] = 100_000
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert (fetch(NAME).directory / "model.safetensors").read_bytes() == WEIGHTS
    about_model = [one for one in hub.requests if NAME in one.path or one.server == "storage"]
    tokens = {(one.server, one.headers.get("authorization")) for one in about_model}
    assert tokens == {("hub", "Bearer secret"), ("storage", None)}
    assert [one.begin for one in hub.requests if one.server == "storage"] == [None, 100_000]


OFFLINE = ("offline", "network down", "server error")


def cut_off(how: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no request be answered any more."""
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "network down":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        hub.status = 503


@pytest.mark.parametrize("how", OFFLINE)
def test_fetch_uses_the_cache_when_the_hub_does_not_answer(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    hub.add(NAME, FILES)
    found = fetch(NAME)
    cut_off(how, hub, monkeypatch)
    assert fetch(NAME) == fetch(NAME, revision=found.commit) == found
    warned = [one for one in caplog.records if "which is in the cache" in one.message and one.levelno > logging.INFO]
    assert bool(warned) == (how != "offline")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("offline", ("HF_HUB_OFFLINE is set",)),
        ("network down", ("http://127.0.0.1:9 cannot be reached", "ConnectError")),
        ("server error", ("answers 503", "try again later")),
    ],
)
def test_fetch_says_what_is_in_the_cache_when_the_model_is_not(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, how: str, words: tuple[str, ...]
) -> None:
    hub.add("other/model", FILES)
    fetch("other/model")
    cut_off(how, hub, monkeypatch)
    with pytest.raises(DownloadError) as raised:
        fetch(NAME)
    for word in (*words, f"revision main of {NAME} is not on disk", "has other/model"):
        assert word in str(raised.value)


def test_fetch_says_what_the_cache_lacks_when_it_has_half_of_the_model(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, FILES)
    fetch(NAME, wanted=CONFIG_ONLY)
    cut_off("offline", hub, monkeypatch)
    fetch(NAME, wanted=CONFIG_ONLY)
    with pytest.raises(DownloadError, match=r"HF_HUB_OFFLINE.* lacks model\.safetensors of .*, whose download"):
        fetch(NAME)


def test_fetch_offline_gives_the_old_commit_when_a_newer_one_was_fetched_in_part(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = hub.add(NAME, FILES)
    fetch(NAME)
    hub.add(NAME, {**FILES, "model.safetensors": os.urandom(200_000)})
    hub.cuts["model.safetensors"] = 100_000
    monkeypatch.setattr("engine.core.hub.download.TRIES", 1)
    with pytest.raises(DownloadError):
        fetch(NAME)
    cut_off("offline", hub, monkeypatch)
    assert fetch(NAME).commit == old


def test_fetch_refuses_a_download_that_does_not_fit_on_the_disk(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, FILES)
    leave_part(WEIGHTS[:100_000])
    usage = shutil.disk_usage("/")._replace(free=50_000)
    monkeypatch.setattr("engine.core.hub.download.shutil.disk_usage", lambda _: usage)
    with pytest.raises(DownloadError) as raised:
        fetch(NAME)
    for word in ("200 kB more", str(Cache.of(NAME).root), "50 kB are free", "make room for 150 kB", "--download-dir"):
        assert word in str(raised.value)
    assert not hub.asked()


def test_fetch_names_the_folder_that_cannot_be_written(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, FILES)
    (tmp_path / "file").touch()
    with pytest.raises(DownloadError, match=r"file.* cannot be written \(Not a directory\); name another folder"):
        fetch(NAME, download_dir=str(tmp_path / "file"))


@pytest.mark.parametrize("token", ["", "other"])
def test_fetch_says_what_to_do_when_the_hub_refuses(hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    hub.add(NAME, FILES, gated=True, token="secret")
    hub.add("org/private", FILES, private=True, token="secret")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    expected = {
        NAME: (f"is gated; accept its terms at {hub.url}/{NAME}", "no access yet" if token else "hf auth login"),
        "org/private": ("neither a directory here nor", "that your token may read" if token else "that is public"),
        "org/missing": ("neither a directory here nor", hub.url),
        "org/not..possible": ("possible name",),
    }
    for name, words in expected.items():
        with pytest.raises(DownloadError) as raised:
            fetch(name)
        for word in words:
            assert word in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("generate", "org/gated", "x"), "org/gated is gated; accept its terms at"),
        (("quantize", "org/missing", "out", "--method", "fp8"), "org/missing is neither a directory here nor"),
        (("download", "org/gated", "--json"), "org/gated is gated"),
        (("download", "missing"), "missing is not the name of a model on the hub"),
    ],
)
def test_commands_say_in_one_sentence_why_a_model_cannot_be_fetched(
    hub: Hub, arguments: tuple[str, ...], sentence: str
) -> None:
    hub.add("org/gated", {"config.json": "{}", "model.safetensors": b"x"}, gated=True, token="secret")
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith(f"error: {sentence}")


def test_fetch_reads_a_gated_model_with_its_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, FILES, gated=True, token="secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert (fetch(NAME).directory / "model.safetensors").read_bytes() == WEIGHTS


def test_fetch_uses_the_cache_with_a_warning_when_a_model_is_not_public_any_more(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add(NAME, FILES)
    found = fetch(NAME)
    hub.repositories[NAME].private, hub.repositories[NAME].token = True, "secret"
    assert fetch(NAME) == found
    assert f"using commit {found.commit}" in caplog.text


def test_fetch_refuses_a_revision_that_the_model_does_not_have(hub: Hub) -> None:
    hub.add(NAME, FILES)
    with pytest.raises(DownloadError, match=rf"{NAME} has no revision 'v9'; give a branch, tag or commit"):
        fetch(NAME, revision="v9")


def test_fetch_refuses_a_repository_without_safetensors_before_it_downloads(hub: Hub) -> None:
    hub.add(NAME, {"config.json": "{}", "pytorch_model.bin": b"x"})
    with pytest.raises(DownloadError, match=r"no weights as safetensors: it has pickles"):
        fetch(NAME)
    assert not hub.asked()


def test_fetch_names_a_server_that_is_no_hub(hub: Hub) -> None:
    hub.status = 200
    with pytest.raises(DownloadError, match="does not answer as a hub of models does"):
        fetch(NAME)


def test_engine_takes_a_name_of_the_hub(hub: Hub, engine_checkpoint: Path, make_engine: Callable[..., Engine]) -> None:
    commit = hub.add(NAME, {file.name: file.read_bytes() for file in engine_checkpoint.iterdir()})
    engine = make_engine(model=NAME)
    assert (engine.config.model.served_name, engine.config.model.revision) == (NAME, commit)
    assert "download" in dict(engine.cache_info.phases)
    assert len(engine.generate(["def f("], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_engine_takes_the_name_of_a_draft_model(
    hub: Hub, engine_checkpoint: Path, make_engine: Callable[..., Engine]
) -> None:
    commit = hub.add(NAME, {file.name: file.read_bytes() for file in engine_checkpoint.iterdir()})
    engine = make_engine(speculator="draft_model", speculator__model=NAME)
    assert Path(engine.config.speculator.model).name == commit
    assert "download" in dict(engine.cache_info.phases)
    assert engine.parts.drafter is not None


def test_engine_downloads_nothing_when_settings_of_a_speculator_come_without_one(
    hub: Hub, make_engine: Callable[..., Engine]
) -> None:
    hub.add(NAME, FILES)
    with pytest.raises(ConfigError, match=r"speculator\.model is set, but no speculator is chosen"):
        make_engine(model=NAME, speculator__model=NAME)
    assert not hub.requests


def test_command_downloads_nothing_when_settings_of_a_speculator_come_without_one(hub: Hub) -> None:
    hub.add(NAME, FILES)
    result = CliRunner().invoke(app, ["bench", "startup", "--model", NAME, "--speculator-model", NAME])
    assert result.exit_code == 2
    assert "speculator.model is set, but no speculator is chosen" in result.stderr
    assert not hub.requests


def test_locate_replaces_names_by_directories(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add(NAME, FILES)
    hub.add("org/tokens", {"tokenizer.json": "{}"})
    settings = ModelConfig(path=NAME, tokenizer="org/tokens", download_dir=str(tmp_path / "models"))
    found = locate(settings)
    assert (found.revision, found.served_name) == (commit, NAME)
    assert Path(found.path) == tmp_path / f"models/models--Some-Org--tiny_model.1/snapshots/{commit}"
    assert not (Path(found.path) / "tokenizer.json").exists(), "another tokenizer is wanted"
    assert (Path(found.tokenizer) / "tokenizer.json").exists()
    hub.requests.clear()
    assert locate(found) == found, "as in a process that gets the settings of another"
    assert not hub.requests


def test_locate_keeps_a_path_that_exists(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, FILES)
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert locate(ModelConfig(path=NAME)) == ModelConfig(path=NAME)
    assert not hub.requests
    with pytest.raises(ConfigError, match="--revision v1 is for a model of the hub"):
        locate(ModelConfig(path=NAME, revision="v1"))


def test_locate_fetches_no_weights_for_random_ones(hub: Hub) -> None:
    hub.add(NAME, FILES)
    found = locate(ModelConfig(path=NAME, load_format="dummy"))
    assert {file.name for file in Path(found.path).iterdir()} == {"config.json", "tokenizer.json"}
