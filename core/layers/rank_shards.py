"""How many of a layer's outputs, inputs or heads each rank holds."""

from __future__ import annotations

from attrs import frozen

from engine.core.errors import ConfigError


@frozen
class RankShards:
    """Divides sizes evenly among ranks."""

    ranks: int

    def shard(self, total: int, what: str) -> int:
        """A rank's shard of `total`. Raises ConfigError, naming `what`, if the ranks do not divide it evenly."""
        if total % self.ranks:
            raise ConfigError(f"{self.ranks} ranks cannot share {total} {what} evenly; use a number that divides it")
        return total // self.ranks

    def shard_kv_heads(self, total: int) -> int:
        """A rank's number of KV heads, of `total`. Raises ConfigError if neither number divides the other."""
        return self.shard(total * self.kv_replicas(total), "key and value heads")

    def kv_replicas(self, num_kv_heads: int) -> int:
        """Number of ranks that hold the same KV heads."""
        return self.ranks // num_kv_heads if self.ranks > num_kv_heads and self.ranks % num_kv_heads == 0 else 1
