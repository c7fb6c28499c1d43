"""The benchmark of evaluation in its small form: what it says, never how fast it was."""

import json
from typing import Any

import pytest


def test_small_form(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPATH_CACHE", "")  # which the script sets
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert script["main"](["--small"]) == 0
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1])
    assert (result["context"], result["batch_tokens"], result["batches"], result["aim"]) == (32, 64, 3, 0.9)
    assert len(result["ratios"]) == 1
    assert result["ratio"] == pytest.approx(result["evaluation"] / result["forward"])
    assert result["sums"] > 0
    assert f"evaluation over forward: {result['ratio']:.3f}" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--context", "32", "--batch-tokens", "48"], "--batch-tokens must be a multiple of --context 32, got 48"),
        (["--rounds", "0"], "--rounds must be positive, got 0"),
    ],
)
def test_wrong_arguments(
    script: dict[str, Any], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script["main"](flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
