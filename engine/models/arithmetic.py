"""What the bits of a model's KV depend on besides weights and tokens, as a part of every key.

Two machines may sum the products of a row in different orders, so a block that one computed may
change the other's answers. The names (processor, GPU, versions) come from the machine. A sample of
the model's own arithmetic covers what names do not show: limits set from outside
(`ONEDNN_MAX_CPU_ISA`), packing, and which kernels a library picks. docs/exactness.md has the
measurements. Read once, by the thread that loads the model.
"""

import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import nn

from engine.attention.agreement import needs_onednn
from engine.attention.base import KEPT, AttentionCall, AttentionOptions
from engine.attention.dense import KvPlace, StepPart, attend_part, new_tools
from engine.attention.latent import ByHead, LatentAttention
from engine.models.elementwise import Call
from engine.models.packing import PackedLinear, sample_rows
from engine.promise import BITS, Equal, Promise

_SAMPLE_ROWS = (2, 65)  # of a decode step, and of a chunk
_MAX_WEIGHTS = 1 << 26  # larger layers than this, such as heads, are not sampled
_PROCESSOR = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU architecture", "CPU part")
_SETS = ("sse4", "avx", "fma", "amx", "f16c", "sve", "asimd", "bf16", "i8mm")


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`names` are facts of the device and its libraries. `sample` is the digest of computed bits,
    empty on a GPU, where a start may choose other kernels than the one before.

    `promise` is what a hit leaves equal, as far as the sample shows. It is less than the bits where
    a row's may depend on the rows beside it. `activations` is the same of torch's own activations,
    in whose place a recorded forward may call others.
    """

    names: tuple[tuple[str, str], ...]
    sample: bytes = b""
    promise: Promise = BITS
    activations: Promise = BITS

    def digest(self, *, activated_by_row: bool) -> bytes:
        """16 bytes, equal where blocks may be shared. Unless the forward activates by row, blocks
        that `activations` leaves no bits are not for a start that promises bits."""
        moved = "" if activated_by_row else self.activations.reason
        names = (*self.names, ("activations", moved)) if moved else self.names
        text = "\n".join(f"{name}: {value}" for name, value in names)
        return xxhash.xxh3_128_digest(b"cachesvc.arithmetic.v1\n" + text.encode() + self.sample)


def arithmetic_of(model: nn.Module, device: str, calls: Iterable[Call] = ()) -> Arithmetic:
    """The arithmetic of a model that is packed for its device. `calls` are the functions of single
    numbers in its forward."""
    if torch.device(device).type == "cpu":
        bits, promise = _sample(model)
        return Arithmetic(tuple(_cpu_names()), bits, promise, _activated(calls))
    names = tuple(_gpu_names(torch.device(device)))
    reason = "kernels of a GPU are chosen by the number of rows"
    return Arithmetic(names, promise=Promise(Equal.NONE, reason))


def processor_name(device: str) -> str:
    """The GPU or processor that computes on `device`, for people."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return ", ".join(f"{name} {value}" for name, value in _processor() if name != "vectors")


def _cpu_names() -> Iterator[tuple[str, str]]:
    yield "torch", torch.__version__
    # With oneDNN's and MKL's.
    yield "built", xxhash.xxh3_64_hexdigest(torch.__config__.show().encode())
    yield "capability", torch.backends.cpu.get_cpu_capability()
    yield "machine", platform.machine()
    yield from _processor()


def _processor(path: Path = Path("/proc/cpuinfo")) -> Iterator[tuple[str, str]]:
    """The processor and its vector instructions. Linux says them in a file."""
    try:
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        yield "processor", platform.processor()
        return
    for line in first.splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name in _PROCESSOR:
            yield name, value
        elif name in ("flags", "Features"):
            sets = sorted(flag for flag in value.split() if flag.startswith(_SETS))
            yield "vectors", " ".join(sets)


def _gpu_names(device: torch.device) -> Iterator[tuple[str, str]]:
    yield "torch", torch.__version__
    yield "device", device.type
    if device.type != "cuda":
        return
    yield "gpu", torch.cuda.get_device_name(device)
    yield "cuda", str(torch.version.cuda)
    yield "cudnn", str(torch.backends.cudnn.version())
    yield "precision", torch.get_float32_matmul_precision()


