"""The kinds of drafts a configuration may list, one class a kind.

Knows: every key of `drafts`, its default and what it means.
Refuses to know: the rest of the tree (config.py) and how a proposer is made of it (build.py).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from cluster.config_places import DraftPlace
from cluster.config_values import DType, StrictModel, Whole
from cluster.errors import ConfigError


class NgramDraft(StrictModel):
    """Copy what followed the last occurrence of the newest tokens in the same sequence."""

    kind: Literal["ngram"] = Field(description="look-up in the sequence itself")
    max_match: Whole = Field(4, ge=1, le=16, description="longest run of newest tokens looked up")
    min_match: Whole = Field(2, ge=1, le=16, description="shortest run that may be trusted; at most max_match")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match={self.min_match} must be at most max_match={self.max_match}")
        return self


class RecyclingDraft(StrictModel):
    """Follow, from the newest token on, whichever token came after it last time."""

    kind: Literal["recycling"] = Field(description="the last token seen after each token, under the same salt")
    max_pairs: Whole = Field(262_144, ge=1, le=2**26, description="pairs remembered, all salts: about 100 bytes each")
    successors: Whole = Field(
        1, ge=1, le=8, description="remembered of a token; above 1, a tree of them where knobs.tree_nodes leaves room"
    )


class LayerPick(StrictModel):
    """Which of a model's layers a draft keeps; a plain list stands for `keep`."""

    keep: tuple[Annotated[Whole, Field(ge=0)], ...] | None = Field(
        None, min_length=1, description="these, in this order; `layers: [0, 1, 29]` says the same"
    )
    first: Whole = Field(0, ge=0, description="so many from the start")
    last: Whole = Field(0, ge=0, description="and so many up to the end")
    every: Whole | None = Field(None, ge=2, description="or the first and every n-th after it")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = (self.keep is not None) + bool(self.first or self.last) + (self.every is not None)
        if ways != 1:
            raise ValueError("layers must be a list, or say first and last, or every: exactly one of the three")
        return self

    def of(self, total: int) -> tuple[int, ...]:
        """The layers kept of a model with `total`, in order. Raises ConfigError where that is all of them."""
        if self.keep is not None:
            return self.keep
        if self.every is not None:
            return tuple(range(0, total, self.every))
        if self.first + self.last >= total:
            raise ConfigError(f"layers first={self.first} and last={self.last} leave out none of {total}: keep fewer")
        return (*range(self.first), *range(total - self.last, total))


class DraftingConfig(StrictModel):
    """How a drafting model chooses its tokens. None: as the request asks."""

    max_tokens: Whole = Field(15, ge=1, le=15, description="most tokens drafted, whatever k allows")
    temperature: float | None = Field(None, ge=0.0, le=100.0, description="of the drafts; default: the request's")
    top_k: Whole | None = Field(None, ge=0, description="of the drafts, 0: off; default: the request's")
    top_p: float | None = Field(
        None, gt=0.0, le=1.0, description="of the drafts, 0.92 suits prose; default: the request's"
    )
    min_confidence: float = Field(
        0.0, ge=0.0, le=1.0, description="drafting stops before a token it is less sure of; 0: never"
    )
    confidence: Literal["top", "entropy"] = Field(
        "top", description="measured as the likeliest token's probability, or as 1 - sqrt(0.2 x entropy)"
    )
    drafter: DraftPlace = DraftPlace()


class TreeConfig(StrictModel):
    """A draft tree grown from a model's own laws, where knobs.tree_nodes leaves room for more than a chain."""

    width: Whole = Field(4, ge=1, le=16, description="most children of a node, and nodes of a level that get any")
    nodes: Whole = Field(64, ge=1, le=64, description="most nodes of a tree, the likeliest")
    depth: Whole = Field(8, ge=1, le=15, description="most levels, whatever k allows: one pass of the draft each")


class ModelDraft(DraftingConfig):
    """A smaller causal language model with the target's vocabulary."""

    kind: Literal["model"] = Field(description="a second model")
    model: str = Field("target", description='directory or alias; "target" starts from the target\'s own weights')
    layers: LayerPick | None = Field(None, description="keep only some layers; default: all")
    dtype: DType = Field("auto", description="of the draft's weights; auto: as for the target")
    bits: Literal[8, 4] | None = Field(None, description="round its weights to so many bits, on a CPU")
    tree: TreeConfig | None = Field(None, description="draft trees; default: chains")

    @field_validator("layers", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return {"keep": value} if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _smaller(self) -> Self:
        if self.model == "target" and self.layers is None:
            raise ValueError('a draft made from the target needs layers, for example "layers: {first: 2, last: 2}"')
        return self


class QuantizedDraft(DraftingConfig):
    """The target itself with its weights in few bits, on a CPU."""

    kind: Literal["quantized"] = Field(description="the target's own quantized copy")
    bits: Literal[8, 4] = Field(8, description="a weight; in 4, groups of 32 share a scale and the head keeps 8")
    tree: TreeConfig | None = Field(None, description="draft trees; default: chains")


class TranslatedDraft(DraftingConfig):
    """A causal language model with a tokenizer of its own; it drafts greedily unless given a temperature."""

    kind: Literal["translated"] = Field(description="a second model with another tokenizer")
    model: str = Field(description="directory or alias")
    dtype: DType = Field("auto", description="of the draft's weights; auto: as for the target")
    bits: Literal[8, 4] | None = Field(None, description="round its weights to so many bits, on a CPU")


class Seq2SeqDraft(DraftingConfig):
    """An encoder-decoder: the prompt is encoded once and the decoder drafts the answer."""

    kind: Literal["seq2seq"] = Field(description="an encoder-decoder, of any tokenizer")
    model: str = Field(description="directory of safetensors")
    dtype: DType = Field("auto", description="of the draft's weights; auto: as for the target")


class SuffixDraft(StrictModel):
    """Continue as the request's own text, or an earlier answer under the same salt, most often went on."""

    kind: Literal["suffix"] = Field(description="statistics of the request itself and of past answers")
    max_depth: Whole = Field(64, ge=2, le=200, description="longest run of tokens known: a match and what follows it")
    max_tokens: Whole = Field(64, ge=1, le=64, description="most tokens drafted, whatever k allows")
    factor: float = Field(1.0, gt=0.0, le=64.0, description="tokens drafted for each token matched")
    offset: float = Field(0.0, ge=-64.0, le=64.0, description="added to that")
    min_prob: float = Field(0.1, ge=0.0, le=1.0, description="drafting stops where a token's estimated chance is lower")
    own_tokens: Whole = Field(131072, ge=400, le=2**28, description="newest tokens of a request that are looked up")
    past_tokens: Whole = Field(
        1_000_000, ge=400, le=2**28, description="of past answers, all salts: about 70 bytes each"
    )
    past_requests: Whole = Field(10_000, ge=1, description="most past answers; the oldest leave first")
    tree: bool = Field(False, description="draft several continuations at once where knobs.tree_nodes leaves room")


DraftConfig = Annotated[
    NgramDraft | SuffixDraft | RecyclingDraft | ModelDraft | QuantizedDraft | TranslatedDraft | Seq2SeqDraft,
    Field(discriminator="kind"),
]
