"""Norm, rotation and the write of latent keys."""

from __future__ import annotations

import pytest
import torch
import triton

from engine.ops.attention.latent_rope import rotate_and_write_latents

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
pytestmark = [] if triton.knobs.runtime.interpret else [pytest.mark.gpu]
EPS = 1e-6


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of x: [tokens, heads, 2 * pairs], in float64."""
    c, s = cos.double()[:, None], sin.double()[:, None]
    first, second = x[..., ::2].double(), x[..., 1::2].double()
    return torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "heads", "latent", "pairs"), [(3, 4, 32, 4), (1, 16, 512, 32), (5, 1, 48, 8), (2, 20, 24, 3)]
)
def test_latent_keys_and_rotated_queries_equal_float64(
    tokens: int, heads: int, latent: int, pairs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    size, block_size = latent + 2 * pairs, 4
    q = torch.full((tokens, heads, size), -7.0, dtype=dtype, device=DEVICE)
    # A part of each query head, behind another part that does not rotate.
    parts = torch.randn(tokens, heads, 5 + 2 * pairs, device=DEVICE).to(dtype)[..., 5:]
    k = torch.randn(tokens, size, device=DEVICE).to(dtype)
    weight = torch.randn(latent, device=DEVICE).to(dtype)
    cos, sin = torch.randn(2, tokens, pairs, device=DEVICE)
    cache = torch.full((4, block_size, 1, size), torch.nan, dtype=dtype, device=DEVICE)
    slots = torch.randperm(4 * block_size, device=DEVICE)[:tokens]
    projected = k.clone()
    rotate_and_write_latents(q, parts, k, weight, EPS, cache, slots, cos, sin)

    limit = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    normed = projected[:, :latent].double()
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()
    expected = torch.cat((normed, rotated(projected[:, None, latent:], cos, sin)[:, 0]), -1)
    torch.testing.assert_close(k.double(), expected, **limit)
    torch.testing.assert_close(q[..., latent:].double(), rotated(parts, cos, sin), **limit)
    assert (q[..., :latent] == -7).all(), "the part for latents was written"
    flat = cache.flatten(0, 2)
    assert torch.equal(flat[slots], k)
    flat[slots] = torch.nan
    assert flat.isnan().all(), "another slot was written"


def test_no_tokens_launch_nothing() -> None:
    nothing = torch.empty(0, 24, device=DEVICE)
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    q = torch.empty(0, 2, 24, device=DEVICE)
    cache = torch.zeros(1, 4, 1, 24, device=DEVICE)
    angles = torch.empty(0, 4, device=DEVICE)
    rotate_and_write_latents(q, q[..., 16:], nothing, torch.ones(16, device=DEVICE), EPS, cache, slots, angles, angles)
    assert not cache.any()
