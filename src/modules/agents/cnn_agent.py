"""The agent of images: convolutions, then what `NRNNAgent` does.

Letters for shapes: S rows, n agents; H, W, C height, width and channels of an image.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config, Width
from omagd.modules.agents.agent import AgentInputs, NRNNAgent
from omagd.utils.errors import UserError


class CNNArgs(BaseModel):
    """`agent_args` of `cnn_rnn`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    # Channels, kernel, stride of each convolution. Atari's (Mnih et al. 2015): [[32,8,4],[64,4,2],[64,3,1]].
    layers: tuple[tuple[Width, Width, Width], ...] = ((16, 3, 1), (32, 3, 2))


class CNNAgent(NRNNAgent):
    """`NRNNAgent` that reads images: q = W_2 GRU(relu(W_1 c(x)), h), with convolutions c, each with a ReLU behind it.

    The first layers are those of DQN (Mnih et al. 2015, doi:10.1038/nature14236), in sizes for small images; W_1 reads
    the last action and the agent's number, too. Weights are shared by all agents.

    Errors: UserError where observations are no images, and for images that are smaller than a kernel.
    """

    args_model: ClassVar[type[BaseModel]] = CNNArgs
    reads_inferences = False

    def __init__(self, config: Config, info: EnvInfo) -> None:
        if info.image is None:
            raise UserError(f"agent={config.agent} reads images, and env={config.env} shows none. Use agent=n_rnn")
        parts: list[nn.Module] = []
        height, width, channels = info.image
        for out, kernel, stride in CNNArgs.model_validate(config.agent_args).layers:
            if kernel > min(height, width):
                raise UserError(
                    f"agent_args.layers: a kernel of {kernel} finds {height}x{width} pixels of an image of"
                    f" {info.image[0]}x{info.image[1]}. Give smaller kernels and strides, as in [[16,3,1]]"
                )
            parts += [nn.Conv2d(channels, out, kernel, stride), nn.ReLU()]
            height, width, channels = (height - kernel) // stride + 1, (width - kernel) // stride + 1, out
        super().__init__(config, replace(info, obs_dim=height * width * channels))
        self.image, self.convolutions = info.image, nn.Sequential(*parts)

    def encode(self, inputs: AgentInputs) -> tuple[Tensor, ...]:
        """Return the GRU's input [S, n, H]."""
        read = torch.cat([self.convolved(piece.features) for piece in inputs.pieces()])
        return (self.fc1.relu(read, inputs.last_action),)

    def convolved(self, pixels: Tensor) -> Tensor:
        """Return what the convolutions make of images [S, n, H W C], [S, n, outputs]."""
        images = pixels.flatten(0, 1).unflatten(-1, self.image).permute(0, 3, 1, 2)
        return self.convolutions(images).flatten(1).unflatten(0, pixels.shape[:2])
