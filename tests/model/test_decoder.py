import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kvpath.attention import GQA
from kvpath.model import BackboneConfig, Decoder
from kvpath.model.decoder import turned
from tests.cases import CASES, Case, every_case, tokens

WIDE = GQA(n_heads=4, n_kv_heads=2, head_dim=32)


def config(**changes: object) -> BackboneConfig:
    """Wide enough for statistics."""
    plain = dict(vocab_size=250, d_model=96, n_layers=2, d_ff=[160, 200], attention=WIDE)
    return BackboneConfig(**{**plain, **changes})  # type: ignore[arg-type]


def reset(model: nn.Module) -> None:
    """As sharded training does it: each module draws its own weights."""
    for module in model.modules():
        reset_parameters = getattr(module, "reset_parameters", None)
        if callable(reset_parameters):
            reset_parameters()


def deferred(wanted: BackboneConfig) -> Decoder:
    """Made on the meta device, then given memory and weights. What was there before must not remain."""
    with torch.device("meta"):
        model = Decoder(wanted)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    reset(model)
    return model


@pytest.mark.parametrize("make", [Decoder, deferred], ids=["at-once", "deferred"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("init_std", [0.02, 0.1])
def test_weights_are_drawn_from_a_normal_distribution(make: type[Decoder], tied: bool, init_std: float) -> None:
    model = make(config(tied_embeddings=tied, init_std=init_std))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all(), name
            continue
        deviation = init_std / parameter.numel() ** 0.5
        assert abs(parameter.mean().item()) < 5 * deviation, name
        assert parameter.std().item() == pytest.approx(init_std, rel=5 / (2 * parameter.numel()) ** 0.5), name
        # A normal distribution, not a uniform one or a truncated one.
        beyond_two = float((parameter.abs() > 2 * init_std).float().mean())
        assert beyond_two == pytest.approx(0.0455, abs=5 * (0.0455 / parameter.numel()) ** 0.5), name


@every_case
def test_every_parameter_belongs_to_a_module_that_draws_it(case: Case) -> None:
    """Every strategy's weights have values when construction is deferred."""
    assert all(parameter.isfinite().all() for parameter in deferred(case.config()).parameters())


def test_the_same_seed_gives_the_same_weights() -> None:
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        weights.append(Decoder(config()).state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["head.weight"], weights[2]["head.weight"])


@pytest.mark.parametrize("make", [Decoder, deferred], ids=["at-once", "deferred"])
def test_tied_weights_are_one_parameter(make: type[Decoder]) -> None:
    tied, untied = make(config(tied_embeddings=True)), make(config())
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 256 * 96
    tied.double()
    assert tied.head.weight is tied.embedding.weight


def test_the_vocabulary_is_padded() -> None:
    model = Decoder(config(vocab_size=250, pad_vocab_to=64))
    assert model.embedding.weight.shape == model.head.weight.shape == (256, 96)
    assert model(torch.tensor([[249]])).shape == (1, 1, 256)
    assert Decoder(config(vocab_size=256, pad_vocab_to=64)).embedding.weight.shape == (256, 96)


def test_widths_are_per_layer() -> None:
    shapes = {name: tuple(value.shape) for name, value in Decoder(config()).named_parameters()}
    assert [shapes[f"blocks.{layer}.mlp.w_gate.weight"] for layer in range(2)] == [(160, 96), (200, 96)]


@every_case
def test_later_tokens_change_nothing_earlier(case: Case) -> None:
    model, tokens_BT = case.decoder(), tokens(2, 9)
    changed = tokens_BT.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 13
    before, after = model(tokens_BT), model(changed)
    assert_close(after[:, :6], before[:, :6], atol=1e-12, rtol=0)
    assert ((after - before)[:, 6:].abs().amax(-1) > 1e-6).all()


@every_case
def test_what_a_layer_makes_is_dropped_after_its_last_reader(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is handed what its layout says that it reads, and returns what it says that it makes."""
    model = case.decoder()
    shapes: list[tuple[list[torch.Size], list[torch.Size]]] = []
    plain_call = Decoder._call

    def watched(self: Decoder, block: nn.Module, x: Tensor, read: tuple[Tensor, ...], context: object) -> object:
        out = plain_call(self, block, x, read, context)
        shapes.append(([values.shape for values in read], [values.shape for values in out[1]]))
        return out

    monkeypatch.setattr(Decoder, "_call", watched)
    model(tokens(2, 9))
    for (read, made), entry in zip(shapes, model.layout.layers, strict=True):
        handed = [(model.layout.slot(key.owner, key.name), key.columns) for key in entry.reads]
        assert read == [(2, 9, slot.heads, len(range(*(columns or (0, slot.dim))))) for slot, columns in handed]
        assert made == [(2, 9, slot.heads, slot.dim) for slot in entry.makes.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_case
def test_narrow_types_stay_near_float64(case: Case, dtype: torch.dtype) -> None:
    tokens_BT = tokens(1, 5)
    exact, narrow = case.decoder()(tokens_BT), case.decoder(dtype)(tokens_BT)
    assert narrow.dtype == dtype
    scale = exact.abs().max().item()
    assert_close(narrow.double(), exact, atol=scale * 30 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize(
    "case",
    [Case("gqa", GQA(n_heads=4, n_kv_heads=2, head_dim=6), n_layers=1)]
    + [pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=str,
)
def test_compiled_gradients_are_equal(case: Case) -> None:
    tokens_BT, labels_BT = tokens(2, 9), tokens(2, 9, seed=3)
    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        model = case.decoder()
        run = torch.compile(model, fullgraph=True) if compiled else model
        loss = run(tokens_BT, labels_BT).total
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    # Compiled cosines of the float32 angles may differ in the last bit.
    assert_close(found[1], found[0], atol=1e-5, rtol=1e-6)


def test_tall_weights_are_turned_for_one_vector_and_stay_what_they_were() -> None:
    tall, flat, small = torch.randn(1024, 256), torch.randn(256, 1024), torch.randn(64, 8)
    assert torch.equal(turned(tall), tall)
    assert turned(tall).shape == tall.shape
    assert turned(tall).stride() == (1, 1024)
    assert turned(flat) is flat
    assert turned(small) is small
    narrow = tall.bfloat16()
    assert turned(narrow) is narrow
