"""Documents that stand alone, for every strategy: neighbours and places do not matter."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from kvpath.attention.context import Context, Index
from kvpath.data.packing import part_documents
from kvpath.model.batch import index_of
from kvpath.model.loss import LossSums
from kvpath.testing import Toy, concrete_strategies, tokens, toys_of
from tests.cases import CONTRACT

OURS = [strategy for strategy in concrete_strategies() if strategy.__module__.startswith("kvpath.")]
every_toy = pytest.mark.parametrize("toy", [*(toy for cls in OURS for toy in toys_of(cls)), *CONTRACT], ids=str)
one_toy_each = pytest.mark.parametrize("toy", [*(toys_of(cls)[1] for cls in OURS), *CONTRACT], ids=str)

END = 0
DOCUMENTS = [
    torch.cat([tokens(length, seed=length).clamp(min=1), torch.tensor([END])]) for length in (5, 0, 8, 3, 1, 4)
]
ROWS = ([0, 1, 2, 3], [3, 4, 0, 5, 1, 4])
"""Documents of each row: some in both, elsewhere and beside others."""


def packed() -> dict[str, Tensor]:
    """Both rows in a batch, the shorter padded, as the data module gives them."""
    rows = [torch.cat([DOCUMENTS[i] for i in row]) for row in ROWS]
    longest = max(map(len, rows))
    tokens_BT = torch.stack([torch.cat([row, torch.zeros(longest - len(row), dtype=torch.int64)]) for row in rows])
    labels_BT = torch.roll(tokens_BT, -1, dims=1)
    labels_BT[:, -1] = 7
    parted = part_documents(tokens_BT.numpy(), labels_BT.numpy(), END)
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in parted.items()}


def losses(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    sums = model(batch["tokens"], batch["labels"], index=index_of(batch), z_loss=0.1)
    assert isinstance(sums, LossSums)
    return sums.total


@every_toy
def test_logits_of_a_document_are_those_of_it_alone(toy: Toy) -> None:
    model, batch = toy.decoder(), packed()
    with torch.no_grad():
        found = model.eval()(batch["tokens"], index=index_of(batch))
    model.train().activation_checkpointing = True
    torch.testing.assert_close(model(batch["tokens"], index=index_of(batch)), found, atol=1e-12, rtol=0)
    for row, of_row in enumerate(ROWS):
        start = 0
        for i in of_row:
            end = start + len(DOCUMENTS[i])
            alone = model(DOCUMENTS[i][None])[0]
            torch.testing.assert_close(found[row, start:end], alone, atol=1e-10, rtol=0)
            start = end
    crossing = model(batch["tokens"])
    assert (crossing - found)[:, 10:].abs().max() > 1e-3


@one_toy_each
def test_gradients_are_the_sum_of_those_of_documents_alone(toy: Toy) -> None:
    together, apart = toy.decoder().train(), toy.decoder().train()
    together.activation_checkpointing = True
    losses(together, packed()).backward()
    for i in [*ROWS[0], *ROWS[1]]:
        document = DOCUMENTS[i][None]
        if document.shape[1] > 1:
            sums = apart(document[:, :-1], document[:, 1:], z_loss=0.1)
            sums.total.backward()
    for (name, ours), theirs in zip(together.named_parameters(), apart.parameters(), strict=True):
        expected = torch.zeros_like(ours) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(ours.grad, expected, atol=1e-10, rtol=1e-10, msg=name)


@one_toy_each
def test_the_masks_equal_a_brute_force_loop(toy: Toy) -> None:
    batch, model = packed(), toy.decoder()
    index = index_of(batch)
    assert isinstance(index, Index)
    context = Context.of(model.layout, index, 10_000.0)
    rows, length = batch["tokens"].shape
    for window, mask in context.masks.items():
        assert mask is not None
        for row in range(rows):
            document = [int((batch["tokens"][row, :t] == END).sum()) for t in range(length)]
            for query, key in itertools.product(range(length), repeat=2):
                sees = key <= query and document[key] == document[query] and (not window or query - key < window)
                assert bool(mask[row, 0, query, key]) == sees
