# SPDX-License-Identifier: Apache-2.0
"""The `dsv41` command."""
