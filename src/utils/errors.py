"""Errors that are shown to the user, and text that is safe to print."""

from __future__ import annotations

import contextlib
import difflib
import os
import select
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, ParamSpec

USER_ERROR_EXIT_CODE = 2
LONGEST_LINE = 1000
NEAR = 0.76
"""Least similarity of names for a hint: two of four letters, or one of them replaced, make another word."""


class UserError(Exception):
    """Errors that the user can fix: shown in one line each, exit code 2, no traceback.

    Args:
        messages: one or more; each with the key, the value and the fix.

    Attributes:
        said_by_rank_0: rank 0 raises the same error; other ranks do not print it.
    """

    def __init__(self, *messages: str) -> None:
        self.messages = tuple(readable(message) for message in messages)
        super().__init__(*self.messages)
        self.said_by_rank_0 = False

    def __str__(self) -> str:
        return self.message

    @property
    def message(self) -> str:
        """All messages, one on each line."""
        return "\n".join(self.messages)

    def on_all_ranks(self) -> UserError:
        """Mark the error as one that rank 0 also raises; return it."""
        self.said_by_rank_0 = True
        return self

    def render(self) -> str:
        """Return the lines for the terminal."""
        return "\n".join(f"error: {message}" for message in self.messages)


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f'pip install "omagd[{extra}]"'


def require_extra(needs: str, extra: str, *modules: str) -> None:
    """Require modules of an extra, without importing them. needs: what needs them. Errors: UserError names the fix."""
    packages = [module.partition(".")[0] for module in modules]  # to look for a submodule would import its package
    if missing := [package for package in packages if find_spec(package) is None]:
        raise UserError(f"{needs} needs {', '.join(missing)}: {install(extra)}")


def import_extra(needs: str, extra: str, module: str) -> Any:
    """Import a module of an extra. needs: what needs it. Errors: UserError where it is not installed, or broken."""
    require_extra(needs, extra, module)
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(f"{needs} needs {module}, which cannot be imported ({error}): {install(extra)}") from None


class Unchecked(Exception):
    """A check needs a value that is wrong, which another message already says: the check cannot be made."""


class Mistakes:
    """Mistakes of several checks, raised together.

    Attributes:
        complete: whether all files could be read; else it is not known what else would be wrong.
    """

    def __init__(self) -> None:
        self.complete = True
        self._places: dict[str, dict[str, None]] = {}  # by message, both in the order in which they were found
        self._on_all_ranks = True
        self._cause: BaseException | None = None

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, *messages: str) -> None:
        """Note mistakes."""
        self.note(UserError(*messages))

    def note(self, error: UserError, place: str = "") -> None:
        """Note the mistakes of an error. place: where they are written, if the messages do not say it."""
        for message in error.messages:
            self._places.setdefault(message, {})[place] = None
        self._on_all_ranks &= error.said_by_rank_0
        self._cause = self._cause or error.__cause__

    @contextmanager
    def caught(self, place: str = "") -> Iterator[None]:
        """Note the UserError of a block and go on after it."""
        try:
            yield
        except UserError as error:
            self.note(error, place)
        except Unchecked:
            pass

    def messages(self) -> tuple[str, ...]:
        """Return all mistakes, each once: with the first of its places, and the number of the others."""
        return tuple(_placed(message, list(places)) for message, places in self._places.items())

    def raise_any(self) -> None:
        """Raise all mistakes. Errors: UserError if there are any."""
        if self:
            error = UserError(*self.messages())
            raise (error.on_all_ranks() if self._on_all_ranks else error) from self._cause


def _placed(message: str, places: list[str]) -> str:
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{places[0]}{more}: {message}" if places[0] else message


@contextmanager
def collected(mistakes: Mistakes | None) -> Iterator[Mistakes]:
    """Collect mistakes in `mistakes`; with None raise those of the block at its end. Errors: UserError."""
    found = Mistakes() if mistakes is None else mistakes
    yield found
    if mistakes is None:
        found.raise_any()


P = ParamSpec("P")


def together(rule: Callable[P, Iterator[str]]) -> Callable[P, None]:
    """Make a function that yields messages one that raises a UserError with all of them."""

    @wraps(rule)
    def check(*args: P.args, **kwargs: P.kwargs) -> None:
        with collected(None) as found, found.caught():
            for message in rule(*args, **kwargs):
                found.add(message)

    return check


