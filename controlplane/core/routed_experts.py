"""Which experts a model with experts sent each token to, as its engine says: what a trainer replays. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass

EXPERT_BYTES = 2
"""Each expert's number is an unsigned 16-bit integer, little-endian."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Of the tokens that went through the model, prompt and sample alike, from `first_token` on: the sample's last
    token did not."""

    first_token: int
    """Counted from the prompt's first."""
    layers: int
    top_k: int
    """Experts of each token in each layer."""
    experts: bytes
    """[token, layer, choice], one after the other."""

    @property
    def tokens(self) -> int:
        return len(self.experts) // self._token_bytes

    def of(self, token: int) -> tuple[tuple[int, ...], ...]:
        """For each layer the experts of token number `token` of prompt and sample. Raises IndexError."""
        place = token - self.first_token
        if not 0 <= place < self.tokens:
            raise IndexError(f"token {token} is not among {self.first_token} to {self.first_token + self.tokens - 1}")
        row = self.experts[place * self._token_bytes : (place + 1) * self._token_bytes]
        numbers = struct.unpack(f"<{self.layers * self.top_k}H", row)
        return tuple(numbers[i : i + self.top_k] for i in range(0, len(numbers), self.top_k))

    def in_parts(self, most_bytes: int) -> list[RoutedExperts]:
        """The same in order, whole tokens each, at most so many bytes (or one token)."""
        step = max(1, most_bytes // self._token_bytes)
        size = step * self._token_bytes
        return [
            RoutedExperts(self.first_token + i * step, self.layers, self.top_k, self.experts[i * size : (i + 1) * size])
            for i in range(-(-self.tokens // step))
        ]

    def followed_by(self, part: RoutedExperts) -> RoutedExperts:
        """With the next part. Raises ValueError when it is not the next one."""
        if (part.first_token, part.layers, part.top_k) != (self.first_token + self.tokens, self.layers, self.top_k):
            raise ValueError(f"a part from token {part.first_token} on, after {self.first_token} + {self.tokens}")
        return RoutedExperts(self.first_token, self.layers, self.top_k, self.experts + part.experts)

    @property
    def _token_bytes(self) -> int:
        return EXPERT_BYTES * self.layers * self.top_k
