import torch

from kvpath.analysis.live_bytes import LiveBytes


def test_what_was_there_and_what_is_gone_does_not_count() -> None:
    before = torch.zeros(100)
    with LiveBytes() as live:
        views = [before[:50], before.view(10, 10), torch.split(before, 10)]
        assert (live.now, live.peak) == (0, 0)
        kept = torch.zeros(1000, dtype=torch.float64)
        gone = kept + 1
        views.append(gone[:1])
        del gone
        assert live.now == 16_000
        del views
        assert live.now == 8_000
        kept.add_(1)
    assert live.peak == 16_000


def test_what_a_graph_holds_counts_until_it_is_gone() -> None:
    weight = torch.ones(1000, requires_grad=True)
    with LiveBytes() as live:
        out = (weight * 2).exp().sum()
        assert live.now == 4_004  # of the exponentials, which the backward pass needs, and the sum
        out.backward()
        del out
        assert live.now == 4_000  # the gradient


def test_tensors_without_memory_count_only_where_they_are_asked_for() -> None:
    with LiveBytes("cpu") as live:
        kept = [torch.zeros(10), torch.zeros(1000, device="meta")]
        assert live.now == 40
    with LiveBytes() as live:
        kept.append(torch.zeros(1000, device="meta"))
    assert live.peak == 4_000
