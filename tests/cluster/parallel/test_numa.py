"""Cores beside memory: a made-up /sys, and the arithmetic of who keeps to which cores."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.parallel.numa import NumaNode, allowed_cores, home, keep_to, parse_cores, read_nodes, share_of_cores


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8-9\n", {0, 1, 2, 3, 8, 9}), ("7", {7}), ("\n", set()), ("0,2,4-4", {0, 2, 4})]
)
def test_lists_of_cores(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


def test_nodes_are_read_in_order_and_memory_without_cores_is_none(tmp_path: Path) -> None:
    for number, cores in ((10, "4-7"), (2, "0-3"), (11, "")):
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    assert read_nodes(tmp_path) == (NumaNode(2, frozenset(range(4))), NumaNode(10, frozenset(range(4, 8))))
    assert read_nodes(tmp_path / "nowhere") == ()


@given(
    st.lists(st.integers(1, 8), max_size=4),
    st.sets(st.integers(0, 40), min_size=1),
    st.none() | st.integers(0, 5),
    st.integers(1, 9),
    st.data(),
)
def test_a_home_is_part_of_what_is_allowed_and_no_node_is_left_out(
    sizes: list[int], allowed: set[int], device: int | None, sharers: int, data: st.DataObject
) -> None:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    nodes = [
        NumaNode(index, frozenset(range(end - size, end)))
        for index, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    homes = [home(nodes, frozenset(allowed), device, turn, sharers) for turn in range(sharers)]
    for cores in homes:
        assert cores
        assert cores <= allowed
    usable = [node for node in nodes if node.cores & allowed]
    if device is None and 1 < len(usable) <= sharers:
        assert {cores for cores in homes} == {node.cores & allowed for node in usable}
    if device is not None and device in {node.number for node in usable}:
        assert set(homes) == {nodes[device].cores & allowed}


def test_threads_are_shared_and_never_none() -> None:
    assert [share_of_cores(8, sharers) for sharers in (1, 2, 3, 16)] == [8, 4, 2, 1]


def test_keeping_to_cores_holds_for_this_thread() -> None:
    before = allowed_cores()
    one = frozenset(sorted(before)[:1])
    try:
        keep_to(one)
        assert allowed_cores() == one
    finally:
        keep_to(before)
    assert allowed_cores() == before
