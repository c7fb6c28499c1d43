import math

import pytest
import torch

from kvpath.evaluation import Perplexity, summarise


def test_sums_stay_wide_in_a_narrow_model() -> None:
    score = Perplexity()
    module = torch.nn.Module()
    module.score = score
    module.to(torch.bfloat16)
    for _ in range(1000):
        score.update(torch.tensor(0.1, dtype=torch.float64), torch.tensor(2**40))
    sums = score.compute()
    assert (sums["nll"].dtype, sums["count"].dtype) == (torch.float64, torch.int64)
    assert sums["nll"].item() == pytest.approx(100.0, rel=1e-12)
    assert sums["count"].item() == 1000 * 2**40


def test_unequal_batches_are_not_averaged_as_equals() -> None:
    score = Perplexity()
    score.update(torch.tensor(30.0), torch.tensor(10))
    score.update(torch.tensor(1.0), torch.tensor(1))
    assert score.compute()["nll"] / score.compute()["count"] == pytest.approx(31 / 11)


def test_summary() -> None:
    found = summarise(nll=200 * math.log(2), tokens=100, n_bytes=400)
    assert found == pytest.approx({"loss": 2 * math.log(2), "perplexity": 4.0, "bits_per_byte": 0.5})
    assert summarise(1.0, 1, None).keys() == {"loss", "perplexity"}
    assert math.isfinite(summarise(1e6, 1, None)["perplexity"])
