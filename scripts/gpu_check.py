#!/usr/bin/env python
"""What only a GPU can show: numbers in bf16, kernels, speed in training and decoding, memory against what was planned.

    scripts/gpu_check.py [--budget 480] [--output gpu_check.json] [--small]

A list of cells, each with a limit of its own, run in order until the budget is spent; cells that did not finish are
named. --small runs toy models on whatever device there is. The last line, and the output, is JSON.

Exit codes: 0, 1 if a layout's numbers or kernels are wrong.
"""

import argparse
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvpath import load_config, pieces
from kvpath.analysis.audit import audit
from kvpath.analysis.machine import OutOfTime, time_limit
from kvpath.analysis.run_plan import memory_of
from kvpath.analysis.sharing import Sharing
from kvpath.config import build_model
from kvpath.inference.cache import Cache
from kvpath.inference.workload import random_cache
from kvpath.interop.llama import llama_from
from kvpath.model import BackboneConfig, Decoder
from kvpath.training.optimizer import OptimizerConfig
from kvpath.version import __version__

Found = dict[str, Any]

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
TOKENS = 16_384
"""Of a training step: eight sequences of 2K, two of 8K; one of 32K."""

LONG = ("gqa", "kvpath_concat", "kvpath_mla")
COMPILED = ("gqa", "kvpath_concat")
WORST_RATIO = 2.0
"""How much larger the RMS error of a bf16 cache may be than that of one bf16 pass without."""


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    name: str
    seconds: float
    """It is stopped after."""

    run: Callable[[], Found]


@dataclass(frozen=True)
class Check:
    """What the cells are made for."""

    device: torch.device
    small: bool
    layouts: list[str]

    def cells(self) -> Iterator[Cell]:
        """In the order of their worth."""
        names = self.layouts
        short, middle, long = (16, 32, 64) if self.small else (2048, 8192, 32_768)
        yield Cell("peaks", 15, self.peaks)
        for name in names:
            yield Cell(f"numbers {name}", 10, partial(self.numbers, name))
        for name in names:
            yield Cell(f"kernels {name}", 10, partial(self.kernels, name))
        for length in (short, middle):
            yield Cell(f"train hf {length}", 20, partial(self.train, "gqa", length, hf=True))
            for name in names:
                yield Cell(f"train {name} {length}", 15, partial(self.train, name, length))
        for name in (name for name in COMPILED if name in names):
            yield Cell(f"train {name} {middle} compiled", 60, partial(self.train, name, middle, compiled=True))
        for name in (name for name in LONG if name in names):
            yield Cell(f"train {name} {long}", 20, partial(self.train, name, long))
        for name in names:
            for context in (short, middle, long):
                yield Cell(f"decode {name} {context}", 8, partial(self.decode, name, context))

    def model(self, name: str, dtype: torch.dtype = torch.float32) -> Decoder:
        """Of the paper's size."""
        return build_model(self.config(name)).to(self.device, dtype)

    def config(self, name: str) -> BackboneConfig:
        """Of the paper's size, or a toy with its heads."""
        changes = ("n_layers=4", "d_model=32", "vocab_size=64", "d_ff=64") if self.small else ()
        return load_config(
            "model/98m", f"attention/{name}", overrides=[f"--model.backbone.{change}" for change in changes]
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
        """A training pass in bf16 with the math path of the attention product shut off."""
        model = self.model(name)
        tokens_BT = torch.zeros(1, 128, dtype=torch.int64, device=self.device)
        try:
            with sdpa_kernel(FUSED):
                self._pass(model, tokens_BT)
        except RuntimeError as error:
            if "kernel" not in str(error):
                raise
            return {"right": False, "said": str(error).split("\n")[0]}
        return {"right": True}

    # Fast -----------------------------------------------------------------------------------------------------------

    def peaks(self) -> Found:
        """FLOPs/s of the best large product in bf16, and bytes/s read of memory."""
        size = 256 if self.small else 8192
        left, right = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        values = torch.zeros(2**20 if self.small else 2**31, device=self.device, dtype=torch.bfloat16)
        flops = 2 * size**3 / min(self._times(lambda: left @ right, 5))
        return {"flops_per_s": flops, "bytes_per_s": values.nbytes / min(self._times(values.sum, 3))}

    def train(self, name: str, length: int, hf: bool = False, compiled: bool = False) -> Found:
        """A training step under autocast: weights and moments in float32, products in bf16."""
        config = self.config(name)
        sequences = max(1, (64 if self.small else TOKENS) // length)
        if hf and not find_spec("transformers"):
            return {"skipped": "transformers is not installed"}
        model: nn.Module = llama_from(self.model(name)).train() if hf else self.model(name)
        if compiled:
            for block in model.get_submodule("blocks").children():
                block.compile(backend="eager" if self.small else "inductor")
        optimizer = OptimizerConfig().build(model)
        tokens_BT = torch.randint(config.vocab_size, (sequences, length), device=self.device)

        def step() -> None:
            optimizer.zero_grad()
            self._pass(model, tokens_BT)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        step()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median(self._times(step, 5))
        counted = audit(config, length)
        found = {
            "tokens_per_s": sequences * length / seconds,
            "flops_per_s": counted.training_flops_per_token * sequences * length / seconds,
        }
        if self.device.type == "cuda" and not hf and not compiled:
            sharing = Sharing(precision="bf16-mixed")
            planned = memory_of(config, counted.parameters, sharing, sequences, length).total
            found |= {"planned_bytes": planned, "measured_bytes": torch.cuda.max_memory_allocated()}
        return found

    @torch.no_grad()
    def decode(self, name: str, context: int) -> Found:
        """One token after a context, by compact modules, in bf16."""
        model = self.model(name, torch.bfloat16).eval()
        model.compact()
        cache = random_cache(model.layout, context, 1, context + 64, torch.bfloat16, self.device)
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        seconds = statistics.median(self._times(lambda: model(token, store=cache), 20))
        return {"ms_per_token": seconds * 1000}

    def _pass(self, model: nn.Module, tokens_BT: Tensor) -> None:
        with torch.autocast(self.device.type, torch.bfloat16):
            if isinstance(model, Decoder):
                sums = model(tokens_BT, tokens_BT)
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
        except Exception:  # a fault of one cell, shown in full, must not cost the others their turn
            traceback.print_exc()
            results[cell.name] = {"right": False, "said": "failed, see the traceback"}
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
    """To the measured peak, and to Hugging Face's Llama at the same length."""
    peak = results["peaks"].get("flops_per_s")
    for name, found in results.items():
        if "flops_per_s" in found and peak and name != "peaks":
            found["mfu"] = found["flops_per_s"] / peak
            theirs = results.get(f"train hf {name.split()[2]}", {}).get("tokens_per_s")
            if theirs and "hf" not in name:
                found["over_hf"] = found["tokens_per_s"] / theirs


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
    results = run(cells, args.budget)
    if "peaks" in results:
        add_ratios(results)
    report = {
        "kvpath": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
        "cuda": torch.version.cuda,
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
