from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from engine.core import types
from engine.core.config.tree import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core.errors import EngineError
from engine.core.executors.wire import MessageDecoder, encode

LOGPROBS = types.TokenLogprobs(token=7, logprob=-0.25, rank=2, top=((3, -0.125), (7, -0.25)))
PARAMS = types.SamplingParams(
    max_tokens=5,
    temperature=0.5,
    logit_bias=((3, -1.5), (9, 2.0)),
    seed=types.MAX_SEED,
    logprobs=2,
    stop=("\n\n", "é"),
    stop_token_ids=(4,),
    ignore_eos=True,
)
MESSAGES = [
    PARAMS,
    types.SamplingParams(),
    types.Request(id="a", prompt=(1, 2, 3), params=PARAMS, priority=-3, arrival=1.5, salt="s"),
    LOGPROBS,
    types.NewSequence(sequence=1, tokens=(5, 6), prompt_len=1, params=PARAMS),
    types.PrefillChunk(1, 0, 16, True),
    types.Step(
        id=3,
        decodes=(1, 4),
        chunks=(types.PrefillChunk(2, 0, 16, False),),
        new=(types.NewSequence(sequence=2, tokens=tuple(range(16)), prompt_len=16, params=PARAMS),),
        blocks=((2, (5, 6)),),
        finished=(0,),
        drafts=(types.DraftSlice(5, 9, (3, 4, 5)),),
        positions=((6, 12),),
    ),
    types.DraftSlice(5, 9, (3, 4, 5)),
    types.StepResult(
        step=3,
        tokens=((5, 6),),
        logprobs=((LOGPROBS, None),),
        verified=((4, 6), (7,)),
        verified_logprobs=((LOGPROBS, LOGPROBS), ()),
        prompt_logprobs=((2, (LOGPROBS, LOGPROBS)),),
        seconds=(("forward", 0.01),),
    ),
    types.RequestTimes(arrival=1.0, scheduled=2.0, first_token=3.0, finished=4.0),
    types.Output(
        request="a",
        tokens=(1, 2),
        logprobs=(LOGPROBS, LOGPROBS),
        prompt_logprobs=(LOGPROBS,),
        finish_reason="stop",
        stop_token=2,
        cached_tokens=16,
        times=types.RequestTimes(arrival=1.0, scheduled=2.0, first_token=3.0, finished=4.0),
    ),
    types.Output(request="b", finish_reason="error", error="a sentence"),
    types.Output(request="c", tokens=(1,), prediction_tokens=(3, 1)),
    types.Request(id="d", prompt=(1, 2), prediction=(3, 4)),
    types.CacheInfo(
        num_blocks=8,
        block_size=16,
        weights_bytes=1,
        activation_bytes=2,
        kv_bytes=2**40,
        budget_bytes=2**41,
        device="a device",
        dtype="float32",
        kv_dtype="float32",
        kinds=(types.FULL, types.BlockKind(name="window 8", window=8, groups=2, layers=3)),
    ),
    types.FULL,
    types.EngineStats(
        running=3,
        prefix_hits=2**40,
        blocks_by_kind=(("full", 1, 2),),
        seconds=(("schedule", 0.5), ("wait", 1.5)),
        step_tokens=types.HistogramCounts((1, 2, 0), 2.5),
    ),
    types.EngineStats(cache=types.CacheStats(sample=0.5), kv_events=(3, 1)),
    types.EngineStats(speculation=types.SpeculationStats(verified=(3, 2), accepted=(2, 0), faults=1)),
    types.SpeculationStats(verified=(3, 2), accepted=(2, 0), faults=1),
    types.CacheStats(sample=0.5, lifetime=types.HistogramCounts((1, 2), 3.5), tenants=(("a", 1, 2),), total_slots=9),
    types.HistogramCounts((1, 2, 0), 2.5),
    EngineConfig(
        model=ModelConfig(path="/some/where", options={"a": [1, {"b": None}]}),
        scheduler=SchedulerConfig(max_running=3),
        cache=CacheConfig(prefix_caching=False),
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_encoding_and_decoding(message: object) -> None:
    again = MessageDecoder[object](type(message)).decode(encode(message))
    assert again == message
    assert type(again) is type(message)


def test_values_of_derived_classes_are_sent_as_plain_ones() -> None:
    class Text(str):
        __slots__ = ()

    class Whole(int):
        pass

    given = types.SamplingParams(temperature=np.float64(0.5), max_tokens=Whole(3), stop=[Text("a")])  # type: ignore[arg-type]
    again = MessageDecoder[types.SamplingParams](types.SamplingParams).decode(encode(given))
    assert again == types.SamplingParams(temperature=0.5, max_tokens=3, stop=("a",))
    assert [type(value) for value in (again.temperature, again.max_tokens, again.stop[0])] == [float, int, str]


def test_every_class_that_travels_is_tried() -> None:
    travelling = {kind for kind in (getattr(types, name) for name in types.__all__) if isinstance(kind, type)}
    assert travelling <= {type(message) for message in MESSAGES}


def test_tuples_stay_tuples() -> None:
    step = next(message for message in MESSAGES if isinstance(message, types.Step))
    again = MessageDecoder[types.Step](types.Step).decode(encode(step))
    assert isinstance(again.blocks, tuple)
    assert isinstance(again.blocks[0], tuple)
    assert isinstance(again.blocks[0][1], tuple)


@given(st.lists(st.integers(0, 2**31)), st.text(), st.floats(-1e30, 0))
def test_round_trip_of_any_output(tokens: list[int], text: str, logprob: float) -> None:
    entry = types.TokenLogprobs(token=0, logprob=logprob, rank=1)
    text = text.encode(errors="replace").decode()
    output = types.Output(request=text, tokens=tuple(tokens), logprobs=(entry,), error=text)
    assert MessageDecoder[types.Output](types.Output).decode(encode(output)) == output


def test_minus_infinity_travels() -> None:
    entry = types.TokenLogprobs(token=0, logprob=-math.inf, rank=1)
    assert MessageDecoder[types.TokenLogprobs](types.TokenLogprobs).decode(encode(entry)) == entry


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", encode({"request": 1}), encode([1, 2])])
def test_anything_else_is_an_error(data: bytes) -> None:
    with pytest.raises(EngineError, match=r"a message could not be read as .*Output"):
        MessageDecoder[types.Output](types.Output).decode(data)


@pytest.mark.parametrize("tokens", [7, [1, 2], "text", None, b"123"], ids=str)
def test_decode_raises_an_engine_error_when_tokens_are_of_another_type(tokens: object) -> None:
    data = encode({"sequence": 1, "tokens": tokens, "prompt_len": 1, "params": {}})
    with pytest.raises(EngineError, match=r"a message could not be read as .*NewSequence.* at `\$\.tokens`"):
        MessageDecoder[types.NewSequence](types.NewSequence).decode(data)


def test_a_bad_value_is_refused_by_its_own_class() -> None:
    data = encode({"temperature": -1.0})
    with pytest.raises(EngineError, match="temperature"):
        MessageDecoder[types.SamplingParams](types.SamplingParams).decode(data)
