"""The command `try`: from a model to the method that suits it, and the line to paste, within some seconds."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial
from json import dumps
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import evolve, frozen

from sparseprefill import __version__
from sparseprefill.errors import ParameterError

from ..session.defaults import TAIL
from . import options, render
from .fit import COPIES, LEAST
from .group import CommandError, Stop, check_writable

if TYPE_CHECKING:
    from sparseprefill.breakeven.points import HeadShape, Sizes
    from sparseprefill.breakeven.table import BreakEven
    from sparseprefill.profiles.identity import ModelIdentity
    from sparseprefill.registry import Registry

    from ..calibration.fit import ModelReadings
    from ..calibration.search import Search, Target, Trial
    from ..evaluation.clock import SideBySide
    from ..evaluation.prompts import Prompt, Text
    from .progress import Bars
    from .searched import Run
    from .setup import Place, Source

KL = 0.02
"""Mean KL(dense || sparse) that a setting may have, in nats, unless told otherwise."""
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens of the texts, the longest that the time suffices for, unless told otherwise."""
TEXTS = 4
"""Texts that are read, at most."""
READING = 3
"""Prefills that one reading of a text with a method costs, about: it is measured, and a continuation follows."""
AGAIN = 10
"""Prefills of dense attention that there must be time for before its first one is timed once more."""
SEARCH = 0.75
"""Share of the time for the search; the rest is for timing what was found."""
EVERY = {"cpu": 8, "cuda": 1}
"""Of so many rows inside a prompt one is compared with dense attention's: on a CPU that is most of the time."""
WINDOWS = (
    "Layers with a sliding window compute their window alone, where the model's own attention in transformers computes "
    "every key."
)
ROUNDS = {"cpu": 3, "cuda": 5}
"""Times that what was found is timed beside dense attention, at each length."""
WORTH = 1.05
"""Times as fast as every key that a method must be, where sliding windows gain by themselves."""


