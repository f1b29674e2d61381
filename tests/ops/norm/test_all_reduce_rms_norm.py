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

rank, ranks, size, max_rows, cases, directory = map(json.loads, sys.argv[1:])
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

def run(name, one_shot_rows, dtype):
    words = 2 * max_rows * ranks * size * dtype.itemsize // 4

    def shared(rank):
        return torch.from_file(f"{directory}/{name}-{rank}", shared=True, size=words, dtype=torch.int32)

    messages = [shared(each) for each in range(ranks)]
    epochs = torch.zeros(max_rows, dtype=torch.int32)
    buffers = ReduceBuffers(
        rank=rank, ranks=ranks, size=size, max_rows=max_rows, one_shot_rows=one_shot_rows, epochs=epochs,
        messages=torch.tensor([each.data_ptr() for each in messages]),
    )
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, generator=generator)
    tolerance, total = TOLERANCES[dtype], 0.0
    for call, rows in enumerate([3, 1, 3, 2, 3, 0, 1]):
        xs = torch.randn(ranks, rows, size, generator=generator).to(dtype)
        if rows == 2:
            xs[0, 1, :2].view(torch.int16).fill_(-1)  # the bits of a missing number, a NaN
        residual = torch.randn(rows, size, generator=generator).to(dtype) if call % 2 else None
        expected = add_rms_norm(xs.float().sum(0), None if residual is None else residual.float().clone(), weight, 1e-5)
        found = all_reduce_rms_norm(xs[rank], residual, weight, 1e-5, buffers)
        for one, other in zip(found, expected):
            assert (one.shape, one.dtype) == (other.shape, dtype)
            same = torch.allclose(one.float(), other, rtol=tolerance, atol=tolerance, equal_nan=True)
            assert same, (name, call, one, other)  # torch.testing takes a second to import
            total += one.nan_to_num().double().sum().item()
        assert residual is None or found[1] is residual
    assert (messages[rank] == -1).all()
    return [epochs.tolist(), total]

print(json.dumps([run(name, rows, getattr(torch, dtype)) for name, rows, dtype in cases]))
"""
CASES = [
    ("one shot, float32", 4, "float32"),
    ("both, float32", 1, "float32"),
    ("one shot, bfloat16", 4, "bfloat16"),
    ("two shots, bfloat16", 0, "bfloat16"),
    ("both, float16", 1, "float16"),
]
"""Name, the largest number of rows in one shot, dtype."""


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_reduce_rms_norm_equals_the_norm_of_the_sum(ranks: int, tmp_path: Path) -> None:
    """Calls with different numbers of rows, in one shot or two, follow each other and use both buffers of a row."""
    size, max_rows = 24, 4
    for rank in range(ranks):
        for name, _, dtype in CASES:
            nbytes = 2 * max_rows * ranks * size * getattr(torch, dtype).itemsize
            (tmp_path / f"{name}-{rank}").write_bytes(b"\xff" * nbytes)
    processes = []
    for rank in range(ranks):
        given = map(json.dumps, (rank, ranks, size, max_rows, CASES, str(tmp_path)))
        command = [sys.executable, "-c", PROCESS, *given]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    results = []
    for process in processes:
        out, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        results.append(json.loads(out))
    assert all(result == results[0] for result in results), "the results of the ranks differ in some bit"
    assert [epochs for epochs, _ in results[0]] == [[6, 4, 3, 0]] * len(CASES)
