"""Whole engines: output does not depend on batching, chunking, block size, prefix hits, preemption or overlap."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.core import Engine, Request, SamplingParams, build_step_loop
from engine.core.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ControlError,
    ExecutorError,
    InvalidRequestError,
    PluginError,
)
from engine.core.sampling import prompt_logprobs
from engine.core.sampling.token_counts import TokenCounts
from engine.core.schedulers.policy import RequestView, SchedulingPolicy
from engine.core.startup import Progress
from engine.core.text.detokenizer import TextDelta
from engine.core.types import Output
from engine.plugins.executors.uniproc import UniprocExecutor
from engine.testing.checkpoints import make_checkpoint
from engine.testing.ranks import threaded_ranks

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(7 * row + 3 * column) % 256 for column in range(5 + 13 * row)] for row in range(6)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


def build(checkpoint: Path, **settings: Any) -> Engine:
    return Engine(
        model=str(checkpoint), **{"executor__device": "cpu", "cache__memory": "8MiB", "model__max_len": 256, **settings}
    )


def test_settings_may_be_named_as_options_are(checkpoint: Path) -> None:
    with build(checkpoint, model__max_len=64, max_num_seqs=3, page_size=32) as engine:
        assert (engine.config.scheduler.max_running, engine.config.cache.block_size) == (3, 32)
    with pytest.raises(ConfigError, match="max_model_len and max_len are one setting"):
        build(checkpoint, max_model_len=64)


def tokens_of(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY
) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in engine.generate(prompts, params)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    """Output of each prompt run alone, in one chunk, without prefix cache."""
    with build(checkpoint, cache__prefix_caching=False) as engine:
        return [tokens_of(engine, [prompt])[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Iterator[Engine]:
    with build(checkpoint) as engine:
        yield engine


def test_start_reports_and_times_its_phases(checkpoint: Path) -> None:
    reported: list[Progress] = []
    begin = time.perf_counter()
    with build(checkpoint, on_progress=reported.append) as engine:
        seconds_total = time.perf_counter() - begin
        phases = dict(engine.cache_info.phases)
        assert list(dict.fromkeys(one.phase for one in reported)) == list(phases)
        assert {"checkpoint", "import", "device", "plugins", "weights", "memory", "kv_cache"} <= set(phases)
        assert all(seconds >= 0 for seconds in phases.values())
        assert 0 < sum(phases.values()) <= seconds_total
        [*_, weights] = [one for one in reported if one.phase == "weights"]
        assert weights.done == weights.total > 0


def test_the_budget_covers_penalties_of_all_running_requests(shared: Engine) -> None:
    info, running = shared.cache_info, shared.config.scheduler.max_running
    assert info.penalty_bytes == TokenCounts.max_bytes(shared.vocab_size, running) >= running * shared.vocab_size * 5
    parts = info.weights_bytes + info.activation_bytes + info.penalty_bytes + info.kv_bytes
    assert parts <= info.budget_bytes


def test_output_does_not_depend_on_batch_composition(shared: Engine, expected: list[tuple[int, ...]]) -> None:
    assert tokens_of(shared, PROMPTS) == expected
    assert tokens_of(shared, PROMPTS[::-1]) == expected[::-1]


@pytest.mark.parametrize("chunk", [1, 3, 16, 17, 64])
def test_output_does_not_depend_on_chunk_size(checkpoint: Path, expected: list[tuple[int, ...]], chunk: int) -> None:
    with build(checkpoint, scheduler__max_batch_tokens=chunk) as engine:
        assert tokens_of(engine, PROMPTS) == expected
        assert engine.stats().steps > len(PROMPTS[-1]) // chunk


@pytest.mark.parametrize("block_size", [1, 4, 64])
def test_output_does_not_depend_on_block_size(
    checkpoint: Path, expected: list[tuple[int, ...]], block_size: int
) -> None:
    with build(checkpoint, cache__block_size=block_size) as engine:
        assert tokens_of(engine, PROMPTS) == expected


def test_output_does_not_depend_on_prefix_hits(checkpoint: Path, expected: list[tuple[int, ...]]) -> None:
    with build(checkpoint) as engine:
        first = engine.generate(PROMPTS, GREEDY)
        again = engine.generate(PROMPTS, GREEDY)
        assert [completion.token_ids for completion in first] == expected
        assert [completion.token_ids for completion in again] == expected
        assert [completion.cached_tokens for completion in again] == [(len(p) - 1) // 16 * 16 for p in PROMPTS]
        assert engine.stats().prefix_hits == sum(completion.cached_tokens for completion in (*first, *again))


@pytest.mark.parametrize("chunk", [16, 50, 1024])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_output_does_not_depend_on_equal_prompts_that_run_together(
    checkpoint: Path, expected: list[tuple[int, ...]], chunk: int, overlap: str
) -> None:
    longer = [*PROMPTS[5][:64], *PROMPTS[3]]
    prompts = [prompt for prompt in [*PROMPTS, longer] for _ in range(3)]
    with build(checkpoint, cache__prefix_caching=False) as engine:
        alone = [*expected, *tokens_of(engine, [longer])]
    with build(checkpoint, scheduler__max_batch_tokens=chunk, scheduler__overlap=overlap) as engine:
        assert tokens_of(engine, prompts) == [tokens for tokens in alone for _ in range(3)]
        rest = sum((len(prompt) - 1) % 16 + 1 for prompt in prompts)  # tokens after the full blocks
        shared = sum((len(prompt) - 1) // 16 * 16 for prompt in [*PROMPTS, longer[64:]])
        assert engine.stats().prompt_tokens == rest + shared, "each full block is computed once"


@pytest.mark.parametrize("scheduler", ["fcfs", "priority"])
def test_output_does_not_depend_on_preemption(
    checkpoint: Path, expected: list[tuple[int, ...]], scheduler: str
) -> None:
    bytes_per_block = 2 * 2 * 2 * 16 * 16 * 4  # keys and values, layers, kv heads, head_dim, block_size, float32
    with build(checkpoint, scheduler=scheduler, model__max_len=128, cache__memory=str(9 * bytes_per_block)) as engine:
        assert engine.cache_info.num_blocks == 9
        assert tokens_of(engine, PROMPTS) == expected
        assert engine.stats().preemptions > 0
        assert engine.stats().blocks_used == 0


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_output_does_not_depend_on_overlap(checkpoint: Path, expected: list[tuple[int, ...]], overlap: str) -> None:
    with build(checkpoint, scheduler__overlap=overlap) as engine:
        assert tokens_of(engine, PROMPTS) == expected
        stop = expected[5][4]
        stopped = engine.generate([PROMPTS[5]], SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(stop,)))
        assert stopped[0].token_ids == expected[5][: expected[5].index(stop) + 1]
        assert stopped[0].finish_reason == "stop"


def test_stream_yields_the_same_as_generate(shared: Engine, expected: list[tuple[int, ...]]) -> None:
    whole = shared.generate([PROMPTS[2]], GREEDY)[0]
    deltas = list(shared.stream(PROMPTS[2], GREEDY))
    assert tuple(token for delta in deltas for token in delta.tokens) == whole.token_ids == expected[2]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert len(deltas) > 1
    assert deltas[-1].finish_reason == whole.finish_reason == "length"


def test_astream_batches_concurrent_streams(checkpoint: Path, expected: list[tuple[int, ...]]) -> None:
    async def collect(engine: Engine, prompt: Sequence[int]) -> tuple[int, ...]:
        return tuple([token async for delta in engine.astream(prompt, GREEDY) for token in delta.tokens])

    async def all_of(engine: Engine) -> list[tuple[int, ...]]:
        return await asyncio.gather(*(collect(engine, prompt) for prompt in PROMPTS))

    with build(checkpoint) as engine:
        assert asyncio.run(all_of(engine)) == expected
        assert engine.stats().steps < sum(map(len, expected))


def test_closing_an_async_stream_frees_its_blocks(checkpoint: Path) -> None:
    async def cut(engine: Engine) -> None:
        stream = engine.astream(PROMPTS[0], SamplingParams(temperature=0.0, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        while engine.has_work:
            await asyncio.sleep(0.01)

    with build(checkpoint) as engine:
        asyncio.run(cut(engine))
        assert engine.stats().blocks_used == 0


def test_seed_gives_the_same_tokens_in_any_batch(shared: Engine) -> None:
    seeded = SamplingParams(temperature=1.0, seed=11, max_tokens=16, ignore_eos=True)
    alone = tokens_of(shared, [PROMPTS[1]], seeded)[0]
    among = shared.generate(
        [PROMPTS[0], PROMPTS[1], PROMPTS[2]],
        [
            SamplingParams(max_tokens=30, ignore_eos=True),
            seeded,
            SamplingParams(temperature=2.0, top_p=0.5, max_tokens=9),
        ],
    )
    assert among[1].token_ids == alone
    other = tokens_of(shared, [PROMPTS[1]], SamplingParams(seed=12, max_tokens=16, ignore_eos=True))[0]
    assert other != alone


def test_logprobs_of_output_agree_with_prompt_logprobs(shared: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    completion = shared.generate([PROMPTS[3]], params)[0]
    assert completion.logprobs is not None
    assert completion.prompt_logprobs is not None
    assert [entry.token for entry in completion.logprobs] == list(completion.token_ids)
    assert all(entry.rank == 1 and len(entry.top) == 2 for entry in completion.logprobs)
    assert [entry.token for entry in completion.prompt_logprobs] == PROMPTS[3][1:]
    again = shared.generate([[*PROMPTS[3], *completion.token_ids]], params)[0]
    assert again.prompt_logprobs is not None
    tail = again.prompt_logprobs[-4:]
    assert [entry.token for entry in tail] == list(completion.token_ids)
    assert [entry.logprob for entry in tail] == pytest.approx(
        [entry.logprob for entry in completion.logprobs], abs=1e-4
    )


def test_prompt_logprobs_are_empty_when_the_prompt_is_one_token(shared: Engine) -> None:
    asked, not_asked = (SamplingParams(max_tokens=1, prompt_logprobs=count) for count in (1, None))
    assert shared.generate([[5]], asked)[0].prompt_logprobs == ()
    assert shared.generate([[5]], not_asked)[0].prompt_logprobs is None


def test_streams_yield_prompt_logprobs_once(shared: Engine) -> None:
    async def collect() -> list[TextDelta]:
        return [delta async for delta in shared.astream(PROMPTS[3], params)]

    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    [whole] = shared.generate([PROMPTS[3]], params)
    assert whole.prompt_logprobs
    for deltas in (list(shared.stream(PROMPTS[3], params)), asyncio.run(collect())):
        entries, *rest = [delta.prompt_logprobs for delta in deltas]
        assert entries is not None
        assert [entry.token for entry in entries] == [entry.token for entry in whole.prompt_logprobs]
        assert rest == [None, None]


def test_prompt_logprobs_do_not_depend_on_chunk_size(checkpoint: Path, shared: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    whole = shared.generate([PROMPTS[5]], params)[0].prompt_logprobs
    with build(checkpoint, scheduler__max_batch_tokens=7) as engine:
        chunked = engine.generate([PROMPTS[5]], params)[0].prompt_logprobs
    assert whole is not None
    assert chunked is not None
    assert [entry.logprob for entry in chunked] == pytest.approx([entry.logprob for entry in whole], abs=1e-4)


class TwoIterations(SchedulingPolicy):
    """Latest first, two decode iterations per step."""

    api = "1"

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        return waiting[::-1]

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        return running[0]

    def decode_steps(self, running: Sequence[RequestView], waiting: Sequence[RequestView]) -> int:
        return 2


@pytest.mark.parametrize("policy", [TwoIterations, TwoIterations()])
def test_scheduler_may_be_a_policy_class_or_object(
    checkpoint: Path, expected: list[tuple[int, ...]], policy: Any
) -> None:
    with build(checkpoint, scheduler=policy) as engine:
        assert tokens_of(engine, PROMPTS) == expected
        assert "object" in {choice.provenance for choice in engine.parts.choices}
        assert engine.stats().steps < 24


def step_until_done(engine: Engine) -> list[Output]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def test_add_step_and_abort_serve_tokens(checkpoint: Path, expected: list[tuple[int, ...]]) -> None:
    with build(checkpoint) as engine:
        engine.add(Request(id="a", prompt=tuple(PROMPTS[0]), params=GREEDY))
        engine.add(Request(id="b", prompt=tuple(PROMPTS[1]), params=GREEDY))
        engine.step()
        aborted = engine.abort("b")
        outputs = step_until_done(engine)
        assert aborted is not None
        assert aborted.finish_reason == "abort"
        assert engine.abort("b") is None
        assert {output.request for output in outputs} == {"a"}
        assert outputs[-1].finish_reason == "length"
        assert outputs[-1].times is not None
        assert engine.stats().blocks_used == 0


def test_generate_raises_while_other_requests_are_in_progress(checkpoint: Path) -> None:
    with build(checkpoint) as engine:
        engine.add(Request(id="a", prompt=(1, 2), params=GREEDY))
        with pytest.raises(InvalidRequestError, match="other requests"):
            engine.generate([[1]])


@pytest.mark.parametrize(
    ("prompt", "params", "parameter"),
    [
        ([], GREEDY, "prompt"),
        ([512], GREEDY, "prompt"),
        ([-1], GREEDY, "prompt"),
        ([1] * 256, GREEDY, "prompt"),
        ([1] * 250, GREEDY, "max_tokens"),
        ([1], SamplingParams(logit_bias=((512, 1.0),)), "logit_bias"),
        ([1], SamplingParams(stop_token_ids=(512,)), "stop_token_ids"),
    ],
)
def test_generate_names_the_parameter_of_an_invalid_request(
    shared: Engine, prompt: list[int], params: SamplingParams, parameter: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        shared.generate([[1, 2, 3], prompt], params)
    assert caught.value.parameter == parameter
    assert not shared.has_work
    assert shared.stats().blocks_used == 0


def test_stop_strings_end_the_text(shared: Engine) -> None:
    whole = shared.generate([PROMPTS[4]], GREEDY)[0].text
    stop = whole[5:8]
    stopped = shared.generate(
        [PROMPTS[4]], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=(stop,))
    )[0]
    assert stopped.text == whole[: whole.index(stop)]
    assert stopped.finish_reason == "stop"
    assert shared.stats().blocks_used == 0


def test_call_keeps_the_results_of_steps_in_flight(checkpoint: Path, expected: list[tuple[int, ...]]) -> None:
    with build(checkpoint, scheduler__overlap="on") as engine:
        for number, prompt in enumerate(PROMPTS):
            engine.add(Request(id=str(number), prompt=tuple(prompt), params=GREEDY))
        tokens: dict[str, tuple[int, ...]] = {}
        while engine.has_work:
            for output in engine.step():
                tokens[output.request] = tokens.get(output.request, ()) + output.tokens
            (answer,) = engine.call("describe")
            assert set(answer["sequences"]) <= set(range(1, 20))
        assert [tokens[str(number)] for number in range(len(PROMPTS))] == expected
        with pytest.raises(ControlError, match="of GPU memory only"):
            engine.call("memory_snapshot", {"directory": "somewhere"})
        assert engine.check().ok
    with pytest.raises(ExecutorError, match="is closed"):
        engine.call("describe")


def test_call_is_refused_by_an_executor_without_control_calls(checkpoint: Path) -> None:
    with build(checkpoint, executor=threaded_ranks(1)) as engine:
        with pytest.raises(ControlError, match="cannot run describe: this executor has no control calls"):
            engine.call("describe")
        assert len(engine.generate(PROMPTS[:1], GREEDY)) == 1


def test_reset_prefix_cache_frees_the_cached_blocks(checkpoint: Path) -> None:
    with build(checkpoint) as engine:
        engine.generate(PROMPTS, GREEDY)
        cached = engine.stats().blocks_cached
        assert engine.reset_prefix_cache() == cached > 0
        engine.generate(PROMPTS, GREEDY)
        assert engine.stats().prefix_hits == 0
    with pytest.raises(ExecutorError, match="is closed"):
        engine.reset_prefix_cache()


def test_close_is_final_and_may_be_repeated(checkpoint: Path) -> None:
    engine = build(checkpoint)
    assert engine.check().ok
    engine.close()
    engine.close()
    assert not engine.check().ok


def test_close_ends_all_else_when_the_executor_cannot_be_shut_down(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    def part(name: str, **members: Any) -> Any:
        return SimpleNamespace(close=lambda: ended.append(name), **members)

    engine: Any = Engine.__new__(Engine)
    engine._closed = False
    engine._loop = part("loop", failure="", forget=lambda: None)
    engine._traces, engine._async, engine._grammars, engine._kv_events = map(
        part, ("traces", "async", "grammars", "kv")
    )
    engine.parts = part("parts", owner=lambda point: f"{point} 'mine' of engine-mine 0.4")
    engine.plugins = part("plugins", notify=lambda hook, engine: ended.append(hook))
    engine._executor = part("executor", shutdown=lambda: 1 / 0)
    engine.close()
    assert ended == ["async", "traces", "grammars", "kv", "engine_stopped"]
    [record] = caplog.records
    assert record.message == "executors 'mine' of engine-mine 0.4 failed in shutdown(); what it holds may not be freed"
    assert record.exc_info is not None


def test_failed_start_shuts_the_executor_down(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shut = []

    def shutdown(executor: UniprocExecutor) -> None:
        shut.append(executor)
        raise RuntimeError("must not hide the error of the start")

    monkeypatch.setattr(build_step_loop, "Scheduler", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(UniprocExecutor, "shutdown", shutdown)
    with pytest.raises(ZeroDivisionError):
        build(checkpoint)
    assert len(shut) == 1


def test_prompt_logprobs_do_not_depend_on_rows_at_once(
    checkpoint: Path, shared: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    (whole,) = shared.generate([PROMPTS[5]], params)
    monkeypatch.setattr(prompt_logprobs, "MAX_ROWS", 7)
    (split,) = shared.generate([PROMPTS[5]], params)
    assert whole.prompt_logprobs is not None
    assert split.prompt_logprobs is not None
    assert [entry.token for entry in split.prompt_logprobs] == [entry.token for entry in whole.prompt_logprobs]
    assert [entry.logprob for entry in split.prompt_logprobs] == pytest.approx(
        [entry.logprob for entry in whole.prompt_logprobs], abs=1e-5
    )


def test_constructor_raises_for_what_cannot_be_built(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config"):
        Engine(model=str(tmp_path))
    with pytest.raises(PluginError, match="fcfs"):
        build(checkpoint, scheduler="fcsf")
    with pytest.raises(CapacityError, match="--max-len"):
        build(checkpoint, cache__memory="100kB")
    with pytest.raises(ConfigError, match="block_size"):
        build(checkpoint, cache__block_sizes=16)


def test_dummy_weights_need_only_config_json(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with build(tmp_path, model__load_format="dummy") as engine:
        engine.add(Request(id="a", prompt=(1, 2, 3), params=GREEDY))
        assert sum(len(output.tokens) for output in step_until_done(engine)) == 24
