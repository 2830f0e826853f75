"""Ranks as processes of this machine: they answer together, and none outlives the others or its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.build import assemble
from cluster.errors import PeerLost
from deploy.followers import Followers
from tests.cluster import shard_tasks

PARENT = """
import sys, time
from deploy.followers import Followers
from tests.cluster import shard_tasks
if __name__ == "__main__":
    with Followers(shard_tasks.config(sys.argv[1], 2)) as followers:
        print(*followers.pids, flush=True)
        time.sleep(600)
"""


def test_ranks_answer_as_one_until_one_is_killed(tiny_llama: Path) -> None:
    expected = shard_tasks.answer(assemble(shard_tasks.config(tiny_llama, 1)), 1.0)
    with Followers(shard_tasks.config(tiny_llama, 2)) as followers:
        assembly = assemble(followers.config, meeting=followers.meeting)
        assert shard_tasks.answer(assembly, 1.0) == expected
        os.kill(followers.pids[0], signal.SIGKILL)
        with pytest.raises(PeerLost, match="rank 1 died"):
            shard_tasks.answer(assembly, 1.0)
        assembly.engine.close()


def test_nobody_waits_for_a_rank_that_died_on_its_way(tiny_llama: Path) -> None:
    with Followers(shard_tasks.config(tiny_llama, 2)) as followers:
        os.kill(followers.pids[0], signal.SIGKILL)
        with pytest.raises(PeerLost, match="rank 1 of the target ended with code -9"):
            assemble(followers.config, meeting=followers.meeting)


def test_ranks_die_with_their_parent_even_before_they_have_met_it(tiny_llama: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        [sys.executable, str(script), str(tiny_llama)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        rank = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{rank}").exists() and " Z " not in Path(f"/proc/{rank}/stat").read_text():
        assert time.monotonic() < deadline, "a rank outlived its parent"
        time.sleep(0.05)
