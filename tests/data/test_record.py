"""The hash of a stream tells any two streams apart, and adds up over ranks and attempts."""

import numpy as np
import pytest
import torch

from kvpath.data.record import StreamRecord, as_hex, stream_digest

STEPS, SEQUENCES, LENGTH = 5, 6, 8
STREAM = np.random.default_rng(0).integers(0, 300, (STEPS * SEQUENCES, LENGTH))


def hashed(stream: np.ndarray, ranks: int = 1, strided: bool = False, steps: range = range(STEPS)) -> str:
    """Of the steps so far, from shares of each rank."""
    shares = []
    for rank in range(ranks):
        record = StreamRecord(steps.start)
        record.begin(steps.start)
        for step in steps:
            places = np.arange(step * SEQUENCES, (step + 1) * SEQUENCES)
            own = places[rank::ranks] if strided else np.split(places, ranks)[rank]
            record.add(stream[own], own)
        share = record.own_hash(steps.stop, rank)
        assert share is not None
        shares.append(share)
    return as_hex(torch.stack(shares).sum())


def test_ranks_and_how_they_share_do_not_matter() -> None:
    assert len(hashed(STREAM)) == 16
    assert {hashed(STREAM, ranks, strided) for ranks in (1, 2, 3) for strided in (False, True)} == {hashed(STREAM)}


@pytest.mark.parametrize("change", ["token", "two tokens", "two sequences", "two steps", "shorter"])
def test_any_change_is_another_hash(change: str) -> None:
    other, steps = STREAM.copy(), range(STEPS)
    if change == "token":
        other[7, 3] += 1
    elif change == "two tokens":
        other[7, [2, 3]] = other[7, [3, 2]]
    elif change == "two sequences":
        other[[3, 4]] = other[[4, 3]]
    elif change == "two steps":
        other = np.roll(other, SEQUENCES, axis=0)
    else:
        steps = range(STEPS - 1)
    assert hashed(other, steps=steps) != hashed(STREAM)


def test_repeated_sequences_do_not_cancel() -> None:
    same = np.tile(STREAM[:1], (4, 1))
    digests = {stream_digest(same[:n], np.arange(n)) for n in range(5)}
    assert len(digests) == 5


def test_it_goes_on_from_a_state() -> None:
    record = StreamRecord.from_state({"step": 2, "stream_hash": hashed(STREAM, steps=range(2))}, None)
    record.begin(2)
    for step in range(2, STEPS):
        places = np.arange(step * SEQUENCES, (step + 1) * SEQUENCES)
        record.add(STREAM[places], places)
    own = record.own_hash(STEPS, 0)
    assert own is not None
    assert as_hex(own) == hashed(STREAM)


def test_what_is_not_known_is_none() -> None:
    old = StreamRecord.from_state({"training_tokens": 5}, None)
    old.begin(3)
    old.add(STREAM[:1], np.arange(1))
    assert old.own_hash(4, 0) is None
    assert old.places(4) is None
    assert StreamRecord().own_hash(1, 0) is None


def test_only_the_last_steps_are_kept() -> None:
    record = StreamRecord()
    for step in range(50):
        record.add(STREAM[:1], np.arange(step, step + 1))
    assert record.own_hash(46, 0) is None
    assert record.own_hash(49, 0) is not None
