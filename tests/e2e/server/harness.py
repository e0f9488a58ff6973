# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` process on a tiny checkpoint, and the vocabulary its tests speak in."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai

# What the tests' own environment may hold and a user's would not.
_NOT_A_USERS = ("VLLM_", "DSV41_", "TRITON_", "TORCHDYNAMO_", "OMP_", "KMP_", "PYTEST_")
# float32 logits of the engine against float64 ones: a logprob, and a lead that decides nothing.
LOGPROB_BOUND = 5e-5
LEAD_BOUND = 1e-4


def user_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(_NOT_A_USERS)}


def vllm_command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).parent / "vllm"), "serve", *arguments]


def hold_port() -> socket.socket:
    """A socket whose port nobody gets by chance while it is open; a server binds to it as long as this does not listen."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


class Server:
    """One server process with its own process group, its log in a file."""

    def __init__(self, model: Path, log: Path, *flags: str):
        self.model, self.log, self.held = str(model), log, hold_port()
        port = self.held.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                vllm_command(self.model, "--host", "127.0.0.1", "--port", str(port), *flags),
                stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=user_environment(), start_new_session=True, cwd=log.parent,
            )  # fmt: skip

    def get(self, path: str, timeout: float = 300) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout) as reply:
            return reply.read().decode()

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/health", timeout=60)
                return
            except OSError:
                time.sleep(0.5)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
        raise RuntimeError(f"no /health (exit code {self.process.poll()}); its last lines:\n{tail}")

    def stop(self) -> None:
        """Ask politely, then kill the whole group, workers included."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(300)
        self.held.close()

    def metrics(self) -> dict[str, float]:
        """Value of each series, summed over its labels."""
        sums: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if line and not line.startswith("#"):
                name, value = re.fullmatch(r"([^{ ]+)(?:\{.*\})? (\S+)", line).groups()
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def post(self, path: str, **body) -> dict:
        request = urllib.request.Request(
            self.url + path, json.dumps({"model": self.model, **body}).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=300) as reply:
            return json.loads(reply.read())

    def client(self, kind=openai.OpenAI, timeout: float = 600):
        return kind(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=timeout)

    def async_client(self, timeout: float = 600) -> openai.AsyncOpenAI:
        return self.client(openai.AsyncOpenAI, timeout)


@contextmanager
def serving(model: Path, log: Path, *flags: str) -> Iterator[Server]:
    """A server that answers, and is stopped in the end."""
    running = Server(model, log, *flags)
    try:
        running.wait(900)
        yield running
    finally:
        running.stop()


class Words:
    """Ids and texts of the checkpoint's byte-level tokenizer."""

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        size = self.tokenizer.get_vocab_size()
        special = {int(i) for i in self.tokenizer.get_added_tokens_decoder()}
        self.plain = [i for i in range(size) if i not in special]
        self.image = self.id("<｜deepseek_image｜>")

    def id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        assert found is not None, token
        return found

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def blanks(self) -> list[int]:
        """Every token that is white space or begins with it."""
        return [i for i in self.plain if self.decode([i])[:1].isspace()]


def literally(text: str) -> str:
    """A regular expression that matches `text` alone."""
    return re.sub(r"([\\.^$|?*+()\[\]{}])", r"\\\1", text)


def bias_of(words: Words) -> dict[str, float]:
    """A logit_bias that keeps the image token, which text may not hold, out of the output."""
    return {str(words.image): -100.0}


def check_greedy(reference, prompt, tokens, words, logprobs=None) -> None:
    """`tokens` are the reference's greedy continuation; their logprobs are its own."""
    assert tokens, "nothing was generated"
    logits = reference.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    known = logits.log_softmax(-1)
    logits[:, words.image] -= 100
    top = logits.topk(2)
    for i, token in enumerate(tokens):
        best, lead = int(top.indices[i, 0]), float(top.values[i, 0] - top.values[i, 1])
        assert token == best or lead < LEAD_BOUND, (i, token, best, lead)
        if logprobs is not None:
            assert abs(logprobs[i] - float(known[i, token])) < LOGPROB_BOUND, (i, token)
