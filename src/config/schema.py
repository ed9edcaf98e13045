"""Types and ranges of all configuration keys; `default.yaml` has their values.

Steps are environment steps over all ranks; sizes are per rank unless the comment says otherwise. The comments become
`docs/configuration.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from omagd.config.env_info import given_map, map_label
from omagd.utils.errors import Unchecked


def as_whole(value: object) -> object:
    """Return an integral float, such as 1e6 or 2.0, as an int; anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_tuple(value: object) -> object:
    """Return a list or a single integer as a tuple, for `seeds`."""
    if isinstance(value, list):
        return tuple(value)
    value = as_whole(value)
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


Int = Annotated[int, BeforeValidator(as_whole)]
Count = Annotated[Int, Field(ge=1, le=10**12)]  # steps and intervals, where a huge number means never
Size = Annotated[Int, Field(ge=1, le=10**6)]
Many = Annotated[Int, Field(ge=1, le=10**9)]
Whole = Annotated[Int, Field(ge=0, le=2**63 - 1)]
Width = Annotated[Int, Field(ge=1, le=2**16)]
Layers = Annotated[Int, Field(ge=1, le=1000)]
Unit = Annotated[float, Field(ge=0.0, le=1.0)]
Weight = Annotated[float, Field(ge=0.0, le=1e9)]  # sums of weights stay finite
Positive = Annotated[float, Field(gt=0.0)]
Amount = Annotated[float, Field(gt=0.0, le=1e6)]
Duration = Annotated[float, Field(ge=0.0, le=1e9)]
Tests = Annotated[Int, Field(ge=0, le=10**6)]
Rate = Annotated[float, Field(gt=0.0)]
Text = Annotated[str, Field(min_length=1)]
Stage = Literal["stage1", "stage2", "stage3", "all"]
BeliefKind = Literal["none", "features", "tokens"]
Seeds = Annotated[tuple[Whole, ...], BeforeValidator(_as_tuple)]


class Frozen(BaseModel):
    """Base of all configuration models: immutable, no unknown keys, no implicit conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TokenizerConfig(Frozen):
    """Stage 1, the VQ-VAE over nodes."""

    n_codes: Annotated[Int, Field(ge=2, le=32000)]  # codes in the codebook (K)
    code_dim: Width  # dimension of a code; with n_codes, for maps whose nodes have many more or fewer features
    hidden_dim: Width  # width of encoder and decoder; larger where stage 1 leaves a large mse
    n_layers: Layers  # layers of the encoder, and of the decoder
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)]  # dropout rate in encoder and decoder
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)]  # decay per update of the codebook; higher for small batches
    commitment: Annotated[float, Field(ge=0.0)]  # weight of the commitment loss; higher if encodings leave their codes
    dead_code_threshold: Annotated[float, Field(ge=0.0)]  # share of the mean count of a dead code; if few are used
    revive_interval: Whole  # updates between revivals of dead codes; 0: never, as in the plain VQ-VAE


class MaskPredictorConfig(Frozen):
    """Stage 2, the predictor of unseen units."""

    kind: str  # masked: transformer over tokens
    d_model: Width  # width of the transformer
    n_layers: Layers  # layers of the transformer
    n_heads: Width  # attention heads; divides d_model
    feedforward_dim: Width  # hidden width of the feed-forward layers
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)]  # dropout rate in the transformer
    matching: Literal["none", "type"]  # loss: position by position, or optimal matching of nodes of one type
    stacked_steps: Size  # frames in the predictor's input (k)
    stacked_strip: Count  # environment steps between two frames (s); more for units out of sight for long
    use_gru: bool  # with stacked_steps: a GRU over a node's k frames, so that the transformer reads N tokens, not k·N
    last_seen: bool  # an unseen node keeps the token of its last sighting, and its age
    code_features: bool  # token embeddings and head also know the features that codes decode to
    decode: Literal["argmax", "mean"]  # likeliest code | mean over all codes


EXTENDS = "extends"
"""Key of a file, not of the configuration: the file, by name or path, whose keys it begins with."""
NO_SKIPPING = "each group has a start of its own; leave it out"
TRACKER_LEFT = "the study that it served ended (docs/results/reconstruction.md); leave it out"
REMOVED: dict[str, tuple[Any, str]] = {
    "act_in_halves": (False, "it brought no measurable gain; leave it out"),
    "graph_pretrain_random_share": (0.3, "the scripted players act at random with probability 0.3; leave it out"),
    "belief_inputs": (False, "teams won less with it (docs/results/reconstruction.md); leave it out"),
    "truth_all_until": (0.0, TRACKER_LEFT),
    "truth_until": (0.0, TRACKER_LEFT),
    "reconstructor_refresh": (0, TRACKER_LEFT),
    "reconstructor_refresh_updates": (50, TRACKER_LEFT),
    "compile": (False, "it brought 2 % of an update; leave it out"),
    "num_workers": (0, "it brought 2 % of an update; leave it out"),
    "n_starts": (None, NO_SKIPPING),
    "rollout_skip_threshold": (None, NO_SKIPPING),
    "early_stop_percentage": (1.0, "with it a run could not be repeated; leave it out"),
    "graph_pretrain_policy_path": ("", "give the run as graph_pretrain_policy, or leave it out"),
    "graph_pretrain_policy_share": (0.5, "leave it out"),
    "mark_guesses": (False, "agents read reconstructed features as they read seen ones; leave it out"),
    "gnn_readout": ("pool", "hpn_rnn and attention_rnn value each attack by its enemy; leave it out"),
    "graph_pretrain_patience": (0, "stages 1 and 2 keep their best model; leave it out"),
    "tokenizer_config.distance": ("l2", "the nearest code has the smallest Euclidean distance; leave it out"),
    "mask_predictor_config.mask_ratio": (0.0, "only what agents do not see is masked; leave it out"),
    "mask_predictor_config.early_steps": (2, "all steps weigh the same; leave it out"),
    "mask_predictor_config.early_step_weight": (1.0, "all steps weigh the same; leave it out"),
}
"""Keys that earlier versions had, each with its default there and what to do instead. A `config.json`
may hold them; unfinished runs continue where the key had its default. Some were in no release, but are in the
configurations of research/."""
ACTED_WITH = {
    **dict.fromkeys(("gnn_readout", "mark_guesses"), "omagd 0.1"),
    "tokenizer_config.distance": "omagd 0.2.0: this version plays L2 tokenizers only",
}
"""Removed keys without which a team that was trained with them would act on other inputs; what still plays it."""


def with_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration as an earlier version had them: with the removed keys at their defaults."""
    found = dict(values)
    for key, (default, _) in REMOVED.items():
        section, dot, inner = key.partition(".")
        found |= {section: {inner: default, **found[section]}} if dot else {key: found.get(key, default)}
    return found


