"""Keys and names of PyMARL, its forks and other libraries, and what they are here; the source of hints and of a page.

`docs/make_configuration.py` writes these rows to `docs/coming_from_pymarl.md`.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """Words that mean one thing.

    Attributes:
        there: the words, between spaces. here: the same thing. near: the nearest in purpose, which is another thing.
        why: what else to know; the whole remedy where there is neither.
    """

    there: str
    here: str = ""
    near: str = ""
    why: str = ""

    def hint(self) -> str:
        """Return the end of a message about an unknown word."""
        if self.here or self.near:
            start = f"Did you mean '{self.here}'?" if self.here else f"Nearest in purpose: {self.near}"
            return f" {start}{f' ({self.why})' * bool(self.why)}"
        return f" {self.why}"


KEYS = (
    Row("hidden_dim hidden_size hidden_units rnn_hidden_size", "rnn_hidden_dim"),
    Row("learning_rate", "lr"),
    Row("critic_learning_rate lr_critic", "critic_lr"),
    Row("n_rollout_threads n_envs num_envs n_parallel_envs", "batch_size_run", why="for each rank"),
    Row("train_batch_size", "batch_size", why="for each rank"),
    Row("buffer_capacity replay_size replay_buffer_size memory_size", "buffer_size", why="for each rank"),
    Row("map map_name scenario", "env_args.map_name"),
    Row("env_name", "env"),
    Row("total_timesteps total_steps max_steps max_timesteps num_env_steps", "t_max"),
    Row("n_episodes num_episodes", "max_episodes"),
    Row("discount discount_factor", "gamma"),
    Row("max_grad_norm grad_clip gradient_clip", "grad_norm_clip"),
    Row("eps_start", "epsilon_start"),
    Row("epsilon_end eps_end eps_finish", "epsilon_finish"),
    Row("epsilon_decay epsilon_decay_steps eps_decay", "epsilon_anneal_time"),
    Row("target_update_freq target_network_update_freq", "target_update_interval"),
    Row("target_update_interval_or_tau", why="Give target_update_interval (in episodes); ddpg has tau instead"),
    Row("polyak", "tau"),
    Row("n_test_episodes test_episodes eval_episodes n_eval_episodes", "test_nepisode"),
    Row("eval_interval eval_freq test_freq", "test_interval"),
    Row("use_double_q double_dqn", "double_q"),
    Row("parameter_sharing share_policy", "share_parameters"),
    Row("random_seed", "seed"),
    Row("repeat_id", why="Leave it out: seeds=1,2,3 repeats a run"),
    Row("cuda use_gpu", "use_cuda"),
    Row("n_gpus num_gpus gpus", "world_size"),
    Row("thread_num enable_parallel_computing", why="Leave it out, or give torch_threads"),
    Row("results_dir log_dir logdir save_dir output_dir", "local_results_path"),
    Row("label exp_name experiment_name", "name"),
    Row("model_dir load_path", "checkpoint_path"),
    Row("wandb_team", "wandb_entity"),
    Row("wandb_mode wandb_save_model", why="Leave it out: use_wandb=True records, offline without a key"),
    Row("algorithm algo alg config", why="It is an option, not a key: --config=NAME"),
    Row("env_config", why="It is an option, not a key: --env-config=NAME"),
    Row("render", why="Leave it out: `omagd watch` shows battles"),
    Row("optimizer optim optim_alpha optim_eps", why="Leave it out: the optimizer is always Adam"),
    Row("test_greedy evaluation_epsilon", why="Leave it out: tests are always greedy"),
    Row("agent_output_type mask_before_softmax save_probs", why="Leave it out: it follows from the learner"),
    Row("use_rnn", why="Leave it out: agent=n_rnn and agent=rnn have a memory, agent=ff has none"),
    Row("standardise_rewards", why="Leave it out: rewards stay as they are; PPO has learner_args.normalise_values"),
    Row("standardise_returns", why="Leave it out, or for PPO give learner_args.normalise_values"),
    Row("common_reward", "env_args.common_reward"),
    Row("reward_scalarisation", "env_args.reward_scalarisation"),
    Row("obs_individual_obs", why="Leave it out: learner_args.critic says what PPO's critic reads"),
    Row("critic critic_type", why="Leave it out, or for PPO give learner_args.critic: state or observation"),
    Row("q_nstep q_lambda lambd lam tb_lambda", why="Leave it out: td_lambda, and learner_args.gae_lambda for PPO"),
    Row("add_value_last_step", why="Leave it out: env_args.continuing_episode says it"),
    Row("epochs mini_epochs n_epochs ppo_epoch", "learner_args.epochs"),
    Row("num_mini_batch n_minibatches num_minibatches", "learner_args.minibatches"),
    Row("eps_clip clip_param clip_range clip_coef", "learner_args.clip"),
    Row("entropy entropy_coef ent_coef", "learner_args.entropy"),
    Row("gae_lambda", "learner_args.gae_lambda"),
    Row("critic_coef vf_coef value_loss_coef", "learner_args.value_weight"),
    Row("critic_hidden_dim", "learner_args.critic_hidden"),
    Row("use_value_norm", "learner_args.normalise_values"),
    Row("use_linear_lr_decay", "learner_args.anneal_lr"),
    Row("accumulated_episodes", why="Leave it out: batch_size is what PPO collects for an update"),
    Row("hypernet_layers", why="Leave it out: hypernetworks have 2 layers"),
    Row("abs", why="Leave it out: qmix is always monotonic"),
    Row("gain", why="Leave it out: use_orthogonal=True has a gain of its own"),
    Row("per_alpha per_beta return_priority", why="Leave it out: prioritised replay is not implemented"),
    Row("hpn_hyper_dim", "agent_args.hyper_dim", why="of agent=hpn_rnn"),
    Row("hpn_head_num hpn_hyper_activation", why="Leave it out: agent=hpn_rnn has one head and ReLU"),
    Row("hypergroup", why="Leave it out: groups of runs come from their configuration"),
)
_OWN = "Gymnasium's, PettingZoo's and PyMARL's environments: docs/environments.md; your own: docs/extending.md"
_OTHERS = "gfootball football grf stag_hunt overcooked vmas mamujoco"
_NOT_SHARED = "with share_parameters=False"
NAMES: dict[str, tuple[Row, ...]] = {
    "--config": (
        Row("coma central_v maa2c pac pac_dcg lica dop vmix riit", near="mappo"),
        Row("ia2c ppo", near="ippo"),
        Row("dqn ddqn", near="iql"),
        Row("dmaq", "qplex"),
        Row("wqmix", "ow_qmix", why="or cw_qmix"),
        Row("hpn_qplex", near="hpn_qmix"),
        Row("qtran deepset_qmix updet_qmix qmix_DA asn", near="qmix"),
        Row("hpn_vdn", near="hpn_qmix", why="with mixer=vdn"),
        *(Row(f"{name}_ns", near=name, why=_NOT_SHARED) for name in ("qmix", "vdn", "iql", "mappo", "ippo")),
        Row("maddpg", near="snakes_ddpg", why="with --env-config=snakes"),
    ),
    "--env-config": (
        Row("smac starcraft starcraft2 sc2_beta", "sc2"),
        Row("smacv2 smac_v2 sc2v2 sc2_v2 sc2wrapped", "sc2_v2_terran", why="or sc2_v2_protoss, sc2_v2_zerg"),
        Row("smaclite", near="skirmish"),
        Row("one_step_matrix_game", near="matrix_game"),
        Row("gym gymnasium mpe lbf lbforaging rware", "gymma", why="and env_args.key=… (docs/environments.md)"),
        Row(_OTHERS, why=_OWN),
    ),
    "env": (
        Row("smac starcraft starcraft2", "sc2"),
        Row("smacv2 smac_v2 sc2v2 sc2wrapped", "sc2_v2"),
        Row("smaclite", near="skirmish"),
        Row("one_step_matrix_game", near="matrix_game"),
        Row("gym gymnasium mpe lbf lbforaging rware", "gymma", why="and env_args.key=… (docs/environments.md)"),
        Row(_OTHERS, why=_OWN),
    ),
    "learner": (
        Row("q_learner", "nq_learner"),
        Row("dmaq_qatten_learner", "nq_learner", why="with mixer=qplex"),
        Row("max_q_learner", "wqmix_learner"),
        Row("q_learner_data_augmentation qtran_learner", near="nq_learner"),
        Row(
            "coma_learner actor_critic_learner pac_learner pac_dcg_learner offpg_learner policy_gradient_v2"
            " lica_learner fmac_learner maddpg_learner",
            near="ppo_learner",
        ),
    ),
    "mac": (
        Row("hpn_mac ppo_mac", "n_mac"),
        Row("lica_mac dop_mac conv_mac updet_mac maddpg_mac", near="n_mac"),
        Row("non_shared_mac", near="n_mac", why=_NOT_SHARED),
    ),
    "agent": (
        Row("hpns_rnn", "hpn_rnn"),
        Row("rnn_ppo", "rnn"),
        Row("rnn_ns", near="rnn", why=_NOT_SHARED),
        Row("updet_agent att_rnn", near="attention_rnn"),
        Row("deepset_rnn deepset_hyper_rnn", near="hpn_rnn"),
        Row("asn_rnn conv_agent", near="n_rnn"),
    ),
    "mixer": (
        Row("None null iql", "none"),
        Row("dmaq", "qplex"),
        Row("qtran qtran_base lica vmix", near="qmix"),
    ),
    "action_selector": (
        Row("soft_policies multinomial categorical", "softmax"),
        Row("gumbel", near="softmax"),
    ),
    "run": (Row("dop_run on_off", near="default"),),
}
"""By what takes the name: a key of the configuration, or an option."""


def find(kind: str, word: object) -> Row | None:
    """Return the row that has a word there. kind: "key" for a key, else the key or option that takes such names."""
    rows = KEYS if kind == "key" else NAMES.get(kind, ())
    return next((row for row in rows if str(word) in row.there.split()), None)
