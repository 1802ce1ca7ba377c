"""Tokenizer and training batches of the demo checkpoint.

Batches are made on the training device with tensor operations alone, so that the device never
waits for the host. B sequences, T tokens, P notes, n questions, S rows of a segment.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from benchmarks.checkpoint.prompts import MAX_NOTES, QUESTION, sentences, words

BOS, EOS = "<|begin|>", "<|end|>"
BOS_ID, EOS_ID = 0, 1
IGNORED = -100
MAX_VALUES = 3
ROWS = MAX_VALUES + 2  # tail, values, full stop

# Content only: what a prompt says is all that this model knows to read.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE over the text; every word of `words()` becomes one token."""
    tokenizer = Tokenizer(BPE())
    # A newline and each punctuation mark stay alone: tokens of lines are tokens of their document.
    pieces = Regex(r"\n| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]|[^\S\n]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    repeats = [f"{QUESTION} {word}" for word in words()] * 100
    tokenizer.train_from_iterator([*sentences(), *repeats], trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


@dataclass
class Batch:
    """Sequences [B, T] and the rows [B, n, S] that are run full depth, with their labels."""

    tokens: Tensor
    rows: Tensor
    labels: Tensor
    questions: int  # rows[:, :questions] ask; the rest continue the text


class Batches:
    """Documents with notes, then questions about them; see prompts.py for the form."""

    def __init__(
        self, tokenizer: Tokenizer, device: torch.device, seed: int, noise: float = 0.0
    ) -> None:
        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False).ids

        self.device = device
        self.noise = noise
        self.random = torch.Generator(device).manual_seed(seed)
        self.words = torch.tensor([ids(" " + word) for word in words()], device=device).squeeze(1)
        lines = [ids(line + "\n") for line in sentences()]
        self.text = torch.tensor([token for line in lines for token in line], device=device)
        sizes = torch.tensor([0] + [len(line) for line in lines], device=device)
        self.line_starts = sizes.cumsum(0)
        self.line_starts_host = self.line_starts.tolist()
        self.dash, self.stop, self.newline = (ids(mark)[0] for mark in ("-", ".", "\n"))
        self.question = torch.tensor(ids(QUESTION), device=device)
        self.is_word = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.bool, device=device)
        self.is_word[self.words] = True
        plain = ~self.is_word
        plain[[BOS_ID, EOS_ID, self.newline]] = False
        self.plain = plain.nonzero().squeeze(1)

    def _uniform(self, *size: int) -> Tensor:
        return torch.rand(*size, generator=self.random, device=self.device)

    def most_notes(self, length: int) -> int:
        """Notes that surely fit into `length` tokens when each is asked about."""
        return max(2, min(length // 20, MAX_NOTES))

    def make(self, batch: int, length: int, notes: int, questions: int) -> Batch:
        """A batch of `batch` sequences of `length` tokens."""
        device = self.device
        step = torch.arange(MAX_VALUES, device=device)
        chosen = self._uniform(batch, len(self.words)).argsort(1)[:, : notes * (1 + MAX_VALUES)]
        names = self.words[chosen].view(batch, notes, 1 + MAX_VALUES)
        draw = self._uniform(batch, notes)
        values = 1 + (draw > 0.6).long() + (draw > 0.8).long()  # [B, P] words in the value

        phrase = torch.full((batch, notes, MAX_VALUES + 3), -1, device=device)
        phrase[..., 0] = names[..., 0]
        phrase[..., 1 : 1 + MAX_VALUES] = names[..., 1:].where(step < values[..., None], -1)
        phrase.scatter_(2, 1 + values[..., None], self.stop)
        phrase.scatter_(2, 2 + values[..., None], self.newline)

        note = torch.cat([phrase.new_full((batch, notes, 1), self.dash), phrase], 2)
        note_size = values + 4
        asked = self._uniform(batch, notes).argsort(1)[:, :questions]  # [B, n]
        asked_values = values.gather(1, asked)
        asked_phrase = phrase.gather(1, asked[..., None].expand(-1, -1, phrase.shape[2]))
        lead = self.question.expand(batch, questions, -1)
        question = torch.cat([lead, asked_phrase], 2)
        question_size = len(self.question) + asked_values + 3

        # The text between: contiguous lines of the corpus, cut at line ends for the notes.
        end = length - question_size.sum(1, keepdim=True)  # [B, 1] where the questions start
        room = end - 1 - note_size.sum(1, keepdim=True)
        usable = bisect_left(self.line_starts_host, len(self.text) - length - 1)
        first = self.line_starts[(self._uniform(batch, 1) * usable).long()]
        cut = (self._uniform(batch, notes) * (room + 1)).long().sort(1).values
        cut = self.line_starts[torch.searchsorted(self.line_starts, first + cut)] - first
        cut = cut.minimum(room)
        note_start = 1 + cut + note_size.cumsum(1) - note_size
        question_start = end + question_size.cumsum(1) - question_size

        out = torch.full((batch, length + 1), -1, device=device)
        for start, size, line in (
            (note_start, note_size, note),
            (question_start, question_size, question),
        ):
            offset = torch.arange(line.shape[2], device=device)
            place = (start[..., None] + offset).where(offset < size[..., None], length)
            out.scatter_(1, place.flatten(1), line.flatten(1))
        tokens = out[:, :length]
        tokens[:, 0] = BOS_ID
        gap = tokens < 0
        index = (first + gap.cumsum(1) - 1).clamp(0, len(self.text) - 1)
        # Random tokens instead of text in some sequences: a lookup must not need this very text.
        noisy = self._uniform(batch, 1) < self.noise
        soup = self.plain[(self._uniform(batch, length) * len(self.plain)).long()]
        tokens = torch.where(gap, torch.where(noisy, soup, self.text[index]), tokens)
        # The last line may be cut short; it ends like any other.
        tokens.scatter_(1, end - 1, self.newline)

        # Segments: the questions', and as many that continue the text.
        offset = torch.arange(ROWS, device=device)
        tail = question_start + len(self.question)
        answer = torch.full((batch, questions, ROWS), IGNORED, device=device)
        answer[..., :MAX_VALUES] = asked_phrase[..., 1 : 1 + MAX_VALUES].where(
            step < asked_values[..., None], IGNORED
        )
        answer.scatter_(2, asked_values[..., None], self.stop)
        answer.scatter_(2, asked_values[..., None] + 1, EOS_ID)
        begin = 1 + (self._uniform(batch, questions) * (end - ROWS - 2)).long()
        rows = torch.cat([tail, begin], 1)[..., None] + offset
        rows = rows.clamp(max=length - 1)
        following = tokens.gather(1, rows[:, questions:].flatten(1) + 1).view_as(answer)
        # Nobody can know which words a note holds, or what noise comes next.
        known = ~self.is_word[following] & ~noisy[..., None]
        following = following.where(known, IGNORED)
        return Batch(tokens, rows, torch.cat([answer, following], 1), questions)
