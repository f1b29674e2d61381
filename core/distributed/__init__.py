"""Ranks that share one model: their collectives, partial sums, and how ranks find each other."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.distributed.partial_sum import PartialSum as PartialSum
    from engine.core.distributed.rank_group import (
        OneRank as OneRank,
        RankGroup as RankGroup,
        join as join,
    )
    from engine.core.distributed.rendezvous import MeetingPoint as MeetingPoint, Rendezvous as Rendezvous
    from engine.core.distributed.scattered_rows import ScatteredRows as ScatteredRows

__getattr__, __dir__, __all__ = exports(
    __name__,
    partial_sum=("PartialSum",),
    rank_group=(
        "OneRank",
        "RankGroup",
        "join",
    ),
    rendezvous=(
        "MeetingPoint",
        "Rendezvous",
    ),
    scattered_rows=("ScatteredRows",),
)
