"""Mutation testing: `python -m mutation` (from tests/) changes the code in small ways and counts what the tests notice.

Cosmic Ray makes the mutants; here is what it leaves to others: a seeded sample, joined by what survived earlier runs,
the tests that touch each mutant, and many at a time.
"""

# ruff: noqa: T201 - a command prints

from __future__ import annotations

import argparse
import difflib
import os
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from mutation import survivors
from mutation.checkout import ROOT, lay_out
from mutation.mutants import Mutant, Source, sample
from mutation.survivors import Survivor
from mutation.touch import measure
from mutation.trial import Trial, false_killers, preload, tried

FILES = (
    "core/sparseprefill/mask/*.py",
    "core/sparseprefill/executors/*.py",
    "core/sparseprefill/refiners/*.py",
    "plugins/flashprefill/threshold.py",
    "plugins/stem/decay.py",
    "plugins/stem/values.py",
    "core/sparseprefill/breakeven/*.py",
    "core/sparseprefill/config.py",
    "core/sparseprefill/pipeline.py",
    "core/sparseprefill/plan.py",
    "core/sparseprefill/route.py",
    "core/sparseprefill/stages.py",
    "core/sparseprefill/union.py",
    "adapters/session/*.py",
)
TESTS = (
    "tests/unit",
    "tests/property",
    "tests/refusals",
    "tests/adapters/test_session_*.py",
    "tests/adapters/test_prospects.py",
    "tests/adapters/test_recall_watch.py",
    "tests/adapters/test_huggingface_cross.py",
)
# On a CPU, with one thread a process and the examples of one fixed profile: a kill must repeat.
ENVIRONMENT = {
    "HYPOTHESIS_PROFILE": "mutants",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTEST_ADDOPTS": "",
}


ALIVE = ("survived", "no tests", "no verdict")


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mutation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mutants", type=int, default=300, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (%(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="at a time (one a core)")
    parser.add_argument("--threshold", type=float, default=95.0, help="percent to be killed (%(default)s)")
    parser.add_argument("--only", default="*", help="files whose path matches, such as '*/mask/*'")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="patterns of what pytest runs (%(default)s)")
    parser.add_argument("--map", type=Path, help="file that keeps which tests touch what: read if it is there")
    parser.add_argument("--list", type=Path, help="file for the report, besides the output")
    parser.add_argument(
        "--survivors", type=Path, default=survivors.FILE, help="what survived joins the next run by this file"
    )
    return parser.parse_args(arguments)


def diff(source: Source, mutant: Mutant) -> str:
    """What the mutant changes."""
    lines = source.text.split("\n"), source.mutate(mutant).split("\n")
    return "\n".join(difflib.unified_diff(*lines, f"a/{source.path}", f"b/{source.path}", n=1, lineterm=""))


def percent(trials: Sequence[Trial]) -> float:
    """Of mutants that were killed."""
    return 100 * (1 - sum(one.outcome in ALIVE for one in trials) / max(1, len(trials)))


def verdict(trials: Sequence[Trial], sources: dict[str, Source]) -> str:
    """The report: the survivors as diffs, then counts by file and by outcome."""
    counts = Counter(one.outcome for one in trials)
    alive = [one for one in trials if one.outcome in ALIVE]
    lines = [f"{one.mutant.name}: {one.outcome}, {one.tests} tests\n{diff(sources[one.mutant.path], one.mutant)}\n"
             for one in sorted(alive, key=lambda one: one.mutant.name)]  # fmt: skip
    lines += [f"{'of':>6} {'alive':>6}  file"]
    for path in sources:
        of = [one for one in trials if one.mutant.path == path]
        lines += [f"{len(of):6} {sum(one in alive for one in of):6}  {path}"] if of else []
    lines += [", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())]
    return "\n".join(lines)


def history(left: Sequence[Survivor], killed: Sequence[Survivor], gone: Sequence[Survivor]) -> str:
    """What became of earlier survivors."""
    lines = [f"{len(left) + len(killed) + len(gone)} survivors of earlier runs"]
    for what, some in (("killed now", killed), ("their code is gone", gone), ("not killed, or not tried", left)):
        lines += [f"  {what}: {len(some)}", *(f"    {one}" for one in some)]
    return "\n".join(lines)


def main() -> int:
    """0 where enough were killed."""
    chosen = options()
    os.environ.update(ENVIRONMENT)
    begun = time.monotonic()
    paths = sorted(
        path
        for pattern in FILES
        for file in ROOT.glob(pattern)
        if fnmatch(path := file.relative_to(ROOT).as_posix(), chosen.only)
    )
    tests = [str(found.relative_to(ROOT)) for pattern in chosen.tests for found in sorted(ROOT.glob(pattern))]
    sources = {path: Source.read(path) for path in paths}
    drawn = sample(list(sources.values()), chosen.mutants, chosen.seed)
    earlier = survivors.read(chosen.survivors)
    joined = survivors.found(earlier, sources)
    mutants = list(dict.fromkeys([*drawn, *(one for some in joined.values() for one in some)]))
    recorded = set(earlier)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        box = Path(name)
        lay_out(site := box / "site")
        if chosen.map is not None and chosen.map.exists():
            touch = pickle.loads(chosen.map.read_bytes())
        else:
            touch = measure(site, box, paths, tests, chosen.jobs)
            if chosen.map is not None:
                chosen.map.write_bytes(pickle.dumps(touch))
        print(f"{time.monotonic() - begun:.0f} s: {len(mutants)} mutants, {len(touch.tests)} tests", flush=True)
        preload()
        trials = []
        for trial in tried(mutants, sources, touch, site, box, chosen.jobs):
            trials.append(trial)
            if trial.outcome in ALIVE:  # at once, for a run that is ended early
                recorded.add(Survivor.of(trial.mutant, sources[trial.mutant.path]))
                survivors.write(recorded, chosen.survivors)
            by = f" by {trial.by}" if trial.by else ""
            print(f"{trial.mutant.name}: {trial.outcome}{by} ({trial.seconds:.0f} s)", flush=True)
        named = {trial.by for trial in trials if trial.by and trial.outcome.startswith("killed")}
        killers = sorted(named, key=lambda name: (touch.tests.get(name, 0.0), name))
        wrong = false_killers(killers, site, box) if killers else []
    alive = {trial.mutant for trial in trials if trial.outcome in ALIVE or trial.by in wrong}
    left, killed, gone = survivors.left(earlier, joined, alive)
    survivors.write(recorded - {*killed, *gone}, chosen.survivors)
    shares = percent([one for one in trials if one.mutant in drawn]), percent(trials)
    report = "\n".join(
        [
            verdict(trials, sources),
            history(left, killed, gone),
            f"killed: {shares[0]:.1f} % of the {len(drawn)} drawn, {shares[1]:.1f} % of all {len(trials)}",
        ]
    )
    print(f"\n{report}, in {time.monotonic() - begun:.0f} s with {chosen.jobs} processes (seed {chosen.seed})")
    if chosen.list is not None:
        chosen.list.write_text(report + "\n", encoding="utf-8")
    if wrong:
        print("These fail without a mutant too, so that what they killed counts for nothing:", *wrong, sep="\n")
    return int(bool(wrong) or min(shares) < chosen.threshold)


if __name__ == "__main__":
    sys.exit(main())
