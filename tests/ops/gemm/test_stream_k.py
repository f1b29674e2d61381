"""How Stream-K divides the units of tiles among programs, by its functions as Python runs them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.ops.gemm import stream_k


@pytest.fixture
def scheduling(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The functions, with a language whose program and number of programs can be set."""
    language = SimpleNamespace(
        program=0,
        programs=1,
        where=lambda condition, yes, no: yes if condition else no,
        minimum=min,
        maximum=max,
    )
    language.program_id = lambda axis: language.program
    language.num_programs = lambda axis: language.programs
    monkeypatch.setattr(stream_k, "gl", language)
    names = ("shared_units_of", "begin_of", "_first_whole", "first_unit", "unit_after")
    for name in names:
        monkeypatch.setattr(stream_k, name, getattr(stream_k, name).fn)
    return stream_k


@pytest.mark.parametrize(
    ("programs", "tiles", "blocks"),
    [
        (132, 136, 20),
        (132, 144, 5),
        (132, 133, 1),
        (132, 264, 4),
        (132, 500, 7),
        (128, 32, 16),
        (96, 24, 16),
        (7, 7, 3),
    ],
)
def test_each_unit_is_computed_once_and_programs_wait_only_for_others_with_units(
    scheduling: Any, programs: int, tiles: int, blocks: int
) -> None:
    language = scheduling.gl
    language.programs = programs
    shared = scheduling.shared_units_of(tiles, blocks)
    computed: dict[int, list[int]] = {}
    for program in range(programs):
        language.program = program
        unit, units = scheduling.first_unit(shared, blocks), []
        while unit < tiles * blocks:
            units.append(unit)
            unit = scheduling.unit_after(unit, shared, blocks)
        computed[program] = units
    assert sorted(unit for units in computed.values() for unit in units) == list(range(tiles * blocks))
    counts = [len(units) for units in computed.values()]
    assert max(counts) - min(counts) <= (blocks if shared else 0)
    writers = {program for program, units in computed.items() for unit in units[:1] if unit < shared and unit % blocks}
    for tile in range(shared // blocks):
        end = (tile + 1) * blocks
        owner = next(program for program, units in computed.items() if tile * blocks in units)
        other = owner + 1
        while scheduling.begin_of(other, shared) < end:  # as in add_partials
            assert other in writers
            assert any(tile * blocks <= unit < end for unit in computed[other])
            other += 1
