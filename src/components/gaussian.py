"""Action selectors of continuous actions: a diagonal Gaussian, as it is or squashed by tanh into the bounds.

An agent's outputs [..., n, 2 d] are means, then logarithms of deviations, in the units of `ActionBox`: with the density
N of the Gaussian, z drawn from it and half the half width of the bounds,

    gaussian       a = center + half z         log pi(a) = sum of log N(z) - log half
    tanh_gaussian  a = center + half tanh(z)   log pi(a) = sum of log N(z) - log(1 - tanh(z)^2) - log half

The sums are over the numbers that an agent has. Beyond the bounds, `gaussian` keeps what was drawn; the environment
plays the bound.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from omagd.config.env_info import ActionBox

LEAST, MOST = -5.0, 2.0
"""Bounds of the logarithm of the deviation."""
INSIDE = 1 - 1e-6
"""Largest |tanh(z)|: in float32 the inverse of a number nearer to 1 is not known."""
POINTS = 16
"""Of the quadrature of the entropy."""


class Gaussian:
    """Actions drawn from a diagonal Gaussian in half widths of the bounds; for on-policy learners.

    Attributes:
        box: of the environment; set before use.
    """

    draws: ClassVar[bool] = True
    squashes: ClassVar[bool] = False
    box: ActionBox

    def __init__(self) -> None:
        self._constants: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = {}

    def choose(
        self, q: np.ndarray, available: np.ndarray, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return actions [B, n, d] and their log-densities [B, n], float32; those of the means without `rng`.

        q: outputs [B, n, 2 d]. available: [B, n, 2 d] bool, 1 where an agent has such a number; others are the center.
        """
        outputs, some = torch.from_numpy(q), torch.from_numpy(available)
        shape = (*q.shape[:-1], self.box.dim)
        drawn = np.zeros(shape) if rng is None else rng.standard_normal(shape)
        mean, log_std = self._parts(outputs)
        z = mean + log_std.exp() * torch.from_numpy(drawn).to(mean)
        center, half, _ = self._scale(mean)
        u = z.tanh().clamp(-INSIDE, INSIDE) if self.squashes else z
        actions = torch.where(some[..., : self.box.dim], center + half * u, center)
        return actions.numpy(), self.log_prob(outputs, actions, some).numpy()

    def log_prob(self, outputs: Tensor, actions: Tensor, available: Tensor) -> Tensor:
        """Return log pi(a) [..., n] in the environment's units. actions: [..., n, d]; others as in `choose`."""
        mean, log_std = self._parts(outputs)
        center, half, _ = self._scale(mean)
        z = (actions.to(mean) - center) / half
        volume = half.log()
        if self.squashes:
            # Change of variables: the density is divided by da/dz = half (1 - tanh(z)^2).
            u = z.clamp(-INSIDE, INSIDE)
            z, volume = u.atanh(), volume + (1 - u.square()).log()
        each = -0.5 * ((z - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi) - volume
        return (each * available[..., : self.box.dim]).sum(dim=-1)

    def entropy(self, outputs: Tensor, available: Tensor) -> Tensor:
        """Return the entropies [..., n]; with tanh, its expected change is a Gauss-Hermite quadrature."""
        mean, log_std = self._parts(outputs)
        _, half, (places, weights) = self._scale(mean)
        each = log_std + 0.5 * math.log(2 * math.pi * math.e) + half.log()
        if self.squashes:
            # H(tanh z) = H(z) + E[log(1 - tanh(z)^2)], and 1 - tanh(z)^2 = 4 e^-2z / (1 + e^-2z)^2.
            z = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * places
            each = each + (2 * (math.log(2) - z - F.softplus(-2 * z)) * weights).sum(dim=-1)
        return (each * available[..., : self.box.dim]).sum(dim=-1)

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and logarithms of deviations, [..., n, d] each."""
        mean, log_std = outputs.split(self.box.dim, dim=-1)
        return mean, log_std.clamp(LEAST, MOST)

    def _scale(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return center and half width [n, d], and places and weights [2, POINTS] of the quadrature, made once."""
        key = like.device, like.dtype
        if key not in self._constants:
            # E[f(z)] of a standard normal z is sum_i w_i f(sqrt(2) x_i) / sqrt(pi).
            x, w = np.polynomial.hermite.hermgauss(POINTS)
            rule = np.stack([math.sqrt(2) * x, w / math.sqrt(math.pi)])
            self._constants[key] = tuple(torch.from_numpy(part).to(like) for part in (*self.box.scale, rule))
        center, half, rule_there = self._constants[key]
        return center, half, rule_there


class TanhGaussian(Gaussian):
    """The same, squashed by tanh: no action is beyond the bounds, which all numbers must have."""

    squashes = True
