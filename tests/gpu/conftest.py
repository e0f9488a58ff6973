# SPDX-License-Identifier: Apache-2.0
"""These tests are for a machine with a GPU; elsewhere they are not collected (see the README's table)."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
