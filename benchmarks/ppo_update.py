"""Time one MAPPO update (all epochs) at the sizes of SMAC's maps, beside EPyMARL's learner where a checkout is given.

    python benchmarks/ppo_update.py [--map 3m|5m_vs_6m|27m_vs_30m|all] [--peer PATH_OF_AN_EPYMARL_CHECKOUT]
        [--updates 20] [--batch 32] [--epochs 4] [--device cpu|cuda]

Both learners get the same random episodes with the same networks: a GRU of 128 units that reads observation and agent
number, a critic of the state with two layers of 128, the same number of epochs over the whole batch. As in
`qmix_update.py`, each works in a process of its own, in turns with the other, and ratios are medians over all rounds.
What differs is each one's own: EPyMARL gives each agent a value, computes five-step returns in every epoch and pads
episodes to the longest one. Prints one JSON line for each map.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from qmix_update import MAPS, Episodes, Update, measure, of_graphs, of_packed, padded

from omagd.config.env_info import EnvInfo
from omagd.config.loading import resolve
from omagd.controllers.basic_mac import BasicMAC
from omagd.learners.ppo_learner import PPOLearner
from omagd.resident.replay import ResidentBuffer
from omagd.utils.dist_utils import Dist

WIDTH = 128


def new_learner(options: argparse.Namespace, batches: list[Episodes], info: EnvInfo) -> PPOLearner:
    """Return our learner, and note the probabilities of actions in the episodes."""
    given = {
        "env_args.map_name": info.map_name, "rnn_hidden_dim": WIDTH, "obs_last_action": False,
        "learner_args.epochs": options.epochs, "learner_args.minibatches": 1, "learner_args.critic_hidden": WIDTH,
    }  # fmt: skip
    config, device = resolve("mappo", "skirmish", given), torch.device(options.device)
    for episode in (episode for batch in batches for episode in batch):
        episode["log_prob"] = -episode["avail_actions"].sum(-1).float().log()
    return PPOLearner(BasicMAC(config, info, device), config, info, Dist(device=device))


def peers(options: argparse.Namespace, batches: list[Episodes], info: EnvInfo) -> Update:
    """Return a function that does one update of EPyMARL's learner on the same episodes, padded as it keeps them."""
    sys.path.insert(0, str(options.peer / "src"))
    of_peer = [padded(batch, info, torch.from_numpy) for batch in batches]
    cuda = options.device == "cuda"
    args = SimpleNamespace(
        agent="rnn", n_agents=info.n_agents, n_actions=info.n_actions, hidden_dim=WIDTH, use_rnn=True,
        obs_agent_id=True, obs_last_action=False, obs_individual_obs=False, agent_output_type="pi_logits",
        action_selector="soft_policies", mask_before_softmax=True, use_cuda=cuda, lr=0.0003, gamma=0.99,
        critic_type="cv_critic", epochs=options.epochs, eps_clip=0.2, entropy_coef=0.001, q_nstep=5,
        add_value_last_step=True, standardise_returns=False, standardise_rewards=True, common_reward=True,
        grad_norm_clip=10, target_update_interval_or_tau=0.01, learner_log_interval=10**9, test_greedy=True,
        state_shape=info.state_dim,
    )  # fmt: skip
    scheme, groups = of_peer[0].scheme, {"agents": info.n_agents}
    with contextlib.redirect_stdout(io.StringIO()):
        mac = importlib.import_module("controllers.basic_controller").BasicMAC(scheme, groups, args)
        learner = importlib.import_module("learners.ppo_learner").PPOLearner(mac, scheme, SimpleNamespace(), args)
    learner.log_stats_t = 0
    if cuda:
        learner.cuda()
        for batch in of_peer:
            batch.to(options.device)
    return lambda i: learner.train(of_peer[i], 0, 0)


def make_update(name: str, options: argparse.Namespace, batches: list[Episodes], info: EnvInfo) -> Update:
    """Return our learner's update of batch number i (`name` "ours", "ours_graph") or EPyMARL's."""
    if name == "ours":
        return of_packed(new_learner(options, batches, info), batches, options.device)
    if name == "ours_graph":
        return of_graphs(new_learner(options, batches, info), batches, info, options.device, ResidentBuffer.whole)
    return peers(options, batches, info)


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description="Time one MAPPO update.")
    parser.add_argument("--map", choices=[*MAPS, "all"], default="5m_vs_6m")
    parser.add_argument("--peer", type=Path, help="a checkout of EPyMARL")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    options.precision = "float32"
    for name in MAPS if options.map == "all" else [options.map]:
        row = {"work": f"ppo_update {name}", "device": options.device, "batch": options.batch, "epochs": options.epochs}
        print(json.dumps(row | measure(options, MAPS[name], make_update)), flush=True)


if __name__ == "__main__":
    main()
