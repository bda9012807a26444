"""What the exercises import: themselves, the minimal implementation, and what counts its traffic."""

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent), str(HERE.parents[2] / "examples" / "minimal")]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
