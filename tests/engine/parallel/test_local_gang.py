"""Ranks as processes of this machine: they follow, their errors and ends are noticed, none stays behind.

The device is simulated, so that no weights are loaded; processes, link and watch are real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manta.engine.config import EngineConfig
from manta.engine.core import EngineCore
from manta.engine.errors import ConfigError, EngineFailed
from manta.engine.model_source import load_shape, resolve_model
from manta.engine.parallel.local_gang import LocalGang
from manta.engine.parallel.member import GangSeat
from manta.engine.parallel.vitals import SILENCE_S
from manta.engine.sim_device import start_simulated
from manta.engine.startup import start_engine
from tests.engine.engines import request, run
from tests.engine.parallel.gangs import wait_for

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}

PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
from manta.engine.model_source import load_shape, resolve_model
from manta.engine.parallel.local_gang import LocalGang
from tests.engine.parallel.test_local_gang import config_of, start
with LocalGang(config_of(sys.argv[1]), tp_size=2, pp_size=1, devices=["sim:5ms"] * 2) as gang:
    core = start(gang, sys.argv[1])
    print(*gang.pids, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return str(tmp_path)


def config_of(model: str, *, tp_size: int = 2, pp_size: int = 1) -> EngineConfig:
    sizes = {"tensor_parallel_size": tp_size, "pipeline_parallel_size": pp_size}
    return EngineConfig.build(model, device="sim:5ms", load_format="dummy", max_num_seqs=8, **sizes)


def start(gang: LocalGang, model: str, **sizes: int) -> EngineCore:
    config = config_of(model, **sizes)
    return start_engine(config, member=gang.member, store_socket=gang.store_socket, on_broken=gang.break_off)


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_followers_follow_and_end_with_the_engine(model: str):
    with LocalGang(config_of(model, tp_size=1, pp_size=2), tp_size=1, pp_size=2, devices=["sim:5ms"] * 2) as gang:
        core = start(gang, model, tp_size=1, pp_size=2)
        split = run(core, *(request(f"r{index}", [index + 1] * 5, max_tokens=20) for index in range(5)))
        core.close()
        (process,) = gang._processes
        assert process.wait(10) == 0, "a follower ends by itself"
    whole = run(
        start_engine(config_of(model, tp_size=1)),
        *(request(f"r{index}", [index + 1] * 5, max_tokens=20) for index in range(5)),
    )
    assert split == whole


@pytest.mark.parametrize(("number", "limit_s"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 5.0)], ids=["KILL", "STOP"])
def test_a_follower_that_is_killed_or_stopped_breaks_the_engine(model: str, number: signal.Signals, limit_s: float):
    with LocalGang(config_of(model), tp_size=2, pp_size=1, devices=["sim:5ms"] * 2) as gang:
        core = start(gang, model)
        core.add(request("a", [1, 2, 3], max_tokens=200))
        core.step()
        os.kill(gang.pids[0], number)
        assert wait_for(gang._is_broken.is_set) < limit_s
        with pytest.raises(EngineFailed, match="Rank 1"):
            core.step()
        core.close()  # is no error of its own
    assert not any(is_there(pid) for pid in gang.pids)


def test_the_error_of_a_follower_at_start_is_raised_as_it_is(model: str):
    with (
        LocalGang(config_of(model), tp_size=2, pp_size=1, devices=["sim:5ms", "sim:unknown"]) as gang,
        pytest.raises(ConfigError, match="no figures for 'unknown'") as raised,
    ):
        start(gang, model)
    assert raised.value.field == "device"
    assert not any(is_there(pid) for pid in gang.pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["KILL", "INT"])
def test_no_follower_outlives_its_parent(model: str, number: signal.Signals):
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PARENT, model]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 1
        assert is_there(pids[0])
        parent.send_signal(number)
        parent.wait(20)
        wait_for(lambda: not is_there(pids[0]))


def test_a_process_that_ends_before_it_has_met_the_others_fails_the_start(model: str):
    with LocalGang(config_of(model), tp_size=2, pp_size=1, devices=["sim:5ms"] * 2) as gang:
        os.kill(gang.pids[0], signal.SIGKILL)
        seat = GangSeat(gang.member, gang.store_socket, gang.break_off, check=gang.check)
        config = config_of(model)
        with pytest.raises(EngineFailed, match="process of rank 1 ended with code -9"):
            start_simulated(config, load_shape(resolve_model(config.model)), seat)


def test_a_parent_that_was_suspended_goes_on(model: str):
    code = (
        "import os\n"
        "from tests.engine.parallel.test_local_gang import *\n"
        f"with LocalGang(config_of({model!r}), tp_size=2, pp_size=1, devices=['sim:5ms'] * 2) as gang:\n"
        f"    core = start(gang, {model!r})\n"
        "    print(os.getpid(), flush=True)\n"
        "    input()\n"
        "    print(len(run(core, request('a', [1, 2, 3], max_tokens=50))['a']))\n"
        "    core.close()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == f"{parent.pid}\n"
        parent.send_signal(signal.SIGSTOP)
        time.sleep(SILENCE_S + 1.5)  # longer than a silence that would be minded
        parent.send_signal(signal.SIGCONT)
        assert parent.communicate("\n", timeout=20)[0] == "50\n"
