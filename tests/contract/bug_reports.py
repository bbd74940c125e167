"""Public reports on KV caches and sparse attention, and the test that holds each of them here.

Each entry: the reports, what must be right (in our own words), and the tests (`file::function` below `tests/`), or why the
report cannot apply to this library.
"""

from typing import NamedTuple


class Report(NamedTuple):
    """One kind of fault.

    Attributes:
        names: where it was reported.
        right: what must hold.
        tests: node ids below `tests/`, without parameters.
        not_ours: why nothing here could show it, where there is no test.
    """

    names: str
    right: str
    tests: tuple[str, ...] = ()
    not_ours: str = ""


DENSE, STATE, TURNS = (
    "conformance/test_dense_equality.py::test_",
    "conformance/test_state.py::test_",
    "conformance/test_turns.py::test_",
)
PADDING, MEMORY, REFUSED = (
    "conformance/test_padding.py::test_",
    "conformance/test_memory.py::test_",
    "conformance/test_refusals.py::test_",
)
COMPILE, OTHERS = "conformance/test_compile.py::test_", "conformance/test_other_caches.py::test_"
STREAMING, SNAPKV = "conformance/test_oracle_streaming.py::test_", "conformance/test_oracle_snapkv.py::test_"
HERE, MACHINE = "contract/test_reports.py::test_", "contract/test_machine.py::test_"
EXACT, HOST, OFFLOADED = (f"offload/test_hisparse_{name}.py::test_" for name in ("exact", "memory", "state"))
KERNELS = "ops/test_ops_decode.py::test_"

PADDING_AND_BATCH = [
    Report("transformers#18104", "rows of unlike padding step on as a recompute would", (PADDING + "one_padded_row", TURNS + "bare_forwards_count_positions_themselves")),
    Report("unsloth#3795 #3803 #4078", "every row of a batch has its own positions", (PADDING + "generate", PADDING + "rows_around_every_edge")),
    Report("transformers#30688", "slots that are allocated and empty are never attended to", (KERNELS + "reserve_far_larger_than_what_is_stored", PADDING + "one_padded_row")),
    Report("kvpress#25", "padding is not scored, kept or counted to the budget", (PADDING + "padding_content_is_never_read", SNAPKV + "kept_tokens_at_the_edges", "ops/test_ops_scores.py::test_window_padding")),
    Report("transformers#34232", "a cached prefix goes on in a batch; keys and values are split alike", (HERE + "one_prefix_goes_on_with_several_suffixes", STATE + "rows_move_with_all_their_state", REFUSED + "padding_that_changes_between_turns")),
    Report("hip-attention#42", "host memory gives every row its own keys and values", (HOST + "pages_of_many_rows_stay_in_their_own_memory", EXACT + "rows_of_unlike_length", "tiered/test_tiered_model.py::test_five_rows_of_very_different_length")),
]  # fmt: skip

POSITIONS = [
    Report("transformers#47597", "a compressed cache goes on at the true position, or refuses", (TURNS + "new_tokens_alone_with_the_whole_mask", REFUSED + "positions_that_do_not_follow", REFUSED + "a_mask_of_the_new_tokens_alone")),
    Report("kvpress#16 #158", "both numberings are offered, and re-rotated keys are exact", (STREAMING + "the_two_numberings_differ_once_something_is_gone", STREAMING + "many_steps_do_not_drift")),
    Report("VeloxQuant-MLX#389 #171", "tokens seen are counted apart from entries held", (STATE + "seen_and_kept_are_counted_apart", TURNS + "second_turn_feeds_only_new_tokens_at_their_positions")),
    Report("kvpress#84 #85, VeloxQuant-MLX#148", "keys turn by the model's own frequencies (YaRN, Llama 3), scaled once", (STREAMING + "yarn_scaling_is_not_applied_twice", STREAMING + "a_conversation", STREAMING + "other_rotary_layouts", REFUSED + "cache_positions_with_length_dependent_rope")),
    Report("VeloxQuant-MLX#189", "StreamingLLM numbers by the cache, as published, unless told otherwise", (STREAMING + "token_by_token_as_in_the_paper",)),
    Report("transformers#43082 #43132", "a prompt in chunks of any size is the prompt", (HERE + "a_chunk_larger_than_the_prompt_is_the_prompt", DENSE + "chunked_prefill")),
    Report("streaming-llm#48", "one long generation stays within the budget", (MEMORY + "500_steps", HERE + "sinks_stay_through_a_hundred_steps")),
]  # fmt: skip

