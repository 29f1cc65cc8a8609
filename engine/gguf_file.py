"""The header of a GGUF file: metadata and where its tensors lie, in a fraction of a second. Decodes no tensor.

The format is the public specification of GGUF, versions 2 and 3, little-endian. The `gguf` package reads the same
header into numpy arrays element by element, which takes seconds for a large vocabulary.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_F32 = 0


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies: `shape` with the contiguous dimension first, `offset` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key (arrays as lists) and tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def floats(self, name: str) -> list[float]:
        """The values of a float32 tensor. Raises CheckpointError for another type."""
        tensor = self.tensors[name]
        if tensor.type_id != _F32:
            raise CheckpointError(f"{self.path}: tensor {name} must be float32")
        count = 1
        for size in tensor.shape:
            count *= size
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            data = file.read(4 * count)
        if len(data) < 4 * count:
            raise CheckpointError(f"{self.path} is shorter than its header says: download it again")
        return list(struct.unpack(f"<{count}f", data))


def is_gguf(path: Path) -> bool:
    """Whether the file starts as GGUF files do."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises CheckpointError, naming the file, for anything that is not a whole little-endian GGUF header."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (struct.error, UnicodeDecodeError, ValueError, KeyError, IndexError, OverflowError):
        raise CheckpointError(f"{path} is not a whole GGUF file: its header is broken or cut; get it again") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    if data[:4] != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file (it does not start with the bytes 'GGUF')")
    version, num_tensors, num_fields = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise CheckpointError(f"{path} is a {kind} GGUF file; only little-endian files of version 2 and 3 can be read")
    reader = _Reader(data, 24)
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = reader.string()
        metadata[key] = reader.value(reader.number("I"))
    infos = []
    for _ in range(num_tensors):
        name = reader.string()
        shape = tuple(reader.number("Q") for _ in range(reader.number("I")))
        infos.append((name, shape, reader.number("I"), reader.number("Q")))
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-reader.position // alignment) * alignment
    tensors = {name: GgufTensor(name, shape, type_id, start + offset) for name, shape, type_id, offset in infos}
    return GgufHeader(path, metadata, tensors)


class _Reader:
    """Reads values one after the other."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self.position = position

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        return self.number(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self.value(_ARRAY) for _ in range(count)]
        form = f"<{count}{_SCALARS[kind]}"
        values = list(struct.unpack_from(form, self._data, self.position))
        self.position += struct.calcsize(form)
        return values

    def _strings(self, count: int) -> list[str]:
        """Vocabularies hold hundreds of thousands of strings: the loop is kept tight."""
        data, position, end = self._data, self.position, len(self._data)
        length_at: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            (length,) = length_at(data, position)
            position += 8
            if position + length > end:
                raise ValueError("a string reaches beyond the file")
            strings.append(data[position : position + length].decode("utf-8"))
            position += length
        self.position = position
        return strings
