"""Trained models back from disk, ready to write text."""

from pathlib import Path

import torch

from kvpath.data.tokenizer import TokenizerConfig
from kvpath.errors import UserError
from kvpath.inference.stored_model import StoredModel
from kvpath.inference.text_model import TextModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def load(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: str | Path | None = None,
    compile: bool = False,
) -> TextModel:
    """A trained model with its tokenizer.

    Args:
        path: a run directory (its `last`), a checkpoint file, or an exported directory.
        device: where it runs; None for a CUDA device if there is one, else the CPU.
        dtype: of the weights: fp32, bf16, fp16, fp64 or a torch dtype; None for that in which they are stored.
        tokenizer: a `tokenizer.json`, or a name on the Hub; None for that of the run or export.
        compile: decode by a compiled model: worth its minute for long texts.

    Raises:
        UserError: there are no weights, they are damaged, of another format or of another model.
    """
    wanted_dtype, wanted_device = torch_dtype(dtype), torch_device(device)
    stored = StoredModel.read(path)
    model = stored.build()
    model.to(wanted_device, wanted_dtype).eval()
    model.compact()
    found = stored.tokenizer() if tokenizer is None else TokenizerConfig(str(tokenizer)).load()
    return TextModel(model, found, compile)


def torch_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype by our short name; None stays None.

    Raises:
        UserError: there is no such name.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    return DTYPES[dtype]


def torch_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch raises both for a device that is not there
        raise UserError(f"device {device} is not to be had: {str(error).splitlines()[0]}") from error
