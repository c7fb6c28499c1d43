"""The attention product of decoding on a CPU, compiled: `attend_few` where `takes` says that it can.

torch's own kernels read a cache in bfloat16 at a tenth of a CPU's bandwidth where the CPU has no products of such
numbers, and none reads keys in parts over features.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpath.attention.native.build import library
from kvpath.attention.native.rows import DTYPES

MOST_ROWS = 16
"""Queries that share a key/value head: beyond it, products of matrices are faster."""

MOST_PARTS = 16


class _Part(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("row", ctypes.c_int64),
        ("token", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
    )


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("batch", "groups", "tokens", "heads", "key_parts", "value_parts")),
        *((name, ctypes.c_int32) for name in ("narrow", "q_narrow", "threads")),
        ("scale", ctypes.c_float),
        ("keys", ctypes.c_int64),
        ("k", ctypes.POINTER(_Part)),
        ("v", ctypes.POINTER(_Part)),
        ("q", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("q_row", "q_token", "q_head")),
        ("mask", ctypes.c_void_p),
        ("mask_row", ctypes.c_int64),
        ("out", ctypes.c_void_p),
    )


def takes(n_rows: int, k: Sequence[Tensor], v: Sequence[Tensor]) -> bool:
    """Whether `attend_few` can do it: `n_rows` queries that share a head, over these parts of keys and values."""
    parts = (*k, *v)
    return (
        n_rows <= MOST_ROWS
        and not torch.compiler.is_compiling()
        and max(len(k), len(v)) <= MOST_PARTS
        and parts[0].dtype in DTYPES
        and parts[0].shape[1] > 0
        and all(x.device.type == "cpu" and x.dtype == parts[0].dtype and x.stride(-1) == 1 for x in parts)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in parts))
        and library() is not None
    )


def attend_few(q_BTHD: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale * Q K^T) V for a few queries, parts of keys and values read where they lie.

    Args:
        q_BTHD: queries, their features in the order of the parts of the keys.
        k: (B, S, G_i, D_i), float32 or bfloat16; a part with fewer heads than the others is shared by groups of them.
        v: (B, S, G_j, V_j)
        mask: (B or 1, 1, T, S) bool, True where a query sees a key; None if all see all.
        scale: what scores are multiplied by.

    Returns:
        (B, T, H, sum of V_j) in float32. A query that sees no key gives zeros.

    Raises:
        MemoryError: there is none for the partial sums of the ranges of keys.
    """
    functions = library()
    assert functions is not None
    batch, n_queries, heads, _ = q_BTHD.shape
    if q_BTHD.dtype not in DTYPES or q_BTHD.stride(-1) != 1:
        q_BTHD = q_BTHD.float().contiguous()
    out_BTHV = torch.empty(batch, n_queries, heads, sum(part.shape[-1] for part in v))
    mask = mask if mask is None else mask.contiguous()
    problem = _Problem(
        batch, max(part.shape[2] for part in (*k, *v)), n_queries, heads, len(k), len(v),
        k[0].dtype == torch.bfloat16, q_BTHD.dtype == torch.bfloat16, torch.get_num_threads(), scale, k[0].shape[1],
        _parts(k), _parts(v), q_BTHD.data_ptr(), *q_BTHD.stride()[:3],
        None if mask is None else mask.data_ptr(),
        0 if mask is None or mask.shape[0] == 1 else mask.stride(0),
        out_BTHV.data_ptr(),
    )  # fmt: skip
    if functions.kvpath_attend(ctypes.byref(problem)):
        raise MemoryError(f"no memory for the partial sums of {batch} rows")
    return out_BTHV


def _parts(tensors: Sequence[Tensor]) -> "ctypes.Array[_Part]":
    return (_Part * len(tensors))(
        *(_Part(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), x.shape[2], x.shape[3]) for x in tensors)
    )
