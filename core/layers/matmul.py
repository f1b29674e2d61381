"""x W^T by the fastest means of the device.

On a CPU, oneDNN multiplies by a prepacked weight about twice as fast as F.linear, from one row to hundreds, because its
layout suits the vector registers and the order of reading. torch exposes prepacking to its compiler only; the operators
are the same in torch 2.11 to 2.13.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_ROWS = 16
"""Rows of x that weights are packed for; other numbers of rows cost little more."""
_EXACT_ROWS = 32
"""Up to this number of rows, as in small decode batches, no rows are added."""
_SIZES_PER_OCTAVE = 16
"""Above _EXACT_ROWS, how many numbers of rows oneDNN multiplies between a power of two and the next."""
_KERNEL_BYTES = 600_000
"""Bytes that oneDNN keeps per shape of a product, measured with oneDNN 3.12: 570 KiB, and less for few columns."""


def padded_rows(rows: int) -> int:
    """The number of rows that `rows` is padded to for oneDNN: one of few numbers, at most a sixteenth more.

    For packed weights and for types of 16 bits oneDNN compiles kernels for each number of rows and keeps them for good,
    about half a megabyte per shape of weight. Prompts of a thousand lengths would make a thousand of each.
    """
    if rows <= _EXACT_ROWS:
        return rows
    step = (1 << (rows - 1).bit_length() - 1) // _SIZES_PER_OCTAVE
    return -(-rows // step) * step


def compiled_shapes(*weights: torch.Tensor) -> frozenset[tuple[int, ...]]:
    """Shapes of the weights [..., out_features, in_features] for which oneDNN compiles kernels: see `padded_rows`."""
    return frozenset(tuple(one.shape[-2:]) for one in weights if one.dim() > 1 and _compiles(one))


def kernel_bytes(weight_shapes: int, max_rows: int) -> int:
    """The most bytes that oneDNN's kernels take, for that many shapes of weights and up to that many rows."""
    sizes = len({padded_rows(rows) for rows in range(1, max_rows + 1)})
    return weight_shapes * sizes * _KERNEL_BYTES


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN packs weights of this dtype on this device."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not available:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight: [out_features, in_features] -> the weight for `multiply`, in oneDNN's layout where `can_pack`."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS) if can_pack(weight) else weight
    return packed


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias: [..., out_features].

    x: [..., in_features]; weight: [out_features, in_features], or what `pack` has returned.
    """
    if not _compiles(weight):
        return F.linear(x, weight, bias)
    rows = x.shape[:-1].numel()
    if padded_rows(rows) == rows:
        return _multiply(x, weight, bias)
    return _multiply(_pad(x.reshape(rows, -1)), weight, bias)[:rows].view(*x.shape[:-1], -1)


def multiply_heads(x: torch.Tensor, matrices: torch.Tensor, out: torch.Tensor) -> None:
    """Multiply each head of x: [tokens, heads, inputs] by its matrix into out: [tokens, heads, outputs].

    matrices: [heads, inputs, outputs]. The last dimensions of x and out are dense.
    """
    tokens = len(x)
    if not _compiles(matrices) or padded_rows(tokens) == tokens:
        torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
    else:
        out.copy_(torch.bmm(_pad(x).transpose(0, 1), matrices).transpose(0, 1)[:tokens])


def _pad(x: torch.Tensor) -> torch.Tensor:
    """x with rows of zeros, as many as `padded_rows` adds."""
    padded = x.new_empty(padded_rows(len(x)), *x.shape[1:])
    padded[: len(x)] = x
    padded[len(x) :] = 0
    return padded


def _compiles(weight: torch.Tensor) -> bool:
    return weight.is_mkldnn or (weight.is_cpu and weight.dtype in (torch.bfloat16, torch.float16))


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y
