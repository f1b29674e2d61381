"""Sizes of batches and of steps that CUDA graphs are captured for; others are padded to the next size."""

from __future__ import annotations

from collections.abc import Sequence

ALL_RECORDED = 64
"""Up to this batch size of a decode step, every size may have kernels of its own."""
MIN_GRAPH_TOKENS = 1024
"""Steps of up to this many tokens have piecewise graphs on every device."""


def batch_sizes(max_running: int) -> list[int]:
    """Batch sizes to capture graphs for.

    A batch is padded by less than 8 sequences up to 64, by less than a quarter of its size up to 256, and by less than
    an eighth beyond, where the rows of a step cost more than its weights: of 1,578 sequences of Llama-3.1-8B in fp8, a
    quarter would be 6 % of the step.
    """
    sizes = [1, 2, 3, 4, 6, 8, *range(16, 65, 8)]
    while sizes[-1] < max_running:
        power = 1 << sizes[-1].bit_length() - 1
        sizes.append(sizes[-1] + power // (4 if power < 256 else 8))
    return [size for size in sizes if size < max_running] + [max_running]


def token_counts(max_tokens: int) -> list[int]:
    """Numbers of tokens to capture steps for, up to `max_tokens`.

    A step is padded by less than 64 tokens up to 512, by less than 128 up to 2,048, and by less than an eighth beyond.
    """
    counts = [*range(64, 513, 64)]
    while counts[-1] < max_tokens:
        power = 1 << counts[-1].bit_length() - 1
        counts.append(counts[-1] + max(power // 8, 128))
    return [count for count in counts if count <= max_tokens]


def graph_tokens(tokens: int, launch_seconds: float, seconds: float) -> int:
    """Number of tokens up to which a step is faster as piecewise graphs than launched kernel by kernel.

    tokens, launch_seconds, seconds: of a step without graphs, the time of the host for its launches, and the time until
    its result. The device's time is taken to be proportional to the tokens. A step of more tokens than the result keeps
    the device busy for longer than the host takes to launch its kernels, and needs no padding without graphs. The host
    plans steps too, for which a tenth is added.
    """
    return max(MIN_GRAPH_TOKENS, min(tokens, int(1.1 * tokens * launch_seconds / seconds)))


def larger_graphs(max_tokens: int, step_tokens: int) -> float:
    """Memory of the graphs beyond MIN_GRAPH_TOKENS, as a share of a step of `step_tokens`, the largest, without graphs.

    All graphs together take the memory of the largest, of `max_tokens`. 0 if every step has graphs, and none without.
    """
    return max(max_tokens - MIN_GRAPH_TOKENS, 0) / step_tokens if max_tokens < step_tokens else 0.0


def recorded_sizes(sizes: Sequence[int], all_up_to: int) -> list[int]:
    """Sizes whose kernels most likely include those of all: those up to `all_up_to`, powers of two, and the largest."""
    return [size for size in sizes if size <= all_up_to or size & (size - 1) == 0 or size == sizes[-1]]
