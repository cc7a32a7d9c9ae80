"""Other rules for rowmax's columns, on a real model: ``python -m lab.rowmax.rules --model MODEL`` (from tests/).

Each is tried at a few thresholds beside the rule that ships, on natural texts: pairs, copies, facts and KL. Times say
nothing here: the rules are put together from PyTorch and from several calls of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from attrs import evolve, field, frozen
from sparseprefill.adapters.calibration.candidates import Candidate
from sparseprefill.adapters.cli.demo import GREEDY
from sparseprefill.adapters.cli.group import CommandError, Stop
from sparseprefill.adapters.cli.options import Device, Dtype, Model, Seed, Threads, Type
from sparseprefill.adapters.cli.progress import bars
from sparseprefill.adapters.cli.setup import Place, Source, identity_of
from sparseprefill.adapters.demo.tasks import TABLES
from sparseprefill.adapters.evaluation.reading import Sizes
from sparseprefill.adapters.evaluation.texts import SHORTEST
from sparseprefill.adapters.session.defaults import TAIL
from sparseprefill.plugins.rowmax import RowMaxConfig
from sparseprefill.plugins.rowmax.maxima import by_tiles, sampling, shares
from sparseprefill.plugins.rowmax.stages import RowMaxEstimator
from torch import Tensor

from lab.bench.clock import Clock
from lab.files import Files, JsonFile, MarkdownFile, command
from lab.frontier import results
from lab.frontier.exams import Texts
from lab.frontier.layers import check_plain
from lab.frontier.points import Point, Reader
from lab.turns.talk import layers_of
from sparseprefill.call import AttentionCall
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.memory import Memory
from sparseprefill.method import Method
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan, Result

app = command("Try other rules for rowmax's columns on a real model: pairs, copies, facts and KL.")


@frozen(kw_only=True)
class Ruled:
    """Settings of every rule here. times, every, eps: rowmax's own. value: what the rule has besides."""

    times: float = 3.0
    every: int = 8
    eps: float = 0.005
    value: float = 0.0

    @property
    def config(self) -> RowMaxConfig:
        """rowmax's settings."""
        return RowMaxConfig(times=self.times, every=self.every, eps=self.eps)


