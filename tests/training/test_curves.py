from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvpath.training.curves import drop_events_after, event_files, write_hyper_parameters
from kvpath.training.watch import BY_TOKENS

TOKENS = 100


def write(folder: Path, steps: range) -> None:
    logger = TensorBoardLogger(folder.parent, name="", version=folder.name, default_hp_metric=False)
    for step in steps:
        logger.log_metrics({"train/loss": 1 / step}, step)
        logger.log_metrics({BY_TOKENS: 1 / step}, step * TOKENS)
    write_hyper_parameters(logger, {"model.layers": 2, "name": None, "tied": True}, {"train/loss": 0.5})
    logger.finalize("success")


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def steps_of(folder: Path, tag: str) -> list[int]:
    return [point.step for point in read(folder).Scalars(tag)]


def test_going_back_and_on_leaves_one_line_without_duplicates(tmp_path: Path) -> None:
    folder = tmp_path / "tb"
    write(folder, range(1, 8))
    drop_events_after(event_files(folder), 4)
    assert steps_of(folder, "train/loss") == [1, 2, 3, 4]
    assert steps_of(folder, BY_TOKENS) == [100, 200, 300, 400]
    write(folder, range(5, 10))
    assert steps_of(folder, "train/loss") == list(range(1, 10))
    assert steps_of(folder, BY_TOKENS) == [step * TOKENS for step in range(1, 10)]
    drop_events_after(event_files(folder), 6)
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert steps_of(folder, "train/loss") == list(range(1, 7))


def test_an_event_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "tb"
    write(folder, range(1, 4))
    (file,) = folder.glob("events.out.tfevents.*")
    file.write_bytes(file.read_bytes()[:-10])
    drop_events_after(event_files(folder), 3)
    write(folder, range(4, 6))
    assert steps_of(folder, "train/loss") == [1, 2, 3, 4, 5]


def test_hyper_parameters_add_no_points(tmp_path: Path) -> None:
    write(tmp_path / "tb", range(1, 3))
    events = read(tmp_path / "tb")
    assert events.Tags()["scalars"] == ["train/loss", BY_TOKENS]
    stored = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"model.layers" in stored
    assert b"tied" in stored


def test_nothing_to_go_back_in(tmp_path: Path) -> None:
    drop_events_after(event_files(tmp_path / "none"), 3)
    assert not (tmp_path / "none").exists()
