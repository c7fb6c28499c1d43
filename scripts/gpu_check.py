#!/usr/bin/env python
"""What only a GPU can show: numbers in bf16, kernels, speed in training and decoding, memory against what was planned.

    scripts/gpu_check.py [--budget 480] [--output gpu_check.json] [--small]

A list of cells, each with a limit of its own, run in order until the budget is spent; cells that did not finish are
named. --small runs toy models on whatever device there is, and no cell has a limit of its own. The last line, and the
output, is JSON.

Exit codes: 0, 1 if a cell failed, or found numbers, kernels, planned memory or compiled blocks wrong.
"""

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvpath import load_config, pieces
from kvpath.analysis.audit import audit
from kvpath.analysis.machine import OutOfTime, time_limit
from kvpath.analysis.run_plan import memory_of
from kvpath.analysis.sharing import Sharing
from kvpath.attention import Index
from kvpath.config import build_model
from kvpath.inference.cache import Cache
from kvpath.inference.workload import decoding_work, random_cache
from kvpath.interop.llama import llama_from
from kvpath.interop.llama_subject import LlamaSubject
from kvpath.model import BackboneConfig, Decoder
from kvpath.training.optimizer import OptimizerConfig
from kvpath.version import __version__

Found = dict[str, Any]

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
TOKENS = 16_384
"""Of a training step: eight sequences of 2K, two of 8K; one of 32K."""

HF = "hf"
"""In the place of a layout: Hugging Face's Llama, which is GQA."""

LONG = (HF, "gqa", "kvpath_concat", "kvpath_mla")
COMPILED = ("gqa", "kvpath_concat")
WORST_RATIO = 2.0
"""How much larger the RMS error of a bf16 cache may be than that of one bf16 pass without."""

TOLERANCE = 0.1
"""By how much planned bytes may be off the measured ones."""


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    name: str
    seconds: float
    """It is stopped after."""

    run: Callable[[], Found]


