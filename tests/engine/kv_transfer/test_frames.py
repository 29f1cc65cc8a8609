"""Rectangles are cut into frames that fit a buffer and cover everything once; checksums tell blocks apart."""

from __future__ import annotations

from collections import Counter

import pytest

from manta.engine.kv_transfer.frames import checksums, cut


@pytest.mark.parametrize("frame_bytes", [1, 100, 101, 250, 700, 10**6])
@pytest.mark.parametrize("blocks", [(0, 1), (3, 10)])
@pytest.mark.parametrize("layers", [(0, 1), (2, 7)])
def test_frames_cover_every_block_of_every_layer_once_and_fit(
    layers: tuple[int, int], blocks: tuple[int, int], frame_bytes: int
):
    covered: Counter[tuple[int, int]] = Counter()
    for of_layers, of_blocks in cut(layers, blocks, block_bytes=100, frame_bytes=frame_bytes):
        cells = [(layer, block) for layer in range(*of_layers) for block in range(*of_blocks)]
        assert len(cells) * 100 <= max(frame_bytes, 100)
        covered.update(cells)
    assert covered == {(layer, block): 1 for layer in range(*layers) for block in range(*blocks)}


def test_layers_share_a_frame_where_all_their_blocks_fit():
    assert list(cut((0, 5), (0, 3), block_bytes=10, frame_bytes=65)) == [
        ((0, 2), (0, 3)),
        ((2, 4), (0, 3)),
        ((4, 5), (0, 3)),
    ]


def test_blocks_of_a_layer_take_several_frames_where_they_do_not_fit():
    assert list(cut((0, 2), (0, 3), block_bytes=10, frame_bytes=25)) == [
        ((0, 1), (0, 2)),
        ((0, 1), (2, 3)),
        ((1, 2), (0, 2)),
        ((1, 2), (2, 3)),
    ]


def test_a_flipped_bit_changes_the_checksum_of_its_block_alone():
    payload = bytearray(range(240))  # 2 layers, keys and values, 3 blocks of 20 bytes a side
    before = checksums(memoryview(payload), num_layers=2, num_blocks=3)
    payload[120 + 60 + 25] ^= 1  # second layer, values, second block
    after = checksums(memoryview(payload), num_layers=2, num_blocks=3)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
