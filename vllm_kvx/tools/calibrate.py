"""`vllm-kvx calibrate`: FastKV's TSP layer for a model, by its Eq. 3.

For each calibration prompt i and each candidate layer L, H'_{L,i} is what the model makes of the
prompt if tokens are selected after layer L, and H_i if none are:

    TSP layer = argmin over L <= L_max of the mean over i of ||H_i - H'_{L,i}||^2 / ||H_i||^2

Where the paper leaves room: H is the last prompt token's state after the final norm, which is what
the logits are made from; the division lets every prompt weigh the same (the paper's Figure 3 is
normalised too); of equal means the lowest layer wins. Retention has no part in it: it does not
touch the prompt's own pass.
"""

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import vllm_kvx
from vllm_kvx.policy.calibration import CACHE_VARIABLE, model_dir, model_key, record_path, save
from vllm_kvx.policy.fastkv import FastKV
from vllm_kvx.policy.saliency import kept_indices, max_pool, per_kv_head, saliency
from vllm_kvx.tools.dense import DenseDecoder, ToolError, load_config, sliding_window

METHOD = "fastkv"
SEPARATOR = "---"

# Called with the index of the layer that is to be run next.
Progress = Callable[[int], None]


def run(args: argparse.Namespace) -> None:
    """The command; `args` as in cli.py.

    Raises:
        ToolError, PolicyError: it cannot be done as asked.
    """
    policy = FastKV(tsp_rate=args.tsp_rate, window=args.window, kernel=args.kernel)
    if policy.tsp_rate == 1:
        raise ToolError("tsp_rate 1 drops no token, so every layer is as good: use less than 1")
    texts = read_prompts(Path(args.prompts))
    config = load_config(args.model, args.revision)
    max_layer = choose_max_layer(config.num_hidden_layers, args.max_layer)
    prompts = tokenize(texts, args.model, args.revision)
    check_token_ids(prompts, config.vocab_size)
    prompts = [shorten(prompt, args.max_prompt_tokens) for prompt in prompts]
    check_lengths(prompts, policy.window, sliding_window(config))
    # Before minutes of work.
    check_writable(record_path(METHOD, "").parent)

    decoder = DenseDecoder.load(args.model, args.device, args.dtype, args.revision)
    measured = measure(decoder, prompts, policy, max_layer)
    # Not before the weights are there: the key is theirs, and a hub's may have come only now.
    key = model_key(config.to_dict(), model_dir(args.model, args.revision))
    record = record_of(args.model, key, decoder.num_layers, policy, measured, prompts)
    print(table(record))
    try:
        path = save(record)
    except OSError as error:
        raise ToolError(f"the result above could not be stored: {error}") from error
    print(
        f"\nStored in {path}: `vllm serve {args.model} --kv-policy fastkv` finds it there.\n"
        f"Anywhere else: --kv-policy fastkv:tsp_layer={record['tsp_layer']}"
    )
    if not args.no_plot:
        picture = Path(args.plot) if args.plot else path.with_suffix(".png")
        print(plot(record, picture))


# Prompts.


def read_prompts(path: Path) -> list[str | list[int]]:
    """The texts, or token ids, in a prompts file.

    `.jsonl`: an object with `prompt` or `prompt_token_ids` per line. `.txt`: texts with a line of
    `---` between two; newlines at a text's ends are not part of it.

    Raises:
        ToolError: the file is unreadable, empty or malformed.
    """
    if path.suffix not in (".jsonl", ".txt"):
        raise ToolError(f"{path}: a prompts file is named *.jsonl or *.txt")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ToolError(f"cannot read prompts from {path}: {reason}") from error
    prompts: list[str | list[int]]
    if path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), start=1)
        prompts = [_json_prompt(line, f"{path}:{i}") for i, line in lines if line.strip()]
    else:
        parts = re.split(rf"^{SEPARATOR}[ \t]*$", text, flags=re.MULTILINE)
        prompts = [part.strip("\n") for part in parts if part.strip()]
    if not prompts:
        raise ToolError(f"{path} holds no prompts")
    return prompts


def _json_prompt(line: str, where: str) -> str | list[int]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ToolError(f"{where}: not JSON: {error}") from error
    names = ("prompt", "prompt_token_ids")
    given = [name for name in names if isinstance(fields, dict) and name in fields]
    if len(given) != 1:
        raise ToolError(f'{where}: give an object with either "prompt" or "prompt_token_ids"')
    value = fields[given[0]]
    if given[0] == "prompt":
        if isinstance(value, str):
            return value
        raise ToolError(f"{where}: prompt must be a string")
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise ToolError(f"{where}: prompt_token_ids must be a list of integers")


