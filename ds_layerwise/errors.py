"""The errors about a user's input or script, and the suggestions in them. They have one base class,
so that callers can catch all of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence


class LayerWiseError(Exception):
    """The base of every error that this package raises on purpose."""


class ConfigError(LayerWiseError, ValueError):
    """A key or a value of the configuration is not valid or not supported."""


class RoutingError(LayerWiseError, ValueError):
    """No optimizer can train a parameter, or two rules disagree about it."""


class LayoutError(LayerWiseError, ValueError):
    """A layout breaks an invariant, or differs between ranks."""


class StepError(LayerWiseError, RuntimeError):
    """The engine or the user made a call that is not allowed at the current point of a step."""


#: The errors that code of others raises for input that it does not support.
FOREIGN_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def few(names: Sequence[str]) -> str:
    """Return the first five of ``names``, and the number of the others, for a message."""
    more = f" and {len(names) - 5} more" * (len(names) > 5)
    return f"{', '.join(names[:5])}{more}"


#: The settings of Megatron-LM, Keller Jordan's Muon, Moonlight, dion, Emerging-Optimizers, torch
#: and Hugging Face that have another name here, with that name.
FOREIGN = dict(
    pair.split("=")
    for pair in """
    adam_beta1=optimizer.params.betas adam_beta2=optimizer.params.betas
    adam_betas=optimizer.params.betas adam_eps=optimizer.params.eps
    adam_epsilon=optimizer.params.eps adam_wd=optimizer.params.scalar_weight_decay
    adam_weight_decay=optimizer.params.scalar_weight_decay adamw_betas=optimizer.params.betas
    adamw_eps=optimizer.params.eps adamw_lr=optimizer.params.adam_lr
    adamw_wd=optimizer.params.scalar_weight_decay
    adaptive_muon_beta2=optimizer.params.moment2_beta
    adaptive_muon_eps=optimizer.params.moment2_eps
    adaptive_muon_moment2_method=optimizer.params.matrix_optimizer
    adjust_lr=optimizer.params.scale_mode adjust_lr_fn=optimizer.params.scale_mode
    adamw_beta1=optimizer.params.betas adamw_beta2=optimizer.params.betas
    aux_lr=optimizer.params.adam_lr lr_adam=optimizer.params.adam_lr
    lr_muon=optimizer.params.muon_lr match_rms_adamw=optimizer.params.scale_mode
    muon_beta=optimizer.params.momentum muon_dtype=optimizer.params.ns_dtype
    muon_ns_steps=optimizer.params.ns_steps muon_wd=optimizer.params.weight_decay
    newton_schulz_steps=optimizer.params.ns_steps ns_iterations=optimizer.params.ns_steps
    scalar_betas=optimizer.params.betas scalar_eps=optimizer.params.eps
    scalar_lr=optimizer.params.adam_lr backend_steps=optimizer.params.ns_steps
    barrier_with_L1_time=wall_clock_breakdown
    beta1=optimizer.params.betas beta2=optimizer.params.betas
    cautious_wd=optimizer.params.cautious_weight_decay clip_grad=gradient_clipping
    clip_grad_norm=gradient_clipping coefficient_type=optimizer.params.ns_coefficients
    config_logger_dir=layerwise.dump_param_map
    decoupled_weight_decay=optimizer.params.weight_decay_method epsilon=optimizer.params.eps
    fp32_matmul_prec=optimizer.params.ns_dtype grad_clip=gradient_clipping
    initial_loss_scale=fp16.initial_scale_power learning_rate=optimizer.params.lr
    lion_beta1=optimizer.params.betas lion_beta2=optimizer.params.betas
    main_grads_dtype=data_types.grad_accum_dtype main_params_dtype=layerwise.master_dtype
    min_lr=layerwise.overrides[].min_lr momentum_beta=optimizer.params.momentum
    mu=optimizer.params.momentum muon_beta2=optimizer.params.moment2_beta
    muon_coefficient_type=optimizer.params.ns_coefficients muon_eps=optimizer.params.eps
    muon_extra_scale_factor=optimizer.params.extra_scale_factor
    muon_fp32_matmul_prec=optimizer.params.ns_dtype muon_momentum=optimizer.params.momentum
    muon_nesterov=optimizer.params.nesterov muon_num_ns_steps=optimizer.params.ns_steps
    muon_scalar_optimizer=optimizer.params.scalar_optimizer
    muon_scale_mode=optimizer.params.scale_mode muon_split_qkv=layerwise.auto_split
    mup_base_hidden_size=layerwise.mup num_ns_steps=optimizer.params.ns_steps
    optimizer_cpu_offload=zero_optimization.offload_optimizer
    optimizer_cuda_graph=layerwise.cuda_graph
    optimizer_offload_fraction=zero_optimization.offload_optimizer params_dtype=bf16.enabled
    pin_cpu_grads=zero_optimization.offload_optimizer
    pin_cpu_params=zero_optimization.offload_optimizer qk_clip_alpha=layerwise.qk_clip
    qk_clip_threshold=layerwise.qk_clip sgd_momentum=optimizer.params.momentum
    soap_precondition_frequency=optimizer.params.precondition_frequency
    soap_shampoo_beta=optimizer.params.shampoo_beta
    soap_use_kl_shampoo=optimizer.params.matrix_optimizer split_qkv=layerwise.auto_split
    store_param_remainders=layerwise.master_dtype use_distributed_optimizer=zero_optimization.stage
    use_gram_newton_schulz=optimizer.params.ns_method
    use_layer_wise_distributed_optimizer=optimizer.type use_mup=layerwise.mup
    wd=optimizer.params.weight_decay
""".split()
)


def nearest(key: object, known: Collection[str], *, cutoff: float = 0.6) -> str | None:
    """Return the one of ``known`` that ``key`` stands for, as others call it or misspelt; None if
    there is none.
    """
    called = FOREIGN.get(str(key), "").rpartition(".")[2]
    if called in known:
        return called
    return next(iter(difflib.get_close_matches(str(key), known, n=1, cutoff=cutoff)), None)


def unknown_key(where: str, key: object, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown key, with the nearest known key as a suggestion."""
    known = sorted(known)
    close = nearest(key, known)
    hint = f"did you mean '{close}'?" if close else f"known: {', '.join(known)}"
    return ConfigError(f"{where}.{key} is not an option; {hint}")
