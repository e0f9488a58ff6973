# SPDX-License-Identifier: Apache-2.0
"""Expert placement and rebalancing. Empty so far: nothing here moves experts yet."""
