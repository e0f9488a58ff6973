# SPDX-License-Identifier: Apache-2.0
"""Level 2 of ``dsv41 verify-replay``: what real engines say in the modes off, mask and compact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ..config import ModelConfig

TOP = 20  # the most logprobs a step that vLLM gives without further options
Prompt = str | list[int]
Answer = list[tuple[int, dict[int, float]]]  # by step: the token, and logprobs of the likely ones


class EngineError(RuntimeError):
    """An engine did not answer."""


def run_engine(job: dict) -> list[Answer]:
    """The answers of one engine, started for `job` (see `replay_job`) and gone afterwards."""
    env = {"VLLM_LOGGING_LEVEL": "ERROR"} | os.environ
    with TemporaryDirectory() as folder:
        path = Path(folder) / "answers.json"
        command = [sys.executable, "-m", f"{__package__}.replay_job", str(path)]
        done = subprocess.run(command, input=json.dumps(job), text=True, capture_output=True, env=env)
        if done.returncode or not path.exists():
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
            raise EngineError(f"the engine ended with code {done.returncode}:\n{tail}")
        raw = json.loads(path.read_text(encoding="utf-8"))
    return [[(token, dict(map(tuple, top))) for token, top in steps] for steps in raw]


def engine_options(model: Path, mode: str, keep_tokens: int, given: dict) -> dict:
    """Options of LLM: those given, without prefix caching, in `mode`."""
    additional = dict(given.get("additional_config") or {})
    additional["dsv41"] = dict(additional.get("dsv41") or {}) | {"decoder_replay": mode, "keep_tokens": keep_tokens}
    return given | {"model": str(model), "enable_prefix_caching": False, "additional_config": additional}


def make_job(options: dict, prompts: list[Prompt], tokens: int) -> dict:
    sampling = {"temperature": 0, "max_tokens": tokens, "logprobs": TOP, "ignore_eos": True}
    return {"engine": options, "prompts": prompts, "sampling": sampling}


def read_prompts(path: Path) -> list[Prompt]:
    """One prompt a line: text, or a JSON list of token ids.  Empty lines count for nothing."""
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if not line.startswith("["):
            prompts.append(line)
            continue
        try:
            ids = json.loads(line)
        except json.JSONDecodeError:
            prompts.append(line)
            continue
        if not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"{path}, line {number}: not a list of token ids. Write [id, ...], or text that does not start with [")
        prompts.append(ids)
    if not prompts:
        raise ValueError(f"{path}: no prompt. Write one a line")
    return prompts


def random_prompts(rng: np.random.Generator, cfg: ModelConfig, keep_tokens: int, most: int) -> list[Prompt]:
    """Token prompts shorter and longer than keep_tokens, at most `most` long, without special ids."""
    special = {cfg.bos_token_id, cfg.eos_token_id, cfg.pad_token_id, cfg.image_token_id, cfg.dspark_noise_token_id}
    ids = np.setdiff1d(np.arange(cfg.vocab_size), list(special))
    lengths = {1, keep_tokens // 2, keep_tokens, keep_tokens + 1, 2 * keep_tokens, 3 * keep_tokens + 1, 5 * keep_tokens}
    return [rng.choice(ids, n).tolist() for n in sorted(lengths) if 0 < n <= most]


@dataclass(frozen=True)
class Comparison:
    """Of b against a, over the steps up to and including each prompt's first different token.

    first, prompts: equal first tokens, of how many.  same, tokens: equal leading tokens, of how many.
    median, largest: |difference| of the logprob of a's token; where b does not list it (`unlisted`
    steps) that to the least likely token b lists, a lower bound.  kl: mean KL(a || b) in nats over the
    tokens that both list, each side scaled to sum 1.
    """

    first: int
    prompts: int
    same: int
    tokens: int
    steps: int
    unlisted: int
    median: float
    largest: float
    kl: float


def compare(a: list[Answer], b: list[Answer]) -> Comparison:
    """Both with the same prompts and numbers of tokens."""
    differences, divergences, first, same, unlisted = [], [], 0, 0, 0
    for left, right in zip(a, b, strict=True):
        first += left[0][0] == right[0][0]
        for (token, p), (other, q) in zip(left, right, strict=True):
            unlisted += token not in q
            differences.append(abs(p[token] - q.get(token, min(q.values()))))
            divergences.append(divergence(p, q))
            if token != other:
                break
            same += 1
    return Comparison(
        first, len(a), same, sum(map(len, a)), len(differences), unlisted,
        float(np.median(differences)), float(np.max(differences)), float(np.mean(divergences)),
    )


def divergence(p: dict[int, float], q: dict[int, float]) -> float:
    """KL(p || q) over their common tokens, from logprobs; nothing in common: infinite."""
    common = sorted(p.keys() & q.keys())
    if not common:
        return float("inf")
    left, right = (np.array([side[i] for i in common], dtype=np.float64) for side in (p, q))
    with np.errstate(invalid="ignore"):  # a NaN comes out as one
        left, right = left - np.logaddexp.reduce(left), right - np.logaddexp.reduce(right)
    return float((np.exp(left) * (left - right)).sum())
