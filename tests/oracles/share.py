"""Sharing over any method, head by head in float64: SharePrefill's Algorithms 1 to 4, with another mask for the rest.

Who shares and who makes a pivot is decided, and pivots are made, as in `oracles.share_prefill`; heads that do neither
compute the pairs of the inner mask, which is given, and no others. Shares no code with the plugin.
"""

from __future__ import annotations

from torch import Tensor

from oracles.classic import Keep
from oracles.share_prefill import Answer, Clusters, Parameters, Rest, all_layers


def share(
    layers: list[tuple[Tensor, Tensor, Tensor]],
    inner: list[Tensor],
    clusters: Clusters,
    p: Parameters,
    *,
    q_offset: int | None = None,
    starts: list[int] | None = None,
    lengths: list[int] | None = None,
    softcap: float | None = None,
) -> list[Answer]:
    """All layers of one call, in order. inner: of each layer the inner method's mask, bool ``[B, Hq, Nq, Nkv]``.

    Patterns are "shared", "dense" and, for the inner mask, "vertical_slash", as the paper names its own.
    """

    def rest(layer: int, b: int, real: list[int], keys: slice) -> Rest:
        return lambda h, head: _pairs(inner[layer][b, h, real][:, keys], head.first)

    return all_layers(layers, clusters, p, rest, q_offset=q_offset, starts=starts, lengths=lengths, softcap=softcap)


def _pairs(mask: Tensor, first: int) -> Keep:
    """Of the inner mask. first: position of its first row."""
    return lambda query, key: bool(mask[query - first, key])