def readable(text: str) -> str:
    """Return `text` as one printable line, shortened in the middle if it is very long.

    Use it for names and contents of files, which may hold control characters.
    """
    line = visible(" ".join(text.split()))
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 255]} … {line[-250:]}"


def visible(text: str, kept: str = "") -> str:
    """Return `text` with unprintable characters escaped, except those in `kept`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


class RunFailed(RuntimeError):
    """A run has failed; the last line of the text is the reason, the lines above are those of a plug-in that failed."""

    def render(self) -> str:
        """Return the text for the terminal."""
        above, newline, reason = str(self).rpartition("\n")
        return visible(f"{above}{newline}error: {reason}", kept="\n")


class RankFailed(RunFailed):
    """One of several ranks has failed; the text holds its number and its traceback."""

    def render(self) -> str:
        """Return the text for the terminal."""
        return visible(f"error: {self}", kept="\n")


def exit_line(error: SystemExit) -> str:
    """Return one line on the place of the `sys.exit` that ended the run."""
    # Packages such as W&B replace `sys.exit` by their own function, which calls the next one: the
    # caller is in the frame before the first of them.
    hook = getattr(sys.exit, "__code__", None)
    where = "unknown place"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code is hook:
            break
        where = f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
    return f"sys.exit({'' if error.code is None else repr(error.code)}) was called before the run had ended ({where})"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean X?' for the known name that is spelled almost alike, or an empty string."""
    known = list(known)
    found = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
    if not found and 1 < len(name) < 4:  # too short for a share of letters: one name that differs in one, not the first
        alike = (other for other in known if len(other) == len(name) and other[0] == name[0])
        found = [other for other in alike if sum(a != b for a, b in zip(name, other, strict=True)) == 1]
    found = found or [other for other in known if sorted(other) == sorted(name)]  # two letters changed places
    return f" Did you mean '{found[0]}'?" if len(found) == 1 else ""


def foreign(kind: str, word: object) -> Row | None:
    """Return the row that has a word of another library. kind: "key" for a key, else what takes such names."""
    rows = KEYS if kind == "key" else NAMES.get(kind, ())
    return next((row for row in rows if str(word) in row.there.split()), None)


def unknown_name(key: str, name: str, known: Iterable[str], kind: str = "") -> UserError:
    """Return the error for `key=name`, with what it is here, else the nearest of the `known` names and all of them.

    kind: the key or option that takes such names, if not `key`.
    """
    known, row = list(known), foreign(kind or key, name)
    if row is not None:
        return UserError(f"{key}={name} is not {'known' if row.here else 'available here'}.{row.hint()}")
    return UserError(f"{key}={name} is not known.{nearest(name, known)} Known: {', '.join(known)}")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, and what caused it or was being handled when it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def libraries_of(command: str) -> Iterator[None]:
    """Turn the failure of a block to import another package into a UserError."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "a package").partition(".")[0]
        if package == "omagd":
            raise
        why = readable(str(error))[:200]
        raise UserError(f"{command}: {package} cannot be imported ({why}). Install it again") from error


def print_out(text: str) -> None:
    """Write `text` to standard output; the reader may stop early (`| head`)."""
    try:
        sys.stdout.write(visible(text, kept="\n"))
        sys.stdout.flush()
    except BrokenPipeError:
        # else Python reports the error again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_note(line: str) -> None:
    """Write a line to standard error, in a terminal over a progress bar, which another process may have drawn."""
    over = "\r\x1b[K" if sys.stderr.isatty() else ""
    sys.stderr.write(over + visible(f"{line}\n", kept="\n"))
    sys.stderr.flush()


def print_warning(line: str) -> None:
    """Write a warning to standard error."""
    print_note(f"warning: {line}")


def drop_lost_output() -> None:
    """Discard output to a closed terminal or to a pipe without a reader.

    Otherwise every write there fails, and so does what Python has buffered, at the latest when it exits.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # not a file
            handle = stream.fileno()
            poll = select.poll()
            poll.register(handle, select.POLLOUT)
            if any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0)):
                nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(nothing, handle)
                os.close(nothing)


