"""Text and ids: the same as transformers, one token at a time as all at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from cluster.errors import ModelCorrupt, ModelNotFound, RequestError, TokenizerMismatch
from cluster.model.files import ModelFiles
from cluster.text.tokenizer import Tokenizer
from tests.tiny import IM_END, IM_START

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is 你好 a greeting? 🎉"}]
TEXTS = ["", "def f(x):\n    return x", "你好、世界", "🎉👩‍👩‍👧‍👦 naïve café", " leading", "a\tb\r\n\n"]


@pytest.fixture
def copy(tiny_llama: Path, tmp_path: Path) -> Path:
    """A tiny model's directory that the test may change."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Tokenizer:
    return Tokenizer.load(tiny_llama)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ------------------------------------------------------------------------------ as transformers


def test_ids_and_text_are_those_of_transformers(smollm2: ModelFiles) -> None:
    ours = Tokenizer.load(smollm2.directory)
    theirs = AutoTokenizer.from_pretrained(smollm2.directory)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode_chat(CHAT) == theirs.apply_chat_template(CHAT, add_generation_prompt=True).input_ids
    assert ours.vocab_size == len(theirs) == 49152
    assert ours.eos_ids == {ours.token_id("<|im_end|>")}


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for m in messages %}{{ loop.index }}:{{ m.content | trim }}{{ eos_token }}{% endfor %}",
        "{%- for m in messages %}\n    {%- if loop.last %}{% break %}{% endif %}\n    {{ m | tojson }}\n{% endfor %}",
        "{% for m in messages %}{% generation %}\n{{ m['content'] }}{% endgeneration %}{% endfor %}",
        "{% if tools %}T{% endif %}{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}{{ messages[0] }}",
        "{% set x = namespace(n=0) %}{% for m in messages %}{% set x.n = x.n + 1 %}{% endfor %}\n{{ x.n }}\n",
    ],
)
def test_templates_mean_what_they_mean_in_transformers(template: str, copy: Path) -> None:
    (copy / "chat_template.jinja").write_text(template)
    theirs = AutoTokenizer.from_pretrained(copy).apply_chat_template(CHAT, add_generation_prompt=True).input_ids
    assert Tokenizer.load(copy).encode_chat(CHAT) == theirs


def test_a_template_in_the_settings_is_read_too(copy: Path, tiny: Tokenizer) -> None:
    template = (copy / "chat_template.jinja").read_text()
    (copy / "chat_template.jinja").unlink()
    edit(copy / "tokenizer_config.json", chat_template=template)
    assert Tokenizer.load(copy).encode_chat(CHAT) == tiny.encode_chat(CHAT)
    edit(copy / "tokenizer_config.json", chat_template=[{"name": "default", "template": template}])
    assert Tokenizer.load(copy).encode_chat(CHAT) == tiny.encode_chat(CHAT)


def test_an_older_vocabulary_format_is_converted(copy: Path, tiny: Tokenizer) -> None:
    model = json.loads((copy / "tokenizer.json").read_text())["model"]
    (copy / "tokenizer.json").unlink()
    (copy / "vocab.json").write_text(json.dumps({**model["vocab"], IM_START: 289, IM_END: 290}))
    (copy / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    edit(copy / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", backend=None)
    older = Tokenizer.load(copy)
    assert older.encode("the theme: 你好") == tiny.encode("the theme: 你好")


def test_a_process_that_only_speaks_text_does_not_load_torch(tiny_llama: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from cluster.text.tokenizer import Tokenizer\n"
        "Tokenizer.load(Path(sys.argv[1])).encode_chat([{'role': 'user', 'content': 'x'}])\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tiny_llama)], timeout=60, check=False).returncode == 0


# ---------------------------------------------------------------------------------- end of text


def test_every_token_that_ends_an_answer_is_known(copy: Path) -> None:
    edit(copy / "generation_config.json", eos_token_id=[5, 7])
    assert Tokenizer.load(copy).eos_ids == {5, 7, 290}
    (copy / "generation_config.json").unlink()
    edit(copy / "config.json", eos_token_id=9)
    assert Tokenizer.load(copy).eos_ids == {9, 290}
    edit(copy / "tokenizer_config.json", eos_token={"content": IM_START})
    assert Tokenizer.load(copy).eos_ids == {9, 289}


def test_lengths_set_in_the_file_do_not_cut_or_fill(copy: Path, tiny: Tokenizer) -> None:
    backend = Backend.from_file(str(copy / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(copy / "tokenizer.json"))
    for text in ("x", "a text of more than four tokens"):
        assert Tokenizer.load(copy).encode(text) == tiny.encode(text)


# ------------------------------------------------------------------------------------- streams


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int]) -> list[str]:
    stream = tokenizer.stream(prompt)
    return [*(stream.step(token) for token in ids), stream.finish()]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), prompt=st.text(max_size=10))
