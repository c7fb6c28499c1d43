"""Trains the demo's two arms, tests them at two context lengths, and prints one table. Called by `scripts/demo`."""

import gzip
import json
import lzma
import sys
import time
from pathlib import Path

from kvpath import audit, load_config
from kvpath.cli.main import main as kvpath
from kvpath.data.sources import PackageFiles

ARMS = {"gqa": "demo/gqa", "kvpath_concat": "demo/kvpath_concat"}
WARNING = "One seed at this size ranks nothing: this shows that both work, not which is better."


def train_and_test(run: Path, piece: str) -> None:
    """Fit and test one arm, each only as far as it is not done yet."""
    if not (run / "summary.json").exists():
        print(f"\n== training {run}", flush=True)
        call("fit", "-c", "demo/base", "-c", piece, "--run", str(run), "--ckpt_path", "last")
    if not (run / "perplexity.json").exists():
        print(f"\n== testing {run}", flush=True)
        call("test", "--ckpt_path", str(run))


def call(*argv: str) -> None:
    """Run a kvpath command; end with its exit code if it fails."""
    code = kvpath(list(argv))
    if code:
        sys.exit(code)


def table(runs: dict[str, Path]) -> str:
    """The arms, and the compressors on the same held-out speeches."""
    rows = [["", "parameters", "stored", "read", "ppl@64", "ppl@256", "bits/byte@64", "bits/byte@256"]]
    for arm, run in runs.items():
        config = load_config("demo/base", ARMS[arm])
        costs = audit(config.backbone, context=256)
        results = {row["context"]: row for row in json.loads((run / "perplexity.json").read_text(encoding="utf-8"))}
        rows.append(
            [
                config.name,
                f"{costs.parameters:,}",
                f"{costs.stored_elements_per_token:,.0f}",
                f"{costs.read_elements_per_token:,.0f}",
                *(f"{results[context]['perplexity']:.2f}" for context in (64, 256)),
                *(f"{results[context]['bits_per_byte']:.3f}" for context in (64, 256)),
            ]
        )
    for name, bits in compressors().items():
        rows.append([name, "", "", "", "", "", f"{bits:.3f}", f"{bits:.3f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def compressors() -> dict[str, float]:
    """Bits per byte of gzip -9 and xz -9 on the speeches that the models are tested on."""
    base = load_config("demo/base", ARMS["gqa"]).values["data"]
    speeches = PackageFiles(**base["source"]["init_args"]).documents()
    every = base["holdout_every"]
    text = "".join(speech for i, speech in enumerate(speeches) if i % every == every // 2).encode()
    packed = {"gzip -9": gzip.compress(text, 9), "xz -9": lzma.compress(text, preset=9)}
    return {name: 8 * len(data) / len(text) for name, data in packed.items()}


def last_sample(run: Path) -> str:
    """The text sample of the run's last validation."""
    return str(json.loads((run / "samples.jsonl").read_text(encoding="utf-8").splitlines()[-1])["text"])


def main() -> None:
    """Train, test, print."""
    folder = Path(sys.argv[1])
    started = time.monotonic()
    runs = {arm: folder / arm for arm in ARMS}
    for arm, run in runs.items():
        train_and_test(run, ARMS[arm])
    lines = [
        "stored, read: elements per token of context, all layers; ppl: perplexity per token at that context length;",
        "bits/byte: of held-out State of the Union speeches, the compressors on the same text",
        "",
        table(runs),
        "",
        WARNING,
    ]
    text = "\n".join(lines)
    (folder / "table.txt").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n")
    for arm, run in runs.items():
        print(f"{arm} writes: {last_sample(run)!r}\n")
    for run in runs.values():
        print(f"{run}: config.yaml env.json metrics.jsonl samples.jsonl perplexity.json summary.json tb/ checkpoints/")
    print(f"table: {folder / 'table.txt'} · curves: tensorboard --logdir {folder}")
    print(f"took {(time.monotonic() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
