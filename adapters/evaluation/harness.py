"""Public tasks by lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), dense and sparse.

The harness makes the items, asks them through its own `HFLM`, and scores the answers; here the model is attached
meanwhile, and nothing else. Every contender gets the same items. Nothing of the harness is replaced, but what it prints
and its progress bars are dropped while it works, for the whole process, and it sets the global random seeds.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import torch
from attrs import define, evolve, field, frozen

from sparseprefill.errors import ParameterError, SparsePrefillError, extra, printed, told
from sparseprefill.profiles.table import Progress

from ..huggingface import attach
from ..session.session import check_flag
from .comparison import Listener
from .outcome import Contender
from .scores import Run, Score, Service

OFFLINE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_fwe")
"""RULER's tasks that make their items out of nothing: no data set, no network."""
LENGTHS = (4096,)
SHORTEST = 1024
"""Tokens from which RULER's templates leave room for a text; below, its generators look for one without an end."""
NEEDED = ("lm_eval", "accelerate", "nltk", "wonderwords", "scipy")
MAKERS = ("generate_samples", "sys_vartrack_w_noise_random", "sys_kwext", "sys_word_pair_random")
"""RULER's functions that make items; each takes `num_samples`."""
CHAINS = ("ruler_vt", "ruler", "longcxt")
"""The task whose generator may never end, and the groups it is in; see `_check_chains`."""
CHAINS_EXAMPLE = 500
"""Tokens of ruler_vt's example."""
_ESSAYS = "lm_eval.tasks.ruler.prepare_niah"
_USUAL = ("`pretrained` model kwarg is not of type", "Custom kwargs can be passed", "No aggregation function defined")
"""Beginnings of the harness's warnings that say nothing here."""
log = logging.getLogger(__name__)


@frozen(eq=False)
class Items:
    """A loaded task of the harness: every contender gets the items that it holds. length: None but for RULER."""

    name: str
    length: int | None
    task: Any

    @property
    def title(self) -> str:
        """Task and length."""
        return self.name if self.length is None else f"{self.name} {self.length:,}"


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str] = OFFLINE,
    lengths: Sequence[int] = LENGTHS,
    contenders: Sequence[Contender] = (),
    *,
    items: Sequence[Items] | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    stock: bool = True,
    chat_template: bool = False,
    listener: Listener | None = None,
) -> Iterator[Run]:
    """Every contender on every task and length, the stock model first; each run is given as soon as it is there.

    model, tokenizer: of transformers, on the model's device. tasks: names of the harness, where groups and tags stand
    for their tasks, or paths of YAML files of its kind. lengths: tokens of RULER's items, answer included; other tasks
    are asked once. items: of `loaded`, in place of tasks and lengths. limit: the first so many items of each task and
    length (RULER has 500). stock: whether the model runs without a method, too. chat_template: put prompts through the
    tokenizer's template. Gates are off, so that a method runs however short the prompt is.

    Whoever stops listening keeps what came so far. An error of one run is in the run, and the others go on.

    Raises ImportError without the extra, ParameterError for wrong arguments and tasks that cannot be loaded, and what
    `attach` raises for a contender that the model cannot run.
    """
    for contender in contenders:  # what the model cannot run is refused before anything is asked
        if contender.pipeline is not None:
            attach(model, contender.pipeline, gate=None, tail=contender.dense_tail).detach()
    _check_counts(limit=limit, batch_size=batch_size)
    check_flag("stock", stock)
    check_flag("chat_template", chat_template)
    made = loaded(model, tokenizer, tasks, lengths, limit, listener) if items is None else items
    check_tokenizer(tokenizer, chat_template=chat_template)
    asker = _Asker.of(model, tokenizer, limit, batch_size, chat_template)
    for one in made:
        dense: Run | None = None
        for contender in [*([Contender("stock")] if stock else []), *contenders]:
            with _heard(listener, f"{contender.label}, {one.title}") as progress:
                attached = nullcontext() if contender.pipeline is None else attach(
                    model, contender.pipeline, gate=None, measure=True, verify=False, tail=contender.dense_tail,
                    recall_every=0,
                )  # fmt: skip
                run = asker.run(one, contender, attached, progress)
            if contender.pipeline is None:
                dense = run
            yield evolve(run, scores=tuple(score.beside(None if run is dense else dense) for score in run.scores))


