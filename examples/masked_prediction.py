"""Masked tokens (BERT, Devlin et al. 2019, arXiv:1810.04805) are what an agent of 3m does not see.

`python examples/masked_prediction.py --steps=500` trains a tokenizer, then the predictor, for so many steps each.
Agents see 4 cells far. One core, 16 s. Share of unseen units whose code, or death, the predictor names: .35, .46, .56
and .58 after steps 50, 100, 200 and 500; always naming the commonest gives .21.
"""

import torch
from battles import begin, play
from torch.nn.functional import cross_entropy
from vq_tokenizer import K, train, units

from omagd.config.loading import resolve
from omagd.modules.graph_reconstructers.graphs import GraphTables, obs_to_nodes
from omagd.modules.graph_reconstructers.predictor import MaskPredictor, PackedHistory

steps, (info, played), (_, held_out) = begin(500), play("pretrain", sight_range=4), play("held_out", sight_range=4)
layout = info.layout
tokenizer = train(layout, units(played, layout), units(held_out, layout), steps)
config = resolve(config="omagd_small").mask_predictor_config
predictor = MaskPredictor(config, K, layout, info.episode_limit)
predictor.bind(tokenizer.table())
MASK, ABSENT = predictor.specials.mask, predictor.specials.absent


def frames(batch):
    """Return all frames with an unseen unit: the predictor's input, which units are masked, and the true tokens."""
    full, played = obs_to_nodes(batch["full_obs"], layout), batch.valid_mask[:, None, None]
    seen, masked = (marks & played for marks in GraphTables(layout, full.device).sight(batch["obs"]))
    ids = torch.where(full.any(-1), tokenizer.ids(full), ABSENT)  # a dead unit has no code
    history = PackedHistory(torch.where(seen, ids, MASK), batch.packing, config, predictor.specials)
    rows, agents = masked.any(-1).nonzero(as_tuple=True)
    return history.frames(rows, agents), masked[rows, agents], ids[rows, agents]


x, masked, true = frames(played)
x_test, masked_test, true_test = frames(held_out)
optimizer = torch.optim.Adam(predictor.parameters(), lr=2e-3)
for step in range(1, steps + 1):
    some = torch.randint(len(x), (256,))
    m = masked[some]
    # BERT, section 3.1: L = -sum over masked i of log p(t_i | what is seen and remembered), as a mean.
    L = cross_entropy(predictor(x[some], m), true[some][m])
    optimizer.zero_grad()
    L.backward()
    optimizer.step()
    if step % max(1, steps // 10) == 0:
        with torch.no_grad():
            guess, t = predictor(x_test, masked_test).argmax(-1), true_test[masked_test]
        commonest = (t == t.mode().values).float().mean()
        print(f"step {step}: loss {L.item():.4f}, right {(guess == t).float().mean():.2f}, commonest {commonest:.2f}")
