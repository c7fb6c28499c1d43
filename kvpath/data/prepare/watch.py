"""How far preparing is, at which rate, and how long it will take."""

import math
import sys
import time

from kvpath.data.prepare.worker import Progress


class Watch:
    """Progress on standard error: one line that is written over on a terminal, else a line every half a minute.

    Args:
        progress: of the workers.
        sizes: bytes of each part to be made, as far as they are known.
        parts: their numbers.
    """

    def __init__(self, progress: Progress, sizes: list[int | None], parts: list[int]) -> None:
        self._progress, self._parts = progress, parts
        known = [size for size in sizes if size is not None]
        self._weights = [float(size) for size in known] if len(known) == len(parts) else [1.0] * len(parts)
        self._terminal = sys.stderr.isatty()
        self.seconds = 1.0 if self._terminal else 30.0
        self._started = time.monotonic()

    @property
    def fraction(self) -> float | None:
        """How much of the parts has been read, if that is known."""
        read = [self._progress.fractions[part] for part in self._parts]
        if any(math.isnan(fraction) for fraction in read):
            return None
        return sum(w * f for w, f in zip(self._weights, read, strict=True)) / sum(self._weights)

    def say(self, at_end: bool = False) -> None:
        """One line."""
        documents, tokens, text_bytes, _ = self._progress.counts[:]
        seconds = max(1e-9, time.monotonic() - self._started)
        line = (
            f"{documents:,} documents, {tokens:,} tokens;"
            f" {tokens / seconds:,.0f} tokens/s, {text_bytes / 1e6 / seconds:,.2f} MB/s"
        )
        fraction = self.fraction
        if fraction and not at_end:
            line += f"; {fraction:.0%}, {_duration(seconds / fraction - seconds)} left"
        end = "\r" if self._terminal and not at_end else "\n"
        print(f"{line:<100}" if self._terminal else line, end=end, file=sys.stderr, flush=True)

    @property
    def bytes_left(self) -> int | None:
        """Bytes of files still to be written, about."""
        written, fraction = self._progress.counts[3], self.fraction
        return int(written / fraction - written) if fraction and written else None


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"
