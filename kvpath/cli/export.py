"""`kvpath export`: a trained model as one directory that needs nothing of the run."""

import sys
from pathlib import Path

from kvpath.cli.arguments import Arguments


def export_command(argv: list[str]) -> int:
    """Run `kvpath export` with the arguments after the subcommand; gives the exit code.

    Raises:
        UserError: there are no weights, or the output exists.
    """
    parser = Arguments("export", "Writes model.safetensors, config.json and tokenizer.json.")
    parser.add_argument(
        "--ckpt_path", required=True, metavar="RUN", help="a run, a checkpoint or an exported directory"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="a directory that does not exist yet")
    parser.add_argument(
        "--dtype", metavar="DTYPE", help="of the weights: fp32, bf16, fp16 or fp64; as stored by default"
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json; that of the run by default")
    arguments = parser.parse_args(argv)
    from kvpath.data.tokenizer import TokenizerConfig
    from kvpath.inference.load import torch_dtype
    from kvpath.inference.stored_model import StoredModel
    from kvpath.interop.exported import write_export

    dtype = torch_dtype(arguments.dtype)
    stored = StoredModel.read(arguments.ckpt_path)
    tokenizer = TokenizerConfig(arguments.tokenizer).load() if arguments.tokenizer else stored.tokenizer()
    write_export(Path(arguments.output), stored.build().to(dtype), tokenizer, stored.step, stored.data)
    if tokenizer is None:
        print("warning: there is no tokenizer beside these weights; --tokenizer names one", file=sys.stderr)
    print(arguments.output)
    return 0
