"""How long `outrider generate` takes to its first token, from the start of the command.

Knows: that the model's conversion and the kernels are in the cache after one go, which is not counted.
Refuses to know: why it takes that long.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from cluster.errors import OutriderError

_WAIT_S = 120.0
_COMMAND = ("-m", "deploy.cli", "generate", "Name three rivers.", "--max-tokens", "4")


def first_token_s(model: str, repeats: int) -> list[float]:
    """Seconds to the first byte of the answer, each go a process of its own. Raises OutriderError where one fails."""
    return [_go(model) for _ in range(repeats + 1)][1:]


def _go(model: str) -> float:
    began = time.monotonic()
    command = [sys.executable, *_COMMAND, "--model", model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        deadline = threading.Timer(_WAIT_S, child.kill)
        deadline.start()
        try:
            first = child.stdout.read(1)
            took = time.monotonic() - began
            _, errors = child.communicate()
        finally:
            deadline.cancel()
    if child.returncode != 0 or not first:
        raise OutriderError(
            f"outrider generate ended with {child.returncode}: {errors.decode(errors='replace')[-300:]}"
        )
    return took
