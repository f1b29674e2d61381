"""Names in a checkpoint: which tensors it has, which of them no layer reads, and former prefixes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from attrs import evolve

from engine.core.layers.former_prefixes import FormerPrefixes
from engine.core.quant.base import LinearPart, TensorSpec, stored_tensor


class CheckpointNames:
    """What layers ask about a checkpoint's names. A name is a tensor's or a module's, and may have a former prefix."""

    def __init__(self, tensors: Collection[str] | None) -> None:
        """tensors: names of the checkpoint's tensors; None: unknown, since weights are random."""
        self.ignored: list[str] = []
        """Patterns of tensors that may be there and are not read."""
        self.tied: dict[str, str] = {}
        """Tensor that is not read -> the tensor used in its place, which must equal it."""
        self.former_prefixes: dict[str, str] = {}
        """Prefix of names -> their prefix in an older checkpoint."""
        self._prefixes = FormerPrefixes({}, ())
        self._tensors = tensors
        self._modules = None if tensors is None else frozenset(name.rpartition(".")[0] for name in tensors)

    def accept_prefix(self, prefix: str, former: str) -> None:
        """Let a checkpoint without names that begin with `prefix` have names that begin with `former` instead."""
        self.former_prefixes[prefix] = former
        self._prefixes = FormerPrefixes(self.former_prefixes, self._tensors or ())

    def stored(self, name: str) -> str:
        """The name in the checkpoint."""
        return self._prefixes.stored(name)

    def present(self, stored: str) -> str:
        """The name by which models ask for what the checkpoint has as `stored`."""
        return self._prefixes.present(stored)

    def stored_parts(self, parts: Sequence[LinearPart]) -> tuple[LinearPart, ...]:
        """The parts of a linear layer, by their names in the checkpoint."""
        return tuple(_renamed(part, self.stored) for part in parts)

    def present_parts(self, stored: Sequence[LinearPart]) -> tuple[LinearPart, ...]:
        """The parts of a linear layer, by the names by which models ask for them."""
        return tuple(_renamed(part, self.present) for part in stored)

    def has_module(self, module: str) -> bool | None:
        """Whether the checkpoint has tensors of a module (MODULE.weight). None: unknown."""
        return None if self._modules is None else self.stored(module) in self._modules

    def has_tensor(self, name: str) -> bool | None:
        """Whether the checkpoint has a tensor. None: unknown."""
        return None if self._tensors is None else self.stored(name) in self._tensors

    def has_quantized(self, tensors: Mapping[str, TensorSpec]) -> bool:
        """Whether the checkpoint has the tensors of a quantized layer: all that are not optional, and at least one that
        an unquantized layer does not have."""
        optional = {stored_tensor(name, spec): spec.optional for name, spec in tensors.items()}
        stored = {name for name in optional if self.has_tensor(name)}
        return any(not name.endswith((".weight", ".bias")) for name in stored) and all(
            is_optional or name in stored for name, is_optional in optional.items()
        )


def _renamed(part: LinearPart, rename: Callable[[str], str]) -> LinearPart:
    """The part under another name, and in a layer under another name."""
    stored_in = None if part.stored_in is None else evolve(part.stored_in, name=rename(part.stored_in.name))
    return evolve(part, name=rename(part.name), stored_in=stored_in)