MASKS = [
    Report("transformers#35168", "layers of unlike length run on every attention path", ("methods_token/test_token_window.py::test_layers_of_different_size_run_everywhere",)),
    Report("pytorch#108108, optimum#1416", "causality is by position where there are fewer queries than keys", ("ops/test_ops_chunk.py::test_chunk", DENSE + "chunked_prefill")),
    Report("attention_sinks#6", "generation runs far past the window, whatever the mask's length", (STREAMING + "a_conversation", MEMORY + "500_steps")),
    Report("transformers#31381 #31537 #32315", "a sink cache at its window less and more one, over two turns", (STREAMING + "edges", TURNS + "three_turns_hold_the_budget_or_grow_as_stated")),
    Report("transformers#35681", "padded rows past a sliding window", (PADDING + "every_family",)),
    Report("transformers#48510", "hybrid layers keep a mask of their own kind", (DENSE + "every_architecture", DENSE + "chunked_prefill_of_hybrid_models")),
    Report("KVCache-Factory#27", "compressed decode is the same on eager and sdpa", ("methods_token/test_token_window.py::test_layers_of_different_size_run_everywhere", DENSE + "every_architecture")),
    Report("gpt-neox#1178", "a one-token query sees all that is held", (KERNELS + "ragged_lengths", "ops/test_ops_flash.py::test_ragged_heads_become_sequences")),
]  # fmt: skip

SEARCH = [
    Report("transformers#46612 #46819", "beams carry all their state: keys, positions, scores, pages", (DENSE + "beams_carry_their_own_state_under_eviction", OFFLOADED + "beams_are_quests_beams", MACHINE + "any_sequence")),
    Report("transformers#30312", "taking tokens back keeps the buffers in place", (STATE + "crop_of_decoded_tokens", "methods_select/test_selecting_cache.py::test_metadata_follows_everything")),
    Report("transformers#30413", "assisted greedy text is greedy text", (STATE + "drafts_equal_greedy_or_are_refused",)),
    Report("transformers#48280", "drafts past a sliding window are verified as they would be decoded", (STATE + "drafts_equal_greedy_or_are_refused",)),
    Report("transformers#47153 #46629", "taking tokens back past a sliding window is recorded or refused", (STATE + "crop_past_a_sliding_window_changes_nothing_when_refused",)),
    Report("transformers#31644", "the assistant does not get the main model's cache", (HERE + "an_assistant_gets_a_cache_of_its_own",)),
    Report("transformers#44893 #45745", "counter and tensors go back together", (STATE + "crop_into_the_prompt", MACHINE + "any_sequence")),
]  # fmt: skip

CONVERSATIONS = [
    Report("transformers#38727 #32019, Qwen3#819", "a returned cache serves the next generate()", (TURNS + "two_turns_with_room_equal_one_dense_run", TURNS + "returned_cache_is_the_one_passed")),
    Report("SnapKV#23", "state is the cache's, not the module's: another prompt, another cache", (STATE + "reset_then_another_prompt", STATE + "interleaved_caches_do_not_meet", MEMORY + "500_steps")),
    Report("transformers#30351", "a compiled step answers the second prompt too", (COMPILE + "second_turn_under_compile", "decoding/test_graphs_gpu.py::test_generate_compiles_once")),
    Report("transformers#34164", "the token at the boundary of two turns is fed once", (HERE + "nothing_recomputes_when_no_token_is_new", TURNS + "everything_sent_again_with_no_new_message")),
]  # fmt: skip

DEVICES_AND_DTYPES = [
    Report("transformers#33147 #32624 #39732, kvpress#240 #241", "a layer's tensors are where the layer computes", (HERE + "layers_on_two_devices", "ops/test_ops_gpu.py::test_second_device")),
    Report("kvpress#49 #172", "scores of a distributed model are those of one process", ("parallel/test_tensor_parallel.py::test_same_tokens_same_entries_half_the_bytes",)),
    Report("transformers#34799", "states of another precision are cast when they are stored", ("ops/test_ops_store.py::test_casts_to_the_dtype_of_the_store",)),
    Report("transformers#30019", "the cache keeps the precision of its layers", (STATE + "files_keep_the_dtype", DENSE + "dtypes")),
    Report("transformers#25420", "each precision has its own stated tolerance", (DENSE + "dtypes",)),
]  # fmt: skip

