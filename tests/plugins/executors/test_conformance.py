"""The built-in executors keep their contract; Ray's does in test_ray.py."""

from __future__ import annotations

from engine.plugins.executors.multiproc import MultiprocExecutor
from engine.plugins.executors.tp import TensorParallelExecutor
from engine.plugins.executors.uniproc import UniprocExecutor
from engine.testing.executors import ExecutorConformance


class TestUniproc(ExecutorConformance):
    executor = UniprocExecutor


class TestMultiproc(ExecutorConformance):
    executor = MultiprocExecutor


class TestTensorParallel(ExecutorConformance):
    executor = TensorParallelExecutor
    ranks = 2
    refused_ranks = 1
