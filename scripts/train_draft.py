"""Train EAGLE-3 heads for a model: one decoder layer that predicts the model's next tokens from its hidden states.

    python scripts/train_draft.py --target demo/engine-demo --out build/heads
    python scripts/train_draft.py --smoke --out DIR   # the whole path in a few tiny steps, on the CPU
    engine serve demo/engine-demo --speculator eagle3 --speculator-model build/heads

The data are the source files of the interpreter that runs this, as for the demo checkpoint. The heads learn the model's
own distribution of the next token, and go on from their own output for a few tokens, as when they propose
(training-time test, arXiv:2503.01840).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from demo_model.settings import REPOSITORY
from demo_model.sources import held_out_text, training_sources
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

DISCOUNT = 0.8
"""Weight of each further token of a proposal in the loss, relative to the one before."""


class Heads(nn.Module):
    """The layer and what is around it, with parameters by the names of the authors' checkpoints."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, middle, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        self.heads, self.kv_heads, self.dim = config["num_attention_heads"], config["num_key_value_heads"], dim
        self.eps, self.theta = config["rms_norm_eps"], config["rope_theta"]
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": nn.Linear(2 * size, self.heads * dim, bias=False),
                        "k_proj": nn.Linear(2 * size, self.kv_heads * dim, bias=False),
                        "v_proj": nn.Linear(2 * size, self.kv_heads * dim, bias=False),
                        "o_proj": nn.Linear(self.heads * dim, size, bias=False),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": nn.Linear(size, middle, bias=False),
                        "up_proj": nn.Linear(size, middle, bias=False),
                        "down_proj": nn.Linear(middle, size, bias=False),
                    }
                ),
                **{
                    name: nn.RMSNorm(size, self.eps)
                    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
                },
            }
        )
        self.norm = nn.RMSNorm(size, self.eps)
        self.lm_head = nn.Linear(size, config["draft_vocab_size"], bias=False)

    def forward(self, hidden: Tensor, embedded: Tensor, depth: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The layer's output of token `depth` of the proposals that begin at each row: [batch, rows, hidden].

        hidden: the model's states or the output before; embedded: the next token; both [batch, rows, hidden]. cache:
        keys and values of the tokens before, to which these are added.
        """
        layer: Any = self.midlayer
        batch, rows, _ = hidden.shape
        both = torch.cat((layer["input_layernorm"](embedded), layer["hidden_norm"](hidden)), -1)
        q, k, v = (layer["self_attn"][f"{name}_proj"](both).view(batch, rows, -1, self.dim) for name in "qkv")
        q, k = self.rotated(q, depth), self.rotated(k, depth)
        repeats = self.heads // self.kv_heads
        k, v = (part.repeat_interleave(repeats, 2) for part in (k, v))
        cache.append((k, v))
        keys, values = cache[0]  # of the rows themselves, which each row sees up to its own
        scores = torch.einsum("bihd,bjhd->bhij", q, keys) * self.dim**-0.5
        scores = scores.masked_fill(torch.ones(rows, rows, device=q.device).triu(1).bool(), -torch.inf)
        own = [torch.einsum("bihd,bihd->bhi", q, key)[..., None] * self.dim**-0.5 for key, _ in cache[1:]]
        weights = torch.cat((scores, *own), -1).softmax(-1)
        attended = torch.einsum("bhij,bjhd->bihd", weights[..., :rows], values)
        for place, (_, value) in enumerate(cache[1:], rows):
            attended = attended + weights[..., place].transpose(1, 2)[..., None] * value
        residual = hidden + layer["self_attn"]["o_proj"](attended.reshape(batch, rows, -1))
        x = layer["post_attention_layernorm"](residual)
        mlp = layer["mlp"]
        return residual + mlp["down_proj"](F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))

    def rotated(self, x: Tensor, depth: int) -> Tensor:
        """The rotary embedding of [batch, rows, heads, dim], `depth` positions after each row's own."""
        frequencies = self.theta ** -(torch.arange(0, self.dim, 2, device=x.device).double() / self.dim)
        angles = (torch.arange(x.shape[1], device=x.device) + depth).double()[:, None] * frequencies
        cos, sin = (torch.cat((part, part), -1)[:, None].to(x.dtype) for part in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


def heads_config(target: dict[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """config.json of heads for a Llama of this config.json."""
    rope = target.get("rope_parameters") or {}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target["hidden_size"],
        "intermediate_size": target["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": target["num_attention_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"],
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": target["vocab_size"],
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_theta": target.get("rope_theta") or rope["rope_theta"],
        "hidden_act": "silu",
        "eagle_aux_hidden_state_layer_ids": list(layers),
    }


def losses(heads: Heads, model: Any, tokens: Tensor, layers: Sequence[int], depths: int) -> tuple[Tensor, list[float]]:
    """The loss of one batch, and the share of right tokens by their place in the proposal. tokens: [batch, length]."""
    with torch.no_grad():
        made = model(tokens, output_hidden_states=True)
        states = torch.cat([made.hidden_states[layer] for layer in layers], -1)
        wanted, embedded = made.logits.float().softmax(-1), model.get_input_embeddings()(tokens)
    rows = tokens.shape[1] - depths - 1
    hidden, cache = heads.fc(states[:, :rows]), []
    total, right = hidden.new_zeros(()), []
    for depth in range(depths):
        hidden = heads(hidden, embedded[:, depth + 1 : depth + 1 + rows], depth, cache)
        logits = heads.lm_head(heads.norm(hidden)).float()
        goal = wanted[:, depth + 1 : depth + 1 + rows]
        total = total - DISCOUNT**depth * (goal * logits.log_softmax(-1)).sum(-1).mean()
        right.append((logits.argmax(-1) == goal.argmax(-1)).float().mean().item())
    return total, right


def train(options: argparse.Namespace) -> list[float]:
    """Train and write the heads; returns the share of right tokens on held-out text, by place in the proposal."""
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).to(device).eval()
    tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    config = heads_config(json.loads((options.target / "config.json").read_text()), options.layers)
    heads = Heads(config).to(device)
    heads.lm_head.weight.data.copy_(model.get_output_embeddings().weight)
    heads.norm.weight.data.copy_(model.model.norm.weight)
    texts = [source.text for source in training_sources()[: options.files or None]]
    ids = [token for encoding in tokenizer.encode_batch(texts) for token in encoding.ids]
    corpus = torch.tensor(ids, device=device)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=options.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=options.steps)
    begin = time.monotonic()
    for step in range(1, options.steps + 1):
        offsets = torch.randint(len(corpus) - options.context, (options.batch, 1), device=device)
        loss, right = losses(
            heads, model, corpus[offsets + torch.arange(options.context, device=device)], options.layers, options.depths
        )
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(1, options.steps // 20) == 0:
            seconds = time.monotonic() - begin
            print(
                f"step {step}/{options.steps}  loss {loss.item():.3f}  right {shown(right)}  {seconds:.0f} s",
                flush=True,
            )
    held_out = torch.tensor(tokenizer.encode(held_out_text()[: 4 * 8 * options.context]).ids, device=device)
    windows = held_out[: len(held_out) // options.context * options.context].view(-1, options.context)
    with torch.no_grad():
        right = losses(heads, model, windows, options.layers, options.depths)[1]
    print(f"held-out text: right {shown(right)}")
    options.out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in heads.state_dict().items()}
    save_file(tensors, options.out / "model.safetensors")
    (options.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return right


def shown(shares: Sequence[float]) -> str:
    """Shares as percentages."""
    return " ".join(f"{share:.0%}" for share in shares)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--target", type=pathlib.Path, default=REPOSITORY / "demo" / "engine-demo", help="directory of a Llama"
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    parser.add_argument("--layers", type=int, nargs=3, default=(1, 3, 5), help="layers whose inputs the heads read")
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=16, help="windows of --context tokens in a step")
    parser.add_argument("--context", type=int, default=512, help="tokens in a window")
    parser.add_argument("--depths", type=int, default=5, help="tokens of a proposal that are trained")
    parser.add_argument("--files", type=int, default=0, help="files to read; 0: all")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data order")
    parser.add_argument("--smoke", action="store_true", help="tiny settings, for a test of the script on a CPU")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.steps, options.batch, options.context, options.depths, options.files = 4, 2, 48, 3, 2
        options.device = "cpu"
    return options


if __name__ == "__main__":
    train(parse_arguments(None))
