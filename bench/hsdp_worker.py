# SPDX-License-Identifier: Apache-2.0
"""One rank of bench/hsdp.py: takes orders on standard input, as bench/ddp_worker.py does, whose loop it shares.

    {"make": [variant, ...], "inside": ...}           one FSDP2 model per variant on the same mesh, and warm steps
    {"block": variant, "steps": n, "compute": bool}   n steps after a barrier: seconds, bytes that left the box
    {"memory": codec}                                 bytes of residuals, sharded and not

The mesh is (boxes, 2): ranks 2i and 2i + 1 are in box i. The model has 8 units of a 1024 x 1024 matrix. Its backward
pass hands out a gradient for each, and with "compute" it waits for its share of --compute-ms, as a host does while an
accelerator computes. With "inside": "instant" collectives within a box take no time; with "gloo" they are Gloo's. A
variant is {"name": ..., "kind": "none" | "fp32" | "bf16" | "gradwire", ...}; "none" reduces within boxes only.
"""

import torch
import torch.distributed.fsdp as fsdp
from ddp_worker import Rank, main
from torch.distributed.device_mesh import init_device_mesh

UNITS, SIDE, SHARDS = 8, 1024, 2


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(context, before, weight, unit):
        context.unit = unit
        unit.model.compute.portion(1 / 3 / UNITS)
        return before.clone()

    @staticmethod
    def backward(context, gradient):
        unit = context.unit
        unit.model.compute.portion(2 / 3 / UNITS)
        return gradient, unit.noise.detach(), None  # autograd takes it over as it is


class Unit(torch.nn.Module):
    def __init__(self, model, noise):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros_like(noise))
        object.__setattr__(self, "model", model)  # not a submodule
        self.noise = noise

    def forward(self, x):
        return Layer.apply(x, self.weight, self)


class Model(torch.nn.Module):
    def __init__(self, noise, compute):
        super().__init__()
        self.compute = compute
        self.units = torch.nn.ModuleList(Unit(self, one) for one in noise)

    def forward(self, x):
        for unit in self.units:
            x = unit(x)
        return x


class Instant:
    """Stands in for a collective within a box that takes no time, as on NVLink: two cores that move all of these bytes
    through sockets would hide what the link between boxes costs. The weights of this model are not used, and of the
    gradients every rank takes its own."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(tuple(size), dtype=dtype, device=device)


class InstantReduceScatter(Instant):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


class InstantAllGather(Instant):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return None


class HsdpRank(Rank):
    def __init__(self, options):
        super().__init__(options)
        self.mesh = init_device_mesh("cpu", (options.world // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
        common, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(100 + options.rank)
        shape = (SIDE, SIDE)
        # Half of each gradient is common to all ranks, half is the rank's own.
        self.noise = [
            (torch.randn(shape, generator=common) + torch.randn(shape, generator=own)) * 0.01 for _ in range(UNITS)
        ]

    def build(self, **keywords):
        model = Model(self.noise, self.compute)
        # Weights are gathered once a step.
        keywords = {"mesh": self.mesh, "reshard_after_forward": False} | keywords
        for unit in model.units:
            fsdp.fully_shard(unit, **keywords)
            if self.inside == "instant":
                unit.set_custom_reduce_scatter(InstantReduceScatter())
                unit.set_custom_all_gather(InstantAllGather())
        return fsdp.fully_shard(model, **keywords)

    def make(self, order):
        self.inside = order["inside"]
        for variant in order["make"]:
            bf16 = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
            model = self.build(**({"mp_policy": bf16} if variant["kind"] == "bf16" else {}))
            hook = None
            if variant["kind"] == "gradwire":
                import gradwire.torch

                hook = gradwire.torch.compress(model, variant["codec"], **variant["options"])
            model.set_requires_all_reduce(variant["kind"] != "none")
            self.variants[variant["name"]] = variant, model, hook
            for _ in range(3):
                self.step(variant["name"])
        return {"parameters": UNITS * SIDE * SIDE}

    def step(self, name):
        variant, model, _ = self.variants[name]
        model.zero_grad(set_to_none=True)
        model(torch.zeros((), requires_grad=True)).backward()
        if variant["kind"] == "none":  # what was not reduced is not accumulated
            for unit in model.units:
                for group in unit._get_fsdp_state()._fsdp_param_groups:
                    group._partial_reduce_output = None

    def memory(self, order):
        import gradwire.torch
        from torch.distributed._composable.replicate_with_fsdp import replicate

        sharded = gradwire.torch.compress(self.build(), order["memory"], feedback=True).stats()["residual_bytes"]
        model = Model(self.noise, self.compute)
        for unit in model.units:
            replicate(unit, mesh=self.mesh["replicate"])
        whole = gradwire.torch.compress(replicate(model, mesh=self.mesh["replicate"]), order["memory"], feedback=True)
        return {"sharded": sharded, "whole": whole.stats()["residual_bytes"]}


if __name__ == "__main__":
    main(HsdpRank)
