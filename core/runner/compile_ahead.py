"""Records the kernels that the first start of a configuration will launch, and compiles them in other processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from engine.core.autotune.tuner import begin_tuning, tune
from engine.core.compilation.client import SHARED
from engine.core.compilation.first_start import is_first_start, mark_started
from engine.core.compilation.recording import record_launches

if TYPE_CHECKING:
    from engine.core.config.tree import EngineConfig
    from engine.core.distributed.rank_group import RankGroup
    from engine.core.layers import LayerFactory

log = logging.getLogger(__name__)


def compile_ahead(
    config: EngineConfig, group: RankGroup, factories: Iterable[LayerFactory], launch: Callable[[], None]
) -> None:
    """Begin to compile the kernels of a first start, all in parallel; on later starts, do nothing.

    factories: of the layers to be tuned. launch: launches the kernels of the start, which are only recorded here. Of
    several ranks the first compiles, and the others wait until all kernels are on disk. A kernel that cannot be
    recorded is compiled when it is first launched.
    """
    if not group.minimum(int(is_first_start(config))):
        return
    if group.rank == 0:
        try:
            for factory in factories:
                begin_tuning(factory, config.executor.kernel_cache)
            with group.alone(), record_launches():
                launch()
        except Exception as error:  # if it matters, the start raises it again where it is handled
            log.warning("kernels are compiled one after another, since they could not be recorded: %s", error)
            log.debug("recording failed", exc_info=error)
        torch.cuda.empty_cache()
    if group.ranks > 1:
        SHARED.wait()
        group.minimum(0)  # a barrier


def tune_first_rank_first(config: EngineConfig, group: RankGroup, factories: Iterable[LayerFactory]) -> None:
    """Choose the kernels of all layers: the first rank measures, and the others find its results on disk.

    So the ranks choose alike, and only the first compiles candidates. A rank with another disk, or another kind of GPU,
    finds no results, and measures too. The others wait as long as collective operations may take (RankGroup).
    """
    if group.rank > 0:
        group.minimum(0)  # a barrier, which the first rank reaches below
    for factory in factories:
        tune(factory, config.executor.kernel_cache)
    if group.rank == 0 and group.ranks > 1:
        group.minimum(0)


def end_compile_ahead(config: EngineConfig) -> None:
    """End the compiling process once it is done, and note that the configuration has been started."""
    SHARED.end()
    mark_started(config)
