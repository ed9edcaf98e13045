"""The import path of TD(lambda) targets that plug-ins know; they are part of `utils/packing.py`."""

from omagd.utils.packing import batch_targets, rewards_of_agents, td_lambda_targets

__all__ = ["batch_targets", "rewards_of_agents", "td_lambda_targets"]
