"""What tests cost, in one table: ``conftest.py`` makes markers of it, and the Makefile chooses by them.

    dist     starts several processes that talk to each other
    browser  drives a real Chromium (found by its fixture)
    slow     takes more than about three seconds, with its parameters, mostly in a compiler or a search
    gpu      needs a CUDA device (marked in its file)

What is left, ``make quick``, is pure or runs in one process on the CPU. A key is a file, a test in it, or a word in
square brackets: a parameter's.
"""

from __future__ import annotations

COSTS: dict[str, tuple[str, ...]] = {
    "[inductor": ("slow",),
    "cli/test_cli_chaos.py": ("dist", "slow"),
    "cli/test_demo.py": ("dist", "slow"),
    "docs/test_docs_code.py::test_page_runs": ("dist", "slow"),
    "graph/test_explain.py::test_unused_parameters_under_ddp": ("dist",),
    "pipeline/test_batches.py::test_arguments_in_another_order_on_two_gloo_ranks": ("dist",),
    "pipeline/test_chaos.py": ("dist", "slow"),
    "pipeline/test_checkpoint_dist.py": ("dist", "slow"),
    "pipeline/test_checkpoint_sharded.py": ("dist", "slow"),
    "pipeline/test_context_parallel.py": ("dist", "slow"),
    "pipeline/test_copies_counts.py": ("dist",),
    "pipeline/test_crew.py::test_two_processes_raise_the_same": ("dist",),
    "pipeline/test_demo_gpu.py": ("dist", "slow"),
    "pipeline/test_dist.py": ("dist",),
    "pipeline/test_experts.py": ("dist",),
    "pipeline/test_dropped.py": ("dist",),
    "pipeline/test_evaluate.py::test_two_processes": ("dist",),
    "pipeline/test_fit.py::test_a_large_model_takes_no_memory": ("slow",),
    "pipeline/test_fit.py::test_a_whole_gpt_with_its_own_forward": ("slow",),
    "pipeline/test_fit.py::test_four_processes_hold_what_was_predicted_of_shards": ("dist", "slow"),
    "pipeline/test_fit.py::test_two_processes_hold_what_was_predicted": ("dist", "slow"),
    "pipeline/test_fit.py::test_what_does_not_fit_says_what_is_lacking": ("slow",),
    "pipeline/test_gathering.py": ("slow",),
    "pipeline/test_gathering.py::test_a_price_is_measured_and_steps_show_another": ("dist",),
    "pipeline/test_host_waits.py::test_two_ranks": ("dist", "slow"),
    "pipeline/test_lives.py": ("dist", "slow"),
    "pipeline/test_lost_peer.py::test_a_peer_in_a_collective_of_its_own_is_woken": ("dist", "slow"),
    "pipeline/test_lost_peer.py::test_an_error_of_gloo_with_all_ranks_alive_keeps_its_text": ("dist",),
    "pipeline/test_lost_rank.py": ("dist",),
    "pipeline/test_matrix.py": ("dist", "slow"),
    "pipeline/test_memory.py": ("slow",),
    "pipeline/test_memory.py::test_real_processes_stay_within_the_limit": ("dist",),
    "pipeline/test_meta_start.py::test_each_process_has_its_own_stages": ("dist",),
    "pipeline/test_tensor_parallel.py": ("dist",),
    "pipeline/test_mesh.py": ("dist", "slow"),
    "pipeline/test_messages.py::test_more_than_62_tensors_in_one_message": ("dist",),
    "pipeline/test_models_dist.py": ("dist", "slow"),
    "pipeline/test_no_barrier.py": ("dist",),
    "pipeline/test_numbers.py": ("dist",),
    "pipeline/test_numbers.py::test_compiled_stages": ("dist", "slow"),
    "pipeline/test_own_loss.py::test_two_processes": ("dist",),
    "pipeline/test_offload_memory.py": ("slow",),
    "pipeline/test_offload_memory.py::test_real_processes_stay_within_the_limit": ("dist",),
    "pipeline/test_offload_memory.py::test_the_slowest_link_counts": ("dist",),
    "pipeline/test_offload_steps.py::test_two_processes": ("dist",),
    "pipeline/test_random.py::test_on_two_gloo_ranks": ("dist",),
    "pipeline/test_ranks_apart.py::test_a_call_that_one_rank_makes_alone": ("dist",),
    "pipeline/test_ranks_apart.py::test_weights_and_targets_that_differ": ("dist",),
    "pipeline/test_recompute.py::test_sixteen_blocks_under_less_and_less_memory": ("dist", "slow"),
    "pipeline/test_selective.py::test_two_processes_hold_as_much_as_is_told": ("dist",),
    "pipeline/test_odd_dist.py": ("dist", "slow"),
    "pipeline/test_nonfinite.py::test_three_processes_agree": ("dist",),
    "pipeline/test_scaler_sharded.py": ("dist",),
    "pipeline/test_sharded.py": ("dist", "slow"),
    "pipeline/test_sent.py::test_a_rank_holds_a_message_less_for_each_microbatch": ("dist",),
    "pipeline/test_soak.py": ("dist", "slow"),
    "pipeline/test_two_machines.py": ("dist", "slow"),
    "pipeline/test_tuner.py::test_a_loss_that_fails_on_one_rank_fails_on_all": ("dist",),
    "pipeline/test_tuner.py::test_a_rank_that_becomes_slow_makes_a_new_plan_on_all_ranks_at_once": ("dist",),
    "pipeline/test_tuner.py::test_a_schedule_that_was_named_stays": ("dist",),
    "pipeline/test_tuner.py::test_steps_with_the_sample_leave_the_model_as_it_was": ("dist",),
    "pipeline/test_tuner.py::test_copies_take_the_plan_of_the_first": ("dist",),
    "pipeline/test_tuner.py::test_ways_to_cut_with_equal_numbers_of_stages_are_tried_one_after_the_other": ("dist",),
    "pipeline/test_tuner.py::test_real_steps_have_the_gradients_of_one_process_in_every_order": ("dist",),
    "schedule/test_schedule_random.py": ("slow",),
    "schedule/test_search.py::test_the_same_call_gives_the_same_schedule": ("slow",),
    "schedule/test_fuse.py::test_fusing_never_lengthens_a_step_and_holds_no_more": ("slow",),
    "split/test_compiled_dtensor.py": ("dist", "slow"),
    "split/test_compiled_gloo.py": ("dist", "slow"),
    "split/test_data_parallel.py": ("dist",),
    "split/test_dtensor.py": ("dist",),
    "split/test_schedules_gloo.py": ("dist",),
    "test_benchmarks.py": ("dist", "slow"),
    "test_cli.py::test_example_trains_under_torchrun": ("dist", "slow"),
    "atlas/test_atlas_measure.py": ("slow",),
    "atlas/test_atlas_truth.py::test_our_own_package": ("slow",),
    "graph/test_capture.py::test_a_deep_graph_is_freed_without_a_crash": ("slow",),
    "pipeline/test_checkpoint_local.py::test_the_matrix": ("slow",),
    "pipeline/test_checkpoint_local.py::test_the_one_before_is_used": ("slow",),
    "atlas/test_atlas_pages.py::test_no_page_is_too_large": ("slow",),
    "graph/test_explain.py::test_why_alive": ("slow",),
    "pipeline/test_checkpoint_local.py::test_a_resumed_run_is_bit_identical": ("slow",),
    "pipeline/test_fit.py::test_kinds_of_memory_add_up": ("slow",),
    "pipeline/test_local.py::test_fifty_steps_of_adamw_with_clipping": ("slow",),
    "pipeline/test_random.py::test_in_one_process": ("slow",),
    "pipeline/test_stream_watch.py::test_the_watch_over_the_ranks_gives_up_after_a_while": ("slow",),
    "saved/test_saved_disk.py::test_a_file_too_large_for_the_process_is_an_error_too": ("slow",),
    "saved/test_saved_disk.py::test_a_killed_process_leaves_what_the_next_start_removes": ("slow",),
    "saved/test_saved_dropin.py::test_in_compiled_code": ("slow",),
    "state/test_state_docs.py::test_every_row_is_in_the_table_and_ours_works": ("slow",),
    "state/test_state_modules.py": ("slow",),
    "state/test_state_pipeline.py": ("slow",),
    "test_surface.py::test_importing_stays_light": ("slow",),
    "pipeline/test_random_forwards.py": ("slow",),
    "schedule/test_fuse.py::test_search_is_no_worse_than_any_name_fused_and_no_better_than_the_bound": ("slow",),
    "schedule/test_search.py::test_any_numbers_give_a_whole_schedule_within_the_limit_and_not_below_the_bound": (
        "slow",
    ),
    "schedule/test_search.py::test_search_is_never_worse_than_the_paper": ("slow",),
    "schedule/test_search.py::test_unequal_stages_are_no_worse_than_any_named_schedule_in_the_same_places": ("slow",),
    "schedule/test_search_exact.py::test_the_best_choice_of_what_to_recompute": ("slow",),
    "schedule/test_search_exact.py::test_the_best_choice_of_how_many_blocks_to_recompute": ("slow",),
    "schedule/test_search_exact.py::test_search_finds_the_optimum_and_the_bound_is_not_above_it": ("slow",),
    "split/test_compiled.py::test_dynamic_shapes": ("slow",),
    "split/test_compiled_models.py": ("slow",),
    "split/test_learned_random.py": ("slow",),
    "split/test_property.py::test_random_networks": ("slow",),
    "state/test_state_docs.py::test_the_example": ("slow",),
    "state/test_state_memory.py::test_a_graph_that_is_dropped_takes_its_hooks_and_values_with_it": ("slow",),
    "state/test_state_memory.py::test_no_cuda_graph_is_made_of_a_graph_with_hooks": ("slow",),
    "test_cli.py::test_help_imports_nothing_heavy": ("slow",),
    "test_cli.py::test_split_compares_with_plain_autograd_and_torch": ("slow",),
    "test_wheel.py": ("dist", "slow"),
    "split/test_random_graphs.py": ("slow",),
    "upstream/test_judge.py::test_a_new_difference_fails": ("slow",),
    "upstream/test_judge.py::test_an_explained_one_does_not": ("slow",),
    "upstream/test_sweep.py": ("slow",),
    "test_readme.py::test_code_runs_as_pasted": ("dist", "slow"),
    "zoo/test_zoo_example.py": ("dist", "slow"),
    "zoo/test_zoo_gloo.py": ("dist", "slow"),
    "zoo/test_zoo_pipeline.py": ("slow",),
    "zoo/test_zoo_trainers.py": ("slow",),
}


SEARCHING = (  # seconds of plain Python, which counting lines would double: coverage leaves them out, and dist and slow
    "schedule/test_fuse.py",
    "schedule/test_schedule_random.py",
    "schedule/test_search.py",
    "schedule/test_search_exact.py",
    "schedule/test_search_recompute.py",
)


def marks(path: str, name: str) -> set[str]:
    """The marks of a test, given its file below ``tests/`` and its name with parameters.

    Example:
        >>> sorted(marks("cli/test_demo.py", "test_trains_across_processes"))
        ['dist', 'slow']
    """
    keys = [
        path,
        f"{path}::{name.partition('[')[0]}",
        *(key for key in COSTS if key.startswith("[") and key[1:] in name),
    ]
    return {mark for key in keys for mark in COSTS.get(key, ())}
