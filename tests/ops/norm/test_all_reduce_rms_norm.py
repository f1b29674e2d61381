"""The all-reduce fused into a norm: in Triton's interpreter, in processes that map the same files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs as many GPUs as ranks; tests/core/distributed has a test for GPUs"
)

PROCESS = """
import json, sys
import torch
from engine.ops.norm.rms_norm import add_rms_norm
from engine.ops.norm.all_reduce_rms_norm import ReduceBuffers, all_reduce_rms_norm

rank, ranks, size, max_rows, directory = map(json.loads, sys.argv[1:])

def shared(name, count, dtype):
    return torch.from_file(f"{directory}/{name}", shared=True, size=count, dtype=dtype)

rows_of = [shared(f"rows{each}", 2 * max_rows * size, torch.float32) for each in range(ranks)]
flags = [shared(f"flags{each}", max_rows * ranks, torch.int32) for each in range(ranks)]
epochs = torch.zeros(max_rows, dtype=torch.int32)
buffers = ReduceBuffers(
    rank=rank, ranks=ranks, size=size, max_rows=max_rows, epochs=epochs,
    rows=torch.tensor([each.data_ptr() for each in rows_of]), flags=torch.tensor([each.data_ptr() for each in flags]),
)
generator = torch.Generator().manual_seed(0)
weight = torch.randn(size, generator=generator)
for call, rows in enumerate([3, 1, 3, 2, 3, 0, 1]):
    xs = torch.randn(ranks, rows, size, generator=generator)
    residual = torch.randn(rows, size, generator=generator) if call % 2 else None
    expected = add_rms_norm(sum(xs), None if residual is None else residual.clone(), weight, 1e-5)
    found = all_reduce_rms_norm(xs[rank], residual, weight, 1e-5, buffers)
    for one, other in zip(found, expected):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5), (one, other)  # torch.testing takes a second to import
    assert residual is None or found[1] is residual
print(json.dumps([epochs.tolist(), found[0].double().sum().item()]))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_reduce_rms_norm_equals_the_norm_of_the_sum(ranks: int, tmp_path: Path) -> None:
    """Calls with different numbers of rows follow each other, and use both buffers of a row repeatedly."""
    size, max_rows = 24, 4
    for rank in range(ranks):
        (tmp_path / f"rows{rank}").write_bytes(bytes(2 * max_rows * size * 4))
        (tmp_path / f"flags{rank}").write_bytes(bytes(max_rows * ranks * 4))
    processes = []
    for rank in range(ranks):
        given = map(json.dumps, (rank, ranks, size, max_rows, str(tmp_path)))
        command = [sys.executable, "-c", PROCESS, *given]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    results = []
    for process in processes:
        out, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        results.append(json.loads(out))
    assert all(result == results[0] for result in results), "the results of the ranks differ in some bit"
    assert results[0][0] == [6, 4, 3, 0]
