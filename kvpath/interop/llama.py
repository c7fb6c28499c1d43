"""Our GQA models as Hugging Face's Llama, which computes the same by the same weights."""

from importlib.util import find_spec
from typing import Any, cast

from torch import nn

from kvpath.attention.gqa import GQA
from kvpath.attention.output import DenseOutput
from kvpath.errors import UserError
from kvpath.model.config import BackboneConfig
from kvpath.model.decoder import Decoder

IN_A_LAYER = {
    "attention.norm": "input_layernorm",
    "attention.w_q": "self_attn.q_proj",
    "attention.w_k": "self_attn.k_proj",
    "attention.w_v": "self_attn.v_proj",
    "attention.w_o": "self_attn.o_proj",
    "norm": "post_attention_layernorm",
    "mlp.w_gate": "mlp.gate_proj",
    "mlp.w_up": "mlp.up_proj",
    "mlp.w_down": "mlp.down_proj",
}
"""Our names within a block, and theirs within a layer."""

OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
"""Our names outside of blocks, and theirs outside of layers."""


def is_llama(config: BackboneConfig) -> bool:
    """Whether Llama can hold the weights of such a model, and transformers is installed."""
    return find_spec("transformers") is not None and not _problems(config)


def llama_name(name: str) -> str:
    """Our name of a weight in theirs.

    >>> llama_name("blocks.3.attention.w_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    module = name.removesuffix(".weight")
    if not module.startswith("blocks."):
        return f"{OUTSIDE[module]}.weight"
    _, layer, inner = module.split(".", 2)
    return f"model.layers.{layer}.{IN_A_LAYER[inner]}.weight"


def llama_from(model: Decoder) -> nn.Module:
    """transformers' `LlamaForCausalLM` with copies of the model's weights, in their dtype; its attention is sdpa.

    Raises:
        UserError: Llama has no such attention, no such widths, or not a width of the MLP for each layer.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    UserError.raise_all(_problems(model.config))
    llama = LlamaForCausalLM(LlamaConfig(**_settings(model.config)))
    # Parameters alone: rotary frequencies stay in float32.
    for parameter in llama.parameters():
        parameter.data = parameter.data.to(model.embedding.weight.dtype)
    llama.load_state_dict({llama_name(name): value for name, value in model.state_dict().items()})
    return cast(nn.Module, llama)


def _settings(config: BackboneConfig) -> dict[str, Any]:
    attention = cast(GQA, config.attention)
    return {
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "intermediate_size": config.d_ff_per_layer[0],
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "tie_word_embeddings": config.tied_embeddings,
        "attn_implementation": "sdpa",
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _problems(config: BackboneConfig) -> list[str]:
    attention = config.attention
    widths = sorted(set(config.d_ff_per_layer))
    found = []
    if type(attention) is not GQA:
        found.append(f"attention must be GQA for Llama, got {type(attention).__name__}")
    if type(attention.output) is not DenseOutput:
        found.append(f"attention.output must be DenseOutput for Llama, got {type(attention.output).__name__}")
    if config.d_model % attention.n_heads:
        found.append(f"d_model must be a multiple of n_heads={attention.n_heads} for Llama, got {config.d_model}")
    if len(widths) > 1:
        found.append(f"d_ff must be one width for Llama, got {widths}")
    return found
