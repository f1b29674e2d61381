"""Which plugin serves each seam, and why: names resolved to classes, refusals collected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

from attrs import evolve, frozen

from engine.core.attention.base import AttentionSpec, GraphSupport
from engine.core.attention.pair import AttentionPair
from engine.core.config.structure import structure_options
from engine.core.config.tree import AUTO, KV_DTYPES, EngineConfig
from engine.core.errors import ConfigError, EngineError, PluginError, near_misses
from engine.core.models.base import ModelSpec
from engine.core.plugin_host.extension_points import EXTENSION_POINTS, ExtensionPoint
from engine.core.plugin_host.faults import CONSTRUCTOR, blame
from engine.core.quant.float8 import FLOAT8, has_float8

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionBackend
    from engine.core.device import DeviceInfo
    from engine.core.executors.base import Executor
    from engine.core.models.base import Model
    from engine.core.plugin_host.registry import Manifest, Plugins, Registry
    from engine.core.quant.base import QuantMethod
    from engine.core.schedulers.policy import SchedulingPolicy

DTYPES = ("float32", "bfloat16", "float16")
BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens that keep matrix products efficient; more make sequences that decode wait longer."""

Question = Callable[[Any], str | None]
"""Asks a class whether it refuses: a sentence, or None."""


@frozen(kw_only=True)
class Choice:
    """The plugin chosen for one seam."""

    seam: str
    name: str
    provenance: str
    """Distribution and version it comes from, or "object" when it was passed in."""
    reason: str
    """Why this one, in a few words; for auto, with the refusals of those preferred to it."""

    def __str__(self) -> str:
        section = next(seam.section for seam in EXTENSION_POINTS if seam.name == self.seam)
        origin = "passed in from Python" if self.provenance == "object" else f"of {self.provenance}"
        return f"{section} {self.name!r} {origin}"


@frozen(kw_only=True)
class Parts:
    """The plugins of one engine, resolved: classes and their validated options."""

    attention: type[AttentionBackend[Any, Any]] | AttentionPair
    quant: type[QuantMethod[Any]]
    policy: SchedulingPolicy[Any]
    executor: type[Executor]
    model: type[Model]
    options: Mapping[str, Any]
    """By seam (attention, quant, executors, models): an instance of the plugin's options_class, or None."""
    choices: tuple[Choice, ...]
    manifest: Manifest = ()
    """What this process has loaded, for others of the same engine to compare; see Plugins.verify."""

    def blame(self, seam: str, call: str) -> AbstractContextManager[None]:
        """See faults.blame."""
        return blame(self.owner(seam), call)

    def owner(self, seam: str) -> str:
        """The plugin of a seam, as errors name it."""
        return next((str(choice) for choice in self.choices if choice.seam == seam), f"the plugin of {seam}")


def resolve(
    config: EngineConfig,
    plugins: Plugins,
    device: DeviceInfo,
    checkpoint: Mapping[str, Any],
    overrides: Mapping[str, object] = {},
    first: DeviceInfo | None = None,
) -> Parts:
    """The plugin of each seam: the one passed in, the one named, or for auto the most preferred that does not refuse.

    Attention may name two, "PREFILL,DECODE".

    checkpoint: the model's config.json. overrides: section of the configuration (attention, quant, scheduler, executor,
    model) -> a class that need not be registered; for scheduler an instance too. first: the first of the executor's
    devices, about which the executor is asked; None: that is `device`.
    Raises PluginError for an unknown, broken or refusing plugin, ConfigError for options it does not have.
    """
    sections = {seam.section: seam for seam in EXTENSION_POINTS}
    for section in overrides:
        if section not in sections:
            raise PluginError(f"there is no plug point {section!r}; {near_misses(section, sections)}")
    chosen: dict[str, Any] = {}
    options: dict[str, Any] = {}
    choices: list[Choice] = []
    owners: dict[str, str] = {}

    def choose(section: str, refuses: Question) -> None:
        seam = sections[section]
        wanted = getattr(config, section)
        found, choice = _choose(seam, plugins.seams[seam.name], wanted.name, overrides.get(section), refuses)
        owners[section] = str(choice)
        if isinstance(found, type | AttentionPair):
            where = f"{section} {choice.name!r}: {section}.options"
            with blame(owners[section], "its options_class"):
                options[seam.name] = structure_options(wanted.options, getattr(found, "options_class", None), where)
        elif wanted.options:
            raise ConfigError(
                f"{section}.options is set, but the {section} was passed in as an object that is made already; "
                "give the options to its constructor"
            )
        chosen[section] = found
        choices.append(choice)

    choose("model", model_question(checkpoint))
    choose("quant", quant_question(checkpoint, device))
    choose("attention", attention_question(config, device, checkpoint, chosen["model"], chosen["quant"], owners))
    for section, question in questions_of_machine(config, first or device).items():
        choose(section, question)
    policy = chosen["scheduler"]
    if isinstance(policy, type):
        with blame(owners["scheduler"], CONSTRUCTOR):
            policy = policy(options.pop("schedulers"))
    return Parts(
        model=chosen["model"],
        attention=chosen["attention"],
        quant=chosen["quant"],
        policy=policy,
        executor=chosen["executor"],
        options=options,
        choices=tuple(choices),
        manifest=plugins.manifest(),
    )


