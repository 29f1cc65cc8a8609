"""Text to token ids and back, for one model, with its chat template. Torch-free; knows no streams and no HTTP.

The library `tokenizers` encodes. Decoding of byte-level and of SentencePiece-like vocabularies is the concatenation of
`token_bytes`, so that a stream of tokens and the whole text cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from .chat_template import ChatTemplate
from .checkpoint_config import eos_token_ids, gguf_eos_token_ids, read_json
from .errors import CheckpointError, InvalidRequest
from .gguf_file import read_gguf_header
from .gguf_tokenizer import build_gguf_tokenizer
from .model_source import ModelSource
from .token_spelling import make_spelling

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Made by `load` from a model's files, or from a `tokenizers.Tokenizer` and what its configuration says.

    `special_tokens` are the named ones (bos_token, ...) that chat templates may read; `templates` holds the chat
    template under "default" and may hold one for requests with tools under "tool_use".
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        special_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
        template_origin: str = "chat template",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """One more than the largest token id."""
        self._spelling = make_spelling(backend, {token_id: token.content for token_id, token in added.items()})
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self._templates = {
            name: ChatTemplate(source, special_tokens, origin=template_origin)
            for name, source in (templates or {}).items()
        }

    @classmethod
    def load(cls, source: ModelSource, *, chat_template: str | None = None) -> Tokenizer:
        """`chat_template` (Jinja text or the path of a file) replaces the model's own. Raises CheckpointError."""
        path = source.tokenizer_path
        if path is None:
            raise CheckpointError(
                f"{source.path} has no tokenizer.json: name a tokenizer with `--set tokenizer=PATH` "
                "(for random weights any will do, such as smollm2-135m)"
            )
        given = None if chat_template is None else {"default": _read_template(chat_template)}
        return _load_gguf(cls, path, given) if path.suffix == ".gguf" else _load_folder(cls, path, given)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """With `add_special_tokens` as the model wants raw text to begin and end (BOS), else nothing is added."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # what the library raises for text that is not Unicode
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise InvalidRequest("The text holds half of a surrogate pair, which is not a character.") from None
            raise

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Bytes that are not UTF-8 become replacement marks; ids without a token have no text."""
        special = self._special_ids if skip_special_tokens else frozenset()
        kept = [token_id for token_id in token_ids if token_id not in special]
        if not self._spelling.is_exact:
            return self._backend.decode([i for i in kept if 0 <= i < self.vocab_size], skip_special_tokens=False)
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        return text[1:] if self._spelling.strips_first_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text that it does not begin. Empty for an id that has no token."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        spelled = self._bytes[token_id]
        if spelled is None:
            spelled = self._bytes[token_id] = self._spelling.spell(token_id)
        return spelled

    def token_text(self, token_id: int) -> str:
        """The token alone; replacement marks for part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation; encode it with `add_special_tokens=False`: the template wrote them.

        Raises InvalidRequest for what the template cannot render, see `ChatTemplate.render`.
        """
        template = (self._templates.get("tool_use") if tools else None) or self._templates.get("default")
        if template is None:
            raise InvalidRequest(
                "The model has no chat template: use /v1/completions, or give the server one (chat_template).",
                param="messages",
            )
        return template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )


def _read_template(given: str) -> str:
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise CheckpointError(f"chat_template = {given!r} is neither Jinja text nor a file that can be read") from None


def _load_gguf(cls: type[Tokenizer], path: Path, given: dict[str, str] | None) -> Tokenizer:
    metadata = read_gguf_header(path).metadata
    backend = build_gguf_tokenizer(metadata, path)
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        token = None if token_id is None else backend.id_to_token(token_id)
        if token is not None:
            special[f"{name}_token"] = token
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).lstrip(".") or "default": value
        for key, value in metadata.items()
        if key.startswith(prefix) and isinstance(value, str)
    }
    return cls(
        backend,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=gguf_eos_token_ids(metadata),
        special_tokens=special,
        templates=templates if given is None else given,
        template_origin="chat_template" if given else f"the chat template of {path}",
    )


def _load_folder(cls: type[Tokenizer], folder: Path, given: dict[str, str] | None) -> Tokenizer:
    """What is added to raw text stands in tokenizer.json; like transformers, ignore add_bos_token beside it."""
    file = folder / "tokenizer.json"
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare exceptions
        raise CheckpointError(f"{file} is not a tokenizer of the library tokenizers: {error}") from None
    config = read_json(folder / "tokenizer_config.json")
    named = read_json(folder / "special_tokens_map.json") | config
    special = {name: token for name in _SPECIAL_NAMES if (token := _content(named.get(name))) is not None}
    ids = {name: backend.token_to_id(token) for name, token in special.items()}
    model = read_json(folder / "config.json")
    ends = [*eos_token_ids(folder, model), ids.get("eos_token")]
    return cls(
        backend,
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        special_tokens=special,
        templates=_templates(folder, config) if given is None else given,
        template_origin="chat_template" if given else f"the chat template of {folder}",
    )


def _content(token: Any) -> str | None:
    """Of a token written as text or as an object."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        more = {extra.stem: extra for extra in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        return {name: path.read_text(encoding="utf-8") for name, path in {"default": file, **more}.items()}
    given = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return {}
