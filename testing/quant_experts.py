"""The part of QuantConformance for experts: compares them with products in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from engine.core.errors import CheckpointError, ConfigError
from engine.core.layers import Experts, LayerFactory, silu_and_mul
from engine.core.quant import ExpertsBias, QuantMethod, Routing
from engine.core.weights import Checkpoint, SafetensorsSource, load_weights
from engine.testing.ranks import LoneRank
from engine.testing.stored_layers import whole_names

NAME = "mlp.experts"
NUM_EXPERTS, TOP_K = 4, 2
ROUTING = ((0, 2), (2, 0), (2, 3), (3, 2), (0, 2))
"""Experts of each token. Expert 1 gets no tokens, expert 2 all."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class ExpertsConformance:
    """Tests of `QuantMethod.experts`, skipped for a method that does not override it."""

    expert_size: ClassVar[int] = 64
    """Intermediate size of the experts; `inputs` is their hidden size."""

    if TYPE_CHECKING:
        method: ClassVar[type[QuantMethod[Any]]]
        device: ClassVar[str]
        dtype: ClassVar[str]
        inputs: ClassVar[int]
        ranks: ClassVar[tuple[int, ...]]
        store: Callable[[str, torch.Tensor], tuple[Mapping[str, torch.Tensor], torch.Tensor]]
        make: Callable[[], QuantMethod[Any]]
        x: Callable[..., torch.Tensor]
        _close: Callable[..., None]

    def test_experts(self, tmp_path: Path) -> None:
        """The weighted sum of each token's experts, for one token and several, with biases and without."""
        meant = self.store_experts(tmp_path)
        layer = self.load_experts(tmp_path)
        for rows in (len(ROUTING), 1):
            x, routing = self.x(rows), self.routing(rows)
            for bias in (None, self.bias_of(layer)):
                with torch.inference_mode():
                    y = layer.kernel.apply(x, routing, layer.weights, bias)
                assert y.dtype == x.dtype, f"x is of {x.dtype}, the result of {y.dtype}"
                self._close_all(y, self.sum_of_experts(x, routing, meant, bias), f"{rows} rows")

    def test_experts_on_ranks(self, tmp_path: Path) -> None:
        """The partial sums of all ranks add up to the result of one rank, sharded by tensor and by expert."""
        meant = self.store_experts(tmp_path)
        x, routing, checked = self.x(len(ROUTING)), self.routing(len(ROUTING)), 0
        expected = self.sum_of_experts(x, routing, meant, None)
        self.load_experts(tmp_path)
        for ranks in self.ranks:
            for by_expert in (False, True):
                total = torch.zeros(x.shape, dtype=torch.float64)
                try:
                    for rank in range(ranks):
                        layer = self.load_experts(tmp_path, LoneRank(rank, ranks), expert_parallel=by_expert)
                        local = self.local(routing, layer)
                        with torch.inference_mode():
                            total += layer(x, local).addend.double().cpu()
                except CheckpointError:
                    continue  # the method refuses to shard experts in this way
                checked += 1
                what = f"the sum over {ranks} ranks, by {'expert' if by_expert else 'tensor'}"
                self._close_all(total.to(x.dtype), expected, what, 1.5)
        assert checked, f"the method refuses to shard experts over any of {self.ranks} ranks"

    def test_captured_experts(self, tmp_path: Path) -> None:
        """A replayed CUDA graph computes from the current contents of x and of the routing."""
        if torch.device(self.device).type != "cuda":
            pytest.skip("graphs are captured on a GPU")
        meant = self.store_experts(tmp_path)
        layer = self.load_experts(tmp_path)
        for rows in (1, len(ROUTING)):
            x, routing = self.x(rows), self.routing(rows)
            with torch.inference_mode():
                layer(x, routing)  # compiles
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = layer(x, routing).addend
                for seed in (1, 2):
                    x.copy_(self.x(rows, seed))
                    routing.experts.copy_((routing.experts + 1) % NUM_EXPERTS)
                    routing.weights.mul_(1.5)
                    graph.replay()
                    self._close_all(y, self.sum_of_experts(x, routing, meant, None), f"a replay of {rows} rows")

    def store_experts(self, directory: Path) -> Mapping[str, torch.Tensor]:
        """Write a checkpoint of experts by `store`. Returns the weights that it represents, by name, in float64."""
        if self.method.experts is QuantMethod.experts:
            pytest.skip("the method leaves experts unquantized")
        draw = torch.Generator().manual_seed(5)
        tensors: dict[str, torch.Tensor] = {}
        meant: dict[str, torch.Tensor] = {}
        for expert in range(NUM_EXPERTS):
            for projection in PROJECTIONS:
                shape = (self.expert_size, self.inputs)
                shape = shape[::-1] if projection == PROJECTIONS[2] else shape
                name = f"{NAME}.{expert}.{projection}"
                stored, weight = self.store(name, torch.randn(shape, generator=draw) * shape[1] ** -0.5)
                tensors |= {whole: tensor.contiguous() for whole, tensor in whole_names(name, stored).items()}
                meant[f"{expert}.{projection}"] = weight.double()
        (directory / "config.json").write_text("{}")
        save_file(tensors, directory / "model.safetensors")
        return meant

    def load_experts(self, directory: Path, group: LoneRank | None = None, *, expert_parallel: bool = False) -> Experts:
        """Load the stored experts, as a model does. Skips the test where the method refuses them on one rank."""
        source = SafetensorsSource(Checkpoint.open(directory))
        layers = LayerFactory(
            dtype=self.dtype,
            device=self.device,
            quant=self.make(),
            group=group,
            stored=source.names,
            expert_parallel=expert_parallel,
        )
        try:
            layer = layers.experts(NAME, self.inputs, self.expert_size, NUM_EXPERTS, TOP_K)
        except (CheckpointError, ConfigError) as error:
            if layers.ranks == 1:
                pytest.skip(f"the method refuses these experts on {self.device}: {error}")
            raise
        with torch.inference_mode():
            load_weights(layers, source)
        return layer

    def routing(self, rows: int) -> Routing:
        """The routing of the first rows."""
        experts = torch.tensor(ROUTING[:rows], dtype=torch.int32, device=self.device)
        draw = torch.Generator().manual_seed(6)
        return Routing(experts, (torch.rand(rows, TOP_K, generator=draw) + 0.5).to(self.device))

    def local(self, routing: Routing, layer: Experts) -> Routing:
        """The routing with the rank's own numbers of experts; -1 for experts of other ranks."""
        mine = layer.spec.rank_experts
        experts = routing.experts - mine.start
        return Routing(experts.masked_fill((experts < 0) | (experts >= len(mine)), -1), routing.weights)

    def bias_of(self, layer: Experts) -> ExpertsBias:
        """Random biases."""
        spec, draw = layer.spec, torch.Generator().manual_seed(7)
        shapes = (2 * spec.intermediate_size, spec.hidden_size)
        found = [torch.randn(spec.num_experts, size, generator=draw) for size in shapes]
        return ExpertsBias(*(one.to(self.device, getattr(torch, self.dtype)) for one in found))

    def sum_of_experts(
        self, x: torch.Tensor, routing: Routing, meant: Mapping[str, torch.Tensor], bias: ExpertsBias | None
    ) -> torch.Tensor:
        """The exact result: [tokens, hidden] float64, on the CPU."""
        rows = []
        for token, experts, weights in zip(x.double().cpu(), routing.experts.tolist(), routing.weights, strict=True):
            total = torch.zeros_like(token)
            for expert, weight in zip(experts, weights.tolist(), strict=True):
                gate, up, down = (meant[f"{expert}.{projection}"] for projection in PROJECTIONS)
                hidden = torch.cat((gate @ token, up @ token))
                hidden = hidden if bias is None else hidden + bias.gate_up[expert].double().cpu()
                result = down @ silu_and_mul(hidden)
                total += weight * (result if bias is None else result + bias.down[expert].double().cpu())
            rows.append(total)
        return torch.stack(rows)

    def _close_all(self, found: torch.Tensor, expected: torch.Tensor, what: str, fraction: float = 1.0) -> None:
        """Compare all rows together: products of inexact numbers are small in some rows."""
        assert found.shape == expected.shape, f"experts, {what}: shape {list(found.shape)}, not {list(expected.shape)}"
        self._close(found.reshape(1, -1), expected.reshape(1, -1), f"experts, {what}", 4.0 * fraction)
