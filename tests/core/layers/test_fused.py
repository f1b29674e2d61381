"""Fused layers equal plain layers. On the CPU in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core.distributed import PartialSum
from engine.core.distributed.partial_sum import SplitSum, sum_addends
from engine.core.distributed.sum_exchange import ExchangedSum
from engine.core.layers import LayerFactory, RotarySpec
from engine.core.layers.fused import FusedAttention
from engine.core.layers.skinny_linear import ROW_CLASSES, SkinnyKernel
from engine.core.quant.float8 import UNSCALED, KVScales
from engine.ops.gemm.skinny_launch import SKINNY_MAX_ROWS
from engine.ops.norm.all_reduce_rms_norm import ReduceBuffers
from engine.testing.ranks import LoneRank

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Doubling(LoneRank):
    """One of two ranks that compute the same."""

    def all_reduce(self, x: Any) -> Any:
        return 2 * x


def both(build: Any, **shares: Any) -> Any:
    """What `build` makes with a plain and a fused factory, filled with the same weights."""
    made = []
    for fused in (False, True):
        layers = LayerFactory(dtype="float32", device=DEVICE, fused=fused, **shares)
        made.append(build(layers))
        for layer in layers.layers:
            weights = {}
            for name, spec in layer.tensors().items():
                shape = list(spec.shape)
                if spec.shard_dim is not None:
                    shape[spec.shard_dim] //= layers.ranks
                generator = torch.Generator().manual_seed(len(name) + sum(name.encode()))
                weights[name] = torch.randn(shape, generator=generator).to(DEVICE)
            layer.fill(weights)
    return made


def randn(*shape: Any) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("ranks", [0, 1, 2])
@pytest.mark.parametrize("kind", ["rms", "rms_unit_offset"])
def test_norm_with_logits_equals_plain(tokens: int, ranks: int, kind: Any) -> None:
    def build(layers: LayerFactory) -> Any:
        return layers.norm("norm", 48, 1e-5, kind), layers.linear([("router", 7)], 48, bias=True)

    (norm, router), (fused_norm, fused_router) = both(build)
    x, residual = randn(tokens, 48), randn(tokens, 48) + 1

    def given() -> Any:
        return PartialSum(x.clone(), Doubling(0, ranks)) if ranks else x

    for wanted, found in zip(
        norm.with_logits(router, given(), residual),
        fused_norm.with_logits(fused_router, given(), residual.clone()),
        strict=True,
    ):
        close(found, wanted)


def test_norm_equals_plain() -> None:
    plain, fused = both(lambda layers: layers.norm("norm", 48, 1e-5))
    x, residual = randn(3, 48), randn(3, 48) + 1
    for one, other in zip(fused(x, residual.clone()), plain(x, residual), strict=True):
        close(one, other)
    close(fused(x)[0], plain(x)[0])


def test_norm_with_an_offset_equals_plain_and_its_weight_is_in_float32() -> None:
    plain, fused = both(lambda layers: layers.norm("norm", 48, 1e-5, "rms_unit_offset"))
    x, residual = randn(3, 48), randn(3, 48) + 1
    for one, other in zip(fused(x, residual.clone()), plain(x, residual), strict=True):
        close(one, other)
    assert fused.weight.dtype == plain.weight.dtype == torch.float32


class Reaching(Doubling):
    """A rank to which another sends its rows."""

    def __init__(self, size: int, max_rows: int) -> None:
        super().__init__(0, 2)
        shape = 2, max_rows, 2, size
        self.memory = [torch.full(shape, -1, dtype=torch.int32, device=DEVICE) for _ in range(2)]
        self.buffers = ReduceBuffers(
            rank=0,
            ranks=2,
            size=size,
            max_rows=max_rows,
            one_shot_rows=max_rows,
            messages=torch.tensor([each.data_ptr() for each in self.memory], device=DEVICE),
            epochs=torch.zeros(max_rows, dtype=torch.int32, device=DEVICE),
        )

    def receive(self, theirs: torch.Tensor, call: int) -> None:
        """The other rank's message of the first, second, ... call."""
        self.memory[0][call % 2, : len(theirs), 1] = theirs.view(torch.int32)

    def reduce_buffers(self, size: Any, dtype: Any) -> Any:
        assert (size, dtype) == (self.buffers.size, torch.float32)
        return self.buffers


