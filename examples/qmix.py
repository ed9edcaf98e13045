"""QMIX (Rashid et al. 2018, arXiv:1803.11485) on the battle 3m: `python examples/qmix.py --steps=80`.

One core, 27 s. Win rate of 128 greedy battles after steps 5, 20, 35, 50, 65 and 80: .41, .51, .59, .54, .70, .79.
"""

import copy
import random
from collections import deque

import numpy as np
import torch
from battles import battles, begin, win_rate

from omagd.controllers.basic_mac import BasicMAC
from omagd.controllers.types import Exploration
from omagd.modules.mixers.mixer import QMixer
from omagd.utils.packing import pack_episodes, td_lambda_targets

steps = begin(80)
gamma, lam = 0.99, 0.8
config, info, runner = battles("qmix_fast")
mac = BasicMAC(config, info, torch.device("cpu"))  # Q_a(tau_a, u_a): one recurrent network for all agents
mixer = QMixer(config, info)  # Q_tot, whose derivative by each Q_a is not negative (eq. 5)
agent_, mixer_ = copy.deepcopy(mac.agent), copy.deepcopy(mixer)  # theta^-: the target networks
theta = [*mac.agent.parameters(), *mixer.parameters()]
optimizer, replay, rng = torch.optim.Adam(theta, lr=2e-3), deque(maxlen=5000), np.random.default_rng(1)


def loss(batch):
    """Return the mean of (y - Q_tot(tau, u, s; theta))^2 over the steps of a batch (eq. 6)."""
    x, s, u = mac.inputs(batch), batch["state"], batch["actions"].long()
    Q = mac.agent(x, batch.packing)  # Q_a(tau_a, .) of all agents and actions
    Q_tot = mixer(Q.gather(-1, u[..., None])[..., 0], s)
    with torch.no_grad():
        # The argmax of Q_tot is each agent's own (eq. 4). Double Q-learning: theta chooses, theta^- values.
        u_max = Q.masked_fill(batch["avail_actions"] == 0, -torch.inf).argmax(-1)
        V = mixer_(agent_(x, batch.packing).gather(-1, u_max[..., None])[..., 0], s)
        # lambda = 0: y = r + gamma max_u' Q_tot(tau', u', s'; theta^-), as in the paper. PyMARL2 takes lambda-returns.
        y = td_lambda_targets(batch["reward"], batch["terminated"].float(), V, batch.packing, gamma, lam)
    return (y - Q_tot)[batch.valid_mask].square().mean()


for step in range(1, steps + 1):  # a step: 128 battles and 16 updates
    epsilon = max(0.05, 1 - 0.95 * step / 33)
    replay += runner.run(mac, explore=Exploration(epsilon, rng)).episodes
    for _ in range(16):
        L = loss(pack_episodes(random.sample(replay, 32)))
        optimizer.zero_grad()
        L.backward()
        torch.nn.utils.clip_grad_norm_(theta, 10)
        optimizer.step()
    if step % 6 == 0:
        agent_, mixer_ = copy.deepcopy(mac.agent), copy.deepcopy(mixer)  # theta^- <- theta
    if step % 5 == 0 or step == steps:
        print(f"step {step}: loss {L.item():.4f}, win rate {win_rate(runner, mac):.2f}")
