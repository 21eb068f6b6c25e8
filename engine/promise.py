"""What a hit leaves as it is, by what computes. Pure. docs/exactness.md is the whole statement."""

from dataclasses import dataclass
from enum import StrEnum


class Equal(StrEnum):
    """What of an answer is the same with and without a hit."""

    BITS = "bits"  # of the logits, so of log-probabilities and of every draw
    TOKENS = "tokens"  # greedy ones, as far as the tests go
    NONE = "none"  # nothing is known that holds it


@dataclass(frozen=True, slots=True)
class Promise:
    """`reason` says why it is not the bits; empty if it is."""

    equal: Equal = Equal.BITS
    reason: str = ""

    @property
    def text(self) -> str:
        """A sentence for people."""
        match self.equal:
            case Equal.BITS:
                return (
                    "Exact to the bit: a hit, other requests and chunks change no bit of an answer."
                )
            case Equal.TOKENS:
                return (
                    f"Not exact to the bit: {self.reason}. Greedy tokens are equal in the tests; a "
                    "hit may change log-probabilities slightly."
                )
            case Equal.NONE:
                return f"Not exact: {self.reason}. A hit may change tokens."

    def or_weaker(self, other: "Promise") -> "Promise":
        """The weaker of the two, this one if they are alike."""
        order = list(Equal)
        return max(self, other, key=lambda each: order.index(each.equal))


BITS = Promise()
