"""The typed configuration: what `applications[].args` of ray_config.yaml may say.

Knows: every key, its default, its variants and which of them may change while running.
Refuses to know: how any value is used. Values that depend on the machine ("auto") are resolved
once by whoever builds the part, and printed.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.messages import Knobs
from cluster.request import RuleName


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetConfig(_Strict):
    """The model whose answers are served."""

    model: str = Field("smollm2-135m", description="directory of safetensors, or an alias")
    tokenizer: str | None = Field(None, description="directory of another tokenizer; default: the model's own")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_context: int | None = Field(None, ge=16, description="tokens; default: what the model was trained for")
    threads: int | None = Field(None, ge=1, description="CPU threads; default: the cores of this process")


class NgramDraft(_Strict):
    """Copy what followed the last occurrence of the newest tokens in the same sequence."""

    kind: Literal["ngram"]
    max_match: int = Field(4, ge=1, le=16)
    min_match: int = Field(2, ge=1, le=16)


class ModelDraft(_Strict):
    """A smaller causal language model with the target's vocabulary."""

    kind: Literal["model"]
    model: str = Field("target", description='directory or alias; "target" starts from the target\'s own weights')
    layers: tuple[int, ...] | None = Field(None, description="keep only these layers, in this order")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


DraftConfig = Annotated[NgramDraft | ModelDraft, Field(discriminator="kind")]


class CacheConfig(_Strict):
    """Where keys and values of attention live."""

    block_tokens: int = Field(32, ge=1, le=256, description="tokens a block")
    memory: str = Field("auto", description='bytes for all blocks, such as "512MiB"; auto: a quarter of what is free')
    blocks: int | None = Field(None, ge=2, description="number of blocks; overrides memory")
    prefix: bool = Field(True, description="reuse blocks of equal prefixes within a salt")


class SchedulerConfig(_Strict):
    """How many requests are in flight and how many may wait."""

    max_sequences: int = Field(64, ge=1, le=4096)
    max_waiting: int = Field(256, ge=0)


class KnobConfig(_Strict):
    """What may change while running: give it under the deployment's `user_config`."""

    k: int = Field(5, ge=0, le=64, description="most draft tokens a row; 0 switches speculation off")
    rule: RuleName = "coupled"
    token_budget: int = Field(512, ge=16, description="most tokens a step computes")

    def knobs(self) -> Knobs:
        return Knobs(k=self.k, rule=self.rule, token_budget=self.token_budget)


class EngineConfig(_Strict):
    """One engine: a target, its drafts, its cache, its scheduler."""

    target: TargetConfig = TargetConfig()
    drafts: tuple[DraftConfig, ...] = (NgramDraft(kind="ngram"),)
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    knobs: KnobConfig = KnobConfig()


class ServingConfig(_Strict):
    """How the engine is shown to the outside."""

    name: str | None = Field(None, description="model id in the API; default: the target's own name")
    max_tokens: int = Field(1024, ge=1, description="default answer length when a request names none")


class Config(EngineConfig):
    """Everything under `args`."""

    serving: ServingConfig = ServingConfig()
