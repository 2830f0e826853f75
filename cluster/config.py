"""The typed configuration: what `applications[].args` of ray_config.yaml may say.

Knows: every key, its default, its variants, which of them may change while running, and how to
say what is wrong with a file a person wrote.
Refuses to know: how any value is used. Values that depend on the machine ("auto") are resolved
once by whoever builds the part, and printed.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from cluster.config_drafts import DraftConfig
from cluster.config_drafts import ModelDraft as ModelDraft
from cluster.config_drafts import NgramDraft as NgramDraft
from cluster.config_drafts import QuantizedDraft as QuantizedDraft
from cluster.config_drafts import RecyclingDraft as RecyclingDraft
from cluster.config_drafts import Seq2SeqDraft as Seq2SeqDraft
from cluster.config_drafts import SuffixDraft as SuffixDraft
from cluster.config_drafts import TranslatedDraft as TranslatedDraft
from cluster.config_places import PlacementConfig
from cluster.config_rules import ScheduledConfig, ThresholdConfig, TypicalConfig
from cluster.config_values import Device, DType, StrictModel, Whole, bare_number
from cluster.config_values import parse_bytes as parse_bytes
from cluster.errors import ConfigError
from cluster.messages import Knobs
from cluster.request import FEWEST_RETRIES, MOST_RETRIES, RuleName

#: The builder whose application, in a Serve config file, carries this configuration as its `args`.
BUILDER = "deploy.app:build"
#: The deployment of that application whose `user_config` are the knobs.
KNOB_DEPLOYMENT = "Engine"

_Model = TypeVar("_Model", bound=BaseModel)


class TargetConfig(StrictModel):
    """The model whose answers are served."""

    model: str = Field("smollm2-135m", description="directory of safetensors, or an alias")
    tokenizer: str | None = Field(None, description="directory of another tokenizer; default: the model's own")
    dtype: DType = Field("auto", description="of the weights; auto: the fastest this device computes well")
    deterministic: bool = Field(
        False,
        description="the same bits whatever else is in the batch, drafts or none: refused where that cannot be kept; "
        "drafts are chains then",
    )
    bits: Literal[8, 4] | None = Field(None, description="round the weights to so many bits, on a CPU; default: whole")
    device: Device = Field("auto", description="auto: a GPU where there is one")
    tensor_parallel: Whole = Field(1, ge=1, le=64, description="processes, one a device, among which it is divided")
    max_context: Whole | None = Field(None, ge=16, description="tokens; default: what the model was trained for")
    threads: Whole | None = Field(None, ge=1, description="CPU threads; default: the cores of this process")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.deterministic and self.tensor_parallel > 1:
            raise ValueError(
                f"deterministic with tensor_parallel={self.tensor_parallel}: sums over processes do not keep their "
                "order; choose one of the two"
            )
        return self


class CacheConfig(StrictModel):
    """Where keys and values of attention live."""

    block_tokens: Whole = Field(32, ge=1, le=256, description="tokens a block")
    memory: str = Field("auto", description='bytes for all blocks, such as "512MiB"; auto: a quarter of what is free')
    blocks: Whole | None = Field(None, ge=2, description="number of blocks; overrides memory")
    prefix: bool = Field(True, description="reuse blocks of equal prefixes within a salt")

    _bare = field_validator("memory", mode="before")(bare_number)

    @field_validator("memory")
    @classmethod
    def _readable(cls, value: str) -> str:
        if value != "auto":
            parse_bytes(value)
        return value

    @property
    def memory_bytes(self) -> int | None:
        """`memory` in bytes; None for "auto"."""
        return None if self.memory == "auto" else parse_bytes(self.memory)


class SchedulerConfig(StrictModel):
    """How many requests are in flight and how many may wait."""

    max_sequences: Whole = Field(64, ge=1, le=4096, description="most requests computed side by side")
    max_waiting: Whole = Field(256, ge=0, description="most requests waiting; one more is refused as overload")
    policy: Literal["fcfs", "priority"] = Field(
        "fcfs",
        description="who starts first and who gives way: by arrival, or by the request's `priority`, lower first, "
        "where a lower one that waits also takes the place of a higher one that runs",
    )
    fair: bool = Field(False, description="among equals the caller (`user`) served least so far starts next")


class KnobConfig(StrictModel):
    """What may change while running: give it under the deployment's `user_config`."""

    k: Whole = Field(5, ge=0, le=64, description="most draft tokens a row; 0 switches speculation off")
    rule: RuleName = Field(
        "coupled",
        description="how drafts are accepted: coupled gives the same tokens; ratio and block the same law; "
        "threshold and typical are lossy",
    )
    token_budget: Whole = Field(512, ge=16, description="most tokens a step computes; above k")
    adaptive: bool = Field(True, description="draft and verify only what raises the tokens a second; off: always k")
    threshold: ThresholdConfig = Field(
        ScheduledConfig(kind="scheduled"), description="rule threshold: how its threshold moves"
    )
    typical: TypicalConfig = TypicalConfig()
    max_retries: Whole = Field(
        3,
        ge=FEWEST_RETRIES,
        le=MOST_RETRIES,
        description="rounds without an accepted draft before a request's drafting pauses",
    )
    tree_nodes: Whole = Field(
        16,
        ge=0,
        le=4096,
        description="tree nodes a step verifies, shared by its sequences (64 each at most): with no more than k for "
        "each, chains; 64 suits a GPU",
    )

    @model_validator(mode="after")
    def _row_fits(self) -> Self:
        if self.k >= self.token_budget:
            raise ValueError(f"k={self.k} must be below token_budget={self.token_budget}, or no row would fit a step")
        return self

    def knobs(self) -> Knobs:
        return Knobs(
            k=self.k,
            rule=self.rule,
            token_budget=self.token_budget,
            adaptive=self.adaptive,
            threshold=self.threshold.made(),
            typical=self.typical.made(),
            max_retries=self.max_retries,
            tree_nodes=self.tree_nodes,
        )


