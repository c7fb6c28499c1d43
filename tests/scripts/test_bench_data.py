"""The benchmark of data in its small form: what it says, never how fast it was."""

import json
from typing import Any

import pytest


def test_small_form(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert script["main"](["--small", "--workers", "1"]) == 0
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1])
    sections = result["sections"]
    assert len(result["busy_cores"]) == 5
    assert {name: section["aim"] for name, section in sections.items()} == {
        "prepare": 0.9,
        "streaming": 0.85,
        "shards": 0.5,
        "first_batch": 2.0,
        "worker_memory": 100_000_000,
    }
    for name in ("prepare", "streaming", "shards"):
        assert sections[name]["ratio"] == pytest.approx(sections[name]["ratios"][0])
        assert f"{name}: " in output
    assert sections["prepare"]["mb_per_s"] > 0
    assert sections["streaming"]["tokens"] > 1000
    assert sections["shards"]["tokens"] == 3 * 32 * 2048
    assert sections["first_batch"]["seconds"] > 0
    assert sections["worker_memory"]["bytes_at_start"] > 10_000_000


def test_an_unknown_section_is_refused(script: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        script["main"](["shard"])
    assert ended.value.code == 2
    assert "there is no section shard; there are prepare, streaming, shards" in capsys.readouterr().err
