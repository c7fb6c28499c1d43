"""The shape of the model around the attention strategy."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from kvpath.attention.layout import Layout
from kvpath.attention.strategy import AttentionStrategy
from kvpath.errors import UserError
from kvpath.model.layers import Linear, RMSNorm


@dataclass(kw_only=True)
class BackboneConfig:
    """A decoder: embedding, layers of attention and SwiGLU with RMSNorm before each, a norm, an output head.

    Raises:
        UserError: every problem found, each naming the field and the value.
    """

    vocab_size: int
    """Entries of the tokenizer; the table is padded to a multiple of pad_vocab_to."""

    d_model: int
    """Width of the residual stream."""

    n_layers: int
    """Number of layers."""

    d_ff: int | list[int] | Literal["match"]
    """Inner width of the SwiGLU: one number, or one for each layer; `match` solves them for `parameters`."""

    attention: AttentionStrategy
    """How keys and values are made, shared and stored (class_path and init_args)."""

    parameters: int | None = None
    """What `d_ff: match` makes the parameters of the whole model sum to; no effect otherwise."""

    d_ff_multiple: int = 1
    """What `d_ff: match` makes every width a multiple of."""

    max_seq_len: int = 2048
    """Longest context the model is trained for; longer ones are allowed with a warning."""

    pad_vocab_to: int = 64
    """The vocabulary is padded to a multiple of this (50,257 becomes 50,304)."""

    tied_embeddings: bool = False
    """Whether the output head shares the embedding table."""

    norm_eps: float = 1e-5
    """Epsilon of every RMSNorm."""

    init_std: float = 0.02
    """Standard deviation of all initial weights."""

    rope_base: float = 1e6
    """Base of the rotary frequencies."""

    def __post_init__(self) -> None:
        UserError.raise_all(self.problems())

    def problems(self) -> Iterator[str]:
        """What is wrong with the fields, one line each."""
        for name in ("vocab_size", "d_model", "n_layers", "max_seq_len", "pad_vocab_to", "d_ff_multiple"):
            if getattr(self, name) < 1:
                yield f"{name} must be positive, got {getattr(self, name)}"
        if isinstance(self.d_ff, list) and len(self.d_ff) != self.n_layers:
            yield f"d_ff must be one width or n_layers={self.n_layers} of them, got {len(self.d_ff)}"
        if self.d_ff == "match":
            if self.parameters is None:
                yield "d_ff: match needs parameters, the number that the model's are to sum to"
        elif isinstance(self.d_ff, str):
            yield f"d_ff must be a width, a list of widths or 'match', got {self.d_ff!r}"
        else:
            for index, width in enumerate(self.d_ff if isinstance(self.d_ff, list) else [self.d_ff]):
                if width < 1:
                    yield f"d_ff must be positive, got {width}" + (f" at index {index}" if index else "")
        for name in ("norm_eps", "init_std", "rope_base"):
            if not getattr(self, name) > 0:
                yield f"{name} must be positive, got {getattr(self, name)}"

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table and of the output head."""
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to

    @property
    def d_ff_per_layer(self) -> list[int]:
        """The SwiGLU width of each layer.

        Raises:
            UserError: the widths are still to be solved.
        """
        if isinstance(self.d_ff, str):
            raise UserError(
                "d_ff is still 'match': a config that is loaded from YAML is solved at once; in Python, call"
                " kvpath.analysis.matching.resolve_widths first"
            )
        return self.d_ff if isinstance(self.d_ff, list) else [self.d_ff] * self.n_layers

    def layout(self) -> Layout:
        """The attention layout, checked."""
        return self.attention.layout(self)

    def norm(self, dim: int) -> nn.Module:
        """A normalisation over the last `dim` features."""
        return RMSNorm(dim, self.norm_eps)

    def linear(self, n_in: int, n_out: int) -> nn.Module:
        """A linear layer, initialised."""
        return Linear(n_in, n_out, self.init_std)
