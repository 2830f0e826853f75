"""The arguments of `outrider simulate`, apart from the command, which takes a second to import.

Knows: names, defaults, help.
Refuses to know: what they mean.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `outrider simulate`."""
    add = parser.add_argument
    add("--target", default="8:20,256:60", metavar="ROWS:MS,...", help="the target's step times (default: %(default)s)")
    add("--draft", default="2", metavar="ROWS:MS,...", help="a draft step's, or one time (default: %(default)s)")
    add("--launch", type=float, default=0.0, metavar="MS", help="added to every step (default: %(default)s)")
    pair = parser.add_mutually_exclusive_group()
    pair.add_argument("--alpha", type=float, default=0.8, metavar="A", help="acceptance (default: %(default)s)")
    pair.add_argument("--acceptance", type=Path, metavar="FILE", help="acceptance by position, measured on a real pair")
    add("--workload", metavar="NAME", help="which of FILE's; default: their mean")
    add("--miss-power", type=float, default=1.0, metavar="R", help="how soon a miss is among the draft's next tokens")
    add("--k", default="7", metavar="K,...", help="draft lengths (default: %(default)s)")
    add("--budget", type=int, default=16, metavar="N", help="outcomes guessed ahead a sequence (default: %(default)s)")
    add("--most-rows", type=int, default=96, metavar="N", help="and a drafter (default: %(default)s)")
    add("--wait", type=float, default=12.0, metavar="MS", help="for a draft made ahead, at most (default: %(default)s)")
    add("--drafters", type=int, default=1, metavar="N", help="draft devices (default: %(default)s)")
    add(
        "--target-devices",
        type=int,
        default=4,
        metavar="N",
        help="devices whose step times --target gives (default: %(default)s)",
    )
    add("--batches", default="1,8,32", metavar="B,...", help="1 to 64 each (default: %(default)s)")
    add("--modes", metavar="M,...", help="of none, colocated, sync, lookahead, pearl (default: all)")
    add("--target-wider", metavar="ROWS:MS,...", help="the target's step times had it the draft devices too")
    add(
        "--wider-efficiency",
        type=float,
        default=0.85,
        metavar="E",
        help="assumed without --target-wider (default: %(default)s)",
    )
    add(
        "--seconds",
        type=float,
        default=2.0,
        metavar="S",
        help="real time each figure is measured for (default: %(default)s)",
    )
    add("--kill-after", type=float, metavar="S", help="kill the drafters after so many of them")
    add("--seed", type=int, default=0, metavar="S")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    from deploy.simulation.command import run

    return run(arguments)
