"""Token by token to text: no half characters, and nothing of a stop string, ever leaves."""

from collections.abc import Sequence

from kvpath.data.tokenizer import Tokenizer

_UNDECODABLE = "\ufffd"


class Detokeniser:
    """The text of tokens that come one at a time; the bytes of a character that is not whole yet are held back.

    Args:
        tokenizer: what decodes them; without one there is no text.
        before: the tokens before the first, which decide how some tokenizers begin a word.
    """

    def __init__(self, tokenizer: Tokenizer | None, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # A few tokens are context enough; if they end within a character, they would spoil the next one.
        self._ids = list(before[-4:])
        if self._decode(self._ids).endswith(_UNDECODABLE):
            self._ids = []
        self._given = len(self._ids)

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        self._ids.append(token)
        text = self._pending()
        if text.endswith(_UNDECODABLE):
            return ""
        # Only the latest tokens stay, as context of the next.
        self._ids = self._ids[self._given :] if text else self._ids
        self._given = len(self._ids)
        return text

    def finish(self) -> str:
        """What was held back, whole or not."""
        text = self._pending()
        self._given = len(self._ids)
        return text

    def _decode(self, ids: list[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(ids)

    def _pending(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._given])) :]


class StopStrings:
    """Passes text on until one of `strings` stands in it; what may be the beginning of one is held back."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = list(strings)
        self.found = False
        self._held = ""

    def push(self, text: str) -> str:
        """The text that can be passed on: all before a stop string, nothing after one."""
        if self.found:
            return ""
        text = self._held + text
        starts = [start for string in self.strings if (start := text.find(string)) >= 0]
        if starts:
            self.found, self._held = True, ""
            return text[: min(starts)]
        keep = max((_overlap(text, string) for string in self.strings), default=0)
        passed, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return passed

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


class TextRow:
    """The text of one row as its tokens come.

    Args:
        tokenizer: what decodes them; without one there is no text.
        prompt: the row's prompt.
        stop: strings before which the text ends.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokens = Detokeniser(tokenizer, prompt)
        self._stops = StopStrings(stop)
        self.text = ""
        """All text given so far."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stops.found

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        return self._give(self._stops.push(self._tokens.push(token)))

    def finish(self) -> str:
        """The rest, once the last token has come."""
        return self._give(self._stops.push(self._tokens.finish()) + self._stops.finish())

    def _give(self, text: str) -> str:
        self.text += text
        return text


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of `text` that `string` begins with, the whole string excepted."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
