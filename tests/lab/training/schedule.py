"""When a stage ends, and what the learning rate is: functions of progress, steps and accuracy, and of no clock."""

import math
from collections.abc import Mapping, Sequence

from attrs import asdict, define, field, frozen

from .plan import Family, Stage

PATIENCE = 2.0
"""How many times its share of what is left a stage may take while its answers are not right."""

LEAST, MOST = 0.5, 0.6
"""A stage takes this part of its share at least, and this part of what is left of the run at most."""

ENOUGH = 256
"""Answer tokens of a family below which its accuracy says nothing."""


@frozen
class Settings:
    """The settings of a run.

    Attributes:
        seed: Chooses weights and batches.
        peak: The highest learning rate.
        floor: The learning rate at the end, as a part of the highest.
        hold: The progress at which the learning rate starts to fall.
        warmup: Steps of rising learning rate.
        decay: Weight decay of matrices.
        text_weight: The weight of the loss on text; that on answers has 1.
        counted: The most tokens of a batch that the loss looks at: its answers, and text drawn anew each step.
        check: Steps between two looks at the accuracy.
        average: The part of the run over which the weights are averaged at its end.
    """

    seed: int = 0
    peak: float = 2e-3
    floor: float = 0.01
    hold: float = 0.5
    warmup: int = 400
    decay: float = 0.1
    text_weight: float = 0.3
    counted: int = 16_384
    check: int = 100
    average: float = 0.02


@frozen
class Change:
    """The end of a stage: when, why (``answers`` or ``limit``), and the accuracy of the last look by family."""

    stage: int
    step: int
    progress: float
    why: str
    accuracy: Mapping[str, float]


@define
class Schedule:
    """The course of a run.

    A stage ends when its answers are right, though not before `LEAST` of its share, and at the latest after `PATIENCE`
    times its share of what is left; stages that follow share what it leaves or takes. So a seed that learns to look
    things up late has shorter long stages instead of none that work.

    Attributes:
        stages: The stages.
        stage: The index of the present one.
        began: The progress at which it began.
        changes: The ends of earlier ones.
    """

    stages: Sequence[Stage]
    stage: int = 0
    began: float = 0.0
    changes: list[Change] = field(factory=list)

    @property
    def now(self) -> Stage:
        """The present stage."""
        return self.stages[self.stage]

    def bounds(self) -> tuple[float, float]:
        """The progress before which the present stage does not end, and at which it ends whatever is learned."""
        if self.stage == len(self.stages) - 1:
            return 1.0, 1.0
        left = 1 - self.began
        fair = self.now.share / sum(stage.share for stage in self.stages[self.stage :])
        return self.began + left * LEAST * fair, self.began + left * min(PATIENCE * fair, MOST)

    def advance(self, step: int, progress: float, accuracy: Mapping[str, float] | None) -> bool:
        """Go on to the next stage if it is time to.

        Args:
            step: Steps done.
            progress: From 0 to 1.
            accuracy: Of each family since the last look, at the stage's own length; None between two looks.
        """
        least, limit = self.bounds()
        learned = accuracy is not None and self._learned(accuracy)
        if self.stage == len(self.stages) - 1 or not (progress >= limit or (learned and progress >= least)):
            return False
        why = "answers" if learned else "limit"
        self.changes.append(Change(self.stage, step, progress, why, dict(accuracy or {})))
        self.stage, self.began = self.stage + 1, progress
        return True

    def rate(self, settings: Settings, step: int, progress: float) -> float:
        """The learning rate: risen over the first steps, as high as the stage allows, and falling to the end."""
        fall = max(0.0, progress - settings.hold) / (1 - settings.hold)
        falling = settings.floor + (1 - settings.floor) * (1 + math.cos(math.pi * min(fall, 1.0))) / 2
        return settings.peak * min((step + 1) / settings.warmup, self.now.rate, falling)

    def state(self) -> dict[str, object]:
        """What a resumed run needs, as plain data."""
        return {"stage": self.stage, "began": self.began, "changes": [asdict(change) for change in self.changes]}

    def enough(self, accuracy: Mapping[str, float]) -> bool:
        """Whether every family that decides about the present stage had enough answers for an accuracy."""
        return all(family in accuracy for family in self._gated)

    @property
    def _gated(self) -> list[Family]:
        return [family for family in self.now.gated if self.now.families.get(family)]

    def _learned(self, accuracy: Mapping[str, float]) -> bool:
        return all(accuracy.get(family, 0.0) >= self.now.gate for family in self._gated)
