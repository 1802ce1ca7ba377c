"""What the policy does on this model: in words, its layout, its rows, its bytes, its pool."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_kvx.cache.group_size import FEWER_GROUPS
from vllm_kvx.config.settings import AUTO_KEY, POLICY_KEY, REQUESTS_KEY, KVSettings
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import check_served, parse_policy
from vllm_kvx.policy.storage import skipped_of, storage_of
from vllm_kvx.server.auto_policy import MEASURED, line_of
from vllm_kvx.tools.doctor.asked import additional_config, settings_of
from vllm_kvx.tools.doctor.asked_sizes import flag_of
from vllm_kvx.tools.doctor.findings import Context, Finding, note, ok, problem, reason
from vllm_kvx.tools.doctor.reads import reads
from vllm_kvx.tools.doctor.sizes import Pool, Sizes, memory_of, size_of, sizes_given

_NAME_POLICY = "vllm-kvx doctor MODEL --kv-policy POLICY"


def policy(context: Context) -> Iterator[Finding]:
    """The server's policy on the model, as far as both were named."""
    try:
        config = additional_config(context)
        name = config.get(POLICY_KEY)
        if name is None:
            yield note("no KV policy was asked for: a server runs stock vLLM", _NAME_POLICY)
            return
        named = parse_policy(name)
        check_served(name)
    except ValueError as error:
        yield problem(str(error))
        return
    if (choice := config.get(AUTO_KEY)) is not None:
        yield from _chosen(choice)
    yield from _in_words(named)
    lacks = context.missing.get("model") or context.missing.get("layers")
    if lacks:
        yield note(f"its layout is not told: {lacks}")
        return
    try:
        settings = settings_of(context)
    except ValueError as error:
        yield problem(str(error))
        return
    assert settings is not None
    if settings.stock:
        return
    yield ok(f"requests may name {settings.names_allowed()} ({REQUESTS_KEY})")
    of = "" if settings.num_layers == context.text_config["num_hidden_layers"] else " policy"
    yield ok(f"layout on {settings.num_layers}{of} layers: {settings.layout}")
    try:
        sizes = Sizes.of(context)
    except KeyError as error:
        yield note(f"its bytes are not told: config.json has no {error.args[0]}")
        return
    yield from _counts(context, settings, sizes)


def _chosen(choice: Mapping[str, Any]) -> Iterator[Finding]:
    """Which policy `auto` stands for."""
    line = line_of(choice)
    if choice["source"] == MEASURED:
        yield ok(line)
        return
    # The command stands between backticks.
    _, _, rest = line.partition("`")
    yield note(line, rest.partition("`")[0])


def _in_words(named: KVPolicy) -> Iterator[Finding]:
    if named.is_full:
        yield ok("full: stock vLLM; requests may name no other policy")
    for part in named.parts:
        parameters = ", ".join(f"{key}={value}" for key, value in part.parameters().items())
        does = (inspect.getdoc(type(part)) or "").splitlines()[0]
        yield ok(f"{part} ({' and '.join(part.axes)}): {does} {parameters}")


def _counts(context: Context, settings: KVSettings, sizes: Sizes) -> Iterator[Finding]:
    prompt_len = context.request.prompt_len or sizes.longest
    served = settings.policy
    rows = [rows_of(served, prompt_len, layer, sizes.layers) for layer in range(sizes.layers)]
    share = sum(rows) / (prompt_len * sizes.layers)
    yield ok(
        f"a prompt of {prompt_len:,} tokens runs {_by_layer(rows)}: {share:.1%} of full's work"
    )
    # The sidecar's sizes are those of ops, which import both.
    lacks = [name for name in ("torch", "vllm") if name in context.missing]
    if settings.layout.sidecar is not None and lacks:
        yield note(f"its bytes are not told: {' and '.join(lacks)} cannot be imported")
        return
    try:
        pool = Pool.of(served, settings.layout, sizes, prompt_len)
    except (ImportError, ValueError) as error:
        yield note(f"its bytes are not told: {reason(error)}")
        return
    many = pool.choice.has_many
    yield note(pool.says(), FEWER_GROUPS) if many else ok(pool.says())
    yield ok(
        f"KV of such a prompt: {pool.token_bytes / 1024:.2f} KiB a token"
        f"{' and GPU' if sizes.ranks > 1 else ''}, stock {pool.stock_token_bytes / 1024:.2f} KiB"
    )
    if sizes.kv_layers is not None:
        yield ok(sizes.kv_layers.says(prompt_len, _kept(settings, prompt_len, sizes)))
    if not sizes.from_server:
        yield note(_counted_by(sizes, sizes_given(context)))
    yield from _pool(context, settings, sizes, pool)
    yield from reads(context, served, sizes)


