import pytest

from kvpath.data.lanes import check_lanes
from kvpath.errors import UserError


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 16), (2, 8), (4, 1), (16, 0)])
def test_what_divides_the_lanes_will_do(ranks: int, workers: int) -> None:
    check_lanes(16, ranks, workers)


def test_what_does_not_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError) as raised:
        check_lanes(16, 2, 3)
    assert str(raised.value) == (
        "data.lanes 16 cannot be dealt to 2 ranks x 3 workers = 6, which does not divide it; nearest that do:"
        " ranks x data.num_workers of 4 or 8; or another stream, with data.lanes 12 or 18"
    )
    with pytest.raises(UserError, match=r"of 4; or another stream, with data\.lanes 5$"):
        check_lanes(4, 5, 0)
