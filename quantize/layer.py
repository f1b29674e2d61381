"""Quantizes one decoder layer by any method: measures its inputs, quantizes, runs the text through the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from attrs import frozen
from torch import nn

from engine.core.quant import KVScales
from engine.quantize.awq import relative_error, search_scales
from engine.quantize.calibration_model import CalibrationModel, Inputs
from engine.quantize.clipping import clip
from engine.quantize.folding import check_exact, find_folds
from engine.quantize.formats import EightBit, Packed, Plain, Tensors
from engine.quantize.gptq import gptq
from engine.quantize.grid import round_to_nearest
from engine.quantize.kv_cache import KVPeaks
from engine.quantize.report import LinearReport
from engine.quantize.settings import STATIC, Settings
from engine.quantize.source import DecoderLayer


@frozen(kw_only=True)
class _Result:
    """A linear layer, quantized."""

    tensors: Tensors
    weight: torch.Tensor
    """The dequantized weight, float32 on the device."""
    report: LinearReport


class LayerQuantizer:
    """Quantizes decoder layers in order."""

    def __init__(
        self,
        settings: Settings,
        form: EightBit | Packed | Plain,
        decoder: CalibrationModel | None,
        device: torch.device,
        head_dim: int,
    ) -> None:
        """decoder: runs calibration text; None: there is no text."""
        self._settings = settings
        self._form = form
        self._decoder = decoder
        self._device = device
        self._head_dim = head_dim
        self._folds_checked = False

    @torch.no_grad()
    def quantize(
        self, layer: DecoderLayer, stored: Mapping[str, torch.Tensor], hidden: list[torch.Tensor]
    ) -> tuple[Tensors, list[LinearReport], KVScales | None]:
        """Quantize a layer. Returns the tensors to write, the errors of its linear layers, and KV scales if requested.

        stored: the layer's tensors by their names within it. hidden: the layer's inputs, replaced by the outputs of the
        quantized layer. KV scales are those of the quantized layer, whose keys and values will be cached.
        """
        tensors = dict(stored)
        reports = []
        cache = KVPeaks() if layer.kv_scales else None
        results = self._with_text(layer, tensors, hidden, cache) if self._decoder else self._without(layer, tensors)
        for name, result in results:
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{end}": tensor.cpu() for end, tensor in result.tensors.items()}
            reports.append(result.report)
        if cache is None:
            return tensors, reports, None
        scales = cache.scales(layer.prefix)
        numbers = (torch.tensor([scale]) for scale in (scales.key, scales.value))
        return tensors | dict(zip(layer.kv_scales, numbers, strict=True)), reports, scales

    @torch.no_grad()
    def skip(self, layer: DecoderLayer, written: Mapping[str, torch.Tensor], hidden: list[torch.Tensor]) -> None:
        """Run the text through a layer that an earlier run has written. Tensors are by full name."""
        if self._decoder is None:
            return
        tensors = {name.removeprefix(f"{layer.prefix}."): tensor for name, tensor in written.items()}
        for name in layer.kv_scales:
            del tensors[name]
        for name, inputs in self._shapes(layer):
            own = {
                end.removeprefix(f"{name}."): tensors.pop(end) for end in list(tensors) if end.startswith(f"{name}.")
            }
            bias = own.pop("bias", None)
            tensors[f"{name}.weight"] = self._decode(own, inputs)
            if bias is not None:
                tensors[f"{name}.bias"] = bias
        self._decoder.load(layer, tensors)
        self._decoder.advance(layer, hidden)
        self._decoder.drop(layer)

    def _shapes(self, layer: DecoderLayer) -> Iterator[tuple[str, tuple[int, int]]]:
        """Names of the linear layers that are quantized, with their outputs and inputs."""
        assert self._decoder is not None
        for names in layer.merged:
            for name in names:
                linear = self._decoder.module(layer).get_submodule(name)
                assert isinstance(linear, nn.Linear)
                yield name, (linear.out_features, linear.in_features)

    def _decode(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        if isinstance(self._form, EightBit):
            return self._form.decode(tensors)
        assert isinstance(self._form, Packed)
        return self._form.decode(tensors, *shape)

    def _without(self, layer: DecoderLayer, tensors: Tensors) -> Iterator[tuple[str, _Result]]:
        for names in layer.merged:
            for name in names:
                weight = tensors[f"{name}.weight"].to(self._device, torch.float32)
                yield name, self._choose(layer, name, weight, None)

    def _with_text(
        self, layer: DecoderLayer, tensors: Tensors, hidden: list[torch.Tensor], cache: KVPeaks | None
    ) -> Iterator[tuple[str, _Result]]:
        """Yield the results in order. Changed biases and norms are replaced in `tensors`. cache: records the keys and
        values of the whole text that the quantized layer computes."""
        assert self._decoder is not None
        module = self._decoder.load(layer, tensors)
        every = [name for names in layer.merged for name in names]
        if self._settings.method == "gptq":
            # Each group of linear layers sees the outputs of the quantized ones before it.
            for names in layer.merged:
                watched = self._decoder.watch(layer, names[:1], hidden)[names[0]]
                yield from self._replace(layer, module, names, dict.fromkeys(names, watched))
        elif layer.merged:
            first = self._decoder.watch(layer, [names[0] for names in layer.merged], hidden)
            inputs = {name: first[names[0]] for names in layer.merged for name in names}
            if self._settings.method == "awq":
                self._scale(layer, module, inputs, hidden)
                dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
                changed = {f"{name}.weight" for name in every}
                for name, tensor in module.state_dict().items():
                    if name not in changed:
                        tensors[name] = tensor.to("cpu", dtypes[name], copy=True)
            yield from self._replace(layer, module, every, inputs)
        self._decoder.advance(layer, hidden, cache)
        self._decoder.drop(layer)

    def _replace(
        self, layer: DecoderLayer, module: nn.Module, names: Sequence[str], inputs: Mapping[str, Inputs]
    ) -> Iterator[tuple[str, _Result]]:
        for name in names:
            weight = module.get_parameter(f"{name}.weight").data
            result = self._choose(layer, name, weight, inputs[name])
            weight.copy_(result.weight)
            yield name, result

    def _scale(
        self, layer: DecoderLayer, module: nn.Module, inputs: Mapping[str, Inputs], hidden: Sequence[torch.Tensor]
    ) -> None:
        """Fold AWQ's scales into the layer, and into the statistics of its inputs."""
        assert self._decoder is not None
        assert isinstance(self._form, Packed)
        decoder = self._decoder
        folds = find_folds(module, layer.merged, self._head_dim)
        if not self._folds_checked:
            check_exact(module, folds, lambda one: decoder.run(layer, hidden[0], one), self._form.dtype)
            self._folds_checked = True
        for fold in folds:
            seen = inputs[fold.linears[0]]
            assert seen.hessian is not None
            weights = [module.get_parameter(f"{name}.weight").data for name in fold.linears]
            scales = search_scales(
                weights, seen.hessian, seen.magnitudes, self._form.grid, self._settings.group_size, fold.shared
            )
            scales = fold.apply(module, scales, self._form.dtype)
            seen.hessian /= scales[:, None] * scales

    def _choose(self, layer: DecoderLayer, name: str, weight: torch.Tensor, inputs: Inputs | None) -> _Result:
        """Quantize one weight: [outputs, inputs] float32."""
        settings, form = self._settings, self._form
        assert not isinstance(form, Plain)
        hessian = None if inputs is None else inputs.hessian
        if isinstance(form, EightBit):
            peak = inputs.peak if inputs is not None and settings.activations == STATIC else None
            tensors = form.encode(weight, peak)
        elif hessian is not None and settings.method == "gptq":
            order = settings.act_order
            chosen = gptq(weight, hessian, form.grid, settings.group_size, act_order=order, damp=settings.damp)
            tensors = form.encode(chosen)
        else:
            bounds = None
            if hessian is not None and settings.method == "awq":
                bounds = clip(weight, hessian, form.grid, settings.group_size)
            tensors = form.encode(round_to_nearest(weight, form.grid, settings.group_size, bounds))
        meant = self._decode(tensors, (weight.shape[0], weight.shape[1])).to(self._device)
        change = meant - weight
        report = LinearReport(
            name=f"{layer.prefix}.{name}",
            weight_error=float(change.norm() / weight.norm().clamp_min(1e-30)),
            output_error=None if hessian is None else relative_error(change, weight, hessian),
        )
        return _Result(tensors=tensors, weight=meant, report=report)
