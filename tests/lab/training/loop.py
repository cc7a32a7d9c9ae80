"""The training loop: float32 master weights, stages by what is learned, and a state that a later run goes on from."""

import logging
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import asdict, define, field, frozen
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from .batches import Batch, Batches
from .network import Network
from .plan import FAMILIES, Stage
from .schedule import ENOUGH, Change, Schedule, Settings
from .templates import ANSWER, IGNORED, TEXT

logger = logging.getLogger(__name__)

STATE = "training.pt"
"""The file that a later run goes on from."""

Kernel = Literal["cudnn", "flash"]
"""Which dense attention is tried first on a GPU."""

_ORDER: Mapping[Kernel, tuple[SDPBackend, ...]] = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    "flash": (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
}
_SAVE_EVERY, _LOG_EVERY = 120.0, 10.0
_SYNC_LENGTH = 16_384


@frozen
class Point:
    """A point of the curve: the losses of one batch, and each family's right answer tokens since the last look."""

    step: int
    seconds: float
    stage: int
    length: int
    rate: float
    text_loss: float
    answer_loss: float
    accuracy: Mapping[str, float]


@frozen
class Budget:
    """How long a run is.

    Attributes:
        seconds: Of training, over all runs.
        deadline: When this run stops (of ``time.monotonic``).
        steps: Steps over all runs; with them the clock decides nothing but where a run is cut.
    """

    seconds: float
    deadline: float
    steps: int | None = None

    def progress(self, step: int, seconds: float) -> float:
        """Progress from 0 to 1."""
        return min(1.0, step / self.steps if self.steps else seconds / self.seconds)


class Masters:
    """AdamW on float32 copies of the weights that the network computes with, and their average at the end."""

    def __init__(self, network: Network, dtype: torch.dtype, settings: Settings) -> None:
        self._copies = [p.detach().clone().float() for p in network.parameters()]
        network.to(dtype)
        self._weights: list[Tensor] = list(network.parameters())
        self._average: list[Tensor] = []
        groups = [
            {"params": [c for c in self._copies if c.dim() > 1], "weight_decay": settings.decay},
            {"params": [c for c in self._copies if c.dim() == 1], "weight_decay": 0.0},
        ]
        fused = self._copies[0].is_cuda
        self._adam = torch.optim.AdamW(groups, lr=settings.peak, betas=(0.9, 0.95), fused=fused)
        for copy in self._copies:
            copy.grad = torch.zeros_like(copy)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply the gradients of the network, clipped to norm 1, and clear them."""
        for group in self._adam.param_groups:
            group["lr"] = rate
        _copy([_grad(copy) for copy in self._copies], [_grad(weight) for weight in self._weights])
        for weight in self._weights:
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._copies, 1.0)
        self._adam.step()
        _copy(self._weights, self._copies)

    @torch.no_grad()
    def average(self, share: float) -> None:
        """Let the average come nearer to the weights by a share of the distance; the first call copies them."""
        if self._average:
            torch._foreach_lerp_(self._average, self._copies, share)  # pyright: ignore[reportPrivateImportUsage]
        else:
            self._average = [copy.clone() for copy in self._copies]

    @torch.no_grad()
    def use_average(self) -> None:
        """Give the network the average, where there is one."""
        if self._average:
            _copy(self._weights, self._average)

    def state(self) -> dict[str, Any]:
        """The state, to be saved."""
        return {"copies": self._copies, "adam": self._adam.state_dict(), "average": self._average}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state."""
        device = self._copies[0].device
        _copy(self._copies, [copy.to(device) for copy in state["copies"]])
        _copy(self._weights, self._copies)
        self._adam.load_state_dict(state["adam"])
        self._average = [copy.to(device) for copy in state["average"]]


