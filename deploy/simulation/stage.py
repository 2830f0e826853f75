"""Puts an engine of emulated devices on stage, in one of the modes that are compared.

Knows: who drafts in which mode.
Refuses to know: how long it runs and what it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from cluster.draft.first import FirstOffer
from cluster.draft.proposer import Proposer
from cluster.draft.remote import RemoteProposer
from cluster.model.emulated import EmulatedRunner
from deploy.simulation.drafters import started
from deploy.simulation.gauge import Gauge
from deploy.simulation.measure import Running
from deploy.simulation.parts import emulated_draft, emulated_engine, script_of
from deploy.simulation.scenario import Mode, Scenario

#: How long a row of mode sync waits for its own draft, in seconds: longer than any emulated round, shorter than a hang.
_SYNC_WAIT_S = 5.0


@contextmanager
def staged(scenario: Scenario, mode: Mode, batch: int) -> Iterator[Running]:
    """An engine for `batch` sequences in this mode; what it started ends with the block."""
    script = script_of(scenario, batch)
    target = EmulatedRunner(script, scenario.target)
    with ExitStack() as stack:
        proposers: list[Proposer] = []
        drafters = None
        if mode == "colocated":
            proposers.append(emulated_draft(scenario, script))
        elif mode != "none":
            remote = RemoteProposer("model", _SYNC_WAIT_S if mode == "sync" else scenario.wait_ms / 1e3)
            drafters = stack.enter_context(started(scenario, mode, batch, remote))
            proposers.append(remote)
        gauge = Gauge(FirstOffer(proposers))
        engine = emulated_engine(scenario, target, script, gauge, scenario.k if proposers else 0)
        ranks_LP = script.ranks(scenario.acceptance, scenario.k)
        yield Running(engine, script, ranks_LP, target, gauge, drafters)
