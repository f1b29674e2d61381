"""Arguments of Engine and its methods: what each accepts, and a sentence for a value of any other type."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import engine.demo
from engine.core import Completion, Engine, EngineConfig, SamplingParams
from engine.core.config import default_model
from engine.core.errors import ConfigError, InvalidRequestError, PluginError
from engine.testing.checkpoints import make_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = {"executor__device": "cpu", "cache__memory": "8MiB", "model__max_len": 128}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Iterator[Engine]:
    with Engine(checkpoint, **SMALL, scheduler="priority") as made:
        yield made


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [one.token_ids for one in completions]


@pytest.mark.parametrize(
    "prompts",
    [5, None, 1.5, b"text", {"a": 1}, [5.0], [b"text"], [["a"]], [[1.5]], [[True]], [None], [[1, None]], [{}], [1, 2]],
)
def test_generate_refuses_what_is_no_prompt(shared: Engine, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompts? (must be|is) a") as caught:
        shared.generate(prompts, GREEDY)
    assert caught.value.parameter == "prompt"
    assert not shared.has_work


@pytest.mark.parametrize("params", [5, "greedy", {"max_tokens": 3}, [5], [{"max_tokens": 3}], b"x"])
def test_params_of_a_wrong_type_are_refused(shared: Engine, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"params must be SamplingParams\(\.\.\.\)") as caught:
        shared.generate(["text"], params)
    assert caught.value.parameter == "params"


@pytest.mark.parametrize("name", ["n", "priority"])
@pytest.mark.parametrize("value", ["1", 1.0, None, True, -(2**40)])
def test_numbers_of_a_wrong_type_are_refused(shared: Engine, name: str, value: Any) -> None:
    for call in (shared.generate, shared.chat):
        with pytest.raises(InvalidRequestError, match=rf"^{name} must be a whole number of at least") as caught:
            call([{"role": "user", "content": "hello"}] if call == shared.chat else "text", **{name: value})
        assert caught.value.parameter == name


@pytest.mark.parametrize("prompt", [5, None, b"text", ["a"], [1.5], {"a": 1}])
def test_streams_refuse_what_is_no_prompt(shared: Engine, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="a prompt must be"):
        shared.stream(prompt)
    with pytest.raises(InvalidRequestError, match="a prompt must be"):
        shared.astream(prompt)
    for call in (shared.stream, shared.astream):
        with pytest.raises(InvalidRequestError, match="params must be"):
            call("text", prompt or 5)


@pytest.mark.parametrize("request_", ["text", 5, None, [1, 2, 3]])
def test_add_refuses_what_is_no_request(shared: Engine, request_: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^add takes a Request\(\.\.\.\), not"):
        shared.add(request_)


def test_prompts_may_be_of_any_sequence(shared: Engine) -> None:
    expected = tokens(shared.generate([[1, 2, 3]], GREEDY))
    for prompt in ((1, 2, 3), range(1, 4), np.array([1, 2, 3]), torch.tensor([1, 2, 3])):
        assert tokens(shared.generate([prompt], GREEDY)) == expected  # type: ignore[list-item]
    assert tokens(shared.generate(iter([[1, 2, 3]]), iter([GREEDY]))) == expected
    assert tokens(shared.generate(([1, 2, 3],), (None,)))[0] != ()


def test_several_completions_of_a_prompt_follow_each_other(shared: Engine) -> None:
    several = tokens(shared.generate(["one", "other"], DRAWN, n=3))
    alone = [
        tokens(shared.generate([prompt], DRAWN.of_choice(choice)))[0]
        for prompt in ("one", "other")
        for choice in range(3)
    ]
    assert several == alone
    assert len(set(several)) == 6
    assert tokens(shared.generate("one", GREEDY, n=2)) == tokens(shared.generate(["one", "one"], GREEDY))


def test_priority_reaches_the_scheduler(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    add = Engine.add
    monkeypatch.setattr(Engine, "add", lambda self, request: (seen.append(request.priority), add(self, request)))
    shared.generate(["a", "b"], GREEDY, priority=-3)
    shared.chat([{"role": "user", "content": "a"}], GREEDY, priority=4)
    assert seen == [-3, -3, 4]


def test_chat_generates_after_the_template(shared: Engine) -> None:
    one = [{"role": "user", "content": "hello"}]
    two = [*one, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so"}]
    prompts = [shared.tokenizer.chat(conversation) for conversation in (one, two)]
    expected = tokens(shared.generate(prompts, GREEDY))
    assert tokens(shared.chat(one, GREEDY)) == expected[:1]
    assert tokens(shared.chat([one, two], GREEDY)) == expected
    assert tokens(shared.chat([one, two], [GREEDY, DRAWN], n=2)) == tokens(
        shared.generate(prompts, [GREEDY, DRAWN], n=2)
    )
    unprompted = shared.tokenizer.chat(one, add_generation_prompt=False)
    assert tokens(shared.chat(one, GREEDY, add_generation_prompt=False)) == tokens(
        shared.generate([unprompted], GREEDY)
    )


@pytest.mark.parametrize("messages", ["hello", 5, None, {"role": "user"}, ["hello"], [{"content": "x"}], [[5]], b"x"])
def test_chat_refuses_what_is_no_conversation(shared: Engine, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r'messages must be a list of messages like \{"role"') as caught:
        shared.chat(messages, GREEDY)
    assert caught.value.parameter == "messages"


@pytest.mark.parametrize("messages", [[], [[]]])
def test_chat_refuses_an_empty_conversation(shared: Engine, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages is empty"):
        shared.chat(messages, GREEDY)


def test_astream_takes_checked_arguments(shared: Engine) -> None:
    async def collect() -> tuple[int, ...]:
        return tuple([token async for delta in shared.astream([1, 2, 3], GREEDY) for token in delta.tokens])

    assert [asyncio.run(collect())] == tokens(shared.generate([[1, 2, 3]], GREEDY))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": 5}, r"model\.path"),
        ({"config": {"max_len": 5}}, "config must be an EngineConfig, not"),
        ({"attention": 5}, "the attention passed in is"),
        ({"quant": [1]}, "the quant passed in is"),
        ({"scheduler": 3.0}, "the scheduler passed in is"),
        ({"executor": b"x"}, "the executor passed in is"),
        ({"plugins": "fcfs"}, "plugins must be"),
        ({"on_progress": 3}, "on_progress must be a function"),
        ({"max_running": 1.5}, "expected a whole number"),
        ({"max_running": None}, "expected a whole number"),
        ({"cache__memory": [1]}, "expected a string"),
        ({"model__trust_remote_code": "yes"}, "expected true or false"),
        ({"nonsense": 1}, "nonsense"),
        ({"cache": {}}, "cache is a section"),
    ],
)
def test_engine_refuses_settings_of_a_wrong_type(checkpoint: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=said):
        Engine(**{"model": checkpoint, **SMALL, **given})


def test_engine_serves_the_demo_model_if_none_is_named() -> None:
    with Engine(**SMALL) as made, Engine(config=EngineConfig(), **SMALL) as other:
        assert made.config.model.path == other.config.model.path == str(engine.demo.path())
        assert made.generate("def add(a, b):", GREEDY)[0].text


def test_engine_without_any_model_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Path:
        raise FileNotFoundError

    monkeypatch.setattr(engine.demo, "path", absent)
    assert default_model.demo_model() == ""
    with pytest.raises(ConfigError, match="--model"):
        Engine(**SMALL)
