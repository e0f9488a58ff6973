# SPDX-License-Identifier: Apache-2.0
"""bench/imbalance.py: who is asked what and when, what is reported of it, on a server that only counts."""

import asyncio
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

import pytest
from imbalance import Sent, draw_prompts, replay, report, schedule, split

TOKENS = 3


@pytest.fixture
def counting():
    """A server of streamed completions: (rank, prompt) of each request, in order of arrival."""
    seen, lock = [], Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                seen.append((int(self.headers["X-data-parallel-rank"]), tuple(body["prompt"])))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            # As vLLM: two tokens at once, then one, then an end without any.
            for ids in ([1, 2], [3], None):
                choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": None}
                chunk = {"id": "x", "object": "text_completion", "created": 0, "model": "timed", "choices": [choice]}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}", seen
    running.shutdown()


def test_schedule():
    assert schedule("lag", 3, 1, 2.5) == [Sent(0, 0.0, 0), Sent(1, 2.5, 0), Sent(2, 5.0, 0)]
    assert schedule("mirror", 2, 2, 9) == [Sent(0, 0, 0), Sent(0, 0, 1), Sent(1, 0, 0), Sent(1, 0, 1)]
    assert [sent.prompt for sent in schedule("spread", 2, 3, 9)] == list(range(6))
    with pytest.raises(ValueError, match="mode: 'both' is none of spread, mirror, lag"):
        schedule("both", 2, 1, 0)


@pytest.mark.parametrize("mode", ["spread", "mirror", "lag"])
def test_every_rank_is_asked(counting, mode, run_rng):
    url, seen = counting
    prompts = draw_prompts(6, 2, 9, 1000, run_rng.randrange(1 << 30))
    plan = schedule(mode, 2, 3, 0.3)
    done = asyncio.run(replay(url, "timed", plan, prompts, TOKENS))
    assert sorted(seen) == sorted((sent.rank, tuple(prompts[sent.prompt])) for sent in plan)
    assert [sent for sent, _, _ in done] == plan and all(len(came) == TOKENS and start >= sent.at for sent, start, came in done)
    assert report(done, TOKENS)["requests"] == 6


def test_report():
    done = [(Sent(0, 0.0, 0), 0.0, [1.0, 2.0, 3.0]), (Sent(1, 2.0, 0), 2.0, [4.0, 5.0, 8.0])]
    found = report(done, 3)
    assert found["output_tokens_per_s"] == "0.75" and found["rank_seconds"] == "3 6" and found["late_s"] == "3"
    assert found["ttft_ms"] == "1500" and found["tpot_ms"] == "1500" and found["p99_tpot_ms"] == "2000"
    with pytest.raises(RuntimeError, match="1 of 2 requests gave 2 to 2 tokens, 3 were asked for"):
        report([done[0], (Sent(1, 0.0, 0), 0.0, [1.0, 2.0])], 3)


def test_the_servers_flags_stay_whole():
    assert split(["--ranks", "2", "--", "--eplb-config", '{"a": 1}']) == (["--ranks", "2"], ["--eplb-config", '{"a": 1}'])
    assert split(["--ranks", "2"]) == (["--ranks", "2"], [])
