"""Groups: processes meet, compute together, notice a loss at once, and lose nothing else by it."""

from __future__ import annotations

import pickle
import signal

import pytest
import torch

from cluster.errors import ConfigError, PeerLost
from cluster.parallel.collectives import all_reduce, broadcast, gather_columns
from cluster.parallel.groups import Endpoint, Rendezvous, join
from tests.cluster.parallel import tasks
from tests.cluster.parallel.crew import Crew


def test_every_collective_over_three_processes() -> None:
    with Crew(3, tasks.everything) as crew:
        reports = crew.reports()
    assert [report.total for report in reports] == [[6.0, 6.0]] * 3
    assert [report.copied for report in reports] == [[0, 1, 2, 3]] * 3
    assert reports[0].columns == [[0, 1, 1, 2, 2, 2]] * 2
    assert [report.columns for report in reports[1:]] == [None, None]
    assert reports[0].passed == 2.0


def test_a_killed_peer_is_noticed_at_once_and_other_groups_stay_whole() -> None:
    with Crew(3, tasks.lose_one, 30.0) as crew:
        crew.reports()  # the others go into a sum now; if they are late, they find the loss when they get there
        killed = crew.signal(2, signal.SIGKILL)
        reports = [crew.report(rank) for rank in (0, 1)]
    for rank, (message, at, total) in enumerate(reports):
        assert f"group 'first', rank {rank} of 3: all-reduce failed" in message
        assert at - killed < 2.0
        assert total == 2.0


def test_a_frozen_peer_is_noticed_at_the_deadline() -> None:
    with Crew(2, tasks.lose_one, 3.0) as crew:
        crew.reports()
        message, _, total = crew.report(0)
    assert "rank 1 died or did not answer" in message
    assert total == 1.0


def test_whoever_does_not_come_is_named() -> None:
    with Crew(2, tasks.come, 4, 4.0) as crew:
        assert crew.reports() == [f"group 'tp', rank {r} of 4: rank 2, 3 did not come in time" for r in (0, 1)]


def test_a_group_of_one_needs_nobody_and_costs_nothing() -> None:
    group = join(Endpoint("nowhere.invalid", 1), 0, 1)
    piece = torch.ones(2, 3)
    assert all_reduce(group, piece) is piece
    assert broadcast(group, piece) is piece
    assert gather_columns(group, piece, [3]) is piece
    group.close()
    group.close()


def test_what_cannot_be_joined_is_refused() -> None:
    rendezvous = Rendezvous.host()
    endpoint = pickle.loads(pickle.dumps(rendezvous.endpoint))
    with pytest.raises(ConfigError, match="nccl carries tensors of CUDA devices only"):
        join(endpoint, 0, 2, backend="nccl")
    with pytest.raises(ConfigError, match="backend 'mpi' is not one of auto, gloo, nccl"):
        join(endpoint, 0, 2, backend="mpi")
    with pytest.raises(ConfigError, match=r"rank 2 is not one of 0\.\.1"):
        join(endpoint, 2, 2)
    with pytest.raises(PeerLost, match="rank 1 did not come"):
        join(endpoint, 0, 2, timeout_s=0.1)
    with pytest.raises(ConfigError, match="has joined already"):
        join(endpoint, 0, 2, timeout_s=0.1)
    rendezvous.close()
    with pytest.raises(PeerLost, match=f"nobody answers at {endpoint}"):
        join(endpoint, 0, 2, timeout_s=0.5)