def check_tokenizer(tokenizer: Any, *, chat_template: bool = False) -> None:
    """ParameterError where the harness cannot work with a tokenizer."""
    if chat_template and not getattr(tokenizer, "chat_template", None):
        raise ParameterError("chat_template is True, but the tokenizer has no chat template: pass False")
    if getattr(tokenizer, "eos_token", None) is None:
        raise ParameterError(
            "tokenizer.eos_token is None, and the harness ends answers at it: set tokenizer.eos_token, or eos_token in "
            "tokenizer_config.json"
        )


def check_names(tasks: Sequence[str]) -> None:
    """ImportError without the extra, ParameterError, with the nearest names, for a task that the harness lacks."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        raise ImportError(f"tasks need {', '.join(lacking)}: {extra('eval')}")
    # Not below `_quiet`: they make log handlers that write to what standard error is then.
    for name in ("lm_eval.evaluator", "lm_eval.models.huggingface"):
        import_module(name)
    if not tasks:
        raise ParameterError(f"tasks is empty: pass names of the harness, such as {', '.join(OFFLINE)}")
    with _quiet():
        others = [name for name in tasks if name not in _ruler().all_tasks and not _is_file(name)]
        known = _all_tasks().all_tasks if others else []
    for name in others:
        if name not in known:
            close = get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
            raise ParameterError(
                f"tasks: the harness has no task, group or tag {name!r}{hint} Without a network run "
                f"{', '.join(OFFLINE)}"
            )


def loaded(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str] = OFFLINE,
    lengths: Sequence[int] = LENGTHS,
    limit: int | None = None,
    listener: Listener | None = None,
) -> list[Items]:
    """The tasks' items, by task and then by length, made with the tokenizer; arguments and errors as of `evaluate`.

    model: it, or what has its `config`.
    """
    check_names(tasks)
    _check_counts(limit=limit)
    from ..huggingface.inspection import trained_length

    most = trained_length(model)
    for length in lengths:
        if not isinstance(length, int) or isinstance(length, bool) or length < SHORTEST:
            raise ParameterError(f"lengths holds {printed(length)}: pass integers >= {SHORTEST}")
        if most is not None and length > most:
            raise ParameterError(f"lengths holds {length}: the model reads at most {most} tokens, pass no more")
    with _quiet():
        sized = set(_ruler().all_tasks)
    if not lengths and sized.intersection(tasks):
        raise ParameterError(f"lengths is empty: pass tokens of RULER's items, such as {LENGTHS[0]}")
    made: list[Items] = []
    # RULER's tasks load a tokenizer by name, remote code included: they get this one, as it is, from a folder.
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for name in dict.fromkeys(tasks):
            with _heard(listener, name) as progress:
                progress("making items", 0, 1)
                for each in sorted(set(lengths)) if name in sized else (None,):
                    made += _load(folder, name, each, limit)
    return made


def _load(folder: str, name: str, length: int | None, limit: int | None) -> list[Items]:
    """One task, or those of a group, at one length. folder: of the tokenizer."""
    try:
        with _quiet(), nullcontext() if length is None else _sentences(name):
            if name in CHAINS and length is not None:
                _check_chains(folder, length)
            _seed()
            sized = {} if length is None else {"tokenizer": folder, "max_seq_lengths": [length]}
            manager = _ruler(**sized) if sized or _is_file(name) else _all_tasks()
            with _at_most(limit, manager, name):
                tasks = manager.load([name])["tasks"]
    except SparsePrefillError:
        raise
    except ImportError as error:
        raise ParameterError(f"the task {name} lacks a package: {_line(error)}") from error
    except Exception as error:  # of a task's own program: of a data set, of a network that is not there
        where = "" if length is None else f" at {length:,} tokens"
        raise ParameterError(
            f"the task {name} cannot be loaded{where}: {type(error).__name__}: {_line(error)}. If its data comes "
            f"from a network that is out of reach: {', '.join(OFFLINE)} need none"
        ) from error
    made = [Items(task, length, tasks[task]) for task in tasks]
    for items in made:
        if length is not None and not all(items.task.eval_docs["outputs"]):
            raise ParameterError(
                f"{items.name} does not fit its text into {length:,} tokens of this tokenizer: pass a longer "
                f"length, or leave the task out"
            )
    return made


@define(eq=False)
class _Asker:
    """Asks a model the items of a task, through the harness."""

    lm: Any
    limit: int | None
    chat_template: bool
    _tokens: dict[Items, float] = field(factory=dict, init=False)

    @classmethod
    def of(cls, model: Any, tokenizer: Any, limit: int | None, batch_size: int, chat_template: bool) -> _Asker:
        with _quiet():
            host: Any = import_module("lm_eval.models.huggingface")
            try:
                # It sets a padding token where there is none: on one of its own.
                lm = host.HFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size)
            except AssertionError as error:
                raise ParameterError(
                    f"tokenizer is a {type(tokenizer).__name__}: pass one of transformers, which the harness takes"
                ) from error
        return cls(lm, limit, chat_template)

    def run(self, items: Items, contender: Contender, attached: AbstractContextManager[Any], progress: Progress) -> Run:
        """The harness's answers for one contender, or the error that stopped it."""
        try:
            with attached as handle, _quiet() as warnings:
                began = time.perf_counter()
                found = self._ask(items, progress)
                seconds = time.perf_counter() - began
                tokens = self._mean_tokens(items)
        except (SparsePrefillError, torch.OutOfMemoryError) as error:
            return Run(items.name, items.length, contender, error=_line(error))
        except Exception as error:  # of the task's or the model's own program: the other runs are worth having
            log.debug("%s on %s", contender.label, items.title, exc_info=error)
            return Run(items.name, items.length, contender, error=f"{type(error).__name__}: {_line(error)}")
        count = found["n-samples"][items.name]["effective"]
        service = None if handle is None else Service.of(handle.report())
        scores = tuple(_scores(found, items))
        return Run(items.name, items.length, contender, count, tokens, seconds, scores, service, dict(warnings))

    def _ask(self, items: Items, progress: Progress) -> Any:
        from lm_eval.defaults import DEFAULT_OTHER_SEED
        from lm_eval.evaluator import evaluate

        task, count = items.task, len(items.task.eval_docs)
        # As the harness's `simple_evaluate` does, before each contender: examples in the prompt are drawn anew.
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
        _seed()
        self.lm.set_cache_hook(_Counted(progress, count if self.limit is None else min(count, self.limit)))
        return evaluate(
            lm=self.lm,
            task_dict={"tasks": {items.name: task}},
            limit=self.limit,
            apply_chat_template=self.chat_template,
            fewshot_as_multiturn=self.chat_template,
        )

    def _mean_tokens(self, items: Items) -> float:
        if items not in self._tokens:
            prompts = {instance.doc_id: instance.args[0] for instance in items.task.instances}
            self._tokens = {items: fmean(len(self.lm.tok_encode(prompt)) for prompt in prompts.values())}
        return self._tokens[items]


