"""Contract of a multiplication whose kernel is chosen by measurement: tuning.py knows it, and no format of weights."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import blake2b
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from attrs import frozen

C = TypeVar("C")
"""A candidate: one way to multiply. It is hashable, and says by `AutotunedOp.name` which one it is."""


@frozen(kw_only=True, eq=False)
class Operands:
    """What one layer multiplies by. Activations are made by who measures."""

    weights: Mapping[str, torch.Tensor]
    """By names of the tunable's own."""
    bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of the weights."""
        return sum(tensor.nbytes for tensor in self.weights.values())


class AutotunedOp(ABC, Generic[C]):
    """One multiplication, the same for all layers of one size and format.

    Before anything is chosen it is multiplied in some fair way. Chosen is by classes of rows: the choice for a class
    holds for all numbers of rows above the class before it. All candidates of a class compute the same up to rounding,
    so that what a model answers does not depend on which is fastest.
    """

    @property
    @abstractmethod
    def key(self) -> str:
        """Its name in the cache and in the log: sizes, types, format. Who has the same key shares a measurement."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Changes when measurements do not hold any more: `version_of` the modules of the kernels and candidates."""

    @property
    @abstractmethod
    def inputs(self) -> int:
        """Columns of x."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of x."""

    @property
    @abstractmethod
    def classes(self) -> Sequence[int]:
        """Numbers of rows that are measured, ascending."""

    @abstractmethod
    def candidates(self, rows: int) -> Sequence[C]:
        """What is worth a measurement for a class. The first is what the others must be faster than."""

    def refine(self, rows: int, ranked: Sequence[C]) -> Sequence[C]:
        """More candidates for a class, once the first are measured: ranked, the fastest first, are those that run.

        It may look only at what each of them is: what was chosen is found again by refining each candidate alone.
        """
        return ()

    def name(self, candidate: C) -> str:
        """A candidate in the cache and in the log, where no other of its class has the same."""
        return str(candidate)

    @abstractmethod
    def compile(self, rows: int, candidate: C, operands: Operands) -> None:
        """Compile without a launch, in the threads of a triton.AsyncCompileMode if one is active."""

    @abstractmethod
    def run(self, candidate: C, x: torch.Tensor, operands: Operands) -> torch.Tensor:
        """Multiply, chosen or not. x: [rows, inputs], dense. What all candidates do alike after it may be left out."""

    @abstractmethod
    def choose(self, rows: int, candidate: C) -> None:
        """From now on multiply by this one in a class."""


@frozen(kw_only=True, eq=False)
class AutotunedCall:
    """One that a layer does."""

    tunable: AutotunedOp[Any]
    operands: Operands


@cache
def version_of(*modules: ModuleType) -> str:
    """A digest of the modules' sources."""
    sources = "".join(inspect.getsource(module) for module in modules).encode()
    return blake2b(sources, digest_size=8).hexdigest()