def test_norm_reduces_partial_sums() -> None:
    x, theirs, residual = randn(3, 48), randn(2, 48) + 2, randn(3, 48) + 1
    group = Reaching(48, 2)
    plain, fused = both(lambda layers: layers.norm("norm", 48, 1e-5), group=group)
    alone = both(lambda layers: layers.norm("norm", 48, 1e-5))[0]
    expected = alone(x[:2] + theirs, residual[:2])
    for call in (1, 2, 3):
        group.receive(theirs, call)
        found = fused(PartialSum(x[:2], group), residual[:2].clone())
        for one, other in zip(found, expected, strict=True):
            close(one, other)
        assert torch.equal(group.memory[1][call % 2, :2, 0], x[:2].view(torch.int32)), "what the other rank receives"
    expected = alone(2 * x, residual)
    for norm in (fused, plain):  # three rows are more than the memory has room for
        for one, other in zip(norm(PartialSum(x, group), residual.clone()), expected, strict=True):
            close(one, other)


class NextLinear:
    """A layer whose kernel fuses input quantization from three rows on."""

    weights = "its weights"
    reads_float32_norm_weight = False

    def fused_input_quantization(self, x: Any) -> Any:
        return self if len(x) >= 3 else None

    def norm_and_quantize(self, *given: Any) -> Any:
        return "made", given

    def sum_norm_and_quantize(self, *given: Any) -> Any:
        return "made of addends", given


def test_norm_is_quantized_for_the_next_layer() -> None:
    norm = both(lambda layers: layers.norm("norm", 48, 1e-5))[1]
    x, residual = randn(3, 48), randn(3, 48) + 1
    assert norm.quantized_for(NextLinear(), x, residual) == ("made", (x, residual, norm.weight, 1e-5, "its weights"))
    assert norm.quantized_for(NextLinear(), x)[1][1] is None
    normed, total = norm.quantized_for(NextLinear(), x[:2], residual[:2].clone())
    assert torch.equal(total, x[:2] + residual[:2])
    assert torch.equal(normed, norm(total)[0])


@pytest.mark.parametrize("reads", [False, True])
def test_norm_with_an_offset_is_quantized_by_kernels_that_read_its_weight(reads: bool) -> None:
    norm = both(lambda layers: layers.norm("norm", 48, 1e-5, "rms_unit_offset"))[1]
    linear = NextLinear()
    linear.reads_float32_norm_weight = reads
    x = randn(3, 48)
    normed, _ = norm.quantized_for(linear, x)
    assert normed == "made" if reads else torch.equal(normed, norm(x)[0])


def test_norm_of_a_partial_sum_is_quantized_unless_its_kernel_reduces() -> None:
    def build(layers: Any) -> Any:
        return layers.norm("norm", 48, 1e-5)

    x, theirs, residual = randn(4, 48), randn(3, 48) + 2, randn(4, 48) + 1
    alone = both(build)[0]
    group = Reaching(48, 3)
    group.receive(theirs, call=1)
    norm = both(build, group=group)[1]
    normed, _ = norm.quantized_for(NextLinear(), PartialSum(x[:3], group), residual[:3].clone())
    close(normed, alone(x[:3] + theirs, residual[:3])[0])
    made, (summed, *_) = norm.quantized_for(NextLinear(), PartialSum(x, group), residual)
    assert made == "made"
    assert torch.equal(summed, 2 * x)
    other = Doubling(0, 2)
    norm = both(build, group=other)[1]
    normed, _ = norm.quantized_for(NextLinear(), PartialSum(x[:2], other), residual[:2].clone())
    close(normed, alone(2 * x[:2], residual[:2])[0])


class Received:
    """Stands in for rank 0's SumExchange that has received the other ranks' addends."""

    def __init__(self, *theirs: torch.Tensor) -> None:
        self.theirs = theirs
        self.released = 0

    def receive(self, started: ExchangedSum) -> list[torch.Tensor]:
        return [started.addend, *self.theirs]

    def release(self, received: ExchangedSum) -> None:
        self.released += 1


@pytest.mark.parametrize("count", [2, 4])
def test_norm_adds_the_addends_of_an_exchange(count: int) -> None:
    group = Doubling(0, count)
    plain, fused = both(lambda layers: layers.norm("norm", 48, 1e-5), group=group)
    x, theirs, residual = randn(4, 48), [randn(4, 48) + number for number in range(count - 1)], randn(4, 48) + 1
    for given in (residual, None):
        expected = plain(sum_addends([x, *theirs]), given)
        for norm in (plain, fused):
            for rows in (4, 2):  # two rows do not make a kernel of the next layer quantize
                exchange: Any = Received(*(each[:rows] for each in theirs))
                old = None if given is None else given[:rows].clone()
                exchanged = ExchangedSum(x[:rows].clone(), group, exchange, 0)
                found = norm.quantized_for(NextLinear(), exchanged, old) if rows == 2 else norm(exchanged, old)
                for one, other in zip(found, expected, strict=True):
                    close(one, other[:rows])
                assert exchange.released == 1


