"""An engine over several nodes, all on this machine: its processes sit apart, and a node is lost under load."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from actors.asking import ask
from cluster.config import EngineConfig
from tests.e2e.test_crew import WARM, alone, answer, config_of, running

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    # Not ours to mend: Ray leaves pipes and log files for the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """A head without room, and one node of one CPU; a test adds others."""
    before = dict(os.environ)
    os.environ.update({"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "RAY_worker_niceness": "0"})
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80_000_000})
    cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    for _ in range(3):  # here, where the marks above hold, and not at the end of the session
        gc.collect()


def spread(config: EngineConfig) -> EngineConfig:
    return config.model_copy(
        update={"placement": config.placement.model_copy(update={"strategy": "spread", "cpus": 1.0, "wait_s": 60.0})}
    )


async def test_a_drafters_node_is_lost_under_load_and_another_takes_its_place(nodes: Cluster, tiny_llama: Path) -> None:
    nodes.add_node(num_cpus=1, object_store_memory=80_000_000)
    config = spread(config_of(tiny_llama, 1, 1, wait_ms=100, cpus=1.0))
    async with running(config, "lost-node") as crew:
        [table] = [entry for entry in placement_group_table().values() if entry["state"] == "CREATED"]
        verifier, drafter = table["bundles_to_node_id"][0], table["bundles_to_node_id"][1]
        assert verifier != drafter
        [lost] = [node for node in nodes.worker_nodes if node.node_id == drafter]

        def lose() -> None:
            nodes.remove_node(lost, allow_graceful=False)

        said = await answer(crew, "a", WARM, lose)
        assert said.tokens == alone(config, WARM)
        nodes.add_node(num_cpus=1, object_store_memory=80_000_000)
        async with asyncio.timeout(300.0):
            while await ask(crew.verifier.pairs.remote(), 30.0) != 1:
                await asyncio.sleep(0.5)
        assert (await answer(crew, "b", WARM)).tokens == said.tokens


async def test_ranks_on_two_nodes_say_the_same(nodes: Cluster, tiny_llama: Path) -> None:
    nodes.add_node(num_cpus=1, object_store_memory=80_000_000)
    config = spread(config_of(tiny_llama, 2, 0))
    async with running(config, "two-nodes") as crew:
        [table] = [entry for entry in placement_group_table().values() if entry["state"] == "CREATED"]
        assert len(set(table["bundles_to_node_id"].values())) == 2
        assert (await answer(crew, "a", WARM)).tokens == alone(config, WARM)
