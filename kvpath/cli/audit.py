"""``kvpath audit``: what models cost, before any training."""

import re
from fnmatch import fnmatch
from glob import glob
from pathlib import Path, PurePath

from kvpath import pieces
from kvpath.analysis.audit import Audit, audit, sequences_that_fit
from kvpath.analysis.drawing import draw
from kvpath.analysis.matching import refuse_unmatched
from kvpath.analysis.tables import Cell, format_audits
from kvpath.cli.arguments import Arguments
from kvpath.config import load_config
from kvpath.errors import UserError
from kvpath.model.config import BackboneConfig

DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
UNITS = {
    "": 1,
    **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)},
}


def audit_command(argv: list[str]) -> int:
    """Run ``kvpath audit`` with the arguments after the subcommand; returns the exit code.

    Raises:
        UserError: a piece, a run or an option is wrong, or ``--match`` was asked of models whose caches differ.
    """
    parser = _parser()
    args, overrides = parser.parse_known_args(argv)
    if args.match is not None:
        overrides += ["--model.backbone.d_ff=match", f"--model.backbone.parameters={_count(args.match)}"]
    models = _models(args.config, args.each, args.ckpt_path, overrides)
    audits = [audit(config, args.context, name, DTYPES.get(args.dtype, args.dtype)) for name, config in models]
    print(format_audits(audits, args.format, [_extra(entry, args.memory, args.match) for entry in audits]))
    if args.draw is not None:
        if len(models) > 1:
            raise UserError(f"--draw takes one model, got {len(models)}: {', '.join(name for name, _ in models)}")
        (name, config), *_ = models
        draw(config.layout(), Path(args.draw), name)
    if args.match is not None:
        refuse_unmatched(audits)
    return 0


def _parser() -> Arguments:
    parser = Arguments(
        "audit",
        "Counts parameters, stored and read elements and FLOPs of models, without allocating them.",
        "Other options override the configuration, such as --model.backbone.d_ff 1024.",
    )
    parser.add_argument("-c", "--config", action="append", default=[], metavar="PIECE", help="a file or shipped piece")
    parser.add_argument(
        "--each",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="one model for each piece that matches, over the -c ones",
    )
    parser.add_argument("--ckpt_path", nargs="+", default=[], metavar="RUN", help="directories of trained runs")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of context (the model's max_seq_len)")
    parser.add_argument("--dtype", default="bf16", help="of weights and cache: bf16 (default), fp16, fp32, fp64")
    parser.add_argument("--memory", metavar="SIZE", help="how many sequences fit beside the weights, such as 80GB")
    parser.add_argument("--match", metavar="N", help="solve d_ff for this many parameters")
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table", help="table by default")
    parser.add_argument("--draw", metavar="FILE", help="a PNG of who makes and who reads what; one model only")
    return parser


def _models(
    base: list[str], patterns: list[str], runs: list[str], overrides: list[str]
) -> list[tuple[str, BackboneConfig]]:
    """The name and the model of each row: trained runs, then one for each piece over the base, or the base alone."""
    if not (base or patterns or runs):
        raise UserError("kvpath audit needs pieces (-c model/98m -c attention/gqa) or runs (--ckpt_path runs/gqa)")
    each = [piece for pattern in patterns for piece in _matching(pattern)]
    models = [_load([str(saved_config(run)), *base], overrides, Path(run).name) for run in runs]
    models += [_load([*base, piece], overrides, PurePath(piece).stem) for piece in each]
    if not models:
        attention = [piece for piece in base if PurePath(piece).parent.name == "attention"]
        models.append(_load(base, overrides, PurePath((attention or base)[-1]).stem))
    return models


def _load(config_pieces: list[str], overrides: list[str], default_name: str) -> tuple[str, BackboneConfig]:
    """The name field, if there is one, goes before the default."""
    config = load_config(*config_pieces, overrides=overrides)
    return config.values["name"] or default_name, config.backbone


def saved_config(run: str) -> Path:
    """The config of a run's directory, or of the run or the export that some weights belong to.

    Raises:
        UserError: there is none.
    """
    path = Path(run)
    for folder in (path, *path.parents[:2]):
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
        if (folder / "config.json").is_file():
            from kvpath.cli.resume import stored_config
            from kvpath.training.run_directory import find_checkpoint

            return stored_config(find_checkpoint(folder))
    raise UserError(f"--ckpt_path {run}: no config.yaml there, so this is no run's directory")


def _matching(pattern: str) -> list[str]:
    """Local files, else shipped pieces, with or without the `configs/` and `.yaml` of a checkout."""
    found = sorted(file for file in glob(pattern, recursive=True) if file.endswith((".yaml", ".yml")))
    wanted = pattern.removeprefix("configs/").removesuffix(".yaml")
    found = found or [name for name in pieces.available() if fnmatch(name, wanted)]
    if not found:
        raise UserError(f"--each {pattern}: no file and no shipped piece matches; `kvpath configs` lists the pieces")
    return found


def _extra(entry: Audit, memory: str | None, match: str | None) -> dict[str, Cell]:
    """The columns that options ask for."""
    columns: dict[str, Cell] = {}
    if memory is not None:
        columns["sequences_that_fit"] = sequences_that_fit(entry, bytes_of(memory))
    if match is not None:
        columns["left_over"] = _count(match) - entry.parameters
    return columns


def bytes_of(text: str, option: str = "--memory") -> int:
    """A size such as 80GB.

    Raises:
        UserError: it is none.
    """
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if parts is None or parts[2] not in UNITS:
        raise UserError(f"{option} must be a number of bytes or have one of {', '.join(UNITS)[2:]}, got {text!r}")
    return int(float(parts[1]) * UNITS[parts[2]])


def _count(text: str) -> int:
    digits = text.replace(",", "").replace("_", "")
    if not digits.isdigit():
        raise UserError(f"--match must be a number of parameters, such as 98,710,016, got {text!r}")
    return int(digits)
