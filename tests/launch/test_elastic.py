from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paraflow.errors import LaunchError
from paraflow.launch.elastic import LaunchOptions, launch, local_processes

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "paraflow.cli", "launch"]


def _script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text("import json, os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + text)
    return str(path)


def _environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**inherited, "PYTHONPATH": str(ROOT), **more}


def test_a_script_runs_as_under_torchrun(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import torch.distributed as dist, torch\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor(rank + 1); dist.all_reduce(total); dist.destroy_process_group()\n"
        "import __main__\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'TORCHELASTIC_USE_AGENT_STORE')\n"
        "places = [os.environ[name] for name in names]\n"
        "found = [sys.argv, sys.path[0], __file__, __name__, __main__.rank, int(total), places]\n"
        "open(sys.argv[1] + str(rank), 'w').write(json.dumps(found))\n",
    )
    arguments = ["same", "--lr", "1e-3", "-n", "5", "--", "-h"]
    found = []
    launchers = [
        [*COMMAND, "-n", "2"],
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    ]
    for launcher in launchers:
        subprocess.run([*launcher, "train.py", *arguments], cwd=tmp_path, check=True, env=_environment(), timeout=90)
        found.append([json.loads((tmp_path / f"same{rank}").read_text()) for rank in range(2)])
    assert found[0] == found[1]
    for rank, (argv, path, file, name, in_main, total, places) in enumerate(found[0]):
        assert argv == ["train.py", *arguments]
        assert (path, file, name, in_main, total) == (str(tmp_path), script, "__main__", rank, 3)
        assert places == [str(rank), "2", str(rank), "2", "True"]


def test_arguments_modules_and_threads_reach_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _script(tmp_path, "print(json.dumps([sys.argv, sys.path[0], os.environ['OMP_NUM_THREADS']]))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(LaunchOptions("train", ("a$$b", "${local_rank}", "-m"), processes="1", module=True)) == 0
    out, err = capfd.readouterr()
    argv, path, threads = json.loads(out)
    assert argv == [str(tmp_path / "train.py"), "a$$b", "${local_rank}", "-m"]
    assert path == str(tmp_path)
    assert int(threads) == os.cpu_count()
    assert err == ""
    assert "OMP_NUM_THREADS" not in os.environ


def test_the_first_failure_is_printed_last_and_ends_ranks_that_do_not_listen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ready = str(tmp_path / "ready")
    script = _script(
        tmp_path,
        "if rank == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"    open({ready!r}, 'w').close()\n"
        "    time.sleep(60)\n"
        f"while not os.path.exists({ready!r}):\n"
        "    time.sleep(0.01)\n"
        "def train():\n"
        "    raise ValueError('no such luck')\n"
        "train()\n",
    )
    begin = time.monotonic()
    assert launch(LaunchOptions(script, processes="2")) == 1
    assert time.monotonic() - begin < 10
    err = capfd.readouterr().err
    assert err.startswith("rank 1 (")  # the rank itself printed nothing
    block = err.splitlines()
    assert block[0].endswith("failed with exit code 1:")
    assert block[1] == "Traceback (most recent call last):"
    assert block[2].startswith(f'  File "{script}", line ')
    assert block[-1] == "ValueError: no such luck"
    assert "FAILED" not in "".join(block)
    assert "worker.py" not in "".join(block)


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "it was killed by SIGKILL."),
        ("sys.exit(143)", 143, "SystemExit: 143"),
        ("sys.exit('no data')", 1, "SystemExit: no data"),
        ("os._exit(3)", 3, "it ended its process itself, without an exception."),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_the_exit_status_is_that_of_the_rank_that_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], end: str, status: int, said: str
) -> None:
    script = _script(tmp_path, f"if rank == 1:\n    {end}\ntime.sleep(60)\n")
    assert launch(LaunchOptions(script, processes="2")) == status
    block = capfd.readouterr().err.rsplit("rank 1 (", 1)[1]
    assert f"failed with exit code {status}:\n" in block
    assert said in block


def test_a_rank_that_raises_and_hangs_on_its_way_out_has_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "import atexit\natexit.register(time.sleep, 60)\nraise ValueError('then nothing')\n"
    begin = time.monotonic()
    assert launch(LaunchOptions(_script(tmp_path, text), processes="1")) == 1
    assert time.monotonic() - begin < 10
    assert capfd.readouterr().err.endswith("ValueError: then nothing\n")


def test_one_error_on_all_ranks_is_printed_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(LaunchOptions(_script(tmp_path, "raise ValueError('the same')\n"), processes="2")) == 1
    err = capfd.readouterr().err
    assert err.count("ValueError: the same") == err.count("Traceback") == 1
    assert err.endswith("ValueError: the same\n")


def test_another_error_is_one_line_before_the_first_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = (
        f"gone = {str(tmp_path / 'gone')!r}\n"
        "if rank == 0:\n"
        "    import atexit\n"
        "    atexit.register(lambda: (open(gone, 'w').close(), time.sleep(1)))\n"
        "    raise ValueError('first')\n"
        "while not os.path.exists(gone):\n"
        "    time.sleep(0.01)\n"
        "raise RuntimeError('connection closed\\nby peer')\n"
    )
    assert launch(LaunchOptions(_script(tmp_path, text), processes="2")) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "rank 1: RuntimeError: connection closed"
    assert lines[1].startswith("rank 0 (")
    assert lines[-1] == "ValueError: first"
    assert sum("Traceback" in line or "peer" in line for line in lines) == 1


