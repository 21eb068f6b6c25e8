"""A request in vLLM's own classes: its prompt, its sampling, its adapter.

vLLM is imported at the first request, so tests can run without it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cachesvc.server.vllm.adapters import VllmAdapter
from cachesvc.server.vllm.grammars import structure_in
from cachesvc.server.vllm.params import sampling_of
from cachesvc.vllm.identity import salt_of
from engine.request import Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Bounds, and the model's parameters that the engine needs."""

    max_waiting: int
    eos_token_ids: frozenset[int]
    check_params: Callable[[SamplingParams], None]
    adapters: Mapping[str, VllmAdapter]


def generate(
    settings: VllmSettings, llm: Any, request: Request, index: int, name: str, priority: int
) -> Any:
    """vLLM's outputs for one sequence of a request."""
    from vllm.inputs.engine import tokens_input
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as Sampling

    room = llm.vllm_config.model_config.max_model_len - len(request.tokens)
    fields = sampling_of(request, index, end=settings.eos_token_ids, name=name, max_tokens=room)
    sampling = Sampling(
        **fields,
        structured_outputs=structure_in(request.grammar),
        output_kind=RequestOutputKind.DELTA,
    )
    lora = None
    if request.adapter is not None:
        adapter = settings.adapters[request.adapter]
        lora = LoRARequest(request.adapter, adapter.number, adapter.folder)
    # A request that must not be cached gets a salt of its own.
    tenant = request.scope.tenant if request.cache else name.encode()
    prompt = tokens_input(list(request.tokens), cache_salt=salt_of(tenant) if tenant else None)
    return llm.generate(prompt, sampling, request_id=name, lora_request=lora, priority=priority)
