"""What ranks exchange, with real gloo groups between threads."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.distributed import HashStore, Store

from manta.engine.errors import ConfigError
from manta.engine.parallel import groups as groups_module
from manta.engine.parallel.groups import Groups, join_groups
from manta.engine.parallel.place import RankPlace
from manta.engine.parallel.shared_sum import SharedSum
from tests.engine.parallel.ranks import on_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_one_node", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_of_a_stage_have_the_same_sum_in_place(dtype: torch.dtype, is_one_node: bool):
    def work(place: RankPlace, groups: Groups) -> torch.Tensor:
        assert groups.tensor is not None
        x = torch.arange(6, dtype=dtype).view(2, 3) * (place.tp_rank + 1) + place.pp_rank
        assert isinstance(groups.tensor._all_reduce, SharedSum) == is_one_node
        groups.tensor.all_reduce_(x)
        return x

    found = on_ranks(work, tp_size=3, pp_size=2, is_one_node=is_one_node)
    for pp_rank in range(2):
        expected = torch.arange(6, dtype=dtype).view(2, 3) * 6 + 3 * pp_rank
        for x in found[3 * pp_rank : 3 * pp_rank + 3]:
            assert torch.equal(x, expected)


def test_no_rank_has_joined_before_all_are_connected(monkeypatch: pytest.MonkeyPatch):
    """One that fails right behind would take the groups from under those that still connect."""
    has_one_returned = threading.Event()
    connect = groups_module._gloo_group

    def slowly(store: Store, rank: int, size: int, address: str | None) -> object:
        group = connect(store, rank, size, address)
        if rank == 0:
            assert not has_one_returned.wait(0.1)
        return group

    monkeypatch.setattr(groups_module, "_gloo_group", slowly)
    on_ranks(lambda place, groups: has_one_returned.set(), tp_size=3)
    assert has_one_returned.is_set()


def test_a_silent_group_exchanges_nothing_and_keeps_the_shapes():
    def work(place: RankPlace, groups: Groups) -> None:
        group = groups.tensor
        assert group is not None
        if place.rank == 1:
            return  # whoever exchanged something would wait for ever
        x, residual, logits = torch.ones(3), torch.ones(3), torch.ones(2, 4)
        with group.silent():
            group.all_reduce_(x)
            group.add_sum_(residual, x)
            group.maximum_(x)
            group.broadcast_(x)
            assert group.gather_vocab(logits, (4, 3)).shape == (2, 7)

    on_ranks(work, tp_size=2)


def test_a_sum_is_added_to_a_residual():
    def work(place: RankPlace, groups: Groups) -> list[float]:
        assert groups.tensor is not None
        residual = torch.tensor([10.0, 20.0])
        groups.tensor.add_sum_(residual, torch.full((2,), place.rank + 1.0))
        return residual.tolist()

    assert on_ranks(work, tp_size=3) == [[16.0, 26.0]] * 3


def test_logits_of_uneven_parts_meet_on_the_first_rank_without_padding():
    whole = torch.randn(4, 10)

    def work(place: RankPlace, groups: Groups) -> torch.Tensor:
        assert groups.tensor is not None
        return groups.tensor.gather_vocab(whole.split((4, 4, 2), dim=1)[place.tp_rank], (4, 4, 2))

    first, second, third = on_ranks(work, tp_size=3)
    assert torch.equal(first, whole)
    assert (second.shape, third.shape) == ((4, 4), (4, 2))


def test_a_broadcast_gives_all_the_source_s_values():
    def work(place: RankPlace, groups: Groups) -> list[list[int]]:
        assert groups.tensor is not None
        assert groups.everyone is not None
        own, all_ranks = torch.full((2,), place.rank), torch.full((2,), place.rank)
        groups.tensor.broadcast_(own)
        groups.everyone.broadcast_(all_ranks, source=3)
        return [own.tolist(), all_ranks.tolist()]

    assert on_ranks(work, tp_size=2, pp_size=2) == [[[0, 0], [3, 3]]] * 2 + [[[2, 2], [3, 3]]] * 2


def test_residuals_go_down_the_stages_in_order_without_waiting_for_the_receiver():
    def work(place: RankPlace, groups: Groups) -> list[float]:
        assert groups.stages is not None
        seen = []
        for step in range(3):
            if place.is_first_stage:
                residual = torch.full((step + 1, 4), 10.0 * place.tp_rank + step)
            else:
                residual = groups.stages.receive(step + 1, 4, dtype=torch.float32, device=CPU)
            seen.append(float(residual.mean()))
            if not place.is_last_stage:
                groups.stages.send(residual + 100)
        return seen

    found = on_ranks(work, tp_size=2, pp_size=3)
    assert found == [[10.0 * tp + step + 100 * pp for step in range(3)] for pp in range(3) for tp in range(2)]


def test_all_ranks_agree_on_the_smallest_numbers():
    def work(place: RankPlace, groups: Groups) -> list[int]:
        return groups.smallest([place.rank + 5, -place.rank])

    assert on_ranks(work, tp_size=2, pp_size=2) == [[5, -3]] * 4


def test_a_rank_sends_to_any_other_under_a_tag():
    def work(place: RankPlace, groups: Groups) -> list[int]:
        assert groups.everyone is not None
        if place.rank == 0:
            waits = [groups.everyone.start_send(torch.tensor([tag]), 2, tag=tag) for tag in (1, 2)]
            for wait in waits:
                wait()
            return []
        if place.rank == 1:
            return []
        first, second = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        groups.everyone.receive_(second, 0, tag=2)
        groups.everyone.receive_(first, 0, tag=1)
        return [int(first), int(second)]

    assert on_ranks(work, tp_size=3)[2] == [1, 2]


def test_a_rank_alone_has_no_groups():
    groups = join_groups(RankPlace(0), HashStore(), device=CPU)
    assert (groups.tensor, groups.stages, groups.everyone) == (None, None, None)
    assert groups.smallest([3, 4]) == [3, 4]


def test_nccl_without_gpus_is_refused():
    store = HashStore()
    store.set("manta/groups/device/1", "host of 1")
    with pytest.raises(ConfigError, match="needs a CUDA GPU of its own for each of 2 ranks"):
        join_groups(RankPlace(0, 2), store, device=CPU, backend="nccl")
