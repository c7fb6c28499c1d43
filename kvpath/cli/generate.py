"""`kvpath generate`: text on standard output, and all else on standard error."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpath.cli.arguments import Arguments
from kvpath.errors import UserError

if TYPE_CHECKING:
    from kvpath.inference.text_model import Result, TextModel

_SAMPLING: dict[str, tuple[type, str]] = {
    "max_new_tokens": (int, "how many tokens to add at most (128)"),
    "temperature": (float, "0 takes the likeliest token (0.8)"),
    "top_k": (int, "draw among so many likeliest tokens only"),
    "top_p": (float, "draw among the fewest likeliest tokens whose probabilities sum to this"),
    "min_p": (float, "draw among tokens at least this fraction as likely as the likeliest"),
    "repetition_penalty": (float, "tokens that were there already lose by this factor (1)"),
    "n": (int, "samples for each prompt (1)"),
    "seed": (int, "row i draws from a generator of its own, seeded by this and i (0)"),
}


def generate_command(argv: list[str]) -> int:
    """Run `kvpath generate` with the arguments after the subcommand; gives the exit code.

    Raises:
        UserError: naming what was given and what would be right.
    """
    arguments = _parser().parse_args(argv)
    sampling = {name: value for name in [*_SAMPLING, "stop"] if (value := getattr(arguments, name)) is not None}
    prompts = None if arguments.interactive else list(_prompts(arguments))
    _check(arguments, prompts)
    from kvpath.inference.load import load
    from kvpath.inference.sampling import SamplingConfig

    SamplingConfig(**sampling)  # a mistake is told before the weights are read
    model_options = {key: getattr(arguments, key) for key in ("device", "dtype", "tokenizer", "compile")}
    found = load(arguments.ckpt_path, **model_options)
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    try:
        if prompts is None:
            _interact(found, sampling)
        else:
            _Writer(arguments, len(prompts) * sampling.get("n", 1)).write(found, prompts, sampling)
    except BrokenPipeError:  # whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> Arguments:
    parser = Arguments("generate", "Continues prompts. Text goes to standard output, all else to standard error.")
    parser.add_argument(
        "--ckpt_path", required=True, metavar="RUN", help="a run, a checkpoint or an exported directory"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", metavar="TEXT", help="what to continue; may be repeated")
    source.add_argument(
        "--prompt_file",
        metavar="FILE",
        help='one prompt, or with .jsonl one {"prompt": ...} a line; - is standard input',
    )
    source.add_argument("--interactive", action="store_true", help="continue each line of standard input as it comes")
    for name, (kind, text) in _SAMPLING.items():
        parser.add_argument(f"--{name}", type=kind, metavar=name[0].upper(), help=text)
    parser.add_argument("--stop", nargs="+", metavar="TEXT", help="end before the first of these")
    parser.add_argument("--batch_size", type=int, metavar="B", help="rows that run at once; all by default")
    parser.add_argument("--format", choices=("text", "jsonl"), default="text", help="text by default")
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="write text as it comes, one row after the other; by default if there is one row",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...; a CUDA device by default if there is one")
    parser.add_argument("--dtype", help="of weights and cache: fp32, bf16, fp16 or fp64; as stored by default")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json; that of the run by default")
    parser.add_argument("--compile", action="store_true", help="decode by a compiled model, worth it for long texts")
    return parser


def _check(arguments: argparse.Namespace, prompts: list[str] | None) -> None:
    problems = []
    if arguments.stream and arguments.format == "jsonl":
        problems.append("--stream is for --format text: a line of jsonl is whole or not there")
    if arguments.stream and arguments.batch_size is not None:
        problems.append(f"--stream runs one row after the other, got --batch_size {arguments.batch_size} too")
    if prompts is None and (arguments.format == "jsonl" or arguments.stream is False):
        problems.append("--interactive streams text: leave out --format jsonl and --no-stream")
    UserError.raise_all(problems)


def _prompts(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.prompt is not None:
        yield from arguments.prompt
        return
    name = arguments.prompt_file
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt_file {name} cannot be read: {error}") from error
    if not name.endswith(".jsonl"):
        yield text.removesuffix("\n")
        return
    for number, line in enumerate(text.splitlines(), 1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, LookupError, TypeError):
            prompt = None
        if not isinstance(prompt, str):
            raise UserError(f'prompt_file {name}, line {number}: must be an object with a text "prompt", got {line!r}')
        yield prompt


class _Writer:
    """Writes results in the format that was asked for."""

    def __init__(self, arguments: argparse.Namespace, n_rows: int) -> None:
        self.json, self.n_rows = arguments.format == "jsonl", n_rows
        by_default = n_rows == 1 and not self.json and arguments.batch_size is None
        self.stream = by_default if arguments.stream is None else arguments.stream
        self.batch_size = 1 if self.stream else arguments.batch_size

    def write(self, model: "TextModel", prompts: list[str], sampling: dict[str, Any]) -> None:
        """Run the model and write: text as it comes, or results once they are whole, in order."""
        started, tokens, written = time.perf_counter(), 0, 0
        whole: dict[int, Result] = {}
        for piece in model.stream(prompts, batch_size=self.batch_size, **sampling):
            if self.stream:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            if piece.result is not None:
                whole[piece.row] = piece.result
                tokens += len(piece.result.tokens)
            while written in whole:
                self._result(whole.pop(written))
                written += 1
        say_speed(tokens, time.perf_counter() - started)

    def _result(self, result: "Result") -> None:
        if self.json:
            values = {key: getattr(result, key) for key in ("prompt", "sample", "text", "tokens", "stop_reason")}
            print(json.dumps(values, ensure_ascii=False), flush=True)
            return
        print("" if self.stream else result.text, flush=True)
        if self.n_rows > 1:
            print(f"-- sample {result.sample} of {result.prompt[:60]!r}: {result.stop_reason}", file=sys.stderr)


def _interact(model: "TextModel", sampling: dict[str, Any]) -> None:
    """Continue each line; another line draws anew."""
    seed = sampling.pop("seed", 0)
    for turn, line in enumerate(_lines()):
        started = time.perf_counter()
        try:
            pieces = model.stream(line, batch_size=1, seed=seed + turn, **sampling)
        except UserError as error:
            print(f"kvpath: error: {error}", file=sys.stderr)
            continue
        tokens = 0
        for piece in pieces:
            print(piece.text, end="" if piece.result is None else "\n", flush=True)
            tokens += 0 if piece.result is None else len(piece.result.tokens)
        say_speed(tokens, time.perf_counter() - started)


def _lines() -> Iterator[str]:
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            print(file=sys.stderr)
            return
        yield line.removesuffix("\n")


def say_speed(tokens: int, seconds: float) -> None:
    """Tokens a second, prompts included in the time."""
    print(f"{tokens:,} tokens in {seconds:.1f} s: {tokens / seconds:,.1f} tokens/s", file=sys.stderr)
