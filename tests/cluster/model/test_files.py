"""The manifest: damage is noticed, and an untouched model costs no reading."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from cluster.errors import ModelCorrupt
from cluster.model import files as files_module
from cluster.model.files import MANIFEST, ModelFiles, verify_manifest, write_manifest
from cluster.model.load import load_model


@pytest.fixture
def sealed(tiny_llama: Path, tmp_path: Path) -> Path:
    """A tiny model with a manifest, which the test may damage."""
    directory = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    write_manifest(directory, {"file": "made in a test"})
    return directory


def load(directory: Path) -> str:
    return load_model(ModelFiles(directory, "sealed"), dtype=torch.float32, device=torch.device("cpu")).info.fingerprint


def test_a_whole_model_is_verified_without_reading_it(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> str:
        raise AssertionError(f"{path} was read in full")

    monkeypatch.setattr(files_module, "sha256_of", forbidden)
    checksums = verify_manifest(sealed)
    assert checksums is not None
    assert "model.safetensors" in checksums


def test_a_directory_without_manifest_is_taken_as_it_is(tiny_llama: Path) -> None:
    assert verify_manifest(tiny_llama) is None


def test_one_changed_byte_is_noticed_even_when_the_modification_time_is_put_back(sealed: Path) -> None:
    path = sealed / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x55")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors \(\d+ bytes\) was changed: expected sha256"):
        load(sealed)


def test_a_shorter_file_names_both_sizes(sealed: Path) -> None:
    path = sealed / "tokenizer.json"
    whole = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(10)
    with pytest.raises(ModelCorrupt, match=rf"tokenizer\.json .*expected {whole} bytes, found 10"):
        load(sealed)


def test_a_lost_file_is_noticed(sealed: Path) -> None:
    (sealed / "generation_config.json").unlink()
    with pytest.raises(ModelCorrupt, match=r"generation_config\.json .*found 0"):
        load(sealed)


def test_a_copy_is_verified_once_and_then_stamped(sealed: Path, tmp_path: Path) -> None:
    fingerprint = load(sealed)
    copy = Path(shutil.copytree(sealed, tmp_path / "copy"))
    stamped_before = (copy / MANIFEST).read_text()
    assert load(copy) == fingerprint
    stamped_after = (copy / MANIFEST).read_text()
    assert stamped_after != stamped_before
    assert load(copy) == fingerprint
    assert (copy / MANIFEST).read_text() == stamped_after
    assert not [path for path in copy.iterdir() if path.name.startswith(f"{MANIFEST}.")]


@pytest.mark.parametrize("text", ["{}", '{"files": {"a": {}}}', '{"files": 3}', "{"])
def test_a_broken_manifest_is_corrupt(text: str, sealed: Path) -> None:
    (sealed / MANIFEST).write_text(text)
    with pytest.raises(ModelCorrupt, match=MANIFEST):
        load(sealed)


def test_the_manifest_lists_every_file(sealed: Path) -> None:
    listed = set(json.loads((sealed / MANIFEST).read_text())["files"])
    assert listed == {path.name for path in sealed.iterdir()} - {MANIFEST}
