"""Models with layers that keep a state, with and without attention, as a third party would write them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import torch

from engine.core.attention import StatePool
from engine.core.hooks import hookimpl
from engine.core.layers import LayerFactory
from engine.core.models import ForwardPass, KVShape, Model, ModelSpec, StateShape

HIDDEN, HEADS, KEY, VALUE, VOCABULARY = 16, 2, 4, 6, 512
KEYED = StateShape(tensors=(((HEADS, KEY, VALUE), "float32"), ((HIDDEN,), "float32")), replicated=(False, True))
"""A matrix per head, as in linear attention, and the hidden state of the token before, as in a token shift."""
SUMS = StateShape(tensors=(((HIDDEN,), "float32"),))
HEAD, SCALE = 8, 0.5
ATTENTION = KVShape(num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD)


class KeyedLayer:
    """state = decay * state + key x value; output = query . state."""

    def __init__(self, number: int, layers: LayerFactory) -> None:
        self.place = layers.cache_place(number)
        sizes = [HEADS * KEY, HEADS * KEY, HEADS * VALUE, HEADS]
        names = [f"{number}.{part}" for part in ("query", "key", "value", "decay")]
        self.inputs = layers.linear(list(zip(names, sizes, strict=True)), HIDDEN, parallel="column")
        self.output = layers.linear([(f"{number}.output", HIDDEN)], HEADS * VALUE, parallel="row")
        self.heads = layers.shard(HEADS, "heads")
        self.sizes = [size // layers.ranks for size in sizes]

    def __call__(self, run: ForwardPass, hidden: torch.Tensor) -> torch.Tensor:
        own, pool, index = _own(run, self.place)
        matrices, before = pool.layers[index]
        rows = own.batch.state_rows
        assert rows is not None
        if own.batch.num_decodes == own.batch.num_sequences:  # one token per sequence: no loop, for CUDA graphs
            parts = self.project(hidden + before[rows])
            state = self.next_state(matrices[rows], *parts[1:])
            matrices.index_copy_(0, rows, state)
            before.index_copy_(0, rows, hidden)
            return self.read(parts[0], state)
        out = []
        for row, start, tokens in _sequences(own, hidden):
            state, last = torch.zeros_like(matrices[row]), torch.zeros_like(before[row])
            if start:
                state, last = matrices[row], before[row]
            parts = self.project(tokens + torch.cat((last[None], tokens[:-1])))
            states = []
            for each in zip(*parts[1:], strict=True):
                state = self.next_state(state, *each)
                states.append(state)
            matrices[row], before[row] = state, tokens[-1]
            out.append(self.read(parts[0], torch.stack(states)))
        return torch.cat(out)

    def project(self, x: torch.Tensor) -> list[torch.Tensor]:
        q, k, v, decay = self.inputs(x).split(self.sizes, -1)
        return [part.unflatten(-1, (self.heads, -1)) for part in (q, k.tanh(), v.tanh(), decay.sigmoid())]

    def next_state(self, state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        return decay[..., None] * state + k[..., None] * v[..., None, :]

    def read(self, q: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return self.output(torch.einsum("thk,thkv->thv", q, states).flatten(1))

    def reference(self) -> Generator[torch.Tensor, torch.Tensor, None]:
        """Receives one sequence token by token, and yields what the layer adds, head by head."""
        matrices, before, out = [torch.zeros(KEY, VALUE) for _ in range(HEADS)], torch.zeros(HIDDEN), torch.empty(0)
        while True:
            token = yield out
            q, k, v, decay = self.inputs((token + before)[None])[0].split(self.sizes)
            before, heads = token, []
            for head, matrix in enumerate(matrices):
                keys, values = slice(head * KEY, (head + 1) * KEY), slice(head * VALUE, (head + 1) * VALUE)
                matrices[head] = torch.sigmoid(decay[head]) * matrix + torch.outer(k[keys].tanh(), v[values].tanh())
                heads.append(q[keys] @ matrices[head])
            out = self.output(torch.cat(heads)[None])[0]


class SumLayer:
    """state = 0.75 * state + input, which the output layer reads."""

    def __init__(self, number: int, layers: LayerFactory) -> None:
        self.place = layers.cache_place(number)
        self.input = layers.linear([(f"{number}.input", HIDDEN)], HIDDEN, parallel="column")
        self.output = layers.linear([(f"{number}.output", HIDDEN)], HIDDEN, parallel="row")

    def __call__(self, run: ForwardPass, hidden: torch.Tensor) -> torch.Tensor:
        return self.output(self.sums(run, hidden))

    def sums(self, run: ForwardPass, hidden: torch.Tensor) -> torch.Tensor:
        own, pool, index = _own(run, self.place)
        [sums] = pool.layers[index]
        rows, inputs = own.batch.state_rows, self.input(hidden).tanh()
        assert rows is not None
        if own.batch.num_decodes == own.batch.num_sequences:
            sums.index_copy_(0, rows, 0.75 * sums[rows] + inputs)
            return sums[rows]
        out = []
        for row, start, tokens in _sequences(own, inputs):
            state = sums[row] if start else torch.zeros_like(sums[row])
            for token in tokens:
                state = 0.75 * state + token
                out.append(state)
            sums[row] = state
        return torch.stack(out)

    def reference(self) -> Generator[torch.Tensor, torch.Tensor, None]:
        state, out = torch.zeros(HIDDEN), torch.empty(0)
        while True:
            state = 0.75 * state + self.input((yield out)[None])[0].tanh()
            out = self.output(state[None])[0]


class AttentionLayer:
    """Attention without a rotary embedding."""

    def __init__(self, number: int, layers: LayerFactory) -> None:
        heads, parts = layers.shard(HEADS, "heads"), [(f"{number}.{part}", HEADS * HEAD) for part in ("q", "k", "v")]
        self.qkv = layers.linear(parts, HIDDEN, parallel="column")
        self.attention = layers.attention(number, heads, heads, HEAD)
        self.output = layers.linear([(f"{number}.output", HIDDEN)], HEADS * HEAD, parallel="row")

    def __call__(self, run: ForwardPass, hidden: torch.Tensor) -> torch.Tensor:
        return self.output(self.attention(run, self.qkv(hidden), None))

    def reference(self) -> Generator[torch.Tensor, torch.Tensor, None]:
        context, out = [], torch.empty(0)
        while True:
            q, k, v = self.qkv((yield out)[None]).view(3, HEADS, HEAD)
            context.append((k, v))
            keys, values = (torch.stack(part) for part in zip(*context, strict=True))
            weights = (torch.einsum("hd,chd->hc", q, keys) * SCALE).softmax(-1)
            out = self.output(torch.einsum("hc,chd->hd", weights, values).reshape(1, -1))[0]


LAYERS: dict[KVShape | StateShape, Any] = {KEYED: KeyedLayer, SUMS: SumLayer, ATTENTION: AttentionLayer}


def _own(run: ForwardPass, place: tuple[int, int]) -> tuple[ForwardPass, StatePool, int]:
    """The pass and the pool of a layer's group, and the layer's index there."""
    own = run.of_group(place[0])
    assert isinstance(own.pool, StatePool)
    return own, own.pool, place[1]


def _sequences(own: ForwardPass, x: torch.Tensor) -> Any:
    """Row, position and x of the tokens of each sequence."""
    counts = own.batch.query_lens_host
    assert own.batch.state_rows is not None
    return zip(
        own.batch.state_rows.tolist(),
        (own.batch.context_lens_host - counts).tolist(),
        x.split(counts.tolist()),  # type: ignore[no-untyped-call]
        strict=True,
    )


class States(Model):
    """Two layers with states of one shape."""

    api = "2"
    caches: tuple[KVShape | StateShape, ...] = (KEYED, KEYED)
    attention: Mapping[str, Any] = {}

    @classmethod
    def refuses(cls, config: Mapping[str, Any]) -> str | None:
        return None

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        return ModelSpec(
            num_layers=len(cls.caches),
            hidden_size=HIDDEN,
            vocab_size=VOCABULARY,
            max_len=128,
            layer_caches=cls.caches,
            **cls.attention,
        )

    def __init__(self, config: Mapping[str, Any], layers: LayerFactory, options: Any = None) -> None:
        layers.ignore("*")
        self.embedding = layers.embedding("embedding", VOCABULARY, HIDDEN)
        self.layers = [LAYERS[cache](number, layers) for number, cache in enumerate(self.caches)]
        self.norm = layers.norm("norm", HIDDEN, 1e-6)
        self.head = layers.lm_head("head", VOCABULARY, HIDDEN)

    def forward(self, run: ForwardPass) -> torch.Tensor:
        hidden = self.embedding(run.batch.tokens)
        for layer in self.layers:
            hidden = hidden + layer(run, hidden)
        return self.norm(hidden)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    @torch.inference_mode()
    def reference(self, prompt: list[int], count: int) -> list[int]:
        """The greedy tokens after a prompt, by the definition of the network: one recurrence over all tokens."""
        tokens, recurrences = list(prompt), [layer.reference() for layer in self.layers]
        for recurrence in recurrences:
            next(recurrence)
        for number in range(len(prompt) + count - 1):
            hidden = self.embedding(torch.tensor(tokens[number : number + 1]))[0]
            for recurrence in recurrences:
                hidden = hidden + recurrence.send(hidden)
            if number >= len(prompt) - 1:
                tokens.append(int(self.logits(self.norm(hidden[None])[0]).argmax()))
        return tokens[len(prompt) :]


class TwoShapes(States):
    """Three layers with states of two shapes, and so two cache groups."""

    caches = (KEYED, SUMS, KEYED)


class Hybrid(States):
    """Layers with states and layers with attention, which have a KV cache."""

    caches = (KEYED, ATTENTION, SUMS, ATTENTION)
    attention = {"num_heads": HEADS, "num_kv_heads": HEADS, "head_dim": HEAD, "scale": SCALE}  # noqa: RUF012


@hookimpl
def register_models(register: Any) -> None:
    register("states", lambda: States, api="2", summary="", preference=0)
    register("two-shapes", lambda: TwoShapes, api="2", summary="", preference=0)
    register("hybrid", lambda: Hybrid, api="2", summary="", preference=0)
