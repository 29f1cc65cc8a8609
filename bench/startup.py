"""How long a fresh process takes to its first token, with an empty and with a filled cache of compiled kernels.

Run as a program it is that process: configuration on stdin, one line of JSON on stdout. It imports nothing of ours
before it has to, so that each phase's imports are counted in that phase.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from manta.engine.config import EngineConfig

HEADLINES = ("ready_cold_s", "ready_warm_s")
PROMPT_LEN = 32
HEAVY_MODULES = (
    *("transformers", "torch._dynamo", "torch._inductor", "sympy", "networkx", "pandas", "scipy", "ray"),
    *("tokenizers", "huggingface_hub", "fastapi", "matplotlib"),
)
"""Packages that take long to import and that a first token should not need."""


def measure(
    config: EngineConfig, *, repeats: int, say: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, Any]]:
    """(figures, details): medians of `repeats` cold starts, each followed by a warm one; and every run's phases.

    Cold and warm mean the caches of compiled kernels (Triton's and the driver's), which lie in a folder of their own.
    The operating system's file cache is as it is. Raises EngineFailed when a process does not come to its token.
    """
    from .stats import median

    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="manta-bench-startup-") as cache:
            for kind, found in runs.items():
                found.append(_run(config, Path(cache)))
                say(f"startup, {kind} cache: {found[-1]['total_s']:.2f} s")
    figures = {f"ready_{kind}_s": median([one["total_s"] for one in found]) for kind, found in runs.items()}
    for kind, found in runs.items():
        for phase in found[0]["phases_s"]:
            seconds = median([one["phases_s"][phase] for one in found])
            figures[f"ready_{kind}_{phase.replace(' ', '_').replace('-', '_')}_s"] = seconds
    return figures, {"startup": runs}


def _run(config: EngineConfig, cache: Path) -> dict[str, Any]:
    from manta.deploy import settings
    from manta.engine.errors import EngineFailed

    variables = {"TRITON_CACHE_DIR": str(cache / "triton"), "CUDA_CACHE_PATH": str(cache / "cuda")}
    begin_s = time.monotonic()  # one clock for all processes of a Linux machine
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name if __spec__ else __name__],
        input=config.model_dump_json(),
        capture_output=True,
        text=True,
        env=settings.inherited(variables),
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise EngineFailed(f"The process that was to produce a first token ended with {done.returncode}: {last}")
    found = json.loads(lines[-1])
    ends_s = {"python": found.pop("begin_s"), **found.pop("ends_s")}
    phases_s, since_s = {}, begin_s
    for name, end_s in ends_s.items():
        phases_s[name] = end_s - since_s
        since_s = end_s
    return {"total_s": since_s - begin_s, "phases_s": phases_s, **found}


def main() -> None:
    """The fresh process."""
    found: dict[str, Any] = {"begin_s": time.monotonic()}
    ends_s: dict[str, float] = {}

    def end(phase: str, seconds: float = 0.0) -> None:
        ends_s[phase] = time.monotonic()

    from manta.engine.config import EngineConfig
    from manta.engine.request import EngineRequest, SamplingParams
    from manta.engine.startup import start_engine

    end("light imports")
    core = start_engine(EngineConfig.model_validate_json(sys.stdin.read()), end)
    end("engine")
    prompt = range(core.info.vocab_size - PROMPT_LEN, core.info.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)
    refusal = core.add(EngineRequest(request_id="first", prompt_token_ids=list(prompt), params=params))
    assert refusal is None, refusal
    while not any(delta.token_ids for delta in core.step()):
        pass
    end("first token")
    found["ends_s"] = ends_s
    found["num_modules"] = len(sys.modules)
    found["heavy_modules"] = [name for name in HEAVY_MODULES if name in sys.modules]
    core.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