def test_norm_of_an_exchange_is_quantized_for_the_next_layer() -> None:
    norm = both(lambda layers: layers.norm("norm", 48, 1e-5))[1]
    x, theirs, residual = randn(3, 48), randn(3, 48), randn(3, 48)
    exchange: Any = Received(theirs)
    made = norm.quantized_for(NextLinear(), ExchangedSum(x, Doubling(0, 2), exchange, 0), residual)
    assert made == ("made of addends", ([x, theirs], residual, norm.weight, 1e-5, "its weights"))
    assert exchange.released == 1
    made = norm.quantized_for(NextLinear(), ExchangedSum(x, Doubling(0, 2)), residual)
    assert made == ("made", (x, residual, norm.weight, 1e-5, "its weights")), "nothing is exchanged by a rank alone"


def test_norm_of_an_exchange_with_logits_adds_the_addends() -> None:
    group = Doubling(0, 2)
    norm, router = both(lambda layers: (layers.norm("norm", 48, 1e-5), layers.linear([("r", 7)], 48)), group=group)[1]
    x, theirs, residual = randn(2, 48), randn(2, 48) + 2, randn(2, 48)
    expected, total = norm(x + theirs, residual.clone())
    exchange: Any = Received(theirs)
    found = norm.with_logits(router, ExchangedSum(x.clone(), group, exchange, 0), residual)
    for one, other in zip(found, (expected, total, router(expected)), strict=True):
        close(one, other)
    assert exchange.released == 1


def test_norm_of_a_split_sum_reduces_the_chunks() -> None:
    group = Reaching(48, 4)
    norms = both(lambda layers: layers.norm("norm", 48, 1e-5), group=group)
    x, theirs, residual = randn(4, 48), randn(4, 48) + 2, randn(4, 48) + 1
    expected = both(lambda layers: layers.norm("norm", 48, 1e-5))[0](x + theirs, residual)
    for norm in norms:
        chunks = []
        for begin, end in ((0, 3), (3, 4)):
            exchange: Any = Received(theirs[begin:end])
            chunks.append(ExchangedSum(x[begin:end].clone(), group, exchange, 0))
        for one, other in zip(norm(SplitSum(chunks, group), residual.clone()), expected, strict=True):
            close(one, other)


@pytest.mark.parametrize("rows", [0, 1, 3, 7, 16, 17, 40])
@pytest.mark.parametrize(("bias", "parallel", "ranks"), [(False, "none", 1), (True, "column", 2), (True, "row", 2)])
def test_linear_equals_plain(rows: int, bias: bool, parallel: Any, ranks: int) -> None:
    def build(layers: Any) -> Any:
        return layers.linear([("a", 40), ("b", 24)], 64, bias=bias, parallel=parallel)

    shares = {"group": Doubling(0, ranks)} if ranks > 1 else {}
    plain, fused = both(build, **shares)
    assert isinstance(fused.kernel, SkinnyKernel)
    x = randn(rows, 32 if parallel == "row" else 64)
    close(fused(x), plain(x))
    assert fused.nbytes == plain.nbytes or DEVICE == "cpu"


@pytest.mark.parametrize("rows", [1, 4, 9, 20])
def test_gated_equals_plain(rows: int) -> None:
    def build(layers: Any) -> Any:
        return layers.linear([("gate", 40), ("up", 40)], 64, bias=True, parallel="column", gated=True)

    plain, fused = both(build)
    x = randn(rows, 64)
    close(fused.gated(x), plain.gated(x))
    close(fused(x), plain(x))


@pytest.mark.parametrize("rows", [1, 4, 16, 17])
def test_lm_head_equals_plain(rows: int) -> None:
    plain, fused = both(lambda layers: layers.lm_head("lm_head", 100, 32))
    hidden = randn(rows, 32)
    logits = plain(hidden)
    close(fused(hidden), logits)
    for head in (plain, fused):
        max_logits, tokens = head.greedy(hidden)
        close(max_logits, logits.amax(-1))
        assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 16, 17])
