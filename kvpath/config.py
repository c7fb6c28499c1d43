"""Configurations in Python: pieces and overrides in, a checked model configuration out."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kvpath.model.config import BackboneConfig
from kvpath.model.decoder import Decoder

if TYPE_CHECKING:
    from kvpath.data.datamodule import PackedText


@dataclass(frozen=True)
class Config:
    """A parsed configuration."""

    backbone: BackboneConfig
    name: str
    """What the configuration calls itself, else the last piece that chose an attention, else the strategy's class."""

    values: dict[str, Any]
    """All keys, the Trainer's and the data's included, as plain values."""


def load_config(*pieces: str, overrides: tuple[str, ...] | list[str] = ()) -> Config:
    """Compose pieces, later ones over earlier ones, and overrides over all.

    Args:
        pieces: local YAML files or shipped pieces, such as "model/98m", "attention/gqa".
        overrides: as on the command line: ["--model.backbone.n_layers=6"].

    Raises:
        UserError: naming the key, the value and what would be right.
    """
    from jsonargparse import ActionConfigFile

    from kvpath.analysis.matching import resolve_widths
    from kvpath.cli.parsing import PlainErrorParser, allow_choice_by_class
    from kvpath.pieces import compose, resolve
    from kvpath.training.module import LanguageModel

    allow_choice_by_class()
    parser = PlainErrorParser()
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    parser.add_lightning_class_args(LanguageModel, "model")
    parser.add_argument("--name", type=str | None)
    groups = ("data", "trainer", "every", "sample", "on_spike")
    for group in groups:
        parser.add_argument(f"--{group}", type=dict[str, Any], default={})
    for key in ("seed_everything", "peak_flops", "stop_on", "on_nan"):
        parser.add_argument(f"--{key}", type=Any)
    flags = [flag for piece in pieces for flag in ("-c", str(resolve(piece)))]
    parsed = parser.parse_args([*flags, *overrides])
    backbone = resolve_widths(parser.instantiate(parsed).model.backbone)
    parsed.pop("config")
    stems = [piece.rsplit("/", 1)[-1].removesuffix(".yaml") for piece in pieces if "attention" in piece]
    name = parsed.name or (stems[-1] if stems else type(backbone.attention).__name__)
    # The parser takes these as they are, a later piece's in place of an earlier one's.
    plain = compose(map(resolve, pieces), overrides)
    return Config(backbone, name, {**parsed.as_dict(), **{group: plain.get(group, {}) for group in groups}})


def backbone_from(values: dict[str, Any]) -> BackboneConfig:
    """A model configuration from plain values, as checkpoints and configuration files hold it.

    Raises:
        UserError: naming the key, the value and what would be right.
    """
    from kvpath.cli.parsing import PlainErrorParser, allow_choice_by_class

    allow_choice_by_class()
    parser = PlainErrorParser()
    parser.add_class_arguments(BackboneConfig, "backbone")
    return cast(BackboneConfig, parser.instantiate(parser.parse_object({"backbone": values})).backbone)


def data_from(values: dict[str, Any]) -> "PackedText":
    """The data from plain values, as configuration files hold it.

    Raises:
        UserError: naming the key, the value and what would be right.
    """
    from kvpath.cli.parsing import PlainErrorParser, allow_choice_by_class
    from kvpath.data.datamodule import PackedText

    allow_choice_by_class()
    parser = PlainErrorParser()
    parser.add_class_arguments(PackedText, "data")
    return cast("PackedText", parser.instantiate(parser.parse_object({"data": values})).data)


def build_model(config: Config | BackboneConfig, seed: int = 0) -> Decoder:
    """The model, its weights drawn from `seed` alone."""
    import torch

    backbone = config.backbone if isinstance(config, Config) else config
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Decoder(backbone)
