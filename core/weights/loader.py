"""Loads weights into layers: layer by layer, so that peak memory stays low."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.core.layers.kernel_layer import KernelLayer
from engine.core.layers.layer_factory import LayerFactory
from engine.core.plugin_host.faults import blame
from engine.core.quant.base import TensorSpec
from engine.core.weights.readers import PendingReads, ReaderPool, ReadTask, auto_threads
from engine.core.weights.sources import WeightSource, shard_range
from engine.core.weights.tensor_owners import TensorOwners

READ_AHEAD_BYTES = 512 << 20
"""Bytes of tensors (512 MiB) that are read ahead of the layer being filled. A larger layer is read alone."""
Progress = Callable[[int, int], None]
"""Called with the bytes read so far and in total, on this rank."""


def load_weights(
    layers: LayerFactory, source: WeightSource, on_progress: Progress | None = None, *, threads: int = 0
) -> None:
    """Fill all layers that `layers` has made, in order, while the tensors of the next ones are read.

    threads: number of reading threads; 0: by the number of processors.
    Raises CheckpointError, before any tensor is read if possible.
    """
    with blame(layers.model_owner, "tensors() of a layer"):
        wanted = {name: spec for layer in layers.layers for name, spec in layer.tensors().items()}
    source.rename(layers.former_prefixes)
    sizes = {
        name: _rank_bytes(name, wanted[name], size, layers.rank, layers.ranks)
        for name, size in source.check(wanted, layers.ignored, lambda: _owners(layers)).items()
        if wanted[name].only_rank in (None, layers.rank)
    }
    done, total = 0, sum(sizes.values())
    with (
        ThreadPoolExecutor(1, "tied weights") as meanwhile,
        ReaderPool(layers.device, threads or max(1, auto_threads() // layers.ranks)) as readers,
    ):
        checked = meanwhile.submit(source.check_tied, layers.tied if layers.rank == 0 else {})
        read_ahead = _ReadAhead(layers, source, sizes, readers)
        for layer in layers.layers:
            tensors = read_ahead.next_layer()
            with blame(layers.model_owner, "fill() of a layer"):
                layer.fill(tensors)
            del tensors  # frees them before the next layer is filled
            done += sum(sizes.get(name, 0) for name in layer.tensors())
            if on_progress is not None:
                on_progress(done, total)
        checked.result()


def _owners(layers: LayerFactory) -> TensorOwners:
    """The plugins that ask for tensors of layers."""
    return TensorOwners(
        by_tensor={name: owner for layer in layers.layers for name, owner in layer.tensor_owners.items()},
        quant=layers.quant_owner,
        has_kernels=any(isinstance(layer, KernelLayer) and not layer.has_core_kernel for layer in layers.layers),
    )


class _ReadAhead:
    """Reads the tensors of one layer after the other, up to READ_AHEAD_BYTES ahead."""

    def __init__(
        self, layers: LayerFactory, source: WeightSource, sizes: Mapping[str, int], readers: ReaderPool
    ) -> None:
        self._layers = layers
        self._source = source
        self._sizes = sizes
        self._readers = readers
        self._not_started = iter(layers.layers)
        self._started: deque[tuple[dict[str, torch.Tensor], PendingReads, int]] = deque()
        """Per layer: its tensors, their reads and their bytes."""

    def next_layer(self) -> dict[str, torch.Tensor]:
        """Wait for the tensors of the next layer. The caller holds the only reference to them."""
        self._start()
        tensors, reads, _ = self._started.popleft()
        reads.wait()
        self._start()
        return tensors

    def _start(self) -> None:
        """Start reading layers until READ_AHEAD_BYTES are in progress, at least one layer."""
        while not self._started or sum(size for _, _, size in self._started) < READ_AHEAD_BYTES:
            layer = next(self._not_started, None)
            if layer is None:
                return
            specs = {name: spec for name, spec in layer.tensors().items() if name in self._sizes}
            tensors: dict[str, torch.Tensor] = {}
            tasks: list[ReadTask] = []
            for name, spec in specs.items():
                tensors[name], reads = self._source.allocate(
                    name, spec, rank=self._layers.rank, ranks=self._layers.ranks, device=self._layers.device
                )
                tasks += reads
            self._started.append((tensors, self._readers.submit(tasks), sum(self._sizes[name] for name in specs)))


def _rank_bytes(name: str, spec: TensorSpec, nbytes: int, rank: int, ranks: int) -> int:
    """Bytes of one rank's shard of a tensor of `nbytes`. Raises CheckpointError if ranks do not divide it."""
    if spec.shard_dim is None:
        return nbytes
    size = spec.shape[spec.shard_dim]
    if size < 1:
        return nbytes // ranks
    return nbytes // size * len(shard_range(name, spec, size, rank, ranks)) * spec.shard_parts