def test_greedy_is_the_first_of_the_largest_logits_bit_for_bit(rows: int) -> None:
    """In half precision most of these logits are equal once they are rounded; their float32 sums differ."""
    dtype = "bfloat16" if DEVICE == "cuda" else "float16"
    layers = LayerFactory(dtype=dtype, device=DEVICE, fused=True)
    head = layers.lm_head("lm_head", 300, 64)
    weight = 1 + randn(300, 64) * 0.002
    for layer in layers.layers:
        layer.fill({name: weight.to(getattr(torch, dtype)) for name in layer.tensors()})
    hidden = (1 + randn(rows, 64).abs()).to(getattr(torch, dtype))
    logits = head(hidden)
    assert ((logits == logits.amax(-1, keepdim=True)).sum(-1) > 1).float().mean() > 0.5, "there are too few ties"
    max_logits, tokens = head.greedy(hidden)
    assert torch.equal(max_logits, logits.amax(-1).float())
    assert tokens.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]


@pytest.mark.parametrize(
    ("rotary_dim", "scaling"),
    [(16, {}), (8, {}), (16, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})],
)
@pytest.mark.parametrize("normed", [False, True])
def test_attention_equals_plain(rotary_dim: int, scaling: Any, normed: bool) -> None:
    spec = RotarySpec(rotary_dim=rotary_dim, type=scaling.get("rope_type", "default"), parameters=scaling)
    check_attention(spec, lambda layers: layers.head_norm(NORMED, 16, 1e-6) if normed else None)


@pytest.mark.parametrize("normed", [False, True])
def test_attention_with_growing_queries_equals_plain(normed: bool) -> None:
    parameters = {"original_max_position_embeddings": 64}
    spec = RotarySpec(rotary_dim=16, type="default", parameters=parameters, query_growth=0.5)
    check_attention(spec, lambda layers: layers.head_norm(NORMED, 16, 1e-6) if normed else None)


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_interleaved_attention_equals_plain(rotary_dim: int) -> None:
    spec = RotarySpec(rotary_dim=rotary_dim, type="default", parameters={}, interleaved=True)
    check_attention(spec, lambda layers: layers.head_norm(NORMED, 16, 1e-6, unit_offset=True))


@pytest.mark.parametrize("normed", [False, True])
def test_attention_without_rotation_equals_plain(normed: bool) -> None:
    check_attention(None, lambda layers: layers.head_norm(NORMED, 16, 1e-6) if normed else None)


def test_attention_with_a_norm_over_whole_projections_equals_plain() -> None:
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "eps": 1e-6}
    spec = RotarySpec(rotary_dim=16, type="default", parameters={})
    check_attention(spec, lambda layers: layers.projection_norm("q_norm", "k_norm", **shape))


NORMED = [("q_norm", 4), ("k_norm", 2)]


def check_attention(spec: RotarySpec | None, make_norm: Any) -> None:
    """Outputs and what is in the cache, of 4 query heads and 2 KV heads of 16 numbers."""

    def build(layers: Any) -> Any:
        interleaved = spec is not None and spec.interleaved
        attention = layers.attention(1, 4, 2, 16, make_norm(layers), interleaved=interleaved)
        return None if spec is None else layers.rotary(spec), attention

    found = []
    for rotary, attention in both(build):
        pool = SimpleNamespace(
            keys=torch.zeros(2, 3, 4, 2, 16).to(DEVICE),
            values=torch.zeros(2, 3, 4, 2, 16).to(DEVICE),
            scales=(UNSCALED, UNSCALED),
        )

        def write(layer: Any, k: Any, v: Any, slots: Any, pool: Any = pool) -> None:
            pool.keys[layer].flatten(0, 1)[slots] = k
            pool.values[layer].flatten(0, 1)[slots] = v

        pool.write = write
        run = SimpleNamespace(
            pool=pool,
            plan=None,
            batch=SimpleNamespace(slots=torch.tensor([9, 2, 5], device=DEVICE)),
            attention=SimpleNamespace(
                forward=lambda layer, q, k, v, plan: torch.cat((q, k, v), 1), rotate_and_forward=lambda *_: None
            ),
        )
        positions = torch.tensor([0, 7, 300], device=DEVICE)
        out = attention(run, randn(3, 8 * 16), None if rotary is None else rotary.angles(positions))
        found.append((out, pool.keys, pool.values))
    for one, other in zip(found[1], found[0], strict=True):
        close(one, other)


