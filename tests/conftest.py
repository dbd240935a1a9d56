"""Shared by all tests: seeds, float64 on demand, and the table of cases."""

import pytest
import torch
from cases import CASES

torch.set_num_threads(1)  # the networks are tiny: threads would only wait for each other


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def float64():
    """Make float64 the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request):
    """Every network of the table."""
    return request.param
