#!/usr/bin/env python
"""How fast training runs: ours, Hugging Face's Llama, and the ceiling of either arithmetic, in turn.

    scripts/bench_train.py                                      # every attention piece over model/98m
    scripts/bench_train.py -c attention/gqa -c attention/kvpath_concat,ablation/g2 --compiled

Each -c is one model, of one piece or of several joined by commas, over --base. Each arm runs in a process of its own,
all arms in turn, round after round. Arms: `ours`; `hf`, transformers' Llama from the same weights with sdpa, its own
loss and the same optimizer, for the models whose shape it has; `ceiling`, the matrix products and attention calls of
ours, forward and backward, in a bare loop; `peak`, one large matrix product. The last line is JSON.

Exit codes: 0, 1 if the losses of ours and Hugging Face's differ, 2 for a wrong argument.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from kvpath import UserError, load_config, pieces
from kvpath.analysis.audit import audit
from kvpath.analysis.ceiling import ATTENTION, bare_loop, record_products
from kvpath.analysis.machine import DTYPES, QUIET, busy_cores, largest_costs, product_rate, time_steps
from kvpath.analysis.tables import Cell, table
from kvpath.config import build_model
from kvpath.interop.llama import is_llama, llama_from
from kvpath.model import IGNORE, BackboneConfig, Decoder
from kvpath.training.optimizer import OptimizerConfig

SMALL = ("n_layers=2", "d_model=32", "vocab_size=64", "d_ff=64")
"""What --small makes of any model."""

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""By how much the losses of the same step may differ, relatively: rounding, grown over COMPARED steps."""

COMPARED = 2
"""Steps whose losses are compared; they warm up the timing, too."""


@dataclass(frozen=True)
class Arm:
    """One thing to be timed."""

    kind: str
    """ours, hf, ceiling or peak"""

    model: str = ""
    """The -c that it runs."""

    compiled: bool = False

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.model, self.kind, "compiled" * self.compiled) if part)


