"""Step times that were measured on a device, and how times between the measured points follow from them. Torch-free.

A profile is recorded by `manta profile` and kept as JSON. It belongs to one model's shape and dtype on one kind of GPU.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .errors import ConfigError
from .model_shape import ModelShape

PACKAGED_PROFILES = Path(__file__).parent / "profiles"
"""Of the models and GPUs that Manta was measured on: `<gpu>/<model>.json`."""


class StepPoint(msgspec.Struct, frozen=True, array_like=True):
    """One measured step: what it computed (as in StepShape) and its seconds."""

    num_prefill_tokens: int
    num_decode_seqs: int
    num_decode_context_tokens: int
    num_prefill_pairs: int
    seconds: float


class StepProfile(msgspec.Struct, kw_only=True, frozen=True):
    """Measured steps of one model on one device."""

    gpu: str
    """A name of `step_time.HARDWARE`."""
    model: dict[str, int]
    """`model_sizes` of the model."""
    dtype: str
    decode: list[StepPoint]
    """Steps of decodes alone: some batch sizes, each with several lengths of context."""
    prefill: list[StepPoint]
    """Steps of one prompt's chunk: some lengths, each after several lengths of context."""
    held_out: list[StepPoint] = []
    """Other steps, mixed ones among them, to judge predictions by."""
    environment: dict[str, Any] = {}

    def fits(self, shape: ModelShape, *, dtype: str, gpu: str) -> bool:
        return (self.gpu, self.model, self.dtype) == (gpu, model_sizes(shape), dtype)


def model_sizes(shape: ModelShape) -> dict[str, int]:
    """The sizes that a step's time depends on."""
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
    return {name: getattr(shape, name) for name in names}


def read_profile(file: Path) -> StepProfile:
    """Raises ConfigError when the file is no profile."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=StepProfile)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file} is no step-time profile ({error}): record one with `manta profile`") from None


def find_profile(shape: ModelShape, *, dtype: str, gpu: str, folders: Iterable[Path] = ()) -> StepProfile | None:
    """The first one that fits in `folders`, else among those that come with Manta, else None. Raises ConfigError."""
    for folder in (*folders, PACKAGED_PROFILES):
        for file in sorted((folder / gpu).glob("*.json")):
            profile = read_profile(file)
            if profile.fits(shape, dtype=dtype, gpu=gpu):
                return profile
    return None


class Surface:
    """Seconds over (x, work): rows of measured points at some x, linear between them, falling in no direction.

    A row goes on as it begins towards less work. Elsewhere outside the measured points the differences of a model
    continue them: `seconds_per_work` towards more work, `seconds_of_x` beyond the first and the last row.
    """

    def __init__(
        self,
        points: Iterable[tuple[float, float, float]],
        *,
        seconds_per_work: float,
        seconds_of_x: Callable[[float], float],
    ) -> None:
        """`points` are (x, work, seconds), at least one."""
        rows: dict[float, list[tuple[float, float]]] = {}
        for x, work, seconds in sorted(points):
            row = rows.setdefault(x, [])
            row.append((work, max(seconds, row[-1][1]) if row else seconds))
        assert rows, "a surface needs points"
        self._xs = list(rows)
        self._rows = list(rows.values())
        self._seconds_per_work = seconds_per_work
        self._seconds_of_x = seconds_of_x

    def at(self, x: float, work: float) -> float:
        """Seconds, never below 0."""
        above = bisect.bisect_left(self._xs, x)
        last = min(above, len(self._xs) - 1)
        below_s, above_s = 0.0, 0.0
        for row in self._rows[: last + 1]:
            below_s, above_s = above_s, max(above_s, self._along(row, work))
        if above == len(self._xs):
            return above_s + self._seconds_of_x(x) - self._seconds_of_x(self._xs[-1])
        if above == 0:
            return max(0.0, above_s + self._seconds_of_x(x) - self._seconds_of_x(self._xs[0]))
        share = (x - self._xs[above - 1]) / (self._xs[above] - self._xs[above - 1])
        return below_s + share * (above_s - below_s)

    def _along(self, row: Sequence[tuple[float, float]], work: float) -> float:
        index = bisect.bisect_left(row, work, key=lambda point: point[0])
        (work_0, s_0), slope = row[max(index - 1, 0)], self._seconds_per_work
        if index < len(row) and len(row) > 1:
            (work_0, s_0), (work_1, s_1) = row[max(index - 1, 0) : max(index - 1, 0) + 2]
            slope = (s_1 - s_0) / (work_1 - work_0)
        return max(0.0, s_0 + (work - work_0) * slope)