def try_(
    model: options.OneModel,
    text: options.Prompts = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, callback=options.finite, help="Time for all of it, the loading left out.")
    ] = 300.0,
    tokens: Annotated[
        int | None,
        typer.Option(min=LEAST, help="Tokens of a text; by default as many as there is time for, from 4,096 on."),
    ] = None,
    copies: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Lowest share of the tokens that dense copies from far above.")
    ] = COPIES,
    kl: Annotated[
        float, typer.Option(min=0.0, callback=options.finite, help="Highest mean KL(dense || sparse), in nats.")
    ] = KL,
    method: options.Methods = None,
    seed: options.Seed = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Write what was found, a profile, to this file.")] = (
        Path("model.profile.json")
    ),
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    dtype: options.Type = options.Dtype.AUTO,
    threads: options.Threads = 2,
    json: options.Json = False,
) -> None:
    """Find what suits a model in minutes: method and setting, what it keeps, what it saves, and the line to paste.

    Reads texts in which passages are restated far below, with dense attention and with every method, keeps the fastest
    setting that still copies them, times it in turns with dense attention, and says from which length on it gains
    anything. Where nothing does, it says so. Where layers have a sliding window, which gains by itself, methods must be
    faster than every key of the other layers. Ctrl-C ends the search, and what was found until then counts.
    """
    from ..evaluation.prompts import read

    try:
        texts = None if text is None else read(text)  # before the imports that take their time
    except ParameterError as error:
        raise CommandError(str(error).replace("prompts:", "--text:", 1)) from error

    from sparseprefill.registry import default_registry

    from ..calibration.candidates import candidates
    from ..calibration.fit import SIZES, ModelReadings
    from ..calibration.search import Searcher, Target
    from ..evaluation.outcome import starved
    from .progress import bars
    from .searched import Run
    from .setup import Place, Source, identity_of

    check_writable("--output", output)
    registry = default_registry()
    named = options.chosen(registry, method)
    methods = [one for one in named if one.table is None]
    left_out = {
        one.name: f"it needs a table of this model's {one.table.of}; `sparseprefill fit` makes it"
        for one in named
        if one.table is not None
    }
    if not methods:
        raise CommandError("; ".join(f"--method {name}: {why}" for name, why in left_out.items()))
    target = Target(kl=kl, copies=copies or None)
    place = Place.of(device, dtype.value, threads)
    times: list[SideBySide] = []
    with bars(1) as shown, place.threaded():
        source = Source.of(model, place, device_map, "MODEL")
        longest = _longest(texts, source, tokens, SIZES.greedy, shown)
        loaded = source.load()
        began, spent = time.monotonic(), time.process_time()
        until = began + seconds
        length = longest if tokens else _length(partial(_first, loaded, shown), longest, len(methods), SEARCH * seconds)
        prompts = _prompts(texts, source, length, seed)
        identity = identity_of(loaded, model)
        how = {"seed": seed, "tail": TAIL, "seconds": seconds, "target": str(target), "left_out": left_out}
        run = Run(
            target=target,
            by="seconds",
            methods=[one.name for one in methods],
            identity=identity,
            output=output,
            place=place,
            how={**how, **place.facts},
        )
        shown.finished(
            f"{_counted(prompts, 'text')} of {length:,} tokens, {_counted(methods, 'method')}; about {seconds:.0f} s, "
            "and a reading that has begun is finished"
        )
        sizes = evolve(SIZES, every=EVERY[place.kind])
        readings = ModelReadings(loaded, identity, prompts, sizes, TAIL, shown.doing)
        _dense(readings, began + SEARCH * seconds, shown)
        every = _every_key(loaded, registry, readings, target, shown)
        if every is not None and every.error:
            left_out[options.DENSE] = f"it failed, so that what windows gain by themselves is not known: {every.error}"
            every = None
        pays = Expected.of(place, identity)
        last = [one.name for one in methods if not pays.at(one.name, length)] if place.kind == "cpu" else []
        tried = candidates(methods, last=last)
        searcher = Searcher(length, tried, readings, target, "seconds", until=began + SEARCH * seconds)
        told: set[str] = set()
        with Stop() as stop:
            progress = shown.settings(f"{length:,} tokens")

            def hear(done: int, of: int) -> None:
                progress(done, of)
                _tell(searcher.result(), told, shown)

            searcher.run(hear)
        found = searcher.result()
        stop.check(len(found.trials))
        timing, whole = Stop(), None
        with timing:
            if every is not None:
                whole = next(_timed(loaded, prompts[0], run, every, until, shown))
            if found.chosen is not None:
                for one in _timed(loaded, prompts[0], run, found.chosen, until, shown):
                    times.append(one)  # Ctrl-C keeps those that are there
            if every is not None and whole is not None and enough(whole, times):
                found, times = evolve(found, chosen=every, trials=(every, *found.trials), reason=""), [whole]
                run.methods = [*run.methods, options.DENSE]
                for one in _timed(loaded, prompts[0], run, every, until, shown, whole):
                    times.append(one)
        run.searches += [found] if found.chosen is not None else []
    passed = time.monotonic() - began
    doubt = starved(time.process_time() - spent, passed) if place.kind == "cpu" else ""
    result = Verdict(run, found, tuple(times), passed, doubt, whole, pays, longest)
    if result.gains:
        run.dense_below = result.below or 0
        run.write()
    if json:
        render.write_json({"version": __version__, "model": model, **how, **place.facts, **result.facts})
    else:
        result.show(f"{model}: {_counted(prompts, 'text')} of {length:,} tokens, {place}")
        for name, reason in left_out.items():
            render.line(f"{name} is left out: {reason}", style="dim")
    render.broken(registry)
    (timing if timing.heard else stop).end(len(found.trials), len(found.trials) + found.untried, "settings")


