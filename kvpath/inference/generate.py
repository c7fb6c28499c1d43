"""Text from a model: prompts in, continuations out."""

import torch
from torch import Tensor

from kvpath.inference.cache import GrowingCache
from kvpath.model.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    end_token: int | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Continue each prompt; a batch gives what each prompt gives alone.

    Args:
        model: the decoder, in whatever mode; it is not changed.
        prompts: token ids, at least one each.
        max_new_tokens: how many tokens to add at most.
        temperature: 0 takes the likeliest token.
        top_k: draw among this many likeliest tokens only.
        end_token: a row ends after this token.
        seed: row i draws from a generator of its own, seeded by seed + i.

    Returns:
        The new tokens of each prompt, the end token included.
    """
    device = model.embedding.weight.device
    longest = max(map(len, prompts))
    tokens_BT = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    valid_BT = torch.tensor([[False] * (longest - len(p)) + [True] * len(p) for p in prompts], device=device)
    generators = [torch.Generator().manual_seed(seed + row) for row in range(len(prompts))]
    cache = GrowingCache(model.layout)
    index = cache.place(tokens_BT, None if bool(valid_BT.all()) else valid_BT)
    new: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    for _ in range(max_new_tokens):
        logits_BV = model(tokens_BT, index=index, store=cache, wanted=1)[:, -1, : model.config.vocab_size].float().cpu()
        chosen = [_choose(row, temperature, top_k, draw) for row, draw in zip(logits_BV, generators, strict=True)]
        for row, token in enumerate(chosen):
            if not done[row]:
                new[row].append(token)
                done[row] = token == end_token
        if all(done):
            break
        tokens_BT = torch.tensor(chosen, device=device)[:, None]
        index = cache.place(tokens_BT)
    return new


def _choose(logits_V: Tensor, temperature: float, top_k: int | None, draw: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=draw))
