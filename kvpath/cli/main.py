"""The one command."""

import os
import signal
import sys
from importlib import import_module
from typing import NamedTuple

from kvpath.errors import DISK_FAULTS, UserError, by_interrupt, came_of
from kvpath.launch import is_first_of_machine, is_first_rank
from kvpath.stopping import STOP_ON, code_of_stop, leaves_at_once, stops_where_nothing_is_to_be_saved, told


class Command(NamedTuple):
    """A subcommand: a function from the arguments after its name to the exit code, imported when it is called."""

    help: str
    module: str
    function: str


COMMANDS = {
    "fit": Command("train a model", "kvpath.cli.running", "fit"),
    "validate": Command("evaluate a trained model on the validation set", "kvpath.cli.running", "validate"),
    "test": Command("perplexity of a trained model per corpus and context", "kvpath.cli.running", "test"),
    "predict": Command("write the likelihood of every token of the test set", "kvpath.cli.running", "predict"),
    "series": Command("plan, run and watch a study of many runs", "kvpath.cli.series", "series"),
    "reproduce": Command("prepare a study of the paper, whole or at a fraction", "kvpath.cli.reproduce", "reproduce"),
    "lm-eval": Command("tasks of lm-evaluation-harness on a trained model", "kvpath.cli.lm_eval", "lm_eval_command"),
    "generate": Command("text from a trained model", "kvpath.cli.generate", "generate_command"),
    "export": Command(
        "a trained model as safetensors, with its configuration and tokenizer", "kvpath.cli.export", "export_command"
    ),
    "inspect": Command("recompute a batch that a run put aside", "kvpath.cli.inspect", "inspect_command"),
    "audit": Command(
        "parameters, FLOPs and cache of a configuration, before any training", "kvpath.cli.audit", "audit_command"
    ),
    "plan": Command(
        "what a run needs of machines: memory by part, micro-batch, days", "kvpath.cli.plan", "plan_command"
    ),
    "check": Command(
        "prove that a layout gives the same numbers by every way of running it", "kvpath.cli.check", "check_command"
    ),
    "report": Command(
        "runs as the paper's tables and figures, beside the printed ones", "kvpath.cli.report", "report_command"
    ),
    "prepare": Command(
        "tokenise the data of a configuration into shards, on all cores", "kvpath.cli.prepare", "prepare_command"
    ),
    "configs": Command("list, print or copy the shipped configuration pieces", "kvpath.cli.configs", "configs"),
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
    _tell_launcher("started")
    try:
        code = _with_mistakes_said(sys.argv[1:] if argv is None else argv)
    except BaseException as error:
        if by_interrupt(error):
            code = 130
        elif told() is not None and came_of(error, SystemExit):
            code = code_of_stop()
        else:
            _tell_launcher(error.code if isinstance(error, SystemExit) else 1)
            raise
    _tell_launcher(code)
    return code


def _tell_launcher(what: object) -> None:
    """torchrun makes 1 of every exit code but 0; scripts/launch looks into this file instead."""
    if path := os.environ.get("KVPATH_EXIT_CODES"):
        with open(path, "a", encoding="utf-8") as codes:
            codes.write(f"{what}\n")


def _with_mistakes_said(arguments: list[str]) -> int:
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()  # a reader that has gone is found out here, not after all that could say so
        return code
    except UserError as error:
        _say(str(error), error.on_every_machine)
        return 2
    except BrokenPipeError:
        # What is left in the buffer is for nobody, and must not be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # as shells have it
    except OSError as error:
        if error.errno not in DISK_FAULTS:
            raise
        _say(f"{DISK_FAULTS[error.errno]}{f' for {error.filename}' * bool(error.filename)}")
        return 2


def _say(problem: str, on_every_machine: bool = False) -> None:
    if is_first_of_machine() if on_every_machine else is_first_rank():
        print(f"kvpath: error: {problem}", file=sys.stderr)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP.format(commands="\n".join(f"  {name:<10} {command.help}" for name, command in COMMANDS.items())))
        return 0
    name, rest = argv[0], argv[1:]
    if name == "--version":
        from kvpath.cli.version import version

        print(version())
        return 0
    if name not in COMMANDS:
        from difflib import get_close_matches

        close = get_close_matches(name, COMMANDS, n=1)
        raise UserError(f"there is no command {name!r}" + (f"; did you mean {close[0]}?" if close else ""))
    # A user's own strategies are found beside where the command is run.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    command = COMMANDS[name]
    listens = name == "fit" and not any(argument.startswith("--stop_on") for argument in rest)
    stop_on = STOP_ON if listens else ()
    with leaves_at_once(stop_on, _tell_launcher):
        run = getattr(import_module(command.module), command.function)
    with stops_where_nothing_is_to_be_saved(stop_on):
        return int(run(rest))
