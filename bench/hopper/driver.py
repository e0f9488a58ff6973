# SPDX-License-Identifier: Apache-2.0
"""Exact batches through a started engine's worker, without its scheduler: crafted steps over KV filled by fiat.

The worker does all that it does in serving: inputs, attention metadata, CUDA graph dispatch, the forward, sampling,
drafting.  Left out are the scheduler, the detokeniser and the server.  A step is started before the result of the
one before it is read, as the engine's asynchronous scheduling does.

KV: one prompt of random tokens is read by the model itself; its blocks' bytes are then copied over the whole pool in
random order, so that any request's context is made of real records, of whatever layout.  What a request writes (and
its window) is its own.  The older blocks of a context are drawn from the pool: disjoint while the pool suffices,
otherwise a block serves several requests (`shared`: how many on average), in an order unlike any other's; a pool many
times the L2 keeps reads of the same block in one step from being hits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

SLACK = 16  # tokens of KV beyond what a case needs: drafts written ahead


@dataclass
class Group:
    """One KV cache group of the host: kind full, window or ring; `block` tokens a block id; its layers' tensors."""

    kind: str
    block: int
    window: int
    views: list[torch.Tensor]
    pool: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    source: list[int] = field(default_factory=list)


@dataclass
class Request:
    """A request that the runner knows.  computed: rows in the KV, drafts counted as accepted until it is known better."""

    name: str
    prompt: list[int]
    computed: int
    blocks: tuple[list[int], ...]
    known: bool = False


