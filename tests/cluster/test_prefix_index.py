"""Which replica holds which prefix: literal cases, and a random walk beside a model of sets."""

from __future__ import annotations

import random

import pytest

from manta.cluster.routing import prefix_index
from manta.cluster.routing.prefix_index import PrefixIndex
from manta.engine.prefix_cache import CacheEvents, PrefixCache


def hashes(name: str, count: int) -> list[bytes]:
    """Of a prompt's blocks. Prompts have nothing in common."""
    return [f"{name}{position:015d}".encode() for position in range(count)]


def index_of(*replica_ids: str, max_blocks: int = 10_000) -> PrefixIndex:
    index = PrefixIndex(max_blocks=max_blocks)
    for replica_id in replica_ids:
        index.add_replica(replica_id)
    return index


A, B = hashes("a", 200), hashes("b", 200)


def test_the_longest_prefix_of_each_replica_is_found():
    index = index_of("x", "y", "z")
    index.apply("x", CacheEvents(sequence=0, stored=A[:150]))
    index.apply("y", CacheEvents(sequence=0, stored=A[:2] + B))
    assert index.match(A) == {"x": 150, "y": 2}
    assert index.match(B) == {"y": 200}
    assert index.match(A[:100]) == {"x": 100, "y": 2}
    assert index.match(hashes("c", 3)) == {}
    assert index.match([]) == {}
    index.check()


def test_every_replica_is_found_though_each_holds_a_part_of_another_length():
    ids = [f"replica-{number}" for number in range(64)]
    index = index_of(*ids)
    for number, replica_id in enumerate(ids):
        index.apply(replica_id, CacheEvents(sequence=0, stored=A[: 3 * number]))
    assert index.match(A) == {replica_id: 3 * number for number, replica_id in enumerate(ids) if number}
    assert index.match(A[:100]) == {replica_id: min(3 * number, 100) for number, replica_id in enumerate(ids) if number}


def test_what_begins_otherwise_does_not_match_though_its_end_is_known():
    index = index_of("x")
    index.apply("x", CacheEvents(sequence=0, stored=A[1:]))
    assert index.match(A) == {}


def test_evicted_blocks_are_forgotten_on_that_replica_only():
    index = index_of("x", "y")
    for replica_id in ("x", "y"):
        index.apply(replica_id, CacheEvents(sequence=0, stored=A[:10]))
    assert index.apply("x", CacheEvents(sequence=1, stored=B[:1], evicted=A[4:10]))
    assert index.match(A) == {"x": 4, "y": 10}
    assert (index.num_blocks, index.num_entries) == (11, 15)
    index.check()


def test_a_gap_in_the_events_asks_for_everything_again_until_it_came():
    index = index_of("x")
    assert index.apply("x", CacheEvents(sequence=0, stored=A[:5]))
    assert not index.apply("x", CacheEvents(sequence=2, stored=A[5:7]))
    assert index.match(A) == {"x": 7}  # what is known still counts
    assert not index.apply("x", CacheEvents(sequence=3, evicted=A[6:7]))
    assert index.apply("x", CacheEvents(sequence=4, stored=B[:3], complete=True))
    assert (index.match(A), index.match(B)) == ({}, {"x": 3})
    assert index.apply("x", CacheEvents(sequence=4, stored=B[3:4]))
    assert index.match(B) == {"x": 4}
    index.check()


def test_a_router_that_joins_late_asks_for_everything():
    assert not index_of("x").apply("x", CacheEvents(sequence=7, stored=A[:5]))


def test_a_report_that_a_complete_one_has_overtaken_changes_nothing():
    index = index_of("x")
    index.apply("x", CacheEvents(sequence=5, stored=A[:5], complete=True))
    assert index.apply("x", CacheEvents(sequence=4, stored=B[:5], evicted=A[:5]))
    assert (index.match(A), index.match(B)) == ({"x": 5}, {})


