"""The block pool: who holds a block, and which free block goes next."""

import pytest

from manta.engine.block_pool import BlockPool


def nothing_kept(block_id: int) -> bool:
    return False


def all_kept(block_id: int) -> bool:
    return True


def test_allocates_every_block_once():
    pool = BlockPool(4)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    assert pool.num_free == 0
    assert not pool.can_allocate(1)
    pool.check()


def test_asking_whether_it_can_allocate_changes_nothing():
    pool = BlockPool(2)
    assert pool.can_allocate(2)
    assert pool.can_allocate(2)
    assert pool.num_free == 2


def test_a_shared_block_is_free_only_when_all_holders_are_gone():
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.acquire(block)
    pool.release([block], has_content=nothing_kept)
    assert pool.num_used == 1
    pool.release([block], has_content=nothing_kept)
    assert pool.num_used == 0
    pool.check()


def test_blocks_without_content_are_reused_before_any_with_content():
    evicted: list[int] = []
    pool = BlockPool(3, on_evict=evicted.append)
    first, second, third = pool.allocate(3)
    pool.release([first], has_content=all_kept)
    pool.release([second], has_content=nothing_kept)
    assert pool.allocate(1) == [second]
    assert evicted == []
    assert pool.allocate(1) == [first]
    assert evicted == [first]
    assert pool.num_references(third) == 1


def test_the_longest_free_content_is_evicted_first():
    evicted: list[int] = []
    pool = BlockPool(3, on_evict=evicted.append)
    a, b, c = pool.allocate(3)
    for block in (b, a, c):
        pool.release([block], has_content=all_kept)
    pool.allocate(2)
    assert evicted == [b, a]


def test_an_acquired_block_is_not_evicted():
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.release([a, b], has_content=all_kept)
    pool.acquire(a)
    assert pool.allocate(1) == [b]
    assert not pool.can_allocate(1)


def test_evicting_all_keeps_held_blocks():
    evicted: list[int] = []
    pool = BlockPool(3, on_evict=evicted.append)
    a, b, _ = pool.allocate(3)
    pool.release([a, b], has_content=all_kept)
    pool.evict_all()
    assert sorted(evicted) == sorted([a, b])
    assert pool.num_free == 2
    pool.check()


def test_releasing_a_free_block_is_a_bug():
    pool = BlockPool(1)
    with pytest.raises(AssertionError):
        pool.release([0], has_content=nothing_kept)
