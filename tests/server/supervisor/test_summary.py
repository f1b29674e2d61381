from __future__ import annotations

import json
import shlex
from collections.abc import Callable

from attrs import evolve
from msgspec.structs import replace

from engine.core.config.tree import EngineConfig
from engine.core.plugin_host import ChosenPlugin
from engine.core.types import CacheInfo, SamplingParams
from engine.server.shared.messages import Started
from engine.server.supervisor.summary import curl, summary

STARTED = Started(
    cache=CacheInfo(
        num_blocks=64,
        block_size=16,
        weights_bytes=3 * 2**20,
        activation_bytes=512,
        kv_bytes=2 * 2**30,
        budget_bytes=3 * 2**30,
        device="a small box",
        dtype="float32",
        phases=(("import", 0.3), ("device", 0.01), ("weights", 0.75)),
    ),
    choices=(
        ChosenPlugin(extension_point="attention", name="first", provenance="somewhere 1.0", reason="nothing else ran"),
    ),
    max_len=512,
    vocab_size=10,
    default_params=SamplingParams(),
    seconds=1.25,
)


def test_summary_lists_plugins_memory_and_address(fake_config: Callable[..., EngineConfig]) -> None:
    text = summary(STARTED, fake_config(), "http://127.0.0.1:8123")
    for words in (
        "tiny on a small box, float32, context 512 tokens, loaded in 1.2 s",
        "attention  first  somewhere 1.0: nothing else ran",
        "3.00 MiB",
        "512 B",
        "2.00 GiB",
        "64 blocks of 16 tokens, 2.0 contexts of full length",
        "loaded in 1.2 s\n  weights 0.8 s, import 0.3 s\n\n",
        "Listening on http://127.0.0.1:8123",
    ):
        assert words in text


def test_summary_lists_compiled_kernels_where_there_may_be_some(fake_config: Callable[..., EngineConfig]) -> None:
    assert "kernels" not in summary(STARTED, fake_config(), "http://h:1")
    started = replace(STARTED, cache=evolve(STARTED.cache, kernel_bytes=200 * 2**20))
    assert "kernels      200.00 MiB  oneDNN's, at most" in summary(started, fake_config(), "http://h:1")


def test_summary_names_the_dtype_of_a_quantized_cache(fake_config: Callable[..., EngineConfig]) -> None:
    for kv_dtype, said in (("float32", "full length\n"), ("float8_e4m3fn", "full length, in float8_e4m3fn\n")):
        started = replace(STARTED, cache=evolve(STARTED.cache, kv_dtype=kv_dtype))
        assert said in summary(started, fake_config(), "http://h:1")


def test_summary_says_for_how_many_sequences_there_are_states(fake_config: Callable[..., EngineConfig]) -> None:
    some = evolve(STARTED.cache, states=3, state_bytes=2**20, state_rows=7, blocks_per_context=16)
    alone = evolve(some, kinds=(), num_blocks=0, kv_bytes=0, blocks_per_context=0)
    texts = [summary(replace(STARTED, cache=cache), fake_config(), "http://h:1") for cache in (some, alone)]
    for text in texts:
        lines = [" ".join(line.split()) for line in text.splitlines()]
        assert "states 1.00 MiB 3 layers, a state per sequence for 7 sequences; so no prefix is reused" in lines
    assert "64 blocks of 16 tokens, 4.0 contexts of full length\n" in texts[0]
    assert "KV cache" not in texts[1]


def test_curl_command_is_valid_shell_without_secrets(fake_config: Callable[..., EngineConfig]) -> None:
    words = shlex.split(curl(fake_config(), "http://h:1"))
    assert words[:2] == ["curl", "http://h:1/v1/completions"]
    assert json.loads(words[-1])["model"] == "tiny"
    assert "secret" not in curl(fake_config(api_key=("secret",)), "http://h:1")
    assert "Authorization: Bearer $API_KEY" in curl(fake_config(api_key=("secret",)), "http://h:1")


def test_curl_reaches_a_unix_domain_socket(fake_config: Callable[..., EngineConfig]) -> None:
    assert curl(fake_config(), "unix:/tmp/a b").startswith("curl --unix-socket '/tmp/a b' http://localhost/v1/")


def test_the_page_is_named_where_there_is_one(fake_config: Callable[..., EngineConfig]) -> None:
    line = "or talk to the model in a browser: http://h:1/\n"
    assert line in summary(STARTED, fake_config(), "http://h:1")
    assert "browser" not in summary(STARTED, fake_config(page=False), "http://h:1")
    assert "browser" not in summary(STARTED, fake_config(), "unix:/tmp/a")
