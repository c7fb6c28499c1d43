"""Multi-head latent attention (DeepSeek-V2): keys and values come from one small latent a token, which is stored."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from kvpath.attention.compact import CompactAttention
from kvpath.attention.context import Context, History
from kvpath.attention.latent import attend_latent
from kvpath.attention.layout import Heads, Slot
from kvpath.attention.product import Segment, attend
from kvpath.attention.strategy import AttentionStrategy, Backbone, rotary_problems, split_heads


@dataclass(kw_only=True)
class MLA(AttentionStrategy):
    """Every layer stores a normalised latent and one rotated key that all heads share."""

    head_dim: int
    """Features of each head's content key and value."""

    latent_dim: int
    """Features of the latent that keys and values are made from."""

    rotary_dim: int = 0
    """Features of the rotated key shared by all heads, beside the content key; 0 for none."""

    q_latent_dim: int | None = None
    """Features of a latent that queries are made from; None makes them from the residual stream."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the fields."""
        yield from super().problems()
        yield from rotary_problems("rotary_dim", self.rotary_dim)
        for name in ("head_dim", "latent_dim", "q_latent_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name} must be positive, got {value}"

    def makes(self, layer: int) -> Mapping[str, Slot]:
        """The latent, and the rotated key if there is one."""
        rotary = {"k_rotary": Slot(1, self.rotary_dim)} if self.rotary_dim else {}
        return {"latent": Slot(1, self.latent_dim), **rotary}

    def heads(self, layer: int) -> Heads:
        """Content and rotary parts make up the keys; values have content only."""
        return Heads(self.n_heads, self.head_dim + self.rotary_dim, self.head_dim, rotary_dim=self.rotary_dim)

    def decode_flops(self, layer: int, n_keys: int) -> int:
        """Absorbed: scores against latent and rotary key, sums over the latent; nothing is expanded.

        The up-projection meets the query and the sum instead of every key, so it is counted once, as every weight.
        """
        return 2 * self.n_heads * (2 * self.latent_dim + self.rotary_dim) * n_keys

    def build(self, layer: int, backbone: Backbone) -> nn.Module:
        """The attention module of a layer."""
        return LatentAttention(self, backbone)

    def compact(self, layer: int, attentions: Sequence[nn.Module]) -> nn.Module:
        """The absorbed form."""
        plain = attentions[layer]
        assert isinstance(plain, LatentAttention)
        return CompactLatentAttention(plain)


class LatentAttention(nn.Module):
    """c = RMSNorm(W_down h); k, v = W_up c; k_rotary = RoPE(W_rotary h); q = [q_content || RoPE(q_rotary)]."""

    def __init__(self, strategy: MLA, backbone: Backbone) -> None:
        super().__init__()
        self.n_heads = strategy.n_heads
        self.dims = (strategy.head_dim, strategy.rotary_dim)
        self.norm = backbone.norm(backbone.d_model)
        self.w_q = queries(strategy, backbone, sum(self.dims))
        self.w_down = backbone.linear(backbone.d_model, strategy.latent_dim)
        self.latent_norm = backbone.norm(strategy.latent_dim)
        if strategy.rotary_dim:
            self.w_rotary = backbone.linear(backbone.d_model, strategy.rotary_dim)
        self.w_up = backbone.linear(strategy.latent_dim, 2 * strategy.n_heads * strategy.head_dim)
        self.w_o = strategy.output.build(strategy.n_heads * strategy.head_dim, backbone)

    def forward(self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The update of the residual stream, and (latent, k_rotary if there is one)."""
        q_parts, latent, k_rotary = self.project(x_BTC, context)
        k, v = split_heads(self.w_up(latent.values.flatten(2)), 2 * self.n_heads).chunk(2, dim=2)
        segment = Segment(k=(latent._replace(values=k), *k_rotary), v=(latent._replace(values=v),))
        out = attend(q_parts, [segment], context)
        return self.w_o(out), (latent.values, *(part.values for part in k_rotary))

    def project(self, x_BTC: Tensor, context: Context) -> tuple[list[Tensor], History, list[History]]:
        """Queries [content, rotary], the latent, and [k_rotary]; without the rotary parts if there are none."""
        h_BTC = self.norm(x_BTC)
        latent = context.append("latent", split_heads(self.latent_norm(self.w_down(h_BTC)), 1))
        q_content, q_rotary = split_heads(self.w_q(context.computed(h_BTC)), self.n_heads).split(self.dims, dim=-1)
        if not self.dims[1]:
            return [q_content], latent, []
        k_rotary = context.append("k_rotary", context.rotate(split_heads(self.w_rotary(h_BTC), 1)))
        return [q_content, context.rotate(q_rotary)], latent, [k_rotary]


class CompactLatentAttention(CompactAttention[LatentAttention]):
    """Absorbed for few queries: q W_k meets the stored latent, which is the value too, and W_v the sum.

    Beyond the cache it holds tiles of scores and, for many queries, of expanded latents.
    """

    def forward(self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As the plain module's."""
        q_parts, latent, k_rotary = self.plain.project(x_BTC, context)
        w_up = self.plain.w_up.get_parameter("weight")
        out = attend_latent(q_parts, latent, w_up, None, k_rotary, (), context)
        return self.plain.w_o(out), (latent.values, *(part.values for part in k_rotary))


def queries(strategy: MLA, backbone: Backbone, width: int) -> nn.Module:
    """From the residual stream to all heads' queries of `width`, through a latent if the strategy has one."""
    n_out = strategy.n_heads * width
    if strategy.q_latent_dim is None:
        return backbone.linear(backbone.d_model, n_out)
    return nn.Sequential(
        backbone.linear(backbone.d_model, strategy.q_latent_dim),
        backbone.norm(strategy.q_latent_dim),
        backbone.linear(strategy.q_latent_dim, n_out),
    )
