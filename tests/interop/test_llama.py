"""What Llama can hold; that it computes the same is in tests/model/test_huggingface.py."""

from dataclasses import replace

import pytest
import torch

from kvpath.attention import CLA, GQA
from kvpath.errors import UserError
from kvpath.interop.llama import is_llama, llama_from, llama_name
from kvpath.interop.llama_subject import LlamaSubject
from tests.cases import Case

pytest.importorskip("transformers")

CASE = Case("gqa", GQA(n_heads=2, n_kv_heads=1, head_dim=6), n_layers=2)
SHARED = Case("cla", CLA(n_heads=2, n_kv_heads=1, head_dim=6, group_size=2), n_layers=2)


def test_which_models_are_llamas() -> None:
    assert is_llama(CASE.config())
    assert not is_llama(SHARED.config())
    assert not is_llama(replace(CASE.config(), d_ff=[7, 8]))
    assert not is_llama(replace(CASE.config(), d_model=9))


def test_what_is_no_llama_says_why() -> None:
    with pytest.raises(
        UserError, match="attention must be GQA for Llama, got CLA; d_ff must be one width .* \\[7, 8\\]"
    ):
        llama_from(SHARED.decoder(d_ff=[7, 8]))


def test_names_of_weights() -> None:
    assert llama_name("head.weight") == "lm_head.weight"
    assert llama_name("blocks.1.mlp.w_down.weight") == "model.layers.1.mlp.down_proj.weight"


def test_weights_keep_their_dtype_and_angles_stay_in_float32() -> None:
    llama = llama_from(CASE.decoder(torch.bfloat16))
    assert {parameter.dtype for parameter in llama.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in llama.buffers()} == {torch.float32}


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@torch.no_grad()
def test_both_caches_continue_the_same_random_entries(static: bool) -> None:
    from kvpath.inference.subject import Ours

    model = CASE.decoder()
    tokens_BT = torch.tensor([[3], [5]])
    ours, theirs = Ours(model), LlamaSubject(model, static)
    caches = ours.filled(9, 2, 12), theirs.filled(9, 2, 12)
    for _ in range(2):
        expected, found = ours.step(tokens_BT, caches[0]), theirs.step(tokens_BT, caches[1])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert theirs.bytes_of(caches[1]) == 2 * 2 * 2 * 6 * 8 * (12 if static else 11)
