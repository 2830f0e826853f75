"""An engine of several processes as Ray runs it: same tokens as in one process, and what happens when one is killed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
from ray.util.placement_group import placement_group_table

from actors.asking import ask, translate
from actors.launch import Crew
from cluster.build import assemble
from cluster.config import EngineConfig, parse
from cluster.errors import CapacityError, ModelNotFound, OutriderError
from cluster.model.files import ModelFiles
from cluster.request import Request, Sampling
from deploy.reaper import descendants
from tests.e2e.conftest import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    # Not ours to mend: Ray leaves pipes and log files for the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

PROMPT = tuple(b"on and on and on")
GREEDY = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
WARM = Sampling(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True)
TITLES = ("ray::VerifierProcess", "ray::Shard", "ray::Drafter")


class Answer(NamedTuple):
    tokens: list[int]
    drafted: int


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "RAY_worker_niceness": "0"})
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    for _ in range(3):  # here, where the marks above hold, and not at the end of the session
        gc.collect()


def config_of(model: Path, ranks: int, drafters: int, **drafter: Any) -> EngineConfig:
    draft = {
        "kind": "model",
        "layers": {"first": 2},
        "drafter": {"place": "dedicated", "replicas": drafters, "cpus": 0.5, "wait_ms": 5000, **drafter},
    }
    return parse(
        {
            "target": {"model": str(model), "dtype": "float32", "threads": 1, "tensor_parallel": ranks},
            "drafts": [draft] if drafters else [],
            "cache": {"blocks": 128},
            "placement": {"cpus": 0.5, "wait_s": 10},
        }
    )


@asynccontextmanager
async def running(config: EngineConfig, name: str) -> AsyncIterator[Crew]:
    crew = await Crew.start(config, name, lambda _: None)
    try:
        yield crew
    finally:
        crew.end()


async def answer(crew: Crew, name: str, sampling: Sampling, during: Callable[[], None] | None = None) -> Answer:
    """One answer; `during` is called after its first chunk."""
    tokens: list[int] = []
    drafted = 0
    request = Request(name, PROMPT, sampling)
    try:
        async for reference in crew.verifier.generate.options(num_returns="streaming").remote(request, True):
            delta = await reference
            if delta.silent:
                continue
            tokens.extend(delta.tokens)
            drafted = delta.statistics.drafted
            if during is not None:
                during()
                during = None
    except ray.exceptions.RayError as error:
        raise translate(error) from error
    return Answer(tokens, drafted)


def alone(config: EngineConfig, sampling: Sampling) -> list[int]:
    """What the engine of one process says."""
    target = config.target.model_copy(update={"tensor_parallel": 1})
    engine = assemble(config.model_copy(update={"target": target, "drafts": ()})).engine
    engine.submit(Request("alone", PROMPT, sampling))
    return [token for _ in iter(lambda: engine.has_work, False) for delta in engine.step() for token in delta.tokens]


def pids(title: str) -> list[int]:
    found = []
    for pid, _ in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if title in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


def kill(title: str) -> Callable[[], None]:
    return lambda: os.kill(pids(title)[0], signal.SIGKILL)


async def until_unwell(crew: Crew) -> None:
    for _ in range(100):
        await crew.check(10.0)
        await asyncio.sleep(0.1)


def require_nothing_left() -> None:
    wait_until(lambda: not any(pids(title) for title in TITLES), 20.0, "every process of the engine has ended")
    wait_until(
        lambda: {entry["state"] for entry in placement_group_table().values()} <= {"REMOVED"},
        10.0,
        "every placement group is removed",
    )


CORE = [(1, 1, "sync"), (1, 1, "lookahead"), (2, 0, "sync"), (2, 1, "sync"), (2, 1, "lookahead")]
MORE = [(1, 2, "pearl"), (2, 2, "lookahead"), (3, 0, "sync"), (3, 2, "sync")]


@pytest.mark.parametrize(("ranks", "drafters", "mode"), CORE)
async def test_more_processes_give_the_same_tokens(
    local_ray: None, tiny_llama: Path, ranks: int, drafters: int, mode: str
) -> None:
    await compare(tiny_llama, ranks, drafters, mode)


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "drafters", "mode"), [*CORE, *MORE])
async def test_more_processes_give_the_same_tokens_of_a_real_model(
    local_ray: None, smollm2: ModelFiles, ranks: int, drafters: int, mode: str
) -> None:
    await compare(smollm2.directory, ranks, drafters, mode)


async def compare(model: Path, ranks: int, drafters: int, mode: str) -> None:
    """Greedy and at temperature 1, against the engine of one process."""
    config = config_of(model, ranks, drafters, mode=mode)
    async with running(config, f"same-{ranks}-{drafters}-{mode}") as crew:
        assert (len(pids("ray::Shard")), len(pids("ray::Drafter"))) == (ranks - 1, drafters)
        for name, sampling in (("greedy", GREEDY), ("warm", WARM)):
            said = await answer(crew, name, sampling)
            assert said.tokens == alone(config, sampling)
            if mode == "sync":  # the others draft when they find the time
                assert (said.drafted > 0) == (drafters > 0)
    require_nothing_left()


async def test_a_killed_drafter_is_replaced_while_the_answer_goes_on(local_ray: None, tiny_llama: Path) -> None:
    config = config_of(tiny_llama, 1, 1, wait_ms=20)
    async with running(config, "killed-drafter") as crew:
        [victim] = pids("ray::Drafter")
        said = await answer(crew, "a", WARM, kill("ray::Drafter"))
        assert said.tokens == alone(config, WARM)
        for _ in range(300):
            now = [pid for pid in pids("ray::Drafter") if pid != victim]
            if now and await ask(crew.verifier.pairs.remote(), 10.0) == 1:
                break
            await asyncio.sleep(0.2)
        else:
            pytest.fail("no other drafter was attached within 60 s")
        assert (await answer(crew, "b", WARM)).tokens == said.tokens
    require_nothing_left()


@pytest.mark.parametrize("title", ["ray::Shard", "ray::VerifierProcess"])
async def test_the_death_of_a_rank_ends_the_answer_with_an_error_of_ours(
    local_ray: None, tiny_llama: Path, title: str
) -> None:
    config = config_of(tiny_llama, 2, 0)
    async with running(config, f"killed-{title[5:]}") as crew:
        long = Sampling(temperature=0.0, max_tokens=450, ignore_eos=True)
        with pytest.raises(OutriderError):
            await answer(crew, "a", long, kill(title))
        with pytest.raises(OutriderError):
            await crew.check(10.0)
    require_nothing_left()


async def test_the_death_of_an_idle_shard_is_noticed(local_ray: None, tiny_llama: Path) -> None:
    async with running(config_of(tiny_llama, 2, 0), "idle-shard") as crew:
        await crew.check(10.0)
        kill("ray::Shard")()
        with pytest.raises(OutriderError):
            await until_unwell(crew)
    require_nothing_left()


@pytest.mark.soak
async def test_an_engine_whose_owner_is_killed_leaves_nothing(local_ray: None, tiny_llama: Path) -> None:
    class Owner:
        async def __init__(self, config: EngineConfig) -> None:  # type: ignore[misc]
            self.crew = await Crew.start(config, "orphans", lambda _: None)

        async def pid(self) -> int:
            return os.getpid()

    # Detached, as Serve's replicas are: what such an actor made ends with it, and not only with its job.
    owner = ray.remote(Owner).options(num_cpus=0, name="owner", lifetime="detached").remote(config_of(tiny_llama, 2, 1))
    pid = await ask(owner.pid.remote(), 200.0)
    assert all(pids(title) for title in TITLES)
    os.kill(pid, signal.SIGKILL)
    require_nothing_left()


async def test_no_room_is_told_with_the_numbers(local_ray: None, tiny_llama: Path) -> None:
    config = parse(
        {"target": {"model": str(tiny_llama), "tensor_parallel": 3}, "placement": {"cpus": 4, "wait_s": 1.0}}
    )
    with pytest.raises(CapacityError, match=r"12 CPU[\s\S]*: 8 CPU[\s\S]*waited 1 s; free at the end"):
        await Crew.start(config, "large", lambda _: None)
    require_nothing_left()


async def test_what_a_drafter_cannot_load_ends_the_start_with_its_reason(local_ray: None, tiny_llama: Path) -> None:
    config = config_of(tiny_llama, 1, 1)
    draft = config.drafts[0].model_copy(update={"model": "/nowhere/at/all", "layers": None})
    with pytest.raises(ModelNotFound, match="/nowhere/at/all"):
        await Crew.start(config.model_copy(update={"drafts": (draft,)}), "lost-model", lambda _: None)
    require_nothing_left()
