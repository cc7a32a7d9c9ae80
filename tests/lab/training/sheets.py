"""What a row of training text holds beside filler: one family of tasks with its lines, questions and answers."""

import random
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from attrs import frozen
from sparseprefill.adapters.demo import formats
from sparseprefill.adapters.demo.formats import ADJECTIVES, NOUNS
from torch import Tensor

from . import ruler
from .plan import Family, Mix, draw_mix
from .pools import LARGE, Piece, Pools
from .templates import ANSWER, IGNORED, KEYS, Lines, Template, place

Filler = Literal["text", "noise", "chain", "none"]
"""What stands between the lines of a row: text of the Python at hand, RULER's noise, that of ruler_vt, or nothing."""

HEAD, END = -1.0, 2.0
"""Depths of lines before and behind all filler."""

MOST_QUESTIONS = 96
_SHOTS = 8
_NIAH_KINDS = (("words", "number"), ("uuid", "uuid"))
_SHORTEST_ECHO = 4
_LIST_KEYS = ("pair", "words", "words", "name", "coded", "number", "uuid")
_LIST_VALUES = ("number", "number", "words", "name", "coded", "uuid")
_LIST_FORMS = (
    "The code for {key} is {value}.",
    "item {key} = {value}",
    "Note: {key} has {value}.",
    ruler.NIAH_NEEDLE.replace("{what}", "number"),
)


@frozen(eq=False)
class Part:
    """Lines of one template and where they stand.

    Attributes:
        lines: The filled lines.
        depths: (rows, lines): from 0 to 1 within the filler, below 0 before it, above 1 behind it.
    """

    lines: Lines
    depths: Tensor


@frozen(eq=False)
class Sheet:
    """The lines of some rows, and what stands between them."""

    parts: tuple[Part, ...]
    filler: Filler


