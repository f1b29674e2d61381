"""Models of several cache groups, and of windows, through the whole engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core import Engine, SamplingParams
from engine.core.models.forward_pass import ForwardPass
from engine.core.runner import graph_capture, start_graphs
from engine.core.runner.device_state import DeviceState, GroupState
from engine.core.runner.piecewise_graphs import PiecewiseGraphs
from engine.core.types import Request
from engine.testing.checkpoints import make_checkpoint
from tests.core.told_speculator import Told
from tests.reference_tokens import greedy_tokens

from .replays import ReplayByRunning
from .test_cuda_graphs import FixedAttention

WINDOW = 20
STEPS = 40
PROMPTS = [
    [(11 * row + 5 * column + row * column) % 500 for column in range(length)]
    for row, length in enumerate((230, 3, 61, 150))
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("mistral", {"sliding_window": WINDOW}),
    "mixed": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
}


class Windowed:
    """A checkpoint with windows, and the tokens that transformers generates."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        architecture, config = CONFIGS[name]
        self.path = make_checkpoint(directory, architecture, tokenizer=True, **config)
        self.expected = greedy_tokens(self.path, PROMPTS, STEPS)

    def engine(self, **settings: Any) -> Engine:
        usual = {
            "executor__device": "cpu",
            "cache__memory": "8MiB",
            "cache__block_size": 8,
            "scheduler__max_batch_tokens": 48,
            "attention": "torch",
        }
        return Engine(model=str(self.path), **usual | settings)


@pytest.fixture(scope="module", params=CONFIGS)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Windowed:
    return Windowed(tmp_path_factory.mktemp("model") / "model", request.param)