def tokenize(
    prompts: Sequence[str | list[int]], model: str, revision: str | None = None
) -> list[list[int]]:
    """Token ids of each prompt; a text's as the completions route makes them, BOS included.

    Raises:
        ToolError: there are texts, and the model has no tokenizer.
    """
    if all(isinstance(prompt, list) for prompt in prompts):
        return [list(prompt) for prompt in prompts if isinstance(prompt, list)]
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, revision=revision)
    except Exception as error:  # transformers and the hub raise what they like
        raise ToolError(
            f"{model} has no tokenizer that loads: give prompt_token_ids in a .jsonl file"
        ) from error
    return [
        tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt for prompt in prompts
    ]


def shorten(prompt: list[int], longest: int | None) -> list[int]:
    """At most `longest` tokens: a longer prompt loses its middle, as in LongBench.

    BOS and the question at the end stay, where there are.
    """
    if longest is None or len(prompt) <= longest:
        return prompt
    end = (longest + 1) // 2
    return prompt[: longest - end] + prompt[len(prompt) - end :]


def check_token_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise ToolError for a token that the model does not have."""
    for number, prompt in enumerate(prompts, start=1):
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise ToolError(f"prompt {number}: token {token} is not one of 0..{vocab_size - 1}")


def check_lengths(prompts: Sequence[Sequence[int]], window: int, longest: int | None) -> None:
    """Raise ToolError for a prompt too short to select from, or too long for a sliding window."""
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) < 2 * window:
            raise ToolError(
                f"prompt {number} has {len(prompt)} tokens; twice the window, {2 * window}, are "
                "the least to select from: give prompts as long as those that you serve"
            )
        if longest is not None and len(prompt) > longest:
            raise ToolError(
                f"prompt {number} has {len(prompt)} tokens, more than the model's sliding window: "
                f"set --max-prompt-tokens {longest}"
            )


# Eq. 3.


@dataclass(frozen=True)
class Distances:
    """||H_i - H'_{L,i}||^2 / ||H_i||^2: one row per prompt, one entry per layer 0..L_max."""

    rows: list[list[float]]

    @property
    def mean(self) -> list[float]:
        """Per layer, over the prompts."""
        return [statistics.fmean(column) for column in zip(*self.rows, strict=True)]

    @property
    def std(self) -> list[float]:
        """Population standard deviation per layer, over the prompts; 0 for one prompt."""
        return [statistics.pstdev(column) for column in zip(*self.rows, strict=True)]

    @property
    def tsp_layer(self) -> int:
        return min(range(len(self.mean)), key=self.mean.__getitem__)


