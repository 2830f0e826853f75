"""An engine whose target is divided among processes: the same tokens, and a clean end whoever dies."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cluster.build import Meeting, assemble
from cluster.errors import ConfigError
from cluster.model.files import ModelFiles
from cluster.parallel.groups import Endpoint
from tests.cluster import shard_tasks
from tests.cluster.parallel.crew import Crew


def test_two_processes_emit_the_tokens_of_one_greedy_and_drawn(smollm2: ModelFiles) -> None:
    alone = assemble(shard_tasks.config(smollm2.directory, 1))
    expected = shard_tasks.answer(alone, 0.0), shard_tasks.answer(alone, 1.0)
    with Crew(2, shard_tasks.serve, str(smollm2.directory), 0.0, 30.0) as crew:
        assert crew.reports(timeout=100) == [expected, "sent home"]


def test_an_idle_leader_is_no_error(tiny_llama: Path) -> None:
    alone = assemble(shard_tasks.config(tiny_llama, 1))
    expected = shard_tasks.answer(alone, 0.0), shard_tasks.answer(alone, 1.0)
    with Crew(3, shard_tasks.serve, str(tiny_llama), 5.0, 2.0) as crew:
        assert crew.reports() == [expected, "sent home", "sent home"]


@pytest.mark.parametrize(("victim", "idle"), [(0, False), (0, True), (1, False)])
def test_a_killed_rank_ends_the_others_within_two_seconds(tiny_llama: Path, victim: int, idle: bool) -> None:
    with Crew(3, shard_tasks.last, str(tiny_llama), idle, 30.0) as crew:
        crew.reports()  # all are ready: in the middle of a step, or between two
        killed = crew.signal(victim, signal.SIGKILL)
        for rank in {0, 1, 2} - {victim}:
            message, at = crew.report(rank)
            assert f"group 'target', rank {rank} of 3" in message
            assert at - killed < 2.0


def test_a_frozen_leader_is_noticed_at_the_deadline(tiny_llama: Path) -> None:
    with Crew(2, shard_tasks.last, str(tiny_llama), True, 2.0) as crew:
        crew.reports()
        stopped = crew.signal(0, signal.SIGSTOP)
        message, at = crew.report(1)
        assert "broadcast from rank 0 failed" in message
        assert at - stopped < 4.0


def test_what_cannot_be_divided_or_cannot_meet_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel=2: the ranks of one engine need a place to meet"):
        assemble(shard_tasks.config(tiny_llama, 2))
    with pytest.raises(ConfigError, match="tensor_parallel=1"):
        assemble(shard_tasks.config(tiny_llama, 1), meeting=Meeting(Endpoint("localhost", 1)))
