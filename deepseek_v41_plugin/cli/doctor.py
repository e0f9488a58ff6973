# SPDX-License-Identifier: Apache-2.0
"""`dsv41 doctor [MODEL]`: what would serve DeepSeek-V4.1 here, and why nothing else."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

import torch

import deepseek_v41_plugin

from .. import checkpoint
from ..config import ModelConfig
from ..kernels import arch
from ..kernels.registry import OPS, OpError
from ..model.draft import Draft
from ..model.loading import check_checkpoint
from ..model.model import Model
from ..model.settings import Settings, Shards, shards_problem
from ..replay import Policy

OK, NOTE, BAD = "ok", "--", "BAD"


class Report:
    """Lines as they come; `bad` once one of them means that the model could not be served."""

    bad = False

    def __call__(self, mark: str, subject: str, text: str) -> None:
        self.bad |= mark == BAD
        print(f"{mark:3s} {subject:22s} {text}")


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "doctor", help="say what this host can serve, with which implementation, and why",
        description="Exit code 1 when the model could not be served as asked (DSV41_IMPL, MODEL).",
    )
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", help="a checkpoint's folder, to be checked too")
    parser.add_argument("--tensor-parallel-size", type=int, metavar="N", help="as for vllm serve (default: all devices)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # The host logs as it is imported; this report is what was asked for.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    report = Report()
    hardware = arch.detect()
    report(OK, "plugin", f"deepseek-v41-plugin {deepseek_v41_plugin.__version__}, Python {sys.version.split()[0]}, torch {torch.__version__}")
    report(OK, "hardware", f"{hardware.count} x {hardware.name}, {hardware.sm}, {size_text(hardware.memory)}")
    check_host(report)
    check_ops(report, torch.device(hardware.device))
    check_balance(report, torch.device(hardware.device))
    if args.model is not None:
        check_model(report, args.model, hardware, args.tensor_parallel_size or hardware.count)
    print("could NOT be served as asked" if report.bad else "can be served as asked")
    return int(report.bad)


def check_host(report: Report) -> None:
    """vLLM: version, set-up of a CPU host, which model would serve, each hook."""
    if os.environ.get("VLLM_TARGET_DEVICE"):
        report(NOTE, "VLLM_TARGET_DEVICE", "is set: vLLM then skips platform plugins, and with them the CPU set-up. Unset it")
    try:
        from vllm.platforms import current_platform

        current_platform.device_type  # resolves the platform, and runs the CPU set-up
        import vllm
    except ImportError as error:
        report(BAD, "host", f"no vLLM here ({error}). Install one: .ci/setup, or pip install 'deepseek-v41-plugin[vllm]'")
        return
    from ..vllm import hooks
    from ..vllm.options import OptionError

    problem = hooks.untested()
    report(NOTE if problem else OK, "host", problem or f"vLLM {vllm.__version__}")
    try:
        plugin, why = hooks.wanted()
    except OptionError as error:
        report(BAD, "DSV41_IMPL", str(error))
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if plugin and allowed is not None and "dsv41" not in allowed.split(","):
        report(BAD, "VLLM_PLUGINS", f"{allowed!r} leaves dsv41 out, so the host's own model would be tried. Add dsv41,dsv41_cpu")
    if not plugin and current_platform.is_cpu():
        report(BAD, "model", f"the host ({why}) has no CPU path for V4.1. Unset DSV41_IMPL")
    else:
        report(OK, "model", f"{'the plugin' if plugin else 'the host'} serves: {why}")
    for hook in hooks.HOOKS:
        problem = hook.find()
        mark = OK if problem is None else BAD if plugin else NOTE
        report(mark, "hook", problem or f"{hook.module}.{hook.attribute} ({hook.purpose})")
    if current_platform.is_cpu():
        triton = importlib.import_module("vllm.triton_utils").HAS_TRITON
        report(OK if triton else BAD, "Triton", "ready for Model Runner V2, interpreted" if triton else
               "not ready for Model Runner V2. Unset DSV41_CPU_SETUP and TRITON_INTERPRET; VLLM_PLUGINS must name dsv41_cpu")
    if plugin and os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1").lower() in ("0", "false"):
        report(BAD, "model runner", "VLLM_USE_V2_MODEL_RUNNER asks for V1, which keeps no token history for Engram. Unset it")


def check_ops(report: Report, device: torch.device) -> None:
    """Each op with the implementation that runs on `device`, and why not the others."""
    importlib.import_module("deepseek_v41_plugin.kernels.verification")  # the models' ops are registered by now
    for name, op in sorted(OPS.items()):
        try:
            for impl, chosen, reason in op.explain(device):
                report(OK if chosen else NOTE, "op " + name, f"{impl} ({reason})")
        except OpError as error:
            report(BAD, "op " + name, str(error))


def check_balance(report: Report, device: torch.device) -> None:
    """What would move experts between ranks on this machine."""
    from ..eplb.transport import shm, symm_mem

    for name, transport in (("symm_mem", symm_mem), ("shm", shm)):
        ok, why = transport.supported([torch.empty(0, device=device)])
        report(OK if ok else NOTE, "EPLB transport", f"{name} (between ranks of one machine)" if ok else f"not {name}: {why}")


def check_model(report: Report, folder: Path, hardware: arch.Hardware, ranks: int) -> None:
    """config.json, shard headers, and how the bytes fit."""
    try:
        cfg = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
        entries, _, unknown = check_checkpoint(cfg, folder)
    except checkpoint.CheckpointError as error:
        report(BAD, "checkpoint", str(error))
        return
    except (OSError, RecursionError, ValueError) as error:  # ConfigError and bad JSON are ValueErrors
        report(BAD, "model", str(error) or type(error).__name__)
        return
    report(OK, "config.json", f"{cfg.num_hidden_layers} layers, {cfg.n_routed_experts} experts, {cfg.num_nextn_predict_layers} draft stages")
    report(OK, "checkpoint", f"{len(entries)} tensors in {len({e.path for e in entries.values()})} shards")
    for name in unknown:
        report(NOTE, "tensor", f"{name} is not part of V4.1 and would be ignored")
    table = sum(e.end - e.begin for name, e in entries.items() if ".engram.embed." in name)
    report(OK, "Engram tables", f"{size_text(table)}, mapped: page cache of the host, one copy a node")
    if problem := shards_problem(cfg, ranks):
        report(BAD, "tensor_parallel_size", problem)
        return
    weights = rank_bytes(Model, cfg, ranks)
    fits = ranks <= hardware.count and weights < 0.9 * hardware.memory
    report(OK if fits else BAD, "weights", f"{size_text(weights)} a rank of {ranks}; {hardware.count} x {size_text(hardware.memory)} here")
    if not cfg.num_nextn_predict_layers:
        report(NOTE, "DSpark", "no draft stages in this checkpoint")
    elif cfg.dspark_n_routed_experts % ranks:
        report(NOTE, "DSpark", f"{ranks} ranks do not divide the draft's {cfg.dspark_n_routed_experts} experts")
    else:
        more = size_text(rank_bytes(Draft, cfg, ranks))
        report(OK, "DSpark", f"{cfg.num_nextn_predict_layers} draft stages, up to {cfg.dspark_block_size} drafts, {more} more a rank")
    if cfg.last_kv_source is not None:
        report(OK, "bounded replay", f"a prefix hit recomputes its last {cfg.sliding_window} tokens, and behind layer {cfg.last_kv_source}"
               f" only a prompt's last {Policy.keep_tokens} run, unless --no-swa-bounded-replay")


def rank_bytes(kind: type[Model | Draft], cfg: ModelConfig, ranks: int) -> int:
    """Bytes of the parameters one tensor parallel rank holds."""
    with torch.device("meta"):
        model = kind(cfg, Settings(shards=Shards(0, ranks)))
    return sum(p.numel() * p.element_size() for p in model.parameters())


def size_text(size: float) -> str:
    """Bytes for people: 1.5 GiB, 310.2 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            break
        size /= 1024
    else:
        unit = "GiB"
    return f"{size:.1f} {unit}"
