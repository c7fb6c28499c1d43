"""The examples and the pages of docs do what they say."""

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpath.cli.main import main as kvpath

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def test_audit(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "audit.py"), run_name="__main__")
    assert capsys.readouterr().out == "kvpath_concat: 98,710,016 parameters, 6,144 elements a token\n"


def test_bare_loop_learns_to_count(capsys: pytest.CaptureFixture[str]) -> None:
    loss = runpy.run_path(str(EXAMPLES / "bare_loop.py"))["main"](100)
    assert loss < 0.3
    assert "[8, 9, 10, 11, 12]" in capsys.readouterr().out


def test_plain_trainer_learns() -> None:
    main = runpy.run_path(str(EXAMPLES / "plain_trainer.py"))["main"]
    assert main(60) < main(2) - 0.5


@pytest.fixture
def documented_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The strategy and the YAML of docs/add_a_strategy.md, in a folder of their own, with a corpus beside them."""
    page = (ROOT / "docs" / "add_a_strategy.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (config,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "shared_values.py").write_text(code, encoding="utf-8")
    (tmp_path / "shared_values.yaml").write_text(config, encoding="utf-8")
    (tmp_path / "small.yaml").write_text(
        """
model:
  backbone:
    {vocab_size: 300, d_model: 16, n_layers: 4, d_ff: 24, attention: {init_args: {n_heads: 2, head_dim: 8}}}
data:
  source: {class_path: Files, init_args: {files: [corpus/*.txt]}}
  tokenizer: {name: train, vocab_size: 300}
  holdout_every: 4
  seq_len: 16
  budget: {tokens: 256, global_batch_sequences: 4, micro_batch: 2}
trainer: {accelerator: cpu, devices: 1, enable_progress_bar: false}
""",
        encoding="utf-8",
    )
    (tmp_path / "corpus").mkdir()
    for number in range(12):
        text = " ".join(f"{number} and {i} are {number + i}." for i in range(60))
        (tmp_path / "corpus" / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("shared_values", None)


def test_a_strategy_outside_the_package_is_audited_trained_and_tested(
    documented_strategy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvpath(["audit", "-c", "model/98m", "-c", "shared_values.yaml", "--format", "csv"]) == 0
    # Keys in 12 layers and values in 6, of 8 heads of 64.
    assert f",{(12 + 6) * 8 * 64}," in capsys.readouterr().out
    assert kvpath(["fit", "-c", "shared_values.yaml", "-c", "small.yaml", "--run", "runs/shared"]) == 0
    assert kvpath(["test", "--ckpt_path", "runs/shared"]) == 0
    assert "corpus" in capsys.readouterr().out
    assert (documented_strategy / "runs" / "shared" / "perplexity.json").exists()