class EngineConfig(StrictModel):
    """One engine: a target, its drafts, its cache, its scheduler."""

    target: TargetConfig = TargetConfig()
    drafts: tuple[DraftConfig, ...] = Field(
        (NgramDraft(kind="ngram"),), description="asked in this order; an empty list: no drafts"
    )
    blend: Literal["first", "expected"] = Field(
        "first", description="which offer a row takes: the first in order, or of whoever lately did best there"
    )
    placement: PlacementConfig = PlacementConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    processors: dict[str, str] = Field(
        {}, description="logits processors a request may name: import paths, module:attribute, by name"
    )
    knobs: KnobConfig = KnobConfig()


class ServingConfig(StrictModel):
    """How the engine is shown to the outside."""

    name: str | None = Field(None, description="model id in the API; default: the target's own name")
    max_tokens: Whole = Field(1024, ge=1, description="default answer length when a request names none")
    failovers: Whole = Field(
        4, ge=0, le=100, description="lost engines after which an answer is given up; 0: after the first"
    )
    failover_s: float = Field(
        120.0, gt=0, le=600, description="longest an answer stands still after a loss before it is given up, seconds"
    )


class Config(EngineConfig):
    """Everything under `args`."""

    serving: ServingConfig = ServingConfig()


def parse(raw: Mapping[str, Any]) -> Config:
    """The configuration that `raw`, as read from YAML or JSON, spells.

    Raises ConfigError naming every problem, one a line, by its dotted path and, for a key that
    does not exist, the nearest one that does.
    """
    return _parse(raw, Config)


def parse_knobs(raw: Mapping[str, Any] | None, base: KnobConfig | None = None) -> KnobConfig:
    """The knobs of a `user_config`; keys it leaves out keep their value in `base`. Raises ConfigError."""
    if raw is not None and not isinstance(raw, Mapping):
        raise ConfigError(f"user_config must be a mapping of knobs, not {reprlib.repr(raw)}")
    return _parse({**(base or KnobConfig()).model_dump(exclude_unset=True), **(raw or {})}, KnobConfig)


def load_yaml(path: str | Path) -> Config:
    """The configuration in a Serve config file, as its application built by `deploy.app:build` starts with it.

    That is its `args`, with the knobs of its engine's `user_config` in force. Raises ConfigError
    when the file is missing, is not YAML, holds no such application or more than one, or spells a
    configuration that `parse` refuses.
    """
    document = _read_yaml(Path(path))
    applications = document.get("applications") if isinstance(document, Mapping) else None
    if not isinstance(applications, list):
        raise ConfigError(f"{path}: not a Serve config file: it has no list `applications`")
    ours = [app for app in applications if isinstance(app, Mapping) and app.get("import_path") == BUILDER]
    if len(ours) != 1:
        found = ", ".join(str(app.get("import_path")) for app in applications if isinstance(app, Mapping)) or "none"
        raise ConfigError(f"{path}: wants exactly one application with import_path {BUILDER}; import paths: {found}")
    where = f"{path}: applications.{applications.index(ours[0])}"
    with _located(f"{where}.args"):
        config = parse(ours[0].get("args") or {})
    for index, deployment in enumerate(ours[0].get("deployments") or ()):
        if isinstance(deployment, Mapping) and deployment.get("name") == KNOB_DEPLOYMENT:
            with _located(f"{where}.deployments.{index}.user_config"):
                config = config.model_copy(update={"knobs": parse_knobs(deployment.get("user_config"), config.knobs)})
    return config