COMPONENT_ARGS = ("learner_args", "agent_args", "mixer_args")
"""Sections whose keys the component defines, by a pydantic model in its class (`args_model`)."""
SECTIONS: dict[str, type[BaseModel]] = {
    "tokenizer_config": TokenizerConfig,
    "mask_predictor_config": MaskPredictorConfig,
}
OF_PARTS = frozenset(
    "mixer mixing_embed_dim hypernet_embed gnn_hidden_dim gnn_layer_num use_layer_norm use_orthogonal optimizer tau"
    " critic_lr gumbel_softmax td_lambda q_lambda standardise_rewards double_q target_update_interval"
    " target_update_updates".split()
)
"""Keys that only learners, agents and mixers read, each its own ones."""
OF_HEAD = frozenset({"belief_weight", "belief_units", "belief_every"})
"""Keys that only the belief head reads."""
OF_GRAPHS = tuple(
    "graph_pretrain graph_frames graph_lr pretrain save_pretrain tokenizer_config mask_predictor_config".split()
)
"""Beginnings of the keys that only stages 1 and 2, and what they train, read."""
OPEN_SECTIONS = frozenset({"env_args", "task_weights", *COMPONENT_ARGS})
"""Sections whose keys the environment, the learner, the agent, the mixer or the set of maps defines."""


