import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import two_ranks

CHECKOUT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def out(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what one rank and two ranks reported."""
    out = tmp_path_factory.mktemp("ranks")
    two_ranks.run(corpus, out, ranks=1)
    subprocess.run(
        [sys.executable, two_ranks.__file__, str(corpus), str(out)],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        timeout=300,
        check=True,
    )
    return out


@pytest.fixture(scope="module")
def reports(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"report{ranks}.json").read_text()) for ranks in (1, 2)]


def test_two_ranks_train_as_one_does(out: Path, reports: list[dict[str, Any]]) -> None:
    one, two = reports
    assert len(one["losses"]) == 3
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-12)
    assert two["gradient_norms"] == pytest.approx(one["gradient_norms"], rel=1e-9)
    weights = [torch.load(out / f"weights{ranks}.pt", weights_only=True) for ranks in (1, 2)]
    torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-12)


def test_gradients_are_exchanged_once_a_step(reports: list[dict[str, Any]]) -> None:
    assert reports[1]["micro_batches"] == 2
    assert reports[1]["exchanges"] == len(reports[1]["losses"])


def test_every_token_is_scored_once_on_any_number_of_ranks(reports: list[dict[str, Any]]) -> None:
    one, two = reports
    assert [result["tokens"] for result in two["test"]] == two["to_score"] == one["to_score"]
    for stage in ("validation", "test"):
        results = [report[stage] if stage == "validation" else report[stage][0] for report in reports]
        assert results[1].keys() == results[0].keys()
        assert (results[1]["tokens"], results[1]["bytes"]) == (results[0]["tokens"], results[0]["bytes"])
        for name in ("nll_sum", "loss", "perplexity", "bits_per_byte"):
            assert results[1][name] == pytest.approx(results[0][name], rel=1e-12)


def test_windows_that_overlap_score_every_token_once_on_any_number_of_ranks(reports: list[dict[str, Any]]) -> None:
    for one, two in zip(reports[0]["sliding"], reports[1]["sliding"], strict=True):
        assert one["tokens"] == two["tokens"] == reports[0]["to_score"][0]
        assert one["stride"] == two["stride"] == 5
        assert two["fingerprint"] == one["fingerprint"]
        assert two["nll_sum"] == pytest.approx(one["nll_sum"], rel=1e-12)
        assert [bucket["tokens"] for bucket in two["by_position"]] == [
            bucket["tokens"] for bucket in one["by_position"]
        ]


def test_the_first_rank_writes_and_all_go_on_after_an_interruption(out: Path, reports: list[dict[str, Any]]) -> None:
    for ranks, report in enumerate(reports, 1):
        assert [result["context"] for result in report["gone_on"]] == [16]
        entries = json.loads((out / f"perplexity{ranks}.json").read_text())
        assert [(entry["context"], entry["stride"]) for entry in entries] == [(16, 16), (8, 5), (16, 5)]
        assert [entry["nll_sum"] for entry in entries] == pytest.approx(
            [result["nll_sum"] for result in (*report["test"], *report["sliding"])], rel=1e-12
        )
    assert list(out.glob("*.partial")) == []
