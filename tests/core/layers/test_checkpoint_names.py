"""Which tensors a checkpoint has, by present and former names."""

from __future__ import annotations

from engine.core.layers.checkpoint_names import CheckpointNames
from engine.core.quant.base import LinearPart, StoredIn, TensorSpec


def former() -> CheckpointNames:
    names = CheckpointNames({"old.q.weight", "old.q.scale", "old.k.weight"})
    names.accept_prefix("model.", "old.")
    return names


def test_checkpoint_names_find_modules_and_tensors_by_a_former_prefix() -> None:
    names = former()
    assert names.has_module("model.q")
    assert names.has_tensor("model.q.scale")
    assert not names.has_module("model.v")
    assert (names.stored("model.q"), names.present("old.q")) == ("old.q", "model.q")


def test_checkpoint_names_know_no_tensors_when_weights_are_random() -> None:
    names = CheckpointNames(None)
    assert names.has_module("model.q") is None
    assert names.has_tensor("model.q.weight") is None


def test_checkpoint_names_rename_parts_and_the_layer_that_holds_them() -> None:
    part = LinearPart(name="model.q", out_features=4, stored_in=StoredIn(name="model.qkv", start=0, size=4))
    [stored] = former().stored_parts([part])
    assert stored.stored_in is not None
    assert (stored.name, stored.stored_in.name) == ("old.q", "old.qkv")
    assert former().present_parts([stored]) == (part,)


def test_checkpoint_names_find_a_quantized_layer_only_if_all_its_required_tensors_are_there() -> None:
    names = former()
    weight, scale = (TensorSpec(shape=(1,), dtypes=("float32",), optional=optional) for optional in (False, True))
    assert names.has_quantized({"model.q.weight": weight, "model.q.scale": scale})
    assert not names.has_quantized({"model.k.weight": weight, "model.k.scale": scale})  # an unquantized layer's
    assert not names.has_quantized({"model.q.scale": scale, "model.q.zeros": weight})
