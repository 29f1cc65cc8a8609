"""The prefix cache: block hashes, lookups and the events that mirror them."""

import subprocess
import sys

from manta.engine.prefix_cache import BlockHasher, PrefixCache


def hashes(tokens: list[int], *, salt: str | None = None, domain: str = "m", key: bytes = b"") -> list[bytes]:
    found: list[bytes] = []
    BlockHasher(4, domain=domain, key=key).extend(found, tokens, salt=salt)
    return found


def test_only_full_blocks_have_a_hash():
    assert [len(hashes(list(range(n)))) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]


def test_a_block_hash_covers_everything_before_it():
    same_second_block = hashes([1, 2, 3, 4, 5, 6, 7, 8]), hashes([9, 2, 3, 4, 5, 6, 7, 8])
    assert same_second_block[0][1] != same_second_block[1][1]


def test_extending_gives_the_same_hashes_as_hashing_at_once():
    tokens = list(range(12))
    grown: list[bytes] = []
    hasher = BlockHasher(4, domain="m")
    for end in (3, 5, 9, 12):
        hasher.extend(grown, tokens[:end], salt=None)
    assert grown == hashes(tokens)


def test_salt_domain_and_key_separate_equal_prompts():
    tokens = [1, 2, 3, 4]
    variants = [
        hashes(tokens),
        hashes(tokens, salt=""),
        hashes(tokens, salt="a"),
        hashes(tokens, domain="m2"),
        hashes(tokens, key=b"k"),
        hashes(tokens, domain="ma", salt=""),
    ]
    assert len({tuple(v) for v in variants}) == len(variants)


def test_hashes_are_the_same_in_every_process():
    code = (
        "from manta.engine.prefix_cache import BlockHasher; h = [];"
        "BlockHasher(4, domain='m').extend(h, [1, 2, 3, 4], salt=None); print(h[0].hex())"
    )
    out = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in "ab"
    ]
    assert out[0] == out[1] == hashes([1, 2, 3, 4])[0].hex() + "\n"


def test_lookup_finds_the_longest_prefix_and_changes_nothing():
    cache = PrefixCache(4)
    h = hashes(list(range(12)))
    blocks = cache.pool.allocate(2)
    for block, block_hash in zip(blocks, h, strict=False):
        cache.publish(block, block_hash)
    assert cache.lookup(h) == blocks
    assert cache.lookup(hashes([9] * 12)) == []
    cache.check()


def test_released_blocks_stay_findable_until_they_are_reused_tail_first():
    cache = PrefixCache(2)
    h = hashes(list(range(8)))
    blocks = cache.pool.allocate(2)
    for block, block_hash in zip(blocks, h, strict=True):
        cache.publish(block, block_hash)
    cache.release(blocks)
    assert cache.lookup(h) == blocks
    assert cache.pool.allocate(1) == [blocks[1]]
    assert cache.lookup(h) == blocks[:1]
    cache.check()


def test_a_second_block_with_the_same_prefix_is_not_indexed():
    cache = PrefixCache(2)
    [h] = hashes([1, 2, 3, 4])
    a, b = cache.pool.allocate(2)
    cache.publish(a, h)
    cache.publish(b, h)
    cache.release([b])
    cache.release([a])
    assert cache.lookup([h]) == [a]
    assert cache.num_cached_blocks == 1
    cache.check()


def test_events_tell_a_mirror_what_is_cached_now():
    cache = PrefixCache(1)
    first, second = hashes([1, 2, 3, 4])[0], hashes([5, 6, 7, 8])[0]
    assert cache.take_events() is None
    for block_hash in (first, second):
        [block] = cache.pool.allocate(1)
        cache.publish(block, block_hash)
        cache.release([block])
    events = cache.take_events()
    assert events is not None
    assert (events.sequence, events.stored, events.evicted) == (0, [second], [first])
    assert cache.take_events() is None
    complete = cache.all_events()
    assert (complete.complete, complete.stored, complete.sequence) == (True, [second], 1)


def test_a_block_that_went_and_came_back_between_two_reports_is_reported_as_cached():
    cache = PrefixCache(1)
    first, second = hashes([1, 2, 3, 4])[0], hashes([5, 6, 7, 8])[0]

    def store(block_hash: bytes) -> None:
        [block] = cache.pool.allocate(1)
        cache.publish(block, block_hash)
        cache.release([block])

    store(first)
    cache.take_events()
    store(second)
    store(first)
    events = cache.take_events()
    assert events is not None
    assert (events.sequence, events.stored, events.evicted) == (1, [first], [second])


def test_hashes_that_came_with_a_request_are_known_as_one_s_own_by_number_and_beginning():
    hasher = BlockHasher(4, domain="m", key=b"k")
    tokens = [*range(10)]
    own = hashes(tokens, salt="s", key=b"k")
    assert hasher.begins_as(own, tokens, salt="s")
    assert hasher.begins_as([], [1, 2, 3], salt=None)
    assert not hasher.begins_as(own, tokens, salt="t")
    assert not hasher.begins_as(own[:1], tokens, salt="s")
    assert not hasher.begins_as(hashes(tokens, salt="s"), tokens, salt="s")
    assert not hasher.begins_as(hashes(tokens, salt="s", domain="n", key=b"k"), tokens, salt="s")