def tokens_of(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [list(completion.token_ids) for completion in engine.generate(prompts, GREEDY)]


@pytest.mark.parametrize("attention", ["torch", "native"])
def test_greedy_tokens_equal_transformers_with_contexts_many_times_the_window(
    windowed: Windowed, attention: str
) -> None:
    with windowed.engine(attention=attention) as engine:
        assert tokens_of(engine) == windowed.expected
        assert engine.stats().prefix_hits == 0
        assert tokens_of(engine) == windowed.expected
        assert engine.stats().prefix_hits > 400, "the second run found no prefixes"
        assert engine.stats().blocks_used == 0


def test_greedy_tokens_equal_transformers_when_sequences_are_preempted(windowed: Windowed) -> None:
    memory = {"windows": "44KiB", "mixed": "140KiB"}[windowed.name]  # little more than one context takes
    with windowed.engine(cache__memory=memory, model__max_len=288, scheduler="multi_step") as engine:
        assert tokens_of(engine, [PROMPTS[1]] * 6) == [windowed.expected[1]] * 6
        assert engine.stats().preemptions > 0


def test_replays_of_decode_steps_give_the_tokens_of_plain_steps(
    windowed: Windowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_capture, "GraphCapturer", ReplayByRunning)
    monkeypatch.setattr(start_graphs, "use_graphs", lambda *_: True)
    settings = {"executor__graphs": "decode", "scheduler__max_running": 3, "model__max_len": 288}
    with windowed.engine(attention=FixedAttention, **settings) as engine:
        assert tokens_of(engine) == windowed.expected


def test_replays_that_verify_drafts_give_the_tokens_of_plain_steps(
    windowed: Windowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_capture, "GraphCapturer", ReplayByRunning)
    monkeypatch.setattr(start_graphs, "use_graphs", lambda *_: True)
    settings = {"executor__graphs": "decode", "scheduler__max_running": 12, "model__max_len": 288}
    Told.tell({tuple(PROMPTS[at]): windowed.expected[at] for at in (0, 3)}, 3)
    with windowed.engine(attention=FixedAttention, **settings, speculator=Told, speculator__length="fixed") as engine:
        assert tokens_of(engine) == windowed.expected
        Told.tell({})
        assert "verify" in {kind for kind, *_ in engine.stats().graph_replays}


def test_a_long_context_holds_all_blocks_in_full_layers_and_a_window_in_others(windowed: Windowed) -> None:
    size, length, chunk = 8, 400, 32
    groups, has_full = (3, True) if windowed.name == "mixed" else (1, False)
    with windowed.engine(scheduler__max_batch_tokens=chunk, cache__memory="2MiB") as engine:
        prompt = tuple((7 * at + at // 3) % 500 for at in range(length))
        engine.add(Request(id="long", prompt=prompt, params=SamplingParams(max_tokens=100, ignore_eos=True, seed=1)))
        held = []
        while engine.has_work:
            engine.step()
            held.append(engine.stats().blocks_used)
        assert engine.cache_info.kinds[-1].groups == groups
    full = -(-(length + 100) // size) if has_full else 0
    decoding = held[-60:-1]
    assert max(held) <= full + groups * ((WINDOW + chunk - 1) // size + 2)
    assert full < max(decoding) <= full + groups * ((WINDOW - 1) // size + 2)


class Backend:
    """Notes the calls of its group."""

    def __init__(self, group: int, calls: list[Any]) -> None:
        self.group = group
        self.calls = calls

    def forward_into(self, layer: int, q: torch.Tensor, k: Any, v: Any, plan: Any, out: torch.Tensor) -> None:
        self.calls.append((self.group, layer, plan, len(q)))


class Alternating:
    """A model whose layers are of two groups in turn."""

    def __init__(self) -> None:
        self.slots: list[torch.Tensor] = []

    def forward(self, run: ForwardPass) -> torch.Tensor:
        self.slots = [own.batch.slots for own in run.groups]
        hidden = run.batch.tokens.float()[:, None, None]
        for layer in range(4):
            own = run.of_group(layer % 2)
            hidden = own.attention.forward(layer // 2, hidden, hidden, hidden, own.plan)
        return hidden[:, 0]


def test_piecewise_graphs_call_the_backend_of_each_layer_s_group_with_its_plan_and_slots() -> None:
    calls: list[Any] = []
    model, pool = Alternating(), SimpleNamespace(scratch_block=9, block_size=4, output_dim=1)
    groups = tuple(GroupState(pool=pool, attention=Backend(group, calls)) for group in range(2))  # type: ignore[arg-type]
    state = DeviceState(model=model, groups=groups, persistent_batch=None, sampler=None)  # type: ignore[arg-type]
    capturer: Any = SimpleNamespace(capture_segments=lambda work: ([lambda: None] * 5, work(lambda: None)))
    graphs = PiecewiseGraphs(state, capturer, max_tokens=64, device=torch.device("cpu"))
    graphs.capture_all(lambda done, total: None)
    none: Any = None
    slots = torch.tensor([[1, 2, 3], [5, 6, 7]])
    passes = [
        ForwardPass(batch=SimpleNamespace(slots=own), attention=group.attention, plan=f"plan {number}", pool=none)  # type: ignore[arg-type]
        for number, (own, group) in enumerate(zip(slots, groups, strict=True))
    ]
    batch: Any = SimpleNamespace(
        tokens=torch.tensor([1, 2, 3]), positions=torch.arange(3), groups=[one.batch for one in passes]
    )
    hidden = graphs.run(ForwardPass(batch=batch, attention=none, plan=none, pool=none, groups=tuple(passes)))
    assert hidden.shape == (3, 1)
    assert calls == [(group, layer, f"plan {group}", 3) for layer in range(2) for group in range(2)]
    for own, given in zip(model.slots, slots, strict=True):
        assert own.tolist() == [*given.tolist(), *[9 * 4] * 61]


@pytest.mark.parametrize("windowed", ["mixed"], indirect=True)
def test_two_ranks_in_processes_of_their_own_give_the_same_tokens(windowed: Windowed) -> None:
    settings = {"executor__tensor_parallel": 2, "executor__threads": 1, "model__max_len": 288}
    with windowed.engine(**settings) as engine:
        assert tokens_of(engine) == windowed.expected
