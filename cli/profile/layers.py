"""`engine profile layers`: the time, bytes and FLOPs of every layer, in steps of a server or of an offline load."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import attrs
import typer

from engine.cli.bench.load import Load, abandon, check_batch, opened, say
from engine.cli.bench.report import Json, engine_settings, header, write
from engine.cli.options import OFFLINE, configured, refuse_settings
from engine.cli.output_file import output_file
from engine.cli.profile.layer_report import Profiled, as_json, print_layers, write_csv
from engine.cli.profile.target import AdminKey
from engine.cli.profile.trace import admin_key, post
from engine.core.config import Resolved
from engine.core.errors import ConfigError, ControlError

if TYPE_CHECKING:
    from engine.core.engine import Engine
    from engine.core.profiling import Peaks, RankLayers

SETTLE = 4
"""Steps before the timed ones."""
SKIP = 2
"""Steps under the profiler before those that count."""
SLACK = 8
"""Spare steps, so that no sequence finishes."""
MAX_ITERATIONS = 16
"""Tokens per step for which each sequence has room, context permitting: schedulers may run several iterations per
step."""


@configured(without=OFFLINE)
def layers(
    *,
    url: Annotated[
        str, typer.Option(help="A running server under load; without it, an offline load is profiled.")
    ] = "",
    admin_api_key: AdminKey = "",
    replica: Annotated[int, typer.Option(help="With --url: the replica to profile.", min=0)] = 0,
    seconds: Annotated[float, typer.Option(help="With --url: seconds to wait for the steps.", min=0.1)] = 10.0,
    batch: Annotated[int, typer.Option(help="Without --url: sequences that decode.", min=1)] = 64,
    context: Annotated[int, typer.Option(help="Without --url: prompt tokens of each sequence.", min=1)] = 512,
    steps: Annotated[int, typer.Option(help="Steps to profile.", min=1)] = 20,
    prefill: Annotated[
        int, typer.Option(help="Without --url: profile steps of prompts of this many tokens, too; 0: none.", min=0)
    ] = 0,
    by: Annotated[
        str,
        typer.Option(
            help="module: a line per module; kind: one for the same module of all layers; auto: kind from 9 layers on.",
            metavar="auto|module|kind",
        ),
    ] = "auto",
    depth: Annotated[
        int, typer.Option(help="Parts of modules' names that count, as 3 in model.layers.0; 0: all.", min=0)
    ] = 0,
    table: Annotated[
        Path | None,
        typer.Option("--csv", help="File to write the table to, as CSV.", metavar="FILE", callback=output_file),
    ] = None,
    output: Json = None,
    resolved: Resolved,
) -> None:
    """Time, bytes and FLOPs of every layer in the steps of a server or of a load, next to the limits of the device."""
    if by not in ("auto", "module", "kind"):
        raise ConfigError(f"--by {by!r} is none of auto, module and kind")
    from engine.core.profiling import find_peaks, make_layer_table

    if url:
        refuse_settings(resolved)
        found_there, peaks = profile_server(url, admin_key(admin_api_key), replica, steps, seconds)
        profiled, machine = [found_there], f"the server at {url}"
        settings: dict[str, object] = {"steps": steps, "replica": replica}
    else:
        with opened(resolved.config) as engine:
            peaks = find_peaks(engine.config.roofline, engine.device, engine.cache_info.dtype)
            if prefill:
                check_prefill(engine, prefill)
            profiled = [profile_decode(engine, batch, context, steps)]
            if prefill:
                profiled.append(profile_prefill(engine, prefill, steps))
        settings = engine_settings(engine) | {"batch": batch, "context": context, "steps": steps, "prefill": prefill}
        settings["tensor_parallel"] = engine.config.executor.tensor_parallel
        machine = engine.cache_info.device
    chosen: Literal["module", "kind"] | None = {"module": "module", "kind": "kind"}.get(by)  # type: ignore[assignment]
    tables = [make_layer_table(one.ranks, peaks, by=chosen, depth=depth or None) for one in profiled]
    for one, made in zip(profiled, tables, strict=True):
        print_layers(one, made, peaks)
    if table is not None:
        write_csv(table, profiled, tables)
    if output is not None:
        settings["peaks"] = None if peaks is None else attrs.asdict(peaks)
        found = [as_json(one, made) for one, made in zip(profiled, tables, strict=True)]
        write(output, header("profile layers", machine, settings) | {"tables": found})


def profile_server(url: str, key: str, replica: int, steps: int, seconds: float) -> tuple[Profiled, Peaks | None]:
    """Profile steps of a running server; return the peaks of its device too. Raises what `post` raises."""
    import msgspec

    from engine.core.profiling import Peaks, RankLayers

    asked = {"replica": replica}
    began = post(url, key, "/start_layer_profile", asked | {"steps": steps})
    say(f"waiting for {steps} steps for {seconds:g} s")
    time.sleep(seconds)
    ended = post(url, key, "/stop_layer_profile", asked)
    ranks = tuple(msgspec.convert(ended["ranks"], list[RankLayers]))
    measured = ended["steps"] - began["steps"]
    found = Profiled(
        title=f"the server at {url}, {_kinds(ranks[0])}",
        ranks=ranks,
        step_us=(ended["seconds"] - began["seconds"]) / measured * 1e6 if measured else None,
        profiled_us=None,
    )
    peaks = ended["peaks"]
    return found, None if peaks is None else Peaks(**peaks)


def _kinds(rank: RankLayers) -> str:
    """The range of the steps' sizes, as text."""
    decodes, tokens = rank.decodes, rank.prefill_tokens
    return f"{decodes[0]} to {decodes[-1]} decodes and {tokens[0]} to {tokens[-1]} prefill tokens per step"


