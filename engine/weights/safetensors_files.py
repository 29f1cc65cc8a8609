"""Reads safetensors: one file or shards with an index, each tensor's slice memory-mapped straight into its place.

Knows where tensors go only as a mapping from parameters to views.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from manta.engine.errors import CheckpointError
from manta.engine.models.family import Family, Parameter

from .slices import SliceOf, TensorSlice

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PLAIN = ("F16", "BF16", "F32", "F64")


def read_safetensors(folder: Path, family: Family, views: Mapping[Parameter, torch.Tensor], slice_of: SliceOf) -> None:
    """Fill every view with its slice; nothing else is read.

    Raises CheckpointError naming the shard or tensor that is missing, short or mis-shaped.
    """
    file_of = _files_of_tensors(folder)
    by_file: dict[Path, list[_Wanted]] = {}
    missing = []
    for parameter, view in views.items():
        name = family.hugging_face_name(parameter)
        if name in file_of:
            by_file.setdefault(file_of[name], []).append(_Wanted(name, view, slice_of(parameter)))
        else:
            missing.append(name)
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{folder}: tensor {missing[0]}{others} missing; the config asks for what is not there")
    for file, wanted in by_file.items():
        _read_file(file, wanted)


class FolderTensors:
    """All tensors of a folder's safetensors by name, read when they are asked for. Every file is opened, and so known
    to be whole, from the start."""

    def __init__(self, folder: Path, files: Sequence[str] | None = None) -> None:
        """`files`: those alone, without an index."""
        self.folder = folder
        file_of = _files_of_tensors(folder) if files is None else _tensors_in([folder / file for file in files])
        opened = {file: _open(file) for file in sorted(set(file_of.values()))}
        held = {file: set(handle.keys()) for file, handle in opened.items()}
        for name, file in file_of.items():
            if name not in held[file]:
                raise CheckpointError(f"{file}: tensor {name} is missing, though the index says that it is here")
        self._file_of = {name: opened[file] for name, file in file_of.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def dtype(self, name: str) -> str:
        """As safetensors calls it: BF16, F8_E4M3, I8 ... Raises CheckpointError."""
        return self._found(name).get_slice(name).get_dtype()

    def get(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole tensor. Raises CheckpointError when it is missing, or of another shape or dtype."""
        file = self._found(name)
        found = tuple(file.get_slice(name).get_shape())
        if shape is not None and found != shape:
            raise CheckpointError(f"{self.folder}: tensor {name} has shape {found}, the config asks for {shape}")
        tensor = file.get_tensor(name)
        if dtype is not None and tensor.dtype != dtype:
            raise CheckpointError(f"{self.folder}: tensor {name} is {tensor.dtype}, the config asks for {dtype}")
        return tensor

    def _found(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing; the config asks for it")
        return self._file_of[name]


class _Wanted(NamedTuple):
    name: str
    view: torch.Tensor
    slice: TensorSlice


def _read_file(file: Path, wanted: list[_Wanted]) -> None:
    with ExitStack() as stack:
        opened = stack.enter_context(_open(file))
        held = set(opened.keys())
        for name, view, part in wanted:
            if name not in held:
                raise CheckpointError(f"{file}: tensor {name} is missing, though the index says that it is here")
            stored = opened.get_slice(name)
            shape = tuple(stored.get_shape())
            if shape != part.full:
                raise CheckpointError(f"{file}: tensor {name} has shape {shape}, the config asks for {part.full}")
            if (kind := stored.get_dtype()) not in _PLAIN:
                raise CheckpointError(
                    f"{file}: tensor {name} is of type {kind}: it is quantized, and only weights of the layers' "
                    "products that quantization_config describes may be"
                )
            # A whole tensor is the mapped file itself, without a copy in between.
            view.copy_(opened.get_tensor(name) if part.is_whole else stored[part.index])


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Tensor name -> its file; every file exists."""
    index = folder / _INDEX
    if index.is_file():
        names = _weight_map(index)
        for file in sorted(set(names.values())):
            if not (folder / file).is_file():
                raise CheckpointError(f"{folder}: shard {file} is missing, though {_INDEX} names it; get it again")
        return {name: folder / file for name, file in names.items()}
    files = [folder / _SINGLE] if (folder / _SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file")
    return _tensors_in(files)


def _tensors_in(files: Sequence[Path]) -> dict[str, Path]:
    file_of: dict[str, Path] = {}
    for file in files:
        with _open(file) as opened:
            file_of |= dict.fromkeys(opened.keys(), file)
    return file_of


def _weight_map(index: Path) -> dict[str, str]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{index} is not a whole index of shards ({error!r}): get it again") from None


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or cut short ({error}): get it again") from None
