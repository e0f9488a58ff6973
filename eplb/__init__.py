"""Expert placement and rebalancing. Empty so far: nothing here moves experts yet."""
