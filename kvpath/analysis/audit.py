"""What a model costs, counted on the meta device: nothing is allocated and nothing is run on data."""

from dataclasses import dataclass

import torch
from torch import nn

from kvpath.analysis.allocation import cache_bytes, whole_blocks
from kvpath.analysis.step_memory import compact_bytes, step_bytes
from kvpath.attention.accounting import (
    attention_flops,
    measured_flops,
    per_token,
    read_elements,
    stated_flops,
    stored_elements,
    visible_keys,
    visible_pairs,
)
from kvpath.attention.layout import Layout
from kvpath.errors import UserError
from kvpath.model.config import BackboneConfig
from kvpath.model.decoder import Decoder
from kvpath.model.layers import RMSNorm

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

PARTS = ("embedding", "head", "attention", "mlp", "norms")


@dataclass(frozen=True)
class Audit:
    """The costs of one model at one context. Every count per token is per token of context, or per new token."""

    name: str
    """What the model is called in tables."""

    context: int
    """Tokens S that decoding looks back on, and T of a training sequence."""

    dtype: str
    """What weights and cache are held in, for the bytes."""

    d_ff: tuple[int, ...]
    """The SwiGLU width of each layer."""

    parameters: int
    """All of them; a tied table counts once."""

    parameters_by_part: dict[str, int]
    """By embedding, head (0 if tied), attention, mlp and norms; gains of norms inside of attention count as norms."""

    stored_elements_per_token: float
    """Elements of the cache over the context."""

    read_elements_per_token: float
    """Elements that one decoding step reads over the context."""

    stored_bytes_per_token: float
    """Bytes of the cache over the context."""

    allocated_bytes_per_token: float
    """Bytes that `kvpath.inference.Cache` allocates for one row, over its tokens: the context in whole blocks."""

    compact_bytes: int
    """Bytes of weights that the compact modules for decoding derive and keep beside the model's."""

    step_bytes: int
    """Most bytes that one layer's attention holds at once in a decoding step of one row, beyond weights and cache."""

    plain_step_bytes: int
    """The same without compact modules."""

    forward_flops_per_token: float
    """FLOPs of a forward pass over the context, per token."""

    training_flops_per_token: float
    """Three times the forward pass; recomputation by activation checkpointing is apart."""

    decode_flops_per_token: int
    """FLOPs of one decoding step whose token sees the whole context, itself included."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters."""
        return self.parameters * ELEMENT_BYTES[self.dtype]


def audit(
    config: BackboneConfig, context: int | None = None, name: str | None = None, dtype: str = "bfloat16"
) -> Audit:
    """Count what a model costs.

    Args:
        config: the model.
        context: tokens of context; None for the config's max_seq_len.
        name: for tables; None for the strategy's class name.
        dtype: of weights and cache, one of ELEMENT_BYTES.

    Raises:
        UserError: the context is not positive, the dtype unknown, or the config at odds with itself.
    """
    context = config.max_seq_len if context is None else context
    UserError.raise_all(
        [f"context must be positive, got {context}"] * (context < 1)
        + [f"dtype must be one of {', '.join(ELEMENT_BYTES)}, got {dtype!r}"] * (dtype not in ELEMENT_BYTES)
    )
    model = on_meta(config)
    forward = forward_flops(model, context)
    stored = stored_elements(model.layout, context)
    in_dtype = on_meta(config).to(getattr(torch, dtype))
    return Audit(
        name=name or type(config.attention).__name__,
        context=context,
        dtype=dtype,
        d_ff=tuple(config.d_ff_per_layer),
        parameters=count_parameters(model),
        parameters_by_part=parameters_by_part(model),
        stored_elements_per_token=stored,
        read_elements_per_token=read_elements(model.layout, context),
        stored_bytes_per_token=stored * ELEMENT_BYTES[dtype],
        allocated_bytes_per_token=allocated_bytes_per_token(model.layout, context, dtype),
        compact_bytes=compact_bytes(in_dtype),
        step_bytes=step_bytes(in_dtype, context),
        plain_step_bytes=step_bytes(in_dtype, context, compact=False),
        forward_flops_per_token=forward,
        training_flops_per_token=3 * forward,
        decode_flops_per_token=decode_flops(model, context),
    )


def allocated_bytes_per_token(layout: Layout, context: int, dtype: str) -> float:
    """Bytes of a cache for one row, its positions included, at a capacity of whole blocks that holds `context`."""
    capacity = whole_blocks(context)
    return per_token(cache_bytes(layout, 1, capacity, getattr(torch, dtype)), capacity)


def on_meta(config: BackboneConfig) -> Decoder:
    """The model without memory for its parameters."""
    with torch.device("meta"):
        return Decoder(config)


def count_parameters(model: nn.Module) -> int:
    """All parameters; a tied one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def parameters_by_part(model: Decoder) -> dict[str, int]:
    """The parameters of each of PARTS; their sum is the model's."""
    parts = dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():
        path = name.split(".")[:-1]
        in_norm = isinstance(model.get_submodule(".".join(path)), RMSNorm | nn.RMSNorm | nn.LayerNorm)
        part = "norms" if in_norm else next(part for part in PARTS if part in path)
        parts[part] += parameter.numel()
    return parts


def forward_flops(model: Decoder, seq_len: int, causal: bool = True) -> float:
    """FLOPs per token of a forward pass over sequences of `seq_len` tokens, by a model on the meta device.

    Args:
        model: the model.
        seq_len: tokens T of each sequence.
        causal: count visible keys; without it the whole square of every range of keys counts.
    """
    products = sum(
        entry.heads.flops_per_key * visible_pairs(model.layout, layer, seq_len, causal)
        for layer, entry in enumerate(model.layout.layers)
    )
    return weight_flops(model) + per_token(products, seq_len)


def decode_flops(model: Decoder, context: int) -> int:
    """FLOPs of one decoding step at `context` stored tokens, the new one included, by a model on the meta device.

    Every weight is met once; to that comes what the strategy spends on its stored keys (latents absorbed).
    """
    return weight_flops(model) + sum(
        model.config.attention.decode_flops(layer, visible_keys(model.layout, layer, context))
        for layer in range(model.config.n_layers)
    )


def weight_flops(model: Decoder) -> int:
    """FLOPs per token of all products with weights, the head included; the embedding is looked up and costs none."""
    d_model = model.config.d_model
    total = model.head.matmul_flops_per_token()
    for layer, block in enumerate(model.blocks):
        total += attention_flops(block.get_submodule("attention"), model.layout, layer, d_model)
        total += _token_wise_flops(block.get_submodule("mlp"), d_model)
    return total


def _token_wise_flops(module: nn.Module, d_model: int) -> int:
    stated = stated_flops(module)
    if stated is not None:
        return stated
    return measured_flops(lambda tokens: module(torch.empty(1, tokens, d_model, device="meta")))


def sequences_that_fit(audit: Audit, memory_bytes: int) -> int:
    """How many sequences of the audit's context fit into memory beside the weights; activations are not counted.

    Raises:
        UserError: the weights alone do not fit.
    """
    left = memory_bytes - audit.weight_bytes
    if left < 0:
        raise UserError(
            f"memory must hold the weights of {audit.name}, {audit.weight_bytes:,} bytes, got {memory_bytes:,} bytes"
        )
    return int(left // (audit.stored_bytes_per_token * audit.context))
