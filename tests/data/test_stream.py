"""A stream is dealt to lanes: the same for any number of ranks and workers, and from any step on."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvpath.data.budget import Budget
from kvpath.data.corpus import Split, TokenCorpus, build_corpus
from kvpath.data.lane_reader import StreamSettings
from kvpath.data.loaders import Batch
from kvpath.data.packing import IGNORE
from kvpath.data.record import StreamRecord, as_hex
from kvpath.data.sources import Files, files
from kvpath.data.stream import StreamLoader
from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError

SEQ_LEN, SEQUENCES, STEPS = 40, 6, 9
SPLIT = Split(5)
Both = tuple[Tensor, Tensor]


@pytest.fixture
def settings(source: Files, tokenizer: Tokenizer) -> StreamSettings:
    return StreamSettings(source, tokenizer, SPLIT, SEQ_LEN, lanes=12)


def loader(
    settings: StreamSettings,
    ranks: int = 1,
    rank: int = 0,
    workers: int = 0,
    steps: range = range(STEPS),
    record: StreamRecord | None = None,
) -> StreamLoader:
    plan = Budget(STEPS * SEQUENCES * SEQ_LEN, SEQUENCES, micro_batch=1).plan(SEQ_LEN, ranks)
    return StreamLoader(
        settings, plan, rank, lambda: steps, record or StreamRecord(), lambda: steps.start, num_workers=workers
    )


def streamed(settings: StreamSettings, ranks: int = 1, workers: int = 0, steps: range = range(STEPS)) -> Both:
    """Tokens and labels of all ranks together, in the global order, (steps, sequences, seq_len)."""
    batches = [list(loader(settings, ranks, rank, workers, steps)) for rank in range(ranks)]
    assert {len(of_rank) for of_rank in batches} == {len(steps)}
    assert batches[0][0]["tokens"].shape == (SEQUENCES // ranks, 1, SEQ_LEN)
    tokens, labels = (
        torch.stack(
            [
                torch.stack([b[name].flatten(0, 1) for b in step], dim=1).flatten(0, 1)
                for step in zip(*batches, strict=True)
            ]
        )
        for name in ("tokens", "labels")
    )
    return tokens, labels


def until_its_end(batches: StreamLoader) -> tuple[list[Batch], str]:
    """What comes before the error, and the error."""
    given: list[Batch] = []
    try:
        given.extend(batches)
    except UserError as error:
        return given, str(error)
    raise AssertionError("it does not end")


def training(settings: StreamSettings) -> TokenCorpus:
    return build_corpus(settings.source, settings.tokenizer, SPLIT)["train"]


def lane_tokens(settings: StreamSettings, lane: int, epochs: int) -> Tensor:
    """The tokens of a lane's documents, as many times over."""
    corpus = training(settings)
    bounds = corpus.offsets[:].astype(int)
    own = [corpus.tokens[bounds[i] : bounds[i + 1]] for i in range(lane, len(bounds) - 1, settings.lanes)]
    return torch.from_numpy(np.concatenate(own * epochs).astype("int64"))


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0), (2, 3), (3, 2)])
def test_every_sequence_comes_from_its_lane_without_loss(settings: StreamSettings, ranks: int, workers: int) -> None:
    tokens, labels = (part.flatten(0, 1) for part in streamed(settings, ranks, workers))
    for lane in range(settings.lanes):
        own, of_labels = (part[lane :: settings.lanes].flatten() for part in (tokens, labels))
        endless = lane_tokens(settings, lane, 40)
        assert torch.equal(own, endless[: len(own)])
        assert torch.equal(of_labels, endless[1 : len(own) + 1])


def test_one_lane_is_the_training_region(settings: StreamSettings) -> None:
    tokens, labels = streamed(replace(settings, lanes=1))
    once = torch.from_numpy(training(settings).tokens[:].astype("int64"))
    assert len(once) < tokens.numel()  # so that it comes round again within the run
    assert torch.equal(tokens.flatten(), torch.cat([once] * 4)[: tokens.numel()])
    assert torch.equal(labels.flatten(), torch.cat([once] * 4)[1 : tokens.numel() + 1])