@pytest.mark.parametrize("traceback", [False, True])
def test_what_paraflow_refuses_is_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, traceback: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PARAFLOW_TRACEBACK", str(int(traceback)))
    text = "from paraflow.errors import PlanError\nclass Own(PlanError): pass\nraise Own('Write data=2.')\n"
    assert launch(LaunchOptions(_script(tmp_path, text), processes="1")) == 1
    err = capfd.readouterr().err
    assert ("Traceback" in err) is traceback
    assert traceback or err == "rank 0 refused: Own: Write data=2.\n"


def test_the_excepthook_of_the_script_is_called(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "sys.excepthook = lambda kind, *_: print('own hook', kind.__name__)\nraise ValueError('x')\n"
    assert launch(LaunchOptions(_script(tmp_path, text), processes="1")) == 1
    out, err = capfd.readouterr()
    assert out == "own hook ValueError\n"
    assert err.endswith("ValueError: x\n")


@pytest.mark.parametrize("own", [False, True])
def test_the_excepthook_of_a_process_group_is_not_taken_for_the_scripts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], own: bool
) -> None:
    text = (
        f"if {own}:\n    sys.excepthook = lambda kind, *_: print('own hook', kind.__name__)\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "raise ValueError('x')\n"
    )
    assert launch(LaunchOptions(_script(tmp_path, text), processes="1")) == 1
    out, err = capfd.readouterr()
    assert out == ("own hook ValueError\n" if own else "")
    assert err.startswith("rank 0 (")
    assert err.count("Traceback") == 1


def test_a_failure_that_a_restart_hides_is_still_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    raise ValueError('at first')\n"
    assert launch(LaunchOptions(_script(tmp_path, text), processes="1", max_restarts=1)) == 0
    assert capfd.readouterr().err.endswith("ValueError: at first\n")


def test_an_error_on_the_way_out_of_a_stopped_run_is_printed(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "def save(*_):\n"
        "    raise OSError('disk full')\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n",
    )
    pipe = subprocess.PIPE
    launcher = subprocess.Popen([*COMMAND, script], env=_environment(), stdout=pipe, stderr=pipe, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 143
    assert err.endswith("OSError: disk full\nparaflow launch: stopped by SIGTERM.\n")


def test_a_gloo_thread_that_still_wants_the_interpreter_does_not_abort_the_exit(tmp_path: Path) -> None:
    # What a DistributedDataParallel does by chance: it keeps the group alive while a thread of it has work to drop.
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch, torch.distributed as dist\n"
        "from paraflow.mesh import _start_process_group\n"
        "_start_process_group(torch.device('cpu'), 1)\n"
        "group = dist.group.WORLD\n"
        "def busy(_):\n"
        "    end = time.monotonic() + 1\n"
        "    while time.monotonic() < end: pass\n"
        "work = dist.all_reduce(torch.ones(1), async_op=True)\n"
        "work.get_future().then(busy)\n"
    )
    assert launch(LaunchOptions(str(script), processes="1")) == 0


def test_a_restart_starts_all_ranks_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "again = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint(again)\nif again == '0':\n    raise ValueError\n"
    assert launch(LaunchOptions(_script(tmp_path, text), processes="1", max_restarts=1)) == 0
    assert capfd.readouterr().out.split() == ["0", "1"]


def test_sigterm_reaches_the_ranks_and_comes_back_as_143(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "def save(*_):\n"
        "    open(f'{sys.argv[1]}/saved{rank}', 'w').close()\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open(f'{sys.argv[1]}/ready{rank}', 'w').close()\n"
        "time.sleep(60)\n",
    )
    launcher = subprocess.Popen(
        [*COMMAND, "-n", "2", script, str(tmp_path)],
        env=_environment(),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 30
    while len(list(tmp_path.glob("ready*"))) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 143
    assert err == "paraflow launch: stopped by SIGTERM.\n"
    assert len(list(tmp_path.glob("saved*"))) == 2


def test_the_number_of_processes() -> None:
    assert local_processes("3") == 3
    assert local_processes("cpu") == os.cpu_count()
    for text in ("0", "-1", "two", "1.5", ""):
        with pytest.raises(LaunchError, match="is no number of processes") as caught:
            local_processes(text)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (LaunchOptions("missing.py"), "There is no script 'missing.py' in "),
        (LaunchOptions(__file__, nodes="0"), "--nnodes 0 is no number of nodes"),
        (LaunchOptions(__file__, nodes="3:2"), "--nnodes 3:2 is no number of nodes"),
        (LaunchOptions(__file__, nodes="2"), "--nnodes 2 needs --rdzv-endpoint host:port"),
        (LaunchOptions(__file__, max_restarts=-1), "--max-restarts -1 is below 0"),
        (
            LaunchOptions(__file__, rendezvous_backend="static", rendezvous_endpoint="here:1"),
            "--rdzv-backend static needs --node-rank",
        ),
    ],
)
def test_options_that_make_no_sense_are_sentences(options: LaunchOptions, sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence) as caught:
        launch(options)
    assert caught.value.exit_code == 2
