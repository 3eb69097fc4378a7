# SPDX-License-Identifier: Apache-2.0
"""Two ranks that train a tiny model with a framework, for test_frameworks.py:

    python framework_ranks.py lightning|transformers|accelerate FOLDER

The framework is imported once, and the ranks are forks. They train six steps; then two steps, with a checkpoint, after
which they are killed. New ranks resume from the checkpoint, and from one without the state of gradwire. At last three
ranks begin with the checkpoint of the two. FOLDER/RANK.pt has what came out.
"""

import os
import shutil
import signal
import sys
import textwrap
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import free_port

import gradwire
import gradwire.torch as gw

CODEC = "topk:ratio=0.1"
OPTIONS = {"min_elements": 64, "warmup": 1}  # with the exchange of momentum after one step
STEPS, HALF, BATCH = 6, 2, 4
RANKS = {1: 2, 2: 2, 3: 3}  # of each phase


def net():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def samples():
    """Two steps of two ranks are an epoch. Ranks have different data, or residuals would not differ."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(HALF * 2 * BATCH, 8, generator=generator), torch.randn(HALF * 2 * BATCH, 4, generator=generator)


def dataset():
    return torch.utils.data.TensorDataset(*samples())


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def result(model, hook):
    return {"weights": weights(model), "hash": hook.residual_hash(), "step": hook.step, "stats": hook.stats()}


def run_page(name, folder):
    """The program of the documentation of a framework, as a user would copy it."""
    page = (Path(__file__).resolve().parents[2] / f"docs/{name}.md").read_text()
    lines = page.partition("<!-- run -->")[2].splitlines()
    last = next(n for n, line in enumerate(lines) if line and not line.startswith("    "))
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    found = {"__name__": "page"}
    exec(compile(textwrap.dedent("\n".join(lines[:last])), f"docs/{name}.md", "exec"), found)
    hook = found.get("hook") or found.get("compress", found.get("trainer")).hook
    assert hook.stats()["optimizer"]["phase"] == "compressed" and hook.stats()["ratio"] > 1
    hook.remove()


# Each framework: train(folder, steps, resume) -> a result. It saves after every epoch.
# grown(folder): the state that one more rank begins with.


def import_lightning():
    global L, Compress, Logged, Module
    import lightning as L
    from lightning.pytorch.loggers.logger import DummyLogger

    from gradwire.torch.lightning import Compress

    class Logged(DummyLogger):
        def __init__(self):
            super().__init__()
            self.steps = []

        def log_metrics(self, metrics, step):
            if "gradwire/ratio" in metrics:
                self.steps.append(step)

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, _):
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)


def train_lightning(folder, steps, resume):
    import lightning.pytorch.callbacks as callbacks

    compress = Compress(CODEC, optimizer=True, log_every=HALF, **OPTIONS)
    saves = callbacks.ModelCheckpoint(dirpath=folder, save_last=True, every_n_epochs=1)
    logger = Logged()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=steps // HALF, callbacks=[compress, saves],
        logger=logger, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        gradient_clip_algorithm="norm",
    )  # fmt: skip
    module = Module()
    loader = torch.utils.data.DataLoader(dataset(), batch_size=BATCH)
    trainer.fit(module, loader, ckpt_path=str(folder / "last.ckpt") if resume else None)
    assert compress.hook.stats()["optimizer"]["clip"] == 1.0
    assert logger.steps == [step for step in range(HALF, steps + 1, HALF) if not resume or step > HALF]
    return result(module, compress.hook)


def grown_lightning(folder):
    class State(L.Callback):
        def on_train_start(self, trainer, pl_module):
            self.found = compress.hook.state_dict()

    compress, state = Compress(CODEC, optimizer=True, **OPTIONS), State()
    trainer = L.Trainer(
        accelerator="cpu", devices=3, strategy="ddp", max_epochs=2, callbacks=[compress, state], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(dataset(), batch_size=BATCH)
    trainer.fit(Module(), loader, ckpt_path=str(folder / "last.ckpt"))
    return state.found


def more_lightning(_):
    """compress finds the DDP around a LightningModule in training, and inside the module of Fabric."""

    class Inside(L.Callback):
        def on_train_start(self, trainer, pl_module):
            hook = gw.compress(pl_module, "fp32")
            self.found = hook._ddp() is trainer.strategy.model
            hook.remove()

    inside = Inside()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=1, callbacks=[inside], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(dataset(), batch_size=BATCH))
    assert inside.found
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    hook = gw.compress(model, CODEC, optimizer=optimizer, **OPTIONS)
    for _ in range(3):
        fabric.backward(model(torch.ones(1, 8) + fabric.global_rank).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert hook.stats()["optimizer"]["steps"] == 3
    hook.remove()


def states_lightning(folder):
    return torch.load(folder / "last.ckpt", weights_only=False)["gradwire"]


def strip_lightning(folder):
    checkpoint = torch.load(folder / "last.ckpt", weights_only=False)
    del checkpoint["gradwire"]
    torch.save(checkpoint, folder / "last.ckpt")


def import_transformers():
    global transformers, CompressMixin, Trainer, Model
    import transformers

    from gradwire.torch.transformers import CompressMixin

    class Trainer(CompressMixin, transformers.Trainer):
        codec = CODEC

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, y):
            return {"loss": torch.nn.functional.mse_loss(self.net(x), y)}


def transformers_trainer(folder, steps):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, max_steps=steps, save_steps=HALF, use_cpu=True,
        report_to=[], disable_tqdm=True, lr_scheduler_type="constant", learning_rate=0.01, logging_strategy="no",
        dataloader_num_workers=0, train_sampling_strategy="sequential",
    )  # fmt: skip
    data = [{"x": x, "y": y} for x, y in zip(*samples())]
    return Trainer(model=Model(), args=arguments, train_dataset=data, codec_options={"optimizer": True, **OPTIONS})


def train_transformers(folder, steps, resume):
    trainer = transformers_trainer(folder, steps)
    trainer.train(resume_from_checkpoint=True if resume else None)
    assert trainer.hook.stats()["optimizer"]["clip"] == 1.0  # the default max_grad_norm
    return result(trainer.model, trainer.hook)


def grown_transformers(folder):
    trainer = transformers_trainer(folder, HALF + 1)
    states = []
    attached = trainer._attached

    def and_watch(model):
        hook = attached(model)
        load = hook.load_state_dict
        hook.load_state_dict = lambda state: (load(state), states.append(hook.state_dict()))
        return hook

    trainer._attached = and_watch
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}"))
    return states[0]


def more_transformers(_):
    """A mixin at the wrong place would do nothing."""
    try:
        type("Wrong", (transformers.Trainer, CompressMixin), {})
    except gradwire.UsageError as error:
        assert "write class Wrong(CompressMixin, Trainer)" in str(error)
    else:
        raise AssertionError("the mixin is hidden by the Trainer")
    try:
        type("Alone", (CompressMixin,), {"codec": CODEC})()
    except gradwire.UsageError as error:
        assert "Alone is no Trainer" in str(error)


def states_in(folder):
    return [torch.load(folder / f"gradwire_{rank}.pt")["states"][0] for rank in range(2)]


def states_transformers(folder):
    return states_in(folder / f"checkpoint-{HALF}")


def strip_transformers(folder):
    for path in sorted(folder.glob("checkpoint-*/gradwire_*.pt")):
        path.unlink()


def import_accelerate():
    global accelerate, attach
    import accelerate

    from gradwire.torch.accelerate import attach


def accelerated(accelerator):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(dataset(), batch_size=BATCH)
    return accelerator.prepare(model, optimizer, loader)


def train_accelerate(folder, steps, resume):
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader = accelerated(accelerator)
    hook = attach(accelerator, model, CODEC, optimizer, **OPTIONS)
    done = 0
    if resume:
        accelerator.load_state(str(folder / "state"))
        done = HALF
    for _ in range((steps - done) // HALF):
        for x, y in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(str(folder / "state"))
        accelerator.wait_for_everyone()
    return result(model, hook)


def grown_accelerate(folder):
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, _ = accelerated(accelerator)
    hook = attach(accelerator, model, CODEC, optimizer, **OPTIONS)
    accelerator.load_state(str(folder / "state"))
    return hook.state_dict()


def more_accelerate(folder):
    """Two models of one accelerator, of which one gets a second hook; and states that do not fit."""
    accelerator = accelerate.Accelerator(cpu=True)
    models = [accelerator.prepare(net()) for _ in range(2)]
    old = attach(accelerator, models[0], CODEC, min_elements=64)
    hooks = [attach(accelerator, model, CODEC, min_elements=64) for model in models]

    def step(factor):
        for model in models:
            x = torch.ones(1, 8) * (factor + accelerator.process_index)
            accelerator.backward(factor * model(x).square().mean())

    step(1.0)
    models[1](torch.ones(1, 8)).sum().backward()  # so that the two states differ
    kept = [hook.residual_hash() for hook in hooks]
    accelerator.save_state(str(folder / "two"))
    step(2.0)
    assert kept[0] != kept[1] and all(hook.residual_hash() != one for hook, one in zip(hooks, kept))
    accelerator.load_state(str(folder / "two"))
    assert [hook.residual_hash() for hook in hooks] == kept and old.step == 0
    file = folder / "two/gradwire_1.pt"
    whole = file.read_bytes()
    for content, refused in (
        (b"not a file of torch", "gradwire_1.pt cannot be read"),
        (whole, "for 2 models, and there are 1 compressed models now"),
    ):
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            file.write_bytes(content)
        accelerator.wait_for_everyone()
        try:
            accelerator.load_state(str(folder / "two"))
        except gradwire.Error as error:
            assert refused in str(error), error  # on both ranks
        else:
            raise AssertionError(f"no error: {refused}")
        hooks[1].remove()
    hooks[0].remove()


def states_accelerate(folder):
    return states_in(folder / "state")


def strip_accelerate(folder):
    for path in sorted((folder / "state").glob("gradwire_*.pt")):
        path.unlink()


def run_rank(name, folder, rank, port, phase):
    world = str(RANKS[phase])
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    train = globals()[f"train_{name}"]
    if phase == 1:
        run_page(name, folder / "page")
        globals()[f"more_{name}"](folder)
        found = {"whole": train(folder / "whole", STEPS, False)}
        train(folder / "parts", HALF, False)
        dist.barrier()
        torch.save(found, folder / f"{rank}.pt")
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    if phase == 3:
        torch.save(globals()[f"grown_{name}"](folder / "old"), folder / f"grown_{rank}.pt")
        return
    found = torch.load(folder / f"{rank}.pt", weights_only=False)
    found["saved"] = globals()[f"states_{name}"](folder / "parts")
    if rank == 0:
        shutil.copytree(folder / "parts", folder / "old")
        shutil.copytree(folder / "parts", folder / "stripped")
        globals()[f"strip_{name}"](folder / "stripped")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found["resumed"] = train(folder / "parts", STEPS, True)
    found["warnings"] = [str(one.message) for one in heard if "gradwire" in str(one.message)]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found["stripped"] = train(folder / "stripped", STEPS, True)
    found["stripped warnings"] = [str(one.message) for one in heard if "gradwire" in str(one.message)]
    torch.save(found, folder / f"{rank}.pt")


def run_phase(name, folder, phase):
    port, children = free_port(), []
    for rank in range(RANKS[phase]):
        child = os.fork()
        if child == 0:
            try:
                run_rank(name, folder, rank, port, phase)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    assert hasattr(gw, "compress")
    globals()[f"import_{name}"]()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a fork has one thread, and this process has {threads}"
    codes = run_phase(name, folder, 1)
    assert codes == [-signal.SIGKILL] * 2, codes
    for phase in (2, 3):
        codes = run_phase(name, folder, phase)
        assert codes == [0] * RANKS[phase], codes
