"""Drafters lent to engines: none while nobody asks, started for the first request, gone again afterwards."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.client import Client
from deploy.local import LocalServing, ServeFile
from tests.e2e.conftest import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    # Not ours to mend: Ray leaves pipes and log files for the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture
def served(tiny_config: Callable[..., Path]) -> Iterator[ServeFile]:
    draft = {
        "kind": "model",
        "layers": {"first": 2},
        "drafter": {"place": "shared", "replicas": 2, "cpus": 0.2, "wait_ms": 200},
    }
    path = tiny_config(drafts=[draft], placement={"cpus": 0.4})
    document: Any = yaml.safe_load(path.read_text())
    scaling = {
        "min_replicas": 0, "max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 0.5,
        "downscale_delay_s": 2.0, "look_back_period_s": 2.0, "metrics_interval_s": 0.5,
    }  # fmt: skip
    drafter = {"name": "Drafter0", "autoscaling_config": scaling, "max_ongoing_requests": 1}
    document["applications"][0]["deployments"].append(drafter)
    path.write_text(yaml.safe_dump(document))
    file, before = ServeFile.read(path), dict(os.environ)
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    with LocalServing(file, lambda _: None, ready_s=300.0):
        yield file
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    for _ in range(3):  # here, where the marks above hold, and not at the end of the session
        gc.collect()


def lenders() -> int:
    from ray import serve

    [app] = serve.status().applications.values()
    return app.deployments["Drafter0"].replica_states.get("RUNNING", 0)


def test_drafters_come_with_the_work_and_go_with_it(served: ServeFile) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "seed": 5, "temperature": 0.2, "ignore_eos": True}
    with Client(served.url, silence_s=120.0) as client:
        assert lenders() == 0
        plain = client.complete("on and on", speculation={"enabled": False}, **options)

        def two() -> bool:
            assert client.complete("on and on", **options).text == plain.text
            return lenders() == 2

        wait_until(two, 300.0, "two drafters were started for an engine with work")

        def drafted() -> bool:
            said = client.complete("on and on", **options)
            assert said.text == plain.text
            return said.usage.drafted > 0

        wait_until(drafted, 120.0, "a shared drafter drafts")
    wait_until(lambda: lenders() == 0, 120.0, "an idle engine lets its drafters go")
