"""Which prefilling sequences of a float8 cache are widened, and that the result is the same."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import triton

from engine.core.attention import AttentionSpec, KVPool
from engine.core.quant import FLOAT8
from engine.ops.attention.paged_prefill import PERSISTENT, PrefillConfig
from engine.ops.common.launch import has_wgmma
from engine.plugins.attention.triton import TritonAttention
from engine.plugins.attention.triton_prefill import PrefillPart, PrefillPlanner
from engine.testing.attention import AttentionConformance
from engine.testing.attention_cases import BATCHES, LONG_BATCHES, batch_of, invalidate_behind_windows

SMALL = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)
SPEC = AttentionSpec(
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    scale=0.25,
    dtype="float16",
    kv_dtype=FLOAT8,
    block_size=16,
    max_len=512,
    sliding_windows=(None,),
)


class WideningTriton(TritonAttention):
    """By Triton's interpreter; widens all it can, though the kernel that runs here needs no 16-bit keys."""

    @classmethod
    def refuses(cls, spec: Any, device: Any) -> Any:
        return super().refuses(spec, attrs.evolve(device, type="cuda"))

    def __init__(self, spec: AttentionSpec, pool: KVPool, options: Any) -> None:
        super().__init__(spec, pool, options)
        if pool.is_float8:
            self._kernels.prefill.widened_config = SMALL
            self._kernels.prefill.min_widened_rows = 7


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="on a GPU the conformance suite widens")
@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, for rows of padding: NaN is there
class TestWidened:
    suite = type("Suite", (AttentionConformance,), {"backend": WideningTriton, "dtype": "float16"})()

    @pytest.mark.parametrize("windows", [(None, None), (4, 4), (None, 8), (4, 20)])
    @pytest.mark.parametrize("name", ["prefill", "chunked prefill", "mixed"])
    def test_batches_equal_dense_attention(self, name: str, windows: tuple[int | None, ...]) -> None:
        self.suite.check(self.suite.spec(kv_dtype=FLOAT8, sliding_windows=windows), BATCHES[name])

    def test_sinks_and_a_soft_cap_are_as_without(self) -> None:
        spec = self.suite.spec(kv_dtype=FLOAT8, sinks=(True, False), softcap=2.0)
        self.suite.check(spec, BATCHES["mixed"])

    def test_blocks_behind_the_window_of_every_layer_are_not_read(self) -> None:
        spec = self.suite.spec(kv_dtype=FLOAT8, sliding_windows=(4, 20))
        case = self.suite.make(spec, LONG_BATCHES["chunked prefill"])
        invalidate_behind_windows(case, spec)
        for layer, out in enumerate(self.suite.run(spec, case)):
            self.suite._close(out, case.expected[layer], f"layer {layer}")


