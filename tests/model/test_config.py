import pytest

from kvpath.attention import GQA
from kvpath.errors import UserError
from kvpath.model import BackboneConfig


def config(**changes: object) -> BackboneConfig:
    plain = dict(vocab_size=50257, d_model=8, n_layers=2, d_ff=7, attention=GQA(n_heads=2, n_kv_heads=1, head_dim=4))
    return BackboneConfig(**{**plain, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be positive, got 0"),
        ({"d_model": -8}, "d_model must be positive, got -8"),
        ({"n_layers": 0}, "n_layers must be positive, got 0"),
        ({"max_seq_len": 0}, "max_seq_len must be positive, got 0"),
        ({"pad_vocab_to": 0}, "pad_vocab_to must be positive, got 0"),
        ({"d_ff": 0}, "d_ff must be positive, got 0"),
        ({"d_ff": [7]}, "d_ff must be one width or n_layers=2 of them, got 1"),
        ({"d_ff": [7, -1]}, "d_ff must be positive, got -1 at index 1"),
        ({"norm_eps": 0.0}, "norm_eps must be positive, got 0.0"),
        ({"init_std": -0.1}, "init_std must be positive, got -0.1"),
        ({"rope_base": 0}, "rope_base must be positive, got 0"),
        ({"rope_base": float("nan")}, "rope_base must be positive, got nan"),
        ({"vocab_size": 0, "d_ff": 0}, "vocab_size must be positive, got 0; d_ff must be positive, got 0"),
    ],
)
def test_bad_fields_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("vocab_size", "pad_to", "padded"), [(50257, 64, 50304), (64, 64, 64), (65, 64, 128), (7, 1, 7), (1, 64, 64)]
)
def test_padded_vocabulary(vocab_size: int, pad_to: int, padded: int) -> None:
    assert config(vocab_size=vocab_size, pad_vocab_to=pad_to).padded_vocab_size == padded


def test_one_width_stands_for_every_layer() -> None:
    assert config(d_ff=7).d_ff_per_layer == [7, 7]
    assert config(d_ff=[7, 9]).d_ff_per_layer == [7, 9]
