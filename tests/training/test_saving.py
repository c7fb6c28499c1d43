"""A checkpoint is there in full or not at all; the one before it is kept for when the last is damaged."""

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from kvpath.errors import UserError
from kvpath.training.run_directory import RunDirectory, find_checkpoint, newest_whole
from kvpath.training.saving import Saving
from kvpath.training.stored_config import stored_step
from kvpath.training.whole_files import keep_as, put_in_place, remove, remove_leftovers, stand_in, write_whole
from tests.training.toys import Record, toy_data, toy_module, toy_trainer

STEPS = 6


def train(corpus: Path, folder: Path, every: str = "2 steps", resume: Path | None = None, **trainer: Any) -> Record:
    record = Record()
    callbacks = toy_trainer(record, Saving(folder, every), enable_checkpointing=True, **trainer)
    callbacks.fit(toy_module(), toy_data(corpus, steps=STEPS), ckpt_path=resume, weights_only=True)
    return record


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_two_and_the_best_are_kept(corpus: Path, tmp_path: Path) -> None:
    train(corpus, tmp_path)
    assert names(tmp_path) == ["best.ckpt", "last.ckpt", "previous.ckpt"]
    assert [stored_step(tmp_path / f"{name}.ckpt") for name in ("last", "previous")] == [6, 4]