@frozen
class TwoPasses(RowMaxEstimator):
    """Columns that are near enough for one row in `every` are looked at again, with four times as many rows. near: a
    column counts as near with so much of the share that is enough."""

    near: float

    def kept(self, call: AttentionCall, *, apart: bool = False) -> Tensor:
        """As rowmax's."""
        less = evolve(self.config, eps=self.config.eps * self.near, times=self.config.times * self.near, strong=1.0)
        more = evolve(self.config, every=max(1, self.config.every // 4), strong=1.0)
        first = super().kept(call, apart=apart)
        near, again = (RowMaxEstimator(one).kept(call, apart=apart) for one in (less, more))
        return first | (near & again)


@frozen
class SquaredLoss(RowMaxEstimator):
    """Columns in the order of what they take off the rows' squared lost mass, each at the same price; and strong ones.

    The price falls by halves, so that what is kept for one row counts when the next is looked at.
    """

    price: float
    STEPS = 6

    def kept(self, call: AttentionCall, *, apart: bool = False) -> Tensor:
        """As rowmax's, by PyTorch."""
        config, width = self.config, self.config.column
        each = config.block // width
        keep = torch.zeros(call.geometry.map_shape(config.block, width), dtype=torch.bool, device=call.q.device)
        for tiles, rows, found in by_tiles(call, config.block, width, sampling(config, call.group)):
            column = torch.arange(found.shape[4], device=found.device)
            own = (rows.position // config.block * each).unflatten(2, found.shape[2:4])[..., :1, None]
            fixed = (column >= own) | (column < each * int(config.sink))  # [B, H, t, 1, c]
            lost = found.masked_fill(fixed, 0.0).sum(4, keepdim=True)
            chosen = torch.zeros_like(found[:, :, :, 0], dtype=torch.bool)
            for step in reversed(range(self.STEPS)):
                gain = (found * (2 * lost - found)).sum(3)
                more = (gain >= self.price * 2**step) & ~fixed.squeeze(3) & ~chosen
                lost = (lost - (found * more[:, :, :, None]).sum(4, keepdim=True)).clamp_(min=0)
                chosen |= more
            if config.shares_strong:
                strong = ((found >= config.strong).any(3) & chosen).unflatten(1, (-1, call.group)).any(2)
                chosen |= strong.repeat_interleave(call.group, 1) & ~fixed.squeeze(3)
            keep[:, :, tiles, : found.shape[4]] = chosen if apart else chosen | fixed.squeeze(3)
        return keep


@frozen(eq=False)
class EverySecond(RowMaxEstimator):
    """A layer of an odd number takes the columns of the one before it. heads: of the head of its own number ("head"),
    or of all heads of that KV head ("group")."""

    heads: str
    before: dict[int, Tensor] = field(factory=dict)

    def kept(self, call: AttentionCall, *, apart: bool = False) -> Tensor:
        """As rowmax's, or those of the layer before."""
        if call.layer % 2 and call.layer - 1 in self.before:
            keep = self.before.pop(call.layer - 1)
            if self.heads == "group":
                keep = keep.unflatten(1, (-1, call.group)).any(2).repeat_interleave(call.group, 1)
            return keep
        self.before.clear()
        self.before[call.layer] = super().kept(call, apart=apart)
        return self.before[call.layer]


@frozen
class ByLayer(RowMaxEstimator):
    """Other thresholds in the first half of the layers than in the second. early: `times` there."""

    early: float
    layers: int

    def kept(self, call: AttentionCall, *, apart: bool = False) -> Tensor:
        """As rowmax's."""
        if call.layer >= self.layers // 2:
            return super().kept(call, apart=apart)
        return RowMaxEstimator(evolve(self.config, times=self.early)).kept(call, apart=apart)


@frozen
class Signs(RowMaxEstimator):
    """Maxima of keys in one bit: the sign of each channel, times its mean size, about the channel's mean. After
    self-indexing caches (arXiv 2603.14224, 2609.13205)."""

    def kept(self, call: AttentionCall, *, apart: bool = False) -> Tensor:
        """As rowmax's."""
        mean = call.k.float().mean(2, keepdim=True)
        off = call.k.float() - mean
        k = mean + off.sign() * off.abs().mean(2, keepdim=True)
        return super().kept(evolve(call, k=k.to(call.k.dtype)), apart=apart)


@frozen
class Radius(RowMaxEstimator):
    """A column's mean key and so many of its radii in the place of its largest logit: ``q.mean + radii |q| r``, r the
    root of its keys' mean squared distance from the mean. After RBS-Attention (arXiv 2609.20971), as far as it is told:
    means choose, and the radius rescues."""

    radii: float

    def kept(self, call: AttentionCall, *, apart: bool = False) -> Tensor:
        """As rowmax's: one channel more holds the radius, and the queries' length."""
        width, count = self.config.column, call.k.shape[2]
        k = torch.nn.functional.pad(call.k.float(), (0, 0, 0, -count % width)).unflatten(2, (-1, width))
        real = (torch.arange(k.shape[2] * width, device=k.device) < count).view(-1, width, 1)
        mean = (k * real).sum(3, keepdim=True) / real.sum(1, keepdim=True)
        r = (((k - mean) * real).square().sum((3, 4), keepdim=True) / real.sum(1, keepdim=True)).sqrt()
        column = torch.cat([mean, self.radii * r], -1).expand(-1, -1, -1, width, -1).flatten(2, 3)[:, :, :count]
        q = torch.cat([call.q.float(), call.q.float().norm(dim=-1, keepdim=True)], -1)
        k, v = column.contiguous(), call.v.float()
        return super().kept(evolve(call, q=q, k=k, v=v, scale=call.softmax_scale), apart=apart)


@frozen
class Mixed:
    """Corrector: columns of a smaller share than `times` asks for are computed in 8 bits, queries, keys and values of
    each token rounded by its largest channel. After TileMix (arXiv 2608.17336)."""

    estimator: RowMaxEstimator
    times: float

    def correct(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> Result:
        """The result with them."""
        executor, best = AutoExecutor(), RowMaxEstimator(evolve(self.estimator.config, times=self.times))
        exact = best.estimate(call, memory).mask
        rounded = evolve(call, q=_in_8_bits(call.q), k=_in_8_bits(call.k), v=_in_8_bits(call.v))
        one, other = executor.execute(call, Plan(exact)), executor.execute(rounded, Plan(plan.mask - exact))
        part = torch.sigmoid(other.lse - one.lse)[..., None].nan_to_num()
        out = one.out.float() * (1 - part) + other.out.float().nan_to_num() * part
        return evolve(result, out=out.to(result.out.dtype))


def _in_8_bits(x: Tensor) -> Tensor:
    step = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return ((x.float() / step).round() * step).to(x.dtype)


@frozen
class Sampled:
    """Corrector: some columns that were dropped enter the softmax once more, drawn by the largest share that a sampled
    row of the query tile gives them, each for as many as it stands for: importance sampling of what is lost.

    draws: columns for each query tile and head, with replacement. Prefills from position 0 alone.
    """

    estimator: RowMaxEstimator
    draws: int
    TILES = 16

    def correct(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> Result:
        """The result with them."""
        check_plain(call)
        config, width = self.estimator.config, self.estimator.config.column
        block, group = config.block, call.group
        kept = self.estimator.kept(call)
        column = torch.arange(kept.shape[3], device=kept.device)
        own = call.geometry.tiles(block)[0, :, None] * (block // width)
        kept = kept | (column >= own) | (column < block // width * int(config.sink))
        weight = shares(call, block, width, sampling(config, group)).masked_fill(kept, 0.0)  # [1, H, R, C]
        out, generator = result.out.clone(), torch.Generator(call.q.device).manual_seed(call.layer)
        keys, values = (_columns_of(x, width) for x in (call.k, call.v))  # [Hkv, C, width, D]
        head = torch.arange(call.q.shape[1], device=kept.device)[:, None, None] // group
        for first in range(0, kept.shape[2], self.TILES):
            some = weight[0, :, first : first + self.TILES]  # [H, t, C]
            total = some.sum(-1, keepdim=True)
            odds = torch.where(total > 0, some, 1.0).flatten(0, 1)
            drawn = torch.multinomial(odds, self.draws, replacement=True, generator=generator)
            drawn = drawn.view(*some.shape[:2], self.draws)
            each = (some / total).gather(2, drawn) * self.draws  # expected times that a column is drawn
            rows = slice(first * block, min((first + self.TILES) * block, call.q.shape[2]))
            q = torch.nn.functional.pad(call.q[0, :, rows].float(), (0, 0, 0, -(rows.stop - rows.start) % block))
            q = q.unflatten(1, (-1, block))  # [H, t, block, D]
            k, v = (x[head, drawn].flatten(2, 3).float() for x in (keys, values))  # [H, t, draws * width, D]
            logits = q @ k.mT * call.softmax_scale - each.log().repeat_interleave(width, 2)[:, :, None]
            logits = logits.masked_fill((total == 0)[..., None], -torch.inf)
            lse = logits.logsumexp(-1).nan_to_num(nan=-torch.inf)
            lost = logits.softmax(-1).nan_to_num() @ v
            mine = result.lse[0, :, rows].float()
            lse, lost = (x.flatten(1, 2)[:, : mine.shape[1]] for x in (lse, lost))
            part = torch.sigmoid(lse - mine)[..., None]
            out[0, :, rows] = (result.out[0, :, rows].float() * (1 - part) + lost * part).to(out.dtype)
        return evolve(result, out=out)


def _columns_of(x: Tensor, width: int) -> Tensor:
    """``[Hkv, C, width, D]``: K or V of the first batch row, by column, padded with zeros."""
    found: Tensor = torch.nn.functional.pad(x[0], (0, 0, 0, -x.shape[2] % width)).unflatten(1, (-1, width))
    return found


def rules(layers: int) -> list[Candidate]:
    """What is tried. layers: of the model."""

    def plain(given: Ruled) -> Pipeline:
        return Pipeline(RowMaxEstimator(given.config), name="rowmax")

    def sampled(given: Ruled) -> Pipeline:
        estimator = RowMaxEstimator(given.config)
        return Pipeline(estimator, name="sampled").with_corrector(Sampled(estimator, int(given.value)))

    def mixed(given: Ruled) -> Pipeline:
        estimator = RowMaxEstimator(given.config)
        return Pipeline(estimator, name="mixed").with_corrector(Mixed(estimator, given.value))

    def built(make: Callable[[Ruled], RowMaxEstimator]) -> Callable[[Ruled], Pipeline]:
        return lambda given: Pipeline(make(given), name="ruled")

    rows: list[tuple[str, Callable[[Ruled], Pipeline], float, dict[str, Any]]] = [
        *[("rule", plain, 0.0, {"times": times}) for times in (2.0, 3.0, 4.5, 6.0)],
        *[("rule", plain, 0.0, {"every": 16, "times": times}) for times in (1.5, 2.0)],
        *[
            ("two-passes", built(lambda x: TwoPasses(x.config, x.value)), near, {"every": every, "times": times})
            for near, every, times in ((0.5, 8, 4.5), (0.25, 8, 4.5), (0.5, 16, 3.0), (0.25, 16, 3.0))
        ],
        *[
            ("squared-loss", built(lambda x: SquaredLoss(x.config, x.value)), price, {})
            for price in (0.0005, 0.001, 0.002, 0.004)
        ],
        ("layer-before", built(lambda x: EverySecond(x.config, "head")), 0.0, {}),
        ("layer-before-group", built(lambda x: EverySecond(x.config, "group")), 0.0, {}),
        ("early-layers", built(lambda x: ByLayer(x.config, x.value, layers)), 2.0, {"times": 4.5}),
        ("early-layers", built(lambda x: ByLayer(x.config, x.value, layers)), 4.5, {"times": 2.0}),
        ("sampled", sampled, 8.0, {"times": 4.5}),
        ("sampled", sampled, 8.0, {}),
        *[("signs", built(lambda x: Signs(x.config)), 0.0, {"times": times}) for times in (1.0, 2.0, 4.5)],
        *[
            ("radius", built(lambda x: Radius(x.config, x.value)), radii, {"times": times})
            for radii, times in ((0.0, 1.0), (0.0, 0.3), (0.1, 2.0), (0.2, 3.0), (0.2, 6.0), (0.3, 6.0))
        ],
        *[("mixed", mixed, exact, {"times": times}) for exact, times in ((6.0, 3.0), (6.0, 2.0), (12.0, 3.0))],
    ]
    return [
        Candidate(
            Method(name=name, summary=f"rowmax's columns by the rule {name}", config=Ruled, build=build),
            {**parameters, "value": value},
        )
        for name, build, value, parameters in rows
    ]


@app.callback(invoke_without_command=True)
def tried(
    model: Model = None,
    tokens: Annotated[int, typer.Option(min=SHORTEST, help="Tokens of a text.")] = 8192,
    texts: Annotated[int, typer.Option(min=1, help="Texts, of all kinds in turn.")] = 1,
    rule: Annotated[list[str] | None, typer.Option(help="Rule to try; repeat for several. By default all.")] = None,
    seed: Seed = TABLES,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 2,
    markdown: MarkdownFile = None,
    json: JsonFile = None,
) -> None:
    """Try other rules for rowmax's columns on a real model: pairs, copies, facts and KL."""
    files = Files(markdown=markdown, json=json)
    place = Place.of(device, dtype.value, threads)
    about = {"model": model or "embedded", "texts": texts, "seed": seed, "dtype": place.dtype_name}
    points: list[Point] = []
    found: list[Candidate] = []
    with place.threaded(), bars(1) as shown, Stop() as stop:
        source = Source.of(model, place)
        read = Texts.natural(source, [tokens], texts, seed, TAIL, Sizes(greedy=GREEDY, repeats=1), ())
        loaded = source.load()
        found = rules(layers_of(loaded))
        known = dict.fromkeys(one.method.name for one in found)
        for name in rule or ():
            if name not in known:
                raise CommandError(f"--rule {name}: pass one of {', '.join(known)}")
        found = [one for one in found if not rule or one.method.name in rule]
        shown.expect(len(found))
        reader = Reader.of(tokens, read.read(loaded, identity_of(loaded, model), tokens), Clock(place.device, 1, 0.01))
        reader = evolve(reader, layers=None, untimed="a prototype")
        for one in found:
            with shown.contender(f"{one.name}, {dict(one.parameters)}"):
                points.append(reader.read(one))
            results.keep(points, about, place, files)
    stop.check(len(points))
    results.report(points, about, place, files)
    stop.end(len(points), len(found), "rules")
    if any(one.error for one in points):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
