"""Groups of processes that compute together, each independent of every other.

Knows: how processes meet (one TCP store a group, bound before anyone is told of it), which backend
carries tensors of which device, and how the loss of a peer shows.
Refuses to know: what is sent, models, Ray. torch.distributed's default group is never touched, so
a process may be in any number of groups, and losing one leaves the others whole.

    owner    rendezvous = Rendezvous.host("10.0.0.1")       binds a free port
             rendezvous.endpoint  -> told to every member   published afterwards, by whatever means
    member   group = join(endpoint, rank, size, ...)        returns when all are there and warmed up

A peer that dies closes its sockets: on gloo every operation under way or begun later fails within
milliseconds. One that freezes is noticed after `timeout_s`. gloo's waits cannot be interrupted, only
timed out, and after either failure the group is dead: close it and join a new one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from cluster.errors import ConfigError, PeerLost

#: Backends by what they are called in the configuration.
BACKENDS = ("auto", "gloo", "nccl")

_POLL_S = 0.02


class Carrier(Protocol):
    """What torch's process groups of every backend can do, as far as it is used here."""

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions = ...) -> dist.Work: ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work: ...

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: dist.GatherOptions
    ) -> dist.Work: ...

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work: ...

    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the members of a group meet. Valid as long as its Rendezvous is open."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Rendezvous:
    """The meeting point of one or more groups, owned by one process, usually rank 0's.

    Established gloo groups survive its end; joining does not.
    """

    def __init__(self, store: TCPStore, endpoint: Endpoint) -> None:
        self._store: TCPStore | None = store
        self.endpoint = endpoint

    @staticmethod
    def host(address: str = "127.0.0.1") -> Rendezvous:
        """Bind a free port; `address` is the name under which the members reach this machine."""
        # Named localhost for the client this object is too: it is in this very process.
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        return Rendezvous(store, Endpoint(address, store.port))

    def close(self) -> None:
        """Stop listening. May be called twice."""
        self._store = None


@dataclass(slots=True)
class Group:
    """This process's membership of one group. `collectives.py` has what can be done with it,
    by one thread at a time.

    device: where the tensors it is meant for live. `data` carries those, `control` tensors on the
    CPU; on a CPU both are one. A group of one has neither.
    """

    name: str
    rank: int
    size: int
    device: torch.device
    timeout_s: float
    data: Carrier | None = None
    control: Carrier | None = None
    _store: Store | None = None  # what a backend asks when something goes wrong
    _lost: str | None = field(default=None, init=False)

    def run(self, what: str, tensor: torch.Tensor, verb: Callable[[Carrier], dist.Work]) -> None:
        """Have the carrier of a tensor's device do something and wait for it, at most `timeout_s`.

        On a GPU it returns once the work is queued. Raises PeerLost, naming group and operation;
        the group is dead afterwards, and its other members learn so at once.
        """
        carrier = self.control if tensor.device.type == "cpu" else self.data
        if self._lost is not None or carrier is None:
            raise PeerLost(self._lost or f"{self}: no longer open")
        work: dist.Work | None = None
        began = time.monotonic()
        try:
            work = verb(carrier)
            work.wait()
            return
        except RuntimeError as error:  # all that torch.distributed raises for a lost or silent peer
            reason = str(error)
        # gloo closes its sockets when the last reference goes, not before: so none may stay here, nor in
        # the frames of an exception that somebody keeps.
        work = carrier = None
        self.lose(what, reason, began)

    def lose(self, what: str, reason: str, began: float) -> NoReturn:
        """Give the group up because of a backend's `reason`; raises PeerLost."""
        others = ", ".join(str(rank) for rank in range(self.size) if rank != self.rank)
        self._lost = (
            f"{self}: {what} failed after {time.monotonic() - began:.1f} s, "
            f"{'rank' if self.size == 2 else 'one of ranks'} {others} died or did not answer "
            f"({reason.splitlines()[0]})"
        )
        self.close()
        raise PeerLost(self._lost)

    def close(self) -> None:
        """Leave: peers that still wait for this member learn at once. May be called twice.

        An operation under way in another thread ends first: at the latest after `timeout_s`.
        """
        if self._lost is None:
            self._lost = f"{self}: closed here"
        if self.data is not None and self.data is not self.control:
            self.data.abort()  # what hangs on a GPU for a dead peer's sake
        self.data = self.control = self._store = None

    def __str__(self) -> str:
        return f"group {self.name!r}, rank {self.rank} of {self.size}"


