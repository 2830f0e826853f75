"""The other process of channel tests: `python -m tests.drafting_peer ROLE PORT [...]`.

echo      sends back whatever arrives, until its peer leaves
model     serves a draft model from a directory until its peer leaves
It dies with its parent.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from pathlib import Path

from cluster.draft.model import ModelProposer
from cluster.draft.proposer import Proposer
from cluster.draft.server import DraftServer, Sync
from cluster.errors import PeerLost
from cluster.kv.blocks import BlockPool
from cluster.kv.cache import KVCache
from cluster.kv.keys import KeyContext
from cluster.parallel.channel import Channel
from cluster.parallel.groups import Endpoint
from cluster.parallel.peer import meet


def main(role: str, port: str, name: str, *rest: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    proposer = from_directory(*rest) if role == "model" else None
    channel = meet(Endpoint("127.0.0.1", int(port)), 1, name=name)
    if proposer is None:
        echo(channel)
    else:
        serve(channel, proposer)
    channel.wait_closed(5.0)


def echo(channel: Channel) -> None:
    bell = threading.Event()
    channel.listen(bell)
    try:
        while True:
            bell.clear()
            while (message := channel.poll()) is not None:
                channel.send(message)
            bell.wait()
    except PeerLost:
        channel.close()


def serve(channel: Channel, proposer: Proposer) -> None:
    server = DraftServer(proposer, Sync(proposer))
    server.attach(channel)
    stop = threading.Event()
    thread = threading.Thread(target=server.run, args=(stop,))
    thread.start()
    while server.verifiers:
        stop.wait(0.05)
    stop.set()
    thread.join()


def from_directory(directory: str) -> Proposer:
    import torch

    from cluster.model.load import load_model, locate
    from cluster.model.torch_runner import TorchRunner, arena_for

    torch.set_num_threads(1)
    loaded = load_model(locate(str(Path(directory))), dtype=torch.float32, device=torch.device("cpu"))
    runner = TorchRunner(loaded, arena_for(loaded.info, 64, block_tokens=8))
    return ModelProposer(runner, KVCache(BlockPool(64), 8, KeyContext("draft")), 512)


if __name__ == "__main__":
    main(*sys.argv[1:])