def choose_max_layer(num_layers: int, wanted: int | None = None) -> int:
    """L_max: `wanted`, or by default the end of the lower half, as in all of the paper's models.

    Raises:
        ToolError: `wanted` is not a layer, or has none above it.
    """
    last = num_layers - 2
    if last < 0:
        raise ToolError(f"a model of {num_layers} layer has none to propagate to")
    if wanted is None:
        return max(num_layers // 2 - 1, 0)
    if not 0 <= wanted <= last:
        raise ToolError(
            f"max layer {wanted}: this model has {num_layers} layers, and after the last one "
            f"nothing is left to save; use --max-layer 0 .. {last}"
        )
    return wanted


def measure(
    decoder: DenseDecoder, prompts: Sequence[Sequence[int]], policy: FastKV, max_layer: int
) -> Distances:
    """Eq. 3's distances of `prompts`, with progress on stderr.

    Raises:
        ToolError: the GPU's memory or the type's range does not suffice.
    """
    rows: list[list[float]] = []
    for number, prompt in enumerate(prompts, start=1):
        head = f"prompt {number}/{len(prompts)}, {len(prompt)} tokens"
        try:
            rows.append(distances(decoder, prompt, policy, max_layer, _progress(head, decoder)))
        except torch.cuda.OutOfMemoryError as error:
            raise ToolError(
                f"{head}: out of GPU memory: use --max-prompt-tokens, --dtype bfloat16 or "
                "--device cpu"
            ) from error
        if not all(map(math.isfinite, rows[-1])):
            raise ToolError(f"{head}: its states are not finite: use --dtype bfloat16 or float32")
    return Distances(rows)


def distances(
    decoder: DenseDecoder,
    prompt: Sequence[int],
    policy: FastKV,
    max_layer: int,
    progress: Progress | None = None,
) -> list[float]:
    """The relative squared distance of Eq. 3 for each layer 0..max_layer.

    One full-depth pass; after each candidate layer the selected rows go up from there at once, so
    that no more than one layer's states are kept.
    """
    count = policy.num_propagated(len(prompt))
    rows = decoder.embed(prompt)
    states = []
    steps = decoder.layers(rows, window=policy.window)
    for index in range(decoder.num_layers):
        if progress is not None:
            progress(index)
        rows, attention = next(steps)
        if index <= max_layer:
            assert attention is not None
            chosen = propagated(attention, count, policy.kernel)
            states.append(decoder.finish(rows.select(chosen), index + 1))
    full = decoder.last_state(rows).double()
    return [float((full - state).square().sum() / full.square().sum()) for state in states]


def propagated(attention: Tensor, count: int, kernel: int) -> Tensor:
    """Rows that FastKV propagates (Eq. 1 and 2), from window attention (H, w, n): (count,) int64.

    Summed over the heads, where Eq. 2 averages: the order is the same.
    """
    scores = per_kv_head(max_pool(saliency(attention), kernel), 1)[0]
    return kept_indices(scores, count, attention.shape[1])


def _progress(head: str, decoder: DenseDecoder) -> Progress:
    """Shows each layer on a terminal, and a line per prompt elsewhere."""

    def show(index: int) -> None:
        last = index + 1 == decoder.num_layers
        if sys.stderr.isatty():
            end = "\n" if last else ""
            print(f"\r{head}: layer {index + 1}/{decoder.num_layers}", end=end, file=sys.stderr)
        elif index == 0:
            print(head, file=sys.stderr)
        sys.stderr.flush()

    return show


# What comes out.


def record_of(
    model: str,
    key: str,
    num_layers: int,
    policy: FastKV,
    measured: Distances,
    prompts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """What is stored: the answer, what it was measured with, and on what."""
    return {
        "method": METHOD,
        "model": str(Path(model).resolve()) if Path(model).is_dir() else model,
        "key": key,
        "layers": num_layers,
        "tsp_layer": measured.tsp_layer,
        "max_layer": len(measured.mean) - 1,
        "tsp_rate": policy.tsp_rate,
        "window": policy.window,
        "kernel": policy.kernel,
        "distances": {"mean": measured.mean, "std": measured.std},
        "prompts": {"count": len(prompts), "tokens": [len(prompt) for prompt in prompts]},
        "versions": {
            "vllm_kvx": vllm_kvx.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def table(record: dict[str, Any]) -> str:
    """A line per candidate layer; the chosen one is marked."""
    tokens = record["prompts"]["tokens"]
    lengths = str(min(tokens)) if min(tokens) == max(tokens) else f"{min(tokens)}-{max(tokens)}"
    lines = [
        f"FastKV's TSP layer (Eq. 3) of {record['model']}, {record['layers']} layers:",
        f"{len(tokens)} prompts of {lengths} tokens, tsp_rate {record['tsp_rate']}, "
        f"window {record['window']}, kernel {record['kernel']}",
        "",
        f"{'layer':>5}  {'mean distance':>13}  {'std':>9}",
    ]
    means, stds = record["distances"]["mean"], record["distances"]["std"]
    for layer, (mean, std) in enumerate(zip(means, stds, strict=True)):
        mark = "  <- tsp_layer" if layer == record["tsp_layer"] else ""
        lines.append(f"{layer:>5}  {mean:>13.4g}  {std:>9.3g}{mark}")
    return "\n".join(lines)


def plot(record: dict[str, Any], path: Path) -> str:
    """Draw the curve to `path`; says where it is, or how to get one if matplotlib is missing.

    Raises:
        ToolError: `path` cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        return "No plot: it needs matplotlib; pip install 'vllm-kvx[tools]'"
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    mean, std = record["distances"]["mean"], record["distances"]["std"]
    layers, chosen = list(range(len(mean))), record["tsp_layer"]
    figure, axis = pyplot.subplots(figsize=(6, 3.5))
    axis.errorbar(layers, mean, yerr=std, color="#4878a8", marker="o", markersize=4, capsize=3)
    axis.plot(chosen, mean[chosen], "o", color="black", markersize=8, zorder=3)
    axis.axvline(chosen, color="gray", linewidth=0.8, linestyle=":")
    axis.set_title(f"{Path(record['model']).name}: TSP layer {chosen}", loc="left")
    axis.set_xlabel(f"candidate TSP layer, of {record['layers']}")
    axis.set_ylabel("relative squared distance (Eq. 3)")
    top = axis.get_ylim()[1]
    axis.set_ylim(-0.03 * top, top)
    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not have
        raise ToolError(f"the result is stored, but the plot {path} is not: {error}") from error
    finally:
        pyplot.close(figure)
    return f"Plot: {path}"


def check_writable(directory: Path) -> None:
    """Make `directory` and write to it; ToolError if that cannot be done."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ToolError(
            f"cannot write to {directory}: {error.strerror}; set {CACHE_VARIABLE} to a directory "
            "that can be written"
        ) from error
