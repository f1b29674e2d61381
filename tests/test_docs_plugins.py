"""Every example of docs/plugins.md works as it stands there."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from engine.core.config.load import load_config
from engine.core.engine import Engine
from engine.core.errors import CapacityError, ConfigError, ExecutorError, PluginError
from engine.core.plugin_host.load import load_plugins
from engine.core.types import SamplingParams
from engine.testing.checkpoints import make_checkpoint

TEXT = (Path(__file__).parent.parent / "docs" / "plugins.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n# (\S+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
PYTHON = {name: source for kind, name, source in BLOCKS if kind == "python"}
TOML = [(name, source) for kind, name, source in BLOCKS if kind == "toml"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["def f(", "import os, sys", "x"]

Example = Callable[[str], ModuleType]
Run = Callable[..., list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples as files."""
    target = tmp_path_factory.mktemp("examples")
    for name, source in PYTHON.items():
        (target / name).write_text(source)
    return target


@pytest.fixture
def example(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Example:
    """Imports an example by its module name."""
    monkeypatch.syspath_prepend(str(folder))
    for name in PYTHON:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    return importlib.import_module


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", tokenizer=True)


@pytest.fixture
def mini(checkpoint: Path, tmp_path: Path) -> Path:
    """A model directory for the example of an architecture, without weights."""
    model = tmp_path / "mini"
    shutil.copytree(checkpoint, model)
    (model / "model.safetensors").unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["MiniForCausalLM"]}))
    return model


@pytest.fixture
def run(checkpoint: Path) -> Run:
    """Greedy tokens for the prompts, from an engine that knows these plugins too."""

    def generate(*plugins: ModuleType, model: Path = checkpoint, **settings: Any) -> list[tuple[int, ...]]:
        common = {"cache__memory": "4MiB", "executor__device": "cpu"}
        engine = Engine(str(model), plugins=load_plugins(extra=plugins), **{**common, **settings})
        try:
            return [completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)]
        finally:
            engine.close()

    return generate


def test_every_block_is_a_named_file() -> None:
    assert len(BLOCKS) == len(re.findall(r"^```\w+$", TEXT, re.MULTILINE))
    assert len(PYTHON) == sum(kind == "python" for kind, _, _ in BLOCKS)


def test_the_toml_examples_are_valid(tmp_path: Path) -> None:
    for name, source in TOML:
        if name == "pyproject.toml":
            assert "engine" in tomllib.loads(source)["project"]["entry-points"]
        else:
            (tmp_path / name).write_text(source)
            load_config(tmp_path / name)