@pytest.mark.parametrize("workers", [0, 2])
def test_best_fit_packs_each_group_of_a_lane_whole(settings: StreamSettings, workers: int) -> None:
    packed = replace(settings, lanes=2, group=5, repeat=False)
    batches, error = until_its_end(loader(packed, workers=workers))
    assert "ends in step" in error
    tokens, labels = ([batch[name].flatten(0, 1) for batch in batches] for name in ("tokens", "labels"))
    end = settings.tokenizer.end_of_text
    corpus = training(settings)
    bounds = corpus.offsets[:].astype(int)
    documents = {tuple(corpus.tokens[a:b].tolist()) for a, b in zip(bounds[:-1], bounds[1:], strict=True)}
    whole = 0
    for row, of_row in zip(torch.cat(tokens), torch.cat(labels), strict=True):
        scored = of_row != IGNORE
        assert torch.equal(of_row[:-1][scored[:-1]], row[1:][scored[:-1]])
        pieces = "".join(map(chr, row.tolist())).split(chr(end))[:-1]
        whole += sum(tuple(map(ord, piece + chr(end))) in documents for piece in pieces)
    assert whole > 10


@pytest.mark.parametrize("group", [None, 4])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 2)])
def test_a_resume_by_the_record_tokenises_little_and_is_exact(
    settings: StreamSettings, group: int | None, ranks: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(settings, group=group, lanes=4)
    whole, _ = streamed(settings)
    hashes: list[Tensor] = []
    for rank in range(ranks):
        record = StreamRecord()
        given = loader(settings, ranks, rank, workers, record=record)
        for _, _ in zip(range(5), given, strict=False):
            pass
        places = record.places(4)  # one batch was fetched ahead
        assert places is not None
        hash_4 = record.own_hash(4, rank)
        assert hash_4 is not None
        again = StreamRecord(4, int(hash_4.item()) % 2**64 if rank == 0 else 0, places)
        seen = count_tokenised(monkeypatch)
        # workers may be others
        rest = list(loader(settings, ranks, rank, 0, range(4, 6), again))
        assert sum(seen) < 24 + 8 * settings.lanes  # of the 3 epochs before it, nothing
        for step, batch in enumerate(rest, 4):
            assert torch.equal(batch["tokens"].flatten(0, 1), whole[step][rank::ranks])
        after = again.own_hash(6, rank)
        assert after is not None
        hashes.append(after if rank == 0 else after + (hash_4))
    reference = StreamRecord()
    list(loader(settings, steps=range(6), record=reference))
    expected = reference.own_hash(6, 0)
    assert expected is not None
    assert as_hex(sum(hashes[1:], start=hashes[0])) == as_hex(expected)


def count_tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Documents of each batch that is tokenised from now on."""
    seen: list[int] = []
    encode: Callable[..., tuple[np.ndarray, np.ndarray]] = Tokenizer.encode_joined

    def counted(self: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        seen.append(len(texts))
        return encode(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_joined", counted)
    return seen


@pytest.fixture
def parted(settings: StreamSettings, documents: list[str], tmp_path: Path) -> StreamSettings:
    """The same documents in eight files."""
    for k in range(8):
        rows = (json.dumps({"text": text}) + "\n" for text in documents[5 * k : 5 * k + 5])
        (tmp_path / f"part-{k}.jsonl").write_text("".join(rows), encoding="utf-8")
    return replace(settings, source=Files([str(tmp_path / "part-*.jsonl")]), lanes=4)


@pytest.mark.parametrize("group", [None, 3])
def test_a_resume_opens_no_file_before_those_that_its_lanes_are_in(
    parted: StreamSettings, group: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    read = files.read_texts

    def seen(path: Path, *arguments: Any) -> Iterator[str]:
        opened.append(path.name)
        return read(path, *arguments)

    settings = replace(parted, group=group)
    whole, _ = streamed(settings)
    monkeypatch.setattr(files, "read_texts", seen)
    begun_at = []
    for step in range(1, 6):
        record = StreamRecord()
        list(loader(settings, steps=range(step), record=record))
        places = record.places(step)
        assert places is not None
        for known in (places, places[:, :3]):  # without the part, as older checkpoints are, from the first on
            opened.clear()
            (batch,) = loader(settings, steps=range(step, step + 1), record=StreamRecord(step, None, known))
            assert torch.equal(batch["tokens"].flatten(0, 1), whole[step])
            begun_at.append(int(opened[0][5]))
        in_first_epoch = places[places[:, 0] == places[:, 0].min()]
        assert begun_at[-2:] == [in_first_epoch[:, 3].min(), 0]
    assert max(begun_at) > 2


def test_bad_documents_are_said_by_part_and_by_one_reader(
    parted: StreamSettings, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in parted.source.paths()[2:4]:  # type: ignore[attr-defined]
        with path.open("a") as file:
            file.write("not JSON\n")
    source = replace(parted.source, bad_documents="skip")  # type: ignore[type-var]
    until_its_end(loader(replace(parted, source=source, repeat=False), workers=2))
    said = [line for line in capfd.readouterr().err.splitlines() if "decoded" in line]
    assert said == [f"{source.label}, part {k} of 8: 1 documents could not be decoded: skipped" for k in (3, 4)]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 2)])
def test_without_a_record_going_on_is_exact_too(settings: StreamSettings, ranks: int, workers: int) -> None:
    whole, _ = streamed(settings)
    rest, _ = streamed(settings, ranks, workers, steps=range(4, STEPS))
    assert torch.equal(rest, whole[4:])


def test_too_few_documents(settings: StreamSettings) -> None:
    with pytest.raises(UserError, match="no document is left to train on"):
        replace(settings, source=replace(settings.source, max_documents=1)).check()  # type: ignore[type-var]
    with pytest.raises(UserError, match="24 training documents are fewer than data.lanes 25; data.lanes must be 24 at"):
        replace(settings, lanes=25).check()
    replace(settings, lanes=24).check()


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 2)])
def test_tokens_to_pass_over_are_cut_off_each_lane(settings: StreamSettings, ranks: int, workers: int) -> None:
    lanes = settings.lanes
    for each in (1, SEQ_LEN, 3 * SEQ_LEN + 7):
        tokens = streamed(replace(settings, start_tokens=each * lanes - 2), ranks, workers, range(2))[0].flatten(0, 1)
        for lane in range(lanes):
            assert torch.equal(tokens[lane], lane_tokens(settings, lane, 9)[each : each + SEQ_LEN])


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2)])
@pytest.mark.parametrize("start_tokens", [0, 300])
def test_each_later_epoch_is_one_line(
    settings: StreamSettings, ranks: int, workers: int, start_tokens: int, capfd: pytest.CaptureFixture[str]
) -> None:
    # with two workers there are two lanes, of which the first is spoken for
    lanes = max(1, workers)
    streamed(replace(settings, start_tokens=start_tokens, lanes=lanes), ranks, workers)
    n = SEQUENCES * SEQ_LEN // lanes
    length = len(lane_tokens(replace(settings, lanes=lanes), 0, 1))
    first = (length - start_tokens // lanes) // n  # the step, from 0, that reads the first token of the second epoch
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"epoch 2 of the training data begins in step {first + 1}"
    assert len(lines) == (start_tokens // lanes + STEPS * n - 1) // length
    # a resume reads what came before once more, and says nothing of it
    streamed(replace(settings, start_tokens=start_tokens, lanes=lanes), ranks, workers, range(first + 1, first + 2))
    assert "epoch 2" not in capfd.readouterr().err


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_may_not_repeat_gives_its_whole_steps_and_ends_in_one_line(
    settings: StreamSettings, workers: int
) -> None:
    once = replace(settings, lanes=2, repeat=False)
    shortest = min(len(lane_tokens(once, lane, 1)) for lane in range(2))
    whole_steps = (shortest - 1) // SEQ_LEN * 2 // SEQUENCES
    given, error = until_its_end(loader(once, workers=workers))
    assert len(given) == whole_steps
    assert error == (
        f"source {settings.source.label} ends in step {whole_steps + 1} of {STEPS}, before data.budget.tokens"
        f" {STEPS * SEQUENCES * SEQ_LEN}; data.repeat: true begins a second epoch"
    )
