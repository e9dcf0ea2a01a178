"""One call of a layer: judged, its operands by name, and again inside Explicit mesh axes."""

import dataclasses
from typing import Any

from kda_contracts import ContractError, check
from kda_jax import call, projections
from kda_jax.weights import KDACache, KDAParams, letters

WEIGHTS = tuple(field.name for field in dataclasses.fields(KDAParams))


def judge(contract, params, config, operands, **options):
    """The sizes of a step, or a ContractError. A gate's two weights are judged together, and the
    convolution's biases.
    """
    local = letters(config, params)
    statics = dict(lower_bound=config.lower_bound, norm_eps=config.norm_eps)
    sizes = check(contract, local, **operands, **statics, **options)
    gates_of = (
        ("f", params.f_down, params.f_up, "R", "HV*K", local["HV"] * local["K"]),
        ("g", params.g_down, params.g_up, "V", "HV*V", local["HV"] * local["V"]),
    )
    for name, down, up, rank, axis, columns in gates_of:
        rows, letter = (config.D, "D") if down is None else (down.shape[1], rank)
        if up.shape[0] != rows:
            beside = "without" if down is None else "beside"
            raise ContractError(
                f"{contract.name}: `{name}_up` must be [{letter}, {axis}] = ({rows}, {columns}) "
                f"{beside} a `{name}_down` (got {up.shape})"
            )
    for name in projections.CONV_BIASES:
        if (getattr(params, name) is None) == config.conv_bias:
            wanted = "an array, as" if config.conv_bias else "None, as"
            raise ContractError(
                f"{contract.name}: `{name}` must be {wanted} config.conv_bias is "
                f"{config.conv_bias} (got {'None' if config.conv_bias else 'an array'})"
            )
    return sizes


def arrays_of(params):
    """The weights by name, without those that are None."""
    arrays = {name: getattr(params, name) for name in WEIGHTS}
    return {name: x for name, x in arrays.items() if x is not None}


def pools_of(cache):
    return dict(conv=cache.conv, state=cache.state)


def in_auto_axes(step, contract, operands, **options) -> Any:
    """A step whose operands are cut by Explicit mesh axes: the results of its contract."""

    def again(**arrays):
        weights = {name: arrays.pop(name) for name in WEIGHTS if name in arrays}
        if contract.pool:
            arrays["cache"] = KDACache(arrays.pop("conv"), arrays.pop("state"))
        return step(KDAParams(**weights), **arrays, **options)

    specs = call.result_cuts(contract, operands)
    return call.in_auto_axes(again, contract.name, operands, specs)
