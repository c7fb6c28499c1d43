"""`kvpath lm-eval`: lm-evaluation-harness's own command line, with our models in it."""

import sys
from importlib.util import find_spec

from kvpath.cli.arguments import Arguments
from kvpath.errors import UserError

_HELP = """Runs lm-evaluation-harness on a trained model. Every other flag goes to the harness's own command line as it
is and means what it means there; results are in its own format."""

_EXAMPLES = """for example: kvpath lm-eval --ckpt_path runs/concat-2k --tasks hellaswag,arc_easy --batch_size 16
--output_path results. `kvpath lm-eval run --help` lists the flags of the harness, `kvpath lm-eval ls tasks` its tasks.
The harness finds no models of other packages by itself: `kvpath lm-eval --model kvpath --model_args ckpt_path=RUN` is
`lm_eval` with the same flags, and in Python `import kvpath.evaluation.lm_eval` comes before
`lm_eval.simple_evaluate(model="kvpath", ...)`."""


def lm_eval_command(argv: list[str]) -> int:
    """Run `kvpath lm-eval` with the arguments after the subcommand; gives the exit code.

    Raises:
        UserError: the harness is not installed, there is no such checkpoint, or another model is asked for.
    """
    # Mistakes come first: the harness takes long to import.
    if argv[:1] in (["ls"], ["validate"]) or "--help" in argv[1:]:
        _need_harness()
        flags = argv
    else:
        flags = _with_model(argv)
    from lm_eval.__main__ import cli_evaluate

    import kvpath.evaluation.lm_eval  # noqa: F401  # registers kvpath

    before = sys.argv
    sys.argv = ["lm_eval", *flags]  # the harness reads it from nowhere else
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0


def _need_harness() -> None:
    if find_spec("lm_eval") is None:
        raise UserError("kvpath lm-eval needs lm-evaluation-harness: pip install 'kvpath[eval]'")


def _with_model(argv: list[str]) -> list[str]:
    """The harness's flags, those of the model among them."""
    parser = Arguments("lm-eval", _HELP, _EXAMPLES)
    parser.add_argument("--ckpt_path", metavar="RUN", help="a run, a checkpoint or an exported directory")
    parser.add_argument(
        "--model_args", "-a", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="of the model: dtype (fp32, bf16, fp16, fp64), tokenizer (a file), compile, max_length (its max_seq_len),"
        " max_gen_toks (256)",
    )  # fmt: skip
    parser.add_argument("--model", "-M", default="kvpath", help="kvpath, and nothing else")
    ours, rest = parser.parse_known_args(argv)
    _need_harness()
    if ours.model != "kvpath":
        raise UserError(f"--model must be kvpath, got {ours.model}: other models are for lm_eval itself")
    path, model_args = _one_path(ours.ckpt_path, [arg for args in ours.model_args for arg in args.split(",") if arg])
    command = rest[:1] if rest[:1] == ["run"] else []
    # The harness calls its results by what is pretrained.
    given = ",".join([f"pretrained={path}", *model_args])
    return [*command, "--model", "kvpath", "--model_args", given, *rest[len(command) :]]


def _one_path(ckpt_path: str | None, model_args: list[str]) -> tuple[str, list[str]]:
    """The checkpoint, by whichever way it is named, and the other arguments of the model."""
    others = [arg for arg in model_args if arg.partition("=")[0] not in ("ckpt_path", "pretrained")]
    paths = [arg.partition("=")[2] for arg in model_args if arg not in others]
    paths += [] if ckpt_path is None else [ckpt_path]
    if len(paths) != 1:
        raise UserError(f"--ckpt_path must name one run, got {', '.join(paths) or 'none'}")
    if "," in paths[0] or "=" in paths[0]:
        raise UserError(f"ckpt_path must hold no comma and no =, which divide --model_args, got {paths[0]}")
    from kvpath.training.run_directory import find_checkpoint

    find_checkpoint(paths[0])
    return paths[0], others
