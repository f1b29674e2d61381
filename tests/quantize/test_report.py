from __future__ import annotations

import pytest

from engine.quantize.report import LayerReport, LinearReport


@pytest.mark.parametrize(
    ("errors", "worst"),
    [
        ([(0.5, 0.0), (0.1, 0.2)], "1"),
        ([(0.5, 0.3), (0.1, 0.2)], "0"),
        ([(0.5, None), (0.6, None)], "1"),
        ([], None),
    ],
    ids=["an output without error", "outputs", "weights alone", "nothing quantized"],
)
def test_worst_is_the_linear_layer_with_the_largest_error(
    errors: list[tuple[float, float | None]], worst: str | None
) -> None:
    linears = tuple(
        LinearReport(name=str(number), weight_error=weight, output_error=output)
        for number, (weight, output) in enumerate(errors)
    )
    found = LayerReport(number=0, seconds=1.0, linears=linears).worst
    assert (None if found is None else found.name) == worst
