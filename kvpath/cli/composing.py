"""The complete configuration that a `kvpath fit` would store, without running it."""

from typing import Any

import yaml

from kvpath.cli.lightning import KVPathCLI
from kvpath.cli.resume import changes

_NO_RESULT = ("model.compile", "model.activation_checkpointing", "data.num_workers", "data.eval_batch_tokens")
_NO_RESULT_LAST = ("micro_batch", "tries", "verify")


class Composer:
    """Composes command lines of `kvpath fit`, with one parser for all."""

    def __init__(self) -> None:
        self._cli: _Unrun | None = None

    def stored(self, command: list[str]) -> str:
        """What `config.yaml` would hold.

        Args:
            command: "fit" and its arguments, each `-c=` with a file.

        Raises:
            UserError: naming the key, the value and what would be right.
        """
        if self._cli is None:
            self._cli = _Unrun(command)
        else:
            self._cli.parse_arguments(self._cli.parser, command)
            self._cli.before_instantiate_classes()
        return self._cli.stored()

    def values(self, command: list[str]) -> dict[str, Any]:
        """The same as plain values."""
        values: dict[str, Any] = yaml.safe_load(self.stored(command))
        return values

    def changed(self, before: str, command: list[str]) -> dict[str, tuple[Any, Any]]:
        """The keys in which a stored configuration differs from what would be stored now, if results depend on them.

        What only says how a machine is to do it, and how often something is written down, is left out.
        """
        now = self.stored(command)
        assert self._cli is not None
        found = changes(before, now, self._cli._parser("fit").get_defaults().as_dict())
        return {key: values for key, values in found.items() if _decides(key, values[1])}


def _decides(key: str, now: Any) -> bool:
    if key == "data.start_tokens":
        return now is not None  # else it followed from the stage before
    if key.startswith(_NO_RESULT) or key.rpartition(".")[2] in _NO_RESULT_LAST:
        return False
    return key.startswith(("model.", "data.", "on_spike.")) or key in ("trainer.precision", "on_nan")


class _Unrun(KVPathCLI):
    """Parses and refuses what `kvpath fit` would, and builds nothing."""

    def _set_seed(self) -> None:
        pass

    def _settle_start(self) -> None:
        """The run before may not be there yet."""

    def _settle_logger(self) -> None:
        """Nothing is logged."""

    def _check_installed(self) -> None:
        """What is made ready here may run on other machines."""

    def instantiate_classes(self) -> None:
        pass

    def after_instantiate_classes(self) -> None:
        pass

    def _run_subcommand(self, subcommand: str) -> None:
        pass
