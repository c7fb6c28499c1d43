"""No layout falls to the slow path of the attention product, whatever it is trained in."""

import pytest
import torch
from torch.profiler import profile

from tests.cases import SHIPPED, Case, tokens

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def attention_ops(case: Case, dtype: torch.dtype | None) -> dict[str, int]:
    """How often each attention operation ran in one forward and backward pass."""
    model, tokens_BT = case.decoder(torch.float32), tokens(2, 6)
    with profile() as recorded, torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        model(tokens_BT, tokens_BT).total.backward()
    names = (entry for entry in recorded.key_averages() if entry.key.startswith("aten::_scaled_dot_product"))
    return {entry.key: entry.count for entry in names}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16-autocast"])
@pytest.mark.parametrize("case", SHIPPED, ids=str)
def test_training_takes_the_fused_kernel_in_every_layer(case: Case, dtype: torch.dtype | None) -> None:
    assert attention_ops(case, dtype) == {FLASH: case.n_layers, f"{FLASH}_backward": case.n_layers}
