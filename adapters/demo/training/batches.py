"""Training batches, made on the device: filler text with needles and questions."""

import torch
from attrs import frozen
from torch import Tensor

from ..formats import DIGITS
from ..words import ADJECTIVES, NOUNS
from .plan import Mix
from .templates import TEXT, Template, Words


@frozen
class Items:
    """Lines to be put into each row, all of the same template."""

    template: Template
    tokens: Tensor
    depths: Tensor


class Batches:
    """Makes batches; all that is random comes from one seed."""

    def __init__(self, words: Words, lines: list[list[int]], start: int, seed: int) -> None:
        """Prepare the filler text.

        Args:
            words: The templates.
            lines: Tokens of each line of filler text, its line break included.
            start: The start token.
            seed: The seed.
        """
        self._words, self._start, self._device = words, start, words.device
        counts = torch.tensor([len(line) for line in lines])
        self._hay = torch.tensor([t for line in lines for t in line], device=self._device)
        starts = counts.cumsum(0) - counts
        self._host_starts, self._starts = starts, starts.to(self._device)
        self._rng = torch.Generator(self._device).manual_seed(seed)

    def make(self, mix: Mix, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return tokens and how each counts in the loss, both (rows, length)."""
        items = self._items(mix, rows)
        longest = max(item.template.length for item in items)
        tokens = torch.cat([_pad(item.tokens, longest) for item in items], dim=1)
        kinds = torch.cat([_pad(item.template.kinds, longest).repeat(item.tokens.shape[1], 1) for item in items])
        sizes = torch.cat([self._full(item.tokens.shape[1], item.template.length) for item in items])
        order = torch.cat([item.depths for item in items], dim=1).sort(dim=1)
        tokens = tokens.gather(1, order.indices[..., None].expand(-1, -1, longest))
        kinds, sizes = kinds[order.indices], sizes[order.indices]
        room = length - 1 - sum(i.tokens.shape[1] * i.template.length for i in items)
        if room < 0:
            raise ValueError(f"the lines are {-room} tokens longer than {length}")
        offset = self._offsets(rows, room)
        before = self._snap(offset, (order.values.clamp(0, 1) * room).long())
        begin = 1 + before + sizes.cumsum(1) - sizes
        steps = torch.arange(longest, device=self._device)
        place = torch.where(steps < sizes[..., None], begin[..., None] + steps, length).flatten(1)
        out = torch.full((rows, length + 1), self._start, device=self._device)
        kind = torch.full_like(out, TEXT)
        taken = torch.zeros_like(out, dtype=torch.bool)
        out.scatter_(1, place, tokens.flatten(1))
        kind.scatter_(1, place, kinds.flatten(1))
        taken.scatter_(1, place, True)
        taken[:, 0] = True
        out, kind, taken = out[:, :length], kind[:, :length], taken[:, :length]
        hay = self._hay[(offset + (~taken).cumsum(1) - 1).clamp(0, len(self._hay) - 1)]
        return torch.where(taken, out, hay), kind

    def _items(self, mix: Mix, rows: int) -> list[Items]:
        words = self._words
        total = len(ADJECTIVES) * len(NOUNS)
        keys = self._rand(rows, total).topk(mix.keys, dim=1).indices
        adjectives, nouns = words.adjectives[keys // len(NOUNS)], words.nouns[keys % len(NOUNS)]
        plain = mix.keys - mix.groups
        values, depths = self._values(rows, plain, 1), self._depths(rows, plain)
        items = [self._needles(adjectives[:, :plain], nouns[:, :plain], values, depths)]
        if mix.alone:
            part = slice(0, mix.alone)
            filled = words.one.fill(adjectives[:, part, None], nouns[:, part, None], values[:, part].flatten(2))
            items.append(Items(words.one, filled, self._after(depths[:, part], mix.early)))
        if mix.lists:
            part, by = slice(plain - mix.lists * mix.listed, plain), (mix.lists, mix.listed)
            template = words.keys[mix.listed]
            filled = template.fill(
                _split(adjectives[:, part], by),
                _split(nouns[:, part], by),
                values[:, part].reshape(rows, mix.lists, -1),
            )
            last = _split(depths[:, part], by).amax(2)
            items.append(Items(template, filled, self._after(last, mix.early)))
        if mix.groups:
            many = self._values(rows, mix.groups, mix.values)
            spots = self._depths(rows, mix.groups * mix.values)
            adj, noun = adjectives[:, plain:, None], nouns[:, plain:, None]
            each = [part.expand(-1, -1, mix.values).flatten(1) for part in (adj, noun)]
            items.append(self._needles(each[0], each[1], many.flatten(1, 2)[:, :, None], spots))
            filled = words.values[mix.values].fill(adj, noun, many.flatten(2))
            last = _split(spots, (mix.groups, mix.values)).amax(2)
            items.append(Items(words.values[mix.values], filled, self._after(last, mix.early)))
        return [item for item in items if item.tokens.shape[1]]

    def _needles(self, adjectives: Tensor, nouns: Tensor, values: Tensor, depths: Tensor) -> Items:
        template = self._words.needle
        filled = template.fill(adjectives[..., None], nouns[..., None], values.flatten(2))
        return Items(template, filled, depths)

    def _values(self, rows: int, count: int, each: int) -> Tensor:
        """Return digit tokens (rows, count, each, digits), first digits ascending."""
        first = self._rand(rows, count, 9).topk(each, dim=2).indices.sort(dim=2).values + 1
        shape = (rows, count, each, DIGITS - 1)
        rest = torch.randint(10, shape, generator=self._rng, device=self._device)
        return self._words.digits[torch.cat([first[..., None], rest], dim=-1)]

    def _depths(self, rows: int, count: int) -> Tensor:
        """Return depths; some are exactly 0 or 1, and some rows have all at one end."""
        depths = (self._rand(rows, count) * 1.1 - 0.05).clamp(0, 1)
        kind = self._rand(rows, 1)
        depths = torch.where(kind < 0.15, depths * 0.08, depths)
        return torch.where(kind > 0.95, 1 - depths * 0.08, depths)

    def _after(self, depths: Tensor, early: float) -> Tensor:
        """Return depths of questions: behind their needles, or at the end (above 1)."""
        rand = self._rand(*depths.shape)
        inside = depths + (1 - depths) * rand + 1e-6
        return torch.where(self._rand(*depths.shape) < early, inside, 1.5 + rand)

    def _offsets(self, rows: int, room: int) -> Tensor:
        """Return where in the filler text rows begin, so that they end with a line."""
        low = int(torch.searchsorted(self._host_starts, room))
        shape = (rows, 1)
        pick = torch.randint(low, len(self._starts), shape, generator=self._rng, device=self._device)
        return self._starts[pick] - room

    def _snap(self, offset: Tensor, before: Tensor) -> Tensor:
        """Move places in the filler text back to the start of their line."""
        line = torch.searchsorted(self._starts, offset + before, right=True) - 1
        return (self._starts[line] - offset).clamp(min=0)

    def _full(self, count: int, value: int) -> Tensor:
        return torch.full((count,), value, device=self._device)

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._rng, device=self._device)


def _pad(tokens: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, length - tokens.shape[-1]))


def _split(tensor: Tensor, sizes: tuple[int, int]) -> Tensor:
    return tensor.reshape(tensor.shape[0], *sizes)
