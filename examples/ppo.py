"""MAPPO (Yu et al. 2022, arXiv:2103.01955) on the battle 3m: `python examples/ppo.py --steps=100`.

One core, 33 s. Win rate of 128 greedy battles after steps 10, 20, 40, 60, 80 and 100: .33, .61, .70, .80, .79, .80.
Equations without a name are of PPO (Schulman et al. 2017, arXiv:1707.06347).
"""

import numpy as np
import torch
from battles import battles, begin, win_rate

from omagd.controllers.basic_mac import BasicMAC
from omagd.controllers.types import Exploration
from omagd.modules.critics.critic import StateCritic
from omagd.utils.packing import pack_episodes

steps = begin(100)
gamma, lam, clip, c1, c2 = 0.99, 0.95, 0.2, 0.5, 0.01
config, info, runner = battles("mappo")
mac = BasicMAC(config, info, torch.device("cpu"))  # pi(u_a | tau_a): one recurrent network for all agents
critic = StateCritic(config, info, 128)  # V(s): central, for training alone
theta = [*mac.agent.parameters(), *critic.parameters()]
optimizer, rng = torch.optim.Adam(theta, lr=1e-3), np.random.default_rng(1)


def advantages(batch, V):
    """Return A_t = delta_t + gamma lambda A_{t+1}, [S] (GAE, Schulman et al. 2016, arXiv:1506.02438, eq. 16)."""
    later = V[batch.packing.next_row] * (1 - batch["terminated"].float())
    delta = batch.packing.pad((batch["reward"] + gamma * later - V) * batch.valid_mask)  # [episodes, T]
    A = torch.zeros_like(delta)
    for t in reversed(range(delta.shape[1] - 1)):
        A[:, t] = delta[:, t] + gamma * lam * A[:, t + 1]
    return batch.packing.pack(A)


def loss(batch, A, V_target):
    """Return -(L^CLIP - c1 L^VF + c2 S[pi]) as a mean over steps and agents (eq. 9)."""
    logits = mac.agent(mac.inputs(batch), batch.packing)
    log_pi = logits.masked_fill(batch["avail_actions"] == 0, torch.finfo(logits.dtype).min).log_softmax(-1)
    r = (log_pi.gather(-1, batch["actions"].long()[..., None])[..., 0] - batch["log_prob"]).exp()  # pi / pi_old
    L_clip = torch.min(r * A, r.clamp(1 - clip, 1 + clip) * A)  # eq. 7
    L_vf = (critic(mac.inputs(batch), batch["state"]) - V_target).square()
    S = -(log_pi.exp() * log_pi).sum(-1)
    return -(L_clip.mean(-1) - c1 * L_vf + c2 * S.mean(-1))[batch.valid_mask].mean()


for step in range(1, steps + 1):  # a step: 128 battles and 5 updates by all of them
    batch = pack_episodes(runner.run(mac, explore=Exploration(0.0, rng)).episodes)
    with torch.no_grad():
        V = critic(mac.inputs(batch), batch["state"])
        A = advantages(batch, V)
    V_target, A = A + V, (A - A[batch.valid_mask].mean()) / A[batch.valid_mask].std()
    for _ in range(5):
        L = loss(batch, A[:, None], V_target)
        optimizer.zero_grad()
        L.backward()
        torch.nn.utils.clip_grad_norm_(theta, 10)
        optimizer.step()
    if step % 10 == 0 or step == steps:
        print(f"step {step}: loss {L.item():.4f}, win rate {win_rate(runner, mac):.2f}")
