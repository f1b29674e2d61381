"""A model of a test's own with latent keys, states and windows, each a cache group, through the whole engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from engine.core.attention import AttentionBackend, AttentionSpec, ForwardBatch, GraphSlot, KVPool
from engine.core.device import DeviceInfo
from engine.core.errors import PluginError
from engine.core.hooks import hookimpl
from engine.core.layers import LayerFactory
from engine.core.models import ForwardPass, KVShape, Model, ModelSpec, StateShape
from engine.core.types import SamplingParams

HIDDEN, HEADS, VOCABULARY = 16, 2, 512
KEY, VALUE, WINDOW, DECAY = 12, 8, 6, 0.75
LENGTHS = (50, 21, 2, 2, 2, 2, 2, 2)
PROMPTS = [[(7 * row + 3 * at + row * at) % 500 for at in range(length)] for row, length in enumerate(LENGTHS)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class LatentAttention(AttentionBackend[None, ForwardBatch]):
    """Attention by its definition, one sequence after the other."""

    api = "2"
    reads_latent = True

    @classmethod
    def refuses(cls, spec: AttentionSpec, device: DeviceInfo) -> str | None:
        return None

    def __init__(self, spec: AttentionSpec, pool: KVPool, options: None) -> None:
        self.spec = spec
        self.pool = pool

    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> ForwardBatch:
        return batch

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: ForwardBatch
    ) -> torch.Tensor:
        out, size = [], self.spec.block_size
        queries = q.split(plan.query_lens_host.tolist())  # type: ignore[no-untyped-call]
        for sequence, own in enumerate(queries):
            end = int(plan.context_lens_host[sequence])
            window = self.spec.sliding_windows[layer] or end
            first = max(0, end - len(own) + 1 - window)
            at = torch.arange(first, end)
            slots = torch.from_numpy(plan.block_tables_host)[sequence, at // size].long() * size + at % size
            keys, values = (part[layer].flatten(0, 1)[slots] for part in (self.pool.keys, self.pool.values))
            out.append(attend(own, keys, values, self.spec.scale, window))
        return torch.cat(out)


class AttentionWithoutLatentKeys(LatentAttention):
    reads_latent = False


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """Causal attention of the last tokens of a sequence, whose one KV head all query heads share."""
    distance = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))
    scores = torch.einsum("qhd,kd->hqk", q, keys[:, 0]) * scale
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    return torch.einsum("hqk,kd->qhd", scores.softmax(-1), values[:, 0])


class Mixed(Model):
    """A latent layer, a layer with a state, and a layer with a window."""

    api = "2"

    @classmethod
    def refuses(cls, config: Mapping[str, Any]) -> str | None:
        return None

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        return ModelSpec(
            num_layers=3,
            num_heads=HEADS,
            num_kv_heads=1,
            head_dim=KEY,
            hidden_size=HIDDEN,
            vocab_size=VOCABULARY,
            max_len=128,
            sliding_windows=(None, None, WINDOW),
            scale=0.5,
            layer_caches=(
                KVShape(num_heads=HEADS, num_kv_heads=1, head_dim=KEY, value_head_dim=VALUE, latent=True),
                StateShape(tensors=(((HIDDEN,), "float32"),)),
                KVShape(num_heads=HEADS, num_kv_heads=1, head_dim=VALUE, scale=0.7),
            ),
        )

    def __init__(self, config: Mapping[str, Any], layers: LayerFactory, options: Any = None) -> None:
        layers.ignore("*")
        self.places = [layers.cache_place(layer) for layer in range(3)]
        self.embedding = layers.embedding("embedding", VOCABULARY, HIDDEN)
        self.queries = layers.linear([("queries", HEADS * KEY)], HIDDEN)
        self.latent = layers.linear([("latent", KEY)], HIDDEN)
        self.inputs = layers.linear([("inputs", HIDDEN)], HIDDEN)
        self.last = layers.linear([("last", (HEADS + 2) * VALUE)], HIDDEN)
        self.outputs = [layers.linear([(f"output.{layer}", HIDDEN)], HEADS * VALUE) for layer in (0, 2)]
        self.head = layers.lm_head("head", VOCABULARY, HIDDEN)

    def forward(self, run: ForwardPass) -> torch.Tensor:
        hidden = self.embedding(run.batch.tokens)
        hidden = hidden + self.outputs[0](self.attend(run, 0, *self.split_latent(hidden)).flatten(1))
        hidden = hidden + self.recur(run, torch.tanh(self.inputs(hidden)))
        return hidden + self.outputs[1](self.attend(run, 2, *self.split_last(hidden)).flatten(1))

    def attend(self, run: ForwardPass, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group, index = self.places[layer]
        own = run.of_group(group)
        own.pool.write(index, k, v, own.batch.slots)
        return own.attention.forward(index, q, k, v, own.plan)

    def recur(self, run: ForwardPass, inputs: torch.Tensor) -> torch.Tensor:
        """state = DECAY * state + input, for each token of each sequence."""
        group, index = self.places[1]
        own = run.of_group(group)
        states: torch.Tensor = own.pool.layers[index][0]  # type: ignore[attr-defined]
        assert own.batch.state_rows is not None
        out = []
        for row, start, tokens in zip(
            own.batch.state_rows.tolist(),
            own.batch.positions[own.batch.query_starts[:-1].long()].tolist(),
            inputs.split(own.batch.query_lens_host.tolist()),  # type: ignore[no-untyped-call]
            strict=True,
        ):
            before = states[row] if start else torch.zeros(HIDDEN)
            out.append(recurrence(before, tokens))
            states[row] = out[-1][-1]
        return torch.cat(out)

    def split_latent(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        latent = self.latent(hidden)[:, None]
        return self.queries(hidden).view(-1, HEADS, KEY), latent, latent[..., :VALUE]

    def split_last(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.last(hidden).view(-1, HEADS + 2, VALUE).split((HEADS, 1, 1), 1)
        return q, k, v

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    def reference(self, prompt: list[int], count: int) -> list[int]:
        """The greedy tokens after a prompt, by the definition of the network."""
        tokens = list(prompt)
        for _ in range(count):
            hidden = self.embedding(torch.tensor(tokens))
            hidden = hidden + self.outputs[0](attend(*self.split_latent(hidden), 0.5, len(tokens)).flatten(1))
            hidden = hidden + recurrence(torch.zeros(HIDDEN), torch.tanh(self.inputs(hidden)))
            hidden = hidden + self.outputs[1](attend(*self.split_last(hidden), 0.7, WINDOW).flatten(1))
            tokens.append(int(self.logits(hidden[-1:]).argmax()))
        return tokens[len(prompt) :]


def recurrence(state: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    states = []
    for each in inputs:
        state = DECAY * state + each
        states.append(state)
    return torch.stack(states)


class Offering:
    @hookimpl
    def register_models(self, register: Any) -> None:
        register("mixed", lambda: Mixed, api="2", summary="", preference=0)

    @hookimpl
    def register_attention(self, register: Any) -> None:
        register("latent", lambda: LatentAttention, api="2", summary="", preference=0)
        register("plain", lambda: AttentionWithoutLatentKeys, api="2", summary="", preference=0)


SETTINGS = {"model__name": "mixed", "model__load_format": "dummy", "attention__name": "latent", "cache__block_size": 4}


@pytest.mark.parametrize("memory", ["1MiB", "10KiB"], ids=["room for all", "preemption"])
@torch.inference_mode()
def test_latent_keys_states_and_windows_give_the_tokens_of_the_definition(make_engine: Any, memory: str) -> None:
    engine = make_engine(Offering(), **SETTINGS, cache__memory=memory, scheduler__max_batch_tokens=9, model__max_len=64)
    model = engine._executor._runner._launcher.state.model
    expected = [model.reference(prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    for _ in range(2):
        assert [list(one.token_ids) for one in engine.generate(PROMPTS, GREEDY)] == expected
    stats = engine.stats()
    assert stats.prefix_hits == 0, "a prefix was reused, whose state nothing keeps"
    assert (stats.preemptions > 0) == (memory == "10KiB")
    assert [kind for kind, *_ in stats.blocks_by_kind] == ["latent", f"window {WINDOW}"]
    assert engine.cache_info.state_bytes == 4 * HIDDEN * (engine.config.scheduler.max_running + 1)


def test_a_speculator_is_refused_where_layers_keep_a_state(make_engine: Any) -> None:
    with pytest.raises(PluginError, match=r"keep a state, which cannot go back .*; leave the speculator out"):
        make_engine(Offering(), **SETTINGS, speculator="ngram")


def test_a_backend_without_latent_keys_is_refused(make_engine: Any) -> None:
    with pytest.raises(PluginError, match=r"it reads no values of 8 numbers with keys of 12, as this model has"):
        make_engine(Offering(), **{**SETTINGS, "attention__name": "plain"})
