#!/usr/bin/env python
"""What a token costs in decoding, and a prefill: ours, Hugging Face's Llama, and the bound of each, in turn.

    scripts/bench_decode.py                                     # every attention piece over model/98m
    scripts/bench_decode.py -c attention/gqa -c attention/kvpath_concat,ablation/g2 --draw pictures

Each -c is one model, of one piece or of several joined by commas, over --base. Each arm runs in a process of its own
and goes through all cells, all arms in turn, round after round; a pass of over --once seconds has its turn in the first
round alone. Cells: `8K x 4`, a token in each of 4 rows that sees 8K tokens of a cache of random content; `prefill 8K`,
all of a prompt; `1K after 31K`; `4GB of 8K`, a token in each of as many rows of 8K as fit into --memory beside the
weights. Arms: `ours`, by compact modules as in `kvpath.load`; `hf`, transformers' Llama from the weights of the first
model that has its shape, with sdpa and either cache, eager and compiled, of which the best counts.

A cell's bound is the longer of bytes / bandwidth and FLOPs / rate, both measured in the same run: each weight read
once, and what attention must touch of the cache. What misses its aim comes with its profile. The last line is JSON.

Exit codes: 0, 1 if outputs differ, 2 for a wrong argument.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kvpath import UserError, load_config, pieces
from kvpath.analysis.audit import audit, sequences_that_fit
from kvpath.analysis.latency import Timing, draw, fastest, report
from kvpath.analysis.machine import (
    DTYPES,
    QUIET,
    Machine,
    OutOfTime,
    busy_cores,
    largest_costs,
    product_rate,
    time_limit,
)
from kvpath.attention import GQA, AttentionStrategy
from kvpath.cli.audit import bytes_of
from kvpath.config import build_model
from kvpath.inference.memory import free_bytes
from kvpath.inference.subject import Ours, Subject
from kvpath.inference.workload import decoding_work, prefill_work
from kvpath.interop.llama import is_llama
from kvpath.interop.llama_subject import LlamaSubject
from kvpath.model import BackboneConfig, Decoder

SMALL = ("n_layers=2", "d_model=32", "vocab_size=64", "d_ff=64")
"""What --small makes of any model."""

CELLS = ("single", "prefill", "filled")
"""Kinds of passes: a token in each row, a prompt, a token in as many rows as fit."""

SMALLER = 64
"""By what --small divides every length."""

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
"""By how much logits may differ, RMS over RMS."""

AIMS: dict[type[AttentionStrategy], float] = {GQA: 1.5}
OTHER_AIM = 2.5
"""How many times its bound a cell may take."""

SHARE_OF_FREE_MEMORY = 0.7
"""What a cell may fill: some kernels and caches hold a layer twice."""

PROFILED = 4.0
"""Seconds that a pass may take to be run once more for its profile."""


@dataclass(frozen=True)
class Cell:
    """One kind of pass: `new` tokens in each row, of which the last sees `context`."""

    name: str
    context: int
    batch: int | None = 1
    """None for as many as fit."""

    new: int = 1


@dataclass(frozen=True)
class Arm:
    """One thing to be timed."""

    kind: str
    """ours, plain, hf dynamic, hf static or machine"""

    model: str = ""
    """The -c that it runs."""

    compiled: bool = False

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.model, self.kind, "compiled" * self.compiled) if part)


@dataclass
class Found:
    """What one turn found out about one cell, or, without seconds, of another kind."""

    cell: str
    seconds: list[float] = field(default_factory=list)
    """Of each timed pass."""

    batch: int = 1
    cache_bytes: int = 0
    costs: dict[str, float] = field(default_factory=dict)
    """The shares of time of the five largest operations in one more pass."""

    note: str = ""
    """Why there are no seconds, or not for all rows."""

    fitting: int | None = None
    """How many rows fit into the stated memory."""

    difference: float = 0.0
    """Of the logits from those of the plain modules, RMS over RMS."""

    machine: Machine | None = None


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; gives the exit code."""
    args = parse(argv)
    try:
        return child(args) if args.arm else parent(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments; --precision is decided later if it is not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", action="append", metavar="PIECE[,PIECE]", help="a model (all of attention/)")
    parser.add_argument("--base", default="model/98m", metavar="PIECE", help="what they go over (model/98m)")
    parser.add_argument("--also", action="append", default=[], choices=("plain", "compiled"), help="more arms of ours")
    parser.add_argument("--hf", choices=("all", "eager", "none"), help="which arms of Hugging Face's (all)")
    parser.add_argument("--rounds", type=int, default=2, help="how often each arm has its turn (2)")
    parser.add_argument("--tokens", type=int, default=6, help="passes to time in each cell and turn (6)")
    parser.add_argument("--seconds", type=float, default=3.0, help="after which a cell times no further pass (3)")
    parser.add_argument("--once", type=float, default=4.0, help="seconds of a pass that has one turn only (4)")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of a cell, preparing included (90)")
    parser.add_argument("--minutes", type=float, default=18.0, help="after which no further turn begins (18)")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), help="kinds of passes (all)")
    parser.add_argument("--memory", default="4GB", metavar="SIZE", help="to fill with sequences (4GB)")
    parser.add_argument("--precision", choices=tuple(DTYPES), help="bf16, or fp32 where that is faster")
    parser.add_argument("--draw", type=Path, metavar="DIR", help="where to write latency.png and memory.png")
    parser.add_argument("--small", action="store_true", help="toy models, short, all in this process: a quick check")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--skip", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.config = args.config or pieces.directly_in("attention")
    args.hf = args.hf or ("eager" if args.small else "all")
    if args.small:
        args.rounds, args.tokens, args.seconds = 1, 2, 0.0
    for name in ("rounds", "tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    return args


def backbone(args: argparse.Namespace, model: str) -> BackboneConfig:
    """The model of one -c."""
    overrides = [f"--model.backbone.{change}" for change in SMALL] if args.small else []
    return load_config(args.base, *model.split(","), overrides=overrides).backbone


def cells_of(arm: Arm, args: argparse.Namespace) -> list[Cell]:
    """All kinds of passes; single tokens of few rows where each other shape is compiled anew."""
    k = 1024 // SMALLER if args.small else 1024
    kinds = {
        "single": [Cell(f"{n}K x {batch}", n * k, batch) for n, batch in ((1, 1), (8, 1), (32, 1), (1, 8), (8, 8))],
        "prefill": [*(Cell(f"prefill {n}K", n * k, new=n * k) for n in (1, 8)), Cell("1K after 31K", 32 * k, new=k)],
        "filled": [Cell(f"{args.memory} of {n}K", n * k, batch=None) for n in (8, 32)],
    }
    return [cell for kind in args.cells for cell in kinds[kind] if kind == "single" or not arm.compiled]


# One arm, in a process of its own -------------------------------------------------------------------------------------


def child(args: argparse.Namespace) -> int:
    """Measure one arm and print what is found, a line each."""
    for found in measure(Arm(**json.loads(args.arm)), args):
        print(json.dumps(asdict(found)), flush=True)
    return 0


@torch.no_grad()
def measure(arm: Arm, args: argparse.Namespace) -> Iterator[Found]:
    """Compare one arm's outputs, then time its cells."""
    dtype = DTYPES[args.precision]
    if arm.kind == "machine":
        yield Found("machine", machine=Machine.measured(dtype, args.seconds / 6, small=args.small))
        return
    config = backbone(args, arm.model)
    model = build_model(config).to(dtype).eval()
    expected = outputs(model)
    if arm.kind == "ours":
        model.compact()
    mine = arm.kind in ("ours", "plain")
    subject: Subject = Ours(model, arm.compiled) if mine else LlamaSubject(model, "static" in arm.kind, arm.compiled)
    yield Found("outputs", difference=difference(outputs_of(subject, config), expected))
    for cell in cells_of(arm, args):
        if cell.name in args.skip.split(","):
            continue
        try:
            with time_limit(args.limit):
                found = time_cell(subject, cell, config, args)
        except OutOfTime:
            found = Found(cell.name, note=f"over {args.limit:g} s")
        yield found


PROMPT, FOLLOWING = 17, 3

WARM_UP = 2
"""Tokens before those that are timed: the second may compile anew what the first compiled for one length."""


def prompt(config: BackboneConfig, batch: int, length: int) -> Tensor:
    """Token ids (B, T)."""
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))


