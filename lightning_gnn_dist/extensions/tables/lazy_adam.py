r"""Adam for models that have tables with sparse gradients beside other parameters.

Of a table, step :math:`t` moves the rows :math:`i` that its gradient has, by the formulas of torch's ``SparseAdam``.
All other rows, and their moments, stay as they are:

.. math::
    m_i \leftarrow \beta_1 m_i + (1 - \beta_1) g_i, \qquad v_i \leftarrow \beta_2 v_i + (1 - \beta_2) g_i^2, \qquad
    \theta_i \leftarrow \theta_i - \gamma \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \frac{m_i}{\sqrt{v_i} + \epsilon}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from lightning_gnn_dist.checks import (
    MAX_NUMBER,
    check_between,
    check_callable,
    check_instance,
    check_positive,
    is_number,
    shown,
)


class LazyAdam(Optimizer):
    """Adam that takes dense and sparse gradients, such as those of ``nn.Embedding(num_nodes, dim, sparse=True)``.

    Parameters with dense gradients step as with ``torch.optim.Adam``, tables with sparse ones as with
    ``torch.optim.SparseAdam``: rows that a step does not touch stay where they are. Both have the state of Adam:
    ``step``, ``exp_avg`` and ``exp_avg_sq``.

    Args:
        params: Parameters, or groups of them with settings of their own, as for any optimizer of torch.
        lr: The learning rate.
        betas: The decay of the running means of gradients, and of their squares.
        eps: What is added to the root of the latter.
        weight_decay: A multiple of the parameter that is added to its gradient. For tables it must be 0, as rows
            without a gradient would have to decay too: give them a group of their own.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check_positive(lr=lr, eps=eps)
        _check_betas(betas)
        check_between(0, MAX_NUMBER, weight_decay=weight_decay)
        betas = float(betas[0]), float(betas[1])
        super().__init__(_checked(params), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; with ``closure``, along the gradients that it computes. Returns what it returns."""
        loss = None
        if closure is not None:
            check_callable("closure", closure, "a function that returns the loss, without arguments")
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            dense = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.begin_state(parameter)
                if parameter.grad.is_sparse:
                    self._step_rows(parameter, group)
                else:
                    dense.append(parameter)
            if dense:
                self._step_dense(dense, group)
        return loss

    def begin_state(self, parameter: Tensor) -> None:
        """Make the state of a parameter that has none, as its first step would find it."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def _step_dense(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        adam(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            has_complex=any(parameter.is_complex() for parameter in parameters),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _step_rows(self, table: Tensor, group: dict[str, Any]) -> None:
        assert table.grad is not None
        if group["weight_decay"]:
            raise ValueError(
                f"weight_decay={group['weight_decay']} with sparse gradients: rows without a gradient would have to "
                "decay too. Give the tables a group of their own, "
                '{"params": self.rows.parameters(), "weight_decay": 0.0}.'
            )
        (first, second), state, gradient = group["betas"], self.state[table], table.grad.coalesce()
        state["step"] += 1
        ids, values = gradient._indices()[0], gradient._values()
        if not len(ids):
            return
        mean, square = state["exp_avg"][ids], state["exp_avg_sq"][ids]
        mean += (values - mean) * (1 - first)
        square += (values.square() - square) * (1 - second)
        state["exp_avg"].index_copy_(0, ids, mean)
        state["exp_avg_sq"].index_copy_(0, ids, square)
        step = float(state["step"])
        size = group["lr"] * math.sqrt(1 - second**step) / (1 - first**step)
        table.index_add_(0, ids, mean.div_(square.sqrt_().add_(group["eps"])).mul_(-size))


def _checked(params: Any) -> list[Any]:
    """Return the parameters or their groups as a list; refuse anything else."""
    made = list(params) if isinstance(params, Iterable) and not isinstance(params, Tensor | Mapping | str) else []
    if not made or not all(isinstance(each, Tensor | Mapping | tuple) for each in made):
        raise TypeError(
            "params must be parameters, such as module.parameters(), or a list of groups, such as "
            f'[{{"params": module.parameters()}}], got {shown(params)}.'
        )
    return made


def _check_betas(betas: Any) -> None:
    check_instance("betas", betas, (tuple, list), "a pair of numbers, such as (0.9, 0.999)")
    if len(betas) != 2 or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise ValueError(
            f"betas must be two numbers of at least 0 and below 1, such as (0.9, 0.999), got {shown(betas)}."
        )
