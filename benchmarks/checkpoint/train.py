"""Train the demo checkpoint: a small Llama that looks values up in a long context.

Half of the steps run under SPEED visibility (paper, appendix A, Eq. 5) with K drawn per step, the
others at full depth, so that the same weights answer under `full` and under `speed-K`.

    python -m benchmarks.checkpoint.train --output tests/checkpoints/lookup-8l
    python -m benchmarks.checkpoint.train --evaluate tests/checkpoints/lookup-8l
    python -m benchmarks.checkpoint.train --smoke --device cpu --output lookup
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.checkpoint.data import EOS_ID, IGNORED, Batches, build_tokenizer, save_tokenizer
from benchmarks.checkpoint.model import LAYER_NAMES, Llama, Shape, load, save
from benchmarks.checkpoint.prompts import make_prompt
from benchmarks.common.about import about, command_line
from benchmarks.common.files import ROOT

MATRICES = tuple(name for name in LAYER_NAMES if not name.endswith("norm"))
SPEED_LAYERS = (4, 5, 6)
RESULTS = ROOT / "benchmarks" / "results" / "tests" / "checkpoint.json"
# Share of the training done -> lengths that a step draws from. Short ones teach the lookup fast.
CURRICULUM: tuple[tuple[float, tuple[int, ...]], ...] = (
    (0.10, (128,)),
    (0.25, (128, 256, 512)),
    (0.50, (256, 512, 1024)),
    (0.75, (256, 1024, 2048)),
    (1.00, (256, 1024, 2048, 4096, 8192)),
)
LENGTHS = (256, 1024, 2048, 4096, 8000)


class Muon:
    """Momentum, orthogonalised (Newton-Schulz) over the last two dimensions of each weight."""

    def __init__(self, weights: list[Tensor], momentum: float = 0.95) -> None:
        self.weights, self.momentum = weights, momentum
        self.averages = [torch.zeros_like(weight) for weight in weights]

    @torch.no_grad()
    def step(self, rate: float, decay: float) -> None:
        for weight, average in zip(self.weights, self.averages, strict=True):
            gradient = weight.grad
            assert gradient is not None
            average.lerp_(gradient, 1 - self.momentum)
            update = _orthogonal(gradient.lerp(average, self.momentum))
            scale = max(1.0, weight.shape[-2] / weight.shape[-1]) ** 0.5
            weight.mul_(1 - rate * decay).add_(update, alpha=-rate * scale)
            weight.grad = None


def _orthogonal(x: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices to x [L, rows, columns], roughly."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x.shape[-2] > x.shape[-1]
    y = x.mT if wide else x
    y = y.bfloat16() if y.is_cuda else y
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if wide else y).to(x.dtype)


def answered(logits: Tensor, labels: Tensor) -> Tensor:
    """[B, n]: every labelled row of a segment has the right token first (so greedy gives it)."""
    return ((logits.argmax(-1) == labels) | (labels == IGNORED)).all(-1)


class Training:
    """One run: model, optimizers, batches."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        torch.manual_seed(args.seed)
        self.random = random.Random(args.seed)
        self.tokenizer = build_tokenizer(args.vocab_size)
        self.shape = Shape(
            vocab_size=self.tokenizer.get_vocab_size(),
            hidden_size=args.hidden_size,
            intermediate_size=args.intermediate_size,
        )
        self.model = Llama(self.shape).to(self.device)
        self.batches = Batches(self.tokenizer, self.device, args.seed + 1, args.noise)
        matrices = [getattr(self.model, name) for name in MATRICES]
        known = {id(weight) for weight in matrices}
        rest = [weight for weight in self.model.parameters() if id(weight) not in known]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)

    def run(self) -> dict[str, object]:
        args, model = self.args, self.model
        layers = self.shape.num_hidden_layers
        parameters = sum(weight.numel() for weight in model.parameters())
        log(f"{parameters:,} parameters, vocabulary {self.shape.vocab_size}")
        started = time.monotonic()
        tokens = step = 0
        done = 0.0
        loss = torch.zeros(())
        while done < 1.0:
            lengths = next(lengths for share, lengths in CURRICULUM if done < share)
            length = self.random.choice([n for n in lengths if n <= args.max_length])
            size = max(1, args.tokens_per_step // length)
            most = self.batches.most_notes(length)
            notes = self.random.randint(max(2, most // 3), most)
            batch = self.batches.make(size, length, notes, min(notes, 64))
            shallow = self.random.choice((*SPEED_LAYERS, *[layers] * len(SPEED_LAYERS)))
            logits = model(batch.tokens, batch.rows, shallow, self.dtype).float()
            asked, other = logits[:, : batch.questions], logits[:, batch.questions :]
            loss = F.cross_entropy(
                asked.flatten(0, 2), batch.labels[:, : batch.questions].flatten()
            ) + args.text_weight * F.cross_entropy(
                other.flatten(0, 2), batch.labels[:, batch.questions :].flatten()
            )
            loss.backward()
            rate = min(1.0, step / 100) * min(1.0, (1 - done) / 0.5)
            self.muon.step(args.rate * rate, args.decay)
            for group in self.adam.param_groups:
                group["lr"] = args.adam_rate * rate
            self.adam.step()
            self.adam.zero_grad()
            step += 1
            tokens += size * length
            elapsed = time.monotonic() - started
            done = step / args.steps
            if args.minutes:
                done = max(done, elapsed / (60 * args.minutes))
            if step % args.log_every == 0 or done >= 1.0:
                row = " ".join(
                    f"{n}:{'/'.join(f'{accuracy:.3f}' for accuracy in self.accuracy(n).values())}"
                    for n in LENGTHS
                    if n <= args.max_length
                )
                log(
                    f"step {step} done {done:.2f} tokens {tokens / 1e6:.0f}M {elapsed:.0f}s "
                    f"loss {loss.item():.3f} lookup full/{'/'.join(map(str, SPEED_LAYERS))} {row}"
                )
                self.save()
        self.save()
        return {
            "parameters": parameters,
            "steps": step,
            "tokens": tokens,
            "seconds": round(time.monotonic() - started, 1),
        }

    @torch.no_grad()
    def accuracy(self, length: int) -> dict[int, float]:
        """Lookup accuracy per number of shallow layers on fresh batches, full depth first."""
        notes = max(2, min(length // 32, self.batches.most_notes(length)))
        batch = self.batches.make(max(4, 16384 // length), length, notes, min(notes, 16))
        labels = batch.labels[:, : batch.questions]
        result = {}
        for shallow in (self.shape.num_hidden_layers, *SPEED_LAYERS):
            logits = self.model(batch.tokens, batch.rows[:, : batch.questions], shallow, self.dtype)
            result[shallow] = answered(logits, labels).float().mean().item()
        return result

    def save(self) -> None:
        save(self.model, self.args.output)
        save_tokenizer(self.tokenizer, self.args.output, self.shape.max_position_embeddings)


@torch.no_grad()
def greedy(model: Llama, prompts: Tensor, shallow: int, dtype: torch.dtype, most: int) -> Tensor:
    """Tokens [B, most] that follow prompts [B, N]: the tail and the answer run full depth."""
    tokens = prompts
    tail = prompts.shape[1] - 1
    for _ in range(most):
        rows = torch.arange(tail, tokens.shape[1], device=tokens.device)
        rows = rows.expand(len(tokens), 1, -1)
        logits = model(tokens, rows, shallow, dtype)[:, 0, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    return tokens[:, tail + 1 :]


def evaluate(
    directory: Path, device: torch.device, samples: int, longest: int
) -> dict[str, object]:
    """Greedy exact match of the saved weights on `make_prompt`, per length and policy."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = load(directory).to(device)
    layers = model.shape.num_hidden_layers
    accuracy: dict[str, dict[str, float]] = {}
    for length in LENGTHS:
        if length > longest:
            continue
        texts = [
            make_prompt(10_000 * length + seed, length, tokenizer, 1 + seed % 3)
            for seed in range(samples)
        ]
        prompts = torch.tensor([tokenizer.encode(text) for text, _ in texts], device=device)
        answers = [
            [*tokenizer.encode(answer, add_special_tokens=False), EOS_ID] for _, answer in texts
        ]
        accuracy[str(length)] = {}
        for name, shallow in {"full": layers, **{f"speed-{k}": k for k in SPEED_LAYERS}}.items():
            right = 0
            size = max(1, 65536 // length)
            for start in range(0, samples, size):
                part = answers[start : start + size]
                out = greedy(
                    model, prompts[start : start + size], shallow, dtype, max(map(len, part))
                ).tolist()
                right += sum(o[: len(a)] == a for o, a in zip(out, part, strict=True))
            accuracy[str(length)][name] = right / samples
        log(f"{length} tokens: {accuracy[str(length)]}")
    return {
        "samples_per_length": samples,
        "dtype": str(dtype).removeprefix("torch."),
        "greedy_exact_match": accuracy,
        "max_logit_difference_to_transformers": difference(directory, model),
    }


@torch.no_grad()
def difference(directory: Path, model: Llama) -> float:
    """Largest difference of full-depth float32 logits from transformers' LlamaForCausalLM."""
    model = model.to("cpu")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = torch.tensor([tokenizer.encode(make_prompt(0, 300, tokenizer)[0])])
    theirs = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)(tokens).logits
    rows = torch.arange(tokens.shape[1])[None, None]
    ours = model(tokens, rows, model.shape.num_hidden_layers)
    return (theirs - ours[:, 0]).abs().max().item()


@torch.no_grad()
def check_visibility(training: Training) -> None:
    """A packed question gets the logits that its own prompt, cut at its tail, gets alone."""
    model = training.model.cpu()
    batches = Batches(training.tokenizer, torch.device("cpu"), 3)
    batch = batches.make(1, 256, 6, 6)
    for shallow in SPEED_LAYERS:
        packed = model(batch.tokens, batch.rows, shallow)[0]
        for segment, rows in enumerate(batch.rows[0]):
            alone = model(batch.tokens[:, : rows[-1] + 1], rows[None, None], shallow)[0, 0]
            torch.testing.assert_close(packed[segment], alone, atol=1e-4, rtol=1e-4)


def log(message: str) -> None:
    print(message, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="train, and write the checkpoint here")
    parser.add_argument("--evaluate", type=Path, help="evaluate this checkpoint")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON file to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=300, help="prompts per length")
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps, to see it run")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--minutes", type=float, help="end early, with the schedule scaled to this")
    parser.add_argument("--tokens-per-step", type=int, default=65536)
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--rate", type=float, default=0.005, help="Muon")
    parser.add_argument("--adam-rate", type=float, default=2e-3, help="AdamW: embedding and norms")
    parser.add_argument("--decay", type=float, default=0.02)
    parser.add_argument("--text-weight", type=float, default=0.3)
    parser.add_argument("--noise", type=float, default=0.15, help="share of sequences without text")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--hidden-size", type=int, default=96)
    parser.add_argument("--intermediate-size", type=int, default=256)
    parser.add_argument("--log-every", type=int, default=500)
    args = parser.parse_args()
    if (args.output is None) == (args.evaluate is None):
        parser.error("give --output to train or --evaluate to measure a checkpoint")
    if args.smoke:
        args.steps, args.tokens_per_step, args.max_length = 6, 1024, 512
        args.log_every, args.samples = 3, 8
    return args


def main() -> None:
    args = arguments()
    device = torch.device(args.device)
    trained: dict[str, object] = {}
    if args.output is not None:
        training = Training(args)
        if args.smoke:
            check_visibility(training)
            training.model.to(device)
        trained = training.run()
    directory = args.output or args.evaluate
    measured = evaluate(directory, device, args.samples, args.max_length)
    earlier = json.loads(args.results.read_text()) if args.results.exists() else {}
    head = about(
        "How the demo checkpoint was trained, and the lookups that it answers.",
        command_line("benchmarks.checkpoint.train", sys.argv[1:]),
        packages=("transformers",),
    )
    run = {key: value for key, value in head.items() if key != "what"}
    # Training may be an earlier run than evaluation, whose head the file has.
    record = {"about": head, "training": earlier.get("training"), "evaluation": measured}
    if trained:
        record["training"] = {**run, **trained}
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
