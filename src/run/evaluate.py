"""Playing what was trained: `evaluate=True checkpoint_path=…`."""

from __future__ import annotations

from omagd.envs.protocol import BatchedEnv
from omagd.run.build import build_mac, load_agent, load_products, of_checkpoint, require_same_weights
from omagd.run.session import Session
from omagd.run.stages.base import StageResult
from omagd.run.stages.stage3 import greedy_episodes
from omagd.utils.checkpoint import find_step_folder
from omagd.utils.errors import UserError


def evaluate(session: Session) -> StageResult:
    """Play `eval_report_episodes` (or `test_nepisode`) greedy episodes over all ranks with the saved agent."""
    config, info, device = session.config, session.info, session.dist.device
    if config.save_replay and type(session.env).save_replay is BatchedEnv.save_replay:
        raise UserError(f"save_replay=True: env={config.env} writes no replays; leave it out")
    folder = find_step_folder(config.checkpoint_path, config.load_step)
    products = load_products(of_checkpoint(config, folder), info, device)
    mac = build_mac(config, info, device, products)
    load_agent(mac, folder, "checkpoint_path")
    require_same_weights(session.dist, mac.agent, "checkpoint_path")
    t_env = int(folder.name) if folder.name.isdigit() else 0
    values = greedy_episodes(session, mac, config.eval_report_episodes or config.test_nepisode)
    values.update(session.mishaps())
    session.logger.log(values, stage="stage3", clock="t_env", t=t_env)
    if config.save_replay:
        session.env.save_replay(str(session.folder.replays))
    return StageResult("stage3", {"t_env": t_env}, values, {"agent": str(folder)})
