"""Shards are the same bytes whoever makes them, in however many attempts; and they read like a corpus."""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvpath.data.corpus import build_corpus
from kvpath.data.prepare.estimate import estimate
from kvpath.data.prepare.job import Job
from kvpath.data.prepare.run import _no_room_said, plan_shards, prepare
from kvpath.data.prepare.worker import PartMaker, Progress
from kvpath.data.prepare.writer import RegionWriter
from kvpath.data.regions import Region, Split
from kvpath.data.shards import ShardFolder, ShardPlan
from kvpath.data.sources import Files, Prepared, Source
from kvpath.data.tokenizer import Tokenizer, TokenizerConfig
from kvpath.errors import UserError
from tests.data.conftest import WORDS

HOLDOUT = 10
SHARD_BYTES = 20_000

SCRIPT = """
import sys
from pathlib import Path
from kvpath.data.prepare.run import plan_shards, prepare
from kvpath.data.sources import Files
from kvpath.data.tokenizer import TokenizerConfig
files, tokenizer, output = sys.argv[1:]
source, tokenizer = Files([files]), TokenizerConfig(tokenizer).load()
plan = plan_shards(source, len(source.parts()), tokenizer, "toy", {holdout}, shard_bytes={shard_bytes})
prepare(source, tokenizer, plan, Path(output), workers=2)
"""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Three parts of two or three shards, and one of a few documents."""
    folder = tmp_path_factory.mktemp("many")
    choose = random.Random(0)
    for k, n in enumerate((2300, 1500, 2100, 5)):
        texts = [" ".join(choose.choices(WORDS, k=choose.randrange(8))) for _ in range(n)]
        rows = [json.dumps({"text": text}) for text in texts]
        (folder / f"{k}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return Files([str(folder / "*.jsonl")])


@pytest.fixture(scope="module")
def toy(many: Files) -> Tokenizer:
    return TokenizerConfig("train", vocab_size=280).load(lambda: many.documents(), "many")


def plan_of(source: Source, tokenizer: Tokenizer, max_tokens: int | None = None) -> ShardPlan:
    return plan_shards(source, len(source.parts()), tokenizer, "toy", HOLDOUT, max_tokens, SHARD_BYTES)


@pytest.fixture(scope="module")
def made(many: Files, toy: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards in one go; only to be read."""
    directory = tmp_path_factory.mktemp("made") / "shards"
    assert prepare(many, toy, plan_of(many, toy), directory, workers=1) is not None
    return directory


