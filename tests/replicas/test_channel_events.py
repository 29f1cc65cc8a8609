"""What an edge is told of an engine's cached blocks: all of it, in parts, and nothing that does not matter any more."""

from __future__ import annotations

from manta.cluster.routing.prefix_index import PrefixIndex
from manta.engine.prefix_cache import CacheEvents
from manta.replicas.channel_events import CacheFeed


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def reports(feed: CacheFeed) -> list[CacheEvents]:
    """All that it has to tell now."""
    told = []
    while (report := feed.report()) is not None:
        told.append(report)
        feed.sent()
    return told


def begun(feed: CacheFeed) -> CacheFeed:
    """Its complete list, an empty one, is told."""
    feed.begin([])
    reports(feed)
    return feed


def test_nothing_is_told_before_the_list_of_all() -> None:
    feed = CacheFeed()
    feed.add(CacheEvents(sequence=3, stored=names(1)))
    assert feed.needs_list
    assert feed.report() is None
    feed.begin(names(1, 2))
    assert not feed.needs_list
    assert reports(feed) == [CacheEvents(sequence=0, stored=names(1, 2), complete=True)]


def test_an_empty_cache_is_told_as_such() -> None:
    feed = CacheFeed()
    feed.begin([])
    assert reports(feed) == [CacheEvents(sequence=0, complete=True)]


def test_a_long_list_goes_out_in_parts_of_bounded_size() -> None:
    feed = CacheFeed(max_hashes=4)
    feed.begin(names(*range(10)))
    told = reports(feed)
    assert [report.stored for report in told] == [names(0, 1, 2, 3), names(4, 5, 6, 7), names(8, 9)]
    assert [report.complete for report in told] == [True, False, False]
    assert [report.sequence for report in told] == [0, 0, 1]


def test_what_is_stored_and_evicted_before_it_was_told_is_never_told() -> None:
    feed = begun(CacheFeed())
    feed.add(CacheEvents(sequence=0, stored=names(1, 2)))
    feed.add(CacheEvents(sequence=1, evicted=names(1)))
    assert [(report.stored, report.evicted) for report in reports(feed)] == [(names(2), [])]


def test_what_is_evicted_and_stored_again_was_there_all_the_time() -> None:
    feed = CacheFeed()
    feed.begin(names(1))
    reports(feed)
    feed.add(CacheEvents(sequence=0, evicted=names(1)))
    feed.add(CacheEvents(sequence=1, stored=names(1)))
    assert reports(feed) == []


def test_a_report_that_could_not_be_sent_is_the_next_one_again() -> None:
    feed = begun(CacheFeed())
    feed.add(CacheEvents(sequence=0, stored=names(1)))
    first = feed.report()
    feed.add(CacheEvents(sequence=1, stored=names(2), evicted=names(1)))
    assert feed.report() is first
    feed.sent()
    assert [(report.stored, report.evicted) for report in reports(feed)] == [(names(2), names(1))]


def test_an_index_that_is_fed_in_parts_amid_changes_knows_what_is_cached() -> None:
    feed, index = CacheFeed(max_hashes=3), PrefixIndex(max_blocks=1000)
    index.add_replica("r")
    cached = dict.fromkeys(names(*range(20)))
    feed.begin(list(cached))
    for number in range(40):
        stored, evicted = names(100 + number), names(number)
        feed.add(CacheEvents(sequence=number, stored=stored, evicted=[h for h in evicted if h in cached]))
        cached.update(dict.fromkeys(stored))
        cached.pop(evicted[0], None)
        report = feed.report()
        assert report is not None
        assert index.apply("r", report)
        feed.sent()
    for report in reports(feed):
        assert index.apply("r", report)
    assert {h for h in [*names(*range(200))] if index.match([h])} == set(cached)


def test_a_feed_that_begins_anew_numbers_on_and_lists_everything() -> None:
    feed, index = begun(CacheFeed()), PrefixIndex(max_blocks=1000)
    index.add_replica("r")
    feed.add(CacheEvents(sequence=0, stored=names(1)))
    reports(feed)  # lost on the way
    feed.add(CacheEvents(sequence=1, stored=names(2)))
    (late,) = reports(feed)
    assert not index.apply("r", late)
    feed.restart()
    assert feed.needs_list
    feed.begin(names(1, 2, 3))
    (complete,) = reports(feed)
    assert complete.complete
    assert index.apply("r", complete)
    assert index.match(names(1, 3)) == {"r": 2}