class Sheets:
    """Makes sheets. What is drawn on the host (counts and wordings) comes from the generator that is passed."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        keys = [(f"{{adjective.{i}}}", f"{{noun.{i}}}") for i in range(5)]
        values = [f"{{digits7.{i}}}" for i in range(5)]
        key, value = keys[0], values[0]
        self._needle = self._template(f"{formats.needle(key, value)}\n")
        self._one = self._template(formats.one_question(key), formats.answer(keys[:1], values[:1]), "\n")
        self._long = [
            self._template(formats.long_question(key, "{opening}", asked), formats.answer(keys[:1], values[:1]), "\n")
            for asked in formats.ASKED
        ]
        self._values = {
            n: self._template(formats.values_question(key, n), formats.answer([key] * n, values[:n]), "\n")
            for n in range(2, 6)
        }
        self._keys = {
            n: self._template(formats.keys_question(keys[:n]), formats.answer(keys[:n], values[:n]), "\n")
            for n in range(2, 6)
        }
        self._lists: dict[tuple[str, str, int], tuple[Template, Template]] = {}
        self._niah = {(kind, what): self._niah_templates(kind, what) for kind, what in _NIAH_KINDS}
        self._chain_head = self._template(f"{ruler.VT_HEAD}\n\n")
        self._start = self._template(f" {ruler.VT_START.format(name='{name.0}', value='{digits5.0}')}")
        self._link = self._template(f" {ruler.VT_LINK.format(name='{name.1}', before='{name.0}')}")
        self._chains = {n: self._chain_question(n) for n in range(2, ruler.VT_HOPS + 2)}
        self._shots = [self._shot(random.Random(f"shot/{index}")) for index in range(_SHOTS)]
        self._frequent_head = self._template(ruler.FWE_HEAD)
        self._word = self._template(" {coded.0}")
        answer = " {coded.0} {coded.1} {coded.2}"
        self._frequent_question = self._template(f"\n{ruler.FWE_QUESTION}", answer, "\n")
        self._makers: Mapping[Family, Callable[[random.Random, int, int], Sheet]] = {
            "echo": self._make_echo,
            "lists": self._make_lists,
            "needles": lambda rng, rows, length: self.needles(rng, rows, draw_mix(rng, length)),
            "noise": lambda rng, rows, length: self._make_niah(rng, rows, length, "noise"),
            "keys": lambda rng, rows, length: self._make_niah(rng, rows, length, "keys"),
            "uuids": lambda rng, rows, length: self._make_niah(rng, rows, length, "uuids"),
            "chain": self._make_chain,
            "frequent": self._make_frequent,
        }

    def make(self, family: Family, rng: random.Random, rows: int, length: int) -> Sheet:
        """Make the sheet of a family for rows of `length` tokens."""
        return self._makers[family](rng, rows, length)

    def needles(self, rng: random.Random, rows: int, mix: Mix) -> Sheet:
        """Needles and questions in the wording of `formats`, as many as `mix` says."""
        pools = self._pools
        adjectives, nouns = self._pairs(rows, mix.keys)
        plain = mix.keys - mix.groups
        values, depths = self._ascending(rows, plain, 1), self._depths(rows, plain)
        parts = [self._needles(adjectives[:plain], nouns[:plain], values, depths)]
        if mix.alone:
            part = slice(0, mix.alone)
            pieces = {"adjective.0": adjectives[part], "noun.0": nouns[part], "digits7.0": values[part]}
            template = self._one
            if mix.long:
                template = rng.choice(self._long)
                pieces["opening"] = pools.draw("opening", rows, mix.alone)
            parts.append(Part(template.fill(rows, mix.alone, pieces), self._after(depths[:, part], mix.early)))
        if mix.lists:
            begin, count = plain - mix.lists * mix.listed, mix.listed
            pieces = {}
            for index in range(count):
                part = slice(begin + index, plain, count)
                pieces[f"adjective.{index}"], pieces[f"noun.{index}"] = adjectives[part], nouns[part]
                pieces[f"digits7.{index}"] = values[part]
            last = depths[:, begin:plain].reshape(rows, mix.lists, count).amax(2)
            filled = self._keys[count].fill(rows, mix.lists, pieces)
            parts.append(Part(filled, self._after(last, mix.early)))
        if mix.groups:
            count = mix.values
            many = self._ascending(rows, mix.groups, count)
            spots = self._depths(rows, mix.groups * count)
            adjective, noun = adjectives[plain:], nouns[plain:]
            parts.append(self._needles(adjective.repeat(count), noun.repeat(count), many, spots))
            pieces = {"adjective.0": adjective, "noun.0": noun}
            pieces |= {f"digits7.{index}": many[index::count] for index in range(count)}
            last = spots.reshape(rows, mix.groups, count).amax(2)
            parts.append(Part(self._values[count].fill(rows, mix.groups, pieces), self._after(last, mix.early)))
        return Sheet(tuple(part for part in parts if part.depths.shape[1]), "text")

    def _make_echo(self, rng: random.Random, rows: int, length: int) -> Sheet:
        pools, device = self._pools, self._pools.device
        longest = rng.choice((8, 16, 32))
        mean = (_SHORTEST_ECHO + longest) / 2
        room = min(length - 8, int(max(4000, length / 8)))
        count = max(1, int(0.9 * room / (2 * mean)))
        tokens = pools.any_tokens(rows, count, longest)
        sizes = _SHORTEST_ECHO + pools.integers(longest - _SHORTEST_ECHO + 1, rows, count, 1)
        valid = torch.arange(longest, device=device) < sizes
        said = torch.full((longest,), IGNORED, device=device)
        again = torch.full((longest,), ANSWER, device=device)
        again[0] = IGNORED
        parts = (
            Part(Lines(tokens, valid, said), pools.rand(rows, count)),
            Part(Lines(tokens, valid, again), END + pools.rand(rows, count)),
        )
        return Sheet(parts, "none")

    def _make_lists(self, rng: random.Random, rows: int, length: int) -> Sheet:
        kinds, form = (rng.choice(_LIST_KEYS), rng.choice(_LIST_VALUES)), rng.randrange(len(_LIST_FORMS))
        said, asked = self._list_templates(*kinds, form)
        room = min(length - 8, int(max(4000, length / 8) * 2 ** -rng.uniform(0, 2)))
        count = max(1, int(0.94 * room / (said.mean + asked.mean)))
        pieces = self._fill("key", kinds[0], rows, count) | self._fill("value", kinds[1], rows, count)
        depths = self._depths(rows, count)
        after = self._after(depths, 0.0 if rng.random() < 0.5 else rng.uniform(0.2, 0.9))
        said_part = Part(said.fill(rows, count, pieces), depths)
        return Sheet((said_part, Part(asked.fill(rows, count, pieces), after)), "text")

    def _make_niah(self, rng: random.Random, rows: int, length: int, family: Family) -> Sheet:
        what = "uuid" if family == "uuids" else "number"
        head, needle, question = self._niah["uuid" if family == "uuids" else "words", what]
        room = length - 1 - head.mean
        alone = rng.random() < 0.25
        asked = 1 if alone else int(room * rng.uniform(0.1, 0.55) / (question.mean + needle.mean))
        asked = max(1, min(asked, MOST_QUESTIONS))
        if family == "noise":
            count = asked
        else:
            most = int(0.97 * (room - asked * question.mean) / needle.mean)
            count = max(asked, most if rng.random() < 0.7 else int(most * rng.random()))
        pieces = self._fill("key", "uuid" if family == "uuids" else "words", rows, count)
        pieces |= self._fill("value", what, rows, count)
        asks = {name: piece[:asked] for name, piece in pieces.items()}
        filler: Filler = "noise" if family == "noise" or rng.random() < 0.1 else "none"
        return Sheet(
            (
                self._part(head, rows, HEAD),
                Part(needle.fill(rows, count, pieces), self._depths(rows, count)),
                Part(question.fill(rows, asked, asks), END + self._pools.rand(rows, asked)),
            ),
            filler,
        )

    def _make_chain(self, rng: random.Random, rows: int, length: int) -> Sheet:
        pools = self._pools
        hops = ruler.VT_HOPS if rng.random() < 0.6 else rng.randint(1, ruler.VT_HOPS)
        shot = rng.choice(self._shots)
        with_shot = length >= 2 * shot.mean and rng.random() < 0.7
        question = self._chains[hops + 1]
        each = question.mean + self._start.mean + hops * self._link.mean
        fits = int(0.8 * (length - 1 - with_shot * shot.mean) / each)
        chains = max(1, min(fits, rng.choice((1, 1, 1, 2, 3, 6, 12))))
        names, value = pools.draw("name", rows, chains * (hops + 1)), pools.digits(rows, chains, 5)
        of_chain = [names[index :: hops + 1] for index in range(hops + 1)]
        depths = self._depths(rows, chains * (hops + 1)).reshape(rows, chains, hops + 1).sort(-1).values
        # The harness puts no assignment behind the last line of noise.
        depths = depths.clamp(max=0.999)
        parts = [self._part(self._chain_head, rows, HEAD)]
        if with_shot:
            pieces = {f"shot.{index}": pools.draw("shot", rows, 1) for index in range(ruler.VT_HOPS + 1)}
            pieces["digits5.shot"] = pools.digits(rows, 1, 5)
            parts.append(self._part(shot, rows, 2 * HEAD, pieces))
        parts.append(Part(self._start.fill(rows, chains, {"name.0": of_chain[0], "digits5.0": value}), depths[..., 0]))
        for index in range(hops):
            pieces = {"name.0": of_chain[index], "name.1": of_chain[index + 1]}
            parts.append(Part(self._link.fill(rows, chains, pieces), depths[..., index + 1]))
        pieces = {f"name.{index}": piece for index, piece in enumerate(of_chain)} | {"digits5.0": value}
        parts.append(Part(question.fill(rows, chains, pieces), END + pools.rand(rows, chains)))
        return Sheet(tuple(parts), "chain")

    def _make_frequent(self, rng: random.Random, rows: int, length: int) -> Sheet:
        pools, device = self._pools, self._pools.device
        room = 0.97 * (length - 1 - self._frequent_head.mean - self._frequent_question.mean)
        vocabulary = max(6, length // 50)
        # The dots, three fifths of all words, are one token or two.
        dots, coded = len(pools.encode(f" {ruler.FWE_DOTS}")), pools.mean("coded")
        words = int(room / (0.61 * dots + 0.39 * coded))
        counts = torch.tensor(ruler.fwe_counts(words, vocabulary))
        ranks = torch.repeat_interleave(torch.arange(vocabulary), counts).to(device)
        order = pools.rand(rows, len(ranks)).argsort(1)
        # The dots are the first string of the pool: the others are drawn from those behind it.
        chosen = 1 + pools.integers(LARGE, rows, vocabulary)
        chosen[:, 0] = 0
        text = pools.piece("coded", chosen.gather(1, ranks[order]))
        answers = {f"coded.{index}": pools.piece("coded", chosen[:, index + 1 : index + 2]) for index in range(3)}
        steps = torch.linspace(0, 1, len(ranks), device=device).expand(rows, -1)
        return Sheet(
            (
                self._part(self._frequent_head, rows, HEAD),
                Part(self._word.fill(rows, len(ranks), {"coded.0": text}), steps),
                self._part(self._frequent_question, rows, END, answers),
            ),
            "none",
        )

    def _template(self, text: str, answer: str = "", end: str = "") -> Template:
        return Template(self._pools, text, answer, end)

    def _part(self, template: Template, rows: int, depth: float, pieces: Mapping[str, Piece] | None = None) -> Part:
        depths = torch.full((rows, 1), depth, device=self._pools.device)
        return Part(template.fill(rows, 1, pieces or {}), depths)

    def _niah_templates(self, kind: str, what: str) -> tuple[Template, Template, Template]:
        key, value = place(kind, "key"), place(what, "value")
        return (
            self._template(f"{ruler.NIAH_HEAD.format(what=what)}\n"),
            self._template(f"{ruler.NIAH_NEEDLE.format(what=what, key=key, value=value)}\n"),
            self._template(ruler.NIAH_QUESTION.format(what=what, key=key), f" {value}.", "\n"),
        )

    def _list_templates(self, key: str, value: str, form: int) -> tuple[Template, Template]:
        if (key, value, form) not in self._lists:
            left, right = _LIST_FORMS[form].split("{value}")
            left, filled = left.format(key=place(key, "key")), place(value, "value")
            said = self._template(f"{left}{filled}{right}\n")
            # What is drawn with its space before it is answered with it.
            asked = self._template(left.removesuffix(" "), f" {filled}{right}", "\n")
            self._lists[key, value, form] = said, asked
        return self._lists[key, value, form]

    def _chain_question(self, count: int) -> Template:
        question = ruler.VT_QUESTION.format(value="{digits5.0}", count=count)
        return self._template(f"\n{question}", "".join(f" {{name.{index}}}" for index in range(count)), "\n")

    def _shot(self, rng: random.Random) -> Template:
        names, value = [f"{{shot.{index}}}" for index in range(ruler.VT_HOPS + 1)], "{digits5.shot}"
        places = sorted(rng.sample(range(10), len(names)))
        return self._template(ruler.vt_shot(ruler.vt_context(ruler.vt_units(names, value), 10, places), value, names))

    def _fill(self, name: str, kind: str, rows: int, lines: int) -> dict[str, Piece]:
        if kind == "pair":
            adjectives, nouns = self._pairs(rows, lines)
            return {f"adjective.{name}": adjectives, f"noun.{name}": nouns}
        if kind == "number":
            return {f"digits7.{name}": self._pools.digits(rows, lines, formats.DIGITS)}
        places = [part.strip("{}") for part in KEYS[kind].replace("}-{", "} {").split()]
        return {f"{part}.{name}": self._pools.draw(part, rows, lines) for part in places}

    def _pairs(self, rows: int, count: int) -> tuple[Piece, Piece]:
        """Adjectives and nouns, no pair twice in a row."""
        keys = self._pools.rand(rows, len(ADJECTIVES) * len(NOUNS)).topk(count, dim=1).indices
        return self._pools.piece("adjective", keys // len(NOUNS)), self._pools.piece("noun", keys % len(NOUNS))

    def _needles(self, adjectives: Piece, nouns: Piece, values: Piece, depths: Tensor) -> Part:
        pieces = {"adjective.0": adjectives, "noun.0": nouns, "digits7.0": values}
        rows, lines = depths.shape
        return Part(self._needle.fill(rows, lines, pieces), depths)

    def _ascending(self, rows: int, keys: int, each: int) -> Piece:
        """Values (rows, keys * each); the first digits of one key's values ascend."""
        first = self._pools.rand(rows, keys, 9).topk(each, dim=2).indices.sort(dim=2).values + 1
        rest = self._pools.integers(10, rows, keys, each, formats.DIGITS - 1)
        return self._pools.as_digits(torch.cat([first[..., None], rest], dim=-1).flatten(1, 2))

    def _depths(self, rows: int, count: int) -> Tensor:
        """Depths; some are exactly 0 or 1, and some rows have all at one end."""
        depths = (self._pools.rand(rows, count) * 1.1 - 0.05).clamp(0, 1)
        kind = self._pools.rand(rows, 1)
        depths = torch.where(kind < 0.15, depths * 0.08, depths)
        return torch.where(kind > 0.95, 1 - depths * 0.08, depths)

    def _after(self, depths: Tensor, early: float) -> Tensor:
        """Depths of questions: behind their needles, or at the end (above 1)."""
        rand = self._pools.rand(*depths.shape)
        inside = depths + (1 - depths) * rand + 1e-6
        return torch.where(self._pools.rand(*depths.shape) < early, inside, END + rand)