def profile_decode(engine: Engine, batch: int, context: int, steps: int) -> Profiled:
    """Profile decode steps of `batch` sequences. Raises ConfigError if they cannot all decode at the same time."""
    check_batch(engine, batch)
    budget = engine.config.scheduler.max_batch_tokens
    chunks = -(-batch * context // max(budget - batch, 1))  # steps in which the first sequences already decode
    outputs = chunks + SETTLE + 2 * steps + SKIP + 2 * SLACK
    if context + outputs > engine.max_len:
        raise ConfigError(
            f"--context {context} and {outputs} tokens that are decoded make more than the {engine.max_len} that a"
            " context can have; give a shorter --context or fewer --steps"
        )
    most = min(engine.max_len - context, MAX_ITERATIONS * outputs)
    load = Load(name="", lengths=((context, most),) * batch)
    made = dict.fromkeys((f"layers-{number}" for number in range(batch)), 0)
    for request in load.requests(engine.vocab_size, "layers-"):
        engine.add(request)
    while min(made.values()) < SETTLE:
        for one in engine.step():
            made[one.request] += len(one.tokens)
            if one.finish_reason is not None:
                raise ConfigError(_not_all(batch))
    found = _profiled(engine, f"decode, {batch} sequences of {context} tokens on", steps)
    abandon(engine, made)
    if any((rank.decodes, rank.prefill_tokens) != ((batch,), (0,)) for rank in found.ranks):
        raise ConfigError(_not_all(batch))
    return found


def _not_all(batch: int) -> str:
    return (
        f"not all of the {batch} sequences decoded in every step: the KV cache has no room for all at the same time;"
        " give a smaller --batch or --context, or a larger cache (--kv-memory)"
    )


def check_prefill(engine: Engine, length: int) -> None:
    """Raise ConfigError if a prompt of `length` tokens and the token after it do not fit into the context."""
    if length + 1 > engine.max_len:
        raise ConfigError(
            f"--prefill {length} and a token after it make more than the {engine.max_len} that a context can have;"
            " give a smaller one"
        )


def profile_prefill(engine: Engine, length: int, steps: int) -> Profiled:
    """Profile steps that compute prompts of `length` tokens, as many as fit into a step."""
    budget, limit = engine.config.scheduler.max_batch_tokens, engine.config.scheduler.max_running
    each = max(1, min(-(-budget // length), limit))
    count = -(-(SETTLE + 2 * steps + SKIP + SLACK) * min(budget, each * length) // length) + each
    load = Load(name="", lengths=((length, 1),) * count)
    for request in load.requests(engine.vocab_size, "layers-prefill-"):
        engine.add(request)
    for _ in range(SETTLE):
        engine.step()
    found = _profiled(engine, f"prefill, prompts of {length} tokens", steps)
    abandon(engine, (f"layers-prefill-{number}" for number in range(count)))
    if any(count for rank in found.ranks for count in rank.decodes):
        raise ConfigError("the scheduler decodes in steps that compute prompts; the steps are not of one kind")
    return found


def _profiled(engine: Engine, title: str, steps: int) -> Profiled:
    """Time `steps` steps without the profiler, then profile as many."""
    from engine.core.profiling import stop_layers

    def timed(count: int) -> float:
        """us per step, from result to result."""
        _step(engine)
        begin = time.perf_counter()
        for _ in range(count):
            _step(engine)
        return (time.perf_counter() - begin) / count * 1e6

    plain = timed(steps)
    try:
        engine.call("start_layers", {"skip": SKIP})
        for _ in range(SKIP):
            _step(engine)
        under = timed(steps)
        ranks = stop_layers(engine.call)
    except ControlError:
        engine.call("stop_layers", {"discard": True})
        raise
    say(f"profiled {title}")
    return Profiled(title=title, ranks=tuple(ranks), step_us=plain, profiled_us=under)


def _step(engine: Engine) -> None:
    """Run a step. Raises ConfigError if there is nothing left to compute."""
    if not engine.has_work:
        raise ConfigError(
            "the load ended before all steps were profiled, as each made more tokens than expected; give fewer --steps"
        )
    engine.step()
