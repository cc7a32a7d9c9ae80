"""Inside a prompt with a dense beginning and a sparse end: ``python -m lab.mixed.heads --model MODEL`` (from tests/).

Why such a prompt copies less than one that is sparse throughout: which of queries, keys and values is to blame, by
putting in its place what dense attention makes, or what a sparse beginning left; whether one vector of each KV head,
taken off the keys of the end, gives copies back; and layer by layer and head by head, where the end's rows look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from attrs import asdict, define, field, frozen
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.cli.options import Configs, Device, Dtype, Methods, Model, Seed, Settings, Threads, Type
from sparseprefill.adapters.cli.setup import Place, Source
from sparseprefill.adapters.evaluation.outcome import Contender, compare, surprises
from sparseprefill.adapters.evaluation.prompts import Prompt
from sparseprefill.adapters.evaluation.reading import Reader, Rows
from sparseprefill.adapters.evaluation.texts import SHORTEST, built_in
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.session.defaults import TAIL
from torch import Tensor

from lab.bench import facts
from lab.bench.report import write_figures
from lab.files import JsonFile, command
from lab.losses.__main__ import ROWS, places_of, weights_of
from lab.single import single
from sparseprefill.call import AttentionCall
from sparseprefill.errors import ParameterError
from sparseprefill.plan import Result
from sparseprefill.registry import default_registry

FAR = 128
"""Keys of the beginning count as far from a row that stands so many tokens behind them, or more."""
OTHERS = 64
"""Rows that copy nothing and are looked at as well, spread over the end."""
PARTS = ("q", "k", "v")
DENSE, SPARSE, MIXED = "dense, dense", "sparse, sparse", "dense, sparse"
OFF, OWN = "dense, sparse, less another text's shift", "dense, sparse, less its own shift"
INSIDE = (DENSE, SPARSE, MIXED, OWN)
"""Ways whose heads are looked at."""
Made = dict[tuple[int, str], Tensor]
"""Queries, keys or values of a layer ``[n, heads, D]`` as its projection makes them: before rotation."""
Change = Callable[[int, str, Tensor], Tensor | None]
"""What stands in the place of a layer's queries, keys or values; None leaves them."""
app = command("Show why a prompt with a dense beginning and a sparse end copies less.")


@frozen
class Way:
    """One way to read the two steps. keys, values: whether those of the beginning are a sparse prefill's. sparse:
    whether the end is read so. change: what is put in the place of its queries, keys or values."""

    name: str
    keys: bool = False
    values: bool = False
    sparse: bool = True
    change: Change | None = None


@frozen
class Read:
    """What became of a text's end. copies: restated tokens that are right, of so many. nll: of these, nats a token. kl:
    mean over its rows but the last `TAIL`, against both steps dense."""

    text: str
    way: str
    copies: int
    of: int
    nll: float
    kl: float


@frozen
class Look:
    """Where the rows of a text's end look in one layer, by query head, means over the rows.

    far, far_copying: weight on the beginning's keys at least `FAR` tokens away, of rows that copy nothing, and of rows
    that copy. odds: the mean logarithm of that weight over the rest, of all these rows, nats. front, back: weight of
    rows that copy on the token that they copy, where it stands in the beginning, and where it stands in the end.
    front_kept: the first, of what the mask keeps. shift: mean of ``scale q.(k - dense's k)`` over the end's keys that a
    row may see, less the mean over the beginning's, rotation included: by how much keys alone raise the end's logits.
    rows: how many copy from the beginning, and from the end; 0 stands where there are none.
    """

    text: str
    way: str
    layer: int
    far: tuple[float, ...]
    far_copying: tuple[float, ...]
    odds: tuple[float, ...]
    front: tuple[float, ...]
    back: tuple[float, ...]
    front_kept: tuple[float, ...]
    shift: tuple[float, ...]
    rows: tuple[int, int]


@frozen
class Moved:
    """By how much one layer's keys of a text's end differ from dense's before rotation, by KV head.

    mean: length of the mean difference over that of dense's mean key. alike: share of the squared differences that one
    vector for all of the end's keys explains. front: the cosine between that vector and the beginning's, where that is
    sparse, too.
    """

    text: str
    way: str
    layer: int
    mean: tuple[float, ...]
    alike: tuple[float, ...]
    front: tuple[float, ...]


