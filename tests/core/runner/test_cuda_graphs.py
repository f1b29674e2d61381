"""Replayed decode steps: on the CPU by a stand-in that runs the work again at each replay, on a GPU by CUDA graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.core import Engine, Request, SamplingParams
from engine.core.attention.base import AttentionBackend, GraphSlot
from engine.core.attention.batch import ForwardBatch
from engine.core.config.tree import EngineConfig, ExecutorConfig
from engine.core.device import DeviceInfo
from engine.core.errors import ConfigError
from engine.core.grammars.grammar import Grammar
from engine.core.plugin_host.derived import use_graphs
from engine.core.runner import cuda_graphs, piecewise_graphs
from engine.core.runner.graph_sizes import batch_sizes
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.models.llama import Llama
from engine.testing.checkpoints import make_checkpoint
from tests.core.runner.replays import ReplayByRunning
from tests.core.told_speculator import Told

T = TypeVar("T")
PROMPTS = [[(7 * row + 3 * column) % 256 for column in range(5 + 13 * row)] for row in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
TOLD: dict[str, Any] = {"speculator": Told, "speculator__length": "fixed"}


class FixedAttention(TorchAttention):
    """Decodes by masks over the longest context, reading device tensors only."""

    graphs = "decode"

    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> Any:
        return super().plan(batch) if graph is None else batch

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        if not isinstance(plan, ForwardBatch):
            return super().forward(layer, q, k, v, plan)
        spec = self._spec
        tables = plan.block_tables.long()
        slots = (tables[:, :, None] * spec.block_size + torch.arange(spec.block_size, device=q.device)).flatten(1)
        positions, ends = torch.arange(slots.shape[1], device=q.device), plan.context_lens[:, None]
        hidden = (positions >= ends) | (positions < ends - (spec.sliding_windows[layer] or spec.max_len))
        keys, values = (
            part[layer][slots].repeat_interleave(spec.num_heads // spec.num_kv_heads, 2)
            for part in (self._keys, self._values)
        )
        scores = torch.einsum("shd,sthd->sht", q, keys) * spec.scale
        scores = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        return torch.einsum("sht,sthd->shd", scores, values.masked_fill(hidden[:, :, None, None], 0.0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", tokenizer=True)


def build(checkpoint: Path, *, attention: type[AttentionBackend[Any, Any]] | None = None, **settings: Any) -> Engine:
    usual = {"executor__device": "cpu", "executor__graphs": "decode", "cache__memory": "8MiB", "model__max_len": 256}
    settings = usual | settings
    parts = {} if attention is None else {"attention": attention}
    return Engine(model=str(checkpoint), scheduler__max_running=settings.pop("running", 4), **parts, **settings)


def tokens_of(engine: Engine, params: SamplingParams | list[SamplingParams] = GREEDY) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in engine.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    with build(checkpoint, executor__graphs="off") as engine:
        return tokens_of(engine)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_replays_give_the_tokens_of_plain_steps(
    checkpoint: Path, expected: list[tuple[int, ...]], replays: type[ReplayByRunning], overlap: str
) -> None:
    with build(checkpoint, attention=FixedAttention, scheduler__overlap=overlap) as engine:
        assert replays.captured == 2 * len(batch_sizes(4))  # the greedy and the full path
        assert engine.stats().graphs_captured == 0
        assert tokens_of(engine) == expected
        assert tokens_of(engine) == expected, "the state that the first run leaves must not matter"


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("running", [3, 16], ids=["most are too large", "all fit"])
def test_drafts_between_replays_give_the_same_tokens(
    checkpoint: Path,
    expected: list[tuple[int, ...]],
    replays: type[ReplayByRunning],
    overlap: str,
    running: int,
) -> None:
    half = {tuple(prompt): output[:9] for prompt, output in zip(PROMPTS[::2], expected[::2], strict=True)}
    settings = {"scheduler__overlap": overlap, "running": running, "speculator__max_drafts": 4}
    with build(checkpoint, attention=FixedAttention, **settings, **TOLD) as engine:
        for wrong_every in (0, 3, 1):
            Told.tell(half, wrong_every)
            assert tokens_of(engine) == expected
        Told.tell({})
        stats = engine.stats()
    assert stats.speculation is not None
    assert sum(stats.speculation.accepted) > 0
    kinds = {kind for kind, *_ in stats.graph_replays}
    assert "decode" in kinds
    assert "verify" in kinds or running == 3


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.8, "top_p": 0.9, "seed": 7},
        {"logit_bias": ((3, 2.0),), "logprobs": 1},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
        {"grammar": Grammar.regex("[a-f]{3,20}"), "ignore_eos": False},
        {
            "grammar": Grammar.regex("[a-f]{20}"),
            "ignore_eos": False,
            "presence_penalty": 1.0,
            "temperature": 1.0,
            "seed": 7,
        },
    ],
    ids=", ".join,
)
def test_each_sampling_path_verifies_drafts_in_replays(
    checkpoint: Path, replays: type[ReplayByRunning], asked: dict[str, Any]
) -> None:
    params = attrs.evolve(GREEDY, **asked)
    with build(checkpoint, attention=FixedAttention, running=16, speculator__max_drafts=3, **TOLD) as engine:
        alone = tokens_of(engine, params)
        Told.tell({tuple(prompt): output for prompt, output in zip(PROMPTS[::2], alone[::2], strict=True)}, 3)
        assert tokens_of(engine, params) == alone
        Told.tell({})
        assert "verify" in {kind for kind, *_ in engine.stats().graph_replays}


@pytest.mark.interpreter
def test_drafts_with_fused_kernels_give_the_same_tokens(
    checkpoint: Path, expected: list[tuple[int, ...]], replays: type[ReplayByRunning]
) -> None:
    drawn = attrs.evolve(GREEDY, max_tokens=4, temperature=0.7, top_p=0.9, seed=3)
    with build(checkpoint, executor__graphs="off", running=2) as engine:
        [alone] = engine.generate(PROMPTS[:1], drawn)
    Told.tell({tuple(PROMPTS[0]): alone.token_ids}, 3)
    settings: dict[str, Any] = {"executor__kernels": "fused", "speculator__max_drafts": 2}
    with build(checkpoint, attention=FixedAttention, running=3, **settings, **TOLD) as engine:
        assert [completion.token_ids for completion in engine.generate(PROMPTS[:1], drawn)] == [alone.token_ids]
        Told.tell({})
        stats = engine.stats()
    assert stats.speculation is not None
    assert sum(stats.speculation.accepted) > 0
    assert "verify" in {kind for kind, *_ in stats.graph_replays}


@pytest.mark.interpreter
def test_replays_with_fused_kernels_give_the_same_tokens(
    checkpoint: Path, expected: list[tuple[int, ...]], replays: type[ReplayByRunning]
) -> None:
    few = attrs.evolve(GREEDY, max_tokens=3)
    with build(checkpoint, attention=FixedAttention, executor__kernels="fused", running=2) as engine:
        found = [completion.token_ids for completion in engine.generate(PROMPTS[:3], few)]
    assert found == [tokens[:3] for tokens in expected[:3]]


def test_prefill_chunks_between_replays_give_the_same_tokens(
    checkpoint: Path, expected: list[tuple[int, ...]], replays: type[ReplayByRunning]
) -> None:
    with build(checkpoint, attention=FixedAttention, scheduler__max_batch_tokens=7, running=3) as engine:
        assert tokens_of(engine) == expected


def test_preemption_between_replays_gives_the_same_tokens(
    checkpoint: Path, expected: list[tuple[int, ...]], replays: type[ReplayByRunning]
) -> None:
    with build(checkpoint, attention=FixedAttention, cache__memory="68KiB", model__max_len=100) as engine:
        assert tokens_of(engine) == expected
        assert engine.stats().preemptions > 0


def test_each_sampling_path_gives_the_tokens_of_plain_steps(checkpoint: Path, replays: type[ReplayByRunning]) -> None:
    drawn = [
        SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=row, max_tokens=24, ignore_eos=True)
        for row in range(6)
    ]
    penalized = attrs.evolve(GREEDY, repetition_penalty=1.3, presence_penalty=0.5)
    reported = attrs.evolve(GREEDY, logprobs=2)
    mixed = [GREEDY, drawn[1], penalized, reported, drawn[4], GREEDY]
    with build(checkpoint, executor__graphs="off") as plain, build(checkpoint, attention=FixedAttention) as replayed:
        for params in (drawn, [penalized] * 6, [reported] * 6, mixed):
            assert tokens_of(replayed, params) == tokens_of(plain, params)


def test_a_profile_by_layer_between_replays_runs_their_steps_without_graphs_and_changes_no_token(
    checkpoint: Path, replays: type[ReplayByRunning]
) -> None:
    drawn = attrs.evolve(GREEDY, temperature=0.8, seed=3)
    mixed = [drawn, attrs.evolve(GREEDY, repetition_penalty=1.3), *[GREEDY] * 4]
    with build(checkpoint, executor__graphs="off") as plain, build(checkpoint, attention=FixedAttention) as engine:
        for params, path in (([GREEDY] * 6, "greedy"), ([drawn] * 6, "full"), (mixed, "full")):
            for number, prompt in enumerate(PROMPTS):
                engine.add(Request(id=str(number), prompt=tuple(prompt), params=params[number]))
            tokens: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
            for number in itertools.count():
                if number == 6:
                    engine.call("start_layers")
                if number == 12:
                    [answer] = engine.call("stop_layers")
                    assert answer["graphs"] == [[f"decode 4, {path}", 3]]
                if not engine.has_work:
                    break
                for output in engine.step():
                    tokens[output.request] += output.tokens
            assert [tuple(one) for one in tokens.values()] == tokens_of(plain, params)


def test_running_the_kernels_of_all_graphs_changes_no_token(
    checkpoint: Path, expected: list[tuple[int, ...]], replays: type[ReplayByRunning], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_all = cuda_graphs.DecodeGraphs.capture_all

    def after_running(self: cuda_graphs.DecodeGraphs, on_progress: Callable[[int, int], None]) -> None:
        self.run_without_graphs()
        capture_all(self, on_progress)

    monkeypatch.setattr(cuda_graphs.DecodeGraphs, "capture_all", after_running)
    with build(checkpoint, attention=FixedAttention) as engine:
        assert tokens_of(engine) == expected


@pytest.mark.gpu
def test_captures_of_a_first_start_find_all_kernels_on_disk(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing on disk before: what the captures launch has been recorded, and compiled in another process."""
    import triton

    loaded: list[tuple[str, bool]] = []
    during_captures: list[tuple[str, bool]] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    listener = lambda src, cache_hit, **_: loaded.append((src.name, cache_hit))  # noqa: E731
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    capture_all = cuda_graphs.DecodeGraphs.capture_all

    def counted(self: cuda_graphs.DecodeGraphs, on_progress: Callable[[int, int], None]) -> None:
        before = len(loaded)
        capture_all(self, on_progress)
        during_captures.extend(loaded[before:])

    monkeypatch.setattr(cuda_graphs.DecodeGraphs, "capture_all", counted)
    settings = {"executor__device": "cuda", "model__dtype": "bfloat16", "running": 32}
    with build(checkpoint, executor__kernel_cache=str(tmp_path), **settings):
        assert ("_decode_kernel", True) in during_captures
        assert [name for name, on_disk in during_captures if not on_disk] == []


