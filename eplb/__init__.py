# SPDX-License-Identifier: Apache-2.0
"""Expert parallel load balancing: where experts go, when, and how they get there. Knows no host."""
