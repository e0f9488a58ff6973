# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own: a JSON job on stdin, its answers in the file named by argv[1].

For engines that spawn workers, whose main module must be importable and guarded.
Job: {"engine": options of LLM, "prompts": [[id]], "sampling": options of SamplingParams}.
Answer: {"outputs": [{"tokens": [id], "logprobs": [float]}], one per prompt,
"maps": [{"pid", "path", "perms", "size", "rss", "private_dirty"}], the shards mapped by the engine's
processes after the last token, sizes in bytes, "drafts": how many were verified, if the engine drafts}.
"""

import json
import sys


def main(job: dict) -> dict:
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = []
    for request in llm.generate(prompts, SamplingParams(**job["sampling"]), use_tqdm=False):
        output = request.outputs[0]
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        outputs.append({"tokens": list(output.token_ids), "logprobs": [step[t].logprob for t, step in pairs]})
    drafts = {"drafts": m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_draft_tokens"}
    return {"outputs": outputs, "maps": shard_maps()} | drafts


def shard_maps() -> list[dict]:
    import psutil

    me = psutil.Process()
    found = []
    for process in (me, *me.children(recursive=True)):
        for area in process.memory_maps(grouped=False):
            if area.path.endswith(".safetensors"):
                entry = {name: getattr(area, name) for name in ("path", "perms", "size", "rss", "private_dirty")}
                found.append({"pid": process.pid, **entry})
    return found


if __name__ == "__main__":
    answers = main(json.load(sys.stdin))
    with open(sys.argv[1], "w") as file:
        json.dump(answers, file)
