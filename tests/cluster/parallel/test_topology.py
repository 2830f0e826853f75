"""Who sits where: arithmetic over made-up nodes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import load_yaml, parse
from cluster.errors import CapacityError, ConfigError
from cluster.parallel.topology import Node, Placement, Role, Seat, assign, plan, seated

LAYOUTS = Path(__file__).resolve().parents[3] / "deploy" / "layouts"
GIB = 2**30


def dedicated(**keys: Any) -> dict[str, Any]:
    return {"kind": "model", "model": "x", "drafter": {"place": "dedicated", **keys}}


def held(placement: Placement, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """What the seats take from each node."""
    taken: dict[str, dict[str, float]] = {name: {} for name in names}
    for seat, name in zip(placement.seats, names, strict=True):
        for what, amount in seat.bundle.items():
            taken[name][what] = taken[name].get(what, 0.0) + amount
    return taken


@st.composite
def clusters(draw: st.DrawFn) -> list[Node]:
    return [
        Node(
            f"n{number}",
            {
                "CPU": float(draw(st.integers(0, 8))),
                "memory": float(draw(st.integers(0, 8)) * GIB),
                "GPU": float(draw(st.integers(0, 4))),
            },
        )
        for number in range(draw(st.integers(0, 4)))
    ]


@st.composite
def engines(draw: st.DrawFn) -> Mapping[str, Any]:
    device = draw(st.sampled_from(["auto", "cpu", "cuda"]))
    drafts = [
        dedicated(replicas=draw(st.integers(1, 3)), device=draw(st.sampled_from(["auto", "cpu"])),
                  cpus=draw(st.sampled_from([0.5, 1.0, 2.0])))
        for _ in range(draw(st.integers(0, 2)))
    ]  # fmt: skip
    placement = {
        "cpus": draw(st.sampled_from([0.5, 1.0, 3.0])),
        "strategy": draw(st.sampled_from(["pack", "strict_pack", "spread"])),
    }
    if draw(st.booleans()):
        placement["memory"] = "2GiB"
    target = {"device": device, "tensor_parallel": draw(st.integers(1, 4))}
    return {"target": target, "placement": placement, "drafts": drafts}


@given(clusters(), engines())
def test_no_node_gives_more_than_it_has_and_a_refusal_is_true(nodes: list[Node], engine: Mapping[str, Any]) -> None:
    placement = plan(parse(engine), nodes)
    ranks = [seat.index for seat in placement.seats if seat.role is Role.TARGET]
    assert ranks == list(range(engine["target"]["tensor_parallel"]))
    assert len(placement.seats) == len(ranks) + sum(draft["drafter"]["replicas"] for draft in engine["drafts"])
    by_name = {node.name: node for node in nodes}
    try:
        names = assign(placement, nodes)
    except CapacityError:
        for node in nodes:  # then certainly no single node could have taken all
            total = held(placement, ("all",) * len(placement.seats))["all"]
            assert any(amount > node.resources.get(what, 0.0) for what, amount in total.items())
        return
    if placement.strategy == "STRICT_PACK":
        assert len(set(names)) == 1
    for name, taken in held(placement, names).items():
        for what, amount in taken.items():
            assert amount <= by_name[name].resources[what] + 1e-6


@given(clusters(), engines())
def test_cores_of_a_node_are_shared_by_those_who_compute_on_them(nodes: list[Node], engine: Mapping[str, Any]) -> None:
    placement = plan(parse(engine), nodes)
    try:
        names = assign(placement, nodes)
    except CapacityError:
        return
    here: dict[str, list[Seat]] = {}
    by_name = {node.name: node for node in nodes}
    for seat, name in zip(seated(placement, [by_name[name] for name in names]).seats, names, strict=True):
        if seat.kind.name == "cpu":
            here.setdefault(name, []).append(seat)
        else:
            assert (seat.turn, seat.sharers) == (0, 1)
    for seats in here.values():
        assert sorted(seat.turn for seat in seats) == list(range(len(seats)))
        assert {seat.sharers for seat in seats} == {len(seats)}


def test_the_reference_layout_fills_a_node_of_four_and_no_smaller_one() -> None:
    config = load_yaml(LAYOUTS / "h200x4.yaml")
    small = Node("small", {"CPU": 64, "GPU": 2, "memory": 1024 * GIB, "accelerator_type:H200": 1})
    other = Node("other", {"CPU": 64, "GPU": 8, "memory": 1024 * GIB, "accelerator_type:A100": 1})
    right = Node("right", {"CPU": 64, "GPU": 4, "memory": 1024 * GIB, "accelerator_type:H200": 1})
    placement = plan(config, [small, other, right])
    assert assign(placement, [small, other, right]) == ("right",) * 4
    assert [seat.role for seat in placement.seats] == [Role.TARGET, Role.TARGET, Role.DRAFTER, Role.DRAFTER]
    assert placement.seats[0].bundle["GPU"] == 1
    for seat in placement.seats:
        assert seat.environment["NCCL_P2P_LEVEL"] == "NVL"
        assert seat.kind.settings["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
        assert pickle.loads(pickle.dumps(seat)) == seat
    with pytest.raises(CapacityError) as refused:
        assign(placement, [small, other])
    message = str(refused.value)
    assert "4 GPU" in message
    assert "small: 2 GPU" in message
    assert "type H200" in message


def test_a_drafter_on_a_cpu_beside_targets_on_gpus_and_the_reverse() -> None:
    gpu, cpu = Node("gpu", {"CPU": 2, "GPU": 2}), Node("cpu", {"CPU": 16})
    mixed = parse({"target": {"tensor_parallel": 2}, "drafts": [dedicated(device="cpu", cpus=8)]})
    placement = plan(mixed, [gpu, cpu])
    assert [seat.kind.name for seat in placement.seats] == ["cuda", "cuda", "cpu"]
    assert assign(placement, [gpu, cpu]) == ("gpu", "gpu", "cpu")
    reverse = parse({"target": {"device": "cpu"}, "placement": {"cpus": 16}, "drafts": [dedicated(device="cuda")]})
    placement = plan(reverse, [gpu, cpu])
    assert [seat.kind.name for seat in placement.seats] == ["cpu", "cuda"]
    assert assign(placement, [gpu, cpu]) == ("cpu", "gpu")


def test_a_target_left_to_auto_takes_gpus_only_where_all_its_ranks_find_one() -> None:
    three = parse({"target": {"tensor_parallel": 3}})
    assert plan(three, [Node("a", {"GPU": 2})]).seats[0].kind.name == "cpu"
    assert plan(three, [Node("a", {"GPU": 2}), Node("b", {"GPU": 1})]).seats[0].kind.name == "cuda"
    shared = parse({"target": {"tensor_parallel": 2}, "placement": {"gpus": 0.5}})
    assert plan(shared, [Node("a", {"GPU": 1})]).seats[0].kind.name == "cuda"


def test_shared_drafters_have_no_seat() -> None:
    shared = parse({"drafts": [{"kind": "model", "model": "x", "drafter": {"place": "shared"}}]})
    assert [seat.role for seat in plan(shared, []).seats] == [Role.TARGET]


@pytest.mark.parametrize(
    ("drafter", "told"),
    [
        ({"replicas": 2}, "drafts.0.drafter: replicas: only for drafters with a process of their own"),
        ({"place": "dedicated", "device": "cpu", "gpus": 0.5}, "leave out gpus"),
        ({"place": "dedicated", "memory": "much"}, "no amount of memory"),
        ({"place": "dedicated", "replicas": 0}, "greater than or equal to 1"),
    ],
)
def test_contradictions_are_told(drafter: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse({"drafts": [{"kind": "model", "model": "x", "drafter": drafter}]})
