"""Contract of an autotuned op: a matrix product with several implementations, one of which is chosen by measurement.

The tuner knows this contract only, and nothing of how weights are stored.
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from attrs import frozen

C = TypeVar("C")
"""A candidate: one implementation, such as a tile size. Hashable; `AutotunedOp.name` names it."""


@frozen(kw_only=True, eq=False)
class Operands:
    """Weights and bias of one layer. The tuner makes the activations."""

    weights: Mapping[str, torch.Tensor]
    """Tensors by the names that the op defines."""
    bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.nbytes for tensor in self.weights.values())


class AutotunedOp(ABC, Generic[C]):
    """A matrix product of one shape and weight format, shared by all layers that have both.

    Candidates are chosen per row class. Row classes are ascending numbers of rows of x; the choice for a class holds
    for every number of rows above the next smaller class, up to the class itself. Until `choose` is called the op uses
    a default of its own. All candidates of a class compute the same up to rounding, so that a model's outputs do not
    depend on which is the fastest.
    """

    @property
    @abstractmethod
    def key(self) -> str:
        """Identifies the op in the cache and in the log: sizes, dtypes, format. Ops with equal keys share results."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Changes when old measurements no longer hold: `version_of` the modules of the kernels and candidates."""

    @property
    @abstractmethod
    def inputs(self) -> int:
        """Columns of x."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of x."""

    @property
    @abstractmethod
    def row_classes(self) -> Sequence[int]:
        """Numbers of rows that are measured, ascending."""

    @abstractmethod
    def candidates(self, rows: int) -> Sequence[C]:
        """Candidates to measure for a row class. The first is the default, which the others must beat."""

    def refine(self, rows: int, ranked: Sequence[C]) -> Sequence[C]:
        """More candidates for a row class, once the first are measured.

        ranked: the candidates that run, fastest first. A refinement may depend on the candidates alone, not on their
        number or times: a cached result is found again by refining each candidate separately.
        """
        return ()

    def name(self, candidate: C) -> str:
        """Names a candidate in the cache and in the log; unique within its row class."""
        return str(candidate)

    @abstractmethod
    def compile(self, rows: int, candidate: C, operands: Operands) -> None:
        """Compile a candidate without launching it, as the active triton.AsyncCompileMode says."""

    @abstractmethod
    def run(self, candidate: C, x: torch.Tensor, operands: Operands) -> torch.Tensor:
        """Multiply by a candidate, chosen or not. x: [rows, inputs], contiguous.

        May leave out operations after the product that are the same for all candidates, such as an activation. The
        tuner discards the result.
        """

    @abstractmethod
    def choose(self, rows: int, candidate: C) -> None:
        """Use a candidate for a row class from now on."""


@frozen(kw_only=True, eq=False)
class AutotunedCall:
    """One layer's use of an op."""

    op: AutotunedOp[Any]
    operands: Operands


@cache
def version_of(*modules: ModuleType) -> str:
    """A digest of the modules' code, which comments and docstrings do not change."""
    code = "".join(code_of(inspect.getsource(module)) for module in modules)
    return blake2b(code.encode(), digest_size=8).hexdigest()


def code_of(source: str) -> str:
    """Python source without comments, docstrings and empty lines: the same text on every version of Python."""
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for first, begin, last, end in sorted(_string_statements(source), reverse=True):
        before, after = lines[first].encode()[:begin].decode(), lines[last].encode()[end:].decode()
        lines[first : last + 1] = [before + after]
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())


def _string_statements(source: str) -> Iterator[tuple[int, int, int, int]]:
    """Where the statements that are only a string begin and end: line, byte in it, last line, byte in that."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            yield node.lineno - 1, node.col_offset, node.end_lineno - 1, node.end_col_offset
