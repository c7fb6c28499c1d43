"""The decoder: one loop over blocks that routes keys and values as the layout says."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kvpath.attention.context import Context, Index, Store
from kvpath.attention.layout import Layout, Read
from kvpath.attention.prefill import PrefillPlan, prefill_plan
from kvpath.model.config import BackboneConfig
from kvpath.model.layers import Embedding, SwiGLU
from kvpath.model.loss import LossSums, linear_cross_entropy


class Block(nn.Module):
    """One layer. It never asks which attention it holds."""

    def __init__(self, layer: int, config: BackboneConfig) -> None:
        super().__init__()
        self.attention = config.attention.build(layer, config)
        self.norm = config.norm(config.d_model)
        self.mlp = SwiGLU(config.d_model, config.d_ff_per_layer[layer], config.init_std)

    def forward(self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The residual stream after this layer, and what the layer made."""
        update, made = self.attention(x_BTC, read, context)
        x_BTC = context.computed(x_BTC) + update
        return x_BTC + self.mlp(self.norm(x_BTC)), made


class Head(nn.Module):
    """The output head: logits, or with labels the loss, for which the logits are never held whole."""

    def __init__(self, config: BackboneConfig, tied_to: Embedding | None) -> None:
        super().__init__()
        self.init_std = config.init_std
        self.tied = tied_to is not None
        shape = (config.padded_vocab_size, config.d_model)
        self.weight: Tensor = nn.Parameter(torch.empty(shape)) if tied_to is None else tied_to.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, unless they are the embedding's."""
        if not self.tied:
            nn.init.normal_(self.weight, std=self.init_std)

    def matmul_flops_per_token(self) -> int:
        """One product with the table, which is in no linear layer and may be tied; a multiply-add is 2."""
        return 2 * self.weight.numel()

    def forward(self, x_BTC: Tensor, labels_BT: Tensor | None = None, z_loss: float = 0.0) -> Tensor | LossSums:
        """Logits (B, T, V), or sums over the scored positions."""
        if labels_BT is None:
            return nn.functional.linear(x_BTC, self.weight)
        return linear_cross_entropy(x_BTC, self.weight, labels_BT, z_loss)


class Decoder(nn.Module):
    """A decoder-only transformer over any attention strategy."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        self.layout: Layout = config.layout()
        self.activation_checkpointing = False
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.embedding = Embedding(config.padded_vocab_size, config.d_model, config.init_std)
        self.blocks = nn.ModuleList(Block(layer, config) for layer in range(config.n_layers))
        self.norm = config.norm(config.d_model)
        self.head = Head(config, self.embedding if config.tied_embeddings else None)

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        *,
        index: Index | None = None,
        store: Store | None = None,
        wanted: int | None = None,
        z_loss: float = 0.0,
    ) -> Tensor | LossSums:
        """Logits (B, T, V), or with labels the sums of the loss.

        Args:
            tokens_BT: int64 token ids, the new ones if a store holds earlier ones.
            labels_BT: the token to predict at each position, IGNORE where none.
            index: where the tokens stand (padding, documents); None for positions 0 to T - 1 in every row.
            store: keeps keys and values between passes; None for a pass of its own.
            wanted: how many of the last positions to give logits for; None for all. Layers compute no more positions
                than this needs.
            z_loss: weight of the z-loss.
        """
        return self.head(self.hidden(tokens_BT, index=index, store=store, wanted=wanted), labels_BT, z_loss)

    def hidden(
        self, tokens_BT: Tensor, *, index: Index | None = None, store: Store | None = None, wanted: int | None = None
    ) -> Tensor:
        """The normed output of the last layer, (B, T or wanted, C); arguments as in `forward`."""
        length = tokens_BT.shape[1]
        if index is None:
            index = Index.start(length, tokens_BT.device) if store is None else store.place(tokens_BT)
        plan = None
        if wanted is not None and wanted < length:
            plan = prefill_plan(self.layout, length, wanted)
        context = Context.of(self.layout, index, self.config.rope_base, store, plan)
        if store is None:
            return self._run(self.embedding(tokens_BT), context, plan)
        store.begin(index)
        out_BTC = self._run(self.embedding(tokens_BT), context, plan)
        store.advance()
        return out_BTC

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moving from the meta device makes new parameters of tied ones: tie them again."""
        super()._apply(fn, recurse)
        if self.config.tied_embeddings:
            self.head.weight = self.embedding.weight
        return self

    def compile_layers(self) -> None:
        """Run all layers as one compiled graph from now on; parameters and their names stay as they are."""
        self._run = torch.compile(self._run)  # type: ignore[method-assign]

    def _run(self, x_BTC: Tensor, context: Context, plan: PrefillPlan | None) -> Tensor:
        held: dict[tuple[int, str], Tensor] = {}
        received = {} if plan is None else plan.received
        for layer, block in enumerate(self.blocks):
            entry = self.layout.layers[layer]
            if plan is not None:
                x_BTC = x_BTC[:, -plan.inputs[layer] :]
            read = tuple(
                _handed(held[key.owner, key.name], key, received.get((layer, key.owner, key.name)))
                for key in entry.reads
            )
            x_BTC, made = self._call(block, x_BTC, read, context.at(layer))
            for name, values in zip(entry.makes, made, strict=True):
                if (layer, name) in self.layout.last_readers:
                    held[layer, name] = values
            for key in [key for key in held if self.layout.last_readers[key] == layer]:
                del held[key]
        return self.norm(x_BTC)

    def _call(
        self, block: Callable[..., tuple[Tensor, tuple[Tensor, ...]]], *arguments: object
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.activation_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(block, *arguments, use_reentrant=False)
        return block(*arguments)


def _handed(values: Tensor, read: Read, length: int | None) -> Tensor:
    """Exactly what a reader declared: its columns, and of a state over the new tokens the suffix that it needs."""
    if length is not None:
        values = values[:, -length:]
    return values if read.columns is None else values[..., slice(*read.columns)]
