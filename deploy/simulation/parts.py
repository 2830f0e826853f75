"""The parts of an engine around emulated devices.

Knows: which real parts a forward pass that is played needs around it.
Refuses to know: modes and processes.
"""

from __future__ import annotations

from cluster.control.length import LengthControl
from cluster.draft.model import ModelProposer
from cluster.draft.proposer import Combiner
from cluster.engine import Engine, Parts
from cluster.kv.blocks import BlockPool
from cluster.kv.cache import KVCache
from cluster.kv.keys import KeyContext
from cluster.messages import Knobs
from cluster.model.emulated import EmulatedRunner, Script
from cluster.sched.scheduler import Limits, Scheduler
from cluster.verify.judge import Judge
from deploy.simulation.scenario import Scenario

_BLOCK = 32
#: Of a draft's cache, where many paths share what they have in common.
_DRAFT_BLOCK = 32
#: Paths alive at once at most, over all lanes.
_PATHS = 4096
#: Emulated drafts fail at random: pauses after unlucky rounds would only blur what is measured.
_NEVER = 1_000_000


def script_of(scenario: Scenario, lanes: int) -> Script:
    """The text, the same in every process."""
    return Script(scenario.seed, lanes, scenario.length)


def emulated_engine(scenario: Scenario, target: EmulatedRunner, script: Script, proposer: Combiner, k: int) -> Engine:
    """An engine for as many sequences as the script has lanes, drafting k tokens a row."""
    cache = _cache(script)
    lanes = script.lanes
    # Drafters keep within it too: every path that is guessed ahead computes up to a block again.
    budget = lanes * (scenario.k + 1 + scenario.budget * 2 * _BLOCK)
    knobs = Knobs(k=k, token_budget=budget, adaptive=False, max_retries=_NEVER)
    return Engine(
        Parts(
            runner=target,
            cache=cache,
            scheduler=Scheduler(cache, Limits(lanes, lanes)),
            judge=Judge(script.vocab_size, frozenset(), None),
            proposer=proposer,
            control=LengthControl(knobs),
            max_context=script.length - 1,
        )
    )


def emulated_draft(scenario: Scenario, script: Script) -> ModelProposer:
    """A draft model with a device and a cache of its own."""
    runner = EmulatedRunner(script, scenario.draft, script.ranks(scenario.acceptance, scenario.k))
    # Paths that are guessed ahead share what is known: only the newest block of it is computed for each of them.
    blocks = script.lanes * (script.length // _DRAFT_BLOCK + 1) + _PATHS * (2 * scenario.k // _DRAFT_BLOCK + 3)
    cache = KVCache(BlockPool(blocks), _DRAFT_BLOCK, KeyContext("emulated draft"))
    return ModelProposer(runner, cache, script.length - 1)


def _cache(script: Script) -> KVCache:
    blocks = script.lanes * (script.length // _BLOCK + 2)
    return KVCache(BlockPool(blocks), _BLOCK, KeyContext("emulated"), prefix=False)
