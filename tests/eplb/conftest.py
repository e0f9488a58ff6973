# SPDX-License-Identifier: Apache-2.0
"""Random numbers of one test, as numpy draws them."""

import numpy as np
import pytest


@pytest.fixture
def rng(run_rng) -> np.random.Generator:
    return np.random.default_rng(run_rng.getrandbits(64))
