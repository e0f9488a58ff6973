# SPDX-License-Identifier: Apache-2.0
"""What happened inside an in-process engine: the lives of requests, and the drafts proposed."""

from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.e2e.engine.oracle import runner_of


@dataclass
class Life:
    """A request as the worker met it: at first, and again after each preemption."""

    prefill: list[int]
    replay_start: int


@dataclass
class Proposal:
    """k drafts for the positions behind an anchor at `position`; request: the worker's id."""

    request: str
    position: int
    tokens: list[int]


@dataclass
class Record:
    lives: dict[str, list[Life]] = field(default_factory=dict)
    proposals: list[Proposal] = field(default_factory=list)

    def request_of(self, prompt: list[int]) -> str:
        """The id of the request with these prompt tokens, which must be the only one."""
        found, = (r for r, lives in self.lives.items() if lives[0].prefill == prompt)
        return found


@contextmanager
def recording(llm):
    """Everything `llm` does inside the block, as a Record."""
    runner, record = runner_of(llm), Record()
    state, speculator = runner.model_state, runner.speculator
    add, propose = state.add_request, speculator and speculator.propose

    def add_request(index, data):
        life = Life(list(data.prefill_token_ids), data.replay_start)
        record.lives.setdefault(data.req_id, []).append(life)
        add(index, data)

    def proposing(input_batch, metadata, slots, hidden, features, num_sampled, *args, **kwargs):
        drafts = propose(input_batch, metadata, slots, hidden, features, num_sampled, *args, **kwargs)
        # 0: a host that knows that no request can use them leaves the drafts out.
        made = kwargs.get("num_speculative_tokens") != 0
        for i, request in enumerate(input_batch.req_ids):
            if made and num_sampled[i] > 0:
                at = int(speculator.input_buffers.positions[i * speculator.num_query_per_req])
                record.proposals.append(Proposal(request, at, drafts[i].tolist()))
        return drafts

    state.add_request = add_request
    if speculator is not None:
        speculator.propose = proposing
    try:
        yield record
    finally:
        del state.add_request
        if speculator is not None:
            vars(speculator).pop("propose", None)  # a wrapper around this one may have taken it off
