import attrs
import pytest

from engine.core.attention.base import AttentionSpec
from engine.core.attention.kv_pool import KVPool
from engine.core.config.tree import CacheConfig, EngineConfig, SchedulerConfig
from engine.core.device import DeviceInfo
from engine.core.errors import CapacityError
from engine.core.models.base import ModelSpec
from engine.core.runner.memory import DTYPE_BYTES, estimate_activations, format_bytes, free_memory, plan_memory
from engine.core.types import FULL

SPEC = AttentionSpec(
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    scale=1.0,
    dtype="float32",
    kv_dtype="float32",
    block_size=16,
    max_len=100,
    sliding_windows=(None,),
)
KINDS = (FULL,)
CONFIG = EngineConfig(scheduler=SchedulerConfig(max_running=4))


def test_plan_memory_gives_the_cache_what_weights_and_activations_leave() -> None:
    plan = plan_memory(CONFIG, 100, KINDS, budget=1000, weights=300, activations=200, bytes_per_block=50)
    assert (plan.num_blocks, plan.kv) == (10, 500)


def test_plan_memory_leaves_room_for_penalties() -> None:
    plan = plan_memory(CONFIG, 100, KINDS, budget=1000, weights=300, activations=200, penalties=100, bytes_per_block=50)
    assert (plan.num_blocks, plan.penalties) == (8, 100)
    with pytest.raises(CapacityError, match=r"penalties +300 B\n  left for the KV cache +200 B"):
        plan_memory(CONFIG, 100, KINDS, budget=1000, weights=300, activations=200, penalties=300, bytes_per_block=50)


def test_plan_memory_leaves_room_for_compiled_kernels() -> None:
    plan = plan_memory(CONFIG, 100, KINDS, budget=1000, weights=200, activations=100, bytes_per_block=50, kernels=200)
    assert (plan.num_blocks, plan.kernels) == (10, 200)
    with pytest.raises(CapacityError, match=r"compiled kernels +600 B"):
        plan_memory(CONFIG, 100, KINDS, budget=1000, weights=200, activations=100, bytes_per_block=50, kernels=600)


def test_plan_memory_gives_a_float8_cache_twice_the_blocks() -> None:
    counts = []
    for dtype in ("bfloat16", "float8_e4m3fn"):
        spec = attrs.evolve(SPEC, dtype="bfloat16", kv_dtype=dtype)
        size = KVPool.bytes_per_block(spec)
        assert size == 2 * 16 * 8 * DTYPE_BYTES[dtype]
        budget = 1000 + 9 * 2 * 16 * 8 * 2
        counts.append(
            plan_memory(
                CONFIG, 100, KINDS, budget=budget, weights=600, activations=400, bytes_per_block=size
            ).num_blocks
        )
    assert counts == [9, 18]


def test_plan_memory_makes_no_more_blocks_than_running_sequences_can_fill() -> None:
    plan = plan_memory(CONFIG, 100, KINDS, budget=10**9, weights=0, activations=0, bytes_per_block=50)
    assert plan.num_blocks == 4 * 7


def test_plan_memory_takes_a_given_size_for_the_cache_alone() -> None:
    config = attrs.evolve(CONFIG, cache=CacheConfig(memory="1kB"))
    plan = plan_memory(config, 100, KINDS, budget=0, weights=300, activations=200, bytes_per_block=50)
    assert (plan.num_blocks, plan.budget) == (20, 1500)


def test_plan_memory_says_what_would_fit_when_memory_is_short() -> None:
    with pytest.raises(CapacityError) as caught:
        plan_memory(CONFIG, 100, KINDS, budget=800, weights=300, activations=200, bytes_per_block=50)
    message = str(caught.value)
    assert "--max-len 96" in message
    assert "--kv-memory" in message
    for line in ("memory budget", "weights", "activations", "left for the KV cache"):
        assert line in message


def test_plan_memory_offers_no_length_without_any_memory() -> None:
    with pytest.raises(CapacityError, match="no context fits"):
        plan_memory(CONFIG, 100, KINDS, budget=100, weights=300, activations=200, bytes_per_block=50)


def test_plan_memory_says_for_how_many_sequences_the_states_leave_room() -> None:
    sizes = {"weights": 300, "activations": 100, "bytes_per_block": 50}
    with pytest.raises(
        CapacityError, match=r"states +250 B\n(.*\n)*one context fits with --max-running 3\. Otherwise the"
    ):
        plan_memory(CONFIG, 100, KINDS, budget=950, states=250, **sizes)  # 50 each, and 7 blocks
    states_of_3 = attrs.evolve(CONFIG, scheduler=SchedulerConfig(max_running=3))
    assert plan_memory(states_of_3, 100, KINDS, budget=950, states=200, **sizes).num_blocks == 7
    with pytest.raises(CapacityError, match=r"\nthe longest context that fits is 32"):
        plan_memory(CONFIG, 100, KINDS, budget=750, states=250, **sizes)
    sized = attrs.evolve(CONFIG, cache=CacheConfig(memory="300B"))
    with pytest.raises(CapacityError, match=r"\nthe longest context that fits is 96"):  # whatever the states take
        plan_memory(sized, 100, KINDS, budget=750, states=250, **sizes)


def test_plan_memory_says_for_how_many_sequences_there_is_memory_without_blocks() -> None:
    sizes = {"weights": 300, "activations": 100, "bytes_per_block": 0, "states": 250}
    plan = plan_memory(CONFIG, 100, (), budget=650, **sizes)
    assert (plan.num_blocks, plan.kv, plan.states, plan.blocks_per_context) == (0, 0, 250, 0)
    with pytest.raises(
        CapacityError, match=r"states of 4 running(.*\n)*the states of 2 sequences fit: use --max-running 2, or"
    ):
        plan_memory(CONFIG, 100, (), budget=599, **sizes)
    with pytest.raises(CapacityError, match=r"not even those of one fit: .* --memory-fraction"):
        plan_memory(CONFIG, 100, (), budget=499, **sizes)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (3 * 2**30, "3.00 GiB"),
        (2**50, "1024.00 TiB"),
    ],
)
def test_format_bytes_is_readable(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_free_memory_finds_some_on_this_machine() -> None:
    assert 2**20 < free_memory(DeviceInfo(type="cpu")) < 2**50


def test_estimate_activations_grows_with_the_step() -> None:
    model = ModelSpec(
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        hidden_size=8,
        vocab_size=100,
        max_len=100,
        sliding_windows=(None,),
        scale=1.0,
    )
    narrow = attrs.evolve(CONFIG, scheduler=SchedulerConfig(max_batch_tokens=2048))
    wide = attrs.evolve(CONFIG, scheduler=SchedulerConfig(max_batch_tokens=4096))
    assert estimate_activations(model, wide, "float32") > estimate_activations(model, narrow, "float32")
    assert estimate_activations(model, narrow, "float32") > estimate_activations(model, narrow, "bfloat16")
