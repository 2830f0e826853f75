"""A Ray of one's own on this machine, with the application of one config file on it.

Knows: how a Serve config file is applied without a dashboard, what a start looks like from outside,
and how everything ends again.
Refuses to know: terminals; progress lines go to a callback.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

import cluster.errors as errors
from cluster.config import BUILDER, Config, KnobConfig, load_yaml, parse_knobs
from cluster.errors import ConfigError, EngineStopped, OutriderError, PeerLost
from deploy.reaper import Reaper

Report = Callable[[str], None]

#: Longest from starting Ray to the application answering, in seconds; a first start converts the model.
READY_S = 900.0
POLL_S = 0.25
#: Where Serve listens when a config file does not say.
HOST, PORT = "127.0.0.1", 8000
#: Bytes of shared memory for Ray's objects: only prompts and chunks of text pass through.
OBJECT_STORE = 128 * 2**20
_OURS = re.compile(r"cluster\.errors\.(\w+): (.+?)(?=\n\S*Traceback|\n\n|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ServeFile:
    """What a Serve config file says about our application."""

    config: Config
    host: str = HOST
    port: int = PORT
    name: str = "outrider"
    route_prefix: str = "/"
    deployments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> ServeFile:
        """Raises ConfigError with the path of what is wrong."""
        config = load_yaml(path)
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        [app] = [app for app in document["applications"] if app.get("import_path") == BUILDER]
        http = document.get("http_options") or {}
        deployments = {entry["name"]: _without(entry, "name") for entry in app.get("deployments") or ()}
        parse_knobs(deployments.get("Engine", {}).get("user_config"), config.knobs)  # refuse early
        return cls(
            config,
            host=str(http.get("host", HOST)),
            port=int(http.get("port", PORT)),
            name=str(app.get("name", "default")),
            route_prefix=str(app.get("route_prefix", "/")),
            deployments=deployments,
        )

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}{self.route_prefix.rstrip('/')}"

    @property
    def knobs(self) -> KnobConfig:
        """The knobs in force: the file's user_config over its args."""
        return parse_knobs(self.deployments.get("Engine", {}).get("user_config"), self.config.knobs)

    def without_speculation(self) -> ServeFile:
        """The same, drafting nothing."""
        engine = dict(self.deployments.get("Engine", {}))
        engine["user_config"] = {**(engine.get("user_config") or {}), "k": 0}
        config = self.config.model_copy(update={"drafts": ()})
        return replace(self, config=config, deployments={**self.deployments, "Engine": engine})


def require_free_port(host: str, port: int) -> None:
    """Raises ConfigError when nobody could listen there; cheap, and before anything is started."""
    family = socket.AF_INET6 if _is_v6(host) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} cannot be used ({error.strerror}): choose another with --port, or end "
                "whatever listens there"
            ) from None


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class LocalServing:
    """Context manager: inside it, the application of `file` answers at `file.url`.

    Enter it on the main thread: the system ends Ray's processes when the thread that started them
    ends, so that killing this process leaves none behind. Raises ConfigError, ModelError and its
    kinds, CapacityError as building the engine does, PeerLost at the deadline.
    """

    def __init__(self, file: ServeFile, report: Report, ready_s: float = READY_S) -> None:
        self._file = file
        self._report = report
        self._ready_s = ready_s
        self._reaper: Reaper | None = None

    def __enter__(self) -> LocalServing:
        require_free_port(self._file.host, self._file.port)
        try:
            self._start()
            self._wait_running()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the application and Ray. Safe to call twice."""
        reaper, self._reaper = self._reaper, None
        if reaper is None:
            return
        import ray
        from ray import serve

        self._report("shutting down")
        reaper.note()
        # Ray prints the controller's orderly end to our standard output as if it had failed.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            try:
                serve.shutdown()
            finally:
                ray.shutdown()
                reaper.close()

    def check(self) -> None:
        """Call it every few seconds. Raises EngineStopped when the application can no longer answer."""
        self._note()
        status = self._status()
        if status is None or status.status not in ("RUNNING", "DEPLOYING", "UNHEALTHY"):
            raise EngineStopped(f"the application is {getattr(status, 'status', 'gone')}")

    def _start(self) -> None:
        # A cluster of this process alone: no token to find, no other cluster to join.
        os.environ["RAY_AUTH_MODE"] = "disabled"
        os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # A replica that can still act ends by itself: one that Serve finds unhealthy is frozen and would not hear it.
        os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
        # Ray makes its workers as nice as can be, in favour of its own daemons; here the worker is the service.
        os.environ.setdefault("RAY_worker_niceness", "0")
        self._report("starting Ray on this machine")
        import ray
        from ray import serve
        from ray.serve.config import HTTPOptions

        from deploy.app import application

        self._reaper = Reaper()
        with _own_sigterm():
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=max(2, len(os.sched_getaffinity(0))),
                object_store_memory=OBJECT_STORE,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._reaper.note()
        self._report("starting the application")
        serve.start(
            proxy_location="HeadOnly",
            http_options=HTTPOptions(host=self._file.host, port=self._file.port),
            logging_config={"enable_access_log": False},
        )
        target = application(self._file.config, self._file.deployments)
        serve.run_many(
            [serve.RunTarget(target, self._file.name, self._file.route_prefix)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def _note(self) -> None:
        if self._reaper is not None:
            self._reaper.note()

    def _wait_running(self) -> None:
        began, last = time.monotonic(), ""
        while True:
            self._note()
            status = self._status()
            if status is not None:
                if status.status == "RUNNING":
                    return
                self._raise_failure(status)
            news = _verifier_news() or "waiting for the engine's process"
            if news != last:
                last = news
                self._report(news)
            if time.monotonic() - began > self._ready_s:
                raise PeerLost(f"the application was not ready after {self._ready_s:.0f} s; it was at: {last}")
            time.sleep(POLL_S)

    def _status(self) -> Any:
        from ray import serve

        return serve.status().applications.get(self._file.name)

    def _raise_failure(self, status: Any) -> None:
        """Turn what Serve says about a failed start into the error that was raised, without its traceback."""
        told = "\n\n".join([*(d.message for d in status.deployments.values()), status.message])
        ours = [match for match in _OURS.finditer(told) if issubclass(getattr(errors, match[1], type), Exception)]
        if ours:
            kind: type[OutriderError] = getattr(errors, ours[-1][1])
            raise kind(ours[-1][2].strip())
        if status.status == "DEPLOY_FAILED":
            raise EngineStopped(f"the application could not be started: {told.strip()[-2000:]}")


def _verifier_news() -> str:
    """The newest line of the engine being built; empty when there is none to ask yet."""
    import ray
    from ray.util import list_named_actors

    from actors.launch import VERIFIER_PREFIX

    for entry in list_named_actors(all_namespaces=True):
        if entry["name"].startswith(VERIFIER_PREFIX):
            with contextlib.suppress(ValueError, ray.exceptions.RayError):  # gone, or too busy loading to answer
                actor: Any = ray.get_actor(entry["name"], namespace=entry["namespace"])
                progress: Any = ray.get(actor.progress.remote(), timeout=5.0)
                return str(progress.news)
    return ""


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the process's own handler of SIGTERM: starting Ray puts two of its own before it."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _is_v6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _without(entry: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != key}