def content(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_shards_hold_every_document_once_in_its_region(many: Files, toy: Tokenizer, made: Path) -> None:
    folder = ShardFolder(made)
    assert [shard.name for shard in folder.shards] == [
        "00000-0000", "00000-0001", "00000-0002", "00001-0000", "00001-0001", "00002-0000", "00002-0001", "00002-0002",
        "00003-0000",
    ]  # fmt: skip
    folder.verify()
    for region, corpus in folder.corpora().items():
        texts = list(Split(HOLDOUT).documents(many, region))
        expected = [[*ids, toy.end_of_text] for ids in toy.encode_batch(texts)]
        assert corpus.tokens[:].tolist() == [token for ids in expected for token in ids]
        assert corpus.offsets[:].tolist() == np.cumsum([0, *map(len, expected)]).tolist()
        manifest = corpus.manifest
        assert (manifest.n_documents, manifest.n_tokens) == (len(texts), len(corpus.tokens))
        assert manifest.n_bytes == sum(len(text.encode()) for text in texts)
        assert manifest.dtype == "uint16"


def test_they_equal_the_corpus_that_training_would_make(many: Files, toy: Tokenizer, made: Path) -> None:
    direct = build_corpus(many, toy, Split(HOLDOUT))
    for region, corpus in Prepared(str(made)).corpora(toy, Split(HOLDOUT)).items():
        assert np.array_equal(corpus.tokens[:], direct[region].tokens[:])
        assert np.array_equal(corpus.offsets[:], direct[region].offsets[:])


def test_any_workers_and_jobs_make_the_same_bytes(many: Files, toy: Tokenizer, made: Path, tmp_path: Path) -> None:
    prepare(many, toy, plan_of(many, toy), tmp_path / "two", workers=2)
    assert content(tmp_path / "two") == content(made)
    for job in (Job(3, 3), Job(1, 3)):
        assert prepare(many, toy, plan_of(many, toy), tmp_path / "jobs", workers=1, job=job) is None
    with pytest.raises(UserError, match="jobs is not finished: the same `kvpath prepare` goes on with it"):
        ShardFolder(tmp_path / "jobs")
    assert prepare(many, toy, plan_of(many, toy), tmp_path / "jobs", workers=1, job=Job(2, 3)) is not None
    assert content(tmp_path / "jobs") == content(made)


def test_a_call_without_job_finishes_what_jobs_began(many: Files, toy: Tokenizer, made: Path, tmp_path: Path) -> None:
    directory = tmp_path / "shards"
    prepare(many, toy, plan_of(many, toy), directory, workers=1, job=Job(2, 2))
    before = {path: path.stat().st_mtime_ns for path in directory.glob("train/*")}
    prepare(many, toy, plan_of(many, toy), directory, workers=1)
    assert content(directory) == content(made)
    assert {path: path.stat().st_mtime_ns for path in before} == before  # what was done is not made again


KILLS: dict[str, Callable[[Path], bool]] = {
    "when the plan is there": lambda directory: (directory / "plan.json").exists(),
    "while the first shards are written": lambda directory: bool(list(directory.glob("train/*.part"))),
    "after the first record": lambda directory: bool(list(directory.glob("shards/*.json"))),
    "after a third of the records": lambda directory: len(list(directory.glob("shards/*.json"))) >= 3,
}


@pytest.mark.parametrize("when", KILLS)
def test_killed_and_gone_on_with_it_is_the_same_bytes(
    when: str, many: Files, toy: Tokenizer, made: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "shards"
    process = _begun(many, toy, directory, tmp_path)
    while process.poll() is None and not KILLS[when](directory):
        time.sleep(0.0005)
    os.kill(process.pid, signal.SIGKILL)  # its workers find out for themselves
    assert process.wait() == -signal.SIGKILL
    prepare(many, toy, plan_of(many, toy), directory, workers=1)
    _wait_for_the_end_of(process.pid)
    assert content(directory) == content(made)


def test_workers_that_a_killed_process_left_are_waited_for(
    many: Files, toy: Tokenizer, made: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "shards"
    process = _begun(many, toy, directory, tmp_path)
    while process.poll() is None and not KILLS["while the first shards are written"](directory):
        time.sleep(0.0005)
    os.killpg(process.pid, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(prepare, many, toy, plan_of(many, toy), directory, 1)
        with pytest.raises(TimeoutError):
            again.result(timeout=4)
        os.killpg(process.pid, signal.SIGCONT)
        assert again.result() is not None
    _wait_for_the_end_of(process.pid)
    assert content(directory) == content(made)


def _begun(source: Files, tokenizer: Tokenizer, directory: Path, scratch: Path) -> "subprocess.Popen[bytes]":
    """A process that prepares, with a session of its own."""
    tokenizer.save(scratch / "tokenizer.json")
    script = SCRIPT.format(holdout=HOLDOUT, shard_bytes=SHARD_BYTES)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", script, source.files[0], str(scratch / "tokenizer.json"), str(directory)]
    return subprocess.Popen(arguments, env=environment, start_new_session=True)


def _wait_for_the_end_of(session: int) -> None:
    """Workers that outlive their parent for a moment."""
    for _ in range(100):
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("workers go on without their parent")


def test_missing_and_cut_files_are_made_again(many: Files, toy: Tokenizer, made: Path, tmp_path: Path) -> None:
    directory = tmp_path / "shards"
    shutil.copytree(made, directory)
    (directory / "train" / "00000-0001.tokens").unlink()
    os.truncate(directory / "test" / "00002-0000.offsets", 8)
    (directory / "train" / "00002-0001.tokens.0123.part").write_bytes(b"left over")
    with pytest.raises(UserError, match=r"00000-0001.tokens has 0 bytes, not [\d,]+; its SHA-256 was [0-9a-f]{64}: .*"):
        ShardFolder(directory).corpora()
    prepare(many, toy, plan_of(many, toy), directory, workers=1)
    assert content(directory) == content(made)


def test_a_flipped_bit_is_named_with_both_checksums(made: Path, tmp_path: Path) -> None:
    directory = tmp_path / "shards"
    shutil.copytree(made, directory)
    path = directory / "train" / "00001-0000.tokens"
    changed = bytearray(path.read_bytes())
    changed[100] ^= 1
    path.write_bytes(changed)
    ShardFolder(directory).corpora()
    with pytest.raises(UserError, match=r"00001-0000.tokens: SHA-256 should be [0-9a-f]{64}, found [0-9a-f]{64}; del"):
        ShardFolder(directory).verify()


def test_a_share_of_the_tokens_is_taken_from_each_part(many: Files, toy: Tokenizer, tmp_path: Path) -> None:
    whole = build_corpus(many, toy, Split(HOLDOUT))["train"].manifest.n_tokens
    limit = whole // 2
    folder = prepare(many, toy, plan_of(many, toy, limit), tmp_path / "one", workers=1)
    assert folder is not None
    n = folder.total["train"]["tokens"]
    small_part = sum(len(ids) + 1 for ids in toy.encode_batch([text for _, text in many.parts()[3].numbered()]))
    assert limit - limit / 4 <= n <= limit - limit / 4 + small_part + 4 * 50
    per_part = [sum(s.regions["train"].tokens for s in folder.shards if s.part == part) for part in range(3)]
    assert all(limit / 4 <= tokens < limit / 4 + 50 for tokens in per_part)
    prepare(many, toy, plan_of(many, toy, limit), tmp_path / "two", workers=2)
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_skipped_documents_are_counted(many: Files, toy: Tokenizer, tmp_path: Path) -> None:
    for k in range(2):
        (tmp_path / f"{k}.jsonl").write_text('{"text": "good"}\nbad\n{"text": "better"}\nworse\n')
    source = Files([str(tmp_path / "*.jsonl")])
    with pytest.raises(UserError, match=":2: not JSON"):
        prepare(source, toy, plan_of(source, toy), tmp_path / "refused", workers=1)
    source = replace(source, bad_documents="skip")
    folder = prepare(source, toy, plan_of(source, toy), tmp_path / "skipped", workers=1)
    assert folder is not None
    assert folder.skipped == 4
    assert sum(total["documents"] for total in folder.total.values()) == 4


def test_another_plan_is_refused_by_name(many: Files, toy: Tokenizer, made: Path) -> None:
    other = replace(plan_of(many, toy), holdout_every=20, n_parts=5)
    with pytest.raises(UserError, match="was begun with holdout_every 10, which is now 20.*; .*n_parts 4, which is"):
        prepare(many, toy, other, made)


def test_one_process_at_a_time(many: Files, toy: Tokenizer, made: Path, tmp_path: Path) -> None:
    directory = tmp_path / "shards"
    shutil.copytree(made, directory)
    hold = "import fcntl, sys; f = open(sys.argv[1], 'a+b'); fcntl.lockf(f, fcntl.LOCK_EX, 1, 2); print(); input()"
    holder = subprocess.Popen([sys.executable, "-c", hold, str(directory / ".lock")], stdin=-1, stdout=-1)
    assert holder.stdout is not None
    holder.stdout.readline()
    for job in (None, Job(2, 3)):
        with pytest.raises(UserError, match="another `kvpath prepare` is at work in"):
            prepare(many, toy, plan_of(many, toy), directory, job=job)
    prepare(many, toy, plan_of(many, toy), directory, job=Job(1, 3))
    holder.communicate(b"\n")


@pytest.mark.parametrize("text", ["3", "0/2", "3/2", "a/b", "1/0", "-1/2"])
def test_jobs_that_cannot_be(text: str) -> None:
    with pytest.raises(UserError, match=f"--job must be J/N with J from 1 to N, such as 3/8, got '{text}'"):
        Job.parse(text)


def maker(source: Source, tokenizer: Tokenizer, directory: Path) -> PartMaker:
    plan = plan_of(source, tokenizer)
    for name in ("shards", *plan.regions):
        (directory / name).mkdir(parents=True)
    context = multiprocessing.get_context("spawn")
    progress = Progress(context.Array("q", 4), context.Array("d", plan.n_parts), context.Event())
    return PartMaker(source.parts()[0], 0, tokenizer, plan, directory, progress)


def test_a_full_disk_leaves_nothing_half_made(
    many: Files, toy: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, left = RegionWriter.add, [4]

    def until_full(self: RegionWriter, *arguments: object) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return add(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(RegionWriter, "add", until_full)
    with (
        pytest.raises(UserError, match="cannot write to /x: No space left on device; make room, and"),
        _no_room_said(Path("/x"), None),
    ):
        maker(many, toy, tmp_path).run()
    assert {path.name for path in tmp_path.glob("*/*")} == {
        "00000-0000.tokens", "00000-0000.offsets", "00000-0000.json"
    }  # fmt: skip


def test_an_estimate_is_near(many: Files, toy: Tokenizer, made: Path, tmp_path: Path) -> None:
    found = estimate(many, toy, plan_of(many, toy))
    total = ShardFolder(made).total.values()
    assert found.parts == 4
    assert found.documents == pytest.approx(sum(n["documents"] for n in total), rel=0.02)
    assert found.tokens == pytest.approx(sum(n["tokens"] for n in total), rel=0.02)
    assert found.text_bytes == pytest.approx(sum(n["bytes"] for n in total), rel=0.02)
    written = sum(path.stat().st_size for kind in ("tokens", "offsets") for path in made.rglob(f"*.{kind}"))
    assert found.file_bytes == pytest.approx(written, rel=0.02)
    half = estimate(many, toy, plan_of(many, toy, (found.tokens or 0) // 2))
    assert half.tokens == pytest.approx((found.tokens or 0) // 2, abs=1)
    unknown = estimate(replace(many, max_documents=10), toy, plan_of(replace(many, max_documents=10), toy))
    assert (unknown.sampled_documents, unknown.tokens) == (10, None)


def test_prepared_shards_refuse_what_they_were_not_made_with(
    many: Files, toy: Tokenizer, made: Path, tokenizer: Tokenizer
) -> None:
    source = Prepared(str(made))
    assert source.label == many.label
    with pytest.raises(
        UserError, match="data.tokenizer is not the one that .* was made with .*; data.holdout_every is"
    ):
        source.corpora(tokenizer, Split(20))
    assert set(source.corpora(toy, Split())) == {"train", "validation", "test"}
    assert source.own_split(Split()) == Split(HOLDOUT)
    with pytest.raises(UserError, match="holds tokens, not text: state data.stream: false"):
        next(source.documents())


def test_their_own_tokenizer_is_used(toy: Tokenizer, made: Path) -> None:
    source = Prepared(str(made))
    for name in ("train", "toy"):
        own = source.tokenizer(name)
        assert own is not None
        assert own.fingerprint == toy.fingerprint
    assert source.tokenizer("gpt2") is None


def test_shards_that_hold_out_nothing_are_evaluated_on_as_a_whole(toy: Tokenizer, many: Files, tmp_path: Path) -> None:
    plan = plan_shards(many, 4, toy, "toy")
    prepare(many, toy, plan, tmp_path / "shards", workers=1)
    regions: list[Region] = ["validation", "test"]
    for region in regions:
        corpora = Prepared(str(tmp_path / "shards")).corpora(toy, Split(rest=region))
        assert corpora[region].manifest.region == region
        assert corpora[region].manifest.n_documents == 5905


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda text: "[]", "manifest.json is not the manifest of prepared shards: a JSON object is wanted"),
        (lambda text: text[:20], "manifest.json is not the manifest of prepared shards: "),
        (lambda text: text.replace('_version": 1', '_version": 9'), "has format_version 9, this kvpath reads 1"),
    ],
)
def test_a_manifest_that_is_none(made: Path, tmp_path: Path, break_it: Callable[[str], str], message: str) -> None:
    text = (made / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(break_it(text))
    with pytest.raises(UserError, match=message):
        ShardFolder(tmp_path)


def test_a_worker_imports_no_torch() -> None:
    code = "import sys, kvpath.data.prepare.worker; print('torch' in sys.modules, 'lightning' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).split() == ["False"] * 2