class Counts:
    """Right answer tokens by family, summed on the device and read at each look."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, len(FAMILIES), device=device)

    def add(self, families: Sequence[str], right: Tensor, total: Tensor) -> None:
        """Add the rows of a batch."""
        index = torch.tensor([FAMILIES.index(family) for family in families]).to(right.device, non_blocking=True)
        self.sums.index_add_(1, index, torch.stack([right, total]))

    def read(self) -> dict[str, float]:
        """The accuracy of each family that had enough answers."""
        right, total = self.sums.tolist()
        return {name: r / t for name, r, t in zip(FAMILIES, right, total, strict=True) if t >= ENOUGH}

    def clear(self) -> None:
        """Start anew."""
        self.sums.zero_()


@define
class Course:
    """What a run has done so far.

    Attributes:
        step: Steps.
        seconds: Seconds of training.
        curve: The points of the curve.
    """

    schedule: Schedule
    step: int = 0
    seconds: float = 0.0
    curve: list[Point] = field(factory=list)


class Trainer:
    """Trains a network, in one run or several.

    Everything random comes from the seed. With a budget of steps the clock decides nothing; with one of seconds it
    decides when a stage reaches its limit, how fast the learning rate falls and where the run ends.
    """

    def __init__(
        self, network: Network, batches: Batches, stages: Sequence[Stage], settings: Settings, kernel: Kernel = "cudnn"
    ) -> None:
        """Prepare training; the network ends in bfloat16 on a GPU."""
        self._network, self._batches, self._settings = network, batches, settings
        self._kernel: Kernel = kernel
        self._device = next(network.parameters()).device
        cuda = self._device.type == "cuda"
        self._masters = Masters(network, torch.bfloat16 if cuda else torch.float32, settings)
        self._rng = random.Random(settings.seed)
        self._counts = Counts(self._device)
        self.course = Course(Schedule(stages))

    def train(self, budget: Budget, folder: Path) -> bool:
        """Train until the budget is used up or the run's deadline comes.

        Args:
            budget: How long.
            folder: Where the state goes, at intervals and at the end.

        Returns:
            Whether the budget is used up. The network then has the averaged weights.
        """
        course, settings = self.course, self._settings
        before, began = course.seconds, time.monotonic()
        saved, logged = began, -math.inf
        progress = budget.progress(course.step, course.seconds)
        while progress < 1 and (now := time.monotonic()) < budget.deadline:
            stage = course.schedule.now
            length = stage.draw(self._rng)
            rate = course.schedule.rate(settings, course.step, progress)
            text, answer = self._step(stage, length, rate)
            course.step += 1
            if self._device.type == "cuda" and (length >= _SYNC_LENGTH or course.step % 8 == 0):
                torch.cuda.synchronize()
            course.seconds = before + time.monotonic() - began
            last, progress = progress, budget.progress(course.step, course.seconds)
            if progress > 1 - 4 * settings.average:
                self._masters.average(1 - math.exp((last - progress) / settings.average))
            look = course.step % settings.check == 0
            accuracy = self._counts.read() if look or now - logged > _LOG_EVERY else None
            if accuracy is not None:
                logged = now
                values = (rate, text.item(), answer.item())
                self._log(Point(course.step, course.seconds, course.schedule.stage, length, *values, accuracy))
            if look and course.schedule.enough(accuracy or {}):
                self._counts.clear()
            if course.schedule.advance(course.step, progress, accuracy if look else None):
                self._counts.clear()
                change = course.schedule.changes[-1]
                logger.info("stage %d ended at %.3f by its %s", change.stage, change.progress, change.why)
            if now - saved > _SAVE_EVERY:
                saved = now
                self.save(folder)
        if progress >= 1:
            self._masters.use_average()
        self.save(folder)
        return progress >= 1

    def save(self, folder: Path) -> None:
        """Write the state, whole or not at all."""
        course = self.course
        state = {
            "settings": asdict(self._settings),
            "masters": self._masters.state(),
            "schedule": course.schedule.state(),
            "step": course.step,
            "seconds": course.seconds,
            "curve": [asdict(point) for point in course.curve],
            "random": self._rng.getstate(),
            "generator": self._batches.generator.get_state(),
            "counts": self._counts.sums,
        }
        path = folder / STATE
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)

    def load(self, folder: Path) -> None:
        """Go on from a saved state.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It belongs to a run with other settings.
        """
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        if state["settings"] != asdict(self._settings):
            changed = [name for name, value in asdict(self._settings).items() if state["settings"].get(name) != value]
            raise ValueError(f"{folder / STATE} comes from a run with other settings: {', '.join(changed)}")
        self._masters.load(state["masters"])
        schedule = state["schedule"]
        changes = [Change(**change) for change in schedule["changes"]]
        stages = self.course.schedule.stages
        self.course = Course(
            Schedule(stages, schedule["stage"], schedule["began"], changes),
            state["step"],
            state["seconds"],
            [Point(**point) for point in state["curve"]],
        )
        kind, numbers, gauss = state["random"]
        self._rng.setstate((kind, tuple(numbers), gauss))
        self._batches.generator.set_state(state["generator"])
        self._counts.sums.copy_(state["counts"])

    def _step(self, stage: Stage, length: int, rate: float) -> tuple[Tensor, Tensor]:
        rows = max(1, round(stage.tokens / length))
        batch = self._batches.make(stage.draw_families(self._rng, rows), self._rng, rows, length)
        with _attention(self._kernel, self._device):
            losses = self._losses(batch)
            (self._settings.text_weight * losses.text + losses.answer).backward()
        self._masters.step(rate)
        if length == stage.length:
            self._counts.add(batch.families, losses.right, losses.total)
        return losses.text.detach(), losses.answer.detach()

    def _losses(self, batch: Batch) -> "_Losses":
        hidden = self._network.model(batch.ids)[:, :-1].flatten(0, 1)
        rows, length = batch.ids.shape
        target, kind = batch.ids[:, 1:].flatten(), batch.kinds[:, 1:].flatten()
        if self._settings.counted < len(kind):
            # All answers first, then text drawn anew: no logits are computed for the rest.
            rank = torch.rand(len(kind), generator=self._batches.generator, device=kind.device)
            rank = rank + 2.0 * (kind == ANSWER) - 2.0 * (kind == IGNORED)
            index = rank.topk(self._settings.counted, sorted=False).indices
            target, kind = target[index], kind[index]
            hidden = hidden.index_select(0, index)
        else:
            index = torch.arange(len(kind), device=kind.device)
        logits = self._network.logits(hidden).float()
        each = functional.cross_entropy(logits, target, reduction="none")
        row, is_text, is_answer = index // (length - 1), (kind == TEXT).float(), (kind == ANSWER).float()
        nothing = torch.zeros(rows, device=kind.device)
        total = nothing.index_add(0, row, is_answer)
        right = nothing.index_add(0, row, is_answer * (logits.detach().argmax(-1) == target))
        # A row that asks once has few answer tokens beside one that asks a hundred times: it counts for more each.
        weight = is_answer * total.clamp(min=1).rsqrt()[row]
        text = (each * is_text).sum() / is_text.sum().clamp(min=1)
        answer = (each * weight).sum() / weight.sum().clamp(min=1e-6)
        return _Losses(text, answer, right, total)

    def _log(self, point: Point) -> None:
        self.course.curve.append(point)
        right = ", ".join(f"{name} {value:.3f}" for name, value in point.accuracy.items())
        logger.info(
            "step %d, %.0f s, stage %d, length %d, rate %.1e: text %.3f, answers %.4f; right: %s",
            *(point.step, point.seconds, point.stage, point.length, point.rate),
            *(point.text_loss, point.answer_loss, right or "too few answers"),
        )


@frozen(eq=False)
class _Losses:
    text: Tensor
    answer: Tensor
    right: Tensor
    total: Tensor


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    """Copy many tensors at once, whatever their types."""
    torch._foreach_copy_(to, source)  # pyright: ignore[reportPrivateImportUsage]


def _grad(weight: Tensor) -> Tensor:
    if weight.grad is None:
        raise RuntimeError("a weight has no gradient: call backward() before the step")
    return weight.grad


@contextmanager
def _attention(kernel: Kernel, device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel(list(_ORDER[kernel]), set_priority=True):
        yield