@frozen(eq=False)
class Expected:
    """Expectations of the device's break-even table for a model's heads; none without a table."""

    table: BreakEven | None
    sizes: Callable[[int], Sizes]

    @classmethod
    def of(cls, place: Place, model: ModelIdentity) -> Expected:
        """The expectations for a model at a place."""
        from sparseprefill.breakeven.gate import AutoGate, gate_of
        from sparseprefill.breakeven.points import Sizes

        def sizes(tokens: int) -> Sizes:
            heads = {"heads": model.heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim}
            return Sizes(**heads, dtype=place.dtype_name, queries=tokens, keys=tokens)

        gate = gate_of("auto")
        return cls(gate.table(place.device) if isinstance(gate, AutoGate) else None, sizes)

    def _shape(self, method: str) -> HeadShape | None:
        """The shape of heads by which the table judges the method; None without one, and for types that it lacks."""
        from sparseprefill.breakeven.points import nearest

        return None if self.table is None else nearest(self.table.shapes, self.sizes(LEAST), method)

    def at(self, method: str, tokens: int) -> bool:
        """True if the method was measured, and is expected to gain at this length; also where there is no table."""
        shape = self._shape(method)
        if self.table is None or shape is None:
            return True
        ratio = self.table.ratio(method, self.sizes(tokens)) if shape.knows(method) else None
        return ratio is not None and ratio < 1.0

    def least(self, method: str) -> int | None:
        """Tokens from which on the method is expected to gain; None where that is not known."""
        shape = self._shape(method)
        if self.table is None or shape is None or not shape.knows(method):
            return None
        return self.table.length(method, shape)


