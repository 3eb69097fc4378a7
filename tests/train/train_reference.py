# SPDX-License-Identifier: Apache-2.0
"""The training loop of one worker once more, in plain PyTorch: what `gradwire train --workers 1 --codec fp32` must
follow. Models have the parameter names of the program's, so that weights it exported load into them; the order of the
samples, crops and mirrors are computed from the formulas in src/train/data.h, everything else is torch's own.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(x):
    x = x ^ x >> np.uint64(30)
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ x >> np.uint64(27)
    x = x * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def keys(count, seed, epoch):
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is meant
        start = mix64(np.array([seed], np.uint64) + GOLDEN)
        return mix64(start ^ mix64(np.uint64(epoch << 32) | np.arange(count, dtype=np.uint64)))


def crops_and_mirrors(pixels, seed, epoch):
    """Every image {3, 32, 32} of an epoch as it enters a batch."""
    count, _, height, width = pixels.shape
    with np.errstate(over="ignore"):
        random = mix64(keys(count, seed, epoch) + GOLDEN)
    nine, low = np.uint64(9), np.uint64(0xFFFFFFFF)
    down = ((random & low) * nine >> np.uint64(32)).astype(int)
    right = ((random >> np.uint64(32) & np.uint64(0x7FFFFFFF)) * nine >> np.uint64(31)).astype(int)
    padded = np.pad(pixels, ((0, 0), (0, 0), (4, 4), (4, 4)))
    out = np.stack([padded[i, :, down[i]:down[i] + height, right[i]:right[i] + width] for i in range(count)])
    mirrored = (random >> np.uint64(63)).astype(bool)
    out[mirrored] = out[mirrored][..., ::-1]
    return out


# Models -------------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, inputs, width, depth, classes=10):
        super().__init__()
        sizes = [inputs, *[width] * depth, classes]
        for i in range(depth + 1):
            self.add_module(f"fc{i + 1}", nn.Linear(sizes[i], sizes[i + 1]))

    def forward(self, x):
        *hidden, last = self.children()
        x = x.flatten(1)
        for layer in hidden:
            x = torch.relu(layer(x))
        return last(x)


class Cnn(nn.Module):
    def __init__(self, width, side=28, channels=1, classes=10):
        super().__init__()
        left = (side + 1) // 2 // 4
        self.conv1 = nn.Conv2d(channels, width, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1)
        self.fc1 = nn.Linear(4 * width * left * left, 8 * width)
        self.fc2 = nn.Linear(8 * width, classes)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = F.max_pool2d(torch.relu(self.conv3(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


class Block(nn.Module):
    """Two convolutions; where channels double, the shortcut skips pixels and pads channels with zeros."""

    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride, self.padding = stride, (channels - channels_in) // 2

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = F.pad(x[:, :, ::self.stride, ::self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return torch.relu(x + y)


class Resnet20(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Block(16, 16, 1), Block(16, 16, 1), Block(16, 16, 1))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


# The loop -----------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """Images {count, channels, height, width} as bytes."""

    pixels: np.ndarray
    labels: np.ndarray
    test_pixels: np.ndarray
    test_labels: np.ndarray
    mean: list
    deviation: list
    augment: bool = False

    def batch(self, pixels, labels):
        mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.deviation))
        return (torch.from_numpy(pixels.copy()).float() / 255 - mean) / deviation, torch.from_numpy(labels).long()


@dataclass
class Settings:
    steps: int
    epochs: int
    batch: int
    accumulate: int = 1
    seed: int = 1
    optimizer: str = "sgd"
    rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    clip: float = 0
    schedule: str = "cosine"
    warmup: float = 0
    drop_at: list = field(default_factory=list)

    def arguments(self):
        """The same for the program."""
        given = {key.replace("_", "-"): value for key, value in vars(self).items()}
        given["drop-at"] = ",".join(map(str, self.drop_at))
        return [word for key, value in given.items() if value != "" for word in (f"--{key}", value)]


def optimizer_of(model, settings):
    if settings.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), settings.rate, momentum=settings.momentum,
                               weight_decay=settings.weight_decay)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.optimizer]
    return kind(model.parameters(), settings.rate, weight_decay=settings.weight_decay)


def share_of_rate(settings, step, per_epoch):
    warm = settings.warmup * per_epoch
    if step < warm:
        return (step + 1) / warm
    if settings.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (settings.steps - warm)))
    return 0.1 ** sum(step >= drop * per_epoch for drop in settings.drop_at)


def train(model, data, settings):
    """The loss of every step, and (loss, accuracy) on the test samples after each epoch."""
    optimizer = optimizer_of(model, settings)
    per_epoch = len(data.labels) // (settings.batch * settings.accumulate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(settings, step, per_epoch))
    losses, tests = [], []
    for step in range(settings.steps):
        epoch, place = divmod(step, per_epoch)
        order = np.argsort(keys(len(data.labels), settings.seed, epoch))
        pixels = crops_and_mirrors(data.pixels, settings.seed, epoch) if data.augment else data.pixels
        optimizer.zero_grad()
        loss_of_step = 0
        for k in range(settings.accumulate):
            first = (place * settings.accumulate + k) * settings.batch
            which = order[first:first + settings.batch]
            inputs, labels = data.batch(pixels[which], data.labels[which])
            loss = F.cross_entropy(model(inputs), labels) / settings.accumulate
            loss.backward()
            loss_of_step += loss.item()
        if settings.clip > 0:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        scheduler.step()
        losses.append(loss_of_step)
        if place + 1 == per_epoch or step + 1 == settings.steps:
            tests.append(test(model, data))
    return losses, tests


def test(model, data):
    model.eval()
    with torch.no_grad():
        inputs, labels = data.batch(data.test_pixels, data.test_labels)
        logits = model(inputs)
        result = F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()
    model.train()
    return result
