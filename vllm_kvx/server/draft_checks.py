"""What a server with policies refuses of speculative decoding, and what to change: one row each."""

from vllm_kvx.server.pipeline_checks import in_pipeline
from vllm_kvx.server.start_refusal import DRAFTS, Refusal, asked_connector

# What drafts tokens without a model, and so without layers of its own.
WITHOUT_MODEL = ("ngram", "ngram_gpu")

# Where tokens are drafted (``Layout.drafts``).
WITH_DRAFTS: tuple[Refusal, ...] = (
    Refusal(
        lambda c: c.speculative_config and c.scheduler_config.async_scheduling,
        "while tokens are drafted, asynchronous scheduling only knows how many tokens a request "
        "has at most, and policies need the number: set --no-async-scheduling",
        DRAFTS,
    ),
    Refusal(
        lambda c: c.speculative_config and c.speculative_config.method not in WITHOUT_MODEL,
        "draft models, EAGLE and MTP are not supported yet: set the method of --speculative-config "
        "to ngram, which drafts from the text so far, or drop --speculative-config",
        DRAFTS,
    ),
    Refusal(
        lambda c: c.speculative_config and c.model_config.is_hybrid,
        "some layers of this model keep a state, which has to be taken back when drafted tokens "
        "are rejected, and that is not supported yet: drop --speculative-config",
    ),
    Refusal(
        lambda c: c.speculative_config and in_pipeline(c),
        "no test drafts tokens in a pipeline: drop --speculative-config, or set "
        "--pipeline-parallel-size 1",
    ),
    Refusal(
        lambda c: c.speculative_config and asked_connector(c),
        "no test drafts tokens beside a KV connector: drop --speculative-config, or "
        "--kv-transfer-config and --kv-offloading-size",
    ),
)