def plan(lengths: Any, *, spec: AttentionSpec = SPEC, config: Any = SMALL, **limits: int) -> tuple[PrefillPart, ...]:
    """Plan a batch whose sequences have consecutive blocks. limits: attributes of the planner."""
    planner = PrefillPlanner(spec, KVPool(spec, 64, "cpu"))
    planner.widened_config = config
    planner.min_widened_rows = 16
    for name, limit in limits.items():
        setattr(planner, name, limit)
    contexts = [cached + new for cached, new in lengths]
    counts = [-(-context // spec.block_size) for context in contexts]
    tables = np.zeros((len(lengths), max(counts)), np.int32)
    for row, (count, first) in enumerate(zip(counts, np.cumsum([0, *counts]), strict=False)):
        tables[row, :count] = np.arange(first, first + count)
    slots = [np.arange(context) for context in contexts]
    return planner.plan(batch_of(lengths, tables, slots, "cpu"))


def sequences(part: PrefillPart) -> list[int]:
    return sorted(set(part.tiles[:, 0].tolist()))


def test_sequences_with_many_new_tokens_are_widened_and_others_read_in_place() -> None:
    wide, direct = plan(((40, 1), (20, 8), (33, 7), (0, 30)))
    assert wide.widened is not None
    # Sequence 0 decodes, 2 has few new tokens; 1 and 3 have blocks 3 and 4, and 8 and 9 (2 has 5 to 7).
    assert wide.widened.tolist() == [3, 4, 8, 9]
    assert wide.tables.tolist() == [[0, 1], [2, 3]]
    assert sequences(wide) == [0, 1]
    assert direct.widened is None
    assert sequences(direct) == [2]


def test_all_are_one_launch_where_all_are_widened_or_none() -> None:
    assert [part.widened is None for part in plan(((0, 30), (5, 20)))] == [False]
    assert [part.widened is None for part in plan(((0, 3), (5, 2)))] == [True]
    assert [part.widened is None for part in plan(((0, 30),), config=None)] == [True]


def test_those_with_the_most_new_tokens_get_the_room() -> None:
    wide, direct = plan(((0, 17), (0, 40), (100, 9), (0, 16)), max_widened_blocks=4)
    assert wide.widened is not None
    # Sequence 1 has 3 blocks; then there is room for one more: the one block of sequence 3.
    assert wide.widened.tolist() == [2, 3, 4, 12]
    assert sequences(direct) == [0, 2]


def test_blocks_behind_all_windows_are_not_widened() -> None:
    [part] = plan(((100, 40),), spec=attrs.evolve(SPEC, num_layers=2, sliding_windows=(20, 40)))
    assert part.widened is not None
    # The first new token, at 100, sees 61 to 100: blocks 3 to 8.
    assert part.widened.tolist() == list(range(3, 9))
    assert part.tables.tolist() == [[0, 0, 0, 0, 1, 2, 3, 4, 5]]
    [part] = plan(((100, 40),), spec=attrs.evolve(SPEC, num_layers=2, sliding_windows=(20, None)))
    assert part.widened is not None
    assert part.widened.tolist() == list(range(9))


def test_many_tiles_of_narrow_heads_are_not_persistent() -> None:
    """On a CPU, which counts as one multiprocessor. A persistent tile has 64 tokens of 2 query heads."""
    spec = attrs.evolve(SPEC, head_dim=64, kv_dtype="float16")
    [few] = plan(((0, 64),), spec=spec, config=None, _persistent=True)
    [many] = plan(((0, 64), (0, 1)), spec=spec, config=None, _persistent=True)
    [wide] = plan(((0, 64), (0, 1)), spec=attrs.evolve(spec, head_dim=128), config=None, _persistent=True)
    assert [part.config.persistent for part in (few, many, wide)] == [True, False, True]


def test_nothing_is_widened_on_a_cpu_or_from_a_16_bit_cache() -> None:
    assert PrefillPlanner(SPEC, KVPool(SPEC, 4, "cpu")).widened_config is None
    plain = attrs.evolve(SPEC, kv_dtype="float16")
    assert PrefillPlanner(plain, KVPool(plain, 4, "cpu")).widened_config is None


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [(None,), (300,)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_long_prompts_over_a_float8_cache_equal_dense_attention(
    dim: int, dtype: str, windows: tuple[int | None, ...]
) -> None:
    suite = type("Suite", (AttentionConformance,), {"backend": TritonAttention, "dtype": dtype, "device": "cuda"})()
    spec = suite.spec(
        kv_dtype=FLOAT8,
        num_layers=1,
        num_heads=8,
        num_kv_heads=2,
        head_dim=dim,
        scale=dim**-0.5,
        max_len=2048,
        sliding_windows=windows,
    )
    pool = KVPool(spec, 4, "cuda")
    wanted = PERSISTENT if has_wgmma(pool.keys[0].device) else None
    assert PrefillPlanner(spec, pool).widened_config == wanted
    suite.check(spec, ((700, 1), (0, 1000), (900, 300), (10, 5)))
