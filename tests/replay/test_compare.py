# SPDX-License-Identifier: Apache-2.0
"""mask against compact over random batches: equal as they are, and every planted fault is found."""

from dataclasses import replace

import numpy as np
import pytest

from deepseek_v41_plugin.replay import Batch, Policy, describe, first_difference, metadata, plan, random_batches

POLICIES = [Policy(128, "compact", 140, 5), Policy(8, "compact", 14, 5), Policy(8, "compact", 40, 0), Policy(1, "compact", 2)]


@pytest.fixture
def rng(run_rng):
    return np.random.default_rng(run_rng.randrange(1 << 30))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_random_batches_are_equal(rng, policy):
    for batch in random_batches(rng, policy, 60):
        assert first_difference(policy, batch) is None, batch


def test_random_batches_hold_every_case(rng):
    policy = Policy(8, "compact", 14, 5)
    seen = dict.fromkeys(
        ("short prompt", "hit", "chunk in a replay", "decode", "drafts", "whole", "dropped", "dropped in part", "two hits"), 0
    )
    for n, batch in enumerate(random_batches(rng, policy, 1000)):
        if n >= 100 and min(seen.values()) > 0:
            break
        assert ((batch.rows > 0) & (batch.first_position >= batch.replay_start) & (batch.replay_start >= 0)).all()
        decode, hit = batch.first_position >= batch.prefill, batch.replay_start > 0
        assert (decode | (batch.first_position + batch.rows <= batch.prefill)).all()
        assert (~hit | ((batch.replay_start % 2 == 0) & (batch.replay_start + policy.window < batch.prefill))).all()
        got = plan(policy, **{n: getattr(batch, n) for n in ("first_position", "rows", "prefill", "replay_start", "whole")})
        seen["short prompt"] += (batch.prefill < policy.window).sum()
        seen["hit"] += hit.sum()
        seen["two hits"] += (hit & ~decode).sum() > 1
        seen["chunk in a replay"] += (hit & (batch.first_position + batch.rows < got.replay_end)).sum()
        seen["decode"] += decode.sum()
        seen["drafts"] += (decode & (batch.rows == 6)).sum()
        seen["whole"] += batch.whole.sum()
        seen["dropped"] += (got.dropped == batch.rows).sum()
        seen["dropped in part"] += ((got.dropped > 0) & (got.dropped < batch.rows)).sum()
    assert min(seen.values()) > 0, seen


def small(**changed) -> Batch:
    """A replayed chunk that ends its prompt, a decode with two drafts, at a window of 4 and 7 kept tokens."""
    arrays = dict(first_position=[8, 20], rows=[9, 3], prefill=[17, 19], replay_start=[6, 0], whole=[False, False])
    arrays = {name: np.array(changed.get(name, value)) for name, value in arrays.items()}
    return Batch(**arrays, blocks=np.array([[5, 2, 7, 0, 9, 10], [1, 3, 4, 6, 8, 11]]), block_size=4)


def test_metadata_of_a_small_batch():
    got = describe(Policy(4, "compact", 7, 2), small())
    slots = [28, 29, 30, 31, 0, 1, 2, 3, 36, 44, 45, 46]
    assert got["encoder"].positions.tolist() == [8, 9, 10, 11, 12, 13, 14, 15, 16, 20, 21, 22]
    assert got["encoder"].key_low.tolist() == [6, 6, 7, 8, 9, 10, 11, 12, 13, 17, 18, 19]
    assert got["encoder"].window_slots.tolist() == got["cut"].window_slots.tolist() == slots
    for kind in ("encoder", "cut"):
        assert got[kind].compressed_slots.tolist() == [-1, -1, *slots[2:]], "6..9 are replayed"
    assert got["cut"].rows.tolist() == got["later"].rows.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert got["cut"].key_low.tolist() == got["encoder"].key_low.tolist()[2:]
    assert got["later"].key_low.tolist() == [10, 10, 10, 10, 11, 12, 13, 17, 18, 19]
    assert got["later"].key_high.tolist() == [10, 11, 12, 13, 14, 15, 16, 20, 21, 22]
    assert got["later"].window_slots.tolist() == [-1, -1, *slots[2:]]
    assert set(got["later"].compressed_slots.tolist()) == {-1}

    mask = describe(Policy(4, "mask", 7, 2), small())["later"]
    assert mask.rows.tolist() == list(range(12)) and mask.window_slots.tolist() == slots
    assert mask.key_low.tolist() == [10, 10, *got["later"].key_low.tolist()]
    off = describe(Policy(4, "off", 7, 2), small())["later"]
    assert off.key_low.tolist() == got["encoder"].key_low.tolist()
    whole = describe(Policy(4, "compact", 7, 2), small(whole=[True, False]))
    assert whole["later"].rows.tolist() == list(range(12)) and whole["later"].key_low.tolist() == off.key_low.tolist()


