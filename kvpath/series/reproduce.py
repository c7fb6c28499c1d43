"""The paper's studies at a fraction of their size: the pieces and the file of a series, ready for `kvpath series`.

What scales by F: heads, the width of the model and of its SwiGLU, tokens and warm-up. What does not: the dimensions of
heads, deltas and latents, which are what the layouts differ in (a delta cut to a fraction would starve its rotary
part), the number of layers, the batch and the learning rates. The first layout of a study says how many parameters all
have: the others' SwiGLU widths are solved for it, and stored elements are equal by themselves.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from kvpath import pieces
from kvpath.analysis.audit import count_parameters, on_meta
from kvpath.analysis.matching import match_d_ff
from kvpath.config import load_config
from kvpath.errors import UserError

STAGES = ("2k", "8k", "32k")
_ABLATIONS = ("g2", "g8", "g12", "ds16", "ds64")

STUDIES = {
    "main": ("gqa", "cla", "kvpath_concat", "kvpath_residual"),
    "mla": ("mla", "kvpath_mla"),
    "ablations": ("kvpath_concat",),
}
"""The layouts of each study; the first one's parameters are the others', too."""


@dataclass(frozen=True)
class Reproduction:
    """What to prepare.

    Args:
        study: main, mla or ablations.
        scale: of the study; 1 is the paper's.
        output: directory of the pieces, of the series' file and, once it runs, of its runs.
        data: pieces of the text.
        seeds: how many, from 1 on.
        tokens: of the first stage; None for the scale's. Later stages have a tenth, and warm-up follows.
        search: whether a learning rate is searched for each layout first.

    Raises:
        UserError: every problem found, each naming the field and the value.
    """

    study: str
    scale: Fraction
    output: Path
    data: tuple[str, ...] = ("data/fineweb_edu",)
    seeds: int = 3
    tokens: float | None = None
    search: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.study not in STUDIES:
            problems.append(f"study must be one of {', '.join(STUDIES)}, got {self.study}")
        heads = 8 if self.study == "mla" else 4
        if not 0 < self.scale <= 1 or (self.scale * heads).denominator != 1:
            fit = ", ".join(str(Fraction(n, heads)) for n in range(heads, 0, -1))
            problems.append(f"--scale must leave whole heads of {heads}: one of {fit}, got {self.scale}")
        if self.seeds < 1:
            problems.append(f"--seeds must be positive, got {self.seeds}")
        if self.tokens is not None and not self.tokens > 0:
            problems.append(f"--tokens must be positive, got {self.tokens:g}")
        UserError.raise_all(problems)

    def write(self) -> Path:
        """Write everything; gives the file of the series.

        Raises:
            UserError: another study lies there, or a piece is not there.
        """
        files = self.files()
        different = [
            path
            for name, text in files.items()
            if (path := self.output / name).exists() and path.read_text(encoding="utf-8") != text
        ]
        UserError.raise_all(f"--output: {path} is there already, and not of this study" for path in different)
        for name, text in files.items():
            path = self.output / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return self.output / "series.yaml"

    def files(self) -> dict[str, str]:
        """The text of each file by its name below `output`."""
        return {
            "model.yaml": self._model(),
            **{f"stage/{stage}.yaml": self._stage(stage) for stage in STAGES},
            **self._layouts(),
            "series.yaml": self._series(),
        }

    @property
    def share(self) -> Fraction:
        """Of the paper's tokens."""
        return self.scale if self.tokens is None else Fraction(self.tokens) / Fraction(10**10)

    def _model(self) -> str:
        shipped = _shipped("model/98m")
        width = self._scaled(shipped["model"]["backbone"]["d_model"])
        d_ff = self._scaled(shipped["model"]["backbone"]["d_ff"])
        about = f"The paper's 12-layer backbone at a scale of {self.scale}"
        return _rewritten("model/98m", about, {"d_model": width, "d_ff": d_ff})

    def _stage(self, stage: str) -> str:
        name = f"stage/{stage}"
        shipped = _shipped(name)
        tokens = float(shipped["data"]["budget"]["tokens"]) * float(self.share)
        warmup = max(1, round(shipped["model"]["optimizer"]["warmup_steps"] * self.share))
        about = f"The {stage} stage at a scale of {self.scale}: {tokens:,.0f} tokens"
        return _rewritten(
            name, about, {"tokens": f"{tokens:.6g}" if tokens < 1e6 else _exponent(tokens), "warmup_steps": warmup}
        )

    def _layouts(self) -> dict[str, str]:
        wanted: int | None = None
        found = {}
        for layout in STUDIES[self.study]:
            name = f"attention/{layout}"
            arguments = _shipped(name)["model"]["backbone"]["attention"]["init_args"]
            heads = {key: self._scaled(arguments[key]) for key in ("n_heads", "n_kv_heads") if key in arguments}
            shipped_d_ff = _shipped(name)["model"]["backbone"]["d_ff"]
            d_ff: Any = self._scaled(shipped_d_ff) if wanted is None else "match"
            overrides = [f"--model.backbone.attention.init_args.{key}={value}" for key, value in heads.items()]
            overrides += [
                f"--model.backbone.d_model={self._scaled(512)}",
                f"--model.backbone.d_ff={self._scaled(2048)}",
            ]
            backbone = load_config("model/98m", name, *self.data, overrides=overrides).backbone
            left_over = 0
            if wanted is None:
                wanted = parameters = count_parameters(on_meta(_with_width(backbone, d_ff)))
            else:
                match = match_d_ff(backbone, wanted)
                d_ff, left_over, parameters = match.d_ff, match.left_over, wanted - match.left_over
            short = f", {left_over} fewer than {STUDIES[self.study][0]}" if left_over else ""
            about = f"{_first_line(name)} at a scale of {self.scale}: {parameters:,} parameters{short}"
            found[f"attention/{layout}.yaml"] = _rewritten(name, about, {**heads, "d_ff": d_ff})
        return found

    def _series(self) -> str:
        here = self.output.as_posix()
        shared = [f"{here}/model.yaml", *self.data]
        lines = [
            f"# The paper's study `{self.study}` at a scale of {self.scale}: kvpath series plan, run or submit",
            f"run: {here}/runs # a cell for each layout and seed, and in it a run for each stage",
            f"pieces: [{', '.join(shared)}] # what all runs share",
            "axes:",
            f"  {'variant' if self.study == 'ablations' else 'layout'}:",
            *self._arms(here),
            "  seed: # of the weights and of the order of the text: arms of one seed see the same tokens",
            "    set: [model.seed, data.seed]",
            f"    values: {list(range(1, self.seeds + 1))}",
            "stages: # in order, each from the weights of the one before, going on in the same stream of tokens",
            *(f"  - {{name: {stage}, pieces: [{here}/stage/{stage}.yaml]}}" for stage in STAGES),
        ]
        if self.search:
            lines += [
                "search: # of the first stage's peak learning rate, with a tenth of its tokens",
                "  set: model.optimizer.learning_rate",
                "  values: [3.0e-4, 1.0e-3, 3.0e-3]",
                f"  stage: {STAGES[0]}",
                "  seeds: {set: [model.seed, data.seed], values: [1001]} # none of the study's",
                f"  change: {{data.budget.tokens: {_exponent(float(self.share) * 1e9)}}}",
            ]
        evaluation = [name for name in ("eval/paper",) if name in pieces.available()]
        contexts = ", ".join(str(1024 * int(stage.removesuffix("k"))) for stage in STAGES)
        lines.append(
            f"test: {{pieces: [{', '.join(evaluation)}], after: last}} # what the paper measures"
            if evaluation
            else f"test: {{set: {{data.eval_contexts: [{contexts}]}}, after: last}} # perplexity of the held-out text"
        )
        return "\n".join(lines) + "\n"

    def _arms(self, here: str) -> list[str]:
        if self.study != "ablations":
            return [f"    {layout}: {{pieces: [{here}/attention/{layout}.yaml]}}" for layout in STUDIES[self.study]]
        concat = f"{here}/attention/kvpath_concat.yaml"
        return [f"    concat: {{pieces: [{concat}]}}"] + [
            f"    {name}: {{pieces: [{concat}, ablation/{name}]}}" for name in _ABLATIONS
        ]

    def _scaled(self, value: int) -> int:
        return int(value * self.scale)


