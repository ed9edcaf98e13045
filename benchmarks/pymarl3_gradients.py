"""Whether one update here has PyMARL3's gradients: copied weights, the same episodes, its own learner beside ours.

    python benchmarks/pymarl3_gradients.py --peer PATH_OF_A_PYMARL3_CHECKOUT [--map 3m|5m_vs_6m|27m_vs_30m]

Compares, in float64, the clipped gradients with which the optimizers step, the norm before clipping and what both
log. Prints one JSON line and exits with 1 where a relative difference exceeds 1e-6.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path

import numpy as np
import torch
from pymarl3_peer import Peer
from qmix_update import MAPS, Episodes, make_episodes
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.loading import resolve
from omagd.controllers.basic_mac import BasicMAC
from omagd.learners.nq_learner import NQLearner
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import pack_episodes

HYPER = ("hyper_w1", "hyper_w2", "hyper_b1", "hyper_b2")  # in the order of our joint first layer
LOGGED = ("loss_td", "td_error_abs", "grad_norm", "q_taken_mean", "target_mean")
TOLERANCE = 1e-6


def mixer_as_ours(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return PyMARL3's mixer values (weights or gradients) under our names."""
    first = {part: torch.cat([theirs[f"{name}.0.{part}"] for name in HYPER]) for part in ("weight", "bias")}
    ours = {f"first.{part}": value for part, value in first.items()}
    for name, place in (("weight1", "hyper_w1.2"), ("weight2", "hyper_w2.2"), ("bias2", "hyper_b2.2")):
        ours |= {f"{name}.{part}": theirs[f"{place}.{part}"] for part in ("weight", "bias")}
    return ours


def gradients(agent: nn.Module, mixer: nn.Module) -> dict[str, Tensor]:
    """Return copies of all gradients by name."""
    parts = (("agent", agent), ("mixer", mixer))
    return {f"{part}.{name}": p.grad.clone() for part, module in parts for name, p in module.named_parameters()}


def step_ours(peer: Peer, episodes: Episodes, info: EnvInfo) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the clipped gradients of one update of ours from the peer's weights, and what is logged."""
    values = {"env_args.map_name": info.map_name, "grad_norm_clip": float(peer.args.grad_norm_clip)}
    config = resolve("qmix", "skirmish", values)
    mac = BasicMAC(config, info, torch.device("cpu"))
    mac.agent.double()
    learner = NQLearner(mac, config, info, Dist())
    mac.agent.load_state_dict(peer.mac.agent.state_dict())
    learner.target_agent.load_state_dict(peer.learner.target_mac.agent.state_dict())
    learner.mixer.load_state_dict(mixer_as_ours(peer.learner.mixer.state_dict()))
    learner.target_mixer.load_state_dict(mixer_as_ours(peer.learner.target_mixer.state_dict()))
    found: dict[str, Tensor] = {}
    learner.optimizer.register_step_pre_hook(lambda *_: found.update(gradients(mac.agent, learner.mixer)))
    stats = learner.update(pack_episodes(episodes), episodes=0)
    return found, {name: float(stats[name][0] / stats[name][1]) for name in LOGGED}


def step_theirs(peer: Peer, episodes: Episodes) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the same of one update of the peer's learner, which leaves its gradients behind."""
    batch = peer.blank(len(episodes))
    for i, episode in enumerate(episodes):
        fields = {name: value.numpy()[None] for name, value in episode.items()}
        fields["actions"] = fields["actions"][..., None].astype(np.int64)
        batch.update(fields, bs=slice(i, i + 1), ts=slice(0, len(episode["reward"])))
    with contextlib.redirect_stdout(io.StringIO()):
        peer.learner.train(batch[:, : batch.max_t_filled()], 0, 0)
    found = {f"agent.{name}": value.grad for name, value in peer.mac.agent.named_parameters()}
    mixer = mixer_as_ours({name: value.grad for name, value in peer.learner.mixer.named_parameters()})
    return found | {f"mixer.{name}": value for name, value in mixer.items()}, peer.logger.values


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="a checkout of PyMARL3")
    parser.add_argument("--map", choices=list(MAPS), default="5m_vs_6m")
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    torch.manual_seed(0)
    info = MAPS[options.map]
    peer = Peer(options.peer, info, floats=torch.float64, buffer_size=options.batch)
    for module in (peer.learner.target_mac.agent, peer.learner.target_mixer):
        for weight in module.parameters():  # targets that are no copies
            weight.data += 0.1 * torch.randn_like(weight)
    episodes = make_episodes(options.batch, np.random.default_rng(0), info)
    ours, log = step_ours(peer, episodes, info)  # first: it reads the weights before the peer's step
    theirs, their_log = step_theirs(peer, episodes)
    assert ours.keys() == theirs.keys()
    of_gradients = max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in ours)
    of_log = {name: abs(log[name] / their_log[name] - 1) for name in LOGGED}
    worst = max(of_gradients, *of_log.values())
    print(json.dumps({"map": options.map, "parameters": len(ours), "gradients": of_gradients, "logged": of_log}))
    sys.exit(int(not worst <= TOLERANCE))


if __name__ == "__main__":
    main()