@frozen(eq=False)
class Verdict:
    """Advice for a model. found: of the search. times: of what it chose, longest first; none where it chose none.

    seconds: that all of it took. doubt: about its times, by the processors that it had. windows: times of every key by
    this library, of a model whose layers have sliding windows, some or all. expected: by the device's break-even table.
    longest: tokens of the longest text that there is, and that the model reads.
    """

    run: Run
    found: Search
    times: tuple[SideBySide, ...]
    seconds: float
    doubt: str = ""
    windows: SideBySide | None = None
    expected: Expected | None = None
    longest: int | None = None

    @property
    def every_key(self) -> bool:
        """True if every key is what to take, by this library."""
        return self.found.chosen is not None and self.found.chosen.candidate.name == options.DENSE

    @property
    def below(self) -> int | None:
        """Tokens from which on what was chosen was faster than dense attention, at every length that was timed; None
        where it was not at the longest."""
        faster: int | None = None
        for one in self.times:
            if one.speed_up <= 1.0:
                break
            faster = one.tokens
        return faster

    @property
    def gains(self) -> bool:
        """True if there is anything to paste."""
        return self.below is not None

    @property
    def line(self) -> str:
        """The line to paste into a program; empty where the model should stay as it is."""
        return f'attach(model, profile="{self.run.output}")' if self.gains else ""

    @property
    def server(self) -> str:
        """The addition to a server's command line; empty where the model should stay as it is, and of every key: a
        server computes windows by itself."""
        if not self.gains or self.every_key:
            return ""
        held = dumps({"sparseprefill": {"profile": str(self.run.output.absolute())}})
        return f"--attention-backend CUSTOM --additional-config {shlex.quote(held)}"

    @property
    def facts(self) -> dict[str, Any]:
        """All of it, as plain data."""
        from .searched import as_json

        return {
            "dense": not self.gains,
            "dense_below": self.below,
            "said": self.said,
            "line": self.line,
            "server": self.server,
            "profile": str(self.run.output) if self.gains else None,
            "times": [one.figures for one in self.times],
            "windows": None if self.windows is None else self.windows.figures,
            "took": self.seconds,
            "search": as_json(self.found),
        }

    @property
    def said(self) -> list[str]:
        """The verdict, a sentence or two each: what to take, what it keeps, what it saves, and what to know."""
        return [*self._chosen(), *self._doubts()]

    def show(self, title: str) -> None:
        """Print the nearest setting of every method, the verdict and what to paste."""
        from .searched import show

        show([(self.found, one) for one in self._best()], f"{title}; {self.seconds:.0f} s")
        for text in self.said:
            render.line(text)
        if self.gains:
            render.line("\nIn transformers:", style="bold")
            typer.echo(f"from sparseprefill.adapters.huggingface import attach\n{self.line}")
            if self.server:
                render.line("In vLLM, behind `vllm serve MODEL`:", style="bold")
                typer.echo(self.server)

    def _best(self) -> list[Trial]:
        """Each method's setting that came nearest to the target; the chosen one stands first."""
        chosen = self.found.chosen
        made = [] if chosen is None else [chosen]
        for name in self.run.methods:
            own = [one for one in self.found.trials if one.candidate.name == name]
            if own and (chosen is None or chosen.candidate.name != name):
                made.append(min(own, key=lambda one: (bool(one.error), -len(one.outcomes), one.shortfall)))
        return made

    def _chosen(self) -> list[str]:
        """The choice in words, or the reason for none."""
        from .searched import named

        chosen, near, tokens = self.found.chosen, self.found.nearest, self.found.tokens
        if chosen is None:
            keeping = [one for one in self.found.trials if not one.error and one.shortfall <= 1.0]
            enough = min(keeping, key=lambda one: one.cost("seconds"), default=None)
            if enough is not None:
                dense = fmean(one.seconds for one in self.found.stock[: len(enough.outcomes)])
                return [
                    f"Stay dense up to {tokens:,} tokens: {named(enough)} keeps enough ({_kept(enough)}), but a "
                    f"prefill takes {enough.cost('seconds'):.2f} s, and {dense:.2f} s dense.",
                    self._longer(enough),
                ]
            made = [f"Stay dense: {self.found.reason}."]
            if near is not None:
                made.append(f"The nearest was {named(near)}: {_kept(near)}. To accept as much, pass --copies and --kl.")
            return made
        name, kept = named(chosen), _kept(chosen)
        first = self.times[0] if self.times else None
        if first is None:
            return [f"{name} was found, and could not be timed: {kept}."]
        other = "the model's own attention" if self.every_key else "dense attention's"
        speed = f"{first.speed_up:.2f} times as fast as {other} at {first.tokens:,} tokens"
        times = f"{_counted(first.own, 'prefill')} of each, in turns"
        if not self.gains:
            return [
                f"Stay dense up to {tokens:,} tokens: {name} keeps enough ({kept}), but its whole prefill is {speed} "
                f"({times}).",
                self._longer(chosen),
            ]
        said = [f"Take {name}. {kept[:1].upper()}{kept[1:]}.", f"Its whole prefill is {speed} ({times})."]
        if self.every_key and self.windows is None:
            said.append(
                "That is every key by this library, whose kernels are faster here than the model's own attention."
            )
        elif self.every_key:
            said.append(f"{WINDOWS} No method is {WORTH:g} times as fast as that. A server has it anyway.")
        elif self.windows is not None:
            said.append(f"{WINDOWS} That alone is {self.windows.speed_up:.2f} times as fast. A server has it anyway.")
        slower = next((one for one in self.times if one.speed_up <= 1.0), None)
        why = "shorter ones were not timed" if slower is None else f"{slower.speed_up:.2f} times at {slower.tokens:,}"
        below = f"below {self.below:,} tokens ({why}); the profile does"
        return [*said, f"Keep the model's own {below}." if self.every_key else f"Stay dense {below}."]

    def _longer(self, trial: Trial) -> str:
        """A next length to try, where a setting keeps enough and is no faster."""
        name, tokens = trial.candidate.name, self.found.tokens
        least = None if self.expected is None else self.expected.least(name)
        more = 2 * tokens
        while least is not None and more < least:
            more *= 2
        if self.longest is not None and more > self.longest:
            return f"Its longest text has {self.longest:,} tokens, so nothing is left to try."
        known = (
            "" if least is None or least <= tokens else f" (by the device's break-even table {name} from {least:,} on)"
        )
        return f"Longer prompts may gain{known}: pass --tokens {more}."

    def _doubts(self) -> list[str]:
        from ..evaluation.outcome import Summary, unsteady
        from .results import cannot

        stock = Summary.of(self.found.stock, 0)
        made = [f"Beware: {text}." for text in cannot([stock])]
        if self.found.stock and not stock.copies.asked:
            made.append(
                f"Beware: texts of {self.found.tokens:,} tokens are too short to restate passages in, so that only KL "
                "counted; pass longer ones."
            )
        alone = [one.seconds for one in self.found.stock]  # texts of one length
        doubt = unsteady(self.times[0].stock if self.times else alone) or self.doubt
        made += [f"Beware: {doubt}."] if doubt else []
        chosen = self.found.chosen
        if chosen is not None and not self.every_key and len(chosen.outcomes) < self.found.prompts:
            made.append(
                f"It was chosen on {len(chosen.outcomes)} of {self.found.prompts} texts: give it more --seconds."
            )
        tried = {one.candidate.name for one in self.found.trials}
        left = [name for name in self.run.methods if name not in tried]
        if left and tried:
            wanted = 60 * ceil(self.seconds / SEARCH * len(self.run.methods) / len(tried) / 60)
            made.append(f"There was no time for {', '.join(left)}: pass about --seconds {wanted} for all methods.")
        elif self.found.untried:
            made.append(f"There was no time for {self.found.untried} more settings; --seconds gives it.")
        return made


