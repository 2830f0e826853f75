"""The arguments of `outrider bench`, apart from the command, which takes seconds to import.

Knows: names, defaults, help.
Refuses to know: what is measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

SUITES = ("smollm2", "pair")
PARTS = ("speed", "latency", "curves")
PEERS = ("vllm", "transformers", "llama.cpp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `outrider bench`."""
    add = parser.add_argument
    add("--minutes", type=float, default=12.0, metavar="M", help="begin no turn after so long (default: %(default)s)")
    add("--repeats", type=int, default=5, metavar="N", help="turns of each cell at most (default: %(default)s)")
    add("--suites", nargs="+", choices=SUITES, default=list(SUITES), help="pair: where `make pair` fetched it")
    add(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="speed: tokens a second; latency: first token of a long prompt, start; curves: over batch, context and k",
    )
    add("--contenders", nargs="+", metavar="NAME", help="only these (as the table names them); default: all there are")
    add("--cells", nargs="+", metavar="NAME", help='only these, such as "code x1"; default: all of the parts')
    add(
        "--peer-python",
        action="append",
        default=[],
        metavar="PEER=PYTHON",
        help=f"interpreter with a peer ({', '.join(PEERS)}); default: .venv-PEER/bin/python here, else this one",
    )
    add("--gguf", action="append", default=[], metavar="MODEL=FILE", help="a model's GGUF for llama.cpp")
    add("--data", type=Path, metavar="DIR", help="directory of code.jsonl, chat.jsonl, json.jsonl; default: our own")
    add("--tokens", type=int, default=128, metavar="N", help="longest answer (default: %(default)s)")
    add("--kv-memory", default="1GiB", metavar="SIZE", help="for keys and values, each engine (default: %(default)s)")
    add("--threads", type=int, metavar="N", help="of each engine; default: the cores of this process")
    add("--out", type=Path, default=Path("benchmarks/out/bench"), metavar="DIR", help="default: %(default)s")