def describe(config: BaseModel) -> list[str]:
    """One line a value, `path = value`, in the order of the tree; those a person set are marked so."""
    lines = [f"{path} = {_shown(value)}{'  (set)' if given else ''}" for path, value, given in _leaves(config)]
    if isinstance(config, EngineConfig) and config.cache.memory_bytes is not None:
        lines.append(f"cache.memory_bytes = {config.cache.memory_bytes}  (derived)")
    return lines


def reference() -> list[str]:
    """The lines of docs/configuration.md's table: key, default and meaning of everything in the tree."""
    rows = [f"| `{path}` | {default} | {text} |" for path, default, text in _reference(Config, "")]
    return ["| key | default | meaning |", "|---|---|---|", *rows]


def _parse(raw: object, model: type[_Model]) -> _Model:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"the configuration must be a mapping of keys to values, not {reprlib.repr(raw)}")
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        problems = [_problem(detail, model) for detail in error.errors(include_url=False)]
    raise ConfigError("\n".join(problems))


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Put the place in the file before whatever is wrong there."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _read_yaml(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None


def _problem(detail: ErrorDetails, root: type[BaseModel]) -> str:
    """One line for one of pydantic's findings."""
    path, owners = _locate(detail["loc"], root)
    context = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            return f"{path}: unknown key; {_nearest(str(detail['loc'][-1]), owners, root)}"
        case "union_tag_invalid":
            kinds = re.findall(r"'([^']*)'", context["expected_tags"])
            near = difflib.get_close_matches(context["tag"], kinds, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            return f"{path}.kind: unknown kind {context['tag']!r}; {hint}kinds: {', '.join(kinds)}"
        case "union_tag_not_found":
            return f"{path}.kind: missing; kinds: {', '.join(_kind(owner) for owner in owners)}"
        case "value_error":
            return f"{path}: {context['error']}" if path else str(context["error"])
        case "tuple_type":
            return f"{path}: must be a list, not {reprlib.repr(detail['input'])}"
        case "too_short":
            return f"{path}: must not be empty; leave the key out for its default"
        case "model_type" | "model_attributes_type":
            return f"{path}: must be a mapping of keys to values, not {reprlib.repr(detail['input'])}"
        case _:
            return f"{path}: {detail['msg'][0].lower()}{detail['msg'][1:]}, not {reprlib.repr(detail['input'])}"


def _locate(loc: tuple[int | str, ...], root: type[BaseModel]) -> tuple[str, list[type[BaseModel]]]:
    """The path as a person wrote it, and the model (or variants) that hold its last part.

    Pydantic puts the variant's kind into the location of everything inside a union; a person did not.
    """
    path: list[str] = []
    owners: list[type[BaseModel]] = [root]
    inside = owners
    for part in loc:
        if isinstance(part, str) and len(inside) > 1:
            owners = inside = [model for model in inside if _kind(model) == part]
            continue
        path.append(str(part))
        owners = inside
        if len(inside) == 1 and part in inside[0].model_fields:
            inside = _models_in(inside[0].model_fields[str(part)].annotation)
    return ".".join(path), owners


def _nearest(name: str, owners: list[type[BaseModel]], root: type[BaseModel]) -> str:
    names = [field for owner in owners for field in owner.model_fields]
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]}?"
    # The right key in the wrong place is as common a slip as a misspelt one.
    elsewhere = [path for path, _, _ in _reference(root, "") if path.rpartition(".")[2] == name]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return f"known here: {', '.join(names)}"


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _kind(model: type[BaseModel]) -> str:
    field = model.model_fields.get("kind")
    return str(get_args(field.annotation)[0]) if field else ""


def _leaves(value: object, path: str = "", given: bool = False) -> Iterator[tuple[str, object, bool]]:
    """Every value below `value` with its path and whether a person gave it."""
    prefix = f"{path}." if path else ""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _leaves(getattr(value, name), prefix + name, name in value.model_fields_set)
    elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{prefix}{index}", given)
    else:
        yield path, value, given


def _reference(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    """(path, default, meaning) of every key below `model`; a list's items appear as `[kind]`."""
    for name, field in model.model_fields.items():
        inner = _models_in(field.annotation)
        if not inner or len(inner) > 1 or field.default is None:
            default = "required" if field.is_required() else f"`{_shown(field.default)}`"
            yield prefix + name, default, (field.description or "").replace("|", "\\|")
        for variant in inner:
            here = f"{prefix}{name}[{_kind(variant)}]." if len(inner) > 1 else f"{prefix}{name}."
            yield from _reference(variant, here)


def _shown(value: object) -> str:
    if isinstance(value, BaseModel):
        return _kind(type(value))
    if isinstance(value, tuple):
        return f"[{', '.join(_shown(item) for item in value)}]"
    # As YAML spells them, so that a line can be pasted into the file.
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
