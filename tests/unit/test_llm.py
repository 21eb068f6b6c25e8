"""The offline class: answers, hits, stops, and what it says of bad input."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import engine
from engine import LLM, LoRARequest, RequestOutput, SamplingParams
from engine.errors import AdapterError, EngineClosed, EngineFailed, ModelError, RequestError
from engine.execution.runner import ModelRunner
from engine.models import load
from engine.operators import library
from tests.support.models import save_tiny_adapter, save_tiny_model
from tiers.disk.format import planes
from tiers.errors import ConfigurationError

PROMPT = "the quick brown fox jumps over the lazy dog; " * 3  # 135 tokens, one a byte
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


def open_llm(model: Path, cache_dir: Path, **arguments: Any) -> LLM:
    given = {"device_cache_bytes": 4 << 20, "host_cache_bytes": 4 << 20, "block_size": 16}
    return LLM(str(model), device="cpu", cache_dir=cache_dir, **{**given, **arguments})


@pytest.fixture
def llm(model: Path, tmp_path: Path) -> Iterator[LLM]:
    with open_llm(model, tmp_path) as llm:
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def test_a_repeated_prompt_is_a_hit_with_the_same_answer(llm: LLM) -> None:
    [cold] = llm.generate(PROMPT, GREEDY)
    [warm] = llm.generate([PROMPT], GREEDY)
    assert (cold.num_cached_tokens, cold.hit_tokens["device"]) == (0, 0)
    assert warm.num_cached_tokens == len(PROMPT) - 1  # one token is always computed
    assert sum(warm.hit_tokens.values()) == warm.num_cached_tokens
    assert warm.outputs == cold.outputs
    assert (warm.prompt, bytes(warm.prompt_token_ids).decode()) == (PROMPT, PROMPT)
    assert warm.outputs[0].finish_reason == "length"
    assert len(warm.outputs[0].token_ids) == 12


def test_a_closed_engine_leaves_no_memory_behind(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        llm.generate(PROMPT, GREEDY)
        parts = [weakref.ref(part) for part in (llm._engine, llm._loaded.model)]
    del llm
    gc.collect()
    assert [None, None] == [part() for part in parts]


def test_prompts_choose_adapters_and_share_nothing_across_them(llm: LLM, tmp_path: Path) -> None:
    """Two adapters and the model on one prompt; a second name for a content hits its blocks."""
    for number, name in enumerate(("a", "b", "copy of a")):
        save_tiny_adapter(tmp_path / name, seed=number % 2, r=4, target_modules="all-linear")
    one, other, copy = (LoRARequest(n, 1, str(tmp_path / n)) for n in ("a", "b", "copy of a"))
    cold = llm.generate([PROMPT] * 3, GREEDY, lora_request=[one, None, other])
    assert [0, 0, 0] == [output.num_cached_tokens for output in cold]
    assert 3 == len({tuple(t) for t in tokens(cold)})
    warm = llm.generate([PROMPT] * 3, GREEDY, lora_request=[one, None, other])
    assert tokens(cold) == tokens(warm)
    assert [len(PROMPT) - 1] * 3 == [output.num_cached_tokens for output in warm]
    [renamed] = llm.generate(PROMPT, GREEDY, lora_request=copy)
    assert (tokens(cold)[:1], len(PROMPT) - 1) == (tokens([renamed]), renamed.num_cached_tokens)
    with pytest.raises(AdapterError, match="there is no folder"):
        llm.generate(PROMPT, lora_request=LoRARequest("c", 2, str(tmp_path / "nowhere")))
    for wrong in ("a", [one], [one, "b"]):
        with pytest.raises(RequestError, match=r"must be LoRARequest\(name, id, path\)"):
            llm.generate([PROMPT] * 2, lora_request=wrong)  # type: ignore[arg-type]
    assert cold[1].outputs == llm.generate(PROMPT, GREEDY)[0].outputs


def test_metrics_add_up(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, GREEDY)
    metrics = output.metrics
    parts = metrics.queue_s + metrics.load_s + metrics.prefill_s
    assert metrics.ttft_s == pytest.approx(parts, abs=1e-6)
    assert metrics.time_per_output_token_s is not None
    decode = 11 * metrics.time_per_output_token_s
    assert metrics.total_s == pytest.approx(metrics.ttft_s + decode, abs=1e-6)
    [one] = llm.generate(PROMPT, SamplingParams(max_tokens=1))
    assert one.metrics.time_per_output_token_s is None


def test_without_caching_the_tokens_are_the_same_and_nothing_hits(
    model: Path, llm: LLM, tmp_path: Path
) -> None:
    prompts = [PROMPT, PROMPT, PROMPT[:50] + "another end"]
    with open_llm(model, tmp_path / "off", enable_prefix_caching=False) as off:
        cold = off.generate(prompts, GREEDY) + off.generate(prompts, GREEDY)
    assert tokens(llm.generate(prompts, GREEDY) + llm.generate(prompts, GREEDY)) == tokens(cold)
    assert {output.num_cached_tokens for output in cold} == {0}


def test_several_samples_of_a_prompt_computed_once(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=7, max_tokens=10, ignore_eos=True, logprobs=2)
    [output] = llm.generate(PROMPT, params)
    first, second = output.outputs
    assert (first.index, second.index) == (0, 1)
    assert len(first.token_ids) == len(second.token_ids) == 10
    assert first.token_ids != second.token_ids
    assert first.logprobs is not None
    assert first.cumulative_logprob == sum(p.logprob for p in first.logprobs)
    assert tokens(llm.generate(PROMPT, params)) == tokens([output])


@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_string_ends_one_sample_and_is_cut(llm: LLM, as_list: bool) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=40, ignore_eos=True)
    [free] = llm.generate(PROMPT, params)
    text = free.outputs[0].text
    stop = text[5:8]
    given: Any = [stop] if as_list else stop
    [cut] = llm.generate(
        PROMPT, SamplingParams(n=2, seed=3, max_tokens=40, ignore_eos=True, stop=given)
    )
    stopped, other = cut.outputs
    assert stopped.text == text[: text.find(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.token_ids == free.outputs[0].token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) < 40
    if stop not in free.outputs[1].text:
        assert other == free.outputs[1]


def test_a_stop_token_counts_and_is_no_text(llm: LLM) -> None:
    [free] = llm.generate(PROMPT, GREEDY)
    last = free.outputs[0].token_ids[3]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(last,))
    [stopped] = llm.generate(PROMPT, params)
    end = free.outputs[0].token_ids.index(last) + 1
    assert stopped.outputs[0].token_ids == free.outputs[0].token_ids[:end]
    assert stopped.outputs[0].stop_reason == last
    assert stopped.outputs[0].finish_reason == "stop"


def test_prompt_dictionaries_are_the_same_prompts(llm: LLM) -> None:
    """As vLLM takes them: by text, by ids, by both, one alone, and among strings and lists."""
    ids = list(PROMPT.encode())
    [by_text] = llm.generate(PROMPT, GREEDY)
    given = [{"prompt": PROMPT}, {"prompt_token_ids": ids}, PROMPT, ids]
    outputs = llm.generate([*given, {"prompt": "shown", "prompt_token_ids": ids}], GREEDY)
    assert [by_text.outputs] * 5 == [output.outputs for output in outputs]
    assert [PROMPT, None, PROMPT, None, "shown"] == [output.prompt for output in outputs]
    assert [len(PROMPT) - 1] * 5 == [output.num_cached_tokens for output in outputs]
    [alone] = llm.generate({"prompt_token_ids": ids, "multi_modal_data": None}, GREEDY)
    assert by_text.outputs == alone.outputs


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 5)]
    assert [len(ids) for ids in tokens(llm.generate(["one", "two"], params))] == [2, 5]
    [default] = llm.generate("three")
    assert len(default.outputs[0].token_ids) <= 16
    assert llm.generate([]) == []


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    [one] = llm.chat(messages, GREEDY)
    assert one.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    answers = llm.chat([messages, [{"role": "user", "content": "bye"}]], GREEDY)
    assert answers[0].outputs == one.outputs
    assert len(answers) == 2


def test_the_disk_tier_outlives_the_object(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path, disk_cache_bytes=16 << 20) as first:
        [cold] = first.generate(PROMPT, GREEDY)
    with open_llm(model, tmp_path, disk_cache_bytes=16 << 20) as second:
        [warm] = second.generate(PROMPT, GREEDY)
    assert warm.hit_tokens["disk"] == len(PROMPT) // 16 * 16
    assert warm.outputs == cold.outputs


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts is NoneType"),
        ([1, 2, 3], r"prompts\[0\] is int; prompts are a string"),
        ([["a"]], r"prompts\[0\] holds 'a', and a token id is an integer below 258"),
        ([[1], [258]], r"prompts\[1\] holds 258"),
        ([[-1]], "holds -1"),
        ({}, r"prompts\[0\] has neither prompt nor prompt_token_ids"),
        ([{"prompt": 1}], r"prompts\[0\]\['prompt'\] is int"),
        ([{"prompt_token_ids": "1"}], r"prompts\[0\]\['prompt_token_ids'\] is str"),
        ([{"prompt_token_ids": 1}], r"prompts\[0\] is int"),
        ([{"prompt": "x", "lora": 1}], r"prompts\[0\] has lora; a prompt dictionary has prompt,"),
        (
            [{"prompt": "x", "multi_modal_data": {"audio": b""}}],
            r"\['multi_modal_data'\] must be a dictionary with image alone",
        ),
        (
            [{"prompt": "x", "multi_modal_data": {"image": b""}}],
            r"prompts\[0\] has images, and this model sees none",
        ),
        ("", "the prompt has no tokens"),
        ("x" * 2000, "2000 tokens"),
    ],
)
def test_bad_prompts_are_refused(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, GREEDY)


def test_bad_parameters_are_refused(llm: LLM) -> None:
    for params, message in (
        ({"max_tokens": 3}, "sampling_params is dict"),
        ([{}], "sampling_params holds dict"),
        ([GREEDY, GREEDY], "2 sampling_params for 1 prompts"),
        (SamplingParams(temperature=-1), "temperature"),
        (SamplingParams(stop=("",)), "not empty"),
    ):
        given: Any = params
        with pytest.raises(RequestError, match=message):
            llm.generate("x", given)
    bad: Any
    for bad in ("hello", [], {"role": "user"}):
        with pytest.raises(RequestError, match="list of messages"):
            llm.chat(bad)
    with pytest.raises(RequestError, match="role is 'nobody'"):
        llm.chat([{"role": "nobody", "content": "x"}])


def test_one_bad_prompt_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no tokens"):
        llm.generate([PROMPT, ""], SamplingParams(max_tokens=500, ignore_eos=True))
    [after] = llm.generate("after it", GREEDY)
    assert len(after.outputs[0].token_ids) == 12


def test_a_step_that_fails_is_an_error_and_the_next_call_is_served(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = llm._engine._runner

    def broken(batch: object) -> None:
        raise RuntimeError("no arithmetic today")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "step", broken)
        with pytest.raises(EngineFailed, match="failed in a step"):
            llm.generate("x", GREEDY)
    assert len(tokens(llm.generate("x", GREEDY))[0]) == 12


def test_sizes_and_models_that_cannot_work(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="host_cache_bytes"):
        open_llm(model, tmp_path, host_cache_bytes=0, disk_cache_bytes=1 << 30)
    with pytest.raises(ConfigurationError, match="holds 0 blocks"):
        open_llm(model, tmp_path, device_cache_bytes=10, disk_cache_bytes=16 << 20)
    with open_llm(model, tmp_path, disk_cache_bytes=16 << 20):
        pass  # the failed start has let go of the directory
    with pytest.raises(ModelError, match="no model 'nonsense'"):
        LLM("nonsense", cache_dir=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="give another cache_dir"):
        open_llm(model, tmp_path / "file")


def test_an_engine_that_cannot_be_made_closes_its_tiers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ModelRunner) -> None:
        raise MemoryError

    before = {*threading.enumerate()}
    with monkeypatch.context() as failing:
        failing.setattr(ModelRunner, "record", fail)
        with pytest.raises(MemoryError):
            open_llm(model, tmp_path)
    assert {*threading.enumerate()} <= before
    open_llm(model, tmp_path).close()


def test_closed_twice_is_closed(model: Path, tmp_path: Path) -> None:
    llm = open_llm(model, tmp_path)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed):
        llm.generate("x")


def test_closing_ends_a_compiler_that_is_at_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "c++"
    program.write_text("#!/bin/sh\nsleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(library, "COMPILERS", (str(program),))
    monkeypatch.setattr(load, "_COMPILED_FROM_BYTES", 0)
    monkeypatch.setattr(library.Operators, "load", lambda self: False)
    with open_llm(model, tmp_path) as llm:
        operators = llm._loaded.operators
        assert operators is not None
        if operators.missing is not None:
            pytest.skip(operators.missing)
        compiling = operators._compiling
        assert compiling is not None and compiling.end.alive
    assert not compiling.end.alive


@pytest.mark.parametrize(("dtype", "fuses"), [("float32", True), ("bfloat16", False)])
def test_compiled_functions_expand_records_of_every_dtype(
    model: Path,
    tmp_path: Path,
    operators: library.Operators,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    fuses: bool,
) -> None:
    """A forward calls operators in float32 alone, and the disk's records have any dtype."""
    monkeypatch.setattr(load, "_COMPILED_FROM_BYTES", 0)
    monkeypatch.setattr(load, "Operators", lambda folder: operators)
    monkeypatch.setattr(planes, "_compiled", {})
    with open_llm(model, tmp_path, dtype=dtype, disk_cache_bytes=64 << 20) as llm:
        llm.generate(PROMPT, GREEDY)
        assert {2, 4} == planes._compiled.keys()
        assert fuses == llm._loaded.fuses
        traced = llm._engine._runner._traced
        assert traced is not None and fuses == (traced.num_operators > 0)


def test_the_light_half_of_the_package_imports_no_torch() -> None:
    script = (
        "import sys, engine.request; from engine import SamplingParams; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        engine.Nonsense  # noqa: B018  looking it up is the point
