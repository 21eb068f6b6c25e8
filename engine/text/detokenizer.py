"""Text as it is generated, without partial characters or partial stop strings.

One per stream, used by the api on its own thread. The cost of a token depends on its own length and
the stop strings' lengths, not on the text before it.
"""

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What the detokenizer needs of a tokenizer."""

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token: int) -> bytes: ...


class IncrementalDetokenizer:
    """Turns token ids into text that is safe to send.

    It holds back the bytes of an unfinished character, and an end of the text that may begin a stop
    string. Invariant: sent text + held text is the text so far, and the held text contains no stop
    string. Once `stopped`, the stop string and all text after it are dropped.

    `num_tokens` counts the tokens fed, up to and including the one that completed a stop string.
    """

    def __init__(
        self, tokenizer: TokenBytes, stop: Sequence[str] = (), *, shown: Collection[str] = ()
    ) -> None:
        """`shown`: special tokens to include in the text."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids
        if shown:
            kept = {text.encode() for text in shown}
            self._skipped = frozenset(
                token for token in self._skipped if tokenizer.token_bytes(token) not in kept
            )
        self._stop = tuple(text for text in stop if text)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False
        self.stop_string: str | None = None
        self.num_tokens = 0

    def feed(self, token_ids: Iterable[int]) -> str:
        """Feed tokens. Returns the new text that is safe to send. Does nothing once `stopped`."""
        sent = []
        for token in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            if token not in self._skipped:
                sent.append(self._take(self._decoder.decode(self._tokenizer.token_bytes(token))))
        return "".join(sent)

    def flush(self) -> str:
        """End the text. Returns the held text, with unfinished bytes as U+FFFD."""
        if self.stopped:
            return ""
        text = self._take(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""  # empty if this end completed a stop string
        return text + held

    def _take(self, text: str) -> str:
        if not text:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        found = self._find_stop(text)
        if found is not None:
            position, self.stop_string = found
            self.stopped, self._held = True, ""
            return text[:position]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """The first stop string to be complete. Among equals, the one that begins first."""
        found = [
            (text.find(stop) + len(stop), text.find(stop), stop)
            for stop in self._stop
            if stop in text
        ]
        if not found:
            return None
        _, position, stop = min(found)
        return position, stop


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
