"""``kvpath plan``: what a run needs of machines, before it is started."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from kvpath.analysis.run_plan import CHECKPOINTS_KEPT, Machine, StagePlan, Total, plan_stage
from kvpath.analysis.sharing import Memory, Sharing
from kvpath.analysis.tables import Cell, table
from kvpath.cli.arguments import Arguments
from kvpath.cli.audit import bytes_of
from kvpath.cli.composing import Composer
from kvpath.config import backbone_from, data_from
from kvpath.errors import UserError
from kvpath.launch import count_of
from kvpath.pieces import compose, resolve
from kvpath.series.clock import spoken

NOTES = """\
Memory is of one device at the worst moment of a step, in GB (10^9 bytes): activations are those of the real operations
of one micro-batch, found by running it without memory; the others follow from the number of parameters and from how the
ranks share them out. What a driver and its kernels take for themselves is the reserve. "again": blocks are run again in
the backward pass instead of kept (--model.activation_checkpointing true).\
"""

WOULD_HELP = {
    "weights": "stage 3 of ZeRO on more devices, or -c hardware/zero3_offload",
    "gradients": "a higher stage of ZeRO on more devices, or hardware that offloads",
    "optimizer": "ZeRO on more devices, or hardware that offloads",
    "buffers": "a smaller --trainer.strategy.bucket_elements",
    "activations": "devices with more memory, or a shorter --data.seq_len",
}
"""By the largest part of what one sequence needs."""


def plan_command(argv: list[str]) -> int:
    """Run ``kvpath plan`` with the arguments after the subcommand; gives the exit code, 2 if a stage does not fit.

    Raises:
        UserError: a piece or an option is wrong, or the global batch does not divide by the ranks.
    """
    args, overrides = _parser().parse_known_args(argv)
    if not args.config:
        raise UserError("kvpath plan needs pieces: -c model/1b -c attention/1b/gqa -c stage/2k -c hardware/zero2")
    machine = Machine(
        nodes=args.nodes,
        devices=args.devices,
        memory=bytes_of(args.memory),
        reserve=bytes_of(args.reserve, "--reserve"),
        peak_flops=args.peak_flops,
        utilisation=args.utilisation,
        tokens_per_second=args.tokens_per_second,
    )
    pieces = [[*args.config, stage] for stage in args.stages] or [args.config]
    budgets = [[f"--data.budget.tokens={count}"] for count in args.tokens] or [[]] * len(pieces)
    if len(budgets) != len(pieces):
        raise UserError(f"--tokens must be {len(pieces)}, one for each stage, got {len(budgets)}")
    composer = Composer()
    stages = [
        _planned(composer, names, [*overrides, *budget], machine) for names, budget in zip(pieces, budgets, strict=True)
    ]
    print(json.dumps(as_dict(stages, machine), indent=2) if args.format == "json" else _text(stages, machine))
    return 0 if all(stage.fits for stage in stages) else 2


def _parser() -> Arguments:
    parser = Arguments(
        "plan",
        "Memory by part, the micro-batch to use, steps, days and the size of checkpoints, for each stage.",
        "Other options override the configuration, such as --data.budget.tokens 100e9.",
    )
    parser.add_argument("-c", "--config", action="append", default=[], metavar="PIECE", help="a file or shipped piece")
    parser.add_argument("--stages", nargs="+", default=[], metavar="PIECE", help="plan each over the -c ones")
    parser.add_argument("--tokens", nargs="+", default=[], metavar="N", help="to train on in each stage, such as 98e9")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (1)")
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="of each machine (8)")
    parser.add_argument("--memory", default="80GB", metavar="SIZE", help="of a device (80GB)")
    parser.add_argument("--reserve", default="4GB", metavar="SIZE", help="of it that tensors cannot have (4GB)")
    parser.add_argument("--peak_flops", type=float, metavar="F", help="of a device at the precision, such as 989e12")
    parser.add_argument("--utilisation", type=float, default=0.4, metavar="X", help="share of it that is reached (0.4)")
    parser.add_argument("--tokens_per_second", type=float, metavar="R", help="measured on one device; goes before both")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="table by default")
    return parser


def _planned(composer: Composer, names: list[str], overrides: list[str], machine: Machine) -> StagePlan:
    """Named after the last piece; resolved as `kvpath fit` would."""
    files = [resolve(name) for name in names]
    stated = compose(files, overrides).get("data", {})
    UserError.raise_all(
        f"data.{key} is not stated: add a stage piece" for key in ("seq_len", "budget") if key not in stated
    )
    text = [] if "source" in stated else ["--data.source=Files", "--data.source.files=[-]"]  # any will do
    values = composer.values(["fit", *text, *(f"-c={file}" for file in files), *overrides])
    data, backbone = data_from(values["data"]), backbone_from(values["model"]["backbone"])
    UserError.raise_all(_disagreements(values["trainer"], machine))
    sharing = Sharing.of(values["trainer"], machine.ranks)
    return plan_stage(names[-1], backbone, data.budget, data.seq_len, sharing, machine)


def _disagreements(trainer: dict[str, Any], machine: Machine) -> Iterator[str]:
    """What the configuration says of the machine, if it is not what the options say."""
    stated = count_of(trainer["devices"])
    if stated not in (None, machine.devices):
        yield f"trainer.devices={trainer['devices']} is not --devices {machine.devices}: state --devices {stated}"
    if trainer["num_nodes"] not in (1, machine.nodes):
        yield f"trainer.num_nodes={trainer['num_nodes']} is not --nodes {machine.nodes}"


def as_dict(stages: list[StagePlan], machine: Machine) -> dict[str, Any]:
    """All fields, with what follows from them; bytes, seconds, and hours of devices."""
    total = Total.of(stages)
    return {
        "machine": {**asdict(machine), "ranks": machine.ranks, "room": machine.room},
        "stages": [_stage_dict(stage, machine.room) for stage in stages],
        "total": {**asdict(total), "days": _days(total.seconds)},
    }


def _stage_dict(stage: StagePlan, room: int) -> dict[str, Any]:
    return {
        **asdict(stage),
        "plan": {**asdict(stage.plan), "tokens": stage.plan.tokens},
        "best": _memory_dict(stage.best, room),
        "options": [_memory_dict(option, room) for option in stage.options],
        "seconds": stage.seconds,
        "days": _days(stage.seconds),
        "device_hours": stage.device_hours,
        "disk": stage.disk,
    }


def _memory_dict(memory: Memory, room: int) -> dict[str, Any]:
    return {**asdict(memory), "total": memory.total, "fits": memory.total <= room}


def _days(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 86400


def _text(stages: list[StagePlan], machine: Machine) -> str:
    rows = [_row(stage, option, machine.room) for stage in stages for option in stage.options]
    lines = [line for stage in stages for line in _lines(stage, machine.room)]
    if len(stages) > 1:
        lines.append(_total_line(Total.of(stages)))
    return "\n\n".join([table(rows), "\n".join(lines), NOTES])


def _row(stage: StagePlan, memory: Memory, room: int) -> dict[str, Cell]:
    parts = ("weights", "gradients", "optimizer", "buffers", "activations", "total", "host")
    return {
        "stage": stage.name,
        "blocks": "again" if memory.checkpointing else "kept",
        "micro_batch": memory.micro_batch,
        "accumulated": memory.accumulation,
        **{part: round(getattr(memory, part) / 1e9, 2) for part in parts},
        "fits": "no" if memory.total > room else "take this" if memory == stage.best else "yes",
    }


def _lines(stage: StagePlan, room: int) -> Iterator[str]:
    yield f"{stage.name}: {stage.parameters:,} parameters; {stage.plan.describe()}"
    if stage.seconds is None or stage.device_hours is None:
        yield "  time: state --peak_flops and --utilisation, or a measured --tokens_per_second"
    else:
        yield f"  time: {_time(stage.seconds, stage.device_hours)}, at {stage.tokens_per_second:,.0f} tokens/s"
    yield (
        f"  a checkpoint: {stage.checkpoint / 1e9:.1f} GB; a run keeps up to {CHECKPOINTS_KEPT} and writes one more"
        f" before one of them goes: {stage.disk / 1e9:.1f} GB at most"
    )
    if stage.fits:
        yield (
            f"  take: --data.budget.micro_batch {stage.best.micro_batch}"
            f" --model.activation_checkpointing {str(stage.best.checkpointing).lower()}"
        )
    else:
        needs, part = stage.best.total, max(WOULD_HELP, key=lambda part: int(getattr(stage.best, part)))
        yield (
            f"  nothing fits: one sequence, its blocks run again, needs {needs / 1e9:.2f} GB of {room / 1e9:.2f},"
            f" {getattr(stage.best, part) / 1e9:.2f} of them {part}: {WOULD_HELP[part]} would help"
        )


def _total_line(total: Total) -> str:
    parts = [f"in all: {total.tokens:,} tokens"]
    if total.seconds is not None and total.device_hours is not None:
        parts.append(_time(total.seconds, total.device_hours))
    return "; ".join([*parts, f"checkpoints of {total.disk / 1e9:.1f} GB at most"])


def _time(seconds: float, device_hours: float) -> str:
    return f"{spoken(seconds)}, {device_hours:,.0f} hours of devices"
