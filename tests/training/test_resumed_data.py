"""A run that was stopped, however often, sees the tokens of one that was not, and ends with its weights."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpath.errors import UserError
from tests.training import attempts
from tests.training.attempts import STEPS, attempt, toy_text
from tests.training.toys import toy_data

CHECKOUT = Path(__file__).parent.parent.parent
STREAM = {"stream": True, "lanes": 4, "eval_limit_tokens": 60}
KINDS: dict[str, dict[str, Any]] = {
    "corpus": {},
    "best fit, documents alone": {
        "packing": "best_fit",
        "packing_documents": 7,
        "document_masking": True,
        "eval_document_masking": True,
    },
    "stream": STREAM,
    "stream, best fit": {**STREAM, "packing": "best_fit", "packing_documents": 5, "document_masking": True},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Any]:
    """A corpus of which the run is more than an epoch, and a tokenizer that a stream can use."""
    folder = tmp_path_factory.mktemp("text")
    few = corpus.read_text(encoding="utf-8").splitlines(keepends=True)[:8]
    (folder / "few.jsonl").write_text("".join(few), encoding="utf-8")
    trained = toy_data(corpus)
    trained.load_tokenizer().save(folder / "tokenizer.json")
    return {"corpus": str(folder / "few.jsonl"), "tokenizer": str(folder / "tokenizer.json")}


def weights(run: Path) -> torch.Tensor:
    found: torch.Tensor = torch.load(run / "weights.pt", weights_only=True)
    return found


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("corpus", 2),
        ("best fit, documents alone", 0),
        ("stream", 2),
        *(pytest.param(kind, workers, marks=pytest.mark.slow) for kind in KINDS for workers in (0, 2)),
    ],
)
def test_one_rank_stopped_twice(text: dict[str, Any], tmp_path: Path, kind: str, workers: int) -> None:
    data = {**text, **KINDS[kind]}
    whole = attempt(run=str(tmp_path / "whole"), **data)
    run = str(tmp_path / "run")
    parts = [
        attempt(run=run, stop=stop, resume=stop > 2, num_workers=workers if stop != 5 else 0, **data)
        for stop in (2, 5, STEPS)
    ]
    assert torch.equal(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert parts[-1]["hash"] == whole["hash"] != parts[0]["hash"]
    assert sum((part["losses"] for part in parts), []) == whole["losses"]
    assert sum((part["validated"] for part in parts), []) == whole["validated"] == [2, 4, 6, 8]


def on_two_ranks(folder: Path, attempts_: list[dict[str, Any]]) -> list[dict[str, Any]]:
    subprocess.run(
        [sys.executable, attempts.__file__, json.dumps(attempts_), str(folder / "found.json")],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        timeout=300,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads((folder / "found.json").read_text())
    return found


def test_two_ranks_and_other_numbers_of_ranks(text: dict[str, Any], tmp_path: Path) -> None:
    corpus, stream = ({**text, **KINDS[kind]} for kind in ("corpus", "stream"))
    places = {name: str(tmp_path / name) for name in ("whole", "halves", "mixed", "s-whole", "s-halves")}
    one, one_stream = attempt(run=str(tmp_path / "one"), **corpus), attempt(run=str(tmp_path / "s-one"), **stream)
    attempt(run=places["mixed"], stop=2, **corpus)
    found = on_two_ranks(
        tmp_path,
        [
            {"run": places["whole"], **corpus},
            {"run": places["halves"], "stop": 4, **corpus},
            {"run": places["halves"], "resume": True, "num_workers": 2, **corpus},
            {"run": places["mixed"], "stop": 6, "resume": True, **corpus},
            {"run": places["s-whole"], "num_workers": 2, **stream},
            {"run": places["s-halves"], "stop": 4, "num_workers": 2, **stream},
            {"run": places["s-halves"], "resume": True, **stream},
            {"run": str(tmp_path / "short"), **stream, "lanes": 2, "repeat": False},
        ],
    )
    # one lane is used up before the other: both ranks say so in the same step, and save
    assert re.search(r"ends in step \d of 9, before data.budget.tokens", found.pop()["error"])
    assert (tmp_path / "short" / "last.ckpt").exists()
    hashes = [each["hash"] for each in found]
    assert hashes[0] == hashes[2] == one["hash"]
    assert torch.equal(weights(tmp_path / "halves"), weights(tmp_path / "whole"))
    assert hashes[4] == hashes[6] == one_stream["hash"]
    assert torch.equal(weights(tmp_path / "s-halves"), weights(tmp_path / "s-whole"))
    for halves, whole in ((found[1:3], found[0]), (found[5:7], found[4])):
        assert sum((each["losses"] for each in halves), []) == whole["losses"]
        assert sum((each["validated"] for each in halves), []) == whole["validated"]
    assert found[0]["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert found[4]["losses"] == pytest.approx(one_stream["losses"], rel=1e-4)
    # 1 -> 2 -> 1
    mixed = attempt(run=places["mixed"], resume=True, **corpus)
    assert mixed["hash"] == one["hash"]
    assert mixed["losses"] == pytest.approx(one["losses"][6:], rel=1e-3)
    # a stream goes on with as many ranks as it had
    with pytest.raises(UserError, match="the checkpoint is of 2 ranks, and here are 1: a stream goes on"):
        attempt(run=places["s-halves"], resume=True, **stream)


def test_the_hash_depends_on_the_data_alone(text: dict[str, Any], tmp_path: Path) -> None:
    same: list[dict[str, Any]] = [{}, {"micro_batch": 4}, {"num_workers": 2, "document_masking": True}]
    changes = [*same, {"seed": 1}]
    hashes = [attempt(run=str(tmp_path / str(i)), stop=3, **text, **each)["hash"] for i, each in enumerate(changes)]
    assert len(set(hashes[:3])) == 1
    assert hashes[3] != hashes[0]


def test_two_ranks_or_workers_must_divide_the_lanes(text: dict[str, Any]) -> None:
    data = toy_text(**text, **STREAM, num_workers=3)
    with pytest.raises(UserError, match="data.lanes 4 cannot be dealt to 1 ranks x 3 workers = 3"):
        data.setup("fit")
