"""Readers of request traces: Mooncake's JSON lines and CSV files of arrivals and lengths. Knows no engine and no HTTP.

Traces carry lengths, not texts. Prompts are made up: a Mooncake prompt block of 512 tokens follows from its hash id, so
that requests share prefixes as they did in the service.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from manta.engine.errors import ConfigError

from .workloads import Item, token_ids

DATA_DIR = Path(__file__).parent / "data"
MOONCAKE_BLOCK = 512
_BLOCK_SEED = 1 << 40


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace. Seconds after the trace's first request; lengths in tokens."""

    arrival_s: float
    prompt_len: int
    output_len: int
    block_ids: tuple[int, ...] = ()
    """Identities of the prompt's blocks of 512 tokens, when the trace has them."""


def find_trace(name: str) -> Path:
    """A trace's file: a path, or the name of one in bench/data. Raises ConfigError."""
    if Path(name).is_file():
        return Path(name)
    known = {path.name.split(".")[0]: path for path in sorted(DATA_DIR.glob("*.gz"))}
    if name in known:
        return known[name]
    raise ConfigError(f"there is no trace {name!r}: give a .jsonl or .csv file (.gz allowed) or {' or '.join(known)}")


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """The first `limit` requests of a .jsonl (Mooncake) or .csv file, .gz too. Raises ConfigError naming the line."""
    kinds = {".jsonl": _mooncake_rows, ".csv": _csv_rows}
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in kinds:
        raise ConfigError(f"{path}: a trace is a .jsonl or .csv file, gzipped or not")
    with open_text(path) as file:
        rows = list(islice(kinds[suffix](path, file), limit))
    if not rows:
        raise ConfigError(f"{path} holds no requests")
    first_s = rows[0].arrival_s
    return [TraceRow(row.arrival_s - first_s, row.prompt_len, row.output_len, row.block_ids) for row in rows]


def open_text(path: Path) -> io.TextIOBase:
    """A text file, gzipped or not."""
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")  # type: ignore[return-value]


def trace_items(rows: list[TraceRow], *, vocab_size: int, max_model_len: int, seed: int) -> list[Item]:
    """Requests from a trace's rows; those that do not fit `max_model_len` (prompt and output) are left out."""
    items: list[Item] = []
    for index, row in enumerate(rows):
        if row.prompt_len + row.output_len > max_model_len or row.prompt_len < 1 or row.output_len < 1:
            continue
        prompt = _prompt(row, vocab_size, seed * 1_000_003 + index)
        items.append(Item(prompt, row.output_len, row.arrival_s))
    if not items:
        raise ConfigError(f"no request of this trace fits a context of {max_model_len} tokens")
    return items


def _prompt(row: TraceRow, vocab_size: int, seed: int) -> list[int]:
    ids: list[int] = []
    for block_id in row.block_ids:
        ids += token_ids(min(MOONCAKE_BLOCK, row.prompt_len - len(ids)), vocab_size, _BLOCK_SEED + block_id)
    return ids + token_ids(row.prompt_len - len(ids), vocab_size, seed)


def _mooncake_rows(path: Path, file: io.TextIOBase) -> Iterator[TraceRow]:
    for number, line in enumerate(file, 1):
        try:
            fields = json.loads(line)
            yield TraceRow(
                fields["timestamp"] / 1000,
                int(fields["input_length"]),
                int(fields["output_length"]),
                tuple(fields.get("hash_ids", ())),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number}: needs timestamp (ms), input_length and output_length ({error!r})"
            ) from None


def _csv_rows(path: Path, file: io.TextIOBase) -> Iterator[TraceRow]:
    for number, fields in enumerate(csv.DictReader(file), 2):
        try:
            yield TraceRow(float(fields.get("t_s") or 0.0), int(fields["input_len"]), int(fields["output_len"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: needs input_len, output_len and maybe t_s ({error!r})") from None
