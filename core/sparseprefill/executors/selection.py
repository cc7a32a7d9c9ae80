"""Which keys one query tile of one head needs: lists turned into tensor indices, on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask


class TileKeys:
    """Walks a mask tile by tile. Reads the lists' counts on the host once; meant for the reference path."""

    def __init__(self, mask: SparseMask) -> None:
        geometry = mask.geometry
        self.mask = mask
        self.rows = geometry.tile_rows(mask.tile_q)
        self._tiles, self._stripes = _host(mask.tiles), _host(mask.stripes)
        self._first_position = geometry.first_position().tolist()
        self._first_tile = geometry.first_tile(mask.tile_q).tolist()
        self._first_group = geometry.first_tile(mask.group_rows).tolist()
        self._length = geometry.key_counts().tolist()
        starts = geometry.starts
        self._start = [0] * geometry.batch if starts is None else starts.tolist()

    def pick(self, batch: int, head: int, row: int) -> tuple[slice, Tensor | slice, Tensor] | None:
        """Query rows, key indices and who may see whom (bool [rows, keys]) of one query tile; None if empty."""
        mask, geometry = self.mask, self.mask.geometry
        tile = self._first_tile[batch] + row
        first, length = self._first_position[batch], self._length[batch]
        low = max(tile * mask.tile_q, first, 0)
        high = min((tile + 1) * mask.tile_q, first + geometry.q_len, length)
        if low >= high:
            return None
        positions = self._positions(batch, head, row, tile // mask.group - self._first_group[batch])
        positions = positions[positions < high]
        if positions.numel() == 0:
            return None
        query = torch.arange(low, high, device=geometry.device)[:, None]
        keep = query >= positions
        if geometry.window is not None:
            keep &= query - positions < geometry.window
        begin, end = int(positions[0]), int(positions[-1]) + 1
        start = self._start[batch]
        run = end - begin == positions.numel()
        keys: Tensor | slice = slice(begin + start, end + start) if run else positions + start
        return slice(low - first, high - first), keys, keep

    def _positions(self, batch: int, head: int, row: int, group: int) -> Tensor:
        """int64, ascending and distinct: key positions that the lists name."""
        parts: list[Tensor] = []
        if self._tiles is not None:
            offset, count = self._tiles[0][batch][head][row], self._tiles[1][batch][head][row]
            tiles = self._tiles[2][offset : offset + count, None].to(torch.int64)
            size = self.mask.tile_k
            parts.append((tiles * size + torch.arange(size, device=tiles.device)).reshape(-1))
        if self._stripes is not None:
            offset, count = self._stripes[0][batch][head][group], self._stripes[1][batch][head][group]
            parts.append(self._stripes[2][offset : offset + count].to(torch.int64))
        if len(parts) == 2:
            union: Tensor = torch.unique(torch.cat(parts))
            return union
        return parts[0] if parts else torch.empty(0, dtype=torch.int64, device=self.mask.geometry.device)


def _host(lists: IndexLists | None) -> tuple[list[list[list[int]]], list[list[list[int]]], Tensor] | None:
    return None if lists is None else (lists.offsets.tolist(), lists.counts.tolist(), lists.indices)
