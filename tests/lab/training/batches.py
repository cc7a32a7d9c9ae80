"""Training batches, made on the device: rows of filler text with the lines of a sheet in it.

Every line is a template filled by lookups in pools of encoded strings, so that a batch of any size is some two hundred
operations on the device, about a millisecond beside a step, and no Python runs for a row. Worker processes that write
and encode text make 1 to 2 MB a second and core; a run of short rows on an H200 reads 3 million tokens a second.
"""

import random
from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad

from .plan import Family
from .pools import Pools
from .ruler import NOISE
from .sheets import Filler, Sheet, Sheets
from .templates import TEXT

_LONGEST = 1 << 17


@frozen(eq=False)
class Batch:
    """Rows to train on.

    Attributes:
        ids: Tokens, (rows, length).
        kinds: How each token counts in the loss, (rows, length).
        families: The family of each row.
    """

    ids: Tensor
    kinds: Tensor
    families: tuple[Family, ...]


class Tape:
    """Filler as one long run of tokens, and where its lines start."""

    def __init__(self, lines: Sequence[Sequence[int]], device: torch.device) -> None:
        counts = torch.tensor([len(line) for line in lines])
        self.tokens = torch.tensor([token for line in lines for token in line], device=device)
        self.host_starts = counts.cumsum(0) - counts
        self.starts = self.host_starts.to(device)

    def line(self, place: Tensor) -> Tensor:
        """The start of the line in which a place lies, or which begins there."""
        return self.starts[torch.searchsorted(self.starts, place, right=True) - 1]


class Batches:
    """Makes batches; all that is random comes from the pools' generator and the one that is passed."""

    def __init__(self, pools: Pools, lines: Sequence[Sequence[int]], start: int) -> None:
        """Prepare the filler.

        Args:
            pools: Pools of encoded strings.
            lines: Tokens of each line of filler text, its line break included.
            start: The start token.
        """
        self._pools, self._start, self._sheets = pools, start, Sheets(pools)
        first, other = pools.encode(f"{NOISE}\n"), pools.encode(f" {NOISE}\n")
        self._text = Tape(lines, pools.device)
        self._tapes = {
            "noise": Tape([first] * (_LONGEST // len(first) + 1), pools.device),
            "chain": Tape([first, *[other] * (_LONGEST // len(other) + 1)], pools.device),
        }

    @property
    def generator(self) -> torch.Generator:
        """The randomness of the device, whose state a resumed run needs."""
        return self._pools.generator

    def make(self, families: Sequence[Family], rng: random.Random, rows: int, length: int) -> Batch:
        """Make `rows` rows of `length` tokens, shared out among the families."""
        shares = [rows // len(families) + (index < rows % len(families)) for index in range(len(families))]
        made = [
            self.lay(self._sheets.make(family, rng, share, length), length)
            for family, share in zip(families, shares, strict=True)
        ]
        ids, kinds = (torch.cat(parts) for parts in zip(*made, strict=True))
        named: tuple[Family, ...] = tuple(
            family for family, share in zip(families, shares, strict=True) for _ in range(share)
        )
        return Batch(ids, kinds, named)

    def lay(self, sheet: Sheet, length: int) -> tuple[Tensor, Tensor]:
        """Return tokens and how each counts in the loss, both (rows, length).

        Lines stand in the order of their depths among whole lines of filler. What is left of a row behind the last
        question, where the filler has no line of that size, is text. A row whose lines don't fit loses its end.
        """
        device = self._pools.device
        longest = max(part.lines.tokens.shape[-1] for part in sheet.parts)
        widths = [longest - part.lines.tokens.shape[-1] for part in sheet.parts]
        parts = list(zip(sheet.parts, widths, strict=True))
        order = torch.cat([part.depths for part in sheet.parts], dim=1).sort(dim=1, stable=True)
        rows = len(order.values)
        wide = order.indices[..., None].expand(-1, -1, longest)
        tokens = torch.cat([pad(part.lines.tokens, (0, more)) for part, more in parts], dim=1).gather(1, wide)
        valid = torch.cat([pad(part.lines.valid, (0, more)) for part, more in parts], dim=1).gather(1, wide)
        kinds = torch.cat([pad(part.lines.kinds, (0, more)).expand(part.depths.shape[1], -1) for part, more in parts])[
            order.indices
        ]
        sizes = valid.sum(-1)
        room = (length - 1 - sizes.sum(1, keepdim=True)).clamp(min=0)
        tape, offset, body, least = self._filler(sheet.filler, room, length)
        depth = order.values.clamp(0, 1)
        before = torch.where(depth < 1, tape.line(offset + (depth * body).long()) - offset, body).clamp(min=0)
        before = torch.where(order.values < 0, 0, before.maximum(least.minimum(body)))
        begin = 1 + before + sizes.cumsum(1) - sizes
        place = begin[..., None] + valid.cumsum(-1) - 1
        place = torch.where(valid, place, length).clamp(max=length).flatten(1)
        out = torch.full((rows, length + 1), self._start, device=device)
        kind = torch.full_like(out, TEXT)
        taken = torch.zeros_like(out, dtype=torch.bool)
        out.scatter_(1, place, tokens.flatten(1))
        kind.scatter_(1, place, kinds.flatten(1))
        taken.scatter_(1, place, True)
        taken[:, 0] = True
        out, kind, taken = out[:, :length], kind[:, :length], taken[:, :length]
        index = (~taken).cumsum(1) - 1
        filler = tape.tokens[(offset + index).clamp(0, len(tape.tokens) - 1)]
        behind = self._text.tokens[(self._behind(rows, length) + index - body).clamp(0, len(self._text.tokens) - 1)]
        return torch.where(taken, out, torch.where(index < body, filler, behind)), kind

    def _filler(self, filler: Filler, room: Tensor, length: int) -> tuple[Tape, Tensor, Tensor, Tensor]:
        """What fills a row, where it begins, how many of its tokens there are, and how many stand before any line."""
        nothing = torch.zeros_like(room)
        if filler == "text":
            offset = self._starting(len(room), length) - room
            return self._text, offset, room, nothing
        if filler == "none":
            return self._text, nothing, nothing, nothing
        tape = self._tapes[filler]
        # In a chain's text the first line of noise has no space before it, so that no assignment comes first.
        least = tape.starts[1].expand_as(room) if filler == "chain" else nothing
        return tape, nothing, tape.line(room), least

    def _starting(self, rows: int, length: int) -> Tensor:
        """Starts of lines that have at least `length` tokens before them, so that a row ends where a line ends."""
        starts = self._text.host_starts
        low = min(int(torch.searchsorted(starts, length)), len(starts) - 1)
        return self._text.starts[low + self._pools.integers(len(starts) - low, rows, 1)]

    def _behind(self, rows: int, length: int) -> Tensor:
        starts = self._text.host_starts
        high = max(1, int(torch.searchsorted(starts, len(self._text.tokens) - length)))
        return self._text.starts[self._pools.integers(high, rows, 1)]