def test_a_replica_that_is_gone_matches_nothing_and_its_place_is_used_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix_index, "SWEEP_SIZE", 3)
    index = index_of("x", "y")
    index.apply("x", CacheEvents(sequence=0, stored=A[:8]))
    index.apply("y", CacheEvents(sequence=0, stored=A[:4]))
    index.remove_replica("x")
    assert index.match(A) == {"y": 4}
    index.add_replica("x")
    assert index.match(A) == {"y": 4}
    assert index.apply("x", CacheEvents(sequence=0, stored=A[:1]))
    index.check()
    for _ in range(4):
        index.expire(0.0)
        index.check()
    assert (index.num_blocks, index.match(A)) == (4, {"x": 1, "y": 4})
    index.remove_replica("unknown")
    assert index.apply("unknown", CacheEvents(sequence=9, stored=A))


def test_replicas_that_come_and_go_do_not_make_the_masks_longer():
    index = index_of()
    for turn in range(300):
        index.add_replica(str(turn))
        index.apply(str(turn), CacheEvents(sequence=0, stored=A[:3]))
        index.remove_replica(str(turn))
        index.expire(float(turn))
        index.check()
    assert index.num_blocks <= 3
    assert index._num_bits <= 3


def test_a_prompt_counts_as_cached_where_it_was_sent_until_time_is_over():
    index = index_of("x", "y")
    index.expect("x", A[:6], until_s=10.0)
    assert index.match(A) == {"x": 6}
    index.apply("x", CacheEvents(sequence=0, stored=A[:4]))  # the replica has come so far
    index.expire(9.9)
    assert index.match(A) == {"x": 6}
    index.expire(10.0)
    assert index.match(A) == {"x": 4}
    index.check()


def test_an_expectation_lasts_as_long_as_the_last_request_that_has_it():
    index = index_of("x")
    index.expect("x", A[:6], until_s=10.0)
    index.expect("x", A[:3], until_s=20.0)
    index.expire(10.0)
    assert index.match(A) == {"x": 3}
    index.expire(20.0)
    assert index.match(A) == {}
    index.check()


def test_an_expectation_outlives_a_complete_report_and_ends_with_an_eviction():
    index = index_of("x")
    index.expect("x", A[:6], until_s=10.0)
    index.apply("x", CacheEvents(sequence=3, stored=A[:2], complete=True))
    assert index.match(A) == {"x": 6}
    index.apply("x", CacheEvents(sequence=3, evicted=A[5:6]))
    assert index.match(A) == {"x": 5}
    index.expire(10.0)
    assert index.match(A) == {"x": 2}
    index.check()


def test_what_was_used_longest_ago_is_dropped_first_and_of_a_prompt_its_end():
    index = index_of("x", max_blocks=10)
    index.apply("x", CacheEvents(sequence=0, stored=A[:6]))
    index.apply("x", CacheEvents(sequence=1, stored=B[:4]))
    index.expect("x", A[:6], until_s=1.0)  # used again
    index.apply("x", CacheEvents(sequence=2, stored=hashes("c", 3)))
    assert (index.match(A), index.match(B)) == ({"x": 6}, {"x": 1})
    index.apply("x", CacheEvents(sequence=3, stored=hashes("d", 3)))
    assert (index.match(A), index.match(B)) == ({"x": 4}, {})
    assert index.num_blocks == 10
    index.check()


def test_a_real_cache_s_events_are_followed_through_evictions():
    cache, index = PrefixCache(8), index_of("x")
    rng = random.Random(5)
    for _ in range(400):
        prompt = hashes(rng.choice("abcd"), rng.randint(1, 6))
        held = cache.lookup(prompt)
        for block_id in held:
            cache.pool.acquire(block_id)
        new = cache.pool.allocate(len(prompt) - len(held))
        for block_id, block_hash in zip(new, prompt[len(held) :], strict=True):
            cache.publish(block_id, block_hash)
        cache.release(held + new)
        if rng.random() < 0.3 and (events := cache.take_events()) is not None:
            assert index.apply("x", events)
            for name in "abcd":
                found = len(cache.lookup(hashes(name, 6)))
                assert index.match(hashes(name, 6)) == ({"x": found} if found else {})
            assert index.num_blocks == cache.num_cached_blocks
    index.check()


