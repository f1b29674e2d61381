"""Engines some of whose rows are not finite: only the requests of these rows end, and nothing of them is cached."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from engine.core import Engine, Request, SamplingParams
from engine.core.attention.base import GraphSlot
from engine.core.attention.batch import ForwardBatch
from engine.core.errors import ExecutorError
from engine.core.types import Output
from engine.plugins.attention.torch import TorchAttention
from engine.testing.checkpoints import make_checkpoint

POISON = 300
"""The prompt token whose attention is not a number."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[(7 * row + 3 * column) % 256 for column in range(5 + 13 * row)] for row in range(4)]
SICK = [*PROMPTS[3][:20], POISON, *PROMPTS[3][20:]]
PARAMS = {
    "greedy": GREEDY,
    "draw": attrs.evolve(GREEDY, temperature=1.0, top_p=0.9, seed=3),
    "logprobs": attrs.evolve(GREEDY, logprobs=2),
    "penalties": attrs.evolve(GREEDY, repetition_penalty=1.3),
    "processed draw": attrs.evolve(GREEDY, temperature=1.0, seed=3, min_tokens=4, logit_bias=((5, 1.0),)),
}


class PoisonedAttention(TorchAttention):
    """Attends like TorchAttention, but the output is NaN where the token is POISON."""

    poison = True

    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> Any:
        self.bad = (batch.tokens == POISON).nonzero().flatten()
        return super().plan(batch, graph)

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        out = super().forward(layer, q, k, v, plan)
        return out.index_fill(0, self.bad, torch.nan) if self.poison else out


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


def build(checkpoint: Path, **settings: Any) -> Engine:
    usual = {"executor__device": "cpu", "cache__memory": "8MiB", "model__max_len": 256}
    return Engine(model=str(checkpoint), attention=PoisonedAttention, **{**usual, **settings})


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with build(checkpoint) as engine:
        yield engine


def outputs_of(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> dict[str, list[Output]]:
    """The outputs of each prompt, by its index."""
    for number, prompt in enumerate(prompts):
        engine.add(Request(id=str(number), prompt=tuple(prompt), params=params))
    outputs: dict[str, list[Output]] = {str(number): [] for number in range(len(prompts))}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request].append(output)
    return outputs


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


ENGINES: list[dict[str, Any]] = [
    {"scheduler__overlap": "on"},
    {"scheduler": "multi_step", "scheduler__options": {"steps": 4}},
    {"scheduler__max_batch_tokens": 7},
]
FUSED = {"executor__kernels": "fused"}


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        *((asked, {}) for asked in PARAMS),
        *((asked, one) for one in ENGINES for asked in ("greedy", "processed draw")),
        *(pytest.param(asked, FUSED, marks=pytest.mark.interpreter) for asked in ("greedy", "processed draw")),
    ],
    ids=str,
)
def test_a_row_that_is_not_finite_ends_its_own_request(checkpoint: Path, asked: str, settings: dict[str, Any]) -> None:
    params = PARAMS[asked]
    if settings is FUSED:
        pytest.importorskip("triton")
        params = attrs.evolve(params, max_tokens=2, min_tokens=min(params.min_tokens, 1))
    with build(checkpoint, **settings) as engine:
        expected = outputs_of(engine, PROMPTS[:2], params)
        found = outputs_of(engine, [PROMPTS[0], SICK, PROMPTS[1]], params)
        assert tokens(found["0"]) == tokens(expected["0"])
        assert tokens(found["2"]) == tokens(expected["1"])
        assert tokens(found["1"]) == []
        assert found["1"][-1].finish_reason == "error"
        assert "request 1" in str(found["1"][-1].error)
        assert "not finite" in str(found["1"][-1].error)
        assert engine.check().ok
        assert engine.stats().blocks_used == 0
        engine._scheduler.check()


@pytest.mark.parametrize("max_batch_tokens", [2048, 16])
def test_blocks_of_a_failed_request_leave_the_prefix_cache(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, max_batch_tokens: int
) -> None:
    """A long prompt's first blocks are in the cache before its last chunk shows that they are not numbers."""
    with build(checkpoint, scheduler__max_batch_tokens=max_batch_tokens) as engine:
        assert outputs_of(engine, [SICK], GREEDY)["0"][-1].finish_reason == "error"
        assert engine.stats().blocks_cached == 0
        monkeypatch.setattr(PoisonedAttention, "poison", False)
        (done,) = engine.generate([SICK], GREEDY)
        assert (done.cached_tokens, len(done.token_ids)) == (0, 8)
        engine._scheduler.check()


def test_generate_returns_the_others_and_the_error_of_a_failed_prompt(engine: Engine) -> None:
    (alone,) = engine.generate([PROMPTS[2]], GREEDY)
    failed, done = engine.generate([SICK, PROMPTS[2]], GREEDY)
    assert done == attrs.evolve(alone, cached_tokens=done.cached_tokens)
    assert done.error is None
    assert (failed.finish_reason, failed.token_ids, failed.text) == ("error", (), "")
    assert "not finite" in str(failed.error)


def test_stream_raises_the_error_of_its_request(engine: Engine) -> None:
    with pytest.raises(ExecutorError, match="not finite"):
        list(engine.stream(SICK, GREEDY))
    assert len(list(engine.stream(PROMPTS[0], GREEDY))) > 1


def test_astream_raises_the_error_in_its_own_stream(engine: Engine) -> None:
    async def collect(prompt: Sequence[int]) -> list[int]:
        return [token async for delta in engine.astream(prompt, GREEDY) for token in delta.tokens]

    async def all_of() -> list[Any]:
        return await asyncio.gather(*map(collect, (PROMPTS[0], SICK, PROMPTS[1])), return_exceptions=True)

    first, failed, last = asyncio.run(all_of())
    assert [len(first), len(last)] == [8, 8]
    assert isinstance(failed, ExecutorError)
    assert "not finite" in str(failed)


def test_prompt_logprobs_that_are_not_finite_end_their_request(engine: Engine) -> None:
    """Only the row of POISON itself is NaN where its keys and values are not used: in the last layer."""
    params = attrs.evolve(GREEDY, prompt_logprobs=1)
    failed, done = engine.generate([SICK, PROMPTS[1]], params)
    assert (failed.finish_reason, failed.prompt_logprobs) == ("error", None)
    assert done.prompt_logprobs is not None
