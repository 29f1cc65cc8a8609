"""Marks for tests that need more than one GPU. Knows no test."""

from __future__ import annotations

import pytest
import torch

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

needs_two_gpus = (
    pytest.mark.multi_gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two CUDA GPUs of one machine, and torch sees {NUM_GPUS}"),
)
