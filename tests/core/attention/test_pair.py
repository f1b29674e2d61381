"""Two attention backends as a pair: what each receives, where its results go, and what a pair refuses."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from attrs import frozen

from engine.core.attention.base import AttentionBackend, AttentionSpec, GraphSlot, HeadRotation
from engine.core.attention.batch import ForwardBatch
from engine.core.attention.kv_pool import KVPool
from engine.core.attention.pair import AttentionPair, split_batch
from engine.core.config.structure import structure_options
from engine.core.device import DeviceInfo
from engine.core.errors import ConfigError
from engine.plugins.attention.native import NativeAttention
from engine.plugins.attention.torch import TorchAttention
from engine.testing.attention import AttentionConformance

CPU = DeviceInfo(type="cpu")
SPEC = AttentionSpec(
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    scale=0.5,
    dtype="float32",
    kv_dtype="float32",
    block_size=16,
    max_len=64,
    sliding_windows=(None,),
)


class TestTwice(AttentionConformance):
    backend = AttentionPair(("torch", "torch"), (TorchAttention, TorchAttention))


class TestTwoKinds(AttentionConformance):
    backend = AttentionPair(("torch", "native"), (TorchAttention, NativeAttention))


@frozen
class Tile:
    tile: int = 16


class Fake(AttentionBackend[Any, str]):
    """Fills its rows with a number of its own and keeps the batches it planned."""

    api = "1"
    mark = 0.0
    refusal: str | None = None

    @classmethod
    def refuses(cls, spec: AttentionSpec, device: DeviceInfo) -> str | None:
        return cls.refusal

    def __init__(self, spec: AttentionSpec, pool: Any, options: Any) -> None:
        self.pool, self.options = pool, options
        self.planned: list[tuple[ForwardBatch, GraphSlot | None]] = []
        self.given: list[tuple[torch.Tensor, ...]] = []

    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> str:
        self.planned.append((batch, graph))
        return f"{self.mark}"

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: str) -> torch.Tensor:
        assert plan == f"{self.mark}"
        self.given.append((q, k, v))
        return torch.full(q.shape, self.mark)


class First(Fake):
    mark = 1.0


class Second(Fake):
    mark = 2.0
    graphs = "decode"
    options_class = Tile


def made(first: type[Fake] = First, second: type[Fake] = Second, options: Any = None) -> Any:
    cls = AttentionPair(("one", "two"), (first, second))
    assert cls.options_class is not None
    return cls(SPEC, KVPool(SPEC, 4, "cpu"), options or cls.options_class())


def batch_of(decodes: int, prompts: tuple[int, ...]) -> ForwardBatch:
    new = np.array([1] * decodes + list(prompts), np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    rows, sequences = int(starts[-1]), len(new)
    return ForwardBatch(
        tokens=torch.arange(rows),
        positions=torch.arange(rows) + 100,
        slots=torch.arange(rows) + 200,
        query_starts=torch.tensor(starts),
        context_lens=torch.tensor(new) + 10,
        block_tables=torch.arange(sequences * 2, dtype=torch.int32).view(sequences, 2),
        logit_rows=torch.tensor(starts[1:] - 1, dtype=torch.int64),
        num_decodes=decodes,
        query_lens_host=new,
        context_lens_host=new + np.int32(10),
        block_tables_host=np.arange(sequences * 2, dtype=np.int32).reshape(sequences, 2),
    )


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 4, 8), torch.randn(rows, 2, 8), torch.randn(rows, 2, 8)


def test_pair_gives_each_backend_its_rows_of_a_mixed_batch() -> None:
    pair = made()
    batch = batch_of(2, (3, 4))
    q, k, v = inputs(9)
    out = pair.forward(0, q, k, v, pair.plan(batch))
    assert out[:, 0, 0].tolist() == [2.0] * 2 + [1.0] * 7
    assert out.is_contiguous()
    [given] = pair._decode.given
    for tensor, whole in zip(given, (q, k, v), strict=True):
        assert torch.equal(tensor, whole[:2])
        assert tensor.data_ptr() == whole.data_ptr()
    [given] = pair._prefill.given
    for tensor, whole in zip(given, (q, k, v), strict=True):
        assert torch.equal(tensor, whole[2:])


@pytest.mark.parametrize(("decodes", "prompts", "mark"), [(3, (), 2.0), (0, (2, 5), 1.0)])
def test_pair_passes_on_an_unmixed_batch_unchanged(decodes: int, prompts: tuple[int, ...], mark: float) -> None:
    pair = made()
    batch, slot = batch_of(decodes, prompts), GraphSlot(decodes)
    rows = decodes + sum(prompts)
    q, k, v = inputs(rows)
    plan = pair.plan(batch, slot)
    out = pair.forward(0, q, k, v, plan)
    assert out[:, 0, 0].tolist() == [mark] * rows
    into = torch.empty_like(q)
    pair.forward_into(0, q, k, v, plan, into)
    assert torch.equal(into, out)
    part, other = (pair._decode, pair._prefill) if decodes else (pair._prefill, pair._decode)
    [(planned, graph)] = part.planned
    assert planned is batch
    assert graph is slot
    assert not other.planned
    assert all(given[0] is q for given in part.given)


def test_pair_passes_projections_on_to_the_only_backend_of_a_batch() -> None:
    pair = made()
    rotation = HeadRotation(cos=None, sin=None)
    for part, mark in ((pair._prefill, 1.0), (pair._decode, 2.0)):
        part.rotate_and_forward = lambda layer, qkv, rotation, plan, mark=mark: qkv + mark
    qkv = torch.zeros(9, 8)
    assert pair.rotate_and_forward(0, qkv, rotation, pair.plan(batch_of(9, ()))).unique().tolist() == [2.0]
    assert pair.rotate_and_forward(0, qkv, rotation, pair.plan(batch_of(0, (4, 5)))).unique().tolist() == [1.0]
    assert pair.rotate_and_forward(0, qkv, rotation, pair.plan(batch_of(2, (3, 4)))) is None


def test_split_batch_separates_decoding_and_prefilling_sequences() -> None:
    batch = batch_of(2, (3, 4))
    decodes, prompts = split_batch(batch)
    assert (decodes.num_decodes, decodes.num_sequences) == (2, 2)
    assert decodes.query_starts.tolist() == [0, 1, 2]
    assert decodes.logit_rows.tolist() == [0, 1]
    assert (prompts.num_decodes, prompts.num_sequences) == (0, 2)
    assert prompts.query_starts.tolist() == [0, 3, 7]
    assert prompts.logit_rows.tolist() == [2, 6]
    assert prompts.query_starts.dtype == torch.int32
    for part, rows, sequences in ((decodes, slice(0, 2), slice(0, 2)), (prompts, slice(2, 9), slice(2, 4))):
        for name in ("tokens", "positions", "slots"):
            assert torch.equal(getattr(part, name), getattr(batch, name)[rows])
        for name in ("context_lens", "block_tables"):
            assert torch.equal(getattr(part, name), getattr(batch, name)[sequences])
        for name in ("query_lens_host", "context_lens_host", "block_tables_host"):
            np.testing.assert_array_equal(getattr(part, name), getattr(batch, name)[sequences])


def test_pair_gives_both_backends_one_pool_and_each_its_options() -> None:
    cls = AttentionPair(("one", "two"), (First, Second))
    options = structure_options({"decode": {"tile": 64}}, cls.options_class, "attention.options")
    pair = made(options=options)
    assert pair._prefill.pool is pair._decode.pool
    assert pair._prefill.options is None
    assert pair._decode.options == Tile(64)
    assert made()._decode.options == Tile(16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": 64}, "attention.options: there is no option 'tile'; known: prefill, decode"),
        ({"decode": {"tiel": 64}}, r"attention.options.decode: there is no option 'tiel'; did you mean tile\?"),
        ({"decode": {"tile": "64"}}, "attention.options.decode.tile: expected a whole number"),
        ({"decode": 3}, "attention.options.decode: expected a table"),
        ({"prefill": {"tile": 64}}, "attention.options.prefill: there is no option 'tile'; known: nothing"),
    ],
)
def test_pair_options_refuse_wrong_values(options: dict[str, Any], message: str) -> None:
    cls = AttentionPair(("one", "two"), (First, Second))
    with pytest.raises(ConfigError, match=message):
        structure_options(options, cls.options_class, "attention.options")


@pytest.mark.parametrize(
    ("prefill", "decode", "graphs"),
    [
        ("none", "decode", "decode"),
        ("decode", "none", "none"),
        ("any", "any", "any"),
        ("decode", "any", "decode"),
        ("any", "none", "none"),
    ],
)
def test_pair_graphs_are_those_of_the_decode_backend(prefill: str, decode: str, graphs: str) -> None:
    first, second = type("A", (First,), {"graphs": prefill}), type("B", (Second,), {"graphs": decode})
    assert made(first, second).graphs == graphs


def test_pair_graphs_follow_the_instance() -> None:
    class Modest(Second):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.graphs = "none"

    assert made(First, Modest).graphs == "none"


def with_(base: type[Fake], **members: Any) -> type[Fake]:
    return type("Changed", (base,), members)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"refusal": "no tide"}, {}, "one (for prefill): no tide"),
        ({}, {"refusal": "no moon"}, "two (for decode): no moon"),
        ({"refusal": "no tide"}, {"refusal": "no moon"}, "one (for prefill): no tide; two (for decode): no moon"),
        ({"kv_layout": "HND"}, {}, "one reads HND and two reads NHD; choose two"),
        (
            {"block_sizes": (16, 32)},
            {"block_sizes": (64,)},
            "one reads KV blocks of 16 or 32 tokens and two of 64, none",
        ),
    ],
)
def test_pair_refusals_name_the_backend(first: dict[str, Any], second: dict[str, Any], said: str) -> None:
    cls = AttentionPair(("one", "two"), (with_(First, **first), with_(Second, **second)))
    assert said in (cls.refuses(SPEC, CPU) or "")


def test_pair_reads_block_sizes_that_both_backends_read() -> None:
    def sizes(first: Any, second: Any) -> Any:
        return AttentionPair(
            ("a", "b"), (with_(First, block_sizes=first), with_(Second, block_sizes=second))
        ).block_sizes

    assert sizes(None, None) is None
    assert sizes((16, 32), None) == (16, 32)
    assert sizes(None, (64, 16)) == (64, 16)
    assert sizes((16, 32, 64), (64, 16)) == (64, 16)
    assert AttentionPair(("a", "b"), (with_(First, kv_layout="HND"), with_(Second, kv_layout="HND"))).kv_layout == "HND"


def test_pair_options_without_a_default_are_required() -> None:
    @frozen
    class Needed:
        tile: int

    cls = AttentionPair(("one", "two"), (First, with_(Second, options_class=Needed)))
    with pytest.raises(ConfigError, match=r"two's options\.tile: this option has no default; give it"):
        structure_options({}, cls.options_class, "attention.options")
    assert attrs.asdict(structure_options({"decode": {"tile": 3}}, cls.options_class, "x"))["decode"] == {"tile": 3}
