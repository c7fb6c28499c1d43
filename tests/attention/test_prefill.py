import pytest

from kvpath.attention.layout import Layout
from kvpath.attention.prefill import PrefillPlan, prefill_plan
from tests.attention.strategies import LocalHistory, RunningState, SharedUpper, WindowedGQA
from tests.cases import SHIPPED, Case

LENGTH = 100_000


def layout_of(attention: LocalHistory | RunningState | SharedUpper | WindowedGQA, n_layers: int) -> Layout:
    return Case("", attention, n_layers).config().layout()


def local_history(upper: int, window: int, share: int) -> Layout:
    """One lower layer, then `upper` ones."""
    local = LocalHistory(n_heads=1, n_kv_heads=1, head_dim=2, window=window, middle=1, share=share, d_source=4)
    return layout_of(local, 1 + upper)


STORING_EVERYWHERE = [case for case in SHIPPED if all(entry.makes for entry in case.config().layout().layers)]


@pytest.mark.parametrize("case", STORING_EVERYWHERE, ids=str)
def test_layers_that_store_all_tokens_are_computed_whole_but_for_the_top(case: Case) -> None:
    plan = prefill_plan(case.config().layout(), 9, 2)
    assert plan.inputs == (9,) * case.n_layers
    assert plan.computed == (*(9,) * (case.n_layers - 1), 2)
    assert set(plan.formed.values()) == {9}


def test_windows() -> None:
    layout = layout_of(WindowedGQA(n_heads=1, n_kv_heads=1, head_dim=2, window=3), 3)
    # Layer 2 has a window of 3, layer 1 sees all, layer 0 has a window but must compute all for layer 1.
    plan = prefill_plan(layout, 20, 2)
    assert plan.computed == (20, 4, 2)
    assert plan.inputs == (20, 20, 4)
    assert [plan.formed[layer, "k"] for layer in range(3)] == [20, 20, 4]


def test_upper_layers_that_only_read_compute_what_is_wanted() -> None:
    layout = layout_of(SharedUpper(n_heads=1, n_kv_heads=1, head_dim=2, window=3, middle=2), 6)
    plan = prefill_plan(layout, 20, 1)
    assert plan.computed == (20, 20, 1, 1, 1, 1)
    assert plan.inputs == (20, 20, 20, 1, 1, 1)


def test_a_window_holds_its_tokens_even_if_none_is_wanted_of_its_layer_but_the_last() -> None:
    plan = prefill_plan(local_history(upper=1, window=5, share=1), 20, 1)
    assert plan.formed[1, "k_local"] == 5


def test_no_more_positions_than_there_are() -> None:
    plan = prefill_plan(local_history(upper=4, window=5, share=2), 7, 1)
    assert max(plan.inputs) == max(plan.formed.values()) == max(plan.received.values()) == 7


def upper_sums(plan: PrefillPlan) -> tuple[int, int]:
    formed = sum(count for (_, name), count in plan.formed.items() if name == "k_local")
    return formed, sum(plan.computed[1:])


@pytest.mark.parametrize(
    ("share", "expected"), [(1, (4_580, 3_564)), (2, (2_548, 1_532))], ids=["own-sources", "shared-by-pairs"]
)
def test_local_history_of_the_paper(share: int, expected: tuple[int, int]) -> None:
    """Eight upper layers, a window of 128: positions formed and computed, summed over the upper layers."""
    assert upper_sums(prefill_plan(local_history(upper=8, window=128, share=share), LENGTH, 1)) == expected


def test_a_source_is_received_where_its_reader_forms_its_window() -> None:
    plan = prefill_plan(local_history(upper=4, window=5, share=2), LENGTH, 1)
    assert plan.received == {(2, 1, "source"): 9, (4, 3, "source"): 5}
    assert plan.inputs == (LENGTH, LENGTH, 5, 5, 1)
    assert plan.computed == (LENGTH, 5, 5, 1, 1)
    assert [plan.formed[layer, "k_local"] for layer in range(1, 5)] == [9, 9, 5, 5]


def test_a_state_that_is_rebuilt_spans_all() -> None:
    plan = prefill_plan(layout_of(RunningState(n_heads=1, n_kv_heads=1, head_dim=2, delta_dim=1), 3), 20, 1)
    assert plan.formed[1, "k_state"] == plan.formed[2, "delta"] == 20
