"""Sums that read other ranks' memory: in the interpreter, in processes that map the same files."""

import json
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs as many GPUs as ranks; see test_distributed")

PROCESS = """
import json, sys
import torch
from engine.ops.norm.rms_norm import add_rms_norm
from engine.ops.norm.all_reduce_rms_norm import RowSums, sum_rms_norm

rank, ranks, size, most, directory = map(json.loads, sys.argv[1:])

def shared(name, count, dtype):
    return torch.from_file(f"{directory}/{name}", shared=True, size=count, dtype=dtype)

places = [shared(f"places{each}", 2 * most * size, torch.float32) for each in range(ranks)]
flags = [shared(f"flags{each}", most * ranks, torch.int32) for each in range(ranks)]
epochs = torch.zeros(most, dtype=torch.int32)
sums = RowSums(
    rank=rank, ranks=ranks, size=size, most_rows=most, epochs=epochs,
    places=torch.tensor([each.data_ptr() for each in places]), flags=torch.tensor([each.data_ptr() for each in flags]),
)
generator = torch.Generator().manual_seed(0)
weight = torch.randn(size, generator=generator)
for call, rows in enumerate([3, 1, 3, 2, 3, 0, 1]):
    xs = torch.randn(ranks, rows, size, generator=generator)
    residual = torch.randn(rows, size, generator=generator) if call % 2 else None
    expected = add_rms_norm(sum(xs), None if residual is None else residual.clone(), weight, 1e-5)
    found = sum_rms_norm(xs[rank], residual, weight, 1e-5, sums)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert residual is None or found[1] is residual
print(json.dumps([epochs.tolist(), found[0].double().sum().item()]))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_sums_of_rows(ranks, tmp_path):
    """Calls of different numbers of rows follow each other; both places of a row are used again and again."""
    size, most = 24, 4
    for rank in range(ranks):
        (tmp_path / f"places{rank}").write_bytes(bytes(2 * most * size * 4))
        (tmp_path / f"flags{rank}").write_bytes(bytes(most * ranks * 4))
    processes = []
    for rank in range(ranks):
        given = map(json.dumps, (rank, ranks, size, most, str(tmp_path)))
        command = [sys.executable, "-c", PROCESS, *given]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    results = []
    for process in processes:
        out, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        results.append(json.loads(out))
    assert all(result == results[0] for result in results), "the ranks' sums differ in some bit"
    assert results[0][0] == [6, 4, 3, 0]