# Keys and names of PyMARL, its forks and other libraries, and what they are here: the source of hints, and of the
# tables that docs/make_configuration.py writes to docs/coming_from_pymarl.md.
class Row(NamedTuple):
    """Words that mean one thing.

    Attributes:
        there: the words, between spaces. here: the same thing. near: the nearest in purpose, which is another thing.
        why: what else to know; the whole remedy where there is neither. taken: the word stands for `here`, without a
            message: it is in the commands of EPyMARL's README.
    """

    there: str
    here: str = ""
    near: str = ""
    why: str = ""
    taken: bool = False

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
    Row("optim", "optimizer"),
    Row("optim_alpha optim_eps", why="Leave it out: optimizer=rmsprop has PyMARL's, 0.99 and 0.00001"),
    Row("evaluation_epsilon", why="Leave it out: nobody explores in tests"),
    Row("agent_output_type mask_before_softmax save_probs", why="Leave it out: it follows from the learner"),
    Row("use_rnn", why="Leave it out: agent=n_rnn and agent=rnn have a memory, agent=ff has none"),
    Row("standardise_returns", why="Leave it out, or for PPO give learner_args.normalise_values"),
    Row("common_reward", "env_args.common_reward", why="taken as it is", taken=True),
    Row("reward_scalarisation", "env_args.reward_scalarisation", why="taken as it is", taken=True),
    Row("obs_individual_obs", why="Leave it out: learner_args.critic says what PPO's critic reads"),
    Row("critic critic_type", why="Leave it out, or for PPO give learner_args.critic: state or observation"),
    Row("q_nstep lambd lam tb_lambda", why="Leave it out: td_lambda, and learner_args.gae_lambda for PPO"),
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
    Row("return_priority", why="Leave it out: use_per=True draws by errors"),
    Row("hpn_hyper_dim", "agent_args.hyper_dim", why="of agent=hpn_rnn"),
    Row(
        "hpn_head_num hpn_hyper_activation",
        why="Leave it out: agent=hpn_rnn has one head, which can do what several do; ReLU",
    ),
    Row("hypergroup", why="Leave it out: groups of runs come from their configuration"),
)
_OWN = "Gymnasium's, PettingZoo's and PyMARL's environments: docs/environments.md; your own: docs/extending.md"
_WORLDS = (
    Row("smaclite", near="skirmish"),
    Row("one_step_matrix_game", near="matrix_game"),
    Row("gym gymnasium", "gymma", why="and env_args.key=… (docs/environments.md)"),
    Row("lbforaging foraging", "lbf"),
    Row("overcooked hanabi", "jaxmarl", why="and env_args.key=… (docs/jaxmarl.md)"),
    Row("gfootball football grf stag_hunt vmas mamujoco", why=_OWN),
)
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
    ),
    "--env-config": (
        Row("smac starcraft starcraft2 sc2_beta", "sc2"),
        Row("smacv2 smac_v2 sc2v2 sc2_v2 sc2wrapped", "sc2_v2_terran", why="or sc2_v2_protoss, sc2_v2_zerg"),
        *_WORLDS,
    ),
    "env": (
        Row("smac starcraft starcraft2", "sc2"),
        Row("smacv2 smac_v2 sc2v2 sc2wrapped", "sc2_v2"),
        *_WORLDS,
    ),
    "learner": (
        Row("q_learner", "nq_learner"),
        Row("dmaq_qatten_learner", "nq_learner", why="with mixer=qplex"),
        Row("max_q_learner", "wqmix_learner"),
        Row("maddpg_learner", "ddpg_learner", why="with learner_args.joint=True"),
        Row("q_learner_data_augmentation qtran_learner", near="nq_learner"),
        Row(
            "coma_learner actor_critic_learner pac_learner pac_dcg_learner offpg_learner policy_gradient_v2"
            " lica_learner fmac_learner",
            near="ppo_learner",
        ),
    ),
    "mac": (
        Row("hpn_mac ppo_mac", "n_mac"),
        Row("lica_mac dop_mac conv_mac updet_mac", near="n_mac"),
        Row("maddpg_mac", "ddpg_mac"),
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
