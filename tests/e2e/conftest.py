# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that all end-to-end tests serve, and the float64 reference of it."""

from pathlib import Path

import pytest

from deepseek_v41_plugin.cli.tiny import write_tiny
from tests.reference import ReferenceModel


@pytest.fixture(scope="session")
def checkpoint(run_seed, tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("e2e") / "tiny", preset="tiny", seed=run_seed)


@pytest.fixture(scope="session")
def reference(checkpoint) -> ReferenceModel:
    return ReferenceModel(checkpoint)