def model_question(checkpoint: Mapping[str, Any]) -> Question:
    """Whether a model class refuses this config.json."""
    return lambda cls: cls.refuses(checkpoint)


def quant_question(checkpoint: Mapping[str, Any], device: DeviceInfo) -> Question:
    """Whether a quantization method refuses this config.json."""
    return lambda cls: cls.refuses(checkpoint.get("quantization_config"), device)


def attention_question(
    config: EngineConfig,
    device: DeviceInfo,
    checkpoint: Mapping[str, Any],
    model: type[Model],
    quant: type[QuantMethod[Any]],
    owners: Mapping[str, str] = {},
) -> Question:
    """Whether an attention backend refuses this model, quantized so.

    owners: section -> how errors name its plugin. Raises CheckpointError or ConfigError, and PluginError for a model
    class that cannot say what its shape is.
    """
    shape, ranks = shape_of(model, checkpoint, owners.get("model", "")), config.executor.tensor_parallel
    refusal = refuses_ranks(shape, ranks)
    if refusal is not None:
        raise ConfigError(refusal)
    dtype = resolve_dtype(config, checkpoint, device)
    kv_dtype = resolve_kv_dtype(config, dtype, checkpoint, quant, device, owners.get("quant", ""))
    spec = attention_spec(shape, config, dtype, max_len(config, shape), kv_dtype, ranks)
    return lambda cls: cls.refuses(spec, device) or _float8_refusal(cls, spec) or _page_refusal(cls, spec)


def find_quant(
    config: EngineConfig, plugins: Plugins, device: DeviceInfo, checkpoint: Mapping[str, Any]
) -> type[QuantMethod[Any]]:
    """The quantization method of this configuration, where nothing else need be resolved. Raises as `resolve`."""
    [seam] = [seam for seam in EXTENSION_POINTS if seam.section == "quant"]
    question = quant_question(checkpoint, device)
    found: type[QuantMethod[Any]] = _choose(seam, plugins.seams[seam.name], config.quant.name, None, question)[0]
    return found


def questions_of_machine(config: EngineConfig, device: DeviceInfo) -> dict[str, Question]:
    """By section, for the plug points that depend on no model; device: the executor's, the first one of several."""
    return {"scheduler": lambda cls: cls.refuses(), "executor": lambda cls: cls.refuses(config, device)}


def settle(config: EngineConfig, device: DeviceInfo) -> EngineConfig:
    """The configuration with what depends on the device filled in; done once, before anything else reads it."""
    if config.scheduler.max_batch_tokens:
        return config
    return evolve(config, scheduler=evolve(config.scheduler, max_batch_tokens=BATCH_TOKENS[device.type]))


def use_graphs(config: EngineConfig, attention: AttentionBackend[Any, Any], device: DeviceInfo) -> bool:
    """Whether decode steps are replayed as CUDA graphs.

    Raises ConfigError where they are asked for and cannot be, and PluginError where the backend says nothing valid.
    """
    if config.executor.graphs == "off":
        return False
    known = get_args(GraphSupport)
    if attention.graphs not in known:
        raise PluginError(
            f"{type(attention).__name__} has set graphs = {attention.graphs!r}; it must be one of {', '.join(known)}"
        )
    obstacle = None
    if device.type != "cuda":
        obstacle = f"{device.torch_name} has no CUDA graphs"
    elif attention.graphs == "none":
        obstacle = f"{type(attention).__name__} computes on the host what changes from step to step"
    if obstacle is not None and config.executor.graphs != AUTO:
        raise ConfigError(f"graphs were asked for, but {obstacle}; use --graphs auto, or another backend or device")
    return obstacle is None


