"""Mutants that survived are kept, found again where their lines have moved, and dropped once they are killed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve

from mutation.mutants import Mutant, Source
from mutation.survivors import Survivor, found, left, read, write

PATH = "core/sparseprefill/plan.py"
TEXT = """
class Sizes:
    def area(self):
        return self.a + self.b

    def edge(self):
        return self.a + self.b
"""


class Plus(Source):
    """A source whose mutants are made here, for Cosmic Ray is installed by `tox -e mutants` alone: minus for plus."""

    def mutants(self) -> Iterator[Mutant]:
        within: list[str] = []
        for number, line in enumerate(self.text.splitlines(), start=1):
            if name := re.match(r"\s*(?:def|class) (\w+)", line):
                within = [*within[: 0 if line[0] == "c" else 1], name[1]]
            if "+" in line:
                yield Mutant(self.path, "core/Minus", number, (number, 0), (number, number), True, ".".join(within))

    def mutate(self, mutant: Mutant) -> str:
        lines = self.text.splitlines()
        lines[mutant.spot[0] - 1] = lines[mutant.spot[0] - 1].replace("+", "-")
        return "\n".join(lines) + "\n"


def known(text: str = TEXT) -> tuple[Plus, list[Mutant]]:
    source = Plus(PATH, text)
    return source, list(source.mutants())


def test_a_survivor_is_known_by_place_and_change() -> None:
    source, (area, edge) = known()
    one = Survivor.of(area, source)
    assert one == Survivor(PATH, "Sizes.area", "core/Minus", "return self.a + self.b", "return self.a - self.b")
    assert Survivor.of(edge, source) == evolve(one, within="Sizes.edge")
    assert str(one).endswith("Sizes.area Minus: return self.a + self.b -> return self.a - self.b")


def test_a_survivor_is_found_where_lines_have_shifted() -> None:
    source, (area, edge) = known()
    moved, (other, again) = known("import os\n\n\n" + TEXT.replace("a +", "a  +", 0))
    wanted = [Survivor.of(area, source), Survivor.of(edge, source)]
    assert found(wanted, {PATH: moved}) == {wanted[0]: [other], wanted[1]: [again]}
    assert other.spot != area.spot


def test_what_is_no_longer_there_has_no_mutants() -> None:
    source, (area, edge) = known()
    changed, (rest,) = known(TEXT.replace("return self.a + self.b", "return 0", 1))
    first, second = Survivor.of(area, source), Survivor.of(edge, source)
    assert found([first, second], {PATH: changed}) == {first: [], second: [rest]}
    deleted, elsewhere = evolve(first, path="core/was.py"), evolve(first, path="core/sparseprefill/route.py")
    assert found([deleted, elsewhere], {PATH: changed}) == {deleted: []}


def test_the_same_line_twice_in_a_function_is_killed_when_both_are() -> None:
    source, (first, second) = known(TEXT.replace("\n    def edge(self):\n", ""))
    one = Survivor.of(first, source)
    joined = found([one], {PATH: source})
    assert joined == {one: [first, second]}
    assert left([one], joined, {second}) == ([one], [], [])
    assert left([one], joined, set()) == ([], [one], [])


def test_what_became_of_earlier_survivors() -> None:
    source, (area, edge) = known()
    killed, alive = Survivor.of(area, source), Survivor.of(edge, source)
    gone, other = evolve(killed, before="x"), evolve(killed, path="core/sparseprefill/route.py")
    earlier = [killed, alive, gone, other]
    joined = found(earlier, {PATH: source})
    assert left(earlier, joined, {edge}) == ([alive, other], [killed], [gone])


def test_the_file(tmp_path: Path) -> None:
    source, mutants = known()
    area, edge = (Survivor.of(one, source) for one in mutants)
    file = tmp_path / "survivors.json"
    assert read(file) == []
    write([edge, area, edge], file)
    assert read(file) == [area, edge]
    before = file.read_bytes()
    write([area, edge], file)
    assert file.read_bytes() == before


def test_survivors_of_the_repository_join_the_next_run() -> None:
    for one in read():
        assert Path(one.path).suffix == ".py"
        assert one.before != one.after


def test_mutants_know_the_functions_around_them() -> None:
    pytest.importorskip("cosmic_ray")
    text = "class A:\n    @property\n    def b(self):\n        return 1 + 2\n\nc = 3 + 4\n"
    rooms = {one.within for one in Source(PATH, text).mutants() if one.operator.endswith("Add_Sub")}
    assert rooms == {"A.b", ""}
    decorators = [one for one in Source(PATH, text).mutants() if one.operator.endswith("RemoveDecorator")]
    assert [one.within for one in decorators] == ["A.b"]


NOTHING = """
@cache
@typing.override
def a(b):
    return zip(b, b, strict=True) if kernels.serve_device(b) else b

def _by_kernels(b):
    return b + 1

def c(b):
    if kernels.serve(b) and b:
        return 2 * b
    return b

ENTRIES, CELLS = 1 << 23, 1 << 24
"""


def test_what_changes_no_result_on_a_cpu_has_no_mutants() -> None:
    pytest.importorskip("cosmic_ray")
    left = [(one.operator, one.within) for one in Source("core/sparseprefill/refiners/budget.py", NOTHING).mutants()]
    assert {("core/ReplaceAndWithOr", "c"), ("core/AddNot", "c"), ("core/AddNot", "a")} >= set(left)
    elsewhere = [one.within for one in Source(PATH, NOTHING).mutants() if one.operator == "core/NumberReplacer"]
    assert {""} == set(elsewhere), "the names are those of one file"


def test_tests_that_name_a_class_may_notice_how_it_is_declared() -> None:
    pytest.importorskip("coverage")
    from mutation.touch import Touch

    here = "tests/mutation/test_survivors.py::test_the_file"
    touch = Touch({here: 1.0}, {PATH: {}})
    spot = Mutant(PATH, "core/Minus", 0, (1, 0), (1, 1), False, "Plus.mutants")
    assert [here] == touch.select(spot)
    assert touch.select(evolve(spot, within="Nobody" + "Names.this")) == []
