"""`manta logs` finds the files of a replica's ranks by what their processes say first, and shows the right lines."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from manta.deploy.rank_logs import FolderLogs, NoLogs, RankLog, choose, show
from manta.engine.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    def write(name: str, replica_id: str, rank: int, *lines: str) -> None:
        first = f"2026 INFO manta.replicas.shard: rank {rank} of replica {replica_id} starts in process 7\n"
        (tmp_path / name).write_text(":job_id:01\n" + first + "".join(f"{line}\n" for line in lines))

    write("worker-aa-01-1.err", "x1abc", 0, "driver 1", "driver 2", "driver 3")
    write("worker-bb-01-2.err", "x1abc", 1, "follower 1", "follower 2")
    write("worker-cc-01-3.err", "x2def", 0, "other")
    (tmp_path / "worker-dd-01-4.err").write_text("an edge\n")
    (tmp_path / "worker-aa-01-1.out").write_text("")
    return tmp_path


def shown(folder: Path, replica: str | None, *, rank: int | None = None, tail: int = 100) -> list[str]:
    lines: list[str] = []
    show(FolderLogs([folder]), replica, rank=rank, follow=False, tail=tail, write=lines.append)
    return lines


def test_the_files_of_ranks_are_found_and_no_others(folder: Path) -> None:
    found = [(log.replica_id, log.rank, Path(log.place).name) for log in FolderLogs([folder]).find()]
    assert found == [
        ("x1abc", 0, "worker-aa-01-1.err"),
        ("x1abc", 1, "worker-bb-01-2.err"),
        ("x2def", 0, "worker-cc-01-3.err"),
    ]


def test_lines_of_several_ranks_carry_the_rank(folder: Path) -> None:
    assert shown(folder, "x1", tail=2) == [
        "[rank 0] driver 2",
        "[rank 0] driver 3",
        "[rank 1] follower 1",
        "[rank 1] follower 2",
    ]


def test_one_rank_is_shown_as_it_wrote(folder: Path) -> None:
    assert shown(folder, "x1abc", rank=1, tail=1) == ["follower 2"]


def test_what_is_written_later_follows(folder: Path) -> None:
    lines: list[str] = []
    has_come = threading.Event()

    def write(line: str) -> None:
        lines.append(line)
        if line == "later":
            has_come.set()

    def follow() -> None:
        show(FolderLogs([folder]), "x2", rank=None, follow=True, tail=1, write=write)

    threading.Thread(target=follow, daemon=True).start()
    with (folder / "worker-cc-01-3.err").open("a") as file:
        file.write("later\n")
    assert has_come.wait(5)


@pytest.mark.parametrize(
    ("replica", "rank", "sentence"),
    [
        (None, None, r"which replica\? There are: x1abc \(2 ranks\), x2def \(1 rank\)"),
        ("y", None, r"no replica begins with 'y'; there are: x1abc"),
        ("x", None, r"2 replicas begin with 'x'"),
        ("x1", 2, r"replica x1abc has no rank 2: it has 2 ranks, from 0 on"),
    ],
)
def test_what_cannot_be_shown_is_answered_with_what_there_is(
    folder: Path, replica: str | None, rank: int | None, sentence: str
) -> None:
    with pytest.raises(NoLogs, match=sentence):
        shown(folder, replica, rank=rank)


def test_a_replica_whose_id_begins_like_another_s_is_found_by_its_whole_id() -> None:
    logs = [RankLog("a", 0, "1"), RankLog("ab", 0, "2", "dead")]
    assert choose(logs, "a", None) == logs[:1]
    with pytest.raises(NoLogs, match=r"ab \(1 rank, dead\)"):
        choose(logs, None, None)


def test_a_tail_of_nothing_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--tail 0"):
        shown(folder, "x1", tail=0)