@define(eq=False)
class _Counted:
    """In the place of the harness's cache, which hears of every answer; keeps none."""

    progress: Progress
    of: int
    done: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.progress("items", 0, self.of)

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        """One request is answered; a task of several requests an item counts to its items."""
        self.done += 1
        self.progress("items", min(self.done, self.of), self.of)


def _scores(found: Any, items: Items) -> Iterator[Score]:
    results, higher = found["results"][items.name], found["higher_is_better"][items.name]
    for key, value in results.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, Real):
            continue
        if items.length is not None and metric != str(items.length):
            continue  # RULER gives a -1 for every length that was not asked
        values = [one.get(metric) for one in found["samples"][items.name] if one["filter"] == kind]
        numbers = tuple(float(one) for one in values if isinstance(one, Real))
        stderr = results.get(f"{metric}_stderr,{kind}")
        yield Score.of(
            metric if kind == "none" else key,
            float(value),
            float(stderr) if isinstance(stderr, Real) else None,
            bool(higher.get(metric, True)),
            numbers if len(numbers) == len(values) else (),
        )


def _ruler(**metadata: Any) -> Any:
    """The harness's index of RULER's folder; metadata is for the tasks it loads."""
    import lm_eval.tasks

    folder = Path(lm_eval.tasks.__file__).parent / "ruler"
    return lm_eval.tasks.TaskManager(include_defaults=False, include_path=folder, metadata=metadata)


@cache
def _all_tasks() -> Any:
    """The harness's index of all its tasks, which takes about ten seconds to read."""
    import lm_eval.tasks

    return lm_eval.tasks.TaskManager()