class SegmentsWithoutGraphs(ReplayByRunning):
    """Runs what is captured in segments once; a replay does nothing."""

    def capture_segments(
        self, work: Callable[[Callable[[], None]], T], warm_up: Callable[[], object] | None = None
    ) -> tuple[list[Callable[[], None]], T]:
        breaks: list[None] = []
        made = work(lambda: breaks.append(None))
        return [lambda: None] * (len(breaks) + 1), made


def test_piecewise_graphs_run_without_graphs_break_at_each_attention_and_write_no_block(checkpoint: Path) -> None:
    with build(checkpoint, executor__graphs="off") as engine:
        tokens_of(engine)
        executor: Any = engine._executor
        state = executor._runner._launcher.state
        capturer: Any = SegmentsWithoutGraphs(torch.device("cpu"))
        graphs = piecewise_graphs.PiecewiseGraphs(state, capturer, max_tokens=64, device=torch.device("cpu"))
        with torch.inference_mode():
            graphs.capture_all(lambda done, total: None)
        for slots in graphs._slots:
            slots.zero_()  # as after a step of a sequence that has the first block
        before = [tensor.clone() for tensor in (*state.pool.keys, *state.pool.values)]
        scratch = state.pool.scratch_block * state.pool.block_size
        breaks: list[int] = []

        @contextmanager
        def padded() -> Iterator[None]:
            assert all((slots == scratch).all() for slots in graphs._slots), "padding is not a part of the graphs"
            yield

        graphs.run_without_graphs(64, padded(), lambda: breaks.append(1))
        assert len(breaks) == len(state.pool.keys) == 2
        for tensor, old in zip((*state.pool.keys, *state.pool.values), before, strict=True):
            assert torch.equal(tensor[: state.pool.scratch_block], old[: state.pool.scratch_block])


