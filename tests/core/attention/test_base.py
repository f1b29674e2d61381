from __future__ import annotations

from engine.core.attention import AttentionSpec


def test_page_size_is_the_block_size_for_older_plugins() -> None:
    spec = AttentionSpec(
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        scale=0.5,
        dtype="float32",
        kv_dtype="float32",
        block_size=32,
        max_len=64,
        sliding_windows=(None,),
    )
    assert spec.page_size == spec.block_size == 32
