"""One training batch, recomputed on given weights: where its loss, its gradients and its activations stand out."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvpath.attention.context import Index
from kvpath.model.decoder import Decoder
from kvpath.model.loss import IGNORE


@dataclass
class LayerReport:
    """What one layer did, over the whole batch."""

    name: str
    """embedding, blocks.0, ..., norm, head."""

    gradient_norm: float = 0.0
    """Of all its parameters, before clipping."""

    activation_rms: float = 0.0
    """Root mean square of its output: the residual stream after it."""

    largest_logit: float | None = None
    """The largest scaled product of a query and a key that it sees; None where there is no attention."""


@dataclass
class Inspection:
    """What was found."""

    loss: float
    """Nats per scored token."""

    gradient_norm: float
    """Of all parameters, before clipping."""

    documents: list[dict[str, Any]] = field(default_factory=list)
    """`sequence`, `document` (None if the batch does not say), `tokens` scored, `loss` in nats per token."""

    layers: list[LayerReport] = field(default_factory=list)
    first_not_finite: str | None = None
    """The first tensor, in the order of computation, that holds a value that is not finite."""


def inspect_batch(
    model: Decoder,
    tokens_AMT: Tensor,
    labels_AMT: Tensor,
    documents_AMT: Tensor | None = None,
    positions_AMT: Tensor | None = None,
    precision: str = "32-true",
) -> Inspection:
    """Forward and backward as in training, without a step.

    Args:
        model: the weights, whose gradients are overwritten.
        tokens_AMT: int64 token ids: A micro-batches of M sequences.
        labels_AMT: what to predict, IGNORE where nothing.
        documents_AMT: the document of each token, if attention does not cross documents.
        positions_AMT: the position of each token in its document; with documents.
        precision: the Trainer's; bf16-mixed computes as that does.
    """
    model.train()
    model.zero_grad()
    watched = _Watched(model)
    scored = max(1, int((labels_AMT != IGNORE).sum()))
    losses = []
    with watched.on(), torch.autocast(tokens_AMT.device.type, torch.bfloat16, enabled="bf16-mixed" in precision):
        for micro, (tokens_MT, labels_MT) in enumerate(zip(tokens_AMT, labels_AMT, strict=True)):
            index = None
            if documents_AMT is not None and positions_AMT is not None:
                index = Index(positions_AMT[micro], documents=documents_AMT[micro])
            logits_MTV = model(tokens_MT, index=index)
            nll_MT = F.cross_entropy(
                logits_MTV.double().flatten(0, 1), labels_MT.flatten(), ignore_index=IGNORE, reduction="none"
            ).view_as(labels_MT)
            watched.note("loss", nll_MT)
            (nll_MT.sum() / scored).backward()
            losses.append(nll_MT.detach())
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None:
            watched.note(f"gradient of {name}", parameter.grad)
    nll_AMT = torch.stack(losses)
    return Inspection(
        loss=float(nll_AMT.sum() / scored),
        gradient_norm=_norm(list(model.parameters())),
        documents=list(_by_document(nll_AMT, labels_AMT, documents_AMT)),
        layers=watched.layers(),
        first_not_finite=watched.first_not_finite,
    )


def _by_document(nll_AMT: Tensor, labels_AMT: Tensor, documents_AMT: Tensor | None) -> Iterator[dict[str, Any]]:
    rows = [None] * nll_AMT.flatten(0, 1).shape[0] if documents_AMT is None else list(documents_AMT.flatten(0, 1))
    for sequence, (nll_T, labels_T, row) in enumerate(
        zip(nll_AMT.flatten(0, 1), labels_AMT.flatten(0, 1), rows, strict=True)
    ):
        for document in [None] if row is None else row.unique().tolist():
            here = (labels_T != IGNORE) & (row == document if row is not None else True)
            tokens = int(here.sum())
            if tokens:
                loss = float(nll_T[here].sum() / tokens)
                yield {"sequence": sequence, "document": document, "tokens": tokens, "loss": loss}


def _norm(parameters: list[nn.Parameter]) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))


class _Watched(TorchFunctionMode):
    """Looks at the outputs of all modules, and at what attention multiplies, whoever calls it."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model
        self.first_not_finite: str | None = None
        self._parts = dict(_parts(model))
        self._squares: dict[str, list[tuple[float, int]]] = {name: [] for name in self._parts}
        self._logits: dict[str, float] = {}
        self._inside = ""
        self._looking = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Look at what happens in here."""
        handles = [
            module.register_forward_hook(self._noting(name)) for name, module in self.model.named_modules() if name
        ]
        for name, part in self._parts.items():
            handles.append(part.register_forward_pre_hook(self._entering(name)))
            handles.append(part.register_forward_hook(self._measuring(name)))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def note(self, name: str, value: Tensor) -> None:
        """Remember it if it is the first that is not finite."""
        if self.first_not_finite is None and not bool(value.detach().isfinite().all()):
            self.first_not_finite = name

    def layers(self) -> list[LayerReport]:
        """What was seen of each part of the model."""
        return [
            LayerReport(
                name,
                _norm([p for p in part.parameters() if p.grad is not None]),
                math.sqrt(sum(total for total, _ in squares) / max(1, sum(count for _, count in squares))),
                self._logits.get(name),
            )
            for (name, part), squares in zip(self._parts.items(), self._squares.values(), strict=True)
        ]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            with torch.no_grad():
                found = _largest_logit(*args, **(kwargs or {}))
            self._logits[self._inside] = max(found, self._logits.get(self._inside, -math.inf), key=_nan_first)
        return func(*args, **(kwargs or {}))

    def _noting(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, _: Any, output: Any) -> None:
            for own, parameter in module.named_parameters(recurse=False):
                self.note(f"{name}.{own}", parameter)
            for value in _tensors(output):
                self.note(f"output of {name}", value)

        return look

    def _entering(self, name: str) -> Callable[..., None]:
        def look(*_: Any) -> None:
            self._inside = name

        return look

    def _measuring(self, name: str) -> Callable[..., None]:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            value = next(_tensors(output)).detach()
            self._squares[name].append((float(value.double().square().sum()), value.numel()))

        return look


def _parts(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """The parts that a batch goes through, in order."""
    yield "embedding", model.embedding
    for layer, block in enumerate(model.blocks):
        yield f"blocks.{layer}", block
    yield "norm", model.norm
    yield "head", model.head


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)


def _largest_logit(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> float:
    """The largest logit of the pairs that are visible; arguments as of the product itself."""
    scale = 1 / math.sqrt(q_BHTD.shape[-1]) if scale is None else scale
    largest = -math.inf
    for row, q_HTD in enumerate(q_BHTD):  # one sequence at a time: all logits at once would be large
        k_HSD = k_BGSD[row].repeat_interleave(q_BHTD.shape[1] // k_BGSD.shape[1], dim=0)
        logits_HTS = (q_HTD.float() @ k_HSD.float().mT) * scale
        if is_causal:
            seen = torch.ones(logits_HTS.shape[-2:], dtype=torch.bool, device=logits_HTS.device).tril()
            logits_HTS = logits_HTS.masked_fill(~seen, -math.inf)
        if attn_mask is not None:
            mask = attn_mask.expand(q_BHTD.shape[0], *attn_mask.shape[1:])[row]
            logits_HTS = logits_HTS.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits_HTS + mask
        largest = max(largest, float(logits_HTS.max()), key=_nan_first)
    return largest


def _nan_first(value: float) -> float:
    """Order by size, and what is no number above all."""
    return math.inf if math.isnan(value) else value