@contextmanager
def _at_most(limit: int | None, manager: Any, name: str) -> Iterator[None]:
    """Lets a task of RULER make so many items, not 500: minutes at long lengths.

    It has no option for it, so the number goes in on the way. Items are drawn one after the other: they are the first
    ones of the 500.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = manager.task_index.get(name)
    path = None if entry is None else entry.yaml_path
    if limit is None or path is None:
        yield
        return
    source = load_yaml(path, resolve_func=True, recursive=True).get("custom_dataset")
    scope = getattr(source, "__globals__", {})
    makers = {maker: scope[maker] for maker in MAKERS if maker in scope}

    def fewer(make: Any) -> Any:
        return lambda *given, **named: make(
            *given, **{**named, "num_samples": min(limit, named.get("num_samples", 500))}
        )

    scope.update({maker: fewer(make) for maker, make in makers.items()})
    try:
        yield
    finally:
        scope.update(makers)


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ParameterError(f"{name} is {printed(value)}: pass an integer >= 1")


def _check_chains(tokenizer: str, length: int) -> None:
    """ParameterError where the texts of ruler_vt may not fit.

    Its generator shortens a text that is too long down to ten noises, and its example of 500 tokens down to five; where
    that is too long, too, it tries the same again without an end, and not even Ctrl-C gets through to it.
    """
    from lm_eval.tasks.ruler import vt_utils
    from lm_eval.tasks.ruler.common_utils import get_tokenizer

    encode, answer = get_tokenizer(tokenizer), 30

    def longest(noises: int, example: bool) -> int:
        lengths: list[int] = []
        while len(lengths) < 200:
            with suppress(IndexError):  # it draws names of variables, and fails where two are the same
                text, chain = vt_utils.generate_input_output(noises, 1, 4, is_icl=example)
                lengths.append(len(encode(f"{text} {chain}").input_ids))
        return max(lengths)

    if longest(5, True) + answer > CHAINS_EXAMPLE:
        raise ParameterError(
            f"ruler_vt does not fit this tokenizer: its example of {CHAINS_EXAMPLE} tokens takes more. Leave it out"
        )
    least = CHAINS_EXAMPLE + longest(10, False) + answer
    if length < least:
        raise ParameterError(
            f"ruler_vt needs {least:,} tokens with this tokenizer, not {length:,}: pass a longer length"
        )


def _seed() -> None:
    """The seeds of the harness's own runs, so that the items are those of its own runs."""
    import numpy
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
    from lm_eval.utils import set_torch_seed

    random.seed(DEFAULT_RANDOM_SEED)
    numpy.random.seed(DEFAULT_OTHER_SEED)
    set_torch_seed(DEFAULT_OTHER_SEED)


@contextmanager
def _sentences(name: str) -> Iterator[None]:
    """Lets RULER's module be imported without a network.

    It downloads nltk's sentence splitter when it is imported; only tasks on essays use it, and these are downloaded,
    too. For the others an empty folder stands in for it while the task loads; a splitter that is there goes before.
    """
    if name not in (*OFFLINE, "ruler_cwe"):
        if _ESSAYS in sys.modules:
            sys.modules[_ESSAYS].download_nltk_resources()
        yield
        return
    import nltk

    with TemporaryDirectory() as folder:
        Path(folder, "tokenizers", "punkt_tab").mkdir(parents=True)
        nltk.data.path.append(folder)
        try:
            yield
        finally:
            nltk.data.path.remove(folder)


@cache
def _nowhere() -> TextIO:
    """Takes what is printed; never closed, since a library that is imported meanwhile may keep it."""
    return Path(os.devnull).open("w", encoding="utf-8")


class _Warned(logging.Handler):
    """Counts what the harness warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Numbers become N, so that the same warning about every prompt is one."""
        text = record.getMessage()
        if not any(usual in text for usual in _USUAL):
            self.found[re.sub(r"\d+", "N", " ".join(text.split()))] += 1


@contextmanager
def _quiet() -> Iterator[Counter[str]]:
    """The harness prints and shows bars of its own: they are dropped. Gives what it warned of, counted."""
    handler, logger = _Warned(), logging.getLogger("lm_eval")
    logger.addHandler(handler)
    try:
        nowhere = _nowhere()
        with redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield handler.found
    finally:
        logger.removeHandler(handler)


@contextmanager
def _heard(listener: Listener | None, name: str) -> Iterator[Progress]:
    if listener is None:
        yield lambda what, done, of: None
    else:
        with listener.contender(name) as progress:
            yield progress


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).is_file()


def _line(error: BaseException) -> str:
    return next((line.strip() for line in told(error).splitlines() if line.strip()), "no message")
