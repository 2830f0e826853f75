"""Loading: the same model as transformers builds, or one clear error before anything is allocated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cluster.errors import CapacityError, ConfigError, ModelCorrupt, ModelNotFound, ModelUnsupported
from cluster.model.files import ModelFiles
from cluster.model.load import LoadedModel, load_model, locate
from cluster.model.quiet import quiet_transformers
from tests.tiny import FAMILIES

CPU = torch.device("cpu")


def load(directory: Path, **kwargs: Any) -> LoadedModel:
    return load_model(ModelFiles(directory, directory.name), **{"dtype": torch.float32, "device": CPU, **kwargs})


def reference(directory: Path) -> torch.nn.Module:
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def logits(module: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return module(torch.arange(24)[None] * 7).logits


@pytest.fixture
def copy(tiny_llama: Path, tmp_path: Path) -> Path:
    """A tiny model that the test may damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_logits_of_transformers(family: str, tiny_model: Callable[[str], Path]) -> None:
    loaded = load(tiny_model(family))
    assert torch.equal(logits(loaded.module), logits(reference(tiny_model(family))))
    assert loaded.info.architecture == family
    assert (loaded.info.num_layers, loaded.info.num_kv_heads, loaded.info.head_dim) == (3, 2, 16)
    assert loaded.info.vocab_size == loaded.module.get_output_embeddings().weight.shape[0]


def test_the_module_is_ready_to_run_and_cannot_be_trained(tiny_llama: Path) -> None:
    loaded = load(tiny_llama, dtype=torch.bfloat16)
    assert not loaded.module.training
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())
    assert loaded.info.dtype == "bfloat16"
    assert loaded.info.device == "cpu"


def test_what_happens_to_the_file_later_does_not_reach_the_weights(copy: Path) -> None:
    module = load(copy).module
    before = logits(module)
    path = copy / "model.safetensors"
    with path.open("r+b") as file:  # in place, where a mapped file would show it
        file.write(b"\0" * path.stat().st_size)
    assert torch.equal(logits(module), before)


def test_a_sharded_model_is_the_same_model(tiny_llama: Path, tmp_path: Path) -> None:
    with quiet_transformers():
        reference(tiny_llama).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(logits(load(tmp_path).module), logits(load(tiny_llama).module))


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
@pytest.mark.parametrize("layers", [(0, 2), (2, 0), (1,)])
def test_kept_layers_are_those_layers_in_that_order(
    family: str, layers: tuple[int, ...], tiny_model: Callable[[str], Path]
) -> None:
    loaded = load(tiny_model(family), layers=layers)
    whole = reference(tiny_model(family))
    whole.model.layers = torch.nn.ModuleList(whole.model.layers[index] for index in layers)
    whole.config.num_hidden_layers = len(layers)
    if getattr(whole.config, "layer_types", None):
        whole.config.layer_types = [whole.config.layer_types[index] for index in layers]
    for position, layer in enumerate(whole.model.layers):
        layer.self_attn.layer_idx = position
    with torch.inference_mode():
        expected = whole(torch.arange(24)[None] * 7, use_cache=False).logits
    assert torch.equal(logits(loaded.module), expected)
    assert [layer.self_attn.layer_idx for layer in loaded.module.model.layers] == list(range(len(layers)))
    assert loaded.info.num_layers == len(layers)


