"""The file: a Serve configuration with ours under its args."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cluster.config import (
    BUILDER,
    Config,
    KnobConfig,
    load_yaml,
    parse,
)
from cluster.errors import ConfigError


def write(path: Path, document: object) -> Path:
    file = path / "serve.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def application(args: object = None, import_path: str = BUILDER) -> dict[str, object]:
    return {"name": "a", "import_path": import_path} | ({} if args is None else {"args": args})


def test_file(tmp_path: Path) -> None:
    other = application({"unrelated": 1}, "other.pool:build")
    file = write(tmp_path, {"applications": [other, application({"knobs": {"k": 2}})]})
    assert load_yaml(file) == parse({"knobs": {"k": 2}})
    assert load_yaml(str(file)) == load_yaml(file)


def test_file_without_args_is_the_default(tmp_path: Path) -> None:
    assert load_yaml(write(tmp_path, {"applications": [application()]})) == Config()


def test_file_with_knobs_starts_with_them(tmp_path: Path) -> None:
    app = application({"knobs": {"k": 2, "rule": "ratio"}})
    app["deployments"] = [{"name": "Ingress", "user_config": {"other": 1}}, {"name": "Engine", "user_config": {"k": 9}}]
    assert load_yaml(write(tmp_path, {"applications": [app]})).knobs == KnobConfig(k=9, rule="ratio")
    app["deployments"] = [{"name": "Engine", "user_config": {"kk": 9}}]
    with pytest.raises(ConfigError, match=r"applications\.0\.deployments\.0\.user_config: kk: unknown key"):
        load_yaml(write(tmp_path, {"applications": [app]}))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (None, "not a Serve config file: it has no list `applications`"),
        ([1], "not a Serve config file"),
        ({"applications": {}}, "not a Serve config file"),
        ({"applications": []}, "import paths: none"),
        ({"applications": [application(import_path="x:y")]}, f"import_path {BUILDER}; import paths: x:y"),
        ({"applications": [application(), application()]}, "exactly one application"),
        (
            {"applications": [application(import_path="x:y"), application({"cach": 1})]},
            r"applications\.1\.args: cach: unknown key; did you mean cache\?",
        ),
        ({"applications": [application([1])]}, r"applications\.0\.args: the configuration must be a mapping"),
    ],
)
def test_file_that_holds_no_configuration(tmp_path: Path, document: object, words: str) -> None:
    file = write(tmp_path, document)
    with pytest.raises(ConfigError, match=words) as caught:
        load_yaml(file)
    assert str(caught.value).startswith(str(file))


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_yaml(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_yaml(tmp_path)
    torn = tmp_path / "torn.yaml"
    torn.write_text("applications: [\n  {name: a\n")
    with pytest.raises(ConfigError, match=r"(?s)not YAML: .*line 3"):
        load_yaml(torn)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not YAML"):
        load_yaml(binary)