def resolve_dtype(config: EngineConfig, checkpoint: Mapping[str, Any], device: DeviceInfo) -> str:
    """Type of weights and activations; auto: the checkpoint's (float32 if it names none) on a GPU, float32 on a CPU."""
    if config.model.dtype != AUTO:
        return config.model.dtype
    if device.type == "cpu":
        return "float32"
    for table in (checkpoint, checkpoint.get("text_config") or {}):
        stored = table.get("dtype") or table.get("torch_dtype")
        if stored:
            dtype = str(stored).removeprefix("torch.")
            if dtype not in DTYPES:
                raise ConfigError(f"the checkpoint's dtype is {dtype}; choose --dtype {', '.join(DTYPES)}")
            return dtype
    return "float32"


def resolve_kv_dtype(
    config: EngineConfig,
    dtype: str,
    checkpoint: Mapping[str, Any],
    quant: type[QuantMethod[Any]],
    device: DeviceInfo,
    owner: str = "",
) -> str:
    """Type of keys and values; auto: what the checkpoint asks for on a device that can, else the activations' dtype.

    owner: how errors name the quantization method.
    """
    wanted = config.cache.dtype
    if wanted != AUTO:
        return KV_DTYPES.get(wanted, wanted)
    if device.capability is not None and not has_float8(device):
        return dtype
    with blame(owner or f"quantization method {quant.__qualname__}", "kv_dtype()"):
        return quant.kv_dtype(checkpoint.get("quantization_config")) or dtype


def fused_kernels(config: EngineConfig, device: DeviceInfo) -> bool:
    """Whether layers use Triton kernels. Raises ConfigError where they were asked for and cannot run."""
    wanted = config.executor.kernels
    installed = find_spec("triton") is not None
    if wanted == AUTO:
        return device.type == "cuda" and installed
    if wanted != "fused":
        return False
    if not installed:
        raise ConfigError(
            "executor.kernels (--kernels) is fused, but Triton is not installed; install it (pip install triton)"
            " or use --kernels plain"
        )
    if device.type == "cpu":
        import triton

        if not triton.knobs.runtime.interpret:
            raise ConfigError(
                "executor.kernels (--kernels) is fused, but Triton has no compiler for a CPU, only an interpreter for"
                " tests (TRITON_INTERPRET=1); use --kernels plain or auto"
            )
    return True


def max_len(config: EngineConfig, model_spec: ModelSpec) -> int:
    """Longest context in tokens. Raises ConfigError for one longer than the model was made for."""
    wanted = config.model.max_len
    if wanted > model_spec.max_len:
        raise ConfigError(
            f"model.max_len (--max-len) is {wanted}, but this model was made for {model_spec.max_len} tokens; "
            f"give at most {model_spec.max_len}, or 0 for that"
        )
    return wanted or model_spec.max_len


def refuses_ranks(model_spec: ModelSpec, ranks: int) -> str | None:
    """Why so many ranks cannot share the heads of a model, and how many can; None if they can.

    Query heads are shared out evenly; so are key and value heads, or else each is on several ranks.
    """
    heads, kv_heads = model_spec.num_heads, model_spec.num_kv_heads

    def fits(number: int) -> bool:
        return heads % number == 0 and (kv_heads % number == 0 or number % kv_heads == 0)

    if fits(ranks):
        return None
    possible = ", ".join(str(number) for number in range(1, heads + 1) if fits(number))
    return (
        f"{ranks} ranks cannot share this model's {heads} query heads and {kv_heads} key and value heads evenly;"
        f" these numbers of ranks can: {possible}"
    )