class LastWhenItBegins(Callback):
    """The step of `last.ckpt` before the first step of a run that goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, -1

    def on_train_batch_start(self, *_: Any) -> None:
        if self.step < 0:
            self.step = stored_step(self.folder / "last.ckpt")


def test_what_a_run_goes_on_from_is_its_last_from_then_on(corpus: Path, tmp_path: Path) -> None:
    train(corpus, tmp_path)
    best = (tmp_path / "previous.ckpt").replace(tmp_path / "best.ckpt")
    seen = LastWhenItBegins(tmp_path)
    trainer = toy_trainer(Saving(tmp_path, "100 steps"), seen, enable_checkpointing=True)
    trainer.fit(toy_module(), toy_data(corpus, steps=STEPS), ckpt_path=best, weights_only=True)
    assert seen.step == 4
    assert [stored_step(tmp_path / f"{name}.ckpt") for name in ("last", "previous")] == [6, 4]


def test_a_folder_that_was_moved_away_for_nothing_is_put_back(tmp_path: Path) -> None:
    (tmp_path / "old-best.ckpt.tmp").mkdir()
    (tmp_path / "old-last.ckpt.tmp").mkdir()
    (tmp_path / "last.ckpt").mkdir()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["best.ckpt", "last.ckpt"]


@pytest.mark.parametrize("folder", [False, True])
def test_a_stand_in_is_the_same_and_stays_when_the_other_goes(tmp_path: Path, folder: bool) -> None:
    one, other = tmp_path / "one.ckpt", tmp_path / "other.ckpt"
    if folder:
        one.mkdir()
    file = one / "file" if folder else one
    write_whole(file, "content")
    write_whole(other, "else")
    stand_in(one, other)
    remove(one)
    assert (other / "file" if folder else other).read_text(encoding="utf-8") == "content"


def test_by_default_every_half_hour(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 100_000, 601))  # ten minutes and a second from one look at the clock to the next
    monkeypatch.setattr("kvpath.training.cadence.time.monotonic", lambda: float(next(now)))
    steps: list[int] = []
    save = Saving._save

    def count(self: Saving, trainer: Any, path: Path) -> None:
        save(self, trainer, path)
        if path == self.last:
            steps.append(trainer.global_step)

    monkeypatch.setattr(Saving, "_save", count)
    toy_trainer(Saving(tmp_path), enable_checkpointing=True).fit(toy_module(), toy_data(corpus, steps=STEPS))
    assert steps == [3, 6]


def killed_in_save(corpus: Path, folder: Path, number: int) -> int:
    """The signal that ended a process of its own, in which the disk had half of a checkpoint."""
    process = os.fork()
    if process == 0:
        save, saved = torch.save, [0]

        def half(checkpoint: Any, file: Any) -> None:
            save(checkpoint, file)
            saved[0] += 1
            if saved[0] == number:
                file.flush()
                os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        torch.save = half  # type: ignore[assignment] # in a process that ends here
        train(corpus, folder, limit_val_batches=0)
        os._exit(1)
    _, status = os.waitpid(process, 0)
    return os.WTERMSIG(status)


def test_a_kill_inside_a_save_leaves_the_one_before(corpus: Path, tmp_path: Path) -> None:
    whole = train(corpus, tmp_path / "whole", limit_val_batches=0)
    folder = tmp_path / "run"
    assert killed_in_save(corpus, folder, 2) == signal.SIGKILL
    assert names(folder) == ["last.ckpt", "last.tmp"]
    assert stored_step(folder / "last.ckpt") == 2
    again = train(corpus, folder, resume=folder / "last.ckpt", limit_val_batches=0)
    assert again.losses == whole.losses[2:]
    assert names(folder) == ["last.ckpt", "previous.ckpt"]
    a, b = (torch.load(place / "last.ckpt", weights_only=True)["state_dict"] for place in (folder, tmp_path / "whole"))
    assert all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing_more_leaves_the_one_before(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    train(corpus, tmp_path, max_steps=2)
    before = (tmp_path / "last.ckpt").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"for a checkpoint in .*; the one before it is still whole"):
        train(corpus, tmp_path, resume=tmp_path / "last.ckpt", limit_val_batches=0)
    assert (tmp_path / "last.ckpt").read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))


# The one before -------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(corpus: Path, tmp_path: Path) -> RunDirectory:
    """A run of six steps whose last checkpoint was cut short afterwards."""
    run = RunDirectory(tmp_path / "run")
    train(corpus, run.checkpoints, limit_val_batches=0)
    os.truncate(run.last, run.last.stat().st_size // 2)
    return run


def test_a_damaged_last_is_said_and_the_one_before_is_taken(
    damaged: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert newest_whole(damaged) == damaged.previous
    said = capsys.readouterr().err
    assert f"{damaged.last} is damaged" in said
    assert said.endswith("; going back to the one before it, step 4\n")
    os.truncate(damaged.previous, 100)
    with pytest.raises(UserError, match=r"previous.ckpt is damaged"):
        newest_whole(damaged)


def test_what_is_damaged_never_becomes_the_one_before(corpus: Path, damaged: RunDirectory) -> None:
    train(corpus, damaged.checkpoints, resume=damaged.previous, limit_val_batches=0)
    assert stored_step(damaged.previous) == 4
    assert stored_step(damaged.last) == 6


def test_between_two_names_the_one_before_is_found(damaged: RunDirectory) -> None:
    damaged.last.unlink()
    assert newest_whole(damaged) == damaged.previous
    assert find_checkpoint(damaged.path) == damaged.previous


def test_without_links_the_file_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    last, previous = tmp_path / "last", tmp_path / "previous"
    write_whole(last, "two")
    write_whole(previous, "one")
    keep_as(last, previous)
    assert (last.read_text(), previous.read_text()) == ("two", "two")
    monkeypatch.setattr(os, "link", no_links)
    write_whole(last, "three")
    keep_as(last, previous)
    assert (last.exists(), previous.read_text()) == (False, "three")


def test_folders_too(tmp_path: Path) -> None:
    for name, content in (("last.tmp", "new"), ("last", "old"), ("previous", "older")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(content, encoding="utf-8")
    keep_as(tmp_path / "last", tmp_path / "previous")
    put_in_place(tmp_path / "last.tmp", tmp_path / "last")
    assert {path.parent.name: path.read_text() for path in tmp_path.rglob("file")} == {"last": "new", "previous": "old"}
    (tmp_path / "last.tmp").mkdir()
    put_in_place(tmp_path / "last.tmp", tmp_path / "last")
    assert names(tmp_path) == ["last", "previous"]


def test_a_folder_takes_the_place_of_a_file_and_a_file_that_of_a_folder(tmp_path: Path) -> None:
    write_whole(tmp_path / "last", "a file")
    (tmp_path / "last.tmp").mkdir()
    put_in_place(tmp_path / "last.tmp", tmp_path / "last")
    assert (tmp_path / "last").is_dir()
    write_whole(tmp_path / "last", "a file")
    assert (tmp_path / "last").read_text(encoding="utf-8") == "a file"
    assert names(tmp_path) == ["last"]
