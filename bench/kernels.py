#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Each op of the registry at V4.1's shapes: every implementation, the host's kernel beside it, the roofline and the error.

    kernels.py [--only REGEX] [--sweep] [--host] [--csv FILE] [--seconds S]      on a GPU
    kernels.py --device cpu                                                      small shapes, plain torch: the bench itself

Cells are named op/variant/tN/implementation; hopper/cases.py says what each is, hopper/hosts.py how the host's are called,
hopper/sweep.py which configurations --sweep tries.  Time is a CUDA graph's, over input sets of three times the L2
together (weights come from memory, activations of a small op from the L2, as in the model); median, lowest and highest.
`roof_us` is the larger of bytes over copy bandwidth and operations over the matmul rate, both measured in the same run;
`percent` is roof_us over the median.  `error` is against the plain torch form in the same run, on the same inputs and
outputs that began as NaN: ||a - b|| / ||b||, the share of other rows for a choice.  A cell that fails is a row.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path

from hopper.cells import Cells, Lost, device_name, spread, version

CHECKED = 64  # rows
COLUMNS = ("unit", "median", "low", "high", "calls", "sets", "gb_per_s", "tflops", "roof_us", "percent", "error", "config", "seconds")


class Kernels:
    """The table of cases, run one after another; a case's inputs go before the next one's come."""

    def __init__(self, args: argparse.Namespace, cells: Cells):
        self.args, self.cells, self.cuda = args, cells, args.device == "cuda"

    def ceilings(self) -> None:
        """Measured at each start, whatever is in the csv: shares of a roofline are of the same run."""
        from hopper.timing import ceilings

        self.roof = {}  # empty on a CPU: no rate of it is measured, so no share of one is given
        for name, (unit, values) in ceilings().items() if self.cuda else ():
            found = spread(values)
            self.roof[name] = float(found["median"])
            if self.cells.wants(f"ceiling/{name}"):
                self.cells.add(f"ceiling/{name}", unit=unit, **found)

    def run(self) -> None:
        import torch
        from hopper.cases import CASES, Make

        from deepseek_v41_plugin.kernels import registry

        load_ops()
        self.ceilings()
        missing = sorted(set(registry.OPS) - {case.op for case in CASES})
        print("ops without a case of their own: " + (", ".join(missing) or "none"), flush=True)
        for case in CASES:
            op, make = registry.OPS.get(case.op), Make(self.args.device, not self.cuda, self.args.seed)
            for variant, values in case.variants.items():
                for rows in case.rows if self.cuda else case.small:
                    name = "/".join(filter(None, (case.op, variant, f"t{rows}")))
                    self.case(op, name, lambda rows=rows, values=values, build=case.build, make=make: build(make, rows, *values), make)
            make.kept.clear()
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()

    def case(self, op, name: str, build, make) -> None:
        """All implementations of one shape that are still wanted."""
        import torch
        from hopper.hosts import HOSTS

        op_name = name.split("/")[0]
        if op is None:
            self.cells.run(f"{name}/none", lambda: (_ for _ in ()).throw(LookupError("no such op in the registry")))
            return
        device = torch.device(self.args.device)
        todo = [(impl.name, impl, None, {}) for impl in op.impls if impl.supported(device)[0]]
        if self.args.sweep:
            from hopper.sweep import configs

            rows = int(name.rsplit("/t", 1)[1])
            todo += [(f"{impl.name}:{label}", impl, None, {"config": config})
                     for impl in op.impls if impl.supported(device)[0] and impl.name != "torch" for label, config in configs(op_name, rows)]
        if self.args.host and self.cuda:
            todo += [(f"host-{label}", None, start, {}) for label, start in HOSTS.get(op_name, ())]
        todo = [item for item in todo if self.cells.wants(f"{name}/{item[0]}")]
        if not todo:
            return
        state: dict = {}
        for label, impl, start, more in todo:
            self.cells.run(f"{name}/{label}", lambda i=impl, s=start, m=more: self.measure(op, i, s, m, build, make, state))
        state.clear()

    def measure(self, op, impl, start, more: dict, build, make, state: dict) -> list[dict]:
        import torch
        from hopper.timing import checked, sets_for, time_op

        if "works" not in state:
            first = build()
            if first is None:
                state["works"] = []
            else:
                # Fewer sets where a case's shared tensors outgrow the L2 by themselves.
                state["works"] = [first, *(build() for _ in range(sets_for(first.bytes) - 1 if self.cuda else 1))]
        works = state["works"]
        if not works:
            return []  # a shape that this variant leaves out
        work = works[0]
        with torch.inference_mode():
            if "wanted" not in state:
                head = work.head(CHECKED) if work.rowwise else work
                state["wanted"] = head.result(op.impls[-1].fn)
            if start is None:
                wrong = checked(work, impl.fn, state["wanted"], CHECKED, **more)
                calls = [lambda w=w: impl.fn(*w.args, **w.kwargs, **more) for w in works]
                graphs = impl.graphs
            else:
                calls, compare = start(make, works)
                graphs = True
                wrong = compare(state["wanted"], CHECKED)
            times, count = time_op(calls, self.cuda, graphs, seconds=self.args.cell_seconds)
        found = spread(times)
        us = float(found["median"])
        shares = {}
        if self.roof:
            roof = max(work.bytes / self.roof["copy"] * 1e-3, work.flops / self.roof[work.rate] * 1e-6)
            shares = {"gb_per_s": f"{work.bytes / us * 1e-3:.4g}", "tflops": f"{work.flops / us * 1e-6:.4g}", "roof_us": f"{roof:.4g}",
                      "percent": f"{100 * roof / us:.1f}"}
        return [{
            "unit": "us" if graphs else "us, eager", **found, "calls": count, "sets": len(works), **shares,
            "error": "" if wrong is None else f"{wrong:.2e}", "config": str(more["config"]).replace(",", ";") if more else "",
        }]


def load_ops() -> None:
    """Registers all families."""
    import importlib
    import pkgutil

    import deepseek_v41_plugin.kernels as kernels

    for module in pkgutil.iter_modules(kernels.__path__):
        if module.ispkg:
            importlib.import_module(f"{kernels.__name__}.{module.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="cells whose name this regular expression finds")
    parser.add_argument("--sweep", action="store_true", help="also configurations beside the chosen one")
    parser.add_argument("--host", action="store_true", help="also the host's kernels")
    parser.add_argument("--seconds", type=float, default=1e9, help="no cell starts later")
    parser.add_argument("--cell-seconds", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if args.host:
        os.environ["DSV41_IMPL"] = "host"  # the config that the host's layers are made from is the host's own
    import torch

    stamp = {"device": device_name(args.device), "torch": torch.__version__, "triton": version("triton"), "vllm": version("vllm"),
             "humming": version("humming-kernels")}
    cells = Cells(args.csv, stamp, COLUMNS, args.only, args.seconds, args.again)
    try:
        Kernels(args, cells).run()
    except Lost as lost:
        print(lost, flush=True)
        raise SystemExit(3) from lost


if __name__ == "__main__":
    main()