def _every_key(model: Any, registry: Registry, readings: ModelReadings, target: Target, shown: Bars) -> Trial | None:
    """The trial of every key, by this library, on one text, for a model with layers that have a sliding window; None
    for any other."""
    from ..calibration.candidates import Candidate
    from ..calibration.search import Trial
    from ..huggingface.dry_run import windows

    if not windows(model):
        return None
    candidate = Candidate(registry.get(options.DENSE), {})
    outcomes = (readings.run(candidate, 0),)
    made = Trial(candidate, outcomes, target.shortfall(outcomes))
    took = made.error or f"{made.cost('seconds'):.2f} s a prefill"
    shown.finished(f"every key, and windows as such: {took}")
    return made


def enough(whole: SideBySide, times: Sequence[SideBySide]) -> bool:
    """True if every key is faster than the model's own attention, and what was chosen, if anything, hardly more so."""
    best = times[0].speed_up if times else 0.0
    return whole.speed_up >= WORTH and best < WORTH * whole.speed_up


def _dense(readings: ModelReadings, until: float, shown: Bars) -> None:
    """Read a text with dense attention, and say what a prefill takes, and for how many readings there is time.

    until: when the search ends. A prefill is timed again where that takes little of the time.
    """
    began = time.monotonic()
    stock = readings.stock(0)
    now = time.monotonic()
    steady = (until - now) >= AGAIN * stock.seconds
    if steady:
        stock = readings.again(0)
    each, left = max(READING * stock.seconds, now - began), max(0.0, until - time.monotonic())
    prefill = f"{stock.seconds:.2f} s " + ("a prefill" if steady else "for its first prefill, which warms up")
    if each <= left:
        room = f"there is time for about {left // each:,.0f} readings of a text with a method"
    else:
        room = (
            f"a reading of a text with a method takes about {each:.1f} s, and outlasts the {left:.1f} s that are left: "
            "one is made in any case; pass more --seconds, or fewer --tokens"
        )
    shown.finished(f"dense attention: {prefill}; {room}")


def _tell(found: Search, told: set[str], shown: Bars) -> None:
    """A line for those who wait, for each method, at its first setting."""
    from .searched import named

    for one in found.trials:
        if one.candidate.name not in told:
            told.add(one.candidate.name)
            what = one.error or f"{_kept(one)}; {one.cost('seconds'):.2f} s a prefill"
            shown.finished(f"{named(one)}: {what}")


