"""What becomes of each of PyTorch's tests of DistributedDataParallel with miniddp's class."""

from dataclasses import dataclass
from typing import Literal

from . import scenarios as s
from .suite import Case

Outcome = Literal["passes", "refused", "not applicable"]


@dataclass(frozen=True)
class Verdict:
    """`scenario` is None where torch's own test runs as it is.

    Where it is refused, miniddp's error contains `sentence`.
    """

    outcome: Outcome
    reason: str = ""
    sentence: str = ""
    scenario: Case | None = None


Verdicts = dict[str, Verdict]


def passes(*names: str, scenario: Case | None = None) -> Verdicts:
    return dict.fromkeys(names, Verdict("passes", scenario=scenario))


def refused(reason: str, sentence: str, *names: str, scenario: Case | None = None) -> Verdicts:
    return dict.fromkeys(names, Verdict("refused", reason, sentence, scenario))


def not_applicable(reason: str, *names: str) -> Verdicts:
    return dict.fromkeys(names, Verdict("not applicable", reason))


STATIC = "`static_graph=True`"
GPU = "needs GPUs: what it looks at does not exist on the CPU"
LOG = "reads what torch's class writes into its own log"
PRIVATE = "calls private methods of torch's class or of its reducer"
IGNORED = "parameters that DDP ignores, a private interface of torch"
JOIN = "`join()` for uneven numbers of batches, which miniddp does not have"

