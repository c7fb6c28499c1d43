"""``kvpath plan``: what a run needs of machines, before it is started."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from kvpath.analysis.run_plan import Machine, StagePlan, plan_stage
from kvpath.analysis.sharing import Memory, Sharing
from kvpath.analysis.tables import Cell, table
from kvpath.cli.arguments import Arguments
from kvpath.cli.audit import bytes_of
from kvpath.config import data_from, load_config
from kvpath.errors import UserError

NOTES = """\
Memory is of one device at the worst moment of a step, in GB (10^9 bytes): activations are those of the real operations
of one micro-batch, found by running it without memory; the others follow from the number of parameters and from how the
ranks share them out. What a driver and its kernels take for themselves is the reserve. "again": blocks are run again in
the backward pass instead of kept (--model.activation_checkpointing true).\
"""


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
    over = [[stage] for stage in args.stages] or [[]]
    stages = [_planned([*args.config, *stage], overrides, machine) for stage in over]
    print(
        json.dumps([as_dict(stage) for stage in stages], indent=2) if args.format == "json" else _text(stages, machine)
    )
    return 0 if all(stage.fits for stage in stages) else 2


def _parser() -> Arguments:
    parser = Arguments(
        "plan",
        "Memory by part, the micro-batch to use, steps, days and the size of checkpoints, for each stage.",
        "Other options override the configuration, such as --data.budget.tokens 100e9.",
    )
    parser.add_argument("-c", "--config", action="append", default=[], metavar="PIECE", help="a file or shipped piece")
    parser.add_argument("--stages", nargs="+", default=[], metavar="PIECE", help="plan each over the -c ones")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (1)")
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="of each machine (8)")
    parser.add_argument("--memory", default="80GB", metavar="SIZE", help="of a device (80GB)")
    parser.add_argument("--reserve", default="4GB", metavar="SIZE", help="of it that tensors cannot have (4GB)")
    parser.add_argument("--peak_flops", type=float, metavar="F", help="of a device at the precision, such as 989e12")
    parser.add_argument("--utilisation", type=float, default=0.4, metavar="X", help="share of it that is reached (0.4)")
    parser.add_argument("--tokens_per_second", type=float, metavar="R", help="measured on one device; goes before both")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="table by default")
    return parser


def _planned(pieces: list[str], overrides: list[str], machine: Machine) -> StagePlan:
    """Named after the last piece."""
    config = load_config(*pieces, overrides=overrides)
    values = config.values["data"]
    problems = [f"data.{key} is not stated: add a stage piece" for key in ("seq_len", "budget") if key not in values]
    UserError.raise_all(problems)
    data = data_from({"source": {"class_path": "Files", "init_args": {"files": ["-"]}}, **values})
    sharing = Sharing.of(config.values["trainer"], machine.ranks)
    return plan_stage(pieces[-1], config.backbone, data.budget, data.seq_len, sharing, machine)


def as_dict(stage: StagePlan) -> dict[str, Any]:
    """All fields, with what follows from them."""
    return {
        **asdict(stage),
        "best": _memory_dict(stage.best),
        "options": [_memory_dict(option) for option in stage.options],
        "seconds": stage.seconds,
        "device_hours": stage.device_hours,
    }


def _memory_dict(memory: Memory) -> dict[str, Any]:
    return {**asdict(memory), "total": memory.total}


def _text(stages: list[StagePlan], machine: Machine) -> str:
    room = machine.memory - machine.reserve
    rows = [_row(stage, option, room) for stage in stages for option in stage.options]
    return "\n\n".join([table(rows), "\n".join(line for stage in stages for line in _lines(stage)), NOTES])


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


def _lines(stage: StagePlan) -> Iterator[str]:
    plan = stage.plan
    yield f"{stage.name}: {stage.parameters:,} parameters; {plan.describe()}"
    if not stage.fits:
        yield (
            f"  does not fit: one sequence needs {stage.best.total / 1e9:.1f} GB;"
            " take more devices, a higher stage of ZeRO, or hardware that offloads"
        )
    if stage.seconds is None or stage.device_hours is None:
        yield "  time: state --peak_flops and --utilisation, or a measured --tokens_per_second"
    else:
        yield (
            f"  time: {stage.seconds / 86400:.1f} days at {stage.tokens_per_second:,.0f} tokens/s;"
            f" {stage.device_hours:,.0f} hours of devices"
        )
    yield f"  a checkpoint: {stage.checkpoint / 1e9:.1f} GB, of which a run keeps up to three"
    yield (
        f"  take: --data.budget.micro_batch {stage.best.micro_batch}"
        f" --model.activation_checkpointing {str(stage.best.checkpointing).lower()}"
    )
