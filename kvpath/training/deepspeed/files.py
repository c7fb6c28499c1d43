"""How DeepSpeed's engine writes and reads the files of a checkpoint here: as plain values, down to the disk."""

from typing import Any

import torch

from kvpath.training.whole_files import save_to_disk

_OBJECTS = ("loss_scaler", "param_slice_mappings")
"""What of an optimizer's state is no plain value: a scale that is always 1 here, and what only a converter reads."""


def plain_files(optimizer: Any) -> Any:
    """A checkpoint engine for the engine's optimizer. DeepSpeed is imported here, where there must be one."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class PlainFiles(TorchCheckpointEngine):  # type: ignore[misc]
        """Leaves out objects, which only code could load, and lets no fault of a disk stop one rank alone."""

        def __init__(self, optimizer: Any) -> None:
            """For the engine's optimizer."""
            super().__init__()
            self.optimizer = optimizer
            self.fault: OSError | None = None
            """What the disk said to the last write that it refused."""

        def save(self, state_dict: dict[str, Any], path: str) -> None:
            """Write a file, or remember why not."""
            try:
                save_to_disk(_plain(state_dict), path)
            except OSError as fault:
                self.fault = fault

        def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
            """Read a file; nothing in it is run."""
            state: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=True)
            if "optimizer_state_dict" in state:
                state["optimizer_state_dict"]["loss_scaler"] = self.optimizer.loss_scaler
            return state

    return PlainFiles(optimizer)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    optimizer = state.get("optimizer_state_dict")
    if optimizer is None:
        return state
    kept = {name: value for name, value in optimizer.items() if name not in _OBJECTS}
    return {**state, "optimizer_state_dict": {**kept, "zero_stage": int(optimizer["zero_stage"])}}