def join(
    endpoint: Endpoint,
    rank: int,
    size: int,
    *,
    name: str = "group",
    backend: str = "auto",
    timeout_s: float = 30.0,
    meet_s: float | None = None,
    device: torch.device | None = None,
    watch: Callable[[], None] | None = None,
) -> Group:
    """Become one of the `size` members that meet at `endpoint`; returns when every one is ready.

    name: distinguishes groups that share an endpoint; each may be joined once.
    backend: "gloo", "nccl" (tensors on the GPU by NCCL, on the CPU by gloo), or "auto": by device.
    timeout_s: deadline of every operation. meet_s: of joining, where that may take longer.
    device: of the tensors exchanged; the CPU when not given.
    watch: called while ranks are missing; may raise when it knows that one will not come.
    Raises ConfigError for a backend that is not here, PeerLost naming the ranks that did not come.
    """
    device = device or torch.device("cpu")
    nccl = _wants_nccl(backend, device)
    if not 0 <= rank < size:
        raise ConfigError(f"group {name!r}: rank {rank} is not one of 0..{size - 1}")
    group = Group(name, rank, size, device, timeout_s)
    if size == 1:
        return group
    meet_s = meet_s or timeout_s
    deadline = time.monotonic() + meet_s
    try:
        client = TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=timedelta(seconds=meet_s))
    except RuntimeError as error:
        raise PeerLost(f"{group}: nobody answers at {endpoint} ({str(error).splitlines()[0]})") from error
    store = PrefixStore(name, client)
    group._store = store
    _call_roll(group, store, deadline, watch)
    began = time.monotonic()
    try:
        group.control = _meet_gloo(group, store, endpoint)
        group.data = _meet_nccl(group, store) if nccl else group.control
    except RuntimeError as error:
        group.lose("meeting", str(error), began)
    _warm_up(group)
    return group


def _wants_nccl(backend: str, device: torch.device) -> bool:
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError(f"backend nccl carries tensors of CUDA devices only, not of {device}: use gloo")
    if device.type == "cuda" and backend != "gloo":
        if not dist.is_nccl_available():
            raise ConfigError("this build of torch has no NCCL: use backend gloo")
        return True
    return False


def _call_roll(group: Group, store: Store, deadline: float, watch: Callable[[], None] | None) -> None:
    """Wait for every member to have come this far, so that whoever is missing can be named."""
    if store.add(f"here/{group.rank}", 1) != 1:
        raise ConfigError(f"{group}: this rank has joined already; every group needs a name or an endpoint of its own")
    missing = set(range(group.size))
    while missing:
        try:
            missing = {rank for rank in missing if not store.check([f"here/{rank}"])}
        except RuntimeError as error:
            raise PeerLost(f"{group}: the meeting point is gone ({str(error).splitlines()[0]})") from error
        if missing and time.monotonic() > deadline:
            shown = ", ".join(map(str, sorted(missing)))
            raise PeerLost(f"{group}: rank {shown} did not come in time")
        if missing:
            if watch is not None:
                watch()
            time.sleep(_POLL_S)


def _meet_gloo(group: Group, store: Store, endpoint: Endpoint) -> Carrier:
    gloo: Any = dist.ProcessGroupGloo  # typed with less than it has
    options = gloo._Options()
    options._timeout = timedelta(seconds=group.timeout_s)
    # Peers connect to the address by which this machine reaches the meeting point: no environment
    # variable has to name an interface, and a host name that resolves to nothing does no harm.
    options._devices = [gloo.create_device(hostname=_own_address(endpoint))]
    carrier: Carrier = gloo(PrefixStore("gloo", store), group.rank, group.size, options)
    return carrier


def _meet_nccl(group: Group, store: Store) -> Carrier:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=group.timeout_s)
    torch.cuda.set_device(group.device)
    carrier: Carrier = nccl(PrefixStore("nccl", store), group.rank, group.size, options)
    return carrier


def _own_address(endpoint: Endpoint) -> str:
    family, _, _, _, address = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect(address)
        own: str = probe.getsockname()[0]
    return own


def _warm_up(group: Group) -> None:
    """Use every communicator once: backends make some on first use, which must not fall into a step."""
    for device in dict.fromkeys((torch.device("cpu"), group.device)):
        total = torch.full((1,), float(group.rank + 1), device=device)
        group.run("warm-up", total, lambda carrier: carrier.allreduce([total]))  # noqa: B023
        expected = group.size * (group.size + 1) / 2
        if float(total) != expected:
            raise PeerLost(f"{group}: the ranks added up to {float(total)}, not {expected}: two members are one")
