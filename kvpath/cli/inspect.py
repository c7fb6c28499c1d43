"""`kvpath inspect FILE --ckpt_path RUN`: a batch that a run put aside, recomputed on its weights."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpath.cli.arguments import Arguments

if TYPE_CHECKING:
    from kvpath.analysis.inspection import Inspection
    from kvpath.training.bad_batch import BadBatch


def inspect_command(argv: list[str]) -> int:
    """Run `kvpath inspect` with the arguments after the subcommand; gives the exit code.

    Raises:
        UserError: the file is no batch that was put aside, or there are no weights.
    """
    parser = Arguments(
        "inspect",
        "Recomputes a batch of bad_batches: its loss per document, and per layer the norm of the gradient, the size of"
        " the activations and the largest attention logit; and names the first tensor that is not finite.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="such as runs/a/bad_batches/step-000123-rank0.json")
    parser.add_argument("--ckpt_path", required=True, metavar="RUN", help="weights: a run, a checkpoint or an export")
    parser.add_argument("--device", default="cpu", help="where to compute: cpu (default), cuda")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="table by default")
    arguments = parser.parse_args(argv)
    import torch

    from kvpath.analysis.inspection import inspect_batch
    from kvpath.inference.load import torch_device
    from kvpath.inference.stored_model import StoredModel
    from kvpath.training.bad_batch import BadBatch

    batch, device = BadBatch.read(arguments.file), torch_device(arguments.device)
    stored = StoredModel.read(arguments.ckpt_path)
    dtypes = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
    model = stored.build().to(device, dtypes.get(batch.precision))
    tensors = {name: value.to(device) for name, value in batch.tensors.items()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.set_rng_state(batch.random_state["cpu"])
        if device.type == "cuda" and "cuda" in batch.random_state:
            torch.cuda.set_rng_state(batch.random_state["cuda"], device)
        found = inspect_batch(
            model,
            tensors["tokens"],
            tensors["labels"],
            tensors.get("documents"),
            tensors.get("positions"),
            batch.precision,
        )
    print(_as_json(batch, stored.step, found) if arguments.format == "json" else _as_table(batch, stored.step, found))
    return 0


def _as_json(batch: "BadBatch", step: int, found: "Inspection") -> str:
    facts = {"step": batch.step, "rank": batch.rank, "reason": batch.reason, "document_numbers": batch.documents}
    values = {**facts, "weights_of_step": step, **asdict(found)}
    return json.dumps(_finite(values), indent=2)


def _finite(value: Any) -> Any:
    """JSON has no word for what is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _as_table(batch: "BadBatch", step: int, found: "Inspection") -> str:
    lines = [
        f"step {batch.step:,}, rank {batch.rank}: {batch.reason}",
        f"on the weights of step {step:,}: loss {found.loss:.4f}, gradient norm {found.gradient_norm:.4g}",
        f"first tensor that is not finite: {found.first_not_finite or 'none'}",
        "",
        f"{'sequence':>8}{'document':>12}{'tokens':>9}{'loss':>10}  text",
    ]
    for row in found.documents:
        document = "-" if row["document"] is None else row["document"]
        text = json.dumps(batch.text[row["sequence"]][:48], ensure_ascii=False) if batch.text else ""
        lines.append(f"{row['sequence']:>8}{document:>12}{row['tokens']:>9,}{row['loss']:>10.4f}  {text}")
    lines += ["", f"{'layer':<12}{'gradient norm':>15}{'activation rms':>16}{'largest logit':>15}"]
    for layer in found.layers:
        logit = "-" if layer.largest_logit is None else f"{layer.largest_logit:.4g}"
        lines.append(f"{layer.name:<12}{layer.gradient_norm:>15.4g}{layer.activation_rms:>16.4g}{logit:>15}")
    return "\n".join(lines)
