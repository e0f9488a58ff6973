# SPDX-License-Identifier: Apache-2.0
"""Configurations near an op's own choice: one field changed at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from importlib import import_module

PACKAGE = "deepseek_v41_plugin.kernels."

# op: (module, the choice for a number of rows, values to try by field)
SWEEPS = {
    "attend": ("attention.triton_attend", lambda m, rows: m.Config(), {
        "splits": (1, 2, 4, 8), "tile": (16, 32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4)}),
    "index_select": ("indexer.triton_select", lambda m, rows: m.Config(), {
        "rows": (1, 2, 4, 8), "keys": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4), "programs": (132, 264, 528, 1056),
        "chunk": (4096, 8192, 16384)}),
    "row_linear": ("linear.triton_skinny", lambda m, rows: m.config_for(rows), {
        "bm": (64, 128), "bn": (16, 32, 64, 128), "warps": (4, 8), "stages": (3, 4, 5, 6)}),
    "mhc_turn": ("mhc.triton_turn", lambda m, rows: m.config_for(rows), {
        "rows": (16, 64, 128), "warps": (4, 8), "stages": (2, 3, 4), "grouped": (False, True)}),
    "moe_experts": ("moe.triton_experts", lambda m, rows: m.choose(rows, 6, 384, True), {
        "table": (False, True), "whole_rows": (False, True), "tile_f": (64, 128), "tile_d": (64, 128), "block_n": (16, 32, 64, 128),
        "blocks": (1, 2), "warps": (4, 8), "stages": (2, 3, 4, 5)}),
}
SWEEPS["wide_linear"] = SWEEPS["row_linear"]
SWEEPS["group_linear"] = ("linear.cuda", lambda m, rows: m.config_for(rows, m.triton_group.CONFIGS), SWEEPS["row_linear"][2])


def configs(op: str, rows: int) -> Iterator[tuple[str, object]]:
    """(label, configuration); none for an op without any.  Fields that a configuration has not, or already so, are left out."""
    if op not in SWEEPS:
        return
    name, choose, values = SWEEPS[op]
    try:
        base = choose(import_module(PACKAGE + name), rows)
    except (ImportError, AttributeError) as changed:
        print(f"sweep of {op}: {changed}", flush=True)
        return
    known = {f.name for f in fields(base)} if is_dataclass(base) else set(base._fields)
    for field, tried in values.items():
        if field not in known:
            print(f"sweep of {op}: no field {field}", flush=True)
            continue
        for value in tried:
            if value != getattr(base, field):
                yield f"{field}={value}", replace(base, **{field: value}) if is_dataclass(base) else base._replace(**{field: value})
