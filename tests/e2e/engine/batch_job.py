# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own: a JSON job on stdin, its answers in the file named by argv[1].

For engines that spawn workers, whose main module must be importable and guarded.
Job: {"engine": options of LLM, "prompts": [[id]], "sampling": options of SamplingParams}.
Answer: [{"tokens": [id], "logprobs": [float]}], one per prompt.
"""

import json
import sys


def main(job: dict) -> list[dict]:
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    done = llm.generate(prompts, SamplingParams(**job["sampling"]), use_tqdm=False)
    answers = []
    for request in done:
        output = request.outputs[0]
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        answers.append({"tokens": list(output.token_ids), "logprobs": [step[t].logprob for t, step in pairs]})
    return answers


if __name__ == "__main__":
    answers = main(json.load(sys.stdin))
    with open(sys.argv[1], "w") as file:
        json.dump(answers, file)