DISTRIBUTED_TEST = {
    **passes(
        "test_DistributedDataParallelCPU",
        "test_DistributedDataParallelCPU_grad_is_view",
        "test_DistributedDataParallel_requires_grad",
        "test_DistributedDataParallel_with_amp_and_grad_is_view",
        "test_accumulate_gradients_no_sync",
        "test_accumulate_gradients_no_sync_allreduce_hook",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_accumulate_gradients_no_sync_grad_is_view",
        "test_ddp_broadcast_buffer",
        "test_ddp_broadcast_buffers_deprecation_warning",
        "test_ddp_forward_backward_hook",
        "test_ddp_hook_parity_allreduce",
        "test_ddp_hook_parity_allreduce_process_group",
        "test_ddp_hook_parity_post_localSGD",
        "test_ddp_hook_parity_powerSGD",
        "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
        "test_ddp_model_diff_num_params_across_ranks",
        "test_ddp_model_diff_shape_across_ranks",
        "test_ddp_namedtuple",
        "test_ddp_new_tensor_in_fwd",
        "test_ddp_python_error_logged",
        "test_ddp_unused_params_rebuild_buckets_exception",
        "test_ddp_zero_output_features",
        "test_grads_same_across_ranks_with_no_sync",
        "test_output_unused_in_loss_dict_module",
        "test_output_unused_in_loss_tuple_module",
        "test_post_localSGD_optimizer_parity",
        "test_post_localSGD_optimizer_parity_grad_is_view",
        "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
        "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
        "test_post_localSGD_optimizer_step_reload",
        "test_stateless_api_with_ddp",
        "test_undefined_grad_parity_unused_parameters",
    ),
    **passes("test_ddp_control_flow_different_across_ranks", scenario=s.control_flow_that_differs),
    **passes("test_ddp_control_flow_same_across_ranks", scenario=s.same_control_flow),
    **passes("test_ddp_device", scenario=s.inputs_keep_their_types),
    **passes("test_ddp_inference", scenario=s.inference_on_one_rank),
    **passes(
        "test_ddp_multiple_nested_unused_params_error", scenario=s.unused_parameters_are_reported
    ),
    **passes(
        "test_ddp_unused_params_rebuild_buckets_exception",
        scenario=s.unused_parameters_are_reported,
    ),
    **passes(
        "test_ddp_profiling_autograd_profiler",
        "test_ddp_profiling_torch_profiler",
        scenario=s.one_all_reduce_per_step,
    ),
    **passes("test_ddp_remove_autograd_hooks", scenario=s.wrapped_again_after_an_error),
    **passes("test_ddp_returns_tensor_with_no_grad", scenario=s.output_without_gradient),
    **passes("test_ddp_shared_grad_acc_unused_params", scenario=s.unused_parameter_under_two_names),
    **passes("test_detect_ddp_is_actually_static", scenario=s.graph_that_changes),
    **refused(
        STATIC,
        "static_graph",
        "test_ddp_compile_static_graph",
        "test_ddp_new_tensor_in_fwd_static_graph",
        "test_ddp_static_graph_nested_types",
        "test_invalid_static_graph",
        "test_static_graph_multi_forward",
    ),
    **refused("`create_graph=True` in backward", "create_graph", "test_ddp_create_graph"),
    **refused("`bucket_cap_mb_list`", "bucket_cap_mb_list", "test_ddp_bucket_cap_mb_list"),
    **refused("`device_mesh`", "device_mesh", "test_ddp_device_mesh_initialization"),
    **refused(
        "`mixed_precision`",
        "mixed_precision",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
    ),
    **refused(
        "`skip_all_reduce_unused_params=True`",
        "skip_all_reduce_unused_params",
        "test_skip_all_reduce_unused_parameters",
    ),
    **not_applicable(
        GPU,
        "test_DistributedDataParallel_non_default_stream",
        "test_ddp_profiling_execution_trace",
    ),
    **not_applicable(
        "SyncBatchNorm, which torch has on GPUs only",
        "test_DistributedDataParallel_SyncBatchNorm",
        "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
        "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
        "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
        "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
        "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
        "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
        "test_DistributedDataParallel_SyncBatchNorm_half",
        "test_ddp_sync_bn_training_vs_eval",
        "test_sync_bn_logged",
    ),
    **not_applicable("torch skips it itself, on Linux", "test_DistributedDataParallel"),
    **not_applicable(
        LOG,
        "test_ddp_comm_hook_logging",
        "test_ddp_logging_data_cpu",
        "test_ddp_logging_data_gpu",
        "test_different_graph_across_ranks",
        "test_dump_DDP_relevant_env_vars",
    ),
    **not_applicable(
        PRIVATE,
        "test_ddp_broadcast_buffer_via_hook",
        "test_ddp_buffer_hook_allreduce",
        "test_ddp_buffer_hook_allreduce_return_future",
        "test_ddp_build_debug_param_to_name_mapping",
        "test_ddp_build_debug_param_to_name_mapping_requires_grad",
        "test_ddp_has_finalized",
        "test_ddp_sink_noclone",
        "test_ddp_sync_module_states",
        "test_static_graph_api_cpu",
    ),
    **not_applicable(
        IGNORED,
        "test_ddp_apply_optim_in_backward_ignored_params",
        "test_ddp_ignore_params_arg",
        "test_ddp_multiple_nested_unused_params_err_ignore_params",
        "test_ddp_native_mixed_precision_ignored_params",
        "test_get_data_parallel_params",
    ),
    **not_applicable(
        "a private optimizer step inside backward",
        "test_ddp_apply_optim_in_backward",
        "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
    ),
    **not_applicable(
        JOIN,
        "test_ddp_grad_div_uneven_inputs",
        "test_ddp_join_model_equivalence",
        "test_ddp_join_respects_forward_sync_buffers_false",
        "test_ddp_uneven_input_exception",
        "test_ddp_uneven_input_join_disable",
        "test_ddp_uneven_inputs",
        "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    ),
    **not_applicable(
        "tests functions of torch, with a wrapper beside them",
        "test_compute_bucket_assignment_by_size_sparse_error_with_logger",
        "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
        "test_verify_model_across_rank_with_logger",
        "test_verify_model_across_rank_without_logger",
    ),
    **not_applicable(
        "fails with torch's own class: `torch.load` refuses the file",
        "test_ddp_hook_pickling_powerSGD",
    ),
}

TEST_C10D_COMMON = {
    **passes(
        "test_ddp_buffer_sync_multi_forward_with_batchnorm", scenario=s.two_forwards_with_batch_norm
    ),
    **passes(
        "test_ddp_checkpointing_dynamic_module",
        "test_ddp_checkpointing_dynamic_weight_sharing",
        scenario=s.checkpointed_layers_that_change,
    ),
    **passes("test_ddp_checkpointing_once", scenario=s.checkpointed_once),
    **passes("test_ddp_checkpointing_twice", scenario=s.checkpointed_twice),
    **refused(
        STATIC,
        "static_graph",
        "test_ddp_checkpointing_twice_static_graph",
        "test_ddp_checkpointing_twice_weight_sharing",
        scenario=s.checkpointed_twice_in_a_static_graph,
    ),
    **passes(
        "test_ddp_checkpointing_unused_params", scenario=s.checkpointed_with_unused_parameters
    ),
    **passes(
        "test_ddp_checkpointing_weight_sharing", scenario=s.wrapper_checkpointed_with_shared_weights
    ),
    **passes("test_dataclass_output", scenario=s.outputs_in_a_dataclass),
    **passes("test_dataclass_output_unused_param", scenario=s.dataclass_without_one_output),
    **passes(
        "test_multi_limit_multi_dtype",
        "test_multi_limit_single_dtype",
        "test_single_limit_multi_dtype",
        "test_single_limit_single_dtype",
        scenario=s.plans_of_buckets,
    ),
    **passes("test_invalid_powerSGD_state", scenario=s.powersgd_that_starts_too_early),
    **not_applicable(
        "SyncBatchNorm, which torch has on GPUs only",
        "test_sync_batch_norm_empty_input",
        "test_sync_batch_norm_only_empty_input",
    ),
}

TEST_C10D_GLOO = {
    **passes("test_ddp_comm_hook_future_passing_cpu", scenario=s.future_of_a_hook),
    **passes("test_ddp_comm_hook_register_just_once", scenario=s.second_hook),
    **passes("test_ddp_invalid_comm_hook_init", scenario=s.hook_that_is_none),
    **passes("test_ddp_invalid_comm_hook_return_type", scenario=s.hook_that_returns_no_future),
    **passes(
        "test_find_unused_parameters_when_unused_parameters_empty",
        scenario=s.nothing_unused_on_rank_0,
    ),
    **passes("test_forward_backward", scenario=s.mixed_dtypes),
    **passes("test_forward_backward_optimizer", scenario=s.unused_in_the_first_step),
    **passes(
        "test_forward_backward_unused_parameters", scenario=s.mixed_dtypes_with_an_unused_parameter
    ),
    **passes(
        "test_global_local_unused_params_grad",
        "test_global_local_unused_params_grad_with_grad_is_view",
        scenario=s.used_on_some_ranks,
    ),
    **refused(
        STATIC,
        "static_graph",
        "test_global_local_unused_params_grad_with_static_graph",
        scenario=s.used_on_some_ranks_of_a_static_graph,
    ),
    **passes("test_gloo_backend_cpu_module", scenario=s.cpu_module),
    **passes("test_gloo_backend_cpu_module_grad_is_view", scenario=s.cpu_module_with_views),
    **passes("test_ignored_output", scenario=s.ignored_output),
    **passes(
        "test_ignored_output_with_unused_parameters",
        scenario=s.ignored_output_with_unused_parameters,
    ),
    **passes("test_save_load_checkpoint", scenario=s.saved_and_loaded),
    **refused(
        "sparse gradients",
        "is sparse",
        "test_sparse_gradients",
        "test_sparse_gradients_grad_is_view",
        scenario=s.sparse_gradients,
    ),
    **refused(
        "sparse gradients",
        "is sparse",
        "test_ddp_comm_hook_sparse_gradients",
        scenario=s.sparse_gradients_with_a_hook,
    ),
    **not_applicable(
        GPU,
        "test_ddp_comm_hook_future_passing_gpu_gloo",
        "test_gloo_backend_1gpu_module_device_ids_integer_list",
        "test_gloo_backend_1gpu_module_device_ids_torch_device_list",
        "test_gloo_backend_2gpu_module",
        "test_gloo_backend_4gpu_module",
    ),
    **not_applicable(IGNORED, "test_ignored_sharded_tensor"),
    **not_applicable(
        "builds torch's reducer by itself",
        "test_multi_dtype_multi_bucket",
        "test_multi_dtype_single_bucket",
        "test_single_dtype_single_bucket",
    ),
}

VERDICTS = {
    "distributed_test.py": DISTRIBUTED_TEST,
    "test_c10d_common.py": TEST_C10D_COMMON,
    "test_c10d_gloo.py": TEST_C10D_GLOO,
}