def test_the_greeter_adds_a_command_and_hears_of_start_and_stop(
    example: Example, run: Run, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    greeter = example("greeter")
    app = typer.Typer()
    load_plugins(extra=[greeter]).hook.register_commands(app=app)
    assert CliRunner().invoke(app, ["you"]).output == "hello you\n"
    run(greeter)
    out = capsys.readouterr().out
    assert f"serving {checkpoint} with NativeAttention" in out
    assert f"computed {GREEDY.max_tokens * len(PROMPTS)} tokens" in out


@pytest.mark.parametrize("upcast", [False, True])
def test_attention_gives_the_tokens_of_the_built_in_backend(example: Example, run: Run, upcast: bool) -> None:
    found = run(example("loop_attention"), attention="loop", attention__options__upcast=upcast)
    assert found == run()


def test_attention_takes_its_options_from_a_file(example: Example, run: Run, tmp_path: Path) -> None:
    (tmp_path / "engine.toml").write_text(next(source for _, source in TOML if "upcast" in source))
    config = load_config(tmp_path / "engine.toml").config
    assert run(example("loop_attention"), config=config) == run()
    with pytest.raises(ConfigError, match="did you mean upcast"):
        run(example("loop_attention"), config=config, attention__options__upcst=True)


def test_quant_changes_tokens_unless_it_skips_every_layer(example: Example, run: Run) -> None:
    plugin = example("int8_rows")
    plain = run()
    assert run(plugin, quant="int8-rows") != plain
    everything = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert run(plugin, quant="int8-rows", quant__options__skip=everything) == plain


def test_routes_are_registered(example: Example) -> None:
    """tests/server/http/test_plugin_routes.py sends requests to them."""
    hooks = load_plugins(extra=[example("poem")]).hook.register_routes.get_hookimpls()
    assert "poem" in [one.plugin.__name__ for one in hooks]


def test_grammars_are_registered_after_the_built_in_ones(example: Example) -> None:
    plugins = load_plugins(extra=[example("choices")])
    assert plugins.grammars.names() == ("llguidance", "xgrammar", "choices")
    assert plugins.grammars.get("choices").load().kinds == {"choice"}


def test_scheduler_gives_the_tokens_of_the_built_in_policy(example: Example, run: Run) -> None:
    plugin = example("newest_first")
    limits = {"scheduler__max_running": 1, "scheduler__options__patience": 0.5}
    assert run(plugin, scheduler="newest-first", **limits) == run()


def test_scheduler_puts_the_newest_first_and_late_requests_before(example: Example) -> None:
    from engine.testing.schedulers import View

    plugin = example("newest_first")
    views = [View(id=str(number), arrival=float(number)) for number in range(5)]
    policy = plugin.NewestFirst(plugin.Options(patience=2.5))
    assert [view.id for view in policy.order(views, 4.0)] == ["0", "1", "4", "3", "2"]


def test_executor_gives_the_tokens_of_uniproc(example: Example, run: Run) -> None:
    assert run(example("thread_executor"), executor="thread") == run()


def test_executor_refuses_what_it_would_ignore(example: Example, run: Run) -> None:
    with pytest.raises(PluginError, match="thread runs one device; use --executor tp, or --tp 1"):
        run(example("thread_executor"), executor="thread", executor__tensor_parallel=2)


def test_executor_reports_a_failure_of_another_plugin(example: Example, checkpoint: Path) -> None:
    module = example("loop_attention")

    broken = []

    class Failing(module.LoopAttention):  # type: ignore[misc, name-defined]
        def plan(self, batch: Any, graph: Any = None) -> Any:
            if broken:
                raise KeyError("tide")
            return super().plan(batch, graph)

    engine = Engine(
        str(checkpoint),
        plugins=load_plugins(extra=[example("thread_executor")]),
        executor="thread",
        attention=Failing,
        cache__memory="4MiB",
        executor__device="cpu",
    )
    with engine:
        broken.append(True)
        with pytest.raises(ExecutorError, match=r"Failing' passed in from Python failed in plan\(\): KeyError: 'tide'"):
            engine.generate(PROMPTS, GREEDY)
        assert not engine.check().ok


def test_executor_that_cannot_start_leaves_no_thread(example: Example, run: Run) -> None:
    before = set(threading.enumerate())  # of which other tests' may end meanwhile
    with pytest.raises(CapacityError):
        run(example("thread_executor"), executor="thread", cache__memory="1KiB")
    assert set(threading.enumerate()) <= before


def test_a_model_may_have_a_layer_of_its_own(example: Example, run: Run, mini: Path) -> None:
    import torch

    from engine.core.hooks import hookimpl
    from engine.core.layers import Layer
    from engine.core.quant.base import TensorSpec

    class Bias(Layer):
        nbytes = 0

        def tensors(self) -> Any:
            return {"bias": TensorSpec(shape=(64,), dtypes=("float32",))}

        def fill(self, loaded: Any) -> None:
            self.filled = loaded["bias"]

    class Biased(example("mini_model").Mini):  # type: ignore[misc]
        def __init__(self, config: Any, layers: Any, options: Any = None) -> None:
            super().__init__(config, layers, options)
            self.bias = Bias()
            layers.layers.append(self.bias)

        def forward(self, run: Any) -> Any:
            assert self.bias.filled.shape == (64,)
            return super().forward(run) + torch.linspace(-3, 3, 64)

    class Plugin:
        @hookimpl
        def register_models(self, register: Any) -> None:
            register("biased", lambda: Biased, api="1", summary="")

    common = {"model": mini, "model__load_format": "dummy"}
    plugin = example("mini_model")
    assert run(plugin, Plugin(), **common, model__name="biased") != run(plugin, **common)


def test_model_generates_the_same_with_and_without_chunks(example: Example, run: Run, mini: Path) -> None:
    plugin = example("mini_model")
    found = run(plugin, model=mini, model__load_format="dummy")
    assert [len(tokens) for tokens in found] == [12] * len(PROMPTS)
    assert found == run(plugin, model=mini, model__load_format="dummy", scheduler__max_batch_tokens=3)


MINI = {
    "architectures": ["MiniForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}


def mini_tensors() -> dict[str, Any]:
    import torch

    size, draw = MINI["hidden_size"], torch.Generator().manual_seed(0)
    linear = {f"layers.{layer}.{part}.weight": (size, size) for layer in range(2) for part in ("q", "k", "v", "out")}
    norms = dict.fromkeys(("layers.0.norm.weight", "layers.1.norm.weight", "norm.weight"), (size,))
    tables = {f"{name}.weight": (MINI["vocab_size"], size) for name in ("embed", "lm_head")}
    shapes: dict[str, Any] = {**linear, **norms, **tables}
    return {name: torch.randn(shape, generator=draw) * 0.3 + (len(shape) == 1) for name, shape in shapes.items()}


def mini_logits(tensors: dict[str, Any], tokens: list[int]) -> Any:
    """By the definition, in float64."""
    import torch
    import torch.nn.functional as F

    heads, count = MINI["num_attention_heads"], len(tokens)
    weights = {name.removesuffix(".weight"): tensor.double() for name, tensor in tensors.items()}

    def norm(x: Any, name: Any) -> Any:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weights[name]

    def rotated(x: Any) -> Any:
        half = x.shape[-1] // 2
        angles = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
        first, second = x.split(half, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    hidden = weights["embed"][tokens]
    for layer in ("layers.0", "layers.1"):
        x = norm(hidden, f"{layer}.norm")
        q, k, v = ((x @ weights[f"{layer}.{part}"].T).view(count, heads, -1).transpose(0, 1) for part in "qkv")
        out = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        hidden = hidden + out.transpose(0, 1).flatten(1) @ weights[f"{layer}.out"].T
    return (norm(hidden, "norm") @ weights["lm_head"].T).float()


def test_model_keeps_its_contract(example: Example, tmp_path: Path) -> None:
    """By the suite, with a reference that transformers does not have."""
    from safetensors.torch import save_file

    from engine.testing.models import ModelConformance

    class Suite(ModelConformance):
        model = example("mini_model").Mini

        def checkpoint(self, directory: Path) -> Path:
            (directory / "config.json").write_text(json.dumps(MINI))
            save_file(mini_tensors(), directory / "model.safetensors", metadata={"format": "pt"})
            return directory

        def reference(self, checkpoint: Path, tokens: list[int]) -> Any:
            return mini_logits(mini_tensors(), tokens)

    for name in (name for name in dir(Suite) if name.startswith("test_")):
        for number in range(2) if name == "test_ranks" else [None]:
            directory = tmp_path / f"{name}{number}"
            directory.mkdir()
            getattr(Suite(), name)(directory, *([] if number is None else [number]))


SUMS = {
    "architectures": ["SumsForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
}


def sums_tensors() -> dict[str, Any]:
    import torch

    size, draw = SUMS["hidden_size"], torch.Generator().manual_seed(0)
    shapes: dict[str, Any] = {
        f"layers.{layer}.{part}": (size, size) for layer in (0, 1) for part in ("input", "output")
    }
    shapes |= {"norm": (size,), "embed": (SUMS["vocab_size"], size), "lm_head": (SUMS["vocab_size"], size)}
    return {
        f"{name}.weight": torch.randn(shape, generator=draw) * 0.3 + (len(shape) == 1) for name, shape in shapes.items()
    }


def sums_logits(tokens: list[int]) -> Any:
    """By the definition, token by token, in float64."""
    import torch

    weights = {name.removesuffix(".weight"): tensor.double() for name, tensor in sums_tensors().items()}
    states, logits = [torch.zeros(SUMS["hidden_size"]).double() for _ in range(2)], []
    for token in tokens:
        hidden = weights["embed"][token]
        for layer in range(2):
            states[layer] = 0.9 * states[layer] + weights[f"layers.{layer}.input"] @ hidden
            hidden = hidden + weights[f"layers.{layer}.output"] @ states[layer]
        normed = hidden * (hidden.square().mean() + 1e-6).rsqrt() * weights["norm"]
        logits.append(weights["lm_head"] @ normed)
    return torch.stack(logits).float()


def sums_suite(cls: Any) -> Any:
    from safetensors.torch import save_file

    from engine.testing.models import ModelConformance

    class Suite(ModelConformance):
        model = cls
        ranks = (2,)

        def checkpoint(self, directory: Path) -> Path:
            (directory / "config.json").write_text(json.dumps(SUMS))
            save_file(sums_tensors(), directory / "model.safetensors", metadata={"format": "pt"})
            return directory

        def reference(self, checkpoint: Path, tokens: list[int]) -> Any:
            return sums_logits(tokens)

    return Suite()


def test_a_model_with_states_keeps_its_contract(example: Example, tmp_path: Path) -> None:
    suite = sums_suite(example("sums_model").Sums)
    for name in ("logits", "prefill_chunks", "batches", "model_keeps_no_state_between_passes", "dummy_weights"):
        getattr(suite, f"test_{name}")(tmp_path)
    suite.test_ranks(tmp_path, 0)


def test_the_suite_finds_a_model_that_begins_with_the_state_of_another_sequence(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    module = example("sums_model")
    monkeypatch.setattr(module, "torch", SimpleNamespace(zeros_like=lambda state: state, stack=torch.stack))
    with pytest.raises(AssertionError, match="relative error nan in row 0"):
        sums_suite(module.Sums).test_logits(tmp_path)


def test_a_model_with_states_runs_in_an_engine(example: Example, run: Run, mini: Path) -> None:
    config = json.loads((mini / "config.json").read_text())
    (mini / "config.json").write_text(json.dumps({**config, "architectures": SUMS["architectures"]}))
    settings = {"model": mini, "model__load_format": "dummy", "cache__memory": "auto"}
    plugin = example("sums_model")
    found = run(plugin, **settings)
    assert len(set(found)) == len(PROMPTS)
    assert found == run(plugin, **settings, scheduler__max_batch_tokens=3)


def test_decoder_block_computes_the_logits_of_llama(example: Example, tmp_path: Path) -> None:
    """The composite layers, in a model made of the page's block, on one rank and on two."""
    from engine.core.layers import RotarySpec
    from engine.testing.models import ModelConformance

    mini, block = example("mini_model").Mini, example("decoder_block").DecoderBlock

    class Llama(mini):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any, layers: Any, options: Any = None) -> None:
            shape, inner = self.spec(config), config["intermediate_size"]
            self.embedding = layers.embedding("model.embed_tokens", shape.vocab_size, shape.hidden_size)
            self.rotary = layers.rotary(RotarySpec.from_config(config, shape.head_dim))
            self.blocks = [block(f"model.layers.{i}", i, shape, inner, layers) for i in range(shape.num_layers)]
            self.norm = layers.norm("model.norm", shape.hidden_size, 1e-6)
            self.head = layers.lm_head("lm_head", shape.vocab_size, shape.hidden_size)

        def forward(self, run: Any) -> Any:
            angles = self.rotary.angles(run.batch.positions)
            hidden, residual = self.embedding(run.batch.tokens), None
            for block in self.blocks:
                hidden, residual = block(run, hidden, residual, angles)
            return self.norm(hidden, residual)[0]

    class Suite(ModelConformance):
        model = Llama
        architecture = "llama"
        config = {"num_key_value_heads": 4}  # noqa: RUF012

    Suite().test_logits(tmp_path / "logits")
    Suite().test_ranks(tmp_path / "ranks", 0)


def test_the_tests_of_the_page_pass(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "test_mine.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


def test_the_tutorial_builds_a_plugin_that_passes_its_tests(tmp_path: Path) -> None:
    """Its files as they stand there, installed as pip would: a package, and its entry point.

    The folder is in a clone, whose settings of pytest need pytest-timeout, which the tutorial does not install.
    """
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--strict-config"\nunknown = 1\n')
    tmp_path /= "patient"
    text = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
    files = {
        name: source
        for _, name, source in re.findall(r"^```(\w+)\n# (\S+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    }
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(source)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    [(entry, module)] = project["entry-points"]["engine"].items()
    (info / "entry_points.txt").write_text(f"[engine]\n{entry} = {module}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "test_patient.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    listed = [sys.executable, "-c", "from engine.cli.main import main; main()", "plugins", "list"]
    done = subprocess.run(listed, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "patient" in done.stdout
    assert "engine-patient" in done.stdout