class CompiledBlocks:
    """The blocks of a model compiled one by one, each whole or not at all: counts graphs, and how often one is run."""

    def __init__(self, model: Decoder, backend: str) -> None:
        torch.compiler.reset()  # graphs of other models count against the same limit
        self.backend = lookup_backend(backend)
        self.graphs = self.runs = 0
        for block in model.blocks:
            block.compile(fullgraph=True, backend=self)

    def __call__(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """What torch asks of a backend."""
        made = self.backend(graph, inputs)
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.runs += 1
            return made(*arguments)

        return run


@dataclass(frozen=True)
class Check:
    """What the cells are made for."""

    device: torch.device
    small: bool
    layouts: list[str]

    def cells(self) -> Iterator[Cell]:
        """In the order of their worth: a little of everything first."""
        names = self.layouts
        short, middle, long = (16, 32, 64) if self.small else (2048, 8192, 32_768)
        yield Cell("peaks", 15, self.peaks)
        yield from (Cell(f"numbers {name}", 10, partial(self.numbers, name)) for name in names)
        yield from (Cell(f"kernels {name}", 10, partial(self.kernels, name)) for name in names)
        yield from self._training(short, (HF, *names))
        yield from self._decoding(middle)
        yield from self._training(middle, (HF, *names))
        yield from self._training(long, (name for name in LONG if name in (HF, *names)))
        for name in (name for name in COMPILED if name in names):
            yield Cell(f"train {name} {middle} compiled", 60, partial(self.train, name, middle, compiled=True))
        yield from self._decoding(long)
        yield from self._decoding(short)

    def _training(self, length: int, names: Iterable[str]) -> Iterator[Cell]:
        return (Cell(f"train {name} {length}", 15, partial(self.train, name, length)) for name in names)

    def _decoding(self, context: int) -> Iterator[Cell]:
        names = (HF, *self.layouts)
        return (Cell(f"decode {name} {context}", 8, partial(self.decode, name, context)) for name in names)

    def model(self, name: str, dtype: torch.dtype = torch.float32) -> Decoder:
        """Of the paper's size, its weights drawn on the device."""
        config = self.config(name)
        with self.device:
            return build_model(config).to(dtype)

    def config(self, name: str) -> BackboneConfig:
        """Of the paper's size, or a toy with its heads."""
        changes = ("n_layers=4", "d_model=32", "vocab_size=64", "d_ff=64") if self.small else ()
        return load_config(
            "model/98m",
            f"attention/{'gqa' if name == HF else name}",
            overrides=[f"--model.backbone.{change}" for change in changes],
        ).backbone

    # Right ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def numbers(self, name: str) -> Found:
        """RMS errors of bf16 logits against float64: one pass without a cache, and prefill and compact decoding."""
        config = replace(self.config(name), n_layers=4, d_ff=256)
        draw = torch.Generator().manual_seed(0)
        tokens_BT = torch.randint(config.vocab_size, (4, 48), generator=draw).to(self.device)
        model = build_model(config).to(self.device, torch.bfloat16).eval()
        truth_BTV = build_model(config).to(self.device, torch.bfloat16).double()(tokens_BT)
        alone = _rms(model(tokens_BT), truth_BTV)
        model.compact()
        cache = Cache(model.layout, 4, 64, dtype=torch.bfloat16, device=self.device)
        parts = [model(part, store=cache) for part in (tokens_BT[:, :40], *tokens_BT[:, 40:].split(1, dim=1))]
        cached = _rms(torch.cat(parts, dim=1), truth_BTV)
        return {"alone": alone, "cached": cached, "ratio": cached / alone, "right": cached <= WORST_RATIO * alone}

    def kernels(self, name: str) -> Found:
        """Passes in bf16 with the math path of the attention product shut off: those that have no other are named."""
        model, served = self.model(name), self.model(name, torch.bfloat16).eval()
        served.compact()
        length = max([128, *(2 * slot.window for _, _, slot in model.layout.slots() if slot.window)])
        tokens_BT = torch.zeros(2, length, dtype=torch.int64, device=self.device)
        place_T = torch.arange(length, device=self.device)
        start_B1 = torch.tensor([[length // 3], [length // 2]], device=self.device)
        second_BT = place_T >= start_B1
        packed = Index(place_T - second_BT * start_B1, documents=second_BT.long())

        @torch.no_grad()
        def serve(tokens_BT: Tensor, cache: Cache) -> Cache:
            served(tokens_BT, store=cache, wanted=1)
            return cache

        def cache() -> Cache:
            return Cache(served.layout, 2, 2 * length, dtype=torch.bfloat16, device=self.device)

        decoded, continued = (serve(tokens_BT, cache()) for _ in range(2))
        passes: dict[str, Callable[[], object]] = {
            "training": lambda: self._pass(model, tokens_BT),
            "training on packed documents": lambda: self._pass(model, tokens_BT, packed),
            "prefill": lambda: serve(tokens_BT, cache()),
            "decoding": lambda: [serve(tokens_BT[:, :1], decoded) for _ in range(2)],
            "prefill after a prefill": lambda: serve(tokens_BT[:, : length // 2], continued),
        }
        missing = [kind for kind, run in passes.items() if not self._has_kernel(run)]
        return {"passes": len(passes), "without_kernel": missing, "right": not missing}

    def _has_kernel(self, run: Callable[[], object]) -> bool:
        try:
            with sdpa_kernel(FUSED):
                run()
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            return False
        return True

    # Fast -----------------------------------------------------------------------------------------------------------

    def peaks(self) -> Found:
        """FLOPs/s of the best large product in bf16, and bytes/s read of memory."""
        size = 256 if self.small else 8192
        left, right = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        values = torch.zeros(2**20 if self.small else 2**31, device=self.device, dtype=torch.bfloat16)
        flops = 2 * size**3 / min(self._times(lambda: left @ right, 5))
        return {"flops_per_s": flops, "bytes_per_s": values.nbytes / min(self._times(values.sum, 3))}

    def train(self, name: str, length: int, compiled: bool = False) -> Found:
        """A training step as of `bf16-mixed`: weights and moments in float32, products in bf16."""
        if name == HF and not find_spec("transformers"):
            return {"skipped": "transformers is not installed"}
        before = self._held()
        model = self.model(name)
        config, sequences = model.config, max(1, (64 if self.small else TOKENS) // length)
        trained: nn.Module = llama_from(model).to(self.device).train() if name == HF else model
        blocks = CompiledBlocks(model, "aot_eager" if self.small else "inductor") if compiled else None
        optimizer = OptimizerConfig().build(trained)
        tokens_BT = torch.randint(config.vocab_size, (sequences, length), device=self.device)

        def step() -> None:
            optimizer.zero_grad()
            self._pass(trained, tokens_BT)
            nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()

        step()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median(self._times(step, 5))
        counted = audit(config, length)
        rate = sequences * length / seconds
        found: Found = {"tokens_per_s": rate, "flops_per_s": counted.training_flops_per_token * rate}
        if blocks is not None:
            earlier = blocks.runs
            step()
            run = blocks.runs - earlier
            found |= {"graphs": blocks.graphs, "compiled_blocks": run, "right": run == config.n_layers}
        elif self.device.type == "cuda" and name != HF and not self.small:
            sharing = Sharing(precision="bf16-mixed")
            planned = memory_of(config, counted.parameters, sharing, sequences, length).total
            found |= compared(planned, torch.cuda.max_memory_allocated() - before)
        return found

    @torch.no_grad()
    def decode(self, name: str, context: int) -> Found:
        """A token after a context, in bf16: ours by compact modules, Hugging Face's with a cache that grows."""
        if name == HF and not find_spec("transformers"):
            return {"skipped": "transformers is not installed"}
        model = self.model(name, torch.bfloat16).eval()
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        step: Callable[[], object]
        if name == HF:
            theirs = LlamaSubject(model, static=False)
            theirs.llama.to(self.device)
            grown = theirs.filled(context, 1, context)
            for layer in grown.layers:
                layer.keys, layer.values = layer.keys.to(self.device), layer.values.to(self.device)
            step = partial(theirs.step, token, grown)
        else:
            model.compact()
            cache = random_cache(model.layout, context, 1, context + 64, torch.bfloat16, self.device)
            step = partial(model, token, store=cache)
        seconds = statistics.median(self._times(step, 20))
        read = decoding_work(model.config, context, 1, torch.bfloat16).bytes
        return {"ms_per_token": seconds * 1000, "tokens_per_s": 1 / seconds, "bytes_per_token": read}

    def _pass(self, model: nn.Module, tokens_BT: Tensor, index: Index | None = None) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):  # as the Trainer
            if isinstance(model, Decoder):
                sums = model(tokens_BT, tokens_BT, index=index)
                loss = sums.total / sums.count
            else:
                loss = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
            loss.backward()

    def _times(self, step: Callable[[], object], count: int) -> list[float]:
        step()
        times = []
        for _ in range(count):
            self._wait()
            start = time.perf_counter()
            step()
            self._wait()
            times.append(time.perf_counter() - start)
        return times

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _held(self) -> int:
        """Bytes on the GPU; what earlier cells left in cycles goes away now, not while a cell measures."""
        if self.device.type != "cuda":
            return 0
        gc.collect()
        return torch.cuda.memory_allocated()


def compared(planned: int, measured: int) -> Found:
    """Bytes that were planned beside those that were held at most."""
    ratio = planned / measured
    return {
        "planned_bytes": planned,
        "measured_bytes": measured,
        "planned_over_measured": ratio,
        "right": abs(ratio - 1) <= TOLERANCE,
    }


def _rms(values: Tensor, truth: Tensor) -> float:
    return float((values.double() - truth).square().mean().sqrt())


def run(cells: list[Cell], budget: float) -> dict[str, Found]:
    """Every cell within its limit and what is left of the budget."""
    until = time.monotonic() + budget
    results: dict[str, Found] = {}
    for number, cell in enumerate(cells, start=1):
        left = until - time.monotonic()
        if left < 1:
            results[cell.name] = {"unfinished": "the budget was spent"}
            continue
        started = time.monotonic()
        try:
            with time_limit(min(cell.seconds, left)):
                results[cell.name] = cell.run()
        except OutOfTime:
            results[cell.name] = {"unfinished": f"it took more than {min(cell.seconds, left):.0f} s"}
        except torch.OutOfMemoryError as error:
            results[cell.name] = {"unfinished": str(error).split("\n")[0]}
        except Exception as error:  # a fault of one cell, shown in full, must not cost the others their turn
            traceback.print_exc()
            said = (str(error).strip() or "no reason given").split("\n")[0]
            results[cell.name] = {"right": False, "said": f"{type(error).__name__}: {said}"}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        said = ", ".join(f"{key} {_short(value)}" for key, value in results[cell.name].items())
        took, left = time.monotonic() - started, until - time.monotonic()
        print(
            f"{number}/{len(cells)} {cell.name}: {said} ({took:.1f} s, {left:.0f} s left)", file=sys.stderr, flush=True
        )
    return results


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def add_ratios(results: dict[str, Found]) -> None:
    """To the measured peaks, to Hugging Face's Llama at the same length, and of compiled to eager."""
    peaks = results.get("peaks", {})
    for cell, found in results.items():
        if "tokens_per_s" not in found:
            continue
        kind, name, length, *compiled = cell.split()
        if "flops_per_s" in found and "flops_per_s" in peaks:
            found["mfu"] = found["flops_per_s"] / peaks["flops_per_s"]
        if "bytes_per_token" in found and "bytes_per_s" in peaks:
            found["of_bound"] = found["ms_per_token"] / 1000 * peaks["bytes_per_s"] / found["bytes_per_token"]
        others = {"over_hf": f"{kind} {HF} {length}"} if name != HF else {}
        if compiled:
            others["over_eager"] = f"{kind} {name} {length}"
        for ratio, other in others.items():
            if theirs := results.get(other, {}).get("tokens_per_s"):
                found[ratio] = found["tokens_per_s"] / theirs


def driver() -> str | None:
    """The version of NVIDIA's; None if its tool does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return told[0] if told else None


def main(argv: list[str] | None = None) -> int:
    """Run all cells; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=480.0, metavar="S", help="seconds in all (480)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there too")
    parser.add_argument("--small", action="store_true", help="toy models, on any device")
    parser.add_argument("--layouts", nargs="+", metavar="NAME", help="pieces of attention/ (all)")
    parser.add_argument("--cells", nargs="*", metavar="WORD", help="only cells whose names have all of these words")
    args = parser.parse_args(argv)
    if not (torch.cuda.is_available() or args.small):
        print("no GPU is here; --small runs toy models without one", file=sys.stderr)
        return 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layouts = args.layouts or [name.split("/")[1] for name in pieces.directly_in("attention")]
    check = Check(device, args.small, layouts)
    cells = [cell for cell in check.cells() if set(args.cells or ()) <= set(cell.name.split())]
    if args.small:
        cells = [replace(cell, seconds=args.budget) for cell in cells]
    results = run(cells, args.budget)
    add_ratios(results)
    report = {
        "kvpath": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers") if find_spec("transformers") else None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
        "cuda": torch.version.cuda,
        "driver": driver(),
        "small": args.small,
        "unfinished": [name for name, found in results.items() if "unfinished" in found],
        "wrong": [name for name, found in results.items() if found.get("right") is False],
        "cells": results,
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
