import logging

import pytest

from kvpath.analysis.audit import audit, count_parameters, on_meta
from kvpath.analysis.matching import match_d_ff, refuse_unmatched, resolve_widths
from kvpath.errors import UserError
from kvpath.model import Decoder
from tests.analysis.models import ATTENTION, paper

DENSE, LATENT = 98_710_016, 99_694_592


@pytest.mark.parametrize(
    ("name", "parameters", "d_ff"),
    [
        ("gqa", DENSE, 2048),
        ("cla", DENSE, 1024),
        ("concat", DENSE, 1536),
        ("residual", DENSE, 1516),
        ("rolling", DENSE, 1536),
        ("mqa", DENSE, 2176),
        ("mqa_wide", DENSE, 1024),
        ("mha", DENSE, [1878] * 4 + [1877] * 8),
        ("mla", LATENT, 2048),
        ("kvpath_mla", LATENT, [1792] * 10 + [1791] * 2),
    ],
)
def test_widths_of_the_paper(name: str, parameters: int, d_ff: int | list[int]) -> None:
    match = match_d_ff(paper(ATTENTION[name]), parameters)
    assert (match.d_ff, match.left_over) == (d_ff, 0)
    assert count_parameters(on_meta(paper(ATTENTION[name], match.d_ff))) == parameters
    if name == "mha":
        assert sum(match.widths) == 22_528


@pytest.mark.parametrize("multiple", [1, 7, 64])
def test_what_is_left_over_is_told(multiple: int) -> None:
    config = paper(ATTENTION["residual"])
    match = match_d_ff(config, DENSE + 1000, multiple)
    assert all(width % multiple == 0 for width in match.widths)
    assert list(match.widths) == sorted(match.widths, reverse=True)
    assert match.widths[0] - match.widths[-1] in (0, multiple)
    assert count_parameters(on_meta(paper(ATTENTION["residual"], match.d_ff))) + match.left_over == DENSE + 1000
    assert 0 < match.left_over < 3 * 512 * multiple


def test_an_unreachable_count_names_the_nearest() -> None:
    nearest = count_parameters(on_meta(paper(ATTENTION["gqa"], 64)))
    assert match_d_ff(paper(ATTENTION["gqa"]), nearest, 64).d_ff == 64
    with pytest.raises(UserError, match=f"parameters={nearest - 1:,} is reached by no width: .* {nearest:,}, .* 64"):
        match_d_ff(paper(ATTENTION["gqa"]), nearest - 1, 64)
    with pytest.raises(UserError, match="d_ff_multiple must be positive, got 0"):
        match_d_ff(paper(ATTENTION["gqa"]), DENSE, 0)


def test_a_config_that_asks_for_widths_is_resolved() -> None:
    config = paper(ATTENTION["residual"], "match", parameters=DENSE)
    assert resolve_widths(config) == paper(ATTENTION["residual"], 1516, parameters=DENSE)
    assert resolve_widths(resolve_widths(config)) == resolve_widths(config)


def test_left_over_parameters_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolve_widths(paper(ATTENTION["gqa"], "match", parameters=DENSE))
        assert not caplog.messages
        resolve_widths(paper(ATTENTION["gqa"], "match", parameters=DENSE + 5))
    assert caplog.messages == ["d_ff: match comes to 98,710,016 parameters, 5 less than the 98,710,021 asked for"]


def test_widths_that_are_not_solved_are_an_error() -> None:
    with pytest.raises(UserError, match="d_ff: match needs parameters"):
        paper(ATTENTION["gqa"], "match")
    with pytest.raises(UserError, match="d_ff must be a width, a list of widths or 'match', got 'mtach'"):
        paper(ATTENTION["gqa"], "mtach")
    with pytest.raises(UserError, match="d_ff is still 'match'"):
        Decoder(paper(ATTENTION["gqa"], "match", parameters=DENSE))


def test_models_whose_caches_differ_are_not_matched() -> None:
    audits = {name: audit(paper(ATTENTION[name]), name=name) for name in ("gqa", "concat", "mla")}
    refuse_unmatched([audits["gqa"], audits["concat"]])
    with pytest.raises(UserError, match="not matched: stored .* gqa 6,144, concat 6,144, mla 1,920"):
        refuse_unmatched(list(audits.values()))
