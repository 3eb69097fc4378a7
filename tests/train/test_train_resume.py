# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, stopped or run out of disk: they go on and end with the weights of an uninterrupted one, bit
for bit, or say what is wrong with what they find. Nothing that was saved is lost."""

import json
import resource
import shutil
import signal
import subprocess
import time

import pytest

import train_fixture as fixture
from train_fixture import BAD_INPUT, FAILED, INTERRUPTED, IO, USAGE, Live, call, refuse, train


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    fixture.make_idx(folder / "idx")
    fixture.make_cifar(folder / "cifar10", train=40, test=10)
    fixture.make_text(folder / "text.txt", characters=3000)
    return folder


MLP = ["--model", "mlp:width=16,depth=1", "--batch", 16]
CASES = {
    "learned levels": ["idx", *MLP, "--codec", "optquant:bits=2,refit=5", "--collective", "gather", "--epochs", 20],
    "residuals of both sides": ["idx", *MLP, "--codec", "topk:ratio=0.05", "--epochs", 20],
    "bits that follow the norm": ["idx", *MLP, "--codec", "dqsgd:budget=4,max=8", "--epochs", 20],
    "adam and clusters": ["idx", *MLP, "--codec", "casq:bits=2", "--optimizer", "adam", "--epochs", 20],
    "adamw and frequencies": ["idx", *MLP, "--codec", "fft:theta=0.8", "--optimizer", "adamw", "--clip", 1,
                              "--epochs", 20],
    "factors": ["idx", *MLP, "--codec", "lowrank:rank=2,alternate=on", "--epochs", 20],
    "dropout": ["idx", *MLP, "--codec", "onebit", "--dropout", 0.3, "--rules", "1d=fp32", "--epochs", 20],
    "accumulated": ["idx", *MLP, "--codec", "qsgd:bits=3", "--feedback", "on", "--accumulate", 2, "--epochs", 30,
                    "--bucket-mb", 0.01],
    "batch statistics": ["cifar10", "--task", "cifar10", "--model", "resnet20", "--batch", 2, "--codec",
                         "qsgd:bits=4", "--epochs", 7],
    "language": ["text.txt", "--task", "text", "--model", "gpt:layers=1,width=16,heads=2", "--length", 16, "--dropout",
                 0.2, "--batch", 8, "--codec", "rangefloat:bits=6,refit=4", "--epochs", 14],
}


def arguments_of(case, data):
    place, *rest = CASES[case]
    return ["--data", data / place, *rest, "--workers", 2, "--threads", 1]


@pytest.fixture(scope="session")
def small(data):
    return ["--data", data / "idx", *MLP, "--workers", 2, "--threads", 1, "--codec", "topk:ratio=0.05", "--epochs", 4]


@pytest.fixture(scope="session")
def uninterrupted(small):
    """The run of `small` that nothing disturbs. Many tests compare with it, and one is as good as another."""
    return train(*small)


def steps_in(folder):
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("step-*"))


# Killed -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, data, case):
    arguments = arguments_of(case, data)
    whole = train(*arguments)
    total = whole.of("start")[0]["total_steps"]
    saved = [*arguments, "--checkpoint", tmp_path / "saved", "--save-every", 5, "--resume"]
    reached = 0
    for share in 0.1, 0.25, 0.4:
        with Live(*saved) as live:
            assert live.until_step(max(int(share * total), reached + 6)), "ended too early"
            live.kill()
            assert live.process.returncode == -signal.SIGKILL, "the run was over before it was killed"
        reached = max(steps_in(tmp_path / "saved"))
        assert reached % 5 == 0 and reached > 0
    resumed = train(*saved)
    assert resumed.of("start")[0]["first_step"] == reached < total
    assert resumed.learned == whole.learned
    more = resumed.end["epochs"][-1]["bytes_sent"] - whole.end["epochs"][-1]["bytes_sent"]
    assert 0 <= more <= 3 * 40 * 1024, "what was sent before counts, and what four starts cost"
    by_step = {step["step"]: step["step_loss"] for step in whole.of("step")}
    assert all(step["step_loss"] == pytest.approx(by_step[step["step"]], rel=1e-9) for step in resumed.of("step"))
    assert steps_in(tmp_path / "saved")[-1] == total and len(steps_in(tmp_path / "saved")) <= 2


def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(tmp_path, data):
    arguments = ["--data", data / "idx", "--model", "mlp:width=200,depth=2", "--workers", 2, "--threads", 1, "--batch",
                 16, "--codec", "topk", "--epochs", 6]
    whole = train(*arguments)
    folder = tmp_path / "saved"
    saved = [*arguments, "--checkpoint", folder, "--save-every", 1, "--resume"]
    for _ in range(2):
        with Live(*saved) as live:
            live.until_step(max(steps_in(folder), default=0) + 2)  # one more is saved for certain
            # The run writes ahead until its pipe is full. Each line that is read lets it write the event of another
            # step, after which it saves: it is watched until a checkpoint is unfinished, and stopped there.
            while True:
                give_up = time.monotonic() + 1
                while not list(folder.glob("unfinished-*")) and time.monotonic() < give_up:
                    pass
                live.pause()
                if list(folder.glob("unfinished-*")):
                    break
                live.go_on()
                assert live.until(lambda line: '"event":"step"' in line), "the run was over before it was caught"
            live.kill()
        assert list(folder.glob("unfinished-*"))
    resumed = train(*saved)
    assert resumed.of("start")[0]["first_step"] > 0 and resumed.learned == whole.learned
    assert list(folder.glob("unfinished-*")) == []


def test_a_finished_run_is_resumed_without_training_again(tmp_path, small):
    saved = [*small, "--checkpoint", tmp_path / "saved", "--resume"]
    first = train(*saved)
    again = train(*saved, "--export", tmp_path / "weights.pt")
    assert again.learned == first.learned and again.of("step") == [] and (tmp_path / "weights.pt").exists()
    assert steps_in(tmp_path / "saved") == [24, 32], "a checkpoint an epoch, the two newest are kept"
    assert len(first.of("saved")) == 4


def test_a_run_that_diverged_is_resumed_all_the_same(tmp_path, small):
    arguments = [*small, "--rate", 1e6]
    whole = train(*arguments, code=FAILED)
    saved = [*arguments, "--checkpoint", tmp_path / "saved", "--save-every", 6, "--resume"]
    train(*saved, code=FAILED)
    for step in steps_in(tmp_path / "saved")[1:]:
        shutil.rmtree(tmp_path / "saved" / f"step-{step:09}")
    resumed = train(*saved, code=FAILED)
    assert resumed.of("start")[0]["first_step"] == 30 and resumed.end["skipped_steps"] > 0
    assert resumed.learned == whole.learned


def test_processes_go_on_where_threads_stopped(tmp_path, small, uninterrupted):
    if shutil.which("mpirun") is None or not json.loads(call("doctor", "--json")[0].splitlines()[0])["mpi_built"]:
        pytest.skip("no MPI")
    saved = [*small, "--checkpoint", tmp_path / "saved", "--save-every", 5, "--resume"]
    with Live(*saved) as live:
        live.until_step(8)
        live.kill()
    resumed = train(*saved, "--engine", "mpi", launcher=["mpirun", "-n", "2"], environment=fixture.MPI_ENVIRONMENT)
    assert resumed.of("start")[0]["first_step"] > 0 and resumed.learned == uninterrupted.learned


# Stopped ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def longer(small):
    """The arguments of a run that is long enough to be stopped, and that run when nothing stops it."""
    arguments = list(small)
    arguments[arguments.index("--epochs") + 1] = 40
    return arguments, train(*arguments)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_saves_and_goes_on(tmp_path, longer, number):
    arguments, whole = longer
    saved = [*arguments, "--checkpoint", tmp_path / "saved"]
    with Live(*saved) as live:
        assert live.until_step(20)
        live.process.send_signal(number)
        live.process.send_signal(number)  # a terminal and a launcher may both send it
        code, out, errors = live.rest()
    stopped = fixture.Run(code, out, errors)
    assert code == INTERRUPTED and errors == ""
    last = stopped.of("step")[-1]["step"]
    assert 20 <= last < 320 and steps_in(tmp_path / "saved")[-1] == last and not stopped.end["finished"]
    resumed = train(*saved, "--resume")
    assert resumed.of("start")[0]["first_step"] == last and resumed.learned == whole.learned


@pytest.mark.parametrize("kept, said", [(True, "stopped and saved"), (False, "nothing was saved")])
def test_people_are_told_whether_a_stopped_run_was_saved(tmp_path, small, kept, said):
    arguments = [*small, *(["--checkpoint", tmp_path / "saved"] if kept else [])]
    arguments[arguments.index("--epochs") + 1] = 2000
    with Live(*arguments, json_lines=False) as live:
        assert live.until(lambda line: line.split()[:1] == ["2"])
        live.interrupt()
        code, out, errors = live.rest()
    assert code == INTERRUPTED and errors == "" and said in out.splitlines()[-1]
    assert (tmp_path / "saved").exists() == kept


def test_people_see_the_epochs_before_when_a_run_goes_on(tmp_path, small):
    saved = [*small, "--checkpoint", tmp_path / "saved"]
    call("train", *saved)
    shutil.rmtree(tmp_path / "saved" / "step-000000032")
    out, _ = call("train", *saved, "--resume")
    assert "going on from step 24 of 32" in out
    assert [line.split()[0] for line in out.splitlines()[3:7]] == ["1", "2", "3", "4"]


# Refused ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory, small):
    folder = tmp_path_factory.mktemp("saved_once") / "saved"
    train(*small, "--checkpoint", folder, "--save-every", 16)
    assert steps_in(folder) == [16, 32]
    return folder


@pytest.fixture
def saved(tmp_path, small, saved_once):
    """Checkpoints of the middle and of the end of a run, and its arguments: a copy, which a test may damage."""
    shutil.copytree(saved_once, tmp_path / "saved")
    return tmp_path / "saved", [*small, "--checkpoint", tmp_path / "saved", "--save-every", 16]


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_used_directory_is_not_overwritten(saved):
    folder, arguments = saved
    before = content(folder)
    refuse(USAGE, [str(folder), "step 32", "--resume"], *arguments)
    assert content(folder) == before


@pytest.mark.parametrize("name, option, value", [
    ("rate", "--rate", 0.01), ("model", "--model", "mlp:width=17,depth=1"), ("codec", "--codec", "topk:ratio=0.06"),
    ("workers", "--workers", 4), ("seed", "--seed", 2), ("batch", "--batch", 8),
    ("collective", "--collective", "gather"), ("optimizer", "--optimizer", "adam"), ("epochs", "--epochs", 5),
    ("momentum", "--momentum", 0.8), ("schedule", "--schedule", "constant"), ("limit", "--limit", 200),
    ("task", "--task", "mnist"), ("bucket_mb", "--bucket-mb", 0.01),
])
def test_other_settings_are_refused_by_name(saved, name, option, value):
    folder, arguments = saved
    before = content(folder)
    changed = list(arguments)
    if option in changed:
        changed[changed.index(option) + 1] = value
    else:
        changed += [option, value]
    refuse(USAGE, [str(folder), f"{name} =", "resume with the same settings"], *changed, "--resume")
    assert content(folder) == before


def test_data_may_have_moved(saved, tmp_path):
    folder, arguments = saved
    moved = tmp_path / "moved"
    shutil.copytree(arguments[1], moved)
    assert train("--data", moved, *arguments[2:], "--resume").of("start")[0]["first_step"] == 32


def damage(path, how):
    if how == "removed":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "longer":
        path.write_bytes(path.read_bytes() + b"\n")
    else:
        bytes_ = bytearray(path.read_bytes())
        bytes_[len(bytes_) // 2] ^= 1
        path.write_bytes(bytes_)


@pytest.mark.parametrize("how", ["removed", "empty", "cut", "flipped", "longer"])
def test_every_damaged_file_of_a_checkpoint_is_refused_by_name(saved, how):
    folder, arguments = saved
    newest = folder / "step-000000032"
    names = sorted(path.name for path in newest.iterdir())
    assert names == ["manifest.json", "rank-0-bucket-0.residuals", "rank-0.pt", "rank-1-bucket-0.residuals",
                     "rank-1.pt", "state.json", "weights.pt"]
    for name in names:
        if (name, how) == ("manifest.json", "longer"):
            continue  # a line end more is the same JSON
        good = (newest / name).read_bytes()
        damage(newest / name, how)
        before = content(folder)
        done = subprocess.run([fixture.PROGRAM, "train", *fixture.words(arguments), "--resume"], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=fixture.SECONDS)
        assert done.returncode == BAD_INPUT, f"{name} {how}: {done.returncode} {done.stderr}"
        assert done.stderr.count("\n") == 1 and "step-000000032/" in done.stderr, done.stderr
        # A digit of a hash in the manifest may be what is wrong with any file.
        assert name in done.stderr or (name == "manifest.json" and "manifest" in done.stderr), done.stderr
        assert content(folder) == before, "an older checkpoint is not used silently, nor anything removed"
        (newest / name).write_bytes(good)
    assert train(*arguments, "--resume").end["finished"]


def test_after_the_broken_checkpoint_is_removed_the_older_one_serves(saved, uninterrupted):
    folder, arguments = saved
    shutil.rmtree(folder / "step-000000032")
    refuse(USAGE, "step 16", *arguments)
    resumed = train(*arguments, "--resume")
    assert resumed.of("start")[0]["first_step"] == 16 and resumed.learned == uninterrupted.learned


@pytest.mark.parametrize("name, how", [
    *((name, how) for name in ("manifest.json", "weights.pt", "rank-1-bucket-0.residuals")
      for how in ("removed", "empty", "cut", "flipped")),
    ("every file", "empty folder"),
])
def test_the_checkpoint_before_a_damaged_one_is_named_and_taken_if_asked_for(saved, uninterrupted, how, name):
    folder, arguments = saved
    newest = folder / "step-000000032"
    if how == "empty folder":
        shutil.rmtree(newest)
        newest.mkdir()
    else:
        damage(newest / name, how)
    before = content(folder)
    refuse(BAD_INPUT, ["step-000000032/", "step 16 is whole", "--resume-previous"], *arguments, "--resume")
    assert content(folder) == before
    resumed = train(*arguments, "--resume-previous")
    start, = resumed.of("start")
    assert start["first_step"] == 16 and start["set_aside"]["step"] == 32
    assert resumed.learned == uninterrupted.learned
    aside = folder / "step-000000032.damaged"
    assert start["set_aside"]["path"] == str(aside)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000016", newest.name, aside.name]
    kept = {path.relative_to(newest.name): data for path, data in before.items() if path.parts[0] == newest.name}
    assert content(aside) == kept, "nothing of it is lost"
    assert train(*arguments, "--resume").of("start")[0]["first_step"] == 32, "the new one is whole"


def test_a_whole_checkpoint_is_resumed_whichever_option_asks_for_it(saved):
    folder, arguments = saved
    before = content(folder)
    assert train(*arguments, "--resume-previous").of("start")[0]["first_step"] == 32
    assert content(folder) == before


def test_nothing_is_resumed_where_no_checkpoint_is_whole(saved):
    folder, arguments = saved
    for step in 16, 32:
        damage(folder / f"step-0000000{step}/weights.pt", "cut")
    before = content(folder)
    for option in "--resume", "--resume-previous":
        refuse(BAD_INPUT, ["step-000000032/weights.pt", "no older checkpoint is whole"], *arguments, option)
    assert content(folder) == before


def test_what_else_lies_beside_checkpoints_is_left_alone(saved):
    folder, arguments = saved
    (folder / "step-000000032").rename(folder / "step-000000032-before-the-paper")
    (folder / "step-by-step.txt").write_text("notes")
    assert train(*arguments, "--resume").of("start")[0]["first_step"] == 16
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-000000016", "step-000000032", "step-000000032-before-the-paper", "step-by-step.txt"]


# A full disk --------------------------------------------------------------------------------------------------------


def largest(folder):
    return max(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="session")
def every_tenth_saved(tmp_path_factory, small):
    folder = tmp_path_factory.mktemp("every_tenth_saved") / "saved"
    train(*small, "--checkpoint", folder, "--save-every", 10)
    return folder


@pytest.mark.parametrize("share", [0.9, 0.4, 0.0])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, small, uninterrupted, every_tenth_saved, share):
    """Files that may not grow, as on a full disk: the largest ones, most, all."""
    folder = tmp_path / "saved"
    saved = [*small, "--checkpoint", folder, "--save-every", 10]
    shutil.copytree(every_tenth_saved, folder)
    shutil.rmtree(folder / "step-000000032")
    before = content(folder)
    limit = int(share * largest(folder))
    out, errors = call("train", *saved, "--resume", "--json", code=IO,
                       preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert "unfinished-32/" in errors and "File too large" in errors, errors
    assert "checkpoint of step 30 is whole" in errors
    assert content(folder) == before
    assert train(*saved, "--resume").learned == uninterrupted.learned


def test_a_disk_that_is_really_full(tmp_path, small, uninterrupted):
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", mount], stderr=subprocess.DEVNULL)
    if made.returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        saved = [*small, "--checkpoint", mount / "saved", "--save-every", 10]
        _, errors = call("train", *saved, "--json", code=IO)
        assert "No space left on device" in errors and "is whole" in errors and "unfinished-" in errors, errors
        kept = steps_in(mount / "saved")
        assert kept and list((mount / "saved").glob("unfinished-*")) == []
        subprocess.run(["mount", "-o", "remount,size=20m", mount], check=True)
        resumed = train(*saved, "--resume")
        assert resumed.of("start")[0]["first_step"] == kept[-1] and resumed.learned == uninterrupted.learned
    finally:
        subprocess.run(["umount", mount], check=True)


def test_an_export_to_a_full_disk_leaves_the_older_file(tmp_path, small):
    path = tmp_path / "weights.pt"
    path.write_text("older")
    call("train", *small, "--export", path, "--json", code=IO,
         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)))
    assert path.read_text() == "older" and list(tmp_path.iterdir()) == [path]