@torch.inference_mode()
def _sample(model: nn.Module) -> tuple[bytes, Promise]:
    """A digest of the outputs of one layer of each shape, of attention, of products with latents,
    and of the functions that models apply to single numbers; and what can be promised."""
    hasher = xxhash.xxh3_128()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    seen = set()
    promise = _unpacked(model)
    for module in model.modules():
        if not isinstance(module, PackedLinear) and type(module) is not nn.Linear:
            continue
        shape = module.in_features, module.out_features
        if shape in seen or shape[0] * shape[1] > _MAX_WEIGHTS:
            continue
        seen.add(shape)
        few, many = (module(sample_rows(count, shape[0]).to(dtype)) for count in _SAMPLE_ROWS)
        _add(hasher, few)
        _add(hasher, many)
        if isinstance(module, PackedLinear) and not torch.equal(few, many[: len(few)]):
            reason = f"layers of {shape[0]} x {shape[1]} depend on the number of rows"
            promise = promise.or_weaker(Promise(Equal.NONE, reason))
    for (heads, inputs, _), multiply in _by_head(model).items():
        few, many = (
            multiply(sample_rows(count, heads * inputs).view(count, heads, -1).to(dtype))
            for count in _SAMPLE_ROWS
        )
        _add(hasher, few)
        _add(hasher, many)
        if not torch.equal(few, many[: len(few)]):
            reason = "products with latents depend on the number of rows"
            promise = promise.or_weaker(Promise(Equal.NONE, reason))
    for dim in (64, 128):
        alone, together = _attended(dim)
        _add(hasher, together)
        if not torch.equal(alone, together[-1:]):
            reason = "attention depends on the number of rows"
            promise = promise.or_weaker(Promise(Equal.NONE, reason))
    line = sample_rows(8, 200).to(dtype)
    for function in (torch.exp, torch.cos, torch.sin, torch.tanh, nn.functional.silu):
        _add(hasher, function(line))
    _add(hasher, nn.functional.gelu(line))
    _add(hasher, torch.rsqrt(line.float().pow(2).mean(-1, keepdim=True) + 1e-5))
    return hasher.digest(), promise


def _by_head(model: nn.Module) -> dict[torch.Size, ByHead]:
    """What multiplies queries and outputs of latent attention, one of each shape."""
    kept = (getattr(module, KEPT, None) for module in model.modules())
    latents = [each for each in kept if isinstance(each, LatentAttention)]
    return {
        each.matrices.shape: each
        for latent in latents
        for each in (latent.absorbed, latent.expanded)
    }


def _unpacked(model: nn.Module) -> Promise:
    """What can be promised where a kernel is chosen by the number of rows, which depends on what
    others ask: all matrices but packed ones and tables of embeddings."""
    if any("experts" in name for name, _ in model.named_modules()):
        return Promise(Equal.TOKENS, "experts are given the rows that chose them")
    if any(parameter.ndim > 2 for parameter in model.parameters()):
        return Promise(Equal.TOKENS, "its recurrent layers or experts are not packed")
    for module in model.modules():
        matrices = (each for each in module.parameters(recurse=False) if each.ndim == 2)
        if not isinstance(module, PackedLinear | nn.Embedding) and any(True for _ in matrices):
            name = type(module).__name__
            return Promise(Equal.TOKENS, f"its layers of the kind {name} are not packed")
    return BITS


def _activated(calls: Iterable[Call]) -> Promise:
    """What torch's functions of single numbers leave equal with as many threads as there are
    now."""
    width = next((call.width for call in calls if call.depends_on_rows()), None)
    if width is None:
        return BITS
    threads = torch.get_num_threads()
    reason = f"with {threads} threads, activations of {width} numbers depend on the rows beside"
    return Promise(Equal.TOKENS, reason)


def _attended(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention at the last position of a prompt alone, and of its last positions together."""
    num_keys, groups, most = 208, 3, 65
    keys = sample_rows(2 * num_keys, dim).view(2, num_keys, dim)
    query = sample_rows(most * 2 * groups, dim).view(most, 2 * groups, dim)
    own, options = keys.transpose(0, 1), AttentionOptions(dim**-0.5)
    tools, outputs = new_tools(onednn=needs_onednn(dim, dim)), []
    for count in (1, most):
        call = AttentionCall(0, query[-count:], own[:count], own[:count], options)
        part = StepPart(0, count, [keys[None]], [], None, [], num_keys - count, False)
        outputs.append(torch.empty_like(call.query))
        attend_part(call, part, KvPlace(0, 0, 0, 0), tools, outputs[-1])
    return outputs[0], outputs[1]


def _add(hasher: xxhash.xxh3_128, numbers: torch.Tensor) -> None:
    hasher.update(numbers.contiguous().view(torch.uint8).numpy().tobytes())
