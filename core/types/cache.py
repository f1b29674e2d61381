"""CacheInfo: the KV cache that an executor has allocated, and the kinds of layers that share it."""

from __future__ import annotations

from attrs import frozen

from engine.core.profiling.cost import ModelCost


@frozen(kw_only=True)
class BlockKind:
    """Layers of one kind of KV cache, whose blocks a sequence gets and gives up together.

    The layers are divided into cache groups of at most as many layers as a block has room for. A block table of the
    kind holds, for each index, one block per group.
    """

    name: str
    """As shown to users: "full", "latent" or "window 1024"."""
    window: int | None = None
    """The number of tokens that a token attends to, itself included; None: the whole context."""
    groups: int = 1
    """Cache groups, and so blocks per index of the table."""
    layers: int = 0


FULL = BlockKind(name="full")


@frozen(kw_only=True)
class CacheInfo:
    """The KV cache that an executor has allocated, and the memory used, in bytes."""

    num_blocks: int
    block_size: int
    """Tokens per block."""
    weights_bytes: int
    activation_bytes: int
    kv_bytes: int
    budget_bytes: int
    """Maximum for weights, activations, penalties, kernels and KV cache together."""
    device: str
    """The device, as shown to users."""
    dtype: str
    kv_dtype: str = ""
    """Data type of keys and values; empty: as dtype."""
    penalty_bytes: int = 0
    """Maximum bytes of the token counts for penalties; used only while requests have penalties."""
    kernel_bytes: int = 0
    """Maximum bytes of the kernels compiled while serving; on a CPU only."""
    kinds: tuple[BlockKind, ...] = (FULL,)
    """The kinds of layers that share the blocks."""
    states: int = 0
    """Layers that keep a state per sequence instead of blocks. If there are any, no prefix can be reused."""
    state_bytes: int = 0
    """Bytes of the states of all running sequences."""
    state_rows: int = 0
    """Sequences whose states there is memory for."""
    blocks_per_context: int = 0
    """Maximum blocks of one context of full length."""
    cost: ModelCost | None = None
    """What steps cost on rank 0 (`ModelCost.condensed`); None: the executor does not report it."""
    phases: tuple[tuple[str, float], ...] = ()
    """(start-up phase, seconds): from an executor the phases of its `start`, from an engine all phases."""

    @property
    def reusable_indices(self) -> int:
        """How many indices of block tables the prefix cache can hold; 0: no prefix can be reused."""
        groups = sum(kind.groups for kind in self.kinds)
        return self.num_blocks // groups if groups and not self.states else 0
