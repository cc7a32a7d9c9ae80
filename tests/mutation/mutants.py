"""Which mutants there are, by Cosmic Ray's operators, and a seeded sample of them spread over the files by size."""

# What only `tox -e mutants` installs.
# pyright: reportMissingImports=false

from __future__ import annotations

import ast
import itertools
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from attrs import field, frozen

from mutation.checkout import ROOT

# What these operators make is the same for the values that it meets: `is` for `==` (None, booleans and small integers
# are single objects), and `+` and `*` for `|` and `&` (on booleans).
SAME = ("_Eq_Is", "_Is_Eq", "_NotEq_IsNot", "_IsNot_NotEq", "_BitOr_Add", "_BitAnd_Mul")
NEEDS_NAMES = ("VariableReplacer", "VariableInserter")  # they take the names of variables, and are off without
TYPING_ONLY = {"overload", "override", "final", "runtime_checkable"}
KEPT_RESULTS = {"cache", "kept", "kept_by_sizes", "remembered"}  # decorators without which the same is computed again
# Sizes of pieces of work and of what is kept at hand: they change time and memory and no result, so that a test of one
# could but repeat it. What obeys them is mutated like everything else.
PACE = {
    "core/sparseprefill/executors/cpu.py": {"GATHERED", "RUN", "TOGETHER", "COLUMNS", "ALIKE", "JOINED"},
    "core/sparseprefill/mask/count.py": {"ENTRIES"},
    "core/sparseprefill/mask/priority.py": {"ENTRIES"},
    "core/sparseprefill/pipeline.py": {"SHARE"},
    "core/sparseprefill/refiners/budget.py": {"ENTRIES", "CELLS", "BLOCKS"},
    "core/sparseprefill/refiners/narrow.py": {"ENTRIES"},
}
LEAVES = {"name", "string", "newline", "endmarker"}  # where no operator has a place; skipping them is only faster

Spot = tuple[int, int]


@frozen
class Mutant:
    """One change of one file.

    path: in the checkout. operator, occurrence: as Cosmic Ray counts them. spot: line (from 1) and column (from 0).
    lines: first and last line of the statement around it. called: whether it stands in the body of a function, so
    that it runs when that is called and not when the file is imported. within: the classes and functions around it.
    """

    path: str
    operator: str
    occurrence: int
    spot: Spot
    lines: tuple[int, int]
    called: bool
    within: str = ""

    @property
    def name(self) -> str:
        """For listings: ``path:line:column operator``."""
        return f"{self.path}:{self.spot[0]}:{self.spot[1] + 1} {self.operator.removeprefix('core/')}"