def test_a_stream_is_the_text_and_never_half_a_character(tiny: Tokenizer, text: str, prompt: str) -> None:
    shown = streamed(tiny, tiny.encode(text), tiny.encode(prompt))
    assert "".join(shown) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(shown) or "\N{REPLACEMENT CHARACTER}" in text


def test_a_split_character_appears_when_it_is_whole(tiny: Tokenizer) -> None:
    ids = tiny.encode("🎉")
    assert len(ids) > 2
    assert streamed(tiny, ids, []) == [*[""] * (len(ids) - 1), "🎉", ""]


def test_what_was_cut_off_is_shown_at_the_end(tiny: Tokenizer) -> None:
    assert streamed(tiny, tiny.encode("ok🎉")[:-1], []) == ["o", "k", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_special_tokens_are_not_shown(tiny: Tokenizer) -> None:
    end = tiny.token_id(IM_END)
    assert end is not None
    ids = [*tiny.encode("one"), end, *[end] * 40, *tiny.encode(" two")]
    assert "".join(streamed(tiny, ids, [])) == "one two"


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 287), max_size=60))
def test_any_ids_at_all_are_shown_soon(tiny: Tokenizer, ids: list[int]) -> None:
    stream = tiny.stream([])
    silent = 0
    for token in ids:
        silent = 0 if stream.step(token) else silent + 1
        assert silent < 16
    stream.finish()
    assert stream.finish() == "", "nothing is shown twice"


def test_a_decoder_that_strips_the_first_space_keeps_the_others(copy: Path) -> None:
    pieces = ["<unk>", "<s>", "▁the", "▁cat", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence([])
    backend.add_special_tokens(["<s>"])
    backend.save(str(copy / "tokenizer.json"))
    tokenizer = Tokenizer.load(copy)
    party = [pieces.index(f"<0x{byte:02X}>") for byte in "🎉".encode()]
    ids = [2, 3, 4, 1, 2, *party, *party, 3]
    assert tokenizer.decode(ids) == "the cats the🎉🎉 cat"
    assert streamed(tokenizer, ids, []) == ["the", " cat", "s", "", " the", *["", "", "", "🎉"] * 2, " cat", ""]
    assert streamed(tokenizer, [3], [1, 2])[0] == " cat"


# -------------------------------------------------------------------------------------- errors


def test_a_directory_without_tokenizer_is_not_found(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match=r"holds no tokenizer\.json; copy"):
        Tokenizer.load(copy)


@pytest.mark.parametrize("text", ["", "{", '{"version": "1.0"}', "[]"])
def test_a_broken_tokenizer_is_corrupt(text: str, copy: Path) -> None:
    (copy / "tokenizer.json").write_text(text)
    with pytest.raises(ModelCorrupt, match=rf"tokenizer\.json \({len(text)} bytes\)"):
        Tokenizer.load(copy)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_broken_settings_are_corrupt(name: str, copy: Path) -> None:
    (copy / name).write_text("[1]")
    with pytest.raises(ModelCorrupt, match=name):
        Tokenizer.load(copy)


def test_a_broken_template_is_corrupt(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelCorrupt, match="chat template is broken at line 1"):
        Tokenizer.load(copy)


def test_a_model_without_template_refuses_chat(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.load(copy)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.encode_chat(CHAT)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 3 }}", "refuses these messages"),
        ("{{ messages[0].nothing.at_all }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}", "refuses these messages"),
    ],
)
def test_what_a_template_refuses_is_the_callers_fault(template: str, reason: str, copy: Path) -> None:
    (copy / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match=reason) as caught:
        Tokenizer.load(copy).encode_chat(CHAT)
    assert caught.value.param == "messages"


def test_a_model_with_fewer_ids_does_not_belong_to_the_tokenizer(tiny: Tokenizer) -> None:
    tiny.check(tiny.vocab_size)
    tiny.check(tiny.vocab_size + 61)
    with pytest.raises(
        TokenizerMismatch, match=r"has id 290 \('<\|im_end\|>'\), but the model only knows ids below 290"
    ):
        tiny.check(tiny.vocab_size - 1)


def test_draft_and_target_must_agree_on_every_token(copy: Path, tiny: Tokenizer) -> None:
    tiny.check_same(Tokenizer.load(copy))
    swapped = json.loads((copy / "tokenizer.json").read_text())
    swapped["model"]["vocab"].update({"a": 1, '"': 64})
    (copy / "tokenizer.json").write_text(json.dumps(swapped))
    with pytest.raises(TokenizerMismatch, match="is 64 in the draft's and 1 in the target's"):
        tiny.check_same(Tokenizer.load(copy))
