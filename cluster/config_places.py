"""Where the processes of an engine sit: keys of `placement` and of `drafts[].drafter`.

Knows: what one process may reserve, and which combinations contradict themselves.
Refuses to know: nodes, and who gets which of them (parallel/topology.py).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from cluster.config_values import Device, StrictModel, Whole, bare_number, parse_bytes


class Reservation(StrictModel):
    """What one process sets aside for itself on a node."""

    cpus: float = Field(1.0, gt=0.0, le=1024.0, description="CPUs a process")
    gpus: float = Field(1.0, gt=0.0, le=1.0, description="share of one GPU a process that computes on GPUs")
    memory: str | None = Field(None, description='host memory a process, such as "16GiB"; default: none set aside')
    accelerator: str | None = Field(None, description="type of GPU, as Ray names it: H200, A100, ...; default: any")

    _bare = field_validator("memory", mode="before")(bare_number)

    @field_validator("memory")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        if value is not None:
            parse_bytes(value)
        return value

    @property
    def memory_bytes(self) -> int:
        return 0 if self.memory is None else parse_bytes(self.memory)


class PlacementConfig(Reservation):
    """Every process of the target, and how far apart those of one engine may sit. They come all or not at all."""

    strategy: Literal["pack", "strict_pack", "spread"] = Field(
        "pack", description="together where possible, on one node or not at all, or apart where possible"
    )
    wait_s: float = Field(60.0, gt=0.0, le=86400.0, description="longest to wait for room; then the start is refused")
    pin: bool = Field(True, description="keep a process to the cores of its device's NUMA node")
    environment: dict[str, str] = Field({}, description="set in every process of the engine, such as NCCL_IB_HCA")


class DraftPlace(Reservation):
    """Who drafts, and when. `local` drafts in the target's own process, between its steps."""

    place: Literal["local", "dedicated", "shared"] = Field(
        "local", description="in the target's process; in processes of this engine; or in processes that serve several"
    )
    replicas: Whole = Field(1, ge=1, le=16, description="drafters an engine uses at a time")
    device: Device = Field("auto", description="auto: a GPU where the target has one")
    threads: Whole | None = Field(None, ge=1, description="CPU threads; default: a share of the node's cores")
    mode: Literal["sync", "lookahead", "pearl"] = Field(
        "sync",
        description="sync: drafts when asked; lookahead: drafts what may follow while the target verifies; pearl: the "
        "same for one outcome, everything accepted. The last two for kinds model and quantized",
    )
    wait_ms: float = Field(
        50.0, ge=0.0, le=60_000.0, description="longest a step waits for drafts; later ones are dropped"
    )

    @model_validator(mode="after")
    def _meant(self) -> Self:
        fields = type(self).model_fields
        given = {name for name in fields if name != "place" and getattr(self, name) != fields[name].default}
        if self.place == "local" and given:
            raise ValueError(
                f"{', '.join(sorted(given))}: only for drafters with a process of their own; set place to dedicated "
                "or shared, or leave it out"
            )
        if self.device == "cpu" and self.model_fields_set & {"gpus", "accelerator"}:
            raise ValueError("device is cpu: leave out gpus and accelerator")
        return self
