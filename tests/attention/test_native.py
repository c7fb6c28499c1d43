"""The compiled product of few queries against a plain one in float64."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvpath.attention import native
from kvpath.attention.native import build

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-6}
"""RMS over RMS: entries are widened exactly, so bfloat16 costs nothing more."""

pytestmark = pytest.mark.skipif(build.library() is None, reason="there is no C compiler")


def entries(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """(B, S, G, D) as a cache has them: heads outermost, with room that holds NaN."""
    batch, length, heads, dim = shape
    memory = torch.full((batch, heads, length + 3, dim + 2), torch.nan, dtype=dtype)
    values = torch.randn(batch, heads, length, dim, generator=torch.Generator().manual_seed(seed))
    memory[:, :, :length, 1 : dim + 1] = values.to(dtype)
    return memory[:, :, :length, 1 : dim + 1].transpose(1, 2)


def brute_force(q_BTHD: Tensor, k: list[Tensor], v: list[Tensor], mask: Tensor | None, scale: float) -> Tensor:
    """In float64, with everything joined and repeated; zeros where nothing is seen."""
    heads = q_BTHD.shape[2]
    k_BSHD, v_BSHV = (
        torch.cat([part.double().repeat_interleave(heads // part.shape[2], dim=2) for part in parts], dim=-1)
        for parts in (k, v)
    )
    scores = scale * torch.einsum("bthd,bshd->bhts", q_BTHD.double(), k_BSHD)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("bhts,bshv->bthv", scores.softmax(dim=-1).nan_to_num(0.0), v_BSHV)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 257, 1000, 5003])
@pytest.mark.parametrize(
    ("batch", "queries", "heads", "k_parts", "v_parts"),
    [
        (1, 1, 4, [(4, 16)], [(4, 16)]),
        (2, 1, 6, [(2, 7)], [(2, 5)]),
        (1, 3, 4, [(2, 12), (1, 3)], [(2, 12), (1, 9)]),
        (3, 2, 5, [(1, 40), (1, 8)], [(1, 33)]),
        (1, 1, 4, [(1, 4), (4, 6), (2, 2)], [(4, 1)]),
    ],
)
def test_equals_brute_force(
    dtype: torch.dtype,
    length: int,
    batch: int,
    queries: int,
    heads: int,
    k_parts: list[tuple[int, int]],
    v_parts: list[tuple[int, int]],
) -> None:
    k = [entries(batch, length, *part, dtype=dtype, seed=i) for i, part in enumerate(k_parts)]
    v = [entries(batch, length, *part, dtype=dtype, seed=10 + i) for i, part in enumerate(v_parts)]
    width = sum(dim for _, dim in k_parts)
    q = torch.randn(batch, queries, heads, width, generator=torch.Generator().manual_seed(99)).to(dtype)
    scale = 3 / math.sqrt(width)
    for rows in (1, batch):
        seen = torch.rand(rows, 1, queries, length, generator=torch.Generator().manual_seed(7)) < 0.6
        for mask in (None, seen, torch.ones_like(seen)):
            found = native.attend_few(q, k, v, mask, scale)
            assert found.shape == (batch, queries, heads, sum(dim for _, dim in v_parts))
            expected = brute_force(q, k, v, mask, scale)
            if bool(expected.any()):
                assert error(found, expected) < TOLERANCE[dtype]
            else:
                assert not found.any()


def test_a_latent_is_key_and_value() -> None:
    latent, rotary = (entries(2, 300, 1, dim, dtype=torch.bfloat16, seed=dim) for dim in (24, 8))
    q = torch.randn(2, 1, 8, 32, generator=torch.Generator().manual_seed(1))
    found = native.attend_few(q, [latent, rotary], [latent], None, 0.2)
    assert error(found, brute_force(q, [latent, rotary], [latent], None, 0.2)) < 2e-6


def test_columns_of_one_slot_are_not_taken_for_each_other() -> None:
    """Keys and values that begin at the same place in memory and are as wide, but lie apart otherwise."""
    slot = entries(1, 200, 2, 16, dtype=torch.bfloat16, seed=0)
    k, v = slot[:, ::2], slot[:, :100]
    q = torch.randn(1, 1, 2, 16, generator=torch.Generator().manual_seed(1))
    assert error(native.attend_few(q, [k], [v], None, 0.25), brute_force(q, [k], [v], None, 0.25)) < 2e-6


def test_large_scores_and_fading_peaks() -> None:
    """Each block's largest score beats all before it, by more than an exponent holds."""
    steps = torch.arange(2000.0)
    k = (steps[:, None] * torch.ones(8)).view(1, 2000, 1, 8)
    v = steps.view(1, 2000, 1, 1).expand(-1, -1, -1, 8).contiguous()
    q = torch.ones(1, 1, 1, 8)
    for sign in (1.0, -1.0):
        found = native.attend_few(sign * q, [k], [v], None, 1.0)
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found.double(), brute_force(sign * q, [k], [v], None, 1.0), rtol=1e-5, atol=1e-5)


def test_threads_do_not_change_the_result() -> None:
    k, v = (entries(1, 3001, 2, 16, dtype=torch.float32, seed=seed) for seed in (0, 1))
    q = torch.randn(1, 1, 4, 16, generator=torch.Generator().manual_seed(2))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(native.attend_few(q, [k], [v], None, 0.25))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_what_it_leaves_to_torch() -> None:
    x = torch.zeros(1, 5, 2, 4)
    assert native.takes(1, [x], [x])
    assert not native.takes(native.MOST_ROWS + 1, [x], [x])
    assert not native.takes(1, [x.double()], [x.double()])
    assert not native.takes(1, [x], [x.bfloat16()])
    assert not native.takes(1, [x.to("meta")], [x.to("meta")])
    assert not native.takes(1, [x.transpose(1, 3)], [x])
    assert not native.takes(1, [x[:, :0]], [x[:, :0]])
    assert not native.takes(1, [x.clone().requires_grad_()], [x])


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of compiled files of the test's own; what is compiled is looked for anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "library", build.library.__wrapped__)
    return tmp_path / "kvpath" / "native"


def test_it_is_compiled_once(fresh: Path) -> None:
    assert build.library() is not None
    (file,) = fresh.iterdir()
    assert file.suffix == ".so"
    made = file.stat().st_mtime_ns
    assert build.library() is not None
    assert [path.stat().st_mtime_ns for path in fresh.iterdir()] == [made]


def test_it_can_be_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.SWITCH, "0")
    assert build.library() is None
    assert not fresh.exists()


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_a_compiler_that_fails_is_named(fresh: Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.warns(UserWarning, match=f"{compiler}"):
        assert build.library() is None
    assert not list(fresh.glob("*"))
