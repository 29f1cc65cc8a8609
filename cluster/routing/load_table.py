"""What views say of their replicas, in columns that follow every change, ready to be computed with. Knows no request.

A decision compares all replicas. Between two of them few views change: each writes its own place when it does, which
for snapshots is when nobody waits for a decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from manta.engine.step_costs import StepCosts

from .pace import COLUMNS, GREATEST_COLUMNS, SHOWN_COLUMNS, WEIGHED_COLUMNS
from .prefix_index import Held
from .replica_view import ReplicaView

# The numbers of a fleet are few for an operation on arrays, so what counts is how many operations there are; of them,
# methods of arrays that do the same as `reduce` take twice the time of it.
Column = NDArray[np.float64]
Rows = NDArray[np.intp] | int | slice
"""Some of a column's places: of several replicas, of one, or of all."""

NOMINAL = StepCosts(overhead_s=0.005, weights_s=0.0, token_s=1e-3, pair_s=0.0, context_token_s=0.0)
"""A device that nobody has, to weigh prompts and decodes by while nobody's speed is known."""
MAX_KEPT_SETS = 1024
_NO_ROWS: tuple[None, int] = None, 0


class Loads(NamedTuple):
    """The columns of pace.py. [replicas] each."""

    is_prefill: Column
    waits: Column
    num_too_many: Column
    ready_at_s: Column
    minus_learned_at_s: Column
    minus_chunk: Column
    slot_s: Column
    doubt_s: Column
    chunk: Column
    chunk_s: Column
    step_s: Column
    token_s: Column
    wait_s: Column
    spare_tokens: Column
    token_room_s: Column
    least_step_s: Column
    full_step_s: Column
    half_pair_s: Column
    kv_bytes_per_token: Column
    transfer_bytes_s: Column
    decode_step_s: Column
    context_token_s: Column
    context_decodes_s: Column
    decodes_step_s: Column
    num_decodes: Column
    num_requests: Column
    noise_s: Column


class Greatest(NamedTuple):
    """The greatest numbers of the first columns: whether there is any of what is rare, before it is looked at."""

    is_prefill: float
    waits: float
    num_too_many: float
    ready_at_s: float
    minus_learned_at_s: float
    minus_chunk: float


assert Loads._fields == COLUMNS
assert Greatest._fields == GREATEST_COLUMNS
assert COLUMNS[-len(SHOWN_COLUMNS) :] == SHOWN_COLUMNS


class LoadTable:
    """All views that one router may choose among. Belongs to its thread."""

    def __init__(self, views: Iterable[ReplicaView] = ()) -> None:
        """The views must be in no other table."""
        self._stale: set[ReplicaView] = set()
        self._move(tuple(views))

    @classmethod
    def of(cls, views: Sequence[ReplicaView]) -> Self:
        """What these views say now, whatever tables they are in; it does not follow them."""
        table = cls()
        table._arrange(tuple(views))
        stand_in = table.known_costs or NOMINAL
        table._has_unknown = any(view.costs is None for view in views)
        packed = np.frombuffer(b"".join([view.packed or view.pack(stand_in) for view in views]))
        table._data[:] = packed.reshape(len(views), len(COLUMNS)).T
        return table

    def add(self, view: ReplicaView) -> None:
        """As the last one. It must be in no table."""
        self._move((*self.views, view))

    def remove(self, view: ReplicaView) -> None:
        """It must be in the table."""
        self._move(tuple(one for one in self.views if one is not view))
        view.leave()

    @property
    def known_costs(self) -> StepCosts | None:
        """Of the first replica whose costs are known: they stand in for those of others."""
        for view in self.views:
            if view.costs is not None:
                return view.costs
        return None

    def columns(self) -> tuple[Loads, Greatest]:
        """As all views stand now. They change with the views; `shown` can be kept."""
        if self._stale:
            stand_in = self.known_costs or NOMINAL
            for view in tuple(self._stale):
                packed = view.pack(stand_in)
                if view.costs is None:
                    self._data[:, self._row_of[view.replica_id]] = np.frombuffer(packed)
            self._has_unknown = bool(self._stale)  # one without costs of its own stays there
        first = self._first  # argmax takes a tenth of the time of a maximum
        return self._loads, Greatest._make(map(first.item, range(len(first)), first.argmax(1).tolist()))

    def shown(self) -> NDArray[np.float64]:
        """Of what `columns` gave, a copy of what explanations need: SHOWN_COLUMNS. [columns, replicas]"""
        return self._shown.copy()

    def weighed(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of the columns that are WEIGHED_COLUMNS, by weights of each. [columns] -> [replicas]"""
        return weights.dot(self._weighed)

    def cached_tokens(self, held: Sequence[Held], *, at_most: int) -> Column:
        """The tokens that each replica holds, in whole blocks; none where costs are not known."""
        block_size = self.views[0].block_size
        most, tokens = at_most // block_size, np.zeros(len(self.views))
        for replica_ids, num_blocks in held:
            known_ids, rows = self._rows_of.get(id(replica_ids), _NO_ROWS)
            if known_ids is not replica_ids:
                if len(self._rows_of) >= MAX_KEPT_SETS:
                    self._rows_of.clear()
                rows = self._find_rows(replica_ids)
                self._rows_of[id(replica_ids)] = replica_ids, rows
            tokens[rows] = min(num_blocks, most) * block_size
        if self._has_unknown:
            tokens[[row for row, view in enumerate(self.views) if view.costs is None]] = 0.0
        return tokens

    def _find_rows(self, replica_ids: Iterable[str]) -> Rows:
        found = [row for one in replica_ids if (row := self._row_of.get(one)) is not None]
        if len(found) == 1:
            return found[0]
        return slice(None) if len(found) == len(self.views) else np.array(found, dtype=np.intp)

    def _move(self, views: tuple[ReplicaView, ...]) -> None:
        self._arrange(views)
        for view, place in zip(self.views, self._data.T, strict=True):
            view.move_to(place, self._stale)

    def _arrange(self, views: tuple[ReplicaView, ...]) -> None:
        self.views = views
        self._data = np.empty((len(COLUMNS), len(views)))
        self._loads = Loads._make(self._data)
        self._first = self._data[: len(GREATEST_COLUMNS)]
        self._shown = self._data[-len(SHOWN_COLUMNS) :]
        self._weighed = self._shown[: len(WEIGHED_COLUMNS)]
        self._has_unknown = False
        """Whether some replica's costs are not known, by the last `columns`."""
        self._row_of: Mapping[str, int] = {view.replica_id: row for row, view in enumerate(views)}
        self._rows_of: dict[int, tuple[tuple[str, ...] | None, Rows]] = {}
        """Sets of replicas that were met lately, and their rows, by the sets' identities: the index gives the same
        objects again, whose hash takes longer than all else here."""
