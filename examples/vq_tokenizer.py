"""VQ-VAE (van den Oord et al. 2017, arXiv:1711.00937) over the units of 3m: `examples/vq_tokenizer.py --steps=1500`.

One core, 13 s. Share of the variance of held-out units that 64 codes explain after steps 150, 300, 600 and 1500: .940,
.979, .985, .988; perplexity of the codes: 39, 39, 49, 50.
"""

import torch
from battles import begin, play
from torch.nn.functional import one_hot

from omagd.config.loading import resolve
from omagd.modules.graph_reconstructers.graphs import alive, obs_to_nodes
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer

K, beta, gamma = 64, 0.25, 0.99  # codes, commitment, decay of the codebook's averages


def units(batch, layout):
    """Return x, the nodes of living units in the graphs of living agents, [P, D]."""
    graphs = obs_to_nodes(batch["full_obs"][alive(batch["full_obs"])], layout)
    return graphs[graphs.any(-1)]


def train(layout, x_all, x_test, steps):
    """Return a tokenizer after `steps` updates by 512 units each."""
    tokenizer = Tokenizer(resolve(updates={"tokenizer_config.n_codes": K}).tokenizer_config, layout)
    optimizer = torch.optim.Adam(tokenizer.parameters(), lr=1e-3)
    tokenizer.place(torch.arange(K), tokenizer.encode(x_all[torch.randperm(len(x_all))[:K]]), 1.0)
    for step in range(1, steps + 1):
        x = x_all[torch.randint(len(x_all), (512,))]
        z = tokenizer.encode(x)  # z_e(x)
        k = tokenizer.quantize(z)  # argmin_j |z_e(x) - e_j| (eq. 1)
        e = tokenizer.codebook[k]  # z_q(x) = e_k (eq. 2)
        y = tokenizer.decoder(z + (e - z).detach())  # straight through: the gradient of e_k goes to z_e(x)
        L = (y - x).square().mean() + beta * (z - e).square().mean()  # eq. 3; its second term is the average below
        optimizer.zero_grad()
        L.backward()
        optimizer.step()
        with torch.no_grad():  # appendix A.1: N, m and e = m / N
            n = one_hot(k, K).float()
            tokenizer.cluster_size.lerp_(n.sum(0), 1 - gamma)
            tokenizer.embed_avg.lerp_(n.T @ z, 1 - gamma)
            tokenizer.codebook.copy_(tokenizer.embed_avg / tokenizer.cluster_size.clamp(min=1e-5)[:, None])
            if step % 10 == 0:  # codes that nothing chooses move to units of this batch
                tokenizer.place(dead := tokenizer.dead(), z[: len(dead)], tokenizer.cluster_size.mean())
        if step % max(1, steps // 10) == 0:
            ids = tokenizer.ids(x_test)
            explained = 1 - (tokenizer.table()[ids] - x_test).square().mean() / x_test.var(0).mean()
            p = one_hot(ids, K).float().mean(0)
            used = (-p * (p + 1e-10).log()).sum().exp()
            print(f"step {step}: loss {L.item():.4f}, explained {explained:.3f}, perplexity {used:.1f}")
    return tokenizer.eval()


if __name__ == "__main__":
    steps, (info, played), (_, held_out) = begin(1500), play("pretrain"), play("held_out")
    train(info.layout, units(played, info.layout), units(held_out, info.layout), steps)
