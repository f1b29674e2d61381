from __future__ import annotations

from typing import Any

import pytest

from engine.core.errors import CheckpointError
from engine.core.models import KVShape, ModelSpec, StateShape


def spec(**changed: Any) -> ModelSpec:
    settings: dict[str, Any] = {
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "hidden_size": 32,
        "vocab_size": 64,
        "max_len": 16,
        "sliding_windows": (None,),
        "scale": 1.0,
    }
    return ModelSpec(**{**settings, **changed})


def test_key_and_value_heads_must_divide_query_heads() -> None:
    with pytest.raises(CheckpointError, match="4 attention heads and 3 key and value heads"):
        spec(num_kv_heads=3)
    spec(num_kv_heads=3, layer_caches=(KVShape(num_heads=6, num_kv_heads=3, head_dim=8),))


def test_only_a_model_without_attention_may_have_no_heads() -> None:
    attention, state = KVShape(num_heads=4, num_kv_heads=2, head_dim=8), StateShape(tensors=(((4, 8), "float32"),))
    with pytest.raises(TypeError, match=r"with attention layers lacks num_heads$"):
        spec(num_heads=0, layer_caches=(state, attention))
    with pytest.raises(TypeError, match=r"lacks num_heads, num_kv_heads, head_dim, scale$"):
        ModelSpec(num_layers=2, hidden_size=32, vocab_size=64, max_len=16)
    alone = ModelSpec(num_layers=2, hidden_size=32, vocab_size=64, max_len=16, layer_caches=(state, state))
    assert (alone.has_attention, alone.sliding_windows) == (False, (None, None))


def test_a_state_names_the_tensors_that_ranks_shard() -> None:
    tensors = (((4, 8), "float32"), ((6,), "int8"))
    assert StateShape(tensors=tensors).sharded_sizes == {4, 6}
    assert StateShape(tensors=tensors, replicated=(True, False)).sharded_sizes == {6}
    with pytest.raises(TypeError, match="2 tensors and replicated of 1"):
        StateShape(tensors=tensors, replicated=(True,))


def test_a_soft_cap_must_exceed_0() -> None:
    with pytest.raises(CheckpointError, match=r"soft cap of attention scores of 0\.0"):
        spec(softcap=0.0)
    spec(softcap=0.5)