@frozen
class Source:
    """One file of the checkout. seen: what Python's own parser says about its places."""

    path: str
    text: str = field(repr=False)

    @classmethod
    def read(cls, path: str) -> Source:
        """By its path in the checkout."""
        return cls(path, (ROOT / path).read_text(encoding="utf-8"))

    @property
    def size(self) -> int:
        """In lines."""
        return self.text.count("\n")

    def mutate(self, mutant: Mutant) -> str:
        """The text with the change in it."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        changed: str | None = mutate_code(self.text, get_operator(mutant.operator)(), mutant.occurrence)
        if changed is None:
            raise ValueError(f"{mutant.name}: there is no such mutant")
        return changed

    def mutants(self) -> Iterator[Mutant]:
        """Every one there is."""
        return _Map(self).mutants()


@frozen(slots=False)
class _Map:
    """Of one file: what is excluded, what stands in functions, where statements begin and end."""

    source: Source

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.source.text.splitlines()

    def span(self, node: Any) -> tuple[Spot, Spot]:
        """Columns in characters; Python's are in bytes."""
        ends = ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        (a, b), (c, d) = ((line, len(self.lines[line - 1].encode()[:column].decode())) for line, column in ends)
        return (a, b), (c, d)

    @cached_property
    def excluded(self) -> list[tuple[Spot, Spot]]:
        """What changes no result on a CPU: annotations, what type checkers read, wording of texts, results kept for the
        next time, `PACE`, the numbers in a `workspace`, which is an estimate that tests hold to what a call takes and
        to a few times that, a check of the code's own lists (the `strict` of a zip), and the way of a GPU, which has
        tests of its own: what `kernels.serve` lets in, the device that a `with torch.cuda` names, and `_by_kernels`.
        """
        found: list[ast.AST | None] = []
        for node in ast.walk(self.tree):
            match node:
                case ast.AnnAssign() | ast.arg():
                    found.append(node.annotation)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    found.append(node.returns)
                    found += node.body if node.name == "_by_kernels" else []
                    found += _numbers(node) if node.name == "workspace" else []
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    found += [node.test, *node.body]
                case ast.If() if _asks_for_kernels(node.test):
                    found += node.body
                case ast.IfExp() if _asks_for_kernels(node.test):
                    found.append(node.body)
                case ast.withitem() if ast.unparse(node).startswith("torch.cuda."):
                    found.append(node.context_expr)
                case ast.Call(func=ast.Name(id="zip")):
                    found += [one.value for one in node.keywords if one.arg == "strict"]
                case ast.Assign() if _names(node) & PACE.get(self.source.path, set()):
                    found.append(node.value)
                case ast.JoinedStr() | ast.ImportFrom():
                    found.append(node)
                case _:
                    pass
        return [self.span(node) for node in found if node is not None] + self.needless_decorators

    @cached_property
    def needless_decorators(self) -> list[tuple[Spot, Spot]]:
        """Of `TYPING_ONLY` and `KEPT_RESULTS`, from their @ on, which is no part of Python's node."""
        lists = (getattr(node, "decorator_list", ()) for node in ast.walk(self.tree))
        spans = (self.span(one) for one in itertools.chain(*lists) if _last_word(one) in TYPING_ONLY | KEPT_RESULTS)
        return [((line, column - 1), end) for (line, column), end in spans]

    @cached_property
    def bodies(self) -> list[tuple[Spot, Spot]]:
        functions = [one for one in ast.walk(self.tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        return [(self.span(one.body[0])[0], self.span(one.body[-1])[1]) for one in functions]

    @cached_property
    def statements(self) -> list[tuple[Spot, int]]:
        """Where each begins, its decorators included, and its last line; of a compound one, the last of its header."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt | ast.excepthandler):
                start, end = self.span(node)
                start = min([start, *((one.lineno, 0) for one in getattr(node, "decorator_list", ()))])
                body = getattr(node, "body", None)
                last = max(start[0], self.span(body[0])[0][0] - 1) if body else end[0]
                found.append((start, last))
        return sorted(found)

    def around(self, spot: Spot) -> tuple[int, int]:
        """First and last line of the innermost statement at a place."""
        start, last = max(one for one in self.statements if one[0] <= spot)
        return start[0], max(last, spot[0])

    @cached_property
    def rooms(self) -> list[tuple[Spot, Spot, str]]:
        """Classes and functions with their decorators, the outer ones first."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                start, end = self.span(node)
                found.append((min([start, *((one.lineno, 0) for one in node.decorator_list)]), end, node.name))
        return sorted(found)

    def mutants(self) -> Iterator[Mutant]:
        import parso
        from cosmic_ray.ast import ast_nodes
        from cosmic_ray.plugins import get_operator, operator_names

        operators = [
            (name, get_operator(name)) for name in operator_names() if not name.endswith((*SAME, *NEEDS_NAMES))
        ]
        made = [(name, operator()) for name, operator in operators]
        counts: dict[str, int] = defaultdict(int)
        for node in ast_nodes(parso.parse(self.source.text)):
            if node.type in LEAVES:
                continue
            for name, operator in made:
                for spot, _ in operator.mutation_positions(node):
                    occurrence, counts[name] = counts[name], counts[name] + 1
                    # A bare `*` or `/` among parameters is a mark and no operator.
                    if getattr(node.parent, "type", "") == "parameters" or _inside(spot, self.excluded):
                        continue
                    called = _inside(spot, self.bodies)
                    within = ".".join(name for first, last, name in self.rooms if first <= spot < last)
                    yield Mutant(self.source.path, name, occurrence, spot, self.around(spot), called, within)


def _asks_for_kernels(test: ast.expr) -> bool:
    """Whether a condition holds on a GPU alone: `kernels.serve(...)`, or that and more."""
    first = test.values[0] if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else test
    return isinstance(first, ast.Call) and ast.unparse(first.func).startswith("kernels.serve")


def _numbers(function: ast.AST) -> list[ast.AST]:
    """The numbers that stand in a function."""
    return [one for one in ast.walk(function) if isinstance(one, ast.Constant) and isinstance(one.value, int | float)]


def _last_word(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).split(".")[-1]


def _names(node: ast.Assign) -> set[str]:
    """What an assignment gives a value."""
    return {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}


def _inside(spot: Spot, spans: Sequence[tuple[Spot, Spot]]) -> bool:
    return any(first <= spot < last for first, last in spans)


def sample(sources: Sequence[Source], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, spread over the files by their lines; no two at one place of a file.

    Within a file places are drawn first and an operator for each afterwards, for some have one and some eleven.
    What does not compile, or not without a warning, is no mutant.
    """
    chosen: list[Mutant] = []
    total, before = sum(one.size for one in sources), 0
    for source in sources:
        before += source.size
        due = count * before // total - len(chosen)  # what a small file could not give, the next ones do
        draw = random.Random(f"{seed}:{source.path}")
        places: dict[Spot, list[Mutant]] = defaultdict(list)
        for mutant in source.mutants():
            places[mutant.spot].append(mutant)
        picked = (draw.choice(places[spot]) for spot in draw.sample(sorted(places), len(places)))
        clean = (one for one in picked if _compiles(source.mutate(one)))
        chosen += sorted(itertools.islice(clean, due), key=lambda one: one.spot)
    return chosen


def _compiles(text: str) -> bool:
    """Without a warning: pytest makes errors of them, so that any import would count as a kill."""
    try:
        with warnings.catch_warnings(action="error"):
            compile(text, "mutant", "exec")
    except (SyntaxError, SyntaxWarning):
        return False
    return True
