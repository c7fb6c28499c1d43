"""``kvpath prepare``: the data of a configuration, tokenised once into shards that any number of runs read."""

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from kvpath.cli.arguments import Arguments
from kvpath.errors import UserError

if TYPE_CHECKING:
    from kvpath.data.datamodule import PackedText
    from kvpath.data.shards import ShardFolder, ShardPlan


def prepare_command(argv: list[str]) -> int:
    """Run ``kvpath prepare`` with the arguments after the subcommand; returns the exit code.

    Raises:
        UserError: a piece or an option is wrong, a document cannot be read, the disk is full, or a shard is damaged.
    """
    args, overrides = _parser().parse_known_args(argv)
    if args.verify is not None:
        return _verify(args, overrides)
    if not args.config and not overrides:
        raise UserError("kvpath prepare needs pieces: -c data/fineweb_edu --output shards/fineweb")
    if args.output is None and not args.dry_run:
        raise UserError("kvpath prepare needs --output DIRECTORY, or --dry-run")
    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers must be at least 1, got {args.workers}")
    from kvpath.data.prepare.job import Job
    from kvpath.data.prepare.run import plan_shards, prepare

    job = Job.parse(args.job) if args.job else None
    data = _data(args.config, overrides)
    tokenizer = data.load_tokenizer()
    plan = plan_shards(
        data.source,
        len(data.source.parts()),
        tokenizer,
        data.tokenizer_config.name,
        data.holdout_every,
        data.max_tokens,
    )
    if args.dry_run:
        from kvpath.data.prepare.estimate import estimate

        print(estimate(data.source, tokenizer, plan).describe(plan))
        return 0
    directory = Path(args.output)
    folder = prepare(data.source, tokenizer, plan, directory, args.workers, job)
    print(_made(directory, plan, folder, args.job))
    return 0


def _parser() -> Arguments:
    parser = Arguments(
        "prepare",
        "Tokenises the data of a configuration on all cores into a folder of memory-mapped shards. Killed at any point,"
        " the same command goes on. To train on them: -c data/prepared --data.source.directory DIRECTORY.",
        "Other options override the configuration, such as --data.holdout_every 1000. Jobs of a cluster's array each"
        " make their share of the shards into one folder, in any order and at the same time; the job that ends last"
        " writes the manifest, and so does a later call without --job, which makes what is missing.",
    )
    parser.add_argument("-c", "--config", action="append", default=[], metavar="PIECE", help="a file or shipped piece")
    parser.add_argument("--output", metavar="DIRECTORY", help="the folder of shards, new or begun before")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (the cores); the shards are the same bytes")
    parser.add_argument("--job", metavar="J/N", help="make the J-th of N shares, J from 1 to N")
    parser.add_argument("--dry-run", action="store_true", help="estimate documents, tokens, bytes; write nothing")
    parser.add_argument("--verify", metavar="DIRECTORY", help="compare the checksums of shards instead")
    return parser


def _data(config_pieces: list[str], overrides: list[str]) -> "PackedText":
    """The data section of the pieces; what training alone needs of it may be missing."""
    from typing import Any

    from jsonargparse import ActionConfigFile

    from kvpath.cli.parsing import PlainErrorParser, allow_choice_by_class
    from kvpath.data.datamodule import PackedText
    from kvpath.pieces import resolve

    allow_choice_by_class()
    parser = PlainErrorParser()
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    parser.add_class_arguments(PackedText, "data")
    for group in ("model", "trainer", "every", "sample", "on_spike"):
        parser.add_argument(f"--{group}", type=dict[str, Any], default={})
    for key in ("name", "seed_everything", "peak_flops", "stop_on", "on_nan"):
        parser.add_argument(f"--{key}", type=Any)
    of_training = ["--data.seq_len=1", "--data.budget.tokens=1", "--data.budget.global_batch_sequences=1"]
    files = [flag for piece in config_pieces for flag in ("-c", str(resolve(piece)))]
    data: PackedText = parser.instantiate(parser.parse_args([*of_training, *files, *overrides])).data
    return data


def _made(directory: Path, plan: "ShardPlan", folder: "ShardFolder | None", job: str | None) -> str:
    """What there is now."""
    if folder is None:
        return (
            f"job {job} is done; {directory} is finished by the last of the jobs, or by the same command without --job"
        )
    rows = [
        f"{region}: {n['documents']:,} documents, {n['tokens']:,} tokens, {n['bytes']:,} bytes of text"
        for region, n in folder.total.items()
    ]
    if folder.skipped:
        rows.append(f"skipped: {folder.skipped:,} documents that could not be decoded")
    return "\n".join([f"{directory}: {plan.label} as {len(folder.shards)} shards of {plan.dtype}", *rows])


def _verify(args: Namespace, overrides: list[str]) -> int:
    if overrides or args.config or args.output or args.dry_run:
        raise UserError("--verify takes a DIRECTORY and no other option")
    from kvpath.data.shards import ShardFolder

    folder = ShardFolder(Path(args.verify))
    folder.verify()
    print(f"{args.verify}: all {len(folder.shards)} shards are as they were written")
    return 0
