"""The same engine benchmark of a model held in another way, in a process of its own that leaves the device free again.

Run as a program it is that process: an order on stdin, progress and, on the last line, the report on stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from manta.engine.config import EngineConfig, QuantizationConfig
from manta.engine.errors import ConfigError, EngineFailed

PLAIN = "bf16"
"""The model as it is; other names are those of `quantization.weights`."""


def held_as(config: EngineConfig, name: str) -> EngineConfig:
    """`config` with weights held as `name` says and KV in the model's type. Raises ConfigError for an unknown name."""
    if name == PLAIN:
        return config.model_copy(update={"quantization": QuantizationConfig()})
    try:
        quantization = QuantizationConfig.model_validate({"weights": name})
    except ValueError:
        raise ConfigError(f"against = {name!r}: must be {PLAIN} or a scheme of quantization.weights") from None
    return config.model_copy(update={"quantization": quantization})


def measure(
    config: EngineConfig, name: str, *, options: Mapping[str, Any], say: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures, each called NAME_..., and the other engine's description. `options` are those of `engine.run`.

    Raises ConfigError, and EngineFailed when the process does not come to its end.
    """
    from manta.deploy import settings

    order = {"config": held_as(config, name).model_dump(mode="json"), "options": dict(options)}
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name if __spec__ else __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=settings.inherited({}),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(json.dumps(order))
        process.stdin.close()
        last = ""
        for line in process.stdout:
            if last:
                say(f"{name}: {last}")
            last = line.strip()
    if process.returncode or not last.startswith("{"):
        raise EngineFailed(f"The process that was to measure {name} ended with {process.returncode}: {last}")
    found = json.loads(last)
    return {f"{name}_{key}": value for key, value in found["figures"].items()}, found["model"]


def ratios(figures: Mapping[str, float], name: str, headlines: Sequence[str]) -> dict[str, float]:
    """What this engine's headline figures are over the other one's."""
    pairs = {key: figures.get(f"{name}_{key}") for key in headlines if key in figures}
    return {f"{key}_over_{name}": figures[key] / other for key, other in pairs.items() if other}


def main() -> None:
    """The other process."""
    from rich.console import Console

    from . import engine

    order = json.loads(sys.stdin.read())
    config = EngineConfig.model_validate(order["config"])
    report = engine.run(config, **order["options"], console=Console(width=200, highlight=False))
    print(json.dumps(report.tree()), flush=True)


if __name__ == "__main__":
    main()
