"""The paper's studies at a fraction: budgets are matched, and at a scale of 1 they are the paper's own."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kvpath import pieces
from kvpath.analysis.audit import audit
from kvpath.cli.main import main
from kvpath.config import load_config
from kvpath.errors import UserError
from kvpath.series.reproduce import STAGES, STUDIES, Reproduction
from kvpath.series.study import Study

SCALES = [Fraction(1), Fraction(1, 2), Fraction(1, 4)]
STORED = {"main": 6_144, "mla": 1_920}


def written(folder: Path, study: str, scale: Fraction, **changes: Any) -> Study:
    return Study.read(Reproduction(study, scale, folder / "r", **changes).write())


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("study", STORED)
def test_budgets_are_matched(tmp_path: Path, study: str, scale: Fraction) -> None:
    written(tmp_path, study, scale)
    model = str(tmp_path / "r" / "model.yaml")
    found = [
        audit(load_config(model, str(tmp_path / "r" / "attention" / f"{layout}.yaml")).backbone, context=2048)
        for layout in STUDIES[study]
    ]
    # Latents are not scaled, since they serve all heads; heads are.
    stored = STORED[study] * (scale if study == "main" else 1)
    assert [one.stored_elements_per_token for one in found] == [stored] * len(found)
    most = found[0].parameters
    step = 3 * int(512 * scale)  # parameters of one more in one SwiGLU's width
    assert all(most - step < one.parameters <= most for one in found)
    if scale == 1:
        assert {one.parameters for one in found} == {98_710_016 if study == "main" else 99_694_592}


@pytest.mark.parametrize("study", STUDIES)
def test_a_scale_of_one_is_the_paper(tmp_path: Path, study: str) -> None:
    written(tmp_path, study, Fraction(1))
    names = {"model.yaml": "model/98m", **{f"stage/{stage}.yaml": f"stage/{stage}" for stage in STAGES}}
    names |= {f"attention/{layout}.yaml": f"attention/{layout}" for layout in STUDIES[study]}
    for file, name in names.items():
        ours, shipped = pieces.compose([tmp_path / "r" / file]), pieces.compose([pieces.shipped(name)])
        assert numbers(ours) == numbers(shipped), file


def numbers(values: Any) -> Any:
    """YAML has 10.0e9 as text."""
    if isinstance(values, dict):
        return {key: numbers(value) for key, value in values.items()}
    try:
        return float(values)
    except (TypeError, ValueError):
        return values


def test_heads_widths_tokens_and_warm_up_scale_and_dimensions_do_not(tmp_path: Path) -> None:
    written(tmp_path, "main", Fraction(1, 4))
    folder = tmp_path / "r"
    backbone = load_config(str(folder / "model.yaml"), str(folder / "attention/kvpath_concat.yaml")).backbone
    attention: Any = backbone.attention
    assert (backbone.d_model, backbone.n_layers, backbone.d_ff) == (128, 12, 384)
    assert (attention.n_heads, attention.n_kv_heads, attention.head_dim, attention.delta_dim) == (2, 1, 160, 32)
    stage = numbers(pieces.compose([folder / "stage/32k.yaml"]))
    assert stage["data"]["budget"]["tokens"] == 2.5e8
    assert stage["data"]["budget"]["global_batch_sequences"] == 256
    assert stage["model"]["optimizer"]["warmup_steps"] == 25
    assert stage["model"]["optimizer"]["learning_rate"] == 1e-4


def test_tokens_and_a_search_can_be_stated(tmp_path: Path) -> None:
    study = written(tmp_path, "main", Fraction(1, 4), tokens=5e8, seeds=2, search=True)
    stage = numbers(pieces.compose([tmp_path / "r" / "stage/8k.yaml"]))
    assert stage["data"]["budget"]["tokens"] == 5e7
    assert stage["model"]["optimizer"]["warmup_steps"] == 5
    assert len(study.combinations()) == 8
    assert study.search is not None
    assert study.search.change == {"data.budget.tokens": 5e7}
    assert study.search.values == [3e-4, 1e-3, 3e-3]


@pytest.mark.slow
def test_the_vocabulary_of_other_text_is_counted(tmp_path: Path) -> None:
    written(tmp_path, "main", Fraction(1, 2), data=("data/sotu",))
    folder = tmp_path / "r"
    counted = {
        audit(
            load_config(str(folder / "model.yaml"), str(folder / f"attention/{layout}.yaml"), "data/sotu").backbone
        ).parameters
        for layout in ("gqa", "cla", "kvpath_concat")
    }
    assert len(counted) == 1


def test_the_ablations_change_one_number_each(tmp_path: Path) -> None:
    study = written(tmp_path, "ablations", Fraction(1, 2), seeds=1)
    names = [choice.name for choice, _ in study.combinations()]
    assert names == ["concat", "g2", "g8", "g12", "ds16", "ds64"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["main", "--scale", "1/8"], "--scale must leave whole heads of 4: one of 1, 3/4, 1/2, 1/4, got 1/8"),
        (["main", "--scale", "a"], "--scale must be a fraction such as 1/4, got a"),
        (["main", "--scale", "2", "--seeds", "0"], "got 2; --seeds must be positive, got 0"),
        (["all"], "invalid choice: 'all'"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *argv]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_nothing_is_written_over(tmp_path: Path) -> None:
    written(tmp_path, "mla", Fraction(1, 2))
    written(tmp_path, "mla", Fraction(1, 2))
    with pytest.raises(UserError, match="model.yaml is there already, and not of this study"):
        written(tmp_path, "mla", Fraction(1, 4))