COMPILED = [
    Report("transformers#37908", "a growing cache recompiles when it doubles, not at every step", (COMPILE + "a_growing_cache_recompiles_only_when_it_doubles", COMPILE + "60_steps_in_one_graph")),
    Report("transformers#35164", "what cannot be recorded says so", ("methods_select/test_selecting_cache.py::test_hnsw_is_not_compiled_and_says_so", EXACT + "without_registered_memory_copies_are_staged")),
    Report("transformers#30055", "a measured row says what was compiled", (HERE + "every_benchmark_row_says_what_ran",)),
]  # fmt: skip

OFFLOAD = [
    Report("transformers#48763", "what selects has read the keys before they leave", (EXACT + "any_setting_is_quest",)),
    Report("vllm#57019 #57027", "every layer has its own host memory", (EXACT + "offloaded_layers_equal_resident_ones", OFFLOADED + "two_caches_on_one_model_do_not_meet")),
    Report("TensorRT-LLM#15546", "no staging buffer is written while it is read", ("ops/test_ops_offload_cache.py::test_replayed_graphs_on_a_gpu", EXACT + "without_registered_memory_copies_are_staged")),
    Report("vllm#39702 #42289", "a page that a step has chosen does not leave before it is read", ("ops/test_ops_offload.py::test_any_walk", "ops/test_ops_offload.py::test_sizes_around_the_hot_buffer")),
    Report("transformers#31325", "copies are waited for", ("ops/test_ops_offload_cache.py::test_registered_memory_on_a_gpu",)),
]  # fmt: skip

BUDGETS = [
    Report("kvpress#264", "one or two tokens never become none", (HERE + "shares_of_tiny_prompts_keep_at_least_one", DENSE + "short_prompts")),
    Report("KVCache-Factory#6", "a pyramid over a short prompt keeps its total, or everything", ("methods_token/test_token_window.py::test_schedule_at_its_thresholds", "methods_token/test_token_window.py::test_a_prompt_within_the_budget_has_no_pyramid")),
    Report("kvpress#165", "a prompt without a context works", (DENSE + "short_prompts",)),
    Report("HeadKV#3, KVCache-Factory#49", "key/value heads are stored, not query heads", (MEMORY + "bytes_fall_to_the_budget",)),
    Report("SnapKV#22", "how a group's scores become one is stated, and tested", (SNAPKV + "kept_tokens", SNAPKV + "query_heads_of_a_group_may_trade_places")),
    Report("axlearn#842", "query head h reads key/value head h // group", ("ops/test_ops_chunk.py::test_groups", STREAMING + "groups")),
]  # fmt: skip

MODELS = [
    Report("transformers#38046", "prompts that cross the sliding window while they are answered", (DENSE + "every_architecture", PADDING + "every_family")),
    Report("transformers#45253 #45242", "a model that needs a shared cache does not run without", ("layers_shared/test_shared_training.py::test_a_trained_model_refuses_to_run_without_its_map",)),
    Report("mlx-lm#1805 #1396", "layers that share read the same tokens in a prompt and step by step", ("layers_shared/test_native_sharing.py::test_stepwise_equals_prompt",)),
    Report("transformers#40099 #34848", "the examples of the documentation run", ("test_readme.py::test_code_runs_as_it_stands",)),
    Report("llm-compressor#2494", "states come from the attention call, so fused projections are no matter", (HERE + "scores_are_the_models_own_attention", DENSE + "every_architecture")),
]  # fmt: skip

MEMORY_AND_SCORES = [
    Report("H2O#12, kvpress#7", "what is evicted is freed, head by head", (MEMORY + "bytes_fall_to_the_budget", "methods_head/test_head_memory.py::test_bytes_are_those_of_the_budget")),
    Report("mellea#544", "nothing of a prompt outlives its compression, nor a cache its last reference", (MEMORY + "no_prompt_tensor_stays_alive", MEMORY + "a_dropped_cache_is_freed_at_once", HERE + "outputs_name_the_cache_that_was_passed")),
    Report("SnapKV#1, SimLayerKV#1", "scores of long prompts take linear memory", ("methods_token/test_token_memory.py::test_h2o_reads_16k_tokens_in_linear_memory", "methods_token/test_token_memory.py::test_other_scorers_make_no_square_matrix")),
    Report("VeloxQuant-MLX#137 #146, keys_values#140", "decoded tokens can earn their place against old ones", ("methods_token/test_token_h2o.py::test_decoded_tokens_become_heavy_hitters", "methods_token/test_token_h2o.py::test_protected_by_index_when_all_scores_are_equal")),
]  # fmt: skip
