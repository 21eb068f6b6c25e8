"""Runs one vLLM engine and does what it is told, a JSON line at a time. Started with vLLM's Python.
Its arguments are the model and what else vLLM is told, as JSON.

{"do": "generate", "prompts": [[ids], ...], "salt": "..."}  -> tokens, cached tokens, parameters
{"do": "reset"}                                            -> forgets vLLM's own prefix cache
{"do": "end"}
"""

import json
import os
import sys
import time
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING")


def main(model: str, connector: str) -> None:
    from vllm import LLM, SamplingParams

    say = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is no answer
    options: dict[str, Any] = {"dtype": "float32"} | json.loads(connector)
    engine = LLM(model, max_model_len=4096, enforce_eager=True, max_num_seqs=4, **options)

    def generate(
        prompts: list[list[int]], salt: str | None = None, max_tokens: int = 12
    ) -> list[Any]:
        greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
        asked = [
            {"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})} for ids in prompts
        ]
        started = time.perf_counter()
        outputs = engine.generate(asked, greedy, use_tqdm=False)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
                "hits": (output.kv_transfer_params or {}).get("cachesvc", {}).get("hit_tokens"),
                "seconds": time.perf_counter() - started,
            }
            for output in outputs
        ]

    def reset() -> bool:
        done: bool = engine.reset_prefix_cache()
        if not done and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            engine.llm_engine.step()  # a core in this process moves only when it is called
        return done

    print(json.dumps("ready"), file=say, flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        do = told.pop("do")
        if do == "end":
            break
        answer: Any = generate(**told) if do == "generate" else reset()
        print(json.dumps(answer), file=say, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
