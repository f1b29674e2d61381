"""Built-in speculators."""

from engine.core.hooks import Register, hookimpl, lazy


@hookimpl
def register_speculators(register: Register) -> None:
    """Register the built-in speculators."""
    register(
        "ngram",
        lazy("engine.plugins.speculators.ngram:Ngram"),
        api="1",
        summary="what followed the last tokens at an earlier occurrence, in the prompt or the output",
        preference=10,
    )
    register(
        "suffix",
        lazy("engine.plugins.speculators.suffix:Suffix"),
        api="1",
        summary="as ngram, and what most often followed the last tokens in the tenant's recent outputs",
    )
    register(
        "draft_model",
        lazy("engine.plugins.speculators.draft_model:DraftModel"),
        api="2",
        summary="what a smaller model of the same vocabulary generates, on the device",
        preference=20,
    )
    register(
        "eagle",
        lazy("engine.plugins.speculators.eagle:Eagle"),
        api="2",
        summary="EAGLE-1 or EAGLE-2 heads on the last hidden states of the model, on the device",
        preference=15,  # below draft_model: config.json of many such heads looks like a model's
    )
    register(
        "eagle3",
        lazy("engine.plugins.speculators.eagle3:Eagle3"),
        api="2",
        summary="EAGLE-3 heads on hidden states of the model, on the device",
        preference=30,
    )
    register(
        "mtp",
        lazy("engine.plugins.speculators.mtp:MTP"),
        api="2",
        summary="multi-token prediction (MTP) heads among the model's own weights, on the device",
        preference=25,
    )
