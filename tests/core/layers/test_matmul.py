"""A product by a packed weight equals the plain product."""

import pytest
import torch

from engine.core.layers import matmul
from engine.core.layers.matmul import (
    can_pack,
    compiled_shapes,
    kernel_bytes,
    multiply,
    multiply_heads,
    pack,
    padded_rows,
)


@pytest.mark.parametrize("rows", [1, 2, 17, 64, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 33), (96, 64), (513, 256)])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_product_equals_float64(rows: int, outputs: int, inputs: int, biased: bool) -> None:
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if biased else None
    reference = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    got = multiply(x, pack(weight), bias)
    assert torch.linalg.norm(got - reference) < 1e-6 * torch.linalg.norm(reference)


def test_multiply_takes_x_that_is_strided_or_has_more_dimensions() -> None:
    weight = torch.randn(8, 16)
    x = torch.randn(3, 5, 32)[..., :16]
    torch.testing.assert_close(multiply(x, pack(weight)), x @ weight.T)
    torch.testing.assert_close(multiply(x[0, ::2], pack(weight)), x[0, ::2] @ weight.T)


def test_rows_are_padded_by_at_most_a_sixteenth_to_few_sizes() -> None:
    sizes = [padded_rows(rows) for rows in range(1, 2049)]
    assert sizes == sorted(sizes)
    assert all(rows <= size <= rows * 1.0625 for rows, size in enumerate(sizes, 1))
    assert len(set(sizes)) == 128
    assert [padded_rows(rows) for rows in (0, 1, 32, 33, 2047, 2048)] == [0, 1, 32, 34, 2048, 2048]
    assert kernel_bytes(5, 2048) == 128 * kernel_bytes(5, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_onednn_sees_few_numbers_of_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.add(x.shape[0])
        return x.new_zeros(x.shape[0], 8)

    monkeypatch.setattr(matmul, "_multiply", noted)
    packed = pack(torch.randn(8, 16, dtype=dtype))
    for rows in range(1, 257):
        assert multiply(torch.randn(rows, 16, dtype=dtype), packed).shape == (rows, 8)
    assert len(seen) == 80


def test_products_that_are_padded_equal_products_that_are_not_in_16_bits() -> None:
    x, weight, bias = torch.randn(3, 35, 16).half(), torch.randn(8, 16).half(), torch.randn(8).half()
    assert padded_rows(3 * 35) > 3 * 35
    torch.testing.assert_close(multiply(x, pack(weight), bias), x @ weight.T + bias, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_onednn_sees_few_numbers_of_tokens_where_heads_are_multiplied_in_16_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices, bmm, seen = torch.randn(3, 16, 8).to(dtype), torch.bmm, set()

    def noted(x: torch.Tensor, *others: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        seen.add(x.shape[1])
        return bmm(x, *others, **options)

    monkeypatch.setattr(torch, "bmm", noted)
    for tokens in range(257):
        x, out = torch.randn(tokens, 3, 16).to(dtype), torch.full((tokens, 3, 10), torch.nan, dtype=dtype)
        multiply_heads(x, matrices, out[..., :8])
        exact = torch.einsum("thi,hio->tho", x.double(), matrices.double()).to(dtype)
        torch.testing.assert_close(out[..., :8], exact, rtol=0.02, atol=0.02)
        assert out[..., 8:].isnan().all()
    assert len(seen) == (257 if dtype == torch.float32 else 81)


def test_shapes_are_counted_where_onednn_compiles_kernels() -> None:
    plain, scales = torch.randn(8, 16), torch.randn(8).half()
    experts = torch.randn(4, 6, 16).half()
    assert compiled_shapes(plain, scales, plain.to(torch.int8), experts.to("meta")) == frozenset()
    assert compiled_shapes(plain.half(), plain.bfloat16(), scales, experts) == {(8, 16), (6, 16)}
    assert compiled_shapes(pack(plain)) == ({(8, 16)} if can_pack(plain) else frozenset())


def test_multiply_takes_no_rows() -> None:
    assert multiply(torch.empty(0, 16), pack(torch.randn(8, 16))).shape == (0, 8)


def test_weight_that_onednn_cannot_pack_is_kept() -> None:
    for weight in (
        torch.randn(4, 4, dtype=torch.float16),
        torch.randn(4, 4, device="meta"),
        torch.randn(4, 4).double(),
    ):
        assert not can_pack(weight)
        assert pack(weight) is weight


def test_multiply_by_a_packed_weight_in_bfloat16_equals_the_plain_product() -> None:
    x, weight = torch.randn(9, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    torch.testing.assert_close(multiply(x, pack(weight)), x @ weight.T, rtol=0.02, atol=0.1)
