"""How long a round of candidates and verdicts takes between a verifier and a drafter in another process.

    python -m benchmarks.channel --rounds 400

A round is what `RemoteProposer` makes of it: a message of verdicts, a message of rows, an answer of k drafts a
row, all through the wire format and a gloo channel; the drafter at the other end answers by table look-up, so that
what is timed is the data plane alone. `bare` is one byte there and back over a pipe between two processes: what
waking another process costs on this machine, as busy as it is, in the same run.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from benchmarks.protocol import arguments, report
from cluster.draft.recycling import RecyclingProposer
from cluster.draft.remote import RemoteProposer
from cluster.draft.server import DraftServer, Sync
from cluster.messages import Knobs, SequenceView, Verdict
from cluster.parallel.groups import Endpoint, Rendezvous
from cluster.parallel.peer import meet
from cluster.request import Sampling

ROWS = (1, 8, 32)
K = 7
PROMPT = 256


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="of every case, interleaved (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=400, help="timed a case (default: %(default)s)")
    asked = parser.parse_args()
    meeting = Rendezvous.host()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    peer = context.Process(target=_peer, args=(meeting.endpoint, theirs), daemon=True)
    peer.start()
    channel = meet(meeting.endpoint, 0, name="benchmark", meet_s=60.0)
    remote = RemoteProposer("recycling", wait_s=5.0)
    remote.attach(channel)
    cases: dict[str, Callable[[], float]] = {"bare": lambda: _bare(ours)}
    cases |= {f"{rows} rows": Verifier(remote, rows).round for rows in ROWS}
    times: dict[str, list[list[float]]] = {name: [] for name in cases}
    for _ in range(asked.repeats):
        for name, once in cases.items():
            for _ in range(20):
                once()
            times[name].append(sorted(once() for _ in range(asked.rounds)))
    ours.send_bytes(b"")
    remote.detach()
    channel.wait_closed(5.0)
    peer.join(10)
    cells = {
        name: {
            "p50_ms": statistics.median(_at(repeat, 0.5) for repeat in repeats),
            "p50_ms_quietest": min(_at(repeat, 0.5) for repeat in repeats),
            "p99_ms": statistics.median(_at(repeat, 0.99) for repeat in repeats),
        }
        for name, repeats in times.items()
    }
    for name, cell in cells.items():
        print(f"{name:>8}  " + "  ".join(f"{figure} {value:.3f}" for figure, value in cell.items()))
    report("channel", asked.out, {"k": K, "rounds": asked.rounds, "hits": remote.stats.hits, "cases": cells})


class Verifier:
    """`rows` sequences that grow by what is offered and a token of the target's own."""

    def __init__(self, remote: RemoteProposer, rows: int) -> None:
        self._remote = remote
        self._first = rows * 1000
        self._tokens = [[(row + n) % 50 for n in range(PROMPT)] for row in range(rows)]
        for view in self._views():
            remote.open(view)

    def round(self) -> float:
        """Milliseconds of one."""
        views = self._views()
        began = time.perf_counter()
        offers = self._remote.propose(views, Knobs())
        taken = time.perf_counter() - began
        drafted = {offer.sequence: offer.tokens for offer in offers}
        verdicts = []
        for row, tokens in enumerate(self._tokens):
            news = (*drafted.get(self._first + row, ()), (tokens[-1] + 1) % 50)
            tokens.extend(news)
            verdicts.append(Verdict(self._first + row, len(news) - 1, news))
        began = time.perf_counter()
        self._remote.settle(verdicts)
        return (taken + time.perf_counter() - began) * 1e3

    def _views(self) -> list[SequenceView]:
        return [
            SequenceView(
                self._first + row, tokens, PROMPT, len(tokens) - 1, Sampling(10**6), "coupled", "", None, K, 10**6
            )
            for row, tokens in enumerate(self._tokens)
        ]


def _bare(pipe: Connection) -> float:
    began = time.perf_counter()
    pipe.send_bytes(b"x")
    pipe.recv_bytes()
    return (time.perf_counter() - began) * 1e3


def _at(ordered: list[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))]


def _peer(endpoint: Endpoint, pipe: Connection) -> None:
    proposer = RecyclingProposer(100_000)
    server = DraftServer(proposer, Sync(proposer))
    channel = meet(endpoint, 1, name="benchmark", meet_s=60.0)
    server.attach(channel)
    stop = threading.Event()
    thread = threading.Thread(target=server.run, args=(stop,))
    thread.start()
    while message := pipe.recv_bytes():
        pipe.send_bytes(message)
    stop.set()
    thread.join()
    channel.wait_closed(5.0)


if __name__ == "__main__":
    main()
