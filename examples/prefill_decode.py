"""Prefill and decode on two servers: the first computes prompts, the second generates answers.

Both are `cachesvc serve` on one model with one `cache.remote_url`:

    $ cachesvc serve --port 8001 --data-dir ./prefill    # CACHESVC_CACHE__REMOTE_URL=redis://...
    $ cachesvc serve --port 8002 --data-dir ./decode     # the same, and the same secret file
    $ python examples/prefill_decode.py http://127.0.0.1:8001 http://127.0.0.1:8002 "A long prompt"

Tenants find their blocks on both servers where both have the same `secret` in the data directory.
"""

import json
import sys
import urllib.request


def post(server, body, headers):
    request = urllib.request.Request(f"{server}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return answer.headers, json.load(answer)


def routed(prefill, decode, body, headers):
    """The whole router: compute the prompt there, generate the answer here."""
    first = {**body, "max_tokens": 1, "stream": False, "cachesvc": {"publish": True}}
    told, _ = post(prefill, first, headers)
    _, answer = post(decode, body, headers)
    return int(told["X-Cachesvc-Published-Tokens"]), answer


if __name__ == "__main__":
    prefill, decode, prompt, *key = sys.argv[1:]
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key[0]}"} if key else {}
    with urllib.request.urlopen(f"{decode}/v1/models") as models:
        model = json.load(models)["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0}
    published, answer = routed(prefill, decode, body, headers)
    details = answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]
    print(answer["choices"][0]["text"])
    print(f"{published} tokens published; the decode server hit {details}", file=sys.stderr)
