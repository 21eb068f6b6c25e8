"""The engine without a server: prompts in, answers out, with vLLM's interface.

    with LLM(model="smollm2-135m") as llm:
        [output] = llm.generate("The capital of France is", SamplingParams(max_tokens=8))
        print(output.outputs[0].text, output.num_cached_tokens)

The engine runs on a thread of its own; `generate` and `chat` block the thread that calls them.
"""

import itertools
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from engine.composition import compose
from engine.errors import InvalidParameter
from engine.hardware import pick_device, run_apart, spare_bytes
from engine.models.files import DEFAULT_MODEL
from engine.models.load import LoadedModel, load_adapter, load_model
from engine.offline.outputs import LoRARequest, PendingRequest, RequestOutput
from engine.offline.prompts import Message, Prompt, PromptDict, PromptReader
from engine.request import FinishReason, Request, SamplingParams, StepOutput
from engine.settings import EngineSettings
from engine.structure import source_of
from tiers.cache import CacheSettings
from tiers.disk.open import open_disk
from tiers.errors import ConfigurationError

DEFAULT_PARAMS = SamplingParams(max_tokens=16)  # as long as vLLM's answers where nothing is said


class LLM:
    """A model with its tiers and its engine, for one program's own use.

    `model` is an alias, a folder (safetensors or GGUF), a GGUF file or a hub id. Sizes are in
    bytes; 0 turns the host or the disk tier off, and the disk tier needs the host tier. Without
    `device_cache_bytes` the device tier takes nine tenths of what a GPU has free beside the model,
    or 1 GiB on a CPU. `cache_dir`
    holds prepared models and the disk tier; None means `~/.cache/cachesvc`. `dtype` and `device`
    "auto" mean float32 on a CPU, bfloat16 on a GPU where there is one; `kv_dtype` None keeps KV as
    it is computed. Without `enable_prefix_caching` every prompt is computed whole.

    Raises ModelError, ConfigurationError or DirectoryLocked for what cannot work. Calls from
    several threads take turns. Closed by `close`, by `with`, when it is no longer used, or at exit.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        enable_prefix_caching: bool = True,
        device_cache_bytes: int | None = None,
        host_cache_bytes: int = 2 << 30,
        disk_cache_bytes: int = 0,
        cache_dir: Path | str | None = None,
        block_size: int = 64,
        kv_dtype: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
    ) -> None:
        if disk_cache_bytes and not host_cache_bytes:
            raise ConfigurationError(
                "blocks reach the disk through host memory: give host_cache_bytes too, or set "
                "disk_cache_bytes to 0"
            )
        folder = Path(cache_dir or Path.home() / ".cache" / "cachesvc").expanduser()
        loaded = run_apart(lambda: _load(model, folder, device, dtype))
        if device_cache_bytes is None:
            device_cache_bytes = spare_bytes(loaded.device)
        layout = loaded.layout(block_size, kv_dtype)
        disk = open_disk(folder / "disk", layout, disk_cache_bytes) if disk_cache_bytes else None
        self._outputs: SimpleQueue[Seq[StepOutput]] = SimpleQueue()
        # The engine's thread knows the queue and not this object, which may so be collected.
        core = compose(
            loaded,
            layout,
            self._outputs.put,
            cache=CacheSettings(device_bytes=device_cache_bytes, host_bytes=host_cache_bytes),
            disk=disk,
            pin_folder=folder / "disk",
            # The prompts are in memory already: nothing is gained by refusing one.
            engine=EngineSettings(max_waiting=sys.maxsize),
        )
        self._loaded, self._engine = loaded, core.engine
        self._reader = PromptReader(loaded)
        self._scope, self._grammars = core.scope, core.grammars
        self._caching = enable_prefix_caching
        self._numbers = itertools.count()
        self._turn = threading.Lock()
        core.start()
        self._close = weakref.finalize(self, core.close)

    def generate(
        self,
        prompts: str | PromptDict | Seq[str | Seq[int] | PromptDict],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt, in the order given; they are served together.

        `sampling_params` is for all prompts, or one for each; None generates up to 16 tokens. So is
        `lora_request`, and None answers with the model itself. Raises RequestError for what cannot
        be served, before anything is generated for long: either all prompts are answered or none;
        and AdapterError for an adapter that cannot be read.
        """
        return self._serve(self._reader.prompts(prompts), sampling_params, lora_request)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, under the model's chat template."""
        if isinstance(messages, str | Mapping) or not messages:
            raise InvalidParameter(
                "messages must be a list of messages, each with a role and a content, or a list "
                "of such lists",
                param="messages",
            )
        single = isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        prompts = [
            self._reader.chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for conversation in conversations
        ]
        return self._serve(prompts, sampling_params, lora_request)

    def close(self) -> None:
        """Stop the engine, write to the disk tier what memory holds, close it. Twice is once."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # From prompts to answers.

    def _serve(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        each = zip(
            prompts,
            _params_of(params, len(prompts)),
            _adapters_of(lora_request, len(prompts)),
            strict=True,
        )
        with self._turn:
            pending = [
                PendingRequest(
                    self._request(prompt, of, adapter), prompt.text, self._loaded.tokenizer
                )
                for prompt, of, adapter in each
            ]
            try:
                for one in pending:
                    self._engine.submit(one.request)
                self._collect({one.request.request_id: one for one in pending})
            finally:  # an error or an interrupt: what is still running is of no use
                for one in pending:
                    if not one.done:
                        self._engine.abort(one.request.request_id)
        return [one.result() for one in pending]

    def _collect(self, running: dict[str, PendingRequest]) -> None:
        """Read outputs until none runs. What an earlier, broken off call left behind is skipped."""
        while running:
            for output in self._outputs.get():
                one = running.get(output.request_id)
                if one is None:
                    continue
                if one.take(output):
                    self._engine.abort(output.request_id, FinishReason.STOP, output.index)
                if one.done:
                    del running[output.request_id]

    def _request(self, prompt: Prompt, params: SamplingParams, adapter: str | None) -> Request:
        digests, asked = self._loaded.adapters.digests, params.structured_outputs
        if adapter is not None and adapter not in digests:
            # Named by where it comes from: other names for one adapter are no other adapter.
            load = partial(load_adapter, self._loaded, adapter, adapter)
            self._engine.call(lambda cache: load()).result()
        digest = digests[adapter] if adapter is not None else b""
        return Request(
            request_id=f"offline-{next(self._numbers)}",
            tokens=prompt.tokens,
            contents=prompt.contents,
            pictures=prompt.pictures,
            params=params,
            scope=replace(self._scope, adapter=digest),
            adapter=adapter,
            grammar=self._grammars.compile(source_of(asked)) if asked is not None else None,
            cache=self._caching,
            arrival_ns=time.monotonic_ns(),
        )


def _load(model: str, folder: Path, device: str, dtype: str) -> LoadedModel:
    models = folder / "models"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts' KV is its owner's alone
        models.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"cannot make {error.filename}: {error.strerror}; give another cache_dir"
        ) from None
    return load_model(model, device=pick_device(device), dtype=dtype, cache_dir=models)


def _params_of(
    given: SamplingParams | Iterable[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One for each prompt. Raises InvalidParameter where they are not as many."""
    if given is None:
        given = DEFAULT_PARAMS
    if isinstance(given, SamplingParams):
        return [_checked(given)] * num_prompts
    if not isinstance(given, Seq):
        raise InvalidParameter(
            f"sampling_params is {type(given).__name__}; give SamplingParams(...), or a list of "
            f"them, one for each prompt",
            param="sampling_params",
        )
    if len(given) != num_prompts:
        raise InvalidParameter(
            f"{len(given)} sampling_params for {num_prompts} prompts; give one for each, or one "
            f"for all",
            param="sampling_params",
        )
    return [_checked(params) for params in given]


def _adapters_of(given: Any, num_prompts: int) -> list[str | None]:
    """Where each prompt's adapter comes from. Raises InvalidParameter where they are not as
    many."""
    each = [given] * num_prompts if given is None or isinstance(given, LoRARequest) else given
    if (
        not isinstance(each, Seq)
        or len(each) != num_prompts
        or not all(one is None or isinstance(one, LoRARequest) for one in each)
    ):
        raise InvalidParameter(
            f"lora_request must be LoRARequest(name, id, path), None, or a list of these, one for "
            f"each of the {num_prompts} prompts",
            param="lora_request",
        )
    return [None if one is None else one.lora_path for one in each]


def _checked(params: Any) -> SamplingParams:
    """With `stop` as a tuple: a lone string would be taken for its letters."""
    if not isinstance(params, SamplingParams):
        raise InvalidParameter(
            f"sampling_params holds {type(params).__name__}; give SamplingParams(...)",
            param="sampling_params",
        )
    stop: Any = params.stop
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(isinstance(text, str) and text for text in stops):
        raise InvalidParameter(f"stop is {stop!r}; each must be a string, not empty", param="stop")
    return params if stops == stop else replace(params, stop=stops)