class Config(Frozen):
    """The configuration of one run."""

    run: str  # run mode: default: one process; ddp: one process per device, or a rank of torchrun's group
    env: str  # environment
    env_args: dict[str, Any]  # arguments of the environment, see below
    learner: str  # learner; the *_ddp names are the same learners
    learner_args: dict[str, Any]  # arguments of the learner, as in its `args_model`
    mac: str  # controller: n_mac reads observations, n_graph_mac and gnn_graph_mac reconstructions; ddpg_mac: for ddpg
    agent: str  # network of the agents
    agent_args: dict[str, Any]  # arguments of the agent, as in its `args_model`
    mixer: str  # network that combines the agents' values
    mixer_args: dict[str, Any]  # arguments of the mixer, as in its `args_model`
    runner: str  # rounds of battles: parallel, episode (one), resident (on a GPU); stream: none waits; ticks: steps
    action_selector: str  # epsilon_greedy | greedy (never explores) | softmax (draws: ppo) | gaussian | tanh_gaussian
    name: Text  # name of the configuration; the run folder's name begins with it
    seed: Whole  # every random number of a run follows from it
    seeds: Seeds  # several runs, one after another

    use_cuda: bool  # use GPUs if there are any
    use_ddp: bool  # False: run=ddp trains in this process; a group started by torchrun is joined anyway
    world_size: Size | None  # number of ranks; None: the visible GPUs, else 1
    ddp_port: Annotated[Int, Field(ge=1024, le=65535)]  # TCP port where spawned ranks meet; another one if it is taken
    dist_backend: Literal["nccl", "gloo"] | None  # None: nccl on GPUs, gloo on CPUs
    dist_timeout_minutes: Amount  # minutes that a rank waits for the others in one exchange, or may make no progress
    lr_scaling: Literal["none", "sqrt", "linear"]  # factor of lr and graph_lr: 1, the root of the ranks, or the ranks
    torch_threads: Size  # torch's CPU threads in each process
    cpu_inference: bool  # agents act with a copy on the CPU: for small agents, where a GPU waits for each step
    buffer_cpu_only: bool | None  # keep the replay in main memory; None: unless it fits into the GPU's free memory
    graph_updates: bool | None  # updates of fixed shapes, CUDA graphs on a GPU; None: on a GPU
    deterministic: bool  # on GPUs: use only algorithms that give the same bits each time; slower
    precision: Literal["float32", "bf16"]  # precision of matrix products in updates; weights stay float32
    acting_precision: Literal["float32", "bf16"]  # precision of the frozen predictor while acting
    accumulate: Size  # parts of a batch in stage 3 whose gradients are accumulated for one step: saves memory
    enable_gradient_checkpointing: bool  # recompute activations in the backward pass: saves memory, costs time
    bucket_cap_mb: Amount  # megabytes of gradients that ranks exchange at once
    max_memory_per_gpu_gb: Amount | None  # gigabytes of a GPU that a rank may use, on a GPU with other jobs; None: all

    batch_size_run: Size  # battles per rank
    resident_slots: Size | None  # runner=resident: battles at once, which share a round; None: all
    group_size: Size  # episodes in a row of slots that share their start and are compared (rloo); on-policy training
    enable_dynamic_sampling: bool  # drop groups that have all won or all lost, and play others
    max_sampling_attempts: Size  # enable_dynamic_sampling: most rounds more than batch_size needs, for one update
    env_processes: bool  # each battle in its own process; False: batched environments run in the rank's process
    ticks_per_iteration: Size  # runner=ticks: steps of every battle between updates; more where updates take too long
    buffer_size: Many  # episodes in the replay buffer (runner=ticks: steps); the newest ones
    use_per: bool  # replay draws episodes by their errors (prioritised), where few of them teach something
    per_alpha: Unit  # use_per: exponent of the errors; 0: all alike
    per_beta: Unit  # use_per: exponent of the weights that correct for it; 1: almost no bias
    t_max: Count  # environment steps over all ranks after which stage 3 ends
    max_episodes: Many | None  # episodes over all ranks that also end stage 3; alone it replaces t_max
    task_weights: dict[str, Weight]  # map: its weight among the episodes; others weigh 1
    task_dealing: Literal["round_robin", "sharded"] | None  # each rank plays all maps | its own
    enable_task_sharding: bool  # task_dealing=sharded by its published name, for configurations that have it
    balance_tasks_across_gpus: bool  # sharded: maps by measured seconds, so that no rank waits; False: in their order
    min_tasks_per_gpu: Size  # sharded: maps that each rank plays at least; with few maps several ranks play the same
    sync_every_n_steps: Count  # iterations between exchanges of the ranks' statistics of maps; sharded: and rebalancing
    epsilon_start: Unit  # probability of a random action at step 0
    epsilon_finish: Unit  # probability of a random action after epsilon_anneal_time
    epsilon_anneal_time: Count  # environment steps over all ranks of the linear decay
    epsilon_speed: Annotated[float, Field(gt=0.0, le=1.0)] | None  # per-step decay factor; replaces the linear decay

    opponent_difficulty_strategy: str  # none (as in env_args) | linear | exponential | curriculum | self_play
    opponent_order: str  # order from weak to strong: measured | published
    enable_opponent_evasion: bool  # also play against evasion, as often as against each of the others
    opponent_evasion_start_episode: Whole  # episodes over all ranks before evasion is added
    opponent_pool_size: Size  # self_play: number of past policies in the pool, the newest ones
    opponent_pool_interval: Count  # self_play: updates between two policies of the pool

    batch_size: Size  # episodes of one update (runner=ticks: steps); on-policy: least to collect, all used and dropped
    updates_per_iteration: Size  # updates after one episode in each battle slot (runner=ticks: after the ticks)
    gamma: Unit  # discount per environment step
    td_lambda: Unit  # 0: one-step targets, 1: full returns
    q_lambda: bool  # nq_learner: targets corrected for actions that were not greedy, where replayed ones mislead
    standardise_rewards: bool  # Q-learning, ddpg: divide rewards by their running root mean square over all ranks
    double_q: bool  # the online agent chooses the action that the target network values (double Q-learning)
    optimizer: Literal["adam", "rmsprop"]  # of Q-learning; rmsprop: as PyMARL's, to compare with its results
    lr: Rate  # learning rate in stage 3
    critic_lr: Rate | None  # ddpg: learning rate of the critic; None: lr
    tau: Annotated[float, Field(gt=0.0, le=1.0)]  # ddpg: rate of the soft target updates
    gumbel_softmax: bool  # ddpg: straight-through Gumbel-softmax actions instead of the softmax
    grad_norm_clip: Positive  # maximum norm of the gradient over all ranks, in every stage
    target_update_interval: Count  # episodes over all ranks between copies of the target networks
    target_update_updates: Count | None  # updates between copies; replaces target_update_interval

    share_parameters: bool  # one network for all agents; False: a network of its own for each agent
    rnn_hidden_dim: Width  # hidden units of the agents (H); ddpg, bicnet: width of the hidden layers
    use_layer_norm: bool  # n_rnn only: layer normalisation of the hidden state before the output
    use_orthogonal: bool  # n_rnn only: orthogonal initial weights
    obs_agent_id: bool  # add the agent's number (one-hot) to its input
    obs_last_action: bool  # add the agent's last action (one-hot) to its input
    mixing_embed_dim: Width  # qmix: width of the mixing layer
    hypernet_embed: Width  # qmix: hidden width of the hypernetworks
    gnn_hidden_dim: Width  # gnn_rnn: features of an embedded node; larger for many kinds of units
    gnn_layer_num: Layers  # gnn_rnn: graph convolutions; fewer make acting and updates faster

    use_graph_reconstruction: bool  # run stages 1 and 2; agents of stage 3 act on reconstructions
    use_full_obs: bool  # agents see everything: an upper bound, not a method
    use_team_obs: bool  # agents tell one another: each also reads the units that any living ally sees; communication
    belief_loss: BeliefKind  # a loss by which agents learn to say from memory what unseen units are like
    belief_weight: Positive  # weight of that loss beside the one of reinforcement learning
    belief_units: Literal["unseen", "all"]  # units that count in it
    belief_every: Size  # it reads every so many-th step of an episode: 4 takes a quarter of the rows
    reconstructer_stage: Stage | None  # stage to run; None: all
    recontructer_stage: Stage | None  # the published spelling of reconstructer_stage
    pretrain_only: bool  # end after stage 2
    pretrained_tokenizer_path: str  # a tokenizer.th or its folder: skips stage 1
    pretrained_mask_predictor_path: str  # a stage2_model.th or its folder: skips stage 2
    pretrain_buffer_path: str  # folder with rank_<r>.episodes for each rank, read instead of playing
    save_pretrain_buffer: bool  # keep the episodes of stages 1 and 2: other runs with pretrain_buffer_path play none
    graph_pretrain_epochs: Many  # updates of stage 1, and of stage 2
    graph_pretrain_episodes: Many  # episodes of stages 1 and 2 over all ranks; rounded up to whole rounds of all slots
    graph_pretrain_batch_size: Size  # episodes of one update
    graph_frames_at_once: Count  # agents' frames of an update that stages 1 and 2 process together: limits memory
    graph_pretrain_eval_interval: Count  # epochs between evaluations that select the model; fewer if they take too long
    graph_pretrain_eval_episodes: Size  # their episodes over all ranks, rounded up; more if the best model is noise
    graph_pretrain_test_episodes: Size  # test episodes of stage 2, which judge its best model; rounded up likewise
    graph_pretrain_policy: Text  # policy that plays them: random | mixed (scripts, 0.3 random) | path of a checkpoint
    graph_lr: Rate  # learning rate of Adam in stages 1 and 2
    tokenizer_config: TokenizerConfig
    mask_predictor_config: MaskPredictorConfig

    test_nepisode: Size  # episodes of a test over all ranks; rounded up to whole rounds of all slots
    test_greedy: bool  # False: on-policy learners draw actions in tests
    absolute_episodes: Tests  # episodes of the best test's weights at the end: Gorsane et al.'s absolute metric
    test_interval: Count  # environment steps over all ranks between tests; also at the start and at the end
    log_detail: Literal["line", "full"]  # the console's log: one line each, or every value
    log_interval: Count  # environment steps over all ranks between logs
    runner_log_interval: Count  # the same for values of the runner: return_mean, ep_length_mean, epsilon, ...
    learner_log_interval: Count  # the same for values of the learner: loss_td, grad_norm, ...
    save_model: bool  # write weights to models/
    save_model_interval: Count  # environment steps over all ranks between saved weights; also saved at the end
    enable_checkpointing: bool  # write checkpoints/, from which a killed run resumes bit for bit
    checkpoint_interval: Duration  # seconds between checkpoints; 0: one after every iteration
    max_checkpoints_to_keep: Annotated[Int, Field(ge=2, le=10**6)]  # the newest ones; the best one is kept as well
    keep_checkpoints: bool  # also keep the replay of a finished run, which a longer one can then continue bit for bit
    auto_resume: bool  # resume the newest unfinished run of this configuration, if there is one
    auto_resume_wait: Duration  # minutes to wait while another process uses that run; 0: reject
    resume: Literal["exact", "lossy", "weights"]  # lossy: a damaged run may lose episodes; weights: all but weights
    max_restarts: Whole  # run=ddp: restarts of all ranks from the newest checkpoint after one was killed
    local_results_path: Text  # folder of all run folders
    unique_token: str  # name of the run's folder, rejected if taken; empty: made from name, map, seed and time
    use_wandb: bool  # log to W&B, offline without a key
    wandb_project: str  # W&B project; empty: made as `wandb_naming` says
    wandb_naming: Literal["environment", "published"]  # W&B projects: of each environment and map, or as published
    wandb_entity: str  # W&B team; empty: the key's own
    use_tensorboard: bool  # write event files to <run folder>/tb/
    log_video: bool  # record a battle of each best test and of the last: replays/, W&B, TensorBoard
    profile: bool  # write traces of a few iterations of each stage to <run folder>/profile/
    log_memory_usage: bool  # log the memory of every rank
    distributed_debug: bool  # compare checksums of all parameters over the ranks after every iteration

    evaluate: bool  # play checkpoint_path greedily instead of training; `evaluate RUN` sets it and reads config.json
    evaluation_only: bool  # to compare given modules of stages 1 and 2: evaluate them on new episodes, no training
    eval_report_episodes: Tests  # episodes over all ranks of evaluate and evaluation_only; 0: as in training
    checkpoint_path: str  # to continue or to evaluate: a run's folder (whole state), its models/ or one step (weights)
    load_step: Whole  # of several saved steps the nearest to this one; 0: the last
    save_replay: bool  # with evaluate=True: record episodes in replays/, for the page there and for `watch` (watch.md)

    @property
    def stage(self) -> Stage:
        """The stage to run, by either spelling; without reconstruction only stage 3."""
        if not self.use_graph_reconstruction:
            return "stage3"
        return self.reconstructer_stage or self.recontructer_stage or "all"

    @property
    def records_truth(self) -> bool:
        """Whether a key makes stage 3 record what agents do not see; a learner can ask for it, too."""
        return self.use_full_obs or self.use_team_obs or self.belief_loss != "none"

    @property
    def dealing(self) -> Literal["round_robin", "sharded"]:
        """How the maps of a set are divided among ranks, by either key."""
        return self.task_dealing or ("sharded" if self.enable_task_sharding else "round_robin")

    @property
    def map_name(self) -> str:
        """The map, the task or the set of maps, by its name in results; empty if the environment has none."""
        return map_label(given_map(self.env, self.env_args))


class Watched(Config):
    """A configuration that notes which keys are read, as do its copies. One with a wrong value raises `Unchecked`."""

    _wrong: frozenset[str] = PrivateAttr(frozenset())
    _read: set[str] = PrivateAttr(default_factory=set)

    def __getattribute__(self, name: str) -> Any:
        if name in FIELDS:
            if name in self._wrong:
                raise Unchecked(name)
            self._read.add(name)
        return super().__getattribute__(name)

    @property
    def keys_read(self) -> set[str]:
        """The keys that were read."""
        return self._read


Watched.__name__ = Config.__name__  # in errors about keys that do not exist
FIELDS = frozenset(Config.model_fields)


def without(config: Config, keys: Iterable[str] = ()) -> Watched:
    """Return a configuration in which these keys cannot be read: their values are wrong."""
    watched = Watched.model_construct(**config.__dict__)
    watched._wrong = frozenset(keys) | (config._wrong if isinstance(config, Watched) else frozenset())
    return watched
