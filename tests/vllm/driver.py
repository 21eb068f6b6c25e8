"""Runs one vLLM engine and does what it is told, a JSON line at a time. Started with vLLM's Python.
Its arguments are the model and what else vLLM is told, as JSON. With `forks FD` it runs one in a
fork of itself for each such pair that comes from the socket, with three files: what the engine is
told, where it answers, and its log. An import of vLLM takes three quarters of a start.

{"do": "generate", "prompts": [[ids], ...], "salt": "..."}  -> tokens, their logprobs, cached
{"do": "reset", "external": false}       -> forgets vLLM's own prefix cache, and the connector's
{"do": "end"}
"""

import importlib
import json
import os
import signal
import socket
import sys
import time

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING")


# What an engine imports, with nothing that starts a thread: a fork has none of them.
IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "cachesvc.vllm.connector",
)


def fork_engines(descriptor):
    """Answers each pair with the process id of its engine, until the other end is closed."""
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a killed engine
    with socket.socket(fileno=descriptor) as asks:
        while True:
            told, files, *_ = socket.recv_fds(asks, 1 << 16, 3)
            if not told:
                return
            if (pid := os.fork()) == 0:
                asks.close()
                os.setsid()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number, file in enumerate(files):
                    os.dup2(file, number)
                    os.close(file)
                main(*json.loads(told))
                os._exit(0)
            for file in files:
                os.close(file)
            asks.send(str(pid).encode())


def main(model, connector):
    from vllm import LLM, SamplingParams

    say = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is no answer
    usual = {"dtype": "float32", "max_model_len": 4096, "enforce_eager": True, "max_num_seqs": 4}
    options = usual | json.loads(connector)
    engine = LLM(model, **options)

    def generate(prompts, salt=None, max_tokens=12):
        greedy = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0)
        asked = [
            {"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})} for ids in prompts
        ]
        started = time.perf_counter()
        outputs = engine.generate(asked, greedy, use_tqdm=False)
        answers, seconds = [], time.perf_counter() - started
        for output in outputs:
            (said,) = output.outputs
            chosen = zip(said.token_ids, said.logprobs, strict=True)
            answer = {"tokens": list(said.token_ids), "cached": output.num_cached_tokens}
            answer["logprobs"] = [likely[token].logprob for token, likely in chosen]
            told = (output.kv_transfer_params or {}).get("cachesvc", {})
            used = {"hits": told.get("hit_tokens"), "misses": told.get("miss_tokens", {})}
            answers.append({**answer, **used, "seconds": seconds})
        return answers

    def reset(external=False):
        done = engine.reset_prefix_cache(reset_connector=external)
        if not done and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            engine.llm_engine.step()  # a core in this process moves only when it is called
        return done

    print(json.dumps("ready"), file=say, flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        do = told.pop("do")
        if do == "end":
            break
        answer = generate(**told) if do == "generate" else reset(**told)
        print(json.dumps(answer), file=say, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "forks":
        fork_engines(int(sys.argv[2]))
    else:
        main(*sys.argv[1:])
