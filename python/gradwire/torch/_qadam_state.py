# SPDX-License-Identifier: Apache-2.0
"""The state of a QAdam: torch's own part, with moments and exact weights by number of the parameter, and beside it
"gradwire", which is like the state of a hook (_state.py): residuals by rank and parameter name, and what codecs have
learned. The state of a rank is its own in everything but the exact weights.
"""

import zlib
from typing import TYPE_CHECKING, Any, Iterable, Mapping, Sequence

import torch

from .. import _core
from .._errors import UsageError
from . import _state
from ._agree import Handshake
from ._state_checks import FORMAT, check_part, merged

if TYPE_CHECKING:
    from ._qadam import QAdam


def save(optimizer: "QAdam") -> dict[str, Any]:
    exchange = optimizer._exchange
    feedback = exchange.model.state()
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[optimizer._options["residual"]]
    return {
        "format": FORMAT, "step": optimizer._taken, "world": exchange.world, "codec": optimizer.codec,
        "exempt": [], "learned": _state.byte_tensors(feedback.extra()),
        "ranks": {str(exchange.rank): _state.ranks_part(feedback, dtype)},
    }  # fmt: skip


def prepare(
    optimizer: "QAdam", states: Sequence[Mapping[str, Any]]
) -> tuple[tuple[int, dict[str, Any], "_core.ModelCoder"], Handshake]:
    """What this rank continues from, checked: the step, torch's part of the state, and a coder with the residuals. And
    what must be the same on all ranks."""
    if not states or not all(isinstance(one, Mapping) and "gradwire" in one for one in states):
        raise UsageError("the state is not one of a QAdam: it has no 'gradwire'", field="state")
    whole = merged([one["gradwire"] for one in states])
    rank, world, dtype = optimizer._exchange.rank, optimizer._exchange.world, optimizer._options["residual"]
    if whole["world"] == world:
        if str(rank) not in whole["ranks"]:
            raise UsageError(
                f"the state belongs to rank {', '.join(whole['ranks'])}; this is rank {rank}: save "
                "optimizer.state_dict() on every rank",
                field="ranks",
            )
        part = whole["ranks"][str(rank)]
        mine = next(one for one in states if str(rank) in one["gradwire"]["ranks"])
        loaded = {"state": mine["state"], "param_groups": mine["param_groups"]}
    else:
        part = _state.redistributed(whole, rank, world, dtype, "a list of all states")
        loaded = {"state": _mean_of_states(states), "param_groups": states[0]["param_groups"]}
    _check(optimizer, loaded)
    model = optimizer._exchange.fresh_model()
    current = model.state()
    check_part(part, current)
    feedback = _state.feedback_of(part, dtype)
    for name, values in whole["learned"].items():
        if name in current.extra():
            feedback.set_extra(name, _state.bytes_of(values))
    model.restore(feedback)
    learned = {name: zlib.crc32(_state.bytes_of(values)) for name, values in sorted(whole["learned"].items())}
    exact = check_sum(one["exact"] for _, one in sorted(loaded["state"].items()) if "exact" in one)
    terms = {"step": whole["step"], "world": whole["world"], "learned": learned, "the exact weights": exact}
    return (whole["step"], loaded, model), [(name, str(value)) for name, value in terms.items()]


def _check(optimizer: "QAdam", loaded: Mapping[str, Any]) -> None:
    """Refuses a state that does not fit the parameters."""
    sizes = [len(group["params"]) for group in loaded["param_groups"]]
    if sizes != [len(group["params"]) for group in optimizer.param_groups]:
        raise UsageError(f"the state has groups of {sizes} parameters, and the optimizer has others", field="params")
    order = {id(p): n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    wanted = {"exp_avg", "exp_avg_sq"} | ({"shared"} if optimizer._pool is not None else set())
    for i, (name, p) in enumerate(zip(optimizer._names, optimizer._parameters)):
        values = loaded["state"].get(order[id(p)], {})
        needs = wanted | ({"exact"} if i in optimizer._rounded else set())
        if values and set(values) != needs:
            raise UsageError(
                f"the state has {sorted(values)} of parameter '{name}', and this optimizer keeps {sorted(needs)}: "
                "moments, weights and down must be those that it was saved with",
                field=name,
            )
        for kind, value in values.items():
            if value.shape != p.shape or not bool(torch.isfinite(value).all()):
                raise UsageError(
                    f"{kind} of parameter '{name}' in the state is not finite, or has not the shape {tuple(p.shape)}",
                    field=name,
                )


def _mean_of_states(states: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, torch.Tensor]]:
    """Moments averaged over the ranks that have saved them. Exact weights are the same on all of them."""
    mean: dict[int, dict[str, torch.Tensor]] = {}
    for number, values in states[0]["state"].items():
        mean[number] = {
            name: value if name == "exact"
            else torch.stack([one["state"][number][name].double().cpu() for one in states]).mean(0).float()
            for name, value in values.items()
        }  # fmt: skip
    return mean


def check_sum(tensors: Iterable[torch.Tensor]) -> int:
    found = 0
    for one in tensors:
        found = zlib.crc32(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), found)
    return found