def _tensors(cache) -> Iterator[torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        if cache.numel():
            yield cache
    elif isinstance(cache, (list, tuple)):
        for item in cache:
            yield from _tensors(item)


def _by_block(tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """A view whose first dimension is the allocator's block id (a kernel may cut a block into several)."""
    for dim in range(min(2, tensor.ndim)):
        if tensor.shape[dim] >= blocks and tensor.shape[dim] % blocks == 0:
            view = tensor.unflatten(dim, (blocks, tensor.shape[dim] // blocks)).movedim(dim, 0)
            return view.view(torch.uint8) if view.element_size() == 1 else view
    raise ValueError(f"no dimension of {tuple(tensor.shape)} counts {blocks} blocks")


class Driver:
    """Runs crafted steps on `llm`, whose engine core lives in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0)."""

    def __init__(self, llm, drafts: int = 0, seed: int = 0):
        from vllm.v1.kv_cache_interface import CircularBufferSpec

        self.worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.runner, self.drafts = self.worker.model_runner, drafts
        self.cuda = torch.cuda.is_available()
        self.rng = np.random.default_rng(seed)
        self.vocab = self.runner.model_config.get_vocab_size()
        config = self.runner.kv_cache_config
        self.blocks = config.num_blocks
        layers = self.runner.vllm_config.compilation_config.static_forward_context
        self.groups = []
        for group in config.kv_cache_groups:
            spec = group.kv_cache_spec
            inner = next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec
            window = getattr(inner, "sliding_window", None) or 0
            kind = "ring" if isinstance(inner, CircularBufferSpec) else "window" if window else "full"
            found = [t for name in group.layer_names for t in _tensors(getattr(layers[name], "kv_cache", None))]
            self.groups.append(Group(kind, spec.block_size, window, [_by_block(t, self.blocks) for t in found]))
        # What is allocated: the host's tensors overlay each other, and each names the size of the whole.
        storages = [view.untyped_storage() for group in self.groups for view in group.views]
        self.kv_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        self.full_replays, self._count, self.marks = 0, 0, []
        manager = getattr(self.runner, "cudagraph_manager", None)
        if manager is not None and hasattr(manager, "run_fullgraph"):
            replay = manager.run_fullgraph

            def counted(*args, **kwargs):
                self.full_replays += 1
                return replay(*args, **kwargs)

            manager.run_fullgraph = counted

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    # KV ------------------------------------------------------------------------------------------------------------

    def needs(self, group: Group, computed: int, last: int) -> tuple[int, int, int]:
        """(first own block, blocks in all, first block that must exist) of a request that writes computed..last."""
        if group.kind == "ring":
            return 0, 1, 0
        total = -(-(last + SLACK) // group.block)
        if group.kind == "window":
            first = max(0, computed - group.window - SLACK) // group.block
            return first, total, first
        return computed // group.block, total, 0

    def own_blocks(self, computed: int, last: int) -> int:
        return sum(total - first for first, total, _ in (self.needs(g, computed, last) for g in self.groups))

    def tokens_per_gib(self, context: int) -> float:
        """Tokens of KV a GiB when every request holds `context` tokens, its window and ring counted."""
        ids = 0
        for group in self.groups:
            _, total, first = self.needs(group, context, context)
            ids += total - first
        return context / (ids * self.kv_bytes / self.blocks) * 2**30

    def fill_cache(self, tokens: int, chunk: int, own: int) -> None:
        """Read a random prompt, then copy its blocks over the pools; `own` ids are set aside for what cases write."""
        request = self.alone(self.random_tokens(tokens), tokens)
        reader = sum(map(len, request.blocks))
        if 1 + reader + own >= self.blocks:
            raise ValueError(f"{self.blocks} KV blocks are too few for {1 + reader + own}: give the cache more memory")
        self.prefill(request, chunk)
        self.finish([request])
        for group, mine in zip(self.groups, request.blocks, strict=True):
            whole = mine[: tokens // group.block] if group.kind != "ring" else mine
            # Behind a decoder cut only the last rows of a prompt fill the windows.
            group.source = whole[-2:] if group.kind == "window" else whole
        self.own = (1 + reader, 1 + reader + own)
        full = [group for group in self.groups if group.kind == "full"]
        rest = np.arange(self.own[1], self.blocks)
        for index, group in enumerate(full):
            group.pool = rest[len(rest) * index // len(full) : len(rest) * (index + 1) // len(full)]
            self.copy_blocks(group, group.pool)
        self.wait()

    @torch.inference_mode()
    def copy_blocks(self, group: Group, ids) -> None:
        """Bytes of `group`'s source blocks, in random order, into `ids`."""
        for part in np.array_split(np.asarray(ids, dtype=np.int64), max(1, len(ids) // 4096)):
            if not len(part):
                continue
            source = self.rng.choice(group.source, len(part))
            for view in group.views:
                to = torch.from_numpy(part).to(view.device)
                view[to] = view[torch.from_numpy(source).to(view.device)]

    # Requests ------------------------------------------------------------------------------------------------------

    def alone(self, prompt: list[int], last: int) -> Request:
        """A request that reads all of `prompt`, in the pool's first blocks; what a window frees in serving is kept."""
        ids = iter(range(1, self.blocks))
        return Request("bench-alone", prompt, 0, tuple([next(ids) for _ in range(self.needs(g, 0, last)[1])] for g in self.groups))

    def random_tokens(self, count: int) -> list[int]:
        return self.rng.integers(3, min(self.vocab, 128000), count).tolist()

    def requests(self, count: int, context: int, prompt: int, last: int) -> tuple[list[Request], float]:
        """`count` requests with `context` tokens in the KV out of a prompt of `prompt`, room up to `last`; and `shared`.

        They take the place of all requests before them.  The prompts beyond the context's end differ, the rest is the same.
        """
        if count * self.own_blocks(context, last) > self.own[1] - self.own[0]:
            raise ValueError(f"{count} requests write {count * self.own_blocks(context, last)} blocks, more than set aside")
        cursor, shared, tables = self.own[0], 0.0, []
        for group in self.groups:
            first, total, begin = self.needs(group, context, last)
            mine = np.arange(cursor, cursor + count * (total - first)).reshape(count, -1)
            cursor += mine.size
            self.copy_blocks(group, mine.flatten())
            before = np.zeros((count, first), dtype=np.int64)
            if first > begin:
                if first > len(group.pool):
                    raise ValueError(f"a context of {context} needs {first} blocks, the pool has {len(group.pool)}")
                shared = max(shared, count * first / len(group.pool))
                if count * first <= len(group.pool):
                    before = self.rng.permutation(group.pool)[: count * first].reshape(count, first)
                else:
                    before = np.stack([self.rng.permutation(group.pool)[:first] for _ in range(count)])
            tables.append(np.concatenate((before, mine), 1).tolist())
        common = self.random_tokens(prompt)
        self._count += count
        self.wait()
        return [
            Request(f"bench-{self._count}-{i}", common[:-1] + self.random_tokens(1), context, tuple(table[i] for table in tables))
            for i in range(count)
        ], shared

    # Steps ---------------------------------------------------------------------------------------------------------

    def step(self, rows: list[tuple[Request, int, int]]) -> tuple:
        """Start one step of (request, rows, drafts among them) and return its pending result."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        output = SchedulerOutput.make_empty()
        cached = CachedRequestData.make_empty()
        for request, count, drafts in rows:
            if request.known:
                cached.req_ids.append(request.name)
                cached.new_block_ids.append(None)
                cached.num_computed_tokens.append(request.computed)
                cached.num_output_tokens.append(max(0, request.computed + 1 - len(request.prompt)))
            else:
                request.known = True
                output.scheduled_new_reqs.append(NewRequestData(
                    req_id=request.name, prompt_token_ids=request.prompt, prefill_token_ids=request.prompt, mm_features=[],
                    sampling_params=SamplingParams(temperature=0, max_tokens=1 << 16, ignore_eos=True), pooling_params=None,
                    block_ids=request.blocks, num_computed_tokens=request.computed, lora_request=None,
                ))
            output.num_scheduled_tokens[request.name] = count
            if drafts:
                output.scheduled_spec_decode_tokens[request.name] = [-1] * drafts
        output.scheduled_cached_reqs = cached
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.num_spec_tokens_to_schedule = self.drafts
        if all(r.computed + n < len(r.prompt) for r, n, _ in rows) and hasattr(output, "skip_drafts"):
            output.skip_drafts = True
        self.mark()
        self.worker.execute_model(output)
        self.mark()
        self.state = self.runner.execute_model_state
        result = self.worker.sample_tokens(None)
        self.mark()
        for request, count, _ in rows:
            request.computed += count
        return rows, result

    @staticmethod
    def read(pending: tuple) -> dict[str, list[int]]:
        """Wait for a step: tokens said by request; rejected drafts go back from `computed`."""
        rows, result = pending
        output = result.get_output() if hasattr(result, "get_output") else result
        said = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        for request, _, drafts in rows:
            if drafts:
                request.computed -= 1 + drafts - len(said[request.name])
        return said

    def prefill(self, request: Request, chunk: int) -> list[int]:
        """The rest of its prompt, in steps of `chunk` rows; the token said behind it."""
        pending = None
        while request.computed < len(request.prompt):
            before, pending = pending, self.step([(request, min(chunk, len(request.prompt) - request.computed), 0)])
            if before:
                self.read(before)
        return self.read(pending)[request.name]

    def decode(self, requests: list[Request], steps: int) -> dict:
        """`steps` decode steps: ms a step, the host's part in starting one, the device's parts, tokens said in all."""
        self.wait()
        said, host, before, self.marks = 0, 0.0, None, []
        begin = time.perf_counter()
        for _ in range(steps):
            start = time.perf_counter()
            pending = self.step([(r, 1 + self.drafts, self.drafts) for r in requests])
            host += time.perf_counter() - start
            if before:
                said += sum(map(len, self.read(before).values()))
            before = pending
        said += sum(map(len, self.read(before).values()))
        self.wait()
        ms = 1e3 * (time.perf_counter() - begin) / steps
        return {"ms": ms, "host_ms": 1e3 * host / steps, "said": said} | self.device_times()

    def mark(self) -> None:
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()

    def device_times(self) -> dict:
        """ms a step on the device: the forward with its inputs' preparation, and sampling with drafting; since `marks` was emptied.

        Where the host is late its gaps count too.
        """
        steps = [self.marks[i : i + 3] for i in range(0, len(self.marks), 3)]
        if not steps:
            return {"forward_ms": 0.0, "sample_ms": 0.0}
        return {
            "forward_ms": sum(a.elapsed_time(b) for a, b, _ in steps) / len(steps),
            "sample_ms": sum(b.elapsed_time(c) for _, b, c in steps) / len(steps),
        }

    def finite(self) -> bool:
        """Of the last step's hidden states."""
        return bool(self.state.hidden_states.isfinite().all())

    def finish(self, requests: list[Request]) -> None:
        from vllm.v1.core.sched.output import SchedulerOutput

        output = SchedulerOutput.make_empty()
        output.finished_req_ids = {request.name for request in requests if request.known}
        self.worker.execute_model(output)
        self.wait()
