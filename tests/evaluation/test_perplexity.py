import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from kvpath.evaluation import Perplexity, by_position, summarise


def test_sums_stay_wide_in_a_narrow_model() -> None:
    score = Perplexity()
    module = torch.nn.Module()
    module.score = score
    module.to(torch.bfloat16)
    for _ in range(1000):
        score.update(torch.full((1, 2), 0.1, dtype=torch.float64), torch.full((1, 2), True))
    sums = score.compute()
    assert (sums["nll"].dtype, sums["count"].dtype) == (torch.float64, torch.int64)
    assert sums["nll"].tolist() == pytest.approx([100.0, 100.0], rel=1e-12)
    assert sums["count"].tolist() == [1000, 1000]


def test_sums_by_place_in_the_window() -> None:
    score = Perplexity()
    scored = torch.tensor([[True, True, False], [False, True, False]])
    score.update(torch.tensor([[1.0, 2.0, 0.0], [0.0, 4.0, 0.0]]), scored)
    score.update(torch.tensor([[8.0]]), torch.tensor([[True]]))
    sums = score.compute()
    assert (sums["nll"].tolist(), sums["count"].tolist()) == ([9, 6, 0], [2, 2, 0])
    assert by_position(sums["nll"], sums["count"]) == [
        {"from": 0, "to": 1, "tokens": 2, "nll_sum": 9.0},
        {"from": 1, "to": 2, "tokens": 2, "nll_sum": 6.0},
        {"from": 2, "to": 3, "tokens": 0, "nll_sum": 0.0},
    ]


@pytest.mark.parametrize(
    ("context", "edges"), [(1, [0, 1]), (2, [0, 1, 2]), (8, [0, 1, 2, 4, 8]), (9, [0, 1, 2, 4, 8, 9])]
)
def test_buckets_double_up_to_the_context(context: int, edges: list[int]) -> None:
    buckets = by_position(torch.ones(context), torch.ones(context))
    assert [(bucket["from"], bucket["to"]) for bucket in buckets] == list(itertools.pairwise(edges))
    assert sum(bucket["tokens"] for bucket in buckets) == sum(bucket["nll_sum"] for bucket in buckets) == context


def test_summary() -> None:
    found = summarise(nll=200 * math.log(2), tokens=100, n_bytes=400)
    assert found == pytest.approx({"loss": 2 * math.log(2), "perplexity": 4.0, "bits_per_byte": 0.5})
    assert summarise(1.0, 1, None).keys() == {"loss", "perplexity"}
    assert math.isfinite(summarise(1e6, 1, None)["perplexity"])


@pytest.mark.parametrize(("of_whole", "n_bytes"), [(True, 9), (False, None)])
def test_bytes_are_those_of_the_whole_or_not_known(of_whole: bool, n_bytes: int | None) -> None:
    score = Perplexity()
    score.update(torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[True, True, False]]))
    found = score.result(SimpleNamespace(n_tokens=2 if of_whole else 3, n_bytes=9))
    assert found is not None
    assert (found["tokens"], found["nll_sum"], found["bytes"]) == (2, 3.0, n_bytes)
    assert ("bits_per_byte" in found) == of_whole
    unknown = score.result(None)
    assert unknown is not None
    assert unknown["bytes"] is None


@pytest.mark.filterwarnings("ignore:.*called before the ``update`` method")
def test_nothing_scored_is_no_result() -> None:
    assert Perplexity().result(None) is None
