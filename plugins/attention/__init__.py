"""Built-in attention backends."""

from engine.core.hooks import Register, hookimpl, lazy


@hookimpl
def register_attention(register: Register) -> None:
    """Register the built-in attention backends."""
    register(
        "flashinfer",
        lazy("engine.plugins.attention.flashinfer:FlashInferAttention"),
        api="2",
        summary="FlashInfer's kernels, compiled at start-up: FlashAttention 2 and 3 for prefill, XQA for decode",
        preference=30,
    )
    register(
        "triton",
        lazy("engine.plugins.attention.triton:TritonAttention"),
        api="2",
        summary="Triton kernels that read the paged cache in place, for GPUs; decode in CUDA graphs",
        preference=40,
    )
    register(
        "native",
        lazy("engine.plugins.attention.native:NativeAttention"),
        api="2",
        summary="C kernel that reads the paged cache in place, for decode in float32 on a CPU",
        preference=20,
    )
    register(
        "torch",
        lazy("engine.plugins.attention.torch:TorchAttention"),
        api="2",
        summary="PyTorch operations only; runs anywhere, the reference for the others",
        preference=10,
    )
