"""The suffix trie at ten million tokens: memory, microseconds a token appended and a question, against the plain twin.

Text is Python source, read from the installed packages in random order and cut into answers of 512
tokens; questions are contexts from files that never entered, and, as `repeated`, from answers that
did. The twin holds as much as memory bears, and the compiled trie is measured at that size too.
Both run with no eviction, then the compiled one at a tenth of the size with every append evicting.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import sysconfig
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.protocol import report
from cluster.draft.suffix.native import TrieMaker
from cluster.draft.suffix.plain import PlainTrie
from cluster.draft.suffix.trie import Limits, Trie, Wish
from cluster.model.load import locate
from cluster.text.tokenizer import Tokenizer

ANSWER = 512
DEPTH = 64
PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000_000, help="held by the compiled trie")
    parser.add_argument("--plain-tokens", type=int, default=20_000, help="held by the plain twin")
    parser.add_argument("--questions", type=int, default=5000)
    parser.add_argument(
        "--text", type=Path, default=Path(sysconfig.get_paths()["purelib"]), help="directory of .py files"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"), help="where the JSON report goes")
    options = parser.parse_args()
    tokens = read(options.text, options.tokens + ANSWER * 200)
    fresh, known = tokens[options.tokens :], tokens[: options.tokens]
    print(f"{len(known)} tokens of {options.text}")
    maker = TrieMaker()
    if not maker.native:
        raise SystemExit("no compiler here: there is only the plain trie")
    small = known[: options.plain_tokens]
    runs: dict[str, tuple[Callable[[Limits], Trie], array[int], int]] = {
        "plain": (PlainTrie, small, len(small)),
        "compiled, same text": (maker.make, small, len(small)),
        "compiled": (maker.make, known, len(known)),
        "compiled, evicting": (maker.make, known, len(known) // 10),
    }
    results = {name: measure(*run, fresh, options.questions) for name, run in runs.items()}
    for name, result in results.items():
        print(f"{name:20} {' '.join(f'{key}={value:.6g}' for key, value in result.items())}")
    report("suffix", options.out, results)


def measure(
    make: Callable[[Limits], Trie], text: array[int], capacity: int, fresh: array[int], questions: int
) -> dict[str, float]:
    """Append all of `text`, answer by answer, to a trie of `capacity` tokens; then ask."""
    before = resident()
    trie = make(Limits(DEPTH, max(capacity, 2 * DEPTH), 2**30))
    pieces = [text[at : at + ANSWER].tolist() for at in range(0, len(text), ANSWER)]
    used = resident()
    start = time.perf_counter()
    for piece in pieces:
        trie.start(0)
        trie.append(piece)
        trie.stop()
    seconds = time.perf_counter() - start
    grown = resident() - used
    sizes = trie.sizes
    figures = {
        "tokens_appended": float(len(text)),
        "tokens_held": float(sizes.tokens),
        "nodes": float(sizes.nodes),
        "bytes_per_token": sizes.bytes / sizes.tokens,
        "resident_bytes_per_token": grown / sizes.tokens,
        "append_us_per_token": seconds * 1e6 / len(text),
    }
    recent = text[-min(len(text), capacity) :]
    for mode in ("path", "tree"):
        for name, source in (("fresh", fresh), ("repeated", recent)):
            micros, drafted = ask(trie, source, questions, Wish(limit=16, mode=mode))
            figures |= {f"{mode}_{name}_us": micros, f"{mode}_{name}_tokens": drafted}
    trie.close()
    figures["resident_bytes_before"] = float(before)
    return figures


def ask(trie: Trie, source: array[int], questions: int, wish: Wish) -> tuple[float, float]:
    """Median microseconds a question with 64 tokens of context, and tokens drafted on average."""
    rng = random.Random(0)
    took: list[float] = []
    drafted = 0
    for _ in range(questions):
        at = rng.randrange(DEPTH, len(source))
        context = source[at - DEPTH : at].tolist()
        start = time.perf_counter()
        draft = trie.speculate(0, context, wish)
        took.append(time.perf_counter() - start)
        drafted += len(draft.tokens)
    return statistics.median(took) * 1e6, drafted / questions


def read(root: Path, count: int) -> array[int]:
    """`count` tokens of the Python files below `root`, in an order that is always the same."""
    tokenizer = Tokenizer.load(locate("smollm2-135m").directory)
    files = sorted(root.rglob("*.py"))
    random.Random(0).shuffle(files)
    tokens = array("i")
    for text in _texts(files):
        tokens.extend(tokenizer.encode(text))
        if len(tokens) >= count:
            return tokens[:count]
    raise SystemExit(f"{root} has {len(tokens)} tokens of Python, {count} are wanted: lower --tokens")


def _texts(files: list[Path]) -> Iterator[str]:
    for path in files:
        try:
            yield path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


if __name__ == "__main__":
    sys.exit(main())
