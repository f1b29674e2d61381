"""Prefill of the torch backend in tiles of queries: the same attention, in memory that is bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.core.attention import AttentionSpec, ForwardBatch, KVPool
from engine.plugins.attention import torch as torch_backend
from engine.plugins.attention.torch import TorchAttention

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 16


def make_spec(max_len: int, window: int | None, softcap: float | None, dtype: str = "float32") -> AttentionSpec:
    return AttentionSpec(
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        scale=DIM**-0.5,
        dtype=dtype,
        kv_dtype=dtype,
        block_size=BLOCK,
        max_len=max_len,
        sliding_windows=(window,),
        softcap=softcap,
    )


def make_backend(spec: AttentionSpec) -> TorchAttention:
    pool = KVPool(spec, -(-spec.max_len // BLOCK), "cpu", ())
    generator = torch.Generator().manual_seed(0)
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return TorchAttention(spec, pool, None)


def prefill(queries: int, context: int) -> ForwardBatch:
    """The batch of one sequence whose last `queries` tokens are computed."""
    table = np.arange(-(-context // BLOCK), dtype=np.int32)[None]
    positions = torch.arange(context - queries, context)
    return ForwardBatch(
        tokens=torch.zeros(queries, dtype=torch.int64),
        positions=positions,
        slots=positions,
        query_starts=torch.tensor([0, queries], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        block_tables=torch.from_numpy(table),
        logit_rows=torch.tensor([queries - 1]),
        num_decodes=0,
        query_lens_host=np.array([queries], np.int32),
        context_lens_host=np.array([context], np.int32),
        block_tables_host=table,
    )


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("window", [None, 1, 5, 24, 90])
@pytest.mark.parametrize(("queries", "context"), [(70, 70), (70, 100), (33, 97), (1, 40)])
def test_attention_does_not_depend_on_the_size_of_tiles(
    queries: int, context: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, batch = make_backend(make_spec(128, window, softcap)), prefill(queries, context)
    q = torch.randn(queries, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    k = v = torch.empty(queries, KV_HEADS, DIM)
    whole = backend.forward(0, q, k, v, backend.plan(batch))
    assert whole.isfinite().all()
    monkeypatch.setattr(torch_backend, "MIN_TILE", 1)
    for size in (1, 16, 32, 69):
        monkeypatch.setattr(torch_backend, "MAX_TILE", size)
        plan = backend.plan(batch)
        if context > queries:
            assert len(plan[0][0].tiles) == -(-queries // size)
        torch.testing.assert_close(backend.forward(0, q, k, v, plan), whole, rtol=1e-5, atol=1e-6)


def test_the_plan_of_a_long_prompt_holds_vectors_only() -> None:
    queries, context = 8192, 65536
    backend = make_backend(make_spec(context, None, None, "bfloat16"))
    (group,) = backend.plan(prefill(queries, context))[0]
    storages = {tile.mask.untyped_storage().data_ptr(): tile.mask.untyped_storage().nbytes() for tile in group.tiles}
    assert sum(storages.values()) <= 4 * context
    assert group.slots.nbytes == 8 * context


def test_the_scores_of_capped_attention_are_bounded() -> None:
    queries, context = 2048, 32768
    backend = make_backend(make_spec(context, None, 20.0))
    (group,) = backend.plan(prefill(queries, context))[0]
    assert max(HEADS * tile.mask.numel() for tile in group.tiles) <= torch_backend.MAX_SCORES


class ProductDtypes(TorchDispatchMode):
    """Dtypes of the matrices that are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.dtype] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
            self.found.append(args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sinks", [False, True])
def test_scores_are_multiplied_in_float32_on_a_cpu(dtype: torch.dtype, sinks: bool) -> None:
    """In 16 bits, oneDNN would keep kernels for each length of a context."""
    backend = make_backend(make_spec(128, None, 20.0, str(dtype).removeprefix("torch.")))
    backend.set_sinks([torch.zeros(HEADS) if sinks else None])
    q = torch.randn(5, HEADS, DIM).to(dtype)
    k = v = torch.empty(5, KV_HEADS, DIM, dtype=dtype)
    plan = backend.plan(prefill(5, 40))
    with ProductDtypes() as products:
        got = backend.forward(0, q, k, v, plan)
    assert got.dtype == dtype
    assert products.found == [torch.float32] * 2