def outputs(model: Decoder) -> Tensor:
    """The logits of the last tokens of a short text, (T, V), in one pass without a cache."""
    logits_BTV = model(prompt(model.config, 1, PROMPT + FOLLOWING))
    assert isinstance(logits_BTV, Tensor)
    return logits_BTV[0, PROMPT - 1 :, : model.config.vocab_size]


def outputs_of(subject: Subject, config: BackboneConfig) -> Tensor:
    """The same by a prefill and single tokens."""
    tokens_BT = prompt(config, 1, PROMPT + FOLLOWING)
    cache = subject.filled(0, 1, PROMPT + FOLLOWING)
    return torch.cat([subject.step(part, cache) for part in tokens_BT.split([PROMPT, *[1] * FOLLOWING], dim=1)])


def difference(found: Tensor, expected: Tensor) -> float:
    """RMS over RMS."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def time_cell(subject: Subject, cell: Cell, config: BackboneConfig, args: argparse.Namespace) -> Found:
    """Time passes of one kind: single tokens one after the other, chunks each on a cache of its own."""
    found = Found(cell.name, batch=cell.batch or 1)
    if cell.batch is None:
        costs = audit(config, cell.context, dtype=str(DTYPES[args.precision]).removeprefix("torch."))
        fitting = sequences_that_fit(costs, bytes_of(args.memory))
        one_row = costs.allocated_bytes_per_token * cell.context
        here = int((free_bytes("cpu") or 0) * SHARE_OF_FREE_MEMORY / one_row)
        found.batch, found.fitting = min(fitting, here, 16 if args.small else fitting), fitting
        if found.batch < max(fitting, 1):
            found.note = f"room for {found.batch} of {fitting} rows here"
        if found.batch < 1:
            return found
    single = cell.new == 1
    passes = args.tokens + WARM_UP + 1 if single else 1
    tokens_BT = prompt(config, found.batch, cell.new)
    cache: Any = None
    while len(found.seconds) < args.tokens and (not found.seconds or sum(found.seconds) < args.seconds):
        if cache is None or not single:
            cache = None  # before the next is made
            cache = subject.filled(cell.context - cell.new, found.batch, cell.context - cell.new + passes * cell.new)
            if single:
                for _ in range(WARM_UP):
                    subject.step(tokens_BT, cache)
        start = time.perf_counter()
        subject.step(tokens_BT, cache)
        found.seconds.append(time.perf_counter() - start)
    found.cache_bytes = subject.bytes_of(cache)
    if found.seconds[-1] < PROFILED:
        if not single:
            cache = subject.filled(cell.context - cell.new, found.batch, cell.context)
        found.costs = largest_costs(lambda: subject.step(tokens_BT, cache), 5)
    return found


# All arms, in turn ----------------------------------------------------------------------------------------------------

Turns = dict[Arm, dict[str, list[Found]]]
"""What every arm found, by the names of its cells."""


def parent(args: argparse.Namespace) -> int:
    """Let every arm have its turns, then print what they come to."""
    speeds = {name: product_rate(256, 256, 256, dtype, 0.1) / 1e9 for name, dtype in DTYPES.items()}
    slow_bf16 = speeds["bf16"] < speeds["fp32"]
    args.precision = args.precision or ("fp32" if slow_bf16 else "bf16")
    print(f"products: {speeds['bf16']:,.1f} GFLOP/s in bf16, {speeds['fp32']:,.1f} in fp32")
    if slow_bf16:
        print("bf16 is emulated here: its products are slower than those of fp32")
    print(f"precision {args.precision}, {torch.get_num_threads()} threads")

    turns, busy = take_turns(args)
    measured = [found.machine for found in turns.pop(Arm("machine"))["machine"] if found.machine]
    machine = Machine(*(max(getattr(one, rate.name) for one in measured) for rate in fields(Machine)))
    rates = [rate / 1e9 for rate in (machine.bytes_per_s, machine.sum_bytes_per_s, machine.flops_per_s)]
    print("machine: {:,.1f} GB/s ({:,.1f} in sums), {:,.1f} GFLOP/s\n".format(*rates))
    by_arm = {arm: list(summarise(arm, found, machine, args)) for arm, found in turns.items()}
    timings = [timing for of in by_arm.values() for timing in of]
    peers = [timing for arm, of in by_arm.items() if arm.kind.startswith("hf") for timing in of]
    print(report(timings, peers))
    differences = {arm.name: e.difference for arm, found in turns.items() for e in found.get("outputs", [])}
    for name, value in differences.items():
        print(f"logits of {name} differ from those of the plain modules by {value:.1e}")
    equal = all(value <= TOLERANCE[args.precision] for value in differences.values())
    print(f"outputs are {'equal' if equal else 'NOT EQUAL'}")
    if args.draw:
        draw([one for arm, of in by_arm.items() if not arm.kind.startswith("hf") for one in of], peers, args.draw)
    result = {
        "precision": args.precision,
        "bf16_emulated": slow_bf16,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": len(busy),
        "busy_cores": busy,
        "quiet": max(busy) <= QUIET,
        "memory": args.memory,
        **asdict(machine),
        "outputs_equal": equal,
        "differences": differences,
        "aims_met": not any(one.missed for one in timings),
        "not_reached": [f"{one.arm}: {one.cell}" for one in timings if one.seconds is None],
        "hf_best": {cell: one.arm for cell, one in fastest(peers).items()},
        "cells": [one.as_dict() for one in timings],
    }
    print(json.dumps(result))
    return 0 if equal else 1


def take_turns(args: argparse.Namespace) -> tuple[Turns, list[float]]:
    """All rounds; gives what was found, and how many cores others kept busy in each."""
    turns: Turns = {arm: {} for arm in arms(args)}
    busy: list[float] = []
    end = time.monotonic() + 60 * args.minutes
    for turn in range(args.rounds):
        if turn and time.monotonic() > end:
            print(f"no round {turn + 1}: {args.minutes:g} minutes are over")
            break
        busy.append(busy_cores())
        note = "" if busy[-1] <= QUIET else ": NOT QUIET, do not trust these figures"
        print(f"round {turn + 1} of {args.rounds}: {busy[-1]:.2f} cores busy{note}", flush=True)
        for arm, found in turns.items():
            if time.monotonic() > end and arm.kind != "machine":
                continue
            print(f"  {arm.name}", file=sys.stderr, flush=True)
            args.skip = ",".join(name for name, entries in found.items() if done(entries, args))
            for entry in measure(arm, args) if args.small else measure_apart(arm, args):
                found.setdefault(entry.cell, []).append(entry)
                if entry.seconds:
                    shown = f"{entry.cell:14} {1e3 * statistics.median(entry.seconds):10,.1f} ms  {entry.note}"
                    print(f"    {shown}", file=sys.stderr, flush=True)
    return turns, busy


def done(found: Sequence[Found], args: argparse.Namespace) -> bool:
    """Whether a cell has no further turn."""
    return any(entry.note or entry.fitting or max(entry.seconds, default=0.0) > args.once for entry in found)


def arms(args: argparse.Namespace) -> Iterator[Arm]:
    """The arms of a round, those to be compared next to each other."""
    yield Arm("machine")
    without_hf = args.hf != "none"
    for model in args.config:
        yield Arm("ours", model)
        if "plain" in args.also:
            yield Arm("plain", model)
        if "compiled" in args.also:
            yield Arm("ours", model, compiled=True)
        if without_hf and is_llama(backbone(args, model)):
            without_hf = False
            for compiled in (False, True) if args.hf == "all" else (False,):
                for kind in ("hf dynamic", "hf static"):
                    yield Arm(kind, model, compiled)


def measure_apart(arm: Arm, args: argparse.Namespace) -> Iterator[Found]:
    """`measure` in a new process, which holds nothing else; what it found before it failed counts."""
    names = ("base", "tokens", "seconds", "limit", "memory", "precision", "skip")
    flags = [f"--{name}={getattr(args, name)}" for name in names]
    command = [sys.executable, __file__, *flags, "--cells", *args.cells, "--arm", json.dumps(asdict(arm))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found = Found(**json.loads(line))
            found.machine = found.machine and Machine(**cast(Any, found.machine))
            yield found
    if process.returncode:
        print(f"{arm.name}: ended with exit code {process.returncode}", flush=True)


def summarise(arm: Arm, found: dict[str, list[Found]], machine: Machine, args: argparse.Namespace) -> Iterator[Timing]:
    """What the turns of one arm come to, for each of its cells."""
    config, dtype = backbone(args, arm.model), DTYPES[args.precision]
    counts = arm.kind == "ours" and not arm.compiled
    for cell in cells_of(arm, args):
        entries = found.get(cell.name, [])
        seconds = [s for entry in entries for s in entry.seconds]
        last = entries[-1] if entries else Found(cell.name, note="not reached")
        if cell.new > 1:
            work = prefill_work(config, cell.context - cell.new, cell.new, dtype)
        else:
            work = decoding_work(config, cell.context, last.batch, dtype)
        yield Timing(
            arm=arm.name,
            cell=cell.name,
            context=cell.context,
            batch=last.batch,
            new=cell.new,
            filled=cell.batch is None,
            fitting=last.fitting,
            seconds=statistics.median(seconds) if seconds else None,
            timed=len(seconds),
            bound_seconds=work.seconds(machine.bytes_per_s, machine.flops_per_s),
            aim=AIMS.get(type(config.attention), OTHER_AIM) if counts else None,
            cache_bytes=last.cache_bytes,
            note=last.note,
            costs=last.costs,
        )


if __name__ == "__main__":
    sys.exit(main())