def _counted_by(sizes: Sizes, given: Mapping[str, float]) -> str:
    """What bytes and lengths were counted by, where vLLM made no configuration of the flags."""
    blocks = f"KV blocks of {sizes.block_size} tokens"
    if "block_size" in given:
        blocks += ", as --block-size says,"
    flags = ", ".join(flag_of(name) for name in given if name != "block_size")
    by = f", and by {flags}" if flags else ""
    return (
        f"counted by config.json, {blocks} and 16-bit entries{by}, since the "
        f"{'other ' if given else ''}flags were not read"
    )


def _kept(settings: KVSettings, prompt_len: int, sizes: Sizes) -> float:
    """The share of a prompt's entries that the policy keeps in its layers, in [0, 1]."""
    count, sliding = settings.num_layers, settings.layout.sliding
    full = [layer for layer in range(count) if layer not in sliding]
    stored = (
        storage_of(settings.policy, prompt_len, each, sizes.block_size, count).kept for each in full
    )
    return sum(stored) / (prompt_len * len(full))


def _pool(context: Context, settings: KVSettings, sizes: Sizes, pool: Pool) -> Iterator[Finding]:
    stash = settings.stash_tokens
    if settings.layout.stash and not stash:
        stash = sizes.longest + sizes.step
    memory = memory_of(context, sizes, stash)
    if memory is None:
        yield note("no GPU to estimate the KV pool for", "--gpu-memory GIB")
        return
    tokens, stock = memory.pool / pool.token_bytes, memory.pool / pool.stock_token_bytes
    if memory.pool <= 0:
        yield problem(
            f"nothing is left for the KV pool: {memory.says}",
            "--tensor-parallel-size, --gpu-memory-utilization, or a smaller model",
        )
        return
    yield ok(
        f"KV pool, an estimate: {size_of(memory.pool)} hold {int(tokens):,} prompt tokens "
        f"under {settings.policy}, {tokens / stock:.2f}x the {int(stock):,} of stock vLLM "
        f"({memory.says})"
    )
    # A `full` request, or the time before entries go, may need all of them.
    if stock < sizes.longest:
        yield note(
            f"a prompt of the greatest length, {sizes.longest:,} tokens, may not fit while all of "
            "its entries are there",
            f"--max-model-len {int(stock)}",
        )


def rows_of(served: KVPolicy, prompt_len: int, layer: int, num_layers: int) -> int:
    """Rows of a prompt that `layer` runs under a policy.

    Where the selecting layer is found while the prompt runs, the highest that may be is taken. A
    layer counts whole that the server may split, as ``worker/split_layers`` has it.
    """
    rows = prompt_len - skipped_of(served, prompt_len, layer).size
    selection = served.selection(prompt_len, num_layers)
    if selection is None:
        return rows
    return (rows if layer <= selection.after else 0) + (
        selection.count if layer >= selection.resumes_at else 0
    )


def _by_layer(rows: list[int]) -> str:
    """Rows in words, alike layers together."""
    words, begin = [], 0
    for layer in range(1, len(rows) + 1):
        if layer == len(rows) or rows[layer] != rows[begin]:
            where = f"layers {begin}-{layer - 1}" if layer - 1 > begin else f"layer {begin}"
            words.append(f"{rows[begin]:,} rows in {where}")
            begin = layer
    return ", ".join(words)