def _with_width(backbone: Any, d_ff: int) -> Any:
    from dataclasses import replace

    return replace(backbone, d_ff=d_ff)


def _shipped(name: str) -> dict[str, Any]:
    values: dict[str, Any] = pieces.compose([pieces.shipped(name)])
    return values


def _first_line(name: str) -> str:
    return pieces.available()[name].split(" (")[0].split(":")[0]


def _rewritten(name: str, about: str, values: Mapping[str, Any]) -> str:
    """The text of a shipped piece with other values; counts in the remarks beside them would be wrong and go."""
    lines = [f"# {about}"]
    for line in pieces.shipped(name).read_text(encoding="utf-8").splitlines()[1:]:
        key = re.match(r"\s*(\w+): ", line)
        if key and key[1] in values:
            remark = re.sub(r"^[\d,]+ parameters over .*", "inner width of the SwiGLU", line.split(" # ", 1)[1])
            line = f"{line.split(':')[0]}: {values[key[1]]} # {remark}"
        lines.append(line)
    text = "\n".join(lines) + "\n"
    assert yaml.safe_load(text)
    return text


def _exponent(tokens: float) -> str:
    """As in the shipped pieces: 2.5e9."""
    digits, _, power = f"{tokens:.6e}".partition("e")
    digits = digits.rstrip("0")
    return f"{digits}{'0' * digits.endswith('.')}e{int(power)}"
