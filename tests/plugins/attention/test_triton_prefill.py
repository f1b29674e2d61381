"""Which prefilling sequences of a float8 cache are widened, and that the result is the same."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch
import triton

from engine.core.attention import AttentionSpec, KVPool
from engine.core.config.structure import structure_options
from engine.core.errors import ConfigError
from engine.core.quant import FLOAT8
from engine.core.schedulers.prompt_step import SHORT_PROMPTS, chunked_prompt_steps
from engine.ops.attention.paged_prefill_config import PrefillConfig, PrefillWork, persistent_config
from engine.ops.common.launch import has_wgmma
from engine.plugins.attention.triton import TritonAttention
from engine.plugins.attention.triton_options import TritonOptions, float8_prefill_refusal
from engine.plugins.attention.triton_prefill import MIN_CONVERTED_ROWS, Float8Part, PrefillPart, PrefillPlanner
from engine.testing.attention import AttentionConformance
from engine.testing.attention_cases import BATCHES, LONG_BATCHES, batch_of, invalidate_behind_windows

SMALL = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)
FP8_PREFILL = TritonOptions(prefill_dtype="fp8")
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
            self._kernels.prefill.choose_widened_config = lambda work: SMALL
            self._kernels.prefill.min_converted_rows = 7


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="on a GPU the conformance suite widens")
@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, for rows of padding: NaN is there
class TestWidened:
    suite = type("Suite", (AttentionConformance,), {"backend": WideningTriton, "dtype": "float16"})()

    @pytest.mark.parametrize("windows", [(None, None), (4, 4), (None, 8), (4, 20)])
    @pytest.mark.parametrize("name", ["prefill", "chunked prefill", "mixed"])
    def test_batches_equal_dense_attention(self, name: str, windows: tuple[int | None, ...]) -> None:
        self.suite.check(self.suite.spec(kv_dtype=FLOAT8, sliding_windows=windows), BATCHES[name])

    def test_sinks_and_a_soft_cap_equal_dense_attention(self) -> None:
        spec = self.suite.spec(kv_dtype=FLOAT8, sinks=(True, False), softcap=2.0)
        self.suite.check(spec, BATCHES["mixed"])

    def test_blocks_behind_the_window_of_every_layer_are_not_read(self) -> None:
        spec = self.suite.spec(kv_dtype=FLOAT8, sliding_windows=(4, 20))
        case = self.suite.make(spec, LONG_BATCHES["chunked prefill"])
        invalidate_behind_windows(case, spec)
        for layer, out in enumerate(self.suite.run(spec, case)):
            self.suite._close(out, case.expected[layer], f"layer {layer}")


def plan(
    lengths: Any, *, spec: AttentionSpec = SPEC, config: Any = SMALL, float8: bool = False, **limits: int
) -> tuple[Any, ...]:
    """Plan a batch whose sequences have consecutive blocks. limits: attributes of the planner."""
    planner = PrefillPlanner(spec, KVPool(spec, 64, "cpu"), float8=float8)
    planner.choose_widened_config = None if config is None else lambda work: config
    planner.min_converted_rows = 16
    for name, limit in limits.items():
        setattr(planner, name, limit)
    contexts = [cached + new for cached, new in lengths]
    counts = [-(-context // spec.block_size) for context in contexts]
    tables = np.zeros((len(lengths), max(counts)), np.int32)
    for row, (count, first) in enumerate(zip(counts, np.cumsum([0, *counts]), strict=False)):
        tables[row, :count] = np.arange(first, first + count)
    slots = [np.arange(context) for context in contexts]
    return planner.plan(batch_of(lengths, tables, slots, "cpu"))


def sequences(part: Any) -> list[int]:
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
    wide, direct = plan(((0, 17), (0, 40), (100, 9), (0, 16)), max_converted_blocks=4)
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


def test_nothing_is_widened_on_a_cpu_or_from_a_16_bit_cache() -> None:
    assert PrefillPlanner(SPEC, KVPool(SPEC, 4, "cpu")).choose_widened_config is None
    plain = attrs.evolve(SPEC, kv_dtype="float16")
    assert PrefillPlanner(plain, KVPool(plain, 4, "cpu")).choose_widened_config is None


@pytest.mark.parametrize(("windows", "short"), [((None,), False), ((100,), True), ((100, None), False)])
def test_launch_is_chosen_by_the_keys_in_the_window(windows: tuple[int | None, ...], short: bool) -> None:
    sizes: Any = {"head_dim": 64, "kv_dtype": "float16", "max_len": 2048, "num_layers": len(windows)}
    spec = attrs.evolve(SPEC, sliding_windows=windows, **sizes)
    [part] = plan(((0, 1800),), spec=spec, config=None, _persistent=True)
    assert part.config.persistent
    assert part.config.across_tiles is short
    assert (part.tiles.dim() == 3) is short


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16])
@pytest.mark.parametrize("kv_dtype", ["float16", FLOAT8])
def test_a_start_runs_the_kernels_of_prompts_of_all_lengths(kv_dtype: str, group: int) -> None:
    sizes: Any = {"head_dim": 128, "kv_dtype": kv_dtype, "max_len": 1024, "num_heads": 2 * group}
    spec = attrs.evolve(SPEC, **sizes)
    widened = PrefillConfig(block_m=128, block_n=64, num_warps=4, num_stages=4, persistent=True)
    limits = {"config": widened if kv_dtype == FLOAT8 else None, "min_converted_rows": MIN_CONVERTED_ROWS}

    def launch(tokens: int) -> tuple[PrefillConfig, bool]:
        [part] = plan(((0, tokens),), spec=spec, _shared_memory=233472, _persistent=kv_dtype != FLOAT8, **limits)
        return part.config, part.widened is not None

    first, rest = chunked_prompt_steps(SPEC.block_size + 1, (), SPEC.block_size)
    rehearsed = [first.chunks[0].count, rest.chunks[0].count, *SHORT_PROMPTS]
    assert {launch(tokens) for tokens in range(1, 600)} == {launch(tokens) for tokens in rehearsed}


@pytest.mark.parametrize("kv_dtype", ["float16", FLOAT8])
@pytest.mark.parametrize(("windows", "ordered"), [((None,), True), ((100, None), True), ((100,), False)])
def test_order_is_planned_for_long_prompts_without_a_window(
    kv_dtype: str, windows: tuple[int | None, ...], ordered: bool
) -> None:
    sizes: Any = {"head_dim": 64, "kv_dtype": kv_dtype, "max_len": 2048, "num_layers": len(windows)}
    spec = attrs.evolve(SPEC, sliding_windows=windows, **sizes)
    long = persistent_config(64, PrefillWork(longest=1800, keys=10_000, tiles=1))
    [part] = plan(((0, 1800),), spec=spec, config=None if kv_dtype == "float16" else long, _persistent=True)
    assert (part.widened is None) is (kv_dtype == "float16")
    assert (part.order is not None) is ordered


def test_order_is_not_planned_where_the_gpus_cache_holds_all_keys_and_values() -> None:
    spec = attrs.evolve(SPEC, head_dim=64, kv_dtype="float16", max_len=2048)
    size = 2 * 1800 * 2 * 64 * 2
    for held, cache in ((True, size), (False, size - 1)):
        [part] = plan(((0, 1800),), spec=spec, config=None, _persistent=True, _cache_bytes=cache)
        assert (part.order is None) is held


def test_float8_prefill_plans_tiles_of_keys_for_sequences_with_many_new_tokens() -> None:
    tiled, direct = plan(((40, 1), (20, 8), (33, 7), (0, 130)), float8=True)
    assert isinstance(tiled, Float8Part)
    # Sequence 1 has one tile of keys with blocks 3 and 4, sequence 3 two tiles with blocks 8 to 16.
    assert tiled.blocks.tolist() == [3, 4, *[0] * 6, *range(8, 17), *[0] * 7]
    assert tiled.spans.tolist() == [[0, 20, 28], [0, 0, 130], [128, 0, 130]]
    # 64 tokens per tile of queries; those that see the most keys first. The number of a sequence's first tile of keys,
    # position, row of q, tokens.
    assert tiled.tiles.tolist() == [[1, 128, 144, 2], [1, 64, 80, 64], [1, 0, 16, 64], [0, 20, 1, 8]]
    assert isinstance(direct, PrefillPart)
    assert sequences(direct) == [2]


def test_float8_prefill_skips_tiles_of_keys_behind_all_windows() -> None:
    spec = attrs.evolve(SPEC, max_len=1024, num_layers=2, sliding_windows=(20, 40))
    [part] = plan(((0, 20), (300, 40)), spec=spec, float8=True)
    # The first new token of the second sequence, at 300, sees 261 to 300: its third tile of keys, which begins at 256.
    assert part.spans.tolist() == [[0, 0, 20], [256, 300, 340]]
    assert part.blocks.tolist() == [0, 1, *[0] * 6, *range(18, 24), *[0] * 2]
    assert part.tiles[:, :2].tolist() == [[-1, 300], [0, 0]]


def test_float8_prefill_counts_whole_tiles_of_keys_as_the_memory_of_a_sequence() -> None:
    lengths = ((0, 20), (0, 40), (0, 130))  # of one, one and two tiles of 8 blocks
    tiled, direct = plan(lengths, float8=True, max_converted_blocks=16)
    assert (len(tiled.blocks), sequences(direct)) == (16, [0, 1])
    tiled, direct = plan(lengths[:2], float8=True, max_converted_blocks=8)
    assert (len(tiled.blocks), sequences(direct)) == (8, [0])


def test_converted_blocks_are_limited_to_a_power_of_two_since_so_many_are_allocated() -> None:
    spec = attrs.evolve(SPEC, head_dim=48)
    assert PrefillPlanner(spec, KVPool(spec, 4, "cpu")).max_converted_blocks == 2**28 // (2 * 16 * 2 * 64 * 2)


def test_float8_prefill_gathers_twice_as_many_blocks_into_the_same_memory() -> None:
    pool = KVPool(SPEC, 4, "cpu")
    blocks = [PrefillPlanner(SPEC, pool, float8=float8).max_converted_blocks for float8 in (False, True)]
    assert blocks == [2**28 // (2 * 16 * 2 * 16 * 2), 2**28 // (2 * 16 * 2 * 16)]


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [(None,), (300,)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [(8, 2), (36, 36)], ids=["few items", "in order"])
def test_long_prompts_over_a_float8_cache_equal_dense_attention(
    heads: tuple[int, int], dim: int, dtype: str, windows: tuple[int | None, ...]
) -> None:
    suite = type("Suite", (AttentionConformance,), {"backend": TritonAttention, "dtype": dtype, "device": "cuda"})()
    spec = suite.spec(
        kv_dtype=FLOAT8,
        num_layers=1,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dim,
        scale=dim**-0.5,
        max_len=2048,
        sliding_windows=windows,
    )
    pool = KVPool(spec, 4, "cuda")
    choose = PrefillPlanner(spec, pool).choose_widened_config
    assert (choose is not None) == has_wgmma(pool.keys[0].device)
    if choose is not None:
        for keys in (100, 10_000):
            work = PrefillWork(longest=100, keys=keys, tiles=1)
            assert choose(work) == persistent_config(dim, work)
    suite.check(spec, ((700, 1), (0, 1000), (900, 300), (10, 5)))


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [(None,), (300,)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_prompts_in_float8_are_near_dense_attention(
    dim: int, dtype: str, windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_wgmma(torch.device("cuda")):
        pytest.skip("this GPU has no wgmma")
    monkeypatch.setattr("engine.testing.attention.TOLERANCE", {dtype: 5e-2})
    settings = {"backend": TritonAttention, "dtype": dtype, "device": "cuda", "options": FP8_PREFILL}
    suite = type("Suite", (AttentionConformance,), settings)()
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
    case = suite.make(spec, ((700, 1), (0, 1000), (900, 300), (10, 5)))
    invalidate_behind_windows(case, spec)
    [found] = suite.run(spec, case)
    suite._close(found, case.expected[0], "in float8")
    suite.options = None
    [wide] = suite.run(spec, case)
    assert torch.equal(found[:1], wide[:1])  # decode
    assert torch.equal(found[-5:], wide[-5:])  # few new tokens
    assert not torch.equal(found[1:-5], wide[1:-5])


def test_prefill_dtype_is_checked() -> None:
    assert TritonOptions().prefill_dtype == "auto"
    with pytest.raises(ConfigError, match=r"prefill_dtype = 'float9' is no choice; .*known: auto, fp8"):
        structure_options({"prefill_dtype": "float9"}, TritonOptions, "attention.options")


@pytest.mark.parametrize(
    ("changes", "has_wgmma", "said"),
    [
        ({"kv_dtype": "float16"}, True, "stored in float16; use --kv-dtype fp8, or"),
        ({}, False, "Hopper"),
        ({"dtype": "float32"}, True, "--dtype bfloat16, or"),
        ({"head_dim": 80}, True, "64 or 128 numbers, not 80"),
        ({"head_dim": 256}, True, "64 or 128 numbers, not 256"),
        ({"block_size": 48}, True, "--block-size 16, or"),
        ({"num_heads": 512}, True, "128 query heads"),
        ({"num_kv_heads": 1, "value_head_dim": 48, "latent": True}, True, "latent"),
    ],
)
def test_prompts_in_float8_are_refused_with_what_would_work(changes: Any, has_wgmma: bool, said: str) -> None:
    spec = attrs.evolve(SPEC, head_dim=128)
    assert float8_prefill_refusal(spec, has_wgmma=True) is None
    refusal = float8_prefill_refusal(attrs.evolve(spec, **changes), has_wgmma=has_wgmma)
    assert refusal is not None
    assert said in refusal
    assert "prefill_dtype=auto" in refusal


def test_backend_does_not_start_where_prompts_in_float8_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"prefill_dtype = fp8 was asked of the Triton backend, but .*Hopper"):
        TritonAttention(SPEC, KVPool(SPEC, 4, "cpu"), FP8_PREFILL)
