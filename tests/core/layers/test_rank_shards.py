"""How sizes are divided among ranks."""

from __future__ import annotations

import pytest

from engine.core.errors import ConfigError
from engine.core.layers.rank_shards import RankShards


@pytest.mark.parametrize(("ranks", "kv_heads", "shard", "replicas"), [(1, 3, 3, 1), (2, 8, 4, 1), (8, 2, 1, 4)])
def test_rank_shards_replicate_kv_heads_when_there_are_more_ranks(
    ranks: int, kv_heads: int, shard: int, replicas: int
) -> None:
    shards = RankShards(ranks)
    assert (shards.shard_kv_heads(kv_heads), shards.kv_replicas(kv_heads)) == (shard, replicas)


def test_rank_shards_refuse_an_uneven_division() -> None:
    with pytest.raises(ConfigError, match="4 ranks cannot share 6 key and value heads evenly"):
        RankShards(4).shard_kv_heads(6)
