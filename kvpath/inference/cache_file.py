"""A cache in a file: the stored entries in safetensors, what they mean in its metadata."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvpath.analysis.allocation import kept_tokens
from kvpath.attention.context import Index
from kvpath.attention.layout import Layout
from kvpath.errors import UserError
from kvpath.inference.cache import Cache

FORMAT_VERSION = 1


def save_cache(cache: Cache, path: Path) -> None:
    """Write the entries so far, not the room for more."""
    length = len(cache)
    tensors = {f"placement.{name}": part[:, :length] for name, part in cache.placement.tensors.items()}
    for layer, name, _ in cache.layout.cached():
        tensors[f"{layer}.{name}"] = cache.entries(layer, name).values
    meaning = {
        "format_version": FORMAT_VERSION,
        "batch": cache.batch,
        "length": length,
        "capacity": cache.capacity,
        "block": cache.block,
        "plain": cache.placement.plain,
        "dtype": _name(cache.dtype),
        "slot_dtypes": {name: _name(dtype) for name, dtype in cache.slot_dtypes.items()},
        "slots": _slots(cache.layout),
    }
    save_file({name: part.contiguous() for name, part in tensors.items()}, path, {"kvpath": json.dumps(meaning)})


def load_cache(path: Path, layout: Layout, device: torch.device | str) -> Cache:
    """A cache as it was saved, with the capacity that it had.

    Raises:
        UserError: the file is damaged, of another format version, or of another layout.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            meaning = json.loads((file.metadata() or {}).get("kvpath", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is no cache that can be read: {error}") from error
    if not isinstance(meaning, dict) or "format_version" not in meaning:
        raise UserError(f"{path} holds no cache of kvpath")
    if meaning["format_version"] != FORMAT_VERSION:
        raise UserError(
            f"{path} has format_version {meaning['format_version']}; this version of kvpath reads {FORMAT_VERSION}"
        )
    if meaning["slots"] != (expected := _slots(layout)):
        differing = sorted(
            name
            for name in meaning["slots"].keys() | expected.keys()
            if meaning["slots"].get(name) != expected.get(name)
        )
        name = differing[0]
        raise UserError(
            f"{path} was written by a model of another layout: slot {name} is"
            f" {meaning['slots'].get(name, 'absent')} there and {expected.get(name, 'absent')} here"
            f" (heads, dim, window); {len(differing)} slots differ"
        )
    cache = Cache(
        layout,
        meaning["batch"],
        meaning["capacity"],
        dtype=_dtype(meaning["dtype"]),
        device=device,
        slot_dtypes={name: _dtype(dtype) for name, dtype in meaning["slot_dtypes"].items()},
        block=meaning["block"],
    )
    places = [tensors.get(f"placement.{part}") for part in ("positions", "valid", "documents")]
    values: dict[tuple[int, str], Tensor] = {}
    for layer, name, slot in layout.cached():
        found = tensors.get(f"{layer}.{name}")
        shape = (meaning["batch"], kept_tokens(slot, meaning["length"]), slot.heads, slot.dim)
        if found is None or found.shape != shape:
            raise UserError(f"{path} is damaged: slot {layer}.{name} must have shape {shape}")
        values[layer, name] = found
    if places[0] is None or places[0].shape[1] != meaning["length"]:
        raise UserError(f"{path} is damaged: positions must be those of {meaning['length']} tokens")
    cache.restore(Index(places[0], places[1], places[2], plain=meaning["plain"]), values)
    return cache


def _slots(layout: Layout) -> dict[str, list[int | None]]:
    return {f"{layer}.{name}": [slot.heads, slot.dim, slot.window] for layer, name, slot in layout.cached()}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UserError(f"dtype must be the name of one of torch's, got {name!r}")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
