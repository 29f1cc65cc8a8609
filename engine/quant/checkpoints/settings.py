"""Reads a `quantization_config`: entries by name and kind, and complaints about those that nobody has read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manta.engine.errors import CheckpointError


class Settings:
    """An object of config.json. Every entry must be read or named as one that changes nothing."""

    def __init__(self, file: Path, content: Mapping[str, Any], where: str = "quantization_config") -> None:
        self.file = file
        self._content = content
        self._where = where
        self._unread = set(content)

    @property
    def entries(self) -> list[str]:
        """All names."""
        return list(self._content)

    def get(self, name: str, default: Any = None) -> Any:
        self._unread.discard(name)
        value = self._content.get(name)
        return default if value is None else value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.error(name, value, "must be a word")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(name, value, "must be a whole number")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "must be true or false")
        return value

    def names(self, name: str) -> list[str]:
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.error(name, value, "must be a list of names")
        return value

    def inner(self, name: str) -> Settings | None:
        """An object in the object."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, value, "must be an object")
        return Settings(self.file, value, f"{self._where}.{name}")

    def one_of(self, name: str, choices: Sequence[Any], default: Any = None) -> Any:
        value = self.get(name, default)
        if value not in choices or isinstance(value, bool) != any(choice is value for choice in (True, False)):
            raise self.error(name, value, f"is not supported; supported are {', '.join(map(str, choices))}")
        return value

    def only(self, name: str, *values: Any) -> None:
        """Refuse anything but these and an absent entry."""
        value = self.get(name)
        if value is not None and value not in values:
            raise self.error(name, value, "is not supported")

    def ignore(self, *names: str) -> None:
        """Entries that say how the checkpoint was made or run elsewhere."""
        self._unread -= set(names)

    def refuse_unread(self) -> None:
        """Raises CheckpointError for an entry that nobody has read."""
        self._unread -= {name for name in self._unread if self._content[name] in (None, {}, [])}
        if self._unread:
            name = min(self._unread)
            raise self.error(name, self._content[name], "is an unknown setting, which may change what weights mean")

    def error(self, name: str, value: object, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {self._where}.{name} = {value!r} {what}")


def is_listed(module: str, names: Sequence[str]) -> bool:
    """Whether a list of modules to leave alone holds this one or what it is in."""
    return any(name == module or f".{name}." in f".{module}." for name in names)
