"""Measures of a sparse call: exact recall from LSE, its lowest rows, output error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import AttentionCall, check_call, uncast
from sparseprefill.errors import ParameterError, printed
from sparseprefill.plan import Result
from sparseprefill.statistics.by_tile import row_lse
from sparseprefill.statistics.sampled import Logits, last_rows, spread_rows

SPREAD, LAST = 17, 15
"""Query rows that `watched_recall` looks at: over the call, and at its end. Of an odd number of stretches the ends fall
anywhere in query tiles, whose last rows alone would be no fair sample. 32 rows of 4 heads are a block of the kernel."""


@frozen(eq=False)
class WatchedRecall:
    """The recall of a few query rows of a call.

    rows: int64 ``[B, n]``, their index. real: bool ``[B, n]``, which of them exist. kept: ``[B, Hq, n]``, attention
    mass as `recall` gives it; NaN where there is no such row. spread: how many of them, the first, are spread over the
    call; the others are its last rows.
    """

    rows: Tensor
    real: Tensor
    kept: Tensor
    spread: int


@uncast
@torch.no_grad()
def watched_recall(call: AttentionCall, result: Result) -> WatchedRecall:
    """Recall of `SPREAD` rows over the call and of its `LAST` last ones, of each batch row, for hosts at work.

    Of what was executed: carry, refiners and parts included. One pass over the keys, no host synchronisation. The rows
    are others than those a `RecallFloor` samples, which it has just repaired.
    """
    some, ends = spread_rows(call, SPREAD), last_rows(call, LAST)
    rows, real = (torch.cat(pair, 1) for pair in zip(some, ends, strict=True))
    lse = row_lse(call, rows, real)
    mine = torch.gather(result.lse, 2, rows[:, None].expand(-1, call.geometry.heads, -1))
    kept = torch.where(real[:, None], torch.exp(mine - lse), torch.nan)
    return WatchedRecall(rows, real, kept, SPREAD)


@uncast
def recall(call: AttentionCall, result: Result, rows: int | Sequence[int] | Tensor | None = None) -> Tensor:
    """Attention mass kept by each row, ``[B, Hq, n]``: ``exp(lse_sparse - lse_dense)``; NaN in padding rows.

    rows: indices of query rows, or how many to take evenly spaced (the last row among them), or None for all. The
    dense LSE is computed for these rows alone, in chunks of keys, so a sample is cheap at any length.

    Raises ParameterError for the result of a call of other sizes, and for rows that are none.
    """
    check_call(call)
    _check_result(call, result)
    index = sample_rows(call, rows)
    return torch.exp(result.lse[:, :, index] - dense_lse(call, index))


def lowest_rows(kept: Tensor) -> tuple[Tensor, Tensor]:
    """The 1st percentile and the lowest of all rows of all heads of a recall; no host synchronisation.

    kept: of any shape, as `recall` gives it; rows that are NaN, as padding is, do not count. The percentile is a row
    that is there, of n rows the one with n // 100 below it: the lowest of up to 99. NaN where there is no row.
    """
    padded = torch.nn.functional.pad(kept.flatten(), (0, 1), value=torch.nan)
    each = padded.sort().values  # NaN last; quantile() takes 16 million values at most
    below = (~each.isnan()).sum() // 100
    return each.take(below), each[0]


def _check_result(call: AttentionCall, result: Result) -> None:
    if not isinstance(result, Result):
        raise ParameterError(f"result is {type(result).__name__}: pass what this call's run returned")
    wanted = call.geometry
    if result.lse.device != call.q.device:
        remedy = f"move it to the call's device {call.q.device}"
        raise ParameterError(f"result.lse is on {result.lse.device}: {remedy}")
    made = result.plan.mask.geometry if result.parts is None else result.parts.geometry
    if not made.same_sizes(wanted) or result.lse.shape != call.q.shape[:3]:
        given = f"{made.describe()}, lse {tuple(result.lse.shape)}"
        raise ParameterError(
            f"result is of another call ({given}): pass what this call's run returned, for {wanted.describe()}"
        )


def sample_rows(call: AttentionCall, rows: int | Sequence[int] | Tensor | None) -> Tensor:
    """int64 [n] on the call's device."""
    q_len = call.q.shape[2]
    if rows is None:
        return torch.arange(q_len, device=call.q.device)
    remedy = f"pass a positive number of rows, a list of row indices from 0 to {q_len - 1}, or None for all"
    if isinstance(rows, int):
        if rows < 1 or isinstance(rows, bool):
            raise ParameterError(f"rows is {printed(rows)}: {remedy}")
        spaced = torch.linspace(0, q_len - 1, min(rows, q_len), dtype=torch.float64, device="cpu")
        return spaced.round().long().to(call.q.device)
    try:
        index = torch.as_tensor(rows, device=call.q.device)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ParameterError(f"rows is {printed(rows)}: {remedy}") from None
    whole = index.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if index.dim() != 1 or index.numel() == 0 or not whole or bool(((index < 0) | (index >= q_len)).any()):
        raise ParameterError(f"rows is {printed(rows)}: {remedy}")
    return index.to(torch.int64)


@uncast
def dense_lse(call: AttentionCall, rows: Tensor, chunk: int = 16384) -> Tensor:
    """``[B, Hq, n]``: LSE of dense attention over the keys each row may see, float32 or better."""
    index, real = rows.expand(call.q.shape[0], -1), call.geometry.real_queries()[:, rows]
    chunks = (slice(first, min(first + chunk, call.kv_len)) for first in range(0, call.kv_len, chunk))
    return Logits(call, index, real).lse(chunks)


def output_error(out: Tensor, truth: Tensor) -> float:
    """Relative norm of the difference, in float64 (host sync). ParameterError for tensors of two shapes or devices."""
    for name, x in (("out", out), ("truth", truth)):
        if not isinstance(x, Tensor):
            raise ParameterError(f"{name} is {printed(x)}: pass a tensor")
    if out.shape != truth.shape:
        raise ParameterError(f"out is {printed(out)}, truth is {printed(truth)}: pass tensors of one shape")
    if out.device != truth.device:
        raise ParameterError(f"out is on {out.device}, truth is on {truth.device}: pass tensors on one device")
    truth = truth.to(torch.float64)
    return float((out.to(torch.float64) - truth).norm() / truth.norm())
