"""Ops of the CPU build that were measured, forward and backward, and allocate nothing inside (at most 64 bytes)."""

from __future__ import annotations

ZERO: frozenset[str] = frozenset(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
    _adaptive_avg_pool3d_backward adaptive_max_pool2d adaptive_max_pool2d_backward
    adaptive_max_pool3d adaptive_max_pool3d_backward amax amin aminmax
    _amp_foreach_non_finite_check_and_unscale _amp_update_scale arange argmax argmin as_strided
    avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward bernoulli
    binary_cross_entropy_backward bincount block_diag bucketize _cdist_backward _chunk_cat col2im
    constant_pad_nd count_nonzero _ctc_loss cummax cummin cumprod diag_embed diagonal_backward
    diagonal_copy diagonal_scatter dot elu_backward embedding embedding_dense_backward
    embedding_renorm empty empty_like empty_strided exponential eye _fft_c2c _fft_r2c fill flip
    floor_divide _foreach_copy fractional_max_pool2d fractional_max_pool2d_backward full full_like
    _fused_adagrad _fused_adam _fused_adamw _fused_sgd glu glu_backward grid_sampler_2d
    grid_sampler_2d_backward hann_window hardshrink_backward hardsigmoid_backward hardswish
    hardswish_backward hardtanh_backward huber_loss_backward index_copy index_fill index_select
    leaky_relu_backward _linalg_check_errors linalg_cholesky_ex linalg_cross linalg_lu_solve
    _linalg_solve_ex linalg_solve_triangular linspace _local_scalar_dense log_sigmoid_backward
    log_sigmoid_forward _log_softmax_backward_data logcumsumexp masked_fill masked_scatter max
    max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
    max_pool3d_with_indices_backward max_unpool2d min mish_backward mode mse_loss_backward
    multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_backward
    multilabel_margin_loss_forward nansum native_layer_norm new_empty new_empty_strided new_full
    new_ones new_zeros nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward
    nonzero norm ones ones_like _pdist_backward _pdist_forward pixel_shuffle pixel_unshuffle poisson
    polar _prelu_kernel _prelu_kernel_backward put rand rand_like randint randn randn_like randperm
    reflection_pad1d reflection_pad1d_backward reflection_pad3d reflection_pad3d_backward repeat
    replication_pad3d replication_pad3d_backward resize rot90 rrelu_with_noise
    rrelu_with_noise_backward scalar_tensor searchsorted select_backward set slice_backward
    smooth_l1_loss_backward _softmax_backward_data softplus_backward softshrink_backward
    _sparse_coo_tensor_with_dims_and_tensors split_with_sizes_copy squeeze _standard_gamma
    _standard_gamma_grad std t take topk trace transpose tril triu triu_indices uniform
    unique_consecutive _unsafe_index _unsafe_index_put unsafe_split _unsafe_view unsqueeze
    upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_linear1d_backward
    upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
    _upsample_nearest_exact3d_backward upsample_trilinear3d_backward var var_mean vdot
    _weight_norm_interface _weight_norm_interface_backward zero zeros zeros_like
    """.split()  # noqa: SIM905
)