@define
class Watch:
    """Observer of one way. rows: of the end, those that copy first. places: by row that copies, where its token stands.
    keys: dense's, by layer, from the whole prompt; taken where there are none yet."""

    text: str
    way: str
    cut: int
    places: Mapping[int, int]
    rows: Sequence[int]
    keys: dict[int, Tensor]
    found: list[Look] = field(factory=list, init=False)

    def __call__(self, call: AttentionCall, result: Result) -> None:
        """Look at one layer."""
        dense = self.keys.setdefault(call.layer, call.k)
        change = call.k.float() - dense.float()  # [1, Hkv, N, D]
        front = change[:, :, : self.cut].mean(2, keepdim=True)
        count = torch.arange(1, call.k.shape[2] - self.cut + 1, device=change.device)[:, None]
        end = change[:, :, self.cut :].cumsum(2) / count - front  # over the keys that a row may see
        del change
        every: list[dict[str, Tensor]] = []
        for first in range(0, len(self.rows), ROWS):
            some = torch.tensor(self.rows[first : first + ROWS], device=call.q.device)
            weights = weights_of(call, some)[0]  # [Hq, n, N]
            at = some + self.cut
            key = torch.arange(self.cut, device=some.device)
            far = (weights[:, :, : self.cut] * (key <= at[:, None] - FAR)).sum(2)
            place = torch.tensor([self.places.get(one, -1) for one in at.tolist()], device=some.device)
            index = place.clamp(min=0)[None, :, None].expand(len(weights), -1, 1)
            source = weights.gather(2, index)[..., 0]
            mask = result.mask.to_dense(some)[0]
            kept = source * mask.gather(2, index.expand(len(mask), -1, 1))[..., 0]
            kept = kept / (weights * mask).sum(2).clamp(min=1e-9)
            q = call.q[0][:, some].float().unflatten(0, (-1, call.group))  # [Hkv, G, n, D]
            raised = (q * end[0][:, None, some]).sum(-1).flatten(0, 1) * call.softmax_scale
            odds = torch.logit(far.double(), eps=1e-6)
            shown = {"far": far, "odds": odds, "source": source, "kept": kept, "raised": raised}
            every.append({"place": place, **shown})
        whole = {name: torch.cat([one[name] for one in every], -1).double().cpu() for name in every[0]}
        place = whole["place"]
        copying, front_rows, back_rows = place >= 0, (place >= 0) & (place < self.cut), place >= self.cut
        self.found.append(
            Look(
                text=self.text,
                way=self.way,
                layer=call.layer,
                far=_mean(whole["far"], ~copying),
                far_copying=_mean(whole["far"], copying),
                odds=_mean(whole["odds"], place >= -1),
                front=_mean(whole["source"], front_rows),
                back=_mean(whole["source"], back_rows),
                front_kept=_mean(whole["kept"], front_rows),
                shift=_mean(whole["raised"], place >= -1),
                rows=(int(front_rows.sum()), int(back_rows.sum())),
            )
        )


def _mean(values: Tensor, rows: Tensor) -> tuple[float, ...]:
    """By head, over some rows; 0 where there are none."""
    return tuple(values[:, rows].mean(1).nan_to_num().tolist())


@app.callback(invoke_without_command=True)
def heads(
    model: Model = None,
    method: Methods = None,
    settings: Settings = None,
    config: Configs = None,
    tokens: Annotated[int, typer.Option(min=SHORTEST, help="Tokens of a text.")] = 8192,
    first: Annotated[float, typer.Option(min=0.01, max=0.99, help="Share of the tokens in the first step.")] = 0.75,
    texts: Annotated[int, typer.Option(min=1, help="Texts, of all kinds in turn.")] = 1,
    others: Annotated[int, typer.Option(min=0, help="Other texts, by which the keys' shift is measured; 0: none.")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="Rows that copy to look at in each layer, at most.")] = 256,
    apart: Annotated[int, typer.Option(min=1, help="Of so many rows one is compared for the KL.")] = 1,
    copying: Annotated[int, typer.Option(min=1, help="Heads to show, by their weight on what is copied.")] = 12,
    seed: Seed = 100,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 2,
    json: JsonFile = None,
) -> None:
    """Show why a prompt with a dense beginning and a sparse end copies less; rowmax by default."""
    contender = single(method, settings, model, TAIL, config)
    place = Place.of(device, dtype.value, threads)
    read: list[Read] = []
    looks: list[Look] = []
    moved: list[Moved] = []

    def figures() -> dict[str, Any]:
        about = {"model": model or "embedded", "method": contender.name, "parameters": dict(contender.parameters)}
        more = {"tokens": tokens, "first": first, "others": others, "seed": seed, "dtype": place.dtype_name}
        lists = {"read": [*map(asdict, read)], "looks": [*map(asdict, looks)], "moved": [*map(asdict, moved)]}
        return facts.about(place.device, **about, **more, **lists)

    with place.threaded(), torch.inference_mode():
        source = Source.of(model, place)
        chosen = built_in(source.tokenizer, tokens, texts, seed)
        two = Two(Reader(source.load()), contender, first, rows, apart)
        shift = two.shift_of(built_in(source.tokenizer, tokens, others, seed + 1000))
        for text in chosen:
            typer.echo(f"{text.name}:")
            for one in two.read(text, shift, looks, moved):
                read.append(one)
                typer.echo(f"  {one.way}: {one.copies} of {one.of}, NLL {one.nll:.4f}, KL {one.kl:.4f}")
            if json is not None and str(json) != "-":
                write_figures(json, figures())
    typer.echo("\n".join((*by_way(read), "", *by_layer(looks, moved), "", *by_head(looks, copying))))
    write_figures(json, figures())