def _kept(trial: Trial) -> str:
    """A setting's pairs, and the answers that it keeps, in words."""
    from ..evaluation.outcome import Summary

    one, parts = Summary.of(trial.outcomes, 0), []
    if one.copies.telling:
        parts.append(f"it copies {one.copies.right:,} tokens, dense attention {one.copies.dense:,}")
    if one.inside is not None:
        parts.append(f"its next tokens are {one.inside.kl:.4f} nats (KL) from dense attention's, inside the prompt")
    return ", ".join([*parts, f"and it computes {one.density:.0%} of the pairs"])


def _longest(texts: Sequence[Text] | None, source: Source, tokens: int | None, greedy: int, shown: Bars) -> int:
    """Tokens of the longest text that there is, and that the model reads; CommandError where that is too short."""
    from ..evaluation.prompts import tokenized

    most = source.positions
    room = LENGTHS[-1] if most is None else most - greedy
    if tokens is not None:
        tokens = room = source.fitted(tokens, greedy, shown.finished)
    if texts is None:
        there = room
    else:
        there = max(len(one.ids) for one in tokenized(texts[:TEXTS], source.tokenizer))
        if tokens is not None and 4 * there < 3 * tokens:
            raise CommandError(f"--tokens {tokens}: the longest text of --text has {there}; pass about that, or less")
    found = min(room, there)
    if found < LEAST:
        what = "the longest text of --text has" if there < room else "the model reads"
        raise CommandError(f"{what} {found} tokens, and below {LEAST} there is nothing to gain: pass a longer one")
    return found


def _first(model: Any, shown: Bars, tokens: int) -> float:
    """Seconds of a dense prefill of so many random tokens, whose layers are shown."""
    from ..evaluation.comparison import counted
    from ..evaluation.reading import Reader

    with counted(model, partial(shown.doing, f"a first prefill of {tokens:,} tokens")):
        return Reader(model).once(tokens)


def _length(first: Callable[[int], float], longest: int, methods: int, seconds: float) -> int:
    """Tokens of the longest texts that every method can read one of in half of the time, by one dense prefill.

    first: gives the seconds of one of so many tokens.
    """
    fits = min(LENGTHS[0], longest)
    if longest <= fits:
        return fits
    once = first(fits)
    begun = fits
    for one in (*(each for each in LENGTHS if begun < each < longest), longest):
        cost = READING * methods * once * (one / begun) ** 2  # at most: not all of a prefill is attention
        fits = one if cost <= seconds / 2 else fits
    return fits


def _counted(found: Sized, word: str) -> str:
    return f"{len(found)} {word}{'' if len(found) == 1 else 's'}"


def _prompts(texts: Sequence[Text] | None, source: Source, length: int, seed: int) -> list[Prompt]:
    """The texts, with passages restated where there is room for that."""
    from ..evaluation.prompts import tokenized
    from ..evaluation.texts import built_in, with_copies

    if texts is None:
        return built_in(source.tokenizer, length, TEXTS, seed)
    found = [one for one in tokenized(texts[:TEXTS], source.tokenizer, length) if 4 * len(one.ids) >= 3 * length]
    return [with_copies(one, length, seed) for one in found]


def _timed(
    model: Any, prompt: Prompt, run: Run, chosen: Trial, until: float, shown: Bars, whole: SideBySide | None = None
) -> Iterator[SideBySide]:
    """Time the choice beside dense attention, at the whole length and at half of it, again and again, until dense wins
    or the time is up. whole: the first of these, where it is known already."""
    from ..evaluation.clock import side_by_side

    contender = chosen.candidate.contender(run.identity, TAIL)
    rounds = ROUNDS[run.place.kind]
    made, length = whole, len(prompt.ids)
    with shown.contender("in turns with dense attention") as progress:
        while made is None or made.speed_up > 1.0:
            if made is not None:
                length //= 2
                if length < LEAST or time.monotonic() >= until:
                    return
            progress(f"{length:,} tokens", 0, 1)
            made = side_by_side(model, prompt.ids[:length], contender, rounds, until)
            yield made
