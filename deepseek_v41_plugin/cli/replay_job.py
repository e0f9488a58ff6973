# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own, for ``dsv41 verify-replay``: a JSON job on stdin.

Job: {"engine": options of LLM, "prompts": [text or [id]], "sampling": options of SamplingParams}.
The file named by argv[1] gets, by prompt, the list of its steps: [token, [[id, logprob], ...]], most
likely first.
"""

import json
import sys


def main(job: dict) -> list:
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])
    prompts = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in job["prompts"]]
    answers = []
    for request in llm.generate(prompts, SamplingParams(**job["sampling"]), use_tqdm=False):
        output = request.outputs[0]
        tops = [sorted(((i, e.logprob) for i, e in step.items()), key=lambda e: -e[1]) for step in output.logprobs]
        answers.append(list(zip(output.token_ids, tops, strict=True)))
    return answers


if __name__ == "__main__":
    answers = main(json.load(sys.stdin))
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(answers, file)
