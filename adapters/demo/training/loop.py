"""The training loop: by the clock, with float32 master weights."""

import logging
import math
import random
import time
from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from .batches import Batches
from .network import Network
from .plan import TOKENS, Stage, draw_mix, stage_at
from .templates import ANSWER, TEXT

logger = logging.getLogger(__name__)


@frozen
class Settings:
    """The settings of a run.

    Attributes:
        seed: Chooses weights and batches.
        peak: The highest learning rate.
        floor: The learning rate at the end.
        hold: The progress at which the learning rate starts to fall.
        warmup: Steps of rising learning rate.
        decay: Weight decay of matrices.
        text_weight: The weight of the loss on text; that on answers has 1.
        tokens: Tokens of a batch, about.
    """

    seed: int = 0
    peak: float = 2e-3
    floor: float = 3e-5
    hold: float = 0.3
    warmup: int = 200
    decay: float = 0.1
    text_weight: float = 0.5
    tokens: int = TOKENS


@frozen
class Point:
    """A point of the loss curve."""

    step: int
    seconds: float
    length: int
    text_loss: float
    answer_loss: float
    answer_accuracy: float


class Masters:
    """AdamW on float32 copies of the weights that the network computes with."""

    def __init__(self, network: Network, dtype: torch.dtype, settings: Settings) -> None:
        copies = [p.detach().clone().float() for p in network.parameters()]
        network.to(dtype)
        self._weights = list(network.parameters())
        self._copies = copies
        groups = [
            {"params": [c for c in copies if c.dim() > 1], "weight_decay": settings.decay},
            {"params": [c for c in copies if c.dim() == 1], "weight_decay": 0.0},
        ]
        fused = copies[0].is_cuda
        self._adam = torch.optim.AdamW(groups, lr=settings.peak, betas=(0.9, 0.95), fused=fused)
        for copy in copies:
            copy.grad = torch.zeros_like(copy)

    def step(self, rate: float) -> None:
        """Apply the gradients of the network, clipped to norm 1, and clear them."""
        for group in self._adam.param_groups:
            group["lr"] = rate
        for copy, weight in zip(self._copies, self._weights, strict=True):
            assert copy.grad is not None
            assert weight.grad is not None
            copy.grad.copy_(weight.grad)
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._copies, 1.0)
        self._adam.step()
        with torch.no_grad():
            for copy, weight in zip(self._copies, self._weights, strict=True):
                weight.copy_(copy)


def train(
    network: Network,
    batches: Batches,
    stages: tuple[Stage, ...],
    settings: Settings,
    deadline: float,
    save: Callable[[], None],
) -> tuple[list[Point], int]:
    """Train until the deadline (of ``time.monotonic``).

    Args:
        network: The network, in float32; it ends in bfloat16 on a GPU.
        batches: Where batches come from.
        stages: The stages of the run.
        settings: The settings of the run.
        deadline: When to stop.
        save: Called at the end of each stage.

    Returns:
        The loss curve and the number of steps.
    """
    cuda = next(network.parameters()).is_cuda
    masters = Masters(network, torch.bfloat16 if cuda else torch.float32, settings)
    rng = random.Random(settings.seed)
    began = time.monotonic()
    curve: list[Point] = []
    step, stage, logged = 0, 0, -math.inf
    while (now := time.monotonic()) < deadline:
        progress = (now - began) / (deadline - began)
        if (current := stage_at(stages, progress)) != stage:
            save()
            logger.info("stage %d of %d", current + 1, len(stages))
            stage = current
        length = stages[stage].draw(rng)
        rows = max(1, round(settings.tokens / length))
        ids, kinds = batches.make(draw_mix(rng, length), rows, length)
        text, answer, accuracy = _losses(network, ids, kinds)
        (settings.text_weight * text + answer).backward()
        masters.step(_rate(settings, step, progress))
        step += 1
        if step % 8 == 0 and cuda:
            torch.cuda.synchronize()
        if now - logged > 4:
            logged = now
            values = (text.item(), answer.item(), accuracy.item())
            curve.append(Point(step, now - began, length, *values))
            logger.info(
                "step %d, %.0f s, length %d: text %.3f, answers %.4f, right %.4f",
                *(step, now - began, length, *values),
            )
    return curve, step


def _rate(settings: Settings, step: int, progress: float) -> float:
    if step < settings.warmup:
        return settings.peak * (step + 1) / settings.warmup
    fall = max(0.0, progress - settings.hold) / (1 - settings.hold)
    return settings.floor + (settings.peak - settings.floor) * (1 + math.cos(math.pi * fall)) / 2


def _losses(network: Network, ids: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss on text, the loss on answers, and the accuracy on answers."""
    logits = network(ids)[:, :-1].flatten(0, 1)
    target, kind = ids[:, 1:].flatten(), kinds[:, 1:].flatten()
    each = functional.cross_entropy(logits.float(), target, reduction="none")
    is_text, is_answer = (kind == TEXT).float(), (kind == ANSWER).float()
    right = ((logits.detach().argmax(-1) == target) * is_answer).sum()
    answers = is_answer.sum().clamp(min=1)
    text = (each * is_text).sum() / is_text.sum().clamp(min=1)
    return text, (each * is_answer).sum() / answers, right / answers