@pytest.mark.gpu
def test_piecewise_graphs_of_large_steps_change_no_token(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=True, max_position_embeddings=4096)
    prompts = [[(7 * row + 3 * column) % 256 for column in range(length)] for row, length in enumerate((900, 1190, 20))]
    settings = {"executor__device": "cuda", "model__max_len": 2048, "running": 4}
    outputs, replayed = [], []
    for graphs in ({"executor__graphs": "decode"}, {"executor__graphs": "on", "executor__max_graph_tokens": 2304}):
        with build(path, **settings, **graphs) as engine:
            outputs.append([completion.token_ids for completion in engine.generate(prompts, GREEDY)])
            sizes = {size for kind, size, _, _ in engine.stats().graph_replays if kind == "prefill"}
            replayed.append(2304 in sizes)  # 2,110 tokens
    assert outputs[0] == outputs[1]
    assert replayed == [False, True]


POISON = 60
"""The position from which on PoisonedAttention decodes to NaN: only the last three of PROMPTS get there."""


class PoisonedAttention(FixedAttention):
    """Decodes to NaN from position POISON on."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        out = super().forward(layer, q, k, v, plan)
        if not isinstance(plan, ForwardBatch):
            return out
        return out.masked_fill((plan.positions >= POISON)[:, None, None], torch.nan)


SAMPLING = {
    "greedy": GREEDY,
    "draw": attrs.evolve(GREEDY, temperature=0.8, top_p=0.9, seed=3),
    "full": attrs.evolve(GREEDY, repetition_penalty=1.3, logprobs=1),
}


def check_poisoned(engine: Engine, healthy: Engine, params: SamplingParams) -> None:
    """Check that rows that a replay makes NaN end their own requests, after the tokens before them."""
    expected = tokens_of(healthy, params)
    found = engine.generate(PROMPTS, params)
    ends = [min(24, max(POISON - len(prompt) + 1, 1)) for prompt in PROMPTS]
    assert [done.token_ids for done in found] == [tokens[:end] for tokens, end in zip(expected, ends, strict=True)]
    assert [done.finish_reason for done in found] == ["length"] * 3 + ["error"] * 3
    assert all("not finite" in str(done.error) for done in found[3:])
    assert engine.check().ok
    assert engine.stats().blocks_used == 0


@pytest.mark.parametrize("asked", SAMPLING)
@pytest.mark.parametrize("steps", [1, 4])
def test_a_row_that_a_replay_makes_nan_ends_its_own_request(
    checkpoint: Path, replays: type[ReplayByRunning], asked: str, steps: int
) -> None:
    settings = {"scheduler__name": "multi_step", "scheduler__options": {"steps": steps}}
    with (
        build(checkpoint, attention=PoisonedAttention, **settings) as engine,
        build(checkpoint, executor__graphs="off") as healthy,
    ):
        check_poisoned(engine, healthy, SAMPLING[asked])


@pytest.mark.gpu
@pytest.mark.parametrize("asked", SAMPLING)
@pytest.mark.parametrize("kernels", ["plain", "fused"])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_row_that_a_cuda_graph_makes_nan_ends_its_own_request(
    checkpoint: Path, asked: str, kernels: str, steps: int
) -> None:
    settings = {"executor__device": "cuda", "executor__kernels": kernels, "model__dtype": "float32"}
    settings |= {"scheduler__name": "multi_step", "scheduler__options": {"steps": steps}}  # type: ignore[dict-item]
    with (
        build(checkpoint, attention=PoisonedAttention, **settings) as engine,
        build(checkpoint, attention=FixedAttention, **settings) as healthy,
    ):
        check_poisoned(engine, healthy, SAMPLING[asked])


def test_use_graphs_needs_a_capable_backend_model_and_device(caplog: pytest.LogCaptureFixture) -> None:
    cuda, cpu = DeviceInfo(type="cuda", capability=(9, 0)), DeviceInfo(type="cpu")
    able: Any = object.__new__(FixedAttention)
    unable: Any = object.__new__(TorchAttention)

    model: Any = object.__new__(Llama)
    waiting: Any = object.__new__(Llama)
    waiting.no_graphs = "waits for the device"

    def config(graphs: str) -> EngineConfig:
        return EngineConfig(executor=ExecutorConfig(graphs=graphs))

    assert use_graphs(config("auto"), able, model, cuda)
    assert not use_graphs(config("auto"), unable, model, cuda)
    assert not use_graphs(config("auto"), able, model, cpu)
    assert not use_graphs(config("off"), able, model, cuda)
    assert not use_graphs(config("auto"), able, waiting, cuda)
    assert use_graphs(config("auto"), None, model, cuda)
    assert "steps run without CUDA graphs: Llama waits for the device" in caplog.text
    for wanted in ("on", "decode"):
        for backend, made, device in (
            (unable, model, cuda),
            (able, model, cpu),
            (able, waiting, cuda),
            (None, model, cpu),
            (None, waiting, cuda),
        ):
            with pytest.raises(ConfigError, match="graphs were asked for, but"):
                use_graphs(config(wanted), backend, made, device)


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [1, 4, 8])
@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("on", ["on", "decode", "off"])
@pytest.mark.parametrize("attention", ["triton", "torch"])
def test_greedy_tokens_on_a_gpu_equal_those_without_graphs(
    checkpoint: Path, expected: list[tuple[int, ...]], attention: str, on: str, overlap: str, steps: int
) -> None:
    if attention == "torch" and on != "off":
        pytest.skip("this backend cannot be captured")
    with build(
        checkpoint,
        executor__device="cuda",
        executor__graphs=on,
        attention__name=attention,
        scheduler__overlap=overlap,
        scheduler__name="multi_step",
        scheduler__options={"steps": steps},
    ) as engine:
        assert tokens_of(engine) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("on", ["on", "decode", "off"])
@pytest.mark.parametrize("attention", ["triton", "torch"])
def test_drafts_change_no_token_on_a_gpu(
    checkpoint: Path, expected: list[tuple[int, ...]], attention: str, on: str, overlap: str
) -> None:
    if attention == "torch" and on != "off":
        pytest.skip("this backend cannot be captured")
    half = {tuple(prompt): output[:9] for prompt, output in zip(PROMPTS[::2], expected[::2], strict=True)}
    drawn = attrs.evolve(GREEDY, temperature=0.7, top_p=0.9, seed=3)
    settings = {"executor__device": "cuda", "executor__graphs": on, "attention__name": attention}
    with build(checkpoint, **settings, scheduler__overlap=overlap, **TOLD) as engine:
        for wrong_every in (0, 3, 1):
            Told.tell(half, wrong_every)
            assert tokens_of(engine) == expected
        edited = {"frequency_penalty": 0.6, "grammar": Grammar.regex("[a-f]{24,30}"), "ignore_eos": False}
        for asked in (drawn, attrs.evolve(GREEDY, repetition_penalty=1.3), attrs.evolve(drawn, **edited)):
            Told.tell({})
            alone = tokens_of(engine, asked)
            Told.tell({tuple(prompt): output for prompt, output in zip(PROMPTS, alone, strict=True)}, 3)
            assert tokens_of(engine, asked) == alone
        Told.tell({})
        stats = engine.stats()
    assert stats.speculation is not None
    assert sum(stats.speculation.accepted) > 0
    assert stats.kernels_compiled == 0 or on == "off", "without graphs, attention has a kernel per size of batch"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of a size that FlashInfer supports."""
    return make_checkpoint(tmp_path_factory.mktemp("wide"), "qwen3", tokenizer=True, head_dim=64)


