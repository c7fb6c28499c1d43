"""The one command."""

import errno
import os
import sys

from kvpath.errors import UserError

COMMANDS = {
    "fit": "train a model",
    "validate": "evaluate a trained model on the validation set",
    "test": "perplexity of a trained model per corpus and context",
    "predict": "write the likelihood of every token of the test set",
    "series": "run the stages of a study in order",
    "generate": "text from a trained model",
    "export": "a trained model as safetensors, with its configuration and tokenizer",
    "audit": "parameters, FLOPs and cache of a configuration, before any training",
    "check": "prove that a layout gives the same numbers by every way of running it",
    "configs": "list, print or copy the shipped configuration pieces",
}

_HELP = """usage: kvpath COMMAND [options]

Train, measure and run language models whose layers share keys and values.

commands:
{commands}

kvpath COMMAND --help says more. -c NAME takes a local YAML file or a shipped piece, and may be repeated:

  kvpath audit -c model/98m -c attention/gqa
  kvpath fit   -c model/98m -c attention/kvpath_concat -c stage/2k -c data/fineweb_edu --run runs/concat-2k
  kvpath test  --ckpt_path runs/concat-2k
  kvpath generate --ckpt_path runs/concat-2k --prompt "The state of the union"

exit codes: 0 done, 1 a fault of kvpath, 2 a mistake in what was given, 75 saved and to be run again, 130 interrupted
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; gives the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(arguments)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"kvpath: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(
            f"kvpath: error: no space left on the disk{f' for {error.filename}' * bool(error.filename)}",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP.format(commands="\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())))
        return 0
    command, rest = argv[0], argv[1:]
    if command == "--version":
        from kvpath.cli.version import version

        print(version())
        return 0
    # A user's own strategies are found beside where the command is run.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if command == "configs":
        from kvpath.cli.configs import configs

        return configs(rest)
    if command == "audit":
        from kvpath.cli.audit import audit_command

        return audit_command(rest)
    if command == "check":
        from kvpath.cli.check import check_command

        return check_command(rest)
    if command == "generate":
        from kvpath.cli.generate import generate_command

        return generate_command(rest)
    if command == "export":
        from kvpath.cli.export import export_command

        return export_command(rest)
    if command == "series":
        from kvpath.cli.series import series

        return series(rest)
    if command in ("fit", "validate", "test", "predict"):
        from kvpath.cli.lightning import run_lightning
        from kvpath.pieces import resolve_argv

        return run_lightning(command, resolve_argv(rest))
    from difflib import get_close_matches

    close = get_close_matches(command, COMMANDS, n=1)
    raise UserError(f"there is no command {command!r}" + (f"; did you mean {close[0]}?" if close else ""))
