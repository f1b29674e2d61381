"""Models whose layers all keep a state, through the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from engine.core.errors import ConfigError, EngineError
from engine.core.host import Host
from engine.core.layers import LayerFactory
from engine.core.plugin_host import derived
from engine.core.runner.graph_sizes import batch_sizes
from engine.core.types import Request, SamplingParams
from engine.core.weights import DummySource, load_weights
from tests.core.runner import state_models
from tests.core.runner.replays import ReplayByRunning
from tests.core.runner.state_models import States, TwoShapes

LENGTHS = (40, 21, 2, 1, 1, 5)
PROMPTS = [[(7 * row + 3 * at + row * at) % 500 for at in range(length)] for row, length in enumerate(LENGTHS)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SETTINGS = {"model__load_format": "dummy", "model__name": "two-shapes", "cache__memory": "auto"}
TIGHT = {"scheduler__max_batch_tokens": 9, "scheduler__max_running": 3}
Tokens = list[tuple[int, ...]]


def reference(model: type[States]) -> Tokens:
    """The greedy tokens after each prompt, with the weights that the engines below have."""
    layers = LayerFactory(dtype="float32", device="cpu")
    made = model({}, layers)
    load_weights(layers, DummySource(seed=0), threads=1)
    return [tuple(made.reference(prompt, GREEDY.max_tokens)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected() -> Tokens:
    found = reference(TwoShapes)
    assert len(set(found)) == len(found)
    return found


def tokens_of(engine: Any, params: SamplingParams | list[SamplingParams] = GREEDY) -> Tokens:
    return [completion.token_ids for completion in engine.generate(PROMPTS, params)]


def add(engine: Any, number: int, **asked: Any) -> None:
    """Queue one of the prompts."""
    engine.add(Request(id=str(number), prompt=tuple(PROMPTS[number]), params=GREEDY, **asked))


@pytest.mark.parametrize(("running", "overlap"), [(1, "on"), (3, "off")])
def test_states_of_two_shapes_give_the_tokens_of_the_definition(
    make_engine: Any, expected: Tokens, running: int, overlap: str
) -> None:
    limits = {**TIGHT, "scheduler__max_running": running, "scheduler__overlap": overlap}
    engine = make_engine(state_models, **SETTINGS, **limits)
    assert tokens_of(engine) == expected
    assert tokens_of(engine) == expected, "the states that the first run leaves must not matter"
    assert engine.stats().prefix_hits == 0


def test_states_of_one_shape_give_the_tokens_of_the_definition(make_engine: Any) -> None:
    engine = make_engine(state_models, **{**SETTINGS, "model__name": "states"}, **TIGHT)
    assert tokens_of(engine) == reference(States)


def test_states_in_a_worker_give_the_tokens_of_the_definition(
    make_engine: Any, expected: Tokens, install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("engine-states", "0.1", "", entry="states", target=state_models.__name__)
    for folder in (Path(__file__).parents[3], tmp_path):
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    assert tokens_of(make_engine(**SETTINGS, **TIGHT, executor="multiproc")) == expected


@pytest.mark.parametrize("name", ["states", "two-shapes"])
def test_replays_advance_the_states(make_engine: Any, replays: type[ReplayByRunning], name: str) -> None:
    limits = {**TIGHT, "scheduler__max_running": 4, "executor__graphs": "decode"}
    engine = make_engine(state_models, **{**SETTINGS, "model__name": name}, **limits)
    assert replays.captured == 2 * len(batch_sizes(4))
    for _ in range(2):
        assert tokens_of(engine) == reference({"states": States, "two-shapes": TwoShapes}[name])
    assert {kind for kind, *_ in engine.stats().graph_replays} == {"decode"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["states", "two-shapes"])
def test_cuda_graphs_advance_the_states(make_engine: Any, name: str) -> None:
    limits = {**TIGHT, "scheduler__max_running": 4, "executor__device": "cuda"}
    found = []
    for graphs in ("off", "decode"):
        engine = make_engine(state_models, **{**SETTINGS, "model__name": name}, **limits, executor__graphs=graphs)
        found += [tokens_of(engine), tokens_of(engine)]
        assert (engine.stats().graph_replays != ()) == (graphs == "decode")
    assert found[1:] == found[:-1]


def test_piecewise_graphs_of_states_are_refused(make_engine: Any, replays: type[ReplayByRunning]) -> None:
    with pytest.raises(ConfigError, match=r"keep a state, .* lengths of the chunks; use --graphs decode or auto"):
        make_engine(state_models, **SETTINGS, executor__graphs="on")


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        (
            {"attention": "torch"},
            r"'torch' .* refuses: .* none has attention; leave attention.name \(--attention\) out",
        ),
        ({"attention__options": {"a": 1}}, r"attention.options is set, but .* none has attention; leave it out"),
        ({"cache__memory": "1MiB"}, r"cache.memory is set, but .* none has a KV cache; remove it; --max-running sets"),
        ({"cache__dtype": "float16"}, r"cache.dtype is set, but"),
        ({"cache__block_size": 32}, r"cache.block_size is set, but"),
        ({"cache__metrics": True}, r"cache.metrics is set, but"),
        ({"speculator": "ngram"}, r"keep a state, which cannot go back .*; leave the speculator out"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_setting_without_effect_on_a_model_of_states_is_refused(
    make_engine: Any, setting: dict[str, Any], error: str
) -> None:
    with pytest.raises(EngineError, match=error):
        make_engine(state_models, **{**SETTINGS, **setting})


def test_a_model_of_states_has_no_blocks_and_no_attention_backend(make_engine: Any) -> None:
    engine = make_engine(state_models, **SETTINGS, **TIGHT, cache__prefix_caching=False, cache__memory_fraction=0.25)
    assert engine.parts.attention is None
    assert "attention" not in [choice.extension_point for choice in engine.parts.choices]
    cache, stats = engine.cache_info, engine.stats()
    assert (cache.num_blocks, cache.kv_bytes, cache.kinds, cache.states) == (0, 0, (), 3)
    assert cache.state_bytes == (3 + 1) * 4 * (2 * (2 * 4 * 6 + 16) + 16)
    assert (stats.blocks_used, stats.blocks_cached, stats.blocks_total, stats.blocks_by_kind) == (0, 0, 0, ())
    assert engine.reset_prefix_cache() == 0


def test_as_many_sequences_run_as_have_their_states_in_memory(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = 4 * (2 * (2 * 4 * 6 + 16) + 16)
    monkeypatch.setattr(Host, "free_memory", lambda _: 10**9)
    monkeypatch.setattr(derived, "STATES_SHARE", 6 * each / 10**9)
    engine = make_engine(state_models, **SETTINGS)
    assert engine.config.scheduler.max_running == 5
    assert engine.cache_info.state_bytes == 6 * each
    assert make_engine(state_models, **SETTINGS, scheduler__max_running=7).config.scheduler.max_running == 7


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_preempted_sequence_computes_its_states_again(make_engine: Any, expected: Tokens, overlap: str) -> None:
    limits = {**TIGHT, "scheduler__max_running": 2, "scheduler__overlap": overlap}
    engine = make_engine(state_models, **SETTINGS, **limits, scheduler="priority")
    add(engine, 2, priority=1)
    add(engine, 1, priority=1)
    tokens: dict[int, list[int]] = {number: [] for number in range(4)}

    def step() -> None:
        for output in engine.step():
            tokens[int(output.request)] += output.tokens

    while not tokens[1]:
        step()
    add(engine, 3)
    add(engine, 0)
    while engine.has_work:
        step()
    assert engine.stats().preemptions == 2
    assert [tuple(each) for each in tokens.values()] == expected[:4]


def test_an_aborted_request_leaves_its_row_to_others(make_engine: Any, expected: Tokens) -> None:
    engine = make_engine(state_models, **SETTINGS, **{**TIGHT, "scheduler__max_running": 2})
    for number in (0, 1, 2, 5):
        add(engine, number)
    engine.step()
    engine.step()
    engine.abort("0")  # within its prompt, of which a step is in flight
    tokens: dict[int, list[int]] = {1: [], 2: [], 5: []}
    while engine.has_work:
        for output in engine.step():
            tokens[int(output.request)] += output.tokens
    assert {number: tuple(each) for number, each in tokens.items()} == {number: expected[number] for number in tokens}


def test_steps_of_several_iterations_advance_the_states(make_engine: Any, expected: Tokens) -> None:
    policy = {"scheduler": "multi_step", "scheduler__options__steps": 5}
    engine = make_engine(state_models, **SETTINGS, **policy)
    assert tokens_of(engine) == expected
    assert engine.stats().steps < GREEDY.max_tokens


def test_sampled_tokens_do_not_depend_on_other_requests(make_engine: Any) -> None:
    engine = make_engine(state_models, **SETTINGS, **TIGHT)
    params = [
        attrs.evolve(GREEDY, temperature=2.0, seed=seed, repetition_penalty=1.1 if seed % 2 else 1.0)
        for seed in range(4)
    ]
    together = [one.token_ids for one in engine.generate([PROMPTS[1]] * len(params), params)]
    assert len(set(together)) == len(together)
    assert [engine.generate([PROMPTS[1]], [each])[0].token_ids for each in params] == together
