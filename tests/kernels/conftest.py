"""The Triton kernels, where they can be had."""

import pytest

from hybrid_rlhf.kernels import cuda
from hybrid_rlhf.kernels.ops import KernelsUnavailableError


@pytest.fixture(scope="session")
def ops():
    try:
        return cuda.load()
    except KernelsUnavailableError as error:
        pytest.skip(str(error))
