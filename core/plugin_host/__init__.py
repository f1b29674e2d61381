"""The plugin host: finds plugins, registers what they offer, and chooses one for each extension point."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.plugin_host.cache_groups import cache_layout as cache_layout
    from engine.core.plugin_host.choice import ChosenPlugin as ChosenPlugin, ask as ask, load_pair as load_pair
    from engine.core.plugin_host.derived import (
        DTYPES as DTYPES,
        attention_spec as attention_spec,
        fit_running as fit_running,
        fused_kernels as fused_kernels,
        resolve_dtype as resolve_dtype,
        resolve_kv_dtype as resolve_kv_dtype,
        settle as settle,
        shape_of as shape_of,
        speculator_spec as speculator_spec,
    )
    from engine.core.plugin_host.extension_points import EXTENSION_POINTS as EXTENSION_POINTS
    from engine.core.plugin_host.faults import (
        EXITS as EXITS,
        PluginCall as PluginCall,
        name_fault as name_fault,
        raise_interrupt as raise_interrupt,
        said as said,
        shown as shown,
    )
    from engine.core.plugin_host.guard import (
        STARTUP_CALLS as STARTUP_CALLS,
        guarded as guarded,
        owner_of as owner_of,
    )
    from engine.core.plugin_host.installed import HOME as HOME, PluginInfo as PluginInfo
    from engine.core.plugin_host.load import load_plugins as load_plugins
    from engine.core.plugin_host.questions import (
        Question as Question,
        attention_question as attention_question,
        model_question as model_question,
        parser_question as parser_question,
        quant_question as quant_question,
        questions_of_machine as questions_of_machine,
        speculator_question as speculator_question,
    )
    from engine.core.plugin_host.registry import Plugins as Plugins, Registry as Registry
    from engine.core.plugin_host.selection import (
        Parts as Parts,
        check_names as check_names,
        choose_parser as choose_parser,
        find_quant as find_quant,
        resolve as resolve,
    )
    from engine.core.plugin_host.signatures import wrong_signature as wrong_signature

__getattr__, __dir__, __all__ = exports(
    __name__,
    cache_groups=("cache_layout",),
    choice=("ChosenPlugin", "ask", "load_pair"),
    derived=(
        "DTYPES",
        "attention_spec",
        "fit_running",
        "fused_kernels",
        "resolve_dtype",
        "resolve_kv_dtype",
        "settle",
        "shape_of",
        "speculator_spec",
    ),
    extension_points=("EXTENSION_POINTS",),
    faults=(
        "EXITS",
        "PluginCall",
        "name_fault",
        "raise_interrupt",
        "said",
        "shown",
    ),
    guard=(
        "STARTUP_CALLS",
        "guarded",
        "owner_of",
    ),
    installed=("HOME", "PluginInfo"),
    load=("load_plugins",),
    questions=(
        "Question",
        "attention_question",
        "model_question",
        "parser_question",
        "quant_question",
        "questions_of_machine",
        "speculator_question",
    ),
    registry=("Plugins", "Registry"),
    selection=(
        "Parts",
        "check_names",
        "choose_parser",
        "find_quant",
        "resolve",
    ),
    signatures=("wrong_signature",),
)
