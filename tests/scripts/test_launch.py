"""The scripts that launch: when SLURM's requeues, and mistakes of a site, with stand-ins for programs."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.nodes import LAUNCHERS, Node, all_gone, environment, free_port, wait_for_steps
from tests.runs import metrics_of, write_config

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")

SRUN = """#!/usr/bin/env bash
# one task for each of SLURM_NTASKS, all on this machine; a signal goes to all of them, the highest code is given
echo "srun $*" >> "$LOG"
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=0 SLURM_NODEID=$i "$@" & tasks+=($!)
done
trap 'kill -USR1 "${tasks[@]}"' USR1
highest=0
for task in "${tasks[@]}"; do
    while code=0; wait "$task" || code=$?; kill -0 "$task" 2> /dev/null; do :; done
    if [[ $code -gt $highest ]]; then highest=$code; fi
done
exit "$highest"
"""


def program(folder: Path, name: str, text: str) -> None:
    """A stand-in on a PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def slurm(folder: Path) -> dict[str, str]:
    """What SLURM would have set, and stand-ins that write down how they are called."""
    program(folder / "bin", "scontrol", '#!/usr/bin/env bash\necho "scontrol $*" >> "$LOG"\n')
    path = f"{folder / 'bin'}{os.pathsep}{environment()['PATH']}"
    return {"PATH": path, "LOG": str(folder / "log"), "VENV": "", "SLURM_JOB_ID": "4217", "SLURM_CPUS_PER_TASK": "3"}


@pytest.mark.parametrize("code", [0, 1, 2, 75, 130, 137])
def test_slurm_requeues_on_75_only(code: int, tmp_path: Path) -> None:
    variables = slurm(tmp_path)
    says = 'echo "srun $SRUN_CPUS_PER_TASK $*" >> "$LOG"'
    program(tmp_path / "bin", "srun", f"#!/usr/bin/env bash\n{says}\nexit {code}\n")
    command = ["bash", str(LAUNCHERS / "slurm.sbatch"), "-c", "model/98m", "--name", "two words"]
    ended = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=False)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == "srun 3 --kill-on-bad-exit=1 kvpath fit --ckpt_path last -c model/98m --name two words"
    assert lines[1:] == ["scontrol requeue 4217"] * (code == 75)
    assert (ended.returncode, ended.stderr) == (0 if code == 75 else code, "")


def test_what_slurm_is_asked_for_stands_at_the_top() -> None:
    lines = (LAUNCHERS / "slurm.sbatch").read_text().splitlines()
    found = [re.match(r"#SBATCH --([a-z-]+)(?:=(\S+))?$", line) for line in lines]
    asked = {match[1]: match[2] for match in found if match}
    assert sum(line.startswith("#SBATCH") for line in lines) == len(asked)
    assert asked.items() >= {("requeue", None), ("open-mode", "append"), ("signal", "USR1@120")}
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert {"partition", "time", "nodes", "cpus-per-task", "output"} <= asked.keys()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:])  # sbatch would not read them


@pytest.mark.slow
def test_two_tasks_of_slurm_are_told_requeue_and_go_on(tmp_path: Path) -> None:
    changes = {"data__budget__tokens": 20_000 * 64, "every__validate": "1000000 steps"}
    config, run = write_config(tmp_path, **changes), tmp_path / "run"
    variables = {**slurm(tmp_path), "SLURM_JOB_NAME": "kvpath", "SLURM_NODELIST": "127.0.0.1"}
    variables |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2"}
    variables |= {"MASTER_PORT": str(free_port())}
    program(tmp_path / "bin", "srun", SRUN)
    program(tmp_path / "bin", "kvpath", f'#!/usr/bin/env bash\nexec {sys.executable} -m kvpath "$@"\n')
    command = [str(LAUNCHERS / "slurm.sbatch"), "-c", str(config), "-c", "hardware/ddp", "--run", str(run)]
    command += ["--trainer.precision", "32-true"]
    first = Node(tmp_path / "first.txt", command, **variables)
    with all_gone(first):
        wait_for_steps(run, 3, first)
        (srun,) = [
            int(pid) for pid in Path(f"/proc/{first.process.pid}/task/{first.process.pid}/children").read_text().split()
        ]
        os.kill(srun, signal.SIGUSR1)
        assert first.ended() == 0, first.said[-4000:]
    assert (tmp_path / "log").read_text().splitlines()[-1] == "scontrol requeue 4217"
    stopped = metrics_of(run)[-1]["step"]
    assert f"SIGUSR1: saved and stopped at step {stopped:,}" in first.said
    again = Node(tmp_path / "again.txt", [*command, "--trainer.max_steps", str(stopped + 2)], **variables)
    with all_gone(again):
        assert again.ended() == 0, again.said[-4000:]
    assert [line["step"] for line in metrics_of(run) if "train/loss" in line] == list(range(1, stopped + 3))
    assert (tmp_path / "log").read_text().count("scontrol") == 1


