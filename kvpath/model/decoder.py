"""The decoder: one loop over blocks that routes keys and values as the layout says."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Self

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

    def forward(
        self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context, attention: nn.Module | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The residual stream after this layer, and what it made; by another attention module if one is given."""
        update, made = (self.attention if attention is None else attention)(x_BTC, read, context)
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


class Compact(NamedTuple):
    """The compact modules of all layers, None where the plain one runs. They are no part of the model's own modules."""

    layout: Layout
    """What they make and read."""

    modules: tuple[nn.Module | None, ...]


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
        self._compact: Compact | None = None
        self.register_load_state_dict_post_hook(_weights_changed)

    def compact(self) -> None:
        """Run the strategy's compact modules from now on, in passes with a store and without gradients.

        They hold for these weights: `expand`, `train`, and whatever loads or moves weights drop them. On a CPU tall
        float32 weights are turned in memory, too, values and shapes as they are: see `turned`.
        """
        if self.embedding.weight.device.type == "cpu":
            for parameter in self.parameters():
                parameter.data = turned(parameter.data)
        attentions = [block.get_submodule("attention") for block in self.blocks]
        strategy = self.config.attention
        modules = tuple(strategy.compact(layer, attentions) for layer in range(self.config.n_layers))
        self._compact = Compact(strategy.compact_layout(self.config), modules)

    def expand(self) -> None:
        """Run the plain modules from now on."""
        self._compact = None

    def train(self, mode: bool = True) -> Self:
        """As in torch; training drops the compact modules."""
        if mode:
            self.expand()
        return super().train(mode)

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
        compact = None if store is None or self.training or torch.is_grad_enabled() else self._compact
        layout = self.layout if compact is None else compact.layout
        plan = None
        if wanted is not None and wanted < length:
            plan = prefill_plan(layout, length, wanted)
        context = Context.of(layout, index, self.config.rope_base, store, plan)
        modules = (None,) * len(self.blocks) if compact is None else compact.modules
        if store is None:
            return self._run(self.embedding(tokens_BT), context, plan, modules)
        store.begin(index)
        out_BTC = self._run(self.embedding(tokens_BT), context, plan, modules)
        store.advance()
        return out_BTC

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moving from the meta device makes new parameters of tied ones: tie them again."""
        self.expand()
        super()._apply(fn, recurse)
        if self.config.tied_embeddings:
            self.head.weight = self.embedding.weight
        return self

    def compile_layers(self) -> None:
        """Run all layers as one compiled graph from now on; parameters and their names stay as they are."""
        self._run = torch.compile(self._run)  # type: ignore[method-assign]

    def _run(
        self, x_BTC: Tensor, context: Context, plan: PrefillPlan | None, attentions: Sequence[nn.Module | None]
    ) -> Tensor:
        held: dict[tuple[int, str], Tensor] = {}
        received = {} if plan is None else plan.received
        layout = context.layout
        for layer, block in enumerate(self.blocks):
            entry = layout.layers[layer]
            if plan is not None:
                x_BTC = x_BTC[:, -plan.inputs[layer] :]
            read = tuple(
                _handed(held[key.owner, key.name], key, received.get((layer, key.owner, key.name)))
                for key in entry.reads
            )
            run = block if attentions[layer] is None else partial(block, attention=attentions[layer])
            x_BTC, made = self._call(run, x_BTC, read, context.at(layer))
            for name, values in zip(entry.makes, made, strict=True):
                if (layer, name) in layout.last_readers:
                    held[layer, name] = values
            for key in [key for key in held if layout.last_readers[key] == layer]:
                del held[key]
        return self.norm(x_BTC)

    def _call(
        self, block: Callable[..., tuple[Tensor, tuple[Tensor, ...]]], *arguments: object
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.activation_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(block, *arguments, use_reentrant=False)
        return block(*arguments)


def turned(weight: Tensor) -> Tensor:
    """The same matrix, laid out in memory along its longer side.

    In float32 a CPU's product with one vector reads long rows about twice as fast as many short ones; in narrower
    numbers only rows have a kernel, and it is four times slower. What a cache of it holds anyway is left as it is.
    """
    tall = weight.dim() == 2 and weight.shape[0] > weight.shape[1] and weight.dtype.itemsize >= 4
    return weight.t().contiguous().t() if tall and weight.numel() >= LARGE else weight


LARGE = 2**18
"""Elements of a matrix that are worth it."""


def _weights_changed(model: Decoder, _: object) -> None:
    model.expand()


def _handed(values: Tensor, read: Read, length: int | None) -> Tensor:
    """Exactly what a reader declared: its columns, and of a state over the new tokens the suffix that it needs."""
    if length is not None:
        values = values[:, -length:]
    return values if read.columns is None else values[..., slice(*read.columns)]
