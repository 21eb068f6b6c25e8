"""The engine without a server, with vLLM's interface: prompts in, answers out.

    with LLM(model="smollm2-135m") as llm:
        [output] = llm.generate("The capital of France is", SamplingParams(max_tokens=8))
        print(output.outputs[0].text, output.num_cached_tokens)

The engine runs on its own thread. `generate` and `chat` block their caller.
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
from tiers.cache import CHECKPOINT_SHARE, CacheSettings
from tiers.disk.open import open_disk
from tiers.disk.settings import DiskSettings
from tiers.errors import ConfigurationError

DEFAULT_PARAMS = SamplingParams(max_tokens=16)  # vLLM's default length


class LLM:
    """A model with its tiers and engine, for one program's own use.

    `model` is an alias, a folder (safetensors or GGUF), a GGUF file or a hub id. Sizes are in
    bytes. 0 turns the host or the disk tier off; above a disk the host keeps 16 blocks. By default,
    the device tier takes nine tenths of the GPU memory the model leaves free, or 1 GiB on a CPU.
    `cache_dir` holds converted models and the disk tier. None means `~/.cache/cachesvc`. "auto" for
    `dtype` and `device` means bfloat16 on a GPU if there is one, otherwise float32 on a CPU.
    `block_size` None follows the KV's size, and `kv_dtype` None stores KV in the compute dtype.
    Without `enable_prefix_caching` every prompt is computed in full.

    Raises ModelError, ConfigurationError or DirectoryLocked if it cannot start. Calls from several
    threads take turns. It is closed by `close`, by `with`, when it is garbage collected, or at
    exit.
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
        block_size: int | None = None,
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
        disk = states = None
        if disk_cache_bytes:
            of_states = int(CHECKPOINT_SHARE * disk_cache_bytes) if layout.states else 0
            disk = open_disk(
                folder / "disk",
                layout,
                disk_cache_bytes - of_states,
                settings=DiskSettings(computes_elsewhere=loaded.device != "cpu"),
            )
            if of_states:
                states = open_disk(folder / "checkpoints", layout.checkpoint, of_states)
        self._outputs: SimpleQueue[Seq[StepOutput]] = SimpleQueue()
        # The engine thread refers to the queue, not to this object, so that it can be collected.
        core = compose(
            loaded,
            layout,
            self._outputs.put,
            cache=CacheSettings(device_bytes=device_cache_bytes, host_bytes=host_cache_bytes),
            disk=disk,
            checkpoint_disk=states,
            pin_folder=folder / "disk",
            # The prompts are in memory already, so refusing one would gain nothing.
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
        """Answer every prompt. They are served together and returned in order.

        `sampling_params` is one for all prompts or one for each. None generates up to 16 tokens.
        `lora_request` is likewise one or several, and None uses the model itself. Either all
        prompts are answered or none: RequestError is raised early for a prompt that cannot be
        served. Raises AdapterError if an adapter cannot be read.
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
        """Answer one conversation, or each of several, under the model's chat template."""
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
        """Stop the engine, write memory to the disk tier, and close it. Further calls do
        nothing."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
            finally:  # after an error or an interrupt, abort what is still running
                for one in pending:
                    if not one.done:
                        self._engine.abort(one.request.request_id)
        return [one.result() for one in pending]

    def _collect(self, running: dict[str, PendingRequest]) -> None:
        """Read outputs until all requests are done. Outputs left by an earlier, interrupted call
        are skipped."""
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
            # Named by its source, since another name does not make another adapter.
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
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # only the owner may read prompts' KV
        models.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"cannot make {error.filename}: {error.strerror}; give another cache_dir"
        ) from None
    return load_model(model, device=pick_device(device), dtype=dtype, cache_dir=models)


def _params_of(
    given: SamplingParams | Iterable[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One for each prompt. Raises InvalidParameter if the numbers differ."""
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
    """The source of each prompt's adapter. Raises InvalidParameter if the numbers differ."""
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
    """The parameters with `stop` as a tuple, since a single string would be read as its letters."""
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
