"""Where checkpoints of recurrent states are taken, by the bytes of both."""

from hypothesis import given
from hypothesis import strategies as st

from tiers.policy.checkpoints import STRIDE, keeps_stop, positions, prompt_end, worth_blocks

counts = st.integers(0, 200)


@given(
    start=counts,
    tokens=st.integers(1, 5000),
    size=st.integers(1, 64),
    parts=counts,
    worth=st.integers(1, 60),
)
def test_a_prompt_resumes_at_each_of_its_checkpoints_and_they_are_few(
    start, tokens, size, parts, worth
):
    wanted = positions(start, tokens, size, worth=worth, parts=parts)
    end = prompt_end(tokens, size)
    assert all(start < number <= end and number * size < tokens for number in wanted)
    assert (end in wanted) == (end > start)
    assert (min(parts, end) in wanted) == (min(parts, end) > start)
    assert (len(wanted) - 2) * worth * STRIDE <= end


def test_an_answer_is_kept_where_its_blocks_are_as_large_as_the_state():
    worth = worth_blocks(77_000_000, 1_572_864)  # Qwen3-Next-80B, blocks of 64 tokens
    assert 49 == worth
    ends = [keeps_stop(number, 6400, 64, worth=worth) for number in (98, 99, 147, 148)]
    assert [True, False, False, True] == ends  # 98: the prompt was not computed whole
    assert 1 == worth_blocks(1, 1_572_864)