# The others -----------------------------------------------------------------------------------------------------------


def said(name: str, folder: Path, **variables: str | int) -> tuple[int, str]:
    """The exit code of a script whose launcher only says how it is called, and all that is said."""
    write = 'printf "%s" "${CODES-}" >> "$KVPATH_EXIT_CODES"'
    program(
        folder / "bin",
        "python3" if name == "torchrun" else name,
        f'#!/usr/bin/env bash\necho "called $*"\n{write}\nexit ${{CODE:-0}}\n',
    )
    path = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    ended = subprocess.run(
        [str(LAUNCHERS / name), "--run", "a"],
        env=environment() | path | {key: str(value) for key, value in variables.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no such file"),
        ("", "it names no host"),
        ("# none\n\n", "it names no host"),
        ("one slots=2\ntwo\n", "a line must be 'host slots=N', got 'two'"),
        ("one slots=0\n", "got 'one slots=0'"),
        ("one slots=2 max=3\n", "got 'one slots=2 max=3'"),
        ("one slots=2\none slots=1\n", "one is in it twice"),
        ("one slots=2\ntwo slots=2", "two does not answer to ssh, or asks for a password"),
    ],
)
def test_a_bad_hostfile_is_one_line(text: str | None, message: str, tmp_path: Path) -> None:
    program(tmp_path / "bin", "pdsh", "#!/usr/bin/env bash\n")
    program(tmp_path / "bin", "ssh", '#!/usr/bin/env bash\n[[ "$*" == *one* ]]\n')
    if text is not None:
        (tmp_path / "hosts").write_text(text)
    code, output = said("deepspeed", tmp_path, HOSTFILE=tmp_path / "hosts")
    assert (code, output.count("\n")) == (2, 1), output
    assert output.startswith(f"scripts/launch/deepspeed: error: HOSTFILE {tmp_path / 'hosts'}: ")
    assert message in output


def test_a_hostfile_that_answers_is_handed_on(tmp_path: Path) -> None:
    program(tmp_path / "bin", "pdsh", "#!/usr/bin/env bash\n")
    program(tmp_path / "bin", "ssh", "#!/usr/bin/env bash\n")
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=2\n# a remark\ntwo slots=2 # another")
    kvpath = "--no_local_rank --module kvpath fit --ckpt_path last --run a\n"
    code, output = said("deepspeed", tmp_path, HOSTFILE=hosts, MASTER_PORT=1234, CODE=75)
    assert output == f"called --master_port 1234 --hostfile {hosts} --master_addr one --no_ssh_check {kvpath}"
    assert code == 75
    code, output = said("deepspeed", tmp_path, HOSTFILE=hosts, NODE_RANK=1, MASTER_ADDR="10.0.0.1")
    assert "--master_addr 10.0.0.1 --no_ssh --node_rank 1 --no_ssh_check" in output
    assert said("deepspeed", tmp_path) == (0, f"called --master_port 29500 {kvpath}")


def test_a_port_of_torchrun_that_is_taken_or_does_not_answer_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, output = said("torchrun", tmp_path, MASTER_PORT=port)
        assert (code, output.count("\n")) == (2, 1), output
        assert f"127.0.0.1:{port} is taken by another process" in output
    port = free_port()
    code, output = said("torchrun", tmp_path, MASTER_PORT=port, NODES=2, NODE_RANK=1, PATIENCE=1)
    assert (code, output.count("\n")) == (2, 1), output
    assert f"127.0.0.1:{port} did not answer for 1 s" in output


def test_torchrun_ends_with_the_code_of_a_rank(tmp_path: Path) -> None:
    port = free_port()
    ended = {"1\n75\n": 75, "2\n2\n": 2, "130\n1\n": 130, "": 1, "0\n": 1}
    for codes, expected in {f"started\n{codes}": expected for codes, expected in ended.items()}.items():
        code, output = said("torchrun", tmp_path, MASTER_PORT=port, CODE=1, CODES=codes)
        assert code == expected, output
    code, output = said("torchrun", tmp_path, MASTER_PORT=port, CODE=1)
    assert code == 2
    assert f"not all of 1 machines came to 127.0.0.1:{port} within 300 s" in output.splitlines()[-1]
    assert "--rdzv_endpoint 127.0.0.1:" in output
    assert "-m -- kvpath fit --ckpt_path last --run a" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_torchrun_without_the_gpus_that_it_counts_is_one_line(tmp_path: Path) -> None:
    run = subprocess.run(
        [LAUNCHERS / "torchrun", "--run", "a"], env=environment(MASTER_PORT=free_port()), capture_output=True, text=True
    )
    (line,) = run.stderr.splitlines()
    assert run.returncode == 2
    assert line.startswith("scripts/launch/torchrun: error: RANKS_PER_NODE=gpu: ")


def test_the_scripts_can_be_run() -> None:
    for script in LAUNCHERS.iterdir():
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert os.access(script, os.X_OK) == (script.name != "shared.sh")
