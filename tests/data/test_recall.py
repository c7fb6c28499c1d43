"""Recall and passkeys, read as a person would: each label is what the sequence says before it."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kvpath.data.loaders import EvaluationSchedule, StepLoader
from kvpath.data.packing import IGNORE
from kvpath.data.retrieval import Passkey, Recall, Task
from kvpath.data.retrieval.evaluation import tasks_at
from kvpath.data.retrieval.examples import Cell, Examples
from kvpath.data.tokenizer import Tokenizer, TokenizerConfig
from kvpath.errors import UserError

CONTEXT = 48


def byte_tokenizer() -> Tokenizer:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|endoftext|>", *alphabet])}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner, "<|endoftext|>")


def own(task: Task) -> Tokenizer:
    tokenizer = task.tokenizer("train")
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("cell", [None, Cell(n_keys=3), Cell(n_keys=7)])
def test_the_label_of_a_key_is_the_value_that_followed_it(cell: Cell | None) -> None:
    task = Recall(n_keys=[3, 7], keys=12, values=5)
    tokenizer, found = own(task), set()
    for i in range(40):
        tokens, labels = task.examples(tokenizer, "test", CONTEXT, cell).window(i)
        words = [tokenizer.decode([token]) for token in tokens]
        n = next(place for place in range(0, CONTEXT, 2) if words[place][0] != "k" or words[place + 1][0] != "v") // 2
        pairs = dict(zip(words[0 : 2 * n : 2], words[1 : 2 * n : 2], strict=True))
        asked = {place: word for place, word in enumerate(words) if place >= 2 * n and word != "."}
        assert len(pairs) == n
        assert sorted(asked.values()) == sorted(pairs)
        scored = {place: tokenizer.decode([label]) for place, label in enumerate(labels) if label != IGNORE}
        assert scored == {place: pairs[key] for place, key in asked.items()}
        found.add(n)
    assert found == ({3, 7} if cell is None else {cell.n_keys})


def test_keys_values_places_and_order_are_drawn_evenly() -> None:
    task = Recall(n_keys=[4], keys=8, values=4, n_examples=2000)
    tokens, labels = task.examples(own(task), "train", 20).batch(list(range(2000)))
    places = (labels != IGNORE).sum(0)
    assert np.all(places[:8] == 0)
    # 2000 x 4 of 12 places, of 8 keys, of 4 values: within five standard deviations
    assert np.all(np.abs(places[8:] - 2000 / 3) < 5 * (2000 * 2 / 9) ** 0.5)
    assert np.all(np.abs(np.bincount(tokens[:, 0], minlength=10)[2:10] - 250) < 5 * (250 * 7 / 8) ** 0.5)
    assert np.all(np.abs(np.bincount(tokens[:, 1] - 10, minlength=4) - 500) < 5 * (500 * 3 / 4) ** 0.5)
    first_asked = np.array([row[8:][row[8:] != 1][0] for row in tokens])
    of_pair = (first_asked[:, None] == tokens[:, 0:8:2]).argmax(1)
    assert np.all(np.abs(np.bincount(of_pair, minlength=4) - 500) < 5 * (500 * 3 / 4) ** 0.5)


@pytest.mark.parametrize("tokenizer", [None, byte_tokenizer()])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_passkey_stands_once_at_its_depth_and_is_asked_for_at_the_end(
    tokenizer: Tokenizer | None, depth: float
) -> None:
    task = Passkey(digits=4, depths=[depth])
    tokenizer = tokenizer or own(task)
    context = 200 if tokenizer.vocab_size < 100 else 900
    for i in range(20):
        tokens, labels = task.examples(tokenizer, "test", context, Cell(depth=depth)).window(i)
        assert np.all(labels[:-4] == IGNORE)
        answer = tokenizer.decode(labels[-4:].tolist()).replace(" ", "")
        assert answer.isdigit()
        assert len(answer) == 4
        text = " " + tokenizer.decode([*tokens.tolist(), int(labels[-1])]).replace(" ", "")
        before, *between, after = text.split("Thepasskeyis")
        assert len(between) == 1
        assert between[0].startswith(f"{answer}.Rememberthepasskey.")
        assert after == answer
        assert tokens[-3:].tolist() == labels[-4:-1].tolist()
        share = len(before) / (len(before) + len(between[0]) - len(f"{answer}.Rememberthepasskey."))
        assert share == pytest.approx(depth, abs=0.05)


def test_training_draws_depths_and_no_two_keys_alike() -> None:
    task = Passkey()
    tokenizer = own(task)
    tokens, labels = task.examples(tokenizer, "train", 100).batch(list(range(200)))
    keys = {tuple(row[-5:]) for row in labels}
    assert len(keys) > 190
    is_ = tokenizer.encode("pass key is")
    depths = [next(i for i in range(100) if row[i : i + 3].tolist() == is_) for row in tokens]
    assert len(set(depths)) > 5


@pytest.mark.parametrize("task", [Recall(), Passkey()], ids=["recall", "passkey"])
def test_a_sequence_depends_on_seed_region_and_number_alone(task: Task) -> None:
    tokenizer = own(task)
    whole = task.examples(tokenizer, "train", 64).batch(list(range(10)))
    again = pickle.loads(pickle.dumps(task.examples(tokenizer, "train", 64)))
    for i in (7, 2):
        assert all(np.array_equal(one[i], other) for one, other in zip(whole, again.window(i), strict=True))
    for region in ("validation", "test"):
        assert not np.array_equal(task.examples(tokenizer, region, 64).window(0)[0], whole[0][0])
    other = type(task)(seed=1)
    assert not np.array_equal(other.examples(tokenizer, "train", 64).window(0)[0], whole[0][0])
    tokens, labels = again.batch([-1, task.n_examples])
    assert not tokens.any()
    assert np.all(labels == IGNORE)


def test_what_a_seed_stands_for_does_not_change() -> None:
    """Results of different versions compare as long as these numbers stay."""
    tokens, _ = Recall(n_keys=[2], keys=8, values=8).examples(own(Recall(keys=8, values=8)), "test", 8).window(1)
    key = Passkey().examples(own(Passkey()), "test", 64).window(1)[1][-5:]
    assert (tokens.tolist(), key.tolist()) == (RECALL, PASSKEY)


RECALL, PASSKEY = [4, 11, 9, 15, 9, 1, 1, 4], [10, 5, 5, 2, 9]


def test_each_cell_and_context_has_its_fingerprint_and_counts_its_labels() -> None:
    task = Recall(n_keys=[2, 5], eval_examples=7)
    found = [known for known, _ in tasks_at([16, 32], task, "test", own(task), False)]
    assert [(known.context, known.n_keys, known.n_tokens) for known in found] == [
        (16, 2, 14),
        (16, 5, 35),
        (32, 2, 14),
        (32, 5, 35),
    ]
    assert len({known.fingerprint for known in found}) == 4
    again = [known for known, _ in tasks_at([16, 32], task, "test", own(task), True, "mine")]
    assert [known.fingerprint for known in again] == [known.fingerprint for known in found]
    assert again[0].stated()["task"] == "mine, through the cache"


def test_two_ranks_read_each_sequence_once() -> None:
    task = Recall(eval_examples=11)
    examples: Examples = task.examples(own(task), "test", 64, Cell(n_keys=4))
    read = []
    for rank in range(2):
        for batch in StepLoader(examples, EvaluationSchedule(11, 3, rank, 2)):
            read += [
                tuple(row)
                for row, asked in zip(batch["tokens"].tolist(), batch["labels"], strict=True)
                if (asked != IGNORE).any()
            ]
    assert sorted(read) == sorted(map(tuple, examples.batch(list(range(11)))[0].tolist()))


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (Recall(n_keys=[]), "n_keys must name numbers of at least 1, got []"),
        (Recall(n_keys=[0, 2]), "n_keys must name numbers of at least 1, got [0, 2]"),
        (Recall(n_keys=[4, 9], keys=8), "keys must be at least the largest of n_keys [4, 9], got 8"),
        (Recall(values=1), "values must be at least 2, got 1"),
        (Recall(eval_examples=0), "eval_examples must be at least 1, got 0"),
        (Recall(seed=-1), "seed must be at least 0, got -1"),
        (Passkey(depths=[0.5, 1.5]), "depths must name numbers from 0 to 1, got [0.5, 1.5]"),
        (Passkey(depths=[]), "depths must name numbers from 0 to 1, got []"),
        (Passkey(digits=0), "digits must be at least 1, got 0"),
    ],
)
def test_bad_fields_are_named(task: Task, problem: str) -> None:
    assert list(task.problems()) == [problem]


def test_what_does_not_fit_is_refused() -> None:
    task = Recall(n_keys=[4, 16])
    with pytest.raises(UserError, match="recall: n_keys 16 need sequences of 48 tokens, got 47"):
        task.examples(own(task), "train", 47)
    with pytest.raises(UserError, match="recall: keys 128 and values 128 make another vocabulary than data.tokenizer"):
        task.examples(byte_tokenizer(), "train", 48)
    with pytest.raises(UserError, match="need sequences of 23 tokens, got 22"):
        Passkey().examples(own(Passkey()), "test", 22)
    with pytest.raises(UserError, match="no token of its own for each of the ten digits"):
        Passkey().examples(own(task), "test", 64)
    with pytest.raises(UserError, match="source passkey makes sequences of tokens, and has no text"):
        Passkey().documents()


def test_its_tokenizer_is_the_same_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    own(Recall()).save(path)
    assert TokenizerConfig(str(path)).load().fingerprint == own(Recall()).fingerprint