def test_latent_keys_equal_plain() -> None:
    """Queries, keys and what is in the cache, of 3 heads with latents of 32 numbers and 8 that are rotated."""
    spec = RotarySpec(rotary_dim=8, type="default", parameters={}, interleaved=True)
    found = []
    for rotary, keys in both(lambda layers: (layers.rotary(spec), layers.latent_keys("latent_norm", 32, 8, 1e-6))):
        cache = torch.zeros(2, 3, 4, 1, 40).to(DEVICE)

        def write(layer: Any, k: Any, v: Any, slots: Any, cache: Any = cache) -> None:
            cache[layer].flatten(0, 1)[slots] = k

        run = SimpleNamespace(
            pool=SimpleNamespace(keys=cache, write=write),
            batch=SimpleNamespace(slots=torch.tensor([9, 2, 5], device=DEVICE)),
        )
        q, heads = randn(3, 3, 40), randn(3, 3, 13)
        angles = rotary.angles(torch.tensor([0, 7, 300], device=DEVICE))
        found.append((keys(run, 1, q, heads[..., 5:], randn(3, 40), angles), q, cache))
    for one, other in zip(found[1], found[0], strict=True):
        close(one, other)


def test_attention_quantizes_by_the_scales_of_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("engine.core.layers.fused.rotate_and_write", lambda *arguments, **_: calls.append(arguments))
    layers = LayerFactory(dtype="float32", device=DEVICE, fused=True)
    pool = SimpleNamespace(keys="kK", values="vV", scales=(UNSCALED, KVScales(key=0.5, value=0.25)))
    run = SimpleNamespace(
        pool=pool,
        plan=None,
        batch=SimpleNamespace(slots=None),
        attention=SimpleNamespace(forward=lambda layer, q, k, v, plan: q, rotate_and_forward=lambda *_: None),
    )
    layers.attention(1, 4, 2, 16)(run, torch.zeros(3, 8 * 16), (None, None))
    assert calls[0][1:3] == ("K", "V")
    assert calls[0][-2:] == (0.5, 0.25)


@pytest.mark.parametrize("normed", [False, True])
def test_attention_leaves_norm_rotation_and_cache_to_a_backend_that_does_them(normed: bool) -> None:
    layers = LayerFactory(dtype="float32", device=DEVICE, fused=True)
    norm = layers.head_norm(NORMED, 16, 1e-6) if normed else None
    if norm is not None:
        norm.fill({name: torch.ones(16, device=DEVICE) for name in norm.tensors()})
    calls: list[Any] = []

    def rotate_and_forward(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return torch.full((3, 4, 16), 7.0)

    run = SimpleNamespace(plan="plan", attention=SimpleNamespace(rotate_and_forward=rotate_and_forward))
    qkv, cos, sin = torch.zeros(3, 8 * 16), torch.zeros(3, 8), torch.ones(3, 8)
    out = layers.attention(1, 4, 2, 16, norm, interleaved=True)(run, qkv, (cos, sin))
    assert torch.equal(out, torch.full((3, 64), 7.0))
    [(layer, given, rotation, plan)] = calls
    assert (layer, plan, rotation.interleaved) == (1, "plan", True)
    assert given is qkv
    assert (rotation.cos is cos, rotation.sin is sin) == (True, True)
    assert rotation.norm_weight is (None if norm is None else norm.weight)
    assert rotation.norm_eps == (1e-6 if normed else 0.0)


def test_attention_of_several_ranks_rotates_and_writes_in_a_kernel_of_its_own() -> None:
    attention = FusedAttention(0, 4, 2, 16, ranks=2)
    asked: list[Any] = []
    run = SimpleNamespace(
        plan=None,
        pool=SimpleNamespace(
            keys=[torch.zeros(1, 16, 2, 16, device=DEVICE)],
            values=[torch.zeros(1, 16, 2, 16, device=DEVICE)],
            scales=[SimpleNamespace(key=1.0, value=1.0)],
        ),
        batch=SimpleNamespace(slots=torch.tensor([3], device=DEVICE)),
        attention=SimpleNamespace(forward=lambda layer, q, k, v, plan: q, rotate_and_forward=asked.append),
    )
    qkv = torch.ones(1, 8 * 16, device=DEVICE)
    assert torch.equal(attention(run, qkv, None), torch.ones(1, 64, device=DEVICE))  # type: ignore[arg-type]
    assert run.pool.keys[0][0, 3].eq(1).all()
    assert not asked


def test_choice_is_for_all_layers_of_a_shape_and_all_rows_of_its_class() -> None:
    layers = LayerFactory(dtype="float32", device=DEVICE, fused=True)
    first, second = (layers.linear([(name, 40)], 64).kernel.skinny_gemm for name in ("a", "b"))
    other = layers.linear([("c", 41)], 64).kernel.skinny_gemm
    assert first is second
    assert first is not other
    for rows in ROW_CLASSES:
        first.choose(rows, None)
    assert first.launches == [None] * (SKINNY_MAX_ROWS + 1)
    tile = other.launches[1].tile
    first.choose(4, tile)
    assert [launch is not None for launch in first.launches[:6]] == [False, False, False, True, True, False]
