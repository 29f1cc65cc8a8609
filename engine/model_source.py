"""Finds a model's files, whatever the user called the model, and reads its shape from them. Loads no weights, no torch.

Mistakes in names and folders are answered with a CheckpointError that says what to do.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .checkpoint_config import shape_from_config, shape_from_gguf
from .config import LoadFormat, ModelConfig
from .errors import CheckpointError
from .gguf_file import is_gguf, read_gguf_header
from .model_shape import ModelShape

DEFAULT_MODELS_DIR = Path("~/.cache/manta/models")
KNOWN_MODELS = {"smollm2-135m": "SmolLM2-135M-Instruct.Q4_1.gguf"}
"""Name -> file in the models folder's subfolder of that name."""

SourceKind = Literal["safetensors", "gguf", "dummy"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.jinja", "model*.safetensors"]
_TOKENIZER_FILES = ["tokenizer*.json", "special_tokens_map.json", "generation_config.json", "config.json", "*.jinja"]


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies.

    `path` is a folder with config.json (for "dummy" maybe the config file itself) or a GGUF file. `tokenizer_path` is
    a folder with tokenizer.json or a GGUF file; None when there is none (only with random weights).
    """

    name: str
    kind: SourceKind
    path: Path
    tokenizer_path: Path | None

    @property
    def config_file(self) -> Path:
        """The config.json of a source that is not GGUF."""
        return self.path if self.path.is_file() else self.path / "config.json"


def resolve_model(config: ModelConfig, *, models_dir: Path | None = None) -> ModelSource:
    """A known name, a folder, a config.json, a GGUF file or a Hugging Face id. Raises CheckpointError with advice."""
    models_dir = (models_dir or DEFAULT_MODELS_DIR).expanduser()
    patterns = ["*.json", "*.jinja"] if config.load_format == "dummy" else _HUB_FILES
    path = _locate(config.model, models_dir, what="model", revision=config.revision, patterns=patterns)
    kind = _kind(path, config.load_format)
    name = config.served_model_name or _default_name(config.model)
    if config.tokenizer is None:
        return ModelSource(name, kind, path, _own_tokenizer(path))
    tokenizer = _locate(config.tokenizer, models_dir, what="tokenizer", revision=None, patterns=_TOKENIZER_FILES)
    found = _own_tokenizer(tokenizer)
    if found is None:
        raise CheckpointError(
            f"tokenizer {config.tokenizer!r}: {tokenizer} holds no tokenizer.json and is no GGUF file"
        )
    return ModelSource(name, kind, path, found)


def load_shape(source: ModelSource) -> ModelShape:
    """From config.json (and generation_config.json) or GGUF metadata. Raises CheckpointError."""
    if source.path.suffix == ".gguf":
        return shape_from_gguf(read_gguf_header(source.path))
    return shape_from_config(source.config_file)


def _default_name(model: str) -> str:
    path = Path(model).expanduser()
    return (path.parent.name if path.name == "config.json" else path.name) if path.exists() else model


def _locate(name: str, models_dir: Path, *, what: str, revision: str | None, patterns: list[str]) -> Path:
    """A file or folder on this machine."""
    if name in KNOWN_MODELS:
        file = models_dir / name / KNOWN_MODELS[name]
        if not file.is_file():
            raise CheckpointError(
                f"{name} is not on this machine ({file} is missing): fetch it with `manta fetch {name}`"
            )
        return file
    path = Path(name).expanduser()
    if path.exists():
        if path.is_file() and path.suffix == ".safetensors":
            raise CheckpointError(f"{path} is one file of a model: name its folder ({path.parent}) instead")
        return path.absolute()
    if _HUB_ID.fullmatch(name) and path.suffix not in (".gguf", ".json", ".safetensors"):
        if path.parent.is_dir():
            raise CheckpointError(f"{what} {name!r} does not exist, while the folder {path.parent} does{_hint(path)}")
        return _download(name, what=what, revision=revision, patterns=patterns)
    raise CheckpointError(
        f"{what} {name!r} does not exist here{_hint(path) or _known_hint(name)}; give a known name "
        f"({', '.join(KNOWN_MODELS)}), a folder with config.json, a .gguf file or a Hugging Face id (owner/name)"
    )


def _hint(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    close = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f" (did you mean {str(path.parent / close[0])!r}?)" if close else ""


def _known_hint(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), list(KNOWN_MODELS), n=1, cutoff=0.4)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _kind(path: Path, load_format: LoadFormat) -> SourceKind:
    if path.is_file():
        return _kind_of_file(path, load_format)
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file():
        if ggufs:
            raise CheckpointError(f"{path} is a folder with GGUF files: name the file itself, such as {ggufs[0]}")
        if (path / "adapter_config.json").is_file():
            raise CheckpointError(f"{path} holds an adapter, not a model: name the folder of its base model")
        raise CheckpointError(f"{path} has no config.json: name the folder that holds the model's config and weights")
    if load_format == "dummy":
        return "dummy"
    if load_format == "gguf":
        advice = f"name the .gguf file ({ggufs[0]})" if ggufs else "it holds none, so leave load_format at auto"
        raise CheckpointError(f"load_format=gguf needs a .gguf file, and {path} is a folder: {advice}")
    if not any(path.glob("*.safetensors")):
        others = [file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth")]
        found = f" ({others[0]} and its like are not read: convert them to safetensors)" if others else ""
        raise CheckpointError(
            f"{path} has a config.json but no *.safetensors{found}; random weights: load_format=dummy"
        )
    return "safetensors"


def _kind_of_file(path: Path, load_format: LoadFormat) -> SourceKind:
    if path.suffix == ".gguf":
        if not is_gguf(path):
            raise CheckpointError(f"{path} is not a GGUF file (it does not start with the bytes 'GGUF'): get it again")
        if load_format == "safetensors":
            raise CheckpointError(f"load_format=safetensors contradicts the file {path}: leave load_format at auto")
        return "dummy" if load_format == "dummy" else "gguf"
    if path.suffix != ".json":
        gguf = " (it is a GGUF file: rename it to .gguf)" if is_gguf(path) else ""
        raise CheckpointError(f"{path} is neither a folder, a config.json nor a .gguf file{gguf}")
    if load_format != "dummy":
        raise CheckpointError(
            f"{path} is a configuration without weights: name its folder, or use load_format=dummy for random weights"
        )
    return "dummy"


def _own_tokenizer(path: Path) -> Path | None:
    if path.suffix == ".gguf":
        return path
    folder = path.parent if path.is_file() else path
    if (folder / "tokenizer.json").is_file():
        return folder
    return None


def _download(name: str, *, what: str, revision: str | None, patterns: list[str]) -> Path:
    """The files of a Hugging Face id, from its cache where they are there."""
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    here = f"{what} {name!r} is not a path on this machine"
    cached = _cached(name, revision, patterns)
    if constants.HF_HUB_OFFLINE:
        if cached is None:
            raise CheckpointError(f"{here} nor in the Hugging Face cache, and HF_HUB_OFFLINE forbids to fetch it")
        return cached
    unreachable = CheckpointError(
        f"{here} and {constants.ENDPOINT} cannot be reached: check the network, or give a folder or a .gguf file"
    )
    try:
        # One request without retries tells at once whether there is a network.
        httpx.head(constants.ENDPOINT, timeout=5)
        folder = snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"])
        return Path(folder)
    except GatedRepoError:
        raise CheckpointError(f"{name} needs its owner's permission: ask on its page, then set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{name} has no revision {revision!r}: name a branch, tag or commit of it") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{here} and no model of Hugging Face: check the name (a private one needs HF_TOKEN)"
        ) from None
    except HfHubHTTPError as error:
        answer = f"{constants.ENDPOINT} answered {error.response.status_code}"
        raise CheckpointError(f"{what} {name!r} cannot be fetched: {answer}; try again or give a folder") from None
    except (httpx.TransportError, LocalEntryNotFoundError):
        if cached is not None:
            return cached
        raise unreachable from None
    except OSError as error:
        raise CheckpointError(f"cannot store {name}: {error}") from None


def _cached(name: str, revision: str | None, patterns: list[str]) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return Path(folder)
