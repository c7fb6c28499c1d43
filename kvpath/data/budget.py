"""How long a run is and how its steps are made up, whatever the number of devices."""

from dataclasses import dataclass

from kvpath.errors import UserError


@dataclass(frozen=True)
class Plan:
    """A run in optimizer steps; the same tokens in the same steps for any number of ranks.

    Args:
        steps: optimizer steps of the whole run.
        accumulation: micro-batches that one rank runs in a step.
        sequences_per_step: sequences of a step, over all ranks.
        sequences_per_rank: sequences of a step that one rank runs: accumulation x micro_batch.
        micro_batch: sequences that run together on one rank.
        tokens_per_step: tokens of a step, over all ranks.
        world_size: number of ranks.
        seq_len: tokens in a sequence.
    """

    steps: int
    accumulation: int
    sequences_per_step: int
    sequences_per_rank: int
    micro_batch: int
    tokens_per_step: int
    world_size: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.steps * self.tokens_per_step

    def describe(self) -> str:
        """One line for people."""
        run = f"{self.steps:,} steps of {self.sequences_per_step:,} x {self.seq_len:,} tokens = {self.tokens:,} tokens"
        return (
            f"{run}; a step is {self.world_size} ranks x {self.accumulation} accumulated x {self.micro_batch} sequences"
        )


@dataclass
class Budget:
    """The size of a run, stated without the machine.

    Args:
        tokens: tokens to train on, rounded to whole steps; 10e9 is fine. Null is one epoch of the corpus.
        global_batch_sequences: sequences in an optimizer step over all ranks. State this or global_batch_tokens.
        global_batch_tokens: the same in tokens: a multiple of seq_len.
        micro_batch: sequences that one rank runs together; memory decides, results do not depend on it.
    """

    tokens: int | float | None = None
    global_batch_sequences: int | None = None
    global_batch_tokens: int | float | None = None
    micro_batch: int = 1

    def plan(self, seq_len: int, world_size: int, corpus_tokens: int | None = None) -> Plan:
        """Steps and accumulation for this number of ranks.

        Args:
            seq_len: tokens in a sequence.
            world_size: number of ranks.
            corpus_tokens: tokens of the training region, for ``tokens`` of None (one epoch, and nothing twice).

        Raises:
            UserError: for what does not fit together, with the nearest values that would.
        """
        UserError.raise_all(self._bad_numbers())
        sequences = self._sequences_per_step(seq_len, world_size)
        tokens_per_step = sequences * seq_len
        return Plan(
            steps=self._steps(tokens_per_step, corpus_tokens),
            accumulation=sequences // (world_size * self.micro_batch),
            sequences_per_step=sequences,
            sequences_per_rank=sequences // world_size,
            micro_batch=self.micro_batch,
            tokens_per_step=tokens_per_step,
            world_size=world_size,
            seq_len=seq_len,
        )

    def _bad_numbers(self) -> list[str]:
        values = {
            "tokens": self.tokens,
            "global_batch_sequences": self.global_batch_sequences,
            "global_batch_tokens": self.global_batch_tokens,
            "micro_batch": self.micro_batch,
        }
        problems = [
            f"budget.{name} must be a whole number of at least 1, got {value}"
            for name, value in values.items()
            if value is not None and (value < 1 or value != int(value))
        ]
        if (self.global_batch_sequences is None) == (self.global_batch_tokens is None):
            problems.append(
                "state exactly one of budget.global_batch_sequences and budget.global_batch_tokens, "
                f"got {self.global_batch_sequences} and {self.global_batch_tokens}"
            )
        return problems

    def _sequences_per_step(self, seq_len: int, world_size: int) -> int:
        """The global batch in sequences, checked to divide over ranks and micro-batches."""
        together = world_size * self.micro_batch
        if self.global_batch_sequences is not None:
            field, size, unit, made_of = "global_batch_sequences", self.global_batch_sequences, together, ""
        else:
            field, size, unit = "global_batch_tokens", int(self.global_batch_tokens or 0), together * seq_len
            made_of = f"seq_len {seq_len} x "
        if size % unit == 0:
            return size * together // unit
        below, above = size // unit * unit, -(-size // unit) * unit
        nearest = f"{below} and {above}" if below else f"{above}"
        raise UserError(
            f"budget.{field} {size} is not a multiple of {made_of}world_size {world_size} x "
            f"budget.micro_batch {self.micro_batch} = {unit}; nearest possible: {nearest}"
            + self._other_micro_batches(size * together / unit / world_size)
        )

    def _other_micro_batches(self, per_rank: float) -> str:
        """Micro-batches, up to the one stated, that would divide this rank's share of the global batch."""
        possible = [m for m in range(1, self.micro_batch) if per_rank == int(per_rank) and per_rank % m == 0]
        return f", or budget.micro_batch {possible[-1]}" if possible else ""

    def _steps(self, tokens_per_step: int, corpus_tokens: int | None) -> int:
        if self.tokens is not None:
            tokens, what = int(self.tokens), "budget.tokens"
            steps = round(tokens / tokens_per_step)
        elif corpus_tokens is not None:
            # the last token is only ever a label
            tokens, what = corpus_tokens - 1, "one epoch of the corpus,"
            steps = tokens // tokens_per_step
        else:
            raise UserError("budget.tokens must be stated: there is no corpus whose length could be taken")
        if tokens < tokens_per_step:
            raise UserError(
                f"{what} {tokens} is under one optimizer step of {tokens_per_step} tokens; "
                "at least one is needed, or a smaller global batch"
            )
        return steps
