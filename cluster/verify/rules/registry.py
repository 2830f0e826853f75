"""Every acceptance rule by its name: adding one is a file, a name in `RuleName` and a line here.

Knows: which rules there are.
Refuses to know: what any of them does.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cluster.request import RuleName
from cluster.verify.rules import block, coupled, ratio, threshold, typical
from cluster.verify.rules.base import Rule

RULES: Mapping[RuleName, Rule] = MappingProxyType(
    {module.RULE.name: module.RULE for module in (coupled, ratio, block, threshold, typical)}
)
