"""The arguments of `outrider doctor`, apart from the command, which takes seconds to import.

Knows: names, defaults, help.
Refuses to know: what is examined.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `outrider doctor`."""
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="Serve config file to examine (default: ray_config.yaml)")
    add("--tokens", type=int, default=48, metavar="N", help="answer length of each measurement (default: %(default)s)")
    add("--repeats", type=int, default=3, metavar="N", help="turns each contender takes (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
