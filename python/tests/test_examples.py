# SPDX-License-Identifier: Apache-2.0
"""The examples on two ranks, a few steps on made-up images and on the project's own pages. torchrun starts one of the
trainings, as users do; it takes half a minute of processor time to import torch in all its processes, so the others are
started with the variables that torchrun sets. What they print last with --json is what is asserted on. A training that
is interrupted and resumed must end where the uninterrupted one does, bit for bit.
"""

import contextlib
import importlib.util
import json
import math
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from ranks import PATIENCE, free_port
from warm_python import Warm

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this torch has no Gloo", allow_module_level=True)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CODEC = "optquant:bits=4"


def torchrun(example, *words, ranks):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",  # a machine whose name has no address would wait for that, for a minute
        "127.0.0.1",
        "--nproc-per-node",
        str(ranks),
        str(EXAMPLES / example),
        *map(str, words),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd="/", env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def warm(example, *words, ranks):
    """What torchrun does, in processes that have imported torch already."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    command = [str(EXAMPLES / example), *map(str, words)]
    with contextlib.ExitStack() as stack:
        # Rank 0, which prints, is heard first: the others print nothing.
        processes = [
            stack.enter_context(Warm(command, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
            for rank in range(ranks)
        ]
        done = [process.communicate(PATIENCE) for process in processes]
    for code, _, errors in done:
        assert code == 0, errors.decode()[-4000:]
    return b"".join(out for _, out, _ in done).decode()


def last_line(example, *words, ranks=2, start=warm):
    return json.loads(start(example, *words, "--json", ranks=ranks).splitlines()[-1])


def cifar10(*words, ranks=2):
    return last_line("ddp_cifar10.py", "--synthetic", "--batch", 16, "--steps", 4, *words, ranks=ranks)


def gpt(*words, start=warm):
    shape = ["--layers", 2, "--width", 64, "--context", 64]
    return last_line("ddp_gpt.py", *shape, "--steps", 30, "--lr", 0.01, *words, start=start)


@pytest.fixture(scope="module")
def example_module():
    spec = importlib.util.spec_from_file_location("ddp_cifar10", EXAMPLES / "ddp_cifar10.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cifar10_without_a_codec_is_plain_ddp():
    plain = cifar10("--codec", "none", "--epochs", 1)
    assert plain["bits"] == 32 and plain["world"] == 2 and math.isfinite(plain["loss"])


def test_cifar10_resumed_ends_where_the_uninterrupted_training_ends(tmp_path):
    whole = cifar10("--codec", CODEC, "--epochs", 2)
    assert 4 <= whole["bits"] < 6  # 4.03, and what is small enough to travel as it is
    first = cifar10("--codec", CODEC, "--epochs", 2, "--until", 1, "--save", tmp_path / "half.pt")
    assert first["epoch"] == 1 and first["weights_sum"] != whole["weights_sum"]
    second = cifar10("--codec", CODEC, "--epochs", 2, "--resume", tmp_path / "half.pt")
    assert [second[name] for name in ("weights_sum", "loss", "test_accuracy")] == [
        whole[name] for name in ("weights_sum", "loss", "test_accuracy")
    ]
    alone = cifar10("--codec", CODEC, "--epochs", 2, "--resume", tmp_path / "half.pt", ranks=1)
    assert alone["world"] == 1 and alone["loss"] < first["loss"]


def test_gpt_learns_with_and_without_a_codec():
    plain, compressed = gpt("--codec", "none"), gpt("--codec", CODEC)
    assert compressed["bits"] < 6 and compressed["bytes"] < plain["bytes"] / 4
    for report in plain, compressed:
        assert report["held_out_loss"] < 4  # a model that knows nothing is at log(256) = 5.5
    assert abs(compressed["held_out_loss"] - plain["held_out_loss"]) < 0.3


def test_gpt_is_sharded_with_gradients_and_weights_compressed():
    report = gpt("--fsdp", "--codec", "qsgd:bits=4", "--weights", "unigrid:bits=8", start=torchrun)
    assert report["held_out_loss"] < 4


def test_an_example_without_torchrun_says_how_to_start_it():
    assert "RANK" not in os.environ
    with Warm([str(EXAMPLES / "ddp_gpt.py")]) as process:
        code, _, errors = process.communicate(PATIENCE)
    assert code == 2 and "torchrun" in errors.decode().splitlines()[-1]


def batches(count=3):
    """Six batches of a few images: names, labels and pixels."""
    draw = torch.Generator().manual_seed(1)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        yield name, torch.randint(10, (count,), generator=draw), torch.randint(
            256, (count, 3072), generator=draw, dtype=torch.uint8
        )


def test_the_four_forms_of_cifar10_read_alike(example_module, tmp_path):
    binary, python = tmp_path / "binary", tmp_path / "python"
    for folder in binary, python:
        folder.mkdir()
    for name, labels, pixels in batches():
        (binary / f"{name}.bin").write_bytes(
            torch.cat([labels.to(torch.uint8).unsqueeze(1), pixels], 1).numpy().tobytes()
        )
        (python / name).write_bytes(pickle.dumps({b"data": pixels.numpy(), b"labels": labels.tolist()}, protocol=2))
    for folder in binary, python:
        with tarfile.open(f"{folder}.tar.gz", "w:gz") as archive:
            archive.add(folder, "cifar-10")
    read = [example_module.cifar10(path) for path in (binary, python, f"{binary}.tar.gz", f"{python}.tar.gz")]
    (images, labels), (test_images, test_labels) = read[0]
    assert images.shape == (15, 3, 32, 32) and test_images.shape == (3, 3, 32, 32)
    wanted = list(batches())
    assert torch.equal(images[3:6].flatten(1), wanted[1][2]) and torch.equal(test_labels, wanted[5][1])
    for other in read[1:]:
        for mine, theirs in zip(read[0], other):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


def test_a_batch_that_would_run_code_is_refused(example_module):
    class Evil:
        def __reduce__(self):
            return os.system, ("true",)

    with pytest.raises(pickle.UnpicklingError, match="no place in CIFAR-10"):
        example_module.read_batch("data_batch_1", pickle.dumps({b"data": Evil()}))


def test_mirroring_and_moving_keep_the_image(example_module):
    image = torch.arange(32 * 32).float().view(1, 1, 32, 32).expand(64, 3, 32, 32)
    moved = example_module.augmented(image, torch.Generator().manual_seed(1))
    assert moved.shape == image.shape
    inner = moved[:, 0, 8:24, 8:24]  # no border gets here
    steps = inner[:, 0, 1] - inner[:, 0, 0]
    assert set(steps.tolist()) == {1.0, -1.0}  # some mirrored, some not
    assert torch.equal(inner[:, 1:] - inner[:, :-1], torch.full((64, 15, 16), 32.0))
    assert len({(one[0, 0].item()) for one in inner}) > 20  # moved differently
