# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that all end-to-end tests serve, and the float64 reference of it."""

import json
from pathlib import Path

import pytest

from deepseek_v41_plugin.checkpoint import read_index
from deepseek_v41_plugin.cli.tiny import write_tiny
from tests.reference import ReferenceModel


@pytest.fixture(scope="session")
def checkpoint(run_seed, tmp_path_factory) -> Path:
    """Its logit of the image token, which the reference does not read, is 0: it is never the largest of 512."""
    folder = write_tiny(tmp_path_factory.mktemp("e2e") / "tiny", preset="tiny", seed=run_seed)
    image = json.loads((folder / "config.json").read_text())["image_token_id"]
    head = read_index(folder)["head.weight"]
    row = (head.end - head.begin) // head.shape[0]
    with head.path.open("r+b") as file:
        file.seek(head.begin + image * row)
        file.write(bytes(row))
    return folder


@pytest.fixture(scope="session")
def reference(checkpoint) -> ReferenceModel:
    return ReferenceModel(checkpoint)
