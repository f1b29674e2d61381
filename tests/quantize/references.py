"""The algorithms as their papers write them, number by number in float64; no code of engine.quantize."""

from __future__ import annotations

from typing import Any

import numpy as np


def fit(low: Any, high: Any, bits: Any, symmetric: Any) -> Any:
    """(scale, zero point) of one group."""
    top = 2**bits - 1
    if symmetric:
        return max(-low, high) * 2 / top, 2 ** (bits - 1)
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / top
    return scale, min(max(np.round(-low / scale), 0), top)


def to_code(number: Any, scale: Any, zero: Any, bits: Any) -> Any:
    return min(max(np.round(number / scale) + zero, 0), 2**bits - 1)


def nearest(weight: Any, bits: Any, size: Any, symmetric: Any) -> Any:
    """Codes and the numbers they stand for."""
    codes, numbers = np.zeros(weight.shape), np.zeros(weight.shape)
    for row in range(weight.shape[0]):
        for begin in range(0, weight.shape[1], size):
            group = weight[row, begin : begin + size]
            scale, zero = fit(group.min(), group.max(), bits, symmetric)
            for place, number in enumerate(group, begin):
                codes[row, place] = to_code(number, scale, zero, bits)
                numbers[row, place] = (codes[row, place] - zero) * scale
    return codes, numbers


def optimal_brain_quantization(
    weight: Any,
    hessian: Any,
    bits: Any,
    size: Any,
    symmetric: Any,
    damp: Any,
    order: Any,
    grouping: Any,
    bounds: Any,
    found: Any,
) -> Any:
    """GPTQ without blocks or Cholesky: input after input, with the inverse of the Hessian of the inputs left.

    Equation 2 of arXiv:2210.17323 for each input; the inverse is computed again each time, which is what equation 3
    saves. order: the inputs as they are taken. grouping: "neighbours" (of the ranges in `bounds`, [rows, groups] each)
    or "order" (groups of inputs that are taken one after the other, ranges of the weights as they are then).

    found: the quantized values of the implementation under test, [rows, inputs]. Each number is left as they say, so
    that where one lies in the middle between two values, the choice there does not change what is right afterwards.
    Returns how far each number to be rounded lies from the value found, in steps of the grid, and the numbers that the
    values found stand for.
    """
    rows, inputs = weight.shape
    weight = weight.astype(np.float64).copy()
    hessian = hessian.astype(np.float64) + damp * np.mean(np.diag(hessian)) * np.eye(inputs)
    distances, numbers = np.zeros(weight.shape), np.zeros(weight.shape)
    grids = {}
    for step, j in enumerate(order):
        left = order[step:]
        inverse = np.linalg.inv(hessian[np.ix_(left, left)])
        group = j // size if grouping == "neighbours" else step // size
        for row in range(rows):
            if (row, group) not in grids:
                low, high = weight[row, left[:size]].min(), weight[row, left[:size]].max()
                if grouping == "neighbours":
                    low, high = bounds[0][row, group], bounds[1][row, group]
                grids[row, group] = fit(low, high, bits, symmetric)
            scale, zero = grids[row, group]
            distances[row, j] = abs(np.clip(weight[row, j] / scale + zero, 0, 2**bits - 1) - found[row, j])
            numbers[row, j] = (found[row, j] - zero) * scale
            error = weight[row, j] - numbers[row, j]
            weight[row, left] -= error / inverse[0, 0] * inverse[0]
    return distances, numbers
