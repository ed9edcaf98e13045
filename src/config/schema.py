"""Types, ranges and contradictions of the configuration; the values stand in `default.yaml`.

Keys keep the names of the published commands. Units: steps are environment steps summed over all ranks, sizes
are per rank unless a line says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _as_whole(value: object) -> object:
    """Return a whole number that was written as a real one, 1e6 or 2.0, as an int; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_tuple(value: object) -> object:
    """Return a YAML list, or one whole number, as the tuple that `seeds` holds."""
    if isinstance(value, list):
        return tuple(value)
    value = _as_whole(value)
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


Int = Annotated[int, BeforeValidator(_as_whole)]
Count = Annotated[Int, Field(ge=1, le=10**12)]
Episodes = Annotated[Int, Field(ge=1, le=10**9)]
Whole = Annotated[Int, Field(ge=0, le=2**63 - 1)]
Width = Annotated[Int, Field(ge=1, le=2**16)]
Layers = Annotated[Int, Field(ge=1, le=1000)]
Unit = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Stage = Literal["stage1", "stage2", "stage3", "all"]
Seeds = Annotated[tuple[Whole, ...], BeforeValidator(_as_tuple)]


class Frozen(BaseModel):
    """Base of all configuration: never written again, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TokenizerConfig(Frozen):
    """Stage 1, the VQ-VAE over nodes."""

    n_codes: Annotated[Int, Field(ge=2, le=32000)]  # codes in the codebook (K)
    code_dim: Width  # features of a code
    hidden_dim: Width  # width of encoder and decoder
    n_layers: Layers  # layers of encoder and of decoder
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)]  # share of hidden units, in encoder and decoder
    distance: Literal["l2", "cosine"]  # nearest code by Euclidean distance or by angle
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)]  # of the codebook's running counts and sums, per update
    commitment: Annotated[float, Field(ge=0.0)]  # weight of the distance between encoding and code in the loss
    dead_code_threshold: Annotated[float, Field(ge=0.0)]  # share of the mean EMA count below which a code is dead
    revive_interval: Whole  # updates between revivals; 0: never


class MaskPredictorConfig(Frozen):
    """Stage 2, the masked-token predictor."""

    d_model: Width  # width of the transformer
    n_layers: Layers  # layers of the transformer
    n_heads: Width  # attention heads; divides d_model
    feedforward_dim: Width  # width between the two linear maps of a layer
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)]  # share of units in the transformer
    mask_ratio: Annotated[float, Field(ge=0.0, lt=1.0)]  # share of seen nodes that are masked too in training
    matching: Literal["none", "type"]  # loss: slot by slot, or nodes of one type in any order
    early_steps: Whole  # first steps of an episode that weigh early_step_weight
    early_step_weight: Annotated[float, Field(ge=0.0)]  # their weight in the loss; others weigh 1
    stacked_steps: Count  # frames that the predictor reads (k)
    stacked_strip: Count  # environment steps between two frames (s)
    use_gru: bool  # a GRU over each node's k frames before the transformer
    last_seen: bool  # an unseen node carries the token it had when last seen, and its age
    code_features: bool  # token embeddings and head also know the features that codes decode to
    decode: Literal["argmax", "mean"]  # features of the likeliest code, or their mean over all codes


COMPONENT_ARGS = ("learner_args", "agent_args", "mixer_args")
"""Sections whose keys and types the named component defines, by a pydantic model in its class (`args_model`)."""


class Config(Frozen):
    """One run, resolved and checked."""

    run: str  # run mode: default (one process) | ddp (one worker per device, or a rank of torchrun's group)
    env: str  # environment by name
    env_args: dict[str, Any]  # arguments of the environment, see below
    learner: str  # learner by name; the *_ddp names are the same learners
    learner_args: dict[str, Any]  # keys of the learner itself: those of its `args_model`, for learners that have one
    mac: str  # controller by name; ddpg_mac draws actions, for the ddpg learners
    agent: str  # network of the agents by name
    agent_args: dict[str, Any]  # keys of the agent itself, likewise
    mixer: str  # network that joins the agents' values by name
    mixer_args: dict[str, Any]  # keys of the mixer itself, likewise
    runner: str  # parallel: rounds of battles | stream: each begins its next at once | ticks: some steps | episode: one
    action_selector: str  # epsilon_greedy | greedy (explores never)
    name: str  # of the configuration; begins the run folder's name
    seed: Whole  # every random number of a run follows from it
    seeds: Seeds  # several runs, one after another, ended by one table

    use_cuda: bool  # compute on GPUs if there are any
    use_ddp: bool  # False: run=ddp trains in this process; a group that torchrun started is joined all the same
    world_size: Count | None  # number of ranks; None: the visible GPUs, else 1
    ddp_port: Annotated[Int, Field(ge=1024, le=65535)]  # TCP port where spawned ranks meet; taken: another one
    dist_backend: Literal["nccl", "gloo"] | None  # None: nccl on GPUs, gloo on CPUs
    dist_timeout_minutes: Positive  # minutes a rank waits for the others in one exchange, or may stand still
    lr_scaling: Literal["none", "sqrt", "linear"]  # lr and graph_lr times 1, the root of the ranks, or the ranks
    torch_threads: Count  # threads of each process for torch on a CPU
    cpu_inference: bool  # agents act with a copy on the CPU, brought up to date before each round of episodes
    buffer_cpu_only: bool  # replay in main memory, even where the ranks compute on GPUs
    deterministic: bool  # on GPUs: only algorithms that give the same bits each time; slower
    precision: Literal["float32", "bf16"]  # arithmetic of the matrix products in updates; weights stay float32
    acting_precision: Literal["float32", "bf16"]  # of the frozen predictor while acting
    compile: bool  # torch.compile for the mixers, where it pays; needs a C++ compiler on a CPU, Triton on a GPU
    accumulate: Count  # parts of a batch that stage 3 learns one after another, with one step for all: saves memory
    enable_gradient_checkpointing: bool  # compute activations again in backward: saves memory, costs time
    bucket_cap_mb: Positive  # megabytes of gradients that ranks exchange at once
    num_workers: Annotated[Int, Field(ge=0, le=1)]  # 1: a thread packs the next batch while this one is learned from
    max_memory_per_gpu_gb: Positive | None  # gigabytes of a GPU that a rank may take; None: all

    batch_size_run: Count  # battles per rank
    env_processes: bool  # each battle in a process of its own; without, batched environments play in this one
    ticks_per_iteration: Count  # runner=ticks: steps of every battle between updates
    buffer_size: Count  # episodes kept for replay (runner=ticks: steps); a new one replaces the oldest
    t_max: Count  # environment steps over all ranks after which stage 3 ends
    max_episodes: Episodes | None  # episodes over all ranks that end stage 3 too; given alone, t_max does not
    epsilon_start: Unit  # share of random actions at step 0
    epsilon_finish: Unit  # share of random actions after epsilon_anneal_time
    epsilon_anneal_time: Count  # environment steps over all ranks, in a straight line
    epsilon_speed: Annotated[float, Field(gt=0.0, le=1.0)] | None  # epsilon times this at each step; given, no line

    opponent_difficulty_strategy: str  # none (as env_args say) | linear | exponential | curriculum | self_play
    opponent_order: str  # from weak to strong: measured | published
    enable_opponent_evasion: bool  # play evasion too, as often as each of the others
    opponent_evasion_start_episode: Whole  # episodes over all ranks before evasion comes in
    opponent_pool_size: Count  # self_play: selves that are kept, the newest ones
    opponent_pool_interval: Count  # self_play: updates between two of them

    batch_size: Count  # episodes of one update (runner=ticks: steps)
    updates_per_iteration: Count  # updates after as many episodes as there are battle slots, or after the ticks
    gamma: Unit  # discount for one environment step
    td_lambda: Unit  # 0: one-step targets, 1: whole returns
    double_q: bool  # the trained agent chooses the action that the target network values
    lr: Positive  # step size of Adam in stage 3
    critic_lr: Positive | None  # ddpg: that of the critic; None: lr
    tau: Annotated[float, Field(gt=0.0, le=1.0)]  # ddpg: share by which targets follow at each update
    gumbel_softmax: bool  # ddpg: one-hot actions, straight-through by Gumbel noise, instead of the softmax itself
    grad_norm_clip: Positive  # norm to which the gradient over all ranks is cut, in every stage
    target_update_interval: Count  # episodes over all ranks between copies of the target networks
    target_update_updates: Count | None  # updates between copies; given, it replaces target_update_interval
    use_per: bool  # prioritised replay: refused, not built

    rnn_hidden_dim: Width  # size of the agents' memory (H); ddpg, bicnet: width of the hidden layers
    use_layer_norm: bool  # n_rnn only: normalise the memory before the values are read
    use_orthogonal: bool  # n_rnn only: orthogonal initial weights
    obs_agent_id: bool  # agents read which of the team they are
    obs_last_action: bool  # agents read their last action
    mixing_embed_dim: Width  # qmix: width of the mixing layer
    hypernet_embed: Width  # qmix: width of the networks that make the mixer's weights
    gnn_hidden_dim: Width  # gnn_rnn: features of an embedded node
    gnn_layer_num: Layers  # gnn_rnn: graph convolutions
    gnn_readout: Literal["pool", "entity"]  # gnn_rnn: values from the mean over nodes, or of `attack i` from node i

    use_graph_reconstruction: bool  # stages 1 and 2 exist, and stage 3 acts on their reconstructions
    use_full_obs: bool  # the agent sees everything: an upper bound, not a method
    mark_guesses: bool  # tell the agent which nodes are guesses
    reconstructer_stage: Stage | None  # stage to run; None: all
    recontructer_stage: Stage | None  # the published spelling of the same key
    pretrain_only: bool  # end after stage 2
    pretrained_tokenizer_path: str  # a tokenizer.th or its folder: stage 1 is skipped
    pretrained_mask_predictor_path: str  # a stage2_model.th or its folder: stage 2 is skipped
    pretrain_buffer_path: str  # folder with rank_<r>.episodes, one for each rank: read instead of playing
    save_pretrain_buffer: bool  # write the episodes of stages 1 and 2 to <run folder>/pretrain_buffer/
    graph_pretrain_epochs: Count  # updates of each of the stages 1 and 2
    graph_pretrain_episodes: Count  # episodes of stages 1 and 2 over all ranks; rounded up to whole rounds of all slots
    graph_pretrain_batch_size: Count  # episodes of one update
    graph_frames_at_once: Count  # agents' frames of an update that pass stages 1 and 2 together: bounds their memory
    graph_pretrain_eval_interval: Count  # epochs between measurements on the held-out episodes
    graph_pretrain_eval_episodes: Count  # held-out episodes over all ranks, rounded up likewise
    graph_pretrain_policy: str  # who plays them: random | mixed (scripted players) | path of a checkpoint
    graph_pretrain_random_share: Unit  # share of random actions under `mixed`
    graph_lr: Positive  # step size of Adam in stages 1 and 2
    tokenizer_config: TokenizerConfig
    mask_predictor_config: MaskPredictorConfig

    test_nepisode: Count  # greedy episodes of a test over all ranks; rounded up to whole rounds of all slots
    test_interval: Count  # environment steps over all ranks between tests; there is one at the start and at the end
    log_interval: Count  # environment steps over all ranks between logs
    runner_log_interval: Count  # the same for what playing tells: return_mean, ep_length_mean, epsilon, ...
    learner_log_interval: Count  # the same for what updates tell: loss_td, grad_norm, ...
    save_model: bool  # write weights
    save_model_interval: Count  # environment steps over all ranks between saved weights; the end is saved too
    enable_checkpointing: bool  # keep in checkpoints/ all that a killed run needs to go on as if nothing had been
    checkpoint_interval: Annotated[float, Field(ge=0.0)]  # seconds between checkpoints; 0: one after every iteration
    max_checkpoints_to_keep: Annotated[Int, Field(ge=2, le=10**6)]  # the newest ones; the best one stays beside them
    auto_resume: bool  # go on with the newest unfinished run of this configuration, if there is one
    auto_resume_wait: Annotated[float, Field(ge=0.0)]  # minutes to wait where another process uses that run; 0: reject
    resume: Literal["exact", "lossy", "weights"]  # what a damaged run may lose: nothing | episodes | all but weights
    max_restarts: Whole  # run=ddp: how often all ranks start again from the newest checkpoint when one was killed
    local_results_path: str  # folder of all run folders
    unique_token: str  # name of the run's folder, rejected if taken; empty: made from name, map, seed and time
    use_wandb: bool  # record in W&B, offline where there is no key
    wandb_project: str  # empty: made from map, stage and number of ranks
    wandb_entity: str  # W&B team; empty: the key's own
    use_tensorboard: bool  # write event files to <run folder>/tb/
    profile: bool  # write traces of a few iterations of each stage to <run folder>/profile/
    log_memory_usage: bool  # log the memory of every rank
    distributed_debug: bool  # compare checksums of all parameters over the ranks after every iteration

    evaluate: bool  # play checkpoint_path greedily instead of training; `evaluate RUN` sets it and reads config.json
    evaluation_only: bool  # stages 1 and 2 measure given modules on held-out episodes instead of training
    eval_report_episodes: Whole  # that evaluate and evaluation_only play, over all ranks; 0: as in training
    checkpoint_path: str  # run folder, its models/ or one step's folder: what is played, or trained on
    load_step: Whole  # of several saved steps the nearest to this one; 0: the last
    save_replay: bool  # with evaluate=True: let the environment write its replays; rejected where it has none

    @property
    def stage(self) -> Stage:
        """The stage to run, whichever spelling was used; without reconstruction there is stage 3 only."""
        if not self.use_graph_reconstruction:
            return "stage3"
        return self.reconstructer_stage or self.recontructer_stage or "all"

    @property
    def map_name(self) -> str:
        """The map or task, empty where the environment has none."""
        return str(self.env_args.get("map_name", ""))