def test_weights_of_layers_left_out_are_not_needed(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    save_file({k: v for k, v in weights.items() if ".layers.1." not in k}, copy / "model.safetensors")
    assert load(copy, layers=(0, 2)).info.num_layers == 2
    with pytest.raises(ModelCorrupt, match=r"9 weights are missing, first model\.layers\.1\."):
        load(copy)


@pytest.mark.parametrize("layers", [(), (0, 0), (3,), (-1,)])
def test_layers_that_are_not_there_are_refused(layers: tuple[int, ...], tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="distinct numbers from 0 to 2"):
        load(tiny_llama, layers=layers)


# ---------------------------------------------------------------------------------- not found


def test_an_unknown_source_says_what_is_accepted_and_what_comes_near() -> None:
    with pytest.raises(ModelNotFound, match=r"neither a directory .* nor an alias .*did you mean 'smollm2-135m'"):
        locate("smolm2-135m")
    with pytest.raises(ModelNotFound, match="'/nowhere/at/all' is neither a directory"):
        locate("/nowhere/at/all")


def test_locate_takes_a_directory(tiny_llama: Path) -> None:
    assert locate(str(tiny_llama)) == ModelFiles(tiny_llama, tiny_llama.name)


def test_a_directory_without_config_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
        load(tmp_path)


def test_a_directory_without_weights_is_not_found(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"holds no \*\.safetensors \(it holds pytorch_model\.bin: convert"):
        load(copy)


def test_a_shard_that_the_index_names_must_be_there(tiny_llama: Path, tmp_path: Path) -> None:
    with quiet_transformers():
        reference(tiny_llama).save_pretrained(tmp_path, max_shard_size="100KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelNotFound, match=lost.name):
        load(tmp_path)


# ------------------------------------------------------------------------------------ corrupt


@pytest.mark.parametrize("keep", [0, 5, 100, 20_000])
def test_truncated_weights_name_the_file_and_both_sizes(keep: int, copy: Path) -> None:
    path = copy / "model.safetensors"
    whole = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(keep)
    with pytest.raises(ModelCorrupt, match=rf"model\.safetensors .*expected|needs .*found {keep}") as caught:
        load(copy)
    if keep == 20_000:
        assert f"expected {whole} bytes, found {keep}" in str(caught.value)


def test_weights_with_something_appended_are_corrupt(copy: Path) -> None:
    with (copy / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelCorrupt, match="wrong length"):
        load(copy)


@pytest.mark.parametrize("header", [b"{nonsense", b'{"a": {"dtype": "F32"}}', b"[]", b'{"a": 3}'])
def test_a_broken_header_is_corrupt(header: bytes, copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelCorrupt, match="broken safetensors header"):
        load(copy)


def test_a_header_with_an_unknown_type_is_corrupt(copy: Path) -> None:
    header = b'{"a": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 1]}}'
    (copy / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    with pytest.raises(ModelCorrupt, match="unknown type Q9"):
        load(copy)


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_broken_config_is_corrupt(text: str, copy: Path) -> None:
    (copy / "config.json").write_text(text)
    with pytest.raises(ModelCorrupt, match=rf"config\.json \({len(text)} bytes\)"):
        load(copy)


def test_a_config_value_of_the_wrong_type_is_corrupt(copy: Path) -> None:
    edit_config(copy, hidden_size="wide")
    with pytest.raises(ModelCorrupt, match="hidden_size"):
        load(copy)


def test_an_index_without_a_map_is_corrupt(copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelCorrupt, match="no weight_map"):
        load(copy)


def test_weights_of_another_shape_are_corrupt(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(63)
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(ModelCorrupt, match=r"wrong shape: model\.norm\.weight"):
        load(copy)


# -------------------------------------------------------------------------------- unsupported


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 8}, r"multi-head latent attention \(MLA\)"),
        ({"model_type": "mamba"}, "recurrent state"),
        ({"model_type": "qwen3_next"}, "linear attention"),
        ({"model_type": "recurrent_gemma"}, "recurrent state"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "not a causal language model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, r"elsewhere than at model\.layers"),
        ({"model_type": "no_such_model"}, "does not know model_type 'no_such_model'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        ({"model_type": ""}, "names no model_type"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str, copy: Path
) -> None:
    edit_config(copy, **{"architectures": None, **changes})
    with pytest.raises(ModelUnsupported, match=reason):
        load(copy)


# ------------------------------------------------------------------------------------- memory


def test_too_little_memory_is_refused_with_both_numbers(tiny_llama: Path) -> None:
    with pytest.raises(CapacityError, match=r"needs 0\.\d MiB .* has 0\.1 MiB free"):
        load(tiny_llama, available=lambda device: 100_000)


def test_half_the_width_and_fewer_layers_need_less_memory(tiny_llama: Path) -> None:
    needed = sum(p.numel() for p in load(tiny_llama).module.parameters()) * 4
    load(tiny_llama, available=lambda device: needed)
    load(tiny_llama, dtype=torch.bfloat16, available=lambda device: needed // 2)
    load(tiny_llama, layers=(0, 1), available=lambda device: needed - 1)
    with pytest.raises(CapacityError):
        load(tiny_llama, available=lambda device: needed - 1)


# -------------------------------------------------------------------------------- fingerprint


def test_the_fingerprint_follows_what_decides_the_logits(tiny_llama: Path, copy: Path) -> None:
    prints = [
        load(tiny_llama).info.fingerprint,
        load(tiny_llama, dtype=torch.bfloat16).info.fingerprint,
        load(tiny_llama, layers=(0, 1)).info.fingerprint,
        load(tiny_llama, layers=(1, 0)).info.fingerprint,
    ]
    assert len(set(prints)) == len(prints)
    assert load(copy).info.fingerprint == prints[0], "a copy is the same model"
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, copy / "model.safetensors")
    assert load(copy).info.fingerprint not in prints