@dataclass
class Measured:
    """What one process found out."""

    seconds: list[float] = field(default_factory=list)
    """Of each timed step."""

    losses: list[float] = field(default_factory=list)
    """Of the first COMPARED steps, in nats per token."""

    peak_rss_mb: float = 0.0
    flops: float = 0.0
    """Of one step, by the conventions of `kvpath audit`."""

    costs: dict[str, float] = field(default_factory=dict)
    """The share of a step's time that the largest operations take, the attention products among them."""


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; gives the exit code."""
    args = parse(argv)
    try:
        return child(args) if args.arm else parent(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments; --precision is decided here if it is not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", action="append", metavar="PIECE[,PIECE]", help="a model (all of attention/)")
    parser.add_argument("--base", default="model/98m", metavar="PIECE", help="what they go over (model/98m)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each arm has its turn (3)")
    parser.add_argument("--seconds", type=float, default=20.0, help="to time in each turn, at least two steps (20)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of the one sequence of a step (1024)")
    parser.add_argument("--precision", choices=tuple(DTYPES), help="bf16 autocast, or fp32 where that is faster")
    parser.add_argument("--compiled", action="store_true", help="compiled arms as well")
    parser.add_argument("--small", action="store_true", help="toy models, one step, all in this process: a quick check")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.config = args.config or pieces.directly_in("attention")
    if args.small:
        args.rounds, args.seconds, args.length = 1, 0.0, min(args.length, 32)
    for name in ("rounds", "length"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    return args


def backbone(args: argparse.Namespace, model: str) -> BackboneConfig:
    """The model of one -c."""
    overrides = [f"--model.backbone.{change}" for change in SMALL] if args.small else []
    return load_config(args.base, *model.split(","), overrides=overrides).backbone


# One arm, in a process of its own -------------------------------------------------------------------------------------


def child(args: argparse.Namespace) -> int:
    """Measure one arm and print what was found."""
    print(json.dumps(asdict(measure(Arm(**json.loads(args.arm)), args))))
    return 0


def measure(arm: Arm, args: argparse.Namespace) -> Measured:
    """Time one arm."""
    if arm.kind == "peak":
        return measure_peak(256 if args.small else 2048, DTYPES[args.precision], args.seconds / 4)
    config = backbone(args, arm.model)
    draw = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(config.vocab_size, (1, args.length), generator=draw)
    model = build_model(config)
    train = ours(model, tokens_BT) if arm.kind != "hf" else theirs(model, tokens_BT, arm.compiled)
    if arm.compiled and arm.kind == "ours":
        model.compile_layers()
    del model

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            return train()

    found = Measured(flops=audit(config, args.length).training_flops_per_token * args.length)
    if arm.kind == "ceiling":
        found.seconds = time_steps(bare_loop(record_products(step)), args.seconds)
        return found
    found.losses = [step() for _ in range(COMPARED)]
    found.seconds = time_steps(step, args.seconds)
    found.peak_rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found.costs = largest_costs(step, 8, always=ATTENTION)
    return found


def ours(model: Decoder, tokens_BT: Tensor) -> Callable[[], float]:
    """A step as `LanguageModel.training_step` has it, on one micro-batch."""
    labels_BT = torch.cat((tokens_BT[:, 1:], torch.full_like(tokens_BT[:, :1], IGNORE)), dim=1)

    def loss() -> Tensor:
        sums = model(tokens_BT, labels_BT)
        return sums.total / sums.count

    return training_step(model, loss)


def theirs(model: Decoder, tokens_BT: Tensor, compiled: bool) -> Callable[[], float]:
    """The same for Hugging Face's Llama with the weights of `model`."""
    llama = llama_from(model).train()
    run = torch.compile(llama) if compiled else llama
    return training_step(llama, lambda: run(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss)


def training_step(model: nn.Module, loss_of_batch: Callable[[], Tensor]) -> Callable[[], float]:
    """One optimizer step, which gives the loss in nats per token."""
    config = OptimizerConfig()
    optimizer = config.build(model)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of_batch()
        loss.backward()
        clip_grad_norm_(model.parameters(), config.clip_norm or float("inf"))
        optimizer.step()
        return loss.item()

    return step


def measure_peak(size: int, dtype: torch.dtype, seconds: float) -> Measured:
    """A product of two square matrices."""
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    return Measured(time_steps(lambda: left @ right, seconds), flops=2 * size**3)


# All arms, in turn ----------------------------------------------------------------------------------------------------


def parent(args: argparse.Namespace) -> int:
    """Let every arm have its turns, then print what they come to."""
    speeds = product_speeds()
    slow_bf16 = speeds["bf16"] < speeds["fp32"]
    args.precision = args.precision or ("fp32" if slow_bf16 else "bf16")
    print(f"products: {speeds['bf16']:,.1f} GFLOP/s in bf16, {speeds['fp32']:,.1f} in fp32")
    if slow_bf16:
        print("bf16 is emulated here: its products are slower than those of fp32")
    print(f"precision {args.precision}, {torch.get_num_threads()} threads, 1 x {args.length} tokens")

    found: dict[Arm, list[Measured]] = {arm: [] for arm in arms(args)}
    busy: list[float] = []
    for turn in range(args.rounds):
        busy.append(busy_cores())
        note = "" if busy[-1] <= QUIET else ": NOT QUIET, do not trust these figures"
        print(f"round {turn + 1} of {args.rounds}: {busy[-1]:.2f} cores busy{note}", flush=True)
        for arm in found:
            found[arm].append(measure(arm, args) if args.small else measure_apart(arm, args))
            last = statistics.median(found[arm][-1].seconds)
            print(f"  {arm.name:40} {last:8.3f} s a step", file=sys.stderr, flush=True)

    peaks = found.pop(Arm("peak"))
    peak = max(turn.flops / min(turn.seconds) for turn in peaks)
    rows = [*summarise(found, args.length, peak)]
    equal = compare_losses(rows, TOLERANCE[args.precision])
    print(table([{key: cell(row[key]) for key in COLUMNS} for row in rows]))
    print(f"of_peak: FLOPs of `kvpath audit` over those of one large product, {peak / 1e9:,.1f} GFLOP/s")
    for row in rows:
        if row["costs"]:
            costs = ", ".join(f"{name} {share:.1%}" for name, share in row["costs"].items())
            print(f"{row['arm']}: {costs}")
    print("losses of ours and hf are " + {True: "equal", False: "NOT EQUAL", None: "not compared"}[equal])
    result = {
        "precision": args.precision,
        "bf16_emulated": slow_bf16,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "length": args.length,
        "rounds": args.rounds,
        "busy_cores": busy,
        "quiet": max(busy) <= QUIET,
        "losses_equal": equal,
        "peak_flops_per_s": peak,
        "arms": rows,
    }
    print(json.dumps(result))
    return 1 if equal is False else 0


def arms(args: argparse.Namespace) -> Iterator[Arm]:
    """The arms of a round, those to be compared next to each other."""
    yield Arm("peak")
    for model in args.config:
        kinds = ["ours", "hf", "ceiling"] if is_llama(backbone(args, model)) else ["ours", "ceiling"]
        for kind in kinds:
            yield Arm(kind, model)
        if args.compiled:
            for kind in kinds[:-1]:
                yield Arm(kind, model, compiled=True)


def measure_apart(arm: Arm, args: argparse.Namespace) -> Measured:
    """`measure` in a new process, which holds nothing else."""
    flags = [
        flag for name in ("base", "seconds", "length", "precision") for flag in (f"--{name}", f"{getattr(args, name)}")
    ]
    command = [sys.executable, __file__, *flags, "--arm", json.dumps(asdict(arm))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Measured(**json.loads(output.splitlines()[-1]))


COLUMNS = ("arm", "tokens_per_s", "over_hf", "of_ceiling", "of_peak", "peak_rss_mb")


def summarise(found: dict[Arm, list[Measured]], length: int, peak: float) -> Iterator[dict[str, Any]]:
    """A row for each arm, over all rounds."""
    seconds = {arm: statistics.median(s for turn in turns for s in turn.seconds) for arm, turns in found.items()}
    llamas = [arm for arm in found if arm.kind == "hf"]
    for arm, turns in found.items():
        # Hugging Face's of the same shape, else the first: all have about as many parameters.
        against = [llama for llama in llamas if llama.compiled == arm.compiled]
        against = [llama for llama in against if llama.model == arm.model] or against[:1]
        yield {
            "arm": arm.name,
            **asdict(arm),
            "tokens_per_s": length / seconds[arm],
            "over_hf": seconds[against[0]] / seconds[arm] if against and arm.kind == "ours" else None,
            "of_ceiling": seconds[Arm("ceiling", arm.model)] / seconds[arm] if arm.kind != "ceiling" else None,
            "of_peak": turns[0].flops / seconds[arm] / peak,
            "peak_rss_mb": max(turn.peak_rss_mb for turn in turns) or None,
            "losses": turns[0].losses,
            "costs": turns[-1].costs,
        }


def compare_losses(rows: list[dict[str, Any]], tolerance: float) -> bool | None:
    """Whether every arm that trains the same model lost the same; None if no two do."""
    groups: dict[str, list[list[float]]] = {}
    for row in rows:
        if row["losses"]:
            groups.setdefault(row["model"], []).append(row["losses"])
    pairs = [
        (first, other)
        for losses in groups.values()
        for arm in losses[1:]
        for first, other in zip(losses[0], arm, strict=True)
    ]
    return all(abs(first - other) <= tolerance * abs(first) for first, other in pairs) if pairs else None


def cell(value: str | float | None) -> Cell:
    """For the table."""
    return "" if value is None else value if isinstance(value, str) else f"{value:,.{0 if value >= 100 else 2}f}"


def product_speeds() -> dict[str, float]:
    """GFLOP/s of a small matrix product in each precision."""
    return {name: product_rate(256, 256, 256, dtype, 0.1) / 1e9 for name, dtype in DTYPES.items()}


if __name__ == "__main__":
    sys.exit(main())
