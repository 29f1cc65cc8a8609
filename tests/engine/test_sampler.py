"""Sampling features against a plain Python reading of what each means, alone and mixed in one batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from manta.engine.batch import BatchBuilder
from manta.engine.logprobs import logprobs_in_chunks, logprobs_of
from manta.engine.plan import NewSequence, Row, StepPlan
from manta.engine.request import SamplingParams
from manta.engine.sampler import Sampled, Sampler, SamplingLayout, SlotSampling
from manta.engine.upload import upload

VOCAB = 40
CPU = torch.device("cpu")


class Bench:
    """Slot state and sampler, stepped with logits given by the test."""

    def __init__(self, max_num_seqs: int = 8) -> None:
        self.builder = BatchBuilder(max_num_seqs=max_num_seqs, max_model_len=64, block_size=16)
        self.slots = SlotSampling(max_num_seqs=max_num_seqs, vocab_size=VOCAB)
        self.sampler = Sampler(vocab_size=VOCAB, device=CPU)
        self.layout: SamplingLayout | None = None
        self._step = 0

    def step(
        self,
        logits: torch.Tensor,
        rows: list[tuple[int, int]],
        new: list[NewSequence] | None = None,
        freed: list[int] | None = None,
    ) -> Sampled:
        """`rows` are (slot, position of the token that is sampled)."""
        new = new or []
        entering = {sequence.slot: len(sequence.token_ids) for sequence in new}
        plan_rows = [
            Row(slot, 0, entering[slot], [], True, False) if slot in entering else Row(slot, at - 1, 1, [], True, True)
            for slot, at in rows
        ]
        plan = StepPlan(self._step, freed or [], new, plan_rows)
        self._step += 1
        arrays: dict[str, np.ndarray] = {}
        batch = self.builder.lay_out(plan, arrays)
        self.layout = self.slots.lay_out(plan, batch.sampling_slots, batch.sampling_positions, arrays)
        tensors = upload(arrays, CPU)
        self.sampler.enter(self.layout, tensors)
        return self.sampler.run(logits.clone(), self.layout, tensors)


def sequence(slot: int, tokens: list[int], num_prompt: int | None = None, **params: Any) -> NewSequence:
    return NewSequence(
        slot,
        tokens,
        num_prompt or len(tokens),
        [slot],
        SamplingParams(**{"temperature": 0.0, "seed": 0, **params}),
        [2, 3],
    )


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def penalized(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    """By the definitions, one token at a time."""
    changed = []
    for token, value in enumerate(logits):
        if token in prompt or token in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token)
        value -= params.presence_penalty * (token in output)
        changed.append(value)
    return changed


def argmax(values: list[float]) -> int:
    return max(range(len(values)), key=lambda token: values[token])


PENALTIES = [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.7},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -0.8},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.6},
]


@pytest.mark.parametrize("options", PENALTIES, ids=str)
def test_penalties_follow_their_definitions_over_many_steps(options: dict[str, Any]):
    bench, prompt, output = Bench(), [5, 9, 9, 30], []
    params = SamplingParams(temperature=0.0, seed=0, **options)
    logits = random_logits(30, seed=7) * 0.4
    plain = []
    for index in range(30):
        new = [sequence(0, prompt, **options)] if index == 0 else []
        found = int(bench.step(logits[index : index + 1], [(0, len(prompt) + index)], new).token_ids)
        assert found == argmax(penalized(logits[index].tolist(), prompt, output, params))
        plain.append(int(logits[index].argmax()))
        output.append(found)
    assert output != plain


def test_penalties_are_rebuilt_from_known_outputs_and_rows_do_not_mix():
    """A sequence that comes back with its outputs known goes on as one that never left, in another slot and pool row,
    beside sequences with other penalties and with none."""
    options: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7}
    prompt, logits = [4, 8, 8], random_logits(12, seed=3) * 0.4
    stays, output = Bench(), []
    for index in range(12):
        new = [sequence(0, prompt, **options)] if index == 0 else []
        output.append(int(stays.step(logits[index : index + 1], [(0, 3 + index)], new).token_ids))
    returns = Bench()
    others = [sequence(0, [1, 2], frequency_penalty=-2.0), sequence(2, [7], repetition_penalty=3.0)]
    plain = sequence(1, [6, 6])
    returns.step(random_logits(3, seed=5), [(0, 2), (2, 1), (1, 2)], [*others, plain])
    back = sequence(3, prompt + output[:5], num_prompt=3, **options)
    for index in range(5, 12):
        rows = [(1, index), (2, index), (3, 3 + index)]
        batch = torch.cat((random_logits(2, seed=50 + index), logits[index : index + 1]))
        new, freed = ([back], [0]) if index == 5 else ([], [])
        found = returns.step(batch, rows, new, freed).token_ids.tolist()
        assert found[0] == int(batch[0].argmax())
        assert found[2] == output[index]


def test_a_freed_pool_row_starts_over():
    bench = Bench(max_num_seqs=1)
    logits = torch.zeros(1, VOCAB)
    logits[0, 10], logits[0, 11], logits[0, 12] = 2.0, 1.5, 1.2
    options: dict[str, Any] = {"presence_penalty": 1.0}
    assert int(bench.step(logits, [(0, 1)], [sequence(0, [1], **options)]).token_ids) == 10
    assert int(bench.step(logits, [(0, 2)]).token_ids) == 11
    assert int(bench.step(logits, [(0, 1)], [sequence(0, [1], **options)], [0]).token_ids) == 10


def test_bias_is_added_and_may_forbid():
    bench = Bench()
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = 4.0
    biased = sequence(1, [1], logit_bias={5: -100.0, 6: 1.0, 7: 2.5})
    assert bench.step(logits, [(0, 1), (1, 1)], [sequence(0, [1]), biased]).token_ids.tolist() == [5, 7]


def test_ends_are_forbidden_until_min_tokens():
    bench = Bench()
    logits = torch.zeros(2, VOCAB)
    logits[:, 2], logits[:, 3], logits[:, 9], logits[:, 11] = 9.0, 8.0, 7.0, 6.0
    short = sequence(0, [1, 1], min_tokens=2, stop_token_ids=(9,))
    free = sequence(1, [1])
    found = [bench.step(logits, [(0, 2), (1, 1)], [short, free]).token_ids.tolist()]
    found += [bench.step(logits, [(0, 2 + i), (1, 1 + i)]).token_ids.tolist() for i in (1, 2)]
    assert found == [[11, 2], [11, 2], [2, 2]]


def test_min_tokens_counts_outputs_of_an_earlier_life():
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 11] = 9.0, 6.0
    for num_known, expected in ((1, 11), (2, 2)):
        back = sequence(0, [1, 1] + [20] * num_known, num_prompt=2, min_tokens=2)
        assert int(Bench().step(logits, [(0, 2 + num_known)], [back]).token_ids) == expected


def test_a_draw_depends_on_seed_and_position_only():
    logits = torch.zeros(1, VOCAB)  # every token as likely

    def draw(seed: int, position: int, slot: int = 0, neighbours: int = 0) -> int:
        bench = Bench()
        new = [sequence(slot, [1] * position, temperature=1.0, seed=seed)]
        new += [sequence(7 - i, [1], temperature=1.0, seed=50 + i, top_p=0.5) for i in range(neighbours)]
        rows = [(s.slot, len(s.token_ids)) for s in new]
        return int(bench.step(logits.expand(len(new), -1), rows, new).token_ids[0])

    assert draw(1, 4) == draw(1, 4, slot=3) == draw(1, 4, neighbours=3)
    assert len({draw(seed, 4) for seed in range(12)}) > 4
    assert len({draw(1, position) for position in range(1, 13)}) > 4
    assert draw(2**64 - 1, 4) == draw(-1, 4)


def test_filters_leave_what_they_say():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05] + [1e-9] * (VOCAB - 4)]))

    def drawn(**options: Any) -> set[int]:
        found = set()
        for seed in range(120):
            new = [sequence(0, [1], temperature=1.0, seed=seed, **options)]
            found.add(int(Bench().step(logits, [(0, 1)], new).token_ids))
        return found

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_k=-1, top_p=0.9) == {0, 1, 2}
    assert drawn(min_p=0.5) == {0, 1}
    assert drawn(top_p=0.0) == drawn(top_k=1) == {0}


def test_features_that_no_row_uses_are_left_out():
    bench = Bench()
    bench.step(random_logits(2), [(0, 1), (1, 1)], [sequence(0, [1]), sequence(1, [1], top_k=1, temperature=2.0)])
    layout = bench.layout
    assert layout is not None
    assert layout.all_greedy
    assert not layout.adjusts
    assert not layout.logprob_rows
    bench.step(random_logits(2), [(0, 2), (1, 2)], [sequence(2, [1], temperature=1.0)])
    assert bench.layout is not None
    assert bench.layout.all_greedy  # slot 2 does not sample in this step
    bench.step(random_logits(2), [(0, 3), (2, 2)])
    assert bench.layout is not None
    assert not bench.layout.all_greedy
    assert not bench.layout.need_filter


def test_logprobs_are_of_the_raw_logits():
    bench, logits = Bench(), random_logits(3, seed=2)
    options = {"logit_bias": {17: 100.0}, "temperature": 0.0}
    new = [sequence(0, [1]), sequence(1, [1], logprobs=3, **options), sequence(2, [1], logprobs=0)]
    sampled = bench.step(logits, [(0, 1), (1, 1), (2, 1)], new)
    assert bench.layout is not None
    assert sampled.logprobs is not None
    assert bench.layout.logprob_rows == [1, 2]
    entries = sampled.logprobs.entries(list(bench.layout.num_top))
    expected = logits.log_softmax(-1)
    assert entries[0].token_id == 17
    assert entries[0].logprob == pytest.approx(float(expected[1, 17]), abs=1e-5)
    assert entries[0].top_token_ids == expected[1].argsort(descending=True)[:3].tolist()
    assert entries[0].top_logprobs == pytest.approx(expected[1].sort(descending=True).values[:3].tolist(), abs=1e-5)
    assert entries[1].token_id == int(logits[2].argmax())
    assert (entries[1].top_token_ids, entries[1].top_logprobs) == ([], [])


def test_chunks_of_prompt_logprobs_are_the_whole(monkeypatch: pytest.MonkeyPatch):
    hidden, weight = torch.randn(11, 6), torch.randn(VOCAB, 6)
    targets = torch.arange(11)
    whole = logprobs_of(hidden @ weight.T, targets, 2)
    sizes = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(rows.shape[0])
        return rows @ weight.T

    monkeypatch.setattr("manta.engine.logprobs._CHUNK_ELEMENTS", 4 * VOCAB)
    parts = logprobs_in_chunks(hidden, targets, 2, head=head, vocab_size=VOCAB)
    assert sizes == [4, 4, 3]
    torch.testing.assert_close(parts.chosen, whole.chosen)
    torch.testing.assert_close(parts.top, whole.top)
    assert torch.equal(parts.top_ids, whole.top_ids)
    assert math.isclose(float(whole.chosen[0]), float((hidden @ weight.T).log_softmax(-1)[0, 0]), abs_tol=1e-5)
