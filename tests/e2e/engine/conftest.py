# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.e2e.engine.harness import Engines

pytest.importorskip("vllm", reason="these tests start engines")


@pytest.fixture(scope="session")
def engines(checkpoint):
    running = Engines(checkpoint)
    yield running
    running.close()