def attention_spec(
    model_spec: ModelSpec, config: EngineConfig, dtype: str, max_len: int, kv_dtype: str, ranks: int = 1
) -> AttentionSpec:
    """What the model asks of its attention under this configuration, on one of so many ranks."""
    return AttentionSpec(
        num_layers=model_spec.num_layers,
        num_heads=model_spec.num_heads // ranks,
        num_kv_heads=max(model_spec.num_kv_heads // ranks, 1),
        head_dim=model_spec.head_dim,
        scale=model_spec.scale,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=config.cache.block_size,
        max_len=max_len,
        sliding_windows=model_spec.sliding_windows,
        softcap=model_spec.softcap,
    )


def _choose(
    seam: ExtensionPoint, registry: Registry[Any], name: str, override: object, refuses: Question
) -> tuple[Any, Choice]:
    """The class (or instance) that serves a seam. Raises PluginError."""
    if override is not None:
        return _passed_in(seam, override, refuses)
    if seam.pairs and "," in name:
        pair, provenance = load_pair(seam, registry, name)
        refusal = ask(pair, f"{seam.section} {name!r}", refuses)
        if refusal:
            raise PluginError(f"{seam.section} {name!r} refuses: {refusal}")
        return pair, Choice(seam=seam.name, name=name, provenance=provenance, reason="asked for by name")
    if name != AUTO:
        registration = registry.get(name)
        cls = registration.load()
        refusal = ask(cls, str(registration), refuses)
        if refusal:
            raise PluginError(f"{registration} refuses: {refusal}")
        return cls, Choice(
            seam=seam.name, name=name, provenance=registration.plugin.provenance, reason="asked for by name"
        )
    refusals: list[str] = []
    for candidate in registry.candidates():
        try:
            cls = candidate.load()
            refusal = ask(cls, str(candidate), refuses)
        except EngineError as error:
            refusal = str(error)
        if refusal is None:
            reason = "; ".join(["auto: the most preferred that does not refuse", *refusals])
            return cls, Choice(
                seam=seam.name, name=candidate.name, provenance=candidate.plugin.provenance, reason=reason
            )
        refusals.append(f"{candidate.name} refuses: {refusal}")
    told = [*refusals, *map(str, registry.failures)] or ["none is offered to auto"]
    raise PluginError(
        f"no {seam.section} plugin serves this: {'; '.join(told)}; name one yourself as {seam.section}.name "
        f"(installed: {', '.join(registry.names()) or 'nothing'}) or install one that does"
    )


def load_pair(seam: ExtensionPoint, registry: Registry[Any], name: str) -> tuple[AttentionPair, str]:
    """Load the two attention backends of "first,second": the pair, and their provenance. Raises PluginError."""
    names = [part.strip() for part in name.split(",")]
    if len(names) != 2 or not all(names) or AUTO in names:
        raise PluginError(f"{seam.section} {name!r} does not name two plugins; write it as {seam.pairs}, both by name")
    first, second = map(registry.get, names)
    pair = AttentionPair((first.name, second.name), (first.load(), second.load()))
    return pair, " and ".join(dict.fromkeys((first.plugin.provenance, second.plugin.provenance)))


def _passed_in(seam: ExtensionPoint, override: object, refuses: Question) -> tuple[Any, Choice]:
    """A class, or a policy already made, that came from Python."""
    cls = override if isinstance(override, type) else type(override)
    owner = f"the {seam.section} passed in"
    seam.check(cls, owner)
    if override is not cls and seam.section != "scheduler":
        raise PluginError(
            f"{owner} is an instance of {cls.__qualname__}; pass the class, the engine makes the instance"
        )
    refusal = ask(cls, owner, refuses)
    if refusal:
        raise PluginError(f"{owner} ({cls.__qualname__}) refuses: {refusal}")
    return override, Choice(seam=seam.name, name=cls.__qualname__, provenance="object", reason="passed in from Python")


def shape_of(model: type[Model], checkpoint: Mapping[str, Any], owner: str = "") -> ModelSpec:
    """What the model class makes of a config.json; owner: how errors name the class.

    Raises CheckpointError, and PluginError for a class that cannot say.
    """
    owner = owner or f"model class {model.__qualname__}"
    hint = "where config.json lacks something, it should raise CheckpointError (engine.core.weights.read_key does)"
    with blame(owner, "spec()", hint):
        shape = model.spec(checkpoint)
    if not isinstance(shape, ModelSpec):
        raise PluginError(f"{owner} answers spec() with {shape!r}; it must be an engine.core.models.ModelSpec")
    if len(shape.sliding_windows) != shape.num_layers:
        raise PluginError(
            f"{owner} answers spec() with sliding_windows of {len(shape.sliding_windows)} layers for "
            f"{shape.num_layers}; give one number or None for each layer"
        )
    return shape


def ask(cls: Any, owner: str, refuses: Question) -> str | None:
    """The sentence with which a class refuses, or None.

    Raises PluginError, naming `owner`, where it fails or answers with something else, and what EngineError it raises.
    """
    with blame(owner, "refuses()"):
        answer = refuses(cls)
    if answer is not None and not (isinstance(answer, str) and answer):
        raise PluginError(f"{owner} answers refuses() with {answer!r}; it must be a sentence or None")
    return answer


def _float8_refusal(cls: type[AttentionBackend[Any, Any]] | AttentionPair, spec: AttentionSpec) -> str | None:
    if spec.kv_dtype != FLOAT8 or cls.reads_float8:
        return None
    return f"it reads no KV cache in {FLOAT8}; use --kv-dtype {spec.dtype} or another backend"


def _page_refusal(cls: type[AttentionBackend[Any, Any]] | AttentionPair, spec: AttentionSpec) -> str | None:
    if cls.block_sizes is None or spec.block_size in cls.block_sizes:
        return None
    sizes = " or ".join(map(str, cls.block_sizes))
    return (
        f"it reads KV blocks of {sizes} tokens, not {spec.block_size}; set cache.block_size (--block-size) to {sizes}"
    )
