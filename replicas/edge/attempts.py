"""One sequence on its way through the replicas, and one stay of it at one of them. Knows no choice and no waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from manta.engine.request import EngineRequest, Refusal, RequestDelta, ResumeState
from manta.replicas.channel_client import ChannelClient, ReplyStream

from .chooser import Booking
from .client import RequestTerms, RouteNote, Take
from .explanations import Explained
from .links import Link


class RoutedSequence:
    """What lasts as long as the sequence, whatever replicas it meets."""

    def __init__(self, request: EngineRequest, take: Take, terms: RequestTerms, note: RouteNote) -> None:
        own = msgspec.structs.replace(request, output_token_ids=list(request.output_token_ids))
        self.state = ResumeState(request=own)
        self.take = take
        self.terms = terms
        self.note = note
        self.asked_at_s = time.monotonic()
        self.must_go_on = False
        """Once an engine has had it, an engine that is full is no answer any more."""
        self.no_room: Explained | None = None
        """Why it could not begin when that was last tried."""


class Attempt:
    """A stay at a replica. `submit` once, `end` at the end, whatever happened."""

    def __init__(
        self,
        sequence: RoutedSequence,
        link: Link,
        booking: Booking,
        explained: Explained,
        submission: EngineRequest,
        *,
        release: Callable[[], None],
    ) -> None:
        """`release` ends what accounts for it in Serve."""
        assert link.channel is not None
        self.sequence = sequence
        self.link = link
        self.channel: ChannelClient = link.channel
        self.booking = booking
        self.explained = explained
        self.submission = submission
        self._release = release
        self._stream: ReplyStream | None = None

    @property
    def links(self) -> tuple[Link, ...]:
        """Of all replicas that have something of it."""
        return (self.link,)

    def submit(self, *, on_first: Callable[[RequestDelta], None]) -> None:
        """Send it. `on_first` is told the first delta, before anybody else."""
        add, take, is_first = self.sequence.state.add, self.sequence.take, True

        def relay(delta: RequestDelta) -> bool:
            nonlocal is_first
            if is_first:
                is_first = False
                on_first(delta)
            add(delta)
            return take(delta)

        self._stream = self.channel.submit(self.submission, relay)

    async def wait(self) -> Refusal | None:
        """As ReplyStream.wait."""
        assert self._stream is not None
        return await self._stream.wait()

    def end(self) -> None:
        """Forget it here; what the engine still does for it is cancelled."""
        self.channel.finish(self.submission.request_id)
        self._release()
