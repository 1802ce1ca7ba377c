"""Tokenizers that tests look into."""

from typing import Any


class Counting:
    """A tokenizer that counts the texts it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.calls = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self.tokenizer(*args, **options)
