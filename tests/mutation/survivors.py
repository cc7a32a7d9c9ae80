"""Mutants that survived, in a file of the repository, so that they join the next sample until a test kills them.

Lines shift, so a survivor is known by what it changes: in which file, in which class or function, which operator, and
the lines before and after.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from attrs import asdict, frozen

from mutation.checkout import ROOT
from mutation.mutants import Mutant, Source

FILE = Path(__file__).with_name("survivors.json")


@frozen(order=True)
class Survivor:
    """path: in the checkout. within: the classes and functions around it. before, after: the lines that change."""

    path: str
    within: str
    operator: str
    before: str
    after: str

    @classmethod
    def of(cls, mutant: Mutant, source: Source) -> Survivor:
        """What a mutant of this source is known by."""
        before, after = source.text.splitlines(), source.mutate(mutant).splitlines()
        while before and after and before[0] == after[0]:
            del before[0], after[0]
        while before and after and before[-1] == after[-1]:
            del before[-1], after[-1]
        texts = ("\n".join(line.strip() for line in lines) for lines in (before, after))
        return cls(mutant.path, mutant.within, mutant.operator, *texts)

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.path} {self.within} {self.operator.removeprefix('core/')}: {before} -> {after}"


def read(file: Path = FILE) -> list[Survivor]:
    """Those of earlier runs; none where there is no file."""
    if not file.exists():
        return []
    return [Survivor(**one) for one in json.loads(file.read_text(encoding="utf-8"))]


def write(survivors: Iterable[Survivor], file: Path = FILE) -> None:
    """In one order, each once."""
    text = json.dumps([asdict(one) for one in sorted(set(survivors))], indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def found(survivors: Sequence[Survivor], sources: Mapping[str, Source]) -> dict[Survivor, list[Mutant]]:
    """The mutants of each that is in one of these files; no mutant where the code, or its file, is no longer there.

    Where the same line stands in one function twice, both are meant.
    """
    made: dict[Survivor, list[Mutant]] = {
        one: [] for one in survivors if one.path in sources or not (ROOT / one.path).exists()
    }
    for path, source in sources.items():
        kinds = {(one.within, one.operator) for one in made if one.path == path}
        for mutant in source.mutants():
            if (mutant.within, mutant.operator) in kinds and (one := Survivor.of(mutant, source)) in made:
                made[one].append(mutant)
    return made


def left(
    earlier: Sequence[Survivor], joined: Mapping[Survivor, Sequence[Mutant]], alive: Collection[Mutant]
) -> tuple[list[Survivor], list[Survivor], list[Survivor]]:
    """Of earlier survivors, after a run: those that are left, those that are killed now, and those without a place.

    joined: as `found` says; one of a file that was not in the run is left.
    """
    killed = [one for one, mutants in joined.items() if mutants and not any(mutant in alive for mutant in mutants)]
    gone = [one for one, mutants in joined.items() if not mutants]
    return [one for one in earlier if one not in killed and one not in gone], killed, gone