def shortfalls(checkpoint: Path, tokens: list[tuple[int, ...]]) -> torch.Tensor:
    """How far below the best logit, in standard deviations, that of each token is by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found = []
    with torch.inference_mode():
        for prompt, chosen in zip(PROMPTS, tokens, strict=True):
            logits = model(torch.tensor([[*prompt, *chosen]])).logits[0, len(prompt) - 1 : -1]
            best = logits.max(-1).values
            found.append((best - logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]) / logits.std(-1))
    return torch.cat(found)


TIE = 0.02
"""In standard deviations of logits: float16 decides by chance between tokens nearer than this."""


def test_shortfalls_distinguish_greedy_tokens_from_others(wide: Path) -> None:
    with build(wide, attention__name="torch", model__dtype="float16", executor__graphs="off") as engine:
        tokens = tokens_of(engine)
    assert shortfalls(wide, tokens).max() < TIE
    later = [(*chosen[1:], chosen[0]) for chosen in tokens]
    assert shortfalls(wide, later).max() > 20 * TIE


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [1, 4, 8])
@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("on", ["on", "off"])
@pytest.mark.parametrize("attention", ["flashinfer", "flashinfer,triton", "triton"])
def test_greedy_tokens_in_half_precision_are_the_best_but_for_rounding(
    wide: Path, attention: str, on: str, overlap: str, steps: int
) -> None:
    """For kernels without float32: no other token is better by more than rounding."""
    pytest.importorskip("flashinfer", reason="needs FlashInfer")
    with build(
        wide,
        executor__device="cuda",
        executor__graphs=on,
        attention__name=attention,
        model__dtype="float16",
        scheduler__overlap=overlap,
        scheduler__name="multi_step",
        scheduler__options={"steps": steps},
    ) as engine:
        assert shortfalls(wide, tokens_of(engine)).max() < TIE
