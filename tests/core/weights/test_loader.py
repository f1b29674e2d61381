"""Layers filled from a source of weights: progress, ranks, errors, reading ahead, and threads."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.core.errors import CheckpointError
from engine.core.layers import LayerFactory
from engine.core.layers.linear import PlainKernel
from engine.core.quant.base import LinearSpec, QuantMethod, TensorSpec
from engine.core.weights import loader
from engine.core.weights.checkpoint import Checkpoint
from engine.core.weights.loader import load_weights
from engine.core.weights.readers import ReaderPool, ReadTask
from engine.core.weights.sources import DummySource, SafetensorsSource, WeightSource
from engine.testing.ranks import LoneRank

HIDDEN, INNER = 4, 6
SIZES = {
    "embed.weight": (8, HIDDEN),
    "norm.weight": (HIDDEN,),
    "gate.weight": (INNER, HIDDEN),
    "up.weight": (INNER, HIDDEN),
    "gate.bias": (INNER,),
    "up.bias": (INNER,),
    "down.weight": (HIDDEN, INNER),
}


def random_tensors(dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in SIZES.items()}


def write(directory: Any, tensors: Any, file: str = "model.safetensors") -> Any:
    (directory / "config.json").write_text("{}")
    save_file(tensors, directory / file)
    return directory


def write_sharded(directory: Any, tensors: Any, weight_map: Any) -> None:
    for file in set(weight_map.values()):
        write(directory, {name: tensors[name] for name in tensors if weight_map.get(name) == file}, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


class Network:
    """One of each kind of layer."""

    def __init__(
        self, layers: LayerFactory | None = None, *, dtype: str = "float32", rank: int = 0, ranks: int = 1
    ) -> None:
        self.layers = layers or LayerFactory(dtype=dtype, device="cpu", group=LoneRank(rank, ranks))
        self.embedding = self.layers.embedding("embed", 8, HIDDEN)
        self.norm = self.layers.norm("norm", HIDDEN, 1e-6)
        self.gate_up = self.layers.linear([("gate", INNER), ("up", INNER)], HIDDEN, bias=True, parallel="column")
        self.down = self.layers.linear([("down", HIDDEN)], INNER, parallel="row")

    def load(self, directory: Any, on_progress: Any = None) -> Any:
        load_weights(self.layers, SafetensorsSource(Checkpoint.open(directory)), on_progress)
        return self


def test_tensors_of_one_file_fill_the_network(tmp_path: Path) -> None:
    tensors = random_tensors()
    network = Network().load(write(tmp_path, tensors))
    torch.testing.assert_close(network.embedding.weight, tensors["embed.weight"], rtol=0, atol=0)
    x = torch.ones(2, HIDDEN)
    expected = [x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"] for name in ("gate", "up")]
    torch.testing.assert_close(network.gate_up(x), torch.cat(expected, -1))


def test_tensors_of_several_files_fill_the_network(tmp_path: Path) -> None:
    tensors = random_tensors()
    files = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    write_sharded(tmp_path, tensors, files)
    network = Network().load(tmp_path)
    torch.testing.assert_close(network.embedding.weight, tensors["embed.weight"], rtol=0, atol=0)
    torch.testing.assert_close(network.norm.weight, tensors["norm.weight"], rtol=0, atol=0)


def test_progress_counts_all_bytes(tmp_path: Path) -> None:
    seen = []
    network = Network().load(write(tmp_path, random_tensors()), lambda done, total: seen.append((done, total)))
    total = network.layers.nbytes
    assert total == 4 * sum(torch.Size(size).numel() for size in SIZES.values())
    assert len(seen) == len(network.layers.layers)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_cast_to_the_models_dtype(tmp_path: Path, stored: torch.dtype, dtype: str) -> None:
    tensors = random_tensors(stored)
    network = Network(dtype=dtype).load(write(tmp_path, tensors))
    wanted = getattr(torch, dtype)
    assert torch.equal(network.embedding.weight, tensors["embed.weight"].to(wanted))
    assert network.gate_up(torch.ones(1, HIDDEN, dtype=wanted)).dtype == wanted


def test_weights_are_copies_of_the_file(tmp_path: Path) -> None:
    network = Network().load(write(tmp_path, random_tensors()))
    before = network.embedding.weight.clone()
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as handle:
        handle.seek(-sum(torch.Size(size).numel() for size in SIZES.values()) * 4, 2)
        handle.write(b"\0" * 400)
    assert torch.equal(network.embedding.weight, before)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_together_compute_what_one_rank_computes(tmp_path: Path, ranks: int) -> None:
    write(tmp_path, random_tensors())
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2))
    whole = Network().load(tmp_path)
    shards = [Network(rank=rank, ranks=ranks).load(tmp_path) for rank in range(ranks)]
    gates, ups = zip(*(shard.gate_up(x).chunk(2, -1) for shard in shards), strict=True)
    torch.testing.assert_close(torch.cat([*gates, *ups], -1), whole.gate_up(x))
    inner = torch.randn(5, INNER, generator=torch.Generator().manual_seed(3))
    partial = [shard.down(part) for shard, part in zip(shards, inner.chunk(ranks, -1), strict=True)]
    torch.testing.assert_close(sum(partial), whole.down(inner))
    assert shards[0].layers.nbytes < whole.layers.nbytes


def test_missing_tensors_are_an_error(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors["up.bias"], tensors["norm.weight"]
    with pytest.raises(CheckpointError, match=r"lacks 2 tensor\(s\) .*norm\.weight, up\.bias.*model\.safetensors"):
        Network().load(write(tmp_path, tensors))


def test_wrong_shape_is_an_error(tmp_path: Path) -> None:
    tensors = random_tensors() | {"down.weight": torch.zeros(HIDDEN, INNER + 1)}
    with pytest.raises(CheckpointError, match=r"down\.weight in .*model\.safetensors has shape \[4, 7\].*\[4, 6\]"):
        Network().load(write(tmp_path, tensors))


def test_wrong_dtype_is_an_error(tmp_path: Path) -> None:
    tensors = random_tensors() | {"down.weight": torch.zeros(HIDDEN, INNER, dtype=torch.int8)}
    with pytest.raises(CheckpointError, match=r"down\.weight in .* is of type int8; the model expects float32 or"):
        Network().load(write(tmp_path, tensors))


class Method(QuantMethod[None]):
    """A quantization method whose kernels ask for `asked`, tensors of each part by the end of their names."""

    api = "2"

    def __init__(self, **asked: TensorSpec) -> None:
        self.asked = asked

    @classmethod
    def refuses(cls, checkpoint: Any, device: Any) -> None:
        return None

    @classmethod
    def from_checkpoint(cls, checkpoint: Any, options: None) -> Method:
        return cls()

    def linear(self, spec: LinearSpec) -> PlainKernel:
        kernel: Any = type("Kernel", (PlainKernel,), {})(spec)
        if self.asked:
            kernel.tensors = lambda: {
                f"{part.name}.{end}": tensor for part in spec.parts for end, tensor in self.asked.items()
            }
        return kernel


class Blind(Method):
    """A quantization method whose kernels ask for no tensors."""

    def linear(self, spec: LinearSpec) -> PlainKernel:
        kernel: Any = super().linear(spec)
        kernel.tensors = dict
        return kernel


class Plain(Method):
    """A quantization method that quantizes no layer."""

    def linear(self, spec: LinearSpec) -> Any:
        return None


OWNERS = {"quant": "quant 'mine' of engine-mine 0.4"}
MINE = r"quant 'mine' of engine-mine 0\.4"


def quantized_network(**asked: TensorSpec) -> Network:
    return Network(LayerFactory(dtype="float32", device="cpu", quant=Method(**asked), owners=OWNERS))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"weight": TensorSpec(shape=(3, 3), dtypes=("float32",))},
            r"gate\.weight .* has shape \[6, 4\]; {} expects \[3,",
        ),
        (
            {"weight": TensorSpec(shape=(-1, -1), dtypes=("int8",))},
            r"gate\.weight .* is of type float32; {} expects int8$",
        ),
        (
            {"wieght": TensorSpec(shape=(3,), dtypes=("int8",))},
            r"lacks 3 tensor\(s\) that {} needs: down\.wieght, gate\.w",
        ),
    ],
)
def test_tensors_that_a_quantization_method_asks_for_name_the_method(
    tmp_path: Path, asked: dict[str, TensorSpec], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message.format(r"quant 'mine' of engine-mine 0\.4")):
        quantized_network(**asked).load(write(tmp_path, random_tensors()))


def test_missing_tensors_name_the_model_and_the_quantization_method(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors["norm.weight"], tensors["up.weight"], tensors["gate.bias"]
    expected = (
        r"lacks 3 .* that quant 'mine' of engine-mine 0\.4 and the model need: gate\.bias, norm\.weight, up\.weight;"
    )
    with pytest.raises(CheckpointError, match=expected):
        quantized_network().load(write(tmp_path, tensors))


def test_unexpected_tensors_name_the_quantization_method(tmp_path: Path) -> None:
    expected = r"has 1 .* that neither the model nor quant 'mine' of engine-mine 0\.4 knows: up\.scale;"
    with pytest.raises(CheckpointError, match=expected):
        quantized_network().load(write(tmp_path, random_tensors() | {"up.scale": torch.zeros(1)}))


GPTQ = {"quant_method": "gptq", "bits": 4}


@pytest.mark.parametrize(
    ("method", "config", "message"),
    [
        (Blind, GPTQ, r"has 9 .* that neither the model nor {} knows: .*are quantized \(gptq\), and {} reads no quant"),
        (Blind, {}, r"has 3 .* that neither the model nor {} knows: .*; {} reads no tensors of the layers"),
        (Plain, GPTQ, r"lacks 3 .* that the model needs: .*are quantized \(gptq\), and {} reads no quantized tensors"),
        (Plain, {}, r"lacks 3 .* that the model needs: .* no quantization_config that says how, and {} does not"),
    ],
)
def test_method_that_reads_no_quantized_tensors_is_named(
    tmp_path: Path, method: type[Method], config: dict[str, Any], message: str
) -> None:
    tensors = random_tensors()
    if config or method is Plain:
        for part in ("gate", "up", "down"):
            del tensors[f"{part}.weight"]
            tensors |= {f"{part}.{end}": torch.zeros(1) for end in ("qweight", "qzeros", "scales")}
    write(tmp_path, tensors)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    layers = LayerFactory(dtype="float32", device="cpu", quant=method(), owners=OWNERS)
    with pytest.raises(CheckpointError, match=message.format(*[MINE] * 2) + r".*choose another method with --quant"):
        Network(layers).load(tmp_path)


def test_unexpected_tensors_of_no_layer_do_not_count_as_quantized(tmp_path: Path) -> None:
    write(tmp_path, random_tensors() | {"extra.weight": torch.zeros(1)})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    layers = LayerFactory(dtype="float32", device="cpu", quant=Plain(), owners=OWNERS)
    with pytest.raises(CheckpointError, match=r"the model does not know: extra\.weight; config\.json or the arch"):
        Network(layers).load(tmp_path)


def test_unexpected_tensors_are_an_error(tmp_path: Path) -> None:
    extra = {f"extra.{number}.weight": torch.zeros(1) for number in range(7)}
    with pytest.raises(CheckpointError, match=r"7 tensor\(s\) that the model does not know: .*extra\.4.* and 2 more"):
        Network().load(write(tmp_path, random_tensors() | extra))


def test_ignored_tensors_are_not_read(tmp_path: Path) -> None:
    network = Network()
    network.layers.ignore("*.rotary_emb.inv_freq")
    network.load(write(tmp_path, random_tensors() | {"layers.0.rotary_emb.inv_freq": torch.zeros(2)}))


@pytest.mark.parametrize("left", [3, 40, 300, -1])
def test_file_cut_short_is_an_error(tmp_path: Path, left: int) -> None:
    file = write(tmp_path, random_tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or cut short"):
        Network().load(tmp_path)


def test_nothing_is_read_before_all_is_checked(tmp_path: Path) -> None:
    tensors = random_tensors() | {"down.weight": torch.zeros(1)}
    network = Network()
    with pytest.raises(CheckpointError):
        network.load(write(tmp_path, tensors))
    assert network.layers.nbytes == 0


def test_dummy_weights_fill_a_network() -> None:
    network, seen = Network(), []
    load_weights(network.layers, DummySource(), lambda done, total: seen.append((done, total)))
    assert seen[-1] == (network.layers.nbytes, network.layers.nbytes)
    assert torch.isfinite(network.gate_up(torch.ones(1, HIDDEN))).all()


class SlowSource(WeightSource):
    """Tensors of ones, each read when its gate opens. Records the names of tensors whose reads were started."""

    def __init__(self) -> None:
        self.started = []
        self.gates = {}
        self.failing = None

    def check(self, specs: Any, ignored: Any, owners: Any = None) -> Any:
        return {name: 4 * torch.Size(spec.shape).numel() for name, spec in specs.items()}

    def allocate(self, name: Any, spec: Any, *, rank: Any, ranks: Any, device: Any) -> Any:
        self.started.append(name)
        tensor = torch.zeros(spec.shape)

        def read(memory: Any) -> None:
            gate = self.gates.get(name)
            if gate is not None:
                assert gate.wait(10)
            if name == self.failing:
                raise CheckpointError(f"tensor {name} cannot be read")
            memory[:] = torch.ones(spec.shape).numpy().tobytes()

        return tensor, [ReadTask((name, 0), tensor.view(-1).view(torch.uint8), read)]


def norms(count: Any, size: int = 4) -> Any:
    layers = LayerFactory(dtype="float32", device="cpu")
    return layers, [layers.norm(f"norm{number}", size, 1e-6) for number in range(count)]


def weight_readers() -> Any:
    return [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


def test_layer_is_filled_while_the_next_ones_are_read() -> None:
    layers, (first, second) = norms(2)
    source = SlowSource()
    source.gates["norm1.weight"] = threading.Event()

    def on_progress(done: Any, total: Any) -> None:
        if done < total:
            assert "norm1.weight" in source.started
            assert not hasattr(second, "weight")
            source.gates["norm1.weight"].set()

    load_weights(layers, source, on_progress, threads=2)
    assert torch.equal(first.weight, torch.ones(4))
    assert torch.equal(second.weight, torch.ones(4))


def test_read_ahead_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "READ_AHEAD_BYTES", 3 * 16)
    layers, _ = norms(8)
    source, ahead = SlowSource(), []
    load_weights(layers, source, lambda done, total: ahead.append(len(source.started) - done // 16), threads=2)
    assert ahead == [3, 3, 3, 3, 3, 2, 1, 0]


def test_layer_larger_than_the_read_ahead_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "READ_AHEAD_BYTES", 1)
    layers, (first, second) = norms(2)
    load_weights(layers, SlowSource(), threads=1)
    assert torch.equal(torch.cat([first.weight, second.weight]), torch.ones(8))


def test_error_in_a_thread_is_raised_and_ends_the_others() -> None:
    layers, _ = norms(5)
    source = SlowSource()
    source.failing = "norm2.weight"
    with pytest.raises(CheckpointError, match=r"norm2\.weight cannot be read"):
        load_weights(layers, source, threads=3)
    assert not weight_readers()


@pytest.mark.parametrize("error", [KeyboardInterrupt, CheckpointError])
def test_error_or_interrupt_ends_the_threads(error: type[BaseException]) -> None:
    layers, _ = norms(5)

    def on_progress(done: Any, total: Any) -> None:
        raise error

    with pytest.raises(error):
        load_weights(layers, SlowSource(), on_progress, threads=3)
    assert not weight_readers()


def test_file_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path, random_tensors()) / "model.safetensors"
    source = SafetensorsSource(Checkpoint.open(tmp_path))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"tensor .* in .*model\.safetensors cannot be read: .*shorter"):
        load_weights(Network().layers, source)


@pytest.mark.parametrize("threads", [1, 3])
def test_weights_loaded_in_inference_mode_can_be_used_in_it(tmp_path: Path, threads: int) -> None:
    write(tmp_path, random_tensors())
    network = Network()
    with torch.inference_mode():
        load_weights(network.layers, SafetensorsSource(Checkpoint.open(tmp_path)), threads=threads)
        assert torch.isfinite(network.gate_up(torch.ones(1, HIDDEN))).all()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("inference", [False, True])
def test_tensors_on_a_gpu_equal_the_file(tmp_path: Path, ranks: int, inference: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "wide": torch.randn(1024, 6144, generator=generator),  # more than one task
        "tall": torch.randn(6144, 1024, generator=generator).to(torch.bfloat16),
        "small": torch.randn((), generator=generator),
        "bytes": torch.randint(256, (4, 2**20), generator=generator, dtype=torch.uint8),
    }
    source = SafetensorsSource(Checkpoint.open(write(tmp_path, tensors)))
    with torch.inference_mode(inference), ReaderPool("cuda:0", 4) as readers:
        for name, whole in tensors.items():
            for shard_dim in range(whole.dim()) or (None,):
                for rank in range(ranks):
                    dtype = str(whole.dtype).removeprefix("torch.")
                    spec = TensorSpec(shape=tuple(whole.shape), dtypes=(dtype,), shard_dim=shard_dim)
                    read_ranks = ranks if shard_dim is not None else 1
                    tensor, tasks = source.allocate(
                        name, spec, rank=rank % read_ranks, ranks=read_ranks, device="cuda:0"
                    )
                    readers.submit(tasks).wait()
                    part = whole.chunk(ranks, shard_dim)[rank] if shard_dim is not None else whole
                    assert torch.equal(tensor.cpu(), part)


@pytest.mark.gpu
def test_memory_in_use_by_the_gpu_is_not_overwritten(tmp_path: Path) -> None:
    """Tensors are read into memory that was just freed while earlier work that uses it is still in progress."""
    size = 2**22
    tensors = {f"t{number}": torch.full((size,), float(number)) for number in range(8)}
    source = SafetensorsSource(Checkpoint.open(write(tmp_path, tensors)))
    spec = TensorSpec(shape=(size,), dtypes=("float32",))
    sums = []
    with ReaderPool("cuda:0", 4) as readers:
        for name in tensors:
            torch.cuda._sleep(20_000_000)
            tensor, tasks = source.allocate(name, spec, rank=0, ranks=1, device="cuda:0")
            readers.submit(tasks).wait()
            torch.cuda._sleep(20_000_000)
            sums.append(tensor.double().mean())
            del tensor
    assert [float(one) for one in sums] == list(range(8))


def tied_layers(rank: int = 0, ranks: int = 1) -> LayerFactory:
    layers = LayerFactory(dtype="float32", device="cpu", group=LoneRank(rank, ranks))
    layers.lm_head("head", 8, HIDDEN, tied=layers.embedding("embed", 8, HIDDEN))
    return layers


def embedding_and_head(change: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    embedding = random_tensors()["embed.weight"]
    head = embedding.clone()
    head[-1, -1] += change
    return {"embed.weight": embedding, "head.weight": head.to(dtype)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_tied_head_may_be_stored_twice(tmp_path: Path, ranks: int) -> None:
    source = SafetensorsSource(Checkpoint.open(write(tmp_path, embedding_and_head(0.0))))
    for rank in range(ranks):
        load_weights(tied_layers(rank, ranks), source)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(("change", "dtype"), [(0.5, torch.float32), (0.0, torch.bfloat16)])
def test_tied_head_that_differs_is_refused(tmp_path: Path, several: bool, change: float, dtype: torch.dtype) -> None:
    tensors = embedding_and_head(change, dtype)
    if several:
        write_sharded(tmp_path, tensors, {"embed.weight": "a.safetensors", "head.weight": "b.safetensors"})
    else:
        write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"head\.weight and embed\.weight .* differ; set tie_word_embeddings"):
        load_weights(tied_layers(), SafetensorsSource(Checkpoint.open(tmp_path)))


def test_one_file_next_to_an_index_of_others_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    write_sharded(tmp_path, tensors, dict.fromkeys(tensors, "part.safetensors"))
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"model\.safetensors, and .* of other files \(part\.safetensors\)"):
        Network().load(tmp_path)


def test_index_of_the_one_file_is_read(tmp_path: Path) -> None:
    tensors = random_tensors()
    write_sharded(tmp_path, tensors, dict.fromkeys(tensors, "model.safetensors"))
    assert torch.equal(Network().load(tmp_path).embedding.weight, tensors["embed.weight"])
