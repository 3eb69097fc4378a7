# SPDX-License-Identifier: Apache-2.0
"""The closed loop of Adam's momentum exchange between replicas: a small GPT, two replicas of two shards, AdamW. The
rival sends the gradients of the same training through the same codec.
"""

import math
import warnings

import pytest

torch = pytest.importorskip("torch")
test_hsdp = pytest.importorskip("test_hsdp")  # skips where torch has no such replicas

import gradwire.torch as gw
import torch.distributed.fsdp as fsdp
from test_hsdp import _MESHES, meshes, run  # noqa: F401
from torch import nn

STEPS, WIDTH, WORDS, LENGTH = 120, 32, 16, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).split(WIDTH, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class SmallGpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, text):
        x = self.words(text) + self.places(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def texts(count, seed, draw):
    """Of a language in which a word depends on the one before it."""
    likely = torch.softmax(3 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(seed)), dim=-1)
    text = torch.randint(WORDS, (count, 1), generator=draw)
    while text.shape[1] <= LENGTH:
        text = torch.cat([text, torch.multinomial(likely[text[:, -1]], 1, generator=draw)], dim=1)
    return text


def learns(rank, shape, seed, codec, named):
    torch.manual_seed(seed)
    model = fsdp.fully_shard(SmallGpt(), mesh=_MESHES[shape])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    options = dict(optimizer=optimizer, steps=STEPS) if named else {}
    draw, held_out = (torch.Generator().manual_seed(1000 * seed + number) for number in (rank.rank, 99))

    def loss_of(text):
        return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the rival, which names no optimizer
        gw.compress(model, codec, **options)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(texts(16, seed, draw)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return loss_of(texts(256, seed, held_out)).item()


@pytest.fixture(scope="module")
def exact(meshes):  # noqa: F811
    return {seed: run(meshes, (2, 2), learns, seed, "fp32", False)[0] for seed in (1, 2)}


# When this was written momentum with onebit lost 0.004 and 0.002, and gradients 0.035 and 0.020; with topk 0.033 and
# 0.026, and 0.079 and 0.087.
@pytest.mark.parametrize("codec, seed", [("onebit", 1), ("onebit", 2), ("topk:ratio=0.03", 1)])
def test_momentum_loses_less_than_gradients(meshes, exact, codec, seed):  # noqa: F811
    ours, rival = (run(meshes, (2, 2), learns, seed, codec, named) for named in (True, False))
    assert len(set(ours)) == 1 and exact[seed] < 0.5 * math.log(WORDS)
    assert ours[0] - exact[seed] < 0.6 * (rival[0] - exact[seed]), (ours[0], rival[0], exact[seed])
