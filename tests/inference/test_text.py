import json
import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kvpath.data.tokenizer import Tokenizer, TokenizerConfig
from kvpath.inference.text import Detokeniser, StopStrings, TextRow

TEXT = "naïve Ω 猫 is 🐈‍⬛, \ufffd and\n\ttabs; the end"


@pytest.fixture(scope="module")
def by_bytes() -> Tokenizer:
    """A token for every byte, so that characters are split over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)} | {"<end>": 256}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner, "<end>")


@pytest.fixture(scope="module")
def by_words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Words that carry the space before them; decoding drops the first one."""
    words = ["▁the", "▁key", "▁value", "s", "<end>"]
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="s"))
    inner.decoder = decoders.Metaspace()
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    path.write_text(json.dumps(json.loads(inner.to_str())), encoding="utf-8")
    return TokenizerConfig(str(path), end_of_text="<end>").load()


def pieces(detokeniser: Detokeniser, ids: list[int]) -> list[str]:
    return [*map(detokeniser.push, ids), detokeniser.finish()]


def test_no_piece_holds_half_a_character(by_bytes: Tokenizer) -> None:
    ids = by_bytes.encode(TEXT)
    assert len(ids) == len(TEXT.encode()) > len(TEXT)
    found = pieces(Detokeniser(by_bytes), ids)
    assert "".join(found) == TEXT
    assert {len(piece) for piece in found} <= {0, 1, 2}
    assert all("\ufffd" not in piece for piece in found if "\ufffd" not in TEXT[: TEXT.find(piece) + 1])


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_any_bytes_are_the_text_of_the_whole(by_bytes: Tokenizer, seed: int) -> None:
    ids = random.Random(seed).choices(range(256), k=60)
    assert "".join(pieces(Detokeniser(by_bytes), ids)) == by_bytes.decode(ids)


def test_what_is_left_of_a_character_comes_at_the_end(by_bytes: Tokenizer) -> None:
    assert pieces(Detokeniser(by_bytes), by_bytes.encode("a猫")[:-1]) == ["a", "", "", "\ufffd"]


def test_the_first_word_keeps_its_space(by_words: Tokenizer) -> None:
    assert by_words.decode([1, 2]) == "key value"
    assert pieces(Detokeniser(by_words, before=[0]), [1, 2, 3]) == [" key", " value", "s", ""]
    assert pieces(Detokeniser(by_words), [1, 2, 3]) == ["key", " value", "s", ""]


def test_a_prompt_that_ends_within_a_character(by_bytes: Tokenizer) -> None:
    prompt = by_bytes.encode("猫")[:2]
    assert "".join(pieces(Detokeniser(by_bytes, before=prompt), by_bytes.encode("é ok"))) == "é ok"


@pytest.mark.parametrize(
    ("strings", "texts", "passed", "found"),
    [
        (["END"], ["aE", "N", "D b"], ["a", "", ""], True),
        (["END"], ["aE", "N", "E", "ND"], ["a", "", "EN", ""], True),
        (["aab"], ["aaa", "b"], ["a", ""], True),
        (["xy", "y"], ["ax", "y"], ["a", ""], True),
        (["late", "a"], ["l", "a"], ["", "l"], True),
        (["END"], ["a", "EN"], ["a", ""], False),
        ([], ["a", "b"], ["a", "b"], False),
    ],
)
def test_nothing_of_a_stop_string_passes(strings: list[str], texts: list[str], passed: list[str], found: bool) -> None:
    stops = StopStrings(strings)
    assert [stops.push(text) for text in texts] == passed
    assert stops.found == found
    assert stops.finish() == ("" if found else "".join(texts)[len("".join(passed)) :])
    assert stops.finish() == ""


def test_a_stop_string_spans_tokens_and_characters(by_bytes: Tokenizer) -> None:
    row = TextRow(by_bytes, [], ["猫!"])
    given = []
    for token in by_bytes.encode("a猫b猫!c"):
        given.append(row.push(token))
        if row.stopped:
            break
    assert row.stopped
    assert "".join(given) + row.finish() == row.text == "a猫b"
    assert "猫" not in given[3]


def test_without_a_tokenizer_there_is_no_text() -> None:
    row = TextRow(None, [1, 2], [])
    assert [row.push(3), row.push(4), row.finish(), row.text] == [""] * 4
