"""The `dsv41` command."""
