"""Start-up, shown phase by phase: live in a terminal, one plain line a phase elsewhere. Knows no Ray and no engine."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

MARKS = {"running": "…", "done": "✓", "failed": "✗"}
STYLES = {"running": "yellow", "done": "green", "failed": "red"}


class Progress:
    """Use as a context manager; `begin` ends the phase before."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phases: list[list] = []  # [name, state, begun at, seconds or None, detail]
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=8, transient=False)
        self._is_live = console.is_terminal

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close("failed" if kind else "done")
        if self._is_live:
            self._live.stop()

    def begin(self, name: str, detail: str = "") -> None:
        """A phase starts."""
        self._close("done")
        self._phases.append([name, "running", time.monotonic(), None, detail])
        if not self._is_live:
            self._console.print(f"{name} ...{f' {detail}' if detail else ''}", markup=False, highlight=False)

    def detail(self, text: str) -> None:
        """What the running phase does now; shown live only."""
        if self._phases:
            self._phases[-1][4] = text

    def say(self, text: str) -> None:
        """A sentence of its own, which stays."""
        self._console.print(text, markup=False, highlight=False)

    def note(self, name: str, seconds: float) -> None:
        """A phase that was measured elsewhere."""
        running = self._phases.pop() if self._phases and self._phases[-1][1] == "running" else None
        self._phases.append([name, "done", 0.0, seconds, ""])
        if running:
            self._phases.append(running)
        if not self._is_live:
            self._console.print(f"{name}: {seconds:.1f} s", markup=False, highlight=False)

    def _close(self, state: str) -> None:
        if self._phases and self._phases[-1][1] == "running":
            phase = self._phases[-1]
            phase[1], phase[3] = state, time.monotonic() - phase[2]
            if not self._is_live:
                self._console.print(f"{phase[0]}: {phase[3]:.1f} s", markup=False, highlight=False)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, state, begun, seconds, detail in self._phases:
            elapsed = time.monotonic() - begun if seconds is None else seconds
            table.add_row(Text(MARKS[state], STYLES[state]), name, f"{elapsed:6.1f} s", Text(detail, "dim"))
        return table
