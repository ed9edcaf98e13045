"""Types, ranges and contradictions of the configuration; the values stand in `default.yaml`.

Keys keep the names of the published commands. Units: steps are environment steps summed over all ranks, sizes
are per rank unless a line says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Unit = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Stage = Literal["stage1", "stage2", "stage3", "all"]


def _as_tuple(value: object) -> object:
    """Return a YAML list, or one whole number, as the tuple that `seeds` holds."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


Seeds = Annotated[tuple[Whole, ...], BeforeValidator(_as_tuple)]


class Frozen(BaseModel):
    """Base of all configuration: never written again, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TokenizerConfig(Frozen):
    """Stage 1, the VQ-VAE over nodes."""

    n_codes: Annotated[int, Field(ge=2, le=32000)]
    code_dim: Count
    hidden_dim: Count
    n_layers: Count
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)]
    distance: Literal["l2", "cosine"]
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)]
    commitment: Annotated[float, Field(ge=0.0)]
    dead_code_threshold: Annotated[float, Field(ge=0.0)]  # of the mean EMA count of a code
    revive_interval: Whole  # updates between revivals; 0: never


class MaskPredictorConfig(Frozen):
    """Stage 2, the masked-token predictor."""

    d_model: Count
    n_layers: Count
    n_heads: Count
    feedforward_dim: Count
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)]
    mask_ratio: Annotated[float, Field(ge=0.0, lt=1.0)]  # of seen nodes, HIDDEN in training
    matching: Literal["none", "type"]
    early_steps: Whole
    early_step_weight: Annotated[float, Field(ge=0.0)]
    stacked_steps: Count  # k frames
    stacked_strip: Count  # s environment steps between two frames
    use_gru: bool
    last_seen: bool  # an unseen node carries the token it had when last seen, and its age
    code_features: bool  # token embeddings and head also know the features that codes decode to
    decode: Literal["argmax", "mean"]


class Config(Frozen):
    """One run, resolved and checked."""

    run: str
    env: str
    env_args: dict[str, Any]  # typed by the environment's own args_model
    learner: str
    mac: str
    agent: str
    mixer: str
    runner: str
    action_selector: str
    name: str
    seed: Whole
    seeds: Seeds  # several runs, one after another, ended by one table

    use_cuda: bool  # if there is one
    use_ddp: bool
    world_size: Count | None  # None: the visible GPUs, else 1
    ddp_port: Annotated[int, Field(ge=1024, le=65535)]
    dist_backend: Literal["nccl", "gloo"] | None
    dist_timeout_minutes: Positive
    lr_scaling: Literal["none", "sqrt", "linear"]
    torch_threads: Count
    cpu_inference: bool
    buffer_cpu_only: bool

    batch_size_run: Count  # battles per rank
    env_processes: bool  # single environments in worker processes
    buffer_size: Count  # episodes
    t_max: Count
    epsilon_start: Unit
    epsilon_finish: Unit
    epsilon_anneal_time: Count

    batch_size: Count  # episodes
    updates_per_iteration: Count
    gamma: Unit
    td_lambda: Unit
    double_q: bool
    lr: Positive
    grad_norm_clip: Positive
    target_update_interval: Count  # episodes over all ranks
    target_update_updates: Count | None  # counts updates instead when given
    use_per: bool

    rnn_hidden_dim: Count
    use_layer_norm: bool
    use_orthogonal: bool
    obs_agent_id: bool
    obs_last_action: bool
    mixing_embed_dim: Count
    hypernet_embed: Count
    gnn_hidden_dim: Count
    gnn_layer_num: Count
    gnn_readout: Literal["pool", "entity"]

    use_graph_reconstruction: bool
    use_full_obs: bool  # the agent sees everything: an upper bound, not a method
    mark_guesses: bool  # tell the agent which nodes are guesses
    reconstructer_stage: Stage | None
    recontructer_stage: Stage | None  # the published spelling of the same key
    pretrain_only: bool
    pretrained_tokenizer_path: str
    pretrained_mask_predictor_path: str
    pretrain_buffer_path: str
    save_pretrain_buffer: bool
    graph_pretrain_epochs: Count
    graph_pretrain_episodes: Count  # over all ranks
    graph_pretrain_batch_size: Count
    graph_pretrain_eval_interval: Count
    graph_pretrain_eval_episodes: Count  # over all ranks
    graph_pretrain_policy: str  # random | mixed | path of a checkpoint
    graph_pretrain_random_share: Unit  # of the actions under `mixed`
    graph_lr: Positive
    tokenizer_config: TokenizerConfig
    mask_predictor_config: MaskPredictorConfig

    test_nepisode: Count  # over all ranks
    test_interval: Count
    log_interval: Count
    runner_log_interval: Count
    learner_log_interval: Count
    save_model: bool
    save_model_interval: Count
    local_results_path: str
    unique_token: str  # name of the run's folder; empty: made from name, map, seed and time
    use_wandb: bool
    wandb_project: str
    wandb_entity: str
    use_tensorboard: bool

    evaluate: bool
    evaluation_only: bool
    eval_report_episodes: Whole
    checkpoint_path: str
    load_step: Whole
    save_replay: bool

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
