"""Upper bounds of histogram buckets. Ours contain all of vLLM's, so that one histogram gives exact counts for both."""

from __future__ import annotations

VLLM_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
VLLM_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
VLLM_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
VLLM_NUM_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
VLLM_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


def with_finer(bounds: tuple[float, ...], *finer: float) -> tuple[float, ...]:
    """These bounds and further ones, ascending."""
    return tuple(sorted({*bounds, *finer}))


REQUEST_SECONDS = with_finer(VLLM_REQUEST_SECONDS, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
FIRST_TOKEN_SECONDS = with_finer(VLLM_FIRST_TOKEN_SECONDS, 0.0025, 0.025, 0.05, 30.0, 60.0, 120.0)
TOKEN_SECONDS = with_finer(VLLM_TOKEN_SECONDS, 0.001, 0.0025, 0.005, 0.0075, 0.015, 0.02, 0.25)
NUM_CHOICES = with_finer(VLLM_NUM_CHOICES, 50.0)
NUM_TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
"""1, 2, 5, 10, ... The bounds above the longest context are not exported: vLLM has none there."""
HTTP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
