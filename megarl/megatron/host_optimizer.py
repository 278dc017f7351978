"""AdamW on the host by Megatron's HybridDeviceOptimizer, in a subclass that allocates, fills and finds its states.

`step()`, its streams and its copies are Megatron's: gradients are copied to the host, parameter by parameter. The host
updates a parameter when its gradient has arrived, and meanwhile the weights of the one before are copied back.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from megarl.parallel.host_copy import allocate_pinned


class HostAdamW(HybridDeviceOptimizer):
    """HybridDeviceOptimizer of one distributed optimizer: fp32 masters and moments of a share of it are on the host.

    Differences from Megatron-Core 0.19.2, whose class

    - refuses fp32 models, whose shards are views: torch wants leaves,
    - offloads parameters for which `is_cuda` is true, and raises KeyError for others, such as all on a CPU,
    - would never update a parameter of an fp32 model that stays on the device, nor reload a master of one on the host,
    - initializes states by a step with random gradients, and keeps views of whole loaded tensors as states,
    - allocates pinned memory for each gradient, which torch rounds up to a power of two.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for param in param_group["params"]:
            if not param.is_leaf:
                param.retain_grad()  # else torch refuses it
        super().add_param_group(param_group)

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> tuple[Any, ...]:
        """Split the parameters: the first `offload_fraction` of their elements, in whole parameters, to the host.

        Returns Megatron's five values: groups of host and device, both maps between host and device, and the map from
        each parameter to its fp32 master. Parameters are this rank's shards. An fp32 master on the device is a view.
        """
        threshold = offload_fraction * sum(param.numel() for group in self.param_groups for param in group["params"])
        masters: dict[torch.Tensor, torch.Tensor] = {}
        on_host: dict[torch.Tensor, torch.Tensor] = {}
        groups: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
        offloaded = 0
        for group in self.param_groups:
            host, local = (group | {"params": []} for _ in range(2))
            for param in group["params"]:
                if offloaded < threshold:
                    on_host[param] = masters[param] = torch.empty(param.shape).copy_(param.detach())
                    host["params"].append(masters[param])
                    offloaded += param.numel()
                else:
                    masters[param] = param.detach().float()
                    local["params"].append(masters[param])
            for target, part in zip(groups, (host, local), strict=True):
                if part["params"]:
                    target.append(part)
        return *groups, on_host, {master: param for param, master in on_host.items()}, masters

    def _init_sub_optimizers(self) -> None:
        """Build Megatron's optimizers, and allocate moments of zeros and the host's copies of gradients."""
        super()._init_sub_optimizers()
        for inner in self.sub_optimizers:
            for group in inner.param_groups:
                if not isinstance(inner, torch.optim.AdamW):
                    group["step"] = 0  # Transformer Engine counts steps per group, torch per parameter
                for param in group["params"]:
                    inner.state[param] = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                    inner.state[param] |= {"step": torch.tensor(0.0)} if isinstance(inner, torch.optim.AdamW) else {}
        masters = list(self.cpu_copys_map_gpu_param)
        for master, grad in zip(masters, allocate_pinned([master.shape for master in masters]), strict=True):
            master.grad = self.cpu_copy_map_grad[master] = grad
        self._sync_sub_optimizers_state_to_hdo()

    @torch.no_grad()
    def update_fp32_param_by_new_param(self) -> None:
        """Set all masters to the weights."""
        for param, master in self.param_to_fp32_param.items():
            master.copy_(param)


class _UnshardedHostAdamW(HostAdamW):
    """Parameters of a whole model, from which Megatron's distributed optimizer builds a `HostAdamW` of its shards.

    Megatron's own would allocate pinned and fp32 host copies of the model's whole weights on each rank, to free them.
    """

    def _init_sub_optimizers(self) -> None:
        pass


core_optimizer.HybridDeviceOptimizer = _UnshardedHostAdamW
distrib_optimizer.HybridDeviceOptimizer = HostAdamW
