"""Tokenizers from folders: ids, exact bytes, BOS once (P08), as transformers would have it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from manta.engine.errors import CheckpointError, InvalidRequest
from manta.engine.model_source import ModelSource
from manta.engine.tokenizer import Tokenizer
from tests.engine.tokenizer_files import golden, load, unpacked, write_json

USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("tokenizers")
    return {name: unpacked(name, base / name) for name in ("smollm2", "qwen3")}


@pytest.fixture(scope="module")
def smollm2(folders: dict[str, Path]) -> Tokenizer:
    return load(folders["smollm2"])


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_golden_texts(folders: dict[str, Path], name: str):
    tokenizer = load(folders[name])
    for case in golden(name):
        assert tokenizer.encode(case["text"]) == case["ids_with_special"]
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
        spelled = b"".join(tokenizer.token_bytes(token_id) for token_id in case["ids"])
        assert spelled.decode() == case["decoded"]


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_chat_prompts_have_the_ids_of_transformers(folders: dict[str, Path], name: str):
    reference, ours = AutoTokenizer.from_pretrained(folders[name]), load(folders[name])
    messages = [*USER, {"role": "assistant", "content": "Hi é 🚀"}, {"role": "user", "content": "And  then?\n"}]
    want = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode(ours.render_chat(messages), add_special_tokens=False) == want
    assert ours.eos_token_ids == (reference.eos_token_id,)
    assert ours.bos_token_id == reference.bos_token_id


def bos_folder(folder: Path, template: str | None, *, adds: str = "", **config: Any) -> Path:
    """A byte-level tokenizer of single bytes; BOS is id 256, EOS 257, put around raw text as `adds` says."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    single = f"{'<s> ' * ('bos' in adds)}$A{' </s>' * ('eos' in adds)}"
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 256), ("</s>", 257)])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    named = {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": "</s>",
        "chat_template": template,
    }
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "TokenizersBackend", **named, **config})
    return folder


WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
WITHOUT_BOS = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
@pytest.mark.parametrize("adds", ["", "bos", "eos", "bos and eos"])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_bos_appears_as_often_as_in_transformers(tmp_path: Path, template: str, adds: str, flags: dict[str, bool]):
    folder = bos_folder(tmp_path / "t", template, adds=adds, **flags)
    reference, ours = AutoTokenizer.from_pretrained(folder), load(folder)
    assert ours.encode("Hello") == reference("Hello")["input_ids"]
    text = ours.render_chat(USER)
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == reference.apply_chat_template(USER, return_dict=False)
    assert ids.count(256) == (template is WITH_BOS)
    assert ours.encode("Hello").count(256) == ("bos" in adds)
    assert ours.encode("Hello", add_special_tokens=False).count(256) == 0


def test_templates_come_from_their_own_file_a_list_or_the_operator(tmp_path: Path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    folder = bos_folder(tmp_path / "t", None, chat_template=named)
    assert load(folder).render_chat(USER) == "plain"
    assert load(folder).render_chat(USER, tools=[{}, {}]) == "2 tools"
    (folder / "chat_template.jinja").write_text("from the file {{ messages | length }}")
    assert load(folder).render_chat(USER) == "from the file 1"
    assert load(folder, chat_template="given {{ bos_token }}").render_chat(USER) == "given <s>"
    other = tmp_path / "other.jinja"
    other.write_text("from another file")
    assert load(folder, chat_template=str(other)).render_chat(USER) == "from another file"
    with pytest.raises(CheckpointError, match=r"chat_template = 'missing\.jinja'"):
        load(folder, chat_template="missing.jinja")
    with pytest.raises(CheckpointError, match="chat_template is not a valid Jinja template"):
        load(folder, chat_template="{% if %}")


def test_a_model_without_a_template_says_so(tmp_path: Path):
    with pytest.raises(InvalidRequest, match=r"no chat template.*/v1/completions"):
        load(bos_folder(tmp_path / "t", None)).render_chat(USER)


def test_end_tokens_are_gathered_from_all_files(tmp_path: Path):
    folder = bos_folder(tmp_path / "t", None)
    write_json(folder / "config.json", {"eos_token_id": 7})
    write_json(folder / "generation_config.json", {"eos_token_id": [7, 9]})
    assert load(folder).eos_token_ids == (7, 9, 257)


@given(st.lists(st.integers(0, 49_151), max_size=20))
def test_decode_is_that_of_the_library(smollm2: Tokenizer, token_ids: list[int]):
    assert smollm2.decode(token_ids) == smollm2._backend.decode(token_ids)
    special = smollm2.decode(token_ids, skip_special_tokens=False)
    assert special == b"".join(map(smollm2.token_bytes, token_ids)).decode("utf-8", "replace")


def test_special_tokens_and_strange_ids(smollm2: Tokenizer):
    assert smollm2.is_special(1)
    assert not smollm2.is_special(19556)
    assert smollm2.decode([1, 19556, 2]) == "Hello"
    assert smollm2.token_text(1) == "<|im_start|>"
    assert [smollm2.token_bytes(i) for i in (-1, smollm2.vocab_size, 10**9)] == [b"", b"", b""]
    assert smollm2.decode([19556, 10**9]) == "Hello"
    with pytest.raises(InvalidRequest, match="surrogate"):
        smollm2.encode("half \ud83d of it")


def sentencepiece_like(folder: Path, *, strips: bool) -> Tokenizer:
    tokens = ["<unk>", "<s>", "▁", "H", "i", "▁Hi", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["▁keep"])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return load(folder)


@pytest.mark.parametrize("strips", [True, False])
def test_pieces_spell_spaces_and_bytes(tmp_path: Path, strips: bool):
    tokenizer = sentencepiece_like(tmp_path / "t", strips=strips)
    rocket = [6 + byte for byte in "🚀".encode()]
    assert [tokenizer.token_bytes(i) for i in (5, rocket[0], 262)] == [b" Hi", b"\xf0", "▁keep".encode()]
    ids = [5, 5, *rocket, 3]
    assert tokenizer.decode(ids) == ("Hi Hi🚀H" if strips else " Hi Hi🚀H") == tokenizer._backend.decode(ids)


def test_other_decoders_are_asked(tmp_path: Path):
    vocab = {token: index for index, token in enumerate(["[UNK]", "un", "##believ", "##able", "story", "!"])}
    backend = Backend(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    ids = tokenizer.encode("unbelievable story")
    assert tokenizer.decode(ids) == "unbelievable story"
    assert b"".join(map(tokenizer.token_bytes, ids[1:])) == b"believable story"


def test_missing_and_broken_files_are_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*--set tokenizer=PATH"):
        Tokenizer.load(ModelSource("m", "dummy", tmp_path, None))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        load(tmp_path)


def test_nothing_here_loads_torch():
    names = ("tokenizer", "detokenizer", "chat_template", "gguf_tokenizer", "model_source")
    imports = "; ".join(f"import manta.engine.{name}" for name in names)
    check = f"import sys; {imports}; sys.exit(' '.join({{'torch', 'transformers', 'gguf'}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
