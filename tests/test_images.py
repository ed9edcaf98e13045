"""Observations that are images: what environments say of them, and the agent that reads them."""

import numpy as np
import pytest
import torch
from q_toys import INFO, toy_config

import omagd
from omagd.config.env_info import EnvInfo
from omagd.envs.factory import make_env
from omagd.modules.agents.cnn_agent import CNNAgent
from omagd.run.cli.main import config_from

FIGURES = "--env-config=pettingzoo with agent=cnn_rnn use_cuda=False env_args.key=foreign_worlds:Figures".split()


@pytest.mark.parametrize(("name", "key", "image"), [
    ("pettingzoo", "Figures", (6, 6, 3)), ("gymma", "Figures-v0", (6, 6, 3)), ("pymarl", "Filmed", (3, 2, 1)),
])  # fmt: skip
def test_worlds_say_the_shape_of_images_and_show_bytes_as_numbers_up_to_one(name, key, image):
    env = make_env(name, {"key": f"foreign_worlds:{key}", **({"time_limit": 4} if name == "gymma" else {})}, 1, False)
    env.reset(np.ones(1, bool), np.array([1]))
    seen, info = env.observe().obs, env.info
    assert (info.image, EnvInfo.from_dict(info.to_dict())) == (image, info) and "x".join(map(str, image)) in info.sizes
    assert seen.sum() == (10 if key != "Filmed" else 12 * np.float32(env.observe().state[0, 0] / 5)) and seen.any()
    assert key != "Figures" or (env.observe().state == seen.reshape(1, -1)).all()
    assert key != "Figures-v0" or env.observe().avail_actions[0].tolist() == [[1, 1, 1, 0]] * 2
    old = {name: value for name, value in info.to_dict().items() if name != "image"}
    assert EnvInfo.from_dict(old).image is None
    with pytest.raises(ValueError, match="an image of another size"):
        EnvInfo.from_dict(old | {"image": [6, 6, 1]})


def test_a_pixel_reaches_the_kernels_that_cover_it():
    agent = CNNAgent(toy_config(agent="cnn_rnn", agent_args={"layers": [[7, 3, 1]]}), INFO)
    images = torch.zeros(2, 1, 5, 6, 1)
    images[1, 0, 3, 4] = 1
    with torch.no_grad():
        agent.convolutions[0].bias.fill_(9.0)  # so that no ReLU hides a change
        without, read = agent.convolved(images.flatten(2)).view(2, 7, 3, 4)
    assert (without != read).all(0).nonzero().tolist() == [[1, 2], [1, 3], [2, 2], [2, 3]]


def test_figures_anywhere_in_a_picture_are_told_apart(tmp_path):
    words = "t_max=4000 epsilon_anneal_time=2000 gamma=0 td_lambda=0 lr=0.003 rnn_hidden_dim=32 test_nepisode=64 seed=1"
    words += f" save_model=False enable_checkpointing=False test_interval=100000 local_results_path={tmp_path}"
    results = omagd.run(config_from(["--config=vdn", *FIGURES, *words.split()]))
    assert results["stages"]["stage3"]["values"]["test_return_mean"] > 7  # of 8; 2 by guessing