def planned(change, modes=("mask", "compact")):
    """`plan`, with `change` of its result and arguments in some modes."""

    def wrong(policy, **arrays):
        got = plan(policy, **arrays)
        return replace(got, **change(got, policy, arrays)) if policy.decoder in modes else got

    return wrong


def later_by(n):
    return lambda got, policy, arrays: {"decoder_start": got.decoder_start + n * (arrays["prefill"] > policy.keep_tokens)}


def by_chunk(got, policy, arrays):
    """Kept rows counted from the chunk's end: what another engine does."""
    end = np.minimum(arrays["first_position"] + arrays["rows"], arrays["prefill"])
    start = np.where(arrays["whole"], got.window_start, np.maximum(got.window_start, end - policy.keep_tokens))
    dropped = np.clip(start - arrays["first_position"], 0, arrays["rows"]) if policy.decoder == "compact" else got.dropped
    return {"decoder_start": start, "dropped": dropped}


FAULTS = {
    "one row too many dropped": planned(lambda got, policy, a: {"dropped": np.minimum(got.dropped + 1, a["rows"])}, ("compact",)),
    "one row too few dropped": planned(lambda got, policy, a: {"dropped": np.maximum(got.dropped - 1, 0)}, ("compact",)),
    "mask drops": planned(lambda got, policy, a: {"dropped": np.minimum(1, a["rows"])}, ("mask",)),
    "mask narrower": planned(later_by(1), ("mask",)),
    "compact wider": planned(later_by(-1), ("compact",)),
    "windows empty": planned(lambda got, policy, a: {"decoder_start": np.full_like(got.dropped, 1 << 40)}),
    "all rows narrowed": planned(lambda got, policy, a: {"decoder_start": np.maximum(got.decoder_start, a["prefill"] - policy.window)}),
    "whole ignored": planned(lambda got, policy, a: {"decoder_start": np.maximum(got.window_start, a["prefill"] - policy.keep_tokens)}),
    "replay writes shared rows": planned(lambda got, policy, a: {"replay_end": got.replay_end - (got.replay_end > 0)}),
    "replay forgets a row": planned(lambda got, policy, a: {"replay_end": got.replay_end + (got.replay_end > 0)}),
    "no replay": planned(lambda got, policy, a: {"replay_end": np.zeros_like(got.replay_end)}),
    "window before the replay": planned(lambda got, policy, a: {"window_start": np.maximum(got.window_start - 1, 0)}),
    "window from the hit": planned(lambda got, policy, a: {"window_start": got.replay_end}),
    "counted from the chunk": planned(by_chunk),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(rng, monkeypatch, fault):
    monkeypatch.setattr(metadata, "plan", FAULTS[fault])
    policy = Policy(8, "compact", 14, 5)
    # In 7 of 100 batches there is a prompt on which the rarest fault shows.
    assert any(first_difference(policy, batch) for batch in random_batches(rng, policy, 1000))


@pytest.mark.parametrize("kind", ["encoder", "cut", "later"])
@pytest.mark.parametrize("mode", ["mask", "compact"])
@pytest.mark.parametrize("name", ["rows", "positions", "key_low", "key_high", "window_slots", "compressed_slots"])
def test_a_single_wrong_number_is_found(rng, monkeypatch, kind, mode, name):
    from deepseek_v41_plugin.replay import compare

    policy = Policy(8, "compact", 14, 5)
    batch = next(b for b in random_batches(rng, policy, 1000) if len(describe(policy, b)[kind].rows) > 1)
    assert first_difference(policy, batch) is None

    def wrong(asked, of):
        got = describe(asked, of)
        if asked.decoder != mode or of is not batch:
            return got
        values = getattr(got[kind], name).copy()
        # A row that sees no key sees none with a later first key either: nothing is wrong then.
        seeing = got[kind].key_low <= got[kind].key_high if name == "key_low" else np.ones(len(values), bool)
        values[rng.choice(np.flatnonzero(seeing))] += 1
        return got | {kind: replace(got[kind], **{name: values})}

    monkeypatch.setattr(compare, "describe", wrong)
    assert first_difference(policy, batch)
