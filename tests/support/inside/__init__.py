"""The one way inside vllm_kvx: every access of tests to its private or internal state.

When internals are renamed these files change, and no test does. Imports of the package stand in
the functions that need them, so that one name that is gone breaks the tests that use it alone.
`engine` is a ``support.engine.Engine``.
"""

# ruff: noqa: F401
from support.inside.choices import drop_windows, keep_lowest, shift_heads
from support.inside.graphs import (
    capture_sets_of,
    count_draft_replays,
    count_graph_replays,
    count_retrieval_graphs,
    count_waiting_graphs,
    draft_from,
    drafting_without_graphs,
    one_launch_ran,
    replay_waiting_steps,
    replaying_drafts,
    room_for_scores,
    room_in_graphs,
    tickets,
    waiting_without_graphs,
    watch_graphs,
)
from support.inside.operators import (
    bound_metrics_scratch,
    copy_blocks_of,
    copy_states_of,
    find_nvcc,
    retention_kernels,
    slice_chosen_rows,
    tile_keys,
    tile_metrics,
    tile_norms,
    tile_pool,
    tile_value_norms,
    tile_window_rows,
    use_dense_ops,
)
from support.inside.runner import (
    Decoders,
    as_rank,
    assert_no_centrality,
    assert_no_prompt,
    assert_worker_forgot,
    cache_dtypes,
    discard_memory,
    entries_of,
    fill_free_blocks,
    is_stock,
    limit_pass,
    plan_for_every_group,
    poison_free_blocks,
    profiled_scratch,
    runs_compiled_ranges,
    set_cache_scales,
    value_factors,
    watch_mlp_rows,
    watch_passes,
    watch_rows,
    worker,
)
from support.inside.scheduler import (
    ask_in_every_step,
    assert_scheduler_forgot,
    cached_blocks,
    cached_hashes,
    count_allocations,
    forecast_more_room,
    free_windows,
    hashes_of_several_blocks,
    left_in_scheduler,
    let_quiet_steps_be,
    limit_prefix_hits,
    owed_blocks,
    published_blocks,
    read_events,
    stash_seekers,
    state_tokens,
    upper_managers,
    used_pages,
    used_stash_pages,
    watch_blocks,
    watch_chunks,
    watch_evictions,
    watch_free_windows,
    watch_quiet_steps,
    watch_stash,
)
from support.inside.start import naming, run_in_full, slice_rows
