"""Writes the parts of the pages that follow from the tree: `make docs`; tests/test_project.py compares them.

Knows: where the generated parts lie and what each folder is for.
Refuses to know: what a file is for: the file's own first line says that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from cluster.config import reference

ROOT = Path(__file__).resolve().parent.parent
#: Folders shown file by file, with what each is for.
FOLDERS = {
    "cluster": "decides and computes: one process, no Ray, no HTTP",
    "cluster/kv": "where keys and values live",
    "cluster/kernels": "C++ for CPUs, each beside a plain torch twin that tests take for the truth",
    "cluster/text": "between text and token ids",
    "cluster/model": "from files on disk to logits",
    "cluster/model/attention": "ours, reached from transformers' modelling code",
    "cluster/draft": "who guesses the next tokens",
    "cluster/draft/suffix": "from how text went on before",
    "cluster/verify": "what the target says about the guesses",
    "cluster/verify/rules": "one file a rule",
    "cluster/sched": "whose tokens are computed next",
    "cluster/control": "turns the knobs between steps",
    "cluster/parallel": "several devices",
    "cluster/observe": "what is counted",
    "actors": "places and carries: plain classes, made actors where they are launched",
    "deploy": "exposes: Serve application, API, client, command line",
    "deploy/openai": "the OpenAI API",
    "deploy/doctor": "`outrider doctor`: what this machine and configuration give, and what to change",
    "deploy/simulation": "`outrider simulate`: real parts around devices that are only emulated",
    "benchmarks": "each writes its figures and the command that made them",
    "benchmarks/peers": "`outrider bench`: ours and every peer that is installed, in turns",
    "benchmarks/peers/engines": "one file an engine; runs in a process and an environment of its own",
}
#: Everything else at the top, shown as one line each.
PLACES = {
    "tests/": "mirrors the packages; laws/ over random schedules, e2e/ with Ray and real processes",
    "docs/": "architecture, configuration, decisions",
    "ray_config.yaml": "what `serve deploy` and `outrider serve` read",
    "Makefile": "demo, test, lint, bench, peers, soak, pair, docs, clean",
    "pyproject.toml": "ranges of dependencies, layers, linters, tests",
    "constraints.txt": "the exact versions this tree is tested with",
    ".ci/run": "lint and test from a clean clone",
}
SOURCES = {".py", ".cpp", ".c", ".h"}
WIDTH = 34


def main() -> None:
    """Rewrite README.md and docs/configuration.md in place."""
    for page, mark, lines in ((ROOT / "README.md", "tree", tree()), (ROOT / "docs/configuration.md", "keys", keys())):
        page.write_text(replaced(page.read_text(), mark, lines))


def tree() -> list[str]:
    """The annotated file tree, as the lines of a code block."""
    lines = [f"{place:<{WIDTH}}{note}" for place, note in PLACES.items() if place == "ray_config.yaml"]
    for folder in FOLDERS:
        if (ROOT / folder).is_dir() and "/" not in folder:
            lines.extend(_folder(ROOT / folder))
    lines.extend(f"{place:<{WIDTH}}{note}" for place, note in PLACES.items() if place != "ray_config.yaml")
    return ["```text", *lines, "```"]


def keys() -> list[str]:
    return reference()


def replaced(page: str, mark: str, lines: list[str]) -> str:
    """`page` with the lines between its two `mark` comments replaced."""
    opened, closed = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, found, rest = page.partition(opened)
    _, closing, after = rest.partition(closed)
    if not found or not closing:
        raise ValueError(f"the page has no part {opened} ... {closed}")
    return "\n".join([before + opened, *lines, closed + after])


def first_line(source: Path) -> str:
    """What a source file says it is: the first sentence of its opening, without the full stop."""
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".py":
        opening = ast.get_docstring(ast.parse(text)) or ""
    else:
        opening = "\n".join(line.removeprefix("//").strip() for line in text.splitlines())
    paragraph = opening.strip().partition("\n\n")[0]
    return " ".join(paragraph.split()).partition(". ")[0].rstrip(".")


def _folder(folder: Path) -> Iterator[str]:
    """One line for the folder, then its files, then its folders."""
    name = folder.relative_to(ROOT).as_posix()
    if name not in FOLDERS:
        raise ValueError(f"say in docs/refresh.py what the folder {name} is for")
    depth = name.count("/")
    yield f"{'  ' * depth + folder.name + '/':<{WIDTH}}{FOLDERS[name]}"
    entries = sorted(folder.iterdir())
    for file in entries:
        if file.suffix in SOURCES and file.name != "__init__.py":
            yield f"{'  ' * (depth + 1) + file.name:<{WIDTH}}{first_line(file)}"
    for inner in entries:
        if inner.is_dir() and any(inner.rglob("*.py")):
            yield from _folder(inner)


if __name__ == "__main__":
    main()