@frozen
class Two:
    """Reader of prompts in two steps. first: share of the first. most: rows that copy to look at. apart: of so many
    rows one is compared for the KL."""

    reader: Reader
    contender: Contender
    first: float
    most: int
    apart: int

    def shift_of(self, texts: Sequence[Prompt]) -> Made:
        """By layer, the mean difference ``[Hkv, D]`` of the end's keys from dense's behind a dense beginning, before
        rotation: the mean over some texts."""
        sums: Made = {}
        for text in texts:
            ids, cut = self._ids(text)
            cache, dense, mixed = self.reader.prefill(ids[:, :cut])[1], Made(), Made()
            for sparse, made in ((False, dense), (True, mixed)):
                with tapped(self.reader, _kept(made, "k")), self.attached(sparse):
                    self.reader.prefill(ids[:, cut:], cache)
                cache.crop(cut - cache.get_seq_length())
            for key, found in mixed.items():
                each = (found.float() - dense[key].float()).mean(0) / len(texts)
                sums[key] = sums[key] + each if key in sums else each
        return sums

    def read(self, text: Prompt, shift: Made, looks: list[Look], moved: list[Moved]) -> Iterator[Read]:
        """The text in every way; what is seen inside goes to the lists."""
        ids, cut = self._ids(text)
        asked = [i for span in text.copies for i in range(span.first, span.last) if i > cut]
        if not asked:
            raise CommandError(f"--first {self.first:g}: {text.name} restates nothing behind it; pass less")
        places = {row: place for row, place in places_of(text).items() if row >= cut}
        step = max(1, -(-len(places) // self.most))
        seen = sorted(places)[::step]
        spread = torch.linspace(0, ids.shape[1] - cut - TAIL - 1, OTHERS).long().tolist()
        plain = [one for one in dict.fromkeys(spread) if one >= 0 and one + cut not in places]
        rows = [*(one - cut for one in seen), *plain]
        keys: dict[int, Tensor] = {}
        fronts: dict[bool, Made] = {False: {}, True: {}}
        caches: dict[bool, Any] = {}
        for sparse in (False, True):
            with tapped(self.reader, _kept(fronts[sparse], "k")), self.attached(sparse):
                caches[sparse] = self.reader.prefill(ids[:, :cut])[1]
        # By KV head, how a sparse beginning's keys differ from dense's on average.
        before = {key: (one.float() - fronts[False][key].float()).mean(0) for key, one in fronts[True].items()}
        fronts.clear()
        parts: Made = {}
        ends: Made = {}
        dense: Rows | None = None
        for way in ways(shift, parts, ends):
            self._mix(caches, way)
            made: Made = {}
            keep = _kept(parts, *PARTS) if way.name == DENSE else _kept(made, "k")
            watch = Watch(text.name, way.name, cut, places, rows, keys) if way.name in INSIDE else None
            with tapped(self.reader, keep, way.change), self.attached(way.sparse, watch):
                found, _ = self.reader.prefill(ids[:, cut:], caches[False])
            self._mix(caches, way, back=True)
            dense = found if dense is None else dense
            if watch is not None:
                looks += watch.found
            if way.name in (SPARSE, MIXED):
                moved += [
                    _moved_by(text.name, way.name, key[0], made[key], parts[key], before[key]) for key in sorted(made)
                ]
            if way.name == MIXED:
                ends.update({key: (one.float() - parts[key].float()).mean(0) for key, one in made.items()})
            at, compared = torch.tensor(asked) - 1 - cut, slice(0, -TAIL, self.apart)
            mine, wanted = found[at], ids[0, asked]
            yield Read(
                text.name, way.name, int((mine.argmax(-1) == wanted).sum()), len(asked),
                float(surprises(mine, wanted).mean()),
                compare(dense.part(compared), found.part(compared)).kl,
            )  # fmt: skip

    def attached(self, sparse: bool, observe: Watch | None = None) -> Any:
        """The model with the method, or with dense attention that can be observed."""
        pipeline = self.contender.pipeline if sparse else default_registry().build("dense")
        tail = self.contender.dense_tail if sparse else 0
        return attach(self.reader.model, pipeline, gate=None, tail=tail, verify=False, recall_every=0, observe=observe)

    def _ids(self, text: Prompt) -> tuple[Tensor, int]:
        return torch.tensor([text.ids], device=self.reader.device), int(len(text.ids) * self.first)

    @staticmethod
    def _mix(caches: Mapping[bool, Any], way: Way, *, back: bool = False) -> None:
        """Put keys and values of a sparse beginning into the dense one's cache; or back, with what was read cut off."""
        dense, sparse = caches[False], caches[True]
        if back:
            dense.crop(sparse.get_seq_length() - dense.get_seq_length())
        for mine, other in zip(dense.layers, sparse.layers, strict=True):
            if way.keys:
                mine.keys, other.keys = other.keys, mine.keys
            if way.values:
                mine.values, other.values = other.values, mine.values


def ways(shift: Made, parts: Made, own: Made) -> Iterator[Way]:
    """Every way, dense first. shift: of the keys, from other texts. parts: dense's queries, keys and values of the end,
    known once dense has read it. own: the text's own shift, known once the mixed way has."""

    def dense(part: str) -> Change:
        return lambda layer, which, _: parts[layer, which] if which == part else None

    def less(vectors: Made) -> Change:
        def change(layer: int, which: str, made: Tensor) -> Tensor | None:
            return (made.float() - vectors[layer, "k"]).to(made.dtype) if which == "k" else None

        return change

    yield Way(DENSE, sparse=False)
    yield Way(SPARSE, keys=True, values=True)
    yield Way(MIXED)
    yield Way("dense, sparse, keys of a sparse beginning", keys=True)
    yield Way("dense, sparse, values of a sparse beginning", values=True)
    yield Way("dense, sparse, dense's queries", change=dense("q"))
    yield Way("dense, sparse, dense's keys", change=dense("k"))
    yield Way("dense, sparse, dense's values", change=dense("v"))
    if shift:
        yield Way(OFF, change=less(shift))
    yield Way(OWN, change=less(own))


@contextmanager
def tapped(reader: Reader, keep: Change, change: Change | None = None) -> Iterator[None]:
    """The model while queries, keys and values are looked at, and changed, as the projections make them.

    ParameterError for a model whose layers have no projections of their own for each.
    """
    hooks = []
    try:
        for index, layer in enumerate(reader.decoder.layers):
            for part in PARTS:
                attention: Any = getattr(layer, "self_attn", None)
                module = getattr(attention, f"{part}_norm", None) or getattr(attention, f"{part}_proj", None)
                if module is None:
                    raise ParameterError(f"layer {index} has no {part}_proj: pass a model whose layers have one")
                hooks.append(module.register_forward_hook(_hook(index, part, attention.head_dim, keep, change)))
        yield
    finally:
        for one in hooks:
            one.remove()


def _hook(layer: int, part: str, size: int, keep: Change, change: Change | None) -> Any:
    def hook(_module: Any, _given: Any, out: Tensor) -> Tensor | None:
        made = out[0].reshape(out.shape[1], -1, size)
        keep(layer, part, made)
        new = None if change is None else change(layer, part, made)
        return None if new is None else new.reshape(out.shape)

    return hook


def _kept(made: Made, *parts: str) -> Change:
    def keep(layer: int, part: str, found: Tensor) -> None:
        if part in parts:
            made[layer, part] = found

    return keep


def _moved_by(text: str, way: str, layer: int, made: Tensor, dense: Tensor, front: Tensor) -> Moved:
    each = made.float() - dense.float()  # [n, Hkv, D]
    mean = each.mean(0)
    size = mean.norm(dim=-1) / dense.float().mean(0).norm(dim=-1)
    alike = mean.square().sum(-1) / each.square().sum(-1).mean(0).clamp(min=1e-12)
    cosine = torch.cosine_similarity(mean, front, dim=-1)
    return Moved(text, way, layer, *(tuple(one.tolist()) for one in (size, alike, cosine)))


def by_way(read: Sequence[Read]) -> Iterator[str]:
    """Lines of Markdown: what each way copies, over all texts."""
    yield "| first step, second | copies | NLL | KL |\n|---|---:|---:|---:|"
    for way in dict.fromkeys(one.way for one in read):
        mine = [one for one in read if one.way == way]
        copies, of = sum(one.copies for one in mine), sum(one.of for one in mine)
        nll = sum(one.nll * one.of for one in mine) / of
        yield f"| {way} | {copies} of {of} | {nll:.4f} | {fmean(one.kl for one in mine):.4f} |"


def by_layer(looks: Sequence[Look], moved: Sequence[Moved]) -> Iterator[str]:
    """Lines of Markdown: means over texts and heads. Odds and logits are those of the ways less dense's."""
    yield (
        "| layer | far: dense | sparse | mixed | odds: sparse | mixed | mean key: sparse | mixed | alike | cosine | "
        "logits: sparse | mixed |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    dense, sparse, mixed = (_heads(looks, way) for way in (DENSE, SPARSE, MIXED))
    for layer in sorted({one.layer for one in looks}):
        mine = [key for key in dense if key[0] == layer]
        far = [fmean(each[key]["far_all"] for key in mine) for each in (dense, sparse, mixed)]
        odds = [fmean(each[key]["odds"] - dense[key]["odds"] for key in mine) for each in (sparse, mixed)]
        shift = [fmean(each[key]["shift"] for key in mine) for each in (sparse, mixed)]
        keys = {way: [one for one in moved if (one.layer, one.way) == (layer, way)] for way in (SPARSE, MIXED)}
        mean = [fmean(x for one in keys[way] for x in one.mean) for way in (SPARSE, MIXED)]
        alike = fmean(x for one in keys[MIXED] for x in one.alike)
        cosine = fmean(x for one in keys[MIXED] for x in one.front)
        cells = [f"{x:.4f}" for x in far] + [f"{x:+.3f}" for x in odds] + [f"{x:.2f}" for x in (*mean, alike, cosine)]
        yield f"| {layer} | {' | '.join([*cells, *(f'{x:+.3f}' for x in shift)])} |"
    for way, each in ((SPARSE, sparse), (MIXED, mixed)):
        moves = torch.tensor([[one["shift"], one["odds"] - dense[key]["odds"]] for key, one in each.items()])
        found = float(moves.T.corrcoef()[0, 1])
        yield f"\n{way}: correlation of the logits' shift with the odds', over heads: {found:.2f}"


def by_head(looks: Sequence[Look], count: int) -> Iterator[str]:
    """Lines of Markdown: the heads that give most weight to what is copied, by dense attention."""
    every = {way: _heads(looks, way) for way in INSIDE}
    yield (
        "| layer, head | source in the beginning: dense | sparse | mixed | less its shift | kept: sparse | mixed | "
        f"source in the end: dense | sparse | mixed | logits: mixed |\n|---|{'---:|' * 10}"
    )
    dense = every[DENSE]
    ranked = sorted(dense, key=lambda key: -(dense[key]["front"] + dense[key]["back"]))[:count]
    for key in ranked:
        yield f"| {key[0]}, {key[1]} | {' | '.join(_cells({way: every[way][key] for way in INSIDE}))} |"
    mean = {way: {name: fmean(every[way][key][name] for key in ranked) for name in NAMES} for way in INSIDE}
    yield f"| mean | {' | '.join(_cells(mean))} |"


def _cells(one: Mapping[str, Mapping[str, float]]) -> list[str]:
    front = [one[way]["front"] for way in INSIDE]
    kept = [one[way]["front_kept"] for way in (SPARSE, MIXED)]
    back = [one[way]["back"] for way in (DENSE, SPARSE, MIXED)]
    return [*(f"{x:.3f}" for x in (*front, *kept, *back)), f"{one[MIXED]['shift']:+.3f}"]


NAMES = ("far_all", "odds", "front", "back", "front_kept", "shift")


def _heads(looks: Sequence[Look], way: str) -> dict[tuple[int, int], dict[str, float]]:
    """By layer and query head: means over texts, those of what is copied over its rows."""
    found: dict[tuple[int, int], list[Look]] = {}
    for one in looks:
        if one.way == way:
            for head in range(len(one.odds)):
                found.setdefault((one.layer, head), []).append(one)
    return {
        key: {
            "far_all": fmean((one.far[key[1]] + one.far_copying[key[1]]) / 2 for one in some),
            **{name: fmean(getattr(one, name)[key[1]] for one in some) for name in ("odds", "shift")},
            **{
                name: sum(getattr(one, name)[key[1]] * one.rows[side] for one in some)
                / max(1, sum(one.rows[side] for one in some))
                for name, side in (("front", 0), ("front_kept", 0), ("back", 1))
            },
        }
        for key, some in found.items()
    }


if __name__ == "__main__":
    app()
