"""Parameters of acceptance rules, as a person writes them.

Knows: the keys, defaults and ranges of each way a threshold may move, and the values they become.
Refuses to know: what the rules do with them, and the rest of the configuration.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cluster.config_values import StrictModel, Whole
from cluster.request import FixedThreshold, FollowingThreshold, ScheduledThreshold, Typical


class FixedConfig(StrictModel):
    """One threshold for the whole answer."""

    kind: Literal["fixed"] = Field(description="the same for the whole answer")
    value: float = Field(0.5, gt=0.0, le=1.0, description="least probability of a draft")

    def made(self) -> FixedThreshold:
        return FixedThreshold(self.value)


class ScheduledConfig(StrictModel):
    """Strict at first, looser as the answer grows."""

    kind: Literal["scheduled"] = Field(description="falls as the answer grows")
    start: float = Field(0.85, gt=0.0, le=1.0, description="least probability of a draft at first")
    drop: float = Field(0.02, ge=0.0, le=1.0, description="how much it falls each time")
    every: Whole = Field(100, ge=1, description="emitted tokens between two falls")
    floor: float = Field(0.5, gt=0.0, le=1.0, description="where it stops falling; at most start")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.floor > self.start:
            raise ValueError(f"floor={self.floor} must be at most start={self.start}")
        return self

    def made(self) -> ScheduledThreshold:
        return ScheduledThreshold(self.start, self.drop, self.every, self.floor)


class FollowingConfig(StrictModel):
    """Follows the request's own acceptance."""

    kind: Literal["following"] = Field(description="follows what the request accepted lately")
    start: float = Field(0.5, gt=0.0, le=1.0, description="least probability of a draft at first")
    acceptance: float = Field(0.7, gt=0.0, lt=1.0, description="share of drafts it tries to see accepted")
    step: float = Field(0.1, gt=0.0, le=1.0, description="change a round, times how far that round was off")
    floor: float = Field(0.1, gt=0.0, le=1.0, description="never below; at most start")
    ceiling: float = Field(0.95, gt=0.0, le=1.0, description="never above; at least start")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.floor <= self.start <= self.ceiling:
            raise ValueError(f"start={self.start} must lie from floor={self.floor} to ceiling={self.ceiling}")
        return self

    def made(self) -> FollowingThreshold:
        return FollowingThreshold(self.start, self.acceptance, self.step, self.floor, self.ceiling)


ThresholdConfig = Annotated[FixedConfig | ScheduledConfig | FollowingConfig, Field(discriminator="kind")]


class TypicalConfig(StrictModel):
    """A draft stands while its probability is at least min(epsilon, delta * exp(-entropy))."""

    epsilon: float = Field(0.09, gt=0.0, le=1.0, description="rule typical: the threshold where the target is sure")
    delta: float = Field(0.3, gt=0.0, le=1.0, description="rule typical: times exp(-entropy), where it is not")

    def made(self) -> Typical:
        return Typical(self.epsilon, self.delta)
