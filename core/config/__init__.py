"""The configuration: one frozen tree, and how files and options are read into it."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.config.default_model import demo_model as demo_model
    from engine.core.config.limits import parse_bytes as parse_bytes
    from engine.core.config.load import (
        DEFAULT as DEFAULT,
        HUB_NAMES as HUB_NAMES,
        PATHS as PATHS,
        Resolved as Resolved,
        flatten as flatten,
        load_config as load_config,
    )
    from engine.core.config.model_name import is_hub_name as is_hub_name, served_name as served_name
    from engine.core.config.server import ServerConfig as ServerConfig
    from engine.core.config.setting_list import (
        Setting as Setting,
        canonical_key as canonical_key,
        describe as describe,
    )
    from engine.core.config.structure import structure_options as structure_options
    from engine.core.config.structure_errors import show as show
    from engine.core.config.tree import (
        AUTO as AUTO,
        FEW_RUNNING as FEW_RUNNING,
        EngineConfig as EngineConfig,
        ExecutorConfig as ExecutorConfig,
        KVEventsConfig as KVEventsConfig,
        ModelConfig as ModelConfig,
        ParserConfig as ParserConfig,
        PluginsConfig as PluginsConfig,
        sections as sections,
    )

__getattr__, __dir__, __all__ = exports(
    __name__,
    default_model=("demo_model",),
    limits=("parse_bytes",),
    load=("DEFAULT", "HUB_NAMES", "PATHS", "Resolved", "flatten", "load_config"),
    model_name=("is_hub_name", "served_name"),
    server=("ServerConfig",),
    setting_list=("Setting", "canonical_key", "describe"),
    structure=("structure_options",),
    structure_errors=("show",),
    tree=(
        "AUTO",
        "EngineConfig",
        "ExecutorConfig",
        "FEW_RUNNING",
        "KVEventsConfig",
        "ModelConfig",
        "ParserConfig",
        "PluginsConfig",
        "sections",
    ),
)
