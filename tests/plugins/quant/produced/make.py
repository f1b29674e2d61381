"""Makes the checkpoints in this folder with the programs that publish such files, and what they should compute.

    python make.py modelopt    # nvidia-modelopt 0.47.0
    python make.py auto-round  # auto-round 0.16.1

Each folder gets the program's own files and expected.safetensors: log probabilities of PROMPT's tokens by the program's
own model, in float32 and with activations as they are. Run by hand, where the programs are installed; the tests only
read the folders.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
PROMPT = [(7 * i + i * i) % 60 for i in range(24)]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
}


def make_model() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    config.architectures = ["LlamaForCausalLM"]
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def logprobs(model: Any) -> torch.Tensor:
    """Of PROMPT's tokens but the first, by the program's own model."""
    with torch.no_grad():
        scores = model(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    return scores[range(len(PROMPT) - 1), PROMPT[1:]]


def keep(source: Path, name: str, expected: torch.Tensor) -> None:
    """Copy what the program has written, without what no test reads."""
    target = HERE / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in source.iterdir():
        if file.name in ("config.json", "hf_quant_config.json") or file.suffix == ".safetensors":
            shutil.copy(file, target / file.name)
    save_file({"logprobs": expected}, target / "expected.safetensors")
    print(name, {name: (list(one.shape), one.dtype) for name, one in load_file(target / "model.safetensors").items()})
    print(json.dumps(json.loads((target / "config.json").read_text()).get("quantization_config"), indent=1))


def modelopt() -> None:
    import copy

    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers

    int4 = copy.deepcopy(mtq.INT4_AWQ_CFG)
    for entry in int4["quant_cfg"]:
        if "block_sizes" in (entry.get("cfg") or {}):
            entry["cfg"]["block_sizes"][-1] = 32  # inputs per group, of 64
    configs = {
        "modelopt-fp8": {**mtq.FP8_DEFAULT_CFG},
        "modelopt-fp8-channel": {**mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG},
        "modelopt-int4-awq": int4,
    }
    for name, config in configs.items():
        model = make_model()

        def forward(model: Any) -> None:
            torch.manual_seed(1)
            scale = torch.linspace(0.2, 3.0, 64)
            with torch.no_grad():
                model.model.embed_tokens.weight *= scale  # activations whose sizes differ, which AWQ balances
                model(torch.randint(0, 64, (4, 32)))
                model.model.embed_tokens.weight /= scale

        model = mtq.quantize(model, config, forward_loop=forward)
        requantize_resmooth_fused_llm_layers(model)  # as the export does first
        mtq.disable_quantizer(model, "*input_quantizer")
        expected = logprobs(model)
        if "fp8" in name:
            mtq.enable_quantizer(model, "*input_quantizer")
            mtq.disable_quantizer(model, "*lm_head*")
        with tempfile.TemporaryDirectory() as directory:
            export_hf_checkpoint(model, dtype=torch.float32, export_dir=directory)
            keep(Path(directory), name, expected)


def auto_round() -> None:
    import transformers
    from auto_round import AutoRound

    from engine.testing.checkpoints import make_checkpoint

    with tempfile.TemporaryDirectory() as directory:
        make_checkpoint(directory + "/model", "llama", tokenizer=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory + "/model")
    layers = {
        "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32},
        "self_attn.o_proj": {"bits": 16},
        "lm_head": {"bits": 8, "group_size": 32, "sym": True},
    }
    for name, packing, settings in (
        ("auto-round-gptq", "auto_round", {"sym": True, "layer_config": layers}),
        ("auto-round", "auto_round", {"sym": False, "layer_config": dict(list(layers.items())[:1])}),
        ("auto-round-awq", "auto_round", {"sym": False}),
    ):
        made = AutoRound(
            make_model(),
            tokenizer,
            bits=4,
            group_size=32,
            iters=0,
            device_map="cpu",
            disable_opt_rtn=True,
            low_cpu_mem_usage=False,
            **settings,
        )
        with tempfile.TemporaryDirectory() as directory:
            model = made.quantize_and_save(directory, format=packing)
            model = model[0] if isinstance(model, tuple) else model
            model = (model.half() if name.endswith("awq") else model).float()  # as the weights are stored
            for module in model.modules():  # AWQ's module computes in float16
                if "WQLinear" in type(module).__name__:
                    module.forward = partial(multiply_awq, module)
            folder = next(Path(directory).rglob("config.json")).parent
            keep(folder, name, logprobs(model))


def multiply_awq(module: Any, x: torch.Tensor) -> torch.Tensor:
    from auto_round.export.export_to_awq.utils import dequantize_gemm

    return x @ dequantize_gemm(module.qweight, module.qzeros, module.scales, module.w_bit, module.group_size).float()


if __name__ == "__main__":
    {"modelopt": modelopt, "auto-round": auto_round}[sys.argv[1]]()