@pytest.mark.parametrize("seed", range(5))
def test_a_random_walk_agrees_with_sets(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Replicas come, go, store, evict, are expected to store; no bound is met. Compared are replicas that hold the
    beginning of a prompt and nothing behind it, as caches do; an eviction before what is expected breaks that."""
    monkeypatch.setattr(prefix_index, "SWEEP_SIZE", 7)
    rng, index = random.Random(seed), PrefixIndex(max_blocks=10_000)
    stored: dict[str, set[bytes]] = {}
    expected: dict[str, dict[bytes, float]] = {}
    sequence: dict[str, int] = {}
    prompts = [hashes(name, 12) for name in "abc"]
    now_s, num_compared = 0.0, 0
    for _ in range(1500):
        now_s += rng.random()
        replica_id, prompt = rng.choice("uvwxyz"), rng.choice(prompts)
        some = prompt[: rng.randint(1, 12)]
        action = rng.random()
        if action < 0.05:
            index.add_replica(replica_id)
            stored[replica_id], expected[replica_id], sequence[replica_id] = set(), {}, 0
        elif action < 0.08:
            index.remove_replica(replica_id)
            stored.pop(replica_id, None)
        elif action < 0.2:
            until_s = now_s + rng.random() * 20
            index.expect(replica_id, some, until_s=until_s)
            if replica_id in stored:
                for block_hash in set(some) - stored[replica_id]:
                    until = max(until_s, expected[replica_id].get(block_hash, 0.0))
                    expected[replica_id][block_hash] = until
        elif action < 0.3:
            index.expire(now_s)
            for waiting in expected.values():
                for block_hash in [one for one, until_s in waiting.items() if until_s <= now_s]:
                    del waiting[block_hash]
        elif replica_id in stored:
            held = stored[replica_id]
            if action < 0.4:
                held -= set(prompt[rng.randint(0, 11) :])
                events = CacheEvents(sequence=sequence[replica_id], stored=list(held), complete=True)
            else:
                evicted = [one for one in prompt[rng.randint(0, 11) :] if one in held]
                new = [one for one in rng.choice(prompts)[:8] if one not in held and one not in evicted]
                events = CacheEvents(sequence=sequence[replica_id], stored=new, evicted=evicted)
                held -= set(evicted)
                for block_hash in evicted:
                    expected[replica_id].pop(block_hash, None)
                held |= set(new)
                sequence[replica_id] += 1
            for block_hash in held:
                expected[replica_id].pop(block_hash, None)
            assert index.apply(replica_id, events)
        index.check()
        for one in prompts:
            found = index.match(one)
            for name, held in stored.items():
                known = [block_hash in held or block_hash in expected[name] for block_hash in one]
                if known == sorted(known, reverse=True):
                    assert found.get(name, 0) == sum(known)
                    num_compared += sum(known) > 0
    assert num_compared > 2000


@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk_stays_within_its_bound(seed: int):
    rng, index = random.Random(seed), index_of(*"xyz", max_blocks=20)
    sequence = dict.fromkeys("xyz", 0)
    for step in range(500):
        replica_id = rng.choice("xyz")
        prompt = hashes(rng.choice("abcdef"), 12)
        if rng.random() < 0.3:
            index.expect(replica_id, prompt[: rng.randint(1, 12)], until_s=step + 5.0)
        else:
            index.apply(replica_id, CacheEvents(sequence=sequence[replica_id], stored=prompt, evicted=[]))
            sequence[replica_id] += 1
        index.expire(float(step))
        index.check()
        assert index.num_blocks <= 20
