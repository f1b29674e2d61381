"""The extension points: for each, its hook, its contract and the section of the configuration that chooses."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from attrs import frozen, has

from engine.core.errors import PluginError


@frozen
class ExtensionPoint:
    """A part of the engine that plugins can implement."""

    name: str
    """The package in core that holds the contract; also names the hook and the folder of the built-in plugins."""
    section: str
    """The section of the configuration that chooses the plugin."""
    contract_name: str
    contract_module: str = "base"
    older_apis: tuple[str, ...] = ()
    """Versions of the contract before the current one that are still accepted."""
    optional: bool = False
    """Whether an engine may have none, which is the default: the configuration then has an empty name."""
    other_contract: str = ""
    """MODULE.NAME, in that package, of another abstract class that a plugin may implement instead; empty: none."""
    pairs: str = ""
    """Roles of two plugins that can serve together ("PREFILL,DECODE"); empty where one plugin serves."""

    @property
    def hook(self) -> str:
        """Name of the hook in which plugins register implementations."""
        return f"register_{self.name}"

    @property
    def module(self) -> Any:
        """The contract's module, whose import is cheap (no torch)."""
        return import_module(f"engine.core.{self.name}.{self.contract_module}")

    @property
    def contract(self) -> type:
        """The abstract class."""
        contract: type = getattr(self.module, self.contract_name)
        return contract

    @property
    def contracts(self) -> tuple[type, ...]:
        """The abstract classes, of which a plugin implements one."""
        if not self.other_contract:
            return (self.contract,)
        module, _, name = self.other_contract.rpartition(".")
        return self.contract, getattr(import_module(f"engine.core.{self.name}.{module}"), name)

    @property
    def api(self) -> str:
        """Version of the contract."""
        return str(self.module.API)

    @property
    def accepted_apis(self) -> tuple[str, ...]:
        """Versions of the contract that a plugin may be written for, the current one first."""
        return (self.api, *self.older_apis)

    @property
    def versions(self) -> str:
        """The accepted versions, as errors say them."""
        older = f" (and accepts {', '.join(map(repr, self.older_apis))})" if self.older_apis else ""
        return f"version {self.api!r}{older}"

    def check(self, found: object, owner: str) -> None:
        """Raise PluginError unless `found` is a concrete class that fulfils the contract."""
        contracts = self.contracts
        wanted = " or ".join(f"engine.core.{self.name}.{contract.__name__}" for contract in contracts)
        if not isinstance(found, type) or not issubclass(found, contracts):
            raise PluginError(f"{owner} is {found!r}, not a subclass of {wanted}; derive it from that class")
        wanted = next(
            f"engine.core.{self.name}.{contract.__name__}" for contract in contracts if issubclass(found, contract)
        )
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        if missing:
            raise PluginError(
                f"{owner} is {found.__qualname__}, which lacks {', '.join(missing)} of {wanted}; add them"
            )
        options = getattr(found, "options_class", None)
        if options is not None and not (isinstance(options, type) and has(options)):
            raise PluginError(
                f"{owner} has options_class = {options!r}, which is not an attrs class; decorate it with @frozen"
            )
        api = getattr(found, "api", None)
        if not isinstance(api, str):
            wrong = "without api" if api is None else f"with api = {api!r}"
            raise PluginError(
                f"{owner} is {found.__qualname__} {wrong}; put api = {self.api!r} into the class, the version of"
                f" {wanted} as text"
            )
        if api not in self.accepted_apis:
            raise PluginError(
                f"{owner} is {found.__qualname__} with api = {api!r}, but this engine has {self.versions} of "
                f"{wanted}; install a version of the plugin made for it"
            )
        contract_error = getattr(self.module, "contract_error", None)
        error = contract_error(found) if contract_error is not None else None
        if error is not None:
            raise PluginError(f"{owner} is {found.__qualname__} with {error}")


EXTENSION_POINTS = (
    ExtensionPoint("attention", "attention", "AttentionBackend", older_apis=("1",), pairs="PREFILL,DECODE"),
    ExtensionPoint("quant", "quant", "QuantMethod", older_apis=("1",)),
    ExtensionPoint("schedulers", "scheduler", "SchedulingPolicy", contract_module="policy"),
    ExtensionPoint("executors", "executor", "Executor", older_apis=("1",)),
    ExtensionPoint("models", "model", "Model", older_apis=("1",)),
    ExtensionPoint("parsers", "parser", "Parser"),
    ExtensionPoint("grammars", "grammar", "GrammarBackend"),
    ExtensionPoint(
        "speculators",
        "speculator",
        "Speculator",
        older_apis=("1",),
        optional=True,
        other_contract="device.DeviceSpeculator",
    ),
)
