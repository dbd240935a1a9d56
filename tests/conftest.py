"""Shared by all tests: seeds, float64 on demand, and the table of cases."""

from contextlib import ExitStack

import gpytorch
import linear_operator
import pytest
import torch
from cases import CASES

torch.set_num_threads(1)  # the networks are tiny: threads would only wait for each other


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _stock_settings():
    """Undo what importing BoTorch changes for the whole process, so that no test depends on those before it."""
    with ExitStack() as stack:
        stack.enter_context(linear_operator.settings.fast_computations())
        stack.enter_context(linear_operator.settings.max_cholesky_size(800))
        stack.enter_context(linear_operator.settings.cholesky_max_tries(3))
        stack.enter_context(gpytorch.settings.max_eager_kernel_size(512))
        yield


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
